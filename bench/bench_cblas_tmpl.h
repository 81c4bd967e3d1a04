/*
 * Template: attention of one head by two matrix products and a softmax between
 * them, as with any BLAS at hand. It needs R (the type), X(name) (the name for
 * that type), R_EXP (its exp) and GEMM (its cblas product), and undefines them.
 */

static void X(softmax_row)(R *row, int64_t visible, int64_t count)
{
    R max = row[0];
    R sum = 0;

    for (int64_t j = 1; j < visible; j++)
        if (row[j] > max)
            max = row[j];
    for (int64_t j = 0; j < visible; j++) {
        row[j] = R_EXP(row[j] - max);
        sum += row[j];
    }
    for (int64_t j = 0; j < visible; j++)
        row[j] /= sum;
    for (int64_t j = visible; j < count; j++)
        row[j] = 0;
}

/* As row_loop of row_loop_tmpl.h, with room for q_len * kv_len scores. */
static void X(plain_head)(int64_t q_len, int64_t kv_len, int64_t width,
                          int64_t v_width, R scale, int causal, const R *q,
                          int64_t ldq, const R *k, int64_t ldk, const R *v,
                          int64_t ldv, R *out, int64_t ldo, R *scores)
{
    GEMM(CblasRowMajor, CblasNoTrans, CblasTrans, (int)q_len, (int)kv_len,
         (int)width, scale, q, (int)ldq, k, (int)ldk, 0, scores, (int)kv_len);
    for (int64_t i = 0; i < q_len; i++) {
        int64_t visible = causal && i + 1 < kv_len ? i + 1 : kv_len;
        X(softmax_row)(scores + i * kv_len, visible, kv_len);
    }
    GEMM(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)q_len, (int)v_width,
         (int)kv_len, 1, scores, (int)kv_len, v, (int)ldv, 0, out, (int)ldo);
}

#undef R
#undef X
#undef R_EXP
#undef GEMM
