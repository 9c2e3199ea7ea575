// What a run will take of memory: counted before any of it is taken, said, and refused where it is not there.
#include "kernels/check.h"
#include "train/trainer.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static double resident(void) { // bytes
    FILE *f = fopen("/proc/self/statm", "r");
    long all, here = 0;
    if (f && fscanf(f, "%ld %ld", &all, &here) != 2) here = 0;
    if (f) fclose(f);
    return (double)here * (double)sysconf(_SC_PAGESIZE);
}

// What `run` would take: the model and the optimizer go through their own code, on a device that counts.
static MemoryUse count(const Trainer *t, const ModelRun *run) {
    MemoryUse u = {0};
    size_t bytes[MEMORY_KINDS];
    int lazy = dev_lazy(t->d);
    dev_count_begin(t->d);
    Model *m = model_alloc(t->d, t->world, t->ep, &t->c, run);
    optimizer_alloc(t->d, model_params(m), &t->o);
    dev_kind(t->d, MEMORY_WORKSPACE);
    if (lazy && model_moe(m)) {
        moe_idle_bytes(model_moe(m), u.idle);
        u.peers = t->o.virtual_ranks ? 0 : moe_peer_bytes(model_moe(m));
    }
    model_free(m);
    dev_count_end(t->d, bytes);
    for (int k = 0; k < MEMORY_KINDS; k++) u.kind[k] = (double)bytes[k] - u.idle[k];
    return u;
}

static double device_sum(const MemoryUse *u) {
    double sum = 0;
    for (int k = 0; k < MEMORY_KINDS; k++) sum += u->kind[k];
    return sum;
}

double memory_sum(const MemoryUse *u) { return device_sum(u) + u->program + u->data + u->peers; }

// What a process takes besides its device's memory, where the two are one
static void add_process(const Trainer *t, MemoryUse *u) {
    double ranks = t->o.virtual_ranks ? (double)t->o.virtual_ranks : 1; // of a process: they share the program
    u->program = (resident() + 2e6 * t->threads) / ranks; // stacks hold the products' packed blocks
    // a training sample is read through a mapping, which brings 64 KB of the file at a time
    double file = 2.0 * (double)loader_tokens(t->train), samples = (double)t->share.sequences * (double)t->o.steps;
    u->data = fmin(file, samples * fmax(65536, 2.0 * t->c.T)) / ranks;
}

// The settings that take less, and how much: each on top of those before
static void add_hints(const Trainer *t, char *text, size_t n) {
    ModelRun less = trainer_model_run(t);
    int at = 0, micro = less.max_B - 1;
    if (!less.zero && t->info->size > 1) {
        less.zero = 1;
        MemoryUse u = count(t, &less);
        at += snprintf(text, n, "--zero 1 takes %.2f GB, ", device_sum(&u) * 1e-9);
    }
    const char *with = at ? "with it " : "";
    for (int level = (int)less.recompute + 1; level <= RECOMPUTE_BLOCK; level++) {
        less.recompute = (Recompute)level;
        MemoryUse u = count(t, &less);
        at += snprintf(text + at, n - (size_t)at, "%s--recompute %d takes %.2f GB, ", with, level, device_sum(&u) * 1e-9);
    }
    if (!dev_lazy(t->d) && t->c.E && (less.recv_room == 0 || less.recv_room > 1)) {
        less.recv_room = 1;
        MemoryUse u = count(t, &less);
        at += snprintf(text + at, n - (size_t)at, "%s--recv-room 1 %.2f GB, ", at ? "with it " : "", device_sum(&u) * 1e-9);
    }
    while (micro > 1 && t->share.sequences % micro) micro--;
    if (micro < 1) return;
    less.max_B = micro, less.micros = t->share.sequences / micro;
    MemoryUse u = count(t, &less);
    snprintf(text + at, n - (size_t)at, "%s--micro-batch %d %.2f GB, ", at ? "with it " : "", micro, device_sum(&u) * 1e-9);
}

void memory_check(Trainer *t) {
    const ModelRun run = trainer_model_run(t);
    MemoryUse *u = &t->memory, *all = host_alloc(SIZE(t->info->size, sizeof *all)), *worst = all;
    *u = count(t, &run);
    u->there = dev_available(t->d);
    comm_allgather(t->world, all, u, sizeof *u); // all have looked before any of them takes some
    for (int r = 1; r < t->info->size; r++)
        if (device_sum(&all[r]) - all[r].there > device_sum(worst) - worst->there) worst = &all[r];
    if (device_sum(worst) > worst->there) {
        char kinds[256] = "", hints[512] = "";
        for (int k = 0, at = 0; k < MEMORY_KINDS; k++)
            at += snprintf(kinds + at, sizeof kinds - (size_t)at, "%s%s %.2f", k ? ", " : "", memory_names[k], worst->kind[k] * 1e-9);
        add_hints(t, hints, sizeof hints);
        die(STATUS_DEVICE, __FILE__, __LINE__, "rank %d needs %.2f GB of memory, %.2f GB are free for it: %s (hint: %smore ranks)",
            (int)(worst - all), device_sum(worst) * 1e-9, worst->there * 1e-9, kinds, hints);
    }
    free(all);
    size_t taken[MEMORY_KINDS];
    dev_taken(t->d, taken); // the backend's own, by now
    for (int k = 0; k < MEMORY_KINDS; k++) u->kind[k] += (double)taken[k];
    if (dev_lazy(t->d)) add_process(t, u);
}
