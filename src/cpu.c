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

/* Family 26 of AMD. */
static bool is_zen5(void)
{
    unsigned a = 0, b = 0, c = 0, d = 0;

    if (!__get_cpuid(0, &a, &b, &c, &d) || memcmp(&b, "Auth", 4) != 0 ||
        memcmp(&d, "enti", 4) != 0 || memcmp(&c, "cAMD", 4) != 0)
        return false;
    return __get_cpuid(1, &a, &b, &c, &d) &&
           (a >> 8 & 0xf) + (a >> 20 & 0xff) == 26;
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
        return is_zen5() ? ATTN__LEVEL_ZEN5 : ATTN__LEVEL_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        has_f16c())
        return ATTN__LEVEL_AVX2;
#endif
    return ATTN__LEVEL_GENERIC;
}

/* What the environment asks for, if the processor can run it. */
static int wanted(int level)
{
    static const char *const names[] = {"generic", "avx2", "avx512", "zen5"};
    int most = level == ATTN__LEVEL_AVX512 ? ATTN__LEVEL_ZEN5 : level;
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
