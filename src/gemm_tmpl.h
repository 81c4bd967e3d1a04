/* Template of the products; see gemm.h. Needs the real vocabulary and
 * CBLAS_GEMM, which it forgets at its end. */

static void XI(zero)(int64_t m, int64_t n, R *c, int64_t ldc)
{
    if (ldc == n) {
        n *= m;
        m = 1;
    }
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            c[i * ldc + j] = K(0.0);
}

static void XI(gemm_call)(const attn__blas *blas, bool a_transposed, int64_t m,
                          int64_t n, int64_t k, const R *a, int64_t lda,
                          const R *b, int64_t ldb, int beta, R *c, int64_t ldc)
{
    ASSERT(m > 0 && n > 0 && k > 0);
    ASSERT(m <= INT_MAX && n <= INT_MAX && k <= INT_MAX);
    ASSERT(lda >= (a_transposed ? m : k) && ldb >= n && ldc >= n);
    ASSERT(lda <= INT_MAX && ldb <= INT_MAX && ldc <= INT_MAX);
    if (blas->add_only && !beta) {
        (void)XI(zero)(m, n, c, ldc);
        beta = 1;
    }
    /* Kernels that pack take their buffers under a lock. */
    if (blas->kind != ATTN__BLAS_SMALL)
        attn__unforkable_begin();
    if (blas->exclusive)
        attn__process_lock();
    CBLAS_GEMM(CblasRowMajor, a_transposed ? CblasTrans : CblasNoTrans,
               CblasNoTrans, (int)m, (int)n, (int)k, K(1.0), a, (int)lda, b,
               (int)ldb, beta ? K(1.0) : K(0.0), c, (int)ldc);
    if (blas->exclusive)
        attn__process_unlock();
    if (blas->kind != ATTN__BLAS_SMALL)
        attn__unforkable_end();
}

/*
 * As gemm, for any sizes that one call may have. Where a is not transposed and
 * k is two vectors or more, the small kernels of OpenBLAS copy the last columns
 * of b, if they are at most half a vector, to memory from malloc, and do not
 * ask whether there was any (0.3.21). So that none does, the sums of those
 * columns are done in parts (gradients of width 40: 1.11 of the time that
 * malloc takes; as columns of two calls that have more than half a vector
 * each: 1.18).
 */
static void XI(gemm_calls)(const attn__blas *blas, bool a_transposed, int64_t m,
                           int64_t n, int64_t k, const R *a, int64_t lda,
                           const R *b, int64_t ldb, int beta, R *c, int64_t ldc)
{
    const int64_t lanes = 64 / (int64_t)sizeof(R), most = 2 * lanes - 1;
    int64_t tail = n % lanes, depth;

    if (blas->kind != ATTN__BLAS_SMALL || a_transposed || k <= most ||
        tail == 0 || tail > lanes / 2) {
        (void)XI(gemm_call)(blas, a_transposed, m, n, k, a, lda, b, ldb, beta,
                            c, ldc);
        return;
    }
    n -= tail;
    if (n > 0)
        (void)XI(gemm_call)(blas, false, m, n, k, a, lda, b, ldb, beta, c, ldc);
    depth = attn__ceil_div(k, attn__ceil_div(k, most));
    for (int64_t l = 0; l < k; l += depth)
        (void)XI(gemm_call)(blas, false, m, tail, MIN(depth, k - l), a + l, lda,
                            b + l * ldb + n, ldb, beta || l > 0, c + n, ldc);
}

/* A piece of size such that `pieces` of them cover n, in steps of 4. */
static int64_t XI(piece)(int64_t n, int64_t pieces)
{
    return attn__round_up(attn__ceil_div(n, pieces), 4);
}

void XI(gemm)(const attn__blas *blas, bool a_transposed, int64_t m, int64_t n,
              int64_t k, const R *a, int64_t lda, const R *b, int64_t ldb,
              int beta, R *c, int64_t ldc)
{
    /* No dimension beyond 2^30, so that all fit an int with room. */
    const int64_t most = (int64_t)1 << 30;
    int64_t piece_m = MIN(m, most), piece_k = MIN(k, most);

    if (m == 0 || n == 0)
        return;
    if (k == 0) {
        if (!beta)
            (void)XI(zero)(m, n, c, ldc);
        return;
    }
    ASSERT(n <= most);
    if (piece_k > blas->limit / n / MIN(piece_m, 16)) {
        /* Long sums: pieces that leave room for 16 rows. */
        int64_t fits = MAX(blas->limit / n / MIN(piece_m, 16), 1);
        piece_k = XI(piece)(k, attn__ceil_div(k, fits));
        piece_k = MIN(piece_k, MAX(fits, 4));
    }
    if (piece_m > blas->limit / n / piece_k) {
        int64_t fits = MAX(blas->limit / n / piece_k, 1);
        piece_m = MIN(XI(piece)(m, attn__ceil_div(m, fits)), fits);
    }
    for (int64_t i = 0; i < m; i += piece_m)
        for (int64_t l = 0; l < k; l += piece_k) {
            const R *from = a_transposed ? a + l * lda + i : a + i * lda + l;
            (void)XI(gemm_calls)(blas, a_transposed, MIN(piece_m, m - i), n,
                                 MIN(piece_k, k - l), from, lda, b + l * ldb,
                                 ldb, beta || l > 0, c + i * ldc, ldc);
        }
}

#undef CBLAS_GEMM
