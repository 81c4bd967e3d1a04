/*
 * A part of a real layer: hidden states of a sentence in all-MiniLM-L6-v2, two
 * heads of its fourth layer and their share of the output projection, with
 * PyTorch's results (tests/minilm, written by examples/minilm/export.py).
 * Trained weights reach what random ones do not: large scores, weights close
 * to 1 on one token, values of very different size.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>

#include <cmocka.h>

#include "../examples/minilm/layer.h"

#ifndef ATTN_TEST_DIR
#define ATTN_TEST_DIR "tests"
#endif

/* Sums over 384 products in float32 (steps of 1.2e-7) reach about 1e-6; a
 * wrong bias, head or transpose is off by more than 0.1. */
#define BOUND_F32 1e-5
/* The same sums in float64. */
#define BOUND_F64 1e-13

static int setup(void **state)
{
    static struct layer layer;
    *state = &layer;
    return layer_read(&layer, ATTN_TEST_DIR "/minilm");
}

static int teardown(void **state)
{
    layer_free(*state);
    return 0;
}

static void run_layer(const struct layer *layer, float *out)
{
    attn_tensor view = layer->view[LAYER_OUT];
    view.data = out;
    if (attn_mha(NULL, &layer->params, &layer->view[LAYER_X], NULL, NULL,
                 &view))
        fail_msg("%s", attn_last_error());
}

static float *new_out(const struct layer *layer)
{
    int64_t count = layer->file[LAYER_OUT].count;
    float *out = malloc((size_t)count * sizeof(float));
    assert_non_null(out);
    for (int64_t n = 0; n < count; n++)
        out[n] = NAN;
    return out;
}

/* Against PyTorch's result in dtype expected, LAYER_OUT or LAYER_OUT64. */
static void check(const struct layer *layer, attn_dtype dtype, const void *out,
                  int expected, double bound)
{
    const struct npy *file = &layer->file[expected];
    attn_dtype type = expected == LAYER_OUT64 ? ATTN_F64 : ATTN_F32;
    double off = layer_difference(dtype, out, type, file->data, file->count);
    if (!(off <= bound))
        fail_msg("off by %g of the largest value, at most %g", off, bound);
}

static void test_minilm__layer_f32_is_pytorchs(void **state)
{
    struct layer *layer = *state;
    float *out = new_out(layer);

    run_layer(layer, out);
    check(layer, ATTN_F32, out, LAYER_OUT, BOUND_F32);
    check(layer, ATTN_F32, out, LAYER_OUT64, BOUND_F32);
    free(out);
}

/* A float32 array of the layer as float64. */
static double *widen(const struct npy *file, attn_tensor *view)
{
    double *wide = malloc((size_t)file->count * sizeof(double));
    assert_non_null(wide);
    for (int64_t n = 0; n < file->count; n++)
        wide[n] = (double)((const float *)file->data)[n];
    view->data = wide;
    view->dtype = ATTN_F64;
    return wide;
}

static void test_minilm__layer_f64_is_pytorchs(void **state)
{
    struct layer *layer = *state;
    struct layer wide = *layer;
    double *memory[LAYER_FILES] = {0};
    int64_t count = layer->file[LAYER_OUT].count;
    double *out;

    for (int n = 0; n < LAYER_FILES; n++)
        if (n != LAYER_OUT64 && n != LAYER_KV_LENS)
            memory[n] = widen(&layer->file[n], &wide.view[n]);
    out = memory[LAYER_OUT];
    wide.params.w_q = &wide.view[LAYER_W_Q];
    wide.params.w_k = &wide.view[LAYER_W_K];
    wide.params.w_v = &wide.view[LAYER_W_V];
    wide.params.w_o = &wide.view[LAYER_W_O];
    wide.params.b_q = &wide.view[LAYER_B_Q];
    wide.params.b_k = &wide.view[LAYER_B_K];
    wide.params.b_v = &wide.view[LAYER_B_V];
    wide.params.b_o = &wide.view[LAYER_B_O];
    for (int64_t n = 0; n < count; n++)
        out[n] = (double)NAN;
    if (attn_mha(NULL, &wide.params, &wide.view[LAYER_X], NULL, NULL,
                 &wide.view[LAYER_OUT]))
        fail_msg("%s", attn_last_error());
    check(layer, ATTN_F64, out, LAYER_OUT64, BOUND_F64);
    for (int n = 0; n < LAYER_FILES; n++)
        free(memory[n]);
}

static void test_minilm__packed_weights_give_the_same(void **state)
{
    struct layer *layer = *state;
    attn_mha_params kept = layer->params;
    attn_tensor w_qkv, b_qkv;
    int64_t rows = layer->file[LAYER_W_Q].shape[0];
    int64_t width = layer->file[LAYER_W_Q].shape[1];
    size_t bytes = (size_t)(rows * width) * sizeof(float);
    float *w = malloc(3 * bytes);
    float *b = malloc(3 * (size_t)rows * sizeof(float));
    float *out = new_out(layer);

    assert_non_null(w);
    assert_non_null(b);
    for (int n = 0; n < 3; n++) {
        memcpy(w + n * rows * width, layer->file[LAYER_W_Q + n].data, bytes);
        memcpy(b + n * rows, layer->file[LAYER_B_Q + n].data,
               (size_t)rows * sizeof(float));
    }
    attn_view_matrix(&w_qkv, ATTN_F32, w, 3 * rows, width, width);
    attn_view_vector(&b_qkv, ATTN_F32, b, 3 * rows);
    layer->params.w_q = layer->params.w_k = layer->params.w_v = NULL;
    layer->params.b_q = layer->params.b_k = layer->params.b_v = NULL;
    layer->params.w_qkv = &w_qkv;
    layer->params.b_qkv = &b_qkv;
    run_layer(layer, out);
    layer->params = kept;
    check(layer, ATTN_F32, out, LAYER_OUT64, BOUND_F32);
    free(w);
    free(b);
    free(out);
}

static void test_minilm__padding_changes_nothing(void **state)
{
    struct layer *layer = *state;
    const struct npy *x = &layer->file[LAYER_X];
    int64_t len = x->shape[1], width = x->shape[2], more = len + 3;
    int64_t features = layer->file[LAYER_OUT].shape[2];
    float *padded = malloc((size_t)(more * width) * sizeof(float));
    float *out = malloc((size_t)(more * features) * sizeof(float));
    attn_tensor x_view, out_view;

    /* One sentence; the padded tokens hold NaN, which must not be seen. */
    assert_int_equal(x->shape[0], 1);
    assert_non_null(padded);
    assert_non_null(out);
    memcpy(padded, x->data, (size_t)(len * width) * sizeof(float));
    for (int64_t n = len * width; n < more * width; n++)
        padded[n] = NAN;
    attn_view_bte(&x_view, ATTN_F32, padded, 1, more, width);
    attn_view_bte(&out_view, ATTN_F32, out, 1, more, features);
    if (attn_mha(NULL, &layer->params, &x_view, NULL, NULL, &out_view))
        fail_msg("%s", attn_last_error());
    check(layer, ATTN_F32, out, LAYER_OUT64, BOUND_F32);
    free(padded);
    free(out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_minilm__layer_f32_is_pytorchs),
        cmocka_unit_test(test_minilm__layer_f64_is_pytorchs),
        cmocka_unit_test(test_minilm__packed_weights_give_the_same),
        cmocka_unit_test(test_minilm__padding_changes_nothing),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
