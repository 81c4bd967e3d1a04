/*
 * A small seeded generator for tests: the same numbers on every machine, so
 * that a seed printed by a failing test replays it. The state is a counter
 * stepped by an odd constant and mixed by two multiply-and-shift rounds
 * (SplitMix64), which is plenty for drawing shapes and inputs.
 */
#ifndef TESTS_RNG_H
#define TESTS_RNG_H

#include <math.h>
#include <stdint.h>

typedef struct rng {
    uint64_t state;
} rng;

static inline uint64_t rng_bits(rng *r)
{
    uint64_t x = (r->state += UINT64_C(0x9E3779B97F4A7C15));
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

/* An independent stream for every (seed, index). */
static inline rng rng_make(uint64_t seed, uint64_t index)
{
    rng r = {seed};
    r.state = rng_bits(&r) ^ (index * UINT64_C(0xD1342543DE82EF95));
    return r;
}

/* In [0, 1). */
static inline double rng_unit(rng *r)
{
    return (double)(rng_bits(r) >> 11) * 0x1p-53;
}

/* An integer in [low, high], both included. */
static inline int64_t rng_int(rng *r, int64_t low, int64_t high)
{
    const uint64_t n = (uint64_t)(high - low) + 1;
    return low + (int64_t)(rng_bits(r) % n);
}

/* True once in n times on average. */
static inline int rng_one_in(rng *r, int64_t n)
{
    return rng_int(r, 1, n) == 1;
}

/* Standard normal (Box-Muller; the second number of the pair is dropped). */
static inline double rng_normal(rng *r)
{
    const double u = 1.0 - rng_unit(r); /* in (0, 1], so that log is finite */
    const double v = rng_unit(r);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

#endif
