/* What attention.h and attention.c share; attention.py and pages.py mirror Request, Batch, Cache
 * and AttentionProblem. */
#ifndef COMPRESS_ATTENTION_PROBLEM_H
#define COMPRESS_ATTENTION_PROBLEM_H
#include <stdint.h>

#define MAX_DIM 576 /* DeepSeek's latent and rotated key */
#define QUERY_ROWS 48 /* rows that meet a tile of keys together: tokens times the query heads of a KV head */
#define KEYS 64       /* of a tile; tiles begin at multiples of it, so a row's result depends on its own keys alone */

enum { PAGE_F32 = 0, PAGE_BF16 = 1, PAGE_F16 = 2, PAGE_INT8 = 3, PAGE_E4M3 = 4 };

typedef struct {
    int64_t token;   /* its first new token in the batch */
    int64_t length;  /* new tokens */
    int64_t context; /* all of its tokens up to the last new one */
    int64_t table;   /* where its pages begin in the batch's `pages` */
} Request;

/* What changes from step to step. The problems of all layers point at one batch: it may be replaced between calls. */
typedef struct {
    const Request *requests;
    const int32_t *pages;
    int64_t count; /* of requests */
} Batch;

/* Keys or values: [P, S, K, D] by strides in elements, and their scales [P, S, K] (or NULL). */
typedef struct {
    const void *data;
    const float *scales;
    int64_t page, slot, head;
    int64_t scale_page, scale_slot, scale_head;
    int64_t type;
} Cache;

typedef struct {
    const float *q; /* [T, H, D] by strides */
    float *out;     /* [T, H, D], contiguous */
    int64_t q_token, q_head;
    Cache keys, values;
    const Batch *batch;
    const float *sinks; /* [H] or NULL */
    int64_t heads, kv_heads, dim, page_size;
    int64_t window;  /* 0: none */
    float scale, soft_cap; /* soft_cap 0: none */
} AttentionProblem;

/* One request, some of its new tokens; some of the query heads of a KV head, or all of those of several KV heads. Its
 * rows are [KV heads, tokens, heads]. */
typedef struct {
    const Request *request;
    int64_t kv_head, kv_heads, first_token, tokens;
    int64_t heads;             /* query heads of each KV head, from first_head on */
    int64_t first_head;
    int64_t first_tile, tiles; /* that its rows see */
    int64_t stop;              /* keys that the last of its tokens sees */
    float *parts;              /* where several shares work on it, a state for each tile: they are joined in order */
    int pending;               /* shares that still work on it */
} QueryBlock;

static inline int64_t block_rows(const QueryBlock *block)
{
    return block->kv_heads * block->tokens * block->heads;
}

/* Where a share begins or ends: before a tile of a block. */
typedef struct {
    int64_t block, tile;
} Cut;

/* What rows have summed, relative to the largest score: rows of largest scores, of sums, and of dim numbers. */
static inline int64_t state_floats(int64_t rows, int64_t dim)
{
    return (rows + 15) / 16 * 32 + rows * dim;
}

typedef void (*Attend)(const AttentionProblem *, QueryBlock *blocks, Cut from, Cut to);
#endif
