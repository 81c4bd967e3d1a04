/*
 * Matrix products. The only module that knows CBLAS: which one is loaded, what
 * it can be asked for without starting threads or losing numbers, and which
 * tiles it likes.
 */
#ifndef ATTN_GEMM_H
#define ATTN_GEMM_H

typedef enum attn__blas_class {
    /* OpenBLAS with AVX-512 kernels: products of at most 10^6 multiply-adds
     * take a path without packing, buffers, locks or threads. */
    ATTN__BLAS_SMALL,
    /* May start threads of its own for products above 2^18 multiply-adds, and
     * is stopped by nothing else for the calling thread only. */
    ATTN__BLAS_LIMITED,
    /* One thread a call, whatever the size. */
    ATTN__BLAS_FREE,
    /* The same, and BLIS: where a dimension is small its kernels read the
     * operands where they stand. */
    ATTN__BLAS_UNPACKED
} attn__blas_class;

/* How this call may use the BLAS: read once at its beginning. */
typedef struct attn__blas {
    attn__blas_class kind;
    int64_t limit;  /* multiply-adds of one product */
    bool exclusive; /* only one thread of the process may be inside */
    bool add_only;  /* adding to zeros is faster than overwriting */
} attn__blas;

attn__blas attn__blas_policy(void);

/* ATTN_OK, or why no product may be asked of the BLAS that is loaded. */
attn_status attn__blas_check(const char *call);

/* Around the products of a task: keeps a BLAS that has a setting per thread
 * from starting threads, and sets it back. */
typedef struct attn__blas_guard {
    bool is_set;
    int before; /* what to set back to */
} attn__blas_guard;
attn__blas_guard attn__blas_enter(void);
void attn__blas_leave(attn__blas_guard guard);

/* The tile of scores for this BLAS: lanes (queries) by keys, the same for all
 * problems of a width. max_width = the larger of D and Dv. The backward pass
 * may like another one. */
typedef struct attn__tile {
    int64_t lanes;
    int64_t keys;
} attn__tile;
attn__tile attn__tile_for(const attn__blas *blas, attn_dtype dtype,
                          int64_t max_width, bool backward);
/* The most keys a tile has for any width. */
int64_t attn__tile_keys(const attn__blas *blas, attn_dtype dtype,
                        bool backward);
/* The most elements a copy of a tile's K or V has, for any width up to this
 * one and at most `keys` keys. */
int64_t attn__tile_copy_elements(const attn__blas *blas, attn_dtype dtype,
                                 int64_t keys, int64_t width);

/*
 * Row-major c (m,n) = op(a) b + beta c, with op(a) (m,k) and b (k,n); beta is 0
 * (c is not read) or 1. a is stored (k,m) if a_transposed. Any sizes, 0 too
 * (k = 0: c = beta c). Leading dimensions are at least the row length and fit
 * an int; where a product is larger than the policy allows it is done in
 * pieces, which depend on its shape only.
 *
 * There is no form with b transposed: it is the one that OpenBLAS's small
 * kernels refuse. All callers have b in the right layout, or put it there.
 */
#define ATTN__DECLARE_GEMM(R, suffix)                                        \
    void attn__gemm_##suffix(const attn__blas *blas, bool a_transposed,      \
                             int64_t m, int64_t n, int64_t k, const R *a,    \
                             int64_t lda, const R *b, int64_t ldb, int beta, \
                             R *c, int64_t ldc);
ATTN__DECLARE_GEMM(float, f32)
ATTN__DECLARE_GEMM(double, f64)
#undef ATTN__DECLARE_GEMM

#endif
