#include "topoep/search.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include "topoep/policies.h"
#include <math.h>
#include <stdlib.h>
#include <time.h>

enum { SEARCH_CYCLE = 1000 }; // rounds from hot to cold, then anew: twice from the best plan, once from one of its own

// A start of its own: the plan of one budget, drawn between a transfer and as many as there are slots, at a sharpness drawn too
static int64_t start_anew(Solve *v, Effort f, uint64_t *seed) {
    static const int sharps[] = {10, 16, 24, 40};
    double share = solve_draw(seed, 1024) / 1024.0;
    int64_t each = cost_max(1, v->cost->copy_intra_ps), budget = (int64_t)((double)each * pow((double)cost_max(2, v->best_ps / each), share));
    return solve_try(v, f, budget, sharps[solve_draw(seed, 4)]);
}

int64_t search_plan(int *quota, int *slot, PlanInfo *info, const int *D, int R, int E, const Cost *cost, uint64_t seed, int64_t rounds,
                    double seconds) {
    Solve solver, *v = &solver;
    void *work = host_alloc(solve_work_bytes(R, E, cost->N, cost->S)), *scratch = host_alloc(policy_work_bytes(R, E));
    solve_bind(v, work, D, R, E, cost, (PlanOptions){.policy = POLICY_TOPOEP, .block = 1});
    policy_topoep(v, EFFORT_HIGH, scratch);
    Effort f = solve_pass(v, EFFORT_DEFAULT, 2);
    int64_t n = 0, now = 0;
    clock_t start = clock();
    for (double passed = 0; cost->S > 0 && R > 1 && (!rounds || n < rounds) && (!seconds || passed < seconds); n++) {
        if (n % 64 == 0) passed = (double)(clock() - start) / CLOCKS_PER_SEC;
        int phase = (int)(n % SEARCH_CYCLE);
        if (phase == 0) {
            if (n / SEARCH_CYCLE % 3 == 2) now = start_anew(v, f, &seed);
            else solve_become(v, v->best_q), now = v->best_ps;
        }
        now = solve_round(v, &seed, now, now >> (7 + phase * 10 / SEARCH_CYCLE));
    }
    solve_result(v, quota, slot, info);
    free(work), free(scratch);
    return n;
}
