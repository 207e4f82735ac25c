/* Sharing out work among threads. */
#ifndef COMPRESS_THREADS_H
#define COMPRESS_THREADS_H
#include <stdint.h>

#define SHARED 32768 /* numbers to look at, from which on another thread is worth it */

/* Items [first, last) of a job; `worker` is below the job's number of threads, and its own while it works on the job. */
typedef void (*Body)(const void *context, int worker, int64_t first, int64_t last);

/* Run a job of up to 2^31 items on up to so many threads, and come back when it is done. */
void share_out(int threads, int64_t count, Body body, const void *context);
#endif
