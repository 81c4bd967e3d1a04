/*
 * Template: attention head by head. plain_head is one head by two matrix
 * products with a softmax between them, as with any BLAS at hand; run_heads
 * walks the heads of a problem for it and for the row loop. run_backward has
 * the gradients by five products a head. It needs R (the type), X(name) (the
 * name for that type), R_EXP (its exp) and GEMM (its cblas product), and
 * undefines them.
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

/* ------------------------------------------------------------- Backward -- */

/* One head of a view. */
struct X(matrix) {
    R *at;
    int64_t ld;
};

static struct X(matrix) X(head_of)(const attn_tensor *t, int64_t b, int64_t h)
{
    struct X(matrix) m = {(R *)t->data + head_at(t, b, h), t->stride[2]};
    return m;
}

/* c = alpha op(a) op(b) + beta c, with c m by n and k the inner size. */
static void X(multiply)(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int64_t m,
                        int64_t n, int64_t k, R alpha, struct X(matrix) a,
                        struct X(matrix) b, R beta, struct X(matrix) c)
{
    GEMM(CblasRowMajor, ta, tb, (int)m, (int)n, (int)k, alpha, a.at, (int)a.ld,
         b.at, (int)b.ld, beta, c.at, (int)c.ld);
}

/* Scores s become weights, products d = d_out.v become du. */
static void X(backward_rows)(const struct bench_problem *p, int64_t b,
                             int64_t h, R *s, R *d)
{
    const int64_t q_len = p->shape.q_len, kv_len = p->shape.kv_len;
    struct X(matrix) lse = X(head_of)(p->params.lse, b, h);
    struct X(matrix) out = X(head_of)(&p->out, b, h);
    struct X(matrix) d_out = X(head_of)(&p->d_out, b, h);

    for (int64_t i = 0; i < q_len; i++, s += kv_len, d += kv_len) {
        int64_t visible = p->shape.causal ? i + 1 : kv_len;
        R delta = 0;
        for (int64_t e = 0; e < p->shape.v_width; e++)
            delta += d_out.at[i * d_out.ld + e] * out.at[i * out.ld + e];
        for (int64_t j = 0; j < visible; j++) {
            s[j] = R_EXP(s[j] - lse.at[i * lse.ld]);
            d[j] = s[j] * (d[j] - delta);
        }
        for (int64_t j = visible; j < kv_len; j++)
            s[j] = d[j] = 0;
    }
}

/* scores: room for 2 q_len kv_len numbers. */
static void X(backward_head)(const struct bench_problem *p, int64_t b,
                             int64_t h, R *scores)
{
    const struct bench_shape *shape = &p->shape;
    const int64_t q_len = shape->q_len, kv_len = shape->kv_len;
    const int64_t width = shape->width, v_width = shape->v_width;
    const int64_t group = shape->heads / shape->kv_heads, g = h / group;
    const R scale = (R)(1 / sqrt((double)width));
    const R add = h % group ? 1 : 0; /* the first of a group sets d_k and d_v */
    struct X(matrix) s = {scores, kv_len};
    struct X(matrix) d = {scores + q_len * kv_len, kv_len};
    struct X(matrix) q = X(head_of)(&p->q, b, h);
    struct X(matrix) k = X(head_of)(&p->k, b, g);
    struct X(matrix) v = X(head_of)(&p->v, b, g);
    struct X(matrix) d_out = X(head_of)(&p->d_out, b, h);

    X(multiply)
    (CblasNoTrans, CblasTrans, q_len, kv_len, width, scale, q, k, 0, s);
    X(multiply)
    (CblasNoTrans, CblasTrans, q_len, kv_len, v_width, 1, d_out, v, 0, d);
    X(backward_rows)(p, b, h, s.at, d.at);
    X(multiply)
    (CblasTrans, CblasNoTrans, kv_len, v_width, q_len, 1, s, d_out, add,
     X(head_of)(&p->d_v, b, g));
    X(multiply)
    (CblasTrans, CblasNoTrans, kv_len, width, q_len, scale, d, q, add,
     X(head_of)(&p->d_k, b, g));
    X(multiply)
    (CblasNoTrans, CblasNoTrans, q_len, width, kv_len, scale, d, k, 0,
     X(head_of)(&p->d_q, b, h));
}

static void X(run_backward)(const struct bench_problem *p, R *scores)
{
    for (int64_t b = 0; b < p->shape.batch; b++)
        for (int64_t h = 0; h < p->shape.heads; h++)
            X(backward_head)(p, b, h, scores);
}

#undef R
#undef X
#undef R_EXP
#undef GEMM
