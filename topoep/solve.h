// The TopoEP solver: from the demand matrix D to a plan. One source for every backend, in the common subset of C and CUDA: no
// recursion, no allocation, integers only. Bounds: PLAN_MAX_* (topoep/plan.h), at most 2^31-1 pairs.
//
// Idea. J is a sum of maxima, and a maximum says nothing about the ranks just below it. So every maximum is softened: a rank
// or node counts with a weight of 2^(sharp (value/max - 1)), and the slope of the softened J gives each rank and node a price
// for one pair more: computed there, entering, leaving. A pair of expert e moved from h to r gains lift(h) - lay(r), in which
// balance and the traffic of ranks and of nodes are weighed against each other as J does at this point. The copies' own cost
// is not priced but bounded: a budget of time, for which plans are made one after the other.
//
//   for budgets on a coarse grid, then near the best one (solve_topoep):
//       while it gains: the copy that gains most, filled as far as it pays (solve_add); after each one, pairs exchanged
//       between the holders there are (solve_level)
//       the same exchange with ever sharper maxima
//   the plan of least J is kept; the identity plan is the first one looked at
//
// Placement between nodes and refinement inside them come from the same prices: a copy on another node is worth the pairs it
// takes off the ports of both nodes and the load it takes off the home's node, one on the home's node the load and the links.
//
// Parallel form. A backend defines the primitives below before it includes this file; without them one thread runs it. All
// threads run all of it in step; the Solve and its arrays are shared. What is written outside a SOLVE_FOR is written by one
// thread (SOLVE_ONE), and a barrier follows. Local variables are the same on all threads, except inside those two. Every choice
// is a maximum over unique keys, so the order of a reduction cannot matter.
#ifndef MOE_SOLVE_H
#define MOE_SOLVE_H
#include "topoep/cost.h"
#include "topoep/flow.h"

#ifndef SOLVE_FOR
#define SOLVE_FOR(i, n) for (int i = 0; i < (n); i++) // i split over the threads; iterations are independent
#define SOLVE_ONE if (1)                              // on one thread
#define SOLVE_BARRIER() ((void)0)                     // all threads; orders their accesses to memory
#define SOLVE_MAX(x) (x)                              // the largest int64 of all threads, on all threads; a barrier too
#define SOLVE_SUM(x) (x)                              // the sum, likewise
#define SOLVE_LEAF HOSTDEV                            // a function with loops worth vectorising
#endif
#ifndef SOLVE_SIZE
#define SOLVE_SIZE HOSTDEV                            // a function that the host asks
#endif

typedef struct Solve {
    int N, G, R, E, S, H, block;
    const int *D;
    const Cost *cost;
    int64_t total, mean;       // pairs; on a rank, rounded up
    int *node, *owner;         // (R) node of a rank; (R,S) rank of a slot
    int *dt, *q, *best_q;      // (E,R) demand, quota, the best plan's quota
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
    int *room;                 // (R) pairs up to the mean load, 0 at least; -1: no slot is free
    int *from, *onto;          // (E) whom the next copy would relieve, where it would lie
    int64_t *key;              // (E) its score, 0 = nowhere
    int64_t best_ps;
    int max_intra, max_inter;  // the budget as numbers of transfers
    int sharp;                 // octaves from the maximum down to 0
    int shift;                 // picoseconds are shifted down to 31 bits before they are scaled
    int64_t inv_load, inv_tok, cap_load, cap_tok; // from such a value to octaves; the largest value for which that fits
    int64_t phi_load, phi_tok; // sums of the weights
    int64_t c_load, c_tok;     // from a weight to its share of J
    int64_t f_load, f_rank, f_node; // from a weight to a price
    int64_t u_load, u_rank, u_node; // cost of a pair, all shifted alike to at most 25 bits
    int most_amount, amount_shift;  // in scores: amounts are cut here, and shifted down to 15 bits
} Solve;

enum {
    SOLVE_PRICE = 20,      // fraction bits of f_*
    SOLVE_ONE_MAX = 1 << 16, // weight of a value at the maximum: what a sum of weights comes to at least
    SOLVE_LEAST = 1 << 19, // an exchange that gains less per pair (1/32 to 1/64 of the dearest cost of a pair) is left alone
    SOLVE_GAIN = 16,       // a copy must gain 2^-16 of J
    SOLVE_TRIES = 6,       // copies worked out for each one placed
    SOLVE_RESCORE = 6,     // copies placed before all scores are computed afresh
    SOLVE_TURNS = 4,       // exchanges of one expert before the next one's turn
    SOLVE_SHARPER = 3,     // doublings of sharpness at the end
};

// ---- softened maxima ----------------------------------------------------------------------------------------------------
// 2^16 2^(sharp (value/max - 1)), linear between octaves; 0 below 2^-16 of that, linear above 2^12 of it
HOSTDEV int64_t solve_weight(int64_t value, int64_t inv, int64_t cap, int sharp) {
    int64_t y = ((value < cap ? value : cap) * inv >> 32) - ((int64_t)sharp << 8);
    if (y < -(16 << 8)) return 0;
    if (y >= 12 << 8) return ((int64_t)1 << 28) + ((y - (12 << 8) < 1023 ? y - (12 << 8) : 1023) << 20);
    int64_t m = (256 + (y & 255)) << 8;
    int octave = (int)(y >> 8);
    return octave >= 0 ? m << octave : m >> -octave;
}
HOSTDEV int64_t solve_w_load(const Solve *v, int64_t n) {
    return solve_weight(n * v->cost->pair_compute_ps >> v->shift, v->inv_load, v->cap_load, v->sharp);
}
HOSTDEV int64_t solve_w_rank(const Solve *v, int64_t n) {
    return solve_weight(n * v->cost->pair_intra_ps >> v->shift, v->inv_tok, v->cap_tok, v->sharp);
}
HOSTDEV int64_t solve_w_node(const Solve *v, int64_t n) {
    return solve_weight(n * v->cost->pair_inter_ps >> v->shift, v->inv_tok, v->cap_tok, v->sharp);
}

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

// Weights of a rank, of a node, afresh; the change of the sums is returned in two parts
typedef struct Phi {
    int64_t load, tok;
} Phi;
HOSTDEV Phi solve_weigh_rank(Solve *v, int r) {
    int load = (int)solve_w_load(v, v->load[r]), in = (int)solve_w_rank(v, v->load[r] - v->self[r]);
    int out = (int)solve_w_rank(v, v->rows[r] - v->self[r]);
    Phi change = {(int64_t)load - v->w_load[r], (int64_t)in - v->w_in[r] + out - v->w_out[r]};
    v->w_load[r] = load, v->w_in[r] = in, v->w_out[r] = out;
    return change;
}
HOSTDEV int64_t solve_weigh_node(Solve *v, int n) {
    int in = (int)solve_w_node(v, v->nload[n] - v->nlocal[n]), out = (int)solve_w_node(v, v->nrows[n] - v->nlocal[n]);
    int64_t change = (int64_t)in - v->wn_in[n] + out - v->wn_out[n];
    v->wn_in[n] = in, v->wn_out[n] = out;
    return change;
}

// Prices, and room, from the weights
SOLVE_LEAF void solve_price(Solve *v) {
    int64_t load = cost_max(v->phi_load, SOLVE_ONE_MAX), tok = cost_max(v->phi_tok, SOLVE_ONE_MAX);
    int64_t f_load = (v->u_load << SOLVE_PRICE) / load, f_rank = (v->u_rank << SOLVE_PRICE) / tok, f_node = (v->u_node << SOLVE_PRICE) / tok;
    SOLVE_ONE v->f_load = f_load, v->f_rank = f_rank, v->f_node = f_node;
    SOLVE_FOR(r, v->R) {
        int compute = (int)(f_load * v->w_load[r] >> SOLVE_PRICE);
        v->p_take[r] = compute + (int)(f_rank * v->w_in[r] >> SOLVE_PRICE);
        v->p_keep[r] = compute - (int)(f_rank * v->w_out[r] >> SOLVE_PRICE);
        v->room[r] = v->held[r] >= v->S || v->held[r] >= v->max_intra ? -1 : flow_max(0, (int)v->mean - v->load[r]);
    }
    SOLVE_FOR(n, v->N) {
        v->pn_in[n] = (int)(f_node * v->wn_in[n] >> SOLVE_PRICE);
        v->pn_out[n] = (int)(f_node * v->wn_out[n] >> SOLVE_PRICE);
    }
    SOLVE_BARRIER();
}

// Scales, weights and prices afresh, for the maxima there are now
HOSTDEV void solve_refresh(Solve *v, int sharp) {
    Peaks p = solve_peaks(v);
    int64_t load = cost_compute(v->cost, p), tok = cost_tokens(v->cost, p); // a term far below the other one is not resolved
    load = cost_max(cost_max(load, tok >> 10), 1), tok = cost_max(cost_max(tok, load >> 10), 1);
    SOLVE_ONE {
        int shift = 0;
        while (cost_max(load, tok) >> shift >= (int64_t)1 << 31) shift++;
        v->sharp = sharp, v->shift = shift;
        v->inv_load = ((int64_t)sharp << 40) / cost_max(1, load >> shift), v->inv_tok = ((int64_t)sharp << 40) / cost_max(1, tok >> shift);
        v->cap_load = ((int64_t)1 << 62) / v->inv_load, v->cap_tok = ((int64_t)1 << 62) / v->inv_tok;
    }
    SOLVE_BARRIER();
    Phi phi = {0, 0};
    SOLVE_FOR(r, v->R) {
        v->w_load[r] = v->w_in[r] = v->w_out[r] = 0;
        Phi part = solve_weigh_rank(v, r);
        phi.load += part.load, phi.tok += part.tok;
    }
    SOLVE_FOR(n, v->N) {
        v->wn_in[n] = v->wn_out[n] = 0;
        phi.tok += solve_weigh_node(v, n);
    }
    phi.load = SOLVE_SUM(phi.load), phi.tok = SOLVE_SUM(phi.tok);
    SOLVE_ONE {
        v->phi_load = phi.load, v->phi_tok = phi.tok;
        v->c_load = (load >> v->shift << 8) / cost_max(phi.load, SOLVE_ONE_MAX);
        v->c_tok = (tok >> v->shift << 8) / cost_max(phi.tok, SOLVE_ONE_MAX);
    }
    SOLVE_BARRIER();
    solve_price(v);
}

// What a pair of e saves when it is taken from h, costs when it is given to r: the rank's part, and the node's, which counts
// when the two are on different nodes
HOSTDEV int solve_lift(const Solve *v, int e, int h) {
    int at = e * v->R + h;
    return v->q[at] > v->dt[at] ? v->p_take[h] : v->p_keep[h];
}
HOSTDEV int solve_lay(const Solve *v, int e, int r) {
    int at = e * v->R + r;
    return v->q[at] < v->dt[at] ? v->p_keep[r] : v->p_take[r];
}
HOSTDEV int solve_lift_node(const Solve *v, int e, int n) {
    int at = e * v->N + n;
    return v->x[at] > v->nd[at] ? v->pn_in[n] : -v->pn_out[n];
}
HOSTDEV int solve_lay_node(const Solve *v, int e, int n) {
    int at = e * v->N + n;
    return v->x[at] < v->nd[at] ? -v->pn_out[n] : v->pn_in[n];
}

// ---- how far a move pays --------------------------------------------------------------------------------------------------
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

// Change of the softened J when d pairs of e move from h to r; convex in d
HOSTDEV int64_t solve_delta(const Solve *v, int e, int h, int r, int d) {
    Side a = solve_side(v, e, h), b = solve_side(v, e, r);
    int own_a = solve_own(a, -d), own_b = solve_own(b, d), nh = v->node[h], nr = v->node[r];
    int64_t load = solve_w_load(v, a.load - d) + solve_w_load(v, b.load + d) - v->w_load[h] - v->w_load[r];
    int64_t tok = solve_w_rank(v, a.load - d - own_a) + solve_w_rank(v, a.rows - own_a) + solve_w_rank(v, b.load + d - own_b)
                + solve_w_rank(v, b.rows - own_b) - v->w_in[h] - v->w_out[h] - v->w_in[r] - v->w_out[r];
    if (nh != nr) {
        a = solve_node_side(v, e, nh), b = solve_node_side(v, e, nr);
        own_a = solve_own(a, -d), own_b = solve_own(b, d);
        tok += solve_w_node(v, a.load - d - own_a) + solve_w_node(v, a.rows - own_a) + solve_w_node(v, b.load + d - own_b)
             + solve_w_node(v, b.rows - own_b) - v->wn_in[nh] - v->wn_out[nh] - v->wn_in[nr] - v->wn_out[nr];
    }
    return load * v->c_load + tok * v->c_tok;
}

// Gain of the pair after the first d: falls with d
HOSTDEV int64_t solve_slope(const Solve *v, Side a, Side b, Side na, Side nb, int far, int d) {
    int own_a = solve_own(a, -d), own_b = solve_own(b, d);
    int64_t load = solve_w_load(v, a.load - d) - solve_w_load(v, b.load + d), node = 0;
    int64_t rank = d < a.q - a.d ? solve_w_rank(v, a.load - d - own_a) : -solve_w_rank(v, a.rows - own_a);
    rank += d < b.d - b.q ? solve_w_rank(v, b.rows - own_b) : -solve_w_rank(v, b.load + d - own_b);
    if (far) {
        own_a = solve_own(na, -d), own_b = solve_own(nb, d);
        node = d < na.q - na.d ? solve_w_node(v, na.load - d - own_a) : -solve_w_node(v, na.rows - own_a);
        node += d < nb.d - nb.q ? solve_w_node(v, nb.rows - own_b) : -solve_w_node(v, nb.load + d - own_b);
    }
    return (v->f_load * load >> SOLVE_PRICE) + (v->f_rank * rank >> SOLVE_PRICE) + (v->f_node * node >> SOLVE_PRICE);
}

// How many pairs of e to move from h to r: as long as the next one gains, to within 1/1024 of the mean load, in whole blocks
HOSTDEV int solve_line(const Solve *v, int e, int h, int r) {
    Side a = solve_side(v, e, h), b = solve_side(v, e, r);
    int nh = v->node[h], nr = v->node[r], far = nh != nr, lo = 0, hi = a.q / v->block, fine = (int)(v->mean >> 10) / v->block;
    Side na = solve_node_side(v, e, nh), nb = solve_node_side(v, e, nr);
    if (hi == 0 || solve_slope(v, a, b, na, nb, far, 0) <= 0) return 0;
    if (solve_slope(v, a, b, na, nb, far, hi * v->block - 1) > 0) return hi * v->block;
    while (hi - lo > 1 + fine) {
        int mid = lo + (hi - lo) / 2;
        if (solve_slope(v, a, b, na, nb, far, mid * v->block) > 0) lo = mid;
        else hi = mid;
    }
    if (hi - lo == 1) // the last block on the way gains the mean of its two ends
        return solve_slope(v, a, b, na, nb, far, lo * v->block) + solve_slope(v, a, b, na, nb, far, hi * v->block) > 0 ? hi * v->block : lo * v->block;
    return (lo > 0 ? lo : hi) * v->block;
}

// ---- moving pairs (on one thread) -------------------------------------------------------------------------------------------
HOSTDEV int solve_home(const Solve *v, int e) { return e / v->H; }

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

HOSTDEV void solve_move(Solve *v, int e, int h, int r, int d) {
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

// ---- exchange between holders ---------------------------------------------------------------------------------------------
// The two holders of e between which a pair gains most; returns the gain, 0 if there are none. Ties: lower h, lower r.
HOSTDEV int solve_pair(const Solve *v, int e, int *from, int *onto) {
    int best = 0, home = solve_home(v, e);
    for (int a = -1, more = 1; more; more = a >= 0) { // a, b: -1 = the home, then the chain of copies
        int h = a < 0 ? home : v->owner[a];
        if (v->q[e * v->R + h] > 0) {
            int up = solve_lift(v, e, h), up_node = solve_lift_node(v, e, v->node[h]);
            for (int b = -1, left = 1; left; left = b >= 0) {
                int r = b < 0 ? home : v->owner[b], gain = up - solve_lay(v, e, r);
                if (v->node[r] != v->node[h]) gain += up_node - solve_lay_node(v, e, v->node[r]);
                if (r != h && gain > 0 && (gain > best || (gain == best && (h < *from || (h == *from && r < *onto)))))
                    best = gain, *from = h, *onto = r;
                b = b < 0 ? v->head[e] : v->next[b];
            }
        }
        a = a < 0 ? v->head[e] : v->next[a];
    }
    return best;
}

// Exchanges for each expert with copies in turn, as far as they gain; part: 0 or 1 = the even or the odd ones only, -1 = all
HOSTDEV void solve_level(Solve *v, int sweeps, int part) {
    for (int moves = 1; sweeps > 0 && moves > 0; sweeps--) {
        moves = 0;
        for (int e = 0; e < v->E; e++) {
            if (v->head[e] < 0 || (part >= 0 && (e & 1) != part)) continue;
            for (int t = 0; t < SOLVE_TURNS; t++) {
                int h = 0, r = 0, gain = solve_pair(v, e, &h, &r);
                int d = gain > SOLVE_LEAST ? solve_line(v, e, h, r) : 0;
                if (d == 0) break;
                SOLVE_BARRIER();
                SOLVE_ONE {
                    solve_move(v, e, h, r, d);
                    Phi a = solve_weigh_rank(v, h), b = solve_weigh_rank(v, r);
                    v->phi_load += a.load + b.load, v->phi_tok += a.tok + b.tok;
                    if (v->node[h] != v->node[r]) v->phi_tok += solve_weigh_node(v, v->node[h]) + solve_weigh_node(v, v->node[r]);
                }
                SOLVE_BARRIER();
                solve_price(v);
                moves++;
            }
        }
    }
}

// ---- new copies -----------------------------------------------------------------------------------------------------------
// What a copy of an expert would be worth on the ranks of one node
typedef struct Spot {
    int gain, room;          // gain of a pair but for the receiving rank's price; the node's demand that is not served in it
    int far, q, load;        // another node than the relieved holder's; that holder's quota and load
    int entry, above, limit; // ranks past the entry are open if above, those before it if they send at most limit copies
} Spot;
HOSTDEV int solve_score(const Solve *v, const int *q, const int *dt, Spot s, int r) { // gain of the first pair x amount
    int load = v->load[r], room = v->room[r], keep = v->p_keep[r], take = v->p_take[r], fan = v->fan[r], pairs = q[r], own = dt[r];
    int gain = s.gain - (pairs < own ? keep : take), near = flow_max(own, (s.load - load) >> 1);
    int amount = flow_min(s.q, flow_max(s.far ? s.room : near, room)), open = r > s.entry ? s.above : fan <= s.limit;
    return (gain >> 12) * (amount >> v->amount_shift) & -((pairs == 0) & (room >= 0) & open); // no branch: it is the inner loop
}

// For expert e: the holder to relieve, the rank where a copy scores most, and the score
SOLVE_LEAF void solve_scan(Solve *v, int e) {
    const int *q = v->q + e * v->R, *dt = v->dt + e * v->R;
    int home = solve_home(v, e), hn = v->node[home], h = home, top = solve_lift(v, e, home) + solve_lift_node(v, e, hn);
    if (q[home] == 0) top = -(1 << 30);
    for (int c = v->head[e]; c >= 0; c = v->next[c]) {
        int r = v->owner[c], gain = solve_lift(v, e, r) + solve_lift_node(v, e, v->node[r]);
        if (gain > top || (gain == top && r < h)) top = gain, h = r;
    }
    int best = 0, onto = -1, up = solve_lift(v, e, h), up_node = solve_lift_node(v, e, v->node[h]);
    for (int n = 0; n < v->N && q[h] > 0; n++) {
        int at = e * v->N + n, count = v->count[at], most = 0, first = n * v->G;
        if (n == hn ? v->fan[home] >= v->max_intra : count == 0 && (v->wout[hn] >= v->max_inter || v->win[n] >= v->max_inter)) continue;
        Spot s = {up, v->nd[at] - v->x[at], n != v->node[h], flow_min(q[h], v->most_amount), v->load[h], v->entry[at], 1, v->max_intra - count};
        if (s.far) s.gain += up_node - solve_lay_node(v, e, n);
        if (count > 0) s.above = v->fan[s.entry] < v->max_intra;
        for (int r = first; r < first + v->G; r++) most = flow_max(most, solve_score(v, q, dt, s, r));
        if (most <= best) continue;
        best = most;
        for (onto = first; solve_score(v, q, dt, s, onto) != most;) onto++;
    }
    v->from[e] = h, v->onto[e] = onto;
    v->key[e] = onto < 0 ? 0 : ((int64_t)best << 10) | (PLAN_MAX_E - 1 - e);
}

SOLVE_LEAF int64_t solve_top(const Solve *v) { // the largest key
    int64_t top = 0;
    SOLVE_FOR(e, v->E) top = v->key[e] > top ? v->key[e] : top;
    return SOLVE_MAX(top);
}

// One more copy: of the best few by score (all scores afresh, or as they were and only these few afresh) the one that gains
// most. Returns 0 if none gains.
HOSTDEV int solve_add(Solve *v, int all) {
    int64_t gain = cost_total(v->cost, solve_peaks(v)) >> v->shift << 8 >> SOLVE_GAIN;
    if (all) {
        SOLVE_FOR(e, v->E) solve_scan(v, e);
        SOLVE_BARRIER();
    }
    int chosen = -1, amount = 0, n = 0, tried[SOLVE_TRIES];
    int64_t score[SOLVE_TRIES];
    for (; n < SOLVE_TRIES; n++) {
        int64_t top = solve_top(v);
        if (top == 0) break;
        int e = PLAN_MAX_E - 1 - (int)(top & (PLAN_MAX_E - 1));
        if (!all) {
            SOLVE_ONE solve_scan(v, e);
            SOLVE_BARRIER();
        }
        tried[n] = e, score[n] = v->key[e];
        SOLVE_BARRIER();
        SOLVE_ONE v->key[e] = 0;
        SOLVE_BARRIER();
        int d = score[n] > 0 ? solve_line(v, e, v->from[e], v->onto[e]) : 0;
        if (d == 0) continue;
        int64_t g = -solve_delta(v, e, v->from[e], v->onto[e], d);
        if (g > gain) gain = g, chosen = e, amount = d;
    }
    SOLVE_BARRIER();
    SOLVE_ONE {
        for (int i = 0; i < n; i++) v->key[tried[i]] = score[i];
        if (chosen >= 0) solve_move(v, chosen, v->from[chosen], v->onto[chosen], amount);
    }
    SOLVE_BARRIER();
    if (chosen >= 0) solve_refresh(v, v->sharp);
    return chosen >= 0;
}

// ---- the plan -------------------------------------------------------------------------------------------------------------
HOSTDEV void solve_identity(Solve *v) {
    SOLVE_FOR(i, v->R * v->S) v->slot[i] = -1;
    SOLVE_FOR(r, v->R) v->held[r] = v->fan[r] = v->load[r] = v->self[r] = 0;
    SOLVE_FOR(n, v->N) v->wout[n] = v->win[n] = v->nload[n] = v->nlocal[n] = 0;
    SOLVE_BARRIER();
    SOLVE_FOR(e, v->E) {
        int home = solve_home(v, e), all = 0;
        for (int r = 0; r < v->R; r++) v->q[e * v->R + r] = 0;
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

// J of the plan as it is; kept if it is the best
HOSTDEV int64_t solve_keep(Solve *v) {
    int64_t cost = cost_total(v->cost, solve_peaks(v));
    if (cost < v->best_ps) {
        SOLVE_BARRIER();
        SOLVE_FOR(i, v->E * v->R) v->best_q[i] = v->q[i];
        SOLVE_ONE v->best_ps = cost;
    }
    SOLVE_BARRIER();
    return cost;
}

HOSTDEV void solve_none(Solve *v) {
    solve_identity(v);
    SOLVE_ONE v->best_ps = INT64_MAX;
    SOLVE_BARRIER();
    solve_keep(v);
}

// A plan for at most this many transfers of each kind. Returns its J
HOSTDEV int64_t solve_try(Solve *v, int max_intra, int max_inter, int sharp) {
    SOLVE_ONE v->max_intra = max_intra, v->max_inter = max_inter;
    solve_identity(v);
    solve_refresh(v, sharp);
    int all = 1;
    for (int added = 0; added < 2 * v->R * v->S;) { // copies can be lost again in the exchange, so that is no bound by itself
        if (solve_add(v, all)) {
            all = ++added % SOLVE_RESCORE == 0;
            solve_level(v, 1, added > 16 ? added & 1 : -1);
        } else if (all) {
            break;
        } else {
            all = 1; // none by the old scores
        }
    }
    solve_level(v, 6, -1);
    int64_t cost = cost_total(v->cost, solve_peaks(v)), best = v->best_ps;
    SOLVE_BARRIER();
    if (cost - best > best / 16) return cost; // sharper maxima do not gain that much
    for (int i = 1; i <= SOLVE_SHARPER; i++) {
        solve_refresh(v, sharp << i);
        solve_level(v, 3, -1);
    }
    return solve_keep(v);
}

HOSTDEV int solve_transfers(const Solve *v, int64_t budget_ps, int64_t copy_ps) {
    int64_t each = copy_ps * (1000 - v->cost->overlap_permille) / 1000, most = (int64_t)v->R * v->S;
    return (int)(each == 0 || budget_ps / each > most ? most : budget_ps / each);
}

HOSTDEV void solve_topoep(Solve *v) {
    const Cost *c = v->cost;
    const int tenths[] = {10, 7, 14, 12, 8}, sharps[] = {24, 40, 40, 28, 28};
    solve_none(v);
    int64_t unit = c->copy_intra_ps * (1000 - c->overlap_permille) / 1000, best = 0, base = c->pair_compute_ps * v->mean + c->plan_fixed_ps;
    if (unit == 0) unit = cost_max(1, c->copy_inter_ps * (1000 - c->overlap_permille) / 1000);
    if (v->S == 0 || v->R == 1 || base + unit >= v->best_ps) return; // no plan with copies can be better
    for (int64_t b = unit, last = 0; !last && base + b < v->best_ps; b *= 2) {
        int intra = solve_transfers(v, b, c->copy_intra_ps), inter = solve_transfers(v, b, c->copy_inter_ps);
        int64_t before = v->best_ps;
        SOLVE_BARRIER();
        int64_t cost = solve_try(v, intra, inter, 40);
        if (cost < before) best = b;
        last = (intra >= v->R * v->S && inter >= v->R * v->S) || (b > 2 * unit && b > best && cost - v->best_ps > v->best_ps / 16);
    }
    if (best == 0) best = unit;
    for (int k = 0; k < 5; k++) {
        int64_t b = cost_max(unit, best * tenths[k] / 10), before = v->best_ps;
        if (base + b >= before) continue;
        SOLVE_BARRIER();
        if (solve_try(v, solve_transfers(v, b, c->copy_intra_ps), solve_transfers(v, b, c->copy_inter_ps), sharps[k]) < before) best = b;
    }
}

// ---- workspace and result -------------------------------------------------------------------------------------------------
#define SOLVE_ARRAYS(R, E, N, S, X)                                                                                            \
    X(node, R) X(owner, (R) * (S)) X(dt, (E) * (R)) X(q, (E) * (R)) X(best_q, (E) * (R)) X(nd, (E) * (N)) X(x, (E) * (N))      \
    X(count, (E) * (N)) X(entry, (E) * (N)) X(slot, (R) * (S)) X(next, (R) * (S)) X(head, E) X(held, R) X(fan, R) X(wout, N)   \
    X(win, N) X(load, R) X(self, R) X(rows, R) X(nload, N) X(nlocal, N) X(nrows, N) X(w_load, R) X(w_in, R) X(w_out, R)        \
    X(wn_in, N) X(wn_out, N) X(p_take, R) X(p_keep, R) X(pn_in, N) X(pn_out, N) X(room, R) X(from, E) X(onto, E)

SOLVE_SIZE size_t solve_work_bytes(int R, int E, int N, int S) {
    size_t n = 0;
#define X(name, count) n += (size_t)(count);
    SOLVE_ARRAYS(R, E, N, S, X)
#undef X
    return n * sizeof(int) + (size_t)E * sizeof(int64_t);
}

// Lays v out in work (solve_work_bytes, aligned to 8 bytes) and reads D
HOSTDEV void solve_bind(Solve *v, void *work, const int *D, int R, int E, const Cost *cost, int block) {
    SOLVE_ONE {
        v->N = cost->N, v->G = cost->G, v->R = R, v->E = E, v->S = cost->S, v->H = E / R, v->block = block;
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
        for (int n = 0; n < v->N; n++) v->nd[e * v->N + n] = 0;
        for (int s = 0; s < R; s++) {
            v->dt[e * R + s] = D[s * E + e];
            v->nd[e * v->N + s / v->G] += D[s * E + e];
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

HOSTDEV uint64_t solve_hash(uint64_t h, int x) { // FNV-1a of a little-endian int32
    for (int i = 0; i < 4; i++) h = (h ^ ((unsigned)x >> (8 * i) & 255)) * 0x100000001B3ull;
    return h;
}

// The best plan found and what it costs; all sums are made again from its quotas
HOSTDEV void solve_result(Solve *v, int *quota, int *slot, PlanInfo *info) {
    solve_identity(v);
    Peaks p = solve_peaks(v), before = p;
    SOLVE_ONE {
        for (int e = 0; e < v->E; e++)
            for (int r = 0; r < v->R; r++) {
                int d = v->best_q[e * v->R + r];
                if (d > 0 && r != solve_home(v, e)) solve_move(v, e, solve_home(v, e), r, d);
            }
    }
    SOLVE_BARRIER();
    p = solve_peaks(v);
    SOLVE_FOR(i, v->E * v->R) quota[i] = v->q[i];
    SOLVE_FOR(i, v->R * v->S) slot[i] = v->slot[i]; // ascending, as experts were visited so
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
