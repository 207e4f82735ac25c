/* Weights, filters and draws of a row: included after pointwise.h, whose exponential it uses. Loops over 16 lanes and
 * sums of doubles are plain C in a fixed order, so that every instruction set gives the same bits. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sampling_rows.h"

#define SUMMED COLUMNS_SUMMED
#define ONE 0x3f800000 /* the bits of 1.0f, which no weight exceeds */

typedef int32_t __attribute__((may_alias)) Key; /* the bits of a weight: those of floats from 0 up are in order */

static inline int64_t blocks_of(int64_t count)
{
    return (count + SUMMED - 1) / SUMMED;
}

static inline float larger(float a, float b)
{
    return a > b ? a : b; /* a NaN in a loses */
}

/* The largest of each 64 numbers; returns the largest of all, -infinity where there is none. NaN are passed over. */
static float block_most(const float *x, int64_t count, float *most)
{
    float top = -INFINITY;
    for (int64_t b = 0, i = 0; i < count; b++, i += SUMMED) {
        float tail[SUMMED];
        const float *block = x + i;
        if (count - i < SUMMED) {
            for (int j = 0; j < SUMMED; j++)
                tail[j] = j < count - i ? block[j] : -INFINITY;
            block = tail;
        }
        float lanes[ROWS];
        vf v = vf_set1(-INFINITY);
        for (int j = 0; j < SUMMED; j += ROWS)
            v = vf_max(vf_load(block + j), v);
        vf_store(lanes, v);
        for (int width = ROWS / 2; width; width /= 2)
            for (int j = 0; j < width; j++)
                lanes[j] = larger(lanes[j + width], lanes[j]);
        most[b] = lanes[0];
        top = larger(lanes[0], top);
    }
    return top;
}

/* The first column that equals the largest, 0 where all are NaN. */
static int64_t first_of(const float *x, int64_t count, float top, const float *most)
{
    for (int64_t b = 0; b < blocks_of(count); b++)
        if (most[b] == top)
            for (int64_t i = b * SUMMED; i < least(count, (b + 1) * SUMMED); i++)
                if (x[i] == top)
                    return i;
    return 0;
}

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

static inline double sum_lanes(double lanes[ROWS])
{
    for (int width = ROWS / 2; width; width /= 2)
        for (int j = 0; j < width; j++)
            lanes[j] += lanes[j + width];
    return lanes[0];
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

static inline int64_t count_from(const Key *key, int64_t count, int32_t from)
{
    int32_t found = 0;
    for (int64_t i = 0; i < count; i++)
        found += key[i] >= from;
    return found;
}

/* The sum of the weights of at least a key. */
static double mass_from(const float *weight, int64_t count, int32_t from)
{
    const Key *key = (const Key *)weight;
    double lanes[ROWS] = {0};
    int64_t i = 0;
    for (; i + ROWS <= count; i += ROWS)
        for (int j = 0; j < ROWS; j++)
            lanes[j] += key[i + j] >= from ? (double)weight[i + j] : 0.0;
    for (int j = 0; i + j < count; j++)
        lanes[j] += key[i + j] >= from ? (double)weight[i + j] : 0.0;
    return sum_lanes(lanes);
}

/* The largest key that at least `wanted` of them reach; all lie in [low, high). */
static int32_t kth_key(const Key *key, int64_t count, int64_t wanted, int64_t low, int64_t high)
{
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (count_from(key, count, (int32_t)middle) >= wanted)
            low = middle;
        else
            high = middle;
    }
    return (int32_t)low;
}

/* Those of the weights whose keys lie in [low, high), in order; returns how many. `most` may be NULL: then no block of
 * them can be passed over, and `rest` may be the weights themselves. */
static int64_t gather_between(const float *weight, int64_t count, int64_t low, int64_t high, const float *most,
                              float *rest)
{
    int64_t found = 0;
    for (int64_t b = 0; b < blocks_of(count); b++) {
        if (most && ((const Key *)most)[b] < low)
            continue;
        for (int64_t i = b * SUMMED; i < least(count, (b + 1) * SUMMED); i++) {
            const int32_t key = ((const Key *)weight)[i];
            rest[found] = weight[i];
            found += (key >= low) & (key < high);
        }
    }
    return found;
}

/* The most likely columns that are so many, or weigh so much, keep their weights: the last of them is found by bisection
 * of their keys, in which what is decided is left out from time to time. It has at least the key `low`. */
static void keep(Scratch *s, int64_t count, int by_weight, double wanted, int64_t low)
{
    float *const all = s->weight;
    const float *open = all; /* among these are all with keys in [low, high) */
    double above = 0.0; /* what has been left out above `high` */
    int64_t left = count, high = ONE + 1, middle = ONE; /* first: do the largest suffice? */
    int64_t from_low = count_from((const Key *)all, count, (int32_t)low), from_high = 0;
    while (high - low > 1) {
        if (4 * (from_low - from_high) < left) {
            above += by_weight ? mass_from(open, left, (int32_t)high) : (double)from_high;
            left = gather_between(open, left, low, high, open == all ? s->most : 0, s->rest);
            open = s->rest, from_low = left, from_high = 0;
        }
        const int64_t found = count_from((const Key *)open, left, (int32_t)middle);
        if (above + (by_weight ? mass_from(open, left, (int32_t)middle) : (double)found) >= wanted)
            low = middle, from_low = found;
        else
            high = middle, from_high = found;
        middle = low + (high - low) / 2;
    }
    const int32_t key = (int32_t)low;
    float weight;
    memcpy(&weight, &key, sizeof weight);
    above += by_weight ? mass_from(open, left, key + 1) : (double)from_high;
    /* of the columns of this weight the first that are needed */
    const double missing = by_weight ? ceil((wanted - above) / (double)weight) : wanted - above;
    int64_t ties = missing < (double)count ? (int64_t)missing : count;
    ties = ties < 1 ? 1 : ties;
    for (int64_t i = 0; i < count; i++)
        all[i] = ((const Key *)all)[i] >= key ? all[i] : 0.0f;
    if (key > 0 && from_low - from_high > ties)
        for (int64_t i = 0; i < count; i++)
            if (((const Key *)all)[i] == key && ties-- <= 0)
                all[i] = 0.0f;
    for (int64_t b = 0; b < blocks_of(count); b++)
        s->most[b] = ((const Key *)s->most)[b] >= key ? s->most[b] : 0.0f;
}

static void keep_likeliest(Scratch *s, int64_t count, int64_t top_k)
{
    const int64_t blocks = blocks_of(count);
    /* as many weights as there are blocks with a largest of at least some key are at least that large */
    keep(s, count, 0, (double)top_k, top_k <= blocks ? kth_key((const Key *)s->most, blocks, top_k, 0, ONE + 1) : 0);
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

/* Integers in the order of floats; NaN counts as -infinity, -0 as 0. */
static inline int32_t key_of(float x)
{
    const float value = x != x ? -INFINITY : x + 0.0f;
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

static int falling(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

/* The `top` likeliest columns, the likeliest first and the lower of equals, of numbers whose s->most are known. */
static void rank_likeliest(const float *x, int64_t count, int64_t top, int64_t *ids, Scratch *s)
{
    const int64_t blocks = blocks_of(count);
    int64_t found = 0, ties = top;
    int32_t from = INT32_MIN;
    Key *most = (Key *)s->rest;
    for (int64_t b = 0; b < blocks; b++)
        most[b] = key_of(s->most[b]);
    if (top <= blocks) /* so many columns are at least this large */
        from = kth_key(most, blocks, top, INT32_MIN, (int64_t)INT32_MAX + 1);
    for (int64_t b = 0; b < blocks; b++) {
        if (most[b] < from)
            continue;
        for (int64_t i = b * SUMMED; i < least(count, (b + 1) * SUMMED); i++) {
            const int32_t key = key_of(x[i]);
            s->order[found] = (int64_t)key * ((int64_t)1 << 32) + (INT32_MAX - i);
            found += key > from || (key == from && ties > 0);
            ties -= key == from;
        }
    }
    qsort(s->order, (size_t)found, sizeof *s->order, falling);
    for (int64_t i = 0; i < top; i++)
        ids[i] = INT32_MAX - (s->order[i] & INT32_MAX);
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
