/* Forgets the binding of real_f32.h or real_f64.h. */
#undef R
#undef R_DTYPE
#undef X
#undef XI
#undef K
#undef R_EXP
#undef R_EXP2
#undef R_LOG
#undef R_NEG_INF
#undef R_NAN
#undef R_MAX
