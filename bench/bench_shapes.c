/*
 * The shapes: attention of published models and the odd sizes between them.
 */
#define _POSIX_C_SOURCE 200112L

#include "bench.h"

#define FULL 1
#define CAUSAL 2
#define PADDED 4 /* key lengths per batch */
#define DENSE 8  /* a dense boolean mask per head */
#define ALSO_F64 16
#define TRAINING 32 /* each with its gradients */

/* A family: every batch size with every length. Zeros end the lists. */
struct family {
    const char *name;
    int kinds;
    int64_t heads, kv_heads, width;
    int64_t batches[4];
    int64_t q_lens[8];
    int64_t kv_len; /* 0: as many keys as queries */
};

static const struct family training[] = {
    {"bert-base",
     FULL | ALSO_F64 | TRAINING,
     12,
     12,
     64,
     {1, 8},
     {128, 384, 512},
     0},
    {"vit-b", FULL | TRAINING, 12, 12, 64, {1}, {197}, 0},
    {"gpt-2",
     FULL | CAUSAL | ALSO_F64 | TRAINING,
     12,
     12,
     64,
     {1},
     {512, 1024, 2048},
     0},
    {"llama", CAUSAL | TRAINING, 32, 8, 128, {1}, {2048}, 0},
    {"d128",
     FULL | CAUSAL | ALSO_F64 | TRAINING,
     8,
     8,
     128,
     {1},
     {512, 1024, 2048},
     0},
    {"whisper-cross", FULL | TRAINING, 20, 20, 64, {1}, {448}, 1500},
    {"sd-32x32", FULL | TRAINING, 8, 8, 80, {1}, {1024}, 0},
    {"odd-length",
     FULL | CAUSAL | ALSO_F64 | TRAINING,
     12,
     12,
     64,
     {1},
     {17, 63, 65, 1000},
     0},
    {"odd-width", FULL | CAUSAL | TRAINING, 8, 8, 48, {1}, {512}, 0},
    {"odd-width", FULL | CAUSAL | TRAINING, 8, 8, 72, {1}, {512}, 0},
    {"odd-width", FULL | CAUSAL | TRAINING, 8, 8, 96, {1}, {512}, 0},
    {"odd-width", FULL | CAUSAL | TRAINING, 8, 8, 256, {1}, {512}, 0},
    {.name = NULL},
};

static const struct family families[] = {
    {"bert-base",
     FULL | PADDED | ALSO_F64,
     12,
     12,
     64,
     {1, 8, 32},
     {128, 384, 512},
     0},
    {"bert-mask", DENSE, 12, 12, 64, {1, 8}, {512}, 0},
    {"vit-b", FULL, 12, 12, 64, {1, 32}, {197}, 0},
    {"gpt-2",
     FULL | CAUSAL | ALSO_F64,
     12,
     12,
     64,
     {1, 8},
     {512, 1024, 2048},
     0},
    {"llama", FULL | CAUSAL, 32, 8, 128, {1}, {2048, 4096, 8192}, 0},
    {"llama-chunk", CAUSAL, 32, 8, 128, {1}, {512}, 8192},
    {"d128", FULL | CAUSAL | ALSO_F64, 8, 8, 128, {1}, {512, 1024, 2048}, 0},
    {"whisper", FULL, 20, 20, 64, {1, 8}, {1500}, 0},
    {"whisper-cross", FULL, 20, 20, 64, {1, 8}, {1, 16, 64, 448}, 1500},
    {"sd-64x64", FULL | CAUSAL, 8, 8, 40, {1}, {4096}, 0},
    {"sd-32x32", FULL, 8, 8, 80, {1}, {1024}, 0},
    {"sd-16x16", FULL, 8, 8, 160, {1}, {256}, 0},
    {"sd-64x64-cross", FULL, 8, 8, 40, {1}, {4096}, 77},
    {"sd-32x32-cross", FULL, 8, 8, 80, {1}, {1024}, 77},
    {"sd-16x16-cross", FULL, 8, 8, 160, {1}, {256}, 77},
    {"decode-1k", FULL | ALSO_F64, 32, 8, 128, {1, 8}, {1}, 1024},
    {"decode-4k", FULL, 32, 8, 128, {1, 8}, {1}, 4096},
    {"decode-8k", FULL, 32, 8, 128, {1, 8}, {1}, 8192},
    {"decode-16k", FULL, 32, 8, 128, {1, 8}, {1}, 16384},
    {"decode-32k", FULL, 32, 8, 128, {1, 8}, {1}, 32768},
    {"decode-mha-1k", FULL | ALSO_F64, 32, 32, 128, {1, 8}, {1}, 1024},
    {"decode-mha-4k", FULL, 32, 32, 128, {1, 8}, {1}, 4096},
    {"decode-mha-8k", FULL, 32, 32, 128, {1, 8}, {1}, 8192},
    {"decode-mha-16k", FULL, 32, 32, 128, {1, 8}, {1}, 16384},
    {"decode-mha-32k", FULL, 32, 32, 128, {1, 8}, {1}, 32768},
    {"decode-gpt2-1k", FULL, 12, 12, 64, {1, 8}, {1}, 1024},
    {"decode-gpt2-4k", FULL, 12, 12, 64, {1, 8}, {1}, 4096},
    {"decode-gpt2-8k", FULL, 12, 12, 64, {1, 8}, {1}, 8192},
    {"decode-gpt2-16k", FULL, 12, 12, 64, {1, 8}, {1}, 16384},
    {"decode-gpt2-32k", FULL, 12, 12, 64, {1, 8}, {1}, 32768},
    {"odd-length",
     FULL | CAUSAL | ALSO_F64,
     12,
     12,
     64,
     {1},
     {1, 2, 17, 63, 65, 1000},
     0},
    {"odd-width", FULL | CAUSAL, 8, 8, 48, {1}, {512}, 0},
    {"odd-width", FULL | CAUSAL, 8, 8, 72, {1}, {512}, 0},
    {"odd-width", FULL | CAUSAL, 8, 8, 96, {1}, {512}, 0},
    {"odd-width", FULL | CAUSAL, 8, 8, 256, {1}, {512}, 0},
    {.name = NULL},
};

typedef void (*shape_fn)(const struct bench_shape *shape, void *arg);

/* The kinds of one size, in single precision or double. */
static void each_kind(const struct family *f, struct bench_shape *shape,
                      shape_fn visit, void *arg)
{
    static const struct {
        int kind, causal;
        enum bench_mask mask;
    } kinds[] = {{FULL, 0, MASK_NONE},
                 {CAUSAL, 1, MASK_NONE},
                 {PADDED, 0, MASK_PADDING},
                 {DENSE, 0, MASK_KEEP}};

    for (size_t n = 0; n < sizeof(kinds) / sizeof(kinds[0]); n++) {
        if (!(f->kinds & kinds[n].kind))
            continue;
        shape->causal = kinds[n].causal;
        shape->mask = kinds[n].mask;
        for (int b = 0; b <= !!(f->kinds & TRAINING); b++) {
            shape->backward = b;
            visit(shape, arg);
        }
    }
}

static void each_of_type(const struct family *f, attn_dtype dtype,
                         shape_fn visit, void *arg)
{
    for (; f->name; f++) {
        if (dtype == ATTN_F64 && !(f->kinds & ALSO_F64))
            continue;
        for (int b = 0; f->batches[b]; b++)
            for (int t = 0; f->q_lens[t]; t++) {
                struct bench_shape shape = {.name = f->name,
                                            .batch = f->batches[b],
                                            .heads = f->heads,
                                            .kv_heads = f->kv_heads,
                                            .q_len = f->q_lens[t],
                                            .kv_len = f->kv_len ? f->kv_len
                                                                : f->q_lens[t],
                                            .width = f->width,
                                            .v_width = f->width,
                                            .dtype = dtype};
                each_kind(f, &shape, visit, arg);
            }
    }
}

static void each_shape(const struct bench_options *options, shape_fn visit,
                       void *arg)
{
    const struct family *list = options->backward ? training : families;
    each_of_type(list, ATTN_F32, visit, arg);
    each_of_type(list, ATTN_F64, visit, arg);
}

struct list_run {
    const struct bench_peaks *peaks;
    const struct bench_options *options;
    int wrong;
    int left_out;
};

static void run_one(const struct bench_shape *s, void *arg)
{
    struct list_run *run = arg;

    if (bench_problem_bytes(s) > run->options->max_bytes ||
        bench_full_flops(s) > run->options->max_flops) {
        run->left_out++;
        return;
    }
    run->wrong += bench_run_shape(s, run->peaks, run->options);
}

int bench_run_list(const struct bench_peaks *peaks,
                   const struct bench_options *options)
{
    struct list_run run = {peaks, options, 0, 0};

    bench_table_header();
    each_shape(options, run_one, &run);
    printf(
        "GF full = 2 B Hq Tq Tk (D + Dv) / min, which is 4 B H Tq Tk d for "
        "Dv = D,\nand of gradients (bwd) 2 B Hq Tq Tk (3 D + 2 Dv), 10 B H Tq "
        "Tk d;\nGF vis counts only the visible (query, key) pairs; peak%% "
        "is its share of the FMA peak\nof as many cores, timed beside each "
        "row, the best so far; GB/s = bytes of K and V / min, read%% its "
        "share\nof the read "
        "bandwidth; +med%% = median above min; error against long double\n");
    if (run.left_out)
        printf("%d shapes above %.0f MiB or %.0f GFLOP were left out "
               "(--max-mib, --max-gflop)\n",
               run.left_out, options->max_bytes / 1048576,
               options->max_flops / 1e9);
    return run.wrong;
}

static void print_one(const struct bench_shape *s, void *arg)
{
    (void)arg;
    printf("%-16s %s --shape %lld,%lld,%lld,%lld,%lld,%lld%s%s%s%s\n", s->name,
           bench_dtype_name(s->dtype), (long long)s->batch, (long long)s->heads,
           (long long)s->kv_heads, (long long)s->q_len, (long long)s->kv_len,
           (long long)s->width, s->causal ? " --causal" : "",
           s->mask == MASK_NONE ? "" : " --mask ",
           s->mask == MASK_NONE ? "" : bench_mask_name(s->mask),
           s->backward ? " --backward" : "");
}

void bench_print_list(const struct bench_options *options)
{
    each_shape(options, print_one, NULL);
}
