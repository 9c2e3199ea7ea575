// Inputs of the plan tests: demand matrices, costs, and what a plan of them is checked against.
#ifndef MOE_TESTS_CASES_H
#define MOE_TESTS_CASES_H
#include "topoep/plan.h"

typedef struct Case {
    int R, E;
    Cost cost;
    int *D, *quota, *slot; // (R,E), (E,R), (R,S)
    int64_t *history;      // of eplb; NULL = none. Not owned
    PlanInfo info;
} Case;

// N nodes of G ranks, H experts each, S slots; no demand yet. Computing a pair costs 10, crossing a node 4, a link 1, a copy
// 30 between nodes and 10 inside.
Case case_make(int N, int G, int H, int S);
void case_free(Case *c);
// Plans, and fails unless the oracle finds the plan legal and counts the same in every field
void case_solve(Dev *d, Case *c, PlanOptions options);
// A file of tests/data/plan: loads NAME.loads, costs from the .conf file whose name NAME begins with
Case case_read(const char *name);

typedef struct Draw { // random numbers, one after the other
    uint64_t seed, at;
} Draw;
int draw(Draw *d, int n); // 0..n-1; 0 for n < 1
// Any shape up to 4 x 5 ranks (large: 4 x 8), cost and demand, degenerate ones among them
Case case_draw(Draw *d, int large);
void case_draw_loads(Draw *d, Case *c); // demand anew: nothing, one pair, one expert, scattered, by rank, node, source, ragged, local
void case_draw_cost(Draw *d, Case *c);

// A matrix that is a pure function of its name, "KIND Z SEED NxG E S MODEL PAIRS":
//   KIND   scattered  expert weights (1 + i)^-Z in random order         rank    whole ranks are hot
//          node       whole nodes are hot                               source  every node has a taste of its own
//          inject     Z of all pairs to four experts                    window  E/8 neighbouring experts have Z of all pairs
//          ragged     scattered, ranks with 0 to twice the tokens       cold    scattered, Z of the experts without a pair
//   MODEL  qwen, lite, glm: costs of these shapes on H800 nodes; qwen1, lite1, glm1: copies that cross nodes over one port;
//          toy: cheap copies
//   PAIRS  of each rank
Case case_named(const char *name);
#endif
