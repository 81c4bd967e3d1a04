#include "draw.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref.h"

static const char *const value_names[] = {"normal", "large", "tiny",
                                          "hidden poison", "visible poison"};

/* Work of one call at most, in score elements times width: keeps the oracle,
 * which is slow, to some milliseconds, or a large call to some ten. */
enum { MAX_WORK = 400000, MAX_LARGE_WORK = 2500000 };

/* Options that are drawn by themselves or with anything else. */
enum {
    WITH_SOFTCAP = 1,
    WITH_ALIBI = 2,
    WITH_SINKS = 4,
    WITH_STARTS = 8,
    WITH_SEGMENTS = 16,
    WITH_BLOCKS = 32,
    WITH_STORAGE = 64, /* k and v in 16 bits */
    WITH_PAGES = 128,
    WITH_RING = 256,
    WITH_POSITIONS = 512, /* kv_offsets */
    NUM_OPTIONS = 10
};

/* A quarter of the calls have none, some have one and nothing besides. */
static int draw_options(rng *r, int *alone)
{
    int options = 0;
    *alone = rng_one_in(r, 12);
    if (*alone)
        return 1 << rng_int(r, 0, NUM_OPTIONS - 1);
    if (rng_one_in(r, 4))
        return 0;
    for (int n = 0; n < NUM_OPTIONS; n++)
        options |= rng_one_in(r, 5) << n;
    if ((options & WITH_PAGES) && (options & WITH_RING))
        options &= ~(rng_one_in(r, 2) ? WITH_PAGES : WITH_RING);
    return options;
}

static void *take(int64_t n, size_t bytes)
{
    void *p = malloc((size_t)n * bytes + 1);
    if (!p) {
        fprintf(stderr, "a test is out of memory\n");
        abort();
    }
    return p;
}

/* --------------------------------------------------------------- Sizes -- */

typedef struct sizes {
    attn_dtype dtype, kv_dtype;
    int64_t batch, q_heads, kv_heads, q_len, kv_len, width, v_width;
    int64_t page; /* keys of a page; 0: no pages */
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

/* Narrow, but several tiles of keys for several blocks of queries; or more of
 * them, which may be cut into parts for threads. */
static void draw_large(rng *r, sizes *s, int64_t *group)
{
    const int deep = rng_one_in(r, 2);
    s->batch = 1;
    s->kv_heads = rng_one_in(r, 4) && !deep ? 2 : 1;
    *group = rng_one_in(r, 3) ? 2 : 1;
    s->q_len = rng_int(r, 65, deep ? 140 : 300);
    s->kv_len = deep               ? rng_int(r, 512, 900)
                : rng_one_in(r, 3) ? s->q_len
                                   : rng_int(r, 65, 400);
    s->width = rng_int(r, 1, deep ? 3 : 6);
    s->v_width = rng_one_in(r, 2) ? s->width : rng_int(r, 1, deep ? 3 : 6);
}

/* Whole pages of keys. */
static int64_t whole(const sizes *s)
{
    return s->page ? (s->kv_len + s->page - 1) / s->page * s->page : s->kv_len;
}

static int64_t work_of(const sizes *s)
{
    return s->batch * s->q_heads * s->q_len * whole(s) *
           (s->width + s->v_width + 8);
}

static sizes draw_sizes(rng *r, int options, int large)
{
    sizes s;
    const int64_t most = large ? MAX_LARGE_WORK : MAX_WORK;
    s.dtype = rng_one_in(r, 2) ? ATTN_F32 : ATTN_F64;
    if (options & WITH_STORAGE)
        s.dtype = ATTN_F32;
    s.kv_dtype = !(options & WITH_STORAGE) ? s.dtype
                 : rng_one_in(r, 2)        ? ATTN_F16
                                           : ATTN_BF16;
    s.page = options & WITH_PAGES ? rng_int(r, 1, 40) : 0;
    s.batch = rng_one_in(r, 40) ? 0 : rng_int(r, 1, 3);
    s.kv_heads = rng_one_in(r, 40) ? 0 : rng_int(r, 1, 3);
    int64_t group = rng_one_in(r, 2) ? 1 : rng_int(r, 1, 5);
    s.q_len = draw_size(r);
    s.kv_len = rng_one_in(r, 3) ? s.q_len : draw_size(r);
    s.width = draw_width(r);
    s.v_width = rng_one_in(r, 2) ? s.width : draw_width(r);
    if (large)
        draw_large(r, &s, &group);
    else if (rng_one_in(r, 25))
        draw_special(r, &s, &group);
    /* Halve what is too large until the oracle can do it quickly. */
    s.q_heads = s.kv_heads * group;
    int64_t *const parts[] = {&s.batch, &s.kv_heads, &s.kv_len, &s.q_len,
                              &s.page};
    for (int n = 0; work_of(&s) > most; n++) {
        int64_t *x = parts[n % 5];
        *x = *x > 1 ? (*x + 1) / 2 : *x;
        s.q_heads = s.kv_heads * group;
    }
    s.kv_len = whole(&s);
    return s;
}

/* ------------------------------------------------------------- Options -- */

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
    d->params.num_seqs = d->sequences = rng_int(r, 0, DRAW_MAX_SEQS);
    draw_cuts(r, d->cu_q, d->params.num_seqs, s->q_len);
    d->params.cu_q = d->cu_q;
    if (s->page) /* the keys are found by the table */
        return;
    if (s->q_len == s->kv_len && rng_one_in(r, 2))
        memcpy(d->cu_k, d->cu_q, sizeof d->cu_k);
    else
        draw_cuts(r, d->cu_k, d->params.num_seqs, s->kv_len);
    d->params.cu_k = d->cu_k;
}

static void draw_lengths(rng *r, drawn *d, const sizes *s)
{
    const int wanted = rng_one_in(r, 3);
    for (int64_t b = 0; b < DRAW_MAX_SEQS; b++) {
        d->q_lens[b] = rng_int(r, 0, s->q_len);
        d->kv_lens[b] = rng_int(r, 0, s->kv_len);
        if (s->page && rng_one_in(r, 4))
            d->kv_lens[b] = s->kv_len;
    }
    if (s->page || (wanted && rng_one_in(r, 2)))
        d->params.kv_lens = d->kv_lens;
    if (!d->params.cu_q && wanted && rng_one_in(r, 3))
        d->params.q_lens = d->q_lens;
}

/* How many keys a sequence has. */
static int64_t keys_of(const drawn *d, const sizes *s, int64_t b)
{
    return d->params.cu_k      ? d->cu_k[b + 1] - d->cu_k[b]
           : d->params.kv_lens ? d->kv_lens[b]
                               : s->kv_len;
}

/* How long the longest sequence is: masks are indexed within a sequence. */
static int64_t longest(const int64_t *cut, int64_t n)
{
    int64_t most = 0;
    for (int64_t i = 0; i < n; i++)
        most = cut[i + 1] - cut[i] > most ? cut[i + 1] - cut[i] : most;
    return most;
}

static int64_t longest_q(const drawn *d, const sizes *s)
{
    return d->params.cu_q ? longest(d->cu_q, d->sequences) : s->q_len;
}

static int64_t longest_k(const drawn *d, const sizes *s)
{
    return d->params.cu_k ? longest(d->cu_k, d->sequences) : s->kv_len;
}

/* Mostly a short padding, now and then beyond the last key. */
static void draw_starts(rng *r, drawn *d, const sizes *s)
{
    for (int64_t b = 0; b < d->sequences; b++)
        d->kv_starts[b] = rng_one_in(r, 6)
                              ? rng_int(r, 0, longest_k(d, s))
                              : rng_int(r, 0, keys_of(d, s, b) / 2);
    d->params.kv_starts = d->kv_starts;
}

static void draw_ring(rng *r, drawn *d, const sizes *s)
{
    for (int64_t b = 0; b < d->sequences; b++)
        d->ring_starts[b] = s->kv_len ? rng_int(r, 0, s->kv_len - 1) : 0;
    d->params.ring_starts = d->ring_starts;
}

/* Does key first, or one of the `keys` from there on, have to be there? */
static int is_needed(const drawn *d, int64_t b, int64_t first, int64_t keys)
{
    const int64_t low = d->params.kv_starts ? d->kv_starts[b] : 0;
    const int64_t high = d->kv_lens[b];
    return (first > low ? first : low) <
           (first + keys < high ? first + keys : high);
}

/* Numbers of pages in any order, or by chance, so that pages are shared; what
 * is not needed is -1 or anything. Returns how many pages there are. */
static int64_t draw_table(rng *r, drawn *d, const sizes *s)
{
    const int64_t row = s->kv_len / s->page, n = d->sequences * row;
    int64_t needed = 0, next = 0;
    for (int64_t i = 0; i < n; i++)
        needed += row > 0 && is_needed(d, i / row, i % row * s->page, s->page);
    /* Also where pages of its own would make a pool that takes long to fill. */
    const int shared =
        rng_one_in(r, 3) ||
        needed * s->page * s->kv_heads * (s->width + s->v_width) > 100000;
    const int64_t pages =
        shared ? rng_int(r, 1, needed / 3 + 1) : needed + rng_int(r, 0, 3);
    int32_t *order = take(pages, sizeof *order);
    for (int64_t i = 0; i < pages; i++) {
        const int64_t j = rng_int(r, 0, i);
        order[i] = (int32_t)i;
        order[i] = order[j];
        order[j] = (int32_t)i;
    }
    d->page_table = take(n, sizeof *d->page_table);
    for (int64_t i = 0; i < n; i++) {
        if (!is_needed(d, i / row, i % row * s->page, s->page))
            d->page_table[i] = rng_one_in(r, 2) ? -1 : (int32_t)rng_bits(r);
        else
            d->page_table[i] =
                order[shared ? rng_int(r, 0, pages - 1) : next++];
    }
    free(order);
    d->params.page_table = d->page_table;
    d->params.pages_per_seq = row;
    return pages;
}

/* Where keys stand: near 0 on both sides, or far away. */
static void draw_positions(rng *r, drawn *d, const sizes *s)
{
    static const int64_t far[] = {1000000, INT64_C(1) << 33,
                                  -(INT64_C(1) << 40)};
    const int64_t base = rng_one_in(r, 4) ? far[rng_int(r, 0, 2)]
                                          : rng_int(r, -s->kv_len - 3, 60);
    for (int64_t b = 0; b < d->sequences; b++)
        d->kv_offsets[b] = base + rng_int(r, 0, 9);
    d->params.kv_offsets = d->kv_offsets;
}

/* An offset that leaves some rows empty, some full and most in between. */
static int64_t draw_offset(rng *r, const drawn *d, const sizes *s, int64_t b)
{
    const int64_t base = d->params.kv_offsets ? d->kv_offsets[b] : 0;
    if (rng_one_in(r, 40))
        return base + (rng_one_in(r, 2) ? 1 : -1) * rng_int(r, 0, 100000);
    return base + rng_int(r, -s->q_len - 2, s->kv_len + 2);
}

static void draw_align(rng *r, drawn *d, const sizes *s)
{
    attn_sdpa_params *p = &d->params;
    p->align = (int32_t)rng_int(r, ATTN_ALIGN_TOP_LEFT, ATTN_ALIGN_OFFSET);
    if (p->align != ATTN_ALIGN_OFFSET) {
        const int same =
            p->cu_k ? memcmp(d->cu_q, d->cu_k, sizeof d->cu_q) == 0
                    : s->q_len == s->kv_len && !p->q_lens && !p->kv_lens;
        if (same && !p->kv_offsets && rng_one_in(r, 2))
            p->align = 0; /* allowed where all alignments agree */
        return;
    }
    if (rng_one_in(r, 2)) {
        p->q_offset = draw_offset(r, d, s, 0);
    } else {
        for (int64_t b = 0; b < DRAW_MAX_SEQS; b++)
            d->q_offsets[b] = draw_offset(r, d, s, b);
        p->q_offsets = d->q_offsets;
    }
}

static void draw_prefix(rng *r, drawn *d, const sizes *s)
{
    for (int64_t b = 0; b < d->sequences; b++) {
        d->prefix_lens[b] =
            rng_int(r, 0, d->params.cu_k ? keys_of(d, s, b) : s->kv_len);
        /* Where keys have positions of their own, so has the prefix. */
        if (d->params.kv_offsets && d->kv_offsets[b] > 0)
            d->prefix_lens[b] += d->kv_offsets[b];
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
    if (rng_one_in(r, 4)) {
        static const double scales[] = {0.0,   1.0, -0.4, 0.125,
                                        1e-20, 3.0, -1e4};
        p->flags |= ATTN_SDPA_SCALE;
        p->scale = scales[rng_int(r, 0, 6)];
    }
}

/* ------------------------------------------- Heads, segments, blocks -- */

/* Slopes: the usual powers of two, or anything. */
static double slope(rng *r)
{
    if (rng_one_in(r, 2))
        return ldexp(1.0, -(int)rng_int(r, 1, 8));
    return rng_one_in(r, 8) ? 0.0 : 0.3 * rng_normal(r);
}

/* Sinks: among the scores, or far above or below them. */
static double sink(rng *r)
{
    static const double far[] = {40.0, -40.0, 1e4, -1e4, HUGE_VAL, -HUGE_VAL};
    return rng_one_in(r, 4) ? far[rng_int(r, 0, 5)] : 3.0 * rng_normal(r);
}

static tensor draw_heads(rng *r, const drawn *d, const sizes *s,
                         double (*number)(rng *r))
{
    const int each = rng_one_in(r, 2); /* sequence its own */
    const tensor t =
        tensor_scattered(r, TENSOR_INPUT, s->dtype, each ? d->sequences : 1,
                         each ? s->q_heads : 1, 1, each ? 1 : s->q_heads);
    for (int64_t b = 0; b < t.view.shape[0]; b++)
        for (int64_t h = 0; h < t.view.shape[1]; h++)
            for (int64_t i = 0; i < t.view.shape[3]; i++)
                tensor_set(&t.view, b, h, 0, i, number(r));
    return t;
}

/* Documents one after the other, or numbers in any order. */
static int32_t *draw_segments(rng *r, int64_t n)
{
    int32_t *segments = take(n, sizeof *segments);
    const int in_order = rng_one_in(r, 2);
    int32_t now = -1;
    for (int64_t i = 0; i < n; i++) {
        if (in_order)
            now += rng_one_in(r, 8);
        else
            now = (int32_t)rng_int(r, -1, 1);
        segments[i] = now;
    }
    return segments;
}

static void draw_all_segments(rng *r, drawn *d, const sizes *s)
{
    const attn_sdpa_params *p = &d->params;
    d->num_q_segments = p->cu_q ? s->q_len : d->sequences * s->q_len;
    d->num_kv_segments = p->cu_k ? s->kv_len : d->sequences * s->kv_len;
    const rng start = *r;
    d->q_segments = draw_segments(r, d->num_q_segments);
    if (rng_one_in(r, 2)) /* the same documents, so far as both go */
        *r = start;
    d->kv_segments = draw_segments(r, d->num_kv_segments);
    d->params.q_segments = d->q_segments;
    d->params.kv_segments = d->kv_segments;
}

static int64_t draw_block(rng *r)
{
    static const int64_t usual[] = {16, 32, 64, 128};
    return rng_one_in(r, 2) ? usual[rng_int(r, 0, 3)] : rng_int(r, 1, 70);
}

static void draw_blocks(rng *r, drawn *d, const sizes *s)
{
    const int64_t bq = draw_block(r), bk = draw_block(r);
    const int64_t rows = (longest_q(d, s) + bq - 1) / bq;
    const int64_t columns = (longest_k(d, s) + bk - 1) / bk;
    const int64_t empty = rng_int(r, 1, 3); /* of 4 */
    d->blocks = tensor_scattered(
        r, TENSOR_INPUT, ATTN_U8, rng_one_in(r, 2) ? 1 : d->sequences,
        rng_one_in(r, 2) ? 1 : s->q_heads, rows, columns);
    const int64_t *n = d->blocks.view.shape;
    for (int64_t b = 0; b < n[0]; b++)
        for (int64_t h = 0; h < n[1]; h++)
            for (int64_t i = 0; i < n[2]; i++)
                for (int64_t j = 0; j < n[3]; j++)
                    tensor_set(&d->blocks.view, b, h, i, j,
                               rng_int(r, 1, 4) <= empty
                                   ? 0.0
                                   : (double)rng_int(r, 1, 255));
    d->params.blocks = &d->blocks.view;
    d->params.block_q = bq;
    d->params.block_k = bk;
}

static void draw_added(rng *r, drawn *d, const sizes *s, int options)
{
    static const double caps[] = {0.5, 2.0, 15.0, 50.0, 1e-3, 1e4, 1e30};
    if (options & WITH_SOFTCAP)
        d->params.softcap = caps[rng_int(r, 0, 6)];
    if (options & WITH_ALIBI) {
        d->alibi = draw_heads(r, d, s, slope);
        d->params.alibi = &d->alibi.view;
    }
    if (options & WITH_SINKS) {
        d->sinks = draw_heads(r, d, s, sink);
        d->params.sinks = &d->sinks.view;
    }
    if (options & WITH_SEGMENTS)
        draw_all_segments(r, d, s);
    if (options & WITH_BLOCKS)
        draw_blocks(r, d, s);
}

/* --------------------------------------------------------------- Masks -- */

static void mask_shape(rng *r, const drawn *d, const sizes *s, int64_t n[4])
{
    n[0] = d->sequences;
    n[1] = s->q_heads;
    n[2] = longest_q(d, s);
    n[3] = longest_k(d, s);
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

/* A DROP mask (1,1,1,Tk) that hides a quarter of the keys from all. */
static void add_padding_mask(rng *r, drawn *d, const sizes *s)
{
    const int32_t n = d->params.num_masks++;
    d->mask_memory[n] = tensor_make(ATTN_U8, 1, 1, 1, longest_k(d, s));
    d->masks[n].kind = ATTN_MASK_DROP;
    d->masks[n].view = d->mask_memory[n].view;
    for (int64_t j = 0; j < d->masks[n].view.shape[3]; j++)
        tensor_set(&d->masks[n].view, 0, 0, 0, j, (double)rng_one_in(r, 4));
}

/* -------------------------------------------------------------- Values -- */

static double poison(rng *r)
{
    const int64_t kind = rng_int(r, 1, 3);
    return kind == 1 ? (double)NAN : kind == 2 ? HUGE_VAL : -HUGE_VAL;
}

static void poison_row(rng *r, const attn_tensor *x, int64_t b, int64_t h,
                       int64_t t)
{
    for (int64_t d = 0; d < x->shape[3]; d++)
        if (!rng_one_in(r, 3))
            tensor_set(x, b, h, t, d, poison(r));
}

/* Query rows that belong to no sequence or lie beyond its length. */
static void poison_absent_queries(rng *r, const drawn *d)
{
    const attn_sdpa_params *p = &d->params;
    const int64_t *n = d->q.view.shape;
    for (int64_t b = 0; b < n[0]; b++)
        for (int64_t i = 0; i < n[2]; i++) {
            int absent = p->q_lens && i >= p->q_lens[b];
            if (p->cu_q) /* the sequences lie without gaps between them */
                absent = i < p->cu_q[0] || i >= p->cu_q[p->num_seqs];
            for (int64_t h = 0; absent && h < n[1]; h++)
                poison_row(r, &d->q.view, b, h, i);
        }
}

/* Poison wherever nothing may have an influence: at queries that are not
 * there, and at every key that no query sees, be it hidden by a rule, in a page
 * that is not in use or outside of all sequences. */
static void poison_hidden(rng *r, drawn *d, const sizes *s, int alone)
{
    const int64_t *n = d->k.view.shape;
    if (d->params.num_masks < ATTN_MAX_MASKS && !alone)
        add_padding_mask(r, d, s);
    d->params.masks = d->params.num_masks ? d->masks : NULL;
    poison_absent_queries(r, d);
    unsigned char *seen = take(n[0] * n[1] * n[2], 1);
    ref_seen_rows(seen, &d->params, &d->q.view, &d->k.view);
    for (int64_t b = 0; b < n[0]; b++)
        for (int64_t h = 0; h < n[1]; h++)
            for (int64_t t = 0; t < n[2]; t++)
                if (!seen[(b * n[1] + h) * n[2] + t]) {
                    poison_row(r, &d->k.view, b, h, t);
                    poison_row(r, &d->v.view, b, h, t);
                }
    free(seen);
}

/* Numbers that are not finite in single elements; whom they reach is for the
 * oracle to say. */
static void poison_visible(rng *r, const drawn *d)
{
    const attn_tensor *const x[] = {&d->q.view, &d->k.view, &d->v.view,
                                    d->params.alibi, d->params.sinks};
    for (int n = 0; n < 6; n++) {
        const int which =
            (int)(rng_one_in(r, 8) ? rng_int(r, 3, 4) : rng_int(r, 0, 2));
        if (!x[which])
            continue;
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

static void draw_values(rng *r, drawn *d, const sizes *s, int alone)
{
    d->values = (int)rng_int(r, DRAW_NORMAL, DRAW_VISIBLE_POISON);
    if (rng_one_in(r, 3))
        d->values = DRAW_NORMAL;
    if (d->values == DRAW_HIDDEN_POISON &&
        (has_shared_elements(&d->q.view) || has_shared_elements(&d->k.view) ||
         has_shared_elements(&d->v.view)))
        d->values = DRAW_NORMAL;
    d->factor = d->values == DRAW_LARGE  ? 4.0 + 12.0 * rng_unit(r)
                : d->values == DRAW_TINY ? 1e-21
                                         : 1.0;
    tensor_normal(&d->q.view, r, d->factor);
    tensor_normal(&d->k.view, r, d->factor);
    if (!d->shares_kv)
        tensor_normal(&d->v.view, r, 1.0);
    if (d->values == DRAW_HIDDEN_POISON)
        poison_hidden(r, d, s, alone);
    if (d->values == DRAW_VISIBLE_POISON)
        poison_visible(r, d);
}

/* ---------------------------------------------------------------- Call -- */

static void draw_tensors(rng *r, drawn *d, const sizes *s)
{
    const int64_t pools = s->page ? draw_table(r, d, s) : s->batch;
    const int64_t rows = s->page ? s->page : s->kv_len;
    d->in_place = s->width == s->v_width && rng_one_in(r, 12);
    d->shares_kv = s->width == s->v_width && rng_one_in(r, 12);
    d->q = tensor_scattered(r, d->in_place ? TENSOR_OUTPUT : TENSOR_INPUT,
                            s->dtype, s->batch, s->q_heads, s->q_len, s->width);
    d->k = tensor_scattered(r, TENSOR_INPUT, s->kv_dtype, pools, s->kv_heads,
                            rows, s->width);
    if (d->shares_kv)
        d->v.view = d->k.view;
    else
        d->v = tensor_scattered(r, TENSOR_INPUT, s->kv_dtype, pools,
                                s->kv_heads, rows, s->v_width);
    if (d->in_place)
        d->out.view = d->q.view;
    else
        d->out = tensor_scattered(r, TENSOR_OUTPUT, s->dtype, s->batch,
                                  s->q_heads, s->q_len, s->v_width);
}

/* One of one_in calls asks for this output. */
static void draw_output(rng *r, const sizes *s, int64_t one_in, tensor *t,
                        const attn_tensor **field, int64_t b, int64_t h,
                        int64_t i, int64_t j)
{
    if (!rng_one_in(r, one_in))
        return;
    *t = tensor_scattered(r, TENSOR_OUTPUT, s->dtype, b, h, i, j);
    *field = &t->view;
}

static void draw_outputs(rng *r, drawn *d, const sizes *s)
{
    attn_sdpa_params *p = &d->params;
    const int64_t n = d->sequences, h = s->q_heads;
    const int64_t q = longest_q(d, s), k = longest_k(d, s);
    const int64_t b = s->batch, rows = s->q_len;
    draw_output(r, s, 2, &d->lse, &p->lse, b, h, rows, 1);
    draw_output(r, s, 6, &d->max_weight, &p->max_weight, b, h, rows, 1);
    draw_output(r, s, 6, &d->effective_keys, &p->effective_keys, b, h, rows, 1);
    draw_output(r, s, 6, &d->entropy, &p->entropy, b, h, rows, 1);
    if (d->in_place) /* q is read again for what has a place for each key */
        return;
    draw_output(r, s, 3, &d->weights, &p->weights, n, h, q, k);
    draw_output(r, s, 4, &d->weights_mean, &p->weights_mean, n, 1, q, k);
    draw_output(r, s, 6, &d->scores_raw, &p->scores_raw, n, h, q, k);
    draw_output(r, s, 6, &d->scores_capped, &p->scores_capped, n, h, q, k);
    draw_output(r, s, 6, &d->scores, &p->scores, n, h, q, k);
    draw_output(r, s, 6, &d->key_sums, &p->key_sums, n, h, 1, k);
}

/* Where queries and keys stand, and which of them there are. */
static void draw_lines(rng *r, drawn *d, const sizes *s, int options, int alone)
{
    attn_sdpa_params *p = &d->params;
    if (s->page || (!p->cu_q && !alone))
        draw_lengths(r, d, s);
    if (options & WITH_STARTS)
        draw_starts(r, d, s);
    if (options & WITH_RING)
        draw_ring(r, d, s);
    if (options & WITH_POSITIONS)
        draw_positions(r, d, s);
    /* Positions mean something to rules only. */
    if (!alone || (options & WITH_POSITIONS))
        draw_rules(r, d, s);
    if (p->causal || p->chunk || (p->flags & ATTN_SDPA_WINDOW) ||
        (options & WITH_ALIBI) || rng_one_in(r, 4))
        draw_align(r, d, s);
}

static void draw(drawn *d, uint64_t seed, uint64_t index, int large)
{
    static const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
    rng r = rng_make(seed, index);
    int alone;
    memset(d, 0, sizeof *d);
    d->seed = seed;
    d->index = index;
    d->params = init;
    const int options = draw_options(&r, &alone);
    sizes s = draw_sizes(&r, options, large);
    const int ragged = !alone && !(options & WITH_RING) && rng_one_in(&r, 6);
    if (ragged)
        s.batch = 1;
    d->sequences = s.batch;
    if (ragged)
        draw_ragged(&r, d, &s);
    draw_lines(&r, d, &s, options, alone);
    draw_tensors(&r, d, &s);
    draw_added(&r, d, &s, options);
    if (!alone && rng_one_in(&r, 2))
        d->params.num_masks = (int32_t)rng_int(&r, 1, ATTN_MAX_MASKS - 1);
    for (int32_t n = 0; n < d->params.num_masks; n++)
        draw_mask(&r, d, &s, n);
    draw_values(&r, d, &s, alone);
    d->params.masks = d->params.num_masks ? d->masks : NULL;
    draw_outputs(&r, d, &s);
    d->threads = rng_one_in(&r, 3) ? (int)rng_int(&r, 1, 3) : 0;
    d->use_work = rng_one_in(&r, 4);
}

void draw_call(drawn *d, uint64_t seed, uint64_t index)
{
    draw(d, seed, index, 0);
}

void draw_large_call(drawn *d, uint64_t seed, uint64_t index)
{
    draw(d, seed, index, 1);
}

void draw_free(drawn *d)
{
    tensor *const all[] = {&d->q,
                           &d->k,
                           &d->v,
                           &d->out,
                           &d->lse,
                           &d->weights,
                           &d->weights_mean,
                           &d->scores_raw,
                           &d->scores_capped,
                           &d->scores,
                           &d->key_sums,
                           &d->max_weight,
                           &d->effective_keys,
                           &d->entropy,
                           &d->alibi,
                           &d->sinks,
                           &d->blocks};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        tensor_free(all[n]);
    for (int n = 0; n < ATTN_MAX_MASKS; n++)
        tensor_free(&d->mask_memory[n]);
    free(d->q_segments);
    free(d->kv_segments);
    free(d->page_table);
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

/* The first of them: the seed brings back all. */
static void put_list32(writer *w, const char *name, const int32_t *x, int64_t n)
{
    enum { SHOWN = 16 };
    if (!x)
        return;
    put(w, " %s", name);
    for (int64_t i = 0; i < n && i < SHOWN; i++)
        put(w, "%c%" PRId32, i ? ',' : '=', x[i]);
    if (n > SHOWN)
        put(w, "...");
}

static void put_view(writer *w, const char *name, const attn_tensor *v)
{
    put_list(w, name, v->shape, 4);
    put_list(w, "by", v->stride, 4);
}

static void put_added(writer *w, const drawn *d)
{
    const attn_sdpa_params *p = &d->params;
    if (p->softcap != 0.0)
        put(w, " softcap=%g", p->softcap);
    if (p->alibi)
        put_view(w, "alibi", p->alibi);
    if (p->sinks)
        put_view(w, "sinks", p->sinks);
    put_list32(w, "q_segments", p->q_segments, d->num_q_segments);
    put_list32(w, "kv_segments", p->kv_segments, d->num_kv_segments);
    if (p->blocks) {
        put(w, " block_q=%" PRId64 " block_k=%" PRId64, p->block_q, p->block_k);
        put_view(w, "blocks", p->blocks);
    }
}

static void put_outputs(writer *w, const attn_sdpa_params *p)
{
    const struct {
        const char *name;
        const attn_tensor *t;
    } all[] = {{"lse", p->lse},
               {"weights", p->weights},
               {"weights_mean", p->weights_mean},
               {"scores_raw", p->scores_raw},
               {"scores_capped", p->scores_capped},
               {"scores", p->scores},
               {"key_sums", p->key_sums},
               {"max_weight", p->max_weight},
               {"effective_keys", p->effective_keys},
               {"entropy", p->entropy}};
    put(w, " outputs:");
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        if (all[n].t)
            put(w, " %s", all[n].name);
}

static const char *type_name(attn_dtype dtype)
{
    static const char *const names[] = {"?", "f32", "f64", "u8", "f16", "bf16"};
    return names[dtype];
}

void draw_describe(const drawn *d, char *text, size_t size)
{
    static const char *const kinds[] = {"?", "keep", "drop", "add"};
    const attn_sdpa_params *p = &d->params;
    const int64_t n = d->sequences;
    writer w = {text, size};
    put(&w,
        "ATTN_TEST_SEED=%" PRIu64 " ATTN_TEST_FIRST=%" PRIu64
        " ATTN_TEST_COUNT=1: %s k,v=%s values=\"%s\"",
        d->seed, d->index, type_name(d->q.view.dtype),
        type_name(d->k.view.dtype), value_names[d->values]);
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
    put_list(&w, "kv_starts", p->kv_starts, n);
    put_list(&w, "kv_offsets", p->kv_offsets, n);
    put_list(&w, "ring_starts", p->ring_starts, n);
    if (p->page_table)
        put(&w, " pages_per_seq=%" PRId64, p->pages_per_seq);
    put_list32(&w, "page_table", p->page_table, n * p->pages_per_seq);
    put_list(&w, "cu_q", p->cu_q, n + 1);
    put_list(&w, "cu_k", p->cu_k, n + 1);
    for (int32_t m = 0; m < p->num_masks; m++)
        put_view(&w, kinds[p->masks[m].kind], &p->masks[m].view);
    put_added(&w, d);
    put_outputs(&w, p);
}

/* ---- how to run what was drawn ---- */

uint64_t draw_setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static attn_context *contexts[DRAW_MAX_THREADS + 1];

const attn_context *draw_context(int threads)
{
    if (threads > 0 && !contexts[threads]) {
        attn_context_params p = ATTN_CONTEXT_PARAMS_INIT;
        p.num_threads = threads;
        if (attn_context_create(&contexts[threads], &p) != ATTN_OK)
            abort();
    }
    return contexts[threads];
}

int draw_drop_contexts(void **state)
{
    (void)state;
    for (int n = 0; n <= DRAW_MAX_THREADS; n++)
        attn_context_destroy(contexts[n]);
    return 0;
}
