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

static double worst;

double compare_worst(void)
{
    return worst;
}

/* How far got is from want, as a fraction of the error allowed; infinite when
 * they are of different classes. */
static double fraction(long double got, const ref_num *want, double times)
{
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
        const int64_t d = i % n[3], t = i / n[3] % n[2];
        const int64_t h = i / n[3] / n[2] % n[1], b = i / n[3] / n[2] / n[1];
        both.num[i].value = ref_get(want, b, h, t, d);
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
        const int64_t d = i % n[3], t = i / n[3] % n[2];
        const int64_t h = i / n[3] / n[2] % n[1], c = i / n[3] / n[2] / n[1];
        const double x =
            (double)fabsl(ref_get(a, c, h, t, d) - ref_get(b, c, h, t, d));
        if (isnan(x))
            return x;
        largest = x > largest ? x : largest;
    }
    return largest;
}

static const unsigned char *element(const attn_tensor *v, int64_t c, int64_t h,
                                    int64_t t, int64_t d)
{
    const int64_t size = v->dtype == ATTN_F32   ? 4
                         : v->dtype == ATTN_F64 ? 8
                                                : 1;
    const int64_t at = c * v->stride[0] + h * v->stride[1] + t * v->stride[2] +
                       d * v->stride[3];
    return (const unsigned char *)v->data + at * size;
}

int compare_bits(const char *what, const char *context, const attn_tensor *a,
                 const attn_tensor *b)
{
    const int64_t *n = a->shape;
    const size_t size = a->dtype == ATTN_F32 ? 4 : a->dtype == ATTN_F64 ? 8 : 1;
    for (int64_t i = 0; i < n[0] * n[1] * n[2] * n[3]; i++) {
        const int64_t d = i % n[3], t = i / n[3] % n[2];
        const int64_t h = i / n[3] / n[2] % n[1], c = i / n[3] / n[2] / n[1];
        if (memcmp(element(a, c, h, t, d), element(b, c, h, t, d), size) == 0)
            continue;
        print_error("%s(%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64
                    "): %.21Lg is not bit for bit %.21Lg; %s\n",
                    what, c, h, t, d, ref_get(a, c, h, t, d),
                    ref_get(b, c, h, t, d), context);
        return 0;
    }
    return 1;
}
