// Cross-entropy: a block per row of logits, which it reads twice, the second time from the cache. The caller hands over a few
// rows of the head's product at a time, so that the logits of a batch are never all in memory.
#include "kernels/cuda/dev.h"

constexpr int LOSS_THREADS = 512, LOSS_WARPS = LOSS_THREADS / WARP;

// Largest value and sum of exp(x - top); two of them as one
struct Softmax {
    float top, sum;
};
static __device__ __forceinline__ Softmax merge(Softmax a, Softmax b) {
    const float top = fmaxf(a.top, b.top); // a NaN is passed over here and reaches the sum
    if (top == -INFINITY) return Softmax{top, a.sum + b.sum};
    return Softmax{top, a.sum * expf(a.top - top) + b.sum * expf(b.top - top)};
}

// In every thread
static __device__ Softmax block_merge(Softmax s) {
    SHARED(Softmax, part, [LOSS_WARPS]);
    for (int d = WARP / 2; d > 0; d /= 2)
        s = merge(s, Softmax{__shfl_xor_sync(WARP_ALL, s.top, d), __shfl_xor_sync(WARP_ALL, s.sum, d)});
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = s;
    __syncthreads();
    s = part[0];
    for (int w = 1; w < LOSS_WARPS; w++) s = merge(s, part[w]);
    return s;
}

// V elements at a time: VR where rows begin at multiples of 16 bytes, else 1
template <int EACH> static __global__ void __launch_bounds__(LOSS_THREADS) cross_entropy_kernel(wide *nll, real *logits, const int *target,
                                                                                                int V, wide scale, int grad) {
    const int m = (int)blockIdx.x, t = target[m];
    real *x = logits + (size_t)m * V;
    if (t >= V) __trap(); // no such token
    if (t < 0) {
        if (threadIdx.x == 0) nll[m] = 0;
        for (int v = (int)threadIdx.x * EACH; grad && v < V; v += LOSS_THREADS * EACH) {
            Vec<real, EACH> zero;
#pragma unroll
            for (int i = 0; i < EACH; i++) zero.v[i] = down(0);
            store<EACH>(x + v, zero);
        }
        return;
    }
    Softmax s = {-INFINITY, 0};
    for (int v = (int)threadIdx.x * EACH; v < V; v += LOSS_THREADS * EACH) {
        const Vec<real, EACH> y = load<EACH>(x + v);
        Softmax one = {-INFINITY, 0};
#pragma unroll
        for (int i = 0; i < EACH; i++) one.top = fmaxf(one.top, up(y.v[i]));
#pragma unroll
        for (int i = 0; i < EACH; i++) one.sum += up(y.v[i]) == one.top ? 1 : expf(up(y.v[i]) - one.top); // -inf alone is no NaN
        s = merge(s, one);
    }
    s = block_merge(s);
    const float xt = up(x[t]);
    if (threadIdx.x == 0) nll[m] = logf(s.sum) + (s.top - xt);
    if (!grad) return;
    __syncthreads(); // x[t] has been read by all
    const float a = scale / s.sum;
    for (int v = (int)threadIdx.x * EACH; v < V; v += LOSS_THREADS * EACH) {
        Vec<real, EACH> y = load<EACH>(x + v);
#pragma unroll
        for (int i = 0; i < EACH; i++) y.v[i] = down(a * expf(up(y.v[i]) - s.top) - (v + i == t ? scale : 0));
        store<EACH>(x + v, y);
    }
}

extern "C" void dev_cross_entropy(Dev *d, wide *nll, real *logits, const int *target, int M, int V, wide scale, int grad) {
    if (V % VR == 0 && aligned(logits))
        LAUNCH(cross_entropy_kernel<VR>, (unsigned)M, LOSS_THREADS, 0, d->stream, nll, logits, target, V, scale, grad);
    else LAUNCH(cross_entropy_kernel<1>, (unsigned)M, LOSS_THREADS, 0, d->stream, nll, logits, target, V, scale, grad);
}
