/*
 * Template of softmax along the last axis; needs the real vocabulary.
 *
 *   y(j) = exp(x(j) - m) / sum over k of exp(x(k) - m),   m = max x
 *
 * Subtracting m changes nothing mathematically and keeps exp at or below 1. If
 * m is -inf nothing is visible; -inf - -inf would be NaN, so the row is defined
 * as zeros. y may be x.
 */

/* Row with any strides: maximum, exponentials, sum, one pass each. */
static R XI(strided_row)(const R *x, int64_t sx, R *y, int64_t sy, int64_t n,
                         R *sum)
{
    R m = R_NEG_INF, reference, total = K(0.0);

    for (int64_t j = 0; j < n; j++)
        m = x[j * sx] > m ? x[j * sx] : m;
    reference = m == R_NEG_INF ? K(0.0) : m;
    for (int64_t j = 0; j < n; j++) {
        R p = R_EXP(x[j * sx] - reference);
        y[j * sy] = p;
        total += p;
    }
    *sum = total;
    return m;
}

static void XI(softmax_row)(const R *x, int64_t sx, R *y, int64_t sy, int64_t n,
                            R *lse)
{
    R sum;
    R m = sx == 1 && sy == 1 ? XI(kernels_get)()->row(x, y, n, &sum)
                             : XI(strided_row)(x, sx, y, sy, n, &sum);
    R factor = K(1.0) / sum;

    if (m == R_NEG_INF && sum == K(0.0))
        factor = K(0.0); /* NaN is in the sum, so this row is -inf only */
    for (int64_t j = 0; j < n; j++)
        y[j * sy] *= factor;
    if (lse)
        *lse = m == R_NEG_INF && sum == K(0.0) ? R_NEG_INF : m + R_LOG(sum);
}

static void XI(softmax)(const attn_tensor *x, const attn_tensor *y,
                        const attn_tensor *lse)
{
    for (int64_t b = 0; b < x->shape[0]; b++)
        for (int64_t h = 0; h < x->shape[1]; h++)
            for (int64_t i = 0; i < x->shape[2]; i++) {
                const R *from = (const R *)x->data + b * x->stride[0] +
                                h * x->stride[1] + i * x->stride[2];
                R *to = (R *)y->data + b * y->stride[0] + h * y->stride[1] +
                        i * y->stride[2];
                R *l = lse ? (R *)lse->data + b * lse->stride[0] +
                                 h * lse->stride[1] + i * lse->stride[2]
                           : NULL;
                (void)XI(softmax_row)(from, x->stride[3], to, y->stride[3],
                                      x->shape[3], l);
            }
}

/* Largest |row sum - 1|; NaN if a row holds NaN. */
static void XI(weights_check)(const attn_tensor *w, double *worst,
                              int64_t *empty)
{
    for (int64_t b = 0; b < w->shape[0]; b++)
        for (int64_t h = 0; h < w->shape[1]; h++)
            for (int64_t i = 0; i < w->shape[2]; i++) {
                const R *row = (const R *)w->data + b * w->stride[0] +
                               h * w->stride[1] + i * w->stride[2];
                double sum = 0.0, off;
                bool zeros = true;
                for (int64_t j = 0; j < w->shape[3]; j++) {
                    R x = row[j * w->stride[3]];
                    sum += (double)x;
                    zeros &= x == K(0.0);
                }
                *empty += zeros;
                off = fabs(sum - 1.0);
                if (!zeros && !(off <= *worst))
                    *worst = isnan(*worst) ? *worst : off;
            }
}
