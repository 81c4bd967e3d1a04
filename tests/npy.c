#include "npy.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the three items of the header's dictionary say. */
typedef struct header {
    char descr[8];
    int64_t shape[4];
    int rank;
} header;

static const char *parse_descr(const char *text, header *h)
{
    const char *p = strstr(text, "'descr'");
    p = p ? strchr(p + 7, '\'') : NULL;
    const char *end = p ? strchr(p + 1, '\'') : NULL;
    if (!end || end - p - 1 >= (long)sizeof h->descr)
        return "npy: no element type in the header";
    memset(h->descr, 0, sizeof h->descr);
    memcpy(h->descr, p + 1, (size_t)(end - p - 1));
    return NULL;
}

static const char *parse_shape(const char *text, header *h)
{
    const char *p = strstr(text, "'shape'");
    p = p ? strchr(p, '(') : NULL;
    if (!p)
        return "npy: no shape in the header";
    for (h->rank = 0;; h->rank++) {
        p += strspn(p, "(, ");
        if (*p == ')')
            return NULL;
        char *end;
        const long long n = strtoll(p, &end, 10);
        if (end == p || n < 0)
            return "npy: a shape that is no list of sizes";
        if (h->rank == 4)
            return "npy: more than 4 dimensions";
        h->shape[h->rank] = n;
        p = end;
    }
}

static const char *read_header(FILE *f, header *h)
{
    unsigned char start[12];
    if (fread(start, 1, 10, f) != 10 || memcmp(start, "\x93NUMPY", 6) != 0)
        return "npy: not an .npy file";
    size_t len = start[8] + ((size_t)start[9] << 8);
    if (start[6] > 1) {
        if (fread(start + 10, 1, 2, f) != 2)
            return "npy: ends inside the header";
        len += ((size_t)start[10] << 16) + ((size_t)start[11] << 24);
    }
    char text[4096];
    if (len >= sizeof text || fread(text, 1, len, f) != len)
        return "npy: ends inside the header";
    text[len] = '\0';
    if (!strstr(text, "'fortran_order': False"))
        return "npy: not in C order";
    const char *error = parse_descr(text, h);
    return error ? error : parse_shape(text, h);
}

/* IEEE binary16 to binary32, exact. */
static float half_to_float(unsigned bits)
{
    const int exponent = (int)(bits >> 10 & 31u);
    const unsigned fraction = bits & 1023u;
    float value;
    if (exponent == 31)
        value = fraction ? (float)NAN : (float)INFINITY;
    else if (exponent == 0)
        value = ldexpf((float)fraction, -24);
    else
        value = ldexpf((float)(fraction + 1024u), exponent - 25);
    return bits & 0x8000u ? -value : value;
}

/* From the last element on, because the wider values overlay the halves. */
static void widen_halves(void *data, int64_t count)
{
    unsigned char *bytes = data;
    for (int64_t i = count - 1; i >= 0; i--) {
        const unsigned bits = bytes[2 * i] + ((unsigned)bytes[2 * i + 1] << 8);
        const float value = half_to_float(bits);
        memcpy(bytes + 4 * i, &value, sizeof value);
    }
}

static const char *set_type(npy_array *a, const char *descr, size_t *stored)
{
    static const struct {
        const char *descr;
        attn_dtype dtype;
        size_t bytes;
    } types[] = {{"<f4", ATTN_F32, 4}, {"<f8", ATTN_F64, 8},
                 {"<f2", ATTN_F32, 2}, {"|b1", ATTN_U8, 1},
                 {"|u1", ATTN_U8, 1},  {"<i8", NPY_I64, 8}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        if (strcmp(descr, types[i].descr) == 0) {
            a->view.dtype = types[i].dtype;
            *stored = types[i].bytes;
            a->is_half = types[i].bytes == 2;
            return NULL;
        }
    }
    return "npy: an element type this reader does not know";
}

static void set_shape(npy_array *a, const header *h)
{
    a->rank = h->rank;
    a->count = 1;
    for (int i = 3; i >= 0; i--) {
        const int from = i - (4 - h->rank);
        a->view.shape[i] = from >= 0 ? h->shape[from] : 1;
        a->view.stride[i] = a->count;
        a->count *= a->view.shape[i];
    }
}

static const char *read_array(FILE *f, npy_array *a)
{
    header h;
    size_t stored = 0;
    const char *error = read_header(f, &h);
    if (!error)
        error = set_type(a, h.descr, &stored);
    if (error)
        return error;
    set_shape(a, &h);
    const size_t n = (size_t)a->count;
    /* Never zero bytes; twice for the halves that become floats. */
    a->view.data = malloc(n * stored * 2 + 1);
    if (!a->view.data)
        return "npy: no memory";
    if (fread(a->view.data, stored, n, f) != n)
        return "npy: ends inside the data";
    if (fgetc(f) != EOF)
        return "npy: more bytes than the shape has elements";
    if (a->is_half)
        widen_halves(a->view.data, a->count);
    return NULL;
}

const char *npy_load(const char *path, npy_array *array)
{
    memset(array, 0, sizeof *array);
    FILE *f = fopen(path, "rb");
    if (!f)
        return "npy: cannot be opened";
    const char *error = read_array(f, array);
    fclose(f);
    if (error)
        npy_free(array);
    return error;
}

void npy_free(npy_array *array)
{
    free(array->view.data);
    array->view.data = NULL;
}
