// The small ops against naive oracles, finite differences and themselves on other numbers of threads.
// Bounds count roundings: n * REAL_EPS * (sum of the terms' magnitudes), n from the longest chain of operations. A sum
// over n elements in 16 lanes has a chain of n/16 + 16.
#include "kernels/check.h"
#include "kernels/rng.h"
#include "tests/common/child.h"
#include "tests/common/lab.h"
#include "tests/ref/ops_ref.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#define RUN(body, table) lab_threads(body, table, sizeof(table) / sizeof((table)[0]))
#define H 1e-3 // step of the finite differences, for values of order 1

static double chain(int n) { return n / 16.0 + 20; } // roundings of a sum over n

// ---- embedding -------------------------------------------------------------------------------------------------------
static void embed(Lab *l, const int *dim) {
    int BT = dim[0], C = dim[1], V = dim[2];
    size_t n = SIZE(BT, C), nw = SIZE(V, C);
    double *w = lab_random(l, nw, -1, 1), *want = lab_zeros(l, n);
    int *tok = lab_ints(l, BT, V);
    for (size_t i = 0; i < n; i++) want[i] = w[tok[i / C] * C + i % C];
    real *y = lab_real(l, NULL, n);
    int *dev_tok = lab_int(l, tok, BT);
    dev_embed(l->d, y, lab_real(l, w, nw), dev_tok, BT, C);
    lab_equal("embed", lab_get(l, y, n), want, n);

    double *dy = lab_random(l, n, -1, 1), *dw = lab_random(l, nw, -1, 1), *bound = lab_zeros(l, nw);
    wide *dev_dw = lab_wide(l, dw, nw);
    dev_embed_bwd(l->d, dev_dw, lab_real(l, dy, n), dev_tok, BT, C);
    for (size_t i = 0; i < nw; i++) bound[i] = fabs(dw[i]);
    for (size_t i = 0; i < n; i++) {
        dw[tok[i / C] * C + i % C] += dy[i];
        bound[tok[i / C] * C + i % C] += fabs(dy[i]);
    }
    for (size_t i = 0; i < nw; i++) bound[i] *= REAL_EPS * (BT + 1);
    lab_close_to("embed dw", lab_get_wide(l, dev_dw, nw), dw, bound, nw);
}

static void test_embed(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{0, 5, 3},     {1, 1, 1},      {7, 3, 2},   {13, 16, 5},
                                         {65, 33, 257}, {301, 128, 31}, {40, 513, 3}};
    RUN(embed, dims);
}

// ---- RMS norm --------------------------------------------------------------------------------------------------------
typedef struct Norm {
    double *x, *w, *dy, *y, *rstd, eps;
    int M, C;
} Norm;

static double norm_loss(const void *ctx) {
    const Norm *n = ctx;
    ref_rmsnorm(n->y, n->rstd, n->x, n->w, n->M, n->C, n->eps);
    long double sum = 0;
    for (int i = 0; i < n->M * n->C; i++) sum += (long double)n->y[i] * n->dy[i];
    return (double)sum;
}

static Norm norm_make(Lab *l, const int *dim) {
    int M = dim[0], C = dim[1];
    size_t n = SIZE(M, C);
    return (Norm){.x = lab_random(l, n, -2, 2), .w = lab_random(l, C, -1, 2), .dy = lab_random(l, n, -1, 1), .y = lab_zeros(l, n),
                  .rstd = lab_zeros(l, M), .eps = (wide)1e-6, .M = M, .C = C};
}

static void rmsnorm(Lab *l, const int *dim) {
    Norm o = norm_make(l, dim);
    int M = o.M, C = o.C;
    size_t n = SIZE(M, C);
    if (dim[2])
        for (int c = 0; c < C; c++) o.x[c] = 0; // a row of zeros: eps alone
    ref_rmsnorm(o.y, o.rstd, o.x, o.w, M, C, o.eps);
    real *y = lab_real(l, NULL, n);
    wide *rstd = lab_wide(l, NULL, M);
    dev_rmsnorm(l->d, y, rstd, lab_real(l, o.x, n), lab_real(l, o.w, C), M, C, (wide)o.eps);
    double *by = lab_zeros(l, n), *br = lab_zeros(l, M);
    for (int m = 0; m < M; m++) br[m] = o.rstd[m] * REAL_EPS * chain(C);
    for (size_t i = 0; i < n; i++) by[i] = fabs(o.y[i]) * REAL_EPS * (chain(C) + 2) + lab_kept(o.y[i]);
    lab_close_to("rmsnorm rstd", lab_get_wide(l, rstd, M), o.rstd, br, M);
    lab_close_to("rmsnorm y", lab_get(l, y, n), o.y, by, n);
}

// dims: M, C, with add, in place; every `stride`-th element by finite differences, so that large shapes stay cheap
static void rmsnorm_bwd(Lab *l, const int *dim) {
    Norm o = norm_make(l, dim);
    int M = o.M, C = o.C;
    size_t n = SIZE(M, C), stride = n / 150 + 1;
    double *add = lab_random(l, n, -1, 1), *dw0 = lab_random(l, C, -1, 1);
    ref_rmsnorm(o.y, o.rstd, o.x, o.w, M, C, o.eps);
    real *dev_add = lab_real(l, add, n), *dx = dim[3] ? dev_add : lab_real(l, NULL, n);
    wide *dw = lab_wide(l, dw0, C);
    dev_rmsnorm_bwd(l->d, dx, dw, dim[2] ? dev_add : NULL, lab_real(l, o.dy, n), lab_real(l, o.x, n), lab_real(l, o.w, C),
                    lab_wide(l, o.rstd, M), M, C);
    double *got = lab_get(l, dx, n), *got_w = lab_get_wide(l, dw, C);
    for (size_t i = 0; i < n; i += stride) {
        Norm row = o; // the loss of one row: the others do not depend on it
        int m = (int)(i / C);
        row.x += m * C, row.dy += m * C, row.M = 1;
        double dot = 0, r = o.rstd[m], want = lab_slope(norm_loss, &row, &o.x[i], H / 4);
        for (int c = 0; c < C; c++) dot += fabs(row.dy[c] * o.w[c] * row.x[c]);
        ref_rmsnorm(o.y, o.rstd, o.x, o.w, M, C, o.eps);
        double size = fabs(o.dy[i] * o.w[i % C] * r) + fabs(o.x[i]) * dot / C * r * r * r, a = dim[2] ? add[i] : 0;
        want += a;
        double bound = REAL_EPS * (fabs(a) + size * (chain(C) + 8)) + FD_ERR * (size + r + dot * r * r * r) + lab_kept(want);
        lab_close_to("rmsnorm dx", &got[i], &want, &bound, 1);
    }
    for (int c = 0; c < C; c += (int)(stride > 8 ? 8 : stride)) {
        double want = dw0[c] + lab_slope(norm_loss, &o, &o.w[c], H), size = fabs(dw0[c]);
        ref_rmsnorm(o.y, o.rstd, o.x, o.w, M, C, o.eps);
        for (int m = 0; m < M; m++) size += fabs(o.dy[m * C + c] * o.x[m * C + c] * o.rstd[m]);
        double bound = REAL_EPS * size * (M + 4) + FD_ERR * (size + n);
        lab_close_to("rmsnorm dw", &got_w[c], &want, &bound, 1);
    }
}

static void test_rmsnorm(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{0, 4},  {1, 1},  {3, 1},   {1, 17},   {5, 15, 1},
                                         {7, 16}, {4, 33}, {9, 128}, {67, 300}, {3, 2049}};
    RUN(rmsnorm, dims);
    static const int bwd[][LAB_DIMS] = {{0, 4},     {1, 1},         {3, 1, 1},     {1, 17, 1, 1}, {5, 15},
                                        {7, 16, 1}, {4, 33, 1, 1}, {400, 67, 1, 1}, {40, 530}};
    RUN(rmsnorm_bwd, bwd);
}

// ---- SwiGLU ----------------------------------------------------------------------------------------------------------
typedef struct Gate {
    double gu[2], rw, dh;
} Gate;

static double gate_loss(const void *ctx) {
    const Gate *g = ctx;
    double h;
    ref_swiglu(&h, g->gu, &g->rw, 1, 1);
    return h * g->dh;
}

// dims: rows, room, F, with weights (2: dgu in place)
static void swiglu(Lab *l, const int *dim) {
    int rows = dim[0], M = dim[1], F = dim[2];
    size_t n = SIZE(rows, F), room = SIZE(M, F);
    double *gu = lab_random(l, 2 * room, -4, 4), *rw = lab_random(l, M, 0, 1), *dh = lab_random(l, room, -1, 1);
    double *want = lab_zeros(l, n), *bound = lab_zeros(l, n), *want_rw = lab_zeros(l, M), *bound_rw = lab_zeros(l, M);
    if (n > 2) gu[0] = -100, gu[1] = 100, gu[2] = 0; // where exp overflows, or nearly; and 0
    ref_swiglu(want, gu, dim[3] ? rw : NULL, rows, F);
    for (size_t i = 0; i < n; i++) bound[i] = 8 * REAL_EPS * fabs(want[i]) + REAL_TINY + lab_kept(want[i]);
    int *n_rows = rows < M || dim[3] ? lab_int(l, &rows, 1) : NULL;
    wide *dev_rw = dim[3] ? lab_wide(l, rw, M) : NULL;
    real *dev_gu = lab_real(l, gu, 2 * room), *h = lab_real(l, NULL, room), *h2 = lab_real(l, NULL, room);
    dev_swiglu(l->d, h, dev_gu, dev_rw, n_rows, M, F);
    lab_close_to("swiglu h", lab_get(l, h, room), want, bound, n);
    lab_poisoned("swiglu h", lab_get(l, h, room) + n, room - n);

    real *dgu = dim[3] == 2 ? dev_gu : lab_real(l, NULL, 2 * room);
    wide *drw = dim[3] ? lab_wide(l, NULL, M) : NULL;
    dev_swiglu_bwd(l->d, dgu, h2, drw, lab_real(l, dh, room), dev_gu, dev_rw, n_rows, M, F);
    lab_close_to("swiglu_bwd h", lab_get(l, h2, room), want, bound, n);
    lab_poisoned("swiglu_bwd h", lab_get(l, h2, room) + n, room - n);
    double *got = lab_get(l, dgu, 2 * room);
    if (dim[3] != 2) lab_poisoned("swiglu_bwd dgu", got + 2 * n, 2 * (room - n));
    for (int m = 0; m < rows; m++)
        for (int f = 0; f < F; f++) {
            size_t i = (size_t)m * F + f, ig = (size_t)m * 2 * F + f;
            Gate g = {{gu[ig], gu[ig + F]}, dim[3] ? rw[m] : 1, dh[i]};
            double want_g = lab_slope(gate_loss, &g, &g.gu[0], H), want_u = lab_slope(gate_loss, &g, &g.gu[1], H);
            double size_u = fabs(g.dh * g.rw * g.gu[0]), size_g = fabs(g.dh * g.rw * g.gu[1]) * (1 + fabs(g.gu[0]));
            double rel = 10 * REAL_EPS + FD_ERR, bound_g = rel * size_g + REAL_TINY + lab_kept(want_g);
            double bound_u = rel * size_u + REAL_TINY + lab_kept(want_u);
            lab_close_to("swiglu dg", &got[ig], &want_g, &bound_g, 1);
            lab_close_to("swiglu du", &got[ig + F], &want_u, &bound_u, 1);
            want_rw[m] += lab_slope(gate_loss, &g, &g.rw, H);
            bound_rw[m] += (REAL_EPS * (chain(F) + 8) + FD_ERR) * fabs(g.dh * g.gu[0] * g.gu[1]);
        }
    if (!drw) return;
    double *got_rw = lab_get_wide(l, drw, M);
    lab_close_to("swiglu drw", got_rw, want_rw, bound_rw, rows);
    lab_poisoned("swiglu drw", got_rw + rows, M - rows);
}

static void test_swiglu(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{0, 0, 3, 0},  {0, 7, 3, 1},    {1, 1, 1, 0},     {1, 4, 1, 1},  {5, 9, 7, 2},
                                         {3, 3, 16, 0}, {17, 30, 33, 2}, {31, 40, 257, 1}, {12, 12, 1000, 2}};
    RUN(swiglu, dims);
}

static void too_many_rows(void *arg) {
    (void)arg;
    Lab *l = lab_open(1);
    int rows = 5;
    double x[16] = {0};
    real *h = lab_real(l, x, 8);
    dev_swiglu(l->d, h, lab_real(l, x, 16), NULL, lab_int(l, &rows, 1), 4, 2);
    lab_get(l, h, 8);
}

static void test_rows_past_the_room_are_refused(void **state) {
    (void)state;
    assert_int_equal(child_call(too_many_rows, NULL).status, LAB_FAULT);
}

// ---- rows between ranks ----------------------------------------------------------------------------------------------
// dims: BT, K, C, peers. A third of the pairs is dropped; the rest lies on rows of its own, as a plan would have it.
static void rows(Lab *l, const int *dim) {
    int BT = dim[0], K = dim[1], C = dim[2], P = dim[3], M = BT * K + 3;
    size_t pairs = SIZE(BT, K), nx = SIZE(BT, C), nd = SIZE(P, M, C);
    int *peer = lab_ints(l, pairs, P), *row = lab_ints(l, pairs, 3), next[8] = {0};
    for (size_t p = 0; p < pairs; p++) row[p] = row[p] == 0 ? -1 : next[peer[p]]++ * 2 % (M - 1 + M % 2);
    double *x = lab_random(l, nx, -1, 1), *w = lab_random(l, pairs, 0, 1);
    double *dst = lab_zeros(l, nd), *wdst = lab_zeros(l, SIZE(P, M));
    for (size_t i = 0; i < nd; i++) dst[i] = NAN;
    for (int i = 0; i < P * M; i++) wdst[i] = NAN;
    ref_scatter(dst, wdst, x, w, peer, row, BT, K, M, C);
    real *to[8], *plain[8];
    wide *wto[8];
    for (int i = 0; i < P; i++) {
        to[i] = lab_real(l, NULL, SIZE(M, C));
        plain[i] = lab_real(l, NULL, SIZE(M, C));
        wto[i] = lab_wide(l, NULL, M);
    }
    void *dev_to = lab_bytes(l, to, sizeof to), *dev_wto = lab_bytes(l, wto, sizeof wto);
    real *dev_x = lab_real(l, x, nx);
    int *dev_peer = lab_int(l, peer, pairs), *dev_row = lab_int(l, row, pairs);
    RowMap map = {.BT = BT, .K = K, .ld = K, .peer = dev_peer, .row = dev_row};
    dev_scatter_rows(l->d, dev_to, dev_wto, dev_x, lab_wide(l, w, pairs), map, C);
    dev_scatter_rows(l->d, lab_bytes(l, plain, sizeof plain), NULL, dev_x, NULL, map, C);
    for (int i = 0; i < P; i++) {
        double *got = lab_get(l, to[i], SIZE(M, C)), *got_plain = lab_get(l, plain[i], SIZE(M, C));
        double *got_w = lab_get_wide(l, wto[i], M);
        for (int r = 0; r < M; r++) {
            const double *want = dst + SIZE(i * M + r, C);
            if (isnan(wdst[i * M + r])) { // a row that no pair was sent to
                lab_poisoned("scatter row", got + r * C, C);
                lab_poisoned("scatter row", got_plain + r * C, C);
                lab_poisoned("scatter weight", got_w + r, 1);
                continue;
            }
            lab_equal("scatter row", got + r * C, want, C);
            lab_equal("scatter row", got_plain + r * C, want, C);
            lab_equal("scatter weight", got_w + r, &wdst[i * M + r], 1);
        }
    }
    // The rows lie there now as a combine finds them, poison between them.
    double *add = lab_random(l, nx, -1, 1), *want = lab_zeros(l, nx), *want_w = lab_zeros(l, pairs), *bound = lab_zeros(l, nx);
    for (int with_add = 0; with_add < 3; with_add++) { // none, apart, in place
        real *dev_add = lab_real(l, add, nx), *y = with_add == 2 ? dev_add : lab_real(l, NULL, nx);
        wide *dw = with_add == 1 ? NULL : lab_wide(l, NULL, pairs);
        dev_gather_rows(l->d, y, dw, with_add ? dev_add : NULL, dev_to, dev_wto, map, C);
        ref_gather(want, want_w, with_add ? add : NULL, dst, wdst, peer, row, BT, K, M, C);
        for (size_t i = 0; i < nx; i++) bound[i] = REAL_EPS * (K + 1) * (fabs(add[i]) + K * fabs(x[i])) + lab_kept(want[i]);
        lab_close_to("gather y", lab_get(l, y, nx), want, bound, nx);
        if (dw) lab_equal("gather dw", lab_get_wide(l, dw, pairs), want_w, pairs);
    }
}

static void test_rows(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{0, 2, 5, 1},   {1, 1, 1, 1},    {9, 3, 7, 2},
                                         {33, 8, 64, 4}, {70, 2, 129, 3}, {5, 6, 1000, 8}};
    RUN(rows, dims);
}

// The other forms of a map: blocks with only their first tokens there, pairs apart from each other (ld), one buffer without a list of
// peers, weights at rows of their own (of which some belong to no row here). dims: blocks, room, K, C
static void mapped_rows(Lab *l, const int *dim) {
    int BT = dim[0] * dim[1], room = dim[1], K = dim[2], C = dim[3], ld = 2 * K + 1, M = BT * K + 1;
    size_t nx = SIZE(BT, C), pairs = SIZE(BT, K), lists = SIZE(BT, ld);
    int *n = lab_ints(l, dim[0], room + 1), *row = lab_ints(l, lists, 3), *wrow = lab_ints(l, lists, 4), *plain = lab_filled(l, pairs, 0);
    int *there = lab_filled(l, BT, 0), *wplain = lab_filled(l, pairs, 0), *peer = lab_filled(l, pairs, 0);
    for (int t = 0, next = 0; t < BT; t++) {
        there[t] = t % room < n[t / room];
        for (int k = 0; k < K; k++, next++) {
            int *r = &row[(size_t)t * ld + k], *w = &wrow[(size_t)t * ld + k];
            *r = *r ? next : -1, *w = *w ? M - 1 - next : -1;
            plain[t * K + k] = there[t] ? *r : -1, wplain[t * K + k] = there[t] ? *w : -1;
        }
    }
    double *x = lab_random(l, nx, -1, 1), *w = lab_random(l, pairs, 0, 1), *dst = lab_zeros(l, SIZE(M, C)), *wdst = lab_zeros(l, M);
    double *unused = lab_zeros(l, SIZE(M, C)), *unused_w = lab_zeros(l, M);
    for (size_t i = 0; i < SIZE(M, C); i++) dst[i] = NAN;
    for (int i = 0; i < M; i++) wdst[i] = NAN;
    ref_scatter(dst, unused_w, x, w, peer, plain, BT, K, M, C);
    ref_scatter(unused, wdst, x, w, peer, wplain, BT, K, M, C);
    real *to = lab_real(l, NULL, SIZE(M, C)), *dev_x = lab_real(l, x, nx);
    wide *wto = lab_wide(l, NULL, M);
    void *to_at = lab_bytes(l, &to, sizeof to), *wto_at = lab_bytes(l, &wto, sizeof wto);
    RowMap map = {.BT = BT, .K = K, .ld = ld, .row = lab_int(l, row, lists), .wrow = lab_int(l, wrow, lists), .n = lab_int(l, n, dim[0]), .room = room};
    dev_scatter_rows(l->d, to_at, wto_at, dev_x, lab_wide(l, w, pairs), map, C);
    double *got = lab_get(l, to, SIZE(M, C)), *got_w = lab_get_wide(l, wto, M);
    for (int r = 0; r < M; r++) {
        if (isnan(dst[SIZE(r, C)])) lab_poisoned("mapped row", got + SIZE(r, C), C);
        else lab_equal("mapped row", got + SIZE(r, C), dst + SIZE(r, C), C);
        if (isnan(wdst[r])) lab_poisoned("mapped weight", got_w + r, 1);
        else lab_equal("mapped weight", got_w + r, wdst + r, 1);
    }
    real *y = lab_real(l, NULL, nx);
    wide *dw = lab_wide(l, NULL, pairs);
    dev_gather_rows(l->d, y, dw, NULL, to_at, wto_at, map, C);
    double *want = lab_zeros(l, nx), *want_w = lab_zeros(l, pairs), *bound = lab_zeros(l, nx), *ignored = lab_zeros(l, pairs);
    ref_gather(want, ignored, NULL, dst, unused_w, peer, plain, BT, K, M, C);
    ref_gather(unused, want_w, NULL, unused, wdst, peer, wplain, BT, K, M, C);
    for (size_t i = 0; i < nx; i++) bound[i] = REAL_EPS * (K + 1) * K * fabs(x[i]) + lab_kept(want[i]);
    double *got_y = lab_get(l, y, nx);
    got_w = lab_get_wide(l, dw, pairs);
    for (int t = 0; t < BT; t++) {
        if (there[t]) {
            lab_close_to("mapped y", got_y + SIZE(t, C), want + SIZE(t, C), bound + SIZE(t, C), C);
            lab_equal("mapped dw", got_w + t * K, want_w + t * K, K);
        } else {
            lab_poisoned("mapped y", got_y + SIZE(t, C), C);
            lab_poisoned("mapped dw", got_w + t * K, K);
        }
    }
}

static void test_mapped_rows(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{1, 1, 1, 1}, {2, 9, 3, 7}, {4, 20, 4, 65}, {3, 0, 2, 5}};
    RUN(mapped_rows, dims);
}

// ---- whole arrays ----------------------------------------------------------------------------------------------------
static void arrays(Lab *l, const int *dim) {
    size_t n = dim[0];
    double *x = lab_random(l, n, -1, 1), *y = lab_random(l, n, -1, 1), *want = lab_zeros(l, n);
    wide *dx = lab_wide(l, x, n), *dy = lab_wide(l, y, n), *dz = lab_wide(l, NULL, n);
    dev_add(l->d, dx, dy, n);
    for (size_t i = 0; i < n; i++) want[i] = (wide)((wide)x[i] + (wide)y[i]);
    lab_equal("add", lab_get_wide(l, dx, n), want, n);
    lab_equal("add's y", lab_get_wide(l, dy, n), y, n);
    dev_copy(l->d, dz, dx, n * sizeof(wide));
    lab_equal("copy", lab_get_wide(l, dz, n), want, n);
    if (n > 2) dev_zero(l->d, dz + 1, (n - 2) * sizeof(wide));
    for (size_t i = 1; i + 1 < n; i++) want[i] = 0;
    lab_equal("zero", lab_get_wide(l, dz, n), want, n);
    real *f = lab_real(l, NULL, n);
    dev_fill(l->d, f, n, 0.3);
    for (size_t i = 0; i < n; i++) want[i] = real_value(real_of(0.3));
    lab_equal("fill", lab_get(l, f, n), want, n);
    for (size_t i = 0; i < n; i++) want[i] = (wide)(x[i] * 1.003 + y[i]); // more digits than `real` may have
    dev_narrow(l->d, f, lab_wide(l, want, n), n);
    for (size_t i = 0; i < n; i++) want[i] = real_value(real_of(want[i]));
    lab_equal("narrow", lab_get(l, f, n), want, n);
    dev_widen(l->d, dz, f, n);
    lab_equal("widen", lab_get_wide(l, dz, n), want, n);

    // A tensor of n numbers, and its tail from `cut` on made by another owner
    size_t cut = n / 3;
    real *whole = lab_real(l, NULL, n), *tail = lab_real(l, NULL, n - cut);
    dev_init_normal(l->d, whole, n, 7, 9, 1000, 0.02);
    dev_init_normal(l->d, tail, n - cut, 7, 9, 1000 + cut, 0.02);
    for (size_t i = 0; i < n; i++) want[i] = real_value(real_of(0.02 * rng_normal(7, 9, 1000 + i)));
    lab_equal("init_normal", lab_get(l, whole, n), want, n);
    lab_equal("init_normal's tail", lab_get(l, tail, n - cut), want + cut, n - cut);
}

static void sums(Lab *l, const int *dim) {
    size_t n = dim[0];
    double *x = lab_random(l, n, -1, 2), *y = lab_random(l, n, -1, 1), out[3] = {0.5, 0.5, 0.5}, want[3], bound[3];
    long double s[3] = {0}, size[3] = {0};
    for (size_t i = 0; i < n; i++) {
        long double term[3] = {x[i], (long double)x[i] * x[i], (long double)x[i] * y[i]};
        for (int k = 0; k < 3; k++) s[k] += term[k], size[k] += fabsl(term[k]);
    }
    double *dev_out = lab_bytes(l, out, sizeof out);
    wide *dx = lab_wide(l, x, n);
    dev_sum(l->d, dev_out, dx, n);
    dev_sumsq(l->d, dev_out + 1, dx, n);
    dev_dot(l->d, dev_out + 2, dx, lab_wide(l, y, n), n, -3);
    for (int k = 0; k < 3; k++) {
        double scale = k == 2 ? -3 : 1;
        want[k] = 0.5 + scale * (double)s[k];
        bound[k] = DBL_EPSILON * (chain((int)n / 128) + 150) * (0.5 + fabs(scale) * (double)size[k]); // 128 parts, in order
    }
    lab_close_to("sum, sumsq, dot", lab_get_bytes(l, dev_out, sizeof out), want, bound, 3);
}

static void test_arrays(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{0}, {1}, {2}, {3}, {15}, {17}, {1000}, {4097}, {16385}, {100003}, {600001}};
    RUN(arrays, dims);
    RUN(sums, dims);
}

// ---- loss ------------------------------------------------------------------------------------------------------------
typedef struct Row {
    double *x;
    int target, V;
} Row;

static double row_loss(const void *ctx) {
    const Row *r = ctx;
    return ref_nll(r->x, r->target, r->V);
}

// dims: M, V, spread of the logits
static void cross_entropy(Lab *l, const int *dim) {
    int M = dim[0], V = dim[1];
    double long_sum = chain(V < 1024 ? V : 1024); // segments of 1024, then in double
    size_t n = SIZE(M, V);
    double *x = lab_random(l, n, -dim[2], dim[2]), *want = lab_zeros(l, M), *bound = lab_zeros(l, M), scale = (wide)0.37;
    int *target = lab_ints(l, M, V), *dev_target;
    for (int m = 1; m < M; m += 4) target[m] = -1;
    dev_target = lab_int(l, target, M);
    for (int m = 0; m < M; m++) {
        want[m] = ref_nll(x + SIZE(m, V), target[m], V);
        bound[m] = target[m] < 0 ? 0 : REAL_EPS * (long_sum + want[m]);
    }
    real *logits = lab_real(l, x, n);
    wide *nll = lab_wide(l, NULL, M), *nll2 = lab_wide(l, NULL, M);
    dev_cross_entropy(l->d, nll, logits, dev_target, M, V, (wide)scale, 0);
    lab_close_to("nll", lab_get_wide(l, nll, M), want, bound, M);
    lab_equal("logits without grad", lab_get(l, logits, n), x, n);
    dev_cross_entropy(l->d, nll2, logits, dev_target, M, V, (wide)scale, 1);
    lab_equal("nll with grad", lab_get_wide(l, nll2, M), lab_get_wide(l, nll, M), M);
    double *got = lab_get(l, logits, n);
    size_t stride = n / (V > 1000 ? 20 : 300) + 1; // a slope costs 4 V exps
    for (size_t i = 0; i < n; i++) {
        int m = (int)(i / V), v = (int)(i % V), t = target[m];
        if (i % stride && v != t) continue;
        Row r = {x + SIZE(m, V), t, V};
        double slope = scale * lab_slope(row_loss, &r, &x[i], H);
        double p = exp(-ref_nll(x + SIZE(m, V), v, V)), size = t < 0 ? 0 : scale * (p * (long_sum + 2 * dim[2]) + 2 * (v == t));
        double b = REAL_EPS * size + (t < 0 ? 0 : FD_ERR * scale + REAL_TINY) + lab_kept(slope);
        lab_close_to("dlogits", &got[i], &slope, &b, 1);
    }
    for (int m = 0; m < M; m++) // a row's gradients sum to 0: one that was missed above would show here
        if (target[m] >= 0) {
            double sum = 0, zero = 0, b = REAL_EPS * scale * (long_sum + 2 * dim[2]);
            for (int v = 0; v < V; v++) sum += got[SIZE(m, V) + v], b += lab_kept(got[SIZE(m, V) + v]);
            lab_close_to("sum of dlogits", &sum, &zero, &b, 1);
        }
}

static void test_cross_entropy(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{0, 5, 1},   {1, 1, 2},     {2, 2, 3},     {5, 7, 3},     {9, 16, 30},
                                         {6, 33, 80}, {33, 257, 5}, {3, 1025, 5}, {11, 3001, 8}, {2, 40000, 2}};
    RUN(cross_entropy, dims);
}

static void test_cross_entropy_extremes(void **state) {
    (void)state;
    Lab *l = lab_open(1);
    int target[4] = {0, 1, 0, 2};
    double x[12] = {80, -80, 0, /**/ 3e38, -3e38, 0, /**/ 0, NAN, 1, /**/ 1, INFINITY, 0};
    wide *nll = lab_wide(l, NULL, 4);
    dev_cross_entropy(l->d, nll, lab_real(l, x, 12), lab_int(l, target, 4), 4, 3, 1, 0);
    double *got = lab_get_wide(l, nll, 4);
    assert_true(got[0] >= 0 && got[0] < 1e-30); // certain and right
    assert_true(got[1] > 3e38);                 // certain and wrong: huge, as it is
    assert_true(isnan(got[2]));                 // a fault upstream stays one
    assert_false(isfinite(got[3]));
    // A logit whose exp overflows unless it is found as the largest, at every place of a row
    enum { V = 45 };
    double *rows = lab_zeros(l, V * V), zero[V] = {0};
    int place[V];
    for (int v = 0; v < V; v++) {
        place[v] = v;
        rows[v * V + v] = sizeof(wide) == 4 ? 200 : 2000;
    }
    nll = lab_wide(l, NULL, V);
    dev_cross_entropy(l->d, nll, lab_real(l, rows, V * V), lab_int(l, place, V), V, V, 1, 0);
    lab_equal("nll", lab_get_wide(l, nll, V), zero, V);
    lab_close(l);
}

// ---- optimizer -------------------------------------------------------------------------------------------------------
// A weight and the master that it has where `real` is narrower than `wide`
typedef struct Weight {
    real *w;
    wide *master;
} Weight;

static Weight weight_make(Lab *l, const double *x, size_t n) {
    if (sizeof(real) == sizeof(wide)) return (Weight){lab_real(l, x, n), NULL};
    return (Weight){lab_real(l, NULL, n), lab_wide(l, x, n)}; // the weight itself is not read
}
static double *weight_get(Lab *l, Weight t, size_t n) {
    double *w = lab_get(l, t.w, n);
    if (!t.master) return w;
    double *master = lab_get_wide(l, t.master, n), *rounded = lab_zeros(l, n);
    for (size_t i = 0; i < n; i++) rounded[i] = real_value(real_of(master[i]));
    lab_equal("a weight is its master, rounded", w, rounded, n);
    return master;
}

static void optimizer(Lab *l, const int *dim) {
    size_t n = dim[0];
    double *w = lab_random(l, n, -1, 1), *g = lab_random(l, n, -1, 1);
    double *m = lab_random(l, n, -0.1, 0.1), *v = lab_random(l, n, 0, 0.01);
    double *want = lab_zeros(l, n), *bw = lab_zeros(l, n), *bm = lab_zeros(l, n), *bv = lab_zeros(l, n), factor = 0.25;
    RefAdamW o = {.lr = 0.003, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .decay = 0.1, .step = dim[1]};
    for (size_t i = 0; i < n; i++) w[i] = (wide)(w[i] * 1.003); // a master's digits
    for (size_t i = 0; i < n / 5; i++) g[i] = 0; // an expert without tokens still decays, and so do its moments
    Weight adam_w = weight_make(l, w, n), sgd_w = weight_make(l, w, n);
    wide *dm = lab_wide(l, m, n), *dv = lab_wide(l, v, n), *dg = lab_wide(l, g, n), *df = lab_wide(l, &factor, 1);
    Update adam = {o.lr, o.beta1, o.beta2, o.eps, o.decay, o.step}, sgd = {.lr = 0.1, .decay = 0.01};
    dev_adamw(l->d, adam_w.w, adam_w.master, dm, dv, dg, df, n, lab_bytes(l, &adam, sizeof adam));
    dev_sgd(l->d, sgd_w.w, sgd_w.master, dg, df, n, lab_bytes(l, &sgd, sizeof sgd));
    for (size_t i = 0; i < n; i++) {
        want[i] = w[i] - 0.1 * (factor * g[i] + 0.01 * w[i]);
        bw[i] = 3 * REAL_EPS * (fabs(w[i]) + fabs(g[i]));
    }
    lab_close_to("sgd w", weight_get(l, sgd_w, n), want, bw, n);
    for (size_t i = 0; i < n; i++) {
        double w0 = fabs(w[i]), size_m = o.beta1 * fabs(m[i]) + (1 - o.beta1) * fabs(factor * g[i]);
        ref_adamw(&w[i], &m[i], &v[i], factor * g[i], o);
        double vhat = v[i] / (1 - pow(o.beta2, o.step)), mhat = size_m / (1 - pow(o.beta1, o.step));
        bm[i] = 4 * REAL_EPS * size_m;
        bv[i] = 6 * REAL_EPS * v[i];
        bw[i] = REAL_EPS * (2 * w0 + o.lr * (16 * mhat / (sqrt(vhat) + o.eps) + 4 * o.decay * w0));
    }
    lab_close_to("adamw m", lab_get_wide(l, dm, n), m, bm, n);
    lab_close_to("adamw v", lab_get_wide(l, dv, n), v, bv, n);
    lab_close_to("adamw w", weight_get(l, adam_w, n), w, bw, n);
    lab_equal("adamw's g", lab_get_wide(l, dg, n), g, n);
}

static void test_optimizer(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{0, 1}, {1, 1}, {7, 2}, {33, 10}, {4097, 1000}, {50001, 1}};
    RUN(optimizer, dims);
}

static void test_clip_factor(void **state) {
    (void)state;
    const double sumsq[] = {0, 120, 4, 4, 4.0001}, max[] = {1, 1, 2, 0, 2}, want[] = {1, 1 / sqrt(120), 1, 1, 2 / sqrt(4.0001)};
    Lab *l = lab_open(1);
    wide *factor = lab_wide(l, NULL, 1);
    for (int i = 0; i < 5; i++) {
        dev_clip_factor(l->d, factor, lab_bytes(l, &sumsq[i], sizeof(double)), max[i]);
        double bound = 2 * REAL_EPS * want[i];
        lab_close_to("clip factor", lab_get_wide(l, factor, 1), &want[i], &bound, 1);
    }
    lab_close(l);
}

// A sum that is not finite, or one fault of a router, and nothing is updated.
static void test_veto(void **state) {
    (void)state;
    const double sums[] = {3, INFINITY, 3, NAN}, x[] = {1, -2, 4};
    const int bad[][3] = {{0, 0, 0}, {0, 0, 0}, {0, 0, 7}, {0, 0, 0}};
    for (int i = 0; i < 4; i++) {
        Lab *l = lab_open(1);
        double norm[3] = {4, 5, 0};
        double *sumsq = lab_bytes(l, norm, sizeof norm), *sum = lab_bytes(l, &sums[i], sizeof sums[i]);
        dev_veto(l->d, sumsq + 2, sum, lab_int(l, bad[i], 3), 3);
        dev_total(l->d, sumsq, 3);
        wide *factor = lab_wide(l, NULL, 1), *m = lab_wide(l, x, 3), *v = lab_wide(l, x + 2, 1), *g = lab_wide(l, x, 3);
        dev_clip_factor(l->d, factor, sumsq, 1.5);
        Update o = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.9, .eps = 1e-8, .step = 1};
        real *w = lab_real(l, x, 3);
        dev_adamw(l->d, w, NULL, m, v, g, factor, 1, lab_bytes(l, &o, sizeof o));
        dev_sgd(l->d, w + 1, NULL, g, factor, 2, lab_bytes(l, &o, sizeof o));
        double want = 1.5 / 3, bound = REAL_EPS, *got = lab_get(l, w, 3);
        if (i == 0) lab_close_to("factor", lab_get_wide(l, factor, 1), &want, &bound, 1);
        for (int k = 0; k < 3; k++) assert_true((got[k] == x[k]) == (i > 0));
        assert_true((lab_get_wide(l, m, 1)[0] == x[0]) == (i > 0));
        lab_close(l);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_embed),
        cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_rows_past_the_room_are_refused),
        cmocka_unit_test(test_rows), cmocka_unit_test(test_mapped_rows),
        cmocka_unit_test(test_arrays),
        cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_cross_entropy_extremes),
        cmocka_unit_test(test_optimizer),
        cmocka_unit_test(test_clip_factor),
        cmocka_unit_test(test_veto),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
