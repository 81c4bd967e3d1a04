/*
 * attn.h - attention on CPUs: softmax(scale Q K^T + mask) V, and the layers
 * around it, in float32 and float64, with matrix-matrix products in CBLAS.
 *
 * Link with -lattn. This header is the whole interface and its manual; what the
 * features are for is told in features.md, cache.md, rotary.md, merge.md and
 * backward.md, which come with it. It is C89-clean, usable from C++98 on, and
 * includes no BLAS header.
 *
 * 1. Letters, used in every comment below
 *
 *   B   batch           Hq  query heads      Hkv key/value heads
 *   Tq  queries         Tk  keys             G = Hq/Hkv, heads per group
 *   D   width of a query or key              Dv  width of a value
 *   E   width of the model (input and output of a multi-head layer)
 *   b batch, h query head, g = h/G (integer division) its key/value head,
 *   i query, j key.
 *
 * 2. What is computed
 *
 *   r(i,j) = sum over d of q(i,d) k(j,d)
 *   u(i,j) = scale r(i,j), or c tanh(scale r(i,j) / c) with a softcap c
 *   z(i,j) = u(i,j) + sum of the ADD masks - alibi slope |p(i) - j|;
 *            -inf where not visible
 *   w(i,j) = exp(z(i,j) - L(i)),   L(i) = ln sum of exp(z(i,j)) over the KEYS,
 *            and the head's sink, if it has one
 *   out(i,e) = sum over j of w(i,j) v(j,e)
 *
 *   scale is 1/sqrt(D) unless set. A key is visible to a query when every
 *   mask and every rule that was given lets it through; they all combine.
 *   (Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, 3.2.)
 *
 * 3. Masks: the polarity is part of the mask, there is no default
 *
 *   ATTN_MASK_KEEP   true  = the key takes part    (PyTorch's SDPA)
 *   ATTN_MASK_DROP   true  = the key is masked out (PyTorch's MHA)
 *   ATTN_MASK_ADD    a number added to u, the scaled and capped q.k;
 *                    -inf = masked out
 *   A masked key has weight exactly 0, whatever its k and v hold, NaN and
 *   inf included. A row that sees no key at all is all zeros (its LSE -inf).
 *
 * 4. Tensors are views (B, H, T, D) with free strides, in elements
 *
 *   element (b,h,t,d) is at data[b*stride[0] + h*stride[1] + t*stride[2]
 *                                + d*stride[3]]
 *   so (B,H,T,D) and (B,T,H,D) memory, packed QKV and ragged batches are only
 *   strides; attn_view_* write them. Inputs may have any strides, 0 and
 *   negative ones too (data points at element (0,0,0,0)); outputs any strides
 *   that give each element its own place. Unit innermost stride is fast.
 *
 * 5. Errors
 *
 *   Every call checks everything first. On an error it returns a negative
 *   status, has written nothing, and attn_last_error() holds a sentence that
 *   names the call, the argument, the values and the rule. Nothing is ever
 *   printed and the process is never ended. NaN and inf in data are data, not
 *   errors: they go where the formulas of section 2 send them.
 *
 * 6. Sizes: 0 is legal for every size. No keys: every row is empty, so zeros.
 *   D = 0: all scores are 0, so out is the mean of the visible values.
 *
 * 7. Threads: every function may be called from several threads at once. Work
 *   is spread over threads only if a context (or ATTN_NUM_THREADS) says so.
 *   Results do not depend on the number of threads, bit for bit. They may
 *   differ between CPUs, BLAS libraries and versions of this library.
 *   No BLAS thread is started (but by a BLIS that was told to: leave
 *   BLIS_NUM_THREADS and OMP_NUM_THREADS at 1) and no BLAS setting is changed.
 *
 * 8. Growing structs: the first member of every options struct is its size.
 *   Start with X_PARAMS_INIT or attn_x_params_init(); all-zero means default
 *   in every field but struct_size and always will. A shorter struct (a program
 * built against an older header) is extended with zeros; a longer one (newer
 * header) is accepted if the part this library does not know is zero.
 */
#ifndef ATTN_H
#define ATTN_H

#include <stddef.h>
#include <stdint.h>

/* The one place where the version is written; the build reads it from here. */
#define ATTN_VERSION_MAJOR 0
#define ATTN_VERSION_MINOR 1
#define ATTN_VERSION_PATCH 0
/* 10000 major + 100 minor + patch; compare with attn_version_number(). */
#define ATTN_VERSION_NUMBER \
    (ATTN_VERSION_MAJOR * 10000 + ATTN_VERSION_MINOR * 100 + ATTN_VERSION_PATCH)

/* Define ATTN_STATIC when linking libattn.a (the packages do it for you). */
#ifndef ATTN_API
#if defined(__GNUC__) && !defined(ATTN_STATIC)
#define ATTN_API __attribute__((visibility("default")))
#else
#define ATTN_API
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------- Status -- */

/* 0 = done; negative = nothing was done. The numbers never change. */
typedef int32_t attn_status;
#define ATTN_OK 0                 /* done */
#define ATTN_ERR_NULL (-1)        /* a required pointer is NULL */
#define ATTN_ERR_SIZE (-2)        /* a size is negative or too large */
#define ATTN_ERR_SHAPE (-3)       /* sizes of two arguments do not fit */
#define ATTN_ERR_TYPE (-4)        /* element type unknown or unequal */
#define ATTN_ERR_VALUE (-5)       /* a constant or number is not allowed */
#define ATTN_ERR_STRUCT (-6)      /* struct_size is below the first version */
#define ATTN_ERR_UNSUPPORTED (-7) /* asks for what this version cannot do */
#define ATTN_ERR_STRIDE (-8)      /* strides that cannot work */
#define ATTN_ERR_ALIGN (-9)       /* pointer not aligned to its type */
#define ATTN_ERR_OVERLAP (-10)    /* an output shares memory with something */
#define ATTN_ERR_WORKSPACE (-11)  /* scratch memory too small or misaligned */
#define ATTN_ERR_NOMEM (-12)      /* allocation failed */
#define ATTN_ERR_BLAS (-13)       /* the loaded BLAS cannot be used */
#define ATTN_ERR_FULL (-14)       /* a key/value cache has no room left */

/* A constant text for a status; for an unknown one a text that says so.
 * Never NULL. */
ATTN_API const char *attn_strerror(attn_status status);

/* The sentence of this thread's last failed call, e.g. "attn_sdpa: v has 6
 * keys, k has 5; k and v must have the same length (shape[2])". Empty before
 * the first failure; a later success leaves it. Valid until this thread's next
 * failure. Never NULL. */
ATTN_API const char *attn_last_error(void);

/* "0.1.0": of the library that runs, not of the header. Never NULL. */
ATTN_API const char *attn_version(void);
/* ATTN_VERSION_NUMBER of the library that runs. */
ATTN_API int32_t attn_version_number(void);
/* One line: version, compiler, instruction-set level in use. Never NULL. */
ATTN_API const char *attn_build_info(void);
/* One line: which BLAS is loaded, its threading, its core type, how libattn
 * uses it (tile class, whether calls are serialised), and, where an OpenBLAS
 * plays an older processor than this one, which OPENBLAS_CORETYPE in the
 * environment would be faster. Never NULL. */
ATTN_API const char *attn_blas_info(void);

/* ------------------------------------------------------------ Tensors -- */

typedef int32_t attn_dtype;
#define ATTN_F32 1 /* float */
#define ATTN_F64 2 /* double */
#define ATTN_U8 3  /* unsigned char, for KEEP and DROP masks: 0 is false */
/* Storage of k and v only, 16 bits a number; all else is then F32. */
#define ATTN_F16 4  /* IEEE 754 binary16 */
#define ATTN_BF16 5 /* the upper half of a float */

/* A view of memory that the caller owns. The library never writes through a
 * tensor that is passed as an input. Dimensions that an argument does not have
 * are of size 1: a matrix is (1,1,rows,columns), a vector (1,1,1,n), the input
 * of a layer (B,1,T,E). A stride whose size is 1 is ignored. */
typedef struct attn_tensor {
    void *data;
    int64_t shape[4];
    int64_t stride[4]; /* in elements */
    attn_dtype dtype;
    int32_t reserved; /* 0 */
} attn_tensor;

/*
 * Writers of views. All fill *view (and set reserved to 0); data may be NULL
 * when a size is 0, and its const is only for convenience. They return
 * ATTN_ERR_NULL, ATTN_ERR_SIZE (negative, or more than INT64_MAX elements) or
 * ATTN_ERR_TYPE, with the view untouched.
 */
/* Contiguous (B,H,T,D). */
ATTN_API attn_status attn_view_bhtd(attn_tensor *view, attn_dtype dtype,
                                    const void *data, int64_t batch,
                                    int64_t heads, int64_t len, int64_t width);
/* (B,T,H,D) memory, which is (B,T,H*D) cut into heads, as (B,H,T,D): head 0 is
 * columns 0..D-1. This view is the head split; no copy is needed. */
ATTN_API attn_status attn_view_bthd(attn_tensor *view, attn_dtype dtype,
                                    const void *data, int64_t batch,
                                    int64_t len, int64_t heads, int64_t width);
/* Packed (B,T,3,H,D) memory as three views. */
ATTN_API attn_status attn_view_bt3hd(attn_tensor *q, attn_tensor *k,
                                     attn_tensor *v, attn_dtype dtype,
                                     const void *data, int64_t batch,
                                     int64_t len, int64_t heads, int64_t width);
/* Packed (B,H,T,3,D) memory as three views. */
ATTN_API attn_status attn_view_bht3d(attn_tensor *q, attn_tensor *k,
                                     attn_tensor *v, attn_dtype dtype,
                                     const void *data, int64_t batch,
                                     int64_t heads, int64_t len, int64_t width);
/* Ragged (T,H,D) memory, all sequences one after the other, as (1,H,T,D); for
 * use with cu_q and cu_k. */
ATTN_API attn_status attn_view_thd(attn_tensor *view, attn_dtype dtype,
                                   const void *data, int64_t total_len,
                                   int64_t heads, int64_t width);
/* Input or output of a layer: contiguous (B,T,E) as (B,1,T,E). */
ATTN_API attn_status attn_view_bte(attn_tensor *view, attn_dtype dtype,
                                   const void *data, int64_t batch, int64_t len,
                                   int64_t width);
/* A row-major matrix as (1,1,rows,columns), rows ld elements apart. */
ATTN_API attn_status attn_view_matrix(attn_tensor *view, attn_dtype dtype,
                                      const void *data, int64_t rows,
                                      int64_t columns, int64_t ld);
/* A vector as (1,1,1,n). */
ATTN_API attn_status attn_view_vector(attn_tensor *view, attn_dtype dtype,
                                      const void *data, int64_t n);

/* ------------------------------------------------------------ Context -- */

/* Runs task(arg, index) once for every index in [0, n), in any order and on
 * any threads, and returns when all have ended. user is the context's. */
typedef void (*attn_task_fn)(void *arg, int64_t index);
typedef void (*attn_parallel_for_fn)(void *user, int64_t n, attn_task_fn task,
                                     void *arg);
/* bytes at a multiple of alignment (a power of two), or NULL. */
typedef void *(*attn_alloc_fn)(void *user, size_t bytes, size_t alignment);
typedef void (*attn_free_fn)(void *user, void *ptr);

/* How calls run. Immutable, shared freely between threads; it must outlive the
 * calls that use it. NULL wherever a context is asked for means:
 * ATTN_NUM_THREADS threads of a pool shared by the process if that variable was
 * set to a number when it was first needed, else the calling thread alone; the
 * C library's allocator. */
typedef struct attn_context attn_context;

typedef struct attn_context_params {
    size_t struct_size;
    int32_t num_threads; /* 0: ATTN_NUM_THREADS, else 1; at most 1024 */
    int32_t reserved;    /* 0 */
    /* The host's own threads in place of a pool of ours; NULL: our pool, whose
     * threads start at the first call that needs them. It is called with n up
     * to num_threads and may run tasks one after the other. */
    attn_parallel_for_fn parallel_for;
    void *parallel_user;
    /* Both or neither. */
    attn_alloc_fn alloc;
    attn_free_fn free;
    void *alloc_user;
} attn_context_params;

#define ATTN_CONTEXT_PARAMS_INIT                                        \
    {                                                                   \
        sizeof(attn_context_params), 0, 0, NULL, NULL, NULL, NULL, NULL \
    }
ATTN_API void attn_context_params_init(attn_context_params *params);

/* params NULL: defaults. On failure *context is untouched. Returns
 * ATTN_ERR_NULL, _STRUCT, _UNSUPPORTED, _VALUE, _NOMEM. */
ATTN_API attn_status attn_context_create(attn_context **context,
                                         const attn_context_params *params);
/* Ends its threads. No call may be using it. NULL is allowed. */
ATTN_API void attn_context_destroy(attn_context *context);
/* The number of threads calls with this context use at most (NULL: default). */
ATTN_API int32_t attn_context_num_threads(const attn_context *context);

/* ---------------------------------------------------- Element types -- */

/*
 * y = x, element by element, each F32, F64, F16 or BF16. To fewer bits numbers
 * are rounded once, to the nearest, ties to even, and what is too large becomes
 * inf; subnormal numbers are numbers. NaN stays NaN, of the same sign and
 * quiet. Equal types: a copy of the very bits. Rounding modes and flush-to-zero
 * of the processor matter only between F32 and F64. x, y: same shape, any
 * strides. y may be x itself if the types are equal (same data and strides),
 * else they must not overlap. Returns ATTN_ERR_NULL, _SIZE, _SHAPE, _TYPE,
 * _STRIDE, _ALIGN, _OVERLAP, _UNSUPPORTED (tensor.reserved not 0).
 */
ATTN_API attn_status attn_convert(const attn_context *context,
                                  const attn_tensor *x, const attn_tensor *y);

/* ------------------------------------------------------------ Softmax -- */

/*
 * y = softmax of every row of x along the LAST axis (shape[3]):
 *   y(..,j) = exp(x(..,j) - m) / sum over j of exp(x(..,j) - m),  m = max x
 *   lse(..) = m + ln(sum over j of exp(x(..,j) - m))
 * x, y: same shape and type, F32 or F64, any strides; y may be x itself (same
 * data and strides), else they must not overlap. lse: NULL, or of shape
 * (x.shape[0], x.shape[1], x.shape[2], 1) and the same type.
 * A row of -inf only, or of no elements, gives zeros and lse -inf; a row with
 * NaN or +inf gives NaN. Rows whose values are far from 0 (+-1802 in float32)
 * are exact: m is subtracted first.
 * Returns ATTN_ERR_NULL, _SIZE, _SHAPE, _TYPE, _STRIDE, _ALIGN, _OVERLAP,
 * _UNSUPPORTED (tensor.reserved not 0).
 */
ATTN_API attn_status attn_softmax(const attn_tensor *x, const attn_tensor *y,
                                  const attn_tensor *lse);

/*
 * Largest |sum over j of w(..,j) - 1| over the rows of w (F32 or F64), summed
 * in double; rows that are all exactly 0 (empty rows) are passed over and
 * counted in *empty_rows unless that is NULL. A row that holds NaN makes
 * *deviation NaN. For softmax weights expect a few units of 2.2e-16 (F64) or
 * 1.2e-7 (F32); a softmax along the wrong axis shows at once.
 * Returns as attn_softmax.
 */
ATTN_API attn_status attn_weights_check(const attn_tensor *w, double *deviation,
                                        int64_t *empty_rows);

/* -------------------------------------------------------------- Masks -- */

#define ATTN_MASK_KEEP 1 /* U8: true (not 0) = the key takes part */
#define ATTN_MASK_DROP 2 /* U8: true (not 0) = the key is masked out */
#define ATTN_MASK_ADD 3  /* F32/F64: added to u; -inf masks out */

/* A mask over (B, Hq, Tq, Tk). Each size of the view is the full one or 1; 1
 * is broadcast (as a stride of 0 is). Key padding is (B,1,1,Tk). Of an ADD
 * mask the type is that of the scores. */
typedef struct attn_mask {
    int32_t kind;     /* one of the three above; 0 is an error */
    int32_t reserved; /* 0 */
    attn_tensor view;
} attn_mask;

/* As many masks as one call takes. */
#define ATTN_MAX_MASKS 4

/* A contiguous mask of the given sizes, each full or 1. dtype must fit kind.
 * Returns ATTN_ERR_NULL, _SIZE, _TYPE, _VALUE. */
ATTN_API attn_status attn_mask_init(attn_mask *mask, int32_t kind,
                                    attn_dtype dtype, const void *data,
                                    int64_t batch, int64_t heads, int64_t q_len,
                                    int64_t kv_len);

/*
 * Builders: fill the memory of *mask, in its own kind and type, so that
 * exactly these keys are visible:
 *   causal:   j <= offset + i    (offset 0: top-left aligned, as PyTorch's
 *             is_causal; Tk - Tq: bottom-right, the last query sees all keys)
 *   window:   -right <= offset + i - j <= left; -1 = unbounded. A model's
 *             "window of W tokens" with causal is left = W-1, right = 0.
 *   padding:  j < kv_lens[b]; kv_lens has view.shape[0] entries, each in
 *             [0, view.shape[3]]
 * attn_sdpa has all three as options that cost no memory; these are for the
 * masks of other programs. Every dimension is written as it stands (a size of
 * 1 has only index 0).
 * Returns ATTN_ERR_NULL, _SIZE, _TYPE, _VALUE (unknown kind, window below -1,
 * a length out of range), _STRIDE, _ALIGN, _UNSUPPORTED.
 */
ATTN_API attn_status attn_mask_causal(const attn_mask *mask, int64_t offset);
ATTN_API attn_status attn_mask_window(const attn_mask *mask, int64_t offset,
                                      int64_t left, int64_t right);
ATTN_API attn_status attn_mask_padding(const attn_mask *mask,
                                       const int64_t *kv_lens);

/*
 * scores = scores + all ADD masks, then -inf wherever a mask hides the key, in
 * place. scores: (B,Hq,Tq,Tk), F32 or F64, any strides. A hidden score is
 * replaced whatever it was, NaN included; an ADD value of -inf hides.
 * num_masks in [0, ATTN_MAX_MASKS]. Returns ATTN_ERR_NULL, _SIZE, _SHAPE,
 * _TYPE, _VALUE, _STRIDE, _ALIGN, _OVERLAP, _UNSUPPORTED.
 */
ATTN_API attn_status attn_mask_apply(const attn_mask *masks, int32_t num_masks,
                                     const attn_tensor *scores);

/* -------------------------------------------------- Heads, projections -- */

/*
 * Copies between (B,1,T,H*D), the rows of a layer, and (B,H,T,D):
 *   split: dst(b,h,t,d) = src(b,0,t,h*D+d)     merge: the reverse
 * No arithmetic; any strides; F32 or F64, equal types. H and D are those of the
 * 4-dimensional side. Usually not needed: attn_view_bthd() sees the same
 * elements in place. Returns ATTN_ERR_NULL, _SIZE, _SHAPE, _TYPE, _STRIDE,
 * _ALIGN, _OVERLAP, _UNSUPPORTED.
 */
ATTN_API attn_status attn_split_heads(const attn_tensor *src,
                                      const attn_tensor *dst);
ATTN_API attn_status attn_merge_heads(const attn_tensor *src,
                                      const attn_tensor *dst);

/* How the matrix of a projection is stored; there is no default. */
#define ATTN_WEIGHT_OUT_IN                                                    \
    1                        /* (out, in): y = x W^T + b, as PyTorch's Linear \
                              */
#define ATTN_WEIGHT_IN_OUT 2 /* (in, out): y = x W + b, as in the paper */

/*
 * Linear layer, through GEMM: y(..,n) = sum over m of x(..,m) W(m,n) + b(n).
 * x (B,H,T,in), y (B,H,T,out), w (1,1,out,in) or (1,1,in,out) as layout says,
 * bias (1,1,1,out) or NULL. One type for all, F32 or F64. in = 0 gives the
 * bias. y must not overlap x, w or bias.
 * Returns ATTN_ERR_NULL, _SIZE, _SHAPE, _TYPE, _VALUE (layout), _STRIDE,
 * _ALIGN, _OVERLAP, _NOMEM, _BLAS, _UNSUPPORTED.
 */
ATTN_API attn_status attn_linear(const attn_context *context, int32_t layout,
                                 const attn_tensor *x, const attn_tensor *w,
                                 const attn_tensor *bias, const attn_tensor *y);

/* ------------------------------------------------- Positions: rotary -- */

/* Which two components of a row turn together; there is no default. */
#define ATTN_ROTARY_INTERLEAVED 1 /* 2k and 2k+1 (the paper; GPT-J) */
#define ATTN_ROTARY_HALVES 2      /* k and k+R/2 (GPT-NeoX, Hugging Face) */

/*
 * Tables of rotary position embeddings (Su et al., arXiv:2104.09864):
 *   cos_table(p,k) = cos((first + p) theta(k)),  theta(k) = base^(-2k/width)
 *   sin_table(p,k) = sin((first + p) theta(k)),  0 <= k < width/2
 * Both (1,1,P,width/2), of one type, F32 or F64, any strides; they must not
 * overlap. Row p is position first + p. width is R, how many components of a
 * row turn, even; base (10000 in the paper) is finite and at least 1.
 * theta and the angles are kept to twice the digits of a double: every entry is
 * within 2^-51 (F64) or 2^-24 (F32) of the formula, at position 10^6 as at 1
 * (positions below 2^32, width up to 1024). Other frequencies, and factors on
 * the entries, are tables that the caller fills.
 * Returns ATTN_ERR_NULL, _SIZE, _SHAPE, _TYPE, _VALUE (width odd or negative,
 * base, a position beyond 2^53), _STRIDE, _ALIGN, _OVERLAP, _UNSUPPORTED.
 */
ATTN_API attn_status attn_rotary_tables(int64_t first, int64_t width,
                                        double base,
                                        const attn_tensor *cos_table,
                                        const attn_tensor *sin_table);

/* Options of attn_rotary. p(b,t) is the row of the tables for x(b,..,t,..):
 * positions[b*T + t] if given, else offsets[b] + t if given, else offset + t.
 * What is given excludes the others. */
typedef struct attn_rotary_params {
    size_t struct_size;
    int32_t style;            /* ATTN_ROTARY_*; 0 is an error */
    int32_t inverse;          /* 1: turn by -theta */
    int64_t offset;           /* e.g. how many keys a cache already holds */
    const int64_t *offsets;   /* [B]; or NULL */
    const int64_t *positions; /* [B*T]; or NULL */
} attn_rotary_params;

#define ATTN_ROTARY_PARAMS_INIT                         \
    {                                                   \
        sizeof(attn_rotary_params), 0, 0, 0, NULL, NULL \
    }
ATTN_API void attn_rotary_params_init(attn_rotary_params *params);

/*
 * Turns pairs of components of every row of x, the queries or keys, by the
 * angle of its position, so that q.k depends on the difference of positions:
 *   y(d1) = c x(d1) - s x(d2)     c = cos_table(p,k), s = sin_table(p,k)
 *   y(d2) = s x(d1) + c x(d2)     (d1,d2) = (2k,2k+1) or (k,k+R/2), by style
 * for 0 <= k < R/2; the components from R on are copied. With inverse s is
 * -s: that undoes a rotation, and turns the gradient of y into that of x.
 * x, y (B,H,T,D), tables (1,1,P,R/2) with R <= D; one type for all, F32 or
 * F64; any strides. y may be x itself (same data and strides), else no overlap
 * with anything. A ragged batch is (1,H,T,D) with positions. NaN and inf stay
 * in their pair. Any size may be 0; R = 0 copies.
 * Returns ATTN_ERR_NULL (params too), _SIZE, _SHAPE (R > D), _TYPE, _VALUE
 * (style, inverse, a position outside [0,P), two of offset, offsets and
 * positions), _STRUCT, _UNSUPPORTED, _STRIDE, _ALIGN, _OVERLAP.
 */
ATTN_API attn_status attn_rotary(const attn_context *context,
                                 const attn_rotary_params *params,
                                 const attn_tensor *x,
                                 const attn_tensor *cos_table,
                                 const attn_tensor *sin_table,
                                 const attn_tensor *y);

/* -------------------------------------------------- Positions: ALiBi -- */

/*
 * The slopes of attention with linear biases (Press et al., arXiv:2108.12409)
 * for H heads, with n the largest power of two not above H:
 *   slope(h) = 2^(-8 (h+1)/n)              for h < n
 *            = 2^(-4 (2 (h-n) + 1)/n)      for h >= n
 * slopes: F32 or F64, any strides, either a vector (1,1,1,H) or (B,H,1,1),
 * the same for every b. H = 0 writes nothing.
 * Returns ATTN_ERR_NULL, _SIZE, _SHAPE, _TYPE, _STRIDE, _ALIGN, _UNSUPPORTED.
 */
ATTN_API attn_status attn_alibi_slopes(const attn_tensor *slopes);

/* ------------------------------------- Scaled dot-product attention -- */

/* Flags. */
#define ATTN_SDPA_SCALE 1  /* scale was set; else it is 1/sqrt(D) */
#define ATTN_SDPA_WINDOW 2 /* window_left and window_right were set */
/* Every product through CBLAS, also those with few queries (decoding), where
 * the library's own loops are faster. Results differ by rounding. */
#define ATTN_SDPA_BLAS_ONLY 4

/* Where query 0 stands, offset(b). With F = kv_offsets[b], which is 0 if not
 * given, and the lengths q_len and kv_len of the sequence (of q and k, q_lens,
 * kv_lens or ragged; kv_starts does not count):
 *   TOP_LEFT       F: with key 0 (PyTorch)
 *   BOTTOM_RIGHT   F + kv_len - q_len: the last query with the last key
 *   OFFSET         q_offset, or q_offsets[b] if that is not NULL
 * Needed (not 0) for causal, window, chunk and alibi unless every sequence has
 * as many queries as keys, where all agree. */
#define ATTN_ALIGN_TOP_LEFT 1
#define ATTN_ALIGN_BOTTOM_RIGHT 2
#define ATTN_ALIGN_OFFSET 3

/*
 * Options of attn_sdpa. p(i) = offset(b) + i is the position of query i; keys
 * stand at j. Everything given is combined: a key is visible when each of the
 * masks, causal, window, chunk, lengths, segments and blocks lets it through.
 */
typedef struct attn_sdpa_params {
    size_t struct_size;
    int32_t flags;  /* ATTN_SDPA_SCALE, _WINDOW, _BLAS_ONLY or-ed */
    int32_t causal; /* 1: visible only if j <= p(i), or j < prefix_lens[b] */
    int32_t align;  /* ATTN_ALIGN_*, see above */
    int32_t num_masks;
    const attn_mask *masks;   /* num_masks of them; NULL if 0 */
    double scale;             /* any finite number, 0 and negative included */
    int64_t q_offset;         /* with ATTN_ALIGN_OFFSET; may be negative */
    const int64_t *q_offsets; /* [B], in place of q_offset (then 0); or NULL */
    /* Visible only if -window_right <= p(i) - j <= window_left; each bound is
     * inclusive, -1 = unbounded; set both. "A window of W tokens" is
     * window_left = W-1, with causal window_right = -1.
     * Keys at 0 <= j < keep_first are visible in spite of the window. */
    int64_t window_left;
    int64_t window_right;
    int64_t keep_first;
    int64_t chunk; /* > 0: visible only if floor(p(i)/chunk) = floor(j/chunk) */
    /* [B]: prefix-LM, needs causal. In [0,Tk], 0 is none; with kv_offsets a
     * position, any from 0 on. */
    const int64_t *prefix_lens;
    const int64_t *q_lens;  /* [B], in [0,Tq]: rows beyond are zeros; or NULL */
    const int64_t *kv_lens; /* [B], in [0,Tk]: keys beyond are never read */
    /* Ragged batch: q, k, v and out are (1,H,T,D); sequence s is the queries
     * cu_q[s]..cu_q[s+1]-1 and the keys cu_k[s]..cu_k[s+1]-1. Both arrays have
     * num_seqs+1 non-decreasing entries in [0,T]; equal neighbours are an empty
     * sequence. Rows outside are neither read nor written. B in the other
     * arrays and in masks' shape[0] is then num_seqs, and masks and weights are
     * indexed by the position inside the sequence: their Tq and Tk are the
     * longest sequence's. Excludes q_lens and, except with pages, kv_lens. */
    const int64_t *cu_q;
    const int64_t *cu_k;
    int64_t num_seqs;
    /* Optional outputs, in the type of out. */
    const attn_tensor *lse; /* (B,Hq,Tq,1): ln sum exp z; ragged (1,Hq,T,1) */
    const attn_tensor *weights;      /* (B,Hq,Tq,Tk): w */
    const attn_tensor *weights_mean; /* (B,1,Tq,Tk): mean of w over the heads */
    /* More that acts on the scores. Slopes and sinks are vectors (1,1,1,Hq) or
     * (B,Hq,1,1), in the type of q. */
    double softcap; /* c > 0 and finite; 0: none */
    /* z -= slope(h) |p(i) - j|; attn_alibi_slopes writes the usual ones. Needs
     * align, as causal does. */
    const attn_tensor *alibi;
    /* A learned logit per head that takes part in the sum, without a value:
     * rows of w sum to less than 1. A row that sees no key is zeros still, its
     * LSE is the sink. (PyTorch's add_zero_attn is a sink of 0.) */
    const attn_tensor *sinks;
    /* More rules. Keys below kv_starts[b] are never read (left padding); it is
     * in [0,Tk], and no key is visible if it is not below kv_lens[b]. */
    const int64_t *kv_starts;
    /* Visible only if both segments are equal: [B*Tq] and [B*Tk], row b*Tq + i
     * and b*Tk + j; with cu_q one for each row of q, with cu_k of k. Both or
     * neither. */
    const int32_t *q_segments;
    const int32_t *kv_segments;
    /* Block-sparse: U8, (B,Hq,ceil(Tq/block_q),ceil(Tk/block_k)), B and Hq or
     * 1; visible only if the block of (i,j) is not 0. Keys whose blocks are 0
     * for all queries that are computed together are not computed. */
    const attn_tensor *blocks;
    int64_t block_q;
    int64_t block_k;
    /* Keys in pages: k and v are pools (P,Hkv,page,D) and (P,Hkv,page,Dv), and
     * key j of sequence b is row j % page of page
     * page_table[b*pages_per_seq + j/page]. Tk is then pages_per_seq*page and
     * kv_lens is needed. Entries in [0,P) where a key in
     * [kv_starts[b],kv_lens[b]) lies, else anything, -1 by custom. May go with
     * cu_q, then without cu_k; pages may be shared. */
    const int32_t *page_table;
    int64_t pages_per_seq;
    /* Keys in a ring: key j of sequence b is row (ring_starts[b] + j) % Tk of k
     * and v; [B], in [0,Tk), or 0 if Tk is. Excludes pages and cu_k. */
    const int64_t *ring_starts;
    /* [B]: key j stands at kv_offsets[b] + j, as in a ring that has dropped
     * keys; or NULL: at j. Causal, window, keep_first, chunk, prefix_lens and
     * alibi go by these positions; then align is needed, and these offsets
     * and those of queries must be below 2^62 in magnitude. */
    const int64_t *kv_offsets;
    /* More optional outputs, in the type of out. The scores as (B,Hq,Tq,Tk),
     * on their way: scale r (0 for keys that are never read), u, and z with
     * -inf where not visible. */
    const attn_tensor *scores_raw;
    const attn_tensor *scores_capped;
    const attn_tensor *scores;
    const attn_tensor *key_sums; /* (B,Hq,1,Tk): sum over i of w */
    /* Of each row, as lse: the largest weight, the effective number of keys
     * 1 / sum of w^2, and the entropy -sum of w ln w; 0 for empty rows. With a
     * sink w sums to less than 1, so the second may exceed the keys. */
    const attn_tensor *max_weight;
    const attn_tensor *effective_keys;
    const attn_tensor *entropy;
} attn_sdpa_params;

#define ATTN_SDPA_PARAMS_INIT                                                 \
    {                                                                         \
        sizeof(attn_sdpa_params), 0, 0, 0, 0, NULL, 0.0, 0, NULL, 0, 0, 0, 0, \
            NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, NULL, 0.0, NULL,     \
            NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, 0, NULL, NULL, NULL,    \
            NULL, NULL, NULL, NULL, NULL, NULL                                \
    }
ATTN_API void attn_sdpa_params_init(attn_sdpa_params *params);

/*
 * Attention as in section 2 of the top comment.
 *   q (B,Hq,Tq,D)  k (B,Hkv,Tk,D)  v (B,Hkv,Tk,Dv)  ->  out (B,Hq,Tq,Dv)
 * Hq must be a multiple of Hkv; head h uses key/value head h/(Hq/Hkv). One type
 * for all, F32 or F64, but that k and v may both be F16 or both be BF16 with
 * F32: their numbers are exactly those floats. Any strides; k and v may be the
 * same memory. out may be exactly q's view (D = Dv) unless weights, scores or
 * key sums are asked for, else no output may overlap an input or another
 * output. params NULL: defaults. In a batch of ragged or padded sequences every
 * row of an output that belongs to a sequence is written; rows at and beyond
 * q_lens[b] become 0 (lse and scores: -inf).
 *
 * A visible NaN gives NaN in its row; finite inputs never give NaN unless a
 * product overflows. Scratch memory is O(1) in Tq and Tk per thread (plus two
 * numbers a row if weights or key sums are asked for).
 *
 * attn_sdpa gets its scratch memory itself. attn_sdpa_work uses the caller's
 * and never allocates: attn_sdpa_workspace gives bytes and alignment, enough
 * also, with the same params, for every problem none of whose sizes is larger
 * and for every thread count not above the context's. attn_sdpa_check runs
 * nothing and returns what the call would return for these arguments, with its
 * sentence.
 *
 * Return ATTN_ERR_NULL, _SIZE, _SHAPE, _TYPE, _VALUE, _STRUCT, _UNSUPPORTED,
 * _STRIDE, _ALIGN, _OVERLAP, _BLAS; attn_sdpa also _NOMEM, attn_sdpa_work also
 * _WORKSPACE.
 */
ATTN_API attn_status attn_sdpa(const attn_context *context,
                               const attn_sdpa_params *params,
                               const attn_tensor *q, const attn_tensor *k,
                               const attn_tensor *v, const attn_tensor *out);
ATTN_API attn_status attn_sdpa_check(const attn_context *context,
                                     const attn_sdpa_params *params,
                                     const attn_tensor *q, const attn_tensor *k,
                                     const attn_tensor *v,
                                     const attn_tensor *out);
ATTN_API attn_status attn_sdpa_workspace(
    const attn_context *context, const attn_sdpa_params *params,
    const attn_tensor *q, const attn_tensor *k, const attn_tensor *v,
    const attn_tensor *out, size_t *bytes, size_t *alignment);
ATTN_API attn_status attn_sdpa_work(const attn_context *context,
                                    const attn_sdpa_params *params,
                                    const attn_tensor *q, const attn_tensor *k,
                                    const attn_tensor *v,
                                    const attn_tensor *out, void *work,
                                    size_t work_bytes);

/*
 * The ordinary case in one call: contiguous (B,H,T,D) arrays, Dv = D, default
 * scale, default context. causal_align: 0 = not causal, else
 * ATTN_ALIGN_TOP_LEFT or ATTN_ALIGN_BOTTOM_RIGHT. Returns as attn_sdpa.
 */
ATTN_API attn_status attn_sdpa_f32(int64_t batch, int64_t heads,
                                   int64_t kv_heads, int64_t q_len,
                                   int64_t kv_len, int64_t width,
                                   const float *q, const float *k,
                                   const float *v, float *out,
                                   int32_t causal_align);
/* Like attn_sdpa_f32, in double. */
ATTN_API attn_status attn_sdpa_f64(int64_t batch, int64_t heads,
                                   int64_t kv_heads, int64_t q_len,
                                   int64_t kv_len, int64_t width,
                                   const double *q, const double *k,
                                   const double *v, double *out,
                                   int32_t causal_align);

/* -------------------------------------------- Gradients of attention -- */

/* Flags of gradients: added to what their memory holds, instead of set. No bit
 * is one of the flags of attn_sdpa_params, which would be taken for another. */
#define ATTN_SDPA_ADD_D_Q 0x100
#define ATTN_SDPA_ADD_D_K 0x200
#define ATTN_SDPA_ADD_D_V 0x400
#define ATTN_SDPA_ADD_D_MASKS 0x800 /* of each mask */
#define ATTN_SDPA_ADD_D_ALIBI 0x1000
#define ATTN_SDPA_ADD_D_SINKS 0x2000
#define ATTN_SDPA_ADD_D_SCALE 0x4000

/* Of a loss that depends on out and, if d_lse is given, on lse. Every output is
 * optional: NULL is not wanted, and not computed. All are of the type of q.
 * What is summed goes by sizes of 1, never by strides of 0: k or v that the
 * batch shares by a stride has gradients of the full size. */
typedef struct attn_sdpa_gradients {
    size_t struct_size;
    int32_t flags;            /* ATTN_SDPA_ADD_* or-ed; 0: all are set */
    int32_t reserved;         /* 0 */
    const attn_tensor *d_lse; /* input, or NULL: d loss / d lse, as lse */
    const attn_tensor *d_q;   /* as q */
    const attn_tensor *d_k;   /* sizes as k */
    const attn_tensor *d_v;   /* sizes as v */
    /* params.num_masks pointers (not 0), each NULL or, of an ADD mask, with the
     * sizes of its view: summed over where those are 1. NULL: none. */
    const attn_tensor *const *d_masks;
    const attn_tensor *d_alibi; /* sizes as params.alibi, which is there */
    const attn_tensor *d_sinks; /* sizes as params.sinks, which is there */
    const attn_tensor *d_scale; /* (1,1,1,1); also of a default scale */
} attn_sdpa_gradients;

#define ATTN_SDPA_GRADIENTS_INIT                                               \
    {                                                                          \
        sizeof(attn_sdpa_gradients), 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, \
            NULL, NULL                                                         \
    }
ATTN_API void attn_sdpa_gradients_init(attn_sdpa_gradients *gradients);

/*
 * The gradients of attn_sdpa, from what it was given and what it gave: params,
 * q, k and v are those of that call, out is its result and params->lse, which
 * must be there, is read: it is what a loop that trains keeps of a call (not
 * the weights, which are computed again). Any out and lse of the same formula
 * do; also those over more keys than k and v have here, as where each machine
 * has a part of them: then d_k and d_v are of that part, and the d_q of all
 * parts add up. d_out (B,Hq,Tq,Dv) is d loss / d out. With w, u and z as in
 * section 2 of the top comment:
 *
 *   delta(i) = sum over e of d_out(i,e) out(i,e)
 *   dz(i,j)  = w(i,j) (d_out(i).v(j) - delta(i) + d_lse(i))
 *   du(i,j)  = dz(i,j), or dz(i,j) (1 - (u(i,j)/c)^2) with a softcap c
 *   d_q(i) = scale sum over j of du(i,j) k(j)
 *   d_k(j) = scale sum over i and the heads of the group of du(i,j) q(i)
 *   d_v(j) = sum over i and the heads of the group of w(i,j) d_out(i)
 *   d_mask = dz summed over the sizes that are 1
 *   d_alibi(h) = - sum over i, j of |p(i) - j| dz(i,j)
 *   d_sinks(h) = sum over i of exp(sink(h) - lse(i)) (d_lse(i) - delta(i))
 *   d_scale = sum over b, h, i, j of du(i,j) q(i).k(j)
 *   (d_alibi, d_sinks: over b too, unless they are (B,Hq,1,1).)
 *
 * Where a key is not visible w is exactly 0, whatever q, k, v and d_out hold; a
 * row that sees no key has d_q = 0 and gives nothing but d_lse to its sink (and
 * a NaN of its d_out).
 * Rows of d_q at and beyond q_lens[b], of d_k and d_v below kv_starts[b] and at
 * and beyond kv_lens[b] are 0 (or stay, where they are added to); rows outside
 * a ragged batch's sequences are neither read nor written. A NaN in a visible
 * input gives NaN where the formulas do. Exact gradients: they differ from
 * those of the formulas by rounding only, and are the same for every number of
 * threads, bit for bit.
 *
 * Of k and v of 16 bits the gradients are F32. Pages and rings are of caches,
 * which no one trains: ATTN_ERR_UNSUPPORTED, as are optional outputs in params
 * but lse, since the loss would not depend on them. No gradient may overlap
 * anything else. Scratch memory is O(1) in Tq and Tk per thread. The four calls
 * are to each other, with the same gradients asked for, and return as those of
 * attn_sdpa.
 */
ATTN_API attn_status attn_sdpa_backward(
    const attn_context *context, const attn_sdpa_params *params,
    const attn_tensor *q, const attn_tensor *k, const attn_tensor *v,
    const attn_tensor *out, const attn_tensor *d_out,
    const attn_sdpa_gradients *gradients);
ATTN_API attn_status attn_sdpa_backward_check(
    const attn_context *context, const attn_sdpa_params *params,
    const attn_tensor *q, const attn_tensor *k, const attn_tensor *v,
    const attn_tensor *out, const attn_tensor *d_out,
    const attn_sdpa_gradients *gradients);
ATTN_API attn_status attn_sdpa_backward_workspace(
    const attn_context *context, const attn_sdpa_params *params,
    const attn_tensor *q, const attn_tensor *k, const attn_tensor *v,
    const attn_tensor *out, const attn_tensor *d_out,
    const attn_sdpa_gradients *gradients, size_t *bytes, size_t *alignment);
ATTN_API attn_status attn_sdpa_backward_work(
    const attn_context *context, const attn_sdpa_params *params,
    const attn_tensor *q, const attn_tensor *k, const attn_tensor *v,
    const attn_tensor *out, const attn_tensor *d_out,
    const attn_sdpa_gradients *gradients, void *work, size_t work_bytes);

/* --------------------------------------------------- Key/value cache -- */

/* How a cache keeps its keys; there is no default. */
#define ATTN_KV_CACHE_CONTIGUOUS 1 /* each sequence has room for `capacity` */
#define ATTN_KV_CACHE_RING 2       /* the last `capacity` keys of each */
#define ATTN_KV_CACHE_PAGED 3      /* pages from a common pool when needed */

/*
 * The keys and values of num_seqs sequences, which are numbered from 0 and
 * empty at first. Key p of a sequence, counted from 0, is said to stand at
 * position p. Wherever a call takes a batch of sequences, seqs[b] is the number
 * of the b-th; NULL means 0 .. B-1.
 * Several threads may read a cache at once (attend, view, length, ...); what
 * changes it (append, truncate, reset, share, destroy) needs it alone.
 */
typedef struct attn_kv_cache attn_kv_cache;

typedef struct attn_kv_cache_params {
    size_t struct_size;
    int32_t kind;     /* ATTN_KV_CACHE_*; 0 is an error */
    attn_dtype dtype; /* as which keys and values are kept: F32, F64, F16, BF16;
                         0 is an error */
    int64_t num_seqs;
    int64_t kv_heads;
    int64_t capacity;  /* keys of a sequence, at most */
    int64_t width;     /* D */
    int64_t v_width;   /* Dv; 0: D */
    int64_t page_size; /* PAGED: keys of a page; 0: 128 */
    /* PAGED: pages of the pool; 0: enough for every sequence at its capacity.
     * Fewer will do if sequences are shorter or share pages. */
    int64_t num_pages;
    /* New keys are turned by their positions when they are appended, as by
     * attn_rotary: style ATTN_ROTARY_* and its tables (1,1,P,R/2), R <= D, of
     * type F64 if dtype is, else F32. Their memory is the caller's and must
     * outlive the cache. 0 and NULL: keys are kept as they come. */
    int32_t rotary_style;
    int32_t reserved; /* 0 */
    const attn_tensor *cos_table;
    const attn_tensor *sin_table;
} attn_kv_cache_params;

#define ATTN_KV_CACHE_PARAMS_INIT                                            \
    {                                                                        \
        sizeof(attn_kv_cache_params), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, \
            NULL                                                             \
    }
ATTN_API void attn_kv_cache_params_init(attn_kv_cache_params *params);

/*
 * All memory is taken here, in one allocation of the context, whose allocator
 * must outlive the cache (the context itself need not). No other call on a
 * cache but attn_kv_cache_attend takes any. Memory that no key has reached is
 * never touched.
 * On failure *cache is untouched. Returns ATTN_ERR_NULL (a table missing too),
 * _SIZE, _SHAPE, _TYPE, _VALUE (kind, rotary_style, pages without PAGED, tables
 * without a style), _STRUCT, _STRIDE, _ALIGN, _UNSUPPORTED, _NOMEM.
 */
ATTN_API attn_status attn_kv_cache_create(const attn_context *context,
                                          const attn_kv_cache_params *params,
                                          attn_kv_cache **cache);
/* NULL is allowed. */
ATTN_API void attn_kv_cache_destroy(attn_kv_cache *cache);

/*
 * Appends keys and values:
 *   k (B,Hkv,T,D)  v (B,Hkv,T,Dv)
 * of which the first new_lens[b] are for sequence seqs[b] (NULL: all T); all
 * seqs must differ. Both of one type, which is F32, or F64 or F32 for a cache
 * of F64, or the 16-bit type of the cache itself; numbers are rounded as
 * attn_convert does, after a rotation. Any strides; no overlap with the cache.
 * A ring drops the oldest keys for the new ones and is never full. Else, if
 * some sequence has no room for all its keys (capacity; PAGED: pages), nothing
 * is appended to any, and the sentence says which.
 * Returns ATTN_ERR_NULL, _SIZE, _SHAPE, _TYPE, _VALUE (seqs, new_lens, a
 * position without a row in the tables), _STRIDE, _ALIGN, _OVERLAP,
 * _UNSUPPORTED, _FULL.
 */
ATTN_API attn_status attn_kv_cache_append(
    const attn_context *context, attn_kv_cache *cache, const int64_t *seqs,
    const int64_t *new_lens, const attn_tensor *k, const attn_tensor *v);

/*
 * Attention of q (B,Hq,Tq,D) over the keys that the sequences hold, into out
 * (B,Hq,Tq,Dv): attn_sdpa with k and v from the cache. q and out are F64 if the
 * cache is, else F32. seqs may name a sequence twice. params as for attn_sdpa,
 * NULL: defaults, but that kv_lens, page_table, pages_per_seq, ring_starts and
 * kv_offsets are set by the cache, and refused, as is cu_k. cu_q goes without
 * it (B = num_seqs), not with a RING.
 * align: 0 means ATTN_ALIGN_BOTTOM_RIGHT here: the queries stand where the last
 * keys do, as after appending the keys of the same tokens.
 * Tk, for masks and weights, is the most keys that one of the sequences holds,
 * of PAGED rounded up to whole pages; of a RING its capacity. Key j is the j-th
 * that is held.
 * Causal attention with a window of W tokens gives the same from a ring as from
 * all keys if its capacity is at least W + Tq - 1.
 * Returns as attn_sdpa, and ATTN_ERR_VALUE for seqs and what is refused.
 */
ATTN_API attn_status attn_kv_cache_attend(const attn_context *context,
                                          const attn_kv_cache *cache,
                                          const int64_t *seqs,
                                          const attn_sdpa_params *params,
                                          const attn_tensor *q,
                                          const attn_tensor *out);

/*
 * The same in parts, for attn_sdpa_check, attn_sdpa_workspace and
 * attn_sdpa_work: writes the views *k and *v of what the sequences hold, and
 * sets kv_lens, page_table, pages_per_seq, ring_starts and kv_offsets of
 * *params, and align if it is 0. The rest of *params stays and must be
 * initialised. The arrays are cut from the caller's work, whose bytes and
 * alignment attn_kv_cache_view_workspace gives, enough for any `batch`
 * sequences of this cache at any time. Views and arrays are of use until the
 * cache changes; they are for reading only.
 * With params->cu_q (q ragged, num_seqs = batch) the keys come as pages, a
 * sequence of CONTIGUOUS being one; a RING cannot do that. The sequences of a
 * RING must be the same number apart, as in 4, 5, 6; attn_kv_cache_attend takes
 * any.
 * Returns ATTN_ERR_NULL, _SIZE, _VALUE (seqs, batch not num_seqs), _STRUCT,
 * _UNSUPPORTED (said above), _WORKSPACE.
 */
ATTN_API attn_status attn_kv_cache_view(const attn_kv_cache *cache,
                                        int64_t batch, const int64_t *seqs,
                                        attn_sdpa_params *params,
                                        attn_tensor *k, attn_tensor *v,
                                        void *work, size_t work_bytes);
ATTN_API attn_status attn_kv_cache_view_workspace(const attn_kv_cache *cache,
                                                  int64_t batch, size_t *bytes,
                                                  size_t *alignment);

/* How many keys a sequence has had, less those truncated: the position of its
 * next key. Negative: a status (ATTN_ERR_NULL, _VALUE). */
ATTN_API int64_t attn_kv_cache_length(const attn_kv_cache *cache, int64_t seq);
/* The position of the oldest key that is held: 0, but in a ring that has
 * dropped keys. Equal to the length if none is held. Negative: a status. */
ATTN_API int64_t attn_kv_cache_first(const attn_kv_cache *cache, int64_t seq);
/* Pages of the pool that no sequence uses; 0 if not PAGED. Negative: a status
 * (ATTN_ERR_NULL). */
ATTN_API int64_t attn_kv_cache_free_pages(const attn_kv_cache *cache);

/*
 * Forgets the keys from position `length` on. length is in
 * [attn_kv_cache_first, attn_kv_cache_length]: what a ring has dropped does not
 * come back, so there a sequence holds fewer keys afterwards.
 * Returns ATTN_ERR_NULL, _VALUE.
 */
ATTN_API attn_status attn_kv_cache_truncate(attn_kv_cache *cache, int64_t seq,
                                            int64_t length);
/* Makes a sequence empty, of length 0, or all with seq -1. Returns
 * ATTN_ERR_NULL, _VALUE. */
ATTN_API attn_status attn_kv_cache_reset(attn_kv_cache *cache, int64_t seq);

/*
 * Gives the sequence `to`, whose length must be 0, the keys of `from` below
 * position `length`, as if they had been appended to it too. PAGED: the pages
 * are shared and take no room; one that is not full is copied when one of its
 * sequences appends. Else the keys are copied. In a ring length must be at
 * least attn_kv_cache_first of `from`, and `to` begins with that position.
 * Returns ATTN_ERR_NULL, _VALUE.
 */
ATTN_API attn_status attn_kv_cache_share(attn_kv_cache *cache, int64_t to,
                                         int64_t from, int64_t length);

/* --------------------------------------- Merging parts of the keys -- */

/*
 * Attention over all keys from its results over parts of them, each part with
 * its log-sum-exp. With O(p) and L(p) those of part p, for every query:
 *   M = max over p of L(p),   w(p) = exp(L(p) - M),   W = sum over p of w(p)
 *   out = sum over p of w(p) O(p) / W                  lse = M + ln W
 * Every visible key must be in exactly one part, and sinks be given to one part
 * alone. That is what keys split over
 * threads or machines and a prefix shared by several sequences need; and since
 * the result is a part itself, merges may be nested.
 *   outs: num_parts views (B,H,T,Dv)    lses: num_parts views (B,H,T,1)
 *   out (B,H,T,Dv)                      lse (B,H,T,1), or NULL if not wanted
 * One type for all, F32 or F64; any strides. out may be exactly one of outs,
 * lse exactly one of lses; else no output may overlap anything.
 * Parts are added in the order given, so the same call gives the same bits. A
 * part with L(p) = -inf (an empty row) adds nothing, whatever its O holds. No
 * part, or only such: zeros and lse -inf. One part only that is not: its very
 * bits. NaN or +inf in an L(p) gives NaN, as does a NaN in an O(p) that takes
 * part; finite parts never do.
 * Returns ATTN_ERR_NULL, _SIZE (num_parts negative too), _SHAPE, _TYPE,
 * _STRIDE, _ALIGN, _OVERLAP, _UNSUPPORTED.
 */
ATTN_API attn_status attn_merge(const attn_context *context, int32_t num_parts,
                                const attn_tensor *outs,
                                const attn_tensor *lses, const attn_tensor *out,
                                const attn_tensor *lse);

/* ------------------------------------------------ Multi-head attention -- */

/*
 * Parameters of a multi-head attention layer. All tensors in the type of the
 * input. Shapes are for ATTN_WEIGHT_OUT_IN; for ATTN_WEIGHT_IN_OUT exchange the
 * last two. With H = num_heads and Hkv = num_kv_heads:
 *   w_q (1,1,H D,Eq)  w_k (1,1,Hkv D,Ek)  w_v (1,1,Hkv Dv,Ev)
 *   w_o (1,1,E,H Dv); biases (1,1,1,rows of their matrix)
 * or, instead of w_q, w_k and w_v, one matrix that holds them one after the
 * other, w_qkv (1,1,(H + 2 Hkv) D,Eq) with Eq = Ek = Ev and Dv = D (PyTorch's
 * in_proj_weight), and instead of b_q, b_k and b_v one b_qkv.
 * Head h is columns h D .. h D + D-1 of a projection. E, D, Dv are free: H D
 * need not be E.
 */
typedef struct attn_mha_params {
    size_t struct_size;
    int32_t weight_layout; /* ATTN_WEIGHT_*; 0 is an error */
    int32_t reserved;      /* 0 */
    int64_t num_heads;
    int64_t num_kv_heads; /* 0 = num_heads */
    const attn_tensor *w_q;
    const attn_tensor *w_k;
    const attn_tensor *w_v;
    const attn_tensor *w_qkv;
    const attn_tensor *w_o;
    const attn_tensor *b_q; /* every bias may be NULL */
    const attn_tensor *b_k;
    const attn_tensor *b_v;
    const attn_tensor *b_qkv;
    const attn_tensor *b_o;
    /* Masks, causal, lengths, scale, LSE and weights, as for attn_sdpa; NULL =
     * defaults. Attention mask and key padding mask are simply two masks.
     * Ragged batches (cu_q, cu_k), pages and rings are for attn_sdpa only. */
    const attn_sdpa_params *attention;
} attn_mha_params;

#define ATTN_MHA_PARAMS_INIT                                               \
    {                                                                      \
        sizeof(attn_mha_params), 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, \
            NULL, NULL, NULL, NULL, NULL, NULL                             \
    }
ATTN_API void attn_mha_params_init(attn_mha_params *params);

/*
 * Multi-head attention (arXiv:1706.03762, 3.2.2):
 *   Q = x_q W_q + b_q, K = x_k W_k + b_k, V = x_v W_v + b_v, cut into heads,
 *   out = concat over h of attention(Q_h, K_g, V_g), times W_o, plus b_o
 *   x_q (B,1,Tq,Eq)  x_k (B,1,Tk,Ek)  x_v (B,1,Tk,Ev)  ->  out (B,1,Tq,E)
 * x_k NULL: x_q (self-attention). x_v NULL: x_k (cross-attention from one
 * source). An empty row's output is b_o. No output may overlap an input.
 * Scratch memory holds Q, K, V and the concatenated heads.
 * The four calls and their statuses are those of attn_sdpa.
 */
ATTN_API attn_status attn_mha(const attn_context *context,
                              const attn_mha_params *params,
                              const attn_tensor *x_q, const attn_tensor *x_k,
                              const attn_tensor *x_v, const attn_tensor *out);
ATTN_API attn_status attn_mha_check(const attn_context *context,
                                    const attn_mha_params *params,
                                    const attn_tensor *x_q,
                                    const attn_tensor *x_k,
                                    const attn_tensor *x_v,
                                    const attn_tensor *out);
ATTN_API attn_status attn_mha_workspace(
    const attn_context *context, const attn_mha_params *params,
    const attn_tensor *x_q, const attn_tensor *x_k, const attn_tensor *x_v,
    const attn_tensor *out, size_t *bytes, size_t *alignment);
ATTN_API attn_status attn_mha_work(
    const attn_context *context, const attn_mha_params *params,
    const attn_tensor *x_q, const attn_tensor *x_k, const attn_tensor *x_v,
    const attn_tensor *out, void *work, size_t work_bytes);

#ifdef __cplusplus
}
#endif

#endif /* ATTN_H */
