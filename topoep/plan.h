// A plan: which ranks hold temporary copies of which experts, and how many pairs of each expert every rank computes.
//
// Symbols. R ranks of the expert-parallel group = N nodes x G ranks; E experts, H = E/R at home on each rank (home of e is
// rank e/H); S slots for copies per rank; a pair is one (token, expert) choice; D (R,E) the demand matrix: D[s][e] pairs that
// source rank s has for expert e. All ranks hold the same D and make, bit for bit, the same plan from it: integers only,
// fixed visiting order, ties to the lower expert, then the lower rank.
#ifndef MOE_PLAN_H
#define MOE_PLAN_H
#include "kernels/comm.h"
#include "kernels/device.h"

// What a plan costs (picoseconds): the objective J, see plan_solve.
typedef struct Cost {
    char name[64];
    int N, G, S;
    int64_t pair_compute_ps; // one pair's expert computation, forward and backward
    int64_t pair_inter_ps;   // one pair over a node's network, all four passes
    int64_t pair_intra_ps;   // one pair over a rank's link inside its node
    int64_t copy_inter_ps;   // one copy of an expert (weights twice, gradient once) between nodes
    int64_t copy_intra_ps;   // the same inside a node
    int64_t overlap_permille; // share of the copies' time hidden behind computation
    int64_t plan_fixed_ps;   // charged once if there is any copy
    double delta;            // share of the pairs that leave a node which crosses by itself: 1, or less with de-duplication (topoep/cost.c)
    int measured;            // the file says that its figures were measured where it stands for
} Cost;

typedef enum { DEDUP_FILE, DEDUP_ON, DEDUP_OFF } CostDedup;
// The model's side of the cost, needed when a cluster file gives rates (see cost_load).
typedef struct CostModel {
    int C, F, K, E;
    int slots;               // S; -1 = as the file says, or 2
    int N, G;                // the running topology: both taken without a file, N G / ranks_per_node nodes where a file names none
    int nodes;               // 0, or so many nodes, whatever the file says
    int token_bytes;         // bytes of one activation element on the wire (2 for bf16, 4 for fp32)
    int weight_bytes, grad_bytes; // of one weight and one weight gradient element
    CostDedup dedup;         // a token that goes to several ranks of another node crosses once: as a rates file says, or as is run
    int one_port;            // copies that cross nodes go through one port, not sliced over all of the node's: a rates file's
                             // `sliced` counts as 0; a cost file, which has no rates, has its copy_inter_ps taken G times
} CostModel;
// Reads a cost file or a rates file (formulas and keys in topoep/cost.c). path NULL: the rates of the local machine.
// Dies with STATUS_DATA, naming file, line and key.
Cost cost_load(const char *path, CostModel m);
// Dies with STATUS_USAGE unless the cost's topology is the running one (N x G) and the dims are within PLAN_MAX_*.
void cost_check(const Cost *c, int N, int G, int E);

enum { PLAN_MAX_R = 1024, PLAN_MAX_E = 1024, PLAN_MAX_S = 32 };

typedef enum { // policy_names has them in this order; the ones after topoep: topoep/policies.h
    POLICY_NONE, POLICY_TOPOEP, POLICY_EPLB, POLICY_FASTERMOE, POLICY_LLEP, POLICY_ECHO, POLICY_LPLB, POLICY_ULTRAEP, POLICY_MOONEP, POLICIES
} Policy;
extern const char *const policy_names[POLICIES];

typedef enum { TARGET_TIME, TARGET_BALANCE } PlanTarget; // least J; least largest load, then least J
// How long topoep looks: one climb (and a few rounds of repair for small matrices); three climbs, the portfolio, 8 to 60 rounds;
// seven climbs, the portfolio, 200 to 2000 rounds (topoep/solve.h says what these are).
typedef enum { EFFORT_DEFAULT, EFFORT_LOW, EFFORT_HIGH } PlanEffort;
enum { // parts of topoep that an ablation leaves out; plans of the portfolio that have what is left out are passed over
    PLAN_NO_STAGE1 = 1,    // copies on other nodes than the home's: what is left balances inside each node
    PLAN_NO_STAGE2 = 2,    // copies on the home's own node, a second copy on another node, exchanges inside a node: what is left
                           // balances nodes, each copy on the rank of its node where it gains most
    PLAN_NO_LOCALITY = 4,  // the prices of traffic, and the start where ranks compute their own pairs: loads alone decide where
                           // copies and pairs go; among the plans made so, the one of least J is still taken
    PLAN_NO_PORTFOLIO = 8, // the other policies' plans, that start, and all climbs but the first
    PLAN_NO_SLICING = 16,  // copies that cross nodes go through one port, not all of the node's: an affair of the cost
                           // (CostModel.one_port) and of the execution, not of how a plan is found
};
typedef struct PlanOptions {
    Policy policy;
    PlanTarget target;   // these three: of topoep
    PlanEffort effort;
    unsigned without; // PLAN_NO_* or'ed
    int block;       // the quotas of copies are multiples of this many pairs (1); what is left over stays at home
} PlanOptions;

typedef struct PlanInfo {
    int64_t cost_ps, compute_ps, tokens_ps, weights_ps, fixed_ps; // J and its parts
    int64_t identity_ps;                     // J of the plan without copies
    int64_t max_load, max_load_before;       // pairs on the fullest rank: with the plan, without
    int64_t pairs_self, pairs_node, pairs_inter; // pairs computed where they are; on another rank of the node; on another node
    int64_t inter_copies, node_copies;       // transfers of an expert between nodes; inside a node
    int64_t copies;                          // slots in use, all ranks
    int64_t total;                           // pairs in all
    uint64_t hash;                           // FNV-1a over R, E, S, D, then (e, r, q) of every non-zero quota (int32, little-endian)
} PlanInfo;

// A plan in device memory.
typedef struct Plan {
    int *quota;     // (E,R) pairs of expert e computed on rank r; row sums are the experts' totals
    int *slot;      // (R,S) the expert whose copy a slot holds, ascending, -1 = empty (at the end); every copy has a quota > 0
    PlanInfo *info; // one
    int64_t *history; // (E) of eplb, which reads and updates it: average of past demand, zero before the first call; NULL: it
                      // takes this demand for the past
} Plan;
size_t plan_work_bytes(int R, int E, int N, int S); // scratch that plan_solve needs, on the device
// Fills plan from D (R,E). Legal always: every quota sits on the home or on a copy, at most S copies per rank, none at home,
// none twice. With topoep J is at most the identity plan's, and the least of the plans it looks at, where
//   J = pair_compute max_r load_r + max(pair_inter max_n max(out_n, in_n), pair_intra max_r max(out_r, in_r))
//     + max(copy_inter max_n max(wout_n, win_n), copy_intra max_r max(held_r, fan_r)) (1000-overlap)/1000 + fixed if any copy.
// An op: runs where the device is, asks nothing of the host.
void plan_solve(Dev *d, Plan *plan, const int *D, int R, int E, const Cost *cost, PlanOptions options, void *work);
#endif
