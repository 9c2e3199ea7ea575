// Plans for tools on the host: one demand matrix after the other, each policy's plan of it, with its time on this CPU.
#ifndef MOE_PLANNER_H
#define MOE_PLANNER_H
#include "topoep/plan.h"

typedef struct Planner {
    Dev *d;
    int R, E;
    Cost cost;
    int *quota, *slot;   // host: the last plan (E,R), (R,S)
    PlanInfo info;
    double plan_us;      // CPU time that it took
    Plan plan;           // device
    int *D;              // device (R,E)
    int64_t *history;    // device (E), eplb's
    void *work;
} Planner;
void planner_open(Planner *p, const Cost *cost, int E); // dies with STATUS_USAGE past a plan's bounds
void planner_close(Planner *p);
// Fills quota, slot, info, plan_us. D (R,E) on the host. history (E) on the host: eplb's past, updated; NULL = it takes D for it
void planner_solve(Planner *p, const int *D, PlanOptions options, int64_t *history);
#endif
