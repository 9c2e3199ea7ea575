// Products on the CPU: what gemm.c (which work, on which thread) and gemm_task.h (the work itself) share.
#ifndef MOE_CPU_GEMM_H
#define MOE_CPU_GEMM_H
#include "kernels/device.h"

typedef enum {
    GEMM_NT, // c[i,j] = z[i,j] + sum_k a[i,k] b[j,k]
    GEMM_NN, // c[i,j] = z[i,j] + sum_k a[i,k] b[k,j]
    GEMM_TN, // c[i,j] = z[i,j] + sum_k a[k,i] b[k,j]
} GemmForm;

typedef struct Product { // all arrays dense; c, z (m,n), z may be c or NULL
    GemmForm form;
    real *c;
    const real *z, *a, *b;
    int m, n, k;
} Product;

// The sum over k is cut at multiples of GEMM_KC: ((z + block 0) + block 1) + ..., each block from 0 with k ascending.
// This is the only thing an element's bits depend on; all other sizes here are free.
enum {
    GEMM_KC = 2048 / sizeof(real),
    GEMM_MR = 6,                      // rows of a register tile
    GEMM_NR = 64 / sizeof(real),      // columns of a register tile: two vectors
    GEMM_MC = 48,                     // rows of a packed block of a: about 100 KB of the second-level cache
    GEMM_NG = 4 * GEMM_NR,            // columns packed at a time, right before their first use
    GEMM_NC = 256,                    // columns of a packed block of b; form TN, whose rows of a are dear to pack: twice as many
    GEMM_PACKED = 4 * GEMM_KC * GEMM_NC, // elements of packed b: rows of c stay in the cache from one block of the sum to the next
    GEMM_FEW = 96 / sizeof(real),     // up to so many rows (three vectors) are worth a kernel of their own
    GEMM_LINE = 64 / sizeof(real),    // strides get one line more than a power of two, which would map to few cache sets
    GEMM_ROW = GEMM_KC + GEMM_LINE,   // from one row of packed a to the next (not transposed)
    GEMM_APANEL = GEMM_KC * GEMM_MR + GEMM_LINE, // from one panel of GEMM_MR columns of packed a to the next (transposed)
    GEMM_BPANEL = GEMM_KC * GEMM_NR + GEMM_LINE, // from one panel of GEMM_NR columns of packed b to the next
};

static inline int gemm_columns(GemmForm form) { return form == GEMM_TN ? 2 * GEMM_NC : GEMM_NC; }

typedef struct GemmScratch { // one thread's, on its stack: about 2.2 MB
    _Alignas(64) real a[GEMM_MC * GEMM_ROW];
    _Alignas(64) real b[GEMM_PACKED / GEMM_KC / GEMM_NR * GEMM_BPANEL];
} GemmScratch;

// Elements i0..i1, j0..j1 of a product; j1 - j0 <= gemm_columns(p->form)
typedef void GemmTask(const Product *p, int i0, int i1, int j0, int j1, GemmScratch *s);
#endif
