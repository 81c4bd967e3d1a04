/*
 * Numbers of 16 bits as the bits of a float: float16 (1 bit of sign, 5 of
 * exponent, 10 of fraction) and bfloat16 (the upper half of a float). Nothing
 * depends on the rounding mode or on what the processor does with subnormal
 * numbers, and nothing branches.
 */
#ifndef ATTN_HALF_H
#define ATTN_HALF_H

#include <string.h>

/* A float: 23 bits of fraction below 8 of exponent. */
#define F32_SIGN 0x80000000u
#define F32_INF 0x7f800000u
#define F32_QUIET 0x00400000u /* of a NaN: it raises nothing */
#define F16_INF 0x7c00u
#define F16_QUIET 0x0200u
#define F16_NORMAL 0x0400u /* the least normal one, 2^-14 */
/* The exponents' biases are 127 and 15; their last values 255 and 31. */
#define REBIAS ((127u - 15) << 23)
#define REBIAS_INF ((255u - 31) << 23)

static inline uint32_t bits_of(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float of_bits(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

/* a if the condition holds, else b. Not written with ?:, of which gcc makes
 * branches that it does not vectorise. */
static inline uint32_t pick(bool condition, uint32_t a, uint32_t b)
{
    uint32_t mask = 0u - (uint32_t)condition;

    return (a & mask) | (b & ~mask);
}

static inline uint32_t bits_of_f16(uint16_t x)
{
    uint32_t a = x & 0x7fffu;
    uint32_t large = (a << 13) + pick(a < F16_INF, REBIAS, REBIAS_INF);
    /* A multiple of 2^-24, which as a float is normal, or 0. */
    uint32_t small = bits_of((float)(int32_t)a * 0x1p-24f);

    large |= pick(a > F16_INF, F32_QUIET, 0);
    return pick(a < F16_NORMAL, small, large) | (uint32_t)(x & 0x8000u) << 16;
}

static inline uint32_t bits_of_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;

    return bits | pick((bits & ~F32_SIGN) > F32_INF, F32_QUIET, 0);
}

#endif
