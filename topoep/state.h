// A plan in the making: its sums, its moves, its start and its result. Everything here and in topoep/price.h, topoep/solve.h and
// topoep/policies.h is one source for every backend, in the common subset of C and CUDA: no recursion, no allocation, integers
// only. Bounds: PLAN_MAX_* (topoep/plan.h), at most 2^31-1 pairs.
//
// Parallel form. A backend defines the primitives below before it includes these files; without them one thread runs all. All
// threads run all of it in step; the Solve and its arrays are shared. What is written outside a SOLVE_FOR is written by one
// thread (SOLVE_ONE), and a barrier follows. Local variables are the same on all threads, except inside those two. Every choice
// is a maximum over unique keys, so the order of a reduction cannot matter.
#ifndef MOE_STATE_H
#define MOE_STATE_H
#include "topoep/cost.h"
#include "topoep/flow.h"

#ifndef SOLVE_FOR // i split over the threads; iterations are independent (and compilers told so), the bound is read once
#if defined __GNUC__ && !defined __clang__
#define SOLVE_FOR(i, n) _Pragma("GCC ivdep") for (int i = 0, solve_n_ = (n); i < solve_n_; i++)
#else
#define SOLVE_FOR(i, n) for (int i = 0, solve_n_ = (n); i < solve_n_; i++)
#endif
#define SOLVE_ONE if (1)                              // on one thread
#define SOLVE_BARRIER() ((void)0)                     // all threads; orders their accesses to memory
#define SOLVE_MAX(x) (x)                              // the largest int64 of all threads, on all threads; a barrier too
#define SOLVE_SUM(x) (x)                              // the sum, likewise
#endif
#ifndef SOLVE_LEAF
#define SOLVE_LEAF HOSTDEV                            // a function with loops worth vectorising
#endif
#ifndef SOLVE_BIG
#define SOLVE_BIG static __attribute__((noinline, unused)) // a function too large to be copied to where it is called
#endif
#ifndef SOLVE_SIZE
#define SOLVE_SIZE HOSTDEV                            // a function that the host asks
#endif

typedef struct Solve {
    int N, G, R, E, S, H, block;
    PlanTarget target;
    unsigned without;          // PLAN_NO_*
    const int *D;
    const Cost *cost;
    int64_t total, mean;       // pairs; on a rank, rounded up
    int *node, *owner;         // (R) node of a rank; (R,S) rank of a slot
    int *dt, *q;               // (E,R) demand, quota
    int *best_q, *save_q;      // (E,R) the quotas of the best plan, of the one that solve_undo goes back to
    int *nd, *x;               // (E,N) demand and quota of a node
    int *count, *entry;        // (E,N) copies on a node other than the home's; the lowest rank that holds one, -1 = none
    int *slot;                 // (R,S) expert of each copy, in the order of arrival
    int *next, *head;          // (R,S), (E) chain of an expert's copies: indices into slot, -1 ends
    int *held, *fan;           // (R) copies held, copies sent inside the node
    int *wout, *win;           // (N) experts sent to, received from other nodes
    int *load, *self, *rows;   // (R) pairs computed; of them those that start there; pairs that start there
    int *nload, *nlocal, *nrows; // (N) the same of nodes
    int *w_load, *w_in, *w_out, *wn_in, *wn_out; // (R), (N) weights in the softened maxima
    int *p_take, *p_keep;      // (R) price of computing a pair more, when it comes from elsewhere; when it starts here
    int *pn_in, *pn_out;       // (N) price of a pair more that enters, leaves
    int *pn_least, *n_room;    // (N) bounds of prices and room over a node's ranks: the least p_keep where a slot is free, most room
    int *room;                 // (R) pairs up to the mean load, 0 at least; -1: no slot is free
    int *from, *onto;          // (E) whom the next copy would relieve, where it would lie
    int64_t *key;              // (E) its score, 0 = nowhere
    int64_t best_ps, best_load; // of the best plan: J, its fullest rank
    int cap;                   // pairs that a rank may compute at most
    int max_intra, max_inter;  // the budget as numbers of transfers
    int ban_e, ban_r;          // no copy of this expert on this rank; -1 = none
    int coarse;                // moves are worked out to within 2^-coarse of the mean load
    int most_out, least_keep;  // over all nodes: the most of pn_out, the least of pn_least
    int64_t floor;             // scores up to here are not worked out
    int quiet;                 // prices of traffic are shifted down by it
    int sharp;                 // octaves from the maximum down to 0
    int shift;                 // picoseconds are shifted down to 31 bits before they are scaled
    int64_t inv_load, inv_tok, cap_load, cap_tok; // from such a value to octaves; the largest value for which that fits
    int64_t phi_load, phi_tok; // sums of the weights
    int64_t c_load, c_tok;     // from a weight to its share of J
    int64_t f_load, f_rank, f_node; // from a weight to a price
    int64_t u_load, u_rank, u_node; // cost of a pair, all shifted alike to at most 25 bits
    int most_amount, amount_shift;  // in scores: amounts are cut here, and shifted down to 15 bits
} Solve;

HOSTDEV int solve_home(const Solve *v, int e) { return e / v->H; }

HOSTDEV Peaks solve_peaks(const Solve *v) {
    Peaks p = {0, 0, 0, 0, 0, 0};
    SOLVE_FOR(r, v->R) {
        p.load = cost_max(p.load, v->load[r]);
        p.intra = cost_max(p.intra, flow_max(v->load[r], v->rows[r]) - v->self[r]);
        p.copy_intra = cost_max(p.copy_intra, flow_max(v->held[r], v->fan[r]));
        p.copies += v->held[r];
    }
    SOLVE_FOR(n, v->N) {
        p.inter = cost_max(p.inter, flow_max(v->nload[n], v->nrows[n]) - v->nlocal[n]);
        p.copy_inter = cost_max(p.copy_inter, flow_max(v->wout[n], v->win[n]));
    }
    p.load = SOLVE_MAX(p.load), p.inter = SOLVE_MAX(p.inter), p.intra = SOLVE_MAX(p.intra);
    p.copy_inter = SOLVE_MAX(p.copy_inter), p.copy_intra = SOLVE_MAX(p.copy_intra), p.copies = SOLVE_SUM(p.copies);
    return p;
}

// ---- moving pairs (on one thread) -------------------------------------------------------------------------------------------
// One end of a move, a rank or a node: pairs computed, starting, both; quota and demand of the expert in question
typedef struct Side {
    int load, rows, own, q, d;
} Side;
HOSTDEV Side solve_side(const Solve *v, int e, int r) {
    Side s = {v->load[r], v->rows[r], v->self[r], v->q[e * v->R + r], v->dt[e * v->R + r]};
    return s;
}
HOSTDEV Side solve_node_side(const Solve *v, int e, int n) {
    Side s = {v->nload[n], v->nrows[n], v->nlocal[n], v->x[e * v->N + n], v->nd[e * v->N + n]};
    return s;
}
HOSTDEV int solve_own(Side s, int d) { return s.own + flow_min(s.d, s.q + d) - flow_min(s.d, s.q); } // with d pairs more

HOSTDEV void solve_hold(Solve *v, int e, int r) { // a copy of e on r
    int n = v->node[r], home = solve_home(v, e), hn = v->node[home], at = e * v->N + n, c = r * v->S + v->held[r]++;
    v->slot[c] = e;
    v->next[c] = v->head[e];
    v->head[e] = c;
    if (n == hn) {
        v->fan[home]++;
        return;
    }
    if (v->count[at] == 0) {
        v->wout[hn]++, v->win[n]++;
        v->entry[at] = r;
    } else if (r > v->entry[at]) {
        v->fan[v->entry[at]]++;
    } else {
        v->fan[v->entry[at]] -= v->count[at] - 1;
        v->fan[r] += v->count[at];
        v->entry[at] = r;
    }
    v->count[at]++;
}

HOSTDEV int *solve_link(Solve *v, int c) { // what points to slot c in its expert's chain
    int *link = &v->head[v->slot[c]];
    while (*link != c) link = &v->next[*link];
    return link;
}

HOSTDEV void solve_drop(Solve *v, int e, int r) { // the copy of e on r, which computes nothing any more
    int n = v->node[r], home = solve_home(v, e), hn = v->node[home], at = e * v->N + n, c = r * v->S, last = c + --v->held[r];
    while (v->slot[c] != e) c++;
    *solve_link(v, c) = v->next[c];
    if (c != last) { // the last one takes its place
        *solve_link(v, last) = c;
        v->slot[c] = v->slot[last];
        v->next[c] = v->next[last];
    }
    v->slot[last] = -1;
    if (n == hn) {
        v->fan[home]--;
        return;
    }
    v->count[at]--;
    if (v->count[at] == 0) {
        v->wout[hn]--, v->win[n]--;
        v->entry[at] = -1;
    } else if (r == v->entry[at]) {
        int heir = r + 1;
        while (v->q[e * v->R + heir] == 0) heir++;
        v->fan[r] -= v->count[at];
        v->fan[heir] += v->count[at] - 1;
        v->entry[at] = heir;
    } else {
        v->fan[v->entry[at]]--;
    }
}

SOLVE_BIG void solve_move(Solve *v, int e, int h, int r, int d) {
    int *q = v->q + e * v->R, *x = v->x + e * v->N, nh = v->node[h], nr = v->node[r];
    if (q[r] == 0 && r != solve_home(v, e)) solve_hold(v, e, r);
    v->self[h] = solve_own(solve_side(v, e, h), -d);
    v->self[r] = solve_own(solve_side(v, e, r), d);
    v->load[h] -= d, v->load[r] += d;
    q[h] -= d, q[r] += d;
    if (nh != nr) {
        v->nlocal[nh] = solve_own(solve_node_side(v, e, nh), -d);
        v->nlocal[nr] = solve_own(solve_node_side(v, e, nr), d);
        v->nload[nh] -= d, v->nload[nr] += d;
        x[nh] -= d, x[nr] += d;
    }
    if (q[h] == 0 && h != solve_home(v, e)) solve_drop(v, e, h);
}

// ---- whole plans ----------------------------------------------------------------------------------------------------------
SOLVE_BIG void solve_identity(Solve *v) {
    SOLVE_FOR(i, v->R * v->S) v->slot[i] = -1;
    SOLVE_FOR(r, v->R) v->held[r] = v->fan[r] = v->load[r] = v->self[r] = 0;
    SOLVE_FOR(n, v->N) v->wout[n] = v->win[n] = v->nload[n] = v->nlocal[n] = 0;
    SOLVE_BARRIER();
    SOLVE_FOR(e, v->E) {
        int home = solve_home(v, e), all = 0, R = v->R, *q = v->q + e * R;
        for (int r = 0; r < R; r++) q[r] = 0;
        for (int n = 0; n < v->N; n++) {
            int at = e * v->N + n;
            all += v->nd[at];
            v->x[at] = v->count[at] = 0, v->entry[at] = -1;
        }
        v->head[e] = -1;
        v->q[e * v->R + home] = v->x[e * v->N + v->node[home]] = all;
    }
    SOLVE_BARRIER();
    SOLVE_FOR(r, v->R) {
        for (int e = r * v->H; e < (r + 1) * v->H; e++) {
            v->load[r] += v->q[e * v->R + r];
            v->self[r] += v->dt[e * v->R + r];
        }
    }
    SOLVE_BARRIER();
    SOLVE_FOR(n, v->N) {
        for (int r = n * v->G; r < (n + 1) * v->G; r++) v->nload[n] += v->load[r];
        for (int e = n * v->G * v->H; e < (n + 1) * v->G * v->H; e++) v->nlocal[n] += v->nd[e * v->N + n];
    }
    SOLVE_BARRIER();
}

SOLVE_LEAF void solve_copy(int *to, const int *from, int n) { SOLVE_FOR(i, n) to[i] = from[i]; }

SOLVE_LEAF int solve_same(const int *a, const int *b, int n) { // on one thread
    int differ = 0;
    for (int i = 0; i < n; i++) differ |= a[i] ^ b[i];
    return !differ;
}

// Whether a plan with these sums obeys what is left out
HOSTDEV int solve_allowed(const Solve *v, Peaks p) {
    int64_t inter = 0;
    SOLVE_FOR(n, v->N) inter += v->win[n];
    inter = SOLVE_SUM(inter);
    return !(v->without & PLAN_NO_STAGE1 && inter > 0) && !(v->without & PLAN_NO_STAGE2 && p.copies > inter);
}

// J of the plan as it is; kept if it is the best
SOLVE_BIG int64_t solve_keep(Solve *v) {
    Peaks p = solve_peaks(v);
    int64_t cost = cost_total(v->cost, p);
    int better = v->target == TARGET_BALANCE && p.load != v->best_load ? p.load < v->best_load : cost < v->best_ps;
    better = better && solve_allowed(v, p);
    SOLVE_BARRIER();
    if (better) {
        solve_copy(v->best_q, v->q, v->E * v->R);
        SOLVE_ONE v->best_ps = cost, v->best_load = p.load;
    }
    SOLVE_BARRIER();
    return cost;
}

// The plan becomes the one of these quotas (E,R), from whatever it is: first all that is too much goes home, so that no rank
// runs out of slots on the way
SOLVE_BIG void solve_become(Solve *v, const int *quota) {
    SOLVE_BARRIER();
    SOLVE_ONE {
        for (int back = 1; back >= 0; back--)
            for (int e = 0; e < v->E; e++) {
                const int *q = v->q + e * v->R, *want = quota + e * v->R;
                int home = solve_home(v, e);
                if (solve_same(q, want, v->R)) continue;
                for (int r = 0; r < v->R; r++) {
                    int d = back ? q[r] - want[r] : want[r] - q[r];
                    if (d > 0 && r != home) solve_move(v, e, back ? r : home, back ? home : r, d);
                }
            }
    }
    SOLVE_BARRIER();
}

HOSTDEV void solve_none(Solve *v) {
    solve_identity(v);
    SOLVE_ONE v->best_ps = v->best_load = INT64_MAX;
    SOLVE_BARRIER();
    solve_keep(v);
}

// ---- workspace and result -------------------------------------------------------------------------------------------------
#define SOLVE_ARRAYS(R, E, N, S, X)                                                                                            \
    X(node, R) X(owner, (R) * (S)) X(dt, (E) * (R)) X(q, (E) * (R)) X(best_q, (E) * (R)) X(save_q, (E) * (R))                  \
    X(nd, (E) * (N)) X(x, (E) * (N)) X(count, (E) * (N)) X(entry, (E) * (N)) X(slot, (R) * (S)) X(next, (R) * (S)) X(head, E)  \
    X(held, R) X(fan, R) X(wout, N) X(win, N) X(load, R) X(self, R) X(rows, R) X(nload, N) X(nlocal, N) X(nrows, N)            \
    X(w_load, R) X(w_in, R) X(w_out, R) X(wn_in, N) X(wn_out, N) X(p_take, R) X(p_keep, R) X(pn_in, N) X(pn_out, N)            \
    X(pn_least, N) X(n_room, N) X(room, R) X(from, E) X(onto, E)

SOLVE_SIZE size_t solve_work_bytes(int R, int E, int N, int S) {
    size_t n = 0;
#define X(name, count) n += (size_t)(count);
    SOLVE_ARRAYS(R, E, N, S, X)
#undef X
    return n * sizeof(int) + (size_t)E * sizeof(int64_t);
}

// Lays v out in work (solve_work_bytes, aligned to 8 bytes) and reads D
SOLVE_BIG void solve_bind(Solve *v, void *work, const int *D, int R, int E, const Cost *cost, PlanOptions o) {
    SOLVE_ONE {
        v->N = cost->N, v->G = cost->G, v->R = R, v->E = E, v->S = cost->S, v->H = E / R, v->block = flow_max(1, o.block);
        v->target = o.policy == POLICY_TOPOEP ? o.target : TARGET_TIME, v->without = o.policy == POLICY_TOPOEP ? o.without : 0;
        v->cap = INT32_MAX, v->max_intra = v->max_inter = R * v->S, v->ban_e = v->ban_r = -1, v->quiet = v->without & PLAN_NO_LOCALITY ? 31 : 0, v->coarse = 10, v->floor = 0;
        v->D = D, v->cost = cost;
        v->key = (int64_t *)work;
        int *at = (int *)(v->key + E);
#define X(name, count) v->name = at, at += (size_t)(count);
        SOLVE_ARRAYS(R, E, v->N, v->S, X)
#undef X
        int64_t u = cost_max(cost->pair_compute_ps, cost_max(cost->pair_inter_ps, cost->pair_intra_ps));
        int up = 0, down = 0;
        while (u > 0 && u << up < 1 << 24) up++;
        while (u >> down > 1 << 25) down++;
        v->u_load = cost->pair_compute_ps << up >> down, v->u_node = cost->pair_inter_ps << up >> down;
        v->u_rank = cost->pair_intra_ps << up >> down;
    }
    SOLVE_BARRIER();
    SOLVE_FOR(r, R) {
        v->node[r] = r / v->G;
        for (int i = 0; i < v->S; i++) v->owner[r * v->S + i] = r;
    }
    SOLVE_FOR(e, E) {
        for (int n = 0, s = 0; n < v->N; n++) {
            int sum = 0;
            for (int last = s + v->G; s < last; s++) sum += v->dt[e * R + s] = D[s * E + e];
            v->nd[e * v->N + n] = sum;
        }
    }
    int64_t total = 0;
    SOLVE_FOR(s, R) {
        int sum = 0;
        for (int e = 0; e < E; e++) sum += D[s * E + e];
        v->rows[s] = sum;
        total += sum;
    }
    total = SOLVE_SUM(total);
    SOLVE_FOR(n, v->N) {
        v->nrows[n] = 0;
        for (int s = n * v->G; s < (n + 1) * v->G; s++) v->nrows[n] += v->rows[s];
    }
    SOLVE_ONE {
        v->total = total, v->mean = (total + R - 1) / R;
        v->most_amount = (int)(total < 8 * v->mean ? total : 8 * v->mean);
        v->amount_shift = 0;
        while (v->most_amount >> v->amount_shift >= 1 << 15) v->amount_shift++;
    }
    SOLVE_BARRIER();
}

HOSTDEV uint64_t solve_hash(uint64_t h, int x) { // FNV-1a of a little-endian int32; a byte of 0 only multiplies
    const uint64_t p = 0x100000001B3ull, p2 = p * p;
    unsigned u = (unsigned)x;
    h = (h ^ (u & 255)) * p;
    if (u < 1u << 16) return (h ^ u >> 8) * p * p2;
    return (((h ^ (u >> 8 & 255)) * p ^ (u >> 16 & 255)) * p ^ u >> 24) * p;
}

// The best plan found and what it costs; all sums are made again from its quotas
SOLVE_BIG void solve_result(Solve *v, int *quota, int *slot, PlanInfo *info) {
    solve_identity(v);
    Peaks p = solve_peaks(v), before = p;
    solve_become(v, v->best_q);
    p = solve_peaks(v);
    solve_copy(quota, v->q, v->E * v->R);
    solve_copy(slot, v->slot, v->R * v->S); // ascending, as experts were visited so
    SOLVE_ONE {
        PlanInfo a = {.cost_ps = cost_total(v->cost, p), .compute_ps = cost_compute(v->cost, p), .tokens_ps = cost_tokens(v->cost, p),
                      .weights_ps = cost_weights(v->cost, p), .fixed_ps = cost_fixed(v->cost, p), .identity_ps = cost_total(v->cost, before),
                      .max_load = p.load, .max_load_before = before.load, .copies = p.copies, .total = v->total};
        for (int r = 0; r < v->R; r++) a.pairs_self += v->self[r];
        for (int n = 0; n < v->N; n++) a.pairs_node += v->nlocal[n], a.inter_copies += v->win[n];
        a.pairs_inter = v->total - a.pairs_node, a.pairs_node -= a.pairs_self, a.node_copies = a.copies - a.inter_copies;
        uint64_t h = solve_hash(solve_hash(solve_hash(0xCBF29CE484222325ull, v->R), v->E), v->S);
        for (int i = 0; i < v->R * v->E; i++) h = solve_hash(h, v->D[i]);
        for (int e = 0; e < v->E; e++)
            for (int r = 0; r < v->R; r++) {
                int n = v->q[e * v->R + r];
                if (n > 0) h = solve_hash(solve_hash(solve_hash(h, e), r), n);
            }
        a.hash = h;
        *info = a;
    }
    SOLVE_BARRIER();
}
#endif
