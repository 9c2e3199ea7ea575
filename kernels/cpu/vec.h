// Vectors of `real` in the compiler's own notation: one source for float and double, AVX2 and any other machine.
#ifndef MOE_CPU_VEC_H
#define MOE_CPU_VEC_H
#include "kernels/device.h"

#ifdef REAL_DOUBLE
typedef int64_t ireal;
#else
typedef int32_t ireal;
#endif
typedef real vec __attribute__((vector_size(32), may_alias));
typedef real vecu __attribute__((vector_size(32), aligned(sizeof(real)), may_alias)); // at any element
typedef ireal ivec __attribute__((vector_size(32), may_alias));
enum { VL = 32 / sizeof(real) }; // lanes

#define TILE_LOAD(p) ((vec) * (const vecu *)(p))
#define TILE_STORE(p, v) (*(vecu *)(p) = (v))
#endif
