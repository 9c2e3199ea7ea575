// Configurations by name, their limits, their size.
#include "model/state.h"
#include "topoep/plan.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Preset {
    const char *name;
    int V, C, L, NH, NKV, HS, T, E, K, F, F_dense, n_dense, n_shared; // n_dense: how many of the first layers are dense
    RouterScore score;
    int tied;
    double routed_scale;
} Preset;

// Vocabulary 257: the bytes and the separator (256). Products need no round sizes.
static const Preset presets[] = {
    //  name         V      C    L  NH NKV HS  T     E   K  F     F_dense n_dense shared
    {"demo",         257,   128, 4,  4, 2, 32, 128,  8,  2, 192,  0,      0,      0, ROUTER_SOFTMAX, 0, 1.0},
    {"1m",           257,   96,  4,  4, 2, 24, 128,  8,  2, 88,   0,      0,      0, ROUTER_SOFTMAX, 0, 1.0},
    {"5m",           257,   192, 6,  6, 2, 32, 256,  8,  2, 152,  0,      0,      0, ROUTER_SOFTMAX, 0, 1.0},
    {"25m",          257,   384, 8,  6, 2, 64, 256,  16, 2, 144,  0,      0,      0, ROUTER_SOFTMAX, 0, 1.0},
    {"100m",         257,   512, 12, 8, 4, 64, 512,  32, 4, 152,  0,      0,      0, ROUTER_SOFTMAX, 0, 1.0},
    {"300m",         257,   768, 16, 12, 4, 64, 1024, 64, 8, 112, 0,      0,      0, ROUTER_SOFTMAX, 0, 1.0},
    // DeepSeek-V3's router on the same attention: sigmoid scores, selection bias, a shared expert, the first layer dense
    {"dots-tiny",    257,   128, 4,  4, 2, 32, 128,  16, 3, 64,   256,    1,      1, ROUTER_SIGMOID, 0, 1.5},
    // GPT-2's width and depth; a gated layer of 2048 has the weights and FLOPs of a plain one of 3072
    {"gpt2-124m",    50304, 768, 12, 12, 12, 64, 1024, 0, 0, 0,   2048,   12,     0, ROUTER_SOFTMAX, 1, 1.0},
    // shapes of the CPU benchmarks
    {"tiny",         256,   256, 6,  8, 4, 32, 256,  8,  2, 512,  0,      0,      0, ROUTER_SOFTMAX, 0, 1.0},
    {"fine",         256,   256, 6,  8, 4, 32, 256,  64, 8, 128,  0,      0,      0, ROUTER_SOFTMAX, 0, 1.0},
    {"small",        50304, 512, 8,  8, 4, 64, 512,  16, 2, 1024, 0,      0,      0, ROUTER_SOFTMAX, 0, 1.0},
};
enum { N_PRESETS = sizeof(presets) / sizeof(presets[0]) };

const char *config_presets(void) {
    return "demo|1m|5m|25m|100m|300m|dots-tiny|gpt2-124m|tiny|fine|small";
}

void config_preset(ModelConfig *c, const char *name) {
    const Preset *p = presets, *end = presets + N_PRESETS;
    while (p < end && strcmp(p->name, name) != 0) p++;
    CHECK_USAGE(p < end, "there is no model \"%s\", it must be one of %s", name, config_presets());
    *c = (ModelConfig){.V = p->V, .C = p->C, .L = p->L, .NH = p->NH, .NKV = p->NKV, .HS = p->HS, .T = p->T,
                       .E = p->E, .K = p->K, .F = p->F, .F_dense = p->F_dense, .n_shared = p->n_shared, .score = p->score,
                       .renorm = 1, .bias = p->score == ROUTER_SIGMOID, .routed_scale = p->routed_scale, .tied = p->tied,
                       .theta = 10000, .eps = 1e-6, .init_std = 0.02};
    memset(c->dense, 1, (size_t)p->n_dense);
}

static int count_dense(const ModelConfig *c) {
    int n = 0;
    for (int l = 0; l < c->L; l++) n += c->dense[l] != 0;
    return n;
}

// Its callers have `where`, as config_check has it.
#define CHECK_CONFIG(cond, fmt, ...) \
    CHECK_AS(where ? STATUS_DATA : STATUS_USAGE, cond, "%s%s" fmt, where ? where : "", where ? ": " : "", __VA_ARGS__)

static void check_dims(const ModelConfig *c, const char *where) {
    const int big = 1 << 20;
    const struct { const char *what; int value, min, max; } dims[] = {
        {"vocabulary (V)", c->V, 2, 1 << 24}, {"width (C)", c->C, 2, big}, {"layers (L)", c->L, 1, MAX_L},
        {"query heads (NH)", c->NH, 1, big}, {"key/value heads (NKV)", c->NKV, 1, big}, {"head size (HS)", c->HS, 2, 4096},
        {"sequence length (T)", c->T, 1, 1 << 24}, {"experts (E)", c->E, 0, PLAN_MAX_E},
        {"shared experts", c->n_shared, 0, 1024},
    };
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++)
        CHECK_CONFIG(dims[i].value >= dims[i].min && dims[i].value <= dims[i].max, "the model's %s is %d, it must be %d..%d",
                    dims[i].what, dims[i].value, dims[i].min, dims[i].max);
    CHECK_CONFIG(c->NH % c->NKV == 0, "the model's query heads (NH) are %d, they must be a multiple of its key/value heads (NKV), %d",
                c->NH, c->NKV);
    CHECK_CONFIG(c->HS % 2 == 0, "the model's head size (HS) is %d, it must be even: rotary positions turn pairs", c->HS);
}

static void check_layers(const ModelConfig *c, const char *where) {
    const int big = 1 << 20, dense = count_dense(c);
    CHECK_CONFIG(c->E > 0 || dense == c->L,
                "the model has no experts (E = 0) and %d of its %d layers dense, all must be (or give it experts)", dense, c->L);
    if (dense)
        CHECK_CONFIG(c->F_dense >= 1 && c->F_dense <= big, "the model has %d dense layers of width (F_dense) %d, it must be 1..%d",
                    dense, c->F_dense, big);
    if (dense == c->L) return;
    CHECK_CONFIG(c->F >= 1 && c->F <= big, "the model's expert width (F) is %d, it must be 1..%d", c->F, big);
    CHECK_CONFIG(c->K >= 1 && c->K <= c->E, "the model chooses K = %d experts per token, it must be 1..%d (E)", c->K, c->E);
    CHECK_CONFIG(c->K > 1 || c->E == 1 || !c->renorm,
                "the model chooses K = 1 of %d experts with renormalised weights: the weight would always be 1 and the router "
                "would learn nothing (hint: K >= 2, or no renormalisation)", c->E);
    CHECK_CONFIG(c->score == ROUTER_SOFTMAX || c->score == ROUTER_SIGMOID,
                "the model's router score is %d, it must be softmax (%d) or sigmoid (%d)", (int)c->score, (int)ROUTER_SOFTMAX,
                (int)ROUTER_SIGMOID);
}

void config_check(const ModelConfig *c, const char *where) {
    check_dims(c, where);
    check_layers(c, where);
    const struct { const char *what; double value, min, max; } numbers[] = {
        {"routed scale", c->routed_scale, 1e-6, 1e6}, {"RoPE base (theta)", c->theta, 1, 1e12}, {"norm epsilon", c->eps, 1e-15, 1},
        {"initial deviation", c->init_std, 1e-9, 100}, {"router skew", c->router_skew, 0, 8},
    };
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        CHECK_CONFIG(numbers[i].value >= numbers[i].min && numbers[i].value <= numbers[i].max,
                    "the model's %s is %g, it must be %g..%g", numbers[i].what, numbers[i].value, numbers[i].min, numbers[i].max);
}

ModelSize config_size(const ModelConfig *c) {
    Params ps;
    params_build(&ps, c, 0, 1);
    ModelSize s = {0};
    int64_t products = 0; // weights of the matrices that a token is multiplied with
    for (int i = 0; i < ps.n; i++) {
        const Param *p = &ps.p[i];
        if (p->owner == OWNER_STATE) continue;
        int64_t met = p->owner == OWNER_EXPERT ? (int64_t)p->n_unit * c->K : (int64_t)p->n;
        int looked_up = strcmp(p->name, "embed") == 0 && !c->tied;
        s.params += (int64_t)p->n;
        s.active += met;
        if (p->decay && !looked_up) products += met;
    }
    params_free(&ps);
    s.flops_per_token = 6 * products + (int64_t)SIZE(6, c->L, c->T, c->NH, c->HS);
    return s;
}
