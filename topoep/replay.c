// build/replay: routing traces, recorded or generated, under every policy on any cluster; what each would take, and why.
#include "kernels/check.h"
#include "kernels/files.h"
#include "topoep/planflags.h"
#include "topoep/report.h"
#include "topoep/studies.h"
#include "topoep/timeline.h"
#include <stdlib.h>
#include <string.h>

typedef struct Settings {
    int64_t nodes, slots, layers, steps, warm, seed, experts, topk, width, expert_width, tokens;
    int64_t token_bytes, weight_bytes, grad_bytes;
    int balance, json, headline, scale; // balance: a row, or REPLAY_ROWS for all
    double skew, other_share, hop_us, plan_us;
    const char *chrome;
    PlanFlags how;
    char choices[256], synopsis[4096];
    Flag flags[64];
} Settings;

static void settings_init(Settings *o) {
    *o = (Settings){.layers = 48, .steps = 4, .seed = 1, .experts = 128, .topk = 8, .width = 2048, .expert_width = 768,
                    .tokens = 8192, .slots = -1, .token_bytes = 2, .weight_bytes = 2, .grad_bytes = 4, .balance = REPLAY_ROWS,
                    .other_share = -1, .hop_us = 10, .plan_us = 70, .how = plan_flags_default};
    for (int i = 0; i < REPLAY_ROWS; i++) {
        strcat(o->choices, replay_name(i));
        strcat(o->choices, "|");
    }
    strcat(o->choices, "all");
    strcpy(o->synopsis, "replay DEMAND [CLUSTER]: what a step takes under every balancer, on any cluster\n\n"
                        "  DEMAND   a trace of build/train (OUT/route.bin), or generated demand:\n");
    for (const DemandKind *k = demand_kinds; k->name; k++) {
        size_t n = strlen(o->synopsis);
        snprintf(o->synopsis + n, sizeof o->synopsis - n, "             %-12s %s%s\n", k->name, k->help,
                 k->level ? "" : "; no level");
    }
    strcat(o->synopsis, "  CLUSTER  a rates or a cost file (topoep/clusters has some); without it a local machine's round figures\n");
    const Flag flags[] = {
        {.name = "balance", .kind = FLAG_CHOICE, .value = &o->balance, .choices = o->choices,
         .help = "only this row beside none and uniform"},
        {.name = "nodes", .kind = FLAG_INT, .value = &o->nodes, .min = 0, .max = PLAN_MAX_R,
         .help = "nodes of the cluster; 0 = as its file says, or as the trace"},
        {.name = "slots", .kind = FLAG_INT, .value = &o->slots, .min = -1, .max = PLAN_MAX_S,
         .help = "slots for copies per rank; -1 = as the trace or the cluster file says, or 2"},
        {.name = "warm", .kind = FLAG_INT, .value = &o->warm, .min = 0, .max = 1 << 20,
         .help = "first steps that only count as eplb's past"},
        {.name = "json", .kind = FLAG_BOOL, .value = &o->json, .help = "print JSON instead of the table"},
        {.name = "chrome", .kind = FLAG_STRING, .value = &o->chrome, .help = "write the first step as a Chrome trace (Perfetto) "
         "to this file: --balance's, or topoep's"},
        {.name = "headline", .kind = FLAG_BOOL, .value = &o->headline, .help = "CLUSTER alone: the published headline on paper, "
         "as Markdown (--layers, --steps: how many to sample)"},
        {.name = "scale", .kind = FLAG_BOOL, .value = &o->scale, .help = "CLUSTER alone: gain and cost from 8 to 1024 ranks, as "
         "Markdown (--nodes: at most so many)"},
        {.name = "", .help = "Demand, where it is generated"},
        {.name = "layers", .kind = FLAG_INT, .value = &o->layers, .min = 1, .max = 1024, .help = "MoE layers"},
        {.name = "steps", .kind = FLAG_INT, .value = &o->steps, .min = 1, .max = 1 << 20, .help = "steps, of one microbatch each"},
        {.name = "seed", .kind = FLAG_INT, .value = &o->seed, .min = 0, .max = 1e15, .help = "of the demand"},
        {.name = "skew", .kind = FLAG_DOUBLE, .value = &o->skew, .min = 0, .max = 1024,
         .help = "rank max/mean to generate; 0 = the kind's"},
        {.name = "", .help = "Model (default: Qwen3-30B-A3B in bf16; of a trace, its own)"},
        {.name = "experts", .kind = FLAG_INT, .value = &o->experts, .min = 1, .max = PLAN_MAX_E,
         .help = "experts E (generated demand)"},
        {.name = "topk", .kind = FLAG_INT, .value = &o->topk, .min = 1, .max = 1024, .help = "experts per token K"},
        {.name = "width", .kind = FLAG_INT, .value = &o->width, .min = 1, .max = 1 << 20, .help = "hidden width C"},
        {.name = "expert-width", .kind = FLAG_INT, .value = &o->expert_width, .min = 1, .max = 1 << 20, .help = "expert width F"},
        {.name = "tokens", .kind = FLAG_INT, .value = &o->tokens, .min = 1, .max = 1 << 24,
         .help = "tokens of a rank's microbatch; a trace's counts are scaled to it"},
        {.name = "token-bytes", .kind = FLAG_INT, .value = &o->token_bytes, .min = 1, .max = 8,
         .help = "bytes of an activation on the wire"},
        {.name = "weight-bytes", .kind = FLAG_INT, .value = &o->weight_bytes, .min = 1, .max = 8, .help = "bytes of a weight"},
        {.name = "grad-bytes", .kind = FLAG_INT, .value = &o->grad_bytes, .min = 1, .max = 8, .help = "bytes of a weight gradient"},
        {.name = "other-share", .kind = FLAG_DOUBLE, .value = &o->other_share, .min = -1, .max = 0.99,
         .help = "share of a step with even routing that is not MoE layers; -1 = as the trace measured, or 0.4"},
        {.name = "", .help = "Planning"},
        {.name = "hop-us", .kind = FLAG_DOUBLE, .value = &o->hop_us, .min = 0, .max = 1e6,
         .help = "a hop of the exchange of counts, microseconds (an assumption)"},
        {.name = "plan-us", .kind = FLAG_DOUBLE, .value = &o->plan_us, .min = 0, .max = 1e9,
         .help = "a plan on the device, microseconds (56-78 published for UltraEP's on 64 ranks)"},
        PLAN_FLAGS(o->how),
        {0},
    };
    memcpy(o->flags, flags, sizeof flags);
}

static int given(Settings *o, const char *name) { return flags_find(o->flags, name)->set; }

// What the costs need of the model: a trace's own, unless flags say otherwise
static CostModel cost_model(Settings *o, const TraceHeader *h) {
    int64_t *const of_flags[] = {&o->width, &o->expert_width, &o->topk, &o->token_bytes, &o->weight_bytes, &o->grad_bytes, &o->slots};
    static const char *const names[] = {"width", "expert-width", "topk", "token-bytes", "weight-bytes", "grad-bytes", "slots"};
    if (h) {
        const int of_trace[] = {h->C, h->F, h->K, h->elem_bytes, h->elem_bytes, h->grad_bytes, h->S};
        for (int i = 0; i < 7; i++)
            if (!given(o, names[i])) *of_flags[i] = of_trace[i];
    }
    CostDedup dedup = !h ? DEDUP_FILE : h->crossing_pairs > 1 ? DEDUP_ON : DEDUP_OFF; // a trace's: as it was run
    return (CostModel){.C = (int)o->width, .F = (int)o->expert_width, .K = (int)o->topk, .E = h ? h->E : (int)o->experts,
                       .slots = (int)o->slots, .N = h ? h->N : 0, .G = h ? h->G : 0, .nodes = (int)o->nodes,
                       .token_bytes = (int)o->token_bytes, .weight_bytes = (int)o->weight_bytes, .grad_bytes = (int)o->grad_bytes,
                       .one_port = !o->how.slicing, .dedup = dedup};
}

static void open_trace(Source *s, Settings *o, const char *name, const char *cluster, CostModel *m, Cost *cost) {
    TraceHeader h;
    trace_read_close(trace_read_open(name, &h));
    static const char *const generated[] = {"experts", "layers", "steps", "skew", "seed"};
    for (int i = 0; i < 5; i++)
        CHECK_USAGE(!given(o, generated[i]), "--%s says what is generated, but %s is a recorded trace (hint: leave it out)", generated[i], name);
    *m = cost_model(o, &h);
    CHECK_USAGE(cluster || !o->nodes || h.R % o->nodes == 0, "%d ranks of the trace do not fill %lld nodes", h.R,
                (long long)o->nodes);
    if (!cluster && o->nodes) m->N = (int)o->nodes, m->G = h.R / m->N;
    *cost = cost_load(cluster, *m);
    cost_check(cost, cost->N, cost->G, h.E);
    int64_t tokens = given(o, "tokens") ? o->tokens : h.micro_tokens, pairs = tokens * h.K * cost->N * cost->G;
    CHECK_USAGE(pairs <= INT32_MAX, "%lld tokens on each of %d ranks, %d experts each: %lld pairs, expected at most %d (hint: --tokens)",
                (long long)tokens, cost->N * cost->G, h.K, (long long)pairs, INT32_MAX);
    source_trace(s, name, cost->N * cost->G, given(o, "tokens") ? o->tokens : 0);
}

static void open_generated(Source *s, Settings *o, const char *name, const char *cluster, CostModel *m, Cost *cost) {
    int kind = demand_find(name);
    CHECK_USAGE(kind >= 0, "there is no file %s and no generated demand of that name (hint: --help lists them)", name);
    CHECK_USAGE(cluster, "generated demand needs a cluster file for its topology (hint: topoep/clusters/h800-4x8.conf)");
    *m = cost_model(o, NULL);
    *cost = cost_load(cluster, *m);
    cost_check(cost, cost->N, cost->G, m->E);
    CHECK_USAGE(o->topk <= o->experts, "--topk: %lld of %lld experts for each token", (long long)o->topk, (long long)o->experts);
    int64_t pairs = 2 * o->tokens * o->topk * cost->N * cost->G;
    CHECK_USAGE(pairs <= INT32_MAX, "%lld tokens on each of %d ranks, %lld of %lld experts each: up to "
                "%lld pairs, expected at most %d", (long long)o->tokens, cost->N * cost->G, (long long)o->topk,
                (long long)o->experts, (long long)pairs, INT32_MAX);
    Demand d = {.kind = kind, .N = cost->N, .G = cost->G, .E = m->E, .K = m->K, .tokens = (int)o->tokens,
                .level = (int)(1000 * o->skew + 0.5), .seed = (uint64_t)o->seed};
    source_generate(s, &d, (int)o->layers, o->steps);
}

static void replay(Settings *o, const char *name, const char *cluster) {
    Source s;
    CostModel m;
    Cost cost;
    (source_is_trace(name) ? open_trace : open_generated)(&s, o, name, cluster, &m, &cost);
    int rows[REPLAY_ROWS], drawn = o->balance < REPLAY_ROWS ? o->balance : POLICY_TOPOEP;
    for (int i = 0; i < REPLAY_ROWS; i++)
        rows[i] = o->balance == REPLAY_ROWS || i == o->balance || i == POLICY_NONE || i == REPLAY_UNIFORM;
    TimeModel model = times_model(&cost, &m, o->hop_us, o->plan_us);
    if (s.trace) model.crossing_bytes = times_crossing_bytes(&m, s.h.crossing_pairs);
    Timeline *line = o->chrome ? timeline_open(o->chrome, &model, &m, drawn) : NULL;
    Replay a;
    replay_run(&a, &s, &model, plan_flags_options(&o->how, POLICY_TOPOEP, 1), rows, o->warm, line ? timeline_see : NULL, line);
    CHECK_DATA(a.steps > 0, "%s holds no demand past the first %lld steps (hint: --warm; --trace-every of the run)", name, (long long)o->warm);
    int measured = o->other_share < 0 && a.times > 0;
    ReportFacts f = {.demand = name, .source = &s, .other = measured ? "as the trace's run measured it" : "by --other-share, of "
                     "a step with even routing"};
    f.other_ms = measured ? a.measured_other_ms / (double)a.times : report_other_ms(&a, o->other_share < 0 ? 0.4 : o->other_share);
    (o->json ? report_json : report_table)(&a, &f);
    if (line) timeline_close(line, f.other_ms);
    replay_free(&a);
    source_close(&s);
}

int main(int argc, char **argv) {
    Settings *o = host_alloc(sizeof *o);
    settings_init(o);
    int n = flags_parse(o->flags, "replay", o->synopsis, argc, argv), study = o->headline || o->scale;
    CHECK_USAGE(!study || n == 1, "%d arguments, expected one: a cluster file (hint: topoep/clusters/h800-4x8.conf)", n);
    CHECK_USAGE(n == 1 || n == 2, "%d arguments, expected a demand and a cluster file (hint: --help)", n);
    CHECK_USAGE(!o->headline || !o->scale, "--headline and --scale are two studies (hint: one after the other)");
    CHECK_USAGE(study || source_is_trace(argv[1]) || o->warm < o->steps, "--warm %lld of --steps %lld leaves none to look at",
                (long long)o->warm, (long long)o->steps);
    Study st = {.cluster = argv[1], .how = plan_flags_options(&o->how, POLICY_TOPOEP, 1), .hop_us = o->hop_us,
                .plan_us = o->plan_us, .seed = (uint64_t)o->seed,
                .layers = given(o, "layers") ? (int)o->layers : o->headline ? 6 : 2,
                .steps = given(o, "steps") ? (int)o->steps : o->headline ? 4 : 1, .nodes = o->nodes ? (int)o->nodes : PLAN_MAX_R};
    if (o->headline) study_headline(&st);
    if (o->scale) study_scale(&st);
    if (!study) replay(o, argv[1], n > 1 ? argv[2] : NULL);
    flags_free(o->flags);
    free(o);
    stdout_check();
    return STATUS_OK;
}
