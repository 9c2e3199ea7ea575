// The route of one rank (topoep/route.h), worked out on the CPU: which pairs go where follows from flow_column (topoep/flow.h).
//
// A source's pairs of one expert go, in token order, in runs: the first few to the lowest rank that computes it, the next to the
// next. Say 10 pairs of e, of which rank 0 takes 6 and rank 2 takes 4, and in their buffers this source's rows of e begin at 40
// and at 7: then there are two Runs, {end 6, peer 0, shift 40} and {end 10, peer 2, shift 7 - 6 = 1}; the pair with ord 8 goes to
// rank 2, row 8 + 1 = 9.
#include "topoep/route.h"
#include "kernels/check.h"
#include "kernels/cpu/dev.h"
#include "topoep/flow.h"
#include <string.h>

typedef struct Run { // consecutive pairs of one expert that go to one rank
    int end, peer, shift; // ord < end; row = ord + shift
} Run;

typedef struct Work {
    int *base;       // (R, J) first row of group j on rank r
    int *y;          // (R)
    int *run_of;     // (E+1) first run of an expert
    Run *run;        // (E + R*S)
} Work;

size_t route_work_bytes(int R, int E, int S) {
    int J = E / R + S;
    return (SIZE(R, J) + (size_t)R + (size_t)E + 1) * sizeof(int) + (E + SIZE(R, S)) * sizeof(Run);
}

// Group of expert e on rank r, -1 if r does not hold it.
static int group_of(const int *slot, int e, int r, int H, int S) {
    if (e / H == r) return e - r * H;
    for (int i = 0; i < S; i++)
        if (slot[r * S + i] == e) return H + i;
    return -1;
}

// Lowest rank of node n that holds a copy of e, -1 if none.
static int entry_rank(const int *slot, int e, int n, int G, int H, int S) {
    for (int r = n * G; r < (n + 1) * G; r++)
        if (group_of(slot, e, r, H, S) >= H) return r;
    return -1;
}

static void make_rows(Route *t, const Plan *plan, const int *D, int me, int R, int E, int G, int S, Work *w) {
    int H = E / R, J = H + S, node = me / G;
    for (int r = 0; r < R; r++) {
        int at = 0;
        for (int j = 0; j < J; j++) {
            int e = j < H ? r * H + j : plan->slot[r * S + j - H];
            w->base[r * J + j] = at;
            if (r == me) t->off[j] = at;
            if (e >= 0) at += plan->quota[(size_t)e * R + r];
        }
        if (r == me) t->off[J] = at;
    }
    int n_run = 0, n_send = 0, n_recv = 0, stage = 0;
    for (int e = 0; e < E; e++) {
        int ord = 0; // pairs of e that the ranks before r get from me
        w->run_of[e] = n_run;
        for (int r = 0; r < R; r++) {
            if (plan->quota[(size_t)e * R + r] == 0) continue;
            int j = group_of(plan->slot, e, r, H, S), row = w->base[r * J + j];
            flow_column(w->y, D, plan->quota, r, e, R, E, G);
            for (int s = 0; s < me; s++) row += w->y[s];
            int n = w->y[me];
            if (n > 0 && r / G == node) w->run[n_run++] = (Run){ord + n, r, row - ord};
            if (n > 0 && r / G != node) {
                w->run[n_run++] = (Run){ord + n, R, stage};
                t->send[n_send++] = (RowSeg){r, stage + ord, n};
            }
            ord += n;
            if (r != me) continue;
            row = w->base[r * J + j];
            for (int s = 0; s < R; row += w->y[s++])
                if (w->y[s] > 0 && s / G != node) t->recv[n_recv++] = (RowSeg){s, row, w->y[s]};
        }
        stage += D[(size_t)me * E + e];
    }
    w->run_of[E] = n_run;
    *t->n_send = n_send;
    *t->n_recv = n_recv;
}

static void make_pairs(Route *t, const int *idx, const int *ord, int BT, int K, const Work *w) {
    for (int p = 0; p < BT * K; p++) {
        t->peer[p] = 0, t->row[p] = -1;
        if (ord[p] < 0) continue;
        const Run *run = w->run + w->run_of[idx[p]];
        while (ord[p] >= run->end) run++;
        t->peer[p] = run->peer, t->row[p] = ord[p] + run->shift;
    }
}

static void make_copies(Route *t, const int *slot, int me, int R, int E, int N, int S) {
    int H = E / R, G = R / N, node = me / G;
    int n_ws = 0, n_wr = 0, n_pull = 0, n_node = 0, n_gs = 0, n_gr = 0, n_home = 0;
    for (int i = 0; i < S; i++) { // what I hold
        int e = slot[me * S + i];
        if (e < 0) continue;
        int home = e / H, entry = entry_rank(slot, e, node, G, H, S);
        if (home / G == node) {
            t->pull[n_pull++] = (BlockCopy){i, home, e - home * H};
        } else if (entry != me) {
            t->pull[n_pull++] = (BlockCopy){i, R + entry, group_of(slot, e, entry, H, S) - H};
        } else {
            t->w_recv[n_wr++] = (RowSeg){home, i, 1};
            t->g_send[n_gs++] = (RowSeg){home, i, 1};
            for (int r = me + 1; r < (node + 1) * G; r++) {
                int j = group_of(slot, e, r, H, S);
                if (j >= 0) t->node_add[n_node++] = (BlockCopy){i, r, j - H};
            }
        }
    }
    for (int h = 0; h < H; h++) { // what others hold of mine
        int e = me * H + h;
        for (int r = node * G; r < (node + 1) * G; r++) {
            int j = group_of(slot, e, r, H, S);
            if (r != me && j >= 0) t->home_add[n_home++] = (BlockCopy){h, r, j - H};
        }
        for (int n = 0; n < N; n++) {
            int entry = n == node ? -1 : entry_rank(slot, e, n, G, H, S);
            if (entry < 0) continue;
            t->w_send[n_ws++] = (RowSeg){entry, h, 1};
            t->home_add[n_home++] = (BlockCopy){h, R, n_gr};
            t->g_recv[n_gr] = (RowSeg){entry, n_gr, 1};
            n_gr++;
        }
    }
    *t->n_w_send = n_ws, *t->n_w_recv = n_wr, *t->n_pull = n_pull, *t->n_node_add = n_node;
    *t->n_g_send = n_gs, *t->n_g_recv = n_gr, *t->n_home_add = n_home;
}

void route_make(Dev *d, Route *t, const Plan *plan, const int *D, const int *idx, const int *ord, int me, int BT, int K, int R, int E,
                int N, int S, void *work) {
    dev_enter(d);
    Work w = {.base = work};
    w.y = w.base + SIZE(R, E / R + S);
    w.run_of = w.y + R;
    w.run = (Run *)(w.run_of + E + 1);
    make_rows(t, plan, D, me, R, E, R / N, S, &w);
    make_pairs(t, idx, ord, BT, K, &w);
    make_copies(t, plan->slot, me, R, E, N, S);
    dev_leave(d);
}
