/*
 * Relations that must hold between calls, whatever the right numbers are:
 * bit for bit where the same arithmetic is asked for in another way, else
 * within the error bounds that the oracle gives for both sides.
 */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "compare.h"
#include "tensors.h"

/* Shapes are drawn from fixed seeds: these many for each relation and type. */
enum { ROUNDS = 16, MAX_BATCH = 4, MAX_KEYS = 5000 };

static const attn_dtype types[] = {ATTN_F32, ATTN_F64};

/* A plain problem and room for its results. */
typedef struct problem {
    int64_t b, hq, hkv, tq, tk, d, dv;
    attn_dtype dtype;
    tensor q, k, v;
    attn_sdpa_params p;
    char name[160];
} problem;

/* Results of one call. */
typedef struct results {
    tensor out, lse, weights;
} results;

static void problem_make(problem *x, rng *r, attn_dtype dtype,
                         const char *relation, uint64_t round)
{
    static const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
    memset(x, 0, sizeof *x);
    *r = rng_make(round * 2 + (dtype == ATTN_F64), strlen(relation));
    x->dtype = dtype;
    x->b = rng_int(r, 1, 3);
    x->hkv = rng_int(r, 1, 3);
    x->hq = x->hkv * rng_int(r, 1, 3);
    /* Beyond one tile of queries and of keys now and then. */
    x->tq = rng_one_in(r, 4) ? rng_int(r, 100, 200) : rng_int(r, 1, 40);
    x->tk = rng_one_in(r, 4) ? rng_int(r, 300, 600) : rng_int(r, 2, 67);
    if (x->tq * x->tk > 10000) /* the oracle is slow */
        x->b = x->hkv = x->hq = 1;
    if (rng_one_in(r, 6)) { /* few queries over many keys */
        x->hkv = x->hq = 1;
        x->tq = rng_int(r, 1, 2);
        x->tk = rng_int(r, 2000, MAX_KEYS);
    }
    x->d = rng_int(r, 1, 40);
    x->dv = rng_int(r, 1, 40);
    x->p = init;
    x->q = tensor_make(dtype, x->b, x->hq, x->tq, x->d);
    x->k = tensor_make(dtype, x->b, x->hkv, x->tk, x->d);
    x->v = tensor_make(dtype, x->b, x->hkv, x->tk, x->dv);
    tensor_normal(&x->q.view, r, 1.5);
    tensor_normal(&x->k.view, r, 1.5);
    tensor_normal(&x->v.view, r, 1.0);
    snprintf(x->name, sizeof x->name,
             "%s, round %d, f%d b=%d hq=%d hkv=%d tq=%d tk=%d d=%d dv=%d",
             relation, (int)round, dtype == ATTN_F32 ? 32 : 64, (int)x->b,
             (int)x->hq, (int)x->hkv, (int)x->tq, (int)x->tk, (int)x->d,
             (int)x->dv);
}

static void problem_free(problem *x)
{
    tensor_free(&x->q);
    tensor_free(&x->k);
    tensor_free(&x->v);
}

/* Runs a call and keeps out, LSE and, unless ragged, weights. */
static results run(const char *name, const attn_sdpa_params *params,
                   const attn_tensor *q, const attn_tensor *k,
                   const attn_tensor *v)
{
    attn_sdpa_params p = *params;
    const int64_t *s = q->shape;
    results r;
    r.out = tensor_make(q->dtype, s[0], s[1], s[2], v->shape[3]);
    r.lse = tensor_make(q->dtype, s[0], s[1], s[2], 1);
    r.weights = tensor_make(q->dtype, s[0], s[1], s[2], k->shape[2]);
    p.lse = &r.lse.view;
    p.weights = p.cu_q ? NULL : &r.weights.view;
    if (attn_sdpa(NULL, &p, q, k, v, &r.out.view) != ATTN_OK)
        fail_msg("%s: %s", name, attn_last_error());
    return r;
}

static results run_problem(const problem *x)
{
    return run(x->name, &x->p, &x->q.view, &x->k.view, &x->v.view);
}

static void results_free(results *r)
{
    tensor_free(&r->out);
    tensor_free(&r->lse);
    tensor_free(&r->weights);
}

static void assert_same_bits(const problem *x, const attn_tensor *a,
                             const attn_tensor *b)
{
    if (!compare_bits("result", x->name, a, b))
        fail_msg("%s", x->name);
}

static void assert_same_results(const problem *x, const results *a,
                                const results *b)
{
    assert_same_bits(x, &a->out.view, &b->out.view);
    assert_same_bits(x, &a->lse.view, &b->lse.view);
    assert_same_bits(x, &a->weights.view, &b->weights.view);
}

/* Both within the oracle's bound of each other; each may use all of it. */
static void assert_near(const problem *x, const char *what,
                        const attn_tensor *a, const attn_tensor *b,
                        const ref_tensor *bounds)
{
    if (compare_golden(what, x->name, a, b, bounds, 0.0))
        fail_msg("%s", x->name);
}

static void assert_near_results(const problem *x, const results *a,
                                const results *b)
{
    ref_result bounds;
    ref_sdpa(&bounds, &x->p, &x->q.view, &x->k.view, &x->v.view);
    assert_near(x, "out", &a->out.view, &b->out.view, &bounds.out);
    assert_near(x, "lse", &a->lse.view, &b->lse.view, &bounds.lse);
    assert_near(x, "weights", &a->weights.view, &b->weights.view,
                &bounds.weights);
    ref_free(&bounds);
}

/* A relation is checked for both types and many shapes. */
static void each_problem(const char *name, void (*check)(problem *x, rng *r))
{
    for (size_t t = 0; t < 2; t++)
        for (uint64_t round = 0; round < ROUNDS; round++) {
            problem x;
            rng r;
            problem_make(&x, &r, types[t], name, round);
            check(&x, &r);
            problem_free(&x);
        }
}

/* ------------------------------------------------------------ In V only -- */

/* attention(q, k, v + 2 v') = attention(q, k, v) + 2 attention(q, k, v'). */
static void check_linear_in_v(problem *x, rng *r)
{
    tensor v1 = tensor_copy(&x->v.view, x->dtype);
    tensor_normal(&v1.view, r, 1.0);
    results o0 = run_problem(x);
    results o1 = run(x->name, &x->p, &x->q.view, &x->k.view, &v1.view);
    tensor_scale_add(&v1.view, 2.0, &x->v.view);
    tensor_assign(&x->v.view, &v1.view);
    results sum = run_problem(x);
    tensor_scale_add(&o1.out.view, 2.0, &o0.out.view);
    /* Bounds for values as large as those of all three calls together. */
    ref_result bounds;
    tensor_fill(&x->v.view, 16.0);
    ref_sdpa(&bounds, &x->p, &x->q.view, &x->k.view, &x->v.view);
    assert_near(x, "out", &sum.out.view, &o1.out.view, &bounds.out);
    /* What v holds never touches the weights. */
    assert_same_bits(x, &o0.weights.view, &sum.weights.view);
    assert_same_bits(x, &o0.lse.view, &sum.lse.view);
    ref_free(&bounds);
    tensor_free(&v1);
    results_free(&o0);
    results_free(&o1);
    results_free(&sum);
}

static void test_values__output_is_linear_in_them(void **state)
{
    (void)state;
    each_problem("linear in v", check_linear_in_v);
}

/* Every output is an average of values: of equal ones, that value. */
static void check_constant_v(problem *x, rng *r)
{
    const double constant = (double)(float)rng_normal(r);
    const double u = x->dtype == ATTN_F32 ? (double)FLT_EPSILON : DBL_EPSILON;
    tensor_fill(&x->v.view, constant);
    results o = run_problem(x);
    tensor want = tensor_copy(&o.out.view, x->dtype);
    tensor_fill(&want.view, constant);
    /* Sum of n weights, of n products, their quotient; see ref.h. */
    const double bound = fabs(constant) * u * (2.0 * (double)x->tk + 16.0);
    const double distance = compare_distance(&o.out.view, &want.view);
    tensor_free(&want);
    results_free(&o);
    if (!(distance <= bound))
        fail_msg("%s: %g from the constant", x->name, distance);
}

static void test_values__constant_comes_back(void **state)
{
    (void)state;
    each_problem("constant v", check_constant_v);
}

/* --------------------------------------------------------------- Scores -- */

/* An ADD mask that is one number per query shifts all scores of its row. */
static void check_shift(problem *x, rng *r)
{
    tensor add = tensor_make(x->dtype, x->b, x->hq, x->tq, 1);
    attn_mask mask = {.kind = ATTN_MASK_ADD, .view = add.view};
    tensor_normal(&add.view, r, 20.0);
    results plain = run_problem(x);
    x->p.masks = &mask;
    x->p.num_masks = 1;
    results shifted = run_problem(x);
    /* Bounds with the mask: they are the larger ones. */
    ref_result bounds;
    ref_sdpa(&bounds, &x->p, &x->q.view, &x->k.view, &x->v.view);
    assert_near(x, "out", &shifted.out.view, &plain.out.view, &bounds.out);
    assert_near(x, "weights", &shifted.weights.view, &plain.weights.view,
                &bounds.weights);
    tensor_scale_add(&plain.lse.view, 1.0, &add.view);
    assert_near(x, "lse", &shifted.lse.view, &plain.lse.view, &bounds.lse);
    ref_free(&bounds);
    results_free(&plain);
    results_free(&shifted);
    tensor_free(&add);
}

static void test_scores__shift_of_a_row_changes_nothing(void **state)
{
    (void)state;
    each_problem("shift", check_shift);
}

/* ----------------------------------------------------------------- Keys -- */

static void draw_permutation(rng *r, int64_t *to, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = i;
    for (int64_t i = n - 1; i > 0; i--) {
        const int64_t j = rng_int(r, 0, i), swap = to[i];
        to[i] = to[j];
        to[j] = swap;
    }
}

/* A copy in which dimension dim is in the order given. */
static tensor permuted(const attn_tensor *x, int dim, const int64_t *order)
{
    tensor y = tensor_copy(x, x->dtype);
    for (int64_t n = 0; n < x->shape[dim]; n++) {
        const attn_tensor from = tensor_slice(x, dim, order[n], 1);
        const attn_tensor to = tensor_slice(&y.view, dim, n, 1);
        tensor_assign(&to, &from);
    }
    return y;
}

/* A mask over all keys with some of its rows empty and the others not. */
static tensor draw_keep(const problem *x, rng *r)
{
    tensor t = tensor_make(ATTN_U8, x->b, x->hq, x->tq, x->tk);
    for (int64_t n = 0; n < x->b * x->hq * x->tq; n++) {
        const int empty = rng_one_in(r, 8);
        for (int64_t j = 0; j < x->tk; j++)
            ((unsigned char *)t.view.data)[n * x->tk + j] =
                !empty && !rng_one_in(r, 3);
    }
    return t;
}

static void check_permuted_keys(problem *x, rng *r)
{
    int64_t order[MAX_KEYS];
    draw_permutation(r, order, x->tk);
    tensor keep = draw_keep(x, r);
    tensor k = permuted(&x->k.view, 2, order);
    tensor v = permuted(&x->v.view, 2, order);
    tensor keep2 = permuted(&keep.view, 3, order);
    attn_mask mask = {.kind = ATTN_MASK_KEEP, .view = keep.view};
    attn_mask mask2 = {.kind = ATTN_MASK_KEEP, .view = keep2.view};
    x->p.num_masks = 1;
    x->p.masks = &mask2;
    results b = run(x->name, &x->p, &x->q.view, &k.view, &v.view);
    x->p.masks = &mask;
    results a = run_problem(x);
    tensor w = permuted(&a.weights.view, 3, order);
    tensor_assign(&a.weights.view, &w.view);
    /* Bounds do not depend on the order, but their place does. */
    ref_result bounds;
    x->p.masks = &mask2;
    ref_sdpa(&bounds, &x->p, &x->q.view, &k.view, &v.view);
    assert_near(x, "out", &b.out.view, &a.out.view, &bounds.out);
    assert_near(x, "lse", &b.lse.view, &a.lse.view, &bounds.lse);
    assert_near(x, "weights", &b.weights.view, &a.weights.view,
                &bounds.weights);
    ref_free(&bounds);
    results_free(&a);
    results_free(&b);
    tensor_free(&w);
    tensor_free(&keep);
    tensor_free(&keep2);
    tensor_free(&k);
    tensor_free(&v);
}

static void test_keys__their_order_does_not_matter(void **state)
{
    (void)state;
    each_problem("permuted keys", check_permuted_keys);
}

/* What stands after a query's own position cannot move a bit of it. */
static void check_causal_prefix(problem *x, rng *r)
{
    x->p.causal = 1;
    x->p.align = ATTN_ALIGN_TOP_LEFT;
    const int64_t rows = x->tq < x->tk ? x->tq : x->tk;
    const int64_t seen = rng_int(r, 1, rows);
    results a = run_problem(x);
    const attn_tensor k = tensor_slice(&x->k.view, 2, seen, x->tk - seen);
    const attn_tensor v = tensor_slice(&x->v.view, 2, seen, x->tk - seen);
    tensor_normal(&k, r, 30.0);
    tensor_normal(&v, r, 1000.0);
    results b = run_problem(x);
    if (x->tk > seen) {
        tensor_fill(&k, (double)NAN);
        tensor_fill(&v, HUGE_VAL);
    }
    results c = run_problem(x);
    const results *const other[] = {&b, &c};
    for (int n = 0; n < 2; n++) {
        const attn_tensor first = tensor_slice(&a.out.view, 2, 0, seen);
        const attn_tensor again = tensor_slice(&other[n]->out.view, 2, 0, seen);
        const attn_tensor lse = tensor_slice(&a.lse.view, 2, 0, seen);
        const attn_tensor lse2 = tensor_slice(&other[n]->lse.view, 2, 0, seen);
        assert_same_bits(x, &first, &again);
        assert_same_bits(x, &lse, &lse2);
    }
    results_free(&a);
    results_free(&b);
    results_free(&c);
}

static void test_causal__later_tokens_move_no_bit(void **state)
{
    (void)state;
    each_problem("causal prefix", check_causal_prefix);
}

/* Grouped heads are the same as key/value heads repeated for their group: a
 * repeated head is a stride of 0 within the group, here a copy. */
static void check_repeated_heads(problem *x, rng *r)
{
    (void)r;
    tensor k = tensor_make(x->dtype, x->b, x->hq, x->tk, x->d);
    tensor v = tensor_make(x->dtype, x->b, x->hq, x->tk, x->dv);
    for (int64_t h = 0; h < x->hq; h++) {
        const int64_t g = h / (x->hq / x->hkv);
        const attn_tensor k_from = tensor_slice(&x->k.view, 1, g, 1);
        const attn_tensor v_from = tensor_slice(&x->v.view, 1, g, 1);
        const attn_tensor k_to = tensor_slice(&k.view, 1, h, 1);
        const attn_tensor v_to = tensor_slice(&v.view, 1, h, 1);
        tensor_assign(&k_to, &k_from);
        tensor_assign(&v_to, &v_from);
    }
    results a = run_problem(x);
    results b = run(x->name, &x->p, &x->q.view, &k.view, &v.view);
    assert_near_results(x, &a, &b);
    results_free(&a);
    results_free(&b);
    tensor_free(&k);
    tensor_free(&v);
}

static void test_heads__grouped_equal_repeated(void **state)
{
    (void)state;
    each_problem("repeated heads", check_repeated_heads);
}

/* ---------------------------------------------------------------- Masks -- */

/* The same visibility as KEEP, DROP and ADD of 0 and -inf. */
static void check_mask_forms(problem *x, rng *r)
{
    tensor keep = draw_keep(x, r);
    tensor drop = tensor_copy(&keep.view, ATTN_U8);
    tensor add = tensor_copy(&keep.view, x->dtype);
    for (int64_t n = 0; n < x->b * x->hq * x->tq * x->tk; n++) {
        const int visible = ((unsigned char *)keep.view.data)[n];
        ((unsigned char *)drop.view.data)[n] = (unsigned char)!visible;
        if (x->dtype == ATTN_F32)
            ((float *)add.view.data)[n] = visible ? 0.0f : -HUGE_VALF;
        else
            ((double *)add.view.data)[n] = visible ? 0.0 : -HUGE_VAL;
    }
    const attn_mask masks[] = {{.kind = ATTN_MASK_KEEP, .view = keep.view},
                               {.kind = ATTN_MASK_DROP, .view = drop.view},
                               {.kind = ATTN_MASK_ADD, .view = add.view}};
    results o[3];
    x->p.num_masks = 1;
    for (int n = 0; n < 3; n++) {
        x->p.masks = &masks[n];
        o[n] = run_problem(x);
    }
    assert_same_results(x, &o[0], &o[1]);
    assert_near_results(x, &o[0], &o[2]);
    for (int n = 0; n < 3; n++)
        results_free(&o[n]);
    tensor_free(&keep);
    tensor_free(&drop);
    tensor_free(&add);
}

static void test_mask__keep_drop_and_minus_infinity_agree(void **state)
{
    (void)state;
    each_problem("mask forms", check_mask_forms);
}

/* Keys hidden from every query may hold anything: not a bit moves. */
static void check_hidden_keys(problem *x, rng *r)
{
    static const double poison[] = {(double)NAN, HUGE_VAL, -HUGE_VAL, 1e30};
    tensor drop = tensor_make(ATTN_U8, x->b, 1, 1, x->tk);
    attn_mask mask = {.kind = ATTN_MASK_DROP, .view = drop.view};
    results o[5];
    for (int64_t n = 0; n < x->b * x->tk; n++)
        ((unsigned char *)drop.view.data)[n] = (unsigned char)rng_one_in(r, 2);
    x->p.masks = &mask;
    x->p.num_masks = 1;
    for (int n = 0; n < 5; n++) {
        for (int64_t m = 0; m < x->b * x->tk; m++) {
            if (!((unsigned char *)drop.view.data)[m])
                continue;
            const attn_tensor kb = tensor_slice(&x->k.view, 0, m / x->tk, 1);
            const attn_tensor vb = tensor_slice(&x->v.view, 0, m / x->tk, 1);
            const attn_tensor kr = tensor_slice(&kb, 2, m % x->tk, 1);
            const attn_tensor vr = tensor_slice(&vb, 2, m % x->tk, 1);
            tensor_fill(&kr, n == 0 ? 0.0 : poison[n - 1]);
            tensor_fill(&vr, n == 0 ? 0.0 : poison[n - 1]);
        }
        o[n] = run_problem(x);
        if (n > 0)
            assert_same_results(x, &o[0], &o[n]);
    }
    for (int n = 0; n < 5; n++)
        results_free(&o[n]);
    tensor_free(&drop);
}

static void test_mask__hidden_keys_may_hold_anything(void **state)
{
    (void)state;
    each_problem("hidden keys", check_hidden_keys);
}

/* A value that one query sees and another must not: NaN reaches the first
 * alone, and the other's bits are those with a zero in its place. */
static void check_hidden_from_one(problem *x, rng *r)
{
    tensor keep = tensor_make(ATTN_U8, 1, 1, x->tq, x->tk);
    attn_mask mask = {.kind = ATTN_MASK_KEEP, .view = keep.view};
    const int64_t row = rng_int(r, 0, x->tq - 1);
    const int64_t key = rng_int(r, 0, x->tk - 1);
    tensor_fill(&keep.view, 1.0);
    tensor_set(&keep.view, 0, 0, row, key, 0.0);
    x->p.masks = &mask;
    x->p.num_masks = 1;
    const attn_tensor v = tensor_slice(&x->v.view, 2, key, 1);
    tensor_fill(&v, 0.0);
    results a = run_problem(x);
    tensor_fill(&v, (double)NAN);
    results b = run_problem(x);
    const attn_tensor a_row = tensor_slice(&a.out.view, 2, row, 1);
    const attn_tensor b_row = tensor_slice(&b.out.view, 2, row, 1);
    assert_same_bits(x, &a_row, &b_row);
    assert_same_bits(x, &a.weights.view, &b.weights.view);
    for (int64_t i = 0; i < x->tq; i++)
        if (i != row)
            assert_true(isnan(ref_get(&b.out.view, 0, 0, i, 0)));
    results_free(&a);
    results_free(&b);
    tensor_free(&keep);
}

static void test_mask__nan_reaches_only_those_who_see_it(void **state)
{
    (void)state;
    each_problem("hidden from one", check_hidden_from_one);
}

/* Every key at the most negative finite number is not "masked": the scores
 * drown in it and the row is the plain mean. */
static void check_lowest_mask(problem *x, rng *r)
{
    (void)r;
    const double lowest = x->dtype == ATTN_F32 ? -(double)FLT_MAX : -DBL_MAX;
    tensor add = tensor_make(x->dtype, 1, 1, 1, x->tk);
    tensor_fill(&add.view, lowest);
    attn_mask mask = {.kind = ATTN_MASK_ADD, .view = add.view};
    x->p.masks = &mask;
    x->p.num_masks = 1;
    results o = run_problem(x);
    const double u = x->dtype == ATTN_F32 ? (double)FLT_EPSILON : DBL_EPSILON;
    for (int64_t j = 0; j < x->tk; j++) {
        const double w = (double)ref_get(&o.weights.view, 0, 0, 0, j);
        if (!(fabs(w * (double)x->tk - 1.0) <= u * (double)(x->tk + 16)))
            fail_msg("%s: weight %g of key %d", x->name, w, (int)j);
    }
    results_free(&o);
    tensor_free(&add);
}

static void test_mask__lowest_number_gives_the_mean(void **state)
{
    (void)state;
    each_problem("lowest mask", check_lowest_mask);
}

/* A NaN that a row does see makes its visible weights NaN, but "a masked key
 * has weight exactly 0" holds there as anywhere. */
static void check_weights_of_a_nan_row(problem *x, rng *r)
{
    tensor keep = draw_keep(x, r);
    tensor mean = tensor_make(x->dtype, x->b, 1, x->tq, x->tk);
    attn_mask mask = {.kind = ATTN_MASK_KEEP, .view = keep.view};
    const attn_tensor row = tensor_slice(&x->q.view, 2, 0, 1);
    x->p.masks = &mask;
    x->p.num_masks = 1;
    x->p.weights_mean = &mean.view;
    tensor_fill(&row, (double)NAN);
    results o = run_problem(x);
    for (int64_t j = 0; j < x->tk; j++) {
        int64_t seen = 0;
        for (int64_t h = 0; h < x->hq; h++) {
            const long double w = ref_get(&o.weights.view, 0, h, 0, j);
            const int visible = ref_get(&keep.view, 0, h, 0, j) != 0.0L;
            seen += visible;
            if (visible ? !isnan(w) : w != 0.0L)
                fail_msg("%s: weight %Lg of head %d, key %d", x->name, w,
                         (int)h, (int)j);
        }
        const long double w = ref_get(&mean.view, 0, 0, 0, j);
        if (seen ? !isnan(w) : w != 0.0L)
            fail_msg("%s: mean weight %Lg of key %d", x->name, w, (int)j);
    }
    results_free(&o);
    tensor_free(&mean);
    tensor_free(&keep);
}

static void test_weights__hidden_are_zero_in_a_nan_row(void **state)
{
    (void)state;
    each_problem("weights of a NaN row", check_weights_of_a_nan_row);
}

/* No heads: an output that has elements is written all the same. */
static void test_weights_mean__of_no_heads_is_zero(void **state)
{
    (void)state;
    for (size_t t = 0; t < 2; t++) {
        tensor q = tensor_make(types[t], 2, 0, 3, 4);
        tensor mean = tensor_make(types[t], 2, 1, 3, 3);
        attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
        p.weights_mean = &mean.view;
        assert_int_equal(
            attn_sdpa(NULL, &p, &q.view, &q.view, &q.view, &q.view), ATTN_OK);
        for (int64_t n = 0; n < 18; n++)
            assert_true(ref_get(&mean.view, n / 9, 0, n / 3 % 3, n % 3) ==
                        0.0L);
        tensor_free(&q);
        tensor_free(&mean);
    }
}

/* -------------------------------------------------- Lengths and batches -- */

/* One batch of a problem alone. */
static problem alone(const problem *x, int64_t b, int64_t tq, int64_t tk)
{
    problem y = *x;
    y.q.view = tensor_slice(&x->q.view, 0, b, 1);
    y.q.view = tensor_slice(&y.q.view, 2, 0, tq);
    y.k.view = tensor_slice(&x->k.view, 0, b, 1);
    y.k.view = tensor_slice(&y.k.view, 2, 0, tk);
    y.v.view = tensor_slice(&x->v.view, 0, b, 1);
    y.v.view = tensor_slice(&y.v.view, 2, 0, tk);
    return y;
}

/* Rows [0, tq) of batch b, and of the weights keys [0, tk), are those of a
 * call for that batch alone. */
static void assert_part_is(const problem *x, const results *whole, int64_t b,
                           int64_t tq, int64_t tk, const results *part)
{
    attn_tensor out = tensor_slice(&whole->out.view, 0, b, 1);
    attn_tensor lse = tensor_slice(&whole->lse.view, 0, b, 1);
    attn_tensor w = tensor_slice(&whole->weights.view, 0, b, 1);
    out = tensor_slice(&out, 2, 0, tq);
    lse = tensor_slice(&lse, 2, 0, tq);
    w = tensor_slice(&w, 2, 0, tq);
    w = tensor_slice(&w, 3, 0, tk);
    assert_same_bits(x, &out, &part->out.view);
    assert_same_bits(x, &lse, &part->lse.view);
    assert_same_bits(x, &w, &part->weights.view);
}

static void check_batch_alone(problem *x, rng *r)
{
    x->p.causal = rng_one_in(r, 2);
    x->p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    results whole = run_problem(x);
    results again = run_problem(x);
    assert_same_results(x, &whole, &again);
    for (int64_t b = 0; b < x->b; b++) {
        const problem one = alone(x, b, x->tq, x->tk);
        results part = run_problem(&one);
        assert_part_is(x, &whole, b, x->tq, x->tk, &part);
        results_free(&part);
    }
    results_free(&again);
    results_free(&whole);
}

static void test_batch__alone_or_among_others_bit_for_bit(void **state)
{
    (void)state;
    each_problem("batch alone", check_batch_alone);
}

/* Lengths equal shorter tensors. */
static void check_lengths(problem *x, rng *r)
{
    int64_t q_lens[MAX_BATCH], kv_lens[MAX_BATCH];
    for (int64_t b = 0; b < x->b; b++) {
        q_lens[b] = rng_int(r, 0, x->tq);
        kv_lens[b] = rng_int(r, 0, x->tk);
    }
    x->p.causal = rng_one_in(r, 2);
    x->p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    const attn_sdpa_params sliced = x->p;
    x->p.q_lens = q_lens;
    x->p.kv_lens = kv_lens;
    results whole = run_problem(x);
    for (int64_t b = 0; b < x->b; b++) {
        problem one = alone(x, b, q_lens[b], kv_lens[b]);
        one.p = sliced;
        results part = run_problem(&one);
        ref_result bounds;
        ref_sdpa(&bounds, &one.p, &one.q.view, &one.k.view, &one.v.view);
        attn_tensor out = tensor_slice(&whole.out.view, 0, b, 1);
        out = tensor_slice(&out, 2, 0, q_lens[b]);
        assert_near(x, "out", &out, &part.out.view, &bounds.out);
        for (int64_t i = q_lens[b]; i < x->tq; i++)
            for (int64_t h = 0; h < x->hq; h++) {
                assert_true(ref_get(&whole.out.view, b, h, i, 0) == 0.0L);
                assert_true(ref_get(&whole.lse.view, b, h, i, 0) == -HUGE_VALL);
            }
        ref_free(&bounds);
        results_free(&part);
    }
    results_free(&whole);
}

static void test_lengths__equal_sliced_tensors(void **state)
{
    (void)state;
    each_problem("lengths", check_lengths);
}

/* Sequences packed one after the other equal each one alone. */
static void check_ragged(problem *x, rng *r)
{
    int64_t cu_q[MAX_BATCH + 1] = {0}, cu_k[MAX_BATCH + 1] = {0};
    const problem row = alone(x, 0, x->tq, x->tk);
    for (int s = 1; s <= MAX_BATCH; s++) {
        cu_q[s] = rng_int(r, cu_q[s - 1], x->tq);
        cu_k[s] = rng_int(r, cu_k[s - 1], x->tk);
    }
    attn_sdpa_params p = x->p;
    p.causal = rng_one_in(r, 2);
    p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    const attn_sdpa_params single = p;
    p.cu_q = cu_q;
    p.cu_k = cu_k;
    p.num_seqs = MAX_BATCH;
    results whole = run(x->name, &p, &row.q.view, &row.k.view, &row.v.view);
    for (int s = 0; s < MAX_BATCH; s++) {
        const int64_t tq = cu_q[s + 1] - cu_q[s], tk = cu_k[s + 1] - cu_k[s];
        const attn_tensor q = tensor_slice(&row.q.view, 2, cu_q[s], tq);
        const attn_tensor k = tensor_slice(&row.k.view, 2, cu_k[s], tk);
        const attn_tensor v = tensor_slice(&row.v.view, 2, cu_k[s], tk);
        results part = run(x->name, &single, &q, &k, &v);
        const attn_tensor out = tensor_slice(&whole.out.view, 2, cu_q[s], tq);
        const attn_tensor lse = tensor_slice(&whole.lse.view, 2, cu_q[s], tq);
        assert_same_bits(x, &out, &part.out.view);
        assert_same_bits(x, &lse, &part.lse.view);
        results_free(&part);
    }
    results_free(&whole);
}

static void test_ragged__equals_one_by_one_bit_for_bit(void **state)
{
    (void)state;
    each_problem("ragged", check_ragged);
}

/* ------------------------------------------------------- Ways of calling -- */

/* Views of other memory layouts hold the same numbers. */
static void check_layouts(problem *x, rng *r)
{
    results plain = run_problem(x);
    for (int n = 0; n < 3; n++) {
        problem y = *x;
        y.q = tensor_scattered(r, TENSOR_OUTPUT, x->dtype, x->b, x->hq, x->tq,
                               x->d);
        y.k = tensor_scattered(r, TENSOR_OUTPUT, x->dtype, x->b, x->hkv, x->tk,
                               x->d);
        y.v = tensor_scattered(r, TENSOR_OUTPUT, x->dtype, x->b, x->hkv, x->tk,
                               x->dv);
        tensor_assign(&y.q.view, &x->q.view);
        tensor_assign(&y.k.view, &x->k.view);
        tensor_assign(&y.v.view, &x->v.view);
        results other = run_problem(&y);
        assert_near_results(x, &plain, &other);
        results_free(&other);
        problem_free(&y);
    }
    results_free(&plain);
}

static void test_layouts__hold_the_same_numbers(void **state)
{
    (void)state;
    each_problem("layouts", check_layouts);
}

/* q, k and v in one packed array, both ways, and a layer's (B,T,H,D) memory:
 * only other strides. The output goes to (B,T,H,D) memory. */
static void check_packed(problem *x, rng *r)
{
    problem y = *x;
    y.hkv = y.hq;
    y.k = tensor_make(x->dtype, x->b, x->hq, x->tq, x->d);
    y.v = tensor_make(x->dtype, x->b, x->hq, x->tq, x->d);
    tensor_normal(&y.k.view, r, 1.5);
    tensor_normal(&y.v.view, r, 1.0);
    results plain = run_problem(&y);
    tensor memory = tensor_make(x->dtype, 4, x->b, x->tq, x->hq * x->d);
    tensor out = tensor_make(x->dtype, x->b, x->tq, x->hq, x->d);
    for (int n = 0; n < 3; n++) {
        attn_tensor q, k, v, o;
        void *const at = memory.view.data;
        const size_t part = memory.bytes / 4;
        if (n == 0)
            attn_view_bt3hd(&q, &k, &v, x->dtype, at, x->b, x->tq, x->hq, x->d);
        if (n == 1)
            attn_view_bht3d(&q, &k, &v, x->dtype, at, x->b, x->hq, x->tq, x->d);
        if (n == 2) {
            attn_view_bthd(&q, x->dtype, at, x->b, x->tq, x->hq, x->d);
            attn_view_bthd(&k, x->dtype, (char *)at + part, x->b, x->tq, x->hq,
                           x->d);
            attn_view_bthd(&v, x->dtype, (char *)at + 2 * part, x->b, x->tq,
                           x->hq, x->d);
        }
        attn_view_bthd(&o, x->dtype, out.view.data, x->b, x->tq, x->hq, x->d);
        tensor_assign(&q, &y.q.view);
        tensor_assign(&k, &y.k.view);
        tensor_assign(&v, &y.v.view);
        if (attn_sdpa(NULL, &y.p, &q, &k, &v, &o) != ATTN_OK)
            fail_msg("%s: %s", x->name, attn_last_error());
        ref_result bounds;
        ref_sdpa(&bounds, &y.p, &q, &k, &v);
        assert_near(x, "out", &o, &plain.out.view, &bounds.out);
        ref_free(&bounds);
    }
    results_free(&plain);
    tensor_free(&memory);
    tensor_free(&out);
    tensor_free(&y.k);
    tensor_free(&y.v);
}

static void test_layouts__packed_are_only_strides(void **state)
{
    (void)state;
    each_problem("packed layouts", check_packed);
}

/* The flat call is attn_sdpa with contiguous views, bit for bit. */
static void check_flat(problem *x, rng *r)
{
    /* Dv = D there, so that k serves as v. */
    x->p.align = (int32_t)rng_int(r, 0, ATTN_ALIGN_BOTTOM_RIGHT);
    x->p.causal = x->p.align != 0;
    results a = run(x->name, &x->p, &x->q.view, &x->k.view, &x->k.view);
    tensor out = tensor_copy(&a.out.view, x->dtype);
    tensor_fill(&out.view, -1.0);
    const void *q = x->q.view.data, *k = x->k.view.data;
    const attn_status s =
        x->dtype == ATTN_F32
            ? attn_sdpa_f32(x->b, x->hq, x->hkv, x->tq, x->tk, x->d, q, k, k,
                            out.view.data, x->p.align)
            : attn_sdpa_f64(x->b, x->hq, x->hkv, x->tq, x->tk, x->d, q, k, k,
                            out.view.data, x->p.align);
    assert_int_equal(s, ATTN_OK);
    assert_same_bits(x, &out.view, &a.out.view);
    tensor_free(&out);
    results_free(&a);
}

static void test_flat_call__is_the_same_bit_for_bit(void **state)
{
    (void)state;
    each_problem("flat call", check_flat);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values__output_is_linear_in_them),
        cmocka_unit_test(test_values__constant_comes_back),
        cmocka_unit_test(test_scores__shift_of_a_row_changes_nothing),
        cmocka_unit_test(test_keys__their_order_does_not_matter),
        cmocka_unit_test(test_causal__later_tokens_move_no_bit),
        cmocka_unit_test(test_heads__grouped_equal_repeated),
        cmocka_unit_test(test_mask__keep_drop_and_minus_infinity_agree),
        cmocka_unit_test(test_mask__hidden_keys_may_hold_anything),
        cmocka_unit_test(test_mask__nan_reaches_only_those_who_see_it),
        cmocka_unit_test(test_mask__lowest_number_gives_the_mean),
        cmocka_unit_test(test_weights__hidden_are_zero_in_a_nan_row),
        cmocka_unit_test(test_weights_mean__of_no_heads_is_zero),
        cmocka_unit_test(test_batch__alone_or_among_others_bit_for_bit),
        cmocka_unit_test(test_lengths__equal_sliced_tensors),
        cmocka_unit_test(test_ragged__equals_one_by_one_bit_for_bit),
        cmocka_unit_test(test_layouts__hold_the_same_numbers),
        cmocka_unit_test(test_layouts__packed_are_only_strides),
        cmocka_unit_test(test_flat_call__is_the_same_bit_for_bit)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
