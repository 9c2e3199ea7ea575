// Memory of the MoE layers, and what is read from them after a step.
#include "kernels/check.h"
#include "moe/internal.h"
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- memory ----------------------------------------------------------------------------------------------------------

static void check(const MoeConfig *c, int R) {
    CHECK_USAGE(c->E >= 1 && c->E % R == 0,
                "%d experts on %d ranks: every rank must hold as many (hint: choose --experts a multiple of --ep, or another --ep)",
                c->E, R);
    CHECK_USAGE(c->K >= 1 && c->K <= c->E, "%d experts per token of %d (hint: --topk between 1 and --experts)", c->K, c->E);
    CHECK_USAGE(!(c->K == 1 && c->renorm && c->E > 1),
                "one expert per token with renormalised weights: the weight is always 1 and the router never learns "
                "(hint: --no-renorm, or --topk 2)");
}

static void *upload(Dev *d, const void *host, size_t bytes, const char *what) {
    void *x = dev_alloc(d, bytes, what);
    dev_upload(d, x, host, bytes);
    return x;
}

void *peers_table(Dev *d, void *const *peer, int R, size_t skip, void *last) {
    void **t = host_alloc(SIZE(R + 1, sizeof(void *)));
    for (int r = 0; r < R; r++) t[r] = peer[r] ? (char *)peer[r] + skip : NULL;
    t[R] = last;
    void *x = upload(d, t, SIZE(R + 1, sizeof(void *)), "tables");
    free(t);
    return x;
}

// Device table of J groups' blocks: home experts, then slots, each `skip` elements of `elem` bytes in.
static void *group_table(Moe *m, const void *home, const void *slots, size_t skip, size_t elem) {
    const char **t = host_alloc(SIZE(m->J + 1, sizeof(void *)));
    for (int j = 0; j < m->J; j++)
        t[j] = (const char *)(j < m->H ? home : slots) + ((j < m->H ? j : j - m->H) * m->unit + skip) * elem;
    void *x = upload(m->d, t, SIZE(m->J, sizeof(void *)), "tables");
    free(t);
    return x;
}

static void *blocks_table(Moe *m, real *const *experts, void *const *slots) {
    void **t = host_alloc(SIZE(2, m->R, sizeof(void *)));
    for (int r = 0; r < m->R; r++) t[r] = experts[r], t[m->R + r] = slots ? slots[r] : NULL;
    void *x = upload(m->d, t, SIZE(2, m->R, sizeof(void *)), "tables");
    free(t);
    return x;
}

// Returns the host table of the slots, NULL where there are none.
static void **make_slots(Moe *m) {
    const MoeConfig *c = &m->c;
    if (!c->S) return NULL;
    dev_kind(m->d, MEMORY_SLOTS);
    void **slots = comm_window(m->ep, SIZE(c->S, m->unit, sizeof(real)), "copies");
    m->slots = slots[m->me];
    if (!c->training) return slots;
    void **d_slots = comm_window(m->ep, SIZE(c->S, m->unit, sizeof(wide)), "gradients of copies");
    m->d_slots = d_slots[m->me];
    if (m->N > 1) {
        void **d_stage = comm_window(m->ep, SIZE(m->H, m->N - 1, m->unit, sizeof(wide)), "gradients of copies on their way");
        m->d_stage = d_stage[m->me];
        m->d_stage_at = peers_table(m->d, d_stage, m->R, 0, NULL);
    }
    m->d_slots_at = peers_table(m->d, d_slots, m->R, 0, m->d_stage);
    return slots;
}

static void layer_init(Moe *m, int i, const MoeParams *p, void *const *slots, const Layer *first) {
    const MoeConfig *c = &m->c;
    Dev *d = m->d;
    Layer *l = &m->layer[i];
    int BT = c->max_BT, E = c->E, K = c->K;
    if (!c->training && i > 0) *l = *first; // without a backward all layers share one layer's buffers
    l->p = *p;
    l->seen = m->seen_dev + (size_t)i * E;
    l->losses = m->losses_dev + 2 * i;
    l->bad = m->bad_dev + i;
    dev_kind(d, MEMORY_WORKSPACE);
    l->gate_up = group_table(m, p->experts[m->me], m->slots, 0, sizeof(real));
    l->down = group_table(m, p->experts[m->me], m->slots, SIZE(2, c->F, c->C), sizeof(real));
    l->blocks_at = blocks_table(m, p->experts, slots);
    if (c->training) {
        l->d_gate_up = group_table(m, p->d_experts, m->d_slots, 0, sizeof(wide));
        l->d_down = group_table(m, p->d_experts, m->d_slots, SIZE(2, c->F, c->C), sizeof(wide));
    } else if (i > 0) {
        return;
    }
    dev_kind(d, MEMORY_ACTIVATIONS);
    l->idx = dev_alloc(d, SIZE(BT, K, sizeof(int)), "router");
    l->weight = dev_alloc(d, SIZE(BT, K, sizeof(wide)), "router");
    l->logits = dev_alloc(d, SIZE(BT, E, sizeof(wide)), "router");
    l->prob = dev_alloc(d, SIZE(BT, E, sizeof(wide)), "router");
    l->lse = dev_alloc(d, SIZE(BT, sizeof(wide)), "router");
    l->f = dev_alloc(d, SIZE(BT, E, sizeof(wide)), "router");
    int own_gu = i == 0 || c->recompute < RECOMPUTE_UP;
    if (c->shared && own_gu) l->shared_gu = dev_alloc(d, SIZE(BT, 2, c->shared, sizeof(real)), "shared expert's activations");
    else l->shared_gu = first->shared_gu;
    dev_kind(d, MEMORY_PLANS);
    l->plan.quota = dev_alloc(d, SIZE(E, m->R, sizeof(int)), "plans");
    l->plan.slot = dev_alloc(d, SIZE(m->R, c->S + 1, sizeof(int)), "plans");
    l->plan.history = m->history + (size_t)i * E;
    l->route = route_alloc(d, m->shape);
    l->route.need = m->need;
}

Moe *moe_init(Dev *d, Comm *ep, Comm *world, MoeConfig c, const MoeParams *params) {
    const CommInfo *info = comm_info(ep);
    check(&c, info->size);
    cost_check(&c.cost, info->N, info->G, c.E);
    Moe *m = host_alloc(sizeof *m);
    *m = (Moe){.d = d, .ep = ep, .world = world, .c = c, .R = info->size, .N = info->N, .me = info->rank};
    m->H = c.E / m->R, m->J = m->H + c.S, m->unit = EXPERT_SIZE(c.F, c.C);
    m->shape = room_shape(&c, m->R, m->N);
    route_slice(&m->part_at, &m->part, m->unit, m->me, m->shape);
    dev_kind(d, MEMORY_SLOTS);
    if (m->N > 1 && m->c.S) comm_blocks_room(ep, m->c.S * comm_info(ep)->G, m->part * sizeof(wide)); // a node has so many slots
    int BT = c.max_BT, E = c.E, slots = c.micros + 1;
    dev_kind(d, MEMORY_WORKSPACE);
    m->count = dev_alloc(d, SIZE(E, sizeof(int)), "router");
    m->seen = dev_alloc(d, SIZE(E, sizeof(int)), "router");
    m->ord = dev_alloc(d, SIZE(BT, c.K, sizeof(int)), "router");
    m->p = dev_alloc(d, SIZE(BT, E, sizeof(wide)), "router");
    m->seen_all = dev_alloc(d, SIZE(E, sizeof(int64_t)), "router");
    m->seen_dev = dev_alloc(d, SIZE(c.layers, E, sizeof(int64_t)), "router");
    m->seen_sum = dev_alloc(d, SIZE(c.layers, E, sizeof(int64_t)), "router");
    m->losses_dev = dev_alloc(d, SIZE(c.layers, 2, sizeof(double)), "router");
    m->bad_dev = dev_alloc(d, SIZE(c.layers + 3, sizeof(int)), "router");
    m->need = m->bad_dev + c.layers;
    dev_kind(d, MEMORY_PLANS);
    m->demand = dev_alloc(d, SIZE(slots, c.layers, m->R, E, sizeof(int)), "plans");
    m->info = dev_alloc(d, SIZE(slots, c.layers, sizeof(PlanInfo)), "plans");
    m->history = dev_alloc(d, SIZE(c.layers, E, sizeof(int64_t)), "plans");
    m->history_kept = dev_alloc(d, SIZE(c.layers, E, sizeof(int64_t)), "plans");
    dev_zero(d, m->history_kept, SIZE(c.layers, E, sizeof(int64_t)));
    m->plan_work = dev_alloc(d, plan_work_bytes(m->R, E, m->N, c.S), "plans");
    m->traffic = dev_alloc(d, SIZE(slots, c.layers, 2, sizeof(int64_t)), "plans");
    dev_zero(d, m->traffic, SIZE(slots, c.layers, 2, sizeof(int64_t)));
    m->route_work = dev_alloc(d, route_work_bytes(m->shape), "plans");
    dev_kind(d, MEMORY_WORKSPACE);
    if (c.shared) m->shared_h = dev_alloc(d, SIZE(BT, c.shared, sizeof(real)), "shared expert's activations");
    if (c.training) {
        m->dweight = dev_alloc(d, SIZE(BT, c.K, sizeof(wide)), "router");
        m->dlogits = dev_alloc(d, SIZE(BT, E, sizeof(wide)), "router");
        if (c.shared) m->shared_dh = dev_alloc(d, SIZE(BT, c.shared, sizeof(real)), "shared expert's activations");
    }
    step_forget(m);
    void **slots_at = make_slots(m);
    m->layer = host_alloc(SIZE(c.layers, sizeof(Layer)));
    for (int i = 0; i < c.layers; i++) layer_init(m, i, &params[i], slots_at, m->layer);
    m->max_held = ROOM_HELD(c.layers);
    m->held = host_alloc(SIZE(m->max_held, sizeof *m->held));
    room_make(m);
    m->info_host = host_alloc(SIZE(c.micros, c.layers, sizeof(PlanInfo)));
    m->traffic_host = host_alloc(SIZE(c.micros, c.layers, 2, sizeof(int64_t)));
    m->seen_host = host_alloc(SIZE(c.layers, E, sizeof(int64_t)));
    return m;
}

void moe_free(Moe *m) { // device memory goes with the device, windows with the group
    free(m->layer);
    free(m->held);
    free(m->info_host);
    free(m->traffic_host);
    free(m->seen_host);
    free(m);
}

// ---- after a step ------------------------------------------------------------------------------------------------------

void step_forget(Moe *m) {
    const MoeConfig *c = &m->c;
    dev_zero(m->d, m->seen_dev, SIZE(c->layers, c->E, sizeof(int64_t)));
    dev_zero(m->d, m->losses_dev, SIZE(c->layers, 2, sizeof(double)));
    dev_zero(m->d, m->bad_dev, SIZE(c->layers + 3, sizeof(int)));
    dev_zero(m->d, m->info, SIZE(c->micros + 1, c->layers, sizeof(PlanInfo)));
    dev_copy(m->d, m->history, m->history_kept, SIZE(c->layers, c->E, sizeof(int64_t)));
}

static void stop_on_nan(Moe *m) {
    int layers = m->c.layers, *bad = host_alloc(SIZE(layers, sizeof(int)));
    dev_download(m->d, bad, m->bad_dev, SIZE(layers, sizeof(int)));
    for (int i = 0; i < layers; i++)
        CHECK_NUMERIC(bad[i] == 0, "the router of MoE layer %d met a score that is not a number, first at token %d of a microbatch "
                      "(hint: a lower --lr, or resume from the last checkpoint)", i, bad[i] - 1);
    free(bad);
}

static int dispatched_again(const MoeConfig *c, int layer) { return c->recompute >= RECOMPUTE_BLOCK && layer + 1 < c->layers; }

// Sums over (layer, microbatch); every EP group counts once, by its rank 0.
static void sum_plans(Moe *m, MoeStats *s) {
    const MoeConfig *c = &m->c;
    int n = c->micros * c->layers, groups = comm_info(m->world)->size / m->R;
    dev_download(m->d, m->info_host, m->info, SIZE(n, sizeof(PlanInfo)));
    dev_download(m->d, m->traffic_host, m->traffic, SIZE(n, 2, sizeof(int64_t)));
    double ratio[2] = {0, 0}, worst[2] = {0, 0};
    int64_t sum[12] = {0};
    for (int i = 0; i < n; i++)
        for (int k = 0; k < 2; k++) {
            sum[8 + k] += m->traffic_host[2 * i + k];
            if (dispatched_again(c, i % c->layers)) sum[10 + k] += m->traffic_host[2 * i + k];
        }
    for (int i = 0; i < n && m->me == 0; i++) {
        const PlanInfo *p = &m->info_host[i];
        if (dispatched_again(c, i % c->layers)) sum[11] += p->pairs_node;
        if (p->total > 0) {
            double mean = (double)p->total / m->R, before = p->max_load_before / mean, after = p->max_load / mean;
            ratio[0] += before, ratio[1] += after;
            worst[0] = fmax(worst[0], before), worst[1] = fmax(worst[1], after);
        }
        int64_t add[8] = {p->pairs_self, p->pairs_node, p->pairs_inter, p->inter_copies + p->node_copies, p->copies, p->copies > 0,
                          p->total > 0, p->total};
        for (int k = 0; k < 8; k++) sum[k] += add[k];
    }
    comm_sum_int64(m->world, sum, 12);
    comm_sum_double(m->world, ratio, 2);
    comm_max_double(m->world, worst, 2);
    // a row: dispatch and combine, forward and backward, and again; a weight out, its gradient back; with what crosses also its meta
    int64_t row = c->C * sizeof(real), Q = route_pairs(m->shape);
    s->pairs_self = sum[0], s->pairs_node = sum[1], s->pairs_inter = sum[2], s->crossings = sum[8];
    s->bytes_node = (s->pairs_node + sum[9]) * (4 * row + 2 * sizeof(wide)) + sum[11] * row;
    s->bytes_inter = s->crossings * (4 * row + Q * (2 * sizeof(wide) + 2 * sizeof(int))) + sum[10] * row;
    s->weight_bytes = sum[3] * (int64_t)(m->unit * (2 * sizeof(real) + sizeof(wide)));
    s->copies = sum[4], s->plans_with_copies = sum[5], s->plans = (int64_t)n * groups;
    s->rank_before = sum[6] ? ratio[0] / sum[6] : 1, s->rank_after = sum[6] ? ratio[1] / sum[6] : 1;
    s->rank_before_max = worst[0], s->rank_after_max = worst[1];
    s->dropped = -sum[7]; // moe_stats adds what was seen
}

void moe_stats(Moe *m, MoeStats *s) {
    const MoeConfig *c = &m->c;
    int E = c->E, layers = c->layers;
    *s = (MoeStats){.seen = m->seen_host};
    stop_on_nan(m);
    sum_plans(m, s);
    dev_download(m->d, m->seen_host, m->seen_dev, SIZE(layers, E, sizeof(int64_t)));
    comm_sum_int64(m->world, m->seen_host, layers * E);
    double *losses = host_alloc(SIZE(layers, 2, sizeof(double)));
    dev_download(m->d, losses, m->losses_dev, SIZE(layers, 2, sizeof(double)));
    comm_sum_double(m->world, losses, 2 * layers);
    for (int i = 0; i < layers; i++) {
        int64_t sum = 0, most = 0;
        for (int e = 0; e < E; e++) {
            int64_t n = m->seen_host[(size_t)i * E + e];
            sum += n, most = n > most ? n : most;
        }
        s->dropped += sum;
        double tokens = (double)sum / c->K;
        if (tokens == 0) continue;
        s->maxvio += ((double)most * E / sum - 1) / layers;
        s->aux += losses[2 * i] / tokens / layers, s->z += losses[2 * i + 1] / tokens / layers;
    }
    free(losses);
    dev_copy(m->d, m->history_kept, m->history, SIZE(layers, E, sizeof(int64_t)));
    step_forget(m);
}

void moe_update_bias(Moe *m, double rate, const wide *factor) {
    int E = m->c.E, n = m->c.layers * E;
    dev_copy(m->d, m->seen_sum, m->seen_dev, SIZE(n, sizeof(int64_t)));
    comm_dev_sum_int64(m->world, m->seen_sum, n);
    for (int i = 0; i < m->c.layers; i++)
        if (m->layer[i].p.bias) dev_bias_update(m->d, m->layer[i].p.bias, m->seen_sum + (size_t)i * E, factor, E, rate);
}

const int *moe_faults(const Moe *m, int *n) {
    *n = m->c.layers + 1;
    return m->bad_dev;
}

int moe_crossing_pairs(const Moe *m) { return route_pairs(m->shape); }

void moe_demand(Moe *m, int micro, int layer, int *D, PlanInfo *info, int64_t traffic[2]) {
    size_t at = (size_t)micro * m->c.layers + layer, n = SIZE(m->R, m->c.E);
    dev_download(m->d, D, m->demand + at * n, n * sizeof(int));
    *info = m->info_host[at];
    for (int k = 0; k < 2; k++) traffic[k] = m->traffic_host[2 * at + k];
}

void moe_history_get(const Moe *m, int64_t *history) {
    dev_download(m->d, history, m->history_kept, SIZE(m->c.layers, m->c.E, sizeof *history));
}

void moe_history_set(Moe *m, const int64_t *history) {
    dev_upload(m->d, m->history, history, SIZE(m->c.layers, m->c.E, sizeof *history));
    dev_copy(m->d, m->history_kept, m->history, SIZE(m->c.layers, m->c.E, sizeof *history));
}

void moe_check_hashes(Moe *m) {
    int n = m->c.micros * m->c.layers;
    uint64_t *mine = host_alloc(SIZE(n, sizeof *mine)), *all = host_alloc(SIZE(m->R, n, sizeof *all));
    for (int i = 0; i < n; i++) mine[i] = m->info_host[i].hash;
    comm_allgather(m->ep, all, mine, n * sizeof *mine);
    for (int r = 0; r < m->R; r++)
        for (int i = 0; i < n; i++)
            CHECK_COMM(all[(size_t)r * n + i] == mine[i],
                       "ranks %d and %d made different plans for MoE layer %d, microbatch %d: hash %016llx and %016llx", m->me, r,
                       i % m->c.layers, i / m->c.layers, (unsigned long long)mine[i], (unsigned long long)all[(size_t)r * n + i]);
    free(mine);
    free(all);
}
