// Copies of hot experts: weights out to the slots, gradients back to the homes. Which and from where is in the route's lists.
//
// Between nodes a copy crosses once, into the slot of the entry rank of the node; with slicing every rank carries its part of
// it, from the window of the home to the window of the entry rank. Inside a node a copy is pulled from a peer's window.
// Gradients: the entry slot takes in the other holders of its node in rank order, crosses once, and the home adds
// its node's copies in rank order, then the other nodes' sums in node order.
#include "moe/internal.h"

static int none(const Moe *m) { return m->c.S == 0 || m->c.plan.policy == POLICY_NONE; }

void copies_start(Moe *m, Layer *l) {
    if (none(m) || m->N == 1) return;
    Route *t = &l->route;
    dev_stage(m->d, STAGE_COPIES);
    comm_blocks_start(m->ep, (void *const *)(l->blocks_at + m->R), t->w_recv, t->n_w_recv, (const void *const *)l->blocks_at, t->w_send,
                      t->n_w_send, m->unit * sizeof(real), m->part_at * sizeof(real), m->part * sizeof(real));
}

void copies_finish(Moe *m, Layer *l) {
    if (none(m)) return;
    Route *t = &l->route;
    dev_stage(m->d, STAGE_COPIES);
    if (m->N > 1) {
        comm_blocks_finish(m->ep);
        comm_node_barrier(m->ep);
    }
    dev_copy_blocks(m->d, m->slots, l->blocks_at, t->pull, t->n_pull, m->unit);
}

void copies_return_start(Moe *m, Layer *l) {
    if (none(m) || m->N == 1) return;
    Route *t = &l->route;
    dev_stage(m->d, STAGE_COPIES);
    dev_add_blocks(m->d, m->d_slots, m->d_slots_at, t->node_add, t->n_node_add, m->unit);
    comm_node_barrier(m->ep);
    comm_blocks_start(m->ep, (void *const *)m->d_stage_at, t->g_recv, t->n_w_send, (const void *const *)m->d_slots_at, t->w_recv,
                      t->n_w_recv, m->unit * sizeof(wide), m->part_at * sizeof(wide), m->part * sizeof(wide));
}

void copies_return_finish(Moe *m, Layer *l) {
    if (none(m)) return;
    Route *t = &l->route;
    dev_stage(m->d, STAGE_COPIES);
    if (m->N > 1) {
        comm_blocks_finish(m->ep);
        comm_node_barrier(m->ep);
    }
    dev_add_blocks(m->d, l->p.d_experts, m->d_slots_at, t->home_add, t->n_home_add, m->unit);
}
