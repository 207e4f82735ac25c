/* The C interface of norms, gates and rotations. */
#include "program.h"
#include "threads.h"

#include <string.h>

static void norm_rows(const void *context, int worker, int64_t first, int64_t last)
{
    const NormCall *c = context;
    const Kernels *kernels = kernels_of(c->call.isa);
    (void)worker;
    for (int64_t r = first; r < last; r++)
        kernels->rows.norm(c->x + r * c->x_stride, c->residual ? c->residual + r * c->residual_stride : 0,
                           c->total ? c->total + r * c->count : 0, c->weight, c->out + r * c->count, c->count, c->eps,
                           c->call.variant);
}

void compress_norm(const NormCall *c)
{
    share_out(c->rows * c->count >= SHARED ? c->call.threads : 1, c->rows, norm_rows, c);
}

/* [T, H, count] by strides, a weight for each head: out is [T, H, count], contiguous. */
static void norm_heads(const void *context, int worker, int64_t first, int64_t last)
{
    const HeadNormCall *c = context;
    const Kernels *kernels = kernels_of(c->call.isa);
    (void)worker;
    for (int64_t t = first; t < last; t++)
        for (int64_t h = 0; h < c->heads; h++)
            kernels->rows.norm(c->x + t * c->token_stride + h * c->head_stride, 0, 0, c->weight + h * c->dim,
                               c->out + (t * c->heads + h) * c->dim, c->dim, c->eps, c->call.variant);
}

void compress_head_norm(const HeadNormCall *c)
{
    share_out(c->tokens * c->heads * c->dim >= SHARED ? c->call.threads : 1, c->tokens, norm_heads, c);
}

static void gate_rows(const void *context, int worker, int64_t first, int64_t last)
{
    const GateCall *c = context;
    const Kernels *kernels = kernels_of(c->call.isa);
    (void)worker;
    for (int64_t r = first; r < last; r++)
        kernels->rows.gate(c->x + r * c->x_stride, c->out + r * c->count, c->count, c->call.variant);
}

void compress_gate(const GateCall *c)
{
    share_out(c->rows * c->count >= SHARED ? c->call.threads : 1, c->rows, gate_rows, c);
}

/* The first 2 F of D dimensions of every head turn by the angles of their token; the rest are copied. */
static void rotate_tokens(const void *context, int worker, int64_t first, int64_t last)
{
    const RotateCall *c = context;
    const int64_t pairs = c->pairs, dim = c->dim;
    (void)worker;
    for (int64_t t = first; t < last; t++)
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

void compress_rotate(const RotateCall *c)
{
    share_out(c->tokens * c->heads * c->dim >= SHARED ? c->call.threads : 1, c->tokens, rotate_tokens, c);
}
