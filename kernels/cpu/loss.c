// Cross-entropy and sums, on the CPU.
#include "kernels/cpu/dev.h"
#include "kernels/cpu/vmath.h"

// Sums run in lanes: element i goes to lane i % LANES, and the lanes are added in order. The compiler vectorises over
// lanes; the order is the same whatever the instruction set.
enum { LANES = 16, SEGMENT = 1024, PARTS = 128 };

// ---- cross-entropy -------------------------------------------------------------------------------------------------
// A NaN may be passed over here: its exp is NaN again and reaches the sum.
DEV_CLONES static wide row_max(const real *x, int n) { return vmax(x, n); }

// y[i] = exp(x[i] - max) of at most SEGMENT elements; y is x or lies apart. Returns their sum
DEV_CLONES static double segment_exp(real *y, const real *x, int n, wide max) {
    wide lane[LANES] = {0};
    double s = 0;
    int i = 0;
    DEV_APART
    for (int k = 0; k < n; k++) y[k] = (real)vexp(x[k] - max);
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) lane[j] += y[i + j];
    for (; i < n; i++) s += y[i];
    for (int j = 0; j < LANES; j++) s += lane[j];
    return s;
}

DEV_CLONES static void row_scale(real *x, int n, wide a) {
    for (int i = 0; i < n; i++) x[i] *= a;
}

static wide row_cross_entropy(real *x, int target, int V, wide scale, int grad) {
    real unused[SEGMENT];
    if (target < 0) {
        for (int v = 0; grad && v < V; v++) x[v] = 0;
        return 0;
    }
    CHECK_DATA(target < V, "target token %d, the vocabulary is %d", target, V);
    double xt = x[target], max = row_max(x, V), sum = 0;
    for (int v = 0; v < V; v += SEGMENT)
        sum += segment_exp(grad ? x + v : unused, x + v, V - v < SEGMENT ? V - v : SEGMENT, (wide)max);
    if (grad) {
        row_scale(x, V, (wide)(scale / sum));
        x[target] -= scale;
    }
    return (wide)(log(sum) + max - xt);
}

void dev_cross_entropy(Dev *d, wide *nll, real *logits, const int *target, int M, int V, wide scale, int grad) {
    dev_enter(d);
    size_t work = SIZE(M, V);
#pragma omp parallel for num_threads(d->threads) if (M > 1 && work > DEV_PARALLEL_MIN / 8) schedule(static)
    for (int m = 0; m < M; m++) nll[m] = row_cross_entropy(logits + (size_t)m * V, target[m], V, scale, grad);
    dev_leave(d);
}

// ---- sums ----------------------------------------------------------------------------------------------------------
DEV_CLONES static double sum_part(const wide *x, size_t n) {
    double lane[LANES] = {0}, s = 0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) lane[j] += x[i + j];
    for (; i < n; i++) s += x[i];
    for (int j = 0; j < LANES; j++) s += lane[j];
    return s;
}

DEV_CLONES static double dot_part(const wide *x, const wide *y, size_t n) {
    double lane[LANES] = {0}, s = 0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) lane[j] += (double)x[i + j] * y[i + j];
    for (; i < n; i++) s += (double)x[i] * y[i];
    for (int j = 0; j < LANES; j++) s += lane[j];
    return s;
}

// The parts' borders depend on n alone. y NULL: plain sum
static double sum_all(const Dev *d, const wide *x, const wide *y, size_t n) {
    double part[PARTS] = {0}, s = 0;
    size_t len = (n / PARTS + SEGMENT) / SEGMENT * SEGMENT;
#pragma omp parallel for num_threads(d->threads) if (n > DEV_PARALLEL_MIN) schedule(static)
    for (int p = 0; p < PARTS; p++) {
        size_t at = p * len;
        if (at >= n) continue;
        size_t m = n - at < len ? n - at : len;
        part[p] = y ? dot_part(x + at, y + at, m) : sum_part(x + at, m);
    }
    for (int p = 0; p < PARTS; p++) s += part[p];
    return s;
}

void dev_sum(Dev *d, double *out, const wide *x, size_t n) {
    dev_enter(d);
    *out += sum_all(d, x, NULL, n);
    dev_leave(d);
}

void dev_sumsq(Dev *d, double *out, const wide *x, size_t n) {
    dev_enter(d);
    *out += sum_all(d, x, x, n);
    dev_leave(d);
}

void dev_dot(Dev *d, double *out, const wide *x, const wide *y, size_t n, double scale) {
    dev_enter(d);
    *out += scale * sum_all(d, x, y, n);
    dev_leave(d);
}
