/* Rows of floats: tokens are packed once, then the rows of all parts are shared out among the threads. */
#include <stdlib.h>

#include "linear.h"

#define SHARE 8 /* rows: the threads' shares differ by no more */

/* The rows of all parts, laid end to end, in shares [first, last) of SHARE rows. */
static void rows_of_shares(const Kernels *kernels, const Problem *p, const Part *parts, int count, int64_t first,
                           int64_t last)
{
    for (int i = 0; i < count && last > 0; i++) {
        const int64_t shares = (parts[i].n + SHARE - 1) / SHARE;
        if (first < shares)
            kernels->float_rows(p, parts + i, (first > 0 ? first : 0) * SHARE, least(last * SHARE, parts[i].n));
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
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        if (packed) {
#pragma omp for schedule(static)
            for (int t = 0; t < p->m; t++)
                kernels->pack_token(p, t);
        }
#pragma omp for schedule(static)
        for (int i = 0; i < threads; i++)
            rows_of_shares(kernels, p, parts, count, shares * i / threads, shares * (i + 1) / threads);
    }
    free(p->x_tiles);
    return 0;
}
