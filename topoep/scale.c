// The study of growth: from one node to 128 of eight ranks, what a plan gains and what it costs.
#include "kernels/check.h"
#include "topoep/report.h"
#include "topoep/studies.h"
#include <math.h>
#include <stdio.h>

typedef struct Size {
    int nodes, E;
} Size;
static const Size sizes[] = {{1, 64}, {4, 128}, {8, 256}, {16, 512}, {32, 512}, {64, 512}, {128, 1024}};
enum { SIZES = sizeof sizes / sizeof *sizes, TOKENS = 8192, TOPK = 8 };
static const double SKEW = 2;

// Counts without the rows of other nodes' ranks: node sums (N,E) between nodes, a node's own rows inside it, and for each expert
// that a rank holds, at home or as a copy, a column
static double sums_us(const TimeModel *m) {
    const Cost *c = &m->cost;
    double inter = 4.0 * (c->N - 1) * m->E + 4.0 * (m->R - c->G) * (m->E / m->R + c->S) * c->G, intra = 4.0 * (c->G + c->N) * m->E;
    double hops = m->R > 1;
    for (int n = 1; n < c->N; n *= 2) hops++;
    return m->hop_us * (hops + 1) + 1e-6 * (m->counts_inter_ps * inter + m->counts_intra_ps * intra);
}

typedef struct Point {
    double saved_ms, cpu_ms, gather_ms; // per layer: saved but for the plan's time; that, on this CPU; what the all-gather adds
} Point;
static Point print_size(const Study *st, Size z, int tokens, Policy policy, PlanEffort effort) {
    CostModel model = {.C = 2048, .F = 768, .K = TOPK, .E = z.E, .slots = -1, .token_bytes = 2, .weight_bytes = 2, .grad_bytes = 4,
                       .nodes = z.nodes};
    Cost c = cost_load(st->cluster, model);
    cost_check(&c, c.N, c.G, z.E);
    TimeModel m = times_model(&c, &model, st->hop_us, 0);
    Demand d = {.kind = demand_find("zipf"), .N = c.N, .G = c.G, .E = z.E, .K = TOPK, .tokens = tokens,
                .level = (int)lround(1000 * SKEW), .seed = st->seed};
    int rows[REPLAY_ROWS] = {[POLICY_NONE] = 1};
    rows[policy] = 1;
    PlanOptions how = st->how;
    how.effort = effort;
    Source s;
    Replay a;
    source_generate(&s, &d, st->layers, st->steps);
    replay_run(&a, &s, &m, how, rows, 0, NULL, NULL);
    source_close(&s);
    ReportRow none = report_row(&a, POLICY_NONE, 0), plan = report_row(&a, policy, 0);
    double n = 1e6 * (double)a.row[policy].n, counts = (double)a.row[policy].sum.counts / n;
    double before = (double)a.row[POLICY_NONE].sum.counts / n;
    double saved = none.layer_ms - plan.layer_ms; // without a plan's time
    printf("| %d x %d | %d | %s%s | %.2f > %.3f | %.1f | %.3f > %.3f | %+.1f%% | %.0f | %.1f > %.1f | %.1f | %.2f | %.2f |\n", c.N,
           c.G, z.E, policy_names[policy], policy != POLICY_TOPOEP ? "" : effort == EFFORT_LOW ? ", low" : ", default",
           plan.before, plan.after, plan.copies / m.R, none.layer_ms, plan.layer_ms, 100 * (none.layer_ms / plan.layer_ms - 1),
           4e-3 * m.R * z.E, before, counts, sums_us(&m), plan.cpu_ms, saved);
    replay_free(&a);
    return (Point){saved, plan.cpu_ms, 1e-3 * (counts - before)};
}

void study_scale(const Study *st) {
    printf("Modelled on the rates of %s with any number of its nodes; experts of width 768 in a model of width 2048, %d per "
           "token; `zipf` at rank max/mean %.1f on every "
           "number of ranks; %d matrices each. The layer's time here leaves out the plan's own: what that took on one core of "
           "this CPU, and what it may take before it eats all "
           "it saves, are the last two columns.\n", st->cluster, TOPK, SKEW, st->layers * st->steps);
    for (int tokens = TOKENS; tokens >= TOKENS / 8; tokens /= 8) {
        printf("\n%d tokens on a rank:\n\n| ranks | experts | plan | max/mean | copies per rank | layer, ms | gain | D, kB | "
               "counts, us | by node sums, us | plan, CPU ms | "
               "may take, ms |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n", tokens);
        int pays[3] = {0}, R = 0; // ranks up to which a plan does
        Point last = {0};
        for (int i = 0; i < SIZES && sizes[i].nodes <= st->nodes; i++) {
            const struct {
                Policy policy;
                PlanEffort effort;
            } plans[] = {{POLICY_TOPOEP, EFFORT_DEFAULT}, {POLICY_TOPOEP, EFFORT_LOW}, {POLICY_ECHO, EFFORT_DEFAULT}};
            for (int k = 0; k < 3; k++) {
                Point p = print_size(st, sizes[i], tokens, plans[k].policy, plans[k].effort);
                if (p.cpu_ms < p.saved_ms) pays[k] = sizes[i].nodes * 8;
                if (k == 0) last = p, R = sizes[i].nodes * 8;
            }
        }
        printf("\nLargest number of ranks at which a plan made on one core of this CPU would still take less than it saves on "
               "that cluster: topoep %d by default, %d with low "
               "effort; echo %d. The all-gather adds %.1f us at %d ranks, of %.0f us that topoep saves: growing with the square "
               "of the ranks, as experts grow with them, it would take "
               "all of that at about %.0f ranks.\n", pays[0], pays[1], pays[2], 1e3 * last.gather_ms, R, 1e3 * last.saved_ms,
               last.gather_ms > 0 ? R * sqrt(last.saved_ms / last.gather_ms) : NAN);
    }
}
