/* Attention: the public calls, which check, find scratch memory and run. */
#include "attn_internal.h"

#include "sdpa.h"

#include "check.h"
#include "status.h"

attn_status attn__fail_bytes(const char *call)
{
    return attn__fail(ATTN_ERR_SIZE,
                      "%s: the scratch memory for these sizes cannot be "
                      "addressed",
                      call);
}

static attn_status fail_memory(const char *call, size_t bytes)
{
    return attn__fail(ATTN_ERR_NOMEM, "%s: no memory for %zu bytes of scratch",
                      call, bytes);
}

/* Where the workspace calls answer. */
static attn_status check_answers(const char *call, const size_t *bytes,
                                 const size_t *alignment)
{
    if (bytes && alignment)
        return ATTN_OK;
    return attn__fail(ATTN_ERR_NULL, "%s: %s is NULL", call,
                      bytes ? "alignment" : "bytes");
}

static attn_status answer(size_t needed, size_t *bytes, size_t *alignment)
{
    *bytes = needed;
    *alignment = ATTN__ALIGNMENT;
    return ATTN_OK;
}

/* The whole check, and how much scratch memory it takes. */
static attn_status prepare(const char *call, const attn_context *context,
                           const attn_sdpa_params *params, const attn_tensor *q,
                           const attn_tensor *k, const attn_tensor *v,
                           const attn_tensor *out, attn__sdpa *p, size_t *bytes)
{
    attn_status status =
        attn__sdpa_prepare(call, context, params, q, k, v, out, false, p);

    if (!status)
        status = attn__sdpa_check_overlaps(call, p, &p->out, true);
    if (status)
        return status;
    *bytes = attn__sdpa_bytes(p);
    return *bytes == SIZE_MAX ? attn__fail_bytes(call) : ATTN_OK;
}

attn_status attn_sdpa_check(const attn_context *context,
                            const attn_sdpa_params *params,
                            const attn_tensor *q, const attn_tensor *k,
                            const attn_tensor *v, const attn_tensor *out)
{
    attn__sdpa p;
    size_t bytes;

    return prepare("attn_sdpa_check", context, params, q, k, v, out, &p,
                   &bytes);
}

attn_status attn_sdpa_workspace(const attn_context *context,
                                const attn_sdpa_params *params,
                                const attn_tensor *q, const attn_tensor *k,
                                const attn_tensor *v, const attn_tensor *out,
                                size_t *bytes, size_t *alignment)
{
    static const char call[] = "attn_sdpa_workspace";
    attn__sdpa p;
    attn_status status;
    size_t needed;

    status = check_answers(call, bytes, alignment);
    if (!status)
        status = prepare(call, context, params, q, k, v, out, &p, &needed);
    return status ? status : answer(needed, bytes, alignment);
}

attn_status attn_sdpa_work(const attn_context *context,
                           const attn_sdpa_params *params, const attn_tensor *q,
                           const attn_tensor *k, const attn_tensor *v,
                           const attn_tensor *out, void *work,
                           size_t work_bytes)
{
    static const char call[] = "attn_sdpa_work";
    attn__sdpa p;
    size_t needed;
    attn_status status =
        prepare(call, context, params, q, k, v, out, &p, &needed);

    if (!status)
        status = attn__check_work(call, &p, &p.out, work, work_bytes, needed);
    if (status)
        return status;
    attn__sdpa_run(&attn__context(context)->executor, &p, work);
    return ATTN_OK;
}

/* The allocating call, under the name the caller knows it by. */
static attn_status sdpa(const char *call, const attn_context *context,
                        const attn_sdpa_params *params, const attn_tensor *q,
                        const attn_tensor *k, const attn_tensor *v,
                        const attn_tensor *out)
{
    attn__sdpa p;
    void *work;
    size_t bytes;
    attn_status status =
        prepare(call, context, params, q, k, v, out, &p, &bytes);

    if (status)
        return status;
    context = attn__context(context);
    work = attn__scratch_take(context, bytes);
    if (!work)
        return fail_memory(call, bytes);
    attn__sdpa_run(&context->executor, &p, work);
    attn__scratch_give(context, work);
    return ATTN_OK;
}

attn_status attn_sdpa(const attn_context *context,
                      const attn_sdpa_params *params, const attn_tensor *q,
                      const attn_tensor *k, const attn_tensor *v,
                      const attn_tensor *out)
{
    return sdpa("attn_sdpa", context, params, q, k, v, out);
}

/* -------------------------------------------------------------- Backward -- */

static attn_status prepare_backward(
    const char *call, const attn_context *context,
    const attn_sdpa_params *params, const attn_tensor *q, const attn_tensor *k,
    const attn_tensor *v, const attn_tensor *out, const attn_tensor *d_out,
    const attn_sdpa_gradients *gradients, attn__backward *g, size_t *bytes)
{
    attn_status status = attn__backward_prepare(call, context, params, q, k, v,
                                                out, d_out, gradients, g);

    if (status)
        return status;
    *bytes = attn__backward_bytes(g);
    return *bytes == SIZE_MAX ? attn__fail_bytes(call) : ATTN_OK;
}

attn_status attn_sdpa_backward_check(const attn_context *context,
                                     const attn_sdpa_params *params,
                                     const attn_tensor *q, const attn_tensor *k,
                                     const attn_tensor *v,
                                     const attn_tensor *out,
                                     const attn_tensor *d_out,
                                     const attn_sdpa_gradients *gradients)
{
    attn__backward g;
    size_t bytes;

    return prepare_backward("attn_sdpa_backward_check", context, params, q, k,
                            v, out, d_out, gradients, &g, &bytes);
}

attn_status attn_sdpa_backward_workspace(
    const attn_context *context, const attn_sdpa_params *params,
    const attn_tensor *q, const attn_tensor *k, const attn_tensor *v,
    const attn_tensor *out, const attn_tensor *d_out,
    const attn_sdpa_gradients *gradients, size_t *bytes, size_t *alignment)
{
    static const char call[] = "attn_sdpa_backward_workspace";
    attn__backward g;
    attn_status status;
    size_t needed;

    status = check_answers(call, bytes, alignment);
    if (!status)
        status = prepare_backward(call, context, params, q, k, v, out, d_out,
                                  gradients, &g, &needed);
    return status ? status : answer(needed, bytes, alignment);
}

attn_status attn_sdpa_backward_work(
    const attn_context *context, const attn_sdpa_params *params,
    const attn_tensor *q, const attn_tensor *k, const attn_tensor *v,
    const attn_tensor *out, const attn_tensor *d_out,
    const attn_sdpa_gradients *gradients, void *work, size_t work_bytes)
{
    static const char call[] = "attn_sdpa_backward_work";
    attn__backward g;
    size_t needed;
    attn_status status = prepare_backward(call, context, params, q, k, v, out,
                                          d_out, gradients, &g, &needed);

    if (!status)
        status = attn__check_scratch(call, work, work_bytes, needed);
    for (int a = 0; a < ATTN__GRADIENTS && !status; a++)
        if (g.wants[a])
            status = attn__check_apart(call, attn__gradient_name(a),
                                       &g.gradient[a], "work", work, needed);
    if (status)
        return status;
    attn__backward_run(&attn__context(context)->executor, &g, work);
    return ATTN_OK;
}

attn_status attn_sdpa_backward(const attn_context *context,
                               const attn_sdpa_params *params,
                               const attn_tensor *q, const attn_tensor *k,
                               const attn_tensor *v, const attn_tensor *out,
                               const attn_tensor *d_out,
                               const attn_sdpa_gradients *gradients)
{
    static const char call[] = "attn_sdpa_backward";
    attn__backward g;
    void *work;
    size_t bytes;
    attn_status status = prepare_backward(call, context, params, q, k, v, out,
                                          d_out, gradients, &g, &bytes);

    if (status)
        return status;
    context = attn__context(context);
    work = attn__scratch_take(context, bytes);
    if (!work)
        return fail_memory(call, bytes);
    attn__backward_run(&context->executor, &g, work);
    attn__scratch_give(context, work);
    return ATTN_OK;
}

/* ------------------------------------------------------------ Flat calls -- */

/* The flat calls: contiguous arrays. */
static attn_status flat(const char *call, attn_dtype dtype,
                        const int64_t sizes[6], const void *q, const void *k,
                        const void *v, void *out, int32_t causal_align)
{
    static const char *const names[] = {"batch", "heads",  "kv_heads",
                                        "q_len", "kv_len", "width"};
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    static const char *const arrays[] = {"q", "k", "v", "out"};
    const void *inputs[] = {q, k, v};
    attn_tensor tensors[4];

    for (int a = 0; a < 6; a++)
        if (sizes[a] < 0)
            return attn__fail(ATTN_ERR_SIZE,
                              "%s: %s is %lld; sizes must not be negative",
                              call, names[a], (long long)sizes[a]);
    for (int a = 0; a < 4; a++) {
        bool of_keys = a == 1 || a == 2;
        attn_status status = attn_view_bhtd(
            &tensors[a], dtype, a == 3 ? out : inputs[a], sizes[0],
            sizes[of_keys ? 2 : 1], sizes[of_keys ? 4 : 3], sizes[5]);
        if (status == ATTN_ERR_NULL)
            return attn__fail(status, "%s: %s is NULL", call, arrays[a]);
        if (status)
            return attn__fail(status,
                              "%s: the sizes of %s multiply to more than "
                              "2^63-1 elements",
                              call, arrays[a]);
    }
    if (causal_align != 0 && causal_align != ATTN_ALIGN_TOP_LEFT &&
        causal_align != ATTN_ALIGN_BOTTOM_RIGHT)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: causal_align is %d; it must be 0 (not causal), "
                          "ATTN_ALIGN_TOP_LEFT (1) or ATTN_ALIGN_BOTTOM_RIGHT "
                          "(2)",
                          call, (int)causal_align);
    params.causal = causal_align != 0;
    params.align = causal_align;
    return sdpa(call, NULL, &params, &tensors[0], &tensors[1], &tensors[2],
                &tensors[3]);
}

attn_status attn_sdpa_f32(int64_t batch, int64_t heads, int64_t kv_heads,
                          int64_t q_len, int64_t kv_len, int64_t width,
                          const float *q, const float *k, const float *v,
                          float *out, int32_t causal_align)
{
    return flat(
        "attn_sdpa_f32", ATTN_F32,
        (const int64_t[6]){batch, heads, kv_heads, q_len, kv_len, width}, q, k,
        v, out, causal_align);
}

attn_status attn_sdpa_f64(int64_t batch, int64_t heads, int64_t kv_heads,
                          int64_t q_len, int64_t kv_len, int64_t width,
                          const double *q, const double *k, const double *v,
                          double *out, int32_t causal_align)
{
    return flat(
        "attn_sdpa_f64", ATTN_F64,
        (const int64_t[6]){batch, heads, kv_heads, q_len, kv_len, width}, q, k,
        v, out, causal_align);
}
