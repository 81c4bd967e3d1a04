#include "compare.h"

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* How many wrong elements of a tensor are printed. */
enum { PRINTED = 3 };

static double worst, latest;

double compare_worst(void)
{
    return worst;
}

double compare_latest(void)
{
    return latest;
}

/* How far got is from want, as a fraction of the error allowed; infinite when
 * they are of different classes. */
static double fraction(long double got, const ref_num *want, double times)
{
    if (want->error == REF_UNKNOWN)
        return 0.0;
    if (want->error == REF_NOT_FINITE)
        return isfinite(got) ? HUGE_VAL : 0.0;
    if (want->error == REF_AT_LEAST)
        return got >= want->value ? 0.0 : HUGE_VAL;
    if (isnan(want->value) || isnan(got))
        return isnan(want->value) && isnan(got) ? 0.0 : HUGE_VAL;
    if (isinf(want->value) || isinf(got))
        return got == want->value ? 0.0 : HUGE_VAL;
    const long double distance = fabsl(got - want->value);
    if (distance == 0.0L)
        return 0.0;
    /* Also when the bound is NaN, which would be a fault of the oracle. */
    if (!(want->error > 0.0L && want->error < HUGE_VALL))
        return HUGE_VAL;
    return (double)(distance / (want->error * (long double)times));
}

typedef struct report {
    const char *what, *context;
    int64_t wrong;
    double worst;
} report;

static void report_element(report *r, const int64_t at[4], long double got,
                           const ref_num *want, double f, double pass)
{
    r->worst = f > r->worst ? f : r->worst;
    if (f <= pass)
        return;
    if (r->wrong++ < PRINTED)
        print_error("%s(%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64
                    "): got %.21Lg, want %.21Lg, allowed error %.3Lg "
                    "(%.3g times)\n",
                    r->what, at[0], at[1], at[2], at[3], got, want->value,
                    want->error, f);
}

static void finish(const report *r, double warn)
{
    latest = r->worst;
    worst = r->worst > worst ? r->worst : worst;
    if (r->wrong > 0)
        print_error("%s: %" PRId64 " wrong elements; %s\n", r->what, r->wrong,
                    r->context);
    else if (r->worst > warn)
        print_message("warning: %s uses %.2f of its error bound; %s\n", r->what,
                      r->worst, r->context);
}

static int64_t compare(const char *what, const char *context,
                       const attn_tensor *got, const ref_tensor *want,
                       double times, double warn)
{
    const double pass =
        got->dtype == ATTN_F32 ? COMPARE_PASS_F32 : COMPARE_PASS_F64;
    report r = {what, context, 0, 0.0};
    int64_t at[4];
    const int64_t *n = want->shape;
    if (memcmp(got->shape, n, sizeof got->shape) != 0) {
        print_error("%s: shapes differ; %s\n", what, context);
        return 1;
    }
    for (at[0] = 0; at[0] < n[0]; at[0]++)
        for (at[1] = 0; at[1] < n[1]; at[1]++)
            for (at[2] = 0; at[2] < n[2]; at[2]++)
                for (at[3] = 0; at[3] < n[3]; at[3]++) {
                    const ref_num *w = ref_at(want, at[0], at[1], at[2], at[3]);
                    if (w->error == REF_UNTOUCHED)
                        continue;
                    const long double g =
                        ref_get(got, at[0], at[1], at[2], at[3]);
                    report_element(&r, at, g, w, fraction(g, w, times), pass);
                }
    finish(&r, warn);
    return r.wrong;
}

int64_t compare_tensor(const char *what, const char *context,
                       const attn_tensor *got, const ref_tensor *want,
                       double times)
{
    return compare(what, context, got, want, times,
                   got->dtype == ATTN_F32 ? COMPARE_WARN_F32
                                          : COMPARE_WARN_F64);
}

/* The indices of element number i of a contiguous tensor of this shape. */
static void unravel(int64_t i, const int64_t shape[4], int64_t at[4])
{
    for (int n = 3; n >= 0; n--) {
        at[n] = i % shape[n];
        i /= shape[n];
    }
}

int64_t compare_golden(const char *what, const char *context,
                       const attn_tensor *got, const attn_tensor *want,
                       const ref_tensor *bounds, double rounding)
{
    const int64_t *n = bounds->shape;
    const int64_t count = n[0] * n[1] * n[2] * n[3];
    ref_tensor both = {{n[0], n[1], n[2], n[3]},
                       calloc((size_t)count + 1, sizeof(ref_num))};
    assert_non_null(both.num);
    if (memcmp(want->shape, n, sizeof want->shape) != 0) {
        print_error("%s: the golden shape differs; %s\n", what, context);
        free(both.num);
        return 1;
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t at[4];
        unravel(i, n, at);
        both.num[i].value = ref_get(want, at[0], at[1], at[2], at[3]);
        both.num[i].error = 2.0L * bounds->num[i].error +
                            (long double)rounding * fabsl(both.num[i].value);
    }
    /* One rounding to a stored type uses all of its half unit: no warning. */
    const int64_t wrong = compare(what, context, got, &both, 1.0, 1.0);
    free(both.num);
    return wrong;
}

double compare_distance(const attn_tensor *a, const attn_tensor *b)
{
    double largest = 0.0;
    const int64_t *n = a->shape;
    for (int64_t i = 0; i < n[0] * n[1] * n[2] * n[3]; i++) {
        int64_t at[4];
        unravel(i, n, at);
        const double x = (double)fabsl(ref_get(a, at[0], at[1], at[2], at[3]) -
                                       ref_get(b, at[0], at[1], at[2], at[3]));
        if (isnan(x))
            return x;
        largest = x > largest ? x : largest;
    }
    return largest;
}

static size_t size_of(attn_dtype dtype)
{
    if (dtype == ATTN_F16 || dtype == ATTN_BF16)
        return 2;
    return dtype == ATTN_F32 ? 4 : dtype == ATTN_F64 ? 8 : 1;
}

static const unsigned char *element(const attn_tensor *v, const int64_t at[4])
{
    int64_t offset = 0;
    for (int n = 0; n < 4; n++)
        offset += at[n] * v->stride[n];
    return (const unsigned char *)v->data + offset * (int64_t)size_of(v->dtype);
}

int compare_bits(const char *what, const char *context, const attn_tensor *a,
                 const attn_tensor *b)
{
    const int64_t *n = a->shape;
    for (int64_t i = 0; i < n[0] * n[1] * n[2] * n[3]; i++) {
        int64_t at[4];
        unravel(i, n, at);
        if (memcmp(element(a, at), element(b, at), size_of(a->dtype)) == 0)
            continue;
        print_error("%s(%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64
                    "): %.21Lg is not bit for bit %.21Lg; %s\n",
                    what, at[0], at[1], at[2], at[3],
                    ref_get(a, at[0], at[1], at[2], at[3]),
                    ref_get(b, at[0], at[1], at[2], at[3]), context);
        return 0;
    }
    return 1;
}
