// build/bench: the ops a step is made of, against ceilings measured in the same run. `--json` for machines,
// `--ceilings` for nothing but those, as JSON. Whole steps: scripts/bench_steps; `make bench` runs both.
//   build/bench [--threads N] [--json] [--ceilings] [--seconds S per op]
#include "kernels/check.h"
#include "kernels/device.h"
#include "kernels/flags.h"
#include "kernels/start.h"
#include <math.h>
#ifdef BACKEND_cpu
#include <omp.h>
#endif
#include <string.h>
#include <time.h>

typedef struct Bench {
    Dev *d;
    int json, first, calls; // calls timed together: on a GPU many, whose waiting for it then counts little
    void *any;              // device memory
    double seconds, peak_gflops, peak_gbs, largest_share;
} Bench;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void finish(Bench *b) { // what was called is done
    char any;
    dev_download(b->d, &any, b->any, 1);
}

// Best time of one call, in seconds, of as many as fit into b->seconds (at least three times b->calls).
#define BEST(b, call)                                                     \
    ({                                                                    \
        double best = 1e30, end = now() + (b)->seconds;                   \
        for (int i_ = 0; i_ < 3 || now() < end; i_++) {                   \
            double t_ = now();                                            \
            for (int c_ = 0; c_ < (b)->calls; c_++) call;                 \
            finish(b);                                                    \
            best = fmin(best, (now() - t_) / (b)->calls);                 \
        }                                                                 \
        best;                                                             \
    })

// flops and bytes of one call, whichever bounds it; 0 = not counted
static void row(Bench *b, const char *op, const char *shape, double seconds, double flops, double bytes) {
    double gflops = flops / seconds * 1e-9, gbs = bytes / seconds * 1e-9;
    double share = flops > 0 ? gflops / b->peak_gflops : gbs / b->peak_gbs;
    if (share > b->largest_share) b->largest_share = share;
    if (b->json)
        printf("%s{\"op\":\"%s\",\"shape\":\"%s\",\"us\":%.2f,\"gflops\":%.2f,\"gbs\":%.2f,\"share_of_peak\":%.4f}", b->first ? "" : ",\n  ", op,
               shape, seconds * 1e6, gflops, gbs, share);
    else if (flops > 0) printf("| %-16s | %-26s | %10.1f | %8.1f GFLOP/s | %5.1f %% |\n", op, shape, seconds * 1e6, gflops, 100 * share);
    else printf("| %-16s | %-26s | %10.1f | %8.1f GB/s    | %5.1f %% |\n", op, shape, seconds * 1e6, gbs, 100 * share);
    b->first = 0;
}

static real *array(Dev *d, size_t n) {
    real *x = dev_alloc(d, n * sizeof(real), "bench");
    dev_init_normal(d, x, n, 1, 2, 0, 1);
    return x;
}

static wide *wide_array(Dev *d, size_t n) {
    wide *x = dev_alloc(d, n * sizeof(wide), "bench");
    dev_zero(d, x, n * sizeof(wide));
    return x;
}

// The ceilings: multiply-adds (CPU) or a large product by cuBLAS (GPU), and a large copy.
static double flops_peak(Bench *b, int threads);

static void products(Bench *b, const char *name, int M, int N, int K) {
    char shape[64];
    real *x = array(b->d, SIZE(M, K)), *w = array(b->d, SIZE(N, K)), *y = array(b->d, SIZE(M, N));
    wide *dw = wide_array(b->d, SIZE(N, K));
    snprintf(shape, sizeof shape, "%s %dx%dx%d", name, M, N, K);
    double flops = 2.0 * M * N * K;
    row(b, "linear", shape, BEST(b, dev_linear(b->d, y, NULL, x, w, M, N, K)), flops, 0);
    row(b, "linear_dx", shape, BEST(b, dev_linear_dx(b->d, x, NULL, y, w, M, N, K)), flops, 0);
    row(b, "linear_dw", shape, BEST(b, dev_linear_dw(b->d, dw, y, x, M, N, K)), flops, 0);
}

static void experts(Bench *b, int E, int rows, int N, int K) {
    char shape[64];
    int *off = dev_alloc(b->d, SIZE(E + 1, sizeof(int)), "bench"), M = E * rows;
    for (int e = 0; e <= E; e++) {
        int at = e * rows;
        dev_upload(b->d, off + e, &at, sizeof at);
    }
    real *x = array(b->d, SIZE(M, K)), *w = array(b->d, SIZE(E, N, K)), *y = array(b->d, SIZE(M, N));
    wide *dw = wide_array(b->d, SIZE(E, N, K));
    const real **table = dev_alloc(b->d, SIZE(E, sizeof *table), "bench");
    wide **table_dw = dev_alloc(b->d, SIZE(E, sizeof *table_dw), "bench");
    for (int e = 0; e < E; e++) {
        const real *we = w + SIZE(e, N, K);
        wide *dwe = dw + SIZE(e, N, K);
        dev_upload(b->d, table + e, &we, sizeof we);
        dev_upload(b->d, table_dw + e, &dwe, sizeof dwe);
    }
    snprintf(shape, sizeof shape, "%d experts %dx%dx%d", E, rows, N, K);
    double flops = 2.0 * M * N * K;
    row(b, "group_linear", shape, BEST(b, dev_group_linear(b->d, y, x, table, off, E, M, N, K)), flops, 0);
    row(b, "group_linear_dx", shape, BEST(b, dev_group_linear_dx(b->d, x, y, table, off, E, M, N, K)), flops, 0);
    row(b, "group_linear_dw", shape, BEST(b, dev_group_linear_dw(b->d, table_dw, y, x, off, E, M, N, K)), flops, 0);
}

static void attention(Bench *b, int B, int T, int NH, int NKV, int HS) {
    char shape[64];
    Dev *d = b->d;
    int BT = B * T;
    size_t nq = SIZE(BT, NH, HS), nk = SIZE(BT, NKV, HS);
    real *q = array(d, nq), *k = array(d, nk), *v = array(d, nk), *o = array(d, nq);
    real *dq = array(d, nq), *dk = array(d, nk), *dv = array(d, nk), *dout = array(d, nq);
    wide *lse = dev_alloc(d, SIZE(B, NH, T, sizeof(wide)), "bench");
    AttnShape s = {.B = B, .Tq = T, .Tk = T, .NH = NH, .NKV = NKV, .HS = HS, .ldq = NH * HS, .ldk = NKV * HS, .ldv = NKV * HS};
    snprintf(shape, sizeof shape, "B%d T%d %d/%d heads of %d", B, T, NH, NKV, HS);
    double flops = 2.0 * B * NH * ((double)T * (T + 1) / 2) * HS * 2;
    row(b, "attention", shape, BEST(b, dev_attention(d, o, lse, q, k, v, NULL, s)), flops, 0);
    row(b, "attention_bwd", shape, BEST(b, dev_attention_bwd(d, dq, dk, dv, dout, o, lse, q, k, v, NULL, s)), 2.5 * flops, 0);
}

static void streams(Bench *b, int M, int C, int V) {
    char shape[64];
    Dev *d = b->d;
    size_t n = SIZE(M, C), word = sizeof(real);
    real *x = array(d, 2 * n), *y = array(d, 2 * n), *w = array(d, C), *dx = array(d, 2 * n);
    wide *rstd = wide_array(d, M), *one = wide_array(d, 1), *dw = wide_array(d, C), whole = 1;
    wide *m = wide_array(d, 2 * n), *v = wide_array(d, 2 * n), *g = wide_array(d, 2 * n);
    wide *master = sizeof(real) == sizeof(wide) ? NULL : wide_array(d, 2 * n);
    dev_upload(d, one, &whole, sizeof whole);
    snprintf(shape, sizeof shape, "%dx%d", M, C);
    row(b, "rmsnorm", shape, BEST(b, dev_rmsnorm(d, y, rstd, x, w, M, C, 1e-6)), 0, 2.0 * n * word);
    row(b, "rmsnorm_bwd", shape, BEST(b, dev_rmsnorm_bwd(d, dx, dw, NULL, y, x, w, rstd, M, C)), 0, 3.0 * n * word);
    row(b, "swiglu", shape, BEST(b, dev_swiglu(d, y, x, NULL, NULL, M, C)), 0, 3.0 * n * word);
    row(b, "swiglu_bwd", shape, BEST(b, dev_swiglu_bwd(d, dx, y, NULL, y, x, NULL, NULL, M, C)), 0, 6.0 * n * word);
    Update set = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .step = 10}, *o = dev_alloc(b->d, sizeof *o, "bench");
    dev_upload(b->d, o, &set, sizeof set);
    row(b, "adamw", shape, BEST(b, dev_adamw(d, x, master, m, v, g, one, 2 * n, o)), 0,
        2.0 * n * (master ? word + 7 * sizeof(wide) : 7 * word));
    int rows = 512, *target = dev_alloc(d, rows * sizeof(int), "bench");
    dev_zero(d, target, rows * sizeof(int));
    real *logits = array(d, SIZE(rows, V));
    wide *nll = dev_alloc(d, rows * sizeof(wide), "bench");
    snprintf(shape, sizeof shape, "%dx%d", rows, V);
    row(b, "cross_entropy", shape, BEST(b, dev_cross_entropy(d, nll, logits, target, rows, V, 1, 1)), 0, 2.0 * rows * V * word);
}

#ifdef BACKEND_cpu
enum { GPU = 0 };
static void shapes(Bench *b) {
    products(b, "demo qkv", 512, 256, 128);
    products(b, "tiny qkv", 2048, 512, 256);
    products(b, "small head", 512, 50304, 512);
    experts(b, 8, 512, 1024, 256);
    experts(b, 64, 256, 256, 256);
    experts(b, 64, 18, 256, 256);
    experts(b, 16, 256, 2048, 512);
    attention(b, 4, 128, 4, 2, 32);
    attention(b, 8, 256, 8, 4, 32);
    attention(b, 4, 512, 8, 4, 64);
    streams(b, 8192, 512, 50304);
}
#else
enum { GPU = 1 };
static void shapes(Bench *b) {
    products(b, "gpt2 qkv", 16384, 2304, 768);
    products(b, "head", 4096, 50304, 2048);
    experts(b, 64, 1024, 1024, 1024);
    experts(b, 64, 512, 1024, 1024);
    experts(b, 128, 64, 2048, 1536);
    attention(b, 16, 1024, 12, 12, 64);
    attention(b, 4, 4096, 16, 4, 128);
    streams(b, 16384, 2048, 50304);
}

static double flops_peak(Bench *b, int threads) {
    (void)threads;
    const int n = 8192;
    real *x = array(b->d, SIZE(n, n)), *w = array(b->d, SIZE(n, n)), *y = array(b->d, SIZE(n, n));
    return 2.0 * n * n * n / BEST(b, dev_linear(b->d, y, NULL, x, w, n, n, n)) * 1e-9;
}
#endif

int main(int argc, char **argv) {
    start_threads(argv);
    int64_t threads = 0;
    int json = 0, ceilings = 0;
    double seconds = 0.3;
    Flag flags[] = {{"threads", FLAG_INT, &threads, 0, 1024, NULL, "threads; 0 = all cores", 0},
                    {"json", FLAG_BOOL, &json, 0, 0, NULL, "JSON instead of a table", 0},
                    {"ceilings", FLAG_BOOL, &ceilings, 0, 0, NULL, "only the ceilings, as JSON", 0},
                    {"seconds", FLAG_DOUBLE, &seconds, 0, 60, NULL, "time for each op (s)", 0},
                    {0}};
    flags_parse(flags, "bench", "times each op of a step against ceilings (multiply-adds, a copy) measured in the same run", argc, argv);
    Bench b = {.d = dev_init((DevOptions){.threads = (int)threads}), .json = json, .seconds = seconds, .first = 1, .calls = GPU ? 20 : 1};
    size_t big = (GPU ? 1024u : 256u) << 20;
    char *from = dev_alloc(b.d, big, "bench"), *to = dev_alloc(b.d, big, "bench");
    b.any = from;
    b.peak_gflops = flops_peak(&b, (int)threads);
    dev_fill(b.d, (real *)from, big / sizeof(real), 1);
    b.peak_gbs = 2.0 * big / BEST(&b, dev_copy(b.d, to, from, big)) * 1e-9;
    if (ceilings) {
        if (isnan(b.peak_gflops)) printf("{\"gflops\": null, \"copy_gbs\": %.2f}\n", b.peak_gbs);
        else printf("{\"gflops\": %.1f, \"copy_gbs\": %.2f}\n", b.peak_gflops, b.peak_gbs);
        dev_free(b.d);
        return 0;
    }
    if (json) printf("{\"device\":\"%s\",\"peak_gflops\":%.1f,\"copy_gbs\":%.1f,\"ops\":[\n  ", dev_name(b.d), b.peak_gflops, b.peak_gbs);
    else {
        printf("%s. Ceilings measured now: %.0f GFLOP/s of %s, %.1f GB/s of a %zu MiB copy (read + written).\n\n",
               dev_name(b.d), b.peak_gflops, GPU ? "a product by cuBLAS" : "fused multiply-adds", b.peak_gbs, big >> 20);
        printf("| op               | shape                      |   best, us |               rate | share   |\n|---|---|---|---|---|\n");
    }
    shapes(&b);
    if (json) printf("\n]}\n");
    else if (b.largest_share > 1.05)
        printf("\nShares above 100 %%: the machine was busy while the ceilings were measured, or the data of an op stayed in its caches.\n");
    dev_free(b.d);
    return 0;
}

#ifdef BACKEND_cpu
// Peak rate of independent fused multiply-adds on 8-float vectors, all threads at once: what no kernel can pass. Ten chains
// hide the latency; they are named one by one because the compiler keeps an array of them in memory.
typedef float Vec __attribute__((vector_size(32)));
#define CHAINS(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9)
__attribute__((target("avx2,fma"), noinline)) static float fma_loop(long n) {
    Vec a = {1.0f, 0.5f}, x = a * 0.9999f;
#define START(k) Vec s##k = a * (float)k;
    CHAINS(START)
    for (long i = 0; i < n; i++) {
#define STEP(k) s##k = s##k * x + a;
        CHAINS(STEP)
        __asm__ volatile("" : "+x"(x)); // the loop may not be folded
    }
#define ADD(k) a += s##k;
    CHAINS(ADD)
    return a[0] + a[1];
}

static double flops_peak(Bench *b, int threads) {
    (void)b;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return NAN;
    const long n = 20000000;
    double best = 0;
    for (int round = 0; round < 5; round++) {
        int team = 1;
        float sink = 0;
        double t = now();
#pragma omp parallel num_threads(threads > 0 ? threads : omp_get_max_threads()) reduction(+ : sink)
        {
#pragma omp single
            team = omp_get_num_threads();
            sink += fma_loop(n);
        }
        double rate = 1e-9 * team * n * 10 * 16 / (now() - t) * sizeof(float) / sizeof(real);
        if (sink != 0 && rate > best) best = rate;
    }
    return best;
}
#endif
