// build/plan: one demand matrix, what each policy makes of it.
#include "kernels/check.h"
#include "kernels/files.h"
#include "kernels/flags.h"
#include "topoep/cost.h"
#include "topoep/explain.h"
#include "topoep/flow.h"
#include "topoep/loads.h"
#include "topoep/planflags.h"
#include "topoep/search.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct Tool {
    int R, E;
    Cost cost;
    Dev *d;
    int *D;    // on the host
    int *d_D;  // on the device
    Plan plan;
    void *work;
    int block;
    PlanFlags how;
} Tool;

typedef struct Result { // a plan on the host
    int *quota, *slot;
    PlanInfo info;
    double plan_us;
} Result;

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

// The plan of one policy; with `timed`, the fastest of a few
static Result plan_make(Tool *t, int policy, int timed) {
    size_t n = SIZE(t->E, t->R), n_slots = SIZE(t->R, t->cost.S);
    Result a = {.quota = host_alloc(n * sizeof(int)), .slot = host_alloc((n_slots + 1) * sizeof(int))};
    for (int i = 0; i < (timed ? 5 : 1); i++) {
        double start = now_us();
        plan_solve(t->d, &t->plan, t->d_D, t->R, t->E, &t->cost, plan_flags_options(&t->how, policy, t->block), t->work);
        dev_download(t->d, &a.info, t->plan.info, sizeof a.info); // waits until it is made
        double us = now_us() - start;
        if (i == 0 || us < a.plan_us) a.plan_us = us;
    }
    dev_download(t->d, a.quota, t->plan.quota, n * sizeof(int));
    dev_download(t->d, a.slot, t->plan.slot, n_slots * sizeof(int));
    return a;
}

// The best plan of an offline search, on the host
static Result plan_search(Tool *t, int64_t seed, int64_t rounds, double seconds) {
    Result a = {.quota = host_alloc(SIZE(t->E, t->R, sizeof(int))), .slot = host_alloc(SIZE(t->R * t->cost.S + 1, sizeof(int)))};
    double start = now_us();
    search_plan(a.quota, a.slot, &a.info, t->D, t->R, t->E, &t->cost, (uint64_t)seed, rounds, seconds);
    a.plan_us = now_us() - start;
    return a;
}

static void print_json(const Tool *t, const Result *a) {
    int *y = host_alloc(SIZE(t->R, sizeof(int)));
    const char *comma = "";
    printf("{\"ranks\":%d,\"experts\":%d,\"copies\":[", t->R, t->E);
    for (int i = 0; i < t->R * t->cost.S; i++)
        if (a->slot[i] >= 0) printf("%s[%d,%d]", comma, a->slot[i], i / t->cost.S), comma = ",";
    printf("],\"flow\":[");
    comma = "";
    for (int s = 0; s < t->R; s++)
        for (int e = 0; e < t->E; e++) {
            flow_row(y, t->D, a->quota, s, e, t->R, t->E, t->cost.G);
            for (int r = 0; r < t->R; r++)
                if (y[r] > 0) printf("%s[%d,%d,%d,%d]", comma, s, e, r, y[r]), comma = ",";
        }
    printf("],\"cost_ps\":%lld,\"hash\":\"%016llx\"}\n", (long long)a->info.cost_ps, (unsigned long long)a->info.hash);
    free(y);
}

static const char *ratio(char out[16], double a, double b) { // a / b, or n/a
    if (b > 0) snprintf(out, 16, "%.4f", a / b);
    else snprintf(out, 16, "n/a");
    return out;
}

static int64_t node_peak(const Tool *t, const int *quota) {
    int64_t most = 0;
    for (int n = 0; n < t->cost.N; n++) {
        int64_t load = 0;
        for (int e = 0; e < t->E; e++)
            for (int r = n * t->cost.G; r < (n + 1) * t->cost.G; r++) load += quota[e * t->R + r];
        most = cost_max(most, load);
    }
    return most;
}

static void print_head(const Tool *t, const char *loads) {
    const Cost *c = &t->cost;
    printf("cluster   %s: %d nodes x %d ranks, %d slots\n", c->name, c->N, c->G, c->S);
    printf("cost, ns  pair: compute %.3f, between nodes %.3f, inside %.3f | copy: between nodes %.0f, inside %.0f, hidden %lld/1000 | plan %.0f\n",
           1e-3 * (double)c->pair_compute_ps, 1e-3 * (double)c->pair_inter_ps, 1e-3 * (double)c->pair_intra_ps, 1e-3 * (double)c->copy_inter_ps,
           1e-3 * (double)c->copy_intra_ps, (long long)c->overlap_permille, 1e-3 * (double)c->plan_fixed_ps);
    printf("loads     %s: %d ranks, %d experts\n", loads, t->R, t->E);
}

// What no plan can go below: the mean load; without leaving a node, the fullest node's mean
static void print_bounds(const Tool *t, const Result *none) {
    int64_t a = (none->info.total + t->R - 1) / t->R, b = (node_peak(t, none->quota) + t->cost.G - 1) / t->cost.G;
    char of_a[16], of_b[16];
    printf("bounds    (a) any plan: %lld pairs on the fullest rank, J >= %.6f ms, identity is %s x that\n", (long long)a,
           1e-9 * (double)(t->cost.pair_compute_ps * a), ratio(of_a, (double)none->info.cost_ps, (double)(t->cost.pair_compute_ps * a)));
    printf("          (b) a plan that leaves no node: %lld pairs, %s x the mean\n", (long long)b,
           ratio(of_b, (double)b * t->R, (double)none->info.total));
}

static void print_row(const Tool *t, const char *name, const Result *p) {
    const PlanInfo *a = &p->info;
    char by_rank[16], by_node[16], of_identity[16], of_bound[16];
    int64_t bound = t->cost.pair_compute_ps * ((a->total + t->R - 1) / t->R);
    printf("%-9s %8s %8s %6lld %6lld %11lld %11lld %11lld %13.6f %12.6f %12.6f %11.6f %9.6f %9s %9s %9.1f  %016llx\n", name,
           ratio(by_rank, (double)a->max_load * t->R, (double)a->total),
           ratio(by_node, (double)node_peak(t, p->quota) * t->cost.N, (double)a->total), (long long)a->copies, (long long)a->inter_copies,
           (long long)a->pairs_self, (long long)a->pairs_node, (long long)a->pairs_inter, 1e-9 * (double)a->cost_ps,
           1e-9 * (double)a->compute_ps, 1e-9 * (double)a->tokens_ps, 1e-9 * (double)a->weights_ps, 1e-9 * (double)a->fixed_ps,
           ratio(of_identity, (double)a->cost_ps, (double)a->identity_ps), ratio(of_bound, (double)a->cost_ps, (double)bound), p->plan_us,
           (unsigned long long)a->hash);
}

static void print_table(Tool *t, const char *loads, int only, const Result *found) {
    Result none = plan_make(t, POLICY_NONE, 1);
    print_head(t, loads);
    print_bounds(t, &none);
    printf("\n%-9s %8s %8s %6s %6s %11s %11s %11s %13s %12s %12s %11s %9s %9s %9s %9s  %s\n", "policy", "max/mean", "by node", "copies", "inter",
           "pairs self", "in node", "inter", "J ms", "compute", "tokens", "weights", "fixed", "/identity", "/bound(a)", "plan us", "hash");
    for (int i = 0; i < POLICIES; i++) {
        if (only >= 0 && i != only) continue;
        Result a = i == POLICY_NONE ? none : plan_make(t, i, 1);
        print_row(t, policy_names[i], &a);
        if (i != POLICY_NONE) free(a.quota), free(a.slot);
    }
    if (found) print_row(t, "search", found);
    free(none.quota), free(none.slot);
}

int main(int argc, char **argv) {
    int64_t width = 2048, expert_width = 768, topk = 8, token_bytes = 2, weight_bytes = 2, grad_bytes = 4, slots = -1, block = 1, seed = 1, rounds = 0;
    int balance = POLICY_TOPOEP, json = 0, explain = 0;
    double search = 0;
    Tool t = {.how = plan_flags_default};
    char choices[256] = "";
    for (int i = 0; i < POLICIES; i++) {
        size_t n = strlen(choices);
        snprintf(choices + n, sizeof choices - n, "%s%s", i ? "|" : "", policy_names[i]);
    }
    Flag flags[] = {
        {.name = "balance", .kind = FLAG_CHOICE, .value = &balance, .choices = choices, .help = "this policy only, instead of a row for each (eplb takes the matrix for its past)"},
        {.name = "json", .kind = FLAG_BOOL, .value = &json, .help = "print one policy's plan alone, as JSON"},
        {.name = "explain", .kind = FLAG_BOOL, .value = &explain, .help = "tell in words how topoep comes to its plan, copy by copy"},
        {.name = "search", .kind = FLAG_DOUBLE, .value = &search, .max = 1e6, .help = "look that many seconds (CPU) for the plan of least J as well"},
        {.name = "search-rounds", .kind = FLAG_INT, .value = &rounds, .max = 1e12, .help = "or so many rounds: with these alone the result repeats"},
        {.name = "seed", .kind = FLAG_INT, .value = &seed, .max = 9e15, .help = "of the search"},
        {.name = "slots", .kind = FLAG_INT, .value = &slots, .min = -1, .max = PLAN_MAX_S, .help = "slots for copies per rank; -1 = as the cluster file says, or 2"},
        {.name = "block", .kind = FLAG_INT, .value = &block, .min = 1, .max = 1 << 20, .help = "pairs by which copies' quotas grow"},
        {.name = "", .help = "How topoep plans"},
        PLAN_FLAGS(t.how),
        {.name = "", .help = "Model, for a cluster file that gives rates (default: Qwen3-30B-A3B in bf16)"},
        {.name = "width", .kind = FLAG_INT, .value = &width, .min = 1, .max = 1 << 20, .help = "hidden width C"},
        {.name = "expert-width", .kind = FLAG_INT, .value = &expert_width, .min = 1, .max = 1 << 20, .help = "expert width F"},
        {.name = "topk", .kind = FLAG_INT, .value = &topk, .min = 1, .max = 1024, .help = "experts per token K"},
        {.name = "token-bytes", .kind = FLAG_INT, .value = &token_bytes, .min = 1, .max = 8, .help = "bytes of an activation on the wire"},
        {.name = "weight-bytes", .kind = FLAG_INT, .value = &weight_bytes, .min = 1, .max = 8, .help = "bytes of a weight"},
        {.name = "grad-bytes", .kind = FLAG_INT, .value = &grad_bytes, .min = 1, .max = 8, .help = "bytes of a weight gradient"},
        {0},
    };
    int n = flags_parse(flags, "plan",
                        "plan CLUSTER LOADS: what each balancer makes of one load matrix, and what it costs\n\n"
                        "  CLUSTER  a rates or a cost file (topoep/clusters has some)\n"
                        "  LOADS    a line \"ranks R experts E\", then for each rank its pairs per expert; # begins a comment\n",
                        argc, argv);
    CHECK_USAGE(n == 2, "%d arguments, expected two: a cluster file and a load file (hint: --help)", n);
    t.block = (int)block;
    t.D = loads_read(argv[2], &t.R, &t.E);
    t.cost = cost_load(argv[1], (CostModel){.C = (int)width, .F = (int)expert_width, .K = (int)topk, .E = t.E, .slots = (int)slots,
                                            .token_bytes = (int)token_bytes, .weight_bytes = (int)weight_bytes, .grad_bytes = (int)grad_bytes,
                                            .one_port = !t.how.slicing, .N = t.R, .G = 1});
    const Cost *c = &t.cost;
    CHECK_DATA(c->N * c->G == t.R, "%s has %d nodes of %d ranks, %s %d ranks", argv[1], c->N, c->G, argv[2], t.R);
    cost_check(c, c->N, c->G, t.E);
    t.d = dev_init((DevOptions){.threads = 1});
    t.d_D = dev_alloc(t.d, SIZE(t.R, t.E, sizeof(int)), "demand");
    t.plan.quota = dev_alloc(t.d, SIZE(t.E, t.R, sizeof(int)), "quotas");
    t.plan.slot = dev_alloc(t.d, SIZE(t.R * c->S + 1, sizeof(int)), "slots");
    t.plan.info = dev_alloc(t.d, sizeof(PlanInfo), "plan info");
    t.work = dev_alloc(t.d, plan_work_bytes(t.R, t.E, c->N, c->S), "solver");
    dev_upload(t.d, t.d_D, t.D, SIZE(t.R, t.E, sizeof(int)));
    int searched = search > 0 || rounds > 0;
    CHECK_USAGE(json + explain < 2, "--json and --explain are both given, expected one of them");
    Result found = searched ? plan_search(&t, seed, rounds, search) : (Result){0};
    if (json || explain) {
        Result a = searched ? found : plan_make(&t, balance, 0);
        CHECK_USAGE(json || searched || balance == POLICY_TOPOEP, "--explain tells of topoep alone, --balance is %s", policy_names[balance]);
        if (json) print_json(&t, &a);
        else explain_plan(stdout, t.D, a.quota, t.R, t.E, &t.cost, plan_flags_options(&t.how, POLICY_TOPOEP, t.block));
        if (!searched) free(a.quota), free(a.slot);
    } else {
        print_table(&t, argv[2], flags_find(flags, "balance")->set ? balance : -1, searched ? &found : NULL);
    }
    free(found.quota), free(found.slot);
    dev_free(t.d);
    free(t.D);
    stdout_check();
    return STATUS_OK;
}
