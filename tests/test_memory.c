/*
 * test_memory.c - every allocation fails once, and from then on; the calls
 * with the caller's scratch memory never allocate; the query is enough for
 * every smaller problem; threads that cannot be started are done without.
 */
#define _GNU_SOURCE 1

#include "kit.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/*
 * One counter for all ways of getting memory. While armed, attempt fail_at
 * (and all later ones, if forever) fails.
 */
static atomic_long attempts;
static atomic_long hook_attempts; /* those among them that came by the hooks */
/* volatile: compilers know that aligned_alloc reads no variable of ours. */
static _Thread_local volatile bool inside_hook;
static atomic_long live; /* blocks of the hooks not yet freed */
static atomic_bool armed;
static long fail_at;
static bool forever;

static void arm(long n, bool from_then_on)
{
    fail_at = n;
    forever = from_then_on;
    atomic_store(&attempts, 0);
    atomic_store(&hook_attempts, 0);
    atomic_store(&armed, true);
}

/* Returns how many attempts there were. */
static long disarm(void)
{
    atomic_store(&armed, false);
    return atomic_load(&attempts);
}

static bool must_fail(void)
{
    if (!atomic_load(&armed) || inside_hook)
        return false;
    const long n = atomic_fetch_add(&attempts, 1) + 1;
    return fail_at > 0 && (n == fail_at || (forever && n > fail_at));
}

/* ---- the hooks of a context ---- */

static void *hook_alloc(void *user, size_t bytes, size_t alignment)
{
    assert_ptr_equal(user, &live);
    assert_true(alignment != 0 && (alignment & (alignment - 1)) == 0);
    atomic_fetch_add(&hook_attempts, atomic_load(&armed));
    if (must_fail())
        return NULL;
    if (alignment < sizeof(void *))
        alignment = sizeof(void *);
    inside_hook = true;
    void *p = aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
    inside_hook = false;
    if (p != NULL) {
        memset(p, 0xA5, bytes); /* nobody may count on zeros */
        atomic_fetch_add(&live, 1);
    }
    return p;
}

static void hook_free(void *user, void *p)
{
    assert_ptr_equal(user, &live);
    if (p != NULL)
        atomic_fetch_sub(&live, 1);
    free(p);
}

static attn_context_params hooked(int32_t num_threads)
{
    attn_context_params p = ATTN_CONTEXT_PARAMS_INIT;
    p.num_threads = num_threads;
    p.alloc = hook_alloc;
    p.free = hook_free;
    p.alloc_user = &live;
    return p;
}

static attn_context *make_context(int32_t num_threads)
{
    const attn_context_params p = hooked(num_threads);
    attn_context *context = NULL;
    assert_int_equal(attn_context_create(&context, &p), ATTN_OK);
    return context;
}

/* ---- interposed C library ---- */

#if !KIT_SANITIZED
static bool blas_ends_process;

/* BLIS, and the OpenMP library under it, end the process where they get no
 * memory. That is theirs, so what they ask for is given. */
static bool caller_must_fail(const void *caller)
{
    Dl_info info;
    if (!atomic_load(&armed))
        return false;
    if (blas_ends_process && dladdr(caller, &info) != 0 &&
        (strstr(info.dli_fname, "libblas") ||
         strstr(info.dli_fname, "libblis") ||
         strstr(info.dli_fname, "libgomp")))
        return false;
    return must_fail();
}
#define CALLER_MUST_FAIL() caller_must_fail(__builtin_return_address(0))

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

void *malloc(size_t bytes)
{
    return CALLER_MUST_FAIL() ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes)
{
    return CALLER_MUST_FAIL() ? NULL : __libc_calloc(n, bytes);
}

void *realloc(void *p, size_t bytes)
{
    return CALLER_MUST_FAIL() ? NULL : __libc_realloc(p, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    return CALLER_MUST_FAIL() ? NULL : __libc_memalign(alignment, bytes);
}

int posix_memalign(void **p, size_t alignment, size_t bytes)
{
    if (CALLER_MUST_FAIL())
        return ENOMEM;
    *p = __libc_memalign(alignment, bytes);
    return *p == NULL ? ENOMEM : 0;
}

/* Threads left to start; negative: any number. */
static atomic_int threads_left = -1;
static atomic_int threads_refused;

typedef int create_fn(pthread_t *, const pthread_attr_t *, void *(*)(void *),
                      void *);

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                   void *(*start)(void *), void *arg)
{
    if (atomic_load(&threads_left) == 0) {
        atomic_fetch_add(&threads_refused, 1);
        return EAGAIN;
    }
    if (atomic_load(&threads_left) > 0)
        atomic_fetch_sub(&threads_left, 1);
    create_fn *real;
    void *symbol = dlsym(RTLD_NEXT, "pthread_create");
    memcpy(&real, &symbol, sizeof real);
    return real(thread, attributes, start, arg);
}
#endif

/* Whether the functions above are the ones in use (valgrind has its own). */
static bool interposed(void)
{
    void *(*volatile get)(size_t) = malloc;
    arm(0, false);
    free(get(8));
    return disarm() == 1;
}

/* ---- the operations that allocate ---- */

struct operation {
    const char *name;
    attn_status (*run)(const attn_context *);
};

#define NUM_GRADIENTS 7
#define NUM_OUTPUTS (4 + NUM_GRADIENTS)

/* Inputs shared by all operations, and their outputs. */
static struct {
    attn_tensor q, k, v, x, w_in, w_out, bias;
    attn_tensor out, lse, weights, y;
    /* Of a call before: the inputs of the gradients. */
    attn_tensor result, sums, slopes, sinks;
    attn_mask mask;
    attn_tensor gradient[NUM_GRADIENTS];
    const attn_tensor *d_masks[1];
    attn_sdpa_params training;
    attn_sdpa_gradients gradients;
    attn_tensor copies[NUM_OUTPUTS];
    attn_sdpa_params sdpa;
    attn_mha_params mha;
} all;

static attn_tensor *output(int n)
{
    attn_tensor *outputs[4] = {&all.out, &all.lse, &all.weights, &all.y};
    return n < 4 ? outputs[n] : &all.gradient[n - 4];
}

/* Strides that are not unit make the library pack, which takes memory. */
static attn_tensor make_spread(int64_t a, int64_t b, int64_t c, int64_t d)
{
    attn_tensor t = kit_make(ATTN_F32, a, b, c, 2 * d);
    t.shape[3] = d;
    t.stride[3] = 2;
    return t;
}

/* Gradients of everything, as d_out the queries' result of a call. */
static void make_training(void)
{
    attn_sdpa_gradients *g = &all.gradients;
    all.result = kit_make(ATTN_F32, 2, 4, 70, 20);
    all.sums = kit_make(ATTN_F32, 2, 4, 70, 1);
    all.slopes = kit_make(ATTN_F32, 1, 1, 1, 4);
    all.sinks = kit_make(ATTN_F32, 2, 4, 1, 1);
    all.mask.kind = ATTN_MASK_ADD;
    all.mask.view = kit_make(ATTN_F32, 2, 1, 70, 90);
    attn_sdpa_params_init(&all.training);
    all.training.lse = &all.sums;
    all.training.alibi = &all.slopes;
    all.training.sinks = &all.sinks;
    all.training.softcap = 3.0;
    all.training.align = ATTN_ALIGN_BOTTOM_RIGHT;
    all.training.masks = &all.mask;
    all.training.num_masks = 1;
    /* Not the default context, which is to be new for the first test. */
    attn_context *context = make_context(1);
    if (attn_sdpa(context, &all.training, &all.q, &all.k, &all.v,
                  &all.result) != ATTN_OK)
        fail_msg("%s", attn_last_error());
    attn_context_destroy(context);
    all.gradient[0] = kit_make(ATTN_F32, 2, 4, 70, 24);
    all.gradient[1] = make_spread(2, 2, 90, 24);
    all.gradient[2] = kit_make(ATTN_F32, 2, 2, 90, 20);
    all.gradient[3] = kit_make(ATTN_F32, 2, 1, 70, 90);
    all.gradient[4] = kit_make(ATTN_F32, 1, 1, 1, 4);
    all.gradient[5] = kit_make(ATTN_F32, 2, 4, 1, 1);
    all.gradient[6] = kit_make(ATTN_F32, 1, 1, 1, 1);
    attn_sdpa_gradients_init(g);
    g->d_lse = &all.sums;
    g->d_q = &all.gradient[0];
    g->d_k = &all.gradient[1];
    g->d_v = &all.gradient[2];
    all.d_masks[0] = &all.gradient[3];
    g->d_masks = all.d_masks;
    g->d_alibi = &all.gradient[4];
    g->d_sinks = &all.gradient[5];
    g->d_scale = &all.gradient[6];
}

static int make_all(void **state)
{
    (void)state;
    kit_seed(3);
    all.q = kit_make(ATTN_F32, 2, 4, 70, 24);
    all.k = make_spread(2, 2, 90, 24);
    all.v = make_spread(2, 2, 90, 20);
    all.out = kit_make(ATTN_F32, 2, 4, 70, 20);
    all.lse = kit_make(ATTN_F32, 2, 4, 70, 1);
    all.weights = kit_make(ATTN_F32, 2, 4, 70, 90);
    all.x = make_spread(2, 1, 40, 32);
    all.w_in = kit_make(ATTN_F32, 1, 1, 96, 32);
    all.w_out = kit_make(ATTN_F32, 1, 1, 32, 32);
    all.bias = kit_make(ATTN_F32, 1, 1, 1, 96);
    all.y = kit_make(ATTN_F32, 2, 1, 40, 32);
    attn_sdpa_params_init(&all.sdpa);
    all.sdpa.lse = &all.lse;
    all.sdpa.weights = &all.weights;
    attn_mha_params_init(&all.mha);
    all.mha.weight_layout = ATTN_WEIGHT_OUT_IN;
    all.mha.num_heads = 4;
    all.mha.w_qkv = &all.w_in;
    all.mha.b_qkv = &all.bias;
    all.mha.w_o = &all.w_out;
    make_training();
    for (int n = 0; n < NUM_OUTPUTS; n++) {
        const int64_t *s = output(n)->shape;
        all.copies[n] = kit_make(ATTN_F32, s[0], s[1], s[2], s[3]);
    }
    return 0;
}

static int drop_all(void **state)
{
    (void)state;
    attn_tensor *made[] = {&all.q,    &all.k,      &all.v,     &all.x,
                           &all.w_in, &all.w_out,  &all.bias,  &all.result,
                           &all.sums, &all.slopes, &all.sinks, &all.mask.view};
    for (size_t n = 0; n < COUNT(made); n++)
        kit_drop(made[n]);
    for (int n = 0; n < NUM_OUTPUTS; n++) {
        kit_drop(output(n));
        kit_drop(&all.copies[n]);
    }
    return 0;
}

static attn_status run_sdpa(const attn_context *context)
{
    return attn_sdpa(context, &all.sdpa, &all.q, &all.k, &all.v, &all.out);
}

static attn_status run_mha(const attn_context *context)
{
    return attn_mha(context, &all.mha, &all.x, NULL, NULL, &all.y);
}

static attn_status run_backward(const attn_context *context)
{
    return attn_sdpa_backward(context, &all.training, &all.q, &all.k, &all.v,
                              &all.result, &all.result, &all.gradients);
}

static attn_status run_linear(const attn_context *context)
{
    attn_tensor w = all.w_out;
    return attn_linear(context, ATTN_WEIGHT_IN_OUT, &all.x, &w, NULL, &all.y);
}

static const struct operation operations[] = {
    {"attn_sdpa", run_sdpa},
    {"attn_mha", run_mha},
    {"attn_linear", run_linear},
    {"attn_sdpa_backward", run_backward},
};

#define MARK (-77.0)

static void mark_outputs(void)
{
    for (int n = 0; n < NUM_OUTPUTS; n++)
        kit_fill_with(output(n), MARK);
}

static bool is_marked(const attn_tensor *t)
{
    const int64_t *s = t->shape;
    for (int64_t b = 0; b < s[0]; b++)
        for (int64_t h = 0; h < s[1]; h++)
            for (int64_t i = 0; i < s[2]; i++)
                for (int64_t j = 0; j < s[3]; j++) {
                    const double x = kit_get(t, b, h, i, j);
                    if (x > MARK || x < MARK)
                        return false;
                }
    return true;
}

static bool outputs_untouched(void)
{
    for (int n = 0; n < NUM_OUTPUTS; n++)
        if (!is_marked(output(n)))
            return false;
    return true;
}

static void remember_outputs(void)
{
    for (int n = 0; n < NUM_OUTPUTS; n++)
        kit_copy(&all.copies[n], output(n));
}

static bool outputs_as_remembered(void)
{
    for (int n = 0; n < NUM_OUTPUTS; n++)
        if (!kit_same(output(n), &all.copies[n]))
            return false;
    return true;
}

/* What every run of op must give. */
static void remember_right_outputs(const struct operation *op)
{
    mark_outputs();
    if (op->run(NULL) != ATTN_OK)
        fail_msg("%s: %s", op->name, attn_last_error());
    remember_outputs();
}

/* One run whose attempt n fails; returns whether that attempt was reached. */
static bool starve_once(const struct operation *op, const attn_context *context,
                        long n, bool from_then_on)
{
    mark_outputs();
    arm(n, from_then_on);
    const attn_status status = op->run(context);
    const bool reached = disarm() >= n;
    if (status == ATTN_ERR_NOMEM) {
        assert_true(reached);
        assert_non_null(strstr(attn_last_error(), op->name));
        if (!outputs_untouched())
            fail_msg("%s: attempt %ld fails, and it wrote", op->name, n);
    } else if (status != ATTN_OK) {
        fail_msg("%s: attempt %ld: %s", op->name, n, attn_last_error());
    } else if (!outputs_as_remembered()) {
        /* Less memory may mean fewer threads, but never other results. */
        fail_msg("%s: attempt %ld fails, and the result is another", op->name,
                 n);
    }
    return reached;
}

/* Attempt n fails for n = 1, 2, ... until there are no more, each time in a
 * new context, which must work afterwards and leave nothing behind. */
static void starve(const struct operation *op, int32_t threads,
                   bool from_then_on)
{
    bool reached = true;
    remember_right_outputs(op);
    for (long n = 1; reached; n++) {
        assert_true(n < 1000);
        attn_context *context = make_context(threads);
        reached = starve_once(op, context, n, from_then_on);
        assert_true(reached || n > 1);
        mark_outputs();
        assert_int_equal(op->run(context), ATTN_OK);
        assert_true(outputs_as_remembered());
        attn_context_destroy(context);
        if (atomic_load(&live) != 0)
            fail_msg("%s, %d threads: attempt %ld leaks", op->name,
                     (int)threads, n);
    }
}

static void test_context_hooks__each_failure_is_a_clean_status(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(operations); n++) {
        for (int32_t threads = 1; threads <= 3; threads += 2) {
            starve(&operations[n], threads, false);
            starve(&operations[n], threads, true);
        }
    }
}

static void test_context_create__each_failure_is_a_clean_status(void **state)
{
    (void)state;
    const attn_context_params p = hooked(3);
    for (int from_then_on = 0; from_then_on < 2; from_then_on++) {
        attn_status status = ATTN_ERR_NOMEM;
        for (long n = 1; status != ATTN_OK; n++) {
            attn_context *context = NULL;
            assert_true(n < 100);
            arm(n, from_then_on == 1);
            status = attn_context_create(&context, &p);
            disarm();
            if (status == ATTN_OK)
                attn_context_destroy(context);
            else
                assert_null(context);
            assert_int_equal(atomic_load(&live), 0);
        }
    }
}

/* Everything a context takes, it takes through the hooks. */
static void test_context_hooks__are_the_only_source(void **state)
{
    (void)state;
    if (!interposed())
        skip();
    for (size_t n = 0; n < COUNT(operations); n++) {
        remember_right_outputs(&operations[n]); /* the BLAS is warm now */
        attn_context *context = make_context(1);
        arm(0, false);
        assert_int_equal(operations[n].run(context), ATTN_OK);
        const long tried = disarm();
        if (tried == 0 || tried != atomic_load(&hook_attempts))
            fail_msg("%s: %ld attempts, %ld of them by the hooks",
                     operations[n].name, tried, atomic_load(&hook_attempts));
        attn_context_destroy(context);
    }
}

/* The first of the tests: what the default context keeps for later calls it
 * does not have yet, so that it must ask for memory. */
static void test_default_context__each_failure_is_a_clean_status(void **state)
{
    (void)state;
    if (!interposed())
        skip();
    attn_context *warm = make_context(1);
    for (size_t n = 0; n < COUNT(operations); n++) {
        mark_outputs();
        assert_int_equal(operations[n].run(warm), ATTN_OK);
        remember_outputs();
        bool reached = true;
        for (long k = 1; reached; k++) {
            reached = starve_once(&operations[n], NULL, k, k % 2 == 0);
            assert_true(reached || k > 1 || n > 0);
        }
    }
    attn_context_destroy(warm);
}

/* ---- the calls that never allocate ---- */

static void *make_work(size_t bytes, size_t alignment)
{
    void *work = NULL;
    if (alignment < sizeof(void *))
        alignment = sizeof(void *);
    if (posix_memalign(&work, alignment, bytes + 1) != 0)
        fail_msg("out of memory");
    memset(work, 0xA5, bytes);
    return work;
}

static void sdpa_work_run(const attn_context *context)
{
    size_t bytes;
    size_t alignment;
    assert_int_equal(attn_sdpa_workspace(context, &all.sdpa, &all.q, &all.k,
                                         &all.v, &all.out, &bytes, &alignment),
                     ATTN_OK);
    void *work = make_work(bytes, alignment);
    arm(0, false);
    const attn_status status = attn_sdpa_work(
        context, &all.sdpa, &all.q, &all.k, &all.v, &all.out, work, bytes);
    assert_int_equal(disarm(), 0);
    assert_int_equal(status, ATTN_OK);
    free(work);
}

static void mha_work_run(const attn_context *context)
{
    size_t bytes;
    size_t alignment;
    assert_int_equal(attn_mha_workspace(context, &all.mha, &all.x, NULL, NULL,
                                        &all.y, &bytes, &alignment),
                     ATTN_OK);
    void *work = make_work(bytes, alignment);
    arm(0, false);
    const attn_status status = attn_mha_work(context, &all.mha, &all.x, NULL,
                                             NULL, &all.y, work, bytes);
    assert_int_equal(disarm(), 0);
    assert_int_equal(status, ATTN_OK);
    free(work);
}

static void backward_work_run(const attn_context *context)
{
    size_t bytes;
    size_t alignment;
    assert_int_equal(
        attn_sdpa_backward_workspace(context, &all.training, &all.q, &all.k,
                                     &all.v, &all.result, &all.result,
                                     &all.gradients, &bytes, &alignment),
        ATTN_OK);
    void *work = make_work(bytes, alignment);
    arm(0, false);
    const attn_status status = attn_sdpa_backward_work(
        context, &all.training, &all.q, &all.k, &all.v, &all.result,
        &all.result, &all.gradients, work, bytes);
    assert_int_equal(disarm(), 0);
    assert_int_equal(status, ATTN_OK);
    free(work);
}

static void work_equals_plain(void (*work)(const attn_context *),
                              const struct operation *plain)
{
    mark_outputs();
    for (int32_t threads = 1; threads <= 3; threads++) {
        attn_context *context = make_context(threads);
        mark_outputs();
        /* The plain calls first: one starts the threads, and both let the
         * BLAS library get the buffers that it keeps. */
        assert_int_equal(plain->run(context), ATTN_OK);
        assert_int_equal(plain->run(NULL), ATTN_OK);
        remember_outputs();
        mark_outputs();
        work(context);
        assert_true(outputs_as_remembered());
        attn_context_destroy(context);
    }
    assert_int_equal(atomic_load(&live), 0);
}

static void test_sdpa_work__never_allocates(void **state)
{
    (void)state;
    work_equals_plain(sdpa_work_run, &operations[0]);
}

static void test_mha_work__never_allocates(void **state)
{
    (void)state;
    work_equals_plain(mha_work_run, &operations[1]);
}

static void test_sdpa_backward_work__never_allocates(void **state)
{
    (void)state;
    work_equals_plain(backward_work_run, &operations[3]);
}

/* Gradients of heads of this width without a byte being asked for. Some BLAS
 * kernels take memory for columns that do not fill a vector, and end the
 * process where there is none: no width may meet one. */
static void backward_of_width(attn_dtype dtype, int64_t width)
{
    attn_tensor t[8];
    attn_sdpa_params p;
    attn_sdpa_gradients g;
    size_t bytes;
    size_t alignment;
    for (int n = 0; n < 7; n++)
        t[n] = kit_make(dtype, 1, 1, 40, width);
    t[7] = kit_make(dtype, 1, 1, 40, 1);
    attn_sdpa_params_init(&p);
    p.lse = &t[7];
    attn_sdpa_gradients_init(&g);
    g.d_q = &t[4];
    g.d_k = &t[5];
    g.d_v = &t[6];
    /* Twice: a BLAS may get buffers that it keeps. */
    for (int time = 0; time < 2; time++) {
        assert_int_equal(attn_sdpa(NULL, &p, &t[0], &t[1], &t[2], &t[3]),
                         ATTN_OK);
        assert_int_equal(attn_sdpa_backward_workspace(NULL, &p, &t[0], &t[1],
                                                      &t[2], &t[3], &t[0], &g,
                                                      &bytes, &alignment),
                         ATTN_OK);
        void *work = make_work(bytes, alignment);
        arm(0, false);
        const attn_status status = attn_sdpa_backward_work(
            NULL, &p, &t[0], &t[1], &t[2], &t[3], &t[0], &g, work, bytes);
        const long tried = disarm();
        assert_int_equal(status, ATTN_OK);
        if (time == 1 && tried != 0)
            fail_msg("width %lld: %ld attempts", (long long)width, tried);
        free(work);
    }
    for (int n = 0; n < 8; n++)
        kit_drop(&t[n]);
}

static void test_sdpa_backward_work__never_allocates_at_any_width(void **state)
{
    (void)state;
    for (int64_t width = 1; width <= 52; width++) {
        backward_of_width(ATTN_F32, width);
        backward_of_width(ATTN_F64, width);
    }
}

/* ---- the query ---- */

struct problem {
    int64_t size[7]; /* B, Hkv, G, Tq, Tk, D, Dv */
};

static size_t query(int32_t threads, const struct problem *p, bool outputs,
                    size_t *alignment)
{
    static const double nothing[1] = {0};
    const int64_t *s = p->size;
    const int64_t heads = s[1] * s[2];
    attn_tensor q, k, v, out, lse, weights;
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    attn_view_bhtd(&q, ATTN_F32, nothing, s[0], heads, s[3], s[5]);
    attn_view_bhtd(&k, ATTN_F32, nothing, s[0], s[1], s[4], s[5]);
    attn_view_bhtd(&v, ATTN_F32, nothing, s[0], s[1], s[4], s[6]);
    attn_view_bhtd(&out, ATTN_F32, nothing, s[0], heads, s[3], s[6]);
    attn_view_bhtd(&lse, ATTN_F32, nothing, s[0], heads, s[3], 1);
    attn_view_bhtd(&weights, ATTN_F32, nothing, s[0], heads, s[3], s[4]);
    /* Far apart, so that the views do not overlap; nothing is read. */
    out.data = (void *)((uintptr_t)1 << 40);
    lse.data = (void *)((uintptr_t)2 << 40);
    weights.data = (void *)((uintptr_t)3 << 40);
    if (outputs) {
        params.lse = &lse;
        params.weights = &weights;
    }
    attn_context_params cp = ATTN_CONTEXT_PARAMS_INIT;
    attn_context *context = NULL;
    size_t bytes = 0;
    cp.num_threads = threads;
    assert_int_equal(attn_context_create(&context, &cp), ATTN_OK);
    const attn_status status = attn_sdpa_workspace(context, &params, &q, &k, &v,
                                                   &out, &bytes, alignment);
    attn_context_destroy(context);
    if (status != ATTN_OK)
        fail_msg("%s", attn_last_error());
    return bytes;
}

static void test_sdpa_workspace__is_enough_for_smaller_problems(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 1500; seed++) {
        kit_seed(seed);
        const int64_t largest = kit_int(0, 1) == 1 ? 20 : 900;
        struct problem large;
        struct problem small;
        for (int n = 0; n < 7; n++) {
            large.size[n] = kit_int(1, n < 3 ? 6 : largest);
            small.size[n] = kit_int(0, large.size[n]);
            if (kit_int(0, 2) == 0)
                small.size[n] = large.size[n];
        }
        /* Sizes of the call are those of its tensors: Hq = Hkv G counts. */
        if (small.size[1] == 0)
            small.size[1] = small.size[2] = 1;
        const int32_t threads = (int32_t)kit_int(1, 9);
        const int32_t fewer = (int32_t)kit_int(1, threads);
        const bool outputs = kit_int(0, 1) == 1;
        size_t alignment = 0;
        size_t small_alignment = 0;
        const size_t bytes = query(threads, &large, outputs, &alignment);
        const size_t needed = query(
            fewer, &small, outputs && kit_int(0, 1) == 1, &small_alignment);
        if (needed > bytes || small_alignment > alignment)
            fail_msg("seed %d: %zu bytes at %zu are not enough for %zu at %zu",
                     (int)seed, bytes, alignment, needed, small_alignment);
    }
}

/* Sizes of a layer: B, T, E, Hkv, G, D. */
static size_t query_layer(int32_t threads, const int64_t *s)
{
    static const double nothing[1] = {0};
    attn_tensor x, w_qkv, w_o, out;
    attn_mha_params p = ATTN_MHA_PARAMS_INIT;
    attn_context_params cp = ATTN_CONTEXT_PARAMS_INIT;
    attn_context *context = NULL;
    size_t bytes = 0;
    size_t alignment = 0;
    const int64_t heads = s[3] * s[4];
    const int64_t rows = (heads + 2 * s[3]) * s[5];
    attn_view_bte(&x, ATTN_F64, nothing, s[0], s[1], s[2]);
    attn_view_matrix(&w_qkv, ATTN_F64, nothing, rows, s[2], s[2]);
    attn_view_matrix(&w_o, ATTN_F64, nothing, s[2], heads * s[5], heads * s[5]);
    out = x;
    out.data = (void *)((uintptr_t)1 << 40); /* far away; nothing is read */
    p.weight_layout = ATTN_WEIGHT_OUT_IN;
    p.num_heads = heads;
    p.num_kv_heads = s[3];
    p.w_qkv = &w_qkv;
    p.w_o = &w_o;
    cp.num_threads = threads;
    assert_int_equal(attn_context_create(&context, &cp), ATTN_OK);
    const attn_status status = attn_mha_workspace(context, &p, &x, NULL, NULL,
                                                  &out, &bytes, &alignment);
    attn_context_destroy(context);
    if (status != ATTN_OK)
        fail_msg("%s", attn_last_error());
    return bytes;
}

static void test_mha_workspace__is_enough_for_smaller_problems(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 1000; seed++) {
        kit_seed(seed);
        const int64_t largest = kit_int(0, 1) == 1 ? 20 : 500;
        int64_t large[6];
        int64_t small[6];
        for (int n = 0; n < 6; n++) {
            large[n] = kit_int(1, n == 1 || n == 2 || n == 5 ? largest : 5);
            small[n] = kit_int(0, 2) == 0 ? large[n] : kit_int(1, large[n]);
        }
        const int32_t threads = (int32_t)kit_int(1, 9);
        const int32_t fewer = (int32_t)kit_int(1, threads);
        const size_t bytes = query_layer(threads, large);
        const size_t needed = query_layer(fewer, small);
        if (needed > bytes)
            fail_msg("seed %d: %zu bytes are not enough for %zu", (int)seed,
                     bytes, needed);
    }
}

/* Which gradients a query is for, or-ed. */
enum { D_Q = 1, D_K = 2, D_V = 4, D_MASK = 8, D_ALIBI = 16, D_SCALE = 32 };

/* Of the gradients of a problem whose mask is summed as mask says: 1, 2, 4 and
 * 8 for a size of 1. */
static size_t query_gradients(int32_t threads, const struct problem *p,
                              int wanted, int mask, bool same_params,
                              size_t *alignment)
{
    static const double nothing[1] = {0};
    const int64_t *s = p->size;
    const int64_t heads = s[1] * s[2];
    attn_tensor q, k, v, out, lse, slopes, d[6];
    attn_mask added = {.kind = ATTN_MASK_ADD};
    const attn_tensor *d_masks[1] = {&d[3]};
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    attn_sdpa_gradients g = ATTN_SDPA_GRADIENTS_INIT;
    attn_view_bhtd(&q, ATTN_F32, nothing, s[0], heads, s[3], s[5]);
    attn_view_bhtd(&k, ATTN_F32, nothing, s[0], s[1], s[4], s[5]);
    attn_view_bhtd(&v, ATTN_F32, nothing, s[0], s[1], s[4], s[6]);
    attn_view_bhtd(&out, ATTN_F32, nothing, s[0], heads, s[3], s[6]);
    attn_view_bhtd(&lse, ATTN_F32, nothing, s[0], heads, s[3], 1);
    attn_view_vector(&slopes, ATTN_F32, nothing, heads);
    attn_view_bhtd(&added.view, ATTN_F32, nothing, mask & 1 ? 1 : s[0],
                   mask & 2 ? 1 : heads, mask & 4 ? 1 : s[3],
                   mask & 8 ? 1 : s[4]);
    d[0] = q;
    d[1] = k;
    d[2] = v;
    d[3] = added.view;
    d[4] = slopes;
    attn_view_vector(&d[5], ATTN_F32, nothing, 1);
    /* Far apart, so that the views do not overlap; nothing is read. */
    for (int n = 0; n < 6; n++)
        d[n].data = (void *)((uintptr_t)(n + 1) << 40);
    params.lse = &lse;
    params.align = ATTN_ALIGN_TOP_LEFT;
    if (same_params || (wanted & D_ALIBI))
        params.alibi = &slopes;
    if (same_params || (wanted & D_MASK)) {
        params.masks = &added;
        params.num_masks = 1;
    }
    g.d_q = wanted & D_Q ? &d[0] : NULL;
    g.d_k = wanted & D_K ? &d[1] : NULL;
    g.d_v = wanted & D_V ? &d[2] : NULL;
    g.d_masks = wanted & D_MASK ? d_masks : NULL;
    g.d_alibi = wanted & D_ALIBI ? &d[4] : NULL;
    g.d_scale = wanted & D_SCALE ? &d[5] : NULL;
    attn_context_params cp = ATTN_CONTEXT_PARAMS_INIT;
    attn_context *context = NULL;
    size_t bytes = 0;
    cp.num_threads = threads;
    assert_int_equal(attn_context_create(&context, &cp), ATTN_OK);
    const attn_status status = attn_sdpa_backward_workspace(
        context, &params, &q, &k, &v, &out, &out, &g, &bytes, alignment);
    attn_context_destroy(context);
    if (status != ATTN_OK)
        fail_msg("%s", attn_last_error());
    return bytes;
}

static void
test_sdpa_backward_workspace__is_enough_for_smaller_problems(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 1500; seed++) {
        kit_seed(seed);
        const int64_t largest = kit_int(0, 1) == 1 ? 20 : 900;
        struct problem large;
        struct problem small;
        for (int n = 0; n < 7; n++) {
            large.size[n] = kit_int(1, n < 3 ? 6 : largest);
            small.size[n] = kit_int(0, large.size[n]);
            if (kit_int(0, 2) == 0)
                small.size[n] = large.size[n];
        }
        if (small.size[1] == 0)
            small.size[1] = small.size[2] = 1;
        const int32_t threads = (int32_t)kit_int(1, 9);
        const int32_t fewer = (int32_t)kit_int(1, threads);
        const int wanted = (int)kit_int(0, 63);
        const int mask = (int)kit_int(0, 15);
        size_t alignment = 0;
        size_t small_alignment = 0;
        const size_t bytes =
            query_gradients(threads, &large, wanted, mask, true, &alignment);
        const size_t needed = query_gradients(fewer, &small, wanted, mask, true,
                                              &small_alignment);
        if (needed > bytes || small_alignment > alignment)
            fail_msg("seed %d: %zu bytes at %zu are not enough for %zu at %zu",
                     (int)seed, bytes, alignment, needed, small_alignment);
    }
}

/* Scratch memory of gradients does not grow with the lengths either. */
static void
test_sdpa_backward_workspace__is_constant_in_the_lengths(void **state)
{
    (void)state;
    const struct problem some = {{1, 1, 1, 4096, 4096, 64, 64}};
    const struct problem more = {{1, 1, 1, 65536, 65536, 64, 64}};
    size_t alignment;
    for (int wanted = 0; wanted < 64; wanted++)
        for (int32_t threads = 1; threads <= 4; threads += 3) {
            const size_t bytes =
                query_gradients(threads, &more, wanted, 0, false, &alignment);
            assert_true(bytes <= query_gradients(threads, &some, wanted, 0,
                                                 false, &alignment));
            assert_true(bytes <= (size_t)threads * 4 << 20);
        }
}

static void
test_sdpa_backward_work__takes_the_memory_of_a_larger_problem(void **state)
{
    (void)state;
    size_t bytes;
    size_t alignment;
    attn_context *context = make_context(3);
    attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
    attn_sdpa_gradients g = all.gradients;
    attn_tensor lse = all.sums;
    p.lse = &lse;
    g.d_lse = g.d_alibi = g.d_sinks = NULL;
    g.d_masks = NULL;
    assert_int_equal(attn_sdpa_backward_workspace(
                         context, &p, &all.q, &all.k, &all.v, &all.result,
                         &all.result, &g, &bytes, &alignment),
                     ATTN_OK);
    void *work = make_work(bytes, alignment);
    for (int64_t len = 1; len <= 70; len += 3) {
        attn_tensor q = all.q;
        attn_tensor k = all.k;
        attn_tensor v = all.v;
        attn_tensor out = all.result;
        attn_tensor d_q = all.gradient[0];
        attn_tensor d_k = all.gradient[1];
        attn_tensor d_v = all.gradient[2];
        q.shape[2] = out.shape[2] = lse.shape[2] = d_q.shape[2] = len;
        k.shape[2] = v.shape[2] = d_k.shape[2] = d_v.shape[2] = 90 - len;
        g.d_q = &d_q;
        g.d_k = &d_k;
        g.d_v = &d_v;
        mark_outputs();
        assert_int_equal(
            attn_sdpa_backward(NULL, &p, &q, &k, &v, &out, &out, &g), ATTN_OK);
        remember_outputs();
        mark_outputs();
        assert_int_equal(attn_sdpa_backward_work(context, &p, &q, &k, &v, &out,
                                                 &out, &g, work, bytes),
                         ATTN_OK);
        assert_true(outputs_as_remembered());
    }
    free(work);
    attn_context_destroy(context);
}

/* The promise is about calls: the scratch memory of a larger problem is taken
 * for a smaller one and gives the same bits. */
static void test_sdpa_work__takes_the_memory_of_a_larger_problem(void **state)
{
    (void)state;
    size_t bytes;
    size_t alignment;
    attn_context *context = make_context(3);
    assert_int_equal(attn_sdpa_workspace(context, &all.sdpa, &all.q, &all.k,
                                         &all.v, &all.out, &bytes, &alignment),
                     ATTN_OK);
    void *work = make_work(bytes, alignment);
    for (int64_t len = 1; len <= 70; len += 3) {
        attn_tensor q = all.q;
        attn_tensor k = all.k;
        attn_tensor v = all.v;
        attn_tensor out = all.out;
        q.shape[2] = out.shape[2] = len;
        k.shape[2] = v.shape[2] = 90 - len;
        mark_outputs();
        assert_int_equal(attn_sdpa(NULL, NULL, &q, &k, &v, &out), ATTN_OK);
        remember_outputs();
        mark_outputs();
        assert_int_equal(
            attn_sdpa_work(context, NULL, &q, &k, &v, &out, work, bytes),
            ATTN_OK);
        assert_true(outputs_as_remembered());
    }
    free(work);
    attn_context_destroy(context);
}

/* Scratch memory does not grow with the lengths. */
static void test_sdpa_workspace__is_constant_in_the_lengths(void **state)
{
    (void)state;
    const struct problem some = {{1, 1, 1, 4096, 4096, 64, 64}};
    const struct problem more = {{1, 1, 1, 65536, 65536, 64, 64}};
    size_t alignment;
    assert_true(query(1, &more, false, &alignment) <=
                query(1, &some, false, &alignment));
    assert_true(query(1, &more, false, &alignment) <= (size_t)4 << 20);
    assert_true(query(4, &more, false, &alignment) <= (size_t)16 << 20);
}

/* ---- threads that cannot be started ---- */

#if !KIT_SANITIZED
static void test_threads__fewer_than_asked_for_is_no_error(void **state)
{
    (void)state;
    for (int left = 0; left < 3; left++) {
        attn_context *context = make_context(4);
        mark_outputs();
        assert_int_equal(run_sdpa(NULL), ATTN_OK);
        remember_outputs();
        mark_outputs();
        atomic_store(&threads_left, left);
        atomic_store(&threads_refused, 0);
        const attn_status status = run_sdpa(context);
        atomic_store(&threads_left, -1);
        assert_int_equal(status, ATTN_OK);
        assert_true(atomic_load(&threads_refused) > 0 ||
                    kit_blas_is_exclusive());
        assert_true(outputs_as_remembered());
        attn_context_destroy(context);
        assert_int_equal(atomic_load(&live), 0);
    }
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_default_context__each_failure_is_a_clean_status),
        cmocka_unit_test(test_context_hooks__each_failure_is_a_clean_status),
        cmocka_unit_test(test_context_create__each_failure_is_a_clean_status),
        cmocka_unit_test(test_context_hooks__are_the_only_source),
        cmocka_unit_test(test_sdpa_work__never_allocates),
        cmocka_unit_test(test_mha_work__never_allocates),
        cmocka_unit_test(test_sdpa_backward_work__never_allocates),
        cmocka_unit_test(test_sdpa_backward_work__never_allocates_at_any_width),
        cmocka_unit_test(
            test_sdpa_backward_workspace__is_enough_for_smaller_problems),
        cmocka_unit_test(
            test_sdpa_backward_workspace__is_constant_in_the_lengths),
        cmocka_unit_test(
            test_sdpa_backward_work__takes_the_memory_of_a_larger_problem),
        cmocka_unit_test(test_sdpa_workspace__is_enough_for_smaller_problems),
        cmocka_unit_test(test_mha_workspace__is_enough_for_smaller_problems),
        cmocka_unit_test(test_sdpa_work__takes_the_memory_of_a_larger_problem),
        cmocka_unit_test(test_sdpa_workspace__is_constant_in_the_lengths),
#if !KIT_SANITIZED
        cmocka_unit_test(test_threads__fewer_than_asked_for_is_no_error),
#endif
    };
    /* Threads also in problems as small as these. */
    setenv("ATTN_MIN_WORK", "0", 1);
#if !KIT_SANITIZED
    blas_ends_process = strstr(attn_blas_info(), "BLIS") != NULL;
#endif
    return cmocka_run_group_tests(tests, make_all, drop_all);
}
