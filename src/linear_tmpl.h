/* Template of linear layers; needs the real vocabulary and linear.c's types. */

/* Scratch memory of a worker. */
typedef struct XI(panel) {
    R *w; /* in x columns */
    R *x; /* COPY_ROWS x DEPTH */
    R *y; /* COPY_ROWS x columns */
    const R **rows;
} XI(panel);

static XI(panel)
    XI(cut_panel)(const attn__blas *blas, int64_t in, attn__bump *bump)
{
    int64_t columns = panel_columns(blas);
    int64_t elements;
    XI(panel) p;

    if (!attn__mul_i64(in, columns, &elements))
        elements = INT64_MAX; /* too large: the bump allocator says so */
    p.w = attn__bump_take(bump, elements, sizeof(R));
    p.x = attn__bump_take(bump, COPY_ROWS * DEPTH, sizeof(R));
    p.y = attn__bump_take(bump, COPY_ROWS * columns, sizeof(R));
    p.rows = attn__bump_take(bump, columns, sizeof(R *));
    return p;
}

/* Columns [first, first + n) of W as (in x n). */
static void XI(copy_panel)(const linear_run *r, XI(panel) * p, int64_t first,
                           int64_t n)
{
    const R *w = r->w->data;
    bool out_in = r->layout == ATTN_WEIGHT_OUT_IN;
    int64_t by_out = r->w->stride[out_in ? 2 : 3];
    int64_t by_in = r->w->stride[out_in ? 3 : 2];

    w += first * by_out;
    if (by_in == 1 && n % ATTN__LANES_F32 == 0) {
        for (int64_t c = 0; c < n; c++)
            p->rows[c] = w + c * by_out;
        XI(kernels_get)()->pack(p->rows, n, n, r->in, K(1.0), p->w, n);
        return;
    }
    for (int64_t a = 0; a < r->in; a++)
        for (int64_t c = 0; c < n; c++)
            p->w[a * n + c] = w[a * by_in + c * by_out];
}

static void XI(set_bias)(const linear_run *r, R *y, int64_t ld, int64_t rows,
                         int64_t first, int64_t n)
{
    const R *bias = (const R *)r->bias->data;
    int64_t stride = r->bias->stride[3];

    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < n; c++)
            y[i * ld + c] = bias[(first + c) * stride];
}

/* Rows of x where a product can read them, some inputs at a time. */
static void XI(multiply)(const linear_run *r, XI(panel) * p, const R *x,
                         bool copy_x, int64_t rows, int64_t n, R *y, int64_t ld)
{
    int64_t row = r->runs.x_row, column = r->x->stride[3];
    int64_t products = MAX(attn__ceil_div(r->in, DEPTH), 1);
    int64_t most = attn__round_up(attn__ceil_div(r->in, products), 16);
    int beta = r->bias != NULL;

    if (r->in == 0)
        XI(gemm)(r->blas, false, rows, n, 0, x, 1, p->w, n, beta, y, ld);
    for (int64_t a = 0; a < r->in; a += most) {
        int64_t depth = MIN(most, r->in - a);
        const R *from = x + a * column;
        int64_t from_ld = row;
        if (copy_x) {
            for (int64_t i = 0; i < rows; i++)
                for (int64_t c = 0; c < depth; c++)
                    p->x[i * depth + c] = from[i * row + c * column];
            from = p->x;
            from_ld = depth;
        }
        (void)XI(gemm)(r->blas, false, rows, n, depth, from, from_ld,
                       p->w + a * n, n, beta || a > 0, y, ld);
    }
}

/* Can a product use rows so far apart in place? */
static bool XI(is_plain)(const attn_tensor *t, int64_t row)
{
    return (t->stride[3] == 1 || t->shape[3] == 1) && row >= t->shape[3] &&
           row <= INT32_MAX;
}

static void XI(linear_task)(void *data, int64_t index, int32_t worker)
{
    const linear_run *r = data;
    attn__bump bump = {r->workers + (size_t)worker * r->worker_bytes, 0};
    XI(panel) p = XI(cut_panel)(r->blas, r->in, &bump);
    attn__blas_guard guard = attn__blas_enter();
    int64_t slice = index % r->slices;
    int64_t panel = index / r->slices % r->panels;
    int64_t run = index / r->slices / r->panels;
    int64_t b = run / r->runs.inner, h = run % r->runs.inner;
    int64_t first = panel * panel_columns(r->blas);
    int64_t n = MIN(panel_columns(r->blas), r->out - first);
    int64_t begin = slice * TASK_ROWS;
    int64_t end = MIN(begin + TASK_ROWS, r->runs.rows);
    int64_t x_row = r->runs.x_row, y_row = r->runs.y_row;
    bool copy_x = !XI(is_plain)(r->x, x_row);
    bool copy_y = !XI(is_plain)(r->y, y_row);
    int64_t step = copy_x || copy_y ? COPY_ROWS : TASK_ROWS;
    const R *x = r->x->data;
    R *y = (R *)r->y->data + b * r->y->stride[0] + h * r->y->stride[1];

    if (r->in > 0)
        x += b * r->x->stride[0] + h * r->x->stride[1];
    XI(copy_panel)(r, &p, first, n);
    for (int64_t i = begin; i < end; i += step) {
        int64_t rows = MIN(step, end - i);
        int64_t ld = copy_y ? n : y_row;
        R *to = copy_y ? p.y : y + i * y_row + first;
        if (r->bias)
            XI(set_bias)(r, to, ld, rows, first, n);
        XI(multiply)(r, &p, x + i * x_row, copy_x, rows, n, to, ld);
        for (int64_t a = 0; copy_y && a < rows; a++)
            for (int64_t c = 0; c < n; c++)
                y[(i + a) * y_row + (first + c) * r->y->stride[3]] =
                    p.y[a * n + c];
    }
    attn__blas_leave(guard);
}
