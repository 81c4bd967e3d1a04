/* Softmax over rows, and the check of what came out of one. */
#include "attn_internal.h"

#include "check.h"
#include "kernels/kernels.h"
#include "status.h"

#include <math.h>

#include "real_f32.h"
#include "softmax_tmpl.h"
#include "real_f64.h"
#include "softmax_tmpl.h"

static attn_status check_softmax(const attn_tensor *x, const attn_tensor *y,
                                 const attn_tensor *lse)
{
    static const char call[] = "attn_softmax";
    attn_status status = attn__check_tensor(call, "x", x, 0);

    if (!status)
        status = attn__check_tensor(call, "y", y, x->dtype);
    if (!status)
        status = attn__check_shape(call, "y", y, "the shape of x", x->shape[0],
                                   x->shape[1], x->shape[2], x->shape[3]);
    if (!status)
        status = attn__check_places(call, "y", y);
    if (!status)
        status = attn__check_overlap(call, "y", y, "x", x, true);
    if (!status && lse) {
        status = attn__check_tensor(call, "lse", lse, x->dtype);
        if (!status)
            status =
                attn__check_shape(call, "lse", lse, "(B,H,T,1) of x",
                                  x->shape[0], x->shape[1], x->shape[2], 1);
        if (!status)
            status = attn__check_places(call, "lse", lse);
        if (!status)
            status = attn__check_overlap(call, "lse", lse, "x", x, false);
        if (!status)
            status = attn__check_overlap(call, "lse", lse, "y", y, false);
    }
    return status;
}

attn_status attn_softmax(const attn_tensor *x, const attn_tensor *y,
                         const attn_tensor *lse)
{
    attn_status status = check_softmax(x, y, lse);

    /* With no element and no LSE the other sizes may be huge. */
    if (status || (attn__count(x) == 0 && !(lse && attn__count(lse) > 0)))
        return status;
    if (x->dtype == ATTN_F32)
        attn__softmax_f32(x, y, lse);
    else
        attn__softmax_f64(x, y, lse);
    return ATTN_OK;
}

attn_status attn_weights_check(const attn_tensor *w, double *deviation,
                               int64_t *empty_rows)
{
    static const char call[] = "attn_weights_check";
    attn_status status = attn__check_tensor(call, "w", w, 0);
    double worst = 0.0;
    int64_t empty = 0;

    if (status)
        return status;
    if (!deviation)
        return attn__fail(ATTN_ERR_NULL, "%s: deviation is NULL", call);
    if (attn__count(w) == 0)
        empty = w->shape[3] > 0 ? 0 : w->shape[0] * w->shape[1] * w->shape[2];
    else if (w->dtype == ATTN_F32)
        attn__weights_check_f32(w, &worst, &empty);
    else
        attn__weights_check_f64(w, &worst, &empty);
    *deviation = worst;
    if (empty_rows)
        *empty_rows = empty;
    return ATTN_OK;
}
