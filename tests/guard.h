/*
 * guard.h - memory between two inaccessible pages.
 *
 * A read or write one byte too far is a SIGSEGV at the side asked for, and a
 * changed canary (found by guard_check) at the other.
 */
#ifndef GUARD_H
#define GUARD_H

#include <stddef.h>

enum guard_side {
    GUARD_END,  /* the memory ends where an inaccessible page begins */
    GUARD_START /* the memory begins where an inaccessible page ends */
};

struct guard {
    void *data; /* bytes bytes, at a multiple of alignment */
    size_t bytes;
    unsigned char *map;
    size_t map_bytes;
};

/* alignment: a power of two, at most a page. With GUARD_END the last byte is
 * followed by the page only if bytes is a multiple of alignment. */
struct guard guard_make(size_t bytes, size_t alignment, enum guard_side side);
/* Makes the memory read-only, so that a write is a SIGSEGV too. */
void guard_freeze(const struct guard *g);
/* Nonzero if every byte around the memory is as guard_make left it. */
int guard_check(const struct guard *g);
void guard_drop(struct guard *g);

#endif
