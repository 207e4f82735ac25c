/* Calls of the kernels as records, so that a step is replayed by one call. call.py and program.py mirror the records. */
#ifndef COMPRESS_PROGRAM_H
#define COMPRESS_PROGRAM_H
#include <stdint.h>

#include "attention_problem.h"
#include "linear.h"

enum { CALL_LINEAR = 0, CALL_NORM = 1, CALL_HEAD_NORM = 2, CALL_GATE = 3, CALL_ROTATE = 4, CALL_STORE = 5, CALL_ATTENTION = 6 };

/* The head of each record. */
typedef struct {
    int32_t operation, isa, threads;
    int32_t variant; /* linear: exact; norms: 1 + weight; gate: gelu; rotate: interleaved; store: static scales */
} Call;

typedef struct {
    Call call;
    const float *x;
    int64_t x_stride;
    float *y;
    int64_t y_stride, m, k, block, group;
    const Part *parts;
    int64_t count;
} LinearCall;

typedef struct {
    Call call;
    const float *x, *residual;
    float *total;
    const float *weight;
    float *out;
    int64_t x_stride, residual_stride, rows, count;
    float eps;
} NormCall;

typedef struct {
    Call call;
    const float *x, *weight;
    float *out;
    int64_t token_stride, head_stride, tokens, heads, dim;
    float eps;
} HeadNormCall;

typedef struct {
    Call call;
    const float *x;
    float *out;
    int64_t x_stride, rows, count;
} GateCall;

typedef struct {
    Call call;
    const float *x, *cos, *sin;
    float *out;
    int64_t token_stride, head_stride, tokens, heads, dim, pairs;
} RotateCall;

typedef struct {
    Call call;
    const float *x;
    const int64_t *slots;
    Cache pages;
    int64_t token_stride, head_stride, page_size, tokens, heads, dim;
} StoreCall;

typedef struct {
    Call call;
    AttentionProblem problem;
} AttentionCall;

int compress_linear(const LinearCall *);
void compress_norm(const NormCall *);
void compress_head_norm(const HeadNormCall *);
void compress_gate(const GateCall *);
void compress_rotate(const RotateCall *);
void compress_store(const StoreCall *);
int compress_attention(const AttentionCall *);
#endif
