// The CPU device, for the files of kernels/cpu only.
#ifndef MOE_CPU_DEV_H
#define MOE_CPU_DEV_H
#include "kernels/check.h"
#include "kernels/ledger.h"
#include <omp.h>
#include <pthread.h>

// For leaf functions with plain loops: compiled twice, for AVX2 + FMA and for any x86-64, chosen when the program loads.
// A function that holds an OpenMP construct must not carry it: the compiler moves the construct's body out of the clones.
// ("arch=haswell" would ask for that very CPU and refuse an AMD one. Under TSAN the choice runs too early and crashes.)
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && !defined(__SANITIZE_THREAD__)
#define DEV_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define DEV_CLONES
#endif

// Before a loop: no iteration reads what another writes, though pointers may be equal.
#ifdef __clang__
#define DEV_APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define DEV_APART _Pragma("GCC ivdep")
#endif

// Loops shorter than this many elements run on the calling thread: waking a team costs as much as moving about 50 KB.
enum { DEV_PARALLEL_MIN = 1 << 14 };

typedef struct DevBlock { // one dev_alloc: a mapping of its own, followed by a page that cannot be touched
    char *base;
    size_t bytes;         // whole pages, without the guard page
    size_t asked;
    MemoryKind kind;
    struct DevBlock *next;
} DevBlock;

struct Dev {
    int threads;          // for num_threads(d->threads) in every parallel region
    int poison;
    int strict;           // memory is PROT_NONE outside ops
    char name[64];
    int ranks;            // of this machine
    Ledger memory;
    DevBlock *blocks;
    pthread_mutex_t lock; // of depth and of the blocks' protection
    int depth;            // ops now running, over all threads that use this Dev, nested ones counted
    Stage stage;
    double since, ms[STAGES]; // milliseconds
};

void dev_open(Dev *d); // dev.c: the slow part of enter and leave
void dev_shut(Dev *d);

// Around every op's body; calls may nest. Not to be called inside an op's parallel regions.
static inline void dev_enter(Dev *d) {
    if (d->strict) dev_open(d);
}
static inline void dev_leave(Dev *d) {
    if (d->strict) dev_shut(d);
}

static inline int dev_rows(const int *n_rows, int M) { // valid rows of an op
    int n = n_rows ? *n_rows : M;
    CHECK_DEVICE(n >= 0 && n <= M, "an op is told to work on %d rows of a buffer with room for %d (the plan's fault)", n, M);
    return n;
}
#endif
