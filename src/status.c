/* Status codes, the last sentence of each thread, and the version. */
#include "attn_internal.h"

#include "status.h"

#include "cpu.h"

#include <stdarg.h>
#include <stdio.h>

/* The one list that strings are made from. */
#define STATUS_LIST(S)                                                   \
    S(ATTN_OK, "done")                                                   \
    S(ATTN_ERR_NULL, "a required pointer is NULL")                       \
    S(ATTN_ERR_SIZE, "a size is negative or too large")                  \
    S(ATTN_ERR_SHAPE, "the sizes of two arguments do not fit")           \
    S(ATTN_ERR_TYPE, "an element type is unknown or differs")            \
    S(ATTN_ERR_VALUE, "a constant or number is not allowed")             \
    S(ATTN_ERR_STRUCT, "struct_size is below the first version")         \
    S(ATTN_ERR_UNSUPPORTED, "asks for what this version cannot do")      \
    S(ATTN_ERR_STRIDE, "strides that cannot work")                       \
    S(ATTN_ERR_ALIGN, "a pointer is not aligned to its type")            \
    S(ATTN_ERR_OVERLAP, "an output shares memory with another argument") \
    S(ATTN_ERR_WORKSPACE, "scratch memory is too small or misaligned")   \
    S(ATTN_ERR_NOMEM, "memory could not be allocated")                   \
    S(ATTN_ERR_BLAS, "the loaded BLAS cannot be used")                   \
    S(ATTN_ERR_FULL, "a key/value cache has no room left")

static _Thread_local char last_error[512];

attn_status attn__fail(attn_status status, const char *format, ...)
{
    va_list args;

    ASSERT(status < 0);
    va_start(args, format);
    (void)vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

const char *attn_strerror(attn_status status)
{
#define AS_CASE(code, text) \
    case code:              \
        return text;
    switch (status) {
        STATUS_LIST(AS_CASE)
    default:
        return "unknown status";
    }
#undef AS_CASE
}

const char *attn_last_error(void)
{
    return last_error;
}

#define STRING_OF(x) #x
#define STRING(x) STRING_OF(x)
#define VERSION                \
    STRING(ATTN_VERSION_MAJOR) \
    "." STRING(ATTN_VERSION_MINOR) "." STRING(ATTN_VERSION_PATCH)

#if defined(__clang__)
#define COMPILER __VERSION__ /* begins with its name */
#elif defined(__GNUC__)
#define COMPILER "gcc " __VERSION__
#else
#define COMPILER "unknown compiler"
#endif

const char *attn_version(void)
{
    return VERSION;
}

int32_t attn_version_number(void)
{
    return ATTN_VERSION_NUMBER;
}

const char *attn_build_info(void)
{
    static const char *const info[] = {
        "libattn " VERSION ", " COMPILER ", vector kernels: generic",
        "libattn " VERSION ", " COMPILER ", vector kernels: AVX2",
        "libattn " VERSION ", " COMPILER ", vector kernels: AVX-512",
        "libattn " VERSION ", " COMPILER ", vector kernels: AVX-512, two runs"};
    return info[attn__cpu_level()];
}
