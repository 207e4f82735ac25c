/* Paged attention in float32 with the softmax taken tile by tile (arXiv 2205.14135), included after pointwise.h.
 *
 * A tile of 64 keys is turned 16 at a time, so that keys are lanes; scores, maxima and sums of a row never depend on
 * the other rows. Keys past the last visible one are a row of zeros: what lies in unused slots is not read.
 */
#include "attention_problem.h"

typedef struct {
    float s[QUERY_ROWS][KEYS]; /* scores, then probabilities */
    float acc[QUERY_ROWS][MAX_DIM];
    float top[QUERY_ROWS], sum[QUERY_ROWS];
    const float *q[QUERY_ROWS];
    int64_t position[QUERY_ROWS];
    const float *rows[KEYS];
    float turned[MAX_DIM * ROWS];
    float wide[KEYS * MAX_DIM]; /* narrow pages, widened */
} Work;

static float e4m3_to_float(uint8_t code)
{
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = (code & 127) == 127 ? NAN : exponent ? ldexpf((float)(8 + fraction), exponent - 10)
                                                            : ldexpf((float)fraction, -9);
    return code & 128 ? -size : size;
}

/* Pointers to the rows of KEYS keys from `first` on, as float32. */
static void gather_rows(const AttentionProblem *p, const Cache *cache, const QueryBlock *block, int64_t first, int64_t stop,
                        Work *work)
{
    static const float zeros[MAX_DIM];
    const int32_t *pages = p->batch->pages + block->request->table;
    for (int64_t j = 0; j < KEYS; j++) {
        const int64_t key = first + j;
        if (key >= stop) {
            work->rows[j] = zeros;
            continue;
        }
        const int64_t page = pages[key / p->page_size], slot = key % p->page_size;
        const int64_t at = page * cache->page + slot * cache->slot + block->kv_head * cache->head;
        if (cache->type == PAGE_F32) {
            work->rows[j] = (const float *)cache->data + at;
            continue;
        }
        float *wide = work->wide + j * p->dim;
        const float scale =
            cache->scales
                ? cache->scales[page * cache->scale_page + slot * cache->scale_slot + block->kv_head * cache->scale_head]
                : 1.0f;
        for (int64_t d = 0; d < p->dim; d += ROWS) {
            vf v;
            if (cache->type == PAGE_BF16) {
                v = vf_load_bf16((const uint16_t *)cache->data + at + d);
            } else if (cache->type == PAGE_F16) {
                v = vf_load_f16((const uint16_t *)cache->data + at + d);
            } else if (cache->type == PAGE_INT8) {
                v = vf_mul(vf_from_int(vi_load_int8((const int8_t *)cache->data + at + d)), vf_set1(scale));
            } else {
                float decoded[ROWS];
                for (int i = 0; i < ROWS; i++)
                    decoded[i] = e4m3_to_float(((const uint8_t *)cache->data)[at + d + i]);
                v = vf_mul(vf_load(decoded), vf_set1(scale));
            }
            vf_store(wide + d, v);
        }
        work->rows[j] = wide;
    }
}

static inline __attribute__((always_inline)) void score_rows(const AttentionProblem *p, Work *work, int first, int rows,
                                                             int64_t key, int lane)
{
    vf even[8], odd[8];
    for (int r = 0; r < rows; r++)
        even[r] = odd[r] = vf_set1(0.0f);
    for (int64_t d = 0; d < p->dim; d += 2) {
        const vf k0 = vf_load(work->turned + ROWS * d), k1 = vf_load(work->turned + ROWS * (d + 1));
        for (int r = 0; r < rows; r++) {
            even[r] = vf_fma(k0, vf_set1(work->q[first + r][d]), even[r]);
            odd[r] = vf_fma(k1, vf_set1(work->q[first + r][d + 1]), odd[r]);
        }
    }
    for (int r = 0; r < rows; r++) {
        vf score = vf_mul(vf_add(even[r], odd[r]), vf_set1(p->scale));
        if (p->soft_cap != 0.0f) { /* cap * tanh(score / cap), tanh(y) = 1 - 2 / (e^2y + 1) */
            const vf e = vf_exp(vf_mul(score, vf_set1(2.0f / p->soft_cap)));
            const vf tanh = vf_sub(vf_set1(1.0f), vf_div(vf_set1(2.0f), vf_add(e, vf_set1(1.0f))));
            score = vf_mul(tanh, vf_set1(p->soft_cap));
        }
        float *s = work->s[first + r] + lane;
        vf_store(s, score);
        const int64_t position = work->position[first + r];
        if (key + ROWS - 1 > position || (p->window && key <= position - p->window))
            for (int i = 0; i < ROWS; i++)
                if (key + i > position || (p->window && key + i <= position - p->window))
                    s[i] = -INFINITY;
    }
}

/* Scores to probabilities, relative to the largest score so far; what was summed before is brought to that scale. */
static void softmax_row(const AttentionProblem *p, Work *work, int row)
{
    float *s = work->s[row];
    vf largest = vf_load(s);
    for (int j = ROWS; j < KEYS; j += ROWS)
        largest = vf_max(largest, vf_load(s + j));
    float lanes[ROWS], top = work->top[row];
    vf_store(lanes, largest);
    for (int i = 0; i < ROWS; i++)
        top = lanes[i] > top ? lanes[i] : top;
    if (top == -INFINITY) { /* nothing is visible yet */
        memset(s, 0, KEYS * sizeof *s);
        return;
    }
    vf_store(lanes, vf_exp(vf_set1(work->top[row] - top)));
    const float factor = lanes[0];
    vf total = vf_set1(0.0f);
    for (int j = 0; j < KEYS; j += ROWS) {
        const vf e = vf_exp(vf_sub(vf_load(s + j), vf_set1(top)));
        vf_store(s + j, e);
        total = vf_add(total, e);
    }
    work->sum[row] = work->sum[row] * factor + add_lanes(total);
    work->top[row] = top;
    if (factor != 1.0f)
        for (int64_t d = 0; d < p->dim; d += ROWS)
            vf_store(work->acc[row] + d, vf_mul(vf_load(work->acc[row] + d), vf_set1(factor)));
}

/* `width` vectors of the output at a time: as many sums at once as hide the latency of one. */
static inline __attribute__((always_inline)) void add_values(const AttentionProblem *p, Work *work, int first, int rows,
                                                             int width, int keys)
{
    int64_t d = 0;
    for (; d + width * ROWS <= p->dim; d += width * ROWS) {
        vf acc[8][4];
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < width; i++)
                acc[r][i] = vf_load(work->acc[first + r] + d + ROWS * i);
        for (int j = 0; j < keys; j++)
            for (int i = 0; i < width; i++) {
                const vf v = vf_load(work->rows[j] + d + ROWS * i);
                for (int r = 0; r < rows; r++)
                    acc[r][i] = vf_fma(v, vf_set1(work->s[first + r][j]), acc[r][i]);
            }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < width; i++)
                vf_store(work->acc[first + r] + d + ROWS * i, acc[r][i]);
    }
    for (; d < p->dim; d += ROWS) /* what is left of a width that does not divide the head */
        for (int r = 0; r < rows; r++) {
            vf acc = vf_load(work->acc[first + r] + d);
            for (int j = 0; j < keys; j++)
                acc = vf_fma(vf_load(work->rows[j] + d), vf_set1(work->s[first + r][j]), acc);
            vf_store(work->acc[first + r] + d, acc);
        }
}

/* `call` for QUERY_TILE rows at a time, then for four, and for the three, two or one that are left; N is how many. */
#define EACH_ROWS(call)                                                                                                \
    r = 0;                                                                                                             \
    for (; QUERY_TILE > 4 && r + QUERY_TILE <= rows; r += QUERY_TILE) {                                                \
        enum { N = QUERY_TILE };                                                                                       \
        call;                                                                                                          \
    }                                                                                                                  \
    for (; r + 4 <= rows; r += 4) {                                                                                    \
        enum { N = 4 };                                                                                                \
        call;                                                                                                          \
    }                                                                                                                  \
    if (rows - r == 3) {                                                                                               \
        enum { N = 3 };                                                                                                \
        call;                                                                                                          \
    } else if (rows - r == 2) {                                                                                        \
        enum { N = 2 };                                                                                                \
        call;                                                                                                          \
    } else if (rows - r == 1) {                                                                                        \
        enum { N = 1 };                                                                                                \
        call;                                                                                                          \
    }

/* Ask for the keys or values of a tile: pages lie apart, and no hardware guesses where the next one is. */
static void ask_for(const AttentionProblem *p, const Cache *cache, const QueryBlock *block, int64_t first, int64_t stop)
{
    static const int sizes[] = {4, 2, 2, 1, 1};
    const int32_t *pages = p->batch->pages + block->request->table;
    const int64_t bytes = sizes[cache->type];
    for (int64_t key = first; key < first + KEYS && key < stop; key++) {
        const int64_t at = pages[key / p->page_size] * cache->page + key % p->page_size * cache->slot;
        const uint8_t *row = (const uint8_t *)cache->data + (at + block->kv_head * cache->head) * bytes;
        for (int64_t i = 0; i < p->dim * bytes; i += 64)
            __builtin_prefetch(row + i, 0, 2);
    }
}

static void attend_block(const AttentionProblem *p, const QueryBlock *block)
{
    _Alignas(64) Work work;
    const Request *request = block->request;
    const int rows = (int)(block->tokens * block->heads);
    int r = 0;
    for (int64_t t = 0; t < block->tokens; t++)
        for (int64_t h = 0; h < block->heads; h++, r++) {
            const int64_t head = block->first_head + h, token = request->token + block->first_token + t;
            work.q[r] = p->q + token * p->q_token + head * p->q_head;
            work.position[r] = request->context - request->length + block->first_token + t;
            work.top[r] = p->sinks ? p->sinks[head] : -INFINITY;
            work.sum[r] = p->sinks ? 1.0f : 0.0f;
            memset(work.acc[r], 0, sizeof *work.acc[r] * (size_t)p->dim);
        }
    const int64_t stop = work.position[rows - 1] + 1;
    const int64_t oldest = p->window ? work.position[0] - p->window + 1 : 0;
    for (int64_t first = (oldest > 0 ? oldest : 0) / KEYS * KEYS; first < stop; first += KEYS) {
        gather_rows(p, &p->keys, block, first, stop, &work);
        ask_for(p, &p->values, block, first, stop);
        for (int lane = 0; lane < KEYS; lane += ROWS) {
            for (int64_t d = 0; d < p->dim; d += COLUMNS) {
                vi v[COLUMNS];
                turn((const uint8_t *const *)work.rows + lane, 4 * d, (int)least(p->dim - d, COLUMNS), 0, v);
                for (int i = 0; i < COLUMNS && d + i < p->dim; i++)
                    vi_store((uint8_t *)(work.turned + ROWS * (d + i)), v[i]);
            }
            EACH_ROWS(score_rows(p, &work, r, N, first + lane, lane))
        }
        for (r = 0; r < rows; r++)
            softmax_row(p, &work, r);
        gather_rows(p, &p->values, block, first, stop, &work);
        ask_for(p, &p->keys, block, first + KEYS, stop);
        EACH_ROWS(add_values(p, &work, r, N, VALUE_VECTORS(N), (int)least(KEYS, stop - first)))
    }
    for (r = 0; r < rows; r++) {
        const int64_t token = request->token + block->first_token + r / block->heads;
        float *out = p->out + (token * p->heads + block->first_head + r % block->heads) * p->dim;
        for (int64_t d = 0; d < p->dim; d += ROWS)
            vf_store(out + d, vf_div(vf_load(work.acc[r] + d), vf_set1(work.sum[r])));
    }
}
