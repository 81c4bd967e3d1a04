/*
 * Scaled dot-product attention: the list of tasks.
 *
 * A block is some queries of one sequence and one key/value head: the G heads
 * of a group times some positions, one lane each (sdpa_tmpl.h computes it).
 * Blocks are independent; their edges depend on the shape and the BLAS only,
 * never on the number of threads or on the rest of the batch, so neither do
 * results. A task is one block or a strip of some that follow each other, which
 * share what is fetched and nothing else. Those with the most keys under causal
 * rules come first.
 *
 * Where a sequence has too few tasks for many threads but many keys (decoding,
 * short prompts over a long cache), the tiles of a block are divided into
 * splits, each a task of its own that leaves a partial result (output, maximum
 * and sum per lane), and partial results are merged in the order of the keys.
 */
#include "attn_internal.h"

#include "sdpa.h"

#include "check.h"
#include "cpu.h"
#include "status.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A block of so few lanes goes by rows, without GEMM, */
#define MAX_ROWS 8
/* if it has at least this many keys a lane: each row of scores is a loop of its
 * own, which 5 queries with 5 keys feel (1.24 us a call instead of 0.66). */
#define ROW_KEYS 8
/* One or two lanes always: packing them takes 16, or 8, whatever they are (12
 * heads of width 64: T = 1 0.63 of the time, 2 0.80, but 4 1.04); where the
 * products pack their operands, up to four (3 queries with 3 keys 0.66 of the
 * time, 4 with 4 0.87, 4 with 16 0.71, but 6 with 6 1.02). */
#define FEW_ROWS(blas) ((blas)->kind == ATTN__BLAS_SMALL ? 2 : 4)

/* Keys of a tile that goes by rows: as many as the bits of masks are made for,
 * as its quarters are the runs that are read in turn. */
#define ROW_TILE ATTN__MAX_KEYS

/* A sequence whose heads and blocks make this many tasks is not split. */
#define ENOUGH_TASKS 16
/* Splits aim at this many tasks, */
#define WANTED_TASKS 32
/* none with fewer keys than this: two products of 64 x 1024 x 64 take 80
 * microseconds on a core of 100 GFLOP/s, merging takes one. */
#define SPLIT_KEYS 1024
/* Blocks of one head that go through the same tiles together, so that K and V
 * are fetched, and copied if they lie apart, for so many lanes at a time. On
 * Emerald Rapids, (B,T,H,D), one thread, times of 128, 256, 512 lanes: T =
 * 1500, d = 64 1.06, 1, 0.97; in double 1.08, 1, 0.97; one block at a
 * time 1.28, */
#define STRIP_LANES 512
#define MAX_STRIP 16
/* as long as what they keep, Qt and Ot, takes no more than this each; */
#define STRIP_BYTES 262144
/* and as many threads have so many tasks each, as tasks are not alike. */
#define STRIP_TASKS 8
/* Rows of K and V that lie apart are copied, for a block alone or for some, if
 * all of a call's are this much (Emerald Rapids, 2 MiB of second-level cache a
 * core; the times are in sdpa_tmpl.h). */
#define COPY_BYTES 8388608
#define COPY_SHARED_BYTES 3145728
/* The backward pass keeps four such arrays, not two. */
#define BACKWARD_STRIP_LANES 256
/* Numbers of a row for its diagnostics: the largest weight, the sum of squared
 * weights, that of weights times scores, each relative to the maximum. */
#define MOMENTS 3

/* Keys whose sums a task makes: enough for its packed queries to be worth
 * while, few enough for many tasks. */
#define SUM_KEYS 1024

/* Tiles over a map of smaller blocks have this many keys. */
#define MIN_BLOCK_KEYS 32

#define LOG2_E 1.4426950408889634074

/* Partial results kept at a time: the most that one sequence has,
 * ENOUGH_TASKS - 1 + WANTED_TASKS, and room to join some sequences. */
#define MAX_PARTIALS 64

/* Sizes of scratch memory are products of a width, the lanes or keys of a tile
 * and MAX_PARTIALS; up to this width they are numbers. */
#define MAX_WIDTH (INT64_MAX / (MAX_PARTIALS * ATTN__MAX_KEYS))

/* Rows, and sizes of arrays over lanes, are padded to the widest vector. */
static int64_t lane_step(attn_dtype dtype)
{
    return dtype == ATTN_F32 ? ATTN__LANES_F32 : ATTN__LANES_F64;
}

/* The queries of a block are padded to this processor's, 32 bytes at least. */
static int64_t query_step(attn_dtype dtype)
{
    return lane_step(dtype) / (attn__cpu_level() >= ATTN__LEVEL_AVX512 ? 1 : 2);
}

/*
 * How a sequence is cut. A block holds whole queries, all heads of the group,
 * if they fit into the lanes of a tile; else one query and a part of its heads.
 */
typedef struct cut {
    int64_t queries;     /* of a block */
    int64_t heads;       /* of a block */
    int64_t head_blocks; /* per query */
    int64_t blocks;      /* per key/value head */
    int64_t splits;      /* of the keys, per block */
    int64_t tail;        /* queries of the last block, if it is cut off */
    int64_t strip;       /* blocks of a task */
} cut;

/*
 * Width of the band of keys that moves along with the query, by causal, window,
 * chunk, and, as far as one can tell, segments; 0 if all queries may see the
 * same.
 */
static int64_t band_of(const attn__visibility *v, const attn__sequence *s)
{
    const int64_t keys = s->kv_len - s->kv_begin;
    bool left = v->window && v->left >= 0 && v->left < keys;
    bool right = v->window && v->right >= 0 && v->right < keys;
    int64_t band = keys;

    if (!v->causal && !left && !right && v->chunk == 0 && !v->segments)
        return 0;
    if (left && (right || v->causal)) {
        int64_t ahead = v->causal ? 0 : v->right;
        band = v->left < keys - 1 - ahead ? v->left + 1 + ahead : keys;
    }
    if (v->chunk > 0)
        band = MIN(band, v->chunk);
    return v->segments ? MIN(band, 512) : band;
}

/*
 * Lanes of a block. Where what is seen moves along with the query, a block also
 * computes the corner between its first and its last query, and fewer lanes
 * waste less; but a kernel that packs has more to pack. With a cost of
 * (band + queries) (1 + 6 / lanes) the best is lanes^2 = 6 band group; 8, as
 * measured with OpenBLAS's AVX2 kernels, float, causal, T = 64..2048: 32 lanes
 * 1.35 times as fast as 192 at T = 128, 64 lanes 1.12 at 512, 96 1.06 at 1024.
 * Tiles of 64 lanes, which the small kernels and the limited BLAS have, were no
 * faster for being cut (T = 128: 0.99, 256: 0.97). With a map of blocks, about
 * as many queries as a block has.
 */
static int64_t lanes_of(const attn__sdpa *p, const attn__sequence *s,
                        int64_t group)
{
    int64_t band = band_of(&p->visibility, s), most = p->tile.lanes, lanes = 32;

    if (most <= 64)
        return most;
    if (p->visibility.blocks.block_k > 0 &&
        p->visibility.blocks.block_q <= most / group)
        most = MIN(MAX(p->visibility.blocks.block_q * group, 64), most);
    while (lanes < most && band > 0 && lanes * lanes / 8 / group < band)
        lanes += 16;
    return band > 0 ? MIN(lanes, most) : most;
}

static cut cut_sequence(const attn__sdpa *p, const attn__sequence *s)
{
    cut c;
    int64_t step = query_step(p->q.dtype);
    int64_t blocks, rest;

    c.queries = MAX(lanes_of(p, s, MAX(p->group, 1)) / MAX(p->group, 1), 1);
    c.head_blocks = attn__ceil_div(p->group, p->tile.lanes);
    c.heads = attn__ceil_div(p->group, MAX(c.head_blocks, 1));
    c.blocks = attn__ceil_div(s->q_len, c.queries) * c.head_blocks;
    c.tail = 0;
    /* One head, a last block of whole vectors and a few lanes more, as of 17 or
     * 33 queries: those few go by rows, up to 4 of 16 and 1 of 8, which costs
     * less than a padded vector of floats (T = 17: 0.86 of the time, with
     * vectors of 32 bytes as much); of doubles it costs more. */
    rest = s->q_len % c.queries;
    if (p->group == 1 && !p->blas_only && p->q.dtype == ATTN_F32 &&
        rest > step && rest % step > 0 && rest % step <= step * step / 64) {
        c.tail = rest % step;
        c.blocks++;
    }
    c.strip = 1;
    c.splits = 1;
    blocks = p->kv_heads * c.blocks;
    if (blocks > 0 && blocks < ENOUGH_TASKS && s->kv_len >= 2 * SPLIT_KEYS)
        c.splits =
            MIN(attn__ceil_div(WANTED_TASKS, blocks), s->kv_len / SPLIT_KEYS);
    return c;
}

/* Where the queries of a block begin; of one block after the last, the end. */
static int64_t block_begin(const cut *c, const attn__sequence *s, int64_t block)
{
    int64_t at = block / MAX(c->head_blocks, 1) * c->queries;

    if (c->tail > 0 && block == c->blocks - 1)
        return s->q_len - c->tail;
    return MIN(at, s->q_len);
}

/* One task, found from its number. */
typedef struct task {
    attn__sequence s;
    int64_t q_row, kv_row; /* where it starts in q and out, k and v */
    cut c;
    int64_t g, split;
    int64_t block, end_block; /* its blocks; in use, `block` is one of them */
    int64_t slot;             /* of the worker's memory for that block */
    int64_t number; /* among the tasks, or partial results, of its wave */
} task;

/* Are the queries of a head one block? */
static bool is_one_block(const task *t)
{
    return t->s.q_len <= t->c.queries;
}

/* Tasks of a head, but for splits. Small problems go without the division. */
static int64_t strips_of(const cut *c)
{
    return c->strip == 1 ? c->blocks : attn__ceil_div(c->blocks, c->strip);
}

/* Tasks of a sequence. */
static int64_t tasks_of(const attn__sdpa *p, const cut *c)
{
    return p->kv_heads * strips_of(c) * c->splits;
}

/* Tasks of a key/value head for the sums by key. */
static int64_t key_sum_parts(const attn__sdpa *p)
{
    return attn__ceil_div(p->kv_len, SUM_KEYS);
}

/* A run of the engine: the problem, its scratch memory, and the tasks at hand.
 */
typedef struct run {
    const attn__sdpa *p;
    int64_t *first_task; /* [batch + 1]: of each sequence, splits counted */
    cut *cuts;           /* [batch] */
    void *workers;       /* scratch memory of each worker, cut to pieces */
    void *partials; /* MAX_PARTIALS results, if any sequence may be split */
    void *stats;    /* maximum and 1/sum of each row, if weights are wanted */
    int64_t wave_start; /* number of the first task of this wave */
} run;

/* The sequence that task t belongs to: the last with first_task <= t. */
static int64_t find_sequence(const run *r, int64_t t)
{
    int64_t low = 0, high = r->p->batch;

    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (r->first_task[middle] <= t)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static task find_task(const run *r, int64_t t)
{
    int64_t b = find_sequence(r, t), strips;
    task k;

    k.s = attn__sdpa_sequence(r->p, b, &k.q_row, &k.kv_row);
    k.c = r->cuts[b];
    k.number = t - r->wave_start;
    t -= r->first_task[b];
    k.split = t % k.c.splits;
    t /= k.c.splits;
    /* The last queries see the most keys. */
    strips = strips_of(&k.c);
    k.block = (strips - 1 - t % strips) * k.c.strip;
    k.end_block = MIN(k.block + k.c.strip, k.c.blocks);
    k.slot = 0;
    k.g = t / strips;
    return k;
}

/* Elements of a partial result: output, maximum, sum, whether seen, and the
 * moments. */
static int64_t partial_elements(const attn__sdpa *p, int64_t lanes)
{
    return (p->v_width + 3 + (attn__wants_moments(p) ? MOMENTS : 0)) * lanes;
}

static int64_t most_lanes(const attn__sdpa *p)
{
    int64_t step = lane_step(p->q.dtype);
    int64_t rows;

    /* Of every smaller problem: the group may be larger there. */
    if (!attn__mul_i64(p->heads, p->q_len, &rows))
        return p->tile.lanes;
    return MIN(attn__round_up(MIN(rows, p->tile.lanes), step), p->tile.lanes);
}

/* Do blocks of a head go through tiles together? Kernels that pack have large
 * tiles in place of this. */
static bool has_strips(const attn__sdpa *p)
{
    return p->blas.kind == ATTN__BLAS_SMALL;
}

/* Are rows of K and V that lie apart copied, tile by tile, for so many blocks?
 * That pays if all of them together are more than a cache keeps. */
static bool copies_rows(const attn__sdpa *p, int64_t blocks)
{
    double rows = (double)p->batch * (double)p->kv_heads * (double)p->kv_len;
    double row =
        (double)(p->width + p->v_width) * (double)attn__dtype_bytes(p->k.dtype);

    return has_strips(p) &&
           rows * row >= (blocks > 1 ? COPY_SHARED_BYTES : COPY_BYTES);
}

/* The most blocks of a task, or of those that a backward task takes at a time,
 * for any width. */
static int64_t most_slots(const attn__sdpa *p, bool backward)
{
    int64_t lanes = backward ? BACKWARD_STRIP_LANES : STRIP_LANES, rows;

    if (!has_strips(p) ||
        (attn__mul_i64(p->heads, p->q_len, &rows) && rows <= p->tile.lanes))
        return 1;
    return MIN(lanes / p->tile.lanes, MAX_STRIP);
}

static int64_t most_strip(const attn__sdpa *p, bool backward)
{
    int64_t bytes = (int64_t)attn__dtype_bytes(p->q.dtype) * p->tile.lanes *
                    MAX(MAX(p->width, p->v_width), 1);
    int64_t slots = most_slots(p, backward);

    /* Small problems go without the division. */
    return slots == 1 ? 1 : MAX(MIN(slots, STRIP_BYTES / bytes), 1);
}

/* Elements of Qt, or of Ot, of all blocks of a strip, for widths up to this one
 * and most_strip(p) blocks: STRIP_BYTES, or one block. */
static int64_t strip_elements(const attn__sdpa *p, int64_t lanes, int64_t slots,
                              int64_t width)
{
    int64_t most = p->q.dtype == ATTN_F32 ? STRIP_BYTES / 4 : STRIP_BYTES / 8;

    return MAX(MIN(slots * lanes * width, most), lanes * width);
}

static bool may_split(const attn__sdpa *p)
{
    return p->kv_len >= 2 * SPLIT_KEYS;
}

static int storage_of(attn_dtype dtype)
{
    return dtype == ATTN_F16    ? ATTN__STORED_F16
           : dtype == ATTN_BF16 ? ATTN__STORED_BF16
                                : ATTN__STORED_SAME;
}

/* Where the rows of K or of V of one sequence and head lie. */
typedef struct key_rows {
    const unsigned char *first; /* key 0, or row 0 of the ring or the pool */
    int64_t row;                /* bytes from a row to the next */
    int64_t column;             /* bytes from an element to the next */
    const int32_t *pages;       /* of the sequence; NULL: not in pages */
    int64_t page_rows, page_bytes;
    int64_t ring_rows, ring_start; /* ring_rows 0: no ring */
} key_rows;

static key_rows find_rows(const attn__sdpa *p, const attn_tensor *t, int64_t b,
                          int64_t g, int64_t kv_row)
{
    int64_t bytes = (int64_t)attn__dtype_bytes(t->dtype);
    int64_t batch = p->cu_k || p->page_table ? 0
                    : p->kv_seqs             ? p->kv_seqs[b]
                                             : b;
    key_rows k = {.row = bytes * t->stride[2], .column = bytes * t->stride[3]};

    k.first = (const unsigned char *)t->data +
              bytes * (batch * t->stride[0] + g * t->stride[1] +
                       kv_row * t->stride[2]);
    if (p->page_table) {
        k.pages = p->page_table + b * p->pages_per_seq;
        k.page_rows = p->page_rows;
        k.page_bytes = bytes * t->stride[0];
        /* A page of one row: the next one is on the next page, if anywhere. */
        if (p->page_rows == 1)
            k.row = k.page_bytes;
    }
    if (p->ring_starts) {
        k.ring_rows = t->shape[2];
        k.ring_start = p->ring_starts[b];
    }
    return k;
}

/* The row of a key, and how many of the `wanted` keys from it on lie one
 * `row` after the other. */
static const unsigned char *key_row(const key_rows *k, int64_t key,
                                    int64_t wanted, int64_t *adjacent)
{
    int64_t a, rest;

    *adjacent = wanted;
    if (k->ring_rows > 0) {
        a = key + k->ring_start;
        a -= a >= k->ring_rows ? k->ring_rows : 0;
        *adjacent = MIN(wanted, k->ring_rows - a);
        return k->first + a * k->row;
    }
    if (!k->pages)
        return k->first + key * k->row;
    a = key / k->page_rows;
    rest = key % k->page_rows;
    *adjacent = k->page_rows - rest;
    /* Pages may follow each other in the pool too. */
    for (int64_t next = a + 1;
         *adjacent < wanted && k->page_bytes == k->page_rows * k->row &&
         k->pages[next] == k->pages[next - 1] + 1;
         next++)
        *adjacent += k->page_rows;
    *adjacent = MIN(*adjacent, wanted);
    return k->first + k->pages[a] * k->page_bytes + rest * k->row;
}

/* ------------------------------------------------------------- Gradients -- */

/* Of a sequence with fewer key/value heads than this, queries and keys are cut
 * into parts, to make so many tasks, */
#define BACKWARD_TASKS 16
/* but no more of them than this, and no more than one for so many keys: each
 * task packs the queries it has. */
#define MAX_PARTS 8
#define PART_KEYS 256

/* Sums that a head makes. */
enum { SUM_ALIBI, SUM_SINK, SUM_SCALE, HEAD_SUMS };

/* A run of the backward pass. */
typedef struct backward_run {
    run r; /* first_task is that of the wave at hand */
    const attn__backward *g;
    void *workers; /* what workers need besides */
    double *sums;  /* [batch * heads * HEAD_SUMS], if wanted */
    int64_t wave;
    int32_t mask; /* whose gradient is computed */
} backward_run;

static bool wants_head_sums(const attn__backward *g)
{
    return g->wants[ATTN__D_ALIBI] || g->wants[ATTN__D_SINKS] ||
           g->wants[ATTN__D_SCALE];
}

/* Are there sums over tiles of dz? */
static bool wants_sums(const attn__backward *g)
{
    for (int m = 0; m < ATTN_MAX_MASKS; m++)
        if (g->wants[ATTN__D_MASKS + m])
            return true;
    return g->wants[ATTN__D_SCALE];
}

/* A block has queries of one head, all blocks about as many; `splits` are the
 * parts of queries and keys, with about as many blocks each. */
static cut cut_backward(const attn__sdpa *p, const attn__sequence *s)
{
    int64_t lanes = lanes_of(p, s, 1);
    int64_t blocks = MAX(attn__ceil_div(s->q_len, lanes), 1);
    cut c = {.heads = 1, .head_blocks = p->group, .splits = 1};

    if (p->kv_heads > 0 && p->kv_heads < BACKWARD_TASKS) {
        int64_t parts = attn__ceil_div(BACKWARD_TASKS, p->kv_heads);
        parts = MIN(MIN(parts, MAX_PARTS), blocks);
        parts = MIN(parts, attn__ceil_div(s->kv_len, p->tile.keys));
        c.splits = MAX(MIN(parts, s->kv_len / PART_KEYS), 1);
    }
    blocks = attn__round_up(blocks, c.splits);
    c.queries = attn__round_up(attn__ceil_div(s->q_len, blocks),
                               query_step(p->q.dtype));
    c.queries = MAX(MIN(c.queries, lanes), 1);
    c.blocks = attn__ceil_div(s->q_len, c.queries) * p->group;
    return c;
}

/* The part of a sequence's head that a task of the wave has: its blocks, by
 * position, and its keys, whole tiles of them. */
typedef struct backward_part {
    task of;
    int64_t first_block, end_block;
    int64_t first_key, end_key;
} backward_part;

static backward_part find_part(const backward_run *r, int64_t index)
{
    const attn__sdpa *p = &r->g->p;
    int64_t b = find_sequence(&r->r, index);
    backward_part part = {.of = {.split = 0}};
    int64_t n, keys, queries, tiles, blocks;

    part.of.s = attn__sdpa_sequence(p, b, &part.of.q_row, &part.of.kv_row);
    part.of.c = r->r.cuts[b];
    n = part.of.c.splits;
    index -= r->r.first_task[b];
    part.of.g = index / n;
    keys = index % n;
    queries = (keys + r->wave) % n;
    blocks = part.of.c.blocks / p->group;
    part.first_block = blocks * queries / n;
    part.end_block = blocks * (queries + 1) / n;
    tiles = attn__ceil_div(part.of.s.kv_len, p->tile.keys);
    part.first_key = tiles * keys / n * p->tile.keys;
    part.end_key = MIN(tiles * (keys + 1) / n * p->tile.keys, part.of.s.kv_len);
    return part;
}

/* The numbers of a mask's gradient that a task has, and what is summed into
 * them: batches, heads, queries and keys. */
typedef struct mask_part {
    int64_t first[4], end[4];
    int64_t rows, keys; /* of the gradient */
} mask_part;

/* Parts of a mask's gradient along its queries (2) or keys (3). */
static int64_t mask_parts(const backward_run *r, int axis)
{
    const attn__tile *tile = &r->g->p.tile;
    int64_t n = r->g->gradient[ATTN__D_MASKS + r->mask].shape[axis];

    return n == 1 ? 1 : attn__ceil_div(n, axis == 2 ? tile->lanes : tile->keys);
}

static mask_part find_mask_part(const backward_run *r, int64_t index)
{
    const attn__sdpa *p = &r->g->p;
    const int64_t *shape = r->g->gradient[ATTN__D_MASKS + r->mask].shape;
    const int64_t full[4] = {p->batch, p->heads, p->q_len, p->kv_len};
    const int64_t sizes[4] = {1, 1, p->tile.lanes, p->tile.keys};
    mask_part part;

    for (int axis = 3; axis >= 0; axis--) {
        int64_t n = axis < 2 ? shape[axis] : mask_parts(r, axis);
        int64_t at = index % n * sizes[axis];
        index /= n;
        part.first[axis] = shape[axis] == 1 ? 0 : at;
        part.end[axis] =
            shape[axis] == 1 ? full[axis] : MIN(at + sizes[axis], shape[axis]);
    }
    part.rows = shape[2] == 1 ? 1 : part.end[2] - part.first[2];
    part.keys = shape[3] == 1 ? 1 : part.end[3] - part.first[3];
    return part;
}

#include "real_f32.h"
#include "sdpa_tmpl.h"
#include "sdpa_rows_tmpl.h"
#include "sdpa_tiles_tmpl.h"
#include "sdpa_tasks_tmpl.h"
#include "sdpa_backward_tmpl.h"
#include "real_f64.h"
#include "sdpa_tmpl.h"
#include "sdpa_rows_tmpl.h"
#include "sdpa_tiles_tmpl.h"
#include "sdpa_tasks_tmpl.h"
#include "sdpa_backward_tmpl.h"

/* Writes one number, 0 or -inf, to the rows [first, rows) of a tensor. */
static void fill_rows(const attn_tensor *t, int64_t b, int64_t first,
                      int64_t rows, bool neg_inf)
{
    if (t->dtype == ATTN_F32)
        attn__fill_rows_f32(t, b, first, rows, neg_inf ? -HUGE_VALF : 0.0f);
    else
        attn__fill_rows_f64(t, b, first, rows, neg_inf ? -HUGE_VAL : 0.0);
}

/* ---------------------------------------------------------------- Layout -- */

static void *cut_workers(const attn__sdpa *p, int64_t slots, attn__bump *bump)
{
    return p->q.dtype == ATTN_F32 ? attn__cut_workers_f32(p, slots, bump)
                                  : attn__cut_workers_f64(p, slots, bump);
}

/* Cuts (or, with base NULL, measures) the scratch memory of a run. */
static run cut_run(const attn__sdpa *p, attn__bump *bump)
{
    run r = {.p = p};
    size_t size = attn__dtype_bytes(p->q.dtype);
    int64_t rows;

    r.first_task = attn__bump_take(bump, p->batch + 1, sizeof(int64_t));
    r.cuts = attn__bump_take(bump, p->batch, sizeof(cut));
    r.workers = cut_workers(p, most_slots(p, false), bump);
    if (may_split(p))
        r.partials = attn__bump_take(
            bump, MAX_PARTIALS * partial_elements(p, most_lanes(p)), size);
    if (attn__wants_stats(p)) {
        rows = p->q.shape[0] * p->heads * p->q.shape[2];
        r.stats = attn__bump_take(bump, rows, 2 * size);
    }
    return r;
}

/* Is there nothing to write? Sizes may then be huge beside a 0. */
static bool is_nothing(const attn__sdpa *p)
{
    for (int a = 0; a < ATTN__EXTRAS; a++)
        if (p->wants[a] && attn__count(&p->extra[a]) > 0)
            return false;
    return attn__count(&p->out) == 0;
}

size_t attn__sdpa_bytes(const attn__sdpa *p)
{
    attn__bump bump = {NULL, 0};

    if (is_nothing(p))
        return ATTN__ALIGNMENT;
    if (p->width > MAX_WIDTH || p->v_width > MAX_WIDTH)
        return SIZE_MAX;
    (void)cut_run(p, &bump);
    return bump.bytes;
}

/* ------------------------------------------------------------------ Run -- */

/* Rows at and beyond a sequence's queries: zeros, and -inf for the LSE and the
 * final scores. Ragged outputs by row have none. */
static void write_absent_rows(const attn__sdpa *p)
{
    static const attn__extra by_row[] = {ATTN__LSE, ATTN__MAX_WEIGHT,
                                         ATTN__EFFECTIVE_KEYS, ATTN__ENTROPY};
    static const attn__extra by_score[] = {ATTN__WEIGHTS, ATTN__WEIGHTS_MEAN,
                                           ATTN__SCORES_RAW,
                                           ATTN__SCORES_CAPPED, ATTN__SCORES};

    for (int64_t b = 0; b < p->batch; b++) {
        int64_t q_row, kv_row;
        attn__sequence s = attn__sdpa_sequence(p, b, &q_row, &kv_row);
        if (s.q_len == p->q_len)
            continue;
        if (!p->cu_q)
            fill_rows(&p->out, b, s.q_len, p->q_len, false);
        for (size_t a = 0; !p->cu_q && a < sizeof by_row / sizeof *by_row; a++)
            if (p->wants[by_row[a]])
                fill_rows(&p->extra[by_row[a]], b, s.q_len, p->q_len,
                          by_row[a] == ATTN__LSE);
        for (size_t a = 0; a < sizeof by_score / sizeof *by_score; a++)
            if (p->wants[by_score[a]])
                fill_rows(&p->extra[by_score[a]], b, s.q_len, p->q_len,
                          by_score[a] == ATTN__SCORES);
    }
}

static void count_tasks(run *r)
{
    const attn__sdpa *p = r->p;
    int64_t most = most_strip(p, false), blocks = 0;

    for (int64_t b = 0; b < p->batch; b++) {
        int64_t q_row, kv_row;
        attn__sequence s = attn__sdpa_sequence(p, b, &q_row, &kv_row);
        r->cuts[b] = cut_sequence(p, &s);
        blocks += p->kv_heads * r->cuts[b].blocks;
    }
    if (p->threads > 1)
        most = MAX(MIN(most, blocks / p->threads / STRIP_TASKS), 1);
    r->first_task[0] = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        cut *c = &r->cuts[b];
        /* Of one length. */
        if (most > 1 && c->splits == 1 && c->head_blocks == 1 && c->blocks > 0)
            c->strip =
                attn__ceil_div(c->blocks, attn__ceil_div(c->blocks, most));
        r->first_task[b + 1] = r->first_task[b] + tasks_of(p, c);
    }
}

static bool is_split(const run *r, int64_t b)
{
    return r->cuts[b].splits > 1;
}

/* The end of the wave that starts with sequence b: all that follow and are not
 * split either, or as many that are as there is room for partial results. */
static int64_t wave_end(const run *r, int64_t b, bool split)
{
    int64_t end = b + 1;

    while (
        end < r->p->batch && is_split(r, end) == split &&
        (!split || r->first_task[end + 1] - r->first_task[b] <= MAX_PARTIALS))
        end++;
    return end;
}

/* The bodies of the passes over a type. */
typedef struct passes {
    attn__body_fn compute, merge, weights, scores, key_sums;
} passes;

static const passes passes_f32 = {attn__compute_task_f32, attn__merge_task_f32,
                                  attn__weights_task_f32, attn__scores_task_f32,
                                  attn__key_sums_task_f32};
static const passes passes_f64 = {attn__compute_task_f64, attn__merge_task_f64,
                                  attn__weights_task_f64, attn__scores_task_f64,
                                  attn__key_sums_task_f64};

static void run_all(const attn__executor *executor, run *r, const passes *f)
{
    const attn__sdpa *p = r->p;
    attn__executor e = *executor;

    e.num_threads = p->threads;
    for (int64_t b = 0; b < p->batch;) {
        bool split = r->partials && is_split(r, b);
        int64_t end = r->partials ? wave_end(r, b, split) : p->batch;
        int64_t tasks = r->first_task[end] - r->first_task[b];
        r->wave_start = r->first_task[b];
        attn__parallel_for(&e, tasks, f->compute, r);
        if (split)
            attn__parallel_for(&e, tasks, f->merge, r);
        b = end;
    }
    r->wave_start = 0;
    if (p->wants[ATTN__WEIGHTS] || p->wants[ATTN__WEIGHTS_MEAN])
        attn__parallel_for(&e, r->first_task[p->batch], f->weights, r);
    if (attn__wants_scores(p))
        attn__parallel_for(&e, r->first_task[p->batch], f->scores, r);
    if (p->wants[ATTN__KEY_SUMS])
        attn__parallel_for(&e, p->batch * p->kv_heads * key_sum_parts(p),
                           f->key_sums, r);
}

void attn__sdpa_run(const attn__executor *executor, const attn__sdpa *p,
                    void *work)
{
    attn__bump bump = {work, 0};
    run r;

    if (is_nothing(p))
        return;
    if (p->heads == 0) {
        /* The mean of no heads is taken as that of an empty row. */
        for (int64_t b = 0; b < p->batch && p->wants[ATTN__WEIGHTS_MEAN]; b++)
            fill_rows(&p->extra[ATTN__WEIGHTS_MEAN], b, 0, p->q_len, false);
        return;
    }
    r = cut_run(p, &bump);
    write_absent_rows(p);
    count_tasks(&r);
    run_all(executor, &r, p->q.dtype == ATTN_F32 ? &passes_f32 : &passes_f64);
}

/* -------------------------------------------------------------- Backward -- */

static void *cut_backward_workers(const attn__backward *g, attn__bump *bump)
{
    return g->p.q.dtype == ATTN_F32 ? attn__cut_backward_workers_f32(g, bump)
                                    : attn__cut_backward_workers_f64(g, bump);
}

/* Cuts (or, with base NULL, measures) the scratch memory. */
static backward_run cut_backward_run(const attn__backward *g, attn__bump *bump)
{
    const attn__sdpa *p = &g->p;
    backward_run r = {.r = {.p = p}, .g = g};

    r.r.first_task = attn__bump_take(bump, p->batch + 1, sizeof(int64_t));
    r.r.cuts = attn__bump_take(bump, p->batch, sizeof(cut));
    r.r.workers = cut_workers(p, most_slots(p, true), bump);
    r.workers = cut_backward_workers(g, bump);
    if (wants_head_sums(g))
        r.sums = attn__bump_take(bump, p->batch * p->heads,
                                 HEAD_SUMS * sizeof(double));
    return r;
}

/* Is there nothing to write? Sizes may then be huge beside a 0. */
static bool is_no_gradient(const attn__backward *g)
{
    for (int a = 0; a < ATTN__GRADIENTS; a++)
        if (g->wants[a] && attn__count(&g->gradient[a]) > 0)
            return false;
    return true;
}

/* Without queries nothing is computed: all sums are of nothing. Heads and
 * sequences may be many then, as no memory goes with them. */
static bool is_empty(const attn__backward *g)
{
    return g->p.heads == 0 || g->p.batch == 0 || g->p.q_len == 0;
}

size_t attn__backward_bytes(const attn__backward *g)
{
    attn__bump bump = {NULL, 0};
    int64_t heads;

    if (is_no_gradient(g) || is_empty(g))
        return ATTN__ALIGNMENT;
    if (g->p.width > MAX_WIDTH || g->p.v_width > MAX_WIDTH ||
        !attn__mul_i64(g->p.batch, g->p.heads, &heads))
        return SIZE_MAX;
    (void)cut_backward_run(g, &bump);
    return bump.bytes;
}

/* Zeros in the rows that sequences have, where nothing is added. */
static void clear_gradients(const attn__backward *g)
{
    const attn__sdpa *p = &g->p;

    for (int a = 0; a < ATTN__GRADIENTS; a++) {
        const attn_tensor *t = &g->gradient[a];
        const int64_t *cu = a == ATTN__D_Q                     ? p->cu_q
                            : a == ATTN__D_K || a == ATTN__D_V ? p->cu_k
                                                               : NULL;
        if (!g->wants[a] || g->adds[a] || attn__count(t) == 0)
            continue;
        for (int64_t b = 0; b < t->shape[0]; b++)
            fill_rows(t, b, cu ? cu[0] : 0, cu ? cu[p->batch] : t->shape[2],
                      false);
    }
}

/* The tasks of a wave, counted; returns how many. */
static int64_t count_wave(backward_run *r)
{
    const attn__sdpa *p = &r->g->p;
    int64_t *first = r->r.first_task;

    first[0] = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        int64_t n = r->r.cuts[b].splits;
        first[b + 1] = first[b] + (r->wave < n ? p->kv_heads * n : 0);
    }
    return first[p->batch];
}

/* The bodies of the passes over a type. */
typedef struct backward_passes {
    attn__body_fn compute, heads, mask;
    void (*put_head_sums)(const backward_run *);
} backward_passes;

static const backward_passes backward_f32 = {
    attn__backward_task_f32, attn__head_task_f32, attn__mask_task_f32,
    attn__put_head_sums_f32};
static const backward_passes backward_f64 = {
    attn__backward_task_f64, attn__head_task_f64, attn__mask_task_f64,
    attn__put_head_sums_f64};

static void run_backward(const attn__executor *executor, backward_run *r,
                         const backward_passes *f)
{
    const attn__backward *g = r->g;
    attn__executor e = *executor;
    int64_t tasks;

    e.num_threads = g->p.threads;
    if (g->wants[ATTN__D_Q] || g->wants[ATTN__D_K] || g->wants[ATTN__D_V])
        while ((tasks = count_wave(r)) > 0) {
            attn__parallel_for(&e, tasks, f->compute, r);
            r->wave++;
        }
    if (wants_head_sums(g)) {
        attn__parallel_for(&e, g->p.batch * g->p.heads, f->heads, r);
        f->put_head_sums(r);
    }
    for (r->mask = 0; r->mask < ATTN_MAX_MASKS; r->mask++) {
        const attn_tensor *t = &g->gradient[ATTN__D_MASKS + r->mask];
        if (g->wants[ATTN__D_MASKS + r->mask] && attn__count(t) > 0)
            attn__parallel_for(&e,
                               t->shape[0] * t->shape[1] * mask_parts(r, 2) *
                                   mask_parts(r, 3),
                               f->mask, r);
    }
}

void attn__backward_run(const attn__executor *executor, const attn__backward *g,
                        void *work)
{
    attn__bump bump = {work, 0};
    backward_run r;

    if (is_no_gradient(g))
        return;
    if (is_empty(g)) {
        clear_gradients(g);
        return;
    }
    r = cut_backward_run(g, &bump);
    for (int64_t b = 0; b < g->p.batch; b++) {
        int64_t q_row, kv_row;
        attn__sequence s = attn__sdpa_sequence(&g->p, b, &q_row, &kv_row);
        r.r.cuts[b] = cut_backward(&g->p, &s);
    }
    run_backward(executor, &r,
                 g->p.q.dtype == ATTN_F32 ? &backward_f32 : &backward_f64);
}
