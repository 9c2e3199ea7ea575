#include "tests/ref/plan_ref.h"
#include <stdlib.h>
#include <string.h>

void plan_ref_flow(int *y, const int *D, const int *q, int R, int G) {
    int *have = malloc((size_t)R * sizeof(int)), *want = malloc((size_t)R * sizeof(int));
    memcpy(have, D, (size_t)R * sizeof(int));
    memcpy(want, q, (size_t)R * sizeof(int));
    memset(y, 0, (size_t)R * (size_t)R * sizeof(int));
    for (int round = 0; round < 3; round++)
        for (int s = 0; s < R; s++)
            for (int r = 0; r < R; r++) {
                if ((round == 0 && r != s) || (round == 1 && r / G != s / G)) continue;
                int n = have[s] < want[r] ? have[s] : want[r];
                y[s * R + r] += n;
                have[s] -= n;
                want[r] -= n;
            }
    free(have);
    free(want);
}

const char *plan_ref_illegal(const int *D, const int *quota, const int *slot, int R, int E, int S) {
    for (int r = 0; r < R; r++)
        for (int i = 0; i < S; i++) {
            int e = slot[r * S + i];
            if (e < -1 || e >= E) return "a slot holds no expert";
            if (i > 0 && e >= 0 && slot[r * S + i - 1] < 0) return "an empty slot before a full one";
            if (i > 0 && e >= 0 && slot[r * S + i - 1] >= e) return "slots not ascending, or an expert twice on a rank";
            if (e >= 0 && e / (E / R) == r) return "a copy at home";
            if (e >= 0 && quota[e * R + r] <= 0) return "a copy without pairs";
        }
    for (int e = 0; e < E; e++) {
        int64_t left = 0;
        for (int r = 0; r < R; r++) {
            int q = quota[e * R + r], held = e / (E / R) == r;
            if (q < 0) return "a negative quota";
            for (int i = 0; i < S; i++) held |= slot[r * S + i] == e;
            if (q > 0 && !held) return "pairs where there is no copy";
            left += D[r * E + e] - q;
        }
        if (left != 0) return "an expert's quotas do not add up to its pairs";
    }
    return NULL;
}

static int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

static uint64_t hash_int(uint64_t h, int32_t x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    for (unsigned b = 0; b < 32; b += 8) {
        h ^= (u >> b) % 256;
        h *= 1099511628211u;
    }
    return h;
}

// Transfers of copies: sent[k], got[k] by node (k = 0) and by rank (k = 1), counted copy by copy
static void count_copies(int64_t *peak_inter, int64_t *peak_intra, PlanInfo *a, const int *slot, int R, int E, const Cost *c) {
    int S = c->S, G = c->G, N = R / G;
    int64_t *wout = calloc((size_t)N * 2 + (size_t)R * 2, sizeof *wout), *win = wout + N, *held = win + N, *fan = held + R;
    char *on = calloc((size_t)E * (size_t)R + 1, 1);
    for (int i = 0; i < R * S; i++)
        if (slot[i] >= 0) on[slot[i] * R + i / S] = 1, held[i / S]++, a->copies++;
    for (int e = 0; e < E; e++)
        for (int n = 0; n < N; n++) {
            int home = e / (E / R), sender = home;
            for (int r = n * G; r < n * G + G; r++) {
                if (!on[e * R + r]) continue;
                if (sender / G == n) {
                    fan[sender]++, a->node_copies++;
                } else { // the entry rank of a foreign node
                    wout[home / G]++, win[n]++, a->inter_copies++;
                    sender = r;
                }
            }
        }
    for (int n = 0; n < N; n++) *peak_inter = most(*peak_inter, most(wout[n], win[n]));
    for (int r = 0; r < R; r++) *peak_intra = most(*peak_intra, most(held[r], fan[r]));
    free(wout);
    free(on);
}

PlanInfo plan_ref_info(const int *D, const int *quota, const int *slot, int R, int E, const Cost *c) {
    PlanInfo a = {0};
    int G = c->G, N = R / G, *column = malloc((size_t)R * sizeof(int)), *y = malloc((size_t)R * (size_t)R * sizeof(int));
    int64_t *load = calloc((size_t)R * 4 + (size_t)N * 2, sizeof *load), *before = load + R, *out = before + R, *in = out + R;
    int64_t *node_out = in + R, *node_in = node_out + N, inter = 0, intra = 0, w_inter = 0, w_intra = 0;
    a.hash = hash_int(hash_int(hash_int(14695981039346656037u, R), E), c->S);
    for (int i = 0; i < R * E; i++) a.hash = hash_int(a.hash, D[i]);
    for (int e = 0; e < E; e++) {
        for (int s = 0; s < R; s++) column[s] = D[s * E + e], before[e / (E / R)] += column[s], a.total += column[s];
        plan_ref_flow(y, column, quota + e * R, R, G);
        for (int s = 0; s < R; s++)
            for (int r = 0; r < R; r++) {
                int n = y[s * R + r];
                load[r] += n;
                if (s != r) out[s] += n, in[r] += n;
                if (s / G != r / G) node_out[s / G] += n, node_in[r / G] += n;
                *(s == r ? &a.pairs_self : s / G == r / G ? &a.pairs_node : &a.pairs_inter) += n;
            }
        for (int r = 0; r < R; r++)
            if (quota[e * R + r] != 0) a.hash = hash_int(hash_int(hash_int(a.hash, e), r), quota[e * R + r]);
    }
    for (int r = 0; r < R; r++) {
        a.max_load = most(a.max_load, load[r]), a.max_load_before = most(a.max_load_before, before[r]);
        intra = most(intra, most(out[r], in[r]));
    }
    for (int n = 0; n < N; n++) inter = most(inter, most(node_out[n], node_in[n]));
    count_copies(&w_inter, &w_intra, &a, slot, R, E, c);
    a.compute_ps = c->pair_compute_ps * a.max_load;
    a.tokens_ps = most(c->pair_inter_ps * inter, c->pair_intra_ps * intra);
    a.weights_ps = most(c->copy_inter_ps * w_inter, c->copy_intra_ps * w_intra) * (1000 - c->overlap_permille) / 1000;
    a.fixed_ps = a.copies ? c->plan_fixed_ps : 0;
    a.cost_ps = a.compute_ps + a.tokens_ps + a.weights_ps + a.fixed_ps;
    free(load);
    free(column);
    free(y);
    if (a.copies > 0) { // the identity's J: the same with every pair at home
        int *home = calloc((size_t)E * (size_t)R, sizeof(int)), *none = malloc(((size_t)R * (size_t)c->S + 1) * sizeof(int));
        for (int i = 0; i < R * E; i++) home[i % E * R + i % E / (E / R)] += D[i];
        for (int i = 0; i < R * c->S; i++) none[i] = -1;
        a.identity_ps = plan_ref_info(D, home, none, R, E, c).cost_ps;
        free(home);
        free(none);
    } else {
        a.identity_ps = a.cost_ps; // without copies there is no other plan
    }
    return a;
}
