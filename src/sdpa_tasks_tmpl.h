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

    b->slot.ot = at;
    b->slot.m = at + b->p->v_width * b->padded;
    b->slot.l = b->slot.m + b->padded;
    *seen = b->slot.l + b->padded;
    if (b->slot.moments)
        b->slot.moments = *seen + b->padded;
}

static void XI(compute_block)(XI(block) * b, const XI(tiles) * tiles,
                              int64_t begin, int64_t end)
{
    if (b->by_rows) {
        XI(reset)(b);
        XI(attend_by_rows)(b, tiles, begin, end);
    } else {
        XI(attend)(b, tiles, begin, end);
    }
}

/* Is there output that is not finite, though some keys may be hidden? */
static bool XI(may_have_leaked)(const XI(block) * b)
{
    const attn__visibility *v = &b->p->visibility;
    int64_t width = b->p->v_width;

    if (!b->slot.lanes->bounded && !attn__has_elements(v))
        return false;
    return b->in_rows
               ? b->kernels->nonfinite(b->w->o_rows, width, b->slot.lanes->n,
                                       width)
               : b->kernels->nonfinite(b->slot.ot, b->padded, width, b->padded);
}

/* A block of a task, ready for its keys. */
static XI(block) XI(begin_block)(const run *r, const task *t, int32_t worker,
                                 XI(tiles) * tiles)
{
    XI(block) b = XI(make_block)(r, t, worker, false);

    b.whole_tiles = has_strips(r->p) && band_of(&r->p->visibility, &t->s) &&
                    b.slot.lanes->low == t->s.kv_begin;
    *tiles = XI(cut_keys)(&b, b.by_rows ? XI(row_tile)(&b) : r->p->tile.keys);
    return b;
}

static int64_t XI(count_tiles)(const XI(tiles) * tiles)
{
    return tiles->run[0].count + tiles->run[1].count;
}

/* Writes the result of a block, which is done once more if hidden values have
 * reached it. */
static void XI(finish_block)(const run *r, XI(block) * b,
                             const XI(tiles) * tiles)
{
    if (XI(may_have_leaked)(b)) {
        b->careful = true;
        XI(compute_block)(b, tiles, 0, XI(count_tiles)(tiles));
    }
    XI(write_block)(r, b);
}

static void XI(compute_alone)(const run *r, const task *t, int32_t worker)
{
    XI(tiles) tiles;
    XI(block) b = XI(begin_block)(r, t, worker, &tiles);

    b.in_rows = b.by_rows;
    XI(pack_queries)(&b);
    XI(compute_block)(&b, &tiles, 0, XI(count_tiles)(&tiles));
    XI(finish_block)(r, &b, &tiles);
}

/* The blocks of a task: those of a few queries alone, then all others. */
static void XI(compute_strip)(const run *r, const task *t, int32_t worker)
{
    task of[MAX_STRIP];
    XI(block) blocks[MAX_STRIP];
    XI(tiles) tiles[MAX_STRIP];
    int64_t n = 0;
    bool agree = true;

    for (int64_t block = t->block; block < t->end_block; block++) {
        XI(block) *b = &blocks[n];
        of[n] = *t;
        of[n].block = block;
        of[n].slot = n;
        *b = XI(begin_block)(r, &of[n], worker, &tiles[n]);
        b->in_rows = b->by_rows;
        XI(pack_queries)(b);
        if (b->by_rows) {
            XI(compute_block)(b, &tiles[n], 0, XI(count_tiles)(&tiles[n]));
            XI(finish_block)(r, b, &tiles[n]);
            continue;
        }
        agree = agree && XI(tiles_agree)(&tiles[0], &tiles[n]);
        n++;
    }
    if (agree && n > 1)
        XI(attend_together)(blocks, tiles, n);
    for (int64_t a = 0; a < n; a++) {
        if (!agree || n == 1)
            (void)XI(compute_block)(&blocks[a], &tiles[a], 0,
                                    XI(count_tiles)(&tiles[a]));
        XI(finish_block)(r, &blocks[a], &tiles[a]);
    }
}

/* Part of the keys of a block, whose result is left to be merged. */
static void XI(compute_split)(const run *r, const task *t, int32_t worker)
{
    XI(tiles) tiles;
    XI(block) b = XI(begin_block)(r, t, worker, &tiles);
    int64_t count = XI(count_tiles)(&tiles);
    int64_t begin = count * t->split / t->c.splits;
    int64_t end = count * (t->split + 1) / t->c.splits;
    R *seen;

    XI(use_partial)(r, &b, t->number, &seen);
    XI(pack_queries)(&b);
    XI(compute_block)(&b, &tiles, begin, end);
    if (XI(may_have_leaked)(&b)) {
        b.careful = true;
        XI(compute_block)(&b, &tiles, begin, end);
    }
    for (int64_t l = 0; l < b.padded; l++)
        seen[l] = b.slot.seen[l];
}

static void XI(compute_task)(void *data, int64_t index, int32_t worker)
{
    const run *r = data;
    task t = find_task(r, r->wave_start + index);
    attn__blas_guard guard = attn__blas_enter();

    if (t.c.splits > 1)
        XI(compute_split)(r, &t, worker);
    else if (t.end_block - t.block == 1)
        XI(compute_alone)(r, &t, worker);
    else
        XI(compute_strip)(r, &t, worker);
    attn__blas_leave(guard);
}

/*
 * Partial results over disjoint keys, in the order of the keys:
 *   M = max m_k,  f_k = e^(m_k - M),  l = sum f_k l_k,  O = sum f_k O_k
 */
/* The moments of a part, f times its weights, whose scores are relative to a
 * maximum that is `above` its own more than the final one. */
static void XI(merge_moments)(const XI(block) * b, const XI(block) * part,
                              int64_t l, R f, R above)
{
    R *to = b->slot.moments + l;
    const R *from = part->slot.moments + l;

    if (f == K(0.0))
        return;
    to[0] = MAX(to[0], f * from[0]);
    to[b->padded] += f * f * from[b->padded];
    to[2 * b->padded] += f * (from[2 * b->padded] + above * part->slot.l[l]);
}

static void XI(merge_task)(void *data, int64_t index, int32_t worker)
{
    const run *r = data;
    task t = find_task(r, r->wave_start + index);
    XI(block) b, part;
    int64_t lanes, width = r->p->v_width;
    R *seen;

    if (t.c.splits == 1 || t.split != 0)
        return;
    b = XI(make_block)(r, &t, worker, false);
    part = b;
    lanes = b.padded;
    XI(reset)(&b);
    for (int64_t e = 0; e < width * lanes; e++)
        b.slot.ot[e] = K(0.0);
    for (int64_t k = 0; k < t.c.splits; k++) {
        XI(use_partial)(r, &part, t.number + k, &seen);
        for (int64_t l = 0; l < lanes; l++)
            if (part.slot.m[l] > b.slot.m[l])
                b.slot.m[l] = part.slot.m[l];
    }
    for (int64_t k = 0; k < t.c.splits; k++) {
        XI(use_partial)(r, &part, t.number + k, &seen);
        for (int64_t l = 0; l < lanes; l++) {
            R above = part.slot.m[l] - b.slot.m[l];
            R f = b.unit > K(0.0) ? R_EXP2(above * b.unit) : R_EXP(above);
            /* Nothing above -inf in this part: it adds nothing. NaN shows in
             * the sum. */
            b.w->alpha[l] = part.slot.m[l] == R_NEG_INF ? K(0.0) : f;
            if (part.slot.m[l] == R_NEG_INF && part.slot.l[l] != K(0.0))
                b.w->alpha[l] = K(1.0);
            b.slot.l[l] += b.w->alpha[l] * part.slot.l[l];
            if (b.slot.moments)
                (void)XI(merge_moments)(&b, &part, l, b.w->alpha[l], above);
            b.slot.seen[l] |= seen[l] != K(0.0);
        }
        for (int64_t e = 0; e < width; e++)
            for (int64_t l = 0; l < lanes; l++)
                b.slot.ot[e * lanes + l] +=
                    b.w->alpha[l] * part.slot.ot[e * lanes + l];
    }
    XI(write_block)(r, &b);
}

/* --------------------------------------------------------------- Weights -- */

/* The row of a lane in an output by scores, at key 0. */
static R *XI(score_row)(const attn_tensor *tensor, const XI(block) * b,
                        int64_t head, int64_t i)
{
    return (R *)tensor->data + b->t->s.b * tensor->stride[0] +
           head * tensor->stride[1] + i * tensor->stride[2];
}

/* Adds or stores a tile, times factor, to the rows of a tensor. */
static void XI(write_tile)(XI(block) * b, const attn_tensor *tensor, bool mean,
                           int64_t key, int64_t keys, const R *factor)
{
    const attn__lanes *lanes = b->slot.lanes;
    int64_t stride = tensor->stride[3];

    for (int64_t l = 0; l < lanes->n; l++)
        b->w->out_rows[l] =
            XI(score_row)(tensor, b, mean ? 0 : lanes->head[l], lanes->i[l]) +
            key * stride;
    if (stride == 1 || tensor->shape[3] == 1) {
        b->kernels->unpack(b->w->s, b->padded, lanes->n, keys, factor,
                           b->w->out_rows, mean);
        return;
    }
    for (int64_t l = 0; l < lanes->n; l++)
        for (int64_t j = 0; j < keys; j++) {
            R x = b->w->s[j * b->padded + l] * factor[l];
            R *at = b->w->out_rows[l] + j * stride;
            *at = mean ? *at + x : x;
        }
}

/* A number for the keys [begin, end) of the block's rows. */
static void XI(fill_keys)(const XI(block) * b, attn__extra extra, int64_t begin,
                          int64_t end, R x)
{
    const attn_tensor *t = &b->p->extra[extra];
    const attn__lanes *lanes = b->slot.lanes;

    for (int64_t l = 0; l < lanes->n && begin < end; l++)
        (void)XI(fill_row)(XI(score_row)(t, b, lanes->head[l], lanes->i[l]) +
                               begin * t->stride[3],
                           end - begin, t->stride[3], x);
}

/*
 * Rows whose sum is NaN, infinite or 0: their weights are NaN where visible,
 * but still exactly 0 where hidden. Done here, and factor taken as 1.
 */
static void XI(odd_weights)(XI(block) * b, attn__tile_state state, int64_t keys)
{
    for (int64_t l = 0; l < b->slot.lanes->n; l++) {
        R f = b->slot.l[l];
        if (f - f == K(0.0))
            continue;
        for (int64_t j = 0; j < keys; j++) {
            R *x = &b->w->s[j * b->padded + l];
            bool hidden =
                state == ATTN__TILE_MIXED && !XI(is_visible)(b->w->bits, j, l);
            *x = hidden ? K(0.0) : *x * f;
        }
    }
}

/* Packs the queries of a block and takes their statistics: m, and 1/sum as
 * factor. Returns whether some rows are odd. */
static bool XI(take_stats)(const run *r, XI(block) * b)
{
    bool any_odd = false;

    XI(pack_queries)(b);
    for (int64_t l = 0; l < b->padded; l++) {
        bool odd;
        b->slot.m[l] = l < b->slot.lanes->n ? XI(stats_at)(r, b, l)[0] : K(0.0);
        b->slot.l[l] = l < b->slot.lanes->n ? XI(stats_at)(r, b, l)[1] : K(0.0);
        odd = b->slot.l[l] - b->slot.l[l] != K(0.0);
        any_odd |= odd;
        b->w->factor[l] = odd ? K(1.0) : b->slot.l[l];
    }
    return any_odd;
}

/* Weights of a tile, still to be multiplied by factor; EMPTY: none. */
static attn__tile_state XI(tile_weights)(XI(block) * b, int64_t key,
                                         int64_t keys, bool any_odd)
{
    attn__tile_state state =
        attn__tile_visibility(b->w->bits, &b->p->visibility, &b->t->s,
                              b->slot.lanes, key, keys, R_DTYPE);

    if (state == ATTN__TILE_EMPTY)
        return state;
    XI(tile_scores)(b, key, keys);
    b->kernels->exp(b->w->s, b->padded, keys, b->padded, b->slot.m, b->unit,
                    XI(hidden)(b, state));
    if (any_odd)
        XI(odd_weights)(b, state, keys);
    return state;
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
    bool any_odd = XI(take_stats)(r, b);

    for (int64_t l = 0; l < b->padded; l++)
        b->w->alpha[l] = b->w->factor[l] * over_heads;
    for (int64_t index = 0; index < count; index++) {
        int64_t keys;
        int64_t key = XI(tile_keys)(&tiles, index, &keys);
        if (XI(tile_weights)(b, key, keys, any_odd) == ATTN__TILE_EMPTY)
            continue;
        if (p->wants[ATTN__WEIGHTS]) {
            XI(fill_keys)(b, ATTN__WEIGHTS, written, key, K(0.0));
            (void)XI(write_tile)(b, &p->extra[ATTN__WEIGHTS], false, key, keys,
                                 b->w->factor);
        }
        if (p->wants[ATTN__WEIGHTS_MEAN])
            (void)XI(write_tile)(b, &p->extra[ATTN__WEIGHTS_MEAN], true, key,
                                 keys, b->w->alpha);
        written = key + keys;
    }
    if (p->wants[ATTN__WEIGHTS])
        XI(fill_keys)(b, ATTN__WEIGHTS, written, p->kv_len, K(0.0));
}

/* The mean over heads of the queries of a block, in the order of the heads. */
static void XI(mean_weights)(const run *r, const task *t, int32_t worker)
{
    const attn__sdpa *p = r->p;
    int64_t first_i = block_begin(&t->c, &t->s, t->block);
    int64_t end_i = block_begin(&t->c, &t->s, t->block + t->c.head_blocks);
    task part = *t;

    (void)XI(fill_rows)(&p->extra[ATTN__WEIGHTS_MEAN], t->s.b, first_i, end_i,
                        K(0.0));
    for (part.g = 0; part.g < p->kv_heads; part.g++)
        for (int64_t h = 0; h < t->c.head_blocks; h++) {
            XI(block) b;
            part.block = t->block + h;
            b = XI(make_block)(r, &part, worker, false);
            XI(weights_block)(r, &b);
        }
}

/* The mean over heads is one task's, that of the first head. */
static void XI(weights_task)(void *data, int64_t index, int32_t worker)
{
    const run *r = data;
    const attn__sdpa *p = r->p;
    task t = find_task(r, index);
    attn__blas_guard guard;

    if (t.split != 0)
        return;
    guard = attn__blas_enter();
    for (; t.block < t.end_block; t.block++) {
        if (!p->wants[ATTN__WEIGHTS_MEAN]) {
            XI(block) b = XI(make_block)(r, &t, worker, false);
            XI(weights_block)(r, &b);
        } else if (t.g == 0 && t.block % t.c.head_blocks == 0) {
            XI(mean_weights)(r, &t, worker);
        }
    }
    attn__blas_leave(guard);
}

/* ---------------------------------------------------------------- Scores -- */

/* -inf where a key is hidden. */
static void XI(hide_in_tile)(XI(block) * b, attn__tile_state state,
                             int64_t keys)
{
    for (int64_t j = 0; state != ATTN__TILE_FULL && j < keys; j++)
        for (int64_t l = 0; l < b->slot.lanes->n; l++)
            if (state == ATTN__TILE_EMPTY || !XI(is_visible)(b->w->bits, j, l))
                b->w->s[j * b->padded + l] = R_NEG_INF;
}

/* The scores of a tile at the stages that are wanted. */
static void XI(scores_of_tile)(XI(block) * b, int64_t key, int64_t keys)
{
    const attn__sdpa *p = b->p;

    XI(products)(b, key, keys);
    if (p->wants[ATTN__SCORES_RAW])
        (void)XI(write_tile)(b, &p->extra[ATTN__SCORES_RAW], false, key, keys,
                             b->w->factor);
    XI(cap_tile)(b, keys);
    if (p->wants[ATTN__SCORES_CAPPED])
        (void)XI(write_tile)(b, &p->extra[ATTN__SCORES_CAPPED], false, key,
                             keys, b->w->factor);
    if (!p->wants[ATTN__SCORES])
        return;
    XI(add_to_tile)(b, key, keys);
    (void)XI(hide_in_tile)(b,
                           attn__tile_visibility(b->w->bits, &p->visibility,
                                                 &b->t->s, b->slot.lanes, key,
                                                 keys, R_DTYPE),
                           keys);
    (void)XI(write_tile)(b, &p->extra[ATTN__SCORES], false, key, keys,
                         b->w->factor);
}

/* All keys that are there, visible or not: the first two stages know no mask.
 * Nothing is left out for the last one alone, for which it would pay. */
static void XI(scores_block)(const run *r, const task *t, int32_t worker)
{
    static const attn__extra stages[] = {ATTN__SCORES_RAW, ATTN__SCORES_CAPPED,
                                         ATTN__SCORES};
    const attn__sdpa *p = r->p;
    XI(block) b = XI(make_block)(r, t, worker, true);

    XI(pack_queries)(&b);
    for (int64_t l = 0; l < b.padded; l++)
        b.w->factor[l] = K(1.0);
    for (int a = 0; a < 3; a++)
        if (p->wants[stages[a]]) {
            R absent = stages[a] == ATTN__SCORES ? R_NEG_INF : K(0.0);
            XI(fill_keys)(&b, stages[a], 0, t->s.kv_begin, absent);
            XI(fill_keys)(&b, stages[a], t->s.kv_len, p->kv_len, absent);
        }
    for (int64_t key = t->s.kv_begin; key < t->s.kv_len; key += p->tile.keys)
        XI(scores_of_tile)(&b, key, MIN(p->tile.keys, t->s.kv_len - key));
}

static void XI(scores_task)(void *data, int64_t index, int32_t worker)
{
    const run *r = data;
    task t = find_task(r, index);
    attn__blas_guard guard;

    if (t.split != 0)
        return;
    guard = attn__blas_enter();
    for (; t.block < t.end_block; t.block++)
        XI(scores_block)(r, &t, worker);
    attn__blas_leave(guard);
}

/* ----------------------------------------------------------- Sums by key -- */

/* Adds a tile's weights, times factor, to the sums of its keys. */
static void XI(sum_tile)(XI(block) * b, int64_t key, int64_t keys)
{
    const attn_tensor *t = &b->p->extra[ATTN__KEY_SUMS];
    const attn__lanes *lanes = b->slot.lanes;

    for (int64_t j = 0; j < keys; j++) {
        R *at =
            (R *)t->data + b->t->s.b * t->stride[0] + (key + j) * t->stride[3];
        for (int64_t l = 0; l < lanes->n; l++)
            at[lanes->head[l] * t->stride[1]] +=
                b->w->s[j * b->padded + l] * b->w->factor[l];
    }
}

/* The keys [begin, end) of one key/value head: all blocks, in their order. */
static void XI(key_sums)(const run *r, task *t, int64_t begin, int64_t end,
                         int32_t worker)
{
    const attn_tensor *sums = &r->p->extra[ATTN__KEY_SUMS];

    for (int64_t h = 0; h < r->p->group; h++)
        (void)XI(fill_row)((R *)sums->data + t->s.b * sums->stride[0] +
                               (t->g * r->p->group + h) * sums->stride[1] +
                               begin * sums->stride[3],
                           end - begin, sums->stride[3], K(0.0));
    for (t->block = 0; t->block < t->c.blocks; t->block++) {
        XI(block) b = XI(make_block)(r, t, worker, false);
        XI(tiles) tiles;
        bool any_odd = XI(take_stats)(r, &b);
        XI(clip_keys)(&b, begin, end);
        tiles = XI(cut_keys)(&b, r->p->tile.keys);
        for (int64_t a = 0; a < tiles.run[0].count + tiles.run[1].count; a++) {
            int64_t keys;
            int64_t key = XI(tile_keys)(&tiles, a, &keys);
            if (XI(tile_weights)(&b, key, keys, any_odd) != ATTN__TILE_EMPTY)
                XI(sum_tile)(&b, key, keys);
        }
    }
}

static void XI(key_sums_task)(void *data, int64_t index, int32_t worker)
{
    const run *r = data;
    const attn__sdpa *p = r->p;
    int64_t part = index % key_sum_parts(p);
    int64_t head = index / key_sum_parts(p);
    task t = {0};
    attn__blas_guard guard = attn__blas_enter();

    t.s = attn__sdpa_sequence(p, head / p->kv_heads, &t.q_row, &t.kv_row);
    t.c = r->cuts[t.s.b];
    t.g = head % p->kv_heads;
    (void)XI(key_sums)(r, &t, part * SUM_KEYS,
                       MIN((part + 1) * SUM_KEYS, p->kv_len), worker);
    attn__blas_leave(guard);
}
