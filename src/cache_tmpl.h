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

/* x, of r->k->dtype, into the slot, turned as the key at this position. */
static void XI(turn_into)(const append_run *r, const unsigned char *x,
                          unsigned char *slot, int64_t position)
{
    const attn_kv_cache *c = r->cache;
    int64_t x_step = r->k->stride[3] * (int64_t)attn__dtype_bytes(r->k->dtype);
    int64_t y_step = (int64_t)attn__dtype_bytes(c->dtype);
    bool halves = c->rotary_style == ATTN_ROTARY_HALVES;
    int64_t n = c->cos_table.shape[3];
    int64_t step = halves ? 1 : 2, gap = halves ? n : 1;
    R low[PART], high[PART], cosines[PART], sines[PART];

    for (int64_t k = 0; k < n; k += PART) {
        int64_t part = MIN(PART, n - k), d = k * step;
        r->k_to_real(x + d * x_step, step * r->k->stride[3], low, 1, part);
        r->k_to_real(x + (d + gap) * x_step, step * r->k->stride[3], high, 1,
                     part);
        XI(turn_halves)
        (low, high, XI(table_part)(&c->cos_table, position, k, part, cosines),
         XI(table_part)(&c->sin_table, position, k, part, sines), K(1.0), part);
        r->real_to_cache(low, 1, slot + d * y_step, step, part);
        r->real_to_cache(high, 1, slot + (d + gap) * y_step, step, part);
    }
    /* Components from R on. */
    r->to_cache(x + 2 * n * x_step, r->k->stride[3], slot + 2 * n * y_step, 1,
                c->width - 2 * n);
}
