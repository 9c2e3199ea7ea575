// The router and its losses.
//
// Balance loss (Switch, 2101.03961), per layer: E sum_e f_e P_e, with f_e the share of the chosen pairs that went to e, before
// any drop, and P_e the mean of the scores normalised to sum 1; 1 at balance. f is held constant in its gradient. Its scope
// says over which tokens both are taken: the sequence (default; no layout can change it), the microbatch of a rank, or all
// tokens of the step so far on all ranks for f and the rank's own for P, whose gradients then add up to the global one's.
#include "kernels/check.h"
#include "moe/internal.h"
#include <math.h>

static RouterShape shape_of(const Moe *m, int BT) {
    return (RouterShape){.BT = BT, .E = m->c.E, .K = m->c.K, .score = m->c.score, .renorm = m->c.renorm, .scale = m->c.routed_scale,
                         .even = m->c.even, .first = m->me * m->c.max_BT};
}

static void balance_losses(Moe *m, Layer *l, int B, int T) {
    Dev *d = m->d;
    int E = m->c.E, BT = B * T;
    dev_count_add(d, l->seen, m->seen, E);
    dev_balance(d, l->f, m->p, l->idx, l->prob, BT, E, m->c.K, l->groups);
    if (m->c.scope == AUX_GLOBAL) {
        dev_copy(d, m->seen_all, l->seen, E * sizeof(int64_t));
        comm_dev_sum_int64(m->world, m->seen_all, E);
        dev_count_share(d, l->f, m->seen_all, E);
    }
    if (BT == 0) return;
    dev_dot(d, &l->losses[0], l->f, m->p, SIZE(l->groups, E), (double)E * BT / l->groups);
    dev_sumsq(d, &l->losses[1], l->lse, BT);
}

void router_forward(Moe *m, Layer *l, const real *x, int B, int T, MoePass pass) {
    Dev *d = m->d;
    int E = m->c.E, K = m->c.K, BT = B * T;
    dev_stage(d, STAGE_ROUTER);
    dev_router_logits(d, l->logits, x, l->p.router, BT, E, m->c.C);
    dev_route(d, l->idx, l->weight, l->prob, l->lse, l->bad, l->logits, l->p.bias, shape_of(m, BT));
    int capacity = m->c.capacity > 0 ? (int)fmin(ceil(m->c.capacity * BT * K / E), BT) : 0;
    if (m->c.capacity > 0 && capacity < 1) capacity = 1;
    dev_route_count(d, m->count, m->seen, m->ord, l->idx, BT, E, K, capacity);
    l->groups = m->c.scope == AUX_SEQ && B > 0 ? B : 1;
    if (pass.count) balance_losses(m, l, B, T);
}

void router_backward(Moe *m, Layer *l, real *dx, const real *x, int B, int T, MoePass pass) {
    Dev *d = m->d;
    int E = m->c.E, BT = B * T;
    dev_stage(d, STAGE_ROUTER);
    dev_route_bwd(d, m->dlogits, m->dweight, l->idx, l->prob, l->lse, l->logits, l->f, l->groups, pass.aux_scale, pass.z_scale,
                  shape_of(m, BT));
    dev_router_logits_bwd(d, dx, l->p.d_router, m->dlogits, x, l->p.router, BT, E, m->c.C);
}
