/*
 * Template of the gradients. A block is some queries of one head, one lane
 * each; against a tile of keys it is, with dOt the gradient of the output,
 * transposed and multiplied by the scale, and delta as in attn.h:
 *
 *   S  = K Qt,  S = weights     as in the forward pass, from the stored LSE
 *   dP = V dOt                  both are keys x lanes
 *   dP = dz = S (dP - delta)    the scale is in it, so it need not be in K or Q
 *   dV += S dO                  the rows of all five as they lie in memory, as
 *   dK += dP Q                  is what is added to: no partial gradients are
 *   dQ += dP^T K                kept
 *
 * in five products, none of a form that OpenBLAS's kernels without packing
 * refuse. The scores are computed again, so that memory is O(T).
 *
 * As in the forward pass, some blocks of a task go through the same tiles
 * together, and what lies apart, as in (B,T,H,D), is copied for them: K and V
 * of a tile, Q and dO of a block. Tried and not kept: copies of the rows that
 * are added to as well (0.99 to 1.06), and tiles of one size for blocks under
 * causal rules, so that they agree (T = 1024: 1.03 to 1.08).
 *
 * What is added to a row of dQ, dK or dV comes in a fixed order: a task owns
 * the rows it adds to. Where there are too few heads for many threads, queries
 * and keys are cut into n parts each, and in wave w the task of keys k has the
 * queries (k + w) mod n: all tasks of a wave own different rows (sdpa.c).
 *
 * Gradients of masks, slopes and the scale are sums of dz over whatever they
 * were broadcast over; passes of their own compute dz again for them.
 *
 * Needs the other templates of the engine, and what sdpa.c defines.
 */

/* Scratch memory of a worker besides that of the forward pass. */
typedef struct XI(backward_worker) {
    R *dp;     /* keys x lanes: products of gradients and values, then dz */
    R *bend;   /* keys x lanes: du / dz, if there is a softcap */
    R *raw;    /* keys x lanes: pack_scale q.k, for the gradient of the scale */
    R *q_copy; /* lanes x D of each slot, where Q cannot be used in place */
    R *d_copy; /* lanes x Dv, the same of dO */
    R *clean;  /* rows of a product without what is not finite */
    R *sum;    /* a product, where it cannot be added in place */
    R *low;    /* what the references of the lanes lack, of each slot */
    R *delta;
    double *total; /* keys x lanes, sums of dz */
} XI(backward_worker);

static XI(backward_worker)
    XI(cut_backward_worker)(const attn__backward *g, attn__bump *bump)
{
    const attn__sdpa *p = &g->p;
    int64_t lanes = most_lanes(p), slots = most_slots(p, true);
    int64_t keys =
        MIN(attn__round_up(MIN(p->kv_len, ATTN__MAX_KEYS), 4), p->most_keys);
    int64_t width = MAX(p->width, p->v_width);
    int64_t rows = MAX(attn__tile_copy_elements(&p->blas, R_DTYPE, keys, width),
                       lanes * width);
    XI(backward_worker) w = {0};

    w.dp = attn__bump_take(bump, keys * lanes, sizeof(R));
    if (p->softcap > 0.0)
        w.bend = attn__bump_take(bump, keys * lanes, sizeof(R));
    if (g->wants[ATTN__D_SCALE])
        w.raw = attn__bump_take(bump, keys * lanes, sizeof(R));
    w.q_copy = attn__bump_take(bump, strip_elements(p, lanes, slots, p->width),
                               sizeof(R));
    w.d_copy = attn__bump_take(
        bump, strip_elements(p, lanes, slots, p->v_width), sizeof(R));
    w.clean = attn__bump_take(bump, rows, sizeof(R));
    w.sum = attn__bump_take(bump, rows, sizeof(R));
    w.low = attn__bump_take(bump, slots * lanes, sizeof(R));
    w.delta = attn__bump_take(bump, slots * lanes, sizeof(R));
    if (wants_sums(g))
        w.total =
            attn__bump_take(bump, MAX(keys, 1) * MAX(lanes, 1), sizeof(double));
    return w;
}

static void *XI(cut_backward_workers)(const attn__backward *g, attn__bump *bump)
{
    XI(backward_worker) *workers =
        attn__bump_take(bump, g->p.threads, sizeof(XI(backward_worker)));

    for (int32_t t = 0; t < g->p.threads; t++) {
        XI(backward_worker) w = XI(cut_backward_worker)(g, bump);
        if (workers)
            workers[t] = w;
    }
    return workers;
}

/* A block with its gradients. */
typedef struct XI(slope) {
    XI(block) b;
    const attn__backward *g;
    XI(backward_worker) w;
    double factor;  /* what dz is still to be multiplied by */
    const R *q, *d; /* the rows of Q and dO */
    int64_t ldq, ldd;
    bool odd;   /* some of them are not finite */
    R *raw;     /* where the scores are kept, or NULL */
    const R *k; /* the rows of K of the tile at hand */
    int64_t ldk;
} XI(slope);

/* The rows of the lanes, which are one after the other, as a product wants
 * them: where they lie, or copied, all that are not adjacent if so wanted. */
static const R *XI(rows_of_lanes)(const XI(block) * b, const attn_tensor *t,
                                  bool adjacent, R *copy, int64_t *ld)
{
    const attn__lanes *lanes = b->slot.lanes;
    int64_t width = t->shape[3], row = t->stride[2];
    const R *from = XI(query_at)(t, b, lanes->head[0], lanes->i[0]);

    *ld = MAX(width, 1);
    if (XI(has_rows)(t)) {
        if (lanes->n == 1)
            return from;
        if (row == *ld || (!adjacent && row > *ld && row <= INT32_MAX)) {
            *ld = row;
            return from;
        }
    }
    for (int64_t l = 0; l < lanes->n; l++, from += row)
        if (t->stride[3] == 1)
            memcpy(copy + l * width, from, (size_t)width * sizeof(R));
        else
            for (int64_t e = 0; e < width; e++)
                copy[l * width + e] = from[e * t->stride[3]];
    return copy;
}

/* The sum over e of dO and O, in double: it is taken off products with which
 * it may cancel. */
static double XI(dot_of_row)(const XI(slope) * x, int64_t head, int64_t i)
{
    const attn_tensor *out = &x->g->p.out, *d_out = &x->g->d_out;
    const R *o = XI(query_at)(out, &x->b, head, i);
    const R *d = XI(query_at)(d_out, &x->b, head, i);
    double sum = 0.0;

    if (XI(has_rows)(out) && XI(has_rows)(d_out))
        return x->b.kernels->dot(o, d, out->shape[3]);
    for (int64_t e = 0; e < out->shape[3]; e++)
        sum += (double)o[e * out->stride[3]] * (double)d[e * d_out->stride[3]];
    return sum;
}

/* delta of a row, less the gradient of its LSE. */
static double XI(delta_of_row)(const XI(slope) * x, int64_t head, int64_t i)
{
    double delta = XI(dot_of_row)(x, head, i);

    if (x->g->has_d_lse)
        delta -= (double)*XI(query_at)(&x->g->d_lse, &x->b, head, i);
    return delta;
}

/*
 * The LSE of a lane in the unit of its scores, as the maximum is in the forward
 * pass; its rounding, which would be an error of all weights of the row, goes
 * on in w.low. That of a row that sees nothing, -inf, becomes +inf: no weights.
 */
static void XI(set_reference)(XI(slope) * x, int64_t l, int64_t head, int64_t i)
{
    XI(block) *b = &x->b;
    R lse = *XI(query_at)(&b->p->extra[ATTN__LSE], b, head, i);
    double reference = (double)lse;

    if (b->unit > K(0.0))
        reference *= LOG2_E / (double)b->unit;
    b->slot.m[l] = lse == R_NEG_INF ? -R_NEG_INF : (R)reference;
    x->w.low[l] = K(0.0);
    if (b->slot.m[l] - b->slot.m[l] == K(0.0))
        x->w.low[l] = (R)(reference - (double)b->slot.m[l]);
}

/* A task's block against the keys [first, end), and its tiles, of which there
 * may be none. */
static XI(slope)
    XI(make_slope)(const backward_run *r, const task *t, int32_t worker,
                   int64_t first, int64_t end, XI(tiles) * tiles)
{
    XI(slope) x = {.g = r->g};

    x.b = XI(make_block)(&r->r, t, worker, false);
    x.b.by_rows = false;
    x.w = ((const XI(backward_worker) *)r->workers)[worker];
    x.w.low += t->slot * most_lanes(x.b.p);
    x.w.delta += t->slot * most_lanes(x.b.p);
    if (t->slot > 0) {
        x.w.q_copy += t->slot * most_lanes(x.b.p) * x.b.p->width;
        x.w.d_copy += t->slot * most_lanes(x.b.p) * x.b.p->v_width;
    }
    XI(clip_keys)(&x.b, first, end);
    *tiles = XI(cut_keys)(&x.b, r->g->p.tile.keys);
    return x;
}

/* Numbers so far from 1 that others come near the ends of their range by
 * them; and 0. */
static bool XI(is_extreme)(double scale)
{
    int exponent;

    (void)frexp(scale, &exponent);
    return scale == 0.0 || exponent > 60 || exponent < -60;
}

/* What all tiles of a block need. folded: dz shall have the scale as a factor,
 * in dOt if it can be. adjacent: rows of Q and dO are copied to such. */
static void XI(pack_slope)(XI(slope) * x, bool folded, bool adjacent)
{
    XI(block) *b = &x->b;
    const attn__backward *g = x->g;
    const attn__lanes *lanes = b->slot.lanes;
    double scale = folded ? g->p.scale : 1.0;

    x->factor = 1.0;
    if (XI(is_extreme)(scale)) {
        x->factor = scale;
        scale = 1.0;
    }
    XI(pack_queries)(b);
    (void)XI(pack_columns)(b, &g->d_out, scale, b->slot.ot);
    for (int64_t l = 0; l < lanes->n; l++) {
        int64_t head = lanes->head[l], i = lanes->i[l];
        XI(set_reference)(x, l, head, i);
        x->w.delta[l] = (R)(scale * XI(delta_of_row)(x, head, i));
    }
    for (int64_t l = lanes->n; l < b->padded; l++) {
        b->slot.m[l] = K(0.0);
        x->w.low[l] = K(0.0);
        x->w.delta[l] = K(0.0);
    }
    x->q = XI(rows_of_lanes)(b, &g->p.q, adjacent, x->w.q_copy, &x->ldq);
    x->d = XI(rows_of_lanes)(b, &g->d_out, adjacent, x->w.d_copy, &x->ldd);
    if (lanes->bounded || attn__has_elements(&g->p.visibility))
        x->odd = b->kernels->nonfinite(x->q, x->ldq, lanes->n, g->p.width) ||
                 b->kernels->nonfinite(x->d, x->ldd, lanes->n, g->p.v_width);
}

/* ---------------------------------------------------------------- Tiles -- */

/* du / dz = 1 - tanh^2, of capped scores. */
static void XI(bend_of_tile)(XI(slope) * x, int64_t keys)
{
    const R *s = x->b.w->s;

    for (int64_t a = 0; a < keys * x->b.padded; a++) {
        R t = s[a] / x->b.cap_out;
        x->w.bend[a] = (K(1.0) - t) * (K(1.0) + t);
    }
}

/* Weights and dz of a tile, in s and dp, 0 in both where hidden; keys that none
 * sees may be cut off from it. */
static attn__tile_state XI(tile_slopes)(XI(slope) * x, int64_t *first,
                                        int64_t *count)
{
    XI(block) *b = &x->b;
    const attn__sdpa *p = b->p;
    attn__tile_state state =
        attn__tile_trimmed(b->w->bits, &p->visibility, &b->t->s, b->slot.lanes,
                           first, count, R_DTYPE);
    int64_t key = *first, keys = *count, ldv;
    const R *v;

    if (state == ATTN__TILE_EMPTY)
        return state;
    x->k = XI(keys_of_tile)(b, key, keys, &x->ldk);
    v = XI(values_of_tile)(b, key, keys, false, &ldv);
    (void)XI(product_of_rows)(b, x->k, x->ldk, keys, p->width, b->slot.qt,
                              b->w->s);
    (void)XI(product_of_rows)(b, v, ldv, keys, p->v_width, b->slot.ot, x->w.dp);
    if (x->raw)
        memcpy(x->raw, b->w->s, (size_t)(keys * b->padded) * sizeof(R));
    if (b->cap_in > K(0.0)) {
        XI(cap_tile)(b, keys);
        XI(bend_of_tile)(x, keys);
    }
    XI(add_to_tile)(b, key, keys);
    b->kernels->gradient(b->w->s, x->w.dp, b->padded, keys, b->padded,
                         b->slot.m, x->w.low, b->unit, x->w.delta,
                         XI(hidden)(b, state));
    return state;
}

/* From dz to du, times what is left of the scale. Where a key is hidden dz is
 * 0, and the score may be NaN. */
static void XI(bend_tile)(XI(slope) * x, int64_t keys)
{
    int64_t n = keys * x->b.padded;

    for (int64_t a = 0; x->b.cap_in > K(0.0) && a < n; a++)
        x->w.dp[a] = x->w.dp[a] == K(0.0) ? K(0.0) : x->w.dp[a] * x->w.bend[a];
    for (int64_t a = 0; x->factor != 1.0 && a < n; a++)
        x->w.dp[a] = XI(scaled)(x->w.dp[a], x->factor);
}

/* Rows that products are added to. */
typedef struct XI(rows) {
    R *first;
    int64_t row, column;
} XI(rows);

/* to (m x n) += op(a) x, with a the weights or dz of a tile: keys x lanes, or
 * its transpose. */
static void XI(add_product)(const XI(slope) * s, bool transposed, int64_t m,
                            int64_t n, int64_t k, const R *a, const R *x,
                            int64_t ldx, XI(rows) to)
{
    const attn__blas *blas = &s->b.p->blas;
    int64_t lda = s->b.padded;
    /* BLIS reads rows of what it adds to in whole vectors, also behind the
     * last one, where the caller's memory may end. */
    bool in_place = blas->kind != ATTN__BLAS_UNPACKED &&
                    (to.column == 1 || n == 1) &&
                    (m == 1 || (to.row >= n && to.row <= INT32_MAX));

    if (in_place) {
        (void)XI(gemm)(blas, transposed, m, n, k, a, lda, x, ldx, 1, to.first,
                       m == 1 ? n : to.row);
        return;
    }
    (void)XI(gemm)(blas, transposed, m, n, k, a, lda, x, ldx, 0, s->w.sum, n);
    for (int64_t i = 0; i < m; i++)
        for (int64_t e = 0; e < n; e++)
            to.first[i * to.row + e * to.column] += s->w.sum[i * n + e];
}

/*
 * The same where some keys are hidden from some lanes and x may hold what is
 * not finite: 0 times that is NaN. The product is that of the finite numbers,
 * and the others go to those that see them.
 */
static void XI(add_visible)(const XI(slope) * s, bool transposed, int64_t m,
                            int64_t n, int64_t k, const R *a, const R *x,
                            int64_t ldx, XI(rows) to)
{
    R *clean = s->w.clean;

    for (int64_t r = 0; r < k; r++)
        for (int64_t e = 0; e < n; e++) {
            R y = x[r * ldx + e];
            clean[r * n + e] = y - y == K(0.0) ? y : K(0.0);
        }
    (void)XI(add_product)(s, transposed, m, n, k, a, clean, MAX(n, 1), to);
    for (int64_t r = 0; r < k; r++)
        for (int64_t e = 0; e < n; e++) {
            R y = x[r * ldx + e];
            if (y - y == K(0.0))
                continue;
            for (int64_t i = 0; i < m; i++) {
                int64_t key = transposed ? r : i, lane = transposed ? i : r;
                if (XI(is_visible)(s->b.w->bits, key, lane))
                    to.first[i * to.row + e * to.column] +=
                        a[key * s->b.padded + lane] * y;
            }
        }
}

/* Where the keys of a sequence's head have their gradients. */
static XI(rows) XI(rows_of_keys)(const XI(slope) * x, int a, int64_t key)
{
    const attn_tensor *t = &x->g->gradient[a];
    const task *of = x->b.t;
    int64_t batch = x->g->p.cu_k ? 0 : of->s.b;
    XI(rows) to = {NULL, t->stride[2], t->stride[3]};

    to.first = (R *)t->data + batch * t->stride[0] + of->g * t->stride[1] +
               (of->kv_row + key) * t->stride[2];
    return to;
}

/* What a tile adds to dV, dK and dQ. */
static void XI(add_tile)(XI(slope) * x, attn__tile_state state, int64_t key,
                         int64_t keys)
{
    const attn__backward *g = x->g;
    const attn__lanes *lanes = x->b.slot.lanes;
    int64_t width = g->p.width, v_width = g->p.v_width;
    void (*add)(const XI(slope) *, bool, int64_t, int64_t, int64_t, const R *,
                const R *, int64_t, XI(rows)) = XI(add_product);

    if (state == ATTN__TILE_MIXED &&
        (x->odd || x->b.kernels->nonfinite(x->k, x->ldk, keys, width)))
        add = XI(add_visible);
    if (g->wants[ATTN__D_V])
        add(x, false, keys, v_width, lanes->n, x->b.w->s, x->d, x->ldd,
            XI(rows_of_keys)(x, ATTN__D_V, key));
    if (!g->wants[ATTN__D_Q] && !g->wants[ATTN__D_K])
        return;
    (void)XI(bend_tile)(x, keys);
    if (g->wants[ATTN__D_K])
        add(x, false, keys, width, lanes->n, x->w.dp, x->q, x->ldq,
            XI(rows_of_keys)(x, ATTN__D_K, key));
    if (g->wants[ATTN__D_Q]) {
        const attn_tensor *t = &g->gradient[ATTN__D_Q];
        XI(rows)
        to = {XI(query_at)(t, &x->b, lanes->head[0], lanes->i[0]), t->stride[2],
              t->stride[3]};
        add(x, true, lanes->n, width, keys, x->w.dp, x->k, x->ldk, to);
    }
}

static void XI(add_tile_at)(XI(slope) * x, int64_t key, int64_t keys)
{
    attn__tile_state state = XI(tile_slopes)(x, &key, &keys);

    if (state != ATTN__TILE_EMPTY)
        (void)XI(add_tile)(x, state, key, keys);
}

/* ---------------------------------------------------------------- Tasks -- */

/* A task's rows, if they are set and not added to: 0 at first. */
static void XI(clear_rows)(const backward_run *r, const backward_part *t)
{
    static const int keyed[] = {ATTN__D_K, ATTN__D_V};
    const attn__backward *g = r->g;
    const attn__sdpa *p = &g->p;
    int64_t first, end, b;

    if (g->wants[ATTN__D_Q] && !g->adds[ATTN__D_Q] && p->width > 0) {
        first = block_begin(&t->of.c, &t->of.s, t->first_block * p->group);
        end = block_begin(&t->of.c, &t->of.s, t->end_block * p->group);
        /* The last ones also where the sequence has no queries. */
        if (t->end_block * p->group == t->of.c.blocks && !p->cu_q)
            end = p->q_len;
        b = p->cu_q ? 0 : t->of.s.b;
        for (int64_t h = 0; h < p->group; h++)
            (void)XI(fill_head)(&g->gradient[ATTN__D_Q], b,
                                t->of.g * p->group + h, t->of.q_row + first,
                                t->of.q_row + end, K(0.0));
    }
    end = t->end_key;
    if (end == t->of.s.kv_len && !p->cu_k)
        end = p->kv_len;
    b = p->cu_k ? 0 : t->of.s.b;
    for (int a = 0; a < 2; a++)
        if (g->wants[keyed[a]] && !g->adds[keyed[a]] &&
            g->gradient[keyed[a]].shape[3] > 0)
            (void)XI(fill_head)(&g->gradient[keyed[a]], b, t->of.g,
                                t->of.kv_row + t->first_key, t->of.kv_row + end,
                                K(0.0));
}

/* Some blocks of a task whose tiles agree, each tile for all of them. What is
 * added to a row comes in the order it has if they come one by one. */
static void XI(slopes_together)(XI(slope) * x, const XI(tiles) * tiles,
                                int64_t n)
{
    XI(held) held = {.copies = true};

    for (int64_t index = 0; index < tiles->run[1].count; index++) {
        held.key = XI(tile_keys)(tiles, index, &held.keys);
        for (int64_t a = 0; a < n; a++) {
            x[a].b.held = &held;
            (void)XI(add_tile_at)(&x[a], held.key, held.keys);
            x[a].b.held = NULL;
        }
    }
}

/* Are the tiles of two blocks the same, and more than one? */
static bool XI(same_tiles)(const XI(tiles) * x, const XI(tiles) * y)
{
    return XI(tiles_agree)(x, y) && x->run[1].end == y->run[1].end &&
           x->run[1].count > 1;
}

/* Blocks [first, first + n) of a part, by head of the group and position. */
static void XI(backward_strip)(const backward_run *r, const backward_part *part,
                               int64_t h, int64_t first, int64_t n,
                               int32_t worker)
{
    task of[MAX_STRIP];
    XI(slope) x[MAX_STRIP];
    XI(tiles) tiles[MAX_STRIP];
    bool together =
        n > 1 || (is_one_block(&part->of) && copies_rows(&r->g->p, n));

    for (int64_t a = 0; a < n; a++) {
        of[a] = part->of;
        of[a].block = (first + a) * r->g->p.group + h;
        of[a].slot = a;
        x[a] = XI(make_slope)(r, &of[a], worker, part->first_key, part->end_key,
                              &tiles[a]);
        together = together && XI(same_tiles)(&tiles[0], &tiles[a]);
    }
    for (int64_t a = 0; a < n; a++) {
        int64_t count = XI(count_tiles)(&tiles[a]);
        if (count > 0)
            (void)XI(pack_slope)(&x[a], true, together);
        for (int64_t i = 0; !together && i < count; i++) {
            int64_t keys;
            int64_t key = XI(tile_keys)(&tiles[a], i, &keys);
            (void)XI(add_tile_at)(&x[a], key, keys);
        }
    }
    if (together)
        (void)XI(slopes_together)(x, tiles, n);
}

/* Some queries of a group's heads against some keys. */
static void XI(backward_task)(void *data, int64_t index, int32_t worker)
{
    const backward_run *r = data;
    const attn__sdpa *p = &r->g->p;
    int64_t strip = most_strip(p, true);
    backward_part part = find_part(r, index);
    attn__blas_guard guard = attn__blas_enter();

    if (r->wave == 0)
        (void)XI(clear_rows)(r, &part);
    for (int64_t h = 0; h < p->group; h++)
        for (int64_t a = part.first_block; a < part.end_block; a += strip)
            (void)XI(backward_strip)(r, &part, h, a,
                                     MIN(strip, part.end_block - a), worker);
    attn__blas_leave(guard);
}

/* The sum over the visible pairs of a tile of du q.k. */
static double XI(sum_of_tile)(const XI(slope) * x, attn__tile_state state,
                              int64_t keys)
{
    const XI(block) *b = &x->b;
    double *total = x->w.total, sum = 0.0;
    int64_t n = b->slot.lanes->n;

    for (int64_t l = 0; l < n; l++)
        total[l] = 0.0;
    for (int64_t j = 0; j < keys; j++)
        for (int64_t l = 0; l < n; l++) {
            int64_t at = j * b->padded + l;
            if (state == ATTN__TILE_FULL || XI(is_visible)(b->w->bits, j, l))
                total[l] += (double)x->w.dp[at] * (double)x->raw[at];
        }
    for (int64_t l = 0; l < n; l++)
        sum += total[l];
    return sum;
}

/* What a tile adds to the gradient of a slope: - |p(i) - j| dz. */
static double XI(distances_of_tile)(const XI(slope) * x, int64_t key,
                                    int64_t keys)
{
    const XI(block) *b = &x->b;
    double sum = 0.0;

    for (int64_t l = 0; l < b->slot.lanes->n; l++) {
        double distance = (double)XI(distance)(b, l, key), of_lane = 0.0;
        for (int64_t j = 0; j < keys; j++)
            of_lane +=
                fabs(distance - (double)j) * (double)x->w.dp[j * b->padded + l];
        sum -= of_lane;
    }
    return sum;
}

/* q.k of a tile: what was kept of the scores, less what q was multiplied by. */
static void XI(raw_of_tile)(XI(slope) * x, int64_t keys)
{
    XI(block) *b = &x->b;
    const double by = 1.0 / b->pack_scale;

    if (XI(is_extreme)(b->pack_scale)) {
        (void)XI(pack_columns)(b, &b->p->q, 1.0, b->slot.qt);
        (void)XI(product_of_rows)(b, x->k, x->ldk, keys, b->p->width,
                                  b->slot.qt, x->raw);
        XI(pack_queries)(b);
        return;
    }
    for (int64_t a = 0; a < keys * b->padded; a++)
        x->raw[a] = XI(scaled)(x->raw[a], by);
}

/* What a head gives to the gradients of its slope, its sink and the scale. */
static void XI(head_task)(void *data, int64_t index, int32_t worker)
{
    const backward_run *r = data;
    const attn__backward *g = r->g;
    const attn__sdpa *p = &g->p;
    const bool tiled = g->wants[ATTN__D_ALIBI] || g->wants[ATTN__D_SCALE];
    int64_t b = index / p->heads, head = index % p->heads;
    double sums[HEAD_SUMS] = {0.0};
    task t = {.g = head / p->group};
    attn__blas_guard guard = attn__blas_enter();

    t.s = attn__sdpa_sequence(p, b, &t.q_row, &t.kv_row);
    t.c = r->r.cuts[b];
    for (t.block = head % p->group; t.block < t.c.blocks; t.block += p->group) {
        XI(tiles) tiles;
        XI(slope)
        x = XI(make_slope)(r, &t, worker, 0, t.s.kv_len, &tiles);
        const attn__lanes *lanes = x.b.slot.lanes;
        int64_t count = tiles.run[0].count + tiles.run[1].count;
        for (int64_t l = 0; g->wants[ATTN__D_SINKS] && l < lanes->n; l++) {
            double sink = (double)XI(per_head)(&p->sinks, b, head);
            double lse = (double)*XI(query_at)(&p->extra[ATTN__LSE], &x.b, head,
                                               lanes->i[l]);
            if (sink != -HUGE_VAL || lse != -HUGE_VAL)
                sums[SUM_SINK] -=
                    exp(sink - lse) * XI(delta_of_row)(&x, head, lanes->i[l]);
        }
        x.raw = x.w.raw;
        if (tiled)
            (void)XI(pack_slope)(&x, false, false);
        for (int64_t i = 0; tiled && i < count; i++) {
            int64_t keys;
            int64_t key = XI(tile_keys)(&tiles, i, &keys);
            attn__tile_state state = XI(tile_slopes)(&x, &key, &keys);
            if (state == ATTN__TILE_EMPTY)
                continue;
            if (g->wants[ATTN__D_ALIBI])
                sums[SUM_ALIBI] += XI(distances_of_tile)(&x, key, keys);
            if (g->wants[ATTN__D_SCALE]) {
                (void)XI(bend_tile)(&x, keys);
                (void)XI(raw_of_tile)(&x, keys);
                sums[SUM_SCALE] += XI(sum_of_tile)(&x, state, keys);
            }
        }
    }
    for (int a = 0; a < HEAD_SUMS; a++)
        r->sums[index * HEAD_SUMS + a] = sums[a];
    attn__blas_leave(guard);
}

/* One number of a gradient, set or added to. */
static void XI(put)(const attn__backward *g, int a, const int64_t at[4],
                    double x)
{
    const attn_tensor *t = &g->gradient[a];
    R *to = (R *)t->data;

    for (int axis = 0; axis < 4; axis++)
        to += at[axis] * t->stride[axis];
    *to = (R)(g->adds[a] ? (double)*to + x : x);
}

/* The sums of the heads, over what the gradients were broadcast over. */
static void XI(put_head_sums)(const backward_run *r)
{
    static const struct {
        int a, sum;
    } gradients[] = {{ATTN__D_ALIBI, SUM_ALIBI},
                     {ATTN__D_SINKS, SUM_SINK},
                     {ATTN__D_SCALE, SUM_SCALE}};
    const attn__backward *g = r->g;
    const int64_t batch = g->p.batch, heads = g->p.heads;

    for (int n = 0; n < 3; n++) {
        const int a = gradients[n].a;
        const int64_t *shape = g->gradient[a].shape;
        /* (1,1,1,1), (1,1,1,Hq) or (B,Hq,1,1); of one number all are one. */
        bool per_batch = shape[0] * shape[1] > 1;
        bool per_head = per_batch || shape[3] > 1;
        if (!g->wants[a])
            continue;
        for (int64_t b = 0; b < (per_batch ? batch : 1); b++)
            for (int64_t h = 0; h < (per_head ? heads : 1); h++) {
                int64_t end_b = per_batch ? b + 1 : batch;
                int64_t end_h = per_head ? h + 1 : heads;
                double sum = 0.0;
                for (int64_t c = b; c < end_b; c++)
                    for (int64_t e = h; e < end_h; e++)
                        sum += r->sums[(c * heads + e) * HEAD_SUMS +
                                       gradients[n].sum];
                (void)XI(put)(
                    g, a,
                    per_batch ? (const int64_t[4]){b, h, 0, 0}
                              : (const int64_t[4]){0, 0, 0, per_head ? h : 0},
                    sum);
            }
    }
}

/*
 * A part of the gradient of a mask: those of its numbers that a tile has, of
 * one of its heads and batches. Summed are all batches, heads, blocks of
 * queries and tiles of keys that share them.
 */
static void XI(mask_task)(void *data, int64_t index, int32_t worker)
{
    const backward_run *r = data;
    const attn__sdpa *p = &r->g->p;
    const mask_part part = find_mask_part(r, index);
    XI(backward_worker) w = ((const XI(backward_worker) *)r->workers)[worker];
    attn__blas_guard guard = attn__blas_enter();

    for (int64_t e = 0; e < part.rows * part.keys; e++)
        w.total[e] = 0.0;
    for (int64_t b = part.first[0]; b < part.end[0]; b++)
        for (int64_t h = part.first[1]; h < part.end[1]; h++) {
            task k = {.g = h / p->group};
            k.s = attn__sdpa_sequence(p, b, &k.q_row, &k.kv_row);
            k.c = r->r.cuts[b];
            k.c.queries = p->tile.lanes;
            k.c.blocks = attn__ceil_div(k.s.q_len, k.c.queries) * p->group;
            for (int64_t i = part.first[2]; i < MIN(part.end[2], k.s.q_len);
                 i += k.c.queries) {
                XI(slope) x;
                XI(tiles) tiles;
                int64_t count;
                k.block = i / k.c.queries * p->group + h % p->group;
                x = XI(make_slope)(r, &k, worker, part.first[3], part.end[3],
                                   &tiles);
                count = tiles.run[0].count + tiles.run[1].count;
                if (count > 0)
                    (void)XI(pack_slope)(&x, false, false);
                for (int64_t n = 0; n < count; n++) {
                    int64_t keys;
                    int64_t key = XI(tile_keys)(&tiles, n, &keys);
                    if (XI(tile_slopes)(&x, &key, &keys) == ATTN__TILE_EMPTY)
                        continue;
                    for (int64_t j = 0; j < keys; j++) {
                        const R *dz = x.w.dp + j * x.b.padded;
                        double *to = w.total;
                        if (part.keys > 1)
                            to += (key + j - part.first[3]) * part.rows;
                        for (int64_t l = 0; l < x.b.slot.lanes->n; l++)
                            to[part.rows > 1 ? l : 0] += (double)dz[l];
                    }
                }
            }
        }
    for (int64_t j = 0; j < part.keys; j++)
        for (int64_t i = 0; i < part.rows; i++) {
            const int64_t at[4] = {part.first[0], part.first[1],
                                   part.first[2] + i, part.first[3] + j};
            (void)XI(put)(r->g, ATTN__D_MASKS + r->mask, at,
                          w.total[j * part.rows + i]);
        }
    attn__blas_leave(guard);
}
