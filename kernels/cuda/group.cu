// Grouped products whose row counts only the device knows, for sm_80 and newer: a persistent grid walks over the tiles that
// exist, operands come by cp.async in a ring of stages, fragments by ldmatrix, products by mma. Every element is one chain
// over the sum's index, in steps of 16, whatever the group, the tile or the row's place in it.
#include "kernels/cuda/fragment.h"
#include "kernels/cuda/group.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// A block's tile of the result, a step of the sum, a warp's share; fp32 has a stage less, so that any sm_8x holds a block
enum { TILE_M = 128, TILE_N = 128, STEP = 32, WARP_M = 64, WARP_N = 64, GROUP_THREADS = 128, RING = sizeof(real) == 2 ? 4 : 3 };
enum { STAGE_A = TILE_M * STEP, STAGE_REALS = STAGE_A + TILE_N * STEP, RING_BYTES = RING * STAGE_REALS * (int)sizeof(real) };
static_assert(TILE_M * TILE_N <= RING * STAGE_REALS, "the finished tile fits the ring");

// The tile's operands
template <GroupForm FORM> static __device__ __forceinline__ const real *tile_a(const GroupArgs &g, const Tile &s) {
    return FORM == GROUP_TN ? g.a + (size_t)s.first_row * g.out_rows + s.row0 : g.a + (size_t)(s.first_row + s.row0) * g.inner;
}
template <GroupForm FORM> static __device__ __forceinline__ const real *tile_b(const GroupArgs &g, const Tile &s) {
    if (FORM == GROUP_TN) return g.b + (size_t)s.first_row * g.cols + s.col0;
    return g.w[s.group] + (FORM == GROUP_NT ? (size_t)s.col0 * g.inner : (size_t)s.col0);
}

template <GroupForm FORM>
static __device__ __forceinline__ void stage_load(real *stage, const GroupArgs &g, const Tile &s, const real *a, const real *b, int k0) {
    const int left = s.sum - k0;
    if (FORM == GROUP_TN) tile_load<STEP, TILE_M, GROUP_THREADS>(stage, a + (size_t)k0 * g.out_rows, g.out_rows, left, s.rows);
    else tile_load<TILE_M, STEP, GROUP_THREADS>(stage, a + k0, g.inner, s.rows, left);
    if (FORM == GROUP_NT) tile_load<TILE_N, STEP, GROUP_THREADS>(stage + STAGE_A, b + k0, g.inner, s.cols, left);
    else tile_load<STEP, TILE_N, GROUP_THREADS>(stage + STAGE_A, b + (size_t)k0 * g.cols, g.cols, left, s.cols);
}

typedef float Sums[WARP_M / 16][WARP_N / 8][4];

template <GroupForm FORM> static __device__ __forceinline__ void stage_multiply(Sums &sum, const real *stage, int m, int n) {
#pragma unroll
    for (int k = 0; k < STEP; k += 16) {
        FragA a[WARP_M / 16];
        FragB b[WARP_N / 8];
#pragma unroll
        for (int i = 0; i < WARP_M / 16; i++) {
            if (FORM == GROUP_TN) frag_a_turned<TILE_M>(a[i], stage, m + i * 16, k);
            else frag_a<STEP>(a[i], stage, m + i * 16, k);
        }
#pragma unroll
        for (int j = 0; j < WARP_N / 8; j += 2) {
            if (FORM == GROUP_NT) frag_b<STEP>(b[j], b[j + 1], stage + STAGE_A, n + j * 8, k);
            else frag_b_turned<TILE_N>(b[j], b[j + 1], stage + STAGE_A, n + j * 8, k);
        }
#pragma unroll
        for (int i = 0; i < WARP_M / 16; i++)
#pragma unroll
            for (int j = 0; j < WARP_N / 8; j++) frag_mma(sum[i][j], a[i], b[j]);
    }
}

// The tile passes through shared memory, so that 16-byte stores cover whole lines.
static __device__ void store_rows(real *y, int ld, real *ring, const Sums &sum, const Tile &s, int m, int n) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < WARP_M / 16; i++)
#pragma unroll
        for (int j = 0; j < WARP_N / 8; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                real_store_pair(ring + tile_element<TILE_N>(m + i * 16 + h * 8 + g, n + j * 8 + t * 2), sum[i][j][h * 2],
                                sum[i][j][h * 2 + 1]);
    __syncthreads();
    tile_store<TILE_M, TILE_N, GROUP_THREADS>(y + (size_t)(s.first_row + s.row0) * ld + s.col0, ld, ring, s.rows, s.cols);
}

// Four lanes cover a sector of 32 bytes.
static __device__ void add_rows(wide *dw, int ld, const Sums &sum, const Tile &s, int m, int n) {
    dw += (size_t)s.row0 * ld + s.col0;
    const bool whole = ((uintptr_t)dw | ld * sizeof(wide)) % 8 == 0;
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < WARP_M / 16; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = m + i * 16 + h * 8 + g;
            if (r >= s.rows) continue;
#pragma unroll
            for (int j = 0; j < WARP_N / 8; j++) {
                const int c = n + j * 8 + t * 2;
                wide *to = dw + (size_t)r * ld + c;
                const float lo = sum[i][j][h * 2], hi = sum[i][j][h * 2 + 1];
                if (whole && c + 1 < s.cols) {
                    float2 x = *reinterpret_cast<const float2 *>(to);
                    x.x += lo, x.y += hi;
                    *reinterpret_cast<float2 *>(to) = x;
                } else {
                    if (c < s.cols) to[0] += lo;
                    if (c + 1 < s.cols) to[1] += hi;
                }
            }
        }
}

template <GroupForm FORM> static __global__ void __launch_bounds__(GROUP_THREADS, 2) group_kernel(GroupArgs g) {
    DYN_SHARED(real, ring);
    int *first = reinterpret_cast<int *>(ring + RING * STAGE_REALS); // (J+1)
    if (warp_id() == 0) group_tiles<FORM, TILE_M, TILE_N>(first, g);
    __syncthreads();
    const int m = warp_id() / 2 * WARP_M, n = warp_id() % 2 * WARP_N;
    for (int t = (int)blockIdx.x; t < first[g.J]; t += (int)gridDim.x) {
        const Tile s = tile_find<FORM, TILE_M, TILE_N>(g, first, t);
        const real *a = tile_a<FORM>(g, s), *b = tile_b<FORM>(g, s);
        const int steps = (s.sum + STEP - 1) / STEP;
        const bool busy = m < s.rows && n < s.cols; // this warp's share exists
        Sums sum;
#pragma unroll
        for (int i = 0; i < WARP_M / 16; i++)
#pragma unroll
            for (int j = 0; j < WARP_N / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[i][j][e] = 0;
        for (int k = 0; k < RING - 1; k++) {
            if (k < steps) stage_load<FORM>(ring + k * STAGE_REALS, g, s, a, b, k * STEP);
            cp_async_commit();
        }
        for (int k = 0; k < steps; k++) {
            cp_async_wait<RING - 2>();
            __syncthreads(); // stage k has landed for all, and stage k - 1 has been read by all
            const int next = k + RING - 1;
            if (next < steps) stage_load<FORM>(ring + next % RING * STAGE_REALS, g, s, a, b, next * STEP);
            cp_async_commit();
            if (busy) stage_multiply<FORM>(sum, ring + k % RING * STAGE_REALS, m, n);
        }
        cp_async_wait<0>();
        __syncthreads(); // the ring is free
        if (FORM == GROUP_TN) {
            if (busy) add_rows(g.dw[s.group], g.cols, sum, s, m, n);
        } else {
            store_rows(g.y, g.cols, ring, sum, s, m, n);
            __syncthreads();
        }
    }
}

template <GroupForm FORM> static void launch(Dev *d, const GroupArgs &g) {
    const size_t smem = RING_BYTES + (g.J + 1) * sizeof(int);
    const int64_t most = group_tiles_most(FORM, g, TILE_M, TILE_N), resident = 2 * (int64_t)d->sms;
    const size_t allowed = RING_BYTES + (GROUPS_MAX + 1) * sizeof(int);
    CUDA_CHECK(cudaFuncSetAttribute(group_kernel<FORM>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)allowed));
    LAUNCH(group_kernel<FORM>, (unsigned)(most < resident ? most : resident), GROUP_THREADS, smem, d->stream, g);
}

bool group_portable(Dev *d, GroupForm form, const GroupArgs &g) {
    if (form == GROUP_NT) launch<GROUP_NT>(d, g);
    else if (form == GROUP_NN) launch<GROUP_NN>(d, g);
    else launch<GROUP_TN>(d, g);
    return true;
}

static void group(Dev *d, GroupForm form, const GroupArgs &g) {
    CHECK_USAGE(g.J <= GROUPS_MAX, "%d groups (experts and replica slots of a rank) in one product, at most %d", g.J, GROUPS_MAX);
    if (!g.J || !g.M || !g.cols || (form == GROUP_TN && !g.out_rows)) return;
    if (!group_sm90(d, form, g)) group_portable(d, form, g);
}

extern "C" void dev_group_linear(Dev *d, real *y, const real *x, const real *const *w, const int *off, int J, int M, int N, int K) {
    GroupArgs g = {};
    g.y = y, g.a = x, g.w = w, g.off = off, g.J = J, g.M = M, g.cols = N, g.inner = K;
    group(d, GROUP_NT, g);
}

extern "C" void dev_group_linear_dx(Dev *d, real *dx, const real *dy, const real *const *w, const int *off, int J, int M, int N,
                                    int K) {
    GroupArgs g = {};
    g.y = dx, g.a = dy, g.w = w, g.off = off, g.J = J, g.M = M, g.cols = K, g.inner = N;
    group(d, GROUP_NN, g);
}

extern "C" void dev_group_linear_dw(Dev *d, wide *const *dw, const real *dy, const real *x, const int *off, int J, int M, int N,
                                    int K) {
    GroupArgs g = {};
    g.dw = dw, g.a = dy, g.b = x, g.off = off, g.J = J, g.M = M, g.out_rows = N, g.cols = K;
    group(d, GROUP_TN, g);
}

// ---- the choice --------------------------------------------------------------------------------------------------------------
// Small integers. Tiles of either kernel are cut in all directions; a group is empty, and rows are left behind the last.
enum { CHECK_J = 3, CHECK_M = 208, CHECK_K = 136, CHECK_N = 264, CHECK_S = 20 };

struct GroupCheck { // on the device, in one piece
    real x[CHECK_M * CHECK_K], dy[CHECK_M * CHECK_N], w[CHECK_J][CHECK_N * CHECK_K];
    const real *w_at[CHECK_J];
    wide *dw_at[2][CHECK_J];
    int off[CHECK_J + 1];
    struct Result {
        real y[CHECK_M * CHECK_N], dx[CHECK_M * CHECK_K];
        wide dw[CHECK_J][CHECK_N * CHECK_K];
    } result[2];
};

static void check_fill(GroupCheck *c, const GroupCheck *at) { // at: where it will lie
    uint32_t state = 1;
    auto draw = [&](real *x, size_t n) {
        for (size_t i = 0; i < n; i++) state = state * 1664525u + 1013904223u, x[i] = (real)(float)((int)(state >> 24) % 9 - 4);
    };
    draw(c->x, CHECK_M * CHECK_K), draw(c->dy, CHECK_M * CHECK_N), draw(c->w[0], CHECK_J * CHECK_N * CHECK_K);
    const int off[] = {0, 130, 130, 200};
    memcpy(c->off, off, sizeof off);
    memset(c->result, 0xFF, sizeof c->result); // NaN
    for (int j = 0; j < CHECK_J; j++) {
        c->w_at[j] = at->w[j];
        for (int i = 0; i < 2; i++) {
            memset(c->result[i].dw, 0, sizeof c->result[i].dw);
            c->dw_at[i][j] = (wide *)at->result[i].dw[j];
        }
    }
}

static bool check_run(Dev *d, GroupWay *way, GroupCheck *c, int i) {
    GroupArgs nt = {}, nn = {}, tn = {};
    nt.y = c->result[i].y, nt.a = c->x, nt.w = c->w_at, nt.cols = CHECK_N, nt.inner = CHECK_K;
    nn.y = c->result[i].dx, nn.a = c->dy, nn.w = c->w_at, nn.cols = CHECK_K, nn.inner = CHECK_N;
    tn.dw = c->dw_at[i], tn.a = c->dy, tn.b = c->x, tn.out_rows = CHECK_N, tn.cols = CHECK_K;
    bool all = true;
    for (GroupArgs *g : {&nt, &nn, &tn}) {
        g->off = c->off, g->J = CHECK_J, g->M = CHECK_M;
        all &= way(d, g == &nt ? GROUP_NT : g == &nn ? GROUP_NN : GROUP_TN, *g);
    }
    return all;
}

bool group_agrees(Dev *d, GroupWay *way) {
    GroupCheck *c, *host = (GroupCheck *)host_alloc(sizeof *host);
    cudaError_t code = cudaMalloc((void **)&c, sizeof *c);
    CHECK_DEVICE(code == cudaSuccess, "no memory for a check of %zu bytes on GPU %d: %s (hint: is another program on it?)", sizeof *c,
                 d->device, cudaGetErrorString(code));
    check_fill(host, c);
    dev_upload(d, c, host, sizeof *c);
    bool all = check_run(d, group_portable, c, 0);
    dev_wait(d);
    all &= check_run(d, way, c, 1);
    for (int ms = 0; (code = cudaStreamQuery(d->stream)) == cudaErrorNotReady && ms < 1000 * CHECK_S; ms++) usleep(1000);
    CHECK_DEVICE(code == cudaSuccess, "the check of the grouped products on GPU %d: %s (hint: MOE_GROUPED=portable leaves these kernels out)",
                 d->device, code == cudaErrorNotReady ? "it does not end" : cudaGetErrorString(code));
    dev_download(d, host, c, sizeof *c);
    all &= memcmp(&host->result[0], &host->result[1], sizeof host->result[0]) == 0;
    CUDA_CHECK(cudaFree(c));
    free(host);
    return all;
}

void group_choose(Dev *d) {
    const char *asked = getenv("MOE_GROUPED"), *chosen = "portable";
    CHECK_USAGE(!asked || !strcmp(asked, "sm90") || !strcmp(asked, "portable"),
                "MOE_GROUPED is \"%s\" in the environment, expected portable or sm90 (hint: without it the program chooses)", asked);
    d->hopper = d->arch == 90 && sizeof(real) == 2 && !(asked && !strcmp(asked, "portable"));
    if (d->hopper && !asked) {
        d->hopper = group_agrees(d, group_sm90);
        if (!d->hopper) chosen = "portable, as those of sm_90 gave something else";
    }
    const size_t at = strlen(d->name);
    snprintf(d->name + at, sizeof d->name - at, ", grouped products %s", d->hopper ? "of sm_90" : chosen);
}
