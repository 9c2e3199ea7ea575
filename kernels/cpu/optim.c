// Optimizer and initial values, on the CPU. One pass over memory each.
#include "kernels/cpu/dev.h"
#include "kernels/cpu/vmath.h"
#include "kernels/rng.h"

enum { CHUNK = 4096 }; // elements a thread takes at a time: four streams of it stay in the first-level cache

typedef struct Step { // an AdamW step's scalars, worked out in double
    wide factor, beta1, rest1, beta2, rest2, unbias1, unbias2, eps, lr, decay;
} Step;

DEV_CLONES static void adamw(real *restrict w, wide *restrict m, wide *restrict v, const wide *restrict g, int n, Step s) {
    for (int i = 0; i < n; i++) {
        wide gi = g[i] * s.factor;
        wide mi = s.beta1 * m[i] + s.rest1 * gi;
        wide vi = s.beta2 * v[i] + s.rest2 * (gi * gi);
        m[i] = mi;
        v[i] = vi;
        w[i] -= s.lr * (mi * s.unbias1 / (vsqrt(vi * s.unbias2) + s.eps) + s.decay * w[i]);
    }
}

void dev_adamw(Dev *d, real *w, wide *master, wide *m, wide *v, const wide *g, const wide *factor, size_t n, const Update *o) {
    CHECK_USAGE(!master, "an update of master weights, of which this backend has none: it computes with weights of full width");
    dev_enter(d);
    CHECK_USAGE(o->step >= 1, "AdamW step %lld, expected 1 for the first update", (long long)o->step);
    Step s = {.factor = *factor, .beta1 = o->beta1, .rest1 = 1 - o->beta1, .beta2 = o->beta2, .rest2 = 1 - o->beta2,
              .unbias1 = 1 / (1 - pow(o->beta1, o->step)), .unbias2 = 1 / (1 - pow(o->beta2, o->step)), .eps = o->eps, .lr = o->lr,
              .decay = o->decay};
#pragma omp parallel for num_threads(d->threads) if (n > DEV_PARALLEL_MIN) schedule(static)
    for (size_t i = 0; i < (isfinite(s.factor) ? n : 0); i += CHUNK)
        adamw(w + i, m + i, v + i, g + i, (int)(n - i < CHUNK ? n - i : CHUNK), s);
    dev_leave(d);
}

DEV_CLONES static void sgd(real *restrict w, const wide *restrict g, int n, wide factor, wide lr, wide decay) {
    for (int i = 0; i < n; i++) w[i] -= lr * (factor * g[i] + decay * w[i]);
}

void dev_sgd(Dev *d, real *w, wide *master, const wide *g, const wide *factor, size_t n, const Update *o) {
    CHECK_USAGE(!master, "an update of master weights, of which this backend has none: it computes with weights of full width");
    dev_enter(d);
    wide lr = (wide)o->lr, decay = (wide)o->decay;
#pragma omp parallel for num_threads(d->threads) if (n > DEV_PARALLEL_MIN) schedule(static)
    for (size_t i = 0; i < (isfinite(*factor) ? n : 0); i += CHUNK)
        sgd(w + i, g + i, (int)(n - i < CHUNK ? n - i : CHUNK), *factor, lr, decay);
    dev_leave(d);
}

void dev_widen(Dev *d, wide *y, const real *x, size_t n) { dev_copy(d, y, x, n * sizeof(real)); }
void dev_narrow(Dev *d, real *y, const wide *x, size_t n) { dev_copy(d, y, x, n * sizeof(real)); }

void dev_veto(Dev *d, double *veto, const double *sum, const int *bad, int n) {
    dev_enter(d);
    int fault = !isfinite(*sum);
    for (int i = 0; bad && i < n; i++) fault |= bad[i] != 0;
    *veto = fault ? NAN : 0;
    dev_leave(d);
}

void dev_total(Dev *d, double *x, int n) {
    dev_enter(d);
    for (int i = 1; i < n; i++) x[0] += x[i];
    dev_leave(d);
}

void dev_clip_factor(Dev *d, wide *factor, const double *sumsq, double max_norm) {
    dev_enter(d);
    double norm = sqrt(*sumsq);
    *factor = (wide)(!isfinite(norm) ? NAN : max_norm > 0 && norm > max_norm ? max_norm / norm : 1);
    dev_leave(d);
}

// In integers, so that an even count is exactly even: sign(mean - count) = sign(sum - E count)
void dev_bias_update(Dev *d, wide *bias, const int64_t *count, const wide *factor, int E, double rate) {
    dev_enter(d);
    int64_t sum = 0;
    if (!isfinite(*factor)) rate = 0;
    for (int e = 0; e < E; e++) sum += count[e];
    for (int e = 0; e < E; e++) {
        int64_t short_of = sum - E * count[e];
        bias[e] += (wide)(rate * ((short_of > 0) - (short_of < 0)));
    }
    dev_leave(d);
}

void dev_init_normal(Dev *d, real *w, size_t n, uint64_t seed, uint64_t stream, uint64_t first, double std) {
    dev_enter(d);
#pragma omp parallel for num_threads(d->threads) if (n > 256) schedule(static)
    for (size_t i = 0; i < n; i++) w[i] = (real)(std * rng_normal(seed, stream, first + i));
    dev_leave(d);
}

void dev_fill(Dev *d, real *w, size_t n, double value) {
    dev_enter(d);
#pragma omp parallel for num_threads(d->threads) if (n > DEV_PARALLEL_MIN) schedule(static)
    for (size_t i = 0; i < n; i++) w[i] = (real)value;
    dev_leave(d);
}
