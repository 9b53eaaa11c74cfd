/* Philox4x32-10 (philox.py), and which tokens may win a Gumbel-max draw (gumbel_max.py). */

#define BLOCKS_AT_ONCE 64

/* bits[4 i + j]: word j of block first + i. */
static void random_words(uint32_t *bits, int64_t first, int n, int64_t seed, int64_t position, uint32_t purpose) {
    uint32_t x0[BLOCKS_AT_ONCE], x1[BLOCKS_AT_ONCE], x2[BLOCKS_AT_ONCE], x3[BLOCKS_AT_ONCE];
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)((uint64_t)seed >> 32);
    for (int i = 0; i < BLOCKS_AT_ONCE; i++) {
        x0[i] = (uint32_t)(first + i);
        x1[i] = (uint32_t)position;
        x2[i] = (uint32_t)((uint64_t)position >> 32);
        x3[i] = purpose;
    }
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < BLOCKS_AT_ONCE; i++) {
            uint64_t product0 = (uint64_t)x0[i] * 0xD2511F53u, product1 = (uint64_t)x2[i] * 0xCD9E8D57u;
            x0[i] = (uint32_t)(product1 >> 32) ^ x1[i] ^ key0;
            x2[i] = (uint32_t)(product0 >> 32) ^ x3[i] ^ key1;
            x1[i] = (uint32_t)product1;
            x3[i] = (uint32_t)product0;
        }
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    for (int i = 0; i < n; i++) {
        bits[4 * i] = x0[i];
        bits[4 * i + 1] = x1[i];
        bits[4 * i + 2] = x2[i];
        bits[4 * i + 3] = x3[i];
    }
}

/* s + gumbel in float64, and what the sum lost by rounding (Knuth's two-sum, of sums alone: nothing to contract). */
static void score_of(float scaled, uint32_t bits, double *value_out, double *rest_out) {
    double s = scaled, noise = -log(-log1p(-(((double)bits + 0.5) * 0x1p-32)));
    double value = s + noise, noise_part = value - s;
    *value_out = value;
    *rest_out = isfinite(value) ? (s - (value - noise_part)) + (noise - noise_part) : 0.0;
}

/* The best of each row scaled [n, count]: its score and token, of equal ones the lower. HAS_NAN where a row has.
 *
 * Which tokens may win, and why the slack is enough, is gumbel_max.py's. */
int gumbel_max(const float *scaled, int64_t n, int64_t count, int64_t vocab_start, const int64_t *seeds,
               const int64_t *positions, int64_t purpose, float slack, double *values, double *rests,
               int64_t *tokens) {
    int64_t skipped = vocab_start % 4;
    int64_t padded = (skipped + count + 4 * BLOCKS_AT_ONCE - 1) / (4 * BLOCKS_AT_ONCE) * (4 * BLOCKS_AT_ONCE);
    uint32_t *bits = (uint32_t *)scratch(1, padded);
    float *ratios = scratch(2, count + LANES);
    if (!bits || !ratios) return NO_MEMORY;
    for (int64_t row = 0; row < n; row++) {
        const float *scores = scaled + row * count;
        for (int64_t block = 0; 4 * block < padded; block += BLOCKS_AT_ONCE)
            random_words(bits + 4 * block, vocab_start / 4 + block, BLOCKS_AT_ONCE, seeds[row], positions[row],
                         (uint32_t)purpose);
        const uint32_t *mine = bits + skipped;
        vec highest = all(-3.4028234e38f);
        ivec is_nan = (ivec){0};
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            vec part = load(scores, i, 0);
            highest = choose(part > highest, part, highest);
            is_nan |= part != part;
        }
        float peak = -3.4028234e38f;
        for (int lane = 0; lane < LANES; lane++) {
            peak = highest[lane] > peak ? highest[lane] : peak;
            if (is_nan[lane]) return HAS_NAN;
        }
        for (int64_t j = i; j < count; j++) {
            if (scores[j] != scores[j]) return HAS_NAN;
            peak = scores[j] > peak ? scores[j] : peak;
        }
        vec least = all(INFINITY);
        for (i = 0; i + LANES <= count; i += LANES) {
            vec uniform = (__builtin_convertvector(*(const uvec *)(mine + i), vec) + 0.5f) * 0x1p-32f;
            vec ratio = uniform / exp_of(load(scores, i, 0) - peak);
            store(ratios, i, 0, ratio);
            least = choose(ratio < least, ratio, least);
        }
        float rho = INFINITY;
        for (int lane = 0; lane < LANES; lane++) rho = least[lane] < rho ? least[lane] : rho;
        for (; i < count; i++) {
            ratios[i] = ((float)mine[i] + 0.5f) * 0x1p-32f / exp_of1(scores[i] - peak);
            rho = ratios[i] < rho ? ratios[i] : rho;
        }
        double bound = (double)rho * (1.0 + slack);
        float latest = (float)(-log1p(-(bound < 1.0 ? bound : 1.0)) * (1.0 + slack));
        values[row] = rests[row] = -INFINITY;
        tokens[row] = INT64_MAX;
        for (i = 0; i < count; i++) {
            if (!(ratios[i] <= latest)) continue;
            double value, rest;
            score_of(scores[i], mine[i], &value, &rest);
            if (tokens[row] != INT64_MAX && (value < values[row] || (value == values[row] && rest <= rests[row])))
                continue;
            values[row] = value;
            rests[row] = rest;
            tokens[row] = vocab_start + i;
        }
    }
    return 0;
}
