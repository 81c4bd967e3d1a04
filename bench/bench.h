/*
 * attn_bench: what the parts of the benchmark share.
 *
 *   bench_main.c     options, and the order of things
 *   bench_first.c    the first table
 *   bench_problem.c  inputs, masks, views
 *   bench_features.c what attention can be asked for beyond masks
 *   bench_oracle.c   the formula in long double on sampled rows
 *   bench_oracle_backward.c   the same of the gradients
 *   bench_engines.c  the contenders: libattn, the row loop, plain CBLAS calls
 *   bench_probe.c    limits of the machine: FMA peak, GEMM rate, bandwidth
 *   bench_table.c    one row per shape: times, rates, errors; CSV and JSON
 *   bench_shapes.c   the list of shapes
 *   bench_bars.c     the table "bar, reached, holds"
 *   bench_feature_bars.c   the part of it that is about features
 *   bench_memory.c   growth of the process on a long sequence
 *   timing.h, row_loop.h   shared with the examples
 */
#ifndef BENCH_H
#define BENCH_H

#include <stdint.h>
#include <stdio.h>

#include <attn.h>

#include "timing.h"

/* ------------------------------------------------------------ Problems -- */

enum bench_layout { LAYOUT_BHTD, LAYOUT_BTHD, LAYOUT_PACKED };
enum bench_mask { MASK_NONE, MASK_KEEP, MASK_ADD, MASK_PADDING };

/* One thing that attention can be asked for beyond masks. */
enum bench_feature {
    FEATURE_NONE,
    FEATURE_SOFTCAP,
    FEATURE_ALIBI,
    FEATURE_OPEN_WINDOW, /* as wide as the sequence: hides nothing */
    FEATURE_WINDOW,      /* of 256 tokens, the query's own the last of them */
    FEATURE_SINK,
    FEATURE_LSE,
    FEATURE_DIAGNOSTICS, /* largest weight, effective keys, entropy */
    FEATURE_WEIGHTS,
    FEATURE_SEGMENTS, /* eight documents in a sequence */
    FEATURE_BLOCKS,   /* of 64 x 64, one of ten is visible */
    FEATURE_STARTS,   /* the first half of the keys is padding */
    FEATURE_PAGES_16, /* of so many keys, in random order */
    FEATURE_PAGES_64,
    FEATURE_BF16,   /* keys and values */
    FEATURE_RAGGED, /* a batch of skewed lengths, one after the other */
    NUM_FEATURES
};

/* What to compute. */
struct bench_shape {
    const char *name; /* of the row; "" if none */
    int64_t batch, heads, kv_heads, q_len, kv_len, width, v_width;
    int causal; /* the last query sees all keys, as in decoding */
    attn_dtype dtype;
    enum bench_layout layout;
    enum bench_mask mask;
    enum bench_feature feature;
    int backward; /* the gradients of q, k and v, not out */
};

/* A shape with its memory: inputs, masks, outputs, scratch. Of a backward
 * problem out and lse are inputs: what its forward call gave. */
struct bench_problem {
    struct bench_shape shape;
    attn_context *context;
    attn_tensor q, k, v, out;
    attn_mask mask;
    int64_t *kv_lens;
    attn_sdpa_params params;
    attn_tensor lse, d_out, d_q, d_k, d_v; /* backward only */
    attn_sdpa_gradients gradients;
    void *work;
    size_t work_bytes;
    void *scores; /* of the engines that keep scores */
    int64_t num_scores;
    attn_tensor extra[4]; /* of a feature */
    int num_extra;
    void *memory[24]; /* what to free */
    int num_memory;
};

const char *bench_dtype_name(attn_dtype dtype);
const char *bench_layout_name(enum bench_layout layout);
const char *bench_mask_name(enum bench_mask mask);
const char *bench_feature_name(enum bench_feature feature);
size_t bench_item_bytes(attn_dtype dtype);
const char *bench_direction_name(const struct bench_shape *shape);
/* Floating-point operations of the products of one (query, key) pair of a head,
 * two of them or five. */
double bench_pair_flops(const struct bench_shape *shape);
double bench_full_flops(const struct bench_shape *shape); /* of all pairs */

/* Bytes that bench_problem_create would allocate, scratch not counted. */
double bench_problem_bytes(const struct bench_shape *shape);
/* Fills *problem, with values from a fixed seed. Returns 0; or a status with
 * attn_last_error() and, unless it is ATTN_ERR_UNSUPPORTED, a line on stderr.
 * threads: of the context that calls get. */
attn_status bench_problem_create(struct bench_problem *problem,
                                 const struct bench_shape *shape, int threads);
void bench_problem_destroy(struct bench_problem *problem);
/* Overwrites the outputs with NaN, so that an engine that writes nothing
 * cannot pass for one that is right. */
void bench_problem_spoil(const struct bench_problem *problem);

/* Memory that is freed with the problem. */
void *bench_problem_take(struct bench_problem *problem, size_t bytes);
/* The next number of a splitmix64 generator. */
uint64_t bench_random(uint64_t *state);
/* Does what the shape's feature asks for, to inputs that are filled. */
attn_status bench_feature_apply(struct bench_problem *problem);

/* Room for count scores, kept with the problem. */
void *bench_problem_scores(struct bench_problem *problem, int64_t count);

/* Visible (query, key) pairs over all heads and batches. */
double bench_visible_pairs(const struct bench_problem *problem);

/* Largest and root-mean-square difference of problem->out, or of the three
 * gradients, from the formula in long double, over a sample of rows; the
 * largest also of what else the call was asked for. */
struct bench_error {
    double max;
    double rms;
    int64_t rows; /* in the sample */
};
struct bench_error bench_problem_error(const struct bench_problem *problem);
struct bench_error bench_backward_error(const struct bench_problem *problem);
/* What the error of a right result cannot exceed for these inputs. */
double bench_error_bound(const struct bench_shape *shape);

/* Page-aligned, like what a host would hand over; ends the program on failure:
 * there is nothing to measure then. */
void *bench_alloc(size_t bytes);
/* Uniform numbers of mean 0 and variance 1. */
void bench_fill(attn_dtype dtype, void *data, int64_t count, uint64_t seed);

/* ------------------------------------------------------------- Engines -- */

/* A way to compute a problem. can() says whether it covers it. */
struct bench_engine {
    const char *name;
    int (*can)(const struct bench_shape *shape);
    void (*run)(void *problem);
};

#define ENGINE_LIBATTN 0 /* scratch memory of the caller */
#define ENGINE_ROW_LOOP 1
#define ENGINE_PLAIN_CBLAS 2
extern const struct bench_engine bench_engines[];
extern const int bench_num_engines;

/* Runs the engine once and compares with the oracle. Returns 0 if the error is
 * within the bound; nothing else may be timed. */
int bench_verify(const struct bench_engine *engine,
                 struct bench_problem *problem, struct bench_error *error);

/* -------------------------------------------------------------- Probes -- */

/* Sets the threads of the loaded BLAS if it has a call for that; returns the
 * number before, or 0 if it has none. 0 changes nothing. */
int bench_blas_threads(int threads);

/* Timing tasks, to be run beside what they limit; *flops or *bytes is the work
 * of one iteration. Fused multiply-adds out of registers, with the widest
 * instructions of this CPU: */
struct timing_task bench_probe_fma(attn_dtype dtype, double *flops);
const char *bench_probe_fma_name(void);
/* The same on each of so many threads: what they gain over one says whether
 * their cores are free just now. */
struct timing_task bench_probe_cores(int threads);
/* cblas_?gemm on 1024^3 with one BLAS thread: */
struct timing_task bench_probe_gemm(attn_dtype dtype, double *flops);
/* Reading memory well beyond the caches by so many threads: */
struct timing_task bench_probe_read(int threads, double *bytes);

/* The best of the given rate and all given before. A share is of that: a probe
 * that was disturbed would flatter it, so that nothing is ever above 1. */
double bench_best_fma(attn_dtype dtype, double gflops);
double bench_best_read(int threads, double gbytes);

/* All of them, timed once. */
struct bench_peaks {
    double fma[3];   /* GFLOP/s of one core, indexed by attn_dtype */
    double gemm[3];  /* GFLOP/s of cblas_?gemm */
    double read_one; /* GB/s */
    double read_all; /* GB/s with .threads */
    int threads;
};
void bench_probe_all(struct bench_peaks *peaks, int threads,
                     const struct timing_limits *limits);

/* --------------------------------------------------------------- Table -- */

struct bench_options {
    int threads;
    int quick;
    int compare;  /* time the other engines beside libattn */
    int backward; /* the list for training, the bars of gradients */
    struct timing_limits limits;
    double max_bytes; /* larger problems are left out, which a line says */
    double max_flops;
    FILE *csv;
    FILE *json;
};

/* The limits for work on so many threads: CPU time only for one. */
struct timing_limits bench_limits(const struct bench_options *options,
                                  int threads);

/* One row: a shape, an engine, the figures. */
struct bench_row {
    struct bench_shape shape;
    const char *engine;
    int threads;
    struct timing time;
    double flops_full;    /* bench_full_flops */
    double flops_visible; /* the same over the visible pairs only */
    double bytes;         /* of K and V, each read once */
    double peak_gflops;   /* FMA peak of that many cores */
    double peak_gbytes;   /* read bandwidth of that many threads */
    size_t work_bytes;
    struct bench_error error;
};

void bench_table_open(const struct bench_options *options,
                      const struct bench_peaks *peaks);
void bench_table_header(void);
void bench_table_row(const struct bench_row *row,
                     const struct bench_options *options);
void bench_table_close(const struct bench_options *options);

/* Verifies, times and prints one shape. Returns the number of wrong
 * results. */
int bench_run_shape(const struct bench_shape *shape,
                    const struct bench_peaks *peaks,
                    const struct bench_options *options);

/* --------------------------------------------------------------- Parts -- */

/* The first table: the row loop against libattn, T = 128, d = 64. Returns the
 * number of wrong results. */
int bench_run_first(const struct bench_options *options);
/* The list of shapes; returns the number of wrong results. */
int bench_run_list(const struct bench_peaks *peaks,
                   const struct bench_options *options);
void bench_print_list(const struct bench_options *options);

/* The table of bars. */
void bench_run_bars(const struct bench_options *options);
void bench_run_feature_bars(const struct bench_options *options);
/* More repeats than elsewhere, so that on a busy machine a quiet moment is
 * among them. */
struct bench_options bench_patient(const struct bench_options *options);
/* A line of it; direction says which side of the bar is good. */
#define AT_LEAST 1
#define AT_MOST 0
void bench_print_bar(const char *what, double bar, int direction,
                     double reached, const char *unit);
/* The part of it that runs under other BLAS kernels: one number a line, for
 * the parent. */
void bench_run_bars_forced(const struct bench_options *options);

/* Prints scratch size and growth of the process for one causal head of that
 * length. Call it in a process that has done nothing else. */
int bench_run_memory(int64_t len);

#endif
