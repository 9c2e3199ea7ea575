// One mixture-of-experts layer, forward and backward: the same steps, mirrored. Read this file first.
//
// Ranks of one node write to each other's windows; a barrier of the node orders writes before reads. Why two per pass are
// enough: a rank's receive buffer of this pass is written again only after everyone has read what it sent back (they pass the
// combine's barrier before they dispatch again), and what it sent back is overwritten only after the next dispatch's barrier.
// A dispatch that a backward makes again writes where the layer behind it has read: before that one's combine.
// Slots are filled from the start of a pass on: the pass before ended with a barrier that followed their last use.
#include "moe/internal.h"
#include <assert.h>

// Counts of all ranks, the plan they all make from them (plan_solve: topoep/solve.h, run by kernels/cpu/plan.c), and this
// rank's part in it (route_make: kernels/cpu/route.c).
static void plan(Moe *m, Layer *l, int layer, int BT, MoePass pass) {
    int R = m->R, E = m->c.E, at = (pass.count ? pass.micro : m->c.micros) * m->c.layers + layer;
    int *D = m->demand + (size_t)at * R * E;
    dev_stage(m->d, STAGE_COUNTS);
    comm_dev_allgather(m->ep, D, m->count, E * sizeof(int));
    dev_stage(m->d, STAGE_PLAN);
    l->plan.info = m->info + at;
    Plan made = l->plan;
    if (!pass.count) made.history = NULL; // observing leaves a policy's past alone
    plan_solve(m->d, &made, D, R, E, &m->c.cost, m->c.plan, m->plan_work);
    l->route.traffic = m->traffic + 2 * at;
    route_make(m->d, &l->route, &l->plan, D, l->idx, m->ord, m->me, BT, m->shape, m->route_work);
}

void moe_forward(Moe *m, int layer, real *y, const real *add, const real *x, int B, int T, MoePass pass) {
    Layer *l = &m->layer[layer];
    int BT = B * T, shared = m->c.shared;
    assert(BT <= m->c.max_BT && layer < m->c.layers && pass.micro < m->c.micros);
    router_forward(m, l, x, B, T, pass);
    plan(m, l, layer, BT, pass);
    copies_start(m, l);
    dispatch(m, l, l->rows_at, x, l->weight, BT);
    dev_stage(m->d, STAGE_EXPERTS);
    if (shared) ffn_forward(m->d, y, l->shared_gu, m->shared_h, add, x, l->p.shared, BT, m->c.C, shared);
    experts_up(m, l, 0, m->H); // home experts, while copies arrive
    copies_finish(m, l);
    experts_up(m, l, m->H, m->J);
    experts_down(m, l);
    combine(m, l, y, NULL, shared ? y : add, BT);
    dev_stage(m->d, STAGE_OTHER);
}

void moe_backward(Moe *m, int layer, real *dx, const real *dy, const real *x, int B, int T, MoePass pass) {
    Layer *l = &m->layer[layer];
    int BT = B * T, shared = m->c.shared;
    Recompute again = layer + 1 < m->c.layers ? m->c.recompute : RECOMPUTE_NONE; // what the last layer's forward made is still there
    copies_start(m, l);
    if (again >= RECOMPUTE_BLOCK) dispatch(m, l, l->rows_at, x, NULL, BT);
    dispatch(m, l, m->dy_rows_at, dy, NULL, BT);
    dev_stage(m->d, STAGE_EXPERTS);
    if (shared && again >= RECOMPUTE_UP) ffn_up(m->d, l->shared_gu, x, l->p.shared, BT, m->c.C, shared);
    if (shared)
        ffn_backward(m->d, dx, l->p.d_shared, l->shared_gu, m->shared_h, m->shared_dh, NULL, dy, x, l->p.shared, BT, m->c.C, shared);
    experts_down_bwd(m, l, 0, m->H);
    if (again >= RECOMPUTE_UP) experts_up(m, l, 0, m->H);
    copies_finish(m, l);
    experts_down_bwd(m, l, m->H, m->J);
    if (again >= RECOMPUTE_UP) experts_up(m, l, m->H, m->J); // the copies' weights are back
    dev_zero_blocks(m->d, m->d_slots, l->plan.slot + m->me * m->c.S, m->c.S, m->unit); // after a barrier: homes have read them
    experts_up_bwd(m, l);
    combine(m, l, dx, m->dweight, shared ? dx : NULL, BT);
    copies_return_start(m, l);
    router_backward(m, l, dx, x, B, T, pass);
    copies_return_finish(m, l);
    dev_stage(m->d, STAGE_OTHER);
}
