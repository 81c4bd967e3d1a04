/*
 * The row-by-row loop: attention as it is written by hand in C, three loops
 * over the keys for every query and the C library's exp. It is the left side
 * of the first comparison, so it is neither tuned nor slowed down: the
 * compiler sees the same flags as for the rest. The loops over e vectorise;
 * the sum over d does not, since without -ffast-math a compiler may not
 * reorder it.
 */
#ifndef BENCH_ROW_LOOP_H
#define BENCH_ROW_LOOP_H

#include <math.h>
#include <stdint.h>

#define R float
#define X(name) name##_f32
#define R_EXP expf
#include "row_loop_tmpl.h"

#define R double
#define X(name) name##_f64
#define R_EXP exp
#include "row_loop_tmpl.h"

#endif
