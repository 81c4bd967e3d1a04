/* test_heads.c - attn_split_heads and attn_merge_heads move bits, exactly. */
#include "kit.h"

#include <math.h>
#include <string.h>

#define EACH(B, H, T, D)                      \
    for (int64_t b = 0; b < (B); b++)         \
        for (int64_t h = 0; h < (H); h++)     \
            for (int64_t t = 0; t < (T); t++) \
                for (int64_t d = 0; d < (D); d++)

static void test_split_heads__is_the_formula(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 100; seed++) {
        kit_seed(seed);
        const attn_dtype dtype = seed % 2 ? ATTN_F32 : ATTN_F64;
        const int64_t B = kit_int(0, 3);
        const int64_t H = kit_int(0, 5);
        const int64_t T = kit_int(0, 9);
        const int64_t D = kit_int(0, 9);
        attn_tensor src = kit_make(dtype, B, 1, T, H * D);
        attn_tensor dst = kit_make(dtype, B, H, T, D);
        const attn_status status = attn_split_heads(&src, &dst);
        if (status != ATTN_OK)
            fail_msg("seed %d: %s", (int)seed, attn_last_error());
        EACH(B, H, T, D)
        {
            const double met = kit_get(&dst, b, h, t, d);
            const double want = kit_get(&src, b, 0, t, h * D + d);
            if (memcmp(&met, &want, sizeof met) != 0)
                fail_msg("seed %d: (%d,%d,%d,%d)", (int)seed, (int)b, (int)h,
                         (int)t, (int)d);
        }
        kit_drop(&src);
        kit_drop(&dst);
    }
}

static void test_merge_heads__undoes_split(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 100; seed++) {
        kit_seed(seed);
        const attn_dtype dtype = seed % 2 ? ATTN_F32 : ATTN_F64;
        const int64_t B = kit_int(1, 3);
        const int64_t H = kit_int(1, 5);
        const int64_t T = kit_int(1, 67);
        const int64_t D = kit_int(1, 9);
        attn_tensor rows = kit_make(dtype, B, 1, T, H * D);
        attn_tensor heads = kit_make(dtype, B, H, T, D);
        attn_tensor back = kit_make(dtype, B, 1, T, H * D);
        assert_int_equal(attn_split_heads(&rows, &heads), ATTN_OK);
        assert_int_equal(attn_merge_heads(&heads, &back), ATTN_OK);
        assert_true(kit_same(&rows, &back));
        kit_drop(&rows);
        kit_drop(&heads);
        kit_drop(&back);
    }
}

/* attn_view_bthd of the rows shows the same elements without a copy. */
static void test_split_heads__equals_the_view(void **state)
{
    (void)state;
    attn_tensor rows = kit_make(ATTN_F32, 2, 1, 5, 12);
    attn_tensor heads = kit_make(ATTN_F32, 2, 3, 5, 4);
    attn_tensor view;
    assert_int_equal(attn_view_bthd(&view, ATTN_F32, rows.data, 2, 5, 3, 4),
                     ATTN_OK);
    assert_int_equal(attn_split_heads(&rows, &heads), ATTN_OK);
    assert_true(kit_same(&heads, &view));
    kit_drop(&rows);
    kit_drop(&heads);
}

/* Backwards, transposed and repeated rows. */
static void test_split_heads__any_strides(void **state)
{
    (void)state;
    attn_tensor rows = kit_make(ATTN_F64, 2, 1, 5, 12);
    attn_tensor heads = kit_make(ATTN_F64, 2, 3, 5, 4);
    attn_tensor turned = heads;
    turned.stride[3] = 2 * 3 * 5;
    turned.stride[2] = -1;
    turned.stride[1] = 5;
    turned.stride[0] = 15;
    turned.data = (double *)heads.data + 4;
    rows.stride[3] = -1;
    rows.stride[2] = 0;
    rows.data = (double *)rows.data + 11;
    assert_int_equal(attn_split_heads(&rows, &turned), ATTN_OK);
    EACH(2, 3, 5, 4)
    {
        const double met = kit_get(&turned, b, h, t, d);
        const double want = kit_get(&rows, b, 0, t, h * 4 + d);
        assert_memory_equal(&met, &want, sizeof met);
    }
    rows.data = (double *)rows.data - 11;
    kit_drop(&rows);
    kit_drop(&heads);
}

/* No arithmetic: not even a NaN's payload changes. */
static void test_heads__every_bit_pattern_survives(void **state)
{
    (void)state;
    static const uint32_t patterns[] = {0x7fa00001, 0xffc12345, 0x80000000,
                                        0x00000001, 0x7f800000, 0xff800000};
    uint32_t there[6];
    uint32_t back[6];
    attn_tensor rows;
    attn_tensor heads;
    attn_tensor result;
    attn_view_bte(&rows, ATTN_F32, patterns, 1, 1, 6);
    attn_view_bhtd(&heads, ATTN_F32, there, 1, 3, 1, 2);
    attn_view_bte(&result, ATTN_F32, back, 1, 1, 6);
    assert_int_equal(attn_split_heads(&rows, &heads), ATTN_OK);
    assert_int_equal(attn_merge_heads(&heads, &result), ATTN_OK);
    assert_memory_equal(there, patterns, sizeof there);
    assert_memory_equal(back, patterns, sizeof back);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split_heads__is_the_formula),
        cmocka_unit_test(test_merge_heads__undoes_split),
        cmocka_unit_test(test_split_heads__equals_the_view),
        cmocka_unit_test(test_split_heads__any_strides),
        cmocka_unit_test(test_heads__every_bit_pattern_survives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
