/* Rows of floats: tokens are packed once, then the rows of all parts are shared out among the threads. */
#include <stdlib.h>

#include "linear.h"
#include "threads.h"

#define SHARE 8 /* rows: the threads' shares differ by no more */

typedef struct {
    const Kernels *kernels;
    const Problem *problem;
    const Part *parts;
    int count;
} Rows;

static void pack_tokens(const void *context, int worker, int64_t first, int64_t last)
{
    const Rows *r = context;
    (void)worker;
    for (int64_t t = first; t < last; t++)
        r->kernels->pack_token(r->problem, (int)t);
}

/* The rows of all parts, laid end to end, in shares [first, last) of SHARE rows. */
static void compute_rows(const void *context, int worker, int64_t first, int64_t last)
{
    const Rows *r = context;
    (void)worker;
    for (const Part *part = r->parts; part < r->parts + r->count && last > 0; part++) {
        const int64_t shares = (part->n + SHARE - 1) / SHARE;
        if (first < shares)
            r->kernels->float_rows(r->problem, part, (first > 0 ? first : 0) * SHARE, least(last * SHARE, part->n));
        first -= shares;
        last -= shares;
    }
}

/* Returns 0, or 1 where memory ran out (nothing is computed then). One whole token is read where it is. */
int linear_rows(const Kernels *kernels, Problem *p, int threads, const Part *parts, int count)
{
    int64_t shares = 0;
    for (int i = 0; i < count; i++)
        shares += (parts[i].n + SHARE - 1) / SHARE;
    const int packed = p->m > 1 || p->k < p->padded;
    p->x_tiles = packed ? aligned_alloc(64, 4 * (size_t)p->m * (size_t)p->padded) : 0;
    if (packed && !p->x_tiles)
        return 1;
    const Rows rows = {kernels, p, parts, count};
    if (packed)
        share_out(p->m * p->k >= SHARED ? threads : 1, p->m, pack_tokens, &rows);
    share_out(threads, shares, compute_rows, &rows);
    free(p->x_tiles);
    return 0;
}
