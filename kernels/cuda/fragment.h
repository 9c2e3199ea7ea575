// What products and attention share: tiles in shared memory without bank conflicts, the fragments that a warp's matrix
// instruction reads from them, and that instruction for both kinds of `real`: bf16 on tensor cores, fp32 by multiply-adds
// in the same places (for checks; ascending k). Fragments are those of mma.m16n8k16 (PTX ISA): with g = lane / 4, t = lane % 4
//   a: rows g, g+8; columns 2t, 2t+1, 2t+8, 2t+9      b: rows (k) 2t, 2t+1, 2t+8, 2t+9; column g
//   c: c[0], c[1] = row g, columns 2t, 2t+1; c[2], c[3] = row g+8
#ifndef MOE_CUDA_FRAGMENT_H
#define MOE_CUDA_FRAGMENT_H
#include "kernels/cuda/dev.h"

static __device__ __forceinline__ int lane_id() { return (int)(threadIdx.x & 31); }
static __device__ __forceinline__ int warp_id() { return (int)(threadIdx.x >> 5); }

// ---- tiles -------------------------------------------------------------------------------------------------------------
// A tile's row holds COLS elements; chunk c of row r stands at chunk tile_swizzle(r, c), so that eight rows of one column of
// chunks, and eight neighbouring chunks, lie in different banks.
template <int COLS> static __device__ __forceinline__ int tile_at(int r, int c) {
    constexpr int chunks = COLS / VR;
    static_assert(chunks == 4 || chunks % 8 == 0, "rows of 64 bytes or of multiples of 128");
    return (r * chunks + (chunks == 4 ? c ^ (r >> 1 & 3) : c ^ (r & 7))) * VR;
}
template <int COLS> static __device__ __forceinline__ int tile_element(int r, int col) {
    return tile_at<COLS>(r, col / VR) + col % VR;
}

// tile[r, 0..COLS) = x[r*ld + 0..n) for r < rows, 0 elsewhere, by all THREADS threads of the block, asynchronously where x and ld
// allow 16-byte copies: the caller commits and waits. rows and n may be 0 or less.
template <int ROWS, int COLS, int THREADS>
static __device__ __forceinline__ void tile_load(real *tile, const real *x, size_t ld, int rows, int n) {
    constexpr int chunks = COLS / VR;
    const bool whole = ((uintptr_t)x | ld * sizeof(real)) % 16 == 0;
#pragma unroll
    for (int i = (int)threadIdx.x; i < ROWS * chunks; i += THREADS) {
        const int r = i / chunks, c = i % chunks;
        const int left = r < rows ? n - c * VR : 0; // elements of this chunk that exist, if below VR
        real *to = tile + tile_at<COLS>(r, c);
        const real *from = x + r * ld + c * VR;
        if (left <= 0) *reinterpret_cast<int4 *>(to) = make_int4(0, 0, 0, 0);
        else if (whole) cp_async_16(to, from, (left < VR ? left : VR) * (int)sizeof(real));
        else
            for (int e = 0; e < VR; e++) to[e] = e < left ? from[e] : down(0);
    }
}

// y[r*ld + 0..n) = tile[r,:] for r < rows, by all threads; 16 bytes at a time where y and ld allow it. The caller synchronises.
template <int ROWS, int COLS, int THREADS>
static __device__ __forceinline__ void tile_store(real *y, size_t ld, const real *tile, int rows, int n) {
    constexpr int chunks = COLS / VR;
    const bool whole = ((uintptr_t)y | ld * sizeof(real)) % 16 == 0;
    for (int i = (int)threadIdx.x; i < ROWS * chunks; i += THREADS) {
        const int r = i / chunks, c = i % chunks * VR;
        if (r >= rows || c >= n) continue;
        const real *from = tile + tile_element<COLS>(r, c);
        real *to = y + r * ld + c;
        if (whole && c + VR <= n) *reinterpret_cast<int4 *>(to) = *reinterpret_cast<const int4 *>(from);
        else
            for (int e = 0; e < VR && c + e < n; e++) to[e] = from[e];
    }
}

// ---- fragments ---------------------------------------------------------------------------------------------------------
#ifdef REAL_BF16
typedef uint32_t FragA[4];
typedef uint32_t FragB[2];

// Rows row.., columns col.. (a multiple of 16) of a tile [row][k]
template <int COLS> static __device__ __forceinline__ void frag_a(FragA &a, const real *tile, int row, int col) {
    ldmatrix_x4(a, tile + tile_at<COLS>(row + lane_id() % 16, col / VR + lane_id() / 16));
}
// The same of a tile that lies transposed, [k][row]
template <int COLS> static __device__ __forceinline__ void frag_a_turned(FragA &a, const real *tile, int row, int k) {
    ldmatrix_x4_trans(a, tile + tile_at<COLS>(k + lane_id() % 8 + lane_id() / 16 * 8, row / VR + lane_id() / 8 % 2));
}
// Two fragments, columns n.. and n+8.., of a tile [n][k]
template <int COLS> static __device__ __forceinline__ void frag_b(FragB &b0, FragB &b1, const real *tile, int n, int k) {
    uint32_t r[4];
    ldmatrix_x4(r, tile + tile_at<COLS>(n + lane_id() % 8 + lane_id() / 16 * 8, k / VR + lane_id() / 8 % 2));
    b0[0] = r[0], b0[1] = r[1], b1[0] = r[2], b1[1] = r[3];
}
// The same of a tile [k][n]
template <int COLS> static __device__ __forceinline__ void frag_b_turned(FragB &b0, FragB &b1, const real *tile, int n, int k) {
    uint32_t r[4];
    ldmatrix_x4_trans(r, tile + tile_at<COLS>(k + lane_id() % 16, n / VR + lane_id() / 16));
    b0[0] = r[0], b0[1] = r[1], b1[0] = r[2], b1[1] = r[3];
}
static __device__ __forceinline__ uint32_t pack_pair(float lo, float hi) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
// Two neighbouring results, columns 0..7 and 8..15, as the operand of the next product
static __device__ __forceinline__ void frag_of(FragA &a, const float (&left)[4], const float (&right)[4]) {
    a[0] = pack_pair(left[0], left[1]), a[1] = pack_pair(left[2], left[3]);
    a[2] = pack_pair(right[0], right[1]), a[3] = pack_pair(right[2], right[3]);
}
static __device__ __forceinline__ void frag_mma(float (&c)[4], const FragA &a, const FragB &b) { mma_bf16(c, a, b); }
static __device__ __forceinline__ void real_store_pair(real *y, float lo, float hi) { // y on 4 bytes
    *reinterpret_cast<uint32_t *>(y) = pack_pair(lo, hi);
}
#else
typedef float FragA[8]; // a pair for each register of the bf16 fragment
typedef float FragB[4];

template <int COLS> static __device__ __forceinline__ void frag_a(FragA &a, const real *tile, int row, int col) {
    for (int i = 0; i < 8; i++)
        a[i] = tile[tile_element<COLS>(row + lane_id() / 4 + i / 2 % 2 * 8, col + lane_id() % 4 * 2 + i % 2 + i / 4 * 8)];
}
template <int COLS> static __device__ __forceinline__ void frag_a_turned(FragA &a, const real *tile, int row, int k) {
    for (int i = 0; i < 8; i++)
        a[i] = tile[tile_element<COLS>(k + lane_id() % 4 * 2 + i % 2 + i / 4 * 8, row + lane_id() / 4 + i / 2 % 2 * 8)];
}
template <int COLS> static __device__ __forceinline__ void frag_b(FragB &b0, FragB &b1, const real *tile, int n, int k) {
    for (int i = 0; i < 4; i++) {
        const int at = k + lane_id() % 4 * 2 + i % 2 + i / 2 * 8;
        b0[i] = tile[tile_element<COLS>(n + lane_id() / 4, at)];
        b1[i] = tile[tile_element<COLS>(n + 8 + lane_id() / 4, at)];
    }
}
template <int COLS> static __device__ __forceinline__ void frag_b_turned(FragB &b0, FragB &b1, const real *tile, int n, int k) {
    for (int i = 0; i < 4; i++) {
        const int at = k + lane_id() % 4 * 2 + i % 2 + i / 2 * 8;
        b0[i] = tile[tile_element<COLS>(at, n + lane_id() / 4)];
        b1[i] = tile[tile_element<COLS>(at, n + 8 + lane_id() / 4)];
    }
}
static __device__ __forceinline__ void frag_of(FragA &a, const float (&left)[4], const float (&right)[4]) {
    for (int i = 0; i < 4; i++) a[i] = left[i], a[4 + i] = right[i];
}
static __device__ __forceinline__ void frag_mma(float (&c)[4], const FragA &a, const FragB &b) { mma_fp32(c, a, b); }
static __device__ __forceinline__ void real_store_pair(real *y, float lo, float hi) { y[0] = lo, y[1] = hi; }
#endif

#endif
