/*
 * Multi-head attention: projections, attention on views of their results, and
 * the output projection. Heads are never copied: a projection is (B,T,H*D)
 * memory, and attn_view_bthd sees its heads where they are; attention writes
 * its output the same way, which is the concatenation.
 */
#include "attn_internal.h"

#include "check.h"
#include "linear.h"
#include "sdpa.h"
#include "status.h"

#include <inttypes.h>

void attn_mha_params_init(attn_mha_params *params)
{
    static const attn_mha_params init = ATTN_MHA_PARAMS_INIT;

    if (params)
        *params = init;
}

/* One projection: its input, matrix, bias and result. */
typedef struct projection {
    const attn_tensor *x;
    attn_tensor w, bias;
    const char *x_name, *w_name, *bias_name; /* as the caller knows them */
    bool has_bias;
    attn_tensor y;     /* (B,1,T,H*D) in scratch memory */
    attn_tensor heads; /* the same as (B,H,T,D) */
} projection;

/* A checked layer. */
typedef struct mha {
    int32_t layout;
    attn_dtype dtype;
    projection q, k, v, o;
    attn_sdpa_params attention;
    attn__sdpa sdpa;
} mha;

/* ---------------------------------------------------------------- Shapes -- */

/* Rows [first, first + n) of the out axis of a packed matrix or bias. */
static attn_tensor slice_out(const attn_tensor *t, int axis, int64_t first,
                             int64_t n)
{
    attn_tensor s = *t;

    s.shape[axis] = n;
    if (t->data && n > 0)
        s.data = (unsigned char *)t->data +
                 first * t->stride[axis] * (int64_t)attn__dtype_bytes(t->dtype);
    return s;
}

static int out_axis(int32_t layout)
{
    return layout == ATTN_WEIGHT_OUT_IN ? 2 : 3;
}

/* Outputs of a matrix, cut into heads of one width. */
static attn_status head_width(const char *call, const char *name,
                              const attn_tensor *w, int32_t layout,
                              int64_t heads, int64_t *width)
{
    int64_t out = w->shape[out_axis(layout)];

    if (heads == 0 ? out != 0 : out % heads != 0)
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: %s has %" PRId64
                          " outputs; that must be a multiple of "
                          "the %" PRId64 " heads",
                          call, name, out, heads);
    *width = heads == 0 ? 0 : out / heads;
    return ATTN_OK;
}

static attn_status require(const char *call, const char *name, const void *p)
{
    if (p)
        return ATTN_OK;
    return attn__fail(ATTN_ERR_NULL, "%s: %s is NULL", call, name);
}

static attn_status check_numbers(const char *call, const attn_mha_params *o,
                                 int64_t *kv_heads)
{
    if (o->weight_layout != ATTN_WEIGHT_OUT_IN &&
        o->weight_layout != ATTN_WEIGHT_IN_OUT)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.weight_layout is %" PRId32
                          "; it must be named: ATTN_WEIGHT_OUT_IN (1) or "
                          "ATTN_WEIGHT_IN_OUT (2)",
                          call, o->weight_layout);
    if (o->reserved != 0)
        return attn__fail(ATTN_ERR_UNSUPPORTED,
                          "%s: params.reserved is %" PRId32 "; it must be 0",
                          call, o->reserved);
    if (o->num_heads <= 0)
        return attn__fail(ATTN_ERR_SIZE,
                          "%s: params.num_heads is %" PRId64
                          "; it must be positive",
                          call, o->num_heads);
    /* Three projections of so many heads must be countable. */
    if (o->num_heads > INT64_MAX / 3)
        return attn__fail(ATTN_ERR_SIZE,
                          "%s: params.num_heads is %" PRId64
                          "; it must be at most %" PRId64,
                          call, o->num_heads, INT64_MAX / 3);
    if (o->num_kv_heads < 0)
        return attn__fail(ATTN_ERR_SIZE,
                          "%s: params.num_kv_heads is %" PRId64
                          "; it must be positive, or 0 for num_heads",
                          call, o->num_kv_heads);
    *kv_heads = o->num_kv_heads ? o->num_kv_heads : o->num_heads;
    if (o->num_heads % *kv_heads != 0)
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: params.num_heads is %" PRId64
                          ", num_kv_heads %" PRId64
                          "; the first must be a multiple of the second",
                          call, o->num_heads, *kv_heads);
    return ATTN_OK;
}

/* w_q, w_k and w_v, or the three parts of w_qkv. */
static attn_status find_weights(const char *call, const attn_mha_params *o,
                                attn_dtype dtype, int64_t kv_heads, mha *m)
{
    int axis = out_axis(o->weight_layout);
    attn_status status;
    int64_t width = 0;

    if (o->w_qkv && (o->w_q || o->w_k || o->w_v))
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.w_qkv is given, and %s too; give the "
                          "packed matrix or the three",
                          call,
                          o->w_q   ? "w_q"
                          : o->w_k ? "w_k"
                                   : "w_v");
    if (!o->w_qkv) {
        const attn_tensor *w[] = {o->w_q, o->w_k, o->w_v};
        static const char *const names[] = {"params.w_q", "params.w_k",
                                            "params.w_v"};
        for (int a = 0; a < 3; a++) {
            if (!w[a])
                return attn__fail(ATTN_ERR_NULL,
                                  "%s: %s is NULL; give w_q, w_k and w_v, or "
                                  "w_qkv",
                                  call, names[a]);
            status = attn__check_tensor(call, names[a], w[a], dtype);
            if (status)
                return status;
        }
        m->q.w = *o->w_q;
        m->k.w = *o->w_k;
        m->v.w = *o->w_v;
        return ATTN_OK;
    }
    status = attn__check_tensor(call, "params.w_qkv", o->w_qkv, dtype);
    if (!status)
        status = head_width(call, "params.w_qkv", o->w_qkv, o->weight_layout,
                            o->num_heads + 2 * kv_heads, &width);
    if (status)
        return status;
    m->q.w = slice_out(o->w_qkv, axis, 0, o->num_heads * width);
    m->k.w = slice_out(o->w_qkv, axis, o->num_heads * width, kv_heads * width);
    m->v.w = slice_out(o->w_qkv, axis, (o->num_heads + kv_heads) * width,
                       kv_heads * width);
    return ATTN_OK;
}

static attn_status find_biases(const char *call, const attn_mha_params *o,
                               attn_dtype dtype, mha *m)
{
    projection *const to[] = {&m->q, &m->k, &m->v};
    const attn_tensor *b[] = {o->b_q, o->b_k, o->b_v};
    int axis = out_axis(o->weight_layout);
    int64_t first = 0, total = 0;
    attn_status status;

    if (o->b_qkv && (o->b_q || o->b_k || o->b_v))
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.b_qkv is given, and %s too; give the "
                          "packed bias or the three",
                          call,
                          o->b_q   ? "b_q"
                          : o->b_k ? "b_k"
                                   : "b_v");
    for (int a = 0; a < 3; a++)
        if (!attn__add_i64(total, to[a]->w.shape[axis], &total))
            return attn__fail(ATTN_ERR_SIZE,
                              "%s: the projections have more than 2^63-1 "
                              "outputs together",
                              call);
    if (o->b_qkv) {
        status = attn__check_tensor(call, "params.b_qkv", o->b_qkv, dtype);
        if (!status)
            status = attn__check_shape(call, "params.b_qkv", o->b_qkv,
                                       "(1,1,1,outputs of q, k and v)", 1, 1, 1,
                                       total);
        if (status)
            return status;
    }
    for (int a = 0; a < 3; a++) {
        int64_t n = to[a]->w.shape[axis];
        to[a]->has_bias = o->b_qkv || b[a];
        if (o->b_qkv)
            to[a]->bias = slice_out(o->b_qkv, 3, first, n);
        else if (b[a])
            to[a]->bias = *b[a];
        first += n;
    }
    return ATTN_OK;
}

/* ------------------------------------------------------------- Projections --
 */

static void set_names(const attn_mha_params *o, mha *m)
{
    m->q.x_name = "x_q";
    m->k.x_name = "x_k";
    m->v.x_name = "x_v";
    m->o.x_name = "the concatenated heads";
    m->q.w_name = o->w_qkv ? "params.w_qkv" : "params.w_q";
    m->k.w_name = o->w_qkv ? "params.w_qkv" : "params.w_k";
    m->v.w_name = o->w_qkv ? "params.w_qkv" : "params.w_v";
    m->o.w_name = "params.w_o";
    m->q.bias_name = o->b_qkv ? "params.b_qkv" : "params.b_q";
    m->k.bias_name = o->b_qkv ? "params.b_qkv" : "params.b_k";
    m->v.bias_name = o->b_qkv ? "params.b_qkv" : "params.b_v";
    m->o.bias_name = "params.b_o";
}

static const attn_tensor *bias_of(const projection *p)
{
    return p->has_bias ? &p->bias : NULL;
}

/* The result of a projection, as a layer's rows and as heads. Its memory comes
 * when the layer runs; until then a checked view needs some address, which is
 * aligned and never touched. */
static attn_status place(const char *call, projection *p, attn_dtype dtype,
                         int64_t batch, int64_t len, int64_t heads,
                         int64_t width)
{
    static const max_align_t nowhere;

    if (attn_view_bthd(&p->heads, dtype, &nowhere, batch, len, heads, width) ||
        attn__count(&p->heads) > PTRDIFF_MAX / (int64_t)sizeof(double))
        return attn__fail(ATTN_ERR_SIZE,
                          "%s: the scratch memory for a projection of (%" PRId64
                          ",%" PRId64 ",%" PRId64 "*%" PRId64 ") cannot be "
                          "addressed",
                          call, batch, len, heads, width);
    (void)attn_view_bte(&p->y, dtype, &nowhere, batch, len, heads * width);
    return ATTN_OK;
}

static attn_status place_all(const char *call, mha *m, int64_t heads,
                             int64_t kv_heads, int64_t width, int64_t v_width)
{
    const attn_tensor *x = m->q.x;
    attn_status status =
        place(call, &m->q, m->dtype, x->shape[0], x->shape[2], heads, width);

    if (!status)
        status = place(call, &m->k, m->dtype, m->k.x->shape[0],
                       m->k.x->shape[2], kv_heads, width);
    if (!status)
        status = place(call, &m->v, m->dtype, m->v.x->shape[0],
                       m->v.x->shape[2], kv_heads, v_width);
    /* The concatenated heads: the input of the output projection. */
    if (!status)
        status = place(call, &m->o, m->dtype, x->shape[0], x->shape[2], heads,
                       v_width);
    return status;
}

static attn_status check_projection(const char *call, int32_t layout,
                                    const projection *p, const attn_tensor *x,
                                    const char *y_name, const attn_tensor *y)
{
    return attn__linear_check(call, layout, p->x_name, x, p->w_name, &p->w,
                              p->bias_name, bias_of(p), y_name, y);
}

static attn_status check_projections(const char *call, const mha *m,
                                     const attn_tensor *out)
{
    attn_status status =
        check_projection(call, m->layout, &m->q, m->q.x, "Q", &m->q.y);

    if (!status)
        status = check_projection(call, m->layout, &m->k, m->k.x, "K", &m->k.y);
    if (!status)
        status = check_projection(call, m->layout, &m->v, m->v.x, "V", &m->v.y);
    if (!status)
        status = check_projection(call, m->layout, &m->o, &m->o.y, "out", out);
    return status;
}

/* --------------------------------------------------------------- Checks -- */

static attn_status check_inputs(const char *call, const attn_tensor *x_q,
                                const attn_tensor *x_k, const attn_tensor *x_v,
                                const attn_tensor *out)
{
    const attn_tensor *x[] = {x_q, x_k, x_v};
    static const char *const names[] = {"x_q", "x_k", "x_v"};
    attn_status status;

    for (int a = 0; a < 3; a++) {
        status =
            attn__check_tensor(call, names[a], x[a], a == 0 ? 0 : x_q->dtype);
        if (!status && x[a]->shape[1] != 1)
            status = attn__fail(ATTN_ERR_SHAPE,
                                "%s: %s has shape[1] = %" PRId64
                                "; the input of a layer is (B,1,T,E)",
                                call, names[a], x[a]->shape[1]);
        if (status)
            return status;
    }
    if (x_k->shape[0] != x_q->shape[0] || x_v->shape[0] != x_q->shape[0])
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: x_q has batch %" PRId64 ", x_k %" PRId64
                          ", x_v %" PRId64 "; they must be the same (shape[0])",
                          call, x_q->shape[0], x_k->shape[0], x_v->shape[0]);
    if (x_v->shape[2] != x_k->shape[2])
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: x_v has %" PRId64 " keys, x_k has %" PRId64
                          "; they must have the same length (shape[2])",
                          call, x_v->shape[2], x_k->shape[2]);
    return attn__check_tensor(call, "out", out, x_q->dtype);
}

/* No output may overlap an input of the layer. */
static attn_status check_overlaps(const char *call, const mha *m,
                                  const attn_tensor *out)
{
    attn__output outputs[ATTN__EXTRAS + 1];
    int n = attn__sdpa_outputs(&m->sdpa, out, outputs);
    const attn__output inputs[] = {{"x_q", m->q.x},
                                   {"x_k", m->k.x},
                                   {"x_v", m->v.x},
                                   {m->q.w_name, &m->q.w},
                                   {m->k.w_name, &m->k.w},
                                   {m->v.w_name, &m->v.w},
                                   {m->o.w_name, &m->o.w},
                                   {m->q.bias_name, bias_of(&m->q)},
                                   {m->k.bias_name, bias_of(&m->k)},
                                   {m->v.bias_name, bias_of(&m->v)},
                                   {m->o.bias_name, bias_of(&m->o)}};
    attn_status status = ATTN_OK;

    for (int a = 0; a < n; a++)
        for (size_t i = 0; i < sizeof inputs / sizeof inputs[0] && !status; i++)
            if (inputs[i].t)
                status =
                    attn__check_overlap(call, outputs[a].name, outputs[a].t,
                                        inputs[i].name, inputs[i].t, false);
    return status;
}

static attn_status read_attention(const char *call, const attn_mha_params *o,
                                  mha *m)
{
    attn_status status = attn__read_params(
        call, "params.attention", &m->attention, sizeof m->attention,
        o->attention, ATTN__SDPA_PARAMS_FIRST);

    if (!status &&
        (m->attention.cu_q || m->attention.cu_k || m->attention.num_seqs != 0))
        status = attn__fail(ATTN_ERR_UNSUPPORTED,
                            "%s: params.attention has cu_q, cu_k or num_seqs; "
                            "ragged batches are for attn_sdpa",
                            call);
    if (!status &&
        (m->attention.page_table || m->attention.pages_per_seq != 0 ||
         m->attention.ring_starts))
        status = attn__fail(ATTN_ERR_UNSUPPORTED,
                            "%s: params.attention has page_table, "
                            "pages_per_seq or ring_starts; the keys of a layer "
                            "are computed, pages and rings are for attn_sdpa",
                            call);
    m->attention.struct_size = sizeof m->attention;
    return status;
}

/* The whole check. */
static attn_status prepare(const char *call, const attn_context *context,
                           const attn_mha_params *params,
                           const attn_tensor *x_q, const attn_tensor *x_k,
                           const attn_tensor *x_v, const attn_tensor *out,
                           mha *m)
{
    attn_mha_params o;
    int64_t kv_heads = 0, width = 0, v_width = 0;
    attn_status status = require(call, "params", params);

    *m = (mha){0};
    if (!status)
        status =
            attn__read_params(call, "params", &o, sizeof o, params, sizeof o);
    if (!status)
        status = check_numbers(call, &o, &kv_heads);
    if (!status)
        status = require(call, "x_q", x_q);
    if (status)
        return status;
    x_k = x_k ? x_k : x_q;
    x_v = x_v ? x_v : x_k;
    status = check_inputs(call, x_q, x_k, x_v, out);
    if (status)
        return status;
    set_names(&o, m);
    m->layout = o.weight_layout;
    m->dtype = x_q->dtype;
    m->q.x = x_q;
    m->k.x = x_k;
    m->v.x = x_v;
    status = find_weights(call, &o, m->dtype, kv_heads, m);
    if (!status)
        status = attn__check_tensor(call, "params.w_o", o.w_o, m->dtype);
    if (!status)
        status = find_biases(call, &o, m->dtype, m);
    if (!status)
        status = head_width(call, m->q.w_name, &m->q.w, m->layout, o.num_heads,
                            &width);
    if (!status)
        status = head_width(call, m->v.w_name, &m->v.w, m->layout, kv_heads,
                            &v_width);
    if (status)
        return status;
    m->o.w = *o.w_o;
    m->o.has_bias = o.b_o != NULL;
    if (o.b_o)
        m->o.bias = *o.b_o;
    status = place_all(call, m, o.num_heads, kv_heads, width, v_width);
    if (!status)
        status = check_projections(call, m, out);
    if (!status)
        status = read_attention(call, &o, m);
    if (!status)
        status = attn__sdpa_prepare(call, context, &m->attention, &m->q.heads,
                                    &m->k.heads, &m->v.heads, &m->o.heads,
                                    false, &m->sdpa);
    if (!status)
        status = attn__sdpa_check_overlaps(call, &m->sdpa, out, false);
    if (!status)
        status = check_overlaps(call, m, out);
    return status;
}

/* ------------------------------------------------------------------ Run -- */

/* What projections and attention use one after the other. */
static size_t shared_bytes(const mha *m)
{
    const projection *all[] = {&m->q, &m->k, &m->v};
    size_t bytes = attn__sdpa_bytes(&m->sdpa);
    int64_t in = m->o.y.shape[3];

    for (int a = 0; a < 3; a++)
        in = MAX(in, all[a]->x->shape[3]);
    return MAX(bytes, attn__linear_bytes(&m->sdpa.blas, m->dtype, in,
                                         m->sdpa.threads));
}

static size_t total_bytes(const mha *m)
{
    const projection *all[] = {&m->q, &m->k, &m->v, &m->o};
    attn__bump bump = {NULL, 0};

    for (int a = 0; a < 4; a++)
        (void)attn__bump_take(&bump, attn__count(&all[a]->y),
                              attn__dtype_bytes(m->dtype));
    (void)attn__bump_take(&bump, 1, 1);
    if (bump.bytes == SIZE_MAX || shared_bytes(m) > SIZE_MAX - bump.bytes)
        return SIZE_MAX;
    return bump.bytes + shared_bytes(m);
}

static void project(const attn__executor *executor, const mha *m,
                    const projection *p, const attn_tensor *x,
                    const attn_tensor *y, void *work)
{
    attn__linear_run(executor, &m->sdpa.blas, m->layout, x, &p->w, bias_of(p),
                     y, work);
}

/* work has total_bytes(m): the projections first, as prepare placed them. */
static void run_mha(const attn__executor *executor, mha *m,
                    const attn_tensor *out, void *work)
{
    attn__bump bump = {work, 0};
    projection *all[] = {&m->q, &m->k, &m->v, &m->o};
    attn_tensor *views[] = {&m->sdpa.q, &m->sdpa.k, &m->sdpa.v, &m->sdpa.out};
    void *shared;

    for (int a = 0; a < 4; a++) {
        all[a]->y.data = attn__bump_take(&bump, attn__count(&all[a]->y),
                                         attn__dtype_bytes(m->dtype));
        views[a]->data = all[a]->y.data;
    }
    shared = bump.base + bump.bytes;
    project(executor, m, &m->q, m->q.x, &m->q.y, shared);
    project(executor, m, &m->k, m->k.x, &m->k.y, shared);
    project(executor, m, &m->v, m->v.x, &m->v.y, shared);
    attn__sdpa_run(executor, &m->sdpa, shared);
    project(executor, m, &m->o, &m->o.y, out, shared);
}

/* prepare, and how much scratch memory it takes. */
static attn_status prepare_bytes(const char *call, const attn_context *context,
                                 const attn_mha_params *params,
                                 const attn_tensor *x_q, const attn_tensor *x_k,
                                 const attn_tensor *x_v, const attn_tensor *out,
                                 mha *m, size_t *bytes)
{
    attn_status status = prepare(call, context, params, x_q, x_k, x_v, out, m);

    if (status)
        return status;
    *bytes = total_bytes(m);
    return *bytes == SIZE_MAX ? attn__fail_bytes(call) : ATTN_OK;
}

attn_status attn_mha_check(const attn_context *context,
                           const attn_mha_params *params,
                           const attn_tensor *x_q, const attn_tensor *x_k,
                           const attn_tensor *x_v, const attn_tensor *out)
{
    mha m;
    size_t bytes;

    return prepare_bytes("attn_mha_check", context, params, x_q, x_k, x_v, out,
                         &m, &bytes);
}

attn_status attn_mha_workspace(const attn_context *context,
                               const attn_mha_params *params,
                               const attn_tensor *x_q, const attn_tensor *x_k,
                               const attn_tensor *x_v, const attn_tensor *out,
                               size_t *bytes, size_t *alignment)
{
    static const char call[] = "attn_mha_workspace";
    attn_status status;
    size_t needed;
    mha m;

    if (!bytes || !alignment)
        return attn__fail(ATTN_ERR_NULL, "%s: %s is NULL", call,
                          bytes ? "alignment" : "bytes");
    status =
        prepare_bytes(call, context, params, x_q, x_k, x_v, out, &m, &needed);
    if (status)
        return status;
    *bytes = needed;
    *alignment = ATTN__ALIGNMENT;
    return ATTN_OK;
}

attn_status attn_mha_work(const attn_context *context,
                          const attn_mha_params *params, const attn_tensor *x_q,
                          const attn_tensor *x_k, const attn_tensor *x_v,
                          const attn_tensor *out, void *work, size_t work_bytes)
{
    static const char call[] = "attn_mha_work";
    size_t needed;
    mha m;
    attn_status status =
        prepare_bytes(call, context, params, x_q, x_k, x_v, out, &m, &needed);

    if (!status)
        status = attn__check_work(call, &m.sdpa, out, work, work_bytes, needed);
    if (status)
        return status;
    run_mha(&attn__context(context)->executor, &m, out, work);
    return ATTN_OK;
}

attn_status attn_mha(const attn_context *context, const attn_mha_params *params,
                     const attn_tensor *x_q, const attn_tensor *x_k,
                     const attn_tensor *x_v, const attn_tensor *out)
{
    static const char call[] = "attn_mha";
    size_t bytes;
    void *work;
    mha m;
    attn_status status =
        prepare_bytes(call, context, params, x_q, x_k, x_v, out, &m, &bytes);

    if (status)
        return status;
    context = attn__context(context);
    work = attn__scratch_take(context, bytes);
    if (!work)
        return attn__fail(ATTN_ERR_NOMEM,
                          "%s: no memory for %zu bytes of scratch", call,
                          bytes);
    run_mha(&context->executor, &m, out, work);
    attn__scratch_give(context, work);
    return ATTN_OK;
}
