/*
 * The kernels for every processor: vectors of 16 bytes, of which the compiler
 * makes what there is. There is no fused multiply-add.
 */
#include "attn_internal.h"

#include "kernels/kernels_base.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define LEVEL generic
#define TARGET
#define VECTOR_BYTES 16

typedef float generic_floats __attribute__((vector_size(16)));
typedef int32_t generic_words __attribute__((vector_size(16)));
typedef uint16_t generic_halves
    __attribute__((vector_size(8), aligned(2), may_alias));

static inline generic_words generic_load(const uint16_t *p)
{
    return __builtin_convertvector(*(const generic_halves *)p, generic_words);
}

static inline generic_floats generic_from_bf16(const uint16_t *p)
{
    return (generic_floats)(generic_load(p) << 16);
}

/* from_f16 of four. */
static inline generic_floats generic_from_f16(const uint16_t *p)
{
    generic_words x = generic_load(p);
    generic_words magnitude = x & 0x7fff, sign = (x & 0x8000) << 16;
    generic_words large =
        (magnitude << 13) + (int32_t)REBIAS +
        ((magnitude >= (int32_t)F16_INF) & (int32_t)(REBIAS_INF - REBIAS));
    generic_floats small =
        __builtin_convertvector(magnitude, generic_floats) * 0x1p-24f;
    generic_words is_small = magnitude < (int32_t)F16_NORMAL;

    return (generic_floats)(sign | ((generic_words)small & is_small) |
                            (large & ~is_small));
}

#if defined(__SSE2__)
#define BYTE_STEP 16
#define NONZERO_BYTES(p)                                         \
    ((uint64_t)(0xffff ^ _mm_movemask_epi8(_mm_cmpeq_epi8(       \
                             _mm_loadu_si128((const void *)(p)), \
                             _mm_setzero_si128()))))
#else
#define BYTE_STEP 1
#define NONZERO_BYTES(p) ((uint64_t)(*(p) != 0))
#endif

#include "real_f32.h"
#define SUFFIX f32
#define ZIP_LO ZIP4_LO
#define ZIP_HI ZIP4_HI
#define IOTA IOTA4
#define EVEN EVEN4
#define ODD ODD4
#define STEPS 1
#define V_MAX(a, b) GENERIC_MAX(a, b)
#define V_MIN(a, b) GENERIC_MIN(a, b)
#define V_BITS(c) GENERIC_BITS(c)
#define V_KEEP(v, bits) GENERIC_KEEP(v, bits)
#define V_FMA(a, b, c) ((a) * (b) + (c))
#define V_FROM_F16(p) generic_from_f16(p)
#define V_FROM_BF16(p) generic_from_bf16(p)
#include "kernels/kernels_tmpl.h"

#include "real_f64.h"
#define SUFFIX f64
#define ZIP_LO ZIP2_LO
#define ZIP_HI ZIP2_HI
#define IOTA IOTA2
#define STEPS 1
#define V_MAX(a, b) GENERIC_MAX(a, b)
#define V_MIN(a, b) GENERIC_MIN(a, b)
#define V_BITS(c) GENERIC_BITS(c)
#define V_KEEP(v, bits) GENERIC_KEEP(v, bits)
#define V_FMA(a, b, c) ((a) * (b) + (c))
#include "kernels/kernels_tmpl.h"
