/*
 * What the levels of the kernels share: the numbers of their polynomials, lists
 * of lanes, and how loops are unrolled. The includer then binds what
 * kernels_tmpl.h asks for, and includes that for both types.
 */
#ifndef ATTN_KERNELS_BASE_H
#define ATTN_KERNELS_BASE_H

#include "half.h"
#include "kernels/kernels.h"

#include <fenv.h>
#include <string.h>

#if !defined(__GNUC__)
#error "the vector extensions of gcc or clang are needed"
#endif

/* For functions whose loops are unrolled once their arguments are known; ROLLED
 * for loops that run seldom or are long enough as they are. */
#define ALWAYS_INLINE __attribute__((always_inline)) static inline

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_BY_4 _Pragma("clang loop unroll_count(4)")
#define ROLLED _Pragma("clang loop unroll(disable)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define UNROLL_BY_4 _Pragma("GCC unroll 4")
#define ROLLED _Pragma("GCC unroll 1")
#endif

/* Lanes of a and b, in gcc 12 and clang by the same builtin. */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (VI){__VA_ARGS__})
#endif

/* a > b ? a : b, so b if either is NaN: what x86's maximum does. */
#define GENERIC_MAX(a, b) SELECT((a) > (b), a, b)
#define GENERIC_MIN(a, b) SELECT((a) < (b), a, b)

/* A bit per lane; -inf in the lanes whose bit is 0. */
#define GENERIC_BITS(condition) N(bits_of)(condition)
#define GENERIC_KEEP(v, bits) \
    SELECT((((VI){0} + (I)(bits)) & (VI){IOTA}) != (VI){0}, v, SPLAT(R_NEG_INF))

/* A number stored in 16 bits. */
static inline float from_bf16(uint16_t x)
{
    return of_bits(bits_of_bf16(x));
}

static inline float from_f16(uint16_t x)
{
    return of_bits(bits_of_f16(x));
}

/* clang-format off */
/*
 * 2^f for |f| <= 1/2 is 1 + f q(f), q of degree 5 (float) or 10 (double): the
 * minimax polynomials of relative error 2.6e-9 and 1.8e-17 under the condition
 * p(0) = 1, computed by a Remez exchange in 60 digits. Half a unit in the last
 * place is 6.0e-8 and 1.1e-16, so rounding decides; a degree less (4.3e-7,
 * 3.0e-16) would show. The condition makes the weight of a maximum exactly 1.
 */
#define POLY_f32                                                               \
    0.000155946781613f, 0.00134066439024f, 0.00961769297299f,                  \
    0.0555031055101f, 0.240226527829f, 0.693147214968f
#define POLY_f64                                                               \
    4.078071929588336665e-10, 7.0725704128144235096e-9,                        \
    1.0180647659234138888e-7, 1.3215442675329822143e-6,                        \
    1.5252727385193868197e-5, 0.0001540353044157213033,                        \
    0.0013333558153439964747, 0.0096181291076070023796,                        \
    0.055504108664790394552, 0.24022650695910098007, 0.69314718055994569675
/*
 * With the powers 2^(i/STEPS) in a table |f| <= 1/(2 STEPS) is left, and q of
 * degree 2 (1.6e-9) or 6 (2.8e-18). The table has their bits less those that
 * adding 2^FRACTION_BITS i/STEPS makes, and what is missing of the numbers they
 * are, relative to them.
 */
#define STEP_POLY_f32 0.0555021363903f, 0.24023428805f, 0.693147182667f
#define STEP_POLY_f64                                                          \
    1.5251844150118251504e-5, 0.00015404521962683275005,                       \
    0.0013333558238962766852, 0.0096181290851777503087,                        \
    0.055504108664802350856, 0.24022650695911516188, 0.69314718055994531811
#define STEP_BITS_f32                                                          \
    0, -152893, -289342, -408621, -509968, -592590, -655657, -698305, -719629, \
    -718684, -694486, -646004, -572163, -471841, -343865, -187011
#define STEP_REST_f32                                                          \
    0.0f, 4.62854708e-8f, -1.19921571e-8f, 4.72978236e-8f, 3.19341809e-8f,     \
    3.62105731e-8f, -3.09907208e-8f, -7.47521317e-9f, 1.71142713e-8f,          \
    -3.04768342e-8f, 5.23333425e-9f, 6.10759162e-9f, -1.47196054e-8f,          \
    -5.25879512e-9f, -6.12825982e-9f, 5.14060921e-9f
#define STEP_BITS_f64                                                          \
    0, -0x8d47c382ae85, -0xf901f5ce48eb, -0x140252ac9d5d9, -0x15f619980c433,   \
    -0x1531abdd55f25, -0x1176066a52c53, -0xa7e723045b79
#define STEP_REST_f64                                                          \
    0.0, -2.7939114859515731e-17, 3.3484623336251524e-17,                      \
    1.9572585293112037e-17, -6.8358086576619225e-17, 5.1548301170786786e-17,   \
    4.8751605262270616e-17, 1.7901269076045133e-17
/* Adding 1.5 * 2^FRACTION_BITS rounds to an integer and leaves it in the low
 * bits; the exponent's bias is added along the way. */
#define MAGIC_f32 0x1.8p23f
#define MAGIC_f64 0x1.8p52
#define BIAS_f32 127.0f
#define BIAS_f64 1023.0
#define FRACTION_BITS_f32 23
#define FRACTION_BITS_f64 52
/* log2(e) as the nearest number of the type, and what that one is short of. */
#define LOG2E_HI_f32 1.4426950408889634f
#define LOG2E_HI_f64 1.4426950408889634
#define LOG2E_LO_f32 1.9259629911266175e-8f
#define LOG2E_LO_f64 2.0355273740931032e-17

/*
 * tanh y = y P(y^2) / Q(y^2) up to TANH_END, by minimax quotients of degrees 9
 * and 8 (float, relative error 1.7e-8) and 15 and 14 (double, 5.5e-17), made by
 * a Remez exchange in 60 digits; Q has the leading coefficient 1. For float y
 * is all of x, and beyond 8.8 the hyperbolic tangent is 1 within 2^-24.3; for
 * double it is x/2 (TANH_HALVES), as twice the range takes degrees of 20, and 1
 * is reached within 2^-54.
 */
#define TANH_P_f32                                                             \
    0.0173101205889f, 26.3362687252f, 4431.72331088f, 169063.353499f,          \
    1262232.85502f
#define TANH_Q_f32                                                             \
    417.917822386f, 32736.7633638f, 589807.455369f, 1262232.85502f
#define TANH_END_f32 8.8f
#define TANH_P_f64                                                             \
    0.00728452208083955746, 66.250250696351084741, 85790.142434138937589,      \
    36288721.668369910571, 6242862183.6066914482, 451035735330.49174914,       \
    12183676065788.013626, 81978548412302.165673
#define TANH_Q_f64                                                             \
    2813.9783376093314706, 1989906.6682425674044, 529826917.50321186055,       \
    59339323635.499459416, 2690515570319.9361091, 39509858869888.665517,       \
    81978548412302.165673
#define TANH_END_f64 9.53
#define TANH_HALVES_f32 0
#define TANH_HALVES_f64 1

#define ZIP2_LO 0, 2
#define ZIP2_HI 1, 3
#define ZIP4_LO 0, 4, 1, 5
#define ZIP4_HI 2, 6, 3, 7
#define ZIP8_LO 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP8_HI 4, 12, 5, 13, 6, 14, 7, 15
#define ZIP16_LO 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP16_HI 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define INNER4_LO 0, 4, 2, 6
#define INNER4_HI 1, 5, 3, 7
#define INNER8_LO 0, 8, 1, 9, 4, 12, 5, 13
#define INNER8_HI 2, 10, 3, 11, 6, 14, 7, 15
#define HALF4_LO 0, 1, 4, 5
#define HALF4_HI 2, 3, 6, 7
#define HALF8_LO 0, 1, 2, 3, 8, 9, 10, 11
#define HALF8_HI 4, 5, 6, 7, 12, 13, 14, 15
#define EVEN4 0, 2, 4, 6
#define ODD4 1, 3, 5, 7
#define EVEN8 EVEN4, 8, 10, 12, 14
#define ODD8 ODD4, 9, 11, 13, 15
#define EVEN16 EVEN8, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD16 ODD8, 17, 19, 21, 23, 25, 27, 29, 31
#define IOTA2 1, 2
#define IOTA4 1, 2, 4, 8
#define IOTA8 IOTA4, 16, 32, 64, 128
#define IOTA16 IOTA8, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768
/* clang-format on */

#endif
