/*
 * Template: attention of one head, one query row at a time, in plain C. It
 * needs R (the type), X(name) (the name for that type) and R_EXP (its exp),
 * and undefines all three.
 */

/* out = softmax(scale q k^T) v for q (q_len, width), k (kv_len, width) and
 * v (kv_len, v_width), rows ld* elements apart. causal: key j is visible to
 * query i if j <= i. scores has room for kv_len numbers. */
static inline void X(row_loop)(int64_t q_len, int64_t kv_len, int64_t width,
                               int64_t v_width, R scale, int causal, const R *q,
                               int64_t ldq, const R *k, int64_t ldk, const R *v,
                               int64_t ldv, R *out, int64_t ldo, R *scores)
{
    for (int64_t i = 0; i < q_len; i++) {
        int64_t visible = causal && i + 1 < kv_len ? i + 1 : kv_len;
        R max = -(R)INFINITY;
        R sum = 0;

        for (int64_t j = 0; j < visible; j++) {
            R dot = 0;
            for (int64_t d = 0; d < width; d++)
                dot += q[i * ldq + d] * k[j * ldk + d];
            scores[j] = scale * dot;
            if (scores[j] > max)
                max = scores[j];
        }
        for (int64_t j = 0; j < visible; j++) {
            scores[j] = R_EXP(scores[j] - max);
            sum += scores[j];
        }
        for (int64_t e = 0; e < v_width; e++)
            out[i * ldo + e] = 0;
        for (int64_t j = 0; j < visible; j++) {
            R weight = scores[j] / sum;
            for (int64_t e = 0; e < v_width; e++)
                out[i * ldo + e] += weight * v[j * ldv + e];
        }
    }
}

#undef R
#undef X
#undef R_EXP
