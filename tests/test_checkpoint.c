// Checkpoints: safetensors files, sound and damaged; config.json of every class; parameters and moments that survive a change of
// ranks and expert-parallel groups; fused experts; half precision; tensors missing, left over, of another shape.
#include "kernels/check.h"
#include "kernels/files.h"
#include "kernels/rng.h"
#include "tests/common/child.h"
#include "train/checkpoint.h"
#include "train/hf.h"
#include "train/safetensors.h"
#include "train/tensors.h"
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

static void write_bytes(const char *path, const void *data, size_t n) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    fclose(f);
}

// header as given, then `bytes` zero bytes of data
static void write_st(const char *path, const char *header, uint64_t length, size_t bytes) {
    size_t n = 8 + strlen(header) + bytes;
    unsigned char *file = host_alloc(n);
    for (int i = 0; i < 8; i++) file[i] = (unsigned char)(length >> 8 * i);
    memcpy(file + 8, header, strlen(header));
    write_bytes(path, file, n);
    free(file);
}

static void open_path(void *path) { st_close(st_open(path)); }

// ---- safetensors -----------------------------------------------------------------------------------------------------
static void damaged_files(void **state) {
    (void)state;
    static const struct { const char *header; int64_t length; size_t bytes; const char *says; } cases[] = {
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", -1, 8, NULL}, // sound
        {"{\"e\":{\"dtype\":\"F32\",\"shape\":[0,3],\"data_offsets\":[0,0]}}", -1, 0, NULL}, // empty is normal
        {"{\"__metadata__\":{\"format\":\"pt\"}}   ", -1, 0, NULL},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", -1, 7, "expected"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", -1, 9, "expected"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4000, 8, "header length"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", INT64_MAX, 8, "header length"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", -1, 8, "tensor a"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", -1, 8, "tensor a"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", -1, 8, "tensor a"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2305843009213693952,4],\"data_offsets\":[0,0]}}", -1, 0, "64 bits"},
        {"{\"a\":{\"dtype\":\"Q4\",\"shape\":[2],\"data_offsets\":[0,8]}}", -1, 8, "Q4"},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", -1, 8, "dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", -1, 8, "shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", -1, 8, "data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", -1, 8, "gap"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", -1, 8, "overlap"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", -1, 8, "JSON"},
        {"<html>404 Not Found</html>", -1, 0, "JSON"},
        {"[1, 2]", -1, 0, "JSON"},
    };
    char *dir = temp_dir(), *path = path_join(dir, "x.safetensors");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_st(path, cases[i].header, cases[i].length < 0 ? strlen(cases[i].header) : (uint64_t)cases[i].length, cases[i].bytes);
        Child c = child_call(open_path, path);
        if (c.status != (cases[i].says ? STATUS_DATA : 0) || (cases[i].says && (!strstr(c.out, cases[i].says) || !strstr(c.out, path))))
            fail_msg("case %zu ended with status %d and \"%s\", expected \"%s\"", i, c.status, c.out, cases[i].says ? cases[i].says : "success");
    }
    write_bytes(path, "abc", 3);
    assert_int_equal(child_call(open_path, path).status, STATUS_DATA);
    unlink(path);
    assert_int_equal(child_call(open_path, path).status, STATUS_DATA);
    free(path);
    temp_remove(dir);
}

// Values of the 16-bit formats from their definitions, subnormals and both zeros among them.
static void dtypes(void **state) {
    (void)state;
    static const struct { StDtype type; uint16_t bits; double value; } cases[] = {
        {ST_BF16, 0x3F80, 1}, {ST_BF16, 0xC0A0, -5}, {ST_BF16, 0x0000, 0}, {ST_BF16, 0x4049, 3.140625},
        {ST_F16, 0x3C00, 1}, {ST_F16, 0xC500, -5}, {ST_F16, 0x0001, 0x1p-24}, {ST_F16, 0x83FF, -1023 * 0x1p-24}, {ST_F16, 0x0400, 0x1p-14},
        {ST_F16, 0x7BFF, 65504}, {ST_F16, 0x8000, -0.0}};
    int n = sizeof cases / sizeof *cases;
    char *dir = temp_dir(), *path = path_join(dir, "x.safetensors"), name[64][16];
    StTensor t[64];
    for (int i = 0; i < n; i++) {
        snprintf(name[i], sizeof name[i], "t%d", i);
        t[i] = (StTensor){.name = name[i], .dtype = cases[i].type, .n_dims = 1, .shape = {1}};
    }
    StWriter *w = st_create(path, t, n);
    for (int i = 0; i < n; i++) st_append(w, &cases[i].bits, 2);
    st_finish(w);
    StFile *f = st_open(path);
    for (int i = 0; i < n; i++) {
        double d;
        float s;
        st_read(&d, ST_F64, f, st_find(f, name[i]), 0, 1);
        st_read(&s, ST_F32, f, st_find(f, name[i]), 0, 1);
        assert_true(d == cases[i].value && (double)s == cases[i].value && signbit(d) == signbit(cases[i].value));
    }
    assert_null(st_find(f, "t"));
    assert_null(st_find(f, "t99"));
    st_close(f);
    free(path);
    temp_remove(dir);
}

// ---- config.json -----------------------------------------------------------------------------------------------------
static ModelConfig small(int kind) {
    ModelConfig c;
    config_preset(&c, "demo");
    c.V = 61, c.C = 12, c.L = 3, c.NH = 4, c.NKV = 2, c.HS = 6, c.T = 9, c.E = 8, c.K = 3, c.F = 5, c.F_dense = 0;
    c.init_std = 0.3;
    if (kind == 1) c.dense[1] = 1, c.F_dense = 7, c.tied = 1, c.renorm = 0, c.theta = 12345;
    if (kind == 2) c.dense[0] = 1, c.F_dense = 7, c.score = ROUTER_SIGMOID, c.bias = 1, c.n_shared = 2, c.routed_scale = 2.5;
    if (kind == 3) c.bias = 1, c.n_shared = 1, c.eps = 1e-5; // of no class but our own
    if (kind == 4) c.dense[0] = c.dense[2] = 1, c.F_dense = 7, c.score = ROUTER_SIGMOID;
    if (kind == 5) c.E = c.K = c.F = c.renorm = 0, c.F_dense = 7, memset(c.dense, 1, 3);
    return c;
}
enum { KINDS = 6 };

static void put_config(const char *dir, const json_t *j) {
    char *path = path_join(dir, "config.json"), *text = json_dumps(j, 0);
    file_write(path, text, strlen(text));
    free(path), free(text);
}

static void config_round_trip(void **state) {
    (void)state;
    static const char *const class[KINDS] = {"Qwen3MoeForCausalLM", "Qwen3MoeForCausalLM", "Dots1ForCausalLM", "MoeCForCausalLM",
                                             "MoeCForCausalLM", "Qwen3ForCausalLM"};
    char *dir = temp_dir();
    for (int kind = 0; kind < KINDS; kind++) {
        ModelConfig c = small(kind);
        json_t *j = hf_config(&c, 0.03, 256);
        assert_string_equal(json_string_value(json_array_get(json_object_get(j, "architectures"), 0)), class[kind]);
        if (kind == 0) assert_true(fabs(json_number_value(json_object_get(j, "router_aux_loss_coef")) - 0.01) < 1e-15); // of transformers: ours / K
        put_config(dir, j);
        json_decref(j);
        ModelConfig back = hf_read(dir);
        assert_memory_equal(&back, &c, sizeof c);
        assert_null(hf_differ(&back, &c));
        back.NKV = 1;
        assert_string_equal(hf_differ(&back, &c), "num_key_value_heads");
        back = c, back.dense[1] ^= 1;
        assert_string_equal(hf_differ(&back, &c), "which layers are dense");
    }
    temp_remove(dir);
}

static void read_config(void *dir) { hf_read(dir); }

static void config_refused(void **state) {
    (void)state;
    static const char *const missing[] = {"model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts_per_tok",
                                          "moe_intermediate_size", "norm_topk_prob", "rms_norm_eps"};
    static const struct { const char *key, *value; } wrong[] = {
        {"model_type", "\"mixtral\""}, {"hidden_act", "\"gelu\""}, {"attention_bias", "true"}, {"rope_scaling", "{\"type\":\"yarn\"}"},
        {"use_sliding_window", "true"}, {"num_hidden_layers", "1000"}, {"vocab_size", "-3"}, {"mlp_only_layers", "[7]"},
        {"hidden_size", "12.5"}, {"scoring_func", "\"relu\""}};
    ModelConfig c = small(0);
    char *dir = temp_dir();
    for (size_t i = 0; i < sizeof missing / sizeof *missing; i++) {
        json_t *j = hf_config(&c, 0, 256);
        json_object_del(j, missing[i]);
        put_config(dir, j);
        json_decref(j);
        Child child = child_call(read_config, dir);
        if (child.status != STATUS_DATA || !strstr(child.out, missing[i])) fail_msg("without %s: %d %s", missing[i], child.status, child.out);
    }
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        json_t *j = hf_config(&c, 0, 256);
        json_object_set_new(j, wrong[i].key, json_loads(wrong[i].value, JSON_DECODE_ANY, NULL));
        put_config(dir, j);
        json_decref(j);
        Child child = child_call(read_config, dir);
        if (child.status != STATUS_DATA || !strstr(child.out, wrong[i].key)) fail_msg("%s: %d %s", wrong[i].key, child.status, child.out);
    }
    static const struct { const char *key; int value; } small_faults[] = {{"hidden_size", 1}, {"head_dim", 5}, {"num_experts_per_tok", 9}};
    for (int i = 0; i < 3; i++) {
        json_t *j = hf_config(&c, 0, 256);
        json_object_set_new(j, small_faults[i].key, json_integer(small_faults[i].value));
        put_config(dir, j);
        json_decref(j);
        Child child = child_call(read_config, dir);
        if (child.status != STATUS_DATA || !strstr(child.out, "config.json")) fail_msg("%s: %d %s", small_faults[i].key, child.status, child.out);
    }
    // every second layer an MoE layer
    json_t *sparse = hf_config(&c, 0, 256);
    json_object_set_new(sparse, "decoder_sparse_step", json_integer(2));
    put_config(dir, sparse);
    json_decref(sparse);
    ModelConfig alternating = hf_read(dir);
    assert_true(alternating.dense[0] && !alternating.dense[1] && alternating.dense[2] && alternating.F_dense == c.F);
    // the number of experts goes by three names
    json_t *j = hf_config(&c, 0, 256);
    json_object_del(j, "num_experts");
    put_config(dir, j);
    assert_int_equal(hf_read(dir).E, 8);
    json_object_del(j, "num_local_experts");
    put_config(dir, j);
    assert_int_equal(child_call(read_config, dir).status, STATUS_DATA);
    json_object_set_new(j, "n_routed_experts", json_integer(8));
    put_config(dir, j);
    assert_int_equal(hf_read(dir).E, 8);
    json_decref(j);
    temp_remove(dir);
}

// ---- whole checkpoints -----------------------------------------------------------------------------------------------
typedef struct Job {
    ModelConfig c;
    int ep, zero, write, poke; // poke: what to spoil an element of before the comparison: 1 the parameters, 2 their moments
    const char *dir;
    int64_t differ;      // elements that were not as they should be
} Job;

// What element i of a tensor holds: of its name alone, so that every rank of every layout knows it.
static double value_of(const char *name, uint64_t i) { return (double)(float)rng_normal(7, rng_name(name), i); }

// Where elements [*first, *first + *n) of a tensor, those that this rank keeps, lie
static void *target_of(const Params *ps, const Optimizer *opt, const Tensor *t, int moment, size_t *elem, size_t *first, size_t *n) {
    size_t at = (size_t)t->at;
    *elem = moment || t->param->owner == OWNER_STATE ? sizeof(wide) : sizeof(real);
    *first = 0;
    if (!moment && t->param->owner == OWNER_STATE) return param_state(ps, t->param) + at;
    if (!moment) return param_w(ps, t->param) + at;
    OptimizerPart own = optimizer_part(opt, ps, t->param);
    size_t lo = own.first > at ? own.first : at, hi = own.first + own.n < at + *n ? own.first + own.n : at + *n;
    if (lo >= hi) return NULL;
    *first = lo - at, *n = hi - lo;
    return own.state[moment == 1 ? STATE_M : STATE_V] + (lo - own.first);
}

static int64_t walk(Dev *d, const Params *ps, const Optimizer *opt, int fill) {
    static const char *const suffix[] = {"", ".exp_avg", ".exp_avg_sq"};
    Tensors list = tensors_list(ps, 1, 1);
    int64_t differ = 0;
    for (int i = 0; i < list.n; i++)
        for (int moment = 0; moment < 3; moment++) {
            size_t elem, first, n = SIZE(list.t[i].piece->rows, list.t[i].piece->cols ? list.t[i].piece->cols : 1);
            void *x = target_of(ps, opt, &list.t[i], moment, &elem, &first, &n);
            if (!x) continue;
            char *name = str_format("%s%s", list.t[i].name, suffix[moment]);
            char *host = host_alloc(n * elem);
            if (!fill) dev_download(d, host, x, n * elem);
            for (size_t k = 0; k < n; k++) {
                double v = value_of(name, first + k);
                if (fill && elem == 8) ((double *)(void *)host)[k] = v;
                else if (fill) ((float *)(void *)host)[k] = (float)v;
                else differ += (elem == 8 ? ((double *)(void *)host)[k] : (double)((float *)(void *)host)[k]) != v;
            }
            if (fill) dev_upload(d, x, host, n * elem);
            free(host), free(name);
        }
    tensors_free(&list);
    return differ;
}

static void body(Comm *world, void *arg) {
    Job *job = arg;
    Dev *d = dev_init((DevOptions){.threads = 1, .poison = 1, .shared = 1});
    comm_bind(world, d);
    Comm *ep = comm_block(world, job->ep);
    const CommInfo *info = comm_info(ep);
    ModelRun run = {.max_B = 1, .T = job->c.T, .micros = 1, .training = 1, .zero = job->zero, .seed = 3,
                    .cost = {.name = "test", .N = info->N, .G = info->G}, .plan = {.policy = POLICY_NONE, .block = 1}};
    Model *m = model_init(d, world, ep, &job->c, &run);
    Params *ps = model_params(m);
    Options o = {.optimizer = OPTIMIZER_ADAMW};
    Optimizer opt = optimizer_alloc(d, ps, &o);
    optimizer_start(&opt, d, ps);
    if (job->write) {
        walk(d, ps, &opt, 1);
        Tokenizer *tok = tokenizer_open("bytes");
        Snapshot s = {.d = d, .world = world, .ep = ep, .ps = ps, .c = &job->c, .opt = &opt, .tokenizer = tok, .aux_coef = 0.01};
        json_t *state = json_pack("{s:i}", "step", 12);
        char *dir = checkpoint_write(&s, job->dir, 12, state);
        json_decref(state);
        free(dir);
        tokenizer_close(tok);
    } else {
        char *dir = checkpoint_find(job->dir);
        checkpoint_read(dir, d, ps, &job->c, &opt);
        free(dir);
        if (job->poke == 1 && comm_info(world)->rank == 0) {
            real x = 0.5;
            dev_upload(d, param_w(ps, &ps->p[0]), &x, sizeof x);
        }
        if (job->poke == 2 && comm_info(world)->rank == 0) {
            wide x = 0.5;
            dev_upload(d, optimizer_part(&opt, ps, &ps->p[0]).state[STATE_V], &x, sizeof x);
        }
        int64_t differ = walk(d, ps, &opt, 0);
        comm_sum_int64(world, &differ, 1);
        if (comm_info(world)->rank == 0) job->differ = differ;
    }
    model_free(m);
    comm_free(ep);
    dev_free(d);
}

static void run(Job *job, int ranks) {
    int argc = 0;
    char **argv = NULL;
    comm_run(&argc, &argv, ranks, 0, body, job);
}

static void layouts(void **state) {
    (void)state;
    static const int layout[][3] = {{1, 1, 1}, {4, 4, 1}, {4, 2, 0}, {2, 1, 1}, {2, 2, 0}, {4, 2, 1}, {3, 1, 1}}; // ranks, ep, zero
    enum { N = sizeof layout / sizeof *layout };
    for (int kind = 0; kind < KINDS; kind++)
        for (int from = 0; from < N; from++) {
            if (kind != 2 && from != kind % N) continue; // all layouts for the model that has everything, one for the others
            char *dir = temp_dir();
            Job job = {.c = small(kind), .ep = layout[from][1], .zero = layout[from][2], .write = 1, .dir = dir};
            run(&job, layout[from][0]);
            char *stale = path_join(dir, "step_00000007.tmp"), *inside = path_join(stale, "model.safetensors");
            dir_make(stale); // what a killed run left
            file_write(inside, "x", 1);
            run(&job, layout[from][0]); // over the one that is there
            assert_false(file_is_dir(stale));
            free(stale), free(inside);
            for (int to = 0; to < N; to++) {
                Job read = {.c = small(kind), .ep = layout[to][1], .zero = layout[to][2], .dir = dir, .differ = -1};
                run(&read, layout[to][0]);
                assert_int_equal(read.differ, 0);
            }
            for (int poke = 1; poke <= 2; poke++) { // a parameter, a moment
                Job spoilt = {.c = small(kind), .ep = 1, .zero = 1, .dir = dir, .poke = poke};
                run(&spoilt, 2 / poke);
                assert_int_equal(spoilt.differ, 1);
            }
            char *tmp = path_join(dir, "step_00000012.tmp");
            assert_int_equal(file_size(tmp), -1);
            free(tmp);
            temp_remove(dir);
        }
}

// ---- files of others ---------------------------------------------------------------------------------------------------
typedef struct Spoil {
    const char *dir;     // the checkpoint, one file of one rank
    const char *drop, *extra, *reshape;
    int fuse;
    StDtype dtype;       // of experts when fused
} Spoil;

static void append_as(StWriter *w, const StFile *f, const StTensor *t, StDtype dtype) {
    int64_t n = st_elements(t);
    float *x = host_alloc(SIZE(n, sizeof *x));
    st_read(x, ST_F32, f, t, 0, n);
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], 4);
        uint16_t high = (uint16_t)(bits >> 16); // truncated to bf16
        double d = (double)x[i];
        st_append(w, dtype == ST_BF16 ? (void *)&high : dtype == ST_F64 ? (void *)&d : (void *)&x[i], st_bytes(dtype));
    }
    free(x);
}

// Rewrites model.safetensors of `dir` with one change, or with each layer's experts as two fused tensors.
static void rewrite(const Spoil *s, const ModelConfig *c) {
    char *path = path_join(s->dir, "model.safetensors"), *out = path_join(s->dir, "new");
    StFile *f = st_open(path);
    StTensor *t = host_alloc(SIZE(f->n + 2 * c->L + 1, sizeof *t));
    int n = 0, plain;
    for (int i = 0; i < f->n; i++) {
        if (s->drop && strcmp(f->tensor[i].name, s->drop) == 0) continue;
        if (s->fuse && strstr(f->tensor[i].name, ".mlp.experts.")) continue;
        t[n] = f->tensor[i];
        if (s->reshape && strcmp(t[n].name, s->reshape) == 0) t[n].shape[0]++;
        n++;
    }
    plain = n;
    if (s->extra) t[n++] = (StTensor){.name = (char *)s->extra, .dtype = ST_F32, .n_dims = 1, .shape = {1}};
    for (int l = 0; l < c->L && s->fuse; l++) {
        if (c->dense[l]) continue;
        t[n++] = (StTensor){.name = str_format("model.layers.%d.mlp.experts.gate_up_proj", l), .dtype = s->dtype, .n_dims = 3, .shape = {c->E, 2 * c->F, c->C}};
        t[n++] = (StTensor){.name = str_format("model.layers.%d.mlp.experts.down_proj", l), .dtype = s->dtype, .n_dims = 3, .shape = {c->E, c->C, c->F}};
    }
    StWriter *w = st_create(out, t, n);
    float zero[64] = {0};
    for (int i = 0; i < plain; i++) {
        const StTensor *old = st_find(f, t[i].name);
        append_as(w, f, old, old->dtype);
        if (s->reshape && strcmp(t[i].name, s->reshape) == 0) st_append(w, zero, SIZE(t[i].shape[1], (int64_t)st_bytes(t[i].dtype)));
    }
    if (s->extra) st_append(w, zero, 4);
    for (int l = 0; l < c->L && s->fuse; l++)
        for (int down = 0; down < 2 && !c->dense[l]; down++)
            for (int e = 0; e < c->E; e++)
                for (int part = 0; part < (down ? 1 : 2); part++) {
                    char *name = str_format("model.layers.%d.mlp.experts.%d.%s_proj.weight", l, e, down ? "down" : part ? "up" : "gate");
                    append_as(w, f, st_find(f, name), s->dtype);
                    free(name);
                }
    st_finish(w);
    for (int i = plain + (s->extra != NULL); i < n; i++) free(t[i].name);
    st_close(f);
    assert_int_equal(rename(out, path), 0);
    free(t), free(path), free(out);
}

static void read_job(void *arg) { run(arg, 2); }

static void others(void **state) {
    (void)state;
    static const Spoil cases[] = {
        {.fuse = 1, .dtype = ST_F64}, {.fuse = 1, .dtype = ST_F32}, {.drop = "model.layers.2.mlp.experts.6.up_proj.weight"},
        {.drop = "model.layers.1.mlp.gate.e_score_correction_bias"}, {.drop = "model.norm.weight"}, {.extra = "model.layers.3.input_layernorm.weight"},
        {.extra = "model.layers.1.mlp.experts.8.up_proj.weight"}, {.reshape = "model.layers.0.mlp.up_proj.weight"},
        {.reshape = "model.layers.1.mlp.experts.0.down_proj.weight"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *dir = temp_dir();
        Job job = {.c = small(2), .ep = 1, .write = 1, .dir = dir};
        run(&job, 1);
        Spoil s = cases[i];
        char *at = checkpoint_find(dir);
        s.dir = at;
        rewrite(&s, &job.c);
        Job read = {.c = small(2), .ep = 2, .dir = dir, .differ = -1};
        if (s.fuse) {
            run(&read, 2);
            assert_int_equal(read.differ, 0);
        } else {
            const char *named = s.drop ? s.drop : s.extra ? s.extra : s.reshape;
            Child c = child_call(read_job, &read);
            if (c.status != STATUS_DATA || !strstr(c.out, named)) fail_msg("%s: status %d, %s", named, c.status, c.out);
        }
        free(at);
        temp_remove(dir);
    }
}

// bf16 keeps 8 bits: every parameter within 2^-8 of its value, and not all equal to it.
static void half_precision(void **state) {
    (void)state;
    char *dir = temp_dir();
    Job job = {.c = small(0), .ep = 1, .write = 1, .dir = dir};
    run(&job, 1);
    char *at = checkpoint_find(dir), *path = path_join(at, "model.safetensors");
    Spoil s = {.dir = at, .fuse = 1, .dtype = ST_BF16};
    rewrite(&s, &job.c);
    StFile *f = st_open(path);
    const StTensor *t = st_find(f, "model.layers.1.mlp.experts.gate_up_proj");
    double x, worst = 0;
    for (int i = 0; i < 60; i++) {
        st_read(&x, ST_F64, f, t, i, 1);
        double want = value_of("model.layers.1.mlp.experts.0.gate_proj.weight", (uint64_t)i);
        worst = fmax(worst, fabs(x - want) / fabs(want));
    }
    assert_true(worst > 0 && worst <= 0x1p-7);
    Job read = {.c = small(0), .ep = 4, .dir = dir, .differ = -1};
    run(&read, 4);
    assert_true(read.differ > 0);
    st_close(f);
    free(at), free(path);
    temp_remove(dir);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// A run that writes over its checkpoint has one at every moment, and leaves a whole one when it is killed.
static void killed(void **state) {
    (void)state;
    char *dir = temp_dir(), *file = str_format("%s/step_00000012/trainer.json", dir);
    Job job = {.c = small(2), .ep = 1, .write = 1, .dir = dir};
    run(&job, 1);
    for (int i = 0; i < 12; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL); // this loop ends with the test, however that ends
            for (;;) run(&job, 1);
        }
        for (double end = seconds() + 0.08 * rng_uniform(1, 2, (uint64_t)i); seconds() < end;) assert_true(file_size(file) > 0);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        Job read = {.c = small(2), .ep = 1, .dir = dir, .differ = -1};
        run(&read, 1);
        assert_int_equal(read.differ, 0);
    }
    free(file);
    temp_remove(dir);
}

static void find_path(void *path) { free(checkpoint_find(path)); }

// The newest whole one counts; unfinished ones and strangers do not.
static void newest(void **state) {
    (void)state;
    char *dir = temp_dir();
    assert_int_equal(child_call(find_path, dir).status, STATUS_DATA);
    static const char *const folders[] = {"step_00000009", "step_00000100", "step_00000200.tmp", "step_x", "step_", "step_00000300"};
    for (int i = 0; i < 6; i++) {
        char *path = path_join(dir, folders[i]), *file = path_join(path, "trainer.json");
        dir_make(path);
        if (i < 5) file_write(file, "{}", 2); // the last one holds nothing
        free(path), free(file);
    }
    char *found = checkpoint_find(dir);
    assert_string_equal(found + strlen(dir) + 1, "step_00000100");
    free(found);
    temp_remove(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(damaged_files), cmocka_unit_test(dtypes), cmocka_unit_test(config_round_trip), cmocka_unit_test(config_refused),
        cmocka_unit_test(layouts), cmocka_unit_test(others), cmocka_unit_test(half_precision), cmocka_unit_test(killed), cmocka_unit_test(newest)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
