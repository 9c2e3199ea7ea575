// The trainer's parts: learning rate, settings and their restoration, shares of a batch, the optimizer's walk over the table,
// sampling, load bars, run folders, and whole small runs: log, trace, evaluation on any number of ranks.
#include "data/shard.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include "kernels/rng.h"
#include "tests/common/child.h"
#include "train/folder.h"
#include "train/log.h"
#include "train/sample.h"
#include "train/trace.h"
#include "train/trainer.h"
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

// |got - want| <= bound, and ten times the bound away it would not be
static void close_to(double got, double want, double bound) {
    if (!(fabs(got - want) <= bound)) fail_msg("%.17g, expected %.17g within %g", got, want, bound);
    assert_false(fabs(got + 10 * bound - want) <= bound);
}

// ---- schedule --------------------------------------------------------------------------------------------------------
static void schedule(void **state) {
    (void)state;
    double eps = 8 * DBL_EPSILON;
    Schedule c = {SCHEDULE_COSINE, 1, 0.1, 10, 0, 110};
    close_to(schedule_lr(&c, 1), 0.1, eps);
    close_to(schedule_lr(&c, 10), 1, eps);
    close_to(schedule_lr(&c, 35), 0.1 + 0.9 * (1 + sqrt(0.5)) / 2, eps); // a quarter of the way
    close_to(schedule_lr(&c, 60), 0.55, eps);
    close_to(schedule_lr(&c, 110), 0.1, eps);
    close_to(schedule_lr(&c, 200), 0.1, eps);
    Schedule w = {SCHEDULE_WSD, 2, 1, 0, 20, 100};
    close_to(schedule_lr(&w, 1), 2, eps);
    close_to(schedule_lr(&w, 70), 2, eps);
    close_to(schedule_lr(&w, 80), 2, eps);
    close_to(schedule_lr(&w, 90), 1.5, eps);
    close_to(schedule_lr(&w, 100), 1, eps);
    Schedule flat = {SCHEDULE_COSINE, 1, 1, 5, 0, 5}; // warm-up to the end
    close_to(schedule_lr(&flat, 5), 1, eps);
}

// ---- settings --------------------------------------------------------------------------------------------------------
static Options *parse(int n, ...) {
    Options *o = host_alloc(sizeof *o);
    char *argv[40] = {"train"};
    va_list args;
    va_start(args, n);
    for (int i = 0; i < n; i++) argv[i + 1] = va_arg(args, char *);
    va_end(args);
    options_parse(o, n + 1, argv);
    return o;
}

static void free_options(Options *o) {
    flags_free(o->flags);
    free(o);
}

static void options(void **state) {
    (void)state;
    ModelConfig preset, c;
    config_preset(&preset, "dots-tiny");
    Options *o = parse(2, "--model", "dots-tiny");
    c = options_model(o);
    assert_memory_equal(&c, &preset, sizeof c);
    free_options(o);
    o = parse(5, "--layers=2", "--model=dots-tiny", "--no-router-bias", "--dense-layers=1", "--seq=17");
    c = options_model(o);
    assert_int_equal(c.L, 2);
    assert_int_equal(c.dense[0], 0);
    assert_int_equal(c.dense[1], 1);
    assert_int_equal(c.bias, 0);
    assert_int_equal(c.T, 17);
    assert_int_equal(c.E, preset.E);
    assert_int_equal(c.score, ROUTER_SIGMOID);
    // stored and read back, the same settings; a preset on the command line comes before stored dimensions
    json_t *j = options_json(o);
    char *dir = temp_dir(), *path = path_join(dir, "run.json"), *text = json_dumps(j, 0);
    file_write(path, text, strlen(text));
    Options *again = parse(2, "--config", path);
    json_t *k = options_json(again);
    assert_true(json_equal(j, k));
    Options copy;
    options_copy(&copy, again); // both are freed, once each
    c = options_model(&copy);
    assert_int_equal(c.dense[1], 1);
    flags_free(copy.flags);
    Options *other = parse(5, "--config", path, "--model", "1m", "--router-bias");
    assert_int_equal(options_model(other).C, 96);
    assert_int_equal(options_model(other).bias, 1);
    json_decref(j), json_decref(k);
    // the balancer's switches are settings of the run
    Options *switched = parse(8, "--balance", "eplb", "--no-slicing", "--no-dedup", "--plan-effort", "low", "--target", "balance");
    j = options_json(switched);
    free(text);
    text = json_dumps(j, 0);
    file_write(path, text, strlen(text));
    Options *kept = parse(4, "--config", path, "--balance", "uniform");
    PlanOptions plan = options_plan(kept), want = options_plan(switched);
    assert_true(plan.policy == POLICY_NONE && want.policy == POLICY_EPLB && kept->dedup == 0 && strcmp(options_balance(kept), "uniform") == 0);
    assert_true(plan.without == PLAN_NO_SLICING && plan.target == TARGET_BALANCE && plan.effort == EFFORT_LOW && want.without == plan.without);
    json_decref(j);
    free_options(switched), free_options(kept);
    free_options(o), free_options(again), free_options(other);
    free(path), free(text);
    temp_remove(dir);
}

typedef struct Words {
    int n;
    char *argv[12];
    const char *says;
    int restore;       // against the stored settings of a plain run
} Words;

static void parse_words(void *arg) {
    Words *w = arg;
    Options *o = host_alloc(sizeof *o), *plain = parse(0);
    options_parse(o, w->n, w->argv);
    if (w->restore) options_restore(o, options_json(plain), "trainer.json");
}

static void options_refused(void **state) {
    (void)state;
    Words cases[] = {
        {3, {"train", "--model", "nix"}, "nix", 0}, {3, {"train", "--steps", "0"}, "steps", 0}, {3, {"train", "--lr", "nan"}, "lr", 0},
        {3, {"train", "--dense-layers", "4"}, "dense-layers", 0}, {3, {"train", "--dense-layers", "1,,2"}, "dense-layers", 0},
        {3, {"train", "--topk", "9"}, "topk", 0}, {3, {"train", "--min-lr", "1"}, "min-lr", 0}, {3, {"train", "--min-lr", "-0.5"}, "min-lr", 0},
        {3, {"train", "--warmup", "2000"}, "warmup", 0}, {2, {"train", "word"}, "word", 0}, {3, {"train", "--head-size", "7"}, "head size", 0},
        {3, {"train", "--width", "1"}, "width", 0}, {3, {"train", "--init-std", "0"}, "init-std", 0}, {3, {"train", "--out", ""}, "out", 0},
        {3, {"train", "--steps", "1000000000000000001"}, "steps", 0},
        {3, {"train", "--balance", "best"}, "balance", 0}, {3, {"train", "--slots", "33"}, "slots", 0},
        {3, {"train", "--recv-room", "-0.5"}, "recv-room", 0}, {3, {"train", "--recv-room", "nan"}, "recv-room", 0},
        {5, {"train", "--resume", "x", "--layers", "3"}, "layers", 1}, {5, {"train", "--resume", "x", "--seed", "8"}, "seed", 1},
        {5, {"train", "--resume", "x", "--optimizer", "sgd"}, "optimizer", 1}, {4, {"train", "--resume", "x", "--tied"}, "tied", 1},
        {5, {"train", "--resume", "x", "--dense-layers", "1"}, "dense-layers", 1}, {5, {"train", "--resume", "x", "--model", "1m"}, "model", 1},
        {9, {"train", "--resume", "x", "--layers", "4", "--steps", "7", "--balance", "none"}, NULL, 1},
        {7, {"train", "--resume", "x", "--model", "demo", "--lr", "1e-4"}, NULL, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Child c = child_call(parse_words, &cases[i]);
        if (c.status != (cases[i].says ? STATUS_USAGE : 0) || (cases[i].says && !strstr(c.out, cases[i].says)))
            fail_msg("case %zu: status %d, %s", i, c.status, c.out);
    }
}

static void restored(void **state) {
    (void)state;
    Options *stored = parse(8, "--layers", "3", "--steps", "50", "--lr", "0.5", "--slots", "1");
    json_t *j = options_json(stored);
    Options *o = parse(6, "--resume", "x", "--steps", "70", "--model", "demo");
    options_restore(o, j, "trainer.json");
    assert_int_equal(o->layers, 3); // though the preset says 4
    assert_int_equal(o->steps, 70);
    assert_int_equal(o->slots, 1);
    assert_true(o->lr == 0.5);
    json_decref(j);
    free_options(stored), free_options(o);
}

typedef struct Damage {
    const char *key, *value; // in the stored flags
    int n, status;
    char *argv[8];
} Damage;

static void restore_damaged(void *arg) {
    Damage *d = arg;
    Options *o = host_alloc(sizeof *o);
    json_t *j = options_json(parse(0));
    json_object_set_new(j, d->key, json_loads(d->value, JSON_DECODE_ANY, NULL));
    options_parse(o, d->n, d->argv);
    options_restore(o, j, "trainer.json");
}

// The file's fault is status 3 and names it, the command line's 2.
static void restored_damaged(void **state) {
    (void)state;
    Damage cases[] = {{"steps", "0", 3, STATUS_DATA, {"train", "--resume", "x"}}, {"heads", "3", 3, STATUS_DATA, {"train", "--resume", "x"}},
                      {"topk", "9", 3, STATUS_DATA, {"train", "--resume", "x"}}, {"min-lr", "1.0", 3, STATUS_DATA, {"train", "--resume", "x"}},
                      {"dense-layers", "\"7\"", 3, STATUS_DATA, {"train", "--resume", "x"}}, {"stepz", "1", 3, STATUS_DATA, {"train", "--resume", "x"}},
                      {"warmup", "20", 5, STATUS_USAGE, {"train", "--resume", "x", "--steps", "10"}},
                      {"warmup", "20", 3, 0, {"train", "--resume", "x"}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Child c = child_call(restore_damaged, &cases[i]);
        if (c.status != cases[i].status || (c.status == STATUS_DATA && !strstr(c.out, "trainer.json"))) fail_msg("case %zu: %d %s", i, c.status, c.out);
    }
}

typedef struct ShareCase {
    int ranks, ep, batch, micro, T; // asked
    int R, groups, sequences, want_micro, micros;
    const char *says;
} ShareCase;

static void share_case(void *arg) {
    const ShareCase *s = arg;
    Options *o = parse(0);
    o->ep = s->ep, o->batch = s->batch, o->micro_batch = s->micro, o->seq = s->T;
    ModelConfig c = options_model(o);
    Share got = options_share(o, &c, s->ranks);
    printf("%d %d %d %d %d", got.R, got.groups, got.sequences, got.micro, got.micros);
    free_options(o);
}

static void shares(void **state) {
    (void)state;
    static const ShareCase cases[] = {
        {1, 0, 16, 0, 128, 1, 1, 16, 16, 1, NULL}, {4, 0, 16, 0, 128, 4, 1, 4, 4, 1, NULL}, {8, 2, 16, 1, 128, 2, 4, 2, 1, 2, NULL},
        {1, 0, 96, 0, 1024, 1, 1, 96, 8, 12, NULL}, {1, 0, 13, 0, 1024, 1, 1, 13, 1, 13, NULL}, {2, 1, 6, 0, 128, 1, 2, 3, 3, 1, NULL},
        {4, 3, 16, 0, 128, 0, 0, 0, 0, 0, "--ep 3"}, {3, 0, 12, 0, 128, 0, 0, 0, 0, 0, "8 experts"}, {4, 0, 10, 0, 128, 0, 0, 0, 0, 0, "--batch 8"},
        {4, 0, 2, 0, 128, 0, 0, 0, 0, 0, "--batch 4"}, {2, 0, 16, 3, 128, 0, 0, 0, 0, 0, "--micro-batch 8"},
        {1, 0, 512, 512, 1 << 23, 0, 0, 0, 0, 0, "smaller --micro-batch"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ShareCase *s = &cases[i];
        Child c = child_call(share_case, (void *)s);
        char want[64];
        snprintf(want, sizeof want, "%d %d %d %d %d", s->R, s->groups, s->sequences, s->want_micro, s->micros);
        if (c.status != (s->says ? STATUS_USAGE : 0) || !strstr(c.out, s->says ? s->says : want)) fail_msg("case %zu: %d %s", i, c.status, c.out);
    }
}

// ---- optimizer -------------------------------------------------------------------------------------------------------
static real first_of(Dev *d, const real *w) {
    real x;
    dev_download(d, &x, w, sizeof x);
    return x;
}

// With gradient 0 everywhere, as an expert has it that got no token: matrices decay, norms and biases stay; moments fade.
static void optimizer_body(Comm *world, void *arg) {
    (void)arg;
    Options *o = parse(10, "--weight-decay", "0.5", "--layers", "2", "--width", "8", "--vocab", "11", "--expert-width", "4");
    ModelConfig c = options_model(o);
    Dev *d = dev_init((DevOptions){.threads = 1, .poison = 1});
    ModelRun run = {.max_B = 1, .T = c.T, .micros = 1, .training = 1, .seed = 1, .cost = {.N = 1, .G = 1}, .plan = {.block = 1}};
    Model *m = model_init(d, world, world, &c, &run);
    Params *ps = model_params(m);
    Optimizer opt = optimizer_alloc(d, ps, o);
    optimizer_start(&opt, d, ps);
    model_zero_grad(m);
    double *sumsq = model_grad_norm(m, NULL);
    int decayed = 0, kept = 0;
    for (int i = 0; i < ps->n; i++) {
        const Param *p = &ps->p[i];
        real *w = param_w(ps, p), one = 1;
        if (!w) continue;
        dev_upload(d, w, &one, sizeof one);
    }
    wide moment = 2;
    const Param *experts = param_find(ps, "experts", 1);
    dev_upload(d, optimizer_part(&opt, ps, experts).state[STATE_V] + 3, &moment, sizeof moment);
    optimizer_set(&opt, d, 0.01, 5);
    optimizer_step(&opt, d, ps, sumsq);
    for (int i = 0; i < ps->n; i++) {
        const Param *p = &ps->p[i];
        real *w = param_w(ps, p);
        if (!w) continue;
        double bound = 4 * (sizeof(real) == 8 ? DBL_EPSILON : FLT_EPSILON);
        close_to(first_of(d, w), p->decay ? 1 - 0.01 * 0.5 : 1, bound);
        decayed += p->decay, kept += !p->decay;
        // every element counts as replicated or as an expert's
        assert_true(optimizer_part(&opt, ps, p).n == (p->owner == OWNER_STATE ? 0 : p->n));
    }
    assert_true(decayed >= 2 + 2 * 4 && kept >= 1 + 2 * 4);
    dev_download(d, &moment, optimizer_part(&opt, ps, experts).state[STATE_V] + 3, sizeof moment);
    close_to(moment, 2 * 0.95, 8 * (sizeof(wide) == 8 ? DBL_EPSILON : FLT_EPSILON));
    model_free(m);
    dev_free(d);
    free_options(o);
}

static void optimizer(void **state) {
    (void)state;
    comm_run(&(int){0}, &(char **){NULL}, 1, 0, optimizer_body, NULL);
}

// ---- sampling --------------------------------------------------------------------------------------------------------
static void sampling(void **state) {
    (void)state;
    enum { V = 5, N = 20000 };
    const wide logits[V] = {(wide)log(0.1), (wide)log(0.4), (wide)log(0.05), (wide)log(0.4), (wide)log(0.05)};
    int count[3][V] = {{0}};
    Sampler plain = {1, 0, 1, 9}, top3 = {1, 3, 1, 9}, most = {1, 0, 0.75, 9}, greedy = {0, 0, 1, 9}, one = {2, 1, 1, 9};
    for (uint64_t i = 0; i < N; i++) {
        count[0][sample_token(logits, V, &plain, i)]++;
        count[1][sample_token(logits, V, &top3, i)]++;
        count[2][sample_token(logits, V, &most, i)]++;
        assert_int_equal(sample_token(logits, V, &greedy, i), 1); // a tie goes to the lower token
        assert_int_equal(sample_token(logits, V, &one, i), 1);
        assert_int_equal(sample_token(logits, V, &plain, i), sample_token(logits, V, &plain, i));
    }
    static const double want[3][V] = {{0.1, 0.4, 0.05, 0.4, 0.05}, {1 / 9.0, 4 / 9.0, 0, 4 / 9.0, 0}, {0, 0.5, 0, 0.5, 0}};
    for (int k = 0; k < 3; k++)
        for (int v = 0; v < V; v++) close_to((double)count[k][v] / N, want[k][v], want[k][v] > 0 ? 5 * sqrt(want[k][v] / N) : 1e-9);
}

// ---- bars, folders ---------------------------------------------------------------------------------------------------
static void bars(void **state) {
    (void)state;
    char out[64];
    const int64_t even[4] = {5, 5, 5, 5}, skew[4] = {0, 1, 2, 9}, none[2] = {0, 0};
    log_bars(out, even, 4, 1);
    assert_string_equal(out, "▄▄▄▄");
    log_bars(out, even, 4, 0);
    assert_string_equal(out, "====");
    log_bars(out, skew, 4, 0);
    assert_string_equal(out, "__-@");
    log_bars(out, none, 2, 1);
    assert_string_equal(out, "▁▁");
}

typedef struct FolderCase {
    const char *out, *checkpoint;
    int overwrite, append;
    int meanwhile;       // another run takes the folder between choice and making
    const char *in;      // working directory
} FolderCase;

static void make(const char *dir, const char *name) {
    char *path = str_format("%s/%s", dir, name), *slash = strrchr(path, '/');
    *slash = 0;
    dir_make(path);
    *slash = '/';
    file_write(path, "{}", 2);
    free(path);
}

static void folder_case(void *arg) {
    FolderCase *f = arg;
    if (f->in && chdir(f->in) != 0) abort();
    Options *o = parse(0);
    o->out = f->out, o->overwrite = f->overwrite;
    char *path = folder_choose(o, f->checkpoint, &f->append);
    if (f->meanwhile) make(path, "run.json");
    folder_make(o, f->checkpoint, &path, f->append);
    printf("chose %s %d.", path, f->append);
}

static int there(const char *dir, const char *name) {
    char *path = path_join(dir, name);
    int found = file_size(path) >= 0;
    free(path);
    return found;
}

static void folders(void **state) {
    (void)state;
    char *dir = temp_dir(), *run = path_join(dir, "run"), *old = path_join(run, "step_00000002"), *last = path_join(run, "step_00000004");
    char *fresh = path_join(dir, "fresh"), *want = str_format("chose %s 1.", run);
    const char *const files[] = {"step_00000002/trainer.json", "step_00000002/config.json", "step_00000004/trainer.json",
                                 "step_00000004/config.json", "log.jsonl", "run.json", "notes.txt"};
    for (int i = 0; i < 7; i++) make(run, files[i]);
    assert_int_equal(child_call(folder_case, &(FolderCase){.out = run}).status, STATUS_USAGE);
    assert_int_equal(child_call(folder_case, &(FolderCase){.out = run, .checkpoint = old}).status, STATUS_USAGE);
    assert_int_equal(child_call(folder_case, &(FolderCase){.checkpoint = old}).status, STATUS_USAGE);
    assert_int_equal(child_call(folder_case, &(FolderCase){.checkpoint = last, .overwrite = 1}).status, STATUS_USAGE);
    assert_int_equal(child_call(folder_case, &(FolderCase){.out = fresh, .checkpoint = old}).status, 0);
    assert_non_null(strstr(child_call(folder_case, &(FolderCase){.checkpoint = last}).out, want));
    assert_true(there(run, "log.jsonl") && file_is_dir(fresh));
    assert_int_equal(child_call(folder_case, &(FolderCase){.out = run, .overwrite = 1}).status, 0);
    assert_int_equal(child_call(folder_case, &(FolderCase){.out = fresh, .meanwhile = 1}).status, STATUS_USAGE);
    assert_non_null(strstr(child_call(folder_case, &(FolderCase){.in = dir}).out, "chose runs/demo-001 0."));
    assert_non_null(strstr(child_call(folder_case, &(FolderCase){.in = dir, .meanwhile = 1}).out, "chose runs/demo-003 0.")); // 002 was taken
    assert_true(there(run, "notes.txt") && !there(run, "log.jsonl") && !there(run, "run.json") && !file_is_dir(old)); // no file of others
    // one run at a time in a folder
    Options *o = parse(2, "--out", fresh);
    o->overwrite = 1;
    int held = folder_make(o, NULL, &fresh, 0);
    Child c = child_call(folder_case, &(FolderCase){.out = fresh, .overwrite = 1});
    assert_true(c.status == STATUS_USAGE && strstr(c.out, "another run"));
    close(held);
    assert_int_equal(child_call(folder_case, &(FolderCase){.out = fresh, .overwrite = 1}).status, 0);
    free_options(o);
    free(run), free(old), free(last), free(fresh), free(want);
    temp_remove(dir);
}

// Steps past the checkpoint are done again: their lines and half a line go, other lines stay.
static void log_goes_on(void **state) {
    (void)state;
    static const char old[] = "{\"header\":1}\n{\"step\":1,\"loss\":2}\n{\"step\":9}\n{\"resume\":1}\n{\"step\":10}\n{\"step\":2}\n{\"st";
    char *dir = temp_dir(), *path = path_join(dir, "log.jsonl");
    file_write(path, old, strlen(old));
    log_close(log_open(dir, 2));
    char *text = file_read(path, NULL);
    assert_string_equal(text, "{\"header\":1}\n{\"step\":1,\"loss\":2}\n{\"resume\":1}\n{\"step\":2}\n");
    free(text), free(path);
    temp_remove(dir);
}

// ---- whole runs ------------------------------------------------------------------------------------------------------
enum { STEPS = 4, EXPERTS = 4, TOPK = 2, SEQ = 12, BATCH = 8 };

typedef struct Run {
    char *dir, *out;
    int ranks, ep, micro, recompute;
} Run;

// What the run took of memory, by kind, is what was counted before.
static void check_memory(const Trainer *t) {
    size_t taken[MEMORY_KINDS];
    dev_taken(t->d, taken);
    for (int k = 0; k < MEMORY_KINDS; k++) {
        double said = t->memory.kind[k] + t->memory.idle[k];
        CHECK_DEVICE(said > 0 || k == MEMORY_SLOTS, "nothing is said of %s", memory_names[k]);
        CHECK_DEVICE((double)taken[k] == said, "%s: %zu bytes taken, %.0f said", memory_names[k], taken[k], said);
    }
}

static void train_body(Comm *world, void *options) {
    Trainer *t = host_alloc(sizeof *t);
    trainer_open(t, world, options);
    trainer_run(t);
    check_memory(t);
    trainer_close(t);
    free(t);
}

static void train_run(void *arg) {
    const Run *r = arg;
    char ep[16], micro[16], recompute[16];
    snprintf(ep, sizeof ep, "%d", r->ep);
    snprintf(micro, sizeof micro, "%d", r->micro);
    snprintf(recompute, sizeof recompute, "%d", r->recompute);
    Options *o = parse(39, "--data", r->dir, "--out", r->out, "--layers", "2", "--width", "16", "--heads", "2", "--kv-heads", "1", "--head-size",
                       "8", "--experts", "4", "--expert-width", "8", "--seq", "12", "--batch", "8", "--steps", "4", "--eval-every", "2",
                       "--trace-every=2", "--eval-windows=5", "--final-windows=7", "--ep", ep, "--micro-batch", micro,
                       "--recompute", recompute, "--sample-every", "4", "--threads", "1");
    comm_run(&(int){0}, &(char **){NULL}, r->ranks, 0, train_body, o);
    free_options(o);
}

static void make_shard(const char *dir, const char *prefix, int n) {
    ShardWriter *w = shard_writer_open(dir, prefix, 0, 257, 256);
    int *tok = host_alloc(SIZE(n, sizeof(int)));
    for (int i = 0; i < n; i++) tok[i] = i % 50 == 0 ? 256 : (int)(rng_u64(5, 6, (uint64_t)i) % 64);
    shard_put(w, tok, (size_t)n);
    shard_writer_close(w);
    free(tok);
}

static json_t *read_log(const char *out) { // array of its lines
    char *path = path_join(out, "log.jsonl"), *text = file_read(path, NULL), *rest = text;
    json_t *lines = json_array();
    for (char *line; (line = strsep(&rest, "\n"));) {
        if (!*line) continue;
        json_t *j = json_loads(line, 0, NULL);
        assert_non_null(j);
        json_array_append_new(lines, j);
    }
    free(path), free(text);
    return lines;
}

static double value(const json_t *lines, int line, const char *key) {
    json_t *v = json_object_get(json_array_get(lines, (size_t)line), key);
    assert_true(json_is_number(v));
    return json_number_value(v);
}

// The header is the run's, every group has its own demand, and the demand adds up to what the log counts.
static void check_trace(const char *out, const Run *r) {
    char *path = path_join(out, "route.bin");
    TraceHeader h;
    TraceRecord a;
    TraceReader *t = trace_read_open(path, &h);
    assert_true(h.R == r->ep && h.groups == r->ranks / r->ep && h.E == EXPERTS && h.K == TOPK && h.layers == 2 && h.stages == STAGES);
    assert_true(h.micros == BATCH / r->ranks / r->micro && h.micro_tokens == SEQ * r->micro && h.elem_bytes == sizeof(real));
    int demands = 0, times = 0, differ = 0, before[64] = {0}; // the group's before
    int64_t pairs = 0;
    while (trace_read(t, &a) != TRACE_END) {
        assert_true(a.step == 2 || a.step == 4);
        demands += a.kind == TRACE_DEMAND, times += a.kind == TRACE_TIMES;
        if (a.kind != TRACE_DEMAND) continue;
        assert_true(a.plan.pairs_self + a.plan.pairs_node + a.plan.pairs_inter == a.plan.total && a.plan.hash != 0);
        int64_t load[8] = {0}, most = 0; // the group's own plan
        for (int i = 0; i < h.R * h.E; i++) pairs += a.D[i], differ += a.D[i] != before[i], load[i % h.E / (h.E / h.R)] += a.D[i];
        for (int i = 0; i < h.R; i++) most = load[i] > most ? load[i] : most;
        assert_int_equal(a.plan.max_load_before, most);
        memcpy(before, a.D, SIZE(h.R, h.E, sizeof(int)));
    }
    assert_int_equal(times, 2);
    assert_true(differ > demands * h.R * h.E / 2); // every group has its own
    assert_int_equal(demands, 2 * h.micros * h.layers * h.groups);
    assert_int_equal(pairs, 2 * BATCH * SEQ * TOPK * h.layers);
    trace_read_close(t);
    free(path);
}

// The same run on one rank and on others: the same losses and evaluations within rounding, whatever was left over for a round.
static void runs(void **state) {
    (void)state;
    // ranks, of a group, sequences of a microbatch; every level of --recompute has its turn
    static const int layout[][3] = {{1, 1, 8}, {2, 2, 2}, {4, 2, 2}, {8, 4, 1}};
    char *dir = temp_dir();
    make_shard(dir, "train", 2000);
    make_shard(dir, "val", 400);
    double loss[STEPS], val[STEPS];
    // the losses are means over about a hundred tokens behind a few dozen products
    double bound = 200 * (sizeof(real) == 8 ? DBL_EPSILON : FLT_EPSILON);
    for (int i = 0; i < 4; i++) {
        Run r = {.dir = dir, .out = str_format("%s/run%d", dir, i), .ranks = layout[i][0], .ep = layout[i][1], .micro = layout[i][2], .recompute = i};
        Child c = child_call(train_run, &r);
        if (c.status) fail_msg("%s", c.out);
        json_t *lines = read_log(r.out);
        assert_int_equal(json_array_size(lines), 1 + STEPS);
        assert_true(json_is_object(json_object_get(json_array_get(lines, 0), "header")));
        for (int s = 0; s < STEPS; s++) {
            assert_true(value(lines, s + 1, "step") == s + 1 && value(lines, s + 1, "tokens") == (s + 1) * BATCH * SEQ);
            assert_true(value(lines, s + 1, "pairs_self") + value(lines, s + 1, "pairs_node") == BATCH * SEQ * TOPK * 2);
            json_t *v = json_object_get(json_array_get(lines, (size_t)s + 1), "val_loss");
            assert_true(s % 2 ? json_is_number(v) : json_is_null(v));
            double now = value(lines, s + 1, "loss");
            if (i == 0) loss[s] = now, val[s] = s % 2 ? json_number_value(v) : 0;
            close_to(now, loss[s], bound * loss[s]);
            if (s % 2) close_to(json_number_value(v), val[s], bound * val[s]);
        }
        assert_true(value(lines, 2, "val_windows") == 5 && value(lines, 4, "val_windows") == 7);
        assert_true(val[1] != val[3] && loss[0] > 4);
        check_trace(r.out, &r);
        json_decref(lines);
        free(r.out);
    }
    temp_remove(dir);
}

// Evaluations and steps that begin with too little room for rows: what they give, and that they have grown.
typedef struct Room {
    Options *o;
    double val[2], loss;
    int grown, reruns;
    MoeRoom room;
} Room;

static void room_body(Comm *world, void *arg) {
    Room *r = arg;
    Trainer *t = host_alloc(sizeof *t);
    StepStats s;
    trainer_open(t, world, r->o);
    double first = trainer_eval(t, 0).loss;
    int grown = moe_room(t->moe).grown;
    trainer_step(t, &s);
    double second = trainer_eval(t, 3).loss;
    if (t->info->rank == 0) *r = (Room){r->o, {first, second}, s.loss, grown, s.reruns, moe_room(t->moe)};
    trainer_close(t);
    free(t);
}

static void little_room(void **state) {
    (void)state;
    char *dir = temp_dir();
    make_shard(dir, "train", 2000);
    make_shard(dir, "val", 400);
    Room r[3] = {{0}};
    static const char *const factors[] = {"0", "0.3", "-1"};
    for (int i = 0; i < 3; i++) {
        char *out = str_format("%s/room%d", dir, i);
        r[i].o = parse(27, "--data", dir, "--out", out, "--layers", "2", "--width", "16", "--heads", "2", "--kv-heads", "1", "--head-size", "8",
                       "--experts", "4", "--expert-width", "8", "--seq", "12", "--batch", "8", "--recv-room", factors[i], "--router-skew", "2",
                       "--overwrite");
        comm_run(&(int){0}, &(char **){NULL}, 4, 2, room_body, &r[i]);
        free_options(r[i].o);
        free(out);
    }
    assert_true(r[0].grown == 0 && r[0].reruns == 0 && r[0].val[0] > 4 && r[0].val[0] != r[0].val[1]);
    assert_true(r[1].grown > 0 && r[1].val[0] == r[0].val[0] && r[1].val[1] == r[0].val[1] && r[1].loss == r[0].loss);
    assert_int_equal(r[1].room.needed_crossings > 0, 1);
    assert_true(r[1].room.bytes < r[0].room.bytes);
    assert_true(r[2].room.grown == 0 && r[2].room.rows == r[0].room.rows); // the CPU's own choice is the worst case
    temp_remove(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(schedule), cmocka_unit_test(options), cmocka_unit_test(options_refused), cmocka_unit_test(restored),
        cmocka_unit_test(shares), cmocka_unit_test(optimizer), cmocka_unit_test(sampling), cmocka_unit_test(bars),
        cmocka_unit_test(folders), cmocka_unit_test(log_goes_on), cmocka_unit_test(restored_damaged),
        cmocka_unit_test(runs), cmocka_unit_test(little_room)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
