#define _POSIX_C_SOURCE 200809L /* opendir */
#include "cases.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Folders only: plain files beside them have a dot in their name. */
static int is_case(const char *name)
{
    return strchr(name, '.') == NULL && strcmp(name, "LICENSE") != 0;
}

char **case_list(const char *where, int *num)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", ATTN_TEST_DIR, where);
    DIR *dir = opendir(path);
    if (!dir)
        fail_msg("%s cannot be opened", path);
    char **list = NULL;
    *num = 0;
    for (struct dirent *e = readdir(dir); e; e = readdir(dir)) {
        if (!is_case(e->d_name))
            continue;
        char **longer = realloc(list, sizeof *list * (size_t)(*num + 1));
        assert_non_null(longer);
        list = longer;
        list[*num] = strdup(e->d_name);
        assert_non_null(list[(*num)++]);
    }
    closedir(dir);
    if (*num > 0)
        qsort(list, (size_t)*num, sizeof *list, by_name);
    return list;
}

void case_free_list(char **list, int num)
{
    for (int i = 0; i < num; i++)
        free(list[i]);
    free(list);
}

static void load_tensors(test_case *c, const char *folder, char *roles)
{
    char *rest = NULL;
    for (char *role = strtok_r(roles, " ", &rest); role;
         role = strtok_r(NULL, " ", &rest)) {
        char path[1400];
        const int n = c->num_tensors;
        if (n == CASE_MAX_TENSORS || strlen(role) >= sizeof c->tensor[n].role)
            fail_msg("%s: tensor %s does not fit", c->name, role);
        snprintf(path, sizeof path, "%s/%s.npy", folder, role);
        const char *error = npy_load(path, &c->tensor[n].array);
        if (error)
            fail_msg("%s: %s", path, error);
        memcpy(c->tensor[n].role, role, strlen(role) + 1);
        c->num_tensors++;
    }
}

void case_load(test_case *c, const char *where, const char *name)
{
    char folder[1200], path[1300];
    memset(c, 0, sizeof *c);
    snprintf(c->name, sizeof c->name, "%s", name);
    snprintf(folder, sizeof folder, "%s/%s/%s", ATTN_TEST_DIR, where, name);
    snprintf(path, sizeof path, "%s/case.txt", folder);
    FILE *f = fopen(path, "r");
    if (!f)
        fail_msg("%s cannot be opened", path);
    while (c->num_lines < CASE_MAX_LINES &&
           fgets(c->line[c->num_lines], sizeof c->line[0], f)) {
        char *line = c->line[c->num_lines++];
        line[strcspn(line, "\n")] = '\0';
    }
    fclose(f);
    const char *roles = case_value(c, "tensors", 0);
    if (!roles)
        fail_msg("%s names no tensors", path);
    char copy[256];
    snprintf(copy, sizeof copy, "%s", roles);
    load_tensors(c, folder, copy);
}

void case_free(test_case *c)
{
    for (int i = 0; i < c->num_tensors; i++)
        npy_free(&c->tensor[i].array);
    c->num_tensors = 0;
}

const char *case_value(const test_case *c, const char *word, int n)
{
    const size_t len = strlen(word);
    for (int i = 0; i < c->num_lines; i++) {
        const char *line = c->line[i];
        if (strncmp(line, word, len) != 0)
            continue;
        if (line[len] != ' ' && line[len] != '\0')
            continue;
        if (n-- == 0)
            return line[len] ? line + len + 1 : line + len;
    }
    return NULL;
}

double case_number(const test_case *c, const char *word, double missing)
{
    const char *value = case_value(c, word, 0);
    return value ? strtod(value, NULL) : missing;
}

const npy_array *case_array(const test_case *c, const char *role)
{
    for (int i = 0; i < c->num_tensors; i++)
        if (strcmp(c->tensor[i].role, role) == 0)
            return &c->tensor[i].array;
    return NULL;
}

const attn_tensor *case_tensor(const test_case *c, const char *role)
{
    const npy_array *a = case_array(c, role);
    return a ? &a->view : NULL;
}
