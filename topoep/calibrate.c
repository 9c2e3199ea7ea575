// build/calibrate: what this machine's ranks really do, as a rates file for --cluster (topoep/cost.c) on standard output.
//   mpirun -n 4 build/calibrate --width 128 --expert-width 192      at the shapes of a model; scripts/calibrate wraps it
//
// All ranks measure at the same time, as in a step: ranks that share cores, memory or a network port take from each other here
// as they do there. Every figure is the best of a few rounds, so that another program's moment does not stand for the machine's.
// With --cpu-time, for a CPU that is never free, what a rank does alone is timed by its processor time.
#include "kernels/check.h"
#include "kernels/comm.h"
#include "kernels/flags.h"
#include "topoep/plan.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 5 };

typedef struct Settings {
    int64_t width, expert_width, experts, topk, tokens, nodes, virtual_ranks, threads, slots, dedup, overlap;
    double seconds;
    int cpu_time;
    const char *name;
} Settings;

typedef struct Rank {
    const Settings *o;
    Comm *world;
    const CommInfo *info;
    Dev *d;
    int C, F, E, K, BT, rows; // rows: pairs of a rank
    double cores;             // that a rank has when all of them work
} Rank;

static double clock_s(clockid_t which) {
    struct timespec t;
    clock_gettime(which, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static double now(void) { return clock_s(CLOCK_MONOTONIC); }
// What a call takes: time, or the process's processor time as it would pass on this rank's cores
static double used(const Rank *r) { return r->o->cpu_time ? clock_s(CLOCK_PROCESS_CPUTIME_ID) / r->cores : now(); }

static real *noise(Rank *r, size_t n) {
    real *x = dev_alloc(r->d, n * sizeof(real), "calibration");
    dev_init_normal(r->d, x, n, 1, 2, 0, 0.1);
    return x;
}

// Calls body until a round's share of --seconds is over. Calls per second of a rank, mean over the ranks, in the best round.
#define CALLS_PER_SECOND(r, body)                                                             \
    ({                                                                                        \
        double best_ = 0;                                                                     \
        for (int round_ = 0; round_ < ROUNDS; round_++) {                                     \
            comm_barrier((r)->world);                                                         \
            double start_ = now(), used_ = used(r), n_ = 0;                                   \
            do body while (n_++, now() - start_ < (r)->o->seconds / ROUNDS);                  \
            double rate_ = n_ / (used(r) - used_) / (r)->info->size;                          \
            comm_sum_double((r)->world, &rate_, 1);                                           \
            best_ = fmax(best_, rate_);                                                       \
        }                                                                                     \
        best_;                                                                                \
    })

// The same for a collective body, which all ranks must call as often: seconds per call, in the best round.
#define SECONDS_PER_CALL(r, rounds, body)                                                     \
    ({                                                                                        \
        double best_ = INFINITY, one_ = 0;                                                    \
        for (int round_ = -1; round_ < (rounds); round_++) { /* the first finds out how many fit */ \
            int n_ = round_ < 0 ? 1 : (int)fmax(1, fmin(1e6, (r)->o->seconds / (rounds) / one_)); \
            comm_barrier((r)->world);                                                         \
            double start_ = now();                                                            \
            for (int i_ = 0; i_ < n_; i_++) body                                              \
            comm_barrier((r)->world);                                                         \
            double each_ = (now() - start_) / n_;                                             \
            comm_max_double((r)->world, &each_, 1);                                           \
            if (round_ < 0) one_ = each_;                                                     \
            else best_ = fmin(best_, each_);                                                  \
        }                                                                                     \
        best_;                                                                                \
    })

// ---- compute: a rank's pairs, even over its experts, forward and backward as moe/expert.c does it --------------------
static double measure_flops(Rank *r) {
    Dev *d = r->d;
    int C = r->C, F = r->F, M = r->rows, J = r->E / r->info->size;
    int *off_host = host_alloc(SIZE(J + 1, sizeof(int))), *off = dev_alloc(d, SIZE(J + 1, sizeof(int)), "calibration");
    for (int j = 0; j <= J; j++) off_host[j] = (int)((int64_t)M * j / J);
    dev_upload(d, off, off_host, SIZE(J + 1, sizeof(int)));
    free(off_host);
    size_t unit = SIZE(3, F, C);
    real *w = noise(r, SIZE(J, (int64_t)unit)), *x = noise(r, SIZE(M, C)), *dy = noise(r, SIZE(M, C)), *y = noise(r, SIZE(M, C));
    real *gu = noise(r, SIZE(M, 2, F)), *dgu = noise(r, SIZE(M, 2, F)), *h = noise(r, SIZE(M, F)), *dh = noise(r, SIZE(M, F));
    wide *dw = dev_alloc(d, SIZE(J, (int64_t)unit, sizeof(wide)), "calibration");
    dev_zero(d, dw, SIZE(J, (int64_t)unit, sizeof(wide)));
    const void **at = host_alloc(SIZE(J, sizeof *at));
    void *table[4];
    for (int k = 0; k < 4; k++) { // gate and up, down; their gradients
        for (int j = 0; j < J; j++) {
            size_t skip = (size_t)j * unit + (k % 2 ? SIZE(2, F, C) : 0);
            at[j] = k < 2 ? (void *)(w + skip) : (void *)(dw + skip);
        }
        table[k] = dev_alloc(d, SIZE(J, sizeof *at), "calibration");
        dev_upload(d, table[k], at, SIZE(J, sizeof *at));
    }
    free(at);
    double calls = CALLS_PER_SECOND(r, {
        dev_group_linear(d, gu, x, table[0], off, J, M, 2 * F, C);
        dev_swiglu(d, h, gu, NULL, off + J, M, F);
        dev_group_linear(d, y, h, table[1], off, J, M, C, F);
        dev_group_linear_dx(d, dh, dy, table[1], off, J, M, C, F);
        dev_swiglu_bwd(d, dgu, h, NULL, dh, gu, NULL, off + J, M, F);
        dev_group_linear_dw(d, table[3], dy, h, off, J, M, C, F);
        dev_group_linear_dx(d, y, dgu, table[0], off, J, M, 2 * F, C);
        dev_group_linear_dw(d, table[2], dgu, x, off, J, M, 2 * F, C);
    });
    return calls * 18 * C * F * M;
}

// ---- inside a node: rows into the next rank's window and out of it, as dispatch and combine do ------------------------
static double measure_intra(Rank *r) {
    Dev *d = r->d;
    int C = r->C, M = r->rows, R = r->info->size, G = r->info->G, first = r->info->node * G;
    int next = first + (r->info->rank - first + 1) % G;
    void **window = comm_window(r->world, SIZE(M, C, sizeof(real)), "calibration");
    void *table = dev_alloc(d, SIZE(R, sizeof(void *)), "calibration");
    dev_upload(d, table, window, SIZE(R, sizeof(void *)));
    int *host = host_alloc(SIZE(2, M, sizeof(int))), *list = dev_alloc(d, SIZE(2, M, sizeof(int)), "calibration");
    for (int i = 0; i < M; i++) host[i] = next, host[M + i] = i;
    dev_upload(d, list, host, SIZE(2, M, sizeof(int)));
    free(host);
    real *x = noise(r, SIZE(M, C)), *y = noise(r, SIZE(M, C));
    RowMap map = {.BT = M, .K = 1, .ld = 1, .peer = list, .row = list + M};
    double calls = CALLS_PER_SECOND(r, {
        dev_scatter_rows(d, table, NULL, x, NULL, map, C);
        dev_gather_rows(d, y, NULL, NULL, table, NULL, map, C);
    });
    return calls * 2 * M * C * sizeof(real);
}

// ---- between nodes: a dispatch with each rank's pairs spread evenly over all nodes; `senders` ranks of each node send -----
static int rows_per_node(const Rank *r) { return r->rows / r->info->N > 0 ? r->rows / r->info->N : 1; }

// Bytes per second of a sending rank
static double measure_inter(Rank *r, int senders) {
    Dev *d = r->d;
    const CommInfo *i = r->info;
    int C = r->C, room = rows_per_node(r), *host = host_alloc(SIZE(i->N, sizeof(int)));
    int *n_send = dev_alloc(d, SIZE(i->N, sizeof(int)), "calibration");
    int *n_recv = dev_alloc(d, SIZE(i->N, sizeof(int)), "calibration");
    for (int n = 0; n < i->N; n++) host[n] = n != i->node && i->rank % i->G < senders ? room : 0;
    dev_upload(d, n_send, host, SIZE(i->N, sizeof(int)));
    free(host);
    size_t row = (size_t)C * sizeof(real), bytes = SIZE(i->N, room, (int64_t)row);
    Rows rows = {comm_window(r->world, bytes, "calibration")[i->rank], comm_window(r->world, bytes, "calibration")[i->rank], row};
    double seconds = SECONDS_PER_CALL(r, ROUNDS, { comm_rows(r->world, &rows, 1, n_recv, n_send, 0, room); });
    return (double)(i->N - 1) * room * (double)row / seconds;
}

// ---- what copies cost however small: weights out twice, a gradient back, each with messages of one row and a barrier ----
static double measure_fixed(Rank *r) {
    const CommInfo *i = r->info;
    BlockSeg seg[2] = {{(i->node + 1) % i->N, i->rank, 0}, {(i->node + i->N - 1) % i->N, i->rank, 0}}; // to, from
    BlockSeg *list = dev_alloc(r->d, sizeof seg, "calibration");
    int *count = dev_alloc(r->d, sizeof(int), "calibration"), n = i->N > 1;
    dev_upload(r->d, list, seg, sizeof seg);
    dev_upload(r->d, count, &n, sizeof n);
    size_t row = (size_t)r->C * sizeof(real);
    void **from = comm_window(r->world, row, "calibration"), **to = comm_window(r->world, row, "calibration");
    // short rounds: what is measured is delay, the first to suffer from other programs
    return 3 * SECONDS_PER_CALL(r, 20 * ROUNDS, {
        comm_blocks_start(r->world, to, list + 1, count, (const void *const *)from, list, count, row, 0, row);
        comm_blocks_finish(r->world);
        comm_node_barrier(r->world);
    });
}

// ---- the file --------------------------------------------------------------------------------------------------------------
static void describe(const Rank *r, double flops, double intra, double inter, double alone, double fixed) {
    const CommInfo *i = r->info;
    char day[32];
    time_t t = time(NULL);
    struct tm utc;
    gmtime_r(&t, &utc);
    strftime(day, sizeof day, "%Y-%m-%d", &utc);
    printf("# Measured by scripts/calibrate on %s: %d ranks on %d node%s, %s; %s each.\n", day, i->size, i->N, i->N == 1 ? "" : "s", i->name,
           dev_name(r->d));
    printf("# Shapes: width %d, %d experts of width %d, %d per token, %d tokens per rank. All ranks at once; the best of %d rounds.\n", r->C,
           r->E, r->F, r->K, r->BT, ROUNDS);
    if (r->o->cpu_time)
        printf("# flops, intra_bytes_s: by processor time, of which a rank has %.3g cores', so that other programs do not count.\n", r->cores);
    printf("# Keys: topoep/clusters/h800-4x8.conf.\n");
    printf("name = %s\nnodes = %d\nranks_per_node = %d\nslots = %d\n", r->o->name, i->N, i->G, (int)r->o->slots);
    printf("flops = %.3g # of a rank: grouped products, forward and backward, %d rows per expert\n", flops, r->rows / (r->E / i->size));
    if (i->N > 1)
        printf("inter_bytes_s = %.3g # of a rank when all of its node send, in messages of %d rows; a node's one rank alone: %.3g\n", inter,
               rows_per_node(r), alone);
    else printf("inter_bytes_s = %.3g # there is one node: as inside it\n", intra);
    printf("intra_bytes_s = %.3g # of a rank: rows into %s window and out of it, as dispatch and combine do\n", intra,
           i->G > 1 ? "the next rank's" : "its own");
    printf("sliced = 1 # a copy between nodes has all of a node's ports: cut over them, or the ranks share one\n");
    printf("dedup = %d # a token going to several experts of another node crosses once\n", (int)r->o->dedup);
    printf("measured = 1\n");
    printf("overlap_permille = %d # share of the copies' time behind the home experts' computation: given, not measured here\n", (int)r->o->overlap);
    printf("plan_fixed_ps = %.0f # messages of one row and a barrier, three times: weights for forward and backward, gradient\n", fixed * 1e12);
}

static void body(Comm *world, void *arg) {
    const Settings *o = arg;
    Rank r = {.o = o, .world = world, .info = comm_info(world), .C = (int)o->width, .F = (int)o->expert_width, .E = (int)o->experts,
              .K = (int)o->topk, .BT = (int)o->tokens};
    int R = r.info->size, all_cores = (int)sysconf(_SC_NPROCESSORS_ONLN), cores = all_cores / r.info->local_ranks;
    CHECK_USAGE(r.E % R == 0, "%d experts on %d ranks: every rank must hold as many (hint: --experts)", r.E, R);
    CHECK_USAGE(r.K <= r.E, "--topk is %d, expected at most --experts, %d", r.K, r.E);
    CHECK_USAGE(SIZE(r.BT, r.K) <= 1 << 24, "%d tokens x %d per rank: expected at most %d pairs", r.BT, r.K, 1 << 24);
    r.rows = r.BT * r.K;
    int n_threads = o->threads ? (int)o->threads : cores > 0 ? cores : 1;
    r.cores = fmin(n_threads, (double)all_cores / r.info->local_ranks);
    r.d = dev_init((DevOptions){.threads = n_threads});
    double flops = measure_flops(&r), intra = measure_intra(&r), inter = 0, alone = 0;
    if (r.info->N > 1) inter = measure_inter(&r, r.info->G), alone = measure_inter(&r, 1);
    double fixed = measure_fixed(&r);
    if (r.info->rank == 0) describe(&r, flops, intra, inter, alone, fixed);
    dev_free(r.d);
}

int main(int argc, char **argv) {
    Settings o = {.width = 128, .expert_width = 192, .experts = 8, .topk = 2, .tokens = 1024, .slots = 2, .dedup = 1, .seconds = 1,
                  .name = "measured"};
    Flag flags[] = {{"", FLAG_INT, NULL, 0, 0, NULL, "shapes to measure at", 0},
                    {"width", FLAG_INT, &o.width, 1, 1 << 20, NULL, "hidden width C", 0},
                    {"expert-width", FLAG_INT, &o.expert_width, 1, 1 << 20, NULL, "hidden width of an expert", 0},
                    {"experts", FLAG_INT, &o.experts, 1, PLAN_MAX_E, NULL, "experts of a layer", 0},
                    {"topk", FLAG_INT, &o.topk, 1, PLAN_MAX_E, NULL, "experts per token", 0},
                    {"tokens", FLAG_INT, &o.tokens, 1, 1 << 24, NULL, "tokens of a rank's microbatch", 0},
                    {"", FLAG_INT, NULL, 0, 0, NULL, "ranks", 0},
                    {"nodes", FLAG_INT, &o.nodes, 0, 1e9, NULL, "cut the ranks into that many virtual nodes; 0 = as detected", 0},
                    {"virtual-ranks", FLAG_INT, &o.virtual_ranks, 0, 1024, NULL, "ranks as threads of this process; 0 = as launched", 0},
                    {"threads", FLAG_INT, &o.threads, 0, 4096, NULL, "CPU threads of a rank; 0 = cores / ranks of this machine", 0},
                    {"", FLAG_INT, NULL, 0, 0, NULL, "the file", 0},
                    {"name", FLAG_STRING, &o.name, 0, 0, NULL, "name of the cluster", 0},
                    {"slots", FLAG_INT, &o.slots, 0, PLAN_MAX_S, NULL, "copies of experts a rank may hold", 0},
                    {"dedup", FLAG_INT, &o.dedup, 0, 1, NULL, "1: a token going to several experts of another node crosses once", 0},
                    {"overlap", FLAG_INT, &o.overlap, 0, 1000, NULL, "share of the copies' time that computation hides, per mille", 0},
                    {"cpu-time", FLAG_BOOL, &o.cpu_time, 0, 0, NULL, "processor time for what a rank does alone, on a busy CPU", 0},
                    {"seconds", FLAG_DOUBLE, &o.seconds, 0.01, 3600, NULL, "time for each figure (s)", 0},
                    {0}};
    int n = flags_parse(flags, "calibrate", "measures this machine's rates and prints them as a file for --cluster", argc, argv);
    CHECK_USAGE(n == 0, "'%s' is one argument too many (hint: --help)", argv[1]);
    CHECK_USAGE(o.name[0] && strlen(o.name) < 64 && !strpbrk(o.name, "#\n"), "--name is \"%s\", expected 1 to 63 characters without #", o.name);
    comm_run(&argc, &argv, (int)o.virtual_ranks, (int)o.nodes, body, &o);
    return 0;
}
