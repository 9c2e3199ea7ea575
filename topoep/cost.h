// The objective J of a plan from its sums, and those sums from a plan: in the common subset of C and CUDA, for the solver, the
// plan tool and the policies. Formula: topoep/plan.h.
#ifndef MOE_COST_H
#define MOE_COST_H
#include "kernels/hostdev.h"
#include "topoep/plan.h"

// What J depends on: the largest of each kind over ranks or nodes.
typedef struct Peaks {
    int64_t load;           // pairs computed on one rank
    int64_t inter, intra;   // pairs leaving or entering one node; one rank
    int64_t copy_inter;     // experts sent from or to one node
    int64_t copy_intra;     // copies held by one rank, or sent by it inside its node
    int64_t copies;         // in all
} Peaks;

HOSTDEV int64_t cost_max(int64_t a, int64_t b) { return a > b ? a : b; }
HOSTDEV int64_t cost_compute(const Cost *c, Peaks p) { return c->pair_compute_ps * p.load; }
HOSTDEV int64_t cost_tokens(const Cost *c, Peaks p) { return cost_max(c->pair_inter_ps * p.inter, c->pair_intra_ps * p.intra); }
HOSTDEV int64_t cost_weights(const Cost *c, Peaks p) {
    int64_t all = cost_max(c->copy_inter_ps * p.copy_inter, c->copy_intra_ps * p.copy_intra), shown = 1000 - c->overlap_permille;
    return all / 1000 * shown + all % 1000 * shown / 1000; // all * shown / 1000, without the large product
}
HOSTDEV int64_t cost_fixed(const Cost *c, Peaks p) { return p.copies > 0 ? c->plan_fixed_ps : 0; }
HOSTDEV int64_t cost_total(const Cost *c, Peaks p) {
    return cost_compute(c, p) + cost_tokens(c, p) + cost_weights(c, p) + cost_fixed(c, p);
}
#endif
