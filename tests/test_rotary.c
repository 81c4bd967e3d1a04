/*
 * test_rotary.c - attn_rotary_tables and attn_rotary against their formulas in
 * long double.
 */
#include "kit.h"

#include "compare.h"
#include "tensors.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define LARGE_BASE 10000.0

static double half_unit(attn_dtype dtype)
{
    return (dtype == ATTN_F32 ? (double)FLT_EPSILON : DBL_EPSILON) / 2;
}

/* What attn.h promises of an entry of the tables. */
static double table_error(attn_dtype dtype)
{
    return dtype == ATTN_F32 ? 0x1p-24 : 0x1p-51;
}

static void make_tables(tensor *cos_table, tensor *sin_table, attn_dtype dtype,
                        int64_t rows, int64_t width)
{
    *cos_table = tensor_make(dtype, 1, 1, rows, width / 2);
    *sin_table = tensor_make(dtype, 1, 1, rows, width / 2);
    assert_int_equal(attn_rotary_tables(0, width, LARGE_BASE, &cos_table->view,
                                        &sin_table->view),
                     ATTN_OK);
}

/* ---- Constants and structs ---- */

_Static_assert(ATTN_ROTARY_INTERLEAVED == 1, "ATTN_ROTARY_INTERLEAVED");
_Static_assert(ATTN_ROTARY_HALVES == 2, "ATTN_ROTARY_HALVES");
#if UINTPTR_MAX == UINT64_MAX
#define AT(member, place)                                           \
    _Static_assert(offsetof(attn_rotary_params, member) == (place), \
                   "attn_rotary_params." #member)
_Static_assert(sizeof(attn_rotary_params) == 40, "attn_rotary_params");
AT(struct_size, 0);
AT(style, 8);
AT(inverse, 12);
AT(offset, 16);
AT(offsets, 24);
AT(positions, 32);
#endif

static void test_rotary_params_init__macro_and_call_agree(void **state)
{
    (void)state;
    attn_rotary_params zero;
    attn_rotary_params by_call;
    const attn_rotary_params by_macro = ATTN_ROTARY_PARAMS_INIT;
    memset(&zero, 0, sizeof zero);
    zero.struct_size = sizeof zero;
    memset(&by_call, 0x5A, sizeof by_call);
    attn_rotary_params_init(&by_call);
    assert_memory_equal(&by_call, &zero, sizeof zero);
    assert_memory_equal(&by_macro, &zero, sizeof zero);
    attn_rotary_params_init(NULL);
}

/* Every shorter struct is refused, a longer one read if its tail is zero. */
static void test_rotary_params__sizes(void **state)
{
    (void)state;
    struct {
        attn_rotary_params params;
        unsigned char tail[24];
    } p;
    float x[2] = {3.0F, 4.0F};
    float y[2] = {0.0F, 0.0F};
    float c = 1.0F;
    float s = 0.0F;
    attn_tensor tx = kit_view(ATTN_F32, x, 1, 1, 1, 2);
    attn_tensor ty = kit_view(ATTN_F32, y, 1, 1, 1, 2);
    attn_tensor tc = kit_view(ATTN_F32, &c, 1, 1, 1, 1);
    attn_tensor ts = kit_view(ATTN_F32, &s, 1, 1, 1, 1);
    memset(&p, 0, sizeof p);
    p.params.style = ATTN_ROTARY_HALVES;
    for (size_t size = 0; size < sizeof p.params; size++) {
        p.params.struct_size = size;
        assert_int_equal(attn_rotary(NULL, &p.params, &tx, &tc, &ts, &ty),
                         ATTN_ERR_STRUCT);
    }
    for (size_t size = sizeof p.params; size <= sizeof p; size++) {
        p.params.struct_size = size;
        assert_int_equal(attn_rotary(NULL, &p.params, &tx, &tc, &ts, &ty),
                         ATTN_OK);
        assert_memory_equal(x, y, sizeof x);
    }
    for (size_t n = 0; n < sizeof p.tail; n++) {
        memset(y, 0, sizeof y);
        p.tail[n] = 1;
        assert_int_equal(attn_rotary(NULL, &p.params, &tx, &tc, &ts, &ty),
                         ATTN_ERR_UNSUPPORTED);
        assert_true(y[0] <= 0.0F);
        p.tail[n] = 0;
    }
}

/* ---- Tables ---- */

/* The reference's own error: a long double angle of this size is off by some
 * units of the last place. */
static void expect_entry(const char *what, double met, long double want,
                         long double angle, attn_dtype dtype, int64_t p,
                         int64_t k)
{
    const long double limit =
        (long double)table_error(dtype) + 8 * LDBL_EPSILON * fabsl(angle);
    if (!(fabsl((long double)met - want) <= limit))
        fail_msg("%s(%ld, %ld) is %.17g, not %.21Lg", what, (long)p, (long)k,
                 met, want);
}

static void test_rotary_tables__are_the_formula(void **state)
{
    (void)state;
    static const int64_t widths[] = {2, 4, 6, 10, 64, 128, 130};
    static const double bases[] = {10000.0, 1.0, 1.25, 500000.0, 1e30};
    for (size_t w = 0; w < COUNT(widths); w++)
        for (size_t n = 0; n < COUNT(bases); n++) {
            const attn_dtype dtype = (w + n) % 2 ? ATTN_F32 : ATTN_F64;
            const int64_t half = widths[w] / 2;
            rng r = rng_make(w, n);
            tensor c =
                tensor_scattered(&r, TENSOR_OUTPUT, dtype, 1, 1, 40, half);
            tensor s =
                tensor_scattered(&r, TENSOR_OUTPUT, dtype, 1, 1, 40, half);
            assert_int_equal(
                attn_rotary_tables(-3, widths[w], bases[n], &c.view, &s.view),
                ATTN_OK);
            for (int64_t p = 0; p < 40; p++)
                for (int64_t k = 0; k < half; k++) {
                    const long double angle =
                        (long double)(p - 3) *
                        powl((long double)bases[n],
                             -2.0L * (long double)k / (long double)widths[w]);
                    expect_entry("cos", kit_get(&c.view, 0, 0, p, k),
                                 cosl(angle), angle, dtype, p, k);
                    expect_entry("sin", kit_get(&s.view, 0, 0, p, k),
                                 sinl(angle), angle, dtype, p, k);
                }
            assert_true(tensor_surroundings_intact(&c));
            assert_true(tensor_surroundings_intact(&s));
            tensor_free(&c);
            tensor_free(&s);
        }
}

/*
 * Base 10^4 and width 8: the frequencies are 1, 1/10, 1/100, 1/1000. Position
 * a 10^k + b then has the angle a + b/10^k, whose sine and cosine the addition
 * theorems give without the error of a large inexact angle.
 */
static void test_rotary_tables__stay_exact_up_to_position_1000000(void **state)
{
    (void)state;
    for (int64_t first = 0; first <= 1000000; first += 99871) {
        const attn_dtype dtype = first % 2 ? ATTN_F32 : ATTN_F64;
        tensor c = tensor_make(dtype, 1, 1, 130, 4);
        tensor s = tensor_make(dtype, 1, 1, 130, 4);
        assert_int_equal(
            attn_rotary_tables(first, 8, LARGE_BASE, &c.view, &s.view),
            ATTN_OK);
        for (int64_t p = 0; p < 130; p++)
            for (int64_t k = 0, power = 1; k < 4; k++, power *= 10) {
                const long double a = (long double)((first + p) / power);
                const long double b =
                    (long double)((first + p) % power) / (long double)power;
                expect_entry("cos", kit_get(&c.view, 0, 0, p, k),
                             cosl(a) * cosl(b) - sinl(a) * sinl(b), 1.0L, dtype,
                             p, k);
                expect_entry("sin", kit_get(&s.view, 0, 0, p, k),
                             sinl(a) * cosl(b) + cosl(a) * sinl(b), 1.0L, dtype,
                             p, k);
            }
        tensor_free(&c);
        tensor_free(&s);
    }
}

/* From arithmetic with 60 digits. */
static void test_rotary_tables__far_positions_and_odd_bases(void **state)
{
    (void)state;
    static const struct {
        double base;
        int64_t width, position, k;
        long double cosine, sine;
    } cases[] = {
        {10000.0, 128, 999999, 1, -0.6602813397477821691316L,
         0.7510183435714961646983L},
        {10000.0, 128, 1000000, 7, -0.1093713069034302729295L,
         0.9940009643990470824956L},
        {10000.0, 128, 1000003, 40, -0.2707202707658752383497L,
         0.9626580571503316497803L},
        {500000.0, 64, 123456789, 3, 0.4988173657826571954558L,
         -0.8667071221546819471575L},
        {1000000.0, 256, 4000000000, 100, 0.6061880360249097567176L,
         0.7953213595649639730576L},
        {10000.0, 6, 1048576, 2, -0.9601126237430774775509L,
         -0.2796135721476762263506L},
        {10000.0, 2, 4294967296, 0, -0.8868869151978210701089L,
         -0.4619865795138346446673L},
        {1.5, 10, -1234567, 4, -0.1760288728740424052424L,
         0.9843850039058367420422L},
    };
    for (size_t n = 0; n < COUNT(cases); n++)
        for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_F64; dtype++) {
            const int64_t half = cases[n].width / 2;
            tensor c = tensor_make(dtype, 1, 1, 1, half);
            tensor s = tensor_make(dtype, 1, 1, 1, half);
            assert_int_equal(attn_rotary_tables(cases[n].position,
                                                cases[n].width, cases[n].base,
                                                &c.view, &s.view),
                             ATTN_OK);
            expect_entry("cos", kit_get(&c.view, 0, 0, 0, cases[n].k),
                         cases[n].cosine, 0.0L, dtype, cases[n].position,
                         cases[n].k);
            expect_entry("sin", kit_get(&s.view, 0, 0, 0, cases[n].k),
                         cases[n].sine, 0.0L, dtype, cases[n].position,
                         cases[n].k);
            tensor_free(&c);
            tensor_free(&s);
        }
}

static void test_rotary_tables__first_is_a_shift_of_the_rows(void **state)
{
    (void)state;
    tensor c[2];
    tensor s[2];
    make_tables(&c[0], &s[0], ATTN_F64, 60, 12);
    c[1] = tensor_make(ATTN_F64, 1, 1, 20, 6);
    s[1] = tensor_make(ATTN_F64, 1, 1, 20, 6);
    assert_int_equal(
        attn_rotary_tables(40, 12, LARGE_BASE, &c[1].view, &s[1].view),
        ATTN_OK);
    const attn_tensor c_late = tensor_slice(&c[0].view, 2, 40, 20);
    const attn_tensor s_late = tensor_slice(&s[0].view, 2, 40, 20);
    assert_true(compare_bits("cos", "first 40", &c_late, &c[1].view));
    assert_true(compare_bits("sin", "first 40", &s_late, &s[1].view));
    for (int n = 0; n < 2; n++) {
        tensor_free(&c[n]);
        tensor_free(&s[n]);
    }
}

static void test_rotary_tables__zero_sizes_are_fine(void **state)
{
    (void)state;
    attn_tensor c = kit_view(ATTN_F32, NULL, 1, 1, 0, 4);
    assert_int_equal(attn_rotary_tables(0, 8, LARGE_BASE, &c, &c), ATTN_OK);
    c = kit_view(ATTN_F32, NULL, 1, 1, 9, 0);
    assert_int_equal(attn_rotary_tables(0, 0, LARGE_BASE, &c, &c), ATTN_OK);
}

static void tables_refused(attn_status want, int64_t first, int64_t width,
                           double base, const attn_tensor *c,
                           const attn_tensor *s)
{
    static const char call[] = "attn_rotary_tables: ";
    const attn_status status = attn_rotary_tables(first, width, base, c, s);
    if (status != want)
        fail_msg("%s (%s) in place of %s", attn_strerror(status),
                 attn_last_error(), attn_strerror(want));
    assert_memory_equal(attn_last_error(), call, sizeof call - 1);
}

static void test_rotary_tables__bad_arguments_are_refused(void **state)
{
    (void)state;
    static double memory[64];
    double before[64];
    memset(memory, 0x5A, sizeof memory);
    memcpy(before, memory, sizeof memory);
    const attn_tensor c = kit_view(ATTN_F64, memory, 1, 1, 3, 4);
    const attn_tensor s = kit_view(ATTN_F64, memory + 32, 1, 1, 3, 4);
    attn_tensor bad = s;
    tables_refused(ATTN_ERR_NULL, 0, 8, LARGE_BASE, NULL, &s);
    tables_refused(ATTN_ERR_NULL, 0, 8, LARGE_BASE, &c, NULL);
    tables_refused(ATTN_ERR_VALUE, 0, 7, LARGE_BASE, &c, &s);
    tables_refused(ATTN_ERR_VALUE, 0, -8, LARGE_BASE, &c, &s);
    tables_refused(ATTN_ERR_SHAPE, 0, 10, LARGE_BASE, &c, &s);
    tables_refused(ATTN_ERR_VALUE, 0, 8, 0.5, &c, &s);
    tables_refused(ATTN_ERR_VALUE, 0, 8, -LARGE_BASE, &c, &s);
    tables_refused(ATTN_ERR_VALUE, 0, 8, (double)INFINITY, &c, &s);
    tables_refused(ATTN_ERR_VALUE, 0, 8, (double)NAN, &c, &s);
    tables_refused(ATTN_ERR_VALUE, INT64_MIN, 8, LARGE_BASE, &c, &s);
    tables_refused(ATTN_ERR_VALUE, INT64_MAX, 8, LARGE_BASE, &c, &s);
    tables_refused(ATTN_ERR_VALUE, (INT64_C(1) << 53) - 2, 8, LARGE_BASE, &c,
                   &s);
    tables_refused(ATTN_ERR_OVERLAP, 0, 8, LARGE_BASE, &c, &c);
    bad.shape[2] = 2;
    tables_refused(ATTN_ERR_SHAPE, 0, 8, LARGE_BASE, &c, &bad);
    bad = s;
    bad.shape[0] = 2;
    tables_refused(ATTN_ERR_SHAPE, 0, 8, LARGE_BASE, &bad, &c);
    bad = s;
    bad.shape[2] = -1;
    tables_refused(ATTN_ERR_SIZE, 0, 8, LARGE_BASE, &c, &bad);
    bad = s;
    bad.dtype = ATTN_F32;
    tables_refused(ATTN_ERR_TYPE, 0, 8, LARGE_BASE, &c, &bad);
    bad = s;
    bad.stride[2] = 0;
    tables_refused(ATTN_ERR_STRIDE, 0, 8, LARGE_BASE, &c, &bad);
    tables_refused(ATTN_ERR_STRIDE, 0, 8, LARGE_BASE, &bad, &c);
    bad = s;
    bad.data = (unsigned char *)memory + 257;
    tables_refused(ATTN_ERR_ALIGN, 0, 8, LARGE_BASE, &c, &bad);
    bad = s;
    bad.reserved = 1;
    tables_refused(ATTN_ERR_UNSUPPORTED, 0, 8, LARGE_BASE, &c, &bad);
    assert_memory_equal(memory, before, sizeof memory);
}

/* ---- Rotation ---- */

#define MAX_ROWS 64 /* of B*T in the random calls */

/* A random call: all that attn_rotary takes. */
struct turn {
    uint64_t seed;
    attn_dtype dtype;
    int64_t B, H, T, D, width, table_rows;
    attn_rotary_params params;
    int64_t offsets[MAX_ROWS], positions[MAX_ROWS];
    tensor x, y, c, s;
};

static int64_t position_of(const struct turn *n, int64_t b, int64_t t)
{
    if (n->params.positions)
        return n->positions[b * n->T + t];
    return (n->params.offsets ? n->offsets[b] : n->params.offset) + t;
}

static void draw_positions(struct turn *n, rng *r)
{
    const int64_t spare = n->table_rows - n->T;
    for (int64_t i = 0; i < n->B; i++)
        n->offsets[i] = rng_int(r, 0, spare);
    for (int64_t i = 0; i < n->B * n->T; i++)
        n->positions[i] = rng_int(r, 0, n->table_rows - 1);
    switch (rng_int(r, 0, 3)) {
    case 0:
        n->params.offset = rng_int(r, 0, spare);
        break;
    case 1:
        n->params.offsets = n->offsets;
        break;
    case 2:
        n->params.positions = n->positions;
        break;
    default:
        break;
    }
}

/* Tables hold any numbers here, so that a wrong index cannot hide. */
static void draw_turn(struct turn *n, uint64_t seed)
{
    const attn_rotary_params init = ATTN_ROTARY_PARAMS_INIT;
    rng r = rng_make(seed, 1);
    const int contiguous = rng_one_in(&r, 3);
    memset(n, 0, sizeof *n);
    n->seed = seed;
    n->dtype = rng_one_in(&r, 2) ? ATTN_F32 : ATTN_F64;
    n->B = rng_int(&r, 1, 3);
    n->H = rng_int(&r, 1, 3);
    n->T = rng_int(&r, 1, 9);
    n->D = rng_int(&r, 1, 67);
    n->width = 2 * rng_int(&r, 0, n->D / 2);
    n->table_rows = n->T + rng_int(&r, 0, 5);
    n->params = init;
    n->params.style = (int32_t)rng_int(&r, 1, 2);
    n->params.inverse = (int32_t)rng_int(&r, 0, 1);
    draw_positions(n, &r);
    if (contiguous) {
        n->x = tensor_make(n->dtype, n->B, n->H, n->T, n->D);
        n->y = tensor_make(n->dtype, n->B, n->H, n->T, n->D);
        n->c = tensor_make(n->dtype, 1, 1, n->table_rows, n->width / 2);
        n->s = tensor_make(n->dtype, 1, 1, n->table_rows, n->width / 2);
    } else {
        n->x = tensor_scattered(&r, TENSOR_INPUT, n->dtype, n->B, n->H, n->T,
                                n->D);
        n->y = tensor_scattered(&r, TENSOR_OUTPUT, n->dtype, n->B, n->H, n->T,
                                n->D);
        n->c = tensor_scattered(&r, TENSOR_INPUT, n->dtype, 1, 1, n->table_rows,
                                n->width / 2);
        n->s = tensor_scattered(&r, TENSOR_INPUT, n->dtype, 1, 1, n->table_rows,
                                n->width / 2);
    }
    tensor_normal(&n->x.view, &r, 1.0);
    tensor_normal(&n->c.view, &r, 1.0);
    tensor_normal(&n->s.view, &r, 1.0);
}

static void free_turn(struct turn *n)
{
    tensor_free(&n->x);
    tensor_free(&n->y);
    tensor_free(&n->c);
    tensor_free(&n->s);
}

/* Two products and a sum: each rounds by half a unit of what it gives. */
static void expect_number(const struct turn *n, double met, long double p,
                          long double q, const char *where)
{
    const long double limit =
        (long double)half_unit(n->dtype) *
            (fabsl(p) + fabsl(q) + fabsl(p + q)) * 1.001L +
        (n->dtype == ATTN_F32 ? (long double)FLT_MIN : (long double)DBL_MIN);
    if (!(fabsl((long double)met - (p + q)) <= limit))
        fail_msg("seed %d, style %d: %s is %.17g, not %.21Lg", (int)n->seed,
                 (int)n->params.style, where, met, p + q);
}

/* y is what the formula of attn.h makes of x. */
static void expect_turned(const struct turn *n, const attn_tensor *x,
                          const attn_tensor *y)
{
    const int64_t half = n->width / 2;
    const bool halves = n->params.style == ATTN_ROTARY_HALVES;
    for (int64_t b = 0; b < n->B; b++)
        for (int64_t h = 0; h < n->H; h++)
            for (int64_t t = 0; t < n->T; t++) {
                const int64_t p = position_of(n, b, t);
                for (int64_t k = 0; k < half; k++) {
                    const int64_t d1 = halves ? k : 2 * k;
                    const int64_t d2 = halves ? k + half : 2 * k + 1;
                    const long double c = ref_get(&n->c.view, 0, 0, p, k);
                    const long double s = ref_get(&n->s.view, 0, 0, p, k) *
                                          (n->params.inverse ? -1.0L : 1.0L);
                    const long double x1 = ref_get(x, b, h, t, d1);
                    const long double x2 = ref_get(x, b, h, t, d2);
                    expect_number(n, kit_get(y, b, h, t, d1), c * x1, -s * x2,
                                  "y(d1)");
                    expect_number(n, kit_get(y, b, h, t, d2), s * x1, c * x2,
                                  "y(d2)");
                }
            }
    const attn_tensor rest[2] = {tensor_slice(x, 3, n->width, n->D - n->width),
                                 tensor_slice(y, 3, n->width, n->D - n->width)};
    assert_true(compare_bits("rest", "beyond R", &rest[0], &rest[1]));
}

static void run_turn(const struct turn *n, const attn_tensor *x,
                     const attn_tensor *y)
{
    if (attn_rotary(NULL, &n->params, x, &n->c.view, &n->s.view, y) != ATTN_OK)
        fail_msg("seed %d: %s", (int)n->seed, attn_last_error());
}

static void test_rotary__is_the_formula(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 600; seed++) {
        struct turn n;
        draw_turn(&n, seed);
        run_turn(&n, &n.x.view, &n.y.view);
        expect_turned(&n, &n.x.view, &n.y.view);
        assert_true(tensor_surroundings_intact(&n.y));
        free_turn(&n);
    }
}

/* In place, and whatever the strides: the same bits. */
static void test_rotary__layout_does_not_change_the_bits(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 300; seed++) {
        struct turn n;
        draw_turn(&n, seed);
        tensor x = tensor_copy(&n.x.view, n.dtype);
        tensor_assign(&n.y.view, &n.x.view);
        run_turn(&n, &n.y.view, &n.y.view);
        assert_true(tensor_surroundings_intact(&n.y));
        /* contiguous and out of place, with contiguous tables */
        tensor y = tensor_make(n.dtype, n.B, n.H, n.T, n.D);
        tensor c = tensor_copy(&n.c.view, n.dtype);
        tensor s = tensor_copy(&n.s.view, n.dtype);
        assert_int_equal(
            attn_rotary(NULL, &n.params, &x.view, &c.view, &s.view, &y.view),
            ATTN_OK);
        assert_true(compare_bits("y", "in place", &n.y.view, &y.view));
        tensor_free(&x);
        tensor_free(&y);
        tensor_free(&c);
        tensor_free(&s);
        free_turn(&n);
    }
}

/*
 * With r the length of a pair: forward errs by 2 u r in each component, which
 * backward makes 2 sqrt(2) u r and adds as much as forward; and c^2 + s^2 is
 * not 1 but off by 2 (|c| + |s|) e, e the error of the tables, at most 4 u.
 */
static void test_rotary__backward_undoes_forward(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 100; seed++) {
        struct turn n;
        draw_turn(&n, seed);
        tensor_free(&n.c);
        tensor_free(&n.s);
        make_tables(&n.c, &n.s, n.dtype, n.table_rows, n.width);
        const int64_t half = n.width / 2;
        const bool halves = n.params.style == ATTN_ROTARY_HALVES;
        run_turn(&n, &n.x.view, &n.y.view);
        n.params.inverse = !n.params.inverse;
        run_turn(&n, &n.y.view, &n.y.view);
        for (int64_t i = 0; i < n.B * n.H * n.T * n.D; i++) {
            const int64_t d = i % n.D;
            const int64_t t = i / n.D % n.T;
            const int64_t h = i / n.D / n.T % n.H;
            const int64_t b = i / n.D / n.T / n.H;
            const int64_t other = d >= n.width ? d
                                  : !halves    ? (d ^ 1)
                                  : d < half   ? d + half
                                               : d - half;
            const double x = kit_get(&n.x.view, b, h, t, d);
            const double r = hypot(x, kit_get(&n.x.view, b, h, t, other));
            const double met = kit_get(&n.y.view, b, h, t, d);
            if (!(fabs(met - x) <= 17 * half_unit(n.dtype) * r))
                fail_msg("seed %d, component %d: %.17g came back as %.17g",
                         (int)seed, (int)d, x, met);
        }
        free_turn(&n);
    }
}

/* q.k after the rotation of q to position p and k to position p - 5, for p
 * near `first`. */
static double score_at(int64_t first, const tensor *q, const tensor *k,
                       int32_t style, int64_t width)
{
    attn_rotary_params params = ATTN_ROTARY_PARAMS_INIT;
    tensor c = tensor_make(ATTN_F64, 1, 1, 8, width / 2);
    tensor s = tensor_make(ATTN_F64, 1, 1, 8, width / 2);
    tensor turned[2] = {tensor_copy(&q->view, ATTN_F64),
                        tensor_copy(&k->view, ATTN_F64)};
    double score = 0.0;
    assert_int_equal(
        attn_rotary_tables(first, width, LARGE_BASE, &c.view, &s.view),
        ATTN_OK);
    params.style = style;
    for (int n = 0; n < 2; n++) {
        params.offset = n == 0 ? 7 : 2;
        assert_int_equal(attn_rotary(NULL, &params, &turned[n].view, &c.view,
                                     &s.view, &turned[n].view),
                         ATTN_OK);
    }
    for (int64_t d = 0; d < q->view.shape[3]; d++)
        score += kit_get(&turned[0].view, 0, 0, 0, d) *
                 kit_get(&turned[1].view, 0, 0, 0, d);
    for (int n = 0; n < 2; n++)
        tensor_free(&turned[n]);
    tensor_free(&c);
    tensor_free(&s);
    return score;
}

/*
 * A turned pair is off by (4 sqrt(2) + 2) u of its length (tables, roundings),
 * so a score by twice that times |q||k|; its sum of D products by D u |q||k|.
 */
static void test_rotary__scores_depend_on_position_differences(void **state)
{
    (void)state;
    enum { D = 40 };
    for (int32_t style = 1; style <= 2; style++)
        for (int64_t width = 2; width <= D; width += 38) {
            rng r = rng_make(5, (uint64_t)(width + style));
            tensor q = tensor_make(ATTN_F64, 1, 1, 1, D);
            tensor k = tensor_make(ATTN_F64, 1, 1, 1, D);
            double qq = 0.0;
            double kk = 0.0;
            tensor_normal(&q.view, &r, 1.0);
            tensor_normal(&k.view, &r, 1.0);
            for (int64_t d = 0; d < D; d++) {
                qq += pow(kit_get(&q.view, 0, 0, 0, d), 2);
                kk += pow(kit_get(&k.view, 0, 0, 0, d), 2);
            }
            const double limit =
                2 * (2 * 7.7 + D) * DBL_EPSILON / 2 * sqrt(qq * kk);
            const double score = score_at(0, &q, &k, style, width);
            for (int64_t first = 1; first < 2000000; first = 7 * first + 3) {
                const double moved = score_at(first, &q, &k, style, width);
                if (!(fabs(moved - score) <= limit))
                    fail_msg("style %d, R %d, moved by %d: %.17g, not %.17g",
                             (int)style, (int)width, (int)first, moved, score);
            }
            tensor_free(&q);
            tensor_free(&k);
        }
}

/* Two sequences one after the other are the same as each alone. */
static void test_rotary__a_ragged_batch_takes_positions(void **state)
{
    (void)state;
    static const int64_t positions[] = {0, 1, 2, 3, 0, 1, 2};
    attn_rotary_params params = ATTN_ROTARY_PARAMS_INIT;
    rng r = rng_make(9, 9);
    tensor c;
    tensor s;
    tensor x = tensor_make(ATTN_F32, 1, 2, 7, 10);
    tensor y = tensor_make(ATTN_F32, 1, 2, 7, 10);
    tensor z = tensor_make(ATTN_F32, 1, 2, 7, 10);
    make_tables(&c, &s, ATTN_F32, 4, 8);
    tensor_normal(&x.view, &r, 1.0);
    params.style = ATTN_ROTARY_HALVES;
    params.positions = positions;
    assert_int_equal(
        attn_rotary(NULL, &params, &x.view, &c.view, &s.view, &y.view),
        ATTN_OK);
    params.positions = NULL;
    for (int n = 0; n < 2; n++) {
        const attn_tensor from = tensor_slice(&x.view, 2, 4 * n, 4 - n);
        const attn_tensor to = tensor_slice(&z.view, 2, 4 * n, 4 - n);
        assert_int_equal(
            attn_rotary(NULL, &params, &from, &c.view, &s.view, &to), ATTN_OK);
    }
    assert_true(compare_bits("y", "ragged", &y.view, &z.view));
    tensor_free(&x);
    tensor_free(&y);
    tensor_free(&z);
    tensor_free(&c);
    tensor_free(&s);
}

static void test_rotary__nan_stays_in_its_pair(void **state)
{
    (void)state;
    tensor c;
    tensor s;
    make_tables(&c, &s, ATTN_F32, 3, 6);
    for (int32_t style = 1; style <= 2; style++) {
        attn_rotary_params params = ATTN_ROTARY_PARAMS_INIT;
        attn_tensor x = kit_make(ATTN_F32, 1, 1, 3, 8);
        kit_set(&x, 0, 0, 1, 2, (double)NAN);
        params.style = style;
        assert_int_equal(attn_rotary(NULL, &params, &x, &c.view, &s.view, &x),
                         ATTN_OK);
        for (int64_t t = 0; t < 3; t++)
            for (int64_t d = 0; d < 8; d++) {
                const int64_t other = style == ATTN_ROTARY_HALVES ? 5 : 3;
                assert_int_equal(isnan(kit_get(&x, 0, 0, t, d)) != 0,
                                 t == 1 && (d == 2 || d == other));
            }
        kit_drop(&x);
    }
    tensor_free(&c);
    tensor_free(&s);
}

static void test_rotary__zero_sizes_are_fine(void **state)
{
    (void)state;
    attn_rotary_params params = ATTN_ROTARY_PARAMS_INIT;
    params.style = ATTN_ROTARY_INTERLEAVED;
    for (int dim = 0; dim < 4; dim++) {
        attn_tensor x = kit_view(ATTN_F64, NULL, 2, 2, 2, 4);
        attn_tensor table = kit_make(ATTN_F64, 1, 1, 2, dim == 3 ? 0 : 2);
        x.shape[dim] = 0;
        if (attn_rotary(NULL, &params, &x, &table, &table, &x) != ATTN_OK)
            fail_msg("size %d: %s", dim, attn_last_error());
        kit_drop(&table);
    }
    /* No position needs a row when there is no row of x. */
    attn_tensor x = kit_view(ATTN_F64, NULL, 2, 2, 0, 4);
    attn_tensor table = kit_view(ATTN_F64, NULL, 1, 1, 0, 2);
    assert_int_equal(attn_rotary(NULL, &params, &x, &table, &table, &x),
                     ATTN_OK);
    /* More positions than could be walked, but no element. */
    x = kit_view(ATTN_F64, NULL, INT64_C(1) << 58, 0, 2, 4);
    table = kit_make(ATTN_F64, 1, 1, 2, 2);
    assert_int_equal(attn_rotary(NULL, &params, &x, &table, &table, &x),
                     ATTN_OK);
    kit_drop(&table);
}

/* Long enough for many tasks. */
static void test_rotary__threads_do_not_change_the_bits(void **state)
{
    (void)state;
    attn_context_params with = ATTN_CONTEXT_PARAMS_INIT;
    attn_rotary_params params = ATTN_ROTARY_PARAMS_INIT;
    rng r = rng_make(3, 3);
    tensor c;
    tensor s;
    tensor x = tensor_make(ATTN_F32, 2, 3, 501, 96);
    tensor y = tensor_make(ATTN_F32, 2, 3, 501, 96);
    make_tables(&c, &s, ATTN_F32, 501, 64);
    tensor_normal(&x.view, &r, 1.0);
    params.style = ATTN_ROTARY_HALVES;
    assert_int_equal(
        attn_rotary(NULL, &params, &x.view, &c.view, &s.view, &y.view),
        ATTN_OK);
    for (int32_t threads = 2; threads <= 5; threads += 3) {
        attn_context *context = NULL;
        tensor z = tensor_make(ATTN_F32, 2, 3, 501, 96);
        with.num_threads = threads;
        assert_int_equal(attn_context_create(&context, &with), ATTN_OK);
        assert_int_equal(
            attn_rotary(context, &params, &x.view, &c.view, &s.view, &z.view),
            ATTN_OK);
        assert_true(compare_bits("y", "threads", &y.view, &z.view));
        attn_context_destroy(context);
        tensor_free(&z);
    }
    tensor_free(&x);
    tensor_free(&y);
    tensor_free(&c);
    tensor_free(&s);
}

/* ---- Refusals ---- */

/* One valid call, all of whose memory is watched. */
static struct {
    attn_rotary_params params;
    attn_tensor x, c, s, y;
    int64_t positions[6];
    int64_t offsets[2];
    double memory[512];
} v, before;

static void make_valid(void)
{
    memset(&v, 0, sizeof v);
    attn_rotary_params_init(&v.params);
    v.params.style = ATTN_ROTARY_HALVES;
    v.x = kit_view(ATTN_F64, v.memory, 2, 2, 3, 6);
    v.y = kit_view(ATTN_F64, v.memory + 128, 2, 2, 3, 6);
    v.c = kit_view(ATTN_F64, v.memory + 256, 1, 1, 5, 2);
    v.s = kit_view(ATTN_F64, v.memory + 384, 1, 1, 5, 2);
}

static void expect_refused(int line, attn_status want)
{
    static const char call[] = "attn_rotary: ";
    memcpy(&before, &v, sizeof before);
    const attn_status status =
        attn_rotary(NULL, &v.params, &v.x, &v.c, &v.s, &v.y);
    if (status != want)
        fail_msg("line %d: %s (%s) in place of %s", line, attn_strerror(status),
                 attn_last_error(), attn_strerror(want));
    assert_memory_equal(attn_last_error(), call, sizeof call - 1);
    assert_memory_equal(&before, &v, sizeof before);
}

/* The valid call with one change is refused. */
#define REFUSED(status, change)             \
    do {                                    \
        make_valid();                       \
        change;                             \
        expect_refused(__LINE__, (status)); \
    } while (0)

static void test_rotary__the_watched_call_is_valid(void **state)
{
    (void)state;
    make_valid();
    v.params.offset = 2;
    assert_int_equal(attn_rotary(NULL, &v.params, &v.x, &v.c, &v.s, &v.y),
                     ATTN_OK);
}

static void test_rotary__bad_options_are_refused(void **state)
{
    (void)state;
    make_valid();
    assert_int_equal(attn_rotary(NULL, NULL, &v.x, &v.c, &v.s, &v.y),
                     ATTN_ERR_NULL);
    REFUSED(ATTN_ERR_STRUCT, v.params.struct_size = 39);
    REFUSED(ATTN_ERR_VALUE, v.params.style = 0);
    REFUSED(ATTN_ERR_VALUE, v.params.style = 3);
    REFUSED(ATTN_ERR_VALUE, v.params.style = -1);
    REFUSED(ATTN_ERR_VALUE, v.params.inverse = 2);
    REFUSED(ATTN_ERR_VALUE, v.params.inverse = -1);
    REFUSED(ATTN_ERR_VALUE, v.params.offset = 1; v.params.offsets = v.offsets);
    REFUSED(ATTN_ERR_VALUE, v.params.offset = 1;
            v.params.positions = v.positions);
    REFUSED(ATTN_ERR_VALUE, v.params.offsets = v.offsets;
            v.params.positions = v.positions);
}

static void test_rotary__positions_outside_the_tables_are_refused(void **state)
{
    (void)state;
    REFUSED(ATTN_ERR_VALUE, v.params.offset = -1);
    REFUSED(ATTN_ERR_VALUE, v.params.offset = 3);
    REFUSED(ATTN_ERR_VALUE, v.params.offset = INT64_MAX);
    REFUSED(ATTN_ERR_VALUE, v.params.offset = INT64_MIN);
    REFUSED(ATTN_ERR_VALUE, v.c.shape[2] = v.s.shape[2] = 2);
    REFUSED(ATTN_ERR_VALUE, v.c.shape[2] = v.s.shape[2] = 0);
    for (int b = 0; b < 2; b++) {
        REFUSED(ATTN_ERR_VALUE, v.params.offsets = v.offsets; v.offsets[b] = 3);
        REFUSED(ATTN_ERR_VALUE, v.params.offsets = v.offsets;
                v.offsets[b] = -1);
    }
    for (int n = 0; n < 6; n++) {
        REFUSED(ATTN_ERR_VALUE, v.params.positions = v.positions;
                v.positions[n] = 5);
        REFUSED(ATTN_ERR_VALUE, v.params.positions = v.positions;
                v.positions[n] = -1);
        REFUSED(ATTN_ERR_VALUE, v.params.positions = v.positions;
                v.positions[n] = INT64_MAX);
    }
}

static void test_rotary__bad_tensors_are_refused(void **state)
{
    (void)state;
    make_valid();
    assert_int_equal(attn_rotary(NULL, &v.params, NULL, &v.c, &v.s, &v.y),
                     ATTN_ERR_NULL);
    assert_int_equal(attn_rotary(NULL, &v.params, &v.x, NULL, &v.s, &v.y),
                     ATTN_ERR_NULL);
    assert_int_equal(attn_rotary(NULL, &v.params, &v.x, &v.c, NULL, &v.y),
                     ATTN_ERR_NULL);
    assert_int_equal(attn_rotary(NULL, &v.params, &v.x, &v.c, &v.s, NULL),
                     ATTN_ERR_NULL);
    REFUSED(ATTN_ERR_NULL, v.y.data = NULL);
    REFUSED(ATTN_ERR_SIZE, v.x.shape[1] = -1);
    REFUSED(ATTN_ERR_SHAPE, v.x.shape[3] = v.y.shape[3] = 3);
    REFUSED(ATTN_ERR_SHAPE, v.y.shape[2] = 2);
    REFUSED(ATTN_ERR_SHAPE, v.s.shape[3] = 1);
    REFUSED(ATTN_ERR_SHAPE, v.s.shape[2] = 4);
    REFUSED(ATTN_ERR_SHAPE, v.c.shape[0] = 2);
    REFUSED(ATTN_ERR_TYPE, v.x.dtype = ATTN_U8);
    REFUSED(ATTN_ERR_TYPE, v.x.dtype = 9);
    REFUSED(ATTN_ERR_TYPE, v.y.dtype = ATTN_F32);
    REFUSED(ATTN_ERR_TYPE, v.c.dtype = ATTN_F32);
    REFUSED(ATTN_ERR_TYPE, v.s.dtype = ATTN_F32);
    REFUSED(ATTN_ERR_STRIDE, v.y.stride[1] = 0);
    REFUSED(ATTN_ERR_ALIGN, v.x.data = (unsigned char *)v.memory + 1);
    REFUSED(ATTN_ERR_UNSUPPORTED, v.s.reserved = 1);
}

static void test_rotary__overlaps_are_refused(void **state)
{
    (void)state;
    REFUSED(ATTN_ERR_OVERLAP, v.y.data = v.memory + 2);
    REFUSED(ATTN_ERR_OVERLAP, v.y.data = v.memory; v.y.stride[2] = 7;
            v.y.stride[1] = 21; v.y.stride[0] = 42);
    REFUSED(ATTN_ERR_OVERLAP, v.c.data = v.memory + 130);
    REFUSED(ATTN_ERR_OVERLAP, v.s.data = v.memory + 130);
    REFUSED(ATTN_ERR_OVERLAP,
            v.params.positions = (int64_t *)(void *)(v.memory + 129));
    REFUSED(ATTN_ERR_OVERLAP,
            v.params.offsets = (int64_t *)(void *)(v.memory + 129));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rotary_params_init__macro_and_call_agree),
        cmocka_unit_test(test_rotary_params__sizes),
        cmocka_unit_test(test_rotary_tables__are_the_formula),
        cmocka_unit_test(test_rotary_tables__stay_exact_up_to_position_1000000),
        cmocka_unit_test(test_rotary_tables__far_positions_and_odd_bases),
        cmocka_unit_test(test_rotary_tables__first_is_a_shift_of_the_rows),
        cmocka_unit_test(test_rotary_tables__zero_sizes_are_fine),
        cmocka_unit_test(test_rotary_tables__bad_arguments_are_refused),
        cmocka_unit_test(test_rotary__is_the_formula),
        cmocka_unit_test(test_rotary__layout_does_not_change_the_bits),
        cmocka_unit_test(test_rotary__backward_undoes_forward),
        cmocka_unit_test(test_rotary__scores_depend_on_position_differences),
        cmocka_unit_test(test_rotary__a_ragged_batch_takes_positions),
        cmocka_unit_test(test_rotary__nan_stays_in_its_pair),
        cmocka_unit_test(test_rotary__zero_sizes_are_fine),
        cmocka_unit_test(test_rotary__threads_do_not_change_the_bits),
        cmocka_unit_test(test_rotary__the_watched_call_is_valid),
        cmocka_unit_test(test_rotary__bad_options_are_refused),
        cmocka_unit_test(test_rotary__positions_outside_the_tables_are_refused),
        cmocka_unit_test(test_rotary__bad_tensors_are_refused),
        cmocka_unit_test(test_rotary__overlaps_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
