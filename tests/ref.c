#include "ref.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ------------------------------------------------------------ Numbers -- */

/* Half the machine epsilon of a type; for double the oracle's own is added,
 * which matters only where long double is no wider. */
static long double unit_roundoff(attn_dtype dtype)
{
    return dtype == ATTN_F32 ? 0.5L * (long double)FLT_EPSILON
                             : 0.5L * (long double)DBL_EPSILON + LDBL_EPSILON;
}

static long double smallest_normal(attn_dtype dtype)
{
    return dtype == ATTN_F32 ? (long double)FLT_MIN : (long double)DBL_MIN;
}

static void *allocate(int64_t n, size_t bytes)
{
    void *p = calloc((size_t)n + 1, bytes);
    if (!p) {
        fprintf(stderr, "the oracle is out of memory\n");
        abort();
    }
    return p;
}

long double ref_get(const attn_tensor *view, int64_t b, int64_t h, int64_t t,
                    int64_t d)
{
    const int64_t at = b * view->stride[0] + h * view->stride[1] +
                       t * view->stride[2] + d * view->stride[3];
    if (view->dtype == ATTN_F32)
        return (long double)((const float *)view->data)[at];
    if (view->dtype == ATTN_F64)
        return (long double)((const double *)view->data)[at];
    return (long double)((const unsigned char *)view->data)[at];
}

ref_num *ref_at(const ref_tensor *t, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const int64_t *s = t->shape;
    return &t->num[((b * s[1] + h) * s[2] + i) * s[3] + j];
}

static ref_tensor make(int64_t b, int64_t h, int64_t t, int64_t d)
{
    ref_tensor r = {{b, h, t, d}, allocate(b * h * t * d, sizeof(ref_num))};
    return r;
}

/* The view's elements, which are exact. */
static ref_tensor read_view(const attn_tensor *view)
{
    const int64_t *s = view->shape;
    ref_tensor r = make(s[0], s[1], s[2], s[3]);
    for (int64_t b = 0; b < s[0]; b++)
        for (int64_t h = 0; h < s[1]; h++)
            for (int64_t t = 0; t < s[2]; t++)
                for (int64_t d = 0; d < s[3]; d++)
                    ref_at(&r, b, h, t, d)->value = ref_get(view, b, h, t, d);
    return r;
}

/* --------------------------------------------------------- Visibility -- */

/* One sequence of the batch: where its rows are and how long it is. */
typedef struct sequence {
    int64_t index;          /* b in masks and arrays */
    int64_t batch;          /* b in the tensors */
    int64_t q_start, q_len; /* q_len: rows that are computed */
    int64_t k_start, k_len;
    int64_t q_rows; /* rows that are written; zeros from q_len on */
    int64_t offset; /* position of query 0 */
} sequence;

static sequence find_sequence(const attn_sdpa_params *p, int64_t s,
                              int64_t q_rows, int64_t k_rows)
{
    sequence q = {.index = s, .batch = s};
    if (p->cu_q) {
        q.batch = 0;
        q.q_start = p->cu_q[s];
        q.k_start = p->cu_k[s];
        q_rows = p->cu_q[s + 1] - p->cu_q[s];
        k_rows = p->cu_k[s + 1] - p->cu_k[s];
    }
    q.q_rows = q_rows;
    q.q_len = p->q_lens ? p->q_lens[s] : q_rows;
    q.k_len = p->kv_lens ? p->kv_lens[s] : k_rows;
    if (p->align == ATTN_ALIGN_BOTTOM_RIGHT)
        q.offset = q.k_len - q.q_len;
    else if (p->align == ATTN_ALIGN_OFFSET)
        q.offset = p->q_offsets ? p->q_offsets[s] : p->q_offset;
    return q;
}

static int64_t floor_div(int64_t a, int64_t n)
{
    return a / n - (a % n < 0);
}

static long double mask_value(const attn_mask *m, int64_t b, int64_t h,
                              int64_t i, int64_t j)
{
    const int64_t *s = m->view.shape;
    return ref_get(&m->view, s[0] == 1 ? 0 : b, s[1] == 1 ? 0 : h,
                   s[2] == 1 ? 0 : i, s[3] == 1 ? 0 : j);
}

/* Does every mask let key j through? added gets the sum of the ADD values and
 * magnitude the sum of their magnitudes. */
static int masks_allow(const attn_sdpa_params *p, int64_t b, int64_t h,
                       int64_t i, int64_t j, long double *added,
                       long double *magnitude)
{
    int visible = 1;
    *added = *magnitude = 0.0L;
    for (int32_t n = 0; n < p->num_masks; n++) {
        const attn_mask *m = &p->masks[n];
        const long double x = mask_value(m, b, h, i, j);
        if (m->kind == ATTN_MASK_KEEP)
            visible &= x != 0.0L;
        else if (m->kind == ATTN_MASK_DROP)
            visible &= !(x != 0.0L);
        else
            visible &= !(isinf(x) && x < 0.0L);
        if (m->kind == ATTN_MASK_ADD) {
            *added += x;
            *magnitude += fabsl(x);
        }
    }
    return visible;
}

static int rules_allow(const attn_sdpa_params *p, const sequence *s, int64_t i,
                       int64_t j)
{
    const int64_t at = s->offset + i;
    if (p->causal) {
        const int in_prefix = p->prefix_lens && j < p->prefix_lens[s->index];
        if (j > at && !in_prefix)
            return 0;
    }
    if ((p->flags & ATTN_SDPA_WINDOW) && j >= p->keep_first) {
        if (p->window_left >= 0 && at - j > p->window_left)
            return 0;
        if (p->window_right >= 0 && j - at > p->window_right)
            return 0;
    }
    if (p->chunk > 0 && floor_div(at, p->chunk) != floor_div(j, p->chunk))
        return 0;
    return 1;
}

/* ---------------------------------------------------------------- Row -- */

typedef struct problem {
    const attn_sdpa_params *p;
    ref_tensor q, k, v;
    long double scale;
    long double u;    /* unit roundoff */
    long double tiny; /* smallest normal number */
    ref_result *result;
} problem;

/* A key of one row. */
typedef struct key {
    int visible;
    long double z;      /* score */
    long double dz;     /* its error, without the part that needs m */
    long double weight; /* w */
    long double up;     /* w (exp(dz) - 1) */
} key;

/* Score of one query and key, and its error. */
static void score(const problem *a, const ref_num *q, const ref_num *k,
                  long double added, long double magnitude, key *out)
{
    const int64_t width = a->q.shape[3];
    long double sum = 0.0L, size = 0.0L, inherited = 0.0L, reach = 0.0L;
    for (int64_t d = 0; d < width; d++) {
        sum += q[d].value * k[d].value;
        size += fabsl(q[d].value * k[d].value);
        inherited += fabsl(q[d].value) * k[d].error +
                     fabsl(k[d].value) * q[d].error + q[d].error * k[d].error;
        reach += fabsl(k[d].value) + 1.0L;
    }
    const long double t = fabsl(a->scale);
    out->z = a->scale * sum + added;
    out->dz = a->u * (((long double)width + 8.0L) * t * size +
                      8.0L * magnitude + 4.0L * fabsl(out->z)) +
              t * inherited + a->tiny * (1.0L + t) * (reach + 1.0L);
}

/* Fills the scores of row (h, i); the number of visible keys is returned. */
static int64_t row_scores(const problem *a, const sequence *s, int64_t h,
                          int64_t i, key *keys)
{
    const int64_t g = h / (a->q.shape[1] / a->k.shape[1]);
    int64_t visible = 0;
    for (int64_t j = 0; j < s->k_len; j++) {
        long double added, magnitude;
        keys[j].visible =
            masks_allow(a->p, s->index, h, i, j, &added, &magnitude) &&
            rules_allow(a->p, s, i, j);
        if (!keys[j].visible)
            continue;
        visible++;
        score(a, ref_at(&a->q, s->batch, h, s->q_start + i, 0),
              ref_at(&a->k, s->batch, g, s->k_start + j, 0), added, magnitude,
              &keys[j]);
    }
    return visible;
}

/* The largest visible score; NaN if there is one. */
static long double row_max(const key *keys, int64_t n)
{
    long double m = -HUGE_VALL;
    for (int64_t j = 0; j < n; j++) {
        if (!keys[j].visible)
            continue;
        if (isnan(keys[j].z))
            return keys[j].z;
        m = keys[j].z > m ? keys[j].z : m;
    }
    return m;
}

/* Numbers of a whole row that all its outputs share. */
typedef struct row {
    long double lse;
    long double spread;    /* s of the header comment */
    long double max_dz;    /* the largest dz */
    long double rounding;  /* c of the header comment */
    int64_t visible, keys; /* visible ones, all */
} row;

/* exp(z-m+dz) - exp(z-m), where the difference must not cancel. */
static long double growth(long double z_minus_m, long double dz)
{
    if (dz < 1.0L)
        return expl(z_minus_m) * expm1l(dz);
    return expl(z_minus_m + dz) - expl(z_minus_m);
}

static row row_softmax(const problem *a, key *keys, int64_t n, int64_t visible)
{
    row r = {.visible = visible, .keys = n};
    const long double m = row_max(keys, n);
    long double sum = 0.0L;
    for (int64_t j = 0; j < n; j++)
        if (keys[j].visible)
            sum += expl(keys[j].z - m);
    r.lse = visible ? m + logl(sum) : -HUGE_VALL;
    r.rounding = a->u * (2.0L * (long double)visible + 16.0L);
    for (int64_t j = 0; j < n; j++) {
        key *c = &keys[j];
        if (!c->visible)
            continue;
        c->dz += 4.0L * a->u * fabsl(m);
        c->weight = expl(c->z - m) / sum;
        c->up = growth(c->z - m, c->dz) / sum;
        r.spread += c->up;
        r.max_dz = c->dz > r.max_dz ? c->dz : r.max_dz;
    }
    return r;
}

/* ------------------------------------------------------------ Outputs -- */

/* Beyond this spread the linear bound says nothing any more. */
static int is_wild(const row *r)
{
    return !(r->spread < 0.5L);
}

static ref_num weight_of(const problem *a, const row *r, const key *c)
{
    ref_num w = {0.0L, 0.0L};
    if (!c->visible)
        return w;
    w.value = c->weight;
    /* Whatever the scores are, a weight is in [0, 1]. */
    w.error = 4.0L * a->u + (c->weight > 0.5L ? c->weight : 1.0L - c->weight);
    if (!is_wild(r)) {
        const long double linear =
            (c->up + c->weight * (r->spread + r->rounding)) /
            (1.0L - r->spread);
        w.error = linear < w.error ? linear : w.error;
    }
    w.error += 2.0L * a->tiny; /* the exponential and its quotient */
    return w;
}

static ref_num lse_of(const problem *a, const row *r)
{
    ref_num lse = {r->lse, 0.0L};
    if (r->visible == 0)
        return lse;
    lse.error = r->max_dz;
    if (!is_wild(r) && r->spread / (1.0L - r->spread) < r->max_dz)
        lse.error = r->spread / (1.0L - r->spread);
    lse.error += r->rounding + 4.0L * a->u * fabsl(r->lse) + a->tiny;
    return lse;
}

/* out(i,e) for values v(j) that are step numbers apart. */
static ref_num output_of(const problem *a, const row *r, const key *keys,
                         const ref_num *v, int64_t step)
{
    ref_num out = {0.0L, 0.0L};
    if (r->visible == 0)
        return out;
    long double size = 0.0L, moved = 0.0L, inherited = 0.0L, largest = 0.0L;
    long double far_v = 0.0L, all = 0.0L;
    int unsure = 0;
    for (int64_t j = 0; j < r->keys; j++, v += step) {
        if (!keys[j].visible)
            continue;
        const long double x = fabsl(v->value);
        out.value += keys[j].weight * v->value;
        size += keys[j].weight * x;
        moved += keys[j].up * x;
        inherited += (keys[j].weight + keys[j].up) * v->error;
        far_v = v->error > far_v ? v->error : far_v;
        largest = x > largest ? x : largest;
        all += x;
        unsure |= isinf(x) && keys[j].weight < 4.0L * a->tiny;
    }
    if (unsure) {
        out.error = REF_NOT_FINITE;
        return out;
    }
    /* |out - v| <= |out| + |v|: a convex combination cannot be farther off. */
    const long double any = fabsl(out.value) + largest * (1.0L + r->rounding);
    out.error = any + far_v;
    if (!is_wild(r)) {
        const long double linear =
            (moved + fabsl(out.value) * r->spread + r->rounding * size) /
                (1.0L - r->spread) +
            2.0L * inherited;
        out.error = linear < out.error ? linear : out.error;
    }
    out.error += a->tiny * (all + (long double)r->keys + 1.0L);
    return out;
}

/* Rows that belong to a sequence but not to its q_len: all zeros. */
static void write_zero_row(const problem *a, const sequence *s, int64_t h,
                           int64_t i)
{
    const ref_num zero = {0.0L, 0.0L};
    const ref_num none = {-HUGE_VALL, 0.0L};
    const int64_t at = s->q_start + i;
    for (int64_t e = 0; e < a->v.shape[3]; e++)
        *ref_at(&a->result->out, s->batch, h, at, e) = zero;
    *ref_at(&a->result->lse, s->batch, h, at, 0) = none;
}

static void write_row(const problem *a, const sequence *s, int64_t h, int64_t i,
                      key *keys)
{
    ref_result *to = a->result;
    const int64_t g = h / (a->q.shape[1] / a->k.shape[1]);
    const int64_t width = a->v.shape[3], at = s->q_start + i;
    const int64_t visible = row_scores(a, s, h, i, keys);
    const row r = row_softmax(a, keys, s->k_len, visible);
    for (int64_t e = 0; e < width; e++) {
        const ref_num *v =
            s->k_len ? ref_at(&a->v, s->batch, g, s->k_start, e) : NULL;
        *ref_at(&to->out, s->batch, h, at, e) =
            output_of(a, &r, keys, v, width);
    }
    *ref_at(&to->lse, s->batch, h, at, 0) = lse_of(a, &r);
    for (int64_t j = 0; j < s->k_len; j++)
        *ref_at(&to->weights, s->index, h, i, j) = weight_of(a, &r, &keys[j]);
}

static void average_weights(const problem *a)
{
    const ref_tensor *w = &a->result->weights;
    const int64_t *s = w->shape;
    const long double heads = (long double)s[1];
    for (int64_t b = 0; b < s[0]; b++)
        for (int64_t i = 0; i < s[2]; i++)
            for (int64_t j = 0; j < s[3]; j++) {
                ref_num *mean = ref_at(&a->result->weights_mean, b, 0, i, j);
                for (int64_t h = 0; h < s[1]; h++) {
                    mean->value += ref_at(w, b, h, i, j)->value / heads;
                    mean->error += ref_at(w, b, h, i, j)->error / heads;
                }
                mean->error += a->u * (heads + 4.0L) * mean->value + a->tiny;
                /* Exactly zero where no head sees the key. */
                if (mean->value == 0.0L && mean->error == a->tiny)
                    mean->error = 0.0L;
            }
}

/* The longest sequence of a ragged batch, else rows. */
static int64_t longest(const int64_t *cu, int64_t num_seqs, int64_t rows)
{
    int64_t most = 0;
    if (!cu)
        return rows;
    for (int64_t n = 0; n < num_seqs; n++)
        most = cu[n + 1] - cu[n] > most ? cu[n + 1] - cu[n] : most;
    return most;
}

static void prepare_outputs(const problem *a)
{
    const attn_sdpa_params *p = a->p;
    const int64_t batch = a->q.shape[0], heads = a->q.shape[1];
    const int64_t rows = a->q.shape[2], width = a->v.shape[3];
    const int64_t sequences = p->cu_q ? p->num_seqs : batch;
    const int64_t q_len = longest(p->cu_q, p->num_seqs, rows);
    const int64_t k_len = longest(p->cu_k, p->num_seqs, a->k.shape[2]);
    ref_result *r = a->result;
    r->out = make(batch, heads, rows, width);
    r->lse = make(batch, heads, rows, 1);
    r->weights = make(sequences, heads, q_len, k_len);
    r->weights_mean = make(sequences, 1, q_len, k_len);
    if (!p->cu_q)
        return;
    for (int64_t n = 0; n < batch * heads * rows * width; n++)
        r->out.num[n].error = REF_UNTOUCHED;
    for (int64_t n = 0; n < batch * heads * rows; n++)
        r->lse.num[n].error = REF_UNTOUCHED;
}

static void attend(const problem *a)
{
    const int64_t heads = a->q.shape[1];
    key *keys = allocate(a->k.shape[2], sizeof *keys);
    prepare_outputs(a);
    const int64_t sequences = a->p->cu_q ? a->p->num_seqs : a->q.shape[0];
    for (int64_t n = 0; n < sequences; n++) {
        const sequence s = find_sequence(a->p, n, a->q.shape[2], a->k.shape[2]);
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t i = 0; i < s.q_len; i++)
                write_row(a, &s, h, i, keys);
            for (int64_t i = s.q_len; i < s.q_rows; i++)
                write_zero_row(a, &s, h, i);
        }
    }
    if (heads > 0)
        average_weights(a);
    free(keys);
}

/* ------------------------------------------------------- Entry points -- */

static long double scale_of(const attn_sdpa_params *p, int64_t width)
{
    if (p->flags & ATTN_SDPA_SCALE)
        return (long double)p->scale;
    /* D = 0: every score is 0 whatever the scale. */
    return width > 0 ? 1.0L / sqrtl((long double)width) : 0.0L;
}

void ref_sdpa(ref_result *result, const attn_sdpa_params *params,
              const attn_tensor *q, const attn_tensor *k, const attn_tensor *v)
{
    const attn_sdpa_params none = ATTN_SDPA_PARAMS_INIT;
    problem a = {.p = params ? params : &none, .result = result};
    a.q = read_view(q);
    a.k = read_view(k);
    a.v = read_view(v);
    a.scale = scale_of(a.p, q->shape[3]);
    a.u = unit_roundoff(q->dtype);
    a.tiny = smallest_normal(q->dtype);
    attend(&a);
    free(a.q.num);
    free(a.k.num);
    free(a.v.num);
}

/* Row first..first+n-1 of a projection matrix, whichever way it is stored,
 * with its bias: what x is multiplied with. */
typedef struct projection {
    const attn_tensor *w, *bias;
    int32_t layout;
    int64_t first;
} projection;

static long double weight_at(const projection *p, int64_t out, int64_t in)
{
    return p->layout == ATTN_WEIGHT_OUT_IN
               ? ref_get(p->w, 0, 0, p->first + out, in)
               : ref_get(p->w, 0, 0, in, p->first + out);
}

/* y(n) = sum over m of x(m) W(m,n) + b(n) for one row x of length in. */
static ref_num project(const projection *p, int64_t n, const ref_num *x,
                       int64_t in, long double u, long double tiny)
{
    const long double b =
        p->bias ? ref_get(p->bias, 0, 0, 0, p->first + n) : 0.0L;
    ref_num y = {b, 0.0L};
    long double size = fabsl(b);
    for (int64_t m = 0; m < in; m++) {
        const long double w = weight_at(p, n, m);
        y.value += x[m].value * w;
        size += fabsl(x[m].value * w);
        y.error += x[m].error * fabsl(w);
    }
    y.error +=
        u * ((long double)in + 4.0L) * size + tiny * ((long double)in + 1.0L);
    return y;
}

/* Projects x (B,1,T,in) and cuts the result into heads (B,H,T,D). */
static ref_tensor project_heads(const projection *p, const attn_tensor *x,
                                int64_t heads, int64_t width)
{
    const long double u = unit_roundoff(x->dtype);
    const long double tiny = smallest_normal(x->dtype);
    ref_tensor in = read_view(x);
    ref_tensor out = make(x->shape[0], heads, x->shape[2], width);
    for (int64_t b = 0; b < x->shape[0]; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t t = 0; t < x->shape[2]; t++)
                for (int64_t d = 0; d < width; d++)
                    *ref_at(&out, b, h, t, d) =
                        project(p, h * width + d, ref_at(&in, b, 0, t, 0),
                                x->shape[3], u, tiny);
    free(in.num);
    return out;
}

/* (B,H,T,Dv) to rows (B,1,T,H Dv), then times w_o. */
static ref_tensor project_out(const problem *a, const projection *p,
                              int64_t width)
{
    const ref_tensor *x = &a->result->out;
    const int64_t *s = x->shape;
    const int64_t in = s[1] * s[3];
    ref_tensor y = make(s[0], 1, s[2], width);
    ref_num *concat = allocate(in, sizeof *concat);
    for (int64_t b = 0; b < s[0]; b++)
        for (int64_t t = 0; t < s[2]; t++) {
            for (int64_t c = 0; c < in; c++)
                concat[c] = *ref_at(x, b, c / s[3], t, c % s[3]);
            for (int64_t e = 0; e < width; e++)
                *ref_at(&y, b, 0, t, e) =
                    project(p, e, concat, in, a->u, a->tiny);
        }
    free(concat);
    return y;
}

/* Rows of a (out,in) matrix, columns of a (in,out) one. */
static int64_t outputs_of(const attn_tensor *w, int32_t layout)
{
    return w->shape[layout == ATTN_WEIGHT_OUT_IN ? 2 : 3];
}

static void project_inputs(problem *a, const attn_mha_params *p,
                           const attn_tensor *x_q, const attn_tensor *x_k,
                           const attn_tensor *x_v)
{
    const int32_t l = p->weight_layout;
    const int64_t heads = p->num_heads;
    const int64_t kv = p->num_kv_heads ? p->num_kv_heads : heads;
    projection w_q = {p->w_q, p->b_q, l, 0};
    projection w_k = {p->w_k, p->b_k, l, 0};
    projection w_v = {p->w_v, p->b_v, l, 0};
    int64_t width, v_width;
    if (p->w_qkv) {
        width = v_width = outputs_of(p->w_qkv, l) / (heads + 2 * kv);
        const projection packed = {p->w_qkv, p->b_qkv, l, 0};
        w_q = w_k = w_v = packed;
        w_k.first = heads * width;
        w_v.first = (heads + kv) * width;
    } else {
        width = outputs_of(p->w_q, l) / heads;
        v_width = outputs_of(p->w_v, l) / kv;
    }
    a->q = project_heads(&w_q, x_q, heads, width);
    a->k = project_heads(&w_k, x_k, kv, width);
    a->v = project_heads(&w_v, x_v, kv, v_width);
    a->scale = scale_of(a->p, width);
}

void ref_mha(ref_result *result, const attn_mha_params *params,
             const attn_tensor *x_q, const attn_tensor *x_k,
             const attn_tensor *x_v)
{
    const attn_sdpa_params none = ATTN_SDPA_PARAMS_INIT;
    problem a = {.p = params->attention ? params->attention : &none,
                 .result = result};
    a.u = unit_roundoff(x_q->dtype);
    a.tiny = smallest_normal(x_q->dtype);
    if (!x_k)
        x_k = x_q;
    if (!x_v)
        x_v = x_k;
    project_inputs(&a, params, x_q, x_k, x_v);
    attend(&a);
    const projection w_o = {params->w_o, params->b_o, params->weight_layout, 0};
    const ref_tensor y =
        project_out(&a, &w_o, outputs_of(params->w_o, params->weight_layout));
    free(result->out.num);
    result->out = y;
    free(a.q.num);
    free(a.k.num);
    free(a.v.num);
}

void ref_free(ref_result *result)
{
    free(result->out.num);
    free(result->lse.num);
    free(result->weights.num);
    free(result->weights_mean.num);
    const ref_result empty = {0};
    *result = empty;
}
