/*
 * The few hot loops, compiled once per instruction-set level and type and
 * chosen at run time. Everything works on a score tile in transposed layout:
 *
 *     s[j * ld + lane]      j = key within the tile, lane = query
 *
 * so that a vector register holds the same key for neighbouring queries, and
 * maxima, sums and corrections are whole vectors: no horizontal reductions.
 * Lane counts are padded to whole vectors; ld and all arrays over lanes are at
 * least that long.
 */
#ifndef ATTN_KERNELS_H
#define ATTN_KERNELS_H

/* Lanes of the widest vector, 64 bytes. */
#define ATTN__LANES_F32 16
#define ATTN__LANES_F64 8

/* How the numbers of K and V are stored: as R, or (R = float) in 16 bits. */
enum { ATTN__STORED_SAME, ATTN__STORED_F16, ATTN__STORED_BF16, ATTN__STORAGES };

/*
 * Rows of K and V are read as `runs` runs in turn: row i of run a, of n rows,
 * is row a (n / runs) + i. An array of their addresses goes on beyond them with
 * so many that are read after them, which are asked for: its entry i is row i /
 * runs of run i % runs (see kernels_rows_tmpl.h).
 */
#define ATTN__AHEAD_ROWS 64

/* The most lanes of a tile, and 64-bit words that hold a bit for each. */
#define ATTN__MAX_LANES 256
#define ATTN__LANE_WORDS (ATTN__MAX_LANES / 64)
/* The most keys of a tile. */
#define ATTN__MAX_KEYS 512
#define ATTN__KEY_WORDS (ATTN__MAX_KEYS / 64)

/*
 * What the scores s of a tile are in is told by a number, `unit`:
 *   unit > 0   the weight relative to a maximum m is 2^(unit (s - m)): q has
 *              been multiplied by a power of two only, exactly, and the rest of
 *              the scale is in unit
 *   unit = 0   it is e^(s - m): something is added to the scores, which must be
 *              what they are called
 */

#define ATTN__DECLARE_KERNELS(R, suffix)                                       \
    typedef struct attn__kernels_##suffix {                                    \
        /* How the loops for few queries read rows. */                         \
        int64_t runs;                                                          \
        /* dst[d * ld + lane] = rows[lane][d] * scale for lane < n, 0 for      \
         * n <= lane < padded. */                                              \
        void (*pack)(const R *const *rows, int64_t n, int64_t padded,          \
                     int64_t width, R scale, R *dst, int64_t ld);              \
        /* rows[lane][e] = src[e * ld + lane] * scale[lane], lane < n; or +=   \
         * that if add. */                                                     \
        void (*unpack)(const R *src, int64_t ld, int64_t n, int64_t width,     \
                       const R *scale, R *const *rows, bool add);              \
        /* s[j][lane] += rows[lane][j] where that is finite or NaN; -inf       \
         * replaces; a finite sum stays finite (see mask.h). */                \
        void (*add_rows)(R * s, int64_t ld, int64_t keys, int64_t lanes,       \
                         const R *const *rows, int64_t n);                     \
        /* Bits of masks by rows, ANDed: bit j of by_lane[i] stays if byte j   \
         * of rows[i] is not 0 (is 0, if drop), or number j is not -inf.       \
         * Bits from `keys` on become 0. What lies `ahead` bytes on is asked   \
         * for. */                                                             \
        void (*byte_bits)(const unsigned char *const *rows, int64_t n,         \
                          int64_t keys, bool drop, int64_t ahead,              \
                          uint64_t (*by_lane)[ATTN__KEY_WORDS]);               \
        void (*number_bits)(const R *const *rows, int64_t n, int64_t keys,     \
                            uint64_t (*by_lane)[ATTN__KEY_WORDS]);             \
        /* x[a] bit b <-> x[b] bit a */                                        \
        void (*transpose_bits)(uint64_t x[64]);                                \
        /* Online softmax of one tile: m the running maximum, l the running    \
         * sum, s becomes the weights relative to the new m. Old sums and      \
         * outputs must be multiplied by alpha: l is, here; true is returned   \
         * if any alpha is not 1. Where bit `lane` of words[j *                \
         * ATTN__LANE_WORDS ..] is 0 the score counts as -inf, whatever it is; \
         * words NULL: nowhere. moments NULL: not wanted; else three arrays    \
         * over lanes, ld apart, that run along as l does and are 0 at first,  \
         * of the weights w relative to m: the largest, the sum of w^2, and    \
         * the sum of w (s - m), which is 0 where w is. They do not change the \
         * weights. */                                                         \
        bool (*softmax)(R * s, int64_t ld, int64_t keys, int64_t lanes, R *m,  \
                        R *l, R *alpha, R unit, const uint64_t *words,         \
                        R *moments);                                           \
        /* s[j][lane] = weight relative to m, with words as above. */          \
        void (*exp)(R * s, int64_t ld, int64_t keys, int64_t lanes,            \
                    const R *m, R unit, const uint64_t *words);                \
        /* The gradients of a tile: s becomes the weights e^(z - L), L = m +   \
         * low in the unit of the scores, and d, the products of gradients and \
         * values, weights (d - delta): both exactly 0 where a bit of words is \
         * 0, whatever they are. A weight beyond the type is inf. */           \
        void (*gradient)(R * s, R *d, int64_t ld, int64_t keys, int64_t lanes, \
                         const R *m, const R *low, R unit, const R *delta,     \
                         const uint64_t *words);                               \
        /* The sum of n products, in double. */                                \
        double (*dot)(const R *x, const R *y, int64_t n);                      \
        /* s = out tanh(in s), n numbers, a multiple of the lanes; in and out  \
         * > 0, their product in the range of R. +-inf gives +-out, -0 stays,  \
         * and so does NaN. */                                                 \
        void (*cap)(R * s, int64_t n, R in, R out);                            \
        /* s[j][lane] -= slope[lane] |distance[lane] - j|, and the same for a  \
         * row of adjacent scores, whole vectors of it. A finite score stays   \
         * finite, another as it is. */                                        \
        void (*alibi)(R * s, int64_t ld, int64_t keys, int64_t lanes,          \
                      const R *slope, const R *distance);                      \
        void (*alibi_row)(R * s, int64_t keys, R slope, R distance);           \
        /* o[e * ld + lane] *= alpha[lane] */                                  \
        void (*rescale)(R * o, int64_t ld, int64_t width, int64_t lanes,       \
                        const R *alpha);                                       \
        /* Is any of the rows x width numbers NaN or infinite? */              \
        bool (*nonfinite)(const R *v, int64_t ld, int64_t rows,                \
                          int64_t width);                                      \
        /* The three for few queries, where a row is a query and its scores    \
         * are adjacent. q is n x ldq, zero beyond width up to ldq, a multiple \
         * of the lanes; s is n x lds, lds a multiple of the lanes. rows[j] is \
         * the address of row j of K or V, its numbers adjacent and stored as  \
         * the index says (those without a loop are NULL); if there are at     \
         * least ATTN__AHEAD_ROWS, so many more follow, all of numbers that    \
         * are there:                                                          \
         * s[i][j] = q(i) . k(j)                                               \
         * s[i] becomes weights, as in softmax above, with three numbers for   \
         * moments; returns alpha                                              \
         * o[i][e] += sum over j of p[i][j] v[j][e]                            \
         * paired: where not 0, dots wants the columns of q in another order:  \
         * of each so many, while they last, the even ones, then the odd. */   \
        void (*dots[ATTN__STORAGES])(const R *q, int64_t ldq, int64_t n,       \
                                     const void *const *rows, int64_t keys,    \
                                     int64_t width, R *s, int64_t lds);        \
        int64_t paired[ATTN__STORAGES];                                        \
        R (*row_weights)(R * s, int64_t keys, R *m, R *l, R unit, R *moments); \
        void (*add_rows_of[ATTN__STORAGES])(R * o, int64_t ldo, int64_t n,     \
                                            const R *p, int64_t ldp,           \
                                            const void *const *rows,           \
                                            int64_t keys, int64_t width);      \
        /* dst = n stored numbers, exactly. */                                 \
        void (*widen[ATTN__STORAGES])(const void *src, R *dst, int64_t n);     \
        /* Softmax of one contiguous row, y may be x; returns the maximum and  \
         * stores the sum. */                                                  \
        R (*row)(const R *x, R *y, int64_t n, R *sum);                         \
    } attn__kernels_##suffix;                                                  \
    const attn__kernels_##suffix *attn__kernels_get_##suffix(void);

ATTN__DECLARE_KERNELS(float, f32)
ATTN__DECLARE_KERNELS(double, f64)

#undef ATTN__DECLARE_KERNELS

/* The tables of the levels, by how they read rows; each in a file of its own.
 */
#define ATTN__DECLARE_LEVEL(reader, level)                               \
    extern const attn__kernels_f32 attn__kernels_##reader##_f32_##level; \
    extern const attn__kernels_f64 attn__kernels_##reader##_f64_##level;

ATTN__DECLARE_LEVEL(four, generic)
#if defined(__x86_64__)
ATTN__DECLARE_LEVEL(four, avx2)
ATTN__DECLARE_LEVEL(four, avx512)
ATTN__DECLARE_LEVEL(two, avx512)
#endif
#undef ATTN__DECLARE_LEVEL

#endif
