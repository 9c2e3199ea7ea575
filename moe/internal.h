// What the files of moe/ share.
#ifndef MOE_INTERNAL_H
#define MOE_INTERNAL_H
#include "moe/moe.h"
#include "topoep/route.h"

// What the backward of one layer needs from its forward, and where its peers' memory lies. Device memory, host struct.
typedef struct Layer {
    MoeParams p;
    int *idx;                 // (BT,K) chosen experts
    wide *weight;             // (BT,K) their weights
    wide *logits, *prob, *lse; // (BT,E), (BT,E), (BT)
    wide *f;                  // (groups,E) share of pairs the balance loss holds constant
    int groups;               // of tokens, over which the balance loss takes f and P
    int *bad;                 // 1 + first token with a NaN score, 0 = none
    int64_t *seen;            // (E) pairs chosen in this step by this rank's tokens, before drops
    double *losses;           // [2] sum over tokens of balance loss and lse^2
    Plan plan;                // slot table and quotas of the last pass
    Route route;
    real *rows;               // (M,C) received inputs, in this layer's slice of the window (or the only one: RECOMPUTE_BLOCK)
    wide *row_weight;         // (M)
    real *const *rows_at;     // device table (R): rows of every rank of this node
    wide *const *weight_at;   // device table (R+1): row_weight of every rank of this node, then the weights that cross
    real *gu;                 // (M,2F) this and the next: all layers' from RECOMPUTE_UP on
    real *shared_gu;          // (BT,2*shared)
    const real *const *gate_up, *const *down; // device tables (J): the groups' weights, home then slots
    wide *const *d_gate_up, *const *d_down;   // and where their gradients accumulate
    const real *const *blocks_at;             // device table (2R): home experts of every rank, then slots of every rank
} Layer;

enum { ROOM_WINDOWS = 11 };
#define ROOM_HELD(layers) (3 * (layers) + 6)

struct Moe {
    Dev *d;
    Comm *ep, *world;
    MoeConfig c;
    int R, N, me, H, J;
    int M;                    // rows of the receive buffers: shape.rows
    RouteShape shape;
    // room.c: what has room for rows, to be given back together
    void **held, **windows[ROOM_WINDOWS]; // of the device, max_held of them; windows
    int n_held, max_held, n_windows;
    MoeRoom room;
    size_t unit;              // elements of an expert
    size_t part_at, part;     // elements of an expert that this rank carries of copies that cross nodes
    Layer *layer;
    int *count, *seen, *ord;  // (E), (E), (BT,K)
    wide *p;                  // (groups,E) mean scores
    int64_t *seen_all;        // (E) of the world so far, for the global scope
    int64_t *history, *history_kept; // (layers,E) eplb's past; as of before the step
    int *need;                // (3) of the routes
    int *demand;              // (micros+1,layers,R,E); the last: passes that are not counted
    PlanInfo *info;           // (micros+1,layers)
    void *plan_work, *route_work;
    int64_t *traffic;         // (micros+1,layers,2) of the routes
    // Windows, with more than one node: crossings on their way out and back, N blocks of route_room
    real *stage, *relay;      // (N*room,C) of this rank's tokens; of other nodes' that it passes on
    wide *stage_weight, *relay_weight; // (N*room,Q)
    int *meta;                // (N*room,2Q)
    real *const *stage_at;    // device table (1)
    real *dy_rows;            // (M,C) window: received output gradients
    real *const *dy_rows_at;  // device table (R)
    real *rows_out;           // (M,C) window: what goes back: outputs, or input gradients
    const real *const *rows_out_at;
    wide *weight_out;         // (M) window: gradients of the routing weights
    const wide *const *weight_out_at;
    real *slots;              // (S, unit) window: weights of the copies
    wide *d_slots;            // (S, unit) window: their gradients
    wide *d_stage;            // (H*(N-1), unit) window: gradients of copies on other nodes, on their way home
    const wide *const *d_slots_at; // device table (R+1): d_slots of every rank of this node, then d_stage
    wide *const *d_stage_at;  // device table (R)
    real *h, *dh;             // (M,F)
    real *shared_h, *shared_dh; // (BT, shared)
    wide *dweight, *dlogits;  // (BT,K), (BT,E)
    PlanInfo *info_host;      // (micros,layers)
    int64_t *traffic_host;    // (micros,layers,2)
    int64_t *seen_host;       // (layers,E) of the world, as the last moe_stats summed them
    int64_t *seen_dev;        // (layers,E) all layers' seen
    int64_t *seen_sum;        // (layers,E) of the world
    double *losses_dev;       // (layers,2) all layers' losses
    int *bad_dev;             // (layers), then need
};

// moe/moe.c
// Device table of the peers' windows (R), each `skip` bytes in, and `last` behind them.
void *peers_table(Dev *d, void *const *peer, int R, size_t skip, void *last);
void step_forget(Moe *m); // what the step has gathered so far; eplb's past is again what it was before
// moe/room.c
RouteShape room_shape(const MoeConfig *c, int R, int N); // dies (STATUS_USAGE) where an int does not count the rows
void room_make(Moe *m);   // all that has m->shape's room. Collective.
// moe/router.c
void router_forward(Moe *m, Layer *l, const real *x, int B, int T, MoePass pass);
void router_backward(Moe *m, Layer *l, real *dx, const real *x, int B, int T, MoePass pass);
// moe/dispatch.c: adjoints of each other, each used forward and backward
void dispatch(Moe *m, Layer *l, real *const *rows_at, const real *x, const wide *w, int BT);
void combine(Moe *m, Layer *l, real *y, wide *dw, const real *add, int BT);
// moe/expert.c: rows of groups [from, to) of the receive buffer, and of all J
void experts_up(Moe *m, Layer *l, int from, int to);        // gate and up products
void experts_down(Moe *m, Layer *l);                        // the rest of the forward
void experts_down_bwd(Moe *m, Layer *l, int from, int to);  // gradient by h
void experts_up_bwd(Moe *m, Layer *l);                      // the rest of the backward
// moe/copies.c: between start and finish the ranks compute. Collective over the node.
void copies_start(Moe *m, Layer *l);        // weights of the plan's copies on their way into the slots
void copies_finish(Moe *m, Layer *l);
void copies_return_start(Moe *m, Layer *l); // their gradients on their way to the home experts
void copies_return_finish(Moe *m, Layer *l);
#endif
