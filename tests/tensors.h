/*
 * Tensors of tests: memory with a view on it. The view may be contiguous or
 * lie scattered in a larger block, in any order of dimensions, with gaps,
 * negative strides and (for inputs) strides of 0. All bytes of the block that
 * belong to no element hold a pattern that is a NaN in all types: an input
 * read outside its view spoils the result, an output written outside its view
 * spoils the pattern.
 */
#ifndef TESTS_TENSORS_H
#define TESTS_TENSORS_H

#include "attn.h"
#include "rng.h"

typedef struct tensor {
    attn_tensor view;
    void *block; /* from malloc */
    size_t bytes;
} tensor;

/* Which strides tensor_scattered may draw. */
#define TENSOR_OUTPUT 0 /* every element has its own place */
#define TENSOR_INPUT 1  /* strides of 0 too */

/* Contiguous, elements hold the pattern. */
tensor tensor_make(attn_dtype dtype, int64_t b, int64_t h, int64_t t,
                   int64_t d);
/* One of many layouts drawn from r; elements hold the pattern. */
tensor tensor_scattered(rng *r, int use, attn_dtype dtype, int64_t b, int64_t h,
                        int64_t t, int64_t d);
/* A contiguous copy of the elements of a view, in type dtype. */
tensor tensor_copy(const attn_tensor *view, attn_dtype dtype);
void tensor_free(tensor *t);

void tensor_set(const attn_tensor *view, int64_t b, int64_t h, int64_t t,
                int64_t d, double value);
/* Every element the same. */
void tensor_fill(const attn_tensor *view, double value);
/* Standard normal numbers times factor, rounded to the type. */
void tensor_normal(const attn_tensor *view, rng *r, double factor);
/* Elements from `from`, which has the same shape. */
void tensor_assign(const attn_tensor *view, const attn_tensor *from);

/* view = factor view + x, rounded once; shapes are equal. */
void tensor_scale_add(const attn_tensor *view, double factor,
                      const attn_tensor *x);

/* The part of dimension dim from first on, n long: no copy. */
attn_tensor tensor_slice(const attn_tensor *view, int dim, int64_t first,
                         int64_t n);

/* Do all bytes outside the view still hold the pattern? */
int tensor_surroundings_intact(const tensor *t);
/* Does this element still hold the pattern? */
int tensor_is_pattern(const attn_tensor *view, int64_t b, int64_t h, int64_t t,
                      int64_t d);

#endif
