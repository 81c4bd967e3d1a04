/*
 * Decoding with a cache of keys and values: 8 query heads share 2 key/value
 * heads, a prompt comes first, then one token at a time. Every step equals the
 * row that one causal call over the whole sequence gives.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <attn.h>

enum { HQ = 8, HKV = 2, D = 16, PROMPT = 5, LENGTH = 12, CAPACITY = 32 };

/* (1, HKV, CAPACITY, D): room for longer sequences than are in it. */
static float k_cache[HKV * CAPACITY * D], v_cache[HKV * CAPACITY * D];

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

/* Rows of all key/value heads for positions from .. from + count - 1. */
static void append(float *cache, const float *all, int64_t from, int64_t count)
{
    for (int64_t h = 0; h < HKV; h++)
        memcpy(cache + (h * CAPACITY + from) * D, all + (h * LENGTH + from) * D,
               (size_t)(count * D) * sizeof(float));
}

/* Attention of the queries at from .. from + count - 1 over the cache. */
static void step(const float *q_all, float *out, int64_t from, int64_t count)
{
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    attn_tensor q, k, v, o;

    must(attn_view_bhtd(&q, ATTN_F32, q_all + from * D, 1, HQ, count, D));
    must(attn_view_bhtd(&o, ATTN_F32, out + from * D, 1, HQ, count, D));
    q.stride[1] = o.stride[1] = LENGTH * D; /* a slice of (1,HQ,LENGTH,D) */
    must(attn_view_bhtd(&k, ATTN_F32, k_cache, 1, HKV, from + count, D));
    must(attn_view_bhtd(&v, ATTN_F32, v_cache, 1, HKV, from + count, D));
    k.stride[1] = v.stride[1] = CAPACITY * D;
    /* Query 0 of this call stands at position from. */
    params.causal = 1;
    params.align = ATTN_ALIGN_OFFSET;
    params.q_offset = from;
    must(attn_sdpa(NULL, &params, &q, &k, &v, &o));
}

int main(void)
{
    static float q[HQ * LENGTH * D], k[HKV * LENGTH * D], v[HKV * LENGTH * D];
    static float whole[HQ * LENGTH * D], stepped[HQ * LENGTH * D];
    double largest = 0;

    fill(q, HQ * LENGTH * D, 0);
    fill(k, HKV * LENGTH * D, 1);
    fill(v, HKV * LENGTH * D, 2);

    append(k_cache, k, 0, PROMPT);
    append(v_cache, v, 0, PROMPT);
    step(q, stepped, 0, PROMPT);
    for (int64_t at = PROMPT; at < LENGTH; at++) {
        append(k_cache, k, at, 1);
        append(v_cache, v, at, 1);
        step(q, stepped, at, 1);
    }

    must(attn_sdpa_f32(1, HQ, HKV, LENGTH, LENGTH, D, q, k, v, whole,
                       ATTN_ALIGN_TOP_LEFT));
    for (int n = 0; n < HQ * LENGTH * D; n++)
        largest = fmax(largest, fabs((double)whole[n] - (double)stepped[n]));
    printf("prompt of %d and %d steps against one causal call: %.1e\n", PROMPT,
           LENGTH - PROMPT, largest);
    return largest <= 1e-6 ? 0 : 1;
}
