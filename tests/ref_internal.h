/*
 * What the oracle of attn_sdpa and that of its gradients share: how a problem
 * is read, which keys a query sees and how wrong its scores may be. Not for
 * tests, which have ref.h.
 */
#ifndef TESTS_REF_INTERNAL_H
#define TESTS_REF_INTERNAL_H

#include "ref.h"

typedef struct problem {
    const attn_sdpa_params *p;
    ref_tensor q, k, v;
    long double scale;
    long double u;    /* unit roundoff */
    long double tiny; /* smallest normal number */
    long double huge; /* largest number */
    ref_result *result;
} problem;

/* One sequence of the batch: where its rows are and how long it is. */
typedef struct sequence {
    int64_t index;          /* b in masks and arrays */
    int64_t batch;          /* b in the tensors */
    int64_t q_start, q_len; /* q_len: rows that are computed */
    int64_t q_rows;         /* rows that are written; zeros from q_len on */
    int64_t k_start;        /* row of key 0, if not in pages or a ring */
    int64_t k_first, k_len; /* keys [k_first, k_len) are read */
    int64_t offset;         /* position of query 0 */
    int64_t k_offset;       /* position of key 0 */
} sequence;

/* A key of one row. */
typedef struct key {
    int visible;
    const ref_num *v; /* its value; NULL if the key is never read */
    ref_num raw;      /* scale r */
    ref_num capped;   /* u */
    ref_num z;        /* error: without the part that needs m */
    long double dz;   /* the whole error of z */
    long double weight;
    long double log_weight; /* not z - L: beside a large m the sum is lost */
    long double up;         /* weight (exp(dz) - 1) */
} key;

/* Zeros, with room for one more; never NULL. */
void *ref_allocate(int64_t n, size_t bytes);
ref_tensor ref_make(int64_t b, int64_t h, int64_t t, int64_t d);
/* The view's elements, which are exact. */
ref_tensor ref_read_view(const attn_tensor *view);

/* u, tiny and huge of a type. */
void ref_set_type(problem *a, attn_dtype dtype);
long double ref_scale_of(const attn_sdpa_params *p, int64_t width);

/* Tk as the arrays of a batch that is not ragged have it. */
int64_t ref_keys_of(const problem *a);
int64_t ref_sequences_of(const problem *a);
sequence ref_find_sequence(const problem *a, int64_t s);
/* Where key j of a sequence lies: b and t of k and v. */
void ref_find_key(const problem *a, const sequence *s, int64_t j, int64_t *b,
                  int64_t *t);
/* A number of each head: a vector (1,1,1,Hq) or (B,Hq,1,1). */
long double ref_of_head(const problem *a, const attn_tensor *x, int64_t b,
                        int64_t h);

/* Fills visible, v, raw, capped and z of the keys of row (h, i); the number of
 * visible ones is returned. */
int64_t ref_row_scores(const problem *a, const sequence *s, int64_t h,
                       int64_t i, key *keys);
/* exp(z-m+dz) - exp(z-m), where the difference must not cancel. */
long double ref_growth(long double z_minus_m, long double dz);

#endif
