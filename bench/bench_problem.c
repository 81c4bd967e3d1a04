/*
 * Problems: inputs of a shape, masks, scratch memory.
 */
#define _POSIX_C_SOURCE 200112L

#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *bench_dtype_name(attn_dtype dtype)
{
    return dtype == ATTN_F64 ? "f64" : "f32";
}

const char *bench_layout_name(enum bench_layout layout)
{
    static const char *const names[] = {"bhtd", "bthd", "packed"};
    return names[layout];
}

const char *bench_mask_name(enum bench_mask mask)
{
    static const char *const names[] = {"none", "keep", "add", "padding"};
    return names[mask];
}

size_t bench_item_bytes(attn_dtype dtype)
{
    return dtype == ATTN_F64 ? sizeof(double) : sizeof(float);
}

const char *bench_direction_name(const struct bench_shape *shape)
{
    return shape->backward ? "backward" : "forward";
}

double bench_pair_flops(const struct bench_shape *s)
{
    /* Forward q.k and w v. Backward q.k and d_out.v again, then one product
     * for each gradient. */
    return s->backward ? 2.0 * (double)(3 * s->width + 2 * s->v_width)
                       : 2.0 * (double)(s->width + s->v_width);
}

double bench_full_flops(const struct bench_shape *s)
{
    return bench_pair_flops(s) * (double)(s->batch * s->heads) *
           (double)s->q_len * (double)s->kv_len;
}

/* -------------------------------------------------------------- Memory -- */

void *bench_alloc(size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 4096, bytes ? bytes : 1)) {
        fprintf(stderr, "attn_bench: no memory for %zu bytes\n", bytes);
        exit(2);
    }
    return memory;
}

/* splitmix64: one multiply-xorshift per number, any seed is good. */
uint64_t bench_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

void bench_fill(attn_dtype dtype, void *data, int64_t count, uint64_t seed)
{
    /* Uniform in [-sqrt 3, sqrt 3] has variance 1. */
    double unit = 2 * sqrt(3.0) / 9007199254740992.0;
    float *f32 = data;
    double *f64 = data;

    for (int64_t n = 0; n < count; n++) {
        double value = (double)(bench_random(&seed) >> 11) * unit - sqrt(3.0);
        if (dtype == ATTN_F64)
            f64[n] = value;
        else
            f32[n] = (float)value;
    }
}

/* ------------------------------------------------------------- Problem -- */

static int64_t count_q(const struct bench_shape *s)
{
    return s->batch * s->heads * s->q_len * s->width;
}

static int64_t count_kv(const struct bench_shape *s, int64_t width)
{
    return s->batch * s->kv_heads * s->kv_len * width;
}

static int64_t count_out(const struct bench_shape *s)
{
    return s->batch * s->heads * s->q_len * s->v_width;
}

static int64_t count_mask(const struct bench_shape *s)
{
    if (s->mask != MASK_KEEP && s->mask != MASK_ADD)
        return 0;
    return s->batch * s->heads * s->q_len * s->kv_len;
}

double bench_problem_bytes(const struct bench_shape *s)
{
    double item = (double)bench_item_bytes(s->dtype);
    double values = (double)count_q(s) + (double)count_kv(s, s->width) +
                    (double)count_kv(s, s->v_width) + (double)count_out(s);
    return (s->backward ? 2 : 1) * item * values +
           (s->mask == MASK_KEEP ? 1.0 : item) * (double)count_mask(s);
}

void *bench_problem_take(struct bench_problem *p, size_t bytes)
{
    void *memory = bench_alloc(bytes);
    p->memory[p->num_memory++] = memory;
    return memory;
}

/* A filled tensor (B,H,T,D) in the layout of the problem. */
static attn_status make_tensor(struct bench_problem *p, attn_tensor *view,
                               int64_t heads, int64_t len, int64_t width,
                               uint64_t seed)
{
    const struct bench_shape *s = &p->shape;
    int64_t count = s->batch * heads * len * width;
    void *data =
        bench_problem_take(p, (size_t)count * bench_item_bytes(s->dtype));

    bench_fill(s->dtype, data, count, seed);
    if (s->layout == LAYOUT_BHTD)
        return attn_view_bhtd(view, s->dtype, data, s->batch, heads, len,
                              width);
    return attn_view_bthd(view, s->dtype, data, s->batch, len, heads, width);
}

static attn_status make_tensors(struct bench_problem *p)
{
    const struct bench_shape *s = &p->shape;
    attn_status status;

    if (s->layout == LAYOUT_PACKED) {
        int64_t count = 3 * count_q(s);
        void *data =
            bench_problem_take(p, (size_t)count * bench_item_bytes(s->dtype));
        bench_fill(s->dtype, data, count, 1);
        status = attn_view_bt3hd(&p->q, &p->k, &p->v, s->dtype, data, s->batch,
                                 s->q_len, s->heads, s->width);
    } else {
        status = make_tensor(p, &p->q, s->heads, s->q_len, s->width, 1);
        if (!status)
            status = make_tensor(p, &p->k, s->kv_heads, s->kv_len, s->width, 2);
        if (!status)
            status =
                make_tensor(p, &p->v, s->kv_heads, s->kv_len, s->v_width, 3);
    }
    return status ? status
                  : make_tensor(p, &p->out, s->heads, s->q_len, s->v_width, 4);
}

/* KEEP: nine keys of ten, dense and different per head. */
static void fill_keep(unsigned char *data, int64_t count)
{
    uint64_t seed = 5;
    for (int64_t n = 0; n < count; n++)
        data[n] = bench_random(&seed) % 10 != 0;
}

/* Lengths from half to all of the keys, spread evenly over the batch. */
static void fill_lengths(int64_t *lens, int64_t batch, int64_t kv_len)
{
    for (int64_t b = 0; b < batch; b++)
        lens[b] = kv_len - kv_len * (b + 1) / (2 * batch + 2);
}

static attn_status make_mask(struct bench_problem *p)
{
    const struct bench_shape *s = &p->shape;
    int64_t count = count_mask(s);
    attn_status status;

    if (s->mask == MASK_PADDING) {
        p->kv_lens = bench_problem_take(p, (size_t)s->batch * sizeof(int64_t));
        fill_lengths(p->kv_lens, s->batch, s->kv_len);
        p->params.kv_lens = p->kv_lens;
        return ATTN_OK;
    }
    if (s->mask == MASK_NONE)
        return ATTN_OK;
    if (s->mask == MASK_KEEP) {
        unsigned char *data = bench_problem_take(p, (size_t)count);
        fill_keep(data, count);
        status = attn_mask_init(&p->mask, ATTN_MASK_KEEP, ATTN_U8, data,
                                s->batch, s->heads, s->q_len, s->kv_len);
    } else {
        void *data =
            bench_problem_take(p, (size_t)count * bench_item_bytes(s->dtype));
        bench_fill(s->dtype, data, count, 6);
        status = attn_mask_init(&p->mask, ATTN_MASK_ADD, s->dtype, data,
                                s->batch, s->heads, s->q_len, s->kv_len);
    }
    p->params.masks = &p->mask;
    p->params.num_masks = 1;
    return status;
}

/* A filled tensor with the sizes and the strides of one that is dense. */
static void make_like(struct bench_problem *p, attn_tensor *view,
                      const attn_tensor *like, uint64_t seed)
{
    attn_dtype dtype = p->shape.dtype;
    int64_t count =
        like->shape[0] * like->shape[1] * like->shape[2] * like->shape[3];

    *view = *like;
    view->dtype = dtype; /* gradients of 16-bit keys are not in 16 bits */
    view->data = bench_problem_take(p, (size_t)count * bench_item_bytes(dtype));
    bench_fill(dtype, view->data, count, seed);
}

/* d_out and the gradients, in the layout of the problem. */
static attn_status make_gradients(struct bench_problem *p)
{
    const struct bench_shape *s = &p->shape;
    int64_t rows = p->out.shape[0] * s->heads * p->out.shape[2];
    attn_status status = ATTN_OK;

    make_like(p, &p->d_out, &p->out, 10);
    if (s->layout == LAYOUT_PACKED) {
        void *data = bench_problem_take(p, (size_t)(3 * count_q(s)) *
                                               bench_item_bytes(s->dtype));
        status = attn_view_bt3hd(&p->d_q, &p->d_k, &p->d_v, s->dtype, data,
                                 s->batch, s->q_len, s->heads, s->width);
    } else {
        make_like(p, &p->d_q, &p->q, 11);
        make_like(p, &p->d_k, &p->k, 12);
        make_like(p, &p->d_v, &p->v, 13);
    }
    if (!status && !p->params.lse) {
        void *data =
            bench_problem_take(p, (size_t)rows * bench_item_bytes(s->dtype));
        status = attn_view_bhtd(&p->lse, s->dtype, data, p->out.shape[0],
                                s->heads, p->out.shape[2], 1);
        p->params.lse = &p->lse;
    }
    attn_sdpa_gradients_init(&p->gradients);
    p->gradients.d_q = &p->d_q;
    p->gradients.d_k = &p->d_k;
    p->gradients.d_v = &p->d_v;
    return status;
}

static attn_status workspace(struct bench_problem *p, size_t *alignment)
{
    return p->shape.backward
               ? attn_sdpa_backward_workspace(
                     p->context, &p->params, &p->q, &p->k, &p->v, &p->out,
                     &p->d_out, &p->gradients, &p->work_bytes, alignment)
               : attn_sdpa_workspace(p->context, &p->params, &p->q, &p->k,
                                     &p->v, &p->out, &p->work_bytes, alignment);
}

static attn_status make_scratch(struct bench_problem *p)
{
    size_t alignment;
    attn_status status = workspace(p, &alignment);

    /* Pages are aligned enough for any vector type. */
    if (!status)
        p->work = bench_problem_take(p, p->work_bytes);
    return status;
}

attn_status bench_problem_create(struct bench_problem *p,
                                 const struct bench_shape *shape, int threads)
{
    attn_context_params context = ATTN_CONTEXT_PARAMS_INIT;
    attn_status status;

    memset(p, 0, sizeof(*p));
    p->shape = *shape;
    attn_sdpa_params_init(&p->params);
    p->params.causal = shape->causal;
    /* The last query sees all keys, padding included in the count: with
     * ATTN_ALIGN_BOTTOM_RIGHT it would be the last key of each length. */
    p->params.align = ATTN_ALIGN_OFFSET;
    p->params.q_offset = shape->kv_len - shape->q_len;
    context.num_threads = threads;
    status = attn_context_create(&p->context, &context);
    if (!status)
        status = make_tensors(p);
    if (!status)
        status = make_mask(p);
    if (!status)
        status = bench_feature_apply(p);
    if (!status && shape->backward)
        status = make_gradients(p);
    if (!status)
        status = make_scratch(p);
    if (!status && shape->backward)
        status =
            attn_sdpa(p->context, &p->params, &p->q, &p->k, &p->v, &p->out);
    if (!status)
        return ATTN_OK;
    if (status != ATTN_ERR_UNSUPPORTED)
        fprintf(stderr, "attn_bench: %s\n", attn_last_error());
    bench_problem_destroy(p);
    return status;
}

void *bench_problem_scores(struct bench_problem *p, int64_t count)
{
    if (count > p->num_scores) {
        free(p->scores);
        p->scores =
            bench_alloc((size_t)count * bench_item_bytes(p->shape.dtype));
        p->num_scores = count;
    }
    return p->scores;
}

void bench_problem_destroy(struct bench_problem *p)
{
    free(p->scores);
    p->scores = NULL;
    while (p->num_memory > 0)
        free(p->memory[--p->num_memory]);
    attn_context_destroy(p->context);
    p->context = NULL;
}

/* NaN in every element; the rows of all tensors here are contiguous. */
static void spoil(const attn_tensor *t)
{
    const double nan64 = (double)NAN;
    const float nan32 = NAN;
    size_t item = bench_item_bytes(t->dtype);
    const void *nan = t->dtype == ATTN_F64 ? (const void *)&nan64 : &nan32;

    for (int64_t b = 0; b < t->shape[0]; b++)
        for (int64_t h = 0; h < t->shape[1]; h++)
            for (int64_t i = 0; i < t->shape[2]; i++) {
                char *row = (char *)t->data +
                            (size_t)(b * t->stride[0] + h * t->stride[1] +
                                     i * t->stride[2]) *
                                item;
                for (int64_t d = 0; d < t->shape[3]; d++)
                    memcpy(row + (size_t)d * item, nan, item);
            }
}

void bench_problem_spoil(const struct bench_problem *p)
{
    if (!p->shape.backward) {
        spoil(&p->out);
        return;
    }
    spoil(&p->d_q);
    spoil(&p->d_k);
    spoil(&p->d_v);
}
