/*
 * Attention over a key/value cache: what the sequences hold, in the terms of
 * attn_sdpa.
 *
 * Sequences of CONTIGUOUS and RING that are the same number apart are a batch
 * by strides. Others go to the engine by their numbers, which no parameter of
 * attn_sdpa can say; so for the caller those of CONTIGUOUS become pages, one
 * for each, and those of a RING are refused.
 */
#include "attn_internal.h"

#include "cache.h"

#include "check.h"
#include "context.h"
#include "sdpa.h"
#include "status.h"

#include <inttypes.h>
#include <string.h>

/* Those of the parameters that the cache sets, in memory that is not its own.
 */
typedef struct arrays {
    int64_t *kv_lens;                  /* [batch] */
    int64_t *ring_starts, *kv_offsets; /* [batch]; RING */
    int32_t *page_table;               /* [batch * pages]; not RING */
    int64_t *seqs;                     /* [batch] */
} arrays;

/* Cuts (or, with base NULL, measures) arrays for any `batch` sequences. */
static arrays cut_arrays(const attn_kv_cache *c, int64_t batch,
                         attn__bump *bump)
{
    bool ring = c->kind == ATTN_KV_CACHE_RING;
    int64_t in_ring, entries = 0;
    arrays a;

    batch = MAX(batch, 1); /* an array of nothing is there too, not NULL */
    in_ring = ring ? batch : 0;
    if (!ring && !attn__mul_i64(batch, c->pages_per_seq, &entries))
        entries = INT64_MAX;
    a.kv_lens = attn__bump_take(bump, batch, sizeof *a.kv_lens);
    a.ring_starts = attn__bump_take(bump, in_ring, sizeof *a.ring_starts);
    a.kv_offsets = attn__bump_take(bump, in_ring, sizeof *a.kv_offsets);
    a.page_table = attn__bump_take(bump, entries, sizeof *a.page_table);
    a.seqs = attn__bump_take(bump, batch, sizeof *a.seqs);
    return a;
}

static int64_t held(const attn_kv_cache *c, int64_t seq)
{
    return c->seqs[seq].end - c->seqs[seq].first;
}

static int64_t longest(const attn_kv_cache *c, int64_t batch,
                       const int64_t *seqs)
{
    int64_t most = 0;

    for (int64_t b = 0; b < batch; b++)
        most = MAX(most, held(c, attn__cache_seq_of(seqs, b)));
    return most;
}

/* Is each sequence `step` after the one before? */
static bool are_evenly_apart(int64_t batch, const int64_t *seqs, int64_t *step)
{
    *step = 1;
    if (!seqs || batch <= 1)
        return true;
    *step = seqs[1] - seqs[0];
    for (int64_t b = 2; b < batch; b++)
        if (seqs[b] - seqs[b - 1] != *step)
            return false;
    return true;
}

/* K or V of the whole cache as (pages,Hkv,page_size,width). */
static attn_tensor pool(const attn_kv_cache *c, unsigned char *data,
                        int64_t width)
{
    int64_t page = c->page_size * width;

    return (attn_tensor){
        .data = data,
        .shape = {c->num_pages, c->kv_heads, c->page_size, width},
        .stride = {page, c->num_pages * page, width, 1},
        .dtype = c->dtype};
}

/* A batch of one sequence each, `step` apart from seq on, of `rows` rows. */
static void make_batch(const attn_kv_cache *c, attn_tensor *t, int64_t batch,
                       int64_t seq, int64_t step, int64_t rows)
{
    t->data = (unsigned char *)t->data +
              seq * t->stride[0] * (int64_t)attn__dtype_bytes(c->dtype);
    t->shape[0] = batch;
    t->shape[2] = rows;
    t->stride[0] *= step;
}

/* Keys as pages. */
static void make_pages(const attn_kv_cache *c, int64_t batch,
                       const int64_t *seqs, const arrays *a,
                       attn_sdpa_params *params, attn_tensor *k, attn_tensor *v)
{
    int64_t most = longest(c, batch, seqs), pages = 1;

    if (c->kind == ATTN_KV_CACHE_PAGED)
        pages = attn__ceil_div(most, c->page_size);
    else
        k->shape[2] = v->shape[2] = most;
    for (int64_t b = 0; b < batch; b++) {
        int64_t seq = attn__cache_seq_of(seqs, b);
        int32_t *row = a->page_table + b * pages;
        if (c->kind != ATTN_KV_CACHE_PAGED) {
            row[0] = (int32_t)seq;
            continue;
        }
        for (int64_t n = 0; n < pages; n++)
            row[n] = n * c->page_size < c->seqs[seq].end
                         ? c->table[seq * c->pages_per_seq + n]
                         : -1;
    }
    params->page_table = a->page_table;
    params->pages_per_seq = pages;
}

/*
 * Writes views, arrays and parameters. Returns false, with a view of `batch`
 * times the first sequence, if that takes the numbers of the sequences, which
 * then are in a->seqs.
 */
static bool make_view(const attn_kv_cache *c, int64_t batch,
                      const int64_t *seqs, const arrays *a,
                      attn_sdpa_params *params, attn_tensor *k, attn_tensor *v)
{
    bool ring = c->kind == ATTN_KV_CACHE_RING, even;
    int64_t rows, step;

    *k = pool(c, c->k, c->width);
    *v = pool(c, c->v, c->v_width);
    for (int64_t b = 0; b < batch; b++) {
        int64_t seq = attn__cache_seq_of(seqs, b);
        int64_t first = c->seqs[seq].first;
        a->kv_lens[b] = held(c, seq);
        a->seqs[b] = seq;
        if (ring) {
            a->ring_starts[b] = c->capacity > 0 ? first % c->capacity : 0;
            a->kv_offsets[b] = first;
        }
    }
    params->kv_lens = a->kv_lens;
    params->ring_starts = ring ? a->ring_starts : NULL;
    params->kv_offsets = ring ? a->kv_offsets : NULL;
    params->page_table = NULL;
    params->pages_per_seq = 0;
    if (params->align == 0)
        params->align = ATTN_ALIGN_BOTTOM_RIGHT;
    if (c->kind == ATTN_KV_CACHE_PAGED || params->cu_q) {
        make_pages(c, batch, seqs, a, params, k, v);
        return true;
    }
    even = are_evenly_apart(batch, seqs, &step);
    rows = ring ? c->capacity : longest(c, batch, seqs);
    for (int n = 0; n < 2; n++)
        make_batch(c, n == 0 ? k : v, batch, even && batch > 0 ? a->seqs[0] : 0,
                   even ? step : 0, rows);
    return even;
}

/* ------------------------------------------------------------------ View -- */

static attn_status check_batch(const char *call, const attn_kv_cache *cache,
                               int64_t batch)
{
    attn_status status = attn__cache_check(call, cache);

    if (!status && batch < 0)
        status = attn__fail(ATTN_ERR_SIZE,
                            "%s: batch is %" PRId64 "; it must not be negative",
                            call, batch);
    return status;
}

static attn_status measure_arrays(const char *call, const attn_kv_cache *cache,
                                  int64_t batch, size_t *bytes)
{
    attn__bump bump = {NULL, 0};

    (void)cut_arrays(cache, batch, &bump);
    *bytes = bump.bytes;
    return *bytes <= (size_t)PTRDIFF_MAX ? ATTN_OK : attn__fail_bytes(call);
}

attn_status attn_kv_cache_view_workspace(const attn_kv_cache *cache,
                                         int64_t batch, size_t *bytes,
                                         size_t *alignment)
{
    static const char call[] = "attn_kv_cache_view_workspace";
    attn_status status;
    size_t needed;

    if (!bytes || !alignment)
        return attn__fail(ATTN_ERR_NULL, "%s: %s is NULL", call,
                          bytes ? "alignment" : "bytes");
    status = check_batch(call, cache, batch);
    if (!status)
        status = measure_arrays(call, cache, batch, &needed);
    if (status)
        return status;
    *bytes = needed;
    *alignment = ATTN__ALIGNMENT;
    return ATTN_OK;
}

/* Ragged queries need keys in pages. */
static attn_status check_ragged(const char *call, const attn_kv_cache *c,
                                const int64_t *cu_q, int64_t num_seqs,
                                int64_t batch)
{
    if (!cu_q)
        return ATTN_OK;
    if (c->kind == ATTN_KV_CACHE_RING)
        return attn__fail(ATTN_ERR_UNSUPPORTED,
                          "%s: params.cu_q is given, but the cache is a ring; "
                          "ragged queries need keys in pages",
                          call);
    if (num_seqs != batch)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: batch is %" PRId64
                          ", but with cu_q params.num_seqs is %" PRId64
                          "; they must be the same",
                          call, batch, num_seqs);
    return ATTN_OK;
}

/* Not NULL, and with room for what is written to it. */
static attn_status check_params(const char *call,
                                const attn_sdpa_params *params)
{
    const size_t least =
        offsetof(attn_sdpa_params, kv_offsets) + sizeof params->kv_offsets;

    if (!params)
        return attn__fail(ATTN_ERR_NULL, "%s: params is NULL", call);
    if (params->struct_size < least)
        return attn__fail(ATTN_ERR_STRUCT,
                          "%s: params.struct_size is %zu, below %zu, up to "
                          "where members are set; was it initialised?",
                          call, params->struct_size, least);
    return ATTN_OK;
}

attn_status attn_kv_cache_view(const attn_kv_cache *cache, int64_t batch,
                               const int64_t *seqs, attn_sdpa_params *params,
                               attn_tensor *k, attn_tensor *v, void *work,
                               size_t work_bytes)
{
    static const char call[] = "attn_kv_cache_view";
    attn_status status = check_batch(call, cache, batch);
    attn__bump bump = {work, 0};
    int64_t step;
    size_t needed;
    arrays a;

    if (!status && (!k || !v))
        status =
            attn__fail(ATTN_ERR_NULL, "%s: %s is NULL", call, k ? "v" : "k");
    if (!status)
        status = check_params(call, params);
    if (!status)
        status = attn__cache_check_seqs(call, cache, batch, seqs);
    if (!status)
        status =
            check_ragged(call, cache, params->cu_q, params->num_seqs, batch);
    if (!status && cache->kind == ATTN_KV_CACHE_RING &&
        !are_evenly_apart(batch, seqs, &step))
        status = attn__fail(ATTN_ERR_UNSUPPORTED,
                            "%s: seqs are not the same number apart; those of "
                            "a ring must be, or go to attn_kv_cache_attend",
                            call);
    if (!status)
        status = measure_arrays(call, cache, batch, &needed);
    if (!status)
        status = attn__check_scratch(call, work, work_bytes, needed);
    if (status)
        return status;
    a = cut_arrays(cache, batch, &bump);
    if (!make_view(cache, batch, seqs, &a, params, k, v)) {
        *k = pool(cache, cache->k, cache->width);
        *v = pool(cache, cache->v, cache->v_width);
        make_pages(cache, batch, seqs, &a, params, k, v);
    }
    return ATTN_OK;
}

/* ---------------------------------------------------------------- Attend -- */

/* What the cache sets must not be there already. */
static attn_status check_own(const char *call, const attn_sdpa_params *o)
{
    const struct {
        const char *name;
        bool given;
    } fields[] = {{"cu_k", o->cu_k},
                  {"kv_lens", o->kv_lens},
                  {"page_table", o->page_table},
                  {"pages_per_seq", o->pages_per_seq != 0},
                  {"ring_starts", o->ring_starts},
                  {"kv_offsets", o->kv_offsets}};

    for (size_t n = 0; n < sizeof fields / sizeof fields[0]; n++)
        if (fields[n].given)
            return attn__fail(ATTN_ERR_VALUE,
                              "%s: params.%s is given; leave it out, the cache "
                              "says where its keys lie",
                              call, fields[n].name);
    return ATTN_OK;
}

/* One call. */
typedef struct attend_run {
    const attn_kv_cache *cache;
    const int64_t *seqs;
    int64_t batch;
    attn_sdpa_params params;
    const attn_tensor *q, *out;
    attn__sdpa sdpa;
} attend_run;

static const char call_attend[] = "attn_kv_cache_attend";

static attn_status attend_check(attend_run *r, const attn_sdpa_params *params)
{
    static const char *const call = call_attend;
    attn_status status = attn__cache_check(call, r->cache);

    if (!status)
        status = attn__check_tensor(call, "q", r->q, r->cache->real);
    if (!status)
        status = attn__read_params(call, "params", &r->params, sizeof r->params,
                                   params, ATTN__SDPA_PARAMS_FIRST);
    if (!status)
        status = check_own(call, &r->params);
    if (status)
        return status;
    r->params.struct_size = sizeof r->params;
    r->batch = r->params.cu_q ? r->params.num_seqs : r->q->shape[0];
    status = check_batch(call, r->cache, r->batch);
    if (!status)
        status = attn__cache_check_seqs(call, r->cache, r->batch, r->seqs);
    if (!status)
        status = check_ragged(call, r->cache, r->params.cu_q,
                              r->params.num_seqs, r->batch);
    return status;
}

/* The problem for the engine, with its arrays cut from bump. */
static attn_status prepare(attend_run *r, const attn_context *context,
                           attn__bump *bump, size_t *bytes)
{
    const attn_kv_cache *c = r->cache;
    attn__output outputs[ATTN__EXTRAS + 1];
    arrays a = cut_arrays(c, r->batch, bump);
    attn_sdpa_params params = r->params;
    attn__sdpa *p = &r->sdpa;
    attn_tensor k, v;
    bool by_number = !make_view(c, r->batch, r->seqs, &a, &params, &k, &v);
    attn_status status = attn__sdpa_prepare(call_attend, context, &params, r->q,
                                            &k, &v, r->out, false, p);

    if (!status)
        status = attn__sdpa_check_overlaps(call_attend, p, &p->out, true);
    /* k and v need not be all of the cache. */
    for (int n = status ? 0 : attn__sdpa_outputs(p, &p->out, outputs);
         n > 0 && !status; n--)
        status = attn__check_apart(call_attend, outputs[n - 1].name,
                                   outputs[n - 1].t, "the cache", c, c->bytes);
    if (status)
        return status;
    if (by_number) {
        p->kv_seqs = a.seqs;
        p->k.stride[0] = c->page_size * c->width;
        p->v.stride[0] = c->page_size * c->v_width;
    }
    *bytes = attn__sdpa_bytes(p);
    return *bytes == SIZE_MAX ? attn__fail_bytes(call_attend) : ATTN_OK;
}

/*
 * The scratch memory to take where a block was too small: what will be needed
 * too when the sequences have some more keys. Tiles grow up to ATTN__MAX_KEYS
 * keys, so decoding asks for memory in its first step, and once more where long
 * sequences are first split.
 */
static size_t bytes_later(const attend_run *r, size_t bytes)
{
    attn__sdpa p = r->sdpa;
    size_t later;

    p.kv_len = MAX(p.kv_len, MIN(r->cache->capacity, ATTN__MAX_KEYS));
    later = attn__sdpa_bytes(&p);
    return later > SIZE_MAX / 2 ? bytes : MAX(bytes, later);
}

attn_status attn_kv_cache_attend(const attn_context *context,
                                 const attn_kv_cache *cache,
                                 const int64_t *seqs,
                                 const attn_sdpa_params *params,
                                 const attn_tensor *q, const attn_tensor *out)
{
    attend_run r = {.cache = cache, .seqs = seqs, .q = q, .out = out};
    attn_status status = attend_check(&r, params);
    size_t own, needed, bytes = 0;
    void *work;

    if (!status)
        status = measure_arrays(call_attend, cache, r.batch, &own);
    if (status)
        return status;
    context = attn__context(context);
    /* One block for the arrays and the engine, whose need is known only once
     * the arrays are there; the block of the call before is large enough. */
    for (needed = own;; needed = own + bytes_later(&r, bytes)) {
        attn__bump bump;
        work = attn__scratch_take(context, needed);
        if (!work)
            return attn__fail(ATTN_ERR_NOMEM,
                              "%s: no memory for %zu bytes of scratch",
                              call_attend, needed);
        bump = (attn__bump){work, 0};
        status = prepare(&r, context, &bump, &bytes);
        if (!status && bytes > SIZE_MAX / 2 - own)
            status = attn__fail_bytes(call_attend);
        if (status || own + bytes <= attn__scratch_bytes(work))
            break;
        attn__scratch_give(context, work);
    }
    if (!status)
        attn__sdpa_run(&context->executor, &r.sdpa,
                       (unsigned char *)work + own);
    attn__scratch_give(context, work);
    return status;
}
