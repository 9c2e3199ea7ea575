// The solver's and the policies' source a second time, beside the library's: here with a team of OpenMP threads behind its
// primitives, to see that a plan does not depend on how many threads make it.
#ifndef MOE_TEAM_H
#define MOE_TEAM_H
#include <omp.h>
#include <stdint.h>

enum { TEAM_MAX = 8 };
static int64_t team_part[TEAM_MAX];
static void team_barrier(void) {
#pragma omp barrier
}
static int64_t team_reduce(int64_t x, int sum) {
    team_part[omp_get_thread_num()] = x;
    team_barrier();
    int64_t all = team_part[0];
    for (int i = 1; i < omp_get_num_threads(); i++) all = sum ? all + team_part[i] : all > team_part[i] ? all : team_part[i];
    team_barrier();
    return all;
}
#define SOLVE_FOR(i, n) for (int i = omp_get_thread_num(); i < (n); i += omp_get_num_threads())
#define SOLVE_ONE if (omp_get_thread_num() == 0)
#define SOLVE_BARRIER() team_barrier()
#define SOLVE_MAX(x) team_reduce(x, 0)
#define SOLVE_SUM(x) team_reduce(x, 1)
#define SOLVE_LEAF static
#include "topoep/policies.h"
#endif
