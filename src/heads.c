/* Head split and merge: copies without arithmetic, so byte for byte. */
#include "attn_internal.h"

#include "check.h"
#include "status.h"

#include <string.h>

/* rows: (B,1,T,H*D); heads: (B,H,T,D), one of them the source. Copies element
 * (b,h,t,d) of heads from or to (b,0,t,h*D+d) of rows. */
static void copy_heads(const attn_tensor *rows, const attn_tensor *heads,
                       bool split)
{
    int64_t bytes = (int64_t)attn__dtype_bytes(heads->dtype);
    int64_t width = heads->shape[3];
    bool adjacent =
        (rows->stride[3] == 1 && heads->stride[3] == 1) || width <= 1;

    /* Beside a 0 the other sizes may be huge. */
    if (attn__count(heads) == 0)
        return;
    for (int64_t b = 0; b < heads->shape[0]; b++)
        for (int64_t t = 0; t < heads->shape[2]; t++)
            for (int64_t h = 0; h < heads->shape[1]; h++) {
                unsigned char *r =
                    (unsigned char *)rows->data +
                    bytes * (b * rows->stride[0] + t * rows->stride[2] +
                             h * width * rows->stride[3]);
                unsigned char *e =
                    (unsigned char *)heads->data +
                    bytes * (b * heads->stride[0] + h * heads->stride[1] +
                             t * heads->stride[2]);
                int64_t step = adjacent ? MAX(width, 1) : 1;
                for (int64_t d = 0; d < width; d += step) {
                    unsigned char *x = r + bytes * d * rows->stride[3];
                    unsigned char *y = e + bytes * d * heads->stride[3];
                    memcpy(split ? y : x, split ? x : y,
                           (size_t)(bytes * step));
                }
            }
}

static attn_status check_pair(const char *call, const attn_tensor *src,
                              const attn_tensor *dst, bool split)
{
    const attn_tensor *rows = split ? src : dst;
    const attn_tensor *heads = split ? dst : src;
    attn_status status = attn__check_tensor(call, "src", src, 0);

    if (!status)
        status = attn__check_tensor(call, "dst", dst, src->dtype);
    if (!status)
        status = attn__check_shape(
            call, split ? "src" : "dst", rows, "(B,1,T,H*D)", heads->shape[0],
            1, heads->shape[2], heads->shape[1] * heads->shape[3]);
    if (!status)
        status = attn__check_places(call, "dst", dst);
    if (!status)
        status = attn__check_overlap(call, "dst", dst, "src", src, false);
    return status;
}

attn_status attn_split_heads(const attn_tensor *src, const attn_tensor *dst)
{
    attn_status status = check_pair("attn_split_heads", src, dst, true);

    if (!status)
        copy_heads(src, dst, true);
    return status;
}

attn_status attn_merge_heads(const attn_tensor *src, const attn_tensor *dst)
{
    attn_status status = check_pair("attn_merge_heads", src, dst, false);

    if (!status)
        copy_heads(dst, src, false);
    return status;
}
