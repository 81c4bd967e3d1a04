/*
 * Masks: a padded batch for a decoder, said in four ways that give the same
 * output, and what the wrong polarity does.
 *
 * Two sentences of 6 and 4 tokens in a batch of length 6; every token sees
 * itself and the past, and nobody sees padding.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <attn.h>

enum { B = 2, H = 2, T = 6, D = 8 };

static const int64_t lens[B] = {6, 4};
static attn_tensor q, k, v;

static void must(attn_status status)
{
    if (status) {
        fprintf(stderr, "%s\n", attn_last_error());
        exit(1);
    }
}

static void fill(float *x, int count, double phase)
{
    for (int n = 0; n < count; n++)
        x[n] = (float)sin(phase + 1.7 * n);
}

/* Runs attention and returns the largest difference from *first. */
static double compare(const char *what, const attn_sdpa_params *params,
                      float *out, const float *first)
{
    double largest = 0;
    attn_tensor view;

    must(attn_view_bhtd(&view, ATTN_F32, out, B, H, T, D));
    must(attn_sdpa(NULL, params, &q, &k, &v, &view));
    for (int n = 0; n < B * H * T * D; n++)
        largest = fmax(largest, fabs((double)out[n] - (double)first[n]));
    printf("%-44s differs by %.1e\n", what, largest);
    return largest;
}

int main(void)
{
    static float x[3][B * H * T * D], first[B * H * T * D], out[B * H * T * D],
        add[T * T];
    static unsigned char padding[B * T], future[T * T];
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    attn_mask masks[2];
    double worst = 0;

    for (int n = 0; n < 3; n++)
        fill(x[n], B * H * T * D, n);
    must(attn_view_bhtd(&q, ATTN_F32, x[0], B, H, T, D));
    must(attn_view_bhtd(&k, ATTN_F32, x[1], B, H, T, D));
    must(attn_view_bhtd(&v, ATTN_F32, x[2], B, H, T, D));

    /* 1. The cheapest: no mask in memory, hidden keys are not even read. With
     * fewer keys than queries causal must say which query stands where. */
    params.causal = 1;
    params.align = ATTN_ALIGN_TOP_LEFT;
    params.kv_lens = lens;
    compare("causal and kv_lens", &params, first, first);

    /* 2. Two masks, both DROP as in PyTorch's MultiheadAttention: true hides.
     * Sizes of 1 are broadcast: padding is the same for all heads and queries,
     * the future for all batches and heads. */
    attn_sdpa_params_init(&params);
    must(attn_mask_init(&masks[0], ATTN_MASK_DROP, ATTN_U8, padding, B, 1, 1,
                        T));
    must(attn_mask_padding(&masks[0], lens));
    must(
        attn_mask_init(&masks[1], ATTN_MASK_DROP, ATTN_U8, future, 1, 1, T, T));
    must(attn_mask_causal(&masks[1], 0));
    params.masks = masks;
    params.num_masks = 2;
    worst = fmax(worst, compare("two DROP masks", &params, out, first));

    /* 3. A mask and an option combine: a key must pass both. */
    params.num_masks = 1;
    params.causal = 1;
    worst = fmax(worst, compare("a DROP mask and causal", &params, out, first));

    /* 4. ADD: -inf hides, exactly. */
    must(attn_mask_init(&masks[1], ATTN_MASK_ADD, ATTN_F32, add, 1, 1, T, T));
    must(attn_mask_causal(&masks[1], 0));
    params.causal = 0;
    params.num_masks = 2;
    worst = fmax(worst, compare("a DROP and an ADD mask", &params, out, first));

    /* The same bytes with the other meaning: no error, another result. This is
     * why a mask without a kind is refused. */
    masks[0].kind = ATTN_MASK_KEEP;
    compare("padding taken for KEEP (a mistake)", &params, out, first);
    masks[0].kind = 0;
    if (attn_sdpa_check(NULL, &params, &q, &k, &v, &q) != ATTN_ERR_VALUE)
        return 1;
    printf("without a kind: %s\n", attn_last_error());
    return worst <= 1e-6 ? 0 : 1;
}
