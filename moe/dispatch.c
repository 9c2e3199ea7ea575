// Rows of tokens to the ranks that compute their experts, and what those computed back: dispatch and combine.
//
// Inside a node a rank writes to, and reads from, its peers' windows; a barrier of the node orders the two. What leaves the node
// crosses to a relay (topoep/route.h), whose own scatter and gather pass it on inside there.
#include "moe/internal.h"

// Pairs of this rank's own tokens on its node
static RowMap own_pairs(const Moe *m, const Route *t, int BT) {
    return (RowMap){.BT = BT, .K = m->c.K, .ld = m->c.K, .peer = t->peer, .row = t->row, .wrow = t->wrow};
}

// Crossings of its tokens in the staging buffer
static RowMap own_crossings(const Moe *m, const Route *t, int BT) {
    int X = route_crossings(m->shape);
    return (RowMap){.BT = BT, .K = X, .ld = X, .row = t->cross};
}

// Pairs of other nodes' tokens that came to this rank, on its node
static RowMap relayed_pairs(const Moe *m, const Route *t) {
    int Q = route_pairs(m->shape), room = route_room(m->shape);
    return (RowMap){.BT = m->N * room, .K = Q, .ld = 2 * Q, .peer = t->in, .row = t->in + Q, .n = t->n_in, .room = room};
}

static void wait_node(Moe *m) {
    Stage s = dev_stage_now(m->d);
    dev_stage(m->d, STAGE_WAIT);
    comm_node_barrier(m->ep);
    dev_stage(m->d, s);
}

// x[t,:] to the rows of its pairs; with w (the forward) their routing weights, and the meta of what crosses.
void dispatch(Moe *m, Layer *l, real *const *rows_at, const real *x, const wide *w, int BT) {
    Route *t = &l->route;
    int C = m->c.C, Q = route_pairs(m->shape);
    wide *const *weight_at = w ? l->weight_at : NULL;
    dev_stage(m->d, STAGE_DISPATCH);
    dev_scatter_rows(m->d, rows_at, weight_at, x, w, own_pairs(m, t, BT), C);
    if (m->N > 1) {
        dev_scatter_rows(m->d, m->stage_at, NULL, x, NULL, own_crossings(m, t, BT), C);
        const Rows out[] = {{m->relay, m->stage, C * sizeof(real)},
                            {t->in, t->meta, 2 * Q * sizeof(int)},
                            {m->relay_weight, m->stage_weight, Q * sizeof(wide)}};
        comm_rows(m->ep, out, w ? 3 : 1, t->n_in, t->n_out, !w, route_room(m->shape));
        dev_scatter_rows(m->d, rows_at, weight_at, m->relay, w ? m->relay_weight : NULL, relayed_pairs(m, t), C);
    }
    wait_node(m);
}

// The way back: y[t,:] = add[t,:] + the sum of its pairs' rows, those of this node first, then those of the other nodes, one sum
// each; with dw also the gradients of the routing weights.
void combine(Moe *m, Layer *l, real *y, wide *dw, const real *add, int BT) {
    Route *t = &l->route;
    int C = m->c.C, Q = route_pairs(m->shape);
    const wide *const *weight_at = dw ? m->weight_out_at : NULL;
    dev_stage(m->d, STAGE_COMBINE);
    wait_node(m);
    if (m->N > 1) {
        dev_gather_rows(m->d, m->relay, dw ? m->relay_weight : NULL, NULL, m->rows_out_at, weight_at, relayed_pairs(m, t), C);
        const Rows back[] = {{m->stage, m->relay, C * sizeof(real)}, {m->stage_weight, m->relay_weight, Q * sizeof(wide)}};
        comm_rows(m->ep, back, dw ? 2 : 1, t->n_out, t->n_in, 1, route_room(m->shape));
    }
    dev_gather_rows(m->d, y, dw, add, m->rows_out_at, weight_at, own_pairs(m, t, BT), C);
    if (m->N > 1) dev_gather_rows(m->d, y, NULL, y, (const real *const *)m->stage_at, NULL, own_crossings(m, t, BT), C);
}
