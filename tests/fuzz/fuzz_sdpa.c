/*
 * fuzz_sdpa.c - bytes become a call of attn_sdpa: sizes, strides, masks,
 * flags, lengths, struct_size and the kinds of numbers in the inputs. What is
 * accepted must agree with the oracle (ref.h); what is refused must be refused
 * alike by all four calls and leave the outputs as they were. What is left of
 * the bytes becomes a call of attn_sdpa_backward for what attn_sdpa gave.
 *
 * libFuzzer, on the strict CBLAS so that the sanitizers see everything:
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -Iinclude -Isrc -Itests \
 *       tests/fuzz/fuzz_sdpa.c tests/{ref,ref_backward,compare,tensors}.c \
 *       src/[a-z]*.c \
 *       tests/stub/stub_cblas.c -lcmocka -lm -lpthread -ldl -o fuzz_sdpa
 *   mkdir -p found && ./fuzz_sdpa -max_len=256 found tests/fuzz/corpus
 *
 * With -DFUZZ_REPLAY and without -fsanitize=fuzzer it is a plain program that
 * runs the files named on its command line, for CI and for debuggers.
 */
#include "compare.h"
#include "ref.h"
#include "tensors.h"

#include "attn.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- bytes ---- */

struct bytes {
    const uint8_t *at;
    size_t left;
};

/* The next byte; 0 when there are no more. */
static unsigned int next(struct bytes *s)
{
    if (s->left == 0)
        return 0;
    s->left--;
    return *s->at++;
}

static int64_t below(struct bytes *s, int64_t n)
{
    return (int64_t)next(s) % n;
}

static bool one_in(struct bytes *s, int64_t n)
{
    return below(s, n) == n - 1;
}

static rng next_rng(struct bytes *s)
{
    const uint64_t high = next(s);
    return rng_make(high << 8 | next(s), 0);
}

/* Mostly small, so that tails dominate, at times past a tile. */
static int64_t next_size(struct bytes *s)
{
    const int64_t kind = below(s, 8);
    if (kind < 5)
        return below(s, 9);
    return kind < 7 ? below(s, 70) : 2 * below(s, 200);
}

/* ---- one call ---- */

#define MOST_SEQS 4

struct fuzzed {
    attn_sdpa_params *params; /* in a block of exactly its struct_size */
    tensor q, k, v, out, lse, weights, mean, mask_memory[ATTN_MAX_MASKS];
    tensor alibi, sinks, blocks, raw, capped, scores, key_sums;
    tensor max_weight, effective_keys, entropy;
    attn_tensor out_view;
    attn_mask masks[ATTN_MAX_MASKS];
    int64_t q_offsets[MOST_SEQS], prefix_lens[MOST_SEQS];
    int64_t q_lens[MOST_SEQS], kv_lens[MOST_SEQS];
    int64_t cu_q[MOST_SEQS + 1], cu_k[MOST_SEQS + 1];
    int64_t kv_starts[MOST_SEQS], kv_offsets[MOST_SEQS];
    int64_t ring_starts[MOST_SEQS];
    int32_t *q_segments, *kv_segments, *page_table; /* from malloc, or NULL */
    int64_t batch, q_len, kv_len; /* of the masks and arrays */
    bool tail_is_zero, in_place, ordinary;
};

/* Numbers of one kind, at times with a guest that is not finite. Returns
 * whether they are of ordinary size. */
static bool fill(struct bytes *s, const attn_tensor *t, int64_t kinds)
{
    static const double factors[] = {1.0, 1.0, 8.0, 0.0, 1e-20, 1e4};
    static const double guests[] = {(double)NAN, (double)INFINITY,
                                    -(double)INFINITY};
    rng r = next_rng(s);
    const int64_t kind = below(s, kinds);
    tensor_normal(t, &r, factors[kind < 6 ? kind : 0]);
    const bool empty =
        t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3] == 0;
    if (kind >= 7 && !empty)
        tensor_set(t, below(s, t->shape[0]), below(s, t->shape[1]),
                   below(s, t->shape[2]), below(s, t->shape[3]),
                   guests[kind - 7]);
    return kind < 2 || kind == 6;
}

static tensor make(struct bytes *s, int use, attn_dtype dtype, int64_t a,
                   int64_t b, int64_t c, int64_t d)
{
    if (below(s, 3) == 0)
        return tensor_make(dtype, a, b, c, d);
    rng r = next_rng(s);
    return tensor_scattered(&r, use, dtype, a, b, c, d);
}

/* A length in [0, most], now and then one that is not. */
static int64_t next_length(struct bytes *s, int64_t most)
{
    const int64_t n = below(s, 256);
    if (n == 255)
        return most + 1;
    if (n == 254)
        return -1;
    return n % (most + 1);
}

static void next_cumulative(struct bytes *s, int64_t *cu, int64_t n,
                            int64_t total)
{
    cu[0] = one_in(s, 4) ? below(s, total + 1) : 0;
    for (int64_t i = 1; i <= n; i++) {
        const int64_t rest = total - cu[i - 1];
        cu[i] = cu[i - 1] + (rest > 0 ? below(s, rest + 1) : 0);
    }
    if (one_in(s, 32))
        cu[n] = next_length(s, total);
}

static void next_masks(struct bytes *s, struct fuzzed *f, int64_t heads)
{
    attn_sdpa_params *p = f->params;
    p->num_masks = (int32_t)(one_in(s, 2) ? below(s, ATTN_MAX_MASKS + 1) : 0);
    if (p->num_masks > 0)
        p->masks = f->masks;
    for (int32_t n = 0; n < p->num_masks; n++) {
        const int64_t full[4] = {f->batch, heads, f->q_len, f->kv_len};
        int64_t size[4];
        attn_mask *m = &f->masks[n];
        m->kind = (int32_t)below(s, 3) + 1;
        for (int dim = 0; dim < 4; dim++)
            size[dim] = one_in(s, 3) ? 1 : full[dim];
        f->mask_memory[n] =
            make(s, TENSOR_INPUT,
                 m->kind == ATTN_MASK_ADD ? f->q.view.dtype : ATTN_U8, size[0],
                 size[1], size[2], size[3]);
        m->view = f->mask_memory[n].view;
        rng r = next_rng(s);
        const int64_t hidden = below(s, 5);
        for (int64_t b = 0; b < size[0]; b++)
            for (int64_t h = 0; h < size[1]; h++)
                for (int64_t i = 0; i < size[2]; i++)
                    for (int64_t j = 0; j < size[3]; j++) {
                        const bool hide = rng_int(&r, 0, 3) < hidden;
                        double value = hide == (m->kind == ATTN_MASK_DROP);
                        if (m->kind == ATTN_MASK_ADD)
                            value = hide ? -(double)INFINITY : rng_normal(&r);
                        tensor_set(&m->view, b, h, i, j, value);
                    }
    }
}

static void next_rules(struct bytes *s, struct fuzzed *f)
{
    static const double scales[] = {0.0, 1.0, -0.5, 3.0, 1e-3};
    attn_sdpa_params *p = f->params;
    p->causal = one_in(s, 2);
    if (one_in(s, 3))
        p->flags |= ATTN_SDPA_BLAS_ONLY;
    p->align = (int32_t)below(s, 4);
    if (p->align == ATTN_ALIGN_OFFSET) {
        p->q_offset = one_in(s, 3) ? 0 : below(s, 40) - 20;
        if (p->q_offset == 0)
            p->q_offsets = f->q_offsets;
    }
    if (one_in(s, 3)) {
        p->flags |= ATTN_SDPA_WINDOW;
        p->window_left = below(s, 12) - 1;
        p->window_right = below(s, 12) - 1;
        p->keep_first = below(s, 4);
    }
    if (!f->ordinary && one_in(s, 4)) {
        p->flags |= ATTN_SDPA_SCALE;
        p->scale = scales[below(s, 5)];
    }
    if (one_in(s, 5))
        p->chunk = below(s, 9);
    if (p->causal && one_in(s, 3))
        p->prefix_lens = f->prefix_lens;
    for (int n = 0; n < MOST_SEQS; n++) {
        f->q_offsets[n] = below(s, 40) - 20;
        f->prefix_lens[n] = next_length(s, f->kv_len);
    }
}

static void next_lengths(struct bytes *s, struct fuzzed *f)
{
    attn_sdpa_params *p = f->params;
    f->batch = f->q.view.shape[0];
    f->q_len = f->q.view.shape[2];
    f->kv_len = f->k.view.shape[2];
    if (f->batch == 1 && one_in(s, 3)) {
        p->num_seqs = below(s, MOST_SEQS) + 1;
        next_cumulative(s, f->cu_q, p->num_seqs, f->q_len);
        next_cumulative(s, f->cu_k, p->num_seqs, f->kv_len);
        p->cu_q = f->cu_q;
        p->cu_k = f->cu_k;
        f->batch = p->num_seqs;
        /* Masks are indexed inside a sequence, so they fit the longest. */
        f->q_len = f->kv_len = 0;
        for (int64_t n = 0; n < p->num_seqs; n++) {
            const int64_t q = f->cu_q[n + 1] - f->cu_q[n];
            const int64_t k = f->cu_k[n + 1] - f->cu_k[n];
            f->q_len = q > f->q_len ? q : f->q_len;
            f->kv_len = k > f->kv_len ? k : f->kv_len;
        }
        return;
    }
    if (one_in(s, 3))
        p->q_lens = f->q_lens;
    if (one_in(s, 3))
        p->kv_lens = f->kv_lens;
    for (int n = 0; n < MOST_SEQS; n++) {
        f->q_lens[n] = next_length(s, f->q_len);
        f->kv_lens[n] = next_length(s, f->kv_len);
    }
}

/* ---- the fields after the first version of the struct: read after all else,
 * so that inputs found without them keep their meaning ---- */

/* k and v in 16 bits: the same numbers, rounded. */
static void next_storage(struct bytes *s, struct fuzzed *f)
{
    const attn_dtype dtype = one_in(s, 2) ? ATTN_BF16 : ATTN_F16;
    tensor *const stored[] = {&f->k, &f->v};
    for (int n = 0; n < 2; n++) {
        const int64_t *size = stored[n]->view.shape;
        const tensor t =
            make(s, TENSOR_INPUT, dtype, size[0], size[1], size[2], size[3]);
        tensor_assign(&t.view, &stored[n]->view);
        tensor_free(stored[n]);
        *stored[n] = t;
        if (one_in(s, 32)) /* one of them only */
            return;
    }
}

static int64_t common_divisor(int64_t a, int64_t b)
{
    return b == 0 ? a : common_divisor(b, a % b);
}

/* The keys in pages, of a size that divides what the masks were made for. */
static void next_pages(struct bytes *s, struct fuzzed *f)
{
    attn_sdpa_params *p = f->params;
    const int64_t page = common_divisor(below(s, 64) + 1, f->kv_len);
    const int64_t row = f->kv_len / page, pages = below(s, 16);
    const int64_t heads = f->k.view.shape[1];
    const int64_t width = f->k.view.shape[3], v_width = f->v.view.shape[3];
    const attn_dtype dtype = f->k.view.dtype;
    tensor_free(&f->k);
    tensor_free(&f->v);
    f->k = make(s, TENSOR_INPUT, dtype, pages, heads, page, width);
    f->v = make(s, TENSOR_INPUT, dtype, pages, heads, page, v_width);
    fill(s, &f->k.view, 10);
    fill(s, &f->v.view, 8);
    p->pages_per_seq = one_in(s, 32) ? below(s, 8) - 2 : row;
    if (p->pages_per_seq >= 0)
        f->kv_len = p->pages_per_seq * page;
    const int64_t n = f->batch * (p->pages_per_seq > 0 ? p->pages_per_seq : 0);
    f->page_table = malloc((size_t)n * sizeof *f->page_table + 1);
    if (f->page_table == NULL)
        abort();
    /* In [0,pages), but now and then one that is not. */
    for (int64_t i = 0; i < n; i++)
        f->page_table[i] = (int32_t)next_length(s, pages > 0 ? pages - 1 : 0);
    p->page_table = f->page_table;
    p->cu_k = one_in(s, 32) ? p->cu_k : NULL;
    p->kv_lens = one_in(s, 32) ? p->kv_lens : f->kv_lens;
    for (int b = 0; b < MOST_SEQS; b++)
        f->kv_lens[b] = next_length(s, f->kv_len);
}

static void next_places(struct bytes *s, struct fuzzed *f)
{
    attn_sdpa_params *p = f->params;
    if (one_in(s, 4))
        next_pages(s, f);
    if (one_in(s, 5))
        p->ring_starts = f->ring_starts;
    if (one_in(s, 4))
        p->kv_starts = f->kv_starts;
    if (one_in(s, 5))
        p->kv_offsets = f->kv_offsets;
    for (int b = 0; b < MOST_SEQS; b++) {
        f->ring_starts[b] = next_length(s, f->kv_len > 0 ? f->kv_len - 1 : 0);
        f->kv_starts[b] = next_length(s, f->kv_len);
        f->kv_offsets[b] = below(s, 64) - 8;
    }
}

/* Slopes or sinks, at times of a shape that is neither. */
static tensor next_per_head(struct bytes *s, const struct fuzzed *f)
{
    const int64_t heads = f->q.view.shape[1];
    const attn_dtype dtype = f->q.view.dtype;
    tensor t;
    if (one_in(s, 2))
        t = make(s, TENSOR_INPUT, dtype, f->batch, heads, 1, 1);
    else
        t = make(s, TENSOR_INPUT, dtype, 1, 1, 1,
                 one_in(s, 32) ? heads + 1 : heads);
    fill(s, &t.view, 9); /* NaN may be a guest */
    return t;
}

static int32_t *next_segments(struct bytes *s, int64_t n)
{
    int32_t *segments = malloc((size_t)n * sizeof *segments + 1);
    rng r = next_rng(s);
    const int64_t kinds = below(s, 4), step = below(s, 8) + 1;
    if (segments == NULL)
        abort();
    for (int64_t i = 0; i < n; i++)
        segments[i] = (int32_t)(kinds ? rng_int(&r, 0, kinds) - 1 : i / step);
    return segments;
}

static void next_blocks(struct bytes *s, struct fuzzed *f)
{
    attn_sdpa_params *p = f->params;
    const int64_t heads = f->q.view.shape[1];
    p->block_q = next_length(s, 70);
    p->block_k = next_length(s, 70);
    const int64_t q = p->block_q > 0 ? p->block_q : 1;
    const int64_t k = p->block_k > 0 ? p->block_k : 1;
    f->blocks = make(s, TENSOR_INPUT, ATTN_U8, one_in(s, 2) ? f->batch : 1,
                     one_in(s, 2) ? heads : 1, (f->q_len + q - 1) / q,
                     (f->kv_len + k - 1) / k + one_in(s, 32));
    rng r = next_rng(s);
    const int64_t hidden = below(s, 5);
    const int64_t *n = f->blocks.view.shape;
    for (int64_t b = 0; b < n[0]; b++)
        for (int64_t h = 0; h < n[1]; h++)
            for (int64_t i = 0; i < n[2]; i++)
                for (int64_t j = 0; j < n[3]; j++)
                    tensor_set(&f->blocks.view, b, h, i, j,
                               rng_int(&r, 0, 3) < hidden ? 0.0 : 1.0);
    p->blocks = &f->blocks.view;
}

static void next_added(struct bytes *s, struct fuzzed *f)
{
    static const double caps[] = {2.0, 50.0, 1e-3, 1e30, -1.0, (double)NAN};
    attn_sdpa_params *p = f->params;
    if (one_in(s, 4))
        p->softcap = caps[below(s, one_in(s, 8) ? 6 : 4)];
    if (one_in(s, 4)) {
        f->alibi = next_per_head(s, f);
        p->alibi = &f->alibi.view;
    }
    if (one_in(s, 4)) {
        f->sinks = next_per_head(s, f);
        p->sinks = &f->sinks.view;
    }
    if (one_in(s, 4)) {
        const int64_t b = f->batch;
        f->q_segments =
            next_segments(s, p->cu_q ? f->q.view.shape[2] : b * f->q_len);
        f->kv_segments =
            next_segments(s, p->cu_k ? f->k.view.shape[2] : b * f->kv_len);
        p->q_segments = f->q_segments;
        p->kv_segments = one_in(s, 32) ? NULL : f->kv_segments;
    }
    if (one_in(s, 4))
        next_blocks(s, f);
}

static void next_output(struct bytes *s, const struct fuzzed *f, tensor *t,
                        const attn_tensor **field, int64_t b, int64_t i,
                        int64_t j)
{
    if (!one_in(s, 4))
        return;
    *t = make(s, TENSOR_OUTPUT, f->q.view.dtype, b, f->q.view.shape[1], i, j);
    *field = &t->view;
}

static void next_later_fields(struct bytes *s, struct fuzzed *f)
{
    attn_sdpa_params *p = f->params;
    const int64_t b = f->batch, q = f->q_len, k = f->kv_len;
    const int64_t tensors = f->q.view.shape[0], rows = f->q.view.shape[2];
    next_places(s, f);
    if (one_in(s, f->q.view.dtype == ATTN_F32 ? 4 : 32))
        next_storage(s, f);
    next_added(s, f);
    next_output(s, f, &f->raw, &p->scores_raw, b, q, k);
    next_output(s, f, &f->capped, &p->scores_capped, b, q, k);
    next_output(s, f, &f->scores, &p->scores, b, q, k);
    next_output(s, f, &f->key_sums, &p->key_sums, b, 1, k);
    next_output(s, f, &f->max_weight, &p->max_weight, tensors, rows, 1);
    next_output(s, f, &f->effective_keys, &p->effective_keys, tensors, rows, 1);
    next_output(s, f, &f->entropy, &p->entropy, tensors, rows, 1);
}

/* The struct at the end of its own block, with a tail of another version. */
static void next_struct(struct bytes *s, struct fuzzed *f)
{
    const size_t known = sizeof *f->params;
    const size_t tail = one_in(s, 8) ? (size_t)below(s, 65) : 0;
    unsigned char *block = calloc(1, known + tail);
    if (block == NULL)
        abort();
    f->params = (attn_sdpa_params *)(void *)block;
    f->params->struct_size = known + tail;
    f->tail_is_zero = true;
    if (tail > 0 && one_in(s, 2)) {
        block[known + (size_t)below(s, (int64_t)tail)] = 1;
        f->tail_is_zero = false;
    }
}

static void next_call(struct bytes *s, struct fuzzed *f)
{
    memset(f, 0, sizeof *f);
    next_struct(s, f);
    const attn_dtype dtype = one_in(s, 2) ? ATTN_F64 : ATTN_F32;
    const int64_t B = below(s, MOST_SEQS);
    const int64_t Hkv = below(s, 4);
    const int64_t Hq = Hkv * (below(s, 3) + 1);
    int64_t Tq = next_size(s);
    int64_t Tk = next_size(s);
    const int64_t D = next_size(s);
    const int64_t Dv = one_in(s, 2) ? D : next_size(s);
    /* The oracle takes its time: no call above a few million products. */
    while (B * Hq * Tq * Tk * (D + Dv + 8) > 4000000) {
        Tq = (Tq + 1) / 2;
        Tk = Tk * 3 / 4;
    }
    f->q = make(s, TENSOR_INPUT, dtype, B, Hq, Tq, D);
    f->k = make(s, TENSOR_INPUT, dtype, B, Hkv, Tk, D);
    f->v = make(s, TENSOR_INPUT, dtype, B, Hkv, Tk, Dv);
    f->out = make(s, TENSOR_OUTPUT, dtype, B, Hq, Tq, Dv);
    f->ordinary = fill(s, &f->q.view, 10);
    f->ordinary = fill(s, &f->k.view, 10) && f->ordinary;
    /* Inf times a weight that underflows is NaN, which the oracle's wider
     * type does not see: inf in v only if all weights are ordinary. */
    fill(s, &f->v.view, f->ordinary ? 10 : 8);
    next_lengths(s, f);
    next_masks(s, f, Hq);
    next_rules(s, f);
    f->lse = make(s, TENSOR_OUTPUT, dtype, B, Hq, Tq, 1);
    if (one_in(s, 2))
        f->params->lse = &f->lse.view;
    f->weights =
        make(s, TENSOR_OUTPUT, dtype, f->batch, Hq, f->q_len, f->kv_len);
    f->mean = make(s, TENSOR_OUTPUT, dtype, f->batch, 1, f->q_len, f->kv_len);
    if (one_in(s, 3))
        f->params->weights = &f->weights.view;
    if (one_in(s, 4))
        f->params->weights_mean = &f->mean.view;
    f->in_place = D == Dv && one_in(s, 6);
    f->out_view = f->in_place ? f->q.view : f->out.view;
    next_later_fields(s, f);
}

/* The outputs of a call, out first, and what the oracle has of each. */
struct output {
    const char *name;
    const tensor *t;
    const attn_tensor *view; /* NULL: not asked for */
    size_t exact;
};

#define OUTPUTS 11

static void list_outputs(const struct fuzzed *f, struct output list[OUTPUTS])
{
    const attn_sdpa_params *p = f->params;
#define EXACT(name) offsetof(ref_result, name)
    const struct output all[OUTPUTS] = {
        {"out", &f->out, &f->out_view, EXACT(out)},
        {"lse", &f->lse, p->lse, EXACT(lse)},
        {"weights", &f->weights, p->weights, EXACT(weights)},
        {"weights_mean", &f->mean, p->weights_mean, EXACT(weights_mean)},
        {"scores_raw", &f->raw, p->scores_raw, EXACT(scores_raw)},
        {"scores_capped", &f->capped, p->scores_capped, EXACT(scores_capped)},
        {"scores", &f->scores, p->scores, EXACT(scores)},
        {"key_sums", &f->key_sums, p->key_sums, EXACT(key_sums)},
        {"max_weight", &f->max_weight, p->max_weight, EXACT(max_weight)},
        {"effective_keys", &f->effective_keys, p->effective_keys,
         EXACT(effective_keys)},
        {"entropy", &f->entropy, p->entropy, EXACT(entropy)}};
#undef EXACT
    memcpy(list, all, sizeof all);
}

static void end_call(struct fuzzed *f)
{
    tensor *const all[] = {
        &f->q,      &f->k,        &f->v,          &f->out,
        &f->lse,    &f->weights,  &f->mean,       &f->alibi,
        &f->sinks,  &f->blocks,   &f->raw,        &f->capped,
        &f->scores, &f->key_sums, &f->max_weight, &f->effective_keys,
        &f->entropy};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        tensor_free(all[n]);
    free(f->q_segments);
    free(f->kv_segments);
    free(f->page_table);
    for (int n = 0; n < ATTN_MAX_MASKS; n++)
        tensor_free(&f->mask_memory[n]);
    free(f->params);
}

/* ---- what must hold ---- */

static void demand(bool holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "fuzz_sdpa: %s\n  last sentence: %s\n", what,
            attn_last_error());
    abort();
}

static bool untouched(const tensor *t)
{
    const attn_tensor *v = &t->view;
    if (t->block == NULL)
        return true;
    for (int64_t b = 0; b < v->shape[0]; b++)
        for (int64_t h = 0; h < v->shape[1]; h++)
            for (int64_t i = 0; i < v->shape[2]; i++)
                for (int64_t j = 0; j < v->shape[3]; j++)
                    if (!tensor_is_pattern(v, b, h, i, j))
                        return false;
    return tensor_surroundings_intact(t) != 0;
}

static bool surroundings_intact(const struct fuzzed *f)
{
    const tensor *inputs[] = {&f->q,     &f->k,     &f->v,
                              &f->alibi, &f->sinks, &f->blocks};
    struct output outputs[OUTPUTS];
    bool intact = true;
    list_outputs(f, outputs);
    for (size_t n = 0; n < sizeof inputs / sizeof inputs[0]; n++)
        if (inputs[n]->block != NULL)
            intact = tensor_surroundings_intact(inputs[n]) && intact;
    for (int n = 0; n < OUTPUTS; n++)
        if (outputs[n].t->block != NULL)
            intact = tensor_surroundings_intact(outputs[n].t) && intact;
    return intact;
}

static void judge_refusal(const struct fuzzed *f, attn_status status)
{
    size_t bytes = 1;
    size_t alignment = 1;
    demand(status <= ATTN_ERR_NULL && status >= ATTN_ERR_BLAS,
           "an unknown status");
    demand(status != ATTN_ERR_WORKSPACE && status != ATTN_ERR_NOMEM,
           "a status that attn_sdpa_check cannot have");
    demand(strncmp(attn_last_error(), "attn_sdpa_check: ", 17) == 0,
           "a sentence without the name of the call");
    demand(attn_sdpa(NULL, f->params, &f->q.view, &f->k.view, &f->v.view,
                     &f->out_view) == status,
           "attn_sdpa disagrees with attn_sdpa_check");
    demand(attn_sdpa_workspace(NULL, f->params, &f->q.view, &f->k.view,
                               &f->v.view, &f->out_view, &bytes,
                               &alignment) == status,
           "attn_sdpa_workspace disagrees with attn_sdpa_check");
    demand(bytes == 1 && alignment == 1, "a refused query wrote its results");
    struct output outputs[OUTPUTS];
    list_outputs(f, outputs);
    for (int n = 0; n < OUTPUTS; n++)
        demand(untouched(outputs[n].t), "a refused call wrote to an output");
}

static int64_t wrong_numbers(const struct fuzzed *f, const ref_result *want)
{
    struct output outputs[OUTPUTS];
    int64_t wrong = 0;
    list_outputs(f, outputs);
    for (int n = 0; n < OUTPUTS; n++) {
        const void *exact = (const char *)want + outputs[n].exact;
        if (outputs[n].view != NULL)
            wrong += compare_tensor(outputs[n].name, "fuzz", outputs[n].view,
                                    (const ref_tensor *)exact, 1.0);
    }
    return wrong;
}

static void judge_result(const struct fuzzed *f)
{
    ref_result want;
    size_t bytes = 0;
    size_t alignment = 0;
    attn_sdpa_params known = *f->params;
    known.struct_size = sizeof known;
    demand(f->tail_is_zero, "an unknown tail was accepted");
    ref_sdpa(&want, &known, &f->q.view, &f->k.view, &f->v.view);
    demand(attn_sdpa_workspace(NULL, f->params, &f->q.view, &f->k.view,
                               &f->v.view, &f->out_view, &bytes,
                               &alignment) == ATTN_OK,
           "attn_sdpa_workspace disagrees with attn_sdpa_check");
    demand(alignment != 0 && (alignment & (alignment - 1)) == 0,
           "an alignment that is no power of two");
    /* aligned_alloc wants a whole number of alignments; the call is told of
     * what it asked for only. */
    void *work = aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
    demand(work != NULL, "out of memory");
    demand(attn_sdpa_work(NULL, f->params, &f->q.view, &f->k.view, &f->v.view,
                          &f->out_view, work, bytes) == ATTN_OK,
           "attn_sdpa_work disagrees with attn_sdpa_check");
    free(work);
    demand(wrong_numbers(f, &want) == 0, "a wrong number");
    demand(surroundings_intact(f), "memory beside an argument was written");
    ref_free(&want);
}

/* ---- gradients ---- */

/* Of masks, from D_MASKS on, there are as many as masks. */
enum { D_Q, D_K, D_V, D_ALIBI, D_SINKS, D_SCALE, D_MASKS };
enum { GRADIENTS = D_MASKS + ATTN_MAX_MASKS };

static const int32_t add_flags[D_MASKS + 1] = {
    ATTN_SDPA_ADD_D_Q,     ATTN_SDPA_ADD_D_K,     ATTN_SDPA_ADD_D_V,
    ATTN_SDPA_ADD_D_ALIBI, ATTN_SDPA_ADD_D_SINKS, ATTN_SDPA_ADD_D_SCALE,
    ATTN_SDPA_ADD_D_MASKS};

struct learned {
    attn_sdpa_params params;        /* those of the call, with its lse alone */
    attn_sdpa_gradients *gradients; /* in a block of exactly its struct_size */
    tensor d_out, d_lse, d[GRADIENTS];
    void *before[GRADIENTS]; /* copies of all their memory */
    const attn_tensor *d_masks[ATTN_MAX_MASKS];
    bool tail_is_zero;
};

static void next_gradients_struct(struct bytes *s, struct learned *l)
{
    const size_t known = sizeof *l->gradients;
    const size_t tail = one_in(s, 8) ? (size_t)below(s, 65) : 0;
    unsigned char *block = calloc(1, known + tail);
    if (block == NULL)
        abort();
    l->gradients = (attn_sdpa_gradients *)(void *)block;
    l->gradients->struct_size = known + tail;
    l->tail_is_zero = true;
    if (tail > 0 && one_in(s, 2)) {
        block[known + (size_t)below(s, (int64_t)tail)] = 1;
        l->tail_is_zero = false;
    }
}

/* Three of four gradients are wanted, now and then with a size of their own. */
static void next_gradient(struct bytes *s, const struct fuzzed *f,
                          struct learned *l, int n, const attn_tensor **field,
                          const attn_tensor *like)
{
    if (one_in(s, 4))
        return;
    const int64_t *size = like->shape;
    l->d[n] = make(s, TENSOR_OUTPUT, f->q.view.dtype, size[0], size[1], size[2],
                   size[3] + one_in(s, 64));
    const int32_t flag = add_flags[n < D_MASKS ? n : D_MASKS];
    if (l->gradients->flags & flag)
        fill(s, &l->d[n].view, 9);
    *field = &l->d[n].view;
    l->before[n] = malloc(l->d[n].bytes + 1);
    if (l->before[n] == NULL)
        abort();
    memcpy(l->before[n], l->d[n].block, l->d[n].bytes);
}

static void next_learned(struct bytes *s, struct fuzzed *f, struct learned *l)
{
    static const attn_tensor one = {.shape = {1, 1, 1, 1}};
    const attn_tensor *out = &f->out_view;
    attn_sdpa_gradients *g;
    memset(l, 0, sizeof *l);
    next_gradients_struct(s, l);
    g = l->gradients;
    l->params = *f->params;
    l->params.struct_size = sizeof l->params;
    if (!one_in(s, 32)) { /* the outputs that are not for this call */
        const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
        attn_sdpa_params *p = &l->params;
        p->weights = p->weights_mean = init.weights;
        p->scores_raw = p->scores_capped = p->scores = init.scores;
        p->key_sums = init.key_sums;
        p->max_weight = p->effective_keys = p->entropy = init.entropy;
    }
    l->params.lse = one_in(s, 64) ? NULL : &f->lse.view;
    l->d_out = make(s, TENSOR_INPUT, f->q.view.dtype, out->shape[0],
                    out->shape[1], out->shape[2], out->shape[3]);
    fill(s, &l->d_out.view, 8);
    if (one_in(s, 2)) {
        const int64_t *size = f->lse.view.shape;
        l->d_lse = make(s, TENSOR_INPUT, f->q.view.dtype, size[0], size[1],
                        size[2], 1);
        fill(s, &l->d_lse.view, 8);
        g->d_lse = &l->d_lse.view;
    }
    g->flags = one_in(s, 2) ? ATTN_SDPA_ADD_D_Q *
                                  (int32_t)below(s, one_in(s, 16) ? 256 : 128)
                            : 0;
    g->reserved = one_in(s, 64);
    next_gradient(s, f, l, D_Q, &g->d_q, &f->q.view);
    next_gradient(s, f, l, D_K, &g->d_k, &f->k.view);
    next_gradient(s, f, l, D_V, &g->d_v, &f->v.view);
    next_gradient(s, f, l, D_SCALE, &g->d_scale, &one);
    if (l->params.alibi != NULL || one_in(s, 64))
        next_gradient(s, f, l, D_ALIBI, &g->d_alibi,
                      l->params.alibi ? l->params.alibi : &one);
    if (l->params.sinks != NULL || one_in(s, 64))
        next_gradient(s, f, l, D_SINKS, &g->d_sinks,
                      l->params.sinks ? l->params.sinks : &one);
    if (l->params.num_masks > 0 || one_in(s, 64))
        g->d_masks = l->d_masks;
    for (int32_t n = 0; n < l->params.num_masks; n++)
        if (f->masks[n].kind == ATTN_MASK_ADD || one_in(s, 64))
            next_gradient(s, f, l, D_MASKS + n, &l->d_masks[n],
                          &f->masks[n].view);
}

static void end_learned(struct learned *l)
{
    tensor_free(&l->d_out);
    tensor_free(&l->d_lse);
    for (int n = 0; n < GRADIENTS; n++) {
        tensor_free(&l->d[n]);
        free(l->before[n]);
    }
    free(l->gradients);
}

static bool learned_untouched(const struct learned *l)
{
    for (int n = 0; n < GRADIENTS; n++)
        if (l->d[n].block != NULL &&
            memcmp(l->before[n], l->d[n].block, l->d[n].bytes) != 0)
            return false;
    return true;
}

static void refuse_learned(const struct fuzzed *f, const struct learned *l,
                           attn_status status)
{
    size_t bytes = 1;
    size_t alignment = 1;
    demand(status <= ATTN_ERR_NULL && status >= ATTN_ERR_BLAS,
           "an unknown status");
    demand(status != ATTN_ERR_WORKSPACE && status != ATTN_ERR_NOMEM,
           "a status that attn_sdpa_backward_check cannot have");
    demand(strncmp(attn_last_error(), "attn_sdpa_backward_check: ", 26) == 0,
           "a sentence without the name of the call");
    demand(attn_sdpa_backward(NULL, &l->params, &f->q.view, &f->k.view,
                              &f->v.view, &f->out_view, &l->d_out.view,
                              l->gradients) == status,
           "attn_sdpa_backward disagrees with attn_sdpa_backward_check");
    demand(attn_sdpa_backward_workspace(NULL, &l->params, &f->q.view,
                                        &f->k.view, &f->v.view, &f->out_view,
                                        &l->d_out.view, l->gradients, &bytes,
                                        &alignment) == status,
           "attn_sdpa_backward_workspace disagrees");
    demand(bytes == 1 && alignment == 1, "a refused query wrote its results");
    demand(learned_untouched(l), "a refused call wrote to a gradient");
}

/* Element number n, which is of this role, as the oracle has it. */
static const ref_tensor *exact_gradient(const ref_gradients *want, int n)
{
    const ref_tensor *all[D_MASKS] = {&want->d_q,     &want->d_k,
                                      &want->d_v,     &want->d_alibi,
                                      &want->d_sinks, &want->d_scale};
    return n < D_MASKS ? all[n] : &want->d_masks[n - D_MASKS];
}

static void run_learned(const struct fuzzed *f, const struct learned *l)
{
    static const char *const names[D_MASKS] = {"d_q",     "d_k",     "d_v",
                                               "d_alibi", "d_sinks", "d_scale"};
    ref_gradients want;
    size_t bytes = 0;
    size_t alignment = 0;
    int64_t wrong = 0;
    attn_sdpa_gradients known = *l->gradients;
    known.struct_size = sizeof known;
    demand(l->tail_is_zero, "an unknown tail was accepted");
    ref_sdpa_backward(&want, &l->params, &f->q.view, &f->k.view, &f->v.view,
                      &f->out_view, &l->d_out.view, &known);
    demand(attn_sdpa_backward_workspace(NULL, &l->params, &f->q.view,
                                        &f->k.view, &f->v.view, &f->out_view,
                                        &l->d_out.view, l->gradients, &bytes,
                                        &alignment) == ATTN_OK,
           "attn_sdpa_backward_workspace disagrees");
    demand(alignment != 0 && (alignment & (alignment - 1)) == 0,
           "an alignment that is no power of two");
    void *work = aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
    demand(work != NULL, "out of memory");
    demand(attn_sdpa_backward_work(NULL, &l->params, &f->q.view, &f->k.view,
                                   &f->v.view, &f->out_view, &l->d_out.view,
                                   l->gradients, work, bytes) == ATTN_OK,
           "attn_sdpa_backward_work disagrees with attn_sdpa_backward_check");
    free(work);
    for (int n = 0; n < GRADIENTS; n++) {
        if (l->d[n].block == NULL)
            continue;
        wrong +=
            compare_tensor(n < D_MASKS ? names[n] : "d_masks", "this input",
                           &l->d[n].view, exact_gradient(&want, n), 1.0);
        demand(tensor_surroundings_intact(&l->d[n]) != 0,
               "memory beside a gradient was written");
    }
    demand(wrong == 0, "a wrong gradient");
    demand(surroundings_intact(f), "memory beside an argument was written");
    ref_free_gradients(&want);
}

/* What attn_sdpa gave has gradients, unless it lies where q was. */
static void learn(struct bytes *s, struct fuzzed *f)
{
    struct learned l;
    if (s->left == 0 || f->in_place)
        return;
    if (f->params->lse == NULL) {
        f->params->lse = &f->lse.view;
        demand(attn_sdpa(NULL, f->params, &f->q.view, &f->k.view, &f->v.view,
                         &f->out_view) == ATTN_OK,
               "attn_sdpa refuses to write lse");
    }
    next_learned(s, f, &l);
    const attn_status status = attn_sdpa_backward_check(
        NULL, &l.params, &f->q.view, &f->k.view, &f->v.view, &f->out_view,
        &l.d_out.view, l.gradients);
    if (status == ATTN_OK)
        run_learned(f, &l);
    else
        refuse_learned(f, &l, status);
    end_learned(&l);
}

/* ---- sizes and strides without memory: only the checks can run ---- */

static int64_t wild_number(struct bytes *s)
{
    static const int64_t borders[] = {INT64_MIN,
                                      INT64_MIN + 1,
                                      -1,
                                      0,
                                      1,
                                      2,
                                      3,
                                      4,
                                      16,
                                      INT64_C(1) << 16,
                                      INT32_MAX,
                                      INT64_C(1) << 31,
                                      INT64_C(1) << 32,
                                      INT64_C(1) << 33,
                                      INT64_C(1) << 61,
                                      INT64_C(1) << 62,
                                      INT64_MAX - 1,
                                      INT64_MAX};
    const int64_t n = (int64_t)(sizeof borders / sizeof borders[0]);
    return borders[below(s, n)];
}

static void wild_tensor(struct bytes *s, attn_tensor *t, uintptr_t place)
{
    for (int dim = 0; dim < 4; dim++) {
        t->shape[dim] = one_in(s, 4) ? wild_number(s) : 2;
        t->stride[dim] = one_in(s, 4) ? wild_number(s) : INT64_C(8) << 2 * dim;
    }
    t->dtype = one_in(s, 16) ? (attn_dtype)wild_number(s) : ATTN_F32;
    t->reserved = one_in(s, 32);
    t->data = one_in(s, 16) ? NULL : (void *)(place + (one_in(s, 16) ? 1 : 0));
}

/* Arrays are only given to batches that they are long enough for. */
#define WILD_BATCH 16

static void wild_arrays(struct bytes *s, attn_sdpa_params *p, int64_t batch)
{
    static int64_t numbers[WILD_BATCH], lengths[WILD_BATCH];
    static int32_t pages[2 * WILD_BATCH];
    if (batch > WILD_BATCH)
        return;
    for (int b = 0; b < WILD_BATCH; b++) {
        numbers[b] = one_in(s, 4) ? wild_number(s) : 0;
        lengths[b] = below(s, 3);
        pages[2 * b] = (int32_t)below(s, 4) - 1;
        pages[2 * b + 1] = (int32_t)wild_number(s);
    }
    p->kv_starts = one_in(s, 8) ? numbers : NULL;
    p->kv_offsets = one_in(s, 8) ? numbers : NULL;
    p->ring_starts = one_in(s, 8) ? numbers : NULL;
    p->q_offsets =
        p->align == ATTN_ALIGN_OFFSET && one_in(s, 4) ? numbers : NULL;
    if (one_in(s, 4)) {
        p->page_table = pages;
        p->pages_per_seq = below(s, 3);
        p->kv_lens = lengths;
    }
    if (one_in(s, 16)) { /* of no key, so that no entry is looked at */
        memset(lengths, 0, sizeof lengths);
        p->pages_per_seq = wild_number(s);
    }
}

static void wild_later_fields(struct bytes *s, attn_sdpa_params *p,
                              const attn_tensor *t)
{
    const attn_tensor **const outputs[] = {
        &p->scores_raw, &p->scores_capped,  &p->scores, &p->key_sums,
        &p->max_weight, &p->effective_keys, &p->entropy};
    p->softcap = one_in(s, 8) ? (double)wild_number(s) : 0.0;
    p->alibi = one_in(s, 8) ? t : NULL;
    p->sinks = one_in(s, 8) ? t : NULL;
    p->blocks = one_in(s, 8) ? t : NULL;
    p->block_q = one_in(s, 8) ? wild_number(s) : p->blocks != NULL;
    p->block_k = one_in(s, 8) ? wild_number(s) : p->blocks != NULL;
    if (one_in(s, 8))
        *outputs[below(s, 7)] = t;
}

/* The gradients of such a call, each of the views in any role. */
static void wild_gradients(struct bytes *s, const attn_sdpa_params *params,
                           const attn_tensor *t)
{
    size_t bytes = 1;
    size_t alignment = 1;
    attn_sdpa_params p = *params;
    attn_tensor d[3];
    const attn_tensor *d_masks[1];
    attn_sdpa_gradients g = ATTN_SDPA_GRADIENTS_INIT;
    for (int n = 0; n < 3; n++)
        wild_tensor(s, &d[n], (uintptr_t)(n + 6) << 44);
    const attn_tensor **const outputs[] = {&g.d_q,     &g.d_k,     &g.d_v,
                                           &g.d_alibi, &g.d_sinks, &g.d_scale};
    for (int n = 0; n < 6; n++)
        *outputs[n] = one_in(s, 2) ? &d[below(s, 3)] : NULL;
    d_masks[0] = &d[below(s, 3)];
    g.d_masks = p.num_masks > 0 && one_in(s, 2) ? d_masks : NULL;
    g.d_lse = one_in(s, 4) ? &d[below(s, 3)] : NULL;
    if (!one_in(s, 8))
        p.lse = &t[4];
    const attn_status status = attn_sdpa_backward_check(
        NULL, &p, &t[0], &t[1], &t[2], &t[3], &t[3], &g);
    demand(status <= ATTN_OK && status >= ATTN_ERR_BLAS, "an unknown status");
    demand(attn_sdpa_backward_workspace(NULL, &p, &t[0], &t[1], &t[2], &t[3],
                                        &t[3], &g, &bytes,
                                        &alignment) == status,
           "attn_sdpa_backward_workspace disagrees");
    demand(status != ATTN_OK || alignment > 1 || bytes == 0, "no alignment");
}

static void wild(struct bytes *s)
{
    attn_tensor t[5];
    attn_mask mask = {0};
    attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
    size_t bytes = 1;
    size_t alignment = 1;
    for (int n = 0; n < 5; n++)
        wild_tensor(s, &t[n], (uintptr_t)(n + 1) << 44);
    p.flags = (int32_t)below(s, 8);
    p.causal = (int32_t)below(s, 4) - 1;
    p.align = (int32_t)below(s, 6) - 1;
    p.window_left = one_in(s, 4) ? wild_number(s) : 0;
    p.window_right = one_in(s, 4) ? wild_number(s) : 0;
    p.keep_first = one_in(s, 4) ? wild_number(s) : 0;
    p.chunk = one_in(s, 4) ? wild_number(s) : 0;
    p.q_offset = one_in(s, 4) ? wild_number(s) : 0;
    mask.kind = (int32_t)below(s, 5) - 1;
    mask.view = t[4];
    mask.view.dtype = one_in(s, 2) ? ATTN_U8 : ATTN_F32;
    if (one_in(s, 3)) {
        p.masks = &mask;
        p.num_masks = 1;
    }
    if (one_in(s, 4))
        p.lse = &t[4];
    wild_later_fields(s, &p, &t[4]);
    wild_arrays(s, &p, t[0].shape[0]);
    const attn_status status =
        attn_sdpa_check(NULL, &p, &t[0], &t[1], &t[2], &t[3]);
    demand(status <= ATTN_OK && status >= ATTN_ERR_BLAS, "an unknown status");
    const attn_status query = attn_sdpa_workspace(NULL, &p, &t[0], &t[1], &t[2],
                                                  &t[3], &bytes, &alignment);
    demand(query == status, "attn_sdpa_workspace disagrees");
    demand(status != ATTN_OK || alignment > 1 || bytes == 0, "no alignment");
    if (s->left > 0)
        wild_gradients(s, &p, t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct bytes s = {data, size};
    struct fuzzed f;
    if (one_in(&s, 8)) {
        wild(&s);
        return 0;
    }
    next_call(&s, &f);
    const attn_status status = attn_sdpa_check(
        NULL, f.params, &f.q.view, &f.k.view, &f.v.view, &f.out_view);
    if (status == ATTN_OK) {
        judge_result(&f);
        learn(&s, &f);
    } else {
        judge_refusal(&f, status);
    }
    end_call(&f);
    return 0;
}

#ifdef FUZZ_REPLAY
static void replay(const char *path)
{
    static uint8_t data[1 << 16];
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        exit(EXIT_FAILURE);
    }
    const size_t size = fread(data, 1, sizeof data, file);
    fclose(file);
    /* A copy of exact size, so that sanitizers see a read behind it. */
    uint8_t *copy = malloc(size + 1);
    if (copy == NULL)
        abort();
    memcpy(copy, data, size);
    printf("%s: %zu bytes\n", path, size);
    fflush(stdout);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

int main(int argc, char **argv)
{
    for (int n = 1; n < argc; n++)
        replay(argv[n]);
    printf("%d inputs, the largest fraction of a bound was %.3g\n", argc - 1,
           compare_worst());
    return EXIT_SUCCESS;
}
#endif
