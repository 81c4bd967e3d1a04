/*
 * train.h - a call of attn_sdpa and of attn_sdpa_backward behind it, as a loop
 * that trains has them: inputs drawn from a seed, the outputs of the one and
 * the gradients of the other. What acts on the scores is added piece by piece,
 * each with its gradient; everything else is set in params by the test.
 */
#ifndef TESTS_TRAIN_H
#define TESTS_TRAIN_H

#include <stdbool.h>

#include "attn.h"
#include "rng.h"
#include "tensors.h"

typedef struct train_sizes {
    int64_t B, Hq, Hkv, Tq, Tk, D, Dv;
} train_sizes;

enum {
    TRAIN_D_Q,
    TRAIN_D_K,
    TRAIN_D_V,
    TRAIN_D_ALIBI,
    TRAIN_D_SINKS,
    TRAIN_D_SCALE,
    TRAIN_D_MASK, /* of mask 0; those of the others follow */
    TRAIN_GRADIENTS = TRAIN_D_MASK + ATTN_MAX_MASKS
};

/* "d_q" and so on. */
extern const char *const train_names[TRAIN_GRADIENTS];
/* The ATTN_SDPA_ADD_* of each. */
extern const int32_t train_flags[TRAIN_GRADIENTS];

/* Points into itself: not to be copied or moved. */
typedef struct training {
    rng r;
    attn_sdpa_params p;
    attn_sdpa_gradients g;
    tensor q, k, v, out, lse, d_out, d_lse, alibi, sinks;
    tensor mask_memory[ATTN_MAX_MASKS];
    attn_mask masks[ATTN_MAX_MASKS];
    const attn_tensor *d_masks[ATTN_MAX_MASKS];
    tensor d[TRAIN_GRADIENTS]; /* block is NULL where there is none */
} training;

/* Contiguous, with d_q, d_k, d_v and d_scale asked for. */
void train_make(training *t, uint64_t seed, attn_dtype dtype,
                const train_sizes *s);
void train_free(training *t);

/* The loss depends on lse too. */
void train_use_lse(training *t);
/* One more ADD mask of these sizes, a fifth of it -inf, with its gradient. */
void train_use_mask(training *t, int64_t b, int64_t h, int64_t i, int64_t j);
/* One more KEEP mask, about two thirds of it true, which has no gradient. */
void train_use_keep(training *t, int64_t b, int64_t h, int64_t i, int64_t j);
/* Slopes and sinks with their gradients: vectors if batch is 0. align is the
 * test's to set. */
void train_use_alibi(training *t, int64_t batch);
void train_use_sinks(training *t, int64_t batch);

/* The gradient is written to view, or not asked for if that is NULL. */
void train_ask(training *t, int gradient, const attn_tensor *view);
/* All gradients hold the pattern again. */
void train_reset(training *t);

/* Fail the running test, with `what`, unless they succeed. */
void train_forward(training *t, const attn_context *context, const char *what);
void train_backward(training *t, const attn_context *context, const char *what);

/* Whether all gradients that both have are the same bits. */
bool train_same(const training *a, const training *b, const char *what);

#endif
