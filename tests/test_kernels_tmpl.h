/*
 * Template of test_kernels.c: the hot loops of one type against plain ones in
 * long double. Binds R the type, N(name) a name for it, EPSILON, R_LARGEST,
 * LANES, STORAGES (how many ways of storing a number there are).
 */

static const N(attn__kernels) * N(table)(void)
{
    return N(attn__kernels_get)();
}

/* |met - want| in units of the last place of want; NaN is beyond any bound. */
static long double N(units)(R met, long double want)
{
    const long double least =
        (long double)EPSILON * (long double)N(smallest_normal);
    const long double unit = fabsl(want) * (long double)EPSILON;
    if ((long double)met == want)
        return 0;
    return fabsl((long double)met - want) / (unit > least ? unit : least);
}

/* ------------------------------------------------------------------- Cap -- */

static void N(cap_at)(R in, R out, R *x, int n)
{
    R y[LANES * 4];
    assert_true(n <= LANES * 4);
    memcpy(y, x, sizeof(R) * (size_t)n);
    N(table)()->cap(y, n, in, out);
    for (int i = 0; i < n; i++) {
        const long double want =
            (long double)out * tanhl((long double)in * (long double)x[i]);
        if (!(N(units)(y[i], want) <= 4) ||
            fabsl((long double)y[i]) > (long double)out)
            fail_msg("%a tanh(%a %a) = %a, not %La", (double)out, (double)in,
                     (double)x[i], (double)y[i], want);
    }
}

static void N(test_cap__is_the_formula_within_4_units)(void **state)
{
    (void)state;
    static const R caps[] = {1, 30, 50, (R)0.37, 1000};
    R x[LANES * 4];
    for (int round = 0; round < 4000; round++) {
        const R out = caps[round % 5];
        const R in = (round / 5) % 2 ? 1 / out : (R)0.0883883 / out;
        for (int i = 0; i < LANES * 4; i++)
            x[i] = (R)(round % 3 ? kit_real() * 25
                                 : ldexp(1 + fabs(kit_real()),
                                         (int)kit_int(-125, 20)) *
                                       (kit_int(0, 1) ? 1 : -1)) /
                   in;
        N(cap_at)(in, out, x, LANES * 4);
    }
}

static void N(test_cap__keeps_signs_and_the_ends)(void **state)
{
    (void)state;
    R x[16] = {(R)-0.0,
               0,
               (R)INFINITY,
               (R)-INFINITY,
               (R)NAN,
               R_LARGEST,
               -R_LARGEST,
               N(smallest),
               -N(smallest),
               N(smallest) * 4,
               N(smallest_normal),
               1000,
               -1000};
    N(table)()->cap(x, 16, (R)0.5, 2);
    assert_true(x[0] == 0 && signbit(x[0]));
    assert_true(x[1] == 0 && !signbit(x[1]));
    assert_true(x[2] == 2 && x[3] == -2);
    assert_true(isnan(x[4]));
    assert_true(x[5] == 2 && x[6] == -2);
    assert_true(x[7] == N(smallest) && x[8] == -N(smallest));
    assert_true(x[9] == N(smallest) * 4 && x[10] == N(smallest_normal));
    assert_true(x[11] == 2 && x[12] == -2);
}

/* ------------------------------------------------------------- Distances -- */

static void N(test_alibi__is_the_formula_for_tiles_and_rows)(void **state)
{
    (void)state;
    static R tile[40 * 3 * LANES], row[64];
    R slope[2 * LANES], distance[2 * LANES];
    const int64_t ld = 3 * LANES, lanes = 2 * LANES;
    for (int64_t keys = 1; keys <= 40; keys++) {
        for (int64_t l = 0; l < lanes; l++) {
            slope[l] = (R)kit_real();
            distance[l] = (R)kit_int(-60, 60);
        }
        for (int64_t a = 0; a < keys * ld; a++)
            tile[a] = (R)(a % ld);
        N(table)()->alibi(tile, ld, keys, lanes, slope, distance);
        for (int64_t j = 0; j < keys; j++)
            for (int64_t l = 0; l < ld; l++) {
                const long double far =
                    l < lanes ? (long double)slope[l] *
                                    fabsl((long double)distance[l] - j)
                              : 0;
                const long double bound =
                    (long double)EPSILON * (fabsl(far) + (long double)l);
                assert_true(fabsl((long double)tile[j * ld + l] + far - l) <=
                            bound);
            }
        for (int64_t j = 0; j < 64; j++)
            row[j] = 5;
        N(table)()->alibi_row(row, keys, slope[0], distance[0]);
        for (int64_t j = 0; j < keys; j++) {
            const long double far =
                (long double)slope[0] * fabsl((long double)distance[0] - j);
            assert_true(fabsl((long double)row[j] + far - 5) <=
                        (long double)EPSILON * (fabsl(far) + 5));
        }
    }
}

static void N(test_alibi__keeps_finite_scores_finite)(void **state)
{
    (void)state;
    R s[LANES] = {-R_LARGEST, R_LARGEST, (R)INFINITY, (R)-INFINITY, (R)NAN};
    R slope[LANES], distance[LANES];
    for (int l = 0; l < LANES; l++) {
        slope[l] = l == 1 ? -R_LARGEST : R_LARGEST;
        distance[l] = 1000;
    }
    N(table)()->alibi(s, LANES, 1, LANES, slope, distance);
    assert_true(s[0] == -R_LARGEST && s[1] == R_LARGEST);
    assert_true(isinf(s[2]) && s[2] > 0 && isinf(s[3]) && s[3] < 0);
    assert_true(isnan(s[4]));
    s[0] = -R_LARGEST;
    s[1] = R_LARGEST / 2;
    N(table)()->alibi_row(s, 2, R_LARGEST, 4);
    assert_true(s[0] == -R_LARGEST && s[1] == -R_LARGEST);
}

/* What is taken off is about half a unit in the last place of the largest
 * number, where rounding says whether the sum is finite. */
static void
N(test_alibi__keeps_the_largest_finite_in_all_roundings)(void **state)
{
    (void)state;
    static const int modes[] = {FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO,
                                FE_TONEAREST};
    for (size_t mode = 0; mode < COUNT(modes); mode++)
        for (int power = -4; power <= 4; power++) {
            R s[LANES], slope[LANES], distance[LANES];
            R row[LANES] = {-R_LARGEST};
            const R by = R_LARGEST * EPSILON / 1024 * (R)ldexp(1, power);
            for (int l = 0; l < LANES; l++) {
                s[l] = l % 2 ? R_LARGEST : -R_LARGEST;
                slope[l] = l % 2 ? -by : by;
                distance[l] = l < 2 ? 256 : 1;
            }
            fesetround(modes[mode]);
            N(table)()->alibi(s, LANES, 1, LANES, slope, distance);
            N(table)()->alibi_row(row, 1, by, 256);
            fesetround(FE_TONEAREST);
            for (int l = 0; l < LANES; l++)
                assert_true(s[l] == (l % 2 ? R_LARGEST : -R_LARGEST));
            assert_true(row[0] == -R_LARGEST);
        }
}

/* --------------------------------------------------------------- Moments -- */

enum { N(TILES) = 5, N(KEYS) = 21 };

/* Sums over what a lane has seen, relative to m. */
static void N(expect_moments)(const R *seen, int64_t n, R unit, R m,
                              const R *found, int64_t ld)
{
    long double want[3] = {0, 0, 0}, size = 0;
    for (int64_t a = 0; a < n; a++) {
        const long double x = (long double)seen[a] - (long double)m;
        const long double w = unit > 0 ? exp2l((long double)unit * x) : expl(x);
        if (isinf(seen[a]))
            continue;
        want[0] = w > want[0] ? w : want[0];
        want[1] += w * w;
        want[2] += w * x;
        size += w * fabsl(x);
    }
    const long double bound[3] = {want[0], want[1], size};
    for (int a = 0; a < 3; a++)
        assert_true(fabsl((long double)found[a * ld] - want[a]) <=
                    80 * (long double)EPSILON * bound[a]);
}

/* Scores that rise, so that the reference moves, with -inf and hidden ones. */
static void N(moments_of_tiles)(R unit, bool hide)
{
    enum { LD = 2 * LANES };
    static R s[N(KEYS) * LD], same[N(KEYS) * LD];
    static R seen[LD][N(TILES) * N(KEYS)];
    static uint64_t words[N(KEYS) * ATTN__LANE_WORDS];
    int64_t n[LD] = {0};
    R m[LD], m2[LD], l[LD] = {0}, l2[LD] = {0}, alpha[LD];
    R moments[3 * LD] = {0};
    for (int a = 0; a < LD; a++)
        m[a] = m2[a] = (R)-INFINITY;
    for (int t = 0; t < N(TILES); t++) {
        const int64_t keys = t == 2 ? 3 : N(KEYS);
        memset(words, 0, sizeof words);
        for (int64_t j = 0; j < keys; j++)
            for (int a = 0; a < LD; a++) {
                const bool visible = !hide || (t > 0 && kit_int(0, 2) > 0);
                R *at = &s[j * LD + a];
                *at = a % 5 == 1 && t < 2 ? (R)-INFINITY
                                          : (R)(kit_real() * 6 + 4 * t);
                if (visible) {
                    words[j * ATTN__LANE_WORDS] |= (uint64_t)1 << a;
                    seen[a][n[a]++] = *at;
                }
            }
        memcpy(same, s, sizeof s);
        N(table)
        ()->softmax(s, LD, keys, LD, m, l, alpha, unit, hide ? words : NULL,
                    moments);
        N(table)
        ()->softmax(same, LD, keys, LD, m2, l2, alpha, unit,
                    hide ? words : NULL, NULL);
        assert_memory_equal(s, same, sizeof(R) * (size_t)(keys * LD));
        assert_memory_equal(l, l2, sizeof l);
        for (int a = 0; a < LD; a++)
            N(expect_moments)(seen[a], n[a], unit, m[a], moments + a, LD);
    }
}

static void N(test_softmax__counts_moments_and_changes_nothing)(void **state)
{
    (void)state;
    for (int hide = 0; hide < 2; hide++) {
        N(moments_of_tiles)(0, hide);
        N(moments_of_tiles)((R)1.4426950408889634, hide);
        N(moments_of_tiles)((R)0.7213475204444817, hide);
    }
}

static void
N(test_row_weights__counts_moments_and_changes_nothing)(void **state)
{
    (void)state;
    static R s[64], same[64], seen[400];
    for (int round = 0; round < 60; round++) {
        const R unit = round % 2 ? (R)1.25 : 0;
        R m = (R)-INFINITY, m2 = m, l = 0, l2 = 0, moments[3] = {0, 0, 0};
        int64_t n = 0;
        for (int t = 0; t < 5; t++) {
            const int64_t keys = kit_int(1, 48);
            for (int64_t j = 0; j < keys; j++) {
                s[j] = kit_int(0, 3) == 0 || t == 0
                           ? (R)-INFINITY
                           : (R)(kit_real() * 6 + 5 * t);
                seen[n++] = s[j];
            }
            memcpy(same, s, sizeof s);
            N(table)()->row_weights(s, keys, &m, &l, unit, moments);
            N(table)()->row_weights(same, keys, &m2, &l2, unit, NULL);
            assert_memory_equal(s, same, sizeof(R) * (size_t)keys);
            assert_true(l == l2 && m == m2);
            N(expect_moments)(seen, n, unit, m, moments, 1);
        }
    }
}

/* ------------------------------------------------------------- Gradients -- */

/* A tile with every tenth pair hidden, if hide, behind what is no number. */
static void N(gradient_of_tile)(R unit, bool hide)
{
    enum { LD = 2 * LANES };
    const R odd[] = {(R)NAN, (R)INFINITY, (R)-INFINITY, R_LARGEST};
    static R s[N(KEYS) * LD], d[N(KEYS) * LD], p[N(KEYS) * LD], z[N(KEYS) * LD];
    static uint64_t words[N(KEYS) * ATTN__LANE_WORDS];
    R m[LD], low[LD], delta[LD];
    memset(words, 0, sizeof words);
    for (int l = 0; l < LD; l++) {
        m[l] = (R)(kit_real() * 4 + 8);
        low[l] = (R)kit_real() * EPSILON * 4;
        delta[l] = (R)kit_real();
    }
    for (int a = 0; a < N(KEYS) * LD; a++) {
        const bool visible = !hide || a % 10 != 3;
        s[a] = visible ? (R)(kit_real() * 10) : odd[a / 10 % 4];
        d[a] = visible ? (R)kit_real() : odd[a / 40 % 4];
        words[a / LD * ATTN__LANE_WORDS] |= (uint64_t)visible << a % LD;
    }
    memcpy(p, s, sizeof s);
    memcpy(z, d, sizeof d);
    N(table)
    ()->gradient(p, z, LD, N(KEYS), LD, m, low, unit, delta,
                 hide ? words : NULL);
    for (int a = 0; a < N(KEYS) * LD; a++) {
        const int l = a % LD;
        const long double x =
            (long double)s[a] - (long double)m[l] - (long double)low[l];
        const long double w = unit > 0 ? exp2l((long double)unit * x) : expl(x);
        const long double dz = w * ((long double)d[a] - (long double)delta[l]);
        /* x, up to 22, is rounded twice, by 8 units of EPSILON each time, and
         * w by less than 4; the difference beside it is at most 2. */
        const long double bound =
            (16 * (long double)(unit > 0 ? unit : 1) + 4) *
            (long double)EPSILON * w;
        if (hide && a % 10 == 3) {
            assert_true(p[a] == 0 && z[a] == 0);
            continue;
        }
        assert_true(fabsl((long double)p[a] - w) <= bound);
        assert_true(fabsl((long double)z[a] - dz) <= 3 * bound);
    }
}

static void N(test_gradient__is_the_formula_and_0_where_hidden)(void **state)
{
    (void)state;
    for (int hide = 0; hide < 2; hide++) {
        N(gradient_of_tile)(0, hide);
        N(gradient_of_tile)((R)1.4426950408889634, hide);
        N(gradient_of_tile)((R)0.7213475204444817, hide);
    }
}

/* An LSE of +inf leaves no weight; one far below the scores is no LSE of
 * theirs, and shows; NaN stays. */
static void N(test_gradient__at_the_ends)(void **state)
{
    (void)state;
    const R units[] = {0, (R)1.25};
    for (int u = 0; u < 2; u++) {
        R s[LANES] = {1, 2, (R)NAN, 3}, d[LANES] = {1, 1, 1, (R)NAN};
        R m[LANES] = {(R)INFINITY, -2000, 0, 3};
        R low[LANES] = {0}, delta[LANES] = {0};
        N(table)
        ()->gradient(s, d, LANES, 1, LANES, m, low, units[u], delta, NULL);
        assert_true(s[0] == 0 && d[0] == 0);
        assert_true(isinf(s[1]) && s[1] > 0 && isinf(d[1]));
        assert_true(isnan(s[2]) && isnan(d[2]));
        assert_true(s[3] == 1 && isnan(d[3]));
    }
}

static void N(test_dot__is_exact_in_double)(void **state)
{
    (void)state;
    R x[70], y[70];
    for (int n = 0; n <= 70; n++) {
        long double want = 0, size = 0;
        for (int a = 0; a < n; a++) {
            x[a] = (R)kit_real();
            y[a] = (R)kit_real();
            want += (long double)x[a] * (long double)y[a];
            size += fabsl((long double)x[a] * (long double)y[a]);
        }
        assert_true(fabsl((long double)N(table)()->dot(x, y, n) - want) <=
                    (n + 1) * (long double)DBL_EPSILON * size);
    }
}

/* ------------------------------------------------------------------ Rows -- */

/* Rows of random numbers at odd places, their values beside them. */
enum { N(MOST_KEYS) = 70, N(MOST_WIDTH) = 150 };
static unsigned char N(memory)[N(MOST_KEYS) * (N(MOST_WIDTH) + 3) * sizeof(R)];
static R N(values)[N(MOST_KEYS)][N(MOST_WIDTH)];

static void N(make_rows)(int storage, int64_t keys, int64_t width,
                         const void **rows)
{
    const int64_t bytes = storage == ATTN__STORED_SAME ? sizeof(R) : 2;
    const int64_t ld = (width + kit_int(0, 3)) * bytes;
    for (int64_t j = 0; j < keys; j++) {
        /* Backwards, as of a negative stride; some rows twice. */
        unsigned char *row = N(memory) + (keys - 1 - j) * ld;
        for (int64_t e = 0; e < width; e++) {
            const R x = (R)kit_real();
            if (storage == ATTN__STORED_SAME)
                memcpy(row + e * bytes, &x, sizeof x);
            else
                put_16(row + e * bytes, storage, (float)x);
            N(values)
            [j][e] = storage == ATTN__STORED_SAME
                         ? x
                         : (R)get_16(row + e * bytes, storage);
        }
        rows[j] = row;
    }
    for (int64_t i = 0; i < ATTN__AHEAD_ROWS; i++)
        rows[keys + i] = rows[keys - 1];
}

/* Where column d of q stands for dots. */
static int64_t N(place)(int storage, int64_t width, int64_t d)
{
    const int64_t of = N(table)()->paired[storage];
    if (of == 0 || d >= width / of * of)
        return d;
    return d / of * of + (d % 2 ? of / 2 : 0) + d % of / 2;
}

static void N(test_rows__are_the_formula_for_every_storage)(void **state)
{
    (void)state;
    enum { LDQ = 160, LDS = 80 };
    _Alignas(64) static R q[8 * LDQ], s[8 * LDS], o[8 * N(MOST_WIDTH)];
    static const void *rows[N(MOST_KEYS) + ATTN__AHEAD_ROWS];
    for (int round = 0; round < 900; round++) {
        const int storage = round % STORAGES;
        const int64_t keys = kit_int(1, N(MOST_KEYS));
        const int64_t width =
            round % 4 ? kit_int(0, N(MOST_WIDTH)) : kit_int(1, 9) * 16;
        const int64_t n = kit_int(1, 8);
        N(make_rows)(storage, keys, width, rows);
        memset(q, 0, sizeof q);
        for (int64_t i = 0; i < n; i++)
            for (int64_t d = 0; d < width; d++)
                q[i * LDQ + d] = (R)kit_real();
        N(table)()->dots[storage](q, LDQ, n, rows, keys, width, s, LDS);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < keys; j++) {
                long double want = 0;
                for (int64_t d = 0; d < width; d++)
                    want +=
                        (long double)q[i * LDQ + N(place)(storage, width, d)] *
                        (long double)N(values)[j][d];
                assert_true(fabsl((long double)s[i * LDS + j] - want) <=
                            40 * (long double)EPSILON);
                s[i * LDS + j] = (R)kit_real();
            }
        memset(o, 0, sizeof o);
        N(table)
        ()->add_rows_of[storage](o, width, n, s, LDS, rows, keys, width);
        for (int64_t i = 0; i < n; i++)
            for (int64_t e = 0; e < width; e++) {
                long double want = 0;
                for (int64_t j = 0; j < keys; j++)
                    want += (long double)s[i * LDS + j] *
                            (long double)N(values)[j][e];
                assert_true(fabsl((long double)o[i * width + e] - want) <=
                            40 * (long double)EPSILON);
            }
        N(table)()->widen[storage](rows[0], o, width);
        for (int64_t e = 0; e < width; e++)
            assert_true(o[e] == N(values)[0][e]);
    }
    for (int storage = STORAGES; storage < ATTN__STORAGES; storage++) {
        assert_null(N(table)()->dots[storage]);
        assert_null(N(table)()->add_rows_of[storage]);
        assert_null(N(table)()->widen[storage]);
    }
}

#undef R
#undef N
#undef EPSILON
#undef R_LARGEST
#undef LANES
#undef STORAGES
