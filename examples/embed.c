/*
 * libattn inside a host that has its own threads and its own memory: the host
 * runs the tasks, provides the scratch memory once, and no call allocates.
 * The result is the same, bit for bit, as with one thread.
 */
#define _POSIX_C_SOURCE 200112L

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <attn.h>

enum { B = 2, H = 4, T = 300, D = 32, WORKERS = 3 };

static void must(attn_status status)
{
    if (status) {
        fprintf(stderr, "%s\n", attn_last_error());
        exit(1);
    }
}

/* ------------------------------- The host's side: a very small parallel_for */

struct job {
    attn_task_fn task;
    void *arg;
    int64_t next, n;
    pthread_mutex_t lock;
};

static void *worker(void *data)
{
    struct job *job = data;
    for (;;) {
        int64_t index;
        pthread_mutex_lock(&job->lock);
        index = job->next++;
        pthread_mutex_unlock(&job->lock);
        if (index >= job->n)
            return NULL;
        job->task(job->arg, index);
    }
}

/* A thread that cannot be started is no failure: the others do its work. */
static void host_parallel_for(void *user, int64_t n, attn_task_fn task,
                              void *arg)
{
    struct job job = {task, arg, 0, n, PTHREAD_MUTEX_INITIALIZER};
    pthread_t threads[WORKERS];
    int started = 0;

    *(int *)user += 1; /* calls so far */
    while (started < WORKERS - 1 && started + 1 < n &&
           !pthread_create(&threads[started], NULL, worker, &job))
        started++;
    worker(&job);
    while (started > 0)
        pthread_join(threads[--started], NULL);
    pthread_mutex_destroy(&job.lock);
}

/* ------------------------------------------------------------ Attention -- */

static float *filled(double phase)
{
    float *x = malloc(sizeof(float) * B * H * T * D);
    if (!x)
        exit(1);
    for (int n = 0; n < B * H * T * D; n++)
        x[n] = (float)sin(phase + 1.7 * n);
    return x;
}

int main(void)
{
    float *x[5];
    attn_tensor q, k, v, out, alone;
    attn_context *context;
    attn_context_params host = ATTN_CONTEXT_PARAMS_INIT;
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    size_t bytes, alignment;
    void *work = NULL;
    int calls = 0, same;

    for (int n = 0; n < 5; n++)
        x[n] = filled(n);
    must(attn_view_bhtd(&q, ATTN_F32, x[0], B, H, T, D));
    must(attn_view_bhtd(&k, ATTN_F32, x[1], B, H, T, D));
    must(attn_view_bhtd(&v, ATTN_F32, x[2], B, H, T, D));
    must(attn_view_bhtd(&out, ATTN_F32, x[3], B, H, T, D));
    must(attn_view_bhtd(&alone, ATTN_F32, x[4], B, H, T, D));

    host.num_threads = WORKERS;
    host.parallel_for = host_parallel_for;
    host.parallel_user = &calls;
    must(attn_context_create(&context, &host));

    /* Asked for once, for the largest problem; good for all smaller ones. */
    params.causal = 1;
    must(attn_sdpa_workspace(context, &params, &q, &k, &v, &out, &bytes,
                             &alignment));
    if (alignment < sizeof(void *))
        alignment = sizeof(void *);
    if (posix_memalign(&work, alignment, bytes ? bytes : 1))
        return 1;
    must(attn_sdpa_work(context, &params, &q, &k, &v, &out, work, bytes));

    must(attn_sdpa(NULL, &params, &q, &k, &v, &alone));
    same = !memcmp(x[3], x[4], sizeof(float) * B * H * T * D);
    printf("%zu bytes of scratch, host's parallel_for called %d times, same "
           "bits as alone: %s\n",
           bytes, calls, same ? "yes" : "no");
    attn_context_destroy(context);
    free(work);
    for (int n = 0; n < 5; n++)
        free(x[n]);
    return same && calls > 0 ? 0 : 1;
}
