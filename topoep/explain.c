#include "topoep/explain.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include "topoep/policies.h"
#include <stdlib.h>
#include <string.h>

typedef struct Story {
    FILE *out;
    Solve v;
    PlanOptions options;
    int64_t *scratch;
} Story;

static double ms(int64_t ps) { return 1e-9 * (double)ps; }
static int64_t now_ps(const Solve *v) { return cost_total(v->cost, solve_peaks(v)); }

// J, and what holds it up: the fullest rank, the busiest port
static void tell_state(const Story *s) {
    const Solve *v = &s->v;
    Peaks p = solve_peaks(v);
    const Cost *c = v->cost;
    int full = 0, node = 0;
    for (int r = 1; r < v->R; r++) full = v->load[r] > v->load[full] ? r : full;
    for (int n = 1; n < v->N; n++)
        node = flow_max(v->nload[n], v->nrows[n]) - v->nlocal[n] > flow_max(v->nload[node], v->nrows[node]) - v->nlocal[node] ? n : node;
    fprintf(s->out, "    J %.6f ms = compute %.6f (rank %d has %d pairs, %.3f x the mean) + tokens %.6f", ms(now_ps(v)), ms(cost_compute(c, p)), full,
            v->load[full], v->total ? (double)v->load[full] * v->R / (double)v->total : 0, ms(cost_tokens(c, p)));
    if (c->pair_inter_ps * p.inter >= c->pair_intra_ps * p.intra && p.inter > 0) {
        int in = v->nload[node] - v->nlocal[node];
        fprintf(s->out, " (%lld pairs %s node %d)", (long long)p.inter, in == p.inter ? "enter" : "leave", node);
    } else if (p.intra > 0) {
        fprintf(s->out, " (%lld pairs leave or enter one rank)", (long long)p.intra);
    }
    fprintf(s->out, " + weights %.6f + fixed %.6f\n", ms(cost_weights(c, p)), ms(cost_fixed(c, p)));
}

// What else there was to choose from
static void tell_choices(Story *s, int64_t final_ps) {
    Solve *v = &s->v;
    fprintf(s->out, "Plans looked at (J in ms; the least is taken, and improved by rounds that take copies away and put others in their place):\n");
    fprintf(s->out, "    no copies                    %.6f\n", ms(now_ps(v)));
    int64_t least = INT64_MAX;
    const char *by = "topoep's climb";
    for (int p = -1; p < POLICIES; p++) {
        if (p == POLICY_NONE || p == POLICY_TOPOEP || (p >= 0 && s->options.without & PLAN_NO_PORTFOLIO)) continue;
        if (p < 0) {
            solve_climbs(v, s->options.effort);
            solve_become(v, v->best_q);
        } else {
            policy_make(v, (Policy)p, NULL, s->scratch);
        }
        int64_t cost = now_ps(v);
        const char *name = p < 0 ? "topoep's climb" : policy_names[p];
        if (cost < least) least = cost, by = name;
        fprintf(s->out, "    %-28s %.6f%s\n", name, ms(cost), p == POLICY_EPLB ? "  (as if this matrix were its past)" : "");
    }
    fprintf(s->out, "    best of these is %s; the plan chosen has %.6f\n", by, ms(final_ps));
}

static void tell_copy(const Story *s, int e, int r, int pairs, int64_t before) {
    const Solve *v = &s->v;
    int home = solve_home(v, e), own = flow_min(pairs, v->dt[e * v->R + r]);
    int64_t after = now_ps(v);
    fprintf(s->out, "  expert %d (home: rank %d, node %d), copied to rank %d (node %d): %d of its %d pairs, %d of them from that rank itself; J %s by %.6f ms\n",
            e, home, v->node[home], r, v->node[r], pairs, (int)policy_total(v, e), own, after <= before ? "falls" : "rises",
            ms(after <= before ? before - after : after - before));
}

// The copies of one stage, each time the one after which J is least
static void tell_stage(Story *s, const int *quota, int foreign) {
    Solve *v = &s->v;
    int told = 0;
    for (;;) {
        int64_t before = now_ps(v), least = INT64_MAX;
        int best_e = -1, best_r = -1;
        for (int e = 0; e < v->E; e++)
            for (int r = 0; r < v->R; r++) {
                int home = solve_home(v, e), n = quota[e * v->R + r];
                if (r == home || n == 0 || v->q[e * v->R + r] > 0 || (v->node[r] != v->node[home]) != foreign) continue;
                solve_move(v, e, home, r, n);
                int64_t cost = now_ps(v);
                solve_move(v, e, r, home, n);
                if (cost < least) least = cost, best_e = e, best_r = r;
            }
        if (best_e < 0) break;
        solve_move(v, best_e, solve_home(v, best_e), best_r, quota[best_e * v->R + best_r]);
        tell_copy(s, best_e, best_r, quota[best_e * v->R + best_r], before);
        tell_state(s);
        told++;
    }
    if (!told) fprintf(s->out, "  nothing\n");
}

void explain_plan(FILE *out, const int *D, const int *quota, int R, int E, const Cost *cost, PlanOptions options) {
    Story s = {.out = out, .options = options, .scratch = host_alloc(policy_work_bytes(R, E))};
    void *work = host_alloc(solve_work_bytes(R, E, cost->N, cost->S));
    solve_bind(&s.v, work, D, R, E, cost, options);
    solve_identity(&s.v);
    solve_become(&s.v, quota);
    int64_t final_ps = now_ps(&s.v);
    solve_identity(&s.v);
    tell_choices(&s, final_ps);
    solve_identity(&s.v);
    fprintf(out, "Without copies:\n");
    tell_state(&s);
    fprintf(out, "Stage 1, between nodes: a copy takes pairs off the ports of two nodes and load off the home's node\n");
    tell_stage(&s, quota, 1);
    fprintf(out, "Stage 2, inside nodes: a copy takes load off its home\n");
    tell_stage(&s, quota, 0);
    free(work), free(s.scratch);
}
