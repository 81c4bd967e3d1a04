#include "draw.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Classes of values. */
enum {
    VALUES_NORMAL,
    VALUES_LARGE, /* scores of hundreds: exp overflows unless max is taken */
    VALUES_TINY,  /* products of q and k underflow in float */
    VALUES_HIDDEN_POISON, /* NaN and inf at keys and rows that nothing sees */
    VALUES_VISIBLE_POISON /* NaN and inf in places that may be seen */
};

static const char *const value_names[] = {"normal", "large", "tiny",
                                          "hidden poison", "visible poison"};

/* Work of one call at most, in score elements times width: keeps the oracle,
 * which is slow, to some milliseconds. */
enum { MAX_WORK = 400000 };

/* --------------------------------------------------------------- Sizes -- */

typedef struct sizes {
    attn_dtype dtype;
    int64_t batch, q_heads, kv_heads, q_len, kv_len, width, v_width;
} sizes;

/* 0 now and then, small mostly, up to 67, and rarely up to 300. */
static int64_t draw_size(rng *r)
{
    const int64_t kind = rng_int(r, 1, 20);
    if (kind == 1)
        return rng_one_in(r, 2) ? 0 : 1;
    if (kind == 2)
        return rng_int(r, 68, 300);
    return kind <= 10 ? rng_int(r, 1, 9) : rng_int(r, 1, 67);
}

static int64_t draw_width(rng *r)
{
    static const int64_t usual[] = {1, 4, 8, 16, 32, 64};
    if (rng_one_in(r, 40))
        return 0;
    if (rng_one_in(r, 40))
        return rng_int(r, 68, 140);
    return rng_one_in(r, 2) ? usual[rng_int(r, 0, 5)] : rng_int(r, 1, 67);
}

/* Shapes that a program may treat in a way of its own. */
static void draw_special(rng *r, sizes *s, int64_t *group)
{
    switch (rng_int(r, 1, 3)) {
    case 1: /* few queries over a long cache: keys may be split */
        s->batch = s->kv_heads = 1;
        *group = rng_int(r, 1, 2);
        s->q_len = 1;
        s->kv_len = rng_int(r, 2000, 8000);
        s->width = rng_int(r, 1, 8);
        s->v_width = rng_int(r, 1, 8);
        break;
    case 2: /* more heads in a group than a block of queries has room for */
        s->batch = s->kv_heads = 1;
        *group = rng_int(r, 33, 300);
        s->q_len = rng_int(r, 1, 5);
        break;
    default: /* very wide heads */
        s->batch = s->kv_heads = 1;
        s->q_len = rng_int(r, 1, 9);
        s->kv_len = rng_int(r, 1, 40);
        s->width = rng_int(r, 1, 1500);
        s->v_width = rng_int(r, 1, 1500);
    }
}

static sizes draw_sizes(rng *r)
{
    sizes s;
    s.dtype = rng_one_in(r, 2) ? ATTN_F32 : ATTN_F64;
    s.batch = rng_one_in(r, 40) ? 0 : rng_int(r, 1, 3);
    s.kv_heads = rng_one_in(r, 40) ? 0 : rng_int(r, 1, 3);
    int64_t group = rng_one_in(r, 2) ? 1 : rng_int(r, 1, 5);
    s.q_len = draw_size(r);
    s.kv_len = rng_one_in(r, 3) ? s.q_len : draw_size(r);
    s.width = draw_width(r);
    s.v_width = rng_one_in(r, 2) ? s.width : draw_width(r);
    if (rng_one_in(r, 25))
        draw_special(r, &s, &group);
    /* Halve what is too large until the oracle can do it quickly. */
    s.q_heads = s.kv_heads * group;
    int64_t *const large[] = {&s.batch, &s.kv_heads, &s.kv_len, &s.q_len};
    for (int n = 0;
         s.batch * s.q_heads * s.q_len * s.kv_len * (s.width + s.v_width + 8) >
         MAX_WORK;
         n++) {
        int64_t *x = large[n % 4];
        *x = *x > 1 ? (*x + 1) / 2 : *x;
        s.q_heads = s.kv_heads * group;
    }
    return s;
}

/* ------------------------------------------------------------- Options -- */

/* The sequences of the call: of the batch, or of a ragged one. */
static int64_t sequences(const drawn *d)
{
    return d->params.cu_q ? d->params.num_seqs : d->q.view.shape[0];
}

/* n + 1 non-decreasing numbers in [0, total], not always up to the ends. */
static void draw_cuts(rng *r, int64_t *cut, int64_t n, int64_t total)
{
    for (int64_t i = 0; i <= n; i++)
        cut[i] = rng_int(r, 0, total);
    if (rng_one_in(r, 2)) {
        cut[0] = 0;
        cut[n] = total;
    }
    for (int64_t i = 1; i <= n; i++) /* insertion sort */
        for (int64_t j = i; j > 0 && cut[j] < cut[j - 1]; j--) {
            const int64_t swap = cut[j];
            cut[j] = cut[j - 1];
            cut[j - 1] = swap;
        }
}

static void draw_ragged(rng *r, drawn *d, const sizes *s)
{
    d->params.num_seqs = rng_int(r, 0, DRAW_MAX_SEQS);
    draw_cuts(r, d->cu_q, d->params.num_seqs, s->q_len);
    if (s->q_len == s->kv_len && rng_one_in(r, 2))
        memcpy(d->cu_k, d->cu_q, sizeof d->cu_k);
    else
        draw_cuts(r, d->cu_k, d->params.num_seqs, s->kv_len);
    d->params.cu_q = d->cu_q;
    d->params.cu_k = d->cu_k;
}

static void draw_lengths(rng *r, drawn *d, const sizes *s)
{
    for (int64_t b = 0; b < s->batch; b++) {
        d->q_lens[b] = rng_int(r, 0, s->q_len);
        d->kv_lens[b] = rng_int(r, 0, s->kv_len);
    }
    if (rng_one_in(r, 2))
        d->params.kv_lens = d->kv_lens;
    if (rng_one_in(r, 3))
        d->params.q_lens = d->q_lens;
}

/* An offset that leaves some rows empty, some full and most in between. */
static int64_t draw_offset(rng *r, const sizes *s)
{
    return rng_int(r, -s->q_len - 2, s->kv_len + 2);
}

static void draw_align(rng *r, drawn *d, const sizes *s)
{
    attn_sdpa_params *p = &d->params;
    p->align = (int32_t)rng_int(r, ATTN_ALIGN_TOP_LEFT, ATTN_ALIGN_OFFSET);
    if (p->align != ATTN_ALIGN_OFFSET) {
        const int same =
            p->cu_q ? memcmp(d->cu_q, d->cu_k, sizeof d->cu_q) == 0
                    : s->q_len == s->kv_len && !p->q_lens && !p->kv_lens;
        if (same && rng_one_in(r, 2))
            p->align = 0; /* allowed where all alignments agree */
        return;
    }
    if (rng_one_in(r, 2)) {
        p->q_offset = draw_offset(r, s);
    } else {
        for (int64_t b = 0; b < DRAW_MAX_SEQS; b++)
            d->q_offsets[b] = draw_offset(r, s);
        p->q_offsets = d->q_offsets;
    }
}

static void draw_prefix(rng *r, drawn *d, const sizes *s)
{
    for (int64_t b = 0; b < sequences(d); b++) {
        const int64_t keys =
            d->params.cu_k ? d->cu_k[b + 1] - d->cu_k[b] : s->kv_len;
        d->prefix_lens[b] = rng_int(r, 0, keys);
    }
    d->params.prefix_lens = d->prefix_lens;
}

static void draw_rules(rng *r, drawn *d, const sizes *s)
{
    attn_sdpa_params *p = &d->params;
    if (rng_one_in(r, 2))
        p->causal = 1;
    if (p->causal && rng_one_in(r, 4))
        draw_prefix(r, d, s);
    if (rng_one_in(r, 4)) {
        p->flags |= ATTN_SDPA_WINDOW;
        p->window_left = rng_int(r, -1, s->kv_len / 2 + 1);
        p->window_right = rng_int(r, -1, s->kv_len / 2 + 1);
        p->keep_first = rng_one_in(r, 2) ? rng_int(r, 0, 5) : 0;
    }
    if (rng_one_in(r, 8))
        p->chunk = rng_int(r, 1, s->kv_len + 2);
    if (p->causal || p->chunk || (p->flags & ATTN_SDPA_WINDOW) ||
        rng_one_in(r, 4))
        draw_align(r, d, s);
    if (rng_one_in(r, 4)) {
        static const double scales[] = {0.0,   1.0, -0.4, 0.125,
                                        1e-20, 3.0, -1e4};
        p->flags |= ATTN_SDPA_SCALE;
        p->scale = scales[rng_int(r, 0, 6)];
    }
}

/* --------------------------------------------------------------- Masks -- */

/* How long the longest sequence is: masks are indexed within a sequence. */
static int64_t longest(const int64_t *cut, int64_t n)
{
    int64_t most = 0;
    for (int64_t i = 0; i < n; i++)
        most = cut[i + 1] - cut[i] > most ? cut[i + 1] - cut[i] : most;
    return most;
}

static void mask_shape(rng *r, const drawn *d, const sizes *s, int64_t n[4])
{
    const attn_sdpa_params *p = &d->params;
    n[0] = sequences(d);
    n[1] = s->q_heads;
    n[2] = p->cu_q ? longest(d->cu_q, p->num_seqs) : s->q_len;
    n[3] = p->cu_k ? longest(d->cu_k, p->num_seqs) : s->kv_len;
    for (int i = 0; i < 4; i++)
        if (rng_one_in(r, 3))
            n[i] = 1;
}

/* wild: this mask may hold the most negative number, which is no -inf. */
static double mask_number(rng *r, int32_t kind, attn_dtype dtype, int wild)
{
    if (kind == ATTN_MASK_KEEP)
        return rng_one_in(r, 3) ? 0.0 : (double)rng_int(r, 1, 255);
    if (kind == ATTN_MASK_DROP)
        return rng_one_in(r, 3) ? (double)rng_int(r, 1, 255) : 0.0;
    if (rng_one_in(r, 5))
        return -HUGE_VAL;
    if (wild && rng_one_in(r, 2))
        return dtype == ATTN_F32 ? -(double)FLT_MAX : -DBL_MAX;
    return 3.0 * rng_normal(r);
}

static void draw_mask(rng *r, drawn *d, const sizes *s, int32_t n)
{
    attn_mask *m = &d->masks[n];
    int64_t shape[4];
    m->kind = (int32_t)rng_int(r, ATTN_MASK_KEEP, ATTN_MASK_ADD);
    const attn_dtype dtype = m->kind == ATTN_MASK_ADD ? s->dtype : ATTN_U8;
    /* Only the first, since two such numbers overflow their type. */
    const int wild = n == 0 && rng_one_in(r, 6);
    mask_shape(r, d, s, shape);
    d->mask_memory[n] = tensor_scattered(r, TENSOR_INPUT, dtype, shape[0],
                                         shape[1], shape[2], shape[3]);
    m->view = d->mask_memory[n].view;
    for (int64_t b = 0; b < shape[0]; b++)
        for (int64_t h = 0; h < shape[1]; h++)
            for (int64_t i = 0; i < shape[2]; i++)
                for (int64_t j = 0; j < shape[3]; j++)
                    tensor_set(&m->view, b, h, i, j,
                               mask_number(r, m->kind, dtype, wild));
}

/* A DROP mask (B,1,1,Tk) over the keys of which hidden is true. */
static void add_padding_mask(drawn *d, const sizes *s,
                             const unsigned char *hidden)
{
    const int32_t n = d->params.num_masks++;
    d->mask_memory[n] = tensor_make(ATTN_U8, 1, 1, 1, s->kv_len);
    d->masks[n].kind = ATTN_MASK_DROP;
    d->masks[n].view = d->mask_memory[n].view;
    for (int64_t j = 0; j < s->kv_len; j++)
        tensor_set(&d->masks[n].view, 0, 0, 0, j, (double)hidden[j]);
}

/* -------------------------------------------------------------- Values -- */

static double poison(rng *r)
{
    const int64_t kind = rng_int(r, 1, 3);
    return kind == 1 ? (double)NAN : kind == 2 ? HUGE_VAL : -HUGE_VAL;
}

static void poison_row(rng *r, const attn_tensor *x, int64_t b, int64_t t)
{
    for (int64_t h = 0; h < x->shape[1]; h++)
        for (int64_t d = 0; d < x->shape[3]; d++)
            if (!rng_one_in(r, 3))
                tensor_set(x, b, h, t, d, poison(r));
}

/* Poison at every row that belongs to no sequence or lies beyond its length,
 * and at keys that a mask made for them hides. */
static void poison_hidden(rng *r, drawn *d, const sizes *s)
{
    unsigned char hidden[512] = {0};
    const attn_sdpa_params *p = &d->params;
    for (int64_t b = 0; b < s->batch; b++) {
        if (p->kv_lens)
            for (int64_t j = d->kv_lens[b]; j < s->kv_len; j++) {
                poison_row(r, &d->k.view, b, j);
                poison_row(r, &d->v.view, b, j);
            }
        if (p->q_lens)
            for (int64_t i = d->q_lens[b]; i < s->q_len; i++)
                poison_row(r, &d->q.view, b, i);
    }
    if (p->cu_q || p->num_masks == ATTN_MAX_MASKS || s->kv_len > 512)
        return;
    for (int64_t j = 0; j < s->kv_len; j++) {
        hidden[j] = (unsigned char)rng_one_in(r, 4);
        for (int64_t b = 0; hidden[j] && b < s->batch; b++) {
            poison_row(r, &d->k.view, b, j);
            poison_row(r, &d->v.view, b, j);
        }
    }
    add_padding_mask(d, s, hidden);
}

/* Numbers that are not finite in single elements; whom they reach is for the
 * oracle to say. */
static void poison_visible(rng *r, const drawn *d)
{
    const attn_tensor *const x[] = {&d->q.view, &d->k.view, &d->v.view};
    for (int n = 0; n < 6; n++) {
        const int which = (int)rng_int(r, 0, 2);
        const int64_t *s = x[which]->shape;
        if (s[0] * s[1] * s[2] * s[3] == 0 || rng_one_in(r, 3))
            continue;
        tensor_set(x[which], rng_int(r, 0, s[0] - 1), rng_int(r, 0, s[1] - 1),
                   rng_int(r, 0, s[2] - 1), rng_int(r, 0, s[3] - 1), poison(r));
    }
}

/* A stride of 0 would make a hidden element and a visible one the same. */
static int has_shared_elements(const attn_tensor *x)
{
    for (int i = 0; i < 4; i++)
        if (x->shape[i] > 1 && x->stride[i] == 0)
            return 1;
    return 0;
}

static void draw_values(rng *r, drawn *d, const sizes *s)
{
    d->values = (int)rng_int(r, VALUES_NORMAL, VALUES_VISIBLE_POISON);
    if (rng_one_in(r, 3))
        d->values = VALUES_NORMAL;
    if (d->values == VALUES_HIDDEN_POISON &&
        (has_shared_elements(&d->q.view) || has_shared_elements(&d->k.view) ||
         has_shared_elements(&d->v.view)))
        d->values = VALUES_NORMAL;
    d->factor = d->values == VALUES_LARGE  ? 4.0 + 12.0 * rng_unit(r)
                : d->values == VALUES_TINY ? 1e-21
                                           : 1.0;
    tensor_normal(&d->q.view, r, d->factor);
    tensor_normal(&d->k.view, r, d->factor);
    if (!d->shares_kv)
        tensor_normal(&d->v.view, r, 1.0);
    if (d->values == VALUES_HIDDEN_POISON)
        poison_hidden(r, d, s);
    if (d->values == VALUES_VISIBLE_POISON)
        poison_visible(r, d);
}

/* ---------------------------------------------------------------- Call -- */

static void draw_tensors(rng *r, drawn *d, const sizes *s)
{
    const int64_t b = s->batch;
    d->in_place = s->width == s->v_width && rng_one_in(r, 12);
    d->shares_kv = s->width == s->v_width && rng_one_in(r, 12);
    d->q = tensor_scattered(r, d->in_place ? TENSOR_OUTPUT : TENSOR_INPUT,
                            s->dtype, b, s->q_heads, s->q_len, s->width);
    d->k = tensor_scattered(r, TENSOR_INPUT, s->dtype, b, s->kv_heads,
                            s->kv_len, s->width);
    if (d->shares_kv)
        d->v.view = d->k.view;
    else
        d->v = tensor_scattered(r, TENSOR_INPUT, s->dtype, b, s->kv_heads,
                                s->kv_len, s->v_width);
    if (d->in_place)
        d->out.view = d->q.view;
    else
        d->out = tensor_scattered(r, TENSOR_OUTPUT, s->dtype, b, s->q_heads,
                                  s->q_len, s->v_width);
}

static void draw_outputs(rng *r, drawn *d, const sizes *s)
{
    const attn_sdpa_params *p = &d->params;
    const int64_t n = sequences(d);
    const int64_t q_len = p->cu_q ? longest(d->cu_q, n) : s->q_len;
    const int64_t kv_len = p->cu_k ? longest(d->cu_k, n) : s->kv_len;
    if (rng_one_in(r, 2)) {
        d->lse = tensor_scattered(r, TENSOR_OUTPUT, s->dtype, s->batch,
                                  s->q_heads, s->q_len, 1);
        d->params.lse = &d->lse.view;
    }
    if (d->in_place) /* q is read again for the weights */
        return;
    if (rng_one_in(r, 3)) {
        d->weights = tensor_scattered(r, TENSOR_OUTPUT, s->dtype, n, s->q_heads,
                                      q_len, kv_len);
        d->params.weights = &d->weights.view;
    }
    if (rng_one_in(r, 4)) {
        d->weights_mean =
            tensor_scattered(r, TENSOR_OUTPUT, s->dtype, n, 1, q_len, kv_len);
        d->params.weights_mean = &d->weights_mean.view;
    }
}

void draw_call(drawn *d, uint64_t seed, uint64_t index)
{
    static const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
    rng r = rng_make(seed, index);
    memset(d, 0, sizeof *d);
    d->seed = seed;
    d->index = index;
    d->params = init;
    sizes s = draw_sizes(&r);
    const int ragged = rng_one_in(&r, 6);
    if (ragged)
        s.batch = 1;
    draw_tensors(&r, d, &s);
    if (ragged)
        draw_ragged(&r, d, &s);
    else if (rng_one_in(&r, 3))
        draw_lengths(&r, d, &s);
    draw_rules(&r, d, &s);
    if (rng_one_in(&r, 2))
        d->params.num_masks = (int32_t)rng_int(&r, 1, ATTN_MAX_MASKS - 1);
    for (int32_t n = 0; n < d->params.num_masks; n++)
        draw_mask(&r, d, &s, n);
    draw_values(&r, d, &s);
    d->params.masks = d->params.num_masks ? d->masks : NULL;
    draw_outputs(&r, d, &s);
    d->threads = rng_one_in(&r, 3) ? (int)rng_int(&r, 1, 3) : 0;
    d->use_work = rng_one_in(&r, 4);
}

void draw_free(drawn *d)
{
    tensor_free(&d->q);
    tensor_free(&d->k);
    tensor_free(&d->v);
    tensor_free(&d->out);
    tensor_free(&d->lse);
    tensor_free(&d->weights);
    tensor_free(&d->weights_mean);
    for (int n = 0; n < ATTN_MAX_MASKS; n++)
        tensor_free(&d->mask_memory[n]);
}

/* --------------------------------------------------------- Description -- */

typedef struct writer {
    char *at;
    size_t left;
} writer;

__attribute__((format(printf, 2, 3))) static void put(writer *w,
                                                      const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(w->at, w->left, format, args);
    va_end(args);
    const size_t used = (size_t)n < w->left ? (size_t)n : w->left - 1;
    w->at += used;
    w->left -= used;
}

static void put_list(writer *w, const char *name, const int64_t *x, int64_t n)
{
    if (!x)
        return;
    put(w, " %s", name);
    for (int64_t i = 0; i < n; i++)
        put(w, "%c%" PRId64, i ? ',' : '=', x[i]);
}

static void put_view(writer *w, const char *name, const attn_tensor *v)
{
    put_list(w, name, v->shape, 4);
    put_list(w, "by", v->stride, 4);
}

void draw_describe(const drawn *d, char *text, size_t size)
{
    static const char *const kinds[] = {"?", "keep", "drop", "add"};
    const attn_sdpa_params *p = &d->params;
    const int64_t n = sequences(d);
    writer w = {text, size};
    put(&w,
        "ATTN_TEST_SEED=%" PRIu64 " ATTN_TEST_FIRST=%" PRIu64
        " ATTN_TEST_COUNT=1: f%d values=\"%s\"",
        d->seed, d->index, d->q.view.dtype == ATTN_F32 ? 32 : 64,
        value_names[d->values]);
    put_view(&w, "q", &d->q.view);
    put_view(&w, "k", &d->k.view);
    put_view(&w, "v", &d->v.view);
    put_view(&w, "out", &d->out.view);
    put(&w, "%s%s%s threads=%d", d->in_place ? " in-place" : "",
        d->shares_kv ? " v-is-k" : "", d->use_work ? " work" : "", d->threads);
    if (p->flags & ATTN_SDPA_SCALE)
        put(&w, " scale=%g", p->scale);
    put(&w, " causal=%d align=%d offset=%" PRId64, (int)p->causal,
        (int)p->align, p->q_offset);
    put_list(&w, "q_offsets", p->q_offsets, n);
    put_list(&w, "prefix", p->prefix_lens, n);
    if (p->flags & ATTN_SDPA_WINDOW)
        put(&w, " window=%" PRId64 ",%" PRId64 " keep_first=%" PRId64,
            p->window_left, p->window_right, p->keep_first);
    put(&w, " chunk=%" PRId64, p->chunk);
    put_list(&w, "q_lens", p->q_lens, n);
    put_list(&w, "kv_lens", p->kv_lens, n);
    put_list(&w, "cu_q", p->cu_q, n + 1);
    put_list(&w, "cu_k", p->cu_k, n + 1);
    for (int32_t m = 0; m < p->num_masks; m++)
        put_view(&w, kinds[p->masks[m].kind], &p->masks[m].view);
    put(&w, " outputs:%s%s%s", p->lse ? " lse" : "",
        p->weights ? " weights" : "", p->weights_mean ? " weights_mean" : "");
}
