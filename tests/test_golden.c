/*
 * Golden vectors: what PyTorch computed for the same inputs, see
 * golden/README.md. The oracle is held against them first, so that a
 * disagreement can be told from a fault of the oracle, and then the library.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cases.h"
#include "compare.h"
#include "tensors.h"

/* As many cases as make_golden.py writes: a lost folder must not go unseen. */
enum { NUM_CASES = 204, NUM_BACKWARD_CASES = 68 };

/* The largest absolute difference to PyTorch in the float64 examples of five
 * tokens: two units in the last place of a number between 1 and 2. */
#define ARTICLE_DISTANCE 4.5e-16

/* The outputs besides out, the log-sum-exp first: the role in a case, the field
 * of the parameters, and the oracle's. */
static const struct {
    const char *role;
    size_t field, exact;
} others[] = {
#define OTHER(name)                                                         \
    {                                                                       \
#name, offsetof(attn_sdpa_params, name), offsetof(ref_result, name) \
    }
    OTHER(lse),        OTHER(weights),       OTHER(weights_mean),
    OTHER(scores_raw), OTHER(scores_capped), OTHER(scores),
    OTHER(key_sums),   OTHER(max_weight),    OTHER(effective_keys),
    OTHER(entropy)
#undef OTHER
};
enum { NUM_OTHERS = sizeof others / sizeof others[0] };

/* The gradients that a case may have. */
enum { D_Q, D_K, D_V, D_MASK0, D_MASK1, D_ALIBI, D_SINKS, D_SCALE };
static const char *const gradient_roles[] = {
    "d_q", "d_k", "d_v", "d_mask0", "d_mask1", "d_alibi", "d_sinks", "d_scale"};
enum { NUM_GRADIENTS = sizeof gradient_roles / sizeof gradient_roles[0] };

static const ref_tensor *exact_of(const ref_result *r, int n)
{
    return (const ref_tensor *)(const void *)((const char *)r +
                                              others[n].exact);
}

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
    int32_t *q_segments, *kv_segments; /* from malloc, or NULL */
    tensor out;
    tensor other[NUM_OTHERS];
    attn_sdpa_gradients gradients;
    tensor gradient[NUM_GRADIENTS];
    const attn_tensor *d_masks[ATTN_MAX_MASKS];
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

static int32_t align_of(const char *word)
{
    if (strcmp(word, "top_left") == 0)
        return ATTN_ALIGN_TOP_LEFT;
    assert_string_equal(word, "bottom_right");
    return ATTN_ALIGN_BOTTOM_RIGHT;
}

/* Two numbers of a line. */
static void read_pair(const test_case *c, const char *word, int64_t *first,
                      int64_t *second)
{
    char *rest;
    *first = strtoll(case_value(c, word, 0), &rest, 10);
    *second = strtoll(rest, NULL, 10);
}

static int32_t *read_segments(const test_case *c, const char *role)
{
    const npy_array *a = case_array(c, role);
    if (!a)
        return NULL;
    assert_int_equal(a->view.dtype, NPY_I64);
    int32_t *segments = malloc((size_t)a->count * sizeof *segments);
    assert_non_null(segments);
    for (int64_t i = 0; i < a->count; i++)
        segments[i] = (int32_t)((const int64_t *)a->view.data)[i];
    return segments;
}

static const int64_t *read_lengths(const test_case *c, const char *role)
{
    const npy_array *a = case_array(c, role);
    if (!a)
        return NULL;
    assert_int_equal(a->view.dtype, NPY_I64);
    return a->view.data;
}

static void read_later_options(call *a)
{
    const test_case *c = &a->c;
    attn_sdpa_params *p = &a->params;
    if (case_value(c, "align", 0))
        p->align = align_of(case_value(c, "align", 0));
    if (case_value(c, "window", 0)) {
        p->flags |= ATTN_SDPA_WINDOW;
        read_pair(c, "window", &p->window_left, &p->window_right);
    }
    if (case_value(c, "block", 0)) {
        p->blocks = case_tensor(c, "blocks");
        read_pair(c, "block", &p->block_q, &p->block_k);
    }
    p->q_lens = read_lengths(c, "q_lens");
    p->kv_lens = read_lengths(c, "kv_lens");
    p->kv_starts = read_lengths(c, "kv_starts");
    p->softcap = case_number(c, "softcap", 0.0);
    p->alibi = case_tensor(c, "alibi");
    p->sinks = case_tensor(c, "sinks");
    p->q_segments = a->q_segments = read_segments(c, "q_segments");
    p->kv_segments = a->kv_segments = read_segments(c, "kv_segments");
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
        a->params.causal = 1;
        a->params.align = align_of(causal);
    }
    if (case_value(&a->c, "scale", 0)) {
        a->params.flags |= ATTN_SDPA_SCALE;
        a->params.scale = case_number(&a->c, "scale", 0.0);
    }
    read_later_options(a);
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

/* The outputs that the case has, and the log-sum-exp. out is in a layout of its
 * own for layers whose input is (T,B,E): the same strides as the input's. */
static void make_outputs(call *a)
{
    const int64_t *s = a->want_out.shape;
    const int64_t heads = a->is_mha ? a->mha.num_heads : s[1];
    const attn_dtype type = a->q.dtype;
    a->out = tensor_make(type, s[0], s[1], s[2], s[3]);
    if (a->is_mha)
        memcpy(a->out.view.stride, a->want_out.stride,
               sizeof a->out.view.stride);
    for (int n = 0; n < NUM_OTHERS; n++) {
        const attn_tensor *want = case_tensor(&a->c, others[n].role);
        const int is_lse = n == 0;
        if (!want && !is_lse)
            continue;
        a->other[n] = want ? tensor_make(type, want->shape[0], want->shape[1],
                                         want->shape[2], want->shape[3])
                           : tensor_make(type, s[0], heads, s[2], 1);
        const attn_tensor *view = &a->other[n].view;
        memcpy((char *)&a->params + others[n].field, &view, sizeof view);
    }
}

/* The gradients that the case has. */
static void make_gradients(call *a)
{
    attn_sdpa_gradients_init(&a->gradients);
    for (int n = 0; n < NUM_GRADIENTS; n++) {
        const attn_tensor *want = case_tensor(&a->c, gradient_roles[n]);
        if (want)
            a->gradient[n] =
                tensor_make(want->dtype, want->shape[0], want->shape[1],
                            want->shape[2], want->shape[3]);
    }
#define ASKED(n) (a->gradient[n].block ? &a->gradient[n].view : NULL)
    a->gradients.d_lse = case_tensor(&a->c, "d_lse");
    a->gradients.d_q = ASKED(D_Q);
    a->gradients.d_k = ASKED(D_K);
    a->gradients.d_v = ASKED(D_V);
    a->d_masks[0] = ASKED(D_MASK0);
    a->d_masks[1] = ASKED(D_MASK1);
    a->gradients.d_masks = a->params.num_masks > 0 ? a->d_masks : NULL;
    a->gradients.d_alibi = ASKED(D_ALIBI);
    a->gradients.d_sinks = ASKED(D_SINKS);
    a->gradients.d_scale = ASKED(D_SCALE);
#undef ASKED
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
    make_gradients(a);
}

static void call_free(call *a)
{
    tensor_free(&a->out);
    for (int n = 0; n < NUM_OTHERS; n++)
        tensor_free(&a->other[n]);
    for (int n = 0; n < NUM_GRADIENTS; n++)
        tensor_free(&a->gradient[n]);
    free(a->q_segments);
    free(a->kv_segments);
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
    int64_t wrong = compare_tensor("out", c->name, &a->want_out, &r->out, 1.0);
    for (int n = 0; n < NUM_OTHERS; n++) {
        const attn_tensor *want = case_tensor(c, others[n].role);
        if (want)
            wrong += compare_tensor(others[n].role, c->name, want,
                                    exact_of(r, n), 1.0);
    }
    return wrong;
}

static int64_t library_against_golden(const call *a, const ref_result *r)
{
    const test_case *c = &a->c;
    int64_t wrong = compare_golden("out", c->name, &a->out.view, &a->want_out,
                                   &r->out, 0.0);
    for (int n = 0; n < NUM_OTHERS; n++) {
        const attn_tensor *want = case_tensor(c, others[n].role);
        if (want)
            wrong += compare_golden(others[n].role, c->name, &a->other[n].view,
                                    want, exact_of(r, n), 0.0);
    }
    return wrong;
}

static int64_t library_against_oracle(const call *a, const ref_result *r)
{
    const char *name = a->c.name;
    int64_t wrong = compare_tensor("out", name, &a->out.view, &r->out, 1.0);
    for (int n = 0; n < NUM_OTHERS; n++)
        if (a->other[n].block)
            wrong += compare_tensor(others[n].role, name, &a->other[n].view,
                                    exact_of(r, n), 1.0);
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

/* ---- gradients ---- */

static const ref_tensor *exact_gradient(const ref_gradients *r, int n)
{
    const ref_tensor *const all[] = {
        &r->d_q,        &r->d_k,     &r->d_v,     &r->d_masks[0],
        &r->d_masks[1], &r->d_alibi, &r->d_sinks, &r->d_scale};
    return all[n];
}

/* From PyTorch's out and lse. */
static void gradient_oracle(const call *a, ref_gradients *r)
{
    attn_sdpa_params p = a->params;
    p.lse = case_tensor(&a->c, "lse");
    ref_sdpa_backward(r, &p, &a->q, &a->k, &a->v, &a->want_out,
                      case_tensor(&a->c, "d_out"), &a->gradients);
}

static void call_gradients(call *a)
{
    call_library(a);
    if (attn_sdpa_backward(NULL, &a->params, &a->q, &a->k, &a->v, &a->out.view,
                           case_tensor(&a->c, "d_out"),
                           &a->gradients) != ATTN_OK)
        fail_msg("%s: %s", a->c.name, attn_last_error());
}

/* The oracle's bounds are for gradients from this lse, which PyTorch has not
 * used for its own: it counts for both sides. */
static void check_gradients(const char *name)
{
    call a;
    ref_gradients r;
    int64_t wrong = 0;
    call_load(&a, name);
    gradient_oracle(&a, &r);
    call_gradients(&a);
    for (int n = 0; n < NUM_GRADIENTS; n++) {
        const attn_tensor *want = case_tensor(&a.c, gradient_roles[n]);
        if (!want)
            continue;
        wrong += compare_tensor(gradient_roles[n], name, want,
                                exact_gradient(&r, n), 2.0);
        wrong += compare_golden(gradient_roles[n], name, &a.gradient[n].view,
                                want, exact_gradient(&r, n), 0.0);
    }
    ref_free_gradients(&r);
    call_free(&a);
    if (wrong)
        fail_msg("%s: gradients disagree", name);
}

/* Calls run for the cases of gradients in the type that a name ends with. */
static void each_backward_case(const char *type, void (*run)(const char *name))
{
    int num, found = 0;
    char **list = case_list("golden", &num);
    for (int i = 0; i < num; i++) {
        if (strncmp(list[i], "backward", 8) != 0 || !strstr(list[i], type))
            continue;
        run(list[i]);
        found++;
    }
    case_free_list(list, num);
    assert_int_equal(found, NUM_BACKWARD_CASES / 2);
}

static void test_backward__agrees_with_pytorch(void **state)
{
    (void)state;
    each_backward_case("_f64", check_gradients);
    each_backward_case("_f32", check_gradients);
}

/* Of float32, ours and PyTorch's. */
static double spread[2];

static void add_spreads(const char *name)
{
    char other[96];
    call a, exact;
    ref_gradients r;
    (void)snprintf(other, sizeof other, "%s", name);
    memcpy(other + strlen(other) - 3, "f64", 3);
    call_load(&a, name);
    call_load(&exact, other);
    gradient_oracle(&exact, &r);
    call_gradients(&a);
    for (int n = 0; n < NUM_GRADIENTS; n++) {
        const attn_tensor *theirs = case_tensor(&a.c, gradient_roles[n]);
        if (!theirs)
            continue;
        spread[0] += spread_of(&a.gradient[n].view, exact_gradient(&r, n));
        spread[1] += spread_of(theirs, exact_gradient(&r, n));
    }
    ref_free_gradients(&r);
    call_free(&exact);
    call_free(&a);
}

/* As the outputs above, in float32, from the exact gradients: those of the same
 * numbers in float64. */
static void test_backward__is_as_exact_as_pytorch(void **state)
{
    (void)state;
    each_backward_case("_f32", add_spreads);
    print_message("gradients: the error is %.3f of PyTorch's\n",
                  spread[0] / spread[1]);
    assert_true(spread[0] <= 1.5 * spread[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle__agrees_with_pytorch),
        cmocka_unit_test(test_library__agrees_with_pytorch),
        cmocka_unit_test(test_library__is_as_exact_as_pytorch),
        cmocka_unit_test(test_backward__agrees_with_pytorch),
        cmocka_unit_test(test_backward__is_as_exact_as_pytorch),
        cmocka_unit_test(test_article_f64__is_as_near_as_it_says)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
