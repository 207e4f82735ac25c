/* The C interface of norms, gates, rotations and stores. */
#include "linear.h"

#include <string.h>

#define SHARED 32768 /* numbers, from which on rows are shared out among threads */

void compress_norm(int isa, int threads, const float *x, int64_t x_stride, const float *residual, int64_t residual_stride,
                   float *total, const float *weight, float *out, int64_t rows, int64_t count, float eps, int unit_offset)
{
    const Kernels *kernels = kernels_of(isa);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * count >= SHARED)
    for (int64_t r = 0; r < rows; r++)
        kernels->rows.norm(x + r * x_stride, residual ? residual + r * residual_stride : 0, total ? total + r * count : 0,
                           weight, out + r * count, count, eps, unit_offset);
}

/* [T, H, count] by strides, a weight for each head: out is [T, H, count], contiguous. */
void compress_head_norm(int isa, int threads, const float *x, int64_t token_stride, int64_t head_stride,
                        const float *weight, float *out, int64_t tokens, int64_t heads, int64_t count, float eps,
                        int unit_offset)
{
    const Kernels *kernels = kernels_of(isa);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tokens * heads * count >= SHARED)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++)
            kernels->rows.norm(x + t * token_stride + h * head_stride, 0, 0, weight + h * count,
                               out + (t * heads + h) * count, count, eps, unit_offset);
}

void compress_gate(int isa, int threads, const float *x, int64_t x_stride, float *out, int64_t rows, int64_t count,
                   int gelu)
{
    const Kernels *kernels = kernels_of(isa);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * count >= SHARED)
    for (int64_t r = 0; r < rows; r++)
        kernels->rows.gate(x + r * x_stride, out + r * count, count, gelu);
}

/* The first 2 F of D dimensions of every head turn by the angles of their token; the rest are copied. */
void compress_rotate(int threads, const float *x, int64_t token_stride, int64_t head_stride, const float *cos,
                     const float *sin, float *out, int64_t tokens, int64_t heads, int64_t dim, int64_t pairs,
                     int interleaved)
{
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tokens * heads * dim >= SHARED)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            const float *from = x + t * token_stride + h * head_stride, *c = cos + t * pairs, *s = sin + t * pairs;
            float *to = out + (t * heads + h) * dim;
            if (interleaved) {
                for (int64_t f = 0; f < pairs; f++) {
                    const float low = from[2 * f], high = from[2 * f + 1];
                    to[2 * f] = low * c[f] - high * s[f];
                    to[2 * f + 1] = high * c[f] + low * s[f];
                }
            } else {
                for (int64_t f = 0; f < pairs; f++) {
                    const float low = from[f], high = from[f + pairs];
                    to[f] = low * c[f] - high * s[f];
                    to[f + pairs] = high * c[f] + low * s[f];
                }
            }
            memcpy(to + 2 * pairs, from + 2 * pairs, sizeof *to * (size_t)(dim - 2 * pairs));
        }
}

/* Float32 rows of tokens to their slots of pages of the same type; a slot below 0 is a row of padding. */
void compress_store(const float *x, int64_t token_stride, int64_t head_stride, float *pages, int64_t page_stride,
                    int64_t slot_stride, int64_t page_head, int64_t page_size, const int64_t *slots, int64_t tokens,
                    int64_t heads, int64_t dim)
{
    for (int64_t t = 0; t < tokens; t++) {
        if (slots[t] < 0)
            continue;
        float *to = pages + slots[t] / page_size * page_stride + slots[t] % page_size * slot_stride;
        for (int64_t h = 0; h < heads; h++)
            memcpy(to + h * page_head, x + t * token_stride + h * head_stride, sizeof *to * (size_t)dim);
    }
}
