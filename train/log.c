#include "train/log.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include <errno.h>
#include <langinfo.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef GIT // given by the Makefile
#define GIT "unknown"
#endif

// What the run has done since this start of the program.
typedef struct Totals {
    int64_t steps, pairs_self, pairs_node, pairs_inter, bytes_node, bytes_inter, weight_bytes, copies, plans, plans_with_copies, dropped;
    double ms, wait_ms, plan_share, before, after, before_max, after_max, maxvio, tokens;
} Totals;

struct Log {
    FILE *file;
    char *path;
    int utf8;
    Totals total;
    double best_val, last_val, last_bits;
    int64_t best_step;
};

// ---- JSON lines ------------------------------------------------------------------------------------------------------
static void put(json_t *j, const char *key, double v) { json_object_set_new(j, key, isfinite(v) ? json_real(v) : json_null()); }
static void put_int(json_t *j, const char *key, int64_t v) { json_object_set_new(j, key, json_integer(v)); }
static void put_text(json_t *j, const char *key, const char *v) { json_object_set_new(j, key, v ? json_string(v) : json_null()); }

static void write_line(Log *l, json_t *j) {
    char *text = json_dumps(j, JSON_COMPACT);
    int good = text && fprintf(l->file, "%s\n", text) > 0 && fflush(l->file) == 0;
    CHECK_DATA(good, "cannot write %s: %s (hint: is the disk full?)", l->path, strerror(errno));
    free(text);
    json_decref(j);
}

// Steps that a killed run did after its last checkpoint are done again: their lines go, and so does half a line at the end.
static void cut_log(const char *path, int64_t step) {
    static const char start[] = "{\"step\":"; // of the lines that step_line writes
    size_t n, kept = 0;
    char *text = file_read(path, &n);
    for (size_t at = 0, next; at < n; at = next) {
        char *end = memchr(text + at, '\n', n - at);
        next = end ? (size_t)(end - text) + 1 : n;
        int later = strncmp(text + at, start, sizeof start - 1) == 0 && strtoll(text + at + sizeof start - 1, NULL, 10) > step;
        if (!end || later) continue;
        memmove(text + kept, text + at, next - at);
        kept += next - at;
    }
    if (kept < n) file_write(path, text, kept);
    free(text);
}

Log *log_open(const char *run, int64_t from) {
    Log *l = host_alloc(sizeof *l);
    l->path = path_join(run, "log.jsonl");
    if (from >= 0 && file_size(l->path) > 0) cut_log(l->path, from);
    l->file = fopen(l->path, from >= 0 ? "ab" : "wb");
    CHECK_DATA(l->file, "cannot open %s: %s", l->path, strerror(errno));
    l->utf8 = strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
    l->best_val = l->last_val = l->last_bits = NAN;
    return l;
}

void log_close(Log *l) {
    CHECK_DATA(fclose(l->file) == 0, "cannot write %s: %s (hint: is the disk full?)", l->path, strerror(errno));
    free(l->path);
    free(l);
}

static json_t *field_meanings(void) {
    static const char *const m[][2] = {
        {"step", "updates so far"}, {"tokens", "trained on so far"}, {"loss", "nats per token of this step's batch, without the routers' losses"},
        {"val_loss", "nats per token of val_windows evenly spaced validation windows; null without an evaluation"},
        {"val_windows", "validation windows that val_loss is the mean of"}, {"val_bits_per_byte", "the same per byte of text, in bits"}, {"lr", "learning rate of this update"},
        {"grad_norm", "of all gradients before clipping: replicated ones once, every expert once"},
        {"tok_s", "tokens per second over all ranks"}, {"step_ms", "from end to end on rank 0, without evaluation and checkpoints"},
        {"wait_ms", "waiting for other ranks, mean over the ranks"}, {"wait_max_ms", "the same of the rank that waited most"},
        {"aux_loss", "balance loss E sum f P with f over K, 1 at balance; mean over layers, without its coefficient"},
        {"z_loss", "mean over tokens and layers of the squared log-sum-exp of the router's logits, without its coefficient"},
        {"maxvio", "most loaded expert over the mean, minus 1, in this step's batch; mean over layers"},
        {"rank_max_mean_before", "pairs on the fullest rank over the mean, every expert at home; mean over layers, microbatches, groups"},
        {"rank_max_mean_after", "the same as computed, with the plans' copies"},
        {"rank_max_mean_before_max", "rank_max_mean_before of the worst plan"}, {"rank_max_mean_after_max", "rank_max_mean_after of the worst plan"},
        {"pairs_self", "(token, expert) pairs computed on the token's own rank; over layers, microbatches and groups"},
        {"pairs_node", "on another rank of its node"}, {"pairs_inter", "on another node"},
        {"bytes_node", "activations and routing weights between ranks of a node, forward and backward, and what is passed on for other nodes"},
        {"bytes_inter", "the same between nodes, with the destinations of what crosses"}, {"weight_bytes", "experts' weights copied out (twice) and gradients back"},
        {"copies", "temporary copies of experts, all plans of the step"}, {"plans", "made in the step"},
        {"plans_with_copies", "plans of the step that have copies"}, {"dropped", "pairs dropped by --capacity"},
        {"recv_rows", "rows that may come to a rank before its buffers must grow (--recv-room)"},
        {"reruns", "times the step was run again with larger buffers"},
        {"crossings", "rows that went to another node: tokens or, without dedup, pairs"},
        {"plan_us", "of one MoE layer and microbatch: making the plan and its routes, microseconds, mean over ranks"},
        {"counts_us", "likewise: the exchange of counts before it, of the rank that came last (the others' waiting is in wait_ms)"},
        {"moe_us", "likewise: all of the layer, forward and backward, waiting included"},
        {"plan_share", "critical path of balancing: plan_us and counts_us over moe_us"}, {"stage_ms", "where the step's time went, mean over ranks"}};
    json_t *j = json_object();
    for (size_t i = 0; i < sizeof m / sizeof *m; i++) put_text(j, m[i][0], m[i][1]);
    return j;
}

static json_t *cost_json(const Cost *c) {
    return json_pack("{s:s, s:i, s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "name", c->name, "nodes", c->N, "ranks_per_node", c->G, "slots",
                     c->S, "pair_compute_ps", (json_int_t)c->pair_compute_ps, "pair_inter_ps", (json_int_t)c->pair_inter_ps, "pair_intra_ps",
                     (json_int_t)c->pair_intra_ps, "copy_inter_ps", (json_int_t)c->copy_inter_ps, "copy_intra_ps",
                     (json_int_t)c->copy_intra_ps, "overlap_permille", (json_int_t)c->overlap_permille, "plan_fixed_ps",
                     (json_int_t)c->plan_fixed_ps);
}

static const char uniform_warning[] = "balance uniform: experts in turn, not the router's choice. Not a training method: the speed ceiling";

static double idle_sum(const MemoryUse *u) {
    double sum = 0;
    for (int k = 0; k < MEMORY_KINDS; k++) sum += u->idle[k];
    return sum;
}

static json_t *memory_json(const MemoryUse *u) { // bytes of a rank
    json_t *j = json_object();
    for (int k = 0; k < MEMORY_KINDS; k++) put(j, memory_names[k], u->kind[k]);
    put(j, "program", u->program), put(j, "data", u->data), put(j, "peers", u->peers), put(j, "idle", idle_sum(u)), put(j, "free", u->there);
    return j;
}

static void header_line(Log *l, const Trainer *t, ModelSize size) {
    json_t *h = json_object();
    char when[64], host[256] = "";
    time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", &utc);
    gethostname(host, sizeof host - 1);
    put_text(h, "version", GIT);
    put_text(h, "started", when);
    put_text(h, "host", host);
    put_int(h, "ranks", t->info->size);
    put_int(h, "nodes", t->info->N);
    put_int(h, "ep", t->share.R);
    put_int(h, "ep_groups", t->share.groups);
    put_int(h, "micro_batch", t->share.micro);
    put_int(h, "micro_batches", t->share.micros);
    put_text(h, "transport", t->info->name);
    put_int(h, "threads", t->threads);
    put_text(h, "device", dev_name(t->d));
    put_int(h, "params", size.params);
    put_int(h, "active_params", size.active);
    put_int(h, "flops_per_token", size.flops_per_token);
    put_int(h, "data_tokens", loader_tokens(t->train));
    put_int(h, "data_windows", loader_windows(t->train));
    if (t->moe) json_object_set_new(h, "cost", cost_json(&t->cost));
    if (t->o.balance == BALANCE_UNIFORM) put_text(h, "warning", uniform_warning);
    json_object_set_new(h, "memory", memory_json(&t->memory));
    json_object_set_new(h, "flags", options_json(&t->o));
    json_object_set_new(h, "fields", field_meanings());
    write_line(l, json_pack("{s:o}", "header", h));
}

// ---- the start table -------------------------------------------------------------------------------------------------
// "1.23 M" and the like, into a buffer of 16
static const char *count_text(char *out, double v) {
    const char *unit[] = {"", " k", " M", " G", " T"};
    int i = 0;
    while (v >= 1000 && i < 4) v /= 1000, i++;
    snprintf(out, 16, i == 0 ? "%.0f%s" : v < 10 ? "%.2f%s" : v < 100 ? "%.1f%s" : "%.0f%s", v, unit[i]);
    return out;
}

static void print_facts(const Trainer *t, ModelSize size) {
    char a[16], b[16], c[16], model[64];
    const ModelConfig *m = &t->c;
    int dense = 0;
    for (int l = 0; l < m->L; l++) dense += m->dense[l];
    printf("run     %s%s%s\n", t->out, t->resumed ? ", continues " : "", t->resumed ? t->resumed : "");
    printf("ranks   %d on %d node%s, %s; %d thread%s each; %s\n", t->info->size, t->info->N, t->info->N == 1 ? "" : "s", t->info->name,
           t->threads, t->threads == 1 ? "" : "s", dev_name(t->d));
    printf("model   %s: %s parameters, %s per token, %s FLOPs per token\n", options_model_name(&t->o, model, sizeof model),
           count_text(a, (double)size.params), count_text(b, (double)size.active), count_text(c, (double)size.flops_per_token));
    printf("        %d layers (%d dense), width %d, %d heads of %d (%d key/value), vocabulary %d", m->L, dense, m->C, m->NH, m->HS, m->NKV, m->V);
    if (m->E) printf("; %d experts of width %d, %d per token, %s router", m->E, m->F, m->K, m->score == ROUTER_SIGMOID ? "sigmoid" : "softmax");
    double epochs = (double)t->o.steps * (double)t->o.batch / (double)loader_windows(t->train);
    printf("\ndata    %s: %s tokens, %s windows of %d; %.2f epochs\n", t->o.data, count_text(a, (double)loader_tokens(t->train)),
           count_text(b, (double)loader_windows(t->train)), m->T, epochs);
    printf("val     ");
    if (t->val) printf("%s tokens, %s windows\n", count_text(a, (double)loader_tokens(t->val)), count_text(b, (double)loader_windows(t->val)));
    else printf("none\n");
    printf("batch   %lld sequences of %d = %lld tokens: %d ranks x %d microbatches x %d sequences; %lld steps\n", (long long)t->o.batch, m->T,
           (long long)t->o.batch * m->T, t->info->size, t->share.micros, t->share.micro, (long long)t->o.steps);
    if (!t->moe) return;
    printf("experts %d group%s of %d ranks, %d experts each; balance %s, %d slots; costs: %s\n", t->share.groups, t->share.groups == 1 ? "" : "s",
           t->share.R, m->E / t->share.R, options_balance(&t->o), t->cost.S, t->o.cluster ? t->o.cluster : "the built-in ones of a "
           "local machine (--cluster FILE gives others)");
    if (t->o.balance == BALANCE_UNIFORM) printf("WARNING %s\n", uniform_warning);
    printf("        pair %.3f us computed, %.3f us in a node, %.3f us between nodes; copy %.1f us, %.1f us; plan with copies %.1f us\n",
           (double)t->cost.pair_compute_ps * 1e-6, (double)t->cost.pair_intra_ps * 1e-6, (double)t->cost.pair_inter_ps * 1e-6,
           (double)t->cost.copy_intra_ps * 1e-6, (double)t->cost.copy_inter_ps * 1e-6, (double)t->cost.plan_fixed_ps * 1e-6);
}

static void print_memory(const Trainer *t) {
    const MemoryUse *u = &t->memory;
    printf("memory  %.0f MB per rank of %.0f that are free:", memory_sum(u) * 1e-6, u->there * 1e-6);
    for (int k = 0; k < MEMORY_KINDS; k++) printf("%s %s %.1f", k ? "," : "", memory_names[k], u->kind[k] * 1e-6);
    if (u->program > 0) printf(", program %.1f, data %.1f, peers' windows %.1f", u->program * 1e-6, u->data * 1e-6, u->peers * 1e-6);
    if (idle_sum(u) > 0) printf("; %.0f more if all pairs went to one rank", idle_sum(u) * 1e-6);
    printf("\n");
}

void log_start(Log *l, const Trainer *t) {
    ModelSize size = config_size(&t->c);
    header_line(l, t, size);
    flags_print(t->o.flags, stdout);
    printf("\n");
    print_facts(t, size);
    print_memory(t);
    printf("\n");
    fflush(stdout);
}

void log_resume(Log *l, const Trainer *t) {
    write_line(l, json_pack("{s:I, s:s, s:I, s:i}", "resume", (json_int_t)t->at.step, "checkpoint", t->resumed, "tokens",
                            (json_int_t)t->at.tokens, "ranks", t->info->size));
}

// ---- steps -----------------------------------------------------------------------------------------------------------
void log_bars(char *out, const int64_t *seen, int E, int utf8) {
    static const char *const blocks[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
    static const char ascii[] = "_.-=+*#@"; // as many, the mean at index 3 of both
    int64_t sum = 0;
    for (int e = 0; e < E; e++) sum += seen[e];
    *out = 0;
    for (int e = 0; e < E; e++) {
        double share = sum ? (double)seen[e] * E / (double)sum : 0;
        int i = (int)lround(share * 4) - 1; // a quarter of the mean per glyph
        i = i < 0 ? 0 : i > 7 ? 7 : i;
        if (utf8) out = stpcpy(out, blocks[i]);
        else *out++ = ascii[i], *out = 0;
    }
}

static json_t *moe_json(json_t *j, const MoeStats *m) {
    put(j, "aux_loss", m->aux);
    put(j, "z_loss", m->z);
    put(j, "maxvio", m->maxvio);
    put(j, "rank_max_mean_before", m->rank_before);
    put(j, "rank_max_mean_after", m->rank_after);
    put(j, "rank_max_mean_before_max", m->rank_before_max);
    put(j, "rank_max_mean_after_max", m->rank_after_max);
    put_int(j, "pairs_self", m->pairs_self);
    put_int(j, "pairs_node", m->pairs_node);
    put_int(j, "pairs_inter", m->pairs_inter);
    put_int(j, "crossings", m->crossings);
    put_int(j, "bytes_node", m->bytes_node);
    put_int(j, "bytes_inter", m->bytes_inter);
    put_int(j, "weight_bytes", m->weight_bytes);
    put_int(j, "copies", m->copies);
    put_int(j, "plans", m->plans);
    put_int(j, "plans_with_copies", m->plans_with_copies);
    put_int(j, "dropped", m->dropped);
    return j;
}

static json_t *no_moe_json(json_t *j) {
    static const char *const keys[] = {"aux_loss", "z_loss", "maxvio", "rank_max_mean_before", "rank_max_mean_after",
        "rank_max_mean_before_max", "rank_max_mean_after_max", "pairs_self", "pairs_node", "pairs_inter", "crossings", "bytes_node", "bytes_inter",
        "weight_bytes", "copies", "plans", "plans_with_copies", "dropped"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) json_object_set_new(j, keys[i], json_null());
    return j;
}

static void step_line(Log *l, const Trainer *t, const StepStats *s, const EvalStats *val) {
    json_t *j = json_object(), *stages = json_object();
    put_int(j, "step", s->step);
    put_int(j, "tokens", s->tokens);
    put(j, "loss", s->loss);
    put(j, "val_loss", val ? val->loss : NAN);
    put(j, "val_bits_per_byte", val ? val->bits_per_byte : NAN);
    json_object_set_new(j, "val_windows", val ? json_integer(val->windows) : json_null());
    put(j, "lr", s->lr);
    put(j, "grad_norm", s->grad_norm);
    put(j, "tok_s", s->tok_s);
    put(j, "step_ms", s->step_ms);
    put(j, "wait_ms", s->wait_ms);
    put(j, "wait_max_ms", s->wait_max_ms);
    j = s->has_moe ? moe_json(j, &s->moe) : no_moe_json(j);
    json_object_set_new(j, "recv_rows", t->moe ? json_integer(moe_room(t->moe).rows) : json_null());
    put_int(j, "reruns", s->reruns);
    put(j, "plan_us", s->has_moe ? s->plan_us : NAN);
    put(j, "counts_us", s->has_moe ? s->counts_us : NAN);
    put(j, "moe_us", s->has_moe ? s->moe_us : NAN);
    put(j, "plan_share", s->has_moe ? s->plan_share : NAN);
    for (int i = 0; i < STAGES; i++) put(stages, stage_names[i], s->stage_ms[i]);
    json_object_set_new(j, "stage_ms", stages);
    write_line(l, j);
}

static void add_totals(Totals *a, const StepStats *s, int64_t step_tokens) {
    const MoeStats *m = &s->moe;
    a->steps++;
    a->ms += s->step_ms, a->wait_ms += s->wait_ms, a->plan_share += s->plan_share, a->tokens += (double)step_tokens;
    a->before += m->rank_before, a->after += m->rank_after, a->maxvio += m->maxvio;
    a->before_max = fmax(a->before_max, m->rank_before_max), a->after_max = fmax(a->after_max, m->rank_after_max);
    a->pairs_self += m->pairs_self, a->pairs_node += m->pairs_node, a->pairs_inter += m->pairs_inter;
    a->bytes_node += m->bytes_node, a->bytes_inter += m->bytes_inter, a->weight_bytes += m->weight_bytes;
    a->copies += m->copies, a->plans += m->plans, a->plans_with_copies += m->plans_with_copies, a->dropped += m->dropped;
}

static void print_step(const Log *l, const Trainer *t, const StepStats *s) {
    char rate[16];
    double left = fmin(6e10, (double)(t->o.steps - s->step) * l->total.ms / (double)l->total.steps * 1e-3); // minutes fit an int
    printf("step %5lld/%lld | loss %.4f | norm %.3f | lr %.2e | %.1f ms | wait %.1f ms | %s tok/s", (long long)s->step, (long long)t->o.steps,
           s->loss, s->grad_norm, s->lr, s->step_ms, s->wait_ms, count_text(rate, s->tok_s));
    if (s->has_moe) {
        const MoeStats *m = &s->moe;
        double pairs = fmax(1, (double)(m->pairs_self + m->pairs_node + m->pairs_inter));
        printf(" | maxvio %.2f | ranks %.2fx > %.2fx | copies %lld | pairs %.0f%% self %.0f%% node %.0f%% inter", m->maxvio, m->rank_before,
               m->rank_after, (long long)m->copies, 100 * (double)m->pairs_self / pairs, 100 * (double)m->pairs_node / pairs,
               100 * (double)m->pairs_inter / pairs);
    }
    printf(" | left %d:%02d\n", (int)(left / 60), (int)fmod(left, 60));
}

static void print_bars(const Log *l, const Trainer *t, const StepStats *s) {
    int E = t->c.E, at = 0;
    char *bars = host_alloc(SIZE(4, E) + 1);
    for (int layer = 0; layer < t->c.L; layer++) {
        if (t->c.dense[layer]) continue;
        log_bars(bars, s->moe.seen + SIZE(at, E), E, l->utf8);
        printf("  load L%-2d %s\n", layer, bars);
        at++;
    }
    free(bars);
}

void log_step(Log *l, const Trainer *t, const StepStats *s, const EvalStats *val) {
    add_totals(&l->total, s, t->o.batch * t->c.T);
    step_line(l, t, s, val);
    if (val || s->step % t->o.log_every == 0 || l->total.steps == 1) print_step(l, t, s);
    if (val) {
        l->last_val = val->loss;
        l->last_bits = val->bits_per_byte;
        if (!(val->loss >= l->best_val)) l->best_val = val->loss, l->best_step = s->step;
        printf("  val %lld | loss %.4f nats per token", (long long)s->step, val->loss);
        if (isfinite(val->bits_per_byte)) printf(" | %.4f bits per byte", val->bits_per_byte);
        printf(" | %lld windows, %lld tokens | %.1f s\n", (long long)val->windows, (long long)val->tokens, val->ms * 1e-3);
        if (s->has_moe) print_bars(l, t, s);
    }
    fflush(stdout);
}

void log_sample(const char *text, size_t n, int64_t step) {
    printf("  sample %lld\n", (long long)step);
    for (size_t i = 0, begin = 0; i <= n; i++) {
        if (i < n && text[i] != '\n') continue;
        printf("  | ");
        for (size_t k = begin; k < i; k++) {
            unsigned char c = (unsigned char)text[k]; // bytes of a model that has learnt little may be anything
            if ((c >= 32 && c < 127) || c >= 128) putchar(c);
            else if (c != '\r') printf("\\x%02x", c);
        }
        putchar('\n');
        begin = i + 1;
    }
    fflush(stdout);
}

void log_room(MoeRoom now, const char *what) {
    char crossed[64] = "", fit[32] = "";
    if (now.crossings) { // there is more than one node
        snprintf(crossed, sizeof crossed, ", %d crossed from one to a node", now.needed_crossings);
        snprintf(fit, sizeof fit, " and %d", now.crossings);
    }
    printf("  room | %d rows came to one rank%s: now there is room for %d%s, %.1f MB per rank; the %s is run again\n", now.needed_rows, crossed,
           now.rows, fit, now.bytes * 1e-6, what);
    fflush(stdout);
}

void log_checkpoint(const char *dir, double ms) {
    printf("  checkpoint %s | %.2f s\n", dir, ms * 1e-3);
    fflush(stdout);
}

// ---- the end ---------------------------------------------------------------------------------------------------------
static void print_balance(const Totals *a) {
    double n = (double)a->steps, pairs = fmax(1, (double)(a->pairs_self + a->pairs_node + a->pairs_inter));
    printf("balance     pairs on the fullest rank over the mean: %.3f before planning, %.3f after (largest %.2f and %.2f); maxvio %.2f\n",
           a->before / n, a->after / n, a->before_max, a->after_max, a->maxvio / n);
    printf("plans       %lld, %lld with copies; %lld copies, %.1f MB of weights and their gradients moved; counts and plan take %.2f%% of a layer\n",
           (long long)a->plans, (long long)a->plans_with_copies, (long long)a->copies, (double)a->weight_bytes * 1e-6, 100 * a->plan_share / n);
    printf("pairs       %.1f%% on their own rank, %.1f%% on another of the node, %.1f%% on another node%s\n", 100 * (double)a->pairs_self / pairs,
           100 * (double)a->pairs_node / pairs, 100 * (double)a->pairs_inter / pairs, a->dropped ? "" : "; none dropped");
    if (a->dropped) printf("dropped     %lld pairs (%.2f%%)\n", (long long)a->dropped, 100 * (double)a->dropped / (pairs + (double)a->dropped));
    printf("bytes       %.1f MB inside nodes, %.1f MB between nodes\n", (double)a->bytes_node * 1e-6, (double)a->bytes_inter * 1e-6);
}

void log_summary(Log *l, const Trainer *t, const char *checkpoint, const char *why, double peak_bytes) {
    const Totals *a = &l->total;
    char rate[16];
    printf("\n%-11s step %lld; %lld steps in %.1f s, %s tok/s, waiting %.1f%%; peak memory %.0f MB per rank\n", why,
           (long long)t->at.step, (long long)a->steps, a->ms * 1e-3, a->ms > 0 ? count_text(rate, a->tokens / a->ms * 1e3) : "n/a", a->ms > 0 ? 100 * a->wait_ms / a->ms : 0, peak_bytes * 1e-6);
    if (isfinite(l->last_val)) {
        printf("val loss    %.4f nats per token", l->last_val);
        if (isfinite(l->last_bits)) printf(" (%.4f bits per byte)", l->last_bits);
        printf("; best %.4f after step %lld\n", l->best_val, (long long)l->best_step);
    }
    if (t->moe && a->steps) print_balance(a);
    if (t->o.balance == BALANCE_UNIFORM) printf("WARNING     %s\n", uniform_warning);
    if (checkpoint) {
        char launch[96] = "", layout[64] = "";
        const char *more = t->info->local_ranks > sysconf(_SC_NPROCESSORS_ONLN) ? "--oversubscribe " : "";
        const char *root = geteuid() == 0 ? "--allow-run-as-root " : ""; // Open MPI wants it said
        if (t->info->size > 1 && !t->o.virtual_ranks) snprintf(launch, sizeof launch, "mpirun %s%s-n %d ", root, more, t->info->size);
        if (t->o.virtual_ranks) snprintf(layout, sizeof layout, " --virtual-ranks %d", (int)t->o.virtual_ranks);
        if (t->o.nodes) snprintf(layout + strlen(layout), sizeof layout - strlen(layout), " --nodes %d", (int)t->o.nodes);
        printf("checkpoint  %s\n", checkpoint);
        printf("resume      %sbuild/train --resume %s --steps %lld%s\n", launch, t->out,
               (long long)(t->at.step < t->o.steps ? t->o.steps : 2 * t->o.steps), layout);
        printf("generate    build/generate --checkpoint %s --prompt \"It is a truth\" --tokens 200\n", t->out);
    }
    printf("log         %s\n", l->path);
    fflush(stdout);
}
