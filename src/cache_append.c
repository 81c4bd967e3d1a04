/*
 * Appending to a key/value cache: everything is checked, then the pages are
 * taken, then the rows are written, by as many threads as there are.
 */
#include "attn_internal.h"

#include "cache.h"

#include "check.h"
#include "context.h"
#include "convert.h"
#include "rotary.h"
#include "status.h"

#include <inttypes.h>

/* Elements of a task: some 10 microseconds of work, which a thread is worth. */
#define TASK_ELEMENTS 32768
/* Pairs that are turned at a time: those of any usual width. */
#define PART 128

static const char call[] = "attn_kv_cache_append";

/* One call: what all tasks share. */
typedef struct append_run {
    attn_kv_cache *cache;
    const int64_t *seqs, *new_lens;
    const attn_tensor *k, *v;
    int64_t rows, task_rows; /* of (B,Hkv,T) */
    /* From the type of k and v, which is one; from the real type. */
    attn__convert_fn to_cache, k_to_real, real_to_cache;
} append_run;

#include "real_f32.h"
#include "cache_tmpl.h"
#include "real_f64.h"
#include "cache_tmpl.h"

/* ------------------------------------------------------------------ Room -- */

static attn__cache_seq *seq_of(const append_run *r, int64_t b)
{
    return &r->cache->seqs[attn__cache_seq_of(r->seqs, b)];
}

/* How many keys are new for the b-th sequence. */
static int64_t new_of(const append_run *r, int64_t b)
{
    return r->new_lens ? r->new_lens[b] : r->k->shape[2];
}

/* Where the page of the next key of the b-th sequence is written down, if that
 * page is there and others have it too; else NULL. */
static int32_t *shared_page(const append_run *r, int64_t b)
{
    const attn_kv_cache *c = r->cache;
    int64_t seq = attn__cache_seq_of(r->seqs, b), end = c->seqs[seq].end;
    int32_t *page = c->table + seq * c->pages_per_seq + end / c->page_size;

    if (new_of(r, b) == 0 || end % c->page_size == 0 || c->users[*page] == 1)
        return NULL;
    return page;
}

/* Pages that the b-th sequence has to take for whole new ones. */
static int64_t new_pages(const append_run *r, int64_t b)
{
    int64_t size = r->cache->page_size, end = seq_of(r, b)->end;

    return attn__ceil_div(end + new_of(r, b), size) - attn__ceil_div(end, size);
}

/* Of those that have a page and append, each takes a copy; but if that is all
 * of them, the last has the page for itself by then. */
static bool needs_copy(const append_run *r, int64_t b)
{
    const int32_t *page = shared_page(r, b);

    return page && ++r->cache->writers[*page] < r->cache->users[*page];
}

static attn_status check_pages(const append_run *r)
{
    const attn_kv_cache *c = r->cache;
    int64_t needed = 0, b;

    for (b = 0; b < r->k->shape[0] && needed <= c->num_free; b++)
        needed += new_pages(r, b) + needs_copy(r, b);
    for (int64_t n = 0; n < b; n++) {
        const int32_t *page = shared_page(r, n);
        if (page)
            c->writers[*page] = 0;
    }
    if (needed <= c->num_free)
        return ATTN_OK;
    b--;
    return attn__fail(
        ATTN_ERR_FULL,
        "%s: sequence %" PRId64 " has %" PRId64 " keys and gets %" PRId64
        " more; it and those before it in the call need %" PRId64
        " new pages, but of %" PRId64 " in the pool %" PRId64 " are free",
        call, attn__cache_seq_of(r->seqs, b), seq_of(r, b)->end, new_of(r, b),
        needed, c->num_pages, c->num_free);
}

static attn_status check_capacity(const append_run *r, int64_t b)
{
    const attn_kv_cache *c = r->cache;
    int64_t end = seq_of(r, b)->end, n = new_of(r, b), sum;

    if (c->kind != ATTN_KV_CACHE_RING && n > c->capacity - end)
        return attn__fail(
            ATTN_ERR_FULL,
            "%s: sequence %" PRId64 " has %" PRId64 " keys and gets %" PRId64
            " more; the capacity is %" PRId64,
            call, attn__cache_seq_of(r->seqs, b), end, n, c->capacity);
    if (!attn__add_i64(end, n, &sum))
        return attn__fail(ATTN_ERR_SIZE,
                          "%s: sequence %" PRId64 " has %" PRId64
                          " keys and gets %" PRId64
                          " more; positions end at 2^63-1",
                          call, attn__cache_seq_of(r->seqs, b), end, n);
    if (c->rotary_style != 0 && n > 0 && sum > c->cos_table.shape[2])
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: sequence %" PRId64 " has %" PRId64
                          " keys and gets %" PRId64
                          " more; the tables have rows for positions 0 to "
                          "%" PRId64,
                          call, attn__cache_seq_of(r->seqs, b), end, n,
                          c->cos_table.shape[2] - 1);
    return ATTN_OK;
}

/* Takes the pages; check_pages has said that there are enough. */
static void take_pages(const append_run *r)
{
    attn_kv_cache *c = r->cache;

    for (int64_t b = 0; b < r->k->shape[0]; b++) {
        int64_t seq = attn__cache_seq_of(r->seqs, b), end = c->seqs[seq].end;
        int64_t pages = new_pages(r, b), rest = end % c->page_size;
        int32_t *table = c->table + seq * c->pages_per_seq;
        int32_t *shared = shared_page(r, b);
        if (shared) {
            int32_t old = *shared;
            *shared = attn__cache_take_page(c);
            attn__cache_copy_rows(c, *shared * c->page_size, old * c->page_size,
                                  rest);
            attn__cache_drop_page(c, old);
        }
        table += attn__ceil_div(end, c->page_size);
        for (int64_t n = 0; n < pages; n++)
            table[n] = attn__cache_take_page(c);
    }
}

/* ----------------------------------------------------------------- Check -- */

static attn_status check_new(const append_run *r, const char *name,
                             const attn_tensor *t, const char *meaning,
                             int64_t width)
{
    const attn_kv_cache *c = r->cache;
    attn_dtype dtype = !t || t->dtype == ATTN_F32 ? ATTN_F32 : c->dtype;
    attn_status status;

    if (t && t->dtype != dtype && attn__dtype_bytes(t->dtype) > 0)
        return attn__fail(ATTN_ERR_TYPE,
                          "%s: %s has dtype %s; the cache keeps %s, so it must "
                          "be that%s",
                          call, name, attn__dtype_name(t->dtype),
                          attn__dtype_name(c->dtype),
                          c->dtype == ATTN_F32 ? "" : " or F32");
    status = attn__check_tensor(call, name, t, t ? t->dtype : 0);
    if (!status)
        status = attn__check_shape(call, name, t, meaning, r->k->shape[0],
                                   c->kv_heads, r->k->shape[2], width);
    if (!status)
        status = attn__check_apart(call, name, t, "the cache", c, c->bytes);
    return status;
}

static attn_status check_lens(const append_run *r)
{
    attn_kv_cache *c = r->cache;
    int64_t batch = r->k->shape[0];
    attn_status status = attn__cache_check_seqs(call, c, batch, r->seqs);

    c->appends++;
    for (int64_t b = 0; b < batch && !status; b++) {
        if (r->new_lens &&
            (r->new_lens[b] < 0 || r->new_lens[b] > r->k->shape[2]))
            return attn__fail(ATTN_ERR_VALUE,
                              "%s: new_lens[%" PRId64 "] is %" PRId64
                              "; it must be in [0, %" PRId64 "]",
                              call, b, r->new_lens[b], r->k->shape[2]);
        if (seq_of(r, b)->batch == c->appends)
            return attn__fail(ATTN_ERR_VALUE,
                              "%s: seqs[%" PRId64 "] is %" PRId64
                              " for the second time; they must differ",
                              call, b, r->seqs[b]);
        seq_of(r, b)->batch = c->appends;
    }
    return status;
}

static attn_status append_check(const append_run *r)
{
    attn_status status = attn__cache_check(call, r->cache);

    if (!status && !r->k)
        status = attn__fail(ATTN_ERR_NULL, "%s: k is NULL", call);
    if (!status)
        status = check_new(r, "k", r->k, "(B,Hkv,T,D)", r->cache->width);
    if (!status)
        status = check_new(r, "v", r->v, "(B,Hkv,T,Dv)", r->cache->v_width);
    if (!status && r->v->dtype != r->k->dtype)
        status = attn__fail(ATTN_ERR_TYPE,
                            "%s: v has dtype %s, k has dtype %s; k and v must "
                            "have the same type",
                            call, attn__dtype_name(r->v->dtype),
                            attn__dtype_name(r->k->dtype));
    if (!status)
        status = check_lens(r);
    for (int64_t b = 0; !status && b < r->k->shape[0]; b++)
        status = check_capacity(r, b);
    if (!status && r->cache->kind == ATTN_KV_CACHE_PAGED)
        status = check_pages(r);
    return status;
}

/* ------------------------------------------------------------------- Run -- */

static const unsigned char *row_at(const attn_tensor *t, int64_t b, int64_t h,
                                   int64_t i)
{
    return (const unsigned char *)t->data +
           (int64_t)attn__dtype_bytes(t->dtype) *
               (b * t->stride[0] + h * t->stride[1] + i * t->stride[2]);
}

/* Key i of those that are new for the b-th sequence, of head h. */
static void append_row(const append_run *r, int64_t b, int64_t h, int64_t i)
{
    const attn_kv_cache *c = r->cache;
    int64_t bytes = (int64_t)attn__dtype_bytes(c->dtype);
    int64_t seq = attn__cache_seq_of(r->seqs, b);
    int64_t position = c->seqs[seq].end + i;
    int64_t row =
        attn__cache_row(c, seq, position) + h * c->num_pages * c->page_size;
    unsigned char *k = c->k + row * c->width * bytes;
    unsigned char *v = c->v + row * c->v_width * bytes;

    if (c->width > 0 && c->rotary_style == 0)
        r->to_cache(row_at(r->k, b, h, i), r->k->stride[3], k, 1, c->width);
    else if (c->width > 0 && c->real == ATTN_F32)
        attn__turn_into_f32(r, row_at(r->k, b, h, i), k, position);
    else if (c->width > 0)
        attn__turn_into_f64(r, row_at(r->k, b, h, i), k, position);
    if (c->v_width > 0)
        r->to_cache(row_at(r->v, b, h, i), r->v->stride[3], v, 1, c->v_width);
}

/* Rows [task * task_rows, ...), in the order (b,h,t). */
static void append_task(void *data, int64_t task, int32_t worker)
{
    const append_run *r = data;
    int64_t len = r->k->shape[2], heads = r->k->shape[1];
    int64_t end = MIN((task + 1) * r->task_rows, r->rows);

    (void)worker;
    for (int64_t row = task * r->task_rows; row < end; row++) {
        int64_t b = row / len / heads, i = row % len, n = new_of(r, b);
        /* A ring keeps the last ones only. */
        bool kept =
            r->cache->kind != ATTN_KV_CACHE_RING || i >= n - r->cache->capacity;
        if (i < n && kept)
            append_row(r, b, row / len % heads, i);
    }
}

static void write_rows(const attn_context *context, append_run *r)
{
    const attn_kv_cache *c = r->cache;
    attn_dtype from = r->k->dtype;

    /* Rows without columns are nothing to write, and may be any number. */
    if (attn__count(r->k) == 0 && attn__count(r->v) == 0)
        return;
    r->to_cache = attn__convert_row(from, c->dtype);
    r->k_to_real = attn__convert_row(from, c->real);
    r->real_to_cache = attn__convert_row(c->real, c->dtype);
    r->rows = r->k->shape[0] * r->k->shape[1] * r->k->shape[2];
    r->task_rows = MAX(TASK_ELEMENTS / (c->width + c->v_width), 1);
    attn__parallel_for(&attn__context(context)->executor,
                       attn__ceil_div(r->rows, r->task_rows), append_task, r);
}

attn_status attn_kv_cache_append(const attn_context *context,
                                 attn_kv_cache *cache, const int64_t *seqs,
                                 const int64_t *new_lens, const attn_tensor *k,
                                 const attn_tensor *v)
{
    append_run r = {
        .cache = cache, .seqs = seqs, .new_lens = new_lens, .k = k, .v = v};
    attn_status status = append_check(&r);

    if (status)
        return status;
    if (cache->kind == ATTN_KV_CACHE_PAGED)
        take_pages(&r);
    write_rows(context, &r);
    for (int64_t b = 0; b < k->shape[0]; b++) {
        attn__cache_seq *s = seq_of(&r, b);
        s->end += new_of(&r, b);
        if (cache->kind == ATTN_KV_CACHE_RING)
            s->first = MAX(s->first, s->end - cache->capacity);
    }
    return ATTN_OK;
}
