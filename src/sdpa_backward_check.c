/* The gradients of attention: from arguments to a checked problem. */
#include "attn_internal.h"

#include "sdpa.h"

#include "check.h"
#include "status.h"

#include <inttypes.h>
#include <string.h>

/* Bytes of the first version of the struct. */
#define GRADIENTS_FIRST sizeof(attn_sdpa_gradients)

void attn_sdpa_gradients_init(attn_sdpa_gradients *gradients)
{
    static const attn_sdpa_gradients init = ATTN_SDPA_GRADIENTS_INIT;

    if (gradients)
        *gradients = init;
}

const char *attn__gradient_name(int a)
{
    static const char *const names[ATTN__GRADIENTS] = {
        [ATTN__D_Q] = "gradients.d_q",
        [ATTN__D_K] = "gradients.d_k",
        [ATTN__D_V] = "gradients.d_v",
        [ATTN__D_ALIBI] = "gradients.d_alibi",
        [ATTN__D_SINKS] = "gradients.d_sinks",
        [ATTN__D_SCALE] = "gradients.d_scale",
        [ATTN__D_MASKS] = "gradients.d_masks[0]",
        [ATTN__D_MASKS + 1] = "gradients.d_masks[1]",
        [ATTN__D_MASKS + 2] = "gradients.d_masks[2]",
        [ATTN__D_MASKS + 3] = "gradients.d_masks[3]"};

    return names[a];
}

/* What the backward call does not do with params that the forward one takes.
 * An optional output may hide a part of the loss, whose gradient would be
 * missing without a word. */
static attn_status check_params(const char *call, const attn__sdpa *p)
{
    attn__output outputs[ATTN__EXTRAS + 1];
    int n = attn__sdpa_outputs(p, &p->out, outputs);

    if (!p->wants[ATTN__LSE])
        return attn__fail(ATTN_ERR_NULL,
                          "%s: params.lse is NULL; it must be what the forward "
                          "call wrote",
                          call);
    for (int a = 1; a < n; a++)
        if (outputs[a].t != &p->extra[ATTN__LSE])
            return attn__fail(ATTN_ERR_UNSUPPORTED,
                              "%s: %s is given; there are no gradients of "
                              "optional outputs but lse, it must be NULL",
                              call, outputs[a].name);
    if (p->page_table || p->ring_starts)
        return attn__fail(ATTN_ERR_UNSUPPORTED,
                          "%s: params.%s is given; there are no gradients of "
                          "keys in %s",
                          call, p->page_table ? "page_table" : "ring_starts",
                          p->page_table ? "pages" : "a ring");
    return ATTN_OK;
}

/* A tensor that has the sizes of another. */
static attn_status check_like(const char *call, const char *name,
                              const attn_tensor *t, const char *meaning,
                              const attn_tensor *like, attn_dtype dtype)
{
    attn_status status = attn__check_tensor(call, name, t, dtype);

    return status ? status
                  : attn__check_shape(call, name, t, meaning, like->shape[0],
                                      like->shape[1], like->shape[2],
                                      like->shape[3]);
}

static attn_status check_inputs(const char *call, const attn_tensor *d_out,
                                const attn_tensor *d_lse, attn__backward *g)
{
    const attn__sdpa *p = &g->p;
    attn_status status =
        check_like(call, "d_out", d_out, "(B,Hq,Tq,Dv)", &p->out, p->q.dtype);

    if (status)
        return status;
    g->d_out = attn__usable(d_out);
    if (!d_lse)
        return ATTN_OK;
    status = check_like(call, "gradients.d_lse", d_lse, "(B,Hq,Tq,1)",
                        &p->extra[ATTN__LSE], p->q.dtype);
    if (status)
        return status;
    g->d_lse = attn__usable(d_lse);
    g->has_d_lse = true;
    return ATTN_OK;
}

/* One gradient that is wanted, with the sizes of `like`. */
static attn_status want(const char *call, int a, const attn_tensor *t,
                        const char *meaning, const attn_tensor *like,
                        attn__backward *g)
{
    const char *name = attn__gradient_name(a);
    attn_status status = check_like(call, name, t, meaning, like, g->p.q.dtype);

    if (!status)
        status = attn__check_places(call, name, t);
    if (status)
        return status;
    g->gradient[a] = attn__usable(t);
    g->wants[a] = true;
    return ATTN_OK;
}

static attn_status want_masks(const char *call, const attn_tensor *const *masks,
                              attn__backward *g)
{
    attn_status status = ATTN_OK;

    if (g->p.visibility.num_masks == 0)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: gradients.d_masks is given, but "
                          "params.num_masks is 0",
                          call);
    for (int32_t m = 0; m < g->p.visibility.num_masks && !status; m++) {
        if (!masks[m])
            continue;
        if (g->p.masks[m].kind != ATTN_MASK_ADD)
            return attn__fail(ATTN_ERR_VALUE,
                              "%s: %s is given, but masks[%d] is of kind "
                              "%" PRId32
                              "; only what is added (ATTN_MASK_ADD, %d) has a "
                              "gradient",
                              call, attn__gradient_name(ATTN__D_MASKS + m),
                              (int)m, g->p.masks[m].kind, ATTN_MASK_ADD);
        status = want(call, ATTN__D_MASKS + m, masks[m], "that of the mask",
                      &g->p.masks[m].view, g);
    }
    return status;
}

/* Of slopes or sinks, which must be there. */
static attn_status want_per_head(const char *call, int a, const attn_tensor *t,
                                 const char *name, const attn_tensor *of,
                                 attn__backward *g)
{
    if (!of)
        return attn__fail(ATTN_ERR_VALUE, "%s: %s is given, but %s is NULL",
                          call, attn__gradient_name(a), name);
    return want(call, a, t, "that of the parameter", of, g);
}

static attn_status check_gradients(const char *call,
                                   const attn_sdpa_gradients *o,
                                   attn__backward *g)
{
    static const attn_tensor one = {.shape = {1, 1, 1, 1}};
    const attn__sdpa *p = &g->p;
    attn_status status = ATTN_OK;

    if (o->d_q)
        status = want(call, ATTN__D_Q, o->d_q, "(B,Hq,Tq,D)", &p->q, g);
    if (!status && o->d_k)
        status = want(call, ATTN__D_K, o->d_k, "(B,Hkv,Tk,D)", &p->k, g);
    if (!status && o->d_v)
        status = want(call, ATTN__D_V, o->d_v, "(B,Hkv,Tk,Dv)", &p->v, g);
    if (!status && o->d_masks)
        status = want_masks(call, o->d_masks, g);
    if (!status && o->d_alibi)
        status = want_per_head(call, ATTN__D_ALIBI, o->d_alibi, "params.alibi",
                               p->slopes, g);
    if (!status && o->d_sinks)
        status = want_per_head(call, ATTN__D_SINKS, o->d_sinks, "params.sinks",
                               p->sink_logits, g);
    if (!status && o->d_scale)
        status = want(call, ATTN__D_SCALE, o->d_scale, "(1,1,1,1)", &one, g);
    return status;
}

static attn_status check_flags(const char *call, const attn_sdpa_gradients *o,
                               attn__backward *g)
{
    static const struct {
        int32_t flag;
        int a;
    } flags[] = {{ATTN_SDPA_ADD_D_Q, ATTN__D_Q},
                 {ATTN_SDPA_ADD_D_K, ATTN__D_K},
                 {ATTN_SDPA_ADD_D_V, ATTN__D_V},
                 {ATTN_SDPA_ADD_D_ALIBI, ATTN__D_ALIBI},
                 {ATTN_SDPA_ADD_D_SINKS, ATTN__D_SINKS},
                 {ATTN_SDPA_ADD_D_SCALE, ATTN__D_SCALE},
                 {ATTN_SDPA_ADD_D_MASKS, ATTN__D_MASKS}};
    int32_t known = 0;

    for (size_t f = 0; f < sizeof flags / sizeof flags[0]; f++) {
        known |= flags[f].flag;
        g->adds[flags[f].a] = (o->flags & flags[f].flag) != 0;
    }
    for (int m = 1; m < ATTN_MAX_MASKS; m++)
        g->adds[ATTN__D_MASKS + m] = g->adds[ATTN__D_MASKS];
    if (o->flags & ~known)
        return attn__fail(ATTN_ERR_UNSUPPORTED,
                          "%s: gradients.flags is 0x%" PRIx32
                          "; this version knows 0x%" PRIx32,
                          call, (uint32_t)o->flags, (uint32_t)known);
    if (o->reserved != 0)
        return attn__fail(ATTN_ERR_UNSUPPORTED,
                          "%s: gradients.reserved is %" PRId32 "; it must be 0",
                          call, o->reserved);
    return ATTN_OK;
}

/* No gradient touches what is read, nor another gradient. */
static attn_status check_overlaps(const char *call, const attn__backward *g)
{
    const attn__sdpa *p = &g->p;
    const attn__output inputs[] = {{"q", &p->q},
                                   {"k", &p->k},
                                   {"v", &p->v},
                                   {"out", &p->out},
                                   {"params.lse", &p->extra[ATTN__LSE]},
                                   {"d_out", &g->d_out},
                                   {"gradients.d_lse", &g->d_lse}};
    const int num_inputs = g->has_d_lse ? 7 : 6;
    attn_status status = ATTN_OK;

    for (int a = 0; a < ATTN__GRADIENTS && !status; a++) {
        const char *name = attn__gradient_name(a);
        const attn_tensor *t = &g->gradient[a];
        if (!g->wants[a])
            continue;
        for (int i = 0; i < num_inputs && !status; i++)
            status = attn__check_overlap(call, name, t, inputs[i].name,
                                         inputs[i].t, false);
        if (!status)
            status = attn__check_against_options(call, name, t, p);
        for (int b = a + 1; b < ATTN__GRADIENTS && !status; b++)
            if (g->wants[b])
                status =
                    attn__check_overlap(call, name, t, attn__gradient_name(b),
                                        &g->gradient[b], false);
    }
    return status;
}

attn_status
attn__backward_prepare(const char *call, const attn_context *context,
                       const attn_sdpa_params *params, const attn_tensor *q,
                       const attn_tensor *k, const attn_tensor *v,
                       const attn_tensor *out, const attn_tensor *d_out,
                       const attn_sdpa_gradients *gradients, attn__backward *g)
{
    attn_sdpa_gradients o;
    attn_status status;

    *g = (attn__backward){0};
    if (!gradients)
        return attn__fail(ATTN_ERR_NULL, "%s: gradients is NULL", call);
    status =
        attn__sdpa_prepare(call, context, params, q, k, v, out, true, &g->p);
    if (!status)
        status = attn__read_params(call, "gradients", &o, sizeof o, gradients,
                                   GRADIENTS_FIRST);
    if (!status)
        status = check_params(call, &g->p);
    if (!status)
        status = check_flags(call, &o, g);
    if (!status)
        status = check_inputs(call, d_out, o.d_lse, g);
    if (!status)
        status = check_gradients(call, &o, g);
    return status ? status : check_overlaps(call, g);
}
