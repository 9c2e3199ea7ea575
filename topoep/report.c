#include "topoep/report.h"
#include "kernels/check.h"
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

double report_other_ms(const Replay *a, double share) { return share / (1 - share) * replay_step_ms(a, REPLAY_UNIFORM); }

ReportRow report_row(const Replay *a, int row, double other_ms) {
    const ReplayRow *r = &a->row[row];
    double n = 1e9 * (double)r->n, per_step = 1e6 * (double)(a->steps * a->groups);
    const ReplayRow *none = &a->row[POLICY_NONE], *uniform = &a->row[REPLAY_UNIFORM];
    ReportRow x = {.layer_ms = (double)times_total(&r->sum) / n, .p50_ms = replay_quantile_ms(r, 0.5),
                   .p99_ms = replay_quantile_ms(r, 0.99), .compute_ms = (double)r->sum.compute / n,
                   .tokens_ms = (double)r->sum.tokens / n, .weights_ms = (double)r->sum.weights / n,
                   .planning_ms = (double)(r->sum.counts + r->sum.plan + r->sum.fixed) / n,
                   .straggler_ms = (double)r->sum.straggler / n, .moe_ms = replay_step_ms(a, row),
                   .before = r->before / (double)r->measured, .after = r->after / (double)r->measured,
                   .mb_self = (double)r->bytes.self / per_step, .mb_node = (double)r->bytes.node / per_step,
                   .mb_inter = (double)r->bytes.inter / per_step, .mb_weights_node = (double)r->bytes.weights_node / per_step,
                   .mb_weights_inter = (double)r->bytes.weights_inter / per_step, .copies = (double)r->copies / (double)r->n,
                   .cpu_ms = 1e-3 * r->cpu_us / (double)r->n};
    x.step_ms = x.moe_ms + other_ms;
    x.speedup = none->used ? (replay_step_ms(a, POLICY_NONE) + other_ms) / x.step_ms : NAN;
    x.ceiling = uniform->used ? (replay_step_ms(a, REPLAY_UNIFORM) + other_ms) / x.step_ms : NAN;
    return x;
}

// ---- text -----------------------------------------------------------------------------------------------------------------
static const char *number(char out[16], int decimals, double v) { // or n/a
    if (isfinite(v)) snprintf(out, 16, "%.*f", decimals, v);
    else snprintf(out, 16, "n/a");
    return out;
}

static void print_row(const Replay *a, int row, double other_ms) {
    ReportRow x = report_row(a, row, other_ms);
    const struct {
        const char *before, *unit;
        int width, decimals;
        double v;
    } cells[] = {{" ", "", 6, 3, x.before}, {" ", "", 6, 3, x.after}, {" | ", "", 8, 3, x.layer_ms}, {" ", "", 8, 3, x.p50_ms},
                 {" ", "", 8, 3, x.p99_ms}, {" | ", "", 8, 3, x.compute_ms}, {" ", "", 8, 3, x.tokens_ms},
                 {" ", "", 8, 3, x.weights_ms}, {" ", "", 8, 3, x.planning_ms}, {" ", "", 8, 3, x.straggler_ms},
                 {" | ", "", 9, 2, x.moe_ms}, {" ", "", 9, 2, x.step_ms}, {" ", "", 8, 4, x.speedup},
                 {" ", "%", 7, 2, 100 * x.ceiling}, {" | ", "", 6, 1, x.copies}, {" ", "", 8, 3, x.cpu_ms},
                 {" | ", "", 9, 1, x.mb_node}, {" ", "", 9, 1, x.mb_inter}, {" ", "", 9, 1, x.mb_weights_node},
                 {" ", "", 9, 1, x.mb_weights_inter}};
    printf("%-9s", replay_name(row));
    for (size_t i = 0; i < sizeof cells / sizeof *cells; i++) {
        char text[16];
        printf("%s%*s%s", cells[i].before, cells[i].width, number(text, cells[i].decimals, cells[i].v), cells[i].unit);
    }
    printf("\n");
}

static void print_head(const Replay *a, const ReportFacts *f) {
    const Cost *c = &a->m.cost;
    const Source *s = f->source;
    printf("demand    %s: %d ranks, %d experts, %d layers, %lld steps of %d microbatches, %lld tokens on a rank, %d EP groups\n",
           f->demand, s->R, s->E, s->h.layers, (long long)a->steps, s->h.micros, (long long)s->tokens, a->groups);
    if (s->trace && s->R != s->h.R)
        printf("          recorded on %d ranks; sources were %s\n", s->h.R, s->R > s->h.R ? "cut" : "joined");
    printf("cluster   %s: %d nodes x %d ranks, %d slots | per pair, ns: compute %.1f, between nodes %.1f, inside %.1f | per "
           "copy, us: between %.1f, "
           "inside %.1f, hidden %lld/1000 | with copies %.0f us\n", c->name, c->N, c->G, c->S, 1e-3 * (double)c->pair_compute_ps,
           1e-3 * (double)c->pair_inter_ps, 1e-3 * (double)c->pair_intra_ps, 1e-6 * (double)c->copy_inter_ps,
           1e-6 * (double)c->copy_intra_ps, (long long)c->overlap_permille, 1e-6 * (double)c->plan_fixed_ps);
    printf("planning  counts: %.0f us a hop; a plan %.0f us on the device, a parameter (--plan-us); \"cpu ms\" is what one took "
           "on this CPU, one core\n", a->m.hop_us, a->m.plan_us);
    printf("other     %.3f ms of a step outside the MoE layers (%s)\n\n", f->other_ms, f->other);
}

// How far the model is from what the run measured, and whether its plans were met again
static void print_trust(const Replay *a, const ReportFacts *f) {
    const Source *s = f->source;
    printf("\ntrust     rates of '%s': %s\n", a->m.cost.name, a->m.cost.measured ? "measured where it stands for" : "not "
           "calibrated (published and assumed figures)");
    if (!s->trace) {
        printf("          generated demand: nothing measured to hold the model against\n");
        return;
    }
    int row = -1;
    for (int i = 0; i < POLICIES; i++)
        if (a->row[i].recorded) row = i;
    if (row < 0) {
        printf("          not replayed as recorded: other ranks or tokens, or no row for the run's policy, %s\n", s->h.policy);
        return;
    }
    const ReplayRow *r = &a->row[row];
    printf("          plans of the run (%s, costs of '%s'): %lld of %lld met again bit for bit, pairs and copies by link class "
           "of %lld\n", s->h.policy, s->h.cost, (long long)r->same_hash, (long long)r->recorded, (long long)r->same_pairs);
    if (a->times == 0) return;
    double model = replay_step_ms(a, row), ms = a->measured_ms / (double)a->times;
    printf("          MoE layers of a step: modelled %.3f ms, measured %.3f ms, %+.1f%% (measured:", model, ms,
           100 * (model / ms - 1));
    for (int i = 0; i < s->h.stages; i++) printf(" %s %.3f", s->h.stage[i], a->measured_stage_ms[i] / (double)a->times);
    printf(")\n          measured: mean over ranks; copies, dispatch, experts (shared ones too), combine, plan and all waiting "
           "count as MoE layers\n");
}

void report_table(const Replay *a, const ReportFacts *f) {
    print_head(a, f);
    printf("%-9s %13s | %26s | %44s | %37s | %15s | %s\n", "", "rank max/mean", "layer, ms", "of it, mean ms", "step, ms", "layer",
           "MB per step: pairs, then copies");
    printf("%-9s %6s %6s | %8s %8s %8s | %8s %8s %8s %8s %8s | %9s %9s %8s %8s | %6s %8s | %9s %9s %9s %9s\n", "policy", "before",
           "after", "mean", "p50", "p99", "compute", "tokens", "weights", "planning", "strag", "MoE", "all", "speed-up", "uniform",
           "copies", "cpu ms", "in node", "inter", "in node", "inter");
    for (int row = 0; row < REPLAY_ROWS; row++)
        if (a->row[row].used) print_row(a, row, f->other_ms);
    printf("\nspeed-up: over none, whole step. uniform: speed as a share of even routing's, which is no training method; copies "
           "also save traffic, so a plan can pass it.\n");
    printf("hot spot  %.2f x an expert's mean at most: expert %d of layer %d, step %lld\n", a->hot_ratio, a->hot_expert,
           a->hot_layer, (long long)a->hot_step);
    print_trust(a, f);
}

// ---- JSON -----------------------------------------------------------------------------------------------------------------
static void put(json_t *j, const char *key, double v) { json_object_set_new(j, key, isfinite(v) ? json_real(v) : json_null()); }

void report_json(const Replay *a, const ReportFacts *f) {
    const Source *s = f->source;
    json_t *rows = json_array();
    for (int row = 0; row < REPLAY_ROWS; row++) {
        if (!a->row[row].used) continue;
        ReportRow x = report_row(a, row, f->other_ms);
        json_t *j = json_pack("{s:s, s:I, s:I}", "policy", replay_name(row), "samples", (json_int_t)a->row[row].n, "copies",
                              (json_int_t)a->row[row].copies);
        const struct {
            const char *key;
            double v;
        } fields[] = {{"rank_max_mean_before", x.before}, {"rank_max_mean_after", x.after}, {"layer_ms", x.layer_ms},
                      {"layer_p50_ms", x.p50_ms}, {"layer_p99_ms", x.p99_ms}, {"compute_ms", x.compute_ms},
                      {"tokens_ms", x.tokens_ms}, {"weights_ms", x.weights_ms}, {"planning_ms", x.planning_ms},
                      {"straggler_ms", x.straggler_ms}, {"moe_step_ms", x.moe_ms}, {"step_ms", x.step_ms}, {"speedup", x.speedup},
                      {"of_uniform", x.ceiling}, {"mb_self", x.mb_self}, {"mb_node", x.mb_node}, {"mb_inter", x.mb_inter},
                      {"mb_weights_node", x.mb_weights_node}, {"mb_weights_inter", x.mb_weights_inter}, {"cpu_plan_ms", x.cpu_ms}};
        for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) put(j, fields[i].key, fields[i].v);
        if (a->row[row].recorded) {
            json_object_set_new(j, "recorded", json_integer(a->row[row].recorded));
            json_object_set_new(j, "same_plans", json_integer(a->row[row].same_hash));
            json_object_set_new(j, "same_pairs", json_integer(a->row[row].same_pairs));
        }
        json_array_append_new(rows, j);
    }
    json_t *j = json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:b, s:o}", "demand", f->demand, "cluster",
                          a->m.cost.name, "nodes", a->m.cost.N, "ranks_per_node", a->m.cost.G, "slots", a->m.cost.S, "experts",
                          s->E, "layers", s->h.layers, "steps", (json_int_t)a->steps, "tokens", (json_int_t)s->tokens,
                          "rates_measured", a->m.cost.measured, "policies", rows);
    CHECK_DATA(j, "names that are not UTF-8 cannot be printed as JSON");
    put(j, "other_ms", f->other_ms);
    put(j, "hop_us", a->m.hop_us), put(j, "plan_us", a->m.plan_us);
    put(j, "hottest_expert_over_mean", a->hot_ratio);
    put(j, "measured_moe_step_ms", a->times ? a->measured_ms / (double)a->times : NAN);
    char *text = json_dumps(j, JSON_INDENT(1));
    printf("%s\n", text);
    free(text);
    json_decref(j);
}
