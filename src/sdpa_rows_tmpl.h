/*
 * Template of the loop over tiles for few queries (at most MAX_ROWS lanes):
 * decoding. A product with one to eight rows is bound by the memory that K and
 * V are read from, and none of the CBLAS calls that could do it reads well (see
 * MAX_ROWS), so these are dot products and sums of rows written out; a row of
 * scores is a query, and its keys are the vector. Needs sdpa_tmpl.h before it.
 *
 * A partial result ends up transposed, as that of the other loop, so that all
 * that follows is the same.
 */

/* Elements between two rows of scores. */
static int64_t XI(row_ld)(int64_t keys)
{
    return attn__round_up(keys, lane_step(R_DTYPE));
}

/* Keys of a tile: many, as its rows are read as several runs (see kernels);
 * those of other loops where K or V must be copied. */
static int64_t XI(row_tile)(const XI(block) * b)
{
    return XI(has_rows)(&b->p->k) && XI(has_rows)(&b->p->v) ? ROW_TILE
                                                            : b->p->tile.keys;
}

/* Addresses of copied rows. */
static void XI(point_to_copy)(const R *copy, int64_t ld, int64_t keys,
                              const void **rows)
{
    for (int64_t j = 0; j < keys; j++)
        rows[j] = copy + j * ld;
}

/* Addresses of the rows [key, key + keys), `step` entries apart. */
static void XI(point_to_keys)(const key_rows *k, int64_t key, int64_t keys,
                              const void **rows, int64_t step)
{
    for (int64_t j = 0; j < keys;) {
        int64_t n;
        const unsigned char *from = key_row(k, key + j, keys - j, &n);
        for (; n > 0; n--, j++, from += k->row)
            rows[j * step] = from;
    }
}

/* The same for K or V that may have to be copied; returns how the rows are
 * stored. */
static int XI(point_to_rows)(const XI(block) * b, const attn_tensor *tensor,
                             const key_rows *k, int64_t key, int64_t keys,
                             R *copy, const void **rows)
{
    const R *copied;
    int64_t ld;

    if (XI(has_rows)(tensor)) {
        (void)XI(point_to_keys)(k, key, keys, rows, 1);
        return b->storage;
    }
    copied = XI(rows_for_gemm)(b, k, tensor->shape[3], key, keys, copy, &ld);
    (void)XI(point_to_copy)(copied, ld, keys, rows);
    return ATTN__STORED_SAME;
}

/* Behind the addresses of `count` rows those of [key, key + keys) of K or V,
 * which are read next, in the order of runs; if they are few, or will be
 * copied, the last row. Few rows need none: of 16 keys, 5 % of the time. */
static void XI(point_ahead)(const XI(block) * b, const attn_tensor *tensor,
                            const key_rows *k, int64_t key, int64_t keys,
                            int64_t count, const void **rows)
{
    const void **ahead = rows + count;
    int64_t runs = b->kernels->runs;

    if (count < ATTN__AHEAD_ROWS)
        return;
    if (keys < ATTN__AHEAD_ROWS || !XI(has_rows)(tensor)) {
        for (int64_t i = 0; i < ATTN__AHEAD_ROWS; i++)
            ahead[i] = rows[count - 1];
        return;
    }
    for (int64_t a = 0; a < runs; a++)
        (void)XI(point_to_keys)(k, key + a * (keys / runs),
                                ATTN__AHEAD_ROWS / runs, ahead + a, runs);
}

static void XI(scores_by_rows)(XI(block) * b, int64_t key, int64_t keys)
{
    const attn__sdpa *p = b->p;
    int storage = XI(point_to_rows)(b, &p->k, &b->k, key, keys, b->w->k_copy,
                                    b->w->k_rows);

    (void)XI(point_ahead)(b, &p->v, &b->v, key, keys, keys, b->w->k_rows);
    b->kernels->dots[storage](b->w->q_rows,
                              attn__round_up(p->width, lane_step(R_DTYPE)),
                              b->slot.lanes->n, b->w->k_rows, keys, p->width,
                              b->w->s_rows, XI(row_ld)(keys));
}

static void XI(add_values_by_rows)(XI(block) * b, attn__tile_state state,
                                   int64_t key, int64_t keys)
{
    const attn__sdpa *p = b->p;
    int64_t s_ld = XI(row_ld)(keys), n = b->slot.lanes->n;
    bool clean = b->careful && state == ATTN__TILE_MIXED;
    int storage = ATTN__STORED_SAME;

    if (clean) {
        int64_t ld;
        const R *v = XI(values_of_tile)(b, key, keys, true, &ld);
        (void)XI(point_to_copy)(v, ld, keys, b->w->v_rows);
    } else {
        storage = XI(point_to_rows)(b, &p->v, &b->v, key, keys, b->w->v_copy,
                                    b->w->v_rows);
    }
    (void)XI(point_ahead)(b, &p->k, &b->k, key + keys,
                          MIN(keys, b->t->s.kv_len - key - keys), keys,
                          b->w->v_rows);
    /* A sum for the tile first: added to what thousands of keys have summed up
     * to, each product would be rounded like the whole. */
    memset(b->w->o_tile, 0, (size_t)(n * p->v_width) * sizeof(R));
    b->kernels->add_rows_of[storage](b->w->o_tile, p->v_width, n, b->w->s_rows,
                                     s_ld, b->w->v_rows, keys, p->v_width);
    if (clean)
        (void)XI(add_nonfinite)(b, key, keys, b->w->s_rows, 1, s_ld,
                                b->w->o_tile, 1, p->v_width);
    for (int64_t a = 0; a < n * p->v_width; a++)
        b->w->o_rows[a] += b->w->o_tile[a];
}

/* What comes between the product and the masks. */
static void XI(alter_rows)(XI(block) * b, int64_t key, int64_t keys)
{
    int64_t ld = XI(row_ld)(keys), n = b->slot.lanes->n;

    if (b->cap_in > K(0.0))
        b->kernels->cap(b->w->s_rows, n * ld, b->cap_in, b->cap_out);
    for (int64_t l = 0; b->slot.slope && l < n; l++)
        b->kernels->alibi_row(b->w->s_rows + l * ld, keys, b->slot.slope[l],
                              XI(distance)(b, l, key));
}

/* Weights in place of the scores of a tile; output so far is rescaled. */
static void XI(weigh_rows)(XI(block) * b, int64_t keys)
{
    int64_t ld = XI(row_ld)(keys), width = b->p->v_width;

    for (int64_t l = 0; l < b->slot.lanes->n; l++) {
        R moments[MOMENTS];
        R *of = b->slot.moments ? moments : NULL;
        R alpha;
        for (int64_t a = 0; of && a < MOMENTS; a++)
            of[a] = b->slot.moments[a * b->padded + l];
        alpha =
            b->kernels->row_weights(b->w->s_rows + l * ld, keys, &b->slot.m[l],
                                    &b->slot.l[l], b->unit, of);
        for (int64_t a = 0; of && a < MOMENTS; a++)
            b->slot.moments[a * b->padded + l] = of[a];
        for (int64_t e = 0; alpha != K(1.0) && e < width; e++)
            b->w->o_rows[l * width + e] *= alpha;
    }
}

/* Tiles [begin, end): as XI(attend). */
static void XI(attend_by_rows)(XI(block) * b, const XI(tiles) * tiles,
                               int64_t begin, int64_t end)
{
    const attn__sdpa *p = b->p;
    int64_t n = b->slot.lanes->n, width = p->v_width;

    for (int64_t a = 0; a < n * width; a++)
        b->w->o_rows[a] = K(0.0);
    for (int64_t index = begin; index < end; index++) {
        int64_t keys;
        int64_t key = XI(tile_keys)(tiles, index, &keys);
        attn__tile_state state =
            attn__tile_trimmed(b->w->bits, &p->visibility, &b->t->s,
                               b->slot.lanes, &key, &keys, R_DTYPE);
        if (state == ATTN__TILE_EMPTY)
            continue;
        XI(scores_by_rows)(b, key, keys);
        XI(alter_rows)(b, key, keys);
        if (state == ATTN__TILE_MIXED || p->visibility.num_add > 0)
            (void)XI(mask_rows_of)(b->w->s_rows, XI(row_ld)(keys), keys,
                                   b->w->bits, &p->visibility, &b->t->s,
                                   b->slot.lanes, key, b->w->gather);
        XI(weigh_rows)(b, keys);
        XI(add_values_by_rows)(b, state, key, keys);
        XI(note_seen)(b, state, keys);
    }
    for (int64_t e = 0; !b->in_rows && e < width; e++)
        for (int64_t l = 0; l < b->padded; l++)
            b->slot.ot[e * b->padded + l] =
                l < n ? b->w->o_rows[l * width + e] : K(0.0);
}
