// The mixture-of-experts layer: route, plan, dispatch, experts, combine; and back. moe/layer.c is the place to read.
// Symbols: model/model.h. H = E/R experts live on each rank, S slots hold copies, J = H + S groups of rows.
#ifndef MOE_MOE_H
#define MOE_MOE_H
#include "kernels/comm.h"
#include "kernels/device.h"
#include "topoep/plan.h"

// An expert is one block of 3FC elements: gate (F,C), up (F,C), down (C,F), so that a copy is one transfer.
#define EXPERT_SIZE(F, C) SIZE(3, F, C)

// ---- one feed-forward network, or several by groups (moe/expert.c): dense layers, shared and routed experts alike ----
// Buffers that the backward needs are the caller's: gu (M,2F). h (M,F) is scratch in both directions.
// y[m,:] = add[m,:] + down (silu(gate x) up x); y (M,C) overwritten | add (M,C) or NULL, may be y | x (M,C)
void ffn_forward(Dev *d, real *y, real *gu, real *h, const real *add, const real *x, const real *w, int M, int C, int F);
// gu (M,2F) = what a forward leaves in it
void ffn_up(Dev *d, real *gu, const real *x, const real *w, int M, int C, int F);
// dx = add + ...; dw accumulates (gate, up, down as w); gu is destroyed (becomes its gradient)
void ffn_backward(Dev *d, real *dx, wide *dw, real *gu, real *h, real *dh, const real *add, const real *dy, const real *x,
                  const real *w, int M, int C, int F);

// What the backward makes again, bit for bit, layer by layer in buffers that all layers share, where the forward otherwise keeps it for
// each layer; a level does what those before it do. Never made again: the router's choice and weights, the plan, the routes.
typedef enum {
    RECOMPUTE_NONE,
    RECOMPUTE_NORMS, // both norms' outputs, the rotated queries and keys
    RECOMPUTE_UP,    // gate and up products of experts and dense layers
    RECOMPUTE_BLOCK, // all between a block's input and its router: attention, the second dispatch of the rows
} Recompute;

typedef enum { AUX_SEQ, AUX_MICRO, AUX_GLOBAL } AuxScope; // over which tokens the balance loss takes f and P

typedef struct MoeConfig {
    int C, E, K, F;
    int shared;              // width of the shared expert (n_shared * F), 0 = none
    RouterScore score;
    int renorm;
    double routed_scale;
    double capacity;         // 0 = dropless; else at most ceil(capacity * BT*K/E) pairs of an expert per microbatch of a rank
    int layers;              // MoE layers
    int max_BT, micros;      // largest microbatch in tokens; microbatches per step
    int training;            // 0: no backward, no buffers for it
    Recompute recompute;
    AuxScope scope;
    int S;                   // slots per rank
    double recv_room;        // rows that may arrive at a rank, and cross to a node, over their mean; 0 = room for the worst case
    int dedup;               // a token crosses to a node once, not once per pair
    int even;                // an even choice of experts replaces the router's: no training method, the ceiling of speed
    Cost cost;
    PlanOptions plan;
} MoeConfig;

// Where one MoE layer's parameters and gradients lie (device memory).
typedef struct MoeParams {
    const real *router;      // (E,C)
    wide *bias;              // (E) selection bias or NULL
    real *const *experts;    // host table (R): experts (H, 3FC) of every rank of this node, NULL for other nodes; own never NULL
    const real *shared;      // 3 * shared * C or NULL
    wide *d_router, *d_experts, *d_shared; // gradients of the own ones; NULL without training
} MoeParams;

typedef struct Moe Moe;
// ep: the expert-parallel group; world: everyone (global scope of the balance loss). params: one per MoE layer.
// Refuses (STATUS_USAGE): E not divisible by R; K > E; K = 1 with renorm when E > 1; sizes past int rows.
Moe *moe_init(Dev *d, Comm *ep, Comm *world, MoeConfig c, const MoeParams *params);
// Of the memory asked for: what stays untouched while each rank gets its even share of the pairs, as buffers have room for more.
// Of the windows of the node's other ranks: what this rank writes or reads, so that its pages count here as well.
void moe_idle_bytes(const Moe *m, double idle[MEMORY_KINDS]);
double moe_peer_bytes(const Moe *m);
void moe_free(Moe *m);

// Weight of one token in the step's losses: coefficient / (MoE layers * tokens of the step over all ranks). micro: index of the
// microbatch in its step. count = 0 (evaluation, sampling): statistics of the step and the bias are left alone.
typedef struct MoePass {
    double aux_scale, z_scale;
    int micro, count;
} MoePass;
// y[t,:] = add[t,:] + MoE(x)[t,:]  for B sequences of T tokens. y (BT,C) overwritten | add may be y | x (BT,C)
// Collective over ep, also for ranks without tokens.
void moe_forward(Moe *m, int layer, real *y, const real *add, const real *x, int B, int T, MoePass pass);
// dx (BT,C) overwritten with d loss / d x; parameter gradients accumulate. x as in the forward; dy (BT,C).
void moe_backward(Moe *m, int layer, real *dx, const real *dy, const real *x, int B, int T, MoePass pass);

// ---- after a step (host) --------------------------------------------------------------------------------------------
typedef struct MoeStats {
    int64_t *seen;             // (layers,E) pairs chosen in this step over the whole world, before drops
    double aux, z;             // mean over layers of the balance loss and of mean lse^2, over the world's tokens; unscaled
    double maxvio;             // mean over layers of max_e seen / mean - 1
    double rank_before, rank_after;         // rank max/mean without and with the plan: mean over (layer, microbatch)
    double rank_before_max, rank_after_max; // the largest
    int64_t pairs_self, pairs_node, pairs_inter; // over layers, microbatches and EP groups
    int64_t crossings;                      // rows that went to another node: tokens or, without dedup, pairs
    int64_t bytes_node, bytes_inter;        // of activations and routing weights, forward and backward; bytes_node with what relays
                                            // pass on, bytes_inter with the crossings' meta
    int64_t weight_bytes;                   // copies out and gradients back
    int64_t copies, plans_with_copies, plans, dropped;
} MoeStats;
// Collective over the world. 1: since moe_stats (or moe_grow) a pass had not enough room for the rows that came to a rank, or crossed,
// somewhere in the world, and what was computed is void. Then there is more room now, the step's statistics have been reset, and
// eplb's past is what it was: the same passes are to be run again, until there is room. Recorded ops are void as well.
int moe_grow(Moe *m);
typedef struct MoeRoom {
    int rows, crossings;               // of a receive buffer; to one node (0: there is one)
    int needed_rows, needed_crossings; // as the last moe_grow that returned 1 found
    int grown;                         // how often
    double bytes;                      // of this rank, in buffers that have this room
} MoeRoom;
MoeRoom moe_room(const Moe *m);
// Collective over the world. Reads and resets the step's statistics; stops (STATUS_NUMERIC) naming layer and token if the
// router met a NaN. s->seen is the Moe's own memory, valid until the next call.
void moe_stats(Moe *m, MoeStats *s);
// Ops, before moe_stats. Loss-free balancing from the step's counts, nothing where *factor (device) is no number. And where a router
// notes that it met a NaN, and a route that rows had no room: (n) on the device, 0 = none.
void moe_update_bias(Moe *m, double rate, const wide *factor);
const int *moe_faults(const Moe *m, int *n);
// Demand matrix (R,E) and plan of (micro, layer) of the step that moe_stats last read, for traces and checks; and this rank's traffic:
// rows it sent to other nodes, and pairs among them that were passed on to another rank there.
void moe_demand(Moe *m, int micro, int layer, int *D, PlanInfo *info, int64_t traffic[2]);
int moe_crossing_pairs(const Moe *m); // pairs that a row which crosses may stand for: K with dedup, else 1
// The past by which eplb plans, alike on all ranks of ep: (layers,E), host. For checkpoints.
void moe_history_get(const Moe *m, int64_t *history);
void moe_history_set(Moe *m, const int64_t *history);
// Dies (STATUS_COMM) unless all ranks of ep made the same plans in the last step.
void moe_check_hashes(Moe *m);
#endif
