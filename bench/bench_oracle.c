/*
 * The oracle: the formula of attn.h in long double, row by row, on a sample of
 * the rows, as all rows of a long sequence would take longer than the
 * benchmark. It reads the very parameters that the call gets.
 */
#define _POSIX_C_SOURCE 200112L

#include "bench_oracle.h"

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

double oracle_value(const attn_tensor *t, int64_t b, int64_t h, int64_t i,
                    int64_t d)
{
    return number_at(t, offset_of(t, b, h, i, d));
}

int64_t oracle_rows(const struct bench_problem *p)
{
    return p->out.shape[0] * p->out.shape[1] * p->out.shape[2];
}

struct oracle_place oracle_place_of(const struct bench_problem *p, int64_t b,
                                    int64_t h, int64_t i)
{
    const struct bench_shape *s = &p->shape;
    const int64_t *cu = p->params.cu_q;
    struct oracle_place place = {.b = b,
                                 .h = h,
                                 .g = h / (s->heads / s->kv_heads),
                                 .i = i,
                                 .q_len = s->q_len,
                                 .kv_len = s->kv_len,
                                 .batch = b};
    if (cu) {
        place.batch = 0;
        place.q_row = place.kv_row = cu[b];
        place.q_len = place.kv_len = cu[b + 1] - cu[b];
    }
    return place;
}

struct oracle_place oracle_row_place(const struct bench_problem *p, int64_t row)
{
    const int64_t *cu = p->params.cu_q;
    int64_t rows = p->out.shape[2], i = row % rows;
    int64_t h = row / rows % p->shape.heads, b = row / rows / p->shape.heads;

    if (cu) {
        while (cu[b + 1] <= i)
            b++;
        i -= cu[b];
    }
    return oracle_place_of(p, b, h, i);
}

double oracle_key(const struct bench_problem *p, const attn_tensor *t,
                  const struct oracle_place *at, int64_t j, int64_t d)
{
    int64_t page = t->shape[2];

    if (!p->params.page_table)
        return oracle_value(t, at->batch, at->g, at->kv_row + j, d);
    return oracle_value(
        t, p->params.page_table[at->b * p->params.pages_per_seq + j / page],
        at->g, j % page, d);
}

/* --------------------------------------------------------------- Rules -- */

static int64_t position(const struct bench_problem *p,
                        const struct oracle_place *at)
{
    int64_t offset = p->params.align == ATTN_ALIGN_OFFSET
                         ? p->params.q_offset
                         : at->kv_len - at->q_len;
    return offset + at->i;
}

int oracle_visible(const struct bench_problem *p, const struct oracle_place *at,
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

long double oracle_capped(const struct bench_problem *p, long double dot)
{
    const long double c = (long double)p->params.softcap;
    long double u = dot / sqrtl((long double)p->shape.width);

    return c > 0 ? c * tanhl(u / c) : u;
}

long double oracle_added(const struct bench_problem *p,
                         const struct oracle_place *at, int64_t j)
{
    const attn_sdpa_params *o = &p->params;
    long double sum = 0;

    if (p->shape.mask == MASK_ADD)
        sum += (long double)oracle_value(&p->mask.view, at->b, at->h, at->i, j);
    if (o->alibi)
        sum -= (long double)number_at(o->alibi, at->h) *
               fabsl((long double)(position(p, at) - j));
    return sum;
}

long double oracle_sink(const struct bench_problem *p,
                        const struct oracle_place *at)
{
    const attn_tensor *sinks = p->params.sinks;
    return sinks ? (long double)number_at(sinks, at->h)
                 : -(long double)INFINITY;
}

/* z of section 2 of attn.h, for a visible key. */
static long double score(const struct bench_problem *p,
                         const struct oracle_place *at, int64_t j)
{
    long double dot = 0;

    for (int64_t d = 0; d < p->shape.width; d++)
        dot += (long double)oracle_value(&p->q, at->batch, at->h,
                                         at->q_row + at->i, d) *
               (long double)oracle_key(p, &p->k, at, j, d);
    return oracle_capped(p, dot) + oracle_added(p, at, j);
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
    int64_t rows = oracle_rows(p);
    double pairs = 0;

    if (!needs_counting(p)) {
        for (int64_t b = 0; b < s->batch; b++)
            for (int64_t i = 0; i < s->q_len; i++)
                pairs += (double)(s->heads * visible_keys(p, b, i));
        return pairs;
    }
    for (int64_t row = 0; row < rows; row++) {
        struct oracle_place at = oracle_row_place(p, row);
        /* Features are the same for all heads. */
        if (at.h > 0 && s->mask != MASK_KEEP)
            continue;
        for (int64_t j = 0; j < at.kv_len; j++)
            pairs += oracle_visible(p, &at, j);
    }
    return s->mask == MASK_KEEP ? pairs : pairs * (double)s->heads;
}

/* ----------------------------------------------------------------- Row -- */

struct row {
    long double *weights; /* room for kv_len, not yet divided by the sum */
    long double *out;     /* room for v_width */
    long double max, sum;
};

static void oracle_row(const struct bench_problem *p,
                       const struct oracle_place *at, struct row *r)
{
    const struct bench_shape *s = &p->shape;
    long double sink = oracle_sink(p, at);

    r->max = sink;
    for (int64_t j = 0; j < at->kv_len; j++) {
        r->weights[j] =
            oracle_visible(p, at, j) ? score(p, at, j) : -(long double)INFINITY;
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
                         (long double)oracle_key(p, &p->v, at, j, e);
}

/* Difference of a number of the output t from what it should be, relative
 * where that is above 1; 0 if t is not wanted. */
static double off_by(const attn_tensor *t, const struct oracle_place *at,
                     int64_t d, long double want)
{
    long double got;

    if (!t)
        return 0;
    got = (long double)oracle_value(t, at->batch, at->h, at->q_row + at->i, d);
    return (double)(fabsl(got - want) / fmaxl(1, fabsl(want)));
}

/* What the call was asked for beside out. */
static double extras_error(const struct bench_problem *p,
                           const struct oracle_place *at, const struct row *r)
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

void oracle_compare(struct oracle_sums *sums, const attn_tensor *t,
                    int64_t batch, int64_t head, int64_t row,
                    const long double *want)
{
    for (int64_t d = 0; d < t->shape[3]; d++) {
        double off = (double)fabsl(
            (long double)oracle_value(t, batch, head, row, d) - want[d]);
        if (!(off <= sums->error.max)) /* NaN too */
            sums->error.max = off;
        sums->error.rms += off * off;
    }
    sums->error.rows++;
    sums->numbers += (double)t->shape[3];
}

struct bench_error oracle_error(const struct oracle_sums *sums)
{
    struct bench_error error = sums->error;

    error.rms = sums->numbers > 0 ? sqrt(error.rms / sums->numbers) : 0;
    return error;
}

int64_t oracle_spread(int64_t n, int64_t count, int64_t all)
{
    return count > 1 ? n * (all - 1) / (count - 1) : all - 1;
}

int64_t oracle_affordable(double budget, double cost, int64_t least,
                          int64_t all)
{
    double count = budget / (cost + 1);

    if (count > (double)all)
        return all;
    return count > (double)least ? (int64_t)count : least < all ? least : all;
}

/* About 0.1 s of the oracle. */
#define SAMPLE_COST 3e7

static struct bench_error forward_error(const struct bench_problem *p)
{
    const struct bench_shape *s = &p->shape;
    int64_t all = oracle_rows(p);
    double cost = (double)(s->kv_len * (s->width + s->v_width));
    int64_t rows = oracle_affordable(SAMPLE_COST, cost, 2, all);
    struct oracle_sums sums = {{0, 0, 0}, 0};
    struct row r = {
        .weights = bench_alloc((size_t)s->kv_len * sizeof(long double)),
        .out = bench_alloc((size_t)s->v_width * sizeof(long double))};

    for (int64_t n = 0; n < rows; n++) {
        struct oracle_place place =
            oracle_row_place(p, oracle_spread(n, rows, all));
        double extras;
        oracle_row(p, &place, &r);
        oracle_compare(&sums, &p->out, place.batch, place.h,
                       place.q_row + place.i, r.out);
        extras = extras_error(p, &place, &r);
        if (!(extras <= sums.error.max))
            sums.error.max = extras;
    }
    free(r.weights);
    free(r.out);
    return oracle_error(&sums);
}

struct bench_error bench_problem_error(const struct bench_problem *p)
{
    return p->shape.backward ? bench_backward_error(p) : forward_error(p);
}

/*
 * The values lie in [-sqrt 3, sqrt 3]. A dot product of D of them is off by at
 * most u D (D E|q k|) = 0.75 u D^2, a score, after division by sqrt D, by 0.75
 * u D^1.5; a weight twice that, relatively; an output sqrt 3 times more. Adding
 * up the weights of Tk keys in blocks costs a few units of u.
 */
static double forward_bound(const struct bench_shape *s)
{
    double width = (double)s->width;
    return 2.6 * width * sqrt(width) + 16;
}

/*
 * Such a bound would be larger than the gradients, so here errors are taken for
 * random, and six of their standard deviations for all there can be: a dot
 * product is off by at most 2.5 u D, a score by 2.5 u sqrt D, a weight,
 * relatively, by e = 5 sqrt D + 16 units. d_out.v - delta is within 6 sqrt Dv
 * and off by 5 u Dv. d_q adds these up with weights of sum 1, sqrt 3 / sqrt D
 * times; in d_k and d_v the weights of a key meet in squares, of which the sum
 * is some 4 a head of the group, more where there are few keys.
 */
static double backward_bound(const struct bench_shape *s)
{
    double width = sqrt((double)s->width), v_width = sqrt((double)s->v_width);
    double group = (double)(s->heads / s->kv_heads);
    double e = 5 * width + 16;
    double each = (6 * e * v_width + 5 * v_width * v_width) / width + e;

    return sqrt(3.0) * 2 * sqrt(group) *
           (1 + sqrt((double)s->q_len) / (double)s->kv_len) * each;
}

double bench_error_bound(const struct bench_shape *s)
{
    double u = s->dtype == ATTN_F64 ? 1.1102230246251565e-16 : 5.9604645e-8;
    return u * (s->backward ? backward_bound(s) : forward_bound(s));
}
