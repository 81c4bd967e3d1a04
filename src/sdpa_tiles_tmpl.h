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

static void XI(scores)(XI(block) * b, int64_t key, int64_t keys)
{
    int64_t width = b->p->width, ld;
    const R *k =
        XI(rows_for_gemm)(b, &b->k, width, key, keys, b->w.k_copy, &ld);

    (void)XI(product_of_rows)(b, k, ld, keys, width, b->w.qt, b->w.s);
}

/* The scores that the loop over rows has, in the layout of a tile: the weights
 * are computed again from the same numbers. */
static void XI(scores_from_rows)(XI(block) * b, int64_t key, int64_t keys)
{
    int64_t ld = XI(row_ld)(keys);

    XI(scores_by_rows)(b, key, keys);
    for (int64_t j = 0; j < keys; j++)
        for (int64_t l = 0; l < b->padded; l++)
            b->w.s[j * b->padded + l] =
                l < b->w.lanes->n ? b->w.s_rows[l * ld + j] : K(0.0);
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
        b->kernels->cap(b->w.s, keys * b->padded, b->cap_in, b->cap_out);
}

/* What is added to the scores of a tile. */
static void XI(add_to_tile)(XI(block) * b, int64_t key, int64_t keys)
{
    const attn__sdpa *p = b->p;

    if (b->w.slope) {
        for (int64_t l = 0; l < b->padded; l++)
            b->w.distance[l] =
                l < b->w.lanes->n ? XI(distance)(b, l, key) : K(0.0);
        b->kernels->alibi(b->w.s, b->padded, keys, b->padded, b->w.slope,
                          b->w.distance);
    }
    if (p->visibility.num_add > 0)
        (void)XI(add_masks)(b->w.s, b->padded, keys, b->padded, &p->visibility,
                            &b->t->s, b->w.lanes, key, b->w.gather);
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
    return state == ATTN__TILE_MIXED ? b->w.bits->by_key[0] : NULL;
}

static void XI(add_values)(XI(block) * b, attn__tile_state state, int64_t key,
                           int64_t keys, bool first)
{
    const attn__sdpa *p = b->p;
    int64_t ld;
    bool clean = b->careful && state == ATTN__TILE_MIXED;
    const R *v = XI(values_of_tile)(b, key, keys, clean, &ld);

    (void)XI(gemm)(&p->blas, true, p->v_width, b->padded, keys, v, ld, b->w.s,
                   b->padded, !first, b->w.ot, b->padded);
    if (clean)
        (void)XI(add_nonfinite)(b, key, keys, b->w.s, b->padded, 1, b->w.ot,
                                b->padded, 1);
}

/* Tiles [begin, end) of the block: afterwards ot, m, l and seen hold the
 * result, not yet divided by the sum. */
static void XI(attend)(XI(block) * b, const XI(tiles) * tiles, int64_t begin,
                       int64_t end)
{
    bool first = true;

    for (int64_t index = begin; index < end; index++) {
        int64_t keys;
        int64_t key = XI(tile_keys)(tiles, index, &keys);
        attn__tile_state state =
            attn__tile_trimmed(b->w.bits, &b->p->visibility, &b->t->s,
                               b->w.lanes, &key, &keys, R_DTYPE);
        bool moved;
        if (state == ATTN__TILE_EMPTY)
            continue;
        XI(tile_scores)(b, key, keys);
        moved = b->kernels->softmax(b->w.s, b->padded, keys, b->padded, b->w.m,
                                    b->w.l, b->w.alpha, b->unit,
                                    XI(hidden)(b, state), b->w.moments);
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
