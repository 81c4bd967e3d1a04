/*
 * Random but replayable calls of attn_sdpa over the whole option space: the
 * same seed and index give the same call on every machine.
 */
#ifndef TESTS_DRAW_H
#define TESTS_DRAW_H

#include "tensors.h"

/* More sequences than any drawn call has. */
#define DRAW_MAX_SEQS 6

/* Classes of values. */
enum {
    DRAW_NORMAL,
    DRAW_LARGE, /* scores of hundreds: exp overflows unless max is taken */
    DRAW_TINY,  /* products of q and k underflow in float */
    DRAW_HIDDEN_POISON, /* NaN and inf at keys and rows that nothing sees */
    DRAW_VISIBLE_POISON /* NaN and inf in places that may be seen */
};

typedef struct drawn {
    uint64_t seed, index;
    attn_sdpa_params params;
    tensor q, k, v, out; /* blocks NULL: alias of another */
    tensor lse, weights, weights_mean, scores_raw, scores_capped, scores;
    tensor key_sums, max_weight, effective_keys, entropy;
    tensor alibi, sinks, blocks;
    int64_t sequences; /* of the batch, or of a ragged one */
    int shares_kv;     /* v is k's view */
    int in_place;      /* out is q's view */
    int threads;       /* 0: no context */
    int use_work;      /* attn_sdpa_work in place of attn_sdpa */
    int values;        /* class of the inputs' values */
    double factor;     /* of q's and k's numbers */
    attn_mask masks[ATTN_MAX_MASKS];
    tensor mask_memory[ATTN_MAX_MASKS];
    int64_t q_offsets[DRAW_MAX_SEQS], prefix_lens[DRAW_MAX_SEQS];
    int64_t q_lens[DRAW_MAX_SEQS], kv_lens[DRAW_MAX_SEQS];
    int64_t cu_q[DRAW_MAX_SEQS + 1], cu_k[DRAW_MAX_SEQS + 1];
    int64_t kv_starts[DRAW_MAX_SEQS], kv_offsets[DRAW_MAX_SEQS];
    int64_t ring_starts[DRAW_MAX_SEQS];
    int32_t *q_segments, *kv_segments, *page_table; /* from malloc, or NULL */
    int64_t num_q_segments, num_kv_segments;
} drawn;

#define DRAW_MAX_THREADS 3

/* A number that the environment may set: seed, first call, how many. */
uint64_t draw_setting(const char *name, uint64_t otherwise);

/* A context of so many threads, made at first need; NULL for 0. */
const attn_context *draw_context(int threads);
/* The teardown of a group of tests that used them. */
int draw_drop_contexts(void **state);

void draw_call(drawn *d, uint64_t seed, uint64_t index);
/* One with more queries and keys than are computed at a time, but narrow. */
void draw_large_call(drawn *d, uint64_t seed, uint64_t index);
void draw_free(drawn *d);

/* The whole configuration on one line. */
void draw_describe(const drawn *d, char *text, size_t size);

#endif
