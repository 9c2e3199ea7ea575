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

static Case *make_case(Dev *d, int R, int E, int N, int S, int K, int max_BT, int drop) {
    Case *c = host_alloc(sizeof *c);
    *c = (Case){.R = R, .E = E, .N = N, .S = S, .K = K};
    c->D = host_alloc(SIZE(R, E, sizeof(int)));
    c->plan = (Plan){.quota = host_alloc(SIZE(E, R, sizeof(int))), .slot = host_alloc(SIZE(R, S + 1, sizeof(int)))};
    for (int r = 0; r < R; r++) c->BT[r] = draw(4) ? draw(max_BT + 1) : 0, make_pairs(c, r, drop);
    make_plan(c);
    void *work = dev_alloc(d, route_work_bytes(R, E, S), "work");
    for (int r = 0; r < R; r++) {
        c->route[r] = route_alloc(d, max_BT, K, R, E, N, S);
        route_make(d, &c->route[r], &c->plan, c->D, c->idx[r], c->ord[r], r, c->BT[r], K, R, E, N, S, work);
    }
    return c;
}

static int holds(const Case *c, int r, int j) { // expert of group j of rank r, -1 = empty slot
    int H = c->E / c->R;
    return j < H ? r * H + j : c->plan.slot[r * c->S + j - H];
}

// A payload that says where it comes from: source, pair, expert.
static int64_t payload(int s, int p, int e) { return ((int64_t)s << 40) | ((int64_t)e << 24) | p; }

// Carries the pairs as dispatch does. rows[r][row] = payload; returns the number of faults.
static int deliver(const Case *c, int64_t **rows) {
    int faults = 0;
    int64_t *stage[16];
    int *seen[16];
    for (int s = 0; s < c->R; s++) stage[s] = calloc(c->BT[s] * c->K + 1, sizeof(int64_t)), seen[s] = calloc(1 << 16, sizeof(int));
    for (int s = 0; s < c->R; s++)
        for (int p = 0; p < c->BT[s] * c->K; p++) {
            int peer = c->route[s].peer[p], row = c->route[s].row[p];
            if ((row < 0) != (c->ord[s][p] < 0)) faults++;
            if (row < 0) continue;
            if (peer == c->R) {
                stage[s][row] = payload(s, p, c->idx[s][p]);
                continue;
            }
            if (peer / (c->R / c->N) != s / (c->R / c->N)) faults++;
            faults += seen[peer][row]++ > 0;
            rows[peer][row] = payload(s, p, c->idx[s][p]);
        }
    for (int s = 0; s < c->R; s++)
        for (int r = 0; r < c->R; r++) { // the i-th segment sent from s to r meets the i-th that r expects from s
            const Route *a = &c->route[s], *b = &c->route[r];
            int i = 0, k = 0;
            for (;;) {
                while (i < *a->n_send && a->send[i].peer != r) i++;
                while (k < *b->n_recv && b->recv[k].peer != s) k++;
                if (i == *a->n_send || k == *b->n_recv) break;
                faults += a->send[i].n != b->recv[k].n;
                for (int n = 0; n < a->send[i].n; n++) {
                    faults += seen[r][b->recv[k].row + n]++ > 0;
                    rows[r][b->recv[k].row + n] = stage[s][a->send[i].row + n];
                }
                i++, k++;
            }
            faults += i != *a->n_send || k != *b->n_recv;
        }
    for (int s = 0; s < c->R; s++) free(stage[s]), free(seen[s]);
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

// Copies: carries weights (a number per expert) and gradients (1000 per holder) by the lists.
static int check_copies(const Case *c) {
    int R = c->R, H = c->E / R, S = c->S, faults = 0;
    int slot[16][16], grad[16][16], stage[16][64 * 16], home[64] = {0};
    memset(slot, 0xff, sizeof slot);
    for (int r = 0; r < R; r++) {
        for (int i = 0; i < *c->route[r].n_w_recv; i++) {
            RowSeg want = c->route[r].w_recv[i];
            const Route *from = &c->route[want.peer];
            int nth = 0, k = 0;
            for (int q = 0; q < i; q++) nth += c->route[r].w_recv[q].peer == want.peer;
            for (; k < *from->n_w_send; k++)
                if (from->w_send[k].peer == r && nth-- == 0) break;
            if (k == *from->n_w_send) return 1000;
            slot[r][want.row] = want.peer * H + from->w_send[k].row;
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < *c->route[r].n_pull; i++) {
            BlockCopy b = c->route[r].pull[i];
            faults += b.peer < R ? b.peer / (R / c->N) != r / (R / c->N) : (b.peer - R) / (R / c->N) != r / (R / c->N);
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
        for (int i = 0; i < *c->route[r].n_g_recv; i++) {
            RowSeg want = c->route[r].g_recv[i];
            const Route *from = &c->route[want.peer];
            int nth = 0, k = 0;
            for (int q = 0; q < i; q++) nth += c->route[r].g_recv[q].peer == want.peer;
            for (; k < *from->n_g_send; k++)
                if (from->g_send[k].peer == r && nth-- == 0) break;
            if (k == *from->n_g_send) return 1000;
            stage[r][want.row] = grad[want.peer][from->g_send[k].row];
        }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < *c->route[r].n_home_add; i++) {
            BlockCopy b = c->route[r].home_add[i];
            if (b.peer < R) faults += slot[b.peer][b.src] != r * H + b.dst;
            home[r * H + b.dst] += b.peer < R ? 1 : stage[r][b.src];
        }
    for (int e = 0; e < c->E; e++) { // every copy's gradient arrives home exactly once
        int holders = 0;
        for (int i = 0; i < R * S; i++) holders += c->plan.slot[i] == e;
        faults += home[e] != holders;
    }
    return faults;
}

static void free_case(Case *c) {
    for (int r = 0; r < c->R; r++) free(c->idx[r]), free(c->ord[r]);
    free(c->D), free(c->plan.quota), free(c->plan.slot), free(c);
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
            Case *c = make_case(d, s[0], s[1], s[2], s[3], s[4], round % 8 ? 37 : 0, round % 3 ? 0 : 5);
            assert_int_equal(check_case(c), 0);
            assert_int_equal(check_copies(c), 0);
            free_case(c);
            dev_free(d);
        }
}

// The checks above see a row moved by one, a segment cut short, a gradient returned twice.
static void test_checks_can_fail(void **state) {
    (void)state;
    Dev *d = dev_init((DevOptions){.threads = 1});
    Case *c;
    do c = make_case(d, 4, 16, 2, 3, 4, 37, 0);
    while (*c->route[0].n_send == 0 || *c->route[0].n_home_add == 0);
    assert_int_equal(check_case(c) + check_copies(c), 0);
    c->route[1].row[0]++;
    assert_int_not_equal(check_case(c), 0);
    c->route[1].row[0]--;
    c->route[0].send[0].n--;
    assert_int_not_equal(check_case(c), 0);
    c->route[0].send[0].n++;
    (*c->route[0].n_home_add)--;
    assert_int_not_equal(check_copies(c), 0);
    free_case(c);
    dev_free(d);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_routes), cmocka_unit_test(test_checks_can_fail)};
    return cmocka_run_group_tests_name("routes", tests, NULL, NULL);
}
