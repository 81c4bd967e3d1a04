/*
 * Random calls of attn_sdpa over the whole option space against the oracle.
 *
 *   ATTN_TEST_SEED   which stream of calls (default 1)
 *   ATTN_TEST_COUNT  how many (default: some ten seconds' worth)
 *   ATTN_TEST_FIRST  index of the first; a failure prints all three, and with
 *                    them exactly the failing call is run again
 */
#include <float.h>
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

enum { DEFAULT_COUNT = 8000 };

/* The call with scratch memory of exactly the size that was asked for. */
static attn_status run_with_work(drawn *d, const attn_context *context)
{
    size_t bytes, alignment;
    attn_status s =
        attn_sdpa_workspace(context, &d->params, &d->q.view, &d->k.view,
                            &d->v.view, &d->out.view, &bytes, &alignment);
    if (s != ATTN_OK)
        return s;
    unsigned char *memory = malloc(bytes + alignment);
    assert_non_null(memory);
    /* NaNs, so that scratch memory read before it is written shows. */
    memset(memory, 0xFF, bytes + alignment);
    unsigned char *aligned =
        memory + (alignment - (uintptr_t)memory % alignment) % alignment;
    s = attn_sdpa_work(context, &d->params, &d->q.view, &d->k.view, &d->v.view,
                       &d->out.view, aligned, bytes);
    free(memory);
    return s;
}

static attn_status run(drawn *d)
{
    const attn_context *context = draw_context(d->threads);
    if (d->use_work)
        return run_with_work(d, context);
    return attn_sdpa(context, &d->params, &d->q.view, &d->k.view, &d->v.view,
                     &d->out.view);
}

static int64_t check_surroundings(const char *name, const tensor *t)
{
    if (!t->block || tensor_surroundings_intact(t))
        return 0;
    print_error("memory around %s was written\n", name);
    return 1;
}

/* Elements that no sequence owns must be what they were before. */
static int64_t written_outside(const char *name, const attn_tensor *now,
                               const attn_tensor *before,
                               const ref_tensor *want)
{
    int64_t written = 0;
    const int64_t *n = want->shape;
    for (int64_t i = 0; i < n[1] * n[2] * n[3]; i++) {
        const int64_t d = i % n[3], t = i / n[3] % n[2], h = i / n[3] / n[2];
        if (n[0] == 0 || ref_at(want, 0, h, t, d)->error != REF_UNTOUCHED)
            continue;
        const long double x = ref_get(now, 0, h, t, d);
        const long double y = ref_get(before, 0, h, t, d);
        written += !(x == y || (isnan(x) && isnan(y)));
    }
    if (written)
        print_error("%s: %" PRId64 " elements of no sequence were written\n",
                    name, written);
    return written;
}

/* One output of a call, with the oracle's. */
typedef struct output {
    const char *name;
    const tensor *t;
    const ref_tensor *want;
    tensor before;
} output;

enum { NUM_OUTPUTS = 11 };

static void list_outputs(const drawn *d, const ref_result *want,
                         output all[NUM_OUTPUTS])
{
    const output list[NUM_OUTPUTS] = {
        {.name = "out", .t = d->in_place ? &d->q : &d->out, .want = &want->out},
        {.name = "lse", .t = &d->lse, .want = &want->lse},
        {.name = "weights", .t = &d->weights, .want = &want->weights},
        {.name = "weights_mean",
         .t = &d->weights_mean,
         .want = &want->weights_mean},
        {.name = "scores_raw", .t = &d->scores_raw, .want = &want->scores_raw},
        {.name = "scores_capped",
         .t = &d->scores_capped,
         .want = &want->scores_capped},
        {.name = "scores", .t = &d->scores, .want = &want->scores},
        {.name = "key_sums", .t = &d->key_sums, .want = &want->key_sums},
        {.name = "max_weight", .t = &d->max_weight, .want = &want->max_weight},
        {.name = "effective_keys",
         .t = &d->effective_keys,
         .want = &want->effective_keys},
        {.name = "entropy", .t = &d->entropy, .want = &want->entropy}};
    memcpy(all, list, sizeof list);
    for (int n = 0; n < NUM_OUTPUTS; n++)
        if (all[n].t->block)
            all[n].before = tensor_copy(&all[n].t->view, all[n].t->view.dtype);
}

static int64_t check_output(const output *o, const char *context)
{
    if (!o->t->block)
        return 0;
    return compare_tensor(o->name, context, &o->t->view, o->want, 1.0) +
           check_surroundings(o->name, o->t) +
           written_outside(o->name, &o->t->view, &o->before.view, o->want);
}

static int64_t check_inputs(const drawn *d)
{
    return check_surroundings("q", &d->q) + check_surroundings("k", &d->k) +
           check_surroundings("v", &d->v) +
           check_surroundings("alibi", &d->alibi) +
           check_surroundings("sinks", &d->sinks) +
           check_surroundings("blocks", &d->blocks);
}

static int64_t check_call(drawn *d, const char *context)
{
    ref_result want;
    output all[NUM_OUTPUTS];
    ref_sdpa(&want, &d->params, &d->q.view, &d->k.view, &d->v.view);
    list_outputs(d, &want, all);
    int64_t wrong = 0;
    const attn_status status = run(d);
    if (status != ATTN_OK) {
        print_error("%s: %s; %s\n", attn_strerror(status), attn_last_error(),
                    context);
        wrong = 1;
    }
    for (int n = 0; n < NUM_OUTPUTS; n++) {
        if (status == ATTN_OK)
            wrong += check_output(&all[n], context);
        tensor_free(&all[n].before);
    }
    wrong += check_inputs(d);
    ref_free(&want);
    return wrong;
}

static void test_sdpa__random_calls_agree_with_oracle(void **state)
{
    (void)state;
    const uint64_t seed = draw_setting("ATTN_TEST_SEED", 1);
    const uint64_t first = draw_setting("ATTN_TEST_FIRST", 0);
    const uint64_t count = draw_setting("ATTN_TEST_COUNT", DEFAULT_COUNT);
    uint64_t failed = 0;
    for (uint64_t n = first; n < first + count && failed < 5; n++) {
        char context[4096];
        drawn d;
        draw_call(&d, seed, n);
        draw_describe(&d, context, sizeof context);
        const int64_t wrong = check_call(&d, context);
        draw_free(&d);
        if (wrong)
            print_error("in %s\n", context);
        failed += wrong != 0;
    }
    print_message("%" PRIu64 " calls, largest fraction of an error bound "
                  "%.3f\n",
                  count, compare_worst());
    if (failed)
        fail_msg("%" PRIu64 " calls failed (seed %" PRIu64 ")", failed, seed);
}

/* A tile of keys that all carry the lowest finite bias, then one without: the
 * maximum moves by more than a sum of such differences can hold, and what the
 * first tile gave to the entropy was multiplied by 0 after it had become
 * infinite. */
static void lowest_bias_then_none(attn_dtype dtype)
{
    enum { QUERIES = 20, KEYS = 700, LOW = 600, WIDTH = 8 };
    rng r = rng_make(1, 0);
    drawn d;
    memset(&d, 0, sizeof d);
    attn_sdpa_params_init(&d.params);
    d.q = tensor_make(dtype, 1, 1, QUERIES, WIDTH);
    d.k = tensor_make(dtype, 1, 1, KEYS, WIDTH);
    d.v = tensor_make(dtype, 1, 1, KEYS, WIDTH);
    d.out = tensor_make(dtype, 1, 1, QUERIES, WIDTH);
    d.entropy = tensor_make(dtype, 1, 1, QUERIES, 1);
    d.effective_keys = tensor_make(dtype, 1, 1, QUERIES, 1);
    d.mask_memory[0] = tensor_make(dtype, 1, 1, 1, KEYS);
    tensor_normal(&d.q.view, &r, 1.0);
    tensor_normal(&d.k.view, &r, 1.0);
    tensor_normal(&d.v.view, &r, 1.0);
    for (int64_t j = 0; j < KEYS; j++)
        tensor_set(&d.mask_memory[0].view, 0, 0, 0, j,
                   j >= LOW            ? 0.0
                   : dtype == ATTN_F32 ? -(double)FLT_MAX
                                       : -DBL_MAX);
    d.masks[0].kind = ATTN_MASK_ADD;
    d.masks[0].view = d.mask_memory[0].view;
    d.params.masks = d.masks;
    d.params.num_masks = 1;
    d.params.entropy = &d.entropy.view;
    d.params.effective_keys = &d.effective_keys.view;
    const int64_t wrong = check_call(&d, "the lowest bias, then none");
    draw_free(&d);
    assert_int_equal(wrong, 0);
}

static void test_entropy__after_a_tile_of_the_lowest_bias(void **state)
{
    (void)state;
    lowest_bias_then_none(ATTN_F32);
    lowest_bias_then_none(ATTN_F64);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_entropy__after_a_tile_of_the_lowest_bias),
        cmocka_unit_test(test_sdpa__random_calls_agree_with_oracle)};
    return cmocka_run_group_tests(tests, NULL, draw_drop_contexts);
}
