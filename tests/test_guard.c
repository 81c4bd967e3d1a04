/*
 * test_guard.c - nothing is read or written outside the arguments: each lies
 * directly before, then directly behind, an inaccessible page, the inputs
 * read-only; the results have the bits of an ordinary run.
 */
#include "kit.h"
#include "guard.h"
#include "train.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 32

/* All guarded memory of one call. */
struct fence {
    enum guard_side side;
    int count;
    struct guard guards[MOST];
};

static void *fence_bytes(struct fence *f, size_t bytes, size_t alignment)
{
    assert_true(f->count < MOST);
    f->guards[f->count] = guard_make(bytes, alignment, f->side);
    return f->guards[f->count++].data;
}

/* A guarded copy of t, contiguous as t is. */
static attn_tensor fence_input(struct fence *f, const attn_tensor *t)
{
    attn_tensor copy = *t;
    const size_t size = kit_bytes(t->dtype);
    const size_t bytes = (size_t)kit_elements(t) * size;
    copy.data = fence_bytes(f, bytes, size);
    if (bytes != 0)
        memcpy(copy.data, t->data, bytes);
    guard_freeze(&f->guards[f->count - 1]);
    return copy;
}

static attn_tensor fence_output(struct fence *f, const attn_tensor *t)
{
    attn_tensor copy = *t;
    const size_t size = kit_bytes(t->dtype);
    copy.data = fence_bytes(f, (size_t)kit_elements(t) * size, size);
    return copy;
}

static const int64_t *fence_numbers(struct fence *f, const int64_t *numbers,
                                    int64_t count)
{
    if (numbers == NULL)
        return NULL;
    const size_t bytes = (size_t)count * sizeof *numbers;
    int64_t *copy = fence_bytes(f, bytes, sizeof *numbers);
    memcpy(copy, numbers, bytes);
    guard_freeze(&f->guards[f->count - 1]);
    return copy;
}

static void fence_end(struct fence *f, const char *what)
{
    for (int n = 0; n < f->count; n++) {
        if (!guard_check(&f->guards[n]))
            fail_msg("%s: bytes beside argument %d were written", what, n);
        guard_drop(&f->guards[n]);
    }
    f->count = 0;
}

/* ---- attn_sdpa ---- */

struct shape {
    int64_t B, Hq, Hkv, Tq, Tk, D, Dv;
};

enum option {
    PLAIN = 0,
    OUTPUTS = 1,
    CAUSAL = 2,
    KEEP_MASK = 4,
    ADD_MASK = 8,
    KV_LENS = 16,
    Q_LENS = 32,
    PREFIX = 64,
    WINDOW = 128,
    BTHD = 256,
    BLAS_ONLY = 512,
    ALL_OPTIONS = 1023
};

struct problem {
    attn_sdpa_params p;
    attn_tensor q, k, v, out, lse, weights, mean;
    attn_mask masks[2];
    int64_t q_lens[4], kv_lens[4], prefix_lens[4];
};

static void make_problem(struct problem *x, attn_dtype dtype,
                         const struct shape *s, int options)
{
    attn_sdpa_params_init(&x->p);
    x->q = kit_make(dtype, s->B, s->Hq, s->Tq, s->D);
    x->k = kit_make(dtype, s->B, s->Hkv, s->Tk, s->D);
    x->v = kit_make(dtype, s->B, s->Hkv, s->Tk, s->Dv);
    x->out = kit_make(dtype, s->B, s->Hq, s->Tq, s->Dv);
    x->lse = kit_make(dtype, s->B, s->Hq, s->Tq, 1);
    x->weights = kit_make(dtype, s->B, s->Hq, s->Tq, s->Tk);
    x->mean = kit_make(dtype, s->B, 1, s->Tq, s->Tk);
    x->masks[0].kind = ATTN_MASK_KEEP;
    x->masks[0].reserved = 0;
    x->masks[0].view = kit_make(ATTN_U8, s->B, s->Hq, s->Tq, s->Tk);
    x->masks[1].kind = ATTN_MASK_ADD;
    x->masks[1].reserved = 0;
    x->masks[1].view = kit_make(dtype, s->B, 1, s->Tq, s->Tk);
    for (int b = 0; b < 4; b++) {
        x->q_lens[b] = kit_int(0, s->Tq);
        x->kv_lens[b] = kit_int(0, s->Tk);
        x->prefix_lens[b] = kit_int(0, s->Tk);
    }
    x->p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    x->p.causal = (options & (CAUSAL | PREFIX)) != 0;
    if (options & WINDOW) {
        x->p.flags |= ATTN_SDPA_WINDOW;
        x->p.window_left = 2;
        x->p.window_right = 1;
    }
    if (options & BLAS_ONLY)
        x->p.flags |= ATTN_SDPA_BLAS_ONLY;
    if (options & BTHD) {
        attn_view_bthd(&x->q, dtype, x->q.data, s->B, s->Tq, s->Hq, s->D);
        attn_view_bthd(&x->k, dtype, x->k.data, s->B, s->Tk, s->Hkv, s->D);
        attn_view_bthd(&x->v, dtype, x->v.data, s->B, s->Tk, s->Hkv, s->Dv);
        attn_view_bthd(&x->out, dtype, x->out.data, s->B, s->Tq, s->Hq, s->Dv);
    }
}

static void drop_problem(struct problem *x)
{
    attn_tensor *made[] = {&x->q,       &x->k,    &x->v,
                           &x->out,     &x->lse,  &x->masks[0].view,
                           &x->weights, &x->mean, &x->masks[1].view};
    for (size_t n = 0; n < COUNT(made); n++)
        kit_drop(made[n]);
}

/* Runs x with everything fenced and the results in place of x's. */
static void run_problem(const struct problem *x, const struct shape *s,
                        int options, struct fence *f, struct problem *r)
{
    attn_mask masks[2];
    int32_t num_masks = 0;
    *r = *x;
    r->q = fence_input(f, &x->q);
    r->k = fence_input(f, &x->k);
    r->v = fence_input(f, &x->v);
    r->out = fence_output(f, &x->out);
    for (int n = 0; n < 2; n++) {
        if (!(options & (n == 0 ? KEEP_MASK : ADD_MASK)))
            continue;
        masks[num_masks] = x->masks[n];
        masks[num_masks++].view = fence_input(f, &x->masks[n].view);
    }
    r->p.masks = num_masks > 0 ? masks : NULL;
    r->p.num_masks = num_masks;
    if (options & Q_LENS)
        r->p.q_lens = fence_numbers(f, x->q_lens, s->B);
    if (options & KV_LENS)
        r->p.kv_lens = fence_numbers(f, x->kv_lens, s->B);
    if (options & PREFIX)
        r->p.prefix_lens = fence_numbers(f, x->prefix_lens, s->B);
    if (options & OUTPUTS) {
        r->lse = fence_output(f, &x->lse);
        r->weights = fence_output(f, &x->weights);
        r->mean = fence_output(f, &x->mean);
        r->p.lse = &r->lse;
        r->p.weights = &r->weights;
        r->p.weights_mean = &r->mean;
    }
    size_t bytes;
    size_t alignment;
    if (attn_sdpa_workspace(NULL, &r->p, &r->q, &r->k, &r->v, &r->out, &bytes,
                            &alignment) != ATTN_OK)
        fail_msg("%s", attn_last_error());
    void *work = fence_bytes(f, bytes, alignment);
    if (attn_sdpa_work(NULL, &r->p, &r->q, &r->k, &r->v, &r->out, work,
                       bytes) != ATTN_OK)
        fail_msg("%s", attn_last_error());
}

/* The same in ordinary memory. */
static void run_plain(const struct problem *x, int options, struct problem *r)
{
    attn_mask masks[2];
    int32_t num_masks = 0;
    *r = *x;
    for (int n = 0; n < 2; n++)
        if (options & (n == 0 ? KEEP_MASK : ADD_MASK))
            masks[num_masks++] = x->masks[n];
    r->p.masks = num_masks > 0 ? masks : NULL;
    r->p.num_masks = num_masks;
    r->p.q_lens = options & Q_LENS ? x->q_lens : NULL;
    r->p.kv_lens = options & KV_LENS ? x->kv_lens : NULL;
    r->p.prefix_lens = options & PREFIX ? x->prefix_lens : NULL;
    if (options & OUTPUTS) {
        r->p.lse = &r->lse;
        r->p.weights = &r->weights;
        r->p.weights_mean = &r->mean;
    }
    if (attn_sdpa(NULL, &r->p, &r->q, &r->k, &r->v, &r->out) != ATTN_OK)
        fail_msg("%s", attn_last_error());
}

static void fenced_sdpa(attn_dtype dtype, const struct shape *s, int options)
{
    char what[160];
    struct problem x;
    struct problem plain;
    struct problem fenced;
    snprintf(what, sizeof what,
             "type %d, B %d, Hq %d, Hkv %d, Tq %d, Tk %d, D %d, Dv %d, "
             "options %d",
             (int)dtype, (int)s->B, (int)s->Hq, (int)s->Hkv, (int)s->Tq,
             (int)s->Tk, (int)s->D, (int)s->Dv, options);
    make_problem(&x, dtype, s, options);
    run_plain(&x, options, &plain);
    for (int side = GUARD_END; side <= GUARD_START; side++) {
        struct fence f = {(enum guard_side)side, 0, {{0}}};
        run_problem(&x, s, options, &f, &fenced);
        const bool same = kit_same(&plain.out, &fenced.out) &&
                          (!(options & OUTPUTS) ||
                           (kit_same(&plain.lse, &fenced.lse) &&
                            kit_same(&plain.weights, &fenced.weights) &&
                            kit_same(&plain.mean, &fenced.mean)));
        if (!same)
            fail_msg("%s, side %d: other bits than in ordinary memory", what,
                     side);
        fence_end(&f, what);
    }
    drop_problem(&x);
}

/* Each size in turn goes through its small values and the edges of vectors
 * and tiles, the others staying odd. */
static const int64_t tails[] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                11, 12, 13, 14, 15, 16, 17, 18, 19, 23, 31,
                                32, 33, 47, 48, 49, 63, 64, 65, 95, 97};

static void all_tails(attn_dtype dtype)
{
    const struct shape base = {1, 2, 1, 5, 7, 3, 3};
    for (size_t n = 0; n < COUNT(tails); n++) {
        struct shape s = base;
        s.Tq = tails[n];
        fenced_sdpa(dtype, &s, OUTPUTS);
        s = base;
        s.Tk = tails[n];
        fenced_sdpa(dtype, &s, OUTPUTS);
        s = base;
        s.D = tails[n];
        fenced_sdpa(dtype, &s, OUTPUTS);
        s = base;
        s.Dv = tails[n];
        fenced_sdpa(dtype, &s, OUTPUTS);
        s.Tq = s.Tk = s.D = s.Dv = tails[n];
        fenced_sdpa(dtype, &s, OUTPUTS | CAUSAL);
        fenced_sdpa(dtype, &s, OUTPUTS | CAUSAL | BLAS_ONLY);
        s.Tq = 1;
        fenced_sdpa(dtype, &s, OUTPUTS);
        fenced_sdpa(dtype, &s, OUTPUTS | BLAS_ONLY);
    }
}

static void test_sdpa_f32__touches_only_its_arguments(void **state)
{
    (void)state;
    all_tails(ATTN_F32);
}

static void test_sdpa_f64__touches_only_its_arguments(void **state)
{
    (void)state;
    all_tails(ATTN_F64);
}

static void test_sdpa__all_pairs_of_small_sizes(void **state)
{
    (void)state;
    for (int64_t t = 1; t <= 9; t++)
        for (int64_t d = 1; d <= 9; d++) {
            const struct shape a = {1, 1, 1, t, d, 4, 4};
            const struct shape b = {1, 1, 1, 4, 4, t, d};
            fenced_sdpa(ATTN_F32, &a, PLAIN);
            fenced_sdpa(ATTN_F64, &b, PLAIN);
        }
}

static void test_sdpa__random_sizes_and_options(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 300; seed++) {
        kit_seed(seed);
        const int64_t heads = kit_int(1, 3);
        const struct shape s = {kit_int(1, 2),  heads * kit_int(1, 3),
                                heads,          kit_int(1, 70),
                                kit_int(1, 70), kit_int(1, 40),
                                kit_int(1, 40)};
        fenced_sdpa(seed % 2 ? ATTN_F32 : ATTN_F64, &s,
                    (int)kit_int(0, ALL_OPTIONS));
    }
}

/* More than one tile in each direction. */
static void test_sdpa__long_rows(void **state)
{
    (void)state;
    const struct shape shapes[] = {{1, 1, 1, 131, 1029, 65, 33},
                                   {1, 1, 1, 517, 259, 31, 65},
                                   {1, 8, 1, 1, 1031, 64, 64},
                                   {2, 4, 2, 3, 777, 128, 128}};
    for (size_t n = 0; n < COUNT(shapes); n++) {
        fenced_sdpa(ATTN_F32, &shapes[n], OUTPUTS);
        fenced_sdpa(ATTN_F64, &shapes[n], CAUSAL | KV_LENS | BTHD);
    }
}

/* Ragged rows outside every sequence are neither read nor written. */
static void test_sdpa__ragged_rows_outside_are_not_touched(void **state)
{
    (void)state;
    const int64_t cu_q[] = {2, 5, 5, 9};
    const int64_t cu_k[] = {1, 8, 10, 12};
    for (int side = GUARD_END; side <= GUARD_START; side++) {
        struct fence f = {(enum guard_side)side, 0, {{0}}};
        attn_tensor q = kit_make(ATTN_F32, 1, 2, 11, 4);
        attn_tensor k = kit_make(ATTN_F32, 1, 2, 14, 4);
        attn_tensor v = kit_make(ATTN_F32, 1, 2, 14, 3);
        attn_tensor out = kit_make(ATTN_F32, 1, 2, 11, 3);
        attn_tensor fq = fence_input(&f, &q);
        attn_tensor fk = fence_input(&f, &k);
        attn_tensor fv = fence_input(&f, &v);
        attn_tensor fout = fence_output(&f, &out);
        attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
        kit_fill_with(&fout, -77.0);
        p.cu_q = fence_numbers(&f, cu_q, 4);
        p.cu_k = fence_numbers(&f, cu_k, 4);
        p.num_seqs = 3;
        if (attn_sdpa(NULL, &p, &fq, &fk, &fv, &fout) != ATTN_OK)
            fail_msg("%s", attn_last_error());
        for (int64_t h = 0; h < 2; h++)
            for (int64_t t = 0; t < 11; t++) {
                const bool outside = t < 2 || t >= 9;
                const double met = kit_get(&fout, 0, h, t, 0);
                assert_int_equal(met < -70.0, outside);
            }
        fence_end(&f, "ragged");
        kit_drop(&q);
        kit_drop(&k);
        kit_drop(&v);
        kit_drop(&out);
    }
}

/* Keys at and beyond kv_lens are never read: their memory need not exist. */
static void test_sdpa__keys_beyond_kv_lens_need_no_memory(void **state)
{
    (void)state;
    for (int64_t len = 0; len <= 40; len++) {
        struct fence f = {GUARD_END, 0, {{0}}};
        attn_tensor q = kit_make(ATTN_F32, 1, 1, 5, 8);
        attn_tensor k = kit_make(ATTN_F32, 1, 1, len, 8);
        attn_tensor out = kit_make(ATTN_F32, 1, 1, 5, 8);
        attn_tensor want = kit_make(ATTN_F32, 1, 1, 5, 8);
        attn_tensor fk = fence_input(&f, &k);
        attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
        assert_int_equal(attn_sdpa(NULL, NULL, &q, &k, &k, &want), ATTN_OK);
        fk.shape[2] = 300;
        p.kv_lens = &len;
        if (attn_sdpa(NULL, &p, &q, &fk, &fk, &out) != ATTN_OK)
            fail_msg("%s", attn_last_error());
        for (int64_t t = 0; t < 5; t++)
            for (int64_t d = 0; d < 8; d++) {
                const double off =
                    kit_get(&out, 0, 0, t, d) - kit_get(&want, 0, 0, t, d);
                assert_true(off < 1e-5 && off > -1e-5);
            }
        fence_end(&f, "kv_lens");
        kit_drop(&q);
        kit_drop(&k);
        kit_drop(&out);
        kit_drop(&want);
    }
}

/* ---- attn_sdpa_backward ---- */

static void make_training(training *t, attn_dtype dtype, const struct shape *s,
                          int options, const struct problem *lens)
{
    const train_sizes sizes = {s->B, s->Hq, s->Hkv, s->Tq, s->Tk, s->D, s->Dv};
    train_make(t, 1, dtype, &sizes);
    t->p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    t->p.causal = (options & CAUSAL) != 0;
    if (options & WINDOW) {
        t->p.flags |= ATTN_SDPA_WINDOW;
        t->p.window_left = 2;
        t->p.window_right = 1;
    }
    if (options & BLAS_ONLY)
        t->p.flags |= ATTN_SDPA_BLAS_ONLY;
    if (options & KEEP_MASK)
        train_use_keep(t, s->B, s->Hq, s->Tq, s->Tk);
    if (options & ADD_MASK)
        train_use_mask(t, s->B, 1, s->Tq, s->Tk);
    if (options & PREFIX)
        train_use_mask(t, 1, s->Hq, 1, s->Tk);
    if (options & OUTPUTS) {
        train_use_lse(t);
        train_use_alibi(t, 0);
        train_use_sinks(t, s->B);
    }
    t->p.q_lens = options & Q_LENS ? lens->q_lens : NULL;
    t->p.kv_lens = options & KV_LENS ? lens->kv_lens : NULL;
    if (options & BTHD) {
        tensor *of_q[] = {&t->q, &t->d[TRAIN_D_Q]};
        tensor *of_out[] = {&t->out, &t->d_out};
        tensor *of_k[] = {&t->k, &t->d[TRAIN_D_K]};
        tensor *of_v[] = {&t->v, &t->d[TRAIN_D_V]};
        for (int n = 0; n < 2; n++) {
            attn_view_bthd(&of_q[n]->view, dtype, of_q[n]->view.data, s->B,
                           s->Tq, s->Hq, s->D);
            attn_view_bthd(&of_out[n]->view, dtype, of_out[n]->view.data, s->B,
                           s->Tq, s->Hq, s->Dv);
            attn_view_bthd(&of_k[n]->view, dtype, of_k[n]->view.data, s->B,
                           s->Tk, s->Hkv, s->D);
            attn_view_bthd(&of_v[n]->view, dtype, of_v[n]->view.data, s->B,
                           s->Tk, s->Hkv, s->Dv);
        }
    }
}

/* The same call with everything fenced. */
static void run_fenced_training(const training *t, struct fence *f,
                                const struct shape *s,
                                attn_tensor d[TRAIN_GRADIENTS])
{
    attn_sdpa_params p = t->p;
    attn_sdpa_gradients g = t->g;
    attn_mask masks[ATTN_MAX_MASKS];
    const attn_tensor *d_masks[ATTN_MAX_MASKS] = {NULL};
    attn_tensor lse, d_lse, alibi, sinks;
    const attn_tensor q = fence_input(f, &t->q.view);
    const attn_tensor k = fence_input(f, &t->k.view);
    const attn_tensor v = fence_input(f, &t->v.view);
    const attn_tensor out = fence_input(f, &t->out.view);
    const attn_tensor d_out = fence_input(f, &t->d_out.view);
    const struct {
        const attn_tensor **field;
        attn_tensor *fenced;
    } others[] = {{&p.lse, &lse},
                  {&g.d_lse, &d_lse},
                  {&p.alibi, &alibi},
                  {&p.sinks, &sinks}};
    for (size_t n = 0; n < COUNT(others); n++)
        if (*others[n].field != NULL) {
            *others[n].fenced = fence_input(f, *others[n].field);
            *others[n].field = others[n].fenced;
        }
    for (int n = 0; n < p.num_masks; n++) {
        masks[n] = t->masks[n];
        masks[n].view = fence_input(f, &t->masks[n].view);
    }
    p.masks = p.num_masks > 0 ? masks : NULL;
    p.q_lens = fence_numbers(f, p.q_lens, s->B);
    p.kv_lens = fence_numbers(f, p.kv_lens, s->B);
    for (int n = 0; n < TRAIN_GRADIENTS; n++)
        if (t->d[n].block)
            d[n] = fence_output(f, &t->d[n].view);
    g.d_q = &d[TRAIN_D_Q];
    g.d_k = &d[TRAIN_D_K];
    g.d_v = &d[TRAIN_D_V];
    g.d_scale = &d[TRAIN_D_SCALE];
    g.d_alibi = p.alibi ? &d[TRAIN_D_ALIBI] : NULL;
    g.d_sinks = p.sinks ? &d[TRAIN_D_SINKS] : NULL;
    for (int n = 0; n < p.num_masks; n++)
        if (t->d_masks[n])
            d_masks[n] = &d[TRAIN_D_MASK + n];
    g.d_masks = t->g.d_masks ? d_masks : NULL;
    size_t bytes;
    size_t alignment;
    if (attn_sdpa_backward_workspace(NULL, &p, &q, &k, &v, &out, &d_out, &g,
                                     &bytes, &alignment) != ATTN_OK)
        fail_msg("%s", attn_last_error());
    void *work = fence_bytes(f, bytes, alignment);
    if (attn_sdpa_backward_work(NULL, &p, &q, &k, &v, &out, &d_out, &g, work,
                                bytes) != ATTN_OK)
        fail_msg("%s", attn_last_error());
}

static void fenced_backward(attn_dtype dtype, const struct shape *s,
                            int options)
{
    char what[160];
    struct problem lens;
    training t;
    snprintf(what, sizeof what,
             "gradients, type %d, B %d, Hq %d, Hkv %d, Tq %d, Tk %d, D %d, "
             "Dv %d, options %d",
             (int)dtype, (int)s->B, (int)s->Hq, (int)s->Hkv, (int)s->Tq,
             (int)s->Tk, (int)s->D, (int)s->Dv, options);
    for (int b = 0; b < 4; b++) {
        lens.q_lens[b] = kit_int(0, s->Tq);
        lens.kv_lens[b] = kit_int(0, s->Tk);
    }
    make_training(&t, dtype, s, options, &lens);
    train_forward(&t, NULL, what);
    train_backward(&t, NULL, what);
    for (int side = GUARD_END; side <= GUARD_START; side++) {
        struct fence f = {(enum guard_side)side, 0, {{0}}};
        attn_tensor d[TRAIN_GRADIENTS];
        run_fenced_training(&t, &f, s, d);
        for (int n = 0; n < TRAIN_GRADIENTS; n++)
            if (t.d[n].block && !kit_same(&t.d[n].view, &d[n]))
                fail_msg("%s, side %d: other bits in %s", what, side,
                         train_names[n]);
        fence_end(&f, what);
    }
    train_free(&t);
}

static void backward_tails(attn_dtype dtype)
{
    const struct shape base = {1, 2, 1, 5, 7, 3, 3};
    for (size_t n = 0; n < COUNT(tails); n++) {
        struct shape s = base;
        s.Tq = tails[n];
        fenced_backward(dtype, &s, OUTPUTS);
        s = base;
        s.Tk = tails[n];
        fenced_backward(dtype, &s, OUTPUTS | ADD_MASK);
        s = base;
        s.D = tails[n];
        fenced_backward(dtype, &s, OUTPUTS);
        s = base;
        s.Dv = tails[n];
        fenced_backward(dtype, &s, OUTPUTS);
        s.Tq = s.Tk = s.D = s.Dv = tails[n];
        fenced_backward(dtype, &s, OUTPUTS | CAUSAL);
        fenced_backward(dtype, &s, CAUSAL | BLAS_ONLY);
        s.Tq = 1;
        fenced_backward(dtype, &s, OUTPUTS);
    }
}

static void test_sdpa_backward_f32__touches_only_its_arguments(void **state)
{
    (void)state;
    backward_tails(ATTN_F32);
}

static void test_sdpa_backward_f64__touches_only_its_arguments(void **state)
{
    (void)state;
    backward_tails(ATTN_F64);
}

static void test_sdpa_backward__random_sizes_and_options(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 300; seed++) {
        kit_seed(seed);
        const int64_t heads = kit_int(1, 3);
        const struct shape s = {kit_int(1, 2),  heads * kit_int(1, 3),
                                heads,          kit_int(1, 70),
                                kit_int(1, 70), kit_int(1, 40),
                                kit_int(1, 40)};
        fenced_backward(seed % 2 ? ATTN_F32 : ATTN_F64, &s,
                        (int)kit_int(0, ALL_OPTIONS));
    }
}

static void test_sdpa_backward__long_rows(void **state)
{
    (void)state;
    const struct shape shapes[] = {{1, 1, 1, 131, 1029, 65, 33},
                                   {1, 1, 1, 517, 259, 31, 65},
                                   {1, 8, 1, 1, 1031, 64, 64},
                                   {2, 4, 2, 3, 777, 128, 128}};
    for (size_t n = 0; n < COUNT(shapes); n++) {
        fenced_backward(ATTN_F32, &shapes[n], OUTPUTS | ADD_MASK);
        fenced_backward(ATTN_F64, &shapes[n], CAUSAL | KV_LENS | BTHD);
    }
}

/* Keys at and beyond kv_lens are not read, and their gradients are set: so
 * that only those of k and v need memory. */
static void test_sdpa_backward__keys_beyond_kv_lens_need_no_memory(void **state)
{
    (void)state;
    for (int64_t len = 0; len <= 40; len++) {
        struct fence f = {GUARD_END, 0, {{0}}};
        const train_sizes sizes = {1, 1, 1, 5, len, 8, 8};
        training t;
        train_make(&t, 2, ATTN_F32, &sizes);
        train_forward(&t, NULL, "kv_lens");
        attn_tensor k = fence_input(&f, &t.k.view);
        attn_tensor v = fence_input(&f, &t.v.view);
        attn_tensor d_k = kit_make(ATTN_F32, 1, 1, 300, 8);
        k.shape[2] = v.shape[2] = 300;
        t.p.kv_lens = &len;
        t.g.d_k = &d_k;
        t.g.d_v = NULL;
        if (attn_sdpa_backward(NULL, &t.p, &t.q.view, &k, &v, &t.out.view,
                               &t.d_out.view, &t.g) != ATTN_OK)
            fail_msg("%s", attn_last_error());
        for (int64_t j = len; j < 300; j++)
            for (int64_t d = 0; d < 8; d++) {
                const double met = kit_get(&d_k, 0, 0, j, d);
                if (met < 0.0 || met > 0.0)
                    fail_msg("d_k is not 0 beyond kv_lens");
            }
        fence_end(&f, "kv_lens");
        kit_drop(&d_k);
        train_free(&t);
    }
}

/* ---- the other calls ---- */

static void test_softmax__touches_only_its_arguments(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(tails); n++) {
        for (int side = GUARD_END; side <= GUARD_START; side++) {
            const attn_dtype dtype = n % 2 ? ATTN_F32 : ATTN_F64;
            struct fence f = {(enum guard_side)side, 0, {{0}}};
            attn_tensor x = kit_make(dtype, 1, 2, 3, tails[n]);
            attn_tensor y = kit_make(dtype, 1, 2, 3, tails[n]);
            attn_tensor lse = kit_make(dtype, 1, 2, 3, 1);
            attn_tensor fx = fence_input(&f, &x);
            attn_tensor fy = fence_output(&f, &y);
            attn_tensor flse = fence_output(&f, &lse);
            double deviation;
            assert_int_equal(attn_softmax(&x, &y, &lse), ATTN_OK);
            assert_int_equal(attn_softmax(&fx, &fy, &flse), ATTN_OK);
            assert_int_equal(attn_weights_check(&fx, &deviation, NULL),
                             ATTN_OK);
            assert_true(kit_same(&y, &fy));
            assert_true(kit_same(&lse, &flse));
            fence_end(&f, "softmax");
            kit_drop(&x);
            kit_drop(&y);
            kit_drop(&lse);
        }
    }
}

static void test_mask__touches_only_its_arguments(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(tails); n++) {
        for (int side = GUARD_END; side <= GUARD_START; side++) {
            struct fence f = {(enum guard_side)side, 0, {{0}}};
            attn_tensor scores = kit_make(ATTN_F32, 1, 2, 3, tails[n]);
            attn_tensor keep = kit_make(ATTN_U8, 1, 2, 3, tails[n]);
            attn_tensor add = kit_make(ATTN_F32, 1, 1, 3, tails[n]);
            attn_tensor fscores = fence_output(&f, &scores);
            attn_mask masks[2] = {{ATTN_MASK_KEEP, 0, fence_output(&f, &keep)},
                                  {ATTN_MASK_ADD, 0, fence_output(&f, &add)}};
            const int64_t len = tails[n] / 2;
            kit_fill(&fscores);
            assert_int_equal(attn_mask_causal(&masks[0], 1), ATTN_OK);
            assert_int_equal(attn_mask_window(&masks[1], 0, 2, 1), ATTN_OK);
            assert_int_equal(attn_mask_padding(&masks[1], &len), ATTN_OK);
            guard_freeze(&f.guards[1]);
            guard_freeze(&f.guards[2]);
            assert_int_equal(attn_mask_apply(masks, 2, &fscores), ATTN_OK);
            fence_end(&f, "mask");
            kit_drop(&scores);
            kit_drop(&keep);
            kit_drop(&add);
        }
    }
}

static void test_linear__touches_only_its_arguments(void **state)
{
    (void)state;
    if (kit_blas_is_blis())
        skip();
    for (uint64_t seed = 0; seed < 200; seed++) {
        kit_seed(seed);
        const attn_dtype dtype = seed % 2 ? ATTN_F32 : ATTN_F64;
        const int64_t t = tails[kit_int(0, (int64_t)COUNT(tails) - 1)];
        const int64_t in = tails[kit_int(0, (int64_t)COUNT(tails) - 1)];
        const int64_t out = tails[kit_int(0, (int64_t)COUNT(tails) - 1)];
        for (int side = GUARD_END; side <= GUARD_START; side++) {
            struct fence f = {(enum guard_side)side, 0, {{0}}};
            attn_tensor x = kit_make(dtype, 1, 1, t, in);
            attn_tensor w = kit_make(dtype, 1, 1, out, in);
            attn_tensor bias = kit_make(dtype, 1, 1, 1, out);
            attn_tensor y = kit_make(dtype, 1, 1, t, out);
            attn_tensor fx = fence_input(&f, &x);
            attn_tensor fw = fence_input(&f, &w);
            attn_tensor fbias = fence_input(&f, &bias);
            attn_tensor fy = fence_output(&f, &y);
            assert_int_equal(
                attn_linear(NULL, ATTN_WEIGHT_OUT_IN, &x, &w, &bias, &y),
                ATTN_OK);
            assert_int_equal(
                attn_linear(NULL, ATTN_WEIGHT_OUT_IN, &fx, &fw, &fbias, &fy),
                ATTN_OK);
            if (!kit_same(&y, &fy))
                fail_msg("seed %d: other bits", (int)seed);
            fence_end(&f, "linear");
            kit_drop(&x);
            kit_drop(&w);
            kit_drop(&bias);
            kit_drop(&y);
        }
    }
}

static void test_heads__touch_only_their_arguments(void **state)
{
    (void)state;
    for (int64_t d = 0; d < 20; d++) {
        for (int side = GUARD_END; side <= GUARD_START; side++) {
            struct fence f = {(enum guard_side)side, 0, {{0}}};
            attn_tensor rows = kit_make(ATTN_F32, 2, 1, 5, 3 * d);
            attn_tensor heads = kit_make(ATTN_F32, 2, 3, 5, d);
            attn_tensor frows = fence_input(&f, &rows);
            attn_tensor fheads = fence_output(&f, &heads);
            attn_tensor back = fence_output(&f, &rows);
            assert_int_equal(attn_split_heads(&frows, &fheads), ATTN_OK);
            assert_int_equal(attn_merge_heads(&fheads, &back), ATTN_OK);
            assert_true(kit_same(&rows, &back));
            fence_end(&f, "heads");
            kit_drop(&rows);
            kit_drop(&heads);
        }
    }
}

static void fenced_mha(uint64_t seed)
{
    kit_seed(seed);
    const attn_dtype dtype = seed % 2 ? ATTN_F32 : ATTN_F64;
    const int64_t H = kit_int(1, 4);
    const int64_t D = kit_int(1, 17);
    const int64_t E = kit_int(1, 33);
    const int64_t T = kit_int(1, 35);
    for (int side = GUARD_END; side <= GUARD_START; side++) {
        struct fence f = {(enum guard_side)side, 0, {{0}}};
        attn_tensor t[] = {
            kit_make(dtype, 2, 1, T, E), kit_make(dtype, 1, 1, 3 * H * D, E),
            kit_make(dtype, 1, 1, 1, 3 * H * D),
            kit_make(dtype, 1, 1, E, H * D), kit_make(dtype, 2, 1, T, E)};
        attn_tensor g[5];
        attn_mha_params p = ATTN_MHA_PARAMS_INIT;
        size_t bytes;
        size_t alignment;
        p.weight_layout = ATTN_WEIGHT_OUT_IN;
        p.num_heads = H;
        p.w_qkv = &t[1];
        p.b_qkv = &t[2];
        p.w_o = &t[3];
        if (attn_mha(NULL, &p, &t[0], NULL, NULL, &t[4]) != ATTN_OK)
            fail_msg("seed %d: %s", (int)seed, attn_last_error());
        for (int n = 0; n < 4; n++)
            g[n] = fence_input(&f, &t[n]);
        g[4] = fence_output(&f, &t[4]);
        p.w_qkv = &g[1];
        p.b_qkv = &g[2];
        p.w_o = &g[3];
        assert_int_equal(attn_mha_workspace(NULL, &p, &g[0], NULL, NULL, &g[4],
                                            &bytes, &alignment),
                         ATTN_OK);
        void *work = fence_bytes(&f, bytes, alignment);
        assert_int_equal(
            attn_mha_work(NULL, &p, &g[0], NULL, NULL, &g[4], work, bytes),
            ATTN_OK);
        if (!kit_same(&t[4], &g[4]))
            fail_msg("seed %d: other bits", (int)seed);
        fence_end(&f, "mha");
        for (int n = 0; n < 5; n++)
            kit_drop(&t[n]);
    }
}

static void test_mha__touches_only_its_arguments(void **state)
{
    (void)state;
    if (kit_blas_is_blis())
        skip();
    for (uint64_t seed = 0; seed < 100; seed++)
        fenced_mha(seed);
}

/* The fences themselves: a byte written beside the memory is found. */
static void test_guard__finds_a_stray_write(void **state)
{
    (void)state;
    struct guard g = guard_make(12, 4, GUARD_END);
    assert_true(guard_check(&g));
    ((unsigned char *)g.data)[-1] = 0;
    assert_false(guard_check(&g));
    guard_drop(&g);
    g = guard_make(12, 4, GUARD_START);
    assert_true(guard_check(&g));
    ((unsigned char *)g.data)[12] = 0;
    assert_false(guard_check(&g));
    guard_drop(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_guard__finds_a_stray_write),
        cmocka_unit_test(test_sdpa_f32__touches_only_its_arguments),
        cmocka_unit_test(test_sdpa_f64__touches_only_its_arguments),
        cmocka_unit_test(test_sdpa__all_pairs_of_small_sizes),
        cmocka_unit_test(test_sdpa__random_sizes_and_options),
        cmocka_unit_test(test_sdpa__long_rows),
        cmocka_unit_test(test_sdpa__ragged_rows_outside_are_not_touched),
        cmocka_unit_test(test_sdpa__keys_beyond_kv_lens_need_no_memory),
        cmocka_unit_test(test_sdpa_backward_f32__touches_only_its_arguments),
        cmocka_unit_test(test_sdpa_backward_f64__touches_only_its_arguments),
        cmocka_unit_test(test_sdpa_backward__random_sizes_and_options),
        cmocka_unit_test(test_sdpa_backward__long_rows),
        cmocka_unit_test(
            test_sdpa_backward__keys_beyond_kv_lens_need_no_memory),
        cmocka_unit_test(test_softmax__touches_only_its_arguments),
        cmocka_unit_test(test_mask__touches_only_its_arguments),
        cmocka_unit_test(test_linear__touches_only_its_arguments),
        cmocka_unit_test(test_heads__touch_only_their_arguments),
        cmocka_unit_test(test_mha__touches_only_its_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
