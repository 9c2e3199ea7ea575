// Hopper's instructions (PTX ISA 8: mbarrier, cp.async.bulk.tensor, tensormap, wgmma), for group_sm90.cu. No emulated twins.
#ifndef MOE_CUDA_SM90_H
#define MOE_CUDA_SM90_H
#include "kernels/cuda/launch.h"
#include <cuda.h>

// ---- barriers in shared memory: `count` arrivals, and the bytes announced, end a phase ------------------------------------
static __device__ __forceinline__ void bar_init(uint64_t *bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(bar)), "r"(count) : "memory");
}
static __device__ __forceinline__ void bar_init_seen() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
static __device__ __forceinline__ void bar_arrive(uint64_t *bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(bar)) : "memory");
}
static __device__ __forceinline__ void bar_arrive_expect(uint64_t *bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(bar)), "r"(bytes) : "memory");
}
// Until the phase of this parity has ended; a new barrier counts as one whose phase of parity 1 has
static __device__ __forceinline__ void bar_wait(uint64_t *bar, unsigned parity) {
    unsigned done;
    do
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
    while (!done);
}

// ---- copies by tensor map ------------------------------------------------------------------------------------------------
// The map's box whose first element is (column, row) to shared memory, outside of the tensor 0; all of its bytes arrive at bar
static __device__ __forceinline__ void tma_load(void *to, const CUtensorMap *map, uint64_t *bar, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(bar)) : "memory");
}
// By a warp: *to (global) = the map at `from` (shared memory, 128-byte aligned, overwritten) with another address
static __device__ __forceinline__ void map_write(CUtensorMap *to, CUtensorMap *from, const void *address) {
    if (threadIdx.x % 32 == 0)
        asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;"
                     :: "r"(shared_address(from)), "l"(address) : "memory");
    __syncwarp();
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
                 :: "l"(to), "r"(shared_address(from)) : "memory");
}
static __device__ __forceinline__ void map_acquire(const CUtensorMap *map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(map) : "memory");
}

// ---- warpgroups ------------------------------------------------------------------------------------------------------------
template <int Registers> static __device__ __forceinline__ void registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(Registers));
}
template <int Registers> static __device__ __forceinline__ void registers_lower() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(Registers));
}
static __device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
static __device__ __forceinline__ void shared_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
static __device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(Pending) : "memory");
}

// The compiler may not move uses of the sums past this place, which a wait alone does not tell it.
static __device__ __forceinline__ void wgmma_hold(float (&c)[32][4]) {
#pragma unroll
    for (int i = 0; i < 128; i++) asm volatile("" : "+f"(c[i / 4][i % 4]) :: "memory");
}

// An operand in shared memory, in swizzled lines of 128 bytes (1024-byte aligned). Bytes from one chunk of 64 to the next along
// rows or columns (only where the sum does not run along the lines), and from one group of 8 lines to the next.
static __device__ __forceinline__ uint64_t wgmma_operand(const void *p, int chunk_bytes, int lines_bytes) {
    return (uint64_t)(shared_address(p) >> 4 & 0x3FFF) | (uint64_t)(chunk_bytes >> 4) << 16 | (uint64_t)(lines_bytes >> 4) << 32 |
           (uint64_t)1 << 62;
}

// c (64x256, fp32) = [c +] a (64x16) b (16x256), bf16, by the four warps of a warpgroup. Warp w holds rows 16w..; within them and
// eight columns a lane's four numbers lie as mma.m16n8k16 lays out c. Turned: the sum's index runs across the lines.
template <int A_TURNED, int B_TURNED>
static __device__ __forceinline__ void wgmma_256(float (&c)[32][4], uint64_t a, uint64_t b, int add) {
#define C4(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define C16(j) C4(j), C4(j + 1), C4(j + 2), C4(j + 3)
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "
        "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "
        "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "
        "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, p, 1, 1, %131, %132;\n}"
        : C16(0), C16(4), C16(8), C16(12), C16(16), C16(20), C16(24), C16(28)
        : "l"(a), "l"(b), "r"(add), "n"(A_TURNED), "n"(B_TURNED));
#undef C4
#undef C16
}
#endif
