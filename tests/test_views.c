/*
 * test_views.c - attn_view_*: every element is found where the layout says,
 * and sizes that cannot be counted are refused with the view untouched.
 */
#include "kit.h"

#include <string.h>

#define BIG (INT64_C(1) << 62)

/* Sizes with different values, and the corner cases 1 and 0. */
static const int64_t sizes[][4] = {
    /* batch, heads, len, width */
    {2, 3, 5, 7}, {1, 1, 1, 1}, {3, 1, 4, 2}, {2, 4, 1, 1},
    {0, 3, 5, 7}, {2, 0, 5, 7}, {2, 3, 0, 7}, {2, 3, 5, 0},
};

static double memory[2 * 3 * 5 * 7 * 3 + 100];

static void number_memory(void)
{
    for (size_t n = 0; n < COUNT(memory); n++)
        memory[n] = (double)n;
}

/* The element (b,h,t,d) of view must be memory[place]. */
static void expect_at(const attn_tensor *view, int64_t b, int64_t h, int64_t t,
                      int64_t d, int64_t place)
{
    const double met = kit_get(view, b, h, t, d);
    if ((int64_t)met != place)
        fail_msg("element (%d,%d,%d,%d) is at %d, not at %d", (int)b, (int)h,
                 (int)t, (int)d, (int)met, (int)place);
}

static void expect_shape(const attn_tensor *view, int64_t a, int64_t b,
                         int64_t c, int64_t d)
{
    assert_int_equal(view->shape[0], a);
    assert_int_equal(view->shape[1], b);
    assert_int_equal(view->shape[2], c);
    assert_int_equal(view->shape[3], d);
    assert_int_equal(view->dtype, ATTN_F64);
    assert_int_equal(view->reserved, 0);
}

#define EACH(B, H, T, D)                      \
    for (int64_t b = 0; b < (B); b++)         \
        for (int64_t h = 0; h < (H); h++)     \
            for (int64_t t = 0; t < (T); t++) \
                for (int64_t d = 0; d < (D); d++)

static void garbage(attn_tensor *view)
{
    memset(view, 0x5A, sizeof *view);
}

static void test_view_bhtd__elements_lie_in_order(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(sizes); n++) {
        const int64_t *s = sizes[n];
        attn_tensor v;
        garbage(&v);
        assert_int_equal(
            attn_view_bhtd(&v, ATTN_F64, memory, s[0], s[1], s[2], s[3]),
            ATTN_OK);
        expect_shape(&v, s[0], s[1], s[2], s[3]);
        EACH(s[0], s[1], s[2], s[3])
        expect_at(&v, b, h, t, d, ((b * s[1] + h) * s[2] + t) * s[3] + d);
    }
}

static void test_view_bthd__head_0_is_the_first_columns(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(sizes); n++) {
        const int64_t *s = sizes[n];
        attn_tensor v;
        garbage(&v);
        assert_int_equal(
            attn_view_bthd(&v, ATTN_F64, memory, s[0], s[2], s[1], s[3]),
            ATTN_OK);
        expect_shape(&v, s[0], s[1], s[2], s[3]);
        EACH(s[0], s[1], s[2], s[3])
        expect_at(&v, b, h, t, d, ((b * s[2] + t) * s[1] + h) * s[3] + d);
    }
}

static void test_view_bt3hd__three_slots_per_token(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(sizes); n++) {
        const int64_t *s = sizes[n];
        attn_tensor v[3];
        for (int slot = 0; slot < 3; slot++)
            garbage(&v[slot]);
        assert_int_equal(attn_view_bt3hd(&v[0], &v[1], &v[2], ATTN_F64, memory,
                                         s[0], s[2], s[1], s[3]),
                         ATTN_OK);
        for (int slot = 0; slot < 3; slot++) {
            expect_shape(&v[slot], s[0], s[1], s[2], s[3]);
            EACH(s[0], s[1], s[2], s[3])
            expect_at(&v[slot], b, h, t, d,
                      (((b * s[2] + t) * 3 + slot) * s[1] + h) * s[3] + d);
        }
    }
}

static void test_view_bht3d__three_slots_per_row(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(sizes); n++) {
        const int64_t *s = sizes[n];
        attn_tensor v[3];
        for (int slot = 0; slot < 3; slot++)
            garbage(&v[slot]);
        assert_int_equal(attn_view_bht3d(&v[0], &v[1], &v[2], ATTN_F64, memory,
                                         s[0], s[1], s[2], s[3]),
                         ATTN_OK);
        for (int slot = 0; slot < 3; slot++) {
            expect_shape(&v[slot], s[0], s[1], s[2], s[3]);
            EACH(s[0], s[1], s[2], s[3])
            expect_at(&v[slot], b, h, t, d,
                      (((b * s[1] + h) * s[2] + t) * 3 + slot) * s[3] + d);
        }
    }
}

static void test_view_thd__is_one_batch(void **state)
{
    (void)state;
    attn_tensor v;
    garbage(&v);
    assert_int_equal(attn_view_thd(&v, ATTN_F64, memory, 11, 3, 4), ATTN_OK);
    expect_shape(&v, 1, 3, 11, 4);
    EACH(1, 3, 11, 4)
    expect_at(&v, b, h, t, d, (t * 3 + h) * 4 + d);
}

static void test_view_bte__is_one_head(void **state)
{
    (void)state;
    attn_tensor v;
    garbage(&v);
    assert_int_equal(attn_view_bte(&v, ATTN_F64, memory, 2, 5, 6), ATTN_OK);
    expect_shape(&v, 2, 1, 5, 6);
    EACH(2, 1, 5, 6)
    expect_at(&v, b, h, t, d, (b * 5 + t) * 6 + d);
}

static void test_view_matrix__rows_are_ld_apart(void **state)
{
    (void)state;
    attn_tensor v;
    garbage(&v);
    assert_int_equal(attn_view_matrix(&v, ATTN_F64, memory, 4, 6, 9), ATTN_OK);
    expect_shape(&v, 1, 1, 4, 6);
    EACH(1, 1, 4, 6)
    expect_at(&v, b, h, t, d, t * 9 + d);
}

static void test_view_vector__is_one_row(void **state)
{
    (void)state;
    attn_tensor v;
    garbage(&v);
    assert_int_equal(attn_view_vector(&v, ATTN_F64, memory, 13), ATTN_OK);
    expect_shape(&v, 1, 1, 1, 13);
    EACH(1, 1, 1, 13)
    expect_at(&v, b, h, t, d, d);
}

/* One call per writer, so that each refusal is tried on each of them. */
struct arguments {
    attn_tensor *v; /* v[0..2] */
    attn_dtype dtype;
    const void *data;
    int64_t a, b, c, d;
};

static attn_status call_bhtd(const struct arguments *x)
{
    return attn_view_bhtd(x->v, x->dtype, x->data, x->a, x->b, x->c, x->d);
}

static attn_status call_bthd(const struct arguments *x)
{
    return attn_view_bthd(x->v, x->dtype, x->data, x->a, x->b, x->c, x->d);
}

static attn_status call_bt3hd(const struct arguments *x)
{
    attn_tensor *v = x->v;
    return attn_view_bt3hd(v, v == NULL ? NULL : v + 1,
                           v == NULL ? NULL : v + 2, x->dtype, x->data, x->a,
                           x->b, x->c, x->d);
}

static attn_status call_bht3d(const struct arguments *x)
{
    attn_tensor *v = x->v;
    return attn_view_bht3d(v, v == NULL ? NULL : v + 1,
                           v == NULL ? NULL : v + 2, x->dtype, x->data, x->a,
                           x->b, x->c, x->d);
}

static attn_status call_thd(const struct arguments *x)
{
    return attn_view_thd(x->v, x->dtype, x->data, x->a, x->b, x->c);
}

static attn_status call_bte(const struct arguments *x)
{
    return attn_view_bte(x->v, x->dtype, x->data, x->a, x->b, x->c);
}

static attn_status call_matrix(const struct arguments *x)
{
    return attn_view_matrix(x->v, x->dtype, x->data, x->a, x->b,
                            x->b > 1 ? x->b : 1);
}

static attn_status call_vector(const struct arguments *x)
{
    return attn_view_vector(x->v, x->dtype, x->data, x->a);
}

static const struct writer {
    const char *name;
    attn_status (*call)(const struct arguments *);
    int num_sizes;
    int num_views;
    int num_slots; /* elements per counted element: 3 in packed memory */
} writers[] = {
    {"attn_view_bhtd", call_bhtd, 4, 1, 1},
    {"attn_view_bthd", call_bthd, 4, 1, 1},
    {"attn_view_bt3hd", call_bt3hd, 4, 3, 3},
    {"attn_view_bht3d", call_bht3d, 4, 3, 3},
    {"attn_view_thd", call_thd, 3, 1, 1},
    {"attn_view_bte", call_bte, 3, 1, 1},
    {"attn_view_matrix", call_matrix, 2, 1, 1},
    {"attn_view_vector", call_vector, 1, 1, 1},
};

static struct arguments ordinary(attn_tensor *v)
{
    const struct arguments x = {v, ATTN_F64, memory, 2, 3, 2, 3};
    memset(v, 0x5A, 3 * sizeof *v);
    return x;
}

static int64_t *size_of_arguments(struct arguments *x, int n)
{
    int64_t *all[] = {&x->a, &x->b, &x->c, &x->d};
    return all[n];
}

static void expect_refusal(const struct writer *w, const struct arguments *x,
                           attn_status status, const char *what)
{
    const attn_status met = w->call(x);
    if (met != status)
        fail_msg("%s, %s: status %d, not %d", w->name, what, (int)met,
                 (int)status);
    if (strstr(attn_last_error(), w->name) == NULL)
        fail_msg("%s, %s: the sentence is '%s'", w->name, what,
                 attn_last_error());
    const unsigned char *bytes = (const unsigned char *)x->v;
    for (size_t n = 0; bytes != NULL && n < 3 * sizeof *x->v; n++)
        if (bytes[n] != 0x5A)
            fail_msg("%s, %s: the view was touched", w->name, what);
}

static void test_views__null_view_is_refused(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(writers); n++) {
        attn_tensor v[3];
        struct arguments x = ordinary(v);
        x.v = NULL;
        expect_refusal(&writers[n], &x, ATTN_ERR_NULL, "view NULL");
    }
}

static void test_views__each_of_three_views_is_needed(void **state)
{
    (void)state;
    attn_tensor a;
    attn_tensor b;
    const int64_t n = 2;
    garbage(&a);
    garbage(&b);
    const attn_tensor before = a;
    assert_int_equal(
        attn_view_bt3hd(NULL, &a, &b, ATTN_F64, memory, n, n, n, n),
        ATTN_ERR_NULL);
    assert_int_equal(
        attn_view_bt3hd(&a, NULL, &b, ATTN_F64, memory, n, n, n, n),
        ATTN_ERR_NULL);
    assert_int_equal(
        attn_view_bt3hd(&a, &b, NULL, ATTN_F64, memory, n, n, n, n),
        ATTN_ERR_NULL);
    assert_int_equal(
        attn_view_bht3d(NULL, &a, &b, ATTN_F64, memory, n, n, n, n),
        ATTN_ERR_NULL);
    assert_int_equal(
        attn_view_bht3d(&a, NULL, &b, ATTN_F64, memory, n, n, n, n),
        ATTN_ERR_NULL);
    assert_int_equal(
        attn_view_bht3d(&a, &b, NULL, ATTN_F64, memory, n, n, n, n),
        ATTN_ERR_NULL);
    assert_memory_equal(&a, &before, sizeof a);
    assert_memory_equal(&b, &before, sizeof b);
}

static void test_views__null_data_needs_a_size_of_0(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(writers); n++) {
        attn_tensor v[3];
        struct arguments x = ordinary(v);
        x.data = NULL;
        expect_refusal(&writers[n], &x, ATTN_ERR_NULL, "data NULL");
        for (int size = 0; size < writers[n].num_sizes; size++) {
            x = ordinary(v);
            x.data = NULL;
            *size_of_arguments(&x, size) = 0;
            assert_int_equal(writers[n].call(&x), ATTN_OK);
        }
    }
}

static void test_views__negative_sizes_are_refused(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(writers); n++) {
        for (int size = 0; size < writers[n].num_sizes; size++) {
            attn_tensor v[3];
            struct arguments x = ordinary(v);
            *size_of_arguments(&x, size) = -1;
            expect_refusal(&writers[n], &x, ATTN_ERR_SIZE, "a size of -1");
            *size_of_arguments(&x, size) = INT64_MIN;
            expect_refusal(&writers[n], &x, ATTN_ERR_SIZE, "INT64_MIN");
        }
    }
}

static void test_views__unknown_types_are_refused(void **state)
{
    (void)state;
    static const attn_dtype unknown[] = {0, -1, 6, 1000, INT32_MIN};
    for (size_t n = 0; n < COUNT(writers); n++) {
        for (size_t k = 0; k < COUNT(unknown); k++) {
            attn_tensor v[3];
            struct arguments x = ordinary(v);
            x.dtype = unknown[k];
            expect_refusal(&writers[n], &x, ATTN_ERR_TYPE, "unknown type");
        }
    }
}

static void test_views__all_types_are_taken(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(writers); n++) {
        for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_BF16; dtype++) {
            attn_tensor v[3];
            struct arguments x = ordinary(v);
            x.dtype = dtype;
            assert_int_equal(writers[n].call(&x), ATTN_OK);
            for (int k = 0; k < writers[n].num_views; k++)
                assert_int_equal(v[k].dtype, dtype);
        }
    }
}

/* Two sizes of 2^31, 2^32 and 2^62 whose product is beyond INT64_MAX. */
static void test_views__uncountable_elements_are_refused(void **state)
{
    (void)state;
    static const int64_t pairs[][2] = {
        {INT64_C(1) << 31, INT64_C(1) << 32},
        {INT64_C(1) << 32, INT64_C(1) << 32},
        {BIG, 2},
        {BIG, BIG},
        {INT64_MAX, 2},
        {INT64_MAX, INT64_MAX},
    };
    for (size_t n = 0; n < COUNT(writers); n++) {
        const struct writer *w = &writers[n];
        for (int i = 0; i < w->num_sizes; i++) {
            for (int j = 0; j < w->num_sizes; j++) {
                for (size_t k = 0; i != j && k < COUNT(pairs); k++) {
                    attn_tensor v[3];
                    struct arguments x = ordinary(v);
                    x.a = x.b = x.c = x.d = 1;
                    *size_of_arguments(&x, i) = pairs[k][0];
                    *size_of_arguments(&x, j) = pairs[k][1];
                    expect_refusal(w, &x, ATTN_ERR_SIZE, "too many");
                }
            }
        }
    }
}

static void test_views__packed_memory_counts_its_three_slots(void **state)
{
    (void)state;
    attn_tensor v[3];
    struct arguments x = ordinary(v);
    x.a = x.b = x.d = 1;
    x.c = INT64_MAX / 3 + 1;
    expect_refusal(&writers[2], &x, ATTN_ERR_SIZE, "3 slots");
    expect_refusal(&writers[3], &x, ATTN_ERR_SIZE, "3 slots");
}

static void test_views__the_largest_countable_size_is_taken(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(writers); n++) {
        attn_tensor v[3];
        struct arguments x = ordinary(v);
        x.dtype = ATTN_U8;
        x.a = INT64_MAX / writers[n].num_slots;
        x.b = x.c = x.d = 1;
        const attn_status status = writers[n].call(&x);
        if (status != ATTN_OK)
            fail_msg("%s: %s", writers[n].name, attn_last_error());
        x.a = INT64_C(1) << 31;
        x.b = (INT64_C(1) << 31) / writers[n].num_slots;
        assert_int_equal(writers[n].call(&x), ATTN_OK);
    }
}

/* A size of 0 makes the count 0 whatever the others are. */
static void test_views__zero_times_anything_is_countable(void **state)
{
    (void)state;
    attn_tensor v;
    assert_int_equal(attn_view_vector(&v, ATTN_F32, NULL, 0), ATTN_OK);
    assert_int_equal(attn_view_bhtd(&v, ATTN_F32, NULL, 0, 4, 4, 4), ATTN_OK);
    assert_int_equal(attn_view_matrix(&v, ATTN_F32, NULL, 0, 5, 5), ATTN_OK);
    assert_int_equal(attn_view_matrix(&v, ATTN_F32, NULL, 5, 0, 1), ATTN_OK);
}

static void test_view_matrix__ld_times_rows_must_be_countable(void **state)
{
    (void)state;
    attn_tensor v;
    garbage(&v);
    const attn_tensor before = v;
    assert_int_equal(
        attn_view_matrix(&v, ATTN_F32, memory, INT64_C(1) << 32, 1, BIG),
        ATTN_ERR_SIZE);
    assert_memory_equal(&v, &before, sizeof v);
}

/* Sizes that multiply beyond 2^63, or addresses that do, are an answer and not
 * an overflow: strides of 0 let a few bytes stand for any view. */
static void test_calls__sizes_beyond_memory_are_refused(void **state)
{
    (void)state;
    static float x[4];
    attn_tensor q = {x, {1, 1, 1, INT64_C(1) << 60}, {0}, ATTN_F32, 0};
    attn_tensor v = {x, {1, 1, 1, 1}, {0}, ATTN_F32, 0};
    attn_tensor out = {x + 1, {1, 1, 1, 1}, {0}, ATTN_F32, 0};
    /* Of the width alone follows more scratch memory than can be counted. */
    assert_int_equal(attn_sdpa_check(NULL, NULL, &q, &q, &v, &out),
                     ATTN_ERR_SIZE);
    /* 128 bytes, but not from the last 64 addresses on. */
    attn_tensor last = {
        (void *)(UINTPTR_MAX - 63), {1, 1, 1, 32}, {0, 0, 0, 1}, ATTN_F32, 0};
    double deviation;
    assert_int_equal(attn_weights_check(&last, &deviation, NULL),
                     ATTN_ERR_STRIDE);
    attn_mha_params m = ATTN_MHA_PARAMS_INIT;
    attn_tensor w = {x, {1, 1, 1, 1}, {0}, ATTN_F32, 0};
    m.weight_layout = ATTN_WEIGHT_OUT_IN;
    m.num_heads = INT64_MAX / 2;
    m.w_qkv = &w;
    m.w_o = &w;
    assert_int_equal(attn_mha_check(NULL, &m, &v, NULL, NULL, &out),
                     ATTN_ERR_SIZE);
    /* Views of no tokens may be of any width. */
    attn_tensor k;
    assert_int_equal(
        attn_view_bt3hd(&q, &k, &v, ATTN_F32, x, 1, 0, 1, INT64_C(1) << 60),
        ATTN_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_view_bhtd__elements_lie_in_order),
        cmocka_unit_test(test_view_bthd__head_0_is_the_first_columns),
        cmocka_unit_test(test_view_bt3hd__three_slots_per_token),
        cmocka_unit_test(test_view_bht3d__three_slots_per_row),
        cmocka_unit_test(test_view_thd__is_one_batch),
        cmocka_unit_test(test_view_bte__is_one_head),
        cmocka_unit_test(test_view_matrix__rows_are_ld_apart),
        cmocka_unit_test(test_view_vector__is_one_row),
        cmocka_unit_test(test_views__null_view_is_refused),
        cmocka_unit_test(test_views__each_of_three_views_is_needed),
        cmocka_unit_test(test_views__null_data_needs_a_size_of_0),
        cmocka_unit_test(test_views__negative_sizes_are_refused),
        cmocka_unit_test(test_views__unknown_types_are_refused),
        cmocka_unit_test(test_views__all_types_are_taken),
        cmocka_unit_test(test_views__uncountable_elements_are_refused),
        cmocka_unit_test(test_views__packed_memory_counts_its_three_slots),
        cmocka_unit_test(test_views__the_largest_countable_size_is_taken),
        cmocka_unit_test(test_views__zero_times_anything_is_countable),
        cmocka_unit_test(test_view_matrix__ld_times_rows_must_be_countable),
        cmocka_unit_test(test_calls__sizes_beyond_memory_are_refused),
    };
    number_memory();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
