/*
 * Chooses among the levels of the kernels. kernels_generic.c, kernels_avx2.c
 * and kernels_avx512.c instantiate kernels_tmpl.h for both types. They differ
 * in the width of a vector, in two operations the compiler cannot be trusted to
 * choose (maximum and fused multiply-add), and in the target attribute; so no
 * build flag decides which code exists. Levels agree within rounding, not bit
 * for bit.
 *
 * GCC's vector extensions carry the rest; gcc and clang have them on every
 * processor.
 */
#include "attn_internal.h"

#include "cpu.h"
#include "kernels/kernels.h"

#if defined(__x86_64__)
#define LEVELS(suffix)                             \
    {                                              \
        &attn__kernels_four_##suffix##_generic,    \
            &attn__kernels_four_##suffix##_avx2,   \
            &attn__kernels_four_##suffix##_avx512, \
            &attn__kernels_two_##suffix##_avx512   \
    }
#else
#define LEVELS(suffix)                         \
    {                                          \
        &attn__kernels_four_##suffix##_generic \
    }
#endif

const attn__kernels_f32 *attn__kernels_get_f32(void)
{
    static const attn__kernels_f32 *const levels[] = LEVELS(f32);
    return levels[attn__cpu_level()];
}

const attn__kernels_f64 *attn__kernels_get_f64(void)
{
    static const attn__kernels_f64 *const levels[] = LEVELS(f64);
    return levels[attn__cpu_level()];
}
