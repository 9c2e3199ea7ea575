// One mixture-of-experts layer, forward and backward: the same steps, mirrored. Read this file first.
//
// Ranks of one node write to each other's windows; a barrier of the node orders writes before reads. Why two per pass are
// enough: a rank's receive buffer of this pass is written again only after everyone has read what it sent back (they pass the
// combine's barrier before they dispatch again), and what it sent back is overwritten only after the next dispatch's barrier.
#include "moe/internal.h"
#include <assert.h>

static void wait_node(Moe *m) {
    Stage s = dev_stage_now(m->d);
    dev_stage(m->d, STAGE_WAIT);
    comm_node_barrier(m->ep);
    dev_stage(m->d, s);
}

// x[t,:] to the ranks that compute its experts, with the routing weights if w: to windows of this node and, through staging, to
// other nodes, at rows that both sides know from the plan.
static void dispatch(Moe *m, Layer *l, real *const *rows_at, real *rows, const real *x, const wide *w, int BT) {
    Route *t = &l->route;
    int C = m->c.C;
    dev_stage(m->d, STAGE_DISPATCH);
    dev_scatter_rows(m->d, rows_at, w ? l->weight_at : NULL, x, w, t->peer, t->row, BT, m->c.K, C);
    if (m->N > 1) {
        comm_rows(m->ep, rows, t->recv, t->n_recv, m->stage, t->send, t->n_send, C * sizeof(real));
        if (w) comm_rows(m->ep, l->row_weight, t->recv, t->n_recv, m->stage_weight, t->send, t->n_send, sizeof(wide));
    }
    wait_node(m);
}

// The way back: y[t,:] = add[t,:] + the sum of its pairs' rows; with dw also the gradients of the routing weights.
static void combine(Moe *m, Layer *l, real *y, wide *dw, const real *add, int BT) {
    Route *t = &l->route;
    int C = m->c.C;
    dev_stage(m->d, STAGE_COMBINE);
    wait_node(m);
    if (m->N > 1) {
        comm_rows(m->ep, m->stage, t->send, t->n_send, m->rows_out, t->recv, t->n_recv, C * sizeof(real));
        if (dw) comm_rows(m->ep, m->stage_weight, t->send, t->n_send, m->weight_out, t->recv, t->n_recv, sizeof(wide));
    }
    dev_gather_rows(m->d, y, dw, add, m->rows_out_at, dw ? m->weight_out_at : NULL, t->peer, t->row, BT, m->c.K, C);
}

// Counts of all ranks, the plan they all make from them (plan_solve: topoep/solve.h, run by kernels/cpu/plan.c), and this
// rank's part in it (route_make: kernels/cpu/route.c).
static void plan(Moe *m, Layer *l, int layer, int BT, MoePass pass) {
    int R = m->R, E = m->c.E, at = (pass.count ? pass.micro : m->c.micros) * m->c.layers + layer;
    int *D = m->demand + (size_t)at * R * E;
    dev_stage(m->d, STAGE_WAIT);
    comm_dev_allgather(m->ep, D, m->count, E * sizeof(int));
    dev_stage(m->d, STAGE_PLAN);
    l->plan.info = m->info + at;
    Plan made = l->plan;
    if (!pass.count) made.history = NULL; // observing leaves a policy's past alone
    plan_solve(m->d, &made, D, R, E, &m->c.cost, m->c.plan, m->plan_work);
    route_make(m->d, &l->route, &l->plan, D, l->idx, m->ord, m->me, BT, m->c.K, R, E, m->N, m->c.S, m->route_work);
}

void moe_forward(Moe *m, int layer, real *y, const real *add, const real *x, int B, int T, MoePass pass) {
    Layer *l = &m->layer[layer];
    int BT = B * T, shared = m->c.shared;
    assert(BT <= m->c.max_BT && layer < m->c.layers && pass.micro < m->c.micros);
    router_forward(m, l, x, B, T, pass);
    plan(m, l, layer, BT, pass);
    copies_fetch(m, l);
    dispatch(m, l, l->rows_at, l->rows, x, l->weight, BT);
    dev_stage(m->d, STAGE_EXPERTS);
    experts_forward(m, l);
    if (shared) ffn_forward(m->d, y, l->shared_gu, m->shared_h, add, x, l->p.shared, BT, m->c.C, shared);
    combine(m, l, y, NULL, shared ? y : add, BT);
    dev_stage(m->d, STAGE_OTHER);
}

void moe_backward(Moe *m, int layer, real *dx, const real *dy, const real *x, int B, int T, MoePass pass) {
    Layer *l = &m->layer[layer];
    int BT = B * T, shared = m->c.shared;
    copies_fetch(m, l);
    dispatch(m, l, m->dy_rows_at, m->dy_rows, dy, NULL, BT);
    dev_stage(m->d, STAGE_EXPERTS);
    dev_zero_blocks(m->d, m->d_slots, l->plan.slot + m->me * m->c.S, m->c.S, m->unit); // after the barrier: homes have read them
    experts_backward(m, l);
    if (shared)
        ffn_backward(m->d, dx, l->p.d_shared, l->shared_gu, m->shared_h, m->shared_dh, NULL, dy, x, l->p.shared, BT, m->c.C, shared);
    combine(m, l, dx, m->dweight, shared ? dx : NULL, BT);
    copies_return(m, l);
    router_backward(m, l, dx, x, B, T, pass);
    dev_stage(m->d, STAGE_OTHER);
}
