/* Attention: from arguments to a checked problem. Nothing is computed here and
 * no data of a tensor is read. */
#include "attn_internal.h"

#include "sdpa.h"

#include "check.h"
#include "status.h"

#include <inttypes.h>
#include <math.h>

void attn_sdpa_params_init(attn_sdpa_params *params)
{
    static const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;

    if (params)
        *params = init;
}

/* -------------------------------------------------------------- Tensors -- */

/* A copy, with strides that can be multiplied: those of a tensor without
 * elements have not been checked, and may be anything. */
static attn_tensor usable(const attn_tensor *t)
{
    attn_tensor copy = *t;

    for (int a = 0; a < 4 && attn__count(t) == 0; a++)
        copy.stride[a] = 0;
    return copy;
}

static attn_status check_types(const char *call, const attn_tensor *q,
                               const attn_tensor *k, const attn_tensor *v,
                               const attn_tensor *out)
{
    attn_status status = attn__check_tensor(call, "q", q, 0);

    if (!status)
        status = attn__check_tensor(call, "k", k, q->dtype);
    if (!status)
        status = attn__check_tensor(call, "v", v, q->dtype);
    if (!status)
        status = attn__check_tensor(call, "out", out, q->dtype);
    return status;
}

static attn_status check_fit(const char *call, const attn_tensor *q,
                             const attn_tensor *k, const attn_tensor *v,
                             const attn_tensor *out)
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
    if (k->shape[0] != q->shape[0] || v->shape[0] != q->shape[0])
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
    return status ? status : attn__check_places(call, "out", out);
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

    if (!o->cu_q || !o->cu_k)
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
    if (o->q_lens || o->kv_lens)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.%s and cu_q are both given; lengths of "
                          "a ragged batch are in cu_q and cu_k",
                          call, o->q_lens ? "q_lens" : "kv_lens");
    status = check_cumulative(call, "cu_q", o->cu_q, o->num_seqs, p->q.shape[2],
                              &p->q_len);
    if (!status)
        status = check_cumulative(call, "cu_k", o->cu_k, o->num_seqs,
                                  p->k.shape[2], &p->kv_len);
    p->batch = o->num_seqs;
    p->cu_q = o->cu_q;
    p->cu_k = o->cu_k;
    return status;
}

/* Causal, window and chunk need to know where queries stand. */
static attn_status check_align(const char *call, const attn__sdpa *p)
{
    const attn__visibility *v = &p->visibility;

    if (p->align != 0 || !(v->causal || v->window || v->chunk > 0))
        return ATTN_OK;
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

/* What the interface names and this version does not compute yet. */
static attn_status check_planned(const char *call, const attn_sdpa_params *o)
{
    const struct {
        const char *name;
        bool given;
    } fields[] = {{"softcap", o->softcap != 0.0},
                  {"alibi", o->alibi},
                  {"sinks", o->sinks},
                  {"kv_starts", o->kv_starts},
                  {"q_segments", o->q_segments},
                  {"kv_segments", o->kv_segments},
                  {"blocks", o->blocks},
                  {"block_q", o->block_q != 0},
                  {"block_k", o->block_k != 0},
                  {"page_table", o->page_table},
                  {"pages_per_seq", o->pages_per_seq != 0},
                  {"ring_starts", o->ring_starts},
                  {"kv_offsets", o->kv_offsets},
                  {"scores_raw", o->scores_raw},
                  {"scores_capped", o->scores_capped},
                  {"scores", o->scores},
                  {"key_sums", o->key_sums},
                  {"max_weight", o->max_weight},
                  {"effective_keys", o->effective_keys},
                  {"entropy", o->entropy}};

    for (size_t a = 0; a < sizeof fields / sizeof fields[0]; a++)
        if (fields[a].given)
            return attn__fail(ATTN_ERR_UNSUPPORTED,
                              "%s: params.%s is given; this version cannot do "
                              "that yet",
                              call, fields[a].name);
    return ATTN_OK;
}

static attn_status read_params(const char *call, const attn_sdpa_params *params,
                               attn_sdpa_params *o, attn__sdpa *p)
{
    attn__visibility *v = &p->visibility;
    /* The first version ended before softcap. */
    attn_status status = attn__read_params(call, "params", o, sizeof *o, params,
                                           offsetof(attn_sdpa_params, softcap));

    if (!status)
        status = check_planned(call, o);
    if (!status)
        status = check_flags(call, o);
    if (!status)
        status = check_causal(call, o);
    if (status)
        return status;
    p->batch = p->q.shape[0];
    p->q_len = p->q.shape[2];
    p->kv_len = p->k.shape[2];
    if (o->cu_q || o->cu_k || o->num_seqs != 0)
        status = check_ragged(call, o, p);
    if (!status)
        status = check_lengths(call, "q_lens", o->q_lens, p->batch, p->q_len);
    if (!status)
        status =
            check_lengths(call, "kv_lens", o->kv_lens, p->batch, p->kv_len);
    if (!status)
        status = check_lengths(call, "prefix_lens", o->prefix_lens, p->batch,
                               p->kv_len);
    if (status)
        return status;
    p->q_lens = o->q_lens;
    p->kv_lens = o->kv_lens;
    p->prefix_lens = o->prefix_lens;
    p->align = o->align;
    p->blas_only = (o->flags & ATTN_SDPA_BLAS_ONLY) != 0;
    p->q_offset = o->q_offset;
    p->q_offsets = o->q_offsets;
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

/* An optional output: there if t is not NULL, then of this shape. */
static attn_status check_extra(const char *call, const char *name,
                               const attn_tensor *t, const attn__sdpa *p,
                               const char *meaning, const int64_t shape[4],
                               attn_tensor *copy, bool *wanted)
{
    attn_status status;

    *wanted = false;
    if (!t)
        return ATTN_OK;
    status = attn__check_tensor(call, name, t, p->q.dtype);
    if (!status)
        status = attn__check_shape(call, name, t, meaning, shape[0], shape[1],
                                   shape[2], shape[3]);
    if (!status)
        status = attn__check_places(call, name, t);
    if (status)
        return status;
    *copy = usable(t);
    *wanted = true;
    return ATTN_OK;
}

static attn_status check_extras(const char *call, const attn_sdpa_params *o,
                                attn__sdpa *p)
{
    attn_status status = check_extra(
        call, "params.lse", o->lse, p, "(B,Hq,Tq,1)",
        (const int64_t[4]){p->q.shape[0], p->heads, p->q.shape[2], 1}, &p->lse,
        &p->wants_lse);

    if (!status)
        status = check_extra(
            call, "params.weights", o->weights, p, "(B,Hq,Tq,Tk)",
            (const int64_t[4]){p->batch, p->heads, p->q_len, p->kv_len},
            &p->weights, &p->wants_weights);
    if (!status)
        status = check_extra(
            call, "params.weights_mean", o->weights_mean, p, "(B,1,Tq,Tk)",
            (const int64_t[4]){p->batch, 1, p->q_len, p->kv_len},
            &p->weights_mean, &p->wants_mean);
    return status;
}

/* One output against the masks and the arrays of lengths. */
static attn_status check_against_options(const char *call, const char *name,
                                         const attn_tensor *t,
                                         const attn__sdpa *p)
{
    const struct {
        const char *name;
        const int64_t *data;
        int64_t n;
    } arrays[] = {{"params.q_offsets", p->q_offsets, p->batch},
                  {"params.prefix_lens", p->prefix_lens, p->batch},
                  {"params.q_lens", p->q_lens, p->batch},
                  {"params.kv_lens", p->kv_lens, p->batch},
                  {"params.cu_q", p->cu_q, p->batch + 1},
                  {"params.cu_k", p->cu_k, p->batch + 1}};
    attn_status status = ATTN_OK;

    for (int32_t m = 0; m < p->visibility.num_masks && !status; m++)
        status = attn__check_overlap(call, name, t, "a mask", &p->masks[m].view,
                                     false);
    for (size_t a = 0; a < sizeof arrays / sizeof arrays[0] && !status; a++)
        status =
            attn__check_apart(call, name, t, arrays[a].name, arrays[a].data,
                              (size_t)arrays[a].n * sizeof(int64_t));
    return status;
}

attn_status attn__sdpa_check_overlaps(const char *call, const attn__sdpa *p,
                                      const attn_tensor *out, bool with_inputs)
{
    const attn__output outputs[] = {ATTN__SDPA_OUTPUTS(p, out)};
    const attn__output inputs[] = {{"q", &p->q}, {"k", &p->k}, {"v", &p->v}};
    /* A block reads its queries before it writes their rows, so q may be out,
     * unless it is read again for the weights. */
    bool out_may_be_q = !p->wants_weights && !p->wants_mean;
    attn_status status = ATTN_OK;

    for (int a = 0; a < 4; a++) {
        if (!outputs[a].t)
            continue;
        for (int i = 0; with_inputs && i < 3 && !status; i++)
            status = attn__check_overlap(call, outputs[a].name, outputs[a].t,
                                         inputs[i].name, inputs[i].t,
                                         a == 0 && i == 0 && out_may_be_q);
        if (!status)
            status =
                check_against_options(call, outputs[a].name, outputs[a].t, p);
        for (int b = a + 1; b < 4 && !status; b++)
            if (outputs[b].t)
                status =
                    attn__check_overlap(call, outputs[a].name, outputs[a].t,
                                        outputs[b].name, outputs[b].t, false);
    }
    return status;
}

/* -------------------------------------------------------------- Problem -- */

attn_status attn__sdpa_prepare(const char *call, const attn_context *context,
                               const attn_sdpa_params *params,
                               const attn_tensor *q, const attn_tensor *k,
                               const attn_tensor *v, const attn_tensor *out,
                               attn__sdpa *p)
{
    attn_sdpa_params o;
    attn_status status = check_types(call, q, k, v, out);

    *p = (attn__sdpa){0};
    if (!status)
        status = check_fit(call, q, k, v, out);
    if (status)
        return status;
    p->q = usable(q);
    p->k = usable(k);
    p->v = usable(v);
    p->out = usable(out);
    p->heads = q->shape[1];
    p->kv_heads = k->shape[1];
    p->group = p->kv_heads > 0 ? p->heads / p->kv_heads : 1;
    p->width = q->shape[3];
    p->v_width = v->shape[3];
    status = read_params(call, params, &o, p);
    if (!status)
        status = check_extras(call, &o, p);
    if (!status)
        status = attn__blas_check(call);
    if (status)
        return status;
    p->blas = attn__blas_policy();
    p->tile = attn__tile_for(&p->blas, q->dtype, MAX(p->width, p->v_width));
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
        *kv_row = p->cu_k[b];
        s.q_len = p->cu_q[b + 1] - *q_row;
        s.kv_len = p->cu_k[b + 1] - *kv_row;
    }
    if (p->q_lens)
        s.q_len = p->q_lens[b];
    if (p->kv_lens)
        s.kv_len = p->kv_lens[b];
    if (p->align == ATTN_ALIGN_BOTTOM_RIGHT)
        s.offset = s.kv_len - s.q_len;
    else if (p->align == ATTN_ALIGN_OFFSET)
        s.offset = p->q_offsets ? p->q_offsets[b] : p->q_offset;
    if (p->prefix_lens)
        s.prefix = p->prefix_lens[b];
    return s;
}

attn_status attn__check_work(const char *call, const attn__sdpa *p,
                             const attn_tensor *out, const void *work,
                             size_t work_bytes, size_t needed)
{
    const attn__output outputs[] = {ATTN__SDPA_OUTPUTS(p, out)};
    attn_status status = ATTN_OK;

    if (needed == 0)
        return ATTN_OK;
    if (!work)
        return attn__fail(ATTN_ERR_NULL,
                          "%s: work is NULL; %zu bytes are needed", call,
                          needed);
    if ((uintptr_t)work % ATTN__ALIGNMENT != 0)
        return attn__fail(ATTN_ERR_WORKSPACE,
                          "%s: work is %p, not a multiple of %d bytes", call,
                          work, ATTN__ALIGNMENT);
    if (work_bytes < needed)
        return attn__fail(ATTN_ERR_WORKSPACE,
                          "%s: work_bytes is %zu; %zu are needed", call,
                          work_bytes, needed);
    for (int a = 0; a < 4 && !status; a++)
        if (outputs[a].t)
            status = attn__check_apart(call, outputs[a].name, outputs[a].t,
                                       "work", work, needed);
    return status;
}
