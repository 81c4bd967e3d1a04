/*
 * Template: attention head by head. plain_head is one head by two matrix
 * products with a softmax between them, as with any BLAS at hand; run_heads
 * walks the heads of a problem for it and for the row loop. It needs R (the
 * type), X(name) (the name for that type), R_EXP (its exp) and GEMM (its cblas
 * product), and undefines them.
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

/* Both ways to compute a head; they know no mask but causal. */
typedef void (*X(head))(int64_t, int64_t, int64_t, int64_t, R, int, const R *,
                        int64_t, const R *, int64_t, const R *, int64_t, R *,
                        int64_t, R *);

static void X(run_heads)(struct bench_problem *p, X(head) head, R *scores)
{
    const struct bench_shape *s = &p->shape;
    const R *q = p->q.data;
    const R *k = p->k.data;
    const R *v = p->v.data;
    R *out = p->out.data;
    R scale = (R)(1 / sqrt((double)s->width));

    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t h = 0; h < s->heads; h++) {
            int64_t g = h / (s->heads / s->kv_heads);
            head(s->q_len, s->kv_len, s->width, s->v_width, scale, s->causal,
                 q + head_at(&p->q, b, h), p->q.stride[2],
                 k + head_at(&p->k, b, g), p->k.stride[2],
                 v + head_at(&p->v, b, g), p->v.stride[2],
                 out + head_at(&p->out, b, h), p->out.stride[2], scores);
        }
}

#undef R
#undef X
#undef R_EXP
#undef GEMM
