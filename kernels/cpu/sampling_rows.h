/* The functions of one instruction set that choose a token of a row. */
#ifndef COMPRESS_SAMPLING_ROWS_H
#define COMPRESS_SAMPLING_ROWS_H
#include <stdint.h>

#define COLUMNS_SUMMED 64 /* together, before a point of the cumulative distribution is looked for */

/* Rules of sampling.py, a row's; scale is 1 / temperature, or 0 for the likeliest token alone. */
typedef struct {
    double top_p, u;
    int64_t top_k;
    float scale, min_p;
} Rule;

/* A thread's memory for rows of `count` columns, rounded up to a multiple of 64. */
typedef struct {
    float *weight, *rest; /* [count] */
    int64_t *order;       /* [count] */
    double *sum;          /* [count / 64] */
    float *most;          /* [count / 64] */
} Scratch;

typedef struct {
    int64_t (*sample)(const float *x, int64_t count, const Rule *rule, Scratch *s);
    void (*distribution)(const float *x, int64_t count, const Rule *rule, float *out, Scratch *s);
    int64_t (*pick)(const float *p, const float *q, int64_t count, double u, double *sum);
    void (*logprobs)(const float *x, int64_t count, int64_t token, int64_t top, float *chosen, int64_t *ids,
                     float *values, Scratch *s);
} SampleKernels;
#endif
