/* Vectors of the machine's own width, in the compiler's portable form: one source for AVX-512, AVX2 and NEON.
 *
 * Everything is computed in float32. bfloat16 is read as the float32 whose upper half it is, and written
 * rounded to nearest even. Sums run in an order that depends on a row's own length alone, never on how many
 * rows there are: a row has the same bits in every batch.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define TILE_VECTORS 4
#elif defined(__AVX2__)
#define LANES 8
#define TILE_VECTORS 2
#else
#define LANES 4
#define TILE_VECTORS 4
#endif
/* Multiplications that are worth a second thread: several times what it costs to wake one. Where other programs
 * keep the cores busy, each wait for a thread may take a slice of the scheduler's time, so small loops have none. */
#define MANY_PRODUCTS ((int64_t)1 << 21)
#define TILE_ROWS 6
#define TILE_COLUMNS (LANES * TILE_VECTORS)
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE vec all(float x) { return x - (vec){0}; }

/* Lanes of a where the mask is -1, of b where it is 0. */
INLINE vec choose(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

INLINE float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float load1(const void *p, int64_t i, int is_bf16) {
    return is_bf16 ? widen(((const bf16 *)p)[i]) : ((const float *)p)[i];
}

INLINE void store1(void *p, int64_t i, int is_bf16, float x) {
    if (is_bf16)
        ((bf16 *)p)[i] = narrow(x);
    else
        ((float *)p)[i] = x;
}

INLINE vec load(const void *p, int64_t i, int is_bf16) {
    if (!is_bf16) return *(const vec *)((const float *)p + i);
    return (vec)(__builtin_convertvector(*(const hvec *)((const bf16 *)p + i), uvec) << 16);
}

INLINE void store(void *p, int64_t i, int is_bf16, vec x) {
    if (!is_bf16) {
        *(vec *)((float *)p + i) = x;
        return;
    }
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec is_nan = (uvec)(x != x);
    *(hvec *)((bf16 *)p + i) = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), hvec);
}

/* The sums of the lanes of eight vectors, each in the same fixed order. */
INLINE void sum_lanes8(const vec x[8], float sums[8]) {
#if defined(__AVX2__)
    __m256 half[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
#if defined(__AVX512F__)
        half[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)x[i]),
                                _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)x[i], 1)));
#else
        half[i] = (__m256)x[i];
#endif
    __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(half[4], half[5]), _mm256_hadd_ps(half[6], half[7]));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(low), _mm256_extractf128_ps(low, 1)));
    _mm_storeu_ps(sums + 4, _mm_add_ps(_mm256_castps256_ps128(high), _mm256_extractf128_ps(high, 1)));
#else
    for (int i = 0; i < 8; i++) {
        float sum = 0.0f;
        for (int lane = 0; lane < LANES; lane++) sum += x[i][lane];
        sums[i] = sum;
    }
#endif
}

INLINE float sum_lanes(vec x) {
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

/* e^x to about one unit in the last place; NaN stays NaN, and what leaves the range becomes 0 or infinity. */
INLINE vec exp_of(vec x) {
    const float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    vec limited = choose(x > 89.0f, all(89.0f), x);
    limited = choose(limited < -104.0f, all(-104.0f), limited);
    ivec n = __builtin_convertvector(limited * log2e + choose(limited < 0.0f, all(-0.5f), all(0.5f)), ivec);
    vec whole = __builtin_convertvector(n, vec);
    vec r = limited - whole * ln2_high - whole * ln2_low;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    /* 2^n in two steps: n reaches from -150 to 128. */
    ivec half = n >> 1, rest = n - half;
    p = p * (vec)((half + 127) << 23) * (vec)((rest + 127) << 23);
    return choose(x != x, x, p);
}

INLINE float exp_of1(float x) { return exp_of(all(x))[0]; }

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exp_of(-x)); }

/* Memory of one thread for the length of a call. Never returned; grows to the largest call. */
static float *scratch(int which, int64_t floats) {
    static __thread float *kept[4];
    static __thread int64_t sizes[4];
    if (sizes[which] < floats) {
        free(kept[which]);
        void *fresh = NULL;
        sizes[which] = 0;
        kept[which] = NULL;
        if (posix_memalign(&fresh, 64, sizeof(float) * (size_t)floats)) return NULL;
        kept[which] = fresh;
        sizes[which] = floats;
    }
    return kept[which];
}
