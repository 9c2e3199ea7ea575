#include "train/hf.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum { QWEN3, QWEN3_MOE, DOTS1, MOE_C, CLASSES } Class;
static const struct { const char *type, *architecture; } classes[CLASSES] = {
    {"qwen3", "Qwen3ForCausalLM"}, {"qwen3_moe", "Qwen3MoeForCausalLM"}, {"dots1", "Dots1ForCausalLM"}, {"moe_c", "MoeCForCausalLM"}};

static int first_dense(const ModelConfig *c) {
    int n = 0;
    while (n < c->L && c->dense[n]) n++;
    return n;
}

static Class class_of(const ModelConfig *c) {
    int first = first_dense(c), later = 0;
    if (first == c->L) return QWEN3;
    for (int l = first; l < c->L; l++) later |= c->dense[l];
    if (c->score == ROUTER_SIGMOID) return c->bias && !later ? DOTS1 : MOE_C;
    return c->bias || c->n_shared || c->routed_scale != 1 ? MOE_C : QWEN3_MOE;
}

// ---- writing ---------------------------------------------------------------------------------------------------------
static void put_int(json_t *j, const char *key, int64_t v) { json_object_set_new(j, key, json_integer(v)); }
static void put_real(json_t *j, const char *key, double v) { json_object_set_new(j, key, json_real(v)); }
static void put_bool(json_t *j, const char *key, int v) { json_object_set_new(j, key, json_boolean(v)); }
static void put_text(json_t *j, const char *key, const char *v) { json_object_set_new(j, key, v ? json_string(v) : json_null()); }

static void put_common(json_t *j, const ModelConfig *c, Class class, int separator) {
    const char *dtype = sizeof(real) == 8 ? "float64" : "float32";
    json_object_set_new(j, "architectures", json_pack("[s]", classes[class].architecture));
    put_text(j, "model_type", classes[class].type);
    put_int(j, "vocab_size", c->V);
    put_int(j, "hidden_size", c->C);
    put_int(j, "num_hidden_layers", c->L);
    put_int(j, "num_attention_heads", c->NH);
    put_int(j, "num_key_value_heads", c->NKV);
    put_int(j, "head_dim", c->HS);
    put_text(j, "hidden_act", "silu");
    put_int(j, "max_position_embeddings", c->T);
    put_real(j, "rms_norm_eps", c->eps);
    put_real(j, "rope_theta", c->theta);
    json_object_set_new(j, "rope_parameters", json_pack("{s:s, s:f}", "rope_type", "default", "rope_theta", c->theta));
    put_bool(j, "attention_bias", 0);
    put_real(j, "attention_dropout", 0);
    put_bool(j, "tie_word_embeddings", c->tied);
    put_int(j, "intermediate_size", c->F_dense ? c->F_dense : c->F); // not used without a dense layer, but wanted
    put_real(j, "initializer_range", c->init_std);
    put_bool(j, "use_cache", 1);
    put_text(j, "sliding_window", NULL);
    put_int(j, "max_window_layers", c->L);
    put_int(j, "bos_token_id", separator);
    put_int(j, "eos_token_id", separator);
    put_text(j, "torch_dtype", dtype);
    put_text(j, "dtype", dtype);
}

static void put_experts(json_t *j, const ModelConfig *c, Class class, double aux_coef) {
    put_int(j, "moe_intermediate_size", c->F);
    put_int(j, "num_experts_per_tok", c->K);
    put_bool(j, "norm_topk_prob", c->renorm);
    if (class != DOTS1) {
        json_t *dense = json_array();
        for (int l = 0; l < c->L; l++)
            if (c->dense[l]) json_array_append_new(dense, json_integer(l));
        json_object_set_new(j, "mlp_only_layers", dense);
        put_int(j, "num_experts", c->E);
        put_int(j, "num_local_experts", c->E);
        put_int(j, "decoder_sparse_step", 1);
        put_real(j, "router_aux_loss_coef", aux_coef / c->K);
        put_bool(j, "output_router_logits", 0);
        put_bool(j, "use_sliding_window", 0);
    } else {
        json_t *full = json_array();
        for (int l = 0; l < c->L; l++) json_array_append_new(full, json_string("full_attention"));
        json_object_set_new(j, "layer_types", full);
        put_int(j, "n_routed_experts", c->E);
        put_int(j, "first_k_dense_replace", first_dense(c));
        put_int(j, "n_group", 1);
        put_int(j, "topk_group", 1);
    }
    if (class == DOTS1 || class == MOE_C) {
        put_int(j, "n_shared_experts", c->n_shared);
        put_real(j, "routed_scaling_factor", c->routed_scale);
        put_text(j, "scoring_func", c->score == ROUTER_SIGMOID ? "sigmoid" : "softmax");
    }
    if (class == MOE_C) put_bool(j, "use_selection_bias", c->bias);
}

json_t *hf_config(const ModelConfig *c, double aux_coef, int separator) {
    Class class = class_of(c);
    json_t *j = json_object();
    put_common(j, c, class, separator);
    if (class != QWEN3) put_experts(j, c, class, aux_coef);
    return j;
}

// ---- reading ---------------------------------------------------------------------------------------------------------
typedef struct Source {
    json_t *j;
    const char *path;
} Source;

static json_t *get(const Source *s, const char *key) {
    json_t *v = json_object_get(s->j, key);
    return json_is_null(v) ? NULL : v;
}

static int get_int(const Source *s, const char *key, int missing) {
    json_t *v = get(s, key);
    if (!v && missing >= 0) return missing;
    CHECK_DATA(v, "%s: \"%s\" is missing", s->path, key);
    CHECK_DATA(json_is_integer(v) && json_integer_value(v) >= 0 && json_integer_value(v) <= INT32_MAX,
               "%s: \"%s\" must be a whole number from 0 to %d", s->path, key, INT32_MAX);
    return (int)json_integer_value(v);
}

static double get_real(const Source *s, const char *key, double missing) {
    json_t *v = get(s, key);
    if (!v && !isnan(missing)) return missing;
    CHECK_DATA(v, "%s: \"%s\" is missing", s->path, key);
    CHECK_DATA(json_is_number(v), "%s: \"%s\" must be a number", s->path, key);
    return json_number_value(v);
}

static int get_bool(const Source *s, const char *key, int missing) {
    json_t *v = get(s, key);
    if (!v && missing >= 0) return missing;
    CHECK_DATA(json_is_boolean(v), "%s: \"%s\" %s, expected true or false", s->path, key, v ? "is another kind of value" : "is missing");
    return json_is_true(v);
}

static void refuse(const Source *s, const char *key, int condition, const char *expected) {
    if (!condition) return;
    char *text = json_dumps(json_object_get(s->j, key), JSON_ENCODE_ANY);
    die(STATUS_DATA, __FILE__, __LINE__, "%s: \"%s\" is %s, this program computes only %s", s->path, key, text, expected);
}

static Class read_class(const Source *s) {
    const char *type = json_string_value(get(s, "model_type"));
    CHECK_DATA(type, "%s: \"model_type\" is missing", s->path);
    for (int i = 0; i < CLASSES; i++)
        if (strcmp(type, classes[i].type) == 0) return i;
    die(STATUS_DATA, __FILE__, __LINE__, "%s: \"model_type\" is %s, expected qwen3, qwen3_moe, dots1 or moe_c (other classes compute "
        "something else with the same tensors)", s->path, type);
}

// Keys whose other values mean another arithmetic.
static void check_arithmetic(const Source *s) {
    const char *act = json_string_value(get(s, "hidden_act"));
    refuse(s, "hidden_act", act && strcmp(act, "silu") != 0, "silu");
    refuse(s, "attention_bias", get_bool(s, "attention_bias", 0), "attention without bias");
    refuse(s, "use_sliding_window", get_bool(s, "use_sliding_window", 0), "full attention");
    refuse(s, "rope_scaling", get(s, "rope_scaling") != NULL, "plain rotary embeddings");
    json_t *rope = get(s, "rope_parameters");
    const char *rope_type = json_string_value(json_object_get(rope, "rope_type"));
    refuse(s, "rope_parameters", rope_type && strcmp(rope_type, "default") != 0, "plain rotary embeddings");
    refuse(s, "partial_rotary_factor", get_real(s, "partial_rotary_factor", 1) != 1, "rotation of whole heads");
    refuse(s, "n_group", get_int(s, "n_group", 1) > 1, "selection without groups");
    json_t *kinds = get(s, "layer_types"), *kind;
    size_t l;
    json_array_foreach(kinds, l, kind) {
        const char *name = json_string_value(kind);
        refuse(s, "layer_types", !name || strcmp(name, "full_attention") != 0, "full attention");
    }
}

static void read_dense(const Source *s, ModelConfig *c, Class class) {
    if (class == DOTS1) {
        int first = get_int(s, "first_k_dense_replace", -1);
        CHECK_DATA(first <= c->L, "%s: \"first_k_dense_replace\" is %d, the model has %d layers", s->path, first, c->L);
        memset(c->dense, 1, (size_t)first);
        return;
    }
    int every = get_int(s, "decoder_sparse_step", 1);
    CHECK_DATA(every >= 1, "%s: \"decoder_sparse_step\" is 0, expected at least 1", s->path);
    for (int l = 0; l < c->L; l++) c->dense[l] = (l + 1) % every != 0;
    json_t *v;
    size_t i;
    json_array_foreach(get(s, "mlp_only_layers"), i, v) {
        CHECK_DATA(json_is_integer(v) && json_integer_value(v) >= 0 && json_integer_value(v) < c->L,
                   "%s: \"mlp_only_layers\" names a layer that is none of 0 to %d", s->path, c->L - 1);
        c->dense[json_integer_value(v)] = 1;
    }
}

static void read_experts(const Source *s, ModelConfig *c, Class class) {
    static const char *const keys[] = {"num_experts", "num_local_experts", "n_routed_experts"};
    const char *key = NULL;
    for (int i = 0; i < 3 && !key; i++)
        if (get(s, keys[i])) key = keys[i];
    CHECK_DATA(key, "%s: the number of experts is missing, expected num_experts, num_local_experts or n_routed_experts", s->path);
    c->E = get_int(s, key, -1);
    c->K = get_int(s, "num_experts_per_tok", -1);
    c->F = get_int(s, "moe_intermediate_size", -1);
    c->renorm = get_bool(s, "norm_topk_prob", -1);
    const char *score = json_string_value(get(s, "scoring_func"));
    CHECK_DATA(!score || strcmp(score, "softmax") == 0 || strcmp(score, "sigmoid") == 0,
               "%s: \"scoring_func\" is %s, expected softmax or sigmoid", s->path, score);
    c->score = score ? (strcmp(score, "sigmoid") == 0 ? ROUTER_SIGMOID : ROUTER_SOFTMAX) : class == DOTS1 ? ROUTER_SIGMOID : ROUTER_SOFTMAX;
    c->bias = class == DOTS1 || (class == MOE_C && get_bool(s, "use_selection_bias", -1));
    c->n_shared = class == QWEN3_MOE ? 0 : get_int(s, "n_shared_experts", 0);
    c->routed_scale = class == QWEN3_MOE ? 1 : get_real(s, "routed_scaling_factor", 1);
    read_dense(s, c, class);
}

ModelConfig hf_read(const char *dir) {
    char *path = path_join(dir, "config.json");
    size_t n;
    char *text = file_read(path, &n);
    json_error_t e;
    Source s = {json_loadb(text, n, JSON_REJECT_DUPLICATES, &e), path};
    CHECK_DATA(json_is_object(s.j), "%s: line %d: %s (expected a JSON object)", path, e.line, s.j ? "another kind of value" : e.text);
    Class class = read_class(&s);
    check_arithmetic(&s);
    ModelConfig c = {.V = get_int(&s, "vocab_size", -1), .C = get_int(&s, "hidden_size", -1), .L = get_int(&s, "num_hidden_layers", -1),
                     .NH = get_int(&s, "num_attention_heads", -1), .T = get_int(&s, "max_position_embeddings", -1), .routed_scale = 1,
                     .eps = get_real(&s, "rms_norm_eps", NAN), .tied = get_bool(&s, "tie_word_embeddings", 0),
                     .init_std = get_real(&s, "initializer_range", 0.02)};
    CHECK_DATA(c.L >= 1 && c.L <= MAX_L, "%s: \"num_hidden_layers\" is %d, expected 1 to %d", path, c.L, MAX_L);
    c.NKV = get_int(&s, "num_key_value_heads", c.NH);
    c.HS = get_int(&s, "head_dim", c.NH ? c.C / c.NH : 0);
    Source rope = {get(&s, "rope_parameters"), path};
    c.theta = rope.j && get(&rope, "rope_theta") ? get_real(&rope, "rope_theta", NAN) : get_real(&s, "rope_theta", 10000);
    if (class == QWEN3) memset(c.dense, 1, (size_t)c.L);
    else read_experts(&s, &c, class);
    int any_dense = 0;
    for (int l = 0; l < c.L; l++) any_dense |= c.dense[l];
    c.F_dense = any_dense ? get_int(&s, "intermediate_size", -1) : 0;
    config_check(&c, path);
    json_decref(s.j);
    free(text);
    free(path);
    return c;
}

const char *hf_differ(const ModelConfig *a, const ModelConfig *b) {
    int moe = first_dense(a) < a->L, dense = 0;
    for (int l = 0; l < a->L; l++) {
        if (l < b->L && a->dense[l] != b->dense[l]) return "which layers are dense";
        dense |= a->dense[l];
    }
    const struct { const char *name; double a, b; int used; } values[] = {
        {"vocab_size", a->V, b->V, 1}, {"hidden_size", a->C, b->C, 1}, {"num_hidden_layers", a->L, b->L, 1},
        {"num_attention_heads", a->NH, b->NH, 1}, {"num_key_value_heads", a->NKV, b->NKV, 1}, {"head_dim", a->HS, b->HS, 1},
        {"max_position_embeddings", a->T, b->T, 1}, {"rms_norm_eps", a->eps, b->eps, 1}, {"rope_theta", a->theta, b->theta, 1},
        {"tie_word_embeddings", a->tied, b->tied, 1}, {"intermediate_size", a->F_dense, b->F_dense, dense},
        {"the number of experts", a->E, b->E, moe}, {"num_experts_per_tok", a->K, b->K, moe}, {"moe_intermediate_size", a->F, b->F, moe},
        {"norm_topk_prob", a->renorm, b->renorm, moe}, {"scoring_func", a->score, b->score, moe}, {"use_selection_bias", a->bias, b->bias, moe},
        {"n_shared_experts", a->n_shared, b->n_shared, moe}, {"routed_scaling_factor", a->routed_scale, b->routed_scale, moe}};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (values[i].used && values[i].a != values[i].b) return values[i].name;
    return NULL;
}
