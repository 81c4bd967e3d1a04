/* The only place that knows threads. */
#ifndef ATTN_THREADS_H
#define ATTN_THREADS_H

#include "alloc.h"

#include <stdatomic.h>

/* The most threads a context may ask for; attn.h says so. */
#define ATTN__MAX_THREADS 1024

/* worker is below the number of threads asked for and tells apart calls of the
 * body that run at the same time: it selects their scratch memory. */
typedef void (*attn__body_fn)(void *data, int64_t task, int32_t worker);

typedef struct attn__pool attn__pool;

/* What attn__parallel_for runs on. */
typedef struct attn__executor {
    int32_t num_threads;
    attn_parallel_for_fn parallel_for; /* the host's, or NULL: pool */
    void *parallel_user;
    attn__pool *pool; /* not NULL if parallel_for is NULL and num_threads > 1 */
} attn__executor;

/* A pool whose threads start when first needed. NULL: no memory. */
attn__pool *attn__pool_create(const attn__allocator *allocator);
size_t attn__pool_bytes(void);
void attn__pool_destroy(attn__pool *pool, const attn__allocator *allocator);

/*
 * body(data, t, worker) once for each task t in [0, num_tasks), on at most
 * executor->num_threads threads, tasks handed out in order; returns when all
 * are done. Inside a body, and where threads can not be had, it is a loop.
 */
void attn__parallel_for(const attn__executor *executor, int64_t num_tasks,
                        attn__body_fn body, void *data);

/* As many of the threads as so many multiply-adds keep busy: at least 1. */
int32_t attn__threads_for(int32_t threads, double work);

/* Runs fn if no call with this flag has yet; returns after it has run. fn must
 * not come here again. */
void attn__run_once(atomic_int *done, void (*fn)(void));

/* One lock for the whole process: for a BLAS that only one thread may enter. */
void attn__process_lock(void);
void attn__process_unlock(void);

/* Around a call that takes locks of another library: another thread's fork
 * waits for its end, as in the child nobody would ever give them back. */
void attn__unforkable_begin(void);
void attn__unforkable_end(void);

#endif
