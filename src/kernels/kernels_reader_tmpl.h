/*
 * Template of a reader: the loops over rows of K and V for each way their
 * numbers are stored, and the table of all kernels with them; a part of
 * kernels_tmpl.h. Binds, beside what that one does, and forgets at its end:
 *   READER         pasted into names
 *   STREAMS        runs of rows that are read in turn
 *   AHEAD_BYTES(n, row, narrow)   how far ahead n queries ask for rows of so
 *                  many bytes, of 16-bit numbers if narrow
 *   AHEAD_LEVEL    of the caches, that is asked for: 3 the first, 2 the second
 *   TOGETHER(n)    keys whose products with n queries are summed together
 */
#define PASTE2(a, b) a##_##b
#define NAME2(a, b) PASTE2(a, b)
/* A loop of this reader for numbers stored so. */
#define OF(name, stored) N(NAME2(NAME2(name, READER), stored))
/* Keys of a run taken together: those of all runs fill a vector. */
#define STRIP (VL / STREAMS)

#define STORED same
#define S R
#define NARROW 0
#define FROM(p) LOAD(p)
#define FROM_ONE(x) (x)
#define PARTS 1
#define FROM_PARTS(p, x) ((x)[0] = FROM(p))
#define ORDER_PARTS(o, ldo, n, width, back) ((void)0)
#include "kernels_rows_tmpl.h"

/* 16 bits, for the type that has them. */
#if defined(V_FROM_F16)
#define STORED f16
#define S uint16_t
#define NARROW 1
#define FROM(p) V_FROM_F16(p)
#define FROM_ONE(x) from_f16(x)
#define PARTS 2
#define FROM_PARTS(p, x) ((x)[0] = FROM(p), (x)[1] = FROM((p) + VL))
#define ORDER_PARTS(o, ldo, n, width, back) ((void)0)
#include "kernels_rows_tmpl.h"

#define STORED bf16
#define S uint16_t
#define NARROW 1
#define FROM(p) V_FROM_BF16(p)
#define FROM_ONE(x) from_bf16(x)
#define PARTS 2
#define FROM_PARTS(p, x) N(split_bf16)(p, x)
#define ORDER_PARTS(o, ldo, n, width, back) \
    N(order_bf16)(o, ldo, n, width, back)
#include "kernels_rows_tmpl.h"

#define PAIRED 0, 0, 2 * VL
#define EACH_STORED(name)                             \
    {                                                 \
        OF(name, same), OF(name, f16), OF(name, bf16) \
    }
#else
#define PAIRED 0
#define EACH_STORED(name) \
    {                     \
        OF(name, same)    \
    }
#endif

#define TABLE_OF(suffix) attn__kernels_##suffix
#define TABLE(suffix) TABLE_OF(suffix)
const TABLE(SUFFIX) N(NAME2(attn__kernels, READER)) = {STREAMS,
                                                       N(pack),
                                                       N(unpack),
                                                       N(add_rows),
                                                       N(byte_bits),
                                                       N(number_bits),
                                                       N(transpose_bits),
                                                       N(softmax),
                                                       N(exp),
                                                       N(gradient),
                                                       N(dot),
                                                       N(cap),
                                                       N(alibi),
                                                       N(alibi_row),
                                                       N(rescale),
                                                       N(nonfinite),
                                                       EACH_STORED(dots),
                                                       {PAIRED},
                                                       N(row_weights),
                                                       EACH_STORED(add_rows_of),
                                                       EACH_STORED(widen),
                                                       N(row)};

#undef TABLE_OF
#undef TABLE
#undef EACH_STORED
#undef PAIRED
#undef PASTE2
#undef NAME2
#undef OF
#undef STRIP
#undef READER
#undef STREAMS
#undef AHEAD_BYTES
#undef AHEAD_LEVEL
#undef TOGETHER
