/*
 * Bars of features: what each costs over the call without it, or how much of
 * that call's time is left where it hides keys. Contenders run in turn; what
 * is quoted is the ratio of the shortest times, and beside it the median of the
 * ratios of the rounds. A feature that the library refuses is printed as such.
 */
#define _POSIX_C_SOURCE 200809L

#include "bench.h"

#include <string.h>

/* ------------------------------------------------------------ Contenders -- */

/* A call without the feature and some with one, side by side. */
struct contest {
    struct bench_problem problems[TIMING_MAX_TASKS];
    struct timing_task tasks[TIMING_MAX_TASKS];
    struct timing times[TIMING_MAX_TASKS];
    double pairs[TIMING_MAX_TASKS]; /* visible */
    int count;
};

/* Adds a contender if the library does it and does it right; else prints why
 * not. The first one is what the others are compared with. */
static int enter(struct contest *c, const char *what,
                 const struct bench_shape *shape)
{
    const struct bench_engine *engine = &bench_engines[ENGINE_LIBATTN];
    struct bench_problem *p = &c->problems[c->count];
    struct bench_error error;

    if (bench_problem_create(p, shape, 1)) {
        printf("  %-54s refused: %s\n", what, attn_last_error());
        return -1;
    }
    if (bench_verify(engine, p, &error)) {
        printf("  %-54s WRONG, error %.1e is beyond %.1e\n", what, error.max,
               bench_error_bound(shape));
        bench_problem_destroy(p);
        return -1;
    }
    c->pairs[c->count] = bench_visible_pairs(p);
    c->tasks[c->count] = (struct timing_task){engine->run, p};
    return c->count++;
}

static void hold(struct contest *c, const struct bench_options *options)
{
    timing_compare(c->tasks, c->count, &options->limits, c->times);
}

static void leave(struct contest *c)
{
    while (c->count > 0)
        bench_problem_destroy(&c->problems[--c->count]);
}

/* Time of contender n over that of the first. */
static double ratio(const struct contest *c, int n)
{
    return c->times[n].min / c->times[0].min;
}

/* What to append to a line: the median of the ratios, times factor. */
static const char *median_text(const struct contest *c, int n, double factor)
{
    static char text[32];
    snprintf(text, sizeof(text), "(%.2f)", factor * c->times[n].ratio);
    return text;
}

static void print_ratio(const char *what, double bar, const struct contest *c,
                        int n)
{
    bench_print_bar(what, bar, AT_MOST, ratio(c, n), median_text(c, n, 1));
}

/* Without a bar: the share of the time, and of the scores. */
static void print_share(const char *what, const struct contest *c, int n)
{
    printf("  %-54s %10s %9.2f %-7s for %.2f of the scores\n", what, "",
           ratio(c, n), median_text(c, n, 1), c->pairs[n] / c->pairs[0]);
    fflush(stdout);
}

/* Two contenders; the line is that of `with`. 0 if they were timed. */
static int versus(struct contest *c, const char *what,
                  const struct bench_shape *without,
                  const struct bench_shape *with,
                  const struct bench_options *options)
{
    c->count = 0;
    if (enter(c, what, without) < 0)
        return -1;
    if (enter(c, what, with) < 0) {
        leave(c);
        return -1;
    }
    hold(c, options);
    return 0;
}

static struct bench_shape shape_of(attn_dtype dtype, int64_t heads, int64_t len)
{
    return (struct bench_shape){.name = "bar",
                                .batch = 1,
                                .heads = heads,
                                .kv_heads = heads,
                                .q_len = len,
                                .kv_len = len,
                                .width = 64,
                                .v_width = 64,
                                .dtype = dtype};
}

/* ----------------------------------------------------------- Bars, rows -- */

/* Features that hide nothing, all beside the same plain call. Four heads: a
 * call takes some 10 ms, and rounds follow each other quickly. */
static void cost_bars(attn_dtype dtype, const struct bench_options *options)
{
    static const struct {
        enum bench_feature feature;
        double bar;
    } rows[] = {{FEATURE_SOFTCAP, 1.1},     {FEATURE_ALIBI, 1.1},
                {FEATURE_OPEN_WINDOW, 1.1}, {FEATURE_SINK, 1.1},
                {FEATURE_LSE, 1.1},         {FEATURE_DIAGNOSTICS, 1.1},
                {FEATURE_WEIGHTS, 2.2}};
    const int num_rows = sizeof(rows) / sizeof(rows[0]);
    struct bench_shape shape = shape_of(dtype, 4, 1024);
    struct contest c = {.count = 0};
    char what[TIMING_MAX_TASKS][64];
    int at[TIMING_MAX_TASKS];

    if (enter(&c, "plain call", &shape) < 0)
        return;
    for (int n = 0; n < num_rows; n++) {
        shape.feature = rows[n].feature;
        snprintf(what[n], sizeof(what[n]), "%s / plain, %s, d=64, T=1024",
                 bench_feature_name(rows[n].feature), bench_dtype_name(dtype));
        at[n] = enter(&c, what[n], &shape);
    }
    hold(&c, options);
    for (int n = 0; n < num_rows; n++)
        if (at[n] >= 0)
            print_ratio(what[n], rows[n].bar, &c, at[n]);
    leave(&c);
}

static void window_bar(const struct bench_options *options)
{
    static const char what[] = "window of 256, causal / full time, T=8192";
    struct bench_shape full = shape_of(ATTN_F32, 1, 8192);
    struct bench_shape window = full;
    struct contest c;

    window.causal = 1;
    window.feature = FEATURE_WINDOW;
    if (versus(&c, what, &full, &window, options))
        return;
    print_ratio(what, 0.08, &c, 1);
    leave(&c);
}

/* Keys in DRAM: 32 heads over 8 of width 128. */
static void decode_bar(enum bench_feature feature, int64_t kv_len, double bar,
                       const struct bench_options *options)
{
    struct bench_shape plain = shape_of(ATTN_F32, 32, kv_len);
    struct bench_shape with;
    struct contest c;
    char what[96];

    plain.kv_heads = 8;
    plain.q_len = 1;
    plain.width = plain.v_width = 128;
    with = plain;
    with.feature = feature;
    snprintf(what, sizeof(what), "decode (32,8), d=128, Tk=%lld, %s / plain",
             (long long)kv_len, bench_feature_name(feature));
    if (versus(&c, what, &plain, &with, options))
        return;
    print_ratio(what, bar, &c, 1);
    leave(&c);
}

/* Time a visible score, of a batch of skewed lengths over one in which all have
 * the mean length. */
static void ragged_bar(const struct bench_options *options)
{
    static const char what[] =
        "a score, ragged / dense batch of the mean length";
    struct bench_shape ragged = shape_of(ATTN_F32, 12, 1024);
    struct bench_shape dense;
    struct contest c;
    double scores;

    ragged.batch = 32;
    ragged.causal = 1;
    dense = ragged;
    /* T u^3 for u from 0 to 1. */
    dense.q_len = dense.kv_len = ragged.q_len / 4;
    ragged.feature = FEATURE_RAGGED;
    if (versus(&c, what, &dense, &ragged, options))
        return;
    scores = c.pairs[0] / c.pairs[1];
    bench_print_bar(what, 1.15, AT_MOST, scores * ratio(&c, 1),
                    median_text(&c, 1, scores));
    leave(&c);
}

/* What hides keys in other ways, beside the call that sees all of them. */
static void share_row(enum bench_feature feature, int64_t len, int causal,
                      const struct bench_options *options)
{
    struct bench_shape all = shape_of(ATTN_F32, 4, len);
    struct bench_shape with;
    struct contest c;
    char what[96];

    all.causal = causal;
    with = all;
    with.feature = feature;
    snprintf(what, sizeof(what), "%s / all keys, T=%lld%s",
             bench_feature_name(feature), (long long)len,
             causal ? ", causal" : "");
    if (versus(&c, what, &all, &with, options))
        return;
    print_share(what, &c, 1);
    leave(&c);
}

void bench_run_feature_bars(const struct bench_options *given)
{
    struct bench_options more = bench_patient(given);
    const struct bench_options *options = &more;

    printf("  features: ratios of the shortest times, in brackets the medians "
           "of those of the rounds\n");
    cost_bars(ATTN_F32, options);
    cost_bars(ATTN_F64, options);
    window_bar(options);
    decode_bar(FEATURE_PAGES_16, 8192, 1.1, options);
    decode_bar(FEATURE_PAGES_64, 8192, 1.1, options);
    /* 128 MiB in 16 bits, so that both are in DRAM. */
    decode_bar(FEATURE_BF16, 32768, 0.6, options);
    ragged_bar(options);
    share_row(FEATURE_SEGMENTS, 2048, 1, options);
    share_row(FEATURE_BLOCKS, 2048, 0, options);
    share_row(FEATURE_STARTS, 1024, 0, options);
}
