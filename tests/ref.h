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
 *   raw       r = scale q.k:  dr(j) = u (D+8) P(j)
 *             P(j) = |scale| sum |q||k|: a sum of D products, in any order,
 *             errs by at most D u P; 8 u covers scale, the factor log2(e) and
 *             the rounding of each. k stored in 16 bits is exact.
 *   capped    c tanh(r/c): dr times the steepest slope of tanh within it,
 *             1 - tanh^2((|r|-dr)/c), which is 1 at most; 8 u |c tanh(r/c)|
 *             for a tanh that is good to three units in the last place (6 u),
 *             the quotient and the product; and c times the smallest subnormal
 *             number, since r/c may be one.
 *   score     dz(j) = du(j) + u (8 A(j) + 8 a(j) + 4 (|z(j)| + |m|))
 *             du the error of the line above, A(j) = sum of the |ADD| values,
 *             a(j) = |slope| |p - j|, where the distance, its product and the
 *             sum round once each. The last term is the rounding of z - m and
 *             of a stored LSE.
 *   weight    a weight is exp(z-m)/sum: wrong scores multiply it by a factor
 *             between exp(-dz) and exp(dz), and the sum by 1 +- s,
 *             s = sum w (exp(dz)-1); c = u (2n+16) is for exp itself, the
 *             sum, the factors of a running maximum and the division:
 *             dw = (w (exp(dz)-1) + w s + c w) / (1-s)
 *             A sink is one more term of the sum, exact but for z - m; m is
 *             then the largest of the scores and the sink.
 *   out       do = (sum |v| w (exp(dz)-1) + |out| s + c sum w|v|) / (1-s)
 *             and never more than the distance from out to the farthest
 *             visible v: any weights with sum 1 stay within the values, and
 *             with a smaller sum within the values and 0.
 *   lse       dL = s/(1-s) or max dz, if that is smaller; plus c and u |L|.
 *   key sums  the dw of the column, and u (Tq+4) for the sum.
 *   largest weight
 *             above, it may be any weight with its dw; below, the largest one
 *             without its dw.
 *   effective keys
 *             1/S with S = sum w^2 wrong by dS = sum (2 w dw + dw^2) and
 *             u (n+8) S: between 1/(S+dS) and 1/(S-dS), and whatever the
 *             scores are in [1,n], or without an upper end if there is a sink.
 *   entropy   x ln x has the slope ln x + 1, and 1/x bends it: a weight moves
 *             its term by dw (|ln w| + 2), or if dw is not below w/2 by no more
 *             than 4 dw (|ln w| + 2), since the term of any x up to 3 dw is
 *             below that. |ln w| counts up to where the type's exp is 0. u
 *             (n+16) H is for the terms and their sum, which all have one sign
 *             as H = ln sum exp(z-m) + sum w (m-z). Whatever the scores are, H
 *             is in [0, ln n], or up to ln n + 1/e if a sink takes its part.
 *
 * The smallest normal number is added wherever a product may underflow. In a
 * layer the errors of the projections enter through dr and v and go through
 * the output projection with the magnitudes of its weights. Values that are
 * not finite have no bound: they are compared by class.
 *
 * Gradients are of the formulas of attn_sdpa_backward with out and L as they
 * are given, be they rounded as they may. P(j), dr, du, dz as above:
 *
 *   weight    w = exp(z - L), not divided by anything: dw = w (exp(dz)-1) +
 *             16 u w, with |L| in the place of |m|. Where w + dw is beyond 1/u,
 *             as after a mask of the lowest number or with scores of millions,
 *             nothing can be said of what w is a part of.
 *   delta     u (Dv+8) sum |d_out||out|: Dv products as in r.
 *   factor    g = d_out.v - delta + d_lse: the error of delta, and for a sum of
 *             Dv+2 terms in any order u (Dv+8) (sum |d_out||v| + |delta| +
 *             |d_lse|). 8 u also covers a scale that d_out was multiplied with
 *             before.
 *   slope     f = 1 - t^2 with t = u/c: t is wrong by dt = du/c + 4 u |t|, so f
 *             by (2|t| + dt) dt and 4 u for its own two roundings; f is in
 *             [0,1] and cannot be farther off than 1.
 *   products  of numbers wrong by dx and dy: dx |y| + (|x| + dx) dy + 4 u |xy|.
 *             They are dz = w g, du = dz f, and exp(sink - L) (d_lse - delta)
 *             where the exponent is wrong by 8 u (|sink| + |L|).
 *   sums      n terms, each wrong by what its factors are: the sum of those
 *             errors, and u (n+8) times the sum of their magnitudes, in any
 *             order. Of d_q n is the number of keys that the row sees, of d_k
 *             and d_v of rows that see the key, of the rest of such pairs; to
 *             the pairs of d_scale, which may be the sum over i of q(i) times
 *             the sum over j, D is added for each row, and its magnitudes are
 *             |du| sum |q||k|. What a gradient is added to is one more term,
 *             and scale is a factor of all.
 *
 * Underflow may take the smallest normal number from every product, also from
 * those of scale and d_out. A NaN of visible inputs without an infinity among
 * them has to be a NaN; with one, inf and NaN are one class, since a weight
 * that the type rounds to 0 makes a NaN of an infinity. If it is of q, k or
 * d_out and meets such a 0 in d_k, d_q or d_v, nothing is said: that product is
 * a BLAS's, and some pass over zeros.
 */
#ifndef TESTS_REF_H
#define TESTS_REF_H

#include "attn.h"

typedef struct ref_num {
    long double value;
    /* REF_UNTOUCHED: the library must not write here. REF_NOT_FINITE: inf or
     * NaN, as an infinite v meets a weight that the type may round to 0.
     * REF_AT_LEAST: value or more, inf too: 1 / sum of w^2 where the sum may
     * be 0 or the quotient beyond the type. REF_UNKNOWN: anything at all. */
    long double error;
} ref_num;

#define REF_UNTOUCHED (-1.0L)
#define REF_NOT_FINITE (-2.0L)
#define REF_AT_LEAST (-3.0L)
#define REF_UNKNOWN (-4.0L)

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
    ref_tensor scores_raw;
    ref_tensor scores_capped;
    ref_tensor scores;
    ref_tensor key_sums;
    ref_tensor max_weight;
    ref_tensor effective_keys;
    ref_tensor entropy;
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

/* Those that params has no place for have num NULL: d_masks of masks that are
 * not ADD, d_alibi, d_sinks. */
typedef struct ref_gradients {
    ref_tensor d_q;
    ref_tensor d_k;
    ref_tensor d_v;
    ref_tensor d_masks[ATTN_MAX_MASKS];
    ref_tensor d_alibi;
    ref_tensor d_sinks;
    ref_tensor d_scale;
} ref_gradients;

/* What attn_sdpa_backward with these arguments must give. All gradients are
 * computed, wanted or not; those that are added to something are read here, so
 * this goes before the call. */
void ref_sdpa_backward(ref_gradients *result, const attn_sdpa_params *params,
                       const attn_tensor *q, const attn_tensor *k,
                       const attn_tensor *v, const attn_tensor *out,
                       const attn_tensor *d_out,
                       const attn_sdpa_gradients *gradients);

void ref_free_gradients(ref_gradients *result);

/* Which rows of k and v, as they lie in memory, some query sees: entry
 * (b*Hkv + g)*T + t of seen, with the sizes of k, is set to 1 or 0. */
void ref_seen_rows(unsigned char *seen, const attn_sdpa_params *params,
                   const attn_tensor *q, const attn_tensor *k);

/* Element (b,h,t,d) of a view of any type of attn.h. */
long double ref_get(const attn_tensor *view, int64_t b, int64_t h, int64_t t,
                    int64_t d);
/* The number that a contiguous ref_tensor holds there. */
ref_num *ref_at(const ref_tensor *t, int64_t b, int64_t h, int64_t i,
                int64_t j);

#endif
