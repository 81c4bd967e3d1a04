/*
 * The table "bar, reached, holds": what libattn sets out to reach, as ratios
 * to limits that are timed beside each row. A bar that is missed is printed
 * as missed; nothing else depends on it.
 */
#define _POSIX_C_SOURCE 200809L

#include "bench.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct bench_shape shape_of(attn_dtype dtype, int64_t heads, int64_t len,
                                   int64_t width)
{
    return (struct bench_shape){.name = "bar",
                                .batch = 1,
                                .heads = heads,
                                .kv_heads = heads,
                                .q_len = len,
                                .kv_len = len,
                                .width = width,
                                .v_width = width,
                                .dtype = dtype};
}

/* A problem that is known to be right, and its timing task. Ends the program
 * otherwise: the table says nothing about wrong results. */
static struct timing_task start(struct bench_problem *p,
                                const struct bench_shape *shape, int threads)
{
    const struct bench_engine *engine = &bench_engines[ENGINE_LIBATTN];
    struct bench_error error;

    if (bench_problem_create(p, shape, threads))
        exit(1);
    if (bench_verify(engine, p, &error)) {
        printf("error %.1e is beyond %.1e; nothing was timed\n", error.max,
               bench_error_bound(shape));
        exit(1);
    }
    return (struct timing_task){engine->run, p};
}

/* -------------------------------------------------------------- Printing -- */

void bench_print_bar(const char *what, double bar, int direction,
                     double reached, const char *unit)
{
    int holds = direction == AT_LEAST ? reached >= bar : reached <= bar;
    printf("  %-54s %s %7.2f %9.2f %-7s %s\n", what,
           direction == AT_LEAST ? ">=" : "<=", bar, reached, unit,
           holds ? "holds" : "MISSED");
    fflush(stdout);
}

/* ------------------------------------------------------------- Measures -- */

/* Rate as a share of the FMA peak. */
static double peak_share(const struct bench_shape *shape,
                         const struct bench_options *options)
{
    struct bench_problem p;
    struct timing_task tasks[2];
    struct timing times[2];
    double flops;

    tasks[0] = start(&p, shape, 1);
    tasks[1] = bench_probe_fma(shape->dtype, &flops);
    timing_compare(tasks, 2, &options->limits, times);
    bench_problem_destroy(&p);
    return bench_full_flops(shape) / times[0].min /
           bench_best_fma(shape->dtype, flops / times[1].min);
}

/* The lowest share over the lengths from 512. */
static double lowest_share(struct bench_shape shape,
                           const struct bench_options *options)
{
    double lowest = 1e9;

    for (int64_t len = 512; len <= (options->quick ? 1024 : 2048); len *= 2) {
        double share;
        shape.q_len = shape.kv_len = len;
        share = peak_share(&shape, options);
        if (share < lowest)
            lowest = share;
    }
    return lowest;
}

static double long_share(attn_dtype dtype, int64_t width,
                         enum bench_layout layout,
                         const struct bench_options *options)
{
    struct bench_shape shape = shape_of(dtype, width == 64 ? 12 : 8, 0, width);
    shape.layout = layout;
    return lowest_share(shape, options);
}

static double backward_share(attn_dtype dtype,
                             const struct bench_options *options)
{
    struct bench_shape shape = shape_of(dtype, 12, 0, 64);
    shape.backward = 1;
    return lowest_share(shape, options);
}

static double short_share(enum bench_layout layout,
                          const struct bench_options *options)
{
    struct bench_shape shape = shape_of(ATTN_F32, 12, 128, 64);
    shape.layout = layout;
    return peak_share(&shape, options);
}

/* Time of a over time of b. */
static double time_ratio(const struct bench_shape *a,
                         const struct bench_shape *b,
                         const struct bench_options *options)
{
    struct bench_problem pa, pb;
    struct timing_task tasks[2];
    struct timing times[2];

    tasks[0] = start(&pa, a, 1);
    tasks[1] = start(&pb, b, 1);
    timing_compare(tasks, 2, &options->limits, times);
    bench_problem_destroy(&pa);
    bench_problem_destroy(&pb);
    return times[0].min / times[1].min;
}

static double causal_fraction(int64_t len, int backward,
                              const struct bench_options *options)
{
    struct bench_shape full = shape_of(ATTN_F32, 12, len, 64);
    struct bench_shape causal;
    full.backward = backward;
    causal = full;
    causal.causal = 1;
    return time_ratio(&causal, &full, options);
}

static double mask_fraction(const struct bench_options *options)
{
    struct bench_shape full = shape_of(ATTN_F32, 12, 512, 64);
    struct bench_shape masked = full;
    masked.mask = MASK_KEEP;
    return time_ratio(&masked, &full, options);
}

/* The same problem with half of the keys by length. */
static double half_lengths(const struct bench_options *options)
{
    struct bench_shape full = shape_of(ATTN_F32, 12, 1024, 64);
    struct bench_shape padded = full;
    struct bench_problem p, half;
    struct timing_task tasks[2];
    struct timing times[2];

    padded.mask = MASK_PADDING;
    tasks[0] = start(&half, &padded, 1);
    half.kv_lens[0] = padded.kv_len / 2;
    tasks[1] = start(&p, &full, 1);
    timing_compare(tasks, 2, &options->limits, times);
    bench_problem_destroy(&half);
    bench_problem_destroy(&p);
    return times[0].min / times[1].min;
}

/* Time of one thread over that of two. *cores: the same for bare loops of
 * multiply-adds, whose gain is 2 if both cores are free. */
static double thread_gain(const struct bench_shape *shape, double *cores,
                          const struct bench_options *options)
{
    struct timing_limits limits = bench_limits(options, 2);
    struct bench_problem one, two;
    struct timing_task tasks[4];
    struct timing times[4];

    limits.repeats =
        24; /* a moment in which both are free must be among them */
    tasks[0] = start(&one, shape, 1);
    tasks[1] = start(&two, shape, 2);
    tasks[2] = bench_probe_cores(1);
    tasks[3] = bench_probe_cores(2);
    timing_compare(tasks, 4, &limits, times);
    bench_problem_destroy(&one);
    bench_problem_destroy(&two);
    *cores = 2 * times[2].min / times[3].min;
    return times[0].min / times[1].min;
}

/* Bytes of K and V over the read bandwidth of as many threads. */
static double decode_share(int64_t kv_heads, int64_t kv_len, int threads,
                           const struct bench_options *options)
{
    struct bench_shape shape = shape_of(ATTN_F32, 32, kv_len, 128);
    struct bench_problem p;
    struct timing_task tasks[2];
    struct timing times[2];
    struct timing_limits limits = bench_limits(options, threads);
    double read, bytes;

    shape.kv_heads = kv_heads;
    shape.q_len = 1;
    bytes = 2.0 * (double)(kv_heads * kv_len) * 128 * sizeof(float);
    tasks[0] = start(&p, &shape, threads);
    tasks[1] = bench_probe_read(threads, &read);
    timing_compare(tasks, 2, &limits, times);
    bench_problem_destroy(&p);
    return bytes / times[0].min / bench_best_read(threads, read / times[1].min);
}

static double call_overhead(attn_dtype dtype,
                            const struct bench_options *options)
{
    struct bench_shape shape = shape_of(dtype, 1, 5, 4);
    struct bench_problem p;
    struct timing_task task = start(&p, &shape, 1);
    struct timing time;

    timing_compare(&task, 1, &options->limits, &time);
    bench_problem_destroy(&p);
    return time.min / 1e3;
}

static double row_loop_gain(attn_dtype dtype,
                            const struct bench_options *options)
{
    struct bench_shape shape = shape_of(dtype, 1, 128, 64);
    struct bench_problem p;
    struct timing_task tasks[2];
    struct timing times[2];

    tasks[0] = start(&p, &shape, 1);
    tasks[1] = (struct timing_task){bench_engines[ENGINE_ROW_LOOP].run, &p};
    timing_compare(tasks, 2, &options->limits, times);
    bench_problem_destroy(&p);
    return times[1].min / times[0].min;
}

/* ---------------------------------------------------------------- Layer -- */

#define LAYER_B 8
#define LAYER_T 128
#define LAYER_E 768
#define LAYER_H 12

struct layer {
    attn_mha_params params;
    attn_tensor x, out, w[4], b[4];
    void *work;
    size_t work_bytes;
};

static void run_layer(void *arg)
{
    const struct layer *l = arg;
    if (attn_mha_work(NULL, &l->params, &l->x, NULL, NULL, &l->out, l->work,
                      l->work_bytes)) {
        fprintf(stderr, "attn_bench: %s\n", attn_last_error());
        exit(2);
    }
}

static void make_layer(struct layer *l)
{
    const int64_t rows = LAYER_B * LAYER_T;
    const size_t row_bytes = LAYER_E * sizeof(float);
    float *x = bench_alloc((size_t)rows * row_bytes);
    float *out = bench_alloc((size_t)rows * row_bytes);
    size_t alignment;

    bench_fill(ATTN_F32, x, rows * LAYER_E, 1);
    attn_mha_params_init(&l->params);
    attn_view_bte(&l->x, ATTN_F32, x, LAYER_B, LAYER_T, LAYER_E);
    attn_view_bte(&l->out, ATTN_F32, out, LAYER_B, LAYER_T, LAYER_E);
    for (uint64_t n = 0; n < 4; n++) {
        float *w = bench_alloc(LAYER_E * row_bytes);
        float *b = bench_alloc(row_bytes);
        bench_fill(ATTN_F32, w, LAYER_E * LAYER_E, 2 + n);
        bench_fill(ATTN_F32, b, LAYER_E, 6 + n);
        for (int64_t i = 0; i < LAYER_E * LAYER_E; i++)
            w[i] *= 0.036f; /* 1/sqrt(E): the projections keep variance 1 */
        attn_view_matrix(&l->w[n], ATTN_F32, w, LAYER_E, LAYER_E, LAYER_E);
        attn_view_vector(&l->b[n], ATTN_F32, b, LAYER_E);
    }
    l->params.weight_layout = ATTN_WEIGHT_OUT_IN;
    l->params.num_heads = LAYER_H;
    l->params.w_q = &l->w[0], l->params.b_q = &l->b[0];
    l->params.w_k = &l->w[1], l->params.b_k = &l->b[1];
    l->params.w_v = &l->w[2], l->params.b_v = &l->b[2];
    l->params.w_o = &l->w[3], l->params.b_o = &l->b[3];
    if (attn_mha_workspace(NULL, &l->params, &l->x, NULL, NULL, &l->out,
                           &l->work_bytes, &alignment)) {
        fprintf(stderr, "attn_bench: %s\n", attn_last_error());
        exit(2);
    }
    l->work = bench_alloc(l->work_bytes);
}

static void free_layer(struct layer *l)
{
    free(l->x.data);
    free(l->out.data);
    for (int n = 0; n < 4; n++) {
        free(l->w[n].data);
        free(l->b[n].data);
    }
    free(l->work);
}

/* All flops of the layer over those of one large product. */
static double layer_share(const struct bench_options *options)
{
    const double rows = LAYER_B * LAYER_T;
    struct layer layer;
    struct timing_task tasks[2] = {{run_layer, &layer}};
    struct timing times[2];
    double gemm;
    double flops =
        4 * 2 * rows * LAYER_E * LAYER_E + 4 * rows * LAYER_T * LAYER_E;

    make_layer(&layer);
    tasks[1] = bench_probe_gemm(ATTN_F32, &gemm);
    timing_compare(tasks, 2, &options->limits, times);
    free_layer(&layer);
    return flops / times[0].min / (gemm / times[1].min);
}

/* ------------------------------------------------------ Other processes -- */

/* This program again, for what needs a process of its own. */
static FILE *open_self(const char *arguments)
{
    char command[256];
    snprintf(command, sizeof(command),
             "exe=$(readlink /proc/%ld/exe) && exec \"$exe\" %s",
             (long)getpid(), arguments);
    return popen(command, "r");
}

static double scan(const char *line, const char *key, double otherwise)
{
    size_t length = strlen(key);
    return strncmp(line, key, length) ? otherwise : strtod(line + length, NULL);
}

static void memory_bars(const struct bench_options *options)
{
    double scratch = -1, growth = -1;
    char line[256];
    FILE *child = open_self(options->quick ? "--memory 16384" : "--memory");

    if (!child)
        return;
    while (fgets(line, sizeof(line), child)) {
        scratch = scan(line, "scratch_bytes ", scratch);
        growth = scan(line, "growth_bytes ", growth);
    }
    if (pclose(child) || scratch < 0 || growth < 0) {
        printf("  memory: could not be measured\n");
        return;
    }
    bench_print_bar(options->quick ? "scratch memory a thread, T=16384, d=64"
                                   : "scratch memory a thread, T=65536, d=64",
                    4, AT_MOST, scratch / 1048576, "MiB");
    bench_print_bar(options->quick
                        ? "growth of the process, T=16384, d=64, causal"
                        : "growth of the process, T=65536, d=64, causal",
                    16, AT_MOST, growth / 1048576, "MiB");
}

struct bench_options bench_patient(const struct bench_options *options)
{
    struct bench_options result = *options;
    if (!result.quick && result.limits.repeats < 20)
        result.limits.repeats = 20;
    return result;
}

void bench_run_bars_forced(const struct bench_options *given)
{
    struct bench_options more = bench_patient(given);
    const struct bench_options *options = &more;

    printf("blas %s\n", attn_blas_info());
    printf("d64 %.6f\n", long_share(ATTN_F32, 64, LAYOUT_BHTD, options));
    printf("d128 %.6f\n", long_share(ATTN_F32, 128, LAYOUT_BHTD, options));
}

/* The AVX2 kernels of an OpenBLAS that chooses its kernels at run time. */
static void forced_bars(const struct bench_options *options)
{
    double d64 = -1, d128 = -1;
    char arguments[64], line[256];
    FILE *child;

    /* The bar is one thread's: with one BLAS thread the library may ask these
     * kernels for products of any size. */
    const char *threads = getenv("OPENBLAS_NUM_THREADS");
    char before[32] = "";

    if (threads)
        snprintf(before, sizeof(before), "%s", threads);
    setenv("OPENBLAS_CORETYPE", "Haswell", 1);
    setenv("OPENBLAS_NUM_THREADS", "1", 1);
    snprintf(arguments, sizeof(arguments), "--bars-forced%s%s",
             options->quick ? " --quick" : "",
             options->limits.cpu_time ? " --cpu-time" : "");
    child = open_self(arguments);
    unsetenv("OPENBLAS_CORETYPE");
    if (threads)
        setenv("OPENBLAS_NUM_THREADS", before, 1);
    else
        unsetenv("OPENBLAS_NUM_THREADS");
    if (!child)
        return;
    while (fgets(line, sizeof(line), child)) {
        d64 = scan(line, "d64 ", d64);
        d128 = scan(line, "d128 ", d128);
        if (!strncmp(line, "blas ", 5))
            printf("  (AVX2 kernels: %.*s)\n", (int)strcspn(line + 5, "\n"),
                   line + 5);
    }
    if (pclose(child) || d64 < 0 || d128 < 0) {
        printf("  AVX2 kernels: could not be measured\n");
        return;
    }
    bench_print_bar("forward f32, AVX2 kernels, d=64, T>=512 / P", 0.75,
                    AT_LEAST, d64, "");
    bench_print_bar("forward f32, AVX2 kernels, d=128, T>=512 / P", 0.80,
                    AT_LEAST, d128, "");
}

/* ---------------------------------------------------------------- Table -- */

static void forward_bars(const struct bench_options *o)
{
    bench_print_bar("forward f32, d=64, T>=512 / P", 0.85, AT_LEAST,
                    long_share(ATTN_F32, 64, LAYOUT_BHTD, o), "");
    bench_print_bar("forward f32, d=128, T>=512 / P", 0.90, AT_LEAST,
                    long_share(ATTN_F32, 128, LAYOUT_BHTD, o), "");
    bench_print_bar("forward f32, d=64, T=128 / P", 0.78, AT_LEAST,
                    short_share(LAYOUT_BHTD, o), "");
    bench_print_bar("forward f32, packed (B,T,3,H,D), d=64, T>=512 / P", 0.80,
                    AT_LEAST, long_share(ATTN_F32, 64, LAYOUT_PACKED, o), "");
    bench_print_bar("forward f32, packed (B,T,3,H,D), d=128, T>=512 / P", 0.85,
                    AT_LEAST, long_share(ATTN_F32, 128, LAYOUT_PACKED, o), "");
    bench_print_bar("forward f32, packed (B,T,3,H,D), d=64, T=128 / P", 0.74,
                    AT_LEAST, short_share(LAYOUT_PACKED, o), "");
    bench_print_bar("forward f64, d=64, T>=512 / P", 0.78, AT_LEAST,
                    long_share(ATTN_F64, 64, LAYOUT_BHTD, o), "");
    bench_print_bar("forward f64, d=128, T>=512 / P", 0.84, AT_LEAST,
                    long_share(ATTN_F64, 128, LAYOUT_BHTD, o), "");
    forced_bars(o);
}

static void mask_bars(const struct bench_options *o)
{
    bench_print_bar("causal / full time, T=2048, d=64", 0.55, AT_MOST,
                    causal_fraction(2048, 0, o), "");
    bench_print_bar("causal / full time, T=512, d=64", 0.62, AT_MOST,
                    causal_fraction(512, 0, o), "");
    bench_print_bar("dense boolean mask per head / no mask, T=512", 1.10,
                    AT_MOST, mask_fraction(o), "");
    bench_print_bar("half the keys by kv_lens / all keys, T=1024", 0.55,
                    AT_MOST, half_lengths(o), "");
}

static void thread_bar(int64_t heads, int64_t len, int backward, double bar,
                       const struct bench_options *o)
{
    struct bench_shape shape = shape_of(ATTN_F32, heads, len, 64);
    char what[96];
    double cores, gain;

    shape.backward = backward;
    gain = thread_gain(&shape, &cores, o);
    snprintf(what, sizeof(what), "%s2 threads, B H=%d, T=%d, d=64",
             backward ? "backward " : "", (int)heads, (int)len);
    bench_print_bar(what, bar, AT_LEAST, gain, "times");
    printf("    (beside it, bare multiply-adds on 2 threads gain %.2f times)\n",
           cores);
}

static void thread_bars(const struct bench_options *o)
{
    thread_bar(12, 512, 0, 1.9, o);
    thread_bar(1, 1024, 0, 1.9, o);
}

static void backward_bars(const struct bench_options *o)
{
    /* Other kernels than the small ones share locks and buffers. */
    double gain = strstr(attn_blas_info(), "small kernels") ? 1.9 : 1.6;

    bench_print_bar("backward f32, d=64, T>=512 / P", 0.75, AT_LEAST,
                    backward_share(ATTN_F32, o), "");
    bench_print_bar("backward f64, d=64, T>=512 / P", 0.72, AT_LEAST,
                    backward_share(ATTN_F64, o), "");
    bench_print_bar("backward causal / full time, T=2048, d=64", 0.60, AT_MOST,
                    causal_fraction(2048, 1, o), "");
    bench_print_bar("backward causal / full time, T=512, d=64", 0.60, AT_MOST,
                    causal_fraction(512, 1, o), "");
    thread_bar(12, 512, 1, gain, o);
    thread_bar(1, 1024, 1, gain, o);
}

static void decode_bars(const struct bench_options *o)
{
    static const int64_t kv_heads[] = {8, 32};
    int64_t longest = o->quick ? 8192 : 32768;

    for (int n = 0; n < 2; n++)
        for (int threads = 1; threads <= 2; threads++)
            for (int64_t len = 8192; len <= longest; len *= 4) {
                char what[96];
                snprintf(what, sizeof(what),
                         "decode (32,%d), d=128, Tk=%d, %d thread%s / R",
                         (int)kv_heads[n], (int)len, threads,
                         threads > 1 ? "s" : "");
                bench_print_bar(what, 0.80, AT_LEAST,
                                decode_share(kv_heads[n], len, threads, o), "");
            }
}

void bench_run_bars(const struct bench_options *given)
{
    struct bench_options more = bench_patient(given);
    const struct bench_options *o = &more;

    printf("\nBars: P = FMA peak of a core, R = read bandwidth of as many "
           "threads, both timed\nbeside each row; T>=512 is the lowest of "
           "T = 512, 1024%s\n",
           o->quick ? "" : ", 2048");
    printf("  %-54s %10s %9s\n", "what", "bar", "reached");
    if (o->backward) {
        backward_bars(o);
        return;
    }
    bench_print_bar("row loop / library, f64, T=128, d=64", 8, AT_LEAST,
                    row_loop_gain(ATTN_F64, o), "times");
    bench_print_bar("row loop / library, f32, T=128, d=64", 15, AT_LEAST,
                    row_loop_gain(ATTN_F32, o), "times");
    forward_bars(o);
    mask_bars(o);
    thread_bars(o);
    backward_bars(o);
    decode_bars(o);
    bench_print_bar("call, T=5, d=4, f32, scratch of the caller", 1, AT_MOST,
                    call_overhead(ATTN_F32, o), "us");
    bench_print_bar("call, T=5, d=4, f64, scratch of the caller", 1, AT_MOST,
                    call_overhead(ATTN_F64, o), "us");
    bench_print_bar("MHA layer B=8 T=128 E=768 H=12 / cblas_sgemm 1024^3", 0.80,
                    AT_LEAST, layer_share(o), "");
    bench_run_feature_bars(given);
    memory_bars(o);
}
