// One rank's part in a plan: where its pairs go, what arrives and at which rows, which weights it sends and fetches.
// Everything follows from the demand D and the plan, which all ranks hold; no further exchange of counts is needed.
//
// Rows. Rank r's receive buffer is cut into J = H + S groups: its H = E/R home experts ascending, then its slots. Within a
// group the rows come by source rank, then in token order: the canonical order of the global batch.
// Staging. Pairs that cross to another node pass through a staging buffer of BT*K rows, in which this rank's pairs lie by
// expert, then in token order, so that what one peer gets of one expert is one run of rows.
#ifndef MOE_ROUTE_H
#define MOE_ROUTE_H
#include "kernels/blocks.h"
#include "topoep/plan.h"

// In device memory. Lists hold a count and at most the stated number of entries.
typedef struct Route {
    int *off;               // (J+1) first row of each group; off[J] rows in all
    int *peer, *row;        // (BT,K) where a pair's row lies: rank peer of this node, or peer = R: the staging buffer; row -1 = dropped
    RowSeg *send, *recv;    // rows between staging and other nodes (E+R*S), and between other nodes and the receive buffer (J*R)
    int *n_send, *n_recv;   // (in the combine the two change places)
    // Copies. Weights go from home to the entry rank (lowest holder) of every other node, then inside the nodes.
    RowSeg *w_send, *w_recv; // home experts to send (H*N); slots to fill (S)
    int *n_w_send, *n_w_recv;
    BlockCopy *pull;        // (S) slot dst from table entry peer: rank peer's home experts, or R + peer: its slots
    int *n_pull;
    // Gradients come back the same way: other holders' sums into the entry slot, entry slot to staging at home, all into the home expert.
    BlockCopy *node_add;    // (S*G) entry slot dst += slot src of rank peer
    int *n_node_add;
    RowSeg *g_send, *g_recv; // entry slots to send (S); staging rows at home (H*N)
    int *n_g_send, *n_g_recv;
    BlockCopy *home_add;    // (H*R) home expert dst += slot src of rank peer (own node, ranks ascending), or peer = R: staging row src (nodes ascending)
    int *n_home_add;
} Route;

Route route_alloc(Dev *d, int max_BT, int K, int R, int E, int N, int S);
// Fills the route of rank `me` from plan, D (R,E) and its own pairs idx, ord (BT,K) (dev_route, dev_route_count).
// R = N*G ranks, an op. `work`: route_work_bytes.
void route_make(Dev *d, Route *route, const Plan *plan, const int *D, const int *idx, const int *ord, int me, int BT, int K, int R,
                int E, int N, int S, void *work);
size_t route_work_bytes(int R, int E, int S);
#endif
