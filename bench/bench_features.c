/*
 * What attention can be asked for beyond masks: one feature a problem, made
 * from inputs that are filled already, so that a problem with a feature and one
 * without have the same numbers.
 */
#define _POSIX_C_SOURCE 200112L

#include "bench.h"

#include <math.h>
#include <string.h>

/* Scores have a variance of 1, so this bends them. */
#define SOFTCAP 5.0
#define WINDOW 256
#define DOCUMENTS 8
#define BLOCK 64
/* One block of so many is visible. */
#define SPARSITY 10

const char *bench_feature_name(enum bench_feature feature)
{
    static const char *const names[NUM_FEATURES] = {
        "none",     "softcap",  "alibi",   "open-window", "window", "sink",
        "lse",      "diagnose", "weights", "segments",    "blocks", "starts",
        "pages-16", "pages-64", "bf16",    "ragged"};
    return names[feature];
}

/* A tensor of the type of q that stays with the problem. */
static attn_tensor *new_extra(struct bench_problem *p, int64_t batch,
                              int64_t heads, int64_t rows, int64_t columns)
{
    attn_tensor *t = &p->extra[p->num_extra++];
    int64_t count = batch * heads * rows * columns;
    void *data =
        bench_problem_take(p, (size_t)count * bench_item_bytes(p->shape.dtype));

    bench_fill(p->shape.dtype, data, count, 7);
    attn_view_bhtd(t, p->shape.dtype, data, batch, heads, rows, columns);
    return t;
}

static attn_tensor *per_row(struct bench_problem *p)
{
    const struct bench_shape *s = &p->shape;
    return new_extra(p, s->batch, s->heads, s->q_len, 1);
}

static void set_window(struct bench_problem *p, int64_t left, int64_t right)
{
    p->params.flags |= ATTN_SDPA_WINDOW;
    p->params.window_left = left;
    p->params.window_right = right;
}

static int64_t *new_lengths(struct bench_problem *p, int64_t value)
{
    int64_t *lens =
        bench_problem_take(p, (size_t)p->shape.batch * sizeof(int64_t));
    for (int64_t b = 0; b < p->shape.batch; b++)
        lens[b] = value;
    return lens;
}

/* ------------------------------------------------------- Who sees whom -- */

/* Documents of 1, 2, 3, ... parts of a sequence, one after the other. */
static int32_t *new_segments(struct bench_problem *p, int64_t len)
{
    const int64_t parts = DOCUMENTS * (DOCUMENTS + 1) / 2;
    int32_t *segments =
        bench_problem_take(p, (size_t)(p->shape.batch * len) * sizeof(int32_t));

    for (int64_t b = 0; b < p->shape.batch; b++)
        for (int64_t j = 0; j < len; j++) {
            int32_t document = 0;
            while ((document + 1) * (document + 2) / 2 * len <= j * parts)
                document++;
            segments[b * len + j] = document;
        }
    return segments;
}

/* The block of the diagonal, and others at random. */
static void set_blocks(struct bench_problem *p)
{
    attn_tensor *t = &p->extra[p->num_extra++];
    int64_t rows = (p->shape.q_len + BLOCK - 1) / BLOCK;
    int64_t columns = (p->shape.kv_len + BLOCK - 1) / BLOCK;
    unsigned char *data = bench_problem_take(p, (size_t)(rows * columns));
    uint64_t seed = 8;

    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            data[i * columns + j] =
                i == j || bench_random(&seed) % SPARSITY == 0;
    attn_view_bhtd(t, ATTN_U8, data, 1, 1, rows, columns);
    p->params.blocks = t;
    p->params.block_q = BLOCK;
    p->params.block_k = BLOCK;
}

/* ------------------------------------------------- How keys are stored -- */

/* Numbers from 0 to n-1 in random order. */
static int32_t *new_permutation(struct bench_problem *p, int64_t n)
{
    int32_t *order = bench_problem_take(p, (size_t)n * sizeof(int32_t));
    uint64_t seed = 9;

    for (int64_t a = 0; a < n; a++) {
        int64_t other = (int64_t)(bench_random(&seed) % ((uint64_t)a + 1));
        order[a] = order[other];
        order[other] = (int32_t)a;
    }
    return order;
}

/* The numbers of k or v in a pool (P,Hkv,page,D). */
static attn_status move_to_pages(struct bench_problem *p, attn_tensor *t,
                                 int64_t page, const int32_t *table)
{
    const struct bench_shape *s = &p->shape;
    const attn_tensor from = *t;
    size_t item = bench_item_bytes(s->dtype);
    int64_t width = t->shape[3], per_seq = (s->kv_len + page - 1) / page;
    int64_t pages = s->batch * per_seq;
    size_t row = (size_t)width * item;
    unsigned char *pool =
        bench_problem_take(p, (size_t)(pages * s->kv_heads * page) * row);

    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t g = 0; g < s->kv_heads; g++)
            for (int64_t j = 0; j < s->kv_len; j++) {
                int64_t at = table[b * per_seq + j / page];
                memcpy(pool +
                           (size_t)((at * s->kv_heads + g) * page + j % page) *
                               row,
                       (const unsigned char *)from.data +
                           (size_t)(b * from.stride[0] + g * from.stride[1] +
                                    j * from.stride[2]) *
                               item,
                       row);
            }
    return attn_view_bhtd(t, s->dtype, pool, pages, s->kv_heads, page, width);
}

static attn_status set_pages(struct bench_problem *p, int64_t page)
{
    const struct bench_shape *s = &p->shape;
    int64_t per_seq = (s->kv_len + page - 1) / page;
    int32_t *table = new_permutation(p, s->batch * per_seq);
    attn_status status = move_to_pages(p, &p->k, page, table);

    p->params.page_table = table;
    p->params.pages_per_seq = per_seq;
    p->params.kv_lens = new_lengths(p, s->kv_len);
    return status ? status : move_to_pages(p, &p->v, page, table);
}

/* k or v in 16 bits: the upper halves of its numbers. */
static void shorten(struct bench_problem *p, attn_tensor *t)
{
    int64_t count = t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3];
    const float *from = t->data;
    uint16_t *to = bench_problem_take(p, (size_t)count * sizeof(uint16_t));

    for (int64_t n = 0; n < count; n++) {
        uint32_t bits;
        memcpy(&bits, &from[n], sizeof(bits));
        to[n] = (uint16_t)(bits >> 16);
    }
    t->data = to;
    t->dtype = ATTN_BF16;
}

/* -------------------------------------------------------- Ragged batch -- */

/*
 * Sequence s of B has max(1, T u^3) tokens, with u = (s + 1/2) / B: half of
 * them have less than an eighth of the longest, the mean is a quarter. The
 * order is mixed up.
 */
static int64_t *new_skewed_lengths(struct bench_problem *p)
{
    const struct bench_shape *s = &p->shape;
    const int32_t *order = new_permutation(p, s->batch);
    int64_t *cu =
        bench_problem_take(p, (size_t)(s->batch + 1) * sizeof(int64_t));

    cu[0] = 0;
    for (int64_t b = 0; b < s->batch; b++) {
        double u = (order[b] + 0.5) / (double)s->batch;
        int64_t len = (int64_t)((double)s->q_len * u * u * u);
        cu[b + 1] = cu[b] + (len > 0 ? len : 1);
    }
    return cu;
}

/* The memory of the batch, of which less is used. */
static attn_status set_ragged(struct bench_problem *p)
{
    const struct bench_shape *s = &p->shape;
    attn_tensor *const tensors[] = {&p->q, &p->k, &p->v, &p->out};
    const int64_t *cu = new_skewed_lengths(p);
    attn_status status = ATTN_OK;

    for (int a = 0; a < 4 && !status; a++)
        status =
            attn_view_thd(tensors[a], s->dtype, tensors[a]->data, cu[s->batch],
                          tensors[a]->shape[1], tensors[a]->shape[3]);
    p->params.cu_q = cu;
    p->params.cu_k = cu;
    p->params.num_seqs = s->batch;
    p->params.align = ATTN_ALIGN_BOTTOM_RIGHT;
    p->params.q_offset = 0;
    return status;
}

/* ------------------------------------------------------------ Features -- */

static void ask_for_outputs(struct bench_problem *p)
{
    const struct bench_shape *s = &p->shape;

    if (s->feature == FEATURE_LSE)
        p->params.lse = per_row(p);
    if (s->feature == FEATURE_WEIGHTS)
        p->params.weights =
            new_extra(p, s->batch, s->heads, s->q_len, s->kv_len);
    if (s->feature == FEATURE_DIAGNOSTICS) {
        p->params.max_weight = per_row(p);
        p->params.effective_keys = per_row(p);
        p->params.entropy = per_row(p);
    }
}

attn_status bench_feature_apply(struct bench_problem *p)
{
    const struct bench_shape *s = &p->shape;
    attn_tensor *t;

    ask_for_outputs(p);
    switch (s->feature) {
    case FEATURE_SOFTCAP:
        p->params.softcap = SOFTCAP;
        break;
    case FEATURE_ALIBI:
        t = new_extra(p, 1, 1, 1, s->heads);
        p->params.alibi = t;
        return attn_alibi_slopes(t);
    case FEATURE_OPEN_WINDOW:
        set_window(p, s->kv_len, s->kv_len);
        break;
    case FEATURE_WINDOW:
        set_window(p, WINDOW - 1, 0);
        break;
    case FEATURE_SINK:
        p->params.sinks = new_extra(p, 1, 1, 1, s->heads);
        break;
    case FEATURE_SEGMENTS:
        p->params.q_segments = new_segments(p, s->q_len);
        p->params.kv_segments = new_segments(p, s->kv_len);
        break;
    case FEATURE_BLOCKS:
        set_blocks(p);
        break;
    case FEATURE_STARTS:
        p->params.kv_starts = new_lengths(p, s->kv_len / 2);
        break;
    case FEATURE_PAGES_16:
        return set_pages(p, 16);
    case FEATURE_PAGES_64:
        return set_pages(p, 64);
    case FEATURE_BF16:
        shorten(p, &p->k);
        shorten(p, &p->v);
        break;
    case FEATURE_RAGGED:
        return set_ragged(p);
    default:
        break;
    }
    return ATTN_OK;
}
