/*
 * Template of the loops that read K and V by rows, for few queries; a part of
 * kernels_tmpl.h, included there once for each way numbers are stored. Binds,
 * beside what that one does, and forgets at its end:
 *   STORED         pasted into names        S    type of a stored number
 *   NARROW         1 if an S has fewer bits than an R
 *   FROM(p)        vector of the VL numbers at p, which stand at any multiple
 *                  of their size
 *   FROM_ONE(x)    a number of the one stored as x
 *   PARTS          vectors that are made of one load where width allows, and
 *   FROM_PARTS(p, x)   that load: x[0], x[1] .. of the PARTS VL numbers at p;
 *                  2: even columns, then odd ones
 *   ORDER_PARTS(o, ldo, n, width, back)   n rows of o into that order, or back
 */
#define M(name) OF(name, STORED)

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
 * each run asks for what comes AHEAD_BYTES later; at its end for its part of
 * what is read next: 0.5 and 3 % less time (Zen 4, one and four queries) than
 * asking for what lies behind it, which has mostly been read. Fewer rows than a
 * look-ahead has only ask for themselves. Which is best, kernels_tmpl.h says
 * beside each reader.
 */
typedef struct M(runs) {
    const void *const *rows;
    const void *const *ahead; /* what is read next */
    int64_t length;           /* keys of a run, a multiple of STRIP */
    int64_t distance;         /* of the row to be asked for, as length; 0: none
                                 but the one that is read */
} M(runs);

TARGET static inline M(runs)
    M(cut_runs)(const void *const *rows, int64_t keys, int64_t width, int64_t n)
{
    const int64_t most = ATTN__AHEAD_ROWS / STREAMS;
    int64_t row = width * (int64_t)sizeof(S);
    int64_t distance = AHEAD_BYTES(n, row, NARROW) / (row + 1) + 1;
    M(runs)
    r = {rows, rows + keys, keys / STREAMS / STRIP * STRIP, most};

    if (keys < ATTN__AHEAD_ROWS)
        r.distance = 0;
    else if (distance < most)
        r.distance = (distance + STRIP - 1) / STRIP * STRIP;
    return r;
}

/* STRIP keys of each run: the number of the first, their rows, and the rows to
 * be asked for meanwhile, `step` addresses apart. */
typedef struct M(strip) {
    int64_t key[STREAMS];
    const void *const *row[STREAMS];
    const void *const *next[STREAMS];
    int64_t step;
} M(strip);

/* The strip that begins at j of each run. */
TARGET ALWAYS_INLINE M(strip) M(take_strip)(const M(runs) * r, int64_t j)
{
    int64_t beyond = j + r->distance - r->length;
    const bool inside = beyond + STRIP <= 0;
    M(strip) strip;

    /* A strip of which only a part is beyond begins with what is read next. */
    beyond = beyond < 0 ? 0 : beyond;
    strip.step = inside ? 1 : STREAMS;
    UNROLL
    for (int a = 0; a < STREAMS; a++) {
        strip.key[a] = a * r->length + j;
        strip.row[a] = r->rows + strip.key[a];
        strip.next[a] = inside ? strip.row[a] + r->distance
                               : r->ahead + beyond * STREAMS + a;
    }
    return strip;
}

/* Key a of a strip: its number and row, and the row to be asked for. */
TARGET ALWAYS_INLINE int64_t M(key_of)(const M(strip) * s, int a)
{
    return s->key[a % STREAMS] + a / STREAMS;
}

TARGET ALWAYS_INLINE const S *M(row_of)(const M(strip) * s, int a)
{
    return s->row[a % STREAMS][a / STREAMS];
}

TARGET ALWAYS_INLINE const S *M(next_of)(const M(strip) * s, int a)
{
    return s->next[a % STREAMS][a / STREAMS * s->step];
}

#define READ_ROW(p) __builtin_prefetch(p, 0, AHEAD_LEVEL)

TARGET static inline void M(ask)(const S *row, int64_t width)
{
    const int64_t line = 64 / (int64_t)sizeof(S);
    int64_t d = 0;

    for (; d + 4 * line <= width; d += 4 * line) {
        READ_ROW(row + d);
        READ_ROW(row + d + line);
        READ_ROW(row + d + 2 * line);
        READ_ROW(row + d + 3 * line);
    }
    ROLLED
    for (; d < width; d += line)
        READ_ROW(row + d);
}

/* The columns [d, width), fewer than VL, of the rows below. A function of its
 * own, and the first to be summed: a call among the sums, which memcpy is, has
 * them stored and loaded (bfloat16, four queries: 11 % more time). */
TARGET __attribute__((noinline)) static void
M(dots_rest)(const R *q, int64_t ldq, int n, const S *const row[4], int keys,
             int64_t d, int64_t width, V sum[4][4])
{
    for (int a = 0; a < keys; a++) {
        V x = M(load_part)(row[a] + d, width - d);
        for (int i = 0; i < n; i++)
            sum[i][a] = x * LOAD(q + i * ldq + d);
    }
}

/*
 * Does dots_few ask for a row's lines one by one, as it reads another's? With
 * keys in the second-level cache one and two queries take 2 to 8 % less time
 * so, more take 1 to 2 % more: there, and where a step is no line of 64 bytes,
 * a row is asked for as a whole.
 */
#define ALONG(n) ((n) <= 2 && PARTS * VL * (int64_t)sizeof(S) == 64)

/* `keys` (1 to 4) rows with n (1 to 4) queries, both constants: part[i][..], to
 * be summed across the vector. `at` keys of the strip came before; four are
 * summed to a quarter vector each, fewer stand where N(sums) wants them. Keys
 * share the loads of q. next: the rows to be asked for if ALONG, or NULL. */
TARGET ALWAYS_INLINE void
M(dots_few)(const R *q, int64_t ldq, const int n, const S *const row[4],
            const S *const *next, const int keys, int64_t width,
            V (*part)[VECTOR_BYTES / sizeof(R)], int at)
{
    V sum[4][4] = {{{0}}};
    const int64_t whole = width / VL * VL;
    int64_t d = 0;

    if (whole < width) {
        V rest[4][4];
        M(dots_rest)(q, ldq, n, row, keys, whole, width, rest);
        UNROLL
        for (int i = 0; i < n; i++) {
            UNROLL
            for (int a = 0; a < keys; a++)
                sum[i][a] = rest[i][a];
        }
    }
    for (; d + PARTS * VL <= width; d += PARTS * VL) {
        V x[4][PARTS];
        UNROLL
        for (int a = 0; a < keys; a++) {
            FROM_PARTS(row[a] + d, x[a]);
            if (next && ALONG(n))
                READ_ROW(next[a] + d);
        }
        UNROLL
        for (int h = 0; h < PARTS; h++) {
            UNROLL
            for (int i = 0; i < n; i++) {
                V y = LOAD(q + i * ldq + d + h * VL);
                UNROLL
                for (int a = 0; a < keys; a++)
                    sum[i][a] = V_FMA(x[a][h], y, sum[i][a]);
            }
        }
    }
    if (next && ALONG(n) && d < width)
        for (int a = 0; a < keys; a++)
            M(ask)(next[a] + d, width - d);
    for (; PARTS > 1 && d < whole; d += VL) {
        V x[4];
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
    UNROLL
    for (int i = 0; i < n; i++) {
        if (keys == 4) {
            V even = N(sum_pair)(sum[i][0], sum[i][2]);
            V odd = N(sum_pair)(sum[i][1], sum[i][3]);
            part[i][at / 4] = N(sum_pair)(even, odd);
            continue;
        }
        UNROLL
        for (int a = 0; a < keys; a++)
            part[i][(at + a) % STREAMS * STRIP + (at + a) / STREAMS] =
                sum[i][a];
    }
}

/* A strip with n (1 to 4) queries. */
TARGET ALWAYS_INLINE void M(dots_strip)(const R *q, int64_t ldq, const int n,
                                        const M(strip) * k, int64_t width, R *s,
                                        int64_t lds)
{
    const int together = TOGETHER(n);
    V part[4][VECTOR_BYTES / sizeof(R)];

    for (int a = 0; a < VL; a += together) {
        const S *row[4], *next[4];
        UNROLL
        for (int b = 0; b < together; b++) {
            /* Four: those that two rounds of N(sums) add up. */
            const int lane = a / 4 + b * VL / 4;
            const int key =
                together == 4 ? lane % STRIP * STREAMS + lane / STRIP : a + b;
            row[b] = M(row_of)(k, key);
            next[b] = M(next_of)(k, key);
            if (!ALONG(n))
                M(ask)(next[b], width);
        }
        M(dots_few)(q, ldq, n, row, next, together, width, part, a);
    }
    for (int i = 0; i < n; i++) {
        R all[VECTOR_BYTES / sizeof(R)];
        STORE(all, N(sums)(part[i], together == 4 ? VL / 4 : VL));
        for (int a = 0; a < STREAMS; a++)
            memcpy(s + i * lds + k->key[a], all + a * STRIP, STRIP * sizeof(R));
    }
}

/* What does not fill a strip of each run: keys from `first`, a multiple of VL,
 * fewer than VL. Sums of what is not there are written too: s has room. */
TARGET static inline void M(dots_last)(const R *q, int64_t ldq, int64_t n,
                                       const void *const *rows, int64_t first,
                                       int64_t keys, int64_t width, R *s,
                                       int64_t lds)
{
    for (int64_t i = 0; i < n; i++) {
        V part[4][VECTOR_BYTES / sizeof(R)] = {{{0}}};
        V sums[VECTOR_BYTES / sizeof(R)];
        for (int64_t j = first; j < keys; j++) {
            const S *row[4] = {rows[j]};
            M(dots_few)(q + i * ldq, ldq, 1, row, NULL, 1, width, part, 0);
            sums[j - first] = part[0][0];
        }
        for (int64_t j = keys - first; j < VL; j++)
            sums[j] = (V){0};
        STORE(s + i * lds + first, N(sums)(sums, VL));
    }
}

TARGET static void M(dots)(const R *q, int64_t ldq, int64_t n,
                           const void *const *rows, int64_t keys, int64_t width,
                           R *s, int64_t lds)
{
    const M(runs) r = M(cut_runs)(rows, keys, width, n);

    for (int64_t j = 0; j < r.length; j += STRIP) {
        const M(strip) k = M(take_strip)(&r, j);
        /* The second four queries find the keys in the first-level cache. */
        for (int64_t i = 0; i < n; i += 4) {
            const R *from = q + i * ldq;
            R *to = s + i * lds;
            switch (n - i) {
            case 1:
                M(dots_strip)(from, ldq, 1, &k, width, to, lds);
                break;
            case 2:
                M(dots_strip)(from, ldq, 2, &k, width, to, lds);
                break;
            case 3:
                M(dots_strip)(from, ldq, 3, &k, width, to, lds);
                break;
            default:
                M(dots_strip)(from, ldq, 4, &k, width, to, lds);
            }
        }
    }
    if (STREAMS * r.length < keys)
        M(dots_last)(q, ldq, n, rows, STREAMS * r.length, keys, width, s, lds);
}

/* Columns [e, e + columns VL) of n (1 to 4) rows of o, a strip; n and columns
 * are constants. */
TARGET ALWAYS_INLINE void M(add_columns)(R *o, int64_t ldo, const int n,
                                         const int columns, const R *p,
                                         int64_t ldp, const M(strip) * v,
                                         int64_t e)
{
    V sum[4][16];

    UNROLL
    for (int i = 0; i < n; i++) {
        UNROLL
        for (int c = 0; c < columns; c++)
            sum[i][c] = LOAD(o + i * ldo + e + c * VL);
    }
    ROLLED
    for (int a = 0; a < VL; a++) {
        const S *row = M(row_of)(v, a) + e;
        V x[16];
        M(ask)(M(next_of)(v, a) + e, columns * VL);
        if (columns % PARTS == 0) {
            UNROLL
            for (int c = 0; c < columns; c += PARTS)
                FROM_PARTS(row + c * VL, x + c);
        } else {
            UNROLL
            for (int c = 0; c < columns; c++)
                x[c] = FROM(row + c * VL);
        }
        UNROLL
        for (int i = 0; i < n; i++) {
            V y = SPLAT(p[i * ldp + M(key_of)(v, a)]);
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

/* Columns [0, end) of n (1 or 2) rows of o, a strip, four keys at a time and
 * each row from its beginning to its end. */
TARGET ALWAYS_INLINE void M(add_keys)(R *o, int64_t ldo, const int n,
                                      const R *p, int64_t ldp,
                                      const M(strip) * v, int64_t end)
{
    for (int a = 0; a < VL; a += 4) {
        const S *row[4];
        V y[2][4];
        UNROLL
        for (int b = 0; b < 4; b++) {
            row[b] = M(row_of)(v, a + b);
            M(ask)(M(next_of)(v, a + b), end);
            UNROLL
            for (int i = 0; i < n; i++)
                y[i][b] = SPLAT(p[i * ldp + M(key_of)(v, a + b)]);
        }
        for (int64_t e = 0; e < end; e += PARTS * VL) {
            V sum[2][PARTS];
            UNROLL
            for (int i = 0; i < n; i++) {
                UNROLL
                for (int h = 0; h < PARTS; h++)
                    sum[i][h] = LOAD(o + i * ldo + e + h * VL);
            }
            UNROLL
            for (int b = 0; b < 4; b++) {
                V x[PARTS];
                FROM_PARTS(row[b] + e, x);
                UNROLL
                for (int i = 0; i < n; i++) {
                    UNROLL
                    for (int h = 0; h < PARTS; h++)
                        sum[i][h] = V_FMA(x[h], y[i][b], sum[i][h]);
                }
            }
            UNROLL
            for (int i = 0; i < n; i++) {
                UNROLL
                for (int h = 0; h < PARTS; h++)
                    STORE(o + i * ldo + e + h * VL, sum[i][h]);
            }
        }
    }
}

/* n (1 to 4) rows of o, a strip. */
TARGET ALWAYS_INLINE void M(add_strip)(R *o, int64_t ldo, const int n,
                                       const R *p, int64_t ldp,
                                       const M(strip) * v, int64_t width)
{
    int64_t e = 0;

    /* Where a row is more than the registers hold: of 512 bytes read by halves
     * one query takes 1.19 times as long, two 1.09 (Zen 3, from memory; as long
     * from the cache). Rows of 2 KiB are better read by parts. */
    if (!WIDE && n <= 2 && VL >= 4 && width > 8 * VL &&
        width * (int64_t)sizeof(S) <= 1024) {
        e = width / (PARTS * VL) * (PARTS * VL);
        M(add_keys)(o, ldo, n, p, ldp, v, e);
    }
    /* Rows of 1024 bytes at once: by halves they take 1.3 times as long. */
    for (; n == 1 && WIDE && e + 16 * VL <= width; e += 16 * VL)
        M(add_columns)(o, ldo, n, 16, p, ldp, v, e);
    for (; n <= (WIDE ? 2 : 1) && e + 8 * VL <= width; e += 8 * VL)
        M(add_columns)(o, ldo, n, 8, p, ldp, v, e);
    for (; e + 4 * VL <= width; e += 4 * VL)
        M(add_columns)(o, ldo, n, 4, p, ldp, v, e);
    for (; PARTS > 1 && e + PARTS * VL <= width; e += PARTS * VL)
        M(add_columns)(o, ldo, n, PARTS, p, ldp, v, e);
    for (; e + VL <= width; e += VL)
        M(add_columns)(o, ldo, n, 1, p, ldp, v, e);
    for (int a = 0; e < width && a < VL; a++)
        for (int i = 0; i < n; i++)
            for (int64_t f = e; f < width; f++)
                o[i * ldo + f] +=
                    p[i * ldp + M(key_of)(v, a)] * FROM_ONE(M(row_of)(v, a)[f]);
}

TARGET static void M(add_rows_of)(R *o, int64_t ldo, int64_t n, const R *p,
                                  int64_t ldp, const void *const *rows,
                                  int64_t keys, int64_t width)
{
    const M(runs) r = M(cut_runs)(rows, keys, width, n);
    /* Four rows of o take half of the arithmetic's loads, but read rows by
     * halves, which the memory notices where it is the limit. */
    const bool by_four = WIDE && (n > 4 || NARROW);
    int64_t whole = width / VL * VL;

    if (r.length > 0)
        ORDER_PARTS(o, ldo, n, width, false);
    for (int64_t j = 0; j < r.length; j += STRIP) {
        const M(strip) v = M(take_strip)(&r, j);
        for (int64_t i = 0, few; i < n; i += few) {
            R *to = o + i * ldo;
            const R *w = p + i * ldp;
            few = by_four && n - i >= 4 ? 4 : n - i >= 2 ? 2 : 1;
            if (WIDE && few == 4)
                M(add_strip)(to, ldo, 4, w, ldp, &v, width);
            else if (few == 2)
                M(add_strip)(to, ldo, 2, w, ldp, &v, width);
            else
                M(add_strip)(to, ldo, 1, w, ldp, &v, width);
        }
    }
    if (r.length > 0)
        ORDER_PARTS(o, ldo, n, width, true);
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

#undef M
#undef READ_ROW
#undef STORED
#undef NARROW
#undef S
#undef FROM
#undef FROM_ONE
#undef PARTS
#undef ALONG
#undef FROM_PARTS
#undef ORDER_PARTS
