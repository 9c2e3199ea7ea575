#include "tests/common/cases.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include "kernels/rng.h"
#include "tests/ref/plan_ref.h"
#include "topoep/loads.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

static void case_alloc(Case *c) {
    c->D = host_alloc(SIZE(c->R, c->E, sizeof(int)));
    c->quota = host_alloc(SIZE(c->E, c->R, sizeof(int)));
    c->slot = host_alloc(SIZE(c->R * c->cost.S + 1, sizeof(int)));
}

Case case_make(int N, int G, int H, int S) {
    Case c = {.R = N * G, .E = N * G * H, .cost = {.name = "case", .N = N, .G = G, .S = S, .pair_compute_ps = 10, .pair_inter_ps = 4,
                                                   .pair_intra_ps = 1, .copy_inter_ps = 30, .copy_intra_ps = 10}};
    case_alloc(&c);
    return c;
}

void case_free(Case *c) { free(c->D), free(c->quota), free(c->slot); }

void case_solve(Dev *d, Case *c, PlanOptions options) {
    Plan plan = {.quota = c->quota, .slot = c->slot, .info = &c->info, .history = c->history};
    void *work = host_alloc(plan_work_bytes(c->R, c->E, c->cost.N, c->cost.S));
    plan_solve(d, &plan, c->D, c->R, c->E, &c->cost, options, work);
    free(work);
    const char *broken = plan_ref_illegal(c->D, c->quota, c->slot, c->R, c->E, c->cost.S);
    if (broken) fail_msg("illegal: %s", broken);
    PlanInfo want = plan_ref_info(c->D, c->quota, c->slot, c->R, c->E, &c->cost);
    assert_memory_equal(&want, &c->info, sizeof want);
}

Case case_read(const char *name) {
    char path[512];
    size_t stem = strlen(name); // the cluster's file has the name up to a dot: the one that exists
    do {
        while (stem > 0 && name[--stem] != '.') continue;
        snprintf(path, sizeof path, "tests/data/plan/%.*s.conf", (int)stem, name);
    } while (stem > 0 && access(path, R_OK) != 0);
    Case c = {.cost = cost_load(path, (CostModel){.slots = -1})};
    snprintf(path, sizeof path, "tests/data/plan/%s.loads", name);
    int *D = loads_read(path, &c.R, &c.E);
    case_alloc(&c);
    free(c.D);
    c.D = D;
    return c;
}

// ---- drawn ----------------------------------------------------------------------------------------------------------------
int draw(Draw *d, int n) { return n > 0 ? (int)(rng_u64(d->seed, 3, d->at++) % (uint64_t)n) : 0; }

void case_draw_cost(Draw *d, Case *c) {
    Cost *a = &c->cost;
    int kind = draw(d, 4); // copies free, dear, else cheap
    a->overlap_permille = draw(d, 3) ? 0 : draw(d, 1001), a->plan_fixed_ps = draw(d, 2) * 1000;
    a->pair_compute_ps = 1 + draw(d, 1000), a->pair_intra_ps = draw(d, 1000), a->pair_inter_ps = draw(d, 2000);
    if (draw(d, 8) == 0) a->pair_compute_ps = 0;
    if (draw(d, 8) == 0) a->pair_inter_ps = a->pair_intra_ps = 0;
    a->copy_intra_ps = kind == 0 ? 0 : kind == 1 ? 100000 + draw(d, 100000) : draw(d, 5000);
    a->copy_inter_ps = kind == 0 ? 0 : kind == 1 ? 300000 + draw(d, 100000) : draw(d, 9000);
    if (kind == 3 && draw(d, 4) == 0) a->copy_intra_ps = 0; // free inside a node, not between nodes
    if (draw(d, 10) == 0) { // every figure as large as a file may have it
        a->pair_compute_ps *= 1000000, a->pair_intra_ps *= 1000000, a->pair_inter_ps *= 1000000;
        a->copy_intra_ps *= 1000000, a->copy_inter_ps *= 1000000;
    }
}

void case_draw_loads(Draw *d, Case *c) {
    int R = c->R, E = c->E, G = c->cost.G, kind = draw(d, 9), scale = draw(d, 4) ? 1 + draw(d, 60) : 1 + draw(d, 3000);
    int hot = draw(d, E), rank = draw(d, R);
    for (int i = 0; i < R * E; i++) {
        int e = i % E, s = i / E, home = e / (E / R), x = draw(d, scale);
        switch (kind) {
        case 0: x = 0; break;                                            // nothing at all
        case 1: x = 0; break;                                            // one pair, below
        case 2: x = e == hot ? scale : 0; break;                         // all on one expert
        case 3: x = e % (1 + draw(d, 4)) == 0 ? x * 8 : x / 4; break;    // scattered
        case 4: x = home == rank ? x * 6 : x / 2; break;                 // a hot rank
        case 5: x = home / G == rank / G ? x * 3 : x / 2; break;         // a hot node
        case 6: x = (e + s * 7) % E < 3 ? x * 9 : x / 3; break;          // every source its own taste
        case 7: x = s % 3 == 0 ? 0 : x; break;                           // ragged: some ranks without tokens
        default: x = home == s ? x * 4 : 0; break;                       // every source only its own experts: no traffic
        }
        c->D[i] = x;
    }
    if (kind == 1) c->D[draw(d, R * E)] = 1;
}

Case case_draw(Draw *d, int large) {
    static const int nodes[] = {1, 1, 2, 2, 3, 4}, ranks[] = {1, 2, 2, 3, 4, 5}, experts[] = {1, 1, 2, 3, 4}, slots[] = {0, 1, 1, 2, 2, 3, 4};
    int N = large ? 4 : nodes[draw(d, 6)], G = large ? 8 : ranks[draw(d, 6)], H = large ? 4 : experts[draw(d, 5)];
    Case c = case_make(N, G, H, slots[draw(d, 7)]);
    case_draw_cost(d, &c);
    case_draw_loads(d, &c);
    return c;
}

// ---- named ----------------------------------------------------------------------------------------------------------------
static Cost named_cost(const char *model, int N, int G, int S) {
    static const struct { const char *name; CostModel m; } shapes[] = {
        {"qwen", {.C = 2048, .F = 768, .K = 8}}, {"lite", {.C = 2048, .F = 1408, .K = 6}}, {"glm", {.C = 4096, .F = 1408, .K = 8}}};
    Cost c = {.name = "named", .N = N, .G = G, .S = S, .plan_fixed_ps = 100000000};
    for (int i = 0; i < 3; i++) {
        size_t n = strlen(shapes[i].name);
        int64_t C = shapes[i].m.C, F = shapes[i].m.F;
        if (strncmp(model, shapes[i].name, n) != 0 || (model[n] && strcmp(model + n, "1") != 0)) continue;
        double delta = N > 1 ? N * (1 - pow(1 - 1.0 / N, shapes[i].m.K)) / shapes[i].m.K : 1; // as in topoep/cost.c
        c.pair_compute_ps = 18 * C * F / 500, c.pair_intra_ps = 8 * C * 1000 / 160; // 500 TFLOP/s, 160 and 45 GB/s
        c.pair_inter_ps = (int64_t)(delta * 8 * (double)C * 1000 / (45 * G));
        c.copy_intra_ps = 24 * C * F * 1000 / 160, c.copy_inter_ps = 24 * C * F * 1000 / (45 * (model[n] ? 1 : G));
        return c;
    }
    assert_string_equal(model, "toy");
    c.pair_compute_ps = 1000000, c.pair_inter_ps = 400000, c.pair_intra_ps = 300000;
    c.copy_inter_ps = 6000000, c.copy_intra_ps = 2000000, c.overlap_permille = 250, c.plan_fixed_ps = 1000000;
    return c;
}

// Weight of expert e for source s, before noise. place: a permutation of the experts
static double named_weight(const char *kind, double z, uint64_t seed, const int *place, int s, int e, const Case *c) {
    int E = c->E, H = E / c->R, G = c->cost.G, hot = (int)(seed * 37 % (uint64_t)E);
    if (!strcmp(kind, "rank")) return pow(1 + place[e / H * H] / H, -z);
    if (!strcmp(kind, "node")) return pow(1 + place[e / (H * G) * H * G] / (H * G) + 0.02 * place[e], -z);
    if (!strcmp(kind, "source")) return pow(1 + (place[e] + s / G * 13) % E, -z);
    if (!strcmp(kind, "inject")) return place[e] < 4 ? z / 4 : (1 - z) / (E - 4);
    if (!strcmp(kind, "window")) return (e - hot + E) % E < E / 8 ? z / (E / 8) : (1 - z) / (E - E / 8);
    if (!strcmp(kind, "cold")) return place[e] < z * E && place[e] < E - 1 ? 0 : pow(1 + E - 1 - place[e], -0.7);
    assert_true(!strcmp(kind, "scattered") || !strcmp(kind, "ragged"));
    return pow(1 + place[e], -z);
}

Case case_named(const char *name) {
    char kind[16], model[16];
    double z;
    int seed, N, G, E, S, pairs;
    assert_int_equal(sscanf(name, "%15s %lf %d %dx%d %d %d %15s %d", kind, &z, &seed, &N, &G, &E, &S, model, &pairs), 9);
    Case c = case_make(N, G, E / (N * G), S);
    assert_int_equal(c.E, E);
    c.cost = named_cost(model, N, G, S);
    uint64_t key = rng_name(kind) + (uint64_t)seed, at = 0;
    int *place = host_alloc(SIZE(E, sizeof(int)));
    double *w = host_alloc(SIZE(E, sizeof(double)));
    for (int e = 0; e < E; e++) place[e] = (int)rng_permute(key, 5, (uint64_t)e, (uint64_t)E);
    for (int s = 0; s < c.R; s++) {
        double sum = 0, share = !strcmp(kind, "ragged") ? s % 3 * 1.0 : 1;
        for (int e = 0; e < E; e++) sum += w[e] = named_weight(kind, z, (uint64_t)seed, place, s, e, &c) * (0.9 + 0.2 * rng_uniform(key, 4, at++));
        for (int e = 0; e < E; e++) c.D[s * E + e] = (int)(pairs * share * w[e] / sum + rng_uniform(key, 6, at++)); // rounded by chance
    }
    free(place);
    free(w);
    return c;
}
