/*
 * Random calls of attn_sdpa_backward over the whole option space against the
 * oracle: the problems of test_random.c, but those in pages or a ring, with
 * the gradient of a loss drawn beside them.
 *
 *   ATTN_TEST_SEED   which stream of calls (default 1)
 *   ATTN_TEST_COUNT  how many (default: some ten seconds' worth)
 *   ATTN_TEST_FIRST  index of the first; a failure prints all three, and with
 *                    them exactly the failing call is run again
 */
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "compare.h"
#include "draw.h"

/* One call of so many is a large one. */
enum { DEFAULT_COUNT = 2500, LARGE_EVERY = 24 };

/* ---- drawing ---- */

enum {
    D_Q,
    D_K,
    D_V,
    D_ALIBI,
    D_SINKS,
    D_SCALE,
    D_MASKS,
    NUM_GRADIENTS = D_MASKS + ATTN_MAX_MASKS
};

/* A gradient; block NULL: not wanted. */
typedef struct gradient {
    tensor t;
    tensor before; /* a copy, contiguous */
} gradient;

/* An input and a copy of all its memory. */
typedef struct input {
    const char *name;
    const tensor *t;
    void *copy;
} input;

enum { NUM_INPUTS = 10 + ATTN_MAX_MASKS };

typedef struct call {
    drawn d;
    tensor out, lse, d_out, d_lse;
    attn_sdpa_gradients g;
    const attn_tensor *d_masks[ATTN_MAX_MASKS];
    gradient gradients[NUM_GRADIENTS];
    input inputs[NUM_INPUTS];
    int from_oracle; /* out and lse */
    int twice;       /* again with another number of threads */
    char context[4600];
} call;

static const char *name_of(int n)
{
    static const char *const names[] = {"d_q",     "d_k",     "d_v",
                                        "d_alibi", "d_sinks", "d_scale"};
    return n < D_MASKS ? names[n] : "d_masks";
}

/* What the gradients are not defined for is taken away. */
static void drop_outputs(attn_sdpa_params *p)
{
    p->weights = p->weights_mean = NULL;
    p->scores_raw = p->scores_capped = p->scores = NULL;
    p->key_sums = NULL;
    p->max_weight = p->effective_keys = p->entropy = NULL;
}

/* Wanted by three calls of four, set or added to. */
static const attn_tensor *draw_gradient(rng *r, call *c, int n, int32_t flag,
                                        const attn_tensor *as)
{
    gradient *g = &c->gradients[n];
    const int64_t *s = as->shape;
    if (rng_one_in(r, 4))
        return NULL;
    g->t = tensor_scattered(r, TENSOR_OUTPUT, c->d.q.view.dtype, s[0], s[1],
                            s[2], s[3]);
    if (c->g.flags & flag)
        tensor_normal(&g->t.view, r, 1.0);
    g->before = tensor_copy(&g->t.view, g->t.view.dtype);
    return &g->t.view;
}

static void draw_gradients(rng *r, call *c)
{
    static const attn_sdpa_gradients init = ATTN_SDPA_GRADIENTS_INIT;
    static const attn_tensor scalar = {.shape = {1, 1, 1, 1}};
    const attn_sdpa_params *p = &c->d.params;
    attn_sdpa_gradients *g = &c->g;
    *g = init;
    if (rng_one_in(r, 3))
        g->flags = ATTN_SDPA_ADD_D_Q * (int32_t)rng_int(r, 0, 127);
    g->d_q = draw_gradient(r, c, D_Q, ATTN_SDPA_ADD_D_Q, &c->d.q.view);
    g->d_k = draw_gradient(r, c, D_K, ATTN_SDPA_ADD_D_K, &c->d.k.view);
    g->d_v = draw_gradient(r, c, D_V, ATTN_SDPA_ADD_D_V, &c->d.v.view);
    g->d_scale = draw_gradient(r, c, D_SCALE, ATTN_SDPA_ADD_D_SCALE, &scalar);
    if (p->alibi)
        g->d_alibi =
            draw_gradient(r, c, D_ALIBI, ATTN_SDPA_ADD_D_ALIBI, p->alibi);
    if (p->sinks)
        g->d_sinks =
            draw_gradient(r, c, D_SINKS, ATTN_SDPA_ADD_D_SINKS, p->sinks);
    for (int32_t n = 0; n < p->num_masks; n++)
        if (p->masks[n].kind == ATTN_MASK_ADD)
            c->d_masks[n] = draw_gradient(
                r, c, D_MASKS + n, ATTN_SDPA_ADD_D_MASKS, &p->masks[n].view);
    if (p->num_masks > 0 && !rng_one_in(r, 8))
        g->d_masks = c->d_masks;
}

static int has_shared_elements(const attn_tensor *x)
{
    for (int i = 0; i < 4; i++)
        if (x->shape[i] > 1 && x->stride[i] == 0)
            return 1;
    return 0;
}

static double poison(rng *r)
{
    const int64_t kind = rng_int(r, 1, 3);
    return kind == 1 ? (double)NAN : kind == 2 ? HUGE_VAL : -HUGE_VAL;
}

/* Does the row belong to a sequence, and lie within its length? */
static int is_row(const attn_sdpa_params *p, int64_t b, int64_t t)
{
    if (p->cu_q) /* the sequences lie without gaps between them */
        return t >= p->cu_q[0] && t < p->cu_q[p->num_seqs];
    return !p->q_lens || t < p->q_lens[b];
}

/* Rows that are not there, and rows that see nothing: these know it by their
 * log-sum-exp, as the forward pass has left it. Not where that is a sink, whose
 * gradient such a row has a part in. */
static void poison_hidden(rng *r, const call *c)
{
    const attn_sdpa_params *p = &c->d.params;
    const attn_tensor *x = &c->d_out.view;
    const int64_t *n = x->shape;
    for (int64_t b = 0; b < n[0]; b++)
        for (int64_t h = 0; h < n[1]; h++)
            for (int64_t t = 0; t < n[2]; t++) {
                const int there = is_row(p, b, t);
                if (there &&
                    (p->sinks || !isinf(ref_get(&c->lse.view, b, h, t, 0))))
                    continue;
                for (int64_t e = 0; e < n[3]; e++)
                    if (!rng_one_in(r, 3))
                        tensor_set(x, b, h, t, e, poison(r));
                if (!there && c->d_lse.block &&
                    !has_shared_elements(&c->d_lse.view))
                    tensor_set(&c->d_lse.view, b, h, t, 0, poison(r));
            }
}

static void poison_visible(rng *r, const attn_tensor *x)
{
    const int64_t *s = x->shape;
    if (s[0] * s[1] * s[2] * s[3] == 0)
        return;
    tensor_set(x, rng_int(r, 0, s[0] - 1), rng_int(r, 0, s[1] - 1),
               rng_int(r, 0, s[2] - 1), rng_int(r, 0, s[3] - 1), poison(r));
}

/* d loss / d out and d lse, of any size. */
static void draw_loss(rng *r, call *c)
{
    static const double factors[] = {1.0, 1.0, 1.0, 1e-3, 1e4, 1e-21, 0.0};
    const int64_t *s = c->d.out.view.shape;
    const attn_dtype dtype = c->d.q.view.dtype;
    const double factor = factors[rng_int(r, 0, 6)];
    const int kind = rng_one_in(r, 2) ? TENSOR_INPUT : TENSOR_OUTPUT;
    c->d_out = tensor_scattered(r, kind, dtype, s[0], s[1], s[2], s[3]);
    tensor_normal(&c->d_out.view, r, factor);
    if (rng_one_in(r, 2)) {
        c->d_lse = tensor_scattered(r, kind, dtype, s[0], s[1], s[2], 1);
        tensor_normal(&c->d_lse.view, r, factor);
        c->g.d_lse = &c->d_lse.view;
    }
    /* Numbers that are not finite are drawn after the inputs have theirs. */
    if (c->d.values == DRAW_HIDDEN_POISON &&
        !has_shared_elements(&c->d_out.view))
        poison_hidden(r, c);
    if (c->d.values == DRAW_VISIBLE_POISON && rng_one_in(r, 3))
        poison_visible(r, &c->d_out.view);
    if (c->d.values == DRAW_VISIBLE_POISON && c->d_lse.block &&
        rng_one_in(r, 6))
        poison_visible(r, &c->d_lse.view);
}

/* out and lse: what the library says, or the oracle. */
static int64_t run_forward(rng *r, call *c)
{
    drawn *d = &c->d;
    const int64_t *s = d->out.view.shape;
    const attn_dtype dtype = d->q.view.dtype;
    c->out = tensor_scattered(r, TENSOR_OUTPUT, dtype, s[0], s[1], s[2], s[3]);
    c->lse = tensor_scattered(r, TENSOR_OUTPUT, dtype, s[0], s[1], s[2], 1);
    d->params.lse = &c->lse.view;
    c->from_oracle = rng_one_in(r, 4);
    if (!c->from_oracle) {
        if (attn_sdpa(NULL, &d->params, &d->q.view, &d->k.view, &d->v.view,
                      &c->out.view) == ATTN_OK)
            return 0;
        print_error("attn_sdpa: %s\n", attn_last_error());
        return 1;
    }
    ref_result want;
    ref_sdpa(&want, &d->params, &d->q.view, &d->k.view, &d->v.view);
    for (int64_t b = 0; b < s[0]; b++)
        for (int64_t h = 0; h < s[1]; h++)
            for (int64_t t = 0; t < s[2]; t++) {
                const ref_num *lse = ref_at(&want.lse, b, h, t, 0);
                if (lse->error == REF_UNTOUCHED)
                    continue;
                tensor_set(&c->lse.view, b, h, t, 0, (double)lse->value);
                for (int64_t e = 0; e < s[3]; e++)
                    tensor_set(&c->out.view, b, h, t, e,
                               (double)ref_at(&want.out, b, h, t, e)->value);
            }
    ref_free(&want);
    return 0;
}

static void describe(call *c)
{
    char *text = c->context;
    const size_t size = sizeof c->context;
    draw_describe(&c->d, text, size - 400);
    size_t n = strlen(text);
    n += (size_t)snprintf(text + n, size - n, "; %s%s add=%d gradients:",
                          c->from_oracle ? "out from the oracle" : "",
                          c->d_lse.block ? " d_lse" : "", (int)c->g.flags);
    for (int i = 0; i < NUM_GRADIENTS && n < size; i++)
        if (c->gradients[i].t.block)
            n += (size_t)snprintf(text + n, size - n, " %s", name_of(i));
}

/* ---- inputs that must stay ---- */

static void copy_inputs(call *c)
{
    const drawn *d = &c->d;
    const input list[] = {{.name = "q", .t = &d->q},
                          {.name = "k", .t = &d->k},
                          {.name = "v", .t = &d->v},
                          {.name = "out", .t = &c->out},
                          {.name = "lse", .t = &c->lse},
                          {.name = "d_out", .t = &c->d_out},
                          {.name = "d_lse", .t = &c->d_lse},
                          {.name = "alibi", .t = &d->alibi},
                          {.name = "sinks", .t = &d->sinks},
                          {.name = "blocks", .t = &d->blocks},
                          {.name = "mask", .t = &d->mask_memory[0]},
                          {.name = "mask", .t = &d->mask_memory[1]},
                          {.name = "mask", .t = &d->mask_memory[2]},
                          {.name = "mask", .t = &d->mask_memory[3]}};
    memcpy(c->inputs, list, sizeof list);
    for (int n = 0; n < NUM_INPUTS; n++) {
        input *x = &c->inputs[n];
        if (!x->t->block)
            continue;
        x->copy = malloc(x->t->bytes + 1);
        assert_non_null(x->copy);
        memcpy(x->copy, x->t->block, x->t->bytes);
    }
}

static int64_t check_inputs(const call *c)
{
    int64_t wrong = 0;
    for (int n = 0; n < NUM_INPUTS; n++) {
        const input *x = &c->inputs[n];
        if (!x->copy || memcmp(x->copy, x->t->block, x->t->bytes) == 0)
            continue;
        print_error("%s was written\n", x->name);
        wrong++;
    }
    return wrong;
}

/* ---- running ---- */

/* The call with scratch memory of exactly the size that was asked for. */
static attn_status run_with_work(call *c, const attn_context *context)
{
    const drawn *d = &c->d;
    size_t bytes, alignment;
    attn_status s = attn_sdpa_backward_workspace(
        context, &d->params, &d->q.view, &d->k.view, &d->v.view, &c->out.view,
        &c->d_out.view, &c->g, &bytes, &alignment);
    if (s != ATTN_OK)
        return s;
    unsigned char *memory = malloc(bytes + alignment + 1);
    assert_non_null(memory);
    /* NaNs, so that scratch memory read before it is written shows. */
    memset(memory, 0xFF, bytes + alignment);
    unsigned char *aligned =
        memory + (alignment - (uintptr_t)memory % alignment) % alignment;
    s = attn_sdpa_backward_work(context, &d->params, &d->q.view, &d->k.view,
                                &d->v.view, &c->out.view, &c->d_out.view, &c->g,
                                aligned, bytes);
    free(memory);
    return s;
}

static attn_status run(call *c, int threads, int use_work)
{
    const drawn *d = &c->d;
    const attn_context *context = draw_context(threads);
    if (use_work)
        return run_with_work(c, context);
    return attn_sdpa_backward(context, &d->params, &d->q.view, &d->k.view,
                              &d->v.view, &c->out.view, &c->d_out.view, &c->g);
}

/* Elements that no sequence owns must be what they were before. */
static int64_t written_outside(const char *name, const gradient *g,
                               const ref_tensor *want)
{
    int64_t written = 0;
    const int64_t *n = want->shape;
    for (int64_t i = 0; n[0] > 0 && i < n[1] * n[2] * n[3]; i++) {
        const int64_t d = i % n[3], t = i / n[3] % n[2], h = i / n[3] / n[2];
        if (ref_at(want, 0, h, t, d)->error != REF_UNTOUCHED)
            continue;
        const long double x = ref_get(&g->t.view, 0, h, t, d);
        const long double y = ref_get(&g->before.view, 0, h, t, d);
        written += !(x == y || (isnan(x) && isnan(y)));
    }
    if (written)
        print_error("%s: %" PRId64 " elements of no sequence were written\n",
                    name, written);
    return written;
}

/* What the whole run has seen, for its report. */
static double worst[D_MASKS + 1];
static int64_t known[D_MASKS + 1], unknown[D_MASKS + 1];

static void count(int which, const ref_tensor *want)
{
    const int64_t *n = want->shape;
    for (int64_t i = 0; i < n[0] * n[1] * n[2] * n[3]; i++)
        *(want->num[i].error == REF_UNKNOWN ? &unknown[which]
                                            : &known[which]) += 1;
}

static int64_t check_gradient(const call *c, int n, const ref_tensor *want)
{
    const gradient *g = &c->gradients[n];
    const int which = n < D_MASKS ? n : D_MASKS;
    int64_t wrong = 0;
    if (!g->t.block)
        return 0;
    if (which == D_MASKS && !c->g.d_masks) { /* not wanted after all */
        if (compare_bits(name_of(n), c->context, &g->t.view, &g->before.view) &&
            tensor_surroundings_intact(&g->t))
            return 0;
        return 1;
    }
    wrong += compare_tensor(name_of(n), c->context, &g->t.view, want, 1.0);
    worst[which] = fmax(worst[which], compare_latest());
    count(which, want);
    if (!tensor_surroundings_intact(&g->t)) {
        print_error("memory around %s was written\n", name_of(n));
        wrong++;
    }
    return wrong + written_outside(name_of(n), g, want);
}

static int64_t check_gradients(const call *c, const ref_gradients *want)
{
    const ref_tensor *const all[] = {&want->d_q,        &want->d_k,
                                     &want->d_v,        &want->d_alibi,
                                     &want->d_sinks,    &want->d_scale,
                                     &want->d_masks[0], &want->d_masks[1],
                                     &want->d_masks[2], &want->d_masks[3]};
    int64_t wrong = 0;
    for (int n = 0; n < NUM_GRADIENTS; n++)
        wrong += check_gradient(c, n, all[n]);
    return wrong;
}

/* Another number of threads must give the same bits. */
static int64_t check_again(call *c)
{
    tensor first[NUM_GRADIENTS];
    int64_t wrong = 0;
    for (int n = 0; n < NUM_GRADIENTS; n++) {
        const gradient *g = &c->gradients[n];
        if (!g->t.block)
            continue;
        first[n] = tensor_copy(&g->t.view, g->t.view.dtype);
        tensor_assign(&g->t.view, &g->before.view);
    }
    const int threads = c->d.threads == DRAW_MAX_THREADS ? 1 : DRAW_MAX_THREADS;
    if (run(c, threads, !c->d.use_work) != ATTN_OK) {
        print_error("%s; %s\n", attn_last_error(), c->context);
        wrong++;
    }
    for (int n = 0; n < NUM_GRADIENTS; n++) {
        if (!c->gradients[n].t.block)
            continue;
        if (!compare_bits(name_of(n), c->context, &c->gradients[n].t.view,
                          &first[n].view)) {
            print_error("%d threads give other bits than %d\n", threads,
                        c->d.threads);
            wrong++;
        }
        tensor_free(&first[n]);
    }
    return wrong;
}

static int64_t check_call(call *c)
{
    const drawn *d = &c->d;
    ref_gradients want;
    int64_t wrong = 0;
    ref_sdpa_backward(&want, &d->params, &d->q.view, &d->k.view, &d->v.view,
                      &c->out.view, &c->d_out.view, &c->g);
    copy_inputs(c);
    const attn_status status = run(c, d->threads, d->use_work);
    if (status != ATTN_OK) {
        print_error("%s: %s; %s\n", attn_strerror(status), attn_last_error(),
                    c->context);
        wrong = 1;
    } else {
        wrong += check_gradients(c, &want);
        if (c->twice && !wrong)
            wrong += check_again(c);
    }
    wrong += check_inputs(c);
    ref_free_gradients(&want);
    return wrong;
}

static void free_call(call *c)
{
    tensor *const all[] = {&c->out, &c->lse, &c->d_out, &c->d_lse};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        tensor_free(all[n]);
    for (int n = 0; n < NUM_GRADIENTS; n++) {
        tensor_free(&c->gradients[n].t);
        tensor_free(&c->gradients[n].before);
    }
    for (int n = 0; n < NUM_INPUTS; n++)
        free(c->inputs[n].copy);
    draw_free(&c->d);
}

/* Draws call number index and runs it; the number of what is wrong, or -1 if
 * the problem is none of the gradients'. */
static int64_t try_call(uint64_t seed, uint64_t index)
{
    call c;
    memset(&c, 0, sizeof c);
    const int large = index % LARGE_EVERY == LARGE_EVERY - 1;
    if (large)
        draw_large_call(&c.d, seed, index);
    else
        draw_call(&c.d, seed, index);
    if (c.d.params.page_table || c.d.params.ring_starts) {
        draw_free(&c.d);
        return -1;
    }
    rng r = rng_make(~seed, index);
    drop_outputs(&c.d.params);
    int64_t wrong = run_forward(&r, &c);
    draw_gradients(&r, &c);
    draw_loss(&r, &c);
    c.twice = large || rng_one_in(&r, 6);
    describe(&c);
    if (!wrong)
        wrong = check_call(&c);
    if (wrong)
        print_error("in %s\n", c.context);
    free_call(&c);
    return wrong;
}

static void report(uint64_t calls)
{
    print_message("%" PRIu64 " calls, largest fraction of an error bound "
                  "%.3f\n",
                  calls, compare_worst());
    for (int n = 0; n <= D_MASKS; n++)
        print_message("  %-8s %.3f, of %" PRId64 " numbers %" PRId64
                      " were unknown\n",
                      name_of(n), worst[n], known[n] + unknown[n], unknown[n]);
}

static void test_sdpa_backward__random_calls_agree_with_oracle(void **state)
{
    (void)state;
    const uint64_t seed = draw_setting("ATTN_TEST_SEED", 1);
    const uint64_t first = draw_setting("ATTN_TEST_FIRST", 0);
    const uint64_t count = draw_setting("ATTN_TEST_COUNT", DEFAULT_COUNT);
    uint64_t failed = 0, calls = 0;
    for (uint64_t n = first; n < first + count && failed < 5; n++) {
        const int64_t wrong = try_call(seed, n);
        calls += wrong >= 0;
        failed += wrong > 0;
    }
    report(calls);
    if (failed)
        fail_msg("%" PRIu64 " calls failed (seed %" PRIu64 ")", failed, seed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sdpa_backward__random_calls_agree_with_oracle)};
    return cmocka_run_group_tests(tests, NULL, draw_drop_contexts);
}
