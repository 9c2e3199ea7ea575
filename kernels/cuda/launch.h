// The one way in which the .cu files see CUDA: nvcc compiles them for a GPU, g++ (-x c++ -Itests/emu/include) for the tests on
// a machine without one, where each thread of a block is a fiber (tests/emu). Only this header knows which of the two it is.
//
// Rules that make both possible
// - Kernels are launched by LAUNCH; shared memory is declared by SHARED and DYN_SHARED, never by the keyword itself.
// - An instruction that CUDA C++ has no function for is one function in this file; its twin stands in tests/emu/include/emu_ptx.h.
// - A loop that waits for another block, kernel or rank calls __nanosleep in each round.
// - Kernels and device functions are static. A kernel's lanes that leave early take no part in what the others synchronise.
#ifndef MOE_CUDA_LAUNCH_H
#define MOE_CUDA_LAUNCH_H
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>
extern "C" {
#include "kernels/blocks.h"
#include "kernels/check.h"
#include "kernels/comm.h"
#include "kernels/device.h"
#include "kernels/ledger.h"
}

#define CUDA_CHECK(call)                                                                                  \
    do {                                                                                                  \
        cudaError_t cuda_code_ = (call);                                                                  \
        CHECK_DEVICE(cuda_code_ == cudaSuccess, "%s: CUDA reports: %s", #call, cudaGetErrorString(cuda_code_)); \
    } while (0)

// The C macro builds an array in place, which C++ has no word for.
#undef SIZE
template <class... Dims> static inline size_t SIZE(Dims... dims) {
    const int64_t list[] = {(int64_t)dims...};
    return size_mul((int)sizeof...(dims), list);
}

// LAUNCH(kernel, grid, block, bytes of dynamic shared memory, stream, arguments...); a kernel with several template arguments
// stands in parentheses. An empty grid, an error in CUDA, is an op on nothing: no launch.
// SHARED(float, tile, [16][17]); SHARED(int, last, ); unset at first, as DYN_SHARED(T, name), the start of the dynamic part.
#ifdef __CUDACC__
#define LAUNCH(kernel, grid, block, smem, stream, ...)                    \
    do {                                                                  \
        const dim3 launch_grid_ = grid;                                   \
        if (launch_grid_.x && launch_grid_.y && launch_grid_.z) {         \
            kernel<<<launch_grid_, block, smem, stream>>>(__VA_ARGS__);   \
            CUDA_CHECK(cudaGetLastError());                               \
        }                                                                 \
    } while (0)
#define SHARED(T, name, dims) __shared__ __align__(16) T name dims
#define DYN_SHARED(T, name)                                      \
    extern __shared__ __align__(1024) unsigned char dyn_shared_[]; \
    T *name = reinterpret_cast<T *>(dyn_shared_)
#else
#define LAUNCH(kernel, grid, block, smem, stream, ...)                                                        \
    do {                                                                                                      \
        const dim3 launch_grid_ = grid;                                                                       \
        if (launch_grid_.x && launch_grid_.y && launch_grid_.z)                                               \
            CUDA_CHECK((cudaError_t)emu::launcher(#kernel, kernel, launch_grid_, block, smem, stream, false)(__VA_ARGS__)); \
    } while (0)
#define SHARED(T, name, dims)          \
    static const char name##_key_ = 0; \
    auto &name = *emu::shared_static<T dims>(&name##_key_)
#define DYN_SHARED(T, name) T *name = emu::shared_dynamic<T>()
#endif

// ---- instructions ----------------------------------------------------------------------------------------------------
#ifdef __CUDACC__
static __device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// c (16x8, fp32) += a (16x16, bf16) b (16x8, bf16), fragments of a warp as mma.m16n8k16 lays them out (PTX ISA 9.7.14.5.8)
static __device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same in fp32, by multiply-adds with ascending k: for checks, not for speed. a: a pair for each register of the bf16 fragment.
// One copy of it: inlined hundreds of times, a kernel would take an hour to compile.
static __device__ __noinline__ float4 mma_fp32_parts(float4 c, float4 a0, float4 a1, float4 b0) {
    const int lane = (int)(threadIdx.x & 31), row = lane / 4 * 4, col = lane % 4 * 8;
    const float a[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w}, b[4] = {b0.x, b0.y, b0.z, b0.w};
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const int from = k % 8 / 2, i = k % 2 + k / 8 * 4, j = k % 2 + k / 8 * 2;
        const float upper = __shfl_sync(0xffffffffu, a[i], row + from), lower = __shfl_sync(0xffffffffu, a[i + 2], row + from);
        const float left = __shfl_sync(0xffffffffu, b[j], col + from), right = __shfl_sync(0xffffffffu, b[j], col + 4 + from);
        c.x = fmaf(upper, left, c.x), c.y = fmaf(upper, right, c.y);
        c.z = fmaf(lower, left, c.z), c.w = fmaf(lower, right, c.w);
    }
    return c;
}
static __device__ __forceinline__ void mma_fp32(float (&c)[4], const float (&a)[8], const float (&b)[4]) {
    const float4 x = mma_fp32_parts(make_float4(c[0], c[1], c[2], c[3]), make_float4(a[0], a[1], a[2], a[3]),
                                    make_float4(a[4], a[5], a[6], a[7]), make_float4(b[0], b[1], b[2], b[3]));
    c[0] = x.x, c[1] = x.y, c[2] = x.z, c[3] = x.w;
}

// Four 8x8 matrices of 16-bit elements; lane 8i+j gives the shared-memory address (16-byte aligned) of row j of matrix i. _trans:
// each matrix transposed on the way.
static __device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
static __device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// 16 bytes from global to shared memory (both aligned), landing by this thread's cp_async_wait; of which the first `bytes`
// (0..16) are read, the rest becomes 0.
static __device__ __forceinline__ void cp_async_16(void *shared, const void *global, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `Pending` of this thread's committed groups have not landed; other threads see the data after a barrier.
template <int Pending> static __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(Pending) : "memory");
}

// Flags between ranks. What was written before the release is seen after an acquire that reads the flag's new value.
static __device__ __forceinline__ void flag_release(unsigned *flag, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(__cvta_generic_to_global(flag)), "r"(value) : "memory");
}
static __device__ __forceinline__ unsigned flag_acquire(const unsigned *flag) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(flag)) : "memory");
    return value;
}
static __device__ __forceinline__ uint64_t clock_ns() { // since some time before; steps of up to a microsecond or so
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}
#else
#include "emu_ptx.h" // the same functions
#endif

// ---- reductions over the 32 lanes of a warp, in every lane, in one order ---------------------------------------------
enum : unsigned { WARP_ALL = 0xffffffffu };
template <class T> static __device__ __forceinline__ T warp_sum(T x) {
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(WARP_ALL, x, d);
    return x;
}
template <class T> static __device__ __forceinline__ T warp_max(T x) {
    for (int d = 16; d > 0; d >>= 1) {
        T y = __shfl_xor_sync(WARP_ALL, x, d);
        x = y > x ? y : x;
    }
    return x;
}
template <class T> static __device__ __forceinline__ T warp_min(T x) {
    for (int d = 16; d > 0; d >>= 1) {
        T y = __shfl_xor_sync(WARP_ALL, x, d);
        x = y < x ? y : x;
    }
    return x;
}
#endif
