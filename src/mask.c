/*
 * Masks. Element masks are read once per tile, as bits: rows of the mask are
 * queries, but tiles are stored by key, so the bits are made row by row (the
 * direction of memory) and transposed 64 by 64, which costs a tenth of an
 * operation a score. Bits also say at once whether a tile is full or empty.
 */
#include "attn_internal.h"

#include "mask.h"

#include "check.h"
#include "status.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* --------------------------------------------------------------- Ranges -- */

int64_t attn__clamped_sum(int64_t a, int64_t b)
{
    if (b > 0 ? a > INT64_MAX - b : a < INT64_MIN - b)
        return a > 0 ? INT64_MAX : INT64_MIN;
    return a + b;
}

static int64_t floor_to(int64_t x, int64_t step)
{
    int64_t rest = x % step;
    return attn__clamped_sum(x, rest < 0 ? -(rest + step) : -rest);
}

/* p - left. In this order: offset and left may both be huge, and p beyond the
 * range where p - left is not; where offset - left is below it, so is p - left
 * below 0. */
static int64_t left_end(const attn__visibility *v, const attn__sequence *s,
                        int64_t i)
{
    return attn__clamped_sum(attn__clamped_sum(s->offset, -v->left), i);
}

static attn__range query_range(const attn__visibility *v,
                               const attn__sequence *s, int64_t i)
{
    int64_t p = attn__clamped_sum(s->offset, i);
    int64_t begin = s->kv_begin, end = s->kv_len; /* all but the window */
    attn__range r;

    if (v->causal)
        end = MIN(end, MAX(attn__clamped_sum(p, 1), s->prefix));
    if (v->chunk > 0) {
        /* Chunks count from position 0. */
        int64_t first = floor_to(attn__clamped_sum(p, s->origin), v->chunk);
        first = attn__clamped_sum(first, -s->origin);
        begin = MAX(begin, first);
        end = MIN(end, attn__clamped_sum(first, v->chunk));
    }
    r.low = begin;
    r.high = end;
    r.keep_low = 0;
    r.keep_high = 0;
    if (v->window) {
        if (v->left >= 0)
            r.low = MAX(r.low, left_end(v, s, i));
        if (v->right >= 0)
            r.high = MIN(r.high,
                         attn__clamped_sum(attn__clamped_sum(p, v->right), 1));
        /* From position 0, not from where the keys begin. */
        r.keep_low = MAX(begin, -s->origin);
        r.keep_low = MIN(r.keep_low, s->kv_len);
        r.keep_high = MIN(end, attn__clamped_sum(v->keep_first, -s->origin));
        r.keep_high = MAX(r.keep_high, r.keep_low);
    }
    r.low = MIN(r.low, s->kv_len);
    r.high = MAX(r.high, r.low);
    return r;
}

static bool has_rules(const attn__visibility *v)
{
    return v->causal || v->window || v->chunk > 0;
}

/* Fills the ranges of the lanes, and their hulls. */
static void hull_of_ranges(attn__lanes *lanes, const attn__visibility *v,
                           const attn__sequence *s)
{
    attn__range r = {0, 0, 0, 0};

    lanes->low = s->kv_len;
    lanes->high = 0;
    lanes->keep_low = s->kv_len;
    for (int64_t l = 0; l < lanes->n; l++) {
        /* Heads of a group stand side by side and see the same. */
        if (l == 0 || lanes->i[l] != lanes->i[l - 1]) {
            r = query_range(v, s, lanes->i[l]);
            lanes->all_low = MAX(lanes->all_low, r.low);
            lanes->all_high = MIN(lanes->all_high, r.high);
            if (r.low < r.high) {
                lanes->low = MIN(lanes->low, r.low);
                lanes->high = MAX(lanes->high, r.high);
            }
            if (r.keep_low < r.keep_high) {
                lanes->keep_low = MIN(lanes->keep_low, r.keep_low);
                lanes->keep_high = MAX(lanes->keep_high, r.keep_high);
            }
        }
        lanes->range[l] = r;
    }
}

/* Keys that are looked at together for a segment, in vectors: one by one, the
 * 64000 keys before the last 1000 took a decoding step nine times as long as
 * attending to those (8 heads: 1.19 ms, by 256 keys 0.49). */
#define SCAN_KEYS 256

/* Is none of SCAN_KEYS segments in [first, first + range]? */
static bool all_outside(const int32_t *of, int32_t first, uint32_t range)
{
    uint32_t inside = 0;

    for (int j = 0; j < SCAN_KEYS; j++)
        inside |= (uint32_t)of[j] - (uint32_t)first <= range;
    return inside == 0;
}

/* Narrows [low, high) to the first and last key of a segment between those of
 * the lanes. Segments mostly stand in order; if not, keys in between stay. */
static void narrow_to_segments(const attn__lanes *lanes,
                               const attn__sequence *s, int64_t *low,
                               int64_t *high)
{
    int32_t first = INT32_MAX, last = INT32_MIN;
    const int32_t *of = s->kv_segments;
    uint32_t range;

    for (int64_t l = 0; l < lanes->n; l++) {
        int32_t segment = s->q_segments[lanes->i[l]];
        first = MIN(first, segment);
        last = MAX(last, segment);
    }
    range = (uint32_t)last - (uint32_t)first;
    while (*high - *low >= SCAN_KEYS && all_outside(of + *low, first, range))
        *low += SCAN_KEYS;
    while (*low < *high && (of[*low] < first || of[*low] > last))
        ++*low;
    while (*high - *low >= SCAN_KEYS &&
           all_outside(of + *high - SCAN_KEYS, first, range))
        *high -= SCAN_KEYS;
    while (*low < *high && (of[*high - 1] < first || of[*high - 1] > last))
        --*high;
}

/* The row of the map for a lane. */
static const unsigned char *map_row(const attn__block_map *m,
                                    const attn__sequence *s,
                                    const attn__lanes *lanes, int64_t lane)
{
    return m->data + s->b * m->stride[0] + lanes->head[lane] * m->stride[1] +
           lanes->i[lane] / m->block_q * m->stride[2];
}

/* Narrows [low, high) to the first and last block that some lane sees. */
static void narrow_to_blocks(const attn__lanes *lanes, const attn__block_map *m,
                             const attn__sequence *s, int64_t *low,
                             int64_t *high)
{
    int64_t begin = *low / m->block_k, end, first, last;
    const unsigned char *before = NULL;

    if (*low >= *high)
        return;
    end = (*high - 1) / m->block_k + 1;
    first = end;
    last = begin;
    for (int64_t l = 0; l < lanes->n; l++) {
        const unsigned char *row = map_row(m, s, lanes, l);
        int64_t a = begin, z = end;
        if (row == before)
            continue;
        before = row;
        while (a < first && !row[a * m->stride[3]])
            a++;
        while (z > last && !row[(z - 1) * m->stride[3]])
            z--;
        first = MIN(first, a);
        last = MAX(last, z);
    }
    if (first >= last) {
        *high = *low;
        return;
    }
    *low = MAX(*low, first * m->block_k);
    /* The last block may end beyond the keys. */
    if (last < end)
        *high = last * m->block_k;
}

static void narrow_hull(attn__lanes *lanes, const attn__visibility *v,
                        const attn__sequence *s)
{
    if (v->segments) {
        narrow_to_segments(lanes, s, &lanes->low, &lanes->high);
        narrow_to_segments(lanes, s, &lanes->keep_low, &lanes->keep_high);
    }
    if (v->blocks.block_k > 0) {
        narrow_to_blocks(lanes, &v->blocks, s, &lanes->low, &lanes->high);
        narrow_to_blocks(lanes, &v->blocks, s, &lanes->keep_low,
                         &lanes->keep_high);
    }
}

void attn__lanes_ranges(attn__lanes *lanes, const attn__visibility *v,
                        const attn__sequence *s)
{
    lanes->bounded = has_rules(v);
    lanes->low = s->kv_begin;
    lanes->high = s->kv_len;
    lanes->all_low = s->kv_begin;
    lanes->all_high = s->kv_len;
    lanes->keep_low = 0;
    lanes->keep_high = 0;
    if (lanes->bounded)
        hull_of_ranges(lanes, v, s);
    narrow_hull(lanes, v, s);
}

/* ----------------------------------------------------------------- Bits -- */

/* Bits [begin, end) of a word that stands for keys first .. first + 63. */
static uint64_t interval_bits(int64_t begin, int64_t end, int64_t first)
{
    uint64_t below_end, below_begin;

    begin = MAX(MIN(begin - first, 64), 0);
    end = MAX(MIN(end - first, 64), 0);
    if (begin >= end)
        return 0;
    below_end = end == 64 ? UINT64_MAX : ((uint64_t)1 << end) - 1;
    below_begin = begin == 64 ? UINT64_MAX : ((uint64_t)1 << begin) - 1;
    return below_end & ~below_begin;
}

/* Bit t = (number t is not -inf), for n <= 64 numbers `stride` bytes apart. */
static uint64_t not_neg_inf_bits(const unsigned char *data, int64_t stride,
                                 int64_t n, attn_dtype dtype)
{
    uint64_t bits = 0;

    for (int64_t t = 0; t < n; t++, data += stride) {
        if (dtype == ATTN_F32) {
            float x;
            memcpy(&x, data, sizeof x);
            bits |= (uint64_t) !(x < -3.402823466e38f) << t;
        } else {
            double x;
            memcpy(&x, data, sizeof x);
            bits |= (uint64_t) !(x < -1.7976931348623157e308) << t;
        }
    }
    return bits;
}

static uint64_t mask_bits(const attn__mask_view *m, const unsigned char *row,
                          int64_t n, attn_dtype dtype)
{
    uint64_t all = interval_bits(0, n, 0);
    uint64_t bits = 0;
    int64_t stride = m->stride[3];

    if (stride == 0) {
        bits = m->kind == ATTN_MASK_ADD ? not_neg_inf_bits(row, 0, 1, dtype)
                                        : (uint64_t)(*row != 0);
        bits = bits ? all : 0;
    } else if (m->kind == ATTN_MASK_ADD) {
        bits = not_neg_inf_bits(row, stride, n, dtype);
    } else {
        for (int64_t t = 0; t < n; t++)
            bits |= (uint64_t)(row[t * stride] != 0) << t;
    }
    return m->kind == ATTN_MASK_DROP ? ~bits & all : bits;
}

static const unsigned char *mask_row(const attn__mask_view *m,
                                     const attn__sequence *s,
                                     const attn__lanes *lanes, int64_t lane,
                                     int64_t key)
{
    return m->data + s->b * m->stride[0] + lanes->head[lane] * m->stride[1] +
           lanes->i[lane] * m->stride[2] + key * m->stride[3];
}

/* ANDs one mask into the bits of every lane: rows of adjacent entries by the
 * kernels, others one by one. */
static void and_mask(attn__tile_bits *bits, const attn__mask_view *m,
                     const attn__sequence *s, const attn__lanes *lanes,
                     int64_t key, int64_t keys, attn_dtype dtype)
{
    const unsigned char *rows[ATTN__MAX_LANES];
    const float *rows_f32[ATTN__MAX_LANES];
    const double *rows_f64[ATTN__MAX_LANES];
    int64_t stride = m->stride[3];
    /* The next tile, or the first one of the next block. */
    int64_t ahead = keys;

    if (key + keys >= lanes->high)
        ahead = lanes->low - key -
                (lanes->i[lanes->n - 1] - lanes->i[0] + 1) * m->stride[2];
    for (int64_t l = 0; l < lanes->n; l++) {
        rows[l] = mask_row(m, s, lanes, l, key);
        rows_f32[l] = (const float *)(const void *)rows[l];
        rows_f64[l] = (const double *)(const void *)rows[l];
    }
    if (m->kind != ATTN_MASK_ADD && stride == 1) {
        attn__kernels_get_f32()->byte_bits(rows, lanes->n, keys,
                                           m->kind == ATTN_MASK_DROP, ahead,
                                           bits->by_lane);
        return;
    }
    if (m->kind == ATTN_MASK_ADD && dtype == ATTN_F32 &&
        stride == (int64_t)sizeof(float)) {
        attn__kernels_get_f32()->number_bits(rows_f32, lanes->n, keys,
                                             bits->by_lane);
        return;
    }
    if (m->kind == ATTN_MASK_ADD && dtype == ATTN_F64 &&
        stride == (int64_t)sizeof(double)) {
        attn__kernels_get_f64()->number_bits(rows_f64, lanes->n, keys,
                                             bits->by_lane);
        return;
    }
    for (int64_t l = 0; l < lanes->n; l++)
        for (int64_t w = 0; 64 * w < keys; w++)
            bits->by_lane[l][w] &= mask_bits(m, rows[l] + 64 * w * stride,
                                             MIN(keys - 64 * w, 64), dtype);
}

/* ANDs into the bits of every lane which keys are of its segment. Lanes side
 * by side mostly share it. */
static void and_segments(attn__tile_bits *bits, const attn__sequence *s,
                         const attn__lanes *lanes, int64_t key, int64_t keys)
{
    uint64_t words[ATTN__KEY_WORDS] = {0};
    const int32_t *of = s->kv_segments + key;

    for (int64_t l = 0; l < lanes->n; l++) {
        int32_t segment = s->q_segments[lanes->i[l]];
        bool is_new = l == 0 || segment != s->q_segments[lanes->i[l - 1]];
        for (int64_t w = 0; 64 * w < keys; w++) {
            if (is_new) {
                int64_t n = MIN(keys - 64 * w, 64);
                words[w] = 0;
                for (int64_t j = 0; j < n; j++)
                    words[w] |= (uint64_t)(of[64 * w + j] == segment) << j;
            }
            bits->by_lane[l][w] &= words[w];
        }
    }
}

static void and_blocks(attn__tile_bits *bits, const attn__block_map *m,
                       const attn__sequence *s, const attn__lanes *lanes,
                       int64_t key, int64_t keys)
{
    uint64_t words[ATTN__KEY_WORDS] = {0};
    const unsigned char *before = NULL;

    for (int64_t l = 0; l < lanes->n; l++) {
        const unsigned char *row = map_row(m, s, lanes, l);
        for (int64_t w = 0; 64 * w < keys; w++) {
            if (row != before) {
                int64_t first = key + 64 * w;
                int64_t end = MIN(first + 64, key + keys);
                words[w] = 0;
                for (int64_t a = first / m->block_k; a * m->block_k < end; a++)
                    if (row[a * m->stride[3]])
                        words[w] |= interval_bits(a * m->block_k,
                                                  (a + 1) * m->block_k, first);
            }
            bits->by_lane[l][w] &= words[w];
        }
        before = row;
    }
}

/* Up to so many keys are gone through one by one, which costs less than
 * transposing 64: causal, T = 2: 0.78 of the time of the call, T = 17: 0.96,
 * but T = 128: 1.02. */
#define FEW_KEYS 32

/* 64 x 64 bits at a time; blocks without a hidden key need no transposing. */
static void bits_by_key(attn__tile_bits *bits, int64_t lanes, int64_t keys)
{
    for (int64_t lane = 0; lane < lanes; lane += 64)
        for (int64_t w = 0; 64 * w < keys; w++) {
            uint64_t block[64], full = interval_bits(0, keys, 64 * w);
            uint64_t missing = 0;
            for (int64_t a = 0; a < 64; a++) {
                block[a] =
                    lane + a < lanes ? bits->by_lane[lane + a][w] : UINT64_MAX;
                missing |= ~block[a] & full;
            }
            if (missing)
                attn__kernels_get_f32()->transpose_bits(block);
            for (int64_t a = 0; a < 64 && 64 * w + a < keys; a++)
                bits->by_key[64 * w + a][lane / 64] =
                    missing ? block[a] : UINT64_MAX;
        }
}

/*
 * The same where only the ranges of the lanes decide. Lanes stand in the order
 * of their queries, so neither end of a range ever moves back: those that see a
 * key are neighbours, from the first whose range ends behind it to the last
 * whose range has begun.
 */
static void ranges_by_key(attn__tile_bits *bits, const attn__lanes *lanes,
                          int64_t key, int64_t keys)
{
    int64_t n = lanes->n, first = 0, end = 0, keep_first = 0, keep_end = 0;

    if (lanes->keep_low >= lanes->keep_high)
        keep_first = n; /* no keys but those of the windows */
    for (int64_t j = 0; j < keys; j++) {
        while (first < n && lanes->range[first].high <= key + j)
            first++;
        while (end < n && lanes->range[end].low <= key + j)
            end++;
        while (keep_first < n && lanes->range[keep_first].keep_high <= key + j)
            keep_first++;
        while (keep_first < n && keep_end < n &&
               lanes->range[keep_end].keep_low <= key + j)
            keep_end++;
        for (int64_t w = 0; 64 * w < n; w++)
            bits->by_key[j][w] = interval_bits(first, end, 64 * w) |
                                 interval_bits(keep_first, keep_end, 64 * w) |
                                 interval_bits(n, 64 * (w + 1), 64 * w);
    }
}

/* Bits of the rules without memory. */
static void range_bits(attn__tile_bits *bits, const attn__lanes *lanes,
                       int64_t key, int64_t keys)
{
    for (int64_t l = 0; l < lanes->n; l++) {
        const attn__range *r = &lanes->range[l];
        uint64_t *words = bits->by_lane[l];
        for (int64_t w = 0; 64 * w < keys; w++)
            words[w] = interval_bits(0, keys, 64 * w);
        for (int64_t w = 0; lanes->bounded && 64 * w < keys; w++) {
            int64_t first = key + 64 * w;
            if (first >= r->low && first + 64 <= r->high)
                continue; /* all of them */
            words[w] &= interval_bits(r->low, r->high, first) |
                        interval_bits(r->keep_low, r->keep_high, first);
        }
    }
}

/* What all lanes of a tile, and what any of them, see. */
typedef struct tile_hull {
    uint64_t all[ATTN__KEY_WORDS], any[ATTN__KEY_WORDS];
} tile_hull;

static attn__tile_state state_of(const attn__tile_bits *bits, int64_t lanes,
                                 int64_t keys, tile_hull *hull)
{
    uint64_t visible = 0, missing = 0;

    for (int64_t w = 0; 64 * w < keys; w++) {
        uint64_t any = 0, all = interval_bits(0, keys, 64 * w), full = all;
        for (int64_t l = 0; l < lanes; l++) {
            any |= bits->by_lane[l][w];
            all &= bits->by_lane[l][w];
        }
        visible |= any;
        missing |= all ^ full;
        hull->any[w] = any;
        hull->all[w] = all;
    }
    if (!visible)
        return ATTN__TILE_EMPTY;
    return missing ? ATTN__TILE_MIXED : ATTN__TILE_FULL;
}

/* Bits by lane, and what they come to. */
static attn__tile_state
bits_by_lane(attn__tile_bits *bits, const attn__visibility *v,
             const attn__sequence *s, const attn__lanes *lanes, int64_t key,
             int64_t keys, attn_dtype dtype, tile_hull *hull)
{
    bool inside = key >= lanes->all_low && key + keys <= lanes->all_high;

    ASSERT(keys > 0 && keys <= ATTN__MAX_KEYS);
    if (inside && !attn__has_elements(v))
        return ATTN__TILE_FULL;
    range_bits(bits, lanes, key, keys);
    if (v->segments)
        and_segments(bits, s, lanes, key, keys);
    if (v->blocks.block_k > 0)
        and_blocks(bits, &v->blocks, s, lanes, key, keys);
    for (int32_t m = 0; m < v->num_masks; m++)
        and_mask(bits, &v->masks[m], s, lanes, key, keys, dtype);
    return state_of(bits, lanes->n, keys, hull);
}

static void fill_by_key(attn__tile_bits *bits, const attn__visibility *v,
                        const attn__lanes *lanes, int64_t key, int64_t keys)
{
    if (keys <= FEW_KEYS && !attn__has_elements(v))
        ranges_by_key(bits, lanes, key, keys);
    else
        bits_by_key(bits, lanes->n, keys);
}

attn__tile_state attn__tile_visibility(attn__tile_bits *bits,
                                       const attn__visibility *v,
                                       const attn__sequence *s,
                                       const attn__lanes *lanes, int64_t key,
                                       int64_t keys, attn_dtype dtype)
{
    tile_hull hull;
    attn__tile_state state =
        bits_by_lane(bits, v, s, lanes, key, keys, dtype, &hull);

    if (state == ATTN__TILE_MIXED)
        fill_by_key(bits, v, lanes, key, keys);
    return state;
}

attn__tile_state attn__tile_trimmed(attn__tile_bits *bits,
                                    const attn__visibility *v,
                                    const attn__sequence *s,
                                    const attn__lanes *lanes, int64_t *key,
                                    int64_t *keys, attn_dtype dtype)
{
    tile_hull hull;
    attn__tile_state state =
        bits_by_lane(bits, v, s, lanes, *key, *keys, dtype, &hull);
    int64_t first = 0, end = *keys;
    bool same = true;

    if (state != ATTN__TILE_MIXED)
        return state;
    while (!(hull.any[first / 64] >> first % 64 & 1))
        first++;
    while (!(hull.any[(end - 1) / 64] >> (end - 1) % 64 & 1))
        end--;
    for (int64_t w = 0; 64 * w < *keys; w++)
        same &= hull.all[w] == interval_bits(first, end, 64 * w);
    if (same) {
        *key += first;
        *keys = end - first;
        for (int64_t l = 0; l < lanes->n; l++)
            for (int64_t w = 0; 64 * w < *keys; w++)
                bits->by_lane[l][w] = interval_bits(0, *keys, 64 * w);
        return ATTN__TILE_FULL;
    }
    /* Bits begin with the tile, so that only its end can be cut off. */
    *keys = end;
    fill_by_key(bits, v, lanes, *key, end);
    return state;
}

/* ----------------------------------------------------------- Validation -- */

static attn_status check_mask(const char *call, const char *name,
                              const attn_mask *mask, attn_dtype dtype,
                              const int64_t shape[4], attn__mask_view *view)
{
    static const char *const letters[] = {"B", "Hq", "Tq", "Tk"};
    const attn_tensor *t = &mask->view;
    int64_t bytes;
    attn_status status;

    if (mask->kind < ATTN_MASK_KEEP || mask->kind > ATTN_MASK_ADD)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: %s.kind is %" PRId32 "; it must be named: "
                          "ATTN_MASK_KEEP (1), ATTN_MASK_DROP (2) or "
                          "ATTN_MASK_ADD (3)",
                          call, name, mask->kind);
    if (mask->reserved != 0)
        return attn__fail(ATTN_ERR_UNSUPPORTED,
                          "%s: %s.reserved is %" PRId32 "; it must be 0", call,
                          name, mask->reserved);
    status = attn__check_tensor(call, name, t,
                                mask->kind == ATTN_MASK_ADD ? dtype : ATTN_U8);
    if (status)
        return status;
    bytes = (int64_t)attn__dtype_bytes(t->dtype);
    for (int a = 0; a < 4; a++) {
        if (t->shape[a] != shape[a] && t->shape[a] != 1)
            return attn__fail(ATTN_ERR_SHAPE,
                              "%s: %s has shape[%d] = %" PRId64
                              "; it must be %s = %" PRId64 " or 1 (broadcast)",
                              call, name, a, t->shape[a], letters[a], shape[a]);
        /* Without elements strides may be anything; none is used. */
        view->stride[a] =
            t->shape[a] == 1 || attn__count(t) == 0 ? 0 : t->stride[a] * bytes;
    }
    view->data = t->data;
    view->kind = mask->kind;
    return ATTN_OK;
}

attn_status attn__check_masks(const char *call, const char *name,
                              const attn_mask *masks, int32_t num_masks,
                              attn_dtype dtype, const int64_t shape[4],
                              attn__visibility *v)
{
    char indexed[40];

    if (num_masks < 0 || num_masks > ATTN_MAX_MASKS)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: num_masks is %" PRId32 "; it must be in [0, %d]",
                          call, num_masks, ATTN_MAX_MASKS);
    if (num_masks > 0 && !masks)
        return attn__fail(ATTN_ERR_NULL,
                          "%s: %s is NULL, but num_masks is %" PRId32, call,
                          name, num_masks);
    if (num_masks == 0 && masks)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: %s is not NULL, but num_masks is 0; say how "
                          "many there are",
                          call, name);
    for (int32_t m = 0; m < num_masks; m++) {
        attn_status status;
        (void)snprintf(indexed, sizeof indexed, "%.20s[%" PRId32 "]", name, m);
        status =
            check_mask(call, indexed, &masks[m], dtype, shape, &v->masks[m]);
        if (status)
            return status;
        v->num_add += masks[m].kind == ATTN_MASK_ADD;
    }
    v->num_masks = num_masks;
    return ATTN_OK;
}

attn_status attn_mask_init(attn_mask *mask, int32_t kind, attn_dtype dtype,
                           const void *data, int64_t batch, int64_t heads,
                           int64_t q_len, int64_t kv_len)
{
    static const char call[] = "attn_mask_init";
    attn_mask made = {0};
    attn_status status;

    if (!mask)
        return attn__fail(ATTN_ERR_NULL, "%s: mask is NULL", call);
    if (kind < ATTN_MASK_KEEP || kind > ATTN_MASK_ADD)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: kind is %" PRId32 "; it must be ATTN_MASK_KEEP "
                          "(1), ATTN_MASK_DROP (2) or ATTN_MASK_ADD (3)",
                          call, kind);
    if (kind == ATTN_MASK_ADD ? dtype != ATTN_F32 && dtype != ATTN_F64
                              : dtype != ATTN_U8)
        return attn__fail(ATTN_ERR_TYPE,
                          "%s: dtype is %" PRId32 "; KEEP and DROP masks are "
                          "U8 (3), ADD masks F32 (1) or F64 (2)",
                          call, dtype);
    status =
        attn_view_bhtd(&made.view, dtype, data, batch, heads, q_len, kv_len);
    if (status == ATTN_ERR_NULL)
        return attn__fail(status, "%s: data is NULL, but no size is 0", call);
    if (status)
        return attn__fail(status,
                          "%s: sizes (%" PRId64 ",%" PRId64 ",%" PRId64
                          ",%" PRId64 ") are negative or multiply to more than "
                          "2^63-1",
                          call, batch, heads, q_len, kv_len);
    made.kind = kind;
    *mask = made;
    return ATTN_OK;
}

/* ---------------------------------------------------- Builders and apply -- */

static attn_status check_built(const char *call, const attn_mask *mask)
{
    attn_status status;

    if (!mask)
        return attn__fail(ATTN_ERR_NULL, "%s: mask is NULL", call);
    if (mask->kind < ATTN_MASK_KEEP || mask->kind > ATTN_MASK_ADD)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: mask.kind is %" PRId32
                          "; it must be ATTN_MASK_KEEP (1), "
                          "ATTN_MASK_DROP (2) or ATTN_MASK_ADD (3)",
                          call, mask->kind);
    if (mask->reserved != 0)
        return attn__fail(ATTN_ERR_UNSUPPORTED,
                          "%s: mask.reserved is %" PRId32 "; it must be 0",
                          call, mask->reserved);
    status = attn__check_tensor(call, "mask.view", &mask->view,
                                mask->kind == ATTN_MASK_ADD ? 0 : ATTN_U8);
    if (status)
        return status;
    return attn__check_places(call, "mask.view", &mask->view);
}

static void write_entry(const attn_mask *mask, unsigned char *at, bool visible)
{
    if (mask->kind == ATTN_MASK_KEEP) {
        *at = visible;
    } else if (mask->kind == ATTN_MASK_DROP) {
        *at = !visible;
    } else if (mask->view.dtype == ATTN_F32) {
        const float x = visible ? 0.0f : -__builtin_inff();
        memcpy(at, &x, sizeof x);
    } else {
        const double x = visible ? 0.0 : -__builtin_inf();
        memcpy(at, &x, sizeof x);
    }
}

/* Writes the mask so that exactly the keys of each query's range are visible.
 * kv_lens NULL: rules alone. */
static void fill(const attn_mask *mask, const attn__visibility *v,
                 int64_t offset, const int64_t *kv_lens)
{
    const attn_tensor *t = &mask->view;
    int64_t bytes = (int64_t)attn__dtype_bytes(t->dtype);

    if (attn__count(t) == 0)
        return;
    for (int64_t b = 0; b < t->shape[0]; b++) {
        attn__sequence s = {.b = b, .q_len = t->shape[2], .offset = offset};
        s.kv_len = kv_lens ? kv_lens[b] : t->shape[3];
        for (int64_t h = 0; h < t->shape[1]; h++)
            for (int64_t i = 0; i < t->shape[2]; i++) {
                attn__range r = query_range(v, &s, i);
                unsigned char *row =
                    (unsigned char *)t->data +
                    bytes * (b * t->stride[0] + h * t->stride[1] +
                             i * t->stride[2]);
                for (int64_t j = 0; j < t->shape[3]; j++)
                    write_entry(mask, row + bytes * j * t->stride[3],
                                j >= r.low && j < r.high);
            }
    }
}

attn_status attn_mask_causal(const attn_mask *mask, int64_t offset)
{
    attn__visibility v = {.causal = true};
    attn_status status = check_built("attn_mask_causal", mask);

    if (!status)
        fill(mask, &v, offset, NULL);
    return status;
}

attn_status attn_mask_window(const attn_mask *mask, int64_t offset,
                             int64_t left, int64_t right)
{
    attn__visibility v = {.window = true, .left = left, .right = right};
    attn_status status = check_built("attn_mask_window", mask);

    if (!status && (left < -1 || right < -1))
        status = attn__fail(ATTN_ERR_VALUE,
                            "attn_mask_window: left is %" PRId64
                            ", right is %" PRId64
                            "; bounds are >= 0, or -1 for unbounded",
                            left, right);
    if (!status)
        fill(mask, &v, offset, NULL);
    return status;
}

attn_status attn_mask_padding(const attn_mask *mask, const int64_t *kv_lens)
{
    static const char call[] = "attn_mask_padding";
    attn__visibility v = {0};
    attn_status status = check_built(call, mask);

    if (status)
        return status;
    if (!kv_lens && mask->view.shape[0] > 0)
        return attn__fail(ATTN_ERR_NULL, "%s: kv_lens is NULL", call);
    for (int64_t b = 0; b < mask->view.shape[0]; b++)
        if (kv_lens[b] < 0 || kv_lens[b] > mask->view.shape[3])
            return attn__fail(ATTN_ERR_VALUE,
                              "%s: kv_lens[%" PRId64 "] is %" PRId64
                              "; it must be in [0, %" PRId64
                              "], the keys of the mask",
                              call, b, kv_lens[b], mask->view.shape[3]);
    fill(mask, &v, 0, kv_lens);
    return ATTN_OK;
}

#include "real_f32.h"
#include "mask_tmpl.h"
#include "real_f64.h"
#include "mask_tmpl.h"

attn_status attn_mask_apply(const attn_mask *masks, int32_t num_masks,
                            const attn_tensor *scores)
{
    static const char call[] = "attn_mask_apply";
    attn__visibility v = {0};
    attn_status status = attn__check_tensor(call, "scores", scores, 0);

    if (!status)
        status = attn__check_places(call, "scores", scores);
    if (!status)
        status = attn__check_masks(call, "masks", masks, num_masks,
                                   scores->dtype, scores->shape, &v);
    for (int32_t m = 0; m < num_masks && !status; m++)
        status = attn__check_overlap(call, "scores", scores, "a mask",
                                     &masks[m].view, false);
    if (status || attn__count(scores) == 0)
        return status;
    if (scores->dtype == ATTN_F32)
        attn__mask_apply_f32(&v, scores);
    else
        attn__mask_apply_f64(&v, scores);
    return ATTN_OK;
}
