// Memory of the MoE layers, and what is read from them after a step.
#include "kernels/check.h"
#include "moe/internal.h"
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- memory ----------------------------------------------------------------------------------------------------------

// Rows that can arrive at most: every token of every rank, at most once per group it can go to.
static int64_t max_rows(const MoeConfig *c, int R) {
    int J = c->E / R + c->S;
    return (int64_t)R * c->max_BT * (c->K < J ? c->K : J);
}

static RouteShape shape_of(const MoeConfig *c, int R, int N) {
    return (RouteShape){.R = R, .N = N, .E = c->E, .K = c->K, .S = c->S, .max_BT = c->max_BT, .dedup = c->dedup,
                        .slicing = !(c->plan.without & PLAN_NO_SLICING)};
}

static void check(const MoeConfig *c, int R, int N) {
    CHECK_USAGE(c->E >= 1 && c->E % R == 0,
                "%d experts on %d ranks: every rank must hold as many (hint: choose --experts a multiple of --ep, or another --ep)",
                c->E, R);
    CHECK_USAGE(c->K >= 1 && c->K <= c->E, "%d experts per token of %d (hint: --topk between 1 and --experts)", c->K, c->E);
    CHECK_USAGE(!(c->K == 1 && c->renorm && c->E > 1),
                "one expert per token with renormalised weights: the weight is always 1 and the router never learns "
                "(hint: --no-renorm, or --topk 2)");
    CHECK_USAGE(max_rows(c, R) * (c->K + 1) < INT_MAX / 2,
                "%lld rows can arrive at one rank, more than an int counts (hint: a smaller --micro-batch)", (long long)max_rows(c, R));
    CHECK_USAGE((int64_t)N * c->max_BT * c->K * 2 < INT_MAX, "%d nodes and %d tokens with %d experts each: more pairs that may cross "
                "than an int counts (hint: a smaller --micro-batch)", N, c->max_BT, c->K);
}

static void *upload(Dev *d, const void *host, size_t bytes, const char *what) {
    void *x = dev_alloc(d, bytes, what);
    dev_upload(d, x, host, bytes);
    return x;
}

// Device table of the peers' windows, each `skip` bytes in, and `last` behind them.
static void *table_of(Dev *d, void *const *peer, int R, size_t skip, void *last) {
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

typedef struct Windows { // host tables over ep
    void **rows, **weights, **rows_out, **weight_out, **dy, **slots, **d_slots, **in;
} Windows;

// What crosses nodes, on its way
static void crossing_windows(Moe *m, Windows *w) {
    const MoeConfig *c = &m->c;
    int64_t rows = (int64_t)SIZE(m->N, route_room(m->shape)), Q = route_pairs(m->shape);
    int me = m->me;
    m->stage = comm_window(m->ep, SIZE(rows, c->C, sizeof(real)), "rows to other nodes")[me];
    m->relay = comm_window(m->ep, SIZE(rows, c->C, sizeof(real)), "rows from other nodes")[me];
    m->stage_weight = comm_window(m->ep, SIZE(rows, Q, sizeof(wide)), "weights to other nodes")[me];
    m->relay_weight = comm_window(m->ep, SIZE(rows, Q, sizeof(wide)), "weights from other nodes")[me];
    m->meta = comm_window(m->ep, SIZE(rows, 2, Q, sizeof(int)), "meta to other nodes")[me];
    w->in = comm_window(m->ep, SIZE(c->training ? c->layers : 1, rows, 2, Q, sizeof(int)), "meta from other nodes");
    m->stage_at = upload(m->d, &m->stage, sizeof m->stage, "tables");
}

static Windows make_windows(Moe *m) {
    const MoeConfig *c = &m->c;
    int slices = c->training ? c->layers : 1;
    Windows w = {0};
    if (m->N > 1) crossing_windows(m, &w);
    w.rows = comm_window(m->ep, SIZE(slices, m->M, c->C, sizeof(real)), "received rows");
    w.weights = comm_window(m->ep, SIZE(slices, m->M, sizeof(wide)), "received weights");
    w.rows_out = comm_window(m->ep, SIZE(m->M, c->C, sizeof(real)), "returned rows");
    m->rows_out = w.rows_out[m->me];
    m->rows_out_at = table_of(m->d, w.rows_out, m->R, 0, NULL);
    if (c->S) {
        w.slots = comm_window(m->ep, SIZE(c->S, m->unit, sizeof(real)), "copies");
        m->slots = w.slots[m->me];
    }
    if (!c->training) return w;
    w.dy = comm_window(m->ep, SIZE(m->M, c->C, sizeof(real)), "received gradients");
    w.weight_out = comm_window(m->ep, SIZE(m->M, sizeof(wide)), "returned weights");
    m->dy_rows = w.dy[m->me];
    m->dy_rows_at = table_of(m->d, w.dy, m->R, 0, NULL);
    m->weight_out = w.weight_out[m->me];
    m->weight_out_at = table_of(m->d, w.weight_out, m->R, 0, m->stage_weight);
    if (c->S) {
        w.d_slots = comm_window(m->ep, SIZE(c->S, m->unit, sizeof(wide)), "gradients of copies");
        m->d_slots = w.d_slots[m->me];
        if (m->N > 1) {
            void **d_stage = comm_window(m->ep, SIZE(m->H, m->N - 1, m->unit, sizeof(wide)), "gradients of copies on their way");
            m->d_stage = d_stage[m->me];
            m->d_stage_at = table_of(m->d, d_stage, m->R, 0, NULL);
        }
        m->d_slots_at = table_of(m->d, w.d_slots, m->R, 0, m->d_stage);
    }
    return w;
}

size_t moe_window_bytes(MoeConfig c, int R, int N) {
    size_t rows = max_rows(&c, R), slices = c.training ? c.layers + 2 : 2, unit = EXPERT_SIZE(c.F, c.C), bytes;
    bytes = rows * (slices * c.C * sizeof(real) + slices * sizeof(wide)) + c.S * unit * (sizeof(real) + (c.training ? sizeof(wide) : 0));
    if (N == 1) return bytes;
    RouteShape s = shape_of(&c, R, N);
    size_t crossings = SIZE(N, route_room(s)), Q = (size_t)route_pairs(s);
    if (c.S && c.training) bytes += SIZE(c.E / R, N - 1) * unit * sizeof(wide);
    size_t metas = c.training ? c.layers + 1 : 2; // what came is kept for the backward; what goes out is not
    return bytes + crossings * (2 * c.C * sizeof(real) + 2 * Q * sizeof(wide) + metas * 2 * Q * sizeof(int));
}

// A row of the receive buffers: in windows, and in all of the rank's memory
static double row_bytes(const MoeConfig *c, int all) {
    double slices = c->training ? c->layers : 1, passes = c->training ? 2 : 1;
    double windows = (slices + passes) * c->C * sizeof(real) + (slices + passes - 1) * sizeof(wide);
    return windows + all * (2 * slices + passes) * c->F * sizeof(real); // gate and up, h, dh
}

double moe_idle_bytes(const Moe *m) {
    double rows = m->M - (double)m->c.max_BT * m->c.K;
    return rows > 0 ? rows * row_bytes(&m->c, 1) : 0;
}

double moe_peer_bytes(const Moe *m) {
    const MoeConfig *c = &m->c;
    double peers = (double)m->R / m->N - 1, rows = peers / m->R * c->max_BT * c->K * row_bytes(c, 0);
    double copies = (double)m->unit * ((double)m->H * c->layers * sizeof(real) + (double)c->S * sizeof(wide)); // homes', slots'
    return rows + (c->S && c->plan.policy != POLICY_NONE ? peers * copies : 0);
}

static void layer_init(Moe *m, int i, const MoeParams *p, const Windows *w, const Layer *first) {
    const MoeConfig *c = &m->c;
    Dev *d = m->d;
    Layer *l = &m->layer[i];
    int BT = c->max_BT, E = c->E, K = c->K;
    if (!c->training && i > 0) *l = *first; // without a backward all layers share one layer's buffers
    l->p = *p;
    l->seen = m->seen_dev + (size_t)i * E;
    l->losses = m->losses_dev + 2 * i;
    l->bad = m->bad_dev + i;
    l->gate_up = group_table(m, p->experts[m->me], m->slots, 0, sizeof(real));
    l->down = group_table(m, p->experts[m->me], m->slots, SIZE(2, c->F, c->C), sizeof(real));
    l->blocks_at = blocks_table(m, p->experts, w->slots);
    if (c->training) {
        l->d_gate_up = group_table(m, p->d_experts, m->d_slots, 0, sizeof(wide));
        l->d_down = group_table(m, p->d_experts, m->d_slots, SIZE(2, c->F, c->C), sizeof(wide));
    } else if (i > 0) {
        return;
    }
    l->idx = dev_alloc(d, SIZE(BT, K, sizeof(int)), "router");
    l->weight = dev_alloc(d, SIZE(BT, K, sizeof(wide)), "router");
    l->logits = dev_alloc(d, SIZE(BT, E, sizeof(wide)), "router");
    l->prob = dev_alloc(d, SIZE(BT, E, sizeof(wide)), "router");
    l->lse = dev_alloc(d, SIZE(BT, sizeof(wide)), "router");
    l->f = dev_alloc(d, SIZE(BT, E, sizeof(wide)), "router");
    l->plan.quota = dev_alloc(d, SIZE(E, m->R, sizeof(int)), "plans");
    l->plan.slot = dev_alloc(d, SIZE(m->R, c->S + 1, sizeof(int)), "plans");
    l->plan.history = dev_alloc(d, SIZE(E, sizeof(int64_t)), "plans");
    dev_zero(d, l->plan.history, SIZE(E, sizeof(int64_t)));
    l->route = route_alloc(d, m->shape);
    l->route.meta = m->meta;
    if (w->in) l->route.in = (int *)w->in[m->me] + SIZE(i, m->N, route_room(m->shape), 2, route_pairs(m->shape));
    size_t rows_skip = SIZE(i, m->M, c->C, sizeof(real)), weight_skip = SIZE(i, m->M, sizeof(wide));
    l->rows = (real *)((char *)w->rows[m->me] + rows_skip);
    l->row_weight = (wide *)((char *)w->weights[m->me] + weight_skip);
    l->rows_at = table_of(d, w->rows, m->R, rows_skip, NULL);
    l->weight_at = table_of(d, w->weights, m->R, weight_skip, m->stage_weight);
    l->gu = dev_alloc(d, SIZE(m->M, 2, c->F, sizeof(real)), "experts' activations");
    if (c->shared) l->shared_gu = dev_alloc(d, SIZE(BT, 2, c->shared, sizeof(real)), "shared expert's activations");
}

Moe *moe_init(Dev *d, Comm *ep, Comm *world, MoeConfig c, const MoeParams *params) {
    const CommInfo *info = comm_info(ep);
    check(&c, info->size, info->N);
    cost_check(&c.cost, info->N, info->G, c.E);
    Moe *m = host_alloc(sizeof *m);
    *m = (Moe){.d = d, .ep = ep, .world = world, .c = c, .R = info->size, .N = info->N, .me = info->rank};
    m->H = c.E / m->R, m->J = m->H + c.S, m->M = (int)max_rows(&c, m->R), m->unit = EXPERT_SIZE(c.F, c.C);
    m->shape = shape_of(&c, m->R, m->N);
    route_slice(&m->part_at, &m->part, m->unit, m->me, m->shape);
    if (m->N > 1 && m->c.S) comm_blocks_room(ep, m->c.S * comm_info(ep)->G, m->part * sizeof(wide)); // a node has so many slots
    int BT = c.max_BT, E = c.E, slots = c.micros + 1;
    m->count = dev_alloc(d, SIZE(E, sizeof(int)), "router");
    m->seen = dev_alloc(d, SIZE(E, sizeof(int)), "router");
    m->ord = dev_alloc(d, SIZE(BT, c.K, sizeof(int)), "router");
    m->p = dev_alloc(d, SIZE(BT, E, sizeof(wide)), "router");
    m->seen_all = dev_alloc(d, SIZE(E, sizeof(int64_t)), "router");
    m->seen_dev = dev_alloc(d, SIZE(c.layers, E, sizeof(int64_t)), "router");
    m->seen_sum = dev_alloc(d, SIZE(c.layers, E, sizeof(int64_t)), "router");
    m->losses_dev = dev_alloc(d, SIZE(c.layers, 2, sizeof(double)), "router");
    m->bad_dev = dev_alloc(d, SIZE(c.layers, sizeof(int)), "router");
    dev_zero(d, m->seen_dev, SIZE(c.layers, E, sizeof(int64_t)));
    dev_zero(d, m->losses_dev, SIZE(c.layers, 2, sizeof(double)));
    dev_zero(d, m->bad_dev, SIZE(c.layers, sizeof(int)));
    m->demand = dev_alloc(d, SIZE(slots, c.layers, m->R, E, sizeof(int)), "plans");
    m->info = dev_alloc(d, SIZE(slots, c.layers, sizeof(PlanInfo)), "plans");
    dev_zero(d, m->info, SIZE(slots, c.layers, sizeof(PlanInfo)));
    m->plan_work = dev_alloc(d, plan_work_bytes(m->R, E, m->N, c.S), "plans");
    m->traffic = dev_alloc(d, SIZE(slots, c.layers, 2, sizeof(int64_t)), "plans");
    dev_zero(d, m->traffic, SIZE(slots, c.layers, 2, sizeof(int64_t)));
    m->route_work = dev_alloc(d, route_work_bytes(m->shape), "plans");
    m->h = dev_alloc(d, SIZE(m->M, c.F, sizeof(real)), "experts' activations");
    if (c.shared) m->shared_h = dev_alloc(d, SIZE(BT, c.shared, sizeof(real)), "shared expert's activations");
    if (c.training) {
        m->dh = dev_alloc(d, SIZE(m->M, c.F, sizeof(real)), "experts' activations");
        m->dweight = dev_alloc(d, SIZE(BT, c.K, sizeof(wide)), "router");
        m->dlogits = dev_alloc(d, SIZE(BT, E, sizeof(wide)), "router");
        if (c.shared) m->shared_dh = dev_alloc(d, SIZE(BT, c.shared, sizeof(real)), "shared expert's activations");
    }
    Windows w = make_windows(m);
    m->layer = host_alloc(SIZE(c.layers, sizeof(Layer)));
    for (int i = 0; i < c.layers; i++) layer_init(m, i, &params[i], &w, m->layer);
    m->info_host = host_alloc(SIZE(c.micros, c.layers, sizeof(PlanInfo)));
    m->traffic_host = host_alloc(SIZE(c.micros, c.layers, 2, sizeof(int64_t)));
    m->seen_host = host_alloc(SIZE(c.layers, E, sizeof(int64_t)));
    return m;
}

void moe_free(Moe *m) { // device memory goes with the device, windows with the group
    free(m->layer);
    free(m->info_host);
    free(m->traffic_host);
    free(m->seen_host);
    free(m);
}

// ---- after a step ------------------------------------------------------------------------------------------------------

static void stop_on_nan(Moe *m) {
    int layers = m->c.layers, *bad = host_alloc(SIZE(layers, sizeof(int)));
    dev_download(m->d, bad, m->bad_dev, SIZE(layers, sizeof(int)));
    for (int i = 0; i < layers; i++)
        CHECK_NUMERIC(bad[i] == 0, "the router of MoE layer %d met a score that is not a number, first at token %d of a microbatch "
                      "(hint: a lower --lr, or resume from the last checkpoint)", i, bad[i] - 1);
    free(bad);
}

// Sums over (layer, microbatch); every EP group counts once, by its rank 0.
static void sum_plans(Moe *m, MoeStats *s) {
    const MoeConfig *c = &m->c;
    int n = c->micros * c->layers, groups = comm_info(m->world)->size / m->R;
    dev_download(m->d, m->info_host, m->info, SIZE(n, sizeof(PlanInfo)));
    dev_download(m->d, m->traffic_host, m->traffic, SIZE(n, 2, sizeof(int64_t)));
    double ratio[2] = {0, 0}, worst[2] = {0, 0};
    int64_t sum[10] = {0};
    for (int i = 0; i < n; i++)
        for (int k = 0; k < 2; k++) sum[8 + k] += m->traffic_host[2 * i + k];
    for (int i = 0; i < n && m->me == 0; i++) {
        const PlanInfo *p = &m->info_host[i];
        if (p->total > 0) {
            double mean = (double)p->total / m->R, before = p->max_load_before / mean, after = p->max_load / mean;
            ratio[0] += before, ratio[1] += after;
            worst[0] = fmax(worst[0], before), worst[1] = fmax(worst[1], after);
        }
        int64_t add[8] = {p->pairs_self, p->pairs_node, p->pairs_inter, p->inter_copies + p->node_copies, p->copies, p->copies > 0,
                          p->total > 0, p->total};
        for (int k = 0; k < 8; k++) sum[k] += add[k];
    }
    comm_sum_int64(m->world, sum, 10);
    comm_sum_double(m->world, ratio, 2);
    comm_max_double(m->world, worst, 2);
    // a row: dispatch and combine, forward and backward; a weight out, its gradient back; with what crosses also its meta
    int64_t row = 4 * c->C * sizeof(real), Q = route_pairs(m->shape);
    s->pairs_self = sum[0], s->pairs_node = sum[1], s->pairs_inter = sum[2], s->crossings = sum[8];
    s->bytes_node = (s->pairs_node + sum[9]) * (row + 2 * sizeof(wide));
    s->bytes_inter = s->crossings * (row + Q * (2 * sizeof(wide) + 2 * sizeof(int)));
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
    dev_zero(m->d, m->seen_dev, SIZE(layers, E, sizeof(int64_t)));
    dev_zero(m->d, m->losses_dev, SIZE(layers, 2, sizeof(double)));
    dev_zero(m->d, m->info, SIZE(c->micros, layers, sizeof(PlanInfo)));
}

void moe_update_bias(Moe *m, double rate, const wide *factor) {
    int E = m->c.E, n = m->c.layers * E;
    dev_copy(m->d, m->seen_sum, m->seen_dev, SIZE(n, sizeof(int64_t)));
    comm_dev_sum_int64(m->world, m->seen_sum, n);
    for (int i = 0; i < m->c.layers; i++)
        if (m->layer[i].p.bias) dev_bias_update(m->d, m->layer[i].p.bias, m->seen_sum + (size_t)i * E, factor, E, rate);
}

const int *moe_faults(const Moe *m, int *n) {
    *n = m->c.layers;
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
    for (int i = 0; i < m->c.layers; i++)
        dev_download(m->d, history + SIZE(i, m->c.E), m->layer[i].plan.history, SIZE(m->c.E, sizeof *history));
}

void moe_history_set(Moe *m, const int64_t *history) {
    for (int i = 0; i < m->c.layers; i++)
        dev_upload(m->d, m->layer[i].plan.history, history + SIZE(i, m->c.E), SIZE(m->c.E, sizeof *history));
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
