/*
 * kit.h - what the tests of the interface share: random numbers, element
 * access through strides, output capture. Nothing here knows attention.
 */
#ifndef KIT_H
#define KIT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "attn.h"

/* Sanitizers bring their own malloc, pthread_create and dlopen, and the one
 * for threads also a thread, and a dislike of threads in children of fork. */
#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define KIT_THREAD_SANITIZED 1
#else
#define KIT_THREAD_SANITIZED 0
#endif
#if KIT_THREAD_SANITIZED || defined(__SANITIZE_ADDRESS__) || \
    __has_feature(address_sanitizer) || __has_feature(memory_sanitizer)
#define KIT_SANITIZED 1
#else
#define KIT_SANITIZED 0
#endif

#define COUNT(a) (sizeof(a) / sizeof(a)[0])

/* Reproducible random numbers; one stream, for the main thread only. */
void kit_seed(uint64_t seed);
uint64_t kit_next(void);
int64_t kit_int(int64_t low, int64_t high); /* both inclusive */
double kit_real(void);                      /* in [-1, 1) */

size_t kit_bytes(attn_dtype dtype); /* of one element */
int64_t kit_elements(const attn_tensor *t);

/* A contiguous (a, b, c, d) view; data may be NULL. */
attn_tensor kit_view(attn_dtype dtype, void *data, int64_t a, int64_t b,
                     int64_t c, int64_t d);
/* The same over new memory (never NULL), filled with random numbers. */
attn_tensor kit_make(attn_dtype dtype, int64_t a, int64_t b, int64_t c,
                     int64_t d);
void kit_drop(attn_tensor *t);

double kit_get(const attn_tensor *t, int64_t a, int64_t b, int64_t c,
               int64_t d);
void kit_set(const attn_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d,
             double value);
/* Every element, through the strides, gets a random number in [-1, 1). */
void kit_fill(const attn_tensor *t);
/* Every element gets this value. */
void kit_fill_with(const attn_tensor *t, double value);
/* Same shape and type, and the same bits in every element. */
bool kit_same(const attn_tensor *x, const attn_tensor *y);

/* The elements of a tensor of the same shape, whatever the strides. */
void kit_copy(const attn_tensor *to, const attn_tensor *from);

/* Sends file descriptors 1 and 2 to memory until kit_capture_end(), which
 * returns how many bytes came (0 if nothing is being captured). */
void kit_capture_begin(void);
int64_t kit_capture_end(void);

/* Whether the loaded BLAS admits one caller at a time, so that calls run on
 * one thread whatever they were given. */
bool kit_blas_is_exclusive(void);

/* Does the path of the file that cblas_sgemm comes from contain this? */
bool kit_blas_file_has(const char *part);

/* BLIS, whose kernels may read behind the end of the last row of a matrix,
 * which is not in the library's hands. */
bool kit_blas_is_blis(void);

/* Number of threads this process has now; -1 without /proc. */
int kit_thread_count(void);
/* The same once it has been the same for a while: a thread that was joined may
 * be in /proc for a moment more. */
int kit_settled_thread_count(void);

#endif
