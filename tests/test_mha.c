/*
 * Multi-head attention against the oracle: every way of storing weights and
 * of leaving parts out, in a table, and random layers over all options.
 */
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "compare.h"
#include "tensors.h"

enum { MAX_BATCH = 4, RANDOM_LAYERS = 300 };

static const attn_dtype types[] = {ATTN_F32, ATTN_F64};

/* What a layer is like; drawn or from the table. */
typedef struct shape {
    int64_t batch, q_len, kv_len;
    int64_t heads, kv_heads; /* kv_heads 0: as heads */
    int64_t d, dv;           /* widths of a head */
    int64_t e, eq, ek, ev;   /* widths of out, x_q, x_k, x_v */
    int32_t layout;
    int packed;    /* one matrix w_qkv */
    int biases;    /* bits: 1 q, 2 k, 4 v, 8 o */
    int inputs;    /* 1: x_q only, 2: x_q and x_k, 3: all three */
    int masks;     /* bits: 1 KEEP per head, 2 DROP padding, 4 ADD */
    int causal;    /* 0 or an alignment */
    int lengths;   /* q_lens and kv_lens */
    int outputs;   /* bits: 1 lse, 2 weights, 4 weights_mean */
    int scattered; /* strides of all kinds */
} shape;

typedef struct layer {
    shape s;
    attn_dtype dtype;
    attn_mha_params p;
    attn_sdpa_params a;
    attn_mask masks[3];
    int64_t q_lens[MAX_BATCH], kv_lens[MAX_BATCH];
    tensor x_q, x_k, x_v, out;
    tensor w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o;
    tensor lse, weights, mean;
    tensor mask_memory[3];
    char name[512];
} layer;

static tensor make(const layer *l, rng *r, int use, int64_t b, int64_t h,
                   int64_t t, int64_t d)
{
    return l->s.scattered ? tensor_scattered(r, use, l->dtype, b, h, t, d)
                          : tensor_make(l->dtype, b, h, t, d);
}

/* A projection of in numbers to out, near 1 in size for inputs near 1. */
static tensor make_weight(const layer *l, rng *r, int64_t out, int64_t in)
{
    tensor w = l->s.layout == ATTN_WEIGHT_OUT_IN
                   ? make(l, r, TENSOR_INPUT, 1, 1, out, in)
                   : make(l, r, TENSOR_INPUT, 1, 1, in, out);
    tensor_normal(&w.view, r, in > 0 ? 1.0 / sqrt((double)in) : 1.0);
    return w;
}

static const attn_tensor *make_bias(const layer *l, rng *r, tensor *b,
                                    int wanted, int64_t n)
{
    if (!wanted)
        return NULL;
    *b = make(l, r, TENSOR_INPUT, 1, 1, 1, n);
    tensor_normal(&b->view, r, 0.5);
    return &b->view;
}

static void make_weights(layer *l, rng *r)
{
    const shape *s = &l->s;
    attn_mha_params *p = &l->p;
    const int64_t kv = s->kv_heads ? s->kv_heads : s->heads;
    const int64_t rows[] = {s->heads * s->d, kv * s->d, kv * s->dv};
    if (s->packed) {
        const int64_t all = rows[0] + rows[1] + rows[2];
        l->w_q = make_weight(l, r, all, s->eq);
        p->w_qkv = &l->w_q.view;
        p->b_qkv = make_bias(l, r, &l->b_q, s->biases & 1, all);
    } else {
        l->w_q = make_weight(l, r, rows[0], s->eq);
        l->w_k = make_weight(l, r, rows[1], s->ek);
        l->w_v = make_weight(l, r, rows[2], s->ev);
        p->w_q = &l->w_q.view;
        p->w_k = &l->w_k.view;
        p->w_v = &l->w_v.view;
        p->b_q = make_bias(l, r, &l->b_q, s->biases & 1, rows[0]);
        p->b_k = make_bias(l, r, &l->b_k, s->biases & 2, rows[1]);
        p->b_v = make_bias(l, r, &l->b_v, s->biases & 4, rows[2]);
    }
    l->w_o = make_weight(l, r, s->e, s->heads * s->dv);
    p->w_o = &l->w_o.view;
    p->b_o = make_bias(l, r, &l->b_o, s->biases & 8, s->e);
}

static void make_inputs(layer *l, rng *r)
{
    const shape *s = &l->s;
    l->x_q = make(l, r, TENSOR_INPUT, s->batch, 1, s->q_len, s->eq);
    tensor_normal(&l->x_q.view, r, 1.0);
    if (s->inputs > 1) {
        l->x_k = make(l, r, TENSOR_INPUT, s->batch, 1, s->kv_len, s->ek);
        tensor_normal(&l->x_k.view, r, 1.0);
    }
    if (s->inputs > 2) {
        l->x_v = make(l, r, TENSOR_INPUT, s->batch, 1, s->kv_len, s->ev);
        tensor_normal(&l->x_v.view, r, 1.0);
    }
    l->out = make(l, r, TENSOR_OUTPUT, s->batch, 1, s->q_len, s->e);
}

static void add_mask(layer *l, rng *r, int32_t kind, int64_t heads,
                     int64_t q_len)
{
    const int32_t n = l->a.num_masks++;
    const attn_dtype type = kind == ATTN_MASK_ADD ? l->dtype : ATTN_U8;
    tensor t = tensor_make(type, l->s.batch, heads, q_len, l->s.kv_len);
    const int64_t rows = l->s.batch * heads * q_len;
    for (int64_t m = 0; m < rows * l->s.kv_len; m++) {
        const int64_t j = m % l->s.kv_len, i = m / l->s.kv_len % q_len;
        const int64_t h = m / l->s.kv_len / q_len % heads;
        const int64_t b = m / l->s.kv_len / q_len / heads;
        const int hidden = rng_one_in(r, 4);
        double x = kind == ATTN_MASK_KEEP ? (double)!hidden : (double)hidden;
        if (kind == ATTN_MASK_ADD)
            x = hidden ? -HUGE_VAL : rng_normal(r);
        tensor_set(&t.view, b, h, i, j, x);
    }
    l->mask_memory[n] = t;
    l->masks[n].kind = kind;
    l->masks[n].view = t.view;
}

static void make_options(layer *l, rng *r)
{
    static const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
    const shape *s = &l->s;
    l->a = init;
    if (s->masks & 1)
        add_mask(l, r, ATTN_MASK_KEEP, s->heads, s->q_len);
    if (s->masks & 2)
        add_mask(l, r, ATTN_MASK_DROP, 1, 1);
    if (s->masks & 4)
        add_mask(l, r, ATTN_MASK_ADD, 1, s->q_len);
    l->a.masks = l->a.num_masks ? l->masks : NULL;
    l->a.causal = s->causal != 0;
    l->a.align = s->causal;
    if (s->lengths) {
        for (int64_t b = 0; b < s->batch; b++) {
            l->q_lens[b] = rng_int(r, 0, s->q_len);
            l->kv_lens[b] = rng_int(r, 0, s->kv_len);
        }
        l->a.q_lens = l->q_lens;
        l->a.kv_lens = l->kv_lens;
    }
    l->lse = make(l, r, TENSOR_OUTPUT, s->batch, s->heads, s->q_len, 1);
    l->weights =
        make(l, r, TENSOR_OUTPUT, s->batch, s->heads, s->q_len, s->kv_len);
    l->mean = make(l, r, TENSOR_OUTPUT, s->batch, 1, s->q_len, s->kv_len);
    l->a.lse = s->outputs & 1 ? &l->lse.view : NULL;
    l->a.weights = s->outputs & 2 ? &l->weights.view : NULL;
    l->a.weights_mean = s->outputs & 4 ? &l->mean.view : NULL;
    /* NULL options where none are set: that is a case too. */
    if (s->masks || s->causal || s->lengths || s->outputs)
        l->p.attention = &l->a;
}

static void describe(layer *l, const char *title)
{
    const shape *s = &l->s;
    snprintf(l->name, sizeof l->name,
             "%s: f%d b=%d tq=%d tk=%d h=%d hkv=%d d=%d dv=%d e=%d eq=%d "
             "ek=%d ev=%d layout=%d packed=%d biases=%d inputs=%d masks=%d "
             "causal=%d lengths=%d outputs=%d scattered=%d",
             title, l->dtype == ATTN_F32 ? 32 : 64, (int)s->batch,
             (int)s->q_len, (int)s->kv_len, (int)s->heads, (int)s->kv_heads,
             (int)s->d, (int)s->dv, (int)s->e, (int)s->eq, (int)s->ek,
             (int)s->ev, (int)s->layout, s->packed, s->biases, s->inputs,
             s->masks, s->causal, s->lengths, s->outputs, s->scattered);
}

static void layer_make(layer *l, const shape *s, attn_dtype dtype, rng *r,
                       const char *title)
{
    static const attn_mha_params init = ATTN_MHA_PARAMS_INIT;
    memset(l, 0, sizeof *l);
    l->s = *s;
    l->dtype = dtype;
    l->p = init;
    l->p.weight_layout = s->layout;
    l->p.num_heads = s->heads;
    l->p.num_kv_heads = s->kv_heads;
    make_weights(l, r);
    make_inputs(l, r);
    make_options(l, r);
    describe(l, title);
}

static void layer_free(layer *l)
{
    tensor *const all[] = {&l->x_q,
                           &l->x_k,
                           &l->x_v,
                           &l->out,
                           &l->w_q,
                           &l->w_k,
                           &l->w_v,
                           &l->w_o,
                           &l->b_q,
                           &l->b_k,
                           &l->b_v,
                           &l->b_o,
                           &l->lse,
                           &l->weights,
                           &l->mean,
                           &l->mask_memory[0],
                           &l->mask_memory[1],
                           &l->mask_memory[2]};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        tensor_free(all[n]);
}

static int64_t check_output(const layer *l, const char *what, const tensor *t,
                            const ref_tensor *want)
{
    int64_t wrong = compare_tensor(what, l->name, &t->view, want, 1.0);
    if (!tensor_surroundings_intact(t)) {
        print_error("memory around %s was written; %s\n", what, l->name);
        wrong++;
    }
    return wrong;
}

static void check_layer(layer *l)
{
    const attn_tensor *x_k = l->s.inputs > 1 ? &l->x_k.view : NULL;
    const attn_tensor *x_v = l->s.inputs > 2 ? &l->x_v.view : NULL;
    ref_result want;
    int64_t wrong = 0;
    if (attn_mha(NULL, &l->p, &l->x_q.view, x_k, x_v, &l->out.view))
        fail_msg("%s: %s", l->name, attn_last_error());
    ref_mha(&want, &l->p, &l->x_q.view, x_k, x_v);
    wrong += check_output(l, "out", &l->out, &want.out);
    if (l->a.lse)
        wrong += check_output(l, "lse", &l->lse, &want.lse);
    if (l->a.weights)
        wrong += check_output(l, "weights", &l->weights, &want.weights);
    if (l->a.weights_mean)
        wrong += check_output(l, "mean", &l->mean, &want.weights_mean);
    ref_free(&want);
    if (wrong)
        fail_msg("%s", l->name);
}

/* ---------------------------------------------------------------- Table -- */

/* b tq tk | h hkv | d dv | e eq ek ev | layout (set below) packed biases
 * inputs | masks causal lengths outputs scattered */
static const struct {
    const char *title;
    shape s;
} table[] = {
    {"plain", {2, 5, 5, 4, 0, 4, 4, 16, 16, 16, 16, 0, 0, 0, 1, 0, 0, 0, 0, 0}},
    {"biases",
     {2, 5, 5, 4, 0, 4, 4, 16, 16, 16, 16, 0, 0, 15, 1, 0, 0, 0, 7, 0}},
    {"some biases",
     {1, 5, 5, 2, 0, 3, 3, 6, 6, 6, 6, 0, 0, 6, 1, 0, 0, 0, 7, 0}},
    {"output bias only",
     {1, 5, 5, 2, 0, 3, 3, 6, 6, 6, 6, 0, 0, 8, 1, 0, 0, 0, 0, 0}},
    {"packed",
     {2, 5, 5, 4, 0, 4, 4, 16, 16, 16, 16, 0, 1, 0, 1, 0, 0, 0, 2, 0}},
    {"packed, biases",
     {2, 17, 17, 4, 0, 4, 4, 16, 16, 16, 16, 0, 1, 9, 1, 0, 0, 0, 7, 0}},
    {"packed, grouped",
     {2, 17, 17, 6, 2, 5, 5, 16, 16, 16, 16, 0, 1, 9, 1, 0, 0, 0, 7, 0}},
    {"packed, cross",
     {2, 5, 17, 4, 0, 4, 4, 16, 16, 16, 16, 0, 1, 9, 2, 0, 0, 0, 7, 0}},
    {"head width is free",
     {1, 5, 5, 4, 0, 3, 7, 16, 16, 16, 16, 0, 0, 15, 1, 0, 0, 0, 7, 0}},
    {"out is wider than in",
     {1, 5, 5, 2, 0, 4, 4, 31, 8, 8, 8, 0, 0, 15, 1, 0, 0, 0, 0, 0}},
    {"cross, one source",
     {2, 5, 17, 4, 0, 4, 4, 16, 16, 16, 16, 0, 0, 15, 2, 0, 0, 0, 7, 0}},
    {"cross, three widths",
     {2, 5, 17, 4, 0, 4, 6, 16, 12, 9, 7, 0, 0, 15, 3, 0, 0, 0, 7, 0}},
    {"one key/value head",
     {2, 17, 17, 4, 1, 8, 8, 32, 32, 32, 32, 0, 0, 0, 1, 0, 0, 0, 7, 0}},
    {"causal",
     {2, 17, 17, 4, 0, 4, 4, 16, 16, 16, 16, 0, 0, 0, 1, 0, 1, 0, 7, 0}},
    {"causal, bottom right",
     {2, 5, 17, 4, 2, 4, 4, 16, 16, 16, 16, 0, 0, 9, 2, 0, 2, 0, 7, 0}},
    {"attention and padding mask",
     {3, 5, 17, 4, 0, 4, 4, 16, 16, 16, 16, 0, 0, 15, 2, 3, 0, 0, 7, 0}},
    {"all masks and causal",
     {3, 17, 17, 4, 0, 4, 4, 16, 16, 16, 16, 0, 1, 9, 1, 7, 1, 0, 7, 0}},
    {"lengths",
     {3, 17, 17, 4, 0, 4, 4, 16, 16, 16, 16, 0, 0, 15, 2, 0, 0, 1, 7, 0}},
    {"no tokens",
     {2, 0, 5, 2, 0, 4, 4, 8, 8, 8, 8, 0, 0, 15, 2, 0, 0, 0, 7, 0}},
    {"no keys: out is the output bias",
     {2, 5, 0, 2, 0, 4, 4, 8, 8, 8, 8, 0, 0, 15, 2, 0, 0, 0, 7, 0}},
    {"no batch", {0, 5, 5, 2, 0, 4, 4, 8, 8, 8, 8, 0, 0, 15, 1, 0, 0, 0, 7, 0}},
    {"inputs of width 0: biases alone",
     {1, 5, 5, 2, 0, 4, 4, 8, 0, 0, 0, 0, 0, 15, 1, 0, 0, 0, 7, 0}},
    {"one token of one number",
     {1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 15, 1, 0, 0, 0, 7, 0}},
    {"65 tokens",
     {1, 65, 65, 2, 0, 16, 16, 32, 32, 32, 32, 0, 1, 9, 1, 0, 1, 0, 7, 0}},
    {"130 tokens",
     {1, 130, 130, 2, 1, 8, 8, 16, 16, 16, 16, 0, 0, 9, 1, 0, 0, 0, 7, 0}}};

/* Every row in both weight layouts, both types, plain and scattered. */
static void test_mha__table_agrees_with_oracle(void **state)
{
    (void)state;
    for (size_t n = 0; n < sizeof table / sizeof table[0]; n++)
        for (int variant = 0; variant < 8; variant++) {
            shape s = table[n].s;
            rng r = rng_make(n, (uint64_t)variant);
            layer l;
            s.layout = variant & 1 ? ATTN_WEIGHT_OUT_IN : ATTN_WEIGHT_IN_OUT;
            s.scattered = variant >> 2;
            layer_make(&l, &s, types[variant >> 1 & 1], &r, table[n].title);
            check_layer(&l);
            layer_free(&l);
        }
}

/* --------------------------------------------------------------- Random -- */

static shape draw_shape(rng *r)
{
    shape s = {.batch = rng_int(r, 1, 3),
               .q_len = rng_int(r, 1, 20),
               .kv_heads = rng_int(r, 1, 3),
               .d = rng_int(r, 1, 17),
               .dv = rng_int(r, 1, 17),
               .e = rng_int(r, 1, 40),
               .eq = rng_int(r, 1, 40),
               .layout = (int32_t)rng_int(r, 1, 2),
               .packed = rng_one_in(r, 3),
               .biases = (int)rng_int(r, 0, 15),
               .inputs = (int)rng_int(r, 1, 3),
               .masks = rng_one_in(r, 2) ? (int)rng_int(r, 0, 7) : 0,
               .lengths = rng_one_in(r, 4),
               .outputs = (int)rng_int(r, 0, 7),
               .scattered = rng_one_in(r, 2)};
    s.heads = s.kv_heads * rng_int(r, 1, 3);
    s.kv_len = s.inputs == 1 ? s.q_len : rng_int(r, 1, 40);
    if (rng_one_in(r, 3))
        s.causal = (int)rng_int(r, 1, 2);
    s.ek = s.packed || s.inputs == 1 ? s.eq : rng_int(r, 1, 40);
    s.ev = s.packed || s.inputs < 3 ? s.ek : rng_int(r, 1, 40);
    if (s.packed)
        s.dv = s.d;
    return s;
}

static void test_mha__random_layers_agree_with_oracle(void **state)
{
    (void)state;
    const char *text = getenv("ATTN_TEST_SEED");
    const uint64_t seed = text && *text ? strtoull(text, NULL, 10) : 1;
    for (uint64_t n = 0; n < RANDOM_LAYERS; n++) {
        rng r = rng_make(seed, n);
        const shape s = draw_shape(&r);
        char title[80];
        layer l;
        snprintf(title, sizeof title,
                 "ATTN_TEST_SEED=%" PRIu64 " layer %" PRIu64, seed, n);
        layer_make(&l, &s, types[rng_int(&r, 0, 1)], &r, title);
        check_layer(&l);
        layer_free(&l);
    }
    print_message("largest fraction of an error bound %.3f\n", compare_worst());
}

/* A packed matrix is the three one after the other. */
static void test_mha__packed_equals_separate(void **state)
{
    (void)state;
    for (size_t t = 0; t < 2; t++) {
        rng r = rng_make(7, t);
        const shape s = {
            2, 17, 17, 6, 2, 5, 5, 16, 16, 16, 16, ATTN_WEIGHT_OUT_IN,
            1, 9,  1,  0, 0, 0, 7, 0};
        layer l;
        layer_make(&l, &s, types[t], &r, "packed equals separate");
        check_layer(&l);
        tensor first = tensor_copy(&l.out.view, types[t]);
        const attn_tensor w = l.w_q.view, b = l.b_q.view;
        const attn_tensor w_q = tensor_slice(&w, 2, 0, 30);
        const attn_tensor w_k = tensor_slice(&w, 2, 30, 10);
        const attn_tensor w_v = tensor_slice(&w, 2, 40, 10);
        const attn_tensor b_q = tensor_slice(&b, 3, 0, 30);
        const attn_tensor b_k = tensor_slice(&b, 3, 30, 10);
        const attn_tensor b_v = tensor_slice(&b, 3, 40, 10);
        l.p.w_qkv = l.p.b_qkv = NULL;
        l.p.w_q = &w_q;
        l.p.w_k = &w_k;
        l.p.w_v = &w_v;
        l.p.b_q = &b_q;
        l.p.b_k = &b_k;
        l.p.b_v = &b_v;
        check_layer(&l);
        ref_result bounds;
        ref_mha(&bounds, &l.p, &l.x_q.view, NULL, NULL);
        assert_int_equal(compare_golden("out", l.name, &l.out.view, &first.view,
                                        &bounds.out, 0.0),
                         0);
        ref_free(&bounds);
        tensor_free(&first);
        layer_free(&l);
    }
}

/* The call with the caller's scratch memory gives the same bits. */
static void test_mha_work__same_bits(void **state)
{
    (void)state;
    for (size_t n = 0; n < sizeof table / sizeof table[0]; n++) {
        shape s = table[n].s;
        rng r = rng_make(n, 99);
        size_t bytes, alignment;
        layer l;
        s.layout = ATTN_WEIGHT_OUT_IN;
        layer_make(&l, &s, ATTN_F32, &r, table[n].title);
        check_layer(&l);
        tensor first = tensor_copy(&l.out.view, ATTN_F32);
        const attn_tensor *x_k = s.inputs > 1 ? &l.x_k.view : NULL;
        const attn_tensor *x_v = s.inputs > 2 ? &l.x_v.view : NULL;
        assert_int_equal(attn_mha_workspace(NULL, &l.p, &l.x_q.view, x_k, x_v,
                                            &l.out.view, &bytes, &alignment),
                         ATTN_OK);
        unsigned char *memory = malloc(bytes + alignment);
        assert_non_null(memory);
        memset(memory, 0xFF, bytes + alignment);
        unsigned char *aligned =
            memory + (alignment - (uintptr_t)memory % alignment) % alignment;
        tensor_fill(&l.out.view, -7.0);
        assert_int_equal(attn_mha_work(NULL, &l.p, &l.x_q.view, x_k, x_v,
                                       &l.out.view, aligned, bytes),
                         ATTN_OK);
        assert_true(compare_bits("out", l.name, &l.out.view, &first.view));
        free(memory);
        tensor_free(&first);
        layer_free(&l);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mha__table_agrees_with_oracle),
        cmocka_unit_test(test_mha__random_layers_agree_with_oracle),
        cmocka_unit_test(test_mha__packed_equals_separate),
        cmocka_unit_test(test_mha_work__same_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
