// For tests: a plan is the same for every number of threads.
#ifndef MOE_CUDA_PLAN_H
#define MOE_CUDA_PLAN_H
#include "topoep/plan.h"

// plan_solve with a block of `threads`, a multiple of 32 up to 512
void plan_solve_on(Dev *d, Plan *plan, const int *D, int R, int E, const Cost *cost, PlanOptions options, void *work, int threads);
#endif
