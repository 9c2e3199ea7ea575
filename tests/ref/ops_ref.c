#include "tests/ref/ops_ref.h"
#include <math.h>

void ref_rmsnorm(double *y, double *rstd, const double *x, const double *w, int M, int C, double eps) {
    for (int m = 0; m < M; m++) {
        long double ss = 0;
        for (int c = 0; c < C; c++) ss += (long double)x[m * C + c] * x[m * C + c];
        rstd[m] = 1 / sqrt((double)(ss / C) + eps);
        for (int c = 0; c < C; c++) y[m * C + c] = x[m * C + c] * rstd[m] * w[c];
    }
}

void ref_swiglu(double *h, const double *gu, const double *rw, int M, int F) {
    for (int m = 0; m < M; m++)
        for (int f = 0; f < F; f++) {
            double g = gu[m * 2 * F + f], u = gu[m * 2 * F + F + f];
            h[m * F + f] = (rw ? rw[m] : 1) * g / (1 + exp(-g)) * u;
        }
}

void ref_scatter(double *dst, double *wdst, const double *x, const double *w, const int *peer, const int *row, int BT, int K,
                 int M, int C) {
    for (int t = 0; t < BT; t++)
        for (int k = 0; k < K; k++) {
            int r = row[t * K + k];
            if (r < 0) continue;
            int at = peer[t * K + k] * M + r;
            for (int c = 0; c < C; c++) dst[at * C + c] = x[t * C + c];
            if (w) wdst[at] = w[t * K + k];
        }
}

void ref_gather(double *y, double *dw, const double *add, const double *src, const double *wsrc, const int *peer, const int *row,
                int BT, int K, int M, int C) {
    for (int t = 0; t < BT; t++) {
        for (int c = 0; c < C; c++) y[t * C + c] = add ? add[t * C + c] : 0;
        for (int k = 0; k < K; k++) {
            int p = t * K + k, at = peer[p] * M + row[p];
            if (dw) dw[p] = row[p] < 0 ? 0 : wsrc[at];
            for (int c = 0; c < C; c++) y[t * C + c] += row[p] < 0 ? 0 : src[at * C + c];
        }
    }
}

double ref_nll(const double *logits, int target, int V) {
    if (target < 0) return 0;
    long double sum = 0;
    for (int v = 0; v < V; v++) sum += expl((long double)logits[v] - logits[target]);
    return (double)logl(sum);
}

void ref_adamw(double *w, double *m, double *v, double g, RefAdamW o) {
    *m = o.beta1 * *m + (1 - o.beta1) * g;
    *v = o.beta2 * *v + (1 - o.beta2) * g * g;
    double mhat = *m / (1 - pow(o.beta1, o.step)), vhat = *v / (1 - pow(o.beta2, o.step));
    *w -= o.lr * (mhat / (sqrt(vhat) + o.eps) + o.decay * *w);
}
