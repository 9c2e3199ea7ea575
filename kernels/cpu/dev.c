// A rank's CPU device: life, memory, clock.
#include "kernels/cpu/dev.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { ALIGN = 64, COPY_CHUNK = 1 << 20, HUGE_MIN = 16 << 20 }; // bytes; HUGE_MIN: a block that gets huge pages
enum { MAX_THREADS = 1024 };

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

// ---- life ----------------------------------------------------------------------------------------------------------
Dev *dev_init(DevOptions options) {
    CHECK_USAGE(options.threads >= 0 && options.threads <= MAX_THREADS,
                "%d threads asked for, expected 1 to %d, or 0 for as many as OpenMP says", options.threads, MAX_THREADS);
    Dev *d = host_alloc(sizeof *d);
    d->threads = options.threads ? options.threads : omp_get_max_threads();
    d->poison = options.poison;
    d->strict = options.strict;
    d->ranks = options.ranks ? options.ranks : 1;
    d->memory.kind = MEMORY_WORKSPACE;
    pthread_mutex_init(&d->lock, NULL);
    const char *isa = "portable";
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) isa = "AVX2";
#endif
    snprintf(d->name, sizeof d->name, "CPU, %d thread%s, %s kernels, fp%d", d->threads, d->threads == 1 ? "" : "s", isa,
             (int)sizeof(real) * 8);
    d->since = now_ms();
    return d;
}

static void block_free(DevBlock *b) {
    munmap(b->base, b->bytes + (size_t)sysconf(_SC_PAGESIZE));
    free(b);
}

void dev_free(Dev *d) {
    if (!d) return;
    for (DevBlock *b = d->blocks, *next; b; b = next) {
        next = b->next;
        block_free(b);
    }
    pthread_mutex_destroy(&d->lock);
    free(d);
}

const char *dev_name(const Dev *d) { return d->name; }

// ---- memory --------------------------------------------------------------------------------------------------------
static void protect(DevBlock *b, int how) {
    CHECK_DEVICE(!mprotect(b->base, b->bytes, how), "cannot change the protection of %zu bytes of device memory: %s", b->bytes,
                 strerror(errno));
}

void dev_open(Dev *d) {
    pthread_mutex_lock(&d->lock);
    if (d->depth++ == 0)
        for (DevBlock *b = d->blocks; b; b = b->next) protect(b, PROT_READ | PROT_WRITE);
    pthread_mutex_unlock(&d->lock);
}

void dev_shut(Dev *d) {
    pthread_mutex_lock(&d->lock);
    if (--d->depth == 0)
        for (DevBlock *b = d->blocks; b; b = b->next) protect(b, PROT_NONE);
    pthread_mutex_unlock(&d->lock);
}

// Reserved, not committed: the kernel supplies (zeroed) pages at their first touch. A poisoned block ends at its guard
// page, so that an access past it crashes; an unpoisoned one starts at its mapping.
void *dev_alloc(Dev *d, size_t bytes, const char *what) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), room = bytes + page - 1 + ALIGN;
    CHECK_DEVICE(room >= bytes && room + page > room, "%s: %zu bytes are more than this machine can address", what, bytes);
    if (d->memory.counting) {
        ledger_add(&d->memory, bytes);
        return NOWHERE;
    }
    room -= room % page;
    char *base = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK_DEVICE(base != MAP_FAILED, "no memory for %s: %zu bytes asked for: %s (hint: a smaller model, batch or --seq, or fewer "
                 "ranks on this machine)", what, bytes, strerror(errno));
    CHECK_DEVICE(!mprotect(base + room, page, PROT_NONE), "%s: cannot protect its guard page: %s", what, strerror(errno));
    if (room >= HUGE_MIN) madvise(base, room, MADV_HUGEPAGE); // fewer TLB misses; a kernel without them says no, which is fine
    char *p = base;
    if (d->poison) {
        p += room - (bytes + ALIGN - 1) / ALIGN * ALIGN;
        // as float or double a NaN, as an integer index far out of range
        for (size_t i = 0; i < room / 2; i++) ((uint16_t *)(void *)base)[i] = 0x7FFF;
    }
    DevBlock *b = host_alloc(sizeof *b);
    *b = (DevBlock){.base = base, .bytes = room, .asked = bytes, .kind = d->memory.kind};
    pthread_mutex_lock(&d->lock);
    if (d->strict && !d->depth) protect(b, PROT_NONE);
    b->next = d->blocks;
    d->blocks = b;
    ledger_add(&d->memory, bytes);
    pthread_mutex_unlock(&d->lock);
    return p;
}

void dev_release(Dev *d, void *p) {
    if (!p) return;
    pthread_mutex_lock(&d->lock);
    DevBlock **at = &d->blocks;
    while (*at && !((char *)p >= (*at)->base && (char *)p < (*at)->base + (*at)->bytes)) at = &(*at)->next;
    DevBlock *b = *at;
    CHECK_DEVICE(b, "memory is released that is not the device's");
    *at = b->next;
    ledger_back(&d->memory, b->kind, b->asked);
    pthread_mutex_unlock(&d->lock);
    block_free(b);
}

Ledger *dev_ledger(Dev *d) { return &d->memory; }
int dev_lazy(const Dev *d) { return (void)d, 1; }

// src NULL: zero
static void copy(const Dev *d, void *dst, const void *src, size_t bytes) {
    int64_t chunks = (int64_t)((bytes + COPY_CHUNK - 1) / COPY_CHUNK);
#pragma omp parallel for num_threads(d->threads) if (chunks > 1) schedule(static)
    for (int64_t i = 0; i < chunks; i++) {
        size_t at = (size_t)i * COPY_CHUNK, n = bytes - at < COPY_CHUNK ? bytes - at : COPY_CHUNK;
        if (src) memcpy((char *)dst + at, (const char *)src + at, n);
        else memset((char *)dst + at, 0, n);
    }
}

void dev_upload(Dev *d, void *dst, const void *host, size_t bytes) { dev_copy(d, dst, host, bytes); }
void dev_download(Dev *d, void *host, const void *src, size_t bytes) { dev_copy(d, host, src, bytes); }

void dev_copy(Dev *d, void *dst, const void *src, size_t bytes) {
    if (d->memory.counting) return;
    dev_enter(d);
    copy(d, dst, src, bytes);
    dev_leave(d);
}

void dev_zero(Dev *d, void *dst, size_t bytes) {
    if (d->memory.counting) return;
    dev_enter(d);
    copy(d, dst, NULL, bytes);
    dev_leave(d);
}

// ---- a step that repeats: runs as it is called ---------------------------------------------------------------------
int dev_record_begin(Dev *d) { return (void)d, 0; }
void dev_record_end(Dev *d) { (void)d; }
void dev_replay(Dev *d) { (void)d; }

// ---- clock ---------------------------------------------------------------------------------------------------------
const char *const stage_names[STAGES] = {"other",   "embed",   "attention", "router", "counts", "plan",      "copies",
                                         "dispatch", "experts", "combine",  "head",   "reduce", "optimizer", "wait"};

void dev_stage(Dev *d, Stage s) {
    double t = now_ms();
    d->ms[d->stage] += t - d->since;
    d->since = t;
    d->stage = s;
}

Stage dev_stage_now(const Dev *d) { return d->stage; }

void dev_stage_read(Dev *d, double ms[STAGES]) {
    dev_stage(d, d->stage);
    memcpy(ms, d->ms, sizeof d->ms);
    memset(d->ms, 0, sizeof d->ms);
}
