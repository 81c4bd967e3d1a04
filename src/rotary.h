/* The rotation itself for other modules. */
#ifndef ATTN_ROTARY_H
#define ATTN_ROTARY_H

/* Turns the pairs (low[k], high[k]), k < n, by cosines c and sines sign s. */
void attn__turn_halves_f32(float *restrict low, float *restrict high,
                           const float *restrict c, const float *restrict s,
                           float sign, int64_t n);
void attn__turn_halves_f64(double *restrict low, double *restrict high,
                           const double *restrict c, const double *restrict s,
                           double sign, int64_t n);
/* The same for pairs (y[2k], y[2k+1]). */
void attn__turn_neighbours_f32(float *restrict y, const float *restrict c,
                               const float *restrict s, float sign, int64_t n);
void attn__turn_neighbours_f64(double *restrict y, const double *restrict c,
                               const double *restrict s, double sign,
                               int64_t n);

#endif
