/* The C interface of paged attention. */
#include "program.h"

#include <stdlib.h>
#include <string.h>

/* softmax(q K^T) V over the pages of each request. Blocks of queries are shared out among the threads. Returns 1 where
 * memory ran out. */
int compress_attention(const AttentionCall *c)
{
    const AttentionProblem *p = &c->problem;
    const Batch *batch = p->batch;
    const Kernels *kernels = kernels_of(c->call.isa);
    const int threads = c->call.threads;
    const int64_t group = p->heads / p->kv_heads;
    const int64_t heads = least(group, QUERY_ROWS), tokens = QUERY_ROWS / heads;
    const int64_t head_blocks = (group + heads - 1) / heads;
    int64_t blocks = 0;
    for (int64_t i = 0; i < batch->count; i++)
        blocks += (batch->requests[i].length + tokens - 1) / tokens;
    blocks *= p->kv_heads * head_blocks;
    QueryBlock *list = malloc(sizeof *list * (size_t)(blocks + 1));
    if (!list)
        return 1;
    QueryBlock *next = list;
    for (int64_t i = 0; i < batch->count; i++)
        /* the last tokens see the most keys: they come first, so that no thread is left with them */
        for (int64_t last = batch->requests[i].length; last > 0; last -= tokens)
            for (int64_t k = 0; k < p->kv_heads; k++)
                for (int64_t h = 0; h < group; h += heads)
                    *next++ = (QueryBlock){&batch->requests[i],       k, last > tokens ? last - tokens : 0,
                                           least(last, tokens), k * group + h, least(heads, group - h)};
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && blocks > 1)
    for (int64_t i = 0; i < blocks; i++)
        kernels->attend(p, &list[i]);
    free(list);
    return 0;
}
