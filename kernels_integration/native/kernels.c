/* The operations of `kernels_integration.backend` on a CPU. Called by `library.py`, which gives legal arguments.
 *
 * Steps are in elements. "is_bf16" says what the tensor beside it holds; all else is float32 or int64.
 * A function that can fail returns below 0: NO_MEMORY, or OUT_OF_RANGE for a slot outside the cache.
 */
#include "vectors.h"
#include "products.h"

enum { NO_MEMORY = -1, OUT_OF_RANGE = -2, HAS_NAN = -3 };

/* What an operation's bits depend on beside its source: the order of sums follows the width of vectors. */
int64_t lanes(void) { return LANES; }
int64_t tile_columns(void) { return TILE_COLUMNS; }

int linear(const void *x, int64_t x_is_bf16, int64_t x_step, int64_t n, int64_t depth, const void *w,
           int64_t w_is_bf16, int64_t columns, void *out, int64_t out_is_bf16, int64_t threads) {
    if (!n) return 0;
    Matrix matrix = {w, (int)w_is_bf16, TILE_COLUMNS, TILE_COLUMNS * depth, 1};
    const float *rows = as_float(x, (int)x_is_bf16, &x_step, n, depth, 0);
    if (!rows) return NO_MEMORY;
    product(rows, x_step, n, depth, &matrix, columns, out, columns, (int)out_is_bf16, (int)threads);
    return 0;
}

/* x [T, H, A] and w [H, A, B], contiguous, to out [T, H, B]. */
int head_product(const void *x, int64_t x_is_bf16, int64_t x_step, int64_t x_head_step, int64_t n, int64_t heads,
                 int64_t depth, const void *w, int64_t w_is_bf16, int64_t columns, void *out, int64_t out_is_bf16,
                 int64_t out_step, int64_t out_head_step) {
    for (int64_t head = 0; n && head < heads; head++) {
        int64_t step = x_step;
        const char *part = (const char *)x + head * x_head_step * (x_is_bf16 ? 2 : 4);
        const float *rows = as_float(part, (int)x_is_bf16, &step, n, depth, 0);
        if (!rows) return NO_MEMORY;
        const char *values = (const char *)w + head * depth * columns * (w_is_bf16 ? 2 : 4);
        Matrix matrix = {values, (int)w_is_bf16, columns, TILE_COLUMNS, 0};
        char *to = (char *)out + head * out_head_step * (out_is_bf16 ? 2 : 4);
        product(rows, step, n, depth, &matrix, columns, to, out_step, (int)out_is_bf16, 1);
    }
    return 0;
}

/* norm * x / rms(x), to out, which may be x. */
INLINE void norm_row(const void *x, int is_bf16, int64_t dim, const float *norm, float eps, void *out,
                     int out_is_bf16) {
    vec squares = all(0.0f);
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        vec part = load(x, i, is_bf16);
        squares += part * part;
    }
    float sum = sum_lanes(squares);
    for (int64_t j = i; j < dim; j++) {
        float one = load1(x, j, is_bf16);
        sum += one * one;
    }
    float factor = 1.0f / sqrtf(sum / (float)dim + eps);
    for (i = 0; i + LANES <= dim; i += LANES)
        store(out, i, out_is_bf16, load(x, i, is_bf16) * factor * load(norm, i, 0));
    for (; i < dim; i++) store1(out, i, out_is_bf16, load1(x, i, is_bf16) * factor * norm[i]);
}

/* out[n, dim] = norm of x; with an addend, x += addend first, in place. out is contiguous. */
void rms_norm(void *x, const void *addend, int64_t is_bf16, int64_t x_step, int64_t addend_step, int64_t n,
              int64_t dim, const float *norm, float eps, void *out) {
    int64_t size = is_bf16 ? 2 : 4;
    for (int64_t row = 0; row < n; row++) {
        char *values = (char *)x + row * x_step * size;
        if (addend) {
            const char *added = (const char *)addend + row * addend_step * size;
            int64_t i = 0;
            for (; i + LANES <= dim; i += LANES)
                store(values, i, (int)is_bf16, load(values, i, (int)is_bf16) + load(added, i, (int)is_bf16));
            for (; i < dim; i++)
                store1(values, i, (int)is_bf16, load1(values, i, (int)is_bf16) + load1(added, i, (int)is_bf16));
        }
        char *to = (char *)out + row * dim * size;
        if (is_bf16)
            norm_row(values, 1, dim, norm, eps, to, 1);
        else
            norm_row(values, 0, dim, norm, eps, to, 0);
    }
}

/* Neighbouring pairs of x as complex numbers, times those of rope [dim]. */
INLINE void rotate_row(const void *x, int is_bf16, int64_t dim, const float *rope, void *out, int out_is_bf16) {
    for (int64_t i = 0; i < dim; i += 2) {
        float real = load1(x, i, is_bf16), imaginary = load1(x, i + 1, is_bf16);
        store1(out, i, out_is_bf16, real * rope[i] - imaginary * rope[i + 1]);
        store1(out, i + 1, out_is_bf16, real * rope[i + 1] + imaginary * rope[i]);
    }
}

/* x and out [T, M, dim] of one dtype, rope [T, dim]; out may be x. */
void rotate(const void *x, int64_t is_bf16, int64_t x_step, int64_t x_inner_step, int64_t n, int64_t inner,
            int64_t dim, const float *rope, void *out, int64_t out_step, int64_t out_inner_step) {
    int64_t size = is_bf16 ? 2 : 4;
    for (int64_t row = 0; row < n; row++)
        for (int64_t m = 0; m < inner; m++) {
            const char *from = (const char *)x + (row * x_step + m * x_inner_step) * size;
            char *to = (char *)out + (row * out_step + m * out_inner_step) * size;
            if (is_bf16)
                rotate_row(from, 1, dim, rope + row * dim, to, 1);
            else
                rotate_row(from, 0, dim, rope + row * dim, to, 0);
        }
}

static int are_inside(const int64_t *slots, int64_t n, int64_t num_slots) {
    for (int64_t i = 0; i < n; i++)
        if (slots[i] < 0 || slots[i] >= num_slots) return 0;
    return 1;
}

/* Row rows[i] of latents [T, C + R]: first C normed, rest rotated, stored at slots[i]. */
int write_latents(const void *latents, int64_t is_bf16, int64_t step, int64_t latent_rank, int64_t rope_dim,
                  const float *norm, float eps, const float *rope, const int64_t *rows, const int64_t *slots,
                  int64_t n, void *storage, int64_t storage_is_bf16, int64_t num_slots) {
    if (!are_inside(slots, n, num_slots)) return OUT_OF_RANGE;
    int64_t width = latent_rank + rope_dim;
    for (int64_t i = 0; i < n; i++) {
        const char *from = (const char *)latents + rows[i] * step * (is_bf16 ? 2 : 4);
        char *to = (char *)storage + slots[i] * width * (storage_is_bf16 ? 2 : 4);
        norm_row(from, (int)is_bf16, latent_rank, norm, eps, to, (int)storage_is_bf16);
        rotate_row(from + latent_rank * (is_bf16 ? 2 : 4), (int)is_bf16, rope_dim, rope + rows[i] * rope_dim,
                   to + latent_rank * (storage_is_bf16 ? 2 : 4), (int)storage_is_bf16);
    }
    return 0;
}

/* Row rows[i] of keys [T, D]: LayerNorm, first rope_dim rotated, stored at slots[i]. */
int write_index_keys(const void *keys, int64_t is_bf16, int64_t step, int64_t dim, int64_t rope_dim,
                     const float *norm, const float *bias, float eps, const float *rope, const int64_t *rows,
                     const int64_t *slots, int64_t n, void *storage, int64_t storage_is_bf16, int64_t num_slots) {
    if (!are_inside(slots, n, num_slots)) return OUT_OF_RANGE;
    float *normed = scratch(0, dim);
    if (!normed) return NO_MEMORY;
    for (int64_t i = 0; i < n; i++) {
        const char *from = (const char *)keys + rows[i] * step * (is_bf16 ? 2 : 4);
        float sum = 0.0f, squares = 0.0f;
        for (int64_t j = 0; j < dim; j++) sum += load1(from, j, (int)is_bf16);
        float mean = sum / (float)dim;
        for (int64_t j = 0; j < dim; j++) {
            float off = load1(from, j, (int)is_bf16) - mean;
            squares += off * off;
        }
        float factor = 1.0f / sqrtf(squares / (float)dim + eps);
        for (int64_t j = 0; j < dim; j++)
            normed[j] = (load1(from, j, (int)is_bf16) - mean) * factor * norm[j] + bias[j];
        rotate_row(normed, 0, rope_dim, rope + rows[i] * rope_dim, normed, 0);
        for (int64_t j = 0; j < dim; j++) store1(storage, slots[i] * dim + j, (int)storage_is_bf16, normed[j]);
    }
    return 0;
}

INLINE void swiglu_row(const void *gate_up, int is_bf16, int64_t dim, void *out, int out_is_bf16) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        vec gate = load(gate_up, i, is_bf16);
        store(out, i, out_is_bf16, gate * sigmoid(gate) * load(gate_up, dim + i, is_bf16));
    }
    for (; i < dim; i++) {
        float gate = load1(gate_up, i, is_bf16);
        store1(out, i, out_is_bf16, gate / (1.0f + exp_of1(-gate)) * load1(gate_up, dim + i, is_bf16));
    }
}

/* out [n, dim] of gate_up [n, 2 dim], both contiguous. */
void swiglu(const void *gate_up, int64_t is_bf16, int64_t n, int64_t dim, void *out) {
    int64_t size = is_bf16 ? 2 : 4;
    for (int64_t row = 0; row < n; row++)
        swiglu_row((const char *)gate_up + row * 2 * dim * size, (int)is_bf16, dim, (char *)out + row * dim * size,
                   (int)is_bf16);
}

/* The index of the largest value not yet taken, the first of equal ones; taken ones become -inf. */
INLINE int64_t take_best(float *values, uint8_t *is_taken, int64_t n) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (!is_taken[i] && (best < 0 || values[i] > values[best])) best = i;
    is_taken[best] = 1;
    return best;
}

/* "noaux_tc", of x [n, depth] by a weight in panels: experts and weights [n, topk]. */
int route(const void *x, int64_t is_bf16, int64_t x_step, int64_t n, int64_t depth, const float *weight,
          const float *bias, int64_t num_experts, int64_t topk, int64_t num_groups, int64_t topk_group,
          int64_t is_normalised, float scaling, int64_t *experts, float *weights) {
    if (!n) return 0;
    const float *rows = as_float(x, (int)is_bf16, &x_step, n, depth, 0);
    float *p = scratch(1, n * num_experts + LANES + 2 * num_experts + num_groups);
    if (!rows || !p) return NO_MEMORY;
    Matrix matrix = {weight, 0, TILE_COLUMNS, TILE_COLUMNS * depth, 1};
    product(rows, x_step, n, depth, &matrix, num_experts, p, num_experts, 0, 1);
    for (int64_t i = 0; i < n * num_experts; i += LANES) store(p, i, 0, sigmoid(load(p, i, 0)));
    float *choice = p + n * num_experts + LANES, *groups = choice + num_experts;
    uint8_t *is_taken = (uint8_t *)(groups + num_groups);
    int64_t group_size = num_experts / num_groups;
    for (int64_t row = 0; row < n; row++) {
        float *mine = p + row * num_experts;
        for (int64_t e = 0; e < num_experts; e++) choice[e] = mine[e] + bias[e];
        memset(is_taken, 0, (size_t)num_experts);
        if (topk_group < num_groups) {
            for (int64_t g = 0; g < num_groups; g++) {
                float *part = choice + g * group_size;
                int64_t first = take_best(part, is_taken, group_size);
                int64_t second = take_best(part, is_taken, group_size);
                groups[g] = part[first] + part[second];
                memset(is_taken, 0, (size_t)group_size);
            }
            memset(is_taken, 0, (size_t)num_groups);
            uint8_t *is_kept = is_taken + num_groups;
            memset(is_kept, 0, (size_t)num_groups);
            for (int64_t g = 0; g < topk_group; g++) is_kept[take_best(groups, is_taken, num_groups)] = 1;
            for (int64_t g = 0; g < num_groups; g++)
                if (!is_kept[g])
                    for (int64_t e = 0; e < group_size; e++) choice[g * group_size + e] = -INFINITY;
            memset(is_taken, 0, (size_t)num_experts);
        }
        float sum = 0.0f;
        for (int64_t j = 0; j < topk; j++) {
            int64_t best = take_best(choice, is_taken, num_experts);
            experts[row * topk + j] = best;
            weights[row * topk + j] = mine[best];
            sum += mine[best];
        }
        float factor = is_normalised ? scaling / (sum + 1e-20f) : scaling;
        for (int64_t j = 0; j < topk; j++) weights[row * topk + j] *= factor;
    }
    return 0;
}

/* out[t] += sum over j of weights[t, j] E(x[t]), of the local experts, in the experts' order. */
int experts(const void *x, int64_t is_bf16, int64_t x_step, int64_t n, int64_t hidden, const int64_t *chosen,
            const float *weights, int64_t topk, const void *gate_up, const void *down, int64_t w_is_bf16,
            int64_t width, int64_t first_expert, int64_t num_local, void *out, int64_t out_step, int64_t threads) {
    if (!n) return 0;
    int64_t panels_in = (2 * width + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS;
    int64_t panels_out = (hidden + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS;
    int64_t *entries = (int64_t *)scratch(1, 2 * (n * topk + num_local + 2));
    float *work = scratch(2, n * (2 * hidden + 3 * width));
    float *sums = is_bf16 ? scratch(3, n * hidden) : out;
    if (!entries || !work || !sums) return NO_MEMORY;
    int64_t sums_step = is_bf16 ? hidden : out_step;
    if (is_bf16) {
        for (int64_t row = 0; row < n; row++)
            for (int64_t i = 0; i < hidden; i++) sums[row * hidden + i] = widen(((bf16 *)out)[row * out_step + i]);
    }
    int64_t *ends = entries + n * topk;
    memset(ends, 0, sizeof(int64_t) * (size_t)(num_local + 1));
    for (int64_t i = 0; i < n * topk; i++) {
        int64_t e = chosen[i] - first_expert;
        if (e >= 0 && e < num_local) ends[e + 1]++;
    }
    for (int64_t e = 0; e < num_local; e++) ends[e + 1] += ends[e];
    for (int64_t i = 0; i < n * topk; i++) {
        int64_t e = chosen[i] - first_expert;
        if (e >= 0 && e < num_local) entries[ends[e]++] = i;
    }
    float *rows = work, *inner = rows + n * hidden, *active = inner + n * 2 * width, *result = active + n * width;
    int64_t weight_size = w_is_bf16 ? 2 : 4;
    for (int64_t e = 0, begin = 0; e < num_local; begin = ends[e++]) {
        int64_t count = ends[e] - begin;
        if (!count) continue;
        for (int64_t i = 0; i < count; i++) {
            int64_t from = entries[begin + i] / topk * x_step;
            if (is_bf16)
                for (int64_t k = 0; k < hidden; k++) rows[i * hidden + k] = widen(((const bf16 *)x)[from + k]);
            else
                memcpy(rows + i * hidden, (const float *)x + from, sizeof(float) * (size_t)hidden);
        }
        Matrix in = {(const char *)gate_up + e * panels_in * hidden * weight_size, (int)w_is_bf16, TILE_COLUMNS,
                     TILE_COLUMNS * hidden, 1};
        Matrix back = {(const char *)down + e * panels_out * width * weight_size, (int)w_is_bf16, TILE_COLUMNS,
                       TILE_COLUMNS * width, 1};
        product(rows, hidden, count, hidden, &in, 2 * width, inner, 2 * width, 0, (int)threads);
        for (int64_t i = 0; i < count; i++) swiglu_row(inner + i * 2 * width, 0, width, active + i * width, 0);
        product(active, width, count, width, &back, hidden, result, hidden, 0, (int)threads);
        for (int64_t i = 0; i < count; i++) {
            float weight = weights[entries[begin + i]];
            float *to = sums + entries[begin + i] / topk * sums_step;
            for (int64_t k = 0; k < hidden; k++) to[k] += weight * result[i * hidden + k];
        }
    }
    if (is_bf16)
        for (int64_t row = 0; row < n; row++)
            for (int64_t i = 0; i < hidden; i++) ((bf16 *)out)[row * out_step + i] = narrow(sums[row * hidden + i]);
    return 0;
}

#include "attention.h"
#include "noise.h"
