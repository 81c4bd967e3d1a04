/* Contexts, and the default one. */
#include "attn_internal.h"

#include "context.h"

#include "check.h"
#include "status.h"

#include <inttypes.h>
#include <stdlib.h>

/* Blocks larger than this are not kept: they belong to calls so long that an
 * allocation does not show, and hosts do not expect us to sit on them. */
#define MAX_SPARE_BYTES ((size_t)8 << 20)

/* In front of each block of scratch memory. */
typedef union scratch_header {
    size_t bytes; /* of the block, without the header */
    unsigned char space[ATTN__ALIGNMENT];
} scratch_header;

static attn_context default_context;

/* A whole number from 1 to ATTN__MAX_THREADS, or 1. */
static int32_t threads_from_environment(void)
{
    const char *text = getenv("ATTN_NUM_THREADS");
    char *end;
    long n;

    if (!text || !*text)
        return 1;
    n = strtol(text, &end, 10);
    return *end == '\0' && n >= 1 && n <= ATTN__MAX_THREADS ? (int32_t)n : 1;
}

static void make_default(void)
{
    attn_context *c = &default_context;

    c->allocator = attn__libc_allocator;
    c->executor.num_threads = threads_from_environment();
    if (c->executor.num_threads > 1) {
        c->executor.pool = attn__pool_create(&c->allocator);
        if (!c->executor.pool)
            c->executor.num_threads = 1;
    }
}

const attn_context *attn__context(const attn_context *context)
{
    static atomic_int made;

    if (context)
        return context;
    attn__run_once(&made, make_default);
    return &default_context;
}

void attn_context_params_init(attn_context_params *params)
{
    static const attn_context_params init = ATTN_CONTEXT_PARAMS_INIT;

    if (params)
        *params = init;
}

static attn_status check_params(const attn_context_params *p)
{
    static const char call[] = "attn_context_create";

    if (p->reserved != 0)
        return attn__fail(ATTN_ERR_UNSUPPORTED,
                          "%s: params.reserved is %" PRId32 "; it must be 0",
                          call, p->reserved);
    if (p->num_threads < 0 || p->num_threads > ATTN__MAX_THREADS)
        return attn__fail(ATTN_ERR_VALUE,
                          "%s: params.num_threads is %" PRId32
                          "; it must be 0 (default) to %d",
                          call, p->num_threads, ATTN__MAX_THREADS);
    if (!p->alloc != !p->free)
        return attn__fail(ATTN_ERR_NULL,
                          "%s: params.%s is NULL, but params.%s is not; give "
                          "both or neither",
                          call, p->alloc ? "free" : "alloc",
                          p->alloc ? "alloc" : "free");
    return ATTN_OK;
}

attn_status attn_context_create(attn_context **context,
                                const attn_context_params *params)
{
    attn_context_params p;
    attn__allocator allocator = attn__libc_allocator;
    attn_context *c;
    attn_status status;
    size_t bytes = sizeof *c;

    if (!context)
        return attn__fail(ATTN_ERR_NULL,
                          "attn_context_create: context is NULL");
    status = attn__read_params("attn_context_create", "params", &p, sizeof p,
                               params, sizeof p);
    if (!status)
        status = check_params(&p);
    if (status)
        return status;
    if (p.alloc)
        allocator = (attn__allocator){p.alloc, p.free, p.alloc_user};
    c = attn__alloc(&allocator, sizeof *c);
    if (!c)
        goto out_of_memory;
    c->allocator = allocator;
    atomic_init(&c->spare, NULL);
    c->executor =
        (attn__executor){p.num_threads, p.parallel_for, p.parallel_user, NULL};
    if (p.num_threads == 0)
        c->executor.num_threads = threads_from_environment();
    if (c->executor.num_threads > 1 && !p.parallel_for) {
        c->executor.pool = attn__pool_create(&allocator);
        if (!c->executor.pool) {
            attn__free(&allocator, c);
            bytes += attn__pool_bytes();
            goto out_of_memory;
        }
    }
    *context = c;
    return ATTN_OK;

out_of_memory:
    return attn__fail(ATTN_ERR_NOMEM,
                      "attn_context_create: no memory for the %zu bytes of a "
                      "context",
                      bytes);
}

void attn_context_destroy(attn_context *context)
{
    attn__allocator allocator;

    if (!context)
        return;
    allocator = context->allocator;
    attn__pool_destroy(context->executor.pool, &allocator);
    attn__free(&allocator, atomic_load(&context->spare));
    attn__free(&allocator, context);
}

int32_t attn_context_num_threads(const attn_context *context)
{
    return attn__context(context)->executor.num_threads;
}

void *attn__scratch_take(const attn_context *context, size_t bytes)
{
    attn_context *c = (attn_context *)(uintptr_t)context;
    scratch_header *header = atomic_exchange(&c->spare, NULL);

    if (header && header->bytes < bytes) {
        attn__free(&c->allocator, header);
        header = NULL;
    }
    if (!header) {
        if (bytes > SIZE_MAX - sizeof *header)
            return NULL;
        header = attn__alloc(&c->allocator, bytes + sizeof *header);
        if (!header)
            return NULL;
        header->bytes = bytes;
    }
    return header + 1;
}

size_t attn__scratch_bytes(const void *scratch)
{
    return ((const scratch_header *)scratch - 1)->bytes;
}

void attn__scratch_give(const attn_context *context, void *scratch)
{
    attn_context *c = (attn_context *)(uintptr_t)context;
    scratch_header *header = scratch;

    if (!header)
        return;
    header--;
    if (header->bytes <= MAX_SPARE_BYTES)
        header = atomic_exchange(&c->spare, header);
    attn__free(&c->allocator, header);
}
