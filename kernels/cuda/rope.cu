// QK-norm and RoPE. A block per token: its warps share the token's angles and take its heads in turn; a lane holds the pairs
// lane, lane + 32, ... of a head, so that the norm's sum and the rotation need no shared memory.
#include "kernels/cuda/dev.h"

constexpr int ROPE_THREADS = 128, ROPE_WARPS = ROPE_THREADS / WARP, HEAD_MAX = 256, PAIRS = HEAD_MAX / 2 / WARP;

struct RopeArgs {
    int tokens, T, pos0, NH, NKV, HS;
    double theta;
    float eps;
    const real *qkv, *wq, *wk;
};

static __device__ __forceinline__ int lane_id() { return (int)threadIdx.x % WARP; }
static __device__ __forceinline__ int warp_id() { return (int)threadIdx.x / WARP; }

// cos and sin of the token's angles, (2,HS/2), by the whole block
static __device__ void angles(float *turn, const RopeArgs &a, int bt) {
    const int half = a.HS / 2;
    __syncthreads(); // the last token's have been used
    for (int j = (int)threadIdx.x; j < half; j += ROPE_THREADS) {
        double s, c;
        sincos(((double)a.pos0 + bt % a.T) * pow(a.theta, -2.0 * j / a.HS), &s, &c);
        turn[j] = (float)c;
        turn[half + j] = (float)s;
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(ROPE_THREADS) rope_kernel(real *qk, wide *rstd, RopeArgs a) {
    SHARED(float, turn, [HEAD_MAX]);
    const int half = a.HS / 2, heads = a.NH + a.NKV, bt = (int)blockIdx.x;
    angles(turn, a, bt);
    for (int h = warp_id(); h < heads; h += ROPE_WARPS) {
        const real *x = a.qkv + ((size_t)bt * (heads + a.NKV) + h) * a.HS, *w = h < a.NH ? a.wq : a.wk;
        real *y = qk + ((size_t)bt * heads + h) * a.HS;
        float lo[PAIRS], hi[PAIRS], sum = 0, r = 1;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int j = lane_id() + i * WARP;
            lo[i] = j < half ? up(x[j]) : 0;
            hi[i] = j < half ? up(x[j + half]) : 0;
            sum += lo[i] * lo[i] + hi[i] * hi[i];
        }
        if (w) r = 1 / sqrtf(warp_sum(sum) / a.HS + a.eps);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int j = lane_id() + i * WARP;
            if (j >= half) continue;
            if (w) lo[i] *= r * up(w[j]), hi[i] *= r * up(w[j + half]);
            y[j] = down(lo[i] * turn[j] - hi[i] * turn[half + j]);
            y[j + half] = down(hi[i] * turn[j] + lo[i] * turn[half + j]);
        }
        if (lane_id() == 0) rstd[(size_t)bt * heads + h] = r;
    }
}

// Tokens chunk, chunk + 1, ... of `per` tokens a block, which leaves its sums of dwq and dwk in part[block] (2,HS)
static __global__ void __launch_bounds__(ROPE_THREADS) rope_bwd_kernel(real *dqkv, wide *part, const real *dqk, const wide *rstd,
                                                                       int per, RopeArgs a) {
    SHARED(float, turn, [HEAD_MAX]);
    SHARED(float, sums, [ROPE_WARPS * 2 * HEAD_MAX]); // [warp][q or k][d]
    const int half = a.HS / 2, heads = a.NH + a.NKV, end = min(((int)blockIdx.x + 1) * per, a.tokens);
    float dw[2][PAIRS][2] = {}; // [q or k][pair][lower or upper half]
    for (int bt = (int)blockIdx.x * per; bt < end; bt++) {
        angles(turn, a, bt);
        for (int h = warp_id(); h < heads; h += ROPE_WARPS) {
            const int key = h >= a.NH;
            const real *w = key ? a.wk : a.wq, *dy = dqk + ((size_t)bt * heads + h) * a.HS;
            const size_t at = ((size_t)bt * (heads + a.NKV) + h) * a.HS;
            const float r = w ? rstd[(size_t)bt * heads + h] : 1;
            float g[PAIRS][2], xn[PAIRS][2], dot = 0;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const int j = lane_id() + i * WARP;
                const bool there = j < half;
                const float lo = there ? up(dy[j]) : 0, hi = there ? up(dy[j + half]) : 0;
                const float c = there ? turn[j] : 0, s = there ? turn[half + j] : 0;
                g[i][0] = lo * c + hi * s;
                g[i][1] = hi * c - lo * s;
                if (!w) continue;
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    xn[i][e] = there ? up(a.qkv[at + j + e * half]) * r : 0;
                    if (key) dw[1][i][e] += g[i][e] * xn[i][e];
                    else dw[0][i][e] += g[i][e] * xn[i][e];
                    g[i][e] *= there ? up(w[j + e * half]) : 0;
                    dot += g[i][e] * xn[i][e];
                }
            }
            const float mean = w ? warp_sum(dot) / a.HS : 0;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const int j = lane_id() + i * WARP;
                if (j >= half) continue;
#pragma unroll
                for (int e = 0; e < 2; e++) dqkv[at + j + e * half] = down(w ? (g[i][e] - xn[i][e] * mean) * r : g[i][e]);
            }
        }
    }
    if (!a.wq) return;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int j = lane_id() + i * WARP;
        if (j >= half) continue;
#pragma unroll
        for (int which = 0; which < 2; which++)
#pragma unroll
            for (int e = 0; e < 2; e++) sums[(warp_id() * 2 + which) * HEAD_MAX + j + e * half] = dw[which][i][e];
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < 2 * a.HS; i += ROPE_THREADS) {
        float sum = 0;
        for (int warp = 0; warp < ROPE_WARPS; warp++) sum += sums[(warp * 2 + i / a.HS) * HEAD_MAX + i % a.HS];
        part[(size_t)blockIdx.x * 2 * a.HS + i] = sum;
    }
}

// dwq, dwk += part[0] + part[1] + ...
static __global__ void rope_sum_kernel(wide *dwq, wide *dwk, const wide *part, int parts, int HS) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= 2 * HS) return;
    float sum = 0;
    for (int p = 0; p < parts; p++) sum += part[(size_t)p * 2 * HS + i];
    if (i < HS) dwq[i] += sum;
    else dwk[i - HS] += sum;
}

static RopeArgs args_of(const real *qkv, const real *wq, const real *wk, int B, int T, int pos0, int NH, int NKV, int HS,
                        double theta, wide eps) {
    CHECK_USAGE(HS > 0 && HS % 2 == 0 && HS <= HEAD_MAX, "head size %d: must be even and at most %d", HS, HEAD_MAX);
    CHECK_USAGE(NKV > 0 && NH % NKV == 0, "%d query heads do not divide among %d key/value heads", NH, NKV);
    return RopeArgs{(int)SIZE(B, T), T, pos0, NH, NKV, HS, theta, eps, qkv, wq, wk};
}

extern "C" void dev_qk_rope(Dev *d, real *qk, wide *rstd, const real *qkv, const real *wq, const real *wk, int B, int T, int pos0,
                            int NH, int NKV, int HS, double theta, wide eps) {
    const RopeArgs a = args_of(qkv, wq, wk, B, T, pos0, NH, NKV, HS, theta, eps);
    LAUNCH(rope_kernel, (unsigned)a.tokens, ROPE_THREADS, 0, d->stream, qk, rstd, a);
}

constexpr int ROPE_CHUNKS = 1024; // blocks at most: by the number of tokens alone, so that sums are the same on every GPU

extern "C" void dev_qk_rope_bwd(Dev *d, real *dqkv, wide *dwq, wide *dwk, const real *dqk, const real *qkv, const real *wq,
                                const real *wk, const wide *rstd, int B, int T, int NH, int NKV, int HS, double theta) {
    const RopeArgs a = args_of(qkv, wq, wk, B, T, 0, NH, NKV, HS, theta, 0);
    if (!a.tokens) return;
    const int per = (int)ceil_div(a.tokens, ROPE_CHUNKS), parts = (int)ceil_div(a.tokens, per);
    wide *part = (wide *)dev_work(d, SIZE(parts, 2, HS) * sizeof(wide));
    LAUNCH(rope_bwd_kernel, (unsigned)parts, ROPE_THREADS, 0, d->stream, dqkv, part, dqk, rstd, per, a);
    if (wq) LAUNCH(rope_sum_kernel, (unsigned)ceil_div(2 * HS, WARP), WARP, 0, d->stream, dwq, dwk, (const wide *)part, parts, HS);
}
