/*
 * test_status.c - every refusal of attn.h, provoked: the status, the sentence,
 * and that nothing was written or printed.
 *
 * ATTN_ERR_BLAS is missing here: it needs a BLAS that cannot be used, see
 * test_process.c.
 */
#define _GNU_SOURCE 1

#include "kit.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TWO(n) (INT64_C(1) << (n))

/* ---- what is watched while calls are refused ---- */

/* All data of all calls lies in one arena, so that "untouched" is one memcmp,
 * and so that overlaps are real ones. */
static _Alignas(4096) unsigned char arena[64 * 1024];
static unsigned char before[sizeof arena];
static size_t arena_used;

/* Scratch memory for the _work calls; more than any base problem needs. */
static _Alignas(4096) unsigned char scratch[16 * 1024 * 1024];

/* Complaints are collected, so that one run shows them all. */
static char complaints[1 << 16];

static void __attribute__((format(printf, 1, 2)))
complain(const char *format, ...)
{
    const size_t used = strlen(complaints);
    va_list args;
    va_start(args, format);
    vsnprintf(complaints + used, sizeof complaints - used, format, args);
    va_end(args);
}

static void *take(size_t bytes)
{
    void *p = arena + arena_used;
    arena_used += (bytes + 63) / 64 * 64;
    if (arena_used > sizeof arena)
        abort();
    return p;
}

static attn_tensor take_view(attn_dtype dtype, int64_t a, int64_t b, int64_t c,
                             int64_t d)
{
    attn_tensor t = kit_view(dtype, NULL, a, b, c, d);
    t.data = take((size_t)kit_elements(&t) * kit_bytes(dtype));
    return t;
}

static void reset_arena(void)
{
    arena_used = 0;
    for (size_t n = 0; n < sizeof arena; n++)
        arena[n] = (unsigned char)(n * 7 + n / 256);
}

static void remember(void)
{
    memcpy(before, arena, sizeof arena);
}

/* Every '|'-separated word of words must be in the sentence. */
static bool has_words(const char *sentence, const char *words)
{
    while (*words != '\0') {
        const size_t length = strcspn(words, "|");
        if (memmem(sentence, strlen(sentence), words, length) == NULL)
            return false;
        words += length;
        words += *words == '|';
    }
    return true;
}

static void judge(const char *what, const char *call, attn_status met,
                  attn_status want, const char *words)
{
    const char *sentence = attn_last_error();
    const size_t name = strlen(call);
    if (met != want)
        complain("%s: %s gave %d, not %d (%s)\n", what, call, (int)met,
                 (int)want, met == ATTN_OK ? "" : sentence);
    else if (strncmp(sentence, call, name) != 0 || sentence[name] != ':')
        complain("%s: '%s' does not start with %s:\n", what, sentence, call);
    else if (!has_words(sentence, words))
        complain("%s: '%s' lacks one of %s\n", what, sentence, words);
    if (memcmp(arena, before, sizeof arena) != 0) {
        complain("%s: %s wrote to its arguments\n", what, call);
        memcpy(arena, before, sizeof arena);
    }
}

static int begin(void **state)
{
    (void)state;
    complaints[0] = '\0';
    reset_arena();
    remember();
    kit_capture_begin();
    return 0;
}

/* Ends every test: shows what was collected. */
static void finish(void)
{
    const int64_t printed = kit_capture_end();
    if (printed != 0)
        complain("%d bytes were printed\n", (int)printed);
    if (complaints[0] != '\0') {
        fputs(complaints, stderr); /* fail_msg cuts long texts */
        fail_msg("see the complaints above");
    }
}

static int end(void **state)
{
    (void)state;
    kit_capture_end();
    return 0;
}

static void shift(attn_tensor *t, ptrdiff_t bytes)
{
    t->data = (unsigned char *)t->data + bytes;
}

/* An address that must never be followed. */
static void *nowhere(void)
{
    return (void *)(uintptr_t)4096;
}

/* ---- attn_sdpa, attn_sdpa_check, attn_sdpa_workspace, attn_sdpa_work ---- */

/* One valid problem with every option prepared and none switched on. */
struct sdpa {
    attn_sdpa_params p;
    attn_tensor q, k, v, out;
    attn_tensor lse, weights, mean;
    attn_mask masks[ATTN_MAX_MASKS + 1];
    int64_t *q_offsets, *prefix_lens, *q_lens, *kv_lens, *cu_q, *cu_k;
    int64_t *kv_starts, *kv_offsets, *ring_starts;
    int32_t *q_segments, *kv_segments, *page_table;
    attn_tensor slopes, sinks, blocks;
    attn_tensor raw, capped, scores, key_sums;
    attn_tensor max_weight, effective_keys, entropy;
    const attn_sdpa_params *pp;
    const attn_tensor *pq, *pk, *pv, *pout;
};

static const int64_t B = 2;
static const int64_t HQ = 4;
static const int64_t HKV = 2;
static const int64_t TQ = 3;
static const int64_t TK = 5;
static const int64_t D = 4;
static const int64_t DV = 6;

static int64_t *take_numbers(int64_t first, int64_t step)
{
    int64_t *numbers = take(4 * sizeof *numbers);
    for (int n = 0; n < 4; n++)
        numbers[n] = first + n * step;
    return numbers;
}

/* So many numbers from 0 on. */
static int32_t *take_small_numbers(int64_t n)
{
    int32_t *numbers = take((size_t)n * sizeof *numbers);
    for (int64_t i = 0; i < n; i++)
        numbers[i] = (int32_t)i;
    return numbers;
}

/* What the fields after the first version of the struct need. */
static void sdpa_base_of_later_fields(struct sdpa *c)
{
    c->kv_starts = take_numbers(0, 1);
    c->kv_offsets = take_numbers(7, 2);
    c->ring_starts = take_numbers(4, -1);
    c->q_segments = take_small_numbers(B * TQ);
    c->kv_segments = take_small_numbers(B * TK);
    c->page_table = take_small_numbers(6);
    c->slopes = take_view(ATTN_F32, 1, 1, 1, HQ);
    c->sinks = take_view(ATTN_F32, B, HQ, 1, 1);
    c->blocks = take_view(ATTN_U8, B, HQ, 2, 3);
    kit_fill(&c->slopes);
    kit_fill(&c->sinks);
    kit_fill(&c->blocks);
    c->raw = take_view(ATTN_F32, B, HQ, TQ, TK);
    c->capped = take_view(ATTN_F32, B, HQ, TQ, TK);
    c->scores = take_view(ATTN_F32, B, HQ, TQ, TK);
    c->key_sums = take_view(ATTN_F32, B, HQ, 1, TK);
    c->max_weight = take_view(ATTN_F32, B, HQ, TQ, 1);
    c->effective_keys = take_view(ATTN_F32, B, HQ, TQ, 1);
    c->entropy = take_view(ATTN_F32, B, HQ, TQ, 1);
}

static void sdpa_base(struct sdpa *c)
{
    reset_arena();
    memset(c, 0, sizeof *c);
    attn_sdpa_params_init(&c->p);
    c->q = take_view(ATTN_F32, B, HQ, TQ, D);
    c->k = take_view(ATTN_F32, B, HKV, TK, D);
    c->v = take_view(ATTN_F32, B, HKV, TK, DV);
    c->out = take_view(ATTN_F32, B, HQ, TQ, DV);
    c->lse = take_view(ATTN_F32, B, HQ, TQ, 1);
    c->weights = take_view(ATTN_F32, B, HQ, TQ, TK);
    c->mean = take_view(ATTN_F32, B, 1, TQ, TK);
    kit_fill(&c->q);
    kit_fill(&c->k);
    kit_fill(&c->v);
    for (int n = 0; n <= ATTN_MAX_MASKS; n++) {
        c->masks[n].kind = ATTN_MASK_KEEP;
        c->masks[n].view = take_view(ATTN_U8, B, HQ, TQ, TK);
        kit_fill_with(&c->masks[n].view, 1.0);
    }
    c->q_offsets = take_numbers(0, 1);
    c->prefix_lens = take_numbers(1, 1);
    c->q_lens = take_numbers(1, 1);
    c->kv_lens = take_numbers(2, 1);
    c->cu_q = take_numbers(0, 1);
    c->cu_k = take_numbers(0, 1);
    sdpa_base_of_later_fields(c);
    c->pp = &c->p;
    c->pq = &c->q;
    c->pk = &c->k;
    c->pv = &c->v;
    c->pout = &c->out;
}

static void use_masks(struct sdpa *c, int32_t count)
{
    c->p.masks = c->masks;
    c->p.num_masks = count;
}

static void use_add_mask(struct sdpa *c)
{
    use_masks(c, 1);
    c->masks[0].kind = ATTN_MASK_ADD;
    c->masks[0].view = take_view(ATTN_F32, B, HQ, TQ, TK);
    kit_fill(&c->masks[0].view);
}

static void use_outputs(struct sdpa *c)
{
    c->p.lse = &c->lse;
    c->p.weights = &c->weights;
    c->p.weights_mean = &c->mean;
}

static void use_causal(struct sdpa *c)
{
    c->p.causal = 1;
    c->p.align = ATTN_ALIGN_TOP_LEFT;
}

static void use_window(struct sdpa *c, int64_t left, int64_t right)
{
    c->p.flags = ATTN_SDPA_WINDOW;
    c->p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    c->p.window_left = left;
    c->p.window_right = right;
}

/* One batch of 2 sequences: queries 0..1, 1..2 of 3 and keys alike of 5. */
static void use_ragged(struct sdpa *c)
{
    c->q.shape[0] = c->k.shape[0] = c->v.shape[0] = c->out.shape[0] = 1;
    c->lse.shape[0] = 1;
    c->p.cu_q = c->cu_q;
    c->p.cu_k = c->cu_k;
    c->p.num_seqs = 2;
}

static void use_scale(struct sdpa *c, double scale)
{
    c->p.flags = ATTN_SDPA_SCALE;
    c->p.scale = scale;
}

static void use_blocks(struct sdpa *c)
{
    c->p.blocks = &c->blocks;
    c->p.block_q = c->p.block_k = 2;
}

static void use_segments(struct sdpa *c)
{
    c->p.q_segments = c->q_segments;
    c->p.kv_segments = c->kv_segments;
}

/* 7 pages of 2 keys, at most 3 for each of both sequences: 5 and 4 keys. */
static void use_pages(struct sdpa *c)
{
    c->k = take_view(ATTN_F32, 7, HKV, 2, D);
    c->v = take_view(ATTN_F32, 7, HKV, 2, DV);
    kit_fill(&c->k);
    kit_fill(&c->v);
    c->kv_lens[0] = 5;
    c->kv_lens[1] = 4;
    c->page_table[5] = -1; /* not needed */
    c->p.page_table = c->page_table;
    c->p.pages_per_seq = 3;
    c->p.kv_lens = c->kv_lens;
}

static void use_ring(struct sdpa *c)
{
    c->p.ring_starts = c->ring_starts;
}

static void use_score_outputs(struct sdpa *c)
{
    c->p.scores_raw = &c->raw;
    c->p.scores_capped = &c->capped;
    c->p.scores = &c->scores;
    c->p.key_sums = &c->key_sums;
}

static void use_row_outputs(struct sdpa *c)
{
    c->p.max_weight = &c->max_weight;
    c->p.effective_keys = &c->effective_keys;
    c->p.entropy = &c->entropy;
}

/* No element is ever looked for at these places. */
static void all_nowhere(struct sdpa *c)
{
    c->q.data = c->k.data = c->v.data = c->out.data = nowhere();
}

static void set_shapes(struct sdpa *c, int dim, int64_t size)
{
    all_nowhere(c);
    c->q.shape[dim] = c->k.shape[dim] = c->v.shape[dim] = size;
    c->out.shape[dim] = size;
}

struct sdpa_case {
    const char *name;
    attn_status status;
    const char *words;
    void (*change)(struct sdpa *);
};

static struct sdpa_case sdpa_cases[512];
static size_t num_sdpa_cases;

/* Defines a change of the base problem and enters it in the table. */
#define SDPA(name, status, words)                                           \
    static void sdpa_##name(struct sdpa *c);                                \
    static void __attribute__((constructor)) add_sdpa_##name(void)          \
    {                                                                       \
        const struct sdpa_case entry = {#name, status, words, sdpa_##name}; \
        sdpa_cases[num_sdpa_cases++] = entry;                               \
    }                                                                       \
    static void sdpa_##name(struct sdpa *c)

SDPA(q_null, ATTN_ERR_NULL, "q|NULL")
{
    c->pq = NULL;
}
SDPA(k_null, ATTN_ERR_NULL, "k|NULL")
{
    c->pk = NULL;
}
SDPA(v_null, ATTN_ERR_NULL, "v|NULL")
{
    c->pv = NULL;
}
SDPA(out_null, ATTN_ERR_NULL, "out|NULL")
{
    c->pout = NULL;
}
SDPA(q_data_null, ATTN_ERR_NULL, "q|data|NULL")
{
    c->q.data = NULL;
}
SDPA(k_data_null, ATTN_ERR_NULL, "k|data|NULL")
{
    c->k.data = NULL;
}
SDPA(v_data_null, ATTN_ERR_NULL, "v|data|NULL")
{
    c->v.data = NULL;
}
SDPA(out_data_null, ATTN_ERR_NULL, "out|data|NULL")
{
    c->out.data = NULL;
}
SDPA(lse_data_null, ATTN_ERR_NULL, "lse|data|NULL")
{
    use_outputs(c);
    c->lse.data = NULL;
}
SDPA(weights_data_null, ATTN_ERR_NULL, "weights|data|NULL")
{
    use_outputs(c);
    c->weights.data = NULL;
}
SDPA(mean_data_null, ATTN_ERR_NULL, "weights_mean|data|NULL")
{
    use_outputs(c);
    c->mean.data = NULL;
}
SDPA(masks_null, ATTN_ERR_NULL, "masks|NULL")
{
    c->p.num_masks = 1;
}
SDPA(mask_data_null, ATTN_ERR_NULL, "mask|data|NULL")
{
    use_masks(c, 2);
    c->masks[1].view.data = NULL;
}
SDPA(cu_q_alone, ATTN_ERR_NULL, "cu_k|NULL")
{
    use_ragged(c);
    c->p.cu_k = NULL;
}
SDPA(cu_k_alone, ATTN_ERR_NULL, "cu_q|NULL")
{
    use_ragged(c);
    c->p.cu_q = NULL;
}

/* Sizes. */
SDPA(q_batch_negative, ATTN_ERR_SIZE, "q|-1|shape[0]")
{
    c->q.shape[0] = -1;
}
SDPA(q_heads_negative, ATTN_ERR_SIZE, "q|-1|shape[1]")
{
    c->q.shape[1] = -1;
}
SDPA(q_len_negative, ATTN_ERR_SIZE, "q|-3|shape[2]")
{
    c->q.shape[2] = -3;
}
SDPA(q_width_negative, ATTN_ERR_SIZE, "q|-9223372036854775808|shape[3]")
{
    c->q.shape[3] = INT64_MIN;
}
SDPA(k_len_negative, ATTN_ERR_SIZE, "k|-1")
{
    c->k.shape[2] = -1;
}
SDPA(v_width_negative, ATTN_ERR_SIZE, "v|-1")
{
    c->v.shape[3] = -1;
}
SDPA(out_len_negative, ATTN_ERR_SIZE, "out|-1")
{
    c->out.shape[2] = -1;
}
SDPA(lse_negative, ATTN_ERR_SIZE, "lse|-1")
{
    use_outputs(c);
    c->lse.shape[3] = -1;
}
SDPA(mask_negative, ATTN_ERR_SIZE, "mask|-5")
{
    use_masks(c, 1);
    c->masks[0].view.shape[3] = -5;
}
SDPA(num_seqs_negative, ATTN_ERR_SIZE, "num_seqs|-1")
{
    use_ragged(c);
    c->p.num_seqs = -1;
}
SDPA(batch_of_2_to_62, ATTN_ERR_SIZE, "q|4611686018427387904")
{
    set_shapes(c, 0, TWO(62));
}
SDPA(batch_of_int64_max, ATTN_ERR_SIZE, "q|9223372036854775807")
{
    set_shapes(c, 0, INT64_MAX);
}
SDPA(len_of_2_to_62, ATTN_ERR_SIZE, "q|4611686018427387904")
{
    set_shapes(c, 2, TWO(62));
}
SDPA(batch_2_to_32_len_2_to_32, ATTN_ERR_SIZE, "q|4294967296")
{
    set_shapes(c, 0, TWO(32));
    set_shapes(c, 2, TWO(32));
}
SDPA(batch_2_to_31_len_2_to_32, ATTN_ERR_SIZE, "q|2147483648|4294967296")
{
    set_shapes(c, 0, TWO(31));
    set_shapes(c, 2, TWO(32));
}

/* Without memory: all keys are one. */
static void use_endless_keys(struct sdpa *c, int64_t len)
{
    for (int dim = 0; dim < 3; dim++) {
        set_shapes(c, dim, 1);
        c->k.stride[dim] = c->v.stride[dim] = 0;
    }
    c->k.shape[3] = c->v.shape[3] = c->q.shape[3] = c->out.shape[3] = 1;
    c->k.shape[2] = c->v.shape[2] = len;
}
SDPA(keys_of_2_to_61, ATTN_ERR_SIZE, "k|2305843009213693952|most|693951")
{
    use_endless_keys(c, TWO(61));
}

SDPA(scratch_beyond_memory, ATTN_ERR_SIZE, "scratch")
{
    c->q.shape[3] = c->k.shape[3] = TWO(57);
    c->q.stride[3] = c->k.stride[3] = 0;
}

/* Shapes. */
SDPA(k_width, ATTN_ERR_SHAPE, "k|q|5|4|shape[3]")
{
    c->k.shape[3] = 5;
}
SDPA(k_batch, ATTN_ERR_SHAPE, "k|q|1|2|shape[0]")
{
    c->k.shape[0] = 1;
}
SDPA(v_batch, ATTN_ERR_SHAPE, "v|1|2|shape[0]")
{
    c->v.shape[0] = 1;
}
SDPA(v_heads, ATTN_ERR_SHAPE, "v|k|1|2|shape[1]")
{
    c->v.shape[1] = 1;
}
SDPA(v_len, ATTN_ERR_SHAPE, "v|k|4|5|shape[2]")
{
    c->v.shape[2] = 4;
}
SDPA(heads_no_multiple, ATTN_ERR_SHAPE, "q|k|3|2|multiple")
{
    c->q.shape[1] = c->out.shape[1] = 3;
}
SDPA(fewer_heads_than_kv_heads, ATTN_ERR_SHAPE, "q|k|1|2|multiple")
{
    c->q.shape[1] = c->out.shape[1] = 1;
}
SDPA(no_kv_heads, ATTN_ERR_SHAPE, "q|k|4|0")
{
    c->k.shape[1] = c->v.shape[1] = 0;
}
SDPA(out_batch, ATTN_ERR_SHAPE, "out|(1,4,3,6)|(2,4,3,6)")
{
    c->out.shape[0] = 1;
}
SDPA(out_heads, ATTN_ERR_SHAPE, "out|(2,2,3,6)|(2,4,3,6)")
{
    c->out.shape[1] = 2;
}
SDPA(out_len, ATTN_ERR_SHAPE, "out|(2,4,2,6)|(2,4,3,6)")
{
    c->out.shape[2] = 2;
}
SDPA(out_width, ATTN_ERR_SHAPE, "out|(2,4,3,4)|(2,4,3,6)")
{
    c->out.shape[3] = 4;
}
SDPA(lse_batch, ATTN_ERR_SHAPE, "lse|(1,4,3,1)|(2,4,3,1)")
{
    c->p.lse = &c->lse;
    c->lse.shape[0] = 1;
}
SDPA(lse_heads, ATTN_ERR_SHAPE, "lse|(2,2,3,1)|(2,4,3,1)")
{
    c->p.lse = &c->lse;
    c->lse.shape[1] = 2;
}
SDPA(lse_len, ATTN_ERR_SHAPE, "lse|(2,4,2,1)|(2,4,3,1)")
{
    c->p.lse = &c->lse;
    c->lse.shape[2] = 2;
}
SDPA(lse_width, ATTN_ERR_SHAPE, "lse|(2,4,3,0)|(2,4,3,1)")
{
    c->p.lse = &c->lse;
    c->lse.shape[3] = 0;
}
SDPA(weights_heads, ATTN_ERR_SHAPE, "weights|(2,1,3,5)|(2,4,3,5)")
{
    c->p.weights = &c->weights;
    c->weights.shape[1] = 1;
}
SDPA(weights_keys, ATTN_ERR_SHAPE, "weights|(2,4,3,4)|(2,4,3,5)")
{
    c->p.weights = &c->weights;
    c->weights.shape[3] = 4;
}
SDPA(mean_heads, ATTN_ERR_SHAPE, "weights_mean|(2,4,3,5)|(2,1,3,5)")
{
    c->p.weights_mean = &c->weights;
}
SDPA(mean_queries, ATTN_ERR_SHAPE, "weights_mean|(2,1,1,5)|(2,1,3,5)")
{
    c->p.weights_mean = &c->mean;
    c->mean.shape[2] = 1;
}
SDPA(mask_batch, ATTN_ERR_SHAPE, "mask|3|2|shape[0]")
{
    use_masks(c, 1);
    c->masks[0].view.shape[0] = 3;
}
SDPA(mask_heads_are_query_heads, ATTN_ERR_SHAPE, "mask|2|4|shape[1]")
{
    use_masks(c, 1);
    c->masks[0].view.shape[1] = HKV;
}
SDPA(mask_queries, ATTN_ERR_SHAPE, "mask|2|3|shape[2]")
{
    use_masks(c, 1);
    c->masks[0].view.shape[2] = 2;
}
SDPA(mask_keys, ATTN_ERR_SHAPE, "mask|4|5|shape[3]")
{
    use_masks(c, 4);
    c->masks[3].view.shape[3] = 4;
}
SDPA(mask_of_no_keys, ATTN_ERR_SHAPE, "mask|0|5|shape[3]")
{
    use_masks(c, 1);
    c->masks[0].view.shape[3] = 0;
}
SDPA(ragged_batch_of_2, ATTN_ERR_SHAPE, "q|batch 2|cu_q|(1,")
{
    use_ragged(c);
    c->q.shape[0] = c->k.shape[0] = c->v.shape[0] = c->out.shape[0] = 2;
}
SDPA(ragged_mask_batch, ATTN_ERR_SHAPE, "mask|2|3")
{
    use_ragged(c);
    c->p.num_seqs = 3;
    use_masks(c, 1);
}

/* Types. */
SDPA(q_type_0, ATTN_ERR_TYPE, "q|0")
{
    c->q.dtype = 0;
}
SDPA(q_type_4, ATTN_ERR_TYPE, "q|4")
{
    c->q.dtype = 4;
}
SDPA(all_u8, ATTN_ERR_TYPE, "q")
{
    c->q.dtype = c->k.dtype = c->v.dtype = c->out.dtype = ATTN_U8;
}
SDPA(k_type, ATTN_ERR_TYPE, "k|F64|F32")
{
    c->k.dtype = ATTN_F64;
}
SDPA(v_type, ATTN_ERR_TYPE, "v")
{
    c->v.dtype = ATTN_F64;
}
SDPA(out_type, ATTN_ERR_TYPE, "out")
{
    c->out.dtype = ATTN_F64;
}
SDPA(lse_type, ATTN_ERR_TYPE, "lse")
{
    use_outputs(c);
    c->lse.dtype = ATTN_F64;
}
SDPA(weights_type, ATTN_ERR_TYPE, "weights")
{
    use_outputs(c);
    c->weights.dtype = ATTN_F64;
}
SDPA(mean_type, ATTN_ERR_TYPE, "weights_mean")
{
    use_outputs(c);
    c->mean.dtype = 99;
}
SDPA(keep_mask_of_floats, ATTN_ERR_TYPE, "mask")
{
    use_add_mask(c);
    c->masks[0].kind = ATTN_MASK_KEEP;
}
SDPA(drop_mask_of_floats, ATTN_ERR_TYPE, "mask")
{
    use_add_mask(c);
    c->masks[0].kind = ATTN_MASK_DROP;
}
SDPA(add_mask_of_bytes, ATTN_ERR_TYPE, "mask")
{
    use_masks(c, 1);
    c->masks[0].kind = ATTN_MASK_ADD;
}
SDPA(add_mask_of_doubles, ATTN_ERR_TYPE, "mask")
{
    use_add_mask(c);
    c->masks[0].view.dtype = ATTN_F64;
}
SDPA(mask_type_unknown, ATTN_ERR_TYPE, "mask")
{
    use_masks(c, 1);
    c->masks[0].view.dtype = 7;
}

/* Constants and numbers. */
SDPA(mask_kind_0, ATTN_ERR_VALUE, "mask|kind|0")
{
    use_masks(c, 1);
    c->masks[0].kind = 0;
}
SDPA(mask_kind_4, ATTN_ERR_VALUE, "mask|kind|4")
{
    use_masks(c, 3);
    c->masks[2].kind = 4;
}
SDPA(mask_kind_negative, ATTN_ERR_VALUE, "mask|kind|-1")
{
    use_masks(c, 1);
    c->masks[0].kind = -1;
}
SDPA(num_masks_negative, ATTN_ERR_VALUE, "num_masks|-1")
{
    use_masks(c, -1);
}
SDPA(num_masks_5, ATTN_ERR_VALUE, "num_masks|5|4")
{
    use_masks(c, 5);
}
SDPA(causal_2, ATTN_ERR_VALUE, "causal|2")
{
    use_causal(c);
    c->p.causal = 2;
}
SDPA(causal_negative, ATTN_ERR_VALUE, "causal|-1")
{
    use_causal(c);
    c->p.causal = -1;
}
SDPA(causal_without_align, ATTN_ERR_VALUE, "align|0|3|5")
{
    c->p.causal = 1;
}
SDPA(window_without_align, ATTN_ERR_VALUE, "align|0|3|5")
{
    use_window(c, 1, 1);
    c->p.align = 0;
}
SDPA(chunk_without_align, ATTN_ERR_VALUE, "align|0|3|5")
{
    c->p.chunk = 2;
}
SDPA(causal_without_align_unequal_lens, ATTN_ERR_VALUE, "align|0|3|2")
{
    c->k.shape[2] = c->v.shape[2] = TQ; /* equal sizes, but kv_lens differ */
    c->p.causal = 1;
    c->p.kv_lens = c->kv_lens;
}
SDPA(align_4, ATTN_ERR_VALUE, "align|4")
{
    use_causal(c);
    c->p.align = 4;
}
SDPA(align_negative, ATTN_ERR_VALUE, "align|-1")
{
    use_causal(c);
    c->p.align = -1;
}
SDPA(align_unknown_though_not_needed, ATTN_ERR_VALUE, "align|77")
{
    c->p.align = 77;
}
SDPA(window_left_below_minus_1, ATTN_ERR_VALUE, "window_left|-2")
{
    use_window(c, -2, 0);
}
SDPA(window_right_below_minus_1, ATTN_ERR_VALUE,
     "window_right|-9223372036854775808")
{
    use_window(c, 0, INT64_MIN);
}
SDPA(keep_first_negative, ATTN_ERR_VALUE, "keep_first|-1")
{
    use_window(c, 1, 1);
    c->p.keep_first = -1;
}
SDPA(chunk_negative, ATTN_ERR_VALUE, "chunk|-2")
{
    c->p.align = ATTN_ALIGN_TOP_LEFT;
    c->p.chunk = -2;
}
SDPA(prefix_without_causal, ATTN_ERR_VALUE, "prefix_lens|causal")
{
    c->p.prefix_lens = c->prefix_lens;
}
SDPA(prefix_negative, ATTN_ERR_VALUE, "prefix_lens|-1")
{
    use_causal(c);
    c->p.prefix_lens = c->prefix_lens;
    c->prefix_lens[0] = -1;
}
SDPA(prefix_beyond_keys, ATTN_ERR_VALUE, "prefix_lens|6|5")
{
    use_causal(c);
    c->p.prefix_lens = c->prefix_lens;
    c->prefix_lens[1] = 6;
}
SDPA(q_lens_negative, ATTN_ERR_VALUE, "q_lens|-4")
{
    c->p.q_lens = c->q_lens;
    c->q_lens[1] = -4;
}
SDPA(q_lens_beyond, ATTN_ERR_VALUE, "q_lens|4|3")
{
    c->p.q_lens = c->q_lens;
    c->q_lens[0] = 4;
}
SDPA(kv_lens_negative, ATTN_ERR_VALUE, "kv_lens|-1")
{
    c->p.kv_lens = c->kv_lens;
    c->kv_lens[0] = -1;
}
SDPA(kv_lens_beyond, ATTN_ERR_VALUE, "kv_lens|6|5")
{
    c->p.kv_lens = c->kv_lens;
    c->kv_lens[1] = 6;
}
SDPA(kv_lens_far_beyond, ATTN_ERR_VALUE, "kv_lens|9223372036854775807")
{
    c->p.kv_lens = c->kv_lens;
    c->kv_lens[1] = INT64_MAX;
}
SDPA(cu_q_decreasing, ATTN_ERR_VALUE, "cu_q|2|1")
{
    use_ragged(c);
    c->cu_q[1] = 2;
    c->cu_q[2] = 1;
}
SDPA(cu_k_decreasing, ATTN_ERR_VALUE, "cu_k|5|4")
{
    use_ragged(c);
    c->cu_k[1] = 5;
    c->cu_k[2] = 4;
}
SDPA(cu_q_beyond, ATTN_ERR_VALUE, "cu_q|4|3")
{
    use_ragged(c);
    c->cu_q[2] = 4;
}
SDPA(cu_k_beyond, ATTN_ERR_VALUE, "cu_k|6|5")
{
    use_ragged(c);
    c->cu_k[2] = 6;
}
SDPA(cu_q_negative, ATTN_ERR_VALUE, "cu_q|-1")
{
    use_ragged(c);
    c->cu_q[0] = -1;
}
SDPA(cu_k_negative, ATTN_ERR_VALUE, "cu_k|-1")
{
    use_ragged(c);
    c->cu_k[0] = -1;
}
SDPA(cu_with_q_lens, ATTN_ERR_VALUE, "cu_q|q_lens")
{
    use_ragged(c);
    c->p.q_lens = c->q_lens;
}
SDPA(cu_with_kv_lens, ATTN_ERR_VALUE, "cu_|kv_lens")
{
    use_ragged(c);
    c->p.kv_lens = c->kv_lens;
}
SDPA(scale_nan, ATTN_ERR_VALUE, "scale|nan")
{
    use_scale(c, (double)NAN);
}
SDPA(scale_inf, ATTN_ERR_VALUE, "scale|inf")
{
    use_scale(c, (double)INFINITY);
}
SDPA(scale_minus_inf, ATTN_ERR_VALUE, "scale|-inf")
{
    use_scale(c, -(double)INFINITY);
}

SDPA(scale_without_its_flag, ATTN_ERR_VALUE, "scale|ATTN_SDPA_SCALE")
{
    c->p.scale = 0.5;
}
SDPA(window_without_its_flag, ATTN_ERR_VALUE, "window_left|ATTN_SDPA_WINDOW")
{
    c->p.window_left = 3;
}
SDPA(window_right_without_its_flag, ATTN_ERR_VALUE, "ATTN_SDPA_WINDOW")
{
    c->p.window_right = -1;
}
SDPA(keep_first_without_window, ATTN_ERR_VALUE, "keep_first|ATTN_SDPA_WINDOW")
{
    c->p.keep_first = 1;
}
SDPA(q_offset_without_align, ATTN_ERR_VALUE, "q_offset|align")
{
    use_causal(c);
    c->p.q_offset = 2;
}
SDPA(q_offsets_without_align, ATTN_ERR_VALUE, "q_offsets|align")
{
    c->p.q_offsets = c->q_offsets;
}
SDPA(q_offset_and_q_offsets, ATTN_ERR_VALUE, "q_offset|-7|q_offsets")
{
    c->p.align = ATTN_ALIGN_OFFSET;
    c->p.q_offset = -7;
    c->p.q_offsets = c->q_offsets;
}
SDPA(masks_but_none_counted, ATTN_ERR_VALUE, "masks|num_masks|0")
{
    use_masks(c, 0);
}
SDPA(num_seqs_alone, ATTN_ERR_NULL, "cu_q|NULL")
{
    c->p.num_seqs = 1;
}

/* Structs and what this version does not know. */
SDPA(struct_size_0, ATTN_ERR_STRUCT, "struct_size|0")
{
    c->p.struct_size = 0;
}
SDPA(struct_size_one_less, ATTN_ERR_STRUCT, "struct_size|159|160")
{
    c->p.struct_size = offsetof(attn_sdpa_params, softcap) - 1;
}
SDPA(unknown_flag, ATTN_ERR_UNSUPPORTED, "flags")
{
    c->p.flags = 8;
}
SDPA(unknown_high_flag, ATTN_ERR_UNSUPPORTED, "flags")
{
    c->p.flags = 1 << 30 | ATTN_SDPA_BLAS_ONLY;
}
SDPA(all_flags, ATTN_ERR_UNSUPPORTED, "flags")
{
    c->p.flags = -1;
}
SDPA(q_reserved, ATTN_ERR_UNSUPPORTED, "q|reserved|1")
{
    c->q.reserved = 1;
}
SDPA(k_reserved, ATTN_ERR_UNSUPPORTED, "k|reserved|-1")
{
    c->k.reserved = -1;
}
SDPA(v_reserved, ATTN_ERR_UNSUPPORTED, "v|reserved|1")
{
    c->v.reserved = 1;
}
SDPA(out_reserved, ATTN_ERR_UNSUPPORTED, "out|reserved|1")
{
    c->out.reserved = 1;
}
SDPA(lse_reserved, ATTN_ERR_UNSUPPORTED, "lse|reserved|1")
{
    use_outputs(c);
    c->lse.reserved = 1;
}
SDPA(weights_reserved, ATTN_ERR_UNSUPPORTED, "weights|reserved|1")
{
    use_outputs(c);
    c->weights.reserved = 1;
}
SDPA(mean_reserved, ATTN_ERR_UNSUPPORTED, "weights_mean|reserved|1")
{
    use_outputs(c);
    c->mean.reserved = 1;
}
SDPA(mask_reserved, ATTN_ERR_UNSUPPORTED, "mask|reserved|1")
{
    use_masks(c, 1);
    c->masks[0].reserved = 1;
}
SDPA(mask_view_reserved, ATTN_ERR_UNSUPPORTED, "mask|reserved|1")
{
    use_masks(c, 1);
    c->masks[0].view.reserved = 1;
}

/* Strides. */
SDPA(out_stride_0, ATTN_ERR_STRIDE, "out|0")
{
    c->out.stride[2] = 0;
}
SDPA(out_strides_meet, ATTN_ERR_STRIDE, "out")
{
    c->out.stride[2] = DV - 1; /* row 1 starts on the end of row 0 */
}
SDPA(out_heads_meet, ATTN_ERR_STRIDE, "out")
{
    c->out.stride[1] = TQ * DV - DV; /* head 1 starts on the last row */
}
SDPA(out_strides_meet_backwards, ATTN_ERR_STRIDE, "out")
{
    c->out.stride[2] = -1;
    shift(&c->out, 2 * 4);
}
SDPA(lse_stride_0, ATTN_ERR_STRIDE, "lse|0")
{
    use_outputs(c);
    c->lse.stride[0] = 0;
}
SDPA(weights_stride_0, ATTN_ERR_STRIDE, "weights|0")
{
    use_outputs(c);
    c->weights.stride[3] = 0;
}
SDPA(mean_strides_meet, ATTN_ERR_STRIDE, "weights_mean")
{
    use_outputs(c);
    c->mean.stride[2] = 1;
}
SDPA(q_stride_beyond_memory, ATTN_ERR_STRIDE, "q|9223372036854775807")
{
    c->q.stride[2] = INT64_MAX;
}
SDPA(k_stride_beyond_memory, ATTN_ERR_STRIDE, "k|-9223372036854775808")
{
    c->k.stride[2] = INT64_MIN;
}
SDPA(v_strides_beyond_memory, ATTN_ERR_STRIDE, "v|4611686018427387904")
{
    c->v.stride[1] = TWO(62);
    c->v.stride[2] = TWO(62);
}
SDPA(out_stride_beyond_memory, ATTN_ERR_STRIDE, "out|2305843009213693952")
{
    c->out.stride[0] = TWO(61);
}
SDPA(mask_stride_beyond_memory, ATTN_ERR_STRIDE, "mask|9223372036854775807")
{
    use_masks(c, 1);
    c->masks[0].view.stride[2] = INT64_MAX;
}

/* Alignment. */
SDPA(q_misaligned, ATTN_ERR_ALIGN, "q")
{
    shift(&c->q, 1);
}
SDPA(k_misaligned, ATTN_ERR_ALIGN, "k")
{
    shift(&c->k, 2);
}
SDPA(v_misaligned, ATTN_ERR_ALIGN, "v")
{
    shift(&c->v, 3);
}
SDPA(out_misaligned, ATTN_ERR_ALIGN, "out")
{
    shift(&c->out, 1);
}
SDPA(lse_misaligned, ATTN_ERR_ALIGN, "lse")
{
    use_outputs(c);
    shift(&c->lse, 2);
}
SDPA(weights_misaligned, ATTN_ERR_ALIGN, "weights")
{
    use_outputs(c);
    shift(&c->weights, 1);
}
SDPA(mean_misaligned, ATTN_ERR_ALIGN, "weights_mean")
{
    use_outputs(c);
    shift(&c->mean, 1);
}
SDPA(mask_misaligned, ATTN_ERR_ALIGN, "mask")
{
    use_add_mask(c);
    shift(&c->masks[0].view, 1);
}

/* Overlap. */
SDPA(out_in_q, ATTN_ERR_OVERLAP, "out|q")
{
    c->v.shape[3] = D;
    c->out = c->q;
    shift(&c->out, 4);
}
SDPA(out_is_q_though_weights_need_it, ATTN_ERR_OVERLAP, "out|q")
{
    c->v.shape[3] = D;
    c->out = c->q;
    c->p.weights = &c->weights;
}
SDPA(out_is_q_though_the_mean_needs_it, ATTN_ERR_OVERLAP, "out|q")
{
    c->v.shape[3] = D;
    c->out = c->q;
    c->p.weights_mean = &c->mean;
}
SDPA(out_is_q_with_other_strides, ATTN_ERR_OVERLAP, "out|q")
{
    c->v.shape[3] = D;
    c->out = c->q;
    c->out.stride[1] = D;
    c->out.stride[2] = HQ * D;
}
SDPA(out_starts_at_q_but_is_wider, ATTN_ERR_OVERLAP, "out|q")
{
    c->out.data = c->q.data;
}
SDPA(out_touches_last_of_k, ATTN_ERR_OVERLAP, "out|k")
{
    c->out.data = (float *)c->k.data + kit_elements(&c->k) - 1;
}
SDPA(out_is_v, ATTN_ERR_OVERLAP, "out|v")
{
    c->q.shape[1] = c->out.shape[1] = HKV;
    c->q.shape[2] = c->out.shape[2] = TK;
    c->q.stride[0] = HKV * TK * D;
    c->q.stride[1] = TK * D;
    c->out = c->v;
}
SDPA(out_is_mask, ATTN_ERR_OVERLAP, "out|mask")
{
    use_add_mask(c);
    c->out.data = c->masks[0].view.data;
}
SDPA(lse_in_out, ATTN_ERR_OVERLAP, "lse|out")
{
    use_outputs(c);
    c->lse.data = c->out.data;
}
SDPA(lse_is_q, ATTN_ERR_OVERLAP, "lse|q")
{
    use_outputs(c);
    c->lse.data = c->q.data;
}
SDPA(weights_in_out, ATTN_ERR_OVERLAP, "weights|out")
{
    use_outputs(c);
    c->weights.data = c->out.data;
}
SDPA(weights_in_v, ATTN_ERR_OVERLAP, "weights|v")
{
    use_outputs(c);
    c->weights.data = c->v.data;
}
SDPA(mean_in_weights, ATTN_ERR_OVERLAP, "weights_mean|weights")
{
    use_outputs(c);
    c->mean.data = c->weights.data;
}
SDPA(mean_in_lse, ATTN_ERR_OVERLAP, "weights_mean|lse")
{
    use_outputs(c);
    c->mean.data = c->lse.data;
}
SDPA(mean_is_mask, ATTN_ERR_OVERLAP, "weights_mean|mask")
{
    use_outputs(c);
    use_add_mask(c);
    c->mean.data = c->masks[0].view.data;
}

/* Caps, slopes, sinks. */
SDPA(softcap_negative, ATTN_ERR_VALUE, "softcap|-2")
{
    c->p.softcap = -2.0;
}
SDPA(softcap_nan, ATTN_ERR_VALUE, "softcap|nan")
{
    c->p.softcap = (double)NAN;
}
SDPA(softcap_inf, ATTN_ERR_VALUE, "softcap|inf")
{
    c->p.softcap = (double)INFINITY;
}
SDPA(alibi_data_null, ATTN_ERR_NULL, "params.alibi|data|NULL")
{
    c->p.align = ATTN_ALIGN_TOP_LEFT;
    c->p.alibi = &c->slopes;
    c->slopes.data = NULL;
}
SDPA(alibi_of_kv_heads, ATTN_ERR_SHAPE,
     "params.alibi|(1,1,1,2)|(1,1,1,Hq)|(B,Hq,1,1)|4")
{
    c->slopes = take_view(ATTN_F32, 1, 1, 1, HKV);
    c->p.align = ATTN_ALIGN_TOP_LEFT;
    c->p.alibi = &c->slopes;
}
SDPA(alibi_of_one_sequence, ATTN_ERR_SHAPE,
     "params.alibi|(1,4,1,1)|(B,Hq,1,1)|2")
{
    c->slopes = take_view(ATTN_F32, 1, HQ, 1, 1);
    c->p.align = ATTN_ALIGN_TOP_LEFT;
    c->p.alibi = &c->slopes;
}
SDPA(alibi_along_a_wrong_axis, ATTN_ERR_SHAPE,
     "params.alibi|(1,1,4,1)|(1,1,1,Hq)")
{
    c->slopes = take_view(ATTN_F32, 1, 1, HQ, 1);
    c->p.align = ATTN_ALIGN_TOP_LEFT;
    c->p.alibi = &c->slopes;
}
SDPA(alibi_negative, ATTN_ERR_SIZE, "params.alibi|-1")
{
    c->p.align = ATTN_ALIGN_TOP_LEFT;
    c->p.alibi = &c->slopes;
    c->slopes.shape[3] = -1;
}
SDPA(alibi_of_doubles, ATTN_ERR_TYPE, "params.alibi|F64|F32")
{
    c->slopes = take_view(ATTN_F64, 1, 1, 1, HQ);
    c->p.align = ATTN_ALIGN_TOP_LEFT;
    c->p.alibi = &c->slopes;
}
SDPA(alibi_in_16_bits, ATTN_ERR_TYPE, "params.alibi|BF16|F32")
{
    c->p.align = ATTN_ALIGN_TOP_LEFT;
    c->p.alibi = &c->slopes;
    c->slopes.dtype = ATTN_BF16;
}
SDPA(alibi_reserved, ATTN_ERR_UNSUPPORTED, "params.alibi|reserved|1")
{
    c->p.align = ATTN_ALIGN_TOP_LEFT;
    c->p.alibi = &c->slopes;
    c->slopes.reserved = 1;
}
SDPA(alibi_odd, ATTN_ERR_ALIGN, "params.alibi")
{
    c->p.align = ATTN_ALIGN_TOP_LEFT;
    c->p.alibi = &c->slopes;
    shift(&c->slopes, 1);
}
SDPA(alibi_stride_beyond_memory, ATTN_ERR_STRIDE,
     "params.alibi|9223372036854775807")
{
    c->p.align = ATTN_ALIGN_TOP_LEFT;
    c->p.alibi = &c->slopes;
    c->slopes.stride[3] = INT64_MAX;
}
SDPA(out_is_alibi, ATTN_ERR_OVERLAP, "out|params.alibi")
{
    c->p.align = ATTN_ALIGN_TOP_LEFT;
    c->p.alibi = &c->slopes;
    c->out.data = c->slopes.data;
}
SDPA(sinks_data_null, ATTN_ERR_NULL, "params.sinks|data|NULL")
{
    c->p.sinks = &c->sinks;
    c->sinks.data = NULL;
}
SDPA(sinks_of_kv_heads, ATTN_ERR_SHAPE,
     "params.sinks|(1,1,1,2)|(1,1,1,Hq)|(B,Hq,1,1)|4")
{
    c->sinks = take_view(ATTN_F32, 1, 1, 1, HKV);
    c->p.sinks = &c->sinks;
}
SDPA(sinks_of_one_sequence, ATTN_ERR_SHAPE,
     "params.sinks|(1,4,1,1)|(B,Hq,1,1)|2")
{
    c->sinks = take_view(ATTN_F32, 1, HQ, 1, 1);
    c->p.sinks = &c->sinks;
}
SDPA(sinks_along_a_wrong_axis, ATTN_ERR_SHAPE,
     "params.sinks|(1,1,4,1)|(1,1,1,Hq)")
{
    c->sinks = take_view(ATTN_F32, 1, 1, HQ, 1);
    c->p.sinks = &c->sinks;
}
SDPA(sinks_negative, ATTN_ERR_SIZE, "params.sinks|-1")
{
    c->p.sinks = &c->sinks;
    c->sinks.shape[3] = -1;
}
SDPA(sinks_of_doubles, ATTN_ERR_TYPE, "params.sinks|F64|F32")
{
    c->sinks = take_view(ATTN_F64, 1, 1, 1, HQ);
    c->p.sinks = &c->sinks;
}
SDPA(sinks_in_16_bits, ATTN_ERR_TYPE, "params.sinks|BF16|F32")
{
    c->p.sinks = &c->sinks;
    c->sinks.dtype = ATTN_BF16;
}
SDPA(sinks_reserved, ATTN_ERR_UNSUPPORTED, "params.sinks|reserved|1")
{
    c->p.sinks = &c->sinks;
    c->sinks.reserved = 1;
}
SDPA(sinks_odd, ATTN_ERR_ALIGN, "params.sinks")
{
    c->p.sinks = &c->sinks;
    shift(&c->sinks, 1);
}
SDPA(sinks_stride_beyond_memory, ATTN_ERR_STRIDE,
     "params.sinks|9223372036854775807")
{
    c->p.sinks = &c->sinks;
    c->sinks.stride[1] = INT64_MAX;
}
SDPA(out_is_sinks, ATTN_ERR_OVERLAP, "out|params.sinks")
{
    c->p.sinks = &c->sinks;
    c->out.data = c->sinks.data;
}
SDPA(alibi_without_align, ATTN_ERR_VALUE, "align|0|3|5")
{
    c->p.alibi = &c->slopes;
}

/* First keys, segments, blocks. */
SDPA(kv_starts_negative, ATTN_ERR_VALUE, "kv_starts[1]|-1|[0, 5]")
{
    c->p.kv_starts = c->kv_starts;
    c->kv_starts[1] = -1;
}
SDPA(kv_starts_beyond, ATTN_ERR_VALUE, "kv_starts[0]|6|[0, 5]")
{
    c->p.kv_starts = c->kv_starts;
    c->kv_starts[0] = TK + 1;
}
SDPA(kv_starts_beyond_the_longest, ATTN_ERR_VALUE, "kv_starts[1]|2|[0, 1]")
{
    use_ragged(c);
    c->p.kv_starts = c->kv_starts;
    c->kv_starts[1] = 2;
}
SDPA(q_segments_alone, ATTN_ERR_NULL, "kv_segments|NULL|q_segments")
{
    use_segments(c);
    c->p.kv_segments = NULL;
}
SDPA(kv_segments_alone, ATTN_ERR_NULL, "q_segments|NULL|kv_segments")
{
    use_segments(c);
    c->p.q_segments = NULL;
}
SDPA(blocks_data_null, ATTN_ERR_NULL, "params.blocks|data|NULL")
{
    use_blocks(c);
    c->blocks.data = NULL;
}
SDPA(blocks_without_block_q, ATTN_ERR_VALUE, "block_q|0|block_k|2|positive")
{
    use_blocks(c);
    c->p.block_q = 0;
}
SDPA(blocks_without_block_k, ATTN_ERR_VALUE, "block_q|2|block_k|0|positive")
{
    use_blocks(c);
    c->p.block_k = 0;
}
SDPA(block_q_negative, ATTN_ERR_VALUE, "block_q|-2")
{
    use_blocks(c);
    c->p.block_q = -2;
}
SDPA(block_k_negative, ATTN_ERR_VALUE, "block_k|-9223372036854775808")
{
    use_blocks(c);
    c->p.block_k = INT64_MIN;
}
SDPA(block_q_without_blocks, ATTN_ERR_VALUE, "block_q|2|blocks|NULL")
{
    c->p.block_q = 2;
}
SDPA(block_k_without_blocks, ATTN_ERR_VALUE, "block_k|3|blocks|NULL")
{
    c->p.block_k = 3;
}
SDPA(blocks_batch, ATTN_ERR_SHAPE, "params.blocks|shape[0]|3|2")
{
    c->blocks = take_view(ATTN_U8, 3, HQ, 2, 3);
    use_blocks(c);
}
SDPA(blocks_heads_are_query_heads, ATTN_ERR_SHAPE, "params.blocks|shape[1]|2|4")
{
    use_blocks(c);
    c->blocks.shape[1] = HKV;
}
SDPA(blocks_rows_are_rounded_up, ATTN_ERR_SHAPE, "params.blocks|shape[2]|1|2")
{
    use_blocks(c);
    c->blocks.shape[2] = TQ / 2;
}
SDPA(blocks_columns_are_rounded_up, ATTN_ERR_SHAPE,
     "params.blocks|shape[3]|2|3")
{
    use_blocks(c);
    c->blocks.shape[3] = TK / 2;
}
SDPA(blocks_rows_are_not_broadcast, ATTN_ERR_SHAPE,
     "params.blocks|shape[2]|1|3")
{
    use_blocks(c);
    c->p.block_q = 1;
    c->blocks.shape[2] = 1;
}
SDPA(blocks_of_floats, ATTN_ERR_TYPE, "params.blocks|F32|U8")
{
    c->blocks = take_view(ATTN_F32, B, HQ, 2, 3);
    use_blocks(c);
}
SDPA(blocks_reserved, ATTN_ERR_UNSUPPORTED, "params.blocks|reserved|1")
{
    use_blocks(c);
    c->blocks.reserved = 1;
}
SDPA(blocks_stride_beyond_memory, ATTN_ERR_STRIDE,
     "params.blocks|9223372036854775807")
{
    use_blocks(c);
    c->blocks.stride[2] = INT64_MAX;
}
SDPA(out_is_blocks, ATTN_ERR_OVERLAP, "out|params.blocks")
{
    use_blocks(c);
    c->out.data = c->blocks.data;
}

/* Pages. */
SDPA(pages_without_kv_lens, ATTN_ERR_NULL, "kv_lens|NULL|page_table")
{
    use_pages(c);
    c->p.kv_lens = NULL;
}
SDPA(pages_per_seq_negative, ATTN_ERR_SIZE, "pages_per_seq|-1")
{
    use_pages(c);
    c->p.pages_per_seq = -1;
}
SDPA(pages_of_too_many_keys, ATTN_ERR_SIZE,
     "pages_per_seq|4611686018427387904|2")
{
    use_pages(c);
    c->p.pages_per_seq = TWO(62);
}
SDPA(pages_of_too_many_keys_together, ATTN_ERR_SIZE,
     "pages_per_seq|2305843009213693952|2 keys|2 sequences")
{
    use_pages(c);
    c->p.pages_per_seq = TWO(61);
}
SDPA(pages_per_seq_without_a_table, ATTN_ERR_VALUE,
     "pages_per_seq|3|page_table|NULL")
{
    c->p.pages_per_seq = 3;
}
SDPA(page_missing, ATTN_ERR_VALUE,
     "page_table[2]|-1|keys 4 to 4|sequence 0|[0, 7)")
{
    use_pages(c);
    c->page_table[2] = -1;
}
SDPA(page_beyond_the_pool, ATTN_ERR_VALUE,
     "page_table[3]|7|keys 0 to 1|sequence 1|[0, 7)")
{
    use_pages(c);
    c->page_table[3] = 7;
}
SDPA(page_of_the_first_key, ATTN_ERR_VALUE, "page_table[1]|-1|sequence 0")
{
    use_pages(c);
    c->page_table[0] = c->page_table[1] = -1;
    c->p.kv_starts = c->kv_starts;
    c->kv_starts[0] = 3; /* the second key of page 1 */
}
SDPA(pages_kv_lens_beyond, ATTN_ERR_VALUE, "kv_lens[1]|7|[0, 6]")
{
    use_pages(c);
    c->kv_lens[1] = 7;
}
SDPA(pages_kv_lens_negative, ATTN_ERR_VALUE, "kv_lens[0]|-1")
{
    use_pages(c);
    c->kv_lens[0] = -1;
}
SDPA(pages_with_cu_k, ATTN_ERR_VALUE, "page_table|cu_k")
{
    use_pages(c);
    use_ragged(c);
    c->k.shape[0] = c->v.shape[0] = 7;
}
SDPA(pages_with_a_ring, ATTN_ERR_VALUE, "page_table|ring_starts")
{
    use_pages(c);
    use_ring(c);
}
SDPA(pages_of_k_and_v, ATTN_ERR_SHAPE, "v|6|k|7|pages")
{
    use_pages(c);
    c->v.shape[0] = 6;
}
SDPA(pages_ragged_with_q_lens, ATTN_ERR_VALUE, "q_lens|cu_q")
{
    use_pages(c);
    use_ragged(c);
    c->k.shape[0] = c->v.shape[0] = 7;
    c->p.cu_k = NULL;
    c->p.q_lens = c->q_lens;
}
SDPA(pages_weights_of_all_keys, ATTN_ERR_SHAPE, "weights|(2,4,3,5)|(2,4,3,6)")
{
    use_pages(c);
    c->p.weights = &c->weights;
}
SDPA(pages_segments_alone, ATTN_ERR_NULL, "kv_segments|NULL")
{
    use_pages(c);
    c->p.q_segments = c->q_segments;
}

/* Rings and positions. */
SDPA(ring_starts_negative, ATTN_ERR_VALUE, "ring_starts[1]|-1|[0, 4]")
{
    use_ring(c);
    c->ring_starts[1] = -1;
}
SDPA(ring_starts_beyond, ATTN_ERR_VALUE, "ring_starts[0]|5|[0, 4]")
{
    use_ring(c);
    c->ring_starts[0] = TK;
}
SDPA(ring_of_no_keys, ATTN_ERR_VALUE, "ring_starts[0]|4|[0, 0]")
{
    c->k.shape[2] = c->v.shape[2] = 0;
    use_ring(c);
}
SDPA(ring_of_a_ragged_batch, ATTN_ERR_VALUE, "ring_starts|cu_k")
{
    use_ragged(c);
    use_ring(c);
}
SDPA(kv_offset_of_int64_min, ATTN_ERR_VALUE,
     "kv_offsets[1]|-9223372036854775808|(-2^62, 2^62)")
{
    c->p.kv_offsets = c->kv_offsets;
    c->kv_offsets[1] = INT64_MIN;
}
SDPA(kv_offset_of_2_to_62, ATTN_ERR_VALUE,
     "kv_offsets[0]|4611686018427387904|(-2^62, 2^62)")
{
    c->p.kv_offsets = c->kv_offsets;
    c->kv_offsets[0] = TWO(62);
}
SDPA(q_offset_far_from_kv_offsets, ATTN_ERR_VALUE,
     "q_offset|-4611686018427387904|(-2^62, 2^62)")
{
    c->p.kv_offsets = c->kv_offsets;
    c->p.align = ATTN_ALIGN_OFFSET;
    c->p.q_offset = -TWO(62);
}
SDPA(q_offsets_far_from_kv_offsets, ATTN_ERR_VALUE,
     "q_offsets[1]|9223372036854775807|(-2^62, 2^62)")
{
    c->p.kv_offsets = c->kv_offsets;
    c->p.align = ATTN_ALIGN_OFFSET;
    c->p.q_offsets = c->q_offsets;
    c->q_offsets[1] = INT64_MAX;
}
SDPA(kv_offsets_without_align_causal, ATTN_ERR_VALUE, "align|0|kv_offsets")
{
    c->k.shape[2] = c->v.shape[2] = TQ; /* equal lengths */
    use_causal(c);
    c->p.align = 0;
    c->p.kv_offsets = c->kv_offsets;
}
SDPA(kv_offsets_without_align_window, ATTN_ERR_VALUE, "align|0|kv_offsets")
{
    c->k.shape[2] = c->v.shape[2] = TQ; /* equal lengths */
    use_window(c, 1, 1);
    c->p.align = 0;
    c->p.kv_offsets = c->kv_offsets;
}
SDPA(kv_offsets_without_align_chunk, ATTN_ERR_VALUE, "align|0|kv_offsets")
{
    c->k.shape[2] = c->v.shape[2] = TQ; /* equal lengths */
    c->p.chunk = 2;
    c->p.align = 0;
    c->p.kv_offsets = c->kv_offsets;
}
SDPA(kv_offsets_without_align_alibi, ATTN_ERR_VALUE, "align|0|kv_offsets")
{
    c->k.shape[2] = c->v.shape[2] = TQ; /* equal lengths */
    c->p.alibi = &c->slopes;
    c->p.align = 0;
    c->p.kv_offsets = c->kv_offsets;
}

/* Storage in 16 bits. */
SDPA(k_f16_beside_f64, ATTN_ERR_TYPE, "k|F16|F64")
{
    c->q = take_view(ATTN_F64, B, HQ, TQ, D);
    c->out = take_view(ATTN_F64, B, HQ, TQ, DV);
    c->k.dtype = c->v.dtype = ATTN_F16;
}
SDPA(k_bf16_beside_f64, ATTN_ERR_TYPE, "k|BF16|F64")
{
    c->q = take_view(ATTN_F64, B, HQ, TQ, D);
    c->out = take_view(ATTN_F64, B, HQ, TQ, DV);
    c->k.dtype = c->v.dtype = ATTN_BF16;
}
SDPA(k_f16_beside_v_bf16, ATTN_ERR_TYPE, "k|F16|v|BF16")
{
    c->k.dtype = ATTN_F16;
    c->v.dtype = ATTN_BF16;
}
SDPA(k_f16_beside_v_f32, ATTN_ERR_TYPE, "k|F16|v|F32")
{
    c->k.dtype = ATTN_F16;
}
SDPA(v_f16_beside_k_f32, ATTN_ERR_TYPE, "k|F32|v|F16")
{
    c->v.dtype = ATTN_F16;
}
SDPA(q_f16, ATTN_ERR_TYPE, "q|F16")
{
    c->q.dtype = c->k.dtype = c->v.dtype = ATTN_F16;
}
SDPA(q_bf16, ATTN_ERR_TYPE, "q|BF16")
{
    c->q.dtype = ATTN_BF16;
}
SDPA(out_f16, ATTN_ERR_TYPE, "out|F16|F32")
{
    c->k.dtype = c->v.dtype = c->out.dtype = ATTN_F16;
}
SDPA(lse_bf16, ATTN_ERR_TYPE, "lse|BF16|F32")
{
    use_outputs(c);
    c->lse.dtype = ATTN_BF16;
}
SDPA(add_mask_f16, ATTN_ERR_TYPE, "mask|F16")
{
    use_add_mask(c);
    c->masks[0].view.dtype = ATTN_F16;
}
SDPA(k_f16_odd, ATTN_ERR_ALIGN, "k")
{
    c->k.dtype = c->v.dtype = ATTN_F16;
    shift(&c->k, 1);
}

/* Outputs of scores, sums and rows. */
SDPA(scores_raw_data_null, ATTN_ERR_NULL, "params.scores_raw|data|NULL")
{
    use_score_outputs(c);
    c->raw.data = NULL;
}
SDPA(scores_raw_negative, ATTN_ERR_SIZE, "params.scores_raw|-1")
{
    use_score_outputs(c);
    c->raw.shape[0] = -1;
}
SDPA(scores_raw_heads, ATTN_ERR_SHAPE, "params.scores_raw|(2,2,3,5)|(2,4,3,5)")
{
    use_score_outputs(c);
    c->raw.shape[1] = HKV;
}
SDPA(scores_raw_keys, ATTN_ERR_SHAPE, "params.scores_raw|(2,4,3,4)|(2,4,3,5)")
{
    use_score_outputs(c);
    c->raw.shape[3] = TK - 1;
}
SDPA(scores_raw_type, ATTN_ERR_TYPE, "params.scores_raw|F64|F32")
{
    c->raw.dtype = ATTN_F64;
    c->p.scores_raw = &c->raw;
}
SDPA(scores_raw_reserved, ATTN_ERR_UNSUPPORTED, "params.scores_raw|reserved|1")
{
    use_score_outputs(c);
    c->raw.reserved = 1;
}
SDPA(scores_raw_stride_0, ATTN_ERR_STRIDE, "params.scores_raw|0")
{
    use_score_outputs(c);
    c->raw.stride[1] = 0;
}
SDPA(scores_raw_odd, ATTN_ERR_ALIGN, "params.scores_raw")
{
    use_score_outputs(c);
    shift(&c->raw, 2);
}
SDPA(scores_raw_is_q, ATTN_ERR_OVERLAP, "params.scores_raw|q")
{
    use_score_outputs(c);
    c->raw.data = c->q.data;
}
SDPA(scores_raw_is_out, ATTN_ERR_OVERLAP, "params.scores_raw|out")
{
    use_score_outputs(c);
    c->raw.data = c->out.data;
}
SDPA(scores_capped_data_null, ATTN_ERR_NULL, "params.scores_capped|data|NULL")
{
    use_score_outputs(c);
    c->capped.data = NULL;
}
SDPA(scores_capped_negative, ATTN_ERR_SIZE, "params.scores_capped|-1")
{
    use_score_outputs(c);
    c->capped.shape[0] = -1;
}
SDPA(scores_capped_heads, ATTN_ERR_SHAPE,
     "params.scores_capped|(2,2,3,5)|(2,4,3,5)")
{
    use_score_outputs(c);
    c->capped.shape[1] = HKV;
}
SDPA(scores_capped_keys, ATTN_ERR_SHAPE,
     "params.scores_capped|(2,4,3,4)|(2,4,3,5)")
{
    use_score_outputs(c);
    c->capped.shape[3] = TK - 1;
}
SDPA(scores_capped_type, ATTN_ERR_TYPE, "params.scores_capped|F64|F32")
{
    c->capped.dtype = ATTN_F64;
    c->p.scores_capped = &c->capped;
}
SDPA(scores_capped_reserved, ATTN_ERR_UNSUPPORTED,
     "params.scores_capped|reserved|1")
{
    use_score_outputs(c);
    c->capped.reserved = 1;
}
SDPA(scores_capped_stride_0, ATTN_ERR_STRIDE, "params.scores_capped|0")
{
    use_score_outputs(c);
    c->capped.stride[1] = 0;
}
SDPA(scores_capped_odd, ATTN_ERR_ALIGN, "params.scores_capped")
{
    use_score_outputs(c);
    shift(&c->capped, 2);
}
SDPA(scores_capped_is_q, ATTN_ERR_OVERLAP, "params.scores_capped|q")
{
    use_score_outputs(c);
    c->capped.data = c->q.data;
}
SDPA(scores_capped_is_out, ATTN_ERR_OVERLAP, "params.scores_capped|out")
{
    use_score_outputs(c);
    c->capped.data = c->out.data;
}
SDPA(scores_data_null, ATTN_ERR_NULL, "params.scores|data|NULL")
{
    use_score_outputs(c);
    c->scores.data = NULL;
}
SDPA(scores_negative, ATTN_ERR_SIZE, "params.scores|-1")
{
    use_score_outputs(c);
    c->scores.shape[0] = -1;
}
SDPA(scores_heads, ATTN_ERR_SHAPE, "params.scores|(2,2,3,5)|(2,4,3,5)")
{
    use_score_outputs(c);
    c->scores.shape[1] = HKV;
}
SDPA(scores_keys, ATTN_ERR_SHAPE, "params.scores|(2,4,3,4)|(2,4,3,5)")
{
    use_score_outputs(c);
    c->scores.shape[3] = TK - 1;
}
SDPA(scores_type, ATTN_ERR_TYPE, "params.scores|F64|F32")
{
    c->scores.dtype = ATTN_F64;
    c->p.scores = &c->scores;
}
SDPA(scores_reserved, ATTN_ERR_UNSUPPORTED, "params.scores|reserved|1")
{
    use_score_outputs(c);
    c->scores.reserved = 1;
}
SDPA(scores_stride_0, ATTN_ERR_STRIDE, "params.scores|0")
{
    use_score_outputs(c);
    c->scores.stride[1] = 0;
}
SDPA(scores_odd, ATTN_ERR_ALIGN, "params.scores")
{
    use_score_outputs(c);
    shift(&c->scores, 2);
}
SDPA(scores_is_q, ATTN_ERR_OVERLAP, "params.scores|q")
{
    use_score_outputs(c);
    c->scores.data = c->q.data;
}
SDPA(scores_is_out, ATTN_ERR_OVERLAP, "params.scores|out")
{
    use_score_outputs(c);
    c->scores.data = c->out.data;
}
SDPA(key_sums_data_null, ATTN_ERR_NULL, "params.key_sums|data|NULL")
{
    use_score_outputs(c);
    c->key_sums.data = NULL;
}
SDPA(key_sums_negative, ATTN_ERR_SIZE, "params.key_sums|-1")
{
    use_score_outputs(c);
    c->key_sums.shape[0] = -1;
}
SDPA(key_sums_heads, ATTN_ERR_SHAPE, "params.key_sums|(2,2,1,5)|(2,4,1,5)")
{
    use_score_outputs(c);
    c->key_sums.shape[1] = HKV;
}
SDPA(key_sums_by_query, ATTN_ERR_SHAPE, "params.key_sums|(2,4,3,5)|(2,4,1,5)")
{
    c->p.key_sums = &c->scores;
}
SDPA(key_sums_type, ATTN_ERR_TYPE, "params.key_sums|F64|F32")
{
    c->key_sums.dtype = ATTN_F64;
    c->p.key_sums = &c->key_sums;
}
SDPA(key_sums_reserved, ATTN_ERR_UNSUPPORTED, "params.key_sums|reserved|1")
{
    use_score_outputs(c);
    c->key_sums.reserved = 1;
}
SDPA(key_sums_stride_0, ATTN_ERR_STRIDE, "params.key_sums|0")
{
    use_score_outputs(c);
    c->key_sums.stride[1] = 0;
}
SDPA(key_sums_odd, ATTN_ERR_ALIGN, "params.key_sums")
{
    use_score_outputs(c);
    shift(&c->key_sums, 2);
}
SDPA(key_sums_is_q, ATTN_ERR_OVERLAP, "params.key_sums|q")
{
    use_score_outputs(c);
    c->key_sums.data = c->q.data;
}
SDPA(key_sums_is_out, ATTN_ERR_OVERLAP, "params.key_sums|out")
{
    use_score_outputs(c);
    c->key_sums.data = c->out.data;
}
SDPA(max_weight_data_null, ATTN_ERR_NULL, "params.max_weight|data|NULL")
{
    use_row_outputs(c);
    c->max_weight.data = NULL;
}
SDPA(max_weight_negative, ATTN_ERR_SIZE, "params.max_weight|-1")
{
    use_row_outputs(c);
    c->max_weight.shape[0] = -1;
}
SDPA(max_weight_heads, ATTN_ERR_SHAPE, "params.max_weight|(2,2,3,1)|(2,4,3,1)")
{
    use_row_outputs(c);
    c->max_weight.shape[1] = HKV;
}
SDPA(max_weight_by_key, ATTN_ERR_SHAPE, "params.max_weight|(2,4,1,5)|(2,4,3,1)")
{
    c->p.max_weight = &c->key_sums;
}
SDPA(max_weight_type, ATTN_ERR_TYPE, "params.max_weight|F64|F32")
{
    c->max_weight.dtype = ATTN_F64;
    c->p.max_weight = &c->max_weight;
}
SDPA(max_weight_reserved, ATTN_ERR_UNSUPPORTED, "params.max_weight|reserved|1")
{
    use_row_outputs(c);
    c->max_weight.reserved = 1;
}
SDPA(max_weight_stride_0, ATTN_ERR_STRIDE, "params.max_weight|0")
{
    use_row_outputs(c);
    c->max_weight.stride[1] = 0;
}
SDPA(max_weight_odd, ATTN_ERR_ALIGN, "params.max_weight")
{
    use_row_outputs(c);
    shift(&c->max_weight, 2);
}
SDPA(max_weight_is_q, ATTN_ERR_OVERLAP, "params.max_weight|q")
{
    use_row_outputs(c);
    c->max_weight.data = c->q.data;
}
SDPA(max_weight_is_out, ATTN_ERR_OVERLAP, "params.max_weight|out")
{
    use_row_outputs(c);
    c->max_weight.data = c->out.data;
}
SDPA(effective_keys_data_null, ATTN_ERR_NULL, "params.effective_keys|data|NULL")
{
    use_row_outputs(c);
    c->effective_keys.data = NULL;
}
SDPA(effective_keys_negative, ATTN_ERR_SIZE, "params.effective_keys|-1")
{
    use_row_outputs(c);
    c->effective_keys.shape[0] = -1;
}
SDPA(effective_keys_heads, ATTN_ERR_SHAPE,
     "params.effective_keys|(2,2,3,1)|(2,4,3,1)")
{
    use_row_outputs(c);
    c->effective_keys.shape[1] = HKV;
}
SDPA(effective_keys_by_key, ATTN_ERR_SHAPE,
     "params.effective_keys|(2,4,1,5)|(2,4,3,1)")
{
    c->p.effective_keys = &c->key_sums;
}
SDPA(effective_keys_type, ATTN_ERR_TYPE, "params.effective_keys|F64|F32")
{
    c->effective_keys.dtype = ATTN_F64;
    c->p.effective_keys = &c->effective_keys;
}
SDPA(effective_keys_reserved, ATTN_ERR_UNSUPPORTED,
     "params.effective_keys|reserved|1")
{
    use_row_outputs(c);
    c->effective_keys.reserved = 1;
}
SDPA(effective_keys_stride_0, ATTN_ERR_STRIDE, "params.effective_keys|0")
{
    use_row_outputs(c);
    c->effective_keys.stride[1] = 0;
}
SDPA(effective_keys_odd, ATTN_ERR_ALIGN, "params.effective_keys")
{
    use_row_outputs(c);
    shift(&c->effective_keys, 2);
}
SDPA(effective_keys_is_q, ATTN_ERR_OVERLAP, "params.effective_keys|q")
{
    use_row_outputs(c);
    c->effective_keys.data = c->q.data;
}
SDPA(effective_keys_is_out, ATTN_ERR_OVERLAP, "params.effective_keys|out")
{
    use_row_outputs(c);
    c->effective_keys.data = c->out.data;
}
SDPA(entropy_data_null, ATTN_ERR_NULL, "params.entropy|data|NULL")
{
    use_row_outputs(c);
    c->entropy.data = NULL;
}
SDPA(entropy_negative, ATTN_ERR_SIZE, "params.entropy|-1")
{
    use_row_outputs(c);
    c->entropy.shape[0] = -1;
}
SDPA(entropy_heads, ATTN_ERR_SHAPE, "params.entropy|(2,2,3,1)|(2,4,3,1)")
{
    use_row_outputs(c);
    c->entropy.shape[1] = HKV;
}
SDPA(entropy_by_key, ATTN_ERR_SHAPE, "params.entropy|(2,4,1,5)|(2,4,3,1)")
{
    c->p.entropy = &c->key_sums;
}
SDPA(entropy_type, ATTN_ERR_TYPE, "params.entropy|F64|F32")
{
    c->entropy.dtype = ATTN_F64;
    c->p.entropy = &c->entropy;
}
SDPA(entropy_reserved, ATTN_ERR_UNSUPPORTED, "params.entropy|reserved|1")
{
    use_row_outputs(c);
    c->entropy.reserved = 1;
}
SDPA(entropy_stride_0, ATTN_ERR_STRIDE, "params.entropy|0")
{
    use_row_outputs(c);
    c->entropy.stride[1] = 0;
}
SDPA(entropy_odd, ATTN_ERR_ALIGN, "params.entropy")
{
    use_row_outputs(c);
    shift(&c->entropy, 2);
}
SDPA(entropy_is_q, ATTN_ERR_OVERLAP, "params.entropy|q")
{
    use_row_outputs(c);
    c->entropy.data = c->q.data;
}
SDPA(entropy_is_out, ATTN_ERR_OVERLAP, "params.entropy|out")
{
    use_row_outputs(c);
    c->entropy.data = c->out.data;
}
SDPA(scores_capped_in_scores_raw, ATTN_ERR_OVERLAP,
     "params.scores_capped|params.scores_raw")
{
    use_score_outputs(c);
    c->capped.data = c->raw.data;
}
SDPA(scores_in_scores_capped, ATTN_ERR_OVERLAP,
     "params.scores|params.scores_capped")
{
    use_score_outputs(c);
    c->scores.data = c->capped.data;
}
SDPA(key_sums_in_scores, ATTN_ERR_OVERLAP, "params.key_sums|params.scores")
{
    use_score_outputs(c);
    c->key_sums.data = c->scores.data;
}
SDPA(max_weight_in_key_sums, ATTN_ERR_OVERLAP,
     "params.max_weight|params.key_sums")
{
    use_score_outputs(c);
    use_row_outputs(c);
    c->max_weight.data = c->key_sums.data;
}
SDPA(effective_keys_in_max_weight, ATTN_ERR_OVERLAP,
     "params.effective_keys|params.max_weight")
{
    use_row_outputs(c);
    c->effective_keys.data = c->max_weight.data;
}
SDPA(entropy_in_effective_keys, ATTN_ERR_OVERLAP,
     "params.entropy|params.effective_keys")
{
    use_row_outputs(c);
    c->entropy.data = c->effective_keys.data;
}
SDPA(out_is_q_though_scores_raw_needs_it, ATTN_ERR_OVERLAP, "out|q")
{
    c->v.shape[3] = D;
    c->out = c->q;
    c->p.scores_raw = &c->raw;
}
SDPA(out_is_q_though_scores_capped_needs_it, ATTN_ERR_OVERLAP, "out|q")
{
    c->v.shape[3] = D;
    c->out = c->q;
    c->p.scores_capped = &c->capped;
}
SDPA(out_is_q_though_scores_needs_it, ATTN_ERR_OVERLAP, "out|q")
{
    c->v.shape[3] = D;
    c->out = c->q;
    c->p.scores = &c->scores;
}
SDPA(out_is_q_though_key_sums_needs_it, ATTN_ERR_OVERLAP, "out|q")
{
    c->v.shape[3] = D;
    c->out = c->q;
    c->p.key_sums = &c->key_sums;
}

static void run_sdpa_case(const struct sdpa_case *t)
{
    struct sdpa c;
    size_t bytes = 12345;
    size_t alignment = 54321;
    sdpa_base(&c);
    t->change(&c);
    remember();
    judge(t->name, "attn_sdpa", attn_sdpa(NULL, c.pp, c.pq, c.pk, c.pv, c.pout),
          t->status, t->words);
    judge(t->name, "attn_sdpa_check",
          attn_sdpa_check(NULL, c.pp, c.pq, c.pk, c.pv, c.pout), t->status,
          t->words);
    judge(t->name, "attn_sdpa_workspace",
          attn_sdpa_workspace(NULL, c.pp, c.pq, c.pk, c.pv, c.pout, &bytes,
                              &alignment),
          t->status, t->words);
    if (bytes != 12345 || alignment != 54321)
        complain("%s: attn_sdpa_workspace wrote its results\n", t->name);
    judge(t->name, "attn_sdpa_work",
          attn_sdpa_work(NULL, c.pp, c.pq, c.pk, c.pv, c.pout, scratch,
                         sizeof scratch),
          t->status, t->words);
}

static void test_sdpa__every_refusal(void **state)
{
    (void)state;
    assert_true(num_sdpa_cases > 100);
    for (size_t n = 0; n < num_sdpa_cases; n++)
        run_sdpa_case(&sdpa_cases[n]);
    finish();
}

/* The arrays of lengths are inputs too: an output that lies on them would
 * change what the call goes by while it runs. */
static void test_sdpa__outputs_on_arrays_of_lengths_are_refused(void **state)
{
    (void)state;
    for (int which = 0; which < 5; which++) {
        struct sdpa c;
        sdpa_base(&c);
        const int64_t *arrays[] = {c.kv_lens, c.q_lens, c.prefix_lens, c.cu_q,
                                   c.cu_k};
        c.out.data = (void *)(uintptr_t)arrays[which];
        c.p.kv_lens = which == 0 ? c.kv_lens : NULL;
        c.p.q_lens = which == 1 ? c.q_lens : NULL;
        if (which == 2) {
            use_causal(&c);
            c.p.prefix_lens = c.prefix_lens;
        }
        if (which > 2)
            use_ragged(&c);
        remember();
        judge("lengths", "attn_sdpa_check",
              attn_sdpa_check(NULL, &c.p, &c.q, &c.k, &c.v, &c.out),
              ATTN_ERR_OVERLAP, "out");
    }
    finish();
}

static void test_sdpa__outputs_on_later_arrays_are_refused(void **state)
{
    (void)state;
    for (int which = 0; which < 6; which++) {
        struct sdpa c;
        sdpa_base(&c);
        void *arrays[] = {c.kv_starts,  c.kv_offsets,  c.ring_starts,
                          c.q_segments, c.kv_segments, c.page_table};
        static const char *const names[] = {
            "out|kv_starts",  "out|kv_offsets",  "out|ring_starts",
            "out|q_segments", "out|kv_segments", "out|page_table"};
        c.out.data = arrays[which];
        c.p.kv_starts = which == 0 ? c.kv_starts : NULL;
        c.p.kv_offsets = which == 1 ? c.kv_offsets : NULL;
        if (which == 2)
            use_ring(&c);
        if (which == 3 || which == 4)
            use_segments(&c);
        if (which == 5)
            use_pages(&c);
        remember();
        judge(names[which], "attn_sdpa_check",
              attn_sdpa_check(NULL, &c.p, &c.q, &c.k, &c.v, &c.out),
              ATTN_ERR_OVERLAP, names[which]);
    }
    finish();
}

/* ---- what looks like an error and is none ---- */

static void accept(const char *what, const struct sdpa *c)
{
    const attn_status met =
        attn_sdpa(NULL, c->pp, c->pq, c->pk, c->pv, c->pout);
    if (met != ATTN_OK)
        complain("%s: refused, %s\n", what, attn_last_error());
    if (attn_sdpa_check(NULL, c->pp, c->pq, c->pk, c->pv, c->pout) != met)
        complain("%s: attn_sdpa_check disagrees\n", what);
}

static void test_sdpa__the_base_problems_are_accepted(void **state)
{
    (void)state;
    struct sdpa c;
    sdpa_base(&c);
    accept("base", &c);
    use_outputs(&c);
    accept("outputs", &c);
    use_masks(&c, ATTN_MAX_MASKS);
    accept("masks", &c);
    use_causal(&c);
    accept("causal", &c);
    c.p.prefix_lens = c.prefix_lens;
    accept("prefix", &c);
    use_window(&c, 0, -1);
    accept("window", &c);
    c.p.chunk = INT64_MAX;
    c.p.keep_first = INT64_MAX;
    accept("chunk", &c);
    c.p.q_lens = c.q_lens;
    c.p.kv_lens = c.kv_lens;
    accept("lens", &c);
    sdpa_base(&c);
    use_add_mask(&c);
    accept("add mask", &c);
    sdpa_base(&c);
    use_ragged(&c);
    accept("ragged", &c);
    use_scale(&c, -1e300);
    accept("scale", &c);
    sdpa_base(&c);
    c.pp = NULL;
    accept("params NULL", &c);
    finish();
}

static void test_sdpa__the_later_fields_are_accepted(void **state)
{
    (void)state;
    struct sdpa c;
    sdpa_base(&c);
    use_blocks(&c);
    accept("blocks", &c);
    use_segments(&c);
    accept("segments", &c);
    c.p.kv_starts = c.kv_starts;
    c.kv_starts[1] = TK;
    accept("first keys", &c);
    c.p.softcap = 5e-324;
    c.p.sinks = &c.sinks;
    accept("softcap and sinks", &c);
    c.p.alibi = &c.slopes;
    c.p.align = ATTN_ALIGN_TOP_LEFT;
    accept("alibi", &c);
    use_score_outputs(&c);
    accept("scores", &c);
    use_row_outputs(&c);
    use_outputs(&c);
    accept("all outputs", &c);
    use_ring(&c);
    accept("ring", &c);
    use_causal(&c);
    c.p.kv_offsets = c.kv_offsets;
    accept("positions", &c);
    c.k.dtype = c.v.dtype = ATTN_BF16;
    accept("bfloat16", &c);
    finish();
}

/* A number of each head may be one or one for each sequence. */
static void test_sdpa__slopes_and_sinks_have_two_shapes(void **state)
{
    (void)state;
    struct sdpa c;
    sdpa_base(&c);
    c.p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    c.p.alibi = &c.sinks;
    c.p.sinks = &c.slopes;
    accept("the other way round", &c);
    c.p.alibi = c.p.sinks = &c.slopes;
    accept("one and the same", &c);
    c.slopes.stride[3] = 0;
    accept("one for all heads", &c);
    finish();
}

static void test_sdpa__pages_that_are_not_needed_may_be_anything(void **state)
{
    (void)state;
    struct sdpa c;
    sdpa_base(&c);
    use_pages(&c);
    accept("pages", &c);
    c.page_table[5] = INT32_MAX;
    accept("behind the last key", &c);
    c.p.kv_starts = c.kv_starts;
    c.kv_starts[0] = 4;
    c.page_table[0] = c.page_table[1] = -1;
    accept("before the first key", &c);
    c.kv_starts[1] = 6;
    c.page_table[3] = c.page_table[4] = -1;
    accept("of a sequence without keys", &c);
    c.kv_lens[0] = c.kv_lens[1] = 0;
    c.k.shape[0] = c.v.shape[0] = 0;
    c.k.data = c.v.data = NULL;
    accept("no pages at all", &c);
    sdpa_base(&c);
    use_pages(&c);
    c.page_table[0] = c.page_table[1] = c.page_table[2] = 6;
    c.page_table[3] = c.page_table[4] = 6;
    accept("a page that is shared", &c);
    use_ragged(&c);
    c.p.cu_k = NULL;
    c.k.shape[0] = c.v.shape[0] = 7;
    accept("ragged queries over pages", &c);
    finish();
}

/* Positions of keys need align only where something goes by them. */
static void test_sdpa__positions_alone_need_no_align(void **state)
{
    (void)state;
    struct sdpa c;
    sdpa_base(&c);
    c.p.kv_offsets = c.kv_offsets;
    accept("positions", &c);
    c.p.softcap = 3.0;
    use_blocks(&c);
    accept("and what does not go by them", &c);
    finish();
}

/* Causal needs no align if every sequence has as many queries as keys. */
static void test_sdpa__equal_lengths_need_no_align(void **state)
{
    (void)state;
    struct sdpa c;
    sdpa_base(&c);
    c.k.shape[2] = c.v.shape[2] = TQ;
    c.p.causal = 1;
    accept("equal lengths", &c);
    c.q_lens[0] = c.kv_lens[0] = 1;
    c.q_lens[1] = c.kv_lens[1] = 3;
    c.p.q_lens = c.q_lens;
    c.p.kv_lens = c.kv_lens;
    accept("equal q_lens and kv_lens", &c);
    sdpa_base(&c);
    use_ragged(&c);
    c.p.causal = 1;
    accept("equal ragged lengths", &c);
    finish();
}

static void test_sdpa__out_may_be_q(void **state)
{
    (void)state;
    struct sdpa c;
    sdpa_base(&c);
    c.v.shape[3] = D;
    c.out = c.q;
    accept("out is q", &c);
    c.p.lse = &c.lse;
    use_row_outputs(&c);
    accept("out is q, with outputs of its rows", &c);
    finish();
}

/* q, k, v and out as the slots of one (B,T,4,H,D) buffer: the memory is
 * interleaved, no element is shared. */
static void test_sdpa__interleaved_slots_do_not_overlap(void **state)
{
    (void)state;
    struct sdpa c;
    sdpa_base(&c);
    float *packed = take((size_t)(B * TK * 4 * HQ * D) * sizeof *packed);
    attn_tensor *slots[] = {&c.q, &c.k, &c.v, &c.out};
    for (int n = 0; n < 4; n++) {
        attn_view_bthd(slots[n], ATTN_F32, packed + n * HQ * D, B, TK, HQ, D);
        slots[n]->stride[0] = TK * 4 * HQ * D;
        slots[n]->stride[2] = 4 * HQ * D;
        kit_fill(slots[n]);
    }
    accept("slots", &c);
    /* The same with the slots as columns of one row: (B,T,H,4 D). */
    for (int n = 0; n < 4; n++) {
        attn_view_bthd(slots[n], ATTN_F32, packed + n * D, B, TK, HQ, D);
        slots[n]->stride[0] = TK * 4 * HQ * D;
        slots[n]->stride[1] = 4 * D;
        slots[n]->stride[2] = 4 * HQ * D;
        kit_fill(slots[n]);
    }
    accept("columns", &c);
    finish();
}

/* Any strides that give each element its own place, negative ones too. */
static void test_sdpa__outputs_take_any_one_to_one_strides(void **state)
{
    (void)state;
    struct sdpa c;
    sdpa_base(&c);
    float *first = c.out.data;
    for (int dim = 0; dim < 4; dim++) {
        first += (c.out.shape[dim] - 1) * c.out.stride[dim];
        c.out.stride[dim] = -c.out.stride[dim];
    }
    c.out.data = first;
    accept("backwards", &c);
    attn_view_bthd(&c.out, ATTN_F32, c.out.data, B, TQ, HQ, DV);
    c.out = take_view(ATTN_F32, B, HQ, TQ, DV);
    c.out.stride[3] = B * HQ * TQ;
    c.out.stride[2] = B * HQ;
    c.out.stride[1] = B;
    c.out.stride[0] = 1;
    accept("columns first", &c);
    finish();
}

static void test_sdpa__inputs_take_any_strides(void **state)
{
    (void)state;
    struct sdpa c;
    sdpa_base(&c);
    memset(c.q.stride, 0, sizeof c.q.stride);
    memset(c.k.stride, 0, sizeof c.k.stride);
    c.v.stride[2] = 1;
    accept("strides 0 and overlapping inputs", &c);
    c.v = c.k;
    c.v.shape[3] = DV;
    accept("v in k", &c);
    finish();
}

/* The last keys of the most there may be, in a ring and under a large block:
 * their numbers once overflowed where a key more was added to them. */
static void test_sdpa__the_most_keys(void **state)
{
    (void)state;
    const int64_t most = TWO(61) - 1, first = most - 3, few = 3;
    for (int n = 0; n < 12; n++) {
        struct sdpa c;
        sdpa_base(&c);
        use_endless_keys(&c, most);
        unsigned char one = 1;
        c.blocks = kit_view(ATTN_U8, &one, 1, 1, 1, 1);
        float q = 0.0f, k = 3.0f, v = 5.0f, out = 0.0f, lse = 0.0f;
        c.q.data = &q;
        c.k.data = &k;
        c.v.data = &v;
        c.out = kit_view(ATTN_F32, &out, 1, 1, 1, 1);
        c.lse = kit_view(ATTN_F32, &lse, 1, 1, 1, 1);
        c.p.lse = &c.lse;
        c.p.flags = n % 2 ? ATTN_SDPA_BLAS_ONLY : 0;
        if (n % 4 < 2)
            c.p.kv_starts = &first;
        else
            c.p.kv_lens = &few;
        if (n / 4 == 1) {
            c.p.blocks = &c.blocks;
            c.p.block_q = c.p.block_k = INT64_MAX;
        }
        if (n / 4 == 2)
            c.p.ring_starts = &first;
        accept("the most keys", &c);
        assert_true(out == v);
        assert_float_equal(lse, 1.0986123f, 1e-6f);
    }
    finish();
}

/* A stride whose size is 1 is ignored, whatever it is. */
static void test_sdpa__strides_of_size_1_are_ignored(void **state)
{
    (void)state;
    struct sdpa c;
    sdpa_base(&c);
    attn_tensor *all[] = {&c.q, &c.k, &c.v, &c.out};
    for (int n = 0; n < 4; n++) {
        all[n]->shape[0] = all[n]->shape[1] = 1;
        all[n]->stride[0] = INT64_MIN;
        all[n]->stride[1] = 0;
    }
    accept("strides of size 1", &c);
    finish();
}

/* Only tensors without elements had such strides replaced: here they went into
 * products as they were, which overflowed. */
static void test_sdpa__one_element_with_any_strides(void **state)
{
    (void)state;
    static const int64_t any[] = {INT64_MIN, -1, 0, INT64_MAX};
    for (size_t n = 0; n < COUNT(any); n++) {
        float q = 2.0f, k = 3.0f, v = 5.0f, slope = 1.0f;
        float out = 0.0f, lse = 0.0f, score = 0.0f, sum = 0.0f;
        attn_tensor views[] = {kit_view(ATTN_F32, &q, 1, 1, 1, 1),
                               kit_view(ATTN_F32, &k, 1, 1, 1, 1),
                               kit_view(ATTN_F32, &v, 1, 1, 1, 1),
                               kit_view(ATTN_F32, &out, 1, 1, 1, 1),
                               kit_view(ATTN_F32, &lse, 1, 1, 1, 1),
                               kit_view(ATTN_F32, &score, 1, 1, 1, 1),
                               kit_view(ATTN_F32, &sum, 1, 1, 1, 1),
                               kit_view(ATTN_F32, &slope, 1, 1, 1, 1)};
        for (size_t t = 0; t < COUNT(views); t++)
            for (int a = 0; a < 4; a++)
                views[t].stride[a] = any[(n + (size_t)a) % COUNT(any)];
        const int32_t page = 0;
        const int64_t len = 1;
        attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
        p.lse = &views[4];
        p.scores = &views[5];
        p.key_sums = &views[6];
        p.alibi = &views[7];
        p.kv_lens = &len;
        for (int paged = 0; paged < 2; paged++)
            for (int blas = 0; blas < 2; blas++) {
                p.flags = blas ? ATTN_SDPA_BLAS_ONLY : 0;
                p.page_table = paged ? &page : NULL;
                p.pages_per_seq = paged;
                out = lse = score = sum = 0.0f;
                assert_int_equal(attn_sdpa(NULL, &p, &views[0], &views[1],
                                           &views[2], &views[3]),
                                 ATTN_OK);
                assert_true(out == 5.0f && lse == 6.0f && score == 6.0f &&
                            sum == 1.0f);
            }
    }
}

static void test_sdpa__empty_tensors_need_no_data(void **state)
{
    (void)state;
    for (int dim = 0; dim < 4; dim++) {
        struct sdpa c;
        sdpa_base(&c);
        attn_tensor *all[] = {&c.q, &c.k, &c.v, &c.out};
        for (int n = 0; n < 4; n++) {
            all[n]->shape[dim] = 0;
            all[n]->data = NULL;
        }
        accept("empty", &c);
    }
    finish();
}

/* Keys without columns in pages out of order were copied from NULL. */
static void test_sdpa__pages_without_columns_need_no_data(void **state)
{
    (void)state;
    const int32_t pages[] = {1, 0};
    const int64_t len = 2;
    float values[] = {3.0f, 5.0f}, results[9] = {0};
    attn_tensor q = kit_view(ATTN_F32, NULL, 1, 1, 9, 0);
    attn_tensor k = kit_view(ATTN_F32, NULL, 2, 1, 1, 0);
    attn_tensor v = kit_view(ATTN_F32, values, 2, 1, 1, 1);
    attn_tensor out = kit_view(ATTN_F32, results, 1, 1, 9, 1);
    attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
    p.page_table = pages;
    p.pages_per_seq = 2;
    p.kv_lens = &len;
    for (int blas = 0; blas < 2; blas++) {
        p.flags = blas ? ATTN_SDPA_BLAS_ONLY : 0;
        assert_int_equal(attn_sdpa(NULL, &p, &q, &k, &v, &out), ATTN_OK);
        for (size_t n = 0; n < COUNT(results); n++)
            assert_true(results[n] == 4.0f);
        kit_fill_with(&out, 0.0);
    }
}

/* ---- scratch memory ---- */

static void test_sdpa_work__scratch_memory_must_fit(void **state)
{
    (void)state;
    struct sdpa c;
    size_t bytes = 0;
    size_t alignment = 0;
    sdpa_base(&c);
    use_outputs(&c);
    remember();
    if (attn_sdpa_workspace(NULL, &c.p, &c.q, &c.k, &c.v, &c.out, &bytes,
                            &alignment) != ATTN_OK)
        complain("attn_sdpa_workspace: %s\n", attn_last_error());
    if (bytes == 0 || alignment == 0 || (alignment & (alignment - 1)) != 0)
        complain("%zu bytes at %zu\n", bytes, alignment);
    const char *call = "attn_sdpa_work";
    judge("one byte less", call,
          attn_sdpa_work(NULL, &c.p, &c.q, &c.k, &c.v, &c.out, scratch,
                         bytes - 1),
          ATTN_ERR_WORKSPACE, "work");
    judge("no bytes", call,
          attn_sdpa_work(NULL, &c.p, &c.q, &c.k, &c.v, &c.out, scratch, 0),
          ATTN_ERR_WORKSPACE, "work|0");
    judge("misaligned", call,
          attn_sdpa_work(NULL, &c.p, &c.q, &c.k, &c.v, &c.out, scratch + 1,
                         sizeof scratch - 1),
          ATTN_ERR_WORKSPACE, "work");
    judge("half aligned", call,
          attn_sdpa_work(NULL, &c.p, &c.q, &c.k, &c.v, &c.out,
                         scratch + alignment / 2,
                         sizeof scratch - alignment / 2),
          ATTN_ERR_WORKSPACE, "work");
    judge("NULL", call,
          attn_sdpa_work(NULL, &c.p, &c.q, &c.k, &c.v, &c.out, NULL, bytes),
          ATTN_ERR_NULL, "work|NULL");
    if (attn_sdpa_work(NULL, &c.p, &c.q, &c.k, &c.v, &c.out, scratch, bytes) !=
        ATTN_OK)
        complain("exactly enough is refused: %s\n", attn_last_error());
    finish();
}

static void test_sdpa_work__scratch_memory_must_be_its_own(void **state)
{
    (void)state;
    struct sdpa c;
    sdpa_base(&c);
    c.out.data = scratch + 4096;
    remember();
    judge("out in scratch memory", "attn_sdpa_work",
          attn_sdpa_work(NULL, &c.p, &c.q, &c.k, &c.v, &c.out, scratch,
                         sizeof scratch),
          ATTN_ERR_OVERLAP, "work|out");
    finish();
}

static void test_sdpa_workspace__results_are_needed(void **state)
{
    (void)state;
    struct sdpa c;
    size_t number = 7;
    sdpa_base(&c);
    remember();
    judge("bytes NULL", "attn_sdpa_workspace",
          attn_sdpa_workspace(NULL, &c.p, &c.q, &c.k, &c.v, &c.out, NULL,
                              &number),
          ATTN_ERR_NULL, "bytes");
    judge("alignment NULL", "attn_sdpa_workspace",
          attn_sdpa_workspace(NULL, &c.p, &c.q, &c.k, &c.v, &c.out, &number,
                              NULL),
          ATTN_ERR_NULL, "alignment");
    if (number != 7)
        complain("a result was written\n");
    finish();
}

/* ---- attn_sdpa_backward and its three other calls ---- */

/* A valid problem with its gradients, those of masks, slopes and sinks not
 * asked for. */
struct backward {
    struct sdpa s;
    attn_sdpa_gradients g;
    attn_tensor d_out, d_lse;
    attn_tensor d_q, d_k, d_v, d_mask, d_alibi, d_sinks, d_scale;
    const attn_tensor *d_masks[ATTN_MAX_MASKS];
    const attn_tensor *pd_out;
    const attn_sdpa_gradients *pg;
};

static void backward_base(struct backward *c)
{
    sdpa_base(&c->s);
    c->s.p.lse = &c->s.lse;
    attn_sdpa_gradients_init(&c->g);
    memset(c->d_masks, 0, sizeof c->d_masks);
    c->d_out = take_view(ATTN_F32, B, HQ, TQ, DV);
    c->d_lse = take_view(ATTN_F32, B, HQ, TQ, 1);
    c->d_q = take_view(ATTN_F32, B, HQ, TQ, D);
    c->d_k = take_view(ATTN_F32, B, HKV, TK, D);
    c->d_v = take_view(ATTN_F32, B, HKV, TK, DV);
    c->d_mask = take_view(ATTN_F32, B, HQ, TQ, TK);
    c->d_alibi = take_view(ATTN_F32, 1, 1, 1, HQ);
    c->d_sinks = take_view(ATTN_F32, B, HQ, 1, 1);
    c->d_scale = take_view(ATTN_F32, 1, 1, 1, 1);
    kit_fill(&c->s.out);
    kit_fill(&c->s.lse);
    kit_fill(&c->d_out);
    kit_fill(&c->d_lse);
    c->g.d_lse = &c->d_lse;
    c->g.d_q = &c->d_q;
    c->g.d_k = &c->d_k;
    c->g.d_v = &c->d_v;
    c->g.d_scale = &c->d_scale;
    c->pd_out = &c->d_out;
    c->pg = &c->g;
}

static void use_mask_gradient(struct backward *c)
{
    use_add_mask(&c->s);
    c->d_masks[0] = &c->d_mask;
    c->g.d_masks = c->d_masks;
}

static void use_second_mask(struct backward *c)
{
    c->s.p.num_masks = 2;
    c->s.masks[1] = c->s.masks[0];
}

static void use_alibi_gradient(struct backward *c)
{
    c->s.p.alibi = &c->s.slopes;
    c->s.p.align = ATTN_ALIGN_TOP_LEFT;
    c->g.d_alibi = &c->d_alibi;
}

static void use_sinks_gradient(struct backward *c)
{
    c->s.p.sinks = &c->s.sinks;
    c->g.d_sinks = &c->d_sinks;
}

static attn_status call_backward(const struct backward *c)
{
    const struct sdpa *s = &c->s;
    return attn_sdpa_backward(NULL, s->pp, s->pq, s->pk, s->pv, s->pout,
                              c->pd_out, c->pg);
}

static attn_status call_backward_check(const struct backward *c)
{
    const struct sdpa *s = &c->s;
    return attn_sdpa_backward_check(NULL, s->pp, s->pq, s->pk, s->pv, s->pout,
                                    c->pd_out, c->pg);
}

static attn_status call_backward_workspace(const struct backward *c,
                                           size_t *bytes, size_t *alignment)
{
    const struct sdpa *s = &c->s;
    return attn_sdpa_backward_workspace(NULL, s->pp, s->pq, s->pk, s->pv,
                                        s->pout, c->pd_out, c->pg, bytes,
                                        alignment);
}

static attn_status call_backward_work(const struct backward *c, void *work,
                                      size_t bytes)
{
    const struct sdpa *s = &c->s;
    return attn_sdpa_backward_work(NULL, s->pp, s->pq, s->pk, s->pv, s->pout,
                                   c->pd_out, c->pg, work, bytes);
}

struct backward_case {
    const char *name;
    attn_status status;
    const char *words;
    void (*change)(struct backward *);
};

static struct backward_case backward_cases[512];
static size_t num_backward_cases;

/* As SDPA above. */
#define BACKWARD(name, status, words)                                  \
    static void backward_##name(struct backward *c);                   \
    static void __attribute__((constructor)) add_backward_##name(void) \
    {                                                                  \
        const struct backward_case entry = {#name, status, words,      \
                                            backward_##name};          \
        backward_cases[num_backward_cases++] = entry;                  \
    }                                                                  \
    static void backward_##name(struct backward *c)

BACKWARD(q_null, ATTN_ERR_NULL, "q|NULL")
{
    c->s.pq = NULL;
}
BACKWARD(q_data_null, ATTN_ERR_NULL, "q|data|NULL")
{
    c->s.q.data = NULL;
}
BACKWARD(k_null, ATTN_ERR_NULL, "k|NULL")
{
    c->s.pk = NULL;
}
BACKWARD(k_data_null, ATTN_ERR_NULL, "k|data|NULL")
{
    c->s.k.data = NULL;
}
BACKWARD(v_null, ATTN_ERR_NULL, "v|NULL")
{
    c->s.pv = NULL;
}
BACKWARD(v_data_null, ATTN_ERR_NULL, "v|data|NULL")
{
    c->s.v.data = NULL;
}
BACKWARD(out_null, ATTN_ERR_NULL, "out|NULL")
{
    c->s.pout = NULL;
}
BACKWARD(out_data_null, ATTN_ERR_NULL, "out|data|NULL")
{
    c->s.out.data = NULL;
}
BACKWARD(d_out_null, ATTN_ERR_NULL, "d_out|NULL")
{
    c->pd_out = NULL;
}
BACKWARD(d_out_data_null, ATTN_ERR_NULL, "d_out|data|NULL")
{
    c->d_out.data = NULL;
}
BACKWARD(gradients_null, ATTN_ERR_NULL, "gradients|NULL")
{
    c->pg = NULL;
}
BACKWARD(params_null, ATTN_ERR_NULL, "params.lse|NULL")
{
    c->s.pp = NULL;
}
BACKWARD(lse_null, ATTN_ERR_NULL, "params.lse|NULL")
{
    c->s.p.lse = NULL;
}
BACKWARD(lse_data_null, ATTN_ERR_NULL, "params.lse|data|NULL")
{
    c->s.lse.data = NULL;
}
BACKWARD(d_out_shape_0, ATTN_ERR_SHAPE, "d_out|shape|7")
{
    c->d_out.shape[0] = 7;
}
BACKWARD(d_out_shape_1, ATTN_ERR_SHAPE, "d_out|shape|7")
{
    c->d_out.shape[1] = 7;
}
BACKWARD(d_out_shape_2, ATTN_ERR_SHAPE, "d_out|shape|7")
{
    c->d_out.shape[2] = 7;
}
BACKWARD(d_out_shape_3, ATTN_ERR_SHAPE, "d_out|shape|7")
{
    c->d_out.shape[3] = 7;
}
BACKWARD(d_out_of_f64, ATTN_ERR_TYPE, "d_out|F64|F32")
{
    c->d_out.dtype = ATTN_F64;
}
BACKWARD(d_out_misaligned, ATTN_ERR_ALIGN, "d_out|data|multiple|4 bytes")
{
    shift(&c->d_out, 2);
}
BACKWARD(d_out_reserved, ATTN_ERR_UNSUPPORTED, "d_out|reserved|3")
{
    c->d_out.reserved = 3;
}
BACKWARD(d_k_of_16_bits, ATTN_ERR_TYPE, "gradients.d_k|F16|F32")
{
    c->s.k.dtype = c->s.v.dtype = ATTN_F16;
    c->d_k.dtype = ATTN_F16;
}
BACKWARD(d_v_of_16_bits, ATTN_ERR_TYPE, "gradients.d_v|BF16|F32")
{
    c->s.k.dtype = c->s.v.dtype = ATTN_BF16;
    c->d_v.dtype = ATTN_BF16;
}
BACKWARD(lse_shape, ATTN_ERR_SHAPE, "params.lse|shape|(2,4,3,1)")
{
    c->s.lse.shape[2] = TQ + 1;
}
BACKWARD(out_shape, ATTN_ERR_SHAPE, "out|shape|(2,4,3,6)")
{
    c->s.out.shape[3] = DV + 1;
}
BACKWARD(d_q_strides_that_meet, ATTN_ERR_STRIDE,
         "gradients.d_q|strides|own place")
{
    c->d_q.stride[2] = D - 1;
}
BACKWARD(d_v_beyond_memory, ATTN_ERR_STRIDE, "gradients.d_v|strides|memory")
{
    c->d_v.stride[0] = INT64_MAX / 2;
}
BACKWARD(d_out_beyond_memory, ATTN_ERR_STRIDE, "d_out|strides|memory")
{
    c->d_out.stride[0] = INT64_MAX / 2;
}
BACKWARD(unknown_add, ATTN_ERR_UNSUPPORTED, "gradients.flags|0x8000|0x7f00")
{
    c->g.flags = 0x8000;
}
BACKWARD(negative_add, ATTN_ERR_UNSUPPORTED,
         "gradients.flags|0x80000000|0x7f00")
{
    c->g.flags = INT32_MIN;
}
/* The flags of one struct in the other. */
BACKWARD(window_for_add, ATTN_ERR_UNSUPPORTED, "gradients.flags|0x2|0x7f00")
{
    c->g.flags = ATTN_SDPA_WINDOW;
}
BACKWARD(add_in_params, ATTN_ERR_UNSUPPORTED, "params.flags|0x200|0x7")
{
    c->s.p.flags = ATTN_SDPA_ADD_D_K;
}
BACKWARD(reserved, ATTN_ERR_UNSUPPORTED, "gradients.reserved|4")
{
    c->g.reserved = 4;
}
BACKWARD(struct_size_0, ATTN_ERR_STRUCT, "gradients.struct_size|0")
{
    c->g.struct_size = 0;
}
BACKWARD(struct_size_less, ATTN_ERR_STRUCT, "gradients.struct_size|79|80")
{
    c->g.struct_size = 79;
}
BACKWARD(params_struct_size, ATTN_ERR_STRUCT, "params.struct_size|8")
{
    c->s.p.struct_size = 8;
}
BACKWARD(d_masks_without_masks, ATTN_ERR_VALUE, "gradients.d_masks|num_masks|0")
{
    c->g.d_masks = c->d_masks;
}
BACKWARD(d_mask_of_a_keep_mask, ATTN_ERR_VALUE,
         "gradients.d_masks[0]|masks[0]|ATTN_MASK_ADD")
{
    use_masks(&c->s, 1);
    c->d_masks[0] = &c->d_mask;
    c->g.d_masks = c->d_masks;
}
BACKWARD(d_mask_of_a_drop_mask_behind_another, ATTN_ERR_VALUE,
         "gradients.d_masks[1]|masks[1]|kind 2")
{
    use_mask_gradient(c);
    use_second_mask(c);
    c->s.masks[1].kind = ATTN_MASK_DROP;
    c->s.masks[1].view = c->s.masks[2].view;
    c->d_masks[1] = &c->d_mask;
}
BACKWARD(d_alibi_without_alibi, ATTN_ERR_VALUE,
         "gradients.d_alibi|params.alibi|NULL")
{
    c->g.d_alibi = &c->d_alibi;
}
BACKWARD(d_sinks_without_sinks, ATTN_ERR_VALUE,
         "gradients.d_sinks|params.sinks|NULL")
{
    c->g.d_sinks = &c->d_sinks;
}
BACKWARD(d_alibi_of_the_other_shape, ATTN_ERR_SHAPE,
         "gradients.d_alibi|(2,4,1,1)|(1,1,1,4)")
{
    use_alibi_gradient(c);
    c->g.d_alibi = &c->d_sinks;
}
BACKWARD(d_sinks_of_the_other_shape, ATTN_ERR_SHAPE,
         "gradients.d_sinks|(1,1,1,4)|(2,4,1,1)")
{
    use_sinks_gradient(c);
    c->g.d_sinks = &c->d_alibi;
}
BACKWARD(d_mask_of_the_full_size, ATTN_ERR_SHAPE,
         "gradients.d_masks[0]|(2,4,3,5)|(1,4,3,5)")
{
    use_mask_gradient(c);
    c->s.masks[0].view.shape[0] = 1;
}
BACKWARD(with_weights, ATTN_ERR_UNSUPPORTED, "params.weights|NULL")
{
    c->s.p.weights = &c->s.weights;
}
BACKWARD(with_weights_mean, ATTN_ERR_UNSUPPORTED, "params.weights_mean|NULL")
{
    c->s.p.weights_mean = &c->s.mean;
}
BACKWARD(with_scores_raw, ATTN_ERR_UNSUPPORTED, "params.scores_raw|NULL")
{
    c->s.p.scores_raw = &c->s.raw;
}
BACKWARD(with_scores_capped, ATTN_ERR_UNSUPPORTED, "params.scores_capped|NULL")
{
    c->s.p.scores_capped = &c->s.capped;
}
BACKWARD(with_scores, ATTN_ERR_UNSUPPORTED, "params.scores|NULL")
{
    c->s.p.scores = &c->s.scores;
}
BACKWARD(with_key_sums, ATTN_ERR_UNSUPPORTED, "params.key_sums|NULL")
{
    c->s.p.key_sums = &c->s.key_sums;
}
BACKWARD(with_max_weight, ATTN_ERR_UNSUPPORTED, "params.max_weight|NULL")
{
    c->s.p.max_weight = &c->s.max_weight;
}
BACKWARD(with_effective_keys, ATTN_ERR_UNSUPPORTED,
         "params.effective_keys|NULL")
{
    c->s.p.effective_keys = &c->s.effective_keys;
}
BACKWARD(with_entropy, ATTN_ERR_UNSUPPORTED, "params.entropy|NULL")
{
    c->s.p.entropy = &c->s.entropy;
}
BACKWARD(pages, ATTN_ERR_UNSUPPORTED, "params.page_table")
{
    use_pages(&c->s);
}
BACKWARD(ring, ATTN_ERR_UNSUPPORTED, "params.ring_starts")
{
    use_ring(&c->s);
}
BACKWARD(causal_without_align, ATTN_ERR_VALUE, "align")
{
    c->s.p.causal = 1;
}
BACKWARD(heads_that_do_not_divide, ATTN_ERR_SHAPE, "heads")
{
    c->s.k.shape[1] = c->s.v.shape[1] = 3;
}
BACKWARD(scale_nan, ATTN_ERR_VALUE, "scale|nan")
{
    use_scale(&c->s, (double)NAN);
}
BACKWARD(kv_lens_too_large, ATTN_ERR_VALUE, "kv_lens[1]|6")
{
    c->s.kv_lens[1] = TK + 1;
    c->s.p.kv_lens = c->s.kv_lens;
}
BACKWARD(ragged_d_q, ATTN_ERR_SHAPE, "gradients.d_q|(2,4,3,4)|(1,4,3,4)")
{
    use_ragged(&c->s);
    c->d_out.shape[0] = 1;
    c->d_lse.shape[0] = 1;
}
BACKWARD(two_masks_into_one, ATTN_ERR_OVERLAP,
         "gradients.d_masks[0]|gradients.d_masks[1]")
{
    use_mask_gradient(c);
    use_second_mask(c);
    c->d_masks[1] = &c->d_mask;
}
BACKWARD(d_k_and_d_v_in_one, ATTN_ERR_OVERLAP, "gradients.d_k|gradients.d_v")
{
    c->d_v.data = (unsigned char *)c->d_k.data + 4;
}

static void run_backward_case(const struct backward_case *t)
{
    struct backward c;
    size_t bytes = 12345;
    size_t alignment = 54321;
    backward_base(&c);
    t->change(&c);
    remember();
    judge(t->name, "attn_sdpa_backward", call_backward(&c), t->status,
          t->words);
    judge(t->name, "attn_sdpa_backward_check", call_backward_check(&c),
          t->status, t->words);
    judge(t->name, "attn_sdpa_backward_workspace",
          call_backward_workspace(&c, &bytes, &alignment), t->status, t->words);
    if (bytes != 12345 || alignment != 54321)
        complain("%s: attn_sdpa_backward_workspace wrote its results\n",
                 t->name);
    judge(t->name, "attn_sdpa_backward_work",
          call_backward_work(&c, scratch, sizeof scratch), t->status, t->words);
}

static void test_sdpa_backward__every_refusal(void **state)
{
    (void)state;
    assert_true(num_backward_cases > 50);
    for (size_t n = 0; n < num_backward_cases; n++)
        run_backward_case(&backward_cases[n]);
    finish();
}

/* What attn_sdpa refuses, but for what its outputs may be, is refused here. */
static void test_sdpa_backward__refuses_what_the_forward_call_does(void **state)
{
    (void)state;
    for (size_t n = 0; n < num_sdpa_cases; n++) {
        const struct sdpa_case *t = &sdpa_cases[n];
        struct backward c;
        backward_base(&c);
        t->change(&c.s);
        /* out and lse are inputs now. */
        if (t->status == ATTN_ERR_OVERLAP ||
            (t->status == ATTN_ERR_STRIDE && (strstr(t->words, "out") != NULL ||
                                              strstr(t->words, "lse") != NULL)))
            continue;
        if (c.s.pp == &c.s.p && c.s.p.lse == NULL)
            c.s.p.lse = &c.s.lse;
        remember();
        if (call_backward_check(&c) == ATTN_OK)
            complain("%s is accepted\n", t->name);
        if (call_backward(&c) == ATTN_OK)
            complain("%s is done\n", t->name);
        if (memcmp(arena, before, sizeof arena) != 0)
            complain("%s: something was written\n", t->name);
    }
    finish();
}

/* All gradients of one problem, asked for at once or alone. */
#define ALL_GRADIENTS 7

static const char *const gradient_names[ALL_GRADIENTS] = {
    "gradients.d_q",        "gradients.d_k",     "gradients.d_v",
    "gradients.d_masks[0]", "gradients.d_alibi", "gradients.d_sinks",
    "gradients.d_scale"};

static attn_tensor *gradient_of(struct backward *c, int n)
{
    attn_tensor *const all[ALL_GRADIENTS] = {
        &c->d_q,     &c->d_k,     &c->d_v,    &c->d_mask,
        &c->d_alibi, &c->d_sinks, &c->d_scale};
    return all[n];
}

static void use_all_gradients(struct backward *c)
{
    backward_base(c);
    use_mask_gradient(c);
    use_alibi_gradient(c);
    use_sinks_gradient(c);
}

static void ask_for_one(struct backward *c, int n)
{
    const attn_sdpa_gradients none = ATTN_SDPA_GRADIENTS_INIT;
    c->g = none;
    c->g.d_lse = &c->d_lse;
    c->g.d_q = n == 0 ? &c->d_q : NULL;
    c->g.d_k = n == 1 ? &c->d_k : NULL;
    c->g.d_v = n == 2 ? &c->d_v : NULL;
    c->g.d_masks = n == 3 ? c->d_masks : NULL;
    c->g.d_alibi = n == 4 ? &c->d_alibi : NULL;
    c->g.d_sinks = n == 5 ? &c->d_sinks : NULL;
    c->g.d_scale = n == 6 ? &c->d_scale : NULL;
}

/* All four calls of a case whose first word is a name. */
static void refuse_backward(const struct backward *c, const char *what,
                            attn_status status, const char *name,
                            const char *rest)
{
    char words[128];
    size_t bytes = 12345;
    size_t alignment = 54321;
    snprintf(words, sizeof words, "%s|%s", name, rest);
    remember();
    judge(what, "attn_sdpa_backward", call_backward(c), status, words);
    judge(what, "attn_sdpa_backward_check", call_backward_check(c), status,
          words);
    judge(what, "attn_sdpa_backward_workspace",
          call_backward_workspace(c, &bytes, &alignment), status, words);
    if (bytes != 12345 || alignment != 54321)
        complain("%s: attn_sdpa_backward_workspace wrote its results\n", what);
    judge(what, "attn_sdpa_backward_work",
          call_backward_work(c, scratch, sizeof scratch), status, words);
}

/* What no tensor may be, of every gradient, d_out, d_lse and lse. */
static void test_sdpa_backward__every_tensor_is_checked(void **state)
{
    (void)state;
    for (int n = 0; n < ALL_GRADIENTS + 2; n++) {
        struct backward c;
        attn_tensor *t;
        const char *name = n < ALL_GRADIENTS    ? gradient_names[n]
                           : n == ALL_GRADIENTS ? "d_out"
                                                : "gradients.d_lse";
#define BAD(change, status, words)                \
    use_all_gradients(&c);                        \
    t = n < ALL_GRADIENTS    ? gradient_of(&c, n) \
        : n == ALL_GRADIENTS ? &c.d_out           \
                             : &c.d_lse;          \
    change;                                       \
    refuse_backward(&c, #change, status, name, words)
        BAD(t->data = NULL, ATTN_ERR_NULL, "data|NULL");
        BAD(shift(t, 2), ATTN_ERR_ALIGN, "data|multiple|4 bytes");
        BAD(t->dtype = ATTN_F64, ATTN_ERR_TYPE, "F64|F32");
        BAD(t->dtype = ATTN_F16, ATTN_ERR_TYPE, "F16|F32");
        BAD(t->dtype = 99, ATTN_ERR_TYPE, "99");
        BAD(t->reserved = 3, ATTN_ERR_UNSUPPORTED, "reserved|3");
        BAD(t->shape[1] = -1, ATTN_ERR_SIZE, "shape[1]|-1");
        for (int dim = 0; dim < 4; dim++) {
            BAD(t->shape[dim] = 7, ATTN_ERR_SHAPE, "shape|7|must be");
            BAD(t->shape[dim] = 0, ATTN_ERR_SHAPE, "shape|0|must be");
            use_all_gradients(&c);
            if (n >= ALL_GRADIENTS || gradient_of(&c, n)->shape[dim] < 2)
                continue;
            BAD(t->stride[dim] = 0, ATTN_ERR_STRIDE, "strides|own place");
            BAD(t->stride[dim] = INT64_MAX / 2, ATTN_ERR_STRIDE,
                "strides|memory");
        }
#undef BAD
    }
    finish();
}

/* A gradient on anything that is read, or on another gradient. */
/* The same numbers where nothing follows that a gradient could reach. */
static void *take_apart(const void *from, size_t bytes)
{
    void *p = take(512);
    memcpy(p, from, bytes);
    return p;
}

static void test_sdpa_backward__gradients_have_memory_of_their_own(void **state)
{
    (void)state;
    for (int n = 0; n < ALL_GRADIENTS; n++) {
        struct backward c;
        for (int which = 0; which < 17; which++) {
            use_all_gradients(&c);
            int64_t **const arrays[] = {&c.s.q_lens, &c.s.kv_lens,
                                        &c.s.kv_starts, &c.s.kv_offsets,
                                        &c.s.prefix_lens};
            for (size_t m = 0; m < COUNT(arrays); m++)
                *arrays[m] = take_apart(*arrays[m], 4 * sizeof(int64_t));
            c.s.kv_segments = take_apart(c.s.kv_segments, (size_t)(4 * B * TK));
            c.s.slopes.data = take_apart(c.s.slopes.data, (size_t)(4 * HQ));
            c.s.sinks.data = take_apart(c.s.sinks.data, (size_t)(4 * B * HQ));
            c.s.blocks.data =
                take_apart(c.s.blocks.data, (size_t)(B * HQ * 2 * 3));
            c.s.p.q_lens = c.s.q_lens;
            c.s.p.kv_lens = c.s.kv_lens;
            c.s.p.kv_starts = c.s.kv_starts;
            c.s.p.kv_offsets = c.s.kv_offsets;
            c.s.p.causal = 1;
            c.s.p.prefix_lens = c.s.prefix_lens;
            use_blocks(&c.s);
            use_segments(&c.s);
            ask_for_one(&c, n);
            attn_tensor *t = gradient_of(&c, n);
            const struct {
                void *data;
                const char *name;
            } read[] = {{c.s.q.data, "|q"},
                        {c.s.k.data, "|k"},
                        {c.s.v.data, "|v"},
                        {c.s.out.data, "|out"},
                        {c.s.lse.data, "params.lse"},
                        {c.d_out.data, "d_out"},
                        {c.d_lse.data, "gradients.d_lse"},
                        {c.s.masks[0].view.data, "mask"},
                        {c.s.slopes.data, "params.alibi"},
                        {c.s.sinks.data, "params.sinks"},
                        {c.s.blocks.data, "params.blocks"},
                        {c.s.q_lens, "q_lens"},
                        {c.s.kv_lens, "kv_lens"},
                        {c.s.kv_starts, "kv_starts"},
                        {c.s.kv_offsets, "kv_offsets"},
                        {c.s.prefix_lens, "prefix_lens"},
                        {c.s.kv_segments, "kv_segments"}};
            t->data = read[which].data;
            refuse_backward(&c, "on an input", ATTN_ERR_OVERLAP,
                            gradient_names[n], read[which].name);
        }
        for (int other = 0; other < n; other++) {
            use_all_gradients(&c);
            gradient_of(&c, n)->data = gradient_of(&c, other)->data;
            c.g.d_lse = NULL;
            refuse_backward(&c, "on another gradient", ATTN_ERR_OVERLAP,
                            "gradients.", "shares memory with gradients.");
        }
    }
    finish();
}

static void accept_backward(const char *what, const struct backward *c)
{
    size_t bytes = 0;
    size_t alignment = 0;
    if (call_backward_check(c) != ATTN_OK)
        complain("%s: attn_sdpa_backward_check, %s\n", what, attn_last_error());
    if (call_backward_workspace(c, &bytes, &alignment) != ATTN_OK)
        complain("%s: attn_sdpa_backward_workspace, %s\n", what,
                 attn_last_error());
    if (call_backward(c) != ATTN_OK)
        complain("%s: refused, %s\n", what, attn_last_error());
}

static void test_sdpa_backward__the_base_problems_are_accepted(void **state)
{
    (void)state;
    struct backward c;
    backward_base(&c);
    accept_backward("base", &c);
    use_mask_gradient(&c);
    accept_backward("mask", &c);
    use_alibi_gradient(&c);
    accept_backward("alibi", &c);
    use_sinks_gradient(&c);
    accept_backward("sinks", &c);
    c.g.flags = 127 * ATTN_SDPA_ADD_D_Q;
    accept_backward("added to", &c);
    use_causal(&c.s);
    c.s.p.softcap = 2.0;
    use_blocks(&c.s);
    use_segments(&c.s);
    c.s.p.kv_lens = c.s.kv_lens;
    c.s.p.q_lens = c.s.q_lens;
    c.s.p.kv_starts = c.s.kv_starts;
    c.s.p.kv_offsets = c.s.kv_offsets;
    accept_backward("rules", &c);
    c.s.k.dtype = c.s.v.dtype = ATTN_BF16;
    accept_backward("bfloat16", &c);
    backward_base(&c);
    use_ragged(&c.s);
    c.d_out.shape[0] = c.d_lse.shape[0] = 1;
    c.d_q.shape[0] = c.d_k.shape[0] = c.d_v.shape[0] = 1;
    accept_backward("ragged", &c);
    finish();
}

/* Nothing that is optional is needed. */
static void test_sdpa_backward__every_gradient_is_optional(void **state)
{
    (void)state;
    const attn_sdpa_gradients none = ATTN_SDPA_GRADIENTS_INIT;
    struct backward c;
    backward_base(&c);
    use_mask_gradient(&c);
    use_alibi_gradient(&c);
    use_sinks_gradient(&c);
    c.d_masks[0] = NULL;
    accept_backward("no d_masks[0]", &c);
    const attn_tensor **const fields[] = {
        &c.g.d_lse,   &c.g.d_q,     &c.g.d_k,    &c.g.d_v,
        &c.g.d_alibi, &c.g.d_sinks, &c.g.d_scale};
    for (size_t n = 0; n < COUNT(fields); n++) {
        const attn_tensor *kept = *fields[n];
        *fields[n] = NULL;
        accept_backward("one less", &c);
        *fields[n] = kept;
    }
    c.g = none;
    remember();
    accept_backward("none", &c);
    if (memcmp(arena, before, sizeof arena) != 0)
        complain("something was written\n");
    c.g.flags = 127 * ATTN_SDPA_ADD_D_Q;
    accept_backward("none, added to", &c);
    finish();
}

/* Masks without a gradient stand among those that have one. */
static void test_sdpa_backward__masks_of_all_kinds(void **state)
{
    (void)state;
    struct backward c;
    backward_base(&c);
    use_masks(&c.s, 3);
    c.s.masks[1].kind = ATTN_MASK_ADD;
    c.s.masks[1].view = take_view(ATTN_F32, 1, HQ, 1, TK);
    kit_fill(&c.s.masks[1].view);
    c.s.masks[2].kind = ATTN_MASK_DROP;
    c.d_mask.shape[0] = c.d_mask.shape[2] = 1;
    c.d_masks[1] = &c.d_mask;
    c.g.d_masks = c.d_masks;
    accept_backward("KEEP, ADD, DROP", &c);
    finish();
}

/* What is only read may lie in any strides, and several inputs in one memory.
 * Gradients may lie between each other. */
static void test_sdpa_backward__memory_that_is_accepted(void **state)
{
    (void)state;
    struct backward c;
    backward_base(&c);
    for (int dim = 0; dim < 4; dim++) {
        c.d_out.stride[dim] = 0;
        c.d_lse.stride[dim] = 0;
        accept_backward("d_out and d_lse of stride 0", &c);
    }
    backward_base(&c);
    c.d_out.data = c.s.out.data;
    c.d_lse.data = c.s.lse.data;
    accept_backward("d_out is out", &c);
    backward_base(&c);
    c.s.out.data = c.s.v.data = c.s.k.data = c.s.q.data;
    accept_backward("all inputs in one", &c);
    backward_base(&c);
    float *memory = take(sizeof(float) * (size_t)(B * TK * HKV * (D + DV)));
    attn_view_bthd(&c.d_k, ATTN_F32, memory, B, TK, HKV, D);
    attn_view_bthd(&c.d_v, ATTN_F32, memory + D, B, TK, HKV, DV);
    c.d_k.stride[1] = c.d_v.stride[1] = D + DV;
    c.d_k.stride[2] = c.d_v.stride[2] = HKV * (D + DV);
    c.d_k.stride[0] = c.d_v.stride[0] = TK * HKV * (D + DV);
    accept_backward("d_k beside d_v", &c);
    finish();
}

/* They are what attn_sdpa wrote, but only read here. */
static void test_sdpa_backward__out_and_lse_are_inputs(void **state)
{
    (void)state;
    struct backward c;
    backward_base(&c);
    for (int dim = 0; dim < 4; dim++) {
        c.s.out.stride[dim] = 0;
        c.s.lse.stride[dim] = 0;
        accept_backward("out and lse of stride 0", &c);
    }
    finish();
}

/* ---- scratch memory of gradients ---- */

static void test_sdpa_backward_work__scratch_memory_must_fit(void **state)
{
    (void)state;
    struct backward c;
    size_t bytes = 0;
    size_t alignment = 0;
    const char *call = "attn_sdpa_backward_work";
    backward_base(&c);
    use_mask_gradient(&c);
    remember();
    if (call_backward_workspace(&c, &bytes, &alignment) != ATTN_OK)
        complain("attn_sdpa_backward_workspace: %s\n", attn_last_error());
    if (bytes == 0 || alignment == 0 || (alignment & (alignment - 1)) != 0)
        complain("%zu bytes at %zu\n", bytes, alignment);
    judge("one byte less", call, call_backward_work(&c, scratch, bytes - 1),
          ATTN_ERR_WORKSPACE, "work");
    judge("no bytes", call, call_backward_work(&c, scratch, 0),
          ATTN_ERR_WORKSPACE, "work|0");
    judge("misaligned", call,
          call_backward_work(&c, scratch + 1, sizeof scratch - 1),
          ATTN_ERR_WORKSPACE, "work");
    judge("half aligned", call,
          call_backward_work(&c, scratch + alignment / 2,
                             sizeof scratch - alignment / 2),
          ATTN_ERR_WORKSPACE, "work");
    judge("NULL", call, call_backward_work(&c, NULL, bytes), ATTN_ERR_NULL,
          "work|NULL");
    if (call_backward_work(&c, scratch, bytes) != ATTN_OK)
        complain("exactly enough is refused: %s\n", attn_last_error());
    finish();
}

static void
test_sdpa_backward_work__scratch_memory_must_be_its_own(void **state)
{
    (void)state;
    for (int which = 0; which < 7; which++) {
        static const char *const words[] = {
            "work|gradients.d_q",     "work|gradients.d_k",
            "work|gradients.d_v",     "work|gradients.d_masks[0]",
            "work|gradients.d_alibi", "work|gradients.d_sinks",
            "work|gradients.d_scale"};
        struct backward c;
        backward_base(&c);
        use_mask_gradient(&c);
        use_alibi_gradient(&c);
        use_sinks_gradient(&c);
        attn_tensor *const gradients[] = {&c.d_q,    &c.d_k,     &c.d_v,
                                          &c.d_mask, &c.d_alibi, &c.d_sinks,
                                          &c.d_scale};
        gradients[which]->data = scratch + 4096;
        remember();
        judge("a gradient in scratch memory", "attn_sdpa_backward_work",
              call_backward_work(&c, scratch, sizeof scratch), ATTN_ERR_OVERLAP,
              words[which]);
    }
    finish();
}

static void test_sdpa_backward_workspace__results_are_needed(void **state)
{
    (void)state;
    struct backward c;
    size_t number = 7;
    backward_base(&c);
    remember();
    judge("bytes NULL", "attn_sdpa_backward_workspace",
          call_backward_workspace(&c, NULL, &number), ATTN_ERR_NULL, "bytes");
    judge("alignment NULL", "attn_sdpa_backward_workspace",
          call_backward_workspace(&c, &number, NULL), ATTN_ERR_NULL,
          "alignment");
    if (number != 7)
        complain("a result was written\n");
    finish();
}

/* ---- memory that cannot be had ---- */

static void *no_memory(void *user, size_t bytes, size_t alignment)
{
    (void)user;
    (void)bytes;
    (void)alignment;
    return NULL;
}

/* Lets the context itself be made, then nothing more. */
static bool memory_left;

static void *some_memory(void *user, size_t bytes, size_t alignment)
{
    (void)user;
    if (!memory_left)
        return NULL;
    return aligned_alloc(alignment,
                         (bytes + alignment - 1) / alignment * alignment);
}

static void free_memory(void *user, void *p)
{
    (void)user;
    free(p);
}

static attn_context *make_poor_context(void)
{
    attn_context_params p = ATTN_CONTEXT_PARAMS_INIT;
    attn_context *context = NULL;
    p.alloc = some_memory;
    p.free = free_memory;
    memory_left = true;
    if (attn_context_create(&context, &p) != ATTN_OK)
        complain("attn_context_create: %s\n", attn_last_error());
    memory_left = false;
    return context;
}

/* ---- attn_context_create ---- */

static void serial(void *user, int64_t n, attn_task_fn task, void *arg)
{
    (void)user;
    for (int64_t i = 0; i < n; i++)
        task(arg, i);
}

static void refuse_context(const char *what, const attn_context_params *p,
                           attn_status status, const char *words)
{
    attn_context *const untouched = nowhere();
    attn_context *context = untouched;
    judge(what, "attn_context_create", attn_context_create(&context, p), status,
          words);
    if (context != untouched)
        complain("%s: *context was touched\n", what);
}

static void test_context_create__every_refusal(void **state)
{
    (void)state;
    const attn_context_params init = ATTN_CONTEXT_PARAMS_INIT;
    attn_context_params p = init;
    judge("context NULL", "attn_context_create", attn_context_create(NULL, &p),
          ATTN_ERR_NULL, "context|NULL");
    p.struct_size = 8;
    refuse_context("struct_size 8", &p, ATTN_ERR_STRUCT, "struct_size|8");
    p = init;
    p.reserved = 3;
    refuse_context("reserved", &p, ATTN_ERR_UNSUPPORTED, "reserved|3");
    p = init;
    p.num_threads = -1;
    refuse_context("-1 threads", &p, ATTN_ERR_VALUE, "num_threads|-1");
    p.num_threads = 1025;
    refuse_context("1025 threads", &p, ATTN_ERR_VALUE, "num_threads|1025|1024");
    p = init;
    p.alloc = some_memory;
    refuse_context("alloc alone", &p, ATTN_ERR_NULL, "alloc|free");
    p = init;
    p.free = free_memory;
    refuse_context("free alone", &p, ATTN_ERR_NULL, "alloc|free");
    p.alloc = no_memory;
    refuse_context("no memory", &p, ATTN_ERR_NOMEM, "memory");
    finish();
}

static void test_context_create__what_is_accepted(void **state)
{
    (void)state;
    attn_context_params p = ATTN_CONTEXT_PARAMS_INIT;
    attn_context *context = NULL;
    assert_int_equal(attn_context_create(&context, NULL), ATTN_OK);
    attn_context_destroy(context);
    p.num_threads = 1024;
    p.parallel_for = serial;
    assert_int_equal(attn_context_create(&context, &p), ATTN_OK);
    assert_int_equal(attn_context_num_threads(context), 1024);
    attn_context_destroy(context);
    attn_context_destroy(NULL);
    finish();
}

/* ---- the flat calls ---- */

static void test_sdpa_f32__every_refusal(void **state)
{
    (void)state;
    const char *call = "attn_sdpa_f32";
    float *q = take(4096);
    float *k = take(4096);
    float *v = take(4096);
    float *out = take(4096);
    const float *odd = (const float *)(const void *)((char *)q + 2);
    remember();
#define FLAT(what, status, words, ...) \
    judge(what, call, attn_sdpa_f32(__VA_ARGS__), status, words)
    FLAT("q", ATTN_ERR_NULL, "q", 2, 4, 2, 3, 5, 4, NULL, k, v, out, 0);
    FLAT("k", ATTN_ERR_NULL, "k", 2, 4, 2, 3, 5, 4, q, NULL, v, out, 0);
    FLAT("v", ATTN_ERR_NULL, "v", 2, 4, 2, 3, 5, 4, q, k, NULL, out, 0);
    FLAT("out", ATTN_ERR_NULL, "out", 2, 4, 2, 3, 5, 4, q, k, v, NULL, 0);
    FLAT("batch", ATTN_ERR_SIZE, "-1", -1, 4, 2, 3, 5, 4, q, k, v, out, 0);
    FLAT("heads", ATTN_ERR_SIZE, "-2", 2, -2, 2, 3, 5, 4, q, k, v, out, 0);
    FLAT("kv_heads", ATTN_ERR_SIZE, "-3", 2, 4, -3, 3, 5, 4, q, k, v, out, 0);
    FLAT("q_len", ATTN_ERR_SIZE, "-4", 2, 4, 2, -4, 5, 4, q, k, v, out, 0);
    FLAT("kv_len", ATTN_ERR_SIZE, "-5", 2, 4, 2, 3, -5, 4, q, k, v, out, 0);
    FLAT("width", ATTN_ERR_SIZE, "-6", 2, 4, 2, 3, 5, -6, q, k, v, out, 0);
    FLAT("2^62", ATTN_ERR_SIZE, "", TWO(62), 4, 2, 3, 5, 4, q, k, v, out, 0);
    FLAT("2^31 2^32", ATTN_ERR_SIZE, "", TWO(31), 4, 2, TWO(32), 5, 4, q, k, v,
         out, 0);
    FLAT("keys 2^32 2^32", ATTN_ERR_SIZE, "", 1, 1, 1, 1, TWO(32), TWO(32), q,
         k, v, out, 0);
    FLAT("multiple", ATTN_ERR_SHAPE, "3|2", 2, 3, 2, 3, 5, 4, q, k, v, out, 0);
    FLAT("no kv heads", ATTN_ERR_SHAPE, "4|0", 2, 4, 0, 3, 5, 4, q, k, v, out,
         0);
    FLAT("align 3", ATTN_ERR_VALUE, "causal_align|3", 2, 4, 2, 3, 5, 4, q, k, v,
         out, ATTN_ALIGN_OFFSET);
    FLAT("align -1", ATTN_ERR_VALUE, "causal_align|-1", 2, 4, 2, 3, 5, 4, q, k,
         v, out, -1);
    FLAT("odd q", ATTN_ERR_ALIGN, "q", 2, 4, 2, 3, 5, 4, odd, k, v, out, 0);
    FLAT("out is k", ATTN_ERR_OVERLAP, "out|k", 2, 4, 2, 3, 5, 4, q, k, v, k,
         0);
    FLAT("out is v", ATTN_ERR_OVERLAP, "out|v", 2, 4, 2, 3, 5, 4, q, k, v, v,
         0);
#undef FLAT
    finish();
}

static void test_sdpa_f64__every_refusal(void **state)
{
    (void)state;
    const char *call = "attn_sdpa_f64";
    double *q = take(4096);
    double *k = take(4096);
    double *v = take(4096);
    double *out = take(4096);
    const double *odd = (const double *)(const void *)((char *)v + 4);
    remember();
#define FLAT(what, status, words, ...) \
    judge(what, call, attn_sdpa_f64(__VA_ARGS__), status, words)
    FLAT("q", ATTN_ERR_NULL, "q", 2, 4, 2, 3, 5, 4, NULL, k, v, out, 0);
    FLAT("width", ATTN_ERR_SIZE, "-6", 2, 4, 2, 3, 5, -6, q, k, v, out, 0);
    FLAT("2^62", ATTN_ERR_SIZE, "", TWO(62), 4, 2, 3, 5, 4, q, k, v, out, 0);
    FLAT("multiple", ATTN_ERR_SHAPE, "3|2", 2, 3, 2, 3, 5, 4, q, k, v, out, 0);
    FLAT("align 9", ATTN_ERR_VALUE, "causal_align|9", 2, 4, 2, 3, 5, 4, q, k, v,
         out, 9);
    FLAT("odd v", ATTN_ERR_ALIGN, "v", 2, 4, 2, 3, 5, 4, q, k, odd, out, 0);
    FLAT("out is k", ATTN_ERR_OVERLAP, "out|k", 2, 4, 2, 3, 5, 4, q, k, v, k,
         0);
#undef FLAT
    finish();
}

/* ---- the building blocks ---- */

static void test_softmax__every_refusal(void **state)
{
    (void)state;
    const char *call = "attn_softmax";
    const attn_tensor x0 = take_view(ATTN_F32, 2, 3, 4, 5);
    const attn_tensor y0 = take_view(ATTN_F32, 2, 3, 4, 5);
    const attn_tensor lse0 = take_view(ATTN_F32, 2, 3, 4, 1);
    attn_tensor x = x0;
    attn_tensor y = y0;
    attn_tensor lse = lse0;
    remember();
#define SOFTMAX(what, status, words, change)                          \
    do {                                                              \
        change;                                                       \
        judge(what, call, attn_softmax(&x, &y, &lse), status, words); \
        x = x0;                                                       \
        y = y0;                                                       \
        lse = lse0;                                                   \
    } while (0)
    judge("x", call, attn_softmax(NULL, &y, &lse), ATTN_ERR_NULL, "x|NULL");
    judge("y", call, attn_softmax(&x, NULL, &lse), ATTN_ERR_NULL, "y|NULL");
    SOFTMAX("x data", ATTN_ERR_NULL, "x|data", x.data = NULL);
    SOFTMAX("y data", ATTN_ERR_NULL, "y|data", y.data = NULL);
    SOFTMAX("lse data", ATTN_ERR_NULL, "lse|data", lse.data = NULL);
    SOFTMAX("x size", ATTN_ERR_SIZE, "x|-1", x.shape[2] = -1);
    SOFTMAX("y size", ATTN_ERR_SIZE, "y|-2", y.shape[0] = -2);
    SOFTMAX("lse size", ATTN_ERR_SIZE, "lse|-2", lse.shape[0] = -2);
    SOFTMAX("x 2^62", ATTN_ERR_SIZE, "x|4611686018427387904",
            x.shape[0] = y.shape[0] = lse.shape[0] = TWO(62));
    SOFTMAX("y shape", ATTN_ERR_SHAPE, "y|x|4|5", y.shape[3] = 4);
    SOFTMAX("y batch", ATTN_ERR_SHAPE, "y|x|1|2", y.shape[0] = 1);
    SOFTMAX("lse shape", ATTN_ERR_SHAPE, "lse|5|1",
            (lse = y, lse.data = lse0.data));
    SOFTMAX("lse rows", ATTN_ERR_SHAPE, "lse|3|4", lse.shape[2] = 3);
    SOFTMAX("x type", ATTN_ERR_TYPE, "x", x.dtype = ATTN_U8);
    SOFTMAX("x type 0", ATTN_ERR_TYPE, "x|0", x.dtype = 0);
    SOFTMAX("y type", ATTN_ERR_TYPE, "y|x", y.dtype = ATTN_F64);
    SOFTMAX("lse type", ATTN_ERR_TYPE, "lse", lse.dtype = ATTN_F64);
    SOFTMAX("y stride 0", ATTN_ERR_STRIDE, "y", y.stride[1] = 0);
    SOFTMAX("lse stride 0", ATTN_ERR_STRIDE, "lse", lse.stride[2] = 0);
    SOFTMAX("x stride", ATTN_ERR_STRIDE, "x", x.stride[0] = INT64_MAX);
    SOFTMAX("in place, stride 0", ATTN_ERR_STRIDE, "y",
            (x.stride[0] = 0, y = x));
    SOFTMAX("x odd", ATTN_ERR_ALIGN, "x", shift(&x, 1));
    SOFTMAX("y odd", ATTN_ERR_ALIGN, "y", shift(&y, 2));
    SOFTMAX("lse odd", ATTN_ERR_ALIGN, "lse", shift(&lse, 3));
    SOFTMAX("y in x", ATTN_ERR_OVERLAP, "y|x", (y.data = x.data, shift(&y, 4)));
    SOFTMAX("y is x upside down", ATTN_ERR_OVERLAP, "y|x",
            (y.data = x.data, shift(&y, 15 * 4), y.stride[2] = -5));
    SOFTMAX("lse in x", ATTN_ERR_OVERLAP, "lse|x", lse.data = x.data);
    SOFTMAX("lse in y", ATTN_ERR_OVERLAP, "lse|y", lse.data = y.data);
    SOFTMAX("x reserved", ATTN_ERR_UNSUPPORTED, "x|reserved", x.reserved = 1);
    SOFTMAX("y reserved", ATTN_ERR_UNSUPPORTED, "y|reserved", y.reserved = 1);
    SOFTMAX("lse reserved", ATTN_ERR_UNSUPPORTED, "lse|reserved",
            lse.reserved = 1);
#undef SOFTMAX
    finish();
}

static void test_weights_check__every_refusal(void **state)
{
    (void)state;
    const char *call = "attn_weights_check";
    const attn_tensor w0 = take_view(ATTN_F64, 2, 3, 4, 5);
    attn_tensor w = w0;
    double deviation = 7.0;
    int64_t empty = 7;
    remember();
#define CHECK(what, status, words, change)                                    \
    do {                                                                      \
        change;                                                               \
        judge(what, call, attn_weights_check(&w, &deviation, &empty), status, \
              words);                                                         \
        w = w0;                                                               \
    } while (0)
    judge("w", call, attn_weights_check(NULL, &deviation, &empty),
          ATTN_ERR_NULL, "w|NULL");
    judge("deviation", call, attn_weights_check(&w, NULL, &empty),
          ATTN_ERR_NULL, "deviation|NULL");
    CHECK("data", ATTN_ERR_NULL, "w|data", w.data = NULL);
    CHECK("size", ATTN_ERR_SIZE, "w|-1", w.shape[3] = -1);
    CHECK("2^62", ATTN_ERR_SIZE, "w", w.shape[1] = TWO(62));
    CHECK("type", ATTN_ERR_TYPE, "w", w.dtype = ATTN_U8);
    CHECK("type 9", ATTN_ERR_TYPE, "w|9", w.dtype = 9);
    CHECK("stride", ATTN_ERR_STRIDE, "w", w.stride[3] = TWO(62));
    CHECK("odd", ATTN_ERR_ALIGN, "w", shift(&w, 4));
    CHECK("reserved", ATTN_ERR_UNSUPPORTED, "w|reserved", w.reserved = 5);
#undef CHECK
    if ((int)deviation != 7 || empty != 7)
        complain("a result was written\n");
    finish();
}

static void test_mask_init__every_refusal(void **state)
{
    (void)state;
    const char *call = "attn_mask_init";
    attn_mask m;
    void *data = take(4096);
    memset(&m, 0x5A, sizeof m);
    const attn_mask was = m;
    remember();
#define INIT(what, status, words, ...) \
    judge(what, call, attn_mask_init(__VA_ARGS__), status, words)
    INIT("mask", ATTN_ERR_NULL, "mask|NULL", NULL, ATTN_MASK_KEEP, ATTN_U8,
         data, 1, 1, 2, 2);
    INIT("data", ATTN_ERR_NULL, "data|NULL", &m, ATTN_MASK_KEEP, ATTN_U8, NULL,
         1, 1, 2, 2);
    INIT("kind 0", ATTN_ERR_VALUE, "kind|0", &m, 0, ATTN_U8, data, 1, 1, 2, 2);
    INIT("kind 4", ATTN_ERR_VALUE, "kind|4", &m, 4, ATTN_U8, data, 1, 1, 2, 2);
    INIT("kind -1", ATTN_ERR_VALUE, "kind|-1", &m, -1, ATTN_U8, data, 1, 1, 2,
         2);
    INIT("type 0", ATTN_ERR_TYPE, "0", &m, ATTN_MASK_KEEP, 0, data, 1, 1, 2, 2);
    INIT("keep floats", ATTN_ERR_TYPE, "KEEP", &m, ATTN_MASK_KEEP, ATTN_F32,
         data, 1, 1, 2, 2);
    INIT("drop doubles", ATTN_ERR_TYPE, "DROP", &m, ATTN_MASK_DROP, ATTN_F64,
         data, 1, 1, 2, 2);
    INIT("add bytes", ATTN_ERR_TYPE, "ADD", &m, ATTN_MASK_ADD, ATTN_U8, data, 1,
         1, 2, 2);
    INIT("batch", ATTN_ERR_SIZE, "-1", &m, ATTN_MASK_ADD, ATTN_F32, data, -1, 1,
         2, 2);
    INIT("heads", ATTN_ERR_SIZE, "-1", &m, ATTN_MASK_ADD, ATTN_F32, data, 1, -1,
         2, 2);
    INIT("q_len", ATTN_ERR_SIZE, "-1", &m, ATTN_MASK_ADD, ATTN_F32, data, 1, 1,
         -1, 2);
    INIT("kv_len", ATTN_ERR_SIZE, "-1", &m, ATTN_MASK_ADD, ATTN_F32, data, 1, 1,
         2, -1);
    INIT("2^32 2^31", ATTN_ERR_SIZE, "", &m, ATTN_MASK_KEEP, ATTN_U8, data, 1,
         1, TWO(32), TWO(31));
#undef INIT
    if (memcmp(&m, &was, sizeof m) != 0)
        complain("the mask was touched\n");
    finish();
}

/* The three builders, with otherwise valid arguments. */
static int64_t builder_lens[2] = {2, 5};

static attn_status build_causal(const attn_mask *m)
{
    return attn_mask_causal(m, 0);
}

static attn_status build_window(const attn_mask *m)
{
    return attn_mask_window(m, 0, 1, 1);
}

static attn_status build_padding(const attn_mask *m)
{
    return attn_mask_padding(m, builder_lens);
}

static void test_mask_builders__every_refusal(void **state)
{
    (void)state;
    static const struct {
        const char *call;
        attn_status (*build)(const attn_mask *);
    } builders[] = {{"attn_mask_causal", build_causal},
                    {"attn_mask_window", build_window},
                    {"attn_mask_padding", build_padding}};
    const attn_tensor bytes = take_view(ATTN_U8, 2, 3, 4, 5);
    const attn_tensor floats = take_view(ATTN_F32, 2, 3, 4, 5);
    const attn_mask keep = {ATTN_MASK_KEEP, 0, bytes};
    const attn_mask add = {ATTN_MASK_ADD, 0, floats};
    attn_mask m = keep;
    remember();
    for (size_t n = 0; n < COUNT(builders); n++) {
        const char *call = builders[n].call;
#define BUILD(what, status, words, change)                       \
    do {                                                         \
        change;                                                  \
        judge(what, call, builders[n].build(&m), status, words); \
        m = keep;                                                \
    } while (0)
        judge("mask", call, builders[n].build(NULL), ATTN_ERR_NULL,
              "mask|NULL");
        BUILD("data", ATTN_ERR_NULL, "mask|data", m.view.data = NULL);
        BUILD("size", ATTN_ERR_SIZE, "mask|-1", m.view.shape[3] = -1);
        BUILD("2^62", ATTN_ERR_SIZE, "mask", m.view.shape[1] = TWO(62));
        BUILD("kind 0", ATTN_ERR_VALUE, "mask|kind|0", m.kind = 0);
        BUILD("kind 9", ATTN_ERR_VALUE, "mask|kind|9", m.kind = 9);
        BUILD("type", ATTN_ERR_TYPE, "mask", m.view.dtype = ATTN_F32);
        BUILD("type 0", ATTN_ERR_TYPE, "mask", m.view.dtype = 0);
        BUILD("add bytes", ATTN_ERR_TYPE, "mask", m.kind = ATTN_MASK_ADD);
        BUILD("stride 0", ATTN_ERR_STRIDE, "mask", m.view.stride[2] = 0);
        BUILD("meet", ATTN_ERR_STRIDE, "mask", m.view.stride[2] = 4);
        BUILD("odd", ATTN_ERR_ALIGN, "mask", (m = add, shift(&m.view, 1)));
        BUILD("reserved", ATTN_ERR_UNSUPPORTED, "mask|reserved",
              m.reserved = 1);
        BUILD("view reserved", ATTN_ERR_UNSUPPORTED, "mask|reserved",
              m.view.reserved = 1);
#undef BUILD
    }
    judge("left", "attn_mask_window", attn_mask_window(&m, 0, -2, 0),
          ATTN_ERR_VALUE, "left|-2");
    judge("right", "attn_mask_window", attn_mask_window(&m, 0, 0, -3),
          ATTN_ERR_VALUE, "right|-3");
    judge("kv_lens", "attn_mask_padding", attn_mask_padding(&m, NULL),
          ATTN_ERR_NULL, "kv_lens|NULL");
    const int64_t below[2] = {0, -1};
    const int64_t above[2] = {6, 5};
    judge("below", "attn_mask_padding", attn_mask_padding(&m, below),
          ATTN_ERR_VALUE, "kv_lens|-1");
    judge("above", "attn_mask_padding", attn_mask_padding(&m, above),
          ATTN_ERR_VALUE, "kv_lens|6|5");
    finish();
}

static void test_mask_apply__every_refusal(void **state)
{
    (void)state;
    const char *call = "attn_mask_apply";
    const attn_tensor s0 = take_view(ATTN_F32, 2, 3, 4, 5);
    const attn_mask keep = {ATTN_MASK_KEEP, 0, take_view(ATTN_U8, 2, 3, 4, 5)};
    const attn_mask add = {ATTN_MASK_ADD, 0, take_view(ATTN_F32, 2, 3, 4, 5)};
    attn_tensor s = s0;
    attn_mask m[ATTN_MAX_MASKS + 1];
    for (size_t n = 0; n < COUNT(m); n++)
        m[n] = keep;
    remember();
#define APPLY(what, status, words, change)                           \
    do {                                                             \
        change;                                                      \
        judge(what, call, attn_mask_apply(m, 4, &s), status, words); \
        s = s0;                                                      \
        m[3] = keep;                                                 \
    } while (0)
    judge("scores", call, attn_mask_apply(m, 1, NULL), ATTN_ERR_NULL,
          "scores|NULL");
    judge("masks", call, attn_mask_apply(NULL, 1, &s), ATTN_ERR_NULL,
          "masks|NULL");
    judge("0", call, attn_mask_apply(m, 0, &s), ATTN_ERR_VALUE,
          "masks|num_masks|0");
    judge("-1", call, attn_mask_apply(m, -1, &s), ATTN_ERR_VALUE,
          "num_masks|-1");
    judge("5", call, attn_mask_apply(m, 5, &s), ATTN_ERR_VALUE,
          "num_masks|5|4");
    APPLY("scores data", ATTN_ERR_NULL, "scores|data", s.data = NULL);
    APPLY("mask data", ATTN_ERR_NULL, "mask|data", m[3].view.data = NULL);
    APPLY("scores size", ATTN_ERR_SIZE, "scores|-1", s.shape[1] = -1);
    APPLY("mask size", ATTN_ERR_SIZE, "mask|-1", m[3].view.shape[0] = -1);
    APPLY("2^62", ATTN_ERR_SIZE, "scores", s.shape[0] = TWO(62));
    APPLY("mask shape", ATTN_ERR_SHAPE, "mask|2|5", m[3].view.shape[3] = 2);
    APPLY("scores type", ATTN_ERR_TYPE, "scores", s.dtype = ATTN_U8);
    APPLY("keep floats", ATTN_ERR_TYPE, "mask", m[3].view = add.view);
    APPLY("add bytes", ATTN_ERR_TYPE, "mask", m[3].kind = ATTN_MASK_ADD);
    APPLY("add doubles", ATTN_ERR_TYPE, "mask",
          (m[3] = add, m[3].view.dtype = ATTN_F64));
    APPLY("kind 0", ATTN_ERR_VALUE, "mask|kind|0", m[3].kind = 0);
    APPLY("scores stride 0", ATTN_ERR_STRIDE, "scores", s.stride[0] = 0);
    APPLY("mask stride", ATTN_ERR_STRIDE, "mask",
          m[3].view.stride[3] = INT64_MIN);
    APPLY("scores odd", ATTN_ERR_ALIGN, "scores", shift(&s, 1));
    APPLY("mask odd", ATTN_ERR_ALIGN, "mask",
          (m[3] = add, shift(&m[3].view, 2)));
    APPLY("overlap", ATTN_ERR_OVERLAP, "scores|mask",
          (m[3] = add, m[3].view.data = s.data));
    APPLY("scores reserved", ATTN_ERR_UNSUPPORTED, "scores|reserved",
          s.reserved = 1);
    APPLY("mask reserved", ATTN_ERR_UNSUPPORTED, "mask|reserved",
          m[3].reserved = 1);
    APPLY("view reserved", ATTN_ERR_UNSUPPORTED, "mask|reserved",
          m[3].view.reserved = 1);
#undef APPLY
    finish();
}

static void test_heads__every_refusal(void **state)
{
    (void)state;
    const attn_tensor rows0 = take_view(ATTN_F32, 2, 1, 4, 15);
    const attn_tensor heads0 = take_view(ATTN_F32, 2, 3, 4, 5);
    attn_tensor rows = rows0;
    attn_tensor heads = heads0;
    remember();
    judge("src", "attn_split_heads", attn_split_heads(NULL, &heads),
          ATTN_ERR_NULL, "src|NULL");
    judge("dst", "attn_split_heads", attn_split_heads(&rows, NULL),
          ATTN_ERR_NULL, "dst|NULL");
    judge("src", "attn_merge_heads", attn_merge_heads(NULL, &rows),
          ATTN_ERR_NULL, "src|NULL");
    judge("dst", "attn_merge_heads", attn_merge_heads(&heads, NULL),
          ATTN_ERR_NULL, "dst|NULL");
#define BOTH(what, status, words, change)                                \
    do {                                                                 \
        change;                                                          \
        judge(what, "attn_split_heads", attn_split_heads(&rows, &heads), \
              status, words);                                            \
        judge(what, "attn_merge_heads", attn_merge_heads(&heads, &rows), \
              status, words);                                            \
        rows = rows0;                                                    \
        heads = heads0;                                                  \
    } while (0)
    BOTH("rows data", ATTN_ERR_NULL, "data", rows.data = NULL);
    BOTH("heads data", ATTN_ERR_NULL, "data", heads.data = NULL);
    BOTH("rows size", ATTN_ERR_SIZE, "-1", rows.shape[3] = -1);
    BOTH("heads size", ATTN_ERR_SIZE, "-1", heads.shape[0] = -1);
    BOTH("2^62", ATTN_ERR_SIZE, "4611686018427387904",
         rows.shape[0] = heads.shape[0] = TWO(62));
    BOTH("batch", ATTN_ERR_SHAPE, "2|1", heads.shape[0] = 1);
    BOTH("one head", ATTN_ERR_SHAPE, "3|1",
         (rows = heads, rows.data = rows0.data));
    BOTH("len", ATTN_ERR_SHAPE, "3|4", heads.shape[2] = 3);
    BOTH("width", ATTN_ERR_SHAPE, "15|4", heads.shape[3] = 4);
    BOTH("heads", ATTN_ERR_SHAPE, "15|2", heads.shape[1] = 2);
    BOTH("rows type", ATTN_ERR_TYPE, "", rows.dtype = ATTN_F64);
    BOTH("u8", ATTN_ERR_TYPE, "", rows.dtype = heads.dtype = ATTN_U8);
    BOTH("type 0", ATTN_ERR_TYPE, "0", rows.dtype = heads.dtype = 0);
    BOTH("far rows", ATTN_ERR_STRIDE, "", rows.stride[2] = INT64_MAX);
    BOTH("far heads", ATTN_ERR_STRIDE, "", heads.stride[2] = INT64_MIN);
    BOTH("rows odd", ATTN_ERR_ALIGN, "", shift(&rows, 1));
    BOTH("heads odd", ATTN_ERR_ALIGN, "", shift(&heads, 2));
    BOTH("overlap", ATTN_ERR_OVERLAP, "src|dst", heads.data = rows.data);
    BOTH("rows reserved", ATTN_ERR_UNSUPPORTED, "reserved", rows.reserved = 1);
    BOTH("heads reserved", ATTN_ERR_UNSUPPORTED, "reserved",
         heads.reserved = 1);
#undef BOTH
    heads.stride[2] = 0;
    judge("dst stride 0", "attn_split_heads", attn_split_heads(&rows, &heads),
          ATTN_ERR_STRIDE, "dst");
    heads = heads0;
    rows.stride[3] = 0;
    judge("dst stride 0", "attn_merge_heads", attn_merge_heads(&heads, &rows),
          ATTN_ERR_STRIDE, "dst");
    finish();
}

static void test_linear__every_refusal(void **state)
{
    (void)state;
    const char *call = "attn_linear";
    const attn_tensor x0 = take_view(ATTN_F32, 2, 3, 4, 5);
    const attn_tensor w0 = take_view(ATTN_F32, 1, 1, 7, 5);
    const attn_tensor b0 = take_view(ATTN_F32, 1, 1, 1, 7);
    const attn_tensor y0 = take_view(ATTN_F32, 2, 3, 4, 7);
    attn_tensor x = x0;
    attn_tensor w = w0;
    attn_tensor b = b0;
    attn_tensor y = y0;
    kit_fill(&x);
    kit_fill(&w);
    kit_fill(&b);
    int32_t layout = ATTN_WEIGHT_OUT_IN;
    remember();
#define LINEAR(what, status, words, change)                                  \
    do {                                                                     \
        change;                                                              \
        judge(what, call, attn_linear(NULL, layout, &x, &w, &b, &y), status, \
              words);                                                        \
        x = x0;                                                              \
        w = w0;                                                              \
        b = b0;                                                              \
        y = y0;                                                              \
        layout = ATTN_WEIGHT_OUT_IN;                                         \
    } while (0)
    judge("x", call, attn_linear(NULL, layout, NULL, &w, &b, &y), ATTN_ERR_NULL,
          "x|NULL");
    judge("w", call, attn_linear(NULL, layout, &x, NULL, &b, &y), ATTN_ERR_NULL,
          "w|NULL");
    judge("y", call, attn_linear(NULL, layout, &x, &w, &b, NULL), ATTN_ERR_NULL,
          "y|NULL");
    LINEAR("x data", ATTN_ERR_NULL, "x|data", x.data = NULL);
    LINEAR("w data", ATTN_ERR_NULL, "w|data", w.data = NULL);
    LINEAR("bias data", ATTN_ERR_NULL, "bias|data", b.data = NULL);
    LINEAR("y data", ATTN_ERR_NULL, "y|data", y.data = NULL);
    LINEAR("layout 0", ATTN_ERR_VALUE, "layout|0", layout = 0);
    LINEAR("layout 3", ATTN_ERR_VALUE, "layout|3", layout = 3);
    LINEAR("x size", ATTN_ERR_SIZE, "x|-1", x.shape[2] = -1);
    LINEAR("w size", ATTN_ERR_SIZE, "w|-1", w.shape[2] = -1);
    LINEAR("bias size", ATTN_ERR_SIZE, "bias|-1", b.shape[3] = -1);
    LINEAR("y size", ATTN_ERR_SIZE, "y|-1", y.shape[0] = -1);
    LINEAR("2^62", ATTN_ERR_SIZE, "x", x.shape[0] = y.shape[0] = TWO(62));
    LINEAR("scratch", ATTN_ERR_SIZE, "scratch",
           (x.shape[3] = w.shape[3] = TWO(56), x.stride[3] = w.stride[3] = 0));
    LINEAR("w in", ATTN_ERR_SHAPE, "w|4|5", w.shape[3] = 4);
    LINEAR("w out", ATTN_ERR_SHAPE, "w|6|7", w.shape[2] = 6);
    LINEAR("other layout", ATTN_ERR_SHAPE, "w|7|5",
           layout = ATTN_WEIGHT_IN_OUT);
    LINEAR("two w", ATTN_ERR_SHAPE, "w|2|1", w.shape[0] = 2);
    LINEAR("bias", ATTN_ERR_SHAPE, "bias|5|7", b.shape[3] = 5);
    LINEAR("bias rows", ATTN_ERR_SHAPE, "bias|2|1", b.shape[2] = 2);
    LINEAR("y rows", ATTN_ERR_SHAPE, "y|x|3|4", y.shape[2] = 3);
    LINEAR("y batch", ATTN_ERR_SHAPE, "y|x|1|2", y.shape[0] = 1);
    LINEAR("x type", ATTN_ERR_TYPE, "x", x.dtype = ATTN_U8);
    LINEAR("w type", ATTN_ERR_TYPE, "w", w.dtype = ATTN_F64);
    LINEAR("bias type", ATTN_ERR_TYPE, "bias", b.dtype = ATTN_F64);
    LINEAR("y type", ATTN_ERR_TYPE, "y", y.dtype = 12);
    LINEAR("y stride 0", ATTN_ERR_STRIDE, "y", y.stride[3] = 0);
    LINEAR("w stride", ATTN_ERR_STRIDE, "w", w.stride[2] = INT64_MAX);
    LINEAR("x odd", ATTN_ERR_ALIGN, "x", shift(&x, 1));
    LINEAR("w odd", ATTN_ERR_ALIGN, "w", shift(&w, 1));
    LINEAR("bias odd", ATTN_ERR_ALIGN, "bias", shift(&b, 1));
    LINEAR("y odd", ATTN_ERR_ALIGN, "y", shift(&y, 1));
    LINEAR("y in x", ATTN_ERR_OVERLAP, "y|x", y.data = x.data);
    LINEAR("y in w", ATTN_ERR_OVERLAP, "y|w", y.data = w.data);
    LINEAR("y in bias", ATTN_ERR_OVERLAP, "y|bias", y.data = b.data);
    LINEAR("x reserved", ATTN_ERR_UNSUPPORTED, "x|reserved", x.reserved = 1);
    LINEAR("w reserved", ATTN_ERR_UNSUPPORTED, "w|reserved", w.reserved = 1);
    LINEAR("bias reserved", ATTN_ERR_UNSUPPORTED, "bias|reserved",
           b.reserved = 1);
    LINEAR("y reserved", ATTN_ERR_UNSUPPORTED, "y|reserved", y.reserved = 1);
#undef LINEAR
    finish();
}

/* ---- attn_mha, attn_mha_check, attn_mha_workspace, attn_mha_work ---- */

/* H = 4, Hkv = 2, D = 3, Dv = 2, Eq = 8, Ek = 6, Ev = 7, E = 9. */
struct mha {
    attn_mha_params p;
    attn_sdpa_params a;
    attn_tensor x_q, x_k, x_v, out;
    attn_tensor w_q, w_k, w_v, w_qkv, w_o, b_q, b_k, b_v, b_qkv, b_o;
    attn_tensor lse, weights, mean;
    attn_mask mask;
    int64_t *cu;
    const attn_mha_params *pp;
    const attn_tensor *px_q, *px_k, *px_v, *pout;
};

static void mha_base(struct mha *c)
{
    reset_arena();
    memset(c, 0, sizeof *c);
    attn_mha_params_init(&c->p);
    attn_sdpa_params_init(&c->a);
    c->x_q = take_view(ATTN_F32, B, 1, TQ, 8);
    c->x_k = take_view(ATTN_F32, B, 1, TK, 6);
    c->x_v = take_view(ATTN_F32, B, 1, TK, 7);
    c->out = take_view(ATTN_F32, B, 1, TQ, 9);
    c->w_q = take_view(ATTN_F32, 1, 1, 12, 8);
    c->w_k = take_view(ATTN_F32, 1, 1, 6, 6);
    c->w_v = take_view(ATTN_F32, 1, 1, 4, 7);
    c->w_qkv = take_view(ATTN_F32, 1, 1, 24, 8);
    c->w_o = take_view(ATTN_F32, 1, 1, 9, 8);
    c->b_q = take_view(ATTN_F32, 1, 1, 1, 12);
    c->b_k = take_view(ATTN_F32, 1, 1, 1, 6);
    c->b_v = take_view(ATTN_F32, 1, 1, 1, 4);
    c->b_qkv = take_view(ATTN_F32, 1, 1, 1, 24);
    c->b_o = take_view(ATTN_F32, 1, 1, 1, 9);
    c->lse = take_view(ATTN_F32, B, 4, TQ, 1);
    c->weights = take_view(ATTN_F32, B, 4, TQ, TK);
    c->mean = take_view(ATTN_F32, B, 1, TQ, TK);
    const attn_tensor *inputs[] = {
        &c->x_q, &c->x_k, &c->x_v, &c->w_q, &c->w_k,   &c->w_v, &c->w_qkv,
        &c->w_o, &c->b_q, &c->b_k, &c->b_v, &c->b_qkv, &c->b_o};
    for (size_t n = 0; n < COUNT(inputs); n++)
        kit_fill(inputs[n]);
    c->mask.kind = ATTN_MASK_DROP;
    c->mask.view = take_view(ATTN_U8, B, 1, 1, TK);
    kit_fill(&c->mask.view);
    c->cu = take_numbers(0, 1);
    c->p.weight_layout = ATTN_WEIGHT_OUT_IN;
    c->p.num_heads = 4;
    c->p.num_kv_heads = 2;
    c->p.w_q = &c->w_q;
    c->p.w_k = &c->w_k;
    c->p.w_v = &c->w_v;
    c->p.w_o = &c->w_o;
    c->p.b_q = &c->b_q;
    c->p.b_k = &c->b_k;
    c->p.b_v = &c->b_v;
    c->p.b_o = &c->b_o;
    c->p.attention = &c->a;
    c->pp = &c->p;
    c->px_q = &c->x_q;
    c->px_k = &c->x_k;
    c->px_v = &c->x_v;
    c->pout = &c->out;
}

static void use_mha_outputs(struct mha *c)
{
    c->a.lse = &c->lse;
    c->a.weights = &c->weights;
    c->a.weights_mean = &c->mean;
}

/* Self-attention with w_qkv: H = 4, Hkv = 2, D = Dv = 3. */
static void use_packed(struct mha *c)
{
    c->p.w_q = c->p.w_k = c->p.w_v = NULL;
    c->p.b_q = c->p.b_k = c->p.b_v = NULL;
    c->p.w_qkv = &c->w_qkv;
    c->p.b_qkv = &c->b_qkv;
    c->px_k = c->px_v = NULL;
    c->w_o = take_view(ATTN_F32, 1, 1, 9, 12);
    kit_fill(&c->w_o);
}

struct mha_case {
    const char *name;
    attn_status status;
    const char *words;
    void (*change)(struct mha *);
};

static struct mha_case mha_cases[128];
static size_t num_mha_cases;

#define MHA(name, status, words)                                          \
    static void mha_##name(struct mha *c);                                \
    static void __attribute__((constructor)) add_mha_##name(void)         \
    {                                                                     \
        const struct mha_case entry = {#name, status, words, mha_##name}; \
        mha_cases[num_mha_cases++] = entry;                               \
    }                                                                     \
    static void mha_##name(struct mha *c)

MHA(params_null, ATTN_ERR_NULL, "params|NULL")
{
    c->pp = NULL;
}
MHA(x_q_null, ATTN_ERR_NULL, "x_q|NULL")
{
    c->px_q = NULL;
}
MHA(out_null, ATTN_ERR_NULL, "out|NULL")
{
    c->pout = NULL;
}
MHA(x_q_data_null, ATTN_ERR_NULL, "x_q|data|NULL")
{
    c->x_q.data = NULL;
}
MHA(x_k_data_null, ATTN_ERR_NULL, "x_k|data|NULL")
{
    c->x_k.data = NULL;
}
MHA(x_v_data_null, ATTN_ERR_NULL, "x_v|data|NULL")
{
    c->x_v.data = NULL;
}
MHA(out_data_null, ATTN_ERR_NULL, "out|data|NULL")
{
    c->out.data = NULL;
}
MHA(w_q_null, ATTN_ERR_NULL, "w_q|NULL")
{
    c->p.w_q = NULL;
}
MHA(w_k_null, ATTN_ERR_NULL, "w_k|NULL")
{
    c->p.w_k = NULL;
}
MHA(w_v_null, ATTN_ERR_NULL, "w_v|NULL")
{
    c->p.w_v = NULL;
}
MHA(w_o_null, ATTN_ERR_NULL, "w_o|NULL")
{
    c->p.w_o = NULL;
}
MHA(w_q_data_null, ATTN_ERR_NULL, "w_q|data|NULL")
{
    c->w_q.data = NULL;
}
MHA(b_o_data_null, ATTN_ERR_NULL, "b_o|data|NULL")
{
    c->b_o.data = NULL;
}
MHA(no_input_weights, ATTN_ERR_NULL, "w_q|NULL")
{
    c->p.w_q = c->p.w_k = c->p.w_v = NULL;
}
MHA(masks_null, ATTN_ERR_NULL, "masks|NULL")
{
    c->a.num_masks = 1;
}
MHA(x_q_negative, ATTN_ERR_SIZE, "x_q|-1")
{
    c->x_q.shape[2] = -1;
}
MHA(x_k_negative, ATTN_ERR_SIZE, "x_k|-1")
{
    c->x_k.shape[3] = -1;
}
MHA(w_q_negative, ATTN_ERR_SIZE, "w_q|-1")
{
    c->w_q.shape[2] = -1;
}
MHA(num_heads_negative, ATTN_ERR_SIZE, "num_heads|-4")
{
    c->p.num_heads = -4;
}
MHA(num_kv_heads_negative, ATTN_ERR_SIZE, "num_kv_heads|-1")
{
    c->p.num_kv_heads = -1;
}
MHA(batch_2_to_62, ATTN_ERR_SIZE, "x_q|4611686018427387904")
{
    c->x_q.shape[0] = c->x_k.shape[0] = c->x_v.shape[0] = TWO(62);
    c->out.shape[0] = TWO(62);
    c->x_q.data = c->x_k.data = c->x_v.data = c->out.data = nowhere();
}
/* Q, K, V and the heads take 3/4 of 2^63 bytes each: too much together. */
MHA(scratch_beyond_memory, ATTN_ERR_SIZE, "scratch")
{
    c->x_k.shape[2] = c->x_v.shape[2] = TQ;
    c->x_q.shape[0] = c->x_k.shape[0] = c->x_v.shape[0] = TWO(10);
    c->x_q.stride[0] = c->x_k.stride[0] = c->x_v.stride[0] = 0;
    c->out.shape[0] = TWO(10);
    c->out.data = nowhere();
    c->p.num_heads = c->p.num_kv_heads = 1;
    c->w_q.shape[2] = c->w_k.shape[2] = TWO(49);
    c->w_v.shape[2] = c->w_o.shape[3] = TWO(49);
    c->w_q.stride[2] = c->w_k.stride[2] = 0;
    c->w_v.stride[2] = c->w_o.stride[3] = 0;
    c->p.b_q = c->p.b_k = c->p.b_v = NULL;
}
MHA(projection_beyond_int64, ATTN_ERR_SIZE, "projection")
{
    mha_scratch_beyond_memory(c);
    c->w_q.shape[2] = c->w_k.shape[2] = TWO(55);
}
MHA(x_k_batch, ATTN_ERR_SHAPE, "x_k|x_q|1|2")
{
    c->x_k.shape[0] = 1;
}
MHA(x_v_batch, ATTN_ERR_SHAPE, "x_v|1|2")
{
    c->x_v.shape[0] = 1;
}
MHA(x_v_len, ATTN_ERR_SHAPE, "x_v|x_k|4|5")
{
    c->x_v.shape[2] = 4;
}
MHA(x_q_heads, ATTN_ERR_SHAPE, "x_q|2|1|shape[1]")
{
    c->x_q.shape[1] = 2;
}
MHA(out_batch, ATTN_ERR_SHAPE, "out|1|2")
{
    c->out.shape[0] = 1;
}
MHA(out_len, ATTN_ERR_SHAPE, "out|2|3")
{
    c->out.shape[2] = 2;
}
MHA(out_width, ATTN_ERR_SHAPE, "w_o|out|9|8")
{
    c->out.shape[3] = 8;
}
MHA(heads_no_multiple, ATTN_ERR_SHAPE, "num_heads|num_kv_heads|4|3")
{
    c->p.num_kv_heads = 3;
}
MHA(w_q_rows, ATTN_ERR_SHAPE, "w_q|13|4")
{
    c->w_q.shape[2] = 13;
}
MHA(w_q_columns, ATTN_ERR_SHAPE, "w_q|7|8")
{
    c->w_q.shape[3] = 7;
}
MHA(w_k_rows, ATTN_ERR_SHAPE, "w_k|4|6")
{
    c->w_k.shape[2] = 4;
}
MHA(w_k_columns, ATTN_ERR_SHAPE, "w_k|5|6")
{
    c->w_k.shape[3] = 5;
}
MHA(w_v_rows, ATTN_ERR_SHAPE, "w_v|3|2")
{
    c->w_v.shape[2] = 3;
}
MHA(w_v_columns, ATTN_ERR_SHAPE, "w_v|6|7")
{
    c->w_v.shape[3] = 6;
}
MHA(w_o_columns, ATTN_ERR_SHAPE, "w_o|7|8")
{
    c->w_o.shape[3] = 7;
}
MHA(other_layout, ATTN_ERR_SHAPE, "params.w_")
{
    c->p.weight_layout = ATTN_WEIGHT_IN_OUT;
}
MHA(two_matrices, ATTN_ERR_SHAPE, "w_q|2|1")
{
    c->w_q.shape[0] = 2;
}
MHA(b_q_length, ATTN_ERR_SHAPE, "b_q|11|12")
{
    c->b_q.shape[3] = 11;
}
MHA(b_k_length, ATTN_ERR_SHAPE, "b_k|5|6")
{
    c->b_k.shape[3] = 5;
}
MHA(b_v_length, ATTN_ERR_SHAPE, "b_v|3|4")
{
    c->b_v.shape[3] = 3;
}
MHA(b_o_length, ATTN_ERR_SHAPE, "b_o|8|9")
{
    c->b_o.shape[3] = 8;
}
MHA(w_qkv_rows, ATTN_ERR_SHAPE, "w_qkv|23|8")
{
    use_packed(c);
    c->w_qkv.shape[2] = 23;
}
MHA(w_qkv_columns, ATTN_ERR_SHAPE, "w_qkv|7|8")
{
    use_packed(c);
    c->w_qkv.shape[3] = 7;
}
MHA(b_qkv_length, ATTN_ERR_SHAPE, "b_qkv|23|24")
{
    use_packed(c);
    c->b_qkv.shape[3] = 23;
}
MHA(w_qkv_other_keys, ATTN_ERR_SHAPE, "w_qkv|6|8")
{
    use_packed(c);
    c->px_k = &c->x_k;
}
MHA(self_attention_w_k, ATTN_ERR_SHAPE, "w_k|6|8")
{
    c->px_k = c->px_v = NULL;
}
MHA(one_source_w_v, ATTN_ERR_SHAPE, "w_v|7|6")
{
    c->px_v = NULL;
}
MHA(lse_heads, ATTN_ERR_SHAPE, "lse|2|4")
{
    use_mha_outputs(c);
    c->lse.shape[1] = 2;
}
MHA(weights_keys, ATTN_ERR_SHAPE, "weights|4|5")
{
    use_mha_outputs(c);
    c->weights.shape[3] = 4;
}
MHA(mask_keys, ATTN_ERR_SHAPE, "mask|3|5")
{
    c->a.masks = &c->mask;
    c->a.num_masks = 1;
    c->mask.view.shape[3] = 3;
}
MHA(x_q_type, ATTN_ERR_TYPE, "x_q|3")
{
    c->x_q.dtype = ATTN_U8;
}
MHA(x_k_type, ATTN_ERR_TYPE, "x_k")
{
    c->x_k.dtype = ATTN_F64;
}
MHA(w_o_type, ATTN_ERR_TYPE, "w_o")
{
    c->w_o.dtype = ATTN_F64;
}
MHA(b_k_type, ATTN_ERR_TYPE, "b_k")
{
    c->b_k.dtype = 0;
}
MHA(out_type, ATTN_ERR_TYPE, "out")
{
    c->out.dtype = ATTN_F64;
}
MHA(layout_0, ATTN_ERR_VALUE, "weight_layout|0")
{
    c->p.weight_layout = 0;
}
MHA(layout_3, ATTN_ERR_VALUE, "weight_layout|3")
{
    c->p.weight_layout = 3;
}
MHA(both_kinds_of_weights, ATTN_ERR_VALUE, "w_qkv|w_q")
{
    c->p.w_qkv = &c->w_qkv;
}
MHA(packed_and_w_v, ATTN_ERR_VALUE, "w_qkv|w_v")
{
    use_packed(c);
    c->p.w_v = &c->w_v;
}
MHA(packed_bias_and_b_q, ATTN_ERR_VALUE, "b_qkv|b_q")
{
    use_packed(c);
    c->p.b_q = &c->b_q;
}
MHA(packed_bias_and_b_k, ATTN_ERR_VALUE, "b_qkv|b_k")
{
    c->p.b_q = c->p.b_v = NULL;
    c->p.b_qkv = &c->b_qkv;
}
MHA(packed_bias_and_b_v, ATTN_ERR_VALUE, "b_qkv|b_v")
{
    c->p.b_q = c->p.b_k = NULL;
    c->p.b_qkv = &c->b_qkv;
}
MHA(causal_without_align, ATTN_ERR_VALUE, "align")
{
    c->a.causal = 1;
}
MHA(scale_nan, ATTN_ERR_VALUE, "scale|nan")
{
    c->a.flags = ATTN_SDPA_SCALE;
    c->a.scale = (double)NAN;
}
MHA(struct_size, ATTN_ERR_STRUCT, "struct_size|119")
{
    c->p.struct_size = 119;
}
MHA(attention_struct_size, ATTN_ERR_STRUCT, "attention|struct_size|8")
{
    c->a.struct_size = 8;
}
MHA(reserved, ATTN_ERR_UNSUPPORTED, "reserved|1")
{
    c->p.reserved = 1;
}
MHA(x_q_reserved, ATTN_ERR_UNSUPPORTED, "x_q|reserved|2")
{
    c->x_q.reserved = 2;
}
MHA(w_k_reserved, ATTN_ERR_UNSUPPORTED, "w_k|reserved|2")
{
    c->w_k.reserved = 2;
}
MHA(b_v_reserved, ATTN_ERR_UNSUPPORTED, "b_v|reserved|2")
{
    c->b_v.reserved = 2;
}
MHA(out_reserved, ATTN_ERR_UNSUPPORTED, "out|reserved|2")
{
    c->out.reserved = 2;
}
MHA(ragged, ATTN_ERR_UNSUPPORTED, "cu_q")
{
    c->a.cu_q = c->a.cu_k = c->cu;
    c->a.num_seqs = 2;
}
MHA(pages, ATTN_ERR_UNSUPPORTED, "params.attention|page_table")
{
    static const int32_t table[2];
    c->a.page_table = table;
    c->a.pages_per_seq = 1;
    c->a.kv_lens = c->cu;
}
MHA(pages_per_seq, ATTN_ERR_UNSUPPORTED, "params.attention|pages_per_seq")
{
    c->a.pages_per_seq = 1;
}
MHA(ring, ATTN_ERR_UNSUPPORTED, "params.attention|ring_starts")
{
    c->a.ring_starts = c->cu;
}
MHA(x_k_in_16_bits, ATTN_ERR_TYPE, "x_k|F16")
{
    c->x_k.dtype = ATTN_F16;
}
MHA(w_v_in_16_bits, ATTN_ERR_TYPE, "w_v|BF16")
{
    c->w_v.dtype = ATTN_BF16;
}
MHA(softcap, ATTN_ERR_VALUE, "softcap|-1")
{
    c->a.softcap = -1.0;
}
MHA(out_stride_0, ATTN_ERR_STRIDE, "out")
{
    c->out.stride[0] = 0;
}
MHA(x_q_stride, ATTN_ERR_STRIDE, "x_q")
{
    c->x_q.stride[0] = INT64_MAX;
}
MHA(w_o_stride, ATTN_ERR_STRIDE, "w_o")
{
    c->w_o.stride[2] = INT64_MIN;
}
MHA(x_q_odd, ATTN_ERR_ALIGN, "x_q")
{
    shift(&c->x_q, 1);
}
MHA(w_v_odd, ATTN_ERR_ALIGN, "w_v")
{
    shift(&c->w_v, 1);
}
MHA(b_o_odd, ATTN_ERR_ALIGN, "b_o")
{
    shift(&c->b_o, 1);
}
MHA(out_odd, ATTN_ERR_ALIGN, "out")
{
    shift(&c->out, 2);
}
MHA(out_is_x_q, ATTN_ERR_OVERLAP, "out|x_q")
{
    c->out.data = c->x_q.data;
}
MHA(out_in_x_v, ATTN_ERR_OVERLAP, "out|x_v")
{
    c->out.data = c->x_v.data;
}
MHA(out_in_w_q, ATTN_ERR_OVERLAP, "out|shares memory")
{
    c->out.data = c->w_q.data;
}
MHA(out_in_w_o, ATTN_ERR_OVERLAP, "out|w_o")
{
    c->out.data = c->w_o.data;
}
MHA(out_in_b_o, ATTN_ERR_OVERLAP, "out|b_o")
{
    c->out.data = c->b_o.data;
}
MHA(lse_in_out, ATTN_ERR_OVERLAP, "lse|out")
{
    use_mha_outputs(c);
    c->lse.data = c->out.data;
}
MHA(weights_in_x_q, ATTN_ERR_OVERLAP, "weights|x_q")
{
    use_mha_outputs(c);
    c->weights.data = c->x_q.data;
}
MHA(weights_in_w_o, ATTN_ERR_OVERLAP, "weights|w_o")
{
    use_mha_outputs(c);
    c->weights.data = c->w_o.data;
}

static void run_mha_case(const struct mha_case *t)
{
    struct mha c;
    size_t bytes = 12345;
    size_t alignment = 54321;
    mha_base(&c);
    t->change(&c);
    remember();
    judge(t->name, "attn_mha",
          attn_mha(NULL, c.pp, c.px_q, c.px_k, c.px_v, c.pout), t->status,
          t->words);
    judge(t->name, "attn_mha_check",
          attn_mha_check(NULL, c.pp, c.px_q, c.px_k, c.px_v, c.pout), t->status,
          t->words);
    judge(t->name, "attn_mha_workspace",
          attn_mha_workspace(NULL, c.pp, c.px_q, c.px_k, c.px_v, c.pout, &bytes,
                             &alignment),
          t->status, t->words);
    if (bytes != 12345 || alignment != 54321)
        complain("%s: attn_mha_workspace wrote its results\n", t->name);
    judge(t->name, "attn_mha_work",
          attn_mha_work(NULL, c.pp, c.px_q, c.px_k, c.px_v, c.pout, scratch,
                        sizeof scratch),
          t->status, t->words);
}

static void test_mha__every_refusal(void **state)
{
    (void)state;
    assert_true(num_mha_cases > 50);
    for (size_t n = 0; n < num_mha_cases; n++)
        run_mha_case(&mha_cases[n]);
    finish();
}

static void accept_mha(const char *what, const struct mha *c)
{
    const attn_status met =
        attn_mha(NULL, c->pp, c->px_q, c->px_k, c->px_v, c->pout);
    if (met != ATTN_OK)
        complain("%s: refused, %s\n", what, attn_last_error());
    if (attn_mha_check(NULL, c->pp, c->px_q, c->px_k, c->px_v, c->pout) != met)
        complain("%s: attn_mha_check disagrees\n", what);
}

static void test_mha__the_base_problems_are_accepted(void **state)
{
    (void)state;
    struct mha c;
    mha_base(&c);
    accept_mha("base", &c);
    use_mha_outputs(&c);
    accept_mha("outputs", &c);
    c.a.masks = &c.mask;
    c.a.num_masks = 1;
    accept_mha("mask", &c);
    c.p.attention = NULL;
    accept_mha("attention NULL", &c);
    c.p.b_q = c.p.b_k = c.p.b_v = c.p.b_o = NULL;
    accept_mha("no bias", &c);
    mha_base(&c);
    use_packed(&c);
    accept_mha("packed", &c);
    c.p.b_qkv = NULL;
    accept_mha("packed, no bias", &c);
    finish();
}

static void test_mha_work__scratch_memory_must_fit(void **state)
{
    (void)state;
    const char *call = "attn_mha_work";
    struct mha c;
    size_t bytes = 0;
    size_t alignment = 0;
    mha_base(&c);
    remember();
    if (attn_mha_workspace(NULL, &c.p, &c.x_q, &c.x_k, &c.x_v, &c.out, &bytes,
                           &alignment) != ATTN_OK)
        complain("attn_mha_workspace: %s\n", attn_last_error());
    if (bytes == 0 || alignment == 0 || (alignment & (alignment - 1)) != 0)
        complain("%zu bytes at %zu\n", bytes, alignment);
#define WORK(what, status, words, ...)                              \
    judge(what, call,                                               \
          attn_mha_work(NULL, &c.p, &c.x_q, &c.x_k, &c.x_v, &c.out, \
                        __VA_ARGS__),                               \
          status, words)
    WORK("one byte less", ATTN_ERR_WORKSPACE, "work", scratch, bytes - 1);
    WORK("no bytes", ATTN_ERR_WORKSPACE, "work|0", scratch, 0);
    WORK("misaligned", ATTN_ERR_WORKSPACE, "work", scratch + alignment / 2,
         sizeof scratch - alignment / 2);
    WORK("NULL", ATTN_ERR_NULL, "work|NULL", NULL, bytes);
#undef WORK
    judge("bytes NULL", "attn_mha_workspace",
          attn_mha_workspace(NULL, &c.p, &c.x_q, &c.x_k, &c.x_v, &c.out, NULL,
                             &alignment),
          ATTN_ERR_NULL, "bytes");
    judge("alignment NULL", "attn_mha_workspace",
          attn_mha_workspace(NULL, &c.p, &c.x_q, &c.x_k, &c.x_v, &c.out, &bytes,
                             NULL),
          ATTN_ERR_NULL, "alignment");
    if (attn_mha_work(NULL, &c.p, &c.x_q, &c.x_k, &c.x_v, &c.out, scratch,
                      bytes) != ATTN_OK)
        complain("exactly enough is refused: %s\n", attn_last_error());
    finish();
}

/* The calls that allocate, where nothing can be had. */
static void test_no_memory__is_a_status(void **state)
{
    (void)state;
    attn_context *poor = make_poor_context();
    struct sdpa c;
    sdpa_base(&c);
    remember();
    judge("no memory", "attn_sdpa",
          attn_sdpa(poor, &c.p, &c.q, &c.k, &c.v, &c.out), ATTN_ERR_NOMEM,
          "bytes");
    struct backward g;
    backward_base(&g);
    remember();
    judge("no memory", "attn_sdpa_backward",
          attn_sdpa_backward(poor, &g.s.p, &g.s.q, &g.s.k, &g.s.v, &g.s.out,
                             &g.d_out, &g.g),
          ATTN_ERR_NOMEM, "bytes");
    struct mha m;
    mha_base(&m);
    remember();
    judge("no memory", "attn_mha",
          attn_mha(poor, &m.p, &m.x_q, &m.x_k, &m.x_v, &m.out), ATTN_ERR_NOMEM,
          "bytes");
    attn_context_destroy(poor);
    finish();
}

/* ---- texts ---- */

static void test_strerror__every_status_has_its_own_text(void **state)
{
    (void)state;
    for (attn_status a = ATTN_ERR_FULL; a <= ATTN_OK; a++) {
        assert_non_null(attn_strerror(a));
        assert_true(strlen(attn_strerror(a)) > 3);
        for (attn_status b = ATTN_ERR_FULL; b < a; b++)
            assert_string_not_equal(attn_strerror(a), attn_strerror(b));
    }
    finish();
}

static void test_strerror__unknown_statuses_have_a_text(void **state)
{
    (void)state;
    static const attn_status unknown[] = {1, -15, 1000, INT32_MIN, INT32_MAX};
    for (size_t n = 0; n < COUNT(unknown); n++) {
        const char *text = attn_strerror(unknown[n]);
        assert_non_null(text);
        assert_non_null(strstr(text, "unknown"));
    }
    finish();
}

static void test_last_error__success_leaves_it(void **state)
{
    (void)state;
    char sentence[512];
    attn_tensor v;
    float x[2] = {0};
    assert_int_equal(attn_view_vector(&v, ATTN_F32, x, -2), ATTN_ERR_SIZE);
    snprintf(sentence, sizeof sentence, "%s", attn_last_error());
    assert_int_equal(attn_view_vector(&v, ATTN_F32, x, 2), ATTN_OK);
    assert_string_equal(attn_last_error(), sentence);
    finish();
}

static void test_version__of_library_and_header_agree(void **state)
{
    (void)state;
    char text[64];
    snprintf(text, sizeof text, "%d.%d.%d", ATTN_VERSION_MAJOR,
             ATTN_VERSION_MINOR, ATTN_VERSION_PATCH);
    assert_string_equal(attn_version(), text);
    assert_int_equal(attn_version_number(), ATTN_VERSION_NUMBER);
    assert_non_null(strstr(attn_build_info(), text));
    assert_non_null(attn_blas_info());
    assert_true(strlen(attn_blas_info()) > 0);
    assert_null(strchr(attn_build_info(), '\n'));
    assert_null(strchr(attn_blas_info(), '\n'));
    finish();
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, end)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_sdpa__every_refusal),
        TEST(test_sdpa__outputs_on_arrays_of_lengths_are_refused),
        TEST(test_sdpa__outputs_on_later_arrays_are_refused),
        TEST(test_sdpa__the_base_problems_are_accepted),
        TEST(test_sdpa__the_later_fields_are_accepted),
        TEST(test_sdpa__slopes_and_sinks_have_two_shapes),
        TEST(test_sdpa__pages_that_are_not_needed_may_be_anything),
        TEST(test_sdpa__positions_alone_need_no_align),
        TEST(test_sdpa__equal_lengths_need_no_align),
        TEST(test_sdpa__out_may_be_q),
        TEST(test_sdpa__interleaved_slots_do_not_overlap),
        TEST(test_sdpa__outputs_take_any_one_to_one_strides),
        TEST(test_sdpa__inputs_take_any_strides),
        TEST(test_sdpa__the_most_keys),
        TEST(test_sdpa__pages_without_columns_need_no_data),
        TEST(test_sdpa__strides_of_size_1_are_ignored),
        TEST(test_sdpa__one_element_with_any_strides),
        TEST(test_sdpa__empty_tensors_need_no_data),
        TEST(test_sdpa_work__scratch_memory_must_fit),
        TEST(test_sdpa_work__scratch_memory_must_be_its_own),
        TEST(test_sdpa_workspace__results_are_needed),
        TEST(test_sdpa_backward__every_refusal),
        TEST(test_sdpa_backward__every_tensor_is_checked),
        TEST(test_sdpa_backward__gradients_have_memory_of_their_own),
        TEST(test_sdpa_backward__refuses_what_the_forward_call_does),
        TEST(test_sdpa_backward__the_base_problems_are_accepted),
        TEST(test_sdpa_backward__every_gradient_is_optional),
        TEST(test_sdpa_backward__masks_of_all_kinds),
        TEST(test_sdpa_backward__memory_that_is_accepted),
        TEST(test_sdpa_backward__out_and_lse_are_inputs),
        TEST(test_sdpa_backward_work__scratch_memory_must_fit),
        TEST(test_sdpa_backward_work__scratch_memory_must_be_its_own),
        TEST(test_sdpa_backward_workspace__results_are_needed),
        TEST(test_context_create__every_refusal),
        TEST(test_context_create__what_is_accepted),
        TEST(test_sdpa_f32__every_refusal),
        TEST(test_sdpa_f64__every_refusal),
        TEST(test_softmax__every_refusal),
        TEST(test_weights_check__every_refusal),
        TEST(test_mask_init__every_refusal),
        TEST(test_mask_builders__every_refusal),
        TEST(test_mask_apply__every_refusal),
        TEST(test_heads__every_refusal),
        TEST(test_linear__every_refusal),
        TEST(test_mha__every_refusal),
        TEST(test_mha__the_base_problems_are_accepted),
        TEST(test_mha_work__scratch_memory_must_fit),
        TEST(test_no_memory__is_a_status),
        TEST(test_strerror__every_status_has_its_own_text),
        TEST(test_strerror__unknown_statuses_have_a_text),
        TEST(test_last_error__success_leaves_it),
        TEST(test_version__of_library_and_header_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
