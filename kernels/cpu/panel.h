/* y = x * dequant(W)^T on panels of 16 rows of codes W: what is the same for every instruction set.
 *
 * A file isa_*.c defines the vector types and the operations named below, then includes this one.
 *
 * The rows of W are read in place. 16 of them are turned, 32 bits at a time, into a small buffer in which the 16 rows
 * are the lanes of a vector; every token then meets the buffer while it is in the cache. So a weight is read from
 * memory once, its scale is one lane of a vector, and no sum runs across lanes.
 *
 * Each output is one chain of operations whose order depends on nothing but K and the block size:
 *   integer:  acc = fma(float(sum(code * q) - zero * sum(q)), scale * x_scale, acc)   for each block; the sums are exact
 *   float:    acc = fma(sum(code * x) - zero * sum(x), scale, acc)                    summed by fma, in the order of k
 * The same bits for any number of tokens, of threads, and for each instruction set.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "linear.h"

#define CHUNK_BYTES 16384 /* of the turned buffer: it stays in the first-level cache */
#define SLAB (10 * TILE)  /* tokens whose sums are kept beside it */

/* PANELS neighbouring panels are worked on together: they share each activation that is loaded. */
typedef struct {
    const uint8_t *rows[PANELS][ROWS];
    const uint8_t *scale[PANELS]; /* of each panel: [G, 16] */
    const int8_t *zero[PANELS];   /* [G, 16], or NULL */
    const Part *part;
    int64_t ahead;                /* bytes from a row to the same row of the next strip */
} Strip;

/* Sixteen scales of one group, as float32. */
static inline vf load_scale(const Strip *strip, int panel, int64_t group)
{
    const uint8_t *scale = strip->scale[panel];
    switch (strip->part->scale_type) {
    case SCALE_F32: return vf_load((const float *)scale + group * ROWS);
    case SCALE_BF16: return vf_load_bf16((const uint16_t *)scale + group * ROWS);
    case SCALE_F16: return vf_load_f16((const uint16_t *)scale + group * ROWS);
    default: return vf_set1(1.0f);
    }
}

/* Bytes of `words` words of a panel for dot products of unsigned by signed bytes: [k / 4, 16, 4]. Codes of four bits
 * come as k = 0 2 4 6 and 1 3 5 7 of each eight, the order in which `quantize_token` lays out the tokens. */
static void turn_bytes(const Strip *strip, int panel, int64_t offset, int words, uint8_t *out)
{
    const int split = strip->part->kind == KIND_INT4;
    for (int w = 0; w < words; w += COLUMNS) {
        vi v[COLUMNS];
        turn(strip->rows[panel], offset + 4 * (int64_t)w, least(words - w, COLUMNS), strip->ahead, v);
        for (int i = 0; i < COLUMNS; i++) {
            if (split) {
                vi_store(out + 2 * 64 * i, vi_and_nibbles(v[i]));
                vi_store(out + 2 * 64 * i + 64, vi_and_nibbles(vi_shift_right(v[i], 4)));
            } else {
                vi_store(out + 64 * i, v[i]);
            }
        }
        out += (split ? 2 : 1) * 64 * COLUMNS;
    }
}

/* The same as float32: [k, 16], codes less half their range. */
static void turn_floats(const Strip *strip, int panel, int64_t offset, int words, float *out)
{
    const int kind = strip->part->kind;
    for (int w = 0; w < words; w += COLUMNS) {
        vi v[COLUMNS];
        turn(strip->rows[panel], offset + 4 * (int64_t)w, least(words - w, COLUMNS), strip->ahead, v);
        for (int i = 0; i < COLUMNS; i++) {
            if (kind == KIND_INT4) {
                for (int n = 0; n < 8; n++)
                    vf_store(out + ROWS * (8 * i + n), vf_from_nibble(vi_shift_right(v[i], 4 * n)));
            } else {
                for (int n = 0; n < 4; n++)
                    vf_store(out + ROWS * (4 * i + n), vf_from_byte(vi_shift_right(v[i], 8 * n)));
            }
        }
        out += ROWS * COLUMNS * (32 / kind_bits(kind));
    }
}

/* Blocks [first, last) of the integer products of `tokens` tokens (a constant where this is inlined). */
static inline __attribute__((always_inline)) void integer_tile(
    const Problem *p, const Strip *strip, const uint8_t *const *turned, int64_t first, int64_t last, int token,
    int tokens, float *sums)
{
    const int nibbles = strip->part->kind == KIND_INT4;
    vf acc[TILE][PANELS];
    for (int t = 0; t < tokens; t++)
        for (int n = 0; n < PANELS; n++)
            acc[t][n] = vf_load(sums + ROWS * (PANELS * t + n));
    for (int64_t b = first; b < last; b++) {
        const int64_t k = b * p->block;
        const int quads = (int)least(p->block, p->padded - k) / 4;
        const int8_t *q = p->q + (int64_t)token * p->padded + k;
        const uint8_t *w[PANELS];
        vi dot[TILE][PANELS];
        for (int n = 0; n < PANELS; n++)
            w[n] = turned[n] + ROWS * (k - first * p->block);
        if (nibbles)
            dot_nibbles(w, q, p->padded, quads, tokens, dot);
        else
            dot_bytes(w, q, p->padded, quads, tokens, dot);
        const int64_t group = k / p->group;
        for (int n = 0; n < PANELS; n++) {
            const vf scale = load_scale(strip, n, group);
            vi zero = vi_set1(nibbles ? 8 : 128);
            if (strip->zero[n])
                zero = vi_add(zero, vi_load_int8(strip->zero[n] + group * ROWS));
            for (int t = 0; t < tokens; t++) {
                const int64_t at = (token + t) * p->blocks + b;
                const vi exact = vi_sub(dot[t][n], vi_mul(zero, vi_set1(p->q_sum[at])));
                acc[t][n] = vf_fma(vf_from_int(exact), vf_mul(scale, vf_set1(p->q_scale[at])), acc[t][n]);
            }
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int n = 0; n < PANELS; n++)
            vf_store(sums + ROWS * (PANELS * t + n), acc[t][n]);
}

static inline __attribute__((always_inline)) void float_tile(
    const Problem *p, const Strip *strip, const uint8_t *const *turned, int64_t first, int64_t last, int token,
    int tokens, float *sums)
{
    for (int64_t b = first; b < last; b++) {
        const int64_t k = b * p->block;
        const int count = (int)least(p->block, p->k - k);
        /* full tiles lie packed, so that one register points at all of their tokens */
        const int packed = tokens == TILE;
        const float *x = packed ? p->x_tiles + token * p->k + k * TILE : p->x + token * p->x_stride + k;
        const int64_t next_token = packed ? 1 : p->x_stride, next_column = packed ? TILE : 1;
        const float *w[PANELS];
        vf dot[TILE][PANELS];
        for (int n = 0; n < PANELS; n++)
            w[n] = (const float *)turned[n] + ROWS * (k - first * p->block);
        for (int t = 0; t < tokens; t++)
            for (int n = 0; n < PANELS; n++)
                dot[t][n] = vf_set1(0.0f);
#pragma GCC unroll 4
        for (int i = 0; i < count; i++)
            for (int t = 0; t < tokens; t++)
                for (int n = 0; n < PANELS; n++)
                    dot[t][n] = vf_fma(vf_load(w[n] + ROWS * i), vf_set1(x[t * next_token + i * next_column]), dot[t][n]);
        const int64_t group = k / p->group;
        for (int n = 0; n < PANELS; n++) {
            const vf scale = load_scale(strip, n, group);
            for (int t = 0; t < tokens; t++) {
                float *sum = sums + ROWS * (PANELS * t + n);
                if (strip->zero[n]) {
                    const vf zero = vf_from_int(vi_load_int8(strip->zero[n] + group * ROWS));
                    dot[t][n] = vf_fma(zero, vf_set1(-p->x_sum[(token + t) * p->blocks + b]), dot[t][n]);
                }
                vf_store(sum, vf_fma(dot[t][n], scale, vf_load(sum)));
            }
        }
    }
}

static void integer_tokens(const Problem *p, const Strip *strip, const uint8_t *const *turned, int64_t first,
                           int64_t last, int token, int tokens, float *sums)
{
    int t = 0;
#define RUN(size)                                                                                                      \
    for (; t + size <= tokens; t += size)                                                                              \
        integer_tile(p, strip, turned, first, last, token + t, size, sums + ROWS * PANELS * t);
    TILES(RUN)
#undef RUN
}

static void float_tokens(const Problem *p, const Strip *strip, const uint8_t *const *turned, int64_t first,
                         int64_t last, int token, int tokens, float *sums)
{
    int t = 0;
#define RUN(size)                                                                                                      \
    for (; t + size <= tokens; t += size)                                                                              \
        float_tile(p, strip, turned, first, last, token + t, size, sums + ROWS * PANELS * t);
    TILES(RUN)
#undef RUN
}

/* The outputs of one strip for the tokens [token, token + tokens). */
static void strip_slab(const Problem *p, const Strip *strip, int64_t row, int token, int tokens)
{
    _Alignas(64) uint8_t buffer[PANELS][CHUNK_BYTES / PANELS + 64 * 8 * COLUMNS];
    _Alignas(64) float sums[SLAB * PANELS * ROWS];
    const uint8_t *turned[PANELS];
    const Part *part = strip->part;
    const int bits = kind_bits(part->kind);
    const int64_t columns = CHUNK_BYTES / (PANELS * ROWS * (p->exact ? 4 : 1));
    const int64_t per_chunk = columns > p->block ? columns / p->block : 1;
    memset(sums, 0, sizeof *sums * (size_t)(tokens * PANELS * ROWS));
    for (int n = 0; n < PANELS; n++)
        turned[n] = buffer[n];
    for (int64_t first = 0; first < p->blocks; first += per_chunk) {
        const int64_t last = least(first + per_chunk, p->blocks);
        const int64_t k = first * p->block, stop = least(last * p->block, p->k);
        const int words = (int)(((stop - k) * bits + 31) / 32);
        for (int n = 0; n < PANELS; n++) {
            if (p->exact)
                turn_floats(strip, n, k * bits / 8, words, (float *)buffer[n]);
            else
                turn_bytes(strip, n, k * bits / 8, words, buffer[n]);
        }
        if (p->exact)
            float_tokens(p, strip, turned, first, last, token, tokens, sums);
        else
            integer_tokens(p, strip, turned, first, last, token, tokens, sums);
    }
    const int rows = (int)least(part->n - row, PANELS * ROWS);
    for (int t = 0; t < tokens; t++) {
        float *y = p->y + (token + t) * p->y_stride + part->column + row;
        for (int r = 0; r < rows; r++)
            y[r] = sums[t * PANELS * ROWS + r] + (part->bias ? part->bias[row + r] : 0.0f);
    }
}

static void strip_kernel(const Problem *p, const Part *part, int64_t index)
{
    Strip strip;
    const int64_t row = index * PANELS * ROWS, panels = (part->n + ROWS - 1) / ROWS;
    const int64_t bytes = part->scale_type == SCALE_F32 ? 4 : 2;
    strip.part = part;
    strip.ahead = PANELS * ROWS * part->row_bytes;
    for (int n = 0; n < PANELS; n++) { /* rows past the end repeat the last, and are not stored */
        const int64_t panel = least(index * PANELS + n, panels - 1);
        strip.scale[n] = part->scale_type == SCALE_NONE ? 0 : (const uint8_t *)part->scale + panel * p->groups * ROWS * bytes;
        strip.zero[n] = part->zero ? part->zero + panel * p->groups * ROWS : 0;
        for (int r = 0; r < ROWS; r++)
            strip.rows[n][r] = (const uint8_t *)part->rows + least(row + n * ROWS + r, part->n - 1) * part->row_bytes;
    }
    for (int token = 0; token < p->m; token += SLAB)
        strip_slab(p, &strip, row, token, (int)least(p->m - token, SLAB));
}

#define TINY 0x1p-100f /* below it 127 / x could overflow; such a block counts as zero */

/* One block of a token: q = round(x * 127 / max|x|), to even on ties, and the sum of q. A block that holds an infinity
 * or a NaN gets the scale NaN: it must not come out as a number. */
static void quantize_block(const float *x, int count, int8_t *q, float *scale, int32_t *sum)
{
    float padded[MAX_BLOCK];
    int8_t codes[MAX_BLOCK];
    if (count % ROWS) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, x, sizeof *x * (size_t)count);
        x = padded;
    }
    vf largest = vf_set1(0.0f), poison = vf_set1(0.0f);
    for (int i = 0; i < count; i += ROWS) {
        const vf v = vf_load(x + i);
        largest = vf_max(largest, vf_abs(v));
        poison = vf_fma(v, vf_set1(0.0f), poison);
    }
    float sizes[ROWS], poisons[ROWS], most = 0.0f, bad = 0.0f;
    vf_store(sizes, largest), vf_store(poisons, poison);
    for (int i = 0; i < ROWS; i++) {
        most = sizes[i] > most ? sizes[i] : most;
        bad += poisons[i];
    }
    const int zero = !(most >= TINY);
    const vf inverse = vf_set1(zero ? 0.0f : 127.0f / most);
    vi total = vi_set1(0);
    int8_t *out = count % ROWS ? codes : q;
    for (int i = 0; i < count; i += ROWS) {
        const vi code = vi_round(vf_mul(vf_load(x + i), inverse));
        vi_narrow(out + i, code);
        total = vi_add(total, code);
    }
    if (count % ROWS)
        memcpy(q, codes, (size_t)count);
    int32_t sums[ROWS], all = 0;
    vi_store((uint8_t *)sums, total);
    for (int i = 0; i < ROWS; i++)
        all += sums[i];
    *scale = bad != 0.0f ? NAN : zero ? 0.0f : most / 127.0f;
    *sum = all;
}

static void quantize_token(const Problem *p, int token, int nibbles)
{
    int8_t *q = p->q + token * p->padded;
    const float *x = p->x + token * p->x_stride;
    for (int64_t b = 0; b < p->blocks; b++) {
        const int64_t k = b * p->block;
        const int count = (int)(k + p->block < p->k ? p->block : p->k - k);
        quantize_block(x + k, count, q + k, p->q_scale + token * p->blocks + b, p->q_sum + token * p->blocks + b);
    }
    memset(q + p->k, 0, (size_t)(p->padded - p->k));
    if (nibbles)
        for (int64_t k = 0; k < p->padded; k += ROWS)
            nibble_order(q + k);
}

/* The sums that a zero point needs, in the order of k; and the token's place in its tile, [k, TILE]. */
static void copy_token(const Problem *p, int token)
{
    const float *x = p->x + token * p->x_stride;
    float *tile = p->x_tiles + token / TILE * TILE * p->k + token % TILE;
    if (token < p->m / TILE * TILE)
        for (int64_t i = 0; i < p->k; i++)
            tile[i * TILE] = x[i];
    for (int64_t b = 0; b < p->blocks; b++) {
        const int64_t k = b * p->block, stop = k + p->block < p->k ? k + p->block : p->k;
        float sum = 0.0f;
        for (int64_t i = k; i < stop; i++)
            sum += x[i];
        p->x_sum[token * p->blocks + b] = sum;
    }
}

static void token_kernel(const Problem *p, int token, int nibbles)
{
    if (p->exact)
        copy_token(p, token);
    else
        quantize_token(p, token, nibbles);
}

#include "pointwise.h"
/* after pointwise.h, whose exponential they use */
#include "attention.h"
#include "rows.h"
#include "sampling.h"

const Kernels KERNELS = {
    token_kernel, strip_kernel, PANELS, TILE, {norm_row, gate_row}, attend_share, pack_token, float_rows,
    {sample_row, distribution_row, pick_row, logprobs_row},
};
