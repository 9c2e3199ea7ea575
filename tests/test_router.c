// From logits to experts and weights and back, against a naive oracle, finite differences of the whole loss, and hand-made
// cases: ties, bias, NaN, underflow. Bounds count roundings; sums over E or K run in plain order, a chain of E or K.
#include "kernels/check.h"
#include "tests/common/child.h"
#include "tests/common/lab.h"
#include "tests/ref/router_ref.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#define RUN(body, table) lab_threads(body, table, sizeof(table) / sizeof((table)[0]))
enum { SIGMOID = 1, RENORM = 2, BIAS = 4, AUX = 8, Z = 16, GROUPS = 32 }; // dim[3]

typedef struct Case { // host and device side of one router
    int BT, E, K, flags;
    RefRouter ref;
    RouterShape shape;
    double *logits, *bias;
    wide *dev_logits, *dev_bias, *weight, *prob, *lse;
    int *idx, *bad;
} Case;

static Case make(Lab *l, const int *dim, double spread) {
    Case c = {.BT = dim[0], .E = dim[1], .K = dim[2], .flags = dim[3]};
    int zero = 0;
    c.ref = (RefRouter){c.E, c.K, !!(c.flags & SIGMOID), !!(c.flags & RENORM), c.flags & SIGMOID ? 2.5 : 1};
    c.shape = (RouterShape){c.BT, c.E, c.K, c.ref.sigmoid ? ROUTER_SIGMOID : ROUTER_SOFTMAX, c.ref.renorm, c.ref.scale, 0, 0};
    c.logits = lab_random(l, SIZE(c.BT, c.E), -spread, spread);
    c.bias = c.flags & BIAS ? lab_random(l, c.E, -0.3, 0.3) : NULL;
    c.dev_logits = lab_wide(l, c.logits, SIZE(c.BT, c.E));
    c.dev_bias = c.bias ? lab_wide(l, c.bias, c.E) : NULL;
    c.weight = lab_wide(l, NULL, SIZE(c.BT, c.K));
    c.prob = lab_wide(l, NULL, SIZE(c.BT, c.E));
    c.lse = lab_wide(l, NULL, c.BT);
    c.idx = lab_int(l, NULL, SIZE(c.BT, c.K));
    c.bad = lab_int(l, &zero, 1);
    return c;
}

static void run_route(Lab *l, const Case *c) {
    dev_route(l->d, c->idx, c->weight, c->prob, c->lse, c->bad, c->dev_logits, c->dev_bias, c->shape);
}

// ---- forward -----------------------------------------------------------------------------------------------------------
static void route(Lab *l, const int *dim) {
    Case c = make(l, dim, 3);
    run_route(l, &c);
    int E = c.E, K = c.K, *idx = lab_get_int(l, c.idx, SIZE(c.BT, K)), none = 0;
    double *weight = lab_get_wide(l, c.weight, SIZE(c.BT, K)), *prob = lab_get_wide(l, c.prob, SIZE(c.BT, E));
    double *lse = lab_get_wide(l, c.lse, c.BT), *score = lab_zeros(l, E), *want = lab_zeros(l, E), *key = lab_zeros(l, E);
    double *bound = lab_zeros(l, E), *want_w = lab_zeros(l, K), rel = REAL_EPS * (E + 12);
    lab_equal_int("bad", lab_get_int(l, c.bad, 1), &none, 1);
    for (int t = 0; t < c.BT; t++) {
        const int *chosen = idx + t * K;
        double want_lse = ref_scores(score, want, c.logits + t * E, c.ref), bound_lse = rel * (1 + fabs(want_lse));
        lab_close_to("lse", &lse[t], &want_lse, &bound_lse, 1);
        for (int e = 0; e < E; e++) bound[e] = rel * (c.ref.sigmoid ? 2 : 1) * want[e];
        lab_close_to("prob", prob + t * E, want, bound, E);
        // The k-th chosen has the k-th largest biased score, and none comes twice: near-ties may fall either way.
        ref_sorted(key, score, c.bias, E);
        for (int k = 0; k < K; k++) {
            assert_in_range(chosen[k], 0, E - 1);
            for (int j = 0; j < k; j++) assert_int_not_equal(chosen[j], chosen[k]);
            double got = score[chosen[k]] + (c.bias ? c.bias[chosen[k]] : 0), b = rel * (score[chosen[k]] + fabs(key[k]));
            lab_close_to("chosen score", &got, &key[k], &b, 1);
        }
        ref_weights(want_w, score, chosen, c.ref);
        for (int k = 0; k < K; k++) bound[k] = rel * 2 * want_w[k];
        lab_close_to("weight", weight + t * K, want_w, bound, K);
    }
}

static void test_route(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {
        {0, 4, 2, 0}, {1, 1, 1, 0}, {5, 1, 1, SIGMOID}, {7, 3, 3, RENORM}, {8, 4, 2, RENORM | BIAS},
        {9, 5, 1, SIGMOID | BIAS}, {33, 17, 4, SIGMOID | RENORM | BIAS}, {300, 64, 8, RENORM},
        {301, 60, 6, SIGMOID | RENORM}, {40, 257, 8, BIAS}, {3, 16, 16, 0}};
    RUN(route, dims);
}

// Logits of three values only: nearly every choice is between equals.
static void ties(Lab *l, const int *dim) {
    Case c = make(l, dim, 1);
    size_t n = SIZE(c.BT, c.E);
    int *level = lab_ints(l, n, 3), *want = lab_filled(l, SIZE(c.BT, c.K), -1);
    for (size_t i = 0; i < n; i++) c.logits[i] = level[i];
    for (int e = 0; c.bias && e < c.E; e++) c.bias[e] = 0.25; // so that a bias that is added also keeps the ties
    c.dev_logits = lab_wide(l, c.logits, n);
    c.dev_bias = c.bias ? lab_wide(l, c.bias, c.E) : NULL;
    run_route(l, &c);
    for (int t = 0; t < c.BT; t++) ref_choose(want + t * c.K, c.logits + t * c.E, c.E, c.K);
    lab_equal_int("choice among equals", lab_get_int(l, c.idx, SIZE(c.BT, c.K)), want, SIZE(c.BT, c.K));
}

static void test_ties(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{9, 4, 2, 0},    {20, 8, 3, SIGMOID},        {20, 17, 17, BIAS},
                                         {40, 64, 8, BIAS}, {20, 61, 8, SIGMOID | BIAS}, {20, 256, 8, 0}};
    RUN(ties, dims);
}

typedef struct Hand {
    const char *what;
    double logits[4], bias[4];
    int flags, idx[2];
    double weight[2];
} Hand;

static void test_choice_by_hand(void **state) {
    (void)state;
    double s1 = 1 / (1 + exp(-1)), s2 = 1 / (1 + exp(-2)), sum = 3 + exp(10);
    const Hand cases[] = {
        {"all equal: the lowest indices", {0, 0, 0, 0}, {0}, 0, {0, 1}, {0.25, 0.25}},
        {"tie for the second place", {0, 2, 1, 1}, {0}, SIGMOID, {1, 2}, {s2, s1}},
        {"tie for the first place", {1, 2, 1, 2}, {0}, SIGMOID, {1, 3}, {s2, s2}},
        {"the bias chooses, the raw score weighs", {0, 1, 2, 1}, {5, 0, 0, 0}, SIGMOID | BIAS, {0, 2}, {0.5, s2}},
        {"normalised", {0, 1, 2, 1}, {5, 0, 0, 0}, SIGMOID | BIAS | RENORM, {0, 2}, {0.5 / (0.5 + s2), s2 / (0.5 + s2)}},
        {"a bias makes a tie", {2, 0, 0, 2}, {0, 0.5, 0.5, -1}, SIGMOID | BIAS, {1, 2}, {0.5, 0.5}},
        {"one softmax, not two", {10, 0, 0, 0}, {0}, 0, {0, 1}, {exp(10) / sum, 1 / sum}},
        {"negative biased scores", {-1, -1, -1, 1}, {-9, -8, -7, -9}, SIGMOID | BIAS, {2, 1}, {1 - s1, 1 - s1}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Lab *l = lab_open(1);
        Case c = make(l, (int[]){1, 4, 2, cases[i].flags}, 1);
        c.shape.scale = 1;
        c.dev_logits = lab_wide(l, cases[i].logits, 4);
        c.dev_bias = cases[i].flags & BIAS ? lab_wide(l, cases[i].bias, 4) : NULL;
        run_route(l, &c);
        double bound[2] = {12 * REAL_EPS * cases[i].weight[0], 12 * REAL_EPS * cases[i].weight[1]};
        lab_equal_int(cases[i].what, lab_get_int(l, c.idx, 2), cases[i].idx, 2);
        lab_close_to(cases[i].what, lab_get_wide(l, c.weight, 2), cases[i].weight, bound, 2);
        lab_close(l);
    }
}

// Logits so far apart or so low that every score that matters underflows: finite all the same
static void test_underflow(void **state) {
    (void)state;
    for (int flags = RENORM | BIAS; flags <= (RENORM | BIAS | SIGMOID); flags++) {
        Lab *l = lab_open(1);
        Case c = make(l, (int[]){2, 4, 2, flags}, 1);
        double logits[8] = {-1e4, -2e4, -1e4, -3e4, 2e4, -2e4, -2e4, -2e4}, bias[4] = {-9, 0, 0, 0};
        double dweight[4] = {1, -1, 1, 1}, f[4] = {1, 2, 3, 4};
        c.dev_logits = lab_wide(l, logits, 8);
        c.dev_bias = lab_wide(l, bias, 4);
        run_route(l, &c);
        wide *dx = lab_wide(l, NULL, 8);
        dev_route_bwd(l->d, dx, lab_wide(l, dweight, 4), c.idx, c.prob, c.lse, c.dev_logits, lab_wide(l, f, 4), 1, 1, (wide)1e-3,
                      c.shape);
        double *got[4] = {lab_get_wide(l, c.weight, 4), lab_get_wide(l, c.prob, 4), lab_get_wide(l, c.lse, 2),
                          lab_get_wide(l, dx, 8)};
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < (int[]){4, 4, 2, 8}[i]; j++) assert_true(isfinite(got[i][j]));
        assert_true(fabs(got[2][0] + 1e4 - log(2)) < 0.01 && got[2][1] == 2e4);
        assert_int_equal(lab_get_int(l, c.bad, 1)[0], 0);
        lab_close(l);
    }
}

// ---- faulty scores -----------------------------------------------------------------------------------------------------
static void faulty(Lab *l, const int *dim) {
    Case c = make(l, dim, 1);
    int E = c.E, K = c.K, want_bad = 4, two = 2;
    c.logits[3 * E] = NAN;
    c.logits[5 * E + E - 1] = INFINITY;
    c.logits[7 * E + 1] = -INFINITY;
    c.dev_logits = lab_wide(l, c.logits, SIZE(c.BT, E));
    run_route(l, &c);
    lab_equal_int("bad", lab_get_int(l, c.bad, 1), &want_bad, 1);
    wide *dx = lab_wide(l, NULL, SIZE(c.BT, E));
    double *dw = lab_random(l, SIZE(c.BT, K), -1, 1), *prob = lab_get_wide(l, c.prob, SIZE(c.BT, E));
    dev_route_bwd(l->d, dx, lab_wide(l, dw, SIZE(c.BT, K)), c.idx, c.prob, c.lse, c.dev_logits, NULL, 1, 0, (wide)0.1, c.shape);
    double *weight = lab_get_wide(l, c.weight, SIZE(c.BT, K)), *got_dx = lab_get_wide(l, dx, SIZE(c.BT, E));
    int *idx = lab_get_int(l, c.idx, SIZE(c.BT, K));
    for (int t = 0; t < c.BT; t++) {
        int is_bad = t == 3 || t == 5 || t == 7;
        for (int k = 0; k < K; k++) {
            assert_in_range(idx[t * K + k], 0, E - 1);
            assert_true(is_bad ? idx[t * K + k] == k && weight[t * K + k] == 0 : weight[t * K + k] > 0);
        }
        for (int i = t * E; i < (t + 1) * E; i++)
            assert_true(is_bad ? prob[i] == 0 && got_dx[i] == 0 : prob[i] > 0 && isfinite(got_dx[i]));
    }
    c.bad = lab_int(l, &two, 1); // an earlier call's finding stays
    run_route(l, &c);
    lab_equal_int("bad of before", lab_get_int(l, c.bad, 1), &two, 1);
}

static void faulty_bias(Lab *l, const int *dim) {
    Case c = make(l, dim, 1);
    c.bias[1] = NAN;
    c.dev_bias = lab_wide(l, c.bias, c.E);
    run_route(l, &c);
    int one = 1, *idx = lab_get_int(l, c.idx, SIZE(c.BT, c.K));
    lab_equal_int("bad", lab_get_int(l, c.bad, 1), &one, 1);
    for (int p = 0; p < c.BT * c.K; p++) assert_int_equal(idx[p], p % c.K);
}

static void test_faulty_scores(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{8, 4, 2, 0}, {300, 16, 4, SIGMOID | RENORM}, {9, 2, 2, RENORM}};
    RUN(faulty, dims);
    static const int bias[][LAB_DIMS] = {{8, 4, 2, BIAS}, {200, 16, 4, SIGMOID | BIAS}};
    RUN(faulty_bias, bias);
}

static void more_than_all(void *arg) {
    Lab *l = lab_open(1);
    Case c = make(l, arg, 1);
    run_route(l, &c);
}
static void uneven_groups(void *arg) {
    Lab *l = lab_open(1);
    Case c = make(l, arg, 1);
    dev_balance(l->d, c.weight, c.prob, c.idx, c.prob, c.BT, c.E, c.K, 2);
}

static void test_refusals(void **state) {
    (void)state;
    assert_int_equal(child_call(more_than_all, (int[]){1, 2, 3, 0}).status, STATUS_USAGE);
    assert_int_equal(child_call(more_than_all, (int[]){1, 2, 0, 0}).status, STATUS_USAGE);
    assert_int_equal(child_call(uneven_groups, (int[]){3, 2, 1, 0}).status, STATUS_USAGE);
}

// ---- backward ----------------------------------------------------------------------------------------------------------
static void route_bwd(Lab *l, const int *dim) {
    Case c = make(l, dim, 3);
    int E = c.E, K = c.K, groups = c.flags & GROUPS ? 3 : 1, *idx;
    double aux = c.flags & AUX ? (wide)0.7 : 0, z = c.flags & Z ? (wide)0.05 : 0, a = c.ref.scale;
    double *dweight = lab_random(l, SIZE(c.BT, K), -1, 1), *f = lab_random(l, SIZE(groups, E), 0, 1);
    wide *dx = lab_wide(l, NULL, SIZE(c.BT, E));
    run_route(l, &c);
    dev_route_bwd(l->d, dx, lab_wide(l, dweight, SIZE(c.BT, K)), c.idx, c.prob, c.lse, c.dev_logits,
                  c.flags & AUX ? lab_wide(l, f, SIZE(groups, E)) : NULL, groups, (wide)aux, (wide)z, c.shape);
    double *got = lab_get_wide(l, dx, SIZE(c.BT, E)), *score = lab_zeros(l, E), *prob = lab_zeros(l, E), *ds = lab_zeros(l, E);
    idx = lab_get_int(l, c.idx, SIZE(c.BT, K));
    for (int t = 0; t < c.BT; t += c.BT / 40 + 1) {
        const double *ft = f + t / (c.BT / groups) * E;
        RefToken tok = {c.logits + t * E, dweight + t * K, c.flags & AUX ? ft : NULL, idx + t * K, aux, z, c.ref};
        double lse = ref_scores(score, prob, tok.logits, c.ref), sum = 1e-20, dot = 0, all = 1e-20, mean = 0;
        for (int k = 0; k < K; k++) sum += score[tok.idx[k]];
        for (int k = 0; k < K; k++) dot += fabs(tok.dweight[k]) * score[tok.idx[k]] / sum;
        for (int e = 0; e < E; e++) all += score[e];
        for (int e = 0; e < E; e++) ds[e] = aux * E * ft[e] * (1 / all + 1 / all); // its own part and the mean's
        for (int k = 0; k < K; k++) {
            double size = fabs(tok.dweight[k]);
            ds[tok.idx[k]] += c.ref.renorm ? a * (size + dot) / sum : a * size;
        }
        for (int e = 0; e < E; e++) mean += ds[e] * score[e];
        for (int e = 0; e < E; e += E / 20 + 1) {
            double want = lab_slope(ref_token_loss, &tok, &tok.logits[e], 1e-3);
            double size = (ds[e] + (c.ref.sigmoid ? 0 : mean)) * score[e] + fabs(2 * z * lse) * exp(tok.logits[e] - lse);
            double bound = REAL_EPS * (E + K + 20) * size + FD_ERR * (fabs(ref_token_loss(&tok)) + size + 1);
            lab_close_to("dlogits", &got[t * E + e], &want, &bound, 1);
        }
    }
}

static void test_route_bwd(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {
        {0, 4, 2, 0}, {1, 1, 1, Z}, {6, 4, 2, 0}, {6, 4, 1, 0}, {6, 4, 2, RENORM}, {6, 4, 2, AUX}, {6, 4, 2, Z},
        {6, 4, 2, SIGMOID}, {6, 5, 3, SIGMOID | RENORM}, {6, 4, 2, SIGMOID | AUX}, {6, 4, 2, SIGMOID | Z},
        {9, 7, 3, AUX | Z | RENORM | BIAS | GROUPS}, {9, 7, 3, AUX | Z | RENORM | BIAS | SIGMOID | GROUPS},
        {300, 64, 8, AUX | Z | RENORM | GROUPS}, {240, 60, 6, AUX | Z | RENORM | BIAS | SIGMOID | GROUPS},
        {4, 300, 8, AUX | BIAS}};
    RUN(route_bwd, dims);
}

// With one expert chosen and normalised, the weight is 1 whatever the logits are; without, the router learns.
static void test_one_expert(void **state) {
    (void)state;
    for (int renorm = 0; renorm < 2; renorm++) {
        Lab *l = lab_open(1);
        Case c = make(l, (int[]){5, 4, 1, renorm ? RENORM : 0}, 2);
        double *one = lab_random(l, 5, 1, 1), largest = 0;
        wide *dx = lab_wide(l, NULL, 20);
        run_route(l, &c);
        dev_route_bwd(l->d, dx, lab_wide(l, one, 5), c.idx, c.prob, c.lse, c.dev_logits, NULL, 1, 0, 0, c.shape);
        double *got = lab_get_wide(l, dx, 20);
        for (int i = 0; i < 20; i++) largest = fmax(largest, fabs(got[i]));
        assert_true(renorm ? largest < 8 * REAL_EPS : largest > 0.05);
        lab_close(l);
    }
}

// ---- counts ------------------------------------------------------------------------------------------------------------
static void balance(Lab *l, const int *dim) {
    int BT = dim[0], E = dim[1], K = dim[2], groups = dim[3], tokens = BT / groups;
    size_t n = SIZE(groups, E);
    int *idx = lab_ints(l, SIZE(BT, K), E);
    double *prob = lab_random(l, SIZE(BT, E), 0, 1), *wf = lab_zeros(l, n), *wp = lab_zeros(l, n), *bf = lab_zeros(l, n);
    double *bp = lab_zeros(l, n);
    wide *f = lab_wide(l, NULL, n), *p = lab_wide(l, NULL, n);
    dev_balance(l->d, f, p, lab_int(l, idx, SIZE(BT, K)), lab_wide(l, prob, SIZE(BT, E)), BT, E, K, groups);
    for (int g = 0; g < groups; g++)
        ref_balance(wf + g * E, wp + g * E, idx + g * tokens * K, prob + (size_t)g * tokens * E, tokens, E, K);
    for (size_t i = 0; i < n; i++) {
        bf[i] = REAL_EPS * wf[i];
        bp[i] = (REAL_EPS + DBL_EPSILON * (tokens + 1)) * wp[i]; // summed in double
    }
    lab_close_to("f", lab_get_wide(l, f, n), wf, bf, n);
    lab_close_to("p", lab_get_wide(l, p, n), wp, bp, n);
}

static void test_balance(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{0, 4, 2, 1},   {0, 3, 1, 2},    {1, 1, 1, 1},    {6, 4, 2, 3},
                                         {35, 17, 3, 5}, {400, 64, 8, 4}, {1000, 33, 2, 1}};
    RUN(balance, dims);
}

static void count(Lab *l, const int *dim) {
    int BT = dim[0], E = dim[1], K = dim[2], pairs = BT * K;
    int *idx = lab_ints(l, pairs, E), *want = lab_filled(l, 2 * E + pairs, 0);
    for (int i = 0; i < pairs / 3; i++) idx[3 * i] = 0; // a favourite
    int *dev_count = lab_int(l, NULL, E), *seen = lab_int(l, NULL, E), *ord = lab_int(l, NULL, pairs);
    dev_route_count(l->d, dev_count, seen, ord, lab_int(l, idx, pairs), BT, E, K, dim[3]);
    ref_count(want, want + E, want + 2 * E, idx, pairs, E, dim[3]);
    lab_equal_int("count", lab_get_int(l, dev_count, E), want, E);
    lab_equal_int("seen", lab_get_int(l, seen, E), want + E, E);
    lab_equal_int("ord", lab_get_int(l, ord, pairs), want + 2 * E, pairs);
}

static void test_count(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{0, 4, 2, 0},  {1, 1, 1, 1},   {8, 4, 2, 0},    {8, 4, 2, 3},
                                         {50, 7, 3, 1}, {200, 64, 8, 0}, {200, 64, 8, 20}};
    RUN(count, dims);
    static const int idx[] = {1, 0, 1, 2, 1, 0}, want_ord[] = {0, 0, 1, 0, -1, 1};
    static const int want_count[] = {2, 2, 1}, want_seen[] = {2, 3, 1};
    Lab *l = lab_open(1);
    int *got[3] = {lab_int(l, NULL, 3), lab_int(l, NULL, 3), lab_int(l, NULL, 6)};
    dev_route_count(l->d, got[0], got[1], got[2], lab_int(l, idx, 6), 3, 3, 2, 2);
    lab_equal_int("count by hand", lab_get_int(l, got[0], 3), want_count, 3);
    lab_equal_int("seen by hand", lab_get_int(l, got[1], 3), want_seen, 3);
    lab_equal_int("ord by hand", lab_get_int(l, got[2], 6), want_ord, 6);
    lab_close(l);
}

static void test_bias_update(void **state) {
    (void)state;
    static const int64_t count[3][4] = {{4, 0, 2, 2}, {1, 1, 1, 2}, {(1ll << 54) + 1, 1ll << 54, 1ll << 54, (1ll << 54) - 1}};
    static const double sign[3][4] = {{-1, 1, 0, 0}, {1, 1, 1, -1}, {-1, 0, 0, 1}};
    for (int i = 0; i < 3; i++) {
        Lab *l = lab_open(1);
        double before[4] = {0.5, 0, -0.25, 0}, want[4], bound[4];
        wide *bias = lab_wide(l, before, 4);
        dev_bias_update(l->d, bias, lab_bytes(l, count[i], sizeof count[i]), lab_wide(l, &(double){1}, 1), 4, 1e-3);
        for (int e = 0; e < 4; e++) {
            want[e] = before[e] + 1e-3 * sign[i][e];
            bound[e] = 2 * REAL_EPS * (fabs(before[e]) + 1e-3);
        }
        lab_close_to("bias", lab_get_wide(l, bias, 4), want, bound, 4);
        lab_close(l);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_route),
        cmocka_unit_test(test_ties),
        cmocka_unit_test(test_choice_by_hand),
        cmocka_unit_test(test_underflow),
        cmocka_unit_test(test_faulty_scores),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_route_bwd),
        cmocka_unit_test(test_one_expert),
        cmocka_unit_test(test_balance),
        cmocka_unit_test(test_count),
        cmocka_unit_test(test_bias_update),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
