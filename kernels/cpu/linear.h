/* What isa_*.c and linear.c share. linear.py mirrors Part and the constants. */
#ifndef COMPRESS_LINEAR_H
#define COMPRESS_LINEAR_H
#include <stdint.h>

#include "attention_problem.h"
#include "pointwise_rows.h"
#include "sampling_rows.h"

#define ROWS 16
#define MAX_BLOCK 128 /* columns */

enum { KIND_INT4 = 0, KIND_INT8 = 1, KIND_BF16 = 2, KIND_F16 = 3, KIND_F32 = 4 };
enum { SCALE_NONE = 0, SCALE_F32 = 1, SCALE_BF16 = 2, SCALE_F16 = 3 };

/* One weight matrix of n rows: several with the same input are one call. */
typedef struct {
    const void *rows;    /* n rows of row_bytes; codes offset by half their range, or floats */
    int64_t row_bytes;
    int64_t n;
    const void *scale;   /* [panels, groups, 16], or NULL */
    const int8_t *zero;  /* [panels, groups, 16], or NULL for a symmetric scheme */
    const float *bias;   /* [n] or NULL */
    int64_t column;      /* of y, where its outputs start */
    int32_t kind;
    int32_t scale_type;
} Part;

typedef struct {
    const float *x;  /* [m, k] */
    float *y;        /* [m, ...] */
    int64_t x_stride, y_stride, k;
    int64_t padded;  /* k rounded up to 16: the width of q */
    int64_t block;   /* columns that share an activation scale; a multiple of 8 that divides the group */
    int64_t blocks;
    int64_t group;   /* columns that share a weight scale */
    int64_t groups;
    int m, exact;
    int8_t *q;       /* [m, padded] */
    float *q_scale;  /* [m, blocks] */
    int32_t *q_sum;  /* [m, blocks] */
    float *x_sum;    /* [m, blocks]; exact alone */
    float *x_tiles;  /* of codes, exact: [m / tile, k, tile]; of floats: [k / 16, tokens, 16] of each tile (rows.h) */
} Problem;

static inline int kind_bits(int kind)
{
    return kind == KIND_INT4 ? 4 : kind == KIND_INT8 ? 8 : kind == KIND_F32 ? 32 : 16;
}

static inline int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* One instruction set: prepare a token, compute a strip of outputs (panels * 16 rows) of every token, attend, choose. */
typedef struct {
    void (*token)(const Problem *, int token, int nibbles);
    void (*strip)(const Problem *, const Part *, int64_t index);
    int panels, tile;
    RowKernels rows;
    Attend attend;
    void (*pack_token)(const Problem *, int token);
    void (*float_rows)(const Problem *, const Part *, int64_t row, int64_t stop);
    SampleKernels sampling;
} Kernels;
const Kernels *kernels_of(int isa);
int linear_rows(const Kernels *kernels, Problem *p, int threads, const Part *parts, int count);
extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avxvnni, kernels_avx512;
#endif
#endif
