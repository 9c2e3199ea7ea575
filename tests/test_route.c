// Routes: for random demand and random legal plans, what every rank sends meets what every rank expects, row by row.
#include "kernels/check.h"
#include "kernels/rng.h"
#include "topoep/flow.h"
#include "topoep/route.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

typedef struct Case {
    int R, E, N, S, K, BT[16]; // tokens per rank
    int *idx[16], *ord[16], *D;
    Plan plan;
    RouteShape shape;
    Route route[16];
} Case;

static uint64_t counter;
static int draw(int n) { return n > 0 ? (int)(rng_u64(7, 1, counter++) % n) : 0; }

// K distinct experts per token, hot ones more often; one pair in `drop` is dropped (0 = none).
static void make_pairs(Case *c, int rank, int drop) {
    int BT = c->BT[rank], K = c->K;
    c->idx[rank] = host_alloc(SIZE(BT, K, sizeof(int))), c->ord[rank] = host_alloc(SIZE(BT, K, sizeof(int)));
    int *count = c->D + rank * c->E;
    for (int t = 0; t < BT; t++) {
        int used[64] = {0};
        for (int k = 0; k < K; k++) {
            int e;
            do e = draw(3) ? draw(draw(c->E) + 1) : draw(c->E);
            while (used[e]);
            used[e] = 1;
            c->idx[rank][t * K + k] = e;
            c->ord[rank][t * K + k] = drop && draw(drop) == 0 ? -1 : count[e]++;
        }
    }
}

// Any legal plan: random copies, a random share of the expert's pairs on each, none without pairs.
static void make_plan(Case *c) {
    int R = c->R, E = c->E, S = c->S, H = E / R;
    for (int e = 0; e < E; e++)
        for (int s = 0; s < R; s++) c->plan.quota[e * R + e / H] += c->D[s * E + e];
    for (int i = 0; i < R * S; i++) c->plan.slot[i] = -1;
    for (int r = 0; r < R; r++) {
        int held[64] = {0}, n = 0;
        for (int i = 0; i < S; i++) {
            int e = draw(E), *q = c->plan.quota + e * R;
            if (e / H == r || held[e] || q[e / H] == 0) continue;
            int part = 1 + draw(q[e / H]);
            q[e / H] -= part, q[r] += part, held[e] = 1;
        }
        for (int e = 0; e < E; e++)
            if (held[e]) c->plan.slot[r * S + n++] = e;
    }
}

// The host's copy of what lies in device memory
static void *fetch(Dev *d, const void *from, int64_t elem, int64_t n) {
    size_t bytes = SIZE(elem, n);
    void *to = host_alloc(bytes + 1);
    dev_download(d, to, from, bytes);
    return to;
}
static void *give(Dev *d, const void *from, int64_t elem, int64_t n) {
    void *to = dev_alloc(d, SIZE(elem, n), "test array");
    dev_upload(d, to, from, SIZE(elem, n));
    return to;
}

static Route fetch_route(Dev *d, const Route *t, int BT, RouteShape s) {
    int I = sizeof(int), H = s.E / s.R, G = s.R / s.N, far = H * G * (s.N - 1), Q2 = 2 * route_pairs(s), pairs = BT * s.K;
    return (Route){
        .off = fetch(d, t->off, I, H + s.S + 1), .peer = fetch(d, t->peer, I, pairs), .row = fetch(d, t->row, I, pairs),
        .wrow = fetch(d, t->wrow, I, pairs), .cross = fetch(d, t->cross, I, BT * route_crossings(s)),
        .meta = fetch(d, t->meta, I, s.N * route_room(s) * Q2), .n_out = fetch(d, t->n_out, I, s.N), .traffic = fetch(d, t->traffic, 8, 2),
        .w_send = fetch(d, t->w_send, sizeof(BlockSeg), far), .w_recv = fetch(d, t->w_recv, sizeof(BlockSeg), s.S * G),
        .n_w_send = fetch(d, t->n_w_send, I, 1), .n_w_recv = fetch(d, t->n_w_recv, I, 1), .pull = fetch(d, t->pull, sizeof(BlockCopy), s.S),
        .n_pull = fetch(d, t->n_pull, I, 1), .node_add = fetch(d, t->node_add, sizeof(BlockCopy), s.S * G),
        .n_node_add = fetch(d, t->n_node_add, I, 1), .g_recv = fetch(d, t->g_recv, sizeof(BlockSeg), far),
        .home_add = fetch(d, t->home_add, sizeof(BlockCopy), H * s.R), .n_home_add = fetch(d, t->n_home_add, I, 1),
        .need = fetch(d, t->need, I, 3),
    };
}

static void make_routes(Dev *d, Case *c) {
    int R = c->R, E = c->E, K = c->K, max_BT = c->shape.max_BT;
    void *work = dev_alloc(d, route_work_bytes(c->shape), "work"), *D = give(d, c->D, sizeof(int), R * E);
    Plan plan = {.quota = give(d, c->plan.quota, sizeof(int), E * R), .slot = give(d, c->plan.slot, sizeof(int), R * c->S)};
    Route t = route_alloc(d, c->shape);
    t.meta = dev_alloc(d, SIZE(c->N, route_room(c->shape), 2, route_pairs(c->shape), sizeof(int)), "meta");
    t.traffic = dev_alloc(d, 2 * sizeof(int64_t), "traffic");
    t.need = dev_alloc(d, 3 * sizeof(int), "need");
    int *idx = dev_alloc(d, SIZE(max_BT, K, sizeof(int)), "pairs"), *ord = dev_alloc(d, SIZE(max_BT, K, sizeof(int)), "pairs");
    for (int r = 0; r < R; r++) {
        dev_upload(d, idx, c->idx[r], SIZE(c->BT[r], K, sizeof(int)));
        dev_upload(d, ord, c->ord[r], SIZE(c->BT[r], K, sizeof(int)));
        dev_zero(d, t.need, 3 * sizeof(int));
        route_make(d, &t, &plan, D, idx, ord, r, c->BT[r], c->shape, work);
        c->route[r] = fetch_route(d, &t, c->BT[r], c->shape);
    }
}

static Case *make_case(Dev *d, const int *dim, int max_BT, int drop, int dedup, int slicing) {
    int R = dim[0], E = dim[1], N = dim[2], S = dim[3], K = dim[4];
    Case *c = host_alloc(sizeof *c);
    *c = (Case){.R = R, .E = E, .N = N, .S = S, .K = K};
    c->shape = (RouteShape){.R = R, .N = N, .E = E, .K = K, .S = S, .max_BT = max_BT, .dedup = dedup, .slicing = slicing};
    c->D = host_alloc(SIZE(R, E, sizeof(int)));
    c->plan = (Plan){.quota = host_alloc(SIZE(E, R, sizeof(int))), .slot = host_alloc(SIZE(R, S + 1, sizeof(int)))};
    for (int r = 0; r < R; r++) c->BT[r] = draw(4) ? draw(max_BT + 1) : 0, make_pairs(c, r, drop);
    make_plan(c);
    make_routes(d, c);
    return c;
}

static int holds(const Case *c, int r, int j) { // expert of group j of rank r, -1 = empty slot
    int H = c->E / c->R;
    return j < H ? r * H + j : c->plan.slot[r * c->S + j - H];
}

// A payload that says where it comes from: source, pair, expert.
static int64_t payload(int s, int p, int e) { return ((int64_t)s << 40) | ((int64_t)e << 24) | p; }

static int node_of(const Case *c, int r) { return r / (c->R / c->N); }

// Sends a pair's row to a rank's buffer
static int put(int64_t **rows, int **seen, int rank, int row, int64_t what) {
    int faults = seen[rank][row]++ > 0;
    rows[rank][row] = what;
    return faults;
}

// The crossings of source s, by its lists: each one once, in token order, each pair in the meta of one; how many there must be
// is counted afresh: nodes that a token's pairs go to, or pairs that leave the node.
static int deliver_crossings(const Case *c, int s, int64_t **rows, int **seen) {
    const Route *t = &c->route[s];
    int X = route_crossings(c->shape), Q = route_pairs(c->shape), room = route_room(c->shape), faults = 0, next[16] = {0}, G = c->R / c->N;
    int64_t expected = 0, passed_on = 0, in_meta = 0;
    for (int token = 0; token < c->BT[s]; token++) {
        int hit[16] = {0};
        for (int k = 0; k < c->K; k++) {
            int p = token * c->K + k, w = t->wrow[p];
            if (c->ord[s][p] < 0 || t->peer[p] != c->R) continue;
            int crossing = w / Q, node = crossing / room, rank = t->meta[crossing * 2 * Q + w % Q], row = t->meta[crossing * 2 * Q + Q + w % Q];
            faults += t->cross[token * X + (c->shape.dedup ? node : k)] != crossing || node == node_of(c, s) || node_of(c, rank) != node;
            expected += !c->shape.dedup || !hit[node]++;
            passed_on += rank % G != s % G;
            faults += put(rows, seen, rank, row, payload(s, p, c->idx[s][p]));
        }
        for (int x = 0; x < X; x++) {
            int crossing = t->cross[token * X + x];
            if (crossing < 0) continue;
            faults += crossing % room != next[crossing / room]++;
            for (int q = 0; q < Q; q++) in_meta += t->meta[crossing * 2 * Q + Q + q] >= 0;
        }
    }
    for (int n = 0; n < c->N; n++) faults += t->n_out[n] != next[n], expected -= next[n];
    int64_t far = 0, sent = 0;
    for (int p = 0; p < c->BT[s] * c->K; p++) far += c->ord[s][p] >= 0 && t->peer[p] == c->R;
    for (int n = 0; n < c->N; n++) sent += next[n];
    return faults + (expected != 0) + (in_meta != far) + (t->traffic[0] != sent) + (t->traffic[1] != passed_on);
}

// Carries the pairs as dispatch does. rows[r][row] = payload; returns the number of faults.
static int deliver(const Case *c, int64_t **rows) {
    int faults = 0;
    int *seen[16];
    for (int s = 0; s < c->R; s++) seen[s] = calloc(1 << 16, sizeof(int));
    for (int s = 0; s < c->R; s++) {
        const Route *t = &c->route[s];
        for (int p = 0; p < c->BT[s] * c->K; p++) {
            faults += (t->wrow[p] < 0) != (c->ord[s][p] < 0) || (t->row[p] >= 0 && t->wrow[p] != t->row[p]);
            faults += t->wrow[p] >= 0 && (t->peer[p] == c->R) != (t->row[p] < 0);
            if (t->row[p] < 0) continue;
            faults += node_of(c, t->peer[p]) != node_of(c, s);
            faults += put(rows, seen, t->peer[p], t->row[p], payload(s, p, c->idx[s][p]));
        }
        faults += deliver_crossings(c, s, rows, seen);
    }
    for (int s = 0; s < c->R; s++) free(seen[s]);
    return faults;
}

static int check_case(const Case *c) {
    int J = c->E / c->R + c->S, faults;
    int64_t *rows[16];
    for (int r = 0; r < c->R; r++) {
        rows[r] = malloc((1 << 16) * sizeof(int64_t));
        memset(rows[r], 0xff, (1 << 16) * sizeof(int64_t));
    }
    faults = deliver(c, rows);
    for (int r = 0; r < c->R; r++) {
        for (int j = 0; j < J; j++) {
            int e = holds(c, r, j), from = c->route[r].off[j], to = c->route[r].off[j + 1];
            faults += to - from != (e < 0 ? 0 : c->plan.quota[e * c->R + r]);
            for (int i = from; i < to; i++) { // right expert; canonical order: source, then token
                faults += rows[r][i] < 0 || ((rows[r][i] >> 24) & 0xffff) != e;
                faults += i > from && rows[r][i] <= rows[r][i - 1];
            }
        }
        faults += rows[r][c->route[r].off[J]] != -1;
    }
    for (int r = 0; r < c->R; r++) free(rows[r]);
    return faults;
}

// Copies: carries weights (a number per expert) and gradients (1 per holder) by the lists, every rank its part of UNIT elements.
enum { UNIT = 1000 };

// The lists of each two counterparts meet; part[r][slot] grows by what came, from the right expert. grads: the way back.
static int carry(const Case *c, int part[16][16], int stage_part[16][64 * 16], int grads) {
    int G = c->R / c->N, H = c->E / c->R, faults = 0;
    for (int a = 0; a < c->R; a++)
        for (int n = 0; n < c->N; n++) {
            int b = n * G + a % G, k = 0;
            size_t at, elements;
            const Route *from = &c->route[a], *to = &c->route[b];
            route_slice(&at, &elements, UNIT, a, c->shape);
            for (int i = 0; i < *from->n_w_send; i++) {
                if (from->w_send[i].node != n) continue;
                while (k < *to->n_w_recv && to->w_recv[k].node != a / G) k++;
                if (k == *to->n_w_recv || from->w_send[i].rank / G != a / G || to->w_recv[k].rank / G != n) return faults + 1000;
                BlockSeg home = from->w_send[i], slot = to->w_recv[k++], back = from->g_recv[i];
                faults += c->plan.slot[slot.rank * c->S + slot.block] != home.rank * H + home.block;
                faults += back.node != n || back.rank != home.rank || back.block / (c->N - 1) != home.block;
                if (grads) stage_part[back.rank][back.block] += (int)elements;
                else part[slot.rank][slot.block] += (int)elements;
            }
            while (k < *to->n_w_recv && to->w_recv[k].node != a / G) k++;
            faults += k != *to->n_w_recv;
        }
    return faults;
}

static int check_copies(const Case *c) {
    int R = c->R, H = c->E / R, S = c->S, G = R / c->N, faults = 0;
    int slot[16][16], grad[16][16], part[16][16] = {0}, stage[16][64 * 16] = {0}, home[64] = {0};
    faults += carry(c, part, stage, 0) + carry(c, part, stage, 1);
    for (int r = 0; r < R; r++)
        for (int i = 0; i < S; i++) {
            faults += part[r][i] != 0 && part[r][i] != UNIT;
            slot[r][i] = part[r][i] ? c->plan.slot[r * S + i] : -1;
        }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < *c->route[r].n_pull; i++) {
            BlockCopy b = c->route[r].pull[i];
            faults += node_of(c, b.peer < R ? b.peer : b.peer - R) != node_of(c, r) || slot[r][b.dst] >= 0;
            slot[r][b.dst] = b.peer < R ? b.peer * H + b.src : slot[b.peer - R][b.src];
        }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < S; i++) faults += slot[r][i] != c->plan.slot[r * S + i], grad[r][i] = slot[r][i] >= 0 ? 1 : 0;
    for (int r = 0; r < R; r++)
        for (int i = 0; i < *c->route[r].n_node_add; i++) {
            BlockCopy b = c->route[r].node_add[i];
            faults += slot[r][b.dst] != slot[b.peer][b.src];
            grad[r][b.dst] += 1; // holders still hold 1 each
        }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < *c->route[r].n_home_add; i++) {
            BlockCopy b = c->route[r].home_add[i];
            if (b.peer < R) {
                faults += slot[b.peer][b.src] != r * H + b.dst;
                home[r * H + b.dst] += 1;
                continue;
            }
            int node = b.src % (c->N - 1), e = r * H + b.dst, entry = -1;
            node += node >= node_of(c, r);
            for (int q = (node + 1) * G - 1; q >= node * G; q--)
                for (int j = 0; j < S; j++)
                    if (slot[q][j] == e) entry = q * S + j;
            if (stage[r][b.src] != UNIT || entry < 0 || b.src / (c->N - 1) != b.dst) return 1000;
            home[e] += grad[entry / S][entry % S];
        }
    for (int e = 0; e < c->E; e++) { // every copy's gradient arrives home exactly once
        int holders = 0;
        for (int i = 0; i < R * S; i++) holders += c->plan.slot[i] == e;
        faults += home[e] != holders;
    }
    return faults;
}

static void free_routes(Case *c) {
    for (int r = 0; r < c->R; r++) {
        void *fetched[sizeof(Route) / sizeof(void *)];
        memcpy(fetched, &c->route[r], sizeof fetched); // a Route is nothing but pointers
        for (size_t i = 0; i < sizeof fetched / sizeof *fetched; i++) free(fetched[i]);
    }
}

static void free_case(Case *c) {
    free_routes(c);
    for (int r = 0; r < c->R; r++) free(c->idx[r]), free(c->ord[r]);
    free(c->D), free(c->plan.quota), free(c->plan.slot), free(c);
}

// ---- room ------------------------------------------------------------------------------------------------------------
static int least(int a, int b) { return a < b ? a : b; }

// Where crossing i of a node lies with less room; -1 = nowhere
static int moved(int crossing, RouteShape full, RouteShape s) {
    int i = crossing % route_room(full);
    return crossing >= 0 && i < route_room(s) ? crossing / route_room(full) * route_room(s) + i : -1;
}

static int check_far(const Route *t, const Route *f, int p, RouteShape s, RouteShape full) {
    int Q = route_pairs(s), from = f->wrow[p] / Q, q = f->wrow[p] % Q, to = moved(from, full, s);
    if (to < 0) return t->wrow[p] >= 0;
    int row = f->meta[from * 2 * Q + Q + q], got = t->meta[to * 2 * Q + Q + q];
    return (t->wrow[p] != to * Q + q) + (t->meta[to * 2 * Q + q] != f->meta[from * 2 * Q + q]) + (got != (row < s.rows ? row : -1));
}

// Rank r's route c, with less room, against the full one: what has room lies where it did, or where its block now is; the rest nowhere,
// so that nothing past a buffer's end is ever named.
static int check_room(const Case *c, const Case *full, int r) {
    const Route *t = &c->route[r], *f = &full->route[r];
    RouteShape s = c->shape;
    int faults = 0, J = c->E / c->R + c->S, load = 0, crossings = 0, over;
    for (int j = 0; j <= J; j++) faults += t->off[j] != least(f->off[j], s.rows);
    for (int p = 0; p < c->BT[r] * c->K; p++) {
        int here = f->row[p] >= 0, far = f->wrow[p] >= 0 && !here;
        faults += t->peer[p] != f->peer[p] || t->row[p] != (here && f->row[p] < s.rows ? f->row[p] : -1);
        faults += far ? check_far(t, f, p, s, full->shape) : t->wrow[p] != t->row[p];
    }
    for (int i = 0; i < c->BT[r] * route_crossings(s); i++) {
        int to = moved(f->cross[i], full->shape, s);
        faults += to < 0 ? t->cross[i] >= 0 : t->cross[i] != to;
    }
    for (int i = 0; i < c->R; i++) load = load > full->route[i].off[J] ? load : full->route[i].off[J];
    for (int n = 0; n < c->N; n++) {
        faults += t->n_out[n] != least(f->n_out[n], route_room(s));
        crossings = crossings > f->n_out[n] ? crossings : f->n_out[n];
    }
    over = load > s.rows || crossings > route_room(s);
    return faults + (t->need[0] != over) + (t->need[1] != load) + (t->need[2] != crossings) + (f->need[0] != 0) + (f->need[1] != load) +
           (f->need[2] != crossings);
}

static void test_room(void **state) {
    (void)state;
    static const int shapes[][5] = {{1, 4, 1, 2, 2}, {2, 4, 2, 2, 2}, {4, 16, 1, 3, 4}, {4, 16, 4, 2, 4}, {8, 16, 4, 2, 8}, {8, 8, 2, 3, 2}};
    int over = 0, fits = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int round = 0; round < 24; round++) {
            Dev *d = dev_init((DevOptions){.threads = 1});
            Case *full = make_case(d, shapes[i], 37, round % 3 ? 0 : 5, round & 1, round >> 1 & 1), c = *full;
            int load = full->route[0].need[1];
            c.shape.rows = round % 4 ? 1 + draw(load + 1) : load + 1, c.shape.crossings = 1 + draw(route_most(c.shape));
            make_routes(d, &c);
            for (int r = 0; r < c.R; r++) {
                assert_int_equal(check_room(&c, full, r), 0);
                over += c.route[r].need[0], fits += !c.route[r].need[0];
            }
            if (round == 1 && c.route[0].off[1]) { // the check sees an end past the room
                c.route[0].off[1]++;
                assert_int_not_equal(check_room(&c, full, 0), 0);
            }
            free_routes(&c);
            free_case(full);
            dev_free(d);
        }
    assert_true(over > 100 && fits > 20);
}

static void test_routes(void **state) {
    (void)state;
    static const int shapes[][5] = {// R, E, N, S, K
        {1, 1, 1, 0, 1}, {1, 4, 1, 2, 2}, {2, 4, 1, 1, 2}, {2, 4, 2, 2, 2}, {3, 6, 3, 2, 3}, {4, 4, 2, 2, 1},
        {4, 16, 1, 3, 4}, {4, 16, 4, 2, 4}, {4, 8, 2, 0, 2}, {8, 8, 2, 3, 2}, {8, 16, 4, 2, 8}, {6, 12, 3, 4, 2}, {8, 64, 2, 8, 8}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int round = 0; round < 40; round++) {
            Dev *d = dev_init((DevOptions){.threads = 1});
            const int *s = shapes[i];
            Case *c = make_case(d, s, round % 8 ? 37 : 0, round % 3 ? 0 : 5, round & 1, round >> 1 & 1);
            assert_int_equal(check_case(c), 0);
            assert_int_equal(check_copies(c), 0);
            free_case(c);
            dev_free(d);
        }
}

// The checks above see a row moved by one, a crossing too few, meta of another rank, a copy not sent, a gradient not returned.
static void test_checks_can_fail(void **state) {
    (void)state;
    static const int dim[] = {4, 16, 2, 3, 4};
    Dev *d = dev_init((DevOptions){.threads = 1});
    Case *c;
    do c = make_case(d, dim, 37, 0, 1, 1);
    while (c->route[0].n_out[1] == 0 || *c->route[0].n_home_add == 0 || *c->route[0].n_w_send == 0 || c->BT[1] == 0 ||
          c->route[1].row[0] < 0);
    Route *t = &c->route[0];
    assert_int_equal(check_case(c) + check_copies(c), 0);
    c->route[1].row[0]++;
    assert_int_not_equal(check_case(c), 0);
    c->route[1].row[0]--;
    t->n_out[1]--;
    assert_int_not_equal(check_case(c), 0);
    t->n_out[1]++;
    int *meta = t->meta + (size_t)route_room(c->shape) * 2 * 4, q = 0; // of the first crossing to node 1
    while (meta[4 + q] < 0) q++;
    meta[q] ^= 1; // another rank of the node
    assert_int_not_equal(check_case(c), 0);
    meta[q] ^= 1;
    (*t->n_home_add)--;
    assert_int_not_equal(check_copies(c), 0);
    (*t->n_home_add)++, (*t->n_w_send)--;
    assert_int_not_equal(check_copies(c), 0);
    free_case(c);
    dev_free(d);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_routes), cmocka_unit_test(test_room), cmocka_unit_test(test_checks_can_fail)};
    return cmocka_run_group_tests_name("routes", tests, NULL, NULL);
}
