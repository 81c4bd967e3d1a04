/*
 * Timing of several contenders side by side.
 *
 * Every contender runs in batches. The iteration count of a batch is doubled
 * until the fastest of the repeats lasts at least the minimum time; the
 * repeats go round robin (a b c a b c ...), so that a change of the clock or a
 * noisy neighbour meets all contenders alike. The minimum is the figure to
 * quote; median and spread say how quiet the machine was.
 *
 * Header only, because programs that link nothing of the bench use it too.
 * Includers define _POSIX_C_SOURCE (199309L or later).
 */
#ifndef BENCH_TIMING_H
#define BENCH_TIMING_H

#include <stdint.h>
#include <string.h>
#include <time.h>

#define TIMING_MAX_REPEATS 64

/* One contender: run(arg) is one iteration. */
struct timing_task {
    void (*run)(void *arg);
    void *arg;
};

/* Nanoseconds for one iteration. */
struct timing {
    double min;
    double median;
    double spread; /* the largest repeat minus the smallest */
    /* Median over the rounds of its time over that of the first task: what
     * disturbs a round mostly disturbs both. */
    double ratio;
    int64_t iterations;
    int repeats;
};

struct timing_limits {
    int repeats;        /* at most TIMING_MAX_REPEATS */
    double min_seconds; /* the fastest repeat lasts at least that */
    double max_seconds; /* when spent, no repeat after 2 begins; 0: no limit */
    /* 1: CPU time of the calling thread instead of time that passes. On a
     * machine that others keep busy it leaves out what they take; it is of no
     * use for work that is done on several threads. */
    int cpu_time;
};

static inline double timing_read(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static inline double timing_now(void)
{
    return timing_read(CLOCK_MONOTONIC);
}

/* Seconds of one batch. */
static inline double timing_batch(const struct timing_task *task,
                                  int64_t iterations, int cpu_time)
{
    clockid_t clock = cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    double start = timing_read(clock);
    for (int64_t n = 0; n < iterations; n++)
        task->run(task->arg);
    return timing_read(clock) - start;
}

/* Doubles the count until one batch is long enough. The first batch is the
 * warm-up: it counts only if it was already long enough alone. */
static inline int64_t timing_calibrate(const struct timing_task *task,
                                       const struct timing_limits *limits)
{
    int64_t iterations = 1;
    while (timing_batch(task, iterations, limits->cpu_time) <
           limits->min_seconds)
        iterations *= 2;
    return iterations;
}

/* Insertion sort: a few dozen numbers at most. */
static inline void timing_sort(double *values, int count)
{
    for (int n = 1; n < count; n++) {
        double value = values[n];
        int at = n;
        for (; at > 0 && values[at - 1] > value; at--)
            values[at] = values[at - 1];
        values[at] = value;
    }
}

static inline void timing_summary(double *seconds, int count,
                                  int64_t iterations, struct timing *out)
{
    double unit = 1e9 / (double)iterations;
    timing_sort(seconds, count);
    out->min = seconds[0] * unit;
    out->median = 0.5 * (seconds[(count - 1) / 2] + seconds[count / 2]) * unit;
    out->spread = (seconds[count - 1] - seconds[0]) * unit;
    out->iterations = iterations;
    out->repeats = count;
}

/* Median of a[n] / b[n]. */
static inline double timing_ratio(const double *a, const double *b, int count)
{
    double ratios[TIMING_MAX_REPEATS];
    for (int n = 0; n < count; n++)
        ratios[n] = a[n] / b[n];
    timing_sort(ratios, count);
    return 0.5 * (ratios[(count - 1) / 2] + ratios[count / 2]);
}

#define TIMING_MAX_TASKS 8

/* Times count (at most TIMING_MAX_TASKS) tasks against each other. */
static inline void timing_compare(const struct timing_task *tasks, int count,
                                  const struct timing_limits *limits,
                                  struct timing *results)
{
    static double seconds[TIMING_MAX_TASKS][TIMING_MAX_REPEATS];
    int64_t iterations[TIMING_MAX_TASKS];
    double start = timing_now();
    int short_of_time = 0;

    for (int t = 0; t < count; t++)
        iterations[t] = timing_calibrate(&tasks[t], limits);
    for (int done = 0; !done;) {
        int repeat = 0;
        done = 1;
        do {
            for (int n = 0; n < count; n++) {
                /* A different one begins each round. */
                int t = (n + repeat) % count;
                seconds[t][repeat] =
                    timing_batch(&tasks[t], iterations[t], limits->cpu_time);
            }
            repeat++;
            short_of_time = limits->max_seconds > 0 &&
                            timing_now() - start > limits->max_seconds;
        } while (repeat < limits->repeats && (repeat < 2 || !short_of_time));
        for (int t = 0; t < count; t++)
            results[t].ratio = timing_ratio(seconds[t], seconds[0], repeat) *
                               (double)iterations[0] / (double)iterations[t];
        for (int t = 0; t < count; t++) {
            timing_summary(seconds[t], repeat, iterations[t], &results[t]);
            if (results[t].min * (double)iterations[t] <
                    1e9 * limits->min_seconds &&
                !short_of_time) {
                iterations[t] *= 2;
                done = 0;
            }
        }
    }
}

#endif
