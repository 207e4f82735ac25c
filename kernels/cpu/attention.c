/* The C interface of paged attention, and how its work is shared out. */
#include "program.h"
#include "threads.h"

#include <stdlib.h>

#define LEAST_SHARE 40 /* of cost, about 100 kB of float32 keys and values: less is not worth another thread */
#define FULL_SHARE 4000 /* large enough that shares may be given out one by one, to whoever has time */

/* Of a tile: its keys and values come from memory, which takes as long as the products of some eight rows. */
static int64_t tile_cost(const QueryBlock *block)
{
    return 8 * block->kv_heads + block_rows(block);
}

/* How queries are put together. */
typedef struct {
    int64_t heads;  /* of a KV head, in a block */
    int64_t tokens; /* in a block of one KV head */
    int several;    /* whether the few rows of a request take blocks of several KV heads */
} Grouping;

static Grouping group_queries(const AttentionProblem *p, int threads)
{
    int64_t tiles = 0;
    for (int64_t i = 0; i < p->batch->count; i++)
        tiles += (p->batch->requests[i].context + KEYS - 1) / KEYS;
    const int64_t heads = least(p->heads / p->kv_heads, QUERY_ROWS);
    return (Grouping){heads, QUERY_ROWS / heads, tiles >= 8 * threads};
}

/* KV heads of each block of a request: as even as can be. */
static int64_t heads_together(const AttentionProblem *p, Grouping grouping, const Request *r)
{
    const int64_t rows = r->length * (p->heads / p->kv_heads);
    if (!grouping.several || rows > QUERY_ROWS / 2 || !rows)
        return 1;
    const int64_t most = QUERY_ROWS / rows, blocks = (p->kv_heads + most - 1) / most;
    return (p->kv_heads + blocks - 1) / blocks;
}

static int64_t count_blocks(const AttentionProblem *p, Grouping g)
{
    const int64_t group = p->heads / p->kv_heads, head_blocks = (group + g.heads - 1) / g.heads;
    int64_t blocks = 0;
    for (const Request *r = p->batch->requests; r < p->batch->requests + p->batch->count; r++) {
        const int64_t together = heads_together(p, g, r);
        blocks += (r->length + g.tokens - 1) / g.tokens * ((p->kv_heads + together - 1) / together) * head_blocks;
    }
    return blocks;
}

/* The blocks of a batch in its order, and their cost. */
static int64_t list_blocks(const AttentionProblem *p, Grouping g, QueryBlock *next)
{
    const int64_t group = p->heads / p->kv_heads;
    int64_t cost = 0;
    for (const Request *r = p->batch->requests; r < p->batch->requests + p->batch->count; r++) {
        const int64_t together = heads_together(p, g, r);
        for (int64_t t = 0; t < r->length; t += g.tokens) {
            const int64_t position = r->context - r->length + t, tokens = least(g.tokens, r->length - t);
            const int64_t oldest = p->window && position >= p->window ? position - p->window + 1 : 0;
            const int64_t tile = oldest / KEYS, stop = position + tokens;
            for (int64_t k = 0; k < p->kv_heads; k += together)
                for (int64_t h = 0; h < group; h += g.heads, next++) {
                    *next = (QueryBlock){.request = r,
                                         .kv_head = k,
                                         .kv_heads = least(together, p->kv_heads - k),
                                         .first_token = t,
                                         .tokens = tokens,
                                         .heads = least(g.heads, group - h),
                                         .first_head = k * group + h,
                                         .first_tile = tile,
                                         .tiles = (stop + KEYS - 1) / KEYS - tile,
                                         .stop = stop};
                    cost += next->tiles * tile_cost(next);
                }
        }
    }
    return cost;
}

/* Cuts that make `shares` shares of equal cost, and how many shares work on each block. A cut near the end of a block
 * moves there: what is gained by dividing a block is to be worth the joining. */
static void cut_blocks(QueryBlock *blocks, int64_t count, int64_t cost, int64_t shares, Cut *cuts)
{
    const int64_t slack = cost / shares / 16;
    int64_t next = 1, before = 0;
    cuts[0] = (Cut){0, 0};
    for (int64_t b = 0; b < count; b++) {
        const int64_t each = tile_cost(&blocks[b]), all = each * blocks[b].tiles;
        blocks[b].pending = 1;
        for (int64_t last = 0; next < shares && cost * next / shares < before + all; next++) {
            const int64_t at = cost * next / shares - before, tile = (at + each / 2) / each;
            if (at <= slack || tile == 0) {
                cuts[next] = (Cut){b, 0};
            } else if (all - at <= slack || tile == blocks[b].tiles) {
                cuts[next] = (Cut){b + 1, 0};
            } else {
                cuts[next] = (Cut){b, tile};
                blocks[b].pending += tile > last;
                last = tile;
            }
        }
        before += all;
    }
    for (; next <= shares; next++)
        cuts[next] = (Cut){count, 0};
}

/* The tiles of divided blocks keep their states in memory of their own, to be freed: `parts`. Returns 1 where none is
 * left. */
static int divide_blocks(const AttentionProblem *p, QueryBlock *blocks, int64_t count, float **parts)
{
    int64_t floats = 0;
    for (int64_t b = 0; b < count; b++)
        if (blocks[b].pending > 1)
            floats += blocks[b].tiles * state_floats(block_rows(&blocks[b]), p->dim);
    float *next = *parts = floats ? malloc(sizeof *next * (size_t)floats) : 0;
    if (floats && !next)
        return 1;
    for (int64_t b = 0; b < count; b++)
        if (blocks[b].pending > 1) {
            blocks[b].parts = next;
            next += blocks[b].tiles * state_floats(block_rows(&blocks[b]), p->dim);
        }
    return 0;
}

typedef struct {
    const Kernels *kernels;
    const AttentionProblem *problem;
    QueryBlock *blocks;
    const Cut *cuts;
} Shares;

static void attend_shares(const void *context, int worker, int64_t first, int64_t last)
{
    const Shares *s = context;
    (void)worker;
    for (const Cut *cut = s->cuts + first; cut < s->cuts + last; cut++)
        if (cut[0].block != cut[1].block || cut[0].tile != cut[1].tile)
            s->kernels->attend(s->problem, s->blocks, cut[0], cut[1]);
}

/* softmax(q K^T) V over the pages of each request. Returns 1 where memory ran out. */
int compress_attention(const AttentionCall *c)
{
    const AttentionProblem *p = &c->problem;
    const Kernels *kernels = kernels_of(c->call.isa);
    const int threads = c->call.threads;
    const Grouping grouping = group_queries(p, threads);
    const int64_t count = count_blocks(p, grouping);
    if (!count)
        return 0;
    QueryBlock *blocks = malloc(sizeof *blocks * (size_t)count + sizeof(Cut) * (size_t)(4 * threads + 1));
    if (!blocks)
        return 1;
    Cut *cuts = (Cut *)(blocks + count);
    const int64_t cost = list_blocks(p, grouping, blocks);
    int64_t shares = least(threads, cost / LEAST_SHARE + 1);
    if (shares > 1 && cost >= threads * FULL_SHARE)
        shares = 4 * threads;
    cut_blocks(blocks, count, cost, shares, cuts);
    float *parts;
    if (divide_blocks(p, blocks, count, &parts)) {
        free(blocks);
        return 1;
    }
    share_out(threads, shares, attend_shares, &(Shares){kernels, p, blocks, cuts});
    free(parts);
    free(blocks);
    return 0;
}
