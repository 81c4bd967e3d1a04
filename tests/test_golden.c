/*
 * Golden vectors: what PyTorch computed for the same inputs, see
 * golden/README.md. The oracle is held against them first, so that a
 * disagreement can be told from a fault of the oracle, and then the library.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cases.h"
#include "compare.h"
#include "tensors.h"

/* As many cases as make_golden.py writes: a lost folder must not go unseen. */
enum { NUM_CASES = 98 };

/* The largest absolute difference to PyTorch in the float64 examples of five
 * tokens: two units in the last place of a number between 1 and 2. */
#define ARTICLE_DISTANCE 4.5e-16

/* The arguments of a call, from a case. */
typedef struct call {
    test_case c;
    attn_mask masks[ATTN_MAX_MASKS];
    attn_sdpa_params params;
    attn_mha_params mha;
    int is_mha;
    attn_tensor q, k, v; /* x_q, x_k, x_v of a layer */
    const attn_tensor *pk, *pv;
    attn_tensor want_out;
    tensor out, lse, weights, mean;
} call;

static int32_t kind_of(const char *word)
{
    if (strncmp(word, "keep ", 5) == 0)
        return ATTN_MASK_KEEP;
    if (strncmp(word, "drop ", 5) == 0)
        return ATTN_MASK_DROP;
    assert_true(strncmp(word, "add ", 4) == 0);
    return ATTN_MASK_ADD;
}

static void read_options(call *a)
{
    const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
    a->params = init;
    for (int n = 0; case_value(&a->c, "mask", n); n++) {
        const char *value = case_value(&a->c, "mask", n);
        const attn_tensor *view = case_tensor(&a->c, strchr(value, ' ') + 1);
        assert_non_null(view);
        a->masks[n].kind = kind_of(value);
        a->masks[n].view = *view;
        a->params.num_masks = n + 1;
        a->params.masks = a->masks;
    }
    const char *causal = case_value(&a->c, "causal", 0);
    if (causal) {
        assert_string_equal(causal, "top_left");
        a->params.causal = 1;
        a->params.align = ATTN_ALIGN_TOP_LEFT;
    }
    if (case_value(&a->c, "scale", 0)) {
        a->params.flags |= ATTN_SDPA_SCALE;
        a->params.scale = case_number(&a->c, "scale", 0.0);
    }
}

/* (1,B,T,E) or (1,T,B,E) as stored, to the (B,1,T,E) of attn.h. */
static attn_tensor layer_view(const call *a, const char *role)
{
    const attn_tensor *s = case_tensor(&a->c, role);
    const int batch_first = strcmp(case_value(&a->c, "input", 0), "bte") == 0;
    const int b = batch_first ? 1 : 2, t = batch_first ? 2 : 1;
    const attn_tensor view = {
        .data = s->data,
        .shape = {s->shape[b], 1, s->shape[t], s->shape[3]},
        .stride = {s->stride[b], s->stride[0], s->stride[t], s->stride[3]},
        .dtype = s->dtype};
    return view;
}

static void read_layer(call *a)
{
    const attn_mha_params init = ATTN_MHA_PARAMS_INIT;
    a->mha = init;
    a->mha.num_heads = (int64_t)case_number(&a->c, "heads", 0.0);
    a->mha.weight_layout =
        strcmp(case_value(&a->c, "weight_layout", 0), "in_out") == 0
            ? ATTN_WEIGHT_IN_OUT
            : ATTN_WEIGHT_OUT_IN;
    a->mha.w_q = case_tensor(&a->c, "w_q");
    a->mha.w_k = case_tensor(&a->c, "w_k");
    a->mha.w_v = case_tensor(&a->c, "w_v");
    a->mha.w_qkv = case_tensor(&a->c, "w_qkv");
    a->mha.w_o = case_tensor(&a->c, "w_o");
    a->mha.b_q = case_tensor(&a->c, "b_q");
    a->mha.b_k = case_tensor(&a->c, "b_k");
    a->mha.b_v = case_tensor(&a->c, "b_v");
    a->mha.b_qkv = case_tensor(&a->c, "b_qkv");
    a->mha.b_o = case_tensor(&a->c, "b_o");
    a->mha.attention = &a->params;
    a->q = layer_view(a, "x_q");
    if (case_tensor(&a->c, "x_k")) {
        a->k = layer_view(a, "x_k");
        a->v = layer_view(a, "x_v");
        a->pk = &a->k;
        a->pv = &a->v;
    }
    a->want_out = layer_view(a, "out");
}

static void read_sdpa(call *a)
{
    a->q = *case_tensor(&a->c, "q");
    a->k = *case_tensor(&a->c, "k");
    a->v = *case_tensor(&a->c, "v");
    a->pk = &a->k;
    a->pv = &a->v;
    a->want_out = *case_tensor(&a->c, "out");
}

/* Outputs of the library, in layouts of their own for layers whose input is
 * (T,B,E): the same strides as the input's. */
static void make_outputs(call *a)
{
    const int64_t *s = a->want_out.shape;
    const int64_t heads = a->is_mha ? a->mha.num_heads : s[1];
    const int64_t keys = a->pk ? a->pk->shape[2] : a->q.shape[2];
    const attn_dtype type = a->q.dtype;
    a->out = tensor_make(type, s[0], s[1], s[2], s[3]);
    if (a->is_mha)
        memcpy(a->out.view.stride, a->want_out.stride,
               sizeof a->out.view.stride);
    a->lse = tensor_make(type, s[0], heads, s[2], 1);
    a->weights = tensor_make(type, s[0], heads, s[2], keys);
    a->mean = tensor_make(type, s[0], 1, s[2], keys);
    a->params.lse = &a->lse.view;
    if (case_tensor(&a->c, "weights"))
        a->params.weights = &a->weights.view;
    if (case_tensor(&a->c, "weights_mean"))
        a->params.weights_mean = &a->mean.view;
}

static void call_load(call *a, const char *name)
{
    memset(a, 0, sizeof *a);
    case_load(&a->c, "golden", name);
    a->is_mha = strcmp(case_value(&a->c, "op", 0), "mha") == 0;
    read_options(a);
    if (a->is_mha)
        read_layer(a);
    else
        read_sdpa(a);
    make_outputs(a);
}

static void call_free(call *a)
{
    tensor_free(&a->out);
    tensor_free(&a->lse);
    tensor_free(&a->weights);
    tensor_free(&a->mean);
    case_free(&a->c);
}

static void call_oracle(const call *a, ref_result *r)
{
    if (a->is_mha)
        ref_mha(r, &a->mha, &a->q, a->pk, a->pv);
    else
        ref_sdpa(r, &a->params, &a->q, a->pk, a->pv);
}

static void call_library(call *a)
{
    const attn_status s =
        a->is_mha
            ? attn_mha(NULL, &a->mha, &a->q, a->pk, a->pv, &a->out.view)
            : attn_sdpa(NULL, &a->params, &a->q, a->pk, a->pv, &a->out.view);
    if (s != ATTN_OK)
        fail_msg("%s: %s", a->c.name, attn_last_error());
}

/* PyTorch computed in the type of the case, so it may use the whole bound. */
static int64_t oracle_against_golden(const call *a, const ref_result *r)
{
    const test_case *c = &a->c;
    const attn_tensor *lse = case_tensor(c, "lse");
    const attn_tensor *w = case_tensor(c, "weights");
    const attn_tensor *mean = case_tensor(c, "weights_mean");
    int64_t wrong = compare_tensor("out", c->name, &a->want_out, &r->out, 1.0);
    if (lse)
        wrong += compare_tensor("lse", c->name, lse, &r->lse, 1.0);
    if (w)
        wrong += compare_tensor("weights", c->name, w, &r->weights, 1.0);
    if (mean)
        wrong += compare_tensor("weights_mean", c->name, mean, &r->weights_mean,
                                1.0);
    return wrong;
}

static int64_t library_against_golden(const call *a, const ref_result *r)
{
    const test_case *c = &a->c;
    const attn_tensor *lse = case_tensor(c, "lse");
    const attn_tensor *w = case_tensor(c, "weights");
    const attn_tensor *mean = case_tensor(c, "weights_mean");
    int64_t wrong = compare_golden("out", c->name, &a->out.view, &a->want_out,
                                   &r->out, 0.0);
    if (lse)
        wrong +=
            compare_golden("lse", c->name, &a->lse.view, lse, &r->lse, 0.0);
    if (w)
        wrong += compare_golden("weights", c->name, &a->weights.view, w,
                                &r->weights, 0.0);
    if (mean)
        wrong += compare_golden("weights_mean", c->name, &a->mean.view, mean,
                                &r->weights_mean, 0.0);
    return wrong;
}

static int64_t library_against_oracle(const call *a, const ref_result *r)
{
    const char *name = a->c.name;
    int64_t wrong = compare_tensor("out", name, &a->out.view, &r->out, 1.0);
    wrong += compare_tensor("lse", name, &a->lse.view, &r->lse, 1.0);
    if (a->params.weights)
        wrong +=
            compare_tensor("weights", name, &a->weights.view, &r->weights, 1.0);
    if (a->params.weights_mean)
        wrong += compare_tensor("weights_mean", name, &a->mean.view,
                                &r->weights_mean, 1.0);
    return wrong;
}

static void oracle_case(const char *name)
{
    call a;
    ref_result r;
    call_load(&a, name);
    call_oracle(&a, &r);
    const int64_t wrong = oracle_against_golden(&a, &r);
    ref_free(&r);
    call_free(&a);
    if (wrong)
        fail_msg("%s: the oracle disagrees with PyTorch", name);
}

static void library_case(const char *name)
{
    call a;
    ref_result r;
    call_load(&a, name);
    call_library(&a);
    call_oracle(&a, &r);
    const int64_t wrong =
        library_against_golden(&a, &r) + library_against_oracle(&a, &r);
    ref_free(&r);
    call_free(&a);
    if (wrong)
        fail_msg("%s: the library disagrees", name);
}

static void each_case(void (*run)(const char *name))
{
    int num;
    char **list = case_list("golden", &num);
    for (int i = 0; i < num; i++)
        run(list[i]);
    case_free_list(list, num);
    assert_int_equal(num, NUM_CASES);
}

static void test_oracle__agrees_with_pytorch(void **state)
{
    (void)state;
    each_case(oracle_case);
    print_message("largest fraction of a bound, oracle and PyTorch: %.3f\n",
                  compare_worst());
}

static void test_library__agrees_with_pytorch(void **state)
{
    (void)state;
    each_case(library_case);
}

/* Root mean square distance from the oracle, in units of the oracle's bound. */
static double spread_of(const attn_tensor *x, const ref_tensor *exact)
{
    double sum = 0.0;
    int64_t n = 0;
    const int64_t *s = exact->shape;
    for (int64_t b = 0; b < s[0]; b++)
        for (int64_t h = 0; h < s[1]; h++)
            for (int64_t t = 0; t < s[2]; t++)
                for (int64_t d = 0; d < s[3]; d++) {
                    const ref_num *w = ref_at(exact, b, h, t, d);
                    if (w->error == 0.0L)
                        continue;
                    const double e =
                        (double)((ref_get(x, b, h, t, d) - w->value) /
                                 w->error);
                    sum += e * e;
                    n++;
                }
    return n ? sqrt(sum / (double)n) : 0.0;
}

/* The bounds are worst cases and would let an exponential pass that has lost
 * some bits. PyTorch is the measure here: over all cases of a type, the
 * library's errors are no larger than its, but for a tenth that the order of
 * sums in some BLAS may cost. */
static void test_library__is_as_exact_as_pytorch(void **state)
{
    (void)state;
    double ours[2] = {0.0, 0.0}, theirs[2] = {0.0, 0.0};
    int num;
    char **list = case_list("golden", &num);
    for (int i = 0; i < num; i++) {
        call a;
        ref_result r;
        call_load(&a, list[i]);
        call_library(&a);
        call_oracle(&a, &r);
        const int t = a.q.dtype == ATTN_F64;
        ours[t] += spread_of(&a.out.view, &r.out);
        theirs[t] += spread_of(&a.want_out, &r.out);
        ref_free(&r);
        call_free(&a);
    }
    case_free_list(list, num);
    for (int t = 0; t < 2; t++) {
        print_message("float%d: mean error %.4f of the bound, PyTorch %.4f\n",
                      t ? 64 : 32, ours[t] / num * 2, theirs[t] / num * 2);
        assert_true(ours[t] <= 1.1 * theirs[t]);
    }
}

static void test_article_f64__is_as_near_as_it_says(void **state)
{
    (void)state;
    static const char *const names[] = {
        "article_single_f64", "article_causal_f64", "article_multihead_f64",
        "article_multihead_causal_f64", "article_multihead_cross_f64"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        call a;
        call_load(&a, names[i]);
        call_library(&a);
        const double d = compare_distance(&a.out.view, &a.want_out);
        call_free(&a);
        print_message("%s: largest difference %.3g\n", names[i], d);
        if (!(d <= ARTICLE_DISTANCE))
            fail_msg("%s: %.3g away from PyTorch", names[i], d);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle__agrees_with_pytorch),
        cmocka_unit_test(test_library__agrees_with_pytorch),
        cmocka_unit_test(test_library__is_as_exact_as_pytorch),
        cmocka_unit_test(test_article_f64__is_as_near_as_it_says)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
