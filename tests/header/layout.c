/*
 * What can never change once a program was compiled: numbers of constants, and
 * on 64-bit machines where the members of the public structs stand. The ABI
 * gate does not see a renumbered macro, so the numbers are written down here.
 * Compiled as C89 to C17 and as C++98 to C++20; it is never run.
 */
#include <attn.h>

/* A negative array size is an error in every C and C++. */
#define CHECK(name, condition) typedef char check_##name[(condition) ? 1 : -1]

CHECK(ok, ATTN_OK == 0);
CHECK(err_null, ATTN_ERR_NULL == -1);
CHECK(err_size, ATTN_ERR_SIZE == -2);
CHECK(err_shape, ATTN_ERR_SHAPE == -3);
CHECK(err_type, ATTN_ERR_TYPE == -4);
CHECK(err_value, ATTN_ERR_VALUE == -5);
CHECK(err_struct, ATTN_ERR_STRUCT == -6);
CHECK(err_unsupported, ATTN_ERR_UNSUPPORTED == -7);
CHECK(err_stride, ATTN_ERR_STRIDE == -8);
CHECK(err_align, ATTN_ERR_ALIGN == -9);
CHECK(err_overlap, ATTN_ERR_OVERLAP == -10);
CHECK(err_workspace, ATTN_ERR_WORKSPACE == -11);
CHECK(err_nomem, ATTN_ERR_NOMEM == -12);
CHECK(err_blas, ATTN_ERR_BLAS == -13);
CHECK(err_full, ATTN_ERR_FULL == -14);
CHECK(f32, ATTN_F32 == 1);
CHECK(f64, ATTN_F64 == 2);
CHECK(u8, ATTN_U8 == 3);
CHECK(mask_keep, ATTN_MASK_KEEP == 1);
CHECK(mask_drop, ATTN_MASK_DROP == 2);
CHECK(mask_add, ATTN_MASK_ADD == 3);
CHECK(weight_out_in, ATTN_WEIGHT_OUT_IN == 1);
CHECK(weight_in_out, ATTN_WEIGHT_IN_OUT == 2);
CHECK(sdpa_scale, ATTN_SDPA_SCALE == 1);
CHECK(sdpa_window, ATTN_SDPA_WINDOW == 2);
CHECK(sdpa_blas_only, ATTN_SDPA_BLAS_ONLY == 4);
CHECK(sdpa_add_d_q, ATTN_SDPA_ADD_D_Q == 0x100);
CHECK(sdpa_add_d_k, ATTN_SDPA_ADD_D_K == 0x200);
CHECK(sdpa_add_d_v, ATTN_SDPA_ADD_D_V == 0x400);
CHECK(sdpa_add_d_masks, ATTN_SDPA_ADD_D_MASKS == 0x800);
CHECK(sdpa_add_d_alibi, ATTN_SDPA_ADD_D_ALIBI == 0x1000);
CHECK(sdpa_add_d_sinks, ATTN_SDPA_ADD_D_SINKS == 0x2000);
CHECK(sdpa_add_d_scale, ATTN_SDPA_ADD_D_SCALE == 0x4000);
CHECK(align_top_left, ATTN_ALIGN_TOP_LEFT == 1);
CHECK(align_bottom_right, ATTN_ALIGN_BOTTOM_RIGHT == 2);
CHECK(align_offset, ATTN_ALIGN_OFFSET == 3);
CHECK(rotary_interleaved, ATTN_ROTARY_INTERLEAVED == 1);
CHECK(rotary_halves, ATTN_ROTARY_HALVES == 2);
CHECK(kv_cache_contiguous, ATTN_KV_CACHE_CONTIGUOUS == 1);
CHECK(kv_cache_ring, ATTN_KV_CACHE_RING == 2);
CHECK(kv_cache_paged, ATTN_KV_CACHE_PAGED == 3);
CHECK(version, ATTN_VERSION_NUMBER == ATTN_VERSION_MAJOR * 10000 +
                                          ATTN_VERSION_MINOR * 100 +
                                          ATTN_VERSION_PATCH);

/* LP64: long and pointers of 8 bytes. */
#ifdef __LP64__
#define AT(type, member, offset) \
    CHECK(type##_##member, offsetof(type, member) == (offset))
AT(attn_tensor, data, 0);
AT(attn_tensor, shape, 8);
AT(attn_tensor, stride, 40);
AT(attn_tensor, dtype, 72);
AT(attn_tensor, reserved, 76);
CHECK(attn_tensor, sizeof(attn_tensor) == 80);
AT(attn_context_params, struct_size, 0);
AT(attn_context_params, num_threads, 8);
AT(attn_context_params, reserved, 12);
AT(attn_context_params, parallel_for, 16);
AT(attn_context_params, parallel_user, 24);
AT(attn_context_params, alloc, 32);
AT(attn_context_params, free, 40);
AT(attn_context_params, alloc_user, 48);
CHECK(attn_context_params, sizeof(attn_context_params) == 56);
AT(attn_mask, kind, 0);
AT(attn_mask, reserved, 4);
AT(attn_mask, view, 8);
CHECK(attn_mask, sizeof(attn_mask) == 88);
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
CHECK(attn_sdpa_params, sizeof(attn_sdpa_params) >= 160);
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
CHECK(attn_sdpa_gradients, sizeof(attn_sdpa_gradients) >= 80);
AT(attn_rotary_params, struct_size, 0);
AT(attn_rotary_params, style, 8);
AT(attn_rotary_params, inverse, 12);
AT(attn_rotary_params, offset, 16);
AT(attn_rotary_params, offsets, 24);
AT(attn_rotary_params, positions, 32);
CHECK(attn_rotary_params, sizeof(attn_rotary_params) >= 40);
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
CHECK(attn_kv_cache_params, sizeof(attn_kv_cache_params) >= 96);
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
CHECK(attn_mha_params, sizeof(attn_mha_params) >= 120);
#endif

/* The init macros are usable in every language version, and the pointer to a
 * function may be taken. */
extern attn_context_params header_context;
extern attn_sdpa_params header_sdpa;
extern attn_sdpa_gradients header_gradients;
extern attn_rotary_params header_rotary;
extern attn_kv_cache_params header_kv_cache;
extern attn_mha_params header_mha;
attn_context_params header_context = ATTN_CONTEXT_PARAMS_INIT;
attn_sdpa_params header_sdpa = ATTN_SDPA_PARAMS_INIT;
attn_sdpa_gradients header_gradients = ATTN_SDPA_GRADIENTS_INIT;
attn_rotary_params header_rotary = ATTN_ROTARY_PARAMS_INIT;
attn_kv_cache_params header_kv_cache = ATTN_KV_CACHE_PARAMS_INIT;
attn_mha_params header_mha = ATTN_MHA_PARAMS_INIT;
