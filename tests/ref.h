/*
 * The oracle: attention and multi-head attention written straight from the
 * formulas of attn.h, section 2, in long double, one key after the other, for
 * any strides. It shares nothing with the library but the types of attn.h, and
 * it takes only arguments that the library accepts (it checks nothing).
 *
 * Beside every number it gives the largest error that a computation in the
 * type of the inputs may have. The bound is derived, not tuned. With u half
 * the machine epsilon of the type, n the number of keys of the row:
 *
 *   score     dz(j) = u ((D+8) P(j) + 8 A(j) + 4 (|z(j)| + |m|))
 *             P(j) = |scale| sum |q||k|: a sum of D products, in any order,
 *             errs by at most D u P; 8 u covers scale, the factor log2(e) and
 *             the rounding of each. A(j) = sum of the |ADD| values. The last
 *             term is the rounding of z - m and of a stored LSE.
 *   weight    a weight is exp(z-m)/sum: wrong scores multiply it by a factor
 *             between exp(-dz) and exp(dz), and the sum by 1 +- s,
 *             s = sum w (exp(dz)-1); c = u (2n+16) is for exp itself, the
 *             sum, the factors of a running maximum and the division:
 *             dw = (w (exp(dz)-1) + w s + c w) / (1-s)
 *   out       do = (sum |v| w (exp(dz)-1) + |out| s + c sum w|v|) / (1-s)
 *             and never more than the distance from out to the farthest
 *             visible v: any weights with sum 1 stay within the values.
 *   lse       dL = s/(1-s) or max dz, if that is smaller; plus c and u |L|.
 *
 * The smallest normal number is added wherever a product may underflow. In a
 * layer the errors of the projections enter through dz and v and go through
 * the output projection with the magnitudes of its weights. Values that are
 * not finite have no bound: they are compared by class.
 */
#ifndef TESTS_REF_H
#define TESTS_REF_H

#include "attn.h"

typedef struct ref_num {
    long double value;
    /* REF_UNTOUCHED: the library must not write here. REF_NOT_FINITE: inf or
     * NaN, as an infinite v meets a weight that the type may round to 0. */
    long double error;
} ref_num;

#define REF_UNTOUCHED (-1.0L)
#define REF_NOT_FINITE (-2.0L)

/* Contiguous, in the shape that the argument of the same name must have. */
typedef struct ref_tensor {
    int64_t shape[4];
    ref_num *num;
} ref_tensor;

typedef struct ref_result {
    ref_tensor out;
    ref_tensor lse;
    ref_tensor weights;
    ref_tensor weights_mean;
} ref_result;

/* What attn_sdpa with these arguments must give; params may be NULL. Outputs
 * named in params are not looked at: the oracle computes them all. */
void ref_sdpa(ref_result *result, const attn_sdpa_params *params,
              const attn_tensor *q, const attn_tensor *k, const attn_tensor *v);

/* What attn_mha must give, with its rules for x_k and x_v being NULL. */
void ref_mha(ref_result *result, const attn_mha_params *params,
             const attn_tensor *x_q, const attn_tensor *x_k,
             const attn_tensor *x_v);

void ref_free(ref_result *result);

/* Element (b,h,t,d) of a float, double or unsigned char view. */
long double ref_get(const attn_tensor *view, int64_t b, int64_t h, int64_t t,
                    int64_t d);
/* The number that a contiguous ref_tensor holds there. */
ref_num *ref_at(const ref_tensor *t, int64_t b, int64_t h, int64_t i,
                int64_t j);

#endif
