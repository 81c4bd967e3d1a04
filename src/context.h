/* How a call runs: executor, allocator, and scratch memory kept between calls.
 */
#ifndef ATTN_CONTEXT_H
#define ATTN_CONTEXT_H

#include "threads.h"

struct attn_context {
    attn__executor executor;
    attn__allocator allocator;
    /* One block of scratch memory that is not in use, so that a loop of calls
     * does not allocate. A context is const to its users; this is a cache. */
    _Atomic(void *) spare;
};

/* context itself, or the process's default for NULL. */
const attn_context *attn__context(const attn_context *context);

/* At least bytes (> 0) of scratch memory, aligned; NULL: none to be had. */
void *attn__scratch_take(const attn_context *context, size_t bytes);
/* How many bytes a block that was taken really has. */
size_t attn__scratch_bytes(const void *scratch);
void attn__scratch_give(const attn_context *context, void *scratch);

#endif
