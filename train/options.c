#include "train/options.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include <stdlib.h>
#include <string.h>

#define NO_LIMIT 1e18
#define DIM_MAX 1e9

// ---- the table -------------------------------------------------------------------------------------------------------
typedef struct Table {
    Options *o;
    int n;
} Table;

static void add(Table *t, Flag f) {
    CHECK_USAGE(t->n < OPTION_FLAGS - 1, "more than %d flags (hint: OPTION_FLAGS in train/options.h)", OPTION_FLAGS - 1);
    t->o->flags[t->n++] = f;
}
static void heading(Table *t, const char *text) { add(t, (Flag){.name = "", .help = text}); }
static void whole(Table *t, const char *name, int64_t *v, double min, double max, const char *help) {
    add(t, (Flag){.name = name, .kind = FLAG_INT, .value = v, .min = min, .max = max, .help = help});
}
static void number(Table *t, const char *name, double *v, double min, double max, const char *help) {
    add(t, (Flag){.name = name, .kind = FLAG_DOUBLE, .value = v, .min = min, .max = max, .help = help});
}
static void text(Table *t, const char *name, const char **v, const char *help) {
    add(t, (Flag){.name = name, .kind = FLAG_STRING, .value = v, .help = help});
}
static void yes(Table *t, const char *name, int *v, const char *help) {
    add(t, (Flag){.name = name, .kind = FLAG_BOOL, .value = v, .help = help});
}
static void choice(Table *t, const char *name, int *v, const char *choices, const char *help) {
    add(t, (Flag){.name = name, .kind = FLAG_CHOICE, .value = v, .choices = choices, .help = help});
}

// The ranges are config_check's.
static void table_model(Table *t) {
    Options *o = t->o;
    heading(t, "model: a preset, and single dimensions that differ from it");
    choice(t, "model", &o->model, config_presets(), "preset; the dimensions' defaults are its own");
    whole(t, "layers", &o->layers, 1, MAX_L, "transformer layers");
    whole(t, "width", &o->width, 2, 1 << 20, "hidden width C");
    whole(t, "heads", &o->heads, 1, 1 << 20, "query heads");
    whole(t, "kv-heads", &o->kv_heads, 1, 1 << 20, "key/value heads");
    whole(t, "head-size", &o->head_size, 2, 4096, "elements of a head");
    whole(t, "vocab", &o->vocab, 2, 1 << 24, "vocabulary");
    whole(t, "experts", &o->experts, 0, PLAN_MAX_E, "experts of a layer; 0 = every layer is dense");
    whole(t, "topk", &o->topk, 0, PLAN_MAX_E, "experts per token");
    whole(t, "expert-width", &o->expert_width, 0, 1 << 20, "hidden width of an expert");
    whole(t, "dense-width", &o->dense_width, 0, 1 << 20, "hidden width of dense layers");
    text(t, "dense-layers", &o->dense_layers, "layers without experts, e.g. 0,2");
    whole(t, "shared-experts", &o->shared_experts, 0, 1024, "experts that every token meets");
    choice(t, "router", &o->router, "softmax|sigmoid", "scores of the router");
    yes(t, "renorm", &o->renorm, "weights of the chosen experts sum to 1");
    number(t, "routed-scale", &o->routed_scale, 1e-6, 1e6, "factor of the routed experts' weights");
    yes(t, "router-bias", &o->router_bias, "selection bias (loss-free balancing)");
    yes(t, "tied", &o->tied, "the head shares the embedding");
    yes(t, "doc-mask", &o->doc_mask, "attention stops at document boundaries");
    number(t, "rope-theta", &o->rope_theta, 1, 1e12, "base of the rotary embedding");
    number(t, "norm-eps", &o->norm_eps, 1e-15, 1, "epsilon of RMSNorm");
    number(t, "init-std", &o->init_std, 1e-9, 100, "deviation of initial matrices");
    number(t, "router-skew", &o->router_skew, 0, 8, "Zipf exponent of the initial router's choices; 0 = plain");
}

static void table_training(Table *t) {
    Options *o = t->o;
    heading(t, "data and run folder");
    text(t, "data", &o->data, "shard, or folder of train*.bin shards");
    text(t, "val", &o->val, "shard, or folder of val*.bin shards; none = the folder of --data");
    text(t, "out", &o->out, "run folder; none = runs/MODEL-001, or the next free number");
    yes(t, "overwrite", &o->overwrite, "replace a run that --out holds");
    text(t, "resume", &o->resume, "run folder (its newest checkpoint) or checkpoint folder to continue");
    heading(t, "training");
    whole(t, "steps", &o->steps, 1, NO_LIMIT, "updates in all");
    whole(t, "batch", &o->batch, 1, DIM_MAX, "sequences per step over all ranks");
    whole(t, "micro-batch", &o->micro_batch, 0, DIM_MAX, "sequences of a rank's microbatch; 0 = chosen");
    whole(t, "seq", &o->seq, 1, 1 << 24, "tokens of a sequence");
    whole(t, "recompute", &o->recompute, 0, RECOMPUTE_BLOCK, "made again in the backward, not kept: 1 norms, rotated keys; 2 also gate and up "
          "products; 3 whole blocks");
    choice(t, "optimizer", &o->optimizer, "adamw|sgd", "update rule");
    number(t, "lr", &o->lr, 0, 1e300, "peak learning rate");
    number(t, "min-lr", &o->min_lr, -1, 1e300, "learning rate at the end; -1 = a tenth of --lr");
    choice(t, "schedule", &o->schedule, "cosine|wsd", "from the peak to --min-lr: cosine, or stable and then linear");
    whole(t, "warmup", &o->warmup, -1, NO_LIMIT, "steps of linear warm-up; -1 = 5 % of --steps");
    whole(t, "decay-steps", &o->decay_steps, -1, NO_LIMIT, "wsd: length of the decay; -1 = 20 % of --steps");
    number(t, "weight-decay", &o->weight_decay, 0, 1e3, "decoupled decay of matrices");
    number(t, "beta1", &o->beta1, 0, 0.999999, "AdamW, first moment");
    number(t, "beta2", &o->beta2, 0, 0.9999999, "AdamW, second moment");
    number(t, "eps", &o->eps, 1e-30, 1, "AdamW, added to the root");
    number(t, "clip", &o->clip, 0, NO_LIMIT, "largest gradient norm; 0 = no clipping");
    whole(t, "seed", &o->seed, 0, 9e15, "of initial values and the order of samples");
    heading(t, "experts' load");
    number(t, "aux-loss", &o->aux_loss, 0, 1e3, "coefficient of the balance loss");
    choice(t, "aux-scope", &o->aux_scope, "sequence|micro|global", "tokens over which the balance loss counts");
    number(t, "z-loss", &o->z_loss, 0, 1e3, "coefficient of the router's z-loss");
    number(t, "bias-rate", &o->bias_rate, 0, 10, "step of the selection bias");
    number(t, "capacity", &o->capacity, 0, 1e6, "drop pairs past this multiple of an expert's even share; 0 = drop none");
}

static void table_running(Table *t) {
    Options *o = t->o;
    heading(t, "ranks");
    whole(t, "ep", &o->ep, 0, DIM_MAX, "ranks that share the experts; 0 = all");
    whole(t, "zero", &o->zero, 0, 1, "ZeRO stage 1: ranks with the same parameters share out the optimizer's state; 0: each has all of it");
    whole(t, "nodes", &o->nodes, 0, DIM_MAX, "cut the ranks into that many virtual nodes; 0 = as detected");
    whole(t, "virtual-ranks", &o->virtual_ranks, 0, 1024, "ranks as threads of this process; 0 = as launched");
    whole(t, "threads", &o->threads, 0, 4096, "CPU threads of a rank; 0 = cores / ranks of this machine");
    choice(t, "balance", &o->balance, o->balance_choices,
           "who computes which pairs; uniform: experts in turn, not the router's choice: NOT A TRAINING METHOD, the speed ceiling");
    whole(t, "slots", &o->slots, -1, PLAN_MAX_S, "copies of experts a rank may hold; -1 = as --cluster says, or 2");
    text(t, "cluster", &o->cluster, "file of the cluster's rates or costs; none = this machine's");
    yes(t, "dedup", &o->dedup, "a token that goes to several ranks of another node crosses once");
    number(t, "recv-room", &o->recv_room, -1, 1e6, "rows that may come to a rank, over their mean, before buffers grow and the step runs again; 0 = "
           "room for the worst case; -1 = that on a CPU, 2 on a GPU");
    Flag plan[] = {PLAN_FLAGS(o->how)};
    for (size_t i = 0; i < sizeof plan / sizeof *plan; i++) add(t, plan[i]);
    yes(t, "cuda-graph", &o->cuda_graph, "on a GPU, record the step once and replay it");
    yes(t, "check-plans", &o->check_plans, "compare all ranks' plans at every step");
    heading(t, "observing (never changes the training)");
    whole(t, "log-every", &o->log_every, 1, NO_LIMIT, "steps between lines on the terminal; OUT/log.jsonl has every step");
    whole(t, "eval-every", &o->eval_every, 0, NO_LIMIT, "steps between evaluations; 0 = none at all");
    whole(t, "eval-windows", &o->eval_windows, 0, NO_LIMIT, "sequences of an evaluation; 0 = all there are");
    whole(t, "final-windows", &o->final_windows, 0, NO_LIMIT, "sequences of the last evaluation; 0 = all, within 524288 tokens");
    whole(t, "save-every", &o->save_every, -1, NO_LIMIT, "steps between checkpoints; 0 = only at the end; -1 = never");
    whole(t, "sample-every", &o->sample_every, 0, NO_LIMIT, "steps between samples of text; 0 = none");
    whole(t, "sample-tokens", &o->sample_tokens, 1, DIM_MAX, "length of a sample, at most --seq");
    text(t, "sample-prompt", &o->sample_prompt, "how a sample begins; none = with a new document");
    whole(t, "trace-every", &o->trace_every, 0, NO_LIMIT, "steps between routing records in OUT/route.bin; 0 = none");
}

static void table_bind(Options *o) {
    int set[OPTION_FLAGS];
    for (int i = 0; i < OPTION_FLAGS; i++) set[i] = o->flags[i].set;
    memset(o->flags, 0, sizeof o->flags);
    Table t = {o, 0};
    table_training(&t);
    table_running(&t);
    table_model(&t);
    for (int i = 0; i < t.n; i++) o->flags[i].set = set[i];
}

// ---- model <-> flags -------------------------------------------------------------------------------------------------
// of a fault in settings from the file `where`; NULL = the command line
static int status_of(const char *where) { return where ? STATUS_DATA : STATUS_USAGE; }

static int given(const Options *o, const char *name) {
    const Flag *f = flags_find((Flag *)o->flags, name);
    return f ? f->set : 0;
}

// A preset that the command line names comes before the dimensions of a stored configuration, not before its own.
static int keeps(const Options *o, const char *name) {
    return given(o, name) == 1 || (given(o, name) && given(o, "model") != 1);
}

static void model_to_flags(Options *o, const ModelConfig *c) {
    struct { const char *name; int64_t *value; int64_t preset; } ints[] = {
        {"layers", &o->layers, c->L}, {"width", &o->width, c->C}, {"heads", &o->heads, c->NH}, {"kv-heads", &o->kv_heads, c->NKV},
        {"head-size", &o->head_size, c->HS}, {"vocab", &o->vocab, c->V}, {"experts", &o->experts, c->E}, {"topk", &o->topk, c->K},
        {"expert-width", &o->expert_width, c->F}, {"dense-width", &o->dense_width, c->F_dense},
        {"shared-experts", &o->shared_experts, c->n_shared}, {"seq", &o->seq, c->T}};
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++)
        if (!keeps(o, ints[i].name)) *ints[i].value = ints[i].preset;
    struct { const char *name; double *value; double preset; } reals[] = {
        {"routed-scale", &o->routed_scale, c->routed_scale}, {"rope-theta", &o->rope_theta, c->theta}, {"norm-eps", &o->norm_eps, c->eps},
        {"router-skew", &o->router_skew, c->router_skew}, {"init-std", &o->init_std, c->init_std}};
    for (size_t i = 0; i < sizeof reals / sizeof *reals; i++)
        if (!keeps(o, reals[i].name)) *reals[i].value = reals[i].preset;
    struct { const char *name; int *value; int preset; } flags[] = {
        {"router", &o->router, c->score}, {"renorm", &o->renorm, c->renorm}, {"router-bias", &o->router_bias, c->bias},
        {"tied", &o->tied, c->tied}, {"doc-mask", &o->doc_mask, c->doc_mask}};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (!keeps(o, flags[i].name)) *flags[i].value = flags[i].preset;
    if (keeps(o, "dense-layers")) return;
    // a preset's pattern holds for its own layers: a model made shallower has fewer of them
    int at = 0;
    o->dense_text[0] = 0;
    for (int l = 0; l < c->L && l < o->layers; l++)
        if (c->dense[l]) at += snprintf(o->dense_text + at, sizeof o->dense_text - (size_t)at, at ? ",%d" : "%d", l);
    Flag *f = flags_find(o->flags, "dense-layers");
    if (f->set == 2) free((char *)o->dense_layers); // it came from a file, but the command line's preset comes first
    f->set = 0;
    o->dense_layers = o->dense_text;
}

const char *options_model_name(const Options *o, char *buffer, size_t n) {
    const char *at = config_presets();
    for (int i = 0; i < o->model; i++) at += strcspn(at, "|") + 1;
    snprintf(buffer, n, "%.*s", (int)strcspn(at, "|"), at);
    return buffer;
}

static void apply_preset(Options *o) {
    char name[64];
    ModelConfig c;
    config_preset(&c, options_model_name(o, name, sizeof name));
    model_to_flags(o, &c);
}

static void parse_dense(ModelConfig *c, const char *list, const char *where) {
    char prefix[512] = "";
    if (where) snprintf(prefix, sizeof prefix, "%s: ", where);
    for (const char *at = list ? list : ""; *at;) {
        char *end;
        long l = strtol(at, &end, 10);
        CHECK_AS(status_of(where), end != at && (*end == 0 || (*end == ',' && end[1])) && *at >= '0' && *at <= '9',
                 "%s--dense-layers is \"%s\", expected layers separated by commas, e.g. 0,2", prefix, list);
        CHECK_AS(status_of(where), l < c->L, "%s--dense-layers names layer %ld, the model's layers are 0 to %d", prefix, l, c->L - 1);
        c->dense[l] = 1;
        at = *end ? end + 1 : end;
    }
}

static ModelConfig model_of(const Options *o, const char *where) {
    ModelConfig c = {.V = (int)o->vocab, .C = (int)o->width, .L = (int)o->layers, .NH = (int)o->heads, .NKV = (int)o->kv_heads,
                     .HS = (int)o->head_size, .T = (int)o->seq, .E = (int)o->experts, .K = (int)o->topk, .F = (int)o->expert_width,
                     .F_dense = (int)o->dense_width, .n_shared = (int)o->shared_experts, .score = o->router, .renorm = o->renorm,
                     .bias = o->router_bias, .routed_scale = o->routed_scale, .tied = o->tied, .doc_mask = o->doc_mask,
                     .theta = o->rope_theta, .eps = o->norm_eps, .init_std = o->init_std, .router_skew = o->router_skew};
    parse_dense(&c, o->dense_layers, where);
    if (c.E == 0) memset(c.dense, 1, (size_t)c.L);
    if (c.E && !where) CHECK_USAGE(c.K >= 1 && c.K <= c.E, "--topk is %d, expected 1 to --experts, %d", c.K, c.E);
    config_check(&c, where);
    return c;
}

const char *options_balance(const Options *o) { return o->balance == BALANCE_UNIFORM ? "uniform" : policy_names[o->balance]; }

PlanOptions options_plan(const Options *o) {
    return plan_flags_options(&o->how, o->balance == BALANCE_UNIFORM ? POLICY_NONE : (Policy)o->balance, 1);
}

ModelConfig options_model(const Options *o) { return model_of(o, NULL); }

// ---- life ------------------------------------------------------------------------------------------------------------
void options_init(Options *o) {
    *o = (Options){.data = "data/austen", .steps = 1000, .batch = 16, .lr = 3e-3, .min_lr = -1, .warmup = -1, .decay_steps = -1,
                   .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .clip = 1, .seed = 1, .slots = -1,
                   .aux_loss = 0.01, .z_loss = 0.001, .bias_rate = 0.001, .log_every = 1, .eval_every = 100,
                   .eval_windows = 256, .sample_tokens = 128, .dedup = 1, .recv_room = -1, .cuda_graph = 1, .zero = 1,
                   .how = plan_flags_default};
    int at = 0;
    for (o->balance = 0; o->balance <= BALANCE_UNIFORM; o->balance++)
        at += snprintf(o->balance_choices + at, sizeof o->balance_choices - (size_t)at, "%s%s", at ? "|" : "", options_balance(o));
    o->balance = POLICY_TOPOEP;
    table_bind(o);
    apply_preset(o);
}

// Settings a and b, of a stored run's file `where` unless the command line gives one of them
static void check_pair(const Options *o, int good, const char *a, double x, const char *b, double y, const char *where) {
    int stored = where && given(o, a) != 1 && given(o, b) != 1;
    CHECK_AS(status_of(stored ? where : NULL), good, "%s%s--%s is %g, above --%s %g", stored ? where : "", stored ? ": " : "", a, x, b, y);
}

static void check_combinations(const Options *o, const char *where) {
    check_pair(o, o->min_lr <= o->lr, "min-lr", o->min_lr, "lr", o->lr, where);
    check_pair(o, o->warmup <= o->steps, "warmup", (double)o->warmup, "steps", (double)o->steps, where);
    check_pair(o, o->decay_steps <= o->steps, "decay-steps", (double)o->decay_steps, "steps", (double)o->steps, where);
    int stored = where && given(o, "min-lr") != 1;
    CHECK_AS(status_of(stored ? where : NULL), o->min_lr >= 0 || o->min_lr == -1,
             "%s%s--min-lr is %g, expected -1 (a tenth of --lr) or a rate >= 0", stored ? where : "", stored ? ": " : "", o->min_lr);
    stored = where && given(o, "recv-room") != 1;
    CHECK_AS(status_of(stored ? where : NULL), o->recv_room >= 0 || o->recv_room == -1,
             "%s%s--recv-room is %g, expected -1 (as the device suggests), 0 (the worst case) or a factor above", stored ? where : "",
             stored ? ": " : "", o->recv_room);
}

void options_parse(Options *o, int argc, char **argv) {
    options_init(o);
    int n = flags_parse(o->flags, "train", "trains a mixture-of-experts language model, on one rank or, under mpirun, on several", argc, argv);
    CHECK_USAGE(n == 0, "argument \"%s\" is not a flag (hint: --data, --out and the like; --help lists them)", argv[1]);
    CHECK_USAGE(!o->out || *o->out, "--out is empty, expected a folder's name (hint: without --out a name is chosen)");
    apply_preset(o);
    if (!o->resume) { // otherwise the stored settings are still to come
        check_combinations(o, NULL);
        options_model(o);
    }
}

void options_copy(Options *dst, const Options *src) {
    *dst = *src;
    table_bind(dst);
    for (Flag *f = dst->flags; f->name; f++) // flags_free frees what came from a file, each copy its own
        if (f->kind == FLAG_STRING && f->set == 2 && *(char **)f->value) *(char **)f->value = str_format("%s", *(char **)f->value);
    if (src->dense_layers == src->dense_text) dst->dense_layers = dst->dense_text;
}

// ---- a stored run ----------------------------------------------------------------------------------------------------
// Belongs to one start of the program, not to the run.
static const char *const not_stored[] = {"resume", "overwrite", NULL};
static const char *const not_restored[] = {"out", "nodes", "virtual-ranks", "threads", NULL};
// What the stored parameters are, and what order their data has.
static const char *const fixed[] = {"model", "layers", "width", "heads", "kv-heads", "head-size", "vocab", "experts", "topk",
    "expert-width", "dense-width", "dense-layers", "shared-experts", "router", "renorm", "routed-scale", "router-bias", "tied",
    "doc-mask", "rope-theta", "norm-eps", "init-std", "router-skew", "seq", "seed", "optimizer", NULL};

json_t *options_json(const Options *o) {
    json_t *j = flags_json(o->flags);
    for (int i = 0; not_stored[i]; i++) json_object_del(j, not_stored[i]);
    return j;
}

void options_restore(Options *o, const json_t *stored, const char *where) {
    CHECK_DATA(json_is_object(stored), "%s: \"flags\" is missing, expected the settings of the stored run", where);
    json_t *now = flags_json(o->flags), *old = json_copy((json_t *)stored);
    for (int i = 0; fixed[i]; i++) {
        json_t *a = json_object_get(now, fixed[i]), *b = json_object_get(old, fixed[i]);
        if (!given(o, fixed[i]) || !b || json_equal(a, b)) continue;
        char *wanted = json_dumps(a, JSON_ENCODE_ANY), *held = json_dumps(b, JSON_ENCODE_ANY);
        die(STATUS_USAGE, __FILE__, __LINE__, "--%s is %s, but the run to continue was started with %s (%s; hint: leave the flag out)",
            fixed[i], wanted, held, where);
    }
    for (int i = 0; not_restored[i]; i++) json_object_del(old, not_restored[i]);
    for (int i = 0; not_stored[i]; i++) json_object_del(old, not_stored[i]);
    Flag *model = flags_find(o->flags, "model");
    if (model->set) model->set = 2; // equal to the stored one: the stored dimensions hold, not the preset's
    flags_load(o->flags, old, where);
    apply_preset(o); // for flags that an older version did not store
    json_decref(now);
    json_decref(old);
    check_combinations(o, where);
    model_of(o, where);
}

Schedule options_schedule(const Options *o) {
    int64_t fifth = o->steps / 5, twentieth = o->steps / 20;
    return (Schedule){.kind = o->schedule, .lr = o->lr, .min_lr = o->min_lr < 0 ? o->lr / 10 : o->min_lr, .steps = o->steps,
                      .warmup = o->warmup < 0 ? twentieth : o->warmup, .decay = o->decay_steps < 0 ? fifth : o->decay_steps};
}

// ---- shares ----------------------------------------------------------------------------------------------------------
// The largest divisor of `sequences` whose microbatch stays within 64 sequences and 8192 tokens: enough rows for each
// expert's product, and activations that fit a small machine.
static int auto_micro(int sequences, int T) {
    int best = 1;
    for (int m = 1; m <= sequences && m <= 64; m++)
        if (sequences % m == 0 && (int64_t)m * T <= 8192) best = m;
    return best;
}

Share options_share(const Options *o, const ModelConfig *c, int n_ranks) {
    Share s = {.R = o->ep ? (int)o->ep : n_ranks};
    CHECK_USAGE(n_ranks % s.R == 0, "--ep %d: %d ranks cannot be cut into groups of %d (hint: --ep must divide the number of ranks; 0 = all)",
                s.R, n_ranks, s.R);
    s.groups = n_ranks / s.R;
    CHECK_USAGE(c->E % s.R == 0, "%d experts cannot be shared evenly by the %d ranks of a group (hint: --experts a multiple of %d, or --ep a "
                "divisor of both %d ranks and %d experts)", c->E, s.R, s.R, n_ranks, c->E);
    int64_t below = o->batch / n_ranks * n_ranks;
    CHECK_USAGE(o->batch % n_ranks == 0, "--batch %lld cannot be shared evenly by %d ranks (hint: --batch %lld)", (long long)o->batch, n_ranks,
                (long long)(below ? below : n_ranks));
    s.sequences = (int)(o->batch / n_ranks);
    s.micro = o->micro_batch ? (int)o->micro_batch : auto_micro(s.sequences, c->T);
    CHECK_USAGE(s.sequences % s.micro == 0, "--micro-batch %d does not divide a rank's %d sequences (--batch %lld over %d ranks; hint: "
                "--micro-batch %d)", s.micro, s.sequences, (long long)o->batch, n_ranks, auto_micro(s.sequences, c->T));
    CHECK_USAGE((int64_t)s.micro * c->T <= INT32_MAX, "a microbatch of %d sequences of %d tokens, expected at most %d tokens (hint: a smaller "
                "--micro-batch)", s.micro, c->T, INT32_MAX);
    s.micros = s.sequences / s.micro;
    return s;
}
