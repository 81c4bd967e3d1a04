/* test_alibi.c - attn_alibi_slopes against the formula of attn.h. */
#include "kit.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define MOST_HEADS 129

static long double slope_of(int64_t h, int64_t heads)
{
    int64_t n = 1;
    while (2 * n <= heads)
        n *= 2;
    if (h < n)
        return exp2l(-8.0L * (long double)(h + 1) / (long double)n);
    return exp2l(-4.0L * (long double)(2 * (h - n) + 1) / (long double)n);
}

/* Half a unit for the rounding to the type, and as much for exp2. */
static void expect_slope(double met, int64_t h, int64_t heads, attn_dtype dtype)
{
    const long double want = slope_of(h, heads);
    const double unit = dtype == ATTN_F32 ? (double)FLT_EPSILON : DBL_EPSILON;
    if (!(fabsl((long double)met - want) <= (long double)unit * want))
        fail_msg("H = %d, head %d: %.17g, not %.17Lg", (int)heads, (int)h, met,
                 want);
}

static void test_alibi_slopes__are_the_formula_for_1_to_129_heads(void **state)
{
    (void)state;
    for (int64_t heads = 1; heads <= MOST_HEADS; heads++)
        for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_F64; dtype++) {
            attn_tensor s = kit_make(dtype, 1, 1, 1, heads);
            assert_int_equal(attn_alibi_slopes(&s), ATTN_OK);
            for (int64_t h = 0; h < heads; h++)
                expect_slope(kit_get(&s, 0, 0, 0, h), h, heads, dtype);
            kit_drop(&s);
        }
}

/* What the paper prints: 1/2, 1/4, ... for 8 heads; for 12 then those of 16
 * heads that stand between them. */
static void test_alibi_slopes__are_those_of_the_paper(void **state)
{
    (void)state;
    static const double between[] = {
        0.70710678118654752440, 0.35355339059327376220, 0.17677669529663688110,
        0.08838834764831844055};
    double s[12];
    attn_tensor view = kit_view(ATTN_F64, s, 1, 1, 1, 8);
    assert_int_equal(attn_alibi_slopes(&view), ATTN_OK);
    for (int h = 0; h < 8; h++) {
        const double want = ldexp(1.0, -1 - h);
        assert_memory_equal(&s[h], &want, sizeof want);
    }
    view.shape[3] = 12;
    assert_int_equal(attn_alibi_slopes(&view), ATTN_OK);
    for (int h = 0; h < 8; h++) {
        const double want = ldexp(1.0, -1 - h);
        assert_memory_equal(&s[h], &want, sizeof want);
    }
    for (int h = 0; h < 4; h++)
        assert_true(fabs(s[8 + h] - between[h]) <= DBL_EPSILON * between[h]);
}

/* Both shapes, spread out and backwards; nothing beside them is written. */
static void test_alibi_slopes__any_strides(void **state)
{
    (void)state;
    float memory[64];
    for (int i = 0; i < 64; i++)
        memory[i] = -1.0F;
    attn_tensor s = kit_view(ATTN_F32, memory + 63, 2, 7, 1, 1);
    s.stride[0] = -1;
    s.stride[1] = -5;
    assert_int_equal(attn_alibi_slopes(&s), ATTN_OK);
    for (int i = 0; i < 64; i++) {
        const int back = 63 - i;
        if (back % 5 <= 1 && back / 5 < 7)
            expect_slope((double)memory[i], back / 5, 7, ATTN_F32);
        else
            assert_true(memory[i] <= -1.0F);
    }
    s = kit_view(ATTN_F32, memory, 1, 1, 1, 5);
    s.stride[3] = 3;
    assert_int_equal(attn_alibi_slopes(&s), ATTN_OK);
    for (int64_t h = 0; h < 5; h++)
        expect_slope((double)memory[3 * h], h, 5, ATTN_F32);
}

static void test_alibi_slopes__zero_sizes_are_fine(void **state)
{
    (void)state;
    attn_tensor s = kit_view(ATTN_F64, NULL, 1, 1, 1, 0);
    assert_int_equal(attn_alibi_slopes(&s), ATTN_OK);
    s = kit_view(ATTN_F64, NULL, 0, 4, 1, 1);
    assert_int_equal(attn_alibi_slopes(&s), ATTN_OK);
    /* Nothing to write, however often. */
    s = kit_view(ATTN_F64, NULL, INT64_C(1) << 60, 0, 1, 1);
    assert_int_equal(attn_alibi_slopes(&s), ATTN_OK);
}

static void refused(attn_status want, const attn_tensor *s)
{
    const attn_status status = attn_alibi_slopes(s);
    if (status != want)
        fail_msg("%s in place of %s", attn_strerror(status),
                 attn_strerror(want));
    assert_memory_equal(attn_last_error(), "attn_alibi_slopes: ", 19);
}

static void test_alibi_slopes__bad_views_are_refused(void **state)
{
    (void)state;
    double memory[64];
    double before[64];
    memset(memory, 0x5A, sizeof memory);
    memcpy(before, memory, sizeof memory);
    const attn_tensor good = kit_view(ATTN_F64, memory, 2, 4, 1, 1);
    attn_tensor s = good;
    refused(ATTN_ERR_NULL, NULL);
    s.data = NULL;
    refused(ATTN_ERR_NULL, &s);
    s = good;
    s.shape[1] = -1;
    refused(ATTN_ERR_SIZE, &s);
    s = kit_view(ATTN_F64, memory, 1, 1, 4, 1);
    refused(ATTN_ERR_SHAPE, &s);
    s = kit_view(ATTN_F64, memory, 2, 1, 1, 4);
    refused(ATTN_ERR_SHAPE, &s);
    s = kit_view(ATTN_F64, memory, 1, 2, 1, 4);
    refused(ATTN_ERR_SHAPE, &s);
    s = good;
    s.dtype = ATTN_U8;
    refused(ATTN_ERR_TYPE, &s);
    s = good;
    s.stride[0] = 0;
    refused(ATTN_ERR_STRIDE, &s);
    s = good;
    s.data = (unsigned char *)memory + 1;
    refused(ATTN_ERR_ALIGN, &s);
    s = good;
    s.reserved = 1;
    refused(ATTN_ERR_UNSUPPORTED, &s);
    assert_memory_equal(memory, before, sizeof memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alibi_slopes__are_the_formula_for_1_to_129_heads),
        cmocka_unit_test(test_alibi_slopes__are_those_of_the_paper),
        cmocka_unit_test(test_alibi_slopes__any_strides),
        cmocka_unit_test(test_alibi_slopes__zero_sizes_are_fine),
        cmocka_unit_test(test_alibi_slopes__bad_views_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
