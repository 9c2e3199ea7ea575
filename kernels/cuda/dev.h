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

#ifndef DEV_WORK_MIB
#define DEV_WORK_MIB 16 // the emulation takes less, as it fills all memory
#endif
constexpr int WARP = 32, THREADS = 256, WORK_BYTES = DEV_WORK_MIB << 20, MARKS = 4096;

struct DevBlock { // one dev_alloc
    void *base;
    size_t bytes;
    MemoryKind kind;
    DevBlock *next;
};

struct Mark { // a change of stage
    cudaEvent_t at;
    int stage; // of the time from here to the next mark; -1: nobody's
};
struct Clock {
    Mark *mark;         // [MARKS]
    int n, made;        // marks since the last read; events that exist
};

// A wait for another rank that came to its end (comm.cu). In memory of the host that kernels write: it can be read whatever state the
// device is in.
struct Late {
    int rank, peer; // of the world
    unsigned set;   // last
};

struct Dev {
    int device, sms, arch;  // ordinal; multiprocessors; 80, 90, ...
    cudaStream_t stream;    // every op of this rank
    cublasHandle_t blas;
    bool hopper;            // grouped products by TMA and wgmma (group_choose)
    int poison;
    char name[1024];
    int sharing;            // ranks on this GPU
    Ledger memory;
    DevBlock *blocks;
    pthread_mutex_t lock;   // of blocks and memory
    Late *late;
    unsigned *given_up;     // on the device: Late is set, no kernel shall wait any more
    double patience_s;      // of the ranks, for the message
    char *work;             // WORK_BYTES of scratch, for one op at a time
    Stage stage;
    Clock clock;
    bool recording;         // between dev_record_begin and dev_record_end
    cudaGraphExec_t record; // NULL: none
    Clock record_clock;     // the record's own marks: an event in a graph is one more of its nodes
    bool replayed;          // since the clock was read
};

void dev_wait(Dev *d); // until the device has done what it was told; dies where a rank did not come

static inline void *dev_work(Dev *d, size_t bytes) { // partial results of the op that asks
    CHECK_DEVICE(bytes <= WORK_BYTES, "an op needs %zu bytes of scratch, %d are there", bytes, WORK_BYTES);
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

// V elements at a time: VR where rows begin at multiples of 16 bytes, 1 elsewhere
constexpr int VR = 16 / (int)sizeof(real), VW = 16 / (int)sizeof(wide);
template <class T, int V> struct alignas(V * sizeof(T)) Vec {
    T v[V];
};
template <int V, class T> static __device__ __forceinline__ Vec<T, V> load(const T *p) { return *reinterpret_cast<const Vec<T, V> *>(p); }
template <int V, class T> static __device__ __forceinline__ void store(T *p, Vec<T, V> x) { *reinterpret_cast<Vec<T, V> *>(p) = x; }

static inline int aligned(const void *a, const void *b = nullptr, const void *c = nullptr, const void *e = nullptr) {
    return (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)e) & 15) == 0;
}
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Blocks of a loop that strides by the grid: enough to fill the device, no more than there is work
static inline unsigned grid_for(const Dev *d, size_t items, int per_block) {
    size_t need = (items + (size_t)per_block - 1) / (size_t)per_block, most = (size_t)d->sms * 8;
    return (unsigned)(need < most ? need : most);
}
#endif
