/*
 * Template of the tasks: blocks computed, partial results merged, weights
 * computed again for those who ask. Needs the other templates of the engine.
 */

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

static void XI(compute_block)(XI(block) * b, const XI(tiles) * tiles,
                              int64_t begin, int64_t end)
{
    XI(reset)(b);
    if (b->by_rows)
        XI(attend_by_rows)(b, tiles, begin, end);
    else
        XI(attend)(b, tiles, begin, end);
}

/* Is there output that is not finite, though some keys may be hidden? */
static bool XI(may_have_leaked)(const XI(block) * b)
{
    const attn__visibility *v = &b->p->visibility;

    return (b->w.lanes->bounded || v->num_masks > 0) &&
           b->kernels->nonfinite(b->w.ot, b->padded, b->p->v_width, b->padded);
}

static void XI(compute_task)(void *data, int64_t index, int32_t worker)
{
    const run *r = data;
    task t = find_task(r, r->wave_start + index);
    attn__blas_guard guard = attn__blas_enter();
    XI(block) b = XI(make_block)(r, &t, worker);
    XI(tiles)
    tiles = XI(cut_keys)(&b, b.by_rows ? XI(row_tile)(&b) : r->p->tile.keys);
    int64_t count = tiles.run[0].count + tiles.run[1].count;
    int64_t begin, end;
    R *seen = NULL;

    if (t.c.splits > 1)
        XI(use_partial)(r, &b, t.number, &seen);
    XI(pack_queries)(&b);
    begin = count * t.split / t.c.splits;
    end = count * (t.split + 1) / t.c.splits;
    XI(compute_block)(&b, &tiles, begin, end);
    if (XI(may_have_leaked)(&b)) {
        b.careful = true;
        XI(compute_block)(&b, &tiles, begin, end);
    }
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
    XI(reset)(&b);
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
            R f = b.unit > K(0.0) ? R_EXP2(above * b.unit) : R_EXP(above);
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
    XI(tiles) tiles = XI(cut_keys)(b, p->tile.keys);
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
        attn__tile_state state = XI(tile_scores)(b, key, keys);
        if (state == ATTN__TILE_EMPTY)
            continue;
        b->kernels->exp(b->w.s, b->padded, keys, b->padded, b->w.m, b->unit,
                        XI(hidden)(b, state));
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
        int64_t first_i = block_begin(&t.c, &t.s, t.block);
        int64_t end_i = block_begin(&t.c, &t.s, t.block + t.c.head_blocks);
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
