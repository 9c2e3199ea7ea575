#include "tests/ref/model_ref.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- tensors ---------------------------------------------------------------------------------------------------------

static void tensor(RefTable *t, size_t n, const char *fmt, ...) {
    t->t = realloc(t->t, (size_t)(t->n + 1) * sizeof *t->t);
    RefTensor *x = &t->t[t->n++];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(x->name, sizeof x->name, fmt, ap);
    va_end(ap);
    x->n = n;
    x->w = calloc(n, sizeof(double));
}

static void ffn_tensors(RefTable *t, const char *where, int l, size_t F, size_t C) {
    tensor(t, F * C, "model.layers.%d.mlp.%sgate_proj.weight", l, where);
    tensor(t, F * C, "model.layers.%d.mlp.%sup_proj.weight", l, where);
    tensor(t, C * F, "model.layers.%d.mlp.%sdown_proj.weight", l, where);
}

RefTable ref_table(const RefConfig *c) {
    RefTable t = {0};
    size_t C = (size_t)c->C, HS = (size_t)c->HS, q = (size_t)c->NH * HS, kv = (size_t)c->NKV * HS;
    tensor(&t, (size_t)c->V * C, "model.embed_tokens.weight");
    tensor(&t, C, "model.norm.weight");
    if (!c->tied) tensor(&t, (size_t)c->V * C, "lm_head.weight");
    for (int l = 0; l < c->L; l++) {
        tensor(&t, C, "model.layers.%d.input_layernorm.weight", l);
        tensor(&t, C, "model.layers.%d.post_attention_layernorm.weight", l);
        tensor(&t, q * C, "model.layers.%d.self_attn.q_proj.weight", l);
        tensor(&t, kv * C, "model.layers.%d.self_attn.k_proj.weight", l);
        tensor(&t, kv * C, "model.layers.%d.self_attn.v_proj.weight", l);
        tensor(&t, C * q, "model.layers.%d.self_attn.o_proj.weight", l);
        tensor(&t, HS, "model.layers.%d.self_attn.q_norm.weight", l);
        tensor(&t, HS, "model.layers.%d.self_attn.k_norm.weight", l);
        if (c->dense[l]) {
            ffn_tensors(&t, "", l, (size_t)c->F_dense, C);
            continue;
        }
        tensor(&t, (size_t)c->E * C, "model.layers.%d.mlp.gate.weight", l);
        if (c->bias) tensor(&t, (size_t)c->E, "model.layers.%d.mlp.gate.e_score_correction_bias", l);
        if (c->n_shared) ffn_tensors(&t, "shared_experts.", l, (size_t)c->n_shared * (size_t)c->F, C);
        for (int e = 0; e < c->E; e++) {
            char where[32];
            snprintf(where, sizeof where, "experts.%d.", e);
            ffn_tensors(&t, where, l, (size_t)c->F, C);
        }
    }
    return t;
}

void ref_table_free(RefTable *t) {
    for (int i = 0; i < t->n; i++) free(t->t[i].w);
    free(t->t);
    *t = (RefTable){0};
}

RefTensor *ref_find(const RefTable *t, const char *name) {
    for (int i = 0; i < t->n; i++)
        if (strcmp(t->t[i].name, name) == 0) return &t->t[i];
    return NULL;
}

static const double *get(const RefTable *t, const char *fmt, ...) {
    char name[96];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(name, sizeof name, fmt, ap);
    va_end(ap);
    RefTensor *x = ref_find(t, name);
    if (!x) fprintf(stderr, "the oracle misses %s\n", name), abort();
    return x->w;
}

// ---- pieces ------------------------------------------------------------------------------------------------------------

static double dot(const double *a, const double *b, int n) {
    double s = 0;
    for (int i = 0; i < n; i++) s += a[i] * b[i];
    return s;
}

static void times(double *y, const double *w, const double *x, int rows, int cols) {
    for (int r = 0; r < rows; r++) y[r] = dot(w + (size_t)r * (size_t)cols, x, cols);
}

static void norm(double *y, const double *x, const double *w, int n, double eps) {
    double r = 1 / sqrt(dot(x, x, n) / n + eps);
    for (int i = 0; i < n; i++) y[i] = x[i] * r * w[i];
}

static void rotate(double *x, int HS, int pos, double theta) {
    for (int j = 0; j < HS / 2; j++) {
        double a = pos * pow(theta, -2.0 * j / HS), p = x[j], q = x[j + HS / 2];
        x[j] = p * cos(a) - q * sin(a);
        x[j + HS / 2] = q * cos(a) + p * sin(a);
    }
}

// y += scale * SwiGLU network of width F
static void add_ffn(double *y, const double *x, const RefTable *w, const char *where, int l, int C, int F, double scale) {
    const double *gate = get(w, "model.layers.%d.mlp.%sgate_proj.weight", l, where);
    const double *up = get(w, "model.layers.%d.mlp.%sup_proj.weight", l, where);
    const double *down = get(w, "model.layers.%d.mlp.%sdown_proj.weight", l, where);
    for (int f = 0; f < F; f++) {
        double g = dot(gate + (size_t)f * (size_t)C, x, C), u = dot(up + (size_t)f * (size_t)C, x, C);
        double h = g / (1 + exp(-g)) * u;
        for (int i = 0; i < C; i++) y[i] += scale * h * down[(size_t)i * (size_t)F + (size_t)f];
    }
}

// x (T,C), the residual stream of one sequence, += attention
static void attention(const RefConfig *c, const RefTable *w, int l, double *x, const int *first, int T) {
    int C = c->C, HS = c->HS, nq = c->NH * HS, nk = c->NKV * HS;
    double *q = malloc((size_t)T * (size_t)(nq + 2 * nk) * sizeof(double)), *k = q + (size_t)T * (size_t)nq;
    double *v = k + (size_t)T * (size_t)nk;
    double *n1 = malloc((size_t)(C + nq + T) * sizeof(double)), *o = n1 + C, *p = o + nq;
    for (int t = 0; t < T; t++) {
        double *qt = q + (size_t)t * (size_t)nq, *kt = k + (size_t)t * (size_t)nk, *vt = v + (size_t)t * (size_t)nk;
        norm(n1, x + (size_t)t * (size_t)C, get(w, "model.layers.%d.input_layernorm.weight", l), C, c->eps);
        times(qt, get(w, "model.layers.%d.self_attn.q_proj.weight", l), n1, nq, C);
        times(kt, get(w, "model.layers.%d.self_attn.k_proj.weight", l), n1, nk, C);
        times(vt, get(w, "model.layers.%d.self_attn.v_proj.weight", l), n1, nk, C);
        for (int h = 0; h < c->NH + c->NKV; h++) {
            double *head = h < c->NH ? qt + h * HS : kt + (h - c->NH) * HS;
            norm(head, head, get(w, h < c->NH ? "model.layers.%d.self_attn.q_norm.weight" : "model.layers.%d.self_attn.k_norm.weight", l),
                 HS, c->eps);
            rotate(head, HS, t, c->theta);
        }
    }
    const double *wo = get(w, "model.layers.%d.self_attn.o_proj.weight", l);
    for (int t = 0; t < T; t++) {
        int from = c->doc_mask && first ? first[t] : 0;
        for (int h = 0; h < c->NH; h++) {
            int kv = h / (c->NH / c->NKV) * HS;
            double sum = 0, top = -INFINITY, *oh = o + h * HS;
            for (int s = from; s <= t; s++) {
                p[s] = dot(q + (size_t)t * (size_t)nq + h * HS, k + (size_t)s * (size_t)nk + kv, HS) / sqrt(HS);
                top = fmax(top, p[s]);
            }
            for (int s = from; s <= t; s++) sum += p[s] = exp(p[s] - top);
            for (int j = 0; j < HS; j++) oh[j] = 0;
            for (int s = from; s <= t; s++)
                for (int j = 0; j < HS; j++) oh[j] += p[s] / sum * v[(size_t)s * (size_t)nk + (size_t)(kv + j)];
        }
        for (int i = 0; i < C; i++) x[(size_t)t * (size_t)C + (size_t)i] += dot(wo + (size_t)i * (size_t)nq, o, nq);
    }
    free(q);
    free(n1);
}

// What the losses need of one token in one layer.
typedef struct Routed {
    double *prob;          // (E), sums to 1
    unsigned char *chosen; // (E)
    double lse;
} Routed;

static void route(const RefConfig *c, const RefTable *w, int l, const double *x, double *weight, Routed *r) {
    int E = c->E;
    double logit[64], score[64], pick[64], sum = 0, top = -INFINITY, chosen_sum = 0;
    times(logit, get(w, "model.layers.%d.mlp.gate.weight", l), x, E, c->C);
    const double *bias = c->bias ? get(w, "model.layers.%d.mlp.gate.e_score_correction_bias", l) : NULL;
    for (int e = 0; e < E; e++) top = fmax(top, logit[e]);
    for (int e = 0; e < E; e++) sum += exp(logit[e] - top);
    r->lse = top + log(sum);
    double score_sum = 0;
    for (int e = 0; e < E; e++) {
        score[e] = c->sigmoid ? 1 / (1 + exp(-logit[e])) : exp(logit[e] - r->lse);
        score_sum += score[e];
        pick[e] = score[e] + (bias ? bias[e] : 0);
        r->chosen[e] = 0;
        weight[e] = 0;
    }
    for (int k = 0; k < c->K; k++) {
        int best = -1;
        for (int e = 0; e < E; e++)
            if (!r->chosen[e] && (best < 0 || pick[e] > pick[best])) best = e;
        r->chosen[best] = 1;
        chosen_sum += score[best];
    }
    for (int e = 0; e < E; e++) {
        if (r->chosen[e]) weight[e] = score[e] / (c->renorm ? chosen_sum + (c->sigmoid ? 1e-20 : 0) : 1) * c->routed_scale;
        r->prob[e] = score[e] / score_sum;
    }
}

// logits (T,V) of one sequence; routed: for (layer, token) of MoE layers
static void sequence(const RefConfig *c, const RefTable *w, double *logits, Routed *routed, const int *tok, const int *first, int T) {
    int C = c->C;
    double *x = malloc((size_t)(T + 1) * (size_t)C * sizeof(double)), *n = x + (size_t)T * (size_t)C, weight[64];
    const double *embed = get(w, "model.embed_tokens.weight");
    for (int t = 0; t < T; t++) memcpy(x + (size_t)t * (size_t)C, embed + (size_t)tok[t] * (size_t)C, (size_t)C * sizeof(double));
    for (int l = 0, moe = 0; l < c->L; l++) {
        attention(c, w, l, x, first, T);
        for (int t = 0; t < T; t++) {
            double *xt = x + (size_t)t * (size_t)C;
            norm(n, xt, get(w, "model.layers.%d.post_attention_layernorm.weight", l), C, c->eps);
            if (c->dense[l]) {
                add_ffn(xt, n, w, "", l, C, c->F_dense, 1);
                continue;
            }
            route(c, w, l, n, weight, &routed[moe * T + t]);
            for (int e = 0; e < c->E; e++) {
                char where[32];
                snprintf(where, sizeof where, "experts.%d.", e);
                if (weight[e] != 0) add_ffn(xt, n, w, where, l, C, c->F, weight[e]);
            }
            if (c->n_shared) add_ffn(xt, n, w, "shared_experts.", l, C, c->n_shared * c->F, 1);
        }
        moe += !c->dense[l];
    }
    for (int t = 0; t < T; t++) {
        norm(n, x + (size_t)t * (size_t)C, get(w, "model.norm.weight"), C, c->eps);
        times(logits + (size_t)t * (size_t)c->V, get(w, c->tied ? "model.embed_tokens.weight" : "lm_head.weight"), n, c->V, C);
    }
    free(x);
}

// ---- losses ------------------------------------------------------------------------------------------------------------

// E sum_e f_e P_e over n tokens of one layer
static double balance(const RefConfig *c, Routed *const *token, int n) {
    double loss = 0;
    for (int e = 0; e < c->E; e++) {
        double f = 0, p = 0;
        for (int i = 0; i < n; i++) f += token[i]->chosen[e], p += token[i]->prob[e];
        loss += f / ((double)n * c->K) * (p / n);
    }
    return c->E * loss;
}

static Routed *new_routed(const RefConfig *c, int n) {
    Routed *r = calloc((size_t)n + 1, sizeof *r);
    for (int i = 0; i < n; i++) {
        r[i].prob = calloc((size_t)c->E + 1, sizeof(double));
        r[i].chosen = calloc((size_t)c->E + 1, 1);
    }
    return r;
}

static void free_routed(Routed *r, int n) {
    for (int i = 0; i < n; i++) free(r[i].prob), free(r[i].chosen);
    free(r);
}

RefLoss ref_loss(const RefConfig *c, const RefTable *w, const RefBatch *batch, int n) {
    RefLoss r = {.choices = 14695981039346656037ull};
    int layers = 0, tokens = 0;
    for (int l = 0; l < c->L; l++) layers += !c->dense[l];
    for (int b = 0; b < n; b++) tokens += batch[b].B * batch[b].T;
    Routed **of = calloc((size_t)layers * (size_t)tokens + 1, sizeof *of); // (layers, tokens)
    Routed **owned = calloc((size_t)tokens + 1, sizeof *owned);
    int *owned_n = calloc((size_t)tokens + 1, sizeof(int)), n_owned = 0, at = 0;
    for (int b = 0; b < n; b++)
        for (int s = 0; s < batch[b].B; s++) {
            int T = batch[b].T;
            const int *tok = batch[b].tok + s * T, *target = batch[b].target + s * T;
            double *logits = malloc((size_t)T * (size_t)c->V * sizeof(double));
            Routed *routed = owned[n_owned] = new_routed(c, layers * T);
            owned_n[n_owned++] = layers * T;
            sequence(c, w, logits, routed, tok, batch[b].first ? batch[b].first + s * T : NULL, T);
            for (int t = 0; t < T; t++) {
                double *row = logits + (size_t)t * (size_t)c->V, top = -INFINITY, sum = 0;
                for (int v = 0; v < c->V; v++) top = fmax(top, row[v]);
                for (int v = 0; v < c->V; v++) sum += exp(row[v] - top);
                if (target[t] >= 0) r.nll += top + log(sum) - row[target[t]];
                for (int l = 0; l < layers; l++) of[l * tokens + at + t] = &routed[l * T + t];
            }
            at += T;
            free(logits);
        }
    for (int l = 0; l < layers; l++) {
        at = 0;
        if (c->scope == REF_GLOBAL) r.aux += balance(c, of + l * tokens, tokens) / layers;
        for (int b = 0; b < n; b++)
            for (int s = 0; s < batch[b].B; s++, at += batch[b].T) {
                double share = 1.0 / tokens / layers;
                if (c->scope == REF_SEQ) r.aux += balance(c, of + l * tokens + at, batch[b].T) * batch[b].T * share;
                if (c->scope == REF_MICRO && s == 0)
                    r.aux += balance(c, of + l * tokens + at, batch[b].B * batch[b].T) * batch[b].B * batch[b].T * share;
            }
        for (int t = 0; t < tokens; t++) {
            Routed *x = of[l * tokens + t];
            r.z += x->lse * x->lse / tokens / layers;
            for (int e = 0; e < c->E; e++) r.choices = (r.choices ^ (x->chosen[e] + 1u)) * 1099511628211ull;
        }
    }
    r.total = r.nll / tokens + c->aux_coef * r.aux + c->z_coef * r.z;
    for (int i = 0; i < n_owned; i++) free_routed(owned[i], owned_n[i]);
    free(owned);
    free(owned_n);
    free(of);
    return r;
}

void ref_logits(const RefConfig *c, const RefTable *w, double *logits, const int *tok, int T) {
    Routed *r = new_routed(c, c->L * T);
    sequence(c, w, logits, r, tok, NULL, T);
    free_routed(r, c->L * T);
}
