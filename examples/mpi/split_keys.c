/*
 * One long sequence, its keys and values split over processes.
 *
 * Every process holds a part of the keys and values and sees all queries. It
 * runs attn_sdpa over its part, which gives an output O and the log-sum-exp L
 * of every row; (O, L) is all that has to travel, whatever the number of keys.
 * The first process gathers these and merges them with attn_merge. It then
 * does the whole by itself and compares.
 *
 *   mpirun -n 3 split_keys
 */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <mpi.h>

#include <attn.h>

enum { H = 4, HKV = 2, T = 1000, D = 64 };

/* Values are at most 1, so outputs are compared in units of the last place of
 * 1. Scores reach 4 here, where a unit is 4 times as large, and are sums of 64
 * products that a BLAS may add in any order. */
static const double most_units = 32;

static void fail(const char *what)
{
    fprintf(stderr, "%s\n", what);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static void must(attn_status status)
{
    if (status)
        fail(attn_last_error());
}

static float *numbers(size_t count)
{
    float *x = malloc((count > 0 ? count : 1) * sizeof *x);

    if (!x)
        fail("out of memory");
    return x;
}

/* Rows [from, from + len) of all heads of a (1,heads,T,D) tensor that no
 * process needs to hold in full. */
static float *make_rows(int64_t heads, int64_t from, int64_t len, double phase)
{
    float *x = numbers((size_t)(heads * len * D));

    for (int64_t h = 0; h < heads; h++)
        for (int64_t t = 0; t < len; t++)
            for (int64_t d = 0; d < D; d++) {
                const int64_t n = (h * T + from + t) * D + d;
                x[(h * len + t) * D + d] = (float)sin(phase + 1.7 * (double)n);
            }
    return x;
}

/* Causal attention of all queries over the keys from .. from + len - 1. */
static void attend(const float *queries, int64_t from, int64_t len, float *out,
                   float *lse)
{
    float *keys = make_rows(HKV, from, len, 1);
    float *values = make_rows(HKV, from, len, 2);
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    attn_tensor q, k, v, o, l;

    must(attn_view_bhtd(&q, ATTN_F32, queries, 1, H, T, D));
    must(attn_view_bhtd(&k, ATTN_F32, keys, 1, HKV, len, D));
    must(attn_view_bhtd(&v, ATTN_F32, values, 1, HKV, len, D));
    must(attn_view_bhtd(&o, ATTN_F32, out, 1, H, T, D));
    must(attn_view_bhtd(&l, ATTN_F32, lse, 1, H, T, 1));
    /* Key 0 of this part is key `from` of the sequence, so query 0 stands that
     * far before it. Queries that see none of these keys get O = 0, L = -inf,
     * and count for nothing in the merge. */
    params.causal = 1;
    params.align = ATTN_ALIGN_OFFSET;
    params.q_offset = -from;
    params.lse = &l;
    must(attn_sdpa(NULL, &params, &q, &k, &v, &o));
    free(keys);
    free(values);
}

/* Merges the parts into the first of them. */
static void merge(int parts, float *outs, float *lses)
{
    attn_tensor *o = malloc((size_t)parts * sizeof *o);
    attn_tensor *l = malloc((size_t)parts * sizeof *l);

    if (!o || !l)
        fail("out of memory");
    for (int p = 0; p < parts; p++) {
        must(attn_view_bhtd(&o[p], ATTN_F32, outs + p * (H * T * D), 1, H, T,
                            D));
        must(attn_view_bhtd(&l[p], ATTN_F32, lses + p * (H * T), 1, H, T, 1));
    }
    must(attn_merge(NULL, parts, o, l, &o[0], &l[0]));
    free(o);
    free(l);
}

/* The largest difference, in units of the last place of max(1, |b|). */
static double units_apart(const float *a, const float *b, int count)
{
    double most = 0;

    for (int n = 0; n < count; n++) {
        const double x = (double)a[n];
        const double y = (double)b[n];
        /* Equal infinities are the same; their difference is not a number. */
        const double apart =
            a[n] == b[n]
                ? 0
                : fabs(x - y) / (fmax(1, fabs(y)) * (double)FLT_EPSILON);
        if (!(apart <= most))
            most = apart; /* NaN too */
    }
    return most;
}

/* On the first process: merged against all keys at once. */
static int is_whole(int parts, const float *q, const float *merged,
                    const float *merged_lse)
{
    float *out = numbers(H * T * D);
    float *lse = numbers(H * T);
    double out_units, lse_units;

    attend(q, 0, T, out, lse);
    out_units = units_apart(merged, out, H * T * D);
    lse_units = units_apart(merged_lse, lse, H * T);
    printf("%d keys over %d processes against one: outputs %.1f units of the "
           "last place apart, log-sum-exps %.1f\n",
           (int)T, parts, out_units, lse_units);
    free(out);
    free(lse);
    return out_units <= most_units && lse_units <= most_units;
}

int main(int argc, char **argv)
{
    int rank, size, good = 0;
    float *q, *out, *lse, *outs = NULL, *lses = NULL;
    int64_t from, to;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);

    q = rank == 0 ? make_rows(H, 0, T, 0) : numbers(H * T * D);
    MPI_Bcast(q, H * T * D, MPI_FLOAT, 0, MPI_COMM_WORLD);

    from = (int64_t)T * rank / size;
    to = (int64_t)T * (rank + 1) / size;
    out = numbers(H * T * D);
    lse = numbers(H * T);
    attend(q, from, to - from, out, lse);

    if (rank == 0) {
        outs = numbers((size_t)size * H * T * D);
        lses = numbers((size_t)size * H * T);
    }
    MPI_Gather(out, H * T * D, MPI_FLOAT, outs, H * T * D, MPI_FLOAT, 0,
               MPI_COMM_WORLD);
    MPI_Gather(lse, H * T, MPI_FLOAT, lses, H * T, MPI_FLOAT, 0,
               MPI_COMM_WORLD);
    if (rank == 0) {
        merge(size, outs, lses);
        good = is_whole(size, q, outs, lses);
    }
    MPI_Bcast(&good, 1, MPI_INT, 0, MPI_COMM_WORLD);

    free(q);
    free(out);
    free(lse);
    free(outs);
    free(lses);
    MPI_Finalize();
    return good ? 0 : 1;
}
