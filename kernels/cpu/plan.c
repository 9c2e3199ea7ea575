// Plans on the CPU: the solver's single source, run by one thread.
#include "kernels/cpu/dev.h"
#define SOLVE_LEAF static DEV_CLONES
#include "topoep/policies.h"

size_t plan_work_bytes(int R, int E, int N, int S) { return policy_work_bytes(R, E) + solve_work_bytes(R, E, N, S); }

void plan_solve(Dev *d, Plan *plan, const int *D, int R, int E, const Cost *cost, PlanOptions options, void *work) {
    dev_enter(d);
    int64_t total = 0, dearest = cost_max(cost->pair_compute_ps, cost_max(cost->pair_inter_ps, cost->pair_intra_ps));
    int sign = 0;
    for (int i = 0; i < R * E; i++) sign |= D[i], total += D[i];
    for (int i = 0; i < R * E && sign < 0; i++)
        CHECK_DEVICE(D[i] >= 0, "a demand matrix holds %d at source %d, expert %d", D[i], i / E, i % E);
    CHECK_DEVICE(total <= INT32_MAX && (dearest == 0 || total <= (INT64_MAX >> 3) / dearest),
                 "a plan for %lld pairs of up to %lld ps each: their time does not fit (hint: smaller microbatches, or the cluster file)",
                 (long long)total, (long long)dearest);
    Solve v;
    solve_bind(&v, (char *)work + policy_work_bytes(R, E), D, R, E, cost, options);
    policy_solve(&v, options, plan->history, work);
    solve_result(&v, plan->quota, plan->slot, plan->info);
    dev_leave(d);
}
