/*
 * Multi-head attention as in the paper: self-attention of 5 tokens, and
 * cross-attention to 7 tokens of another sequence, by the same layer. Then the
 * same self-attention built from the parts, which are public too.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <attn.h>

enum { T = 5, OTHER = 7, E = 16, H = 4, D = E / H };

static attn_tensor w[4]; /* q, k, v, o, each (in, out) */

static void must(attn_status status)
{
    if (status) {
        fprintf(stderr, "%s\n", attn_last_error());
        exit(1);
    }
}

static void fill(double *x, int count, double phase)
{
    for (int n = 0; n < count; n++)
        x[n] = sin(phase + 1.7 * n) / 2;
}

/* Projections, attention over views that are the head split, projection. */
static void by_parts(const attn_tensor *x, const attn_tensor *out)
{
    static double memory[4][T * E];
    attn_tensor rows[4], heads[4];

    for (int n = 0; n < 4; n++) {
        must(attn_view_bte(&rows[n], ATTN_F64, memory[n], 1, T, E));
        must(attn_view_bthd(&heads[n], ATTN_F64, memory[n], 1, T, H, D));
    }
    for (int n = 0; n < 3; n++)
        must(attn_linear(NULL, ATTN_WEIGHT_IN_OUT, x, &w[n], NULL, &rows[n]));
    must(attn_sdpa(NULL, NULL, &heads[0], &heads[1], &heads[2], &heads[3]));
    must(attn_linear(NULL, ATTN_WEIGHT_IN_OUT, &rows[3], &w[3], NULL, out));
}

int main(void)
{
    static double w_memory[4][E * E], x_memory[T * E], other_memory[OTHER * E];
    static double out_memory[T * E], parts_memory[T * E];
    static double weights_memory[H * T * OTHER];
    attn_sdpa_params attention = ATTN_SDPA_PARAMS_INIT;
    attn_mha_params params = ATTN_MHA_PARAMS_INIT;
    attn_tensor x, other, out, parts, weights;
    double largest = 0, deviation;

    for (int n = 0; n < 4; n++) {
        fill(w_memory[n], E * E, n);
        must(attn_view_matrix(&w[n], ATTN_F64, w_memory[n], E, E, E));
    }
    fill(x_memory, T * E, 4);
    fill(other_memory, OTHER * E, 5);
    must(attn_view_bte(&x, ATTN_F64, x_memory, 1, T, E));
    must(attn_view_bte(&other, ATTN_F64, other_memory, 1, OTHER, E));
    must(attn_view_bte(&out, ATTN_F64, out_memory, 1, T, E));
    must(attn_view_bte(&parts, ATTN_F64, parts_memory, 1, T, E));

    params.weight_layout = ATTN_WEIGHT_IN_OUT; /* PyTorch: ATTN_WEIGHT_OUT_IN */
    params.num_heads = H;
    params.w_q = &w[0], params.w_k = &w[1], params.w_v = &w[2];
    params.w_o = &w[3];

    /* Self-attention: keys and values come from x. */
    must(attn_mha(NULL, &params, &x, NULL, NULL, &out));
    by_parts(&x, &parts);
    for (int n = 0; n < T * E; n++)
        largest = fmax(largest, fabs(out_memory[n] - parts_memory[n]));
    printf("self-attention: layer against its parts %.1e\n", largest);

    /* Cross-attention: keys and values come from the other sequence. The
     * weights, per head, are wanted too. */
    must(attn_view_bhtd(&weights, ATTN_F64, weights_memory, 1, H, T, OTHER));
    attention.weights = &weights;
    params.attention = &attention;
    must(attn_mha(NULL, &params, &x, &other, NULL, &out));
    must(attn_weights_check(&weights, &deviation, NULL));
    printf("cross-attention: weights (%d,%d,%d), rows sum to 1 within %.1e\n",
           H, T, OTHER, deviation);
    return largest <= 1e-14 && deviation <= 1e-15 ? 0 : 1;
}
