/* Processor features, asked once. */
#include "attn_internal.h"

#include "cpu.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__)
#include <cpuid.h>

/* Conversion of float16, which older compilers' builtin does not know. Whether
 * the operating system keeps its registers is AVX's question. */
static bool has_f16c(void)
{
    unsigned a, b, c = 0, d;

    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

/*
 * Those that read memory best in two runs: AMD's Zen 5 (family 26), and Intel's
 * Sapphire and Emerald Rapids (family 6, models 143 and 207), which are alike
 * (decoding on the latter, one thread: 12 heads of width 64 over 4096 keys 0.96
 * of the time of four runs, 32 heads of 128 over 8 0.91 to 0.96, over 32 1.00).
 */
static bool reads_two_runs(void)
{
    unsigned a = 0, b = 0, c = 0, d = 0, family, model;
    bool amd, intel;

    if (!__get_cpuid(0, &a, &b, &c, &d))
        return false;
    amd = memcmp(&b, "Auth", 4) == 0 && memcmp(&d, "enti", 4) == 0 &&
          memcmp(&c, "cAMD", 4) == 0;
    intel = memcmp(&b, "Genu", 4) == 0 && memcmp(&d, "ineI", 4) == 0 &&
            memcmp(&c, "ntel", 4) == 0;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return false;
    family = (a >> 8 & 0xf) + (a >> 20 & 0xff);
    model = (a >> 4 & 0xf) + (a >> 12 & 0xf0);
    return (amd && family == 26) ||
           (intel && family == 6 && (model == 143 || model == 207));
}
#endif

static int detect(void)
{
#if defined(__GNUC__) && defined(__x86_64__)
    /* Both builtins also ask the operating system (XCR0). */
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return reads_two_runs() ? ATTN__LEVEL_AVX512_TWO : ATTN__LEVEL_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        has_f16c())
        return ATTN__LEVEL_AVX2;
#endif
    return ATTN__LEVEL_GENERIC;
}

/* What the environment asks for, if the processor can run it. */
static int wanted(int level)
{
    static const char *const names[] = {"generic", "avx2", "avx512",
                                        "avx512-two"};
    int most = level == ATTN__LEVEL_AVX512 ? ATTN__LEVEL_AVX512_TWO : level;
    const char *name = getenv("ATTN_CPU_LEVEL");

    for (int i = 0; name && i <= most; i++)
        if (strcmp(name, names[i]) == 0)
            return i;
    return level;
}

int attn__cpu_level(void)
{
    /* 0 = not asked yet. Two threads may both ask; they find the same. */
    static atomic_int known;
    int level = atomic_load_explicit(&known, memory_order_relaxed) - 1;

    if (level < 0) {
        level = wanted(detect());
        atomic_store_explicit(&known, level + 1, memory_order_relaxed);
    }
    return level;
}
