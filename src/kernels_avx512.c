/* The kernels for processors with AVX-512 F, DQ, BW and VL. */
#include "attn_internal.h"

#include "kernels/kernels_base.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define LEVEL avx512
#define TARGET \
    __attribute__((target("prfchw,avx512f,avx512dq,avx512bw,avx512vl,fma")))
#define VECTOR_BYTES 64
#define BYTE_STEP 64
#define NONZERO_BYTES(p)                                    \
    ((uint64_t)_mm512_test_epi8_mask(_mm512_loadu_si512(p), \
                                     _mm512_loadu_si512(p)))

#include "real_f32.h"
#define SUFFIX f32
#define ZIP_LO ZIP16_LO
#define ZIP_HI ZIP16_HI
#define IOTA IOTA16
#define EVEN EVEN16
#define ODD ODD16
#define V_BITS(c) _mm512_movepi32_mask((__m512i)(c))
#define V_KEEP(v, bits)                                                 \
    ((V)_mm512_mask_mov_ps((__m512)SPLAT(R_NEG_INF), (__mmask16)(bits), \
                           (__m512)(v)))
#define STEPS 16
#define STEP_SHIFT 19
#define V_LOOK_UP(table, t) \
    ((V)_mm512_permutexvar_ps((__m512i)(t), (__m512)(table)))
#define V_LOOK_UP_BITS(table, t) \
    ((VI)_mm512_permutexvar_epi32((__m512i)(t), (__m512i)(table)))
#define V_FMA_ABOVE(x, low, a, b, c)                                 \
    ((V)_mm512_maskz_fmadd_ps(                                       \
        _mm512_cmp_ps_mask((__m512)(x), (__m512)(low), _CMP_NLE_UQ), \
        (__m512)(a), (__m512)(b), (__m512)(c)))
#define V_MAX(a, b) ((V)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define V_MIN(a, b) ((V)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define V_FMA(a, b, c) \
    ((V)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define V_FROM_F16(p) \
    ((V)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)(p))))
#define V_FROM_BF16(p)     \
    ((V)_mm512_slli_epi32( \
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(p))), 16))
#include "kernels/kernels_tmpl.h"

#include "real_f64.h"
#define SUFFIX f64
#define ZIP_LO ZIP8_LO
#define ZIP_HI ZIP8_HI
#define IOTA IOTA8
#define V_BITS(c) _mm512_movepi64_mask((__m512i)(c))
#define V_KEEP(v, bits)                                                 \
    ((V)_mm512_mask_mov_pd((__m512d)SPLAT(R_NEG_INF), (__mmask8)(bits), \
                           (__m512d)(v)))
#define STEPS 8
#define STEP_SHIFT 49
#define V_LOOK_UP(table, t) \
    ((V)_mm512_permutexvar_pd((__m512i)(t), (__m512d)(table)))
#define V_LOOK_UP_BITS(table, t) \
    ((VI)_mm512_permutexvar_epi64((__m512i)(t), (__m512i)(table)))
#define V_FMA_ABOVE(x, low, a, b, c)                                   \
    ((V)_mm512_maskz_fmadd_pd(                                         \
        _mm512_cmp_pd_mask((__m512d)(x), (__m512d)(low), _CMP_NLE_UQ), \
        (__m512d)(a), (__m512d)(b), (__m512d)(c)))
#define V_MAX(a, b) ((V)_mm512_max_pd((__m512d)(a), (__m512d)(b)))
#define V_MIN(a, b) ((V)_mm512_min_pd((__m512d)(a), (__m512d)(b)))
#define V_FMA(a, b, c) \
    ((V)_mm512_fmadd_pd((__m512d)(a), (__m512d)(b), (__m512d)(c)))
#include "kernels/kernels_tmpl.h"
#endif
