// build/generate: continues a prompt from a checkpoint.
#include "kernels/check.h"
#include "kernels/files.h"
#include "kernels/flags.h"
#include "kernels/start.h"
#include "train/checkpoint.h"
#include "train/hf.h"
#include "train/sample.h"
#include <stdlib.h>
#include <string.h>

typedef struct Settings {
    const char *checkpoint, *prompt;
    int64_t tokens, top_k, seed, context, threads, virtual_ranks, nodes;
    double temperature, top_p;
} Settings;

static void print_token(void *tokenizer, int token) {
    size_t n;
    const char *piece = tokenizer_piece(tokenizer, token, &n);
    fwrite(piece, 1, n, stdout);
    fflush(stdout);
}

static Model *load(Dev *d, Comm *world, const char *dir, const ModelConfig *c, int T) {
    const CommInfo *info = comm_info(world);
    ModelRun run = {.max_B = 1, .T = T, .micros = 1, .dedup = 1, .plan = {.policy = POLICY_NONE, .block = 1}};
    if (c->E) {
        CHECK_USAGE(c->E % info->size == 0, "the model's %d experts cannot be shared evenly by %d ranks (hint: a divisor of %d)", c->E, info->size,
                    c->E);
        CostModel m = {.C = c->C, .F = c->F, .K = c->K, .E = c->E, .N = info->N, .G = info->G, .slots = 0, .token_bytes = sizeof(real),
                       .weight_bytes = sizeof(real), .grad_bytes = sizeof(wide)};
        run.cost = cost_load(NULL, m);
    }
    Model *m = model_init(d, world, world, c, &run);
    checkpoint_read(dir, d, model_params(m), c, NULL);
    comm_barrier(world); // peers read this rank's experts
    return m;
}

static void body(Comm *world, void *arg) {
    const Settings *s = arg;
    const CommInfo *info = comm_info(world);
    Dev *d = dev_init((DevOptions){.threads = (int)s->threads, .place = info->rank % info->local_ranks, .shared = s->virtual_ranks > 0});
    comm_bind(world, d);
    char *dir = checkpoint_find(s->checkpoint);
    ModelConfig c = hf_read(dir);
    int T = s->context ? (int)s->context : c.T;
    if (T > c.T) c.T = T; // rotary positions go on past what was trained; the text may not
    Tokenizer *tokenizer = tokenizer_open("bytes");
    CHECK_USAGE(c.V == 256 || c.V == tokenizer_vocab(tokenizer), "the model's vocabulary is %d, expected bytes (256 or %d)", c.V,
                tokenizer_vocab(tokenizer));
    Model *m = load(d, world, dir, &c, T);
    size_t n = strlen(s->prompt);
    int *prompt = host_alloc(SIZE((int64_t)n + 1, sizeof(int))), used = 0, separator = tokenizer_separator(tokenizer);
    if (n == 0) prompt[used++] = separator < c.V ? separator : '\n';
    else used = (int)tokenizer_encode(tokenizer, prompt, s->prompt, n);
    if (info->rank == 0) fwrite(s->prompt, 1, n, stdout);
    Sampler sampler = {.temperature = s->temperature, .top_k = (int)s->top_k, .top_p = s->top_p, .seed = (uint64_t)s->seed};
    sample_run(m, world, T, &sampler, prompt, used, (int)s->tokens, print_token, tokenizer);
    if (info->rank == 0) {
        printf("\n");
        stdout_check();
    }
    free(prompt);
    free(dir);
    model_free(m);
    tokenizer_close(tokenizer);
    dev_free(d);
}

int main(int argc, char **argv) {
    start_threads(argv);
    Settings s = {.prompt = "", .tokens = 256, .temperature = 0.8, .top_p = 1, .seed = 1, .threads = 1};
    Flag flags[] = {
        {.name = "checkpoint", .kind = FLAG_STRING, .value = &s.checkpoint, .help = "run folder (its newest checkpoint) or checkpoint folder"},
        {.name = "prompt", .kind = FLAG_STRING, .value = &s.prompt, .help = "how the text begins; empty = a new document"},
        {.name = "tokens", .kind = FLAG_INT, .value = &s.tokens, .min = 0, .max = 1e9, .help = "tokens to add"},
        {.name = "temperature", .kind = FLAG_DOUBLE, .value = &s.temperature, .min = 0, .max = 100, .help = "0 = always the likeliest token"},
        {.name = "top-k", .kind = FLAG_INT, .value = &s.top_k, .min = 0, .max = 1e9, .help = "only the k likeliest tokens; 0 = all"},
        {.name = "top-p", .kind = FLAG_DOUBLE, .value = &s.top_p, .min = 1e-9, .max = 1, .help = "only the likeliest with this probability together"},
        {.name = "seed", .kind = FLAG_INT, .value = &s.seed, .min = 0, .max = 9e15, .help = "of the random choices"},
        {.name = "context", .kind = FLAG_INT, .value = &s.context, .min = 0, .max = 1e7, .help = "tokens the model sees; 0 = as trained"},
        {.name = "threads", .kind = FLAG_INT, .value = &s.threads, .min = 1, .max = 4096, .help = "CPU threads of a rank"},
        {.name = "virtual-ranks", .kind = FLAG_INT, .value = &s.virtual_ranks, .min = 0, .max = 1024, .help = "ranks as threads; 0 = as launched"},
        {.name = "nodes", .kind = FLAG_INT, .value = &s.nodes, .min = 0, .max = 1e6, .help = "virtual nodes; 0 = as detected"},
        {0}};
    int n = flags_parse(flags, "generate", "continues a prompt from a checkpoint", argc, argv);
    CHECK_USAGE(n == 0, "argument \"%s\" is not a flag (hint: --prompt \"%s\")", argv[1], argv[1]);
    CHECK_USAGE(s.checkpoint, "--checkpoint is missing (hint: --checkpoint runs/demo)");
    comm_run(&argc, &argv, (int)s.virtual_ranks, (int)s.nodes, body, &s);
    flags_free(flags);
    return 0;
}
