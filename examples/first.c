#include <attn.h>
#include <stdio.h>

int main(void)
{
    const double q[] = {1, 0, 0, 1, 1, 1};
    const double k[] = {1, 0, 0, 1, 1, 1};
    const double v[] = {1, 2, 3, 4, 5, 6};
    double out[6];

    /* batch, heads, key/value heads, queries, keys, width */
    if (attn_sdpa_f64(1, 1, 1, 3, 3, 2, q, k, v, out, ATTN_ALIGN_TOP_LEFT)) {
        fprintf(stderr, "%s\n", attn_last_error());
        return 1;
    }
    for (int i = 0; i < 3; i++)
        printf("%.4f %.4f\n", out[2 * i], out[2 * i + 1]);
    return 0;
}
