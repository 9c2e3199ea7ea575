// The route of one rank (topoep/route.h), worked out on the CPU: which pairs go where follows from flow_column (topoep/flow.h).
//
// A source's pairs of one expert go, in token order, in runs: the first few to the lowest rank that computes it, the next to the
// next. Say 10 pairs of e, of which rank 0 takes 6 and rank 2 takes 4, and in their buffers this source's rows of e begin at 40
// and at 7: then there are two Runs, {end 6, rank 0, shift 40} and {end 10, rank 2, shift 7 - 6 = 1}; the pair with ord 8 goes to
// rank 2, row 8 + 1 = 9.
#include "topoep/route.h"
#include "kernels/check.h"
#include "kernels/cpu/dev.h"
#include "topoep/flow.h"
#include <string.h>

typedef struct Run { // consecutive pairs of one expert that go to one rank
    int end, rank, shift; // ord < end; row = ord + shift
} Run;

enum { NO_ROOM = -2 }; // in the list of crossings, while it is made: like -1, none

typedef struct Work {
    int *base;       // (R, J) first row of group j on rank r
    int *y;          // (R)
    int *run_of;     // (E+1) first run of an expert
    int *entry;      // (E,N) rank*S + slot of the lowest holder of a copy on a node, -1 = none
    Run *run;        // (E + R*S)
} Work;

size_t route_work_bytes(RouteShape s) {
    int J = s.E / s.R + s.S;
    return (SIZE(s.R, J) + (size_t)s.R + (size_t)s.E + 1 + SIZE(s.E, s.N)) * sizeof(int) + (s.E + SIZE(s.R, s.S)) * sizeof(Run);
}

// Group of expert e on rank r, -1 if r does not hold it.
static int group_of(const int *slot, int e, int r, int H, int S) {
    if (e / H == r) return e - r * H;
    for (int i = 0; i < S; i++)
        if (slot[r * S + i] == e) return H + i;
    return -1;
}

static int within(int x, int room) { return room && x > room ? room : x; }

static void raise_need(Route *t, int kind, int n, int room) {
    if (n > t->need[kind]) t->need[kind] = n;
    if (room && n > room) t->need[0] = 1;
}

static void make_runs(Route *t, const Plan *plan, const int *D, int me, RouteShape s, Work *w) {
    int R = s.R, H = s.E / R, J = H + s.S, G = R / s.N, n_run = 0;
    for (int r = 0; r < R; r++) {
        int at = 0;
        for (int j = 0; j < J; j++) {
            int e = j < H ? r * H + j : plan->slot[r * s.S + j - H];
            w->base[r * J + j] = at;
            if (r == me) t->off[j] = within(at, s.rows);
            if (e >= 0) at += plan->quota[(size_t)e * R + r];
        }
        if (r == me) t->off[J] = within(at, s.rows);
        raise_need(t, 1, at, s.rows);
    }
    for (int e = 0; e < s.E; e++) {
        int ord = 0; // pairs of e that the ranks before r get from me
        w->run_of[e] = n_run;
        if (D[(size_t)me * s.E + e] == 0) continue;
        for (int r = 0; r < R; r++) {
            if (plan->quota[(size_t)e * R + r] == 0) continue;
            flow_column(w->y, D, plan->quota, r, e, R, s.E, G);
            int n = w->y[me], row = w->base[r * J + group_of(plan->slot, e, r, H, s.S)];
            if (n == 0) continue;
            for (int i = 0; i < me; i++) row += w->y[i];
            w->run[n_run++] = (Run){ord + n, r, row - ord};
            ord += n;
        }
    }
    w->run_of[s.E] = n_run;
}

// Crossing of token t's pair k, which goes to another node; a new one where it has none yet; -1 where there is no room for it.
static int crossing(Route *t, int token, int k, int node, RouteShape s) {
    int X = route_crossings(s), Q = route_pairs(s), room = route_room(s), *c = &t->cross[(size_t)token * X + (s.dedup ? node : k)];
    if (*c >= 0 || *c == NO_ROOM) return *c;
    int i = t->n_out[node]++;
    *c = i < room ? node * room + i : NO_ROOM;
    if (i >= room) return NO_ROOM;
    int *meta = t->meta + (size_t)*c * 2 * Q;
    for (int q = 0; q < Q; q++) meta[q] = 0, meta[Q + q] = -1;
    t->traffic[0]++;
    return *c;
}

static void make_pairs(Route *t, const int *idx, const int *ord, int me, int BT, RouteShape s, const Work *w) {
    int G = s.R / s.N, Q = route_pairs(s);
    t->traffic[0] = t->traffic[1] = 0;
    for (int n = 0; n < s.N; n++) t->n_out[n] = 0;
    for (size_t i = 0; i < SIZE(BT, route_crossings(s)); i++) t->cross[i] = -1;
    for (int p = 0; p < BT * s.K; p++) {
        t->peer[p] = 0, t->row[p] = t->wrow[p] = -1;
        if (ord[p] < 0) continue;
        const Run *run = w->run + w->run_of[idx[p]];
        while (ord[p] >= run->end) run++;
        int row = ord[p] + run->shift, node = run->rank / G;
        if (s.rows && row >= s.rows) row = -1;
        if (node == me / G) {
            t->peer[p] = run->rank, t->row[p] = t->wrow[p] = row;
            continue;
        }
        int c = crossing(t, p / s.K, p % s.K, node, s), q = s.dedup ? p % s.K : 0;
        t->peer[p] = s.R;
        if (c < 0) continue;
        int *meta = t->meta + (size_t)c * 2 * Q;
        meta[q] = run->rank, meta[Q + q] = row;
        t->wrow[p] = c * Q + q;
        t->traffic[1] += run->rank % G != me % G;
    }
    for (int n = 0; n < s.N; n++) {
        raise_need(t, 2, t->n_out[n], route_room(s));
        t->n_out[n] = within(t->n_out[n], route_room(s));
    }
}

static void find_entries(int *entry, const int *slot, RouteShape s) {
    for (size_t i = 0; i < SIZE(s.E, s.N); i++) entry[i] = -1;
    for (int i = s.R * s.S - 1; i >= 0; i--)
        if (slot[i] >= 0) entry[slot[i] * s.N + i / s.S / (s.R / s.N)] = i;
}

// What crosses nodes: all of this node's copies where they are sliced, else those whose home has this rank's place
static void make_crossing_copies(Route *t, const int *entry, int me, RouteShape s) {
    int H = s.E / s.R, G = s.R / s.N, node = me / G, n_out = 0, n_in = 0;
    for (int e = 0; e < s.E; e++) {
        int home = e / H, from = home / G;
        if (!s.slicing && home % G != me % G) continue;
        if (from != node) {
            int i = entry[e * s.N + node];
            if (i >= 0) t->w_recv[n_in++] = (BlockSeg){from, i / s.S, i % s.S};
            continue;
        }
        for (int n = 0; n < s.N; n++) {
            if (n == node || entry[e * s.N + n] < 0) continue;
            t->w_send[n_out] = (BlockSeg){n, home, e % H};
            t->g_recv[n_out++] = (BlockSeg){n, home, e % H * (s.N - 1) + n - (n > node)};
        }
    }
    *t->n_w_send = n_out, *t->n_w_recv = n_in;
}

static void make_copies(Route *t, const int *slot, const int *entry, int me, RouteShape s) {
    int H = s.E / s.R, S = s.S, G = s.R / s.N, node = me / G, n_pull = 0, n_node = 0, n_home = 0;
    for (int i = 0; i < S; i++) { // what I hold
        int e = slot[me * S + i];
        if (e < 0) continue;
        int home = e / H, first = entry[e * s.N + node];
        if (home / G == node) {
            t->pull[n_pull++] = (BlockCopy){i, home, e - home * H};
        } else if (first / S != me) {
            t->pull[n_pull++] = (BlockCopy){i, s.R + first / S, first % S};
        } else {
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
        for (int n = 0; n < s.N; n++)
            if (n != node && entry[e * s.N + n] >= 0) t->home_add[n_home++] = (BlockCopy){h, s.R, h * (s.N - 1) + n - (n > node)};
    }
    *t->n_pull = n_pull, *t->n_node_add = n_node, *t->n_home_add = n_home;
}

void route_make(Dev *d, Route *t, const Plan *plan, const int *D, const int *idx, const int *ord, int me, int BT, RouteShape s,
                void *work) {
    dev_enter(d);
    Work w = {.base = work};
    w.y = w.base + SIZE(s.R, s.E / s.R + s.S);
    w.run_of = w.y + s.R;
    w.entry = w.run_of + s.E + 1;
    w.run = (Run *)(w.entry + SIZE(s.E, s.N));
    make_runs(t, plan, D, me, s, &w);
    make_pairs(t, idx, ord, me, BT, s, &w);
    find_entries(w.entry, plan->slot, s);
    make_crossing_copies(t, w.entry, me, s);
    make_copies(t, plan->slot, w.entry, me, s);
    dev_leave(d);
}
