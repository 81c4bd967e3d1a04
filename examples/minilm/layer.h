/*
 * A layer written by export.py, as parameters of attn_mha. Header only: it is
 * used by the example and by the test.
 */
#ifndef EXAMPLES_MINILM_LAYER_H
#define EXAMPLES_MINILM_LAYER_H

#include <math.h>

#include <attn.h>

#include "../npy.h"

enum layer_file {
    LAYER_X,
    LAYER_OUT,
    LAYER_OUT64,
    LAYER_KV_LENS,
    LAYER_W_Q,
    LAYER_W_K,
    LAYER_W_V,
    LAYER_W_O,
    LAYER_B_Q,
    LAYER_B_K,
    LAYER_B_V,
    LAYER_B_O,
    LAYER_FILES
};

struct layer {
    struct npy file[LAYER_FILES];
    attn_tensor view[LAYER_FILES]; /* of x, out, weights and biases */
    attn_sdpa_params attention;
    attn_mha_params params;
};

static inline int layer_read_files(struct layer *layer, const char *directory)
{
    static const char *const names[LAYER_FILES] = {
        "x.npy",   "out.npy", "out64.npy", "kv_lens.npy", "w_q.npy", "w_k.npy",
        "w_v.npy", "w_o.npy", "b_q.npy",   "b_k.npy",     "b_v.npy", "b_o.npy"};
    static const int dims[LAYER_FILES] = {3, 3, 3, 1, 2, 2, 2, 2, 1, 1, 1, 1};

    for (int n = 0; n < LAYER_FILES; n++) {
        const char *type = n == LAYER_OUT64     ? "<f8"
                           : n == LAYER_KV_LENS ? "<i8"
                                                : "<f4";
        struct npy *file = &layer->file[n];
        if (npy_read(directory, names[n], file))
            return -1;
        if (file->dims != dims[n] || strcmp(file->type, type)) {
            fprintf(stderr, "%s: not of %d dimensions in %s\n", names[n],
                    dims[n], type);
            return -1;
        }
    }
    return 0;
}

/* "heads N" is the first line of layer.txt. Returns 0 if it cannot be read. */
static inline int layer_heads(const char *directory)
{
    char path[4096];
    int heads = 0;
    FILE *file;

    snprintf(path, sizeof(path), "%s/layer.txt", directory);
    file = fopen(path, "r");
    if (!file)
        return 0;
    if (fscanf(file, "heads %d", &heads) != 1)
        heads = 0;
    fclose(file);
    return heads;
}

static inline void layer_view(struct layer *layer, int n)
{
    struct npy *file = &layer->file[n];
    int64_t *shape = file->shape;
    attn_tensor *view = &layer->view[n];

    if (n == LAYER_KV_LENS)
        return;
    if (file->dims == 3)
        attn_view_bte(view, n == LAYER_OUT64 ? ATTN_F64 : ATTN_F32, file->data,
                      shape[0], shape[1], shape[2]);
    else if (file->dims == 2)
        attn_view_matrix(view, ATTN_F32, file->data, shape[0], shape[1],
                         shape[1]);
    else
        attn_view_vector(view, ATTN_F32, file->data, shape[0]);
}

static inline void layer_free(struct layer *layer)
{
    for (int n = 0; n < LAYER_FILES; n++)
        npy_free(&layer->file[n]);
}

/* Returns 0, or -1 with a line on stderr. params points into *layer, which
 * must stay where it is. */
static inline int layer_read(struct layer *layer, const char *directory)
{
    attn_mha_params *p = &layer->params;

    memset(layer, 0, sizeof(*layer));
    attn_mha_params_init(p);
    attn_sdpa_params_init(&layer->attention);
    p->num_heads = layer_heads(directory);
    if (p->num_heads < 1 || layer_read_files(layer, directory)) {
        fprintf(stderr, "%s: no exported layer\n", directory);
        layer_free(layer);
        return -1;
    }
    for (int n = 0; n < LAYER_FILES; n++)
        layer_view(layer, n);
    layer->attention.kv_lens = layer->file[LAYER_KV_LENS].data;
    p->attention = &layer->attention;
    p->weight_layout = ATTN_WEIGHT_OUT_IN;
    p->w_q = &layer->view[LAYER_W_Q], p->b_q = &layer->view[LAYER_B_Q];
    p->w_k = &layer->view[LAYER_W_K], p->b_k = &layer->view[LAYER_B_K];
    p->w_v = &layer->view[LAYER_W_V], p->b_v = &layer->view[LAYER_B_V];
    p->w_o = &layer->view[LAYER_W_O], p->b_o = &layer->view[LAYER_B_O];
    return 0;
}

static inline double layer_value(attn_dtype dtype, const void *data, int64_t n)
{
    return dtype == ATTN_F64 ? ((const double *)data)[n]
                             : (double)((const float *)data)[n];
}

/* Largest |a - b| over count numbers, relative to the largest |b|. NaN in a
 * gives NaN. */
static inline double layer_difference(attn_dtype dtype_a, const void *a,
                                      attn_dtype dtype_b, const void *b,
                                      int64_t count)
{
    double off = 0, largest = 0;

    for (int64_t n = 0; n < count; n++) {
        double expected = layer_value(dtype_b, b, n);
        double here = fabs(layer_value(dtype_a, a, n) - expected);
        if (!(here <= off))
            off = here;
        if (fabs(expected) > largest)
            largest = fabs(expected);
    }
    return off / largest;
}

#endif
