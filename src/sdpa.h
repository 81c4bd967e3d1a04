/* Scaled dot-product attention for other modules: check, measure, run. */
#ifndef ATTN_SDPA_H
#define ATTN_SDPA_H

#include "context.h"
#include "gemm.h"
#include "mask.h"

/* A problem that has passed all checks, in the terms of the engine. */
typedef struct attn__sdpa {
    attn_tensor q, k, v, out;
    attn_tensor lse, weights, weights_mean; /* data NULL: not wanted */
    bool wants_lse, wants_weights, wants_mean;
    int64_t batch;                  /* sequences */
    int64_t heads, kv_heads, group; /* Hq, Hkv, G */
    int64_t q_len, kv_len;          /* of the longest sequence */
    int64_t width, v_width;         /* D, Dv */
    double scale;
    attn__visibility visibility;
    int32_t align;
    bool blas_only;
    int64_t q_offset;
    const int64_t *q_offsets, *prefix_lens, *q_lens, *kv_lens, *cu_q, *cu_k;
    attn__blas blas;
    attn__tile tile;
    int32_t threads;
    const attn_mask *masks; /* the caller's, visibility.num_masks of them */
} attn__sdpa;

attn_status attn__sdpa_prepare(const char *call, const attn_context *context,
                               const attn_sdpa_params *params,
                               const attn_tensor *q, const attn_tensor *k,
                               const attn_tensor *v, const attn_tensor *out,
                               attn__sdpa *p);

/* A tensor of a call with its name; t NULL: not there. */
typedef struct attn__output {
    const char *name;
    const attn_tensor *t;
} attn__output;

/* Initialisers of the four outputs; out is that of the call. */
#define ATTN__SDPA_OUTPUTS(p, out)                                         \
    {"out", out}, {"params.lse", (p)->wants_lse ? &(p)->lse : NULL},       \
        {"params.weights", (p)->wants_weights ? &(p)->weights : NULL},     \
    {                                                                      \
        "params.weights_mean", (p)->wants_mean ? &(p)->weights_mean : NULL \
    }

/* Overlap of the outputs with masks, lengths and each other: the part of the
 * check that needs real addresses. with_inputs: with q, k and v too. */
attn_status attn__sdpa_check_overlaps(const char *call, const attn__sdpa *p,
                                      const attn_tensor *out, bool with_inputs);

/* Scratch memory of this problem and of all that are nowhere larger; SIZE_MAX
 * if that cannot be represented. */
size_t attn__sdpa_bytes(const attn__sdpa *p);

/* work: attn__sdpa_bytes(p), aligned. */
void attn__sdpa_run(const attn__executor *executor, const attn__sdpa *p,
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
