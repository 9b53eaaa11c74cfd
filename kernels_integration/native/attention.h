/* Attention over chosen slots of the cache, and the choice. Nothing is gathered: rows of the cache are read
 * where they lie. */

#define HEADS_AT_ONCE 4
#define TOKENS_AT_ONCE 2

/* scores[h][t] = q[h] . key[t], of `heads` rows of q and `tokens` keys. */
INLINE void dots(int heads, int tokens, const float *q, int64_t dim, const char *const *keys, int is_bf16,
                 float *scores, int64_t scores_step) {
    vec acc[HEADS_AT_ONCE][TOKENS_AT_ONCE];
#pragma GCC unroll 8
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) acc[h][t] = all(0.0f);
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        vec key[TOKENS_AT_ONCE];
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) key[t] = load(keys[t], i, is_bf16);
#pragma GCC unroll 8
        for (int h = 0; h < heads; h++) {
            vec part = load(q, h * dim + i, 0);
#pragma GCC unroll 8
            for (int t = 0; t < tokens; t++) acc[h][t] += part * key[t];
        }
    }
    vec flat[HEADS_AT_ONCE * TOKENS_AT_ONCE];
    float sums[HEADS_AT_ONCE * TOKENS_AT_ONCE];
#pragma GCC unroll 8
    for (int h = 0; h < HEADS_AT_ONCE; h++)
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS_AT_ONCE; t++)
            flat[h * TOKENS_AT_ONCE + t] = h < heads && t < tokens ? acc[h][t] : all(0.0f);
    sum_lanes8(flat, sums);
    for (int h = 0; h < heads; h++)
        for (int t = 0; t < tokens; t++) {
            float sum = sums[h * TOKENS_AT_ONCE + t];
            for (int64_t j = i; j < dim; j++) sum = fmaf(q[h * dim + j], load1(keys[t], j, is_bf16), sum);
            scores[h * scores_step + t] = sum;
        }
}

#define DOTS_CASE(HEADS, TOKENS)                                             \
    case HEADS * 4 + TOKENS:                                                 \
        if (is_bf16)                                                         \
            dots(HEADS, TOKENS, q, dim, keys, 1, scores, scores_step);       \
        else                                                                 \
            dots(HEADS, TOKENS, q, dim, keys, 0, scores, scores_step);       \
        break;

/* scores [heads, n] of q [heads, dim] and the keys in slots[0..n - 1]. */
static void all_dots(const float *q, int64_t heads, int64_t dim, const void *cache, int is_bf16,
                     const int64_t *slots, int64_t n, float *all_scores, int64_t scores_step) {
    int64_t row_bytes = dim * (is_bf16 ? 2 : 4);
    for (int64_t t = 0; t < n; t += TOKENS_AT_ONCE) {
        const char *keys[TOKENS_AT_ONCE];
        int tokens = n - t < TOKENS_AT_ONCE ? (int)(n - t) : TOKENS_AT_ONCE;
        for (int i = 0; i < tokens; i++) keys[i] = (const char *)cache + slots[t + i] * row_bytes;
        for (int64_t head = 0; head < heads; head += HEADS_AT_ONCE) {
            int at_once = heads - head < HEADS_AT_ONCE ? (int)(heads - head) : HEADS_AT_ONCE;
            float *scores = all_scores + head * scores_step + t;
            const float *first = q;
            q = first + head * dim;
            switch (at_once * 4 + tokens) {
                DOTS_CASE(1, 1) DOTS_CASE(2, 1) DOTS_CASE(3, 1) DOTS_CASE(4, 1)
                DOTS_CASE(1, 2) DOTS_CASE(2, 2) DOTS_CASE(3, 2) DOTS_CASE(4, 2)
            }
            q = first;
        }
    }
}

/* Sums [rows, columns] of p[r][k] * cache[slots[k]][column..], as `tile` of products.h. */
INLINE void mix(int rows, int vectors, const float *p, int64_t p_step, int64_t n, const void *cache, int is_bf16,
                const int64_t *slots, int64_t row_step, int64_t column, const float *factors, void *out,
                int64_t out_step, int out_is_bf16) {
    vec acc[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) acc[r][v] = all(0.0f);
    for (int64_t k = 0; k < n; k++) {
        int64_t place = slots[k] * row_step + column;
        vec value[TILE_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) value[v] = load(cache, place + v * LANES, is_bf16);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vec factor = all(p[r * p_step + k]);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) acc[r][v] += factor * value[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            store(out, r * out_step + column + v * LANES, out_is_bf16, acc[r][v] * factors[r]);
}

#define MIX_CASE(ROWS, VECTORS)                                                                        \
    case ROWS * 8 + VECTORS:                                                                           \
        if (is_bf16)                                                                                   \
            mix(ROWS, VECTORS, p, p_step, n, cache, 1, slots, row_step, column, factors, out, columns, \
                out_is_bf16);                                                                          \
        else                                                                                           \
            mix(ROWS, VECTORS, p, p_step, n, cache, 0, slots, row_step, column, factors, out, columns, \
                out_is_bf16);                                                                          \
        break;
#define MIX_CASES(VECTORS) \
    MIX_CASE(1, VECTORS) MIX_CASE(2, VECTORS) MIX_CASE(3, VECTORS) MIX_CASE(4, VECTORS) MIX_CASE(5, VECTORS) MIX_CASE(6, VECTORS)

static void mix_rows(int rows, const float *p, int64_t p_step, int64_t n, const void *cache, int is_bf16,
                     const int64_t *slots, int64_t row_step, int64_t columns, const float *factors, void *out,
                     int out_is_bf16) {
    int64_t column = 0;
    for (int64_t left = columns / LANES; left > 0;) {
        int vectors = left < TILE_VECTORS ? (int)left : TILE_VECTORS;
        switch (rows * 8 + vectors) {
            MIX_CASES(1)
            MIX_CASES(2)
#if TILE_VECTORS == 4
            MIX_CASES(3)
            MIX_CASES(4)
#endif
        }
        column += vectors * LANES;
        left -= vectors;
    }
    for (; column < columns; column++)
        for (int r = 0; r < rows; r++) {
            float sum = 0.0f;
            for (int64_t k = 0; k < n; k++)
                sum = fmaf(p[r * p_step + k], load1(cache, slots[k] * row_step + column, is_bf16), sum);
            store1(out, r * columns + column, out_is_bf16, sum * factors[r]);
        }
}

/* p = e^(score - largest), in place; returns the largest and their sum. */
static float softmax_row(float *scores, int64_t n, float *sum_out) {
    vec highest = all(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec part = load(scores, i, 0);
        highest = choose(part > highest, part, highest);
    }
    float peak = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) peak = highest[lane] > peak ? highest[lane] : peak;
    for (int64_t j = i; j < n; j++) peak = scores[j] > peak ? scores[j] : peak;
    vec sums = all(0.0f);
    for (i = 0; i + LANES <= n; i += LANES) {
        vec part = exp_of(load(scores, i, 0) - peak);
        store(scores, i, 0, part);
        sums += part;
    }
    float sum = sum_lanes(sums);
    for (; i < n; i++) {
        scores[i] = exp_of1(scores[i] - peak);
        sum += scores[i];
    }
    *sum_out = sum;
    return peak;
}

static int attend_row(const void *q, int q_is_bf16, int64_t q_head_step, int64_t heads, int64_t dim,
                      int64_t latent_rank, const void *indices, int is_int64, int64_t n, const void *cache,
                      int cache_is_bf16, int64_t num_slots, void *o, int o_is_bf16, float *lse, float scale) {
    int64_t size = o_is_bf16 ? 2 : 4;
    if (!n) {
        memset(o, 0, (size_t)(heads * latent_rank * size));
        for (int64_t h = 0; h < heads; h++) lse[h] = -INFINITY;
        return 0;
    }
    int64_t *slots = (int64_t *)scratch(1, 2 * n);
    float *queries = scratch(2, heads * dim + heads), *p = scratch(3, heads * n);
    if (!slots || !queries || !p) return NO_MEMORY;
    for (int64_t i = 0; i < n; i++)
        slots[i] = is_int64 ? ((const int64_t *)indices)[i] : (int64_t)((const int32_t *)indices)[i];
    if (!are_inside(slots, n, num_slots)) return OUT_OF_RANGE;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < dim; i++) queries[h * dim + i] = scale * load1(q, h * q_head_step + i, q_is_bf16);
    all_dots(queries, heads, dim, cache, cache_is_bf16, slots, n, p, n);
    float *factors = queries + heads * dim;
    for (int64_t h = 0; h < heads; h++) {
        float sum, peak = softmax_row(p + h * n, n, &sum);
        lse[h] = peak + logf(sum);
        factors[h] = 1.0f / sum;
    }
    for (int64_t h = 0; h < heads; h += TILE_ROWS) {
        int rows = heads - h < TILE_ROWS ? (int)(heads - h) : TILE_ROWS;
        mix_rows(rows, p + h * n, n, n, cache, cache_is_bf16, slots, dim, latent_rank, factors + h,
                 (char *)o + h * latent_rank * size, o_is_bf16);
    }
    return 0;
}

/* o [T, H, C] contiguous, lse [T, H] contiguous: rows of q over indices[indptr[t]..indptr[t + 1] - 1]. */
int attend(const void *q, int64_t q_is_bf16, int64_t q_step, int64_t q_head_step, int64_t n, int64_t heads,
           int64_t dim, int64_t latent_rank, const int32_t *indptr, const void *indices, int64_t is_int64,
           const void *cache, int64_t cache_is_bf16, int64_t num_slots, void *o, int64_t o_is_bf16, float *lse,
           float scale, int64_t threads) {
    int failure = 0;
    int64_t num_products = n ? (indptr[n] - indptr[0]) * heads * (dim + latent_rank) : 0;
    int is_worth_it = threads > 1 && n > 1 && num_products > MANY_PRODUCTS;
#pragma omp parallel for schedule(dynamic) num_threads((int)threads) if (is_worth_it)
    for (int64_t row = 0; row < n; row++) {
        int result = attend_row((const char *)q + row * q_step * (q_is_bf16 ? 2 : 4), (int)q_is_bf16, q_head_step,
                                heads, dim, latent_rank, (const char *)indices + indptr[row] * (is_int64 ? 8 : 4),
                                (int)is_int64, indptr[row + 1] - indptr[row], cache, (int)cache_is_bf16, num_slots,
                                (char *)o + row * heads * latent_rank * (o_is_bf16 ? 2 : 4), (int)o_is_bf16,
                                lse + row * heads, scale);
        if (result) failure = result;
    }
    return failure;
}

/* Numbers whose order is that of the scores: NaN as -inf, -0.0 as 0.0. */
INLINE uint32_t order_of(float score) {
    if (score != score) score = -INFINITY;
    score += 0.0f;
    uint32_t bits;
    memcpy(&bits, &score, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The k-th largest of n keys, and how many of those equal to it are among the k largest. */
static uint32_t kth_largest(const uint32_t *keys, int64_t n, int64_t k, int64_t *free_out) {
    uint32_t prefix = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256] = {0};
        for (int64_t i = 0; i < n; i++)
            if ((keys[i] & mask) == prefix) counts[keys[i] >> shift & 255]++;
        int digit = 255;
        while (counts[digit] < k) k -= counts[digit--];
        prefix |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    *free_out = k;
    return prefix;
}

/* The slots of one row: the topk best of its visible tokens, in order of position. */
static int select_row(const void *q, int q_is_bf16, const float *weights, int64_t heads, int64_t dim,
                      const void *cache, int cache_is_bf16, const int64_t *slots, int64_t begin, int64_t end,
                      int64_t topk, int64_t *chosen) {
    int64_t n = end - begin;
    slots += begin;
    if (n <= topk) {
        memcpy(chosen, slots, sizeof(int64_t) * (size_t)n);
        return 0;
    }
    float *queries = scratch(1, heads * dim), *per_head = scratch(2, heads * n);
    uint32_t *keys = (uint32_t *)scratch(3, n);
    if (!queries || !per_head || !keys) return NO_MEMORY;
    float scale = 1.0f / sqrtf((float)dim);
    for (int64_t i = 0; i < heads * dim; i++) queries[i] = scale * load1(q, i, q_is_bf16);
    all_dots(queries, heads, dim, cache, cache_is_bf16, slots, n, per_head, n);
    for (int64_t t = 0; t < n; t++) {
        float score = 0.0f;
        for (int64_t h = 0; h < heads; h++) {
            float dot = per_head[h * n + t];
            score += weights[h] * (dot < 0.0f ? 0.0f : dot);
        }
        keys[t] = order_of(score);
    }
    int64_t free_ties;
    uint32_t threshold = kth_largest(keys, n, topk, &free_ties);
    for (int64_t t = 0; t < n; t++) {
        if (keys[t] < threshold || (keys[t] == threshold && free_ties-- <= 0)) continue;
        *chosen++ = slots[t];
    }
    return 0;
}

/* The rows of one group, B requests of `per_request` rows each: chosen slots and where each row's begin.
 * q [T, H, D] and weights [T, H] contiguous. slots [B, length]; visible_from and visible_to of the rows. indptr[0] is
 * given; indptr[1..rows] are written, and with them the slots from chosen[indptr[0]] on. */
int select_topk(const void *q, int64_t q_is_bf16, const float *weights, int64_t heads, int64_t dim,
                const void *cache, int64_t cache_is_bf16, int64_t num_slots, const int64_t *slots, int64_t length,
                int64_t num_requests, int64_t per_request, const int64_t *visible_from, const int64_t *visible_to,
                int64_t topk, int32_t *indptr, int64_t *chosen, int64_t threads) {
    int64_t rows = num_requests * per_request;
    if (!are_inside(slots, num_requests * length, num_slots)) return OUT_OF_RANGE;
    for (int64_t row = 0; row < rows; row++) {
        int64_t end = visible_to[row] < length ? visible_to[row] : length;
        int64_t seen = end > visible_from[row] ? end - visible_from[row] : 0;
        indptr[row + 1] = indptr[row] + (int32_t)(seen < topk ? seen : topk);
    }
    int failure = 0;
    int is_worth_it = threads > 1 && rows > 1 && rows * length * heads * dim > MANY_PRODUCTS;
#pragma omp parallel for schedule(dynamic) num_threads((int)threads) if (is_worth_it)
    for (int64_t row = 0; row < rows; row++) {
        int64_t end = visible_to[row] < length ? visible_to[row] : length;
        if (end <= visible_from[row]) continue;
        int result = select_row((const char *)q + row * heads * dim * (q_is_bf16 ? 2 : 4), (int)q_is_bf16,
                                weights + row * heads, heads, dim, cache, (int)cache_is_bf16,
                                slots + row / per_request * length, visible_from[row], end, topk,
                                chosen + indptr[row]);
        if (result) failure = result;
    }
    return failure;
}
