/*
 * The contenders. All work on the memory of one problem, so that outputs can
 * be judged by one oracle.
 */
#define _POSIX_C_SOURCE 200112L

#include "bench.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>

#include "row_loop.h"

/* Where a head of a view begins. */
static int64_t head_at(const attn_tensor *t, int64_t b, int64_t h)
{
    return b * t->stride[0] + h * t->stride[1];
}

#define R float
#define X(name) name##_f32
#define R_EXP expf
#define GEMM cblas_sgemm
#include "bench_heads_tmpl.h"

#define R double
#define X(name) name##_f64
#define R_EXP exp
#define GEMM cblas_dgemm
#include "bench_heads_tmpl.h"

/* ------------------------------------------------------------- libattn -- */

static int can_all(const struct bench_shape *shape)
{
    (void)shape;
    return 1;
}

static attn_status forward(const struct bench_problem *p)
{
    return attn_sdpa_work(p->context, &p->params, &p->q, &p->k, &p->v, &p->out,
                          p->work, p->work_bytes);
}

static attn_status backward(const struct bench_problem *p)
{
    return attn_sdpa_backward_work(p->context, &p->params, &p->q, &p->k, &p->v,
                                   &p->out, &p->d_out, &p->gradients, p->work,
                                   p->work_bytes);
}

static void run_libattn(void *problem)
{
    const struct bench_problem *p = problem;
    if (p->shape.backward ? backward(p) : forward(p)) {
        fprintf(stderr, "attn_bench: %s\n", attn_last_error());
        exit(2);
    }
}

/* ------------------------------------------------- Head by head engines -- */

static int can_heads(const struct bench_shape *s)
{
    /* Beyond that the loop takes minutes and the scores gigabytes. */
    return s->mask == MASK_NONE && s->feature == FEATURE_NONE && s->q_len > 0 &&
           s->kv_len > 0 && (!s->causal || s->q_len == s->kv_len) &&
           s->q_len <= 4096 && s->kv_len <= 4096;
}

static int can_row_loop(const struct bench_shape *s)
{
    return can_heads(s) && !s->backward;
}

static void run_row_loop(void *problem)
{
    struct bench_problem *p = problem;
    void *scores = bench_problem_scores(p, p->shape.kv_len);

    if (p->shape.dtype == ATTN_F64)
        run_heads_f64(p, row_loop_f64, scores);
    else
        run_heads_f32(p, row_loop_f32, scores);
}

/* On as many BLAS threads as libattn has. */
static void run_plain_cblas(void *problem)
{
    struct bench_problem *p = problem;
    int is_f64 = p->shape.dtype == ATTN_F64, backward = p->shape.backward;
    int64_t count = p->shape.q_len * p->shape.kv_len;
    void *scores = bench_problem_scores(p, backward ? 2 * count : count);
    int threads = bench_blas_threads(attn_context_num_threads(p->context));

    if (backward && is_f64)
        run_backward_f64(p, scores);
    else if (backward)
        run_backward_f32(p, scores);
    else if (is_f64)
        run_heads_f64(p, plain_head_f64, scores);
    else
        run_heads_f32(p, plain_head_f32, scores);
    bench_blas_threads(threads);
}

/* --------------------------------------------------------------- Table -- */

const struct bench_engine bench_engines[] = {
    {"libattn", can_all, run_libattn},
    {"row-loop", can_row_loop, run_row_loop},
    {"plain-cblas", can_heads, run_plain_cblas},
};
const int bench_num_engines = sizeof(bench_engines) / sizeof(bench_engines[0]);

int bench_verify(const struct bench_engine *engine,
                 struct bench_problem *problem, struct bench_error *error)
{
    bench_problem_spoil(problem);
    engine->run(problem);
    *error = bench_problem_error(problem);
    return error->max <= bench_error_bound(&problem->shape) ? 0 : -1;
}
