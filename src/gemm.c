/*
 * The BLAS that runs is found at run time, as it need not be the one that was
 * linked: distributions switch libblas.so.3 and libopenblas.so.0, and programs
 * preload. Its functions that are not CBLAS are looked up in the very library
 * that cblas_sgemm comes from.
 *
 * What is known of it decides three things:
 *
 *   threads    No product may start threads of the BLAS: under ours they fight
 *              for the cores (23 to 54 GFLOP/s measured on 2 threads instead of
 *              200). OpenBLAS built on pthreads has no setting for one thread
 *              only, and that of OpenMP takes memory, so there the size of a
 *              product is what keeps it serial:
 *              interface/gemm.c starts threads above 65536 * 4 multiply-adds.
 *   safety     Debian's serial OpenBLAS is built without locks and returns
 *              wrong numbers when two threads are in its general path.
 *   integers   Built for 64-bit integers, a CBLAS reads garbage in the upper
 *              halves of ours.
 */
#define _GNU_SOURCE /* dladdr */
#include "attn_internal.h"

#include "gemm.h"

#include "cpu.h"
#include "status.h"
#include "threads.h"

#include <cblas.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SMALL_LIMIT 1000000 /* 100^3, gemm_small_kernel_permit in OpenBLAS */
#define THREAD_LIMIT 262144 /* 65536 * GEMM_MULTITHREAD_THRESHOLD of 4 */

typedef int (*get_int_fn)(void);
typedef char *(*get_text_fn)(void);
typedef void (*set_int_fn)(int);
typedef int (*exchange_int_fn)(int);

/* All there is to know of the BLAS, found once. */
static struct provider {
    bool wide_integers;
    bool is_openblas;
    bool has_small_kernels;
    bool is_blis;
    int parallel; /* OpenBLAS: 0 serial, 1 pthread, 2 OpenMP */
    get_int_fn get_num_threads;
    /* A setting of the calling thread only, and its value for one thread; set
     * by MKL's function, or read and set by OpenMP's. */
    exchange_int_fn mkl_set_num_threads_local;
    get_int_fn get_setting;
    set_int_fn set_setting;
    int one_thread;
    bool is_single;          /* known to have no threads */
    const char *better_core; /* OpenBLAS: for this processor, if not its own */
    char name[160];
} provider;

static atomic_int provider_known;

/* ------------------------------------------------------------ Detection -- */

/* A function pointer from dlsym's object pointer, as POSIX wants it. */
#define LOOK_UP(library, name, pointer)           \
    do {                                          \
        void *found = dlsym(library, name);       \
        memcpy(&(pointer), &found, sizeof found); \
    } while (0)

/* The library that cblas_sgemm comes from; NULL in a static program. */
static void *provider_library(void)
{
    void *symbol = dlsym(RTLD_DEFAULT, "cblas_sgemm");
    Dl_info where;

    if (!symbol || !dladdr(symbol, &where) || !where.dli_fname)
        return NULL;
    return dlopen(where.dli_fname, RTLD_NOLOAD | RTLD_NOW);
}

/*
 * Does this CBLAS read 64-bit integers? n is 3 in its lower half and negative
 * as a whole: with 32-bit integers the answer is the place of the largest of
 * three numbers, with 64-bit ones it is that of an empty vector. Integer
 * arguments travel in registers on the processors asked here.
 */
static bool reads_wide_integers(void)
{
#if defined(__x86_64__) || defined(__aarch64__)
    typedef size_t (*wide_fn)(int64_t, const float *, int64_t);
    static const float x[3] = {1.0f, 2.0f, 3.0f};
    size_t (*narrow)(const int, const float *, const int);
    wide_fn wide;
    int64_t n = INT64_MIN / (1 << 30) * (1 << 30) + 3;

    /* Declarations of CBLAS differ in their integer types; sizes do not. */
    {
        void (*any)(void) = (void (*)(void))cblas_isamax;
        memcpy(&narrow, &any, sizeof any);
        memcpy(&wide, &any, sizeof any);
    }
    if (narrow(3, x, 1) != 2)
        return true; /* whatever this is, it cannot be used */
    return wide(n, x, 1) != 2;
#else
    return false;
#endif
}

/* "OpenBLAS 0.3.21 ..." is at least the given version? */
static bool openblas_at_least(const char *config, int major, int minor,
                              int patch)
{
    int v[3] = {0, 0, 0};
    const char *at = strstr(config, "OpenBLAS ");

    if (!at || sscanf(at, "OpenBLAS %d.%d.%d", &v[0], &v[1], &v[2]) < 2)
        return false;
    if (v[0] != major)
        return v[0] > major;
    if (v[1] != minor)
        return v[1] > minor;
    return v[2] >= patch;
}

/*
 * The core OpenBLAS should play in place of this one, or NULL. What it does not
 * know yet it takes for Prescott, which has vectors of four floats (0.3.21 does
 * on Emerald Rapids: a fifth of the rate). Names it may have learnt since are
 * not judged.
 */
static const char *better_core(const char *core)
{
    /* Its cores of x86-64 without FMA, then those with vectors of eight. */
    static const char *const old[] = {
        "Prescott",  "Core2",  "Penryn",      "Dunnington",
        "Atom",      "Nano",   "Opteron",     "Opteron(SSE3)",
        "Barcelona", "Bobcat", "Sandybridge", "Nehalem",
        NULL};
    static const char *const half[] = {"Haswell", "Zen", NULL};
    int level = attn__cpu_level();

    for (int i = 0; old[i]; i++)
        if (level >= ATTN__LEVEL_AVX2 && strcmp(core, old[i]) == 0)
            return level >= ATTN__LEVEL_AVX512 ? "SkylakeX" : "Haswell";
    for (int i = 0; half[i]; i++)
        if (level >= ATTN__LEVEL_AVX512 && strcmp(core, half[i]) == 0)
            return "SkylakeX";
    return NULL;
}

static void detect_openblas(void *library, get_text_fn get_config)
{
    static const char *const small[] = {"SkylakeX", "Cooperlake",
                                        "SapphireRapids", "Sapphirerapids"};
    static const char *const threading[] = {"serial", "pthread", "OpenMP"};
    struct provider *p = &provider;
    get_text_fn get_core = NULL;
    get_int_fn get_parallel = NULL;
    const char *config = get_config();
    const char *core = "unknown core";

    p->is_openblas = true;
    LOOK_UP(library, "openblas_get_corename", get_core);
    LOOK_UP(library, "openblas_get_parallel", get_parallel);
    LOOK_UP(library, "openblas_get_num_threads", p->get_num_threads);
    if (get_core)
        core = get_core();
    /* One that was built for a single core has no other to play. */
    if (strstr(config, "DYNAMIC_ARCH"))
        p->better_core = better_core(core);
    /* If it cannot be asked, the careful assumption. */
    p->parallel = get_parallel ? get_parallel() : 1;
    if (p->parallel < 0 || p->parallel > 2)
        p->parallel = 1;
    if (strstr(config, "USE64BITINT"))
        p->wide_integers = true;
    /* 0.3.18 brought the small kernels of these cores. */
    if (openblas_at_least(config, 0, 3, 18))
        for (size_t i = 0; i < sizeof small / sizeof small[0]; i++)
            p->has_small_kernels |= strcmp(core, small[i]) == 0;
    (void)snprintf(p->name, sizeof p->name, "OpenBLAS %.*s, %s, core %s",
                   (int)strcspn(config + strlen("OpenBLAS "), " "),
                   config + strlen("OpenBLAS "), threading[p->parallel], core);
}

/*
 * BLIS asks OpenMP for the number of threads of BLIS_NUM_THREADS or
 * OMP_NUM_THREADS, whatever omp_set_num_threads says, but is content with one
 * where no region may be active. That limit belongs to the calling thread since
 * OpenMP 5.0, and to the process before; libgomp and LLVM's library got this
 * function at that time.
 */
static void detect_blis(void *library)
{
    struct provider *p = &provider;
    get_int_fn is_recent = NULL;

    p->is_blis = true;
    LOOK_UP(library, "omp_get_supported_active_levels", is_recent);
    if (!is_recent)
        return;
    LOOK_UP(library, "omp_get_max_active_levels", p->get_setting);
    LOOK_UP(library, "omp_set_max_active_levels", p->set_setting);
    p->one_thread = 0;
}

static void detect(void)
{
    struct provider *p = &provider;
    void *library = provider_library();
    void *scope = library ? library : RTLD_DEFAULT;
    get_text_fn get_config = NULL;
    get_int_fn blis_threads = NULL;

    LOOK_UP(scope, "openblas_get_config", get_config);
    LOOK_UP(scope, "MKL_Set_Num_Threads_Local", p->mkl_set_num_threads_local);
    LOOK_UP(scope, "bli_thread_get_num_threads", blis_threads);
    if (get_config && strncmp(get_config(), "OpenBLAS ", 9) == 0) {
        detect_openblas(scope, get_config);
    } else if (p->mkl_set_num_threads_local) {
        (void)snprintf(p->name, sizeof p->name, "MKL");
    } else {
        Dl_info where;
        void *symbol = dlsym(RTLD_DEFAULT, "cblas_sgemm");
        bool known = symbol && dladdr(symbol, &where) && where.dli_fname;
        const char *file = known ? where.dli_fname : "";
        const char *base = strrchr(file, '/');

        /* Debian's BLIS shim hides bli_*, so the path is looked at as well. */
        if (blis_threads || strstr(file, "blis"))
            detect_blis(scope);
        /* BLIS has threads only if it is told so. */
        p->is_single =
            p->is_blis || strstr(file, "/blas/") || strstr(file, "/lapack/");
        (void)snprintf(p->name, sizeof p->name, "%s (%s)",
                       p->is_blis     ? "BLIS"
                       : p->is_single ? "reference BLAS"
                                      : "unknown BLAS",
                       base ? base + 1 : "linked statically");
    }
    if (reads_wide_integers())
        p->wide_integers = true;
    /* The handle stays open: what was found in it stays valid. */
}

static const struct provider *get_provider(void)
{
    attn__run_once(&provider_known, detect);
    return &provider;
}

/* --------------------------------------------------------------- Policy -- */

/* Can the calling thread alone be kept from starting BLAS threads? */
static bool has_local_setting(const struct provider *p)
{
    return p->mkl_set_num_threads_local || (p->get_setting && p->set_setting);
}

static bool runs_one_thread(const struct provider *p)
{
    if (p->is_single || has_local_setting(p))
        return true;
    if (!p->is_openblas)
        return false;
    /* Under OpenMP the number of the thread that calls counts, and its first
     * setting takes memory, without which libgomp ends the process: there the
     * size of a product is always what keeps it serial. */
    return p->parallel == 0 || (p->parallel == 1 && p->get_num_threads &&
                                p->get_num_threads() == 1);
}

attn__blas attn__blas_policy(void)
{
    const struct provider *p = get_provider();
    attn__blas policy = {.limit = INT64_MAX};

    if (p->has_small_kernels) {
        policy.kind = ATTN__BLAS_SMALL;
        policy.limit = SMALL_LIMIT;
    } else if (!runs_one_thread(p)) {
        policy.kind = ATTN__BLAS_LIMITED;
        policy.limit = THREAD_LIMIT;
    } else {
        policy.kind = p->is_blis ? ATTN__BLAS_UNPACKED : ATTN__BLAS_FREE;
        policy.exclusive = p->is_openblas && p->parallel == 0;
    }
    /* Its general kernels only add. Before them it sets the result to zero, one
     * element a cycle (0.3.21): a fifteenth of all time at width 64. */
    policy.add_only = p->is_openblas && !p->has_small_kernels;
    return policy;
}

attn_status attn__blas_check(const char *call)
{
    const struct provider *p = get_provider();

    if (!p->wide_integers)
        return ATTN_OK;
    return attn__fail(ATTN_ERR_BLAS,
                      "%s: the loaded BLAS (%s) is built for 64-bit integers; "
                      "a CBLAS with 32-bit integers (LP64) is needed",
                      call, p->name);
}

attn__blas_guard attn__blas_enter(void)
{
    const struct provider *p = get_provider();
    attn__blas_guard guard = {0};

    if (p->has_small_kernels || !has_local_setting(p))
        return guard;
    if (p->mkl_set_num_threads_local) {
        guard.before = p->mkl_set_num_threads_local(1);
        guard.is_set = true;
        return guard;
    }
    guard.before = p->get_setting();
    guard.is_set = guard.before != p->one_thread;
    if (guard.is_set)
        p->set_setting(p->one_thread);
    return guard;
}

void attn__blas_leave(attn__blas_guard guard)
{
    const struct provider *p = get_provider();

    if (!guard.is_set)
        return;
    if (p->mkl_set_num_threads_local)
        (void)p->mkl_set_num_threads_local(guard.before);
    else
        p->set_setting(guard.before);
}

const char *attn_blas_info(void)
{
    static _Thread_local char text[400];
    static const char *const use[] = {
        "small kernels, products of at most 10^6 multiply-adds",
        "products of at most 2^18 multiply-adds, so that it starts no threads",
        "products of any size, one thread each",
        "products of any size, one thread each"};
    const struct provider *p = get_provider();
    attn__blas policy = attn__blas_policy();
    (void)snprintf(text, sizeof text, "%.159s, %s; used with %s%s%s%s", p->name,
                   p->wide_integers ? "64-bit integers (unusable)"
                                    : "32-bit integers",
                   use[policy.kind],
                   policy.exclusive ? ", one at a time in the process" : "",
                   p->better_core ? "; slow: this processor wants "
                                    "OPENBLAS_CORETYPE="
                                  : "",
                   p->better_core ? p->better_core : "");
    return text;
}

/* ----------------------------------------------------------------- Tiles -- */

/*
 * Elements of a score tile and its lanes. Small kernels: 64 lanes fill their
 * 64-wide register tile, and any number of keys from 64 on gives them the same
 * rate (Zen 4, Zen 5). With 128 of them the tile is 32 KiB, which the softmax
 * finds in a first-level cache of 48: 0.94 to 0.99 of the time that 240 keys
 * take on Zen 5, of widths 40 and 64, and sums over keys are shorter chains. A
 * product is below the limit up to width 122. In double 32 lanes are the same
 * bytes; 128 keys are 0.975 of the time of 256 there.
 * Other kernels of OpenBLAS pack both operands on every call, which large tiles
 * amortise. Tried with them and Haswell's kernels: 256 lanes (0.96 of the rate
 * at width 64, rows 1 KiB apart share an eighth of a cache's sets), and rows an
 * odd number of cache lines apart (0.97 to 1.05, mostly 1).
 */
static const struct tile_rule {
    int64_t lanes;
    int64_t most_keys;
    int64_t most_elements; /* of keys times width */
    int64_t backward_keys; /* in place of most_keys; 0: the same */
} tile_rules[4][2] = {
    [ATTN__BLAS_SMALL] = {{64, 128, 15625, 0}, {32, 128, 16384, 0}},
    /* 64 x 64 x 64 is the limit; wider heads are split into such products. */
    [ATTN__BLAS_LIMITED] = {{64, 64, INT64_MAX, 0}, {64, 64, INT64_MAX, 0}},
    /* Best of 64..192 x 64..384 with OpenBLAS's Haswell kernels; but of floats
     * two thirds of the keys, for 1 % of the time: sums over keys are chains in
     * these kernels, and the error is 0.93 of that with 192. The backward
     * pass, which packs each tile three times, is 1.03 to 1.06 times as fast
     * with 256 keys as with 128 (attn_compare --backward, one BLAS thread, Zen
     * 3: T = 1024 and 2048, width 64 and 128); in double neither 96 to 192
     * lanes nor 128 to 384 keys were faster. */
    [ATTN__BLAS_FREE] = {{192, 128, INT64_MAX, 256}, {128, 192, INT64_MAX, 0}},
    /* Best of 16..192 x 64..512 with BLIS 0.9.0 on Zen 3. Its kernels have 6 by
     * 16 numbers, in double 6 by 8. */
    [ATTN__BLAS_UNPACKED] = {{96, 320, INT64_MAX, 0}, {72, 256, INT64_MAX, 0}},
};

static const struct tile_rule *rule_for(const attn__blas *blas,
                                        attn_dtype dtype)
{
    return &tile_rules[blas->kind][dtype == ATTN_F64];
}

int64_t attn__tile_keys(const attn__blas *blas, attn_dtype dtype, bool backward)
{
    const struct tile_rule *rule = rule_for(blas, dtype);

    return backward && rule->backward_keys > 0 ? rule->backward_keys
                                               : rule->most_keys;
}

attn__tile attn__tile_for(const attn__blas *blas, attn_dtype dtype,
                          int64_t max_width, bool backward)
{
    const struct tile_rule *rule = rule_for(blas, dtype);
    int64_t keys = rule->most_elements / MAX(max_width, 1);
    int64_t most = attn__tile_keys(blas, dtype, backward);

    /* Very wide heads: 16 keys at least, and the products are split. */
    keys = MAX(MIN(keys, most) / 4 * 4, 16);
    return (attn__tile){rule->lanes, keys};
}

int64_t attn__tile_copy_elements(const attn__blas *blas, attn_dtype dtype,
                                 int64_t keys, int64_t width)
{
    /* A tile has at most most_elements / width keys, or 16. */
    int64_t most = MAX(rule_for(blas, dtype)->most_elements, 16 * width);

    return MIN(keys * width, most);
}

/* -------------------------------------------------------------- Products -- */

#include "real_f32.h"
#define CBLAS_GEMM cblas_sgemm
#include "gemm_tmpl.h"
#include "real_f64.h"
#define CBLAS_GEMM cblas_dgemm
#include "gemm_tmpl.h"
