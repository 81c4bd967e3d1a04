/*
 * Reader of .npy files (versions 1 to 3, C order, little-endian, rank 0 to 4)
 * for the test data. float16 is widened to float32, bool becomes uint8.
 */
#ifndef TESTS_NPY_H
#define TESTS_NPY_H

#include "attn.h"

/* Element type of an int64 array; attn.h has none. */
#define NPY_I64 100

typedef struct npy_array {
    /* Shape with leading ones, contiguous strides; data is from malloc. */
    attn_tensor view;
    int rank;      /* as written in the file */
    int is_half;   /* the file held float16 */
    int64_t count; /* number of elements */
} npy_array;

/* Returns NULL on success, else a constant text that says what is wrong. */
const char *npy_load(const char *path, npy_array *array);
void npy_free(npy_array *array);

#endif
