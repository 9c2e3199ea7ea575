// build/overlap: how much of the copies' time passes behind computation: the overlap_permille of a rates file.
//   mpirun -n 4 build/overlap --nodes 2 --width 256 --expert-width 512      or under scripts/testbed run
//
// One MoE layer, forward and backward, with one plan, in three forms that take turns: with its copies, without them (the slots
// keep what they hold: the same time, another result), and the copies alone. What is hidden: 1 - (with - without) / alone, the
// difference being the median over rounds, in which the two follow each other closely.
#include "kernels/check.h"
#include "kernels/files.h"
#include "kernels/flags.h"
#include "moe/internal.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { FORMS = 3, MAX_ROUNDS = 1000 };
static const char *const form_names[FORMS] = {"with copies", "without", "copies alone"};

typedef struct Settings {
    int64_t width, expert_width, experts, topk, tokens, nodes, virtual_ranks, threads, slots, rounds;
    double skew;
    int slicing;
    const char *cluster;
} Settings;

typedef struct Bench {
    const Settings *o;
    Comm *world;
    const CommInfo *info;
    Dev *d;
    Moe *m;
    int BT;
    real *x, *y, *dy, *dx;
    PlanInfo plan;
} Bench;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static real *noise(Dev *d, size_t n, uint64_t stream, double std) {
    real *x = dev_alloc(d, n * sizeof(real), "benchmark");
    dev_init_normal(d, x, n, 1, stream, 0, std);
    return x;
}

// Router and inputs whose choices follow a Zipf law: channel 0 of every token is 1, and of expert e's row -skew log(e + 1).
static void skew(Bench *b, real *router, int E, int C) {
    size_t rows = SIZE(E, C), tokens = SIZE(b->BT, C);
    real *host = host_alloc((rows > tokens ? rows : tokens) * sizeof(real));
    dev_download(b->d, host, router, rows * sizeof(real));
    for (int e = 0; e < E; e++) host[SIZE(e, C)] = real_of(-b->o->skew * log(e + 1.0));
    dev_upload(b->d, router, host, rows * sizeof(real));
    dev_download(b->d, host, b->x, tokens * sizeof(real));
    for (int t = 0; t < b->BT; t++) host[SIZE(t, C)] = real_of(1);
    dev_upload(b->d, b->x, host, tokens * sizeof(real));
    free(host);
}

static void make(Bench *b) {
    const Settings *o = b->o;
    const CommInfo *i = b->info;
    int C = (int)o->width, F = (int)o->expert_width, E = (int)o->experts, K = (int)o->topk, H = E / i->size;
    size_t unit = EXPERT_SIZE(F, C);
    CostModel model = {.C = C, .F = F, .K = K, .E = E, .N = i->N, .G = i->G, .slots = (int)o->slots, .token_bytes = sizeof(real),
                       .weight_bytes = sizeof(real), .grad_bytes = sizeof(wide), .dedup = DEDUP_ON, .one_port = !o->slicing};
    MoeConfig c = {.C = C, .E = E, .K = K, .F = F, .renorm = K > 1, .routed_scale = 1, .layers = 1, .max_BT = b->BT, .micros = 1,
                   .training = 1, .dedup = 1, .cost = cost_load(o->cluster, model),
                   .plan = {.policy = POLICY_TOPOEP, .block = 1, .without = o->slicing ? 0 : PLAN_NO_SLICING}};
    c.S = c.cost.S;
    real *router = noise(b->d, SIZE(E, C), 1, 1 / sqrt(C));
    void **experts = comm_window(b->world, SIZE(H, (int64_t)unit, sizeof(real)), "experts");
    dev_init_normal(b->d, experts[i->rank], SIZE(H, (int64_t)unit), 1, 2, SIZE(i->rank, H, (int64_t)unit), 0.02);
    wide *grads = dev_alloc(b->d, (SIZE(E, C) + SIZE(H, (int64_t)unit)) * sizeof(wide), "gradients");
    dev_zero(b->d, grads, (SIZE(E, C) + SIZE(H, (int64_t)unit)) * sizeof(wide));
    MoeParams p = {.router = router, .experts = (real *const *)experts, .d_router = grads, .d_experts = grads + SIZE(E, C)};
    b->x = noise(b->d, SIZE(b->BT, C), 3 + (uint64_t)i->rank, 1), b->dy = noise(b->d, SIZE(b->BT, C), 2000 + (uint64_t)i->rank, 1);
    b->y = noise(b->d, SIZE(b->BT, C), 4, 0), b->dx = noise(b->d, SIZE(b->BT, C), 4, 0);
    skew(b, router, E, C);
    b->m = moe_init(b->d, b->world, b->world, c, &p);
    comm_barrier(b->world);
    MoePass pass = {.count = 1}; // makes plan and routes, and touches all memory
    moe_forward(b->m, 0, b->y, NULL, b->x, 1, b->BT, pass);
    moe_backward(b->m, 0, b->dx, b->dy, b->x, 1, b->BT, pass);
    MoeStats s;
    moe_stats(b->m, &s);
    b->plan = b->m->info_host[0];
}

// The lists of moe/layer.c behind the plan, for one form
static void forward(Bench *b, int copies, int work) {
    Moe *m = b->m;
    Layer *l = &m->layer[0];
    if (copies) copies_start(m, l);
    if (work) dispatch(m, l, l->rows_at, b->x, l->weight, b->BT);
    if (work) experts_up(m, l, 0, m->H);
    if (copies) copies_finish(m, l);
    if (work) experts_up(m, l, m->H, m->J), experts_down(m, l), combine(m, l, b->y, NULL, NULL, b->BT);
}

static void backward(Bench *b, int copies, int work) {
    Moe *m = b->m;
    Layer *l = &m->layer[0];
    MoePass pass = {0};
    if (copies) copies_start(m, l);
    if (work) dispatch(m, l, m->dy_rows_at, b->dy, NULL, b->BT);
    if (work) experts_down_bwd(m, l, 0, m->H);
    if (copies) copies_finish(m, l);
    if (work) experts_down_bwd(m, l, m->H, m->J), experts_up_bwd(m, l), combine(m, l, b->dx, m->dweight, NULL, b->BT);
    if (copies) copies_return_start(m, l);
    if (work) router_backward(m, l, b->dx, b->x, 1, b->BT, pass);
    if (copies) copies_return_finish(m, l);
}

// Of the slowest rank
static double time_form(Bench *b, int form) {
    comm_barrier(b->world);
    double begin = now_ms();
    forward(b, form != 1, form != 2);
    backward(b, form != 1, form != 2);
    comm_barrier(b->world);
    double ms = now_ms() - begin;
    comm_max_double(b->world, &ms, 1);
    return ms;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void body(Comm *world, void *arg) {
    const Settings *o = arg;
    Bench b = {.o = o, .world = world, .info = comm_info(world), .BT = (int)o->tokens};
    int cores = (int)sysconf(_SC_NPROCESSORS_ONLN) / b.info->local_ranks, n = (int)o->rounds;
    b.d = dev_init((DevOptions){.threads = o->threads ? (int)o->threads : cores > 0 ? cores : 1});
    make(&b);
    double *ms = host_alloc(SIZE(FORMS + 1, n, sizeof *ms)), *shown = ms + FORMS * n;
    for (int k = 0; k < n; k++) {
        for (int form = 0; form < FORMS; form++) ms[form * n + k] = time_form(&b, form);
        shown[k] = ms[k] - ms[n + k]; // of the copies' time, in this round
    }
    for (int form = 0; form <= FORMS; form++) qsort(ms + form * n, (size_t)n, sizeof *ms, ascending);
    double hidden = 1 - shown[n / 2] / ms[2 * n + n / 2];
    if (b.info->rank == 0) {
        printf("# %d ranks on %d node%s, %s; width %d, %d experts of width %d, %d per token, %d tokens per rank; costs: %s\n",
               b.info->size, b.info->N, b.info->N == 1 ? "" : "s", b.info->name, (int)o->width, (int)o->experts, (int)o->expert_width,
               (int)o->topk, b.BT, o->cluster ? o->cluster : "built-in");
        printf("# %lld copies, %lld of them between nodes; fullest rank %.2f x the mean, %.2f x without the plan\n",
               (long long)b.plan.copies, (long long)b.plan.inter_copies, (double)b.plan.max_load * b.info->size / (double)b.plan.total,
               (double)b.plan.max_load_before * b.info->size / (double)b.plan.total);
        for (int form = 0; form < FORMS; form++)
            printf("# %-12s %.3f ms, median of %d in turn (best %.3f)\n", form_names[form], ms[form * n + n / 2], n, ms[form * n]);
        if (b.plan.copies) printf("overlap_permille = %.0f\n", 1000 * fmax(0, fmin(1, hidden)));
        else printf("# overlap_permille is n/a: the plan has no copies (hint: more --tokens or --skew)\n");
    }
    free(ms);
    moe_free(b.m);
    dev_free(b.d);
}

int main(int argc, char **argv) {
    Settings o = {.width = 128, .expert_width = 192, .experts = 8, .topk = 2, .tokens = 1024, .slots = -1, .rounds = 21, .skew = 1.2,
                  .slicing = 1};
    Flag flags[] = {{"", FLAG_INT, NULL, 0, 0, NULL, "the layer", 0},
                    {"width", FLAG_INT, &o.width, 1, 1 << 20, NULL, "hidden width C", 0},
                    {"expert-width", FLAG_INT, &o.expert_width, 1, 1 << 20, NULL, "hidden width of an expert", 0},
                    {"experts", FLAG_INT, &o.experts, 1, PLAN_MAX_E, NULL, "experts", 0},
                    {"topk", FLAG_INT, &o.topk, 1, PLAN_MAX_E, NULL, "experts per token", 0},
                    {"tokens", FLAG_INT, &o.tokens, 1, 1 << 24, NULL, "tokens of a rank's microbatch", 0},
                    {"skew", FLAG_DOUBLE, &o.skew, 0, 8, NULL, "Zipf exponent of the router's choices", 0},
                    {"slots", FLAG_INT, &o.slots, -1, PLAN_MAX_S, NULL, "copies a rank may hold; -1 = as --cluster says, or 2", 0},
                    {"slicing", FLAG_BOOL, &o.slicing, 0, 0, NULL, "a copy that crosses nodes is cut over all their ports", 0},
                    {"cluster", FLAG_STRING, &o.cluster, 0, 0, NULL, "file of the cluster's rates or costs; none = this machine's", 0},
                    {"", FLAG_INT, NULL, 0, 0, NULL, "ranks", 0},
                    {"nodes", FLAG_INT, &o.nodes, 0, 1e9, NULL, "cut the ranks into that many virtual nodes; 0 = as detected", 0},
                    {"virtual-ranks", FLAG_INT, &o.virtual_ranks, 0, 1024, NULL, "ranks as threads of this process; 0 = as launched", 0},
                    {"threads", FLAG_INT, &o.threads, 0, 4096, NULL, "CPU threads of a rank; 0 = cores / ranks of this machine", 0},
                    {"rounds", FLAG_INT, &o.rounds, 1, MAX_ROUNDS, NULL, "passes of each form", 0},
                    {0}};
    int n = flags_parse(flags, "overlap", "measures how much of the copies' time passes behind computation", argc, argv);
    CHECK_USAGE(n == 0, "'%s' is one argument too many (hint: --help)", argv[1]);
    comm_run(&argc, &argv, (int)o.virtual_ranks, (int)o.nodes, body, &o);
    stdout_check();
    return STATUS_OK;
}
