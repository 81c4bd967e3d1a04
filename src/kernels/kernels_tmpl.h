/*
 * Template of the hot loops; kernels.h says what each does. The includer binds
 *   R K X...       the real vocabulary (real_f32.h, real_f64.h)
 *   SUFFIX LEVEL   pasted into names     TARGET         function attribute
 *   VECTOR_BYTES   of a vector           ZIP_LO ZIP_HI IOTA   index lists
 *   INNER_LO INNER_HI HALF_LO HALF_HI   or none: the same within each half, and
 *                  of whole halves
 *   V_MAX V_MIN V_FMA    on vectors; of NaN and another, the second
 *   V_BITS V_KEEP  a bit per lane from a condition; -inf where a bit is 0
 *   STEPS          of a table of powers of two from 1 to 2, or 1: no table
 *   STEP_SHIFT     with a table: from its index to the exponent's bits
 *   V_LOOK_UP V_LOOK_UP_BITS   numbers, or bits, of a table of VL, by the low
 *                  bits of a vector
 *   V_FMA_ABOVE(x, low, a, b, c)   V_FMA, but 0 where x <= low
 *   V_FROM_F16 V_FROM_BF16   a vector of 16-bit numbers at any even address;
 *                  bound for float only, as are
 *   EVEN ODD       index lists: every other lane of two vectors
 *   BYTE_STEP NONZERO_BYTES   a bit per byte, so many at a time
 * and this file forgets SUFFIX, ZIP_*, INNER_*, HALF_*, IOTA, EVEN, ODD, STEP*
 * and V_* at its end.
 */
#define PASTE3(a, b, c) a##_##b##_##c
#define NAME3(a, b, c) PASTE3(a, b, c)
#define N(name) NAME3(name, SUFFIX, LEVEL)
#define V N(vec)
#define VI N(veci)
#define I N(int)
#define VL ((int)(VECTOR_BYTES / sizeof(R)))

/* An integer as wide as R, and vectors that may stand at any element. */
typedef __typeof__(_Generic((R)0, float : (int32_t)0, default : (int64_t)0)) I;
typedef R V __attribute__((vector_size(VECTOR_BYTES)));
typedef I VI __attribute__((vector_size(VECTOR_BYTES)));
typedef V N(unaligned) __attribute__((aligned(sizeof(R)), may_alias));

#define LOAD(p) (*(const N(unaligned) *)(p))
#define STORE(p, v) (*(N(unaligned) *)(p) = (v))
/* Less 0, as that is no operation: more would turn -0 into 0. */
#define SPLAT(x) ((x) - (V){0})
/* Into the second-level cache. */
#define READ_AHEAD(p) __builtin_prefetch(p, 0, 2)
/* condition ? a : b, lane by lane; conditions are all-ones or all-zeros. */
#define SELECT(condition, a, b) \
    ((V)(((VI)(a) & (condition)) | ((VI)(b) & ~(condition))))

#define CONST_OF(name, suffix) name##_##suffix
#define CONST2(name, suffix) CONST_OF(name, suffix)
#define CONST(name) CONST2(name, SUFFIX)

/* Added, rounds to a multiple of 1/STEPS and leaves it, biased, in the low
 * bits. */
#define ROUNDER SPLAT(CONST(MAGIC) / (R)STEPS + CONST(BIAS))

#if STEPS > 1
/*
 * 2^(n + i/STEPS + f), with n + BIAS and i in the low bits of t: the number for
 * i is looked up, and n added to its exponent. What its rounding left out joins
 * the polynomial, so that rounding the sum decides. 0 where x is not above the
 * lowest, whatever became of t and f; NaN is above.
 */
TARGET ALWAYS_INLINE V N(power)(V f, V t, V x, V lowest)
{
    static const R c[] = {CONST(STEP_POLY)};
    const int terms = (int)(sizeof c / sizeof c[0]);
    VI w = V_LOOK_UP_BITS(((VI){CONST(STEP_BITS)}), t);
    V r = SPLAT(c[0]);

    UNROLL
    for (int i = 1; i < terms; i++)
        r = V_FMA(r, f, SPLAT(c[i]));
    r = V_FMA(r, f, V_LOOK_UP(((V){CONST(STEP_REST)}), t));
    w += (VI)t << STEP_SHIFT;
    return V_FMA_ABOVE(x, lowest, (V)w, r, (V)w);
}

/* What is not above it has the weight 0: exponents below are not normal. */
#define LOWEST (CONST(BIAS) - K(1.0))
#define HELD(x, lowest) (x)
#define HELD_ROUNDED(t) (t)
#else
/* The polynomial at f, times 2^n with n + bias in the low bits of t. An
 * n of -bias makes the factor 0: that is how -inf becomes exactly 0. */
TARGET ALWAYS_INLINE V N(power)(V f, V t, V x, V lowest)
{
    static const R c[] = {CONST(POLY)};
    const int terms = (int)(sizeof c / sizeof c[0]);
    V p = SPLAT(c[0]);

    (void)x, (void)lowest;
    UNROLL
    for (int i = 1; i < terms; i++)
        p = V_FMA(p, f, SPLAT(c[i]));
    p = V_FMA(p, f, SPLAT(K(1.0)));
    return p * (V)((VI)t << CONST(FRACTION_BITS));
}

/* x stops below where the exponent would, and the exponent at -BIAS, which
 * makes the factor 0: so -inf gives 0 in every rounding mode. NaN stays NaN. */
#define LOWEST (CONST(BIAS) + K(1.0))
#define HELD(x, lowest) V_MAX(lowest, x)
#define HELD_ROUNDED(t) V_MAX(SPLAT(CONST(MAGIC)), t)
#endif

TARGET ALWAYS_INLINE V N(lowest)(R unit)
{
    return SPLAT(-LOWEST / (unit > K(0.0) ? unit : CONST(LOG2E_HI)));
}

/* 2^(unit x) for unit x <= 127 or so. The product is rounded and taken off in
 * fused steps. */
TARGET static inline V N(exp2)(V x, R unit)
{
    V low = N(lowest)(unit), held = HELD(x, low);
    V t = HELD_ROUNDED(V_FMA(held, SPLAT(unit), ROUNDER));

    return N(power)(V_FMA(held, SPLAT(unit), ROUNDER - t), t, x, low);
}

/* e^x: x log2(e) - n in two fused steps, so that the rounding of the product
 * does not grow with |x|. */
TARGET static inline V N(expe)(V x)
{
    V low = N(lowest)(K(0.0)), held = HELD(x, low);
    V t = HELD_ROUNDED(V_FMA(held, SPLAT(CONST(LOG2E_HI)), ROUNDER));
    V f = V_FMA(held, SPLAT(CONST(LOG2E_HI)), ROUNDER - t);

    return N(power)(V_FMA(held, SPLAT(CONST(LOG2E_LO)), f), t, x, low);
}

#undef HELD
#undef HELD_ROUNDED

/* Bit i = (lane i of the condition is set). */
TARGET static inline unsigned N(bits_of)(VI condition)
{
    unsigned bits = 0;

    for (int i = 0; i < VL; i++)
        bits |= (unsigned)(condition[i] & 1) << i;
    return bits;
}

/* ---------------------------------------------------------- Transposing -- */

/*
 * r[a] lane b <-> r[b] lane a: log2(VL) rounds of a perfect shuffle, each of
 * which turns a bit of the row into one of the lane. Where no instruction zips
 * across the halves of a vector (INNER_LO), rounds within halves and one of
 * whole halves do as much, if row a comes and goes at a rotated by a bit.
 * Tried: vectors put together from pieces of 16 bytes as they are loaded, which
 * leaves the rounds within pieces: 1.0 to 1.35 of the time (Emerald Rapids).
 */
#ifdef INNER_LO
#define ROUND(lo_or_hi, last, a, b) \
    ((last) ? SHUFFLE(a, b, HALF_##lo_or_hi) : SHUFFLE(a, b, INNER_##lo_or_hi))
#define PLACE(i) (2 * (i) / VL + 2 * (i) % VL)
#else
#define ROUND(lo_or_hi, last, a, b) SHUFFLE(a, b, ZIP_##lo_or_hi)
#define PLACE(i) (i)
#endif
TARGET static inline void N(transpose)(V r[])
{
    V x[VECTOR_BYTES / sizeof(R)], y[VECTOR_BYTES / sizeof(R)];

    UNROLL
    for (int i = 0; i < VL; i++)
        x[PLACE(i)] = r[i];
    UNROLL
    for (int round = 1; round < VL; round *= 2) {
        UNROLL
        for (int i = 0; i < VL / 2; i++) {
            V a = x[i], b = x[i + VL / 2];
            y[2 * i] = ROUND(LO, 2 * round == VL, a, b);
            y[2 * i + 1] = ROUND(HI, 2 * round == VL, a, b);
        }
        UNROLL
        for (int i = 0; i < VL; i++)
            x[i] = y[i];
    }
    UNROLL
    for (int i = 0; i < VL; i++)
        r[i] = x[PLACE(i)];
}
#undef ROUND
#undef PLACE

/* Columns [d, d + VL) of up to VL rows, transposed; rows from `count` on are
 * taken as zeros. */
TARGET static inline void N(load_transposed)(const R *const *rows,
                                             int64_t count, int64_t d, V r[])
{
    if (count >= VL) {
        UNROLL
        for (int i = 0; i < VL; i++)
            r[i] = LOAD(rows[i] + d);
    } else {
        UNROLL
        for (int i = 0; i < VL; i++)
            r[i] = (V){0};
        for (int i = 0; i < count; i++)
            r[i] = LOAD(rows[i] + d);
    }
    N(transpose)(r);
}

/* Asks for what comes next in VL rows: so many streams at a time are more than
 * the processor follows by itself. */
TARGET static inline void N(ask_for)(const R *const *rows, int64_t d)
{
    UNROLL
    for (int i = 0; i < VL; i++)
        __builtin_prefetch(rows[i] + d, 0, 3);
}

TARGET static void N(pack)(const R *const *rows, int64_t n, int64_t padded,
                           int64_t width, R scale, R *dst, int64_t ld)
{
    const V c = SPLAT(scale);

    for (int64_t l = 0; l < padded; l += VL) {
        int64_t d = 0;
        for (; d + VL <= width; d += VL) {
            V r[VECTOR_BYTES / sizeof(R)];
            if (l + 2 * VL <= n && d % (64 / (int)sizeof(R)) == 0)
                N(ask_for)(rows + l + VL, d);
            N(load_transposed)(rows + l, n - l, d, r);
            UNROLL
            for (int i = 0; i < VL; i++)
                STORE(dst + (d + i) * ld + l, r[i] * c);
        }
        for (; d < width; d++)
            for (int i = 0; i < VL; i++)
                dst[d * ld + l + i] =
                    l + i < n ? rows[l + i][d] * scale : K(0.0);
    }
}

/* The same of rows that will be written: a store to a line that is not there
 * waits for it, one after the other. */
TARGET static inline void N(ask_to_write)(R *const *rows, int64_t count,
                                          int64_t e)
{
    for (int64_t i = 0; i < count; i++)
        __builtin_prefetch(rows[i] + e, 1, 3);
}

TARGET static void N(unpack)(const R *src, int64_t ld, int64_t n, int64_t width,
                             const R *scale, R *const *rows, bool add)
{
    for (int64_t e = 0; e < width; e += 64 / (int64_t)sizeof(R))
        N(ask_to_write)(rows, n < VL ? n : VL, e);
    for (int64_t l = 0; l < n; l += VL) {
        int64_t count = n - l < VL ? n - l : VL;
        int64_t e = 0;
        for (; e + VL <= width; e += VL) {
            V r[VECTOR_BYTES / sizeof(R)];
            if (l + 2 * VL <= n && e % (64 / (int)sizeof(R)) == 0)
                N(ask_to_write)(rows + l + VL, VL, e);
            UNROLL
            for (int i = 0; i < VL; i++)
                r[i] = LOAD(src + (e + i) * ld + l) * LOAD(scale + l);
            N(transpose)(r);
            if (count == VL && !add) {
                UNROLL
                for (int i = 0; i < VL; i++)
                    STORE(rows[l + i] + e, r[i]);
                continue;
            }
            for (int i = 0; i < count; i++) {
                if (add)
                    r[i] += LOAD(rows[l + i] + e);
                STORE(rows[l + i] + e, r[i]);
            }
        }
        for (int64_t i = 0; i < count; i++)
            for (int64_t f = e; f < width; f++) {
                R x = src[f * ld + l + i] * scale[l + i];
                rows[l + i][f] = add ? rows[l + i][f] + x : x;
            }
    }
}

/* ---------------------------------------------------------------- Masks -- */

TARGET static inline V N(magnitude)(V x)
{
    return (V)((VI)x & (I)(sizeof(R) == 4 ? INT32_MAX : INT64_MAX));
}

/*
 * A bias of -FLT_MAX or so must not become -inf by being added to a score: a
 * row of such biases is no empty row. Finite plus finite is kept finite, at the
 * other end too, where +inf would make the row NaN. A bias of -inf hides,
 * whatever the score is.
 */
TARGET static inline V N(biased)(V s, V bias)
{
    const V low = SPLAT(-R_MAX), high = SPLAT(R_MAX);
    V sum = s + bias;
    V larger = V_MAX(N(magnitude)(s), N(magnitude)(bias));
    V clamped = SELECT(sum > high, high, V_MAX(low, sum));

    /* Not where one is infinite. NaN is in the sum, and passes through. */
    sum = SELECT(larger <= high, clamped, sum);
    return SELECT(bias == SPLAT(R_NEG_INF), bias, sum);
}

/* s - slope distance, finite for a finite s and slope; with a finite slope an s
 * that is not stays as it is. */
TARGET static inline V N(farther)(V s, V slope, V distance)
{
    const V low = SPLAT(-R_MAX), high = SPLAT(R_MAX);
    V sum = V_FMA(-slope, N(magnitude)(distance), s);
    V kept = SELECT(N(magnitude)(s) <= high, V_MIN(high, V_MAX(low, sum)), s);

    return SELECT(N(magnitude)(slope) <= high, kept, sum);
}

/*
 * Is a sum of a finite score and up to slope |distance| finite without further
 * care? Below half a unit in the last place of the largest number it rounds to
 * that, to nearest; and what is no number stays as it is. The distance goes
 * from `first` to `last`.
 */
TARGET ALWAYS_INLINE bool N(is_near)(V slope, V first, V last)
{
    const V most = SPLAT(R_MAX * (sizeof(R) == 4 ? K(0x1p-26) : K(0x1p-55)));
    V reach = V_MAX(N(magnitude)(first), N(magnitude)(last));
    VI near = N(magnitude)(slope) * reach <= most;

    return V_BITS(near) == (1U << VL) - 1 && fegetround() == FE_TONEAREST;
}

TARGET static void N(alibi)(R *s, int64_t ld, int64_t keys, int64_t lanes,
                            const R *slope, const R *distance)
{
    for (int64_t l = 0; l < lanes; l += VL) {
        const V by = LOAD(slope + l), first = LOAD(distance + l);
        if (N(is_near)(by, first, first - SPLAT((R)keys))) {
            for (int64_t j = 0; j < keys; j++) {
                R *at = s + j * ld + l;
                V far = N(magnitude)(first - SPLAT((R)j));
                STORE(at, V_FMA(-by, far, LOAD(at)));
            }
            continue;
        }
        for (int64_t j = 0; j < keys; j++) {
            R *at = s + j * ld + l;
            STORE(at, N(farther)(LOAD(at), by, first - SPLAT((R)j)));
        }
    }
}

TARGET static void N(alibi_row)(R *s, int64_t keys, R slope, R distance)
{
    const V by = SPLAT(slope), first = SPLAT(distance);
    bool near = N(is_near)(by, first, first - SPLAT((R)keys));
    V key = {0};

    for (int i = 0; i < VL; i++)
        key[i] = (R)i;
    for (int64_t j = 0; j < keys; j += VL, key += (R)VL) {
        V far = first - key;
        STORE(s + j, near ? V_FMA(-by, N(magnitude)(far), LOAD(s + j))
                          : N(farther)(LOAD(s + j), by, far));
    }
}

TARGET static void N(add_rows)(R *s, int64_t ld, int64_t keys, int64_t lanes,
                               const R *const *rows, int64_t n)
{
    for (int64_t l = 0; l < lanes && l < n; l += VL) {
        int64_t j = 0;
        for (; j + VL <= keys; j += VL) {
            V r[VECTOR_BYTES / sizeof(R)];
            N(load_transposed)(rows + l, n - l, j, r);
            UNROLL
            for (int i = 0; i < VL; i++) {
                R *at = s + (j + i) * ld + l;
                STORE(at, N(biased)(LOAD(at), r[i]));
            }
        }
        for (; j < keys; j++) {
            V bias = {0};
            for (int i = 0; i < VL && l + i < n; i++)
                bias[i] = rows[l + i][j];
            STORE(s + j * ld + l, N(biased)(LOAD(s + j * ld + l), bias));
        }
    }
}

/* Bits of the first n <= 64 bytes that are not 0. */
TARGET static inline uint64_t N(nonzero)(const unsigned char *bytes, int64_t n)
{
    uint64_t bits = 0;
    int64_t t = 0;

    for (; t + BYTE_STEP <= n; t += BYTE_STEP)
        bits |= NONZERO_BYTES(bytes + t) << t;
    for (; t < n; t++)
        bits |= (uint64_t)(bytes[t] != 0) << t;
    return bits;
}

/* Bits below n of a word. */
TARGET static inline uint64_t N(below)(int64_t n)
{
    return n >= 64 ? UINT64_MAX : ((uint64_t)1 << n) - 1;
}

TARGET static void N(byte_bits)(const unsigned char *const *rows, int64_t n,
                                int64_t keys, bool drop, int64_t ahead,
                                uint64_t (*by_lane)[ATTN__KEY_WORDS])
{
    uint64_t flip = drop ? UINT64_MAX : 0;
    uint64_t words[ATTN__KEY_WORDS] = {0};

    for (int64_t i = 0; i < n; i++) {
        /* Rows are often the same for all queries, or all heads. */
        bool is_new = i == 0 || rows[i] != rows[i - 1];
        uintptr_t soon = (uintptr_t)rows[i] + (uintptr_t)ahead;
        for (int64_t w = 0; 64 * w < keys; w++) {
            int64_t count = keys - 64 * w < 64 ? keys - 64 * w : 64;
            if (is_new) {
                words[w] = (N(nonzero)(rows[i] + 64 * w, count) ^ flip) &
                           N(below)(count);
                READ_AHEAD((const void *)(soon + (uintptr_t)(64 * w)));
            }
            by_lane[i][w] &= words[w];
        }
        if (is_new)
            READ_AHEAD((const void *)(soon + (uintptr_t)(keys - 1)));
    }
}

/* Bits of the first n <= 64 numbers that are not -inf. */
TARGET static inline uint64_t N(not_neg_inf)(const R *x, int64_t n)
{
    uint64_t bits = 0;
    int64_t t = 0;

    for (; t + VL <= n; t += VL)
        bits |= (uint64_t)V_BITS(LOAD(x + t) != SPLAT(R_NEG_INF)) << t;
    for (; t < n; t++)
        bits |= (uint64_t)(x[t] != R_NEG_INF) << t;
    return bits;
}

TARGET static void N(number_bits)(const R *const *rows, int64_t n, int64_t keys,
                                  uint64_t (*by_lane)[ATTN__KEY_WORDS])
{
    uint64_t words[ATTN__KEY_WORDS] = {0};

    for (int64_t i = 0; i < n; i++)
        for (int64_t w = 0; 64 * w < keys; w++) {
            int64_t count = keys - 64 * w < 64 ? keys - 64 * w : 64;
            if (i == 0 || rows[i] != rows[i - 1])
                words[w] = N(not_neg_inf)(rows[i] + 64 * w, count);
            by_lane[i][w] &= words[w];
        }
}

/* Swaps quarters, then quarters of quarters, and so on. */
TARGET static void N(transpose_bits)(uint64_t x[64])
{
    uint64_t keep = 0x00000000ffffffff;

    for (int step = 32; step > 0; step /= 2, keep ^= keep << step)
        for (int a = 0; a < 64; a += 2 * step)
            for (int i = a; i < a + step; i++) {
                uint64_t swap = ((x[i] >> step) ^ x[i + step]) & keep;
                x[i] ^= swap << step;
                x[i + step] ^= swap;
            }
}

TARGET static bool N(nonfinite)(const R *v, int64_t ld, int64_t rows,
                                int64_t width)
{
    const V zero = {0};
    V sum[4] = {{0}, {0}, {0}, {0}};
    R rest = K(0.0);

    /* Adjacent rows as one: a short row is a sum of its own, each waiting for
     * the last. */
    if (ld == width) {
        width *= rows;
        rows = rows > 0;
    }
    /* x * 0 is NaN exactly for the numbers looked for. */
    for (int64_t j = 0; j < rows; j++, v += ld) {
        int64_t e = 0;
        for (; e + 4 * VL <= width; e += 4 * VL) {
            sum[0] = V_FMA(LOAD(v + e), zero, sum[0]);
            sum[1] = V_FMA(LOAD(v + e + VL), zero, sum[1]);
            sum[2] = V_FMA(LOAD(v + e + 2 * VL), zero, sum[2]);
            sum[3] = V_FMA(LOAD(v + e + 3 * VL), zero, sum[3]);
        }
        for (; e + VL <= width; e += VL)
            sum[0] = V_FMA(LOAD(v + e), zero, sum[0]);
        for (; e < width; e++)
            rest += v[e] * K(0.0);
    }
    sum[0] += sum[1] + sum[2] + sum[3];
    for (int i = 0; i < VL; i++)
        rest += sum[0][i];
    return !(rest == K(0.0));
}

/* -------------------------------------------------------------- Softmax -- */

/* The bits by lane of key j, for lanes first .. of a word. Vectors of whole
 * bytes of bits, which only little-endian processors have here, need no shift:
 * with a dense mask 0.985 of the time. */
TARGET ALWAYS_INLINE uint64_t N(bits_at)(const uint64_t *words, int64_t j,
                                         int first)
{
    const uint64_t *word = words + j * ATTN__LANE_WORDS;

    if (VL % 8 == 0) {
        uint16_t bits = 0;
        memcpy(&bits, (const unsigned char *)word + first / 8, VL / 8);
        return bits;
    }
    return *word >> first & N(below)(VL);
}

/* Score j of a vector column whose lanes are bits first .. of a word; hidden
 * ones as -inf. words is a constant NULL where nothing is hidden. */
TARGET ALWAYS_INLINE V N(score)(const R *s, const uint64_t *words, int64_t j,
                                int first)
{
    V x = LOAD(s);

    if (words)
        x = V_KEEP(x, N(bits_at)(words, j, first));
    return x;
}

/* The largest of a column and `largest`; NaN is passed over: it shows in the
 * weights. */
TARGET ALWAYS_INLINE V N(column_max)(const R *s, int64_t ld, int64_t keys,
                                     V largest, const uint64_t *words,
                                     int first)
{
    V m0 = largest, m1 = largest, m2 = largest, m3 = largest;
    int64_t j = 0;

    for (; j + 4 <= keys; j += 4, s += 4 * ld) {
        m0 = V_MAX(N(score)(s, words, j, first), m0);
        m1 = V_MAX(N(score)(s + ld, words, j + 1, first), m1);
        m2 = V_MAX(N(score)(s + 2 * ld, words, j + 2, first), m2);
        m3 = V_MAX(N(score)(s + 3 * ld, words, j + 3, first), m3);
    }
    ROLLED
    for (; j < keys; j++, s += ld)
        m0 = V_MAX(N(score)(s, words, j, first), m0);
    return V_MAX(V_MAX(m0, m1), V_MAX(m2, m3));
}

/* The weight of a score that is x above the maximum. The difference comes
 * first: that of products is not 0 for the maximum itself, but a rounding
 * error, which for scores of 10^10 is a number that 2^x does not survive. */
TARGET ALWAYS_INLINE V N(weight)(V x, R unit)
{
    return unit > K(0.0) ? N(exp2)(x, unit) : N(expe)(x);
}

/* What the moments of kernels.h are made of, in vectors. */
typedef struct N(moments) {
    V largest, squares, products;
} N(moments);

/* A weight whose score is x above the reference. Where it is 0 x may be -inf;
 * the product takes the x that the weight was made of. */
TARGET ALWAYS_INLINE void N(note)(N(moments) * to, V weight, V x, R unit)
{
    x = V_MAX(N(lowest)(unit), x);
    to->largest = V_MAX(weight, to->largest);
    to->squares = V_FMA(weight, weight, to->squares);
    to->products = V_FMA(weight, x, to->products);
}

/* Weights in place of scores in one column; returns their sum. Four sums:
 * shorter chains, and a smaller rounding error. moments is a constant NULL or
 * not. */
TARGET ALWAYS_INLINE V N(column_weights)(R *s, int64_t ld, int64_t keys, V m,
                                         R unit, const uint64_t *words,
                                         int first, N(moments) * moments)
{
    V l[4] = {{0}, {0}, {0}, {0}};
    int64_t j = 0;

    for (; j + 4 <= keys; j += 4, s += 4 * ld) {
        UNROLL
        for (int i = 0; i < 4; i++) {
            V x = N(score)(s + i * ld, words, j + i, first) - m;
            V p = N(weight)(x, unit);
            STORE(s + i * ld, p);
            l[i] += p;
            if (moments)
                N(note)(moments, p, x, unit);
        }
    }
    ROLLED
    for (; j < keys; j++, s += ld) {
        V x = N(score)(s, words, j, first) - m;
        V p = N(weight)(x, unit);
        STORE(s, p);
        l[0] += p;
        if (moments)
            N(note)(moments, p, x, unit);
    }
    return (l[0] + l[1]) + (l[2] + l[3]);
}

/*
 * The running maximum is only moved when a score is more than 2^8 times its
 * weight above it: the final division makes any reference equally exact, and
 * sums and products up to 2^8 times larger are far from overflow. Most tiles
 * then leave the output as it is.
 */
#define SLACK (unit > K(0.0) ? K(8.0) / unit : K(5.5))

/*
 * The moments after a tile: before, so many moved the reference by `shift` (0
 * or less) and were multiplied by factor, l of them; found, this tile's. Where
 * there was nothing before (the reference was -inf) they are this tile's.
 */
TARGET ALWAYS_INLINE void N(add_moments)(R *moments, int64_t ld, V l, V factor,
                                         V shift, N(moments) found)
{
    /* By 0 goes all, also what had become infinite. */
    VI none = (shift == SPLAT(R_NEG_INF)) | (factor == (V){0});
    V products = factor * V_FMA(l, shift, LOAD(moments + 2 * ld));
    V largest = factor * LOAD(moments);
    V squares = factor * (factor * LOAD(moments + ld));

    STORE(moments, V_MAX(found.largest, SELECT(none, (V){0}, largest)));
    STORE(moments + ld, found.squares + SELECT(none, (V){0}, squares));
    STORE(moments + 2 * ld, found.products + SELECT(none, (V){0}, products));
}

/* unit is a constant 0 or not, words and moments are NULL or not. */
TARGET ALWAYS_INLINE bool N(softmax_of)(R *s, int64_t ld, int64_t keys,
                                        int64_t lanes, R *m, R *l, R *alpha,
                                        R unit, const uint64_t *words,
                                        R *moments)
{
    const V neg_inf = SPLAT(R_NEG_INF);
    VI moved = {0};
    I any = 0;

    for (int64_t c = 0; c < lanes; c += VL) {
        const uint64_t *column = words ? words + c / 64 : NULL;
        int first = (int)(c % 64);
        V before = LOAD(m + c);
        V largest = N(column_max)(s + c, ld, keys, neg_inf, column, first);
        /* -inf + SLACK is -inf: the first visible score always moves m. */
        VI moves = largest > before + SPLAT(SLACK);
        V now = SELECT(moves, largest, before);
        /* Nothing visible so far: any finite reference gives weights of 0. */
        V reference = SELECT(now == neg_inf, (V){0}, now);
        V factor = N(weight)(before - reference, unit);
        N(moments) found = {{0}, {0}, {0}};
        V sum = N(column_weights)(s + c, ld, keys, reference, unit, column,
                                  first, moments ? &found : NULL);

        factor = SELECT(moves, factor, SPLAT(K(1.0)));
        moved |= moves;
        if (moments)
            N(add_moments)
        (moments + c, ld, LOAD(l + c), factor,
         SELECT(moves, before - reference, (V){0}), found);
        STORE(alpha + c, factor);
        STORE(m + c, now);
        STORE(l + c, V_FMA(LOAD(l + c), factor, sum));
    }
    for (int i = 0; i < VL; i++)
        any |= moved[i];
    return any != 0;
}

TARGET ALWAYS_INLINE bool N(softmax_unit)(R *s, int64_t ld, int64_t keys,
                                          int64_t lanes, R *m, R *l, R *alpha,
                                          R unit, const uint64_t *words,
                                          R *moments)
{
    if (moments)
        return words ? N(softmax_of)(s, ld, keys, lanes, m, l, alpha, unit,
                                     words, moments)
                     : N(softmax_of)(s, ld, keys, lanes, m, l, alpha, unit,
                                     NULL, moments);
    return words ? N(softmax_of)(s, ld, keys, lanes, m, l, alpha, unit, words,
                                 NULL)
                 : N(softmax_of)(s, ld, keys, lanes, m, l, alpha, unit, NULL,
                                 NULL);
}

TARGET static bool N(softmax)(R *s, int64_t ld, int64_t keys, int64_t lanes,
                              R *m, R *l, R *alpha, R unit,
                              const uint64_t *words, R *moments)
{
    if (unit > K(0.0))
        return N(softmax_unit)(s, ld, keys, lanes, m, l, alpha, unit, words,
                               moments);
    return N(softmax_unit)(s, ld, keys, lanes, m, l, alpha, K(0.0), words,
                           moments);
}

TARGET static void N(exp)(R *s, int64_t ld, int64_t keys, int64_t lanes,
                          const R *m, R unit, const uint64_t *words)
{
    for (int64_t c = 0; c < lanes; c += VL) {
        const uint64_t *column = words ? words + c / 64 : NULL;
        int first = (int)(c % 64);
        V reference = LOAD(m + c);
        reference = SELECT(reference == SPLAT(R_NEG_INF), (V){0}, reference);
        if (unit > K(0.0))
            (void)N(column_weights)(s + c, ld, keys, reference, unit, column,
                                    first, NULL);
        else
            (void)N(column_weights)(s + c, ld, keys, reference, K(0.0), column,
                                    first, NULL);
    }
}

/* The weight of any score; +inf from about the largest number on. */
TARGET ALWAYS_INLINE V N(any_weight)(V x, R unit)
{
    const V high = -N(lowest)(unit);

    /* There the factor is +inf, or the table has come to its end. */
    x = V_MIN(high, x);
    return STEPS == 1
               ? N(weight)(x, unit)
               : SELECT(x == high, -SPLAT(R_NEG_INF), N(weight)(x, unit));
}

/* One column of the gradients of a tile. words is a constant NULL or not. */
TARGET ALWAYS_INLINE void N(gradient_column)(R *s, R *d, int64_t ld,
                                             int64_t keys, V m, V low, R unit,
                                             V delta, const uint64_t *words,
                                             int first)
{
    UNROLL_BY_4
    for (int64_t j = 0; j < keys; j++, s += ld, d += ld) {
        V p = N(any_weight)(N(score)(s, words, j, first) - m - low, unit);
        V z = p * (LOAD(d) - delta);
        if (words) {
            V hidden = V_KEEP((V){0}, N(bits_at)(words, j, first));
            VI visible = hidden == (V){0};
            p = (V)((VI)p & visible);
            z = (V)((VI)z & visible);
        }
        STORE(s, p);
        STORE(d, z);
    }
}

TARGET ALWAYS_INLINE void N(gradient_of)(R *s, R *d, int64_t ld, int64_t keys,
                                         int64_t lanes, const R *m,
                                         const R *low, R unit, const R *delta,
                                         const uint64_t *words)
{
    for (int64_t c = 0; c < lanes; c += VL)
        N(gradient_column)
    (s + c, d + c, ld, keys, LOAD(m + c), LOAD(low + c), unit, LOAD(delta + c),
     words ? words + c / 64 : NULL, (int)(c % 64));
}

TARGET static void N(gradient)(R *s, R *d, int64_t ld, int64_t keys,
                               int64_t lanes, const R *m, const R *low, R unit,
                               const R *delta, const uint64_t *words)
{
    if (unit > K(0.0)) {
        if (words)
            N(gradient_of)(s, d, ld, keys, lanes, m, low, unit, delta, words);
        else
            N(gradient_of)(s, d, ld, keys, lanes, m, low, unit, delta, NULL);
    } else {
        if (words)
            N(gradient_of)(s, d, ld, keys, lanes, m, low, K(0.0), delta, words);
        else
            N(gradient_of)(s, d, ld, keys, lanes, m, low, K(0.0), delta, NULL);
    }
}

/* Doubles, and as many numbers. */
typedef double N(wide) __attribute__((vector_size(VECTOR_BYTES)));
typedef R N(part) __attribute__((vector_size(VECTOR_BYTES / 8 * sizeof(R)),
                                 may_alias, aligned(sizeof(R))));

TARGET static double N(dot)(const R *x, const R *y, int64_t n)
{
    const int lanes = VECTOR_BYTES / (int)sizeof(double);
    N(wide) sum[2] = {{0}, {0}};
    double total = 0.0;
    int64_t e = 0;

    for (; e + 2 * lanes <= n; e += 2 * lanes) {
        UNROLL
        for (int i = 0; i < 2; i++) {
            const N(part) *a = (const N(part) *)(x + e + i * lanes);
            const N(part) *b = (const N(part) *)(y + e + i * lanes);
            sum[i] += __builtin_convertvector(*a, N(wide)) *
                      __builtin_convertvector(*b, N(wide));
        }
    }
    for (; e < n; e++)
        total += (double)x[e] * (double)y[e];
    sum[0] += sum[1];
    for (int i = 0; i < lanes; i++)
        total += sum[0][i];
    return total;
}

TARGET static void N(rescale)(R *o, int64_t ld, int64_t width, int64_t lanes,
                              const R *alpha)
{
    for (int64_t e = 0; e < width; e++, o += ld)
        for (int64_t c = 0; c < lanes; c += VL)
            STORE(o + c, LOAD(o + c) * LOAD(alpha + c));
}

/* ------------------------------------------------------------------ Cap -- */

/*
 * out tanh(in s) = out in s P(z) / Q(z), z = (in s)^2; or of half of it,
 *     tanh 2y = 2 tanh y / (1 + tanh^2 y) = 2y P Q / (Q^2 + z P^2), z = y^2.
 * Small numbers pass as they are but for out in, signs and NaN too. Where z
 * stops, out in s goes on, and the result stops at out.
 *
 * 3 units of 2^-23 or 2^-52 at most from the formula. On Zen 4 a score takes
 * 0.25 ns in float and 0.87 in double (AVX2: 0.28, 1.00). E / (E + 2) with E =
 * e^2x - 1 = 2^n (2^f - 1) + (2^n - 1) from the polynomial of the weights, and
 * small numbers and signs put right: 0.30 and 0.82 (AVX2: 0.62, 1.21), 5 units.
 * In the loop over weights (the maximum may be taken before) it costs no less
 * than in one of its own: 0.56 ns for both against 0.28 + 0.25, in double 1.83
 * against 0.72 + 0.88; both are bound by arithmetic.
 */
TARGET static inline V N(tanh)(V s, R in, R out)
{
    static const R p[] = {CONST(TANH_P)}, q[] = {CONST(TANH_Q)};
    const int degree = (int)(sizeof q / sizeof q[0]);
    const R end = CONST(TANH_END);
    V x = s * (CONST(TANH_HALVES) ? in / 2 : in);
    V z = V_MIN(SPLAT(end * end), x * x);
    V a = V_FMA(z, SPLAT(p[0]), SPLAT(p[1])), b = z + SPLAT(q[0]);
    V y = s * (in * out);

    UNROLL
    for (int i = 1; i < degree; i++) {
        a = V_FMA(a, z, SPLAT(p[i + 1]));
        b = V_FMA(b, z, SPLAT(q[i]));
    }
    y *= CONST(TANH_HALVES) ? a * b / V_FMA(z * a, a, b * b) : a / b;
    return V_MAX(SPLAT(-out), V_MIN(SPLAT(out), y));
}

TARGET static void N(cap)(R *s, int64_t n, R in, R out)
{
    for (int64_t a = 0; a < n; a += VL)
        STORE(s + a, N(tanh)(LOAD(s + a), in, out));
}

/* ------------------------------------------------------ Row-wise softmax -- */

TARGET static R N(row)(const R *x, R *y, int64_t n, R *sum)
{
    V m = SPLAT(R_NEG_INF), l = {0}, tail;
    R largest = R_NEG_INF, total = K(0.0), reference;
    int64_t j = 0;
    int64_t rest;

    for (; j + VL <= n; j += VL)
        m = V_MAX(LOAD(x + j), m);
    for (; j < n; j++)
        largest = x[j] > largest ? x[j] : largest;
    for (int i = 0; i < VL; i++)
        largest = m[i] > largest ? m[i] : largest;
    reference = largest == R_NEG_INF ? K(0.0) : largest;
    for (j = 0; j + VL <= n; j += VL) {
        V p = N(expe)(LOAD(x + j) - SPLAT(reference));
        STORE(y + j, p);
        l += p;
    }
    rest = n - j;
    tail = SPLAT(R_NEG_INF);
    for (int64_t i = 0; i < rest; i++)
        tail[i] = x[j + i];
    tail = N(expe)(tail - SPLAT(reference));
    for (int64_t i = 0; i < rest; i++) {
        y[j + i] = tail[i];
        total += tail[i];
    }
    for (int i = 0; i < VL; i++)
        total += l[i];
    *sum = total;
    return largest;
}

/* ------------------------------------------------------------ Few queries --
 */

TARGET ALWAYS_INLINE R N(row_weights_of)(R *s, int64_t keys, R *m, R *l, R unit,
                                         R *moments)
{
    V largest = SPLAT(R_NEG_INF), sum = {0};
    R top = R_NEG_INF, before = *m, now = before, alpha = K(1.0);
    R total = K(0.0), reference;
    int64_t padded = (keys + VL - 1) / VL * VL;
    N(moments) found = {{0}, {0}, {0}};

    for (int64_t j = keys; j < padded; j++)
        s[j] = R_NEG_INF;
    for (int64_t j = 0; j < padded; j += VL)
        largest = V_MAX(LOAD(s + j), largest);
    for (int i = 0; i < VL; i++)
        top = largest[i] > top ? largest[i] : top;
    if (top > before + SLACK) {
        V factor = N(weight)(SPLAT(before - top), unit);
        alpha = factor[0];
        now = top;
    }
    reference = now == R_NEG_INF ? K(0.0) : now;
    for (int64_t j = 0; j < padded; j += VL) {
        V x = LOAD(s + j) - SPLAT(reference);
        V p = N(weight)(x, unit);
        STORE(s + j, p);
        sum += p;
        if (moments)
            N(note)(&found, p, x, unit);
    }
    if (moments) {
        R shift = now > before ? before - now : K(0.0);
        bool some = before != R_NEG_INF && alpha != K(0.0);
        R old[3] = {alpha * moments[0], alpha * (alpha * moments[1]),
                    alpha * (moments[2] + *l * shift)};
        for (int a = 0; a < 3; a++)
            moments[a] = some ? old[a] : K(0.0);
        for (int i = 0; i < VL; i++) {
            if (!(found.largest[i] <= moments[0]))
                moments[0] = found.largest[i];
            moments[1] += found.squares[i];
            moments[2] += found.products[i];
        }
    }
    for (int i = 0; i < VL; i++)
        total += sum[i];
    *m = now;
    *l = *l * alpha + total;
    return alpha;
}

TARGET static R N(row_weights)(R *s, int64_t keys, R *m, R *l, R unit,
                               R *moments)
{
    return moments ? N(row_weights_of)(s, keys, m, l, unit, moments)
                   : N(row_weights_of)(s, keys, m, l, unit, NULL);
}

/* The loops over rows of K and V, for each way their numbers are stored. */
/* The sums of two vectors half as long, their parts in turn: a round. */
TARGET static inline V N(sum_pair)(V a, V b)
{
    return SHUFFLE(a, b, ZIP_LO) + SHUFFLE(a, b, ZIP_HI);
}

/*
 * The sums of VL vectors as one vector, in their order. A round adds the halves
 * of two vectors and interleaves them; the vectors of a pair stand half of what
 * is left apart, so the last round puts neighbours side by side. left: how many
 * vectors the rounds so far have left.
 */
TARGET ALWAYS_INLINE V N(sums)(V r[], const int left)
{
    UNROLL
    for (int half = left / 2; half > 0; half /= 2) {
        UNROLL
        for (int i = 0; i < half; i++)
            r[i] = N(sum_pair)(r[i], r[i + half]);
    }
    return r[0];
}

/* 32 registers: 16 sums at a time, enough to hide latency, leave some for what
 * they are made of. With 16 registers 8 sums do. */
#define WIDE (VECTOR_BYTES == 64)

#if defined(V_FROM_F16)
typedef VI N(two_halves) __attribute__((aligned(2), may_alias));

/*
 * A register holds 2 VL bfloat16 numbers; of those in a lane, one is its upper
 * half and the other 16 bits further: an operation each, where widening in
 * order takes a load that extends and a shift.
 */
TARGET ALWAYS_INLINE void N(split_bf16)(const uint16_t *p, V x[])
{
    VI two = *(const N(two_halves) *)p;
    V upper = (V)(two & ~(I)0xffff), lower = (V)(two << 16);
    const int first = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 1 : 0;

    x[first] = upper;
    x[1 - first] = lower;
}

/* n rows of o, each 2 VL columns of them, from their order to that of
 * split_bf16, or back; what does not fill 2 VL columns stays. */
TARGET static void N(order_bf16)(R *o, int64_t ldo, int64_t n, int64_t width,
                                 bool back)
{
    for (int64_t i = 0; i < n; i++, o += ldo)
        for (int64_t e = 0; e + 2 * VL <= width; e += 2 * VL) {
            V a = LOAD(o + e), b = LOAD(o + e + VL);
            STORE(o + e, back ? SHUFFLE(a, b, ZIP_LO) : SHUFFLE(a, b, EVEN));
            STORE(o + e + VL,
                  back ? SHUFFLE(a, b, ZIP_HI) : SHUFFLE(a, b, ODD));
        }
}

#endif

/*
 * See "Reading" in kernels_rows_tmpl.h. On Zen 4, width 128, 8192 keys, 32
 * heads of their own 21.5 GB/s, 32 over 8 24, where one run that asks gave 19.5
 * and 15.6, one that does not 11, and a plain loop over the memory 19. One
 * query is the quicker of them and wants less far ahead (4 KiB: 7 % more time;
 * 2 KiB for four: 4 % more), and so do 16-bit numbers (four queries, 4 KiB: 3 %
 * more). Into the first-level cache: 57 % more (16 bits: 12 %).
 *
 * With one query and rows of 512 or 1024 bytes, 1 KiB is best: 0.90 and 0.72 of
 * the time, in pages of 4 KiB or of 2 MiB. Rows of other widths (256, 320, 384,
 * 768 bytes) take up to 10 % more with it.
 *
 * With one query four keys at a time take 26 (width 64) and 13 % (128) less
 * time than one if they are in the second-level cache, 30 % if they are
 * bfloat16; read from memory 14 % less (bfloat16, width 64) to 4 % more (float,
 * width 64).
 */
#define READER four
#define STREAMS (VL >= 4 ? 4 : VL)
#define AHEAD_BYTES(n, row, narrow)     \
    ((n) > 1 ? ((narrow) ? 2048 : 4096) \
             : ((row) == 512 || (row) == 1024 ? 1024 : 2048))
#define AHEAD_LEVEL 2
#define TOGETHER(n) (WIDE || ((n) <= 2 && VL >= 4) ? 4 : 2)
#include "kernels_reader_tmpl.h"

/*
 * For Zen 5, best of one, two and four runs, either cache, 1 to 16 KiB, and
 * one, two and four keys at a time: of the time of the reader above 0.74 (12
 * heads of width 64, 8192 keys), 0.86 (32 of 128), 0.80 (32 over 8) and 0.82 (8
 * of 80). Asking for nothing took 1.0 to 1.4 times as long as that reader. On
 * Emerald Rapids 2 to 8 KiB are alike, and one run takes as long; four keys at
 * a time are 0.95 there for four queries, for which no other reader was made.
 */
#if VECTOR_BYTES == 64
#define READER two
#define STREAMS 2
#define AHEAD_BYTES(n, row, narrow) ((void)(n), (row) >= 512 ? 4096 : 8192)
#define AHEAD_LEVEL 3
#define TOGETHER(n) ((n) == 1 ? 1 : 2)
#include "kernels_reader_tmpl.h"
#endif

#undef PASTE3
#undef NAME3
#undef N
#undef V
#undef VI
#undef I
#undef VL
#undef CONST_OF
#undef CONST2
#undef CONST
#undef LOAD
#undef STORE
#undef SPLAT
#undef SELECT
#undef SLACK
#undef ROUNDER
#undef LOWEST

#undef WIDE
#undef READ_AHEAD
#undef SUFFIX
#undef ZIP_LO
#undef ZIP_HI
#undef INNER_LO
#undef INNER_HI
#undef HALF_LO
#undef HALF_HI
#undef IOTA
#undef EVEN
#undef ODD
#undef V_MAX
#undef V_MIN
#undef V_KEEP
#undef V_BITS
#undef V_FMA
#undef STEPS
#undef STEP_SHIFT
#undef V_LOOK_UP
#undef V_LOOK_UP_BITS
#undef V_FMA_ABOVE
#undef V_FROM_F16
#undef V_FROM_BF16
