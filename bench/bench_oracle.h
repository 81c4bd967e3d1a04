/*
 * What the oracles of both directions share: the rules of a problem, read from
 * the very parameters that the call gets.
 */
#ifndef BENCH_ORACLE_H
#define BENCH_ORACLE_H

#include "bench.h"

/* One query, and where its sequence begins. */
struct oracle_place {
    int64_t b; /* sequence */
    int64_t h, g, i;
    int64_t q_len, kv_len;
    int64_t batch, q_row, kv_row; /* in the tensors */
};

/* Query i of head h of sequence b. */
struct oracle_place oracle_place_of(const struct bench_problem *p, int64_t b,
                                    int64_t h, int64_t i);
/* Rows of out over all heads, and the place of one of them. */
int64_t oracle_rows(const struct bench_problem *p);
struct oracle_place oracle_row_place(const struct bench_problem *p,
                                     int64_t row);

double oracle_value(const attn_tensor *t, int64_t b, int64_t h, int64_t i,
                    int64_t d);
/* Number d of key j in k or v. */
double oracle_key(const struct bench_problem *p, const attn_tensor *t,
                  const struct oracle_place *at, int64_t j, int64_t d);

int oracle_visible(const struct bench_problem *p, const struct oracle_place *at,
                   int64_t j);
/* u of section 2 of attn.h from q.k, what is added to it to give z, and the
 * logit of the sink, -inf without one. */
long double oracle_capped(const struct bench_problem *p, long double dot);
long double oracle_added(const struct bench_problem *p,
                         const struct oracle_place *at, int64_t j);
long double oracle_sink(const struct bench_problem *p,
                        const struct oracle_place *at);

/* Errors of rows added up: rms is the sum of squares until the end. */
struct oracle_sums {
    struct bench_error error;
    double numbers;
};
void oracle_compare(struct oracle_sums *sums, const attn_tensor *t,
                    int64_t batch, int64_t head, int64_t row,
                    const long double *want);
struct bench_error oracle_error(const struct oracle_sums *sums);

/* Number n of count that are spread evenly over all, first and last of them
 * included; of one the last. */
int64_t oracle_spread(int64_t n, int64_t count, int64_t all);
/* budget / cost within [least, all]. */
int64_t oracle_affordable(double budget, double cost, int64_t least,
                          int64_t all);

#endif
