// The router on the GPU: products in fp32, scores and the choice of experts by one warp a token, and what is counted of it.
#include "kernels/cuda/count.h"
#include <limits.h>

// See kernels/cpu/router.c
#define TINY 1e-20f
constexpr int WARPS = THREADS / WARP;
#define LANE ((int)threadIdx.x % WARP)
#define WARP_ROWS(t, BT) \
    for (int t = (int)(blockIdx.x * WARPS + threadIdx.x / WARP); t < (BT); t += (int)gridDim.x * WARPS)

static __device__ __forceinline__ float up_any(float x) { return x; }
#ifdef REAL_BF16
static __device__ __forceinline__ float up_any(real x) { return up(x); }
#endif

// ---- products ------------------------------------------------------------------------------------------------------
// c[m,n] = sum_k a(m,k) b(n,k) in fp32, k ascending: a row's bits depend on no other row. a(m,k) is a[m*K + k], or a[k*M + m] if
// TurnA; b likewise. Block z takes K's part z; put(m, n, z, sum) says where a sum goes.
constexpr int TILE = 64, DEPTH = 16, OWN = 4; // a thread owns OWN x OWN sums of a tile

template <bool Turn, class T> static __device__ __forceinline__ void tile_load(float (*to)[TILE + 4], const T *a, int m0, int k0, int M, int K, int last) {
    for (int i = (int)threadIdx.x; i < TILE * DEPTH; i += THREADS) {
        int m = Turn ? i % TILE : i / DEPTH, k = Turn ? i / TILE : i % DEPTH;
        int inside = m0 + m < M && k0 + k < last;
        to[k][m] = inside ? up_any(a[Turn ? (size_t)(k0 + k) * M + m0 + m : (size_t)(m0 + m) * K + k0 + k]) : 0;
    }
}

template <bool TurnA, bool TurnB, class A, class B, class Put>
static __global__ void __launch_bounds__(THREADS) product_kernel(Put put, const A *a, const B *b, int M, int N, int K, int part) {
    SHARED(float, left, [DEPTH][TILE + 4]);
    SHARED(float, right, [DEPTH][TILE + 4]);
    int m0 = (int)blockIdx.y * TILE, n0 = (int)blockIdx.x * TILE, first = (int)blockIdx.z * part, last = first + part < K ? first + part : K;
    int row = (int)threadIdx.x / (TILE / OWN) * OWN, col = (int)threadIdx.x % (TILE / OWN) * OWN;
    float sum[OWN][OWN] = {};
    for (int k0 = first; k0 < last; k0 += DEPTH) {
        tile_load<TurnA>(left, a, m0, k0, M, K, last);
        tile_load<TurnB>(right, b, n0, k0, N, K, last);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            Vec<float, OWN> x = load<OWN>(&left[k][row]), y = load<OWN>(&right[k][col]);
            for (int i = 0; i < OWN; i++)
                for (int j = 0; j < OWN; j++) sum[i][j] += x.v[i] * y.v[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < OWN; i++)
        for (int j = 0; j < OWN; j++)
            if (m0 + row + i < M && n0 + col + j < N) put(m0 + row + i, n0 + col + j, (int)blockIdx.z, sum[i][j]);
}

static dim3 product_grid(int M, int N, int parts) { return dim3((unsigned)ceil_div(N, TILE), (unsigned)ceil_div(M, TILE), (unsigned)parts); }

struct PutWide { // x[m,n] of part z = sum
    wide *x;
    int M, N;
    __device__ void operator()(int m, int n, int z, float sum) const { x[((size_t)z * M + m) * N + n] = sum; }
};
struct AddReal { // x[m,n] += sum
    real *x;
    int N;
    __device__ void operator()(int m, int n, int, float sum) const { x[(size_t)m * N + n] = down(up(x[(size_t)m * N + n]) + sum); }
};

void dev_router_logits(Dev *d, wide *logits, const real *x, const real *w, int BT, int E, int C) {
    LAUNCH((product_kernel<false, false, real, real, PutWide>), product_grid(BT, E, 1), THREADS, 0, d->stream, (PutWide{logits, BT, E}), x, w, BT,
           E, C, C);
}

static __global__ void add_parts_kernel(wide *x, const wide *part, int parts, size_t n) { // x[i] += sum_p part[p,i]
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        wide sum = x[i];
        for (int p = 0; p < parts; p++) sum += part[p * n + i];
        x[i] = sum;
    }
}

void dev_router_logits_bwd(Dev *d, real *dx, wide *dw, const wide *dlogits, const real *x, const real *w, int BT, int E, int C) {
    LAUNCH((product_kernel<false, true, wide, real, AddReal>), product_grid(BT, C, 1), THREADS, 0, d->stream, (AddReal{dx, C}), dlogits, w, BT, C,
           E, E);
    // few tiles, many tokens: parts of the tokens side by side, as many as there is scratch for
    size_t n = SIZE(E, C), most = n ? WORK_BYTES / (n * sizeof(wide)) : 1;
    CHECK_DEVICE(most >= 1, "a router of %d x %d weights, at most %d fit", E, C, (int)(WORK_BYTES / sizeof(wide)));
    int parts = (int)ceil_div(BT, 512);
    if ((size_t)parts > most) parts = (int)most;
    if (parts > 16) parts = 16;
    if (parts == 0) return;
    int part = (int)ceil_div(BT, parts);
    wide *work = (wide *)dev_work(d, (size_t)parts * n * sizeof(wide));
    LAUNCH((product_kernel<true, true, wide, real, PutWide>), product_grid(E, C, parts), THREADS, 0, d->stream, (PutWide{work, E, C}), dlogits, x, E,
           C, BT, part);
    LAUNCH(add_parts_kernel, grid_for(d, n, THREADS), THREADS, 0, d->stream, dw, work, parts, n);
}

// ---- scores and choice -----------------------------------------------------------------------------------------------
// A lane holds the experts e = 32 i + lane, i < N, in registers.
static __device__ __forceinline__ wide sigmoid(wide x) { return 1 / (1 + expf(-x)); }

// Orders as the floats do; a larger key for a lower expert among equals
static __device__ __forceinline__ unsigned long long choice_key(float x, int e) {
    unsigned bits = __float_as_uint(x + 0.0f); // -0 becomes 0
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (unsigned long long)bits << 32 | (0xFFFFFFFFu - (unsigned)e);
}

template <int N> static __device__ __forceinline__ int all_finite(const wide *x, int E) {
    int bad = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        int e = i * WARP + LANE;
        if (e < E) bad |= !(x[e] - x[e] == 0);
    }
    return !__any_sync(WARP_ALL, bad);
}

// score[i] (registers) and the log of the sum of exponentials
template <int N> static __device__ __forceinline__ wide scores(wide (&score)[N], const wide *x, int E, RouterScore kind) {
    wide max = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        int e = i * WARP + LANE;
        score[i] = e < E ? x[e] : -INFINITY;
        max = fmaxf(max, score[i]);
    }
    max = warp_max(max);
#pragma unroll
    for (int i = 0; i < N; i++) {
        wide a = expf(score[i] - max); // 0 past E
        sum += a;
        score[i] = kind == ROUTER_SIGMOID ? (i * WARP + LANE < E ? sigmoid(score[i]) : 0) : a;
    }
    sum = warp_sum(sum);
    if (kind == ROUTER_SOFTMAX)
#pragma unroll
        for (int i = 0; i < N; i++) score[i] /= sum;
    return max + logf(sum);
}

// The best of those not taken; taken: bit i is this lane's i-th
template <int N> static __device__ __forceinline__ int best_left(const wide (&score)[N], const wide *bias, unsigned taken, int E) {
    unsigned long long best = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        int e = i * WARP + LANE;
        if (e >= E || taken >> i & 1) continue;
        unsigned long long key = choice_key(bias ? score[i] + bias[e] : score[i], e);
        best = key > best ? key : best;
    }
    return (int)(0xFFFFFFFFu - (unsigned)warp_max(best));
}

template <int N> static __device__ __forceinline__ void choose(int *idx, wide *weight, const wide (&score)[N], const wide *bias, int t, RouterShape s) {
    unsigned taken = 0;
    wide sum = 0;
    for (int k = 0; k < s.K; k++) {
        int e = s.even ? (int)(((int64_t)s.first + t + k * (s.E / s.K)) % s.E) : best_left<N>(score, bias, taken, s.E);
        wide own = 0;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i * WARP + LANE == e) own = score[i], taken |= 1u << i;
        wide picked = __shfl_sync(WARP_ALL, own, e % WARP);
        sum += picked;
        if (LANE == 0) idx[k] = e, weight[k] = picked;
    }
    __syncwarp();
    wide a = (wide)s.scale;
    if (s.renorm) a /= sum + TINY;
    for (int k = LANE; k < s.K; k += WARP) weight[k] *= a;
}

template <int N> static __global__ void route_kernel(int *idx, wide *weight, wide *prob, wide *lse, int *first_bad, const wide *logits,
                                                     const wide *bias, RouterShape s) {
    WARP_ROWS(t, s.BT) {
        size_t e0 = (size_t)t * s.E, k0 = (size_t)t * s.K;
        if (!all_finite<N>(logits + e0, s.E) || (bias && !all_finite<N>(bias, s.E))) {
            for (int k = LANE; k < s.K; k += WARP) idx[k0 + k] = k, weight[k0 + k] = 0;
            for (int e = LANE; e < s.E; e += WARP) prob[e0 + e] = 0;
            if (LANE == 0) lse[t] = 0, atomicMin(first_bad, t + 1);
            continue;
        }
        wide score[N], all = 0, log_sum = scores<N>(score, logits + e0, s.E, s.score);
        choose<N>(idx + k0, weight + k0, score, bias, t, s);
#pragma unroll
        for (int i = 0; i < N; i++) all += score[i];
        all = s.score == ROUTER_SOFTMAX ? 1 : 1 / (warp_sum(all) + TINY);
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i * WARP + LANE < s.E) prob[e0 + i * WARP + LANE] = score[i] * all;
        if (LANE == 0) lse[t] = log_sum;
    }
}

static __global__ void bad_start_kernel(int *first_bad) { *first_bad = INT_MAX; }
static __global__ void bad_end_kernel(int *bad, const int *first_bad) {
    if (*bad == 0 && *first_bad != INT_MAX) *bad = *first_bad;
}

// kernel<N> for the least N that holds E experts
#define LAUNCH_EXPERTS(kernel, E, grid, stream, ...)                                  \
    do {                                                                              \
        if ((E) <= 2 * WARP) LAUNCH(kernel<2>, grid, THREADS, 0, stream, __VA_ARGS__);       \
        else if ((E) <= 4 * WARP) LAUNCH(kernel<4>, grid, THREADS, 0, stream, __VA_ARGS__);  \
        else if ((E) <= 8 * WARP) LAUNCH(kernel<8>, grid, THREADS, 0, stream, __VA_ARGS__);  \
        else LAUNCH(kernel<32>, grid, THREADS, 0, stream, __VA_ARGS__);                      \
    } while (0)
constexpr int EXPERTS_MAX = 32 * WARP;

void dev_route(Dev *d, int *idx, wide *weight, wide *prob, wide *lse, int *bad, const wide *logits, const wide *bias, RouterShape s) {
    CHECK_USAGE(s.K >= 1 && s.K <= s.E, "%d experts per token chosen from %d, expected 1 to %d", s.K, s.E, s.E);
    CHECK_USAGE(s.E <= EXPERTS_MAX, "%d experts, at most %d on a GPU", s.E, EXPERTS_MAX);
    int *first_bad = (int *)dev_work(d, sizeof(int));
    LAUNCH(bad_start_kernel, 1, 1, 0, d->stream, first_bad);
    LAUNCH_EXPERTS(route_kernel, s.E, grid_for(d, s.BT, WARPS), d->stream, idx, weight, prob, lse, first_bad, logits, bias, s);
    LAUNCH(bad_end_kernel, 1, 1, 0, d->stream, bad, first_bad);
}

// ---- backward --------------------------------------------------------------------------------------------------------
// Through the weights: w_k = scale s_k / sum_j s_j, dw_k/ds_i = scale (delta_ki - s_k / sum) / sum. The first of a token's
// three parts, see kernels/cpu/router.c.
template <int N> static __device__ __forceinline__ void weights_bwd(wide (&ds)[N], const wide *dweight, const int *idx, const wide *prob,
                                                                    const wide *x, RouterShape s) {
    wide sum = 0, dot = 0, a = (wide)s.scale;
    for (int k = 0; s.renorm && k < s.K; k++) {
        wide score = s.score == ROUTER_SOFTMAX ? prob[idx[k]] : sigmoid(x[idx[k]]);
        sum += score;
        dot += dweight[k] * score;
    }
    if (s.renorm) dot /= sum + TINY, a /= sum + TINY;
    for (int k = 0; k < s.K; k++) {
        int e = idx[k];
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i * WARP + LANE == e) ds[i] += (dweight[k] - dot) * a;
    }
}

template <int N> static __global__ void route_bwd_kernel(wide *dlogits, const wide *dweight, const int *idx, const wide *prob, const wide *lse,
                                                         const wide *logits, const wide *f, int group, wide aux, wide z, RouterShape s) {
    WARP_ROWS(t, s.BT) {
        size_t e0 = (size_t)t * s.E, k0 = (size_t)t * s.K;
        const wide *x = logits + e0, *p = prob + e0;
        int finite = all_finite<N>(x, s.E), softmax = s.score == ROUTER_SOFTMAX;
        wide ds[N], dot = 0, all = 0, dlse = 2 * z * lse[t];
        if (f && aux != 0) { // q[e] = aux E f[e], the gradient by prob
#pragma unroll
            for (int i = 0; i < N; i++) {
                int e = i * WARP + LANE;
                ds[i] = e < s.E ? aux * s.E * f[(size_t)(t / group) * s.E + e] : 0;
                dot += e < s.E ? ds[i] * p[e] : 0;
                all += e < s.E && !softmax ? sigmoid(x[e]) : 0;
            }
            dot = warp_sum(dot), all = 1 / (warp_sum(all) + TINY);
#pragma unroll
            for (int i = 0; i < N && !softmax; i++) ds[i] = (ds[i] - dot) * all;
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) ds[i] = 0;
        }
        weights_bwd<N>(ds, dweight + k0, idx + k0, p, x, s);
        dot = 0;
#pragma unroll
        for (int i = 0; i < N; i++) dot += i * WARP + LANE < s.E ? ds[i] * p[i * WARP + LANE] : 0;
        dot = warp_sum(dot);
#pragma unroll
        for (int i = 0; i < N; i++) {
            int e = i * WARP + LANE;
            if (e >= s.E) continue;
            wide g = sigmoid(x[e]);
            g = softmax ? p[e] * (ds[i] - dot + dlse) : ds[i] * (g * (1 - g)) + dlse * expf(x[e] - lse[t]);
            dlogits[e0 + e] = finite ? g : 0; // dev_route has told of a token that is not
        }
    }
}

void dev_route_bwd(Dev *d, wide *dlogits, const wide *dweight, const int *idx, const wide *prob, const wide *lse,
                   const wide *logits, const wide *f, int n_groups, wide aux_scale, wide z_scale, RouterShape s) {
    CHECK_USAGE(n_groups >= 1 && s.BT % n_groups == 0, "%d tokens in %d balance groups, expected groups of equal size", s.BT, n_groups);
    CHECK_USAGE(s.E <= EXPERTS_MAX, "%d experts, at most %d on a GPU", s.E, EXPERTS_MAX);
    LAUNCH_EXPERTS(route_bwd_kernel, s.E, grid_for(d, s.BT, WARPS), d->stream, dlogits, dweight, idx, prob, lse, logits, f, s.BT / n_groups, aux_scale,
                   z_scale, s);
}

// ---- counts ----------------------------------------------------------------------------------------------------------
// Block (x, g): experts 32 x .. 32 x + 31 of group g. Eight warps take every eighth token; their sums are added in order.
static __global__ void balance_kernel(wide *f, wide *p, const int *idx, const wide *prob, int tokens, int E, int K) {
    SHARED(double, part, [WARPS][WARP]);
    SHARED(int, count, [WARP]);
    int lane = LANE, warp = (int)threadIdx.x / WARP, e = (int)blockIdx.x * WARP + lane;
    const wide *row = prob + (size_t)blockIdx.y * tokens * E;
    const int *pair = idx + (size_t)blockIdx.y * tokens * K;
    double sum = 0;
    for (int t = warp; t < tokens && e < E; t += WARPS) sum += row[(size_t)t * E + e];
    part[warp][lane] = sum;
    if (warp == 0) count[lane] = 0;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < tokens * K; i += THREADS) {
        int at = pair[i] - (int)blockIdx.x * WARP;
        if (at >= 0 && at < WARP) atomicAdd(&count[at], 1);
    }
    __syncthreads();
    if (warp > 0 || e >= E) return;
    sum = 0;
    for (int i = 0; i < WARPS; i++) sum += part[i][lane];
    p[(size_t)blockIdx.y * E + e] = (wide)(tokens ? sum / tokens : 0);
    f[(size_t)blockIdx.y * E + e] = tokens ? (wide)count[lane] / (wide)(tokens * K) : 0;
}

void dev_balance(Dev *d, wide *f, wide *p, const int *idx, const wide *prob, int BT, int E, int K, int n_groups) {
    CHECK_USAGE(n_groups >= 1 && BT % n_groups == 0, "%d tokens in %d balance groups, expected groups of equal size", BT, n_groups);
    size_t pairs = SIZE(BT / n_groups, K);
    CHECK_USAGE(pairs <= 1 << 24, "%zu pairs in one balance group, at most %d can be counted exactly (hint: --micro-batch)", pairs, 1 << 24);
    LAUNCH(balance_kernel, dim3((unsigned)ceil_div(E, WARP), (unsigned)n_groups), THREADS, 0, d->stream, f, p, idx, prob, BT / n_groups, E, K);
}

void dev_route_count(Dev *d, int *count, int *seen, int *ord, const int *idx, int BT, int E, int K, int capacity) {
    count_labels(d, ord, count, seen, idx, (int)SIZE(BT, K), E, capacity);
}
