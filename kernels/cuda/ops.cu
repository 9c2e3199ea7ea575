// Embedding, normalisation, SwiGLU and the movement of rows, on the GPU: all bound by memory. A warp takes a row, 16 bytes a
// lane at a time where rows allow it (V = VR), single elements elsewhere (V = 1).
#include "kernels/cuda/dev.h"

constexpr int WARPS = THREADS / WARP;

// This warp's row, of all the warps' of the grid; the step to its next one
#define WARP_ROWS(m, M) \
    for (int m = (int)(blockIdx.x * WARPS + threadIdx.x / WARP); m < (M); m += (int)gridDim.x * WARPS)
#define LANE ((int)threadIdx.x % WARP)

// kernel<V>: V by what the rows' length and addresses allow
#define LAUNCH_VEC(kernel, vec, grid, stream, ...)                              \
    do {                                                                        \
        if (vec) LAUNCH(kernel<VR>, grid, THREADS, 0, stream, __VA_ARGS__);     \
        else LAUNCH(kernel<1>, grid, THREADS, 0, stream, __VA_ARGS__);          \
    } while (0)

static __device__ __forceinline__ int valid_rows(const int *n_rows, int M) {
    int n = n_rows ? *n_rows : M;
    if (n < 0 || n > M) __trap(); // the plan's fault
    return n;
}

// ---- embedding -----------------------------------------------------------------------------------------------------
template <int V> static __global__ void embed_kernel(real *y, const real *w, const int *tok, int BT, int C) {
    WARP_ROWS(t, BT) {
        const real *from = w + (size_t)tok[t] * C;
        for (int c = LANE * V; c < C; c += WARP * V) store<V>(y + (size_t)t * C + c, load<V>(from + c));
    }
}

void dev_embed(Dev *d, real *y, const real *w, const int *tok, int BT, int C) {
    LAUNCH_VEC(embed_kernel, C % VR == 0 && aligned(y, w), grid_for(d, BT, WARPS), d->stream, y, w, tok, BT, C);
}

// The next place of the same token, -1 = none; and whether there is one before
static __global__ void embed_chain_kernel(int *next, int *later, const int *tok, int BT) {
    for (int t = (int)(blockIdx.x * blockDim.x + threadIdx.x); t < BT; t += (int)(gridDim.x * blockDim.x)) {
        int s = t + 1, own = tok[t];
        while (s < BT && tok[s] != own) s++;
        next[t] = s < BT ? s : -1;
        if (s < BT) later[s] = 1;
    }
}

// A token's first place gathers all of its places, in order.
template <int V> static __global__ void embed_bwd_kernel(wide *dw, const real *dy, const int *tok, const int *next, const int *later, int BT,
                                                         int C) {
    WARP_ROWS(t, BT) {
        if (later[t]) continue;
        wide *to = dw + (size_t)tok[t] * C;
        for (int c = LANE * V; c < C; c += WARP * V) {
            wide sum[V];
            for (int i = 0; i < V; i++) sum[i] = to[c + i];
            for (int s = t; s >= 0; s = next[s]) {
                Vec<real, V> x = load<V>(dy + (size_t)s * C + c);
                for (int i = 0; i < V; i++) sum[i] += up(x.v[i]);
            }
            for (int i = 0; i < V; i++) to[c + i] = sum[i];
        }
    }
}

void dev_embed_bwd(Dev *d, wide *dw, const real *dy, const int *tok, int BT, int C) {
    int *next = (int *)dev_work(d, SIZE(2, BT, sizeof(int))), *later = next + BT;
    dev_zero(d, later, SIZE(BT, sizeof(int)));
    LAUNCH(embed_chain_kernel, grid_for(d, BT, THREADS), THREADS, 0, d->stream, next, later, tok, BT);
    LAUNCH_VEC(embed_bwd_kernel, C % VR == 0 && aligned(dy), grid_for(d, BT, WARPS), d->stream, dw, dy, tok, next, later, BT, C);
}

// ---- RMS norm ------------------------------------------------------------------------------------------------------
template <int V> static __global__ void rmsnorm_kernel(real *y, wide *rstd, const real *x, const real *w, int M, int C, wide eps) {
    WARP_ROWS(m, M) {
        const real *row = x + (size_t)m * C;
        wide sum = 0;
        for (int c = LANE * V; c < C; c += WARP * V) {
            Vec<real, V> a = load<V>(row + c);
            for (int i = 0; i < V; i++) sum += up(a.v[i]) * up(a.v[i]);
        }
        wide r = 1 / sqrtf(warp_sum(sum) / C + eps);
        for (int c = LANE * V; c < C; c += WARP * V) {
            Vec<real, V> a = load<V>(row + c), b = load<V>(w + c);
            for (int i = 0; i < V; i++) a.v[i] = down(up(a.v[i]) * r * up(b.v[i]));
            store<V>(y + (size_t)m * C + c, a);
        }
        if (LANE == 0) rstd[m] = r;
    }
}

void dev_rmsnorm(Dev *d, real *y, wide *rstd, const real *x, const real *w, int M, int C, wide eps) {
    LAUNCH_VEC(rmsnorm_kernel, C % VR == 0 && aligned(y, x, w), grid_for(d, M, WARPS), d->stream, y, rstd, x, w, M, C, eps);
}

// dx may be add
template <int V> static __global__ void rmsnorm_dx_kernel(real *dx, const real *add, const real *dy, const real *x, const real *w,
                                                          const wide *rstd, int M, int C) {
    WARP_ROWS(m, M) {
        size_t at = (size_t)m * C;
        wide sum = 0, r = rstd[m];
        for (int c = LANE * V; c < C; c += WARP * V) {
            Vec<real, V> g = load<V>(dy + at + c), a = load<V>(x + at + c), b = load<V>(w + c);
            for (int i = 0; i < V; i++) sum += up(g.v[i]) * up(b.v[i]) * up(a.v[i]);
        }
        wide mean = warp_sum(sum) / C * r * r * r; // mean(dy w xn) rstd = (sum dy w x / C) rstd^2, and xn brings another rstd
        for (int c = LANE * V; c < C; c += WARP * V) {
            Vec<real, V> g = load<V>(dy + at + c), a = load<V>(x + at + c), b = load<V>(w + c), o;
            wide old[V] = {};
            if (add) {
                o = load<V>(add + at + c);
                for (int i = 0; i < V; i++) old[i] = up(o.v[i]);
            }
            for (int i = 0; i < V; i++) o.v[i] = down(old[i] + (up(g.v[i]) * up(b.v[i]) * r - up(a.v[i]) * mean));
            store<V>(dx + at + c, o);
        }
    }
}

// part[p,c]: the sum over rows [p*rows, (p+1)*rows)
static __global__ void rmsnorm_part_kernel(wide *part, const real *dy, const real *x, const wide *rstd, int M, int C, int rows) {
    int c = (int)(blockIdx.x * blockDim.x + threadIdx.x), first = (int)blockIdx.y * rows, last = first + rows < M ? first + rows : M;
    if (c >= C) return;
    wide sum = 0;
    for (int m = first; m < last; m++) sum += up(dy[(size_t)m * C + c]) * (up(x[(size_t)m * C + c]) * rstd[m]);
    part[(size_t)blockIdx.y * C + c] = sum;
}

// x[c] += sum_p part[p,c], p ascending
static __global__ void add_parts_kernel(wide *x, const wide *part, int parts, int C) {
    int c = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (c >= C) return;
    wide sum = x[c];
    for (int p = 0; p < parts; p++) sum += part[(size_t)p * C + c];
    x[c] = sum;
}

void dev_rmsnorm_bwd(Dev *d, real *dx, wide *dw, const real *add, const real *dy, const real *x, const real *w, const wide *rstd,
                     int M, int C) {
    int most = C > 0 && WORK_BYTES / ((int)sizeof(wide) * C) < 256 ? WORK_BYTES / ((int)sizeof(wide) * C) : 256; // parts
    int rows = M > 32 * most ? (int)ceil_div(M, most) : 32, parts = (int)ceil_div(M, rows); // their borders depend on the shape alone
    wide *part = (wide *)dev_work(d, SIZE(parts, C, sizeof(wide)));
    unsigned columns = (unsigned)ceil_div(C, THREADS);
    LAUNCH(rmsnorm_part_kernel, dim3(columns, (unsigned)parts), THREADS, 0, d->stream, part, dy, x, rstd, M, C, rows);
    LAUNCH(add_parts_kernel, columns, THREADS, 0, d->stream, dw, part, parts, C);
    LAUNCH_VEC(rmsnorm_dx_kernel, C % VR == 0 && aligned(dx, dy, x, w) && aligned(add), grid_for(d, M, WARPS), d->stream, dx, add, dy, x, w, rstd, M,
               C);
}

// ---- SwiGLU --------------------------------------------------------------------------------------------------------
static __device__ __forceinline__ wide sigmoid(wide x) { return 1 / (1 + expf(-x)); }

template <int V> static __global__ void swiglu_kernel(real *h, const real *gu, const wide *rw, const int *n_rows, int M, int F) {
    int rows = valid_rows(n_rows, M);
    WARP_ROWS(m, rows) {
        const real *g = gu + (size_t)m * 2 * F, *u = g + F;
        wide weight = rw ? rw[m] : 1;
        for (int f = LANE * V; f < F; f += WARP * V) {
            Vec<real, V> a = load<V>(g + f), b = load<V>(u + f);
            for (int i = 0; i < V; i++) {
                wide x = up(a.v[i]);
                a.v[i] = down(weight * (x * sigmoid(x)) * up(b.v[i]));
            }
            store<V>(h + (size_t)m * F + f, a);
        }
    }
}

void dev_swiglu(Dev *d, real *h, const real *gu, const wide *rw, const int *n_rows, int M, int F) {
    LAUNCH_VEC(swiglu_kernel, F % VR == 0 && aligned(h, gu), grid_for(d, M, WARPS), d->stream, h, gu, rw, n_rows, M, F);
}

// dgu may be gu: a lane reads what it overwrites, and nothing else does
template <int V> static __global__ void swiglu_bwd_kernel(real *dgu, real *h, wide *drw, const real *dh, const real *gu, const wide *rw,
                                                          const int *n_rows, int M, int F) {
    int rows = valid_rows(n_rows, M);
    WARP_ROWS(m, rows) {
        size_t at = (size_t)m * 2 * F;
        wide weight = rw ? rw[m] : 1, sum = 0;
        for (int f = LANE * V; f < F; f += WARP * V) {
            Vec<real, V> a = load<V>(gu + at + f), b = load<V>(gu + at + F + f), g = load<V>(dh + (size_t)m * F + f), o;
            for (int i = 0; i < V; i++) {
                wide x = up(a.v[i]), u = up(b.v[i]), di = up(g.v[i]), s = sigmoid(x), silu = x * s;
                sum += di * silu * u;
                di *= weight;
                o.v[i] = down(weight * silu * u);
                a.v[i] = down(di * u * (s + silu * (1 - s)));
                b.v[i] = down(di * silu);
            }
            store<V>(h + (size_t)m * F + f, o);
            store<V>(dgu + at + f, a);
            store<V>(dgu + at + F + f, b);
        }
        sum = warp_sum(sum);
        if (drw && LANE == 0) drw[m] = sum;
    }
}

void dev_swiglu_bwd(Dev *d, real *dgu, real *h, wide *drw, const real *dh, const real *gu, const wide *rw, const int *n_rows,
                    int M, int F) {
    LAUNCH_VEC(swiglu_bwd_kernel, F % VR == 0 && aligned(dgu, h, dh, gu), grid_for(d, M, WARPS), d->stream, dgu, h, drw, dh, gu, rw, n_rows, M,
               F);
}

// ---- rows between ranks --------------------------------------------------------------------------------------------
static __device__ __forceinline__ int row_there(const RowMap &m, int t) { return !m.n || t % m.room < m.n[t / m.room]; }

// A token's row is read once and written to all of its places, many of them in peers' memory.
template <int V> static __global__ void scatter_kernel(real *const *dst, wide *const *wdst, const real *x, const wide *w, RowMap m, int C) {
    const int *wrow = m.wrow ? m.wrow : m.row;
    WARP_ROWS(t, m.BT) {
        if (!row_there(m, t)) continue;
        size_t p0 = (size_t)t * m.ld;
        for (int c = LANE * V; c < C; c += WARP * V) {
            Vec<real, V> a = load<V>(x + (size_t)t * C + c);
            for (int k = 0; k < m.K; k++)
                if (m.row[p0 + k] >= 0) store<V>(dst[m.peer ? m.peer[p0 + k] : 0] + (size_t)m.row[p0 + k] * C + c, a);
        }
        for (int k = LANE; w && k < m.K; k += WARP)
            if (wrow[p0 + k] >= 0) wdst[m.peer ? m.peer[p0 + k] : 0][wrow[p0 + k]] = w[(size_t)t * m.K + k];
    }
}

// The buffers behind dst and src are aligned as whole allocations are; so are their rows where C is a multiple of VR.
void dev_scatter_rows(Dev *d, real *const *dst, wide *const *wdst, const real *x, const wide *w, RowMap m, int C) {
    LAUNCH_VEC(scatter_kernel, C % VR == 0 && aligned(x), grid_for(d, m.BT, WARPS), d->stream, dst, wdst, x, w, m, C);
}

// y may be add
template <int V> static __global__ void gather_kernel(real *y, wide *dw, const real *add, const real *const *src, const wide *const *wsrc,
                                                      RowMap m, int C) {
    const int *wrow = m.wrow ? m.wrow : m.row;
    WARP_ROWS(t, m.BT) {
        if (!row_there(m, t)) continue;
        size_t p0 = (size_t)t * m.ld, at = (size_t)t * C;
        for (int c = LANE * V; c < C; c += WARP * V) {
            wide sum[V] = {};
            if (add) {
                Vec<real, V> a = load<V>(add + at + c);
                for (int i = 0; i < V; i++) sum[i] = up(a.v[i]);
            }
            for (int k = 0; k < m.K; k++) {
                if (m.row[p0 + k] < 0) continue;
                Vec<real, V> a = load<V>(src[m.peer ? m.peer[p0 + k] : 0] + (size_t)m.row[p0 + k] * C + c);
                for (int i = 0; i < V; i++) sum[i] += up(a.v[i]);
            }
            Vec<real, V> o;
            for (int i = 0; i < V; i++) o.v[i] = down(sum[i]);
            store<V>(y + at + c, o);
        }
        for (int k = LANE; dw && k < m.K; k += WARP)
            dw[(size_t)t * m.K + k] = wrow[p0 + k] < 0 ? 0 : wsrc[m.peer ? m.peer[p0 + k] : 0][wrow[p0 + k]];
    }
}

void dev_gather_rows(Dev *d, real *y, wide *dw, const real *add, const real *const *src, const wide *const *wsrc, RowMap m, int C) {
    LAUNCH_VEC(gather_kernel, C % VR == 0 && aligned(y, add), grid_for(d, m.BT, WARPS), d->stream, y, dw, add, src, wsrc, m, C);
}

static __global__ void add_kernel(wide *x, const wide *y, size_t n) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) x[i] += y[i];
}

void dev_add(Dev *d, wide *x, const wide *y, size_t n) { LAUNCH(add_kernel, grid_for(d, n, THREADS), THREADS, 0, d->stream, x, y, n); }
