/*
 * The oracle: the formula of attn.h in long double, row by row, on a sample of
 * the rows, as all rows of a long sequence would take longer than the
 * benchmark. It reads the very parameters that the call gets.
 */
#define _POSIX_C_SOURCE 200112L

#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------ Elements -- */

static int64_t offset_of(const attn_tensor *t, int64_t b, int64_t h, int64_t i,
                         int64_t d)
{
    return b * t->stride[0] + h * t->stride[1] + i * t->stride[2] +
           d * t->stride[3];
}

static double number_at(const attn_tensor *t, int64_t at)
{
    if (t->dtype == ATTN_BF16) {
        uint32_t bits = (uint32_t)((const uint16_t *)t->data)[at] << 16;
        float x;
        memcpy(&x, &bits, sizeof(x));
        return (double)x;
    }
    if (t->dtype == ATTN_F64)
        return ((const double *)t->data)[at];
    return (double)((const float *)t->data)[at];
}

static double value_at(const attn_tensor *t, int64_t b, int64_t h, int64_t i,
                       int64_t d)
{
    return number_at(t, offset_of(t, b, h, i, d));
}

/* One query, and where its sequence begins. */
struct place {
    int64_t b; /* sequence */
    int64_t h, g, i;
    int64_t q_len, kv_len;
    int64_t batch, q_row, kv_row; /* in the tensors */
};

/* Rows of out over all heads. */
static int64_t count_rows(const struct bench_problem *p)
{
    return p->out.shape[0] * p->out.shape[1] * p->out.shape[2];
}

static struct place place_of(const struct bench_problem *p, int64_t row)
{
    const struct bench_shape *s = &p->shape;
    const int64_t *cu = p->params.cu_q;
    struct place place = {.q_len = s->q_len, .kv_len = s->kv_len};

    place.i = row % p->out.shape[2];
    place.h = row / p->out.shape[2] % s->heads;
    place.g = place.h / (s->heads / s->kv_heads);
    place.b = row / p->out.shape[2] / s->heads;
    place.batch = place.b;
    if (!cu)
        return place;
    while (cu[place.b + 1] <= place.i)
        place.b++;
    place.q_row = place.kv_row = cu[place.b];
    place.i -= cu[place.b];
    place.q_len = place.kv_len = cu[place.b + 1] - cu[place.b];
    return place;
}

/* Number d of key j in k or v. */
static double key_at(const struct bench_problem *p, const attn_tensor *t,
                     const struct place *at, int64_t j, int64_t d)
{
    int64_t page = t->shape[2];

    if (!p->params.page_table)
        return value_at(t, at->batch, at->g, at->kv_row + j, d);
    return value_at(
        t, p->params.page_table[at->b * p->params.pages_per_seq + j / page],
        at->g, j % page, d);
}

/* --------------------------------------------------------------- Rules -- */

static int64_t position(const struct bench_problem *p, const struct place *at)
{
    int64_t offset = p->params.align == ATTN_ALIGN_OFFSET
                         ? p->params.q_offset
                         : at->kv_len - at->q_len;
    return offset + at->i;
}

static int visible(const struct bench_problem *p, const struct place *at,
                   int64_t j)
{
    const attn_sdpa_params *o = &p->params;
    int64_t distance = position(p, at) - j;

    if (o->causal && distance < 0)
        return 0;
    if ((o->flags & ATTN_SDPA_WINDOW) &&
        (distance > o->window_left || -distance > o->window_right))
        return 0;
    if (o->kv_lens && j >= o->kv_lens[at->b])
        return 0;
    if (o->kv_starts && j < o->kv_starts[at->b])
        return 0;
    if (o->q_segments && o->q_segments[at->b * at->q_len + at->i] !=
                             o->kv_segments[at->b * at->kv_len + j])
        return 0;
    if (o->blocks && !((const unsigned char *)o->blocks->data)[offset_of(
                         o->blocks, 0, 0, at->i / o->block_q, j / o->block_k)])
        return 0;
    if (p->shape.mask == MASK_KEEP)
        return ((const unsigned char *)p->mask.view
                    .data)[offset_of(&p->mask.view, at->b, at->h, at->i, j)];
    return 1;
}

/* z of section 2 of attn.h, for a visible key. */
static long double score(const struct bench_problem *p, const struct place *at,
                         int64_t j)
{
    const attn_sdpa_params *o = &p->params;
    long double z = 0;

    for (int64_t d = 0; d < p->shape.width; d++)
        z += (long double)value_at(&p->q, at->batch, at->h, at->q_row + at->i,
                                   d) *
             (long double)key_at(p, &p->k, at, j, d);
    z /= sqrtl((long double)p->shape.width);
    if (o->softcap > 0)
        z = (long double)o->softcap * tanhl(z / (long double)o->softcap);
    if (p->shape.mask == MASK_ADD)
        z += (long double)value_at(&p->mask.view, at->b, at->h, at->i, j);
    if (o->alibi)
        z -= (long double)number_at(o->alibi, at->h) *
             fabsl((long double)(position(p, at) - j));
    return z;
}

/* Does some rule beyond causal and lengths hide keys? */
static int needs_counting(const struct bench_problem *p)
{
    return p->shape.mask == MASK_KEEP || p->shape.feature != FEATURE_NONE;
}

/* Keys that query i of batch b sees, by causal and lengths alone. */
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
    int64_t rows = count_rows(p);
    double pairs = 0;

    if (!needs_counting(p)) {
        for (int64_t b = 0; b < s->batch; b++)
            for (int64_t i = 0; i < s->q_len; i++)
                pairs += (double)(s->heads * visible_keys(p, b, i));
        return pairs;
    }
    for (int64_t row = 0; row < rows; row++) {
        struct place at = place_of(p, row);
        /* Features are the same for all heads. */
        if (at.h > 0 && s->mask != MASK_KEEP)
            continue;
        for (int64_t j = 0; j < at.kv_len; j++)
            pairs += visible(p, &at, j);
    }
    return s->mask == MASK_KEEP ? pairs : pairs * (double)s->heads;
}

/* ----------------------------------------------------------------- Row -- */

struct row {
    long double *weights; /* room for kv_len, not yet divided by the sum */
    long double *out;     /* room for v_width */
    long double max, sum;
};

static void oracle_row(const struct bench_problem *p, const struct place *at,
                       struct row *r)
{
    const struct bench_shape *s = &p->shape;
    const attn_tensor *sinks = p->params.sinks;
    long double sink =
        sinks ? (long double)number_at(sinks, at->h) : -(long double)INFINITY;

    r->max = sink;
    for (int64_t j = 0; j < at->kv_len; j++) {
        r->weights[j] =
            visible(p, at, j) ? score(p, at, j) : -(long double)INFINITY;
        r->max = fmaxl(r->max, r->weights[j]);
    }
    for (int64_t e = 0; e < s->v_width; e++)
        r->out[e] = 0;
    r->sum = isinf(r->max) ? 0 : expl(sink - r->max);
    for (int64_t j = 0; j < at->kv_len; j++) {
        r->weights[j] = isinf(r->max) ? 0 : expl(r->weights[j] - r->max);
        r->sum += r->weights[j];
    }
    for (int64_t j = 0; j < at->kv_len; j++)
        for (int64_t e = 0; e < s->v_width && r->weights[j] > 0; e++)
            r->out[e] += r->weights[j] / r->sum *
                         (long double)key_at(p, &p->v, at, j, e);
}

/* Difference of a number of the output t from what it should be, relative
 * where that is above 1; 0 if t is not wanted. */
static double off_by(const attn_tensor *t, const struct place *at, int64_t d,
                     long double want)
{
    long double got;

    if (!t)
        return 0;
    got = (long double)value_at(t, at->batch, at->h, at->q_row + at->i, d);
    return (double)(fabsl(got - want) / fmaxl(1, fabsl(want)));
}

/* What the call was asked for beside out. */
static double extras_error(const struct bench_problem *p,
                           const struct place *at, const struct row *r)
{
    const attn_sdpa_params *o = &p->params;
    long double largest = 0, squares = 0, entropy = 0;
    double error = off_by(o->lse, at, 0, r->max + logl(r->sum));

    for (int64_t j = 0; j < at->kv_len; j++) {
        long double w = r->weights[j] / r->sum;
        largest = fmaxl(largest, w);
        squares += w * w;
        entropy -= w > 0 ? w * logl(w) : 0;
        error = fmax(error, off_by(o->weights, at, j, w));
    }
    error = fmax(error, off_by(o->max_weight, at, 0, largest));
    error = fmax(error, off_by(o->effective_keys, at, 0, 1 / squares));
    return fmax(error, off_by(o->entropy, at, 0, entropy));
}

/* -------------------------------------------------------------- Sample -- */

/* Rows in the sample: what about 0.1 s of the oracle pays for, at least 2. */
static int64_t sample_size(const struct bench_problem *p)
{
    const struct bench_shape *s = &p->shape;
    int64_t all = count_rows(p);
    int64_t cost = s->kv_len * (s->width + s->v_width) + 1;
    int64_t rows = 30000000 / cost;
    if (rows < 2)
        rows = 2;
    return rows < all ? rows : all;
}

struct bench_error bench_problem_error(const struct bench_problem *p)
{
    const struct bench_shape *s = &p->shape;
    int64_t all = count_rows(p);
    struct bench_error error = {0, 0, sample_size(p)};
    struct row r = {
        .weights = bench_alloc((size_t)s->kv_len * sizeof(long double)),
        .out = bench_alloc((size_t)s->v_width * sizeof(long double))};
    double squares = 0;

    for (int64_t n = 0; n < error.rows; n++) {
        /* Evenly spread, first and last row included. */
        int64_t at = error.rows > 1 ? n * (all - 1) / (error.rows - 1) : 0;
        struct place place = place_of(p, at);
        double extras;
        oracle_row(p, &place, &r);
        for (int64_t e = 0; e < s->v_width; e++) {
            long double out = (long double)value_at(
                &p->out, place.batch, place.h, place.q_row + place.i, e);
            double off = (double)fabsl(out - r.out[e]);
            if (!(off <= error.max)) /* NaN too */
                error.max = off;
            squares += off * off;
        }
        extras = extras_error(p, &place, &r);
        if (!(extras <= error.max))
            error.max = extras;
    }
    free(r.weights);
    free(r.out);
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
