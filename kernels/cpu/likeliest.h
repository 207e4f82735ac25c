/* The likeliest columns of a row without sorting it: by bisection of the bits of weights, which are in order as integers.
 * Included by sampling.h. Loops over 16 lanes and sums of doubles are plain C in a fixed order, so that every instruction
 * set gives the same bits. */
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

static inline double sum_lanes(double lanes[ROWS])
{
    for (int width = ROWS / 2; width; width /= 2)
        for (int j = 0; j < width; j++)
            lanes[j] += lanes[j + width];
    return lanes[0];
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
