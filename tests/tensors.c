#include "tensors.h"
#include "ref.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Bytes of 0xFF are a NaN in every type of numbers, and "true" in a mask. */
enum { PATTERN = 0xFF };

static int64_t size_of(attn_dtype dtype)
{
    if (dtype == ATTN_F16 || dtype == ATTN_BF16)
        return 2;
    return dtype == ATTN_F32 ? 4 : dtype == ATTN_F64 ? 8 : 1;
}

static unsigned char *element(const attn_tensor *v, int64_t b, int64_t h,
                              int64_t t, int64_t d)
{
    const int64_t at = b * v->stride[0] + h * v->stride[1] + t * v->stride[2] +
                       d * v->stride[3];
    return (unsigned char *)v->data + at * size_of(v->dtype);
}

/* A block of count elements whose view starts at element first. */
static void set_block(tensor *t, int64_t count, int64_t first)
{
    const int64_t size = size_of(t->view.dtype);
    t->bytes = (size_t)(count * size);
    t->block = malloc(t->bytes + 1);
    if (!t->block) {
        fprintf(stderr, "a test is out of memory\n");
        abort();
    }
    memset(t->block, PATTERN, t->bytes);
    t->view.data = (unsigned char *)t->block + first * size;
}

tensor tensor_make(attn_dtype dtype, int64_t b, int64_t h, int64_t t, int64_t d)
{
    tensor r = {.view = {.shape = {b, h, t, d},
                         .stride = {h * t * d, t * d, d, 1},
                         .dtype = dtype}};
    set_block(&r, b * h * t * d, 0);
    return r;
}

/* An order of the dimensions, from the innermost out; the innermost is the
 * last one (unit stride) more often than not. */
static void draw_order(rng *r, int order[4])
{
    for (int i = 0; i < 4; i++)
        order[i] = 3 - i;
    const int from = rng_one_in(r, 4) ? 0 : 1;
    for (int i = 3; i > from; i--) {
        const int j = (int)rng_int(r, from, i);
        const int swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
}

tensor tensor_scattered(rng *r, int use, attn_dtype dtype, int64_t b, int64_t h,
                        int64_t t, int64_t d)
{
    tensor to = {.view = {.shape = {b, h, t, d}, .dtype = dtype}};
    int order[4];
    int64_t span = 1, first = 0;
    draw_order(r, order);
    for (int i = 0; i < 4; i++) {
        const int dim = order[i];
        const int64_t n = to.view.shape[dim];
        if (i > 0 && rng_one_in(r, 3))
            span += rng_int(r, 1, 5); /* a gap, of odd sizes too */
        else if (i == 0 && rng_one_in(r, 8))
            span = rng_int(r, 2, 3);
        if (use == TENSOR_INPUT && n > 1 && rng_one_in(r, 16)) {
            to.view.stride[dim] = 0;
            continue;
        }
        const int backwards = n > 1 && rng_one_in(r, 10);
        to.view.stride[dim] = backwards ? -span : span;
        if (backwards)
            first += (n - 1) * span;
        span *= n > 0 ? n : 1;
    }
    const int64_t margin = rng_int(r, 0, 9);
    set_block(&to, span + 2 * margin, first + margin);
    return to;
}

void tensor_free(tensor *t)
{
    free(t->block);
    t->block = NULL;
}

/* The nearest number of `fraction` bits behind the point of a leading 1, at
 * least 2^least apart, ties to even; the type ends at 2^end. */
static double round_to(double x, int fraction, int least, int end)
{
    int exponent;
    if (!isfinite(x) || x == 0.0)
        return x;
    frexp(x, &exponent); /* |x| in [2^(exponent-1), 2^exponent) */
    const int step = exponent - 1 - fraction;
    const double unit = ldexp(1.0, step > least ? step : least);
    const double rounded = nearbyint(x / unit) * unit;
    return fabs(rounded) < ldexp(1.0, end) ? rounded : copysign(HUGE_VAL, x);
}

/* IEEE 754 binary16. */
static uint16_t to_half(double value)
{
    const double x = fabs(round_to(value, 10, -24, 16));
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    int exponent;
    if (isnan(x))
        return 0x7E00;
    if (isinf(x))
        return sign | 0x7C00;
    if (x < 0x1p-14) /* subnormal: in units of 2^-24 */
        return (uint16_t)(sign | (unsigned)ldexp(x, 24));
    frexp(x, &exponent);
    const unsigned fraction = (unsigned)ldexp(x, 11 - exponent) & 1023u;
    return (uint16_t)(sign | (unsigned)(exponent + 14) << 10 | fraction);
}

/* The upper half of the float that is nearest among those with an empty lower
 * half. */
static uint16_t to_bfloat(double value)
{
    const float x = (float)round_to(value, 7, -133, 128);
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return isnan(x) ? 0x7FC0 : (uint16_t)(bits >> 16);
}

static void put(const attn_tensor *v, unsigned char *p, long double value)
{
    const float f = (float)value;
    const double g = (double)value;
    const uint16_t half = v->dtype == ATTN_F16 ? to_half(g) : to_bfloat(g);
    if (v->dtype == ATTN_F32)
        memcpy(p, &f, sizeof f);
    else if (v->dtype == ATTN_F64)
        memcpy(p, &g, sizeof g);
    else if (v->dtype == ATTN_F16 || v->dtype == ATTN_BF16)
        memcpy(p, &half, sizeof half);
    else
        *p = (unsigned char)value;
}

void tensor_set(const attn_tensor *view, int64_t b, int64_t h, int64_t t,
                int64_t d, double value)
{
    put(view, element(view, b, h, t, d), (long double)value);
}

/* The statement that follows, for every element, innermost dimension fastest.
 */
#define FOR_EACH(v, b, h, t, d)                         \
    for (int64_t b = 0; b < (v)->shape[0]; b++)         \
        for (int64_t h = 0; h < (v)->shape[1]; h++)     \
            for (int64_t t = 0; t < (v)->shape[2]; t++) \
                for (int64_t d = 0; d < (v)->shape[3]; d++)

void tensor_fill(const attn_tensor *view, double value)
{
    FOR_EACH(view, b, h, t, d)
    put(view, element(view, b, h, t, d), (long double)value);
}

void tensor_normal(const attn_tensor *view, rng *r, double factor)
{
    FOR_EACH(view, b, h, t, d)
    put(view, element(view, b, h, t, d), (long double)(factor * rng_normal(r)));
}

void tensor_assign(const attn_tensor *view, const attn_tensor *from)
{
    FOR_EACH(view, b, h, t, d)
    put(view, element(view, b, h, t, d), ref_get(from, b, h, t, d));
}

void tensor_scale_add(const attn_tensor *view, double factor,
                      const attn_tensor *x)
{
    FOR_EACH(view, b, h, t, d)
    put(view, element(view, b, h, t, d),
        (long double)factor * ref_get(view, b, h, t, d) +
            ref_get(x, b, h, t, d));
}

tensor tensor_copy(const attn_tensor *view, attn_dtype dtype)
{
    const int64_t *s = view->shape;
    tensor t = tensor_make(dtype, s[0], s[1], s[2], s[3]);
    tensor_assign(&t.view, view);
    return t;
}

attn_tensor tensor_slice(const attn_tensor *view, int dim, int64_t first,
                         int64_t n)
{
    attn_tensor part = *view;
    part.data = (unsigned char *)view->data +
                first * view->stride[dim] * size_of(view->dtype);
    part.shape[dim] = n;
    return part;
}

static int is_pattern(const unsigned char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] != PATTERN)
            return 0;
    return 1;
}

int tensor_is_pattern(const attn_tensor *view, int64_t b, int64_t h, int64_t t,
                      int64_t d)
{
    return is_pattern(element(view, b, h, t, d), (size_t)size_of(view->dtype));
}

int tensor_surroundings_intact(const tensor *t)
{
    /* A copy in which the elements themselves are patterns again. */
    tensor copy = *t;
    const ptrdiff_t first =
        (unsigned char *)t->view.data - (unsigned char *)t->block;
    copy.block = malloc(t->bytes + 1);
    if (!copy.block)
        abort();
    memcpy(copy.block, t->block, t->bytes);
    copy.view.data = (unsigned char *)copy.block + first;
    FOR_EACH(&copy.view, b, h, i, d)
    memset(element(&copy.view, b, h, i, d), PATTERN,
           (size_t)size_of(t->view.dtype));
    const int intact = is_pattern(copy.block, t->bytes);
    free(copy.block);
    return intact;
}
