// The MoE layer by itself, against a naive oracle in double: uneven and empty ranks, all tokens to one expert, experts without
// tokens, capacity, shared expert, both scores; outputs, input gradients and parameter gradients (by finite differences).
#include "kernels/check.h"
#include "kernels/rng.h"
#include "moe/moe.h"
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { C = 12, F = 7, MAX_T = 9, MAX_R = 8, MAX_E = 16 };

typedef struct Case {
    const char *name;
    int R, N, E, K, S, shared;
    Policy policy;
    RouterScore score;
    int renorm;
    double capacity, aux, z;
    int tokens[MAX_R];
    double push; // added to expert 0's and 1's logits through channel 0, in which x is 1
    int even;
} Case;

static const Case cases[] = {
    {"one rank", 1, 1, 4, 2, 0, 0, POLICY_NONE, ROUTER_SOFTMAX, 1, 0, 0.3, 0.1, {9}, 0, 0},
    {"no token", 2, 1, 4, 2, 1, 0, POLICY_TOPOEP, ROUTER_SOFTMAX, 1, 0, 0.3, 0.1, {0, 0}, 0, 0},
    {"one token", 4, 2, 4, 2, 1, 0, POLICY_TOPOEP, ROUTER_SOFTMAX, 1, 0, 0.3, 0.1, {0, 0, 1, 0}, 0, 0},
    {"empty ranks", 4, 2, 8, 2, 2, 5, POLICY_TOPOEP, ROUTER_SOFTMAX, 1, 0, 0.3, 0.1, {9, 0, 3, 0}, 0, 0},
    {"all to two experts", 4, 2, 8, 2, 2, 0, POLICY_TOPOEP, ROUTER_SOFTMAX, 1, 0, 0.3, 0.1, {9, 9, 9, 9}, 40, 0},
    {"all to two, by home", 4, 4, 8, 2, 2, 0, POLICY_NONE, ROUTER_SOFTMAX, 1, 0, 0.3, 0.1, {9, 5, 9, 2}, 40, 0},
    {"one expert per token", 3, 3, 6, 1, 1, 4, POLICY_TOPOEP, ROUTER_SOFTMAX, 0, 0, 0.3, 0.1, {9, 4, 7}, 3, 0},
    {"every expert", 2, 2, 4, 4, 2, 0, POLICY_TOPOEP, ROUTER_SOFTMAX, 1, 0, 0.3, 0.1, {9, 8}, 0, 0},
    {"sigmoid", 8, 4, 16, 3, 2, 5, POLICY_TOPOEP, ROUTER_SIGMOID, 1, 0, 0.3, 0.1, {9, 1, 2, 9, 0, 9, 3, 9}, 2, 0},
    {"sigmoid raw", 4, 1, 8, 3, 3, 0, POLICY_TOPOEP, ROUTER_SIGMOID, 0, 0, 0.3, 0.1, {9, 1, 2, 9}, 2, 0},
    {"capacity", 4, 2, 8, 2, 1, 3, POLICY_TOPOEP, ROUTER_SOFTMAX, 1, 0.6, 0.3, 0.1, {9, 9, 4, 9}, 2, 0},
    {"capacity that never binds", 4, 2, 8, 2, 1, 3, POLICY_TOPOEP, ROUTER_SOFTMAX, 1, 1000, 0.3, 0.1, {9, 9, 4, 9}, 2, 0},
    {"many pairs at home", 8, 2, 16, 6, 0, 0, POLICY_NONE, ROUTER_SOFTMAX, 1, 0, 0.3, 0.1, {9, 1, 2, 9, 0, 9, 3, 9}, 2, 0},
    {"even choice", 4, 2, 8, 3, 0, 5, POLICY_NONE, ROUTER_SIGMOID, 1, 0, 0.3, 0.1, {9, 9, 4, 9}, 2, 1},
};

static double value(const char *what, int64_t i) { return rng_normal(5, rng_name(what), (uint64_t)i); }

// ---- oracle: parameters and inputs in double, everything in plain loops ------------------------------------------------
typedef struct World {
    const Case *c;
    double router[MAX_E * C], experts[MAX_E * 3 * F * C], shared[3 * 8 * C], x[MAX_R][MAX_T * C], dy[MAX_R][MAX_T * C];
    int idx[MAX_R][MAX_T * MAX_E]; // the choice, -1 = dropped; made once, held while differences are taken
    double f[MAX_R][MAX_E];        // likewise (one sequence per rank: sequence scope)
} World;

static void scores(const World *w, int r, int t, double *logit, double *score, double *prob) {
    const Case *c = w->c;
    double most = -INFINITY, sum = 0;
    for (int e = 0; e < c->E; e++) {
        logit[e] = 0;
        for (int i = 0; i < C; i++) logit[e] += w->router[e * C + i] * w->x[r][t * C + i];
        most = fmax(most, logit[e]);
    }
    for (int e = 0; e < c->E; e++) score[e] = c->score == ROUTER_SIGMOID ? 1 / (1 + exp(-logit[e])) : exp(logit[e] - most), sum += score[e];
    for (int e = 0; e < c->E; e++) {
        prob[e] = score[e] / sum;
        if (c->score == ROUTER_SOFTMAX) score[e] = prob[e];
    }
}

static void choose(World *w) {
    const Case *c = w->c;
    double logit[MAX_E], score[MAX_E], prob[MAX_E];
    for (int r = 0; r < c->R; r++) {
        int n = c->tokens[r], count[MAX_E] = {0}, cap = c->capacity > 0 ? (int)fmin(ceil(c->capacity * n * c->K / c->E), 1e6) : 1 << 30;
        memset(w->f[r], 0, sizeof w->f[r]);
        for (int t = 0; t < n; t++) {
            scores(w, r, t, logit, score, prob);
            int taken[MAX_E] = {0};
            for (int k = 0; k < c->K; k++) {
                int best = -1;
                for (int e = 0; e < c->E; e++)
                    if (!taken[e] && (best < 0 || score[e] > score[best])) best = e;
                if (c->even) best = (r * MAX_T + t + k * (c->E / c->K)) % c->E;
                taken[best] = 1;
                w->f[r][best] += 1.0 / (n * c->K);
                w->idx[r][t * MAX_E + k] = best | (count[best]++ >= cap ? 1 << 20 : 0);
            }
        }
    }
}

static void ffn(double *y, const double *x, const double *w, int width, double scale) {
    for (int f = 0; f < width; f++) {
        double g = 0, u = 0;
        for (int i = 0; i < C; i++) g += w[f * C + i] * x[i], u += w[(width + f) * C + i] * x[i];
        double h = scale * g / (1 + exp(-g)) * u;
        for (int i = 0; i < C; i++) y[i] += w[2 * width * C + i * width + f] * h;
    }
}

// y of one token, without the residual
static void token(const World *w, int r, int t, double *y) {
    const Case *c = w->c;
    double logit[MAX_E], score[MAX_E], prob[MAX_E], sum = 0;
    memset(y, 0, C * sizeof(double));
    scores(w, r, t, logit, score, prob);
    for (int k = 0; k < c->K; k++) sum += score[w->idx[r][t * MAX_E + k] & 0xfffff];
    for (int k = 0; k < c->K; k++) {
        int e = w->idx[r][t * MAX_E + k];
        if (e >> 20) continue;
        ffn(y, &w->x[r][t * C], &w->experts[e * 3 * F * C], F, 1.5 * (c->renorm ? score[e] / sum : score[e]));
    }
    if (c->shared) ffn(y, &w->x[r][t * C], w->shared, c->shared, 1);
}

// sum dy.y plus both losses with a token's weights aux and z
static double objective(const World *w) {
    const Case *c = w->c;
    double total = 0, y[C], logit[MAX_E], score[MAX_E], prob[MAX_E];
    for (int r = 0; r < c->R; r++)
        for (int t = 0; t < c->tokens[r]; t++) {
            token(w, r, t, y);
            for (int i = 0; i < C; i++) total += w->dy[r][t * C + i] * y[i];
            scores(w, r, t, logit, score, prob);
            double most = -INFINITY, sum = 0;
            for (int e = 0; e < c->E; e++) total += c->aux * c->E * w->f[r][e] * prob[e], most = fmax(most, logit[e]);
            for (int e = 0; e < c->E; e++) sum += exp(logit[e] - most);
            total += c->z * (most + log(sum)) * (most + log(sum));
        }
    return total;
}

// Five-point: error h^4/30 of the fifth derivative, rounding 1e-16 of the objective over h.
static double difference_quotient(World *w, double *x) {
    static const double step[4] = {-2, -1, 1, 2}, factor[4] = {1.0 / 12, -2.0 / 3, 2.0 / 3, -1.0 / 12};
    double h = 1e-3, keep = *x, sum = 0;
    for (int i = 0; i < 4; i++) *x = keep + h * step[i], sum += factor[i] * objective(w);
    *x = keep;
    return sum / h;
}

static World *make_world(const Case *c) {
    World *w = host_alloc(sizeof *w);
    w->c = c;
    for (int i = 0; i < c->E * C; i++) w->router[i] = (float)(value("router", i) + (i % C == 0 && i / C < 2 ? c->push : 0));
    for (int i = 0; i < c->E * 3 * F * C; i++) w->experts[i] = (float)(0.5 * value("experts", i));
    for (int i = 0; i < 3 * c->shared * C; i++) w->shared[i] = (float)(0.5 * value("shared", i));
    for (int r = 0; r < c->R; r++)
        for (int i = 0; i < MAX_T * C; i++) {
            w->x[r][i] = i % C == 0 ? 1 : (float)value("x", r * 1000 + i);
            w->dy[r][i] = (float)value("dy", r * 1000 + i);
        }
    choose(w);
    return w;
}

// ---- the layer -----------------------------------------------------------------------------------------------------------
typedef struct Job {
    World *w;
    double worst, bound;
    double inject; // added to one output, to see the comparison fail
    int dedup, slicing;
} Job;

static void upload(Dev *d, real *to, const double *from, int n) {
    real *host = host_alloc(n * sizeof(real) + 1);
    for (int i = 0; i < n; i++) host[i] = (real)from[i];
    dev_upload(d, to, host, n * sizeof(real));
    free(host);
}

// Worst difference of n values from `want`, as a share of the bound's scale
static double differ(Dev *d, const wide *got, const double *want, int n, double scale) {
    wide *host = host_alloc(n * sizeof(wide) + 1);
    double worst = 0;
    dev_download(d, host, got, n * sizeof(wide));
    for (int i = 0; i < n; i++) worst = isnan(host[i]) ? INFINITY : fmax(worst, fabs(host[i] - want[i]) / scale);
    free(host);
    return worst;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void report(Job *job, double worst) {
    pthread_mutex_lock(&lock);
    if (worst > job->worst) job->worst = worst;
    pthread_mutex_unlock(&lock);
}

static void check_gradients(Job *job, Dev *d, const MoeParams *p, int me, const real *dx, Comm *ep) {
    World *w = job->w;
    const Case *c = w->c;
    int H = c->E / c->R, n = c->tokens[me];
    double *want = host_alloc(MAX_E * 3 * F * C * sizeof(double));
    comm_sum(ep, p->d_router, SIZE(c->E, C));
    if (c->shared) comm_sum(ep, p->d_shared, SIZE(3, c->shared, C));
    for (int turn = 0; turn < c->R; turn++) { // one at a time: the oracle's values are moved while differences are taken
        comm_barrier(ep);
        if (turn != me) continue;
        for (int i = 0; i < n * C; i++) want[i] = difference_quotient(w, &w->x[me][i]);
        report(job, differ(d, dx, want, n * C, 50));
        for (int i = 0; i < H * 3 * F * C; i++) want[i] = difference_quotient(w, &w->experts[me * H * 3 * F * C + i]);
        report(job, differ(d, p->d_experts, want, H * 3 * F * C, 50));
        if (me > 0) continue;
        for (int i = 0; i < c->E * C; i++) want[i] = difference_quotient(w, &w->router[i]);
        report(job, differ(d, p->d_router, want, c->E * C, 50));
        for (int i = 0; i < 3 * c->shared * C; i++) want[i] = difference_quotient(w, &w->shared[i]);
        if (c->shared) report(job, differ(d, p->d_shared, want, 3 * c->shared * C, 50));
    }
    comm_barrier(ep);
    free(want);
}

// Bytes that pass between nodes in one forward and backward without copies, from the oracle's choice and the experts' homes.
static int64_t bytes_between_nodes(const World *w, int dedup) {
    const Case *c = w->c;
    int G = c->R / c->N, H = c->E / c->R;
    int64_t tokens = 0, pairs = 0;
    for (int r = 0; r < c->R; r++)
        for (int t = 0; t < c->tokens[r]; t++) {
            int to[MAX_R] = {0};
            for (int k = 0; k < c->K; k++) {
                int e = w->idx[r][t * MAX_E + k], node = (e & 0xfffff) / H / G;
                if (e >> 20 || node == r / G) continue;
                pairs++, tokens += !to[node]++;
            }
        }
    int64_t row = 4 * C * (int64_t)sizeof(real), pair = 2 * (int64_t)sizeof(wide) + 8; // weight, its gradient, rank, row
    return dedup ? tokens * (row + c->K * pair) : pairs * (row + pair);
}

// What the wire saw is what the statistics say, and where no copies disturb, what the oracle says.
static void check_bytes(Job *job, Comm *world, const MoeStats *s, const PlanInfo *plan) {
    const Case *c = job->w->c;
    int64_t wire = (int64_t)comm_bytes_sent(world), expert = 3 * F * C * (int64_t)(2 * sizeof(real) + sizeof(wide));
    comm_sum_int64(world, &wire, 1);
    if (wire != s->bytes_inter + plan->inter_copies * expert) report(job, INFINITY);
    if (c->policy == POLICY_NONE && wire != bytes_between_nodes(job->w, job->dedup)) report(job, INFINITY);
}

static void body(Comm *world, void *arg) {
    Job *job = arg;
    World *w = job->w;
    const Case *c = w->c;
    Dev *d = dev_init((DevOptions){.threads = 1, .poison = 1, .shared = 1});
    comm_bind(world, d);
    const CommInfo *info = comm_info(world);
    int me = info->rank, H = c->E / c->R, n = c->tokens[me], unit = 3 * F * C;
    real *router = dev_alloc(d, SIZE(c->E, C, sizeof(real)), "t"), *shared = dev_alloc(d, SIZE(3, 8, C, sizeof(real)), "t");
    wide *grads = dev_alloc(d, SIZE(c->E * C + H * unit + 3 * 8 * C, sizeof(wide)), "t");
    dev_zero(d, grads, SIZE(c->E * C + H * unit + 3 * 8 * C, sizeof(wide)));
    void **experts = comm_window(world, SIZE(H, unit, sizeof(real)), "t");
    upload(d, router, w->router, c->E * C);
    upload(d, shared, w->shared, 3 * c->shared * C);
    upload(d, experts[me], w->experts + me * H * unit, H * unit);
    MoeParams p = {.router = router, .experts = (real *const *)experts, .shared = shared, .d_router = grads, .d_experts = grads + c->E * C,
                   .d_shared = grads + c->E * C + H * unit};
    MoeConfig config = {.C = C, .E = c->E, .K = c->K, .F = F, .shared = c->shared, .score = c->score, .renorm = c->renorm, .routed_scale = 1.5,
                        .capacity = c->capacity, .layers = 1, .max_BT = MAX_T, .micros = 1, .training = 1, .scope = AUX_SEQ, .S = c->S,
                        .cost = {.N = info->N, .G = info->G, .S = c->S, .pair_compute_ps = 1000000, .pair_inter_ps = 300000, .pair_intra_ps = 100000,
                                 .copy_inter_ps = 100, .copy_intra_ps = 10},
                        .plan = {.policy = c->policy, .block = 1, .without = job->slicing ? 0 : PLAN_NO_SLICING},
                        .dedup = job->dedup, .even = c->even};
    Moe *m = moe_init(d, world, world, config, &p);
    comm_barrier(world);
    real *x = dev_alloc(d, SIZE(MAX_T, C, sizeof(real)), "t"), *y = dev_alloc(d, SIZE(MAX_T, C, sizeof(real)), "t");
    real *dx = dev_alloc(d, SIZE(MAX_T, C, sizeof(real)), "t"), *dy = dev_alloc(d, SIZE(MAX_T, C, sizeof(real)), "t");
    upload(d, x, w->x[me], n * C);
    upload(d, dy, w->dy[me], n * C);
    MoePass pass = {.aux_scale = c->aux, .z_scale = c->z, .count = 1};
    int B = n > 0; // a rank without tokens has no sequence
    moe_forward(m, 0, y, NULL, x, B, n, pass);
    double *want = host_alloc(MAX_T * C * sizeof(double));
    for (int t = 0; t < n; t++) token(w, me, t, want + t * C);
    if (n) want[C / 2] += job->inject;
    report(job, differ(d, y, want, n * C, 20));
    moe_backward(m, 0, dx, dy, x, B, n, pass);
    check_gradients(job, d, &p, me, dx, world);
    MoeStats s;
    moe_stats(m, &s);
    moe_check_hashes(m);
    PlanInfo plan;
    int *D = host_alloc(SIZE(c->R, c->E, sizeof(int)));
    moe_demand(m, 0, 0, D, &plan, (int64_t[2]){0});
    check_bytes(job, world, &s, &plan);
    free(D);
    int64_t tokens = 0, kept = s.pairs_self + s.pairs_node + s.pairs_inter;
    for (int r = 0; r < c->R; r++) tokens += c->tokens[r];
    if (kept + s.dropped != tokens * c->K || (s.dropped > 0) != (c->capacity == 0.6)) report(job, INFINITY);
    if (s.rank_after > s.rank_before + 1e-12 && c->policy == POLICY_NONE) report(job, INFINITY);
    free(want);
    moe_free(m);
    dev_free(d);
}

// fp32: chains of C, F and C additions, for parameters also over the tokens, each rounding by half an ulp of values of the size
// that differences are measured against (20 for outputs, 50 for gradients). double: the finite differences' own error decides.
static double bound(void) { return sizeof(real) == 8 ? 1e-9 : (2 * C + F + 4 * MAX_T) * 0.5 * 1.2e-7; }

static double run_case(const Case *c, int dedup, int slicing, double inject) {
    World *w = make_world(c);
    Job job = {.w = w, .inject = inject, .dedup = dedup, .slicing = slicing};
    int argc = 1;
    char *name[] = {"test_moe", NULL}, **argv = name;
    comm_run(&argc, &argv, c->R, c->N, body, &job);
    free(w);
    return job.worst;
}

static void test_layer(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int how = 0; how < (cases[i].N > 1 ? 2 : 1); how++) {
            double worst = run_case(&cases[i], !how, (int)i & 1, 0);
            if (!(worst <= bound())) fail_msg("%s, dedup %d: off by %g, bound %g", cases[i].name, !how, worst, bound());
        }
    }
}

static void test_bound_can_fail(void **state) {
    (void)state;
    assert_true(run_case(&cases[0], 1, 1, 10 * bound() * 20) > bound());
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_layer), cmocka_unit_test(test_bound_can_fail)};
    return cmocka_run_group_tests_name("moe", tests, NULL, NULL);
}
