/*
 * Problems: inputs of a shape, and the oracle that judges an output.
 *
 * The oracle is the formula of attn.h in long double, row by row, on a sample
 * of the rows: all rows of a long sequence would take longer than the
 * benchmark.
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
static uint64_t next_random(uint64_t *state)
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
        double value = (double)(next_random(&seed) >> 11) * unit - sqrt(3.0);
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
    return item * values +
           (s->mask == MASK_KEEP ? 1.0 : item) * (double)count_mask(s);
}

static void *take(struct bench_problem *p, size_t bytes)
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
    void *data = take(p, (size_t)count * bench_item_bytes(s->dtype));

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
        void *data = take(p, (size_t)count * bench_item_bytes(s->dtype));
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
        data[n] = next_random(&seed) % 10 != 0;
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
        p->kv_lens = take(p, (size_t)s->batch * sizeof(int64_t));
        fill_lengths(p->kv_lens, s->batch, s->kv_len);
        p->params.kv_lens = p->kv_lens;
        return ATTN_OK;
    }
    if (s->mask == MASK_NONE)
        return ATTN_OK;
    if (s->mask == MASK_KEEP) {
        unsigned char *data = take(p, (size_t)count);
        fill_keep(data, count);
        status = attn_mask_init(&p->mask, ATTN_MASK_KEEP, ATTN_U8, data,
                                s->batch, s->heads, s->q_len, s->kv_len);
    } else {
        void *data = take(p, (size_t)count * bench_item_bytes(s->dtype));
        bench_fill(s->dtype, data, count, 6);
        status = attn_mask_init(&p->mask, ATTN_MASK_ADD, s->dtype, data,
                                s->batch, s->heads, s->q_len, s->kv_len);
    }
    p->params.masks = &p->mask;
    p->params.num_masks = 1;
    return status;
}

static attn_status make_scratch(struct bench_problem *p)
{
    size_t alignment;
    attn_status status =
        attn_sdpa_workspace(p->context, &p->params, &p->q, &p->k, &p->v,
                            &p->out, &p->work_bytes, &alignment);
    /* Pages are aligned enough for any vector type. */
    if (!status)
        p->work = take(p, p->work_bytes);
    return status;
}

int bench_problem_create(struct bench_problem *p,
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
        status = make_scratch(p);
    if (!status)
        return 0;
    fprintf(stderr, "attn_bench: %s\n", attn_last_error());
    bench_problem_destroy(p);
    return -1;
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

/* -------------------------------------------------------------- Oracle -- */

static int64_t offset_of(const attn_tensor *t, int64_t b, int64_t h, int64_t i,
                         int64_t d)
{
    return b * t->stride[0] + h * t->stride[1] + i * t->stride[2] +
           d * t->stride[3];
}

static double value_at(const attn_tensor *t, int64_t b, int64_t h, int64_t i,
                       int64_t d)
{
    int64_t at = offset_of(t, b, h, i, d);
    if (t->dtype == ATTN_F64)
        return ((const double *)t->data)[at];
    return (double)((const float *)t->data)[at];
}

void bench_problem_spoil(const struct bench_problem *p)
{
    int64_t count = count_out(&p->shape);
    for (int64_t n = 0; n < count; n++) {
        if (p->out.dtype == ATTN_F64)
            ((double *)p->out.data)[n] = (double)NAN;
        else
            ((float *)p->out.data)[n] = NAN;
    }
}

static int visible(const struct bench_problem *p, int64_t b, int64_t h,
                   int64_t i, int64_t j)
{
    const struct bench_shape *s = &p->shape;
    if (s->causal && j > s->kv_len - s->q_len + i)
        return 0;
    if (s->mask == MASK_PADDING && j >= p->kv_lens[b])
        return 0;
    if (s->mask == MASK_KEEP)
        return ((const unsigned char *)
                    p->mask.view.data)[offset_of(&p->mask.view, b, h, i, j)];
    return 1;
}

/* Keys that query i of batch b sees, of a mask that is the same for all
 * heads. */
static int64_t visible_keys(const struct bench_problem *p, int64_t b, int64_t i)
{
    const struct bench_shape *s = &p->shape;
    int64_t keys = s->mask == MASK_PADDING ? p->kv_lens[b] : s->kv_len;
    int64_t limit = s->kv_len - s->q_len + i + 1;

    if (!s->causal || limit > keys)
        return keys;
    return limit > 0 ? limit : 0;
}

double bench_visible_pairs(const struct bench_problem *p)
{
    const struct bench_shape *s = &p->shape;
    double pairs = 0;

    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t h = 0; h < s->heads; h++)
            for (int64_t i = 0; i < s->q_len; i++) {
                if (s->mask != MASK_KEEP) {
                    pairs += (double)visible_keys(p, b, i);
                    continue;
                }
                for (int64_t j = 0; j < s->kv_len; j++)
                    pairs += visible(p, b, h, i, j);
            }
    return pairs;
}

/* One row of the oracle; row has room for v_width numbers, weights for
 * kv_len. */
static void oracle_row(const struct bench_problem *p, int64_t b, int64_t h,
                       int64_t i, long double *weights, long double *row)
{
    const struct bench_shape *s = &p->shape;
    int64_t g = h / (s->heads / s->kv_heads);
    long double max = -(long double)INFINITY;
    long double sum = 0;

    for (int64_t j = 0; j < s->kv_len; j++) {
        long double z = -(long double)INFINITY;
        if (visible(p, b, h, i, j)) {
            z = 0;
            for (int64_t d = 0; d < s->width; d++)
                z += (long double)value_at(&p->q, b, h, i, d) *
                     (long double)value_at(&p->k, b, g, j, d);
            z /= sqrtl((long double)s->width);
            if (s->mask == MASK_ADD)
                z += (long double)value_at(&p->mask.view, b, h, i, j);
        }
        weights[j] = z;
        if (z > max)
            max = z;
    }
    for (int64_t e = 0; e < s->v_width; e++)
        row[e] = 0;
    if (isinf(max))
        return;
    for (int64_t j = 0; j < s->kv_len; j++) {
        weights[j] = expl(weights[j] - max);
        sum += weights[j];
    }
    for (int64_t j = 0; j < s->kv_len; j++)
        for (int64_t e = 0; e < s->v_width && weights[j] > 0; e++)
            row[e] +=
                weights[j] / sum * (long double)value_at(&p->v, b, g, j, e);
}

/* Rows in the sample: what about 0.1 s of the oracle pays for, at least 2. */
static int64_t sample_size(const struct bench_shape *s)
{
    int64_t all = s->batch * s->heads * s->q_len;
    int64_t cost = s->kv_len * (s->width + s->v_width) + 1;
    int64_t rows = 30000000 / cost;
    if (rows < 2)
        rows = 2;
    return rows < all ? rows : all;
}

struct bench_error bench_problem_error(const struct bench_problem *p)
{
    const struct bench_shape *s = &p->shape;
    int64_t all = s->batch * s->heads * s->q_len;
    struct bench_error error = {0, 0, sample_size(s)};
    long double *weights = bench_alloc((size_t)s->kv_len * sizeof(long double));
    long double *row = bench_alloc((size_t)s->v_width * sizeof(long double));
    double squares = 0;

    for (int64_t n = 0; n < error.rows; n++) {
        /* Evenly spread, first and last row included. */
        int64_t at = error.rows > 1 ? n * (all - 1) / (error.rows - 1) : 0;
        int64_t i = at % s->q_len;
        int64_t h = at / s->q_len % s->heads;
        int64_t b = at / s->q_len / s->heads;
        oracle_row(p, b, h, i, weights, row);
        for (int64_t e = 0; e < s->v_width; e++) {
            long double out = (long double)value_at(&p->out, b, h, i, e);
            double off = (double)fabsl(out - row[e]);
            if (!(off <= error.max)) /* NaN too */
                error.max = off;
            squares += off * off;
        }
    }
    free(weights);
    free(row);
    if (error.rows > 0 && s->v_width > 0)
        error.rms = sqrt(squares / (double)(error.rows * s->v_width));
    return error;
}

/*
 * The values lie in [-sqrt 3, sqrt 3]. A dot product of D of them is off by at
 * most u D (D E|q k|) = 0.75 u D^2, a score, after division by sqrt D, by 0.75
 * u D^1.5; a weight twice that, relatively; an output sqrt 3 times more. Adding
 * up the weights of Tk keys in blocks costs a few units of u.
 */
double bench_error_bound(const struct bench_shape *s)
{
    double u = s->dtype == ATTN_F64 ? 1.1102230246251565e-16 : 5.9604645e-8;
    double width = (double)s->width;
    return u * (2.6 * width * sqrt(width) + 16);
}
