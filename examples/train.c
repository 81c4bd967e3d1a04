/*
 * Training: a layer of attention learns to recall. Each sequence is some pairs
 * of a key and a value, drawn anew in every step; asked for the keys in another
 * order, the layer shall name their values. What has to be learned is to look
 * for the key that was asked for, and to copy what stands beside it.
 *
 *   q = asked W_q   k = pairs W_k   v = pairs W_v   logits = attention W_o
 *
 * A step is: forward, of which out and lse are kept; gradients of the loss back
 * through the layer; Adam. The gradients of attention are attn_sdpa_backward's.
 * Those of a projection y = x W are attn_linear again, on other views of the
 * same matrices: d_x = d_y W^T, d_W = x^T d_y.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <attn.h>

enum { B = 16, T = 8, H = 2, D = 8, E = H * D };
enum { KEYS = 16, VALUES = 10, PAIR = KEYS + VALUES };
enum { STEPS = 120, REPORT = 20 };

/* A matrix to be learned, (in, out), with its gradient and Adam's moments. */
typedef struct parameter {
    const char *name;
    int in, out;
    double w[PAIR * E], d_w[PAIR * E], mean[PAIR * E], square[PAIR * E];
} parameter;

static parameter w_q = {.name = "w_q", .in = KEYS, .out = E};
static parameter w_k = {.name = "w_k", .in = PAIR, .out = E};
static parameter w_v = {.name = "w_v", .in = PAIR, .out = E};
static parameter w_o = {.name = "w_o", .in = E, .out = VALUES};
static parameter *const parameters[] = {&w_q, &w_k, &w_v, &w_o};

/* Sequence b has lens[b] pairs and questions; what lies behind is padding. */
static int64_t lens[B];
static double asked[B * T * KEYS], pairs[B * T * PAIR];
static int answers[B * T];

/* Rows of a layer, (B,T,width), and their gradients. */
static double q[B * T * E], k[B * T * E], v[B * T * E], out[B * T * E];
static double d_q[B * T * E], d_k[B * T * E], d_v[B * T * E], d_out[B * T * E];
static double lse[B * H * T];
static double logits[B * T * VALUES], d_logits[B * T * VALUES];

static void must(attn_status status)
{
    if (status) {
        fprintf(stderr, "%s\n", attn_last_error());
        exit(1);
    }
}

/* ---------------------------------------------------------------- The task */

static uint32_t random_below(uint32_t n)
{
    static uint64_t state = 1;

    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 32) % n);
}

/* 0 .. n-1 in some order. */
static void shuffle(int *x, int n)
{
    for (int i = 0; i < n; i++)
        x[i] = i;
    for (int i = n - 1; i > 0; i--) {
        int j = (int)random_below((uint32_t)i + 1), other = x[j];
        x[j] = x[i];
        x[i] = other;
    }
}

static void draw_batch(void)
{
    for (int i = 0; i < B * T * KEYS; i++)
        asked[i] = 0;
    for (int i = 0; i < B * T * PAIR; i++)
        pairs[i] = 0;
    for (int b = 0; b < B; b++) {
        int keys[KEYS], order[T];
        lens[b] = T / 2 + random_below(T / 2 + 1);
        shuffle(keys, KEYS);
        shuffle(order, (int)lens[b]);
        for (int j = 0; j < lens[b]; j++) {
            int row = b * T + j, question = b * T + order[j];
            int value = (int)random_below(VALUES);
            pairs[row * PAIR + keys[j]] = 1;
            pairs[row * PAIR + KEYS + value] = 1;
            asked[question * KEYS + keys[j]] = 1;
            answers[question] = value;
        }
    }
}

/* --------------------------------------------------------------- The layer */

/* All rows of the batch, as a projection sees them. */
static attn_tensor rows(const double *x, int width)
{
    attn_tensor t;

    must(attn_view_matrix(&t, ATTN_F64, x, B * T, width, width));
    return t;
}

/* The same memory cut into heads, as attention sees it: no copy. */
static attn_tensor heads(const double *x)
{
    attn_tensor t;

    must(attn_view_bthd(&t, ATTN_F64, x, B, T, H, D));
    return t;
}

/* y = x W */
static void project(const double *x, const parameter *p, double *y)
{
    const attn_tensor from = rows(x, p->in), to = rows(y, p->out);
    attn_tensor w;

    must(attn_view_matrix(&w, ATTN_F64, p->w, p->in, p->out, p->out));
    must(attn_linear(NULL, ATTN_WEIGHT_IN_OUT, &from, &w, NULL, &to));
}

/* d_W = x^T d_y, and, if it is wanted, d_x = d_y W^T */
static void project_back(const double *x, parameter *p, const double *d_y,
                         double *d_x)
{
    const attn_tensor dy = rows(d_y, p->out), from = rows(x, p->in);
    attn_tensor w, d_w, transposed = from;

    must(attn_view_matrix(&w, ATTN_F64, p->w, p->in, p->out, p->out));
    must(attn_view_matrix(&d_w, ATTN_F64, p->d_w, p->in, p->out, p->out));
    transposed.shape[2] = from.shape[3];
    transposed.shape[3] = from.shape[2];
    transposed.stride[2] = from.stride[3];
    transposed.stride[3] = from.stride[2];
    must(attn_linear(NULL, ATTN_WEIGHT_IN_OUT, &transposed, &dy, NULL, &d_w));
    if (d_x) {
        const attn_tensor dx = rows(d_x, p->in);
        must(attn_linear(NULL, ATTN_WEIGHT_OUT_IN, &dy, &w, NULL, &dx));
    }
}

/* Mean cross-entropy of the answers; *right of them are the likeliest. Leaves
 * its gradient in d_logits, that of padding being 0. */
static double cross_entropy(int *right)
{
    const attn_tensor x = rows(logits, VALUES), y = rows(d_logits, VALUES);
    double loss = 0;
    int64_t count = 0;

    for (int b = 0; b < B; b++)
        count += lens[b];
    must(attn_softmax(&x, &y, NULL));
    *right = 0;
    for (int n = 0; n < B * T; n++) {
        double *p = d_logits + n * VALUES;
        double of_answer = p[answers[n]];
        int likelier = 0;
        if (n % T >= lens[n / T]) {
            for (int a = 0; a < VALUES; a++)
                p[a] = 0;
            continue;
        }
        for (int a = 0; a < VALUES; a++)
            likelier += a != answers[n] && p[a] >= of_answer;
        *right += likelier == 0;
        loss -= log(of_answer);
        p[answers[n]] -= 1;
        for (int a = 0; a < VALUES; a++)
            p[a] /= (double)count;
    }
    return loss / (double)count;
}

/* The loss on the batch at hand, and, with `train`, all d_w. */
static double run_layer(int train, int *right)
{
    const attn_tensor tq = heads(q), tk = heads(k), tv = heads(v);
    const attn_tensor tout = heads(out), tdout = heads(d_out);
    const attn_tensor tdq = heads(d_q), tdk = heads(d_k), tdv = heads(d_v);
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    attn_tensor tlse;
    double loss;

    must(attn_view_bhtd(&tlse, ATTN_F64, lse, B, H, T, 1));
    params.q_lens = lens;
    params.kv_lens = lens;
    params.lse = &tlse; /* kept for the gradients, with out */

    project(asked, &w_q, q);
    project(pairs, &w_k, k);
    project(pairs, &w_v, v);
    must(attn_sdpa(NULL, &params, &tq, &tk, &tv, &tout));
    project(out, &w_o, logits);
    loss = cross_entropy(right);

    if (train) {
        attn_sdpa_gradients gradients = ATTN_SDPA_GRADIENTS_INIT;
        gradients.d_q = &tdq;
        gradients.d_k = &tdk;
        gradients.d_v = &tdv;
        project_back(out, &w_o, d_logits, d_out);
        must(attn_sdpa_backward(NULL, &params, &tq, &tk, &tv, &tout, &tdout,
                                &gradients));
        project_back(asked, &w_q, d_q, NULL);
        project_back(pairs, &w_k, d_k, NULL);
        project_back(pairs, &w_v, d_v, NULL);
    }
    return loss;
}

/* Adam (Kingma and Ba, arXiv:1412.6980). */
static void learn(parameter *p, int step)
{
    const double rate = 0.01, beta1 = 0.9, beta2 = 0.99;

    for (int n = 0; n < p->in * p->out; n++) {
        double g = p->d_w[n];
        p->mean[n] += (1 - beta1) * (g - p->mean[n]);
        p->square[n] += (1 - beta2) * (g * g - p->square[n]);
        p->w[n] -= rate * p->mean[n] / (1 - pow(beta1, step)) /
                   (sqrt(p->square[n] / (1 - pow(beta2, step))) + 1e-8);
    }
}

/* How far some gradients are from what the loss does when their parameter is
 * moved a little, in units of the largest gradient of the matrix. */
static double check(parameter *p)
{
    const double step = 1e-5;
    double largest = 0, furthest = 0;
    int right;

    for (int n = 0; n < p->in * p->out; n++)
        largest = fmax(largest, fabs(p->d_w[n]));
    for (int n = 0; n < p->in * p->out; n += 7) {
        double w = p->w[n], above, below;
        p->w[n] = w + step;
        above = run_layer(0, &right);
        p->w[n] = w - step;
        below = run_layer(0, &right);
        p->w[n] = w;
        furthest =
            fmax(furthest, fabs((above - below) / (2 * step) - p->d_w[n]));
    }
    return furthest / largest;
}

int main(void)
{
    double loss = 0, furthest = 0;
    int right = 0, all = 0;

    for (int m = 0; m < 4; m++)
        for (int n = 0; n < parameters[m]->in * parameters[m]->out; n++)
            parameters[m]->w[n] = (random_below(2001) / 1000.0 - 1) / 2;
    for (int step = 1; step <= STEPS; step++) {
        draw_batch();
        loss = run_layer(1, &right);
        if (step == 1 || step % REPORT == 0)
            printf("step %3d  loss %.4f\n", step, loss);
        for (int m = 0; m < 4; m++)
            learn(parameters[m], step);
    }

    /* Sequences that it has not seen. */
    draw_batch();
    loss = run_layer(1, &right);
    for (int b = 0; b < B; b++)
        all += (int)lens[b];
    printf("new ones  loss %.4f, %d of %d recalled\n", loss, right, all);

    for (int m = 0; m < 4; m++)
        furthest = fmax(furthest, check(parameters[m]));
    printf("gradients against finite differences: %.1e\n", furthest);
    return loss < 0.1 && furthest < 1e-6 ? 0 : 1;
}
