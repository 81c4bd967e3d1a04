/*
 * test_linear.c - attn_linear against the sum written out in long double.
 */
#include "kit.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define EACH(B, H, T, N)                      \
    for (int64_t b = 0; b < (B); b++)         \
        for (int64_t h = 0; h < (H); h++)     \
            for (int64_t t = 0; t < (T); t++) \
                for (int64_t n = 0; n < (N); n++)

/* A sum of `in` products and a bias, in any order of addition: off by at most
 * in + 1 half units of the sum of the magnitudes. */
static void expect_linear(const char *what, int32_t layout,
                          const attn_tensor *x, const attn_tensor *w,
                          const attn_tensor *bias, const attn_tensor *y)
{
    const double unit =
        (y->dtype == ATTN_F32 ? (double)FLT_EPSILON : DBL_EPSILON) / 2;
    const int64_t in = x->shape[3];
    EACH(y->shape[0], y->shape[1], y->shape[2], y->shape[3])
    {
        long double sum = 0.0L;
        double size = 0.0;
        for (int64_t m = 0; m < in; m++) {
            const double a = kit_get(x, b, h, t, m);
            const double c = layout == ATTN_WEIGHT_OUT_IN
                                 ? kit_get(w, 0, 0, n, m)
                                 : kit_get(w, 0, 0, m, n);
            sum += (long double)a * (long double)c;
            size += fabs(a * c);
        }
        if (bias != NULL) {
            sum += (long double)kit_get(bias, 0, 0, 0, n);
            size += fabs(kit_get(bias, 0, 0, 0, n));
        }
        const double met = kit_get(y, b, h, t, n);
        const double limit = unit * ((double)in + 2.0) * size;
        if (!(fabs(met - (double)sum) <= limit))
            fail_msg("%s, in %d, out %d: (%d,%d,%d,%d) is %.17g, not %.17g",
                     what, (int)in, (int)y->shape[3], (int)b, (int)h, (int)t,
                     (int)n, met, (double)sum);
    }
}

static attn_tensor make_weight(attn_dtype dtype, int32_t layout, int64_t out,
                               int64_t in)
{
    return layout == ATTN_WEIGHT_OUT_IN ? kit_make(dtype, 1, 1, out, in)
                                        : kit_make(dtype, 1, 1, in, out);
}

static void random_linear(uint64_t seed, int64_t largest)
{
    kit_seed(seed);
    const attn_dtype dtype = seed % 2 ? ATTN_F32 : ATTN_F64;
    const int32_t layout = (int32_t)kit_int(1, 2);
    const int64_t B = kit_int(1, 2);
    const int64_t H = kit_int(1, 2);
    const int64_t T = kit_int(1, largest);
    const int64_t in = kit_int(1, largest);
    const int64_t out = kit_int(1, largest);
    attn_tensor x = kit_make(dtype, B, H, T, in);
    attn_tensor w = make_weight(dtype, layout, out, in);
    attn_tensor bias = kit_make(dtype, 1, 1, 1, out);
    attn_tensor y = kit_make(dtype, B, H, T, out);
    const attn_tensor *use = kit_int(0, 1) == 1 ? &bias : NULL;
    kit_fill_with(&y, (double)NAN); /* what was there must not matter */
    if (attn_linear(NULL, layout, &x, &w, use, &y) != ATTN_OK)
        fail_msg("seed %d: %s", (int)seed, attn_last_error());
    expect_linear("random", layout, &x, &w, use, &y);
    kit_drop(&x);
    kit_drop(&w);
    kit_drop(&bias);
    kit_drop(&y);
}

static void test_linear__is_the_formula(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 100; seed++)
        random_linear(seed, 5);
    for (uint64_t seed = 0; seed < 40; seed++)
        random_linear(1000 + seed, 67);
}

static void test_linear__in_0_gives_the_bias(void **state)
{
    (void)state;
    for (int32_t layout = 1; layout <= 2; layout++) {
        attn_tensor x = kit_make(ATTN_F32, 2, 1, 3, 0);
        attn_tensor w = make_weight(ATTN_F32, layout, 4, 0);
        attn_tensor bias = kit_make(ATTN_F32, 1, 1, 1, 4);
        attn_tensor y = kit_make(ATTN_F32, 2, 1, 3, 4);
        assert_int_equal(attn_linear(NULL, layout, &x, &w, &bias, &y), ATTN_OK);
        expect_linear("bias", layout, &x, &w, &bias, &y);
        kit_fill_with(&y, (double)NAN);
        assert_int_equal(attn_linear(NULL, layout, &x, &w, NULL, &y), ATTN_OK);
        EACH(2, 1, 3, 4)
        assert_true(fabs(kit_get(&y, b, h, t, n)) <= 0.0);
        kit_drop(&x);
        kit_drop(&w);
        kit_drop(&bias);
        kit_drop(&y);
    }
}

static void test_linear__zero_sizes_are_fine(void **state)
{
    (void)state;
    for (int dim = 0; dim < 4; dim++) {
        attn_tensor x = kit_view(ATTN_F64, NULL, 2, 2, 2, 2);
        attn_tensor y = kit_view(ATTN_F64, NULL, 2, 2, 2, 2);
        attn_tensor w = kit_make(ATTN_F64, 1, 1, 2, 2);
        y.shape[dim] = 0;
        if (dim < 3)
            x.shape[dim] = 0;
        else
            w.shape[2] = 0;
        if (dim == 3)
            x = kit_make(ATTN_F64, 2, 2, 2, 2);
        if (attn_linear(NULL, ATTN_WEIGHT_OUT_IN, &x, &w, NULL, &y) != ATTN_OK)
            fail_msg("size %d: %s", dim, attn_last_error());
        kit_drop(&w);
        kit_drop(&x);
    }
}

/* Every operand transposed, spread out or backwards, and the bias too. */
static void test_linear__any_strides(void **state)
{
    (void)state;
    static double memory[4][4096];
    for (uint64_t seed = 0; seed < 60; seed++) {
        kit_seed(seed);
        const attn_dtype dtype = seed % 2 ? ATTN_F32 : ATTN_F64;
        const int32_t layout = (int32_t)kit_int(1, 2);
        const int64_t T = kit_int(1, 9);
        const int64_t in = kit_int(1, 9);
        const int64_t out = kit_int(1, 9);
        const bool out_in = layout == ATTN_WEIGHT_OUT_IN;
        attn_tensor t[4] = {
            kit_view(dtype, NULL, 2, 2, T, in),
            kit_view(dtype, NULL, 1, 1, out_in ? out : in, out_in ? in : out),
            kit_view(dtype, NULL, 1, 1, 1, out),
            kit_view(dtype, NULL, 2, 2, T, out)};
        for (int k = 0; k < 4; k++) {
            int64_t stride = kit_int(1, 2);
            int64_t first = 0;
            const int turn = (int)kit_int(0, 3);
            for (int n = 0; n < 4; n++) {
                const int dim = (n + turn) % 4;
                const bool back = kit_int(0, 2) == 0;
                t[k].stride[dim] = back ? -stride : stride;
                first += back ? (t[k].shape[dim] - 1) * stride : 0;
                stride *= t[k].shape[dim];
            }
            t[k].data =
                (unsigned char *)memory[k] + (size_t)first * kit_bytes(dtype);
            kit_fill(&t[k]);
        }
        if (kit_int(0, 3) == 0) /* one row of x for all */
            t[0].stride[2] = 0;
        if (attn_linear(NULL, layout, &t[0], &t[1], &t[2], &t[3]) != ATTN_OK)
            fail_msg("seed %d: %s", (int)seed, attn_last_error());
        expect_linear("strides", layout, &t[0], &t[1], &t[2], &t[3]);
    }
}

/* Both layouts of one matrix are one function of x. */
static void test_linear__layouts_agree(void **state)
{
    (void)state;
    attn_tensor x = kit_make(ATTN_F64, 1, 1, 6, 5);
    attn_tensor w = kit_make(ATTN_F64, 1, 1, 7, 5);
    attn_tensor y = kit_make(ATTN_F64, 1, 1, 6, 7);
    attn_tensor turned = w;
    turned.shape[2] = 5;
    turned.shape[3] = 7;
    turned.stride[2] = 1;
    turned.stride[3] = 5;
    assert_int_equal(
        attn_linear(NULL, ATTN_WEIGHT_IN_OUT, &x, &turned, NULL, &y), ATTN_OK);
    expect_linear("turned", ATTN_WEIGHT_OUT_IN, &x, &w, NULL, &y);
    kit_drop(&x);
    kit_drop(&w);
    kit_drop(&y);
}

/*
 * The stride of an axis of size 1 is ignored, whatever it is: once it went on
 * to the BLAS as the leading dimension of a single row, and did not fit there.
 */
static void test_linear__strides_of_single_rows_are_ignored(void **state)
{
    (void)state;
    static const int64_t strides[] = {
        0, -1, INT64_C(3000000000), -(INT64_C(1) << 40), INT64_MAX, INT64_MIN};
    for (size_t n = 0; n < sizeof strides / sizeof strides[0]; n++)
        for (int32_t layout = 1; layout <= 2; layout++) {
            attn_tensor x = kit_make(ATTN_F32, 1, 1, 1, 20);
            attn_tensor w = make_weight(ATTN_F32, layout, 33, 20);
            attn_tensor bias = kit_make(ATTN_F32, 1, 1, 1, 33);
            attn_tensor y = kit_make(ATTN_F32, 1, 1, 1, 33);
            attn_tensor *const all[] = {&x, &w, &bias, &y};
            for (int i = 0; i < 4; i++)
                for (int a = 0; a < 4; a++)
                    if (all[i]->shape[a] == 1)
                        all[i]->stride[a] = strides[n];
            kit_fill_with(&y, (double)NAN);
            assert_int_equal(attn_linear(NULL, layout, &x, &w, &bias, &y),
                             ATTN_OK);
            expect_linear("single row", layout, &x, &w, &bias, &y);
            for (int i = 0; i < 4; i++)
                kit_drop(all[i]);
        }
}

/* (B,1,1,E), as when decoding, and (1,H,1,E), adjacent or not: they are one
 * run of rows where they can be, and rows apart from each other elsewhere. */
static void test_linear__one_row_a_sequence(void **state)
{
    (void)state;
    for (int64_t apart = 0; apart <= 3; apart++)
        for (int axis = 0; axis < 2; axis++) {
            const int64_t rows[] = {axis == 0 ? 70 : 2, axis == 0 ? 1 : 35};
            const int64_t x_row = 9 + apart % 2 * 4, y_row = 5 + apart / 2 * 3;
            attn_tensor x = kit_make(ATTN_F64, rows[0], rows[1], 1, x_row);
            attn_tensor y = kit_make(ATTN_F64, rows[0], rows[1], 1, y_row);
            attn_tensor w = kit_make(ATTN_F64, 1, 1, 5, 9);
            x.shape[3] = 9;
            y.shape[3] = 5;
            assert_int_equal(
                attn_linear(NULL, ATTN_WEIGHT_OUT_IN, &x, &w, NULL, &y),
                ATTN_OK);
            expect_linear("one row", ATTN_WEIGHT_OUT_IN, &x, &w, NULL, &y);
            kit_drop(&x);
            kit_drop(&w);
            kit_drop(&y);
        }
}

/* A NaN in one row of x stays in that row of y. */
static void test_linear__nan_stays_in_its_row(void **state)
{
    (void)state;
    attn_tensor x = kit_make(ATTN_F32, 1, 1, 9, 4);
    attn_tensor w = kit_make(ATTN_F32, 1, 1, 3, 4);
    attn_tensor y = kit_make(ATTN_F32, 1, 1, 9, 3);
    kit_set(&x, 0, 0, 4, 2, (double)NAN);
    assert_int_equal(attn_linear(NULL, ATTN_WEIGHT_OUT_IN, &x, &w, NULL, &y),
                     ATTN_OK);
    EACH(1, 1, 9, 3)
    assert_int_equal(isnan(kit_get(&y, b, h, t, n)) != 0, t == 4);
    kit_drop(&x);
    kit_drop(&w);
    kit_drop(&y);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear__is_the_formula),
        cmocka_unit_test(test_linear__in_0_gives_the_bias),
        cmocka_unit_test(test_linear__zero_sizes_are_fine),
        cmocka_unit_test(test_linear__any_strides),
        cmocka_unit_test(test_linear__layouts_agree),
        cmocka_unit_test(test_linear__strides_of_single_rows_are_ignored),
        cmocka_unit_test(test_linear__one_row_a_sequence),
        cmocka_unit_test(test_linear__nan_stays_in_its_row),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
