// Prices of a plan in the making: what a pair more costs on each rank and node, and how far a move pays.
#ifndef MOE_PRICE_H
#define MOE_PRICE_H
#include "topoep/state.h"

enum {
    SOLVE_PRICE = 20,        // fraction bits of f_*
    SOLVE_ONE_MAX = 1 << 16, // weight of a value at the maximum: what a sum of weights comes to at least
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

// A price from a factor f_*, below 2^29, and a weight, below 2^31
HOSTDEV int solve_share(int64_t f, int w) { return (int)((uint64_t)(uint32_t)f * (uint32_t)w >> SOLVE_PRICE); }

// Prices, and room, from the weights
SOLVE_LEAF void solve_price(Solve *v) {
    int64_t load = cost_max(v->phi_load, SOLVE_ONE_MAX), tok = cost_max(v->phi_tok, SOLVE_ONE_MAX);
    int64_t f_load = (v->u_load << SOLVE_PRICE) / load, f_rank = (v->u_rank >> v->quiet << SOLVE_PRICE) / tok;
    int64_t f_node = (v->u_node >> v->quiet << SOLVE_PRICE) / tok;
    SOLVE_ONE v->f_load = f_load, v->f_rank = f_rank, v->f_node = f_node;
    int mean = (int)v->mean, most = flow_min(v->S, v->max_intra), cap = v->cap;
    SOLVE_FOR(r, v->R) {
        int compute = solve_share(f_load, v->w_load[r]);
        v->p_take[r] = compute + solve_share(f_rank, v->w_in[r]);
        v->p_keep[r] = compute - solve_share(f_rank, v->w_out[r]);
        v->room[r] = flow_max(0, mean - v->load[r]) | -((v->held[r] >= most) | (v->load[r] >= cap)); // no branch: many at a time
    }
    SOLVE_FOR(n, v->N) {
        v->pn_in[n] = solve_share(f_node, v->wn_in[n]);
        v->pn_out[n] = solve_share(f_node, v->wn_out[n]);
    }
    SOLVE_BARRIER();
    SOLVE_FOR(n, v->N) {
        int least = 1 << 30, widest = -1;
        for (int r = n * v->G; r < (n + 1) * v->G; r++) {
            widest = flow_max(widest, v->room[r]);
            least = flow_min(least, v->room[r] < 0 ? 1 << 30 : v->p_keep[r]);
        }
        v->pn_least[n] = least, v->n_room[n] = widest;
    }
    SOLVE_BARRIER();
}

// Weights and prices afresh, by the scales there are
SOLVE_BIG void solve_reweigh(Solve *v) {
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
    SOLVE_ONE v->phi_load = phi.load, v->phi_tok = phi.tok;
    SOLVE_BARRIER();
    solve_price(v);
}

// Scales afresh, for the maxima there are now, then weights and prices
SOLVE_BIG void solve_refresh(Solve *v, int sharp) {
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
    solve_reweigh(v);
    SOLVE_ONE {
        v->c_load = (load >> v->shift << 8) / cost_max(v->phi_load, SOLVE_ONE_MAX);
        v->c_tok = (tok >> v->shift << 8) / cost_max(v->phi_tok, SOLVE_ONE_MAX) >> v->quiet;
    }
    SOLVE_BARRIER();
}

// The softened J, to compare plans under the same scales; linear in the sums of weights, so what falls by it falls indeed
HOSTDEV int64_t solve_soft(const Solve *v) {
    Peaks p = solve_peaks(v);
    int64_t copies = (cost_weights(v->cost, p) + cost_fixed(v->cost, p)) >> v->shift, most = (int64_t)1 << 40;
    return v->c_load * v->phi_load + v->c_tok * v->phi_tok + ((copies < most ? copies : most) << 8);
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
// Change of the softened J when d pairs of e move from h to r; convex in d
SOLVE_BIG int64_t solve_delta(const Solve *v, int e, int h, int r, int d) {
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

// How many pairs of e to move from h to r: as long as the next one gains, to within 2^-coarse of the mean load, in whole blocks
SOLVE_BIG int solve_line(const Solve *v, int e, int h, int r) {
    Side a = solve_side(v, e, h), b = solve_side(v, e, r);
    int nh = v->node[h], nr = v->node[r], far = nh != nr, lo = 0, hi = flow_min(a.q, v->cap - b.load) / v->block, fine = (int)(v->mean >> v->coarse) / v->block;
    Side na = solve_node_side(v, e, nh), nb = solve_node_side(v, e, nr);
    if (hi <= 0 || solve_slope(v, a, b, na, nb, far, 0) <= 0) return 0;
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

#endif
