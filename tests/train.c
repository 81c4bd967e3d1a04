/* train.c - see train.h. */
#include "train.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "compare.h"

const char *const train_names[TRAIN_GRADIENTS] = {
    "d_q",     "d_k",        "d_v",        "d_alibi",    "d_sinks",
    "d_scale", "d_masks[0]", "d_masks[1]", "d_masks[2]", "d_masks[3]"};

const int32_t train_flags[TRAIN_GRADIENTS] = {
    ATTN_SDPA_ADD_D_Q,     ATTN_SDPA_ADD_D_K,     ATTN_SDPA_ADD_D_V,
    ATTN_SDPA_ADD_D_ALIBI, ATTN_SDPA_ADD_D_SINKS, ATTN_SDPA_ADD_D_SCALE,
    ATTN_SDPA_ADD_D_MASKS, ATTN_SDPA_ADD_D_MASKS, ATTN_SDPA_ADD_D_MASKS,
    ATTN_SDPA_ADD_D_MASKS};

void train_ask(training *t, int gradient, const attn_tensor *view)
{
    const attn_tensor **const fields[] = {&t->g.d_q,     &t->g.d_k,
                                          &t->g.d_v,     &t->g.d_alibi,
                                          &t->g.d_sinks, &t->g.d_scale};
    if (gradient < TRAIN_D_MASK)
        *fields[gradient] = view;
    else
        t->d_masks[gradient - TRAIN_D_MASK] = view;
}

/* A gradient with the sizes of this view. */
static void add_gradient(training *t, int gradient, const attn_tensor *of)
{
    const int64_t *s = of->shape;
    t->d[gradient] = tensor_make(t->q.view.dtype, s[0], s[1], s[2], s[3]);
    train_ask(t, gradient, &t->d[gradient].view);
}

static tensor make_normal(training *t, attn_dtype dtype, int64_t b, int64_t h,
                          int64_t i, int64_t j)
{
    const tensor made = tensor_make(dtype, b, h, i, j);
    tensor_normal(&made.view, &t->r, 1.0);
    return made;
}

void train_make(training *t, uint64_t seed, attn_dtype dtype,
                const train_sizes *s)
{
    static const attn_tensor one = {.shape = {1, 1, 1, 1}};
    memset(t, 0, sizeof *t);
    t->r = rng_make(seed, 0);
    attn_sdpa_params_init(&t->p);
    attn_sdpa_gradients_init(&t->g);
    t->q = make_normal(t, dtype, s->B, s->Hq, s->Tq, s->D);
    t->k = make_normal(t, dtype, s->B, s->Hkv, s->Tk, s->D);
    t->v = make_normal(t, dtype, s->B, s->Hkv, s->Tk, s->Dv);
    t->d_out = make_normal(t, dtype, s->B, s->Hq, s->Tq, s->Dv);
    t->out = tensor_make(dtype, s->B, s->Hq, s->Tq, s->Dv);
    t->lse = tensor_make(dtype, s->B, s->Hq, s->Tq, 1);
    t->p.lse = &t->lse.view;
    add_gradient(t, TRAIN_D_Q, &t->q.view);
    add_gradient(t, TRAIN_D_K, &t->k.view);
    add_gradient(t, TRAIN_D_V, &t->v.view);
    add_gradient(t, TRAIN_D_SCALE, &one);
}

void train_free(training *t)
{
    tensor *const all[] = {&t->q,     &t->k,     &t->v,     &t->out,  &t->lse,
                           &t->d_out, &t->d_lse, &t->alibi, &t->sinks};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        tensor_free(all[n]);
    for (int n = 0; n < ATTN_MAX_MASKS; n++)
        tensor_free(&t->mask_memory[n]);
    for (int n = 0; n < TRAIN_GRADIENTS; n++)
        tensor_free(&t->d[n]);
}

void train_use_lse(training *t)
{
    const int64_t *s = t->lse.view.shape;
    t->d_lse = make_normal(t, t->q.view.dtype, s[0], s[1], s[2], 1);
    t->g.d_lse = &t->d_lse.view;
}

/* Enters a mask whose numbers are there; returns which it is. */
static int enter_mask(training *t, int32_t kind, const tensor *memory)
{
    const int n = t->p.num_masks++;
    t->mask_memory[n] = *memory;
    t->masks[n].kind = kind;
    t->masks[n].view = memory->view;
    t->p.masks = t->masks;
    return n;
}

/* Hidden elements become `value`, on average one in `one_in`. */
static void hide(training *t, const attn_tensor *mask, int64_t one_in,
                 double value)
{
    const int64_t *s = mask->shape;
    for (int64_t b = 0; b < s[0]; b++)
        for (int64_t h = 0; h < s[1]; h++)
            for (int64_t i = 0; i < s[2]; i++)
                for (int64_t j = 0; j < s[3]; j++)
                    if (rng_one_in(&t->r, one_in))
                        tensor_set(mask, b, h, i, j, value);
}

void train_use_mask(training *t, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const tensor memory = make_normal(t, t->q.view.dtype, b, h, i, j);
    hide(t, &memory.view, 5, -(double)INFINITY);
    const int n = enter_mask(t, ATTN_MASK_ADD, &memory);
    add_gradient(t, TRAIN_D_MASK + n, &memory.view);
    t->g.d_masks = t->d_masks;
}

void train_use_keep(training *t, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const tensor memory = tensor_make(ATTN_U8, b, h, i, j);
    tensor_fill(&memory.view, 1.0);
    hide(t, &memory.view, 3, 0.0);
    enter_mask(t, ATTN_MASK_KEEP, &memory);
}

static tensor make_per_head(training *t, int64_t batch)
{
    const int64_t heads = t->q.view.shape[1];
    const attn_dtype dtype = t->q.view.dtype;
    return batch ? make_normal(t, dtype, batch, heads, 1, 1)
                 : make_normal(t, dtype, 1, 1, 1, heads);
}

void train_use_alibi(training *t, int64_t batch)
{
    t->alibi = make_per_head(t, batch);
    t->p.alibi = &t->alibi.view;
    add_gradient(t, TRAIN_D_ALIBI, &t->alibi.view);
}

void train_use_sinks(training *t, int64_t batch)
{
    t->sinks = make_per_head(t, batch);
    t->p.sinks = &t->sinks.view;
    add_gradient(t, TRAIN_D_SINKS, &t->sinks.view);
}

void train_reset(training *t)
{
    for (int n = 0; n < TRAIN_GRADIENTS; n++)
        if (t->d[n].block)
            memset(t->d[n].block, 0xFF, t->d[n].bytes);
}

void train_forward(training *t, const attn_context *context, const char *what)
{
    if (attn_sdpa(context, &t->p, &t->q.view, &t->k.view, &t->v.view,
                  &t->out.view) != ATTN_OK)
        fail_msg("%s: %s", what, attn_last_error());
}

void train_backward(training *t, const attn_context *context, const char *what)
{
    if (attn_sdpa_backward(context, &t->p, &t->q.view, &t->k.view, &t->v.view,
                           &t->out.view, &t->d_out.view, &t->g) != ATTN_OK)
        fail_msg("%s: %s", what, attn_last_error());
}

bool train_same(const training *a, const training *b, const char *what)
{
    bool same = true;
    for (int n = 0; n < TRAIN_GRADIENTS; n++)
        if (a->d[n].block && b->d[n].block)
            same = compare_bits(train_names[n], what, &a->d[n].view,
                                &b->d[n].view) &&
                   same;
    return same;
}
