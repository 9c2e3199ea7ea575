// The TopoEP solver: from the demand matrix to a plan. One source for every backend, in the common subset of C and CUDA.
#ifndef MOE_SOLVE_H
#define MOE_SOLVE_H
#include "topoep/cost.h"
#include "topoep/flow.h"

typedef struct Solve {
    int N, G, R, E, S, H, block;
    int64_t total, mean; // pairs; ceil(total / R)
    const int *D;
    const Cost *cost;
    int *dt, *q;                          // (E,R) demand, quota
    int *nd, *x, *entry, *count;          // (E,N)
    int *slot;                            // (R,S)
    int *held, *fan, *load, *self, *rows; // (R)
    int *wout, *win, *nload, *nlocal, *nrows; // (N)
    int *p_load, *p_in, *p_out;           // (R)
    int *pn_in, *pn_out;                  // (N)
    int *from;                            // (E)
    int64_t *key;                         // (E)
    int *mark;                            // (E)
    int *best_q, *best_slot;
    int64_t best_ps;
    // limits of the copies looked for now
    int64_t max_intra, max_inter;
    // softened maxima
    int sharp, shift;
    int64_t inv_load, inv_tok, phi_load, phi_tok, c_load, c_tok;
    int unit_up, unit_down, amt_shift;
    int64_t u_load, u_inter, u_intra;
} Solve;

enum { SOLVE_ONE = 1 << 16 };

// ---- soft maximum ----
HOSTDEV int64_t solve_weight(int64_t v, int64_t inv, int shift, int sharp) {
    int64_t y = (((v >> shift) * inv) >> 32) - ((int64_t)sharp << 8);
    if (y < -(16 << 8)) return 0;
    if (y > (12 << 8)) return ((int64_t)SOLVE_ONE << 12) + ((y - (12 << 8)) << 20);
    int64_t m = (256 + (y & 255)) << 8; // 2^16 .. 2^17
    int s = (int)(y >> 8);
    return s >= 0 ? m << s : m >> -s;
}
HOSTDEV int64_t solve_w_load(const Solve *v, int64_t load) { return solve_weight(load * v->cost->pair_compute_ps, v->inv_load, v->shift, v->sharp); }
HOSTDEV int64_t solve_w_rank(const Solve *v, int64_t n) { return solve_weight(n * v->cost->pair_intra_ps, v->inv_tok, v->shift, v->sharp); }
HOSTDEV int64_t solve_w_node(const Solve *v, int64_t n) { return solve_weight(n * v->cost->pair_inter_ps, v->inv_tok, v->shift, v->sharp); }

HOSTDEV Peaks solve_peaks(const Solve *v) {
    Peaks p = {0, 0, 0, 0, 0, 0};
    for (int r = 0; r < v->R; r++) {
        p.load = cost_max(p.load, v->load[r]);
        p.intra = cost_max(p.intra, cost_max(v->load[r] - v->self[r], v->rows[r] - v->self[r]));
        p.copy_intra = cost_max(p.copy_intra, cost_max(v->held[r], v->fan[r]));
        p.copies += v->held[r];
    }
    for (int n = 0; n < v->N; n++) {
        p.inter = cost_max(p.inter, cost_max(v->nload[n] - v->nlocal[n], v->nrows[n] - v->nlocal[n]));
        p.copy_inter = cost_max(p.copy_inter, cost_max(v->wout[n], v->win[n]));
    }
    return p;
}

HOSTDEV void solve_prices(Solve *v) {
    const Cost *c = v->cost;
    Peaks p = solve_peaks(v);
    int64_t ml = cost_max(1, cost_compute(c, p)), mt = cost_max(1, cost_tokens(c, p));
    int64_t m = cost_max(ml, mt);
    v->shift = 0;
    while ((m >> v->shift) >= (1LL << 31)) v->shift++;
    v->inv_load = (((int64_t)v->sharp << 8) << 32) / cost_max(1, ml >> v->shift);
    v->inv_tok = (((int64_t)v->sharp << 8) << 32) / cost_max(1, mt >> v->shift);
    int64_t pl = 0, pt = 0;
    for (int r = 0; r < v->R; r++) {
        int64_t a = solve_w_load(v, v->load[r]), b = solve_w_rank(v, v->load[r] - v->self[r]), d = solve_w_rank(v, v->rows[r] - v->self[r]);
        v->p_load[r] = (int)a, v->p_in[r] = (int)b, v->p_out[r] = (int)d;
        pl += a, pt += b + d;
    }
    for (int n = 0; n < v->N; n++) {
        int64_t b = solve_w_node(v, v->nload[n] - v->nlocal[n]), d = solve_w_node(v, v->nrows[n] - v->nlocal[n]);
        v->pn_in[n] = (int)b, v->pn_out[n] = (int)d;
        pt += b + d;
    }
    v->phi_load = cost_max(pl, 1), v->phi_tok = cost_max(pt, 1);
    v->c_load = ((ml >> v->shift) << 8) / v->phi_load;
    v->c_tok = ((mt >> v->shift) << 8) / v->phi_tok;
    int64_t fl = (v->u_load << 20) / v->phi_load, fr = (v->u_intra << 20) / v->phi_tok, fn = (v->u_inter << 20) / v->phi_tok;
    for (int r = 0; r < v->R; r++) {
        v->p_load[r] = (int)((fl * v->p_load[r]) >> 20);
        v->p_in[r] = (int)((fr * v->p_in[r]) >> 20);
        v->p_out[r] = (int)((fr * v->p_out[r]) >> 20);
    }
    for (int n = 0; n < v->N; n++) {
        v->pn_in[n] = (int)((fn * v->pn_in[n]) >> 20);
        v->pn_out[n] = (int)((fn * v->pn_out[n]) >> 20);
    }
}

// softened J after moving d pairs of e from h to r, less that before (lower is better)
HOSTDEV int64_t solve_delta(const Solve *v, int e, int h, int r, int d) {
    const int *q = v->q + e * v->R, *dt = v->dt + e * v->R;
    int nh = h / v->G, nr = r / v->G;
    int sh = v->self[h] + flow_min(dt[h], q[h] - d) - flow_min(dt[h], q[h]);
    int sr = v->self[r] + flow_min(dt[r], q[r] + d) - flow_min(dt[r], q[r]);
    int lh = v->load[h] - d, lr = v->load[r] + d;
    int64_t load = solve_w_load(v, lh) - solve_w_load(v, v->load[h]) + solve_w_load(v, lr) - solve_w_load(v, v->load[r]);
    int64_t tok = solve_w_rank(v, lh - sh) + solve_w_rank(v, v->rows[h] - sh) + solve_w_rank(v, lr - sr) + solve_w_rank(v, v->rows[r] - sr)
                - solve_w_rank(v, v->load[h] - v->self[h]) - solve_w_rank(v, v->rows[h] - v->self[h])
                - solve_w_rank(v, v->load[r] - v->self[r]) - solve_w_rank(v, v->rows[r] - v->self[r]);
    if (nh != nr) {
        const int *x = v->x + e * v->N, *nd = v->nd + e * v->N;
        int ch = v->nlocal[nh] + flow_min(nd[nh], x[nh] - d) - flow_min(nd[nh], x[nh]);
        int cr = v->nlocal[nr] + flow_min(nd[nr], x[nr] + d) - flow_min(nd[nr], x[nr]);
        int mh = v->nload[nh] - d, mr = v->nload[nr] + d;
        tok += solve_w_node(v, mh - ch) + solve_w_node(v, v->nrows[nh] - ch) + solve_w_node(v, mr - cr) + solve_w_node(v, v->nrows[nr] - cr)
             - solve_w_node(v, v->nload[nh] - v->nlocal[nh]) - solve_w_node(v, v->nrows[nh] - v->nlocal[nh])
             - solve_w_node(v, v->nload[nr] - v->nlocal[nr]) - solve_w_node(v, v->nrows[nr] - v->nlocal[nr]);
    }
    return load * v->c_load + tok * v->c_tok;
}

// The best d in 1..q[h]; delta convex in d. Returns d (0: none is below zero), *gain = -delta
HOSTDEV int solve_line(const Solve *v, int e, int h, int r, int64_t *gain) {
    int hi = v->q[e * v->R + h] / v->block, lo = 0; // in blocks
    *gain = 0;
    if (hi == 0) return 0;
    // ternary on a convex function, with ever smaller brackets
    while (hi - lo > 2) {
        int third = (hi - lo) / 3, a = lo + third, b = hi - third;
        if (solve_delta(v, e, h, r, a * v->block) <= solve_delta(v, e, h, r, b * v->block)) hi = b;
        else lo = a;
        if (hi - lo < v->mean / 1024) break;
    }
    int best = 0;
    for (int d = lo; d <= hi; d += flow_max(1, (hi - lo) / 2)) {
        if (d == 0) continue;
        int64_t g = -solve_delta(v, e, h, r, d * v->block);
        if (g > *gain) *gain = g, best = d * v->block;
    }
    return best;
}

HOSTDEV int solve_home(const Solve *v, int e) { return e / v->H; }

HOSTDEV int solve_can_add(const Solve *v, int e, int r) {
    int n = r / v->G, home = solve_home(v, e), hn = home / v->G;
    if (r == home || v->q[e * v->R + r] > 0 || v->held[r] >= v->S || v->held[r] >= v->max_intra) return 0;
    if (n == hn) return v->fan[home] < v->max_intra;
    int entry = v->entry[e * v->N + n], cnt = v->count[e * v->N + n];
    if (cnt == 0) return v->wout[hn] < v->max_inter && v->win[n] < v->max_inter;
    if (r > entry) return v->fan[entry] < v->max_intra;
    return v->fan[r] + cnt <= v->max_intra;
}

HOSTDEV void solve_hold(Solve *v, int e, int r) { // a copy of e on r
    int n = r / v->G, home = solve_home(v, e), hn = home / v->G, at = e * v->N + n;
    v->slot[r * v->S + v->held[r]++] = e;
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

HOSTDEV void solve_drop(Solve *v, int e, int r) { // the copy of e on r, which computes nothing any more
    int n = r / v->G, home = solve_home(v, e), hn = home / v->G, at = e * v->N + n, last = --v->held[r];
    for (int i = 0; i < last; i++)
        if (v->slot[r * v->S + i] == e) v->slot[r * v->S + i] = v->slot[r * v->S + last];
    v->slot[r * v->S + last] = -1;
    if (n == hn) {
        v->fan[home]--;
        return;
    }
    v->count[at]--;
    if (v->count[at] == 0) {
        v->wout[hn]--, v->win[n]--;
        v->entry[at] = -1;
    } else if (r == v->entry[at]) {
        int next = r + 1;
        while (v->q[e * v->R + next] == 0) next++;
        v->fan[r] -= v->count[at];
        v->fan[next] += v->count[at] - 1;
        v->entry[at] = next;
    } else {
        v->fan[v->entry[at]]--;
    }
}

HOSTDEV void solve_move(Solve *v, int e, int h, int r, int d) {
    int *q = v->q + e * v->R, *dt = v->dt + e * v->R, *x = v->x + e * v->N, *nd = v->nd + e * v->N;
    int nh = h / v->G, nr = r / v->G;
    if (q[r] == 0 && r != solve_home(v, e)) solve_hold(v, e, r);
    v->self[h] += flow_min(dt[h], q[h] - d) - flow_min(dt[h], q[h]);
    v->self[r] += flow_min(dt[r], q[r] + d) - flow_min(dt[r], q[r]);
    q[h] -= d, q[r] += d, v->load[h] -= d, v->load[r] += d;
    if (nh != nr) {
        v->nlocal[nh] += flow_min(nd[nh], x[nh] - d) - flow_min(nd[nh], x[nh]);
        v->nlocal[nr] += flow_min(nd[nr], x[nr] + d) - flow_min(nd[nr], x[nr]);
        x[nh] -= d, x[nr] += d, v->nload[nh] -= d, v->nload[nr] += d;
    }
    if (q[h] == 0 && h != solve_home(v, e)) solve_drop(v, e, h);
}

// price saved by taking a pair of e from h / paid by giving one to r, of the rank alone
HOSTDEV int solve_lift_rank(const Solve *v, int e, int h) {
    int i = e * v->R + h;
    return v->p_load[h] + (v->q[i] > v->dt[i] ? v->p_in[h] : -v->p_out[h]);
}
HOSTDEV int solve_lay_rank(const Solve *v, int e, int r) {
    int i = e * v->R + r;
    return v->p_load[r] + (v->q[i] < v->dt[i] ? -v->p_out[r] : v->p_in[r]);
}
HOSTDEV int solve_lift_node(const Solve *v, int e, int n) {
    int i = e * v->N + n;
    return v->x[i] > v->nd[i] ? v->pn_in[n] : -v->pn_out[n];
}
HOSTDEV int solve_lay_node(const Solve *v, int e, int n) {
    int i = e * v->N + n;
    return v->x[i] < v->nd[i] ? -v->pn_out[n] : v->pn_in[n];
}

HOSTDEV int64_t solve_cost(const Solve *v) { return cost_total(v->cost, solve_peaks(v)); }

HOSTDEV void solve_keep(Solve *v) {
    int64_t j = solve_cost(v);
    if (j >= v->best_ps) return;
    v->best_ps = j;
    for (int i = 0; i < v->E * v->R; i++) v->best_q[i] = v->q[i];
    for (int i = 0; i < v->R * v->S; i++) v->best_slot[i] = v->slot[i];
}

HOSTDEV void solve_identity(Solve *v) {
    for (int i = 0; i < v->E * v->R; i++) v->q[i] = 0;
    for (int i = 0; i < v->E * v->N; i++) v->x[i] = 0, v->entry[i] = -1, v->count[i] = 0;
    for (int r = 0; r < v->R; r++) {
        v->held[r] = v->fan[r] = v->load[r] = v->self[r] = 0;
        for (int i = 0; i < v->S; i++) v->slot[r * v->S + i] = -1;
    }
    for (int n = 0; n < v->N; n++) v->wout[n] = v->win[n] = v->nload[n] = v->nlocal[n] = 0;
    for (int e = 0; e < v->E; e++) {
        int home = solve_home(v, e), n = home / v->G, all = 0;
        for (int r = 0; r < v->R; r++) all += v->dt[e * v->R + r];
        v->q[e * v->R + home] = all;
        v->x[e * v->N + n] = all;
        v->load[home] += all, v->nload[n] += all;
        v->self[home] += v->dt[e * v->R + home], v->nlocal[n] += v->nd[e * v->N + n];
    }
}

// Between the holders there are: for each expert with copies the best exchange of one pair, taken as far as it pays.
HOSTDEV int solve_level(Solve *v, int sweeps) {
    int moves = 0;
    for (int k = 0; k < sweeps; k++) {
        int64_t got = 0;
        for (int e = 0; e < v->E; e++) {
            const int *q = v->q + e * v->R;
            int home = solve_home(v, e);
            int bh = -1, br = -1;
            int64_t best = 0;
            int holders[64], n = 0;
            for (int r = 0; r < v->R && n < 64; r++)
                if (q[r] > 0 || r == home) holders[n++] = r;
            if (n < 2) continue;
            for (int i = 0; i < n; i++) {
                int h = holders[i];
                if (q[h] == 0) continue;
                int64_t up = solve_lift_rank(v, e, h), upn = solve_lift_node(v, e, h / v->G);
                for (int j = 0; j < n; j++) {
                    int r = holders[j];
                    if (j == i) continue;
                    int64_t g = up - solve_lay_rank(v, e, r) + (r / v->G != h / v->G ? upn - solve_lay_node(v, e, r / v->G) : 0);
                    if (g > best) best = g, bh = h, br = r;
                }
            }
            if (bh < 0) continue;
            int64_t gain;
            int d = solve_line(v, e, bh, br, &gain);
            if (d == 0) continue;
            solve_move(v, e, bh, br, d);
            solve_prices(v);
            moves++;
            got += gain;
        }
        if (got < ((int64_t)1 << 12)) break;
    }
    return moves;
}

// One more copy, the best by the prices; 0 if none pays
HOSTDEV int solve_add(Solve *v, int tries) {
    for (int e = 0; e < v->E; e++) {
        const int *q = v->q + e * v->R;
        int home = solve_home(v, e), h = home, top = -(1 << 30);
        for (int r = 0; r < v->R; r++)
            if (q[r] > 0) {
                int g = solve_lift_rank(v, e, r) + solve_lift_node(v, e, r / v->G);
                if (g > top) top = g, h = r;
            }
        v->from[e] = h;
        int64_t best = 0;
        int at = -1;
        int up = solve_lift_rank(v, e, h), upn = solve_lift_node(v, e, h / v->G);
        if (q[h] > 0)
            for (int r = 0; r < v->R; r++) {
                if (!solve_can_add(v, e, r)) continue;
                int n = r / v->G, far = n != h / v->G;
                int64_t g = up - solve_lay_rank(v, e, r) + (far ? upn - solve_lay_node(v, e, n) : 0);
                if (g <= 0) continue;
                int room = (int)cost_max(0, v->mean - v->load[r]);
                int amt = far ? flow_max(v->nd[e * v->N + n] - v->x[e * v->N + n], room) : flow_max(v->dt[e * v->R + r], flow_max(room, (v->load[h] - v->load[r]) / 2));
                amt = flow_min(q[h], amt);
                int64_t s = (g >> 7) * (amt >> v->amt_shift);
                if (s > best) best = s, at = r;
            }
        v->key[e] = at < 0 ? 0 : (best << 10) | (v->E - 1 - e);
        v->mark[e] = at;
    }
    int be = -1, bd = 0;
    int64_t bg = 0;
    for (int t = 0; t < tries; t++) {
        int64_t top = 0;
        for (int e = 0; e < v->E; e++) top = cost_max(top, v->key[e]);
        if (top == 0) break;
        int e = v->E - 1 - (int)(top & 1023);
        v->key[e] = 0;
        int64_t gain;
        int d = solve_line(v, e, v->from[e], v->mark[e], &gain);
        if (gain > bg) bg = gain, be = e, bd = d;
    }
    if (be < 0) return 0;
    solve_move(v, be, v->from[be], v->mark[be], bd);
    solve_prices(v);
    return 1;
}

HOSTDEV void solve_none(Solve *v) {
    solve_identity(v);
    v->best_ps = INT64_MAX;
    solve_keep(v);
}

HOSTDEV void solve_topoep(Solve *v) {
    const Cost *c = v->cost;
    solve_identity(v);
    v->best_ps = INT64_MAX;
    solve_keep(v);
    int64_t inter = c->copy_inter_ps * (1000 - c->overlap_permille) / 1000, intra = c->copy_intra_ps * (1000 - c->overlap_permille) / 1000;
    int64_t floor_ps = c->pair_compute_ps * v->mean + c->plan_fixed_ps;
    int64_t budget = 0;
    v->sharp = 24;
    solve_prices(v);
    for (int step = 0; step < 64; step++) {
        // the next budget: one more transfer of the cheaper kind
        int64_t a = intra ? (budget / intra + 1) * intra : INT64_MAX, b = inter && v->N > 1 ? (budget / inter + 1) * inter : INT64_MAX;
        budget = a < b ? a : b;
        if (budget == INT64_MAX) budget = step ? INT64_MAX : 0;
        if (budget == INT64_MAX || floor_ps + budget >= v->best_ps) break;
        v->max_intra = intra ? budget / intra : INT64_MAX;
        v->max_inter = inter ? budget / inter : INT64_MAX;
        int added = 0;
        while (solve_add(v, 8)) {
            added++;
            solve_level(v, 1);
        }
        if (!added) continue;
        solve_level(v, 10);
        solve_keep(v);
    }
}

// ---- workspace and result ----
#define SOLVE_ARRAYS(R, E, N, S, X)                                                                                            \
    X(dt, (E) * (R)) X(q, (E) * (R)) X(best_q, (E) * (R)) X(nd, (E) * (N)) X(x, (E) * (N)) X(entry, (E) * (N))                  \
    X(count, (E) * (N)) X(slot, (R) * (S)) X(best_slot, (R) * (S)) X(held, R) X(fan, R) X(load, R) X(self, R) X(rows, R)        \
    X(wout, N) X(win, N) X(nload, N) X(nlocal, N) X(nrows, N) X(p_load, R) X(p_in, R) X(p_out, R) X(pn_in, N) X(pn_out, N)      \
    X(from, E) X(mark, E)

HOSTDEV size_t solve_work_bytes(int R, int E, int N, int S) {
    size_t n = 0;
#define X(name, count) n += (size_t)(count);
    SOLVE_ARRAYS(R, E, N, S, X)
#undef X
    return n * sizeof(int) + (size_t)E * sizeof(int64_t);
}

HOSTDEV void solve_bind(Solve *v, void *work, const int *D, int R, int E, const Cost *cost, int block) {
    v->N = cost->N, v->G = cost->G, v->R = R, v->E = E, v->S = cost->S, v->H = E / R, v->block = block;
    v->D = D, v->cost = cost;
    v->key = (int64_t *)work;
    int *at = (int *)(v->key + E);
#define X(name, count) v->name = at, at += (size_t)(count);
    SOLVE_ARRAYS(R, E, v->N, v->S, X)
#undef X
    for (int i = 0; i < E * v->N; i++) v->nd[i] = 0;
    for (int n = 0; n < v->N; n++) v->nrows[n] = 0;
    v->total = 0;
    for (int s = 0; s < R; s++) {
        v->rows[s] = 0;
        for (int e = 0; e < E; e++) {
            int d = D[s * E + e];
            v->dt[e * R + s] = d;
            v->nd[e * v->N + s / v->G] += d;
            v->rows[s] += d;
        }
        v->nrows[s / v->G] += v->rows[s];
        v->total += v->rows[s];
    }
    v->mean = (v->total + R - 1) / R;
    v->amt_shift = 0;
    while ((v->mean >> v->amt_shift) >= (1 << 22)) v->amt_shift++;
    int64_t u = cost_max(cost->pair_compute_ps, cost_max(cost->pair_inter_ps, cost->pair_intra_ps));
    int up = 0, down = 0;
    while (u > 0 && (u << up) < (1 << 24)) up++;
    while ((u >> down) > (1 << 25)) down++;
    v->u_load = (cost->pair_compute_ps << up) >> down;
    v->u_inter = (cost->pair_inter_ps << up) >> down;
    v->u_intra = (cost->pair_intra_ps << up) >> down;
}

HOSTDEV uint64_t solve_hash(uint64_t h, int x) {
    for (int i = 0; i < 4; i++) h = (h ^ (((unsigned)x >> (8 * i)) & 255)) * 0x100000001B3ull;
    return h;
}

// The best plan found, and what it costs
HOSTDEV void solve_result(Solve *v, int *quota, int *slot, PlanInfo *info) {
    solve_identity(v);
    Peaks p = solve_peaks(v);
    info->identity_ps = cost_total(v->cost, p);
    info->max_load_before = p.load;
    for (int e = 0; e < v->E; e++)
        for (int r = 0; r < v->R; r++) {
            int d = v->best_q[e * v->R + r];
            if (d > 0 && r != solve_home(v, e)) solve_move(v, e, solve_home(v, e), r, d);
        }
    p = solve_peaks(v);
    info->compute_ps = cost_compute(v->cost, p), info->tokens_ps = cost_tokens(v->cost, p);
    info->weights_ps = cost_weights(v->cost, p), info->fixed_ps = cost_fixed(v->cost, p);
    info->cost_ps = cost_total(v->cost, p);
    info->max_load = p.load, info->copies = p.copies, info->total = v->total;
    info->pairs_self = info->pairs_node = info->inter_copies = 0;
    for (int r = 0; r < v->R; r++) info->pairs_self += v->self[r];
    for (int n = 0; n < v->N; n++) info->pairs_node += v->nlocal[n], info->inter_copies += v->win[n];
    info->pairs_inter = v->total - info->pairs_node;
    info->pairs_node -= info->pairs_self;
    info->node_copies = info->copies - info->inter_copies;
    uint64_t h = 0xCBF29CE484222325ull;
    h = solve_hash(solve_hash(solve_hash(h, v->R), v->E), v->S);
    for (int i = 0; i < v->R * v->E; i++) h = solve_hash(h, v->D[i]);
    for (int e = 0; e < v->E; e++)
        for (int r = 0; r < v->R; r++) {
            int n = v->q[e * v->R + r];
            quota[e * v->R + r] = n;
            if (n > 0) h = solve_hash(solve_hash(solve_hash(h, e), r), n);
        }
    for (int r = 0; r < v->R; r++) {
        int n = 0; // experts were visited ascending, and so were the slots filled
        for (; n < v->held[r]; n++) slot[r * v->S + n] = v->slot[r * v->S + n];
        for (; n < v->S; n++) slot[r * v->S + n] = -1;
    }
    info->hash = h;
}
#endif
