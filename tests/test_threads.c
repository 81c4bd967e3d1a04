/*
 * test_threads.c - the number of threads, who runs them and what else is in
 * the batch change no bit of any result.
 */
#define _GNU_SOURCE 1

#include "kit.h"
#include "train.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ---- problems ---- */

struct shape {
    attn_dtype dtype;
    int64_t B, Hq, Hkv, Tq, Tk, D, Dv;
    int causal;
};

/* Few and many tasks, long and short rows, decoding, groups of heads. */
static const struct shape shapes[] = {
    {ATTN_F32, 1, 1, 1, 300, 300, 32, 32, 0},
    {ATTN_F32, 1, 1, 1, 300, 300, 32, 32, 1},
    {ATTN_F64, 1, 2, 1, 150, 333, 24, 40, 1},
    {ATTN_F32, 3, 5, 5, 17, 40, 16, 16, 0},
    {ATTN_F64, 2, 4, 2, 33, 65, 8, 12, 1},
    {ATTN_F32, 1, 8, 2, 1, 3000, 64, 64, 0},
    {ATTN_F32, 1, 1, 1, 1, 5000, 64, 64, 0},
    {ATTN_F64, 2, 6, 3, 3, 2000, 32, 32, 0},
    {ATTN_F32, 1, 1, 1, 700, 70, 64, 64, 0},
};

struct problem {
    attn_sdpa_params p;
    attn_tensor q, k, v, out, lse, weights, mean;
    attn_mask mask;
};

static void make_problem(struct problem *x, const struct shape *s, bool masked)
{
    attn_sdpa_params_init(&x->p);
    x->q = kit_make(s->dtype, s->B, s->Hq, s->Tq, s->D);
    x->k = kit_make(s->dtype, s->B, s->Hkv, s->Tk, s->D);
    x->v = kit_make(s->dtype, s->B, s->Hkv, s->Tk, s->Dv);
    x->out = kit_make(s->dtype, s->B, s->Hq, s->Tq, s->Dv);
    x->lse = kit_make(s->dtype, s->B, s->Hq, s->Tq, 1);
    x->weights = kit_make(s->dtype, s->B, s->Hq, s->Tq, s->Tk);
    x->mean = kit_make(s->dtype, s->B, 1, s->Tq, s->Tk);
    x->mask.kind = ATTN_MASK_KEEP;
    x->mask.reserved = 0;
    x->mask.view = kit_make(ATTN_U8, s->B, 1, s->Tq, s->Tk);
    x->p.causal = s->causal;
    x->p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    x->p.masks = masked ? &x->mask : NULL;
    x->p.num_masks = masked;
    x->p.lse = &x->lse;
    x->p.weights = &x->weights;
    x->p.weights_mean = &x->mean;
}

static void drop_problem(struct problem *x)
{
    attn_tensor *made[] = {&x->q,   &x->k,       &x->v,    &x->out,
                           &x->lse, &x->weights, &x->mean, &x->mask.view};
    for (size_t n = 0; n < COUNT(made); n++)
        kit_drop(made[n]);
}

#define NUM_RESULTS 4

static const attn_tensor *result(const struct problem *x, int n)
{
    const attn_tensor *results[NUM_RESULTS] = {&x->out, &x->lse, &x->weights,
                                               &x->mean};
    return results[n];
}

/* The results of one run, as bytes. */
struct bits {
    unsigned char *bytes[NUM_RESULTS];
    size_t count[NUM_RESULTS];
};

static struct bits take_bits(const struct problem *x)
{
    struct bits r;
    for (int n = 0; n < NUM_RESULTS; n++) {
        const attn_tensor *t = result(x, n);
        r.count[n] = (size_t)kit_elements(t) * kit_bytes(t->dtype);
        r.bytes[n] = malloc(r.count[n] + 1);
        assert_non_null(r.bytes[n]);
        memcpy(r.bytes[n], t->data, r.count[n]);
        memset(t->data, 0xA5, r.count[n]);
    }
    return r;
}

static void drop_bits(struct bits *r)
{
    for (int n = 0; n < NUM_RESULTS; n++)
        free(r->bytes[n]);
}

static bool same_bits(const struct bits *a, const struct bits *b)
{
    for (int n = 0; n < NUM_RESULTS; n++)
        if (memcmp(a->bytes[n], b->bytes[n], a->count[n]) != 0)
            return false;
    return true;
}

static struct bits run(struct problem *x, const attn_context *context)
{
    if (attn_sdpa(context, &x->p, &x->q, &x->k, &x->v, &x->out) != ATTN_OK)
        fail_msg("%s", attn_last_error());
    return take_bits(x);
}

static attn_context *make_context(int32_t threads, attn_parallel_for_fn host,
                                  void *user)
{
    attn_context_params p = ATTN_CONTEXT_PARAMS_INIT;
    attn_context *context = NULL;
    p.num_threads = threads;
    p.parallel_for = host;
    p.parallel_user = user;
    if (attn_context_create(&context, &p) != ATTN_OK)
        fail_msg("%s", attn_last_error());
    return context;
}

/* ---- hosts ---- */

static void in_order(void *user, int64_t n, attn_task_fn task, void *arg)
{
    (void)user;
    for (int64_t i = 0; i < n; i++)
        task(arg, i);
}

static void in_reverse(void *user, int64_t n, attn_task_fn task, void *arg)
{
    (void)user;
    for (int64_t i = n - 1; i >= 0; i--)
        task(arg, i);
}

struct one_task {
    attn_task_fn task;
    void *arg;
    int64_t index;
};

static void *run_one_task(void *p)
{
    const struct one_task *t = p;
    t->task(t->arg, t->index);
    return NULL;
}

static void one_thread_each(void *user, int64_t n, attn_task_fn task, void *arg)
{
    pthread_t threads[64];
    struct one_task tasks[64];
    (void)user;
    for (int64_t i = 0; i < n && i < 64; i++) {
        tasks[i].task = task;
        tasks[i].arg = arg;
        tasks[i].index = i;
        if (pthread_create(&threads[i], NULL, run_one_task, &tasks[i]) != 0)
            abort();
    }
    for (int64_t i = 0; i < n && i < 64; i++)
        pthread_join(threads[i], NULL);
    for (int64_t i = 64; i < n; i++)
        task(arg, i);
}

/* Also counts how often it was asked, and the largest n. */
struct counter {
    atomic_long calls;
    atomic_long largest;
};

static void counting(void *user, int64_t n, attn_task_fn task, void *arg)
{
    struct counter *c = user;
    atomic_fetch_add(&c->calls, 1);
    if (n > atomic_load(&c->largest))
        atomic_store(&c->largest, (long)n);
    in_order(NULL, n, task, arg);
}

static const struct {
    const char *name;
    attn_parallel_for_fn run;
} hosts[] = {{"the pool", NULL},
             {"in order", in_order},
             {"in reverse", in_reverse},
             {"one thread each", one_thread_each}};

/* ---- tests ---- */

static void test_sdpa__bits_do_not_depend_on_threads(void **state)
{
    (void)state;
    static const int32_t counts[] = {1, 2, 3, 7};
    kit_seed(5);
    for (size_t n = 0; n < COUNT(shapes); n++) {
        for (int masked = 0; masked < 3; masked++) {
            struct problem x;
            make_problem(&x, &shapes[n], masked == 1);
            x.p.flags = masked == 2 ? ATTN_SDPA_BLAS_ONLY : 0;
            struct bits want = run(&x, NULL);
            for (size_t host = 0; host < COUNT(hosts); host++) {
                for (size_t k = 0; k < COUNT(counts); k++) {
                    attn_context *context =
                        make_context(counts[k], hosts[host].run, NULL);
                    struct bits met = run(&x, context);
                    if (!same_bits(&want, &met))
                        fail_msg("shape %zu, form %d, %s, %d threads: other "
                                 "bits",
                                 n, masked, hosts[host].name, (int)counts[k]);
                    drop_bits(&met);
                    attn_context_destroy(context);
                }
            }
            drop_bits(&want);
            drop_problem(&x);
        }
    }
}

/* Asking for LSE and weights changes no bit of out, with threads or without. */
static void test_sdpa__bits_of_out_do_not_depend_on_outputs(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(shapes); n++) {
        struct problem x;
        make_problem(&x, &shapes[n], false);
        attn_context *context = make_context(3, NULL, NULL);
        struct bits all = run(&x, NULL);
        x.p.lse = x.p.weights = x.p.weights_mean = NULL;
        struct bits alone = run(&x, context);
        assert_memory_equal(all.bytes[0], alone.bytes[0], all.count[0]);
        drop_bits(&all);
        drop_bits(&alone);
        drop_problem(&x);
        attn_context_destroy(context);
    }
}

static void test_sdpa__twice_in_a_row_gives_the_same_bits(void **state)
{
    (void)state;
    attn_context *context = make_context(3, NULL, NULL);
    for (size_t n = 0; n < COUNT(shapes); n++) {
        struct problem x;
        make_problem(&x, &shapes[n], false);
        struct bits first = run(&x, context);
        struct bits second = run(&x, context);
        assert_true(same_bits(&first, &second));
        drop_bits(&first);
        drop_bits(&second);
        drop_problem(&x);
    }
    attn_context_destroy(context);
}

/* One entry of a batch alone has the bits it has among others. */
/* The same numbers in other places: adjacent, by token, by column. */
enum { ADJACENT, BY_TOKEN, BY_COLUMN, PLACES };

static attn_tensor placed(const attn_tensor *from, int place)
{
    const int64_t *n = from->shape;
    attn_tensor t = kit_make(from->dtype, n[0], n[1], n[2], n[3]);
    if (place == BY_TOKEN) {
        t.stride[0] = n[1] * n[2] * n[3];
        t.stride[1] = n[3];
        t.stride[2] = n[1] * n[3];
    } else if (place == BY_COLUMN) {
        t.stride[2] = 1;
        t.stride[3] = n[2];
    }
    kit_copy(&t, from);
    return t;
}

/* Alone, a sequence of the last two shapes has fewer keys than the rows that a
 * block copies if they lie apart; together they have more. */
static void test_sdpa__bits_do_not_depend_on_the_rest_of_the_batch(void **state)
{
    (void)state;
    static const struct shape batches[] = {
        {ATTN_F32, 4, 6, 3, 77, 90, 24, 24, 1},
        {ATTN_F32, 2, 2, 2, 19, 4200, 64, 64, 0},
        {ATTN_F64, 2, 2, 1, 13, 4100, 64, 72, 1},
    };
    attn_context *context = make_context(3, NULL, NULL);
    for (size_t n = 0; n < COUNT(batches); n++) {
        const struct shape *s = &batches[n];
        struct problem x;
        make_problem(&x, s, false);
        x.p.weights = x.p.weights_mean = x.p.lse = NULL;
        attn_tensor k = x.k;
        attn_tensor v = x.v;
        x.k = placed(&k, BY_TOKEN);
        x.v = placed(&v, BY_TOKEN);
        kit_drop(&k);
        kit_drop(&v);
        struct bits whole = run(&x, context);
        const size_t each = whole.count[0] / (size_t)s->B;
        for (int64_t b = 0; b < s->B; b++) {
            const attn_tensor q = tensor_slice(&x.q, 0, b, 1);
            attn_tensor out = x.out;
            k = tensor_slice(&x.k, 0, b, 1);
            v = tensor_slice(&x.v, 0, b, 1);
            out.shape[0] = 1;
            assert_int_equal(attn_sdpa(NULL, &x.p, &q, &k, &v, &out), ATTN_OK);
            assert_memory_equal(out.data, whole.bytes[0] + (size_t)b * each,
                                each);
        }
        drop_bits(&whole);
        drop_problem(&x);
    }
    attn_context_destroy(context);
}

static bool is_near(const attn_tensor *x, const attn_tensor *y)
{
    const int64_t *n = x->shape;
    for (int64_t b = 0; b < n[0]; b++)
        for (int64_t h = 0; h < n[1]; h++)
            for (int64_t i = 0; i < n[2]; i++)
                for (int64_t d = 0; d < n[3]; d++) {
                    const double a = kit_get(x, b, h, i, d);
                    const double c = kit_get(y, b, h, i, d);
                    if (!(a - c < 1e-5 && c - a < 1e-5) &&
                        !(isnan(a) && isnan(c)))
                        return false;
                }
    return true;
}

/* One thread takes several blocks of queries through the keys together, many
 * threads one each, and rows that lie apart are copied for the former only. A
 * hidden value that is NaN has the block done again. */
static void test_sdpa__bits_do_not_depend_on_blocks_at_a_time(void **state)
{
    (void)state;
    static const struct shape tall[] = {
        {ATTN_F32, 2, 3, 3, 400, 300, 40, 24, 0},
        {ATTN_F32, 1, 4, 2, 333, 333, 24, 64, 1},
        {ATTN_F64, 1, 2, 2, 270, 150, 16, 40, 0},
        {ATTN_F64, 1, 2, 1, 300, 300, 40, 16, 1},
    };
    attn_context *alone = make_context(64, in_reverse, NULL);
    kit_seed(77);
    for (size_t n = 0; n < COUNT(tall); n++)
        for (int masked = 0; masked < 3; masked++) {
            struct problem x;
            make_problem(&x, &tall[n], masked > 0);
            for (int64_t i = 0; masked > 0 && i < tall[n].Tq; i++) {
                for (int64_t b = 0; b < tall[n].B; b++)
                    kit_set(&x.mask.view, b, 0, i, 7, i % 3 != 0);
            }
            if (masked == 2)
                kit_set(&x.v, 0, 1 % tall[n].Hkv, 7, 3, (double)NAN);
            const attn_tensor k = x.k, v = x.v;
            attn_tensor first = kit_make(x.out.dtype, tall[n].B, tall[n].Hq,
                                         tall[n].Tq, tall[n].Dv);
            for (int place = 0; place < PLACES; place++) {
                x.k = placed(&k, place);
                x.v = placed(&v, place);
                struct bits together = run(&x, NULL);
                struct bits each = run(&x, alone);
                if (!same_bits(&together, &each))
                    fail_msg("shape %zu, form %d, place %d", n, masked, place);
                memcpy(x.out.data, each.bytes[0], each.count[0]);
                if (place == ADJACENT)
                    memcpy(first.data, each.bytes[0], each.count[0]);
                assert_true(is_near(&x.out, &first));
                drop_bits(&together);
                drop_bits(&each);
                kit_drop(&x.k);
                kit_drop(&x.v);
            }
            x.k = k;
            x.v = v;
            kit_drop(&first);
            drop_problem(&x);
        }
    attn_context_destroy(alone);
}

struct layer {
    attn_mha_params p;
    attn_tensor x, w_in, b_in, w_out, y;
};

static void make_layer(struct layer *l, attn_dtype dtype)
{
    attn_mha_params_init(&l->p);
    l->x = kit_make(dtype, 2, 1, 70, 48);
    l->w_in = kit_make(dtype, 1, 1, 3 * 48, 48);
    l->b_in = kit_make(dtype, 1, 1, 1, 3 * 48);
    l->w_out = kit_make(dtype, 1, 1, 48, 48);
    l->y = kit_make(dtype, 2, 1, 70, 48);
    l->p.weight_layout = ATTN_WEIGHT_OUT_IN;
    l->p.num_heads = 4;
    l->p.w_qkv = &l->w_in;
    l->p.b_qkv = &l->b_in;
    l->p.w_o = &l->w_out;
}

static void drop_layer(struct layer *l)
{
    kit_drop(&l->x);
    kit_drop(&l->w_in);
    kit_drop(&l->b_in);
    kit_drop(&l->w_out);
    kit_drop(&l->y);
}

static void test_mha_and_linear__bits_do_not_depend_on_threads(void **state)
{
    (void)state;
    for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_F64; dtype++) {
        struct layer l;
        make_layer(&l, dtype);
        attn_tensor y = kit_make(dtype, 2, 1, 70, 48);
        attn_tensor z = kit_make(dtype, 2, 1, 70, 48);
        assert_int_equal(attn_mha(NULL, &l.p, &l.x, NULL, NULL, &y), ATTN_OK);
        assert_int_equal(
            attn_linear(NULL, ATTN_WEIGHT_OUT_IN, &l.x, &l.w_out, NULL, &z),
            ATTN_OK);
        for (size_t host = 0; host < COUNT(hosts); host++) {
            for (int32_t threads = 1; threads <= 7; threads += 2) {
                attn_context *context =
                    make_context(threads, hosts[host].run, NULL);
                assert_int_equal(
                    attn_mha(context, &l.p, &l.x, NULL, NULL, &l.y), ATTN_OK);
                if (!kit_same(&l.y, &y))
                    fail_msg("attn_mha, %s, %d threads: other bits",
                             hosts[host].name, (int)threads);
                assert_int_equal(attn_linear(context, ATTN_WEIGHT_OUT_IN, &l.x,
                                             &l.w_out, NULL, &l.y),
                                 ATTN_OK);
                if (!kit_same(&l.y, &z))
                    fail_msg("attn_linear, %s, %d threads: other bits",
                             hosts[host].name, (int)threads);
                attn_context_destroy(context);
            }
        }
        kit_drop(&y);
        kit_drop(&z);
        drop_layer(&l);
    }
}

static void test_context__the_host_is_asked_for_its_threads(void **state)
{
    (void)state;
    struct counter c = {0, 0};
    struct problem x;
    make_problem(&x, &shapes[3], false);
    attn_context *context = make_context(3, counting, &c);
    struct bits met = run(&x, context);
    if (!kit_blas_is_exclusive()) {
        assert_true(atomic_load(&c.calls) > 0);
        assert_true(atomic_load(&c.largest) > 1);
    }
    assert_true(atomic_load(&c.largest) <= 3);
    drop_bits(&met);
    drop_problem(&x);
    attn_context_destroy(context);
}

/* ---- several host threads at once ---- */

#define CALLERS 4

struct caller {
    pthread_t thread;
    const attn_context *context;
    const struct shape *shape;
    struct problem x;
    struct bits want;
    int wrong;
};

static void *call_repeatedly(void *p)
{
    struct caller *c = p;
    for (int n = 0; n < 20; n++) {
        if (attn_sdpa(c->context, &c->x.p, &c->x.q, &c->x.k, &c->x.v,
                      &c->x.out) != ATTN_OK)
            c->wrong++;
        for (int r = 0; r < NUM_RESULTS; r++) {
            const attn_tensor *t = result(&c->x, r);
            c->wrong +=
                memcmp(t->data, c->want.bytes[r], c->want.count[r]) != 0;
            memset(t->data, 0xA5, c->want.count[r]);
        }
    }
    return NULL;
}

static void many_callers(attn_context *const *contexts)
{
    static struct caller callers[CALLERS];
    for (int n = 0; n < CALLERS; n++) {
        struct caller *c = &callers[n];
        c->context = contexts[n];
        c->wrong = 0;
        make_problem(&c->x, &shapes[3 + n % 2], n % 2 == 1);
        c->want = run(&c->x, NULL);
    }
    for (int n = 0; n < CALLERS; n++)
        assert_int_equal(pthread_create(&callers[n].thread, NULL,
                                        call_repeatedly, &callers[n]),
                         0);
    for (int n = 0; n < CALLERS; n++)
        pthread_join(callers[n].thread, NULL);
    for (int n = 0; n < CALLERS; n++) {
        assert_int_equal(callers[n].wrong, 0);
        drop_bits(&callers[n].want);
        drop_problem(&callers[n].x);
    }
}

static void test_context__is_shared_by_several_callers(void **state)
{
    (void)state;
    for (int32_t threads = 1; threads <= 3; threads++) {
        attn_context *context = make_context(threads, NULL, NULL);
        attn_context *contexts[CALLERS];
        for (int n = 0; n < CALLERS; n++)
            contexts[n] = context;
        many_callers(contexts);
        attn_context_destroy(context);
    }
}

static void test_context__each_caller_its_own(void **state)
{
    (void)state;
    attn_context *contexts[CALLERS];
    for (int n = 0; n < CALLERS; n++)
        contexts[n] = make_context(n % 3 + 1, NULL, NULL);
    many_callers(contexts);
    for (int n = 0; n < CALLERS; n++)
        attn_context_destroy(contexts[n]);
}

static void test_default_context__several_callers(void **state)
{
    (void)state;
    attn_context *contexts[CALLERS] = {NULL, NULL, NULL, NULL};
    many_callers(contexts);
}

/* A task of the host calls the library, with the very context whose
 * parallel_for is running it. */
struct nest {
    attn_context *context;
    struct caller callers[CALLERS];
};

static void nested_task(void *arg, int64_t index)
{
    struct nest *n = arg;
    call_repeatedly(&n->callers[index]);
}

static void nested(attn_parallel_for_fn host)
{
    static struct nest n;
    n.context = make_context(3, host, NULL);
    for (int k = 0; k < CALLERS; k++) {
        n.callers[k].context = n.context;
        n.callers[k].wrong = 0;
        make_problem(&n.callers[k].x, &shapes[4], false);
        n.callers[k].want = run(&n.callers[k].x, NULL);
    }
    one_thread_each(NULL, CALLERS, nested_task, &n);
    for (int k = 0; k < CALLERS; k++) {
        assert_int_equal(n.callers[k].wrong, 0);
        drop_bits(&n.callers[k].want);
        drop_problem(&n.callers[k].x);
    }
    attn_context_destroy(n.context);
}

static void test_context__use_from_inside_a_hosts_parallel_for(void **state)
{
    (void)state;
    nested(in_order);
    nested(one_thread_each);
    nested(NULL);
}

/* ---- gradients ---- */

/* Few and many heads, groups, short and long, more than a tile each way. */
static const train_sizes train_shapes[] = {
    {1, 1, 1, 300, 300, 32, 32}, {1, 2, 1, 150, 333, 24, 40},
    {3, 5, 5, 17, 40, 16, 16},   {2, 4, 2, 33, 65, 8, 12},
    {1, 8, 2, 1, 3000, 64, 64},  {1, 1, 1, 700, 70, 64, 64},
    {2, 2, 1, 257, 130, 16, 16},
};

#define NUM_TRAIN_FORMS 5

/* A form of a problem, with all the gradients that it has. */
static void make_training(training *t, const train_sizes *s, attn_dtype dtype,
                          int form)
{
    train_make(t, (uint64_t)form, dtype, s);
    t->p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    t->p.causal = form % 2;
    if (form == 1 || form == 4) {
        train_use_lse(t);
        train_use_alibi(t, 0);
        train_use_sinks(t, s->B);
    }
    if (form == 2) {
        train_use_mask(t, s->B, 1, s->Tq, s->Tk);
        train_use_mask(t, 1, s->Hq, 1, s->Tk);
        train_use_keep(t, 1, 1, s->Tq, s->Tk);
    }
    if (form == 3)
        t->p.flags |= ATTN_SDPA_BLAS_ONLY;
    if (form == 4) {
        t->p.softcap = 2.0;
        train_use_mask(t, 1, 1, 1, 1);
        train_use_mask(t, 1, 1, s->Tq, 1);
    }
}

static void run_training(training *t, const attn_context *context)
{
    train_reset(t);
    train_backward(t, context, "gradients");
}

/* What a run has left in the gradients. */
static void keep_gradients(const training *t, tensor kept[TRAIN_GRADIENTS])
{
    for (int n = 0; n < TRAIN_GRADIENTS; n++)
        kept[n] = t->d[n].block ? tensor_copy(&t->d[n].view, t->q.view.dtype)
                                : (tensor){.block = NULL};
}

static void drop_gradients(tensor kept[TRAIN_GRADIENTS])
{
    for (int n = 0; n < TRAIN_GRADIENTS; n++)
        tensor_free(&kept[n]);
}

static void same_gradients(const training *t, const tensor *kept,
                           const char *what)
{
    for (int n = 0; n < TRAIN_GRADIENTS; n++)
        if (t->d[n].block && !kit_same(&t->d[n].view, &kept[n].view))
            fail_msg("%s: other bits in %s", what, train_names[n]);
}

static void test_backward__bits_do_not_depend_on_threads(void **state)
{
    (void)state;
    static const int32_t counts[] = {1, 2, 3, 7};
    for (size_t n = 0; n < COUNT(train_shapes); n++) {
        for (int form = 0; form < NUM_TRAIN_FORMS; form++) {
            training t;
            tensor want[TRAIN_GRADIENTS];
            char what[80];
            /* Sanitizers are slow: one form a shape, all in turn. */
            if (KIT_SANITIZED && form != (int)n % NUM_TRAIN_FORMS)
                continue;
            make_training(&t, &train_shapes[n], n % 2 ? ATTN_F64 : ATTN_F32,
                          form);
            train_forward(&t, NULL, "gradients");
            run_training(&t, NULL);
            keep_gradients(&t, want);
            for (size_t host = 0; host < COUNT(hosts); host++) {
                for (size_t k = 0; k < COUNT(counts); k++) {
                    attn_context *context =
                        make_context(counts[k], hosts[host].run, NULL);
                    snprintf(what, sizeof what,
                             "shape %zu, form %d, %s, %d threads", n, form,
                             hosts[host].name, (int)counts[k]);
                    run_training(&t, context);
                    same_gradients(&t, want, what);
                    attn_context_destroy(context);
                }
            }
            drop_gradients(want);
            train_free(&t);
        }
    }
}

/* Added to the same numbers, too. */
static void test_backward__bits_of_sums_do_not_depend_on_threads(void **state)
{
    (void)state;
    for (int form = 0; form < NUM_TRAIN_FORMS; form++) {
        training t;
        tensor want[TRAIN_GRADIENTS];
        make_training(&t, &train_shapes[1], ATTN_F32, form);
        t.g.flags = 127 * ATTN_SDPA_ADD_D_Q;
        train_forward(&t, NULL, "gradients");
        for (int32_t threads = 1; threads <= 7; threads += 2) {
            attn_context *context = make_context(threads, NULL, NULL);
            for (int d = 0; d < TRAIN_GRADIENTS; d++)
                if (t.d[d].block)
                    tensor_fill(&t.d[d].view, 0.75);
            train_backward(&t, context, "gradients");
            if (threads == 1)
                keep_gradients(&t, want);
            same_gradients(&t, want, "added to");
            attn_context_destroy(context);
        }
        drop_gradients(want);
        train_free(&t);
    }
}

static void test_backward__ragged_bits_do_not_depend_on_threads(void **state)
{
    (void)state;
    static const train_sizes s = {1, 4, 2, 400, 500, 24, 16};
    static const int64_t cu_q[] = {3, 150, 150, 151, 390};
    static const int64_t cu_k[] = {0, 200, 210, 300, 500};
    for (int form = 0; form < 2; form++) {
        training t;
        tensor want[TRAIN_GRADIENTS];
        train_make(&t, 6, form ? ATTN_F64 : ATTN_F32, &s);
        t.p.cu_q = cu_q;
        t.p.cu_k = cu_k;
        t.p.num_seqs = 4;
        t.p.align = ATTN_ALIGN_BOTTOM_RIGHT;
        t.p.causal = form;
        train_use_lse(&t);
        train_use_alibi(&t, form ? 4 : 0);
        train_use_sinks(&t, form ? 0 : 4);
        train_use_mask(&t, 4, 1, 239, 200);
        train_forward(&t, NULL, "ragged");
        run_training(&t, NULL);
        keep_gradients(&t, want);
        for (size_t host = 0; host < COUNT(hosts); host++) {
            for (int32_t threads = 1; threads <= 7; threads += 2) {
                attn_context *context =
                    make_context(threads, hosts[host].run, NULL);
                run_training(&t, context);
                same_gradients(&t, want, hosts[host].name);
                attn_context_destroy(context);
            }
        }
        drop_gradients(want);
        train_free(&t);
    }
}

static void test_backward__twice_in_a_row_gives_the_same_bits(void **state)
{
    (void)state;
    attn_context *context = make_context(3, NULL, NULL);
    for (size_t n = 0; n < COUNT(train_shapes); n++) {
        training t;
        tensor want[TRAIN_GRADIENTS];
        make_training(&t, &train_shapes[n], ATTN_F32, (int)n % NUM_TRAIN_FORMS);
        train_forward(&t, context, "gradients");
        run_training(&t, context);
        keep_gradients(&t, want);
        run_training(&t, context);
        same_gradients(&t, want, "again");
        drop_gradients(want);
        train_free(&t);
    }
    attn_context_destroy(context);
}

/* One gradient's part of `n` from `first` on along a dimension, alone. */
static void alone(const attn_tensor *whole, const attn_tensor *field[1],
                  attn_tensor *part, int dim, int64_t first, int64_t n)
{
    *part = tensor_slice(whole, dim, first, n);
    *field = part;
}

static void compare_part(const tensor *kept, const attn_tensor *part, int dim,
                         int64_t first, const char *what)
{
    const attn_tensor want =
        tensor_slice(&kept->view, dim, first, part->shape[dim]);
    if (!kit_same(part, &want))
        fail_msg("%s: other bits alone", what);
}

/* The same memory, by token. */
static void lie_apart(tensor *t)
{
    t->view.stride[1] = t->view.shape[3];
    t->view.stride[2] = t->view.shape[1] * t->view.shape[3];
}

/* One entry of a batch alone has the bits it has among others; the last has
 * fewer keys alone than the rows that a block copies if they lie apart. */
static void
test_backward__bits_do_not_depend_on_the_rest_of_the_batch(void **state)
{
    (void)state;
    static const train_sizes batches[] = {{4, 6, 3, 77, 90, 24, 20},
                                          {4, 6, 3, 77, 90, 24, 20},
                                          {2, 2, 2, 19, 4200, 64, 64}};
    for (size_t form = 0; form < COUNT(batches); form++) {
        const train_sizes s = batches[form];
        training t;
        tensor want[TRAIN_GRADIENTS];
        attn_context *context = make_context(3, NULL, NULL);
        train_make(&t, 4, form == 1 ? ATTN_F64 : ATTN_F32, &s);
        if (form == 2) {
            lie_apart(&t.k);
            lie_apart(&t.v);
        }
        t.p.align = ATTN_ALIGN_BOTTOM_RIGHT;
        t.p.causal = form == 1;
        train_use_lse(&t);
        train_use_alibi(&t, s.B);
        train_use_sinks(&t, s.B);
        train_use_mask(&t, s.B, 1, s.Tq, s.Tk);
        train_forward(&t, context, "batch");
        run_training(&t, context);
        keep_gradients(&t, want);
        train_reset(&t);
        for (int64_t b = 0; b < s.B; b++) {
            attn_sdpa_params p = t.p;
            attn_sdpa_gradients g = t.g;
            attn_mask mask = t.masks[0];
            attn_tensor part[TRAIN_GRADIENTS], lse, d_lse, alibi, sinks;
            const attn_tensor *d_masks[1];
            const attn_tensor q = tensor_slice(&t.q.view, 0, b, 1);
            const attn_tensor k = tensor_slice(&t.k.view, 0, b, 1);
            const attn_tensor v = tensor_slice(&t.v.view, 0, b, 1);
            const attn_tensor out = tensor_slice(&t.out.view, 0, b, 1);
            const attn_tensor d_out = tensor_slice(&t.d_out.view, 0, b, 1);
            mask.view = tensor_slice(&t.masks[0].view, 0, b, 1);
            p.masks = &mask;
            alone(&t.lse.view, &p.lse, &lse, 0, b, 1);
            alone(&t.alibi.view, &p.alibi, &alibi, 0, b, 1);
            alone(&t.sinks.view, &p.sinks, &sinks, 0, b, 1);
            alone(&t.d_lse.view, &g.d_lse, &d_lse, 0, b, 1);
            const attn_tensor **const fields[] = {&g.d_q, &g.d_k, &g.d_v,
                                                  &g.d_alibi, &g.d_sinks};
            for (int n = 0; n <= TRAIN_D_SINKS; n++)
                alone(&t.d[n].view, fields[n], &part[n], 0, b, 1);
            alone(&t.d[TRAIN_D_MASK].view, &d_masks[0], &part[TRAIN_D_MASK], 0,
                  b, 1);
            g.d_masks = d_masks;
            g.d_scale = NULL;
            if (attn_sdpa_backward(NULL, &p, &q, &k, &v, &out, &d_out, &g) !=
                ATTN_OK)
                fail_msg("%s", attn_last_error());
            for (int n = 0; n <= TRAIN_D_MASK; n++)
                if (n != TRAIN_D_SCALE)
                    compare_part(&want[n], &part[n], 0, b, train_names[n]);
        }
        drop_gradients(want);
        train_free(&t);
        attn_context_destroy(context);
    }
}

/* So has a sequence of a ragged batch, alone in a call that is not ragged. */
static void test_backward__bits_of_a_sequence_are_its_own(void **state)
{
    (void)state;
    static const train_sizes s = {1, 4, 2, 200, 260, 24, 16};
    static const int64_t cu_q[] = {0, 90, 91, 200};
    static const int64_t cu_k[] = {0, 100, 160, 260};
    for (int form = 0; form < 2; form++) {
        training t;
        tensor want[TRAIN_GRADIENTS];
        train_make(&t, 5, form ? ATTN_F64 : ATTN_F32, &s);
        t.p.cu_q = cu_q;
        t.p.cu_k = cu_k;
        t.p.num_seqs = 3;
        t.p.align = ATTN_ALIGN_BOTTOM_RIGHT;
        t.p.causal = form;
        train_use_lse(&t);
        train_forward(&t, NULL, "ragged");
        run_training(&t, NULL);
        keep_gradients(&t, want);
        train_reset(&t);
        for (int n = 0; n < 3; n++) {
            const int64_t iq = cu_q[n], nq = cu_q[n + 1] - iq;
            const int64_t ik = cu_k[n], nk = cu_k[n + 1] - ik;
            attn_sdpa_params p = t.p;
            attn_sdpa_gradients g = t.g;
            attn_tensor part[3], lse, d_lse;
            const attn_tensor q = tensor_slice(&t.q.view, 2, iq, nq);
            const attn_tensor k = tensor_slice(&t.k.view, 2, ik, nk);
            const attn_tensor v = tensor_slice(&t.v.view, 2, ik, nk);
            const attn_tensor out = tensor_slice(&t.out.view, 2, iq, nq);
            const attn_tensor d_out = tensor_slice(&t.d_out.view, 2, iq, nq);
            p.cu_q = p.cu_k = NULL;
            p.num_seqs = 0;
            alone(&t.lse.view, &p.lse, &lse, 2, iq, nq);
            alone(&t.d_lse.view, &g.d_lse, &d_lse, 2, iq, nq);
            alone(&t.d[TRAIN_D_Q].view, &g.d_q, &part[0], 2, iq, nq);
            alone(&t.d[TRAIN_D_K].view, &g.d_k, &part[1], 2, ik, nk);
            alone(&t.d[TRAIN_D_V].view, &g.d_v, &part[2], 2, ik, nk);
            g.d_scale = NULL;
            if (attn_sdpa_backward(NULL, &p, &q, &k, &v, &out, &d_out, &g) !=
                ATTN_OK)
                fail_msg("%s", attn_last_error());
            compare_part(&want[TRAIN_D_Q], &part[0], 2, iq, "d_q");
            compare_part(&want[TRAIN_D_K], &part[1], 2, ik, "d_k");
            compare_part(&want[TRAIN_D_V], &part[2], 2, ik, "d_v");
        }
        drop_gradients(want);
        train_free(&t);
    }
}

static void test_backward__the_host_is_asked_for_its_threads(void **state)
{
    (void)state;
    struct counter c = {0, 0};
    training t;
    make_training(&t, &train_shapes[2], ATTN_F32, 1);
    attn_context *context = make_context(3, counting, &c);
    train_forward(&t, NULL, "gradients");
    run_training(&t, context);
    if (!kit_blas_is_exclusive()) {
        assert_true(atomic_load(&c.calls) > 0);
        assert_true(atomic_load(&c.largest) > 1);
    }
    assert_true(atomic_load(&c.largest) <= 3);
    train_free(&t);
    attn_context_destroy(context);
}

struct learner {
    pthread_t thread;
    const attn_context *context;
    training t;
    tensor want[TRAIN_GRADIENTS];
    int wrong;
};

static void *learn_repeatedly(void *p)
{
    struct learner *l = p;
    for (int n = 0; n < 10; n++) {
        train_reset(&l->t);
        l->wrong +=
            attn_sdpa_backward(l->context, &l->t.p, &l->t.q.view, &l->t.k.view,
                               &l->t.v.view, &l->t.out.view, &l->t.d_out.view,
                               &l->t.g) != ATTN_OK;
        for (int d = 0; d < TRAIN_GRADIENTS; d++)
            if (l->t.d[d].block)
                l->wrong += !kit_same(&l->t.d[d].view, &l->want[d].view);
    }
    return NULL;
}

static void test_backward__several_callers_of_one_context(void **state)
{
    (void)state;
    static struct learner learners[CALLERS];
    for (int32_t threads = 1; threads <= 3; threads++) {
        attn_context *context = make_context(threads, NULL, NULL);
        for (int n = 0; n < CALLERS; n++) {
            struct learner *l = &learners[n];
            l->context = context;
            l->wrong = 0;
            make_training(&l->t, &train_shapes[2 + n % 2], ATTN_F32, n);
            train_forward(&l->t, NULL, "gradients");
            run_training(&l->t, NULL);
            keep_gradients(&l->t, l->want);
        }
        for (int n = 0; n < CALLERS; n++)
            assert_int_equal(pthread_create(&learners[n].thread, NULL,
                                            learn_repeatedly, &learners[n]),
                             0);
        for (int n = 0; n < CALLERS; n++)
            pthread_join(learners[n].thread, NULL);
        for (int n = 0; n < CALLERS; n++) {
            assert_int_equal(learners[n].wrong, 0);
            drop_gradients(learners[n].want);
            train_free(&learners[n].t);
        }
        attn_context_destroy(context);
    }
}

/* ---- contexts come and go ---- */

static void test_context__threads_end_with_it(void **state)
{
    (void)state;
    struct problem x;
    make_problem(&x, &shapes[3], false);
    const int before = kit_settled_thread_count();
    for (int n = 0; n < 20; n++) {
        attn_context *context = make_context(4, NULL, NULL);
        struct bits met = run(&x, context);
        drop_bits(&met);
        attn_context_destroy(context);
    }
    assert_int_equal(kit_settled_thread_count(), before);
    drop_problem(&x);
}

static void test_context__no_more_threads_than_asked_for(void **state)
{
    (void)state;
    struct problem x;
    make_problem(&x, &shapes[1], false);
    const int before = kit_settled_thread_count();
    attn_context *context = make_context(3, NULL, NULL);
    assert_int_equal(attn_context_num_threads(context), 3);
    struct bits met = run(&x, context);
    assert_true(kit_thread_count() <= before + 2);
    drop_bits(&met);
    attn_context_destroy(context);
    drop_problem(&x);
}

/* A call for one thread starts none, in this library or in the BLAS. What a
 * BLAS starts when it is loaded is there already. */
static void test_default_context__starts_no_thread(void **state)
{
    (void)state;
    const int before = kit_settled_thread_count();
    for (size_t n = 0; n < COUNT(shapes); n++) {
        struct problem x;
        make_problem(&x, &shapes[n], false);
        attn_context *context = make_context(1, NULL, NULL);
        struct bits met = run(&x, context);
        drop_bits(&met);
        attn_context_destroy(context);
        drop_problem(&x);
    }
    for (size_t n = 0; n < COUNT(train_shapes); n++) {
        training t;
        make_training(&t, &train_shapes[n], ATTN_F32, (int)n % NUM_TRAIN_FORMS);
        attn_context *context = make_context(1, NULL, NULL);
        train_forward(&t, context, "gradients");
        run_training(&t, context);
        attn_context_destroy(context);
        train_free(&t);
    }
    struct layer l;
    make_layer(&l, ATTN_F32);
    attn_context *one = make_context(1, NULL, NULL);
    assert_int_equal(attn_mha(one, &l.p, &l.x, NULL, NULL, &l.y), ATTN_OK);
    attn_context_destroy(one);
    drop_layer(&l);
    assert_int_equal(kit_settled_thread_count(), before);
}

/* ---- the sentence of the last error belongs to a thread ---- */

static void *fail_in_thread(void *p)
{
    int *right = p;
    *right = strcmp(attn_last_error(), "") == 0;
    attn_tensor view;
    *right += attn_view_vector(&view, 99, NULL, 3) == ATTN_ERR_TYPE;
    *right += strstr(attn_last_error(), "99") != NULL;
    return NULL;
}

static void test_last_error__is_per_thread_and_empty_at_first(void **state)
{
    (void)state;
    char mine[256];
    attn_tensor view;
    int right = 0;
    pthread_t thread;
    assert_int_equal(attn_view_vector(&view, ATTN_F32, NULL, -12),
                     ATTN_ERR_SIZE);
    snprintf(mine, sizeof mine, "%s", attn_last_error());
    assert_int_equal(pthread_create(&thread, NULL, fail_in_thread, &right), 0);
    pthread_join(thread, NULL);
    assert_int_equal(right, 3);
    assert_string_equal(attn_last_error(), mine);
}

/* ---- the caller's floating-point state ---- */

#if defined(__x86_64__)
/* Subnormal inputs, so that flushing them shows. */
static void shrink(const attn_tensor *t)
{
    float *x = t->data;
    for (int64_t n = 0; n < kit_elements(t); n++)
        x[n] *= 1e-39F;
}

static void
test_sdpa__the_callers_flush_to_zero_reaches_all_threads(void **state)
{
    (void)state;
    const unsigned int ordinary = _mm_getcsr();
    const unsigned int flushing = ordinary | 0x8040U;
    const struct shape s = {ATTN_F32, 2, 4, 4, 40, 50, 16, 16, 0};
    struct problem x;
    make_problem(&x, &s, false);
    shrink(&x.v);
    struct bits plain[4];
    struct bits flushed[4];
    for (int host = 0; host < 4; host++) {
        attn_context *context = make_context(3, hosts[host].run, NULL);
        plain[host] = run(&x, context);
        _mm_setcsr(flushing);
        flushed[host] = run(&x, context);
        const unsigned int after = _mm_getcsr();
        _mm_setcsr(ordinary);
        /* The sticky exception bits (the low six) may have been set. */
        assert_int_equal(after & ~0x3fU, flushing & ~0x3fU);
        attn_context_destroy(context);
    }
    struct bits one = run(&x, NULL);
    _mm_setcsr(flushing);
    struct bits one_flushed = run(&x, NULL);
    _mm_setcsr(ordinary);
    for (int host = 0; host < 4; host++) {
        if (!same_bits(&plain[host], &one))
            fail_msg("%s: other bits", hosts[host].name);
        if (!same_bits(&flushed[host], &one_flushed))
            fail_msg("%s, flushing: other bits", hosts[host].name);
        drop_bits(&plain[host]);
        drop_bits(&flushed[host]);
    }
    /* Or this test would prove nothing. */
    assert_false(same_bits(&one, &one_flushed));
    drop_bits(&one);
    drop_bits(&one_flushed);
    drop_problem(&x);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_default_context__starts_no_thread),
        cmocka_unit_test(test_sdpa__bits_do_not_depend_on_threads),
        cmocka_unit_test(test_sdpa__bits_of_out_do_not_depend_on_outputs),
        cmocka_unit_test(test_sdpa__bits_do_not_depend_on_blocks_at_a_time),
        cmocka_unit_test(test_sdpa__twice_in_a_row_gives_the_same_bits),
        cmocka_unit_test(
            test_sdpa__bits_do_not_depend_on_the_rest_of_the_batch),
        cmocka_unit_test(test_mha_and_linear__bits_do_not_depend_on_threads),
        cmocka_unit_test(test_context__the_host_is_asked_for_its_threads),
        cmocka_unit_test(test_context__is_shared_by_several_callers),
        cmocka_unit_test(test_context__each_caller_its_own),
        cmocka_unit_test(test_default_context__several_callers),
        cmocka_unit_test(test_context__use_from_inside_a_hosts_parallel_for),
        cmocka_unit_test(test_backward__bits_do_not_depend_on_threads),
        cmocka_unit_test(test_backward__bits_of_sums_do_not_depend_on_threads),
        cmocka_unit_test(test_backward__ragged_bits_do_not_depend_on_threads),
        cmocka_unit_test(test_backward__twice_in_a_row_gives_the_same_bits),
        cmocka_unit_test(
            test_backward__bits_do_not_depend_on_the_rest_of_the_batch),
        cmocka_unit_test(test_backward__bits_of_a_sequence_are_its_own),
        cmocka_unit_test(test_backward__the_host_is_asked_for_its_threads),
        cmocka_unit_test(test_backward__several_callers_of_one_context),
        cmocka_unit_test(test_context__threads_end_with_it),
        cmocka_unit_test(test_context__no_more_threads_than_asked_for),
        cmocka_unit_test(test_last_error__is_per_thread_and_empty_at_first),
#if defined(__x86_64__)
        cmocka_unit_test(
            test_sdpa__the_callers_flush_to_zero_reaches_all_threads),
#endif
    };
    /* Threads also in problems as small as these. */
    setenv("ATTN_MIN_WORK", "0", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
