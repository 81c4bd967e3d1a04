/*
 * The ground of the oracle of the gradients: on small problems they are what
 * differences of the other oracle say,
 *   f'(x) = (8 (f(x+h) - f(x-h)) - (f(x+2h) - f(x-2h))) / (12 h) + O(h^4),
 *   f = sum of out d_out + sum of lse d_lse
 * in long double, for every number that f depends on.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "ref.h"
#include "tensors.h"

enum { B = 2, HQ = 4, HKV = 2, TQ = 3, TK = 4, D = 3, DV = 2 };

/* A problem and the gradients of its loss. */
typedef struct sample {
    const char *name;
    rng r;
    attn_sdpa_params p;
    attn_mask masks[ATTN_MAX_MASKS];
    tensor mask_memory[ATTN_MAX_MASKS];
    tensor q, k, v, out, lse, d_out, d_lse, alibi, sinks;
    ref_gradients g;
} sample;

static tensor normal(sample *s, int64_t b, int64_t h, int64_t t, int64_t d)
{
    const tensor x = tensor_make(ATTN_F64, b, h, t, d);
    tensor_normal(&x.view, &s->r, 1.0);
    return x;
}

static void begin(sample *s, const char *name)
{
    static const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
    memset(s, 0, sizeof *s);
    s->name = name;
    s->r = rng_make(1, strlen(name));
    s->p = init;
    s->p.masks = s->masks;
    s->q = normal(s, B, HQ, TQ, D);
    s->k = normal(s, B, HKV, TK, D);
    s->v = normal(s, B, HKV, TK, DV);
    s->out = normal(s, B, HQ, TQ, DV);
    s->lse = normal(s, B, HQ, TQ, 1);
    s->d_out = normal(s, B, HQ, TQ, DV);
    s->d_lse = normal(s, B, HQ, TQ, 1);
    s->p.lse = &s->lse.view;
}

/* All sequences one after the other, as a ragged batch has them. */
static void begin_ragged(sample *s, const char *name)
{
    static const int64_t cu_q[] = {1, 3, 3, 5}, cu_k[] = {0, 4, 5, 7};
    tensor *const all[] = {&s->q,   &s->k,     &s->v,    &s->out,
                           &s->lse, &s->d_out, &s->d_lse};
    begin(s, name);
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        tensor_free(all[n]);
    s->q = normal(s, 1, HQ, B * TQ, D);
    s->k = normal(s, 1, HKV, B * TK, D);
    s->v = normal(s, 1, HKV, B * TK, DV);
    s->out = normal(s, 1, HQ, B * TQ, DV);
    s->lse = normal(s, 1, HQ, B * TQ, 1);
    s->d_out = normal(s, 1, HQ, B * TQ, DV);
    s->d_lse = normal(s, 1, HQ, B * TQ, 1);
    s->p.cu_q = cu_q;
    s->p.cu_k = cu_k;
    s->p.num_seqs = 3;
}

static void end(sample *s)
{
    tensor *const all[] = {&s->q,     &s->k,     &s->v,     &s->out,  &s->lse,
                           &s->d_out, &s->d_lse, &s->alibi, &s->sinks};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        tensor_free(all[n]);
    for (int n = 0; n < ATTN_MAX_MASKS; n++)
        tensor_free(&s->mask_memory[n]);
    ref_free_gradients(&s->g);
}

static attn_mask *add_mask(sample *s, int32_t kind, int64_t b, int64_t h,
                           int64_t i, int64_t j)
{
    const int32_t n = s->p.num_masks++;
    const attn_dtype dtype = kind == ATTN_MASK_ADD ? ATTN_F64 : ATTN_U8;
    s->mask_memory[n] = tensor_make(dtype, b, h, i, j);
    if (kind == ATTN_MASK_ADD)
        tensor_normal(&s->mask_memory[n].view, &s->r, 1.0);
    s->masks[n].kind = kind;
    s->masks[n].view = s->mask_memory[n].view;
    return &s->masks[n];
}

/* ---- differences ---- */

/* sum of x d over the rows that are there and see something. */
static long double inner(const ref_tensor *x, const attn_tensor *d)
{
    long double sum = 0.0L;
    const int64_t *n = x->shape;
    for (int64_t b = 0; b < n[0]; b++)
        for (int64_t h = 0; h < n[1]; h++)
            for (int64_t t = 0; t < n[2]; t++)
                for (int64_t e = 0; e < n[3]; e++) {
                    const ref_num *y = ref_at(x, b, h, t, e);
                    if (y->error != REF_UNTOUCHED && !isinf(y->value))
                        sum += y->value * ref_get(d, b, h, t, e);
                }
    return sum;
}

static long double loss(const sample *s)
{
    ref_result r;
    ref_sdpa(&r, &s->p, &s->q.view, &s->k.view, &s->v.view);
    const long double f =
        inner(&r.out, &s->d_out.view) + inner(&r.lse, &s->d_lse.view);
    ref_free(&r);
    return f;
}

/* The slope of the loss in the number at *x. */
static long double slope(const sample *s, double *x)
{
    const double step = 0x1p-10, before = *x;
    long double f[4];
    for (int n = 0; n < 4; n++) {
        static const double at[] = {1.0, -1.0, 2.0, -2.0};
        *x = before + at[n] * step;
        f[n] = loss(s);
    }
    *x = before;
    return (8.0L * (f[0] - f[1]) - (f[2] - f[3])) / (12.0L * (long double)step);
}

/* Also that the bound is one of a double, and no excuse. */
static void assert_slope(const sample *s, const char *what, ref_num got,
                         long double want)
{
    const long double size = 1.0L + fabsl(got.value);
    if (fabsl(got.value - want) <= got.error + 1e-9L * size &&
        got.error >= 0.0L && got.error <= 1e-12L * size)
        return;
    fail_msg("%s, %s: %.15Lg +- %.3Lg is not the slope %.15Lg", s->name, what,
             got.value, got.error, want);
}

/* x is contiguous. */
static void assert_slopes(const sample *s, const char *what,
                          const ref_tensor *got, const attn_tensor *x)
{
    const int64_t *n = x->shape;
    assert_memory_equal(got->shape, n, sizeof got->shape);
    for (int64_t i = 0; i < n[0] * n[1] * n[2] * n[3]; i++) {
        double *const number = (double *)x->data + i;
        if (got->num[i].error == REF_UNTOUCHED)
            assert_true(slope(s, number) == 0.0L);
        else if (isinf(*number)) /* in masks: nothing is seen there */
            assert_true(got->num[i].value == 0.0L && got->num[i].error == 0.0L);
        else
            assert_slope(s, what, got->num[i], slope(s, number));
    }
}

static void compute(sample *s)
{
    attn_sdpa_gradients wanted = ATTN_SDPA_GRADIENTS_INIT;
    ref_result r;
    ref_sdpa(&r, &s->p, &s->q.view, &s->k.view, &s->v.view);
    const int64_t *n = s->q.view.shape;
    for (int64_t b = 0; b < n[0]; b++)
        for (int64_t h = 0; h < n[1]; h++)
            for (int64_t t = 0; t < n[2]; t++) {
                tensor_set(&s->lse.view, b, h, t, 0,
                           (double)ref_at(&r.lse, b, h, t, 0)->value);
                for (int64_t e = 0; e < DV; e++)
                    tensor_set(&s->out.view, b, h, t, e,
                               (double)ref_at(&r.out, b, h, t, e)->value);
            }
    ref_free(&r);
    wanted.d_lse = &s->d_lse.view;
    ref_sdpa_backward(&s->g, &s->p, &s->q.view, &s->k.view, &s->v.view,
                      &s->out.view, &s->d_out.view, &wanted);
}

/* Compares everything there is, and ends the sample. */
static void check(sample *s)
{
    compute(s);
    assert_slopes(s, "d_q", &s->g.d_q, &s->q.view);
    assert_slopes(s, "d_k", &s->g.d_k, &s->k.view);
    assert_slopes(s, "d_v", &s->g.d_v, &s->v.view);
    if (s->p.alibi)
        assert_slopes(s, "d_alibi", &s->g.d_alibi, s->p.alibi);
    if (s->p.sinks)
        assert_slopes(s, "d_sinks", &s->g.d_sinks, s->p.sinks);
    for (int32_t n = 0; n < s->p.num_masks; n++)
        if (s->masks[n].kind == ATTN_MASK_ADD)
            assert_slopes(s, "d_mask", &s->g.d_masks[n], &s->masks[n].view);
        else
            assert_null(s->g.d_masks[n].num);
    if (!(s->p.flags & ATTN_SDPA_SCALE)) {
        s->p.flags |= ATTN_SDPA_SCALE;
        s->p.scale = 1.0 / sqrt((double)D);
    }
    assert_slope(s, "d_scale", s->g.d_scale.num[0], slope(s, &s->p.scale));
    end(s);
}

/* ---- what the loss may go through ---- */

static void test_gradients__of_plain_attention(void **state)
{
    (void)state;
    sample s;
    begin(&s, "plain");
    check(&s);
    begin(&s, "a negative scale");
    s.p.flags = ATTN_SDPA_SCALE;
    s.p.scale = -0.75;
    check(&s);
    begin(&s, "no scale");
    s.p.flags = ATTN_SDPA_SCALE;
    check(&s);
}

static void test_gradients__of_visible_keys_only(void **state)
{
    (void)state;
    static const int64_t q_lens[] = {2, 3}, kv_lens[] = {4, 2};
    static const int64_t starts[] = {1, 0}, offsets[] = {5, -2};
    static const int64_t prefix[] = {7, 0};
    static const int32_t q_segments[] = {0, 0, 1, 1, 2, 3};
    static const int32_t kv_segments[] = {0, 1, 0, 1, 1, 1, 2, 4};
    static unsigned char map[] = {1, 0, 0, 1};
    attn_tensor blocks;
    sample s;
    begin(&s, "causal");
    s.p.causal = 1;
    s.p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    check(&s);
    begin(&s, "causal with an empty row");
    s.p.causal = 1;
    s.p.align = ATTN_ALIGN_OFFSET;
    s.p.q_offset = -1;
    check(&s);
    begin(&s, "lengths");
    s.p.q_lens = q_lens;
    s.p.kv_lens = kv_lens;
    s.p.kv_starts = starts;
    check(&s);
    begin(&s, "window, positions");
    s.p.flags = ATTN_SDPA_WINDOW;
    s.p.window_left = 1;
    s.p.keep_first = 1;
    s.p.kv_offsets = offsets;
    s.p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    check(&s);
    begin(&s, "prefix, chunk");
    s.p.causal = 1;
    s.p.align = ATTN_ALIGN_TOP_LEFT;
    s.p.prefix_lens = prefix;
    s.p.kv_offsets = offsets;
    s.p.chunk = 2;
    check(&s);
    begin(&s, "segments, blocks");
    s.p.q_segments = q_segments;
    s.p.kv_segments = kv_segments;
    attn_view_bhtd(&blocks, ATTN_U8, map, 1, 1, 2, 2);
    s.p.blocks = &blocks;
    s.p.block_q = 2;
    s.p.block_k = 3;
    check(&s);
}

static void test_gradients__of_masks_of_every_shape(void **state)
{
    (void)state;
    for (int full = 0; full < 16; full++) {
        char name[40];
        sample s;
        snprintf(name, sizeof name, "a mask of shape %d", full);
        begin(&s, name);
        const attn_mask *keep = add_mask(&s, ATTN_MASK_KEEP, B, 1, TQ, TK);
        tensor_fill(&keep->view, 1.0);
        tensor_set(&keep->view, 1, 0, 2, 3, 0.0);
        tensor_set(&keep->view, 0, 0, 0, 0, 0.0);
        const attn_mask *mask =
            add_mask(&s, ATTN_MASK_ADD, full & 8 ? B : 1, full & 4 ? HQ : 1,
                     full & 2 ? TQ : 1, full & 1 ? TK : 1);
        if (full & 3)
            tensor_set(&mask->view, 0, 0, 0, 0, -HUGE_VAL);
        add_mask(&s, ATTN_MASK_ADD, 1, 1, 1, TK);
        check(&s);
    }
}

static void test_gradients__of_capped_scores(void **state)
{
    (void)state;
    sample s;
    begin(&s, "softcap");
    s.p.softcap = 1.5;
    add_mask(&s, ATTN_MASK_ADD, 1, HQ, TQ, TK);
    check(&s);
    begin(&s, "softcap, causal");
    s.p.softcap = 0.5;
    s.p.causal = 1;
    s.p.align = ATTN_ALIGN_TOP_LEFT;
    check(&s);
}

static void test_gradients__of_slopes_of_both_shapes(void **state)
{
    (void)state;
    for (int each = 0; each < 2; each++) {
        sample s;
        begin(&s, each ? "slopes of each sequence" : "slopes");
        s.alibi = each ? normal(&s, B, HQ, 1, 1) : normal(&s, 1, 1, 1, HQ);
        s.p.alibi = &s.alibi.view;
        s.p.align = ATTN_ALIGN_OFFSET;
        s.p.q_offset = 2;
        s.p.causal = 1;
        s.p.softcap = each ? 2.0 : 0.0;
        check(&s);
    }
}

static void test_gradients__of_sinks_of_both_shapes(void **state)
{
    (void)state;
    for (int each = 0; each < 2; each++) {
        sample s;
        begin(&s, each ? "sinks of each sequence" : "sinks");
        s.sinks = each ? normal(&s, B, HQ, 1, 1) : normal(&s, 1, 1, 1, HQ);
        s.p.sinks = &s.sinks.view;
        s.p.causal = 1;
        s.p.align = ATTN_ALIGN_OFFSET;
        s.p.q_offset = -1; /* the log-sum-exp of row 0 is the sink */
        check(&s);
    }
}

static void test_gradients__of_ragged_batches(void **state)
{
    (void)state;
    static const int32_t q_segments[] = {0, 0, 1, 1, 2, 3};
    static const int32_t kv_segments[] = {0, 1, 0, 1, 1, 2, 2, 4};
    sample s;
    begin_ragged(&s, "ragged");
    check(&s);
    begin_ragged(&s, "ragged with everything");
    s.p.causal = 1;
    s.p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    s.p.softcap = 2.0;
    s.p.q_segments = q_segments;
    s.p.kv_segments = kv_segments;
    s.alibi = normal(&s, 1, 1, 1, HQ);
    s.sinks = normal(&s, 3, HQ, 1, 1);
    s.p.alibi = &s.alibi.view;
    s.p.sinks = &s.sinks.view;
    add_mask(&s, ATTN_MASK_ADD, 3, 1, 2, 4);
    add_mask(&s, ATTN_MASK_ADD, 1, HQ, 1, 1);
    check(&s);
}

/* ---- what else the oracle promises ---- */

static void assert_same(const ref_tensor *x, const ref_tensor *y)
{
    const int64_t *n = x->shape;
    assert_memory_equal(n, y->shape, sizeof x->shape);
    for (int64_t i = 0; i < n[0] * n[1] * n[2] * n[3]; i++) {
        assert_true(x->num[i].value == y->num[i].value);
        assert_true(x->num[i].error == y->num[i].error);
    }
}

/* Keys of 16 bits are the floats that they stand for. */
static void test_storage__is_exact(void **state)
{
    (void)state;
    for (attn_dtype type = ATTN_F16; type <= ATTN_BF16; type++) {
        sample s;
        begin(&s, "storage");
        const tensor k = tensor_copy(&s.k.view, type);
        const tensor v = tensor_copy(&s.v.view, type);
        tensor_assign(&s.k.view, &k.view);
        tensor_assign(&s.v.view, &v.view);
        compute(&s);
        const attn_sdpa_gradients wanted = {.d_lse = &s.d_lse.view};
        ref_gradients g;
        ref_sdpa_backward(&g, &s.p, &s.q.view, &k.view, &v.view, &s.out.view,
                          &s.d_out.view, &wanted);
        assert_same(&g.d_q, &s.g.d_q);
        assert_same(&g.d_k, &s.g.d_k);
        assert_same(&g.d_v, &s.g.d_v);
        ref_free_gradients(&g);
        tensor k_memory = k, v_memory = v;
        tensor_free(&k_memory);
        tensor_free(&v_memory);
        end(&s);
    }
}

/* What is added to counts once, also where there is nothing to add. */
static void test_gradients__are_added(void **state)
{
    (void)state;
    static const int64_t kv_lens[] = {4, 0};
    sample s;
    begin(&s, "added");
    s.p.kv_lens = kv_lens;
    compute(&s);
    tensor d_k = tensor_make(ATTN_F64, B, HKV, TK, D);
    tensor_fill(&d_k.view, 5.0);
    const attn_sdpa_gradients wanted = {
        .d_lse = &s.d_lse.view, .d_k = &d_k.view, .flags = ATTN_SDPA_ADD_D_K};
    ref_gradients g;
    ref_sdpa_backward(&g, &s.p, &s.q.view, &s.k.view, &s.v.view, &s.out.view,
                      &s.d_out.view, &wanted);
    for (int64_t n = 0; n < B * HKV * TK * D; n++) {
        const ref_num *x = &g.d_k.num[n], *y = &s.g.d_k.num[n];
        assert_true(fabsl(x->value - y->value - 5.0L) <= 1e-17L);
        if (n < HKV * TK * D)
            assert_true(x->error > y->error);
        else
            assert_true(x->error == 0.0L && y->error == 0.0L);
    }
    assert_same(&g.d_q, &s.g.d_q);
    ref_free_gradients(&g);
    tensor_free(&d_k);
    end(&s);
}

/* Numbers that are none, of keys and rows that are hidden from each other. */
static void test_nan__stays_where_it_is_seen(void **state)
{
    (void)state;
    sample s;
    begin(&s, "hidden NaN");
    s.p.causal = 1;
    s.p.align = ATTN_ALIGN_TOP_LEFT; /* key 3 is hidden, row 0 sees key 0 */
    for (int64_t d = 0; d < D; d++)
        tensor_set(&s.k.view, 0, 0, 3, d, (double)NAN);
    tensor_set(&s.v.view, 0, 0, 3, 0, (double)NAN);
    tensor_set(&s.d_out.view, 0, 0, 0, 1, (double)NAN);
    compute(&s);
    for (int64_t t = 0; t < TK; t++)
        for (int64_t d = 0; d < D; d++) {
            const ref_num *x = ref_at(&s.g.d_k, 0, 0, t, d);
            assert_true(isnan(x->value) == (t == 0));
        }
    for (int64_t t = 0; t < TK; t++)
        for (int64_t e = 0; e < DV; e++) {
            const ref_num *x = ref_at(&s.g.d_v, 0, 0, t, e);
            assert_true(isnan(x->value) == (t == 0 && e == 1));
        }
    for (int64_t i = 0; i < TQ; i++)
        assert_true(isnan(ref_at(&s.g.d_q, 0, 0, i, 0)->value) == (i == 0));
    end(&s);
}

/* A log-sum-exp beside the lowest number has lost what it was to tell. */
static void test_lowest_mask__tells_nothing(void **state)
{
    (void)state;
    sample s;
    begin(&s, "lowest");
    const attn_mask *mask = add_mask(&s, ATTN_MASK_ADD, B, 1, 1, 1);
    tensor_set(&mask->view, 0, 0, 0, 0, -0x1.fffffffffffffp1023);
    compute(&s);
    assert_true(ref_at(&s.g.d_q, 0, 0, 0, 0)->error == REF_UNKNOWN);
    assert_true(ref_at(&s.g.d_v, 0, 0, 0, 0)->error == REF_UNKNOWN);
    assert_true(ref_at(&s.g.d_v, 1, 0, 0, 0)->error > 0.0L);
    assert_true(s.g.d_scale.num[0].error == REF_UNKNOWN);
    end(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients__of_plain_attention),
        cmocka_unit_test(test_gradients__of_visible_keys_only),
        cmocka_unit_test(test_gradients__of_masks_of_every_shape),
        cmocka_unit_test(test_gradients__of_capped_scores),
        cmocka_unit_test(test_gradients__of_slopes_of_both_shapes),
        cmocka_unit_test(test_gradients__of_sinks_of_both_shapes),
        cmocka_unit_test(test_gradients__of_ragged_batches),
        cmocka_unit_test(test_storage__is_exact),
        cmocka_unit_test(test_gradients__are_added),
        cmocka_unit_test(test_nan__stays_where_it_is_seen),
        cmocka_unit_test(test_lowest_mask__tells_nothing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
