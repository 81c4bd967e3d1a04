/*
 * Template of rotary position embedding; needs the real vocabulary and the
 * rotary_run of rotary.c.
 *
 * A row is first copied from x to y, unless it is there, then turned in place.
 * So there is one loop for each layout, whose pointers never meet: that lets
 * compilers vectorise it, and the copy leaves the row in the nearest cache.
 */

/* Pairs (k, k+n), unit strides. */
void XI(turn_halves)(R *restrict low, R *restrict high, const R *restrict c,
                     const R *restrict s, R sign, int64_t n)
{
    for (int64_t k = 0; k < n; k++) {
        R a = low[k], b = high[k], sine = sign * s[k];
        low[k] = c[k] * a - sine * b;
        high[k] = sine * a + c[k] * b;
    }
}

/* Pairs (2k, 2k+1), unit strides. */
void XI(turn_neighbours)(R *restrict y, const R *restrict c,
                         const R *restrict s, R sign, int64_t n)
{
    for (int64_t k = 0; k < n; k++) {
        R a = y[2 * k], b = y[2 * k + 1], sine = sign * s[k];
        y[2 * k] = c[k] * a - sine * b;
        y[2 * k + 1] = sine * a + c[k] * b;
    }
}

/* Pairs (k step, k step + gap), any strides. */
static void XI(turn_strided)(R *y, int64_t step, int64_t gap, const R *c,
                             int64_t c_step, const R *s, int64_t s_step, R sign,
                             int64_t n)
{
    for (int64_t k = 0; k < n; k++) {
        R a = y[k * step], b = y[k * step + gap], sine = sign * s[k * s_step];
        y[k * step] = c[k * c_step] * a - sine * b;
        y[k * step + gap] = sine * a + c[k * c_step] * b;
    }
}

static void XI(rotary_row)(const rotary_run *r, const R *x, R *y, int64_t p)
{
    int64_t width = r->x->shape[3], n = r->pairs;
    int64_t sx = r->x->stride[3], sy = r->y->stride[3];
    /* Tables without columns are no memory, and have no strides. */
    const R *c = (const R *)r->cos->data + (n > 0 ? p * r->cos->stride[2] : 0);
    const R *s = (const R *)r->sin->data + (n > 0 ? p * r->sin->stride[2] : 0);
    bool halves = r->params.style == ATTN_ROTARY_HALVES;
    R sign = r->params.inverse ? K(-1.0) : K(1.0);

    if (!r->in_place && sx == 1 && sy == 1)
        memcpy(y, x, (size_t)width * sizeof(R));
    else if (!r->in_place)
        for (int64_t d = 0; d < width; d++)
            y[d * sy] = x[d * sx];
    if (!r->adjacent)
        (void)XI(turn_strided)(y, halves ? sy : 2 * sy, halves ? n * sy : sy, c,
                               r->cos->stride[3], s, r->sin->stride[3], sign,
                               n);
    else if (halves)
        XI(turn_halves)(y, y + n, c, s, sign, n);
    else
        XI(turn_neighbours)(y, c, s, sign, n);
}

/* Rows [task * task_rows, ...) of x, in the order (b,h,t). */
static void XI(rotary_task)(void *data, int64_t task, int32_t worker)
{
    const rotary_run *r = data;
    const attn_tensor *x = r->x, *y = r->y;
    int64_t row = task * r->task_rows;
    int64_t count = MIN(r->task_rows, r->rows - row);
    int64_t t = row % x->shape[2];
    int64_t h = row / x->shape[2] % x->shape[1];
    int64_t b = row / x->shape[2] / x->shape[1];

    (void)worker;
    for (; count > 0; count--) {
        (void)XI(rotary_row)(r,
                             (const R *)x->data + b * x->stride[0] +
                                 h * x->stride[1] + t * x->stride[2],
                             (R *)y->data + b * y->stride[0] +
                                 h * y->stride[1] + t * y->stride[2],
                             position_of(&r->params, x->shape[2], b, t));
        if (++t == x->shape[2]) {
            t = 0;
            if (++h == x->shape[1]) {
                h = 0;
                b++;
            }
        }
    }
}
