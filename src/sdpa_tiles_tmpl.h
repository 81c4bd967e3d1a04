/*
 * Template of the loop over tiles for many queries: S = K Qt and Ot += V^T S
 * through GEMM. Needs sdpa_tmpl.h and sdpa_rows_tmpl.h before it.
 */

/* Heads wider than 128 in parts of up to 96: a product sums in one chain, and
 * the error of the scores is most of the result's (width 256: 0.7 of it). */
static int64_t XI(depth_of_product)(int64_t width)
{
    int64_t parts = width > 128 ? attn__ceil_div(width, 96) : 1;

    return attn__round_up(attn__ceil_div(MAX(width, 1), parts), 8);
}

/* s (keys x lanes) = rows packed, from rows of K or V and a packed tensor. */
static void XI(product_of_rows)(const XI(block) * b, const R *rows, int64_t ld,
                                int64_t keys, int64_t width, const R *packed,
                                R *s)
{
    int64_t depth = XI(depth_of_product)(width), d = 0;

    do {
        (void)XI(gemm)(&b->p->blas, false, keys, b->padded,
                       MIN(depth, width - d), rows + d, ld,
                       packed + d * b->padded, b->padded, d > 0, s, b->padded);
        d += depth;
    } while (d < width);
}

/* K of a tile as a product wants it. */
static const R *XI(keys_of_tile)(const XI(block) * b, int64_t key, int64_t keys,
                                 int64_t *ld)
{
    int64_t width = b->p->width;
    R *copy = b->w->k_copy;

    if (b->held)
        return XI(shared_rows)(b, &b->k, width, key, keys, copy,
                               &b->held->k_key, &b->held->k_keys, ld);
    return XI(rows_for_gemm)(b, &b->k, width, key, keys, copy, ld);
}

static void XI(scores)(XI(block) * b, int64_t key, int64_t keys)
{
    int64_t width = b->p->width, ld;
    const R *k = XI(keys_of_tile)(b, key, keys, &ld);

    (void)XI(product_of_rows)(b, k, ld, keys, width, b->slot.qt, b->w->s);
}

/* The scores that the loop over rows has, in the layout of a tile: the weights
 * are computed again from the same numbers. */
static void XI(scores_from_rows)(XI(block) * b, int64_t key, int64_t keys)
{
    int64_t ld = XI(row_ld)(keys);

    XI(scores_by_rows)(b, key, keys);
    for (int64_t j = 0; j < keys; j++)
        for (int64_t l = 0; l < b->padded; l++)
            b->w->s[j * b->padded + l] =
                l < b->slot.lanes->n ? b->w->s_rows[l * ld + j] : K(0.0);
}

/* The products of a tile, in the layout of a tile. */
static void XI(products)(XI(block) * b, int64_t key, int64_t keys)
{
    if (b->by_rows)
        XI(scores_from_rows)(b, key, keys);
    else
        XI(scores)(b, key, keys);
}

static void XI(cap_tile)(XI(block) * b, int64_t keys)
{
    if (b->cap_in > K(0.0))
        b->kernels->cap(b->w->s, keys * b->padded, b->cap_in, b->cap_out);
}

/* What is added to the scores of a tile. */
static void XI(add_to_tile)(XI(block) * b, int64_t key, int64_t keys)
{
    const attn__sdpa *p = b->p;

    if (b->slot.slope) {
        for (int64_t l = 0; l < b->padded; l++)
            b->w->distance[l] =
                l < b->slot.lanes->n ? XI(distance)(b, l, key) : K(0.0);
        b->kernels->alibi(b->w->s, b->padded, keys, b->padded, b->slot.slope,
                          b->w->distance);
    }
    if (p->visibility.num_add > 0)
        (void)XI(add_masks)(b->w->s, b->padded, keys, b->padded, &p->visibility,
                            &b->t->s, b->slot.lanes, key, b->w->gather);
}

/* Final scores of a tile but for what is hidden. */
static void XI(tile_scores)(XI(block) * b, int64_t key, int64_t keys)
{
    XI(products)(b, key, keys);
    XI(cap_tile)(b, keys);
    XI(add_to_tile)(b, key, keys);
}

/* The bits by key for the softmax of a tile. */
static const uint64_t *XI(hidden)(const XI(block) * b, attn__tile_state state)
{
    return state == ATTN__TILE_MIXED ? b->w->bits->by_key[0] : NULL;
}

static void XI(add_values)(XI(block) * b, attn__tile_state state, int64_t key,
                           int64_t keys, bool first)
{
    const attn__sdpa *p = b->p;
    int64_t ld;
    bool clean = b->careful && state == ATTN__TILE_MIXED;
    const R *v = XI(values_of_tile)(b, key, keys, clean, &ld);

    (void)XI(gemm)(&p->blas, true, p->v_width, b->padded, keys, v, ld, b->w->s,
                   b->padded, !first, b->slot.ot, b->padded);
    if (clean)
        (void)XI(add_nonfinite)(b, key, keys, b->w->s, b->padded, 1, b->slot.ot,
                                b->padded, 1);
}

/* One tile of a block, after those before it. */
static void XI(attend_tile)(XI(block) * b, int64_t key, int64_t keys)
{
    attn__tile_state state =
        attn__tile_trimmed(b->w->bits, &b->p->visibility, &b->t->s,
                           b->slot.lanes, &key, &keys, R_DTYPE);
    bool moved;

    if (state == ATTN__TILE_EMPTY)
        return;
    XI(tile_scores)(b, key, keys);
    moved = b->kernels->softmax(b->w->s, b->padded, keys, b->padded, b->slot.m,
                                b->slot.l, b->w->alpha, b->unit,
                                XI(hidden)(b, state), b->slot.moments);
    if (moved && b->any_tile)
        b->kernels->rescale(b->slot.ot, b->padded, b->p->v_width, b->padded,
                            b->w->alpha);
    XI(add_values)(b, state, key, keys, !b->any_tile);
    XI(note_seen)(b, state, keys);
    b->any_tile = true;
}

/* Before the first tile, and after the last: then ot, m, l and seen hold the
 * result, not yet divided by the sum. */
static void XI(begin_tiles)(XI(block) * b)
{
    XI(reset)(b);
    b->any_tile = false;
}

static void XI(end_tiles)(const XI(block) * b)
{
    for (int64_t a = 0; !b->any_tile && a < b->p->v_width * b->padded; a++)
        b->slot.ot[a] = K(0.0);
}

/* Tiles [begin, end) of a block. */
static void XI(attend)(XI(block) * b, const XI(tiles) * tiles, int64_t begin,
                       int64_t end)
{
    XI(held) held = {.copies = true};

    XI(begin_tiles)(b);
    if (!b->careful && is_one_block(b->t) && copies_rows(b->p, 1))
        b->held = &held;
    for (int64_t index = begin; index < end; index++) {
        held.key = XI(tile_keys)(tiles, index, &held.keys);
        XI(attend_tile)(b, held.key, held.keys);
    }
    b->held = NULL;
    XI(end_tiles)(b);
}

/* Can the tiles of two blocks be gone through together? Those of one may end
 * before those of the other do. */
static bool XI(tiles_agree)(const XI(tiles) * x, const XI(tiles) * y)
{
    return x->run[0].count == 0 && y->run[0].count == 0 &&
           x->run[1].begin == y->run[1].begin &&
           x->run[1].origin == y->run[1].origin &&
           x->run[1].size == y->run[1].size;
}

/*
 * The same of some blocks of one head whose tiles agree, each tile for all of
 * them in turn; nothing that one computes depends on the others. The last sees
 * the most keys.
 */
static void XI(attend_together)(XI(block) * blocks, const XI(tiles) * tiles,
                                int64_t n)
{
    XI(held) held = {.copies = copies_rows(blocks[0].p, n)};

    for (int64_t a = 0; a < n; a++) {
        XI(begin_tiles)(&blocks[a]);
        blocks[a].held = &held;
    }
    for (int64_t index = 0;; index++) {
        bool any = false;
        held.keys = 0;
        for (int64_t a = n - 1; a >= 0; a--) {
            int64_t key, keys;
            if (index >= tiles[a].run[1].count)
                continue;
            key = XI(tile_keys)(&tiles[a], index, &keys);
            if (keys > held.keys) {
                held.key = key;
                held.keys = keys;
            }
            XI(attend_tile)(&blocks[a], key, keys);
            any = true;
        }
        if (!any)
            break;
    }
    for (int64_t a = 0; a < n; a++) {
        XI(end_tiles)(&blocks[a]);
        blocks[a].held = NULL;
    }
}
