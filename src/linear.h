/* Linear layers through GEMM, for other modules. */
#ifndef ATTN_LINEAR_H
#define ATTN_LINEAR_H

#include "gemm.h"
#include "threads.h"

/* Checks of attn_linear without those of overlap; NULL bias is allowed. Names
 * are those of the arguments. */
attn_status attn__linear_check(const char *call, int32_t layout,
                               const char *x_name, const attn_tensor *x,
                               const char *w_name, const attn_tensor *w,
                               const char *bias_name, const attn_tensor *bias,
                               const char *y_name, const attn_tensor *y);

/* Scratch memory of a layer with `in` inputs on so many threads. */
size_t attn__linear_bytes(const attn__blas *blas, attn_dtype dtype, int64_t in,
                          int32_t threads);

/* y = x W + bias; everything has been checked. */
void attn__linear_run(const attn__executor *executor, const attn__blas *blas,
                      int32_t layout, const attn_tensor *x,
                      const attn_tensor *w, const attn_tensor *bias,
                      const attn_tensor *y, void *work);

#endif
