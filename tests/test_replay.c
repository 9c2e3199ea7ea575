// Replays: the time model against numbers worked out by hand, cluster files, timelines, studies; and a recorded run whose plans and
// byte counts come out as its log has them.
#include "kernels/check.h"
#include "kernels/files.h"
#include "tests/common/child.h"
#include "topoep/report.h"
#include "topoep/timeline.h"
#include <float.h>
#include <glob.h>
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

// |got - want| <= bound, and ten times the bound away it would not be
static void close_to(double got, double want, double bound) {
    if (!(fabs(got - want) <= bound)) fail_msg("%.17g, expected %.17g within %g", got, want, bound);
    assert_false(fabs(got + 10 * bound - want) <= bound);
}

enum { E = 128, K = 8, TOKENS = 2048, PAIRS = TOKENS * K };

// ---- the time model ---------------------------------------------------------------------------------------------------------
// Two nodes of two ranks, an expert each, all of the 80 pairs for expert 0, 20 from every rank; prices of test_plan's example. Without
// copies: rank 0 computes 80 (800 ps), 40 pairs enter node 0 (160), 60 enter rank 0 (60). The others compute nothing and have their
// own link (20) or node's ports (160) to wait for: node 0's ranks and node 1's 160 each. Straggler: 800 - 800/4 + 160 - 160 = 600.
// Counts: C = 2 with 1-byte elements: 8 bytes are 4 ps over the node's ports and 1 ps over a link; an all-gather brings (4-2)*4*4 = 32
// bytes into a node (16 ps) and 4*4*4 = 64 into a rank (8 ps), without a plan a quarter of it (6 ps); 2 hops of 1 us.
static const Cost example = {.name = "example", .N = 2, .G = 2, .S = 1, .pair_compute_ps = 10, .pair_inter_ps = 4,
                             .pair_intra_ps = 1, .copy_inter_ps = 30, .copy_intra_ps = 10, .plan_fixed_ps = 7, .delta = 1};
static const CostModel example_model = {.C = 2, .F = 5, .K = 1, .E = 4, .token_bytes = 1, .weight_bytes = 2, .grad_bytes = 4};

static void times_example(void **state) {
    (void)state;
    int D[16] = {0};
    for (int s = 0; s < 4; s++) D[s * 4] = 20;
    TimeModel m = times_model(&example, &example_model, 1, 3);
    Planner p;
    planner_open(&p, &example, 4);
    RankSums sums = times_sums_alloc(4, 2);
    planner_solve(&p, D, (PlanOptions){.policy = POLICY_NONE, .block = 1}, NULL);
    times_sums(&sums, D, p.quota, &m);
    LayerTime t = times_layer(&p.info, &sums, &m, 0, 0);
    assert_true(t.counts == 2000006 && t.plan == 0 && t.compute == 800 && t.tokens == 160 && t.weights == 0 && t.fixed == 0);
    assert_int_equal(t.straggler, 600);
    assert_int_equal(times_total(&t), 2000006 + 960);
    assert_int_equal(times_rank_compute(&sums, &m, 0), 800);
    assert_int_equal(times_rank_tokens(&sums, &m, 3), 160);
    // a pair: 4 rows of 2 elements of 1 byte, a weight and its gradient of 4 each; one that crosses also its rank and row, and half of
    // those are expected to go on to the other rank there
    Bytes b = times_bytes(&p.info, times_traffic(&p.info, &m), &m);
    assert_true(b.self == 20 * 16 && b.node == (20 + 20) * 16 && b.inter == 40 * 24 && b.weights_node == 0 && b.weights_inter == 0);
    planner_solve(&p, D, (PlanOptions){.policy = POLICY_TOPOEP, .block = 1}, NULL); // a copy everywhere: 10*20 + max(30, 10) + 7
    times_sums(&sums, D, p.quota, &m);
    t = times_layer(&p.info, &sums, &m, 1, 1);
    assert_true(t.counts == 2000024 && t.plan == 3000000 && t.compute == 200 && t.tokens == 0 && t.weights == 30 && t.fixed == 7 &&
                t.straggler == 0);
    b = times_bytes(&p.info, times_traffic(&p.info, &m), &m); // one copy crosses, two are made inside: 3 C F (2*2 + 4) bytes each
    assert_true(b.self == 80 * 16 && b.inter == 0 && b.weights_inter == 240 && b.weights_node == 480);
    b = times_bytes(&p.info, (Traffic){7, 3}, &m);
    assert_true(b.node == 3 * 16 && b.inter == 7 * 24);
    m.cost.delta = 0.5, p.info.pairs_inter = 40;
    assert_int_equal(times_traffic(&p.info, &m).crossings, 20);
    CostModel two = example_model;
    two.K = 2; // a token's row that crosses once has two of each
    assert_int_equal(times_model(&m.cost, &two, 1, 3).crossing_bytes, 8 + 2 * 16);
    times_sums_free(&sums);
    planner_close(&p);
}

static void quantiles(void **state) { // the next value at or above
    (void)state;
    int64_t ps[] = {4000000000, 1000000000, 3000000000, 2000000000};
    ReplayRow r = {.n = 4, .layer_ps = ps};
    assert_true(replay_quantile_ms(&r, 0.5) == 2 && replay_quantile_ms(&r, 0.51) == 3 && replay_quantile_ms(&r, 0.99) == 4 &&
                replay_quantile_ms(&r, 0) == 1);
    r.n = 0;
    assert_true(isnan(replay_quantile_ms(&r, 0.5)));
}

static Replay replay_of(const char *kind, const Cost *c, const CostModel *m, int layers, int steps, ReplaySeen seen, void *to) {
    Demand d = {.kind = demand_find(kind), .N = c->N, .G = c->G, .E = m->E, .K = m->K, .tokens = TOKENS, .seed = 3};
    int rows[REPLAY_ROWS];
    for (int i = 0; i < REPLAY_ROWS; i++) rows[i] = 1;
    TimeModel t = times_model(c, m, 10, 70);
    Source s;
    Replay a;
    source_generate(&s, &d, layers, steps);
    replay_run(&a, &s, &t, (PlanOptions){.block = 1}, rows, 0, seen, to);
    source_close(&s);
    return a;
}

static double pairs_of(const Replay *a, int row) { // from the bytes; on four nodes of eight
    const Bytes *b = &a->row[row].bytes;
    double out = (double)b->inter / (double)a->m.crossing_bytes / a->m.cost.delta;
    return (double)(b->self + b->node) / (double)a->m.pair_bytes + out / 8;
}

// The parts are the whole; TopoEP is below every other policy but for planning; without a price on traffic nobody passes the ceiling
static void conservation(void **state) {
    (void)state;
    static const char *const kinds[] = {"balanced", "zipf", "hot-rank", "ragged", "rotating", "tastes"};
    const CostModel m = {.C = 2048, .F = 768, .K = K, .E = E, .slots = -1, .token_bytes = 2, .weight_bytes = 2, .grad_bytes = 4};
    Cost priced = cost_load("topoep/clusters/h800-4x8.conf", m), free_links = priced;
    free_links.pair_inter_ps = free_links.pair_intra_ps = 0;
    for (int k = 0; k < 6; k++)
        for (int links = 0; links < 2; links++) {
            const Cost *c = links ? &free_links : &priced;
            Replay a = replay_of(kinds[k], c, &m, 2, 3, NULL, NULL);
            double other = report_other_ms(&a, 0.25), ceiling = replay_step_ms(&a, REPLAY_UNIFORM);
            close_to(other / (other + ceiling), 0.25, 1e-12);
            for (int row = 0; row < REPLAY_ROWS; row++) {
                ReportRow x = report_row(&a, row, other);
                assert_true(a.row[row].n == 6 && a.steps == 3);
                double parts = x.compute_ms + x.tokens_ms + x.weights_ms + x.planning_ms;
                close_to(parts, x.layer_ms, 8 * DBL_EPSILON * x.layer_ms); // six roundings
                close_to(x.moe_ms, 2 * x.layer_ms, 8 * DBL_EPSILON * x.moe_ms);
                close_to(x.speedup * x.step_ms, replay_step_ms(&a, POLICY_NONE) + other, 8 * DBL_EPSILON * x.step_ms * x.speedup);
                // every pair lies somewhere; crossings and passed on pairs were rounded in each of six samples
                close_to(pairs_of(&a, row), pairs_of(&a, POLICY_NONE), 2 * 6 * (0.5 + 0.5 / 8 / c->delta));
                if (k != 3) close_to(pairs_of(&a, row), 6.0 * 32 * PAIRS, 6 * (0.5 + 0.5 / 8 / c->delta));
                assert_true(x.straggler_ms >= 0 && x.straggler_ms <= x.compute_ms + x.tokens_ms && x.p50_ms <= x.p99_ms);
                assert_true(a.row[row].sum.compute >= a.row[REPLAY_UNIFORM].sum.compute);
                if (links) assert_true(x.ceiling <= 1);
                const LayerTime *t = &a.row[row].sum, *best = &a.row[POLICY_TOPOEP].sum;
                if (row != REPLAY_UNIFORM)
                    assert_true(times_total(best) - best->counts - best->plan <= times_total(t) - t->counts - t->plan);
            }
            replay_free(&a);
        }
}

// eplb plans by its past alone: nothing to go by in the first step, and what it does in the second is what it does whatever comes then
static void eplb_past(void **state) {
    (void)state;
    const CostModel m = {.C = 2048, .F = 768, .K = K, .E = E, .token_bytes = 2, .weight_bytes = 2, .grad_bytes = 4};
    Cost c = cost_load("topoep/clusters/h800-4x8.conf",
                       (CostModel){.C = 2048, .F = 768, .K = K, .slots = 2, .token_bytes = 2, .weight_bytes = 2, .grad_bytes = 4});
    Replay one = replay_of("hot-rank", &c, &m, 1, 1, NULL, NULL), many = replay_of("hot-rank", &c, &m, 1, 4, NULL, NULL);
    assert_true(many.hot_ratio > 3 && many.hot_ratio < 3.2 && many.hot_step >= 1 && many.hot_step <= 4); // all experts of a rank at 3
    Replay lost = replay_of("rotating", &c, &m, 1, 4, NULL, NULL);
    assert_true(one.row[POLICY_EPLB].copies == 0 && many.row[POLICY_EPLB].copies > 0);
    assert_true(many.row[POLICY_EPLB].after < 0.7 * many.row[POLICY_EPLB].before); // a hot spot that stays is met
    assert_true(lost.row[POLICY_EPLB].after > 0.8 * lost.row[POLICY_EPLB].before);  // one that moves on is not
    replay_free(&one), replay_free(&many), replay_free(&lost);
}

// ---- the timeline -------------------------------------------------------------------------------------------------------------
static void timeline(void **state) { // valid JSON; a rank's events do not overlap and add up to the step
    (void)state;
    char *dir = temp_dir(), *path = path_join(dir, "line.json");
    const CostModel m = {.C = 2048, .F = 768, .K = K, .E = E, .slots = -1, .token_bytes = 2, .weight_bytes = 2, .grad_bytes = 4};
    Cost c = cost_load("topoep/clusters/h800-4x8.conf", m);
    TimeModel t = times_model(&c, &m, 10, 70);
    Timeline *l = timeline_open(path, &t, &m, POLICY_TOPOEP);
    Replay a = replay_of("zipf", &c, &m, 3, 2, timeline_see, l), first = replay_of("zipf", &c, &m, 3, 1, NULL, NULL);
    timeline_close(l, 5);
    char *text = file_read(path, NULL);
    json_t *j = json_loads(text, 0, NULL), *event;
    assert_non_null(j);
    double end[32] = {0}, busy[32] = {0}, wait[32] = {0}, step_us = 1e3 * (5 + replay_step_ms(&first, POLICY_TOPOEP));
    size_t i;
    json_array_foreach(json_object_get(j, "traceEvents"), i, event) {
        if (strcmp(json_string_value(json_object_get(event, "ph")), "X") != 0) continue;
        int r = (int)json_integer_value(json_object_get(event, "tid"));
        double ts = json_number_value(json_object_get(event, "ts")), us = json_number_value(json_object_get(event, "dur"));
        assert_true(r >= 0 && r < 32 && us > 0 && json_integer_value(json_object_get(event, "pid")) == r / 8);
        close_to(ts, end[r], 1e-5); // one after the other, to a picosecond's rounding
        end[r] = ts + us;
        *(strcmp(json_string_value(json_object_get(event, "name")), "wait") ? &busy[r] : &wait[r]) += us;
    }
    double idle = 0;
    for (int r = 0; r < 32; r++) {
        close_to(busy[r] + wait[r], step_us, 1e-5 * step_us);
        idle += wait[r] / 32;
    }
    close_to(idle, 1e-6 * (double)first.row[POLICY_TOPOEP].sum.straggler, 1e-3 * idle); // what ranks wait is the straggler time
    json_decref(j);
    free(text), free(path);
    replay_free(&a), replay_free(&first);
    temp_remove(dir);
}

// ---- cluster files ----------------------------------------------------------------------------------------------------------
static void clusters(void **state) { // all that are shipped load, for one node and for many; figures against the formulas
    (void)state;
    glob_t g;
    assert_int_equal(glob("topoep/clusters/*.conf", 0, NULL, &g), 0);
    assert_true(g.gl_pathc >= 6);
    for (size_t i = 0; i < g.gl_pathc; i++)
        for (int nodes = 1; nodes <= 32; nodes *= 2) {
            CostModel m = {.C = 4096, .F = 1408, .K = 8, .E = 128, .slots = -1, .token_bytes = 2, .weight_bytes = 2,
                           .grad_bytes = 4, .nodes = nodes};
            Cost c = cost_load(g.gl_pathv[i], m);
            assert_true(c.N == nodes && c.G > 0 && c.pair_compute_ps > 0 && c.pair_intra_ps > 0 && c.copy_intra_ps > 0 && c.S > 0);
            assert_true(nodes == 1 ? c.pair_inter_ps == 0 && c.delta == 1 : c.pair_inter_ps > 0 && c.delta <= 1 &&
                        c.copy_inter_ps > 0);
        }
    globfree(&g);
    // 18 C F / 500e12; 8 C / 380e9; delta 8 C / (45e9 * 8) with delta = 2 (1 - 2^-8) / 8
    CostModel m = {.C = 4096, .F = 1408, .K = 8, .E = 128, .slots = -1, .token_bytes = 2, .weight_bytes = 2, .grad_bytes = 4,
                   .N = 2, .G = 8};
    Cost c = cost_load("topoep/clusters/h100.conf", m); // as many nodes as 16 ranks fill
    assert_int_equal(c.N, 2);
    assert_int_equal(c.pair_compute_ps, 207618);
    assert_int_equal(c.pair_intra_ps, 86232);
    assert_int_equal(c.pair_inter_ps, 22667);
    close_to(c.delta, 255.0 / 1024, 1e-15);
    assert_int_equal(c.measured, 0);
}

static void no_nodes(void *arg) {
    cost_load(arg, (CostModel){.C = 64, .F = 64, .K = 1, .N = 3, .G = 4, .token_bytes = 2, .weight_bytes = 2, .grad_bytes = 4});
}
static void nodes_refused(void **state) {
    (void)state;
    Child c = child_call(no_nodes, "topoep/clusters/h100.conf");
    assert_int_equal(c.status, STATUS_USAGE);
    assert_non_null(strstr(c.out, "12 ranks do not fill nodes of 8"));
}

// ---- the program, and a recorded run --------------------------------------------------------------------------------------------
static double sum_of_log(const char *dir, const char *key) {
    char *path = path_join(dir, "log.jsonl"), *text = file_read(path, NULL), *rest = text;
    double sum = 0;
    for (char *line; (line = strsep(&rest, "\n"));) {
        json_t *j = json_loads(line, 0, NULL);
        sum += json_number_value(json_object_get(j, key)); // 0 in the header
        json_decref(j);
    }
    free(path), free(text);
    return sum;
}

static json_t *row_named(json_t *report, const char *name) {
    size_t i;
    json_t *row;
    json_array_foreach(json_object_get(report, "policies"), i, row)
        if (strcmp(json_string_value(json_object_get(row, "policy")), name) == 0) return row;
    fail_msg("no row %s", name);
    return NULL;
}
static double number_of(json_t *row, const char *key) { return json_number_value(json_object_get(row, key)); }

static void recorded_run(void **state) {
    (void)state;
    char *dir = temp_dir(), *train = program_path("train"), *prepare = program_path("prepare"), *replay = program_path("replay");
    char *text = path_join(dir, "text"), *route = path_join(dir, "run/route.bin"), *sources = file_read("topoep/solve.h", NULL);
    FILE *f = fopen(text, "w");
    for (int i = 0; i < 8; i++) fputs(sources, f);
    fclose(f);
    // copies are cheap in this cluster, so that plans have some
    char *conf = path_join(dir, "cheap.conf");
    const char cheap[] = "name = cheap\nnodes = 2\nranks_per_node = 2\npair_compute_ps = 1000000\n"
                         "pair_inter_ps = 100000\npair_intra_ps = 50000\ncopy_inter_ps = 100000\ncopy_intra_ps = 50000\n"
                         "overlap_permille = 0\nplan_fixed_ps = 1\n";
    file_write(conf, cheap, sizeof cheap - 1);
    char *run = str_format("%s --out %s/data %s && %s --data %s/data --out %s/run --cluster %s --virtual-ranks 4 --nodes 2 "
                           "--layers 2 --width 32 --heads 2 "
                           "--kv-heads 1 --head-size 16 --experts 8 --topk 2 --expert-width 24 --seq 32 --batch 8 --micro-batch "
                           "1 --router-skew 1 --steps 4 "
                           "--trace-every 1 --eval-every 0 --sample-every 0", prepare, dir, text, train, dir, dir, conf);
    Child c = child_shell(run, NULL, 0);
    if (c.status) fail_msg("%s", c.out);
    char *command = str_format("%s %s %s --json", replay, route, conf);
    c = child_shell(command, NULL, 0);
    if (c.status) fail_msg("%s", c.out);
    json_t *report = json_loads(c.out, 0, NULL);
    assert_non_null(report);
    json_t *row = row_named(report, "topoep");
    {
        char *out = path_join(dir, "run");
        double steps = 4;
        assert_true(number_of(row, "recorded") == 4 * 2 * 2 && number_of(row, "same_plans") == 16 &&
                    number_of(row, "same_pairs") == 16);
        assert_true(number_of(row, "copies") == sum_of_log(out, "copies") && number_of(row, "copies") > 0);
        close_to(number_of(row, "mb_node"), sum_of_log(out, "bytes_node") / 1e6 / steps, 1e-9); // the JSON's decimals, not a byte
        close_to(number_of(row, "mb_inter"), sum_of_log(out, "bytes_inter") / 1e6 / steps, 1e-9);
        close_to(number_of(row, "mb_weights_node") + number_of(row, "mb_weights_inter"),
                 sum_of_log(out, "weight_bytes") / 1e6 / steps, 1e-9);
        close_to(number_of(row, "rank_max_mean_after"), sum_of_log(out, "rank_max_mean_after") / steps, 1e-9);
        free(out);
    }
    assert_true(number_of(report, "measured_moe_step_ms") > 0 && number_of(report, "hottest_expert_over_mean") > 1);
    json_decref(report);
    free(command);
    command = str_format("%s %s %s --experts 8", replay, route, conf); // what a recorded run settles
    c = child_shell(command, NULL, 0);
    assert_true(c.status == STATUS_USAGE && strstr(c.out, "is a recorded trace"));
    free(command);
    // one pair moved in the file: that plan is another one
    size_t n;
    char *bytes = file_read(route, &n);
    TraceHeader h;
    trace_read_close(trace_read_open(route, &h));
    int32_t *D = (int32_t *)(void *)(bytes + 8 + 12 + 68 + 96 + 16 * h.stages + 8 + 112), from = 0;
    while (D[from] == 0) from++;
    D[from]--, D[from ? 0 : 1]++;
    file_write(route, bytes, n);
    command = str_format("%s %s %s --balance topoep --json", replay, route, conf);
    c = child_shell(command, NULL, 0);
    report = json_loads(c.out, 0, NULL);
    assert_non_null(report);
    assert_true(number_of(row_named(report, "topoep"), "same_plans") == 15);
    json_decref(report);
    // more pairs than an int counts
    ((int32_t *)(void *)(bytes + 8 + 12))[12] = 1 << 30; // micro_tokens
    file_write(route, bytes, n);
    c = child_shell(command, NULL, 0);
    assert_true(c.status == STATUS_USAGE && strstr(c.out, "pairs, expected at most"));
    free(command), free(bytes), free(run), free(conf), free(sources), free(route), free(text), free(replay), free(prepare),
    free(train);
    temp_remove(dir);
}

// The Markdown of the studies says what a replay of the same samples says
static void studies(void **state) {
    (void)state;
    char *replay = program_path("replay");
    char *command = str_format("%s --headline topoep/clusters/h800-4x8.conf --layers 1 --steps 1", replay);
    Child study = child_shell(command, NULL, 0);
    free(command);
    command = str_format("%s deepseek-v3 topoep/clusters/h800-4x8.conf --layers 1 --warm 4 --steps 5 --experts 64 --topk 6 "
                         "--expert-width 1408 --balance eplb --json", replay);
    Child c = child_shell(command, NULL, 0);
    json_t *report = json_loads(c.out, 0, NULL);
    assert_true(study.status == 0 && report);
    char *table = strstr(study.out, "### DeepSeek-V2-Lite"), *row = strstr(table, "| eplb |"), *none = strstr(table, "| none |");
    double before, after, layer, parts[4], step, none_step, gain, other;
    assert_int_equal(sscanf(row, "| eplb | %lf > %lf | %lf | %lf | %lf | %lf | %lf | %lf | %lf%%", &before, &after, &layer,
                            &parts[0], &parts[1], &parts[2], &parts[3], &step, &gain), 9);
    assert_int_equal(sscanf(none, "| none | %*f > %*f | %*f | %*f | %*f | %*f | %*f | %lf", &none_step), 1);
    assert_int_equal(sscanf(strstr(table, "GFLOP per token, "), "GFLOP per token, %lf", &other), 1);
    json_t *eplb = row_named(report, "eplb");
    assert_true(number_of(eplb, "copies") > 0 && number_of(report, "steps") == 1);
    close_to(layer, number_of(eplb, "layer_ms"), 0.00051); // as printed
    close_to(after, number_of(eplb, "rank_max_mean_after"), 0.00051);
    close_to(parts[0] + parts[1] + parts[2] + parts[3], layer, 0.0026);
    close_to(step, other + 26 * layer, 0.06 + 26 * 0.0005 + 0.05);
    close_to(gain, 100 * (none_step / step - 1), 0.06 + 100 * 0.1 / step);
    // by hand: 27 x 13,762,560 of attention, a dense layer of 3 x 2048 x 10944, 26 of shared experts and routers 3 x 2048 x 2816 + 2048 x 64,
    // the head's 2048 x 102400; 6 FLOPs each, and 3 x 27 x 4096 x 5120 for the scores: 8.31e9 a token, 8192 of them at 400e12 a second
    double weights = 27 * 13762560.0 + 67239936 + 26 * (17301504 + 131072.0) + 209715200;
    close_to(other, 1e3 * 8192 * (6 * weights + 1698693120.0) / 400e12, 0.051);
    json_decref(report);
    free(command);
    command = str_format("%s --scale topoep/clusters/h800-4x8.conf --layers 1 --nodes 4", replay);
    c = child_shell(command, NULL, 0);
    assert_true(c.status == 0 && strstr(c.out, "| 4 x 8 | 128 | topoep, low |") && strstr(c.out, "1024 tokens on a rank") &&
                !strstr(c.out, "| 8 x 8"));
    free(command), free(replay);
}

static void refusals(void **state) {
    (void)state;
    char *replay = program_path("replay");
    static const struct {
        const char *args;
        int status;
        const char *says;
    } bad[] = {{"", STATUS_USAGE, "expected a demand"},
               {"nothing-such topoep/clusters/h100.conf", STATUS_USAGE, "no generated demand of that name"},
               {"zipf", STATUS_USAGE, "needs a cluster file"},
               {"--headline zipf topoep/clusters/h100.conf", STATUS_USAGE, "expected one: a cluster file"},
               {"zipf topoep/clusters/h100.conf", STATUS_USAGE, "--nodes"},
               {"zipf topoep/clusters/none.conf", STATUS_DATA, "none.conf"},
               {"Makefile topoep/clusters/h100.conf", STATUS_DATA, "is no trace"},
               {"zipf topoep/clusters/h800-4x8.conf --experts 100", STATUS_USAGE, "100 experts"},
               {"zipf topoep/clusters/h800-4x8.conf --topk 200", STATUS_USAGE, "200 of 128 experts"},
               {"zipf topoep/clusters/h800-4x8.conf --tokens 9999999", STATUS_USAGE, "pairs, expected at most"},
               {"zipf topoep/clusters/h800-4x8.conf --warm 4 --steps 4", STATUS_USAGE, "leaves none"},
               {"--headline --scale topoep/clusters/h800-4x8.conf", STATUS_USAGE, "two studies"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char *command = str_format("%s %s", replay, bad[i].args);
        Child c = child_shell(command, NULL, 0);
        if (c.status != bad[i].status || !strstr(c.out, bad[i].says)) fail_msg("%s: status %d: %s", command, c.status, c.out);
        free(command);
    }
    free(replay);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(times_example), cmocka_unit_test(quantiles), cmocka_unit_test(conservation), cmocka_unit_test(eplb_past),
        cmocka_unit_test(timeline), cmocka_unit_test(clusters), cmocka_unit_test(nodes_refused), cmocka_unit_test(recorded_run),
        cmocka_unit_test(studies), cmocka_unit_test(refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
