/*
 * Linear layers: y = x W + b, the projections of multi-head attention.
 *
 * A task is a panel of output columns for some rows. The panel of W is copied
 * once, transposed where W is stored (out, in), to (in x columns): that makes
 * every product one without transposes, which the small kernels of OpenBLAS
 * take, and gives it a leading dimension that caches like. The copy is read by
 * all rows of the task, so it costs one part in a hundred from 500 rows on.
 */
#include "attn_internal.h"

#include "linear.h"

#include "check.h"
#include "context.h"
#include "kernels/kernels.h"
#include "status.h"

#include <inttypes.h>
#include <string.h>

/* Rows of a task; a panel is copied once for them. */
#define TASK_ROWS 512
/* Rows at a time where x or y must be copied because of their strides. */
#define COPY_ROWS 64
/* The most inputs of a product; all have about as many. On Emerald Rapids 256
 * took 1.02 to 1.06 of the time (512 to 1024 rows, 512 to 4096 inputs, float
 * and double), 384 about as long, 192 and less more than 256. */
#define DEPTH 512

/* Columns of a panel: the width of the small kernels' register tile; others
 * pack what they are given, which wider panels amortise. */
static int64_t panel_columns(const attn__blas *blas)
{
    return blas->kind == ATTN__BLAS_SMALL ? 64 : 256;
}

/* Rows of x and y as products see them: `count` runs of `rows` rows. */
typedef struct row_runs {
    int64_t count, rows;
    int64_t inner; /* runs per batch: the heads, or 1 */
    int64_t x_row,
        y_row; /* from a row to the next, of a single row its width */
} row_runs;

/* Do the rows of all three leading axes follow each other at one distance?
 * *row is that distance; axes of size 1 have no say. */
static bool is_one_run(const attn_tensor *t, int64_t *row)
{
    int64_t rows = 1;

    *row = t->shape[3];
    for (int a = 2; a >= 0; a--) {
        if (t->shape[a] == 1)
            continue;
        if (rows == 1)
            *row = t->stride[a];
        else if (t->stride[a] != rows * *row)
            return false;
        rows *= t->shape[a];
    }
    return true;
}

static int64_t row_stride(const attn_tensor *t)
{
    return t->shape[2] > 1 ? t->stride[2] : t->shape[3];
}

static row_runs find_runs(const attn_tensor *x, const attn_tensor *y)
{
    int64_t rows = x->shape[2];
    row_runs r = {x->shape[0] * x->shape[1], rows, x->shape[1], 0, 0};

    /* Of no inputs, x is no memory, and its strides may be anything. */
    if ((x->shape[3] == 0 || is_one_run(x, &r.x_row)) &&
        is_one_run(y, &r.y_row))
        return (row_runs){1, r.count * rows, 1, r.x_row, r.y_row};
    r.x_row = x->shape[3] == 0 ? 0 : row_stride(x);
    r.y_row = row_stride(y);
    return r;
}

/* One call: what all tasks share. */
typedef struct linear_run {
    const attn__blas *blas;
    const attn_tensor *x, *w, *bias, *y;
    int32_t layout;
    int64_t in, out;
    row_runs runs;
    int64_t panels; /* of columns */
    int64_t slices; /* of TASK_ROWS, per run */
    unsigned char *workers;
    size_t worker_bytes;
} linear_run;

#include "real_f32.h"
#include "linear_tmpl.h"
#include "real_f64.h"
#include "linear_tmpl.h"

/* The matrix between the width of x and that of y. */
static attn_status check_matrix(const char *call, int32_t layout,
                                const char *x_name, const attn_tensor *x,
                                const char *w_name, const attn_tensor *w,
                                const char *y_name, const attn_tensor *y)
{
    bool out_in = layout == ATTN_WEIGHT_OUT_IN;
    int64_t in = x->shape[3], out = y->shape[3];

    if (w->shape[0] == 1 && w->shape[1] == 1 &&
        w->shape[2] == (out_in ? out : in) &&
        w->shape[3] == (out_in ? in : out))
        return ATTN_OK;
    return attn__fail(
        ATTN_ERR_SHAPE,
        "%s: %s has shape (%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64
        "), %s has width %" PRId64 " and %s width %" PRId64
        "; the matrix must be %s = (1,1,%" PRId64 ",%" PRId64 ")",
        call, w_name, w->shape[0], w->shape[1], w->shape[2], w->shape[3],
        x_name, in, y_name, out, out_in ? "(1,1,out,in)" : "(1,1,in,out)",
        out_in ? out : in, out_in ? in : out);
}

attn_status attn__linear_check(const char *call, int32_t layout,
                               const char *x_name, const attn_tensor *x,
                               const char *w_name, const attn_tensor *w,
                               const char *bias_name, const attn_tensor *bias,
                               const char *y_name, const attn_tensor *y)
{
    attn_status status = attn__check_tensor(call, x_name, x, 0);

    if (!status && layout != ATTN_WEIGHT_OUT_IN && layout != ATTN_WEIGHT_IN_OUT)
        status = attn__fail(ATTN_ERR_VALUE,
                            "%s: the weight layout is %" PRId32
                            "; it must be named: ATTN_WEIGHT_OUT_IN (1) or "
                            "ATTN_WEIGHT_IN_OUT (2)",
                            call, layout);
    if (!status)
        status = attn__check_tensor(call, w_name, w, x->dtype);
    if (!status)
        status = attn__check_tensor(call, y_name, y, x->dtype);
    if (!status && bias)
        status = attn__check_tensor(call, bias_name, bias, x->dtype);
    if (status)
        return status;
    if (y->shape[0] != x->shape[0] || y->shape[1] != x->shape[1] ||
        y->shape[2] != x->shape[2])
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: %s has rows (%" PRId64 ",%" PRId64 ",%" PRId64
                          "), %s (%" PRId64 ",%" PRId64 ",%" PRId64
                          "); they must be the same (shape[0..2])",
                          call, y_name, y->shape[0], y->shape[1], y->shape[2],
                          x_name, x->shape[0], x->shape[1], x->shape[2]);
    status = check_matrix(call, layout, x_name, x, w_name, w, y_name, y);
    if (!status && bias)
        status = attn__check_shape(call, bias_name, bias, "(1,1,1,out)", 1, 1,
                                   1, y->shape[3]);
    if (!status)
        status = attn__check_places(call, y_name, y);
    return status;
}

static size_t worker_bytes(const attn__blas *blas, attn_dtype dtype, int64_t in)
{
    attn__bump bump = {NULL, 0};

    if (dtype == ATTN_F32)
        (void)attn__cut_panel_f32(blas, in, &bump);
    else
        (void)attn__cut_panel_f64(blas, in, &bump);
    return bump.bytes;
}

size_t attn__linear_bytes(const attn__blas *blas, attn_dtype dtype, int64_t in,
                          int32_t threads)
{
    attn__bump bump = {NULL, 0};

    (void)attn__bump_take(&bump, threads, worker_bytes(blas, dtype, in));
    return bump.bytes;
}

void attn__linear_run(const attn__executor *executor, const attn__blas *blas,
                      int32_t layout, const attn_tensor *x,
                      const attn_tensor *w, const attn_tensor *bias,
                      const attn_tensor *y, void *work)
{
    linear_run r = {.blas = blas,
                    .x = x,
                    .w = w,
                    .bias = bias,
                    .y = y,
                    .layout = layout,
                    .in = x->shape[3],
                    .out = y->shape[3],
                    .workers = work};
    attn__executor e = *executor;

    if (attn__count(y) == 0)
        return;
    r.runs = find_runs(x, y);
    r.worker_bytes = worker_bytes(blas, x->dtype, r.in);
    r.panels = attn__ceil_div(r.out, panel_columns(blas));
    r.slices = attn__ceil_div(r.runs.rows, TASK_ROWS);
    e.num_threads =
        blas->exclusive
            ? 1
            : attn__threads_for(e.num_threads,
                                (double)attn__count(y) * (double)r.in);
    attn__parallel_for(&e, r.runs.count * r.panels * r.slices,
                       x->dtype == ATTN_F32 ? attn__linear_task_f32
                                            : attn__linear_task_f64,
                       &r);
}

attn_status attn_linear(const attn_context *context, int32_t layout,
                        const attn_tensor *x, const attn_tensor *w,
                        const attn_tensor *bias, const attn_tensor *y)
{
    static const char call[] = "attn_linear";
    attn_status status =
        attn__linear_check(call, layout, "x", x, "w", w, "bias", bias, "y", y);
    attn__blas blas;
    size_t bytes;
    void *work;

    if (!status)
        status = attn__check_overlap(call, "y", y, "x", x, false);
    if (!status)
        status = attn__check_overlap(call, "y", y, "w", w, false);
    if (!status && bias)
        status = attn__check_overlap(call, "y", y, "bias", bias, false);
    if (!status)
        status = attn__blas_check(call);
    if (status)
        return status;
    context = attn__context(context);
    blas = attn__blas_policy();
    bytes = attn__linear_bytes(&blas, x->dtype, x->shape[3],
                               context->executor.num_threads);
    if (bytes == SIZE_MAX)
        return attn__fail(ATTN_ERR_SIZE,
                          "%s: the scratch memory for %" PRId64
                          " inputs cannot be addressed",
                          call, x->shape[3]);
    work = attn__scratch_take(context, bytes);
    if (!work)
        return attn__fail(ATTN_ERR_NOMEM,
                          "%s: no memory for %zu bytes of scratch", call,
                          bytes);
    attn__linear_run(&context->executor, &blas, layout, x, w, bias, y, work);
    attn__scratch_give(context, work);
    return ATTN_OK;
}
