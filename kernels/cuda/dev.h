// The CUDA device, for the files of kernels/cuda only. launch.h is how they see CUDA.
#ifndef MOE_CUDA_DEV_H
#define MOE_CUDA_DEV_H
#include "kernels/cuda/launch.h"
#include <cublas_v2.h>
#include <math.h>
#include <pthread.h>
#ifdef REAL_DOUBLE
#error "the CUDA backend computes in bf16 (REAL=bf16) or float (REAL=float)"
#endif

enum { WARP = 32, WORK_BYTES = 32 << 20 };

struct DevBlock { // one dev_alloc
    void *base;
    DevBlock *next;
};

enum { MARKS = 4096 }; // stage changes between two reads of the clock; what comes after goes to the last one's stage
struct Mark {
    cudaEvent_t at;
    Stage stage; // from here on
};

struct Dev {
    int device, sms, arch;  // ordinal; multiprocessors; 80, 90, ...
    cudaStream_t stream;    // every op of this rank
    cublasHandle_t blas;
    int poison;
    char name[160];
    size_t allocated;
    DevBlock *blocks;
    pthread_mutex_t lock;   // of blocks and allocated
    char *work;             // WORK_BYTES of scratch, for one op at a time: partial sums
    Stage stage;
    Mark *mark;             // [MARKS]
    int marks;
};

// Scratch beyond WORK_BYTES is asked for by shape (dev_alloc in an op is not possible: it would be recorded).
static inline void *dev_work(Dev *d, size_t bytes) {
    CHECK_DEVICE(bytes <= WORK_BYTES, "an op needs %zu bytes of scratch, %d are there", bytes, (int)WORK_BYTES);
    return d->work;
}

// ---- elements ------------------------------------------------------------------------------------------------------
#ifdef REAL_BF16
static __device__ __forceinline__ float up(real x) { return __bfloat162float(x); }
static __device__ __forceinline__ real down(float x) { return __float2bfloat16(x); }
#else
static __device__ __forceinline__ float up(float x) { return x; }
static __device__ __forceinline__ float down(float x) { return x; }
#endif

// 16 bytes at a time, where rows begin at multiples of 16
enum { VR = 16 / (int)sizeof(real), VW = 16 / (int)sizeof(wide) };
struct alignas(16) RealVec {
    real v[VR];
};
struct alignas(16) WideVec {
    wide v[VW];
};
static inline int is_vec(size_t n, const void *a, const void *b = nullptr, const void *c = nullptr, const void *e = nullptr) {
    return n % VR == 0 && (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)e) & 15) == 0;
}

// ---- launches ------------------------------------------------------------------------------------------------------
static inline int blocks_for(size_t n, int per) { return (int)((n + (size_t)per - 1) / (size_t)per); }
#endif
