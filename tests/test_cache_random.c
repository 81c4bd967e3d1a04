/*
 * test_cache_random.c - random histories of key/value caches: whatever was
 * appended, forgotten, shared and attended to, a cache answers as a plain model
 * does that keeps every key in an array and calls attn_sdpa.
 *
 * The memory of each cache ends at an inaccessible page and is full of NaNs, so
 * that a row which was never written spoils what it gets into. Rows that were
 * given up are made NaN again.
 *
 * ATTN_TEST_SEED, ATTN_TEST_FIRST and ATTN_TEST_COUNT choose the histories.
 */
#include "kit.h"

#include "compare.h"
#include "draw.h"
#include "guard.h"
#include "tensors.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SEQS 4
#define MAX_LEN 160 /* positions of a sequence, in rings too */
#define MAX_PAGES MAX_LEN
#define MAX_IDS (2 * MAX_SEQS * MAX_PAGES)

static size_t bytes_of(attn_dtype dtype)
{
    static const size_t bytes[] = {0, 4, 8, 1, 2, 2}; /* F32 F64 U8 F16 BF16 */
    return bytes[dtype];
}

static void ok(attn_status status)
{
    if (status != ATTN_OK)
        fail_msg("%s", attn_last_error());
}

/* ---- tensors of any type ---- */

/* The part of dimension dim from first on, n long. */
static attn_tensor slice(const attn_tensor *t, int dim, int64_t first,
                         int64_t n)
{
    attn_tensor s = *t;
    s.data = (unsigned char *)t->data +
             first * t->stride[dim] * (int64_t)bytes_of(t->dtype);
    s.shape[dim] = n;
    return s;
}

/* Contiguous; elements hold NaN. */
static attn_tensor make(attn_dtype dtype, int64_t a, int64_t b, int64_t c,
                        int64_t d)
{
    attn_tensor t = kit_view(dtype, NULL, a, b, c, d);
    const size_t bytes = (size_t)kit_elements(&t) * bytes_of(dtype);
    t.data = malloc(bytes + 1);
    if (t.data == NULL)
        fail_msg("out of memory");
    memset(t.data, 0xFF, bytes);
    return t;
}

/* Normal numbers, rounded to the type. */
static attn_tensor make_normal(rng *r, attn_dtype dtype, int64_t a, int64_t b,
                               int64_t c, int64_t d)
{
    attn_tensor wide = make(ATTN_F64, a, b, c, d);
    attn_tensor t = make(dtype, a, b, c, d);
    tensor_normal(&wide, r, 1.0);
    ok(attn_convert(NULL, &wide, &t));
    kit_drop(&wide);
    return t;
}

/* ---- memory of a cache ---- */

static struct guard block; /* of the cache at hand, which takes one */
static bool block_taken;

static void *guarded_alloc(void *user, size_t bytes, size_t alignment)
{
    (void)user;
    if (block_taken) { /* scratch memory of the same context */
        void *p = aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
        memset(p, 0xFF, bytes);
        return p;
    }
    block = guard_make(bytes, alignment, GUARD_END);
    memset(block.data, 0xFF, bytes);
    block_taken = true;
    return block.data;
}

static void guarded_free(void *user, void *p)
{
    (void)user;
    if (!block_taken || p != block.data) {
        free(p);
        return;
    }
    assert_true(guard_check(&block));
    guard_drop(&block);
    block_taken = false;
}

/* ---- the model ---- */

struct model_seq {
    int64_t first, end;
    unsigned char *k, *v; /* (Hkv,MAX_LEN,D) and (Hkv,MAX_LEN,Dv) */
    int ids[MAX_PAGES];   /* of its pages, by which sharing is told */
};

struct model {
    uint64_t seed, index;
    int step;
    attn_kv_cache_params params;
    attn_dtype real;
    int64_t page_size, num_pages, group;
    attn_tensor cos_table, sin_table;
    struct model_seq seqs[MAX_SEQS];
    int users[MAX_IDS];
    attn_context *guarded;
    attn_kv_cache *cache;
    bool with_oracle;
};

#define FAIL(m, ...)                                                      \
    do {                                                                  \
        print_error("ATTN_TEST_SEED=%" PRIu64 " ATTN_TEST_FIRST=%" PRIu64 \
                    " ATTN_TEST_COUNT=1: kind %d, type %d, step %d\n",    \
                    (m)->seed, (m)->index, (int)(m)->params.kind,         \
                    (int)(m)->params.dtype, (m)->step);                   \
        fail_msg(__VA_ARGS__);                                            \
    } while (0)

static void must(const struct model *m, attn_status status)
{
    if (status != ATTN_OK)
        FAIL(m, "%s", attn_last_error());
}

static bool is(const struct model *m, int32_t kind)
{
    return m->params.kind == kind;
}

static int64_t v_width_of(const struct model *m)
{
    return m->params.v_width > 0 ? m->params.v_width : m->params.width;
}

/* Keys or values of a sequence at positions [from, from + n), (1,Hkv,n,..). */
static attn_tensor rows_of(const struct model *m, const struct model_seq *s,
                           bool values, int64_t from, int64_t n)
{
    const int64_t width = values ? v_width_of(m) : m->params.width;
    const attn_tensor all = kit_view(m->params.dtype, values ? s->v : s->k, 1,
                                     m->params.kv_heads, MAX_LEN, width);
    return slice(&all, 2, from, n);
}

static int used_pages(const struct model *m)
{
    int used = 0;
    for (int n = 0; n < MAX_IDS; n++)
        used += m->users[n] > 0;
    return used;
}

static int new_id(struct model *m)
{
    int id = 0;
    while (m->users[id] > 0)
        id++;
    m->users[id] = 1;
    return id;
}

/* Pages for n more keys of a sequence. */
static void model_grow(struct model *m, struct model_seq *s, int64_t n)
{
    const int64_t size = m->page_size;
    if (n > 0 && s->end % size != 0 && m->users[s->ids[s->end / size]] > 1) {
        m->users[s->ids[s->end / size]]--;
        s->ids[s->end / size] = new_id(m);
    }
    for (int64_t p = (s->end + size - 1) / size; p * size < s->end + n; p++)
        s->ids[p] = new_id(m);
}

static void model_cut(struct model *m, struct model_seq *s, int64_t length)
{
    if (is(m, ATTN_KV_CACHE_PAGED))
        for (int64_t p = (length + m->page_size - 1) / m->page_size;
             p * m->page_size < s->end; p++)
            m->users[s->ids[p]]--;
    s->end = length;
}

/* One sequence gets rows of k and v, (1,Hkv,n,..). */
static void model_write(struct model *m, struct model_seq *s,
                        const attn_tensor *k, const attn_tensor *v)
{
    const int64_t n = k->shape[2];
    const attn_tensor to_k = rows_of(m, s, false, s->end, n);
    const attn_tensor to_v = rows_of(m, s, true, s->end, n);
    attn_rotary_params rotary = ATTN_ROTARY_PARAMS_INIT;
    attn_tensor turned =
        make(m->real, 1, m->params.kv_heads, n, m->params.width);
    ok(attn_convert(NULL, v, &to_v));
    rotary.style = m->params.rotary_style;
    rotary.offset = s->end;
    if (rotary.style == 0) {
        ok(attn_convert(NULL, k, &to_k));
    } else {
        ok(attn_convert(NULL, k, &turned));
        ok(attn_rotary(NULL, &rotary, &turned, &m->cos_table, &m->sin_table,
                       &turned));
        ok(attn_convert(NULL, &turned, &to_k));
    }
    kit_drop(&turned);
}

/* ---- checks ---- */

static void check_state(const struct model *m)
{
    for (int64_t s = 0; s < m->params.num_seqs; s++) {
        const int64_t length = attn_kv_cache_length(m->cache, s);
        const int64_t first = attn_kv_cache_first(m->cache, s);
        if (length != m->seqs[s].end || first != m->seqs[s].first)
            FAIL(m, "sequence %d is [%d, %d), not [%d, %d)", (int)s, (int)first,
                 (int)length, (int)m->seqs[s].first, (int)m->seqs[s].end);
    }
    const int64_t want =
        is(m, ATTN_KV_CACHE_PAGED) ? m->num_pages - used_pages(m) : 0;
    if (attn_kv_cache_free_pages(m->cache) != want)
        FAIL(m, "%d free pages, not %d",
             (int)attn_kv_cache_free_pages(m->cache), (int)want);
}

/* The bits of two (1,H,n,d) tensors of one type, which may differ in strides.
 */
static void expect_rows(const struct model *m, const char *what,
                        const attn_tensor *met, const attn_tensor *want)
{
    const size_t bytes = (size_t)met->shape[3] * bytes_of(met->dtype);
    for (int64_t h = 0; h < met->shape[1]; h++)
        for (int64_t i = 0; i < met->shape[2]; i++) {
            attn_tensor x = slice(met, 1, h, 1), y = slice(want, 1, h, 1);
            x = slice(&x, 2, i, 1);
            y = slice(&y, 2, i, 1);
            if (bytes > 0 && memcmp(x.data, y.data, bytes) != 0)
                FAIL(m, "%s: head %d, row %d is another", what, (int)h, (int)i);
        }
}

/* Row j of what a view shows of its sequence b, (1,Hkv,1,..). */
static attn_tensor viewed(const attn_tensor *t, const attn_sdpa_params *p,
                          int64_t b, int64_t j)
{
    attn_tensor rows = *t;
    if (p->page_table != NULL) {
        const int32_t page =
            p->page_table[b * p->pages_per_seq + j / t->shape[2]];
        assert_true(page >= 0 && page < t->shape[0]);
        rows = slice(&rows, 0, page, 1);
        return slice(&rows, 2, j % t->shape[2], 1);
    }
    if (p->ring_starts != NULL)
        j = (p->ring_starts[b] + j) % t->shape[2];
    rows = slice(&rows, 0, b, 1);
    return slice(&rows, 2, j, 1);
}

/* A view of these sequences in the caller's memory, of the exact size. */
struct view {
    attn_sdpa_params params;
    attn_tensor k, v;
    struct guard work;
};

static struct view make_view(const struct model *m, int64_t batch,
                             const int64_t *seqs,
                             const attn_sdpa_params *params)
{
    struct view w = {.params = *params};
    size_t bytes;
    size_t alignment;
    must(m, attn_kv_cache_view_workspace(m->cache, batch, &bytes, &alignment));
    w.work = guard_make(bytes, alignment, GUARD_END);
    must(m, attn_kv_cache_view(m->cache, batch, seqs, &w.params, &w.k, &w.v,
                               w.work.data, bytes));
    return w;
}

static void drop_view(struct view *w)
{
    assert_true(guard_check(&w->work));
    guard_drop(&w->work);
}

/* Every key and value that is held has the bits of the model's. */
static void check_keys(const struct model *m)
{
    const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
    struct view w = make_view(m, m->params.num_seqs, NULL, &init);
    for (int64_t s = 0; s < m->params.num_seqs; s++) {
        const struct model_seq *seq = &m->seqs[s];
        assert_int_equal(w.params.kv_lens[s], seq->end - seq->first);
        for (int64_t j = 0; j < w.params.kv_lens[s]; j++) {
            attn_tensor met = viewed(&w.k, &w.params, s, j);
            attn_tensor want = rows_of(m, seq, false, seq->first + j, 1);
            expect_rows(m, "keys", &met, &want);
            met = viewed(&w.v, &w.params, s, j);
            want = rows_of(m, seq, true, seq->first + j, 1);
            expect_rows(m, "values", &met, &want);
        }
    }
    drop_view(&w);
}

/* Rows of the pool that no sequence has are NaN again. A reader has no business
 * there, but the memory is known. */
static void poison_unused(const struct model *m)
{
    const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
    struct view w = make_view(m, m->params.num_seqs, NULL, &init);
    const bool paged = is(m, ATTN_KV_CACHE_PAGED);
    const int64_t pages = paged ? m->num_pages : m->params.num_seqs;
    const int64_t rows = paged ? m->page_size : m->params.capacity;
    attn_tensor *both[2] = {&w.k, &w.v};
    for (int n = 0; n < 2; n++) {
        unsigned char *used = calloc((size_t)(pages * rows) + 1, 1);
        attn_tensor *t = both[n];
        const int64_t bytes = t->shape[3] * (int64_t)bytes_of(t->dtype);
        for (int64_t s = 0; s < m->params.num_seqs && bytes > 0; s++)
            for (int64_t j = 0; j < w.params.kv_lens[s]; j++) {
                const attn_tensor row = viewed(t, &w.params, s, j);
                used[((unsigned char *)row.data - (unsigned char *)t->data) /
                     bytes] = 1;
            }
        for (int64_t h = 0; h < m->params.kv_heads; h++)
            for (int64_t row = 0; row < pages * rows; row++)
                if (!used[row])
                    memset((unsigned char *)t->data +
                               (h * pages * rows + row) * bytes,
                           0xFF, (size_t)bytes);
        free(used);
    }
    drop_view(&w);
}

/* ---- drawing ---- */

static void draw_sizes(struct model *m, rng *r)
{
    static const attn_dtype types[] = {ATTN_F32, ATTN_F64, ATTN_F16, ATTN_BF16};
    attn_kv_cache_params *p = &m->params;
    attn_kv_cache_params_init(p);
    p->kind = (int32_t)(1 + m->index % 3);
    p->dtype = types[m->index / 3 % 4];
    m->real = p->dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32;
    p->num_seqs = rng_int(r, 1, MAX_SEQS);
    p->kv_heads = rng_int(r, 1, 3);
    p->capacity = rng_int(r, 1, 40);
    p->width = rng_one_in(r, 4) ? 64 : rng_int(r, 1, 20);
    p->v_width = rng_one_in(r, 2) ? 0 : rng_int(r, 1, 20);
    m->group = rng_int(r, 1, 3);
    m->num_pages = p->num_seqs;
    m->page_size = p->capacity;
    if (p->kind == ATTN_KV_CACHE_PAGED) {
        p->page_size = rng_int(r, 0, 9);
        m->page_size = p->page_size > 0 ? p->page_size : 128;
        const int64_t all =
            p->num_seqs * ((p->capacity + m->page_size - 1) / m->page_size);
        if (rng_one_in(r, 2))
            p->num_pages = rng_int(r, 1, all + 1);
        m->num_pages = p->num_pages > 0 ? p->num_pages : all;
    }
}

static void draw_tables(struct model *m, rng *r)
{
    attn_kv_cache_params *p = &m->params;
    const int64_t pairs = rng_int(r, 0, p->width / 2);
    m->cos_table = make(m->real, 1, 1, MAX_LEN, pairs);
    m->sin_table = make(m->real, 1, 1, MAX_LEN, pairs);
    ok(attn_rotary_tables(0, 2 * pairs, 10000.0, &m->cos_table, &m->sin_table));
    p->rotary_style = (int32_t)rng_int(r, 0, 2);
    if (p->rotary_style != 0) {
        p->cos_table = &m->cos_table;
        p->sin_table = &m->sin_table;
    }
}

static void begin(struct model *m, uint64_t seed, uint64_t index, rng *r)
{
    attn_context_params context = ATTN_CONTEXT_PARAMS_INIT;
    memset(m, 0, sizeof *m);
    m->seed = seed;
    m->index = index;
    m->with_oracle = rng_one_in(r, 4);
    draw_sizes(m, r);
    draw_tables(m, r);
    for (int64_t s = 0; s < m->params.num_seqs; s++) {
        const size_t row = (size_t)m->params.kv_heads * MAX_LEN * 8;
        m->seqs[s].k = calloc(row, (size_t)m->params.width);
        m->seqs[s].v = calloc(row, (size_t)v_width_of(m));
        assert_true(m->seqs[s].k != NULL && m->seqs[s].v != NULL);
    }
    context.num_threads = (int32_t)rng_int(r, 1, 3);
    context.alloc = guarded_alloc;
    context.free = guarded_free;
    block_taken = true; /* the context itself is not what is guarded */
    ok(attn_context_create(&m->guarded, &context));
    block_taken = false;
    must(m, attn_kv_cache_create(m->guarded, &m->params, &m->cache));
    assert_true(block_taken);
}

static void end(struct model *m)
{
    attn_kv_cache_destroy(m->cache);
    assert_false(block_taken);
    attn_context_destroy(m->guarded);
    for (int64_t s = 0; s < m->params.num_seqs; s++) {
        free(m->seqs[s].k);
        free(m->seqs[s].v);
    }
    kit_drop(&m->cos_table);
    kit_drop(&m->sin_table);
}

/* Some sequences in any order; `twice`: perhaps one of them more than once.
 * NULL at times, for the first `batch`. */
static const int64_t *draw_seqs(const struct model *m, rng *r, bool twice,
                                int64_t *batch, int64_t seqs[MAX_SEQS])
{
    const int64_t all = m->params.num_seqs;
    for (int64_t n = 0; n < all; n++)
        seqs[n] = n;
    *batch = rng_int(r, 1, all);
    if (rng_one_in(r, 3))
        return NULL;
    for (int64_t n = all - 1; n > 0; n--) {
        const int64_t other = rng_int(r, 0, n), kept = seqs[n];
        seqs[n] = seqs[other];
        seqs[other] = kept;
    }
    if (twice && rng_one_in(r, 4))
        seqs[0] = seqs[*batch - 1];
    return seqs;
}

/* ---- operations ---- */

/* Keys and values to append, in a type that the cache takes. */
static attn_tensor draw_new(const struct model *m, rng *r, attn_dtype dtype,
                            int64_t batch, int64_t len, int64_t width)
{
    attn_tensor t;
    if (bytes_of(dtype) > 2 && rng_one_in(r, 2)) {
        /* Its block is freed with the view's data if it starts there, so a
         * scattered one is copied into strides of an own block. */
        t = make_normal(r, dtype, batch, len, m->params.kv_heads, width + 3);
        t.shape[1] = m->params.kv_heads;
        t.shape[2] = len;
        t.shape[3] = width;
        const int64_t by_len = t.stride[1];
        t.stride[1] = t.stride[2];
        t.stride[2] = by_len;
        return t;
    }
    return make_normal(r, dtype, batch, m->params.kv_heads, len, width);
}

static attn_dtype draw_new_type(const struct model *m, rng *r)
{
    return rng_one_in(r, 3) ? ATTN_F32 : m->params.dtype;
}

/* Does the model have room? If so it has the pages afterwards. */
static bool model_has_room(struct model *m, int64_t batch, const int64_t *seqs,
                           const int64_t *lens)
{
    struct model *before = malloc(sizeof *before);
    bool room = true;
    assert_non_null(before);
    *before = *m;
    for (int64_t b = 0; b < batch && room; b++) {
        struct model_seq *s = &m->seqs[seqs[b]];
        if (is(m, ATTN_KV_CACHE_RING))
            continue;
        room = s->end + lens[b] <= m->params.capacity;
        if (room && is(m, ATTN_KV_CACHE_PAGED))
            model_grow(m, s, lens[b]);
    }
    /* A page that is copied and then has no users is free only afterwards. */
    room =
        room && (!is(m, ATTN_KV_CACHE_PAGED) || used_pages(m) <= m->num_pages);
    if (!room)
        *m = *before;
    free(before);
    return room;
}

static void append(struct model *m, rng *r)
{
    int64_t numbers[MAX_SEQS], lens[MAX_SEQS], batch;
    const int64_t *seqs = draw_seqs(m, r, false, &batch, numbers);
    const bool by_len = rng_one_in(r, 2);
    const int64_t most = is(m, ATTN_KV_CACHE_RING) && rng_one_in(r, 4)
                             ? 2 * m->params.capacity
                             : 6;
    const int64_t len = rng_int(r, 0, most);
    const attn_dtype dtype = draw_new_type(m, r);
    attn_tensor k = draw_new(m, r, dtype, batch, len, m->params.width);
    attn_tensor v = draw_new(m, r, dtype, batch, len, v_width_of(m));
    bool fits = true;
    for (int64_t b = 0; b < batch; b++) {
        lens[b] = by_len ? rng_int(r, 0, len) : len;
        fits = fits && m->seqs[numbers[b]].end + lens[b] <= MAX_LEN;
    }
    if (fits) { /* into the arrays of the model */
        const bool room = model_has_room(m, batch, numbers, lens);
        const attn_status status = attn_kv_cache_append(
            m->guarded, m->cache, seqs, by_len ? lens : NULL, &k, &v);
        if (status != (room ? ATTN_OK : ATTN_ERR_FULL))
            FAIL(m, "append gives %d (%s)", (int)status, attn_last_error());
        for (int64_t b = 0; b < batch && room; b++) {
            struct model_seq *s = &m->seqs[numbers[b]];
            attn_tensor kb = slice(&k, 0, b, 1), vb = slice(&v, 0, b, 1);
            kb = slice(&kb, 2, 0, lens[b]);
            vb = slice(&vb, 2, 0, lens[b]);
            model_write(m, s, &kb, &vb);
            s->end += lens[b];
            if (is(m, ATTN_KV_CACHE_RING) &&
                s->first < s->end - m->params.capacity)
                s->first = s->end - m->params.capacity;
        }
    }
    kit_drop(&k);
    kit_drop(&v);
}

static void truncate_one(struct model *m, rng *r)
{
    const int64_t seq = rng_int(r, 0, m->params.num_seqs - 1);
    struct model_seq *s = &m->seqs[seq];
    const int64_t length = rng_int(r, s->first, s->end);
    must(m, attn_kv_cache_truncate(m->cache, seq, length));
    model_cut(m, s, length);
}

static void reset(struct model *m, rng *r)
{
    const int64_t seq = rng_int(r, -1, m->params.num_seqs - 1);
    must(m, attn_kv_cache_reset(m->cache, seq));
    for (int64_t s = 0; s < m->params.num_seqs; s++)
        if (seq == -1 || s == seq) {
            model_cut(m, &m->seqs[s], 0);
            m->seqs[s].first = 0;
        }
}

static void share(struct model *m, rng *r)
{
    const int64_t to = rng_int(r, 0, m->params.num_seqs - 1);
    const int64_t from = rng_int(r, 0, m->params.num_seqs - 1);
    struct model_seq *t = &m->seqs[to];
    const struct model_seq *f = &m->seqs[from];
    const int64_t length = rng_int(r, f->first, f->end);
    const attn_status status = attn_kv_cache_share(m->cache, to, from, length);
    const bool may = to != from && t->end == 0;
    if (status != (may ? ATTN_OK : ATTN_ERR_VALUE))
        FAIL(m, "share gives %d (%s)", (int)status, attn_last_error());
    if (!may)
        return;
    for (int n = 0; n < 2; n++) {
        const attn_tensor x =
            rows_of(m, f, n == 1, f->first, length - f->first);
        const attn_tensor y =
            rows_of(m, t, n == 1, f->first, length - f->first);
        ok(attn_convert(NULL, &x, &y));
    }
    for (int64_t p = 0; is(m, ATTN_KV_CACHE_PAGED) && p * m->page_size < length;
         p++) {
        t->ids[p] = f->ids[p];
        m->users[t->ids[p]]++;
    }
    t->first = f->first;
    t->end = length;
}

/* ---- attention ---- */

/* A call of attn_kv_cache_attend. */
struct question {
    int64_t batch, numbers[MAX_SEQS];
    const int64_t *seqs;
    int64_t q_len, kv_len;
    attn_sdpa_params params;
    int64_t q_lens[MAX_SEQS], q_offsets[MAX_SEQS];
    attn_mask mask;
    attn_tensor q, out, lse, weights, again;
};

static int64_t kv_len_of(const struct model *m, const struct question *a)
{
    int64_t most = 0;
    for (int64_t b = 0; b < a->batch; b++) {
        const struct model_seq *s = &m->seqs[a->numbers[b]];
        most = s->end - s->first > most ? s->end - s->first : most;
    }
    if (is(m, ATTN_KV_CACHE_RING))
        return m->params.capacity;
    if (is(m, ATTN_KV_CACHE_PAGED))
        return (most + m->page_size - 1) / m->page_size * m->page_size;
    return most;
}

static void draw_rules(struct question *a, rng *r)
{
    attn_sdpa_params *p = &a->params;
    p->causal = (int32_t)rng_int(r, 0, 1);
    if (rng_one_in(r, 3)) {
        p->flags |= ATTN_SDPA_WINDOW;
        p->window_left = rng_int(r, -1, 12);
        p->window_right = rng_int(r, -1, 3);
    }
    if (rng_one_in(r, 3)) {
        p->flags |= ATTN_SDPA_SCALE;
        p->scale = rng_unit(r) - 0.3;
    }
    if (rng_one_in(r, 4)) {
        for (int64_t b = 0; b < a->batch; b++)
            a->q_lens[b] = rng_int(r, 0, a->q_len);
        p->q_lens = a->q_lens;
    }
    if (rng_one_in(r, 3)) {
        p->align = (int32_t)rng_int(r, 0, 3);
        if (p->align == ATTN_ALIGN_OFFSET) {
            for (int64_t b = 0; b < a->batch; b++)
                a->q_offsets[b] = rng_int(r, 0, 50);
            p->q_offsets = a->q_offsets;
        }
        p->chunk = rng_one_in(r, 3) ? rng_int(r, 1, 9) : 0;
        p->softcap = rng_one_in(r, 3) ? 3.0 : 0.0;
        if (p->flags & ATTN_SDPA_WINDOW)
            p->keep_first = rng_int(r, 0, 3);
    }
}

static void draw_question(const struct model *m, struct question *a, rng *r)
{
    const int64_t heads = m->params.kv_heads * m->group;
    memset(a, 0, sizeof *a);
    attn_sdpa_params_init(&a->params);
    a->seqs = draw_seqs(m, r, true, &a->batch, a->numbers);
    a->q_len = rng_int(r, 1, 5);
    a->kv_len = kv_len_of(m, a);
    draw_rules(a, r);
    a->q = make_normal(r, m->real, a->batch, heads, a->q_len, m->params.width);
    a->out = make(m->real, a->batch, heads, a->q_len, v_width_of(m));
    a->again = make(m->real, a->batch, heads, a->q_len, v_width_of(m));
    a->lse = make(m->real, a->batch, heads, a->q_len, 1);
    a->weights = make(m->real, a->batch, heads, a->q_len, a->kv_len);
    a->params.lse = &a->lse;
    if (rng_one_in(r, 3))
        a->params.weights = &a->weights;
    a->mask.kind = ATTN_MASK_KEEP;
    a->mask.view = kit_make(ATTN_U8, a->batch, 1, a->q_len, a->kv_len);
    if (rng_one_in(r, 3)) {
        a->params.masks = &a->mask;
        a->params.num_masks = 1;
    }
}

static void drop_question(struct question *a)
{
    attn_tensor *made[] = {&a->q,   &a->out,     &a->again,
                           &a->lse, &a->weights, &a->mask.view};
    for (size_t n = 0; n < COUNT(made); n++)
        kit_drop(made[n]);
}

/* One row after the other; bit for bit if exact, else within rounding: scores
 * below 100 of 64 products each are off by a few hundred half units. */
static void expect_close(const struct model *m, const char *what, bool exact,
                         const attn_tensor *met, const attn_tensor *want)
{
    const double limit = m->real == ATTN_F64 ? 1e-13 : 1e-5;
    if (exact) {
        expect_rows(m, what, met, want);
        return;
    }
    for (int64_t h = 0; h < met->shape[1]; h++)
        for (int64_t i = 0; i < met->shape[2]; i++)
            for (int64_t e = 0; e < met->shape[3]; e++) {
                const double x = kit_get(met, 0, h, i, e);
                const double y = kit_get(want, 0, h, i, e);
                const bool same_inf = isinf(x) && isinf(y) && x * y > 0;
                if (!same_inf && !(fabs(x - y) <= limit))
                    FAIL(m, "%s(%d,%d,%d) is %.17g, not %.17g", what, (int)h,
                         (int)i, (int)e, x, y);
            }
}

/* Weights of keys that the sequence does not have. */
static void expect_zeros(const struct model *m, const attn_tensor *w)
{
    for (int64_t h = 0; h < w->shape[1]; h++)
        for (int64_t i = 0; i < w->shape[2]; i++)
            for (int64_t j = 0; j < w->shape[3]; j++)
                if (!(fabs(kit_get(w, 0, h, i, j)) <= 0.0))
                    FAIL(m, "a key that is not there has a weight");
}

static void expect_oracle(const struct model *m, const attn_sdpa_params *p,
                          const attn_tensor *q, const attn_tensor *k,
                          const attn_tensor *v, const attn_tensor *out,
                          const attn_tensor *lse)
{
    ref_result want;
    ref_sdpa(&want, p, q, k, v);
    if (compare_tensor("out", "the oracle", out, &want.out, 1.0) != 0 ||
        compare_tensor("lse", "the oracle", lse, &want.lse, 1.0) != 0)
        FAIL(m, "wrong");
    ref_free(&want);
}

/* Sequence b of the answer against attn_sdpa over the model's arrays. */
static void check_answer(const struct model *m, const struct question *a,
                         int64_t b)
{
    const struct model_seq *s = &m->seqs[a->numbers[b]];
    const int64_t n = s->end - s->first;
    const bool exact = is(m, ATTN_KV_CACHE_CONTIGUOUS);
    const attn_tensor q = slice(&a->q, 0, b, 1);
    const attn_tensor out = slice(&a->out, 0, b, 1);
    const attn_tensor lse = slice(&a->lse, 0, b, 1);
    const attn_tensor k = rows_of(m, s, false, s->first, n);
    const attn_tensor v = rows_of(m, s, true, s->first, n);
    attn_tensor weights = slice(&a->weights, 0, b, 1);
    attn_tensor want = make(m->real, 1, q.shape[1], a->q_len, v.shape[3]);
    attn_tensor want_lse = make(m->real, 1, q.shape[1], a->q_len, 1);
    attn_tensor want_weights = make(m->real, 1, q.shape[1], a->q_len, n);
    attn_mask mask = a->mask;
    attn_sdpa_params p = a->params;
    mask.view = slice(&mask.view, 0, b, 1);
    mask.view.shape[3] = n;
    p.masks = p.num_masks > 0 ? &mask : NULL;
    p.align = p.align == 0 ? ATTN_ALIGN_BOTTOM_RIGHT : p.align;
    p.kv_offsets = &s->first;
    p.q_offsets = p.q_offsets ? &a->q_offsets[b] : NULL;
    p.q_lens = p.q_lens ? &a->q_lens[b] : NULL;
    p.lse = &want_lse;
    p.weights = p.weights ? &want_weights : NULL;
    must(m, attn_sdpa(NULL, &p, &q, &k, &v, &want));
    expect_close(m, "out", exact, &out, &want);
    expect_close(m, "lse", exact, &lse, &want_lse);
    if (p.weights) {
        const attn_tensor beyond = slice(&weights, 3, n, weights.shape[3] - n);
        expect_zeros(m, &beyond);
        weights.shape[3] = n;
        expect_close(m, "weights", exact, &weights, &want_weights);
    }
    if (m->with_oracle)
        expect_oracle(m, &p, &q, &k, &v, &out, &lse);
    kit_drop(&want);
    kit_drop(&want_lse);
    kit_drop(&want_weights);
}

static bool evenly_apart(const struct question *a)
{
    for (int64_t b = 2; a->seqs != NULL && b < a->batch; b++)
        if (a->seqs[b] - a->seqs[b - 1] != a->seqs[1] - a->seqs[0])
            return false;
    return true;
}

/* The same by the view and the call that never allocates. */
static void check_view(const struct model *m, struct question *a)
{
    struct view w;
    size_t bytes;
    size_t alignment;
    if (is(m, ATTN_KV_CACHE_RING) && !evenly_apart(a)) {
        attn_sdpa_params p = a->params;
        attn_tensor k;
        attn_tensor v;
        static _Alignas(64) unsigned char work[65536];
        assert_int_equal(attn_kv_cache_view(m->cache, a->batch, a->seqs, &p, &k,
                                            &v, work, sizeof work),
                         ATTN_ERR_UNSUPPORTED);
        return;
    }
    w = make_view(m, a->batch, a->seqs, &a->params);
    must(m, attn_sdpa_check(NULL, &w.params, &a->q, &w.k, &w.v, &a->again));
    must(m, attn_sdpa_workspace(NULL, &w.params, &a->q, &w.k, &w.v, &a->again,
                                &bytes, &alignment));
    void *work = aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
    must(m, attn_sdpa_work(NULL, &w.params, &a->q, &w.k, &w.v, &a->again, work,
                           bytes));
    for (int64_t b = 0; b < a->batch; b++) {
        const attn_tensor x = slice(&a->again, 0, b, 1);
        const attn_tensor y = slice(&a->out, 0, b, 1);
        expect_rows(m, "out by the view", &x, &y);
    }
    free(work);
    drop_view(&w);
}

static void attend(struct model *m, rng *r)
{
    struct question a;
    draw_question(m, &a, r);
    must(m, attn_kv_cache_attend(rng_one_in(r, 2) ? m->guarded : NULL, m->cache,
                                 a.seqs, &a.params, &a.q, &a.out));
    for (int64_t b = 0; b < a.batch; b++)
        check_answer(m, &a, b);
    check_view(m, &a);
    drop_question(&a);
}

/* ---- histories ---- */

static void run_history(uint64_t seed, uint64_t index)
{
    static struct model m;
    rng r = rng_make(seed, index);
    begin(&m, seed, index, &r);
    kit_seed(index);
    for (m.step = 0; m.step < 40; m.step++) {
        switch (rng_int(&r, 0, 9)) {
        case 0:
            truncate_one(&m, &r);
            break;
        case 1:
            if (rng_one_in(&r, 2))
                reset(&m, &r);
            break;
        case 2:
            share(&m, &r);
            break;
        case 3:
        case 4:
        case 5:
            attend(&m, &r);
            break;
        default:
            append(&m, &r);
        }
        check_state(&m);
        if (m.step % 4 == 0) {
            check_keys(&m);
            poison_unused(&m);
        }
    }
    end(&m);
}

static void test_kv_cache__random_histories_are_those_of_arrays(void **state)
{
    (void)state;
    const uint64_t seed = draw_setting("ATTN_TEST_SEED", 1);
    const uint64_t first = draw_setting("ATTN_TEST_FIRST", 0);
    const uint64_t count = draw_setting("ATTN_TEST_COUNT", 600);
    for (uint64_t n = 0; n < count; n++)
        run_history(seed, first + n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_cache__random_histories_are_those_of_arrays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
