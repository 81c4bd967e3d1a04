/*
 * test_mask.c - attn_mask_init, the three builders and attn_mask_apply against
 * the rules written out element by element.
 */
#include "kit.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define INF ((double)INFINITY)

static const struct {
    int32_t kind;
    attn_dtype dtype;
} forms[] = {{ATTN_MASK_KEEP, ATTN_U8},
             {ATTN_MASK_DROP, ATTN_U8},
             {ATTN_MASK_ADD, ATTN_F32},
             {ATTN_MASK_ADD, ATTN_F64}};

static double memory[4096];

/* Whether an element of a mask that a builder wrote lets the key through; any
 * value but the two that a form has is an error. */
static bool lets_through(const attn_mask *m, int64_t b, int64_t h, int64_t i,
                         int64_t j)
{
    const double value = kit_get(&m->view, b, h, i, j);
    if (m->kind == ATTN_MASK_ADD) {
        if (!(value >= 0.0) && !(isinf(value) && value < 0.0))
            fail_msg("an ADD mask was given %g", value);
        if (value > 0.0)
            fail_msg("an ADD mask was given %g", value);
        return !isinf(value);
    }
    if ((int)value != 0 && (int)value != 1)
        fail_msg("a U8 mask was given %g", value);
    return (m->kind == ATTN_MASK_KEEP) == ((int)value == 1);
}

#define EACH_ELEMENT(t)                                 \
    for (int64_t b = 0; b < (t)->shape[0]; b++)         \
        for (int64_t h = 0; h < (t)->shape[1]; h++)     \
            for (int64_t i = 0; i < (t)->shape[2]; i++) \
                for (int64_t j = 0; j < (t)->shape[3]; j++)

static void test_mask_init__is_contiguous(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(forms); n++) {
        attn_mask m;
        memset(&m, 0x5A, sizeof m);
        assert_int_equal(attn_mask_init(&m, forms[n].kind, forms[n].dtype,
                                        memory, 2, 3, 4, 5),
                         ATTN_OK);
        assert_int_equal(m.kind, forms[n].kind);
        assert_int_equal(m.reserved, 0);
        assert_int_equal(m.view.reserved, 0);
        assert_int_equal(m.view.dtype, forms[n].dtype);
        assert_ptr_equal(m.view.data, memory);
        const attn_tensor want = kit_view(forms[n].dtype, memory, 2, 3, 4, 5);
        assert_memory_equal(m.view.shape, want.shape, sizeof want.shape);
        assert_memory_equal(m.view.stride, want.stride, sizeof want.stride);
    }
}

static void test_mask_init__no_data_is_needed_for_no_elements(void **state)
{
    (void)state;
    attn_mask m;
    assert_int_equal(
        attn_mask_init(&m, ATTN_MASK_KEEP, ATTN_U8, NULL, 1, 1, 0, 5), ATTN_OK);
    assert_int_equal(attn_mask_causal(&m, 0), ATTN_OK);
}

/* A mask of random sizes and strides in memory[]. */
static attn_mask random_mask(void)
{
    attn_mask m;
    const size_t form = (size_t)kit_int(0, (int64_t)COUNT(forms) - 1);
    kit_fill_with(&(attn_tensor){memory,
                                 {1, 1, 1, (int64_t)COUNT(memory)},
                                 {0, 0, 0, 1},
                                 ATTN_F64,
                                 0},
                  7.0);
    assert_int_equal(attn_mask_init(&m, forms[form].kind, forms[form].dtype,
                                    memory, kit_int(1, 3), kit_int(1, 3),
                                    kit_int(0, 9), kit_int(0, 9)),
                     ATTN_OK);
    if (kit_int(0, 1) == 1) { /* rows and columns exchanged, with a gap */
        m.view.stride[2] = 1;
        m.view.stride[3] = m.view.shape[2] + 1;
        m.view.stride[1] = m.view.stride[3] * (m.view.shape[3] + 1);
        m.view.stride[0] = m.view.stride[1] * m.view.shape[1];
    }
    return m;
}

static void test_mask_causal__is_the_rule(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 200; seed++) {
        kit_seed(seed);
        const attn_mask m = random_mask();
        const int64_t offset = kit_int(-10, 10);
        assert_int_equal(attn_mask_causal(&m, offset), ATTN_OK);
        EACH_ELEMENT(&m.view)
        if (lets_through(&m, b, h, i, j) != (j <= offset + i))
            fail_msg("seed %d, offset %d: (%d,%d)", (int)seed, (int)offset,
                     (int)i, (int)j);
    }
}

static void test_mask_causal__extreme_offsets(void **state)
{
    (void)state;
    attn_mask m;
    attn_mask_init(&m, ATTN_MASK_DROP, ATTN_U8, memory, 1, 1, 3, 4);
    assert_int_equal(attn_mask_causal(&m, INT64_MAX), ATTN_OK);
    EACH_ELEMENT(&m.view)
    assert_true(lets_through(&m, b, h, i, j));
    assert_int_equal(attn_mask_causal(&m, INT64_MIN), ATTN_OK);
    EACH_ELEMENT(&m.view)
    assert_false(lets_through(&m, b, h, i, j));
}

static void test_mask_window__is_the_rule(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 300; seed++) {
        kit_seed(seed);
        const attn_mask m = random_mask();
        const int64_t offset = kit_int(-10, 10);
        const int64_t left = kit_int(-1, 6);
        const int64_t right = kit_int(-1, 6);
        assert_int_equal(attn_mask_window(&m, offset, left, right), ATTN_OK);
        EACH_ELEMENT(&m.view)
        {
            const int64_t behind = offset + i - j;
            const bool want = (left == -1 || behind <= left) &&
                              (right == -1 || behind >= -right);
            if (lets_through(&m, b, h, i, j) != want)
                fail_msg("seed %d, offset %d, window %d %d: (%d,%d)", (int)seed,
                         (int)offset, (int)left, (int)right, (int)i, (int)j);
        }
    }
}

static void test_mask_window__extreme_bounds(void **state)
{
    (void)state;
    attn_mask m;
    attn_mask_init(&m, ATTN_MASK_KEEP, ATTN_U8, memory, 1, 1, 3, 4);
    assert_int_equal(attn_mask_window(&m, 0, INT64_MAX, INT64_MAX), ATTN_OK);
    EACH_ELEMENT(&m.view)
    assert_true(lets_through(&m, b, h, i, j));
    assert_int_equal(attn_mask_window(&m, INT64_MAX, 5, 5), ATTN_OK);
    EACH_ELEMENT(&m.view)
    assert_false(lets_through(&m, b, h, i, j));
    assert_int_equal(attn_mask_window(&m, INT64_MIN, 5, -1), ATTN_OK);
    EACH_ELEMENT(&m.view)
    assert_true(lets_through(&m, b, h, i, j));
    assert_int_equal(attn_mask_window(&m, INT64_MIN, 5, 1 << 30), ATTN_OK);
    EACH_ELEMENT(&m.view)
    assert_false(lets_through(&m, b, h, i, j));
}

static void test_mask_padding__is_the_rule(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 200; seed++) {
        kit_seed(seed);
        const attn_mask m = random_mask();
        int64_t lens[3];
        for (int n = 0; n < 3; n++)
            lens[n] = kit_int(0, m.view.shape[3]);
        assert_int_equal(attn_mask_padding(&m, lens), ATTN_OK);
        EACH_ELEMENT(&m.view)
        if (lets_through(&m, b, h, i, j) != (j < lens[b]))
            fail_msg("seed %d: (%d,%d)", (int)seed, (int)b, (int)j);
    }
}

/* Builders write the elements of their mask and nothing between them. */
static void test_mask_builders__write_nothing_between_elements(void **state)
{
    (void)state;
    unsigned char bytes[64];
    memset(bytes, 9, sizeof bytes);
    const attn_mask m = {ATTN_MASK_KEEP,
                         0,
                         {bytes + 1, {1, 1, 4, 5}, {0, 0, 14, 2}, ATTN_U8, 0}};
    assert_int_equal(attn_mask_causal(&m, 0), ATTN_OK);
    for (int n = 0; n < 64; n++) {
        const int in_row = (n - 1) % 14;
        const bool element =
            n >= 1 && n - 1 < 4 * 14 && in_row <= 8 && in_row % 2 == 0;
        if (!element && bytes[n] != 9)
            fail_msg("byte %d was written", n);
    }
}

/* ---- attn_mask_apply ---- */

struct applied {
    attn_mask masks[ATTN_MAX_MASKS];
    double memory[ATTN_MAX_MASKS][3 * 3 * 9 * 9];
};

/* Random masks over the shape of scores, each size full or 1. */
static int32_t random_masks(struct applied *a, const attn_tensor *scores)
{
    const int32_t count = (int32_t)kit_int(0, ATTN_MAX_MASKS);
    for (int32_t n = 0; n < count; n++) {
        int64_t size[4];
        const int32_t kind = (int32_t)kit_int(1, 3);
        const attn_dtype dtype =
            kind == ATTN_MASK_ADD ? scores->dtype : ATTN_U8;
        for (int dim = 0; dim < 4; dim++)
            size[dim] = kit_int(0, 2) == 0 ? 1 : scores->shape[dim];
        assert_int_equal(attn_mask_init(&a->masks[n], kind, dtype, a->memory[n],
                                        size[0], size[1], size[2], size[3]),
                         ATTN_OK);
        EACH_ELEMENT(&a->masks[n].view)
        {
            double value = kit_int(0, 3) == 0 ? 0.0 : (double)kit_int(1, 255);
            if (kind == ATTN_MASK_ADD)
                value = kit_int(0, 3) == 0 ? -INF : kit_real();
            kit_set(&a->masks[n].view, b, h, i, j, value);
        }
    }
    return count;
}

static double broadcast(const attn_tensor *t, int64_t b, int64_t h, int64_t i,
                        int64_t j)
{
    return kit_get(t, b % t->shape[0], h % t->shape[1], i % t->shape[2],
                   j % t->shape[3]);
}

/* What the documented order gives for one score; *size bounds the terms
 * of the sum. */
static double expected_score(const struct applied *a, int32_t count,
                             double score, int64_t b, int64_t h, int64_t i,
                             int64_t j, double *size)
{
    bool hidden = false;
    double sum = score;
    *size = fabs(score);
    for (int32_t n = 0; n < count; n++) {
        const attn_mask *m = &a->masks[n];
        const double value = broadcast(&m->view, b, h, i, j);
        if (m->kind == ATTN_MASK_KEEP)
            hidden = hidden || (int)value == 0;
        else if (m->kind == ATTN_MASK_DROP)
            hidden = hidden || (int)value != 0;
        else if (isinf(value))
            hidden = true;
        else {
            sum += value;
            *size += fabs(value);
        }
    }
    return hidden ? -INF : sum;
}

static void test_mask_apply__is_the_rule(void **state)
{
    (void)state;
    static struct applied a;
    for (uint64_t seed = 0; seed < 400; seed++) {
        kit_seed(seed);
        const attn_dtype dtype = seed % 2 ? ATTN_F32 : ATTN_F64;
        const double unit = dtype == ATTN_F32 ? 1.2e-7 : 2.3e-16;
        attn_tensor s = kit_make(dtype, kit_int(1, 3), kit_int(1, 3),
                                 kit_int(1, 9), kit_int(1, 9));
        if (kit_int(0, 1) == 1) { /* exchange rows and columns */
            s.stride[2] = 1;
            s.stride[3] = s.shape[2];
        }
        kit_set(&s, 0, 0, 0, 0, (double)NAN);
        attn_tensor was =
            kit_make(dtype, s.shape[0], s.shape[1], s.shape[2], s.shape[3]);
        EACH_ELEMENT(&s)
        kit_set(&was, b, h, i, j, kit_get(&s, b, h, i, j));
        const int32_t count = random_masks(&a, &s);
        const attn_status status =
            attn_mask_apply(count > 0 ? a.masks : NULL, count, &s);
        if (status != ATTN_OK)
            fail_msg("seed %d: %s", (int)seed, attn_last_error());
        EACH_ELEMENT(&s)
        {
            double size;
            const double want = expected_score(
                &a, count, kit_get(&was, b, h, i, j), b, h, i, j, &size);
            const double met = kit_get(&s, b, h, i, j);
            const bool fits = isnan(want) ? isnan(met) != 0
                              : isinf(want)
                                  ? isinf(met) && met < 0.0
                                  : fabs(met - want) <= 4 * unit * size;
            if (!fits)
                fail_msg("seed %d, (%d,%d,%d,%d): %.9g, not %.9g", (int)seed,
                         (int)b, (int)h, (int)i, (int)j, met, want);
        }
        kit_drop(&s);
        kit_drop(&was);
    }
}

static void test_mask_apply__no_masks_change_no_bit(void **state)
{
    (void)state;
    attn_tensor s = kit_make(ATTN_F32, 1, 2, 3, 4);
    attn_tensor was = kit_make(ATTN_F32, 1, 2, 3, 4);
    memcpy(was.data, s.data, 24 * sizeof(float));
    assert_int_equal(attn_mask_apply(NULL, 0, &s), ATTN_OK);
    assert_true(kit_same(&s, &was));
    kit_drop(&s);
    kit_drop(&was);
}

/* Whatever a hidden score was, it becomes -inf; a visible one stays. */
static void test_mask_apply__hidden_scores_are_replaced(void **state)
{
    (void)state;
    const double values[] = {(double)NAN, INF, -INF, 1e30, -0.0};
    for (size_t form = 0; form < COUNT(forms); form++) {
        const attn_dtype dtype =
            forms[form].dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32;
        attn_tensor s = kit_make(dtype, 1, 1, 1, 5);
        attn_mask m;
        for (int64_t j = 0; j < 5; j++)
            kit_set(&s, 0, 0, 0, j, values[j]);
        assert_int_equal(attn_mask_init(&m, forms[form].kind, forms[form].dtype,
                                        memory, 1, 1, 1, 5),
                         ATTN_OK);
        assert_int_equal(attn_mask_causal(&m, -1), ATTN_OK);
        assert_int_equal(attn_mask_apply(&m, 1, &s), ATTN_OK);
        for (int64_t j = 0; j < 5; j++) {
            const double met = kit_get(&s, 0, 0, 0, j);
            assert_true(isinf(met) && met < 0.0);
        }
        kit_drop(&s);
    }
}

/* An ADD mask of the most negative number hides nothing. */
static void test_mask_apply__a_large_negative_number_is_a_number(void **state)
{
    (void)state;
    attn_tensor s = kit_make(ATTN_F64, 1, 1, 1, 1);
    attn_mask m;
    double value = -1e9;
    kit_set(&s, 0, 0, 0, 0, 2.0);
    attn_mask_init(&m, ATTN_MASK_ADD, ATTN_F64, &value, 1, 1, 1, 1);
    assert_int_equal(attn_mask_apply(&m, 1, &s), ATTN_OK);
    assert_int_equal((int64_t)kit_get(&s, 0, 0, 0, 0), -999999998);
    kit_drop(&s);
}

/* Masks that other programs broadcast by a stride of 0. */
static void test_mask_apply__stride_0_is_a_broadcast(void **state)
{
    (void)state;
    attn_tensor s = kit_make(ATTN_F32, 2, 2, 3, 4);
    attn_mask m;
    unsigned char keep[4] = {1, 0, 255, 0};
    attn_mask_init(&m, ATTN_MASK_KEEP, ATTN_U8, keep, 2, 2, 3, 4);
    m.view.stride[0] = m.view.stride[1] = m.view.stride[2] = 0;
    assert_int_equal(attn_mask_apply(&m, 1, &s), ATTN_OK);
    EACH_ELEMENT(&s)
    assert_int_equal(isinf(kit_get(&s, b, h, i, j)) != 0, j % 2);
    kit_drop(&s);
}

static void test_mask_apply__empty_scores_are_fine(void **state)
{
    (void)state;
    attn_tensor s = kit_view(ATTN_F32, NULL, 2, 0, 3, 4);
    attn_mask m;
    attn_mask_init(&m, ATTN_MASK_KEEP, ATTN_U8, memory, 1, 1, 3, 4);
    assert_int_equal(attn_mask_apply(&m, 1, &s), ATTN_OK);
    s = kit_view(ATTN_F32, NULL, 2, 2, 3, 0);
    attn_mask_init(&m, ATTN_MASK_KEEP, ATTN_U8, NULL, 1, 1, 3, 0);
    assert_int_equal(attn_mask_apply(&m, 1, &s), ATTN_OK);
}

/* Positions beyond 2^63 count on: offset + i - left is 1 here for i = 1. */
static void test_window__huge_offset_and_bound(void **state)
{
    (void)state;
    static unsigned char visible[3][4];
    attn_mask m;
    assert_int_equal(
        attn_mask_init(&m, ATTN_MASK_KEEP, ATTN_U8, visible, 1, 1, 3, 4),
        ATTN_OK);
    assert_int_equal(attn_mask_window(&m, INT64_MAX, INT64_MAX, -1), ATTN_OK);
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 4; j++)
            assert_int_equal(visible[i][j], j >= i);
}

/*
 * A finite score stays finite when finite numbers are added to it, at both
 * ends of the type: at the upper one it once became +inf, and the row NaN.
 * 3 queries go by tiles, 1 by rows; keys 0 and 1 share the weight.
 */
static void test_add__the_largest_numbers_are_no_infinity(void **state)
{
    (void)state;
    for (attn_dtype dtype = ATTN_F32; dtype <= ATTN_F64; dtype++)
        for (int64_t queries = 1; queries <= 3; queries++) {
            const double most = dtype == ATTN_F32 ? (double)FLT_MAX : DBL_MAX;
            attn_tensor q = kit_make(dtype, 1, 1, queries, 2);
            attn_tensor k = kit_make(dtype, 1, 1, 20, 2);
            attn_tensor v = kit_make(dtype, 1, 1, 20, 1);
            attn_tensor out = kit_make(dtype, 1, 1, queries, 1);
            attn_tensor scores = kit_make(dtype, 1, 1, 1, 20);
            attn_mask mask[2] = {
                {ATTN_MASK_ADD, 0, kit_make(dtype, 1, 1, 1, 20)}};
            attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
            for (int64_t j = 0; j < 20; j++) {
                kit_set(&mask[0].view, 0, 0, 0, j, j < 2 ? most : -most);
                kit_set(&v, 0, 0, j, 0, (double)j);
                kit_set(&scores, 0, 0, 0, j, j < 2 ? most / 4 : 1.0);
            }
            mask[1] = mask[0];
            p.masks = mask;
            p.num_masks = 2;
            assert_int_equal(attn_sdpa(NULL, &p, &q, &k, &v, &out), ATTN_OK);
            for (int64_t i = 0; i < queries; i++)
                assert_true(fabs(kit_get(&out, 0, 0, i, 0) - 0.5) <= 1e-6);
            assert_int_equal(attn_mask_apply(mask, 2, &scores), ATTN_OK);
            for (int64_t j = 0; j < 20; j++)
                assert_true(kit_get(&scores, 0, 0, 0, j) >= -most &&
                            kit_get(&scores, 0, 0, 0, j) <= most);
            kit_drop(&q);
            kit_drop(&k);
            kit_drop(&v);
            kit_drop(&out);
            kit_drop(&scores);
            kit_drop(&mask[0].view);
        }
}

/* Tensors and masks without elements need no memory, and what their strides
 * say is ignored: nothing is to be multiplied by them. */
static void test_sdpa__strides_of_empty_tensors_are_ignored(void **state)
{
    (void)state;
    for (int which = 0; which < 3; which++) {
        const int64_t keys = which == 0 ? 0 : 3, width = which == 1 ? 0 : 4;
        const int64_t v_width = which == 2 ? 0 : 4;
        attn_tensor q = kit_make(ATTN_F32, 2, 3, 5, width);
        attn_tensor k = kit_make(ATTN_F32, 2, 3, keys, width);
        attn_tensor v = kit_make(ATTN_F32, 2, 3, keys, v_width);
        attn_tensor out = kit_make(ATTN_F32, 2, 3, 5, v_width);
        attn_tensor lse = kit_make(ATTN_F32, 2, 3, 5, 1);
        attn_mask mask = {ATTN_MASK_ADD, 0, kit_make(ATTN_F32, 2, 3, 5, keys)};
        attn_tensor *const all[] = {&q, &k, &v, &out, &mask.view};
        for (int n = 0; n < 5; n++)
            for (int a = 0; a < 4; a++)
                if (all[n]->shape[0] * all[n]->shape[1] * all[n]->shape[2] *
                        all[n]->shape[3] ==
                    0)
                    all[n]->stride[a] = INT64_MAX / 2;
        attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
        p.lse = &lse;
        p.masks = &mask;
        p.num_masks = 1;
        kit_fill_with(&lse, (double)NAN);
        assert_int_equal(attn_sdpa(NULL, &p, &q, &k, &v, &out), ATTN_OK);
        for (int64_t i = 0; i < 5; i++)
            assert_int_equal(isinf(kit_get(&lse, 1, 2, i, 0)) != 0, keys == 0);
        kit_drop(&lse);
        for (int n = 0; n < 5; n++)
            kit_drop(all[n]);
    }
}

/* Keys of other segments before and behind are passed over many at a time. */
static void test_segments__one_key_among_many(void **state)
{
    (void)state;
    enum { KEYS = 1500 };
    static const int32_t ids[][2] = {{0, -1},
                                     {-1, 0},
                                     {7, 6},
                                     {INT32_MIN, INT32_MAX},
                                     {INT32_MAX, INT32_MIN}};
    static const int64_t places[] = {0,   1,   255,  256,  257,
                                     700, 987, 1243, 1244, KEYS - 1};
    attn_tensor q = kit_make(ATTN_F32, 1, 1, 1, 4);
    attn_tensor k = kit_make(ATTN_F32, 1, 1, KEYS, 4);
    attn_tensor v = kit_make(ATTN_F32, 1, 1, KEYS, 1);
    float result = 0.0f;
    attn_tensor out = kit_view(ATTN_F32, &result, 1, 1, 1, 1);
    static int32_t segments[KEYS];
    attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
    p.kv_segments = segments;
    for (size_t n = 0; n < COUNT(ids) * COUNT(places); n++) {
        const int32_t *id = ids[n % COUNT(ids)];
        const int64_t at = places[n / COUNT(ids)];
        for (int64_t j = 0; j < KEYS; j++)
            segments[j] = id[j != at];
        p.q_segments = &id[0];
        assert_int_equal(attn_sdpa(NULL, &p, &q, &k, &v, &out), ATTN_OK);
        assert_true(result == (float)kit_get(&v, 0, 0, at, 0));
    }
    kit_drop(&q);
    kit_drop(&k);
    kit_drop(&v);
}

/* floor(p / chunk) */
static int64_t chunk_of(int64_t p, int64_t chunk)
{
    return p / chunk - (p % chunk < 0);
}

/* Is a key at pk visible to a query at pq? The two are a number apart. */
static bool is_visible(const attn_sdpa_params *p, int64_t pq, int64_t pk)
{
    const int64_t d = pq - pk;
    const bool in_window = (p->window_left < 0 || d <= p->window_left) &&
                           (p->window_right < 0 || d >= -p->window_right);
    const bool in_prefix =
        p->prefix_lens && p->prefix_lens[0] > 0 && pk < p->prefix_lens[0];
    return (!p->causal || d >= 0 || in_prefix) &&
           (in_window || (pk >= 0 && pk < p->keep_first)) &&
           (p->chunk == 0 || chunk_of(pq, p->chunk) == chunk_of(pk, p->chunk));
}

/* 2 queries, 3 keys; what is visible must have weight. */
static void check_visible(attn_sdpa_params *p)
{
    float zeros[3] = {0}, weights[6];
    attn_tensor q = kit_view(ATTN_F32, zeros, 1, 1, 2, 1);
    attn_tensor k = kit_view(ATTN_F32, zeros, 1, 1, 3, 1);
    attn_tensor out = kit_view(ATTN_F32, NULL, 1, 1, 2, 0), v = out;
    attn_tensor w = kit_view(ATTN_F32, weights, 1, 1, 2, 3);
    v.shape[2] = 3;
    p->weights = &w;
    assert_int_equal(attn_sdpa(NULL, p, &q, &k, &v, &out), ATTN_OK);
    for (int64_t n = 0; n < 6; n++)
        if ((weights[n] != 0.0f) !=
            is_visible(p, p->q_offset + n / 3, p->kv_offsets[0] + n % 3))
            fail_msg("offsets %lld and %lld, window %lld %lld %lld, chunk "
                     "%lld: weight %lld is %g",
                     (long long)p->q_offset, (long long)p->kv_offsets[0],
                     (long long)p->window_left, (long long)p->window_right,
                     (long long)p->keep_first, (long long)p->chunk,
                     (long long)n, (double)weights[n]);
}

/* Distances of positions without bounds were clamped, and a clamped one under
 * a bound of the same size let keys through; chunks had no beginning there. */
static void test_positions__near_their_ends(void **state)
{
    (void)state;
    const int64_t end = ((int64_t)1 << 62) - 4;
    const int64_t offsets[] = {-end, 1 - end, -2, 0, 3, end - 1, end};
    const int64_t bounds[] = {-1, 0, 1, INT64_MAX - 1, INT64_MAX};
    const int64_t chunks[] = {0, 1, 2, INT64_MAX - 1, INT64_MAX};
    const int64_t keeps[] = {0, 1, INT64_MAX};
    for (size_t n = 0; n < 7 * 7 * 5 * 5 * 5 * 3 * 4; n++) {
        attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
        const size_t rule = n / 7 / 7 / 5 / 5 / 5 / 3;
        const int64_t prefix = rule == 2 ? 2 : INT64_MAX;
        p.kv_offsets = &offsets[n % 7];
        p.q_offset = offsets[n / 7 % 7];
        p.window_left = bounds[n / 7 / 7 % 5];
        p.window_right = bounds[n / 7 / 7 / 5 % 5];
        p.chunk = chunks[n / 7 / 7 / 5 / 5 % 5];
        p.keep_first = keeps[n / 7 / 7 / 5 / 5 / 5 % 3];
        p.flags = ATTN_SDPA_WINDOW;
        p.align = ATTN_ALIGN_OFFSET;
        p.causal = rule > 0;
        p.prefix_lens = rule > 1 ? &prefix : NULL;
        check_visible(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mask_init__is_contiguous),
        cmocka_unit_test(test_mask_init__no_data_is_needed_for_no_elements),
        cmocka_unit_test(test_mask_causal__is_the_rule),
        cmocka_unit_test(test_mask_causal__extreme_offsets),
        cmocka_unit_test(test_mask_window__is_the_rule),
        cmocka_unit_test(test_mask_window__extreme_bounds),
        cmocka_unit_test(test_mask_padding__is_the_rule),
        cmocka_unit_test(test_mask_builders__write_nothing_between_elements),
        cmocka_unit_test(test_mask_apply__is_the_rule),
        cmocka_unit_test(test_mask_apply__no_masks_change_no_bit),
        cmocka_unit_test(test_mask_apply__hidden_scores_are_replaced),
        cmocka_unit_test(test_mask_apply__a_large_negative_number_is_a_number),
        cmocka_unit_test(test_mask_apply__stride_0_is_a_broadcast),
        cmocka_unit_test(test_mask_apply__empty_scores_are_fine),
        cmocka_unit_test(test_sdpa__strides_of_empty_tensors_are_ignored),
        cmocka_unit_test(test_window__huge_offset_and_bound),
        cmocka_unit_test(test_segments__one_key_among_many),
        cmocka_unit_test(test_positions__near_their_ends),
        cmocka_unit_test(test_add__the_largest_numbers_are_no_infinity),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
