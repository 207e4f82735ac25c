/* Where the keys and values of a tile lie, and narrow ones as float32: included after pointwise.h. */
#include "attention_problem.h"

typedef struct {
    float *top, *sum, *acc; /* [rows], [rows], [rows, dim] */
} State;

typedef struct {
    float s[QUERY_ROWS][KEYS];      /* scores, then probabilities */
    float tile_sum[QUERY_ROWS];
    float before[QUERY_ROWS], here[QUERY_ROWS]; /* factors that bring the state and the tile to their common largest score */
    int join[QUERY_ROWS];
    const float *all_q[QUERY_ROWS], **q; /* q and position: of the KV head that is worked on */
    int64_t all_position[QUERY_ROWS], *position;
    const uint8_t *keys[2][KEYS], *values[KEYS], *widened[KEYS];
    float state[(QUERY_ROWS + 15) / 16 * 32 + QUERY_ROWS * MAX_DIM];
    float turned[MAX_DIM * ROWS];
    float wide[KEYS * MAX_DIM]; /* narrow pages, widened */
} Work;

static const float zeros[MAX_DIM];

/* Addresses of the keys or values of a tile; rows of zeros where no query sees the key. Nothing else may be read: what
 * lies there is another request's, and 0 times a number that is not finite is not 0. */
static void tile_rows(const AttentionProblem *p, const Cache *cache, const QueryBlock *block, int64_t tile,
                      int64_t kv_head, const uint8_t **rows)
{
    static const int sizes[] = {4, 2, 2, 1, 1};
    const int64_t first = (block->first_tile + tile) * KEYS, count = least(KEYS, block->stop - first);
    const int64_t bytes = sizes[cache->type];
    const int32_t *page = p->batch->pages + block->request->table + first / p->page_size;
    const int64_t position = block->request->context - block->request->length + block->first_token;
    const int64_t hidden = p->window ? position - p->window + 1 - first : 0; /* keys before the first row's window */
    int64_t slot = first % p->page_size, j = 0;
    for (; j < count; page++, slot = 0) {
        const int64_t at = *page * cache->page + slot * cache->slot + kv_head * cache->head;
        const uint8_t *row = (const uint8_t *)cache->data + at * bytes;
        for (const int64_t stop = least(count, j + p->page_size - slot); j < stop; row += cache->slot * bytes)
            rows[j++] = row;
    }
    for (; j < KEYS; j++)
        rows[j] = (const uint8_t *)zeros;
    for (j = 0; j < hidden; j++)
        rows[j] = (const uint8_t *)zeros;
}

static inline vf load_narrow(int64_t type, const uint8_t *row, int64_t d)
{
    switch (type) {
    case PAGE_BF16: return vf_load_bf16((const uint16_t *)row + d);
    case PAGE_F16: return vf_load_f16((const uint16_t *)row + d);
    case PAGE_INT8: return vf_from_int(vi_load_int8((const int8_t *)row + d));
    default: return vf_load_e4m3(row + d);
    }
}

/* Rows of float32: where they lie, or widened; then the rows at `next` are asked for on the way. */
static const uint8_t *const *widen(const AttentionProblem *p, const Cache *cache, const QueryBlock *block, int64_t tile,
                                   int64_t kv_head, int count, const uint8_t *const *rows, const uint8_t *const *next, Work *work)
{
    if (cache->type == PAGE_F32)
        return rows;
    const int64_t first = (block->first_tile + tile) * KEYS;
    const int32_t *pages = p->batch->pages + block->request->table;
    for (int j = 0; j < KEYS; j++)
        work->widened[j] = (const uint8_t *)(work->wide + j * p->dim);
    for (int j = 0; j < count; j++) {
        float *wide = work->wide + j * p->dim;
        __builtin_prefetch(next[j], 0, 2);
        __builtin_prefetch(next[j] + 64, 0, 2);
        if (cache->scales && rows[j] != (const uint8_t *)zeros) {
            const int64_t page = pages[(first + j) / p->page_size], slot = (first + j) % p->page_size;
            const vf scale = vf_set1(cache->scales[page * cache->scale_page + slot * cache->scale_slot +
                                                   kv_head * cache->scale_head]);
            for (int64_t d = 0; d < p->dim; d += ROWS)
                vf_store(wide + d, vf_mul(load_narrow(cache->type, rows[j], d), scale));
        } else {
            for (int64_t d = 0; d < p->dim; d += ROWS)
                vf_store(wide + d, load_narrow(cache->type, rows[j], d));
        }
    }
    if (count % ROWS)
        memset(work->wide + count * p->dim, 0, sizeof(float) * (size_t)((ROWS - count % ROWS) * p->dim));
    return work->widened;
}
