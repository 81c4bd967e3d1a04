/*
 * The published cases of the ONNX operator Attention, see
 * cases/onnx/README.md. Every folder is run, with all that it expects. Keys and
 * values of float16 are handed over as they are stored; queries, which attn.h
 * has no such type for, as floats.
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

/* A folder that is lost must not go unseen, nor a line of one. */
enum { NUM_CASES = 38, NUM_CAPPED = 7, NUM_STAGED = 9, NUM_HALF = 3 };

enum { MAX_BATCH = 8 };

/* A case as arguments of attn_sdpa. */
typedef struct call {
    test_case c;
    attn_sdpa_params params;
    attn_mask mask;
    attn_tensor q, k, v, y;
    tensor all_k, all_v, long_mask; /* block NULL: not needed */
    tensor half_k, half_v;
    tensor out, weights, scores_raw, scores_capped, scores;
    int64_t offsets[MAX_BATCH];
    double rounding; /* of the stored Y, relative */
} call;

/* Rank 3 is (B,T,H*D): head h is columns h*D on, which is only a view. */
static attn_tensor by_heads(const test_case *c, const char *role, long heads)
{
    const npy_array *a = case_array(c, role);
    assert_non_null(a);
    attn_tensor view = a->view;
    if (a->rank == 3)
        assert_int_equal(attn_view_bthd(&view, a->view.dtype, a->view.data,
                                        a->view.shape[1], a->view.shape[2],
                                        heads, a->view.shape[3] / heads),
                         ATTN_OK);
    return view;
}

/* past, then x, along the keys; and it is what the operator calls present. */
static void append(const test_case *c, attn_tensor *x, tensor *all,
                   const char *past_role, const char *present_role)
{
    const attn_tensor *past = case_tensor(c, past_role);
    const attn_tensor *present = case_tensor(c, present_role);
    if (!past)
        return;
    const int64_t old = past->shape[2];
    *all = tensor_make(x->dtype, x->shape[0], x->shape[1], old + x->shape[2],
                       x->shape[3]);
    const attn_tensor first = tensor_slice(&all->view, 2, 0, old);
    const attn_tensor rest = tensor_slice(&all->view, 2, old, x->shape[2]);
    tensor_assign(&first, past);
    tensor_assign(&rest, x);
    *x = all->view;
    assert_non_null(present);
    assert_true(compare_bits(present_role, c->name, x, present));
}

/* From opset 24 on, a mask that ends before the keys do hides the rest. */
static void lengthen_mask(call *a, int64_t keys)
{
    const attn_tensor old = a->mask.view;
    const int64_t *s = old.shape;
    if (s[3] == keys || (s[3] == 1 && case_number(&a->c, "opset", 0) < 24))
        return;
    a->long_mask = tensor_make(old.dtype, s[0], s[1], s[2], keys);
    const attn_tensor start = tensor_slice(&a->long_mask.view, 3, 0, s[3]);
    tensor_fill(&a->long_mask.view,
                a->mask.kind == ATTN_MASK_KEEP ? 0.0 : -HUGE_VAL);
    tensor_assign(&start, &old);
    a->mask.view = a->long_mask.view;
}

static void read_mask(call *a)
{
    const attn_tensor *m = case_tensor(&a->c, "attn_mask");
    if (!m)
        return;
    a->mask.kind = m->dtype == ATTN_U8 ? ATTN_MASK_KEEP : ATTN_MASK_ADD;
    a->mask.view = *m;
    lengthen_mask(a, a->k.shape[2]);
    a->params.masks = &a->mask;
    a->params.num_masks = 1;
}

/* The causal offset is the length of the past, or what makes the last query
 * stand at the last key of the padded cache, or 0. */
static void read_positions(call *a)
{
    const npy_array *lens = case_array(&a->c, "nonpad_kv_seqlen");
    const attn_tensor *past = case_tensor(&a->c, "past_key");
    a->params.causal = (int32_t)case_number(&a->c, "causal", 0.0);
    a->params.align = ATTN_ALIGN_OFFSET;
    if (!lens) {
        a->params.q_offset = past ? past->shape[2] : 0;
        return;
    }
    assert_true(lens->view.dtype == NPY_I64 && lens->count <= MAX_BATCH);
    a->params.kv_lens = lens->view.data;
    for (int64_t b = 0; b < lens->count; b++)
        a->offsets[b] = a->params.kv_lens[b] - a->q.shape[2];
    a->params.q_offsets = a->offsets;
}

/* The numbers of x, which are those of float16, in its own 16 bits. */
static void store_as_half(attn_tensor *x, tensor *half)
{
    *half = tensor_copy(x, ATTN_F16);
    assert_true(compare_distance(&half->view, x) == 0.0);
    *x = half->view;
}

/* What the operator may return besides Y, by the number of its mode. */
static void make_outputs(call *a)
{
    const int64_t *s = a->y.shape;
    const int64_t keys = a->k.shape[2];
    a->out = tensor_make(ATTN_F32, s[0], s[1], s[2], s[3]);
    a->weights = tensor_make(ATTN_F32, s[0], s[1], s[2], keys);
    a->scores_raw = tensor_make(ATTN_F32, s[0], s[1], s[2], keys);
    a->scores_capped = tensor_make(ATTN_F32, s[0], s[1], s[2], keys);
    a->scores = tensor_make(ATTN_F32, s[0], s[1], s[2], keys);
    a->params.weights = &a->weights.view;
    a->params.scores_raw = &a->scores_raw.view;
    a->params.scores_capped = &a->scores_capped.view;
    a->params.scores = &a->scores.view;
}

static void call_load(call *a, const char *name)
{
    const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
    memset(a, 0, sizeof *a);
    a->params = init;
    case_load(&a->c, "cases/onnx", name);
    char *rest;
    const long heads = strtol(case_value(&a->c, "heads", 0), &rest, 10);
    const long kv_heads = strtol(rest, NULL, 10);
    a->q = by_heads(&a->c, "Q", heads);
    a->k = by_heads(&a->c, "K", kv_heads);
    a->v = by_heads(&a->c, "V", kv_heads);
    a->y = by_heads(&a->c, "Y", heads);
    append(&a->c, &a->k, &a->all_k, "past_key", "present_key");
    append(&a->c, &a->v, &a->all_v, "past_value", "present_value");
    read_mask(a);
    read_positions(a);
    if (case_value(&a->c, "scale", 0)) {
        a->params.flags |= ATTN_SDPA_SCALE;
        a->params.scale = case_number(&a->c, "scale", 0.0);
    }
    a->params.softcap = case_number(&a->c, "softcap", 0.0);
    /* Half a unit in the last place of the type Y was rounded to; ones below
     * float16's normal range are absolute and do not occur. */
    a->rounding = case_array(&a->c, "Y")->is_half ? 0x1p-11 : 0x1p-24;
    if (case_array(&a->c, "K")->is_half) {
        store_as_half(&a->k, &a->half_k);
        store_as_half(&a->v, &a->half_v);
    }
    make_outputs(a);
}

static void call_free(call *a)
{
    tensor_free(&a->all_k);
    tensor_free(&a->all_v);
    tensor_free(&a->long_mask);
    tensor_free(&a->half_k);
    tensor_free(&a->half_v);
    tensor_free(&a->out);
    tensor_free(&a->weights);
    tensor_free(&a->scores_raw);
    tensor_free(&a->scores_capped);
    tensor_free(&a->scores);
    case_free(&a->c);
}

/* The second output of a case: where the library and the oracle have it. */
typedef struct stage {
    const attn_tensor *golden; /* NULL: the case has none */
    const attn_tensor *got;
    const ref_tensor *exact;
} stage;

static stage find_stage(const call *a, const ref_result *r)
{
    const stage stages[] = {{NULL, &a->scores_raw.view, &r->scores_raw},
                            {NULL, &a->scores_capped.view, &r->scores_capped},
                            {NULL, &a->scores.view, &r->scores},
                            {NULL, &a->weights.view, &r->weights}};
    const double mode = case_number(&a->c, "qk_mode", -1.0);
    stage s = {0};
    if (mode >= 0.0) {
        assert_true(mode <= 3.0);
        s = stages[(int)mode];
        s.golden = case_tensor(&a->c, "qk_matmul_output");
        assert_non_null(s.golden);
    }
    return s;
}

/* The oracle against published values, through the same comparison. */
static int64_t check_numbers(const call *a, const ref_tensor *exact,
                             const attn_tensor *golden)
{
    const int64_t *s = exact->shape;
    tensor rounded = tensor_make(ATTN_F32, s[0], s[1], s[2], s[3]);
    for (int64_t i = 0; i < s[0] * s[1] * s[2] * s[3]; i++)
        ((float *)rounded.view.data)[i] = (float)exact->num[i].value;
    const int64_t wrong = compare_golden("oracle", a->c.name, &rounded.view,
                                         golden, exact, a->rounding);
    tensor_free(&rounded);
    return wrong;
}

static int64_t check_oracle(const call *a, const ref_result *r)
{
    const stage s = find_stage(a, r);
    return check_numbers(a, &r->out, &a->y) +
           (s.golden ? check_numbers(a, s.exact, s.golden) : 0);
}

static int64_t check_library(call *a, const ref_result *r)
{
    const char *name = a->c.name;
    if (attn_sdpa(NULL, &a->params, &a->q, &a->k, &a->v, &a->out.view))
        fail_msg("%s: %s", name, attn_last_error());
    int64_t wrong =
        compare_golden("Y", name, &a->out.view, &a->y, &r->out, a->rounding);
    wrong += compare_tensor("Y", name, &a->out.view, &r->out, 1.0);
    wrong +=
        compare_tensor("weights", name, &a->weights.view, &r->weights, 1.0);
    wrong += compare_tensor("scores_raw", name, &a->scores_raw.view,
                            &r->scores_raw, 1.0);
    wrong += compare_tensor("scores_capped", name, &a->scores_capped.view,
                            &r->scores_capped, 1.0);
    wrong += compare_tensor("scores", name, &a->scores.view, &r->scores, 1.0);
    const stage s = find_stage(a, r);
    if (s.golden)
        wrong += compare_golden("qk_matmul_output", name, s.got, s.golden,
                                s.exact, a->rounding);
    return wrong;
}

static void run_case(const char *name, int library)
{
    call a;
    ref_result r;
    call_load(&a, name);
    ref_sdpa(&r, &a.params, &a.q, &a.k, &a.v);
    const int64_t wrong =
        library ? check_library(&a, &r) : check_oracle(&a, &r);
    ref_free(&r);
    call_free(&a);
    if (wrong)
        fail_msg("%s: %s disagrees", name, library ? "library" : "oracle");
}

/* Cases with what of attn.h they need, so that none is passed over. */
static void count_needs(const char *name, int *capped, int *staged, int *half)
{
    test_case c;
    case_load(&c, "cases/onnx", name);
    *capped += case_value(&c, "softcap", 0) != NULL;
    *staged += case_tensor(&c, "qk_matmul_output") != NULL;
    *half += case_array(&c, "K")->is_half;
    case_free(&c);
}

static void run_all(int library)
{
    int num, capped = 0, staged = 0, half = 0;
    char **list = case_list("cases/onnx", &num);
    for (int i = 0; i < num; i++) {
        count_needs(list[i], &capped, &staged, &half);
        run_case(list[i], library);
    }
    case_free_list(list, num);
    print_message("%d cases: %d with a softcap, %d with scores or weights, %d "
                  "in float16\n",
                  num, capped, staged, half);
    assert_int_equal(num, NUM_CASES);
    assert_int_equal(capped, NUM_CAPPED);
    assert_int_equal(staged, NUM_STAGED);
    assert_int_equal(half, NUM_HALF);
}

static void test_oracle__agrees_with_onnx(void **state)
{
    (void)state;
    run_all(0);
}

static void test_library__agrees_with_onnx(void **state)
{
    (void)state;
    run_all(1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle__agrees_with_onnx),
        cmocka_unit_test(test_library__agrees_with_onnx)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
