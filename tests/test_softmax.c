/*
 * test_softmax.c - attn_softmax and attn_weights_check against the formula in
 * long double.
 */
#include "kit.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define LONGEST 67

static double unit(attn_dtype dtype)
{
    return dtype == ATTN_F32 ? (double)FLT_EPSILON : DBL_EPSILON;
}

/*
 * exp(x - m): the subtraction is off by half a unit of |x - m|, which exp
 * turns into a relative error of |x - m| units; exp itself, the sum and the
 * division add a few more. The sum of n terms of one sign adds at most n.
 */
static double bound(attn_dtype dtype, int64_t n, double span)
{
    return unit(dtype) * (8.0 + (double)n / 4.0 + span);
}

/* The formula, for one row of n numbers; returns its LSE. */
static long double row_softmax(const double *x, long double *y, int64_t n)
{
    double max = -(double)INFINITY;
    long double sum = 0.0L;
    for (int64_t j = 0; j < n; j++)
        max = x[j] > max ? x[j] : max;
    if (isinf(max) && max < 0.0) {
        for (int64_t j = 0; j < n; j++)
            y[j] = 0.0L;
        return (long double)max;
    }
    for (int64_t j = 0; j < n; j++)
        sum += y[j] = expl((long double)x[j] - (long double)max);
    for (int64_t j = 0; j < n; j++)
        y[j] /= sum;
    return (long double)max + logl(sum);
}

/* Every row of y and lse must be what the formula makes of x. */
static void expect_softmax(const attn_tensor *x, const attn_tensor *y,
                           const attn_tensor *lse)
{
    const int64_t n = x->shape[3];
    for (int64_t a = 0; a < x->shape[0]; a++)
        for (int64_t b = 0; b < x->shape[1]; b++)
            for (int64_t c = 0; c < x->shape[2]; c++) {
                double row[LONGEST];
                long double want[LONGEST];
                double low = 0.0;
                double high = 0.0;
                for (int64_t j = 0; j < n; j++) {
                    row[j] = kit_get(x, a, b, c, j);
                    low = fmin(low, row[j]);
                    high = fmax(high, row[j]);
                }
                const long double want_lse = row_softmax(row, want, n);
                const double limit = bound(x->dtype, n, high - low);
                for (int64_t j = 0; j < n; j++) {
                    const double met = kit_get(y, a, b, c, j);
                    const double off = fabs(met - (double)want[j]);
                    /* Below: what a subnormal result may lose. */
                    const double tiny =
                        x->dtype == ATTN_F32 ? (double)FLT_MIN : DBL_MIN;
                    if (!(off <= limit * (double)want[j] + tiny))
                        fail_msg("row (%d,%d,%d) of %d, %d: %.17g, not %.17g",
                                 (int)a, (int)b, (int)c, (int)n, (int)j, met,
                                 (double)want[j]);
                }
                if (lse == NULL)
                    continue;
                /* As a double: valgrind knows no infinite long double. */
                const double end = (double)want_lse;
                const double met = kit_get(lse, a, b, c, 0);
                const double size = 1.0 + fabs(end);
                if (isinf(end) ? !(isinf(met) && met < 0.0)
                               : !(fabs(met - end) <= limit * size))
                    fail_msg("lse (%d,%d,%d) of %d: %.17g, not %.17g", (int)a,
                             (int)b, (int)c, (int)n, met, end);
            }
}

static void all_sizes(attn_dtype dtype, double magnitude)
{
    kit_seed(11);
    for (int64_t n = 0; n <= LONGEST; n++) {
        attn_tensor x = kit_make(dtype, 2, 2, 3, n);
        attn_tensor y = kit_make(dtype, 2, 2, 3, n);
        attn_tensor lse = kit_make(dtype, 2, 2, 3, 1);
        for (int64_t j = 0; j < kit_elements(&x); j++) {
            attn_tensor flat = kit_view(dtype, x.data, 1, 1, 1, j + 1);
            kit_set(&flat, 0, 0, 0, j, kit_real() * magnitude);
        }
        assert_int_equal(attn_softmax(&x, &y, &lse), ATTN_OK);
        expect_softmax(&x, &y, &lse);
        kit_drop(&x);
        kit_drop(&y);
        kit_drop(&lse);
    }
}

static void test_softmax_f32__is_the_formula_for_every_length(void **state)
{
    (void)state;
    all_sizes(ATTN_F32, 1.0);
    all_sizes(ATTN_F32, 30.0);
}

static void test_softmax_f64__is_the_formula_for_every_length(void **state)
{
    (void)state;
    all_sizes(ATTN_F64, 1.0);
    all_sizes(ATTN_F64, 300.0);
}

/* One row of up to 8 numbers through the library. */
struct row {
    double y[8];
    double lse;
};

static struct row softmax_row(attn_dtype dtype, int64_t n, const double *x)
{
    struct row r = {{0}, 0};
    attn_tensor in = kit_make(dtype, 1, 1, 1, n);
    attn_tensor out = kit_make(dtype, 1, 1, 1, n);
    attn_tensor lse = kit_make(dtype, 1, 1, 1, 1);
    for (int64_t j = 0; j < n; j++)
        kit_set(&in, 0, 0, 0, j, x[j]);
    assert_int_equal(attn_softmax(&in, &out, &lse), ATTN_OK);
    for (int64_t j = 0; j < n; j++)
        r.y[j] = kit_get(&out, 0, 0, 0, j);
    r.lse = kit_get(&lse, 0, 0, 0, 0);
    kit_drop(&in);
    kit_drop(&out);
    kit_drop(&lse);
    return r;
}

#define INF ((double)INFINITY)
#define NOT_A_NUMBER ((double)NAN)

static void is_number(double met, double want)
{
    if (memcmp(&met, &want, sizeof met) != 0)
        fail_msg("%.17g, not exactly %.17g", met, want);
}

static void minus_inf_row(attn_dtype dtype)
{
    const double x[] = {-INF, -INF, -INF, -INF, -INF};
    for (int64_t n = 1; n <= 5; n++) {
        const struct row r = softmax_row(dtype, n, x);
        for (int64_t j = 0; j < n; j++)
            is_number(r.y[j], 0.0);
        is_number(r.lse, -INF);
    }
}

static void test_softmax_f32__all_minus_inf_row_is_zero(void **state)
{
    (void)state;
    minus_inf_row(ATTN_F32);
}

static void test_softmax_f64__all_minus_inf_row_is_zero(void **state)
{
    (void)state;
    minus_inf_row(ATTN_F64);
}

static void test_softmax__a_row_of_no_elements_has_lse_minus_inf(void **state)
{
    (void)state;
    is_number(softmax_row(ATTN_F32, 0, NULL).lse, -INF);
    is_number(softmax_row(ATTN_F64, 0, NULL).lse, -INF);
}

static void test_softmax__a_minus_inf_element_is_exactly_zero(void **state)
{
    (void)state;
    const double x[] = {-INF, 2.0, -INF, 2.0};
    for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_F64; dtype++) {
        const struct row r = softmax_row(dtype, 4, x);
        is_number(r.y[0], 0.0);
        is_number(r.y[1], 0.5);
        is_number(r.y[2], 0.0);
        is_number(r.y[3], 0.5);
    }
}

static void test_softmax__nan_and_plus_inf_make_the_row_nan(void **state)
{
    (void)state;
    const double rows[][3] = {{1, NOT_A_NUMBER, 2},
                              {NOT_A_NUMBER, -INF, -INF},
                              {-INF, -INF, NOT_A_NUMBER},
                              {NOT_A_NUMBER, NOT_A_NUMBER, NOT_A_NUMBER},
                              {INF, 1, 2},
                              {-INF, INF, 0},
                              {INF, INF, INF},
                              {NOT_A_NUMBER, INF, 0}};
    for (size_t k = 0; k < COUNT(rows); k++) {
        for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_F64; dtype++) {
            const struct row r = softmax_row(dtype, 3, rows[k]);
            for (int j = 0; j < 3; j++)
                if (!isnan(r.y[j]))
                    fail_msg("row %zu, type %d: element %d is %g", k,
                             (int)dtype, j, r.y[j]);
        }
    }
}

/* A NaN spoils its own row only. */
static void test_softmax__nan_stays_in_its_row(void **state)
{
    (void)state;
    attn_tensor x = kit_make(ATTN_F32, 1, 1, 40, 5);
    attn_tensor y = kit_make(ATTN_F32, 1, 1, 40, 5);
    kit_set(&x, 0, 0, 17, 3, NOT_A_NUMBER);
    assert_int_equal(attn_softmax(&x, &y, NULL), ATTN_OK);
    for (int64_t i = 0; i < 40; i++)
        for (int64_t j = 0; j < 5; j++)
            assert_int_equal(isnan(kit_get(&y, 0, 0, i, j)) != 0, i == 17);
    kit_drop(&x);
    kit_drop(&y);
}

/* exp(-1802) underflows and exp(1802) overflows unless the maximum is
 * subtracted first; then the shift changes no bit. */
static void test_softmax__far_from_zero_is_exact(void **state)
{
    (void)state;
    const double shifts[] = {-1802, 1802, 90, -104, 1024};
    const double base[] = {0, 1, -2, 0.5, -0.25, 3};
    for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_F64; dtype++) {
        const struct row plain = softmax_row(dtype, 6, base);
        for (size_t k = 0; k < COUNT(shifts); k++) {
            double x[6];
            for (int j = 0; j < 6; j++)
                x[j] = base[j] + shifts[k];
            const struct row r = softmax_row(dtype, 6, x);
            assert_memory_equal(r.y, plain.y, sizeof r.y);
            const double off = fabs(r.lse - plain.lse - shifts[k]);
            assert_true(off <= unit(dtype) * (fabs(shifts[k]) + 4));
        }
    }
}

/* The largest finite numbers are neither hidden nor NaN. */
static void test_softmax__largest_finite_rows_are_means(void **state)
{
    (void)state;
    const double f = (double)FLT_MAX;
    const double d = DBL_MAX;
    const double low_f[] = {-f, -f, -f, -f};
    const double low_d[] = {-d, -d, -d, -d};
    const double far_f[] = {-f, f};
    const double far_d[] = {-d, d};
    const struct row rows[] = {softmax_row(ATTN_F32, 4, low_f),
                               softmax_row(ATTN_F64, 4, low_d)};
    for (int n = 0; n < 2; n++)
        for (int j = 0; j < 4; j++)
            is_number(rows[n].y[j], 0.25);
    const struct row far[] = {softmax_row(ATTN_F32, 2, far_f),
                              softmax_row(ATTN_F64, 2, far_d)};
    for (int n = 0; n < 2; n++) {
        is_number(far[n].y[0], 0.0);
        is_number(far[n].y[1], 1.0);
    }
}

static void test_softmax__one_element_is_1(void **state)
{
    (void)state;
    const double x[] = {-17.25};
    for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_F64; dtype++) {
        const struct row r = softmax_row(dtype, 1, x);
        is_number(r.y[0], 1.0);
        is_number(r.lse, -17.25);
    }
}

/* Sizes at random, all axes permuted, reversed and spread out. */
static void test_softmax__any_strides(void **state)
{
    (void)state;
    static double memory[2][40000];
    static const int orders[][4] = {
        {0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}, {2, 0, 3, 1}};
    for (uint64_t seed = 0; seed < 60; seed++) {
        kit_seed(seed);
        const attn_dtype dtype = seed % 2 ? ATTN_F32 : ATTN_F64;
        attn_tensor t[2];
        for (int side = 0; side < 2; side++) {
            const int *order = orders[kit_next() % COUNT(orders)];
            int64_t stride = kit_int(1, 2);
            int64_t first = 0;
            if (side == 0)
                t[0] = kit_view(dtype, NULL, kit_int(1, 2), kit_int(1, 3),
                                kit_int(1, 5), kit_int(1, LONGEST));
            else
                t[1] = t[0];
            for (int n = 3; n >= 0; n--) {
                const int dim = order[n];
                const bool back = kit_int(0, 1) == 1;
                t[side].stride[dim] = back ? -stride : stride;
                first += back ? (t[side].shape[dim] - 1) * stride : 0;
                stride *= t[side].shape[dim] + kit_int(0, 1);
            }
            t[side].data = (unsigned char *)memory[side] +
                           (size_t)first * kit_bytes(dtype);
        }
        kit_fill(&t[0]);
        const attn_status status = attn_softmax(&t[0], &t[1], NULL);
        if (status != ATTN_OK)
            fail_msg("seed %d: %s", (int)seed, attn_last_error());
        expect_softmax(&t[0], &t[1], NULL);
    }
}

/* Stride 0: one row seen many times. */
static void test_softmax__a_repeated_row_gives_equal_rows(void **state)
{
    (void)state;
    attn_tensor x = kit_make(ATTN_F64, 1, 1, 1, 9);
    attn_tensor y = kit_make(ATTN_F64, 2, 2, 3, 9);
    attn_tensor many = x;
    memcpy(many.shape, y.shape, sizeof many.shape);
    many.stride[0] = many.stride[1] = many.stride[2] = 0;
    assert_int_equal(attn_softmax(&many, &y, NULL), ATTN_OK);
    expect_softmax(&many, &y, NULL);
    kit_drop(&x);
    kit_drop(&y);
}

static void test_softmax__in_place_gives_the_same_bits(void **state)
{
    (void)state;
    for (int64_t n = 1; n <= LONGEST; n++) {
        const attn_dtype dtype = n % 2 ? ATTN_F32 : ATTN_F64;
        attn_tensor x = kit_make(dtype, 1, 2, 3, n);
        attn_tensor y = kit_make(dtype, 1, 2, 3, n);
        assert_int_equal(attn_softmax(&x, &y, NULL), ATTN_OK);
        assert_int_equal(attn_softmax(&x, &x, NULL), ATTN_OK);
        assert_true(kit_same(&x, &y));
        kit_drop(&x);
        kit_drop(&y);
    }
}

static void test_softmax__lse_does_not_change_the_result(void **state)
{
    (void)state;
    attn_tensor x = kit_make(ATTN_F32, 1, 2, 3, 33);
    attn_tensor y = kit_make(ATTN_F32, 1, 2, 3, 33);
    attn_tensor z = kit_make(ATTN_F32, 1, 2, 3, 33);
    attn_tensor lse = kit_make(ATTN_F32, 1, 2, 3, 1);
    assert_int_equal(attn_softmax(&x, &y, NULL), ATTN_OK);
    assert_int_equal(attn_softmax(&x, &z, &lse), ATTN_OK);
    assert_true(kit_same(&y, &z));
    kit_drop(&x);
    kit_drop(&y);
    kit_drop(&z);
    kit_drop(&lse);
}

/* ---- attn_weights_check ---- */

static void test_weights_check__softmax_rows_sum_to_1(void **state)
{
    (void)state;
    for (int64_t n = 1; n <= LONGEST; n++) {
        for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_F64; dtype++) {
            attn_tensor x = kit_make(dtype, 1, 2, 3, n);
            double deviation = -1.0;
            int64_t empty = -1;
            assert_int_equal(attn_softmax(&x, &x, NULL), ATTN_OK);
            assert_int_equal(attn_weights_check(&x, &deviation, &empty),
                             ATTN_OK);
            assert_true(deviation >= 0.0 && deviation <= 8 * unit(dtype));
            assert_int_equal(empty, 0);
            kit_drop(&x);
        }
    }
}

static void test_weights_check__the_largest_deviation_is_found(void **state)
{
    (void)state;
    attn_tensor w = kit_make(ATTN_F64, 2, 2, 3, 4);
    double deviation = -1.0;
    kit_fill_with(&w, 0.25);
    kit_set(&w, 1, 0, 2, 3, 0.5);
    kit_set(&w, 0, 1, 0, 0, -0.5);
    assert_int_equal(attn_weights_check(&w, &deviation, NULL), ATTN_OK);
    is_number(deviation, 0.75);
    kit_drop(&w);
}

static void test_weights_check__empty_rows_are_counted(void **state)
{
    (void)state;
    attn_tensor w = kit_make(ATTN_F32, 1, 2, 3, 4);
    double deviation = -1.0;
    int64_t empty = -1;
    kit_fill_with(&w, 0.25);
    for (int64_t j = 0; j < 4; j++) {
        kit_set(&w, 0, 0, 1, j, 0.0);
        kit_set(&w, 0, 1, 2, j, -0.0);
    }
    assert_int_equal(attn_weights_check(&w, &deviation, &empty), ATTN_OK);
    is_number(deviation, 0.0);
    assert_int_equal(empty, 2);
    kit_drop(&w);
}

static void test_weights_check__rows_of_no_keys_are_empty(void **state)
{
    (void)state;
    attn_tensor w = kit_make(ATTN_F32, 1, 2, 3, 0);
    double deviation = -1.0;
    int64_t empty = -1;
    assert_int_equal(attn_weights_check(&w, &deviation, &empty), ATTN_OK);
    is_number(deviation, 0.0);
    assert_int_equal(empty, 6);
    kit_drop(&w);
}

static void test_weights_check__nan_makes_the_deviation_nan(void **state)
{
    (void)state;
    for (int64_t place = 0; place < 3; place++) {
        attn_tensor w = kit_make(ATTN_F64, 1, 1, 3, 2);
        double deviation = -1.0;
        kit_fill_with(&w, 0.75);
        kit_set(&w, 0, 0, place, 1, NOT_A_NUMBER);
        assert_int_equal(attn_weights_check(&w, &deviation, NULL), ATTN_OK);
        assert_true(isnan(deviation));
        kit_drop(&w);
    }
}

static void test_weights_check__the_wrong_axis_shows(void **state)
{
    (void)state;
    attn_tensor x = kit_make(ATTN_F64, 1, 1, 5, 5);
    double deviation = 0.0;
    attn_tensor turned = x;
    turned.stride[2] = 1;
    turned.stride[3] = 5;
    assert_int_equal(attn_softmax(&turned, &turned, NULL), ATTN_OK);
    assert_int_equal(attn_weights_check(&x, &deviation, NULL), ATTN_OK);
    assert_true(deviation > 0.01);
    assert_int_equal(attn_weights_check(&turned, &deviation, NULL), ATTN_OK);
    assert_true(deviation < 1e-15);
    kit_drop(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_softmax_f32__is_the_formula_for_every_length),
        cmocka_unit_test(test_softmax_f64__is_the_formula_for_every_length),
        cmocka_unit_test(test_softmax_f32__all_minus_inf_row_is_zero),
        cmocka_unit_test(test_softmax_f64__all_minus_inf_row_is_zero),
        cmocka_unit_test(test_softmax__a_row_of_no_elements_has_lse_minus_inf),
        cmocka_unit_test(test_softmax__a_minus_inf_element_is_exactly_zero),
        cmocka_unit_test(test_softmax__nan_and_plus_inf_make_the_row_nan),
        cmocka_unit_test(test_softmax__nan_stays_in_its_row),
        cmocka_unit_test(test_softmax__far_from_zero_is_exact),
        cmocka_unit_test(test_softmax__largest_finite_rows_are_means),
        cmocka_unit_test(test_softmax__one_element_is_1),
        cmocka_unit_test(test_softmax__any_strides),
        cmocka_unit_test(test_softmax__a_repeated_row_gives_equal_rows),
        cmocka_unit_test(test_softmax__in_place_gives_the_same_bits),
        cmocka_unit_test(test_softmax__lse_does_not_change_the_result),
        cmocka_unit_test(test_weights_check__softmax_rows_sum_to_1),
        cmocka_unit_test(test_weights_check__the_largest_deviation_is_found),
        cmocka_unit_test(test_weights_check__empty_rows_are_counted),
        cmocka_unit_test(test_weights_check__rows_of_no_keys_are_empty),
        cmocka_unit_test(test_weights_check__nan_makes_the_deviation_nan),
        cmocka_unit_test(test_weights_check__the_wrong_axis_shows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
