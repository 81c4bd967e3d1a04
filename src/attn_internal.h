/*
 * First include of every source file: the public interface, and the few things
 * that all modules share. Who may include whom (levels; a level uses only lower
 * ones, modules of a level do not include each other, tests check it):
 *
 *   0  attn_internal.h half.h real_f32.h real_f64.h
 *   1  status check alloc threads cpu view context    kernels/
 *   2  gemm softmax mask heads linear                 (linear also uses gemm)
 *      rotary alibi merge convert
 *   3  sdpa                                           4  mha cache
 */
#ifndef ATTN_INTERNAL_H
#define ATTN_INTERNAL_H

#include <attn.h>

#include <assert.h>
#include <stdalign.h>
#include <stdbool.h>

/* A false ASSERT is a bug of ours: arguments are checked before, elsewhere. */
#define ASSERT(condition) assert(condition)

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* Scratch memory and each piece in it start at a cache line, which is also the
 * widest vector. */
#define ATTN__ALIGNMENT 64

#if defined(__GNUC__)
#define ATTN__PRINTF(n, first) __attribute__((format(printf, n, first)))
#else
#define ATTN__PRINTF(n, first)
#endif

static inline int64_t attn__ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static inline int64_t attn__round_up(int64_t a, int64_t b)
{
    return attn__ceil_div(a, b) * b;
}

/* Bytes of an element; 0 for an unknown type. */
static inline size_t attn__dtype_bytes(attn_dtype dtype)
{
    switch (dtype) {
    case ATTN_F32:
        return sizeof(float);
    case ATTN_F64:
        return sizeof(double);
    case ATTN_U8:
        return 1;
    case ATTN_F16:
    case ATTN_BF16:
        return 2;
    default:
        return 0;
    }
}

#endif
