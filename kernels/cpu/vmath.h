// Functions that loops can be vectorised over: branch-free, no calls (float); the double build calls libm.
#ifndef MOE_CPU_VMATH_H
#define MOE_CPU_VMATH_H
#include "kernels/cpu/vec.h"
#include "kernels/device.h"
#include <math.h>
#include <stdint.h>

// exp(x) within 1.1 ulp over all floats (tests/test_ops.c); below -104: 0, above 88.73: inf, NaN stays NaN.
// x = n ln2 + r, |r| <= ln2/2; exp r = 1 + r + r^2 q(r), q a minimax fit of our own (relative error of exp 3.1e-9).
static inline float vexpf(float x) {
    typedef union { float f; uint32_t u; } Bits;
    const float magic = 12582912.0f; // 1.5 * 2^23: the sum's low bits are round(x / ln2)
    x = x < -105.0f ? -105.0f : x;   // comparisons in this sense let NaN through
    x = x > 90.0f ? 90.0f : x;
    Bits z = {.f = x * 1.44269504f + magic};
    float n = z.f - magic;
    float r = x - n * 0.693359375f; // ln2 in two parts, the first with few bits so that n times it is exact
    r = r + n * 2.12194440e-4f;
    float q = 0.00138146021f;
    q = q * r + 0.00836871520f;
    q = q * r + 0.0416683879f;
    q = q * r + 0.166665206f;
    q = q * r + 0.499999934f;
    float p = q * (r * r) + r + 1.0f;
    // 2^n in two factors: n reaches 130 and -151, past what one exponent field holds
    int32_t i = (int32_t)(z.u - 0x4B400000u), half = i >> 1;
    Bits a = {.u = (uint32_t)(half + 127) << 23}, b = {.u = (uint32_t)(i - half + 127) << 23};
    return p * a.f * b.f;
}

#ifdef REAL_DOUBLE
static inline wide vexp(wide x) { return exp(x); }
#else
static inline wide vexp(wide x) { return vexpf(x); }
#endif
static inline wide vsigmoid(wide x) { return 1 / (1 + vexp(-x)); }

// The type's own functions, so that a float loop does not go through double
#ifdef REAL_DOUBLE
static inline wide vsqrt(wide x) { return sqrt(x); }
static inline wide vlog(wide x) { return log(x); }
#else
static inline wide vsqrt(wide x) { return sqrtf(x); }
static inline wide vlog(wide x) { return logf(x); }
#endif

// Sums of short rows in 8 lanes: element i goes to lane i % 8 and the lanes are taken in order, so that the order
// is the same whatever the compiler vectorises to. Inlined by force: a call would leave a DEV_CLONES function's AVX2 code.
#define VINLINE static inline __attribute__((always_inline))
enum { VLANES = 8 };

VINLINE wide vsum(const wide *x, int n) {
    wide lane[VLANES] = {0}, s = 0;
    int i = 0;
    for (; i + VLANES <= n; i += VLANES)
        for (int j = 0; j < VLANES; j++) lane[j] += x[i + j];
    for (; i < n; i++) s += x[i];
    for (int j = 0; j < VLANES; j++) s += lane[j];
    return s;
}

VINLINE wide vdot(const wide *x, const wide *y, int n) {
    wide lane[VLANES] = {0}, s = 0;
    int i = 0;
    for (; i + VLANES <= n; i += VLANES)
        for (int j = 0; j < VLANES; j++) lane[j] += x[i + j] * y[i + j];
    for (; i < n; i++) s += x[i] * y[i];
    for (int j = 0; j < VLANES; j++) s += lane[j];
    return s;
}

// Written in vectors: of a maximum in lanes the compiler makes scalar code. (By pointer: vectors as arguments change the ABI.)
VINLINE void vmax_into(vec *best, const vec *x) {
    ivec more = *x > *best;
    *best = (vec)((more & (ivec)*x) | (~more & (ivec)*best));
}

VINLINE wide vmax(const wide *x, int n) { // n > 0; may pass over a NaN
    vec b0 = (vec){0} + x[0], b1 = b0, v;
    int i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL) {
        v = TILE_LOAD(x + i);
        vmax_into(&b0, &v);
        v = TILE_LOAD(x + i + VL);
        vmax_into(&b1, &v);
    }
    vmax_into(&b0, &b1);
    wide max = b0[0];
    for (int j = 1; j < VL; j++) max = b0[j] > max ? b0[j] : max;
    for (; i < n; i++) max = x[i] > max ? x[i] : max;
    return max;
}
#endif
