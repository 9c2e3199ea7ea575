// One rank's part in a plan: where its pairs go, what arrives and at which rows, which weights it sends and fetches.
// All but the number of rows that come from other nodes follows from the demand D and the plan, which all ranks hold.
//
// Rows. Rank r's receive buffer is cut into J = H + S groups: its H = E/R home experts ascending, then its slots. Within a
// group the rows come by source rank, then in token order: the canonical order of the global batch.
//
// Crossings. What leaves a node goes to the sender's counterpart in the other node (kernels/comm.h), which passes it on inside:
// it writes the row to the windows of the ranks that compute the token's experts, and on the way back sends one sum of their
// rows. With dedup a token crosses once to each node that has some of its pairs: X = N crossings per token, one per node, of
// Q = K pairs each. Without, each pair crosses by itself: X = K, Q = 1. With each crossing travel, once, the destination ranks
// and rows of its pairs ("meta") and their routing weights; the backward uses the same meta again.
// How many tokens cross does not follow from D (it depends on which experts share tokens), so counts travel with the rows, each
// to the one rank that needs it: no all-gather, and a GPU finds them in its own memory.
//
// Room. Receive buffers and blocks of crossings may have less room than can come. A row or crossing past it has no place: its
// pairs' row is -1, so that it is neither written nor read back, by its own rank or a relay, and off ends at the room. The route is
// then good for nothing but going on, with every collective issued; `need` says so, and how much room it would have taken.
#ifndef MOE_ROUTE_H
#define MOE_ROUTE_H
#include "kernels/blocks.h"
#include "topoep/plan.h"

typedef struct RouteShape {
    int R, N, E, K, S;
    int max_BT;        // tokens of the largest microbatch
    int dedup;         // a token crosses once per node
    int slicing;       // copies that cross are cut over the ports of a node (route_slice)
    int rows;          // room of each rank's receive buffer; 0 = for all that can come
    int crossings;     // room for crossings to one node; 0 = for all that there can be
} RouteShape;
static inline int route_crossings(RouteShape s) { return s.dedup ? s.N : s.K; }                 // X, per token
static inline int route_pairs(RouteShape s) { return s.dedup ? s.K : 1; }                       // Q, per crossing
static inline int route_most(RouteShape s) { return s.dedup ? s.max_BT : s.max_BT * s.K; }      // crossings to one node at most
static inline int route_room(RouteShape s) { return s.crossings ? s.crossings : route_most(s); } // of them there is room for

// In device memory. Lists hold a count and at most the stated number of entries.
typedef struct Route {
    int *off;               // (J+1) first row of each group; off[J] rows in all
    // Own pairs. On this node: row `row` of rank peer. On another one: row -1, peer R. Dropped: row -1, peer 0.
    int *peer, *row;        // (BT,K)
    int *wrow;              // (BT,K) row of the pair's weight: the same; with peer R, crossing*Q + q of the weights that cross; -1 dropped
    int *cross;             // (BT,X) crossing of the token (dedup: to node x): row node*room + i of the staging buffers; negative: none
    int *meta;              // (N*room, 2Q) window, the caller's: of each crossing its pairs' ranks, then their rows (-1: no pair)
    int *n_out;             // (N) crossings to each node; tokens ascending
    int *in, *n_in;         // (N*room, 2Q) window, the caller's, (N): the meta that came, and how many; comm_rows fills them
    int64_t *traffic;       // (2) the caller's: crossings sent; of their pairs, those that are passed on to another rank
    int *need;              // (3) the caller's, raised where it is below: 1 where something had no room; rows of the fullest
                            // rank (all ranks know it); this rank's crossings to one node
    // Copies. Weights go from home to the entry rank (lowest holder) of every other node, then inside the nodes. Any rank may
    // carry: it reads and writes the windows of its node.
    BlockSeg *w_send, *w_recv; // home experts of this node's ranks to send (H*G*(N-1)); slots of this node's ranks to fill (S*G)
    int *n_w_send, *n_w_recv;
    BlockCopy *pull;        // (S) slot dst from table entry peer: rank peer's home experts, or R + peer: its slots
    int *n_pull;
    // Gradients come back the same way: other holders' sums into the entry slot, entry slots (w_recv's list) to staging at
    // home, all into the home expert.
    BlockCopy *node_add;    // (S*G) entry slot dst += slot src of rank peer
    int *n_node_add;
    BlockSeg *g_recv;       // as many as w_send: home's staging blocks h*(N-1) + (other nodes ascending)
    BlockCopy *home_add;    // (H*R) home expert dst += slot src of rank peer (own node, ranks ascending), or, with peer R, += staging
                            // block src (nodes ascending)
    int *n_home_add;
} Route;

Route route_alloc(Dev *d, RouteShape s); // without what is the caller's
// Fills the route of rank `me` from plan, D (R,E) and its own pairs idx, ord (BT,K) (dev_route, dev_route_count); not `in`, n_in.
// R = N*G ranks, an op. `work`: route_work_bytes.
void route_make(Dev *d, Route *route, const Plan *plan, const int *D, const int *idx, const int *ord, int me, int BT, RouteShape s,
                void *work);
size_t route_work_bytes(RouteShape s);
// Elements [*at, *at + *n) of a block of `unit` that rank `me` carries of every copy in its lists: with slicing its port's
// part, in whole lines; without, all of it, and the lists hold only the copies whose home has this rank's place.
void route_slice(size_t *at, size_t *n, size_t unit, int me, RouteShape s);
#endif
