/* Matrix products: rows of x in float32, a weight in panels or as plain rows, tiles of 6 rows by 4 vectors.
 *
 * Every output is the sum over k in ascending order of one fused multiply-add each, whatever tile it is in.
 */
typedef struct {
    const void *values;
    int is_bf16;
    int64_t row_step;   /* elements from row k to row k + 1 */
    int64_t panel_step; /* elements from one panel of TILE_COLUMNS columns to the next */
    int is_padded;      /* the last panel is whole, filled with zeros */
} Matrix;

INLINE void tile(int rows, int vectors, const float *x, int64_t x_step, int64_t depth, const void *w, int is_bf16,
                 int64_t row_step, vec sums[TILE_ROWS][TILE_VECTORS]) {
    vec acc[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) acc[r][v] = all(0.0f);
    for (int64_t k = 0; k < depth; k++) {
        vec column[TILE_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) column[v] = load(w, k * row_step + v * LANES, is_bf16);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vec factor = all(x[r * x_step + k]);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) acc[r][v] += factor * column[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[r][v] = acc[r][v];
}

#define TILE_CASE(ROWS, VECTORS)                                                                  \
    case ROWS * 8 + VECTORS:                                                                      \
        if (is_bf16)                                                                              \
            tile(ROWS, VECTORS, x, x_step, depth, w, 1, row_step, sums);                          \
        else                                                                                      \
            tile(ROWS, VECTORS, x, x_step, depth, w, 0, row_step, sums);                          \
        break;
#define TILE_CASES(ROWS) TILE_CASE(ROWS, 1) TILE_CASE(ROWS, 2) TILE_CASE(ROWS, 3) TILE_CASE(ROWS, 4)

static void any_tile(int rows, int vectors, const float *x, int64_t x_step, int64_t depth, const void *w,
                     int is_bf16, int64_t row_step, vec sums[TILE_ROWS][TILE_VECTORS]) {
    switch (rows * 8 + vectors) {
#if TILE_VECTORS == 4
        TILE_CASES(1) TILE_CASES(2) TILE_CASES(3) TILE_CASES(4) TILE_CASES(5) TILE_CASES(6)
#else
#undef TILE_CASES
#define TILE_CASES(ROWS) TILE_CASE(ROWS, 1) TILE_CASE(ROWS, 2)
        TILE_CASES(1) TILE_CASES(2) TILE_CASES(3) TILE_CASES(4) TILE_CASES(5) TILE_CASES(6)
#endif
    }
}

/* One panel: out[n, first..first + width] of x [n, depth]. */
static void panel_product(const float *x, int64_t x_step, int64_t n, int64_t depth, const Matrix *w, int64_t panel,
                          int64_t columns, void *out, int64_t out_step, int out_is_bf16) {
    int64_t first = panel * TILE_COLUMNS;
    int64_t width = columns - first < TILE_COLUMNS ? columns - first : TILE_COLUMNS;
    int64_t whole = w->is_padded ? (width + LANES - 1) / LANES : width / LANES;
    const char *values = (const char *)w->values + panel * w->panel_step * (w->is_bf16 ? 2 : 4);
    for (int64_t row = 0; row < n && whole; row += TILE_ROWS) {
        int rows = n - row < TILE_ROWS ? (int)(n - row) : TILE_ROWS;
        vec sums[TILE_ROWS][TILE_VECTORS];
        any_tile(rows, (int)whole, x + row * x_step, x_step, depth, values, w->is_bf16, w->row_step, sums);
        for (int r = 0; r < rows; r++) {
            int64_t place = (row + r) * out_step + first;
            for (int64_t v = 0; v < whole; v++) {
                int64_t left = width - v * LANES;
                if (left >= LANES)
                    store(out, place + v * LANES, out_is_bf16, sums[r][v]);
                else
                    for (int64_t i = 0; i < left; i++)
                        store1(out, place + v * LANES + i, out_is_bf16, sums[r][v][i]);
            }
        }
    }
    if (w->is_padded) return;
    for (int64_t column = whole * LANES; column < width; column++)
        for (int64_t row = 0; row < n; row++) {
            float sum = 0.0f;
            for (int64_t k = 0; k < depth; k++)
                sum = fmaf(x[row * x_step + k], load1(values, k * w->row_step + column, w->is_bf16), sum);
            store1(out, row * out_step + first + column, out_is_bf16, sum);
        }
}

static void product(const float *x, int64_t x_step, int64_t n, int64_t depth, const Matrix *w, int64_t columns,
                    void *out, int64_t out_step, int out_is_bf16, int threads) {
    int64_t panels = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    int is_worth_it = threads > 1 && panels > 1 && n * depth * columns > MANY_PRODUCTS;
#pragma omp parallel for schedule(static) num_threads(threads) if (is_worth_it)
    for (int64_t panel = 0; panel < panels; panel++)
        panel_product(x, x_step, n, depth, w, panel, columns, out, out_step, out_is_bf16);
}

/* Rows of x as float32: themselves, or copied to scratch. */
static const float *as_float(const void *x, int is_bf16, int64_t *x_step, int64_t n, int64_t depth, int which) {
    if (!is_bf16) return x;
    float *copy = scratch(which, n * depth);
    if (!copy) return NULL;
    for (int64_t row = 0; row < n; row++)
        for (int64_t k = 0; k < depth; k++) copy[row * depth + k] = widen(((const bf16 *)x)[row * *x_step + k]);
    *x_step = depth;
    return copy;
}
