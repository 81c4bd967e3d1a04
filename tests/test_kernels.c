/*
 * test_kernels.c - the hot loops of src/kernels one by one, at the level that
 * ATTN_CPU_LEVEL leaves. The only test that looks inside the library, as some
 * of what they do (numbers at the ends of their range, 16-bit rows at any
 * address) is seen through no call, or through rounding only.
 */
#include "kit.h"

#include "kernels/kernels.h"

#include <fenv.h>
#include <float.h>
#include <math.h>
#include <string.h>

/* -------------------------------------------------------------- 16 bits -- */

static double value_of_16(uint16_t x, int storage)
{
    const int fraction_bits = storage == ATTN__STORED_F16 ? 10 : 7;
    const int exponents = storage == ATTN__STORED_F16 ? 31 : 255;
    const int fraction = x & ((1 << fraction_bits) - 1);
    const int exponent = (x & 0x7fff) >> fraction_bits;
    double value =
        ldexp(fraction + (exponent ? 1 << fraction_bits : 0),
              (exponent ? exponent : 1) - exponents / 2 - fraction_bits);
    if (exponent == exponents)
        value = fraction ? (double)NAN : HUGE_VAL;
    return x & 0x8000 ? -value : value;
}

static float get_16(const unsigned char *at, int storage)
{
    uint16_t x;
    memcpy(&x, at, sizeof x);
    return (float)value_of_16(x, storage);
}

/* x in [-1, 1], towards 0. */
static void put_16(unsigned char *at, int storage, float x)
{
    uint16_t low = 0, high = storage == ATTN__STORED_F16 ? 0x3c00 : 0x3f80;
    while (high - low > 1) {
        const uint16_t middle = (uint16_t)((low + high) / 2);
        if (value_of_16(middle, storage) <= (double)fabsf(x))
            low = middle;
        else
            high = middle;
    }
    if (x < 0)
        low |= 0x8000;
    memcpy(at, &low, sizeof low);
}

static void test_widen__is_exact_for_all_65536_numbers(void **state)
{
    (void)state;
    static uint16_t from[65536 + 1];
    static float to[65536];
    for (int storage = ATTN__STORED_F16; storage <= ATTN__STORED_BF16;
         storage++)
        for (int odd = 0; odd < 2; odd++) {
            for (int a = 0; a < 65536; a++)
                from[odd + a] = (uint16_t)a;
            attn__kernels_get_f32()->widen[storage](from + odd, to, 65536);
            /* And one by one, as what does not fill a vector goes. */
            for (int a = 0; a < 65536; a++) {
                const double want = value_of_16((uint16_t)a, storage);
                float one;
                attn__kernels_get_f32()->widen[storage](from + odd + a, &one,
                                                        1);
                if (isnan(want)) {
                    assert_true(isnan(to[a]) && isnan(one));
                    continue;
                }
                assert_true((double)to[a] == want && (double)one == want);
                assert_true(!signbit(to[a]) == !signbit(want));
                assert_true(!signbit(one) == !signbit(want));
            }
        }
}

/* ------------------------------------------------------------ Both types -- */

#define smallest_normal_f32 FLT_MIN
#define smallest_normal_f64 DBL_MIN
#define smallest_f32 0x1p-149f
#define smallest_f64 0x1p-1074

#define R float
#define N(name) name##_f32
#define EPSILON FLT_EPSILON
#define R_LARGEST FLT_MAX
#define LANES ATTN__LANES_F32
#define STORAGES 3
#include "test_kernels_tmpl.h"

#define R double
#define N(name) name##_f64
#define EPSILON DBL_EPSILON
#define R_LARGEST DBL_MAX
#define LANES ATTN__LANES_F64
#define STORAGES 1
#include "test_kernels_tmpl.h"

#define BOTH(name) cmocka_unit_test(name##_f32), cmocka_unit_test(name##_f64)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_widen__is_exact_for_all_65536_numbers),
        BOTH(test_cap__is_the_formula_within_4_units),
        BOTH(test_cap__keeps_signs_and_the_ends),
        BOTH(test_alibi__is_the_formula_for_tiles_and_rows),
        BOTH(test_alibi__keeps_finite_scores_finite),
        BOTH(test_alibi__keeps_the_largest_finite_in_all_roundings),
        BOTH(test_softmax__counts_moments_and_changes_nothing),
        BOTH(test_row_weights__counts_moments_and_changes_nothing),
        BOTH(test_gradient__is_the_formula_and_0_where_hidden),
        BOTH(test_gradient__at_the_ends),
        BOTH(test_dot__is_exact_in_double),
        BOTH(test_rows__are_the_formula_for_every_storage),
    };
    kit_seed(20);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
