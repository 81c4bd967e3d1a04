/* guard.c - see guard.h. */
#define _GNU_SOURCE 1

#include "guard.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CANARY 0xC5

static size_t page(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

struct guard guard_make(size_t bytes, size_t alignment, enum guard_side side)
{
    const size_t p = page();
    const size_t body = (bytes + alignment + p) / p * p;
    struct guard g;
    g.bytes = bytes;
    g.map_bytes = body + 2 * p;
    g.map =
        mmap(NULL, g.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g.map == MAP_FAILED ||
        mprotect(g.map + p, body, PROT_READ | PROT_WRITE) != 0) {
        perror("guard_make");
        exit(EXIT_FAILURE);
    }
    memset(g.map + p, CANARY, body);
    size_t start = p;
    if (side == GUARD_END)
        start = (p + body - bytes) / alignment * alignment;
    g.data = g.map + start;
    return g;
}

void guard_freeze(const struct guard *g)
{
    const size_t p = page();
    if (mprotect(g->map + p, g->map_bytes - 2 * p, PROT_READ) != 0) {
        perror("guard_freeze");
        exit(EXIT_FAILURE);
    }
}

int guard_check(const struct guard *g)
{
    const unsigned char *data = g->data;
    const unsigned char *end = g->map + g->map_bytes - page();
    for (const unsigned char *c = g->map + page(); c < end; c++) {
        const int inside = c >= data && c < data + g->bytes;
        if (!inside && *c != CANARY)
            return 0;
    }
    return 1;
}

void guard_drop(struct guard *g)
{
    munmap(g->map, g->map_bytes);
    g->map = NULL;
    g->data = NULL;
}
