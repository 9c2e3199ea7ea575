// A rank's run from its settings: usage, device, files, memory, parameters, in this order.
#include "kernels/check.h"
#include "kernels/files.h"
#include "train/folder.h"
#include "train/hf.h"
#include "train/log.h"
#include "train/trace.h"
#include "train/trainer.h"
#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// An equal part of the machine's cores, at most those that this process may use.
static int default_threads(const CommInfo *info) {
    cpu_set_t set;
    int cores = (int)sysconf(_SC_NPROCESSORS_ONLN), may = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : cores;
    int threads = cores / (info->local_ranks > 0 ? info->local_ranks : 1);
    threads = threads < may ? threads : may;
    return threads > 0 ? threads : 1;
}

static uint64_t hash_window(uint64_t h, const Loader *l, int64_t w, int T) {
    int *tok = host_alloc(SIZE(2, T, sizeof(int)));
    loader_window(l, w, tok, tok + T, NULL);
    h = fnv1a(h, tok, SIZE(2, T, sizeof(int)));
    free(tok);
    return h;
}

static void open_data(Trainer *t) {
    int V = t->c.V, T = t->c.T;
    t->train = loader_open(t->o.data, "train", V, T, (uint64_t)t->o.seed);
    t->data_hash = hash_window(FNV1A_START, t->train, 0, T);
    t->data_hash = hash_window(t->data_hash, t->train, loader_windows(t->train) - 1, T);
    if (!t->o.eval_every) return;
    CHECK_USAGE(t->o.val || file_is_dir(t->o.data), "--data %s is one shard, so it does not say what to evaluate on (hint: --val SHARD, or "
                "--eval-every 0)", t->o.data);
    t->val = loader_open(t->o.val ? t->o.val : t->o.data, "val", V, T, (uint64_t)t->o.seed);
}

// ---- the stored run --------------------------------------------------------------------------------------------------
static int moe_layers(const Trainer *t) {
    int n = 0;
    for (int l = 0; l < t->c.L; l++) n += !t->c.dense[l];
    return n;
}

// The past by which eplb plans: (groups, MoE layers, experts) as whole numbers; null for the other balancers. Collective.
static json_t *history_json(const Trainer *t) {
    if (!t->moe || t->o.balance != POLICY_EPLB) return json_null();
    size_t layers = (size_t)moe_layers(t), E = (size_t)t->c.E, n = layers * E;
    int64_t *mine = host_alloc(n * sizeof *mine), *all = host_alloc(SIZE(t->info->size, (int64_t)n, sizeof *all));
    moe_history_get(t->moe, mine);
    comm_allgather(t->world, all, mine, n * sizeof *mine);
    json_t *groups = json_array();
    for (int g = 0; g < t->share.groups; g++) {
        json_t *group = json_array();
        for (size_t l = 0; l < layers; l++) {
            json_t *layer = json_array();
            for (size_t e = 0; e < E; e++) json_array_append_new(layer, json_integer(all[SIZE(g, t->share.R) * n + l * E + e]));
            json_array_append_new(group, layer);
        }
        json_array_append_new(groups, group);
    }
    free(mine), free(all);
    return groups;
}

json_t *trainer_state(const Trainer *t) {
    char hash[32];
    snprintf(hash, sizeof hash, "%016" PRIx64, t->data_hash);
    json_t *data = json_pack("{s:I, s:I, s:s}", "windows", (json_int_t)loader_windows(t->train), "tokens", (json_int_t)loader_tokens(t->train),
                             "hash", hash);
    return json_pack("{s:i, s:I, s:I, s:I, s:i, s:i, s:o, s:o, s:o}", "format", 1, "step", (json_int_t)t->at.step, "samples",
                     (json_int_t)t->at.samples, "tokens", (json_int_t)t->at.tokens, "ranks", t->info->size, "ep", t->share.R, "data", data,
                     "flags", options_json(&t->o), "eplb_history", history_json(t));
}

static const int64_t STORED_MAX = 1000000000000000000; // sums with a step's samples and tokens fit

static int64_t stored_int(const json_t *state, const char *key, const char *where) {
    json_t *v = json_object_get(state, key);
    int64_t x = json_is_integer(v) ? json_integer_value(v) : -1;
    CHECK_DATA(x >= 0 && x <= STORED_MAX, "%s: \"%s\" is missing or no whole number from 0 to 10^18", where, key);
    return x;
}

static json_t *read_stored(Trainer *t) {
    t->resumed = checkpoint_find(t->o.resume);
    json_t *state = checkpoint_trainer(t->resumed);
    char *where = path_join(t->resumed, "trainer.json");
    int64_t format = stored_int(state, "format", where);
    CHECK_DATA(format == 1, "%s: \"format\" is %" PRId64 ", expected 1 (hint: written by a newer version?)", where, format);
    t->at = (Progress){stored_int(state, "step", where), stored_int(state, "samples", where), stored_int(state, "tokens", where)};
    options_restore(&t->o, json_object_get(state, "flags"), where);
    ModelConfig written = hf_read(t->resumed), restored = options_model(&t->o);
    const char *differ = hf_differ(&written, &restored);
    CHECK_DATA(!differ, "%s/config.json and the settings in %s describe different models: %s (hint: one of them was changed)", t->resumed, where,
               differ);
    CHECK_USAGE(t->at.step < t->o.steps, "%s is at step %" PRId64 " of %" PRId64 ": nothing is left to do (hint: a larger --steps)", t->resumed,
                t->at.step, t->o.steps);
    free(where);
    return state;
}

// The order of samples is a function of the windows: other data would be trained on as if they were the same.
static void check_data(const Trainer *t, const json_t *state) {
    json_t *data = json_object_get(state, "data");
    const char *hash = json_string_value(json_object_get(data, "hash"));
    int64_t tokens = stored_int(data, "tokens", "trainer.json, data"), windows = stored_int(data, "windows", "trainer.json, data");
    char now[32];
    snprintf(now, sizeof now, "%016" PRIx64, t->data_hash);
    CHECK_DATA(windows == loader_windows(t->train) && tokens == loader_tokens(t->train) && hash && strcmp(hash, now) == 0,
               "%s is not what the run was trained on: %" PRId64 " tokens in %" PRId64 " windows (hash %s), expected %" PRId64 " in %" PRId64
               " (hash %s) (hint: --data)", t->o.data, loader_tokens(t->train), loader_windows(t->train), now, tokens, windows,
               hash ? hash : "missing");
}

// Another number of groups takes the first one's: only the experts' shares count. Without any, eplb gathers its past anew.
static void restore_history(Trainer *t, const json_t *state) {
    json_t *groups = json_object_get(state, "eplb_history");
    if (!t->moe || t->o.balance != POLICY_EPLB || !groups || json_is_null(groups)) return;
    size_t layers = (size_t)moe_layers(t), E = (size_t)t->c.E;
    int own = json_array_size(groups) == (size_t)t->share.groups ? t->info->rank / t->share.R : 0;
    json_t *group = json_array_get(groups, (size_t)own);
    int64_t *history = host_alloc(layers * E * sizeof *history);
    CHECK_DATA(json_array_size(group) == layers, "%s/trainer.json: \"eplb_history\" has %zu layers, the model has %zu with experts", t->resumed,
               json_array_size(group), layers);
    for (size_t i = 0; i < layers * E; i++) {
        json_t *layer = json_array_get(group, i / E), *x = json_array_get(layer, i % E);
        CHECK_DATA(json_array_size(layer) == E && json_is_integer(x) && json_integer_value(x) >= 0 && json_integer_value(x) >> 48 == 0,
                   "%s/trainer.json: \"eplb_history\", layer %zu: expected %zu whole numbers from 0 to 2^48", t->resumed, i / E, E);
        history[i] = json_integer_value(x);
    }
    moe_history_set(t->moe, history);
    free(history);
}

// ---- folder, model ---------------------------------------------------------------------------------------------------
// All learn the name that rank 0 has in t->out.
static void share_out(Trainer *t) {
    int n = t->info->rank == 0 ? (int)strlen(t->out) + 1 : 0;
    comm_bcast(t->world, &n, sizeof n, 0);
    if (t->info->rank != 0) {
        free(t->out);
        t->out = host_alloc((size_t)n);
    }
    comm_bcast(t->world, t->out, (size_t)n, 0);
    Flag *f = flags_find(t->o.flags, "out");
    if (f->set == 2) free((char *)t->o.out); // it came from a file
    t->o.out = t->out;
    f->set = 1; // the trainer frees it
}

// Returns, on rank 0, whether the log of an existing run goes on.
static int choose_folder(Trainer *t) {
    int append = 0;
    if (t->info->rank == 0) t->out = folder_choose(&t->o, t->resumed, &append);
    share_out(t);
    json_decref(options_json(&t->o)); // dies here, where nothing has been removed, if they cannot be stored
    return append;
}

// Last, so that a run that cannot start leaves nothing behind. asked: the settings before choose_folder.
static void begin_folder(Trainer *t, const Options *asked, int append) {
    if (t->info->rank == 0) t->lock = folder_make(asked, t->resumed, &t->out, append);
    share_out(t);
    if (t->info->rank != 0) return;
    char *path = path_join(t->out, "run.json");
    json_t *flags = options_json(&t->o);
    char *text = json_dumps(flags, JSON_INDENT(2)), *line = str_format("%s\n", text);
    file_write(path, line, strlen(line));
    json_decref(flags);
    free(path), free(text), free(line);
    t->log = log_open(t->out, append ? t->at.step : -1);
    log_start(t->log, t);
    if (t->resumed) log_resume(t->log, t);
}

static void load_cost(Trainer *t) {
    if (!moe_layers(t)) return;
    const CommInfo *ep = comm_info(t->ep);
    // one rank has no use for copies
    CostModel m = {.C = t->c.C, .F = t->c.F, .K = t->c.K, .E = t->c.E, .N = ep->N, .G = ep->G, .slots = t->share.R == 1 ? 0 : (int)t->o.slots,
                   .token_bytes = sizeof(real), .weight_bytes = sizeof(real), .grad_bytes = sizeof(wide),
                   .one_port = !t->o.how.slicing, .dedup = t->o.dedup ? DEDUP_ON : DEDUP_OFF};
    t->cost = cost_load(t->o.cluster, m);
    cost_check(&t->cost, ep->N, ep->G, t->c.E);
}

ModelRun trainer_model_run(const Trainer *t) {
    const Options *o = &t->o;
    return (ModelRun){.max_B = t->share.micro, .T = t->c.T, .micros = t->share.micros, .training = 1, .recompute = (Recompute)o->recompute,
                      .replicas = t->replicas, .zero = (int)o->zero,
                      .generate = o->sample_every > 0, .seed = (uint64_t)o->seed, .aux_coef = o->aux_loss, .z_coef = o->z_loss,
                      .capacity = o->capacity, .scope = o->aux_scope, .S = t->cost.S, .recv_room = t->recv_room, .dedup = o->dedup,
                      .even = o->balance == BALANCE_UNIFORM, .cost = t->cost, .plan = options_plan(o)};
}

static void make_model(Trainer *t) {
    const Options *o = &t->o;
    ModelRun run = trainer_model_run(t);
    t->m = model_alloc(t->d, t->world, t->ep, &t->c, &run);
    t->ps = model_params(t->m);
    t->moe = model_moe(t->m);
    t->opt = optimizer_alloc(t->d, t->ps, o);
    if (!t->resumed) model_draw(t->m);
    optimizer_start(&t->opt, t->d, t->ps);
    size_t tokens = SIZE(t->share.micro, t->c.T, sizeof(int));
    t->tok = host_alloc(tokens);
    t->target = host_alloc(tokens);
    t->first = host_alloc(tokens);
}

void trainer_open(Trainer *t, Comm *world, const Options *o) {
    *t = (Trainer){.world = world, .info = comm_info(world), .lock = -1};
    options_copy(&t->o, o);
    if (!o->resume) { // usage first
        t->c = options_model(&t->o);
        options_share(&t->o, &t->c, t->info->size);
    }
    t->threads = o->threads ? (int)o->threads : default_threads(t->info);
    t->d = dev_init((DevOptions){.threads = t->threads, .place = t->info->rank % t->info->local_ranks, .shared = t->o.virtual_ranks > 0,
                                   .ranks = t->info->local_ranks});
    comm_bind(world, t->d);
    json_t *state = o->resume ? read_stored(t) : NULL;
    t->c = options_model(&t->o);
    t->share = options_share(&t->o, &t->c, t->info->size);
    t->recv_room = t->o.recv_room >= 0 ? t->o.recv_room : dev_lazy(t->d) ? 0 : 2;
    int append = choose_folder(t);
    t->schedule = options_schedule(&t->o);
    t->tokenizer = tokenizer_open("bytes");
    CHECK_USAGE(!t->o.sample_every || t->c.V == 256 || t->c.V == tokenizer_vocab(t->tokenizer),
                "--sample-every needs a vocabulary of bytes (256 or %d), the model's is %d (hint: --sample-every 0)", tokenizer_vocab(t->tokenizer),
                t->c.V);
    t->ep = comm_block(world, t->share.R);
    t->replicas = comm_stride(world, t->share.R);
    load_cost(t);
    open_data(t);
    if (state) check_data(t, state);
    memory_check(t);
    make_model(t);
    if (state) {
        checkpoint_read(t->resumed, t->d, t->ps, &t->c, &t->opt);
        restore_history(t, state);
        comm_barrier(world); // peers read this rank's experts
        json_decref(state);
    }
    begin_folder(t, o, append);
    comm_barrier(world); // the folder is there
    if (t->o.trace_every && t->moe) t->trace = trace_open(t);
}

void trainer_close(Trainer *t) {
    if (t->trace) trace_close(t->trace);
    if (t->log) log_close(t->log);
    if (t->lock >= 0) close(t->lock);
    model_free(t->m);
    if (t->replicas) comm_free(t->replicas);
    comm_free(t->ep);
    dev_free(t->d);
    loader_close(t->train);
    if (t->val) loader_close(t->val);
    tokenizer_close(t->tokenizer);
    flags_free(t->o.flags);
    free(t->tok), free(t->target), free(t->first);
    free(t->resumed), free(t->out);
}
