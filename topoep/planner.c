#include "topoep/planner.h"
#include "kernels/check.h"
#include <stdlib.h>
#include <time.h>

void planner_open(Planner *p, const Cost *cost, int E) {
    int R = cost->N * cost->G, S = cost->S;
    cost_check(cost, cost->N, cost->G, E);
    *p = (Planner){.R = R, .E = E, .cost = *cost, .d = dev_init((DevOptions){.threads = 1})};
    p->quota = host_alloc(SIZE(E, R, sizeof(int)));
    p->slot = host_alloc(SIZE(R * S + 1, sizeof(int)));
    p->D = dev_alloc(p->d, SIZE(R, E, sizeof(int)), "demand");
    p->history = dev_alloc(p->d, SIZE(E, sizeof(int64_t)), "eplb's past");
    p->plan = (Plan){.quota = dev_alloc(p->d, SIZE(E, R, sizeof(int)), "quotas"),
                     .slot = dev_alloc(p->d, SIZE(R * S + 1, sizeof(int)), "slots"),
                     .info = dev_alloc(p->d, sizeof(PlanInfo), "plan info")};
    p->work = dev_alloc(p->d, plan_work_bytes(R, E, cost->N, S), "solver");
}

void planner_close(Planner *p) {
    dev_free(p->d);
    free(p->quota), free(p->slot);
}

static double cpu_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); // one thread plans; others that share the core do not count
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

void planner_solve(Planner *p, const int *D, PlanOptions options, int64_t *history) {
    size_t past = SIZE(p->E, sizeof(int64_t));
    dev_upload(p->d, p->D, D, SIZE(p->R, p->E, sizeof(int)));
    if (history) dev_upload(p->d, p->history, history, past);
    p->plan.history = history ? p->history : NULL;
    double start = cpu_us();
    plan_solve(p->d, &p->plan, p->D, p->R, p->E, &p->cost, options, p->work);
    p->plan_us = cpu_us() - start;
    dev_download(p->d, p->quota, p->plan.quota, SIZE(p->E, p->R, sizeof(int)));
    dev_download(p->d, p->slot, p->plan.slot, SIZE(p->R, p->cost.S, sizeof(int)));
    dev_download(p->d, &p->info, p->plan.info, sizeof p->info);
    if (history) dev_download(p->d, history, p->history, past);
}
