/*
 * Decoding with a cache of keys and values: 8 query heads share 2 key/value
 * heads, keys are turned by their positions as they are appended. A prompt
 * comes first, then one token at a time; every step equals the row that one
 * causal call over the whole sequence gives. A second sequence then goes on
 * from the same prompt, whose pages it shares.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <attn.h>

enum { HQ = 8, HKV = 2, D = 16, PROMPT = 6, LENGTH = 12, PAGE = 4 };

/* (1,H,LENGTH,D), as projections of a model would give them. */
static float q[HQ * LENGTH * D], k[HKV * LENGTH * D], v[HKV * LENGTH * D];
static float cosines[LENGTH * D / 2], sines[LENGTH * D / 2];
static attn_tensor cos_table, sin_table;

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

/* Positions from .. from + count - 1 of one of the arrays. */
static attn_tensor slice(float *x, int64_t heads, int64_t from, int64_t count)
{
    attn_tensor t;

    must(attn_view_bhtd(&t, ATTN_F32, x + from * D, 1, heads, count, D));
    t.stride[1] = LENGTH * D;
    return t;
}

static attn_kv_cache *make_cache(void)
{
    attn_kv_cache_params params = ATTN_KV_CACHE_PARAMS_INIT;
    attn_kv_cache *cache;

    params.kind = ATTN_KV_CACHE_PAGED;
    params.dtype = ATTN_F32;
    params.num_seqs = 2;
    params.kv_heads = HKV;
    params.capacity = LENGTH;
    params.width = D;
    params.page_size = PAGE;
    params.rotary_style = ATTN_ROTARY_HALVES;
    params.cos_table = &cos_table;
    params.sin_table = &sin_table;
    must(attn_kv_cache_create(NULL, &params, &cache));
    return cache;
}

/* The next `count` tokens of a sequence: their keys and values go into the
 * cache, their queries over all that is in it then. */
static void step(attn_kv_cache *cache, int64_t seq, int64_t count, float *out)
{
    int64_t at = attn_kv_cache_length(cache, seq);
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    attn_rotary_params rotary = ATTN_ROTARY_PARAMS_INIT;
    attn_tensor new_k = slice(k, HKV, at, count);
    attn_tensor new_v = slice(v, HKV, at, count);
    attn_tensor new_q = slice(q, HQ, at, count);
    attn_tensor result = slice(out, HQ, at, count);

    must(attn_kv_cache_append(NULL, cache, &seq, NULL, &new_k, &new_v));
    /* Turned queries go where the result will be: out may be q. */
    rotary.style = ATTN_ROTARY_HALVES;
    rotary.offset = at;
    must(attn_rotary(NULL, &rotary, &new_q, &cos_table, &sin_table, &result));
    params.causal = 1;
    must(attn_kv_cache_attend(NULL, cache, &seq, &params, &result, &result));
}

/* The same without a cache: everything turned, then one causal call. */
static void all_at_once(float *out)
{
    static float turned_k[HKV * LENGTH * D];
    attn_rotary_params rotary = ATTN_ROTARY_PARAMS_INIT;
    attn_sdpa_params params = ATTN_SDPA_PARAMS_INIT;
    attn_tensor all_q = slice(q, HQ, 0, LENGTH);
    attn_tensor all_k = slice(k, HKV, 0, LENGTH);
    attn_tensor all_v = slice(v, HKV, 0, LENGTH);
    attn_tensor keys = slice(turned_k, HKV, 0, LENGTH);
    attn_tensor result = slice(out, HQ, 0, LENGTH);

    rotary.style = ATTN_ROTARY_HALVES;
    must(attn_rotary(NULL, &rotary, &all_q, &cos_table, &sin_table, &result));
    must(attn_rotary(NULL, &rotary, &all_k, &cos_table, &sin_table, &keys));
    params.causal = 1;
    params.align = ATTN_ALIGN_TOP_LEFT;
    must(attn_sdpa(NULL, &params, &result, &keys, &all_v, &result));
}

/* The largest difference at positions from `from` on. */
static double difference(const float *x, const float *y, int64_t from)
{
    double largest = 0;

    for (int64_t h = 0; h < HQ; h++)
        for (int64_t n = (h * LENGTH + from) * D; n < (h + 1) * LENGTH * D; n++)
            largest = fmax(largest, fabs((double)x[n] - (double)y[n]));
    return largest;
}

int main(void)
{
    static float whole[HQ * LENGTH * D];
    static float stepped[HQ * LENGTH * D], shared[HQ * LENGTH * D];
    attn_kv_cache *cache;
    double worst, worst_shared;
    int64_t pages;

    fill(q, HQ * LENGTH * D, 0);
    fill(k, HKV * LENGTH * D, 1);
    fill(v, HKV * LENGTH * D, 2);
    must(attn_view_matrix(&cos_table, ATTN_F32, cosines, LENGTH, D / 2, D / 2));
    must(attn_view_matrix(&sin_table, ATTN_F32, sines, LENGTH, D / 2, D / 2));
    must(attn_rotary_tables(0, D, 10000.0, &cos_table, &sin_table));
    cache = make_cache();
    pages = attn_kv_cache_free_pages(cache);

    step(cache, 0, PROMPT, stepped);
    must(attn_kv_cache_share(cache, 1, 0, PROMPT));
    while (attn_kv_cache_length(cache, 0) < LENGTH)
        step(cache, 0, 1, stepped);
    while (attn_kv_cache_length(cache, 1) < LENGTH)
        step(cache, 1, 2, shared); /* two at a time, for a change */
    pages -= attn_kv_cache_free_pages(cache);
    attn_kv_cache_destroy(cache);

    all_at_once(whole);
    worst = difference(whole, stepped, 0);
    worst_shared = difference(whole, shared, PROMPT);
    printf("prompt of %d and %d steps against one causal call: %.1e\n", PROMPT,
           LENGTH - PROMPT, worst);
    printf("a second sequence from the same prompt: %.1e\n", worst_shared);
    printf("pages of %d keys for 2 sequences of %d: %d\n", PAGE, LENGTH,
           (int)pages);
    return worst <= 1e-6 && worst_shared <= 1e-6 && pages == 5 ? 0 : 1;
}
