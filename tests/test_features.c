/*
 * The parameters of attn_sdpa one by one, in the shapes models use them in:
 * against the oracle, and each against the call that says the same in another
 * way. Random combinations of all of them are in test_random.c.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "compare.h"
#include "tensors.h"

enum { MAX_LEN = 200 };

/* A problem, and the outputs of a call. */
typedef struct problem {
    tensor q, k, v;
    attn_sdpa_params p;
    rng r;
    char name[120];
} problem;

typedef struct results {
    tensor out, lse, weights, scores, key_sums;
    tensor max_weight, effective_keys, entropy;
} results;

static problem make(const char *what, attn_dtype dtype, attn_dtype stored,
                    int64_t batch, int64_t heads, int64_t kv_heads, int64_t tq,
                    int64_t tk, int64_t width, int64_t v_width)
{
    static const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
    problem x = {.p = init, .r = rng_make(strlen(what), (uint64_t)(tq + tk))};
    x.q = tensor_make(dtype, batch, heads, tq, width);
    x.k = tensor_make(stored, batch, kv_heads, tk, width);
    x.v = tensor_make(stored, batch, kv_heads, tk, v_width);
    tensor_normal(&x.q.view, &x.r, 1.5);
    tensor_normal(&x.k.view, &x.r, 1.0);
    tensor_normal(&x.v.view, &x.r, 1.0);
    snprintf(x.name, sizeof x.name,
             "%s, types %d %d, heads %d over %d, %d x %d, widths %d %d", what,
             (int)dtype, (int)stored, (int)heads, (int)kv_heads, (int)tq,
             (int)tk, (int)width, (int)v_width);
    return x;
}

static void drop(problem *x)
{
    tensor_free(&x->q);
    tensor_free(&x->k);
    tensor_free(&x->v);
}

/* All outputs of the problem as it stands. */
static results run(const problem *x)
{
    attn_sdpa_params p = x->p;
    const attn_tensor *q = &x->q.view, *v = &x->v.view;
    const int64_t *s = q->shape;
    const int64_t tk = p.page_table ? p.pages_per_seq * x->k.view.shape[2]
                                    : x->k.view.shape[2];
    results r;
    r.out = tensor_make(q->dtype, s[0], s[1], s[2], v->shape[3]);
    r.lse = tensor_make(q->dtype, s[0], s[1], s[2], 1);
    r.weights = tensor_make(q->dtype, s[0], s[1], s[2], tk);
    r.scores = tensor_make(q->dtype, s[0], s[1], s[2], tk);
    r.key_sums = tensor_make(q->dtype, s[0], s[1], 1, tk);
    r.max_weight = tensor_make(q->dtype, s[0], s[1], s[2], 1);
    r.effective_keys = tensor_make(q->dtype, s[0], s[1], s[2], 1);
    r.entropy = tensor_make(q->dtype, s[0], s[1], s[2], 1);
    p.lse = &r.lse.view;
    p.weights = &r.weights.view;
    p.scores = &r.scores.view;
    p.key_sums = &r.key_sums.view;
    p.max_weight = &r.max_weight.view;
    p.effective_keys = &r.effective_keys.view;
    p.entropy = &r.entropy.view;
    if (attn_sdpa(NULL, &p, q, &x->k.view, v, &r.out.view) != ATTN_OK)
        fail_msg("%s: %s", x->name, attn_last_error());
    return r;
}

static void drop_results(results *r)
{
    tensor_free(&r->out);
    tensor_free(&r->lse);
    tensor_free(&r->weights);
    tensor_free(&r->scores);
    tensor_free(&r->key_sums);
    tensor_free(&r->max_weight);
    tensor_free(&r->effective_keys);
    tensor_free(&r->entropy);
}

static void assert_right(const problem *x, const results *r)
{
    ref_result want;
    int64_t wrong = 0;
    ref_sdpa(&want, &x->p, &x->q.view, &x->k.view, &x->v.view);
    wrong += compare_tensor("out", x->name, &r->out.view, &want.out, 1.0);
    wrong += compare_tensor("lse", x->name, &r->lse.view, &want.lse, 1.0);
    wrong += compare_tensor("weights", x->name, &r->weights.view, &want.weights,
                            1.0);
    wrong +=
        compare_tensor("scores", x->name, &r->scores.view, &want.scores, 1.0);
    wrong += compare_tensor("key_sums", x->name, &r->key_sums.view,
                            &want.key_sums, 1.0);
    wrong += compare_tensor("max_weight", x->name, &r->max_weight.view,
                            &want.max_weight, 1.0);
    wrong += compare_tensor("effective_keys", x->name, &r->effective_keys.view,
                            &want.effective_keys, 1.0);
    wrong += compare_tensor("entropy", x->name, &r->entropy.view, &want.entropy,
                            1.0);
    ref_free(&want);
    if (wrong)
        fail_msg("%s", x->name);
}

/* The problem against the oracle. */
static void check(const problem *x)
{
    results r = run(x);
    assert_right(x, &r);
    drop_results(&r);
}

/* Two problems that say the same: each within the bounds of the first. */
static void check_same(const problem *x, const problem *y)
{
    results a = run(x), b = run(y);
    ref_result bounds;
    int64_t wrong = 0;
    assert_right(x, &a);
    ref_sdpa(&bounds, &x->p, &x->q.view, &x->k.view, &x->v.view);
    wrong += compare_golden("out", x->name, &b.out.view, &a.out.view,
                            &bounds.out, 0.0);
    wrong += compare_golden("lse", x->name, &b.lse.view, &a.lse.view,
                            &bounds.lse, 0.0);
    ref_free(&bounds);
    drop_results(&a);
    drop_results(&b);
    if (wrong)
        fail_msg("%s", x->name);
}

/* The same arrays with other parameters. */
static problem alike(const problem *x)
{
    static const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
    problem y = *x;
    y.p = init;
    return y;
}

static const attn_dtype types[] = {ATTN_F32, ATTN_F64};

/* --------------------------------------------------------------- Shapes -- */

static void test_widths__that_models_have(void **state)
{
    (void)state;
    static const int64_t widths[] = {1, 3, 46, 72, 80, 96, 112, 512, 576};
    enum { N = sizeof widths / sizeof *widths };
    for (int t = 0; t < 2; t++)
        for (int a = 0; a < N; a++)
            for (int b = 0; b < N; b++) {
                const int64_t tq = a % 2 ? 1 : 19;
                problem x = make("widths", types[t], types[t], 1, 1, 1, tq, 37,
                                 widths[a], widths[b]);
                check(&x);
                drop(&x);
            }
}

static void test_groups__that_models_have(void **state)
{
    (void)state;
    static const int64_t groups[] = {1, 3, 7, 8, 71};
    for (int t = 0; t < 2; t++)
        for (size_t a = 0; a < sizeof groups / sizeof *groups; a++)
            for (int64_t tq = 1; tq <= 33; tq += 16) {
                problem x = make("groups", types[t], types[t], 1, 2 * groups[a],
                                 2, tq, 40, 8, 8);
                x.p.causal = 1;
                x.p.align = ATTN_ALIGN_BOTTOM_RIGHT;
                check(&x);
                drop(&x);
            }
}

/* Multi-latent attention, absorbed: values are the first 512 of 576 columns of
 * the keys, one head of keys for all queries, stored in any type. */
static void test_latent__values_lie_inside_keys(void **state)
{
    (void)state;
    static const attn_dtype stored[] = {ATTN_F32, ATTN_F64, ATTN_F16,
                                        ATTN_BF16};
    for (int t = 0; t < 4; t++)
        for (int64_t tq = 1; tq <= 9; tq += 8) {
            const attn_dtype dtype =
                stored[t] == ATTN_F64 ? ATTN_F64 : ATTN_F32;
            problem x =
                make("latent", dtype, stored[t], 1, 16, 1, tq, 45, 576, 1);
            tensor_free(&x.v);
            x.v.view = tensor_slice(&x.k.view, 3, 0, 512);
            x.p.flags = ATTN_SDPA_SCALE;
            x.p.scale = 0.0722; /* 1/sqrt(128 + 64) */
            x.p.causal = 1;
            x.p.align = ATTN_ALIGN_BOTTOM_RIGHT;
            check(&x);
            x.v.block = NULL;
            drop(&x);
        }
}

/* More scores than 32 bits count: one row of q and of k, seen 2^17 times. */
static void test_sizes__scores_beyond_32_bits(void **state)
{
    (void)state;
    const int64_t n = (int64_t)1 << 17;
    problem x = make("2^34 scores", ATTN_F32, ATTN_F32, 1, 1, 1, 1, 1, 4, 4);
    tensor out = tensor_make(ATTN_F32, 1, 1, n, 4);
    x.q.view.shape[2] = x.k.view.shape[2] = x.v.view.shape[2] = n;
    x.q.view.stride[2] = x.k.view.stride[2] = x.v.view.stride[2] = 0;
    x.p.flags = ATTN_SDPA_WINDOW;
    x.p.window_left = 7;
    x.p.window_right = -1;
    x.p.causal = 1;
    if (attn_sdpa(NULL, &x.p, &x.q.view, &x.k.view, &x.v.view, &out.view))
        fail_msg("%s", attn_last_error());
    /* Values that are all alike come back. */
    for (int64_t i = 0; i < n; i += 4099)
        for (int64_t e = 0; e < 4; e++)
            assert_true(fabsl(ref_get(&out.view, 0, 0, i, e) -
                              ref_get(&x.v.view, 0, 0, 0, e)) < 1e-6L);
    tensor_free(&out);
    drop(&x);
}

/* --------------------------------------------------------------- Scores -- */

static void test_softcap__with_masks_and_odd_lengths(void **state)
{
    (void)state;
    static const int64_t lens[] = {1, 63, 64, 65, 130};
    for (int t = 0; t < 2; t++)
        for (size_t a = 0; a < sizeof lens / sizeof *lens; a++)
            for (int hidden = 0; hidden < 2; hidden++) {
                problem x = make("softcap", types[t], types[t], 1, 2, 1, 65,
                                 lens[a], 16, 16);
                attn_mask mask;
                unsigned char keep[MAX_LEN];
                for (int64_t j = 0; j < lens[a]; j++)
                    keep[j] = j % 3 != 1;
                assert_int_equal(attn_mask_init(&mask, ATTN_MASK_KEEP, ATTN_U8,
                                                keep, 1, 1, 1, lens[a]),
                                 ATTN_OK);
                x.p.softcap = 2.0;
                x.p.num_masks = hidden;
                x.p.masks = hidden ? &mask : NULL;
                check(&x);
                drop(&x);
            }
}

/* A cap far above all scores changes them by less than their rounding. */
static void test_softcap__a_large_one_is_none(void **state)
{
    (void)state;
    for (int t = 0; t < 2; t++) {
        problem x =
            make("large cap", types[t], types[t], 1, 2, 2, 30, 50, 8, 8);
        problem y = alike(&x);
        x.p.softcap = types[t] == ATTN_F32 ? 1e6 : 1e12;
        check_same(&x, &y);
        x.p.softcap = 1e300;
        check_same(&x, &y);
        drop(&x);
    }
}

static void test_alibi__heads_that_are_no_power_of_two(void **state)
{
    (void)state;
    static const int64_t heads[] = {1, 8, 12, 40, 71};
    for (int t = 0; t < 2; t++)
        for (size_t a = 0; a < sizeof heads / sizeof *heads; a++) {
            problem x = make("alibi", types[t], types[t], 1, heads[a], heads[a],
                             11, 19, 4, 4);
            tensor slopes = tensor_make(types[t], 1, 1, 1, heads[a]);
            assert_int_equal(attn_alibi_slopes(&slopes.view), ATTN_OK);
            x.p.alibi = &slopes.view;
            x.p.causal = (int32_t)(a % 2);
            x.p.align = ATTN_ALIGN_BOTTOM_RIGHT;
            check(&x);
            tensor_free(&slopes);
            drop(&x);
        }
}

/* The slopes as an ADD mask. */
static void test_alibi__equals_a_mask(void **state)
{
    (void)state;
    enum { TQ = 21, TK = 70, H = 3 };
    for (int t = 0; t < 2; t++) {
        problem x = make("alibi", types[t], types[t], 1, H, 1, TQ, TK, 8, 8);
        problem y = alike(&x);
        tensor slopes = tensor_make(types[t], 1, 1, 1, H);
        tensor bias = tensor_make(types[t], 1, H, TQ, TK);
        attn_mask mask = {.kind = ATTN_MASK_ADD, .view = bias.view};
        assert_int_equal(attn_alibi_slopes(&slopes.view), ATTN_OK);
        for (int64_t h = 0; h < H; h++)
            for (int64_t i = 0; i < TQ; i++)
                for (int64_t j = 0; j < TK; j++)
                    tensor_set(&bias.view, 0, h, i, j,
                               -(double)ref_get(&slopes.view, 0, 0, 0, h) *
                                   fabs((double)(5 + i - j)));
        x.p.alibi = &slopes.view;
        x.p.align = ATTN_ALIGN_OFFSET;
        x.p.q_offset = 5;
        y.p.masks = &mask;
        y.p.num_masks = 1;
        check_same(&x, &y);
        tensor_free(&slopes);
        tensor_free(&bias);
        drop(&x);
    }
}

/* A sink of 0 is one more key and value of zeros (PyTorch's add_zero_attn). */
static void test_sinks__of_zero_are_a_zero_key(void **state)
{
    (void)state;
    enum { TQ = 20, TK = 33, D = 8 };
    for (int t = 0; t < 2; t++) {
        problem x =
            make("zero sink", types[t], types[t], 1, 2, 2, TQ, TK, D, D);
        problem y =
            make("zero key", types[t], types[t], 1, 2, 2, TQ, TK + 1, D, D);
        const attn_tensor k = tensor_slice(&y.k.view, 2, 0, TK);
        const attn_tensor v = tensor_slice(&y.v.view, 2, 0, TK);
        const attn_tensor last_k = tensor_slice(&y.k.view, 2, TK, 1);
        const attn_tensor last_v = tensor_slice(&y.v.view, 2, TK, 1);
        tensor sinks = tensor_make(types[t], 1, 1, 1, 2);
        tensor_fill(&sinks.view, 0.0);
        tensor_assign(&y.q.view, &x.q.view);
        tensor_assign(&k, &x.k.view);
        tensor_assign(&v, &x.v.view);
        tensor_fill(&last_k, 0.0);
        tensor_fill(&last_v, 0.0);
        x.p.sinks = &sinks.view;
        check_same(&x, &y);
        tensor_free(&sinks);
        drop(&x);
        drop(&y);
    }
}

static void test_sinks__far_above_and_below_the_scores(void **state)
{
    (void)state;
    static const double values[] = {-1e30, -200.0, -20.0, 0.0,
                                    20.0,  200.0,  1e30,  HUGE_VAL};
    for (int t = 0; t < 2; t++)
        for (size_t a = 0; a < sizeof values / sizeof *values; a++)
            for (int64_t tq = 1; tq <= 18; tq += 17) {
                problem x =
                    make("sinks", types[t], types[t], 1, 2, 1, tq, 30, 8, 8);
                tensor sinks = tensor_make(types[t], 1, 2, 1, 1);
                tensor_set(&sinks.view, 0, 0, 0, 0, values[a]);
                tensor_set(&sinks.view, 0, 1, 0, 0, -values[a]);
                x.p.sinks = &sinks.view;
                check(&x);
                tensor_free(&sinks);
                drop(&x);
            }
}

/* Rows without a key: zeros, and the sink as LSE. */
static void test_sinks__of_empty_rows(void **state)
{
    (void)state;
    for (int t = 0; t < 2; t++) {
        problem x = make("empty rows", types[t], types[t], 1, 2, 2, 6, 4, 8, 8);
        tensor sinks = tensor_make(types[t], 1, 1, 1, 2);
        tensor_fill(&sinks.view, 0.75);
        x.p.sinks = &sinks.view;
        x.p.causal = 1;
        x.p.align = ATTN_ALIGN_OFFSET;
        x.p.q_offset = -3;
        results r = run(&x);
        assert_right(&x, &r);
        for (int64_t i = 0; i < 3; i++) {
            assert_true(ref_get(&r.lse.view, 0, 1, i, 0) == 0.75L);
            assert_true(ref_get(&r.out.view, 0, 1, i, 7) == 0.0L);
            assert_true(ref_get(&r.entropy.view, 0, 1, i, 0) == 0.0L);
        }
        drop_results(&r);
        tensor_free(&sinks);
        drop(&x);
    }
}

/* ----------------------------------------------------------- Visibility -- */

/* Packed documents are separate sequences. */
static void test_segments__equal_a_ragged_batch(void **state)
{
    (void)state;
    enum { T = 150 };
    static const int64_t cu[] = {0, 1, 70, 70, 128, T};
    for (int t = 0; t < 2; t++) {
        problem x = make("segments", types[t], types[t], 1, 2, 1, T, T, 16, 16);
        int32_t segments[T];
        for (int32_t s = 0; s < 5; s++)
            for (int64_t i = cu[s]; i < cu[s + 1]; i++)
                segments[i] = 10 * s - 20;
        x.p.q_segments = segments;
        x.p.kv_segments = segments;
        x.p.causal = 1;
        results a = run(&x);
        assert_right(&x, &a);
        tensor out = tensor_make(types[t], 1, 2, T, 16);
        attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
        p.causal = 1;
        p.cu_q = cu;
        p.cu_k = cu;
        p.num_seqs = 5;
        assert_int_equal(
            attn_sdpa(NULL, &p, &x.q.view, &x.k.view, &x.v.view, &out.view),
            ATTN_OK);
        assert_true(compare_distance(&a.out.view, &out.view) <
                    (types[t] == ATTN_F32 ? 1e-5 : 1e-14));
        tensor_free(&out);
        drop_results(&a);
        drop(&x);
    }
}

static void test_segments__in_any_order(void **state)
{
    (void)state;
    enum { TQ = 45, TK = 77 };
    for (int t = 0; t < 2; t++) {
        problem x =
            make("mixed segments", types[t], types[t], 1, 1, 1, TQ, TK, 8, 8);
        int32_t of_q[TQ], of_k[TK];
        for (int i = 0; i < TQ; i++)
            of_q[i] = (int32_t)rng_int(&x.r, -2, 4);
        for (int j = 0; j < TK; j++)
            of_k[j] = (int32_t)rng_int(&x.r, -2, 3); /* nothing for 4 */
        x.p.q_segments = of_q;
        x.p.kv_segments = of_k;
        check(&x);
        drop(&x);
    }
}

/* A map of blocks is a mask that says so for each score. */
static void test_blocks__equal_a_mask(void **state)
{
    (void)state;
    enum { TQ = 100, TK = 190, H = 2 };
    static const int64_t sizes[][2] = {{1, 1},  {3, 5},   {16, 16},
                                       {64, 7}, {32, 64}, {1000, 130}};
    for (int t = 0; t < 2; t++)
        for (size_t a = 0; a < sizeof sizes / sizeof *sizes; a++) {
            const int64_t bq = sizes[a][0], bk = sizes[a][1];
            problem x =
                make("blocks", types[t], types[t], 1, H, 1, TQ, TK, 8, 8);
            problem y = alike(&x);
            tensor map = tensor_make(ATTN_U8, 1, H, (TQ + bq - 1) / bq,
                                     (TK + bk - 1) / bk);
            tensor full = tensor_make(ATTN_U8, 1, H, TQ, TK);
            attn_mask mask = {.kind = ATTN_MASK_KEEP, .view = full.view};
            for (int64_t h = 0; h < H; h++) {
                for (int64_t i = 0; i < map.view.shape[2]; i++)
                    for (int64_t j = 0; j < map.view.shape[3]; j++)
                        tensor_set(&map.view, 0, h, i, j,
                                   rng_one_in(&x.r, 3) ? 1.0 : 0.0);
                for (int64_t i = 0; i < TQ; i++)
                    for (int64_t j = 0; j < TK; j++)
                        tensor_set(
                            &full.view, 0, h, i, j,
                            (double)ref_get(&map.view, 0, h, i / bq, j / bk));
            }
            x.p.blocks = &map.view;
            x.p.block_q = bq;
            x.p.block_k = bk;
            y.p.masks = &mask;
            y.p.num_masks = 1;
            check_same(&x, &y);
            tensor_free(&map);
            tensor_free(&full);
            drop(&x);
        }
}

/* Left padding is a shorter sequence; what lies in the padding is not read. */
static void test_kv_starts__equal_a_slice(void **state)
{
    (void)state;
    enum { TQ = 9, TK = 60, PAD = 23 };
    for (int t = 0; t < 2; t++)
        for (int64_t tq = 1; tq <= TQ; tq += 8) {
            problem x =
                make("kv_starts", types[t], types[t], 1, 2, 1, tq, TK, 8, 8);
            problem y = alike(&x);
            const int64_t start = PAD;
            const attn_tensor pad_k = tensor_slice(&x.k.view, 2, 0, PAD);
            const attn_tensor pad_v = tensor_slice(&x.v.view, 2, 0, PAD);
            tensor_fill(&pad_k, (double)NAN);
            tensor_fill(&pad_v, (double)NAN);
            x.p.kv_starts = &start;
            x.p.causal = y.p.causal = 1;
            x.p.align = y.p.align = ATTN_ALIGN_BOTTOM_RIGHT;
            y.k.view = tensor_slice(&x.k.view, 2, PAD, TK - PAD);
            y.v.view = tensor_slice(&x.v.view, 2, PAD, TK - PAD);
            results a = run(&x), b = run(&y);
            assert_right(&x, &a);
            assert_right(&y, &b);
            assert_true(compare_bits("out", x.name, &a.out.view, &b.out.view));
            drop_results(&a);
            drop_results(&b);
            drop(&x);
        }
}

/* -------------------------------------------------------- Where keys lie -- */

/* Shuffled pages, two sequences that share their first page, poison beyond. */
static void test_pages__equal_contiguous_keys(void **state)
{
    (void)state;
    enum { PAGES = 9, ROWS = 8, PER_SEQ = 4, D = 16 };
    static const int32_t table[] = {6, 0, 3, 8, 6, 1, 7, -1};
    static const int64_t lens[] = {29, 20};
    static const attn_dtype stored[] = {ATTN_F32, ATTN_F64, ATTN_F16,
                                        ATTN_BF16};
    for (int t = 0; t < 4; t++)
        for (int64_t tq = 1; tq <= 14; tq += 13) {
            const attn_dtype dtype =
                stored[t] == ATTN_F64 ? ATTN_F64 : ATTN_F32;
            problem x = make("pages", dtype, stored[t], 2, 4, 2, tq,
                             PER_SEQ * ROWS, D, D);
            problem y = x;
            y.k = tensor_make(stored[t], PAGES, 2, ROWS, D);
            y.v = tensor_make(stored[t], PAGES, 2, ROWS, D);
            tensor_fill(&y.k.view, (double)NAN);
            tensor_fill(&y.v.view, (double)NAN);
            for (int64_t b = 0; b < 2; b++)
                for (int64_t h = 0; h < 2; h++)
                    for (int64_t j = 0; j < lens[b]; j++)
                        for (int64_t d = 0; d < D; d++) {
                            const int64_t from = j < ROWS ? 0 : b;
                            const int64_t page = table[b * PER_SEQ + j / ROWS];
                            const double k =
                                (double)ref_get(&x.k.view, from, h, j, d);
                            const double v =
                                (double)ref_get(&x.v.view, from, h, j, d);
                            tensor_set(&x.k.view, b, h, j, d, k);
                            tensor_set(&x.v.view, b, h, j, d, v);
                            tensor_set(&y.k.view, page, h, j % ROWS, d, k);
                            tensor_set(&y.v.view, page, h, j % ROWS, d, v);
                        }
            x.p.kv_lens = lens;
            x.p.causal = 1;
            x.p.align = ATTN_ALIGN_BOTTOM_RIGHT;
            y.p = x.p;
            y.p.page_table = table;
            y.p.pages_per_seq = PER_SEQ;
            results a = run(&x), b = run(&y);
            assert_right(&x, &a);
            assert_right(&y, &b);
            assert_true(compare_bits("out", x.name, &a.out.view, &b.out.view));
            drop_results(&a);
            drop_results(&b);
            tensor_free(&y.k);
            tensor_free(&y.v);
            drop(&x);
        }
}

/* A ring that has dropped 100 keys: the same as the last ones in order. */
static void test_ring__equals_keys_in_order(void **state)
{
    (void)state;
    enum { C = 40, TQ = 6, D = 8 };
    const int64_t start = 100 % C, first = 100;
    for (int t = 0; t < 2; t++) {
        problem x = make("ring", types[t], types[t], 1, 2, 1, TQ, C, D, D);
        problem y = alike(&x);
        tensor k = tensor_make(types[t], 1, 1, C, D);
        tensor v = tensor_make(types[t], 1, 1, C, D);
        for (int64_t j = 0; j < C; j++)
            for (int64_t d = 0; d < D; d++) {
                const int64_t row = (start + j) % C;
                tensor_set(&k.view, 0, 0, row, d,
                           (double)ref_get(&x.k.view, 0, 0, j, d));
                tensor_set(&v.view, 0, 0, row, d,
                           (double)ref_get(&x.v.view, 0, 0, j, d));
            }
        y.k.view = k.view;
        y.v.view = v.view;
        x.p.causal = y.p.causal = 1;
        x.p.flags = y.p.flags = ATTN_SDPA_WINDOW;
        x.p.window_left = y.p.window_left = 20;
        x.p.window_right = y.p.window_right = -1;
        x.p.chunk = y.p.chunk = 32;
        x.p.align = y.p.align = ATTN_ALIGN_OFFSET;
        x.p.q_offset = y.p.q_offset = first + C - TQ;
        x.p.kv_offsets = y.p.kv_offsets = &first;
        y.p.ring_starts = &start;
        results a = run(&x), b = run(&y);
        assert_right(&x, &a);
        assert_right(&y, &b);
        assert_true(compare_bits("out", x.name, &a.out.view, &b.out.view));
        drop_results(&a);
        drop_results(&b);
        tensor_free(&k);
        tensor_free(&v);
        drop(&x);
    }
}

/* 16 bits are those floats, exactly: the same bits come out. */
static void test_stored__equal_the_widened_floats(void **state)
{
    (void)state;
    static const attn_dtype stored[] = {ATTN_F16, ATTN_BF16};
    for (int t = 0; t < 2; t++)
        for (int64_t tq = 9; tq <= 40; tq += 31) {
            problem x =
                make("stored", ATTN_F32, stored[t], 1, 3, 1, tq, 140, 24, 40);
            problem y = x;
            y.k = tensor_copy(&x.k.view, ATTN_F32);
            y.v = tensor_copy(&x.v.view, ATTN_F32);
            results a = run(&x), b = run(&y);
            assert_right(&x, &a);
            assert_true(compare_bits("out", x.name, &a.out.view, &b.out.view));
            drop_results(&a);
            drop_results(&b);
            tensor_free(&y.k);
            tensor_free(&y.v);
            drop(&x);
        }
}

/* --------------------------------------------------------------- Outputs -- */

/* What is asked for beside the output does not change a bit of it. */
static void test_outputs__leave_the_result_alone(void **state)
{
    (void)state;
    for (int t = 0; t < 2; t++)
        for (int64_t tq = 1; tq <= 80; tq += 79) {
            problem x =
                make("outputs", types[t], types[t], 1, 4, 2, tq, 150, 16, 16);
            tensor slopes = tensor_make(types[t], 1, 1, 1, 4);
            assert_int_equal(attn_alibi_slopes(&slopes.view), ATTN_OK);
            x.p.softcap = 3.0;
            x.p.alibi = &slopes.view;
            x.p.causal = 1;
            x.p.align = ATTN_ALIGN_BOTTOM_RIGHT;
            tensor out = tensor_make(types[t], 1, 4, tq, 16);
            assert_int_equal(attn_sdpa(NULL, &x.p, &x.q.view, &x.k.view,
                                       &x.v.view, &out.view),
                             ATTN_OK);
            results r = run(&x);
            assert_right(&x, &r);
            assert_true(compare_bits("out", x.name, &out.view, &r.out.view));
            tensor_free(&out);
            tensor_free(&slopes);
            drop_results(&r);
            drop(&x);
        }
}

/* The softmax of the scores is the weights, whose columns sum to key_sums and
 * whose rows the diagnostics describe. */
static void test_outputs__belong_together(void **state)
{
    (void)state;
    enum { TQ = 40, TK = 70 };
    for (int t = 0; t < 2; t++) {
        const long double near = types[t] == ATTN_F32 ? 1e-5L : 1e-13L;
        problem x =
            make("together", types[t], types[t], 1, 2, 1, TQ, TK, 16, 8);
        x.p.causal = 1;
        x.p.align = ATTN_ALIGN_BOTTOM_RIGHT;
        results r = run(&x);
        tensor w = tensor_make(types[t], 1, 2, TQ, TK);
        tensor lse = tensor_make(types[t], 1, 2, TQ, 1);
        assert_int_equal(attn_softmax(&r.scores.view, &w.view, &lse.view),
                         ATTN_OK);
        assert_true((long double)compare_distance(&w.view, &r.weights.view) <
                    near);
        assert_true((long double)compare_distance(&lse.view, &r.lse.view) <
                    near);
        for (int64_t h = 0; h < 2; h++) {
            for (int64_t j = 0; j < TK; j++) {
                long double sum = 0.0L;
                for (int64_t i = 0; i < TQ; i++)
                    sum += ref_get(&r.weights.view, 0, h, i, j);
                assert_true(fabsl(sum - ref_get(&r.key_sums.view, 0, h, 0, j)) <
                            near);
            }
            for (int64_t i = 0; i < TQ; i++) {
                long double most = 0.0L, squares = 0.0L, entropy = 0.0L;
                for (int64_t j = 0; j < TK; j++) {
                    const long double a = ref_get(&r.weights.view, 0, h, i, j);
                    most = a > most ? a : most;
                    squares += a * a;
                    entropy -= a > 0.0L ? a * logl(a) : 0.0L;
                }
                assert_true(fabsl(most - ref_get(&r.max_weight.view, 0, h, i,
                                                 0)) < near);
                assert_true(fabsl(entropy - ref_get(&r.entropy.view, 0, h, i,
                                                    0)) < near * 10);
                assert_true(
                    fabsl(1.0L - squares * ref_get(&r.effective_keys.view, 0, h,
                                                   i, 0)) < near);
            }
        }
        tensor_free(&w);
        tensor_free(&lse);
        drop_results(&r);
        drop(&x);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_widths__that_models_have),
        cmocka_unit_test(test_groups__that_models_have),
        cmocka_unit_test(test_latent__values_lie_inside_keys),
        cmocka_unit_test(test_sizes__scores_beyond_32_bits),
        cmocka_unit_test(test_softcap__with_masks_and_odd_lengths),
        cmocka_unit_test(test_softcap__a_large_one_is_none),
        cmocka_unit_test(test_alibi__heads_that_are_no_power_of_two),
        cmocka_unit_test(test_alibi__equals_a_mask),
        cmocka_unit_test(test_sinks__of_zero_are_a_zero_key),
        cmocka_unit_test(test_sinks__far_above_and_below_the_scores),
        cmocka_unit_test(test_sinks__of_empty_rows),
        cmocka_unit_test(test_segments__equal_a_ragged_batch),
        cmocka_unit_test(test_segments__in_any_order),
        cmocka_unit_test(test_blocks__equal_a_mask),
        cmocka_unit_test(test_kv_starts__equal_a_slice),
        cmocka_unit_test(test_pages__equal_contiguous_keys),
        cmocka_unit_test(test_ring__equals_keys_in_order),
        cmocka_unit_test(test_stored__equal_the_widened_floats),
        cmocka_unit_test(test_outputs__leave_the_result_alone),
        cmocka_unit_test(test_outputs__belong_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
