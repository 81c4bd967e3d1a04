/* Conversion of rows of numbers for other modules. */
#ifndef ATTN_CONVERT_H
#define ATTN_CONVERT_H

/* y[e sy] = x[e sx] for e < n, sx and sy in elements of their types. */
typedef void (*attn__convert_fn)(const void *x, int64_t sx, void *y, int64_t sy,
                                 int64_t n);

/* The function for these two types, each F32, F64, F16 or BF16. */
attn__convert_fn attn__convert_row(attn_dtype from, attn_dtype to);

#endif
