/* The C interface of norms, gates and rotations. */
#include "program.h"

#include <string.h>

#define SHARED 32768 /* numbers, from which on rows are shared out among threads */

void compress_norm(const NormCall *c)
{
    const Kernels *kernels = kernels_of(c->call.isa);
#pragma omp parallel for schedule(static) num_threads(c->call.threads) if (c->call.threads > 1 && c->rows * c->count >= SHARED)
    for (int64_t r = 0; r < c->rows; r++)
        kernels->rows.norm(c->x + r * c->x_stride, c->residual ? c->residual + r * c->residual_stride : 0,
                           c->total ? c->total + r * c->count : 0, c->weight, c->out + r * c->count, c->count, c->eps,
                           c->call.variant);
}

/* [T, H, count] by strides, a weight for each head: out is [T, H, count], contiguous. */
void compress_head_norm(const HeadNormCall *c)
{
    const Kernels *kernels = kernels_of(c->call.isa);
#pragma omp parallel for schedule(static) num_threads(c->call.threads)                                                 \
    if (c->call.threads > 1 && c->tokens * c->heads * c->dim >= SHARED)
    for (int64_t t = 0; t < c->tokens; t++)
        for (int64_t h = 0; h < c->heads; h++)
            kernels->rows.norm(c->x + t * c->token_stride + h * c->head_stride, 0, 0, c->weight + h * c->dim,
                               c->out + (t * c->heads + h) * c->dim, c->dim, c->eps, c->call.variant);
}

void compress_gate(const GateCall *c)
{
    const Kernels *kernels = kernels_of(c->call.isa);
#pragma omp parallel for schedule(static) num_threads(c->call.threads) if (c->call.threads > 1 && c->rows * c->count >= SHARED)
    for (int64_t r = 0; r < c->rows; r++)
        kernels->rows.gate(c->x + r * c->x_stride, c->out + r * c->count, c->count, c->call.variant);
}

/* The first 2 F of D dimensions of every head turn by the angles of their token; the rest are copied. */
void compress_rotate(const RotateCall *c)
{
    const int64_t pairs = c->pairs, dim = c->dim;
#pragma omp parallel for schedule(static) num_threads(c->call.threads)                                                 \
    if (c->call.threads > 1 && c->tokens * c->heads * dim >= SHARED)
    for (int64_t t = 0; t < c->tokens; t++)
        for (int64_t h = 0; h < c->heads; h++) {
            const float *from = c->x + t * c->token_stride + h * c->head_stride;
            const float *cos = c->cos + t * pairs, *sin = c->sin + t * pairs;
            float *to = c->out + (t * c->heads + h) * dim;
            if (c->call.variant) { /* interleaved */
                for (int64_t f = 0; f < pairs; f++) {
                    const float low = from[2 * f], high = from[2 * f + 1];
                    to[2 * f] = low * cos[f] - high * sin[f];
                    to[2 * f + 1] = high * cos[f] + low * sin[f];
                }
            } else {
                for (int64_t f = 0; f < pairs; f++) {
                    const float low = from[f], high = from[f + pairs];
                    to[f] = low * cos[f] - high * sin[f];
                    to[f + pairs] = high * cos[f] + low * sin[f];
                }
            }
            memcpy(to + 2 * pairs, from + 2 * pairs, sizeof *to * (size_t)(dim - 2 * pairs));
        }
}
