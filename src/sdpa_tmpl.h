/*
 * Template of the engine: blocks of queries against all keys they see. Here
 * its scratch memory, its queries, its keys and its results; the loop over
 * tiles is in sdpa_tiles_tmpl.h (many queries, products through GEMM) and
 * sdpa_rows_tmpl.h (few), the tasks made of blocks in sdpa_tasks_tmpl.h.
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
 * Blocks of one head go through the same tiles together, up to STRIP_LANES
 * queries: a tile of K and V comes from memory once for all of them. Where its
 * rows lie apart, as in (B,T,H,D), it is copied once for all of them, if K and
 * V are more than a cache keeps (COPY_SHARED_BYTES: without the copy 12 heads,
 * d = 64, take 0.96 of the time at T = 128, 0.97 at 256, 0.98 at 384, 1.0 at
 * 512, where d = 96 and 256 take 1.03 and 1.08). One block alone copies only
 * where they are still more (COPY_BYTES: 32 or 64 queries, d = 64, 15 to 100
 * MiB: 0.53 to 0.94 of the time; 3 to 6 MiB: 0.94 to 1.12; one block of many, T
 * = 128 to 1024: 1.06 to 1.09).
 *
 * Tried and not kept: asking for rows to be copied ahead (0.98 to 1.02); asking
 * for K and V of the next head during the last block of this one (8 x 12 heads,
 * T = 128: 7 % slower), or for those of the next tile before each block's
 * products (0.99 to 1.01: as many lines at once take as long as they do later).
 *
 * Needs the real vocabulary, and what sdpa.c defines before including this.
 */

/* ------------------------------------------------------------- Filling -- */

/* A number for n elements, `stride` apart. */
static void XI(fill_row)(R *row, int64_t n, int64_t stride, R x)
{
    if (stride == 1 && x == K(0.0) && n > 0) {
        memset(row, 0, (size_t)n * sizeof(R));
        return;
    }
    for (int64_t e = 0; e < n; e++)
        row[e * stride] = x;
}

/* A number for the rows [first, rows) of a head. */
static void XI(fill_head)(const attn_tensor *t, int64_t b, int64_t h,
                          int64_t first, int64_t rows, R x)
{
    for (int64_t i = first; i < rows; i++)
        (void)XI(fill_row)((R *)t->data + b * t->stride[0] + h * t->stride[1] +
                               i * t->stride[2],
                           t->shape[3], t->stride[3], x);
}

/* The same of all heads. */
static void XI(fill_rows)(const attn_tensor *t, int64_t b, int64_t first,
                          int64_t rows, R x)
{
    for (int64_t h = 0; h < t->shape[1]; h++)
        XI(fill_head)(t, b, h, first, rows, x);
}

/* -------------------------------------------------------------- Blocks -- */

/* Scratch memory of a block, as long as it is under way: one block of a strip
 * waits while another is computed. Arrays over lanes have most_lanes(p)
 * elements. */
typedef struct XI(slot) {
    R *qt;               /* D x lanes */
    R *ot;               /* Dv x lanes */
    R *m, *l;            /* running maximum and sum */
    R *moments;          /* MOMENTS x lanes, if wanted */
    R *slope;            /* ALiBi's */
    unsigned char *seen; /* has the lane seen any key? */
    attn__lanes *lanes;
} XI(slot);

/* Scratch memory of a worker. */
typedef struct XI(worker) {
    XI(slot) * slots; /* most_slots(p), or 1 */
    R *s;             /* keys x lanes */
    R *k_copy;        /* keys x D, where K cannot be used in place */
    R *v_copy;        /* keys x Dv */
    R *gather;        /* keys x lanes, rows of masks */
    R *q_rows;        /* few queries: q, scores and output by rows */
    R *s_rows;
    R *o_rows;
    R *o_tile;
    const void **k_rows; /* addresses of the rows of a tile, and some more */
    const void **v_rows;
    R *alpha;
    R *factor;   /* 1 / sum */
    R *distance; /* ALiBi's, from key 0 of the tile */
    const R **rows;
    R **out_rows;
    attn__tile_bits *bits;
} XI(worker);

/* All of a slot but Qt and Ot. */
static XI(slot)
    XI(cut_slot)(const attn__sdpa *p, int64_t lanes, attn__bump *bump)
{
    XI(slot) s = {0};

    s.m = attn__bump_take(bump, lanes, sizeof(R));
    s.l = attn__bump_take(bump, lanes, sizeof(R));
    if (attn__wants_moments(p))
        s.moments = attn__bump_take(bump, MOMENTS * lanes, sizeof(R));
    if (p->alibi.data)
        s.slope = attn__bump_take(bump, lanes, sizeof(R));
    s.seen = attn__bump_take(bump, lanes, 1);
    s.lanes = attn__bump_take(bump, 1, sizeof(attn__lanes));
    return s;
}

static XI(worker)
    XI(cut_worker)(const attn__sdpa *p, int64_t slots, attn__bump *bump)
{
    int64_t lanes = most_lanes(p);
    int64_t keys =
        MIN(attn__round_up(MIN(p->kv_len, ATTN__MAX_KEYS), 4), p->most_keys);
    int64_t row_keys = MIN(p->kv_len, ROW_TILE);
    int64_t q_elements = strip_elements(p, lanes, slots, p->width);
    int64_t o_elements = strip_elements(p, lanes, slots, p->v_width);
    R *qt = attn__bump_take(bump, q_elements, sizeof(R));
    R *ot = attn__bump_take(bump, o_elements, sizeof(R));
    XI(worker) w;

    w.slots = attn__bump_take(bump, slots, sizeof(XI(slot)));
    for (int64_t n = 0; n < slots; n++) {
        XI(slot) s = XI(cut_slot)(p, lanes, bump);
        if (!w.slots)
            continue;
        /* Narrower heads have use for more slots. */
        if ((n + 1) * p->width * lanes <= q_elements)
            s.qt = qt + n * p->width * lanes;
        if ((n + 1) * p->v_width * lanes <= o_elements)
            s.ot = ot + n * p->v_width * lanes;
        w.slots[n] = s;
    }
    w.s = attn__bump_take(bump, keys * lanes, sizeof(R));
    w.k_copy = attn__bump_take(
        bump, attn__tile_copy_elements(&p->blas, R_DTYPE, keys, p->width),
        sizeof(R));
    /* By rows, whole tiles are copied where V is not finite. */
    w.v_copy = attn__bump_take(
        bump,
        MAX(attn__tile_copy_elements(&p->blas, R_DTYPE, keys, p->v_width),
            row_keys * p->v_width),
        sizeof(R));
    w.gather = NULL;
    if (p->visibility.num_add > 0)
        w.gather = attn__bump_take(bump, MAX(keys * lanes, MAX_ROWS * row_keys),
                                   sizeof(R));
    w.q_rows = attn__bump_take(
        bump, MAX_ROWS * attn__round_up(p->width, lane_step(R_DTYPE)),
        sizeof(R));
    w.s_rows = attn__bump_take(
        bump, MAX_ROWS * attn__round_up(row_keys, lane_step(R_DTYPE)),
        sizeof(R));
    w.o_rows = attn__bump_take(bump, MAX_ROWS * p->v_width, sizeof(R));
    w.o_tile = attn__bump_take(bump, MAX_ROWS * p->v_width, sizeof(R));
    w.k_rows =
        attn__bump_take(bump, row_keys + ATTN__AHEAD_ROWS, sizeof(void *));
    w.v_rows =
        attn__bump_take(bump, row_keys + ATTN__AHEAD_ROWS, sizeof(void *));
    w.alpha = attn__bump_take(bump, lanes, sizeof(R));
    w.factor = attn__bump_take(bump, lanes, sizeof(R));
    w.distance = NULL;
    if (p->alibi.data)
        w.distance = attn__bump_take(bump, lanes, sizeof(R));
    w.rows = attn__bump_take(bump, lanes, sizeof(R *));
    w.out_rows = attn__bump_take(bump, lanes, sizeof(R *));
    w.bits = attn__bump_take(bump, 1, sizeof(attn__tile_bits));
    return w;
}

/* Those of all workers, once a call: a task of a few queries takes little
 * longer than cutting. */
static void *XI(cut_workers)(const attn__sdpa *p, int64_t slots,
                             attn__bump *bump)
{
    XI(worker) *workers = attn__bump_take(bump, p->threads, sizeof(XI(worker)));

    for (int32_t t = 0; t < p->threads; t++) {
        XI(worker) w = XI(cut_worker)(p, slots, bump);
        if (workers)
            workers[t] = w;
    }
    return workers;
}

/* The keys [key, key + keys) of the tile at hand, and those whose rows of K and
 * V are in the worker's copies. */
typedef struct XI(held) {
    int64_t key, keys;
    int64_t k_key, k_keys, v_key, v_keys;
    bool copies; /* of rows that lie apart, but could be used in place */
} XI(held);

/* A block of queries, with all that its loops need. */
typedef struct XI(block) {
    const attn__sdpa *p;
    const task *t;
    const XI(kernels) * kernels;
    const XI(worker) * w;
    XI(slot) slot;
    key_rows k, v;     /* of this sequence and head */
    XI(held) * held;   /* what blocks of a strip share; NULL: alone */
    int64_t padded;    /* lanes, rounded up to whole vectors: the ld of tiles */
    double pack_scale; /* what q is multiplied by */
    R unit;            /* of the scores, see kernels.h */
    R cap_in, cap_out; /* s = cap_out tanh(cap_in s), if cap_in > 0 */
    int storage;       /* of the numbers of K and V, see kernels.h */
    bool by_rows;      /* few queries: no GEMM */
    bool in_rows;      /* the output is in o_rows, not in ot */
    bool careful;      /* hidden values may be NaN or inf */
    bool any_tile;     /* ot holds a result */
    bool whole_tiles;  /* all tiles but the last have as many keys */
} XI(block);

/* Element (i, h) of a tensor that runs along the queries, its last index 0. */
static R *XI(query_at)(const attn_tensor *tensor, const XI(block) * b,
                       int64_t head, int64_t i)
{
    int64_t batch = b->p->cu_q ? 0 : b->t->s.b;

    return (R *)tensor->data + batch * tensor->stride[0] +
           head * tensor->stride[1] + (b->t->q_row + i) * tensor->stride[2];
}

static void XI(set_lanes)(XI(block) * b)
{
    const task *t = b->t;
    const cut *c = &t->c;
    attn__lanes *lanes = b->slot.lanes;
    int64_t first_i = block_begin(c, &t->s, t->block);
    int64_t first_h = t->block % c->head_blocks * c->heads;
    int64_t end_i = block_begin(c, &t->s, t->block + c->head_blocks);
    int64_t end_h = MIN(first_h + c->heads, b->p->group);
    int64_t n = 0;

    for (int64_t i = first_i; i < end_i; i++)
        for (int64_t h = first_h; h < end_h; h++, n++) {
            lanes->i[n] = i;
            lanes->head[n] = t->g * b->p->group + h;
        }
    lanes->n = n;
    b->padded = attn__round_up(n, query_step(R_DTYPE));
    b->by_rows = n <= MAX_ROWS &&
                 (n <= FEW_ROWS(&b->p->blas) || t->s.kv_len >= ROW_KEYS * n) &&
                 !b->p->blas_only;
    attn__lanes_ranges(lanes, &b->p->visibility, &t->s);
}

/* A number of Q times the scale, which may be beyond its type; the product need
 * not be. */
static R XI(scaled)(R x, double scale)
{
    return fabs(scale) <= (double)R_MAX ? x * (R)scale : (R)((double)x * scale);
}

/* Are the numbers of a row adjacent? Rows may then lie anywhere. */
static bool XI(has_rows)(const attn_tensor *t)
{
    return t->shape[3] <= 1 || t->stride[3] == 1;
}

/* pack_scale Q by rows, zero up to whole vectors, in the order of columns that
 * the kernel for K as it is stored wants. */
static void XI(pack_rows)(XI(block) * b)
{
    const attn__sdpa *p = b->p;
    const attn__lanes *lanes = b->slot.lanes;
    double scale = b->pack_scale;
    int64_t stride = p->q.stride[3];
    int64_t ld = attn__round_up(p->width, lane_step(R_DTYPE));
    int64_t half = XI(has_rows)(&p->k) ? b->kernels->paired[b->storage] / 2 : 0;
    int64_t whole = half > 0 ? p->width / (2 * half) * (2 * half) : 0;

    for (int64_t l = 0; l < lanes->n; l++) {
        const R *from = XI(query_at)(&p->q, b, lanes->head[l], lanes->i[l]);
        R *to = b->w->q_rows + l * ld;
        for (int64_t d = 0; d < whole; d += 2 * half)
            for (int64_t i = 0; i < half; i++) {
                const R *pair = from + (d + 2 * i) * stride;
                to[d + i] = XI(scaled)(pair[0], scale);
                to[d + half + i] = XI(scaled)(pair[stride], scale);
            }
        for (int64_t d = whole; d < ld; d++)
            to[d] = d < p->width ? XI(scaled)(from[d * stride], scale) : K(0.0);
    }
}

/* scale times the rows of the lanes in a tensor along the queries, transposed:
 * its width x lanes. */
static void XI(pack_columns)(XI(block) * b, const attn_tensor *t, double scale,
                             R *to)
{
    const attn__lanes *lanes = b->slot.lanes;
    int64_t width = t->shape[3], stride = t->stride[3];

    for (int64_t l = 0; l < lanes->n; l++)
        b->w->rows[l] = XI(query_at)(t, b, lanes->head[l], lanes->i[l]);
    if (XI(has_rows)(t) && fabs(scale) <= (double)R_MAX) {
        b->kernels->pack(b->w->rows, lanes->n, b->padded, width, (R)scale, to,
                         b->padded);
        return;
    }
    for (int64_t d = 0; d < width; d++)
        for (int64_t l = 0; l < b->padded; l++)
            to[d * b->padded + l] =
                l < lanes->n ? XI(scaled)(b->w->rows[l][d * stride], scale)
                             : K(0.0);
}

/* pack_scale Q: by rows or transposed. */
static void XI(pack_queries)(XI(block) * b)
{
    if (b->by_rows)
        XI(pack_rows)(b);
    else
        XI(pack_columns)(b, &b->p->q, b->pack_scale, b->slot.qt);
}

/*
 * The scale, divided into what q is multiplied by and the unit of the scores. A
 * power of two loses nothing; unit is then between log2(e)/2 and log2(e). Where
 * something is added to the scores, or the scale is extreme, q takes all of it.
 */
static void XI(set_scale)(XI(block) * b, bool added)
{
    double scale = b->p->scale;
    int exponent;

    b->pack_scale = scale;
    b->unit = K(0.0);
    (void)frexp(scale, &exponent);
    if (added || exponent > 60 || exponent < -60)
        return;
    b->unit = (R)LOG2_E;
    if (scale == 0.0)
        return;
    b->pack_scale = copysign(ldexp(1.0, exponent), scale);
    b->unit = (R)(scale / b->pack_scale * LOG2_E);
}

/*
 * With a softcap c: the rest of the scale is in the argument of tanh, and c in
 * the unit, so that nothing but tanh is computed; or, where something is added,
 * c is multiplied out. A c beyond CAP_MAX, the largest with which the unit and
 * 1/c are normal numbers, caps nothing: c tanh(u/c) is u to the last digit but
 * where u is beyond 2^-12 CAP_MAX; one below 1/CAP_MAX is no unit, but all
 * scores are alike then. One that is 0 in the type of the scores counts as the
 * least number that is not: 0 would make an infinite score NaN.
 */
static void XI(set_cap)(XI(block) * b, bool added, bool plain)
{
    const double cap_max = R_DTYPE == ATTN_F32 ? 0x1p125 : 0x1p1020;
    double c = b->p->softcap, in;

    if (c == 0.0 || c > cap_max) {
        XI(set_scale)(b, added);
        return;
    }
    XI(set_scale)(b, plain);
    in = b->unit > K(0.0) && b->p->scale != 0.0
             ? b->p->scale / b->pack_scale / c
             : 1.0 / c;
    b->cap_in = in < (double)R_MAX ? (R)in : R_MAX;
    b->cap_out = K(1.0);
    b->unit = (R)(c * LOG2_E);
    if (added || c < 1.0 / cap_max) {
        b->cap_out = (R)(R_DTYPE == ATTN_F32 ? fmax(c, 0x1p-149) : c);
        b->unit = K(0.0);
    }
}

/* ALiBi's slope of a lane. */
static R XI(per_head)(const attn__per_head *of, int64_t b, int64_t head)
{
    return ((const R *)of->data)[b * of->b_stride + head * of->h_stride];
}

static void XI(set_slopes)(XI(block) * b)
{
    const attn__lanes *lanes = b->slot.lanes;

    for (int64_t l = 0; l < b->padded; l++)
        b->slot.slope[l] =
            l < lanes->n ? XI(per_head)(&b->p->alibi, b->t->s.b, lanes->head[l])
                         : K(0.0);
}

/* From key `key` to the position of a lane's query. */
static R XI(distance)(const XI(block) * b, int64_t lane, int64_t key)
{
    int64_t p = attn__clamped_sum(b->t->s.offset, b->slot.lanes->i[lane]);

    return (R)attn__clamped_sum(p, -key);
}

/* All but the running state; a task's kernels, scale and pointers. plain: for
 * scores that the caller gets. */
static XI(block)
    XI(make_block)(const run *r, const task *t, int32_t worker, bool plain)
{
    const attn__sdpa *p = r->p;
    XI(block)
    b = {.p = p, .t = t, .kernels = XI(kernels_get)()};
    bool added = plain || p->visibility.num_add > 0 || p->alibi.data;

    b.w = (const XI(worker) *)r->workers + worker;
    b.slot = b.w->slots[t->slot];
    XI(set_cap)(&b, added, plain);
    b.k = find_rows(p, &p->k, t->s.b, t->g, t->kv_row);
    b.v = find_rows(p, &p->v, t->s.b, t->g, t->kv_row);
    b.storage = storage_of(p->k.dtype);
    XI(set_lanes)(&b);
    if (p->alibi.data)
        XI(set_slopes)(&b);
    return b;
}

/* ---------------------------------------------------------------- Tiles -- */

/* The keys of a block: one or two runs, each cut into equal tiles. */
typedef struct XI(tiles) {
    struct {
        int64_t begin, end;
        int64_t origin; /* where the first tile would begin if it were whole */
        int64_t size;   /* keys of a tile */
        int64_t count;  /* tiles */
    } run[2];
} XI(tiles);

/*
 * Size of tiles for n keys. With a map of blocks, tiles are blocks or equal
 * parts of them, so that a hidden block is no work; blocks that are much
 * smaller than a tile are taken together, as many small products cost more than
 * what they save.
 */
static int64_t XI(tile_size)(const XI(block) * b, int64_t n, int64_t tile)
{
    int64_t of = b->p->visibility.blocks.block_k;

    if (of == 0 && b->whole_tiles)
        return tile;
    if (of == 0)
        return attn__round_up(attn__ceil_div(n, attn__ceil_div(n, tile)), 4);
    if (of > tile)
        return attn__ceil_div(of, attn__ceil_div(of, tile));
    return of < MIN_BLOCK_KEYS ? MIN(MIN_BLOCK_KEYS, tile) / of * of : of;
}

/* Only the keys [begin, end) of a block. */
static void XI(clip_keys)(XI(block) * b, int64_t begin, int64_t end)
{
    attn__lanes *lanes = b->slot.lanes;

    lanes->low = MAX(lanes->low, begin);
    lanes->high = MIN(lanes->high, end);
    lanes->keep_low = MAX(lanes->keep_low, begin);
    lanes->keep_high = MIN(lanes->keep_high, end);
}

/* tile: the most keys of one. */
static XI(tiles) XI(cut_keys)(const XI(block) * b, int64_t tile)
{
    const attn__lanes *lanes = b->slot.lanes;
    int64_t low = lanes->low, high = MAX(lanes->high, lanes->low);
    int64_t keep_low = lanes->keep_low;
    int64_t keep_high = MAX(lanes->keep_high, keep_low);
    XI(tiles) t = {{{0, 0, 0, 1, 0}, {0, 0, 0, 1, 0}}};

    if (low < high && keep_low < keep_high &&
        (keep_high < low || high < keep_low)) {
        /* Apart, in their order. */
        t.run[low < keep_low].begin = keep_low;
        t.run[low < keep_low].end = keep_high;
        t.run[keep_low < low].begin = low;
        t.run[keep_low < low].end = high;
    } else if (keep_low == keep_high) {
        t.run[1].begin = low;
        t.run[1].end = high;
    } else {
        t.run[1].begin = low == high ? keep_low : MIN(low, keep_low);
        t.run[1].end = low == high ? keep_high : MAX(high, keep_high);
    }
    for (int a = 0; a < 2; a++) {
        int64_t n = t.run[a].end - t.run[a].begin;
        int64_t of = b->p->visibility.blocks.block_k;
        if (n == 0)
            continue;
        t.run[a].size = XI(tile_size)(b, n, tile);
        /* Tiles that are parts of blocks begin where blocks do. */
        t.run[a].origin = t.run[a].begin;
        if (of > 0)
            t.run[a].origin -=
                t.run[a].begin % MAX(of, t.run[a].size) % t.run[a].size;
        t.run[a].count =
            attn__ceil_div(t.run[a].end - t.run[a].origin, t.run[a].size);
    }
    return t;
}

/* Tile number `index`: its first key and how many. */
static int64_t XI(tile_keys)(const XI(tiles) * t, int64_t index, int64_t *keys)
{
    int a = index >= t->run[0].count;
    int64_t key, end;

    if (a)
        index -= t->run[0].count;
    key = t->run[a].origin + index * t->run[a].size;
    end = MIN(key + t->run[a].size, t->run[a].end);
    key = MAX(key, t->run[a].begin);
    *keys = end - key;
    return key;
}

/* One number of K or V, as it is stored. */
static void XI(read_stored)(const XI(block) * b, const unsigned char *from,
                            R *to)
{
    if (b->storage == ATTN__STORED_SAME)
        memcpy(to, from, sizeof(R));
    else
        b->kernels->widen[b->storage](from, to, 1);
}

/*
 * The same for rows whose numbers lie apart. Where keys are nearer to each
 * other than columns, as in (B,H,D,T), those of four lines of memory are taken
 * together, column after column (decoding over 8192 such keys of width 64: 0.48
 * of the time that row after row takes; those of one line: 0.75).
 */
static void XI(gather_rows)(const XI(block) * b, const key_rows *k,
                            const unsigned char *from, int64_t n, int64_t width,
                            R *to)
{
    int64_t line =
        llabs(k->column) > llabs(k->row) ? 256 / (int64_t)sizeof(R) : 1;

    for (int64_t j = 0; j < n; j += line)
        for (int64_t e = 0; e < width; e++)
            for (int64_t i = j; i < MIN(j + line, n); i++)
                (void)XI(read_stored)(b, from + i * k->row + e * k->column,
                                      &to[i * width + e]);
}

/* n rows that lie one after the other, as R, adjacent. */
static void XI(copy_rows)(const XI(block) * b, const key_rows *k,
                          const unsigned char *from, int64_t n, int64_t width,
                          R *to)
{
    int64_t bytes = b->storage == ATTN__STORED_SAME ? (int64_t)sizeof(R) : 2;
    bool adjacent = k->column == bytes || width <= 1;

    if (width == 0)
        return; /* there need be no data */
    if (!adjacent) {
        (void)XI(gather_rows)(b, k, from, n, width, to);
        return;
    }
    for (int64_t j = 0; j < n; j++, from += k->row, to += width)
        if (b->storage == ATTN__STORED_SAME)
            memcpy(to, from, (size_t)width * sizeof(R));
        else
            b->kernels->widen[b->storage](from, to, width);
}

/* Rows of K or V where they lie, if a product can have them there: numbers of
 * this type, columns adjacent, rows that do not overlap; else NULL. */
static const R *XI(rows_in_place)(const XI(block) * b, const key_rows *k,
                                  int64_t width, int64_t key, int64_t keys,
                                  int64_t *ld)
{
    int64_t adjacent, row = k->row / (int64_t)sizeof(R);
    const unsigned char *from = key_row(k, key, keys, &adjacent);

    if (b->storage != ATTN__STORED_SAME || adjacent != keys ||
        (k->column != (int64_t)sizeof(R) && width > 1))
        return NULL;
    *ld = keys == 1 ? MAX(width, 1) : row;
    return keys == 1 || (row >= MAX(width, 1) && row <= INT32_MAX)
               ? (const R *)(const void *)from
               : NULL;
}

/* The same rows one after the other. */
static void XI(gather_keys)(const XI(block) * b, const key_rows *k,
                            int64_t width, int64_t key, int64_t keys, R *copy)
{
    int64_t adjacent;

    for (int64_t j = 0; j < keys; j += adjacent) {
        const unsigned char *from = key_row(k, key + j, keys - j, &adjacent);
        XI(copy_rows)(b, k, from, adjacent, width, copy + j * width);
    }
}

/* Rows of K or V as a product wants them: in place if possible, else copied. */
static const R *XI(rows_for_gemm)(const XI(block) * b, const key_rows *k,
                                  int64_t width, int64_t key, int64_t keys,
                                  R *copy, int64_t *ld)
{
    const R *rows = XI(rows_in_place)(b, k, width, key, keys, ld);

    if (rows)
        return rows;
    XI(gather_keys)(b, k, width, key, keys, copy);
    *ld = MAX(width, 1);
    return copy;
}

/*
 * The same of a block that shares its tile: what is copied is copied for all.
 * Rows that lie apart may be better copied too: those of (B,T,H,D) lie some KiB
 * apart, use a quarter or less of the sets of a cache, and are more pages than
 * its prefetch or its first level of addresses covers.
 */
static const R *XI(shared_rows)(const XI(block) * b, const key_rows *k,
                                int64_t width, int64_t key, int64_t keys,
                                R *copy, int64_t *held_key, int64_t *held_keys,
                                int64_t *ld)
{
    const XI(held) *h = b->held;
    bool apart = k->row != width * (int64_t)sizeof(R);
    const R *rows = h->copies && apart
                        ? NULL
                        : XI(rows_in_place)(b, k, width, key, keys, ld);

    if (rows)
        return rows;
    if (key < *held_key || key + keys > *held_key + *held_keys) {
        XI(gather_keys)(b, k, width, h->key, h->keys, copy);
        *held_key = h->key;
        *held_keys = h->keys;
    }
    *ld = MAX(width, 1);
    return copy + (key - *held_key) * width;
}

static bool XI(is_visible)(const attn__tile_bits *bits, int64_t j, int64_t lane)
{
    return bits->by_lane[lane][j / 64] >> (j % 64) & 1;
}

/*
 * V of a tile as a product wants it. Where some lanes do not see all keys, V
 * that is not finite would reach them, as 0 times NaN is NaN. So a block whose
 * output is not finite is done once more and carefully: products with zeros in
 * place of such values (clean), and XI(add_nonfinite) for the lanes that see
 * them. Looking at every value first cost 2 % of the time.
 */
static const R *XI(values_of_tile)(XI(block) * b, int64_t key, int64_t keys,
                                   bool clean, int64_t *ld)
{
    int64_t width = b->p->v_width;
    R *copy = b->w->v_copy;
    const R *v;

    /* Blocks that share a tile are done again alone. */
    ASSERT(!b->held || !clean);
    if (b->held)
        return XI(shared_rows)(b, &b->v, width, key, keys, copy,
                               &b->held->v_key, &b->held->v_keys, ld);
    v = XI(rows_for_gemm)(b, &b->v, width, key, keys, copy, ld);
    if (!clean)
        return v;
    for (int64_t j = 0; j < keys; j++)
        for (int64_t e = 0; e < width; e++) {
            R x = v[j * *ld + e];
            copy[j * width + e] = x - x == K(0.0) ? x : K(0.0);
        }
    *ld = MAX(width, 1);
    return copy;
}

/* Weights s[j * s_key + l * s_lane] times V that is not finite, added to output
 * o[e * o_column + l * o_lane]. */
static void XI(add_nonfinite)(XI(block) * b, int64_t key, int64_t keys,
                              const R *s, int64_t s_key, int64_t s_lane, R *o,
                              int64_t o_column, int64_t o_lane)
{
    for (int64_t j = 0; j < keys; j++)
        for (int64_t e = 0; e < b->p->v_width; e++) {
            int64_t adjacent;
            R x;
            (void)XI(read_stored)(
                b, key_row(&b->v, key + j, 1, &adjacent) + e * b->v.column, &x);
            if (x - x == K(0.0))
                continue;
            for (int64_t l = 0; l < b->slot.lanes->n; l++)
                if (XI(is_visible)(b->w->bits, j, l))
                    o[e * o_column + l * o_lane] +=
                        x * s[j * s_key + l * s_lane];
        }
}

/* Which lanes have seen a key, after a tile of this state. */
static void XI(note_seen)(XI(block) * b, attn__tile_state state, int64_t keys)
{
    if (state == ATTN__TILE_FULL) {
        memset(b->slot.seen, 1, (size_t)b->padded);
        return;
    }
    for (int64_t l = 0; l < b->slot.lanes->n; l++)
        for (int64_t w = 0; 64 * w < keys; w++)
            b->slot.seen[l] |= b->w->bits->by_lane[l][w] != 0;
}

/* Nothing seen yet. */
static void XI(reset)(XI(block) * b)
{
    for (int64_t l = 0; l < b->padded; l++) {
        b->slot.m[l] = R_NEG_INF;
        b->slot.l[l] = K(0.0);
        b->slot.seen[l] = 0;
    }
    for (int64_t a = 0; b->slot.moments && a < MOMENTS * b->padded; a++)
        b->slot.moments[a] = K(0.0);
}

/* --------------------------------------------------------------- Results -- */

/* LSE from the maximum and the sum, as the scores are. In double for both
 * types: it is rounded once then, and so is every weight that the backward pass
 * makes of it. */
static double XI(lse_of)(const XI(block) * b, int64_t l)
{
    double m = (double)b->slot.m[l];

    if (!b->slot.seen[l])
        return -HUGE_VAL;
    if (b->slot.l[l] == K(0.0))
        return (double)
            NAN; /* all visible scores are -inf: 0/0, as in the formula */
    return log((double)b->slot.l[l]) +
           (b->unit > K(0.0) ? m * (double)b->unit / LOG2_E : m);
}

/*
 * A sink s is one more term of the sum, without a value:
 *   L = max(L0, s) + ln(1 + e^-|L0 - s|),   weights shrink by e^(L0 - L)
 * In double for both types: L0 is far from exact in its own.
 */
static void XI(add_sink)(const XI(block) * b, int64_t l, R *lse)
{
    double sink =
        (double)XI(per_head)(&b->p->sinks, b->t->s.b, b->slot.lanes->head[l]);
    double before = XI(lse_of)(b, l), above;

    /* All that is visible is -inf: beside the sink that is nothing. */
    if (b->slot.seen[l] && b->slot.l[l] == K(0.0))
        before = -HUGE_VAL;
    /* A sink that is not there; or a row without a key, whose LSE it is. */
    if (sink == -HUGE_VAL)
        return;
    above = sink - before;
    /* No weights, whatever the sink is, without a key; and none where all that
     * is visible is -inf: before is, and 1/sum is inf. */
    if (!b->slot.seen[l] || above == HUGE_VAL)
        b->w->factor[l] = K(0.0);
    else
        b->w->factor[l] = (R)((double)b->w->factor[l] / (1.0 + exp(above)));
    *lse = (R)(above > 0.0 ? sink + log1p(exp(-above))
                           : before + log1p(exp(above)));
}

/* Row diagnostics, from weights relative to the maximum, p = e^x, w = f p:
 *   largest w = f max p,   1 / sum w^2 = 1 / (f^2 sum p^2),
 *   -sum w ln w = -f sum p x - f ln(f) sum p */
static void XI(write_moments)(const XI(block) * b, int64_t l)
{
    const attn__sdpa *p = b->p;
    const R *moments = b->slot.moments + l;
    int64_t head = b->slot.lanes->head[l], i = b->slot.lanes->i[l];
    double f = (double)b->w->factor[l], results[3] = {0.0, 0.0, 0.0};
    double unit = b->unit > K(0.0) ? (double)b->unit / LOG2_E : 1.0;

    if (b->slot.seen[l]) {
        results[0] = f * (double)moments[0];
        results[1] = 1.0 / (f * f * (double)moments[b->padded]);
        /* w ln w is 0 where w is, as where a sink takes it all. */
        results[2] = -f * (unit * (double)moments[2 * b->padded] +
                           (f == 0.0 ? 0.0 : log(f)) * (double)b->slot.l[l]);
        /* The rest of a rounding, where one weight is 1; -0 too. */
        results[2] = results[2] <= 0.0 ? 0.0 : results[2];
    }
    for (int a = 0; a < 3; a++)
        if (p->wants[ATTN__MAX_WEIGHT + a])
            *XI(query_at)(&p->extra[ATTN__MAX_WEIGHT + a], b, head, i) =
                (R)results[a];
}

/* Maximum and 1/sum of a lane's row, for the weights. */
static R *XI(stats_at)(const run *r, const XI(block) * b, int64_t l)
{
    const attn__sdpa *p = b->p;
    int64_t batch = p->cu_q ? 0 : b->t->s.b;
    int64_t row = (batch * p->heads + b->slot.lanes->head[l]) * p->q.shape[2] +
                  b->t->q_row + b->slot.lanes->i[l];

    return (R *)r->stats + 2 * row;
}

static void XI(write_block)(const run *r, XI(block) * b)
{
    const attn__sdpa *p = b->p;
    const attn__lanes *lanes = b->slot.lanes;
    int64_t stride = p->out.stride[3];

    for (int64_t l = 0; l < b->padded; l++)
        b->w->factor[l] = b->slot.seen[l] ? K(1.0) / b->slot.l[l] : K(0.0);
    for (int64_t l = 0; l < lanes->n; l++) {
        R lse = p->wants[ATTN__LSE] ? (R)XI(lse_of)(b, l) : K(0.0);
        b->w->out_rows[l] =
            XI(query_at)(&p->out, b, lanes->head[l], lanes->i[l]);
        if (p->sinks.data)
            XI(add_sink)(b, l, &lse);
        if (p->wants[ATTN__LSE])
            *XI(query_at)(&p->extra[ATTN__LSE], b, lanes->head[l],
                          lanes->i[l]) = lse;
        if (b->slot.moments)
            XI(write_moments)(b, l);
        if (r->stats) {
            R *stats = XI(stats_at)(r, b, l);
            stats[0] = b->slot.m[l];
            stats[1] = b->w->factor[l];
        }
    }
    if (b->in_rows) {
        for (int64_t l = 0; l < lanes->n; l++)
            for (int64_t e = 0; e < p->v_width; e++)
                b->w->out_rows[l][e * stride] =
                    b->w->o_rows[l * p->v_width + e] * b->w->factor[l];
        return;
    }
    if (stride == 1 || p->v_width <= 1) {
        b->kernels->unpack(b->slot.ot, b->padded, lanes->n, p->v_width,
                           b->w->factor, b->w->out_rows, false);
        return;
    }
    for (int64_t l = 0; l < lanes->n; l++)
        for (int64_t e = 0; e < p->v_width; e++)
            b->w->out_rows[l][e * stride] =
                b->slot.ot[e * b->padded + l] * b->w->factor[l];
}
