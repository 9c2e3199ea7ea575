// How good plans are: against the best ones known, against searches, against exact optima, against balance that can be had.
// build/test_quality --sweep N goes through N more matrices of every kind; --tiny prints the matrices of the exact optima
// (scripts/exact_plans).
#include "kernels/check.h"
#include "kernels/files.h"
#include "tests/common/cases.h"
#include "topoep/search.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static Dev *dev;
#define TOPOEP(...) (PlanOptions){.block = 1, .policy = POLICY_TOPOEP, __VA_ARGS__}

// ---- ratios ---------------------------------------------------------------------------------------------------------------
typedef struct Ratios {
    double x[128];
    int n;
} Ratios;
static int by_value(const void *a, const void *b) { return *(const double *)a < *(const double *)b ? -1 : *(const double *)a > *(const double *)b; }
static double share(Ratios *a, int permille) { // the ratio that so many do not exceed
    qsort(a->x, (size_t)a->n, sizeof *a->x, by_value);
    int at = (a->n * permille + 999) / 1000 - 1;
    return a->x[at < 0 ? 0 : at];
}
static void ratios_print(Ratios *a, const char *what) {
    print_message("%-40s n %d: median %.4f, 90 %% %.4f, 95 %% %.4f, worst %.4f\n", what, a->n, share(a, 500), share(a, 900), share(a, 950), share(a, 1000));
}
static double ratio_add(Ratios *a, Case *c, PlanOptions o, int64_t best) {
    case_solve(dev, c, o);
    double x = best > 0 ? (double)c->info.cost_ps / (double)best : 1;
    assert_true(a->n < 128);
    return a->x[a->n++] = x;
}

// Calls body for each line "NAME = J" of a file in tests/data/plan; returns how many there were
static int each_known(const char *path, void (*body)(const char *name, int64_t best, void *arg), void *arg) {
    FILE *f = fopen(path, "r");
    if (!f) fail_msg("%s is not there (hint: run the tests from the project's root)", path);
    char line[256], name[128];
    int n = 0;
    while (fgets(line, sizeof line, f)) {
        long long best;
        if (line[0] == '#' || sscanf(line, "%127[^=]= %lld", name, &best) != 2) continue;
        for (size_t at = strlen(name); at > 0 && name[at - 1] == ' ';) name[--at] = 0;
        body(name, best, arg), n++;
    }
    fclose(f);
    return n;
}

typedef struct Pair {
    Ratios usual, low;
} Pair;
static void known_one(const char *name, int64_t best, void *arg) {
    Pair *p = arg;
    Case c = strchr(name, ' ') ? case_named(name) : case_read(name);
    double low = ratio_add(&p->low, &c, TOPOEP(.effort = EFFORT_LOW), best), usual = ratio_add(&p->usual, &c, TOPOEP(.effort = EFFORT_DEFAULT), best);
    print_message("%-44s low %.4f, default %.4f of the best known; default: max/mean %.4f, %lld copies\n", name, low, usual,
                  c.info.total ? (double)c.info.max_load * c.R / (double)c.info.total : 0, (long long)c.info.copies);
    case_free(&c);
}
static void test_known(void **state) { // the shared cases
    (void)state;
    Pair p = {0};
    assert_int_equal(each_known("tests/data/plan/best_known.txt", known_one, &p), 24);
    ratios_print(&p.low, "low effort"), ratios_print(&p.usual, "default effort");
    assert_true(share(&p.usual, 500) <= 1.02 && share(&p.usual, 1000) <= 1.15);
    assert_true(share(&p.low, 1000) <= 1.25);
}
static void test_searched(void **state) { // 60 generated matrices, each searched once (build/plan --search is that search)
    (void)state;
    Pair p = {0};
    assert_int_equal(each_known("tests/data/plan/searched.txt", known_one, &p), 60);
    ratios_print(&p.low, "low effort"), ratios_print(&p.usual, "default effort");
    assert_true(share(&p.usual, 500) <= 1.05 && share(&p.usual, 1000) <= 1.15);
    assert_true(share(&p.low, 1000) <= 1.25);
}

// ---- exact optima -----------------------------------------------------------------------------------------------------------
enum { TINY = 100 };
static void tiny_name(char name[64], int k) { // 2 x 2 ranks, 8 experts, 1 slot: cheap copies, and those of a real shape
    static const char *const kinds[] = {"scattered 0.8", "rank 0.7", "node 1.0", "source 1.0", "inject 0.6", "window 0.5", "ragged 0.6", "cold 0.5"};
    static const char *const models[] = {"toy 24", "toy 60", "toy 200", "qwen 16384", "lite1 65536"};
    const char *kind = kinds[k % 8];
    snprintf(name, 64, "%s %d 2x2 8 1 %s", kind, k, models[k / 8 % 5]);
}
static void tiny_print(void) {
    for (int k = 0; k < TINY; k++) {
        char name[64];
        tiny_name(name, k);
        Case c = case_named(name);
        const Cost *a = &c.cost;
        printf("case %s\ncost %d %d %d %lld %lld %lld %lld %lld %lld %lld\n", name, a->N, a->G, a->S, (long long)a->pair_compute_ps, (long long)a->pair_inter_ps,
               (long long)a->pair_intra_ps, (long long)a->copy_inter_ps, (long long)a->copy_intra_ps, (long long)a->overlap_permille, (long long)a->plan_fixed_ps);
        for (int i = 0; i < c.R * c.E; i++) printf("%d%s", c.D[i], i % c.E == c.E - 1 ? "\n" : " ");
        case_free(&c);
    }
}

typedef struct Exact {
    Ratios low, usual, high;
} Exact;
static void exact_one(const char *name, int64_t best, void *arg) {
    Exact *x = arg;
    Case c = case_named(name);
    ratio_add(&x->low, &c, TOPOEP(.effort = EFFORT_LOW), best);
    ratio_add(&x->usual, &c, TOPOEP(.effort = EFFORT_DEFAULT), best);
    double high = ratio_add(&x->high, &c, TOPOEP(.effort = EFFORT_HIGH), best);
    if (high < 1 - 1e-6) fail_msg("%s: %.6f of the optimum", name, high); // an optimum that can be undercut is none
    case_free(&c);
}
static void test_optima(void **state) {
    (void)state;
    Exact x = {0};
    assert_int_equal(each_known("tests/data/plan/optima.txt", exact_one, &x), TINY);
    ratios_print(&x.low, "low effort, of the optimum"), ratios_print(&x.usual, "default effort"), ratios_print(&x.high, "high effort");
    assert_true(share(&x.usual, 950) <= 1.05 && share(&x.usual, 1000) <= 1.15);
    assert_true(share(&x.high, 950) <= 1.02 && share(&x.high, 1000) <= 1.15);
}

// ---- balance ----------------------------------------------------------------------------------------------------------------
static int64_t mean_of(const Case *c) { return (c->info.total + c->R - 1) / c->R; }

// No plan gets below this: what ranks have above M must fit into what the others lack, through at most S experts each
static int64_t slot_bound(const Case *c) {
    int64_t *total = host_alloc(SIZE(c->E, sizeof(int64_t))), *load = host_alloc(SIZE(c->R, sizeof(int64_t))), all = 0, M;
    for (int i = 0; i < c->R * c->E; i++) total[i % c->E] += c->D[i], load[i % c->E / (c->E / c->R)] += c->D[i], all += c->D[i];
    for (M = (all + c->R - 1) / c->R;; M += 1 + M / 500) {
        int64_t over = 0, room = 0;
        for (int r = 0; r < c->R; r++) {
            int64_t through = 0, last = INT64_MAX; // the S largest foreign experts, each with at most M pairs
            for (int i = 0, e = -1; i < c->cost.S; i++, e = -1) {
                for (int k = 0; k < c->E; k++)
                    if (k / (c->E / c->R) != r && total[k] * c->E + k < last && (e < 0 || total[k] * c->E + k > total[e] * c->E + e)) e = k;
                if (e < 0) break;
                last = total[e] * c->E + e, through += total[e] < M ? total[e] : M;
            }
            over += load[r] > M ? load[r] - M : 0;
            if (load[r] < M) room += M - load[r] < through ? M - load[r] : through;
        }
        if (over <= room) break;
    }
    free(total), free(load);
    return M;
}

static void test_balance(void **state) {
    (void)state;
    static const char *const kinds[] = {"scattered 0.8", "rank 0.6", "node 0.8", "source 0.7", "inject 0.5", "window 0.5", "ragged 0.6", "cold 0.5"};
    static const char *const shapes[] = {"4x8 128 2 qwen 65536", "1x8 64 2 glm 32768", "2x4 16 2 toy 192", "4x4 64 2 lite1 16384", "8x2 32 2 qwen 16384"};
    double worst = 0;
    int bound = 0, n = 0;
    for (int k = 0; k < 80; k++) {
        char name[96];
        snprintf(name, sizeof name, "%s %d %s", kinds[k % 8], k, shapes[k % 5]);
        Case c = case_named(name);
        case_solve(dev, &c, TOPOEP(.target = TARGET_BALANCE, .effort = k % 2 ? EFFORT_LOW : EFFORT_DEFAULT));
        double ratio = (double)c.info.max_load * c.R / (double)c.info.total;
        if (slot_bound(&c) * 100 > mean_of(&c) * 102) bound++;
        else if (ratio > worst) worst = ratio;
        if (slot_bound(&c) * 100 <= mean_of(&c) * 102 && c.info.max_load > mean_of(&c)) assert_true(ratio <= 1.02);
        n += c.info.max_load == mean_of(&c);
        case_free(&c);
        if (k % 8 == 0) { // S >= E/R: exactly even
            snprintf(name, sizeof name, "%s %d 4x4 %d %d toy 97", kinds[k / 8 % 8], k, 16 * (1 + k % 3), 1 + k % 3);
            c = case_named(name);
            case_solve(dev, &c, TOPOEP(.target = TARGET_BALANCE));
            assert_int_equal(c.info.max_load, mean_of(&c));
            case_free(&c);
        }
    }
    print_message("balance first, 2 slots: max/mean at most %.4f where the slots allow 1.02 (all but %d of 80); %d exactly even\n", worst, bound, n);
    assert_true(worst <= 1.02 && bound < 20);
}

static void test_even(void **state) { // balanced input is left alone, at any effort
    (void)state;
    for (int effort = EFFORT_DEFAULT; effort <= EFFORT_HIGH; effort++) {
        Case c = case_read("h800-4x8-qwen3-30b.uniform");
        case_solve(dev, &c, TOPOEP(.effort = effort));
        assert_int_equal(c.info.copies, 0);
        case_free(&c);
    }
}

static void test_skewed(void **state) { // least time is close to even loads where copies are cheap beside computing
    (void)state;
    static const char *const kinds[] = {"scattered 0.8", "rank 0.5", "node 0.5", "source 0.7"};
    for (int k = 0; k < 4; k++) {
        double worst = 0, before = 0;
        for (int seed = 0; seed < 4; seed++) {
            char name[64];
            snprintf(name, sizeof name, "%s %d 4x8 128 2 qwen 65536", kinds[k], seed);
            Case c = case_named(name);
            case_solve(dev, &c, TOPOEP(.effort = EFFORT_DEFAULT));
            double after = (double)c.info.max_load * c.R / (double)c.info.total, was = (double)c.info.max_load_before * c.R / (double)c.info.total;
            worst = after > worst ? after : worst, before = was > before ? was : before;
            case_free(&c);
        }
        print_message("%-13s max/mean %.3f -> %.4f (worst of 4)\n", kinds[k], before, worst);
        assert_true(before > 1.2 && worst <= 1.05);
    }
}

static void test_search(void **state) { // repeats, and is never above the solver
    (void)state;
    static const char *const names[] = {"scattered 0.8 1 2x4 16 1 toy 192", "rank 0.7 2 2x2 16 1 toy 64", "source 0.8 3 2x4 32 2 lite 8192"};
    for (int k = 0; k < 3; k++) {
        Case c = case_named(names[k]);
        case_solve(dev, &c, TOPOEP(.effort = EFFORT_HIGH));
        PlanInfo high = c.info, first = {0};
        for (int again = 0; again < 2; again++) {
            search_plan(c.quota, c.slot, &c.info, c.D, c.R, c.E, &c.cost, 5, 500, 0);
            if (again) assert_memory_equal(&first, &c.info, sizeof first);
            first = c.info;
        }
        assert_true(first.cost_ps <= high.cost_ps);
        case_free(&c);
    }
}

// Thousands of matrices: legal, repeated, never above another policy's plan. Ends with the distribution against the best of all
static void sweep(int n) {
    static const char *const kinds[] = {"scattered", "rank", "node", "source", "inject", "window", "ragged", "cold"};
    static const char *const shapes[] = {"1x8 16", "2x2 8", "2x4 32", "4x4 64", "4x8 128", "8x4 64", "16x2 64", "32x2 64", "3x5 45"};
    static const char *const models[] = {"qwen", "qwen1", "lite", "lite1", "glm", "toy"};
    static const int slots[] = {1, 2, 4}, pairs[] = {50, 2000, 30000};
    Draw rng = {17, 0};
    double worst = 0;
    for (int k = 0; k < n; k++) {
        char name[128];
        snprintf(name, sizeof name, "%s %.2f %d %s %d %s %d", kinds[draw(&rng, 8)], 0.2 + draw(&rng, 8) * 0.1, k, shapes[draw(&rng, 9)], slots[draw(&rng, 3)],
                 models[draw(&rng, 6)], pairs[draw(&rng, 3)]);
        Case c = case_named(name);
        case_solve(dev, &c, TOPOEP(.effort = EFFORT_DEFAULT));
        PlanInfo usual = c.info;
        case_solve(dev, &c, TOPOEP(.effort = EFFORT_DEFAULT));
        assert_memory_equal(&usual, &c.info, sizeof usual);
        for (int p = POLICY_EPLB; p < POLICIES; p++) {
            case_solve(dev, &c, (PlanOptions){.policy = p, .block = 1});
            if (usual.cost_ps > c.info.cost_ps) fail_msg("%s: topoep %lld ps, %s %lld", name, (long long)usual.cost_ps, policy_names[p], (long long)c.info.cost_ps);
        }
        case_solve(dev, &c, TOPOEP(.effort = EFFORT_LOW));
        double ratio = usual.cost_ps > 0 ? (double)c.info.cost_ps / (double)usual.cost_ps : 1;
        worst = ratio > worst ? ratio : worst;
        case_free(&c);
    }
    print_message("%d matrices of every kind: none above another policy; low effort at most %.3f of default\n", n, worst);
}
static void test_sweep(void **state) {
    (void)state;
    sweep(150);
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

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "--tiny")) {
        tiny_print();
        return 0;
    }
    if (argc == 3 && !strcmp(argv[1], "--sweep")) {
        open_dev(NULL);
        sweep(atoi(argv[2]));
        close_dev(NULL);
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known), cmocka_unit_test(test_searched), cmocka_unit_test(test_optima), cmocka_unit_test(test_balance),
        cmocka_unit_test(test_even),  cmocka_unit_test(test_skewed),   cmocka_unit_test(test_search), cmocka_unit_test(test_sweep),
    };
    return cmocka_run_group_tests(tests, open_dev, close_dev);
}
