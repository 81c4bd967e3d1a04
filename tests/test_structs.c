/*
 * test_structs.c - what a compiled program holds of attn.h: layouts and
 * constants (checked while compiling), and how options structs of other
 * sizes are read.
 */
#include "kit.h"

#include <stdlib.h>
#include <string.h>

/* Constants: the numbers never change. */
#define PIN(name, value) _Static_assert((name) == (value), #name)
PIN(ATTN_OK, 0);
PIN(ATTN_ERR_NULL, -1);
PIN(ATTN_ERR_SIZE, -2);
PIN(ATTN_ERR_SHAPE, -3);
PIN(ATTN_ERR_TYPE, -4);
PIN(ATTN_ERR_VALUE, -5);
PIN(ATTN_ERR_STRUCT, -6);
PIN(ATTN_ERR_UNSUPPORTED, -7);
PIN(ATTN_ERR_STRIDE, -8);
PIN(ATTN_ERR_ALIGN, -9);
PIN(ATTN_ERR_OVERLAP, -10);
PIN(ATTN_ERR_WORKSPACE, -11);
PIN(ATTN_ERR_NOMEM, -12);
PIN(ATTN_ERR_BLAS, -13);
PIN(ATTN_ERR_FULL, -14);
PIN(ATTN_F32, 1);
PIN(ATTN_F64, 2);
PIN(ATTN_U8, 3);
PIN(ATTN_MASK_KEEP, 1);
PIN(ATTN_MASK_DROP, 2);
PIN(ATTN_MASK_ADD, 3);
PIN(ATTN_MAX_MASKS, 4);
PIN(ATTN_WEIGHT_OUT_IN, 1);
PIN(ATTN_WEIGHT_IN_OUT, 2);
PIN(ATTN_SDPA_SCALE, 1);
PIN(ATTN_SDPA_WINDOW, 2);
PIN(ATTN_SDPA_BLAS_ONLY, 4);
PIN(ATTN_SDPA_ADD_D_Q, 0x100);
PIN(ATTN_SDPA_ADD_D_K, 0x200);
PIN(ATTN_SDPA_ADD_D_V, 0x400);
PIN(ATTN_SDPA_ADD_D_MASKS, 0x800);
PIN(ATTN_SDPA_ADD_D_ALIBI, 0x1000);
PIN(ATTN_SDPA_ADD_D_SINKS, 0x2000);
PIN(ATTN_SDPA_ADD_D_SCALE, 0x4000);
PIN(ATTN_ALIGN_TOP_LEFT, 1);
PIN(ATTN_ALIGN_BOTTOM_RIGHT, 2);
PIN(ATTN_ALIGN_OFFSET, 3);
PIN(ATTN_KV_CACHE_CONTIGUOUS, 1);
PIN(ATTN_KV_CACHE_RING, 2);
PIN(ATTN_KV_CACHE_PAGED, 3);
PIN(ATTN_VERSION_NUMBER,
    ATTN_VERSION_MAJOR * 10000 + ATTN_VERSION_MINOR * 100 + ATTN_VERSION_PATCH);

/* Layouts, where pointers and size_t have 64 bits. */
#if UINTPTR_MAX == UINT64_MAX
#define AT(type, member, place) \
    _Static_assert(offsetof(type, member) == (place), #type "." #member)
_Static_assert(sizeof(attn_status) == 4, "attn_status");
_Static_assert(sizeof(attn_dtype) == 4, "attn_dtype");

_Static_assert(sizeof(attn_tensor) == 80, "attn_tensor");
AT(attn_tensor, data, 0);
AT(attn_tensor, shape, 8);
AT(attn_tensor, stride, 40);
AT(attn_tensor, dtype, 72);
AT(attn_tensor, reserved, 76);

_Static_assert(sizeof(attn_context_params) == 56, "attn_context_params");
AT(attn_context_params, struct_size, 0);
AT(attn_context_params, num_threads, 8);
AT(attn_context_params, reserved, 12);
AT(attn_context_params, parallel_for, 16);
AT(attn_context_params, parallel_user, 24);
AT(attn_context_params, alloc, 32);
AT(attn_context_params, free, 40);
AT(attn_context_params, alloc_user, 48);

_Static_assert(sizeof(attn_mask) == 88, "attn_mask");
AT(attn_mask, kind, 0);
AT(attn_mask, reserved, 4);
AT(attn_mask, view, 8);

_Static_assert(sizeof(attn_sdpa_params) == 320, "attn_sdpa_params");
AT(attn_sdpa_params, struct_size, 0);
AT(attn_sdpa_params, flags, 8);
AT(attn_sdpa_params, causal, 12);
AT(attn_sdpa_params, align, 16);
AT(attn_sdpa_params, num_masks, 20);
AT(attn_sdpa_params, masks, 24);
AT(attn_sdpa_params, scale, 32);
AT(attn_sdpa_params, q_offset, 40);
AT(attn_sdpa_params, q_offsets, 48);
AT(attn_sdpa_params, window_left, 56);
AT(attn_sdpa_params, window_right, 64);
AT(attn_sdpa_params, keep_first, 72);
AT(attn_sdpa_params, chunk, 80);
AT(attn_sdpa_params, prefix_lens, 88);
AT(attn_sdpa_params, q_lens, 96);
AT(attn_sdpa_params, kv_lens, 104);
AT(attn_sdpa_params, cu_q, 112);
AT(attn_sdpa_params, cu_k, 120);
AT(attn_sdpa_params, num_seqs, 128);
AT(attn_sdpa_params, lse, 136);
AT(attn_sdpa_params, weights, 144);
AT(attn_sdpa_params, weights_mean, 152);
AT(attn_sdpa_params, softcap, 160);
AT(attn_sdpa_params, alibi, 168);
AT(attn_sdpa_params, sinks, 176);
AT(attn_sdpa_params, kv_starts, 184);
AT(attn_sdpa_params, q_segments, 192);
AT(attn_sdpa_params, kv_segments, 200);
AT(attn_sdpa_params, blocks, 208);
AT(attn_sdpa_params, block_q, 216);
AT(attn_sdpa_params, block_k, 224);
AT(attn_sdpa_params, page_table, 232);
AT(attn_sdpa_params, pages_per_seq, 240);
AT(attn_sdpa_params, ring_starts, 248);
AT(attn_sdpa_params, kv_offsets, 256);
AT(attn_sdpa_params, scores_raw, 264);
AT(attn_sdpa_params, scores_capped, 272);
AT(attn_sdpa_params, scores, 280);
AT(attn_sdpa_params, key_sums, 288);
AT(attn_sdpa_params, max_weight, 296);
AT(attn_sdpa_params, effective_keys, 304);
AT(attn_sdpa_params, entropy, 312);

_Static_assert(sizeof(attn_sdpa_gradients) == 80, "attn_sdpa_gradients");
AT(attn_sdpa_gradients, struct_size, 0);
AT(attn_sdpa_gradients, flags, 8);
AT(attn_sdpa_gradients, reserved, 12);
AT(attn_sdpa_gradients, d_lse, 16);
AT(attn_sdpa_gradients, d_q, 24);
AT(attn_sdpa_gradients, d_k, 32);
AT(attn_sdpa_gradients, d_v, 40);
AT(attn_sdpa_gradients, d_masks, 48);
AT(attn_sdpa_gradients, d_alibi, 56);
AT(attn_sdpa_gradients, d_sinks, 64);
AT(attn_sdpa_gradients, d_scale, 72);

_Static_assert(sizeof(attn_kv_cache_params) == 96, "attn_kv_cache_params");
AT(attn_kv_cache_params, struct_size, 0);
AT(attn_kv_cache_params, kind, 8);
AT(attn_kv_cache_params, dtype, 12);
AT(attn_kv_cache_params, num_seqs, 16);
AT(attn_kv_cache_params, kv_heads, 24);
AT(attn_kv_cache_params, capacity, 32);
AT(attn_kv_cache_params, width, 40);
AT(attn_kv_cache_params, v_width, 48);
AT(attn_kv_cache_params, page_size, 56);
AT(attn_kv_cache_params, num_pages, 64);
AT(attn_kv_cache_params, rotary_style, 72);
AT(attn_kv_cache_params, reserved, 76);
AT(attn_kv_cache_params, cos_table, 80);
AT(attn_kv_cache_params, sin_table, 88);

_Static_assert(sizeof(attn_mha_params) == 120, "attn_mha_params");
AT(attn_mha_params, struct_size, 0);
AT(attn_mha_params, weight_layout, 8);
AT(attn_mha_params, reserved, 12);
AT(attn_mha_params, num_heads, 16);
AT(attn_mha_params, num_kv_heads, 24);
AT(attn_mha_params, w_q, 32);
AT(attn_mha_params, w_k, 40);
AT(attn_mha_params, w_v, 48);
AT(attn_mha_params, w_qkv, 56);
AT(attn_mha_params, w_o, 64);
AT(attn_mha_params, b_q, 72);
AT(attn_mha_params, b_k, 80);
AT(attn_mha_params, b_v, 88);
AT(attn_mha_params, b_qkv, 96);
AT(attn_mha_params, b_o, 104);
AT(attn_mha_params, attention, 112);
#endif

/* struct_size set and everything else zero: what both forms of initialisation
 * must produce. The structs have no padding on LP64 (see the places above),
 * so they can be compared as bytes. */
#define EXPECT_INIT(type, init)                             \
    do {                                                    \
        type zero;                                          \
        type by_call;                                       \
        const type by_macro = init;                         \
        memset(&zero, 0, sizeof zero);                      \
        zero.struct_size = sizeof zero;                     \
        memset(&by_call, 0x5A, sizeof by_call);             \
        type##_init(&by_call);                              \
        assert_memory_equal(&by_call, &zero, sizeof zero);  \
        assert_memory_equal(&by_macro, &zero, sizeof zero); \
    } while (0)

#if UINTPTR_MAX == UINT64_MAX
static void test_context_params_init__macro_and_call_agree(void **state)
{
    (void)state;
    EXPECT_INIT(attn_context_params, ATTN_CONTEXT_PARAMS_INIT);
}

static void test_sdpa_params_init__macro_and_call_agree(void **state)
{
    (void)state;
    EXPECT_INIT(attn_sdpa_params, ATTN_SDPA_PARAMS_INIT);
}

static void test_sdpa_gradients_init__macro_and_call_agree(void **state)
{
    (void)state;
    EXPECT_INIT(attn_sdpa_gradients, ATTN_SDPA_GRADIENTS_INIT);
}

static void test_kv_cache_params_init__macro_and_call_agree(void **state)
{
    (void)state;
    EXPECT_INIT(attn_kv_cache_params, ATTN_KV_CACHE_PARAMS_INIT);
}

static void test_mha_params_init__macro_and_call_agree(void **state)
{
    (void)state;
    EXPECT_INIT(attn_mha_params, ATTN_MHA_PARAMS_INIT);
}
#endif

/* A NULL struct to fill is nobody's crash. */
static void test_params_init__null_is_passed_over(void **state)
{
    (void)state;
    attn_context_params_init(NULL);
    attn_sdpa_params_init(NULL);
    attn_sdpa_gradients_init(NULL);
    attn_kv_cache_params_init(NULL);
    attn_mha_params_init(NULL);
}

/* Tails of unknown members are tried up to this many bytes. */
#define EXTRA 64

/* One reader for each kind of struct: its status, after some checks that a
 * refusal did nothing and a success did something. */
static attn_status read_context(void *params)
{
    attn_context *context = NULL;
    const attn_status status = attn_context_create(&context, params);
    assert_true((status == ATTN_OK) == (context != NULL));
    attn_context_destroy(context);
    return status;
}

static attn_status read_sdpa(void *params)
{
    static const float in[6] = {1, 2, 3, 4, 5, 6};
    static float result[6];
    attn_tensor q;
    attn_tensor out;
    attn_view_bhtd(&q, ATTN_F32, in, 1, 1, 2, 3);
    attn_view_bhtd(&out, ATTN_F32, result, 1, 1, 2, 3);
    memset(result, 0, sizeof result);
    const attn_status status = attn_sdpa(NULL, params, &q, &q, &q, &out);
    const attn_status check = attn_sdpa_check(NULL, params, &q, &q, &q, &out);
    assert_int_equal(check, status);
    /* out is a mean of rows of v, so it cannot be 0 after success. */
    assert_true((status == ATTN_OK) == (result[0] > 0.0F));
    return status;
}

static attn_status read_gradients(void *gradients)
{
    static const float in[6] = {1, 2, 3, 4, 5, 6};
    static float sums[2];
    attn_tensor q;
    attn_tensor lse;
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    attn_view_bhtd(&q, ATTN_F32, in, 1, 1, 2, 3);
    attn_view_bhtd(&lse, ATTN_F32, sums, 1, 1, 2, 1);
    params.lse = &lse;
    const attn_status status =
        attn_sdpa_backward(NULL, &params, &q, &q, &q, &q, &q, gradients);
    const attn_status check =
        attn_sdpa_backward_check(NULL, &params, &q, &q, &q, &q, &q, gradients);
    assert_int_equal(check, status);
    return status;
}

static const float identity[4] = {1, 0, 0, 1};

static attn_status read_kv_cache(void *params)
{
    attn_kv_cache *cache = NULL;
    const attn_status status = attn_kv_cache_create(NULL, params, &cache);
    assert_true((status == ATTN_OK) == (cache != NULL));
    attn_kv_cache_destroy(cache);
    return status;
}

static attn_status read_mha(void *params)
{
    static const float in[4] = {1, 2, 3, 4};
    static float result[4];
    attn_tensor x;
    attn_tensor out;
    attn_view_bte(&x, ATTN_F32, in, 1, 2, 2);
    attn_view_bte(&out, ATTN_F32, result, 1, 2, 2);
    memset(result, 0, sizeof result);
    const attn_status status = attn_mha(NULL, params, &x, NULL, NULL, &out);
    const attn_status check =
        attn_mha_check(NULL, params, &x, NULL, NULL, &out);
    assert_int_equal(check, status);
    assert_true((status == ATTN_OK) == (result[0] > 0.0F));
    return status;
}

/* The version 1 structs, valid for their readers, in front of a tail. */
struct any_params {
    union {
        size_t struct_size;
        attn_context_params context;
        attn_sdpa_params sdpa;
        attn_sdpa_gradients gradients;
        attn_mha_params mha;
        attn_kv_cache_params kv_cache;
        unsigned char bytes[sizeof(attn_sdpa_params) + EXTRA];
    } u;
};

static attn_tensor weight;

static void valid_context(struct any_params *p)
{
    memset(p, 0, sizeof *p);
    p->u.context.struct_size = sizeof p->u.context;
}

static void valid_sdpa(struct any_params *p)
{
    memset(p, 0, sizeof *p);
    p->u.sdpa.struct_size = sizeof p->u.sdpa;
}

static void valid_gradients(struct any_params *p)
{
    memset(p, 0, sizeof *p);
    p->u.gradients.struct_size = sizeof p->u.gradients;
}

static void valid_kv_cache(struct any_params *p)
{
    memset(p, 0, sizeof *p);
    p->u.kv_cache.struct_size = sizeof p->u.kv_cache;
    p->u.kv_cache.kind = ATTN_KV_CACHE_RING;
    p->u.kv_cache.dtype = ATTN_F32;
}

static void valid_mha(struct any_params *p)
{
    memset(p, 0, sizeof *p);
    attn_view_matrix(&weight, ATTN_F32, identity, 2, 2, 2);
    p->u.mha.struct_size = sizeof p->u.mha;
    p->u.mha.weight_layout = ATTN_WEIGHT_OUT_IN;
    p->u.mha.num_heads = 1;
    p->u.mha.w_q = &weight;
    p->u.mha.w_k = &weight;
    p->u.mha.w_v = &weight;
    p->u.mha.w_o = &weight;
}

static const struct params_case {
    const char *name;
    const char *call;
    size_t version_1; /* the shortest that is read */
    size_t size;      /* of this version */
    void (*valid)(struct any_params *);
    attn_status (*read)(void *);
} params_cases[] = {
    {"attn_context_params", "attn_context_create", sizeof(attn_context_params),
     sizeof(attn_context_params), valid_context, read_context},
    {"attn_sdpa_params", "attn_sdpa", offsetof(attn_sdpa_params, softcap),
     sizeof(attn_sdpa_params), valid_sdpa, read_sdpa},
    {"attn_sdpa_gradients", "attn_sdpa_backward", sizeof(attn_sdpa_gradients),
     sizeof(attn_sdpa_gradients), valid_gradients, read_gradients},
    {"attn_kv_cache_params", "attn_kv_cache_create",
     sizeof(attn_kv_cache_params), sizeof(attn_kv_cache_params), valid_kv_cache,
     read_kv_cache},
    {"attn_mha_params", "attn_mha", sizeof(attn_mha_params),
     sizeof(attn_mha_params), valid_mha, read_mha},
};

/* Reads a copy of the first `size` bytes that ends where its memory ends, so
 * that ASan and valgrind see a read beyond struct_size. */
static attn_status read_exact(const struct params_case *c, struct any_params *p,
                              size_t size)
{
    p->u.struct_size = size;
    const size_t kept = size < sizeof(size_t) ? sizeof(size_t) : size;
    void *copy = malloc(kept);
    assert_non_null(copy);
    memcpy(copy, p, kept);
    const attn_status status = c->read(copy);
    free(copy);
    return status;
}

static void test_params__every_size_below_version_1_is_refused(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(params_cases); n++) {
        const struct params_case *c = &params_cases[n];
        for (size_t size = 0; size < c->version_1; size++) {
            struct any_params p;
            c->valid(&p);
            const attn_status status = read_exact(c, &p, size);
            if (status != ATTN_ERR_STRUCT)
                fail_msg("%s of %zu bytes: status %d", c->name, size,
                         (int)status);
            assert_non_null(strstr(attn_last_error(), c->call));
            assert_non_null(strstr(attn_last_error(), "struct_size"));
        }
    }
}

static void test_params__a_longer_struct_with_zero_tail_is_read(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(params_cases); n++) {
        const struct params_case *c = &params_cases[n];
        for (size_t extra = 0; extra <= EXTRA; extra++) {
            struct any_params p;
            c->valid(&p);
            const attn_status status = read_exact(c, &p, c->size + extra);
            if (status != ATTN_OK)
                fail_msg("%s with %zu more bytes: %s", c->name, extra,
                         attn_last_error());
        }
    }
}

/* A program built against an older header: what it does not know is zero. */
static void test_params__a_shorter_struct_is_read(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(params_cases); n++) {
        const struct params_case *c = &params_cases[n];
        for (size_t size = c->version_1; size < c->size; size++) {
            struct any_params p;
            c->valid(&p);
            const attn_status status = read_exact(c, &p, size);
            if (status != ATTN_OK)
                fail_msg("%s of %zu bytes: %s", c->name, size,
                         attn_last_error());
        }
    }
}

/* Any nonzero byte of an unknown tail asks for something unknown. */
static void test_params__a_nonzero_unknown_tail_is_unsupported(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(params_cases); n++) {
        const struct params_case *c = &params_cases[n];
        for (size_t extra = 1; extra <= EXTRA; extra++) {
            for (size_t place = 0; place < extra; place += 1 + extra / 8) {
                struct any_params p;
                c->valid(&p);
                p.u.bytes[c->size + place] = 0x80;
                const attn_status status = read_exact(c, &p, c->size + extra);
                if (status != ATTN_ERR_UNSUPPORTED)
                    fail_msg("%s, byte %zu of a tail of %zu: status %d",
                             c->name, place, extra, (int)status);
                assert_non_null(strstr(attn_last_error(), c->call));
            }
        }
    }
}

/* Bytes behind struct_size belong to the caller and mean nothing. */
static void test_params__bytes_behind_the_struct_are_not_read(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(params_cases); n++) {
        const struct params_case *c = &params_cases[n];
        struct any_params p;
        c->valid(&p);
        memset(p.u.bytes + c->size, 0xFF, EXTRA);
        assert_int_equal(c->read(&p), ATTN_OK);
    }
}

/* An absurd size is refused, or read only as far as the process allows; here
 * the tail is nonzero at once, so nothing far away need be touched. */
static void test_params__a_huge_size_with_nonzero_tail_is_refused(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT(params_cases); n++) {
        const struct params_case *c = &params_cases[n];
        struct any_params p;
        c->valid(&p);
        memset(p.u.bytes + c->size, 0xFF, EXTRA);
        p.u.struct_size = (size_t)1 << 40;
        const attn_status status = c->read(&p);
        assert_true(status == ATTN_ERR_UNSUPPORTED ||
                    status == ATTN_ERR_STRUCT);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#if UINTPTR_MAX == UINT64_MAX
        cmocka_unit_test(test_context_params_init__macro_and_call_agree),
        cmocka_unit_test(test_sdpa_params_init__macro_and_call_agree),
        cmocka_unit_test(test_sdpa_gradients_init__macro_and_call_agree),
        cmocka_unit_test(test_kv_cache_params_init__macro_and_call_agree),
        cmocka_unit_test(test_mha_params_init__macro_and_call_agree),
#endif
        cmocka_unit_test(test_params_init__null_is_passed_over),
        cmocka_unit_test(test_params__every_size_below_version_1_is_refused),
        cmocka_unit_test(test_params__a_shorter_struct_is_read),
        cmocka_unit_test(test_params__a_longer_struct_with_zero_tail_is_read),
        cmocka_unit_test(test_params__a_nonzero_unknown_tail_is_unsupported),
        cmocka_unit_test(test_params__bytes_behind_the_struct_are_not_read),
        cmocka_unit_test(test_params__a_huge_size_with_nonzero_tail_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
