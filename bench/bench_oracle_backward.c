/*
 * The oracle of the gradients: the formulas of attn.h in long double, on a
 * sample of the rows of d_q over all heads, and of those of d_k and d_v in some
 * groups of heads. One row of d_k takes the sums of all rows of its group's
 * scores, so they are computed once for all keys in the sample.
 */
#define _POSIX_C_SOURCE 200112L

#include "bench_oracle.h"

#include <math.h>
#include <stdlib.h>

/* What the oracle pays for, in multiply-adds, some nanoseconds each. */
#define ROWS_COST 20000000      /* for all rows of d_q, 2 at least */
#define GROUPS_COST 300000000   /* for all groups, 1 at least */
#define EXACT_COST 8000000000.0 /* for one group */
#define MOST_KEYS 64            /* of a group */

/* Numbers of one head as doubles, which all their types fit into. */
struct tape {
    const struct bench_problem *p;
    int64_t b, g; /* whose keys these are; -1: nobody's */
    double *k, *v;
    double *q, *d_out;      /* of one query */
    long double *w, *du;    /* its weights, the gradient of its scores */
    long double *d_k, *d_v; /* sums for the keys in the sample */
    long double *row;       /* one row of d_q */
};

static long double dot(const double *a, const double *b, int64_t n)
{
    long double s[4] = {0, 0, 0, 0};
    int64_t i = 0;

    for (; i + 4 <= n; i += 4) {
        s[0] += (long double)a[i] * (long double)b[i];
        s[1] += (long double)a[i + 1] * (long double)b[i + 1];
        s[2] += (long double)a[i + 2] * (long double)b[i + 2];
        s[3] += (long double)a[i + 3] * (long double)b[i + 3];
    }
    for (; i < n; i++)
        s[0] += (long double)a[i] * (long double)b[i];
    return (s[0] + s[1]) + (s[2] + s[3]);
}

static void load_keys(struct tape *t, const struct oracle_place *at)
{
    const struct bench_shape *s = &t->p->shape;

    if (t->b == at->b && t->g == at->g)
        return;
    t->b = at->b;
    t->g = at->g;
    for (int64_t j = 0; j < at->kv_len; j++) {
        for (int64_t d = 0; d < s->width; d++)
            t->k[j * s->width + d] = oracle_key(t->p, &t->p->k, at, j, d);
        for (int64_t e = 0; e < s->v_width; e++)
            t->v[j * s->v_width + e] = oracle_key(t->p, &t->p->v, at, j, e);
    }
}

static void load_query(struct tape *t, const struct oracle_place *at)
{
    const struct bench_shape *s = &t->p->shape;
    int64_t row = at->q_row + at->i;

    for (int64_t d = 0; d < s->width; d++)
        t->q[d] = oracle_value(&t->p->q, at->batch, at->h, row, d);
    for (int64_t e = 0; e < s->v_width; e++)
        t->d_out[e] = oracle_value(&t->p->d_out, at->batch, at->h, row, e);
}

/* For key j: z, or -inf, into w; d_out.v into du. */
static void load_score(struct tape *t, const struct oracle_place *at, int64_t j)
{
    const struct bench_shape *s = &t->p->shape;

    t->w[j] = -(long double)INFINITY;
    t->du[j] = 0;
    if (!oracle_visible(t->p, at, j))
        return;
    t->w[j] = oracle_capped(t->p, dot(t->q, t->k + j * s->width, s->width)) +
              oracle_added(t->p, at, j);
    t->du[j] = dot(t->d_out, t->v + j * s->v_width, s->v_width);
}

/* d u / d (q.k) */
static long double slope(const struct tape *t, const struct oracle_place *at,
                         int64_t j, long double z)
{
    const long double c = (long double)t->p->params.softcap;
    long double scale = 1 / sqrtl((long double)t->p->shape.width);
    long double bent = c > 0 ? (z - oracle_added(t->p, at, j)) / c : 0;

    return scale * (1 - bent * bent);
}

/* z and d_out.v of key j become its weight and its gradient. */
static void finish_score(struct tape *t, const struct oracle_place *at,
                         int64_t j, long double w, long double delta)
{
    long double z = t->w[j];

    t->w[j] = w;
    t->du[j] = w > 0 ? w * (t->du[j] - delta) * slope(t, at, j, z) : 0;
}

/* w and du of all keys of a query. */
static void exact_row(struct tape *t, const struct oracle_place *at)
{
    const long double sink = oracle_sink(t->p, at);
    long double max = sink, sum, delta = 0;

    load_query(t, at);
    for (int64_t j = 0; j < at->kv_len; j++) {
        load_score(t, at, j);
        max = fmaxl(max, t->w[j]);
    }
    if (isinf(max))
        max = 0;
    sum = expl(sink - max);
    for (int64_t j = 0; j < at->kv_len; j++) {
        long double e = expl(t->w[j] - max);
        sum += e;
        delta += e * t->du[j];
    }
    for (int64_t j = 0; j < at->kv_len; j++)
        finish_score(t, at, j, sum > 0 ? expl(t->w[j] - max) / sum : 0,
                     sum > 0 ? delta / sum : 0);
}

/* w and du of some keys, with the sums that the forward call gave: for problems
 * whose rows are too many to be computed. */
static void quick_row(struct tape *t, const struct oracle_place *at,
                      const int64_t *keys, int64_t num_keys)
{
    const struct bench_problem *p = t->p;
    int64_t row = at->q_row + at->i;
    long double lse =
        (long double)oracle_value(p->params.lse, at->batch, at->h, row, 0);
    long double delta = 0;

    load_query(t, at);
    for (int64_t e = 0; e < p->shape.v_width; e++)
        delta += (long double)t->d_out[e] *
                 (long double)oracle_value(&p->out, at->batch, at->h, row, e);
    for (int64_t n = 0; n < num_keys; n++) {
        load_score(t, at, keys[n]);
        finish_score(t, at, keys[n],
                     isinf(t->w[keys[n]]) ? 0 : expl(t->w[keys[n]] - lse),
                     delta);
    }
}

/* -------------------------------------------------------------- Errors -- */

static void check_d_q(struct tape *t, struct oracle_sums *sums)
{
    const struct bench_problem *p = t->p;
    const int64_t width = p->shape.width, all = oracle_rows(p);
    double cost = (double)(p->shape.kv_len * (2 * width + p->shape.v_width));
    int64_t rows = oracle_affordable(ROWS_COST, cost, 2, all);

    for (int64_t n = 0; n < rows; n++) {
        struct oracle_place at =
            oracle_row_place(p, oracle_spread(n, rows, all));
        load_keys(t, &at);
        exact_row(t, &at);
        for (int64_t d = 0; d < width; d++)
            t->row[d] = 0;
        for (int64_t j = 0; j < at.kv_len; j++)
            for (int64_t d = 0; d < width && t->w[j] > 0; d++)
                t->row[d] += t->du[j] * (long double)t->k[j * width + d];
        oracle_compare(sums, &p->d_q, at.batch, at.h, at.q_row + at.i, t->row);
    }
}

/* Adds what one query gives to the keys in the sample. */
static void add_query(struct tape *t, const int64_t *keys, int64_t num_keys)
{
    const struct bench_shape *s = &t->p->shape;

    for (int64_t n = 0; n < num_keys; n++) {
        long double w = t->w[keys[n]], du = t->du[keys[n]];
        for (int64_t d = 0; d < s->width && w > 0; d++)
            t->d_k[n * s->width + d] += du * (long double)t->q[d];
        for (int64_t e = 0; e < s->v_width && w > 0; e++)
            t->d_v[n * s->v_width + e] += w * (long double)t->d_out[e];
    }
}

static void check_group(struct tape *t, int64_t b, int64_t g, int is_exact,
                        struct oracle_sums *sums)
{
    const struct bench_problem *p = t->p;
    const struct bench_shape *s = &p->shape;
    const int64_t group = s->heads / s->kv_heads;
    const struct oracle_place first = oracle_place_of(p, b, g * group, 0);
    int64_t keys[MOST_KEYS];
    int64_t num_keys = first.kv_len < MOST_KEYS ? first.kv_len : MOST_KEYS;

    for (int64_t n = 0; n < num_keys; n++)
        keys[n] = oracle_spread(n, num_keys, first.kv_len);
    for (int64_t n = 0; n < num_keys * s->width; n++)
        t->d_k[n] = 0;
    for (int64_t n = 0; n < num_keys * s->v_width; n++)
        t->d_v[n] = 0;
    load_keys(t, &first);
    for (int64_t h = g * group; h < (g + 1) * group; h++)
        for (int64_t i = 0; i < first.q_len; i++) {
            struct oracle_place at = oracle_place_of(p, b, h, i);
            if (is_exact)
                exact_row(t, &at);
            else
                quick_row(t, &at, keys, num_keys);
            add_query(t, keys, num_keys);
        }
    for (int64_t n = 0; n < num_keys; n++) {
        int64_t row = first.kv_row + keys[n];
        oracle_compare(sums, &p->d_k, first.batch, g, row,
                       t->d_k + n * s->width);
        oracle_compare(sums, &p->d_v, first.batch, g, row,
                       t->d_v + n * s->v_width);
    }
}

static void check_groups(struct tape *t, struct oracle_sums *sums)
{
    const struct bench_shape *s = &t->p->shape;
    const int64_t all = s->batch * s->kv_heads;
    double cost = bench_visible_pairs(t->p) / (double)all *
                  (double)(s->width + s->v_width);
    int64_t groups = oracle_affordable(GROUPS_COST, cost, 1, all);

    for (int64_t n = 0; n < groups; n++) {
        int64_t at = oracle_spread(n, groups, all);
        check_group(t, at / s->kv_heads, at % s->kv_heads, cost <= EXACT_COST,
                    sums);
    }
}

static void *room(int64_t count, size_t item)
{
    return bench_alloc((size_t)count * item);
}

struct bench_error bench_backward_error(const struct bench_problem *p)
{
    const struct bench_shape *s = &p->shape;
    const size_t number = sizeof(double), wide = sizeof(long double);
    struct oracle_sums sums = {{0, 0, 0}, 0};
    struct tape t = {.p = p,
                     .b = -1,
                     .g = -1,
                     .k = room(s->kv_len * s->width, number),
                     .v = room(s->kv_len * s->v_width, number),
                     .q = room(s->width, number),
                     .d_out = room(s->v_width, number),
                     .w = room(s->kv_len, wide),
                     .du = room(s->kv_len, wide),
                     .d_k = room(MOST_KEYS * s->width, wide),
                     .d_v = room(MOST_KEYS * s->v_width, wide),
                     .row = room(s->width, wide)};

    check_d_q(&t, &sums);
    check_groups(&t, &sums);
    free(t.k);
    free(t.v);
    free(t.q);
    free(t.d_out);
    free(t.w);
    free(t.du);
    free(t.d_k);
    free(t.d_v);
    free(t.row);
    return oracle_error(&sums);
}
