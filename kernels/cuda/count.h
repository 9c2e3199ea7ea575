// Numbering of labelled items in their order: which of its label an item is. For pairs by expert, crossings by node.
// Items are cut into chunks, one for a warp: counted, the counts summed up over the chunks before, numbered.
#ifndef MOE_CUDA_COUNT_H
#define MOE_CUDA_COUNT_H
#include "kernels/cuda/dev.h"

constexpr int COUNT_CHUNKS = 256, COUNT_WARPS = 4;

// before (chunks,labels) overwritten: items of each label in the chunk; label -1 is none
static __global__ void count_kernel(int *before, const int *label, int n, int labels, int chunk) {
    int first = (int)blockIdx.x * chunk, last = first + chunk < n ? first + chunk : n;
    int *own = before + (size_t)blockIdx.x * labels;
    for (int e = (int)threadIdx.x; e < labels; e += (int)blockDim.x) own[e] = 0;
    __syncthreads();
    for (int i = first + (int)threadIdx.x; i < last; i += (int)blockDim.x)
        if (label[i] >= 0) atomicAdd(&own[label[i]], 1);
}

// before[c,e] becomes the items of e in the chunks ahead of c. count: at most capacity; seen: all (may be NULL)
static __global__ void count_scan_kernel(int *before, int *count, int *seen, int chunks, int labels, int capacity) {
    int e = (int)(blockIdx.x * blockDim.x + threadIdx.x), sum = 0;
    if (e >= labels) return;
    for (int c = 0; c < chunks; c++) {
        int n = before[(size_t)c * labels + e];
        before[(size_t)c * labels + e] = sum;
        sum += n;
    }
    if (seen) seen[e] = sum;
    count[e] = capacity <= 0 || sum < capacity ? sum : capacity;
}

// A warp numbers 32 items at a time; those of one label in the order of the lanes.
static __global__ void count_number_kernel(int *ord, int *before, const int *label, int n, int labels, int chunk, int chunks, int capacity) {
    int c = (int)(blockIdx.x * COUNT_WARPS + threadIdx.x / WARP), lane = (int)threadIdx.x % WARP;
    if (c >= chunks) return;
    int *next = before + (size_t)c * labels, first = c * chunk, last = first + chunk < n ? first + chunk : n;
    for (int i0 = first; i0 < last; i0 += WARP) {
        int i = i0 + lane, e = i < last ? label[i] : -1;
        unsigned same = __match_any_sync(WARP_ALL, e);
        int ahead = __popc(same & ((1u << lane) - 1)), base = e >= 0 ? next[e] : 0;
        __syncwarp();
        if (e >= 0 && ahead == 0) next[e] = base + __popc(same);
        __syncwarp();
        if (i < last) ord[i] = e >= 0 && (capacity <= 0 || base + ahead < capacity) ? base + ahead : -1;
    }
}

// ord (n), count, seen (labels) overwritten as dev_route_count says. Uses the device's scratch.
static inline void count_labels(Dev *d, int *ord, int *count, int *seen, const int *label, int n, int labels, int capacity) {
    int chunk = (int)(ceil_div(ceil_div(n, COUNT_CHUNKS), WARP) * WARP), chunks = chunk ? (int)ceil_div(n, chunk) : 0;
    int *before = (int *)dev_work(d, SIZE(chunks, labels, sizeof(int)));
    LAUNCH(count_kernel, (unsigned)chunks, 128, 0, d->stream, before, label, n, labels, chunk);
    LAUNCH(count_scan_kernel, (unsigned)ceil_div(labels, 128), 128, 0, d->stream, before, count, seen, chunks, labels, capacity);
    LAUNCH(count_number_kernel, (unsigned)ceil_div(chunks, COUNT_WARPS), COUNT_WARPS * WARP, 0, d->stream, ord, before, label, n, labels, chunk,
           chunks, capacity);
}
#endif
