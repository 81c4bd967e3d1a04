/*
 * test_cache.c - key/value caches: what each call promises, refusals, memory,
 * threads. Random histories are in test_cache_random.c.
 */
#define _GNU_SOURCE 1

#include "kit.h"

#include "rng.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int32_t kinds[] = {ATTN_KV_CACHE_CONTIGUOUS, ATTN_KV_CACHE_RING,
                                ATTN_KV_CACHE_PAGED};
static const attn_dtype types[] = {ATTN_F32, ATTN_F64, ATTN_F16, ATTN_BF16};

static size_t bytes_of(attn_dtype dtype)
{
    return dtype == ATTN_F64 ? 8 : dtype == ATTN_F32 ? 4 : 2;
}

static void ok(attn_status status)
{
    if (status != ATTN_OK)
        fail_msg("%s", attn_last_error());
}

static attn_kv_cache *make_cache(const attn_kv_cache_params *p)
{
    attn_kv_cache *cache = NULL;
    ok(attn_kv_cache_create(NULL, p, &cache));
    assert_non_null(cache);
    return cache;
}

/* 3 sequences of up to 10 keys, 2 heads, D = 6, Dv = 4; pages of 4. */
static attn_kv_cache_params usual(int32_t kind, attn_dtype dtype)
{
    attn_kv_cache_params p = ATTN_KV_CACHE_PARAMS_INIT;
    p.kind = kind;
    p.dtype = dtype;
    p.num_seqs = 3;
    p.kv_heads = 2;
    p.capacity = 10;
    p.width = 6;
    p.v_width = 4;
    p.page_size = kind == ATTN_KV_CACHE_PAGED ? 4 : 0;
    return p;
}

/* Random keys or values, in F32 or F64. */
static attn_tensor keys(attn_dtype dtype, int64_t batch, int64_t len,
                        int64_t width)
{
    return kit_make(dtype, batch, 2, len, width);
}

/* n random keys for one sequence of a usual() cache. */
static attn_status append_some(attn_kv_cache *cache, int64_t seq, int64_t n)
{
    attn_tensor k = keys(ATTN_F32, 1, n, 6);
    attn_tensor v = keys(ATTN_F32, 1, n, 4);
    const attn_status status =
        attn_kv_cache_append(NULL, cache, &seq, NULL, &k, &v);
    kit_drop(&k);
    kit_drop(&v);
    return status;
}

/* ---- Numbers ---- */

/* What a view shows of a sequence that is alone in it: the rows of one head. */
static const unsigned char *seen(const attn_kv_cache *cache, int64_t seq,
                                 attn_tensor *k, attn_tensor *v)
{
    static _Alignas(64) unsigned char work[4096];
    attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
    ok(attn_kv_cache_view(cache, 1, &seq, &p, k, v, work, sizeof work));
    return k->data;
}

/* Each number is rounded as attn_convert does, NaN and inf included. */
static void test_kv_cache_append__rounds_as_convert_does(void **state)
{
    (void)state;
    enum { N = 4096 };
    static float x[N];
    static double want[N];
    rng r = rng_make(1, 0);
    for (int n = 0; n < N; n++) {
        const uint32_t bits = (uint32_t)rng_bits(&r);
        memcpy(&x[n], &bits, sizeof bits);
        if (n % 2 == 0)
            x[n] = (float)rng_normal(&r);
    }
    for (size_t t = 0; t < COUNT(types); t++) {
        attn_kv_cache_params p = ATTN_KV_CACHE_PARAMS_INIT;
        const attn_tensor wide = kit_view(ATTN_F32, x, 1, 1, N / 64, 64);
        const attn_tensor stored = kit_view(types[t], want, 1, 1, N / 64, 64);
        attn_tensor k;
        attn_tensor v;
        p.kind = ATTN_KV_CACHE_CONTIGUOUS;
        p.dtype = types[t];
        p.num_seqs = 1;
        p.kv_heads = 1;
        p.capacity = 2 * N / 64;
        p.width = 64;
        attn_kv_cache *cache = make_cache(&p);
        ok(attn_convert(NULL, &wide, &stored));
        ok(attn_kv_cache_append(NULL, cache, NULL, NULL, &wide, &wide));
        /* The type of the cache itself is not rounded again. */
        ok(attn_kv_cache_append(NULL, cache, NULL, NULL, &stored, &stored));
        const unsigned char *met = seen(cache, 0, &k, &v);
        assert_int_equal(k.dtype, types[t]);
        assert_int_equal(k.shape[2], 2 * N / 64);
        assert_memory_equal(met, want, N * bytes_of(types[t]));
        met += N * bytes_of(types[t]);
        assert_memory_equal(met, want, N * bytes_of(types[t]));
        assert_memory_equal(v.data, want, N * bytes_of(types[t]));
        attn_kv_cache_destroy(cache);
    }
}

/* One call that turns and appends is attn_rotary, attn_convert and an append;
 * also where a row is longer than the part of it that goes by the stack. */
static void try_rotary(int32_t style, attn_dtype dtype, int64_t width,
                       int64_t pairs, bool strided)
{
    const attn_dtype real = dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32;
    attn_tensor cos_table = kit_make(real, 1, 1, 30, 2 * pairs);
    attn_tensor sin_table = kit_make(real, 1, 1, 30, 2 * pairs);
    attn_tensor k = kit_make(real, 1, 2, 7, width);
    attn_tensor turned = kit_make(real, 1, 2, 7, width);
    attn_kv_cache_params p = ATTN_KV_CACHE_PARAMS_INIT;
    attn_rotary_params rotary = ATTN_ROTARY_PARAMS_INIT;
    attn_tensor *tables[] = {&cos_table, &sin_table};
    attn_tensor met;
    attn_tensor want;
    attn_tensor v;
    for (int n = 0; n < 2; n++) {
        tables[n]->shape[3] = pairs;
        tables[n]->stride[3] = strided ? 2 : 1;
    }
    p.kind = ATTN_KV_CACHE_RING;
    p.dtype = dtype;
    p.num_seqs = 1;
    p.kv_heads = 2;
    p.capacity = 14;
    p.width = width;
    attn_kv_cache *plain = make_cache(&p);
    p.rotary_style = style;
    p.cos_table = &cos_table;
    p.sin_table = &sin_table;
    attn_kv_cache *turning = make_cache(&p);
    memset(&p, 0xFF, sizeof p); /* all but the tables' memory was copied */
    rotary.style = style;
    for (int64_t n = 0; n < 28; n += 7) {
        rotary.offset = n; /* past the capacity of the ring */
        kit_fill(&k);
        ok(attn_rotary(NULL, &rotary, &k, &cos_table, &sin_table, &turned));
        ok(attn_kv_cache_append(NULL, plain, NULL, NULL, &turned, &k));
        ok(attn_kv_cache_append(NULL, turning, NULL, NULL, &k, &k));
    }
    assert_memory_equal(seen(turning, 0, &met, &v), seen(plain, 0, &want, &v),
                        (size_t)(2 * 14 * width) * bytes_of(dtype));
    attn_kv_cache_destroy(plain);
    attn_kv_cache_destroy(turning);
    attn_tensor *made[] = {&cos_table, &sin_table, &k, &turned};
    for (size_t n = 0; n < COUNT(made); n++)
        kit_drop(made[n]);
}

static void test_kv_cache_append__turns_as_rotary_does(void **state)
{
    (void)state;
    static const int64_t sizes[][2] = {{8, 4},     {8, 2},     {9, 4},
                                       {1, 0},     {256, 128}, {600, 300},
                                       {600, 129}, {64, 32}};
    kit_seed(5);
    for (size_t n = 0; n < COUNT(sizes); n++)
        for (size_t t = 0; t < COUNT(types); t++)
            for (int32_t style = 1; style <= 2; style++)
                try_rotary(style, types[t], sizes[n][0], sizes[n][1],
                           n % 2 == 1);
}

/*
 * Decoding through a ring that wraps again and again, a prompt and then some
 * tokens at a time: with room for the window of the oldest new query it is
 * attention over all keys with that window.
 */
static void test_kv_cache_attend__a_ring_is_a_window(void **state)
{
    (void)state;
    enum { W = 9, TQ = 3, ALL = 150 };
    for (size_t t = 0; t < COUNT(types); t++) {
        const attn_dtype real = types[t] == ATTN_F64 ? ATTN_F64 : ATTN_F32;
        attn_tensor q = keys(real, 1, ALL, 6);
        attn_tensor k = keys(real, 1, ALL, 6);
        attn_tensor v = keys(real, 1, ALL, 4);
        attn_tensor out = keys(real, 1, ALL, 4);
        attn_tensor want = keys(real, 1, ALL, 4);
        attn_kv_cache_params c = usual(ATTN_KV_CACHE_RING, types[t]);
        attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
        c.capacity = W + TQ - 1;
        attn_kv_cache *cache = make_cache(&c);
        /* Values that the type holds exactly. */
        for (int64_t n = 0; n < kit_elements(&k); n++)
            kit_set(&k, 0, 0, 0, n, (double)kit_int(-64, 64) / 64);
        for (int64_t n = 0; n < kit_elements(&v); n++)
            kit_set(&v, 0, 0, 0, n, (double)kit_int(-64, 64) / 64);
        p.causal = 1;
        p.flags = ATTN_SDPA_WINDOW;
        p.window_left = W - 1;
        p.window_right = -1;
        for (int64_t at = 0; at < ALL; at += TQ) {
            attn_tensor slices[] = {q, k, v, out};
            for (int n = 0; n < 4; n++) {
                slices[n].data =
                    (unsigned char *)slices[n].data +
                    at * slices[n].stride[2] * (int64_t)bytes_of(real);
                slices[n].shape[2] = TQ;
            }
            ok(attn_kv_cache_append(NULL, cache, NULL, NULL, &slices[1],
                                    &slices[2]));
            ok(attn_kv_cache_attend(NULL, cache, NULL, &p, &slices[0],
                                    &slices[3]));
        }
        assert_int_equal(attn_kv_cache_length(cache, 0), ALL);
        assert_int_equal(attn_kv_cache_first(cache, 0), ALL - (W + TQ - 1));
        p.align = ATTN_ALIGN_TOP_LEFT;
        ok(attn_sdpa(NULL, &p, &q, &k, &v, &want));
        for (int64_t h = 0; h < 2; h++)
            for (int64_t i = 0; i < ALL; i++)
                for (int64_t e = 0; e < 4; e++)
                    if (!(fabs(kit_get(&out, 0, h, i, e) -
                               kit_get(&want, 0, h, i, e)) <=
                          (real == ATTN_F64 ? 1e-14 : 1e-6)))
                        fail_msg("type %d, row %d: %.17g, not %.17g",
                                 (int)types[t], (int)i,
                                 kit_get(&out, 0, h, i, e),
                                 kit_get(&want, 0, h, i, e));
        attn_kv_cache_destroy(cache);
        attn_tensor *made[] = {&q, &k, &v, &out, &want};
        for (size_t n = 0; n < COUNT(made); n++)
            kit_drop(made[n]);
    }
}

/* Queries of different sequences one after the other, a prompt beside single
 * tokens: what a server has in one step. */
static void test_kv_cache_attend__ragged_queries(void **state)
{
    (void)state;
    static const int64_t seqs[3] = {2, 0, 1};
    static const int64_t lens[3] = {5, 9, 1};
    static const int64_t cu_q[4] = {0, 3, 4, 4};
    attn_tensor q = kit_make(ATTN_F32, 1, 4, 4, 6);
    attn_tensor out = kit_make(ATTN_F32, 1, 4, 4, 4);
    attn_tensor want = kit_make(ATTN_F32, 1, 4, 4, 4);
    attn_tensor k = keys(ATTN_F32, 3, 9, 6);
    attn_tensor v = keys(ATTN_F32, 3, 9, 4);
    for (size_t n = 0; n < COUNT(kinds); n++) {
        const attn_kv_cache_params c = usual(kinds[n], ATTN_F32);
        attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
        attn_kv_cache *cache = make_cache(&c);
        ok(attn_kv_cache_append(NULL, cache, seqs, lens, &k, &v));
        p.causal = 1;
        p.cu_q = cu_q;
        p.num_seqs = 3;
        kit_fill_with(&out, -5.0);
        const attn_status status =
            attn_kv_cache_attend(NULL, cache, seqs, &p, &q, &out);
        if (kinds[n] == ATTN_KV_CACHE_RING) {
            assert_int_equal(status, ATTN_ERR_UNSUPPORTED);
            attn_kv_cache_destroy(cache);
            continue;
        }
        ok(status);
        for (int64_t b = 0; b < 2; b++) {
            attn_tensor qb = q, wb = want;
            const int64_t first = cu_q[b];
            qb.data = (float *)q.data + first * 6;
            wb.data = (float *)want.data + first * 4;
            qb.shape[2] = wb.shape[2] = cu_q[b + 1] - first;
            p.cu_q = NULL;
            p.num_seqs = 0;
            ok(attn_kv_cache_attend(NULL, cache, &seqs[b], &p, &qb, &wb));
        }
        assert_true(kit_same(&out, &want));
        attn_kv_cache_destroy(cache);
    }
    attn_tensor *made[] = {&q, &out, &want, &k, &v};
    for (size_t n = 0; n < COUNT(made); n++)
        kit_drop(made[n]);
}

/* ---- Sharing ---- */

/* Attention of one fixed query over a sequence. */
static attn_tensor answer(const attn_kv_cache *cache, int64_t seq)
{
    attn_tensor q = keys(ATTN_F32, 1, 2, 6);
    attn_tensor out = keys(ATTN_F32, 1, 2, 4);
    for (int64_t n = 0; n < kit_elements(&q); n++)
        ((float *)q.data)[n] = (float)sin((double)n);
    ok(attn_kv_cache_attend(NULL, cache, &seq, NULL, &q, &out));
    kit_drop(&q);
    return out;
}

/* After a share each side appends, and neither sees the other's keys. */
static void test_kv_cache_share__both_sides_go_on(void **state)
{
    (void)state;
    static const int64_t shared[] = {0, 1, 3, 4, 5, 7};
    for (size_t n = 0; n < COUNT(kinds); n++)
        for (size_t s = 0; s < COUNT(shared); s++) {
            const attn_kv_cache_params c = usual(kinds[n], ATTN_F32);
            attn_kv_cache *cache = make_cache(&c);
            attn_kv_cache *alone = make_cache(&c);
            attn_tensor k = keys(ATTN_F32, 1, 7, 6);
            attn_tensor v = keys(ATTN_F32, 1, 7, 4);
            attn_tensor more_k = keys(ATTN_F32, 2, 3, 6);
            attn_tensor more_v = keys(ATTN_F32, 2, 3, 4);
            static const int64_t both[] = {0, 2};
            ok(attn_kv_cache_append(NULL, cache, NULL, NULL, &k, &v));
            ok(attn_kv_cache_share(cache, 2, 0, shared[s]));
            ok(attn_kv_cache_append(NULL, cache, both, NULL, &more_k, &more_v));
            /* The same without any sharing. */
            static const int64_t twice[] = {0};
            ok(attn_kv_cache_append(NULL, alone, twice, NULL, &k, &v));
            static const int64_t two[] = {2};
            ok(attn_kv_cache_append(NULL, alone, two, &shared[s], &k, &v));
            ok(attn_kv_cache_append(NULL, alone, both, NULL, &more_k, &more_v));
            for (int64_t seq = 0; seq < 3; seq += 2) {
                attn_tensor met = answer(cache, seq);
                attn_tensor want = answer(alone, seq);
                assert_int_equal(attn_kv_cache_length(cache, seq),
                                 attn_kv_cache_length(alone, seq));
                assert_true(kit_same(&met, &want));
                kit_drop(&met);
                kit_drop(&want);
            }
            attn_kv_cache_destroy(cache);
            attn_kv_cache_destroy(alone);
            attn_tensor *made[] = {&k, &v, &more_k, &more_v};
            for (size_t t = 0; t < COUNT(made); t++)
                kit_drop(made[t]);
        }
}

/* Pages are taken as needed, shared without taking any, copied only when one
 * of several sequences writes, and come back. */
static void test_kv_cache__pages_are_counted(void **state)
{
    (void)state;
    attn_kv_cache_params c = usual(ATTN_KV_CACHE_PAGED, ATTN_F32);
    c.num_pages = 5;
    attn_kv_cache *cache = make_cache(&c);
    assert_int_equal(attn_kv_cache_free_pages(cache), 5);
    ok(append_some(cache, 0, 6)); /* a full page and half of another */
    assert_int_equal(attn_kv_cache_free_pages(cache), 3);
    ok(attn_kv_cache_share(cache, 1, 0, 6));
    ok(attn_kv_cache_share(cache, 2, 0, 5));
    assert_int_equal(attn_kv_cache_free_pages(cache), 3);
    ok(append_some(cache, 0, 0)); /* no key, no copy */
    assert_int_equal(attn_kv_cache_free_pages(cache), 3);
    ok(append_some(cache, 1, 1)); /* a copy of the half */
    assert_int_equal(attn_kv_cache_free_pages(cache), 2);
    ok(append_some(cache, 2, 1));
    assert_int_equal(attn_kv_cache_free_pages(cache), 1);
    ok(append_some(cache, 0, 2)); /* the original is its own by now */
    assert_int_equal(attn_kv_cache_free_pages(cache), 1);
    ok(append_some(cache, 0, 1));
    assert_int_equal(attn_kv_cache_free_pages(cache), 0);
    assert_int_equal(append_some(cache, 1, 2), ATTN_ERR_FULL);
    ok(attn_kv_cache_truncate(cache, 0, 8));
    assert_int_equal(attn_kv_cache_free_pages(cache), 1);
    ok(append_some(cache, 1, 2));
    ok(attn_kv_cache_reset(cache, 0)); /* its first page has others */
    assert_int_equal(attn_kv_cache_free_pages(cache), 1);
    ok(attn_kv_cache_truncate(cache, 1, 0));
    ok(attn_kv_cache_reset(cache, 2));
    assert_int_equal(attn_kv_cache_free_pages(cache), 5);
    ok(append_some(cache, 1, 10));
    ok(attn_kv_cache_reset(cache, -1));
    assert_int_equal(attn_kv_cache_free_pages(cache), 5);
    attn_kv_cache_destroy(cache);
}

/* All that have a page append to it: one of them keeps it, so one page fewer
 * will do. */
static void test_kv_cache__the_last_writer_keeps_the_page(void **state)
{
    (void)state;
    attn_kv_cache_params c = usual(ATTN_KV_CACHE_PAGED, ATTN_F32);
    attn_tensor k = keys(ATTN_F32, 3, 1, 6);
    attn_tensor v = keys(ATTN_F32, 3, 1, 4);
    for (int64_t pages = 2; pages <= 3; pages++) {
        c.num_pages = pages;
        attn_kv_cache *cache = make_cache(&c);
        ok(append_some(cache, 0, 2));
        ok(attn_kv_cache_share(cache, 1, 0, 2));
        ok(attn_kv_cache_share(cache, 2, 0, 2));
        assert_int_equal(attn_kv_cache_free_pages(cache), pages - 1);
        assert_int_equal(attn_kv_cache_append(NULL, cache, NULL, NULL, &k, &v),
                         pages == 3 ? ATTN_OK : ATTN_ERR_FULL);
        assert_int_equal(attn_kv_cache_free_pages(cache),
                         pages == 3 ? 0 : pages - 1);
        attn_kv_cache_destroy(cache);
    }
    kit_drop(&k);
    kit_drop(&v);
}

/* ---- Full ---- */

/* One of two sequences is full: neither gets a key, and it is named. */
static void test_kv_cache_append__all_or_nothing(void **state)
{
    (void)state;
    attn_tensor k = keys(ATTN_F32, 2, 3, 6);
    attn_tensor v = keys(ATTN_F32, 2, 3, 4);
    for (size_t n = 0; n < COUNT(kinds); n++) {
        attn_kv_cache_params c = usual(kinds[n], ATTN_F32);
        attn_kv_cache *cache = make_cache(&c);
        const bool ring = kinds[n] == ATTN_KV_CACHE_RING;
        static const int64_t seqs[] = {2, 1};
        static const int64_t fewer[] = {3, 2};
        ok(append_some(cache, 1, 8));
        const attn_status status =
            attn_kv_cache_append(NULL, cache, seqs, NULL, &k, &v);
        assert_int_equal(status, ring ? ATTN_OK : ATTN_ERR_FULL);
        assert_int_equal(attn_kv_cache_length(cache, 2), ring ? 3 : 0);
        assert_int_equal(attn_kv_cache_length(cache, 1), ring ? 11 : 8);
        assert_int_equal(attn_kv_cache_first(cache, 1), ring ? 1 : 0);
        if (!ring)
            assert_string_equal(attn_last_error(),
                                "attn_kv_cache_append: sequence 1 has 8 keys "
                                "and gets 3 more; the capacity is 10");
        ok(attn_kv_cache_append(NULL, cache, seqs, fewer, &k, &v));
        attn_kv_cache_destroy(cache);
    }
    attn_kv_cache_params c = usual(ATTN_KV_CACHE_PAGED, ATTN_F32);
    c.num_pages = 3;
    attn_kv_cache *cache = make_cache(&c);
    static const int64_t seqs[] = {2, 1};
    static const int64_t fewer[] = {3, 2};
    ok(append_some(cache, 1, 8));
    ok(append_some(cache, 1, 0));
    assert_int_equal(attn_kv_cache_append(NULL, cache, seqs, fewer, &k, &v),
                     ATTN_ERR_FULL);
    assert_string_equal(
        attn_last_error(),
        "attn_kv_cache_append: sequence 1 has 8 keys and gets 2 more; it and "
        "those before it in the call need 2 new pages, but of 3 in the pool 1 "
        "are free");
    assert_int_equal(attn_kv_cache_length(cache, 2), 0);
    assert_int_equal(attn_kv_cache_free_pages(cache), 1);
    attn_kv_cache_destroy(cache);
    kit_drop(&k);
    kit_drop(&v);
}

/* ---- Refusals ---- */

static void expect_refused(const char *call, attn_status want,
                           attn_status status, const char *word)
{
    const char *sentence = attn_last_error();
    if (status != want)
        fail_msg("%s: %d (%s) in place of %d", call, (int)status,
                 status == ATTN_OK ? "" : sentence, (int)want);
    if (strncmp(sentence, call, strlen(call)) != 0 ||
        sentence[strlen(call)] != ':' || strstr(sentence, word) == NULL)
        fail_msg("'%s' does not begin with %s or lacks '%s'", sentence, call,
                 word);
}

static void test_kv_cache_create__every_refusal(void **state)
{
    (void)state;
    static const char call[] = "attn_kv_cache_create";
    attn_tensor table = kit_make(ATTN_F32, 1, 1, 10, 3);
    attn_tensor shorter = kit_make(ATTN_F32, 1, 1, 9, 3);
    attn_tensor wide = kit_make(ATTN_F32, 1, 1, 10, 4);
    attn_tensor doubles = kit_make(ATTN_F64, 1, 1, 10, 3);
    attn_tensor batch = kit_view(ATTN_F32, table.data, 2, 1, 5, 3);
    attn_tensor unset = table;
    attn_tensor odd = table;
    attn_tensor far = table;
    attn_kv_cache *cache = NULL;
    unset.reserved = 7;
    odd.data = (unsigned char *)table.data + 1;
    far.stride[2] = INT64_MAX;
    const attn_kv_cache_params paged = usual(ATTN_KV_CACHE_PAGED, ATTN_F16);
    expect_refused(call, ATTN_ERR_NULL,
                   attn_kv_cache_create(NULL, NULL, &cache), "params");
    expect_refused(call, ATTN_ERR_NULL,
                   attn_kv_cache_create(NULL, &paged, NULL), "cache");
#define REFUSED(status, word, ...)                                           \
    do {                                                                     \
        attn_kv_cache_params p = paged;                                      \
        __VA_ARGS__;                                                         \
        expect_refused(call, status, attn_kv_cache_create(NULL, &p, &cache), \
                       word);                                                \
        assert_null(cache);                                                  \
    } while (0)
#define TURNED(c, s) p.rotary_style = 2, p.cos_table = (c), p.sin_table = (s)
    REFUSED(ATTN_ERR_VALUE, "kind", p.kind = 0);
    REFUSED(ATTN_ERR_VALUE, "kind", p.kind = 4);
    REFUSED(ATTN_ERR_TYPE, "dtype", p.dtype = 0);
    REFUSED(ATTN_ERR_TYPE, "dtype", p.dtype = ATTN_U8);
    REFUSED(ATTN_ERR_TYPE, "dtype", p.dtype = 6);
    REFUSED(ATTN_ERR_UNSUPPORTED, "reserved", p.reserved = 1);
    REFUSED(ATTN_ERR_SIZE, "num_seqs", p.num_seqs = -1);
    REFUSED(ATTN_ERR_SIZE, "kv_heads", p.kv_heads = -1);
    REFUSED(ATTN_ERR_SIZE, "capacity", p.capacity = -1);
    REFUSED(ATTN_ERR_SIZE, "width", p.width = -1);
    REFUSED(ATTN_ERR_SIZE, "v_width", p.v_width = -1);
    REFUSED(ATTN_ERR_SIZE, "page_size", p.page_size = -1);
    REFUSED(ATTN_ERR_SIZE, "num_pages", p.num_pages = -1);
    REFUSED(ATTN_ERR_SIZE, "pages", p.capacity = INT64_MAX / 4);
    REFUSED(ATTN_ERR_SIZE, "addressed", p.capacity = INT64_MAX / 4,
            p.kind = ATTN_KV_CACHE_RING, p.page_size = 0);
    REFUSED(ATTN_ERR_SIZE, "addressed", p.num_seqs = INT64_MAX / 2);
    REFUSED(ATTN_ERR_SIZE, "addressed", p.width = INT64_MAX / 4);
    REFUSED(ATTN_ERR_SIZE, "addressed", p.v_width = INT64_MAX / 4);
    REFUSED(ATTN_ERR_SIZE, "addressed", p.kv_heads = INT64_MAX / 4);
    REFUSED(ATTN_ERR_SIZE, "addressed", p.kind = 1, p.page_size = 0,
            p.kv_heads = 0, p.capacity = INT64_MAX / 2);
    REFUSED(ATTN_ERR_SIZE, "pages", p.num_pages = INT64_C(1) << 31);
    REFUSED(ATTN_ERR_VALUE, "page_size", p.kind = ATTN_KV_CACHE_RING);
    REFUSED(ATTN_ERR_VALUE, "num_pages", p.kind = ATTN_KV_CACHE_CONTIGUOUS,
            p.page_size = 0, p.num_pages = 5);
    REFUSED(ATTN_ERR_VALUE, "rotary_style", p.rotary_style = 3);
    REFUSED(ATTN_ERR_VALUE, "rotary_style", p.rotary_style = -1);
    REFUSED(ATTN_ERR_VALUE, "cos_table", p.cos_table = &table);
    REFUSED(ATTN_ERR_VALUE, "sin_table", p.sin_table = &table);
    REFUSED(ATTN_ERR_NULL, "cos_table", TURNED(NULL, &table));
    REFUSED(ATTN_ERR_NULL, "sin_table", TURNED(&table, NULL));
    REFUSED(ATTN_ERR_SHAPE, "sin_table", TURNED(&table, &shorter));
    REFUSED(ATTN_ERR_SHAPE, "cos_table", TURNED(&batch, &batch));
    REFUSED(ATTN_ERR_SHAPE, "width", TURNED(&wide, &wide));
    REFUSED(ATTN_ERR_TYPE, "cos_table", TURNED(&doubles, &table));
    REFUSED(ATTN_ERR_TYPE, "cos_table", p.dtype = ATTN_F64,
            TURNED(&table, &table));
    REFUSED(ATTN_ERR_UNSUPPORTED, "sin_table", TURNED(&table, &unset));
    REFUSED(ATTN_ERR_ALIGN, "cos_table", TURNED(&odd, &table));
    REFUSED(ATTN_ERR_STRIDE, "sin_table", TURNED(&table, &far));
    attn_tensor *made[] = {&table, &shorter, &wide, &doubles};
    for (size_t n = 0; n < COUNT(made); n++)
        kit_drop(made[n]);
}

/* The state of a cache, which no refusal changes. */
struct snapshot {
    int64_t length[3], first[3], free_pages;
    unsigned char keys[3][2 * 10 * 6 * 8];
};

static struct snapshot snapshot_of(const attn_kv_cache *cache, attn_dtype dtype)
{
    struct snapshot s;
    memset(&s, 0, sizeof s);
    for (int64_t seq = 0; seq < 3; seq++) {
        static _Alignas(64) unsigned char work[4096];
        attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
        attn_tensor k;
        attn_tensor v;
        s.length[seq] = attn_kv_cache_length(cache, seq);
        s.first[seq] = attn_kv_cache_first(cache, seq);
        ok(attn_kv_cache_view(cache, 1, &seq, &p, &k, &v, work, sizeof work));
        for (int64_t j = 0; j < p.kv_lens[0] && p.page_table == NULL; j++)
            memcpy(s.keys[seq] + j * 48,
                   (unsigned char *)k.data +
                       (p.ring_starts ? (p.ring_starts[0] + j) % 10 : j) * 6 *
                           (int64_t)bytes_of(dtype),
                   6 * bytes_of(dtype));
    }
    s.free_pages = attn_kv_cache_free_pages(cache);
    return s;
}

static void append_refusals(int32_t kind)
{
    static const char call[] = "attn_kv_cache_append";
    const attn_kv_cache_params c = usual(kind, ATTN_F16);
    attn_kv_cache *cache = make_cache(&c);
    static const int64_t seqs[] = {2, 0}, far[] = {0, 3}, low[] = {-1, 0};
    static const int64_t twice[] = {1, 1}, lens[] = {3, 4}, less[] = {-1, 2};
    attn_tensor k = keys(ATTN_F32, 2, 3, 6), v = keys(ATTN_F32, 2, 3, 4);
    attn_tensor d = keys(ATTN_F64, 2, 3, 6), bad = k;
    attn_tensor inside;
    attn_tensor ignored;
    ok(append_some(cache, 0, 7));
    ok(append_some(cache, 1, 2));
    const struct snapshot before = snapshot_of(cache, ATTN_F16);
#define APPEND_REFUSED(status, word, cache, seqs, lens, k, v) \
    expect_refused(call, status,                              \
                   attn_kv_cache_append(NULL, cache, seqs, lens, k, v), word)
    APPEND_REFUSED(ATTN_ERR_NULL, "cache", NULL, NULL, NULL, &k, &v);
    APPEND_REFUSED(ATTN_ERR_NULL, "k is NULL", cache, NULL, NULL, NULL, &v);
    APPEND_REFUSED(ATTN_ERR_NULL, "v is NULL", cache, NULL, NULL, &k, NULL);
    APPEND_REFUSED(ATTN_ERR_VALUE, "seqs[1] is 3", cache, far, NULL, &k, &v);
    APPEND_REFUSED(ATTN_ERR_VALUE, "seqs[0] is -1", cache, low, NULL, &k, &v);
    APPEND_REFUSED(ATTN_ERR_VALUE, "second time", cache, twice, NULL, &k, &v);
    APPEND_REFUSED(ATTN_ERR_VALUE, "new_lens[1] is 4", cache, seqs, lens, &k,
                   &v);
    APPEND_REFUSED(ATTN_ERR_VALUE, "new_lens[0] is -1", cache, seqs, less, &k,
                   &v);
    APPEND_REFUSED(ATTN_ERR_TYPE, "F64", cache, seqs, NULL, &d, &v);
    APPEND_REFUSED(ATTN_ERR_TYPE, "F64", cache, seqs, NULL, &k, &d);
    bad.dtype = ATTN_BF16;
    APPEND_REFUSED(ATTN_ERR_TYPE, "BF16", cache, seqs, NULL, &bad, &v);
    bad.dtype = ATTN_U8;
    APPEND_REFUSED(ATTN_ERR_TYPE, "U8", cache, seqs, NULL, &bad, &v);
    bad.dtype = 9;
    APPEND_REFUSED(ATTN_ERR_TYPE, "9", cache, seqs, NULL, &bad, &v);
    bad.dtype = ATTN_F16;
    APPEND_REFUSED(ATTN_ERR_TYPE, "same type", cache, seqs, NULL, &bad, &v);
    bad = k;
    bad.shape[0] = 1;
    APPEND_REFUSED(ATTN_ERR_SHAPE, "(B,Hkv,T,Dv)", cache, seqs, NULL, &bad, &v);
    bad = k;
    bad.shape[1] = 1;
    APPEND_REFUSED(ATTN_ERR_SHAPE, "(B,Hkv,T,D)", cache, seqs, NULL, &bad, &v);
    bad = k;
    bad.shape[2] = 2;
    APPEND_REFUSED(ATTN_ERR_SHAPE, "(B,Hkv,T,Dv)", cache, seqs, NULL, &bad, &v);
    bad = k;
    bad.shape[3] = 5;
    APPEND_REFUSED(ATTN_ERR_SHAPE, "(B,Hkv,T,D)", cache, seqs, NULL, &bad, &v);
    bad = v;
    bad.shape[3] = 3;
    APPEND_REFUSED(ATTN_ERR_SHAPE, "(B,Hkv,T,Dv)", cache, seqs, NULL, &k, &bad);
    bad = k;
    bad.shape[2] = -3;
    APPEND_REFUSED(ATTN_ERR_SIZE, "-3", cache, seqs, NULL, &bad, &v);
    bad = k;
    bad.stride[0] = INT64_MAX;
    APPEND_REFUSED(ATTN_ERR_STRIDE, "k", cache, seqs, NULL, &bad, &v);
    bad = v;
    bad.data = (unsigned char *)v.data + 2;
    APPEND_REFUSED(ATTN_ERR_ALIGN, "v.data", cache, seqs, NULL, &k, &bad);
    bad = v;
    bad.reserved = 1;
    APPEND_REFUSED(ATTN_ERR_UNSUPPORTED, "v", cache, seqs, NULL, &k, &bad);
    (void)seen(cache, 0, &inside, &ignored);
    bad = kit_view(ATTN_F16, inside.data, 2, 2, 3, 6);
    ignored = kit_view(ATTN_F16, v.data, 2, 2, 3, 4);
    APPEND_REFUSED(ATTN_ERR_OVERLAP, "the cache", cache, seqs, NULL, &bad,
                   &ignored);
    if (kind != ATTN_KV_CACHE_RING) {
        attn_tensor many = keys(ATTN_F32, 3, 4, 6);
        attn_tensor values = keys(ATTN_F32, 3, 4, 4);
        APPEND_REFUSED(ATTN_ERR_FULL, "sequence 0", cache, NULL, NULL, &many,
                       &values);
        kit_drop(&many);
        kit_drop(&values);
    }
    attn_tensor four_k = keys(ATTN_F32, 4, 1, 6);
    attn_tensor four_v = keys(ATTN_F32, 4, 1, 4);
    APPEND_REFUSED(ATTN_ERR_VALUE, "seqs is NULL", cache, NULL, NULL, &four_k,
                   &four_v);
    const struct snapshot after = snapshot_of(cache, ATTN_F16);
    assert_memory_equal(&before, &after, sizeof before);
    attn_kv_cache_destroy(cache);
    attn_tensor *made[] = {&k, &v, &d, &four_k, &four_v};
    for (size_t n = 0; n < COUNT(made); n++)
        kit_drop(made[n]);
}

static void test_kv_cache_append__every_refusal(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(kinds); n++)
        append_refusals(kinds[n]);
}

/* Positions beyond the tables: not full, but nothing to turn by. */
static void test_kv_cache_append__positions_need_tables(void **state)
{
    (void)state;
    attn_tensor table = kit_make(ATTN_F32, 1, 1, 5, 3);
    for (size_t n = 0; n < COUNT(kinds); n++) {
        attn_kv_cache_params c = usual(kinds[n], ATTN_BF16);
        c.rotary_style = ATTN_ROTARY_HALVES;
        c.cos_table = &table;
        c.sin_table = &table;
        attn_kv_cache *cache = make_cache(&c);
        ok(append_some(cache, 1, 4));
        ok(append_some(cache, 1, 1));
        ok(append_some(cache, 1, 0));
        expect_refused("attn_kv_cache_append", ATTN_ERR_VALUE,
                       append_some(cache, 1, 1), "positions 0 to 4");
        assert_int_equal(attn_kv_cache_length(cache, 1), 5);
        attn_kv_cache_destroy(cache);
    }
    kit_drop(&table);
}

static void test_kv_cache_attend__every_refusal(void **state)
{
    (void)state;
    static const char call[] = "attn_kv_cache_attend";
    static const int64_t far[] = {0, 3}, lens[] = {1, 1}, cu[] = {0, 1, 2};
    static const int32_t pages[] = {0, 0};
    attn_tensor q = kit_make(ATTN_F32, 2, 4, 3, 6);
    attn_tensor out = kit_make(ATTN_F32, 2, 4, 3, 4), copy = out;
    attn_tensor doubles = kit_make(ATTN_F64, 2, 4, 3, 6), bad;
    copy.data = malloc((size_t)kit_elements(&out) * sizeof(float));
    memcpy(copy.data, out.data, (size_t)kit_elements(&out) * sizeof(float));
    for (size_t n = 0; n < COUNT(kinds); n++) {
        const attn_kv_cache_params c = usual(kinds[n], ATTN_F32);
        attn_kv_cache *cache = make_cache(&c);
        attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
        const attn_sdpa_params init = p;
        ok(append_some(cache, 0, 7));
#define ATTEND_REFUSED(status, word, cache, seqs, params, q, out)           \
    expect_refused(call, status,                                            \
                   attn_kv_cache_attend(NULL, cache, seqs, params, q, out), \
                   word)
        ATTEND_REFUSED(ATTN_ERR_NULL, "cache", NULL, NULL, &p, &q, &out);
        ATTEND_REFUSED(ATTN_ERR_NULL, "q is NULL", cache, NULL, &p, NULL, &out);
        ATTEND_REFUSED(ATTN_ERR_NULL, "out", cache, NULL, &p, &q, NULL);
        ATTEND_REFUSED(ATTN_ERR_VALUE, "seqs[1] is 3", cache, far, &p, &q,
                       &out);
        ATTEND_REFUSED(ATTN_ERR_TYPE, "F64", cache, NULL, &p, &doubles, &out);
        ATTEND_REFUSED(ATTN_ERR_TYPE, "F64", cache, NULL, &p, &q, &doubles);
        p.cu_k = cu;
        ATTEND_REFUSED(ATTN_ERR_VALUE, "cu_k", cache, NULL, &p, &q, &out);
        p = init;
        p.kv_lens = lens;
        ATTEND_REFUSED(ATTN_ERR_VALUE, "kv_lens", cache, NULL, &p, &q, &out);
        p = init;
        p.page_table = pages;
        ATTEND_REFUSED(ATTN_ERR_VALUE, "page_table", cache, NULL, &p, &q, &out);
        p = init;
        p.pages_per_seq = 1;
        ATTEND_REFUSED(ATTN_ERR_VALUE, "pages_per_seq", cache, NULL, &p, &q,
                       &out);
        p = init;
        p.ring_starts = lens;
        ATTEND_REFUSED(ATTN_ERR_VALUE, "ring_starts", cache, NULL, &p, &q,
                       &out);
        p = init;
        p.kv_offsets = lens;
        ATTEND_REFUSED(ATTN_ERR_VALUE, "kv_offsets", cache, NULL, &p, &q, &out);
        p = init;
        p.cu_q = cu;
        p.num_seqs = -1;
        ATTEND_REFUSED(ATTN_ERR_SIZE, "batch", cache, NULL, &p, &q, &out);
        p.num_seqs = 4;
        ATTEND_REFUSED(ATTN_ERR_VALUE, "seqs is NULL", cache, NULL, &p, &q,
                       &out);
        /* What attn_sdpa refuses, under this name. */
        p = init;
        p.causal = 2;
        ATTEND_REFUSED(ATTN_ERR_VALUE, "causal", cache, NULL, &p, &q, &out);
        p = init;
        p.struct_size = 8;
        ATTEND_REFUSED(ATTN_ERR_STRUCT, "struct_size", cache, NULL, &p, &q,
                       &out);
        bad = q;
        bad.shape[1] = 3;
        ATTEND_REFUSED(ATTN_ERR_SHAPE, "heads", cache, NULL, &init, &bad, &out);
        bad = q;
        bad.shape[3] = 5;
        ATTEND_REFUSED(ATTN_ERR_SHAPE, "width", cache, NULL, &init, &bad, &out);
        /* Into the cache itself, also where no sequence of the call is. */
        attn_tensor k;
        attn_tensor v;
        (void)seen(cache, 0, &k, &v);
        bad = kit_view(ATTN_F32, k.data, 1, 2, 1, 4);
        attn_tensor one = kit_view(ATTN_F32, q.data, 1, 2, 1, 6);
        ATTEND_REFUSED(ATTN_ERR_OVERLAP, "shares memory", cache, &far[0], &init,
                       &one, &bad);
        static const int64_t other = 2;
        ATTEND_REFUSED(ATTN_ERR_OVERLAP,
                       kinds[n] == ATTN_KV_CACHE_PAGED ? "shares memory"
                                                       : "the cache",
                       cache, &other, &init, &one, &bad);
        attn_kv_cache_destroy(cache);
    }
    assert_true(kit_same(&out, &copy));
    attn_tensor *made[] = {&q, &out, &copy, &doubles};
    for (size_t n = 0; n < COUNT(made); n++)
        kit_drop(made[n]);
}

static void test_kv_cache_view__every_refusal(void **state)
{
    (void)state;
    static const char call[] = "attn_kv_cache_view";
    static const char query[] = "attn_kv_cache_view_workspace";
    static const int64_t far[] = {0, 3}, cu[] = {0, 1, 2};
    static _Alignas(64) unsigned char work[4096];
    for (size_t n = 0; n < COUNT(kinds); n++) {
        const attn_kv_cache_params c = usual(kinds[n], ATTN_F32);
        attn_kv_cache *cache = make_cache(&c);
        const attn_sdpa_params init = ATTN_SDPA_PARAMS_INIT;
        attn_sdpa_params p = init;
        attn_tensor k;
        attn_tensor v;
        size_t bytes;
        size_t alignment;
        memset(&k, 0x5A, sizeof k);
        memset(&v, 0x5A, sizeof v);
        const attn_tensor before = k;
        ok(append_some(cache, 0, 7));
        expect_refused(
            query, ATTN_ERR_NULL,
            attn_kv_cache_view_workspace(NULL, 1, &bytes, &alignment), "cache");
        expect_refused(query, ATTN_ERR_NULL,
                       attn_kv_cache_view_workspace(cache, 1, NULL, &alignment),
                       "bytes");
        expect_refused(query, ATTN_ERR_NULL,
                       attn_kv_cache_view_workspace(cache, 1, &bytes, NULL),
                       "alignment");
        expect_refused(
            query, ATTN_ERR_SIZE,
            attn_kv_cache_view_workspace(cache, -1, &bytes, &alignment), "-1");
        expect_refused(query, ATTN_ERR_SIZE,
                       attn_kv_cache_view_workspace(cache, INT64_MAX / 2,
                                                    &bytes, &alignment),
                       "addressed");
        ok(attn_kv_cache_view_workspace(cache, 2, &bytes, &alignment));
        assert_true(bytes <= sizeof work && alignment == 64);
#define VIEW_REFUSED(status, word, cache, batch, seqs, p, k, v, work, bytes) \
    expect_refused(                                                          \
        call, status,                                                        \
        attn_kv_cache_view(cache, batch, seqs, p, k, v, work, bytes), word)
        VIEW_REFUSED(ATTN_ERR_NULL, "cache", NULL, 2, NULL, &p, &k, &v, work,
                     bytes);
        VIEW_REFUSED(ATTN_ERR_NULL, "params", cache, 2, NULL, NULL, &k, &v,
                     work, bytes);
        VIEW_REFUSED(ATTN_ERR_NULL, "k is NULL", cache, 2, NULL, &p, NULL, &v,
                     work, bytes);
        VIEW_REFUSED(ATTN_ERR_NULL, "v is NULL", cache, 2, NULL, &p, &k, NULL,
                     work, bytes);
        VIEW_REFUSED(ATTN_ERR_NULL, "work is NULL", cache, 2, NULL, &p, &k, &v,
                     NULL, bytes);
        VIEW_REFUSED(ATTN_ERR_WORKSPACE, "work_bytes", cache, 2, NULL, &p, &k,
                     &v, work, bytes - 1);
        VIEW_REFUSED(ATTN_ERR_WORKSPACE, "multiple", cache, 2, NULL, &p, &k, &v,
                     work + 8, bytes);
        VIEW_REFUSED(ATTN_ERR_SIZE, "batch", cache, -2, NULL, &p, &k, &v, work,
                     bytes);
        VIEW_REFUSED(ATTN_ERR_VALUE, "seqs is NULL", cache, 4, NULL, &p, &k, &v,
                     work, sizeof work);
        VIEW_REFUSED(ATTN_ERR_VALUE, "seqs[1]", cache, 2, far, &p, &k, &v, work,
                     bytes);
        p.struct_size = offsetof(attn_sdpa_params, kv_offsets);
        VIEW_REFUSED(ATTN_ERR_STRUCT, "struct_size", cache, 2, NULL, &p, &k, &v,
                     work, bytes);
        p = init;
        p.cu_q = cu;
        p.num_seqs = 1;
        if (kinds[n] == ATTN_KV_CACHE_RING)
            VIEW_REFUSED(ATTN_ERR_UNSUPPORTED, "ring", cache, 2, NULL, &p, &k,
                         &v, work, bytes);
        else
            VIEW_REFUSED(ATTN_ERR_VALUE, "num_seqs", cache, 2, NULL, &p, &k, &v,
                         work, bytes);
        assert_null(p.kv_lens);
        assert_memory_equal(&k, &before, sizeof k);
        assert_memory_equal(&v, &before, sizeof v);
        attn_kv_cache_destroy(cache);
    }
}

static void test_kv_cache_lengths__every_refusal(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(kinds); n++) {
        const attn_kv_cache_params c = usual(kinds[n], ATTN_F32);
        attn_kv_cache *cache = make_cache(&c);
        const bool ring = kinds[n] == ATTN_KV_CACHE_RING;
        ok(append_some(cache, 0, 7));
        if (ring)
            ok(append_some(cache, 0, 7)); /* 4 to 13 are held */
        expect_refused("attn_kv_cache_length", ATTN_ERR_NULL,
                       (attn_status)attn_kv_cache_length(NULL, 0), "cache");
        expect_refused("attn_kv_cache_length", ATTN_ERR_VALUE,
                       (attn_status)attn_kv_cache_length(cache, 3), "3");
        expect_refused("attn_kv_cache_first", ATTN_ERR_NULL,
                       (attn_status)attn_kv_cache_first(NULL, 0), "cache");
        expect_refused("attn_kv_cache_first", ATTN_ERR_VALUE,
                       (attn_status)attn_kv_cache_first(cache, -1), "-1");
        expect_refused("attn_kv_cache_free_pages", ATTN_ERR_NULL,
                       (attn_status)attn_kv_cache_free_pages(NULL), "cache");
        expect_refused("attn_kv_cache_truncate", ATTN_ERR_NULL,
                       attn_kv_cache_truncate(NULL, 0, 0), "cache");
        expect_refused("attn_kv_cache_truncate", ATTN_ERR_VALUE,
                       attn_kv_cache_truncate(cache, -1, 0), "seq is -1");
        expect_refused("attn_kv_cache_truncate", ATTN_ERR_VALUE,
                       attn_kv_cache_truncate(cache, 0, ring ? 15 : 8),
                       ring ? "[4, 14]" : "[0, 7]");
        expect_refused("attn_kv_cache_truncate", ATTN_ERR_VALUE,
                       attn_kv_cache_truncate(cache, 0, ring ? 3 : -1),
                       ring ? "[4, 14]" : "[0, 7]");
        expect_refused("attn_kv_cache_reset", ATTN_ERR_NULL,
                       attn_kv_cache_reset(NULL, 0), "cache");
        expect_refused("attn_kv_cache_reset", ATTN_ERR_VALUE,
                       attn_kv_cache_reset(cache, 3), "seq is 3");
        expect_refused("attn_kv_cache_reset", ATTN_ERR_VALUE,
                       attn_kv_cache_reset(cache, -2), "seq is -2");
        expect_refused("attn_kv_cache_share", ATTN_ERR_NULL,
                       attn_kv_cache_share(NULL, 1, 0, 0), "cache");
        expect_refused("attn_kv_cache_share", ATTN_ERR_VALUE,
                       attn_kv_cache_share(cache, 3, 0, 0), "to is 3");
        expect_refused("attn_kv_cache_share", ATTN_ERR_VALUE,
                       attn_kv_cache_share(cache, 1, -1, 0), "from is -1");
        expect_refused("attn_kv_cache_share", ATTN_ERR_VALUE,
                       attn_kv_cache_share(cache, 1, 1, 0), "another");
        expect_refused("attn_kv_cache_share", ATTN_ERR_VALUE,
                       attn_kv_cache_share(cache, 0, 1, 0), "length");
        expect_refused("attn_kv_cache_share", ATTN_ERR_VALUE,
                       attn_kv_cache_share(cache, 1, 0, ring ? 3 : 8),
                       "length");
        assert_int_equal(attn_kv_cache_length(cache, 0), ring ? 14 : 7);
        assert_int_equal(attn_kv_cache_length(cache, 1), 0);
        attn_kv_cache_destroy(cache);
    }
    attn_kv_cache_destroy(NULL);
}

/* ---- Sizes of 0 ---- */

static void test_kv_cache__zero_sizes_are_fine(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(kinds); n++)
        for (int zero = 0; zero < 5; zero++) {
            attn_kv_cache_params c = usual(kinds[n], ATTN_F16);
            int64_t *sizes[] = {&c.num_seqs, &c.kv_heads, &c.capacity,
                                &c.width};
            if (zero < 4)
                *sizes[zero] = 0;
            const int64_t len = c.capacity > 0 ? 3 : 0;
            const int64_t heads = c.kv_heads, batch = c.num_seqs;
            attn_tensor k = kit_make(ATTN_F32, batch, heads, len, c.width);
            attn_tensor v = kit_make(ATTN_F32, batch, heads, len, 4);
            attn_tensor q = kit_make(ATTN_F32, batch, heads, 2, c.width);
            attn_tensor out = kit_make(ATTN_F32, batch, heads, 2, 4);
            attn_kv_cache *cache = make_cache(&c);
            /* Nothing is held yet: rows of zeros. */
            kit_fill_with(&out, 7.0);
            ok(attn_kv_cache_attend(NULL, cache, NULL, NULL, &q, &out));
            for (int64_t e = 0; e < kit_elements(&out); e++)
                assert_true(fabs((double)((float *)out.data)[e]) <= 0.0);
            ok(attn_kv_cache_append(NULL, cache, NULL, NULL, &k, &v));
            ok(attn_kv_cache_attend(NULL, cache, NULL, NULL, &q, &out));
            if (batch > 0)
                assert_int_equal(attn_kv_cache_length(cache, 0), len);
            attn_kv_cache_destroy(cache);
            attn_tensor *made[] = {&k, &v, &q, &out};
            for (size_t t = 0; t < COUNT(made); t++)
                kit_drop(made[t]);
        }
}

/* A batch of none, and a call of none of the tokens. */
static void test_kv_cache__empty_calls_are_fine(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(kinds); n++) {
        const attn_kv_cache_params c = usual(kinds[n], ATTN_F64);
        attn_kv_cache *cache = make_cache(&c);
        const attn_tensor k = kit_view(ATTN_F64, NULL, 0, 2, 5, 6);
        const attn_tensor v = kit_view(ATTN_F64, NULL, 0, 2, 5, 4);
        static const int64_t none;
        static _Alignas(64) unsigned char work[4096];
        attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
        attn_tensor vk;
        attn_tensor vv;
        ok(attn_kv_cache_append(NULL, cache, NULL, NULL, &k, &v));
        ok(attn_kv_cache_append(NULL, cache, &none, &none, &k, &v));
        ok(attn_kv_cache_attend(NULL, cache, NULL, NULL, &k, &v));
        ok(attn_kv_cache_view(cache, 0, NULL, &p, &vk, &vv, work, sizeof work));
        ok(attn_sdpa_check(NULL, &p, &k, &vk, &vv, &v));
        attn_kv_cache_destroy(cache);
    }
}

/* Keys without any number go on counting, up to the last position there is. */
static void test_kv_cache_append__positions_end(void **state)
{
    (void)state;
    attn_kv_cache_params c = ATTN_KV_CACHE_PARAMS_INIT;
    const int64_t half = INT64_C(1) << 62;
    const attn_tensor k = kit_view(ATTN_F32, NULL, 1, 1, half, 0);
    c.kind = ATTN_KV_CACHE_RING;
    c.dtype = ATTN_F32;
    c.num_seqs = 1;
    c.kv_heads = 1;
    c.capacity = 5;
    attn_kv_cache *cache = make_cache(&c);
    ok(attn_kv_cache_append(NULL, cache, NULL, NULL, &k, &k));
    expect_refused("attn_kv_cache_append", ATTN_ERR_SIZE,
                   attn_kv_cache_append(NULL, cache, NULL, NULL, &k, &k),
                   "positions");
    assert_int_equal(attn_kv_cache_length(cache, 0), half);
    attn_kv_cache_destroy(cache);
}

/* ---- Memory ---- */

static atomic_long attempts, live;
static long fail_at; /* 0: none */

static void *counted_alloc(void *user, size_t bytes, size_t alignment)
{
    (void)user;
    if (atomic_fetch_add(&attempts, 1) + 1 == fail_at)
        return NULL;
    void *p = aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
    assert_non_null(p);
    memset(p, 0xFF, bytes); /* nobody may count on zeros */
    atomic_fetch_add(&live, 1);
    return p;
}

static void counted_free(void *user, void *p)
{
    (void)user;
    atomic_fetch_sub(&live, p != NULL);
    free(p);
}

static attn_context *counted_context(int32_t threads)
{
    attn_context_params p = ATTN_CONTEXT_PARAMS_INIT;
    attn_context *context = NULL;
    p.num_threads = threads;
    p.alloc = counted_alloc;
    p.free = counted_free;
    ok(attn_context_create(&context, &p));
    return context;
}

/* Every allocation of every call fails once: a status, and nothing else. */
static void test_kv_cache__each_failed_allocation_is_a_status(void **state)
{
    (void)state;
    attn_tensor q = keys(ATTN_F32, 3, 2, 6);
    attn_tensor k = keys(ATTN_F32, 3, 2, 6);
    attn_tensor v = keys(ATTN_F32, 3, 2, 4);
    attn_tensor out = keys(ATTN_F32, 3, 2, 4);
    attn_tensor want = keys(ATTN_F32, 3, 2, 4);
    for (size_t n = 0; n < COUNT(kinds); n++) {
        const attn_kv_cache_params c = usual(kinds[n], ATTN_F32);
        int refusals = 0;
        bool reached = true;
        for (long at = 1; reached; at++) {
            attn_context *context = counted_context(2);
            attn_kv_cache *cache = NULL;
            atomic_store(&attempts, 0);
            fail_at = at;
            attn_status status = attn_kv_cache_create(context, &c, &cache);
            if (status == ATTN_ERR_NOMEM) {
                assert_null(cache);
                assert_non_null(
                    strstr(attn_last_error(), "attn_kv_cache_create: no"));
                refusals++;
                ok(attn_kv_cache_create(context, &c, &cache));
            }
            /* Appending takes no memory. */
            const long before = atomic_load(&attempts);
            ok(attn_kv_cache_append(NULL, cache, NULL, NULL, &k, &v));
            assert_int_equal(atomic_load(&attempts), before);
            kit_fill_with(&out, -7.0);
            status = attn_kv_cache_attend(context, cache, NULL, NULL, &q, &out);
            if (status == ATTN_ERR_NOMEM) {
                assert_non_null(strstr(attn_last_error(), "attend: no memory"));
                assert_true((double)((float *)out.data)[0] <= -7.0);
                refusals++;
                status =
                    attn_kv_cache_attend(context, cache, NULL, NULL, &q, &out);
            }
            ok(status);
            reached = atomic_load(&attempts) >= at;
            fail_at = 0;
            if (at == 1)
                memcpy(want.data, out.data,
                       (size_t)kit_elements(&out) * sizeof(float));
            assert_true(kit_same(&out, &want));
            attn_kv_cache_destroy(cache);
            attn_context_destroy(context);
            assert_int_equal(atomic_load(&live), 0);
        }
        assert_true(refusals >= 2);
    }
    attn_tensor *made[] = {&q, &k, &v, &out, &want};
    for (size_t n = 0; n < COUNT(made); n++)
        kit_drop(made[n]);
}

/* A loop of steps takes memory in its first one only. */
static void test_kv_cache__a_decode_loop_does_not_allocate(void **state)
{
    (void)state;
    attn_tensor q = keys(ATTN_F32, 3, 1, 6);
    attn_tensor k = keys(ATTN_F32, 3, 1, 6);
    attn_tensor v = keys(ATTN_F32, 3, 1, 4);
    attn_tensor out = keys(ATTN_F32, 3, 1, 4);
    for (size_t n = 0; n < COUNT(kinds); n++) {
        const attn_kv_cache_params c = usual(kinds[n], ATTN_F16);
        attn_context *context = counted_context(1);
        attn_kv_cache *cache = NULL;
        ok(attn_kv_cache_create(context, &c, &cache));
        for (int step = 0; step < 10; step++) {
            if (step == 1)
                atomic_store(&attempts, 0);
            ok(attn_kv_cache_append(context, cache, NULL, NULL, &k, &v));
            ok(attn_kv_cache_attend(context, cache, NULL, NULL, &q, &out));
        }
        assert_int_equal(atomic_load(&attempts), 0);
        /* The cache outlives the context it was made with. */
        attn_context_destroy(context);
        ok(attn_kv_cache_attend(NULL, cache, NULL, NULL, &q, &out));
        attn_kv_cache_destroy(cache);
        assert_int_equal(atomic_load(&live), 0);
    }
    attn_tensor *made[] = {&q, &k, &v, &out};
    for (size_t n = 0; n < COUNT(made); n++)
        kit_drop(made[n]);
}

/* ---- Threads ---- */

/* Prompts long enough for several tasks: the same keys and the same results
 * with one thread and with four. */
static void test_kv_cache__threads_change_nothing(void **state)
{
    (void)state;
    enum { T = 700, D = 32 };
    attn_tensor table = kit_make(ATTN_F32, 1, 1, T, D / 2);
    attn_tensor q = kit_make(ATTN_F32, 2, 4, T, D);
    attn_tensor k = kit_make(ATTN_F32, 2, 2, T, D);
    attn_tensor out[2] = {kit_make(ATTN_F32, 2, 4, T, D),
                          kit_make(ATTN_F32, 2, 4, T, D)};
    for (size_t n = 0; n < COUNT(kinds); n++)
        for (size_t t = 0; t < COUNT(types); t++) {
            if (types[t] == ATTN_F64)
                continue;
            for (int threads = 0; threads < 2; threads++) {
                attn_kv_cache_params c = usual(kinds[n], types[t]);
                attn_sdpa_params p = ATTN_SDPA_PARAMS_INIT;
                attn_context *context = counted_context(threads ? 4 : 1);
                c.capacity = T;
                c.width = D;
                c.v_width = D;
                c.page_size = kinds[n] == ATTN_KV_CACHE_PAGED ? 16 : 0;
                c.rotary_style = ATTN_ROTARY_INTERLEAVED;
                c.cos_table = &table;
                c.sin_table = &table;
                p.causal = 1;
                attn_kv_cache *cache = make_cache(&c);
                ok(attn_kv_cache_append(context, cache, NULL, NULL, &k, &k));
                ok(attn_kv_cache_attend(context, cache, NULL, &p, &q,
                                        &out[threads]));
                attn_kv_cache_destroy(cache);
                attn_context_destroy(context);
            }
            assert_true(kit_same(&out[0], &out[1]));
        }
    attn_tensor *made[] = {&table, &q, &k, &out[0], &out[1]};
    for (size_t n = 0; n < COUNT(made); n++)
        kit_drop(made[n]);
}

/* Many readers of two caches at once. */
struct reader {
    const attn_kv_cache *caches[2];
    attn_tensor q, want[2];
    int wrong;
};

static void *read_caches(void *arg)
{
    struct reader *r = arg;
    attn_tensor out = r->want[0];
    float memory[2 * 2 * 2 * 4];
    out.data = memory;
    for (int n = 0; n < 200; n++) {
        static const int64_t seqs[2] = {2, 0};
        memset(memory, 0, sizeof memory);
        if (attn_kv_cache_attend(NULL, r->caches[n % 2], seqs, NULL, &r->q,
                                 &out) != ATTN_OK ||
            attn_kv_cache_length(r->caches[n % 2], 2) != 9 ||
            memcmp(memory, r->want[n % 2].data, sizeof memory) != 0)
            r->wrong++;
    }
    return NULL;
}

static void test_kv_cache__several_readers_and_caches(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(kinds); n++) {
        const attn_kv_cache_params c = usual(kinds[n], ATTN_BF16);
        attn_kv_cache *caches[2] = {make_cache(&c), make_cache(&c)};
        struct reader readers[4];
        pthread_t threads[COUNT(readers)];
        attn_tensor q = keys(ATTN_F32, 2, 2, 6);
        attn_tensor want[2] = {keys(ATTN_F32, 2, 2, 4),
                               keys(ATTN_F32, 2, 2, 4)};
        static const int64_t seqs[2] = {2, 0};
        for (int m = 0; m < 2; m++) {
            ok(append_some(caches[m], 0, 3 + m));
            ok(append_some(caches[m], 2, 9));
            ok(attn_kv_cache_attend(NULL, caches[m], seqs, NULL, &q, &want[m]));
        }
        assert_false(kit_same(&want[0], &want[1]));
        for (size_t t = 0; t < COUNT(readers); t++) {
            readers[t] = (struct reader){
                {caches[0], caches[1]}, q, {want[0], want[1]}, 0};
            assert_int_equal(
                pthread_create(&threads[t], NULL, read_caches, &readers[t]), 0);
        }
        for (size_t t = 0; t < COUNT(readers); t++) {
            assert_int_equal(pthread_join(threads[t], NULL), 0);
            assert_int_equal(readers[t].wrong, 0);
        }
        for (int m = 0; m < 2; m++) {
            attn_kv_cache_destroy(caches[m]);
            kit_drop(&want[m]);
        }
        kit_drop(&q);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_cache_append__rounds_as_convert_does),
        cmocka_unit_test(test_kv_cache_append__turns_as_rotary_does),
        cmocka_unit_test(test_kv_cache_attend__a_ring_is_a_window),
        cmocka_unit_test(test_kv_cache_attend__ragged_queries),
        cmocka_unit_test(test_kv_cache_share__both_sides_go_on),
        cmocka_unit_test(test_kv_cache__pages_are_counted),
        cmocka_unit_test(test_kv_cache__the_last_writer_keeps_the_page),
        cmocka_unit_test(test_kv_cache_append__all_or_nothing),
        cmocka_unit_test(test_kv_cache_create__every_refusal),
        cmocka_unit_test(test_kv_cache_append__every_refusal),
        cmocka_unit_test(test_kv_cache_append__positions_need_tables),
        cmocka_unit_test(test_kv_cache_attend__every_refusal),
        cmocka_unit_test(test_kv_cache_view__every_refusal),
        cmocka_unit_test(test_kv_cache_lengths__every_refusal),
        cmocka_unit_test(test_kv_cache__zero_sizes_are_fine),
        cmocka_unit_test(test_kv_cache__empty_calls_are_fine),
        cmocka_unit_test(test_kv_cache_append__positions_end),
        cmocka_unit_test(test_kv_cache__each_failed_allocation_is_a_status),
        cmocka_unit_test(test_kv_cache__a_decode_loop_does_not_allocate),
        cmocka_unit_test(test_kv_cache__threads_change_nothing),
        cmocka_unit_test(test_kv_cache__several_readers_and_caches),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
