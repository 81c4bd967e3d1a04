/*
 * Threads: tasks of a fixed list handed out in order to a few workers. Which
 * worker runs a task changes nothing in its result, so results do not depend on
 * the number of threads.
 *
 * Why a pool of our own, in 200 lines, and not Debian's libpthreadpool: the
 * library is to need a CBLAS and the C library only; and that pool does not
 * survive fork, does not hand the caller's floating-point environment over
 * exactly (it knows a flag to disable denormals), and blocks a second caller
 * where ours lets it go on alone. Why not OpenMP: a runtime of its own per
 * process, teams per calling thread, hangs after fork.
 *
 * Workers sleep on a condition variable; before they do, they watch for the
 * next job for a moment, since layers follow each other closely.
 */
#define _GNU_SOURCE /* signal masks, processor affinity */
#include "attn_internal.h"

#include "threads.h"

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>

/* Rounds of watching before sleeping. A round is a pause instruction, some 40
 * cycles on Zen 4 and 140 on Skylake, so this is 20 to 80 microseconds: about
 * what a sleep and a wake-up cost together. Any value is correct. */
#define SPIN_ROUNDS 2000

/* Multiply-adds that one more thread is worth: 2^19 take a core some 10
 * microseconds, and so does waking a thread. */
#define MIN_WORK 524288

typedef struct job {
    attn__body_fn body;
    void *data;
    int64_t num_tasks;
    atomic_int_fast64_t next; /* the next task nobody has taken */
} job;

typedef struct worker {
    struct attn__pool *pool;
    pthread_t thread;
    int32_t index; /* 1 and up; the caller is worker 0 */
} worker;

struct attn__pool {
    pthread_mutex_t busy; /* held by the caller whose job runs */
    pthread_mutex_t lock; /* guards what follows, with both conditions */
    pthread_cond_t wake;
    pthread_cond_t done;
    job *job;
    int32_t wanted;         /* workers below this index take part */
    atomic_uint generation; /* counts jobs */
    atomic_int pending;     /* workers that have not finished this job */
    bool stop;
    fenv_t environment; /* the caller's rounding mode and flush bits */
    atomic_uint forks;  /* fork_count when the threads were started */
    int avoided_cpu;    /* where no worker runs, or -1 */
    int32_t num_workers;
    worker workers[ATTN__MAX_THREADS];
};

/* Set while this thread runs a body: what is called from there is serial. */
static _Thread_local bool inside;

/* How often this process is a child: threads do not survive fork. */
static atomic_uint fork_count;

/* Locks of the process. */
static pthread_mutex_t once_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t revival_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t process_lock = PTHREAD_MUTEX_INITIALIZER;

/* Calls that must not be cut in two by a fork, of all threads and of this one;
 * how many forks wait for them. */
static atomic_uint unforkable;
static _Thread_local unsigned own_unforkable;
static atomic_uint forking;

/* Waits for those of other threads. Its own, where a signal handler forks in
 * the middle of one, it would wait for for ever. (A handler that forks between
 * two instructions of attn__unforkable_begin leaves the child one too many:
 * its own forks would wait.) */
static void before_fork(void)
{
    atomic_fetch_add(&forking, 1);
    while (atomic_load(&unforkable) > own_unforkable)
        (void)sched_yield();
}

static void after_fork(void)
{
    atomic_fetch_sub(&forking, 1);
}

/* The child has one thread, so nobody holds a lock there: those that a thread
 * of the parent held when it forked would never be given back. */
static void begin_child(void)
{
    (void)pthread_mutex_init(&once_lock, NULL);
    (void)pthread_mutex_init(&revival_lock, NULL);
    (void)pthread_mutex_init(&process_lock, NULL);
    atomic_store(&unforkable, own_unforkable);
    atomic_store(&forking, 0);
    atomic_fetch_add(&fork_count, 1);
}

static void register_fork_handler(void)
{
    (void)pthread_atfork(before_fork, after_fork, begin_child);
}

static void watch_forks(void)
{
    /* Not attn__run_once, which needs it. */
    static pthread_once_t registered = PTHREAD_ONCE_INIT;

    (void)pthread_once(&registered, register_fork_handler);
}

static void pause_briefly(void)
{
#if defined(__GNUC__) && defined(__x86_64__)
    __builtin_ia32_pause();
#else
    (void)sched_yield();
#endif
}

static void run_tasks(job *j, int32_t worker_index)
{
    bool outer = inside;

    inside = true;
    for (;;) {
        int64_t task =
            atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
        if (task >= j->num_tasks)
            break;
        j->body(j->data, task, worker_index);
    }
    inside = outer;
}

/* ------------------------------------------------------------ Workers -- */

/* Returns when a job newer than `seen` is there, with the lock held. */
static void wait_for_job(attn__pool *pool, unsigned seen)
{
    for (int i = 0; i < SPIN_ROUNDS; i++) {
        if (atomic_load_explicit(&pool->generation, memory_order_acquire) !=
            seen)
            break;
        pause_briefly();
    }
    pthread_mutex_lock(&pool->lock);
    while (atomic_load_explicit(&pool->generation, memory_order_relaxed) ==
               seen &&
           !pool->stop)
        pthread_cond_wait(&pool->wake, &pool->lock);
}

static void *worker_main(void *arg)
{
    worker *self = arg;
    attn__pool *pool = self->pool;
    unsigned seen = 0;

    for (;;) {
        job *j = NULL;
        fenv_t environment;

        wait_for_job(pool, seen);
        if (pool->stop) {
            pthread_mutex_unlock(&pool->lock);
            return NULL;
        }
        seen = atomic_load_explicit(&pool->generation, memory_order_relaxed);
        /* A worker started during a job, or left out of it, has none. */
        if (pool->job && self->index < pool->wanted) {
            j = pool->job;
            environment = pool->environment;
        }
        pthread_mutex_unlock(&pool->lock);
        if (!j)
            continue;
        (void)fesetenv(&environment);
        run_tasks(j, self->index);
        if (atomic_fetch_sub_explicit(&pool->pending, 1,
                                      memory_order_acq_rel) == 1) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->lock);
        }
    }
}

/* Starts workers until there are `count`, or as many as the system gives; true
 * if there are new ones. */
static bool start_workers(attn__pool *pool, int32_t count)
{
    int32_t had = pool->num_workers;
    sigset_t all, before;

    if (pool->num_workers >= count)
        return false;
    /* Signals are for the host's threads. */
    (void)sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &before) != 0)
        return false;
    while (pool->num_workers < count) {
        worker *w = &pool->workers[pool->num_workers];
        w->pool = pool;
        w->index = pool->num_workers + 1;
        if (pthread_create(&w->thread, NULL, worker_main, w) != 0)
            break;
        pool->num_workers++;
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool->num_workers > had;
}

/* --------------------------------------------------------------- Pool -- */

static void reset(attn__pool *pool)
{
    (void)pthread_mutex_init(&pool->lock, NULL);
    (void)pthread_mutex_init(&pool->busy, NULL);
    (void)pthread_cond_init(&pool->wake, NULL);
    (void)pthread_cond_init(&pool->done, NULL);
    pool->job = NULL;
    pool->wanted = 0;
    atomic_init(&pool->generation, 0);
    atomic_init(&pool->pending, 0);
    pool->stop = false;
    pool->num_workers = 0;
    pool->avoided_cpu = -1;
    /* Last: whoever sees it may use the pool. */
    atomic_store_explicit(&pool->forks, atomic_load(&fork_count),
                          memory_order_release);
}

/* Are the pool's threads those of this process? */
static bool is_ours(attn__pool *pool)
{
    return atomic_load_explicit(&pool->forks, memory_order_acquire) ==
           atomic_load_explicit(&fork_count, memory_order_relaxed);
}

/* In a child of fork, whose threads may come here together. */
static void revive(attn__pool *pool)
{
    pthread_mutex_lock(&revival_lock);
    if (!is_ours(pool))
        reset(pool);
    pthread_mutex_unlock(&revival_lock);
}

size_t attn__pool_bytes(void)
{
    return sizeof(attn__pool);
}

attn__pool *attn__pool_create(const attn__allocator *allocator)
{
    attn__pool *pool = attn__alloc(allocator, sizeof *pool);

    if (!pool)
        return NULL;
    watch_forks();
    reset(pool);
    return pool;
}

void attn__pool_destroy(attn__pool *pool, const attn__allocator *allocator)
{
    if (!pool)
        return;
    /* In a child of fork the threads are the parent's; there is none here. */
    if (is_ours(pool)) {
        pthread_mutex_lock(&pool->lock);
        pool->stop = true;
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
        for (int32_t i = 0; i < pool->num_workers; i++)
            (void)pthread_join(pool->workers[i].thread, NULL);
        (void)pthread_cond_destroy(&pool->wake);
        (void)pthread_cond_destroy(&pool->done);
        (void)pthread_mutex_destroy(&pool->lock);
        (void)pthread_mutex_destroy(&pool->busy);
    }
    attn__free(allocator, pool);
}

/*
 * Keeps the workers off the processor that the caller runs on. Linux likes to
 * wake a thread where its waker is; the caller then goes on with the tasks, and
 * by the time the worker runs nothing is left (12 heads of 128 x 128 x 64 on
 * two idle processors: 615 us a call instead of 275). Only our own threads are
 * touched, and only when the caller has moved.
 */
static void keep_off_caller(attn__pool *pool)
{
#if defined(__linux__) && defined(CPU_SETSIZE)
    cpu_set_t allowed;
    int cpu = sched_getcpu();

    if (cpu < 0 || cpu >= CPU_SETSIZE || cpu == pool->avoided_cpu)
        return;
    if (pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) != 0)
        return;
    pool->avoided_cpu = cpu;
    if (CPU_COUNT(&allowed) > 1)
        CPU_CLR((size_t)cpu, &allowed);
    for (int32_t i = 0; i < pool->num_workers; i++)
        (void)pthread_setaffinity_np(pool->workers[i].thread, sizeof allowed,
                                     &allowed);
#else
    (void)pool;
#endif
}

static void publish(attn__pool *pool, job *j, int32_t helpers)
{
    pthread_mutex_lock(&pool->lock);
    if (start_workers(pool, helpers))
        pool->avoided_cpu = -1;
    keep_off_caller(pool);
    helpers = MIN(helpers, pool->num_workers);
    pool->job = j;
    pool->wanted = helpers + 1;
    (void)fegetenv(&pool->environment);
    atomic_store_explicit(&pool->pending, helpers, memory_order_relaxed);
    atomic_fetch_add_explicit(&pool->generation, 1, memory_order_release);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

static void wait_until_done(attn__pool *pool)
{
    for (int i = 0; i < SPIN_ROUNDS; i++) {
        if (atomic_load_explicit(&pool->pending, memory_order_acquire) == 0)
            break;
        pause_briefly();
    }
    pthread_mutex_lock(&pool->lock);
    while (atomic_load_explicit(&pool->pending, memory_order_acquire) != 0)
        pthread_cond_wait(&pool->done, &pool->lock);
    pool->job = NULL;
    pthread_mutex_unlock(&pool->lock);
}

/* False if another caller's job is running. */
static bool run_on_pool(attn__pool *pool, job *j, int32_t threads)
{
    if (!is_ours(pool))
        revive(pool);
    if (pthread_mutex_trylock(&pool->busy) != 0)
        return false;
    publish(pool, j, threads - 1);
    run_tasks(j, 0);
    wait_until_done(pool);
    pthread_mutex_unlock(&pool->busy);
    return true;
}

/* ------------------------------------------------------- Parallel loop -- */

static void host_task(void *arg, int64_t index)
{
    run_tasks(arg, (int32_t)index);
}

/* MIN_WORK, or ATTN_MIN_WORK: tests set it to 0, to have threads in problems
 * that an oracle can follow. */
static double min_work(void)
{
    static _Atomic double known = -1.0;
    double work = atomic_load_explicit(&known, memory_order_relaxed);

    if (work < 0.0) {
        const char *text = getenv("ATTN_MIN_WORK");
        work = text ? strtod(text, NULL) : MIN_WORK;
        work = work >= 0.0 ? work : MIN_WORK;
        atomic_store_explicit(&known, work, memory_order_relaxed);
    }
    return work;
}

int32_t attn__threads_for(int32_t threads, double work)
{
    double least = min_work();
    double enough = least > 0.0 ? 1.0 + work / least : threads;

    return enough < threads ? (int32_t)enough : threads;
}

void attn__parallel_for(const attn__executor *executor, int64_t num_tasks,
                        attn__body_fn body, void *data)
{
    int32_t threads = (int32_t)MIN((int64_t)executor->num_threads, num_tasks);
    job j = {body, data, num_tasks, 0};

    if (threads > 1 && !inside) {
        if (executor->parallel_for) {
            executor->parallel_for(executor->parallel_user, threads, host_task,
                                   &j);
            return;
        }
        if (run_on_pool(executor->pool, &j, threads))
            return;
    }
    run_tasks(&j, 0);
}

/* ---------------------------------------------------------- Once, lock -- */

void attn__run_once(atomic_int *done, void (*fn)(void))
{
    if (atomic_load_explicit(done, memory_order_acquire))
        return;
    watch_forks();
    pthread_mutex_lock(&once_lock);
    if (!atomic_load_explicit(done, memory_order_relaxed)) {
        fn();
        atomic_store_explicit(done, 1, memory_order_release);
    }
    pthread_mutex_unlock(&once_lock);
}

void attn__process_lock(void)
{
    pthread_mutex_lock(&process_lock);
}

void attn__process_unlock(void)
{
    pthread_mutex_unlock(&process_lock);
}

void attn__unforkable_begin(void)
{
    /* Either this thread sees the fork, or the fork sees this thread. */
    own_unforkable++;
    atomic_fetch_add(&unforkable, 1);
    while (own_unforkable == 1 && atomic_load(&forking) > 0) {
        atomic_fetch_sub(&unforkable, 1);
        (void)sched_yield();
        atomic_fetch_add(&unforkable, 1);
    }
}

void attn__unforkable_end(void)
{
    atomic_fetch_sub(&unforkable, 1);
    own_unforkable--;
}
