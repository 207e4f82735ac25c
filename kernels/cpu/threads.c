/* Threads that take what is left of a job, and that nobody waits for.
 *
 * A step is some hundred jobs of ten to a hundred microseconds. Where another process keeps a core busy, a thread that
 * is woken runs a millisecond later: a barrier of all threads would make each job take that long. Here the caller
 * begins at once, and a job is done when its items are: a thread that comes late finds nothing to do. Each thread
 * begins with a stretch of items of its own, half of what is left of it at a time, and then helps with the others'.
 */
#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#define MAX_THREADS 256
#define PATIENCE 50000 /* nanoseconds that a thread looks for the next job before it sleeps: longer than between layers */

/* A stretch of a job's items: the job's number above, the next item below. */
typedef struct {
    _Alignas(64) _Atomic uint64_t ticket;
} Stretch;

static Stretch stretches[MAX_THREADS];
static _Atomic(Body) job_body;
static _Atomic(const void *) job_context;
static _Atomic int64_t job_count;
static _Atomic int job_threads;
static _Alignas(64) _Atomic int64_t done;
static _Alignas(64) _Atomic uint32_t job_number;

typedef struct {
    _Alignas(64) _Atomic int asleep;
    pthread_cond_t morning;
    uint32_t seen; /* the last job before it was started */
} Worker;

static Worker workers[MAX_THREADS];
static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER; /* held while a job runs: there is one at a time */
static pthread_mutex_t bed = PTHREAD_MUTEX_INITIALIZER;
static int started;

static inline void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Take items of a stretch of job `number`. What is read of the job may be the next one's already; then the ticket has
 * changed too, and nothing is taken. */
static int take(int index, uint32_t number, int64_t *first, int64_t *last)
{
    uint64_t ticket = atomic_load(&stretches[index].ticket);
    for (;;) {
        const int64_t next = (uint32_t)ticket, stop = job_count * (index + 1) / job_threads;
        if (ticket >> 32 != number || next >= stop)
            return 0;
        const int64_t items = (stop - next + 1) / 2;
        if (atomic_compare_exchange_weak(&stretches[index].ticket, &ticket, ticket + (uint64_t)items)) {
            *first = next;
            *last = next + items;
            return 1;
        }
    }
}

static void work(int worker, uint32_t number)
{
    const int threads = job_threads;
    for (int i = 0; i < threads; i++) {
        int64_t first, last;
        while (take((worker + i) % threads, number, &first, &last)) {
            job_body(job_context, worker, first, last);
            atomic_fetch_add(&done, last - first);
        }
    }
}

/* A job after `seen` that has a place for this thread. One that the last job had none for sleeps at once. */
static uint32_t wait_for_job(int index, uint32_t seen)
{
    const int64_t end = now() + PATIENCE;
    while (index < job_threads && now() < end)
        for (int i = 0; i < 32; i++) {
            const uint32_t number = job_number;
            if (number != seen)
                return number;
            pause_briefly();
        }
    Worker *self = workers + index;
    pthread_mutex_lock(&bed);
    self->asleep = 1;
    while (job_number == seen || index >= job_threads)
        pthread_cond_wait(&self->morning, &bed);
    self->asleep = 0;
    pthread_mutex_unlock(&bed);
    return job_number;
}

static void *run_worker(void *argument)
{
    const int index = (int)((Worker *)argument - workers);
    for (uint32_t seen = workers[index].seen;;) {
        seen = wait_for_job(index, seen);
        if (index < job_threads)
            work(index, seen);
    }
    return 0;
}

/* A forked child has this thread alone. A job that ran when it was forked is its parent's. */
static void forget_workers(void)
{
    static const pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    caller = bed = mutex;
    started = 0;
    job_threads = 0;
    for (int i = 0; i < MAX_THREADS; i++) {
        stretches[i].ticket = UINT32_MAX;
        workers[i].asleep = 0;
    }
}

static void start_workers(int threads)
{
    static int watching;
    sigset_t all, before;
    if (started + 1 >= threads)
        return;
    if (!watching)
        watching = !pthread_atfork(0, 0, forget_workers);
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; started + 1 < threads; started++) {
        static const pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
        Worker *worker = workers + started + 1;
        worker->morning = condition;
        worker->seen = job_number;
        if (pthread_create(&thread, 0, run_worker, worker))
            break; /* fewer threads then */
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

static void publish(int threads, int64_t count, Body body, const void *context)
{
    const uint32_t number = job_number + 1;
    /* before anything of the job changes, nothing of the last one can be taken any more */
    for (int i = 0; i < job_threads; i++)
        stretches[i].ticket = UINT32_MAX;
    done = 0;
    job_body = body;
    job_context = context;
    job_count = count;
    job_threads = threads;
    for (int i = 0; i < threads; i++)
        stretches[i].ticket = (uint64_t)number << 32 | (uint64_t)(count * i / threads);
    job_number = number;
    for (int i = 1; i < threads; i++)
        if (workers[i].asleep) {
            pthread_mutex_lock(&bed);
            pthread_cond_signal(&workers[i].morning);
            pthread_mutex_unlock(&bed);
        }
}

void share_out(int threads, int64_t count, Body body, const void *context)
{
    threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    threads = threads < count ? threads : (int)count;
    if (threads <= 1 || pthread_mutex_trylock(&caller)) { /* another thread's job has the workers */
        if (count > 0)
            body(context, 0, 0, count);
        return;
    }
    start_workers(threads);
    publish(threads, count, body, context);
    work(0, job_number);
    for (int64_t i = 0; done < count; i++) {
        if (i < 1000)
            pause_briefly();
        else
            sched_yield(); /* the thread with the last items may want this core */
    }
    pthread_mutex_unlock(&caller);
}
