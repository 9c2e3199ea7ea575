// The TopoEP solver: from the demand matrix D to a plan (the parallel form: topoep/state.h).
//
// Idea. J is a sum of maxima, and a maximum says nothing about the ranks just below it. So every maximum is softened: a rank
// or node counts with a weight of 2^(sharp (value/max - 1)), and the slope of the softened J gives each rank and node a price
// for one pair more: computed there, entering, leaving. A pair of expert e moved from h to r gains lift(h) - lay(r), in which
// balance and the traffic of ranks and of nodes are weighed against each other as J does at this point. The copies' own cost
// is not priced but bounded: a budget of time, which grows step by step.
//
//   climb     for growing budgets: while it gains, the copy that gains most, filled as far as it pays (solve_add); every few
//             copies, pairs exchanged between the holders there are (solve_level)
//   polish    exchanges with ever sharper maxima
//   repair    rounds from the best plan of all: a few copies, drawn, are taken away and the best put in their place
//             (solve_round); a small rise of J is accepted, ever smaller ones as the rounds go on
//   the plan of least J is kept; the identity plan is the first one looked at
//
// Placement between nodes and refinement inside them come from the same prices: a copy on another node is worth the pairs it
// takes off the ports of both nodes and the load it takes off the home's node, one on the home's node the load and the links.
#ifndef MOE_SOLVE_H
#define MOE_SOLVE_H
#include "topoep/price.h"

enum {
    SOLVE_LEAST = 1 << 19, // an exchange that gains less per pair (1/32 to 1/64 of the dearest cost of a pair) is left alone
    SOLVE_GAIN = 16,       // a copy must gain 2^-16 of J
    SOLVE_TRIES = 8,       // copies worked out for each one placed, at most
    SOLVE_FLOOR = 5,       // scores below 2^-3 of the best one can wait
    SOLVE_FULL = 8,        // rounds of a climb at the largest budget
    SOLVE_PASSES = 7,      // climbs of high effort
    SOLVE_TURNS = 4,       // exchanges of one expert before the next one's turn
};

// How much is looked at
typedef struct Effort {
    int tries;   // copies worked out for each one placed
    int scans;   // copies placed before all scores are computed afresh
    int levels;  // copies placed between exchanges
    int sharp;   // of the climb, at first
    int sharper; // doublings of sharpness at the end
} Effort;

// ---- exchange between holders ---------------------------------------------------------------------------------------------
// What a pair of e gains between two holders
HOSTDEV int solve_gain(const Solve *v, int e, int h, int r) {
    int nh = v->node[h], nr = v->node[r], gain = solve_lift(v, e, h) - solve_lay(v, e, r);
    if (nh != nr) return gain + solve_lift_node(v, e, nh) - solve_lay_node(v, e, nr);
    return v->without & PLAN_NO_STAGE2 ? 0 : gain;
}

// Two holders of e between which a pair gains: those that are best for pairs that cross nodes, or the dearest and the cheapest
// rank, each with its best partner in its node. Returns the gain, 0 if there are none. Ties: to the lower ranks.
HOSTDEV int solve_pair(const Solve *v, int e, int *from, int *onto) {
    int home = solve_home(v, e), none = -(1 << 30), give = none, give_far = none, take = none, take_far = none;
    int g = -1, gf = -1, t = -1, tf = -1; // their ranks
    for (int c = -1, more = 1; more; c = c < 0 ? v->head[e] : v->next[c], more = c >= 0) { // -1 = the home, then the chain of copies
        int r = c < 0 ? home : v->owner[c], n = v->node[r], x = solve_lift(v, e, r), y = -solve_lay(v, e, r);
        if (v->q[e * v->R + r] > 0) {
            if (x > give || (x == give && r < g)) give = x, g = r;
            x += solve_lift_node(v, e, n);
            if (x > give_far || (x == give_far && r < gf)) give_far = x, gf = r;
        }
        if (v->load[r] >= v->cap) continue;
        if (y > take || (y == take && r < t)) take = y, t = r;
        y -= solve_lay_node(v, e, n);
        if (y > take_far || (y == take_far && r < tf)) take_far = y, tf = r;
    }
    if (gf < 0 || tf < 0) return 0;
    int best = 0, partner = -1, giver = -1, low = none, high = none;
    for (int c = -1, more = 1; more; c = c < 0 ? v->head[e] : v->next[c], more = c >= 0) {
        int r = c < 0 ? home : v->owner[c], n = v->node[r];
        if (n == v->node[g] && r != g && v->load[r] < v->cap) {
            int y = -solve_lay(v, e, r);
            if (y > low || (y == low && r < partner)) low = y, partner = r;
        }
        if (n == v->node[t] && r != t && v->q[e * v->R + r] > 0) {
            int x = solve_lift(v, e, r);
            if (x > high || (x == high && r < giver)) high = x, giver = r;
        }
    }
    const int h[3] = {gf, g, giver}, r[3] = {tf, partner, t};
    for (int i = 0; i < 3; i++) {
        int gain = h[i] < 0 || r[i] < 0 || h[i] == r[i] ? 0 : solve_gain(v, e, h[i], r[i]);
        if (gain > best) best = gain, *from = h[i], *onto = r[i];
    }
    return best;
}

// A move, with all weights and prices
SOLVE_BIG void solve_apply(Solve *v, int e, int h, int r, int d) {
    SOLVE_BARRIER();
    SOLVE_ONE {
        solve_move(v, e, h, r, d);
        Phi a = solve_weigh_rank(v, h), b = solve_weigh_rank(v, r);
        v->phi_load += a.load + b.load, v->phi_tok += a.tok + b.tok;
        if (v->node[h] != v->node[r]) v->phi_tok += solve_weigh_node(v, v->node[h]) + solve_weigh_node(v, v->node[r]);
    }
    SOLVE_BARRIER();
    solve_price(v);
}

// Exchanges for each expert with copies in turn, as far as they gain; part: 0 or 1 = the even or the odd ones only, -1 = all
SOLVE_BIG void solve_level(Solve *v, int sweeps, int part) {
    for (int moves = 1; sweeps > 0 && moves > 0; sweeps--) {
        moves = 0;
        for (int e = 0; e < v->E; e++) {
            if (v->head[e] < 0 || (part >= 0 && (e & 1) != part)) continue;
            for (int t = 0; t < SOLVE_TURNS; t++) {
                int h = 0, r = 0, gain = solve_pair(v, e, &h, &r);
                int d = gain > SOLVE_LEAST ? solve_line(v, e, h, r) : 0;
                if (d == 0) break;
                solve_apply(v, e, h, r, d);
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


// Gain of a pair of e that moves from h to node n, but for the receiving rank's price, and the rest of the spot
HOSTDEV int solve_gain_node(const Solve *v, int e, int h, int n) {
    int up = solve_lift(v, e, h);
    return n == v->node[h] ? up : up + solve_lift_node(v, e, v->node[h]) - solve_lay_node(v, e, n);
}
HOSTDEV Spot solve_spot(const Solve *v, int e, int h, int n, int gain) {
    int at = e * v->N + n, pairs = flow_min(v->q[e * v->R + h], v->most_amount), count = v->count[at];
    Spot s = {gain, v->nd[at] - v->x[at], n != v->node[h], pairs, v->load[h], v->entry[at], 1, v->max_intra - count};
    if (count > 0) s.above = v->fan[s.entry] < v->max_intra;
    return s;
}

// For expert e: the holder to relieve, the node where a copy scores most (its first rank), and the score
SOLVE_LEAF void solve_scan(Solve *v, int e) {
    const int *q = v->q + e * v->R, *dt = v->dt + e * v->R;
    int home = solve_home(v, e), hn = v->node[home], h = home, top = solve_lift(v, e, home) + solve_lift_node(v, e, hn);
    if (q[home] == 0) top = -(1 << 30);
    for (int c = v->head[e]; c >= 0; c = v->next[c]) {
        int r = v->owner[c], gain = solve_lift(v, e, r) + solve_lift_node(v, e, v->node[r]);
        if (gain > top || (gain == top && r < h)) top = gain, h = r;
    }
    int best = (int)v->floor, onto = -1, ban = e == v->ban_e ? v->ban_r : -1, pairs = flow_min(q[h], v->most_amount), from = v->node[h];
    int nodes = v->N, G = v->G;
    int64_t most_gain = (int64_t)top + v->most_out - v->least_keep; // of a pair, anywhere
    if ((most_gain >> 12) * (pairs >> v->amount_shift) <= best) nodes = 0;
    for (int n = 0; n < nodes; n++) {
        int gain = solve_gain_node(v, e, h, n), at = e * v->N + n, count = v->count[at], most = 0;
        int amount = n == from ? pairs : flow_min(pairs, flow_max(v->nd[at] - v->x[at], v->n_room[n]));
        if ((int64_t)((gain - v->pn_least[n]) >> 12) * (amount >> v->amount_shift) <= best) continue;
        if (n == hn ? v->fan[home] >= v->max_intra : count == 0 && (v->wout[hn] >= v->max_inter || v->win[n] >= v->max_inter)) continue;
        if (v->without && (v->without & (n == hn ? PLAN_NO_STAGE2 : PLAN_NO_STAGE1) || (v->without & PLAN_NO_STAGE2 && count > 0))) continue;
        Spot s = solve_spot(v, e, h, n, gain);
        for (int r = n * G, last = r + G; r < last; r++) most = flow_max(most, solve_score(v, q, dt, s, r) & -(r != ban));
        if (most > best) best = most, onto = n * G;
    }
    v->from[e] = h, v->onto[e] = onto;
    v->key[e] = onto < 0 ? 0 : ((int64_t)best << 10) | (PLAN_MAX_E - 1 - e);
}

// The rank of the node that solve_scan found: the best one, the lowest of equals
HOSTDEV void solve_place(Solve *v, int e) {
    int h = v->from[e], n = v->node[v->onto[e]], first = n * v->G, ban = e == v->ban_e ? v->ban_r : -1;
    Spot s = solve_spot(v, e, h, n, solve_gain_node(v, e, h, n));
    int64_t top = 0;
    SOLVE_FOR(i, v->G) {
        int r = first + i, score = r == ban ? 0 : solve_score(v, v->q + e * v->R, v->dt + e * v->R, s, r);
        top = cost_max(top, ((int64_t)score << 10) | (PLAN_MAX_R - 1 - i));
    }
    top = SOLVE_MAX(top);
    SOLVE_ONE v->onto[e] = first + PLAN_MAX_R - 1 - (int)(top & (PLAN_MAX_R - 1));
    SOLVE_BARRIER();
}

SOLVE_LEAF int64_t solve_top(const Solve *v) { // the largest key
    int64_t top = 0;
    SOLVE_FOR(e, v->E) top = v->key[e] > top ? v->key[e] : top;
    return SOLVE_MAX(top);
}

// All scores afresh; `some`: only those that may come near the best score of the last time
HOSTDEV void solve_scan_all(Solve *v, int some) {
    int out = 0, keep = 1 << 30;
    for (int n = 0; n < v->N; n++) out = flow_max(out, v->pn_out[n]), keep = flow_min(keep, v->pn_least[n]);
    SOLVE_BARRIER();
    SOLVE_ONE {
        v->most_out = out, v->least_keep = keep;
        if (!some) v->floor = 0;
    }
    SOLVE_BARRIER();
    for (int again = 1; again;) {
        SOLVE_FOR(e, v->E) solve_scan(v, e);
        SOLVE_BARRIER();
        int64_t top = solve_top(v) >> 10;
        again = top == 0 && v->floor > 0;
        SOLVE_BARRIER();
        SOLVE_ONE v->floor = some ? top >> SOLVE_FLOOR : 0;
        SOLVE_BARRIER();
    }
}

// One more copy: of the best few by score the one that gains most. Scores are those of the last
// solve_scan_all, looked at afresh before they count (fresh: they are that still). Returns 0 if none gains.
SOLVE_BIG int solve_add(Solve *v, int tries, int fresh) {
    int64_t gain = cost_total(v->cost, solve_peaks(v)) >> v->shift << 8 >> SOLVE_GAIN;
    int chosen = -1, amount = 0, n = 0, tried[SOLVE_TRIES];
    int64_t score[SOLVE_TRIES];
    for (int looked = 0; n < tries && (fresh || looked < 4 * tries + 12); looked++) {
        int64_t top = solve_top(v);
        if (top == 0) break;
        int e = PLAN_MAX_E - 1 - (int)(top & (PLAN_MAX_E - 1));
        if (!fresh) {
            SOLVE_ONE solve_scan(v, e);
            SOLVE_BARRIER();
            if (v->key[e] < top / 2) continue; // no longer one of the best
        }
        tried[n] = e, score[n] = v->key[e];
        SOLVE_BARRIER();
        SOLVE_ONE v->key[e] = 0;
        SOLVE_BARRIER();
        solve_place(v, e);
        int d = solve_line(v, e, v->from[e], v->onto[e]);
        if (d == 0) continue;
        int64_t g = -solve_delta(v, e, v->from[e], v->onto[e], d);
        if (g <= 0) continue;
        n++;
        if (g > gain) gain = g, chosen = e, amount = d;
    }
    SOLVE_BARRIER();
    SOLVE_ONE {
        for (int i = 0; i < n; i++) v->key[tried[i]] = score[i];
    }
    if (chosen >= 0) solve_apply(v, chosen, v->from[chosen], v->onto[chosen], amount);
    return chosen >= 0;
}

// ---- the plan -------------------------------------------------------------------------------------------------------------
// Copies as long as they gain, within the budget there is; f.tries 1: as long as the scores of one look suffice. Returns how many.
SOLVE_BIG int solve_grow(Solve *v, Effort f) {
    int added = 0, some = 0, fresh = 1, most = 2 * v->R * v->S; // copies can be lost again in the exchange: no bound by itself
    solve_scan_all(v, 0);
    while (added < most) {
        if (solve_add(v, f.tries, fresh)) {
            added++;
            if (added % f.levels == 0) {
                solve_refresh(v, v->sharp);
                solve_level(v, 1, added > 16 ? added / f.levels & 1 : -1);
            }
            fresh = added % f.scans == 0, some = 1;
        } else if (f.tries == 1 || (fresh && !some)) {
            break;
        } else { // none by the old scores, or by some
            if (fresh) some = 0;
            fresh = 1;
        }
        if (fresh) solve_scan_all(v, some);
    }
    return added;
}

SOLVE_BIG int64_t solve_polish(Solve *v, Effort f, int sharp) {
    SOLVE_BARRIER();
    SOLVE_ONE v->coarse = 10;
    SOLVE_BARRIER();
    for (int i = 1; i <= f.sharper; i++) {
        solve_refresh(v, sharp << i);
        solve_level(v, f.tries > 1 ? 3 : 2, -1);
    }
    return solve_keep(v);
}

HOSTDEV int solve_transfers(const Solve *v, int64_t budget_ps, int64_t copy_ps) {
    int64_t each = copy_ps * (1000 - v->cost->overlap_permille) / 1000, most = (int64_t)v->R * v->S;
    return (int)(each == 0 || budget_ps / each > most ? most : budget_ps / each);
}
HOSTDEV void solve_budget(Solve *v, int64_t budget_ps) {
    int intra = solve_transfers(v, budget_ps, v->cost->copy_intra_ps), inter = solve_transfers(v, budget_ps, v->cost->copy_inter_ps);
    SOLVE_BARRIER();
    SOLVE_ONE v->max_intra = intra, v->max_inter = inter;
    SOLVE_BARRIER();
}

// A plan within a budget, from the start (topoep/search.c). Returns its J
HOSTDEV int64_t solve_try(Solve *v, Effort f, int64_t budget_ps, int sharp) {
    solve_budget(v, budget_ps);
    solve_identity(v);
    solve_refresh(v, sharp);
    solve_grow(v, f);
    solve_level(v, 6, -1);
    int64_t cost = cost_total(v->cost, solve_peaks(v)), best = v->best_ps;
    SOLVE_BARRIER();
    return cost - best > best / 16 ? cost : solve_polish(v, f, sharp); // sharper maxima do not gain that much
}

// Budgets from the least to the largest that can pay, each plan grown from the one before. Returns the best budget, -1 = none
SOLVE_BIG int64_t solve_climb(Solve *v, Effort f, int64_t least, int64_t unit) {
    int64_t best = -1, b = least, base = v->cost->pair_compute_ps * v->mean + v->cost->plan_fixed_ps;
    while (b > 0 && b < (v->best_ps - base) >> 6) b *= 2; // a budget so small leaves most of the gain
    int sharp = f.sharp; // the plan is the identity's
    SOLVE_BARRIER();
    SOLVE_ONE v->coarse = f.tries > 1 ? 10 : 6;
    int full = 0; // rounds with as many transfers as there can be: exchanges can drop what a round adds
    for (int64_t start = b; base + b < v->best_ps && full < SOLVE_FULL;) {
        solve_budget(v, b);
        solve_refresh(v, sharp);
        int added = solve_grow(v, f), all = v->max_intra >= v->R * v->S && v->max_inter >= v->R * v->S;
        solve_level(v, f.tries > 1 ? 2 : 1, -1);
        int64_t before = v->best_ps;
        SOLVE_BARRIER();
        int64_t cost = solve_keep(v);
        if (cost < before) best = b;
        full += all;
        if (all ? added == 0 || f.tries > 1 : b > 4 * start && cost - v->best_ps > v->best_ps / 16) break;
        int again = f.tries == 1 && added > 0 && cost < before - before / 8; // much is to be had within this budget still
        if (!all && !again) b = b ? 2 * b : unit;
        sharp = flow_min(sharp + sharp / 4, 40);
    }
    return best;
}

// ---- exactly even -----------------------------------------------------------------------------------------------------------
// Ranks that pairs of rank s can reach by way of experts held in common, breadth-first, up to the first one below M: queue
// (in room), the rank and expert by which each was reached (in p_keep, p_take). Returns that rank, -1 if there is none; how
// many were reached. On one thread; prices are lost.
HOSTDEV int solve_reach(Solve *v, int s, int64_t M, int *reached) {
    int n = 1;
    for (int r = 0; r < v->R; r++) v->p_keep[r] = -1;
    v->room[0] = s, v->p_keep[s] = s;
    for (int i = 0; i < n; i++) {
        int r = v->room[i];
        for (int k = 0; k < v->H + v->held[r]; k++) {
            int e = k < v->H ? r * v->H + k : v->slot[r * v->S + k - v->H];
            if (v->q[e * v->R + r] == 0) continue;
            for (int c = -1, more = 1; more; c = c < 0 ? v->head[e] : v->next[c], more = c >= 0) {
                int to = c < 0 ? solve_home(v, e) : v->owner[c];
                if (v->p_keep[to] >= 0 || (v->without & PLAN_NO_STAGE2 && v->node[to] == v->node[r])) continue;
                v->p_keep[to] = r, v->p_take[to] = e, v->room[n++] = to;
                *reached = n;
                if (v->load[to] < M) return to;
            }
        }
    }
    *reached = n;
    return -1;
}

// The least maximum of load that these copies allow: augmenting paths as in a maximum flow. Where none leads on from a rank above
// M, no rank that it reaches can get below their mean, so M rises to that.
SOLVE_BIG void solve_even(Solve *v) {
    SOLVE_BARRIER();
    SOLVE_ONE {
        int64_t M = v->mean;
        for (int s = 0; s < v->R && v->block == 1; s++)
            while (v->load[s] > M) {
                int n = 0, end = solve_reach(v, s, M, &n);
                if (end < 0) {
                    int64_t sum = 0;
                    for (int i = 0; i < n; i++) sum += v->load[v->room[i]];
                    M = (sum + n - 1) / n;
                    continue;
                }
                int d = flow_min(v->load[s] - (int)M, (int)M - v->load[end]);
                for (int r = end; r != s; r = v->p_keep[r]) d = flow_min(d, v->q[v->p_take[r] * v->R + v->p_keep[r]]);
                for (int r = end; r != s; r = v->p_keep[r]) solve_move(v, v->p_take[r], v->p_keep[r], r, d);
            }
    }
    SOLVE_BARRIER();
}

// ---- rounds of repair -----------------------------------------------------------------------------------------------------
// 0..n-1 from a state that every thread has for itself (splitmix64: Steele, Lea, Flood, OOPSLA 2014)
HOSTDEV int solve_draw(uint64_t *state, int n) {
    uint64_t z = *state += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull, z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return (int)(((z ^ z >> 31) >> 32) * (uint64_t)n >> 32);
}

HOSTDEV void solve_home_all(Solve *v, int e, int r) { // the copy of e on r goes
    solve_apply(v, e, r, solve_home(v, e), v->q[e * v->R + r]);
}

// Takes a few copies away, drawn: from some ranks (half of the times dear ones), all of a rank, or all of one expert. The first
// of them may not come back to its place in this round.
HOSTDEV void solve_break(Solve *v, uint64_t *seed) {
    int kind = solve_draw(seed, 8), many = 1 + solve_draw(seed, 4);
    for (int k = 0; k < many; k++) {
        int r = solve_draw(seed, v->R), other = solve_draw(seed, v->R), third = solve_draw(seed, v->R);
        if (kind < 4 && v->p_take[other] > v->p_take[r]) r = other;
        if (kind < 4 && v->p_take[third] > v->p_take[r]) r = third;
        if (v->held[r] == 0) continue;
        int e = v->slot[r * v->S + solve_draw(seed, v->held[r])];
        SOLVE_BARRIER();
        if (k == 0) SOLVE_ONE v->ban_e = e, v->ban_r = r;
        solve_home_all(v, e, r);
        while (kind == 0 && v->held[r] > 0) solve_home_all(v, v->slot[r * v->S + v->held[r] - 1], r);
        while (kind == 1 && v->head[e] >= 0) solve_home_all(v, e, v->owner[v->head[e]]);
        if (kind == 1) return;
    }
}

// From the plan as it is, of cost now_ps: takes copies away, adds the best by blurred scores, exchanges pairs at rising sharpness.
// Stays there if that costs at most `rise` more, else goes back. Returns the J of where it stays.
SOLVE_BIG int64_t solve_round(Solve *v, uint64_t *seed, int64_t now_ps, int64_t rise) {
    const int sharps[] = {16, 24, 40, 64};
    Peaks p = solve_peaks(v);
    int sharp = sharps[solve_draw(seed, 4)], blur = solve_draw(seed, 3), spare = solve_draw(seed, 4), tight = solve_draw(seed, 16) == 0;
    SOLVE_BARRIER();
    SOLVE_ONE {
        v->max_intra = flow_max(0, (int)p.copy_intra + (spare & 1) - tight), v->max_inter = flow_max(0, (int)p.copy_inter + (spare >> 1) - tight);
        v->coarse = 8;
    }
    solve_copy(v->save_q, v->q, v->E * v->R);
    SOLVE_BARRIER();
    solve_refresh(v, sharp);
    solve_break(v, seed);
    for (int more = 1, n = 0; more && n < 8; n++) {
        int fresh = n % 2 == 0;
        uint64_t key_seed = *seed;
        if (fresh) solve_scan_all(v, n > 0);
        if (fresh && blur) {
            SOLVE_FOR(e, v->E) { // up to half, or all, of a score is taken off
                uint64_t state = key_seed + (uint64_t)e * 77;
                int64_t score = v->key[e] >> 10;
                v->key[e] = ((score - (score * solve_draw(&state, 1024) >> (12 - blur))) << 10) | (v->key[e] & 1023);
            }
        }
        SOLVE_BARRIER();
        more = solve_add(v, blur ? 1 + solve_draw(seed, 4) : 4, fresh) || !fresh;
        SOLVE_BARRIER();
        SOLVE_ONE v->ban_e = v->ban_r = -1;
        SOLVE_BARRIER();
        if (more) solve_level(v, 1, -1);
    }
    solve_level(v, 1, -1);
    SOLVE_BARRIER();
    SOLVE_ONE v->coarse = 10;
    SOLVE_BARRIER();
    int64_t cost = cost_total(v->cost, solve_peaks(v)), last = INT64_MAX / 2;
    for (int i = 0; i < 3 && cost - now_ps < now_ps / 32 + rise; i++) {
        solve_refresh(v, sharp *= 4);
        solve_level(v, 1, -1);
    }
    if (v->target == TARGET_BALANCE) solve_even(v);
    cost = solve_keep(v);
    if (solve_peaks(v).load > v->cap) cost = last;
    if (cost - now_ps <= rise) return cost;
    solve_become(v, v->save_q);
    return now_ps;
}

// Rounds from the best plan, accepting ever smaller rises: from 2^-7 of J to 2^-17
HOSTDEV void solve_rounds(Solve *v, uint64_t *seed, int rounds) {
    solve_become(v, v->best_q);
    if (solve_peaks(v).copies == 0) return;
    int64_t now = v->best_ps;
    for (int k = 0; k < rounds; k++) now = solve_round(v, seed, now, now >> (7 + k * 10 / rounds));
}

// Parameters of pass k, 0..SOLVE_PASSES-1
HOSTDEV Effort solve_pass(const Solve *v, PlanEffort effort, int k) {
    const int tries[] = {1, 3, 3, 6, 6, 8, 8}, sharps[] = {14, 10, 20, 40, 14, 24, 8}, levels[] = {5, 16, 16, 32, 32, 64, 64};
    int slots = v->R * v->S, sharper = effort == EFFORT_LOW ? 2 : effort == EFFORT_HIGH ? 6 : 3;
    Effort f = {tries[k], flow_max(1, slots / (k ? 8 : 4)), flow_max(1, slots / levels[k]), sharps[k], sharper};
    return f;
}

// Climbs, from the identity plan; the best plan is polished. Returns 0 if no plan with copies can be better than that one.
SOLVE_BIG int solve_climbs(Solve *v, PlanEffort effort) {
    const Cost *c = v->cost;
    solve_none(v);
    int64_t least = c->copy_intra_ps * (1000 - c->overlap_permille) / 1000; // what copies cost at least
    int64_t unit = least > 0 ? least : cost_max(1, c->copy_inter_ps * (1000 - c->overlap_permille) / 1000);
    if (v->S == 0 || v->R == 1 || c->pair_compute_ps * v->mean + c->plan_fixed_ps + least >= v->best_ps) return 0;
    int passes = effort == EFFORT_LOW || v->without & PLAN_NO_PORTFOLIO ? 1 : effort == EFFORT_HIGH ? SOLVE_PASSES : 3;
    for (int k = 0; k < passes; k++) {
        Effort f = solve_pass(v, effort, k);
        int64_t before = v->best_ps;
        SOLVE_BARRIER();
        if (k > 0) solve_identity(v);
        int64_t best = solve_climb(v, f, least, unit);
        if (v->best_ps == before) continue;
        solve_budget(v, best);
        solve_become(v, v->best_q);
        solve_refresh(v, 40);
        solve_polish(v, f, 40);
    }
    return 1;
}
#endif
