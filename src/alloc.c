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

void *attn__bump_take(attn__bump *bump, int64_t count, size_t size)
{
    unsigned char *piece = bump->base ? bump->base + bump->bytes : NULL;
    /* Small numbers go without the division: a call takes some thirty pieces,
     * twice, and spent a tenth of its time dividing (T = 5). */
    bool small = (uint64_t)count <= SIZE_MAX >> 17 && size <= 65536;
    size_t bytes;

    ASSERT(count >= 0);
    if (bump->bytes == SIZE_MAX ||
        (!small && (uint64_t)count > (SIZE_MAX - ATTN__ALIGNMENT) / size)) {
        bump->bytes = SIZE_MAX;
        return NULL;
    }
    bytes = (size_t)count * size;
    bytes = (bytes + ATTN__ALIGNMENT - 1) & ~(size_t)(ATTN__ALIGNMENT - 1);
    bump->bytes =
        bytes < SIZE_MAX - bump->bytes ? bump->bytes + bytes : SIZE_MAX;
    return piece;
}
