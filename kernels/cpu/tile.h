// Register tiles: the inner loops of every product. No include guard: a .c file includes this once for each instruction
// set, with ISA(name) naming the copy and ISA_FN its function attribute (gemm.c shows how), and picks a copy at run time.
//
// Bits: an element of a tile is  z + ((a0 b0 + a1 b1) + a2 b2) ...  with k ascending, whatever the tile's shape, strides
// and neighbours, so a caller may choose tiles for speed alone.
#ifndef MOE_CPU_TILE_H
#define MOE_CPU_TILE_H
#include "kernels/cpu/vec.h"

// Accumulators are named one by one: as an array the compiler keeps them in memory.
#define ROWS_1(F) F(0)
#define ROWS_2(F) F(0) F(1)
#define ROWS_4(F) ROWS_2(F) F(2) F(3)
#define ROWS_6(F) ROWS_4(F) F(4) F(5)
#define ROWS_12(F) ROWS_6(F) F(6) F(7) F(8) F(9) F(10) F(11)
#define ZERO_1(i) vec c##i##_0 = {0};
#define ZERO_2(i) ZERO_1(i) vec c##i##_1 = {0};
#define ZERO_3(i) ZERO_2(i) vec c##i##_2 = {0};
#define READ_1 vec b0 = TILE_LOAD(b);
#define READ_2 READ_1 vec b1 = TILE_LOAD(b + VL);
#define READ_3 READ_2 vec b2 = TILE_LOAD(b + 2 * VL);
#define MULADD_1(i) c##i##_0 += b0 * a[i * ai];
#define MULADD_2(i) MULADD_1(i) c##i##_1 += b1 * a[i * ai];
#define MULADD_3(i) MULADD_2(i) c##i##_2 += b2 * a[i * ai];
#define PUT_1(i) TILE_STORE(c + i * ldc, c##i##_0);
#define PUT_2(i) PUT_1(i) TILE_STORE(c + i * ldc + VL, c##i##_1);
#define PUT_3(i) PUT_2(i) TILE_STORE(c + i * ldc + 2 * VL, c##i##_2);
#define ADD_1(i) c##i##_0 = TILE_LOAD(z + i * ldz) + c##i##_0;
#define ADD_2(i) ADD_1(i) c##i##_1 = TILE_LOAD(z + i * ldz + VL) + c##i##_1;
#define ADD_3(i) ADD_2(i) c##i##_2 = TILE_LOAD(z + i * ldz + 2 * VL) + c##i##_2;

#define TILE(R, V) /* R rows, V vectors of columns */                                                                    \
    ISA_FN static inline __attribute__((always_inline, unused)) void ISA(tile_##R##x##V)(TILE_ARGS)                      \
    {                                                                                                                    \
        ROWS_##R(ZERO_##V)                                                                                               \
        for (int k = 0; k < kc; k++, a += ak, b += ldb) {                                                                \
            READ_##V ROWS_##R(MULADD_##V)                                                                                \
        }                                                                                                                \
        if (z) {                                                                                                         \
            ROWS_##R(ADD_##V)                                                                                            \
        }                                                                                                                \
        ROWS_##R(PUT_##V)                                                                                                \
    }
#define TILE_ARGS                                                                                                        \
    real *c, size_t ldc, const real *z, size_t ldz, const real *a, size_t ai, size_t ak, const real *b, size_t ldb, int kc
#endif

// tile_RxV: c[i,j] = z[i,j] + sum_k a[i*ai + k*ak] b[k*ldb + j], k = 0..kc-1 ascending
// c (R,V*VL), row stride ldc, overwritten | z the same with ldz, may be c; NULL = 0
TILE(6, 2)  // products: 12 accumulators, 2 of b, 1 broadcast of 16 registers
TILE(2, 2)
TILE(1, 2)
TILE(4, 3)  // attention: head sizes are multiples of 4 more often than of 6
TILE(1, 3)
TILE(12, 1) // products with few rows
TILE(4, 1)
TILE(1, 1)

// dst[j*ldd + i] = src[i*lds + j] for a block of VL x VL
ISA_FN static inline __attribute__((always_inline)) void ISA(turn)(real *dst, size_t ldd, const real *src, size_t lds) {
#ifdef REAL_DOUBLE
    vec r0 = TILE_LOAD(src), r1 = TILE_LOAD(src + lds), r2 = TILE_LOAD(src + 2 * lds), r3 = TILE_LOAD(src + 3 * lds);
    vec a0 = __builtin_shufflevector(r0, r1, 0, 4, 2, 6), a1 = __builtin_shufflevector(r0, r1, 1, 5, 3, 7);
    vec a2 = __builtin_shufflevector(r2, r3, 0, 4, 2, 6), a3 = __builtin_shufflevector(r2, r3, 1, 5, 3, 7);
    TILE_STORE(dst, __builtin_shufflevector(a0, a2, 0, 1, 4, 5));
    TILE_STORE(dst + ldd, __builtin_shufflevector(a1, a3, 0, 1, 4, 5));
    TILE_STORE(dst + 2 * ldd, __builtin_shufflevector(a0, a2, 2, 3, 6, 7));
    TILE_STORE(dst + 3 * ldd, __builtin_shufflevector(a1, a3, 2, 3, 6, 7));
#else
#define LO(x, y) __builtin_shufflevector(x, y, 0, 8, 1, 9, 4, 12, 5, 13)
#define HI(x, y) __builtin_shufflevector(x, y, 2, 10, 3, 11, 6, 14, 7, 15)
#define LO2(x, y) __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13)
#define HI2(x, y) __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15)
#define LO4(x, y) __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11)
#define HI4(x, y) __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15)
    vec r0 = TILE_LOAD(src), r1 = TILE_LOAD(src + lds), r2 = TILE_LOAD(src + 2 * lds), r3 = TILE_LOAD(src + 3 * lds);
    vec r4 = TILE_LOAD(src + 4 * lds), r5 = TILE_LOAD(src + 5 * lds);
    vec r6 = TILE_LOAD(src + 6 * lds), r7 = TILE_LOAD(src + 7 * lds);
    vec a0 = LO(r0, r1), a1 = HI(r0, r1), a2 = LO(r2, r3), a3 = HI(r2, r3);
    vec a4 = LO(r4, r5), a5 = HI(r4, r5), a6 = LO(r6, r7), a7 = HI(r6, r7);
    vec q0 = LO2(a0, a2), q1 = HI2(a0, a2), q2 = LO2(a1, a3), q3 = HI2(a1, a3);
    vec q4 = LO2(a4, a6), q5 = HI2(a4, a6), q6 = LO2(a5, a7), q7 = HI2(a5, a7);
    TILE_STORE(dst, LO4(q0, q4));
    TILE_STORE(dst + ldd, LO4(q1, q5));
    TILE_STORE(dst + 2 * ldd, LO4(q2, q6));
    TILE_STORE(dst + 3 * ldd, LO4(q3, q7));
    TILE_STORE(dst + 4 * ldd, HI4(q0, q4));
    TILE_STORE(dst + 5 * ldd, HI4(q1, q5));
    TILE_STORE(dst + 6 * ldd, HI4(q2, q6));
    TILE_STORE(dst + 7 * ldd, HI4(q3, q7));
#undef LO
#undef HI
#undef LO2
#undef HI2
#undef LO4
#undef HI4
#endif
}
