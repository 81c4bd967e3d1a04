/*
 * Template of the merge of partial results; needs the real vocabulary and the
 * merge_run of merge.c.
 *
 * Weights, their sum and its logarithm are in double for both types: they are
 * few, and so what remains are the roundings of the weighted sum itself.
 */

/* Element (b,h,t,0) of a view. */
static const R *XI(merge_at)(const attn_tensor *view, const int64_t at[3])
{
    return (const R *)view->data + at[0] * view->stride[0] +
           at[1] * view->stride[1] + at[2] * view->stride[2];
}

/* M and W of a row; false if every part's LSE is -inf. */
static bool XI(merge_total)(const merge_run *r, const int64_t at[3],
                            double *largest, double *total)
{
    bool any = false;
    double m = -HUGE_VAL, sum = 0.0;

    for (int32_t p = 0; p < r->num_parts; p++) {
        double l = (double)*XI(merge_at)(&r->lses[p], at);
        any |= l != -HUGE_VAL;
        m = l > m ? l : m;
    }
    for (int32_t p = 0; p < r->num_parts; p++) {
        double l = (double)*XI(merge_at)(&r->lses[p], at);
        if (l != -HUGE_VAL)
            sum += exp(l - m);
    }
    *largest = m;
    *total = sum;
    return any;
}

/* sums = factor x, or += that. */
static void XI(merge_add)(R *restrict sums, const R *restrict x, int64_t stride,
                          int64_t n, R factor, bool first)
{
    if (first)
        for (int64_t e = 0; e < n; e++)
            sums[e] = factor * x[e * stride];
    else if (stride == 1)
        for (int64_t e = 0; e < n; e++)
            sums[e] += factor * x[e];
    else
        for (int64_t e = 0; e < n; e++)
            sums[e] += factor * x[e * stride];
}

/* Columns [from, from + n) of a row: all parts are read before out is written,
 * since it may be one of them. */
static void XI(merge_block)(const merge_run *r, const int64_t at[3],
                            int64_t from, int64_t n, double m, double total)
{
    R sums[BLOCK];
    bool first = true;
    int64_t stride = r->out->stride[3];
    R *y = (R *)r->out->data + at[0] * r->out->stride[0] +
           at[1] * r->out->stride[1] + at[2] * r->out->stride[2] +
           from * stride;

    for (int32_t p = 0; p < r->num_parts; p++) {
        double l = (double)*XI(merge_at)(&r->lses[p], at);
        const attn_tensor *part = &r->outs[p];
        if (l == -HUGE_VAL)
            continue;
        (void)XI(merge_add)(sums,
                            XI(merge_at)(part, at) + from * part->stride[3],
                            part->stride[3], n, (R)(exp(l - m) / total), first);
        first = false;
    }
    for (int64_t e = 0; e < n; e++)
        y[e * stride] = first ? K(0.0) : sums[e];
}

/* Rows [task * task_rows, ...), in the order (b,h,t). */
static void XI(merge_task)(void *data, int64_t task, int32_t worker)
{
    const merge_run *r = data;
    const attn_tensor *o = r->out;
    int64_t end = MIN((task + 1) * r->task_rows, r->rows);

    (void)worker;
    for (int64_t row = task * r->task_rows; row < end; row++) {
        int64_t at[3] = {row / o->shape[2] / o->shape[1],
                         row / o->shape[2] % o->shape[1], row % o->shape[2]};
        double m, total;
        bool any = XI(merge_total)(r, at, &m, &total);
        for (int64_t e = 0; e < o->shape[3]; e += BLOCK)
            XI(merge_block)(r, at, e, MIN(BLOCK, o->shape[3] - e), m, total);
        /* Last, since lse may be one of lses. ln 1 is left out to keep the
         * bits of -0. */
        if (r->lse)
            *(R *)(uintptr_t)XI(merge_at)(r->lse, at) =
                !any           ? R_NEG_INF
                : total == 1.0 ? (R)m
                               : (R)(m + log(total));
    }
}
