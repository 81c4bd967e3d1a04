/*
 * stub_cblas.c - a strict, naive CBLAS of four functions, for sanitizers.
 *
 * A real BLAS is neither instrumented nor strict: it reads beside its
 * operands, forgives what another version does not, and hides from the
 * sanitizers what was read and written. This one checks every rule that the
 * library promises to keep, touches only elements that belong to the
 * operands, and ends the process with a sentence on stderr at the first
 * violation. Together with the library's sources it makes a libattn for
 * ASan, UBSan, TSan and MSan:
 *
 *   clang -std=c11 -g -O1 -fsanitize=address,undefined -fPIC -shared \
 *       -Iinclude -Isrc src/[a-z]*.c src/kernels/[a-z]*.c \
 *       tests/stub/stub_cblas.c -o libattn.so -lm -lpthread -ldl
 *
 * (-fsanitize=thread, or memory, likewise; a CBLAS header is needed, a BLAS
 * is not). The environment says which BLAS it plays, so that each of the
 * library's policies is run:
 *
 *   ATTN_STUB_BLAS=            an unknown one: products of at most 2^18
 *   ATTN_STUB_BLAS=small       OpenBLAS with AVX-512 small kernels: at most
 *                              10^6, and never op(B) transposed
 *   ATTN_STUB_BLAS=pthread     OpenBLAS on pthreads, AVX2: at most 2^18
 *   ATTN_STUB_BLAS=serial      OpenBLAS without locks: any size, one caller
 *                              at a time
 *   ATTN_STUB_BLAS=wide        OpenBLAS that says it has 64-bit integers,
 *                              which must not be called at all
 */
#include <cblas.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNKNOWN, SMALL, PTHREAD, SERIAL, WIDE };

static int played(void)
{
    const char *name = getenv("ATTN_STUB_BLAS");
    if (name == NULL)
        return UNKNOWN;
    if (strcmp(name, "small") == 0)
        return SMALL;
    if (strcmp(name, "pthread") == 0)
        return PTHREAD;
    if (strcmp(name, "wide") == 0)
        return WIDE;
    return strcmp(name, "serial") == 0 ? SERIAL : UNKNOWN;
}

/* Exported, whatever the flags of the build say of other symbols. */
#pragma GCC visibility push(default)

/* What the library asks an OpenBLAS about itself. */
char *openblas_get_config(void);
char *openblas_get_corename(void);
int openblas_get_parallel(void);
int openblas_get_num_threads(void);

char *openblas_get_config(void)
{
    static char real[] = "OpenBLAS 0.3.21 DYNAMIC_ARCH NO_AFFINITY";
    static char wide[] = "OpenBLAS 0.3.21 USE64BITINT NO_AFFINITY";
    static char other[] = "a strict stub";
    if (played() == WIDE)
        return wide;
    return played() == UNKNOWN ? other : real;
}

char *openblas_get_corename(void)
{
    static char with_small_kernels[] = "SkylakeX";
    static char without[] = "Haswell";
    return played() == SMALL ? with_small_kernels : without;
}

int openblas_get_parallel(void)
{
    return played() != SERIAL;
}

int openblas_get_num_threads(void)
{
    return played() == SERIAL ? 1 : 4;
}

/* ---- rules ---- */

static void demand(bool kept, const char *call, const char *rule)
{
    if (kept)
        return;
    fprintf(stderr, "stub_cblas: %s: %s\n", call, rule);
    abort();
}

/* An operand as it lies in memory: rows of `row` elements, ld apart. */
struct matrix {
    const unsigned char *data;
    size_t element;
    int rows;
    int row;
    int ld;
};

static uintptr_t row_start(const struct matrix *m, int i)
{
    return (uintptr_t)m->data + (size_t)i * (size_t)m->ld * m->element;
}

static uintptr_t row_end(const struct matrix *m, int i)
{
    return row_start(m, i) + (size_t)m->row * m->element;
}

/* Whether two operands share an element; rows of one may well lie between
 * those of another. */
static bool meet(const struct matrix *a, const struct matrix *b)
{
    if (row_end(a, a->rows - 1) <= row_start(b, 0) ||
        row_end(b, b->rows - 1) <= row_start(a, 0))
        return false;
    for (int i = 0; i < a->rows; i++)
        for (int k = 0; k < b->rows; k++)
            if (row_start(a, i) < row_end(b, k) &&
                row_start(b, k) < row_end(a, i))
                return true;
    return false;
}

static void demand_size(const char *call, int m, int n, int k, bool b_turned)
{
    const double products = (double)m * (double)n * (double)k;
    switch (played()) {
    case SERIAL:
        break;
    case WIDE:
        demand(false, call, "a BLAS with 64-bit integers was called");
        break;
    case SMALL:
        demand(products <= 1e6, call, "more than 10^6 multiply-adds");
        demand(!b_turned, call, "op(B) transposed has no small kernel");
        break;
    default:
        demand(products <= 262144, call, "enough work to start threads");
    }
}

/* Returns the operands as they lie, or does not return. */
static void demand_all(const char *call, int order, int ta, int tb, int m,
                       int n, int k, const struct matrix *operands)
{
    const struct matrix *a = &operands[0];
    const struct matrix *b = &operands[1];
    const struct matrix *c = &operands[2];
    demand(order == CblasRowMajor, call, "order is not row-major");
    demand(ta == CblasNoTrans || ta == CblasTrans, call, "unknown op(A)");
    demand(tb == CblasNoTrans || tb == CblasTrans, call, "unknown op(B)");
    demand(m >= 1 && n >= 1 && k >= 1, call, "a size below 1");
    demand(a->data && b->data && c->data, call, "an operand is NULL");
    demand(a->ld >= a->row && a->ld >= 1, call, "lda below the row length");
    demand(b->ld >= b->row && b->ld >= 1, call, "ldb below the row length");
    demand(c->ld >= c->row && c->ld >= 1, call, "ldc below the row length");
    for (int i = 0; i < 3; i++)
        demand((uintptr_t)operands[i].data % operands[i].element == 0, call,
               "an operand is misaligned");
    demand(!meet(a, c), call, "C shares memory with A");
    demand(!meet(b, c), call, "C shares memory with B");
    demand_size(call, m, n, k, tb == CblasTrans);
}

/* The serial OpenBLAS has no locks: two callers at once get wrong numbers. */
static atomic_int callers;

/* In the child of a fork nobody is inside, whoever was in the parent. */
static void forget_callers(void)
{
    atomic_store(&callers, 0);
}

__attribute__((constructor)) static void watch_forks(void)
{
    (void)pthread_atfork(NULL, NULL, forget_callers);
}

static void enter(const char *call)
{
    if (played() == SERIAL)
        demand(atomic_fetch_add(&callers, 1) == 0, call,
               "two threads at once in a BLAS without locks");
}

static void leave(void)
{
    if (played() == SERIAL)
        atomic_fetch_sub(&callers, 1);
}

/* ---- the functions ---- */

/*
 * One body for both types. Operands are copied to tiles, row by row with
 * memcpy, of which a sanitizer checks every byte; what is done with the copies
 * is not instrumented. So each element is checked once a tile, not once a
 * product. memcpy is called where no compiler sees it: it would put
 * instructions in its place, which ThreadSanitizer does not follow.
 */
static void *(*volatile copy_bytes)(void *to, const void *from,
                                    size_t size) = memcpy;

#define TILE 32
#define PLAIN __attribute__((no_sanitize("address", "thread", "undefined")))
#define LESS(a, b) ((a) < (b) ? (a) : (b))

#define DEFINE_GEMM(name, R, is_0, is_1)                                     \
    struct name##_tile {                                                     \
        R at[TILE][TILE];                                                    \
    };                                                                       \
                                                                             \
    static void name##_read(struct name##_tile *t, const R *from, int ld,    \
                            int row, int rows, int column, int columns)      \
    {                                                                        \
        for (int i = 0; i < rows; i++)                                       \
            copy_bytes(t->at[i],                                             \
                       from + (size_t)(row + i) * (size_t)ld + column,       \
                       (size_t)columns * sizeof(R));                         \
    }                                                                        \
                                                                             \
    PLAIN static void name##_clear(struct name##_tile *t)                    \
    {                                                                        \
        for (int i = 0; i < TILE; i++)                                       \
            for (int j = 0; j < TILE; j++)                                   \
                t->at[i][j] = 0;                                             \
    }                                                                        \
                                                                             \
    PLAIN static void name##_turn(struct name##_tile *t)                     \
    {                                                                        \
        for (int i = 0; i < TILE; i++)                                       \
            for (int j = 0; j < i; j++) {                                    \
                const R kept = t->at[i][j];                                  \
                t->at[i][j] = t->at[j][i];                                   \
                t->at[j][i] = kept;                                          \
            }                                                                \
    }                                                                        \
                                                                             \
    PLAIN static void name##_add(struct name##_tile *sum,                    \
                                 const struct name##_tile *a,                \
                                 const struct name##_tile *b, int m, int k)  \
    {                                                                        \
        for (int i = 0; i < m; i++)                                          \
            for (int l = 0; l < k; l++)                                      \
                for (int j = 0; j < TILE; j++)                               \
                    sum->at[i][j] += a->at[i][l] * b->at[l][j];              \
    }                                                                        \
                                                                             \
    PLAIN static void name##_finish(struct name##_tile *sum, R alpha,        \
                                    const struct name##_tile *c)             \
    {                                                                        \
        for (int i = 0; i < TILE; i++)                                       \
            for (int j = 0; j < TILE; j++)                                   \
                sum->at[i][j] = alpha * sum->at[i][j] + c->at[i][j];         \
    }                                                                        \
                                                                             \
    void name(CBLAS_LAYOUT order, CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb,    \
              int m, int n, int k, R alpha, const R *a, int lda, const R *b, \
              int ldb, R beta, R *c, int ldc)                                \
    {                                                                        \
        const bool turn_a = ta == CblasTrans;                                \
        const bool turn_b = tb == CblasTrans;                                \
        const struct matrix operands[3] = {                                  \
            {(const unsigned char *)a, sizeof(R), turn_a ? k : m,            \
             turn_a ? m : k, lda},                                           \
            {(const unsigned char *)b, sizeof(R), turn_b ? n : k,            \
             turn_b ? k : n, ldb},                                           \
            {(const unsigned char *)c, sizeof(R), m, n, ldc}};               \
        static _Thread_local struct name##_tile left, right, sum, old;       \
        demand_all(#name, (int)order, (int)ta, (int)tb, m, n, k, operands);  \
        demand(!is_0(alpha) && isfinite(alpha), #name, "alpha is 0 or odd"); \
        demand(is_0(beta) || is_1(beta), #name, "beta is not 0 or 1");       \
        enter(#name);                                                        \
        for (int i = 0; i < m; i += TILE)                                    \
            for (int j = 0; j < n; j += TILE) {                              \
                const int rows = LESS(TILE, m - i);                          \
                const int columns = LESS(TILE, n - j);                       \
                name##_clear(&sum);                                          \
                for (int l = 0; l < k; l += TILE) {                          \
                    const int depth = LESS(TILE, k - l);                     \
                    if (turn_a)                                              \
                        name##_read(&left, a, lda, l, depth, i, rows);       \
                    else                                                     \
                        name##_read(&left, a, lda, i, rows, l, depth);       \
                    if (turn_b)                                              \
                        name##_read(&right, b, ldb, j, columns, l, depth);   \
                    else                                                     \
                        name##_read(&right, b, ldb, l, depth, j, columns);   \
                    if (turn_a)                                              \
                        name##_turn(&left);                                  \
                    if (turn_b)                                              \
                        name##_turn(&right);                                 \
                    name##_add(&sum, &left, &right, rows, depth);            \
                }                                                            \
                name##_clear(&old);                                          \
                if (is_1(beta))                                              \
                    name##_read(&old, c, ldc, i, rows, j, columns);          \
                name##_finish(&sum, alpha, &old);                            \
                for (int r = 0; r < rows; r++)                               \
                    copy_bytes(c + (size_t)(i + r) * (size_t)ldc + j,        \
                               sum.at[r], (size_t)columns * sizeof(R));      \
            }                                                                \
        leave();                                                             \
    }

static bool is_0f(float x)
{
    return !(x < 0.0F) && !(x > 0.0F) && !isnan(x);
}

static bool is_1f(float x)
{
    return is_0f(x - 1.0F);
}

static bool is_0d(double x)
{
    return !(x < 0.0) && !(x > 0.0) && !isnan(x);
}

static bool is_1d(double x)
{
    return is_0d(x - 1.0);
}

DEFINE_GEMM(cblas_sgemm, float, is_0f, is_1f)
DEFINE_GEMM(cblas_dgemm, double, is_0d, is_1d)

/* Asked by the library to learn the width of the integers. */
CBLAS_INDEX cblas_isamax(int n, const float *x, int step)
{
    CBLAS_INDEX best = 0;
    for (int i = 1; i < n && step > 0; i++)
        if (fabsf(x[i * step]) > fabsf(x[(size_t)best * (size_t)step]))
            best = (CBLAS_INDEX)i;
    return best;
}

#pragma GCC visibility pop
