/* Which of the compiled instruction-set levels this processor runs. */
#ifndef ATTN_CPU_H
#define ATTN_CPU_H

#define ATTN__LEVEL_GENERIC 0
#define ATTN__LEVEL_AVX2 1   /* AVX2 and FMA */
#define ATTN__LEVEL_AVX512 2 /* AVX-512 F, DQ, BW, VL */

/* Found once. The environment variable ATTN_CPU_LEVEL (generic, avx2, avx512)
 * can lower it, for tests; it can not raise it. */
int attn__cpu_level(void);

#endif
