// What the op tests are made of: a device whose memory is poisoned and closed to the host, inputs that `real` holds
// exactly, comparison under a stated bound, finite differences.
// Everything handed out belongs to the Lab.
#ifndef MOE_TESTS_LAB_H
#define MOE_TESTS_LAB_H
#include "kernels/device.h"
#include <float.h>

#ifdef REAL_DOUBLE
#define REAL_EPS DBL_EPSILON
#define REAL_TINY 1e-300 // below it, rounding is no longer relative
#else
#define REAL_EPS (double)FLT_EPSILON
#define REAL_TINY 1e-36
#endif
#ifdef REAL_BF16 // arithmetic is fp32's; a number kept in `real` is rounded to 8 bits: 2^15 roundings, and a little
#define REAL_STORE 33000.0
#else
#define REAL_STORE 0.0
#endif
static inline double lab_kept(double x) { return REAL_STORE * REAL_EPS * (x < 0 ? -x : x); } // what keeping x in `real` may cost
#define FD_ERR 1e-10 // relative error that lab_slope may have of its own

// How a program ends that reads back what an op left after it found a plan's fault on the device. Emulated, the kernel's stop is
// the program's (134: 128 + SIGABRT).
#ifdef BACKEND_emu
enum { LAB_FAULT = 134 };
#else
enum { LAB_FAULT = 6 };
#endif

typedef struct Lab {
    Dev *d;
    uint64_t hash;      // of every byte that was read back: equal for every number of threads
    uint64_t draws;     // random numbers used so far
    struct LabNode *nodes;
} Lab;
Lab *lab_open(int threads);
uint64_t lab_close(Lab *l); // the hash

// Runs `body` over every row of `dims` with 1, 2 and 3 threads and asserts that all read the same bits back.
#define LAB_DIMS 4
void lab_threads(void (*body)(Lab *l, const int *dim), const int (*dims)[LAB_DIMS], int n);

// ---- host arrays -----------------------------------------------------------------------------------------------------
double *lab_zeros(Lab *l, size_t n);
double *lab_random(Lab *l, size_t n, double lo, double hi); // uniform, rounded to real
int *lab_ints(Lab *l, size_t n, int below);                 // 0..below-1
int *lab_filled(Lab *l, size_t n, int value);

// ---- to the device and back ------------------------------------------------------------------------------------------
real *lab_real(Lab *l, const double *x, size_t n); // x NULL: poisoned, for an output
wide *lab_wide(Lab *l, const double *x, size_t n);
int *lab_int(Lab *l, const int *x, size_t n);
void *lab_bytes(Lab *l, const void *x, size_t bytes);
void *lab_get_bytes(Lab *l, const void *x, size_t bytes);
double *lab_get(Lab *l, const real *x, size_t n);
double *lab_get_wide(Lab *l, const wide *x, size_t n);
int *lab_get_int(Lab *l, const int *x, size_t n);

// ---- judgement -------------------------------------------------------------------------------------------------------
// Asserts |got - want| <= bound for every element (NaN fails), and that the same check fails once any one of a few chosen
// elements is off by ten times its bound.
void lab_close_to(const char *what, const double *got, const double *want, const double *bound, size_t n);
void lab_equal(const char *what, const double *got, const double *want, size_t n); // as numbers, no bound
void lab_equal_int(const char *what, const int *got, const int *want, size_t n);
void lab_poisoned(const char *what, const double *got, size_t n); // never written

// d loss / d *x by a five-point difference with steps of h: error about 1e-12 of loss'' scale in double, plus rounding / h
double lab_slope(double (*loss)(const void *ctx), const void *ctx, double *x, double h);
#endif
