/* Slopes of attention with linear biases. */
#include "attn_internal.h"

#include "check.h"
#include "status.h"

#include <inttypes.h>
#include <math.h>

/*
 * The first n heads, n a power of two, form a geometric sequence from 2^(-8/n)
 * to 2^-8; the others take every second term of the sequence for 2n heads. The
 * exponents are exact: n is a power of two.
 */
static double slope_of(int64_t h, int64_t heads)
{
    int64_t n = 1;

    while (n <= heads / 2)
        n *= 2;
    if (h < n)
        return exp2(-8.0 * ((double)(h + 1) / (double)n));
    return exp2(-4.0 * ((double)(2 * (h - n) + 1) / (double)n));
}

attn_status attn_alibi_slopes(const attn_tensor *slopes)
{
    static const char call[] = "attn_alibi_slopes";
    attn_status status = attn__check_tensor(call, "slopes", slopes, 0);
    int axis;

    if (status)
        return status;
    axis = slopes->shape[3] == 1 ? 1 : 3;
    if (slopes->shape[2] != 1 ||
        (axis == 3 && (slopes->shape[0] != 1 || slopes->shape[1] != 1)))
        return attn__fail(ATTN_ERR_SHAPE,
                          "%s: slopes has shape (%" PRId64 ",%" PRId64
                          ",%" PRId64 ",%" PRId64
                          "); it must be (1,1,1,H) or (B,H,1,1)",
                          call, slopes->shape[0], slopes->shape[1],
                          slopes->shape[2], slopes->shape[3]);
    status = attn__check_places(call, "slopes", slopes);
    if (status || attn__count(slopes) == 0)
        return status;
    for (int64_t b = 0; b < slopes->shape[0]; b++)
        for (int64_t h = 0; h < slopes->shape[axis]; h++) {
            int64_t at = b * slopes->stride[0] + h * slopes->stride[axis];
            double slope = slope_of(h, slopes->shape[axis]);
            if (slopes->dtype == ATTN_F32)
                ((float *)slopes->data)[at] = (float)slope;
            else
                ((double *)slopes->data)[at] = slope;
        }
    return ATTN_OK;
}
