/*
 * Attention built by hand and checked number by number: the experiments that
 * such an introduction shows, through the library, in both types. Inputs are
 * in cases/article; agreement with PyTorch is in test_golden.c.
 */
#include <float.h>
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

#define COUNT(a) (sizeof(a) / sizeof(a)[0])

static const attn_dtype types[] = {ATTN_F32, ATTN_F64};

static void check(attn_status status)
{
    if (status != ATTN_OK)
        fail_msg("%s", attn_last_error());
}

static double epsilon(attn_dtype dtype)
{
    return dtype == ATTN_F32 ? (double)FLT_EPSILON : DBL_EPSILON;
}

/* ------------------------------------------- Why 1/sqrt(dk): the table -- */

enum { KEYS = 2000 };

/* One row of the table: as printed, and as measured. */
typedef struct experiment {
    int width;
    const char *std, *max_raw, *max_scaled, *effective_raw, *effective_scaled;
} experiment;

static const experiment table[] = {
    {16, "2.47", "0.227685", "0.004241", "14.85", "1341.59"},
    {64, "7.32", "0.921946", "0.009399", "1.17", "829.74"},
    {512, "20.99", "0.933175", "0.005796", "1.15", "917.82"}};

/* cases/article/NAME_dkWIDTH.npy as rows x columns, in the type asked for. */
static tensor load_matrix(const char *name, int width, attn_dtype dtype,
                          int64_t rows, int64_t columns)
{
    char path[1024];
    npy_array a;
    snprintf(path, sizeof path, "%s/cases/article/%s_dk%d.npy", ATTN_TEST_DIR,
             name, width);
    const char *error = npy_load(path, &a);
    if (error)
        fail_msg("%s: %s", path, error);
    assert_int_equal(a.count, rows * columns);
    tensor t = tensor_make(dtype, 1, 1, rows, columns);
    for (int64_t i = 0; i < a.count; i++)
        tensor_set(&t.view, 0, 0, i / columns, i % columns,
                   ((const double *)a.view.data)[i]);
    npy_free(&a);
    return t;
}

/* q and k of one row of the table. Where only the products are kept, they are
 * the keys of a query of width 1 that is 1: the scores are the same. */
static void load_inputs(const experiment *e, attn_dtype dtype, tensor *q,
                        tensor *k)
{
    if (e->width < 512) {
        *q = load_matrix("q", e->width, dtype, 1, e->width);
        *k = load_matrix("k", e->width, dtype, KEYS, e->width);
        return;
    }
    *k = load_matrix("dots", e->width, dtype, KEYS, 1);
    *q = tensor_make(dtype, 1, 1, 1, 1);
    tensor_fill(&q->view, 1.0);
}

/* The products q.k as a layer with one output and no bias. */
static double products_std(const tensor *q, const tensor *k)
{
    tensor y = tensor_make(k->view.dtype, 1, 1, KEYS, 1);
    check(attn_linear(NULL, ATTN_WEIGHT_OUT_IN, &k->view, &q->view, NULL,
                      &y.view));
    double sum = 0.0, squares = 0.0;
    for (int64_t j = 0; j < KEYS; j++)
        sum += (double)ref_get(&y.view, 0, 0, j, 0);
    for (int64_t j = 0; j < KEYS; j++)
        squares += pow((double)ref_get(&y.view, 0, 0, j, 0) - sum / KEYS, 2.0);
    tensor_free(&y);
    return sqrt(squares / KEYS);
}

/* Largest weight, and the effective number of keys 1 / sum w^2. */
static void attend(const tensor *q, const tensor *k, double scale,
                   double *largest, double *effective)
{
    tensor w = tensor_make(q->view.dtype, 1, 1, 1, KEYS);
    tensor v = tensor_make(q->view.dtype, 1, 1, KEYS, 1);
    tensor out = tensor_make(q->view.dtype, 1, 1, 1, 1);
    attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
    tensor_fill(&v.view, 1.0);
    p.flags = ATTN_SDPA_SCALE;
    p.scale = scale;
    p.weights = &w.view;
    check(attn_sdpa(NULL, &p, &q->view, &k->view, &v.view, &out.view));
    double squares = 0.0;
    *largest = 0.0;
    for (int64_t j = 0; j < KEYS; j++) {
        const double x = (double)ref_get(&w.view, 0, 0, 0, j);
        squares += x * x;
        *largest = x > *largest ? x : *largest;
    }
    *effective = 1.0 / squares;
    tensor_free(&w);
    tensor_free(&v);
    tensor_free(&out);
}

/* In float64 every printed digit; in float32 to four digits, because scores
 * near 80 have an error of some 1e-5 there, and so have the weights. */
static void assert_printed(attn_dtype dtype, double value, const char *printed)
{
    char text[32];
    const char *point = strchr(printed, '.');
    snprintf(text, sizeof text, "%.*f", (int)strlen(point + 1), value);
    if (dtype == ATTN_F64)
        assert_string_equal(text, printed);
    else
        assert_true(fabs(value / strtod(printed, NULL) - 1.0) < 5e-4 ||
                    strcmp(text, printed) == 0);
}

static void test_scale__table_of_widths(void **state)
{
    (void)state;
    for (size_t t = 0; t < COUNT(types); t++)
        for (size_t n = 0; n < COUNT(table); n++) {
            const experiment *e = &table[n];
            double largest, effective;
            tensor q, k;
            load_inputs(e, types[t], &q, &k);
            assert_printed(types[t], products_std(&q, &k), e->std);
            attend(&q, &k, 1.0, &largest, &effective);
            assert_printed(types[t], largest, e->max_raw);
            assert_printed(types[t], effective, e->effective_raw);
            attend(&q, &k, 1.0 / sqrt(e->width), &largest, &effective);
            assert_printed(types[t], largest, e->max_scaled);
            assert_printed(types[t], effective, e->effective_scaled);
            tensor_free(&q);
            tensor_free(&k);
        }
}

/* ------------------------------------------------- Five tokens, width 4 -- */

/* One head over five tokens, from the golden case. */
typedef struct five {
    tensor q, k, v, out, w;
    attn_sdpa_params p;
} five;

static void five_make(five *f, attn_dtype dtype)
{
    static const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
    test_case c;
    case_load(&c, "golden", "article_single_f64");
    f->q = tensor_copy(case_tensor(&c, "q"), dtype);
    f->k = tensor_copy(case_tensor(&c, "k"), dtype);
    f->v = tensor_copy(case_tensor(&c, "v"), dtype);
    case_free(&c);
    f->out = tensor_make(dtype, 1, 1, 5, 4);
    f->w = tensor_make(dtype, 1, 1, 5, 5);
    f->p = init;
    f->p.weights = &f->w.view;
}

static void five_run(five *f)
{
    check(attn_sdpa(NULL, &f->p, &f->q.view, &f->k.view, &f->v.view,
                    &f->out.view));
}

static void five_free(five *f)
{
    tensor_free(&f->q);
    tensor_free(&f->k);
    tensor_free(&f->v);
    tensor_free(&f->out);
    tensor_free(&f->w);
}

static void test_weights__rows_sum_to_one(void **state)
{
    (void)state;
    for (size_t t = 0; t < COUNT(types); t++) {
        five f;
        double deviation = -1.0;
        int64_t empty = -1;
        five_make(&f, types[t]);
        five_run(&f);
        check(attn_weights_check(&f.w.view, &deviation, &empty));
        five_free(&f);
        assert_int_equal(empty, 0);
        /* 1.1e-16 where this was first done; here a few steps at most. */
        assert_true(deviation >= 0.0 && deviation <= 4.0 * epsilon(types[t]));
    }
}

static void test_causal__hides_the_upper_triangle_exactly(void **state)
{
    (void)state;
    for (size_t t = 0; t < COUNT(types); t++) {
        five f;
        five_make(&f, types[t]);
        f.p.causal = 1;
        five_run(&f);
        for (int64_t i = 0; i < 5; i++) {
            int64_t above_zero = 0;
            for (int64_t j = 0; j < 5; j++) {
                const long double w = ref_get(&f.w.view, 0, 0, i, j);
                above_zero += w > 0.0L;
                if (j > i)
                    assert_true(w == 0.0L);
            }
            assert_int_equal(above_zero, i + 1); /* row 2 has 3 */
        }
        five_free(&f);
    }
}

/* The silent trap: the same bytes mean the opposite to two functions of one
 * framework. Here the polarity is part of the mask. */
static void test_mask__polarity_is_named(void **state)
{
    (void)state;
    unsigned char lower[25], upper[25];
    for (int n = 0; n < 25; n++) {
        lower[n] = n % 5 <= n / 5;
        upper[n] = !lower[n];
    }
    for (size_t t = 0; t < COUNT(types); t++) {
        const struct {
            int32_t kind;
            const unsigned char *data;
        } runs[] = {{ATTN_MASK_KEEP, lower},
                    {ATTN_MASK_DROP, upper},
                    {ATTN_MASK_DROP, lower}};
        five f[3];
        attn_mask mask;
        for (int n = 0; n < 3; n++) {
            five_make(&f[n], types[t]);
            check(attn_mask_init(&mask, runs[n].kind, ATTN_U8, runs[n].data, 1,
                                 1, 5, 5));
            f[n].p.masks = &mask;
            f[n].p.num_masks = 1;
            five_run(&f[n]);
        }
        assert_true(
            compare_bits("keep and drop", "", &f[0].out.view, &f[1].out.view));
        /* Taken the wrong way round it is far off, and no error shows it. */
        assert_true(compare_distance(&f[0].out.view, &f[2].out.view) > 0.5);
        for (int n = 0; n < 3; n++)
            five_free(&f[n]);
    }
}

/* In the other library these two together are an error. */
static void test_causal__combines_with_a_mask(void **state)
{
    (void)state;
    unsigned char odd[25], both[25];
    for (int n = 0; n < 25; n++) {
        odd[n] = (n % 5 + n / 5) % 2 == 0;
        both[n] = odd[n] && n % 5 <= n / 5;
    }
    for (size_t t = 0; t < COUNT(types); t++) {
        five f[2];
        attn_mask mask[2];
        ref_result want;
        for (int n = 0; n < 2; n++) {
            five_make(&f[n], types[t]);
            check(attn_mask_init(&mask[n], ATTN_MASK_KEEP, ATTN_U8,
                                 n ? both : odd, 1, 1, 5, 5));
            f[n].p.masks = &mask[n];
            f[n].p.num_masks = 1;
            f[n].p.causal = n == 0;
            five_run(&f[n]);
        }
        ref_sdpa(&want, &f[1].p, &f[1].q.view, &f[1].k.view, &f[1].v.view);
        for (int n = 0; n < 2; n++) {
            assert_int_equal(compare_tensor("out", "causal and a mask",
                                            &f[n].out.view, &want.out, 1.0),
                             0);
            assert_int_equal(compare_tensor("weights", "causal and a mask",
                                            &f[n].w.view, &want.weights, 1.0),
                             0);
            five_free(&f[n]);
        }
        ref_free(&want);
    }
}

/* float32 is why a comparison shows 1e-7 and not 1e-16. */
static void test_types__float32_is_near_float64(void **state)
{
    (void)state;
    five f[2];
    for (int n = 0; n < 2; n++) {
        five_make(&f[n], types[n]);
        five_run(&f[n]);
    }
    const double d = compare_distance(&f[0].out.view, &f[1].out.view);
    assert_true(d > 1e-9 && d < 1e-6);
    five_free(&f[0]);
    five_free(&f[1]);
}

/* -1e9 is no -inf: where nothing is left to see, the row becomes the mean of
 * what it must not see. With -inf it is zero. */
static void test_mask__minus_1e9_is_not_minus_infinity(void **state)
{
    (void)state;
    for (size_t t = 0; t < COUNT(types); t++) {
        const double hidden[] = {-1e9, -HUGE_VAL};
        for (int n = 0; n < 2; n++) {
            five f;
            five_make(&f, types[t]);
            tensor add = tensor_make(types[t], 1, 1, 5, 5);
            tensor_fill(&add.view, hidden[n]);
            const attn_mask mask = {.kind = ATTN_MASK_ADD, .view = add.view};
            f.p.masks = &mask;
            f.p.num_masks = 1;
            five_run(&f);
            for (int64_t j = 0; j < 25; j++) {
                const long double w = ref_get(&f.w.view, 0, 0, j / 5, j % 5);
                assert_true(n == 0 ? w > 0.0L : w == 0.0L);
            }
            tensor_free(&add);
            five_free(&f);
        }
    }
}

/* ------------------------------------------------------------ Failures -- */

/* Does the sentence hold all of these words? */
static void assert_sentence(const char *const *words, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strstr(attn_last_error(), words[i]))
            fail_msg("\"%s\" does not say \"%s\"", attn_last_error(), words[i]);
}

static void test_error__k_stored_the_wrong_way_round(void **state)
{
    (void)state;
    static const char *const words[] = {"attn_sdpa: ", "k", "q",
                                        "width",       "5", "4"};
    five f;
    five_make(&f, ATTN_F64);
    tensor turned = tensor_make(ATTN_F64, 1, 1, 4, 5);
    tensor_fill(&turned.view, 1.0);
    assert_int_equal(
        attn_sdpa(NULL, &f.p, &f.q.view, &turned.view, &f.v.view, &f.out.view),
        ATTN_ERR_SHAPE);
    assert_sentence(words, COUNT(words));
    /* Nothing was written. */
    for (int64_t n = 0; n < 20; n++)
        assert_true(tensor_is_pattern(&f.out.view, 0, 0, n / 4, n % 4));
    tensor_free(&turned);
    five_free(&f);
}

static void test_error__matrix_does_not_fit_its_input(void **state)
{
    (void)state;
    static const char *const words[] = {"attn_linear: ", "w", "x", "5", "4"};
    tensor x = tensor_make(ATTN_F64, 1, 1, 5, 4);
    tensor w = tensor_make(ATTN_F64, 1, 1, 5, 4);
    tensor y = tensor_make(ATTN_F64, 1, 1, 5, 4);
    tensor_fill(&x.view, 1.0);
    tensor_fill(&w.view, 1.0);
    assert_int_equal(
        attn_linear(NULL, ATTN_WEIGHT_IN_OUT, &x.view, &w.view, NULL, &y.view),
        ATTN_ERR_SHAPE);
    assert_sentence(words, COUNT(words));
    tensor_free(&x);
    tensor_free(&w);
    tensor_free(&y);
}

/* exp(-1802) is 0 and exp(1802) overflows; with the maximum subtracted first
 * neither matters. */
static void test_scores__far_from_zero_are_finite(void **state)
{
    (void)state;
    const double centres[] = {-1802.0, 1802.0};
    for (size_t t = 0; t < COUNT(types); t++)
        for (int n = 0; n < 2; n++) {
            ref_result want;
            double deviation;
            five f;
            five_make(&f, types[t]);
            for (int64_t j = 0; j < 5; j++)
                for (int64_t d = 0; d < 4; d++) {
                    tensor_set(&f.q.view, 0, 0, j, d, d == 0 ? 1.0 : 0.0);
                    tensor_set(&f.k.view, 0, 0, j, d,
                               centres[n] + (double)(j % 3));
                }
            f.p.flags = ATTN_SDPA_SCALE;
            f.p.scale = 1.0;
            five_run(&f);
            ref_sdpa(&want, &f.p, &f.q.view, &f.k.view, &f.v.view);
            assert_int_equal(compare_tensor("out", "scores of 1802",
                                            &f.out.view, &want.out, 1.0),
                             0);
            check(attn_weights_check(&f.w.view, &deviation, NULL));
            assert_true(deviation <= 4.0 * epsilon(types[t]));
            ref_free(&want);
            five_free(&f);
        }
}

/*
 * The same for scores of 10^10 and more, where one unit in the last place is
 * thousands: the largest still has weight 1, and nothing is NaN. The products
 * with log2(e) were once rounded before the maximum was taken off, which left
 * a rounding error of that size in an exponent. 1 query goes by rows.
 */
static void test_scores__of_any_size_are_finite(void **state)
{
    (void)state;
    for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_F64; dtype++)
        for (int n = 0; n < 8; n++) {
            const double largest[] = {1e10, 1e20, 1e30,
                                      dtype == ATTN_F32 ? 3e37 : 3e307};
            const int64_t queries = n < 4 ? 1 : 40;
            tensor q = tensor_make(dtype, 1, 1, queries, 1);
            tensor k = tensor_make(dtype, 1, 1, 30, 1);
            tensor v = tensor_make(dtype, 1, 1, 30, 1);
            tensor out = tensor_make(dtype, 1, 1, queries, 1);
            for (int64_t i = 0; i < queries; i++)
                tensor_set(&q.view, 0, 0, i, 0, i % 2 ? -1.0 : 1.0);
            for (int64_t j = 0; j < 30; j++) {
                tensor_set(&k.view, 0, 0, j, 0,
                           largest[n % 4] * (((double)j - 14.5) / 14.5));
                tensor_set(&v.view, 0, 0, j, 0, (double)j);
            }
            attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
            p.flags = ATTN_SDPA_SCALE;
            p.scale = 0.7;
            assert_int_equal(
                attn_sdpa(NULL, &p, &q.view, &k.view, &v.view, &out.view),
                ATTN_OK);
            for (int64_t i = 0; i < queries; i++)
                assert_true(fabs((double)ref_get(&out.view, 0, 0, i, 0) -
                                 (i % 2 ? 0.0 : 29.0)) <= 1e-6);
            tensor_free(&q);
            tensor_free(&k);
            tensor_free(&v);
            tensor_free(&out);
        }
}

/*
 * Any finite scale, says attn.h: also one that is beyond a float, or that is
 * when log2(e) is taken in. Queries and keys are so small that scores are not.
 * 1 query goes by rows, 40 by tiles.
 */
static void test_scale__may_be_beyond_the_type(void **state)
{
    (void)state;
    static const double scales[] = {3e38, -1e40, 1e300, 1.7e308};
    for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_F64; dtype++)
        for (int n = 0; n < 8; n++) {
            const double scale = scales[n % 4];
            const double x = 1.0 / fabs(scale); /* in float perhaps 0 */
            tensor q = tensor_make(dtype, 1, 1, n < 4 ? 1 : 40, 1);
            tensor k = tensor_make(dtype, 1, 1, 30, 1);
            tensor v = tensor_make(dtype, 1, 1, 30, 1);
            tensor out = tensor_make(dtype, 1, 1, n < 4 ? 1 : 40, 1);
            /* Scores of 0, and one of 1 or -1 in every second row. */
            for (int64_t i = 0; i < q.view.shape[2]; i++)
                tensor_set(&q.view, 0, 0, i, 0, i % 2 ? 0.0 : x);
            for (int64_t j = 0; j < 30; j++) {
                tensor_set(&k.view, 0, 0, j, 0, j == 0 ? 1.0 : 0.0);
                tensor_set(&v.view, 0, 0, j, 0, (double)(j != 0));
            }
            attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
            p.flags = ATTN_SDPA_SCALE;
            p.scale = scale;
            assert_int_equal(
                attn_sdpa(NULL, &p, &q.view, &k.view, &v.view, &out.view),
                ATTN_OK);
            for (int64_t i = 0; i < q.view.shape[2]; i++) {
                const double z = (double)ref_get(&q.view, 0, 0, i, 0) * scale;
                const double want = 29.0 / (29.0 + exp(z));
                const double got = (double)ref_get(&out.view, 0, 0, i, 0);
                assert_true(fabs(got - want) <= 1e-6);
            }
            tensor_free(&q);
            tensor_free(&k);
            tensor_free(&v);
            tensor_free(&out);
        }
}

/* c tanh(inf / c) is c: an infinite score is a finite one under a cap, however
 * small or large. Caps that were 0 in float, and those that left scores as they
 * are, made the row NaN. */
static void test_softcap__bounds_infinite_scores(void **state)
{
    (void)state;
    static const double caps[] = {1e-320, 1e-300, 1e-45, 1e-40, 1e-30,
                                  1e-10,  1e4,    2e30,  4e37};
    static const double keys[] = {1.0, -1.0, 1.0, 0.0}; /* times infinity */
    for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_F64; dtype++)
        for (size_t n = 0; n < 4 * COUNT(caps); n++) {
            const int64_t queries = n % 2 ? 40 : 1;
            const double cap = caps[n / 4];
            tensor q = tensor_make(dtype, 1, 1, queries, 1);
            tensor k = tensor_make(dtype, 1, 1, 4, 1);
            tensor v = tensor_make(dtype, 1, 1, 4, 1);
            tensor out = tensor_make(dtype, 1, 1, queries, 1);
            tensor capped = tensor_make(dtype, 1, 1, queries, 4);
            tensor_fill(&q.view, 1.0);
            for (int64_t j = 0; j < 4; j++) {
                const double x = keys[j] != 0.0 ? keys[j] * HUGE_VAL : 0.0;
                tensor_set(&k.view, 0, 0, j, 0, x);
                tensor_set(&v.view, 0, 0, j, 0, (double)(j * j));
            }
            attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
            p.softcap = cap;
            if (n / 2 % 2)
                p.scores_capped = &capped.view;
            check(attn_sdpa(NULL, &p, &q.view, &k.view, &v.view, &out.view));
            for (int64_t i = 0; i < queries; i++) {
                const double got = (double)ref_get(&out.view, 0, 0, i, 0);
                assert_true(fabs(got - (cap < 1.0 ? 3.5 : 2.0)) <= 1e-6);
                for (int64_t j = 0; p.scores_capped && j < 4; j++) {
                    const double z = (double)ref_get(&capped.view, 0, 0, i, j);
                    assert_true(fabs(z - keys[j] * cap) <=
                                1e-6 * cap + 0x1p-149);
                }
            }
            tensor_free(&q);
            tensor_free(&k);
            tensor_free(&v);
            tensor_free(&out);
            tensor_free(&capped);
        }
}

/* Softmax over the queries instead of the keys: nothing fails, but the row
 * sums tell. */
static void test_softmax__wrong_axis_is_caught(void **state)
{
    (void)state;
    for (size_t t = 0; t < COUNT(types); t++) {
        double right, wrong;
        five f;
        five_make(&f, types[t]);
        tensor s = tensor_make(types[t], 1, 1, 5, 5);
        check(attn_linear(NULL, ATTN_WEIGHT_OUT_IN, &f.q.view, &f.k.view, NULL,
                          &s.view));
        check(attn_softmax(&s.view, &f.w.view, NULL));
        check(attn_weights_check(&f.w.view, &right, NULL));
        attn_tensor x = s.view, y = f.w.view;
        x.stride[2] = y.stride[2] = 1;
        x.stride[3] = y.stride[3] = 5;
        check(attn_softmax(&x, &y, NULL));
        check(attn_weights_check(&f.w.view, &wrong, NULL));
        assert_true(right <= 4.0 * epsilon(types[t]));
        assert_true(wrong > 0.1);
        tensor_free(&s);
        five_free(&f);
    }
}

/* --------------------------------------------------------------- Sizes -- */

/* T = 128, width 64: whole-matrix products against one key after the other
 * agreed to 4.0e-15. */
static void test_sdpa__128_tokens_agree_with_plain_loops(void **state)
{
    (void)state;
    rng r = rng_make(128, 64);
    tensor x[3], out = tensor_make(ATTN_F64, 1, 1, 128, 64);
    ref_result want;
    for (int n = 0; n < 3; n++) {
        x[n] = tensor_make(ATTN_F64, 1, 1, 128, 64);
        tensor_normal(&x[n].view, &r, 1.0);
    }
    check(attn_sdpa(NULL, NULL, &x[0].view, &x[1].view, &x[2].view, &out.view));
    ref_sdpa(&want, NULL, &x[0].view, &x[1].view, &x[2].view);
    for (int64_t n = 0; n < 128 * 64; n++)
        assert_true(fabsl((long double)((double *)out.view.data)[n] -
                          want.out.num[n].value) <= 4.0e-15L);
    ref_free(&want);
    tensor_free(&out);
    for (int n = 0; n < 3; n++)
        tensor_free(&x[n]);
}

/* The width of a head need not be E/H: here 4 heads of 3 for E = 16, and
 * values of 5. Shapes: out (5,16), weights (4,5,5). */
static void test_mha__head_width_is_free(void **state)
{
    (void)state;
    rng r = rng_make(5, 16);
    tensor x = tensor_make(ATTN_F64, 1, 1, 5, 16);
    tensor w_qk = tensor_make(ATTN_F64, 1, 1, 16, 12);
    tensor w_v = tensor_make(ATTN_F64, 1, 1, 16, 20);
    tensor w_o = tensor_make(ATTN_F64, 1, 1, 20, 16);
    tensor out = tensor_make(ATTN_F64, 1, 1, 5, 16);
    tensor w = tensor_make(ATTN_F64, 1, 4, 5, 5);
    tensor *const all[] = {&x, &w_qk, &w_v, &w_o, &out, &w};
    for (size_t n = 0; n < 4; n++)
        tensor_normal(&all[n]->view, &r, 0.25);
    attn_sdpa_params a = ATTN_SDPA_PARAMS_INIT;
    attn_mha_params p = ATTN_MHA_PARAMS_INIT;
    ref_result want;
    a.weights = &w.view;
    p.weight_layout = ATTN_WEIGHT_IN_OUT;
    p.num_heads = 4;
    p.w_q = p.w_k = &w_qk.view;
    p.w_v = &w_v.view;
    p.w_o = &w_o.view;
    p.attention = &a;
    check(attn_mha(NULL, &p, &x.view, NULL, NULL, &out.view));
    ref_mha(&want, &p, &x.view, NULL, NULL);
    assert_int_equal(compare_tensor("out", "", &out.view, &want.out, 1.0), 0);
    assert_int_equal(compare_tensor("weights", "", &w.view, &want.weights, 1.0),
                     0);
    ref_free(&want);
    for (size_t n = 0; n < COUNT(all); n++)
        tensor_free(all[n]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scale__table_of_widths),
        cmocka_unit_test(test_weights__rows_sum_to_one),
        cmocka_unit_test(test_causal__hides_the_upper_triangle_exactly),
        cmocka_unit_test(test_mask__polarity_is_named),
        cmocka_unit_test(test_causal__combines_with_a_mask),
        cmocka_unit_test(test_types__float32_is_near_float64),
        cmocka_unit_test(test_mask__minus_1e9_is_not_minus_infinity),
        cmocka_unit_test(test_error__k_stored_the_wrong_way_round),
        cmocka_unit_test(test_error__matrix_does_not_fit_its_input),
        cmocka_unit_test(test_scores__far_from_zero_are_finite),
        cmocka_unit_test(test_scores__of_any_size_are_finite),
        cmocka_unit_test(test_scale__may_be_beyond_the_type),
        cmocka_unit_test(test_softcap__bounds_infinite_scores),
        cmocka_unit_test(test_softmax__wrong_axis_is_caught),
        cmocka_unit_test(test_sdpa__128_tokens_agree_with_plain_loops),
        cmocka_unit_test(test_mha__head_width_is_free)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
