/*
 * Binds the vocabulary of the *_tmpl.h files to float: R the type, X(name) and
 * XI(name) the public and internal name of a function, K(c) a literal, R_* what
 * <math.h> and CBLAS call it for this type. real_f64.h is its twin; each undoes
 * the other. No include guard: a template file is included once after each. A
 * call that stands as a statement is written (void)XI(name)(...), which
 * clang-format takes for the call that it is.
 */
#include <float.h>
#include <math.h>

#include "real_undef.h"
#define R float
#define R_DTYPE ATTN_F32
#define X(name) attn_##name##_f32
#define XI(name) attn__##name##_f32
#define K(c) c##f
#define R_EXP expf
#define R_EXP2 exp2f
#define R_LOG logf
#define R_NEG_INF (-HUGE_VALF)
#define R_NAN ((float)NAN)
#define R_MAX FLT_MAX
