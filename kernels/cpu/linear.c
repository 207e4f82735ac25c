/* The C interface: tokens are quantized once, then the panels of all parts are shared out among the threads. */
#include "program.h"
#include "threads.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ISA_PORTABLE = 0, ISA_AVX2 = 1, ISA_AVXVNNI = 2, ISA_AVX512 = 3, ISAS = 4 };

/* Whether this processor can run the kernels of an instruction set. */
int compress_supports(int isa)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    switch (isa) {
    case ISA_AVX2: return avx2;
    case ISA_AVXVNNI: return avx2 && __builtin_cpu_supports("avxvnni");
    case ISA_AVX512:
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni");
    }
#endif
    return isa == ISA_PORTABLE;
}

const Kernels *kernels_of(int isa)
{
#if defined(__x86_64__)
    if (isa == ISA_AVX2)
        return &kernels_avx2;
    if (isa == ISA_AVXVNNI)
        return &kernels_avxvnni;
    if (isa == ISA_AVX512)
        return &kernels_avx512;
#endif
    return &kernels_portable;
}

typedef struct {
    const Kernels *kernels;
    const Problem *problem;
    const Part *parts;
    int nibbles;
} Codes;

static void prepare_tokens(const void *context, int worker, int64_t first, int64_t last)
{
    const Codes *c = context;
    (void)worker;
    for (int64_t t = first; t < last; t++)
        c->kernels->token(c->problem, (int)t, c->nibbles);
}

/* The strips of all parts, laid end to end. */
static void compute_strips(const void *context, int worker, int64_t first, int64_t last)
{
    const Codes *c = context;
    const int64_t rows = c->kernels->panels * ROWS;
    (void)worker;
    for (; first < last; first++) {
        int64_t strip = first;
        const Part *part = c->parts;
        for (; strip >= (part->n + rows - 1) / rows; part++)
            strip -= (part->n + rows - 1) / rows;
        c->kernels->strip(c->problem, part, strip);
    }
}

/* y[:, column of each part] = x * dequant(W)^T + bias, for x [m, k] and y [m, ...], both float32 with unit stride in a
 * row. All parts are of one kind, k, group and block. Returns 0, or 1 where memory ran out (nothing is computed then). */
int compress_linear(const LinearCall *c)
{
    const int64_t k = c->k, block = c->block, group = c->group;
    const int m = (int)c->m, exact = c->call.variant, threads = c->call.threads, count = (int)c->count;
    const Part *parts = c->parts;
    Problem p = {.x = c->x, .y = c->y, .x_stride = c->x_stride, .y_stride = c->y_stride, .k = k, .m = m, .exact = exact};
    p.padded = (k + 15) / 16 * 16;
    p.block = block;
    p.blocks = (k + block - 1) / block;
    p.group = group;
    p.groups = (k + group - 1) / group;

    const Kernels *kernels = kernels_of(c->call.isa);
    if (parts[0].kind >= KIND_BF16)
        return linear_rows(kernels, &p, threads, parts, count);
    const int64_t rows = kernels->panels * ROWS;
    int64_t strips = 0;
    int asymmetric = 0;
    for (int i = 0; i < count; i++) {
        strips += (parts[i].n + rows - 1) / rows;
        asymmetric |= parts[i].zero != 0;
    }
    const size_t entries = (size_t)m * (size_t)p.blocks;
    const size_t copies = exact ? 4 * (size_t)(m - m % kernels->tile) * (size_t)k : (size_t)m * (size_t)p.padded;
    uint8_t *scratch = malloc(8 * entries + copies + 1);
    if (!scratch)
        return 1;
    p.q_scale = p.x_sum = (float *)scratch;
    p.q_sum = (int32_t *)(scratch + 4 * entries);
    p.q = (int8_t *)(scratch + 8 * entries);
    p.x_tiles = (float *)(scratch + 8 * entries);

    const Codes codes = {kernels, &p, parts, parts[0].kind == KIND_INT4};
    if (!exact || asymmetric || m >= kernels->tile)
        share_out(m * k >= SHARED ? threads : 1, m, prepare_tokens, &codes);
    share_out(threads, strips, compute_strips, &codes);
    free(scratch);
    return 0;
}
