/*
 * The experiments of an article that builds attention by hand (NumPy, checked
 * against PyTorch), through libattn: every printed figure is computed here and
 * compared with the published or stored one.
 *
 *   article [SOURCE]    SOURCE: this source tree, where the data is
 *
 * Exits with 1 if a figure is wrong, never because something is slow.
 */
#define _POSIX_C_SOURCE 199309L

#include <math.h>

#include <attn.h>

#include "../bench/row_loop.h"
#include "../bench/timing.h"
#include "npy.h"

#ifndef ATTN_SOURCE_DIR
#define ATTN_SOURCE_DIR "."
#endif

#define KEYS 2000

static const char *source_dir = ATTN_SOURCE_DIR;
static int failures;

static const char *mark(int ok)
{
    failures += !ok;
    return ok ? "ok" : "WRONG";
}

/* Ends the program on an error: nothing after it would mean anything. */
static void must(attn_status status)
{
    if (status) {
        fprintf(stderr, "article: %s\n", attn_last_error());
        exit(1);
    }
}

static void load(const char *directory, const char *name, struct npy *array)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/tests/%s", source_dir, directory);
    if (npy_read(path, name, array)) {
        fprintf(stderr, "article: give the source tree as argument\n");
        exit(1);
    }
}

static void *take(size_t bytes)
{
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory)
        exit(1);
    return memory;
}

static double value_at(const attn_tensor *t, int64_t n)
{
    return t->dtype == ATTN_F64 ? ((const double *)t->data)[n]
                                : (double)((const float *)t->data)[n];
}

/* Largest |a - b|, both contiguous; NaN if there is one. */
static double apart(const attn_tensor *a, const attn_tensor *b, int64_t count)
{
    double largest = 0;
    for (int64_t n = 0; n < count; n++) {
        double here = fabs(value_at(a, n) - value_at(b, n));
        if (!(here <= largest))
            largest = here;
    }
    return largest;
}

/* ---------------------------------------------- Why divide by sqrt(dk) -- */

/* As published. */
static const struct published {
    int dk;
    const char *std, *max_raw, *max_scaled, *keys_raw, *keys_scaled;
} published[] = {
    {16, "2.47", "0.227685", "0.004241", "14.85", "1341.59"},
    {64, "7.32", "0.921946", "0.009399", "1.17", "829.74"},
    {512, "20.99", "0.933175", "0.005796", "1.15", "917.82"},
};

/* One cell of the table: right if all published digits are. */
static void cell(int dk, const char *what, const char *expected,
                 double computed)
{
    int digits = (int)strlen(strchr(expected, '.') + 1);
    char found[32];

    snprintf(found, sizeof(found), "%.*f", digits, computed);
    printf("  %4d  %-32s %10s %10s  %s\n", dk, what, expected, found,
           mark(!strcmp(expected, found)));
}

static double standard_deviation(const double *x, int count)
{
    double mean = 0, squares = 0;
    for (int n = 0; n < count; n++)
        mean += x[n] / count;
    for (int n = 0; n < count; n++)
        squares += (x[n] - mean) * (x[n] - mean);
    return sqrt(squares / count);
}

/* softmax(factor * scores): largest weight and 1 / sum of squares. */
static void spread_of(const double *scores, double factor, double *weights,
                      double *largest, double *effective)
{
    attn_tensor row;
    double squares = 0;

    for (int n = 0; n < KEYS; n++)
        weights[n] = factor * scores[n];
    must(attn_view_vector(&row, ATTN_F64, weights, KEYS));
    must(attn_softmax(&row, &row, NULL));
    *largest = 0;
    for (int n = 0; n < KEYS; n++) {
        squares += weights[n] * weights[n];
        if (weights[n] > *largest)
            *largest = weights[n];
    }
    *effective = 1 / squares;
}

/* q.k of all keys: one row of a linear layer whose input is k. */
static void scores_of(struct npy *q, struct npy *k, double *scores)
{
    int64_t dk = q->count;
    attn_tensor x, w, y;

    must(attn_view_matrix(&x, ATTN_F64, k->data, KEYS, dk, dk));
    must(attn_view_matrix(&w, ATTN_F64, q->data, 1, dk, dk));
    must(attn_view_matrix(&y, ATTN_F64, scores, KEYS, 1, 1));
    must(attn_linear(NULL, ATTN_WEIGHT_OUT_IN, &x, &w, NULL, &y));
}

/* Weights of the same query by attention itself, with the default scale. */
static void check_sdpa(struct npy *q, struct npy *k, const double *weights)
{
    int64_t dk = q->count;
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    attn_tensor q_view, k_view, out_view, w_view, expected;
    double *out = take((size_t)dk * sizeof(double));
    double *w = take(KEYS * sizeof(double));
    double off;

    must(attn_view_matrix(&q_view, ATTN_F64, q->data, 1, dk, dk));
    must(attn_view_matrix(&k_view, ATTN_F64, k->data, KEYS, dk, dk));
    must(attn_view_matrix(&out_view, ATTN_F64, out, 1, dk, dk));
    must(attn_view_vector(&w_view, ATTN_F64, w, KEYS));
    must(attn_view_vector(&expected, ATTN_F64, weights, KEYS));
    params.weights = &w_view;
    must(attn_sdpa(NULL, &params, &q_view, &k_view, &k_view, &out_view));
    off = apart(&w_view, &expected, KEYS);
    printf("  %4d  weights of attn_sdpa differ by %.1e from attn_linear and "
           "attn_softmax  %s\n",
           (int)dk, off, mark(off <= 1e-15));
    free(out);
    free(w);
}

static void table_rows(const struct published *p)
{
    int dk = p->dk;
    char name[32];
    struct npy dots, q = {0}, k = {0};
    double *scores = take(KEYS * sizeof(double));
    double *weights = take(KEYS * sizeof(double));
    double raw, raw_keys, scaled, scaled_keys;

    snprintf(name, sizeof(name), "dots_dk%d.npy", dk);
    load("cases/article", name, &dots);
    memcpy(scores, dots.data, KEYS * sizeof(double));
    if (dk != 512) { /* of 512 only the products are kept: k has 8 MB */
        snprintf(name, sizeof(name), "q_dk%d.npy", dk);
        load("cases/article", name, &q);
        snprintf(name, sizeof(name), "k_dk%d.npy", dk);
        load("cases/article", name, &k);
        scores_of(&q, &k, scores);
    }
    spread_of(scores, 1, weights, &raw, &raw_keys);
    spread_of(scores, 1 / sqrt(dk), weights, &scaled, &scaled_keys);
    cell(dk, "std of q.k", p->std, standard_deviation(scores, KEYS));
    cell(dk, "largest weight, raw", p->max_raw, raw);
    cell(dk, "largest weight, scaled", p->max_scaled, scaled);
    cell(dk, "effective keys 1/sum w^2, raw", p->keys_raw, raw_keys);
    cell(dk, "effective keys 1/sum w^2, scaled", p->keys_scaled, scaled_keys);
    if (q.data)
        check_sdpa(&q, &k, weights);
    npy_free(&dots);
    npy_free(&q);
    npy_free(&k);
    free(scores);
    free(weights);
}

static void table(void)
{
    printf("\n1. Why 1/sqrt(dk): one query, %d keys; the weights without and "
           "with it\n",
           KEYS);
    printf("  %4s  %-32s %10s %10s\n", "dk", "", "article", "libattn");
    for (size_t n = 0; n < sizeof(published) / sizeof(published[0]); n++)
        table_rows(&published[n]);
}

/* ---------------------------------------------------------- Five tokens -- */

/* A stored array as a tensor; they are 4-dimensional and contiguous. */
static attn_tensor stored(const char *folder, const char *name,
                          struct npy *array)
{
    char directory[128];
    attn_tensor view;
    int64_t *s = array->shape;

    snprintf(directory, sizeof(directory), "golden/%s", folder);
    load(directory, name, array);
    if (array->dims != 4) {
        fprintf(stderr, "article: %s/%s is not 4-dimensional\n", folder, name);
        exit(1);
    }
    must(attn_view_bhtd(&view, array->type[2] == '8' ? ATTN_F64 : ATTN_F32,
                        array->data, s[0], s[1], s[2], s[3]));
    return view;
}

/* Contiguous memory of the shape and type of another tensor. */
static attn_tensor like(const attn_tensor *other)
{
    const int64_t *s = other->shape;
    attn_tensor view;
    size_t item = other->dtype == ATTN_F64 ? sizeof(double) : sizeof(float);
    size_t count = (size_t)(s[0] * s[1] * s[2] * s[3]);

    must(attn_view_bhtd(&view, other->dtype, take(item * count), s[0], s[1],
                        s[2], s[3]));
    return view;
}

static int64_t count_of(const attn_tensor *t)
{
    return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3];
}

/* Results that were stored from PyTorch for the same inputs. */
static void agreement(const char *what, const attn_tensor *out,
                      const attn_tensor *expected, double article)
{
    int is_f64 = out->dtype == ATTN_F64;
    double off = apart(out, expected, count_of(expected));

    printf("  %-12s %s: differs from PyTorch by %.2e (article %.2e)  %s\n",
           what, is_f64 ? "float64" : "float32", off, article,
           mark(off <= (is_f64 ? 4.5e-16 : 5e-7)));
}

static void row_sums(const char *what, const attn_tensor *weights)
{
    double deviation;
    int64_t empty;

    must(attn_weights_check(weights, &deviation, &empty));
    printf("  %-12s rows of weights sum to 1 within %.1e  %s\n", what,
           deviation,
           mark(empty == 0 &&
                deviation <= (weights->dtype == ATTN_F64 ? 9e-16 : 5e-7)));
}

static void causal_zeros(const attn_tensor *weights)
{
    int64_t len = weights->shape[2], zeros = 0, visible = 0;

    for (int64_t i = 0; i < len; i++)
        for (int64_t j = 0; j < len; j++) {
            double w = value_at(weights, i * len + j);
            zeros += j > i && w == 0;
            visible += i == 2 && w > 0;
        }
    printf("  causal       %d of %d masked weights are exactly 0, row 2 has %d "
           "above 0  %s\n",
           (int)zeros, (int)(len * (len - 1) / 2), (int)visible,
           mark(zeros == len * (len - 1) / 2 && visible == 3));
}

static void single_head(const char *folder, int causal, double article)
{
    struct npy files[4];
    attn_tensor q = stored(folder, "q.npy", &files[0]);
    attn_tensor k = stored(folder, "k.npy", &files[1]);
    attn_tensor v = stored(folder, "v.npy", &files[2]);
    attn_tensor expected = stored(folder, "out.npy", &files[3]);
    attn_tensor out = like(&expected), weights;
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    double memory[25];

    must(attn_view_bhtd(&weights, q.dtype, memory, 1, 1, 5, 5));
    params.causal = causal;
    params.weights = &weights;
    must(attn_sdpa(NULL, &params, &q, &k, &v, &out));
    agreement(causal ? "causal" : "single head", &out, &expected, article);
    if (q.dtype == ATTN_F64)
        row_sums(causal ? "causal" : "single head", &weights);
    if (causal && q.dtype == ATTN_F64)
        causal_zeros(&weights);
    free(out.data);
    for (int n = 0; n < 4; n++)
        npy_free(&files[n]);
}

static void multi_head(const char *folder, double article)
{
    struct npy files[6];
    attn_tensor x = stored(folder, "x_q.npy", &files[0]);
    attn_tensor w_q = stored(folder, "w_q.npy", &files[1]);
    attn_tensor w_k = stored(folder, "w_k.npy", &files[2]);
    attn_tensor w_v = stored(folder, "w_v.npy", &files[3]);
    attn_tensor w_o = stored(folder, "w_o.npy", &files[4]);
    attn_tensor expected = stored(folder, "out.npy", &files[5]);
    attn_tensor out = like(&expected), weights;
    attn_sdpa_params attention = ATTN_SDPA_PARAMS_INIT;
    attn_mha_params params = ATTN_MHA_PARAMS_INIT;
    double memory[4 * 5 * 5];

    must(attn_view_bhtd(&weights, x.dtype, memory, 1, 4, 5, 5));
    attention.weights = &weights;
    params.attention = &attention;
    params.weight_layout = ATTN_WEIGHT_IN_OUT; /* as in the paper */
    params.num_heads = 4;
    params.w_q = &w_q, params.w_k = &w_k, params.w_v = &w_v;
    params.w_o = &w_o;
    must(attn_mha(NULL, &params, &x, NULL, NULL, &out));
    agreement("multi-head", &out, &expected, article);
    if (x.dtype == ATTN_F64) {
        row_sums("multi-head", &weights);
        printf("  multi-head   T=5, d_model=16, h=4: out (%d,%d), weights "
               "(%d,%d,%d)  %s\n",
               (int)out.shape[2], (int)out.shape[3], (int)weights.shape[1],
               (int)weights.shape[2], (int)weights.shape[3],
               mark(out.shape[2] == 5 && out.shape[3] == 16));
    }
    free(out.data);
    for (int n = 0; n < 6; n++)
        npy_free(&files[n]);
}

static void five_tokens(void)
{
    printf("\n2. Five tokens, against results stored from PyTorch\n");
    single_head("article_single_f64", 0, 2.22e-16);
    single_head("article_causal_f64", 1, 2.22e-16);
    multi_head("article_multihead_f64", 4.44e-16);
    single_head("article_single_f32", 0, 1e-7);
    single_head("article_causal_f32", 1, 1e-7);
    multi_head("article_multihead_f32", 1e-7);
}

/* ------------------------------------------------------ What goes wrong -- */

static void not_transposed(const attn_tensor *q, const attn_tensor *out)
{
    static double memory[20];
    attn_tensor k;
    attn_status status;

    must(attn_view_matrix(&k, ATTN_F64, memory, 4, 5, 5));
    status = attn_sdpa(NULL, NULL, q, &k, &k, out);
    printf("  k given transposed: \"%s\"  %s\n", attn_last_error(),
           mark(status == ATTN_ERR_SHAPE));
}

/* The same bytes as KEEP and as DROP: both legal, so the caller says which. */
static void polarity(const attn_tensor *q, const attn_tensor *k,
                     const attn_tensor *v, const attn_tensor *causal)
{
    unsigned char bytes[25];
    attn_mask mask;
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    attn_tensor out = like(causal);
    double right, inverted;

    must(attn_mask_init(&mask, ATTN_MASK_KEEP, ATTN_U8, bytes, 1, 1, 5, 5));
    must(attn_mask_causal(&mask, 0));
    params.masks = &mask;
    params.num_masks = 1;
    must(attn_sdpa(NULL, &params, q, k, v, &out));
    right = apart(&out, causal, count_of(causal));
    mask.kind = ATTN_MASK_DROP;
    must(attn_sdpa(NULL, &params, q, k, v, &out));
    inverted = apart(&out, causal, count_of(causal));
    printf("  a causal mask as KEEP is off by %.1e, inverted by %.1f  %s\n",
           right, inverted, mark(right <= 4.5e-16 && inverted > 0.1));
    free(out.data);
}

/* Softmax over the queries instead of the keys. */
static void wrong_axis(const attn_tensor *q, const attn_tensor *k)
{
    double scores[25] = {0}, deviation;
    attn_tensor view, columns;

    must(attn_view_matrix(&view, ATTN_F64, scores, 5, 5, 5));
    must(attn_linear(NULL, ATTN_WEIGHT_OUT_IN, q, k, NULL, &view));
    columns = view; /* transposed by its strides */
    columns.stride[2] = 1;
    columns.stride[3] = 5;
    must(attn_softmax(&columns, &columns, NULL));
    must(attn_weights_check(&view, &deviation, NULL));
    printf("  softmax over the wrong axis: a row sum is off by %.2f  %s\n",
           deviation, mark(deviation > 0.01));
}

static void large_scores(void)
{
    float x[] = {-1802, -1801, -1800, 1802, 1801, 1800};
    attn_tensor rows;
    double deviation;

    must(attn_view_matrix(&rows, ATTN_F32, x, 2, 3, 3));
    must(attn_softmax(&rows, &rows, NULL));
    must(attn_weights_check(&rows, &deviation, NULL));
    printf("  float32 scores around -1802 and 1802: rows sum to 1 within "
           "%.1e  %s\n",
           deviation, mark(deviation <= 5e-7));
}

static void what_goes_wrong(void)
{
    const char *folder = "article_causal_f64";
    struct npy files[4];
    attn_tensor q = stored(folder, "q.npy", &files[0]);
    attn_tensor k = stored(folder, "k.npy", &files[1]);
    attn_tensor v = stored(folder, "v.npy", &files[2]);
    attn_tensor out = stored(folder, "out.npy", &files[3]);

    printf("\n3. What went wrong there, here\n");
    not_transposed(&q, &out);
    polarity(&q, &k, &v, &out);
    wrong_axis(&q, &k);
    large_scores();
    for (int n = 0; n < 4; n++)
        npy_free(&files[n]);
}

/* ------------------------------------------------------------ Row loop -- */

#define LEN 128
#define WIDTH 64

/* One head in both precisions; what is not used costs nothing. */
struct race {
    attn_tensor q, k, v, out;
    void *work;
    size_t work_bytes;
    void *scores;
};

static void run_library(void *arg)
{
    const struct race *r = arg;
    must(attn_sdpa_work(NULL, NULL, &r->q, &r->k, &r->v, &r->out, r->work,
                        r->work_bytes));
}

static void run_loop(void *arg)
{
    const struct race *r = arg;
    if (r->q.dtype == ATTN_F64)
        row_loop_f64(LEN, LEN, WIDTH, WIDTH, 1 / sqrt(WIDTH), 0, r->q.data,
                     WIDTH, r->k.data, WIDTH, r->v.data, WIDTH, r->out.data,
                     WIDTH, r->scores);
    else
        row_loop_f32(LEN, LEN, WIDTH, WIDTH, 1 / sqrtf(WIDTH), 0, r->q.data,
                     WIDTH, r->k.data, WIDTH, r->v.data, WIDTH, r->out.data,
                     WIDTH, r->scores);
}

/* Numbers in [-1.7, 1.7] of variance about 1, the same in every run. */
static attn_tensor filled(attn_dtype dtype, uint32_t seed)
{
    size_t count = LEN * WIDTH;
    double *f64 = take(count * sizeof(double));
    float *f32 = (float *)(void *)f64;
    attn_tensor view;

    for (size_t n = 0; n < count; n++) {
        double value;
        seed = seed * 1664525u + 1013904223u;
        value = ((double)(seed >> 8) / 8388608 - 1) * 1.7;
        if (dtype == ATTN_F64)
            f64[n] = value;
        else
            f32[n] = (float)value;
    }
    must(attn_view_bhtd(&view, dtype, f64, 1, 1, LEN, WIDTH));
    return view;
}

static void race(attn_dtype dtype)
{
    struct race library = {.q = filled(dtype, 1),
                           .k = filled(dtype, 2),
                           .v = filled(dtype, 3),
                           .out = filled(dtype, 4),
                           .scores = take(LEN * sizeof(double))};
    struct race loop = library;
    const struct timing_limits limits = {8, 4e-3, 1.0, 0};
    struct timing_task tasks[2] = {{run_loop, &loop}, {run_library, &library}};
    struct timing times[2];
    size_t alignment;
    char *memory;
    double off;

    must(attn_sdpa_workspace(NULL, NULL, &library.q, &library.k, &library.v,
                             &library.out, &library.work_bytes, &alignment));
    memory = take(library.work_bytes + alignment);
    library.work =
        memory + (alignment - (size_t)((uintptr_t)memory % alignment));
    loop.out = filled(dtype, 5);
    run_library(&library);
    run_loop(&loop);
    off = apart(&library.out, &loop.out, LEN * WIDTH);
    /* Compared before anything is timed. */
    printf("  float%s  outputs differ by %.1e  %s\n",
           dtype == ATTN_F64 ? "64" : "32", off,
           mark(off <= (dtype == ATTN_F64 ? 4e-15 : 2e-6)));
    timing_compare(tasks, 2, &limits, times);
    printf("           row loop %.3f ms, libattn %.3f ms: %.1f times faster\n",
           times[0].min / 1e6, times[1].min / 1e6, times[0].min / times[1].min);
    free(memory);
    free(library.q.data);
    free(library.k.data);
    free(library.v.data);
    free(library.out.data);
    free(library.scores);
    free(loop.out.data);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        source_dir = argv[1];
    printf("%s\n%s\n", attn_build_info(), attn_blas_info());
    table();
    five_tokens();
    what_goes_wrong();
    printf("\n4. A loop over rows against whole-matrix products, T=%d, d=%d "
           "(article: 5.4 times)\n",
           LEN, WIDTH);
    race(ATTN_F64);
    race(ATTN_F32);
    if (failures)
        printf("\n%d figures are WRONG\n", failures);
    else
        printf("\nAll figures are as published.\n");
    return failures ? 1 : 0;
}
