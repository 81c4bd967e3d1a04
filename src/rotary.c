/*
 * Rotary position embedding: tables of cosines and sines, and the rotation of
 * pairs of components by them.
 */
#include "attn_internal.h"

#include "rotary.h"

#include "check.h"
#include "context.h"
#include "status.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* Elements of a task: some 10 microseconds of work, which a thread is worth. */
#define TASK_ELEMENTS 32768

void attn_rotary_params_init(attn_rotary_params *params)
{
    static const attn_rotary_params init = ATTN_ROTARY_PARAMS_INIT;

    if (params)
        *params = init;
}

/* --------------------------------------------------------------- Tables -- */

/*
 * An angle is position times theta, and its error is theta's error times the
 * position: with theta rounded to a double, at position 10^6 cosines would be
 * off by 10^-10. So theta and the angle are pairs high + low of doubles, of
 * which low is at most half a unit of high: some 104 bits together.
 */
typedef struct wide {
    double high, low;
} wide;

static wide wide_product(double a, double b)
{
    double p = a * b;
    return (wide){p, fma(a, b, -p)}; /* exact */
}

static wide wide_mul(wide a, wide b)
{
    wide p = wide_product(a.high, b.high);
    double low = p.low + (a.high * b.low + a.low * b.high);
    double high = p.high + low;

    return (wide){high, low - (high - p.high)};
}

/* x^n for n >= 1, by squaring; as deep as n has bits. */
static wide wide_power(wide x, int64_t n)
{
    wide half, square;

    if (n == 1)
        return x;
    half = wide_power(x, n / 2);
    square = wide_mul(half, half);
    return n % 2 == 1 ? wide_mul(square, x) : square;
}

/* base^(-1/n): pow() and one step of Newton's method for x^n base = 1, which
 * doubles the digits. */
static wide wide_root(double base, int64_t n)
{
    double x = pow(base, -1.0 / (double)n);
    wide one = wide_mul(wide_power((wide){x, 0.0}, n), (wide){base, 0.0});
    double excess = (one.high - 1.0) + one.low;

    return (wide){x, -x * excess / (double)n};
}

/* Cosine and sine of position times theta. */
static void turn_of(double position, wide theta, double *cosine, double *sine)
{
    wide angle = wide_product(position, theta.high);
    double low = angle.low + position * theta.low;
    double c = cos(angle.high), s = sin(angle.high);
    double c_low = cos(low), s_low = sin(low);

    *cosine = c * c_low - s * s_low;
    *sine = s * c_low + c * s_low;
}

static void store(const attn_tensor *t, int64_t p, int64_t k, double value)
{
    int64_t at = p * t->stride[2] + k * t->stride[3];

    if (t->dtype == ATTN_F32)
        ((float *)t->data)[at] = (float)value;
    else
        ((double *)t->data)[at] = value;
}

/* (1,1,P,R/2) for both, of one type. */
static attn_status check_tables(const char *call, const attn_tensor *cos_table,
                                const attn_tensor *sin_table, attn_dtype dtype)
{
    attn_status status =
        attn__check_tensor(call, "cos_table", cos_table, dtype);

    if (!status)
        status =
            attn__check_shape(call, "cos_table", cos_table, "(1,1,P,R/2)", 1, 1,
                              cos_table->shape[2], cos_table->shape[3]);
    if (!status)
        status =
            attn__check_tensor(call, "sin_table", sin_table, cos_table->dtype);
    if (!status)
        status = attn__check_shape(call, "sin_table", sin_table,
                                   "the shape of cos_table", 1, 1,
                                   cos_table->shape[2], cos_table->shape[3]);
    return status;
}

static attn_status check_numbers(const char *call, int64_t first, int64_t width,
                                 double base, const attn_tensor *table)
{
    static const int64_t last = INT64_C(1) << 53;

    if (width < 0 || width % 2 != 0)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: width is %" PRId64
                          "; components turn in pairs, so it must be even and "
                          "not negative",
                          call, width);
    if (table->shape[3] != width / 2)
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: the tables have %" PRId64
                          " columns (shape[3]); width %" PRId64
                          " needs %" PRId64,
                          call, table->shape[3], width, width / 2);
    if (!(base >= 1.0) || isinf(base))
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: base is %g; it must be finite and at least 1",
                          call, base);
    if (first < -last || first > last || table->shape[2] > last - first)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: %" PRId64 " positions from %" PRId64
                          " on; they must be within 2^53",
                          call, table->shape[2], first);
    return ATTN_OK;
}

attn_status attn_rotary_tables(int64_t first, int64_t width, double base,
                               const attn_tensor *cos_table,
                               const attn_tensor *sin_table)
{
    static const char call[] = "attn_rotary_tables";
    attn_status status = check_tables(call, cos_table, sin_table, 0);
    wide theta = {1.0, 0.0}, root;

    if (!status)
        status = check_numbers(call, first, width, base, cos_table);
    if (!status)
        status = attn__check_places(call, "cos_table", cos_table);
    if (!status)
        status = attn__check_places(call, "sin_table", sin_table);
    if (!status)
        status = attn__check_overlap(call, "cos_table", cos_table, "sin_table",
                                     sin_table, false);
    if (status || attn__count(cos_table) == 0)
        return status;
    root = wide_root(base, width / 2);
    for (int64_t k = 0; k < width / 2; k++) {
        for (int64_t p = 0; p < cos_table->shape[2]; p++) {
            double cosine, sine;
            turn_of((double)(first + p), theta, &cosine, &sine);
            store(cos_table, p, k, cosine);
            store(sin_table, p, k, sine);
        }
        theta = wide_mul(theta, root);
    }
    return ATTN_OK;
}

/* ------------------------------------------------------------- Rotation -- */

/* One call: what all tasks share. */
typedef struct rotary_run {
    attn_rotary_params params;
    const attn_tensor *x, *cos, *sin, *y;
    int64_t pairs; /* R/2 */
    int64_t rows, task_rows;
    bool in_place;
    bool adjacent; /* y and both tables have unit innermost strides */
} rotary_run;

static int64_t position_of(const attn_rotary_params *p, int64_t len, int64_t b,
                           int64_t t)
{
    if (p->positions)
        return p->positions[b * len + t];
    return (p->offsets ? p->offsets[b] : p->offset) + t;
}

#include "real_f32.h"
#include "rotary_tmpl.h"
#include "real_f64.h"
#include "rotary_tmpl.h"

static attn_status check_params(const char *call, const attn_rotary_params *p)
{
    if (p->style != ATTN_ROTARY_INTERLEAVED && p->style != ATTN_ROTARY_HALVES)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.style is %" PRId32
                          "; it must be named: ATTN_ROTARY_INTERLEAVED (1) or "
                          "ATTN_ROTARY_HALVES (2)",
                          call, p->style);
    if (p->inverse != 0 && p->inverse != 1)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.inverse is %" PRId32
                          "; it must be 0 or 1",
                          call, p->inverse);
    if ((p->offset != 0) + (p->offsets != NULL) + (p->positions != NULL) > 1)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params gives more than one of offset, offsets "
                          "and positions; they exclude each other",
                          call);
    return ATTN_OK;
}

/* Positions offset .. offset + len - 1 of batch b are rows of the tables. */
static attn_status check_offset(const char *call, int64_t offset, int64_t len,
                                int64_t b, int64_t table_rows)
{
    if (offset >= 0 && len <= table_rows && offset <= table_rows - len)
        return ATTN_OK;
    return attn__fail(ATTN_ERR_VALUE,
                      "%s: batch %" PRId64 " has %" PRId64
                      " positions from %" PRId64
                      " on; the tables have rows for 0 to %" PRId64,
                      call, b, len, offset, table_rows - 1);
}

static attn_status check_positions(const char *call,
                                   const attn_rotary_params *p,
                                   const attn_tensor *x, int64_t table_rows)
{
    attn_status status = ATTN_OK;
    int64_t len = x->shape[2], rows = x->shape[0] * len;

    if (rows == 0)
        return ATTN_OK;
    if (!p->offsets && !p->positions)
        return check_offset(call, p->offset, len, 0, table_rows);
    for (int64_t b = 0; p->offsets && b < x->shape[0] && !status; b++)
        status = check_offset(call, p->offsets[b], len, b, table_rows);
    for (int64_t n = 0; p->positions && n < rows && !status; n++)
        if (p->positions[n] < 0 || p->positions[n] >= table_rows)
            status = attn__fail(ATTN_ERR_VALUE,
                                "%s: params.positions[%" PRId64 "] is %" PRId64
                                "; the tables have rows for 0 to %" PRId64,
                                call, n, p->positions[n], table_rows - 1);
    return status;
}

static attn_status check_tensors(const char *call, const attn_tensor *x,
                                 const attn_tensor *cos_table,
                                 const attn_tensor *sin_table,
                                 const attn_tensor *y)
{
    attn_status status = attn__check_tensor(call, "x", x, 0);

    if (!status)
        status = check_tables(call, cos_table, sin_table, x->dtype);
    if (!status && cos_table->shape[3] > x->shape[3] / 2)
        status = attn__fail(
            ATTN_ERR_SHAPE,
            "%s: the tables have %" PRId64
            " columns (shape[3]), for R = 2 x %" PRId64
            " components, but x has width %" PRId64 "; R must not exceed it",
            call, cos_table->shape[3], cos_table->shape[3], x->shape[3]);
    if (!status)
        status = attn__check_tensor(call, "y", y, x->dtype);
    if (!status)
        status = attn__check_shape(call, "y", y, "the shape of x", x->shape[0],
                                   x->shape[1], x->shape[2], x->shape[3]);
    if (!status)
        status = attn__check_places(call, "y", y);
    if (!status)
        status = attn__check_overlap(call, "y", y, "x", x, true);
    if (!status)
        status =
            attn__check_overlap(call, "y", y, "cos_table", cos_table, false);
    if (!status)
        status =
            attn__check_overlap(call, "y", y, "sin_table", sin_table, false);
    return status;
}

/* y must not lie over the arrays that say where its rows stand. */
static attn_status check_arrays(const char *call, const attn_rotary_params *p,
                                const attn_tensor *y)
{
    attn_status status = ATTN_OK;

    if (p->offsets)
        status = attn__check_apart(call, "y", y, "params.offsets", p->offsets,
                                   (size_t)y->shape[0] * sizeof(int64_t));
    if (!status && p->positions)
        status = attn__check_apart(
            call, "y", y, "params.positions", p->positions,
            (size_t)(y->shape[0] * y->shape[2]) * sizeof(int64_t));
    return status;
}

static attn_status rotary_check(const char *call, attn_rotary_params *p,
                                const attn_rotary_params *params,
                                const attn_tensor *x,
                                const attn_tensor *cos_table,
                                const attn_tensor *sin_table,
                                const attn_tensor *y)
{
    attn_status status;

    if (!params)
        return attn__fail(ATTN_ERR_NULL,
                          "%s: params is NULL; it must name a style", call);
    status = attn__read_params(call, "params", p, sizeof *p, params,
                               offsetof(attn_rotary_params, positions) +
                                   sizeof p->positions);
    if (!status)
        status = check_tensors(call, x, cos_table, sin_table, y);
    if (!status)
        status = check_params(call, p);
    if (!status)
        status = check_arrays(call, p, y);
    if (!status)
        status = check_positions(call, p, x, cos_table->shape[2]);
    return status;
}

attn_status attn_rotary(const attn_context *context,
                        const attn_rotary_params *params, const attn_tensor *x,
                        const attn_tensor *cos_table,
                        const attn_tensor *sin_table, const attn_tensor *y)
{
    rotary_run r = {.x = x, .cos = cos_table, .sin = sin_table, .y = y};
    attn_status status = rotary_check("attn_rotary", &r.params, params, x,
                                      cos_table, sin_table, y);

    if (status || attn__count(y) == 0)
        return status;
    r.pairs = cos_table->shape[3];
    r.rows = x->shape[0] * x->shape[1] * x->shape[2];
    r.task_rows = MAX(TASK_ELEMENTS / x->shape[3], 1);
    r.in_place = x->data == y->data;
    r.adjacent = (y->stride[3] == 1 || y->shape[3] == 1) &&
                 (cos_table->stride[3] == 1 || r.pairs <= 1) &&
                 (sin_table->stride[3] == 1 || r.pairs <= 1);
    context = attn__context(context);
    attn__parallel_for(&context->executor, attn__ceil_div(r.rows, r.task_rows),
                       x->dtype == ATTN_F32 ? attn__rotary_task_f32
                                            : attn__rotary_task_f64,
                       &r);
    return ATTN_OK;
}
