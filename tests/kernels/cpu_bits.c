/* Prints a hash of the results of every compiled kernel for each instruction set: all lines are to be equal. */
#include "program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int compress_supports(int isa);

enum { K = 576, N = 70, M = 13, G = 64, PANELS = 5 };

static uint32_t state;
static uint32_t next(void) { return state = state * 1664525u + 1013904223u; }
static float number(void) { return (float)(next() >> 8) / 8388608.0f - 1.0f; }

static float x[M * K], y[M * N], scale[PANELS * 16 * K / G], gated[M * K], total[M * K], weight[K];
static int8_t zero[PANELS * 16 * K / G];
static uint32_t words[N * K];
static float cache[8 * 16 * 2 * 32], page_scale[8 * 16 * 2], q[5 * 6 * 32], out[5 * 6 * 32];

static void print_hash(const void *data, size_t bytes)
{
    uint64_t hash = 1469598103934665603ull;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const uint8_t *)data)[i]) * 1099511628211ull;
    printf("%016llx ", (unsigned long long)hash);
}

/* Distributions, draws and log-probabilities of rows of a length that is no multiple of 16. */
static void choose(int isa)
{
    enum { V = 1013, RULES = 5 };
    static float weight[V + 64], rest[V + 64], most[V / 64 + 1], probs[RULES][V], values[9];
    static int64_t order[V + 64], ids[9];
    static double sum[V / 64 + 1];
    const SampleKernels *kernels = &kernels_of(isa)->sampling;
    const Rule rules[RULES] = {{1.0, 0.3, V, 1.0f, 0.0f}, {0.9, 0.7, V, 1.4f, 0.0f}, {0.8, 0.5, 40, 0.5f, 0.05f},
                               {1.0, 0.1, 200, 1.0f, 0.0f}, {1.0, 0.0, V, 0.0f, 0.0f}};
    Scratch s = {weight, rest, order, sum, most};
    int64_t tokens[RULES + 1];
    for (int r = 0; r < RULES; r++) {
        kernels->distribution(x + r * V, V, rules + r, probs[r], &s);
        tokens[r] = kernels->sample(x + r * V, V, rules + r, &s);
    }
    print_hash(probs, sizeof probs);
    tokens[RULES] = kernels->pick(probs[0], probs[1], V, 0.4, sum);
    print_hash(tokens, sizeof tokens);
    kernels->logprobs(x, V, 5, 8, values + 8, ids, values, &s);
    print_hash(values, sizeof values);
    print_hash(ids, sizeof ids);
}

static void run(int isa)
{
    const int widths[] = {K / 2, K, 2 * K, 2 * K, 4 * K}; /* bytes of a row of each kind */
    state = 1;
    for (int i = 0; i < M * K; i++)
        x[i] = 4.0f * number();
    for (int i = 0; i < K; i++)
        weight[i] = number();
    for (int i = 0; i < PANELS * 16 * K / G; i++) {
        scale[i] = number();
        zero[i] = (int8_t)((next() >> 28) - 8);
    }
    for (int kind = KIND_INT4; kind <= KIND_F32; kind++) {
        for (int i = 0; i < N * K; i++) /* exponents of floats stay below the largest */
            words[i] = next() & (kind == KIND_F16 ? 0xbbffbbffu : kind >= KIND_BF16 ? 0xbfffbfffu : ~0u);
        for (int variant = 0; variant < 4; variant++) {
            const int floats = kind >= KIND_BF16, exact = floats || (variant & 1);
            const Part part = {words,        widths[kind], N, floats ? 0 : scale, floats || variant < 2 ? 0 : zero, 0, 0, kind,
                               floats ? SCALE_NONE : SCALE_F32};
            const int k = floats ? K - 5 * variant : K; /* rows of floats may have any length */
            compress_linear(&(LinearCall){{CALL_LINEAR, isa, 1, exact}, x, K, y, N, M, k, 64, floats ? k : G, &part, 1});
            print_hash(y, sizeof y);
        }
    }
    compress_gate(&(GateCall){{CALL_GATE, isa, 1, 0}, x, gated, K, M, K / 2});
    print_hash(gated, sizeof gated / 2);
    compress_gate(&(GateCall){{CALL_GATE, isa, 1, 1}, x, gated, K, M, K / 2});
    print_hash(gated, sizeof gated / 2);
    compress_norm(&(NormCall){{CALL_NORM, isa, 1, 1}, x, x, total, weight, gated, K, K, M, K, 1e-5f});
    print_hash(gated, sizeof gated);
    for (int i = 0; i < 8 * 16 * 2 * 32; i++)
        cache[i] = number();
    for (int i = 0; i < 5 * 6 * 32; i++)
        q[i] = number();
    const int32_t pages[] = {3, 1, 2, 0, 5, 4, 7, 6};
    const Request request = {0, 5, 100, 0};
    const Cache keys = {cache, 0, 16 * 2 * 32, 2 * 32, 32, 0, 0, 0, PAGE_F32};
    const Batch batch = {&request, pages, 1};
    const AttentionProblem problem = {q, out, 6 * 32, 32, keys, keys, &batch, 0, 6, 2, 32, 16, 50, 0.2f, 3.0f};
    compress_attention(&(AttentionCall){{CALL_ATTENTION, isa, 1, 0}, problem});
    print_hash(out, sizeof out);
    /* one token: its keys are read in place, and its tiles are shared out among two threads */
    const Request last = {4, 1, 100, 0};
    const Batch one = {&last, pages, 1};
    for (int i = 0; i < 8 * 16 * 2; i++)
        page_scale[i] = number();
    for (int type = PAGE_F32; type <= PAGE_E4M3; type++) {
        for (size_t i = 0; i < sizeof cache; i++) /* no infinities, no NaN */
            ((uint8_t *)cache)[i] = (uint8_t)(next() >> 24) & (type == PAGE_E4M3 || i % 2 ? 0xbb : 0xff);
        const Cache pages_of_type = {cache, type < PAGE_INT8 ? 0 : page_scale, 16 * 2 * 32, 2 * 32, 32, 16 * 2, 2, 1, type};
        const AttentionProblem decode = {q, out, 6 * 32, 32, pages_of_type, pages_of_type, &one, 0, 6, 2, 32, 16, 0, 0.2f, 3.0f};
        compress_attention(&(AttentionCall){{CALL_ATTENTION, isa, 2, 0}, decode});
        print_hash(out + 4 * 6 * 32, sizeof out / 5);
    }
    choose(isa);
    printf("\n");
}

int main(void)
{
    for (int isa = 0; isa < 4; isa++)
        if (compress_supports(isa))
            run(isa);
    return 0;
}
