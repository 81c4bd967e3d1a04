/*
 * Who sees what. A visibility is all rules of a call; for a block of queries
 * (lanes) it gives the range of keys worth computing, and for a tile of scores
 * one bit per key and lane. Rules without memory (causal, window, chunk,
 * prefix, lengths) are intervals and never materialised; segments and blocks
 * narrow the range, and what they hide inside it are bits, as with masks.
 */
#ifndef ATTN_MASK_H
#define ATTN_MASK_H

#include "kernels/kernels.h"

typedef struct attn__mask_view {
    const unsigned char *data;
    int64_t stride[4]; /* in bytes; 0 where the mask is broadcast */
    int32_t kind;
} attn__mask_view;

/* Blocks of block_q x block_k scores: a byte each, 0 = hidden. */
typedef struct attn__block_map {
    const unsigned char *data;
    int64_t stride[4];        /* in bytes; 0 where the map is broadcast */
    int64_t block_q, block_k; /* 0: no map */
} attn__block_map;

typedef struct attn__visibility {
    bool causal;
    bool window;
    int64_t left; /* -1: unbounded */
    int64_t right;
    int64_t keep_first;
    int64_t chunk; /* 0: none */
    int32_t num_masks;
    attn__mask_view masks[ATTN_MAX_MASKS];
    int32_t num_add; /* how many of the masks are ADD */
    bool segments;
    attn__block_map blocks;
} attn__visibility;

/* Are there rules that hide single keys inside a range? */
static inline bool attn__has_elements(const attn__visibility *v)
{
    return v->num_masks > 0 || v->segments || v->blocks.block_k > 0;
}

/* One sequence of a batch, in the terms of the rules. */
typedef struct attn__sequence {
    int64_t b; /* its index, for masks */
    int64_t q_len;
    int64_t kv_begin; /* keys are [kv_begin, kv_len) */
    int64_t kv_len;
    int64_t offset; /* of query 0, from key 0 */
    int64_t origin; /* where key 0 stands; the rules without memory need it */
    int64_t prefix; /* keys below it are exempt from causal */
    const int32_t *q_segments, *kv_segments; /* at row 0; NULL: none */
} attn__sequence;

/* The visible keys of one query: [low, high) and [keep_low, keep_high), which
 * may overlap; either may be empty (low = high). */
typedef struct attn__range {
    int64_t low, high;
    int64_t keep_low, keep_high;
} attn__range;

/* The queries of a block, with their ranges. */
typedef struct attn__lanes {
    int64_t n;
    int64_t i[ATTN__MAX_LANES];    /* query */
    int64_t head[ATTN__MAX_LANES]; /* query head */
    attn__range range[ATTN__MAX_LANES];
    bool bounded;                /* some range is not [kv_begin, kv_len) */
    int64_t low, high;           /* hull of the ranges [low, high) */
    int64_t keep_low, keep_high; /* hull of the others */
    int64_t all_low, all_high;   /* every lane sees [all_low, all_high) */
} attn__lanes;

/* Fills range and what follows it; n, i and head are given. */
void attn__lanes_ranges(attn__lanes *lanes, const attn__visibility *v,
                        const attn__sequence *s);

typedef enum attn__tile_state {
    ATTN__TILE_FULL, /* every lane sees every key: no test needed */
    ATTN__TILE_MIXED,
    ATTN__TILE_EMPTY /* nothing is visible */
} attn__tile_state;

/* Bits of a tile: by lane while they are made, then by key as they are used. */
typedef struct attn__tile_bits {
    uint64_t by_lane[ATTN__MAX_LANES][ATTN__KEY_WORDS];
    uint64_t by_key[ATTN__MAX_KEYS][ATTN__LANE_WORDS];
} attn__tile_bits;

/* State of keys [key, key + keys) for these lanes; by_key is filled if MIXED.
 * Lanes beyond n get the bits of a full lane. */
attn__tile_state attn__tile_visibility(attn__tile_bits *bits,
                                       const attn__visibility *v,
                                       const attn__sequence *s,
                                       const attn__lanes *lanes, int64_t key,
                                       int64_t keys, attn_dtype dtype);

/* The same, less keys at both ends that no lane sees if all lanes see the keys
 * between, so that the state is FULL; else less those at the end. */
attn__tile_state attn__tile_trimmed(attn__tile_bits *bits,
                                    const attn__visibility *v,
                                    const attn__sequence *s,
                                    const attn__lanes *lanes, int64_t *key,
                                    int64_t *keys, attn_dtype dtype);

/* Adds the ADD masks to the scores of a tile, stored by key. gather has room
 * for as many elements as the tile: rows of masks whose keys are not adjacent.
 * What is hidden is left to the softmax, which takes bits->by_key.
 * Or to scores by rows, where what is hidden becomes -inf too. */
#define ATTN__DECLARE_MASK(R, suffix)                                \
    void attn__add_masks_##suffix(                                   \
        R *s, int64_t ld, int64_t keys, int64_t padded_lanes,        \
        const attn__visibility *v, const attn__sequence *seq,        \
        const attn__lanes *lanes, int64_t key, R *gather);           \
    void attn__mask_rows_of_##suffix(                                \
        R *s, int64_t ld, int64_t keys, const attn__tile_bits *bits, \
        const attn__visibility *v, const attn__sequence *seq,        \
        const attn__lanes *lanes, int64_t key, R *gather);
ATTN__DECLARE_MASK(float, f32)
ATTN__DECLARE_MASK(double, f64)
#undef ATTN__DECLARE_MASK

/* a + b, at the end of the range where it would overflow: positions may be
 * anything, and beyond the keys all are alike. */
int64_t attn__clamped_sum(int64_t a, int64_t b);

/* Checks masks against (B,Hq,Tq,Tk) and resolves broadcasting into *v. */
attn_status attn__check_masks(const char *call, const char *name,
                              const attn_mask *masks, int32_t num_masks,
                              attn_dtype dtype, const int64_t shape[4],
                              attn__visibility *v);

#endif
