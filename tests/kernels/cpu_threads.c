/* Many small jobs on several threads: each item is worked on exactly once, before share_out comes back. */
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ITEMS = 300, WORKERS = 7 };

static _Atomic int visits[ITEMS];
static _Atomic int inside[WORKERS];
static _Atomic int helped;

static void visit(const void *context, int worker, int64_t first, int64_t last)
{
    const int busy = *(const int *)context;
    if (worker < 0 || worker >= WORKERS || inside[worker]++)
        abort(); /* two threads with one worker's memory */
    helped |= worker > 0;
    for (int64_t i = first; i < last; i++) {
        visits[i]++;
        for (volatile int spin = 0; spin < busy; spin++)
            ;
    }
    inside[worker]--;
}

static void run_jobs(int jobs)
{
    for (int job = 0; job < jobs; job++) {
        const int count = rand() % (ITEMS + 1), threads = 1 + rand() % WORKERS, busy = rand() % 50;
        share_out(threads, count, visit, &busy);
        for (int i = 0; i < ITEMS; i++) {
            if (visits[i] != (i < count)) {
                printf("job %d: item %d of %d was visited %d times\n", job, i, count, visits[i]);
                exit(1);
            }
            visits[i] = 0;
        }
        if (job % 512 == 0)
            nanosleep(&(struct timespec){0, 300000}, 0); /* the threads go to sleep */
    }
}

static _Atomic int stop, parents;

static void count_calls(const void *context, int worker, int64_t first, int64_t last)
{
    (void)context, (void)worker, (void)first, (void)last;
    parents++;
    for (volatile int spin = 0; spin < 2000; spin++)
        ;
}

static void *work_on(void *nothing)
{
    while (!stop)
        share_out(4, 64, count_calls, 0);
    return nothing;
}

int main(int count, char **values)
{
    const int jobs = count > 1 ? atoi(values[1]) : 1000;
    run_jobs(jobs);
    const int wide = 20000;
    for (int tries = 0; !helped && tries < 200; tries++) {
        share_out(WORKERS, ITEMS, visit, &wide);
        for (int i = 0; i < ITEMS; i++)
            visits[i] = 0;
    }
    printf("%s\n", helped ? "others helped" : "nobody helped");
#ifndef __SANITIZE_THREAD__ /* which starts no thread in a child */
    pthread_t other;
    pthread_create(&other, 0, work_on, 0);
    int failed = 0;
    for (int children = 0; children < 200; children++) { /* forked in the middle of the other thread's jobs */
        const pid_t child = fork();
        if (child == 0) {
            parents = 0;
            run_jobs(20);
            _exit(parents != 0); /* a job of its parent's */
        }
        int status;
        waitpid(child, &status, 0);
        failed += status != 0;
    }
    stop = 1;
    pthread_join(other, 0);
    printf("children failed: %d\n", failed);
#endif
    return 0;
}
