/*
 * Reader of the case folders under tests/golden and tests/cases: case.txt,
 * whose lines are a word and its values, and the .npy files that its last
 * line names. The formats are described in the README.md of each folder.
 */
#ifndef TESTS_CASES_H
#define TESTS_CASES_H

#include "npy.h"

#define CASE_MAX_LINES 32
#define CASE_MAX_TENSORS 24

typedef struct test_case {
    char name[96];
    int num_lines;
    char line[CASE_MAX_LINES][256];
    int num_tensors;
    struct {
        char role[32];
        npy_array array;
    } tensor[CASE_MAX_TENSORS];
} test_case;

/* The names of the folders below ATTN_TEST_DIR/where, sorted; num gets their
 * number. The list and its strings are freed by case_free_list. */
char **case_list(const char *where, int *num);
void case_free_list(char **list, int num);

/* Fails the running test if something cannot be read. */
void case_load(test_case *c, const char *where, const char *name);
void case_free(test_case *c);

/* The values behind the n-th line that begins with this word, "" if it has
 * none; NULL if there is no such line. */
const char *case_value(const test_case *c, const char *word, int n);
/* The same as a number; missing when there is no such line. */
double case_number(const test_case *c, const char *word, double missing);
/* NULL if the case has no such tensor. */
const attn_tensor *case_tensor(const test_case *c, const char *role);
const npy_array *case_array(const test_case *c, const char *role);

#endif
