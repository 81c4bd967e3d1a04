/*
 * Template of the engine: one block of queries against all keys it sees.
 *
 *   Qt (D x lanes)    the queries, transposed and scaled, packed once
 *   S  = K Qt         scores by key and lane; K is used where it lies
 *   S  = weights      mask, maximum, exponential, sum: vectors over lanes
 *   Ot += V^T S       output by column and lane; V is used where it lies
 *   out = Ot^T / sum  transposed back once at the end
 *
 * so each product is of a form that OpenBLAS's kernels without packing take,
 * and a score is touched by products and softmax while it is in cache. S for
 * the whole row never exists: the maximum and the sum run along (online
 * softmax: Milakov and Gimelshein, arXiv:1805.02867).
 *
 * Needs the real vocabulary, and what sdpa.c defines before including this.
 */

/* Scratch memory of a worker. Arrays over lanes have most_lanes(p) elements. */
typedef struct XI(worker) {
    R *qt;     /* D x lanes */
    R *s;      /* keys x lanes */
    R *ot;     /* Dv x lanes */
    R *k_copy; /* keys x D, where K cannot be used in place */
    R *v_copy; /* keys x Dv */
    R *gather; /* keys x lanes, rows of masks */
    R *m, *l;  /* running maximum and sum */
    R *alpha;
    R *factor;           /* 1 / sum */
    unsigned char *seen; /* has the lane seen any key? */
    const R **rows;
    R **out_rows;
    attn__lanes *lanes;
    attn__tile_bits *bits;
} XI(worker);

static XI(worker) XI(cut_worker)(const attn__sdpa *p, attn__bump *bump)
{
    int64_t lanes = most_lanes(p);
    int64_t keys = MIN(attn__round_up(MIN(p->kv_len, ATTN__MAX_KEYS), 4),
                       attn__tile_keys(&p->blas, R_DTYPE));
    XI(worker) w;

    w.qt = attn__bump_take(bump, p->width * lanes, sizeof(R));
    w.s = attn__bump_take(bump, keys * lanes, sizeof(R));
    w.ot = attn__bump_take(bump, p->v_width * lanes, sizeof(R));
    w.k_copy = attn__bump_take(
        bump, attn__tile_copy_elements(&p->blas, R_DTYPE, keys, p->width),
        sizeof(R));
    w.v_copy = attn__bump_take(
        bump, attn__tile_copy_elements(&p->blas, R_DTYPE, keys, p->v_width),
        sizeof(R));
    w.gather = NULL;
    if (p->visibility.num_add > 0)
        w.gather = attn__bump_take(bump, keys * lanes, sizeof(R));
    w.m = attn__bump_take(bump, lanes, sizeof(R));
    w.l = attn__bump_take(bump, lanes, sizeof(R));
    w.alpha = attn__bump_take(bump, lanes, sizeof(R));
    w.factor = attn__bump_take(bump, lanes, sizeof(R));
    w.seen = attn__bump_take(bump, lanes, 1);
    w.rows = attn__bump_take(bump, lanes, sizeof(R *));
    w.out_rows = attn__bump_take(bump, lanes, sizeof(R *));
    w.lanes = attn__bump_take(bump, 1, sizeof(attn__lanes));
    w.bits = attn__bump_take(bump, 1, sizeof(attn__tile_bits));
    return w;
}

/* A block of queries, with all that its loops need. */
typedef struct XI(block) {
    const attn__sdpa *p;
    const task *t;
    const XI(kernels) * kernels;
    XI(worker) w;
    int64_t padded; /* lanes, rounded up to whole vectors: the ld of tiles */
    int mode;       /* of the scores */
    const R *k, *v; /* key 0 of this sequence and head */
} XI(block);

/* Element (i, h) of a tensor that runs along the queries, its last index 0. */
static R *XI(query_at)(const attn_tensor *tensor, const XI(block) * b,
                       int64_t head, int64_t i)
{
    int64_t batch = b->p->cu_q ? 0 : b->t->s.b;

    return (R *)tensor->data + batch * tensor->stride[0] +
           head * tensor->stride[1] + (b->t->q_row + i) * tensor->stride[2];
}

static const R *XI(keys_at)(const attn_tensor *tensor, const XI(block) * b)
{
    int64_t batch = b->p->cu_k ? 0 : b->t->s.b;

    return (const R *)tensor->data + batch * tensor->stride[0] +
           b->t->g * tensor->stride[1] + b->t->kv_row * tensor->stride[2];
}

static void XI(set_lanes)(XI(block) * b)
{
    const task *t = b->t;
    const cut *c = &t->c;
    attn__lanes *lanes = b->w.lanes;
    int64_t first_i = t->block / c->head_blocks * c->queries;
    int64_t first_h = t->block % c->head_blocks * c->heads;
    int64_t end_i = MIN(first_i + c->queries, t->s.q_len);
    int64_t end_h = MIN(first_h + c->heads, b->p->group);
    int64_t n = 0;

    for (int64_t i = first_i; i < end_i; i++)
        for (int64_t h = first_h; h < end_h; h++, n++) {
            lanes->i[n] = i;
            lanes->head[n] = t->g * b->p->group + h;
        }
    lanes->n = n;
    b->padded = attn__round_up(n, lane_step(R_DTYPE));
    attn__lanes_ranges(lanes, &b->p->visibility, &t->s);
}

/* Qt = scale Q^T, with log2(e) in the scale unless masks are added to it. */
static void XI(pack_queries)(XI(block) * b)
{
    const attn__sdpa *p = b->p;
    const attn__lanes *lanes = b->w.lanes;
    const double log2_e = 1.4426950408889634074;
    R scale = (R)(b->mode == ATTN__LOG2 ? p->scale * log2_e : p->scale);
    int64_t stride = p->q.stride[3];

    for (int64_t l = 0; l < lanes->n; l++)
        b->w.rows[l] = XI(query_at)(&p->q, b, lanes->head[l], lanes->i[l]);
    if (stride == 1 || p->width <= 1) {
        b->kernels->pack(b->w.rows, lanes->n, b->padded, p->width, scale,
                         b->w.qt, b->padded);
        return;
    }
    for (int64_t d = 0; d < p->width; d++)
        for (int64_t l = 0; l < b->padded; l++)
            b->w.qt[d * b->padded + l] =
                l < lanes->n ? b->w.rows[l][d * stride] * scale : K(0.0);
}

/* All but the running state; a task's kernels, mode and pointers. */
static XI(block) XI(make_block)(const run *r, const task *t, int32_t worker)
{
    attn__bump bump = {r->workers + (size_t)worker * r->worker_bytes, 0};
    XI(block) b = {.p = r->p, .t = t, .kernels = XI(kernels_get)()};

    b.w = XI(cut_worker)(r->p, &bump);
    b.mode = r->p->visibility.num_add > 0 ? ATTN__NATURAL : ATTN__LOG2;
    b.k = XI(keys_at)(&r->p->k, &b);
    b.v = XI(keys_at)(&r->p->v, &b);
    XI(set_lanes)(&b);
    return b;
}

/* ---------------------------------------------------------------- Tiles -- */

/* The keys of a block: one or two runs, each cut into equal tiles. */
typedef struct XI(tiles) {
    struct {
        int64_t begin, end;
        int64_t size;  /* keys of a tile */
        int64_t count; /* tiles */
    } run[2];
} XI(tiles);

static XI(tiles) XI(cut_keys)(const XI(block) * b)
{
    const attn__lanes *lanes = b->w.lanes;
    int64_t low = lanes->low, high = MAX(lanes->high, lanes->low);
    int64_t keep_low = lanes->keep_low;
    int64_t keep_high = MAX(lanes->keep_high, keep_low);
    XI(tiles) t = {{{0, 0, 1, 0}, {0, 0, 1, 0}}};

    if (low == high || keep_low == keep_high || keep_high < low ||
        high < keep_low) {
        /* Apart. The kept first keys come first, or nothing is there. */
        t.run[0].begin = keep_low;
        t.run[0].end = keep_high;
        t.run[1].begin = low;
        t.run[1].end = high;
    } else {
        t.run[1].begin = MIN(low, keep_low);
        t.run[1].end = MAX(high, keep_high);
    }
    for (int a = 0; a < 2; a++) {
        int64_t n = t.run[a].end - t.run[a].begin;
        int64_t tiles = attn__ceil_div(n, b->p->tile.keys);
        if (n == 0)
            continue;
        t.run[a].size = attn__round_up(attn__ceil_div(n, tiles), 4);
        t.run[a].count = attn__ceil_div(n, t.run[a].size);
    }
    return t;
}

/* Tile number `index`: its first key and how many. */
static int64_t XI(tile_keys)(const XI(tiles) * t, int64_t index, int64_t *keys)
{
    int a = index >= t->run[0].count;
    int64_t key;

    if (a)
        index -= t->run[0].count;
    key = t->run[a].begin + index * t->run[a].size;
    *keys = MIN(t->run[a].size, t->run[a].end - key);
    return key;
}

/* Rows of K or V as a product wants them: in place if columns are adjacent and
 * rows do not overlap, else copied. */
static const R *XI(rows_for_gemm)(const attn_tensor *tensor, const R *first,
                                  int64_t key, int64_t keys, R *copy,
                                  int64_t *ld)
{
    int64_t width = tensor->shape[3];
    int64_t row = tensor->stride[2], column = tensor->stride[3];
    const R *from = first + key * row;

    *ld = MAX(width, 1);
    if (column == 1 || width <= 1) {
        if (keys == 1)
            return from;
        if (row >= *ld && row <= INT32_MAX) {
            *ld = row;
            return from;
        }
    }
    for (int64_t j = 0; j < keys; j++)
        for (int64_t e = 0; e < width; e++)
            copy[j * width + e] = from[j * row + e * column];
    return copy;
}

static void XI(scores)(XI(block) * b, int64_t key, int64_t keys)
{
    const attn__sdpa *p = b->p;
    int64_t ld;
    const R *k = XI(rows_for_gemm)(&p->k, b->k, key, keys, b->w.k_copy, &ld);

    XI(gemm)
    (&p->blas, false, keys, b->padded, p->width, k, ld, b->w.qt, b->padded, 0,
     b->w.s, b->padded);
}

/* Scores of a tile with masks; EMPTY if there is nothing to compute. */
static attn__tile_state XI(masked_scores)(XI(block) * b, int64_t key,
                                          int64_t keys)
{
    const attn__sdpa *p = b->p;
    const task *t = b->t;
    attn__tile_state state = attn__tile_visibility(
        b->w.bits, &p->visibility, &t->s, b->w.lanes, key, keys, R_DTYPE);

    if (state == ATTN__TILE_EMPTY)
        return state;
    XI(scores)(b, key, keys);
    if (state == ATTN__TILE_MIXED || p->visibility.num_add > 0)
        XI(mask_tile)
    (b->w.s, b->padded, keys, b->padded, b->w.bits, state, &p->visibility,
     &t->s, b->w.lanes, key, b->w.gather);
    return state;
}

static bool XI(is_visible)(const attn__tile_bits *bits, int64_t j, int64_t lane)
{
    return bits->by_key[j][lane / 64] >> (lane % 64) & 1;
}

/*
 * V rows that are not finite, in a tile where some lanes do not see all keys:
 * weight 0 times NaN would be NaN there. The product is done with zeros in
 * their place, and they are added for the lanes that see them.
 */
static void XI(add_nonfinite)(XI(block) * b, int64_t key, int64_t keys)
{
    const attn_tensor *v = &b->p->v;

    for (int64_t j = 0; j < keys; j++)
        for (int64_t e = 0; e < b->p->v_width; e++) {
            R x = b->v[(key + j) * v->stride[2] + e * v->stride[3]];
            if (x - x == K(0.0))
                continue;
            for (int64_t l = 0; l < b->w.lanes->n; l++)
                if (XI(is_visible)(b->w.bits, j, l))
                    b->w.ot[e * b->padded + l] += x * b->w.s[j * b->padded + l];
        }
}

static void XI(add_values)(XI(block) * b, attn__tile_state state, int64_t key,
                           int64_t keys, bool first)
{
    const attn__sdpa *p = b->p;
    int64_t ld;
    const R *v = XI(rows_for_gemm)(&p->v, b->v, key, keys, b->w.v_copy, &ld);
    bool careful = state == ATTN__TILE_MIXED &&
                   b->kernels->nonfinite(v, ld, keys, p->v_width);

    if (careful) {
        for (int64_t j = 0; j < keys; j++)
            for (int64_t e = 0; e < p->v_width; e++) {
                R x = v[j * ld + e];
                b->w.v_copy[j * p->v_width + e] = x - x == K(0.0) ? x : K(0.0);
            }
        v = b->w.v_copy;
        ld = MAX(p->v_width, 1);
    }
    XI(gemm)
    (&p->blas, true, p->v_width, b->padded, keys, v, ld, b->w.s, b->padded,
     !first, b->w.ot, b->padded);
    if (careful)
        XI(add_nonfinite)(b, key, keys);
}

static void XI(note_seen)(XI(block) * b, attn__tile_state state, int64_t keys)
{
    if (state == ATTN__TILE_FULL) {
        memset(b->w.seen, 1, (size_t)b->padded);
        return;
    }
    for (int64_t l = 0; l < b->w.lanes->n; l++)
        for (int64_t w = 0; 64 * w < keys; w++)
            b->w.seen[l] |= b->w.bits->by_lane[l][w] != 0;
}

/* Tiles [begin, end) of the block: afterwards ot, m, l and seen hold the
 * result, not yet divided by the sum. */
static void XI(attend)(XI(block) * b, const XI(tiles) * tiles, int64_t begin,
                       int64_t end)
{
    bool first = true;

    for (int64_t l = 0; l < b->padded; l++) {
        b->w.m[l] = R_NEG_INF;
        b->w.l[l] = K(0.0);
        b->w.seen[l] = 0;
    }
    for (int64_t index = begin; index < end; index++) {
        int64_t keys;
        int64_t key = XI(tile_keys)(tiles, index, &keys);
        attn__tile_state state = XI(masked_scores)(b, key, keys);
        bool moved;
        if (state == ATTN__TILE_EMPTY)
            continue;
        moved = b->kernels->softmax(b->w.s, b->padded, keys, b->padded, b->w.m,
                                    b->w.l, b->w.alpha, b->mode);
        if (moved && !first)
            b->kernels->rescale(b->w.ot, b->padded, b->p->v_width, b->padded,
                                b->w.alpha);
        XI(add_values)(b, state, key, keys, first);
        XI(note_seen)(b, state, keys);
        first = false;
    }
    for (int64_t a = 0; first && a < b->p->v_width * b->padded; a++)
        b->w.ot[a] = K(0.0);
}

/* --------------------------------------------------------------- Results -- */

/* LSE from the maximum and the sum, as the scores are. */
static R XI(lse_of)(const XI(block) * b, int64_t l)
{
    const R ln_2 = K(0.69314718055994530942);

    if (!b->w.seen[l])
        return R_NEG_INF;
    if (b->w.l[l] == K(0.0))
        return R_NAN; /* all visible scores are -inf: 0/0, as in the formula */
    if (b->mode == ATTN__LOG2)
        return (b->w.m[l] + R_LOG2(b->w.l[l])) * ln_2;
    return b->w.m[l] + R_LOG(b->w.l[l]);
}

/* Maximum and 1/sum of a lane's row, for the weights. */
static R *XI(stats_at)(const run *r, const XI(block) * b, int64_t l)
{
    const attn__sdpa *p = b->p;
    int64_t batch = p->cu_q ? 0 : b->t->s.b;
    int64_t row = (batch * p->heads + b->w.lanes->head[l]) * p->q.shape[2] +
                  b->t->q_row + b->w.lanes->i[l];

    return (R *)r->stats + 2 * row;
}

static void XI(write_block)(const run *r, XI(block) * b)
{
    const attn__sdpa *p = b->p;
    const attn__lanes *lanes = b->w.lanes;
    int64_t stride = p->out.stride[3];

    for (int64_t l = 0; l < b->padded; l++)
        b->w.factor[l] = b->w.seen[l] ? K(1.0) / b->w.l[l] : K(0.0);
    for (int64_t l = 0; l < lanes->n; l++) {
        b->w.out_rows[l] =
            XI(query_at)(&p->out, b, lanes->head[l], lanes->i[l]);
        if (p->wants_lse)
            *XI(query_at)(&p->lse, b, lanes->head[l], lanes->i[l]) =
                XI(lse_of)(b, l);
        if (r->stats) {
            R *stats = XI(stats_at)(r, b, l);
            stats[0] = b->w.m[l];
            stats[1] = b->w.factor[l];
        }
    }
    if (stride == 1 || p->v_width <= 1) {
        b->kernels->unpack(b->w.ot, b->padded, lanes->n, p->v_width,
                           b->w.factor, b->w.out_rows, false);
        return;
    }
    for (int64_t l = 0; l < lanes->n; l++)
        for (int64_t e = 0; e < p->v_width; e++)
            b->w.out_rows[l][e * stride] =
                b->w.ot[e * b->padded + l] * b->w.factor[l];
}

/* Where a split leaves its result: output, maximum, sum, seen. */
static void XI(use_partial)(const run *r, XI(block) * b, int64_t number,
                            R **seen)
{
    int64_t size = partial_elements(b->p, most_lanes(b->p));
    R *at = (R *)r->partials + number * size;

    b->w.ot = at;
    b->w.m = at + b->p->v_width * b->padded;
    b->w.l = b->w.m + b->padded;
    *seen = b->w.l + b->padded;
}

static void XI(compute_task)(void *data, int64_t index, int32_t worker)
{
    const run *r = data;
    task t = find_task(r, r->wave_start + index);
    attn__blas_guard guard = attn__blas_enter();
    XI(block) b = XI(make_block)(r, &t, worker);
    XI(tiles) tiles = XI(cut_keys)(&b);
    int64_t count = tiles.run[0].count + tiles.run[1].count;
    R *seen = NULL;

    if (t.c.splits > 1)
        XI(use_partial)(r, &b, t.number, &seen);
    XI(pack_queries)(&b);
    XI(attend)
    (&b, &tiles, count * t.split / t.c.splits,
     count * (t.split + 1) / t.c.splits);
    if (seen)
        for (int64_t l = 0; l < b.padded; l++)
            seen[l] = b.w.seen[l];
    else
        XI(write_block)(r, &b);
    attn__blas_leave(guard);
}

/*
 * Partial results over disjoint keys, in the order of the keys:
 *   M = max m_k,  f_k = e^(m_k - M),  l = sum f_k l_k,  O = sum f_k O_k
 */
static void XI(merge_task)(void *data, int64_t index, int32_t worker)
{
    const run *r = data;
    task t = find_task(r, r->wave_start + index);
    XI(block) b, part;
    int64_t lanes, width = r->p->v_width;
    R *seen;

    if (t.c.splits == 1 || t.split != 0)
        return;
    b = XI(make_block)(r, &t, worker);
    part = b;
    lanes = b.padded;
    for (int64_t l = 0; l < lanes; l++) {
        b.w.m[l] = R_NEG_INF;
        b.w.l[l] = K(0.0);
        b.w.seen[l] = 0;
    }
    for (int64_t e = 0; e < width * lanes; e++)
        b.w.ot[e] = K(0.0);
    for (int64_t k = 0; k < t.c.splits; k++) {
        XI(use_partial)(r, &part, t.number + k, &seen);
        for (int64_t l = 0; l < lanes; l++)
            if (part.w.m[l] > b.w.m[l])
                b.w.m[l] = part.w.m[l];
    }
    for (int64_t k = 0; k < t.c.splits; k++) {
        XI(use_partial)(r, &part, t.number + k, &seen);
        for (int64_t l = 0; l < lanes; l++) {
            R above = part.w.m[l] - b.w.m[l];
            R f = b.mode == ATTN__LOG2 ? R_EXP2(above) : R_EXP(above);
            /* Nothing above -inf in this part: it adds nothing. NaN shows in
             * the sum. */
            b.w.alpha[l] = part.w.m[l] == R_NEG_INF ? K(0.0) : f;
            if (part.w.m[l] == R_NEG_INF && part.w.l[l] != K(0.0))
                b.w.alpha[l] = K(1.0);
            b.w.l[l] += b.w.alpha[l] * part.w.l[l];
            b.w.seen[l] |= seen[l] != K(0.0);
        }
        for (int64_t e = 0; e < width; e++)
            for (int64_t l = 0; l < lanes; l++)
                b.w.ot[e * lanes + l] +=
                    b.w.alpha[l] * part.w.ot[e * lanes + l];
    }
    XI(write_block)(r, &b);
}

static void XI(empty_lse)(const attn__sdpa *p, int64_t b, int64_t first)
{
    for (int64_t h = 0; h < p->heads; h++)
        for (int64_t i = first; i < p->q_len; i++)
            ((R *)p->lse.data)[b * p->lse.stride[0] + h * p->lse.stride[1] +
                               i * p->lse.stride[2]] = R_NEG_INF;
}

/* --------------------------------------------------------------- Weights -- */

/* Weights rows of the lanes, at key 0. */
static R *XI(weights_row)(const attn_tensor *tensor, const XI(block) * b,
                          int64_t head, int64_t i)
{
    return (R *)tensor->data + b->t->s.b * tensor->stride[0] +
           head * tensor->stride[1] + i * tensor->stride[2];
}

/* Adds or stores a tile of weights, times factor, to the rows of a tensor. */
static void XI(write_weights)(XI(block) * b, const attn_tensor *tensor,
                              bool mean, int64_t key, int64_t keys,
                              const R *factor)
{
    const attn__lanes *lanes = b->w.lanes;
    int64_t stride = tensor->stride[3];

    for (int64_t l = 0; l < lanes->n; l++)
        b->w.out_rows[l] =
            XI(weights_row)(tensor, b, mean ? 0 : lanes->head[l], lanes->i[l]) +
            key * stride;
    if (stride == 1 || tensor->shape[3] == 1) {
        b->kernels->unpack(b->w.s, b->padded, lanes->n, keys, factor,
                           b->w.out_rows, mean);
        return;
    }
    for (int64_t l = 0; l < lanes->n; l++)
        for (int64_t j = 0; j < keys; j++) {
            R x = b->w.s[j * b->padded + l] * factor[l];
            R *at = b->w.out_rows[l] + j * stride;
            *at = mean ? *at + x : x;
        }
}

/* Zeros for the keys [begin, end) of the block's weights. */
static void XI(zero_weights)(const XI(block) * b, int64_t begin, int64_t end)
{
    const attn_tensor *w = &b->p->weights;
    const attn__lanes *lanes = b->w.lanes;

    for (int64_t l = 0; l < lanes->n && begin < end; l++)
        zero_row((unsigned char *)(XI(weights_row)(w, b, lanes->head[l],
                                                   lanes->i[l]) +
                                   begin * w->stride[3]),
                 end - begin, w->stride[3], sizeof(R));
}

/*
 * Rows whose sum is NaN, infinite or 0: their weights are NaN where visible,
 * but still exactly 0 where hidden. Done here, and factor taken as 1.
 */
static void XI(odd_weights)(XI(block) * b, attn__tile_state state, int64_t keys)
{
    for (int64_t l = 0; l < b->w.lanes->n; l++) {
        R f = b->w.l[l];
        if (f - f == K(0.0))
            continue;
        for (int64_t j = 0; j < keys; j++) {
            R *x = &b->w.s[j * b->padded + l];
            bool hidden =
                state == ATTN__TILE_MIXED && !XI(is_visible)(b->w.bits, j, l);
            *x = hidden ? K(0.0) : *x * f;
        }
    }
}

/* The weights of one block, computed again from Q, K and the row's maximum and
 * sum, tile by tile. */
static void XI(weights_block)(const run *r, XI(block) * b)
{
    const attn__sdpa *p = b->p;
    XI(tiles) tiles = XI(cut_keys)(b);
    int64_t count = tiles.run[0].count + tiles.run[1].count;
    int64_t written = 0; /* keys below have their weights */
    R over_heads = K(1.0) / (R)p->heads;
    bool odd, any_odd = false;

    XI(pack_queries)(b);
    for (int64_t l = 0; l < b->padded; l++) {
        b->w.m[l] = l < b->w.lanes->n ? XI(stats_at)(r, b, l)[0] : K(0.0);
        b->w.l[l] = l < b->w.lanes->n ? XI(stats_at)(r, b, l)[1] : K(0.0);
        odd = b->w.l[l] - b->w.l[l] != K(0.0);
        any_odd |= odd;
        b->w.factor[l] = odd ? K(1.0) : b->w.l[l];
        b->w.alpha[l] = b->w.factor[l] * over_heads;
    }
    for (int64_t index = 0; index < count; index++) {
        int64_t keys;
        int64_t key = XI(tile_keys)(&tiles, index, &keys);
        attn__tile_state state = XI(masked_scores)(b, key, keys);
        if (state == ATTN__TILE_EMPTY)
            continue;
        b->kernels->exp(b->w.s, b->padded, keys, b->padded, b->w.m, b->mode);
        if (any_odd)
            XI(odd_weights)(b, state, keys);
        if (p->wants_weights) {
            XI(zero_weights)(b, written, key);
            XI(write_weights)(b, &p->weights, false, key, keys, b->w.factor);
        }
        if (p->wants_mean)
            XI(write_weights)(b, &p->weights_mean, true, key, keys, b->w.alpha);
        written = key + keys;
    }
    if (p->wants_weights)
        XI(zero_weights)(b, written, p->kv_len);
}

/* The mean over heads is summed by one task, in the order of the heads. */
static void XI(weights_task)(void *data, int64_t index, int32_t worker)
{
    const run *r = data;
    const attn__sdpa *p = r->p;
    task t = find_task(r, index);
    attn__blas_guard guard;
    XI(block) b;

    if (t.split != 0)
        return;
    guard = attn__blas_enter();
    if (!p->wants_mean) {
        b = XI(make_block)(r, &t, worker);
        XI(weights_block)(r, &b);
    } else if (t.g == 0 && t.block % t.c.head_blocks == 0) {
        int64_t first_i = t.block / t.c.head_blocks * t.c.queries;
        int64_t end_i = MIN(first_i + t.c.queries, t.s.q_len);
        zero_rows(&p->weights_mean, t.s.b, first_i, end_i);
        for (t.g = 0; t.g < p->kv_heads; t.g++)
            for (int64_t h = 0; h < t.c.head_blocks; h++) {
                task part = t;
                part.block += h;
                b = XI(make_block)(r, &part, worker);
                XI(weights_block)(r, &b);
            }
    }
    attn__blas_leave(guard);
}
