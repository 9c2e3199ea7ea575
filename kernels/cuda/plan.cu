// Plans on the GPU: the solver's single source, run by one thread block as one launch. All threads run all of it in step.
#define HOSTDEV static __device__ __forceinline__
#define SOLVE_SIZE static inline // how much scratch: asked on the host
#include "kernels/cuda/dev.h"
extern "C" {
#include "kernels/cuda/plan.h"
}

constexpr int PLAN_THREADS = 512;

struct Shared { // of the block that plans
    int64_t part[WARP];
};
static __device__ __forceinline__ Shared *plan_shared() {
    SHARED(Shared, s, );
    return &s;
}

// The barrier ahead lets every thread finish with what the last reduction left in `part`.
template <class Combine> static __device__ __forceinline__ int64_t block_reduce(int64_t x, int64_t none, Combine combine) {
    Shared *s = plan_shared();
    int warps = (int)blockDim.x / WARP, lane = (int)threadIdx.x % WARP;
    for (int d = WARP / 2; d > 0; d /= 2) x = combine(x, __shfl_xor_sync(WARP_ALL, x, d));
    __syncthreads();
    if (lane == 0) s->part[threadIdx.x / WARP] = x;
    __syncthreads();
    x = lane < warps ? s->part[lane] : none;
    for (int d = WARP / 2; d > 0; d /= 2) x = combine(x, __shfl_xor_sync(WARP_ALL, x, d));
    return x;
}
struct Larger {
    __device__ int64_t operator()(int64_t a, int64_t b) const { return a > b ? a : b; }
};
struct Plus {
    __device__ int64_t operator()(int64_t a, int64_t b) const { return a + b; }
};

#define SOLVE_FOR(i, n) for (int i = (int)threadIdx.x, solve_n_ = (n); i < solve_n_; i += (int)blockDim.x)
#define SOLVE_ONE if (threadIdx.x == 0)
#define SOLVE_BARRIER() __syncthreads()
#define SOLVE_MAX(x) block_reduce(x, INT64_MIN, Larger())
#define SOLVE_SUM(x) block_reduce(x, 0, Plus())
#define SOLVE_LEAF static __device__
#define SOLVE_BIG static __device__ __attribute__((noinline))
extern "C" {
#include "topoep/policies.h"
}

static __global__ void __launch_bounds__(PLAN_THREADS) plan_kernel(Plan plan, const int *D, int R, int E, Cost cost, PlanOptions options, int64_t *work, size_t policy_bytes) {
    SHARED(Solve, v, );
    SHARED(Cost, shown, ); // an argument lies in each thread's own memory
    SOLVE_ONE shown = cost;
    SOLVE_BARRIER();
    solve_bind(&v, (char *)work + policy_bytes, D, R, E, &shown, options);
    policy_solve(&v, options, plan.history, work);
    solve_result(&v, plan.quota, plan.slot, plan.info);
}

size_t plan_work_bytes(int R, int E, int N, int S) { return policy_work_bytes(R, E) + solve_work_bytes(R, E, N, S); }

void plan_solve_on(Dev *d, Plan *plan, const int *D, int R, int E, const Cost *cost, PlanOptions options, void *work, int threads) {
    LAUNCH(plan_kernel, 1, (unsigned)threads, 0, d->stream, *plan, D, R, E, *cost, options, (int64_t *)work, policy_work_bytes(R, E));
}

// Counts are the routers' own, and moe_init bounds their sum: nothing here can fail, so nothing is asked of the host.
void plan_solve(Dev *d, Plan *plan, const int *D, int R, int E, const Cost *cost, PlanOptions options, void *work) {
    int widest = R * (cost->S > 0 ? cost->S : 1) > E ? R * cost->S : E, threads = (int)ceil_div(widest, WARP) * WARP;
    plan_solve_on(d, plan, D, R, E, cost, options, work, threads < PLAN_THREADS ? threads : PLAN_THREADS);
}
