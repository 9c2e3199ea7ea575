// Plans on the CPU: the solver's single source, run by one thread.
#include "kernels/cpu/dev.h"
#include "topoep/plan.h"
#include "topoep/solve.h"

size_t plan_work_bytes(int R, int E, int N, int S) { return solve_work_bytes(R, E, N, S); }

void plan_solve(Dev *d, Plan *plan, const int *D, int R, int E, const Cost *cost, PlanOptions options, void *work) {
    dev_enter(d);
    Solve v;
    solve_bind(&v, work, D, R, E, cost, options.block > 0 ? options.block : 1);
    if (options.policy == POLICY_TOPOEP) solve_topoep(&v);
    else solve_none(&v);
    solve_result(&v, plan->quota, plan->slot, plan->info);
    dev_leave(d);
}
