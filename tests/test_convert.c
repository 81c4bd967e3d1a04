/*
 * test_convert.c - attn_convert against arithmetic on the values themselves:
 * all numbers of 16 bits, all halfway points between neighbours, and what the
 * compiler's own half precision says, if it has one.
 */
#define _GNU_SOURCE 1

#include "kit.h"

#include "rng.h"

#include <fenv.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PATTERNS 65536

static const attn_dtype types[] = {ATTN_F32, ATTN_F64, ATTN_F16, ATTN_BF16};

static size_t bytes_of(attn_dtype dtype)
{
    return dtype == ATTN_F64 ? 8 : dtype == ATTN_F32 ? 4 : 2;
}

static const char *name_of(attn_dtype dtype)
{
    static const char *const names[] = {"", "F32", "F64", "U8", "F16", "BF16"};
    return names[dtype];
}

/* n numbers in a row. */
static attn_tensor row(attn_dtype dtype, void *data, int64_t n)
{
    return kit_view(dtype, data, 1, 1, 1, n);
}

static void convert(attn_dtype from, const void *x, attn_dtype to, void *y,
                    int64_t n)
{
    const attn_tensor tx = row(from, (void *)(uintptr_t)x, n);
    const attn_tensor ty = row(to, y, n);
    if (attn_convert(NULL, &tx, &ty) != ATTN_OK)
        fail_msg("%s", attn_last_error());
}

/* ---- the reference ---- */

/* A format with an implicit leading 1. */
struct format {
    int fraction, bias, last; /* bits; of the exponent; its last value */
};

static struct format format_of(attn_dtype dtype)
{
    static const struct format f16 = {10, 15, 31};
    static const struct format bf16 = {7, 127, 255};
    static const struct format f32 = {23, 127, 255};
    static const struct format f64 = {52, 1023, 2047};
    switch (dtype) {
    case ATTN_F16:
        return f16;
    case ATTN_BF16:
        return bf16;
    case ATTN_F32:
        return f32;
    default:
        return f64;
    }
}

static int sign_bit(attn_dtype dtype)
{
    return (int)bytes_of(dtype) * 8 - 1;
}

/* What a pattern of bits means. */
static long double value_of(attn_dtype dtype, uint64_t bits)
{
    const struct format f = format_of(dtype);
    const uint64_t fraction = bits & ((UINT64_C(1) << f.fraction) - 1);
    const int exponent = (int)(bits >> f.fraction) & f.last;
    const bool negative = (bits >> sign_bit(dtype) & 1) != 0;
    long double x;
    if (exponent == f.last)
        x = fraction != 0 ? (long double)NAN : (long double)INFINITY;
    else if (exponent == 0)
        x = ldexpl((long double)fraction, 1 - f.bias - f.fraction);
    else
        x = ldexpl((long double)fraction + ldexpl(1.0L, f.fraction),
                   exponent - f.bias - f.fraction);
    return negative ? -x : x;
}

/* The bits of the nearest number, ties to even; NaN is left to the caller. */
static uint64_t nearest(attn_dtype dtype, long double x)
{
    const struct format f = format_of(dtype);
    const uint64_t sign = (uint64_t)(signbit(x) != 0) << sign_bit(dtype);
    const uint64_t inf = (uint64_t)f.last << f.fraction;
    const long double a = fabsl(x);
    int exponent;
    if (isinf(x))
        return sign | inf;
    (void)frexpl(a, &exponent); /* a < 2^exponent */
    exponent =
        exponent - 1 < 1 - f.bias || a <= 0.0L ? 1 - f.bias : exponent - 1;
    /* In units of the last place; rintl() rounds as we want it. */
    const uint64_t units = (uint64_t)rintl(ldexpl(a, f.fraction - exponent));
    const uint64_t bits =
        units + ((uint64_t)(exponent + f.bias - 1) << f.fraction);
    return sign | (bits > inf ? inf : bits);
}

static uint64_t load(attn_dtype dtype, const void *data, int64_t n)
{
    uint64_t bits = 0;
    memcpy(&bits, (const unsigned char *)data + (size_t)n * bytes_of(dtype),
           bytes_of(dtype));
    return bits; /* of a little-endian machine; see main */
}

static bool is_quiet(attn_dtype dtype, uint64_t bits)
{
    return (bits >> (format_of(dtype).fraction - 1) & 1) != 0;
}

/* y, converted from x, must be what the formula says. */
static void expect(attn_dtype from, uint64_t x, attn_dtype to, uint64_t y)
{
    const long double value = value_of(from, x);
    if (isnan(value)) {
        if (!isnan(value_of(to, y)) || !is_quiet(to, y) ||
            (x >> sign_bit(from)) != (y >> sign_bit(to)))
            fail_msg("%s 0x%llx, a NaN, becomes %s 0x%llx", name_of(from),
                     (unsigned long long)x, name_of(to), (unsigned long long)y);
        return;
    }
    if (y != nearest(to, value))
        fail_msg("%s 0x%llx = %.20Lg becomes %s 0x%llx = %.20Lg, not 0x%llx",
                 name_of(from), (unsigned long long)x, value, name_of(to),
                 (unsigned long long)y, value_of(to, y),
                 (unsigned long long)nearest(to, value));
}

static void expect_all(attn_dtype from, const void *x, attn_dtype to,
                       const void *y, int64_t n)
{
    for (int64_t k = 0; k < n; k++)
        expect(from, load(from, x, k), to, load(to, y, k));
}

/* ---- numbers ---- */

static uint16_t *all_patterns(void)
{
    static uint16_t all[PATTERNS];
    for (int n = 0; n < PATTERNS; n++)
        all[n] = (uint16_t)n;
    return all;
}

static void test_convert__all_numbers_of_16_bits_to_every_type(void **state)
{
    (void)state;
    static unsigned char y[PATTERNS * 8];
    const uint16_t *x = all_patterns();
    for (size_t from = 2; from < COUNT(types); from++)
        for (size_t to = 0; to < COUNT(types); to++) {
            if (from == to)
                continue;
            memset(y, 0x5A, sizeof y);
            convert(types[from], x, types[to], y, PATTERNS);
            expect_all(types[from], x, types[to], y, PATTERNS);
        }
}

/* Wider types hold each of them exactly, so the way back leads home; a
 * signaling NaN comes back quiet. */
static void test_convert__there_and_back_is_nothing(void **state)
{
    (void)state;
    static double wide[PATTERNS];
    static uint16_t back[PATTERNS];
    const uint16_t *x = all_patterns();
    for (size_t narrow = 2; narrow < COUNT(types); narrow++)
        for (size_t by = 0; by < 2; by++) {
            const uint16_t quiet =
                (uint16_t)(1 << (format_of(types[narrow]).fraction - 1));
            convert(types[narrow], x, types[by], wide, PATTERNS);
            convert(types[by], wide, types[narrow], back, PATTERNS);
            for (int n = 0; n < PATTERNS; n++) {
                const bool nan = isnan(value_of(types[narrow], x[n]));
                if (back[n] != (nan ? x[n] | quiet : x[n]))
                    fail_msg("%s 0x%x by way of %s becomes 0x%x",
                             name_of(types[narrow]), x[n], name_of(types[by]),
                             back[n]);
            }
        }
}

/* The number halfway between each pair of neighbours, and the next below and
 * above it: where rounding, and rounding twice, goes wrong. */
static void test_convert__halfway_points_go_to_even(void **state)
{
    (void)state;
    static float f[3 * PATTERNS];
    static double d[3 * PATTERNS];
    static uint16_t y[3 * PATTERNS];
    for (size_t to = 2; to < COUNT(types); to++) {
        int64_t n = 0;
        for (uint64_t bits = 0; bits < PATTERNS; bits++) {
            const long double low = value_of(types[to], bits);
            long double high = value_of(types[to], bits + 1);
            if (!isfinite(low) || bits == 0x7fff)
                continue;
            if (isinf(high)) /* as if the exponents went on */
                high = low + (low - value_of(types[to], bits - 1));
            const long double middle = (low + high) / 2;
            f[n] = (float)middle;
            d[n] = (double)middle;
            f[n + 1] = nextafterf(f[n], (float)low);
            d[n + 1] = nextafter(d[n], (double)low);
            f[n + 2] = nextafterf(f[n], (float)high);
            d[n + 2] = nextafter(d[n], (double)high);
            n += 3;
        }
        assert_true(n > 3 * 60000);
        convert(ATTN_F32, f, types[to], y, n);
        expect_all(ATTN_F32, f, types[to], y, n);
        convert(ATTN_F64, d, types[to], y, n);
        expect_all(ATTN_F64, d, types[to], y, n);
    }
}

/* Any pattern of 32 and 64 bits: mostly far out of range, NaN and subnormal. */
static void test_convert__random_patterns(void **state)
{
    (void)state;
    enum { N = 40000 };
    static uint32_t f[N];
    static uint64_t d[N];
    static uint64_t y[N];
    rng r = rng_make(11, 0);
    for (int n = 0; n < N; n++) {
        f[n] = (uint32_t)rng_bits(&r);
        d[n] = rng_bits(&r);
        if (n % 2 == 0) { /* doubles near the ranges of the other types */
            const uint64_t exponent = (uint64_t)rng_int(&r, 1023 - 155, 1151);
            d[n] = (d[n] & ~(UINT64_C(0x7ff) << 52)) | exponent << 52;
        }
    }
    for (size_t to = 0; to < COUNT(types); to++) {
        if (types[to] != ATTN_F32) {
            convert(ATTN_F32, f, types[to], y, N);
            expect_all(ATTN_F32, f, types[to], y, N);
        }
        if (types[to] != ATTN_F64) {
            convert(ATTN_F64, d, types[to], y, N);
            expect_all(ATTN_F64, d, types[to], y, N);
        }
    }
}

static void test_convert__some_numbers_by_hand(void **state)
{
    (void)state;
    static const struct {
        double x;
        uint16_t f16, bf16;
    } cases[] = {
        {0.0, 0x0000, 0x0000},
        {-0.0, 0x8000, 0x8000},
        {1.0, 0x3c00, 0x3f80},
        {-2.0, 0xc000, 0xc000},
        {65504.0, 0x7bff, 0x4780},
        {65519.999, 0x7bff, 0x4780},
        {65520.0, 0x7c00, 0x4780},
        {-1e6, 0xfc00, 0xc974},
        {0x1p-24, 0x0001, 0x3380},
        {0x1p-25, 0x0000, 0x3300},
        {0x1.000001p-25, 0x0001, 0x3300},
        {0x1.ff8p-15, 0x03ff, 0x3880},
        {0x1.ffep-15, 0x0400, 0x3880},
        {1.0 + 0x1p-11, 0x3c00, 0x3f80},
        {1.0 + 0x1p-11 + 0x1p-40, 0x3c01, 0x3f80},
        {1.0 + 0x1p-8, 0x3c04, 0x3f80},
        {1.0 + 0x1p-8 + 0x1p-50, 0x3c04, 0x3f81},
        {1.0 + 0x3p-8, 0x3c0c, 0x3f82},
        {0x1.fep127, 0x7c00, 0x7f7f},
        {0x1.ffp127, 0x7c00, 0x7f80},
        {1e300, 0x7c00, 0x7f80},
        {-1e-300, 0x8000, 0x8000},
        {0x1p-133, 0x0000, 0x0001},
        {0x1p-134, 0x0000, 0x0000},
        {0x3p-134, 0x0000, 0x0002},
        {4.9e-324, 0x0000, 0x0000},
        {(double)INFINITY, 0x7c00, 0x7f80},
    };
    for (size_t n = 0; n < COUNT(cases); n++) {
        uint16_t y;
        convert(ATTN_F64, &cases[n].x, ATTN_F16, &y, 1);
        if (y != cases[n].f16)
            fail_msg("%a becomes F16 0x%x", cases[n].x, y);
        convert(ATTN_F64, &cases[n].x, ATTN_BF16, &y, 1);
        if (y != cases[n].bf16)
            fail_msg("%a becomes BF16 0x%x", cases[n].x, y);
    }
}

/* clang before 15 has no _Float16 on x86-64, gcc has from 12 on. */
#if defined(__FLT16_MANT_DIG__) && defined(__GNUC__)
__extension__ typedef _Float16 half;

static void expect_half(const char *from, double x, half want, uint16_t met)
{
    uint16_t bits;
    memcpy(&bits, &want, sizeof bits);
    const bool nan = (bits & 0x7fff) > 0x7c00;
    if (nan ? (met & 0x7fff) <= 0x7c00 : met != bits)
        fail_msg("%s %a becomes 0x%x, the compiler says 0x%x", from, x, met,
                 bits);
}

static void test_convert__agrees_with_the_compilers_half(void **state)
{
    (void)state;
    enum { N = 200000 };
    static float wide[PATTERNS], f[N];
    static double d[N];
    static uint16_t y[N];
    const uint16_t *x = all_patterns();
    rng r = rng_make(12, 0);
    convert(ATTN_F16, x, ATTN_F32, wide, PATTERNS);
    for (int n = 0; n < PATTERNS; n++) {
        half h;
        memcpy(&h, &x[n], sizeof h);
        const float want = (float)h;
        if (isnan(want) ? !isnan(wide[n])
                        : memcmp(&want, &wide[n], sizeof want) != 0)
            fail_msg("0x%x becomes %a, the compiler says %a", x[n],
                     (double)wide[n], (double)want);
    }
    for (int n = 0; n < N; n++) {
        const uint64_t exponent = (uint64_t)rng_int(&r, 1023 - 30, 1023 + 20);
        const uint64_t bits =
            (rng_bits(&r) & ~(UINT64_C(0x7ff) << 52)) | exponent << 52;
        memcpy(&d[n], &bits, sizeof bits);
        f[n] = (float)d[n];
    }
    convert(ATTN_F32, f, ATTN_F16, y, N);
    for (int n = 0; n < N; n++)
        expect_half("F32", (double)f[n], (half)f[n], y[n]);
    convert(ATTN_F64, d, ATTN_F16, y, N);
    for (int n = 0; n < N; n++)
        expect_half("F64", d[n], (half)d[n], y[n]);
}
#endif

/* ---- the state of the processor ---- */

/* Conversions to and from 16 bits, whose results must not change. */
static const attn_dtype pairs[][2] = {
    {ATTN_F32, ATTN_F16},  {ATTN_F64, ATTN_F16},  {ATTN_F32, ATTN_BF16},
    {ATTN_F64, ATTN_BF16}, {ATTN_F16, ATTN_F32},  {ATTN_F16, ATTN_F64},
    {ATTN_BF16, ATTN_F32}, {ATTN_BF16, ATTN_F64}, {ATTN_F16, ATTN_BF16},
    {ATTN_BF16, ATTN_F16},
};

struct numbers {
    unsigned char x[PATTERNS * 8];
    unsigned char y[PATTERNS * 8];
};

static void draw_numbers(struct numbers *s, attn_dtype from)
{
    rng r = rng_make(13, (uint64_t)from);
    if (bytes_of(from) == 2) {
        memcpy(s->x, all_patterns(), PATTERNS * 2);
        return;
    }
    for (int64_t n = 0; n < PATTERNS; n++) {
        const int exponent = (int)rng_int(&r, -150, 20);
        const double d = ldexp(2.0 * rng_unit(&r) - 1.0, exponent);
        const float f = (float)d;
        if (from == ATTN_F32)
            memcpy(s->x + n * 4, &f, 4);
        else
            memcpy(s->x + n * 8, &d, 8);
    }
}

static void run_pairs(struct numbers *s)
{
    for (size_t n = 0; n < COUNT(pairs); n++)
        convert(pairs[n][0], s[n].x, pairs[n][1], s[n].y, PATTERNS);
}

static void expect_pairs(const char *what, const struct numbers *met,
                         const struct numbers *want)
{
    for (size_t n = 0; n < COUNT(pairs); n++)
        if (memcmp(met[n].y, want[n].y, PATTERNS * bytes_of(pairs[n][1])) != 0)
            fail_msg("%s changes %s to %s", what, name_of(pairs[n][0]),
                     name_of(pairs[n][1]));
}

static struct numbers *make_numbers(void)
{
    struct numbers *s = calloc(COUNT(pairs), sizeof *s);
    assert_non_null(s);
    for (size_t n = 0; n < COUNT(pairs); n++)
        draw_numbers(&s[n], pairs[n][0]);
    return s;
}

static void test_convert__rounding_modes_change_nothing(void **state)
{
    (void)state;
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    struct numbers *want = make_numbers();
    struct numbers *met = make_numbers();
    run_pairs(want);
    for (size_t m = 0; m < COUNT(modes); m++) {
        assert_int_equal(fesetround(modes[m]), 0);
        run_pairs(met);
        assert_int_equal(fesetround(FE_TONEAREST), 0);
        expect_pairs("a rounding mode", met, want);
    }
    free(want);
    free(met);
}

#if defined(__x86_64__)
static void test_convert__flush_to_zero_changes_nothing(void **state)
{
    (void)state;
    struct numbers *want = make_numbers();
    struct numbers *met = make_numbers();
    const unsigned saved = _mm_getcsr();
    run_pairs(want);
    _mm_setcsr(saved | 0x8040); /* FTZ and DAZ */
    run_pairs(met);
    _mm_setcsr(saved);
    expect_pairs("flush-to-zero", met, want);
    free(want);
    free(met);
}
#endif

/* ---- views ---- */

static unsigned char *place(const attn_tensor *t, const int64_t at[4])
{
    int64_t offset = 0;
    for (int a = 0; a < 4; a++)
        offset += at[a] * t->stride[a];
    return (unsigned char *)t->data + offset * (int64_t)bytes_of(t->dtype);
}

/* A view with gaps, in a random order of dimensions and some reversed, in a
 * block of NaNs. */
struct scattered {
    attn_tensor view;
    unsigned char *block;
    size_t bytes;
};

static struct scattered scatter(rng *r, attn_dtype dtype,
                                const int64_t shape[4])
{
    struct scattered s;
    int64_t step = rng_int(r, 1, 3), offset = 0;
    int order[4] = {0, 1, 2, 3};
    s.view = kit_view(dtype, NULL, shape[0], shape[1], shape[2], shape[3]);
    for (int a = 3; a > 0; a--) {
        const int other = (int)rng_int(r, 0, a), kept = order[a];
        order[a] = order[other];
        order[other] = kept;
    }
    for (int a = 0; a < 4; a++) {
        const int64_t n = shape[order[a]];
        s.view.stride[order[a]] = step;
        if (rng_one_in(r, 4)) {
            offset += (n - 1) * step;
            s.view.stride[order[a]] = -step;
        }
        step = step * n + rng_int(r, 0, 2);
    }
    s.bytes = (size_t)step * bytes_of(dtype);
    s.block = malloc(s.bytes);
    assert_non_null(s.block);
    memset(s.block, 0xFF, s.bytes);
    s.view.data = s.block + offset * (int64_t)bytes_of(dtype);
    return s;
}

#define EACH(at, shape)                                        \
    for ((at)[0] = 0; (at)[0] < (shape)[0]; (at)[0]++)         \
        for ((at)[1] = 0; (at)[1] < (shape)[1]; (at)[1]++)     \
            for ((at)[2] = 0; (at)[2] < (shape)[2]; (at)[2]++) \
                for ((at)[3] = 0; (at)[3] < (shape)[3]; (at)[3]++)

/* Every element in its place, and nothing beside them. */
static void try_strides(uint64_t seed)
{
    rng r = rng_make(seed, 2);
    const attn_dtype from = types[rng_int(&r, 0, 3)];
    const attn_dtype to = types[rng_int(&r, 0, 3)];
    const int64_t shape[4] = {rng_int(&r, 1, 3), rng_int(&r, 1, 3),
                              rng_int(&r, 1, 6), rng_int(&r, 1, 40)};
    int64_t at[4];
    struct scattered x = scatter(&r, from, shape);
    struct scattered y = scatter(&r, to, shape);
    EACH(at, shape)
    {
        const uint64_t bits = nearest(from, (long double)rng_normal(&r));
        memcpy(place(&x.view, at), &bits, bytes_of(from));
    }
    if (rng_one_in(&r, 3))
        x.view.stride[rng_int(&r, 0, 3)] = 0;
    if (attn_convert(NULL, &x.view, &y.view) != ATTN_OK)
        fail_msg("seed %d: %s", (int)seed, attn_last_error());
    EACH(at, shape)
    {
        unsigned char *p = place(&y.view, at);
        expect(from, load(from, place(&x.view, at), 0), to, load(to, p, 0));
        memset(p, 0xFF, bytes_of(to));
    }
    for (size_t n = 0; n < y.bytes; n++)
        if (y.block[n] != 0xFF)
            fail_msg("seed %d: byte %zu lies outside of y and is written",
                     (int)seed, n);
    free(x.block);
    free(y.block);
}

static void test_convert__any_strides(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 400; seed++)
        try_strides(seed);
}

static void test_convert__equal_types_copy_the_bits(void **state)
{
    (void)state;
    static uint64_t x[1000];
    static uint64_t y[1000];
    rng r = rng_make(14, 0);
    for (size_t n = 0; n < COUNT(x); n++)
        x[n] = rng_bits(&r) | UINT64_C(0x7ff07f817f817f81); /* NaNs galore */
    for (size_t k = 0; k < COUNT(types); k++) {
        const int64_t n = (int64_t)(sizeof x / bytes_of(types[k]));
        memset(y, 0, sizeof y);
        convert(types[k], x, types[k], y, n);
        assert_memory_equal(x, y, sizeof x);
        convert(types[k], y, types[k], y, n); /* in place */
        assert_memory_equal(x, y, sizeof x);
    }
}

static void test_convert__threads_change_nothing(void **state)
{
    (void)state;
    enum { N = 300000 };
    attn_context_params p = ATTN_CONTEXT_PARAMS_INIT;
    attn_context *context = NULL;
    float *x = malloc(N * sizeof *x);
    uint16_t *one = malloc(N * sizeof *one);
    uint16_t *three = malloc(N * sizeof *three);
    assert_true(x != NULL && one != NULL && three != NULL);
    rng r = rng_make(15, 0);
    for (int n = 0; n < N; n++)
        x[n] = (float)rng_normal(&r);
    p.num_threads = 3;
    assert_int_equal(attn_context_create(&context, &p), ATTN_OK);
    const attn_tensor tx = kit_view(ATTN_F32, x, 3, 10, 1000, 10);
    const attn_tensor t1 = kit_view(ATTN_F16, one, 3, 10, 1000, 10);
    const attn_tensor t3 = kit_view(ATTN_F16, three, 3, 10, 1000, 10);
    assert_int_equal(attn_convert(NULL, &tx, &t1), ATTN_OK);
    assert_int_equal(attn_convert(context, &tx, &t3), ATTN_OK);
    assert_memory_equal(one, three, N * sizeof *one);
    attn_context_destroy(context);
    free(x);
    free(one);
    free(three);
}

static void test_convert__zero_sizes_are_fine(void **state)
{
    (void)state;
    for (int a = 0; a < 4; a++) {
        attn_tensor x = kit_view(ATTN_F32, NULL, 5, 6, 7, 8);
        attn_tensor y = kit_view(ATTN_BF16, NULL, 5, 6, 7, 8);
        x.shape[a] = y.shape[a] = 0;
        assert_int_equal(attn_convert(NULL, &x, &y), ATTN_OK);
    }
}

static void refused(attn_status want, const attn_tensor *x,
                    const attn_tensor *y)
{
    static const char call[] = "attn_convert: ";
    const attn_status status = attn_convert(NULL, x, y);
    if (status != want)
        fail_msg("%s (%s) in place of %s", attn_strerror(status),
                 attn_last_error(), attn_strerror(want));
    assert_memory_equal(attn_last_error(), call, sizeof call - 1);
}

static void test_convert__bad_arguments_are_refused(void **state)
{
    (void)state;
    static double memory[64];
    double before[64];
    memset(memory, 0x5A, sizeof memory);
    memcpy(before, memory, sizeof memory);
    const attn_tensor x = kit_view(ATTN_F32, memory, 1, 2, 3, 4);
    const attn_tensor y = kit_view(ATTN_F16, memory + 32, 1, 2, 3, 4);
    attn_tensor bad = y;
    refused(ATTN_ERR_NULL, NULL, &y);
    refused(ATTN_ERR_NULL, &x, NULL);
    bad.data = NULL;
    refused(ATTN_ERR_NULL, &x, &bad);
    bad = y;
    bad.dtype = ATTN_U8;
    refused(ATTN_ERR_TYPE, &x, &bad);
    refused(ATTN_ERR_TYPE, &bad, &y);
    bad.dtype = 6;
    refused(ATTN_ERR_TYPE, &x, &bad);
    bad.dtype = 0;
    refused(ATTN_ERR_TYPE, &bad, &y);
    bad = y;
    bad.shape[3] = 5;
    refused(ATTN_ERR_SHAPE, &x, &bad);
    bad.shape[3] = -1;
    refused(ATTN_ERR_SIZE, &x, &bad);
    bad = y;
    bad.stride[2] = 0;
    refused(ATTN_ERR_STRIDE, &x, &bad);
    bad = y;
    bad.stride[2] = INT64_MAX / 4;
    refused(ATTN_ERR_STRIDE, &bad, &y);
    bad = y;
    bad.data = (unsigned char *)memory + 257;
    refused(ATTN_ERR_ALIGN, &x, &bad);
    bad = y;
    bad.reserved = 1;
    refused(ATTN_ERR_UNSUPPORTED, &x, &bad);
    /* One memory, but as other types, or moved. */
    bad = y;
    bad.data = memory;
    refused(ATTN_ERR_OVERLAP, &x, &bad);
    bad = x;
    bad.data = memory + 1;
    refused(ATTN_ERR_OVERLAP, &x, &bad);
    bad = x;
    bad.stride[2] = 5;
    bad.stride[1] = 15;
    refused(ATTN_ERR_OVERLAP, &x, &bad);
    assert_memory_equal(memory, before, sizeof memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_convert__all_numbers_of_16_bits_to_every_type),
        cmocka_unit_test(test_convert__there_and_back_is_nothing),
        cmocka_unit_test(test_convert__halfway_points_go_to_even),
        cmocka_unit_test(test_convert__random_patterns),
        cmocka_unit_test(test_convert__some_numbers_by_hand),
#if defined(__FLT16_MANT_DIG__) && defined(__GNUC__)
        cmocka_unit_test(test_convert__agrees_with_the_compilers_half),
#endif
        cmocka_unit_test(test_convert__rounding_modes_change_nothing),
#if defined(__x86_64__)
        cmocka_unit_test(test_convert__flush_to_zero_changes_nothing),
#endif
        cmocka_unit_test(test_convert__any_strides),
        cmocka_unit_test(test_convert__equal_types_copy_the_bits),
        cmocka_unit_test(test_convert__threads_change_nothing),
        cmocka_unit_test(test_convert__zero_sizes_are_fine),
        cmocka_unit_test(test_convert__bad_arguments_are_refused),
    };
    const uint16_t one = 1;
    unsigned char low;
    memcpy(&low, &one, 1);
    if (low != 1)
        return 77; /* load() reads little-endian numbers */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
