/*
 * Conversion between float32, float64, float16 (1 bit of sign, 5 of exponent,
 * 10 of fraction) and bfloat16 (1, 8, 7: the upper half of a float32).
 *
 * To and from 16 bits only integer arithmetic decides, and float arithmetic
 * that is exact on normal numbers; so neither the rounding mode nor
 * flush-to-zero matters. There are no branches, and compilers vectorise it.
 */
#include "attn_internal.h"

#include "convert.h"

#include "check.h"
#include "context.h"
#include "cpu.h"
#include "half.h"
#include "status.h"

#include <inttypes.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Elements of a task: some 10 microseconds of work, which a thread is worth. */
#define TASK_ELEMENTS 32768

/* ----------------------------------------------------------------- Bits -- */

static inline uint16_t f16_of_bits(uint32_t bits)
{
    uint32_t a = bits & ~F32_SIGN;
    /* Half a unit of the last place of 13 bits fewer, less one if even: a carry
     * into the exponent is right, also that into inf. */
    uint32_t normal = (a - REBIAS + 0xfff + (a >> 13 & 1)) >> 13;
    /* Below 2^-14: a multiple of 2^-24, and what is left of it, both exact. */
    bool is_small = a < bits_of(0x1p-14f);
    float units = of_bits(pick(is_small, a, 0)) * 0x1p24f;
    int32_t floor = (int32_t)units;
    float rest = units - (float)floor;
    uint32_t up = pick(rest == 0.5f, (uint32_t)floor & 1, rest > 0.5f);
    uint32_t nan = F16_INF | F16_QUIET | (a >> 13 & 0x3ff);
    uint32_t y = pick(is_small, (uint32_t)floor + up, normal);

    /* From 65520 on, halfway from the largest, 65504, to the next. */
    y = pick(a >= bits_of(65520.0f), F16_INF, y);
    y = pick(a > F32_INF, nan, y);
    return (uint16_t)(y | (bits & F32_SIGN) >> 16);
}

/* A subnormal one is a multiple of 2^-133; by way of a float it would be left
 * to flush-to-zero. */
static inline double f64_of_bf16(uint16_t x)
{
    double small = (double)(x & 0x7f) * 0x1p-133;
    double y = (double)of_bits(bits_of_bf16(x));

    small = x & 0x8000 ? -small : small;
    return (x & 0x7f80) == 0 ? small : y;
}

static inline uint16_t bf16_of_bits(uint32_t bits)
{
    uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    bool is_nan = (bits & ~F32_SIGN) > F32_INF;

    return (uint16_t)(pick(is_nan, bits | F32_QUIET, rounded) >> 16);
}

/*
 * A double rounded to odd as a float: of the two floats around a number that is
 * none, the one whose last bit is 1. Rounding that to fewer bits (by two or
 * more) gives what rounding the double itself would: the 1 says that it is not
 * a tie, and towards which side.
 */
static inline uint32_t odd_bits_of(double x)
{
    uint64_t bits, a, m;
    uint32_t sign, inexact;
    int32_t exponent, shift;

    memcpy(&bits, &x, sizeof bits);
    a = bits & INT64_MAX;
    sign = (uint32_t)(bits >> 32) & F32_SIGN;
    exponent = (int32_t)(a >> 52) - 1023;
    if (exponent == 1024) /* inf and NaN, whose first bits are kept */
        return sign | F32_INF | (uint32_t)(a >> 29 & 0x7fffff) |
               (a << 12 != 0 ? F32_QUIET : 0);
    if (exponent > 127)
        return sign | (F32_INF - 1);
    if (exponent >= -126) {
        inexact = (a & 0x1fffffff) != 0;
        return sign | (uint32_t)((a - ((uint64_t)(1023 - 127) << 52)) >> 29) |
               inexact;
    }
    /* A subnormal float; from 53 on nothing but the sticky bit is left. A
     * subnormal double is read as normal, which that does not change. */
    shift = MIN(29 - 126 - exponent, 53);
    m = (a & 0xfffffffffffff) | UINT64_C(1) << 52;
    inexact = (m & ((UINT64_C(1) << shift) - 1)) != 0 && a != 0;
    return sign | (uint32_t)(m >> shift) | inexact;
}

/* ----------------------------------------------------------------- Rows -- */

#define NAME f32_to_f64
#define SOURCE float
#define TARGET double
#define CONVERT(x) (double)(x)
#include "convert_tmpl.h"

#define NAME f32_to_f16
#define SOURCE float
#define TARGET uint16_t
#define CONVERT(x) f16_of_bits(bits_of(x))
#include "convert_tmpl.h"

#define NAME f32_to_bf16
#define SOURCE float
#define TARGET uint16_t
#define CONVERT(x) bf16_of_bits(bits_of(x))
#include "convert_tmpl.h"

#define NAME f64_to_f32
#define SOURCE double
#define TARGET float
#define CONVERT(x) (float)(x)
#include "convert_tmpl.h"

#define NAME f64_to_f16
#define SOURCE double
#define TARGET uint16_t
#define CONVERT(x) f16_of_bits(odd_bits_of(x))
#include "convert_tmpl.h"

#define NAME f64_to_bf16
#define SOURCE double
#define TARGET uint16_t
#define CONVERT(x) bf16_of_bits(odd_bits_of(x))
#include "convert_tmpl.h"

#define NAME f16_to_f32
#define SOURCE uint16_t
#define TARGET float
#define CONVERT(x) of_bits(bits_of_f16(x))
#include "convert_tmpl.h"

#define NAME f16_to_f64
#define SOURCE uint16_t
#define TARGET double
#define CONVERT(x) (double)of_bits(bits_of_f16(x))
#include "convert_tmpl.h"

#define NAME f16_to_bf16
#define SOURCE uint16_t
#define TARGET uint16_t
#define CONVERT(x) bf16_of_bits(bits_of_f16(x))
#include "convert_tmpl.h"

#define NAME bf16_to_f32
#define SOURCE uint16_t
#define TARGET float
#define CONVERT(x) of_bits(bits_of_bf16(x))
#include "convert_tmpl.h"

#define NAME bf16_to_f64
#define SOURCE uint16_t
#define TARGET double
#define CONVERT(x) f64_of_bf16(x)
#include "convert_tmpl.h"

#define NAME bf16_to_f16
#define SOURCE uint16_t
#define TARGET uint16_t
#define CONVERT(x) f16_of_bits(bits_of_bf16(x))
#include "convert_tmpl.h"

/* Copies, as integers: a signaling NaN stays what it is. */
#define NAME copy_16
#define SOURCE uint16_t
#define TARGET uint16_t
#define CONVERT(x) (x)
#include "convert_tmpl.h"

#define NAME copy_32
#define SOURCE uint32_t
#define TARGET uint32_t
#define CONVERT(x) (x)
#include "convert_tmpl.h"

#define NAME copy_64
#define SOURCE uint64_t
#define TARGET uint64_t
#define CONVERT(x) (x)
#include "convert_tmpl.h"

#if defined(__x86_64__)
/* The processor's own float16, 8 numbers at a time: 0.06 ns a number in place
 * of 1.5 (to float16) and 0.4 (from it). Its results are the same for every
 * float, NaNs included, and do not depend on the processor's state either. */
#define TARGET_F16C __attribute__((target("avx,f16c")))

TARGET_F16C static void f32_to_f16_fast(const void *from, int64_t sx, void *to,
                                        int64_t sy, int64_t n)
{
    const float *x = from;
    uint16_t *y = to;
    int64_t e = 0;

    for (; sx == 1 && sy == 1 && e <= n - 8; e += 8)
        _mm_storeu_si128(
            (__m128i *)(void *)(y + e),
            _mm256_cvtps_ph(_mm256_loadu_ps(x + e), _MM_FROUND_TO_NEAREST_INT));
    f32_to_f16(x + e * sx, sx, y + e * sy, sy, n - e);
}

TARGET_F16C static void f16_to_f32_fast(const void *from, int64_t sx, void *to,
                                        int64_t sy, int64_t n)
{
    const uint16_t *x = from;
    float *y = to;
    int64_t e = 0;

    for (; sx == 1 && sy == 1 && e <= n - 8; e += 8)
        _mm256_storeu_ps(y + e, _mm256_cvtph_ps(_mm_loadu_si128(
                                    (const __m128i *)(const void *)(x + e))));
    f16_to_f32(x + e * sx, sx, y + e * sy, sy, n - e);
}
#endif

attn__convert_fn attn__convert_row(attn_dtype from, attn_dtype to)
{
    /* Indices are ATTN_F32, ATTN_F64, ATTN_F16 and ATTN_BF16. */
    static const attn__convert_fn rows[6][6] = {
        [ATTN_F32] = {[ATTN_F32] = copy_32,
                      [ATTN_F64] = f32_to_f64,
                      [ATTN_F16] = f32_to_f16,
                      [ATTN_BF16] = f32_to_bf16},
        [ATTN_F64] = {[ATTN_F32] = f64_to_f32,
                      [ATTN_F64] = copy_64,
                      [ATTN_F16] = f64_to_f16,
                      [ATTN_BF16] = f64_to_bf16},
        [ATTN_F16] = {[ATTN_F32] = f16_to_f32,
                      [ATTN_F64] = f16_to_f64,
                      [ATTN_F16] = copy_16,
                      [ATTN_BF16] = f16_to_bf16},
        [ATTN_BF16] = {[ATTN_F32] = bf16_to_f32,
                       [ATTN_F64] = bf16_to_f64,
                       [ATTN_F16] = bf16_to_f16,
                       [ATTN_BF16] = copy_16}};

    ASSERT(rows[from][to]);
#if defined(__x86_64__)
    /* Every processor with AVX-512 has F16C too. */
    if (attn__cpu_level() >= ATTN__LEVEL_AVX2) {
        if (from == ATTN_F32 && to == ATTN_F16)
            return f32_to_f16_fast;
        if (from == ATTN_F16 && to == ATTN_F32)
            return f16_to_f32_fast;
    }
#endif
    return rows[from][to];
}

/* ------------------------------------------------------------------ Call -- */

/* One call: what all tasks share. */
typedef struct convert_run {
    const attn_tensor *x, *y;
    attn__convert_fn row;
    int64_t rows, task_rows;
} convert_run;

static void *row_at(const attn_tensor *t, int64_t row)
{
    int64_t bytes = (int64_t)attn__dtype_bytes(t->dtype);
    int64_t i = row % t->shape[2];
    int64_t h = row / t->shape[2] % t->shape[1];
    int64_t b = row / t->shape[2] / t->shape[1];

    return (unsigned char *)t->data +
           bytes * (b * t->stride[0] + h * t->stride[1] + i * t->stride[2]);
}

/* Rows [task * task_rows, ...), in the order (b,h,t). */
static void convert_task(void *data, int64_t task, int32_t worker)
{
    const convert_run *r = data;
    int64_t end = MIN((task + 1) * r->task_rows, r->rows);

    (void)worker;
    for (int64_t row = task * r->task_rows; row < end; row++)
        r->row(row_at(r->x, row), r->x->stride[3], row_at(r->y, row),
               r->y->stride[3], r->x->shape[3]);
}

/* Any type of numbers. */
static attn_status check_numbers(const char *name, const attn_tensor *t)
{
    static const char call[] = "attn_convert";

    if (t && t->dtype == ATTN_U8)
        return attn__fail(ATTN_ERR_TYPE,
                          "%s: %s has dtype U8; it must be F32, F64, F16 or "
                          "BF16",
                          call, name);
    return attn__check_tensor(call, name, t, t ? t->dtype : 0);
}

static attn_status convert_check(const attn_tensor *x, const attn_tensor *y)
{
    static const char call[] = "attn_convert";
    attn_status status = check_numbers("x", x);

    if (!status)
        status = check_numbers("y", y);
    if (!status)
        status = attn__check_shape(call, "y", y, "the shape of x", x->shape[0],
                                   x->shape[1], x->shape[2], x->shape[3]);
    if (!status)
        status = attn__check_places(call, "y", y);
    if (!status)
        status = attn__check_overlap(call, "y", y, "x", x, true);
    return status;
}

attn_status attn_convert(const attn_context *context, const attn_tensor *x,
                         const attn_tensor *y)
{
    convert_run r = {.x = x, .y = y};
    attn_status status = convert_check(x, y);

    /* x itself, as it must be now where the data are one, is converted. */
    if (status || attn__count(y) == 0 || x->data == y->data)
        return status;
    r.row = attn__convert_row(x->dtype, y->dtype);
    r.rows = x->shape[0] * x->shape[1] * x->shape[2];
    r.task_rows = MAX(TASK_ELEMENTS / x->shape[3], 1);
    context = attn__context(context);
    attn__parallel_for(&context->executor, attn__ceil_div(r.rows, r.task_rows),
                       convert_task, &r);
    return ATTN_OK;
}
