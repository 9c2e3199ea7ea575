// What a run will take of memory, said before it starts, and refused where it is not there.
#include "kernels/check.h"
#include "train/trainer.h"
#include <math.h>
#include <stdio.h>
#include <unistd.h>

static double resident(void) { // bytes
    FILE *f = fopen("/proc/self/statm", "r");
    long all, here = 0;
    if (f && fscanf(f, "%ld %ld", &all, &here) != 2) here = 0;
    if (f) fclose(f);
    return (double)here * (double)sysconf(_SC_PAGESIZE);
}

static void check(const Trainer *t, double need, const char *what) {
    double there = dev_available(t->d);
    comm_barrier(t->world); // all have looked before any of them takes some
    CHECK_DEVICE(need * t->info->local_ranks <= there, "%s of this machine's %d rank%s take %.2f GB, %.2f GB of memory are free (hint: a smaller "
                 "model or --micro-batch, or more machines)", what, t->info->local_ranks, t->info->local_ranks == 1 ? "" : "s",
                 need * t->info->local_ranks * 1e-9, there * 1e-9);
}

void memory_first(Trainer *t) {
    ModelSize size = config_size(&t->c);
    int layers = 0;
    for (int l = 0; l < t->c.L; l++) layers += !t->c.dense[l];
    double experts = 3.0 * t->c.E * t->c.F * t->c.C * layers, held = (double)size.params - experts + experts / t->share.R;
    MemoryUse *u = &t->memory;
    // its stacks hold the products' packed blocks; virtual ranks share the program
    u->program = (resident() + 2e6 * t->threads) / (double)(t->o.virtual_ranks ? t->o.virtual_ranks : 1);
    u->parameters = held * sizeof(real);
    u->gradients = held * sizeof(wide);
    int masters = sizeof(real) < sizeof(wide); // counted with the moments: the optimizer's state
    u->moments = ((t->o.optimizer == OPTIMIZER_SGD ? 0 : 2) + masters) * held * sizeof(wide);
    check(t, u->parameters + u->gradients + u->moments, "parameters, gradients and the optimizer's state");
}

void memory_all(Trainer *t) {
    MemoryUse *u = &t->memory;
    double asked = (double)dev_allocated(t->d) + (double)t->window_bytes - u->parameters - u->gradients;
    u->idle = t->moe && dev_lazy(t->d) ? moe_idle_bytes(t->moe) : 0;
    u->buffers = asked - u->idle;
    u->peers = t->moe && !t->o.virtual_ranks ? moe_peer_bytes(t->moe) : 0;
    // a training sample is read through a mapping, which brings 64 KB of the file at a time
    double file = 2.0 * (double)loader_tokens(t->train), samples = (double)t->share.sequences * (double)t->o.steps;
    u->data = fmin(file, samples * fmax(65536, 2.0 * t->c.T)) / (double)(t->o.virtual_ranks ? t->o.virtual_ranks : 1);
    check(t, u->parameters + u->gradients + u->moments + u->buffers, "parameters, gradients, the optimizer's state and activations");
}

double memory_sum(const MemoryUse *u) {
    return u->program + u->data + u->parameters + u->gradients + u->moments + u->buffers + u->peers;
}
