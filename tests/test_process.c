/*
 * test_process.c - the library as a guest: it survives fork and dlclose,
 * reads ATTN_NUM_THREADS, and leaves the process as it found it.
 */
#define _GNU_SOURCE 1

#include "kit.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <fenv.h>
#include <limits.h>
#include <locale.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* A child that hangs is ended by its own alarm. */
#define PATIENCE 60

/* This program's file, to run it again. Not /proc/self/exe itself: under
 * valgrind that is valgrind. */
static char self[1024];

/* One problem with enough rows for several threads. */
static struct {
    attn_tensor q, k, v, out, want;
} all;

static int make_all(void **state)
{
    (void)state;
    kit_seed(21);
    all.q = kit_make(ATTN_F32, 2, 4, 50, 16);
    all.k = kit_make(ATTN_F32, 2, 4, 60, 16);
    all.v = kit_make(ATTN_F32, 2, 4, 60, 16);
    all.out = kit_make(ATTN_F32, 2, 4, 50, 16);
    all.want = kit_make(ATTN_F32, 2, 4, 50, 16);
    return 0;
}

static int drop_all(void **state)
{
    (void)state;
    kit_drop(&all.q);
    kit_drop(&all.k);
    kit_drop(&all.v);
    kit_drop(&all.out);
    kit_drop(&all.want);
    return 0;
}

static attn_context *make_context(int32_t threads)
{
    attn_context_params p = ATTN_CONTEXT_PARAMS_INIT;
    attn_context *context = NULL;
    p.num_threads = threads;
    assert_int_equal(attn_context_create(&context, &p), ATTN_OK);
    return context;
}

static bool run_is_right(const attn_context *context)
{
    kit_fill_with(&all.out, -77.0);
    return attn_sdpa(context, NULL, &all.q, &all.k, &all.v, &all.out) ==
               ATTN_OK &&
           kit_same(&all.out, &all.want);
}

/* The exit status of a child; 1000 and more: ended by a signal. */
static int end_of(pid_t child)
{
    int status = 0;
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/* ---- fork ---- */

/* First of all tests: nothing was computed in this process yet. */
static void test_fork__before_the_first_use(void **state)
{
    (void)state;
    for (int32_t threads = 1; threads <= 3; threads += 2) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(PATIENCE);
            attn_context *context = make_context(threads);
            const attn_status status =
                attn_sdpa(context, NULL, &all.q, &all.k, &all.v, &all.out);
            attn_context_destroy(context);
            _exit(status == ATTN_OK ? 0 : 1);
        }
        assert_int_equal(end_of(child), 0);
    }
    assert_int_equal(attn_sdpa(NULL, NULL, &all.q, &all.k, &all.v, &all.want),
                     ATTN_OK);
}

static void test_fork__after_use_with_a_running_pool(void **state)
{
    (void)state;
    if (KIT_THREAD_SANITIZED)
        skip();
    attn_context *context = make_context(3);
    assert_true(run_is_right(context));
    for (int n = 0; n < 5; n++) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(PATIENCE);
            bool right = run_is_right(context);
            right = run_is_right(NULL) && right;
            attn_context *fresh = make_context(2);
            right = run_is_right(fresh) && right;
            attn_context_destroy(fresh);
            attn_context_destroy(context);
            _exit(right ? 0 : 1);
        }
        /* The parent goes on while the child runs. */
        assert_true(run_is_right(context));
        assert_int_equal(end_of(child), 0);
        assert_true(run_is_right(context));
    }
    attn_context_destroy(context);
}

struct caller {
    const attn_context *context;
    atomic_int *waiting; /* start when it is 0; NULL: go on until stop */
    atomic_bool *stop;
    void *work; /* NULL: the library allocates */
    size_t work_bytes;
    attn_tensor out;
    bool right;
};

static void come_together(atomic_int *waiting)
{
    atomic_fetch_sub(waiting, 1);
    while (atomic_load(waiting) > 0)
        ;
}

static void *call_together(void *p)
{
    struct caller *c = p;
    const attn_tensor *q = &all.q, *k = &all.k, *v = &all.v;
    c->right = true;
    if (c->waiting)
        come_together(c->waiting);
    do {
        const attn_status status =
            c->work ? attn_sdpa_work(c->context, NULL, q, k, v, &c->out,
                                     c->work, c->work_bytes)
                    : attn_sdpa(c->context, NULL, q, k, v, &c->out);
        c->right =
            status == ATTN_OK && kit_same(&c->out, &all.want) && c->right;
    } while (c->stop && !atomic_load(c->stop));
    return NULL;
}

static struct caller make_caller(const attn_context *context)
{
    const int64_t *n = all.out.shape;
    struct caller c = {.context = context};
    c.out = kit_make(all.out.dtype, n[0], n[1], n[2], n[3]);
    return c;
}

/* The child's own threads find the parent's pool, and only one of them may make
 * it anew. */
static void test_fork__threads_of_the_child_come_together(void **state)
{
    (void)state;
    if (KIT_THREAD_SANITIZED)
        skip();
    attn_context *context = make_context(3);
    assert_true(run_is_right(context));
    for (int n = 0; n < 50; n++) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(PATIENCE);
            atomic_int waiting = 2;
            bool right = true;
            pthread_t threads[2];
            struct caller callers[2];
            for (int i = 0; i < 2; i++) {
                callers[i] = make_caller(context);
                callers[i].waiting = &waiting;
                right = pthread_create(&threads[i], NULL, call_together,
                                       &callers[i]) == 0 &&
                        right;
            }
            for (int i = 0; i < 2 && right; i++)
                right = pthread_join(threads[i], NULL) == 0 && right;
            _exit(right && callers[0].right && callers[1].right ? 0 : 1);
        }
        assert_int_equal(end_of(child), 0);
    }
    attn_context_destroy(context);
}

/* AddressSanitizer's allocator does not hold its own locks over fork, as the C
 * library's does: whoever allocates while another thread forks, any thread that
 * starts among them, may leave the child a lock that nobody gives back. Under
 * it all threads run before the first fork, and calls get their memory. */
static void allocate_before_fork(struct caller *c)
{
    size_t alignment = 0;
    c->right = run_is_right(c->context);
    assert_true(c->right);
    assert_int_equal(attn_sdpa_workspace(c->context, NULL, &all.q, &all.k,
                                         &all.v, &c->out, &c->work_bytes,
                                         &alignment),
                     ATTN_OK);
    c->work = aligned_alloc(alignment, (c->work_bytes + alignment - 1) /
                                           alignment * alignment);
    assert_non_null(c->work);
}

/* Whatever another thread holds at that moment, it will never give back in the
 * child: the lock around a BLAS that is not thread-safe was once among it. */
static void test_fork__while_another_thread_computes(void **state)
{
    (void)state;
    if (KIT_THREAD_SANITIZED)
        skip();
    for (int32_t n = 1; n <= 3; n += 2) {
        attn_context *context = make_context(n);
        atomic_bool stop = false;
        struct caller caller = make_caller(context);
        pthread_t thread;
        atomic_int waiting = 2;
        caller.stop = &stop;
        if (KIT_SANITIZED) {
            allocate_before_fork(&caller);
            caller.waiting = &waiting;
        }
        assert_int_equal(pthread_create(&thread, NULL, call_together, &caller),
                         0);
        if (KIT_SANITIZED)
            come_together(&waiting);
        int ends = 0;
        for (int i = 0; i < 20 && ends == 0; i++) {
            const pid_t child = fork();
            if (child == 0) {
                alarm(PATIENCE);
                _exit(run_is_right(context) ? 0 : 1);
            }
            ends = end_of(child);
        }
        atomic_store(&stop, true);
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_true(caller.right);
        assert_int_equal(ends, 0);
        free(caller.work);
        kit_drop(&caller.out);
        attn_context_destroy(context);
    }
}

static void test_fork__in_the_child_of_a_child(void **state)
{
    (void)state;
    if (KIT_THREAD_SANITIZED)
        skip();
    attn_context *context = make_context(3);
    assert_true(run_is_right(context));
    const pid_t child = fork();
    if (child == 0) {
        alarm(PATIENCE);
        const bool before = run_is_right(context);
        const pid_t grandchild = fork();
        if (grandchild == 0) {
            alarm(PATIENCE);
            _exit(run_is_right(context) ? 0 : 1);
        }
        const int end = end_of(grandchild);
        _exit(before && end == 0 && run_is_right(context) ? 0 : 1);
    }
    assert_int_equal(end_of(child), 0);
    attn_context_destroy(context);
}

/* A child that never uses the library ends as usual. */
static void test_fork__child_that_only_exits(void **state)
{
    (void)state;
    attn_context *context = make_context(3);
    assert_true(run_is_right(context));
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        alarm(PATIENCE);
        attn_context_destroy(context);
        exit(7);
    }
    assert_int_equal(end_of(child), 7);
    attn_context_destroy(context);
}

/* ---- ATTN_NUM_THREADS ---- */

/* This program again, in a child; its exit status is what it found. */
static int end_of_self(const char *action, const char *num_threads)
{
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        if (num_threads == NULL)
            unsetenv("ATTN_NUM_THREADS");
        else
            setenv("ATTN_NUM_THREADS", num_threads, 1);
        execl(self, self, action, (char *)NULL);
        _exit(99);
    }
    return end_of(child);
}

static void test_num_threads__the_environment_is_read(void **state)
{
    (void)state;
    assert_int_equal(end_of_self("default-threads", "3"), 3);
    assert_int_equal(end_of_self("default-threads", "1"), 1);
    assert_int_equal(end_of_self("default-threads", "17"), 17);
    assert_int_equal(end_of_self("context-threads", "5"), 5);
    assert_int_equal(end_of_self("own-threads", "5"), 2);
}

static void test_num_threads__no_number_is_one_thread(void **state)
{
    (void)state;
    static const char *const texts[] = {NULL, "", "abc", "0", "-4", " "};
    for (size_t n = 0; n < COUNT(texts); n++) {
        assert_int_equal(end_of_self("default-threads", texts[n]), 1);
        assert_int_equal(end_of_self("context-threads", texts[n]), 1);
    }
}

static void test_num_threads__the_pool_of_the_process_is_used(void **state)
{
    (void)state;
    if (KIT_THREAD_SANITIZED)
        skip();
    assert_int_equal(end_of_self("started-threads", "3"),
                     kit_blas_is_exclusive() ? 0 : 2);
    assert_int_equal(end_of_self("started-threads", "1"), 0);
    assert_int_equal(end_of_self("started-threads", NULL), 0);
}

/* Printing nothing and starting nothing also holds when the BLAS library is
 * told to use threads. */
static void test_process__blas_threads_are_not_started(void **state)
{
    (void)state;
    /* BLIS on POSIX threads has nothing that stops it. */
    if (kit_blas_file_has("blis-pthread"))
        skip();
    setenv("OPENBLAS_NUM_THREADS", "4", 1);
    setenv("OMP_NUM_THREADS", "4", 1);
    setenv("BLIS_NUM_THREADS", "4", 1);
    const int started = end_of_self("started-threads", NULL);
    unsetenv("OPENBLAS_NUM_THREADS");
    unsetenv("OMP_NUM_THREADS");
    unsetenv("BLIS_NUM_THREADS");
    assert_int_equal(started, 0);
}

/* All gradients of q, k and v, which are one. */
static attn_status train(const attn_tensor *q, const attn_tensor *out)
{
    const int64_t *s = q->shape;
    attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
    attn_sdpa_gradients g = ATTN_SDPA_GRADIENTS_INIT;
    attn_tensor lse = kit_make(q->dtype, s[0], s[1], s[2], 1);
    attn_tensor d_q = kit_make(q->dtype, s[0], s[1], s[2], s[3]);
    attn_tensor d_k = kit_make(q->dtype, s[0], s[1], s[2], s[3]);
    attn_tensor d_v = kit_make(q->dtype, s[0], s[1], s[2], s[3]);
    p.lse = &lse;
    g.d_q = &d_q;
    g.d_k = &d_k;
    g.d_v = &d_v;
    attn_status status = attn_sdpa(NULL, &p, q, q, q, out);
    if (status == ATTN_OK)
        status = attn_sdpa_backward(NULL, &p, q, q, q, out, q, &g);
    kit_drop(&lse);
    kit_drop(&d_q);
    kit_drop(&d_k);
    kit_drop(&d_v);
    return status;
}

/* Enough work that a BLAS would want all its threads. */
static int started_threads(void)
{
    attn_tensor q = kit_make(ATTN_F32, 2, 2, 600, 64);
    attn_tensor out = kit_make(ATTN_F32, 2, 2, 600, 64);
    attn_tensor x = kit_make(ATTN_F32, 1, 1, 512, 512);
    attn_tensor w = kit_make(ATTN_F32, 1, 1, 512, 512);
    attn_tensor y = kit_make(ATTN_F32, 1, 1, 512, 512);
    const int before = kit_thread_count();
    if (attn_sdpa(NULL, NULL, &q, &q, &q, &out) != ATTN_OK ||
        train(&q, &out) != ATTN_OK ||
        attn_linear(NULL, ATTN_WEIGHT_OUT_IN, &x, &w, NULL, &y) != ATTN_OK)
        return 98;
    const int after = kit_thread_count();
    kit_drop(&q);
    kit_drop(&out);
    kit_drop(&x);
    kit_drop(&w);
    kit_drop(&y);
    return after - before;
}

/* What a host has told OpenMP for its own thread. */
static void test_process__settings_of_openmp_are_kept(void **state)
{
    (void)state;
    static const char *const names[] = {"num_threads", "max_active_levels"};
    attn_tensor q = kit_make(ATTN_F32, 1, 2, 600, 64);
    attn_tensor out = kit_make(ATTN_F32, 1, 2, 600, 64);
    int known = 0;
    for (int i = 0; i < 2; i++) {
        void *found[2];
        int (*get)(void);
        void (*set)(int);
        char name[40];
        (void)snprintf(name, sizeof name, "omp_get_%s",
                       i == 0 ? "max_threads" : names[i]);
        found[0] = dlsym(RTLD_DEFAULT, name);
        (void)snprintf(name, sizeof name, "omp_set_%s", names[i]);
        found[1] = dlsym(RTLD_DEFAULT, name);
        if (found[0] == NULL || found[1] == NULL)
            continue;
        memcpy(&get, &found[0], sizeof get);
        memcpy(&set, &found[1], sizeof set);
        known++;
        const int before = get();
        set(3);
        assert_int_equal(attn_sdpa(NULL, NULL, &q, &q, &q, &out), ATTN_OK);
        assert_int_equal(get(), 3);
        assert_int_equal(train(&q, &out), ATTN_OK);
        assert_int_equal(get(), 3);
        set(before);
    }
    kit_drop(&q);
    kit_drop(&out);
    if (known == 0)
        skip();
}

static int blas_status(void);
static bool advice_is_right(void);

static int run_action(const char *action)
{
    alarm(PATIENCE);
    if (strcmp(action, "default-threads") == 0)
        return attn_context_num_threads(NULL);
    if (strcmp(action, "started-threads") == 0)
        return started_threads();
    if (strcmp(action, "blas-status") == 0)
        return blas_status();
    if (strcmp(action, "blas-advice") == 0)
        return advice_is_right() ? 0 : 96;
    attn_context_params p = ATTN_CONTEXT_PARAMS_INIT;
    attn_context *context = NULL;
    p.num_threads = strcmp(action, "own-threads") == 0 ? 2 : 0;
    if (attn_context_create(&context, &p) != ATTN_OK)
        return 97;
    const int threads = attn_context_num_threads(context);
    attn_context_destroy(context);
    return threads;
}

/* ---- a BLAS that cannot be used ---- */

/* The status of every call that needs a product; 96 if they disagree or write
 * something. */
static int blas_status(void)
{
    attn_tensor q = kit_make(ATTN_F32, 1, 1, 3, 4);
    attn_tensor w = kit_make(ATTN_F32, 1, 1, 4, 4);
    attn_tensor out = kit_make(ATTN_F32, 1, 1, 3, 4);
    attn_tensor copy = kit_make(ATTN_F32, 1, 1, 3, 4);
    attn_tensor lse = kit_make(ATTN_F32, 1, 1, 3, 1);
    attn_mha_params p = ATTN_MHA_PARAMS_INIT;
    attn_sdpa_params sdpa = ATTN_SDPA_PARAMS_INIT;
    attn_sdpa_gradients g = ATTN_SDPA_GRADIENTS_INIT;
    size_t bytes;
    size_t alignment;
    p.weight_layout = ATTN_WEIGHT_OUT_IN;
    p.num_heads = 2;
    p.w_q = p.w_k = p.w_v = p.w_o = &w;
    sdpa.lse = &lse;
    g.d_q = &out;
    memcpy(copy.data, out.data, 12 * sizeof(float));
    const attn_status all_of_them[] = {
        attn_sdpa(NULL, NULL, &q, &q, &q, &out),
        attn_sdpa_check(NULL, NULL, &q, &q, &q, &out),
        attn_sdpa_workspace(NULL, NULL, &q, &q, &q, &out, &bytes, &alignment),
        attn_sdpa_backward(NULL, &sdpa, &q, &q, &q, &q, &q, &g),
        attn_sdpa_backward_check(NULL, &sdpa, &q, &q, &q, &q, &q, &g),
        attn_sdpa_backward_workspace(NULL, &sdpa, &q, &q, &q, &q, &q, &g,
                                     &bytes, &alignment),
        attn_mha(NULL, &p, &q, NULL, NULL, &out),
        attn_mha_check(NULL, &p, &q, NULL, NULL, &out),
        attn_linear(NULL, ATTN_WEIGHT_OUT_IN, &q, &w, NULL, &out)};
    for (size_t n = 1; n < COUNT(all_of_them); n++)
        if (all_of_them[n] != all_of_them[0])
            return 96;
    if (all_of_them[0] != ATTN_OK && !kit_same(&out, &copy))
        return 96;
    kit_drop(&q);
    kit_drop(&w);
    kit_drop(&out);
    kit_drop(&copy);
    kit_drop(&lse);
    return -all_of_them[0];
}

static void test_blas__the_loaded_one_can_be_used(void **state)
{
    (void)state;
    assert_int_equal(end_of_self("blas-status", NULL), -ATTN_OK);
}

/* An OpenBLAS older than the processor takes it for one without AVX, and
 * attention a fifth of its speed: what is loaded must say what to do. */
static bool advice_is_right(void)
{
    static const struct {
        const char *core, *avx2, *avx512;
    } cases[] = {
        {"core Prescott,", "OPENBLAS_CORETYPE=Haswell",
         "OPENBLAS_CORETYPE=SkylakeX"},
        {"core Nehalem,", "OPENBLAS_CORETYPE=Haswell",
         "OPENBLAS_CORETYPE=SkylakeX"},
        {"core Haswell,", NULL, "OPENBLAS_CORETYPE=SkylakeX"},
        {"core Zen,", NULL, "OPENBLAS_CORETYPE=SkylakeX"},
    };
    const char *info = attn_blas_info();
    const char *level = attn_build_info();
    for (size_t n = 0; n < COUNT(cases); n++) {
        if (!strstr(info, cases[n].core))
            continue;
        const char *want = strstr(level, "AVX-512") ? cases[n].avx512
                           : strstr(level, "AVX2")  ? cases[n].avx2
                                                    : NULL;
        return want ? strstr(info, want) != NULL
                    : strstr(info, "CORETYPE") == NULL;
    }
    return strstr(info, "CORETYPE") == NULL;
}

/* Sets a variable of the environment, or unsets it for NULL; the caller frees
 * what it was before. */
static char *exchange_env(const char *name, const char *value)
{
    const char *now = getenv(name);
    char *before = now ? strdup(now) : NULL;
    if (value)
        setenv(name, value, 1);
    else
        unsetenv(name);
    return before;
}

static void test_blas__a_core_older_than_the_processor_is_told(void **state)
{
    (void)state;
    /* OpenBLAS plays any of them, also what the processor has not. */
    static const char *const cores[] = {"Prescott", "Nehalem", "Haswell"};
    static const char *const levels[] = {"generic", "avx2", "avx512"};
    const size_t known = strstr(attn_build_info(), "AVX") ? 3 : 2;
    for (size_t n = 0; n < known; n++)
        for (size_t k = 0; k < COUNT(levels); k++) {
            char *core = exchange_env("OPENBLAS_CORETYPE", cores[n]);
            char *level = exchange_env("ATTN_CPU_LEVEL", levels[k]);
            const int end = end_of_self("blas-advice", NULL);
            free(exchange_env("OPENBLAS_CORETYPE", core));
            free(exchange_env("ATTN_CPU_LEVEL", level));
            free(core);
            free(level);
            assert_int_equal(end, 0);
        }
}

#ifdef ATTN_STUB_BLAS
static void test_blas__one_with_64_bit_integers_is_refused(void **state)
{
    (void)state;
    const char *played = getenv("ATTN_STUB_BLAS");
    char *kept = played == NULL ? NULL : strdup(played);
    setenv("ATTN_STUB_BLAS", "wide", 1);
    const int status = end_of_self("blas-status", NULL);
    if (kept == NULL)
        unsetenv("ATTN_STUB_BLAS");
    else
        setenv("ATTN_STUB_BLAS", kept, 1);
    free(kept);
    assert_int_equal(status, -ATTN_ERR_BLAS);
}
#endif

/* ---- what must stay as it was ---- */

static int count_descriptors(void)
{
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    while (readdir(dir) != NULL)
        count++;
    closedir(dir);
    return count;
}

struct process_state {
    char locale[256];
    char directory[1024];
    bool blocked[65];
    bool masks[65][65];
    int flags[65];
    void (*handlers[65])(int);
    int rounding;
    int traps;
    int descriptors;
    mode_t mask;
};

static void take_state(struct process_state *s)
{
    memset(s, 0, sizeof *s);
    snprintf(s->locale, sizeof s->locale, "%s", setlocale(LC_ALL, NULL));
    assert_non_null(getcwd(s->directory, sizeof s->directory));
    sigset_t blocked;
    sigemptyset(&blocked);
    sigprocmask(SIG_SETMASK, NULL, &blocked);
    for (int n = 1; n < 65; n++) {
        struct sigaction action;
        s->blocked[n] = sigismember(&blocked, n) == 1;
        if (sigaction(n, NULL, &action) != 0)
            continue;
        s->flags[n] = action.sa_flags;
        s->handlers[n] = action.sa_handler;
        for (int k = 1; k < 65; k++)
            s->masks[n][k] = sigismember(&action.sa_mask, k) == 1;
    }
    s->rounding = fegetround();
    s->traps = fegetexcept();
    s->descriptors = count_descriptors();
    s->mask = umask(022);
    umask(s->mask);
}

static void use_everything(void)
{
    attn_tensor view;
    double deviation;
    attn_context *context = make_context(3);
    attn_sdpa(context, NULL, &all.q, &all.k, &all.v, &all.out);
    attn_sdpa(NULL, NULL, &all.q, &all.k, &all.v, &all.out);
    attn_softmax(&all.out, &all.out, NULL);
    attn_weights_check(&all.out, &deviation, NULL);
    attn_view_vector(&view, 99, NULL, 3); /* a failure, with its sentence */
    attn_build_info();
    attn_blas_info();
    attn_context_destroy(context);
}

static void test_process__stays_as_it_was(void **state)
{
    (void)state;
    static struct process_state before;
    static struct process_state after;
    sigset_t some;
    sigemptyset(&some);
    sigaddset(&some, SIGUSR1);
    sigprocmask(SIG_BLOCK, &some, NULL);
    use_everything();
    take_state(&before);
    use_everything();
    take_state(&after);
    sigprocmask(SIG_UNBLOCK, &some, NULL);
    assert_memory_equal(&before, &after, sizeof before);
}

static void test_process__nothing_is_printed(void **state)
{
    (void)state;
    kit_capture_begin();
    use_everything();
    assert_int_equal(kit_capture_end(), 0);
}

/* Rounding modes are the caller's: kept, and no reason for nonsense. */
static void test_process__every_rounding_mode_is_kept(void **state)
{
    (void)state;
    static const int modes[] = {FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO,
                                FE_TONEAREST};
    attn_context *context = make_context(3);
    for (size_t n = 0; n < COUNT(modes); n++) {
        fesetround(modes[n]);
        const attn_status status =
            attn_sdpa(context, NULL, &all.q, &all.k, &all.v, &all.out);
        const int after = fegetround();
        fesetround(FE_TONEAREST);
        assert_int_equal(status, ATTN_OK);
        assert_int_equal(after, modes[n]);
        for (int64_t i = 0; i < 50; i++)
            for (int64_t d = 0; d < 16; d++) {
                const double off = kit_get(&all.out, 1, 3, i, d) -
                                   kit_get(&all.want, 1, 3, i, d);
                if (!(fabs(off) < 1e-4))
                    fail_msg("rounding mode %zu: off by %g", n, off);
            }
    }
    attn_context_destroy(context);
}

/* The ids of this process's threads; returns how many. */
static int list_threads(int *ids, int most)
{
    DIR *dir = opendir("/proc/self/task");
    int count = 0;
    assert_non_null(dir);
    for (const struct dirent *e = readdir(dir); e != NULL; e = readdir(dir))
        if (e->d_name[0] != '.' && count < most)
            ids[count++] = atoi(e->d_name);
    closedir(dir);
    return count;
}

static unsigned long long blocked_signals(int id)
{
    char text[256];
    unsigned long long blocked = 0;
    snprintf(text, sizeof text, "/proc/self/task/%d/status", id);
    FILE *f = fopen(text, "r");
    while (f != NULL && fgets(text, sizeof text, f) != NULL)
        sscanf(text, "SigBlk: %llx", &blocked);
    if (f != NULL)
        fclose(f);
    return blocked;
}

/* The host's signals are for the host's threads: ours block them all. */
static void test_process__signals_do_not_reach_our_threads(void **state)
{
    (void)state;
    int before[256];
    int after[256];
    const int num_before = list_threads(before, 256);
    attn_context *context = make_context(4);
    assert_true(run_is_right(context));
    const int num_after = list_threads(after, 256);
    int workers = 0;
    for (int n = 0; n < num_after; n++) {
        bool old = false;
        for (int k = 0; k < num_before; k++)
            old = old || before[k] == after[n];
        if (old)
            continue;
        workers++;
        for (int signal = SIGHUP; signal <= SIGTERM; signal++) {
            const bool fault = signal == SIGKILL || signal == SIGILL ||
                               signal == SIGBUS || signal == SIGFPE ||
                               signal == SIGSEGV || signal == SIGTRAP;
            if (!fault && (blocked_signals(after[n]) >> (signal - 1) & 1) == 0)
                fail_msg("a thread of the pool takes signal %d", signal);
        }
    }
    assert_true(workers > 0 || kit_blas_is_exclusive());
    attn_context_destroy(context);
}

/* ---- dlopen and dlclose ---- */

typedef attn_status sdpa_fn(const attn_context *, const attn_sdpa_params *,
                            const attn_tensor *, const attn_tensor *,
                            const attn_tensor *, const attn_tensor *);
typedef attn_status create_fn(attn_context **, const attn_context_params *);
typedef void destroy_fn(attn_context *);

static void load(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    assert_non_null(symbol);
    memcpy(function, &symbol, sizeof symbol);
}

static void copy_file(const char *from, const char *to)
{
    char block[65536];
    FILE *in = fopen(from, "rb");
    FILE *out = fopen(to, "wb");
    assert_true(in != NULL && out != NULL);
    for (size_t n = fread(block, 1, sizeof block, in); n > 0;
         n = fread(block, 1, sizeof block, in))
        assert_int_equal(fwrite(block, 1, n, out), n);
    fclose(in);
    fclose(out);
}

/* The shared library this program runs with; NULL if linked statically. */
static const char *library_path(void)
{
    static char path[PATH_MAX];
    Dl_info info;
    void *symbol = dlsym(RTLD_DEFAULT, "attn_version");
    if (symbol == NULL || dladdr(symbol, &info) == 0)
        return NULL;
    if (realpath(info.dli_fname, path) == NULL || strcmp(path, self) == 0)
        return NULL;
    return path;
}

static void use_loaded(void *library)
{
    sdpa_fn *sdpa;
    create_fn *create;
    destroy_fn *destroy;
    attn_context_params p = ATTN_CONTEXT_PARAMS_INIT;
    attn_context *context = NULL;
    load(library, "attn_sdpa", &sdpa);
    load(library, "attn_context_create", &create);
    load(library, "attn_context_destroy", &destroy);
    p.num_threads = 3;
    assert_int_equal(create(&context, &p), ATTN_OK);
    kit_fill_with(&all.out, -77.0);
    assert_int_equal(sdpa(context, NULL, &all.q, &all.k, &all.v, &all.out),
                     ATTN_OK);
    assert_true(kit_same(&all.out, &all.want));
    destroy(context);
}

/* A copy under another name is a library of its own, which this program does
 * not hold open. */
static void test_dlopen__a_hundred_times(void **state)
{
    (void)state;
    const char *path = library_path();
    if (path == NULL || KIT_SANITIZED)
        skip();
    char copy[] = "/tmp/attn-copy-XXXXXX";
    const int fd = mkstemp(copy);
    assert_true(fd >= 0);
    close(fd);
    copy_file(path, copy);
    int threads = 0;
    int descriptors = 0;
    for (int n = 0; n < 100; n++) {
        void *library = dlopen(copy, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
        if (library == NULL)
            fail_msg("%s", dlerror());
        use_loaded(library);
        assert_int_equal(dlclose(library), 0);
        if (n == 0) {
            threads = kit_settled_thread_count();
            descriptors = count_descriptors();
        }
    }
    assert_int_equal(kit_settled_thread_count(), threads);
    assert_int_equal(count_descriptors(), descriptors);
    unlink(copy);
}

int main(int argc, char **argv)
{
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0)
        return 95;
    if (argc == 2)
        return run_action(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fork__before_the_first_use),
        cmocka_unit_test(test_fork__after_use_with_a_running_pool),
        cmocka_unit_test(test_fork__threads_of_the_child_come_together),
        cmocka_unit_test(test_fork__while_another_thread_computes),
        cmocka_unit_test(test_fork__in_the_child_of_a_child),
        cmocka_unit_test(test_fork__child_that_only_exits),
        cmocka_unit_test(test_num_threads__the_environment_is_read),
        cmocka_unit_test(test_num_threads__no_number_is_one_thread),
        cmocka_unit_test(test_num_threads__the_pool_of_the_process_is_used),
        cmocka_unit_test(test_process__blas_threads_are_not_started),
        cmocka_unit_test(test_process__settings_of_openmp_are_kept),
        cmocka_unit_test(test_blas__the_loaded_one_can_be_used),
        cmocka_unit_test(test_blas__a_core_older_than_the_processor_is_told),
#ifdef ATTN_STUB_BLAS
        cmocka_unit_test(test_blas__one_with_64_bit_integers_is_refused),
#endif
        cmocka_unit_test(test_process__stays_as_it_was),
        cmocka_unit_test(test_process__nothing_is_printed),
        cmocka_unit_test(test_process__every_rounding_mode_is_kept),
        cmocka_unit_test(test_process__signals_do_not_reach_our_threads),
        cmocka_unit_test(test_dlopen__a_hundred_times),
    };
    /* Threads also in problems as small as these. */
    setenv("ATTN_MIN_WORK", "0", 1);
    return cmocka_run_group_tests(tests, make_all, drop_all);
}
