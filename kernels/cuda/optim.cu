// Sums, the optimizer and initial values on the GPU. One pass over memory each.
#define HOSTDEV static inline __host__ __device__
#include "kernels/cuda/dev.h"
#include "kernels/philox.h"

// ---- sums: a fixed grid, so that the order depends on n alone ----------------------------------------------------------
constexpr int PARTS = 512, WARPS = THREADS / WARP;

// The block's sum, in thread 0
static __device__ __forceinline__ double block_sum(double x) {
    SHARED(double, part, [WARPS]);
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = x;
    __syncthreads();
    double sum = 0;
    for (int i = 0; i < WARPS; i++) sum += part[i];
    return sum;
}

// y NULL: plain sum
static __global__ void dot_kernel(double *part, const wide *x, const wide *y, size_t n) {
    double sum = 0;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += (size_t)PARTS * THREADS) sum += y ? (double)x[i] * y[i] : (double)x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) part[blockIdx.x] = sum;
}

static __global__ void dot_end_kernel(double *out, const double *part, int parts, double scale) {
    double sum = 0;
    for (int i = (int)threadIdx.x; i < parts; i += THREADS) sum += part[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *out += scale * sum;
}

static void dot(Dev *d, double *out, const wide *x, const wide *y, size_t n, double scale) {
    double *part = (double *)dev_work(d, PARTS * sizeof(double));
    int parts = n < (size_t)PARTS * THREADS ? (int)ceil_div((int64_t)n, THREADS) : PARTS;
    if (parts == 0) return;
    LAUNCH(dot_kernel, (unsigned)parts, THREADS, 0, d->stream, part, x, y, n);
    LAUNCH(dot_end_kernel, 1, THREADS, 0, d->stream, out, part, parts, scale);
}

void dev_sum(Dev *d, double *out, const wide *x, size_t n) { dot(d, out, x, nullptr, n, 1); }
void dev_sumsq(Dev *d, double *out, const wide *x, size_t n) { dot(d, out, x, x, n, 1); }
void dev_dot(Dev *d, double *out, const wide *x, const wide *y, size_t n, double scale) { dot(d, out, x, y, n, scale); }

// ---- optimizer -------------------------------------------------------------------------------------------------------
static __global__ void veto_kernel(double *veto, const double *sum, const int *bad, int n) {
    int fault = !isfinite(*sum);
    for (int i = (int)threadIdx.x; bad && i < n; i += WARP) fault |= bad[i] != 0;
    fault = __any_sync(WARP_ALL, fault);
    if (threadIdx.x == 0) *veto = fault ? (double)NAN : 0;
}

void dev_veto(Dev *d, double *veto, const double *sum, const int *bad, int n) { LAUNCH(veto_kernel, 1, WARP, 0, d->stream, veto, sum, bad, n); }

static __global__ void total_kernel(double *x, int n) {
    for (int i = 1; i < n; i++) x[0] += x[i];
}

void dev_total(Dev *d, double *x, int n) { LAUNCH(total_kernel, 1, 1, 0, d->stream, x, n); }

static __global__ void clip_kernel(wide *factor, const double *sumsq, double max_norm) {
    double norm = sqrt(*sumsq);
    *factor = (wide)(!isfinite(norm) ? (double)NAN : max_norm > 0 && norm > max_norm ? max_norm / norm : 1);
}

void dev_clip_factor(Dev *d, wide *factor, const double *sumsq, double max_norm) {
    LAUNCH(clip_kernel, 1, 1, 0, d->stream, factor, sumsq, max_norm);
}

// The weight in full width: the master where there is one
static __device__ __forceinline__ wide weight_get(const real *w, const wide *master, size_t i) { return master ? master[i] : up(w[i]); }
static __device__ __forceinline__ void weight_put(real *w, wide *master, size_t i, wide x) {
    if (master) master[i] = x;
    w[i] = down(x);
}

static __global__ void adamw_kernel(real *w, wide *master, wide *m, wide *v, const wide *g, const wide *factor, size_t n, const Update *o) {
    SHARED(wide, unbias, [2]); // powers in double, once per block
    if (threadIdx.x < 2) unbias[threadIdx.x] = (wide)(1 / (1 - pow(threadIdx.x ? o->beta2 : o->beta1, (double)o->step)));
    __syncthreads();
    wide scale = *factor, b1 = (wide)o->beta1, r1 = (wide)(1 - o->beta1), b2 = (wide)o->beta2, r2 = (wide)(1 - o->beta2), eps = (wide)o->eps;
    wide lr = (wide)o->lr, decay = (wide)o->decay, u1 = unbias[0], u2 = unbias[1];
    if (!isfinite(scale)) return;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        wide gi = g[i] * scale, x = weight_get(w, master, i);
        wide mi = b1 * m[i] + r1 * gi, vi = b2 * v[i] + r2 * (gi * gi);
        m[i] = mi;
        v[i] = vi;
        weight_put(w, master, i, x - lr * (mi * u1 / (sqrtf(vi * u2) + eps) + decay * x));
    }
}

void dev_adamw(Dev *d, real *w, wide *master, wide *m, wide *v, const wide *g, const wide *factor, size_t n, const Update *o) {
    LAUNCH(adamw_kernel, grid_for(d, n, THREADS), THREADS, 0, d->stream, w, master, m, v, g, factor, n, o);
}

static __global__ void sgd_kernel(real *w, wide *master, const wide *g, const wide *factor, size_t n, const Update *o) {
    wide scale = *factor, lr = (wide)o->lr, decay = (wide)o->decay;
    if (!isfinite(scale)) return;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        wide x = weight_get(w, master, i);
        weight_put(w, master, i, x - lr * (scale * g[i] + decay * x));
    }
}

void dev_sgd(Dev *d, real *w, wide *master, const wide *g, const wide *factor, size_t n, const Update *o) {
    LAUNCH(sgd_kernel, grid_for(d, n, THREADS), THREADS, 0, d->stream, w, master, g, factor, n, o);
}

static __global__ void widen_kernel(wide *y, const real *x, size_t n) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) y[i] = up(x[i]);
}
static __global__ void narrow_kernel(real *y, const wide *x, size_t n) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) y[i] = down(x[i]);
}

void dev_widen(Dev *d, wide *y, const real *x, size_t n) { LAUNCH(widen_kernel, grid_for(d, n, THREADS), THREADS, 0, d->stream, y, x, n); }
void dev_narrow(Dev *d, real *y, const wide *x, size_t n) { LAUNCH(narrow_kernel, grid_for(d, n, THREADS), THREADS, 0, d->stream, y, x, n); }

// In integers, so that an even count is exactly even: sign(mean - count) = sign(sum - E count)
static __global__ void bias_kernel(wide *bias, const int64_t *count, const wide *factor, int E, double rate) {
    int64_t sum = 0;
    if (!isfinite(*factor)) return;
    for (int e = (int)threadIdx.x; e < E; e += WARP) sum += count[e];
    sum = warp_sum(sum);
    for (int e = (int)threadIdx.x; e < E; e += WARP) {
        int64_t short_of = sum - E * count[e];
        bias[e] += (wide)(rate * ((short_of > 0) - (short_of < 0)));
    }
}

void dev_bias_update(Dev *d, wide *bias, const int64_t *count, const wide *factor, int E, double rate) {
    LAUNCH(bias_kernel, 1, WARP, 0, d->stream, bias, count, factor, E, rate);
}

// ---- initial values ----------------------------------------------------------------------------------------------------
static __global__ void init_normal_kernel(real *w, size_t n, uint64_t seed, uint64_t stream, uint64_t first, double std) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        w[i] = down((float)(std * philox_normal(seed, stream, first + i)));
}

void dev_init_normal(Dev *d, real *w, size_t n, uint64_t seed, uint64_t stream, uint64_t first, double std) {
    LAUNCH(init_normal_kernel, grid_for(d, n, THREADS), THREADS, 0, d->stream, w, n, seed, stream, first, std);
}

static __global__ void fill_kernel(real *w, size_t n, float value) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) w[i] = down(value);
}

void dev_fill(Dev *d, real *w, size_t n, double value) {
    LAUNCH(fill_kernel, grid_for(d, n, THREADS), THREADS, 0, d->stream, w, n, (float)value);
}
