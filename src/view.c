/* Writers of views: every layout in use is only a choice of strides. */
#include "attn_internal.h"

#include "check.h"
#include "status.h"

#include <inttypes.h>

/* Sizes and strides of a view of (B,H,T,D), strides still in elements. */
typedef struct layout {
    int64_t shape[4];
    int64_t stride[4];
} layout;

/* Sizes of memory. Those that are 0 count as 1 in the product, so that strides
 * stay representable. */
static attn_status check_memory(const char *call, attn_dtype dtype,
                                const void *data, const int64_t *sizes, int n)
{
    int64_t count = 1;
    bool empty = false;

    if (attn__dtype_bytes(dtype) == 0)
        return attn__fail(ATTN_ERR_TYPE,
                          "%s: dtype is %" PRId32
                          ", which is no ATTN_F32, ATTN_F64, ATTN_U8, ATTN_F16 "
                          "or ATTN_BF16",
                          call, dtype);
    for (int i = 0; i < n; i++) {
        if (sizes[i] < 0)
            return attn__fail(ATTN_ERR_SIZE,
                              "%s: size %d of the memory is %" PRId64
                              "; sizes must not be negative",
                              call, i, sizes[i]);
        if (!attn__mul_i64(count, MAX(sizes[i], 1), &count))
            return attn__fail(ATTN_ERR_SIZE,
                              "%s: the sizes multiply to more than 2^63-1 "
                              "elements",
                              call);
        empty |= sizes[i] == 0;
    }
    if (!data && !empty)
        return attn__fail(ATTN_ERR_NULL, "%s: data is NULL, but no size is 0",
                          call);
    return ATTN_OK;
}

static void write_view(attn_tensor *view, attn_dtype dtype, const void *data,
                       int64_t first, const layout *l)
{
    attn_tensor t = {0};

    /* Inputs and outputs share one struct; const ends here, see attn.h. */
    /* As a number: of views too large for any memory, which calls refuse, and
     * of empty ones the product may be anything. */
    if (data)
        t.data = (void *)((uintptr_t)data +
                          (uintptr_t)first * attn__dtype_bytes(dtype));
    for (int a = 0; a < 4; a++) {
        t.shape[a] = l->shape[a];
        t.stride[a] = l->stride[a];
    }
    t.dtype = dtype;
    *view = t;
}

static attn_status fail_null(const char *call, const char *name)
{
    return attn__fail(ATTN_ERR_NULL, "%s: %s is NULL", call, name);
}

attn_status attn_view_bhtd(attn_tensor *view, attn_dtype dtype,
                           const void *data, int64_t batch, int64_t heads,
                           int64_t len, int64_t width)
{
    static const char call[] = "attn_view_bhtd";
    const int64_t sizes[] = {batch, heads, len, width};
    attn_status status;

    if (!view)
        return fail_null(call, "view");
    status = check_memory(call, dtype, data, sizes, 4);
    if (status)
        return status;
    write_view(view, dtype, data, 0,
               &(layout){{batch, heads, len, width},
                         {heads * len * width, len * width, width, 1}});
    return ATTN_OK;
}

attn_status attn_view_bthd(attn_tensor *view, attn_dtype dtype,
                           const void *data, int64_t batch, int64_t len,
                           int64_t heads, int64_t width)
{
    static const char call[] = "attn_view_bthd";
    const int64_t sizes[] = {batch, len, heads, width};
    attn_status status;

    if (!view)
        return fail_null(call, "view");
    status = check_memory(call, dtype, data, sizes, 4);
    if (status)
        return status;
    write_view(view, dtype, data, 0,
               &(layout){{batch, heads, len, width},
                         {len * heads * width, width, heads * width, 1}});
    return ATTN_OK;
}

/* Both packed forms: three views `apart` elements from each other. */
static attn_status packed(const char *call, attn_tensor *views[3],
                          attn_dtype dtype, const void *data, int64_t apart,
                          const layout *l)
{
    static const char *const names[] = {"q", "k", "v"};
    const int64_t sizes[] = {l->shape[0], l->shape[1], l->shape[2], l->shape[3],
                             3};
    attn_status status;

    for (int i = 0; i < 3; i++)
        if (!views[i])
            return fail_null(call, names[i]);
    status = check_memory(call, dtype, data, sizes, 5);
    if (status)
        return status;
    for (int i = 0; i < 3; i++)
        write_view(views[i], dtype, data, i * apart, l);
    return ATTN_OK;
}

/* Strides are multiplied in unsigned arithmetic: what overflows is refused by
 * check_memory before it is used. */
static int64_t times(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a * (uint64_t)b);
}

attn_status attn_view_bt3hd(attn_tensor *q, attn_tensor *k, attn_tensor *v,
                            attn_dtype dtype, const void *data, int64_t batch,
                            int64_t len, int64_t heads, int64_t width)
{
    int64_t row = times(heads, width);

    return packed(
        "attn_view_bt3hd", (attn_tensor *[]){q, k, v}, dtype, data, row,
        &(layout){{batch, heads, len, width},
                  {times(len, times(3, row)), width, times(3, row), 1}});
}

attn_status attn_view_bht3d(attn_tensor *q, attn_tensor *k, attn_tensor *v,
                            attn_dtype dtype, const void *data, int64_t batch,
                            int64_t heads, int64_t len, int64_t width)
{
    int64_t row = times(3, width);

    return packed(
        "attn_view_bht3d", (attn_tensor *[]){q, k, v}, dtype, data, width,
        &(layout){{batch, heads, len, width},
                  {times(heads, times(len, row)), times(len, row), row, 1}});
}

attn_status attn_view_thd(attn_tensor *view, attn_dtype dtype, const void *data,
                          int64_t total_len, int64_t heads, int64_t width)
{
    static const char call[] = "attn_view_thd";
    const int64_t sizes[] = {total_len, heads, width};
    attn_status status;

    if (!view)
        return fail_null(call, "view");
    status = check_memory(call, dtype, data, sizes, 3);
    if (status)
        return status;
    write_view(view, dtype, data, 0,
               &(layout){{1, heads, total_len, width},
                         {total_len * heads * width, width, heads * width, 1}});
    return ATTN_OK;
}

attn_status attn_view_bte(attn_tensor *view, attn_dtype dtype, const void *data,
                          int64_t batch, int64_t len, int64_t width)
{
    static const char call[] = "attn_view_bte";
    const int64_t sizes[] = {batch, len, width};
    attn_status status;

    if (!view)
        return fail_null(call, "view");
    status = check_memory(call, dtype, data, sizes, 3);
    if (status)
        return status;
    write_view(view, dtype, data, 0,
               &(layout){{batch, 1, len, width},
                         {len * width, len * width, width, 1}});
    return ATTN_OK;
}

attn_status attn_view_matrix(attn_tensor *view, attn_dtype dtype,
                             const void *data, int64_t rows, int64_t columns,
                             int64_t ld)
{
    static const char call[] = "attn_view_matrix";
    const int64_t sizes[] = {rows, columns};
    int64_t reach;
    attn_status status;

    if (!view)
        return fail_null(call, "view");
    status = check_memory(call, dtype, data, sizes, 2);
    if (status)
        return status;
    if (!attn__mul_i64(rows, ld, &reach))
        return attn__fail(ATTN_ERR_SIZE,
                          "%s: rows is %" PRId64 ", ld %" PRId64
                          "; they multiply to more than 2^63-1",
                          call, rows, ld);
    write_view(view, dtype, data, 0,
               &(layout){{1, 1, rows, columns}, {0, 0, ld, 1}});
    return ATTN_OK;
}

attn_status attn_view_vector(attn_tensor *view, attn_dtype dtype,
                             const void *data, int64_t n)
{
    static const char call[] = "attn_view_vector";
    attn_status status;

    if (!view)
        return fail_null(call, "view");
    status = check_memory(call, dtype, data, &n, 1);
    if (status)
        return status;
    write_view(view, dtype, data, 0, &(layout){{1, 1, 1, n}, {0, 0, 0, 1}});
    return ATTN_OK;
}
