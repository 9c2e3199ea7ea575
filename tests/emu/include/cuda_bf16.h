// Stand-in for CUDA's header of this name. Conversions round to nearest, ties to even; a NaN becomes 0x7fff, as CUDA's do.
#ifndef EMU_CUDA_BF16_H
#define EMU_CUDA_BF16_H
#ifdef __cplusplus
#include "cuda_runtime.h"

namespace emu {
inline unsigned short bf16_of(float f) {
    uint32_t u = bits<uint32_t>(f);
    if (f != f) return 0x7fff;
    return (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
// Through a float whose last bit remembers that something was cut off, so that it is rounded once
inline unsigned short bf16_of(double d) {
    float f = (float)d;
    if (f != f || std::isinf(f) || (double)f == d) {
        if (std::isinf(f) && !std::isinf(d)) { // past float's range, rounded to it: towards zero instead
            f = std::copysign(3.40282346638528859812e38f, f);
            return bf16_of(bits<float>(bits<uint32_t>(f) | 1));
        }
        return bf16_of(f);
    }
    uint32_t u = bits<uint32_t>(f);
    if (std::fabs((double)f) > std::fabs(d)) u--; // towards zero, then odd
    return bf16_of(bits<float>(u | 1));
}
} // namespace emu

struct __align__(2) __nv_bfloat16 {
    unsigned short x;
    __nv_bfloat16() = default;
    __nv_bfloat16(float f) : x(emu::bf16_of(f)) {}
    __nv_bfloat16(double f) : x(emu::bf16_of(f)) {}
    __nv_bfloat16(int i) : x(emu::bf16_of((double)i)) {}
    operator float() const { return emu::bits<float>((uint32_t)x << 16); }
};
typedef __nv_bfloat16 nv_bfloat16;
struct __align__(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
typedef __nv_bfloat162 nv_bfloat162;

static inline __nv_bfloat16 __float2bfloat16(float f) { return f; }
static inline __nv_bfloat16 __float2bfloat16_rn(float f) { return f; }
static inline __nv_bfloat16 __double2bfloat16(double f) { return f; }
static inline float __bfloat162float(__nv_bfloat16 b) { return b; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) {
    __nv_bfloat16 b;
    b.x = u;
    return b;
}
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.x; }
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 f) { return {f.x, f.y}; }
static inline float2 __bfloat1622float2(__nv_bfloat162 b) { return {b.x, b.y}; }
static inline float __low2float(__nv_bfloat162 b) { return b.x; }
static inline float __high2float(__nv_bfloat162 b) { return b.y; }
static inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 b) { return b.x; }
static inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 b) { return b.y; }
#else
typedef struct {
    unsigned short x;
} __nv_bfloat16;
#endif
#endif
