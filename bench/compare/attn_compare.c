/*
 * attn_compare: builds of libattn against each other on one shape, in turn.
 *
 *   attn_compare [--dtype f32|f64] [--causal] B,Hq,Hkv,Tq,Tk,D LIBRARY...
 *
 * On a machine that others use, two programs timed one after the other say
 * little. Here the libraries take turns in one process, by the thread's own CPU
 * time (../timing.h); what counts is the median over the rounds of the time
 * over the first one's. Each library is a file of its own with a slash in its
 * name, and may be linked with a BLAS of its own.
 */
#define _GNU_SOURCE /* RTLD_DEEPBIND */
#include <attn.h>

#include "../timing.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef RTLD_DEEPBIND /* all libraries then share the first one's BLAS */
#define RTLD_DEEPBIND 0
#endif

typedef attn_status (*sdpa_f32_fn)(int64_t, int64_t, int64_t, int64_t, int64_t,
                                   int64_t, const float *, const float *,
                                   const float *, float *, int32_t);
typedef attn_status (*sdpa_f64_fn)(int64_t, int64_t, int64_t, int64_t, int64_t,
                                   int64_t, const double *, const double *,
                                   const double *, double *, int32_t);

static struct problem {
    long long batch, heads, kv_heads, q_len, kv_len, width;
    int is_f64;
    int32_t align;
    void *q, *k, *v, *out;
} problem;

struct library {
    const char *path;
    sdpa_f32_fn f32;
    sdpa_f64_fn f64;
};

static void fail(const char *what, const char *about)
{
    fprintf(stderr, "attn_compare: %s: %s\n", what, about);
    exit(2);
}

static void load(struct library *l, const char *path)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    void *f32, *f64;

    if (!handle)
        fail("cannot load", dlerror());
    f32 = dlsym(handle, "attn_sdpa_f32");
    f64 = dlsym(handle, "attn_sdpa_f64");
    if (!f32 || !f64)
        fail("no attn_sdpa_f32 and attn_sdpa_f64 in", path);
    memcpy(&l->f32, &f32, sizeof f32);
    memcpy(&l->f64, &f64, sizeof f64);
    l->path = path;
}

/* Numbers in (-1, 1), the same in every run. */
static void *numbers(long long count, unsigned long long seed)
{
    size_t size = problem.is_f64 ? sizeof(double) : sizeof(float);
    void *memory = malloc((size_t)count * size + 1);

    if (!memory)
        fail("no memory", "for the tensors");
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

static void run(void *arg)
{
    const struct library *l = arg;
    const struct problem *p = &problem;
    attn_status status =
        p->is_f64 ? l->f64(p->batch, p->heads, p->kv_heads, p->q_len, p->kv_len,
                           p->width, p->q, p->k, p->v, p->out, p->align)
                  : l->f32(p->batch, p->heads, p->kv_heads, p->q_len, p->kv_len,
                           p->width, p->q, p->k, p->v, p->out, p->align);

    if (status)
        fail("the call was refused by", l->path);
}

int main(int argc, char **argv)
{
    static const struct timing_limits limits = {25, 3e-3, 60.0, 1};
    static struct library libraries[TIMING_MAX_TASKS];
    struct timing_task tasks[TIMING_MAX_TASKS];
    struct timing results[TIMING_MAX_TASKS];
    struct problem *p = &problem;
    long long queries, keys;
    double flops;
    int n = 1, count;

    for (; n < argc && strncmp(argv[n], "--", 2) == 0; n++)
        if (strcmp(argv[n], "--causal") == 0)
            p->align = ATTN_ALIGN_BOTTOM_RIGHT;
        else if (strcmp(argv[n], "--dtype") == 0 && n + 1 < argc)
            p->is_f64 = strcmp(argv[++n], "f64") == 0;
        else
            fail("unknown option", argv[n]);
    count = argc - n - 1;
    if (count < 1 || count > TIMING_MAX_TASKS ||
        sscanf(argv[n], "%lld,%lld,%lld,%lld,%lld,%lld", &p->batch, &p->heads,
               &p->kv_heads, &p->q_len, &p->kv_len, &p->width) != 6)
        fail("usage", "attn_compare [--dtype f32|f64] [--causal] "
                      "B,Hq,Hkv,Tq,Tk,D LIBRARY... (8 at most)");
    queries = p->batch * p->heads * p->q_len * p->width;
    keys = p->batch * p->kv_heads * p->kv_len * p->width;
    p->q = numbers(queries, 1);
    p->k = numbers(keys, 2);
    p->v = numbers(keys, 3);
    p->out = numbers(queries, 4);
    for (int i = 0; i < count; i++) {
        load(&libraries[i], argv[n + 1 + i]);
        tasks[i] = (struct timing_task){run, &libraries[i]};
    }
    timing_compare(tasks, count, &limits, results);
    flops = 4.0 * (double)queries * (double)p->kv_len;
    for (int i = 0; i < count; i++)
        printf("%-44s %10.1f us %7.1f GFLOP/s   time / first %.3f\n",
               libraries[i].path, results[i].min * 1e-3, flops / results[i].min,
               results[i].ratio);
    free(p->q);
    free(p->k);
    free(p->v);
    free(p->out);
    return 0;
}
