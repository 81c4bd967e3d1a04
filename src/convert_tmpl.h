/*
 * Template of the conversion of a row; needs NAME, SOURCE and TARGET, the types
 * in C (uint16_t for 16 bits), and CONVERT(x), an expression of type TARGET.
 * The loop of unit strides stands apart so that compilers vectorise it.
 */
static void NAME(const void *from, int64_t sx, void *to, int64_t sy, int64_t n)
{
    const SOURCE *restrict x = from;
    TARGET *restrict y = to;

    if (sx == 1 && sy == 1)
        for (int64_t e = 0; e < n; e++)
            y[e] = CONVERT(x[e]);
    else
        for (int64_t e = 0; e < n; e++)
            y[e * sy] = CONVERT(x[e * sx]);
}

#undef NAME
#undef SOURCE
#undef TARGET
#undef CONVERT
