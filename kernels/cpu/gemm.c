// Products y = x w^T and their gradients, plain and grouped, by our own packed kernels.
// A product is cut into blocks that threads take in turn; no element is shared between blocks, so neither the number of
// threads nor the cut shows in the result. -DCPU_PLAIN leaves out the kernels for AVX2 (as a machine without it would).
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/dev.h"
#include <string.h>

static int round_up(int x, int to) { return (x + to - 1) / to * to; }

#if defined(__x86_64__) && !defined(CPU_PLAIN)
#define ISA(name) name##_avx2
#define ISA_FN __attribute__((target("avx2,fma")))
#include "kernels/cpu/tile.h"
#include "kernels/cpu/gemm_task.h"
#undef ISA
#undef ISA_FN
#endif
#define ISA(name) name##_plain
#define ISA_FN
#include "kernels/cpu/tile.h"
#include "kernels/cpu/gemm_task.h"
#undef ISA
#undef ISA_FN

static GemmTask *best_task(void) {
#if defined(__x86_64__) && !defined(CPU_PLAIN)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return gemm_task_avx2;
#endif
    return gemm_task_plain;
}

typedef struct Batch { // J products of one form; a plain product has J = 1
    GemmForm form;
    real *c;
    const real *z, *a, *b;
    real *const *c_of;       // instead of c, where the groups' c are apart (TN)
    const real *const *b_of; // instead of b, where the groups' b are apart (NT, NN)
    const int *off;          // rows of group j: off[j]..off[j+1]; of c and a, in form TN of a and b; NULL: J = 1
    int J, M, n, k;          // M rows in all; n, k of every product (form TN: c is (n,k), the sum runs over rows)
} Batch;

static Product product_of(const Batch *b, int j) {
    int first = b->off ? b->off[j] : 0, rows = (b->off ? b->off[j + 1] : b->M) - first;
    Product p = {.form = b->form};
    size_t r = (size_t)first, n = (size_t)b->n, k = (size_t)b->k;
    if (b->form == GEMM_TN) {
        p.c = b->c_of ? b->c_of[j] : b->c;
        p.z = p.c;
        p.a = b->a + r * n;
        p.b = b->b + r * k;
        p.m = rows ? b->n : 0; // a group without rows adds nothing
        p.n = b->k;
        p.k = rows;
    } else {
        p.c = b->c + r * n;
        p.z = b->z ? b->z + r * n : NULL;
        p.a = b->a + r * k;
        p.b = b->b_of ? b->b_of[j] : b->b;
        p.m = rows;
        p.n = b->n;
        p.k = b->k;
    }
    return p;
}

typedef struct Cut { // walks all blocks in order; every thread walks the same ones
    const Batch *batch;
    Product p;
    int j, i0, j0, columns; // where the next block starts, in product p = the batch's j-th, and how wide it is
    double left, minimum;   // multiply-adds not yet cut, and in the smallest block worth a turn
    int share;              // a block takes about 1/share of what is left: threads finish together, and pack seldom
} Cut;

typedef struct Block {
    Product p;
    int i0, i1, j0, j1;
} Block;

static int smaller(int x, int y) { return x < y ? x : y; }

// Every block packs its rows of a and its columns of b: few, large blocks, for forms NT and NN cut by columns first. Form TN, whose
// rows of a are the dearer to pack, is cut by rows.
static int cut_columns(const Cut *c, double work) {
    int left = c->p.n - c->j0, most = smaller(left, gemm_columns(c->p.form)), least = c->p.m > 2 * GEMM_MC ? GEMM_NC : GEMM_NG;
    double n = work / ((double)c->p.m * (c->p.k + 1));
    if (c->p.form == GEMM_TN || n >= most) return most;
    int columns = n < least ? least : round_up((int)n, GEMM_NR);
    return left - columns < least ? most : columns; // no narrow rest
}

static int cut_next(Block *b, Cut *c) // the next block, or 0 at the end
{
    while (c->p.m == 0 || c->j0 >= c->p.n) {
        if (++c->j >= c->batch->J) return 0;
        c->p = product_of(c->batch, c->j);
        c->j0 = 0;
    }
    double work = c->left / c->share;
    if (work < c->minimum) work = c->minimum;
    if (c->i0 == 0) c->columns = cut_columns(c, work);
    int n = c->columns, left = c->p.m - c->i0;
    double row = (double)n * (c->p.k + 1);
    int rows = 1.25 * work >= row * left ? left : smaller(left, round_up((int)(work / row) + 1, 4 * GEMM_MR));
    *b = (Block){c->p, c->i0, c->i0 + rows, c->j0, c->j0 + n};
    c->left -= row * rows;
    c->i0 += rows;
    if (c->i0 >= c->p.m) {
        c->i0 = 0;
        c->j0 += n;
    }
    return 1;
}

static Cut cut_start(const Batch *batch, int threads_max, int *threads) {
    Cut c = {.batch = batch};
    for (int j = 0; j < batch->J; j++) {
        if (batch->off)
            CHECK_DEVICE(batch->off[j] >= 0 && batch->off[j] <= batch->off[j + 1] && batch->off[j + 1] <= batch->M,
                         "group %d has rows %d..%d of a buffer with room for %d (hint: the plan's offsets)", j, batch->off[j],
                         batch->off[j + 1], batch->M);
        Product p = product_of(batch, j);
        if (j == 0) c.p = p;
        c.left += (double)p.m * p.n * (p.k + 1);
    }
    *threads = c.left < 3e5 ? 1 : threads_max; // waking a team costs about 2 us
    if (*threads == 1) {
        c.share = 1, c.minimum = c.left;
    } else {
        c.share = *threads;
        c.minimum = c.left / (16 * *threads);
        if (c.minimum < 1e6) c.minimum = 1e6;
    }
    return c;
}

static void gemm_run(Dev *d, const Batch *batch) {
    dev_enter(d);
    int threads, taken = 0;
    Cut start = cut_start(batch, d->threads, &threads);
    GemmTask *task = best_task();
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        GemmScratch scratch;
        Cut cut = start;
        Block b;
        int mine;
#pragma omp atomic capture
        mine = taken++;
        for (int at = 0; cut_next(&b, &cut); at++) {
            if (at != mine) continue;
            task(&b.p, b.i0, b.i1, b.j0, b.j1, &scratch);
#pragma omp atomic capture
            mine = taken++;
        }
    }
    dev_leave(d);
}

void dev_linear(Dev *d, real *y, const real *add, const real *x, const real *w, int M, int N, int K) {
    gemm_run(d, &(Batch){.form = GEMM_NT, .c = y, .z = add, .a = x, .b = w, .J = 1, .M = M, .n = N, .k = K});
}

void dev_linear_dx(Dev *d, real *dx, const real *add, const real *dy, const real *w, int M, int N, int K) {
    gemm_run(d, &(Batch){.form = GEMM_NN, .c = dx, .z = add, .a = dy, .b = w, .J = 1, .M = M, .n = K, .k = N});
}

void dev_linear_dw(Dev *d, wide *dw, const real *dy, const real *x, int M, int N, int K) {
    gemm_run(d, &(Batch){.form = GEMM_TN, .c = dw, .a = dy, .b = x, .J = 1, .M = M, .n = N, .k = K});
}

void dev_group_linear(Dev *d, real *y, const real *x, const real *const *w, const int *off, int J, int M, int N, int K) {
    gemm_run(d, &(Batch){.form = GEMM_NT, .c = y, .a = x, .b_of = w, .off = off, .J = J, .M = M, .n = N, .k = K});
}

void dev_group_linear_dx(Dev *d, real *dx, const real *dy, const real *const *w, const int *off, int J, int M, int N, int K) {
    gemm_run(d, &(Batch){.form = GEMM_NN, .c = dx, .a = dy, .b_of = w, .off = off, .J = J, .M = M, .n = K, .k = N});
}

void dev_group_linear_dw(Dev *d, wide *const *dw, const real *dy, const real *x, const int *off, int J, int M, int N, int K) {
    gemm_run(d, &(Batch){.form = GEMM_TN, .c_of = dw, .a = dy, .b = x, .off = off, .J = J, .M = M, .n = N, .k = K});
}

// On this device `real` and `wide` are one type, so the router's products are the ordinary ones.
void dev_router_logits(Dev *d, wide *logits, const real *x, const real *w, int BT, int E, int C) {
    dev_linear(d, logits, NULL, x, w, BT, E, C);
}

void dev_router_logits_bwd(Dev *d, real *dx, wide *dw, const wide *dlogits, const real *x, const real *w, int BT, int E, int C) {
    dev_linear_dx(d, dx, dx, dlogits, w, BT, E, C);
    dev_linear_dw(d, dw, dlogits, x, BT, E, C);
}
