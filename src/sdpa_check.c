/* Attention: from arguments to a checked problem. Nothing is computed here and
 * no data of a tensor is read. */
#include "attn_internal.h"

#include "sdpa.h"

#include "check.h"
#include "status.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

void attn_sdpa_params_init(attn_sdpa_params *params)
{
    static const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;

    if (params)
        *params = init;
}

/* -------------------------------------------------------------- Tensors -- */

attn_tensor attn__usable(const attn_tensor *t)
{
    attn_tensor copy = *t;

    for (int a = 0; a < 4; a++)
        if (t->shape[a] == 1 || attn__count(t) == 0)
            copy.stride[a] = 0;
    return copy;
}

/* k or v: of the type of q, or of 16 bits beside F32. */
static attn_status check_stored(const char *call, const char *name,
                                const attn_tensor *t, attn_dtype dtype)
{
    bool halved = t && dtype == ATTN_F32 &&
                  (t->dtype == ATTN_F16 || t->dtype == ATTN_BF16);

    return attn__check_tensor(call, name, t, halved ? t->dtype : dtype);
}

static attn_status check_types(const char *call, const attn_tensor *q,
                               const attn_tensor *k, const attn_tensor *v,
                               const attn_tensor *out)
{
    attn_status status = attn__check_tensor(call, "q", q, 0);

    if (!status)
        status = check_stored(call, "k", k, q->dtype);
    if (!status)
        status = check_stored(call, "v", v, q->dtype);
    if (!status && k->dtype != v->dtype)
        status = attn__fail(ATTN_ERR_TYPE,
                            "%s: k has dtype %s, v has dtype %s; they must be "
                            "stored alike",
                            call, attn__dtype_name(k->dtype),
                            attn__dtype_name(v->dtype));
    if (!status)
        status = attn__check_tensor(call, "out", out, q->dtype);
    return status;
}

/* paged: k and v are pools of pages, whose batch is their number. */
static attn_status check_fit(const char *call, const attn_tensor *q,
                             const attn_tensor *k, const attn_tensor *v,
                             const attn_tensor *out, bool paged, bool backward)
{
    attn_status status;

    if (k->shape[3] != q->shape[3])
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: k has width %" PRId64 ", q has width %" PRId64
                          "; q and k must have the same width (shape[3])",
                          call, k->shape[3], q->shape[3]);
    if (v->shape[2] != k->shape[2])
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: v has %" PRId64 " keys, k has %" PRId64
                          "; k and v must have the same length (shape[2])",
                          call, v->shape[2], k->shape[2]);
    if (paged && k->shape[0] != v->shape[0])
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: k has %" PRId64 " pages, v has %" PRId64
                          "; k and v must have the same pages (shape[0])",
                          call, k->shape[0], v->shape[0]);
    if (!paged && (k->shape[0] != q->shape[0] || v->shape[0] != q->shape[0]))
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: %s has batch %" PRId64 ", q has batch %" PRId64
                          "; q, k and v must have the same batch (shape[0])",
                          call, k->shape[0] != q->shape[0] ? "k" : "v",
                          k->shape[0] != q->shape[0] ? k->shape[0]
                                                     : v->shape[0],
                          q->shape[0]);
    if (v->shape[1] != k->shape[1])
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: v has %" PRId64 " heads, k has %" PRId64
                          "; k and v must have the same heads (shape[1])",
                          call, v->shape[1], k->shape[1]);
    if (k->shape[1] == 0 ? q->shape[1] != 0 : q->shape[1] % k->shape[1] != 0)
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: q has %" PRId64 " heads, k and v have %" PRId64
                          "; the query heads must be a multiple of the "
                          "key/value heads (shape[1])",
                          call, q->shape[1], k->shape[1]);
    status = attn__check_shape(call, "out", out, "(B,Hq,Tq,Dv)", q->shape[0],
                               q->shape[1], q->shape[2], v->shape[3]);
    return status || backward ? status : attn__check_places(call, "out", out);
}

/* ----------------------------------------------------------- Parameters -- */

static attn_status check_flags(const char *call, const attn_sdpa_params *o)
{
    const int32_t known =
        ATTN_SDPA_SCALE | ATTN_SDPA_WINDOW | ATTN_SDPA_BLAS_ONLY;

    if (o->flags & ~known)
        return attn__fail(ATTN_ERR_UNSUPPORTED,
                          "%s: params.flags is 0x%" PRIx32
                          "; this version knows 0x%" PRIx32,
                          call, (uint32_t)o->flags, (uint32_t)known);
    if (!(o->flags & ATTN_SDPA_SCALE) && o->scale != 0.0)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.scale is %g, but the flag "
                          "ATTN_SDPA_SCALE that says so is not set",
                          call, o->scale);
    if (!isfinite(o->scale))
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.scale is %g; it must be finite", call,
                          o->scale);
    if (!(o->flags & ATTN_SDPA_WINDOW) &&
        (o->window_left != 0 || o->window_right != 0 || o->keep_first != 0))
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.window_left is %" PRId64
                          ", window_right %" PRId64 ", keep_first %" PRId64
                          ", but the flag ATTN_SDPA_WINDOW is not set",
                          call, o->window_left, o->window_right, o->keep_first);
    if (o->window_left < -1 || o->window_right < -1)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.window_left is %" PRId64
                          ", window_right %" PRId64
                          "; bounds are >= 0, or -1 for unbounded",
                          call, o->window_left, o->window_right);
    if (o->keep_first < 0)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.keep_first is %" PRId64
                          "; it must not be negative",
                          call, o->keep_first);
    if (!(o->softcap >= 0.0) || isinf(o->softcap))
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.softcap is %g; it must be positive and "
                          "finite, or 0 for none",
                          call, o->softcap);
    if (o->chunk < 0)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.chunk is %" PRId64
                          "; it must be positive, or 0 for none",
                          call, o->chunk);
    return ATTN_OK;
}

static attn_status check_causal(const char *call, const attn_sdpa_params *o)
{
    if (o->causal != 0 && o->causal != 1)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.causal is %" PRId32
                          "; it must be 0 or 1 (the alignment is params.align)",
                          call, o->causal);
    if (o->align < 0 || o->align > ATTN_ALIGN_OFFSET)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.align is %" PRId32
                          "; it must be ATTN_ALIGN_TOP_LEFT (1), "
                          "ATTN_ALIGN_BOTTOM_RIGHT (2) or ATTN_ALIGN_OFFSET "
                          "(3), or 0 if queries and keys are equally many",
                          call, o->align);
    if (o->align != ATTN_ALIGN_OFFSET && (o->q_offset != 0 || o->q_offsets))
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.%s is set, but align is %" PRId32
                          "; offsets need align = ATTN_ALIGN_OFFSET (3)",
                          call, o->q_offsets ? "q_offsets" : "q_offset",
                          o->align);
    if (o->q_offsets && o->q_offset != 0)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.q_offset is %" PRId64
                          " and q_offsets is given too; give one of them",
                          call, o->q_offset);
    if (o->prefix_lens && !o->causal)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.prefix_lens is given, but causal is 0; "
                          "without causal all keys are visible anyway",
                          call);
    return ATTN_OK;
}

/* Each of values[0..n) in [0, most]. */
static attn_status check_lengths(const char *call, const char *name,
                                 const int64_t *values, int64_t n, int64_t most)
{
    for (int64_t b = 0; values && b < n; b++)
        if (values[b] < 0 || values[b] > most)
            return attn__fail(ATTN_ERR_VALUE,
                              "%s: params.%s[%" PRId64 "] is %" PRId64
                              "; it must be in [0, %" PRId64 "]",
                              call, name, b, values[b], most);
    return ATTN_OK;
}

/* Where keys have positions of their own, the distance of a query from a key
 * must be a number, as must be the start of its chunk. */
#define FARTHEST (((int64_t)1 << 62) - 1)

static attn_status check_positions(const char *call, const char *name,
                                   const int64_t *values, int64_t n)
{
    for (int64_t b = 0; values && b < n; b++)
        if (values[b] < -FARTHEST || values[b] > FARTHEST)
            return attn__fail(ATTN_ERR_VALUE,
                              "%s: params.%s[%" PRId64 "] is %" PRId64
                              "; with kv_offsets positions must be in "
                              "(-2^62, 2^62)",
                              call, name, b, values[b]);
    return ATTN_OK;
}

static attn_status check_kv_offsets(const char *call, const attn_sdpa_params *o,
                                    int64_t batch)
{
    attn_status status =
        check_positions(call, "kv_offsets", o->kv_offsets, batch);

    if (!status && o->kv_offsets)
        status = check_positions(call, "q_offsets", o->q_offsets, batch);
    if (!status && o->kv_offsets &&
        (o->q_offset < -FARTHEST || o->q_offset > FARTHEST))
        status = attn__fail(ATTN_ERR_VALUE,
                            "%s: params.q_offset is %" PRId64
                            "; with kv_offsets positions must be in "
                            "(-2^62, 2^62)",
                            call, o->q_offset);
    return status;
}

/* cu[0..n] non-decreasing in [0, most]; *longest is the largest step. */
static attn_status check_cumulative(const char *call, const char *name,
                                    const int64_t *cu, int64_t n, int64_t most,
                                    int64_t *longest)
{
    attn_status status = check_lengths(call, name, cu, n + 1, most);

    *longest = 0;
    for (int64_t s = 0; s < n && !status; s++) {
        if (cu[s + 1] < cu[s])
            return attn__fail(ATTN_ERR_VALUE,
                              "%s: params.%s[%" PRId64 "] is %" PRId64
                              ", after %" PRId64 "; it must not decrease",
                              call, name, s + 1, cu[s + 1], cu[s]);
        *longest = MAX(*longest, cu[s + 1] - cu[s]);
    }
    return status;
}

static attn_status check_ragged(const char *call, const attn_sdpa_params *o,
                                attn__sdpa *p)
{
    attn_status status;

    if (!o->cu_q || (!o->cu_k && !o->page_table))
        return attn__fail(ATTN_ERR_NULL,
                          "%s: params.%s is NULL, but %s is given; a ragged "
                          "batch needs cu_q and cu_k",
                          call, o->cu_q ? "cu_k" : "cu_q",
                          o->cu_q   ? "cu_q"
                          : o->cu_k ? "cu_k"
                                    : "num_seqs");
    if (o->num_seqs < 0)
        return attn__fail(ATTN_ERR_SIZE,
                          "%s: params.num_seqs is %" PRId64
                          "; it must not be negative",
                          call, o->num_seqs);
    if (p->q.shape[0] != 1)
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: q has batch %" PRId64
                          ", but cu_q is given; a ragged batch is (1,H,T,D)",
                          call, p->q.shape[0]);
    if (o->q_lens || (o->kv_lens && !o->page_table))
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.%s and cu_q are both given; lengths of "
                          "a ragged batch are in cu_q and cu_k",
                          call, o->q_lens ? "q_lens" : "kv_lens");
    status = check_cumulative(call, "cu_q", o->cu_q, o->num_seqs, p->q.shape[2],
                              &p->q_len);
    if (!status && o->cu_k)
        status = check_cumulative(call, "cu_k", o->cu_k, o->num_seqs,
                                  p->k.shape[2], &p->kv_len);
    p->batch = o->num_seqs;
    p->cu_q = o->cu_q;
    p->cu_k = o->cu_k;
    return status;
}

/* Causal, window, chunk and ALiBi need to know where queries stand. */
static attn_status check_align(const char *call, const attn__sdpa *p)
{
    const attn__visibility *v = &p->visibility;

    if (p->align != 0 ||
        !(v->causal || v->window || v->chunk > 0 || p->alibi.data))
        return ATTN_OK;
    if (p->kv_offsets)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.align is 0, but kv_offsets is given; say "
                          "where the queries stand: ATTN_ALIGN_TOP_LEFT, "
                          "ATTN_ALIGN_BOTTOM_RIGHT or ATTN_ALIGN_OFFSET",
                          call);
    for (int64_t b = 0; b < p->batch; b++) {
        int64_t q_row, kv_row;
        attn__sequence s = attn__sdpa_sequence(p, b, &q_row, &kv_row);
        if (s.q_len != s.kv_len)
            return attn__fail(ATTN_ERR_VALUE,
                              "%s: params.align is 0, but sequence %" PRId64
                              " has %" PRId64 " queries and %" PRId64
                              " keys; say where the queries stand: "
                              "ATTN_ALIGN_TOP_LEFT, ATTN_ALIGN_BOTTOM_RIGHT or "
                              "ATTN_ALIGN_OFFSET",
                              call, b, s.q_len, s.kv_len);
        if (!p->cu_q && !p->q_lens && !p->kv_lens)
            break; /* all alike */
    }
    return ATTN_OK;
}

/* Slopes or sinks: (1,1,1,Hq), or (B,Hq,1,1). */
static attn_status check_per_head(const char *call, const char *name,
                                  const attn_tensor *t, const attn__sdpa *p,
                                  attn__per_head *of)
{
    attn_status status;
    const int64_t *n;

    if (!t)
        return ATTN_OK;
    status = attn__check_tensor(call, name, t, p->q.dtype);
    if (status)
        return status;
    n = t->shape;
    if (n[0] == 1 && n[1] == 1 && n[2] == 1 && n[3] == p->heads) {
        of->h_stride = t->stride[3];
    } else if (n[0] == p->batch && n[1] == p->heads && n[2] == 1 && n[3] == 1) {
        of->b_stride = t->stride[0];
        of->h_stride = t->stride[1];
    } else {
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: %s has shape (%" PRId64 ",%" PRId64 ",%" PRId64
                          ",%" PRId64 "); it must be (1,1,1,Hq) or (B,Hq,1,1), "
                          "Hq = %" PRId64 ", B = %" PRId64,
                          call, name, n[0], n[1], n[2], n[3], p->heads,
                          p->batch);
    }
    if (attn__count(t) == 0) {
        of->b_stride = 0;
        of->h_stride = 0;
    }
    of->data = t->data;
    return ATTN_OK;
}

static attn_status check_segments(const char *call, const attn_sdpa_params *o,
                                  attn__sdpa *p)
{
    if (!o->q_segments && !o->kv_segments)
        return ATTN_OK;
    if (!o->q_segments || !o->kv_segments)
        return attn__fail(ATTN_ERR_NULL,
                          "%s: params.%s is NULL, but %s is given; segments "
                          "need both",
                          call, o->q_segments ? "kv_segments" : "q_segments",
                          o->q_segments ? "q_segments" : "kv_segments");
    p->q_segments = o->q_segments;
    p->kv_segments = o->kv_segments;
    p->visibility.segments = true;
    return ATTN_OK;
}

static attn_status check_blocks(const char *call, const attn_sdpa_params *o,
                                attn__sdpa *p)
{
    static const char *const letters[] = {"B", "Hq", "Tq/block_q",
                                          "Tk/block_k"};
    const attn_tensor *t = o->blocks;
    attn__block_map *m = &p->visibility.blocks;
    int64_t shape[4];
    attn_status status;

    if (!t && o->block_q == 0 && o->block_k == 0)
        return ATTN_OK;
    if (!t)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.block_q is %" PRId64 ", block_k %" PRId64
                          ", but blocks is NULL",
                          call, o->block_q, o->block_k);
    if (o->block_q <= 0 || o->block_k <= 0)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.block_q is %" PRId64 ", block_k %" PRId64
                          "; with blocks both must be positive",
                          call, o->block_q, o->block_k);
    status = attn__check_tensor(call, "params.blocks", t, ATTN_U8);
    if (status)
        return status;
    shape[0] = p->batch;
    shape[1] = p->heads;
    shape[2] = attn__ceil_div(p->q_len, o->block_q);
    shape[3] = attn__ceil_div(p->kv_len, o->block_k);
    for (int a = 0; a < 4; a++) {
        if (t->shape[a] != shape[a] && (a > 1 || t->shape[a] != 1))
            return attn__fail(ATTN_ERR_SHAPE,
                              "%s: params.blocks has shape[%d] = %" PRId64
                              "; it must be %s%s = %" PRId64 "%s",
                              call, a, t->shape[a], letters[a],
                              a > 1 ? ", rounded up," : "", shape[a],
                              a > 1 ? "" : " or 1 (broadcast)");
        m->stride[a] =
            t->shape[a] == 1 || attn__count(t) == 0 ? 0 : t->stride[a];
    }
    m->data = t->data;
    m->block_q = o->block_q;
    /* One block of all keys is the largest there is. */
    m->block_k = MIN(o->block_k, MAX(p->kv_len, 1));
    p->block_map = t;
    return ATTN_OK;
}

/* Entries of the table where a sequence has keys. */
static attn_status check_page_entries(const char *call, const attn__sdpa *p)
{
    for (int64_t b = 0; b < p->batch; b++) {
        int64_t begin = p->kv_starts ? p->kv_starts[b] : 0;
        const int32_t *pages = p->page_table + b * p->pages_per_seq;
        for (int64_t key = begin; key < p->kv_lens[b];
             key += p->page_rows - key % p->page_rows) {
            int64_t a = key / p->page_rows;
            if (pages[a] < 0 || pages[a] >= p->k.shape[0])
                return attn__fail(
                    ATTN_ERR_VALUE,
                    "%s: params.page_table[%" PRId64 "] is %" PRId32
                    "; keys %" PRId64 " to %" PRId64 " of sequence %" PRId64
                    " are there, so it must be in [0, %" PRId64 "), the pages "
                    "of k and v",
                    call, b * p->pages_per_seq + a, pages[a], key,
                    MIN(p->kv_lens[b], (a + 1) * p->page_rows) - 1, b,
                    p->k.shape[0]);
        }
    }
    return ATTN_OK;
}

/* Keys in pages: the sizes, before anything is known about lengths. */
static attn_status check_paging(const char *call, const attn_sdpa_params *o,
                                attn__sdpa *p)
{
    int64_t entries;

    if (!o->page_table && o->pages_per_seq != 0)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.pages_per_seq is %" PRId64
                          ", but page_table is NULL",
                          call, o->pages_per_seq);
    if (!o->page_table)
        return ATTN_OK;
    if (o->pages_per_seq < 0 ||
        !attn__mul_i64(o->pages_per_seq, p->k.shape[2], &p->kv_len) ||
        !attn__mul_i64(o->pages_per_seq, MAX(p->batch, 1), &entries) ||
        !attn__mul_i64(p->kv_len, MAX(p->batch, 1), &entries))
        return attn__fail(ATTN_ERR_SIZE,
                          "%s: params.pages_per_seq is %" PRId64
                          "; it must not be negative, and it times the "
                          "%" PRId64 " keys of a page times the %" PRId64
                          " sequences representable",
                          call, o->pages_per_seq, p->k.shape[2], p->batch);
    if (o->cu_k || o->ring_starts)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.page_table and %s are both given; keys "
                          "are in pages or not",
                          call, o->cu_k ? "cu_k" : "ring_starts");
    if (!o->kv_lens && p->batch > 0)
        return attn__fail(ATTN_ERR_NULL,
                          "%s: params.kv_lens is NULL; with page_table it says "
                          "how many keys each sequence has",
                          call);
    p->page_table = o->page_table;
    p->pages_per_seq = o->pages_per_seq;
    p->page_rows = p->k.shape[2];
    return ATTN_OK;
}

static attn_status check_ring(const char *call, const attn_sdpa_params *o,
                              attn__sdpa *p)
{
    if (o->ring_starts && o->cu_k)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.ring_starts and cu_k are both given; "
                          "keys of a ragged batch are not in a ring",
                          call);
    p->ring_starts = o->ring_starts;
    return check_lengths(call, "ring_starts", o->ring_starts, p->batch,
                         MAX(p->kv_len - 1, 0));
}

/* Keys of a sequence at most: twice as many are a number, as a key after the
 * start of a ring, the end of a block and that of a tile must be. Memory has
 * room for fewer, but a stride of 0 needs none. */
#define MOST_KEYS (INT64_MAX / 4)

/* The arrays that say which rows are there; the sizes of the problem. */
static attn_status check_rows(const char *call, const attn_sdpa_params *o,
                              attn__sdpa *p)
{
    attn_status status = ATTN_OK;

    p->batch = p->q.shape[0];
    p->q_len = p->q.shape[2];
    p->kv_len = p->k.shape[2];
    if (o->cu_q || o->cu_k || o->num_seqs != 0)
        status = check_ragged(call, o, p);
    if (!status)
        status = check_paging(call, o, p);
    if (!status && p->kv_len > MOST_KEYS)
        status = attn__fail(ATTN_ERR_SIZE,
                            "%s: k has %" PRId64
                            " keys; a sequence has at most %" PRId64,
                            call, p->kv_len, MOST_KEYS);
    if (!status)
        status = check_lengths(call, "q_lens", o->q_lens, p->batch, p->q_len);
    if (!status)
        status =
            check_lengths(call, "kv_lens", o->kv_lens, p->batch, p->kv_len);
    if (!status)
        status =
            check_lengths(call, "kv_starts", o->kv_starts, p->batch, p->kv_len);
    /* Where keys have positions of their own, so has the prefix. */
    if (!status)
        status = check_lengths(call, "prefix_lens", o->prefix_lens, p->batch,
                               o->kv_offsets ? INT64_MAX : p->kv_len);
    if (!status)
        status = check_kv_offsets(call, o, p->batch);
    if (!status)
        status = check_ring(call, o, p);
    p->q_lens = o->q_lens;
    p->kv_lens = o->kv_lens;
    p->kv_starts = o->kv_starts;
    p->kv_offsets = o->kv_offsets;
    p->prefix_lens = o->prefix_lens;
    if (!status && p->page_table)
        status = check_page_entries(call, p);
    return status;
}

static attn_status read_params(const char *call, const attn_sdpa_params *o,
                               attn__sdpa *p)
{
    attn__visibility *v = &p->visibility;
    attn_status status = check_flags(call, o);

    if (!status)
        status = check_causal(call, o);
    if (!status)
        status = check_rows(call, o, p);
    if (!status)
        status = check_per_head(call, "params.alibi", o->alibi, p, &p->alibi);
    if (!status)
        status = check_per_head(call, "params.sinks", o->sinks, p, &p->sinks);
    if (!status)
        status = check_segments(call, o, p);
    if (!status)
        status = check_blocks(call, o, p);
    if (status)
        return status;
    p->slopes = o->alibi;
    p->sink_logits = o->sinks;
    p->align = o->align;
    p->blas_only = (o->flags & ATTN_SDPA_BLAS_ONLY) != 0;
    p->q_offset = o->q_offset;
    p->q_offsets = o->q_offsets;
    p->softcap = o->softcap;
    p->scale = o->scale;
    if (!(o->flags & ATTN_SDPA_SCALE))
        p->scale = p->width > 0 ? 1.0 / sqrt((double)p->width) : 1.0;
    p->masks = o->masks;
    v->causal = o->causal;
    v->window = (o->flags & ATTN_SDPA_WINDOW) != 0;
    v->left = o->window_left;
    v->right = o->window_right;
    v->keep_first = o->keep_first;
    v->chunk = o->chunk;
    status = check_align(call, p);
    if (!status)
        status = attn__check_masks(
            call, "masks", o->masks, o->num_masks, p->q.dtype,
            (const int64_t[4]){p->batch, p->heads, p->q_len, p->kv_len}, v);
    return status;
}

/* -------------------------------------------------------------- Outputs -- */

/* The optional outputs: the sizes are those of one of four kinds. */
typedef enum extra_kind { BY_ROW, BY_SCORE, BY_SCORE_MEAN, BY_KEY } extra_kind;

static const struct {
    const char *name, *meaning;
    size_t at; /* of the pointer in the parameters */
    extra_kind kind;
} extras[ATTN__EXTRAS] = {
#define AT(member) offsetof(attn_sdpa_params, member)
    [ATTN__LSE] = {"params.lse", "(B,Hq,Tq,1)", AT(lse), BY_ROW},
    [ATTN__WEIGHTS] = {"params.weights", "(B,Hq,Tq,Tk)", AT(weights), BY_SCORE},
    [ATTN__WEIGHTS_MEAN] = {"params.weights_mean", "(B,1,Tq,Tk)",
                            AT(weights_mean), BY_SCORE_MEAN},
    [ATTN__SCORES_RAW] = {"params.scores_raw", "(B,Hq,Tq,Tk)", AT(scores_raw),
                          BY_SCORE},
    [ATTN__SCORES_CAPPED] = {"params.scores_capped", "(B,Hq,Tq,Tk)",
                             AT(scores_capped), BY_SCORE},
    [ATTN__SCORES] = {"params.scores", "(B,Hq,Tq,Tk)", AT(scores), BY_SCORE},
    [ATTN__KEY_SUMS] = {"params.key_sums", "(B,Hq,1,Tk)", AT(key_sums), BY_KEY},
    [ATTN__MAX_WEIGHT] = {"params.max_weight", "(B,Hq,Tq,1)", AT(max_weight),
                          BY_ROW},
    [ATTN__EFFECTIVE_KEYS] = {"params.effective_keys", "(B,Hq,Tq,1)",
                              AT(effective_keys), BY_ROW},
    [ATTN__ENTROPY] = {"params.entropy", "(B,Hq,Tq,1)", AT(entropy), BY_ROW},
#undef AT
};

static attn_status check_extra(const char *call, int a, const attn_tensor *t,
                               bool backward, attn__sdpa *p)
{
    const int64_t shapes[][4] = {
        [BY_ROW] = {p->q.shape[0], p->heads, p->q.shape[2], 1},
        [BY_SCORE] = {p->batch, p->heads, p->q_len, p->kv_len},
        [BY_SCORE_MEAN] = {p->batch, 1, p->q_len, p->kv_len},
        [BY_KEY] = {p->batch, p->heads, 1, p->kv_len}};
    const int64_t *shape = shapes[extras[a].kind];
    const char *name = extras[a].name;
    attn_status status = attn__check_tensor(call, name, t, p->q.dtype);

    if (!status)
        status = attn__check_shape(call, name, t, extras[a].meaning, shape[0],
                                   shape[1], shape[2], shape[3]);
    if (!status && !backward)
        status = attn__check_places(call, name, t);
    if (status)
        return status;
    p->extra[a] = attn__usable(t);
    p->wants[a] = true;
    return ATTN_OK;
}

static attn_status check_extras(const char *call, const attn_sdpa_params *o,
                                bool backward, attn__sdpa *p)
{
    attn_status status = ATTN_OK;

    for (int a = 0; a < ATTN__EXTRAS && !status; a++) {
        const attn_tensor *t;
        memcpy(&t, (const unsigned char *)o + extras[a].at, sizeof(void *));
        if (t)
            status = check_extra(call, a, t, backward, p);
    }
    return status;
}

int attn__sdpa_outputs(const attn__sdpa *p, const attn_tensor *out,
                       attn__output outputs[ATTN__EXTRAS + 1])
{
    int n = 0;

    outputs[n++] = (attn__output){"out", out};
    for (int a = 0; a < ATTN__EXTRAS; a++)
        if (p->wants[a])
            outputs[n++] = (attn__output){extras[a].name, &p->extra[a]};
    return n;
}

/* Rows of q, or of k, over all sequences: those that have a segment. */
static int64_t segment_rows(const attn__sdpa *p, const int64_t *cu,
                            const attn_tensor *t, int64_t len)
{
    return cu ? t->shape[2] : p->batch * len;
}

attn_status attn__check_against_options(const char *call, const char *name,
                                        const attn_tensor *t,
                                        const attn__sdpa *p)
{
    const int64_t q_rows = segment_rows(p, p->cu_q, &p->q, p->q_len);
    const int64_t kv_rows = segment_rows(p, p->cu_k, &p->k, p->kv_len);
    const struct {
        const char *name;
        const void *data;
        int64_t n;
        size_t bytes;
    } arrays[] = {
        {"params.q_offsets", p->q_offsets, p->batch, sizeof(int64_t)},
        {"params.prefix_lens", p->prefix_lens, p->batch, sizeof(int64_t)},
        {"params.q_lens", p->q_lens, p->batch, sizeof(int64_t)},
        {"params.kv_lens", p->kv_lens, p->batch, sizeof(int64_t)},
        {"params.kv_starts", p->kv_starts, p->batch, sizeof(int64_t)},
        {"params.kv_offsets", p->kv_offsets, p->batch, sizeof(int64_t)},
        {"params.ring_starts", p->ring_starts, p->batch, sizeof(int64_t)},
        {"params.cu_q", p->cu_q, p->batch + 1, sizeof(int64_t)},
        {"params.cu_k", p->cu_k, p->batch + 1, sizeof(int64_t)},
        {"params.q_segments", p->q_segments, q_rows, sizeof(int32_t)},
        {"params.kv_segments", p->kv_segments, kv_rows, sizeof(int32_t)},
        {"params.page_table", p->page_table, p->batch * p->pages_per_seq,
         sizeof(int32_t)}};
    const attn__output tensors[] = {{"params.alibi", p->slopes},
                                    {"params.sinks", p->sink_logits},
                                    {"params.blocks", p->block_map}};
    attn_status status = ATTN_OK;

    for (int32_t m = 0; m < p->visibility.num_masks && !status; m++)
        status = attn__check_overlap(call, name, t, "a mask", &p->masks[m].view,
                                     false);
    for (size_t a = 0; a < sizeof tensors / sizeof tensors[0] && !status; a++)
        if (tensors[a].t)
            status = attn__check_overlap(call, name, t, tensors[a].name,
                                         tensors[a].t, false);
    for (size_t a = 0; a < sizeof arrays / sizeof arrays[0] && !status; a++)
        if (arrays[a].data)
            status =
                attn__check_apart(call, name, t, arrays[a].name, arrays[a].data,
                                  (size_t)arrays[a].n * arrays[a].bytes);
    return status;
}

attn_status attn__sdpa_check_overlaps(const char *call, const attn__sdpa *p,
                                      const attn_tensor *out, bool with_inputs)
{
    attn__output outputs[ATTN__EXTRAS + 1];
    const attn__output inputs[] = {{"q", &p->q}, {"k", &p->k}, {"v", &p->v}};
    /* A block reads its queries before it writes their rows, so q may be out,
     * unless it is read again. */
    bool out_may_be_q = !attn__wants_stats(p) && !attn__wants_scores(p);
    attn_status status = ATTN_OK;
    int n = attn__sdpa_outputs(p, out, outputs);

    for (int a = 0; a < n && !status; a++) {
        for (int i = 0; with_inputs && i < 3 && !status; i++)
            status = attn__check_overlap(call, outputs[a].name, outputs[a].t,
                                         inputs[i].name, inputs[i].t,
                                         a == 0 && i == 0 && out_may_be_q);
        if (!status)
            status = attn__check_against_options(call, outputs[a].name,
                                                 outputs[a].t, p);
        for (int b = a + 1; b < n && !status; b++)
            status = attn__check_overlap(call, outputs[a].name, outputs[a].t,
                                         outputs[b].name, outputs[b].t, false);
    }
    return status;
}

/* -------------------------------------------------------------- Problem -- */

attn_status attn__sdpa_prepare(const char *call, const attn_context *context,
                               const attn_sdpa_params *params,
                               const attn_tensor *q, const attn_tensor *k,
                               const attn_tensor *v, const attn_tensor *out,
                               bool backward, attn__sdpa *p)
{
    attn_sdpa_params o;
    attn_status status = check_types(call, q, k, v, out);

    *p = (attn__sdpa){0};
    if (!status)
        status = attn__read_params(call, "params", &o, sizeof o, params,
                                   ATTN__SDPA_PARAMS_FIRST);
    if (!status)
        status = check_fit(call, q, k, v, out, o.page_table != NULL, backward);
    if (status)
        return status;
    p->q = attn__usable(q);
    p->k = attn__usable(k);
    p->v = attn__usable(v);
    p->out = attn__usable(out);
    p->heads = q->shape[1];
    p->kv_heads = k->shape[1];
    p->group = p->kv_heads > 0 ? p->heads / p->kv_heads : 1;
    p->width = q->shape[3];
    p->v_width = v->shape[3];
    status = read_params(call, &o, p);
    if (!status)
        status = check_extras(call, &o, backward, p);
    if (!status)
        status = attn__blas_check(call);
    if (status)
        return status;
    p->blas = attn__blas_policy();
    p->tile =
        attn__tile_for(&p->blas, q->dtype, MAX(p->width, p->v_width), backward);
    p->most_keys = attn__tile_keys(&p->blas, q->dtype, backward);
    p->threads = 1;
    if (!p->blas.exclusive)
        p->threads = attn__threads_for(
            attn__context(context)->executor.num_threads,
            (double)p->batch * (double)p->heads * (double)p->q_len *
                (double)p->kv_len * (double)(p->width + p->v_width));
    return ATTN_OK;
}

attn__sequence attn__sdpa_sequence(const attn__sdpa *p, int64_t b,
                                   int64_t *q_row, int64_t *kv_row)
{
    attn__sequence s = {.b = b, .q_len = p->q_len, .kv_len = p->kv_len};

    *q_row = 0;
    *kv_row = 0;
    if (p->cu_q) {
        *q_row = p->cu_q[b];
        s.q_len = p->cu_q[b + 1] - *q_row;
    }
    if (p->cu_k) {
        *kv_row = p->cu_k[b];
        s.kv_len = p->cu_k[b + 1] - *kv_row;
    }
    if (p->q_lens)
        s.q_len = p->q_lens[b];
    if (p->kv_lens)
        s.kv_len = p->kv_lens[b];
    if (p->kv_starts)
        s.kv_begin = MIN(p->kv_starts[b], s.kv_len);
    if (p->kv_offsets)
        s.origin = p->kv_offsets[b];
    if (p->align == ATTN_ALIGN_BOTTOM_RIGHT)
        s.offset = s.kv_len - s.q_len;
    else if (p->align == ATTN_ALIGN_OFFSET)
        s.offset = attn__clamped_sum(
            p->q_offsets ? p->q_offsets[b] : p->q_offset, -s.origin);
    /* 0 is no prefix, also where keys stand below position 0. */
    if (p->prefix_lens && p->prefix_lens[b] > 0)
        s.prefix = attn__clamped_sum(p->prefix_lens[b], -s.origin);
    if (p->q_segments) {
        s.q_segments = p->q_segments + (p->cu_q ? *q_row : b * p->q_len);
        s.kv_segments = p->kv_segments + (p->cu_k ? *kv_row : b * p->kv_len);
    }
    return s;
}

attn_status attn__check_work(const char *call, const attn__sdpa *p,
                             const attn_tensor *out, const void *work,
                             size_t work_bytes, size_t needed)
{
    attn__output outputs[ATTN__EXTRAS + 1];
    attn_status status = attn__check_scratch(call, work, work_bytes, needed);
    int n = attn__sdpa_outputs(p, out, outputs);

    for (int a = 0; a < n && needed > 0 && !status; a++)
        status = attn__check_apart(call, outputs[a].name, outputs[a].t, "work",
                                   work, needed);
    return status;
}
