/* Many small jobs on several threads: each item is worked on exactly once, before share_out comes back. */
#include "threads.h"

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
    const pid_t child = fork(); /* its threads are started anew */
    if (child == 0) {
        run_jobs(jobs / 10);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    printf("child %d\n", status);
#endif
    return 0;
}
