/*
 * Template of the rotation of a key on its way into a cache; needs the real
 * vocabulary and the append_run of cache_append.c. A row goes by parts through
 * the stack: pairs apart from each other, as reals, to be turned by the very
 * loop of attn_rotary; so a key is what attn_rotary and attn_convert would
 * give.
 */

/* Part of a row of a table, as it lies or as a copy. */
static const R *XI(table_part)(const attn_tensor *t, int64_t position,
                               int64_t from, int64_t n, R *copy)
{
    const R *row = (const R *)t->data + position * t->stride[2];

    if (t->stride[3] == 1)
        return row + from;
    for (int64_t k = 0; k < n; k++)
        copy[k] = row[(from + k) * t->stride[3]];
    return copy;
}

/* Pairs [from, from + n) of x, of r->k->dtype, into the slot. */
static void XI(turn_part)(const append_run *r, const unsigned char *x,
                          unsigned char *slot, int64_t position, int64_t from,
                          int64_t n)
{
    const attn_kv_cache *cache = r->cache;
    int64_t sx = r->k->stride[3];
    int64_t x_bytes = sx * (int64_t)attn__dtype_bytes(r->k->dtype);
    int64_t y_bytes = (int64_t)attn__dtype_bytes(cache->dtype);
    bool halves = cache->rotary_style == ATTN_ROTARY_HALVES;
    /* Components that lie together: the first of the pairs and then the second
     * ones, or all at once. */
    int64_t runs = halves ? 2 : 1, length = halves ? n : 2 * n;
    int64_t first = halves ? from : 2 * from;
    int64_t apart = cache->cos_table.shape[3];
    R pairs[2 * PART], cosines[PART], sines[PART];
    const R *c = XI(table_part)(&cache->cos_table, position, from, n, cosines);
    const R *s = XI(table_part)(&cache->sin_table, position, from, n, sines);

    for (int64_t a = 0; a < runs; a++)
        r->k_to_real(x + (first + a * apart) * x_bytes, sx, pairs + a * n, 1,
                     length);
    if (halves)
        XI(turn_halves)(pairs, pairs + n, c, s, K(1.0), n);
    else
        XI(turn_neighbours)(pairs, c, s, K(1.0), n);
    for (int64_t a = 0; a < runs; a++)
        r->real_to_cache(pairs + a * n, 1, slot + (first + a * apart) * y_bytes,
                         1, length);
}

/* A whole row, turned as the key at this position. */
static void XI(turn_into)(const append_run *r, const unsigned char *x,
                          unsigned char *slot, int64_t position)
{
    const attn_kv_cache *cache = r->cache;
    int64_t n = cache->cos_table.shape[3], sx = r->k->stride[3];

    for (int64_t k = 0; k < n; k += PART)
        (void)XI(turn_part)(r, x, slot, position, k, MIN(PART, n - k));
    /* Components from R on. */
    r->to_cache(x + 2 * n * sx * (int64_t)attn__dtype_bytes(r->k->dtype), sx,
                slot + 2 * n * (int64_t)attn__dtype_bytes(cache->dtype), 1,
                cache->width - 2 * n);
}
