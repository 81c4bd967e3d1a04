/*
 * Reads .npy files (NumPy's array format, version 1) of float32, float64,
 * int64, bool and uint8, in C order, little-endian. Header only: each example
 * is one program.
 */
#ifndef EXAMPLES_NPY_H
#define EXAMPLES_NPY_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NPY_MAX_DIMS 8

struct npy {
    char type[4]; /* "<f4", "<f8", "<i8", "|b1", "|u1" */
    int dims;
    int64_t shape[NPY_MAX_DIMS];
    int64_t count; /* elements */
    void *data;    /* from malloc; npy_free() */
};

static inline size_t npy_item_bytes(const char *type)
{
    return (size_t)(type[2] - '0');
}

/* Reads "'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }". */
static inline int npy_parse(const char *header, struct npy *array)
{
    const char *descr = strstr(header, "'descr': '");
    const char *shape = strstr(header, "'shape': (");

    if (!descr || !shape || !strstr(header, "'fortran_order': False"))
        return -1;
    memcpy(array->type, descr + 10, 3);
    array->type[3] = '\0';
    if (!strstr("<f4 <f8 <i8 |b1 |u1", array->type))
        return -1;
    array->dims = 0;
    array->count = 1;
    for (shape += 10; *shape != ')' && *shape != '\0';) {
        char *end;
        int64_t size = strtoll(shape, &end, 10);
        if (end == shape || size < 0 || array->dims == NPY_MAX_DIMS)
            return -1;
        array->shape[array->dims++] = size;
        array->count *= size;
        shape = end + strspn(end, ", ");
    }
    return 0;
}

static inline int npy_read_stream(FILE *file, struct npy *array)
{
    unsigned char start[10];
    char header[4096];
    size_t length, bytes;

    if (fread(start, 1, 10, file) != 10 || memcmp(start, "\x93NUMPY\x01", 7))
        return -1;
    length = start[8] + 256u * start[9];
    if (length >= sizeof(header) || fread(header, 1, length, file) != length)
        return -1;
    header[length] = '\0';
    if (npy_parse(header, array))
        return -1;
    bytes = (size_t)array->count * npy_item_bytes(array->type);
    array->data = malloc(bytes ? bytes : 1);
    if (!array->data)
        return -1;
    if (fread(array->data, 1, bytes, file) != bytes) {
        free(array->data);
        return -1;
    }
    return 0;
}

/* Reads directory/name. Returns 0; or says on stderr what is wrong and returns
 * -1, with array->data NULL. */
static inline int npy_read(const char *directory, const char *name,
                           struct npy *array)
{
    char path[4096];
    FILE *file;
    int failed = -1;

    memset(array, 0, sizeof(*array));
    if (snprintf(path, sizeof(path), "%s/%s", directory, name) >=
        (int)sizeof(path))
        return -1;
    file = fopen(path, "rb");
    if (file) {
        failed = npy_read_stream(file, array);
        fclose(file);
    }
    if (failed) {
        array->data = NULL;
        fprintf(stderr, "%s: not a readable .npy file\n", path);
    }
    return failed;
}

static inline void npy_free(struct npy *array)
{
    free(array->data);
    array->data = NULL;
}

#endif
