#include "ref_internal.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

static long double largest_number(attn_dtype dtype)
{
    return dtype == ATTN_F32 ? (long double)FLT_MAX : (long double)DBL_MAX;
}

void *ref_allocate(int64_t n, size_t bytes)
{
    void *p = calloc((size_t)n + 1, bytes);
    if (!p) {
        fprintf(stderr, "the oracle is out of memory\n");
        abort();
    }
    return p;
}

/* IEEE 754 binary16: one bit of sign, five of exponent, ten of fraction. */
static long double from_half(uint16_t bits)
{
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    long double x;
    if (exponent == 31)
        x = fraction ? (long double)NAN : HUGE_VALL;
    else if (exponent == 0)
        x = ldexpl((long double)fraction, -24);
    else
        x = ldexpl((long double)(fraction + 1024), exponent - 25);
    return bits & 0x8000 ? -x : x;
}

/* The upper half of a float. */
static long double from_bfloat(uint16_t bits)
{
    const uint32_t whole = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &whole, sizeof x);
    return (long double)x;
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
    if (view->dtype == ATTN_F16)
        return from_half(((const uint16_t *)view->data)[at]);
    if (view->dtype == ATTN_BF16)
        return from_bfloat(((const uint16_t *)view->data)[at]);
    return (long double)((const unsigned char *)view->data)[at];
}

ref_num *ref_at(const ref_tensor *t, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const int64_t *s = t->shape;
    return &t->num[((b * s[1] + h) * s[2] + i) * s[3] + j];
}

ref_tensor ref_make(int64_t b, int64_t h, int64_t t, int64_t d)
{
    ref_tensor r = {{b, h, t, d}, ref_allocate(b * h * t * d, sizeof(ref_num))};
    return r;
}

ref_tensor ref_read_view(const attn_tensor *view)
{
    const int64_t *s = view->shape;
    ref_tensor r = ref_make(s[0], s[1], s[2], s[3]);
    for (int64_t b = 0; b < s[0]; b++)
        for (int64_t h = 0; h < s[1]; h++)
            for (int64_t t = 0; t < s[2]; t++)
                for (int64_t d = 0; d < s[3]; d++)
                    ref_at(&r, b, h, t, d)->value = ref_get(view, b, h, t, d);
    return r;
}

/* ------------------------------------------------------------ Problem -- */

int64_t ref_keys_of(const problem *a)
{
    return a->p->page_table ? a->p->pages_per_seq * a->k.shape[2]
                            : a->k.shape[2];
}

int64_t ref_sequences_of(const problem *a)
{
    return a->p->cu_q ? a->p->num_seqs : a->q.shape[0];
}

sequence ref_find_sequence(const problem *a, int64_t s)
{
    const attn_sdpa_params *p = a->p;
    sequence q = {.index = s, .batch = s, .q_rows = a->q.shape[2]};
    int64_t k_rows = ref_keys_of(a);
    if (p->cu_q) {
        q.batch = 0;
        q.q_start = p->cu_q[s];
        q.q_rows = p->cu_q[s + 1] - p->cu_q[s];
    }
    if (p->cu_k) {
        q.k_start = p->cu_k[s];
        k_rows = p->cu_k[s + 1] - p->cu_k[s];
    }
    q.q_len = p->q_lens ? p->q_lens[s] : q.q_rows;
    q.k_len = p->kv_lens ? p->kv_lens[s] : k_rows;
    q.k_first = p->kv_starts ? p->kv_starts[s] : 0;
    q.k_offset = p->kv_offsets ? p->kv_offsets[s] : 0;
    if (p->align == ATTN_ALIGN_OFFSET)
        q.offset = p->q_offsets ? p->q_offsets[s] : p->q_offset;
    else if (p->align == ATTN_ALIGN_BOTTOM_RIGHT)
        q.offset = q.k_offset + q.k_len - q.q_len;
    else
        q.offset = q.k_offset;
    return q;
}

void ref_find_key(const problem *a, const sequence *s, int64_t j, int64_t *b,
                  int64_t *t)
{
    const attn_sdpa_params *p = a->p;
    const int64_t rows = a->k.shape[2];
    *b = s->batch;
    *t = s->k_start + j;
    if (p->page_table) {
        *b = p->page_table[s->index * p->pages_per_seq + j / rows];
        *t = j % rows;
    } else if (p->ring_starts) {
        *t = (p->ring_starts[s->index] + j) % rows;
    }
}

long double ref_of_head(const problem *a, const attn_tensor *x, int64_t b,
                        int64_t h)
{
    const int64_t *n = x->shape;
    if (n[0] == 1 && n[1] == 1 && n[3] == a->q.shape[1])
        return ref_get(x, 0, 0, 0, h);
    return ref_get(x, b, h, 0, 0);
}

/* --------------------------------------------------------- Visibility -- */

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

/* The rules that go by positions. */
static int rules_allow(const attn_sdpa_params *p, const sequence *s, int64_t i,
                       int64_t j)
{
    const int64_t at = s->offset + i, stands = s->k_offset + j;
    if (p->causal) {
        const int64_t prefix = p->prefix_lens ? p->prefix_lens[s->index] : 0;
        const int in_prefix = prefix > 0 && stands < prefix;
        if (stands > at && !in_prefix)
            return 0;
    }
    const int kept = stands >= 0 && stands < p->keep_first;
    if ((p->flags & ATTN_SDPA_WINDOW) && !kept) {
        if (p->window_left >= 0 && at - stands > p->window_left)
            return 0;
        if (p->window_right >= 0 && stands - at > p->window_right)
            return 0;
    }
    if (p->chunk > 0 && floor_div(at, p->chunk) != floor_div(stands, p->chunk))
        return 0;
    return 1;
}

static int segments_allow(const problem *a, const sequence *s, int64_t i,
                          int64_t j)
{
    const attn_sdpa_params *p = a->p;
    if (!p->q_segments)
        return 1;
    const int64_t q = p->cu_q ? s->q_start : s->index * a->q.shape[2];
    const int64_t k = p->cu_k ? s->k_start : s->index * ref_keys_of(a);
    return p->q_segments[q + i] == p->kv_segments[k + j];
}

static int blocks_allow(const attn_sdpa_params *p, int64_t b, int64_t h,
                        int64_t i, int64_t j)
{
    const attn_tensor *x = p->blocks;
    return !x || ref_get(x, x->shape[0] == 1 ? 0 : b, x->shape[1] == 1 ? 0 : h,
                         i / p->block_q, j / p->block_k) != 0.0L;
}

static int is_visible(const problem *a, const sequence *s, int64_t h, int64_t i,
                      int64_t j, long double *added, long double *magnitude)
{
    return masks_allow(a->p, s->index, h, i, j, added, magnitude) &&
           rules_allow(a->p, s, i, j) && segments_allow(a, s, i, j) &&
           blocks_allow(a->p, s->index, h, i, j);
}

/* ------------------------------------------------------------- Scores -- */

/* scale q.k and its error. */
static ref_num raw_score(const problem *a, const ref_num *q, const ref_num *k)
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
    const ref_num raw = {a->scale * sum,
                         a->u * ((long double)width + 8.0L) * t * size +
                             t * inherited +
                             a->tiny * (1.0L + t) * (reach + 1.0L)};
    return raw;
}

static ref_num capped_score(const problem *a, ref_num raw)
{
    const long double c = (long double)a->p->softcap;
    if (c == 0.0L)
        return raw;
    ref_num capped = {c * tanhl(raw.value / c), 0.0L};
    if (!isinf(raw.value)) {
        const long double nearest = fmaxl(fabsl(raw.value) - raw.error, 0.0L);
        const long double t = tanhl(nearest / c);
        capped.error = raw.error * (1.0L - t * t);
    }
    capped.error +=
        8.0L * a->u * fabsl(capped.value) + 2.0L * c * a->u * a->tiny;
    return capped;
}

/* The score of a visible key, from what is added to the capped one. */
static void finish_score(const problem *a, const sequence *s, int64_t h,
                         int64_t i, int64_t j, long double added,
                         long double magnitude, key *to)
{
    if (a->p->alibi) {
        const int64_t apart = s->offset + i - (s->k_offset + j);
        const long double x = ref_of_head(a, a->p->alibi, s->index, h) *
                              fabsl((long double)apart);
        added -= x;
        magnitude += fabsl(x);
    }
    to->z.value = to->capped.value + added;
    to->z.error = to->capped.error +
                  a->u * (8.0L * magnitude + 4.0L * fabsl(to->z.value));
}

int64_t ref_row_scores(const problem *a, const sequence *s, int64_t h,
                       int64_t i, key *keys)
{
    const int64_t g = h / (a->q.shape[1] / a->k.shape[1]);
    const ref_num *q = ref_at(&a->q, s->batch, h, s->q_start + i, 0);
    int64_t visible = 0;
    for (int64_t j = 0; j < s->k_len; j++) {
        const key unread = {.z = {-HUGE_VALL, 0.0L}};
        long double added, magnitude;
        int64_t b, t;
        keys[j] = unread;
        if (j < s->k_first)
            continue;
        ref_find_key(a, s, j, &b, &t);
        keys[j].v = ref_at(&a->v, b, g, t, 0);
        keys[j].raw = raw_score(a, q, ref_at(&a->k, b, g, t, 0));
        keys[j].capped = capped_score(a, keys[j].raw);
        keys[j].visible = is_visible(a, s, h, i, j, &added, &magnitude);
        if (!keys[j].visible)
            continue;
        visible++;
        finish_score(a, s, h, i, j, added, magnitude, &keys[j]);
    }
    return visible;
}

/* ------------------------------------------------------------ Softmax -- */

/* The largest visible score or the sink; NaN if one of them is. */
static long double row_max(const key *keys, int64_t n, long double sink)
{
    long double m = sink;
    for (int64_t j = 0; j < n && !isnan(m); j++)
        if (keys[j].visible && !(keys[j].z.value <= m))
            m = keys[j].z.value;
    return m;
}

/* Numbers of a whole row that all its outputs share. */
typedef struct row {
    long double lse;
    long double spread;    /* s of the header comment */
    long double max_dz;    /* the largest dz */
    long double rounding;  /* c of the header comment */
    int64_t visible, keys; /* visible ones, all */
    int has_sink;
    int is_nan;
} row;

long double ref_growth(long double z_minus_m, long double dz)
{
    if (dz < 1.0L)
        return expl(z_minus_m) * expm1l(dz);
    return expl(z_minus_m + dz) - expl(z_minus_m);
}

/* Scores that are finite beside an infinite sink: L is inf, all weights 0. */
static int sink_takes_all(const key *keys, int64_t n, long double sink)
{
    return sink == HUGE_VALL && row_max(keys, n, -HUGE_VALL) < HUGE_VALL;
}

static row row_softmax(const problem *a, key *keys, int64_t n, int64_t visible,
                       const long double *sink)
{
    const long double s = sink ? *sink : -HUGE_VALL;
    row r = {.visible = visible, .keys = n, .has_sink = sink != NULL};
    const long double m = row_max(keys, n, s);
    r.rounding = a->u * (2.0L * (long double)(visible + r.has_sink) + 16.0L);
    r.lse = s;
    if (visible == 0 || sink_takes_all(keys, n, s))
        return r;
    long double sum = sink ? expl(s - m) : 0.0L;
    for (int64_t j = 0; j < n; j++)
        if (keys[j].visible)
            sum += expl(keys[j].z.value - m);
    r.lse = m + logl(sum);
    r.is_nan = isnan(sum);
    for (int64_t j = 0; j < n; j++) {
        key *c = &keys[j];
        if (!c->visible)
            continue;
        c->dz = c->z.error + 4.0L * a->u * fabsl(m);
        c->weight = expl(c->z.value - m) / sum;
        c->log_weight = c->z.value - m - logl(sum);
        c->up = ref_growth(c->z.value - m, c->dz) / sum;
        r.spread += c->up;
        r.max_dz = c->dz > r.max_dz ? c->dz : r.max_dz;
    }
    if (sink && s > -HUGE_VALL) {
        const long double dz = 4.0L * a->u * (fabsl(s) + fabsl(m));
        r.spread += ref_growth(s - m, dz) / sum;
        r.max_dz = dz > r.max_dz ? dz : r.max_dz;
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

/* out(i,e). */
static ref_num output_of(const problem *a, const row *r, const key *keys,
                         int64_t e)
{
    ref_num out = {0.0L, 0.0L};
    if (r->visible == 0)
        return out;
    long double size = 0.0L, moved = 0.0L, inherited = 0.0L, largest = 0.0L;
    long double far_v = 0.0L, all = 0.0L;
    int unsure = 0;
    for (int64_t j = 0; j < r->keys; j++) {
        if (!keys[j].visible)
            continue;
        const ref_num *v = &keys[j].v[e];
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

/* ------------------------------------------------ What a row tells -- */

static const ref_num not_a_number = {(long double)NAN, 0.0L};

static ref_num largest_weight(const problem *a, const row *r, const key *keys)
{
    ref_num most = {0.0L, 0.0L};
    long double above = 0.0L;
    if (r->is_nan)
        return not_a_number;
    for (int64_t j = 0; j < r->keys; j++) {
        const ref_num w = weight_of(a, r, &keys[j]);
        most = w.value > most.value || j == 0 ? w : most;
        above = fmaxl(above, w.value + w.error);
    }
    most.error = fmaxl(most.error, above - most.value);
    return most;
}

static ref_num effective_keys(const problem *a, const row *r, const key *keys)
{
    ref_num count = {0.0L, 0.0L};
    long double sum = 0.0L, wrong = 0.0L;
    const long double n = (long double)r->visible;
    if (r->is_nan)
        return not_a_number;
    if (r->visible == 0)
        return count;
    for (int64_t j = 0; j < r->keys; j++) {
        const ref_num w = weight_of(a, r, &keys[j]);
        sum += w.value * w.value;
        wrong += (2.0L * w.value + w.error) * w.error;
    }
    wrong += a->u * (n + 8.0L) * sum + n * a->tiny;
    const long double margin = 1.0L + a->u * (n + 8.0L);
    const long double low = fmaxl(1.0L / (sum + wrong), 1.0L / margin);
    long double high = wrong < sum ? 1.0L / (sum - wrong) : HUGE_VALL;
    if (!r->has_sink)
        high = fminl(high, n * margin);
    if (high > a->huge) {
        count.value = low;
        count.error = REF_AT_LEAST;
        return count;
    }
    count.value = 1.0L / sum;
    count.error = fmaxl(count.value - low, high - count.value);
    return count;
}

static ref_num entropy_of(const problem *a, const row *r, const key *keys)
{
    ref_num h = {0.0L, 0.0L};
    const long double n = (long double)r->visible;
    /* Where the smallest weight that is not 0 has its logarithm. */
    const long double most = logl(n + 1.0L) - logl(a->tiny) - logl(a->u);
    if (r->is_nan)
        return not_a_number;
    if (r->visible == 0)
        return h;
    for (int64_t j = 0; j < r->keys; j++) {
        if (!keys[j].visible)
            continue;
        const ref_num w = weight_of(a, r, &keys[j]);
        const long double l = fminl(fabsl(keys[j].log_weight), most);
        if (w.value > 0.0L) /* 0 ln 0 is 0 */
            h.value -= w.value * keys[j].log_weight;
        h.error += w.error * (l + 2.0L) * (w.error < 0.5L * w.value ? 1 : 4);
    }
    const long double rounding = a->u * (n + 16.0L);
    const long double end = logl(n) + (r->has_sink ? expl(-1.0L) : 0.0L);
    h.error = fminl(h.error, fmaxl(h.value, end - h.value) + rounding * end);
    h.error += rounding * h.value + a->tiny;
    return h;
}

/* --------------------------------------------------------------- Rows -- */

/* Rows that belong to a sequence but not to its q_len: all zeros. */
static void write_zero_row(const problem *a, const sequence *s, int64_t h,
                           int64_t i)
{
    const ref_num zero = {0.0L, 0.0L};
    const ref_num none = {-HUGE_VALL, 0.0L};
    const int64_t at = s->q_start + i;
    ref_result *to = a->result;
    for (int64_t e = 0; e < a->v.shape[3]; e++)
        *ref_at(&to->out, s->batch, h, at, e) = zero;
    *ref_at(&to->lse, s->batch, h, at, 0) = none;
    *ref_at(&to->max_weight, s->batch, h, at, 0) = zero;
    *ref_at(&to->effective_keys, s->batch, h, at, 0) = zero;
    *ref_at(&to->entropy, s->batch, h, at, 0) = zero;
}

/* What row (h, i) leaves in the outputs that have a place for each key. */
static void write_keys(const problem *a, const sequence *s, int64_t h,
                       int64_t i, const row *r, const key *keys)
{
    ref_result *to = a->result;
    for (int64_t j = 0; j < s->k_len; j++) {
        const ref_num w = weight_of(a, r, &keys[j]);
        ref_num *sum = ref_at(&to->key_sums, s->index, h, 0, j);
        *ref_at(&to->scores_raw, s->index, h, i, j) = keys[j].raw;
        *ref_at(&to->scores_capped, s->index, h, i, j) = keys[j].capped;
        *ref_at(&to->scores, s->index, h, i, j) = keys[j].z;
        *ref_at(&to->weights, s->index, h, i, j) = w;
        sum->value += w.value;
        sum->error += w.error + a->u * ((long double)s->q_len + 4.0L) * w.value;
    }
}

static void write_row(const problem *a, const sequence *s, int64_t h, int64_t i,
                      key *keys)
{
    ref_result *to = a->result;
    const int64_t at = s->q_start + i;
    long double sink = 0.0L;
    if (a->p->sinks)
        sink = ref_of_head(a, a->p->sinks, s->index, h);
    const int64_t visible = ref_row_scores(a, s, h, i, keys);
    const row r =
        row_softmax(a, keys, s->k_len, visible, a->p->sinks ? &sink : NULL);
    for (int64_t e = 0; e < a->v.shape[3]; e++)
        *ref_at(&to->out, s->batch, h, at, e) = output_of(a, &r, keys, e);
    *ref_at(&to->lse, s->batch, h, at, 0) = lse_of(a, &r);
    *ref_at(&to->max_weight, s->batch, h, at, 0) = largest_weight(a, &r, keys);
    *ref_at(&to->effective_keys, s->batch, h, at, 0) =
        effective_keys(a, &r, keys);
    *ref_at(&to->entropy, s->batch, h, at, 0) = entropy_of(a, &r, keys);
    write_keys(a, s, h, i, &r, keys);
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

static void fill(const ref_tensor *t, long double value, long double error)
{
    const int64_t *s = t->shape;
    for (int64_t n = 0; n < s[0] * s[1] * s[2] * s[3]; n++) {
        t->num[n].value = value;
        t->num[n].error = error;
    }
}

static void prepare_outputs(const problem *a)
{
    const attn_sdpa_params *p = a->p;
    const int64_t batch = a->q.shape[0], heads = a->q.shape[1];
    const int64_t rows = a->q.shape[2];
    const int64_t n = ref_sequences_of(a);
    const int64_t q_len = longest(p->cu_q, n, rows);
    const int64_t k_len = longest(p->cu_k, n, ref_keys_of(a));
    ref_result *r = a->result;
    r->out = ref_make(batch, heads, rows, a->v.shape[3]);
    r->lse = ref_make(batch, heads, rows, 1);
    r->max_weight = ref_make(batch, heads, rows, 1);
    r->effective_keys = ref_make(batch, heads, rows, 1);
    r->entropy = ref_make(batch, heads, rows, 1);
    r->weights = ref_make(n, heads, q_len, k_len);
    r->weights_mean = ref_make(n, 1, q_len, k_len);
    r->scores_raw = ref_make(n, heads, q_len, k_len);
    r->scores_capped = ref_make(n, heads, q_len, k_len);
    r->scores = ref_make(n, heads, q_len, k_len);
    r->key_sums = ref_make(n, heads, 1, k_len);
    fill(&r->scores, -HUGE_VALL, 0.0L);
    if (!p->cu_q)
        return;
    fill(&r->out, 0.0L, REF_UNTOUCHED);
    fill(&r->lse, 0.0L, REF_UNTOUCHED);
    fill(&r->max_weight, 0.0L, REF_UNTOUCHED);
    fill(&r->effective_keys, 0.0L, REF_UNTOUCHED);
    fill(&r->entropy, 0.0L, REF_UNTOUCHED);
}

static void attend(const problem *a)
{
    const int64_t heads = a->q.shape[1];
    key *keys = ref_allocate(ref_keys_of(a), sizeof *keys);
    prepare_outputs(a);
    for (int64_t n = 0; n < ref_sequences_of(a); n++) {
        const sequence s = ref_find_sequence(a, n);
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

long double ref_scale_of(const attn_sdpa_params *p, int64_t width)
{
    if (p->flags & ATTN_SDPA_SCALE)
        return (long double)p->scale;
    /* D = 0: every score is 0 whatever the scale. */
    return width > 0 ? 1.0L / sqrtl((long double)width) : 0.0L;
}

void ref_set_type(problem *a, attn_dtype dtype)
{
    a->u = unit_roundoff(dtype);
    a->tiny = smallest_normal(dtype);
    a->huge = largest_number(dtype);
}

void ref_sdpa(ref_result *result, const attn_sdpa_params *params,
              const attn_tensor *q, const attn_tensor *k, const attn_tensor *v)
{
    const attn_sdpa_params none = ATTN_SDPA_PARAMS_INIT;
    problem a = {.p = params ? params : &none, .result = result};
    a.q = ref_read_view(q);
    a.k = ref_read_view(k);
    a.v = ref_read_view(v);
    a.scale = ref_scale_of(a.p, q->shape[3]);
    ref_set_type(&a, q->dtype);
    attend(&a);
    free(a.q.num);
    free(a.k.num);
    free(a.v.num);
}

static ref_tensor shape_of(const attn_tensor *x)
{
    ref_tensor t = {{0}, NULL};
    memcpy(t.shape, x->shape, sizeof t.shape);
    return t;
}

void ref_seen_rows(unsigned char *seen, const attn_sdpa_params *params,
                   const attn_tensor *q, const attn_tensor *k)
{
    const problem a = {.p = params, .q = shape_of(q), .k = shape_of(k)};
    const int64_t *n = k->shape;
    memset(seen, 0, (size_t)(n[0] * n[1] * n[2]));
    for (int64_t c = 0; c < ref_sequences_of(&a); c++) {
        const sequence s = ref_find_sequence(&a, c);
        for (int64_t j = s.k_first; j < s.k_len; j++) {
            int64_t b, t;
            ref_find_key(&a, &s, j, &b, &t);
            for (int64_t h = 0; h < q->shape[1]; h++) {
                const int64_t g = h / (q->shape[1] / n[1]);
                unsigned char *mark = &seen[(b * n[1] + g) * n[2] + t];
                long double added, magnitude;
                for (int64_t i = 0; i < s.q_len && !*mark; i++)
                    *mark = (unsigned char)is_visible(&a, &s, h, i, j, &added,
                                                      &magnitude);
            }
        }
    }
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
    ref_tensor in = ref_read_view(x);
    ref_tensor out = ref_make(x->shape[0], heads, x->shape[2], width);
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
    ref_tensor y = ref_make(s[0], 1, s[2], width);
    ref_num *concat = ref_allocate(in, sizeof *concat);
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
    a->scale = ref_scale_of(a->p, width);
}

void ref_mha(ref_result *result, const attn_mha_params *params,
             const attn_tensor *x_q, const attn_tensor *x_k,
             const attn_tensor *x_v)
{
    const attn_sdpa_params none = ATTN_SDPA_PARAMS_INIT;
    problem a = {.p = params->attention ? params->attention : &none,
                 .result = result};
    ref_set_type(&a, x_q->dtype);
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
    ref_tensor *const all[] = {&result->out,        &result->lse,
                               &result->weights,    &result->weights_mean,
                               &result->scores_raw, &result->scores_capped,
                               &result->scores,     &result->key_sums,
                               &result->max_weight, &result->effective_keys,
                               &result->entropy};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        free(all[n]->num);
    const ref_result empty = {0};
    *result = empty;
}
