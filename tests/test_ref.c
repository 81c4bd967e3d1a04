/*
 * The oracle's own ground: what it reads and tests write in 16 bits, and small
 * problems whose results are known without it.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "ref.h"
#include "tensors.h"

/* ---- 16 bits ---- */

static long double read_bits(attn_dtype dtype, uint16_t bits)
{
    const attn_tensor view = {&bits, {1, 1, 1, 1}, {1, 1, 1, 1}, dtype, 0};
    return ref_get(&view, 0, 0, 0, 0);
}

static uint16_t write_number(attn_dtype dtype, double x)
{
    uint16_t bits;
    const attn_tensor view = {&bits, {1, 1, 1, 1}, {1, 1, 1, 1}, dtype, 0};
    tensor_set(&view, 0, 0, 0, 0, x);
    return bits;
}

static void test_half__is_what_ieee_754_says(void **state)
{
    (void)state;
    static const struct {
        uint16_t bits;
        long double value;
    } known[] = {{0x0000, 0.0L},       {0x3C00, 1.0L},
                 {0xC000, -2.0L},      {0x7BFF, 65504.0L},
                 {0x0400, 0x1p-14L},   {0x03FF, 1023.0L * 0x1p-24L},
                 {0x8001, -0x1p-24L},  {0x7C00, HUGE_VALL},
                 {0xFC00, -HUGE_VALL}, {0x3555, 1365.0L / 4096.0L}};
    for (size_t n = 0; n < sizeof known / sizeof known[0]; n++)
        assert_true(read_bits(ATTN_F16, known[n].bits) == known[n].value);
    assert_true(isnan(read_bits(ATTN_F16, 0x7C01)));
    assert_true(isnan(read_bits(ATTN_F16, 0xFFFF)));
}

static void test_bfloat__is_the_upper_half_of_a_float(void **state)
{
    (void)state;
    assert_true(read_bits(ATTN_BF16, 0x3F80) == 1.0L);
    assert_true(read_bits(ATTN_BF16, 0xC040) == -3.0L);
    assert_true(read_bits(ATTN_BF16, 0x0001) == 0x1p-133L);
    assert_true(read_bits(ATTN_BF16, 0x7F7F) == 255.0L * 0x1p120L);
    assert_true(read_bits(ATTN_BF16, 0x7F80) == HUGE_VALL);
    assert_true(isnan(read_bits(ATTN_BF16, 0xFFFF)));
}

/* Every number of the type comes back, whatever else NaNs hold. */
static void test_16_bits__all_numbers_come_back(void **state)
{
    (void)state;
    const attn_dtype types[] = {ATTN_F16, ATTN_BF16};
    for (int t = 0; t < 2; t++)
        for (uint32_t bits = 0; bits < 65536; bits++) {
            const long double x = read_bits(types[t], (uint16_t)bits);
            const uint16_t again = write_number(types[t], (double)x);
            if (isnan(x))
                assert_true(isnan(read_bits(types[t], again)));
            else
                assert_int_equal(again, bits);
        }
}

/* What lies between two numbers goes to the nearer one, in the middle to the
 * even one, and from the middle beyond the largest on to infinity. */
static void test_16_bits__numbers_in_between_are_rounded(void **state)
{
    (void)state;
    const attn_dtype types[] = {ATTN_F16, ATTN_BF16};
    const uint16_t largest[] = {0x7BFF, 0x7F7F};
    for (int t = 0; t < 2; t++)
        for (uint32_t bits = 0; bits < largest[t]; bits++) {
            const double low = (double)read_bits(types[t], (uint16_t)bits);
            const double high =
                (double)read_bits(types[t], (uint16_t)(bits + 1));
            const double middle = 0.5 * (low + high);
            assert_int_equal(write_number(types[t], middle), bits + (bits & 1));
            assert_int_equal(write_number(types[t], nextafter(middle, low)),
                             bits);
            assert_int_equal(write_number(types[t], nextafter(middle, high)),
                             bits + 1);
            assert_int_equal(write_number(types[t], -middle),
                             0x8000 | (bits + (bits & 1)));
        }
    assert_int_equal(write_number(ATTN_F16, 65519.0), 0x7BFF);
    assert_int_equal(write_number(ATTN_F16, 65520.0), 0x7C00);
    assert_int_equal(write_number(ATTN_BF16, 1e39), 0x7F80);
}

/* ---- problems of two or three keys, D = 1, q = 1, so that scores are k ----
 */

typedef struct small {
    double q[3], k[3], v[3];
    attn_sdpa_params p;
    attn_tensor qv, kv, vv;
    ref_result r;
} small;

static void small_begin(small *s, int64_t queries, int64_t keys)
{
    const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
    memset(s, 0, sizeof *s);
    s->p = init;
    s->p.flags = ATTN_SDPA_SCALE;
    s->p.scale = 1.0;
    for (int i = 0; i < 3; i++) {
        s->q[i] = 1.0;
        s->v[i] = i + 1.0;
    }
    attn_view_bhtd(&s->qv, ATTN_F64, s->q, 1, 1, queries, 1);
    attn_view_bhtd(&s->kv, ATTN_F64, s->k, 1, 1, keys, 1);
    attn_view_bhtd(&s->vv, ATTN_F64, s->v, 1, 1, keys, 1);
}

static void small_run(small *s)
{
    ref_sdpa(&s->r, &s->p, &s->qv, &s->kv, &s->vv);
}

/* Within the bound, which itself is no more than some units of a double. */
static void assert_near(ref_num x, double want)
{
    assert_true(fabsl(x.value - (long double)want) <= x.error + 1e-15L);
    assert_true(x.error <= 1e-13L * (1.0L + fabsl(x.value)));
}

static void test_row_outputs__of_known_weights(void **state)
{
    (void)state;
    small s;
    small_begin(&s, 1, 3);
    s.k[0] = log(0.5);
    s.k[1] = s.k[2] = log(0.25);
    small_run(&s);
    assert_near(s.r.out.num[0], 0.5 + 0.5 + 0.75);
    assert_near(s.r.lse.num[0], 0.0);
    assert_near(s.r.max_weight.num[0], 0.5);
    assert_near(s.r.effective_keys.num[0], 1.0 / 0.375);
    assert_near(s.r.entropy.num[0], 1.5 * log(2.0));
    assert_near(s.r.key_sums.num[1], 0.25);
    ref_free(&s.r);
}

/* A sink of ln 1 beside keys that sum to 1 takes half of all weights. */
static void test_sink__takes_its_part(void **state)
{
    (void)state;
    small s;
    double sink = 0.0;
    attn_tensor view;
    small_begin(&s, 1, 2);
    s.k[0] = s.k[1] = log(0.5);
    attn_view_vector(&view, ATTN_F64, &sink, 1);
    s.p.sinks = &view;
    small_run(&s);
    assert_near(s.r.out.num[0], 0.25 + 0.5);
    assert_near(s.r.lse.num[0], log(2.0));
    assert_near(s.r.weights.num[0], 0.25);
    assert_near(s.r.effective_keys.num[0], 8.0);
    assert_near(s.r.entropy.num[0], 0.5 * log(4.0));
    ref_free(&s.r);
    /* Without keys: zeros, and the sink for the log-sum-exp. */
    const int64_t none = 0;
    s.p.kv_lens = &none;
    sink = -3.0;
    small_run(&s);
    assert_true(s.r.out.num[0].value == 0.0L && s.r.out.num[0].error == 0.0L);
    assert_true(s.r.lse.num[0].value == -3.0L);
    assert_true(s.r.max_weight.num[0].value == 0.0L);
    assert_true(s.r.effective_keys.num[0].value == 0.0L);
    assert_true(s.r.entropy.num[0].value == 0.0L);
    ref_free(&s.r);
}

static void test_scores__are_capped_then_masked(void **state)
{
    (void)state;
    small s;
    double slope = 0.25, added[2] = {10.0, -HUGE_VAL};
    attn_tensor slopes;
    attn_mask mask = {.kind = ATTN_MASK_ADD};
    small_begin(&s, 1, 2);
    s.k[0] = 3.0;
    s.k[1] = -1.0;
    s.p.scale = 2.0;
    s.p.softcap = 4.0;
    attn_view_vector(&slopes, ATTN_F64, &slope, 1);
    s.p.alibi = &slopes;
    s.p.align = ATTN_ALIGN_OFFSET;
    s.p.q_offset = -6;
    attn_view_bhtd(&mask.view, ATTN_F64, added, 1, 1, 1, 2);
    s.p.masks = &mask;
    s.p.num_masks = 1;
    small_run(&s);
    assert_near(s.r.scores_raw.num[0], 6.0);
    assert_near(s.r.scores_raw.num[1], -2.0);
    assert_near(s.r.scores_capped.num[0], 4.0 * tanh(1.5));
    assert_near(s.r.scores_capped.num[1], 4.0 * tanh(-0.5));
    assert_near(s.r.scores.num[0], 4.0 * tanh(1.5) + 10.0 - 0.25 * 6.0);
    assert_true(s.r.scores.num[1].value == -HUGE_VALL);
    ref_free(&s.r);
}

/* Which of three keys a query sees, as the bits of a number. */
static int seen_by(const small *s, int64_t i)
{
    int seen = 0;
    for (int64_t j = 0; j < 3; j++)
        if (ref_at(&s->r.scores, 0, 0, i, j)->value > -HUGE_VALL)
            seen |= 1 << j;
    return seen;
}

static void assert_seen(small *s, int first, int second, int third)
{
    small_run(s);
    assert_int_equal(seen_by(s, 0), first);
    assert_int_equal(seen_by(s, 1), second);
    assert_int_equal(seen_by(s, 2), third);
    ref_free(&s->r);
}

static void test_visibility__of_positions(void **state)
{
    (void)state;
    small s;
    const int64_t origin = 10, below = -1, first = 1;
    small_begin(&s, 3, 3);
    s.p.causal = 1;
    s.p.align = ATTN_ALIGN_TOP_LEFT;
    s.p.kv_offsets = &origin;
    assert_seen(&s, 1, 3, 7); /* query 0 stands at key 0 */
    s.p.align = ATTN_ALIGN_OFFSET;
    s.p.q_offset = 9;
    assert_seen(&s, 0, 1, 3);
    s.p.kv_starts = &first;
    assert_seen(&s, 0, 0, 2);
    s.p.kv_starts = NULL;
    /* Chunks [-2,0) and [0,2): keys at -1, 0, 1, queries at -2, -1, 0. */
    s.p.causal = 0;
    s.p.kv_offsets = &below;
    s.p.q_offset = -2;
    s.p.chunk = 2;
    assert_seen(&s, 1, 1, 6);
    /* A window of the own position; the key at 10 is kept besides. */
    s.p.chunk = 0;
    s.p.flags |= ATTN_SDPA_WINDOW;
    s.p.kv_offsets = &origin;
    s.p.q_offset = 9;
    assert_seen(&s, 0, 1, 2);
    s.p.keep_first = 11;
    assert_seen(&s, 1, 1, 3);
}

static void test_visibility__of_segments_and_blocks(void **state)
{
    (void)state;
    small s;
    const int32_t q[] = {4, 4, 5}, k[] = {4, 5, 6};
    unsigned char map[4] = {1, 0, 0, 2};
    attn_tensor blocks;
    small_begin(&s, 3, 3);
    s.p.q_segments = q;
    s.p.kv_segments = k;
    assert_seen(&s, 1, 1, 2);
    s.p.q_segments = s.p.kv_segments = NULL;
    attn_view_bhtd(&blocks, ATTN_U8, map, 1, 1, 2, 2);
    s.p.blocks = &blocks;
    s.p.block_q = 1; /* of which the map has two only: the third row is cut */
    s.p.block_k = 2;
    attn_view_bhtd(&s.qv, ATTN_F64, s.q, 1, 1, 2, 1);
    small_run(&s);
    assert_int_equal(seen_by(&s, 0), 3);
    assert_int_equal(seen_by(&s, 1), 4);
    ref_free(&s.r);
}

/* Three keys in a ring from row 2 on, and in pages of one row. */
static void test_keys__in_rings_and_pages(void **state)
{
    (void)state;
    small s;
    const int64_t start = 2, three = 3;
    const int32_t table[] = {1, 1, 0};
    small_begin(&s, 1, 3);
    s.k[0] = 7.0;
    s.k[1] = 8.0;
    s.k[2] = 9.0;
    s.p.ring_starts = &start;
    small_run(&s);
    assert_near(s.r.scores_raw.num[0], 9.0);
    assert_near(s.r.scores_raw.num[1], 7.0);
    assert_near(s.r.scores_raw.num[2], 8.0);
    ref_free(&s.r);
    s.p.ring_starts = NULL;
    s.p.page_table = table;
    s.p.pages_per_seq = 3;
    s.p.kv_lens = &three;
    attn_view_bhtd(&s.kv, ATTN_F64, s.k, 3, 1, 1, 1);
    attn_view_bhtd(&s.vv, ATTN_F64, s.v, 3, 1, 1, 1);
    small_run(&s);
    assert_near(s.r.scores_raw.num[0], 8.0);
    assert_near(s.r.scores_raw.num[1], 8.0);
    assert_near(s.r.scores_raw.num[2], 7.0);
    /* Page 2 is in nobody's table. */
    unsigned char seen[3];
    ref_seen_rows(seen, &s.p, &s.qv, &s.kv);
    assert_true(seen[0] == 1 && seen[1] == 1 && seen[2] == 0);
    ref_free(&s.r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_half__is_what_ieee_754_says),
        cmocka_unit_test(test_bfloat__is_the_upper_half_of_a_float),
        cmocka_unit_test(test_16_bits__all_numbers_come_back),
        cmocka_unit_test(test_16_bits__numbers_in_between_are_rounded),
        cmocka_unit_test(test_row_outputs__of_known_weights),
        cmocka_unit_test(test_sink__takes_its_part),
        cmocka_unit_test(test_scores__are_capped_then_masked),
        cmocka_unit_test(test_visibility__of_positions),
        cmocka_unit_test(test_visibility__of_segments_and_blocks),
        cmocka_unit_test(test_keys__in_rings_and_pages)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
