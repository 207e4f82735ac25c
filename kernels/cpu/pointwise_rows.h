/* The functions of one instruction set that work on a row. */
#ifndef COMPRESS_POINTWISE_ROWS_H
#define COMPRESS_POINTWISE_ROWS_H
#include <math.h>
#include <stdint.h>

typedef struct {
    void (*norm)(const float *x, const float *residual, float *total, const float *weight, float *out, int64_t count,
                 float eps, int unit_offset);
    void (*gate)(const float *x, float *out, int64_t count, int gelu);
} RowKernels;
#endif
