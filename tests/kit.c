/* kit.c - see kit.h. */
#define _GNU_SOURCE 1

#include "kit.h"

#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static uint64_t state = 1;

void kit_seed(uint64_t seed)
{
    state = seed * 2 + 1;
}

/* splitmix64: short, and good enough for test data. */
uint64_t kit_next(void)
{
    state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t z = state;
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

int64_t kit_int(int64_t low, int64_t high)
{
    const uint64_t span = (uint64_t)(high - low) + 1;
    return low + (int64_t)(kit_next() % span);
}

double kit_real(void)
{
    return (double)(kit_next() >> 11) / 4503599627370496.0 - 1.0;
}

size_t kit_bytes(attn_dtype dtype)
{
    switch (dtype) {
    case ATTN_F32:
        return sizeof(float);
    case ATTN_F64:
        return sizeof(double);
    default:
        return 1;
    }
}

int64_t kit_elements(const attn_tensor *t)
{
    return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3];
}

attn_tensor kit_view(attn_dtype dtype, void *data, int64_t a, int64_t b,
                     int64_t c, int64_t d)
{
    const attn_tensor t = {
        data, {a, b, c, d}, {b * c * d, c * d, d, 1}, dtype, 0};
    return t;
}

attn_tensor kit_make(attn_dtype dtype, int64_t a, int64_t b, int64_t c,
                     int64_t d)
{
    attn_tensor t = kit_view(dtype, NULL, a, b, c, d);
    t.data = calloc((size_t)kit_elements(&t) + 1, kit_bytes(dtype));
    if (t.data == NULL)
        fail_msg("out of memory");
    kit_fill(&t);
    return t;
}

void kit_copy(const attn_tensor *to, const attn_tensor *from)
{
    const int64_t *s = to->shape;
    for (int64_t b = 0; b < s[0]; b++)
        for (int64_t h = 0; h < s[1]; h++)
            for (int64_t i = 0; i < s[2]; i++)
                for (int64_t j = 0; j < s[3]; j++)
                    kit_set(to, b, h, i, j, kit_get(from, b, h, i, j));
}

void kit_drop(attn_tensor *t)
{
    free(t->data);
    t->data = NULL;
}

static unsigned char *place(const attn_tensor *t, int64_t a, int64_t b,
                            int64_t c, int64_t d)
{
    const int64_t offset = a * t->stride[0] + b * t->stride[1] +
                           c * t->stride[2] + d * t->stride[3];
    return (unsigned char *)t->data + offset * (int64_t)kit_bytes(t->dtype);
}

double kit_get(const attn_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d)
{
    const unsigned char *p = place(t, a, b, c, d);
    float f;
    double x;
    switch (t->dtype) {
    case ATTN_F32:
        memcpy(&f, p, sizeof f);
        return (double)f;
    case ATTN_F64:
        memcpy(&x, p, sizeof x);
        return x;
    default:
        return *p;
    }
}

void kit_set(const attn_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d,
             double value)
{
    unsigned char *p = place(t, a, b, c, d);
    const float f = (float)value;
    switch (t->dtype) {
    case ATTN_F32:
        memcpy(p, &f, sizeof f);
        break;
    case ATTN_F64:
        memcpy(p, &value, sizeof value);
        break;
    default:
        *p = (unsigned char)value;
    }
}

#define EACH_ELEMENT(t)                                 \
    for (int64_t a = 0; a < (t)->shape[0]; a++)         \
        for (int64_t b = 0; b < (t)->shape[1]; b++)     \
            for (int64_t c = 0; c < (t)->shape[2]; c++) \
                for (int64_t d = 0; d < (t)->shape[3]; d++)

void kit_fill(const attn_tensor *t)
{
    EACH_ELEMENT(t)
    {
        const double value =
            t->dtype == ATTN_U8 ? (double)kit_int(0, 1) : kit_real();
        kit_set(t, a, b, c, d, value);
    }
}

void kit_fill_with(const attn_tensor *t, double value)
{
    EACH_ELEMENT(t)
    kit_set(t, a, b, c, d, value);
}

bool kit_same(const attn_tensor *x, const attn_tensor *y)
{
    if (x->dtype != y->dtype || memcmp(x->shape, y->shape, sizeof x->shape))
        return false;
    EACH_ELEMENT(x)
    {
        if (memcmp(place(x, a, b, c, d), place(y, a, b, c, d),
                   kit_bytes(x->dtype)) != 0)
            return false;
    }
    return true;
}

static int saved_out = -1;
static int saved_err = -1;
static int captured = -1;

void kit_capture_begin(void)
{
    fflush(stdout);
    fflush(stderr);
    captured = memfd_create("captured", 0);
    saved_out = dup(1);
    saved_err = dup(2);
    if (captured < 0 || saved_out < 0 || saved_err < 0)
        fail_msg("cannot capture the output");
    dup2(captured, 1);
    dup2(captured, 2);
}

int64_t kit_capture_end(void)
{
    if (captured < 0)
        return 0;
    fflush(stdout);
    fflush(stderr);
    dup2(saved_out, 1);
    dup2(saved_err, 2);
    const int64_t bytes = (int64_t)lseek(captured, 0, SEEK_END);
    close(captured);
    close(saved_out);
    close(saved_err);
    captured = -1;
    return bytes;
}

bool kit_blas_is_exclusive(void)
{
    return strstr(attn_blas_info(), "one at a time") != NULL;
}

bool kit_blas_file_has(const char *part)
{
    Dl_info info;
    void *symbol = dlsym(RTLD_DEFAULT, "cblas_sgemm");
    if (symbol == NULL || dladdr(symbol, &info) == 0)
        return false;
    char *path = realpath(info.dli_fname, NULL);
    const bool has = path != NULL && strstr(path, part) != NULL;
    free(path);
    return has;
}

bool kit_blas_is_blis(void)
{
    return kit_blas_file_has("blis");
}

int kit_thread_count(void)
{
    DIR *dir = opendir("/proc/self/task");
    int count = 0;
    if (dir == NULL)
        return -1;
    for (const struct dirent *e = readdir(dir); e != NULL; e = readdir(dir))
        count += e->d_name[0] != '.';
    closedir(dir);
    return count;
}

int kit_settled_thread_count(void)
{
    int count = kit_thread_count();
    for (int n = 0, same = 0; n < 1000 && same < 20; n++) {
        usleep(1000);
        const int now = kit_thread_count();
        same = now == count ? same + 1 : 0;
        count = now;
    }
    return count;
}
