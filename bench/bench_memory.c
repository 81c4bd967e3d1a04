/*
 * Memory: what attention over a long sequence adds to the process.
 *
 * Scores of T = 65536 in float32 would be 16 GiB a head. The figure is the
 * high-water mark of the process after the call, less what was resident before
 * it, when inputs and output had been written to already.
 */
#define _POSIX_C_SOURCE 200112L

#include "bench.h"

#include <stdlib.h>
#include <string.h>

/* A "VmHWM:  1234 kB" line of /proc/self/status, in bytes, or -1. */
static double status_bytes(const char *key)
{
    char line[256];
    double bytes = -1;
    FILE *file = fopen("/proc/self/status", "r");

    if (!file)
        return -1;
    while (fgets(line, sizeof(line), file))
        if (!strncmp(line, key, strlen(key)))
            bytes = 1024 * strtod(line + strlen(key), NULL);
    fclose(file);
    return bytes;
}

int bench_run_memory(int64_t len)
{
    const struct bench_shape shape = {.name = "memory",
                                      .batch = 1,
                                      .heads = 1,
                                      .kv_heads = 1,
                                      .q_len = len,
                                      .kv_len = len,
                                      .width = 64,
                                      .v_width = 64,
                                      .causal = 1,
                                      .dtype = ATTN_F32};
    struct bench_problem p;
    struct bench_error error;
    double before, after, seconds;
    attn_status status;

    if (bench_problem_create(&p, &shape, 1))
        return 1;
    before = status_bytes("VmRSS:");
    seconds = timing_now();
    /* The plain call, so that its own scratch memory counts. */
    status = attn_sdpa(p.context, &p.params, &p.q, &p.k, &p.v, &p.out);
    seconds = timing_now() - seconds;
    after = status_bytes("VmHWM:");
    if (status) {
        fprintf(stderr, "attn_bench: %s\n", attn_last_error());
        return 1;
    }
    error = bench_problem_error(&p);
    printf("T=%lld, d=64, one head, float32, causal: %.1f s, error %.1e\n",
           (long long)len, seconds, error.max);
    printf("scratch_bytes %zu\n", p.work_bytes);
    if (before < 0 || after < 0)
        printf("growth not measured: no /proc/self/status\n");
    else
        printf("growth_bytes %.0f (%.2f MiB beyond inputs and output)\n",
               after - before, (after - before) / 1048576);
    bench_problem_destroy(&p);
    return error.max <= bench_error_bound(&shape) ? 0 : 1;
}
