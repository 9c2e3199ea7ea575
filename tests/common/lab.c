#include "tests/common/lab.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

typedef struct LabNode {
    struct LabNode *next;
    double align;
} LabNode;

// tests/emu has it: the order in which a block's threads run takes the place of their number
void lab_order(int run) __attribute__((weak));

Lab *lab_open(int threads) {
    if (lab_order) lab_order(threads - 1);
    Lab *l = host_alloc(sizeof *l);
    l->d = dev_init((DevOptions){.threads = threads, .poison = 1, .strict = 1});
    l->hash = FNV1A_START;
    return l;
}

uint64_t lab_close(Lab *l) {
    uint64_t hash = l->hash;
    for (LabNode *p = l->nodes, *next; p; p = next) {
        next = p->next;
        free(p);
    }
    dev_free(l->d);
    free(l);
    return hash;
}

void lab_threads(void (*body)(Lab *l, const int *dim), const int (*dims)[LAB_DIMS], int n) {
    for (int i = 0; i < n; i++) {
        uint64_t first = 0;
        for (int threads = 1; threads <= 3; threads++) {
            Lab *l = lab_open(threads);
            body(l, dims[i]);
            uint64_t hash = lab_close(l);
            if (threads == 1) first = hash;
            if (hash != first)
                fail_msg("dims %d %d %d %d: %d threads give other bits than one", dims[i][0], dims[i][1], dims[i][2], dims[i][3],
                         threads);
        }
    }
}

// ---- host arrays -----------------------------------------------------------------------------------------------------
static void *take(Lab *l, size_t bytes) {
    LabNode *p = host_alloc(sizeof *p + bytes);
    p->next = l->nodes;
    l->nodes = p;
    return p + 1;
}

static uint64_t draw(Lab *l) { // splitmix64, so that the tests do not lean on the generator they might have to test
    uint64_t z = ++l->draws * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

double *lab_zeros(Lab *l, size_t n) { return take(l, n * sizeof(double)); }

double *lab_random(Lab *l, size_t n, double lo, double hi) {
    double *x = lab_zeros(l, n);
    for (size_t i = 0; i < n; i++) x[i] = real_value(real_of(lo + (hi - lo) * (double)(draw(l) >> 11) * 0x1p-53));
    return x;
}

int *lab_ints(Lab *l, size_t n, int below) {
    int *x = take(l, n * sizeof(int));
    for (size_t i = 0; i < n; i++) x[i] = (int)(draw(l) % (uint64_t)below);
    return x;
}

int *lab_filled(Lab *l, size_t n, int value) {
    int *x = take(l, n * sizeof(int));
    for (size_t i = 0; i < n; i++) x[i] = value;
    return x;
}

// ---- to the device and back ------------------------------------------------------------------------------------------
void *lab_bytes(Lab *l, const void *x, size_t bytes) {
    void *p = dev_alloc(l->d, bytes, "test array");
    if (x) dev_upload(l->d, p, x, bytes);
    return p;
}

real *lab_real(Lab *l, const double *x, size_t n) {
    real *r = take(l, n * sizeof(real));
    for (size_t i = 0; x && i < n; i++) r[i] = real_of(x[i]);
    return lab_bytes(l, x ? r : NULL, n * sizeof(real));
}

wide *lab_wide(Lab *l, const double *x, size_t n) {
    wide *r = take(l, n * sizeof(wide));
    for (size_t i = 0; x && i < n; i++) r[i] = (wide)x[i];
    return lab_bytes(l, x ? r : NULL, n * sizeof(wide));
}

int *lab_int(Lab *l, const int *x, size_t n) { return lab_bytes(l, x, n * sizeof(int)); }

void *lab_get_bytes(Lab *l, const void *x, size_t bytes) {
    void *r = take(l, bytes);
    dev_download(l->d, r, x, bytes);
    l->hash = fnv1a(l->hash, r, bytes);
    return r;
}

double *lab_get(Lab *l, const real *x, size_t n) {
    const real *r = lab_get_bytes(l, x, n * sizeof(real));
    double *y = lab_zeros(l, n);
    for (size_t i = 0; i < n; i++) y[i] = real_value(r[i]);
    return y;
}

double *lab_get_wide(Lab *l, const wide *x, size_t n) {
    const wide *r = lab_get_bytes(l, x, n * sizeof(wide));
    double *y = lab_zeros(l, n);
    for (size_t i = 0; i < n; i++) y[i] = r[i];
    return y;
}

int *lab_get_int(Lab *l, const int *x, size_t n) { return lab_get_bytes(l, x, n * sizeof(int)); }

// ---- judgement -------------------------------------------------------------------------------------------------------
static size_t first_off(const double *got, const double *want, const double *bound, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!(fabs(got[i] - want[i]) <= bound[i])) return i;
    return n;
}

void lab_close_to(const char *what, const double *got, const double *want, const double *bound, size_t n) {
    size_t i = first_off(got, want, bound, n);
    if (i < n) fail_msg("%s[%zu] of %zu is %.17g, expected %.17g within %.3g", what, i, n, got[i], want[i], bound[i]);
    double *wrong = host_alloc(n * sizeof(double));
    memcpy(wrong, got, n * sizeof(double));
    for (size_t k = 0; n && k < 3; k++) {
        i = k * (n - 1) / 2;
        wrong[i] = bound[i] > 0 ? got[i] + 10 * bound[i] : nextafter(got[i], INFINITY);
        if (first_off(wrong, want, bound, n) != i)
            fail_msg("%s[%zu]: an error of ten times the bound %.3g passes", what, i, bound[i]);
        wrong[i] = got[i];
    }
    free(wrong);
}

void lab_equal(const char *what, const double *got, const double *want, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!(got[i] == want[i])) fail_msg("%s[%zu] of %zu is %.17g, expected %.17g", what, i, n, got[i], want[i]);
}

void lab_equal_int(const char *what, const int *got, const int *want, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (got[i] != want[i]) fail_msg("%s[%zu] of %zu is %d, expected %d", what, i, n, got[i], want[i]);
}

void lab_poisoned(const char *what, const double *got, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!isnan(got[i])) fail_msg("%s: element %zu past the valid rows was written", what, i);
}

double lab_slope(double (*loss)(const void *ctx), const void *ctx, double *x, double h) {
    double at = *x, f[4];
    for (int i = 0; i < 4; i++) {
        *x = at + h * (double[]){-2, -1, 1, 2}[i];
        f[i] = loss(ctx);
    }
    *x = at;
    return (f[0] - f[3] + 8 * (f[2] - f[1])) / (12 * h);
}
