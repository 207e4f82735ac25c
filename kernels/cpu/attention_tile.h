/* One tile of 64 keys and the rows that meet it, included after pointwise.h.
 *
 * Keys are turned 16 at a time, so that keys are lanes. A tile's probabilities and its weighted sum of values are
 * relative to its own largest score (arXiv 2205.14135), so they depend on neither the other rows nor the other tiles;
 * then they join the state of their row. Keys past the last visible one are not read.
 *
 * Pages lie apart, and no hardware guesses where the next one is. So the scores ask for the values of their keys, and
 * the values for the keys of the next tile, line by line between the products.
 */
#include "attention_rows.h"

#define FEW_ROWS 8 /* up to so many, keys are read in place: turning them would cost more than it saves */

enum { JOIN_NOTHING, JOIN_FIRST, JOIN_BOTH };

/* A product's sum: lane l of 16 sums d = l, l + 16, ... in order, then lanes 8 apart are added, 4, 2 and 1 apart. The
 * lanes of one key are a vector where few rows meet it; for many rows 16 keys are turned, and each lane is a vector of
 * its own. */

/* What to ask for while keys are read: the same dimensions [from, to) of rows that lie `ahead` bytes further. */
typedef struct {
    int64_t from, to, ahead;
} Ask;

/* Sums of products of a row and KEY_TILE keys, by lanes. */
static inline __attribute__((always_inline)) void dot_keys(const float *q, const uint8_t *const *keys, int64_t dim, Ask ask,
                                                           vf *sums)
{
    for (int i = 0; i < KEY_TILE; i++)
        sums[i] = vf_set1(0.0f);
    for (int64_t d = 0; d < dim; d += ROWS) {
        const vf x = vf_load(q + d);
        for (int i = 0; i < KEY_TILE; i++)
            sums[i] = vf_fma(vf_load((const float *)keys[i] + d), x, sums[i]);
        if (d >= ask.from && d < ask.to)
            for (int i = 0; i < KEY_TILE; i++)
                __builtin_prefetch(keys[i] + 4 * d + ask.ahead, 0, 2);
    }
}

/* Products of a row and 16 keys. */
static inline vf dot_16(const float *q, const uint8_t *const *keys, int64_t dim, Ask ask)
{
    float products[ROWS];
    for (int first = 0; first < ROWS; first += 8) {
        vf sums[8];
#pragma GCC unroll 2
        for (int i = 0; i < 8; i += KEY_TILE)
            dot_keys(q, keys + first + i, dim, ask, sums + i);
        add_lanes_of_8(sums, products + first);
    }
    return vf_load(products);
}

/* The same of `rows` rows and the keys in work->turned. */
static inline __attribute__((always_inline)) void dot_turned(const Work *work, const float *const *q, int rows, int64_t dim,
                                                             vf *out)
{
    static const int8_t lanes[ROWS] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
    vf halves[4][8]; /* sums of 1, 2, 4 and 8 lanes, which wait for their other half */
    for (int n = 0; n < ROWS; n += SCORE_LANES) {
        vf sums[SCORE_LANES][8];
        for (int i = 0; i < SCORE_LANES; i++)
            for (int r = 0; r < rows; r++)
                sums[i][r] = vf_set1(0.0f);
        for (int64_t d = lanes[n]; d < dim; d += ROWS)
            for (int i = 0; i < SCORE_LANES; i++) { /* the second lane is half a vector further */
                const vf k = vf_load(work->turned + ROWS * (d + ROWS / 2 * i));
                for (int r = 0; r < rows; r++)
                    sums[i][r] = vf_fma(k, vf_set1(q[r][d + ROWS / 2 * i]), sums[i][r]);
            }
        for (int r = 0; r < rows && SCORE_LANES == 2; r++)
            sums[0][r] = vf_add(sums[0][r], sums[SCORE_LANES - 1][r]);
        int level = SCORE_LANES - 1;
        for (; n >> level & 1; level++)
            for (int r = 0; r < rows; r++)
                sums[0][r] = vf_add(halves[level][r], sums[0][r]);
        for (int r = 0; r < rows; r++)
            (level < 4 ? halves[level] : out)[r] = sums[0][r];
    }
}

/* Products to scores; -inf where a key is hidden. */
static inline void store_scores(const AttentionProblem *p, Work *work, int row, int64_t key, int lane, vf product)
{
    vf score = vf_mul(product, vf_set1(p->scale));
    if (p->soft_cap != 0.0f) { /* cap * tanh(score / cap), tanh(y) = 1 - 2 / (e^2y + 1) */
        const vf e = vf_exp(vf_mul(score, vf_set1(2.0f / p->soft_cap)));
        const vf tanh = vf_sub(vf_set1(1.0f), vf_div(vf_set1(2.0f), vf_add(e, vf_set1(1.0f))));
        score = vf_mul(tanh, vf_set1(p->soft_cap));
    }
    float *s = work->s[row] + lane;
    vf_store(s, score);
    const int64_t position = work->position[row];
    if (key + ROWS - 1 > position || (p->window && key <= position - p->window))
        for (int i = 0; i < ROWS; i++)
            if (key + i > position || (p->window && key + i <= position - p->window))
                s[i] = -INFINITY;
}

/* Each row asks for its part, so that memory is busy all of the time. */
static void score_few(const AttentionProblem *p, Work *work, int rows, const uint8_t *const *keys, int64_t ahead,
                      int64_t key, int lane)
{
    for (int r = 0; r < rows; r++) {
        const Ask ask = {ahead ? p->dim * r / rows : p->dim, p->dim * (r + 1) / rows, ahead};
        store_scores(p, work, r, key, lane, dot_16(work->q[r], keys, p->dim, ask));
    }
}

static inline __attribute__((always_inline)) void score_turned(const AttentionProblem *p, Work *work, int first, int rows,
                                                               int64_t key, int lane)
{
    vf products[8];
    dot_turned(work, work->q + first, rows, p->dim, products);
    for (int r = 0; r < rows; r++)
        store_scores(p, work, first + r, key, lane, products[r]);
}

/* How a tile with this largest score and sum joins a row's state: factors are their logarithms until join_sums. */
static inline void join_top(Work *work, const State *state, int row, float top, float sum)
{
    const float old = state->top[row], common = old > top ? old : top;
    work->before[row] = work->here[row] = 0.0f;
    work->join[row] = JOIN_NOTHING;
    if (top == -INFINITY)
        return;
    work->join[row] = old == -INFINITY ? JOIN_FIRST : JOIN_BOTH;
    work->tile_sum[row] = sum;
    work->before[row] = old - common;
    work->here[row] = top - common;
    state->top[row] = common;
}

/* Scores of `lanes` keys to probabilities. */
static void softmax_row(Work *work, const State *state, int row, int lanes)
{
    float *s = work->s[row];
    vf largest = vf_load(s), total = vf_set1(0.0f);
    for (int j = ROWS; j < lanes; j += ROWS)
        largest = vf_max(largest, vf_load(s + j));
    float top = vf_max_lanes(largest);
    if (top == -INFINITY) /* a maximum may lose a NaN */
        for (int j = 0; j < lanes; j++)
            top = s[j] == s[j] ? top : s[j];
    if (top == -INFINITY) /* no key of the tile is visible */
        memset(s, 0, sizeof *s * (size_t)lanes);
    else
        for (int j = 0; j < lanes; j += ROWS) {
            const vf e = vf_exp(vf_sub(vf_load(s + j), vf_set1(top)));
            vf_store(s + j, e);
            total = vf_add(total, e);
        }
    join_top(work, state, row, top, vf_add_lanes(total));
}

/* The factors of all rows at once, and the sums of probabilities. */
static void join_sums(Work *work, const State *state, int rows)
{
    for (int r = 0; r < rows; r += ROWS) {
        vf_store(work->before + r, vf_exp(vf_load(work->before + r)));
        vf_store(work->here + r, vf_exp(vf_load(work->here + r)));
    }
    for (int r = 0; r < rows; r++)
        if (work->join[r] == JOIN_FIRST)
            state->sum[r] = work->tile_sum[r];
        else if (work->join[r] == JOIN_BOTH)
            state->sum[r] = state->sum[r] * work->before[r] + work->tile_sum[r] * work->here[r];
}

/* One vector of a row's weighted values joins its state. */
static inline void join_values(const Work *work, int row, float *acc, vf tile)
{
    if (work->join[row] == JOIN_FIRST)
        vf_store(acc, tile);
    else if (work->join[row] == JOIN_BOTH)
        vf_store(acc, vf_fma(tile, vf_set1(work->here[row]), vf_mul(vf_load(acc), vf_set1(work->before[row]))));
}

/* `width` vectors of the output at a time: as many sums at once as hide the latency of one. */
static inline __attribute__((always_inline)) void add_values(const AttentionProblem *p, const Work *work,
                                                             const State *state, const uint8_t *const *values,
                                                             const uint8_t *const *next, int first, int rows, int width,
                                                             int keys)
{
    const float *s = work->s[first];
    int64_t d = 0;
    for (; d + width * ROWS <= p->dim; d += width * ROWS) {
        vf acc[8][4];
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < width; i++)
                acc[r][i] = vf_set1(0.0f);
        for (int j = 0; j < keys; j++) {
            const float *value = (const float *)values[j] + d;
            vf v[4];
            for (int i = 0; i < width; i++) {
                v[i] = vf_load(value + ROWS * i);
                __builtin_prefetch(next[j] + 4 * (d + ROWS * i), 0, 2);
            }
            for (int r = 0; r < rows; r++) {
                const vf weight = vf_set1(s[r * KEYS + j]);
                for (int i = 0; i < width; i++)
                    acc[r][i] = vf_fma(v[i], weight, acc[r][i]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < width; i++)
                join_values(work, first + r, state->acc + (first + r) * p->dim + d + ROWS * i, acc[r][i]);
    }
    for (; d < p->dim; d += ROWS) /* what is left of a width that does not divide the head */
        for (int r = 0; r < rows; r++) {
            vf acc = vf_set1(0.0f);
            for (int j = 0; j < keys; j++)
                acc = vf_fma(vf_load((const float *)values[j] + d), vf_set1(s[r * KEYS + j]), acc);
            join_values(work, first + r, state->acc + (first + r) * p->dim + d, acc);
        }
}
