/*
 * Limits of the machine, measured in the run that quotes them: a figure from
 * another day, or from a quieter hour, would make every ratio meaningless.
 */
#define _GNU_SOURCE /* RTLD_DEFAULT */

#include "bench.h"

#include <cblas.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* --------------------------------------------------------- BLAS threads -- */

/* The entry points differ by library and need not exist, hence dlsym. POSIX
 * promises that an object pointer from dlsym can hold a function. */
static void *symbol(const char *name, void *function, size_t bytes)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    memcpy(function, &found, bytes);
    return found;
}

int bench_blas_threads(int threads)
{
    int (*get)(void);
    void (*set)(int);
    long (*bli_get)(void);
    void (*bli_set)(long);
    int before;

    if (symbol("openblas_get_num_threads", &get, sizeof(get)) &&
        symbol("openblas_set_num_threads", &set, sizeof(set))) {
        before = get();
        if (threads > 0)
            set(threads);
        return before;
    }
    if (symbol("bli_thread_get_num_threads", &bli_get, sizeof(bli_get)) &&
        symbol("bli_thread_set_num_threads", &bli_set, sizeof(bli_set))) {
        before = (int)bli_get();
        if (threads > 0)
            bli_set(threads);
        return before > 0 ? before : 1;
    }
    return 0;
}

/* ------------------------------------------------------------- Threads -- */

#define PROBE_MAX_THREADS 64

/* body(parts + t * bytes) for t = 0 .. threads-1, each on a thread of its own,
 * the first on this one. Starting a thread costs microseconds; the bodies take
 * milliseconds. One that cannot be started runs here. */
static void on_threads(int threads, void *(*body)(void *), void *parts,
                       size_t bytes)
{
    pthread_t thread[PROBE_MAX_THREADS];
    int started[PROBE_MAX_THREADS] = {0};
    char *part = parts;

    for (int t = 1; t < threads; t++)
        started[t] =
            !pthread_create(&thread[t], NULL, body, part + (size_t)t * bytes);
    for (int t = 0; t < threads; t++)
        if (!started[t])
            body(part + (size_t)t * bytes);
    for (int t = 1; t < threads; t++)
        if (started[t])
            pthread_join(thread[t], NULL);
}

/* ------------------------------------------------------------ FMA peak -- */

/*
 * Sums held in registers, each the target of one fused multiply-add per round:
 * enough of them to cover the latency (4 cycles, at two a cycle) and few
 * enough to stay in registers. The multiplier keeps the values bounded.
 *
 * Vector extensions leave it to -ffp-contract whether a*b+c is fused, and ISO
 * mode says no; so the operations are spelled out per level.
 */
#define PEAK_ROUNDS 20000
#define PEAK_SUMS 10

static volatile double peak_sink;

/* V: vector, N: its elements, S: element; FMA(a, b, c) = a b + c. */
#define PEAK_FUNCTION(name, attributes, V, S, SET, FMA)                     \
    attributes static void name(void *unused)                               \
    {                                                                       \
        V a = SET((S)0.5), b = SET((S)1.0);                                 \
        V s0 = a, s1 = a, s2 = a, s3 = a, s4 = a;                           \
        V s5 = a, s6 = a, s7 = a, s8 = a, s9 = a;                           \
        S first;                                                            \
        (void)unused;                                                       \
        for (int n = 0; n < PEAK_ROUNDS; n++) {                             \
            s0 = FMA(s0, a, b), s1 = FMA(s1, a, b), s2 = FMA(s2, a, b);     \
            s3 = FMA(s3, a, b), s4 = FMA(s4, a, b), s5 = FMA(s5, a, b);     \
            s6 = FMA(s6, a, b), s7 = FMA(s7, a, b), s8 = FMA(s8, a, b);     \
            s9 = FMA(s9, a, b);                                             \
            __asm__ volatile(""                                             \
                             : PEAK_KEEP(s0), PEAK_KEEP(s1), PEAK_KEEP(s2), \
                               PEAK_KEEP(s3), PEAK_KEEP(s4), PEAK_KEEP(s5), \
                               PEAK_KEEP(s6), PEAK_KEEP(s7), PEAK_KEEP(s8), \
                               PEAK_KEEP(s9));                              \
        }                                                                   \
        memcpy(&first, &s0, sizeof(first));                                 \
        peak_sink = (double)first;                                          \
    }

#if defined(__x86_64__)
#include <immintrin.h>

#define PEAK_KEEP(s) "+v"(s)
#define TARGET_512 __attribute__((target("avx512f")))
#define TARGET_256 __attribute__((target("avx2,fma")))
#define MULADD_PS(a, b, c) _mm_add_ps(_mm_mul_ps(a, b), c)
#define MULADD_PD(a, b, c) _mm_add_pd(_mm_mul_pd(a, b), c)

PEAK_FUNCTION(peak_512_f32, TARGET_512, __m512, float, _mm512_set1_ps,
              _mm512_fmadd_ps)
PEAK_FUNCTION(peak_512_f64, TARGET_512, __m512d, double, _mm512_set1_pd,
              _mm512_fmadd_pd)
PEAK_FUNCTION(peak_256_f32, TARGET_256, __m256, float, _mm256_set1_ps,
              _mm256_fmadd_ps)
PEAK_FUNCTION(peak_256_f64, TARGET_256, __m256d, double, _mm256_set1_pd,
              _mm256_fmadd_pd)
#undef PEAK_KEEP
#define PEAK_KEEP(s) "+x"(s)
PEAK_FUNCTION(peak_128_f32, , __m128, float, _mm_set1_ps, MULADD_PS)
PEAK_FUNCTION(peak_128_f64, , __m128d, double, _mm_set1_pd, MULADD_PD)

static int peak_bits(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        return 512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 256;
    return 128;
}

const char *bench_probe_fma_name(void)
{
    int bits = peak_bits();
    return bits == 512 ? "AVX-512" : bits == 256 ? "AVX2" : "SSE2";
}

static void (*peak_function(attn_dtype dtype))(void *)
{
    int wide = dtype == ATTN_F64;
    switch (peak_bits()) {
    case 512:
        return wide ? peak_512_f64 : peak_512_f32;
    case 256:
        return wide ? peak_256_f64 : peak_256_f32;
    default:
        return wide ? peak_128_f64 : peak_128_f32;
    }
}

#else /* other processors: 128-bit vectors, multiply and add as they come */

typedef float vector_f32 __attribute__((vector_size(16)));
typedef double vector_f64 __attribute__((vector_size(16)));
#define PEAK_KEEP(s) "+m"(s)
#define SET_F32(x) ((vector_f32){x, x, x, x})
#define SET_F64(x) ((vector_f64){x, x})
#define MULADD(a, b, c) ((a) * (b) + (c))
PEAK_FUNCTION(peak_128_f32, , vector_f32, float, SET_F32, MULADD)
PEAK_FUNCTION(peak_128_f64, , vector_f64, double, SET_F64, MULADD)

static int peak_bits(void)
{
    return 128;
}

const char *bench_probe_fma_name(void)
{
    return "128-bit vectors";
}

static void (*peak_function(attn_dtype dtype))(void *)
{
    return dtype == ATTN_F64 ? peak_128_f64 : peak_128_f32;
}

#endif

struct timing_task bench_probe_fma(attn_dtype dtype, double *flops)
{
    struct timing_task task = {peak_function(dtype), NULL};
    *flops = 2.0 * PEAK_ROUNDS * PEAK_SUMS * peak_bits() / 8 /
             (double)bench_item_bytes(dtype);
    return task;
}

/* Two milliseconds of it, about, on each of some threads. */
#define PEAK_REPEATS 40

static void *peak_thread(void *unused)
{
    for (int n = 0; n < PEAK_REPEATS; n++)
        peak_function(ATTN_F32)(NULL);
    return unused;
}

static void run_peak_threads(void *arg)
{
    char parts[PROBE_MAX_THREADS] = {0};
    on_threads(*(int *)arg, peak_thread, parts, 1);
}

struct timing_task bench_probe_cores(int threads)
{
    static int counts[PROBE_MAX_THREADS + 1];
    struct timing_task task = {run_peak_threads, NULL};

    if (threads > PROBE_MAX_THREADS)
        threads = PROBE_MAX_THREADS;
    counts[threads] = threads;
    task.arg = &counts[threads];
    return task;
}

double bench_best_fma(attn_dtype dtype, double gflops)
{
    static double best[3];
    if (gflops > best[dtype])
        best[dtype] = gflops;
    return best[dtype];
}

/* ---------------------------------------------------------------- GEMM -- */

#define GEMM_SIZE 1024

struct gemm_arg {
    attn_dtype dtype;
    void *a, *b, *c;
};

/* One BLAS thread, for this product only: what the library's own calls do
 * under the user's setting is part of what is measured elsewhere. */
static void run_gemm(void *arg)
{
    const struct gemm_arg *g = arg;
    int threads = bench_blas_threads(1);
    int n = GEMM_SIZE;
    if (g->dtype == ATTN_F64)
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0,
                    g->a, n, g->b, n, 0.0, g->c, n);
    else
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0f,
                    g->a, n, g->b, n, 0.0f, g->c, n);
    bench_blas_threads(threads);
}

struct timing_task bench_probe_gemm(attn_dtype dtype, double *flops)
{
    static struct gemm_arg args[3]; /* kept to the end of the program */
    struct gemm_arg *g = &args[dtype];
    struct timing_task task = {run_gemm, g};
    int64_t count = (int64_t)GEMM_SIZE * GEMM_SIZE;
    size_t bytes = (size_t)count * bench_item_bytes(dtype);

    if (!g->a) {
        g->dtype = dtype;
        g->a = bench_alloc(bytes);
        g->b = bench_alloc(bytes);
        g->c = bench_alloc(bytes);
        bench_fill(dtype, g->a, count, 1);
        bench_fill(dtype, g->b, count, 2);
    }
    *flops = 2.0 * GEMM_SIZE * GEMM_SIZE * GEMM_SIZE;
    return task;
}

/* ----------------------------------------------------------- Bandwidth -- */

/* Far beyond any cache of a few cores. */
#define READ_BYTES ((size_t)256 << 20)

typedef uint64_t read_vector __attribute__((vector_size(64), aligned(64)));

struct read_part {
    const read_vector *data;
    size_t count; /* vectors, a multiple of 4 */
    uint64_t sum;
};

#if defined(__x86_64__)
__attribute__((target_clones("default", "avx2", "avx512f")))
#endif
static uint64_t
read_all(const read_vector *data, size_t count)
{
    read_vector a = data[0], b = data[1], c = data[2], d = data[3];
    for (size_t n = 4; n < count; n += 4) {
        a ^= data[n];
        b ^= data[n + 1];
        c ^= data[n + 2];
        d ^= data[n + 3];
    }
    a ^= b ^ c ^ d;
    return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

static void *read_thread(void *part)
{
    struct read_part *p = part;
    p->sum = read_all(p->data, p->count);
    return NULL;
}

struct read_arg {
    const read_vector *data;
    int threads;
};

static volatile uint64_t read_sink;

static void run_read(void *arg)
{
    const struct read_arg *r = arg;
    size_t count = READ_BYTES / sizeof(read_vector) / (size_t)r->threads & ~3ul;
    struct read_part part[PROBE_MAX_THREADS];

    for (int t = 0; t < r->threads; t++)
        part[t] = (struct read_part){r->data + (size_t)t * count, count, 0};
    on_threads(r->threads, read_thread, part, sizeof(part[0]));
    for (int t = 0; t < r->threads; t++)
        read_sink = part[t].sum;
}

struct timing_task bench_probe_read(int threads, double *bytes)
{
    static read_vector *memory; /* kept to the end of the program */
    static struct read_arg args[PROBE_MAX_THREADS + 1];
    struct timing_task task = {run_read, NULL};

    if (!memory) {
        memory = bench_alloc(READ_BYTES);
        memset(memory, 1, READ_BYTES);
    }
    if (threads > PROBE_MAX_THREADS)
        threads = PROBE_MAX_THREADS;
    args[threads] = (struct read_arg){memory, threads};
    task.arg = &args[threads];
    *bytes = (double)READ_BYTES;
    return task;
}

double bench_best_read(int threads, double gbytes)
{
    static double best[PROBE_MAX_THREADS + 1];
    int slot = threads > PROBE_MAX_THREADS ? PROBE_MAX_THREADS : threads;
    if (gbytes > best[slot])
        best[slot] = gbytes;
    return best[slot];
}

/* ----------------------------------------------------------------- All -- */

/* Work per nanosecond: GFLOP/s or GB/s. */
static double rate(struct timing_task task, double work,
                   const struct timing_limits *limits)
{
    struct timing time;
    timing_compare(&task, 1, limits, &time);
    return work / time.min;
}

void bench_probe_all(struct bench_peaks *peaks, int threads,
                     const struct timing_limits *limits)
{
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_F64};
    struct timing_limits wall = *limits;
    struct timing_task task;
    double work;

    memset(peaks, 0, sizeof(*peaks));
    peaks->threads = threads;
    for (int n = 0; n < 2; n++) {
        task = bench_probe_fma(dtypes[n], &work);
        peaks->fma[dtypes[n]] =
            bench_best_fma(dtypes[n], rate(task, work, limits));
        task = bench_probe_gemm(dtypes[n], &work);
        peaks->gemm[dtypes[n]] = rate(task, work, limits);
    }
    task = bench_probe_read(1, &work);
    peaks->read_one = bench_best_read(1, rate(task, work, limits));
    if (threads > 1)
        wall.cpu_time = 0;
    task = bench_probe_read(threads, &work);
    peaks->read_all = bench_best_read(threads, rate(task, work, &wall));
}
