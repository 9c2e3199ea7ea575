// Plans: legal, exact, no worse than no plan, the same on every thread count; parts left out are left out; files. How good they
// are: tests/test_quality.c.
#include "kernels/check.h"
#include "tests/common/cases.h"
#include "tests/common/child.h"
#include "tests/common/team.h"
#include "tests/ref/plan_ref.h"
#include "topoep/loads.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static Dev *dev;
static Draw rng = {11, 0};
#define TOPOEP(...) (PlanOptions){.block = 1, .policy = POLICY_TOPOEP, __VA_ARGS__}

// ---- tests --------------------------------------------------------------------------------------------------------------------
static void test_flow(void **state) { // rows and columns of the closed form against the queues
    (void)state;
    for (int k = 0; k < 20000; k++) {
        int G = 1 + draw(&rng, 4), R = G * (1 + draw(&rng, 4)), D[16], q[16] = {0}, y[256], line[16], left = 0;
        for (int s = 0; s < R; s++) left += D[s] = draw(&rng, 3) ? draw(&rng, 30) : 0;
        while (left > 0) {
            int n = 1 + draw(&rng, left), r = draw(&rng, R);
            q[r] += n, left -= n;
        }
        plan_ref_flow(y, D, q, R, G);
        for (int i = 0; i < R; i++) {
            flow_row(line, D, q, i, 0, R, 1, G);
            for (int r = 0; r < R; r++) assert_int_equal(line[r], y[i * R + r]);
            flow_column(line, D, q, i, 0, R, 1, G);
            for (int s = 0; s < R; s++) assert_int_equal(line[s], y[s * R + i]);
        }
    }
}

static void test_random(void **state) {
    (void)state;
    int with_copies = 0, better = 0, n = 4000;
    for (int k = 0; k < n; k++) {
        Case c = case_draw(&rng, k % 500 == 499);
        PlanOptions o = TOPOEP(.effort = k % 100 == 0 ? EFFORT_HIGH : k % 2 ? EFFORT_LOW : EFFORT_DEFAULT);
        if (k % 50 == 49) o.policy = POLICY_NONE;
        case_solve(dev, &c, o);
        assert_true(c.info.cost_ps <= c.info.identity_ps);
        PlanInfo first = c.info;
        if (k % 10 == 0) {
            memset(c.quota, 77, SIZE(c.E, c.R, sizeof(int)));
            case_solve(dev, &c, o);
            assert_memory_equal(&first, &c.info, sizeof first);
        }
        with_copies += first.copies > 0, better += first.cost_ps < first.identity_ps;
        case_free(&c);
    }
    print_message("%d matrices: %d plans with copies\n", n, with_copies);
    assert_true(with_copies > n / 5 && better == with_copies); // a plan with copies is kept only for a lower J
}

static void test_oracle_sees(void **state) { // each rule broken once
    (void)state;
    int seen = 0;
    for (int k = 0; k < 400; k++) {
        Case c = case_draw(&rng, 0);
        case_solve(dev, &c, TOPOEP(.effort = EFFORT_DEFAULT));
        int S = c.cost.S, at = -1;
        for (int i = 0; i < c.R * S; i++)
            if (c.slot[i] >= 0) at = i;
        if (at < 0) {
            case_free(&c);
            continue;
        }
        int e = c.slot[at], r = at / S, *q = c.quota + e * c.R, home = e / (c.E / c.R);
        uint64_t hash = c.info.hash;
        q[r]++, seen++;
        assert_non_null(plan_ref_illegal(c.D, c.quota, c.slot, c.R, c.E, S)); // sums
        q[r]--, q[home] += q[r];
        int moved = q[r];
        q[r] = 0;
        assert_non_null(plan_ref_illegal(c.D, c.quota, c.slot, c.R, c.E, S)); // a copy without pairs
        q[r] = moved, q[home] -= moved;
        c.slot[at] = -1;
        assert_non_null(plan_ref_illegal(c.D, c.quota, c.slot, c.R, c.E, S)); // pairs without a copy
        c.slot[at] = r * (c.E / c.R);
        assert_non_null(plan_ref_illegal(c.D, c.quota, c.slot, c.R, c.E, S)); // at home
        c.slot[at] = e;
        if (q[r] > 1) {
            q[r]--, q[home]++;
            assert_true(plan_ref_info(c.D, c.quota, c.slot, c.R, c.E, &c.cost).hash != hash);
        }
        case_free(&c);
    }
    assert_true(seen > 50);
}

static void test_block(void **state) {
    (void)state;
    int copies = 0;
    for (int k = 0; k < 300; k++) {
        Case c = case_draw(&rng, 0);
        int block = 2 + draw(&rng, 30);
        PlanOptions o = TOPOEP(.target = k % 3 == 0 ? TARGET_BALANCE : TARGET_TIME, .effort = k % 2 ? EFFORT_LOW : EFFORT_DEFAULT);
        o.block = block;
        case_solve(dev, &c, o);
        for (int e = 0; e < c.E; e++)
            for (int r = 0; r < c.R; r++)
                if (r != e / (c.E / c.R)) {
                    assert_int_equal(c.quota[e * c.R + r] % block, 0);
                    copies += c.quota[e * c.R + r] > 0;
                }
        case_free(&c);
    }
    assert_true(copies > 50);
}

static void test_threads(void **state) { // the parallel form, for teams of 1 to 5
    (void)state;
    for (int k = 0; k < 200; k++) {
        Case c = case_draw(&rng, k == 39);
        PlanOptions o = TOPOEP(.target = k % 4 == 3 ? TARGET_BALANCE : TARGET_TIME, .effort = k % 3 == 2 ? EFFORT_LOW : EFFORT_DEFAULT,
                               .without = k % 5 == 4 ? (unsigned)draw(&rng, 16) : 0);
        case_solve(dev, &c, o);
        PlanInfo want = c.info;
        size_t n = SIZE(c.E, c.R, sizeof(int));
        int *quota = host_alloc(n);
        memcpy(quota, c.quota, n);
        for (int threads = 1; threads <= (k < 40 ? 5 : 1); threads += 2) {
            void *work = host_alloc(solve_work_bytes(c.R, c.E, c.cost.N, c.cost.S)), *scratch = host_alloc(policy_work_bytes(c.R, c.E));
            Solve v;
#pragma omp parallel num_threads(threads)
            {
                solve_bind(&v, work, c.D, c.R, c.E, &c.cost, o);
                policy_solve(&v, o, NULL, scratch);
                solve_result(&v, c.quota, c.slot, &c.info);
            }
            assert_memory_equal(&want, &c.info, sizeof want);
            assert_memory_equal(quota, c.quota, n);
            assert_int_equal(v.best_ps, c.info.cost_ps); // J as kept up move by move is J as counted in the end
            free(work);
            free(scratch);
        }
        free(quota);
        case_free(&c);
    }
}

static void test_moves(void **state) { // the sums kept up by moves that place, drain and drop copies, against a recount
    (void)state;
    int drops = 0;
    for (int k = 0; k < 300; k++) {
        int N = 1 + draw(&rng, 3), G = 1 + draw(&rng, 4), S = 1 + draw(&rng, 3);
        Case c = case_make(N, G, 1, S);
        case_draw_cost(&rng, &c);
        c.cost.copy_intra_ps = 1000000000, c.cost.copy_inter_ps = draw(&rng, 2) ? 1 : 1100000000; // transfers decide J
        case_draw_loads(&rng, &c);
        void *work = host_alloc(solve_work_bytes(c.R, c.E, N, S));
        Solve v;
        solve_bind(&v, work, c.D, c.R, c.E, &c.cost, TOPOEP(.effort = EFFORT_DEFAULT));
        solve_none(&v);
        for (int i = 0; i < 150; i++) {
            int e = draw(&rng, 3) ? 0 : draw(&rng, c.E), h = draw(&rng, c.R), r = draw(&rng, c.R), q = v.q[e * c.R + h];
            if (h == r || q == 0 || (v.q[e * c.R + r] == 0 && r != solve_home(&v, e) && v.held[r] == S)) continue;
            int d = draw(&rng, 2) ? q : 1 + draw(&rng, q);
            drops += d == q && h != solve_home(&v, e);
            solve_move(&v, e, h, r, d);
            PlanInfo want = plan_ref_info(c.D, v.q, v.slot, c.R, c.E, &c.cost);
            assert_int_equal(cost_total(&c.cost, solve_peaks(&v)), want.cost_ps);
        }
        free(work);
        case_free(&c);
    }
    print_message("%d copies dropped\n", drops);
    assert_true(drops > 200);
}

// A worked example. 2 nodes of 2 ranks, an expert each; all of the 80 pairs are for expert 0, 20 from every rank. Computing
// a pair costs 10, crossing a node 4, a link 1, a copy 30 between nodes and 10 inside. With a copy everywhere each rank computes its own
// pairs: 10*20 + 0 + max(30*1, 10*1) = 230, where at home it were 10*80 + max(4*40, 1*60) + 0 = 960.
static void test_example(void **state) {
    (void)state;
    Case c = case_make(2, 2, 1, 1);
    for (int s = 0; s < 4; s++) c.D[s * 4] = 20;
    case_solve(dev, &c, TOPOEP(.effort = EFFORT_DEFAULT));
    for (int r = 0; r < 4; r++) assert_int_equal(c.quota[r], 20);
    assert_int_equal(c.info.cost_ps, 230);
    assert_int_equal(c.info.identity_ps, 960);
    assert_int_equal(c.info.hash, 0x49f3f7a594ad4d24ull);
    case_free(&c);
}

// What is left out is not there: copies on other nodes, copies and exchanges inside a node, the price of traffic
static void test_without(void **state) {
    (void)state;
    int foreign = 0, near = 0, dearer = 0, alone = 0;
    for (int k = 0; k < 600; k++) {
        Case c = case_draw(&rng, 0);
        PlanOptions o = TOPOEP(.target = k % 4 == 3 ? TARGET_BALANCE : TARGET_TIME, .effort = k % 2 ? EFFORT_LOW : EFFORT_DEFAULT);
        case_solve(dev, &c, o);
        PlanInfo all = c.info;
        foreign += all.inter_copies > 0, near += all.node_copies > 0;
        o.without = PLAN_NO_STAGE1;
        case_solve(dev, &c, o);
        assert_int_equal(c.info.inter_copies, 0);
        for (int e = 0; e < c.E; e++)
            for (int r = 0; r < c.R; r++) assert_true(c.quota[e * c.R + r] == 0 || r / c.cost.G == e / (c.E / c.R) / c.cost.G);
        o.without = PLAN_NO_STAGE2;
        case_solve(dev, &c, o);
        assert_int_equal(c.info.node_copies, 0);
        o.without = PLAN_NO_STAGE1 | PLAN_NO_STAGE2;
        case_solve(dev, &c, o);
        assert_int_equal(c.info.copies, 0);
        o.without = PLAN_NO_LOCALITY | PLAN_NO_PORTFOLIO;
        case_solve(dev, &c, o);
        dearer += c.info.tokens_ps > all.tokens_ps;
        o.without = PLAN_NO_PORTFOLIO;
        case_solve(dev, &c, o);
        alone += c.info.cost_ps > all.cost_ps;
        o.without = PLAN_NO_SLICING; // an affair of the cost alone (test_rates)
        case_solve(dev, &c, o);
        assert_memory_equal(&all, &c.info, sizeof all);
        case_free(&c);
    }
    print_message("of 600 plans %d had copies on other nodes, %d inside; without prices of traffic %d had dearer traffic, without "
                  "the portfolio %d were worse\n", foreign, near, dearer, alone);
    assert_true(foreign > 60 && near > 60 && dearer > 30 && alone > 5);
}

// A copy inside a node that costs nothing pays although one between nodes is dear
static void test_free_inside(void **state) {
    (void)state;
    Case c = case_make(2, 2, 1, 1);
    for (int s = 0; s < 4; s++) c.D[s * 4] = 20;
    c.cost.copy_inter_ps = 1000000, c.cost.copy_intra_ps = 0;
    case_solve(dev, &c, TOPOEP(.effort = EFFORT_DEFAULT));
    assert_int_equal(c.info.copies, 1);
    assert_int_equal(c.info.max_load, 40);
    case_solve(dev, &c, TOPOEP(.effort = EFFORT_LOW));
    assert_int_equal(c.info.copies, 1);
    case_free(&c);
}

static const Cost qwen_cost = {.name = "h800-4x8, Qwen3-30B-A3B", .N = 4, .G = 8, .S = 2, .pair_compute_ps = 56623, .pair_inter_ps = 20477,
                               .pair_intra_ps = 102400, .copy_inter_ps = 104857600, .copy_intra_ps = 235929600, .plan_fixed_ps = 100000000};

// Costs from rates: the figures of three published shapes on that machine, worked out by hand from the formulas
static void test_rates(void **state) {
    (void)state;
    CostModel m = {.C = 2048, .F = 768, .K = 8, .E = 128, .slots = -1, .token_bytes = 2, .weight_bytes = 2, .grad_bytes = 4};
    Cost c = cost_load("topoep/clusters/h800-4x8.conf", m), want = qwen_cost;
    strcpy(want.name, "h800-4x8");
    assert_int_equal(c.N, want.N);
    assert_int_equal(c.G, want.G);
    assert_int_equal(c.S, want.S);
    assert_int_equal(c.pair_compute_ps, want.pair_compute_ps);
    assert_int_equal(c.pair_inter_ps, want.pair_inter_ps);
    assert_int_equal(c.pair_intra_ps, want.pair_intra_ps);
    assert_int_equal(c.copy_inter_ps, want.copy_inter_ps);
    assert_int_equal(c.copy_intra_ps, want.copy_intra_ps);
    assert_string_equal(c.name, want.name);
    m.weight_bytes = m.grad_bytes = m.token_bytes = 4, m.slots = 5; // fp32: 12 bytes cross where 8 did, tokens double
    c = cost_load("topoep/clusters/h800-4x8.conf", m);
    assert_int_equal(c.copy_intra_ps, want.copy_intra_ps * 3 / 2);
    assert_int_equal(c.pair_intra_ps, want.pair_intra_ps * 2);
    assert_int_equal(c.S, 5);
    m.one_port = 1; // copies between nodes over one port of eight; a cost file's likewise
    Cost one = cost_load("topoep/clusters/h800-4x8.conf", m), plain = cost_load("tests/data/plan/toy-2x4-cheap.conf", (CostModel){.slots = -1});
    assert_int_equal(one.copy_inter_ps, 8 * c.copy_inter_ps);
    assert_int_equal(one.copy_intra_ps, c.copy_intra_ps);
    assert_int_equal(one.pair_inter_ps, c.pair_inter_ps);
    one = cost_load("tests/data/plan/toy-2x4-cheap.conf", m);
    assert_int_equal(one.copy_inter_ps, 4 * plain.copy_inter_ps);
    assert_int_equal(one.copy_intra_ps, plain.copy_intra_ps);
    m.one_port = 0, m.N = 2, m.G = 2;
    c = cost_load(NULL, m);
    assert_true(c.N == 2 && c.G == 2 && c.pair_compute_ps > 0 && c.pair_inter_ps > 0 && c.copy_inter_ps > 0);
    m.N = 1;
    c = cost_load(NULL, m);
    assert_true(c.pair_inter_ps == 0 && c.copy_inter_ps == 0 && c.copy_intra_ps > 0);
}

typedef struct Bad {
    const char *text, *says;
    int loads;
} Bad;
static char *bad_path;
static void read_bad(void *arg) {
    const Bad *b = arg;
    int R, E;
    if (b->loads) loads_read(bad_path, &R, &E);
    else cost_load(bad_path, (CostModel){.C = 8, .F = 8, .K = 2, .E = 8, .slots = -1, .token_bytes = 4, .weight_bytes = 4, .grad_bytes = 4});
}
static void check_bad(void *arg) {
    const int *a = arg;
    Cost c = {.name = "x", .N = 2, .G = 2, .S = a[3]};
    cost_check(&c, a[0], a[1], a[2]);
}

#define COSTS_OF(extra) "name = x\nnodes = 2\nranks_per_node = 2\npair_compute_ps = 1\npair_inter_ps = 1\npair_intra_ps = 1\n" \
                        "copy_inter_ps = 1\ncopy_intra_ps = 1\noverlap_permille = 0\n" extra
static void test_bad_files(void **state) {
    (void)state;
    static const Bad bad[] = {
        {COSTS_OF(""), "'plan_fixed_ps' is missing", 0},
        {COSTS_OF("plan_fixed_ps = 1\nslots = 99\n"), ":11: slots = 99, expected an integer from 0 to 32", 0},
        {COSTS_OF("plan_fixed_ps = 1x\n"), ":10: plan_fixed_ps = 1x", 0},
        {COSTS_OF("plan_fixed_ps = 1\nnodes = 2\n"), ":11: 'nodes' was given already in line 2", 0},
        {COSTS_OF("plan_fixed_ps = 1\nflops = 1e9\n"), "'flops' belongs to a rates file", 0},
        {COSTS_OF("plan_fixed_ps = -1\n"), "expected an integer from 0", 0},
        {COSTS_OF("plan_fixed_ps = 1\nfoo = 1\n"), "unknown key 'foo'", 0},
        {COSTS_OF("plan_fixed_ps\n"), "expected key = value", 0},
        {"name = a\xff\n", "UTF-8", 0},
        {"ranks 4294967298 experts 4\n1 1 1 1\n1 1 1 1\n", "ranks", 1},
        {"nodes = 1\n", "'name' is missing", 0},
        {"name = x\nnodes = 1\nranks_per_node = 2\n", "'overlap_permille' is missing|expected the keys", 0},
        {"name = x\nflops = nan\n", "flops = nan, expected a number", 0},
        {"", "is empty, expected a line", 1},
        {"ranks 2 experts 3\n", "2 ranks, 3 experts", 1},
        {"ranks 2 experts\n", "expected: ranks R experts E", 1},
        {"ranks 1 experts 2\n1\n", ":2: 1 counts, expected 2", 1},
        {"ranks 1 experts 2\n1 2 3\n", ":2: 3 counts, expected 2", 1},
        {"ranks 1 experts 2\n1 -2\n", ":2: '-2', expected a number of pairs", 1},
        {"ranks 1 experts 1\n1\n2\n", ":3: a row too many", 1},
        {"ranks 2 experts 2\n1 2\n", "1 rows, expected 2", 1},
        {"ranks 1 experts 2\n2147483647 1\n", "2147483648 pairs in all", 1},
        {"ranks 1 experts 1\n99999999999999999999\n", "expected a number of pairs", 1},
    };
    char *dir = temp_dir();
    size_t room = strlen(dir) + 16;
    bad_path = malloc(room);
    snprintf(bad_path, room, "%s/file", dir);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        FILE *f = fopen(bad_path, "w");
        assert_non_null(f);
        fputs(bad[i].text, f);
        fclose(f);
        Child got = child_call(read_bad, (void *)&bad[i]);
        char want[128], *other;
        snprintf(want, sizeof want, "%s", bad[i].says);
        if ((other = strchr(want, '|'))) *other++ = '\0';
        if (got.status != STATUS_DATA || (!strstr(got.out, want) && !(other && strstr(got.out, other))))
            fail_msg("file %zu: status %d, said: %s; expected: %s", i, got.status, got.out, bad[i].says);
    }
    free(bad_path);
    temp_remove(dir);
    int wrong[][4] = {{1, 4, 8, 1}, {2, 2, 6, 1}, {2, 2, 8, 33}, {2, 2, 2048, 1}}, right[] = {2, 2, 8, 1};
    for (int i = 0; i < 4; i++) assert_int_equal(child_call(check_bad, wrong[i]).status, STATUS_USAGE);
    assert_int_equal(child_call(check_bad, right).status, STATUS_OK);
}

static int open_dev(void **state) {
    (void)state;
    dev = dev_init((DevOptions){.threads = 1});
    return 0;
}
static int close_dev(void **state) {
    (void)state;
    dev_free(dev);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_flow),    cmocka_unit_test(test_random),  cmocka_unit_test(test_oracle_sees), cmocka_unit_test(test_block),
        cmocka_unit_test(test_threads), cmocka_unit_test(test_moves),   cmocka_unit_test(test_example),     cmocka_unit_test(test_without),
        cmocka_unit_test(test_free_inside), cmocka_unit_test(test_rates), cmocka_unit_test(test_bad_files),
    };
    return cmocka_run_group_tests(tests, open_dev, close_dev);
}
