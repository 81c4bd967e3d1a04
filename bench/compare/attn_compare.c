/*
 * attn_compare: builds of libattn against each other on one shape, in turn.
 *
 *   attn_compare [--backward] [--dtype f32|f64] [--causal]
 *                [--layout bhtd|bthd] B,Hq,Hkv,Tq,Tk,D LIBRARY...
 *
 * On a machine that others use, two programs timed one after the other say
 * little. Here the libraries take turns in one process, by the thread's own CPU
 * time (../timing.h); what counts is the median over the rounds of the time
 * over the first one's. Each library is a file of its own with a slash in its
 * name, and may be linked with a BLAS of its own.
 *
 * --backward times the gradients of q, k and v instead. out and lse are then
 * the first library's, for all, and beside each time stands the largest
 * difference of its gradients from the first one's, over their largest number.
 */
#define _GNU_SOURCE /* RTLD_DEEPBIND */
#include <attn.h>

#include "../timing.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef RTLD_DEEPBIND /* all libraries then share the first one's BLAS */
#define RTLD_DEEPBIND 0
#endif

typedef attn_status (*sdpa_fn)(const attn_context *, const attn_sdpa_params *,
                               const attn_tensor *, const attn_tensor *,
                               const attn_tensor *, const attn_tensor *);
typedef attn_status (*backward_fn)(const attn_context *,
                                   const attn_sdpa_params *,
                                   const attn_tensor *, const attn_tensor *,
                                   const attn_tensor *, const attn_tensor *,
                                   const attn_tensor *,
                                   const attn_sdpa_gradients *);
typedef const char *(*last_error_fn)(void);

static struct problem {
    long long batch, heads, kv_heads, q_len, kv_len, width;
    int is_f64, backward;
    int by_token; /* (B,T,H,D) in place of (B,H,T,D) */
    long shift;   /* bytes from a line of cache to the arrays */
    attn_sdpa_params params;
    attn_tensor q, k, v, out;
} problem;

/* What --backward needs beside them. */
static struct gradients {
    attn_sdpa_params params;
    attn_tensor lse, d_out;
    attn_tensor d[3]; /* of q, k, v */
    attn_sdpa_gradients list;
} gradients;

struct library {
    const char *path;
    sdpa_fn sdpa;
    backward_fn backward; /* with --backward only */
    last_error_fn last_error;
};

static void fail(const char *what, const char *about)
{
    fprintf(stderr, "attn_compare: %s: %s\n", what, about);
    exit(2);
}

/* Ends the program with what the library says about its last call. */
static void refused(const struct library *l)
{
    fprintf(stderr, "attn_compare: the call was refused by %s: %s\n", l->path,
            l->last_error());
    exit(2);
}

/* POSIX promises that an object pointer from dlsym can hold a function. */
static void find(void *handle, const struct library *l, const char *name,
                 void *function)
{
    void *found = dlsym(handle, name);

    if (!found) {
        fprintf(stderr, "attn_compare: %s has no %s\n", l->path, name);
        exit(2);
    }
    memcpy(function, &found, sizeof(found));
}

static void load(struct library *l, const char *path)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);

    if (!handle)
        fail("cannot load", dlerror());
    l->path = path;
    find(handle, l, "attn_sdpa", &l->sdpa);
    find(handle, l, "attn_last_error", &l->last_error);
    if (problem.backward)
        find(handle, l, "attn_sdpa_backward", &l->backward);
}

/* What numbers() made. */
static void drop(void *memory)
{
    free((char *)memory - problem.shift);
}

/* Numbers in (-1, 1), the same in every run. */
static void *numbers(long long count, unsigned long long seed)
{
    size_t size = problem.is_f64 ? sizeof(double) : sizeof(float);
    size_t bytes = (size_t)count * size + (size_t)problem.shift;
    void *memory = aligned_alloc(64, (bytes / 64 + 1) * 64);

    if (!memory)
        fail("no memory", "for the tensors");
    memory = (char *)memory + problem.shift;
    for (long long i = 0; i < count; i++) {
        double x;
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        x = (double)(seed >> 11) * 0x1p-52 - 1.0;
        if (problem.is_f64)
            ((double *)memory)[i] = x;
        else
            ((float *)memory)[i] = (float)x;
    }
    return memory;
}

static attn_tensor tensor(void *data, long long heads, long long len,
                          long long width)
{
    attn_dtype dtype = problem.is_f64 ? ATTN_F64 : ATTN_F32;
    attn_tensor t = {data,
                     {problem.batch, heads, len, width},
                     {heads * len * width, len * width, width, 1},
                     dtype,
                     0};
    if (problem.by_token) {
        t.stride[1] = width;
        t.stride[2] = heads * width;
    }
    return t;
}

static attn_tensor new_tensor(const attn_tensor *like, long long width,
                              unsigned long long seed)
{
    long long count = like->shape[0] * like->shape[1] * like->shape[2] * width;
    return tensor(numbers(count, seed), like->shape[1], like->shape[2], width);
}

static void run(void *arg)
{
    const struct library *l = arg;
    const struct problem *p = &problem;

    if (l->sdpa(NULL, &p->params, &p->q, &p->k, &p->v, &p->out))
        refused(l);
}

/* ------------------------------------------------------------- Backward -- */

/* The tensors, and what the forward call of this library gives. */
static void make_gradients(const struct library *l)
{
    static const attn_sdpa_gradients list = ATTN_SDPA_GRADIENTS_INIT;
    const struct problem *p = &problem;
    struct gradients *g = &gradients;

    g->lse = new_tensor(&p->q, 1, 5);
    g->d_out = new_tensor(&p->q, p->width, 6);
    g->d[0] = new_tensor(&p->q, p->width, 7);
    g->d[1] = new_tensor(&p->k, p->width, 8);
    g->d[2] = new_tensor(&p->v, p->width, 9);
    g->params = p->params;
    g->params.lse = &g->lse;
    g->list = list;
    g->list.d_q = &g->d[0];
    g->list.d_k = &g->d[1];
    g->list.d_v = &g->d[2];
    if (l->sdpa(NULL, &g->params, &p->q, &p->k, &p->v, &p->out))
        refused(l);
}

static void run_backward(void *arg)
{
    const struct library *l = arg;
    const struct problem *p = &problem;
    const struct gradients *g = &gradients;

    if (l->backward(NULL, &g->params, &p->q, &p->k, &p->v, &p->out, &g->d_out,
                    &g->list))
        refused(l);
}

static double number_at(const attn_tensor *t, long long at)
{
    return t->dtype == ATTN_F64 ? ((const double *)t->data)[at]
                                : (double)((const float *)t->data)[at];
}

/* Largest difference of the numbers of a from those of b, over the largest
 * number of b. NaN shows as NaN. */
static double off_by(const attn_tensor *a, const attn_tensor *b)
{
    long long count = b->shape[0] * b->stride[0];
    double largest = 0, off = 0;

    for (long long i = 0; i < count; i++) {
        double x = number_at(b, i);
        double gap = fabs(number_at(a, i) - x);
        largest = fmax(largest, fabs(x));
        if (!(gap <= off))
            off = gap;
    }
    return largest > 0 ? off / largest : off;
}

/* Of the gradients of a library from those of the first: the worst of them. */
static double difference(struct library *l, struct library *first)
{
    struct gradients *g = &gradients;
    double worst = 0;
    void *mine[3];

    run_backward(l);
    for (int n = 0; n < 3; n++) {
        mine[n] = g->d[n].data;
        g->d[n] = new_tensor(&g->d[n], problem.width, 10);
    }
    run_backward(first);
    for (int n = 0; n < 3; n++) {
        attn_tensor of_l = g->d[n];
        double off;
        of_l.data = mine[n];
        off = off_by(&of_l, &g->d[n]);
        if (!(off <= worst))
            worst = off;
        drop(mine[n]);
    }
    return worst;
}

static void free_gradients(void)
{
    drop(gradients.lse.data);
    drop(gradients.d_out.data);
    for (int n = 0; n < 3; n++)
        drop(gradients.d[n].data);
}

/* ----------------------------------------------------------------- Main -- */

/* 4 B H Tq Tk d, and of the five products of the gradients 10 B H Tq Tk d. */
static double flops(void)
{
    const struct problem *p = &problem;
    return (p->backward ? 10.0 : 4.0) * (double)(p->batch * p->heads) *
           (double)p->q_len * (double)p->kv_len * (double)p->width;
}

int main(int argc, char **argv)
{
    static const struct timing_limits limits = {25, 3e-3, 60.0, 1};
    static struct library libraries[TIMING_MAX_TASKS];
    struct timing_task tasks[TIMING_MAX_TASKS];
    struct timing results[TIMING_MAX_TASKS];
    static const attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    struct problem *p = &problem;
    long long queries, keys;
    int n = 1, count;

    p->params = params;

    for (; n < argc && strncmp(argv[n], "--", 2) == 0; n++)
        if (strcmp(argv[n], "--causal") == 0) {
            p->params.causal = 1;
            p->params.align = ATTN_ALIGN_BOTTOM_RIGHT;
        } else if (strcmp(argv[n], "--backward") == 0)
            p->backward = 1;
        else if (strcmp(argv[n], "--layout") == 0 && n + 1 < argc)
            p->by_token = strcmp(argv[++n], "bthd") == 0;
        else if (strcmp(argv[n], "--dtype") == 0 && n + 1 < argc)
            p->is_f64 = strcmp(argv[++n], "f64") == 0;
        else if (strcmp(argv[n], "--shift") == 0 && n + 1 < argc)
            p->shift = labs(strtol(argv[++n], NULL, 10)) / 8 * 8;
        else
            fail("unknown option", argv[n]);
    count = argc - n - 1;
    if (count < 1 || count > TIMING_MAX_TASKS ||
        sscanf(argv[n], "%lld,%lld,%lld,%lld,%lld,%lld", &p->batch, &p->heads,
               &p->kv_heads, &p->q_len, &p->kv_len, &p->width) != 6)
        fail("usage", "attn_compare [--backward] [--dtype f32|f64] [--causal] "
                      "[--layout bhtd|bthd] [--shift BYTES] B,Hq,Hkv,Tq,Tk,D "
                      "LIBRARY... (8 at most)");
    queries = p->batch * p->heads * p->q_len * p->width;
    keys = p->batch * p->kv_heads * p->kv_len * p->width;
    p->q = tensor(numbers(queries, 1), p->heads, p->q_len, p->width);
    p->k = tensor(numbers(keys, 2), p->kv_heads, p->kv_len, p->width);
    p->v = tensor(numbers(keys, 3), p->kv_heads, p->kv_len, p->width);
    p->out = tensor(numbers(queries, 4), p->heads, p->q_len, p->width);
    for (int i = 0; i < count; i++) {
        load(&libraries[i], argv[n + 1 + i]);
        tasks[i].run = p->backward ? run_backward : run;
        tasks[i].arg = &libraries[i];
    }
    if (p->backward)
        make_gradients(&libraries[0]);
    timing_compare(tasks, count, &limits, results);
    for (int i = 0; i < count; i++) {
        printf("%-44s %10.1f us %7.1f GFLOP/s   time / first %.3f",
               libraries[i].path, results[i].min * 1e-3,
               flops() / results[i].min, results[i].ratio);
        if (p->backward && i > 0)
            printf("   off by %.1e", difference(&libraries[i], &libraries[0]));
        printf("\n");
    }
    if (p->backward)
        free_gradients();
    drop(p->q.data);
    drop(p->k.data);
    drop(p->v.data);
    drop(p->out.data);
    return 0;
}
