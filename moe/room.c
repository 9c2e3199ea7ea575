// Memory with a row for each pair that may arrive or cross: receive buffers, crossings on their way, the experts' activations.
//
// How many come only the device knows. Room for the worst case, every pair of every rank at one, costs nothing where untouched
// pages do not (CPU). Elsewhere there is less (MoeConfig.recv_room): a route that needs more places what it can, raises a flag
// that keeps all ranks from an update (moe_faults), and notes its need (topoep/route.h). After the step all ranks together make
// new buffers, and the step is run again.
#include "kernels/check.h"
#include "moe/internal.h"
#include <assert.h>
#include <limits.h>
#include <math.h>

// ---- how many rows ---------------------------------------------------------------------------------------------------
// Rows that can arrive at most: every token of every rank, at most once per group it can go to.
static int64_t most_rows(const MoeConfig *c, int R) {
    int J = c->E / R + c->S;
    return (int64_t)R * c->max_BT * (c->K < J ? c->K : J);
}

static int room_for(double mean, double factor, int most) {
    double rows = ceil(factor * mean);
    return factor == 0 || rows >= most ? most : rows < 1 ? 1 : (int)rows;
}

// Means: of an even choice of experts, in a full microbatch
RouteShape room_shape(const MoeConfig *c, int R, int N) {
    CHECK_USAGE(most_rows(c, R) * (c->K + 1) < INT_MAX / 2,
                "%lld rows can arrive at one rank, more than an int counts (hint: a smaller --micro-batch)",
                (long long)most_rows(c, R));
    CHECK_USAGE((int64_t)N * c->max_BT * c->K * 2 < INT_MAX,
                "%d nodes and %d tokens with %d experts each: more pairs that may cross than an int counts (hint: a smaller "
                "--micro-batch)", N, c->max_BT, c->K);
    CHECK_USAGE(c->recv_room >= 0, "room for %g times the mean of what a rank receives, expected 0 or more", c->recv_room);
    RouteShape s = {.R = R, .N = N, .E = c->E, .K = c->K, .S = c->S, .max_BT = c->max_BT, .dedup = c->dedup,
                    .slicing = !(c->plan.without & PLAN_NO_SLICING)};
    double node = c->dedup ? 1 - pow(1 - 1.0 / N, c->K) : (double)c->K / N; // crossings of a token to a node
    s.rows = room_for((double)c->max_BT * c->K, c->recv_room, (int)most_rows(c, R));
    s.crossings = room_for(c->max_BT * node, c->recv_room, route_most(s));
    return s;
}

// ---- how many bytes --------------------------------------------------------------------------------------------------
// How many layers have a buffer of their own for what level `again` makes again
static int slices(const MoeConfig *c, Recompute again) { return c->training && c->recompute < again ? c->layers : 1; }

// A row of the receive buffers by kind
static void row_bytes(double bytes[MEMORY_KINDS], const MoeConfig *c) {
    double passes = c->training ? 2 : 1, layers = c->training ? c->layers : 1;
    for (int k = 0; k < MEMORY_KINDS; k++) bytes[k] = 0;
    bytes[MEMORY_WINDOWS] = (slices(c, RECOMPUTE_BLOCK) + passes) * c->C * sizeof(real) + (layers + passes - 1) * sizeof(wide);
    bytes[MEMORY_ACTIVATIONS] = 2.0 * slices(c, RECOMPUTE_UP) * c->F * sizeof(real); // gate and up
    bytes[MEMORY_WORKSPACE] = passes * c->F * sizeof(real);                         // h, dh
}

void moe_idle_bytes(const Moe *m, double idle[MEMORY_KINDS]) {
    double rows = m->M - (double)m->c.max_BT * m->c.K;
    row_bytes(idle, &m->c);
    for (int k = 0; k < MEMORY_KINDS; k++) idle[k] *= fmax(0, rows);
}

double moe_peer_bytes(const Moe *m) {
    const MoeConfig *c = &m->c;
    double row[MEMORY_KINDS], peers = (double)m->R / m->N - 1;
    row_bytes(row, c);
    double copies = (double)m->unit * ((double)m->H * c->layers * sizeof(real) + (double)c->S * sizeof(wide)); // homes', slots'
    return peers / m->R * c->max_BT * c->K * row[MEMORY_WINDOWS] + (c->S && c->plan.policy != POLICY_NONE ? peers * copies : 0);
}

// ---- making it -------------------------------------------------------------------------------------------------------
static void *hold(Moe *m, void *p) {
    assert(m->n_held < m->max_held);
    return m->held[m->n_held++] = p;
}
static void *buffer(Moe *m, MemoryKind kind, size_t bytes, const char *what) {
    dev_kind(m->d, kind);
    return hold(m, dev_alloc(m->d, bytes, what));
}
static void *table(Moe *m, void *const *peer, size_t skip, void *last) {
    dev_kind(m->d, MEMORY_WORKSPACE);
    return hold(m, peers_table(m->d, peer, m->R, skip, last));
}
static void **window(Moe *m, size_t bytes, const char *what) {
    assert(m->n_windows < ROOM_WINDOWS);
    dev_kind(m->d, MEMORY_WINDOWS);
    return m->windows[m->n_windows++] = comm_window(m->ep, bytes, what);
}

// What crosses nodes, on its way. Returns the window of the metas that come.
static int *make_crossings(Moe *m) {
    const MoeConfig *c = &m->c;
    int64_t rows = (int64_t)SIZE(m->N, route_room(m->shape)), Q = route_pairs(m->shape);
    int me = m->me;
    m->stage = window(m, SIZE(rows, c->C, sizeof(real)), "rows to other nodes")[me];
    m->relay = window(m, SIZE(rows, c->C, sizeof(real)), "rows from other nodes")[me];
    m->stage_weight = window(m, SIZE(rows, Q, sizeof(wide)), "weights to other nodes")[me];
    m->relay_weight = window(m, SIZE(rows, Q, sizeof(wide)), "weights from other nodes")[me];
    m->meta = window(m, SIZE(rows, 2, Q, sizeof(int)), "meta to other nodes")[me];
    real **at = buffer(m, MEMORY_WORKSPACE, sizeof m->stage, "tables");
    dev_upload(m->d, at, &m->stage, sizeof m->stage);
    m->stage_at = at;
    return window(m, SIZE(c->training ? c->layers : 1, rows, 2, Q, sizeof(int)), "meta from other nodes")[me];
}

static void make_layer(Moe *m, int i, void **rows, void **weights, int *in) {
    Layer *l = &m->layer[i];
    int own_rows = i == 0 || slices(&m->c, RECOMPUTE_BLOCK) > 1, own_gu = i == 0 || slices(&m->c, RECOMPUTE_UP) > 1;
    size_t rows_skip = SIZE(own_rows ? i : 0, m->M, m->c.C, sizeof(real)), weight_skip = SIZE(i, m->M, sizeof(wide));
    l->route.meta = m->meta;
    l->route.in = in ? in + SIZE(i, m->N, route_room(m->shape), 2, route_pairs(m->shape)) : NULL;
    l->rows = (real *)((char *)rows[m->me] + rows_skip);
    l->row_weight = (wide *)((char *)weights[m->me] + weight_skip);
    l->rows_at = table(m, rows, rows_skip, NULL);
    l->weight_at = table(m, weights, weight_skip, m->stage_weight);
    l->gu = own_gu ? buffer(m, MEMORY_ACTIVATIONS, SIZE(m->M, 2, m->c.F, sizeof(real)), "experts' activations") : m->layer[0].gu;
}

static void make(Moe *m) {
    const MoeConfig *c = &m->c;
    m->M = m->shape.rows;
    int layers = c->training ? c->layers : 1, *in = m->N > 1 ? make_crossings(m) : NULL;
    void **rows = window(m, SIZE(slices(c, RECOMPUTE_BLOCK), m->M, c->C, sizeof(real)), "received rows");
    void **weights = window(m, SIZE(layers, m->M, sizeof(wide)), "received weights");
    void **out = window(m, SIZE(m->M, c->C, sizeof(real)), "returned rows");
    m->rows_out = out[m->me], m->rows_out_at = table(m, out, 0, NULL);
    m->h = buffer(m, MEMORY_WORKSPACE, SIZE(m->M, c->F, sizeof(real)), "experts' activations");
    for (int i = 0; i < layers; i++) make_layer(m, i, rows, weights, in);
    for (int i = layers; i < c->layers; i++) { // without a backward all layers share one layer's buffers
        Layer *l = &m->layer[i], *first = m->layer;
        l->route.meta = first->route.meta, l->route.in = first->route.in;
        l->rows = first->rows, l->row_weight = first->row_weight, l->gu = first->gu;
        l->rows_at = first->rows_at, l->weight_at = first->weight_at;
    }
    if (!c->training) return;
    m->dh = buffer(m, MEMORY_WORKSPACE, SIZE(m->M, c->F, sizeof(real)), "experts' activations");
    void **dy = window(m, SIZE(m->M, c->C, sizeof(real)), "received gradients");
    m->dy_rows = dy[m->me], m->dy_rows_at = table(m, dy, 0, NULL);
    void **weight_out = window(m, SIZE(m->M, sizeof(wide)), "returned weights");
    m->weight_out = weight_out[m->me], m->weight_out_at = table(m, weight_out, 0, m->stage_weight);
}

void room_make(Moe *m) {
    size_t before = dev_taken(m->d, NULL);
    make(m);
    dev_kind(m->d, MEMORY_WORKSPACE);
    m->room.bytes = (double)(dev_taken(m->d, NULL) - before);
}

static void room_free(Moe *m) {
    while (m->n_windows > 0) comm_window_free(m->ep, m->windows[--m->n_windows]);
    while (m->n_held > 0) dev_release(m->d, m->held[--m->n_held]);
}

// ---- more of it ------------------------------------------------------------------------------------------------------
// A quarter more than was needed: so from any room to any other there are few steps.
static int grown(int room, int need, int most) {
    if (need <= room) return room;
    return need < most - need / 4 ? need + need / 4 : most;
}

int moe_grow(Moe *m) {
    RouteShape *s = &m->shape;
    int most = (int)most_rows(&m->c, m->R), need[3];
    if (s->rows == most && (m->N == 1 || s->crossings == route_most(*s))) return 0;
    dev_download(m->d, need, m->need, sizeof need);
    double all[2] = {need[1], need[2]};
    comm_max_double(m->world, all, 2);
    if (all[0] <= s->rows && all[1] <= s->crossings) return 0;
    m->room.needed_rows = (int)all[0], m->room.needed_crossings = (int)all[1];
    comm_barrier(m->world); // nobody works in them any more, nor on a GPU that is shared
    room_free(m);
    s->rows = grown(s->rows, (int)all[0], most);
    s->crossings = grown(s->crossings, (int)all[1], route_most(*s));
    room_make(m);
    step_forget(m);
    comm_barrier(m->world);
    m->room.grown++;
    return 1;
}

MoeRoom moe_room(const Moe *m) {
    MoeRoom r = m->room;
    r.rows = m->shape.rows, r.crossings = m->N > 1 ? m->shape.crossings : 0;
    return r;
}
