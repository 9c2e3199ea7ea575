// Attention in flash form (Dao et al., 2205.14135; 2307.08691), causal, grouped queries, document starts, on tensor cores.
// A block holds 64 rows (queries; keys where keys' gradients are summed; 32 of large heads), 16 a warp, and walks over tiles of
// the other side, the next of which lands while this one is used. Scores stay in registers: what one product leaves is the next
// one's operand. The backward pass computes the scores twice, once by keys for dk and dv, once by queries for dq, so that each
// sum is one block's, in one order, without atomics.
// Key tiles begin at multiples of their length and a tile that a query does not see changes none of its bits.
#include "kernels/cuda/fragment.h"

enum { HEAD_MAX = 256 };
static constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// By padded head size D. FWD, BWD: rows of the tiles that are walked over, by shared memory and registers.
template <int D> struct Sizes {
    enum {
        ROWS = D * (int)sizeof(real) < 512 ? 64 : 32, // of a block, 16 a warp
        THREADS = 2 * ROWS,
        OUT = D < 128 ? D : 128, // columns of a result that a block computes; at 256 two blocks share a head and its scores
        FIT = 16384 / (D * (int)sizeof(real)),
        FWD = FIT < 64 ? FIT : 64,
        BWD = D < 128 ? FWD : FIT < 32 ? FIT : 32,
        FWD_STAGE = FWD * (D + OUT), // elements
        DQ_STAGE = 2 * BWD * D,
        DKV_STAGE = DQ_STAGE + 3 * BWD * (int)(sizeof(float) / sizeof(real)),
    };
};

struct AttnArgs {
    AttnShape s;
    int group;             // query heads of a key/value head
    int blocks, parts;     // of rows in a sequence; of columns in a head
    size_t k_seq, v_seq;
    float scale, scale_2;  // 1/sqrt(HS); times log2 e
    const real *q, *k, *v, *dout;
    real *o, *dq, *dk, *dv;
    wide *lse;
    const wide *delta;     // (B,NH,Tq): dout . o
    const int *first;
};

static __device__ __forceinline__ float quad_sum(float x) { // over the four lanes that hold a row
    x += __shfl_xor_sync(WARP_ALL, x, 1);
    return x + __shfl_xor_sync(WARP_ALL, x, 2);
}
static __device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(WARP_ALL, x, 1));
    return fmaxf(x, __shfl_xor_sync(WARP_ALL, x, 2));
}

template <int N> static __device__ __forceinline__ void sums_zero(float (&c)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[i][e] = 0;
}

// c (16 rows of the warp, 8 N columns) = rows `row`.. of a . rows of b, both tiles [row][d]
template <int D, int N> static __device__ __forceinline__ void rows_dot(float (&c)[N][4], const real *a, int row, const real *b) {
    sums_zero(c);
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        FragA x;
        frag_a<D>(x, a, row, k);
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            FragB y0, y1;
            frag_b<D>(y0, y1, b, j * 8, k);
            frag_mma(c[j], x, y0);
            frag_mma(c[j + 1], x, y1);
        }
    }
}

// c (16 rows, 8 OUT columns) += p (16 rows, 8 N columns) . columns col.. of a tile [8 N rows][COLS]
template <int COLS, int N, int OUT>
static __device__ __forceinline__ void rows_mix(float (&c)[OUT][4], const float (&p)[N][4], const real *tile, int col) {
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        FragA x;
        frag_of(x, p[k], p[k + 1]);
#pragma unroll
        for (int j = 0; j < OUT; j += 2) {
            FragB y0, y1;
            frag_b_turned<COLS>(y0, y1, tile, col + j * 8, k * 8);
            frag_mma(c[j], x, y0);
            frag_mma(c[j + 1], x, y1);
        }
    }
}

// The warp's 16 rows of a result, times `lower` (row g) and `upper` (row g+8), into a tile
template <int COLS, int N>
static __device__ __forceinline__ void rows_put(real *tile, const float (&c)[N][4], int row, float lower, float upper) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int j = 0; j < N; j++) {
        real_store_pair(tile + tile_element<COLS>(row + g, j * 8 + t * 2), c[j][0] * lower, c[j][1] * lower);
        real_store_pair(tile + tile_element<COLS>(row + g + 8, j * 8 + t * 2), c[j][2] * upper, c[j][3] * upper);
    }
}

// ---- queries against keys: forward, and dq -------------------------------------------------------------------------------
struct Queries { // a block's queries: consecutive ones of one head of one sequence
    int b, head, col0, i0, n; // col0: first of the columns computed here; n: how many queries there are
    int lo, hi;               // some query sees lo, one sees hi, none sees more
    int all_from, all_to;     // every query sees these
    int pos[2], first[2];     // of this lane's rows g and g+8 of the warp
};

template <int ROWS, int OUT> static __device__ Queries queries_of(const AttnArgs &a) {
    const int heads = a.s.B * a.s.NH * a.parts, at = (int)(blockIdx.x % heads);
    Queries w;
    w.i0 = (a.blocks - 1 - (int)(blockIdx.x / heads)) * ROWS; // the longest first
    w.col0 = at % a.parts * OUT;
    w.head = at / a.parts % a.s.NH;
    w.b = at / a.parts / a.s.NH;
    w.n = min(a.s.Tq - w.i0, ROWS);
    const int before = a.s.Tk - a.s.Tq + w.i0; // the position of the block's first query
    w.hi = before + w.n - 1;
    w.all_to = before;
    w.lo = w.all_from = 0;
    if (a.first) { // each warp looks at all of them
        const int *first = a.first + (size_t)w.b * a.s.Tq + w.i0;
        const int r0 = min(lane_id(), w.n - 1), r1 = min(lane_id() + 32, w.n - 1), f0 = first[r0], f1 = first[r1];
        if (min(f0, f1) < 0 || f0 > before + r0 || f1 > before + r1) __trap(); // a document begins behind its token
        w.lo = warp_min(min(f0, f1));
        w.all_from = warp_max(max(f0, f1));
    }
#pragma unroll
    for (int h = 0; h < 2; h++) { // a row past the last query does as that one does, and is not stored
        const int r = min(warp_id() * 16 + lane_id() / 4 + h * 8, w.n - 1);
        w.pos[h] = before + r;
        w.first[h] = a.first ? a.first[(size_t)w.b * a.s.Tq + w.i0 + r] : 0;
    }
    return w;
}

// Scores of keys s0.. that a row does not see become -inf.
template <int N> static __device__ __forceinline__ void queries_hide(float (&c)[N][4], const Queries &w, int s0) {
    if (s0 >= w.all_from && s0 + N * 8 - 1 <= w.all_to) return;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int key = s0 + j * 8 + lane_id() % 4 * 2 + e % 2;
            if (key > w.pos[e / 2] || key < w.first[e / 2]) c[j][e] = -INFINITY;
        }
}

static __device__ __forceinline__ size_t query_at(const AttnArgs &a, const Queries &w) { // first element of the block's q
    return ((size_t)w.b * a.s.Tq + w.i0) * a.s.ldq + (size_t)w.head * a.s.HS;
}
static __device__ __forceinline__ size_t result_at(const AttnArgs &a, const Queries &w) { // and of o, dout
    return (((size_t)w.b * a.s.Tq + w.i0) * a.s.NH + w.head) * a.s.HS;
}

// Keys and columns col0.. of values, from key s0 on
template <int D, int KEYS, int OUT>
static __device__ __forceinline__ void keys_load(real *stage, const AttnArgs &a, const Queries &w, int s0) {
    constexpr int TEAM = Sizes<D>::THREADS;
    const size_t kv = (size_t)(w.head / a.group) * a.s.HS;
    const int left = a.s.Tk - s0;
    tile_load<KEYS, D, TEAM>(stage, a.k + w.b * a.k_seq + kv + (size_t)s0 * a.s.ldk, a.s.ldk, left, a.s.HS);
    tile_load<KEYS, OUT, TEAM>(stage + KEYS * D, a.v + w.b * a.v_seq + kv + (size_t)s0 * a.s.ldv + (OUT < D ? w.col0 : 0), a.s.ldv,
                                  left, OUT < D ? a.s.HS - w.col0 : a.s.HS);
    cp_async_commit();
}

template <int D> static __global__ void __launch_bounds__(Sizes<D>::THREADS, 3) attention_kernel(AttnArgs a) {
    constexpr int KEYS = Sizes<D>::FWD, OUT = Sizes<D>::OUT, ROWS = Sizes<D>::ROWS, TEAM = Sizes<D>::THREADS;
    constexpr int STAGE = Sizes<D>::FWD_STAGE;
    DYN_SHARED(real, q);
    real *stage = q + ROWS * D;
    const Queries w = queries_of<ROWS, OUT>(a);
    const int row = warp_id() * 16;
    float sum[OUT / 8][4], max[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0}; // max: in base 2
    sums_zero(sum);
    int s0 = w.lo - w.lo % KEYS, at = 0;
    tile_load<ROWS, D, TEAM>(q, a.q + query_at(a, w), a.s.ldq, w.n, a.s.HS);
    keys_load<D, KEYS, OUT>(stage, a, w, s0);
    for (; s0 <= w.hi; s0 += KEYS, at ^= 1) {
        cp_async_wait<0>();
        __syncthreads(); // this tile has landed for all, and the other one has been read by all
        if (s0 + KEYS <= w.hi) keys_load<D, KEYS, OUT>(stage + (at ^ 1) * STAGE, a, w, s0 + KEYS);
        const real *k = stage + at * STAGE, *v = k + KEYS * D;
        float p[KEYS / 8][4];
        rows_dot<D>(p, q, row, k);
        queries_hide(p, w, s0);
#pragma unroll
        for (int h = 0; h < 2; h++) { // rows g and g+8
            float top = -INFINITY;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(p[j][h * 2], p[j][h * 2 + 1]));
            top = fmaxf(max[h], quad_max(top) * a.scale_2);
            const float base = top == -INFINITY ? 0 : top; // nothing seen so far: every p is 0
            const float fade = exp2f(max[h] - base);
            float part = 0;
            max[h] = top;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = h * 2; e < h * 2 + 2; e++) {
                    p[j][e] = exp2f(fmaf(p[j][e], a.scale_2, -base));
                    part += p[j][e];
                }
            total[h] = total[h] * fade + part; // of this lane's columns
#pragma unroll
            for (int j = 0; j < OUT / 8; j++) sum[j][h * 2] *= fade, sum[j][h * 2 + 1] *= fade;
        }
        rows_mix<OUT>(sum, p, v, 0);
    }
    const float t0 = quad_sum(total[0]), t1 = quad_sum(total[1]);
    if (w.col0 == 0 && lane_id() % 4 == 0) {
        wide *lse = a.lse + ((size_t)w.b * a.s.NH + w.head) * a.s.Tq + w.i0;
        const int r = row + lane_id() / 4;
        if (r < w.n) lse[r] = LN_2 * (max[0] + log2f(t0));
        if (r + 8 < w.n) lse[r + 8] = LN_2 * (max[1] + log2f(t1));
    }
    __syncthreads(); // q has been read by all
    rows_put<OUT>(q, sum, row, 1 / t0, 1 / t1);
    __syncthreads();
    tile_store<ROWS, OUT, TEAM>(a.o + result_at(a, w) + w.col0, (size_t)a.s.NH * a.s.HS, q, w.n, a.s.HS - w.col0);
}

template <int D> static __global__ void __launch_bounds__(Sizes<D>::THREADS) attention_dq_kernel(AttnArgs a) {
    constexpr int KEYS = Sizes<D>::BWD, OUT = Sizes<D>::OUT, ROWS = Sizes<D>::ROWS, TEAM = Sizes<D>::THREADS;
    constexpr int STAGE = Sizes<D>::DQ_STAGE;
    DYN_SHARED(real, q);
    real *g = q + ROWS * D, *stage = g + ROWS * D;
    const Queries w = queries_of<ROWS, OUT>(a);
    const int row = warp_id() * 16;
    float sum[OUT / 8][4], lse_2[2], delta[2];
    sums_zero(sum);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const size_t i = ((size_t)w.b * a.s.NH + w.head) * a.s.Tq + w.i0 + min(row + lane_id() / 4 + h * 8, w.n - 1);
        lse_2[h] = a.lse[i] * LOG2_E;
        delta[h] = a.delta[i];
    }
    int s0 = w.lo - w.lo % KEYS, at = 0;
    tile_load<ROWS, D, TEAM>(q, a.q + query_at(a, w), a.s.ldq, w.n, a.s.HS);
    tile_load<ROWS, D, TEAM>(g, a.dout + result_at(a, w), (size_t)a.s.NH * a.s.HS, w.n, a.s.HS);
    keys_load<D, KEYS, D>(stage, a, w, s0);
    for (; s0 <= w.hi; s0 += KEYS, at ^= 1) {
        cp_async_wait<0>();
        __syncthreads(); // as in the forward pass
        if (s0 + KEYS <= w.hi) keys_load<D, KEYS, D>(stage + (at ^ 1) * STAGE, a, w, s0 + KEYS);
        const real *k = stage + at * STAGE, *v = k + KEYS * D;
        float p[KEYS / 8][4], dp[KEYS / 8][4];
        rows_dot<D>(p, q, row, k);
        rows_dot<D>(dp, g, row, v);
        queries_hide(p, w, s0);
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) p[j][e] = exp2f(fmaf(p[j][e], a.scale_2, -lse_2[e / 2])) * (dp[j][e] - delta[e / 2]);
        rows_mix<D>(sum, p, k, w.col0);
    }
    __syncthreads();
    rows_put<OUT>(q, sum, row, a.scale, a.scale);
    __syncthreads();
    tile_store<ROWS, OUT, TEAM>(a.dq + query_at(a, w) + w.col0, a.s.ldq, q, w.n, a.s.HS - w.col0);
}

// ---- keys against queries: dk and dv -------------------------------------------------------------------------------------
// delta[b,h,i] = sum_d dout[i,h,d] o[i,h,d], a warp for each; here and below n of the sequences from a's first on
static __global__ void __launch_bounds__(THREADS) attention_delta_kernel(wide *delta, AttnArgs a) {
    const size_t i = blockIdx.x * (size_t)(THREADS / WARP) + warp_id(); // token * NH + head
    if (i >= (size_t)a.s.B * a.s.Tq * a.s.NH) return;
    const real *o = a.o + i * a.s.HS, *g = a.dout + i * a.s.HS;
    float sum = 0;
    for (int d = lane_id(); d < a.s.HS; d += WARP) sum = fmaf(up(o[d]), up(g[d]), sum);
    sum = warp_sum(sum);
    const size_t token = i / a.s.NH;
    if (lane_id() == 0) delta[(token / a.s.Tq * a.s.NH + i % a.s.NH) * a.s.Tq + token % a.s.Tq] = sum;
}

// What a round of the walk uses: the queries from i0 on, of one head
struct Round {
    int head, i0;
};

// The next round whose queries see one of the keys s0..s1; head = last + 1: none. Each warp looks for itself and finds the same.
template <int N> static __device__ Round round_next(const AttnArgs &a, Round r, int b, int last, int s0, int s1) {
    for (;;) {
        r.i0 += N;
        if (r.i0 >= a.s.Tq) r.i0 = s0 - s0 % N, r.head++;
        if (r.head > last || !a.first) return r;
        const int *first = a.first + (size_t)b * a.s.Tq, end = a.s.Tq - 1;
        int from = first[min(r.i0 + lane_id(), end)];
        if (N > 32) from = min(from, first[min(r.i0 + 32 + lane_id(), end)]);
        if (warp_min(from) <= s1) return r;
    }
}

// Queries, dout and, for each query, lse in base 2, delta and first
template <int D, int N>
static __device__ __forceinline__ void round_load(real *stage, const AttnArgs &a, Round r, int b) {
    constexpr int TEAM = Sizes<D>::THREADS;
    const size_t token = (size_t)b * a.s.Tq + r.i0, ld = (size_t)a.s.NH * a.s.HS;
    const int left = a.s.Tq - r.i0, i = (int)threadIdx.x;
    tile_load<N, D, TEAM>(stage, a.q + token * a.s.ldq + (size_t)r.head * a.s.HS, a.s.ldq, left, a.s.HS);
    tile_load<N, D, TEAM>(stage + N * D, a.dout + token * ld + (size_t)r.head * a.s.HS, ld, left, a.s.HS);
    if (i < N) { // past the last query all is 0, and adds 0
        const size_t at = ((size_t)b * a.s.NH + r.head) * a.s.Tq + r.i0 + i;
        float *row = reinterpret_cast<float *>(stage + 2 * N * D);
        row[i] = i < left ? a.lse[at] * LOG2_E : 0;
        row[N + i] = i < left ? a.delta[at] : 0;
        reinterpret_cast<int *>(row)[2 * N + i] = a.first && i < left ? a.first[token + i] : 0;
    }
    cp_async_commit();
}

template <int D> static __global__ void __launch_bounds__(Sizes<D>::THREADS) attention_dkv_kernel(AttnArgs a) {
    constexpr int N = Sizes<D>::BWD, OUT = Sizes<D>::OUT, ROWS = Sizes<D>::ROWS, TEAM = Sizes<D>::THREADS;
    constexpr int STAGE = Sizes<D>::DKV_STAGE;
    DYN_SHARED(real, k);
    real *v = k + ROWS * D, *stage = v + ROWS * D;
    const int heads = a.s.B * a.s.NKV * a.parts, task = (int)(blockIdx.x % heads);
    const int s0 = (int)(blockIdx.x / heads) * ROWS, n = min(a.s.Tk - s0, ROWS); // the longest first
    const int col0 = task % a.parts * OUT, kv = task / a.parts % a.s.NKV, b = task / a.parts / a.s.NKV;
    const int row = warp_id() * 16, last = kv * a.group + a.group - 1, s1 = s0 + n - 1;
    const size_t k_at = b * a.k_seq + (size_t)s0 * a.s.ldk + (size_t)kv * a.s.HS;
    const size_t v_at = b * a.v_seq + (size_t)s0 * a.s.ldv + (size_t)kv * a.s.HS;
    float dk[OUT / 8][4], dv[OUT / 8][4];
    sums_zero(dk);
    sums_zero(dv);
    tile_load<ROWS, D, TEAM>(k, a.k + k_at, a.s.ldk, n, a.s.HS);
    tile_load<ROWS, D, TEAM>(v, a.v + v_at, a.s.ldv, n, a.s.HS);
    Round r = round_next<N>(a, Round{kv * a.group, s0 - s0 % N - N}, b, last, s0, s1);
    if (r.head <= last) round_load<D, N>(stage, a, r, b);
    for (int at = 0; r.head <= last; at ^= 1) {
        cp_async_wait<0>();
        __syncthreads();
        const Round next = round_next<N>(a, r, b, last, s0, s1);
        if (next.head <= last) round_load<D, N>(stage + (at ^ 1) * STAGE, a, next, b);
        const real *q = stage + at * STAGE, *g = q + N * D;
        const float *lse_2 = reinterpret_cast<const float *>(g + N * D), *delta = lse_2 + N;
        const int *first = reinterpret_cast<const int *>(delta + N);
        float p[N / 8][4], dp[N / 8][4]; // rows: keys; columns: queries
        rows_dot<D>(p, k, row, q);
        rows_dot<D>(dp, v, row, g);
        const bool hides = a.first || r.i0 < s1; // else every query stands behind every key
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int i = j * 8 + lane_id() % 4 * 2 + e % 2, key = s0 + row + lane_id() / 4 + e / 2 * 8;
                const bool seen = !hides || (key <= r.i0 + i && key >= first[i]);
                p[j][e] = seen ? exp2f(fmaf(p[j][e], a.scale_2, -lse_2[i])) : 0;
                dp[j][e] = p[j][e] * (dp[j][e] - delta[i]);
            }
        rows_mix<D>(dv, p, g, col0);
        rows_mix<D>(dk, dp, q, col0);
        r = next;
    }
    cp_async_wait<0>();
    __syncthreads();
    rows_put<OUT>(k, dk, row, a.scale, a.scale);
    rows_put<OUT>(v, dv, row, 1, 1);
    __syncthreads();
    tile_store<ROWS, OUT, TEAM>(a.dk + k_at + col0, a.s.ldk, k, n, a.s.HS - col0);
    tile_store<ROWS, OUT, TEAM>(a.dv + v_at + col0, a.s.ldv, v, n, a.s.HS - col0);
}

// ---- the ops ---------------------------------------------------------------------------------------------------------
static AttnArgs args_of(AttnShape s) {
    CHECK_USAGE(s.HS > 0 && s.HS % 2 == 0 && s.HS <= HEAD_MAX, "head size %d: must be even and at most %d", s.HS, (int)HEAD_MAX);
    CHECK_USAGE(s.NKV > 0 && s.NH % s.NKV == 0, "%d query heads do not divide among %d key/value heads", s.NH, s.NKV);
    CHECK_USAGE(s.Tq <= s.Tk, "attention of %d queries over only %d keys", s.Tq, s.Tk);
    AttnArgs a = {};
    a.s = s;
    a.group = s.NH / s.NKV;
    a.parts = s.HS > 128 ? 2 : 1;
    a.k_seq = s.kv_seq ? s.kv_seq : SIZE(s.Tk, s.ldk);
    a.v_seq = s.kv_seq ? s.kv_seq : SIZE(s.Tk, s.ldv);
    a.scale = (float)(1 / sqrt((double)s.HS));
    a.scale_2 = (float)(1.4426950408889634074 / sqrt((double)s.HS));
    return a;
}

// heads: of one sequence; reals: of shared memory
typedef void AttnKernel(AttnArgs a);
template <int D> static void attention_launch(Dev *d, AttnKernel *kernel, AttnArgs a, int heads, size_t reals) {
    a.blocks = (int)ceil_div(a.s.Tq, Sizes<D>::ROWS);
    const int64_t grid = (int64_t)a.blocks * a.s.B * heads * a.parts;
    CHECK_USAGE(grid < INT32_MAX, "attention over %d sequences of %d with %d heads is too much for one launch", a.s.B, a.s.Tq, heads);
    CUDA_CHECK(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(reals * sizeof(real))));
    LAUNCH(kernel, (unsigned)grid, Sizes<D>::THREADS, reals * sizeof(real), d->stream, a);
}

template <int D> static void forward(Dev *d, const AttnArgs &a) {
    typedef Sizes<D> S;
    attention_launch<D>(d, attention_kernel<D>, a, a.s.NH, S::ROWS * D + 2 * S::FWD_STAGE);
}
template <int D> static void backward(Dev *d, const AttnArgs &a) {
    typedef Sizes<D> S;
    attention_launch<D>(d, attention_dkv_kernel<D>, a, a.s.NKV, 2 * S::ROWS * D + 2 * S::DKV_STAGE);
    attention_launch<D>(d, attention_dq_kernel<D>, a, a.s.NH, 2 * S::ROWS * D + 2 * S::DQ_STAGE);
}
#define BY_HEAD_SIZE(f, d, a) ((a).s.HS <= 32 ? f<32>(d, a) : (a).s.HS <= 64 ? f<64>(d, a) : (a).s.HS <= 128 ? f<128>(d, a) : f<256>(d, a))

extern "C" void dev_attention(Dev *d, real *o, wide *lse, const real *q, const real *k, const real *v, const int *first, AttnShape s) {
    AttnArgs a = args_of(s);
    a.o = o, a.lse = lse, a.q = q, a.k = k, a.v = v, a.first = first;
    BY_HEAD_SIZE(forward, d, a);
}

extern "C" void dev_attention_bwd(Dev *d, real *dq, real *dk, real *dv, const real *dout, const real *o, const wide *lse, const real *q,
                                  const real *k, const real *v, const int *first, AttnShape s) {
    CHECK_USAGE(s.Tq == s.Tk, "attention's backward pass needs as many queries as keys, not %d and %d", s.Tq, s.Tk);
    const AttnArgs all = args_of(s);
    const size_t rows = SIZE(s.NH, s.Tq), fit_seqs = rows ? WORK_BYTES / (rows * sizeof(wide)) : 1;
    const int seqs = fit_seqs < (size_t)s.B ? (int)fit_seqs : s.B; // whose deltas the scratch holds
    CHECK_USAGE(seqs || !s.B, "sequences of %d with %d heads need %zu bytes of scratch, %d are there (hint: a smaller --seq)", s.Tq,
                s.NH, rows * sizeof(wide), (int)WORK_BYTES);
    for (int b = 0; b < s.B && rows; b += seqs) {
        AttnArgs a = all;
        a.s.B = s.B - b < seqs ? s.B - b : seqs;
        const size_t token = (size_t)b * s.Tq, at = token * s.NH * s.HS, q_at = token * s.ldq, k_at = b * a.k_seq, v_at = b * a.v_seq;
        wide *delta = (wide *)dev_work(d, SIZE(a.s.B, s.NH, s.Tq) * sizeof(wide));
        a.delta = delta;
        a.dq = dq + q_at, a.dk = dk + k_at, a.dv = dv + v_at, a.dout = dout + at, a.o = (real *)o + at;
        a.lse = (wide *)lse + b * rows, a.q = q + q_at, a.k = k + k_at, a.v = v + v_at, a.first = first ? first + token : first;
        LAUNCH(attention_delta_kernel, ceil_div(SIZE(a.s.B, s.Tq, s.NH), THREADS / WARP), THREADS, 0, d->stream, delta, a);
        BY_HEAD_SIZE(backward, d, a);
    }
}
