/*
 * The published cases of the ONNX operator Attention, see
 * cases/onnx/README.md. Every folder is run or stands in the table of what
 * attn.h cannot express yet; one that is neither fails the test.
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

enum { NUM_CASES = 38, MAX_BATCH = 8 };

/* Not yet supported, and why. "part" cases are run, but their output
 * qk_matmul_output is not compared. */
static const struct {
    const char *name;
    int part;
    const char *why;
} unsupported[] = {
    {"test_attention_3d_diff_heads_sizes_softcap", 0, "softcap"},
    {"test_attention_3d_gqa_softcap", 0, "softcap"},
    {"test_attention_3d_with_past_and_present_qk_matmul_softcap", 0,
     "softcap, and scores after it as an output"},
    {"test_attention_4d_gqa_softcap", 0, "softcap"},
    {"test_attention_4d_softcap", 0, "softcap"},
    {"test_attention_4d_softcap_neginf_mask_poison", 0, "softcap"},
    {"test_attention_4d_with_qk_matmul_softcap", 0,
     "softcap, and scores after it as an output"},
    {"test_attention_3d_with_past_and_present_qk_matmul", 1,
     "scaled scores as an output"},
    {"test_attention_4d_with_past_and_present_qk_matmul", 1,
     "scaled scores as an output"},
    {"test_attention_4d_with_qk_matmul", 1, "scaled scores as an output"},
    {"test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask", 1,
     "scores after the mask as an output"},
    {"test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask", 1,
     "scores after the mask as an output"}};

enum { NUM_UNSUPPORTED = sizeof unsupported / sizeof unsupported[0] };

/* A case as arguments of attn_sdpa. */
typedef struct call {
    test_case c;
    attn_sdpa_params params;
    attn_mask mask;
    attn_tensor q, k, v, y;
    tensor all_k, all_v, long_mask; /* block NULL: not needed */
    tensor out, weights;
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
    /* Half a unit in the last place of the type Y was rounded to; ones below
     * float16's normal range are absolute and do not occur. */
    a->rounding = case_array(&a->c, "Y")->is_half ? 0x1p-11 : 0x1p-24;
    const int64_t *s = a->y.shape;
    a->out = tensor_make(ATTN_F32, s[0], s[1], s[2], s[3]);
    a->weights = tensor_make(ATTN_F32, s[0], s[1], s[2], a->k.shape[2]);
    a->params.weights = &a->weights.view;
}

static void call_free(call *a)
{
    tensor_free(&a->all_k);
    tensor_free(&a->all_v);
    tensor_free(&a->long_mask);
    tensor_free(&a->out);
    tensor_free(&a->weights);
    case_free(&a->c);
}

/* The expected weights, or NULL. */
static const attn_tensor *golden_weights(const call *a)
{
    return case_number(&a->c, "qk_mode", -1.0) == 3.0
               ? case_tensor(&a->c, "qk_matmul_output")
               : NULL;
}

/* The oracle against the published values, through the same comparison. */
static int64_t check_oracle(const call *a, const ref_result *r)
{
    const int64_t *s = r->out.shape;
    tensor rounded = tensor_make(ATTN_F32, s[0], s[1], s[2], s[3]);
    for (int64_t i = 0; i < s[0] * s[1] * s[2] * s[3]; i++)
        ((float *)rounded.view.data)[i] = (float)r->out.num[i].value;
    const int64_t wrong = compare_golden("oracle", a->c.name, &rounded.view,
                                         &a->y, &r->out, a->rounding);
    tensor_free(&rounded);
    return wrong;
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
    if (golden_weights(a))
        wrong += compare_golden("qk_matmul_output", name, &a->weights.view,
                                golden_weights(a), &r->weights, a->rounding);
    return wrong;
}

static int find_unsupported(const char *name)
{
    for (int i = 0; i < NUM_UNSUPPORTED; i++)
        if (strcmp(unsupported[i].name, name) == 0)
            return i;
    return -1;
}

/* A case may only be left out for what its text says it needs. */
static void assert_reason_holds(const char *name, int entry)
{
    test_case c;
    case_load(&c, "cases/onnx", name);
    const double mode = case_number(&c, "qk_mode", 3.0);
    const int needs_softcap = case_value(&c, "softcap", 0) != NULL;
    assert_int_equal(needs_softcap, entry >= 0 && !unsupported[entry].part);
    if (!needs_softcap)
        assert_int_equal(mode != 3.0, entry >= 0);
    case_free(&c);
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

static void run_all(int library)
{
    int num, whole = 0, part = 0, left_out = 0;
    char **list = case_list("cases/onnx", &num);
    for (int i = 0; i < num; i++) {
        const int entry = find_unsupported(list[i]);
        assert_reason_holds(list[i], entry);
        if (entry >= 0 && library)
            print_message("%s: %s not yet supported\n", list[i],
                          unsupported[entry].why);
        if (entry >= 0 && !unsupported[entry].part) {
            left_out++;
            continue;
        }
        run_case(list[i], library);
        entry >= 0 ? part++ : whole++;
    }
    case_free_list(list, num);
    print_message("%d cases: %d whole, %d without their scores, %d not yet\n",
                  num, whole, part, left_out);
    /* Every name of the table was met, and no folder is missing. */
    assert_int_equal(part + left_out, NUM_UNSUPPORTED);
    assert_int_equal(num, NUM_CASES);
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
