/* Scaled dot-product attention for other modules: check, measure, run. */
#ifndef ATTN_SDPA_H
#define ATTN_SDPA_H

#include "context.h"
#include "gemm.h"
#include "mask.h"

/* Bytes of the first version of the parameters, which ended before softcap. */
#define ATTN__SDPA_PARAMS_FIRST offsetof(attn_sdpa_params, softcap)

/* The outputs that are there on request. */
typedef enum attn__extra {
    ATTN__LSE,
    ATTN__WEIGHTS,
    ATTN__WEIGHTS_MEAN,
    ATTN__SCORES_RAW,
    ATTN__SCORES_CAPPED,
    ATTN__SCORES,
    ATTN__KEY_SUMS,
    ATTN__MAX_WEIGHT,
    ATTN__EFFECTIVE_KEYS,
    ATTN__ENTROPY,
    ATTN__EXTRAS
} attn__extra;

/* Numbers per head, perhaps of each sequence too: slopes, sinks. data NULL: not
 * there. */
typedef struct attn__per_head {
    const void *data;
    int64_t b_stride, h_stride;
} attn__per_head;

/* A problem that has passed all checks, in the terms of the engine. */
typedef struct attn__sdpa {
    attn_tensor q, k, v, out;
    attn_tensor extra[ATTN__EXTRAS];
    bool wants[ATTN__EXTRAS];
    int64_t batch;                  /* sequences */
    int64_t heads, kv_heads, group; /* Hq, Hkv, G */
    int64_t q_len, kv_len;          /* of the longest sequence */
    int64_t width, v_width;         /* D, Dv */
    double scale;
    double softcap; /* 0: none */
    attn__per_head alibi, sinks;
    attn__visibility visibility;
    int32_t align;
    bool blas_only;
    int64_t q_offset;
    const int64_t *q_offsets, *prefix_lens, *q_lens, *kv_lens, *cu_q, *cu_k;
    const int64_t *kv_starts, *kv_offsets, *ring_starts;
    const int32_t *q_segments, *kv_segments;
    const int32_t *page_table; /* NULL: k and v are no pools */
    int64_t pages_per_seq, page_rows;
    /* [B]: which of the batch of k and v a sequence has, where a cache holds
     * more or has them in another order; NULL: the one of its own number. */
    const int64_t *kv_seqs;
    attn__blas blas;
    attn__tile tile;
    int64_t most_keys; /* of a tile for any width */
    int32_t threads;
    /* The caller's, for the sentences about overlap. */
    const attn_mask *masks; /* visibility.num_masks of them */
    const attn_tensor *slopes, *sink_logits, *block_map;
} attn__sdpa;

/* Of these a row's maximum and sum are kept until all is done. */
static inline bool attn__wants_stats(const attn__sdpa *p)
{
    return p->wants[ATTN__WEIGHTS] || p->wants[ATTN__WEIGHTS_MEAN] ||
           p->wants[ATTN__KEY_SUMS];
}

static inline bool attn__wants_scores(const attn__sdpa *p)
{
    return p->wants[ATTN__SCORES_RAW] || p->wants[ATTN__SCORES_CAPPED] ||
           p->wants[ATTN__SCORES];
}

static inline bool attn__wants_moments(const attn__sdpa *p)
{
    return p->wants[ATTN__MAX_WEIGHT] || p->wants[ATTN__EFFECTIVE_KEYS] ||
           p->wants[ATTN__ENTROPY];
}

/* A copy, with strides that can be multiplied: those of a size of 1, and of a
 * tensor without elements, have not been checked, and may be anything. */
attn_tensor attn__usable(const attn_tensor *t);

/* backward: out and lse are inputs. */
attn_status attn__sdpa_prepare(const char *call, const attn_context *context,
                               const attn_sdpa_params *params,
                               const attn_tensor *q, const attn_tensor *k,
                               const attn_tensor *v, const attn_tensor *out,
                               bool backward, attn__sdpa *p);

/* A tensor of a call with its name. */
typedef struct attn__output {
    const char *name;
    const attn_tensor *t;
} attn__output;

/* The outputs of a call, `out` first; returns how many. */
int attn__sdpa_outputs(const attn__sdpa *p, const attn_tensor *out,
                       attn__output outputs[ATTN__EXTRAS + 1]);

/* Overlap of the outputs with masks, lengths and each other: the part of the
 * check that needs real addresses. with_inputs: with q, k and v too. */
attn_status attn__sdpa_check_overlaps(const char *call, const attn__sdpa *p,
                                      const attn_tensor *out, bool with_inputs);

/* One output against the masks and the arrays of the parameters. */
attn_status attn__check_against_options(const char *call, const char *name,
                                        const attn_tensor *t,
                                        const attn__sdpa *p);

/* Scratch memory of this problem and of all that are nowhere larger; SIZE_MAX
 * if that cannot be represented. */
size_t attn__sdpa_bytes(const attn__sdpa *p);

/* The failure for SIZE_MAX bytes of scratch memory. */
attn_status attn__fail_bytes(const char *call);

/* work: attn__sdpa_bytes(p), aligned. */
void attn__sdpa_run(const attn__executor *executor, const attn__sdpa *p,
                    void *work);

/* What the backward call may be asked for. */
typedef enum attn__gradient {
    ATTN__D_Q,
    ATTN__D_K,
    ATTN__D_V,
    ATTN__D_ALIBI,
    ATTN__D_SINKS,
    ATTN__D_SCALE,
    ATTN__D_MASKS, /* and one for each further mask */
    ATTN__GRADIENTS = ATTN__D_MASKS + ATTN_MAX_MASKS
} attn__gradient;

/* A backward problem that has passed all checks: that of the forward call,
 * whose out and extra[ATTN__LSE] are inputs here. */
typedef struct attn__backward {
    attn__sdpa p;
    attn_tensor d_out, d_lse;
    bool has_d_lse;
    attn_tensor gradient[ATTN__GRADIENTS];
    bool wants[ATTN__GRADIENTS], adds[ATTN__GRADIENTS];
} attn__backward;

attn_status
attn__backward_prepare(const char *call, const attn_context *context,
                       const attn_sdpa_params *params, const attn_tensor *q,
                       const attn_tensor *k, const attn_tensor *v,
                       const attn_tensor *out, const attn_tensor *d_out,
                       const attn_sdpa_gradients *gradients, attn__backward *g);
/* "gradients.d_q" and so on. */
const char *attn__gradient_name(int a);
size_t attn__backward_bytes(const attn__backward *g);
void attn__backward_run(const attn__executor *executor, const attn__backward *g,
                        void *work);

/* Sequence b: its rules, and the rows where it starts in q and out, k and v. */
attn__sequence attn__sdpa_sequence(const attn__sdpa *p, int64_t b,
                                   int64_t *q_row, int64_t *kv_row);

/* The caller's scratch memory: there, large enough, aligned, and apart from
 * the outputs; `out` is that of the call. */
attn_status attn__check_work(const char *call, const attn__sdpa *p,
                             const attn_tensor *out, const void *work,
                             size_t work_bytes, size_t needed);

#endif
