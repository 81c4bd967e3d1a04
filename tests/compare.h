/*
 * Comparison of a tensor with what the oracle says. Each number goes through
 * three steps: NaN must meet NaN and nothing else; an infinity must meet the
 * same infinity; and finite numbers may differ by the error that ref.h derives
 * for exactly this number, in the type of the tensor. So there is no relative
 * tolerance to choose: large, small and cancelled results each have their own.
 *
 * Two fractions of that error are named for each type:
 *   pass  1: the derived bound is a worst case, nothing correct exceeds it;
 *   warn  the roundings of n terms add up like a random walk, to about the
 *         square root of n where the worst case has n, so a correct program
 *         stays far below the bound. 20000 random calls have shown 0.36 (a
 *         weight just below the smallest normal number that becomes 0) and,
 *         of capped scores, 0.59: nothing averages out in a single tanh; of
 *         gradients 0.41. Above warn the test still passes, but says so: look
 *         at it before it becomes an error.
 */
#ifndef TESTS_COMPARE_H
#define TESTS_COMPARE_H

#include "ref.h"

#define COMPARE_PASS_F32 1.0
#define COMPARE_WARN_F32 0.7
#define COMPARE_PASS_F64 1.0
#define COMPARE_WARN_F64 0.7

/*
 * The number of wrong elements of got, 0 if all are right. The first ones are
 * printed: what, context (a seed, a case: whatever replays it), index, got,
 * want, error allowed. times multiplies the bound: 1 against exact results, 2
 * where want itself was computed in the tensor's type. Elements that must not
 * be written are passed over.
 */
int64_t compare_tensor(const char *what, const char *context,
                       const attn_tensor *got, const ref_tensor *want,
                       double times);

/*
 * The same against numbers from elsewhere: want has the values and bounds, from
 * the oracle, the errors; each may be missed by both sides, so it counts twice.
 * rounding is added relative to each number: what storing want in its own,
 * narrower type cost (2^-11 for float16), else 0.
 */
int64_t compare_golden(const char *what, const char *context,
                       const attn_tensor *got, const attn_tensor *want,
                       const ref_tensor *bounds, double rounding);

/* The largest fraction of a bound that any compare_tensor call has met since
 * the program's start; for reports. */
double compare_worst(void);
/* That of the latest one. */
double compare_latest(void);

/* The largest absolute difference of two views of equal shape; NaN if one of
 * the numbers is. */
double compare_distance(const attn_tensor *a, const attn_tensor *b);

/* 1 if all elements agree in their bits, signs of zeros and NaNs included.
 * Equal shapes and types; the first difference is printed. */
int compare_bits(const char *what, const char *context, const attn_tensor *a,
                 const attn_tensor *b);

#endif
