/*
 * Predicates on arguments. Each returns ATTN_OK or fails with a sentence that
 * begins with the name of the call. They only read the views, never the data.
 */
#ifndef ATTN_CHECK_H
#define ATTN_CHECK_H

/* Not NULL, reserved 0, real type, sizes and extent representable, data there
 * and aligned. dtype 0 accepts F32 and F64, else exactly that type. */
attn_status attn__check_tensor(const char *call, const char *name,
                               const attn_tensor *t, attn_dtype dtype);

/* Of an output: every element has its own place. */
attn_status attn__check_places(const char *call, const char *name,
                               const attn_tensor *t);

/* Shape is exactly the given one; `meaning` tells it in letters. */
attn_status attn__check_shape(const char *call, const char *name,
                              const attn_tensor *t, const char *meaning,
                              int64_t s0, int64_t s1, int64_t s2, int64_t s3);

/* out shares no element with other. If may_be_same, out may be other's very
 * view. Both have passed attn__check_tensor. */
attn_status attn__check_overlap(const char *call, const char *out_name,
                                const attn_tensor *out, const char *other_name,
                                const attn_tensor *other, bool may_be_same);

/* out does not touch these bytes, which are no tensor. NULL is apart. */
attn_status attn__check_apart(const char *call, const char *out_name,
                              const attn_tensor *out, const char *name,
                              const void *memory, size_t bytes);

/* The reader of growing structs: copies what there is of *params (NULL: all
 * defaults) into *copy of copy_bytes, the rest zero. first_bytes is the size
 * of the first version. */
attn_status attn__read_params(const char *call, const char *name, void *copy,
                              size_t copy_bytes, const void *params,
                              size_t first_bytes);

/* The caller's scratch memory: there, aligned and large enough; none is needed
 * for 0 bytes. */
attn_status attn__check_scratch(const char *call, const void *work,
                                size_t work_bytes, size_t needed);

/* "F32" and so on. */
const char *attn__dtype_name(attn_dtype dtype);

/* Product of the sizes, which attn__check_tensor found representable. */
static inline int64_t attn__count(const attn_tensor *t)
{
    return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3];
}

/* a * b and a + b in int64_t; false if it does not fit. */
bool attn__mul_i64(int64_t a, int64_t b, int64_t *product);
bool attn__add_i64(int64_t a, int64_t b, int64_t *sum);

#endif
