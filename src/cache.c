/*
 * Key/value caches: what they are made of, and the calls that move no keys of
 * the caller. Appending is in cache_append.c, attention in cache_view.c.
 */
#include "attn_internal.h"

#include "cache.h"

#include "check.h"
#include "context.h"
#include "status.h"

#include <inttypes.h>
#include <string.h>

/*
 * Keys of a page if the caller does not say. Pages that a sequence took without
 * interruption are one run of rows and cost nothing; where two sequences grow
 * in turn, decoding (32/8 heads, width 128, 4096 keys in float) takes 1.26 of
 * the time of contiguous keys with pages of 8, 1.13 with 16, 1.10 with 32 and
 * 64, 1.04 with 128 and no less with more. In 16 bits it is 1.13, 1.07, 1.05,
 * 1.02, 0.99.
 */
#define DEFAULT_PAGE_SIZE 128

void attn_kv_cache_params_init(attn_kv_cache_params *params)
{
    static const attn_kv_cache_params init = ATTN_KV_CACHE_PARAMS_INIT;

    if (params)
        *params = init;
}

/* --------------------------------------------------------------- Checks -- */

static attn_status check_kind(const char *call, const attn_kv_cache_params *p)
{
    if (p->kind < ATTN_KV_CACHE_CONTIGUOUS || p->kind > ATTN_KV_CACHE_PAGED)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.kind is %" PRId32
                          "; it must be named: ATTN_KV_CACHE_CONTIGUOUS (1), "
                          "ATTN_KV_CACHE_RING (2) or ATTN_KV_CACHE_PAGED (3)",
                          call, p->kind);
    if (p->dtype == ATTN_U8 || attn__dtype_bytes(p->dtype) == 0)
        return attn__fail(ATTN_ERR_TYPE,
                          "%s: params.dtype is %" PRId32
                          "; it must be ATTN_F32, ATTN_F64, ATTN_F16 or "
                          "ATTN_BF16",
                          call, p->dtype);
    if (p->reserved != 0)
        return attn__fail(ATTN_ERR_UNSUPPORTED,
                          "%s: params.reserved is %" PRId32 "; it must be 0",
                          call, p->reserved);
    return ATTN_OK;
}

static attn_status check_sizes(const char *call, const attn_kv_cache_params *p)
{
    const struct {
        const char *name;
        int64_t size;
    } sizes[] = {{"num_seqs", p->num_seqs},  {"kv_heads", p->kv_heads},
                 {"capacity", p->capacity},  {"width", p->width},
                 {"v_width", p->v_width},    {"page_size", p->page_size},
                 {"num_pages", p->num_pages}};

    for (size_t n = 0; n < sizeof sizes / sizeof sizes[0]; n++)
        if (sizes[n].size < 0)
            return attn__fail(ATTN_ERR_SIZE,
                              "%s: params.%s is %" PRId64
                              "; sizes must not be negative",
                              call, sizes[n].name, sizes[n].size);
    if (p->kind != ATTN_KV_CACHE_PAGED &&
        (p->page_size != 0 || p->num_pages != 0))
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.%s is %" PRId64 ", but kind is %" PRId32
                          "; pages are for ATTN_KV_CACHE_PAGED (3)",
                          call, p->page_size != 0 ? "page_size" : "num_pages",
                          p->page_size != 0 ? p->page_size : p->num_pages,
                          p->kind);
    return ATTN_OK;
}

static attn_status check_rotary(const char *call, const attn_kv_cache_params *p,
                                attn_dtype real)
{
    static const char *const names[] = {"params.cos_table", "params.sin_table"};
    const attn_tensor *tables[] = {p->cos_table, p->sin_table};
    attn_status status = ATTN_OK;

    if (p->rotary_style == 0 && (p->cos_table || p->sin_table))
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: %s is given, but params.rotary_style is 0; it "
                          "must be named: ATTN_ROTARY_INTERLEAVED (1) or "
                          "ATTN_ROTARY_HALVES (2)",
                          call, names[p->cos_table ? 0 : 1]);
    if (p->rotary_style < 0 || p->rotary_style > ATTN_ROTARY_HALVES)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.rotary_style is %" PRId32
                          "; it must be ATTN_ROTARY_INTERLEAVED (1), "
                          "ATTN_ROTARY_HALVES (2), or 0 for none",
                          call, p->rotary_style);
    for (int t = 0; t < 2 && p->rotary_style != 0 && !status; t++) {
        status = attn__check_tensor(call, names[t], tables[t], real);
        if (!status)
            status = attn__check_shape(
                call, names[t], tables[t],
                t == 0 ? "(1,1,P,R/2)" : "the shape of cos_table", 1, 1,
                tables[0]->shape[2], tables[0]->shape[3]);
    }
    if (!status && p->rotary_style != 0 &&
        p->cos_table->shape[3] > p->width / 2)
        status = attn__fail(ATTN_ERR_SHAPE,
                            "%s: the tables have %" PRId64
                            " columns (shape[3]), for R = 2 x %" PRId64
                            " components, but params.width is %" PRId64
                            "; R must not exceed it",
                            call, p->cos_table->shape[3],
                            p->cos_table->shape[3], p->width);
    return status;
}

attn_status attn__cache_check(const char *call, const attn_kv_cache *cache)
{
    if (!cache)
        return attn__fail(ATTN_ERR_NULL, "%s: cache is NULL", call);
    return ATTN_OK;
}

attn_status attn__cache_check_seq(const char *call, const char *name,
                                  const attn_kv_cache *cache, int64_t seq)
{
    if (seq >= 0 && seq < cache->num_seqs)
        return ATTN_OK;
    return attn__fail(ATTN_ERR_VALUE,
                      "%s: %s is %" PRId64 "; the cache has %" PRId64
                      " sequences, numbered from 0",
                      call, name, seq, cache->num_seqs);
}

attn_status attn__cache_check_seqs(const char *call, const attn_kv_cache *cache,
                                   int64_t batch, const int64_t *seqs)
{
    if (!seqs && batch > cache->num_seqs)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: seqs is NULL, which is 0 to %" PRId64
                          "; the cache has %" PRId64
                          " sequences, numbered from 0",
                          call, batch - 1, cache->num_seqs);
    for (int64_t b = 0; seqs && b < batch; b++)
        if (seqs[b] < 0 || seqs[b] >= cache->num_seqs)
            return attn__fail(ATTN_ERR_VALUE,
                              "%s: seqs[%" PRId64 "] is %" PRId64
                              "; the cache has %" PRId64
                              " sequences, numbered from 0",
                              call, b, seqs[b], cache->num_seqs);
    return ATTN_OK;
}

/* --------------------------------------------------------------- Create -- */

static attn_status fail_size(const char *call)
{
    return attn__fail(ATTN_ERR_SIZE,
                      "%s: a cache of these sizes cannot be addressed", call);
}

/* Pages of the pool, and of a sequence. */
static attn_status find_pages(const char *call, const attn_kv_cache_params *p,
                              attn_kv_cache *c)
{
    c->page_size = c->capacity;
    c->num_pages = c->num_seqs;
    c->pages_per_seq = 1;
    if (c->kind != ATTN_KV_CACHE_PAGED)
        return ATTN_OK;
    c->page_size = p->page_size > 0 ? p->page_size : DEFAULT_PAGE_SIZE;
    c->pages_per_seq = attn__ceil_div(c->capacity, c->page_size);
    c->num_pages = p->num_pages;
    if (p->num_pages == 0 &&
        !attn__mul_i64(c->num_seqs, c->pages_per_seq, &c->num_pages))
        return fail_size(call);
    if (c->num_pages > INT32_MAX)
        return attn__fail(ATTN_ERR_SIZE,
                          "%s: the pool has %" PRId64
                          " pages; page tables are int32_t, so 2^31-1 is the "
                          "most",
                          call, c->num_pages);
    return ATTN_OK;
}

/* Elements of K or V; false if they, or strides beside a size of 0, are no
 * number. */
static bool elements(const attn_kv_cache *c, int64_t width, int64_t *n)
{
    const int64_t sizes[] = {c->num_pages, c->page_size, c->kv_heads, width};
    bool none = false;

    *n = 1;
    for (int a = 0; a < 4; a++) {
        if (!attn__mul_i64(*n, MAX(sizes[a], 1), n))
            return false;
        none |= sizes[a] == 0;
    }
    *n = none ? 0 : *n;
    return true;
}

/* Cuts (or, with base NULL, measures) the memory behind the struct. */
static bool cut(attn_kv_cache *c, attn__bump *bump)
{
    bool paged = c->kind == ATTN_KV_CACHE_PAGED;
    int64_t pages = paged ? c->num_pages : 0;
    size_t size = attn__dtype_bytes(c->dtype);
    int64_t k, v, table;

    if (!elements(c, c->width, &k) || !elements(c, c->v_width, &v) ||
        !attn__mul_i64(c->num_seqs, paged ? c->pages_per_seq : 0, &table))
        return false;
    (void)attn__bump_take(bump, 1, sizeof *c);
    c->seqs = attn__bump_take(bump, c->num_seqs, sizeof *c->seqs);
    c->table = attn__bump_take(bump, table, sizeof *c->table);
    c->users = attn__bump_take(bump, pages, sizeof *c->users);
    c->writers = attn__bump_take(bump, pages, sizeof *c->writers);
    c->free = attn__bump_take(bump, pages, sizeof *c->free);
    c->k = attn__bump_take(bump, k, size);
    c->v = attn__bump_take(bump, v, size);
    return bump->bytes <= (size_t)PTRDIFF_MAX;
}

/* Every sequence without keys, every page free: the lowest is taken first. */
static void empty(attn_kv_cache *c)
{
    memset(c->seqs, 0, (size_t)c->num_seqs * sizeof *c->seqs);
    if (c->kind != ATTN_KV_CACHE_PAGED)
        return;
    c->num_free = c->num_pages;
    for (int64_t g = 0; g < c->num_pages; g++) {
        c->users[g] = 0;
        c->writers[g] = 0;
        c->free[g] = (int32_t)(c->num_pages - 1 - g);
    }
}

attn_status attn_kv_cache_create(const attn_context *context,
                                 const attn_kv_cache_params *params,
                                 attn_kv_cache **cache)
{
    static const char call[] = "attn_kv_cache_create";
    attn__bump measured = {NULL, 0}, bump = {NULL, 0};
    attn_kv_cache c = {.kind = 0};
    attn_kv_cache_params p;
    attn_status status;

    if (!params || !cache)
        return attn__fail(ATTN_ERR_NULL, "%s: %s is NULL", call,
                          params ? "cache" : "params");
    status = attn__read_params(call, "params", &p, sizeof p, params, sizeof p);
    if (!status)
        status = check_kind(call, &p);
    if (!status)
        status = check_sizes(call, &p);
    c.real = p.dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32;
    if (!status)
        status = check_rotary(call, &p, c.real);
    if (status)
        return status;
    c.kind = p.kind;
    c.dtype = p.dtype;
    c.num_seqs = p.num_seqs;
    c.kv_heads = p.kv_heads;
    c.capacity = p.capacity;
    c.width = p.width;
    c.v_width = p.v_width > 0 ? p.v_width : p.width;
    c.rotary_style = p.rotary_style;
    if (c.rotary_style != 0) {
        c.cos_table = *p.cos_table;
        c.sin_table = *p.sin_table;
    }
    status = find_pages(call, &p, &c);
    if (status)
        return status;
    if (!cut(&c, &measured))
        return fail_size(call);
    c.allocator = attn__context(context)->allocator;
    c.bytes = measured.bytes;
    bump.base = attn__alloc(&c.allocator, c.bytes);
    if (!bump.base)
        return attn__fail(ATTN_ERR_NOMEM,
                          "%s: no memory for the %zu bytes of a cache", call,
                          c.bytes);
    (void)cut(&c, &bump);
    empty(&c);
    *cache = memcpy(bump.base, &c, sizeof c);
    return ATTN_OK;
}

void attn_kv_cache_destroy(attn_kv_cache *cache)
{
    attn__allocator allocator;

    if (!cache)
        return;
    allocator = cache->allocator;
    attn__free(&allocator, cache);
}

/* ---------------------------------------------------------------- Pages -- */

int32_t attn__cache_take_page(attn_kv_cache *c)
{
    int32_t page;

    ASSERT(c->num_free > 0);
    page = c->free[--c->num_free];
    ASSERT(c->users[page] == 0);
    c->users[page] = 1;
    return page;
}

void attn__cache_drop_page(attn_kv_cache *c, int32_t page)
{
    ASSERT(c->users[page] > 0);
    if (--c->users[page] == 0)
        c->free[c->num_free++] = page;
}

/* Pages of the sequence from this one on, last first: so a sequence that grows
 * again takes them in their old order. */
static void drop_pages(attn_kv_cache *c, int64_t seq, int64_t from)
{
    int64_t pages = attn__ceil_div(c->seqs[seq].end, MAX(c->page_size, 1));

    while (c->kind == ATTN_KV_CACHE_PAGED && pages > from)
        attn__cache_drop_page(c, c->table[seq * c->pages_per_seq + --pages]);
}

void attn__cache_copy_rows(const attn_kv_cache *c, int64_t to, int64_t from,
                           int64_t rows)
{
    unsigned char *const pools[] = {c->k, c->v};
    const int64_t widths[] = {c->width, c->v_width};
    int64_t head = c->num_pages * c->page_size;

    for (int n = 0; n < 2; n++) {
        int64_t bytes = widths[n] * (int64_t)attn__dtype_bytes(c->dtype);
        for (int64_t h = 0; h < c->kv_heads && rows * bytes > 0; h++)
            memcpy(pools[n] + (h * head + to) * bytes,
                   pools[n] + (h * head + from) * bytes,
                   (size_t)(rows * bytes));
    }
}

/* --------------------------------------------------------------- Lengths -- */

int64_t attn_kv_cache_length(const attn_kv_cache *cache, int64_t seq)
{
    static const char call[] = "attn_kv_cache_length";
    attn_status status = attn__cache_check(call, cache);

    if (!status)
        status = attn__cache_check_seq(call, "seq", cache, seq);
    return status ? status : cache->seqs[seq].end;
}

int64_t attn_kv_cache_first(const attn_kv_cache *cache, int64_t seq)
{
    static const char call[] = "attn_kv_cache_first";
    attn_status status = attn__cache_check(call, cache);

    if (!status)
        status = attn__cache_check_seq(call, "seq", cache, seq);
    return status ? status : cache->seqs[seq].first;
}

int64_t attn_kv_cache_free_pages(const attn_kv_cache *cache)
{
    attn_status status = attn__cache_check("attn_kv_cache_free_pages", cache);

    return status ? status : cache->num_free;
}

/* first <= length <= end of the sequence, the `of` of the sentence. */
static attn_status check_length(const char *call, const attn_kv_cache *cache,
                                const char *of, int64_t seq, int64_t length)
{
    const attn__cache_seq *s = &cache->seqs[seq];

    if (length >= s->first && length <= s->end)
        return ATTN_OK;
    return attn__fail(ATTN_ERR_VALUE,
                      "%s: length is %" PRId64 "; %s %" PRId64
                      " holds the keys at positions %" PRId64 " to %" PRId64
                      ", so it must be in [%" PRId64 ", %" PRId64 "]",
                      call, length, of, seq, s->first, s->end - 1, s->first,
                      s->end);
}

attn_status attn_kv_cache_truncate(attn_kv_cache *cache, int64_t seq,
                                   int64_t length)
{
    static const char call[] = "attn_kv_cache_truncate";
    attn_status status = attn__cache_check(call, cache);

    if (!status)
        status = attn__cache_check_seq(call, "seq", cache, seq);
    if (!status)
        status = check_length(call, cache, "sequence", seq, length);
    if (status)
        return status;
    drop_pages(cache, seq, attn__ceil_div(length, MAX(cache->page_size, 1)));
    cache->seqs[seq].end = length;
    return ATTN_OK;
}

attn_status attn_kv_cache_reset(attn_kv_cache *cache, int64_t seq)
{
    static const char call[] = "attn_kv_cache_reset";
    attn_status status = attn__cache_check(call, cache);

    if (!status && seq == -1) {
        empty(cache);
        return ATTN_OK;
    }
    if (!status)
        status = attn__cache_check_seq(call, "seq", cache, seq);
    if (status)
        return status;
    drop_pages(cache, seq, 0);
    cache->seqs[seq].first = 0;
    cache->seqs[seq].end = 0;
    return ATTN_OK;
}

/* ---------------------------------------------------------------- Share -- */

/* Positions [first, length) of one sequence to the same of another: the same
 * rows of their pages, which in a ring may go over its end. */
static void copy_keys(const attn_kv_cache *c, int64_t to, int64_t from,
                      int64_t first, int64_t length)
{
    while (first < length) {
        int64_t a = attn__cache_row(c, to, first);
        int64_t b = attn__cache_row(c, from, first);
        int64_t rows = MIN(length - first, (from + 1) * c->page_size - b);
        attn__cache_copy_rows(c, a, b, rows);
        first += rows;
    }
}

static void share_pages(attn_kv_cache *c, int64_t to, int64_t from,
                        int64_t length)
{
    int64_t pages = attn__ceil_div(length, c->page_size);
    int32_t *table = c->table + to * c->pages_per_seq;

    for (int64_t n = 0; n < pages; n++) {
        table[n] = c->table[from * c->pages_per_seq + n];
        c->users[table[n]]++;
    }
}

attn_status attn_kv_cache_share(attn_kv_cache *cache, int64_t to, int64_t from,
                                int64_t length)
{
    static const char call[] = "attn_kv_cache_share";
    attn_status status = attn__cache_check(call, cache);
    attn__cache_seq *s;

    if (!status)
        status = attn__cache_check_seq(call, "to", cache, to);
    if (!status)
        status = attn__cache_check_seq(call, "from", cache, from);
    if (status)
        return status;
    s = &cache->seqs[to];
    if (s->end != 0 || to == from)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: to is %" PRId64 ", from %" PRId64
                          "; sequence %" PRId64 " has length %" PRId64
                          ", but to must be another sequence, of length 0",
                          call, to, from, to, s->end);
    status = check_length(call, cache, "from, sequence", from, length);
    if (status)
        return status;
    if (cache->kind == ATTN_KV_CACHE_PAGED)
        share_pages(cache, to, from, length);
    else
        copy_keys(cache, to, from, cache->seqs[from].first, length);
    s->first = cache->seqs[from].first;
    s->end = length;
    return ATTN_OK;
}
