/* The only file that calls the C library's allocator. */
#include "attn_internal.h"

#include "alloc.h"

#include <stdlib.h>

static void *libc_alloc(void *user, size_t bytes, size_t alignment)
{
    (void)user;
    /* aligned_alloc wants a multiple of the alignment. */
    if (bytes > SIZE_MAX - (alignment - 1))
        return NULL;
    return aligned_alloc(alignment, (bytes + alignment - 1) & ~(alignment - 1));
}

static void libc_free(void *user, void *ptr)
{
    (void)user;
    free(ptr);
}

const attn__allocator attn__libc_allocator = {libc_alloc, libc_free, NULL};

void *attn__alloc(const attn__allocator *allocator, size_t bytes)
{
    ASSERT(bytes > 0);
    return allocator->alloc(allocator->user, bytes, ATTN__ALIGNMENT);
}

void attn__free(const attn__allocator *allocator, void *ptr)
{
    if (ptr)
        allocator->free(allocator->user, ptr);
}
