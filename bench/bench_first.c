/*
 * The first table: what whole-matrix products gain over a loop over rows, on
 * the smallest shape where it matters (one head, T = 128, d = 64).
 */
#define _POSIX_C_SOURCE 200112L

#include "bench.h"

static int first_row(attn_dtype dtype, const struct bench_options *options)
{
    const struct bench_shape shape = {.name = "first",
                                      .batch = 1,
                                      .heads = 1,
                                      .kv_heads = 1,
                                      .q_len = 128,
                                      .kv_len = 128,
                                      .width = 64,
                                      .v_width = 64,
                                      .dtype = dtype};
    struct bench_problem problem;
    struct timing_task tasks[TIMING_MAX_TASKS];
    struct timing times[TIMING_MAX_TASKS];
    struct bench_error errors[TIMING_MAX_TASKS];

    if (bench_problem_create(&problem, &shape, 1))
        return 1;
    for (int n = 0; n < bench_num_engines; n++) {
        if (bench_verify(&bench_engines[n], &problem, &errors[n])) {
            printf("%s: error %.1e is beyond %.1e; nothing was timed\n",
                   bench_engines[n].name, errors[n].max,
                   bench_error_bound(&shape));
            bench_problem_destroy(&problem);
            return 1;
        }
        tasks[n] = (struct timing_task){bench_engines[n].run, &problem};
    }
    timing_compare(tasks, bench_num_engines, &options->limits, times);
    for (int n = 0; n < bench_num_engines; n++)
        printf("  %-4s %-12s %10.1f %10.1f %10.1f %9.1f %9.1f x %10.1e\n",
               bench_dtype_name(dtype), bench_engines[n].name,
               times[n].min / 1e3, times[n].median / 1e3, times[n].spread / 1e3,
               4.0 * 128 * 128 * 64 / times[n].min,
               times[ENGINE_ROW_LOOP].min / times[n].min, errors[n].max);
    bench_problem_destroy(&problem);
    return 0;
}

int bench_run_first(const struct bench_options *options)
{
    int wrong;

    printf("\nRow by row against whole-matrix products: B=H=1, T=128, d=64, one"
           " thread\n");
    printf("  %-4s %-12s %10s %10s %10s %9s %11s %10s\n", "type", "engine",
           "min us", "median us", "spread us", "GFLOP/s", "speed", "error");
    wrong = first_row(ATTN_F64, options);
    wrong += first_row(ATTN_F32, options);
    printf("  GFLOP/s = 4 T^2 d / min; speed = row-loop / engine; error: "
           "largest difference\n  from the formula in long double, checked "
           "before anything is timed\n");
    return wrong;
}
