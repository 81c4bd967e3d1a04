/*
 * Merging attention over parts of the keys: each part's softmax is relative to
 * its own sum, whose logarithm is its LSE, so the parts' weights among each
 * other are the softmax of their LSEs.
 */
#include "attn_internal.h"

#include "check.h"
#include "context.h"
#include "status.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

/* Elements read by a task: some 10 microseconds of work. */
#define TASK_ELEMENTS 32768
/* Columns of out whose sums are kept on the stack: most rows are one block. */
#define BLOCK 256

/* One call: what all tasks share. */
typedef struct merge_run {
    int32_t num_parts;
    const attn_tensor *outs, *lses;
    const attn_tensor *out, *lse;
    int64_t rows, task_rows;
} merge_run;

#include "real_f32.h"
#include "merge_tmpl.h"
#include "real_f64.h"
#include "merge_tmpl.h"

static const char call[] = "attn_merge";

static attn_status check_outputs(const attn_tensor *out, const attn_tensor *lse)
{
    attn_status status = attn__check_tensor(call, "out", out, 0);

    if (!status)
        status = attn__check_places(call, "out", out);
    if (status || !lse)
        return status;
    status = attn__check_tensor(call, "lse", lse, out->dtype);
    if (!status)
        status =
            attn__check_shape(call, "lse", lse, "(B,H,T,1) of out",
                              out->shape[0], out->shape[1], out->shape[2], 1);
    if (!status)
        status = attn__check_places(call, "lse", lse);
    if (!status)
        status = attn__check_overlap(call, "lse", lse, "out", out, false);
    return status;
}

static attn_status check_part(int32_t p, const attn_tensor *part_out,
                              const attn_tensor *part_lse,
                              const attn_tensor *out, const attn_tensor *lse)
{
    char out_name[32], lse_name[32];
    attn_status status;

    (void)snprintf(out_name, sizeof out_name, "outs[%" PRId32 "]", p);
    (void)snprintf(lse_name, sizeof lse_name, "lses[%" PRId32 "]", p);
    status = attn__check_tensor(call, out_name, part_out, out->dtype);
    if (!status)
        status = attn__check_shape(call, out_name, part_out, "the shape of out",
                                   out->shape[0], out->shape[1], out->shape[2],
                                   out->shape[3]);
    if (!status)
        status = attn__check_tensor(call, lse_name, part_lse, out->dtype);
    if (!status)
        status =
            attn__check_shape(call, lse_name, part_lse, "(B,H,T,1) of out",
                              out->shape[0], out->shape[1], out->shape[2], 1);
    if (!status)
        status =
            attn__check_overlap(call, "out", out, out_name, part_out, true);
    if (!status)
        status =
            attn__check_overlap(call, "out", out, lse_name, part_lse, false);
    if (!status && lse)
        status =
            attn__check_overlap(call, "lse", lse, lse_name, part_lse, true);
    if (!status && lse)
        status =
            attn__check_overlap(call, "lse", lse, out_name, part_out, false);
    return status;
}

static attn_status merge_check(const merge_run *r)
{
    attn_status status = check_outputs(r->out, r->lse);

    if (!status && r->num_parts < 0)
        status =
            attn__fail(ATTN_ERR_SIZE,
                       "%s: num_parts is %" PRId32 "; it must not be negative",
                       call, r->num_parts);
    if (!status && r->num_parts > 0 && (!r->outs || !r->lses))
        status = attn__fail(ATTN_ERR_NULL,
                            "%s: %s is NULL, but num_parts is %" PRId32, call,
                            r->outs ? "lses" : "outs", r->num_parts);
    for (int32_t p = 0; p < r->num_parts && !status; p++)
        status = check_part(p, &r->outs[p], &r->lses[p], r->out, r->lse);
    return status;
}

attn_status attn_merge(const attn_context *context, int32_t num_parts,
                       const attn_tensor *outs, const attn_tensor *lses,
                       const attn_tensor *out, const attn_tensor *lse)
{
    merge_run r = {num_parts, outs, lses, out, lse, 0, 0};
    attn_status status = merge_check(&r);

    /* Rows of no columns may be more than can be walked. */
    if (status || (attn__count(out) == 0 && !lse))
        return status;
    r.rows = out->shape[0] * out->shape[1] * out->shape[2];
    r.task_rows =
        MAX(TASK_ELEMENTS / MAX(out->shape[3], 1) / MAX(num_parts, 1), 1);
    context = attn__context(context);
    attn__parallel_for(&context->executor, attn__ceil_div(r.rows, r.task_rows),
                       out->dtype == ATTN_F32 ? attn__merge_task_f32
                                              : attn__merge_task_f64,
                       &r);
    return ATTN_OK;
}
