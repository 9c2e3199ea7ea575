// The loop: steps, and what is looked at between them.
#include "kernels/check.h"
#include "train/log.h"
#include "train/sample.h"
#include "train/trace.h"
#include "train/trainer.h"
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static int due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

// SIGTERM and SIGUSR1 are blocked since main() and wait here; one rank's signal stops all after the same step.
static int asked_to_stop(const Trainer *t) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGUSR1);
    double stop = sigtimedwait(&set, NULL, &(struct timespec){0, 0}) > 0;
    comm_max_double(t->world, &stop, 1);
    return stop > 0;
}

static int64_t final_windows(const Trainer *t) {
    int64_t limit = (1 << 19) / t->c.T;
    return t->o.final_windows ? t->o.final_windows : limit > 0 ? limit : 1;
}

typedef struct Text {
    const Tokenizer *tokenizer;
    char *bytes;
    size_t n, room;
} Text;

static void text_add(void *arg, int token) {
    Text *x = arg;
    size_t n;
    const char *piece = tokenizer_piece(x->tokenizer, token, &n);
    if (x->n + n > x->room) {
        x->room = 2 * (x->n + n);
        x->bytes = realloc(x->bytes, x->room);
        CHECK_DEVICE(x->bytes, "no memory for %zu bytes of text", x->room);
    }
    memcpy(x->bytes + x->n, piece, n);
    x->n += n;
}

static void sample(Trainer *t) {
    const char *prompt = t->o.sample_prompt ? t->o.sample_prompt : "";
    size_t n = strlen(prompt);
    int *tok = host_alloc(SIZE((int64_t)n + 1, sizeof(int)));
    int separator = tokenizer_separator(t->tokenizer), used = (int)tokenizer_encode(t->tokenizer, tok, prompt, n);
    if (used == 0) tok[used++] = separator < t->c.V ? separator : '\n';
    Text text = {.tokenizer = t->tokenizer};
    for (int i = 0; i < used && n; i++) text_add(&text, tok[i]);
    Sampler s = {.temperature = 0.8, .top_p = 1, .seed = (uint64_t)t->o.seed + (uint64_t)t->at.step};
    int tokens = (int)(t->o.sample_tokens < t->c.T ? t->o.sample_tokens : t->c.T);
    if (t->c.T > 1) sample_run(t->m, t->world, t->c.T, &s, tok, used, tokens, text_add, &text);
    trainer_grow(t, "token"); // model_decode has run it again already
    if (t->info->rank == 0) log_sample(text.bytes, text.n, t->at.step);
    free(text.bytes);
    free(tok);
}

static char *save(Trainer *t) {
    double begin = now_ms();
    Snapshot s = {.d = t->d, .world = t->world, .ep = t->ep, .ps = t->ps, .c = &t->c, .opt = &t->opt, .tokenizer = t->tokenizer,
                  .aux_coef = t->o.aux_loss};
    json_t *state = trainer_state(t);
    char *dir = checkpoint_write(&s, t->out, t->at.step, state);
    json_decref(state);
    if (t->info->rank == 0) log_checkpoint(dir, now_ms() - begin);
    return dir;
}

static double peak_bytes(const Trainer *t) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    double bytes = (double)u.ru_maxrss * 1024;
    if (t->o.virtual_ranks) bytes /= (double)t->o.virtual_ranks;
    comm_max_double(t->world, &bytes, 1);
    return bytes;
}

void trainer_run(Trainer *t) {
    const Options *o = &t->o;
    char *checkpoint = NULL;
    int stop = 0;
    while (t->at.step < o->steps && !stop) {
        StepStats s;
        trainer_step(t, &s);
        int64_t step = t->at.step;
        int last = step == o->steps;
        if (t->trace && due(step, o->trace_every)) trace_step(t->trace, t, &s); // before an evaluation uses the plans' memory
        EvalStats val;
        int evaluate = t->val && (last || due(step, o->eval_every));
        if (evaluate) val = trainer_eval(t, last ? final_windows(t) : o->eval_windows);
        if (t->log) log_step(t->log, t, &s, evaluate ? &val : NULL);
        if (o->sample_every && (last || due(step, o->sample_every))) sample(t);
        stop = asked_to_stop(t);
        if (due(step, o->save_every) || ((last || stop) && o->save_every >= 0)) {
            free(checkpoint);
            checkpoint = save(t);
        }
    }
    double peak = peak_bytes(t);
    if (t->log) log_summary(t->log, t, checkpoint, stop ? "stopped" : "done", peak);
    free(checkpoint);
}
