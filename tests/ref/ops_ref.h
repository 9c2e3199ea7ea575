// Naive oracles of the small ops, in double: one formula each, as kernels/device.h states it, no blocks and no lanes.
#ifndef MOE_TESTS_OPS_REF_H
#define MOE_TESTS_OPS_REF_H
#include <stddef.h>
#include <stdint.h>

// y (M,C), rstd (M) overwritten | x (M,C) | w (C)
void ref_rmsnorm(double *y, double *rstd, const double *x, const double *w, int M, int C, double eps);
// h (M,F) overwritten | gu (M,2F) | rw (M) or NULL
void ref_swiglu(double *h, const double *gu, const double *rw, int M, int F);
// sum_p over all pairs with row >= 0 of x[t]'s row into dst (peers, M, C), each exactly once; w likewise
void ref_scatter(double *dst, double *wdst, const double *x, const double *w, const int *peer, const int *row, int BT, int K,
                 int M, int C);
// y[t] = add[t] + sum over its pairs, k ascending, as doubles
void ref_gather(double *y, double *dw, const double *add, const double *src, const double *wsrc, const int *peer, const int *row,
                int BT, int K, int M, int C);
// -log softmax(logits)[target], 0 for target -1
double ref_nll(const double *logits, int target, int V);

typedef struct RefAdamW {
    double lr, beta1, beta2, eps, decay;
    int step;
} RefAdamW;
void ref_adamw(double *w, double *m, double *v, double g, RefAdamW o); // one parameter, g already clipped
#endif
