/*
 * attn_bench: how fast libattn is here, beside what the machine can do.
 *
 *   attn_bench                    first table, limits, bars, all shapes
 *   attn_bench --quick            the same, smaller: a minute or so
 *   attn_bench --shape 1,12,12,512,512,64 --causal --compare
 *   attn_bench --backward         training: forward and its gradients
 *   attn_bench --memory           growth of the process at T = 65536
 *
 * Speed decides no exit status: 1 means a wrong result, 2 a wrong option.
 */
#define _POSIX_C_SOURCE 200112L

#include "bench.h"

#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: attn_bench [options]\n"
    "  --shape B,Hq,Hkv,Tq,Tk,D[,Dv]  this shape instead of all the tables\n"
    "  --causal                       the last query sees all keys\n"
    "  --dtype f32|f64                of --shape (f32)\n"
    "  --layout bhtd|bthd|packed      of --shape (bhtd)\n"
    "  --mask none|keep|add|padding   of --shape (none)\n"
    "  --feature NAME                 of --shape (none): softcap, alibi, "
    "sink,\n"
    "                                 open-window, window, lse, diagnose,\n"
    "                                 weights, segments, blocks, starts,\n"
    "                                 pages-16, pages-64, bf16, ragged\n"
    "  --backward                     gradients: of --shape, or of a list of\n"
    "                                 shapes (forward too), or their --bars\n"
    "  --compare                      also the row loop and plain CBLAS calls\n"
    "  --threads N                    threads of libattn (1)\n"
    "  --repeats N                    of which the fastest counts (8)\n"
    "  --min-time MS                  of the fastest repeat (10)\n"
    "  --max-time S                   no further repeat after that (4)\n"
    "  --max-mib N, --max-gflop N     leave larger shapes of the list out\n"
    "  --cpu-time                     of the thread, for a busy machine\n"
    "  --csv FILE, --json FILE        the rows, for programs\n"
    "  --first, --bars, --shapes      only that table\n"
    "  --features                     only the bars of features\n"
    "  --list                         print the list of shapes\n"
    "  --memory [T]                   scratch and growth at T (65536)\n"
    "  --quick                        fewer repeats, no large shapes\n";

#define PART_FIRST 1
#define PART_BARS 2
#define PART_SHAPES 4
#define PART_ONE 8
#define PART_MEMORY 16
#define PART_LIST 32
#define PART_FORCED 64
#define PART_FEATURES 128

struct command {
    struct bench_options options;
    struct bench_shape shape;
    int parts;
    int64_t memory_len;
};

static void fail(const char *option)
{
    fprintf(stderr, "attn_bench: cannot use %s\n%s", option, usage);
    exit(2);
}

/* ------------------------------------------------------------- Options -- */

static double number(const char *option, const char *text, double least)
{
    char *end = NULL;
    double value = text ? strtod(text, &end) : 0;
    if (!text || end == text || *end || !(value >= least) || value > 1e15)
        fail(option);
    return value;
}

/* Index of text in names, or no return. */
static int choice(const char *option, const char *text,
                  const char *const *names)
{
    for (int n = 0; text && names[n]; n++)
        if (!strcmp(text, names[n]))
            return n;
    fail(option);
    return 0;
}

static FILE *open_for(const char *option, const char *path)
{
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file)
        fail(option);
    return file;
}

static void parse_shape(const char *text, struct bench_shape *shape)
{
    int64_t *const sizes[] = {&shape->batch,  &shape->heads,  &shape->kv_heads,
                              &shape->q_len,  &shape->kv_len, &shape->width,
                              &shape->v_width};
    int count = 0;

    while (text && count < 7) {
        char *end;
        long long size = strtoll(text, &end, 10);
        if (end == text || size < 1 || size > 1000000000)
            fail("--shape");
        *sizes[count++] = size;
        text = *end == ',' ? end + 1 : NULL;
        if (!text && *end)
            fail("--shape");
    }
    if (count == 6)
        shape->v_width = shape->width;
    if (count < 6 || text || shape->heads % shape->kv_heads)
        fail("--shape");
    shape->name = "shape";
}

/* Options of the shape. Returns how many arguments were used, 0 if none. */
static int parse_shape_option(const char *name, const char *value,
                              struct bench_shape *shape)
{
    static const char *const dtypes[] = {"f32", "f64", NULL};
    static const char *const layouts[] = {"bhtd", "bthd", "packed", NULL};
    static const char *const masks[] = {"none", "keep", "add", "padding", NULL};
    const char *features[NUM_FEATURES + 1] = {NULL};

    for (int n = 0; n < NUM_FEATURES; n++)
        features[n] = bench_feature_name((enum bench_feature)n);
    if (!strcmp(name, "--causal")) {
        shape->causal = 1;
        return 1;
    }
    if (!strcmp(name, "--backward")) {
        shape->backward = 1;
        return 1;
    }
    if (!strcmp(name, "--shape"))
        parse_shape(value, shape);
    else if (!strcmp(name, "--dtype"))
        shape->dtype = choice(name, value, dtypes) ? ATTN_F64 : ATTN_F32;
    else if (!strcmp(name, "--layout"))
        shape->layout = (enum bench_layout)choice(name, value, layouts);
    else if (!strcmp(name, "--mask"))
        shape->mask = (enum bench_mask)choice(name, value, masks);
    else if (!strcmp(name, "--feature"))
        shape->feature = (enum bench_feature)choice(name, value, features);
    else
        return 0;
    return 2;
}

static int parse_limit_option(const char *name, const char *value,
                              struct bench_options *o)
{
    if (!strcmp(name, "--threads"))
        o->threads = (int)number(name, value, 1);
    else if (!strcmp(name, "--repeats"))
        o->limits.repeats = (int)number(name, value, 1);
    else if (!strcmp(name, "--min-time"))
        o->limits.min_seconds = 1e-3 * number(name, value, 0);
    else if (!strcmp(name, "--max-time"))
        o->limits.max_seconds = number(name, value, 0);
    else if (!strcmp(name, "--max-mib"))
        o->max_bytes = 1048576 * number(name, value, 0);
    else if (!strcmp(name, "--max-gflop"))
        o->max_flops = 1e9 * number(name, value, 0);
    else if (!strcmp(name, "--csv"))
        o->csv = open_for(name, value);
    else if (!strcmp(name, "--json"))
        o->json = open_for(name, value);
    else
        return 0;
    return 2;
}

static int parse_part_option(const char *name, const char *value,
                             struct command *c)
{
    static const struct {
        const char *name;
        int part;
    } parts[] = {{"--first", PART_FIRST},      {"--bars", PART_BARS},
                 {"--shapes", PART_SHAPES},    {"--list", PART_LIST},
                 {"--memory", PART_MEMORY},    {"--bars-forced", PART_FORCED},
                 {"--features", PART_FEATURES}};

    for (size_t n = 0; n < sizeof(parts) / sizeof(parts[0]); n++)
        if (!strcmp(name, parts[n].name))
            c->parts |= parts[n].part;
    if (!strcmp(name, "--shape"))
        c->parts |= PART_ONE;
    if (!strcmp(name, "--compare"))
        c->options.compare = 1;
    if (!strcmp(name, "--cpu-time"))
        c->options.limits.cpu_time = 1;
    if (!strcmp(name, "--memory") && value && value[0] != '-') {
        c->memory_len = (int64_t)number(name, value, 1);
        return 2;
    }
    return 1;
}

static void set_quick(struct bench_options *o)
{
    o->quick = 1;
    o->limits = (struct timing_limits){4, 2e-3, 0.5, 0};
    o->max_bytes = 150.0 * 1048576;
    o->max_flops = 8e9;
}

static int is_known(const char *name)
{
    static const char *const flags[] = {
        "--quick",  "--compare", "--cpu-time", "--first",       "--bars",
        "--shapes", "--list",    "--memory",   "--bars-forced", "--features"};
    for (size_t n = 0; n < sizeof(flags) / sizeof(flags[0]); n++)
        if (!strcmp(name, flags[n]))
            return 1;
    return 0;
}

static void parse(int argc, char **argv, struct command *c)
{
    /* First, so that other options can be stricter or looser than it. */
    for (int n = 1; n < argc; n++)
        if (!strcmp(argv[n], "--quick"))
            set_quick(&c->options);
    for (int n = 1; n < argc;) {
        const char *value = n + 1 < argc ? argv[n + 1] : NULL;
        int part = parse_part_option(argv[n], value, c);
        int used = parse_shape_option(argv[n], value, &c->shape);
        if (!used)
            used = parse_limit_option(argv[n], value, &c->options);
        if (!used && is_known(argv[n]))
            used = part;
        if (!used)
            fail(argv[n]);
        n += used;
    }
    if (c->options.limits.repeats > TIMING_MAX_REPEATS)
        c->options.limits.repeats = TIMING_MAX_REPEATS;
    if (c->options.threads > 64)
        fail("--threads");
    c->options.backward = c->shape.backward;
    if (!c->parts)
        c->parts = c->options.backward ? PART_SHAPES
                                       : PART_FIRST | PART_BARS | PART_SHAPES;
    if (c->shape.layout == LAYOUT_PACKED &&
        (c->shape.heads != c->shape.kv_heads ||
         c->shape.q_len != c->shape.kv_len ||
         c->shape.width != c->shape.v_width))
        fail("--layout packed with Hq, Tq, D unlike Hkv, Tk, Dv");
}

/* ---------------------------------------------------------------- Main -- */

static void print_peaks(const struct bench_peaks *p)
{
    printf("\nLimits of this machine, now (%s):\n", bench_probe_fma_name());
    printf("  FMA peak of a core    f32 %7.1f   f64 %7.1f  GFLOP/s\n",
           p->fma[ATTN_F32], p->fma[ATTN_F64]);
    printf("  cblas_?gemm 1024^3    f32 %7.1f   f64 %7.1f  GFLOP/s, one BLAS "
           "thread\n",
           p->gemm[ATTN_F32], p->gemm[ATTN_F64]);
    printf("  memory read           one thread %.1f, %d thread%s %.1f GB/s\n",
           p->read_one, p->threads, p->threads > 1 ? "s" : "", p->read_all);
}

static void print_setup(const struct bench_options *o)
{
    int blas_threads = bench_blas_threads(0);

    printf("library  %s\nblas     %s\n", attn_build_info(), attn_blas_info());
    printf("threads  libattn %d, BLAS ", o->threads);
    if (blas_threads > 0)
        printf("%d\n", blas_threads);
    else
        printf("unknown\n");
    printf("timing   fastest of %d repeats, each of at least %.0f ms, "
           "contenders in turn%s\n",
           o->limits.repeats, 1e3 * o->limits.min_seconds,
           o->limits.cpu_time ? "; CPU time where one thread works" : "");
}

static int run(struct command *c)
{
    struct bench_peaks peaks;
    int wrong = 0;

    print_setup(&c->options);
    if (c->parts & PART_FIRST)
        wrong += bench_run_first(&c->options);
    if (c->parts & PART_BARS)
        bench_run_bars(&c->options);
    if (c->parts & PART_FEATURES)
        bench_run_feature_bars(&c->options);
    if (!(c->parts & (PART_ONE | PART_SHAPES)))
        return wrong;
    bench_probe_all(&peaks, c->options.threads, &c->options.limits);
    print_peaks(&peaks);
    bench_table_open(&c->options, &peaks);
    if (c->parts & PART_ONE) {
        bench_table_header();
        wrong += bench_run_shape(&c->shape, &peaks, &c->options);
    } else {
        wrong += bench_run_list(&peaks, &c->options);
    }
    bench_table_close(&c->options);
    return wrong;
}

int main(int argc, char **argv)
{
    struct command c = {.options = {.threads = 1,
                                    .limits = {8, 10e-3, 4, 0},
                                    .max_bytes = 3072.0 * 1048576,
                                    .max_flops = 1.2e12},
                        .shape = {.dtype = ATTN_F32},
                        .memory_len = 65536};

    if (argc > 1 && !strcmp(argv[1], "--help")) {
        fputs(usage, stdout);
        return 0;
    }
    parse(argc, argv, &c);
    if (c.parts & PART_LIST) {
        bench_print_list(&c.options);
        return 0;
    }
    if (c.parts & PART_MEMORY)
        return bench_run_memory(c.memory_len);
    if (c.parts & PART_FORCED) {
        bench_run_bars_forced(&c.options);
        return 0;
    }
    return run(&c) ? 1 : 0;
}
