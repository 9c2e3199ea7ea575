// Experts' weights and gradients by lists that lie in device memory: the grid is fixed, the lists' lengths are read on the GPU.
#include "kernels/cuda/dev.h"

constexpr int PIECE = THREADS * 16; // elements of a block that one thread block takes at a time

template <int V> static __global__ void copy_blocks_kernel(real *dst, const real *const *table, const BlockCopy *list, const int *n, size_t elems) {
    size_t pieces = (elems + PIECE - 1) / PIECE, all = (size_t)*n * pieces;
    for (size_t i = blockIdx.x; i < all; i += gridDim.x) {
        BlockCopy b = list[i / pieces];
        size_t first = i % pieces * PIECE, last = first + PIECE < elems ? first + PIECE : elems;
        real *to = dst + b.dst * elems;
        const real *from = table[b.peer] + b.src * elems;
        for (size_t k = first + threadIdx.x * V; k < last; k += THREADS * V) store<V>(to + k, load<V>(from + k));
    }
}

void dev_copy_blocks(Dev *d, real *dst, const real *const *table, const BlockCopy *list, const int *n, size_t elems) {
    unsigned grid = 4 * (unsigned)d->sms;
    if (elems % VR == 0 && aligned(dst)) LAUNCH(copy_blocks_kernel<VR>, grid, THREADS, 0, d->stream, dst, table, list, n, elems);
    else LAUNCH(copy_blocks_kernel<1>, grid, THREADS, 0, d->stream, dst, table, list, n, elems);
}

// Threads share out the elements, not the list, so that a destination's sum keeps its order.
static __global__ void add_blocks_kernel(wide *dst, const wide *const *table, const BlockCopy *list, const int *n, size_t elems) {
    for (size_t k = (size_t)blockIdx.x * blockDim.x + threadIdx.x; k < elems; k += (size_t)gridDim.x * blockDim.x)
        for (int i = 0; i < *n; i++) dst[list[i].dst * elems + k] += table[list[i].peer][list[i].src * elems + k];
}

void dev_add_blocks(Dev *d, wide *dst, const wide *const *table, const BlockCopy *list, const int *n, size_t elems) {
    LAUNCH(add_blocks_kernel, grid_for(d, elems, THREADS), THREADS, 0, d->stream, dst, table, list, n, elems);
}

static __global__ void zero_blocks_kernel(wide *x, const int *used, size_t elems) {
    if (used[blockIdx.y] < 0) return;
    wide *to = x + blockIdx.y * elems;
    for (size_t k = (size_t)blockIdx.x * blockDim.x + threadIdx.x; k < elems; k += (size_t)gridDim.x * blockDim.x) to[k] = 0;
}

void dev_zero_blocks(Dev *d, wide *x, const int *used, int S, size_t elems) {
    LAUNCH(zero_blocks_kernel, dim3(grid_for(d, elems, THREADS), (unsigned)S), THREADS, 0, d->stream, x, used, elems);
}

static __global__ void count_add_kernel(int64_t *total, const int *seen, int E) {
    for (int e = (int)threadIdx.x; e < E; e += (int)blockDim.x) total[e] += seen[e];
}

void dev_count_add(Dev *d, int64_t *total, const int *seen, int E) { LAUNCH(count_add_kernel, 1, THREADS, 0, d->stream, total, seen, E); }

static __global__ void count_share_kernel(wide *f, const int64_t *total, int E) {
    int64_t sum = 0;
    for (int e = (int)threadIdx.x; e < E; e += WARP) sum += total[e];
    sum = warp_sum(sum);
    for (int e = (int)threadIdx.x; e < E; e += WARP) f[e] = sum ? (wide)total[e] / (wide)sum : 0;
}

void dev_count_share(Dev *d, wide *f, const int64_t *total, int E) { LAUNCH(count_share_kernel, 1, WARP, 0, d->stream, f, total, E); }
