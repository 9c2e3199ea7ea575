// Embedding, normalisation, SwiGLU and the movement of rows, on the CPU.
#include "kernels/cpu/dev.h"
#include "kernels/cpu/vmath.h"
#include <string.h>

enum { LANES = 16, LINE = 64 / sizeof(real) }; // a sum's lanes (element i in lane i % LANES); elements of a cache line

// Columns [*from, *to) of thread `id` of `n`: whole cache lines. Each column's sum runs over all rows in order, on one
// thread, so that the split shows in no bit.
static void columns(int *from, int *to, int C, int id, int n) {
    int lines = (C + LINE - 1) / LINE;
    *from = (int)((int64_t)lines * id / n) * LINE;
    *to = (int)((int64_t)lines * (id + 1) / n) * LINE;
    if (*from > C) *from = C;
    if (*to > C) *to = C;
}

DEV_CLONES static void row_add(wide *restrict y, const real *restrict x, int n) {
    for (int i = 0; i < n; i++) y[i] += x[i];
}

// ---- embedding -----------------------------------------------------------------------------------------------------
void dev_embed(Dev *d, real *y, const real *w, const int *tok, int BT, int C) {
    dev_enter(d);
    size_t work = SIZE(BT, C);
#pragma omp parallel for num_threads(d->threads) if (work > DEV_PARALLEL_MIN) schedule(static)
    for (int t = 0; t < BT; t++) memcpy(y + (size_t)t * C, w + (size_t)tok[t] * C, (size_t)C * sizeof(real));
    dev_leave(d);
}

void dev_embed_bwd(Dev *d, wide *dw, const real *dy, const int *tok, int BT, int C) {
    dev_enter(d);
    size_t work = SIZE(BT, C);
#pragma omp parallel num_threads(d->threads) if (work > DEV_PARALLEL_MIN)
    {
        int c0, c1;
        columns(&c0, &c1, C, omp_get_thread_num(), omp_get_num_threads());
        for (int t = 0; t < BT; t++) row_add(dw + (size_t)tok[t] * C + c0, dy + (size_t)t * C + c0, c1 - c0);
    }
    dev_leave(d);
}

// ---- RMS norm ------------------------------------------------------------------------------------------------------
DEV_CLONES static wide row_rmsnorm(real *restrict y, const real *restrict x, const real *restrict w, int C, wide eps) {
    wide lane[LANES] = {0}, s = 0;
    int c = 0;
    for (; c + LANES <= C; c += LANES)
        for (int j = 0; j < LANES; j++) lane[j] += x[c + j] * x[c + j];
    for (; c < C; c++) s += x[c] * x[c];
    for (int j = 0; j < LANES; j++) s += lane[j];
    wide rstd = 1 / vsqrt(s / C + eps);
    for (c = 0; c < C; c++) y[c] = x[c] * rstd * w[c];
    return rstd;
}

void dev_rmsnorm(Dev *d, real *y, wide *rstd, const real *x, const real *w, int M, int C, wide eps) {
    dev_enter(d);
    size_t work = SIZE(M, C);
#pragma omp parallel for num_threads(d->threads) if (work > DEV_PARALLEL_MIN) schedule(static)
    for (int m = 0; m < M; m++) rstd[m] = row_rmsnorm(y + (size_t)m * C, x + (size_t)m * C, w, C, eps);
    dev_leave(d);
}

// dx may be add
DEV_CLONES static void row_rmsnorm_bwd(real *dx, const real *add, const real *restrict dy, const real *restrict x,
                                       const real *restrict w, wide rstd, int C) {
    wide lane[LANES] = {0}, s = 0;
    int c = 0;
    for (; c + LANES <= C; c += LANES)
        for (int j = 0; j < LANES; j++) lane[j] += dy[c + j] * w[c + j] * x[c + j];
    for (; c < C; c++) s += dy[c] * w[c] * x[c];
    for (int j = 0; j < LANES; j++) s += lane[j];
    wide b = s / C * rstd * rstd * rstd; // mean(dy w xn) rstd = (sum dy w x / C) rstd^2, and xn brings another rstd
    if (add)
        for (c = 0; c < C; c++) dx[c] = add[c] + (dy[c] * w[c] * rstd - x[c] * b);
    else
        for (c = 0; c < C; c++) dx[c] = dy[c] * w[c] * rstd - x[c] * b;
}

DEV_CLONES static void row_add_product(wide *restrict dw, const real *restrict dy, const real *restrict x, wide rstd, int n) {
    for (int i = 0; i < n; i++) dw[i] += dy[i] * (x[i] * rstd);
}

// By blocks of rows small enough to stay in the cache from dx to dw. Threads share out a block's rows for dx and its
// columns for dw; neither writes what the other reads.
void dev_rmsnorm_bwd(Dev *d, real *dx, wide *dw, const real *add, const real *dy, const real *x, const real *w, const wide *rstd,
                     int M, int C) {
    dev_enter(d);
    size_t work = SIZE(M, C);
    int block = 1 + (1 << 15) / (C > 0 ? C : 1);
#pragma omp parallel num_threads(d->threads) if (work > DEV_PARALLEL_MIN)
    {
        int id = omp_get_thread_num(), n = omp_get_num_threads(), c0, c1;
        columns(&c0, &c1, C, id, n);
        for (int64_t m0 = 0; m0 < M; m0 += block) {
            int64_t rows = M - m0 < block ? M - m0 : block;
            for (int64_t m = m0 + rows * id / n; m < m0 + rows * (id + 1) / n; m++)
                row_rmsnorm_bwd(dx + m * C, add ? add + m * C : NULL, dy + m * C, x + m * C, w, rstd[m], C);
            for (int64_t m = m0; m < m0 + rows; m++) row_add_product(dw + c0, dy + m * C + c0, x + m * C + c0, rstd[m], c1 - c0);
        }
    }
    dev_leave(d);
}

// ---- SwiGLU --------------------------------------------------------------------------------------------------------
DEV_CLONES static void row_swiglu(real *restrict h, const real *restrict g, const real *restrict u, wide rw, int F) {
    for (int f = 0; f < F; f++) h[f] = rw * (g[f] * vsigmoid(g[f])) * u[f];
}

void dev_swiglu(Dev *d, real *h, const real *gu, const wide *rw, const int *n_rows, int M, int F) {
    dev_enter(d);
    int rows = dev_rows(n_rows, M);
    size_t work = SIZE(rows, F);
#pragma omp parallel for num_threads(d->threads) if (work > DEV_PARALLEL_MIN / 8) schedule(static)
    for (int m = 0; m < rows; m++) {
        const real *g = gu + (size_t)m * 2 * F;
        row_swiglu(h + (size_t)m * F, g, g + F, rw ? rw[m] : 1, F);
    }
    dev_leave(d);
}

// Returns sum_f dh silu(g) u. dg, du either are g, u or lie apart: no element depends on another.
DEV_CLONES static wide row_swiglu_bwd(real *dg, real *du, real *h, const real *dh, const real *g, const real *u, wide rw, int F) {
    enum { PIECE = 128 };
    wide piece[PIECE], sum = 0;
    for (int f0 = 0; f0 < F; f0 += PIECE) {
        int n = F - f0 < PIECE ? F - f0 : PIECE;
        DEV_APART
        for (int i = 0; i < n; i++) {
            int f = f0 + i;
            wide gf = g[f], uf = u[f], di = dh[f], s = vsigmoid(gf), silu = gf * s;
            piece[i] = di * silu * uf;
            di *= rw;
            h[f] = rw * silu * uf;
            dg[f] = di * uf * (s + silu * (1 - s));
            du[f] = di * silu;
        }
        sum += vsum(piece, n);
    }
    return sum;
}

void dev_swiglu_bwd(Dev *d, real *dgu, real *h, wide *drw, const real *dh, const real *gu, const wide *rw, const int *n_rows,
                    int M, int F) {
    dev_enter(d);
    int rows = dev_rows(n_rows, M);
    size_t work = SIZE(rows, F);
#pragma omp parallel for num_threads(d->threads) if (work > DEV_PARALLEL_MIN / 8) schedule(static)
    for (int m = 0; m < rows; m++) {
        const real *g = gu + (size_t)m * 2 * F;
        real *dg = dgu + (size_t)m * 2 * F;
        wide s = row_swiglu_bwd(dg, dg + F, h + (size_t)m * F, dh + (size_t)m * F, g, g + F, rw ? rw[m] : 1, F);
        if (drw) drw[m] = s;
    }
    dev_leave(d);
}

// ---- rows between ranks --------------------------------------------------------------------------------------------
static int row_there(const RowMap *m, int t) { return !m->n || t % m->room < m->n[t / m->room]; }

void dev_scatter_rows(Dev *d, real *const *dst, wide *const *wdst, const real *x, const wide *w, RowMap m, int C) {
    dev_enter(d);
    size_t work = SIZE(m.BT, m.K, C);
    const int *wrow = m.wrow ? m.wrow : m.row;
#pragma omp parallel for num_threads(d->threads) if (work > DEV_PARALLEL_MIN) schedule(static)
    for (int t = 0; t < m.BT; t++) {
        if (!row_there(&m, t)) continue;
        for (int k = 0; k < m.K; k++) {
            size_t p = (size_t)t * m.ld + k;
            int peer = m.peer ? m.peer[p] : 0;
            if (m.row[p] >= 0) memcpy(dst[peer] + (size_t)m.row[p] * C, x + (size_t)t * C, (size_t)C * sizeof(real));
            if (w && wrow[p] >= 0) wdst[peer][wrow[p]] = w[(size_t)t * m.K + k];
        }
    }
    dev_leave(d);
}

static void row_prefetch(const real *x, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)x + i);
}

// The pairs of one token, which begin at p
static void token_gather(real *y, wide *dw, const real *add, const real *const *src, const wide *const *wsrc, const RowMap *m, size_t p,
                         int C) {
    size_t bytes = (size_t)C * sizeof(real);
    const int *row = m->row + p, *wrow = (m->wrow ? m->wrow : m->row) + p;
    int begun = add != NULL; // y holds the sum so far
    if (add && add != y) memcpy(y, add, bytes);
    for (int k = 0; k < m->K; k++) {
        int peer = m->peer ? m->peer[p + k] : 0;
        if (dw) dw[k] = wrow[k] < 0 ? 0 : wsrc[peer][wrow[k]];
        if (row[k] < 0) continue;
        const real *x = src[peer] + (size_t)row[k] * C;
        if (k + 1 < m->K && row[k + 1] >= 0) // rows lie scattered: nothing but their list foretells the next one
            row_prefetch(src[m->peer ? m->peer[p + k + 1] : 0] + (size_t)row[k + 1] * C, bytes);
        if (begun) row_add(y, x, C);
        else memcpy(y, x, bytes);
        begun = 1;
    }
    if (!begun) memset(y, 0, bytes);
}

void dev_gather_rows(Dev *d, real *y, wide *dw, const real *add, const real *const *src, const wide *const *wsrc, RowMap m, int C) {
    dev_enter(d);
    size_t work = SIZE(m.BT, m.K, C);
#pragma omp parallel for num_threads(d->threads) if (work > DEV_PARALLEL_MIN) schedule(static)
    for (int t = 0; t < m.BT; t++) {
        if (!row_there(&m, t)) continue;
        size_t at = (size_t)t * C;
        token_gather(y + at, dw ? dw + (size_t)t * m.K : NULL, add ? add + at : NULL, src, wsrc, &m, (size_t)t * m.ld, C);
    }
    dev_leave(d);
}

void dev_add(Dev *d, wide *x, const wide *y, size_t n) {
    enum { CHUNK = 1 << 14 };
    dev_enter(d);
#pragma omp parallel for num_threads(d->threads) if (n > DEV_PARALLEL_MIN) schedule(static)
    for (size_t i = 0; i < n; i += CHUNK) row_add(x + i, y + i, (int)(n - i < CHUNK ? n - i : CHUNK));
    dev_leave(d);
}
