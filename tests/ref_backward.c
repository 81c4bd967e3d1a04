/*
 * The oracle of the gradients: the formulas of attn_sdpa_backward in long
 * double, one visible pair of a query and a key after the other. What a pair
 * gives is added to every gradient at once, with the error that it may have.
 */
#include "ref_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------- Sums -- */

/* An element of a gradient before a common factor and what is added to. */
typedef struct sum {
    long double value;
    long double error; /* of the terms */
    long double size;  /* sum of their magnitudes */
    long double under; /* what underflow may take from them */
    int64_t terms;
    int unknown;  /* the type may have got anything for one of the terms */
    int is_owned; /* the call writes this element */
} sum;

typedef struct sums {
    int64_t shape[4];
    sum *at;
} sums;

static sums make_sums(const int64_t shape[4], int is_owned)
{
    sums s;
    memcpy(s.shape, shape, sizeof s.shape);
    const int64_t n = shape[0] * shape[1] * shape[2] * shape[3];
    s.at = ref_allocate(n, sizeof *s.at);
    for (int64_t i = 0; i < n; i++)
        s.at[i].is_owned = is_owned;
    return s;
}

static sum *sum_at(const sums *s, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const int64_t *n = s->shape;
    return &s->at[((b * n[1] + h) * n[2] + i) * n[3] + j];
}

static void add_term(sum *to, long double value, long double error,
                     long double under, int unknown)
{
    to->value += value;
    to->error += error;
    to->size += fabsl(value);
    to->under += under;
    to->unknown |= unknown;
    to->terms++;
}

/* ----------------------------------------------------------- Problem -- */

typedef struct backward {
    problem a;
    ref_tensor out, lse, d_out;
    ref_tensor d_lse; /* num NULL: zeros */
    sums d_q, d_k, d_v, d_alibi, d_sinks, d_scale;
    sums d_masks[ATTN_MAX_MASKS];
    int has_inf; /* some input, so that NaNs may come of rounding */
} backward;

/* What all pairs of a row share. */
typedef struct row {
    const sequence *s;
    int64_t h, i;
    const ref_num *q, *out, *d_out;
    long double lse;
    long double d_lse;
    ref_num delta;
    long double reach; /* sum over e of |out| + 1, for underflow */
} row;

/* What a visible pair gives. */
typedef struct pair {
    ref_num w, dz, du;
    long double apart; /* |p(i) - j| */
    /* Of a du that was scaled in d_out already: how many of the smallest normal
     * numbers underflow may have taken from it. */
    long double lost;
    int unknown;
} pair;

static row row_of(const backward *c, const sequence *s, int64_t h, int64_t i)
{
    const problem *a = &c->a;
    const int64_t at = s->q_start + i, width = a->v.shape[3];
    row r = {.s = s, .h = h, .i = i};
    r.q = ref_at(&a->q, s->batch, h, at, 0);
    r.out = ref_at(&c->out, s->batch, h, at, 0);
    r.d_out = ref_at(&c->d_out, s->batch, h, at, 0);
    r.lse = ref_at(&c->lse, s->batch, h, at, 0)->value;
    if (c->d_lse.num)
        r.d_lse = ref_at(&c->d_lse, s->batch, h, at, 0)->value;
    long double size = 0.0L;
    for (int64_t e = 0; e < width; e++) {
        r.delta.value += r.d_out[e].value * r.out[e].value;
        size += fabsl(r.d_out[e].value * r.out[e].value);
        r.reach += fabsl(r.out[e].value) + 1.0L;
    }
    r.delta.error =
        a->u * ((long double)width + 8.0L) * size + a->tiny * (r.reach + 1.0L);
    return r;
}

/* exp(x) for an x that is wrong by dx, or unknown. */
static ref_num exponential(const problem *a, long double x, long double dx,
                           int *unknown)
{
    ref_num w = {expl(x), 0.0L};
    if (!isfinite(x))
        return w; /* 0, inf or NaN in every type */
    w.error =
        ref_growth(x, dx) * (1.0L + 16.0L * a->u) + 16.0L * a->u * w.value;
    w.error += 2.0L * a->tiny;
    if (w.value + w.error <= 1.0L / a->u)
        return w;
    /* NaNs of what it is multiplied with are certain, no more. */
    *unknown = 1;
    w.value = 1.0L;
    w.error = 0.0L;
    return w;
}

/* d_out.v - delta + d_lse, and what scaling d_out may lose of it. */
static ref_num factor_of(const backward *c, const row *r, const ref_num *v,
                         long double *lost)
{
    const problem *a = &c->a;
    const int64_t width = a->v.shape[3];
    ref_num x = {0.0L, 0.0L};
    long double size = fabsl(r->delta.value) + fabsl(r->d_lse);
    long double reach = r->reach;
    for (int64_t e = 0; e < width; e++) {
        x.value += r->d_out[e].value * v[e].value;
        size += fabsl(r->d_out[e].value * v[e].value);
        reach += fabsl(v[e].value) + 1.0L;
    }
    x.value += r->d_lse - r->delta.value;
    x.error = a->u * ((long double)width + 8.0L) * size + r->delta.error +
              a->tiny * (reach + 1.0L);
    *lost = reach + 1.0L;
    return x;
}

/* x y, rounded. */
static ref_num product(const problem *a, ref_num x, ref_num y)
{
    const ref_num xy = {x.value * y.value,
                        x.error * fabsl(y.value) +
                            (fabsl(x.value) + x.error) * y.error +
                            4.0L * a->u * fabsl(x.value * y.value) + a->tiny};
    return xy;
}

/* The slope of the softcap, 1 - (u/c)^2, which is in [0,1]. */
static ref_num slope_of(const problem *a, const key *k)
{
    ref_num slope = {1.0L, 0.0L};
    const long double cap = (long double)a->p->softcap;
    if (cap == 0.0L)
        return slope;
    const long double t = k->capped.value / cap;
    const long double wrong = k->capped.error / cap + 4.0L * a->u * fabsl(t);
    slope.value = 1.0L - t * t;
    slope.error = (2.0L * fabsl(t) + wrong) * wrong + 4.0L * a->u;
    if (slope.error > 1.0L)
        slope.error = 1.0L;
    return slope;
}

static pair pair_of(const backward *c, const row *r, const key *k, int64_t j)
{
    const problem *a = &c->a;
    const sequence *s = r->s;
    pair p = {.unknown = 0};
    const long double dz = k->z.error + 4.0L * a->u * fabsl(r->lse);
    p.w = exponential(a, k->z.value - r->lse, dz, &p.unknown);
    const ref_num x = factor_of(c, r, k->v, &p.lost);
    p.dz = product(a, p.w, x);
    p.du = a->p->softcap == 0.0 ? p.dz : product(a, p.dz, slope_of(a, k));
    p.lost = (p.w.value + p.w.error) * p.lost + 1.0L;
    p.apart = fabsl((long double)(s->offset + r->i - (s->k_offset + j)));
    return p;
}

/* ------------------------------------------------------ What it adds -- */

/* A term of a product of matrices, x being of an input. Some BLAS libraries
 * pass over zeros: 0 times an infinity is NaN with others, and nothing there.
 */
static void add_product(sum *to, ref_num factor, long double x,
                        long double under, int unknown)
{
    const int may_be_0 =
        isfinite(factor.value) && fabsl(factor.value) <= factor.error;
    if (isinf(x) && may_be_0)
        add_term(to, 0.0L, 0.0L, 0.0L, 1);
    else
        add_term(to, factor.value * x, factor.error * fabsl(x), under, unknown);
}

/* d_q and d_k: du times a component of the other. */
static void add_component(const problem *a, sum *to, const pair *p,
                          long double x)
{
    const long double under =
        p->lost * fabsl(x) + fabsl(p->du.value) + p->du.error + 1.0L;
    add_product(to, p->du, x, a->tiny * under, p->unknown);
}

static void add_to_rows(backward *c, const row *r, const pair *p, int64_t j)
{
    const problem *a = &c->a;
    const sequence *s = r->s;
    const int64_t g = r->h / (a->q.shape[1] / a->k.shape[1]);
    int64_t b, t;
    ref_find_key(a, s, j, &b, &t);
    const ref_num *k = ref_at(&a->k, b, g, t, 0);
    for (int64_t d = 0; d < a->q.shape[3]; d++) {
        add_component(a, sum_at(&c->d_q, s->batch, r->h, s->q_start + r->i, d),
                      p, k[d].value);
        add_component(a, sum_at(&c->d_k, b, g, t, d), p, r->q[d].value);
    }
    for (int64_t e = 0; e < a->v.shape[3]; e++) {
        add_product(sum_at(&c->d_v, b, g, t, e), p->w, r->d_out[e].value,
                    a->tiny, p->unknown);
    }
}

static void add_to_scale(backward *c, const row *r, const pair *p, int64_t j)
{
    const problem *a = &c->a;
    const int64_t g = r->h / (a->q.shape[1] / a->k.shape[1]);
    long double dot = 0.0L, size = 0.0L, reach = 1.0L;
    int64_t b, t;
    ref_find_key(a, r->s, j, &b, &t);
    const ref_num *k = ref_at(&a->k, b, g, t, 0);
    for (int64_t d = 0; d < a->q.shape[3]; d++) {
        const long double x = fabsl(r->q[d].value), y = fabsl(k[d].value);
        dot += r->q[d].value * k[d].value;
        size += x * y;
        reach += p->lost * x * y + x + fabsl(p->du.value) + 1.0L;
    }
    sum *to = c->d_scale.at;
    add_term(to, p->du.value * dot, p->du.error * size, a->tiny * reach,
             p->unknown);
    /* However products and sums are nested, their terms are these. */
    to->size += fabsl(p->du.value) * (size - fabsl(dot));
}

/* The element of a vector (1,1,1,Hq) or (B,Hq,1,1), see ref_of_head. */
static sum *sum_of_head(const sums *s, const problem *a, int64_t b, int64_t h)
{
    const int64_t *n = s->shape;
    if (n[0] == 1 && n[1] == 1 && n[3] == a->q.shape[1])
        return sum_at(s, 0, 0, 0, h);
    return sum_at(s, b, h, 0, 0);
}

/* Gradients of what was added to u. */
static void add_to_added(backward *c, const row *r, const pair *p, int64_t j)
{
    const problem *a = &c->a;
    const int64_t b = r->s->index;
    for (int32_t n = 0; n < a->p->num_masks; n++) {
        const int64_t *s = c->d_masks[n].shape;
        if (a->p->masks[n].kind != ATTN_MASK_ADD)
            continue;
        add_term(sum_at(&c->d_masks[n], s[0] == 1 ? 0 : b, s[1] == 1 ? 0 : r->h,
                        s[2] == 1 ? 0 : r->i, s[3] == 1 ? 0 : j),
                 p->dz.value, p->dz.error, a->tiny, p->unknown);
    }
    if (a->p->alibi)
        add_term(sum_of_head(&c->d_alibi, a, b, r->h), -p->apart * p->dz.value,
                 p->apart * p->dz.error, a->tiny * (p->apart + 1.0L),
                 p->unknown);
}

/* A row without keys has its sink for its log-sum-exp, so d_lse goes there; if
 * that is -inf there is nothing that depends on it. */
static void add_to_sinks(backward *c, const row *r, int64_t visible)
{
    const problem *a = &c->a;
    const long double sink = ref_of_head(a, a->p->sinks, r->s->index, r->h);
    const long double dz = 8.0L * a->u * (fabsl(sink) + fabsl(r->lse));
    int unknown = 0;
    if (visible == 0 && sink == -HUGE_VALL)
        return;
    const ref_num w = exponential(a, sink - r->lse, dz, &unknown);
    const ref_num x = {r->d_lse - r->delta.value,
                       r->delta.error +
                           8.0L * a->u *
                               (fabsl(r->d_lse) + fabsl(r->delta.value))};
    const ref_num t = product(a, w, x);
    add_term(sum_of_head(&c->d_sinks, a, r->s->index, r->h), t.value, t.error,
             a->tiny, unknown);
}

static void add_row(backward *c, const sequence *s, int64_t h, int64_t i,
                    key *keys)
{
    const problem *a = &c->a;
    const row r = row_of(c, s, h, i);
    const int64_t visible = ref_row_scores(a, s, h, i, keys);
    for (int64_t j = s->k_first; j < s->k_len; j++) {
        if (!keys[j].visible)
            continue;
        const pair p = pair_of(c, &r, &keys[j], j);
        add_to_rows(c, &r, &p, j);
        add_to_scale(c, &r, &p, j);
        add_to_added(c, &r, &p, j);
    }
    if (visible > 0) /* q . (sum of du k), over the rows */
        c->d_scale.at[0].terms += a->q.shape[3];
    if (a->p->sinks)
        add_to_sinks(c, &r, visible);
}

/* ------------------------------------------------------------- Ends -- */

static int holds_inf(const ref_tensor *x, int also_lowest)
{
    const int64_t *s = x->shape;
    for (int64_t n = 0; x->num && n < s[0] * s[1] * s[2] * s[3]; n++)
        if (isinf(x->num[n].value) && (also_lowest || x->num[n].value > 0.0L))
            return 1;
    return 0;
}

/* -inf is no number but a sign in masks, sinks and log-sum-exps. */
static int view_holds_inf(const attn_tensor *x, int also_lowest)
{
    if (!x)
        return 0;
    const ref_tensor t = ref_read_view(x);
    const int found = holds_inf(&t, also_lowest);
    free(t.num);
    return found;
}

static int find_inf(const backward *c)
{
    const problem *a = &c->a;
    const ref_tensor *const all[] = {&a->q,   &a->k,     &a->v,
                                     &c->out, &c->d_out, &c->d_lse};
    int found = holds_inf(&c->lse, 0) || view_holds_inf(a->p->sinks, 0) ||
                view_holds_inf(a->p->alibi, 1);
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        found |= holds_inf(all[n], 1);
    for (int32_t n = 0; n < a->p->num_masks; n++)
        found |= view_holds_inf(&a->p->masks[n].view, 0);
    return found;
}

static ref_num finish(const backward *c, const sum *s, long double factor,
                      long double prior)
{
    const problem *a = &c->a;
    const long double f = fabsl(factor);
    ref_num x = {prior, 0.0L};
    if (!s->is_owned) {
        x.error = REF_UNTOUCHED;
        return x;
    }
    if (s->terms == 0)
        return x;
    x.value = factor * s->value + prior;
    if (!isfinite(x.value)) {
        x.error = c->has_inf ? REF_NOT_FINITE : 0.0L;
        return x;
    }
    x.error =
        f * s->error + (1.0L + f) * s->under +
        a->u * ((long double)s->terms + 8.0L) * (f * s->size + fabsl(prior)) +
        a->tiny;
    if (s->unknown || !(fabsl(x.value) + x.error <= a->huge))
        x.error = REF_UNKNOWN;
    return x;
}

/* Frees the sums; prior: what they are added to, or NULL. */
static ref_tensor finish_all(const backward *c, sums *s, long double factor,
                             const attn_tensor *prior)
{
    const int64_t *n = s->shape;
    ref_tensor t = ref_make(n[0], n[1], n[2], n[3]);
    for (int64_t b = 0; b < n[0]; b++)
        for (int64_t h = 0; h < n[1]; h++)
            for (int64_t i = 0; i < n[2]; i++)
                for (int64_t j = 0; j < n[3]; j++)
                    *ref_at(&t, b, h, i, j) =
                        finish(c, sum_at(s, b, h, i, j), factor,
                               prior ? ref_get(prior, b, h, i, j) : 0.0L);
    free(s->at);
    return t;
}

/* Rows of a ragged batch that belong to one of its sequences. */
static void own_rows(const sums *s, int64_t first, int64_t n)
{
    for (int64_t h = 0; h < s->shape[1]; h++)
        for (int64_t t = first; t < first + n; t++)
            for (int64_t d = 0; d < s->shape[3]; d++)
                sum_at(s, 0, h, t, d)->is_owned = 1;
}

static void prepare(backward *c)
{
    static const int64_t one[4] = {1, 1, 1, 1};
    const attn_sdpa_params *p = c->a.p;
    c->d_q = make_sums(c->a.q.shape, !p->cu_q);
    c->d_k = make_sums(c->a.k.shape, !p->cu_k);
    c->d_v = make_sums(c->a.v.shape, !p->cu_k);
    c->d_scale = make_sums(one, 1);
    if (p->alibi)
        c->d_alibi = make_sums(p->alibi->shape, 1);
    if (p->sinks)
        c->d_sinks = make_sums(p->sinks->shape, 1);
    for (int32_t n = 0; n < p->num_masks; n++)
        if (p->masks[n].kind == ATTN_MASK_ADD)
            c->d_masks[n] = make_sums(p->masks[n].view.shape, 1);
}

static void add_all(backward *c)
{
    const problem *a = &c->a;
    key *keys = ref_allocate(ref_keys_of(a), sizeof *keys);
    for (int64_t n = 0; n < ref_sequences_of(a); n++) {
        const sequence s = ref_find_sequence(a, n);
        if (a->p->cu_q)
            own_rows(&c->d_q, s.q_start, s.q_rows);
        if (a->p->cu_k) {
            own_rows(&c->d_k, s.k_start, s.k_len);
            own_rows(&c->d_v, s.k_start, s.k_len);
        }
        for (int64_t h = 0; h < a->q.shape[1]; h++)
            for (int64_t i = 0; i < s.q_len; i++)
                add_row(c, &s, h, i, keys);
    }
    free(keys);
}

/* What a gradient is added to; NULL: nothing. */
static const attn_tensor *prior_of(const attn_sdpa_gradients *g, int32_t flag,
                                   const attn_tensor *view)
{
    return g->flags & flag ? view : NULL;
}

static void finish_gradients(backward *c, const attn_sdpa_gradients *g,
                             ref_gradients *to)
{
    const attn_sdpa_params *p = c->a.p;
    const long double scale = c->a.scale;
    to->d_q =
        finish_all(c, &c->d_q, scale, prior_of(g, ATTN_SDPA_ADD_D_Q, g->d_q));
    to->d_k =
        finish_all(c, &c->d_k, scale, prior_of(g, ATTN_SDPA_ADD_D_K, g->d_k));
    to->d_v =
        finish_all(c, &c->d_v, 1.0L, prior_of(g, ATTN_SDPA_ADD_D_V, g->d_v));
    to->d_scale = finish_all(c, &c->d_scale, 1.0L,
                             prior_of(g, ATTN_SDPA_ADD_D_SCALE, g->d_scale));
    if (p->alibi)
        to->d_alibi =
            finish_all(c, &c->d_alibi, 1.0L,
                       prior_of(g, ATTN_SDPA_ADD_D_ALIBI, g->d_alibi));
    if (p->sinks)
        to->d_sinks =
            finish_all(c, &c->d_sinks, 1.0L,
                       prior_of(g, ATTN_SDPA_ADD_D_SINKS, g->d_sinks));
    for (int32_t n = 0; n < p->num_masks; n++)
        if (p->masks[n].kind == ATTN_MASK_ADD)
            to->d_masks[n] = finish_all(
                c, &c->d_masks[n], 1.0L,
                g->d_masks ? prior_of(g, ATTN_SDPA_ADD_D_MASKS, g->d_masks[n])
                           : NULL);
}

void ref_sdpa_backward(ref_gradients *result, const attn_sdpa_params *params,
                       const attn_tensor *q, const attn_tensor *k,
                       const attn_tensor *v, const attn_tensor *out,
                       const attn_tensor *d_out,
                       const attn_sdpa_gradients *gradients)
{
    backward c = {.a = {.p = params}};
    const ref_gradients empty = {.d_q = {.num = NULL}};
    c.a.q = ref_read_view(q);
    c.a.k = ref_read_view(k);
    c.a.v = ref_read_view(v);
    c.a.scale = ref_scale_of(params, q->shape[3]);
    ref_set_type(&c.a, q->dtype);
    c.out = ref_read_view(out);
    c.lse = ref_read_view(params->lse);
    c.d_out = ref_read_view(d_out);
    if (gradients->d_lse)
        c.d_lse = ref_read_view(gradients->d_lse);
    c.has_inf = find_inf(&c);
    prepare(&c);
    add_all(&c);
    *result = empty;
    finish_gradients(&c, gradients, result);
    ref_tensor *const inputs[] = {&c.a.q, &c.a.k,   &c.a.v,  &c.out,
                                  &c.lse, &c.d_out, &c.d_lse};
    for (size_t n = 0; n < sizeof inputs / sizeof inputs[0]; n++)
        free(inputs[n]->num);
}

void ref_free_gradients(ref_gradients *result)
{
    ref_tensor *const all[] = {&result->d_q,     &result->d_k,
                               &result->d_v,     &result->d_alibi,
                               &result->d_sinks, &result->d_scale};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        free(all[n]->num);
    for (int n = 0; n < ATTN_MAX_MASKS; n++)
        free(result->d_masks[n].num);
    const ref_gradients empty = {.d_q = {.num = NULL}};
    *result = empty;
}
