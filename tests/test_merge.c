/*
 * test_merge.c - attn_merge against its formula in long double, and against
 * attention over all keys at once.
 */
#include "kit.h"

#include "compare.h"
#include "tensors.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define MAX_PARTS 9
#define MINUS_INF (-(double)INFINITY)

static double half_unit(attn_dtype dtype)
{
    return (dtype == ATTN_F32 ? (double)FLT_EPSILON : DBL_EPSILON) / 2;
}

static double smallest(attn_dtype dtype)
{
    return dtype == ATTN_F32 ? (double)FLT_MIN : DBL_MIN;
}

/* ---- The formula ---- */

/* What a merge of one element and its row must give, and how far off it may
 * be if part p's O is off by o_error[p] and its L by l_error[p]. */
struct row {
    int num_parts;
    long double o[MAX_PARTS], l[MAX_PARTS];
    long double o_error[MAX_PARTS], l_error[MAX_PARTS];
};

/* The distance of a computed weight's logarithm from the exact one, at most:
 * errors of L (twice, in L(p) and in M or W), the rounding of L(p) - M, and exp
 * and the division. */
static long double weight_error(const struct row *r, int p, long double m,
                                long double u)
{
    long double worst = 0.0L;
    for (int k = 0; k < r->num_parts; k++)
        worst = r->l[k] > -HUGE_VALL ? fmaxl(worst, r->l_error[k]) : worst;
    return expm1l(2 * worst +
                  u * (fabsl(r->l[p] - m) + (long double)r->num_parts + 8));
}

static void merge_row(const struct row *r, attn_dtype dtype, ref_num *out,
                      ref_num *lse)
{
    const long double u = (long double)half_unit(dtype);
    long double m = -HUGE_VALL;
    long double total = 0.0L;
    long double worst = 0.0L;
    *out = (ref_num){0.0L, 0.0L};
    for (int p = 0; p < r->num_parts; p++)
        m = fmaxl(m, r->l[p]);
    *lse = (ref_num){m, 0.0L};
    if (!(m > -HUGE_VALL))
        return;
    for (int p = 0; p < r->num_parts; p++)
        total += expl(r->l[p] - m);
    for (int p = 0; p < r->num_parts; p++) {
        if (!(r->l[p] > -HUGE_VALL))
            continue;
        const long double w = expl(r->l[p] - m) / total;
        const long double g = weight_error(r, p, m, u);
        worst = fmaxl(worst, r->l_error[p]);
        out->value += w * r->o[p];
        out->error += w * (r->o_error[p] * (1 + g) + fabsl(r->o[p]) * g) +
                      u * (r->num_parts + 2) * w * fabsl(r->o[p]) +
                      2 * (fabsl(r->o[p]) + 1) * (long double)smallest(dtype);
    }
    lse->value = m + logl(total);
    lse->error = worst + u * (fabsl(lse->value) + fabsl(m) + r->num_parts + 8);
}

static void expect(const char *what, uint64_t seed, double met, ref_num want)
{
    if (isinf(want.value)) {
        if (!(isinf(met) && met < 0.0))
            fail_msg("seed %d: %s is %.17g, not -inf", (int)seed, what, met);
    } else if (!(fabsl((long double)met - want.value) <= want.error)) {
        fail_msg("seed %d: %s is %.17g, not %.21Lg +- %.3Lg", (int)seed, what,
                 met, want.value, want.error);
    }
}

/* A random merge. */
struct call {
    uint64_t seed;
    attn_dtype dtype;
    int num_parts;
    tensor o[MAX_PARTS], l[MAX_PARTS], out, lse;
    attn_tensor outs[MAX_PARTS], lses[MAX_PARTS];
};

static void draw_part(struct call *n, int p, rng *r, double spread)
{
    const int64_t *s = n->out.view.shape;
    if (rng_one_in(r, 2)) {
        n->o[p] = tensor_make(n->dtype, s[0], s[1], s[2], s[3]);
        n->l[p] = tensor_make(n->dtype, s[0], s[1], s[2], 1);
    } else {
        n->o[p] =
            tensor_scattered(r, TENSOR_INPUT, n->dtype, s[0], s[1], s[2], s[3]);
        n->l[p] =
            tensor_scattered(r, TENSOR_INPUT, n->dtype, s[0], s[1], s[2], 1);
    }
    tensor_normal(&n->o[p].view, r, 1.0);
    tensor_normal(&n->l[p].view, r, spread);
    /* Some rows are empty; what O holds there must not matter. */
    for (int64_t i = 0; i < s[0] * s[1] * s[2]; i++) {
        const int64_t t = i % s[2];
        const int64_t h = i / s[2] % s[1];
        const int64_t b = i / s[2] / s[1];
        if (!rng_one_in(r, 4))
            continue;
        tensor_set(&n->l[p].view, b, h, t, 0, MINUS_INF);
    }
    n->outs[p] = n->o[p].view;
    n->lses[p] = n->l[p].view;
}

static void draw_call(struct call *n, uint64_t seed)
{
    static const double spreads[] = {1.0, 30.0, 3000.0};
    rng r = rng_make(seed, 77);
    const double spread = spreads[rng_int(&r, 0, 2)];
    memset(n, 0, sizeof *n);
    n->seed = seed;
    n->dtype = rng_one_in(&r, 2) ? ATTN_F32 : ATTN_F64;
    n->num_parts = (int)rng_int(&r, 0, MAX_PARTS);
    const int64_t B = rng_int(&r, 1, 2);
    const int64_t H = rng_int(&r, 1, 3);
    const int64_t T = rng_int(&r, 1, 5);
    /* Now and then wider than what is summed at once. */
    const int64_t Dv =
        rng_one_in(&r, 8) ? rng_int(&r, 250, 600) : rng_int(&r, 0, 40);
    n->out = tensor_scattered(&r, TENSOR_OUTPUT, n->dtype, B, H, T, Dv);
    n->lse = tensor_scattered(&r, TENSOR_OUTPUT, n->dtype, B, H, T, 1);
    for (int p = 0; p < n->num_parts; p++)
        draw_part(n, p, &r, spread);
}

static void free_call(struct call *n)
{
    for (int p = 0; p < n->num_parts; p++) {
        tensor_free(&n->o[p]);
        tensor_free(&n->l[p]);
    }
    tensor_free(&n->out);
    tensor_free(&n->lse);
}

static void run_call(const struct call *n, const attn_tensor *out,
                     const attn_tensor *lse)
{
    if (attn_merge(NULL, n->num_parts, n->outs, n->lses, out, lse) != ATTN_OK)
        fail_msg("seed %d: %s", (int)n->seed, attn_last_error());
}

static void expect_merged(const struct call *n)
{
    const int64_t *s = n->out.view.shape;
    for (int64_t i = 0; i < s[0] * s[1] * s[2]; i++) {
        const int64_t t = i % s[2];
        const int64_t h = i / s[2] % s[1];
        const int64_t b = i / s[2] / s[1];
        struct row r = {.num_parts = n->num_parts};
        ref_num out;
        ref_num lse;
        for (int p = 0; p < n->num_parts; p++)
            r.l[p] = ref_get(&n->lses[p], b, h, t, 0);
        merge_row(&r, n->dtype, &out, &lse);
        expect("lse", n->seed, kit_get(&n->lse.view, b, h, t, 0), lse);
        for (int64_t e = 0; e < s[3]; e++) {
            for (int p = 0; p < n->num_parts; p++)
                r.o[p] = ref_get(&n->outs[p], b, h, t, e);
            merge_row(&r, n->dtype, &out, &lse);
            expect("out", n->seed, kit_get(&n->out.view, b, h, t, e), out);
        }
    }
}

static void test_merge__is_the_formula(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 400; seed++) {
        struct call n;
        draw_call(&n, seed);
        run_call(&n, &n.out.view, &n.lse.view);
        expect_merged(&n);
        assert_true(tensor_surroundings_intact(&n.out));
        assert_true(tensor_surroundings_intact(&n.lse));
        free_call(&n);
    }
}

static void test_merge__lse_may_be_left_out(void **state)
{
    (void)state;
    for (uint64_t seed = 1000; seed < 1020; seed++) {
        struct call n;
        draw_call(&n, seed);
        const int64_t *s = n.out.view.shape;
        tensor out = tensor_make(n.dtype, s[0], s[1], s[2], s[3]);
        run_call(&n, &n.out.view, &n.lse.view);
        run_call(&n, &out.view, NULL);
        assert_true(compare_bits("out", "without lse", &out.view, &n.out.view));
        tensor_free(&out);
        free_call(&n);
    }
}

/* Over any one of the parts, both outputs or one: the same bits. */
static void test_merge__in_place_gives_the_same_bits(void **state)
{
    (void)state;
    for (uint64_t seed = 2000; seed < 2100; seed++) {
        struct call n;
        draw_call(&n, seed);
        run_call(&n, &n.out.view, &n.lse.view);
        for (int p = 0; p < n.num_parts; p++) {
            tensor o = tensor_copy(&n.outs[p], n.dtype);
            tensor l = tensor_copy(&n.lses[p], n.dtype);
            const attn_tensor kept[2] = {n.outs[p], n.lses[p]};
            n.outs[p] = o.view;
            n.lses[p] = l.view;
            run_call(&n, &o.view, &l.view);
            assert_true(compare_bits("out", "in place", &o.view, &n.out.view));
            assert_true(compare_bits("lse", "in place", &l.view, &n.lse.view));
            n.outs[p] = kept[0];
            n.lses[p] = kept[1];
            tensor_free(&o);
            tensor_free(&l);
        }
        free_call(&n);
    }
}

/* ---- Parts of real attention ---- */

/* Attention over the keys [from, from + count), a causal query standing where
 * it stands among all keys. */
static void attend(const attn_sdpa_params *whole, const attn_tensor *q,
                   const attn_tensor *k, const attn_tensor *v, int64_t from,
                   int64_t count, const attn_tensor *out,
                   const attn_tensor *lse, ref_result *exact)
{
    attn_sdpa_params params = *whole;
    const attn_tensor k_part = tensor_slice(k, 2, from, count);
    const attn_tensor v_part = tensor_slice(v, 2, from, count);
    if (params.causal)
        params.q_offset -= from;
    params.lse = lse;
    if (attn_sdpa(NULL, &params, q, &k_part, &v_part, out) != ATTN_OK)
        fail_msg("%s", attn_last_error());
    ref_sdpa(exact, &params, q, &k_part, &v_part);
}

/* Uneven pieces, the second one empty where there are more than two. */
static void cut(int64_t *begin, int parts, int64_t keys, rng *r)
{
    begin[0] = 0;
    for (int p = 1; p < parts; p++)
        begin[p] = p == 2 ? begin[1] : rng_int(r, begin[p - 1], keys);
    begin[parts] = keys;
}

/* out and lse of the merge, of the whole by the library, and of the whole by
 * the oracle agree within what the parts' own error bounds allow. */
static void expect_whole(uint64_t seed, const attn_tensor got[2],
                         const attn_tensor whole[2], const ref_result *exact,
                         const ref_result *parts, int num_parts)
{
    const int64_t *s = got[0].shape;
    for (int64_t i = 0; i < s[0] * s[1] * s[2] * s[3]; i++) {
        const int64_t e = i % s[3];
        const int64_t t = i / s[3] % s[2];
        const int64_t h = i / s[3] / s[2] % s[1];
        const int64_t b = i / s[3] / s[2] / s[1];
        struct row r = {.num_parts = num_parts};
        ref_num out;
        ref_num lse;
        for (int p = 0; p < num_parts; p++) {
            const ref_num *o = ref_at(&parts[p].out, b, h, t, e);
            const ref_num *l = ref_at(&parts[p].lse, b, h, t, 0);
            r.o[p] = o->value;
            r.l[p] = l->value;
            r.o_error[p] = o->error;
            r.l_error[p] = isinf(l->value) ? 0.0L : l->error;
        }
        merge_row(&r, got[0].dtype, &out, &lse);
        expect("out", seed, kit_get(&got[0], b, h, t, e), out);
        expect("lse", seed, kit_get(&got[1], b, h, t, 0), lse);
        const ref_num *o = ref_at(&exact->out, b, h, t, e);
        const ref_num *l = ref_at(&exact->lse, b, h, t, 0);
        out.value = ref_get(&whole[0], b, h, t, e);
        out.error += o->error;
        lse.value = ref_get(&whole[1], b, h, t, 0);
        lse.error += isinf(l->value) ? 0.0L : l->error;
        expect("out against the whole", seed, kit_get(&got[0], b, h, t, e),
               out);
        expect("lse against the whole", seed, kit_get(&got[1], b, h, t, 0),
               lse);
    }
}

static void split_and_merge(uint64_t seed, int num_parts)
{
    rng r = rng_make(seed, (uint64_t)num_parts);
    const attn_dtype dtype = rng_one_in(&r, 2) ? ATTN_F32 : ATTN_F64;
    const int64_t B = rng_int(&r, 1, 2);
    const int64_t Hkv = rng_int(&r, 1, 2);
    const int64_t Hq = Hkv * rng_int(&r, 1, 3);
    const int64_t Tq = rng_int(&r, 1, 20);
    const int64_t Tk = rng_int(&r, 1, 90);
    const int64_t D = rng_int(&r, 1, 40);
    const int64_t Dv = rng_int(&r, 1, 40);
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    tensor q = tensor_scattered(&r, TENSOR_INPUT, dtype, B, Hq, Tq, D);
    tensor k = tensor_scattered(&r, TENSOR_INPUT, dtype, B, Hkv, Tk, D);
    tensor v = tensor_scattered(&r, TENSOR_INPUT, dtype, B, Hkv, Tk, Dv);
    tensor o[MAX_PARTS + 1];
    tensor l[MAX_PARTS + 1];
    attn_tensor outs[MAX_PARTS + 1];
    attn_tensor lses[MAX_PARTS + 1];
    ref_result exact[MAX_PARTS + 1];
    int64_t begin[MAX_PARTS + 1];

    tensor_normal(&q.view, &r, 2.0);
    tensor_normal(&k.view, &r, 1.0);
    tensor_normal(&v.view, &r, 1.0);
    if (rng_one_in(&r, 2)) {
        params.causal = 1;
        params.align = ATTN_ALIGN_OFFSET;
        params.q_offset = rng_int(&r, -3, Tk);
    }
    cut(begin, num_parts, Tk, &r);
    for (int p = 0; p <= num_parts; p++) {
        const int64_t from = p < num_parts ? begin[p] : 0;
        const int64_t count = p < num_parts ? begin[p + 1] - from : Tk;
        o[p] = tensor_make(dtype, B, Hq, Tq, Dv);
        l[p] = tensor_make(dtype, B, Hq, Tq, 1);
        outs[p] = o[p].view;
        lses[p] = l[p].view;
        attend(&params, &q.view, &k.view, &v.view, from, count, &outs[p],
               &lses[p], &exact[p]);
    }
    const attn_tensor got[2] = {outs[0], lses[0]};
    const attn_tensor whole[2] = {outs[num_parts], lses[num_parts]};
    if (attn_merge(NULL, num_parts, outs, lses, &got[0], &got[1]) != ATTN_OK)
        fail_msg("%s", attn_last_error());
    expect_whole(seed, got, whole, &exact[num_parts], exact, num_parts);
    for (int p = 0; p <= num_parts; p++) {
        tensor_free(&o[p]);
        tensor_free(&l[p]);
        ref_free(&exact[p]);
    }
    tensor_free(&q);
    tensor_free(&k);
    tensor_free(&v);
}

static void test_merge__parts_of_the_keys_make_the_whole(void **state)
{
    (void)state;
    static const int counts[] = {1, 2, 3, 7};
    for (uint64_t seed = 0; seed < 40; seed++)
        for (size_t n = 0; n < COUNT(counts); n++)
            split_and_merge(seed, counts[n]);
}

/* ---- Special rows ---- */

/* Two parts, one row of two columns, in double. */
struct pair {
    double o[2][2], l[2], out[2], lse;
};

static void merge_pair(struct pair *m)
{
    attn_tensor outs[2];
    attn_tensor lses[2];
    for (int p = 0; p < 2; p++) {
        outs[p] = kit_view(ATTN_F64, m->o[p], 1, 1, 1, 2);
        lses[p] = kit_view(ATTN_F64, &m->l[p], 1, 1, 1, 1);
    }
    const attn_tensor out = kit_view(ATTN_F64, m->out, 1, 1, 1, 2);
    const attn_tensor lse = kit_view(ATTN_F64, &m->lse, 1, 1, 1, 1);
    assert_int_equal(attn_merge(NULL, 2, outs, lses, &out, &lse), ATTN_OK);
}

static void test_merge__a_part_without_keys_adds_nothing(void **state)
{
    (void)state;
    static const double odd[] = {(double)NAN, (double)INFINITY, MINUS_INF, 1.0};
    for (size_t n = 0; n < COUNT(odd); n++)
        for (int empty = 0; empty < 2; empty++) {
            struct pair m = {.o = {{-0.0, 3.1}, {-0.0, 3.1}}, .l = {0.7, 0.7}};
            m.o[empty][0] = odd[n];
            m.o[empty][1] = odd[n];
            m.l[empty] = MINUS_INF;
            merge_pair(&m);
            assert_memory_equal(m.out, m.o[1 - empty], sizeof m.out);
            assert_memory_equal(&m.lse, &m.l[1 - empty], sizeof m.lse);
        }
}

static void test_merge__only_empty_parts_give_zeros(void **state)
{
    (void)state;
    struct pair m = {.o = {{(double)NAN, 1.0}, {2.0, 3.0}},
                     .l = {MINUS_INF, MINUS_INF},
                     .out = {5.0, 5.0}};
    static const double zeros[2];
    merge_pair(&m);
    assert_memory_equal(m.out, zeros, sizeof zeros);
    assert_true(isinf(m.lse) && m.lse < 0.0);
}

static void test_merge__nan_propagates(void **state)
{
    (void)state;
    static const double odd[] = {(double)NAN, (double)INFINITY};
    for (int p = 0; p < 2; p++) {
        for (size_t n = 0; n < COUNT(odd); n++)
            for (int other = 0; other < 2; other++) {
                struct pair m = {.o = {{1.0, 2.0}, {3.0, 4.0}}};
                m.l[1 - p] = other ? MINUS_INF : 0.5;
                m.l[p] = odd[n];
                merge_pair(&m);
                assert_true(isnan(m.out[0]) && isnan(m.out[1]));
                assert_true(isnan(m.lse));
            }
        struct pair m = {.o = {{1.0, 2.0}, {3.0, 4.0}}};
        m.o[p][1] = (double)NAN;
        merge_pair(&m);
        assert_true(fabs(m.out[0] - 2.0) <= DBL_EPSILON);
        assert_true(isnan(m.out[1]));
        assert_true(fabs(m.lse - log(2.0)) <= DBL_EPSILON);
    }
}

/* Sums of exponentials that no double holds. */
static void test_merge__any_size_of_lse(void **state)
{
    (void)state;
    static const double sizes[] = {-1e300, -5000.0, 5000.0, 1e300};
    for (size_t n = 0; n < COUNT(sizes); n++) {
        struct pair m = {.o = {{1.0, 2.0}, {3.0, 4.0}},
                         .l = {sizes[n], sizes[n]}};
        merge_pair(&m);
        assert_true(fabs(m.out[0] - 2.0) <= DBL_EPSILON);
        assert_true(fabs(m.out[1] - 3.0) <= 2 * DBL_EPSILON);
        assert_true(fabs(m.lse - (sizes[n] + log(2.0))) <=
                    DBL_EPSILON * fabs(sizes[n]));
        m.l[1] = -DBL_MAX;
        merge_pair(&m);
        assert_true(fabs(m.out[0] - 1.0) <= DBL_EPSILON);
        assert_true(fabs(m.lse - sizes[n]) <= DBL_EPSILON * fabs(sizes[n]));
    }
}

/* Any bits that are numbers: -0, denormal, largest. */
static void test_merge__a_single_part_keeps_its_bits(void **state)
{
    (void)state;
    static const double odd[] = {-0.0, 5e-324, DBL_MAX, -1e-310, 0.1};
    for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_F64; dtype++) {
        attn_tensor o = kit_make(dtype, 2, 3, 4, 300);
        attn_tensor l = kit_make(dtype, 2, 3, 4, 1);
        attn_tensor out = kit_make(dtype, 2, 3, 4, 300);
        attn_tensor lse = kit_make(dtype, 2, 3, 4, 1);
        for (int64_t n = 0; n < (int64_t)COUNT(odd); n++) {
            const double x =
                dtype == ATTN_F32 && odd[n] > 1.0 ? (double)FLT_MAX : odd[n];
            kit_set(&o, 1, 2, 3, 60 * n, x);
            kit_set(&l, n % 2, n % 3, n % 4, 0, x);
        }
        kit_set(&l, 1, 0, 3, 0, MINUS_INF);
        for (int64_t e = 0; e < 300; e++)
            kit_set(&o, 1, 0, 3, e, 0.0);
        assert_int_equal(attn_merge(NULL, 1, &o, &l, &out, &lse), ATTN_OK);
        assert_true(kit_same(&o, &out));
        assert_true(kit_same(&l, &lse));
        kit_drop(&o);
        kit_drop(&l);
        kit_drop(&out);
        kit_drop(&lse);
    }
}

/* ((a, b), c) and (a, (b, c)) are (a, b, c), within the bounds of two merges:
 * what a merge gives is a part like any other. */
static void test_merge__merges_may_be_nested(void **state)
{
    (void)state;
    for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_F64; dtype++)
        for (int first = 0; first < 2; first++) {
            attn_tensor o[3];
            attn_tensor l[3];
            kit_seed((uint64_t)(10 * dtype + first));
            for (int p = 0; p < 3; p++) {
                o[p] = kit_make(dtype, 2, 2, 5, 11);
                l[p] = kit_make(dtype, 2, 2, 5, 1);
            }
            attn_tensor flat[2] = {kit_make(dtype, 2, 2, 5, 11),
                                   kit_make(dtype, 2, 2, 5, 1)};
            assert_int_equal(attn_merge(NULL, 3, o, l, &flat[0], &flat[1]),
                             ATTN_OK);
            assert_int_equal(
                attn_merge(NULL, 2, o + first, l + first, &o[first], &l[first]),
                ATTN_OK);
            const attn_tensor two_o[2] = {o[0], o[first == 0 ? 2 : 1]};
            const attn_tensor two_l[2] = {l[0], l[first == 0 ? 2 : 1]};
            assert_int_equal(attn_merge(NULL, 2, two_o, two_l, &o[0], &l[0]),
                             ATTN_OK);
            /* |O| and |L| are at most 1 and 1 + ln 3 here: each merge errs by
             * less than 16 half units in L, which counts twice in a weight,
             * and the other one by as much. */
            assert_true(compare_distance(&flat[0], &o[0]) <=
                        100 * half_unit(dtype));
            assert_true(compare_distance(&flat[1], &l[0]) <=
                        50 * half_unit(dtype));
            for (int p = 0; p < 3; p++) {
                kit_drop(&o[p]);
                kit_drop(&l[p]);
            }
            kit_drop(&flat[0]);
            kit_drop(&flat[1]);
        }
}

static void test_merge__zero_sizes_are_fine(void **state)
{
    (void)state;
    for (int dim = 0; dim < 4; dim++) {
        attn_tensor o = kit_view(ATTN_F64, NULL, 2, 2, 2, 2);
        attn_tensor l = kit_make(ATTN_F64, 2, 2, 2, 1);
        attn_tensor lse = kit_make(ATTN_F64, 2, 2, 2, 1);
        o.shape[dim] = 0;
        if (dim < 3)
            l.shape[dim] = lse.shape[dim] = 0;
        if (attn_merge(NULL, 1, &o, &l, &o, &lse) != ATTN_OK)
            fail_msg("size %d: %s", dim, attn_last_error());
        assert_true(kit_same(&l, &lse));
        kit_drop(&l);
        kit_drop(&lse);
    }
    /* More rows than could be walked, but no element. */
    attn_tensor o = kit_view(ATTN_F64, NULL, INT64_C(1) << 60, 1, 1, 0);
    assert_int_equal(attn_merge(NULL, 0, NULL, NULL, &o, NULL), ATTN_OK);
}

static void test_merge__no_parts_give_zeros(void **state)
{
    (void)state;
    attn_tensor out = kit_make(ATTN_F32, 2, 2, 3, 4);
    attn_tensor lse = kit_make(ATTN_F32, 2, 2, 3, 1);
    attn_tensor zeros = kit_make(ATTN_F32, 2, 2, 3, 4);
    attn_tensor empty = kit_make(ATTN_F32, 2, 2, 3, 1);
    kit_fill_with(&zeros, 0.0);
    kit_fill_with(&empty, MINUS_INF);
    assert_int_equal(attn_merge(NULL, 0, NULL, NULL, &out, &lse), ATTN_OK);
    assert_true(kit_same(&out, &zeros));
    assert_true(kit_same(&lse, &empty));
    kit_drop(&out);
    kit_drop(&lse);
    kit_drop(&zeros);
    kit_drop(&empty);
}

/* Long enough for many tasks. */
static void test_merge__threads_do_not_change_the_bits(void **state)
{
    (void)state;
    attn_context_params with = ATTN_CONTEXT_PARAMS_INIT;
    attn_tensor o[3];
    attn_tensor l[3];
    attn_tensor one[2] = {kit_make(ATTN_F32, 2, 3, 300, 50),
                          kit_make(ATTN_F32, 2, 3, 300, 1)};
    attn_tensor many[2] = {kit_make(ATTN_F32, 2, 3, 300, 50),
                           kit_make(ATTN_F32, 2, 3, 300, 1)};
    for (int p = 0; p < 3; p++) {
        o[p] = kit_make(ATTN_F32, 2, 3, 300, 50);
        l[p] = kit_make(ATTN_F32, 2, 3, 300, 1);
    }
    assert_int_equal(attn_merge(NULL, 3, o, l, &one[0], &one[1]), ATTN_OK);
    for (int32_t threads = 2; threads <= 5; threads += 3) {
        attn_context *context = NULL;
        with.num_threads = threads;
        assert_int_equal(attn_context_create(&context, &with), ATTN_OK);
        kit_fill_with(&many[0], 9.0);
        kit_fill_with(&many[1], 9.0);
        assert_int_equal(attn_merge(context, 3, o, l, &many[0], &many[1]),
                         ATTN_OK);
        assert_true(kit_same(&one[0], &many[0]));
        assert_true(kit_same(&one[1], &many[1]));
        attn_context_destroy(context);
    }
    for (int p = 0; p < 3; p++) {
        kit_drop(&o[p]);
        kit_drop(&l[p]);
    }
    for (int n = 0; n < 2; n++) {
        kit_drop(&one[n]);
        kit_drop(&many[n]);
    }
}

/* ---- Refusals ---- */

/* One valid call, all of whose memory is watched. */
static struct {
    int32_t num_parts;
    attn_tensor outs[2], lses[2], out, lse;
    const attn_tensor *use_outs, *use_lses, *use_out, *use_lse;
    double memory[256];
} v, before;

static void make_valid(void)
{
    memset(&v, 0, sizeof v);
    v.num_parts = 2;
    for (int p = 0; p < 2; p++) {
        v.outs[p] = kit_view(ATTN_F64, v.memory + 64 * p, 1, 2, 3, 4);
        v.lses[p] = kit_view(ATTN_F64, v.memory + 32 + 64 * p, 1, 2, 3, 1);
    }
    v.out = kit_view(ATTN_F64, v.memory + 128, 1, 2, 3, 4);
    v.lse = kit_view(ATTN_F64, v.memory + 160, 1, 2, 3, 1);
    v.use_outs = v.outs;
    v.use_lses = v.lses;
    v.use_out = &v.out;
    v.use_lse = &v.lse;
}

static void expect_refused(int line, attn_status want)
{
    static const char call[] = "attn_merge: ";
    memcpy(&before, &v, sizeof before);
    const attn_status status = attn_merge(NULL, v.num_parts, v.use_outs,
                                          v.use_lses, v.use_out, v.use_lse);
    if (status != want)
        fail_msg("line %d: %s (%s) in place of %s", line, attn_strerror(status),
                 attn_last_error(), attn_strerror(want));
    if (status != ATTN_OK) {
        assert_memory_equal(attn_last_error(), call, sizeof call - 1);
        assert_memory_equal(&before, &v, sizeof before);
    }
}

/* The valid call with one change. */
#define GIVES(status, change)               \
    do {                                    \
        make_valid();                       \
        change;                             \
        expect_refused(__LINE__, (status)); \
    } while (0)

static void test_merge__bad_arguments_are_refused(void **state)
{
    (void)state;
    GIVES(ATTN_OK, (void)0);
    GIVES(ATTN_ERR_SIZE, v.num_parts = -1);
    GIVES(ATTN_ERR_NULL, v.use_outs = NULL);
    GIVES(ATTN_ERR_NULL, v.use_lses = NULL);
    GIVES(ATTN_ERR_NULL, v.use_out = NULL);
    GIVES(ATTN_ERR_NULL, v.outs[1].data = NULL);
    GIVES(ATTN_ERR_NULL, v.lse.data = NULL);
    GIVES(ATTN_ERR_SIZE, v.lses[0].shape[2] = -3);
    GIVES(ATTN_ERR_SHAPE, v.outs[1].shape[3] = 3);
    GIVES(ATTN_ERR_SHAPE, v.lses[1].shape[3] = 4);
    GIVES(ATTN_ERR_SHAPE, v.lse.shape[1] = 1);
    GIVES(ATTN_ERR_TYPE, v.out.dtype = ATTN_U8);
    GIVES(ATTN_ERR_TYPE, v.outs[1].dtype = ATTN_F32);
    GIVES(ATTN_ERR_TYPE, v.lses[0].dtype = ATTN_F32);
    GIVES(ATTN_ERR_TYPE, v.lse.dtype = ATTN_F32);
    GIVES(ATTN_ERR_STRIDE, v.out.stride[2] = 0);
    GIVES(ATTN_ERR_STRIDE, v.lse.stride[2] = 0);
    GIVES(ATTN_ERR_ALIGN, v.outs[0].data = (unsigned char *)v.memory + 1);
    GIVES(ATTN_ERR_UNSUPPORTED, v.lses[1].reserved = 1);
}

static void test_merge__overlaps_are_refused(void **state)
{
    (void)state;
    GIVES(ATTN_OK, v.out = v.outs[0]; v.lse = v.lses[1]);
    GIVES(ATTN_OK, v.outs[1] = v.out = v.outs[0]);
    GIVES(ATTN_ERR_OVERLAP, v.out.data = v.memory + 1);
    GIVES(ATTN_ERR_OVERLAP, v.out.data = v.memory + 64; v.out.stride[2] = 5;
          v.out.stride[1] = 15);
    GIVES(ATTN_ERR_OVERLAP, v.lse.data = v.memory + 33);
    GIVES(ATTN_ERR_OVERLAP, v.lse.data = v.memory + 64);
    GIVES(ATTN_ERR_OVERLAP, v.out.data = v.memory + 96);
    GIVES(ATTN_ERR_OVERLAP, v.lse.data = v.out.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merge__is_the_formula),
        cmocka_unit_test(test_merge__lse_may_be_left_out),
        cmocka_unit_test(test_merge__in_place_gives_the_same_bits),
        cmocka_unit_test(test_merge__parts_of_the_keys_make_the_whole),
        cmocka_unit_test(test_merge__a_part_without_keys_adds_nothing),
        cmocka_unit_test(test_merge__only_empty_parts_give_zeros),
        cmocka_unit_test(test_merge__nan_propagates),
        cmocka_unit_test(test_merge__any_size_of_lse),
        cmocka_unit_test(test_merge__a_single_part_keeps_its_bits),
        cmocka_unit_test(test_merge__merges_may_be_nested),
        cmocka_unit_test(test_merge__zero_sizes_are_fine),
        cmocka_unit_test(test_merge__no_parts_give_zeros),
        cmocka_unit_test(test_merge__threads_do_not_change_the_bits),
        cmocka_unit_test(test_merge__bad_arguments_are_refused),
        cmocka_unit_test(test_merge__overlaps_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
