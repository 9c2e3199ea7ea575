// The time of one MoE layer (one microbatch, forward and backward) as replays model it, split into parts, and the bytes it moves.
//
//   counts    hop (1 + ceil log2 N) + bytes: all-gather of D for policies that plan, (R-G) E int32 into every node over its ports and
//             R E into every rank over its link; without a plan each rank gets only what its own experts are sent, 1/R of that
//   plan      a constant for policies that plan from the counts just made; 0 for the others (eplb plans ahead, from its past)
//   compute, tokens, weights, fixed    the parts of J (topoep/plan.h)
// The layer takes the sum: its phases are separated by barriers. So the straggler time, what the others wait for the slowest, is each
// phase's maximum less its mean over the ranks, for compute and tokens.
#ifndef MOE_TIMES_H
#define MOE_TIMES_H
#include "topoep/plan.h"

typedef struct TimeModel {
    Cost cost;
    int R, E;
    double hop_us, plan_us;
    double counts_inter_ps, counts_intra_ps; // a byte into a node over all its ports; into a rank over its link
    int64_t pair_bytes;     // 4 rows of C elements, a routing weight, its gradient
    int64_t crossing_bytes; // of a row between nodes: the same, and rank and row (int32) of each pair that it may stand for
    int64_t copy_bytes;     // weights twice, gradient
} TimeModel;
int64_t times_crossing_bytes(const CostModel *m, int pairs);
TimeModel times_model(const Cost *cost, const CostModel *m, double hop_us, double plan_us);

typedef struct LayerTime { // picoseconds
    int64_t counts, plan, compute, tokens, weights, fixed;
    int64_t straggler;
} LayerTime;
int64_t times_total(const LayerTime *t);

// What each rank and node has to do, from a plan on the host: pairs computed, of them those that start there, pairs that start there.
typedef struct RankSums {
    int64_t *load, *self, *rows;      // (R)
    int64_t *nload, *nlocal, *nrows;  // (N)
} RankSums;
RankSums times_sums_alloc(int R, int N); // free with times_sums_free
void times_sums_free(RankSums *s);
void times_sums(RankSums *s, const int *D, const int *quota, const TimeModel *m); // D (R,E), quota (E,R)
int64_t times_rank_compute(const RankSums *s, const TimeModel *m, int r);
int64_t times_rank_tokens(const RankSums *s, const TimeModel *m, int r); // the larger of its link's time and its node's ports'

// plans: 1 for policies that plan on the critical path; gathers: 1 where every rank gets all of D
LayerTime times_layer(const PlanInfo *p, const RankSums *s, const TimeModel *m, int plans, int gathers);

typedef struct Bytes {
    int64_t self;                        // of pairs computed where they are: moved by nobody
    int64_t node, inter;                 // between ranks of a node, with what relays pass on; between nodes, after de-duplication
    int64_t weights_node, weights_inter; // of copies and their gradients
} Bytes;
typedef struct Traffic {
    int64_t crossings, passed_on; // rows between nodes; pairs among them for another rank than the sender's counterpart there
} Traffic;
Traffic times_traffic(const PlanInfo *p, const TimeModel *m); // expected: delta of the pairs that leave; (G-1)/G of them
Bytes times_bytes(const PlanInfo *p, Traffic t, const TimeModel *m);
#endif
