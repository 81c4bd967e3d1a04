/* Which of the compiled instruction-set levels this processor runs. */
#ifndef ATTN_CPU_H
#define ATTN_CPU_H

#define ATTN__LEVEL_GENERIC 0
#define ATTN__LEVEL_AVX2 1       /* AVX2 and FMA */
#define ATTN__LEVEL_AVX512 2     /* AVX-512 F, DQ, BW, VL */
#define ATTN__LEVEL_AVX512_TWO 3 /* the same; memory is read in two runs */

/* Found once. The environment variable ATTN_CPU_LEVEL (generic, avx2, avx512,
 * avx512-two) can change it, for tests, to what this processor can run. */
int attn__cpu_level(void);

#endif
