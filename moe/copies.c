// Copies of hot experts: weights out to the slots, gradients back to the homes. Which and from where is in the route's lists.
//
// Between nodes a copy crosses once, as a message to the entry rank of the node; inside a node it is pulled from a peer's
// window. Gradients: the entry slot takes in the other holders of its node in rank order, crosses once, and the home adds
// its node's copies in rank order, then the other nodes' sums in node order.
#include "moe/internal.h"

void copies_fetch(Moe *m, Layer *l) {
    if (m->c.S == 0 || m->c.plan.policy == POLICY_NONE) return;
    Route *t = &l->route;
    dev_stage(m->d, STAGE_COPIES);
    if (m->N > 1) {
        comm_rows(m->ep, m->slots, t->w_recv, t->n_w_recv, l->p.experts[m->me], t->w_send, t->n_w_send, m->unit * sizeof(real));
        comm_node_barrier(m->ep);
    }
    dev_copy_blocks(m->d, m->slots, l->blocks_at, t->pull, t->n_pull, m->unit);
}

void copies_return(Moe *m, Layer *l) {
    if (m->c.S == 0 || m->c.plan.policy == POLICY_NONE) return;
    Route *t = &l->route;
    dev_stage(m->d, STAGE_COPIES);
    if (m->N > 1) {
        dev_add_blocks(m->d, m->d_slots, m->d_slots_at, t->node_add, t->n_node_add, m->unit);
        comm_rows(m->ep, m->d_stage, t->g_recv, t->n_g_recv, m->d_slots, t->g_send, t->n_g_send, m->unit * sizeof(wide));
    }
    dev_add_blocks(m->d, l->p.d_experts, m->d_slots_at, t->home_add, t->n_home_add, m->unit);
}
