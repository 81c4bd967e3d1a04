/*
 * test_backward.c - the gradients of attention: against finite differences of
 * attn_sdpa itself, against the oracle, and the rules of its comment one by
 * one.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "compare.h"
#include "ref.h"
#include "tensors.h"
#include "train.h"

#define COUNT(a) (sizeof(a) / sizeof(a)[0])

/* The loops below run over all elements of a view. */
#define EACH(s, b, h, i, j)                      \
    for (int64_t b = 0; b < (s)[0]; b++)         \
        for (int64_t h = 0; h < (s)[1]; h++)     \
            for (int64_t i = 0; i < (s)[2]; i++) \
                for (int64_t j = 0; j < (s)[3]; j++)

/* ---- against the oracle ---- */

static const attn_tensor *asked(const training *t, int gradient)
{
    const attn_tensor *fields[] = {t->g.d_q,     t->g.d_k,     t->g.d_v,
                                   t->g.d_alibi, t->g.d_sinks, t->g.d_scale};
    return gradient < TRAIN_D_MASK ? fields[gradient]
                                   : t->d_masks[gradient - TRAIN_D_MASK];
}

static const ref_tensor *exact_of(const ref_gradients *r, int gradient)
{
    const ref_tensor *exact[] = {&r->d_q,     &r->d_k,     &r->d_v,
                                 &r->d_alibi, &r->d_sinks, &r->d_scale};
    return gradient < TRAIN_D_MASK ? exact[gradient]
                                   : &r->d_masks[gradient - TRAIN_D_MASK];
}

static void oracle(ref_gradients *r, const training *t)
{
    ref_sdpa_backward(r, &t->p, &t->q.view, &t->k.view, &t->v.view,
                      &t->out.view, &t->d_out.view, &t->g);
}

/* One gradient, in `got`. */
static void check_gradient(const ref_gradients *r, int n,
                           const attn_tensor *got, const char *what)
{
    if (compare_tensor(train_names[n], what, got, exact_of(r, n), 1.0) != 0)
        fail_msg("%s: %s is wrong", what, train_names[n]);
}

static void check_all(const training *t, const ref_gradients *r,
                      const char *what)
{
    for (int n = 0; n < TRAIN_GRADIENTS; n++)
        if (asked(t, n))
            check_gradient(r, n, asked(t, n), what);
}

/* Everything that was set. */
static void check(const training *t, const char *what)
{
    ref_gradients r;
    oracle(&r, t);
    check_all(t, &r, what);
    ref_free_gradients(&r);
}

static void run_and_check(training *t, const char *what)
{
    train_forward(t, NULL, what);
    train_backward(t, NULL, what);
    check(t, what);
}

/* Whether a ragged row of d_q, d_k or d_v is in one of the sequences. */
static int is_inside(const training *t, int gradient, int64_t row)
{
    const attn_sdpa_params *p = &t->p;
    if (!p->cu_q || gradient > TRAIN_D_V)
        return 1;
    const int64_t *cu = gradient == TRAIN_D_Q ? p->cu_q : p->cu_k;
    return row >= cu[0] && row < cu[p->num_seqs];
}

static double unit_of(attn_dtype dtype)
{
    return dtype == ATTN_F32 ? 0x1p-24 : 0x1p-53;
}

static double scale_of(const training *t)
{
    const int64_t width = t->q.view.shape[3];
    if (t->p.flags & ATTN_SDPA_SCALE)
        return t->p.scale;
    return width > 0 ? 1.0 / sqrt((double)width) : 0.0;
}

/* ---- finite differences ---- */

/* The loss of the inputs as they are now. */
static long double loss_of(const training *t)
{
    const int64_t *s = t->out.view.shape, *l = t->lse.view.shape;
    const attn_dtype dtype = t->q.view.dtype;
    tensor out = tensor_make(dtype, s[0], s[1], s[2], s[3]);
    tensor lse = tensor_make(dtype, l[0], l[1], l[2], 1);
    attn_sdpa_params p = t->p;
    long double sum = 0.0L;
    /* Rows outside a ragged batch's sequences are not written. */
    tensor_fill(&out.view, 0.0);
    tensor_fill(&lse.view, 0.0);
    p.lse = &lse.view;
    assert_int_equal(
        attn_sdpa(NULL, &p, &t->q.view, &t->k.view, &t->v.view, &out.view),
        ATTN_OK);
    EACH(s, b, h, i, e)
    sum += ref_get(&out.view, b, h, i, e) * ref_get(&t->d_out.view, b, h, i, e);
    if (t->g.d_lse)
        EACH(l, b, h, i, e)
        {
            const long double x = ref_get(&lse.view, b, h, i, e);
            if (isfinite(x))
                sum += x * ref_get(t->g.d_lse, b, h, i, e);
        }
    tensor_free(&out);
    tensor_free(&lse);
    return sum;
}

/* The central difference of order 4, h = 2^-10, from the losses at x - 2h,
 * x - h, x + h, x + 2h. Its own error is below h^4/30 of the fifth derivative,
 * some 1e-12, and as much is lost to the rounding of the losses. */
static const double steps[4] = {-2.0, -1.0, 1.0, 2.0};

static double difference(const long double loss[4])
{
    return (double)((8.0L * (loss[2] - loss[1]) - (loss[3] - loss[0])) /
                    (12.0L * 0x1p-10L));
}

static void check_differences(training *t, int gradient, const attn_tensor *x,
                              const char *what)
{
    const int64_t *s = x->shape;
    EACH(s, b, h, i, j)
    {
        const double here = (double)ref_get(x, b, h, i, j);
        long double loss[4];
        if (isinf(here)) /* a mask's: nothing changes beside it */
            continue;
        for (int n = 0; n < 4; n++) {
            tensor_set(x, b, h, i, j, here + steps[n] * 0x1p-10);
            loss[n] = loss_of(t);
        }
        tensor_set(x, b, h, i, j, here);
        if (!is_inside(t, gradient, i)) {
            assert_true(loss[0] == loss[3]);
            continue;
        }
        const double want = difference(loss);
        const double met = (double)ref_get(asked(t, gradient), b, h, i, j);
        if (!(fabs(met - want) <= 1e-9 * (1.0 + fabs(want))))
            fail_msg("%s: %s(%d,%d,%d,%d) is %.12g, the difference %.12g", what,
                     train_names[gradient], (int)b, (int)h, (int)i, (int)j, met,
                     want);
    }
}

static void check_scale_difference(training *t, const char *what)
{
    const attn_sdpa_params kept = t->p;
    const double here = scale_of(t);
    long double loss[4];
    t->p.flags |= ATTN_SDPA_SCALE;
    for (int n = 0; n < 4; n++) {
        t->p.scale = here + steps[n] * 0x1p-10;
        loss[n] = loss_of(t);
    }
    t->p = kept;
    const double want = difference(loss);
    const double met = (double)ref_get(t->g.d_scale, 0, 0, 0, 0);
    if (!(fabs(met - want) <= 1e-8 * (1.0 + fabs(want))))
        fail_msg("%s: d_scale is %.12g, the difference %.12g", what, met, want);
}

static void check_all_differences(training *t, const char *what)
{
    check_differences(t, TRAIN_D_Q, &t->q.view, what);
    check_differences(t, TRAIN_D_K, &t->k.view, what);
    check_differences(t, TRAIN_D_V, &t->v.view, what);
    if (t->p.alibi)
        check_differences(t, TRAIN_D_ALIBI, &t->alibi.view, what);
    if (t->p.sinks)
        check_differences(t, TRAIN_D_SINKS, &t->sinks.view, what);
    for (int n = 0; n < t->p.num_masks; n++)
        if (t->d_masks[n])
            check_differences(t, TRAIN_D_MASK + n, &t->masks[n].view, what);
    check_scale_difference(t, what);
}

/* ---- everything that acts on the scores ---- */

static const int64_t q_lens[] = {4, 2}, kv_lens[] = {3, 6};
static const int64_t kv_starts[] = {1, 4}, prefix_lens[] = {2, 0};
static const int64_t q_offsets[] = {2, -1}, kv_offsets[] = {3, 1};
static const int64_t no_kv_lens[] = {0, 6};
static const int32_t q_segments[] = {0, 0, 1, 1, 5, 0, 0, 7};
static const int32_t kv_segments[] = {0, 0, 0, 1, 1, 2, 5, 5, 0, 0, 3, 3};

static void plain(training *t)
{
    (void)t;
}

static void blas_only(training *t)
{
    t->p.flags |= ATTN_SDPA_BLAS_ONLY;
}

static void causal_top_left(training *t)
{
    t->p.causal = 1;
    t->p.align = ATTN_ALIGN_TOP_LEFT;
}

static void causal_bottom_right(training *t)
{
    t->p.causal = 1;
    t->p.align = ATTN_ALIGN_BOTTOM_RIGHT;
}

static void window_both_sides(training *t)
{
    t->p.flags |= ATTN_SDPA_WINDOW;
    t->p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    t->p.window_left = 2;
    t->p.window_right = 1;
}

static void window_and_first_keys(training *t)
{
    causal_bottom_right(t);
    t->p.flags |= ATTN_SDPA_WINDOW;
    t->p.window_left = 1;
    t->p.window_right = -1;
    t->p.keep_first = 2;
}

static void chunks(training *t)
{
    t->p.chunk = 2;
    t->p.align = ATTN_ALIGN_BOTTOM_RIGHT;
}

static void prefix(training *t)
{
    causal_top_left(t);
    t->p.prefix_lens = prefix_lens;
}

static void offsets_of_queries(training *t)
{
    causal_top_left(t);
    t->p.align = ATTN_ALIGN_OFFSET;
    t->p.q_offsets = q_offsets;
}

static void positions_of_keys(training *t)
{
    offsets_of_queries(t);
    t->p.kv_offsets = kv_offsets;
    train_use_alibi(t, 0);
}

static void lengths(training *t)
{
    t->p.q_lens = q_lens;
    t->p.kv_lens = kv_lens;
}

static void lengths_causal(training *t)
{
    lengths(t);
    causal_bottom_right(t);
    train_use_alibi(t, 0);
}

static void no_keys_in_one(training *t)
{
    t->p.kv_lens = no_kv_lens;
    train_use_sinks(t, 0);
}

static void left_padding(training *t)
{
    t->p.kv_starts = kv_starts;
}

static void both_paddings(training *t)
{
    t->p.kv_starts = kv_starts;
    t->p.kv_lens = kv_lens; /* 1..2, and 4..5 */
}

static void segments(training *t)
{
    t->p.q_segments = q_segments;
    t->p.kv_segments = kv_segments;
}

static void blocks(training *t)
{
    static const unsigned char on[] = {1, 0, 0, 1, 1, 1};
    static attn_tensor view;
    attn_view_bhtd(&view, ATTN_U8, on, 1, 1, 2, 3);
    t->p.blocks = &view;
    t->p.block_q = t->p.block_k = 2;
}

static void keep_mask(training *t)
{
    train_use_keep(t, 2, 4, 4, 6);
}

static void keep_mask_of_keys(training *t)
{
    train_use_keep(t, 2, 1, 1, 6);
}

static void two_add_masks(training *t)
{
    train_use_mask(t, 2, 1, 4, 6);
    train_use_keep(t, 1, 1, 4, 6);
    train_use_mask(t, 1, 4, 1, 6);
}

static void softcap(training *t)
{
    t->p.softcap = 1.5;
}

static void alibi_vector(training *t)
{
    t->p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    train_use_alibi(t, 0);
}

static void alibi_of_each(training *t)
{
    causal_top_left(t);
    train_use_alibi(t, 2);
}

static void sinks_vector(training *t)
{
    train_use_sinks(t, 0);
}

static void sinks_of_each(training *t)
{
    train_use_sinks(t, 2);
    train_use_keep(t, 2, 4, 4, 6);
}

static void scale_negative(training *t)
{
    t->p.flags |= ATTN_SDPA_SCALE;
    t->p.scale = -0.8;
}

static void scale_zero(training *t)
{
    t->p.flags |= ATTN_SDPA_SCALE;
    t->p.scale = 0.0;
}

static void everything(training *t)
{
    both_paddings(t);
    t->p.q_lens = q_lens;
    causal_bottom_right(t);
    window_both_sides(t);
    segments(t);
    blocks(t);
    softcap(t);
    scale_negative(t);
    two_add_masks(t);
    train_use_alibi(t, 2);
    train_use_sinks(t, 0);
}

static const struct form {
    const char *name;
    void (*use)(training *);
} forms[] = {
#define FORM(name)  \
    {               \
#name, name \
    }
    FORM(plain),
    FORM(blas_only),
    FORM(causal_top_left),
    FORM(causal_bottom_right),
    FORM(window_both_sides),
    FORM(window_and_first_keys),
    FORM(chunks),
    FORM(prefix),
    FORM(offsets_of_queries),
    FORM(positions_of_keys),
    FORM(lengths),
    FORM(lengths_causal),
    FORM(no_keys_in_one),
    FORM(left_padding),
    FORM(both_paddings),
    FORM(segments),
    FORM(blocks),
    FORM(keep_mask),
    FORM(keep_mask_of_keys),
    FORM(two_add_masks),
    FORM(softcap),
    FORM(alibi_vector),
    FORM(alibi_of_each),
    FORM(sinks_vector),
    FORM(sinks_of_each),
    FORM(scale_negative),
    FORM(scale_zero),
    FORM(everything),
#undef FORM
};

/* The sizes that the arrays above are for. */
static const train_sizes small = {2, 4, 2, 4, 6, 3, 2};

static void make_form(training *t, uint64_t seed, attn_dtype dtype,
                      const struct form *f)
{
    train_make(t, seed, dtype, &small);
    f->use(t);
    if (seed % 2 == 1)
        train_use_lse(t);
}

static void test_gradients__are_finite_differences(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(forms); n++) {
        for (uint64_t seed = 0; seed < 2; seed++) {
            training t;
            make_form(&t, seed, ATTN_F64, &forms[n]);
            run_and_check(&t, forms[n].name);
            check_all_differences(&t, forms[n].name);
            train_free(&t);
        }
    }
}

static void test_gradients_f32__follow_the_formulas(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(forms); n++) {
        for (uint64_t seed = 0; seed < 4; seed++) {
            training t;
            make_form(&t, seed, ATTN_F32, &forms[n]);
            run_and_check(&t, forms[n].name);
            train_free(&t);
        }
    }
}

/* A mask's gradient is summed over every size that is 1. */
static void test_d_mask__every_broadcast_is_a_finite_difference(void **state)
{
    (void)state;
    for (int form = 0; form < 16; form++) {
        training t;
        char what[32];
        snprintf(what, sizeof what, "broadcast %d", form);
        train_make(&t, (uint64_t)form, ATTN_F64, &small);
        train_use_mask(&t, form & 1 ? 1 : 2, form & 2 ? 1 : 4, form & 4 ? 1 : 4,
                       form & 8 ? 1 : 6);
        if (form % 3 == 0)
            softcap(&t); /* not of the mask */
        train_use_lse(&t);
        run_and_check(&t, what);
        check_all_differences(&t, what);
        train_free(&t);
    }
}

/* Three sequences, one of them empty, in rows of which some are in none. */
static const int64_t cu_q[] = {1, 4, 4, 6}, cu_k[] = {2, 4, 6, 11};
static const train_sizes ragged_sizes = {1, 4, 2, 8, 12, 3, 2};

static void make_ragged(training *t, uint64_t seed, attn_dtype dtype)
{
    train_make(t, seed, dtype, &ragged_sizes);
    t->p.cu_q = cu_q;
    t->p.cu_k = cu_k;
    t->p.num_seqs = 3;
    t->p.align = ATTN_ALIGN_BOTTOM_RIGHT;
    t->p.causal = seed % 2 == 0;
    train_use_lse(t);
    train_use_mask(t, seed % 3 ? 3 : 1, seed % 5 ? 4 : 1, 3, 5);
    train_use_alibi(t, seed % 2 ? 3 : 0);
    train_use_sinks(t, seed % 2 ? 0 : 3);
}

static void test_ragged__gradients_are_finite_differences(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 6; seed++) {
        training t;
        make_ragged(&t, seed, ATTN_F64);
        run_and_check(&t, "ragged");
        for (int d = 0; d <= TRAIN_D_V; d++) {
            const int64_t *s = t.d[d].view.shape;
            EACH(s, b, h, i, j)
            if (!is_inside(&t, d, i))
                assert_true(tensor_is_pattern(&t.d[d].view, b, h, i, j));
        }
        check_all_differences(&t, "ragged");
        train_free(&t);
    }
}

/* ---- set, added to, or not wanted ---- */

/* The gradients of one form, its memory full of NaN before: they are set. Then
 * each is added to other numbers, the rest still being set. */
static void test_add__each_flag_is_for_its_gradient(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(forms); n++) {
        for (int bit = 0; bit < 7; bit++) {
            training t, set;
            ref_gradients r;
            const attn_dtype dtype = n % 2 ? ATTN_F32 : ATTN_F64;
            make_form(&t, 7, dtype, &forms[n]);
            make_form(&set, 7, dtype, &forms[n]);
            train_forward(&set, NULL, forms[n].name);
            train_backward(&set, NULL, forms[n].name);
            train_forward(&t, NULL, forms[n].name);
            t.g.flags = ATTN_SDPA_ADD_D_Q << bit;
            for (int d = 0; d < TRAIN_GRADIENTS; d++)
                if (t.d[d].block && train_flags[d] == t.g.flags)
                    tensor_normal(&t.d[d].view, &t.r, 1.0);
            oracle(&r, &t);
            train_backward(&t, NULL, forms[n].name);
            check_all(&t, &r, forms[n].name);
            for (int d = 0; d < TRAIN_GRADIENTS; d++)
                if (t.d[d].block && train_flags[d] != t.g.flags)
                    assert_true(compare_bits(train_names[d], forms[n].name,
                                             &t.d[d].view, &set.d[d].view));
            ref_free_gradients(&r);
            train_free(&t);
            train_free(&set);
        }
    }
}

/* All at once, twice: g + g. */
static void test_add__twice_is_the_double(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(forms); n++) {
        training t;
        ref_gradients r;
        make_form(&t, 9, ATTN_F64, &forms[n]);
        train_forward(&t, NULL, forms[n].name);
        train_backward(&t, NULL, forms[n].name);
        t.g.flags = 127 * ATTN_SDPA_ADD_D_Q;
        oracle(&r, &t);
        train_backward(&t, NULL, forms[n].name);
        check_all(&t, &r, forms[n].name);
        ref_free_gradients(&r);
        train_free(&t);
    }
}

/* Rows that belong to no query and no key: set to 0, or left alone by adding,
 * bit for bit. */
static void test_add__rows_beyond_the_lengths_stay(void **state)
{
    (void)state;
    for (int add = 0; add < 2; add++) {
        training t;
        tensor prior[3];
        train_make(&t, 3, ATTN_F32, &small);
        both_paddings(&t);
        t.p.q_lens = q_lens;
        for (int d = 0; d < 3; d++) {
            tensor_normal(&t.d[d].view, &t.r, 1.0);
            /* What is never read need not be a number. */
            tensor_set(&t.d[d].view, 1, 0, 0, 0, (double)NAN);
            tensor_set(&t.d[d].view, 1, 0, 3, 0, (double)NAN);
            prior[d] = tensor_copy(&t.d[d].view, ATTN_F32);
        }
        t.g.flags =
            add ? ATTN_SDPA_ADD_D_Q | ATTN_SDPA_ADD_D_K | ATTN_SDPA_ADD_D_V : 0;
        train_forward(&t, NULL, "lengths");
        train_backward(&t, NULL, "lengths");
        for (int d = 0; d < 3; d++) {
            const attn_tensor *got = &t.d[d].view;
            EACH(got->shape, b, h, i, j)
            {
                const int outside = d == TRAIN_D_Q
                                        ? i >= q_lens[b]
                                        : i < kv_starts[b] || i >= kv_lens[b];
                if (!outside)
                    continue;
                const double met = (double)ref_get(got, b, h, i, j);
                const double had = (double)ref_get(&prior[d].view, b, h, i, j);
                if (add)
                    assert_true(met == had || (isnan(met) && isnan(had)));
                else
                    assert_true(met == 0.0);
            }
            tensor_free(&prior[d]);
        }
        train_free(&t);
    }
}

static int is_unwritten(const tensor *t)
{
    const unsigned char *bytes = t->block;
    for (size_t n = 0; n < t->bytes; n++)
        if (bytes[n] != 0xFF)
            return 0;
    return 1;
}

/* Each gradient alone, and all but each: the bits are those of all. */
static void test_null__gradients_do_not_change_each_other(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(forms); n++) {
        const attn_dtype dtype = n % 2 ? ATTN_F32 : ATTN_F64;
        training all;
        make_form(&all, 11, dtype, &forms[n]);
        train_forward(&all, NULL, forms[n].name);
        train_backward(&all, NULL, forms[n].name);
        for (int d = 0; d < TRAIN_GRADIENTS; d++) {
            for (int alone = 0; alone < 2; alone++) {
                training t;
                if (!all.d[d].block)
                    continue;
                make_form(&t, 11, dtype, &forms[n]);
                for (int other = 0; other < TRAIN_GRADIENTS; other++)
                    if ((other == d) != alone)
                        train_ask(&t, other, NULL);
                if (alone && d < TRAIN_D_MASK)
                    t.g.d_masks = NULL;
                train_forward(&t, NULL, forms[n].name);
                train_backward(&t, NULL, forms[n].name);
                for (int other = 0; other < TRAIN_GRADIENTS; other++) {
                    if (!t.d[other].block)
                        continue;
                    if (asked(&t, other))
                        assert_true(
                            compare_bits(train_names[other], forms[n].name,
                                         &t.d[other].view, &all.d[other].view));
                    else if (!is_unwritten(&t.d[other]))
                        fail_msg("%s: %s was written", forms[n].name,
                                 train_names[other]);
                }
                train_free(&t);
            }
        }
        train_free(&all);
    }
}

/* ---- what is hidden has no influence ---- */

static const double guests[] = {(double)NAN, (double)INFINITY,
                                -(double)INFINITY};

static void spoil_row(const attn_tensor *t, int64_t b, int64_t h, int64_t row,
                      double guest)
{
    for (int64_t d = 0; d < t->shape[3]; d++)
        tensor_set(t, b, h, row, d, guest);
}

/* Rows of all kinds that no visible pair has, from the oracle's scores. */
static void spoil_hidden(training *t, double guest)
{
    ref_result r;
    const int64_t *q = t->q.view.shape, *k = t->k.view.shape;
    const int64_t group = q[1] / k[1];
    ref_sdpa(&r, &t->p, &t->q.view, &t->k.view, &t->v.view);
    for (int64_t b = 0; b < q[0]; b++) {
        for (int64_t h = 0; h < q[1]; h++)
            for (int64_t i = 0; i < q[2]; i++) {
                int seen = 0;
                for (int64_t j = 0; j < k[2]; j++)
                    seen |= !isinf(ref_at(&r.scores, b, h, i, j)->value);
                if (seen)
                    continue;
                spoil_row(&t->q.view, b, h, i, guest);
                /* A row without keys still gives to its sink, by the formula.
                 */
                if (t->p.sinks)
                    continue;
                spoil_row(&t->d_out.view, b, h, i, guest);
                if (t->g.d_lse)
                    spoil_row(&t->d_lse.view, b, h, i, guest);
            }
        for (int64_t g = 0; g < k[1]; g++)
            for (int64_t j = 0; j < k[2]; j++) {
                int seen = 0;
                for (int64_t h = g * group; h < (g + 1) * group; h++)
                    for (int64_t i = 0; i < q[2]; i++)
                        seen |= !isinf(ref_at(&r.scores, b, h, i, j)->value);
                if (seen)
                    continue;
                spoil_row(&t->k.view, b, g, j, guest);
                spoil_row(&t->v.view, b, g, j, guest);
            }
    }
    ref_free(&r);
}

static void test_hidden__nan_and_inf_have_no_influence(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(forms); n++) {
        for (size_t guest = 0; guest < COUNT(guests); guest++) {
            training clean, t;
            const attn_dtype dtype = n % 2 ? ATTN_F32 : ATTN_F64;
            make_form(&clean, 13, dtype, &forms[n]);
            make_form(&t, 13, dtype, &forms[n]);
            spoil_hidden(&t, guests[guest]);
            train_forward(&clean, NULL, forms[n].name);
            train_backward(&clean, NULL, forms[n].name);
            train_forward(&t, NULL, forms[n].name);
            train_backward(&t, NULL, forms[n].name);
            assert_true(train_same(&clean, &t, forms[n].name));
            check(&t, forms[n].name);
            train_free(&clean);
            train_free(&t);
        }
    }
}

/* Rows of a ragged batch that no sequence has, in everything that is read. */
static void test_hidden__rows_outside_ragged_sequences(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 4; seed++) {
        training clean, t;
        make_ragged(&clean, seed, ATTN_F32);
        make_ragged(&t, seed, ATTN_F32);
        const tensor *of_q[] = {&t.q, &t.out, &t.lse, &t.d_out, &t.d_lse};
        const tensor *of_k[] = {&t.k, &t.v};
        train_forward(&t, NULL, "ragged");
        for (int64_t i = 0; i < ragged_sizes.Tq; i++)
            for (size_t n = 0; n < COUNT(of_q); n++)
                if (!is_inside(&t, TRAIN_D_Q, i))
                    for (int64_t h = 0; h < ragged_sizes.Hq; h++)
                        spoil_row(&of_q[n]->view, 0, h, i, guests[seed % 3]);
        for (int64_t j = 0; j < ragged_sizes.Tk; j++)
            for (size_t n = 0; n < COUNT(of_k); n++)
                if (!is_inside(&t, TRAIN_D_K, j))
                    for (int64_t h = 0; h < ragged_sizes.Hkv; h++)
                        spoil_row(&of_k[n]->view, 0, h, j, guests[seed % 3]);
        train_forward(&clean, NULL, "ragged");
        train_backward(&clean, NULL, "ragged");
        train_backward(&t, NULL, "ragged");
        assert_true(train_same(&clean, &t, "ragged"));
        check(&t, "ragged");
        train_free(&clean);
        train_free(&t);
    }
}

/* One NaN or infinity in one element of each input of a causal problem, whose
 * pairs are partly hidden: it is in exactly those gradients that the formulas
 * have it in. In tiles and in groups of heads, so that sums of others run past
 * it; and capped, where the slope at a hidden pair is NaN. */
static void visit(const train_sizes *s, int input, int row, double guest,
                  double cap, const char *what)
{
    training t;
    train_make(&t, 5, row % 2 ? ATTN_F32 : ATTN_F64, s);
    t.p.causal = 1;
    t.p.align = s->Tk > 20 ? ATTN_ALIGN_BOTTOM_RIGHT : ATTN_ALIGN_TOP_LEFT;
    t.p.softcap = cap;
    train_use_lse(&t);
    train_use_mask(&t, 1, 1, s->Tq, s->Tk);
    const tensor *const inputs[] = {&t.q,     &t.k,     &t.v,
                                    &t.d_out, &t.d_lse, &t.mask_memory[0]};
    const int64_t *n = inputs[input]->view.shape;
    tensor_set(&inputs[input]->view, n[0] - 1, n[1] - 1,
               row == 0   ? 0
               : row == 1 ? n[2] / 2
                          : n[2] - 1,
               n[3] / 2, guest);
    run_and_check(&t, what);
    train_free(&t);
}

static void test_visible__nan_goes_where_the_formulas_send_it(void **state)
{
    (void)state;
    static const train_sizes sizes[] = {
        {1, 2, 1, 5, 5, 3, 2}, {2, 2, 2, 70, 90, 5, 4}, {1, 1, 1, 4, 9, 33, 8}};
    static const double caps[] = {0.0, 2.0};
    for (size_t n = 0; n < COUNT(sizes); n++)
        for (int input = 0; input < 6; input++)
            for (int row = 0; row < 3; row++)
                for (size_t guest = 0; guest < COUNT(guests); guest++)
                    for (size_t cap = 0; cap < COUNT(caps); cap++) {
                        char what[80];
                        snprintf(what, sizeof what,
                                 "sizes %zu, input %d, row %d, %g, cap %g", n,
                                 input, row, guests[guest], caps[cap]);
                        visit(&sizes[n], input, row, guests[guest], caps[cap],
                              what);
                    }
}

/* ---- rows that see nothing ---- */

/* PyTorch's lse of such a row may be 0 and its out anything: it has no key. */
static void test_empty_rows__any_lse_will_do(void **state)
{
    (void)state;
    static const double sums[] = {0.0, -(double)INFINITY, (double)INFINITY,
                                  (double)NAN, 7.0};
    training want;
    train_make(&want, 17, ATTN_F64, &small);
    window_both_sides(&want);
    train_use_lse(&want);
    want.p.flags |= ATTN_SDPA_WINDOW;
    want.p.q_lens = q_lens;
    train_use_keep(&want, 1, 1, 4, 6);
    for (int64_t j = 0; j < 6; j++) /* row 1 sees nothing at all */
        tensor_set(&want.masks[0].view, 0, 0, 1, j, 0.0);
    train_forward(&want, NULL, "empty rows");
    train_backward(&want, NULL, "empty rows");
    check(&want, "empty rows");
    for (int64_t h = 0; h < 4; h++)
        for (int64_t d = 0; d < 3; d++)
            assert_true(ref_get(&want.d[TRAIN_D_Q].view, 0, h, 1, d) == 0.0L);
    for (size_t n = 0; n < COUNT(sums); n++) {
        tensor met[TRAIN_GRADIENTS];
        for (int d = 0; d < TRAIN_GRADIENTS; d++)
            if (want.d[d].block)
                met[d] = tensor_copy(&want.d[d].view, ATTN_F64);
        for (int64_t h = 0; h < 4; h++) {
            tensor_set(&want.lse.view, 0, h, 1, 0, sums[n]);
            tensor_set(&want.lse.view, 1, h, 3, 0, sums[n]);
            spoil_row(&want.out.view, 0, h, 1, sums[n]);
            spoil_row(&want.d_out.view, 0, h, 1, guests[n % 3]);
        }
        train_reset(&want);
        train_backward(&want, NULL, "empty rows");
        for (int d = 0; d < TRAIN_GRADIENTS; d++)
            if (want.d[d].block) {
                assert_true(compare_bits(train_names[d], "empty rows",
                                         &want.d[d].view, &met[d].view));
                tensor_free(&met[d]);
            }
    }
    train_free(&want);
}

/* No row sees a key: zeros everywhere, in memory that held NaN. */
static void test_empty_rows__alone(void **state)
{
    (void)state;
    static const int64_t none[] = {0, 0};
    for (int form = 0; form < 3; form++) {
        training t;
        train_make(&t, 3, ATTN_F32, &small);
        train_use_mask(&t, 2, 1, 4, 6);
        alibi_vector(&t);
        if (form == 0)
            t.p.kv_lens = none;
        if (form == 1)
            t.p.q_lens = none;
        if (form == 2)
            tensor_fill(&t.masks[0].view, -(double)INFINITY);
        run_and_check(&t, "nothing visible");
        for (int d = 0; d < TRAIN_GRADIENTS; d++) {
            if (!t.d[d].block)
                continue;
            const int64_t *s = t.d[d].view.shape;
            EACH(s, b, h, i, j)
            assert_true(ref_get(&t.d[d].view, b, h, i, j) == 0.0L);
        }
        train_free(&t);
    }
}

/* A row without keys gives its sink what its lse, the sink, gets. */
static void test_empty_rows__sinks_get_the_gradient_of_their_lse(void **state)
{
    (void)state;
    training t;
    train_make(&t, 21, ATTN_F64, &small);
    t.p.kv_lens = no_kv_lens;
    train_use_sinks(&t, 2);
    train_use_lse(&t);
    run_and_check(&t, "sinks");
    for (int64_t h = 0; h < 4; h++) {
        double sum = 0.0;
        for (int64_t i = 0; i < 4; i++)
            sum += (double)ref_get(&t.d_lse.view, 0, h, i, 0);
        const double met =
            (double)ref_get(&t.d[TRAIN_D_SINKS].view, 0, h, 0, 0);
        assert_true(fabs(met - sum) <= 1e-14);
    }
    train_free(&t);
}

/* ---- memory of any form ---- */

/* Inputs and outputs scattered: strides that are negative, not 1, inputs' also
 * 0; nothing beside the elements is written. */
static void scatter(training *t, tensor *of, int use)
{
    const int64_t *s = of->view.shape;
    const tensor made =
        tensor_scattered(&t->r, use, of->view.dtype, s[0], s[1], s[2], s[3]);
    tensor_assign(&made.view, &of->view);
    tensor_free(of);
    *of = made;
}

static void test_strides__of_everything(void **state)
{
    (void)state;
    static const train_sizes sizes[] = {{2, 4, 2, 4, 6, 3, 2},
                                        {2, 4, 2, 17, 33, 8, 9},
                                        {1, 2, 2, 70, 40, 16, 16}};
    for (uint64_t seed = 0; seed < 60; seed++) {
        training t;
        const train_sizes *s = &sizes[seed % COUNT(sizes)];
        train_make(&t, seed, seed % 2 ? ATTN_F32 : ATTN_F64, s);
        causal_bottom_right(&t);
        train_use_lse(&t);
        train_use_mask(&t, s->B, 1, s->Tq, s->Tk);
        train_use_alibi(&t, 0);
        train_use_sinks(&t, s->B);
        tensor *const inputs[] = {&t.q, &t.k, &t.v, &t.d_out, &t.d_lse};
        for (size_t n = 0; n < COUNT(inputs); n++)
            scatter(&t, inputs[n], TENSOR_INPUT);
        scatter(&t, &t.out, TENSOR_OUTPUT);
        scatter(&t, &t.lse, TENSOR_OUTPUT);
        for (int d = 0; d < TRAIN_GRADIENTS; d++)
            if (t.d[d].block)
                scatter(&t, &t.d[d], TENSOR_OUTPUT);
        run_and_check(&t, "strides");
        for (int d = 0; d < TRAIN_GRADIENTS; d++)
            if (t.d[d].block)
                assert_true(tensor_surroundings_intact(&t.d[d]));
        train_free(&t);
    }
}

/* Packed (B,T,3,H,D) memory of q, k and v, and of their gradients; and heads
 * that lie inside of rows, as a layer has them. */
static void test_strides__of_packed_memory(void **state)
{
    (void)state;
    static const train_sizes s = {2, 3, 3, 19, 19, 8, 8};
    for (int packed = 0; packed < 2; packed++) {
        training t;
        attn_tensor qkv[3], d[3];
        tensor memory = tensor_make(ATTN_F32, 1, 1, 2 * 19, 3 * 3 * 8);
        tensor gradients = tensor_make(ATTN_F32, 1, 1, 2 * 19, 3 * 3 * 8);
        train_make(&t, 8, ATTN_F32, &s);
        const tensor *from[] = {&t.q, &t.k, &t.v};
        if (packed) {
            attn_view_bt3hd(&qkv[0], &qkv[1], &qkv[2], ATTN_F32,
                            memory.view.data, 2, 19, 3, 8);
            attn_view_bt3hd(&d[0], &d[1], &d[2], ATTN_F32, gradients.view.data,
                            2, 19, 3, 8);
        } else {
            for (int n = 0; n < 3; n++) {
                const int64_t first = n * 2 * 19 * 3 * 8;
                attn_view_bthd(&qkv[n], ATTN_F32,
                               (float *)memory.view.data + first, 2, 19, 3, 8);
                attn_view_bthd(&d[n], ATTN_F32,
                               (float *)gradients.view.data + first, 2, 19, 3,
                               8);
            }
        }
        for (int n = 0; n < 3; n++)
            tensor_assign(&qkv[n], &from[n]->view);
        t.q.view = qkv[0];
        t.k.view = qkv[1];
        t.v.view = qkv[2];
        for (int n = 0; n < 3; n++)
            train_ask(&t, n, &d[n]);
        run_and_check(&t, packed ? "packed" : "(B,T,H,D)");
        tensor_free(&memory);
        tensor_free(&gradients);
        train_free(&t);
    }
}

/* ---- sizes ---- */

static void test_sizes__of_0_and_1(void **state)
{
    (void)state;
    for (int n = 0; n < 128; n++) {
        char what[64];
        training t;
        const int64_t kv = n & 2 ? 1 : 0;
        const train_sizes s = {
            n & 1 ? 1 : 0, kv * (n & 64 ? 2 : 1), kv,
            n & 4 ? 1 : 0, n & 8 ? 1 : 0,         n & 16 ? 1 : 0,
            n & 32 ? 1 : 0};
        snprintf(what, sizeof what, "B %d, Hq %d, Tq %d, Tk %d, D %d, Dv %d",
                 (int)s.B, (int)s.Hq, (int)s.Tq, (int)s.Tk, (int)s.D,
                 (int)s.Dv);
        train_make(&t, 1, n % 2 ? ATTN_F32 : ATTN_F64, &s);
        t.p.align = ATTN_ALIGN_TOP_LEFT;
        train_use_lse(&t);
        train_use_mask(&t, s.B, s.Hq, s.Tq, s.Tk);
        train_use_alibi(&t, 0);
        train_use_sinks(&t, 0);
        run_and_check(&t, what);
        train_free(&t);
    }
}

/* D = 0: all scores are 0. Dv = 0: the loss is one of lse. */
static void test_sizes__widths_of_0(void **state)
{
    (void)state;
    static const train_sizes sizes[] = {
        {2, 4, 2, 5, 7, 0, 3}, {2, 4, 2, 5, 7, 3, 0}, {2, 4, 2, 5, 7, 0, 0}};
    for (size_t n = 0; n < COUNT(sizes); n++) {
        training t;
        train_make(&t, n, ATTN_F64, &sizes[n]);
        train_use_lse(&t);
        train_use_mask(&t, 1, 4, 5, 7);
        run_and_check(&t, "a width of 0");
        check_all_differences(&t, "a width of 0");
        train_free(&t);
    }
}

/* More than one tile each way, and widths on both sides of a vector. */
static void test_sizes__beyond_a_tile(void **state)
{
    (void)state;
    static const train_sizes sizes[] = {
        {1, 1, 1, 700, 700, 16, 16}, {1, 2, 1, 700, 130, 33, 7},
        {1, 2, 1, 131, 701, 8, 40},  {2, 4, 1, 1, 900, 64, 64},
        {1, 4, 2, 900, 1, 16, 16},   {1, 1, 1, 257, 259, 64, 64}};
    for (size_t n = 0; n < COUNT(sizes); n++) {
        for (int form = 0; form < 3; form++) {
            char what[32];
            training t;
            snprintf(what, sizeof what, "sizes %d, form %d", (int)n, form);
            train_make(&t, n, form == 1 ? ATTN_F64 : ATTN_F32, &sizes[n]);
            if (form > 0)
                causal_bottom_right(&t);
            if (form == 2) {
                train_use_lse(&t);
                train_use_alibi(&t, 0);
                train_use_sinks(&t, 0);
                train_use_mask(&t, 1, 1, 1, sizes[n].Tk);
                t.p.flags |= ATTN_SDPA_WINDOW;
                t.p.window_left = 99;
                t.p.window_right = -1;
            }
            run_and_check(&t, what);
            train_free(&t);
        }
    }
}

static void test_sizes__odd_widths(void **state)
{
    (void)state;
    for (int64_t n = 1; n <= 300; n += n < 40 ? 2 : 20) {
        const train_sizes s = {1, 2, 1, 9, 13, n, 301 - n};
        training t;
        char what[32];
        snprintf(what, sizeof what, "D %d", (int)n);
        train_make(&t, (uint64_t)n, n % 4 == 1 ? ATTN_F32 : ATTN_F64, &s);
        run_and_check(&t, what);
        train_free(&t);
    }
}

/* ---- one thing said in two ways ---- */

/* Largest difference of two gradients in units of the last place of the
 * largest number in them. */
static void check_near(const attn_tensor *met, const attn_tensor *want,
                       double factor, const char *what)
{
    const int64_t *s = want->shape;
    double largest = 0.0;
    EACH(s, b, h, i, j)
    {
        const double x = fabs((double)ref_get(want, b, h, i, j));
        largest = x > largest ? x : largest;
    }
    EACH(s, b, h, i, j)
    {
        const double x = (double)ref_get(met, b, h, i, j);
        const double y = (double)ref_get(want, b, h, i, j);
        if (!(fabs(x - y) <= factor * unit_of(want->dtype) * largest))
            fail_msg("%s: (%d,%d,%d,%d) is %.17g, not %.17g", what, (int)b,
                     (int)h, (int)i, (int)j, x, y);
    }
}

static void same_inputs(training *to, const training *from)
{
    tensor_assign(&to->q.view, &from->q.view);
    tensor_assign(&to->k.view, &from->k.view);
    tensor_assign(&to->v.view, &from->v.view);
    tensor_assign(&to->d_out.view, &from->d_out.view);
}

/* Heads that share keys are heads with a copy each, whose gradients add up. */
static void test_gqa__is_the_sum_over_repeated_heads(void **state)
{
    (void)state;
    static const train_sizes grouped = {2, 6, 2, 21, 30, 8, 5};
    static const train_sizes repeated = {2, 6, 6, 21, 30, 8, 5};
    training t, all;
    train_make(&t, 2, ATTN_F64, &grouped);
    train_make(&all, 2, ATTN_F64, &repeated);
    tensor_assign(&all.q.view, &t.q.view);
    tensor_assign(&all.d_out.view, &t.d_out.view);
    for (int64_t h = 0; h < 6; h++) {
        const attn_tensor k = tensor_slice(&t.k.view, 1, h / 3, 1);
        const attn_tensor v = tensor_slice(&t.v.view, 1, h / 3, 1);
        const attn_tensor to_k = tensor_slice(&all.k.view, 1, h, 1);
        const attn_tensor to_v = tensor_slice(&all.v.view, 1, h, 1);
        tensor_assign(&to_k, &k);
        tensor_assign(&to_v, &v);
    }
    run_and_check(&t, "grouped");
    run_and_check(&all, "repeated");
    for (int d = TRAIN_D_K; d <= TRAIN_D_V; d++) {
        const int64_t *s = t.d[d].view.shape;
        tensor sum = tensor_make(ATTN_F64, s[0], s[1], s[2], s[3]);
        tensor_fill(&sum.view, 0.0);
        for (int64_t h = 0; h < 6; h++) {
            const attn_tensor to = tensor_slice(&sum.view, 1, h / 3, 1);
            const attn_tensor from = tensor_slice(&all.d[d].view, 1, h, 1);
            tensor_scale_add(&to, 1.0, &from);
        }
        check_near(&t.d[d].view, &sum.view, 100.0, train_names[d]);
        tensor_free(&sum);
    }
    check_near(&t.d[TRAIN_D_Q].view, &all.d[TRAIN_D_Q].view, 100.0, "d_q");
    train_free(&t);
    train_free(&all);
}

/* Causal, as a rule and as a mask of 0 and -inf, whose gradient is 0 where it
 * hides. */
static void test_add_mask__of_a_causal_is_causal(void **state)
{
    (void)state;
    static const train_sizes s = {1, 2, 2, 40, 40, 8, 8};
    training rule, mask;
    train_make(&rule, 4, ATTN_F64, &s);
    train_make(&mask, 4, ATTN_F64, &s);
    same_inputs(&mask, &rule);
    causal_top_left(&rule);
    train_use_mask(&mask, 1, 1, 40, 40);
    for (int64_t i = 0; i < 40; i++)
        for (int64_t j = 0; j < 40; j++)
            tensor_set(&mask.masks[0].view, 0, 0, i, j,
                       j <= i ? 0.0 : -(double)INFINITY);
    run_and_check(&rule, "rule");
    run_and_check(&mask, "mask");
    for (int d = TRAIN_D_Q; d <= TRAIN_D_V; d++)
        check_near(&mask.d[d].view, &rule.d[d].view, 100.0, train_names[d]);
    for (int64_t i = 0; i < 40; i++)
        for (int64_t j = i + 1; j < 40; j++)
            assert_true(ref_get(&mask.d[TRAIN_D_MASK].view, 0, 0, i, j) ==
                        0.0L);
    train_free(&rule);
    train_free(&mask);
}

static void test_softcap__a_huge_one_is_none(void **state)
{
    (void)state;
    training none, huge;
    train_make(&none, 6, ATTN_F64, &small);
    train_make(&huge, 6, ATTN_F64, &small);
    same_inputs(&huge, &none);
    huge.p.softcap = 1e30;
    run_and_check(&none, "none");
    run_and_check(&huge, "huge");
    for (int d = 0; d < TRAIN_GRADIENTS; d++)
        if (none.d[d].block)
            check_near(&huge.d[d].view, &none.d[d].view, 100.0, train_names[d]);
    train_free(&none);
    train_free(&huge);
}

/* Scores deep in the flat of the cap: du is 0 or next to it, never NaN. */
static void test_softcap__of_scores_far_beyond_it(void **state)
{
    (void)state;
    for (int n = 0; n < 2; n++) {
        training t;
        train_make(&t, 6, n ? ATTN_F64 : ATTN_F32, &small);
        t.p.softcap = 1e-3;
        run_and_check(&t, "beyond the cap");
        /* The last two have no reciprocal, of float and of double. */
        static const double caps[] = {1e-30, 1e-40, 1e-310};
        for (size_t c = 0; c < COUNT(caps); c++) {
            t.p.softcap = caps[c];
            train_forward(&t, NULL, "far beyond the cap");
            train_backward(&t, NULL, "far beyond the cap");
            check(&t, "far beyond the cap");
        }
        train_free(&t);
    }
}

/* k and v of 16 bits are exactly those floats, and so are the gradients. */
static void test_16_bits__are_their_floats(void **state)
{
    (void)state;
    static const train_sizes s = {2, 4, 2, 33, 41, 24, 17};
    for (attn_dtype dtype = ATTN_F16; dtype <= ATTN_BF16; dtype++) {
        for (int form = 0; form < 2; form++) {
            training t, floats;
            train_make(&t, 12, ATTN_F32, &s);
            train_make(&floats, 12, ATTN_F32, &s);
            same_inputs(&floats, &t);
            tensor k = tensor_copy(&t.k.view, dtype);
            tensor v = tensor_copy(&t.v.view, dtype);
            tensor_assign(&floats.k.view, &k.view);
            tensor_assign(&floats.v.view, &v.view);
            tensor_free(&t.k);
            tensor_free(&t.v);
            t.k = k;
            t.v = v;
            if (form) {
                causal_bottom_right(&t);
                causal_bottom_right(&floats);
            }
            run_and_check(&t, "16 bits");
            run_and_check(&floats, "their floats");
            for (int d = 0; d < TRAIN_D_MASK; d++)
                if (t.d[d].block)
                    check_near(&t.d[d].view, &floats.d[d].view, 200.0,
                               train_names[d]);
            train_free(&t);
            train_free(&floats);
        }
    }
}

/* ---- scales ---- */

/* With a scale of 0 neither q nor k moves the loss, but the scale does. */
static void test_scale__of_0(void **state)
{
    (void)state;
    training t;
    train_make(&t, 14, ATTN_F64, &small);
    scale_zero(&t);
    run_and_check(&t, "scale 0");
    for (int d = TRAIN_D_Q; d <= TRAIN_D_K; d++) {
        const int64_t *s = t.d[d].view.shape;
        EACH(s, b, h, i, j)
        assert_true(ref_get(&t.d[d].view, b, h, i, j) == 0.0L);
    }
    check_scale_difference(&t, "scale 0");
    assert_true(fabsl(ref_get(&t.d[TRAIN_D_SCALE].view, 0, 0, 0, 0)) > 1e-3L);
    train_free(&t);
}

/* Powers of two moved from q and k into the scale: the gradients move by them
 * the other way, to the rounding. */
static void test_scale__huge_and_tiny(void **state)
{
    (void)state;
    static const int powers[] = {-50, -20, 20, 50};
    for (size_t n = 0; n < 2 * COUNT(powers); n++) {
        const int power = powers[n / 2];
        const double factor = ldexp(1.0, power);
        training t, far;
        train_make(&t, 15, n % 2 ? ATTN_F32 : ATTN_F64, &small);
        train_make(&far, 15, n % 2 ? ATTN_F32 : ATTN_F64, &small);
        same_inputs(&far, &t);
        tensor_fill(&far.q.view, 0.0);
        tensor_fill(&far.k.view, 0.0);
        const int64_t *s = t.q.view.shape, *k = t.k.view.shape;
        EACH(s, b, h, i, j)
        tensor_set(&far.q.view, b, h, i, j,
                   factor * (double)ref_get(&t.q.view, b, h, i, j));
        EACH(k, b, h, i, j)
        tensor_set(&far.k.view, b, h, i, j,
                   factor * (double)ref_get(&t.k.view, b, h, i, j));
        t.p.flags |= ATTN_SDPA_SCALE;
        far.p.flags |= ATTN_SDPA_SCALE;
        t.p.scale = 0.5;
        far.p.scale = 0.5 / factor / factor; /* up to 2^99 = 6e29, and back */
        run_and_check(&t, "scale 0.5");
        run_and_check(&far, "far scale");
        static const int exponents[] = {-1, -1, 0, 0, 0, 2};
        for (int d = 0; d < TRAIN_D_MASK; d++) {
            if (!t.d[d].block)
                continue;
            const int64_t *g = t.d[d].view.shape;
            EACH(g, b, h, i, j)
            tensor_set(&far.d[d].view, b, h, i, j,
                       ldexp((double)ref_get(&far.d[d].view, b, h, i, j),
                             -power * exponents[d]));
            check_near(&far.d[d].view, &t.d[d].view, 200.0, train_names[d]);
        }
        train_free(&t);
        train_free(&far);
    }
}

/* A scale that makes q vanish in its type is no scale of 0 to d_scale: q.k is
 * not made from what is left of it. */
static void test_scale__too_small_for_the_type(void **state)
{
    (void)state;
    for (int n = 0; n < 2; n++) {
        training zero, tiny;
        train_make(&zero, 14, n ? ATTN_F64 : ATTN_F32, &small);
        train_make(&tiny, 14, n ? ATTN_F64 : ATTN_F32, &small);
        same_inputs(&tiny, &zero);
        scale_zero(&zero);
        scale_zero(&tiny);
        tiny.p.scale = n ? 5e-310 : 1e-42;
        run_and_check(&zero, "scale 0");
        train_forward(&tiny, NULL, "tiny scale");
        train_backward(&tiny, NULL, "tiny scale");
        check_near(&tiny.d[TRAIN_D_SCALE].view, &zero.d[TRAIN_D_SCALE].view,
                   100.0, "d_scale");
        train_free(&zero);
        train_free(&tiny);
    }
}

/* No queries, and heads that only their number is there of: the sums are of
 * nothing, at once. */
static void test_sizes__no_queries_and_many_heads(void **state)
{
    (void)state;
    const int64_t heads = (int64_t)1 << 40;
    float number = 7, sum = 8;
    attn_tensor none, lse, one;
    attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
    attn_sdpa_gradients g = ATTN_SDPA_GRADIENTS_INIT;
    assert_int_equal(attn_view_bhtd(&none, ATTN_F32, &number, 1, heads, 0, 4),
                     ATTN_OK);
    assert_int_equal(attn_view_bhtd(&lse, ATTN_F32, &number, 1, heads, 0, 1),
                     ATTN_OK);
    assert_int_equal(attn_view_bhtd(&one, ATTN_F32, &sum, 1, 1, 1, 1), ATTN_OK);
    p.lse = &lse;
    g.d_q = &none;
    g.d_scale = &one;
    assert_int_equal(
        attn_sdpa_backward(NULL, &p, &none, &none, &none, &none, &none, &g),
        ATTN_OK);
    assert_true(sum == 0 && number == 7);
}

/* Weights of one key only: gradients of the scores are 0 to the rounding. */
static void test_scale__that_leaves_one_key(void **state)
{
    (void)state;
    for (int n = 0; n < 2; n++) {
        training t;
        train_make(&t, 16, n ? ATTN_F64 : ATTN_F32, &small);
        t.p.flags |= ATTN_SDPA_SCALE;
        t.p.scale = n ? 1e5 : 1e3;
        run_and_check(&t, "one key");
        train_free(&t);
    }
}

/* ---- out and lse of other code ---- */

/* Any out and lse of the same formula: here of loops in double, rounded. */
static void test_foreign__out_and_lse_of_another_library(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(forms); n++) {
        for (int single = 0; single < 2; single++) {
            training t;
            ref_result r;
            make_form(&t, 19, single ? ATTN_F32 : ATTN_F64, &forms[n]);
            ref_sdpa(&r, &t.p, &t.q.view, &t.k.view, &t.v.view);
            const int64_t *s = t.out.view.shape, *l = t.lse.view.shape;
            EACH(s, b, h, i, e)
            tensor_set(&t.out.view, b, h, i, e,
                       (double)ref_at(&r.out, b, h, i, e)->value);
            EACH(l, b, h, i, e)
            tensor_set(&t.lse.view, b, h, i, e,
                       (double)ref_at(&r.lse, b, h, i, e)->value);
            train_backward(&t, NULL, forms[n].name);
            check(&t, forms[n].name);
            ref_free(&r);
            train_free(&t);
        }
    }
}

/* out and lse merged from two parts of the keys are those of all keys, so that
 * the gradients of a part are those of its keys in the whole. */
static void test_foreign__parts_of_the_keys(void **state)
{
    (void)state;
    static const train_sizes s = {1, 2, 1, 20, 50, 8, 6};
    training t;
    ref_gradients r;
    train_make(&t, 23, ATTN_F64, &s);
    train_use_lse(&t);
    train_forward(&t, NULL, "whole");
    train_backward(&t, NULL, "whole");
    check(&t, "whole");
    oracle(&r, &t);
    tensor d_q = tensor_make(ATTN_F64, 1, 2, 20, 8);
    tensor_fill(&d_q.view, 0.0);
    train_reset(&t);
    for (int part = 0; part < 2; part++) {
        const int64_t first = part ? 17 : 0, n = part ? 33 : 17;
        const attn_tensor k = tensor_slice(&t.k.view, 2, first, n);
        const attn_tensor v = tensor_slice(&t.v.view, 2, first, n);
        const attn_tensor d_k = tensor_slice(&t.d[TRAIN_D_K].view, 2, first, n);
        const attn_tensor d_v = tensor_slice(&t.d[TRAIN_D_V].view, 2, first, n);
        attn_sdpa_gradients g = t.g;
        g.d_q = &d_q.view;
        g.d_k = &d_k;
        g.d_v = &d_v;
        g.d_scale = NULL;
        g.flags = ATTN_SDPA_ADD_D_Q;
        assert_int_equal(attn_sdpa_backward(NULL, &t.p, &t.q.view, &k, &v,
                                            &t.out.view, &t.d_out.view, &g),
                         ATTN_OK);
    }
    check_gradient(&r, TRAIN_D_Q, &d_q.view, "parts");
    check_gradient(&r, TRAIN_D_K, &t.d[TRAIN_D_K].view, "parts");
    check_gradient(&r, TRAIN_D_V, &t.d[TRAIN_D_V].view, "parts");
    tensor_free(&d_q);
    ref_free_gradients(&r);
    train_free(&t);
}

/* k and v may be one memory, of which both gradients are wanted. */
static void test_inputs__k_and_v_in_one_memory(void **state)
{
    (void)state;
    static const train_sizes s = {2, 2, 2, 9, 11, 6, 6};
    training t;
    train_make(&t, 25, ATTN_F64, &s);
    tensor_assign(&t.v.view, &t.k.view);
    const attn_tensor v = t.v.view;
    t.v.view = t.k.view;
    run_and_check(&t, "k is v");
    t.v.view = v;
    train_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients__are_finite_differences),
        cmocka_unit_test(test_gradients_f32__follow_the_formulas),
        cmocka_unit_test(test_d_mask__every_broadcast_is_a_finite_difference),
        cmocka_unit_test(test_ragged__gradients_are_finite_differences),
        cmocka_unit_test(test_add__each_flag_is_for_its_gradient),
        cmocka_unit_test(test_add__twice_is_the_double),
        cmocka_unit_test(test_add__rows_beyond_the_lengths_stay),
        cmocka_unit_test(test_null__gradients_do_not_change_each_other),
        cmocka_unit_test(test_hidden__nan_and_inf_have_no_influence),
        cmocka_unit_test(test_hidden__rows_outside_ragged_sequences),
        cmocka_unit_test(test_visible__nan_goes_where_the_formulas_send_it),
        cmocka_unit_test(test_empty_rows__any_lse_will_do),
        cmocka_unit_test(test_empty_rows__alone),
        cmocka_unit_test(test_empty_rows__sinks_get_the_gradient_of_their_lse),
        cmocka_unit_test(test_strides__of_everything),
        cmocka_unit_test(test_strides__of_packed_memory),
        cmocka_unit_test(test_sizes__of_0_and_1),
        cmocka_unit_test(test_sizes__widths_of_0),
        cmocka_unit_test(test_sizes__beyond_a_tile),
        cmocka_unit_test(test_sizes__odd_widths),
        cmocka_unit_test(test_gqa__is_the_sum_over_repeated_heads),
        cmocka_unit_test(test_add_mask__of_a_causal_is_causal),
        cmocka_unit_test(test_softcap__a_huge_one_is_none),
        cmocka_unit_test(test_softcap__of_scores_far_beyond_it),
        cmocka_unit_test(test_16_bits__are_their_floats),
        cmocka_unit_test(test_scale__of_0),
        cmocka_unit_test(test_scale__huge_and_tiny),
        cmocka_unit_test(test_scale__too_small_for_the_type),
        cmocka_unit_test(test_sizes__no_queries_and_many_heads),
        cmocka_unit_test(test_scale__that_leaves_one_key),
        cmocka_unit_test(test_foreign__out_and_lse_of_another_library),
        cmocka_unit_test(test_foreign__parts_of_the_keys),
        cmocka_unit_test(test_inputs__k_and_v_in_one_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
