/* Weights, draws and log-probabilities of a row: included after pointwise.h, whose exponential it uses. */
#include "likeliest.h"

/* e^((x - top) scale), at most 1, then zeros up to a multiple of 64. */
static void weigh(const float *x, int64_t count, float top, float scale, float *weight)
{
    const vf most = vf_set1(top), by = vf_set1(scale), zero = vf_set1(0.0f), low = vf_set1(-INFINITY);
    for (int64_t i = 0; i < count; i += ROWS) {
        float tail[ROWS];
        const float *from = x + i;
        if (count - i < ROWS) {
            for (int j = 0; j < ROWS; j++)
                tail[j] = j < count - i ? from[j] : 0.0f;
            from = tail;
        }
        /* a NaN is the first argument of both, which return the second: NaN is -infinity, infinity less itself is 0 */
        const vf shifted = vf_mul(vf_sub(vf_max(vf_load(from), low), most), by);
        vf_store(weight + i, vf_exp(vf_min(shifted, zero)));
    }
    memset(weight + count, 0, sizeof *weight * (size_t)(blocks_of(count) * SUMMED - count));
}

/* p, or max(p - q, 0), of 64 columns from `first` on, zeros past the end. */
static inline void load_block(const float *p, const float *q, int64_t first, int64_t count, double out[SUMMED])
{
    const int64_t n = least(SUMMED, count - first);
    float tails[2][SUMMED] = {{0}};
    if (n < SUMMED) {
        memcpy(tails[0], p + first, sizeof *p * (size_t)n);
        if (q)
            memcpy(tails[1], q + first, sizeof *q * (size_t)n);
    }
    p = n < SUMMED ? tails[0] : p + first;
    for (int j = 0; j < SUMMED; j++)
        out[j] = p[j];
    if (q) {
        q = n < SUMMED ? tails[1] : q + first;
        for (int j = 0; j < SUMMED; j++)
            out[j] = out[j] - (double)q[j] > 0.0 ? out[j] - (double)q[j] : 0.0;
    }
}

/* Cumulative sums of blocks of 64 columns; returns the whole. */
static double accumulate(const float *p, const float *q, int64_t count, double *sum)
{
    double total = 0.0;
    for (int64_t b = 0; b < blocks_of(count); b++) {
        double v[SUMMED], lanes[ROWS];
        load_block(p, q, b * SUMMED, count, v);
        for (int j = 0; j < ROWS; j++)
            lanes[j] = (v[j] + v[ROWS + j]) + (v[2 * ROWS + j] + v[3 * ROWS + j]);
        total += sum_lanes(lanes);
        sum[b] = total;
    }
    return total;
}

/* The column at which the cumulative sum of p, or of max(p - q, 0), passes u of the whole; p alone where p = q. */
static int64_t pick_row(const float *p, const float *q, int64_t count, double u, double *sum)
{
    const double total = accumulate(p, q, count, sum);
    if (q && !(total > 0.0))
        return pick_row(p, 0, count, u, sum);
    const double point = u * total;
    int64_t b = 0;
    while (b < blocks_of(count) - 1 && !(sum[b] > point))
        b++;
    double v[SUMMED], inside = 0.0;
    load_block(p, q, b * SUMMED, count, v);
    for (int j = 0; j < SUMMED; j++)
        v[j] = inside += v[j];
    /* the two sums of a block may differ by a rounding: the point stays below the end */
    double within = point - (b ? sum[b - 1] : 0.0);
    if (!(within < inside))
        within = nextafter(inside, 0.0);
    int64_t column = 0;
    while (column < SUMMED - 1 && !(v[column] > within))
        column++;
    return least(b * SUMMED + column, count - 1);
}

static void keep_nucleus(Scratch *s, int64_t count, double top_p)
{
    const double whole = accumulate(s->weight, 0, count, s->sum);
    /* what is lighter than this weighs less than half of what may be left out */
    const float lightest = (float)(whole * (1.0 - top_p) / (2.0 * (double)count));
    int32_t key;
    memcpy(&key, &lightest, sizeof key);
    keep(s, count, 1, top_p * whole, key);
}

/* The weights of a row at s->weight, zeros for what may not be drawn. */
static void kept_weights(const float *x, int64_t count, const Rule *rule, Scratch *s)
{
    const float top = block_most(x, count, s->most);
    weigh(x, count, top, rule->scale, s->weight);
    if (rule->scale == 0.0f) { /* the likeliest alone */
        const int64_t first = first_of(x, count, top, s->most);
        memset(s->weight, 0, sizeof *s->weight * (size_t)count);
        s->weight[first] = 1.0f;
    }
    if (rule->top_k < count || rule->top_p < 1.0)
        block_most(s->weight, count, s->most);
    if (rule->top_k < count)
        keep_likeliest(s, count, rule->top_k);
    if (rule->top_p < 1.0)
        keep_nucleus(s, count, rule->top_p);
    float *const weight = s->weight;
    const float min_p = rule->min_p;
    if (min_p > 0.0f)
        for (int64_t i = 0; i < count; i++)
            weight[i] = weight[i] >= min_p ? weight[i] : 0.0f;
}

static int64_t sample_row(const float *x, int64_t count, const Rule *rule, Scratch *s)
{
    if (rule->scale == 0.0f) {
        const float top = block_most(x, count, s->most);
        return first_of(x, count, top, s->most);
    }
    kept_weights(x, count, rule, s);
    return pick_row(s->weight, 0, count, rule->u, s->sum);
}

static void distribution_row(const float *x, int64_t count, const Rule *rule, float *out, Scratch *s)
{
    kept_weights(x, count, rule, s);
    const float total = (float)accumulate(s->weight, 0, count, s->sum);
    for (int64_t i = 0; i < count; i++)
        out[i] = s->weight[i] / total;
}

/* log softmax of a token, and of the `top` likeliest with their ids. */
static void logprobs_row(const float *x, int64_t count, int64_t token, int64_t top, float *chosen, int64_t *ids,
                         float *values, Scratch *s)
{
    const double most = (double)block_most(x, count, s->most);
    weigh(x, count, (float)most, 1.0f, s->weight);
    const double total = log(accumulate(s->weight, 0, count, s->sum));
    *chosen = (float)((double)x[token] - most - total);
    if (top > 0)
        rank_likeliest(x, count, top, ids, s);
    for (int64_t i = 0; i < top; i++)
        values[i] = (float)((double)x[ids[i]] - most - total);
}
