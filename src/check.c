/* Checks of views, overlap and growing structs. */
#include "attn_internal.h"

#include "check.h"

#include "status.h"

#include <inttypes.h>
#include <string.h>

bool attn__mul_i64(int64_t a, int64_t b, int64_t *product)
{
    /* A product of numbers of 32 bits fits: no division for most. */
    bool small = a == (int32_t)a && b == (int32_t)b;

    if (!small && a != 0 && b != 0) {
        /* |a b| <= INT64_MAX exactly if |a| <= INT64_MAX / |b|. */
        if (a == INT64_MIN || b == INT64_MIN)
            return false;
        if ((a < 0 ? -a : a) > INT64_MAX / (b < 0 ? -b : b))
            return false;
    }
    *product = a * b;
    return true;
}

bool attn__add_i64(int64_t a, int64_t b, int64_t *sum)
{
    if (b > 0 ? a > INT64_MAX - b : a < INT64_MIN - b)
        return false;
    *sum = a + b;
    return true;
}

/* The smallest and largest element offset of a view with elements. */
static bool view_range(const attn_tensor *t, int64_t *low, int64_t *high)
{
    *low = 0;
    *high = 0;
    for (int a = 0; a < 4; a++) {
        int64_t reach;
        if (t->shape[a] <= 1)
            continue;
        if (!attn__mul_i64(t->shape[a] - 1, t->stride[a], &reach) ||
            !attn__add_i64(reach < 0 ? *low : *high, reach,
                           reach < 0 ? low : high))
            return false;
    }
    return true;
}

/* Stride of an axis that is really walked: an axis of size 1 has none. */
static int64_t magnitude(const attn_tensor *t, int axis)
{
    int64_t s = t->shape[axis] > 1 ? t->stride[axis] : 0;
    return s < 0 ? -s : s;
}

/* Axes by growing stride, those of size 1 left out; returns how many. */
static int sorted_axes(const attn_tensor *t, int axes[4])
{
    int n = 0;

    for (int a = 0; a < 4; a++) {
        int at = n;
        if (t->shape[a] <= 1)
            continue;
        while (at > 0 && magnitude(t, axes[at - 1]) > magnitude(t, a)) {
            axes[at] = axes[at - 1];
            at--;
        }
        axes[at] = a;
        n++;
    }
    return n;
}

/*
 * True if each stride passes over all that the smaller ones reach, which makes
 * offsets unique. The converse does not hold (strides 2 and 3 with sizes 2 and
 * 2 never meet), but no layout in use is like that.
 */
static bool is_nested(const attn_tensor *t)
{
    int axes[4];
    int n = sorted_axes(t, axes);
    int64_t reach = 0;

    for (int a = 0; a < n; a++) {
        int64_t stride = magnitude(t, axes[a]);
        if (stride <= reach)
            return false;
        reach += stride * (t->shape[axes[a]] - 1);
    }
    return true;
}

/* The sentence for a view that is larger than memory. */
static attn_status fail_extent(const char *call, const char *name,
                               const attn_tensor *t)
{
    return attn__fail(
        ATTN_ERR_STRIDE,
        "%s: %s with strides (%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64
        ") reaches over more memory than can be addressed",
        call, name, t->stride[0], t->stride[1], t->stride[2], t->stride[3]);
}

static attn_status check_sizes(const char *call, const char *name,
                               const attn_tensor *t, size_t bytes)
{
    int64_t count = 1;
    int64_t low, high, span;
    bool empty = false;

    for (int a = 0; a < 4; a++) {
        if (t->shape[a] < 0)
            return attn__fail(ATTN_ERR_SIZE,
                              "%s: %s has shape[%d] = %" PRId64
                              "; sizes must not be negative",
                              call, name, a, t->shape[a]);
        empty |= t->shape[a] == 0;
    }
    /* With 0 among them the others need no memory, but must still multiply. */
    for (int a = 0; a < 4; a++) {
        if (!attn__mul_i64(count, MAX(t->shape[a], 1), &count))
            return attn__fail(
                ATTN_ERR_SIZE,
                "%s: %s has shape (%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64
                "), more than 2^63-1 elements",
                call, name, t->shape[0], t->shape[1], t->shape[2], t->shape[3]);
    }
    if (empty)
        return ATTN_OK;
    if (!view_range(t, &low, &high) || low == INT64_MIN ||
        !attn__add_i64(high, -low, &span) || span == INT64_MAX ||
        !attn__mul_i64(span + 1, (int64_t)bytes, &span) ||
        (uint64_t)span > (uint64_t)PTRDIFF_MAX)
        return fail_extent(call, name, t);
    return ATTN_OK;
}

const char *attn__dtype_name(attn_dtype dtype)
{
    static const char *const names[] = {"", "F32", "F64", "U8", "F16", "BF16"};

    return attn__dtype_bytes(dtype) > 0 ? names[dtype] : "unknown";
}

static attn_status check_dtype(const char *call, const char *name,
                               const attn_tensor *t, attn_dtype dtype)
{
    if (attn__dtype_bytes(t->dtype) == 0)
        return attn__fail(ATTN_ERR_TYPE,
                          "%s: %s has dtype %" PRId32
                          ", which is no ATTN_F32, ATTN_F64, ATTN_U8, ATTN_F16 "
                          "or ATTN_BF16",
                          call, name, t->dtype);
    if (dtype == 0 && t->dtype != ATTN_F32 && t->dtype != ATTN_F64)
        return attn__fail(ATTN_ERR_TYPE,
                          "%s: %s has dtype %s; it must be F32 or F64", call,
                          name, attn__dtype_name(t->dtype));
    if (dtype != 0 && t->dtype != dtype)
        return attn__fail(ATTN_ERR_TYPE,
                          "%s: %s has dtype %s; it must be %s here", call, name,
                          attn__dtype_name(t->dtype), attn__dtype_name(dtype));
    return ATTN_OK;
}

/* The addresses [low, high) that a view with elements touches. Once
 * attn__check_tensor has passed it, low < high. */
static void touched(const attn_tensor *t, uintptr_t *low, uintptr_t *high)
{
    uintptr_t bytes = attn__dtype_bytes(t->dtype);
    int64_t first, last;

    (void)view_range(t, &first, &last);
    *low = (uintptr_t)t->data + (uintptr_t)first * bytes;
    *high = (uintptr_t)t->data + ((uintptr_t)last + 1) * bytes;
}

attn_status attn__check_tensor(const char *call, const char *name,
                               const attn_tensor *t, attn_dtype dtype)
{
    attn_status status;
    uintptr_t low, high;
    size_t bytes;

    if (!t)
        return attn__fail(ATTN_ERR_NULL, "%s: %s is NULL", call, name);
    if (t->reserved != 0)
        return attn__fail(ATTN_ERR_UNSUPPORTED,
                          "%s: %s has reserved = %" PRId32
                          "; it must be 0 (was the view initialised?)",
                          call, name, t->reserved);
    status = check_dtype(call, name, t, dtype);
    if (status)
        return status;
    bytes = attn__dtype_bytes(t->dtype);
    status = check_sizes(call, name, t, bytes);
    if (status)
        return status;
    if (attn__count(t) == 0)
        return ATTN_OK;
    if (!t->data)
        return attn__fail(ATTN_ERR_NULL,
                          "%s: %s.data is NULL, but its shape is (%" PRId64
                          ",%" PRId64 ",%" PRId64 ",%" PRId64 ")",
                          call, name, t->shape[0], t->shape[1], t->shape[2],
                          t->shape[3]);
    if ((uintptr_t)t->data % bytes != 0)
        return attn__fail(ATTN_ERR_ALIGN,
                          "%s: %s.data is %p, not a multiple of the %zu bytes "
                          "of its elements",
                          call, name, t->data, bytes);
    touched(t, &low, &high);
    if (low > (uintptr_t)t->data || high <= (uintptr_t)t->data)
        return fail_extent(call, name, t);
    return ATTN_OK;
}

attn_status attn__check_places(const char *call, const char *name,
                               const attn_tensor *t)
{
    if (attn__count(t) == 0 || is_nested(t))
        return ATTN_OK;
    return attn__fail(
        ATTN_ERR_STRIDE,
        "%s: %s has strides (%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64
        ") for shape (%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64
        "); each element of an output needs its own place",
        call, name, t->stride[0], t->stride[1], t->stride[2], t->stride[3],
        t->shape[0], t->shape[1], t->shape[2], t->shape[3]);
}

attn_status attn__check_shape(const char *call, const char *name,
                              const attn_tensor *t, const char *meaning,
                              int64_t s0, int64_t s1, int64_t s2, int64_t s3)
{
    if (t->shape[0] == s0 && t->shape[1] == s1 && t->shape[2] == s2 &&
        t->shape[3] == s3)
        return ATTN_OK;
    return attn__fail(ATTN_ERR_SHAPE,
                      "%s: %s has shape (%" PRId64 ",%" PRId64 ",%" PRId64
                      ",%" PRId64 "); it must be %s = (%" PRId64 ",%" PRId64
                      ",%" PRId64 ",%" PRId64 ")",
                      call, name, t->shape[0], t->shape[1], t->shape[2],
                      t->shape[3], meaning, s0, s1, s2, s3);
}

/* ------------------------------------------------------------- Overlap -- */

static bool same_strides(const attn_tensor *a, const attn_tensor *b)
{
    for (int i = 0; i < 4; i++)
        if (a->shape[i] > 1 && b->shape[i] > 1 && a->stride[i] != b->stride[i])
            return false;
    return true;
}

/*
 * Do two views of one memory layout (same strides, nested) share an element?
 * That is: is delta, the distance of their first elements, a sum of
 * stride * (index in a - index in b)? From the largest stride down only two
 * quotients can work, as all smaller strides together reach less than one step.
 */
static bool lattice_hits(const int64_t *stride, const int64_t *na,
                         const int64_t *nb, int n, int64_t delta)
{
    int64_t q;

    if (n == 0)
        return delta == 0;
    q = delta / stride[0];
    if (delta % stride[0] < 0)
        q--;
    for (int64_t d = q; d <= q + 1; d++)
        if (d > -nb[0] && d < na[0] &&
            lattice_hits(stride + 1, na + 1, nb + 1, n - 1,
                         delta - d * stride[0]))
            return true;
    return false;
}

/* For views whose memory ranges meet. Wrong only towards true. */
static bool elements_meet(const attn_tensor *a, const attn_tensor *b,
                          int64_t bytes)
{
    attn_tensor both = *a;
    int64_t stride[4], na[4], nb[4];
    int axes[4];
    int n;
    int64_t gap = (int64_t)((intptr_t)b->data - (intptr_t)a->data);

    if (a->dtype != b->dtype || gap % bytes != 0 || !same_strides(a, b))
        return true;
    for (int i = 0; i < 4; i++) {
        if (a->shape[i] <= 1)
            both.stride[i] = b->stride[i];
        both.shape[i] = MAX(a->shape[i], b->shape[i]);
        if (both.shape[i] > 1 && both.stride[i] <= 0)
            return true;
    }
    if (!is_nested(&both))
        return true;
    n = sorted_axes(&both, axes);
    for (int i = 0; i < n; i++) {
        stride[i] = both.stride[axes[n - 1 - i]];
        na[i] = a->shape[axes[n - 1 - i]];
        nb[i] = b->shape[axes[n - 1 - i]];
    }
    return lattice_hits(stride, na, nb, n, gap / bytes);
}

attn_status attn__check_apart(const char *call, const char *out_name,
                              const attn_tensor *out, const char *name,
                              const void *memory, size_t bytes)
{
    uintptr_t low, high;

    if (attn__count(out) == 0 || !memory || bytes == 0)
        return ATTN_OK;
    touched(out, &low, &high);
    if (high <= (uintptr_t)memory || low >= (uintptr_t)memory + bytes)
        return ATTN_OK;
    return attn__fail(ATTN_ERR_OVERLAP,
                      "%s: %s (%p) shares memory with %s (%p, %zu bytes); they "
                      "must not overlap",
                      call, out_name, out->data, name, memory, bytes);
}

static bool is_same_view(const attn_tensor *a, const attn_tensor *b)
{
    return a->data == b->data && a->dtype == b->dtype &&
           memcmp(a->shape, b->shape, sizeof a->shape) == 0 &&
           same_strides(a, b);
}

attn_status attn__check_overlap(const char *call, const char *out_name,
                                const attn_tensor *out, const char *other_name,
                                const attn_tensor *other, bool may_be_same)
{
    int64_t out_bytes = (int64_t)attn__dtype_bytes(out->dtype);
    uintptr_t out_low, out_high, low, high;

    if (attn__count(out) == 0 || attn__count(other) == 0)
        return ATTN_OK;
    touched(out, &out_low, &out_high);
    touched(other, &low, &high);
    if (out_high <= low || high <= out_low)
        return ATTN_OK;
    if (may_be_same && is_same_view(out, other))
        return ATTN_OK;
    if (!elements_meet(out, other, out_bytes))
        return ATTN_OK;
    return attn__fail(ATTN_ERR_OVERLAP,
                      "%s: %s (%p) shares memory with %s (%p); %s", call,
                      out_name, out->data, other_name, other->data,
                      may_be_same ? "it may be exactly the same view or apart"
                                  : "they must not overlap");
}

attn_status attn__check_scratch(const char *call, const void *work,
                                size_t work_bytes, size_t needed)
{
    if (needed == 0)
        return ATTN_OK;
    if (!work)
        return attn__fail(ATTN_ERR_NULL,
                          "%s: work is NULL; %zu bytes are needed", call,
                          needed);
    if ((uintptr_t)work % ATTN__ALIGNMENT != 0)
        return attn__fail(ATTN_ERR_WORKSPACE,
                          "%s: work is %p, not a multiple of %d bytes", call,
                          work, ATTN__ALIGNMENT);
    if (work_bytes < needed)
        return attn__fail(ATTN_ERR_WORKSPACE,
                          "%s: work_bytes is %zu; %zu are needed", call,
                          work_bytes, needed);
    return ATTN_OK;
}

/* ------------------------------------------------------ Growing structs -- */

attn_status attn__read_params(const char *call, const char *name, void *copy,
                              size_t copy_bytes, const void *params,
                              size_t first_bytes)
{
    const unsigned char *bytes = params;
    size_t given;

    memset(copy, 0, copy_bytes);
    if (!params)
        return ATTN_OK;
    memcpy(&given, params, sizeof given);
    if (given < first_bytes)
        return attn__fail(ATTN_ERR_STRUCT,
                          "%s: %s.struct_size is %zu, below %zu, the size of "
                          "the first version; was it initialised?",
                          call, name, given, first_bytes);
    for (size_t i = copy_bytes; i < given; i++)
        if (bytes[i] != 0)
            return attn__fail(ATTN_ERR_UNSUPPORTED,
                              "%s: %s has struct_size %zu and is set at byte "
                              "%zu; this version knows %zu bytes",
                              call, name, given, i, copy_bytes);
    memcpy(copy, params, MIN(given, copy_bytes));
    return ATTN_OK;
}
