/* The kernels for processors with AVX2, FMA and F16C. */
#include "attn_internal.h"

#include "kernels/kernels_base.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define LEVEL avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define VECTOR_BYTES 32
#define BYTE_STEP 32
#define NONZERO_BYTES(p)                                          \
    ((uint64_t)(uint32_t)~_mm256_movemask_epi8(_mm256_cmpeq_epi8( \
        _mm256_loadu_si256((const void *)(p)), _mm256_setzero_si256())))

#include "real_f32.h"
#define SUFFIX f32
#define ZIP_LO ZIP8_LO
#define ZIP_HI ZIP8_HI
#define INNER_LO INNER8_LO
#define INNER_HI INNER8_HI
#define HALF_LO HALF8_LO
#define HALF_HI HALF8_HI
#define IOTA IOTA8
#define EVEN EVEN8
#define ODD ODD8
#define V_BITS(c) _mm256_movemask_ps((__m256)(c))
#define V_KEEP(v, bits) GENERIC_KEEP(v, bits)
#define STEPS 1
#define V_MAX(a, b) ((V)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define V_MIN(a, b) ((V)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define V_FMA(a, b, c) \
    ((V)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define V_FROM_F16(p) ((V)_mm256_cvtph_ps(_mm_loadu_si128((const void *)(p))))
#define V_FROM_BF16(p)     \
    ((V)_mm256_slli_epi32( \
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(p))), 16))
#include "kernels/kernels_tmpl.h"

#include "real_f64.h"
#define SUFFIX f64
#define ZIP_LO ZIP4_LO
#define ZIP_HI ZIP4_HI
#define INNER_LO INNER4_LO
#define INNER_HI INNER4_HI
#define HALF_LO HALF4_LO
#define HALF_HI HALF4_HI
#define IOTA IOTA4
#define V_BITS(c) _mm256_movemask_pd((__m256d)(c))
#define V_KEEP(v, bits) GENERIC_KEEP(v, bits)
#define STEPS 1
#define V_MAX(a, b) ((V)_mm256_max_pd((__m256d)(a), (__m256d)(b)))
#define V_MIN(a, b) ((V)_mm256_min_pd((__m256d)(a), (__m256d)(b)))
#define V_FMA(a, b, c) \
    ((V)_mm256_fmadd_pd((__m256d)(a), (__m256d)(b), (__m256d)(c)))
#include "kernels/kernels_tmpl.h"
#endif
