/*
 * Template of the loops that read K and V by rows, for few queries; a part of
 * kernels_tmpl.h, included there once for each way numbers are stored. Binds,
 * beside what that one does, and forgets at its end:
 *   STORED         pasted into names        S    type of a stored number
 *   FROM(p)        vector of the VL numbers at p, which stand at any multiple
 *                  of their size
 *   FROM_ONE(x)    a number of the one stored as x
 */
#define PASTE2(a, b) a##_##b
#define NAME2(a, b) PASTE2(a, b)
#define M(name) N(NAME2(name, STORED))

/* The first n < VL numbers at p, zeros behind them. */
TARGET static inline V M(load_part)(const S *p, int64_t n)
{
    S part[VECTOR_BYTES / sizeof(R)] = {0};

    memcpy(part, p, (size_t)n * sizeof(S));
    return FROM(part);
}

TARGET static void M(widen)(const void *src, R *dst, int64_t n)
{
    const S *from = src;
    int64_t a = 0;

    for (; a + VL <= n; a += VL)
        STORE(dst + a, FROM(from + a));
    for (; a < n; a++)
        dst[a] = FROM_ONE(from[a]);
}

/*
 * Reading. These loops are bound by memory, and their arithmetic keeps the
 * processor from seeing far ahead by itself; its prefetchers end at each page
 * of 4 KiB. So the keys are read as STREAMS runs in turn, a row of each, and
 * each run asks for what comes 4 KiB later: on Zen 4, width 128, 8192 keys, 32
 * heads of their own 23.5 GB/s, 32 over 8 19.7, where one run that asks gives
 * 19.5 and 15.6, one that does not 11, and a plain loop over the memory 19.
 */
typedef struct M(runs) {
    const void *const *rows;
    int64_t length;   /* keys of a run, a multiple of STRIP */
    int64_t distance; /* of the row to be asked for, in rows */
} M(runs);

TARGET static inline M(runs)
    M(cut_runs)(const void *const *rows, int64_t keys, int64_t width)
{
    int64_t ahead = AHEAD_BYTES / (width * (int64_t)sizeof(S) + 1);
    M(runs)
    r = {rows, keys / STREAMS / STRIP * STRIP,
         ahead < 4                  ? 4
         : ahead > ATTN__AHEAD_ROWS ? ATTN__AHEAD_ROWS
                                    : ahead};
    return r;
}

/* Number of key a of the strip that begins at j of each run. */
TARGET static inline int64_t M(key_of)(const M(runs) * r, int64_t j, int a)
{
    return a % STREAMS * r->length + j + a / STREAMS;
}

/* `width` numbers from e on of the row to be asked for at key j. */
TARGET static inline void M(ask)(const M(runs) * r, int64_t j, int64_t e,
                                 int64_t width)
{
    const S *row = (const S *)r->rows[j + r->distance] + e;

    for (int64_t d = 0; d < width; d += 64 / (int64_t)sizeof(S))
        READ_AHEAD(row + d);
}

/* `keys` (1 or 2) rows with n (1 to 4) queries, both constants: part[i][..], to
 * be summed across the vector. Two keys share the loads of q. */
TARGET ALWAYS_INLINE void M(dots_few)(const R *q, int64_t ldq, const int n,
                                      const S *const row[2], const int keys,
                                      int64_t width,
                                      V (*part)[VECTOR_BYTES / sizeof(R)],
                                      int at)
{
    V sum[4][2] = {{{0}}};
    int64_t d = 0;

    for (; d + VL <= width; d += VL) {
        V x[2];
        UNROLL
        for (int a = 0; a < keys; a++)
            x[a] = FROM(row[a] + d);
        UNROLL
        for (int i = 0; i < n; i++) {
            V y = LOAD(q + i * ldq + d);
            UNROLL
            for (int a = 0; a < keys; a++)
                sum[i][a] = V_FMA(x[a], y, sum[i][a]);
        }
    }
    if (d < width) {
        UNROLL
        for (int a = 0; a < keys; a++) {
            V x = M(load_part)(row[a] + d, width - d);
            UNROLL
            for (int i = 0; i < n; i++)
                sum[i][a] = V_FMA(x, LOAD(q + i * ldq + d), sum[i][a]);
        }
    }
    UNROLL
    for (int i = 0; i < n; i++) {
        UNROLL
        for (int a = 0; a < keys; a++)
            part[i][at + a] = sum[i][a];
    }
}

/* A strip of each run with n (1 to 4) queries. */
TARGET ALWAYS_INLINE void M(dots_strips)(const R *q, int64_t ldq, const int n,
                                         const M(runs) * k, int64_t j,
                                         int64_t width, R *s, int64_t lds)
{
    const int together = n > 1 && STRIP > 1 ? 2 : 1;
    V part[4][VECTOR_BYTES / sizeof(R)];

    for (int a = 0; a < VL; a += together) {
        const int64_t key = M(key_of)(k, j, a);
        const int64_t other = M(key_of)(k, j, a + together - 1);
        const S *row[2] = {k->rows[key], k->rows[other]};
        M(ask)(k, key, 0, width);
        if (together == 2)
            M(ask)(k, other, 0, width);
        M(dots_few)(q, ldq, n, row, together, width, part, a);
    }
    for (int i = 0; i < n; i++) {
        R all[VECTOR_BYTES / sizeof(R)];
        STORE(all, N(sums)(part[i]));
        for (int a = 0; a < VL; a++)
            s[i * lds + M(key_of)(k, j, a)] = all[a];
    }
}

TARGET static void M(dots)(const R *q, int64_t ldq, int64_t n,
                           const void *const *rows, int64_t keys, int64_t width,
                           R *s, int64_t lds)
{
    const M(runs) r = M(cut_runs)(rows, keys, width);

    /* The second four queries find the keys in the first-level cache. */
    for (int64_t j = 0; j < r.length; j += STRIP)
        for (int64_t i = 0; i < n; i += 4) {
            const R *from = q + i * ldq;
            R *to = s + i * lds;
            switch (n - i) {
            case 1:
                M(dots_strips)(from, ldq, 1, &r, j, width, to, lds);
                break;
            case 2:
                M(dots_strips)(from, ldq, 2, &r, j, width, to, lds);
                break;
            case 3:
                M(dots_strips)(from, ldq, 3, &r, j, width, to, lds);
                break;
            default:
                M(dots_strips)(from, ldq, 4, &r, j, width, to, lds);
            }
        }
    /* What does not fill a strip of each run. */
    for (int64_t j = STREAMS * r.length; j < keys; j++)
        for (int64_t i = 0; i < n; i++) {
            const S *row[2] = {rows[j], NULL};
            V part[4][VECTOR_BYTES / sizeof(R)] = {{{0}}};
            M(dots_few)(q + i * ldq, ldq, 1, row, 1, width, part, 0);
            s[i * lds + j] = N(sums)(part[0])[0];
        }
}

/* Columns [e, e + columns VL) of n (1 to 4) rows of o, a strip of each run; n
 * and columns are constants. */
TARGET ALWAYS_INLINE void M(add_columns)(R *o, int64_t ldo, const int n,
                                         const int columns, const R *p,
                                         int64_t ldp, const M(runs) * v,
                                         int64_t j, int64_t e)
{
    V sum[4][8];

    UNROLL
    for (int i = 0; i < n; i++) {
        UNROLL
        for (int c = 0; c < columns; c++)
            sum[i][c] = LOAD(o + i * ldo + e + c * VL);
    }
    for (int a = 0; a < VL; a++) {
        const int64_t key = M(key_of)(v, j, a);
        const S *row = (const S *)v->rows[key] + e;
        V x[8];
        M(ask)(v, key, e, columns * VL);
        UNROLL
        for (int c = 0; c < columns; c++)
            x[c] = FROM(row + c * VL);
        UNROLL
        for (int i = 0; i < n; i++) {
            V y = SPLAT(p[i * ldp + key]);
            UNROLL
            for (int c = 0; c < columns; c++)
                sum[i][c] = V_FMA(x[c], y, sum[i][c]);
        }
    }
    UNROLL
    for (int i = 0; i < n; i++) {
        UNROLL
        for (int c = 0; c < columns; c++)
            STORE(o + i * ldo + e + c * VL, sum[i][c]);
    }
}

/* n (1 to 4) rows of o, a strip of each run. */
TARGET ALWAYS_INLINE void M(add_strips)(R *o, int64_t ldo, const int n,
                                        const R *p, int64_t ldp,
                                        const M(runs) * v, int64_t j,
                                        int64_t width)
{
    int64_t e = 0;

    /* 16 sums are enough to hide latency and leave registers for the rest. */
    for (; n <= 2 && e + 8 * VL <= width; e += 8 * VL)
        M(add_columns)(o, ldo, n, 8, p, ldp, v, j, e);
    for (; e + 4 * VL <= width; e += 4 * VL)
        M(add_columns)(o, ldo, n, 4, p, ldp, v, j, e);
    for (; e + VL <= width; e += VL)
        M(add_columns)(o, ldo, n, 1, p, ldp, v, j, e);
    for (int a = 0; e < width && a < VL; a++) {
        const int64_t key = M(key_of)(v, j, a);
        const S *row = v->rows[key];
        for (int i = 0; i < n; i++)
            for (int64_t f = e; f < width; f++)
                o[i * ldo + f] += p[i * ldp + key] * FROM_ONE(row[f]);
    }
}

TARGET static void M(add_rows_of)(R *o, int64_t ldo, int64_t n, const R *p,
                                  int64_t ldp, const void *const *rows,
                                  int64_t keys, int64_t width)
{
    const M(runs) r = M(cut_runs)(rows, keys, width);
    int64_t whole = width / VL * VL;

    for (int64_t j = 0; j < r.length; j += STRIP)
        for (int64_t i = 0; i < n; i += 2) {
            R *to = o + i * ldo;
            const R *w = p + i * ldp;
            if (n - i == 1)
                M(add_strips)(to, ldo, 1, w, ldp, &r, j, width);
            else
                M(add_strips)(to, ldo, 2, w, ldp, &r, j, width);
        }
    for (int64_t j = STREAMS * r.length; j < keys; j++)
        for (int64_t i = 0; i < n; i++) {
            const S *row = rows[j];
            V w = SPLAT(p[i * ldp + j]);
            R *to = o + i * ldo;
            for (int64_t e = 0; e < whole; e += VL)
                STORE(to + e, V_FMA(FROM(row + e), w, LOAD(to + e)));
            for (int64_t e = whole; e < width; e++)
                to[e] += p[i * ldp + j] * FROM_ONE(row[e]);
        }
}

#undef PASTE2
#undef NAME2
#undef M
#undef STORED
#undef S
#undef FROM
#undef FROM_ONE
