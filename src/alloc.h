/* Memory: the hook every allocation goes through, and the bump allocator that
 * cuts scratch memory into pieces. */
#ifndef ATTN_ALLOC_H
#define ATTN_ALLOC_H

typedef struct attn__allocator {
    attn_alloc_fn alloc;
    attn_free_fn free;
    void *user;
} attn__allocator;

/* The C library's. */
extern const attn__allocator attn__libc_allocator;

/* bytes > 0, at a multiple of ATTN__ALIGNMENT; NULL if there is none. */
void *attn__alloc(const attn__allocator *allocator, size_t bytes);
void attn__free(const attn__allocator *allocator, void *ptr);

/*
 * Pieces cut one after the other from one block. With base NULL only the size
 * is found: the same code runs once to measure and once to cut. After an
 * overflow, bytes is SIZE_MAX and stays so.
 */
typedef struct attn__bump {
    unsigned char *base;
    size_t bytes; /* used so far */
} attn__bump;

/* count elements of `size` bytes, aligned; NULL while measuring. */
void *attn__bump_take(attn__bump *bump, int64_t count, size_t size);

#endif
