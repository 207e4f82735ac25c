/* The C interface of choosing tokens: rows are shared out among the threads. */
#include "linear.h"
#include "threads.h"

#include <stdlib.h>

/* What one call works on; sampling.py mirrors it. */
typedef struct {
    const float *x;  /* logits or probabilities [rows, count] */
    int64_t x_stride, rows, count;
    int32_t isa, threads;
    const Rule *rules;     /* [rows] */
    const double *u;       /* a number of each row of x */
    int64_t *token;        /* [rows]: what is chosen, or asked about */
    float *probs;          /* [rows, count] */
    int64_t top;           /* likeliest tokens to report */
    float *chosen;         /* [rows] */
    int64_t *ids;          /* [rows, top] */
    float *values;         /* [rows, top] */
    const int64_t *first;  /* [rows]: draft tokens of the requests before */
    const int64_t *length; /* [rows]: draft tokens of the request */
    const float *const *q; /* [rows]: their probabilities [length, count] */
    const int64_t *drafted;
    const double *chances; /* of each draft token */
    int64_t *accepted;     /* [rows] */
} Sampling;

typedef void (*Work)(const SampleKernels *kernels, const Sampling *p, int64_t row, Scratch *s);

/* Memory for a row; returns 0 where there is none. */
static int allocate(Scratch *s, int64_t count)
{
    const size_t blocks = (size_t)((count + COLUMNS_SUMMED - 1) / COLUMNS_SUMMED), columns = blocks * COLUMNS_SUMMED;
    s->order = malloc(16 * columns + 12 * blocks);
    if (!s->order)
        return 0;
    s->sum = (double *)(s->order + columns);
    s->weight = (float *)(s->sum + blocks);
    s->rest = s->weight + columns;
    s->most = s->rest + columns;
    return 1;
}

typedef struct {
    const Sampling *problem;
    Work work;
    Scratch *scratch; /* of each thread */
} Rows;

static void work_on_rows(const void *context, int worker, int64_t first, int64_t last)
{
    const Rows *r = context;
    const SampleKernels *kernels = &kernels_of(r->problem->isa)->sampling;
    for (int64_t row = first; row < last; row++)
        r->work(kernels, r->problem, row, r->scratch + worker);
}

/* Returns 0, or 1 where memory ran out. */
static int each_row(const Sampling *p, Work work)
{
    const int wanted = p->rows * p->count >= SHARED ? (int)least(p->rows, p->threads) : 1;
    Scratch *scratch = malloc(sizeof *scratch * (size_t)wanted);
    int threads = 0;
    while (scratch && threads < wanted && allocate(scratch + threads, p->count))
        threads++;
    if (threads) /* as many as there is memory for */
        share_out(threads, p->rows, work_on_rows, &(Rows){p, work, scratch});
    for (int i = 0; i < threads; i++)
        free(scratch[i].order);
    free(scratch);
    return !threads;
}

static void sample(const SampleKernels *kernels, const Sampling *p, int64_t row, Scratch *s)
{
    p->token[row] = kernels->sample(p->x + row * p->x_stride, p->count, p->rules + row, s);
}

static void distribution(const SampleKernels *kernels, const Sampling *p, int64_t row, Scratch *s)
{
    kernels->distribution(p->x + row * p->x_stride, p->count, p->rules + row, p->probs + row * p->count, s);
}

static void pick(const SampleKernels *kernels, const Sampling *p, int64_t row, Scratch *s)
{
    p->token[row] = kernels->pick(p->x + row * p->x_stride, 0, p->count, p->u[row], s->sum);
}

static void logprobs(const SampleKernels *kernels, const Sampling *p, int64_t row, Scratch *s)
{
    kernels->logprobs(p->x + row * p->x_stride, p->count, p->token[row], p->top, p->chosen + row,
                      p->ids + row * p->top, p->values + row * p->top, s);
}

/* A request has a row of x for each draft token and one more. */
static void verify(const SampleKernels *kernels, const Sampling *p, int64_t n, Scratch *s)
{
    const int64_t first = p->first[n], length = p->length[n];
    const float *x = p->x + (first + n) * p->x_stride, *q = p->q[n];
    int64_t i = 0;
    for (; i < length; i++, x += p->x_stride, q += p->count) {
        const int64_t token = p->drafted[first + i];
        if (!(p->chances[first + i] * (double)q[token] < (double)x[token]))
            break;
    }
    p->accepted[n] = i;
    p->token[n] = kernels->pick(x, i < length ? q : 0, p->count, p->u[first + n + i], s->sum);
}

int compress_sample(const Sampling *p) { return each_row(p, sample); }
int compress_distributions(const Sampling *p) { return each_row(p, distribution); }
int compress_pick(const Sampling *p) { return each_row(p, pick); }
int compress_verify(const Sampling *p) { return each_row(p, verify); }
int compress_logprobs(const Sampling *p) { return each_row(p, logprobs); }
