/* y = x * W^T for rows of floats, read in place and never turned: included after the vector operations of an
 * instruction set.
 *
 * Vectors lie along K. A tile of rows by tokens keeps one vector of sums for each output; a weight is widened to
 * float32 as it is loaded, and meets the tokens of the tile, which lie packed.
 *
 * Each output is one chain of operations whose order depends on K alone: lane l of 16 sums k = l (mod 16) by fma, in
 * the order of k, and the lanes are added as a tree: i + (i + 8), then 4, 2 and 1 apart. Columns that a row lacks
 * are zeros.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "linear.h"

#define BLOCK_ROWS 24      /* that meet the tokens of a slab before the next are read; the rows of a tile divide it */
#define NEAR_BYTES 28672   /* of the packed tokens of one tile: they stay in the first-level cache beside a few rows */
#define SLAB_BYTES 1048576 /* of packed tokens that stay in the second-level cache */

#define INLINE static inline __attribute__((always_inline))

/* The tokens of the tile that begins when `rest` are left: the largest that fits. */
static inline int tile_tokens(int64_t rest)
{
#define RUN(tokens, rows)                                                                                              \
    if (rest >= tokens)                                                                                                \
        return tokens;
    ROW_TILES(RUN)
#undef RUN
    return 0;
}

/* One token's place in its tile, [k / 16, tokens, 16], zeros past k. */
static void pack_token(const Problem *p, int token)
{
    int first = 0, tokens = tile_tokens(p->m);
    for (; token >= first + tokens; tokens = tile_tokens(p->m - first))
        first += tokens;
    const float *x = p->x + token * p->x_stride;
    float *tile = p->x_tiles + first * p->padded + (token - first) * ROWS;
    int64_t i = 0;
    for (; i + ROWS <= p->k; i += ROWS)
        vf_store(tile + i * tokens, vf_load(x + i));
    if (i < p->k) {
        memset(tile + i * tokens, 0, ROWS * sizeof *x);
        memcpy(tile + i * tokens, x + i, sizeof *x * (size_t)(p->k - i));
    }
}

INLINE vp load_weights(int kind, const uint8_t *at)
{
    return kind == KIND_F32 ? vp_load((const float *)at)
                            : kind == KIND_BF16 ? vp_load_bf16((const uint16_t *)at) : vp_load_f16((const uint16_t *)at);
}

/* The products of 16 columns, a register of each vector at a time. */
INLINE void add_step(int kind, int tokens, int rows, const uint8_t *const *w, int64_t offset, const float *x, vf *acc)
{
    const int64_t size = kind_bits(kind) / 8, lanes = sizeof(vp) / sizeof *x;
#pragma GCC unroll 24
    for (int h = 0; h < (int)(sizeof(vf) / sizeof(vp)); h++) {
        vp v[BLOCK_ROWS];
#pragma GCC unroll 24
        for (int r = 0; r < rows; r++)
            v[r] = load_weights(kind, w[r] + offset + h * lanes * size);
#pragma GCC unroll 24
        for (int t = 0; t < tokens; t++) {
            vp activation = vp_load(x + ROWS * t + h * lanes);
            HOLD(activation); /* loaded once, not once for each row: loads would be the limit */
#pragma GCC unroll 24
            for (int r = 0; r < rows; r++) {
                vp *sum = VP_OF(acc[r * tokens + t], h);
                *sum = vp_fma(v[r], activation, *sum);
            }
        }
    }
}

/* A block of rows of one part: where each begins, and its last columns, padded with zeros. */
typedef struct {
    const Part *part;
    int64_t row, stop;
    int tile, tiles; /* of the tokens that it meets */
    const uint8_t *rows[BLOCK_ROWS];
    const uint8_t *ends[BLOCK_ROWS];
    uint8_t padded[BLOCK_ROWS][4 * ROWS];
} Block;

/* The sums of one tile over the columns from k on, `width` at most: from `saved` and back, or at last to y. */
INLINE void tile_outputs(const Problem *p, const Block *b, int kind, int tokens, int rows, int first, int64_t k,
                         int64_t width, const float *x, float *y, vf *saved)
{
    vf acc[(TILE_SUMS + 7) / 8 * 8] = {0};
    const int64_t size = kind_bits(kind) / 8, line = 64 / size, stop = least(k + width, p->k);
    /* the rows of the next block are asked for a few with each tile of tokens, which takes longer than they do */
    const int64_t ahead = first * b->tiles / BLOCK_ROWS == b->tile ? BLOCK_ROWS * b->part->row_bytes : 0;
#pragma GCC unroll 24
    for (int i = 0; i < rows * tokens; i++)
        acc[i] = k ? saved[i] : vf_set1(0.0f);
    for (; k + line <= stop; k += line) {
#pragma GCC unroll 24
        for (int r = 0; r < rows; r++)
            __builtin_prefetch(b->rows[first + r] + k * size + ahead, 0, 2);
#pragma GCC unroll 24
        for (int i = 0; i < line; i += ROWS)
            add_step(kind, tokens, rows, b->rows + first, (k + i) * size, x + (k + i) * tokens, acc);
    }
    for (; k + ROWS <= stop; k += ROWS)
        add_step(kind, tokens, rows, b->rows + first, k * size, x + k * tokens, acc);
    if (k < stop)
        add_step(kind, tokens, rows, b->ends + first, 0, x + k * tokens, acc);
    if (stop < p->k) {
#pragma GCC unroll 24
        for (int i = 0; i < rows * tokens; i++)
            saved[i] = acc[i];
        return;
    }
    float out[(TILE_SUMS + 7) / 8 * 8];
#pragma GCC unroll 24
    for (int i = 0; i < rows * tokens; i += 8)
        add_lanes_of_8(acc + i, out + i);
    const int64_t row = b->row + first;
    const float *bias = b->part->bias;
    for (int r = 0; r < least(rows, b->stop - row); r++)
        for (int t = 0; t < tokens; t++)
            y[t * p->y_stride + row + r] = out[r * tokens + t] + (bias ? bias[row + r] : 0.0f);
}

/* The outputs of a block for one tile of tokens. */
INLINE void block_outputs(const Problem *p, const Block *b, int kind, int tokens, int rows, const float *x, float *y)
{
    vf saved[BLOCK_ROWS * TILE_TOKENS];
    const int64_t vectors = p->padded / ROWS, near = NEAR_BYTES / (4 * ROWS * tokens);
    const int64_t chunks = (vectors + near - 1) / near, width = (vectors + chunks - 1) / chunks * ROWS;
    for (int64_t k = 0; k < p->k; k += width)
        for (int r = 0; r < b->stop - b->row; r += rows)
            tile_outputs(p, b, kind, tokens, rows, r, k, width, x, y, saved + r * tokens);
}

/* Where the rows of a block are; those past the last repeat it, and are not stored. */
static void find_rows(const Problem *p, const Part *part, int64_t row, int64_t stop, Block *b)
{
    const int64_t size = kind_bits(part->kind) / 8, end = p->k / ROWS * ROWS;
    b->part = part;
    b->row = row;
    b->stop = stop;
    for (int r = 0; r < BLOCK_ROWS; r++) {
        b->rows[r] = (const uint8_t *)part->rows + least(row + r, part->n - 1) * part->row_bytes;
        if (end == p->k)
            continue;
        memset(b->padded[r], 0, sizeof b->padded[r]);
        memcpy(b->padded[r], b->rows[r] + end * size, (size_t)((p->k - end) * size));
        b->ends[r] = b->padded[r];
    }
}

INLINE void kind_block(const Problem *p, Block *b, int kind, int first, int last)
{
    b->tiles = 0;
    for (int t = first; t < last; t += tile_tokens(p->m - t))
        b->tiles++;
    b->tile = 0;
    for (int t = first, tokens; t < last; t += tokens, b->tile++) {
        const float *x = p->x_tiles ? p->x_tiles + t * p->padded : p->x;
        float *y = p->y + t * p->y_stride + b->part->column;
        tokens = tile_tokens(p->m - t);
        switch (tokens) {
#define RUN(tokens, rows)                                                                                              \
    case tokens:                                                                                                       \
        block_outputs(p, b, kind, tokens, rows, x, y);                                                                 \
        break;
            ROW_TILES(RUN)
#undef RUN
        }
    }
}

static void f16_block(const Problem *p, Block *b, int first, int last) { kind_block(p, b, KIND_F16, first, last); }
static void bf16_block(const Problem *p, Block *b, int first, int last) { kind_block(p, b, KIND_BF16, first, last); }
static void f32_block(const Problem *p, Block *b, int first, int last) { kind_block(p, b, KIND_F32, first, last); }

/* The outputs of the rows [row, stop) for every token. */
static void float_rows(const Problem *p, const Part *part, int64_t row, int64_t stop)
{
    const int64_t tiles = SLAB_BYTES / (4 * TILE_TOKENS * p->padded);
    const int64_t slab = TILE_TOKENS * (tiles > 4 ? tiles : 4);
    for (int64_t first = 0; first < p->m; first += slab) {
        const int last = (int)least(first + slab, p->m);
        for (int64_t r = row; r < stop; r += BLOCK_ROWS) {
            Block b;
            find_rows(p, part, r, least(r + BLOCK_ROWS, stop), &b);
            (part->kind == KIND_F16 ? f16_block : part->kind == KIND_BF16 ? bf16_block : f32_block)(
                p, &b, (int)first, last);
        }
    }
}
