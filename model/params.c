// The one table of parameters: everything that walks the model's tensors walks this.
#include "kernels/rng.h"
#include "model/state.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static Param *add(Params *ps, Owner owner, int layer, const char *name, Init init, int decay) {
    Param *p = &ps->p[ps->n++];
    *p = (Param){.owner = owner, .layer = layer, .decay = decay, .init = init};
    if (layer < 0) snprintf(p->name, sizeof p->name, "%s", name);
    else snprintf(p->name, sizeof p->name, "layers.%d.%s", layer, name);
    return p;
}

// A piece follows the one before it. cols 0: one dimension.
static void piece(Param *p, const char *format, int64_t rows, int64_t cols, double std) {
    p->pieces[p->n_pieces++] = (Piece){.format = format, .first = (int64_t)p->n_unit, .rows = rows, .cols = cols, .std = std};
    p->n_unit += cols ? SIZE(rows, cols) : SIZE(rows);
}

static void add_attention(Params *ps, const ModelConfig *c, int l, double std, double std_out) {
    Param *p = add(ps, OWNER_REPL, l, "ln1", INIT_ONE, 0);
    piece(p, "model.layers.%d.input_layernorm.weight", c->C, 0, 0);
    p = add(ps, OWNER_REPL, l, "qkv", INIT_NORMAL, 1);
    piece(p, "model.layers.%d.self_attn.q_proj.weight", (int64_t)c->NH * c->HS, c->C, std);
    piece(p, "model.layers.%d.self_attn.k_proj.weight", (int64_t)c->NKV * c->HS, c->C, std);
    piece(p, "model.layers.%d.self_attn.v_proj.weight", (int64_t)c->NKV * c->HS, c->C, std);
    p = add(ps, OWNER_REPL, l, "q_norm", INIT_ONE, 0);
    piece(p, "model.layers.%d.self_attn.q_norm.weight", c->HS, 0, 0);
    p = add(ps, OWNER_REPL, l, "k_norm", INIT_ONE, 0);
    piece(p, "model.layers.%d.self_attn.k_norm.weight", c->HS, 0, 0);
    p = add(ps, OWNER_REPL, l, "wo", INIT_NORMAL, 1);
    piece(p, "model.layers.%d.self_attn.o_proj.weight", c->C, (int64_t)c->NH * c->HS, std_out);
    p = add(ps, OWNER_REPL, l, "ln2", INIT_ONE, 0);
    piece(p, "model.layers.%d.post_attention_layernorm.weight", c->C, 0, 0);
}

static void add_ffn(Param *p, const char *gate, const char *up, const char *down, int C, int64_t F, double std, double std_out) {
    piece(p, gate, F, C, std);
    piece(p, up, F, C, std);
    piece(p, down, C, F, std_out);
}

static void add_moe(Params *ps, const ModelConfig *c, int l, double std, double std_out) {
    Param *p = add(ps, OWNER_REPL, l, "router", INIT_ROUTER, 1);
    piece(p, "model.layers.%d.mlp.gate.weight", c->E, c->C, std);
    if (c->bias) {
        p = add(ps, OWNER_STATE, l, "bias", INIT_ZERO, 0);
        piece(p, "model.layers.%d.mlp.gate.e_score_correction_bias", c->E, 0, 0);
    }
    p = add(ps, OWNER_EXPERT, l, "experts", INIT_NORMAL, 1);
    add_ffn(p, "model.layers.%d.mlp.experts.%d.gate_proj.weight", "model.layers.%d.mlp.experts.%d.up_proj.weight",
            "model.layers.%d.mlp.experts.%d.down_proj.weight", c->C, c->F, std, std_out);
    if (c->n_shared) {
        p = add(ps, OWNER_REPL, l, "shared", INIT_NORMAL, 1);
        add_ffn(p, "model.layers.%d.mlp.shared_experts.gate_proj.weight", "model.layers.%d.mlp.shared_experts.up_proj.weight",
                "model.layers.%d.mlp.shared_experts.down_proj.weight", c->C, (int64_t)c->n_shared * c->F, std, std_out);
    }
}

void params_build(Params *ps, const ModelConfig *c, int rank, int R) {
    CHECK_USAGE(c->E % R == 0, "the model has %d experts for %d ranks of an expert-parallel group, the ranks must divide them", c->E,
                R);
    double std = c->init_std, std_out = std / sqrt(2.0 * c->L);
    *ps = (Params){.p = host_alloc(SIZE(3 + 10 * c->L, sizeof(Param)))};
    Param *p = add(ps, OWNER_REPL, -1, "embed", INIT_NORMAL, 1);
    piece(p, "model.embed_tokens.weight", c->V, c->C, std);
    for (int l = 0; l < c->L; l++) {
        add_attention(ps, c, l, std, std_out);
        if (c->dense[l]) {
            p = add(ps, OWNER_REPL, l, "mlp", INIT_NORMAL, 1);
            add_ffn(p, "model.layers.%d.mlp.gate_proj.weight", "model.layers.%d.mlp.up_proj.weight",
                    "model.layers.%d.mlp.down_proj.weight", c->C, c->F_dense, std, std_out);
        } else {
            add_moe(ps, c, l, std, std_out);
        }
    }
    p = add(ps, OWNER_REPL, -1, "norm", INIT_ONE, 0);
    piece(p, "model.norm.weight", c->C, 0, 0);
    if (!c->tied) {
        p = add(ps, OWNER_REPL, -1, "head", INIT_NORMAL, 1);
        piece(p, "lm_head.weight", c->V, c->C, std);
    }
    for (int i = 0; i < ps->n; i++) {
        p = &ps->p[i];
        size_t *arena = p->owner == OWNER_STATE ? &ps->n_state : &ps->arena[p->owner].n;
        if (p->owner == OWNER_EXPERT) {
            p->n_experts = c->E / R;
            p->first_expert = rank * p->n_experts;
        }
        p->n = p->owner == OWNER_EXPERT ? SIZE(p->n_experts, (int64_t)p->n_unit) : p->n_unit;
        p->offset = *arena;
        *arena += p->n;
    }
}

void params_alloc(Params *ps, Dev *d, Comm *ep, int training) {
    dev_kind(d, MEMORY_WEIGHTS);
    Arena *repl = &ps->arena[OWNER_REPL], *expert = &ps->arena[OWNER_EXPERT];
    repl->w = dev_alloc(d, SIZE((int64_t)repl->n, sizeof(real)), "replicated parameters");
    if (expert->n) {
        ps->expert_peer = comm_window(ep, SIZE((int64_t)expert->n, sizeof(real)), "experts");
        expert->w = ps->expert_peer[comm_info(ep)->rank];
    }
    ps->state = dev_alloc(d, SIZE((int64_t)ps->n_state, sizeof(wide)), "selection biases");
    if (!training) return;
    dev_kind(d, MEMORY_GRADIENTS);
    repl->g = dev_alloc(d, SIZE((int64_t)repl->n, sizeof(wide)), "gradients of replicated parameters");
    expert->g = dev_alloc(d, SIZE((int64_t)expert->n, sizeof(wide)), "gradients of experts");
}

static void init_normal(const Params *ps, const Param *p, Dev *d, uint64_t seed) {
    real *w = param_w(ps, p);
    uint64_t stream = rng_name(p->name);
    int units = p->owner == OWNER_EXPERT ? p->n_experts : 1;
    for (int e = 0; e < units; e++)
        for (int i = 0; i < p->n_pieces; i++) {
            const Piece *k = &p->pieces[i];
            size_t first = (size_t)k->first, n = SIZE(k->rows, k->cols);
            dev_init_normal(d, w + (size_t)e * p->n_unit + first, n, seed, stream,
                            (uint64_t)(p->first_expert + e) * p->n_unit + first, k->std);
        }
}

void params_init(Params *ps, Dev *d, const ModelConfig *c, uint64_t seed) {
    for (int i = 0; i < ps->n; i++) {
        const Param *p = &ps->p[i];
        switch (p->init) {
        case INIT_NORMAL:
        case INIT_ROUTER: init_normal(ps, p, d, seed); break;
        case INIT_ONE: dev_fill(d, param_w(ps, p), p->n, 1); break;
        case INIT_ZERO: dev_zero(d, param_state(ps, p), p->n * sizeof(wide)); break;
        }
    }
    if (c->router_skew > 0) skew_init(ps, d, c, seed);
}

void params_free(Params *ps) {
    free(ps->p);
    *ps = (Params){0};
}

real *param_w(const Params *ps, const Param *p) {
    if (p->owner == OWNER_STATE) return NULL;
    return ps->arena[p->owner].w + p->offset;
}

wide *param_g(const Params *ps, const Param *p) {
    wide *arena = p->owner == OWNER_STATE ? NULL : ps->arena[p->owner].g;
    return arena ? arena + p->offset : NULL;
}

wide *param_state(const Params *ps, const Param *p) {
    return p->owner == OWNER_STATE ? ps->state + p->offset : NULL;
}

const Param *param_find(const Params *ps, const char *name, int layer) {
    char full[sizeof ps->p->name];
    if (layer < 0) snprintf(full, sizeof full, "%s", name);
    else snprintf(full, sizeof full, "layers.%d.%s", layer, name);
    for (int i = 0; i < ps->n; i++)
        if (strcmp(ps->p[i].name, full) == 0) return &ps->p[i];
    CHECK_USAGE(0, "the model has no parameter \"%s\"", full);
    return NULL;
}
