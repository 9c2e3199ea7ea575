#include "topoep/studies.h"
#include "kernels/check.h"
#include "topoep/report.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A model as its published config.json has it. bf16, gradients in fp32.
typedef struct Shape {
    const char *name, *demand;   // demand: the imbalance published for its family
    int C, F, E, K, layers, moe, dense_width, shared, V; // layers: all; moe: those with routed experts
    double attention;            // parameters of a layer's attention
    int scores;                  // heads times (dimension of keys + of values)
} Shape;
static const Shape shapes[] = {
    // q, o: 2048 x 32*128; k, v: 2048 x 4*128
    {"Qwen3-30B-A3B", "qwen3-235b", 2048, 768, 128, 8, 48, 48, 0, 0, 151936, 2048.0 * (2 * 4096 + 2 * 512), 32 * 256},
    // MLA: q 2048 x 16*192; kv down 2048 x 576, up 512 x 16*256; o 16*128 x 2048. Two shared experts; the first layer dense
    {"DeepSeek-V2-Lite", "deepseek-v3", 2048, 1408, 64, 6, 27, 26, 10944, 2816, 102400,
     2048.0 * (3072 + 576 + 2048) + 512.0 * 4096, 16 * 320},
    // q, o: 4096 x 96*128; k, v: 4096 x 8*128. One shared expert; the first layer dense
    {"GLM-4.5-Air", "glm-4.5-air", 4096, 1408, 128, 8, 46, 45, 10944, 1408, 151552, 4096.0 * (2 * 12288 + 2 * 1024), 96 * 256},
};
enum { SHAPES = sizeof shapes / sizeof *shapes, TOKENS = 8192, SEQ = 4096, WARM = 4 };
// TopoEP's abstract: gain in per cent on 4 x 8 H800, the least and the largest of three models
static const double PUBLISHED[] = {6.2, 11.4};
static const double OTHER_FLOPS = 400e12; // rate of everything that is not a routed expert

// FLOPs of a token, forward and backward, outside the routed experts: 6 per weight, and causal attention
static double other_flops(const Shape *m) {
    double weights = m->layers * m->attention + (m->layers - m->moe) * 3.0 * m->C * m->dense_width
                   + m->moe * (3.0 * m->C * m->shared + (double)m->C * m->E) + (double)m->C * m->V;
    return 6 * weights + 3.0 * m->layers * SEQ * m->scores;
}
static double other_ms(const Shape *m, int tokens) { return 1e3 * tokens * other_flops(m) / OTHER_FLOPS; }

typedef struct Terms { // of one setting of the headline
    const char *demand;
    double skew;         // 0 = the demand's
    int tokens, overlap; // per mille, -1 = as the cluster file says
} Terms;

static Replay run_shape(const Study *st, const Shape *m, Terms t, const int *rows, Cost *cost) {
    CostModel model = {.C = m->C, .F = m->F, .K = m->K, .E = m->E, .slots = -1, .token_bytes = 2, .weight_bytes = 2, .grad_bytes = 4,
                       .one_port = (st->how.without & PLAN_NO_SLICING) != 0, .nodes = st->nodes < PLAN_MAX_R ? st->nodes : 0};
    *cost = cost_load(st->cluster, model);
    if (t.overlap >= 0) cost->overlap_permille = t.overlap;
    cost_check(cost, cost->N, cost->G, m->E);
    Demand d = {.kind = demand_find(t.demand), .N = cost->N, .G = cost->G, .E = m->E, .K = m->K, .tokens = t.tokens,
                .level = (int)lround(1000 * t.skew), .seed = st->seed};
    TimeModel tm = times_model(cost, &model, st->hop_us, st->plan_us);
    Source s;
    Replay a;
    source_generate(&s, &d, st->layers, WARM + st->steps);
    replay_run(&a, &s, &tm, st->how, rows, WARM, NULL, NULL);
    source_close(&s);
    return a;
}

// The layers that were sampled stand for all of them
static double step_ms(const Replay *a, int row, const Shape *m, int tokens) {
    return 1e-9 * (double)times_total(&a->row[row].sum) / (double)a->row[row].n * m->moe + other_ms(m, tokens);
}

static void print_shape(const Study *st, const Replay *a, const Shape *m, double gains[REPLAY_ROWS]) {
    double none = step_ms(a, POLICY_NONE, m, TOKENS), uniform = step_ms(a, REPLAY_UNIFORM, m, TOKENS), other = other_ms(m, TOKENS);
    printf("\n### %s\n\nOutside the MoE layers: %.2f GFLOP per token, %.1f ms of a step: %.1f%% of it without balancing, %.1f%% "
           "with even routing.\n\n", m->name, 1e-9 * other_flops(m), other, 100 * other / none, 100 * other / uniform);
    printf("| policy | rank max/mean | layer, ms | compute | tokens | weights | planning | step, ms | gain over none | of "
           "uniform |\n|---|---|---|---|---|---|---|---|---|---|\n");
    for (int row = 0; row < REPLAY_ROWS; row++) {
        ReportRow x = report_row(a, row, 0);
        double step = step_ms(a, row, m, TOKENS);
        printf("| %s | %.2f > %.3f | %.3f | %.3f | %.3f | %.3f | %.3f | %.1f | %+.1f%% | %.1f%% |\n", replay_name(row), x.before,
               x.after, x.layer_ms, x.compute_ms, x.tokens_ms, x.weights_ms, x.planning_ms, step,
               gains[row] = 100 * (none / step - 1), 100 * uniform / step);
    }
    ReportRow x = report_row(a, POLICY_NONE, 0), y = report_row(a, POLICY_TOPOEP, 0);
    double of = 100 * m->moe / none;
    printf("\nTopoEP against none, in %% of none's step: compute %+.1f, tokens %+.1f, weights %+.1f, planning %+.1f. A plan may "
           "take %.2f ms before the gain is gone.\n",
           of * (y.compute_ms - x.compute_ms), of * (y.tokens_ms - x.tokens_ms), of * (y.weights_ms - x.weights_ms),
           of * (y.planning_ms - x.planning_ms), x.layer_ms - y.layer_ms + 1e-3 * st->plan_us);
}

// Gain of TopoEP end to end, per cent; hidden: share of the token time that something else hides, under both
static double gain(const Study *st, const Shape *m, Terms t, double hidden, double *before) {
    int rows[REPLAY_ROWS] = {[POLICY_NONE] = 1, [POLICY_TOPOEP] = 1};
    Cost cost;
    Replay a = run_shape(st, m, t, rows, &cost);
    double step[2];
    for (int i = 0; i < 2; i++) {
        int row = i ? POLICY_TOPOEP : POLICY_NONE;
        ReportRow x = report_row(&a, row, 0);
        step[i] = step_ms(&a, row, m, t.tokens) - hidden * x.tokens_ms * m->moe;
        if (before) *before = x.before;
    }
    replay_free(&a);
    return 100 * (step[0] / step[1] - 1);
}

// The rank max/mean at which the gain is `want` per cent, by bisection; NAN if not below 4
static double level_of(const Study *st, const Shape *m, double want) {
    double lo = 1, hi = 4;
    if (gain(st, m, (Terms){"zipf", hi, TOKENS, -1}, 0, NULL) < want) return NAN;
    for (int i = 0; i < 9; i++) {
        double mid = (lo + hi) / 2;
        *(gain(st, m, (Terms){"zipf", mid, TOKENS, -1}, 0, NULL) < want ? &lo : &hi) = mid;
    }
    return hi;
}

static void print_sensitivity(const Study *st) {
    static const double levels[] = {1, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2, 3};
    enum { LEVELS = sizeof levels / sizeof *levels };
    printf("\n### TopoEP's gain by imbalance\n\nThe same with rank max/mean generated at these ranks (`zipf --skew`):\n\n| model |");
    for (int i = 0; i < LEVELS; i++) printf(" %.2f |", levels[i]);
    printf(" +%.1f%% at | +%.1f%% at |\n|---|---|---|", PUBLISHED[0], PUBLISHED[1]);
    for (int i = 0; i < LEVELS; i++) printf("---|");
    for (int k = 0; k < SHAPES; k++) {
        printf("\n| %s |", shapes[k].name);
        for (int i = 0; i < LEVELS; i++) {
            Terms t = {i ? "zipf" : "balanced", levels[i], TOKENS, -1};
            printf(" %+.1f%% |", gain(st, &shapes[k], t, 0, NULL));
        }
        for (int i = 0; i < 2; i++) printf(" %.2f |", level_of(st, &shapes[k], PUBLISHED[i]));
    }
    printf("\n\n### TopoEP's gain by assumption\n\nThe published imbalance again, one assumption changed at a time:\n\n| model "
           "| as above | all token time hidden | copies all hidden | "
           "4096 tokens | 16384 tokens | no locality |\n|---|---|---|---|---|---|---|\n");
    for (int k = 0; k < SHAPES; k++) {
        const Shape *m = &shapes[k];
        Terms t = {m->demand, 0, TOKENS, -1}, hidden = t, few = t, many = t;
        Study blind = *st;
        blind.how.without |= PLAN_NO_LOCALITY;
        hidden.overlap = 1000, few.tokens = TOKENS / 2, many.tokens = 2 * TOKENS;
        printf("| %s | %+.1f%% | %+.1f%% | %+.1f%% | %+.1f%% | %+.1f%% | %+.1f%% |\n", m->name, gain(st, m, t, 0, NULL),
               gain(st, m, t, 1, NULL), gain(st, m, hidden, 0, NULL), gain(st, m, few, 0, NULL), gain(st, m, many, 0, NULL),
               gain(&blind, m, t, 0, NULL));
    }
}

void study_headline(const Study *st) {
    int rows[REPLAY_ROWS];
    double gains[SHAPES][REPLAY_ROWS];
    for (int i = 0; i < REPLAY_ROWS; i++) rows[i] = 1;
    for (int k = 0; k < SHAPES; k++) {
        Cost c;
        Replay a = run_shape(st, &shapes[k], (Terms){shapes[k].demand, 0, TOKENS, -1}, rows, &c);
        if (k == 0) {
            printf("Modelled, not measured. Cluster %s: %d nodes x %d ranks, %d slots, rates %s; %lld/1000 of the copies' time "
                   "hidden, token time not hidden, %.0f us per layer "
                   "with copies.\n", c.name, c.N, c.G, c.S, c.measured ? "measured" : "published and assumed",
                   (long long)c.overlap_permille, 1e-6 * (double)c.plan_fixed_ps);
            printf("%d tokens on a rank (sequences of %d), bf16, gradients in fp32; counts %.0f us a hop, a plan %.0f us; all "
                   "but the routed experts at %.0f TFLOP/s, "
                   "without optimizer, gradient reduction, recomputation or pipeline.\nImbalance: that published for 64 ranks "
                   "(UltraEP, arXiv 2606.04101), on these ranks as it "
                   "falls; %d layers and %d microbatches sampled, eplb with %d microbatches of past.\nPublished for TopoEP on 4 "
                   "x 8 H800, three models: +%.1f%% to +%.1f%%.\n", TOKENS, SEQ, st->hop_us, st->plan_us, 1e-12 * OTHER_FLOPS,
                   st->layers, st->steps, WARM, PUBLISHED[0], PUBLISHED[1]);
        }
        print_shape(st, &a, &shapes[k], gains[k]);
        replay_free(&a);
    }
    printf("\n### All three: gain over none, end to end\n\n| policy |");
    for (int k = 0; k < SHAPES; k++) printf(" %s |", shapes[k].name);
    printf("\n|---|---|---|---|");
    for (int row = 0; row < REPLAY_ROWS; row++) {
        printf("\n| %s |", replay_name(row));
        for (int k = 0; k < SHAPES; k++) printf(" %+.1f%% |", gains[k][row]);
    }
    printf("\n");
    print_sensitivity(st);
}
