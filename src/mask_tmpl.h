/* Template of what masks do to scores; needs the real vocabulary. */

/* Score plus bias; finite numbers stay finite, as a finite score is not a
 * hidden one. */
static R XI(biased)(R x, R bias)
{
    R sum = x + bias;

    if (x < -R_MAX || x > R_MAX || bias < -R_MAX || bias > R_MAX)
        return sum;
    return sum < -R_MAX ? -R_MAX : sum > R_MAX ? R_MAX : sum;
}

/* The rows of an ADD mask for these lanes, keys adjacent: as they are, or
 * gathered. */
static void XI(mask_rows)(const attn__mask_view *m, const attn__sequence *s,
                          const attn__lanes *lanes, int64_t key, int64_t keys,
                          R *gather, const R **rows)
{
    for (int64_t l = 0; l < lanes->n; l++) {
        const unsigned char *row = mask_row(m, s, lanes, l, key);
        if (m->stride[3] == (int64_t)sizeof(R)) {
            rows[l] = (const R *)(const void *)row;
            continue;
        }
        for (int64_t j = 0; j < keys; j++)
            memcpy(&gather[l * keys + j], row + j * m->stride[3], sizeof(R));
        rows[l] = gather + l * keys;
    }
}

void XI(add_masks)(R *s, int64_t ld, int64_t keys, int64_t padded_lanes,
                   const attn__visibility *v, const attn__sequence *seq,
                   const attn__lanes *lanes, int64_t key, R *gather)
{
    const R *rows[ATTN__MAX_LANES];

    for (int32_t m = 0; m < v->num_masks; m++) {
        if (v->masks[m].kind != ATTN_MASK_ADD)
            continue;
        XI(mask_rows)(&v->masks[m], seq, lanes, key, keys, gather, rows);
        XI(kernels_get)()->add_rows(s, ld, keys, padded_lanes, rows, lanes->n);
    }
}

/* The same for scores by rows: a row is a lane, its keys are adjacent. */
void XI(mask_rows_of)(R *s, int64_t ld, int64_t keys,
                      const attn__tile_bits *bits, const attn__visibility *v,
                      const attn__sequence *seq, const attn__lanes *lanes,
                      int64_t key, R *gather)
{
    const R *rows[ATTN__MAX_LANES];

    for (int32_t m = 0; m < v->num_masks; m++) {
        if (v->masks[m].kind != ATTN_MASK_ADD)
            continue;
        XI(mask_rows)(&v->masks[m], seq, lanes, key, keys, gather, rows);
        for (int64_t l = 0; l < lanes->n; l++)
            for (int64_t j = 0; j < keys; j++)
                s[l * ld + j] = XI(biased)(s[l * ld + j], rows[l][j]);
    }
    for (int64_t l = 0; l < lanes->n; l++)
        for (int64_t j = 0; j < keys; j++)
            if (!(bits->by_lane[l][j / 64] >> (j % 64) & 1))
                s[l * ld + j] = R_NEG_INF;
}

/* One score with all masks; the scalar form of the above. */
static R XI(masked)(const attn__visibility *v, R x, int64_t b, int64_t h,
                    int64_t i, int64_t j)
{
    for (int32_t m = 0; m < v->num_masks; m++) {
        const attn__mask_view *view = &v->masks[m];
        const unsigned char *at = view->data + b * view->stride[0] +
                                  h * view->stride[1] + i * view->stride[2] +
                                  j * view->stride[3];
        if (!(mask_bits(view, at, 1, R_DTYPE) & 1))
            return R_NEG_INF;
        if (view->kind == ATTN_MASK_ADD) {
            R bias;
            memcpy(&bias, at, sizeof bias);
            x = XI(biased)(x, bias);
        }
    }
    return x;
}

static void XI(mask_apply)(const attn__visibility *v, const attn_tensor *t)
{
    for (int64_t b = 0; b < t->shape[0]; b++)
        for (int64_t h = 0; h < t->shape[1]; h++)
            for (int64_t i = 0; i < t->shape[2]; i++) {
                R *row = (R *)t->data + b * t->stride[0] + h * t->stride[1] +
                         i * t->stride[2];
                for (int64_t j = 0; j < t->shape[3]; j++)
                    row[j * t->stride[3]] =
                        XI(masked)(v, row[j * t->stride[3]], b, h, i, j);
            }
}
