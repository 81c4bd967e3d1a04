/* The double twin of real_f32.h; see there. */
#include <float.h>
#include <math.h>

#include "real_undef.h"
#define R double
#define R_DTYPE ATTN_F64
#define X(name) attn_##name##_f64
#define XI(name) attn__##name##_f64
#define K(c) c
#define R_EXP exp
#define R_EXP2 exp2
#define R_LOG log
#define R_NEG_INF (-HUGE_VAL)
#define R_NAN ((double)NAN)
#define R_MAX DBL_MAX
