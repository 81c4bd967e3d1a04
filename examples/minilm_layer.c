/*
 * One self-attention layer of a published model (all-MiniLM-L6-v2) through
 * attn_mha, compared with what PyTorch computes from the same numbers.
 *
 *   minilm_layer              the part of the layer kept in tests/minilm
 *   minilm_layer DIRECTORY    a layer from examples/minilm/export.py
 */
#include "minilm/layer.h"

#ifndef ATTN_SOURCE_DIR
#define ATTN_SOURCE_DIR "."
#endif

/* float32 has steps of 1.2e-7; the sums run over up to 384 products. */
#define BOUND 1e-5

static int run(struct layer *layer, float *out)
{
    const struct npy *x = &layer->file[LAYER_X];
    const void *torch = layer->file[LAYER_OUT].data;
    const void *exact = layer->file[LAYER_OUT64].data;
    int64_t count = layer->file[LAYER_OUT].count;
    double ours, theirs, apart;
    attn_tensor view = layer->view[LAYER_OUT];

    view.data = out;
    if (attn_mha(NULL, &layer->params, &layer->view[LAYER_X], NULL, NULL,
                 &view)) {
        fprintf(stderr, "%s\n", attn_last_error());
        return 1;
    }
    apart = layer_difference(ATTN_F32, out, ATTN_F32, torch, count);
    ours = layer_difference(ATTN_F32, out, ATTN_F64, exact, count);
    theirs = layer_difference(ATTN_F32, torch, ATTN_F64, exact, count);
    printf("%lld sentences, %lld tokens each at most, model width %lld, %lld "
           "heads\n",
           (long long)x->shape[0], (long long)x->shape[1],
           (long long)x->shape[2], (long long)layer->params.num_heads);
    printf("libattn against PyTorch, float32:   %.1e of the largest value "
           "(bound %.0e)\n",
           apart, BOUND);
    printf("against PyTorch in float64: libattn %.1e, PyTorch float32 %.1e\n",
           ours, theirs);
    return apart <= BOUND ? 0 : 1;
}

int main(int argc, char **argv)
{
    const char *directory =
        argc > 1 ? argv[1] : ATTN_SOURCE_DIR "/tests/minilm";
    struct layer layer;
    float *out;
    int failed;

    if (layer_read(&layer, directory))
        return 1;
    out = malloc((size_t)layer.file[LAYER_OUT].count * sizeof(float));
    failed = out ? run(&layer, out) : 1;
    free(out);
    layer_free(&layer);
    return failed;
}
