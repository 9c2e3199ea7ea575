// Numbers that must not change with the layout: the same model, data and steps on 1, 2, 3, 4 and 8 ranks, 1, 2 and 4 nodes, with
// and without accumulation, data parallelism, TopoEP and slots give the same losses, norms, gradients and parameters.
// In double to 1e-10; in fp32 to the rounding of its sums (with AdamW loss and norm only: it turns rounding into visible steps).
#include "kernels/check.h"
#include "kernels/rng.h"
#include "train/optimizer.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#ifdef BACKEND_cpu
enum { STEPS = 5, QUICK = 0 };
#else
enum { STEPS = 2, QUICK = 1 }; // emulated, a step takes a hundred times as long
#endif
enum { B = 24, T = 6, MAX_PARAMS = 64 };

// fp32: a gradient is a sum over B*T tokens behind about ten products; each step of a sum may round by half an ulp.
static const double BOUND = sizeof(real) == 8 ? 1e-10 : 10 * 0.5 * B * T * 1.2e-7;

typedef struct Setup {
    int ranks, ep, nodes, micros;
    Policy policy;
    int slots;
    int pairs;         // 1: no dedup
    PlanOptions how;   // switches of the plan
} Setup;
typedef struct More {
    Recompute recompute;
    double capacity;
    int whole;           // 1: every rank keeps the whole state of the optimizer (--zero 0)
} More;

typedef struct Result {
    double loss[STEPS], norm[STEPS], aux[STEPS];
    int n;
    size_t size[MAX_PARAMS];
    double *grad[MAX_PARAMS], *param[MAX_PARAMS]; // whole tensors, experts by global id
    int64_t copies, wire, planned, pairs, crossings, dropped, seen; // seen: of each expert, times its place
    int64_t state;     // bytes that all ranks' optimizers keep
} Result;

typedef struct Job {
    Setup s;
    More more;
    ModelConfig model;
    AuxScope scope;
    int optimizer;
    Result *result;
} Job;

static ModelConfig small_model(void) {
    ModelConfig c;
    config_preset(&c, "demo");
    c.V = 31, c.C = 16, c.L = 3, c.NH = 4, c.NKV = 2, c.HS = 6, c.T = T;
    c.E = 24, c.K = 3, c.F = 10, c.F_dense = 20, c.n_shared = 1;
    memset(c.dense, 0, sizeof c.dense);
    c.dense[0] = 1;
    c.router_skew = 1.2, c.init_std = 0.2;
    return c;
}

// Copies cost next to nothing, so that plans use the slots.
static Cost cheap_copies(const CommInfo *ep, int slots) {
    return (Cost){.name = "test", .N = ep->N, .G = ep->G, .S = slots, .pair_compute_ps = 1000000, .pair_inter_ps = 400000,
                  .pair_intra_ps = 100000, .copy_inter_ps = 6000, .copy_intra_ps = 2000, .plan_fixed_ps = 1000};
}

static void microbatch(int *tok, int *target, int step, int first, int n) {
    for (int i = 0; i < n * T; i++) {
        int s = first + i / T, t = i % T;
        tok[i] = (int)(rng_u64(3, step, (uint64_t)s * (T + 1) + t) % 31);
        target[i] = (int)(rng_u64(3, step, (uint64_t)s * (T + 1) + t + 1) % 31);
    }
}

// This rank's share of a tensor to its place in the whole one.
static void keep(double *whole, Dev *d, const void *share, size_t n, size_t at, size_t elem) {
    char *host = host_alloc(n * elem + 1);
    dev_download(d, host, share, n * elem);
    for (size_t i = 0; i < n; i++) whole[at + i] = elem == sizeof(double) ? ((double *)host)[i] : ((float *)host)[i];
    free(host);
}

static void collect(Result *res, Dev *d, Params *ps, int rank, int ep, int grads) {
    if (rank >= ep) return; // the first EP group holds everything
    for (int i = 0; i < ps->n; i++) {
        const Param *p = &ps->p[i];
        size_t at = p->owner == OWNER_EXPERT ? SIZE(p->first_expert, (int64_t)p->n_unit) : 0;
        if (p->owner != OWNER_EXPERT && rank > 0) continue;
        if (p->owner == OWNER_STATE) {
            if (!grads) keep(res->param[i], d, param_state(ps, p), p->n, at, sizeof(wide));
        } else if (grads) keep(res->grad[i], d, param_g(ps, p), p->n, at, sizeof(wide));
        else keep(res->param[i], d, param_w(ps, p), p->n, at, sizeof(real));
    }
}

static void alloc_result(Result *res, const Params *ps, const ModelConfig *c) {
    res->n = ps->n;
    for (int i = 0; i < ps->n; i++) {
        const Param *p = &ps->p[i];
        res->size[i] = p->owner == OWNER_EXPERT ? SIZE(c->E, (int64_t)p->n_unit) : p->n;
        res->grad[i] = host_alloc(res->size[i] * sizeof(double) + 1), res->param[i] = host_alloc(res->size[i] * sizeof(double) + 1);
    }
}

// Of the copies that cross nodes, by the plans
static int64_t planned_bytes(Job *job, Moe *moe) {
    const ModelConfig *c = &job->model;
    int64_t unit = (int64_t)EXPERT_SIZE(c->F, c->C), sum = 0;
    int *D = host_alloc(SIZE(job->s.ep, c->E, sizeof(int)));
    for (int micro = 0; micro < job->s.micros; micro++)
        for (int l = 0; l < c->L - 1; l++) {
            PlanInfo p;
            moe_demand(moe, micro, l, D, &p, (int64_t[2]){0});
            sum += p.inter_copies * unit * (int64_t)(2 * sizeof(real) + sizeof(wide));
        }
    free(D);
    return sum;
}

static void train_steps(Job *job, Dev *d, Comm *world, Comm *ep, Model *m, Optimizer *opt) {
    Setup s = job->s;
    Result *res = job->result;
    Params *ps = model_params(m);
    Moe *moe = model_moe(m);
    int rank = comm_info(world)->rank, share = B / s.ranks, n = share / s.micros;
    int *tok = host_alloc(SIZE(B, T, sizeof(int))), *target = host_alloc(SIZE(B, T, sizeof(int))), *first = host_alloc(SIZE(B, T, sizeof(int)));
    for (int i = 0; i < B * T; i++) first[i] = i % T < T / 2 ? 0 : T / 2; // two documents: where the model has a mask
    for (int step = 0; step < STEPS; step++) {
        model_zero_grad(m);
        for (int i = 0; i < s.micros; i++) {
            microbatch(tok, target, step, rank * share + i * n, n);
            model_forward(m, tok, target, first, n, T, i, B * T, 1);
            model_backward(m);
        }
        model_reduce_grads(m);
        double norm, nll = model_nll(m), *sumsq = model_grad_norm(m, &norm);
        comm_sum_double(world, &nll, 1);
        for (int i = 0; i < 2 && step == 0; i++) comm_share_parts(ps->arena[i].ranks, ps->arena[i].g, ps->arena[i].n, sizeof(wide));
        if (step == 0) collect(res, d, ps, rank, s.ep, 1);
        optimizer_set(opt, d, 0.02, step + 1);
        optimizer_step(opt, d, ps, sumsq);
        moe_update_bias(moe, 0.01, opt->factor);
        model_share_params(m);
        MoeStats stats;
        moe_stats(moe, &stats);
        moe_check_hashes(moe);
        int64_t planned = planned_bytes(job, moe);
        comm_barrier(world);
        if (rank == 0) {
            res->loss[step] = nll / (B * T), res->norm[step] = norm, res->aux[step] = stats.aux;
            res->copies += stats.copies, res->planned += planned + stats.bytes_inter;
            res->pairs += stats.pairs_inter, res->crossings += stats.crossings, res->dropped += stats.dropped;
            for (int i = 0; i < (job->model.L - 1) * job->model.E; i++) res->seen += (i + 1) * stats.seen[i];
        }
    }
    collect(res, d, ps, rank, s.ep, 0);
    double wire = (double)comm_bytes_sent(ep);
    comm_sum_double(ep, &wire, 1);
    if (rank == 0) res->wire = (int64_t)wire;
    free(tok), free(target), free(first);
}

static void body(Comm *world, void *arg) {
    Job *job = arg;
    Setup s = job->s;
    Dev *d = dev_init((DevOptions){.threads = 1, .poison = 1, .shared = 1});
    comm_bind(world, d);
    Comm *ep = comm_block(world, s.ep);
    ModelRun run = {.max_B = B / s.ranks / s.micros, .T = T, .micros = s.micros, .training = 1, .zero = !job->more.whole, .seed = 11,
                    .aux_coef = 0.02, .z_coef = 0.003,
                    .scope = job->scope, .S = s.slots, .cost = cheap_copies(comm_info(ep), s.slots), .dedup = !s.pairs,
                    .plan = s.how, .recompute = job->more.recompute, .capacity = job->more.capacity};
    run.plan.policy = s.policy, run.plan.block = 1;
    Model *m = model_init(d, world, ep, &job->model, &run);
    if (comm_info(world)->rank == 0) alloc_result(job->result, model_params(m), &job->model);
    comm_barrier(world);
    Options o;
    options_init(&o);
    o.optimizer = job->optimizer, o.clip = 0.5;
    Optimizer opt = optimizer_alloc(d, model_params(m), &o);
    optimizer_start(&opt, d, model_params(m));
    size_t taken[MEMORY_KINDS];
    dev_taken(d, taken);
    int64_t state = (int64_t)taken[MEMORY_OPTIMIZER];
    comm_sum_int64(world, &state, 1);
    job->result->state = state;
    train_steps(job, d, world, ep, m, &opt);
    model_free(m);
    comm_free(ep);
    dev_free(d);
}

static Result run_more(Setup s, ModelConfig model, AuxScope scope, int optimizer, More more) {
    Result res = {0};
    Job job = {.s = s, .more = more, .model = model, .scope = scope, .optimizer = optimizer, .result = &res};
    int argc = 1;
    char *name[] = {"test_layout", NULL}, **argv = name;
    comm_run(&argc, &argv, s.ranks, s.nodes, body, &job);
    return res;
}

static Result run_setup(Setup s, ModelConfig model, AuxScope scope, int optimizer) {
    return run_more(s, model, scope, optimizer, (More){0});
}

static void free_result(Result *r) {
    for (int i = 0; i < r->n; i++) free(r->grad[i]), free(r->param[i]);
}

// Largest |a - b| as a share of the largest |a|.
static double difference(const double *a, const double *b, size_t n) {
    double most = 0, scale = 1e-300;
    for (size_t i = 0; i < n; i++) {
        if (isnan(a[i]) || isnan(b[i])) return INFINITY;
        most = fmax(most, fabs(a[i] - b[i])), scale = fmax(scale, fabs(a[i]));
    }
    return most / scale;
}

static double compare(const Result *a, const Result *b, int params) {
    double worst = fmax(difference(a->loss, b->loss, STEPS), difference(a->norm, b->norm, STEPS));
    worst = fmax(worst, difference(a->aux, b->aux, STEPS));
    if (a->n != b->n) return INFINITY;
    for (int i = 0; i < a->n; i++) {
        worst = fmax(worst, difference(a->grad[i], b->grad[i], a->size[i]));
        if (params) worst = fmax(worst, difference(a->param[i], b->param[i], a->size[i]));
    }
    return worst;
}

static const Setup setups[] = {
    {1, 1, 1, 2, POLICY_TOPOEP, 2, 0, {0}},    {1, 1, 1, 4, POLICY_NONE, 0, 0, {0}},      {2, 2, 1, 1, POLICY_TOPOEP, 1, 0, {0}},
    {2, 2, 2, 2, POLICY_TOPOEP, 2, 0, {0}},    {2, 1, 1, 1, POLICY_NONE, 0, 0, {0}},      {3, 3, 1, 1, POLICY_TOPOEP, 2, 0, {0}},
    {3, 3, 3, 2, POLICY_TOPOEP, 1, 0, {0}},    {4, 4, 1, 1, POLICY_TOPOEP, 2, 0, {0}},    {4, 4, 2, 2, POLICY_TOPOEP, 1, 0, {0}},
    {4, 4, 4, 1, POLICY_TOPOEP, 2, 0, {0}},    {4, 4, 2, 1, POLICY_NONE, 0, 0, {0}},      {4, 2, 2, 1, POLICY_TOPOEP, 2, 0, {0}},
    {4, 2, 1, 1, POLICY_TOPOEP, 0, 0, {0}},    {4, 1, 4, 1, POLICY_TOPOEP, 1, 0, {0}},    {8, 8, 4, 1, POLICY_TOPOEP, 2, 0, {0}},
    {8, 8, 2, 1, POLICY_TOPOEP, 3, 0, {0}},    {8, 4, 4, 1, POLICY_TOPOEP, 2, 0, {0}},    {8, 4, 2, 3, POLICY_TOPOEP, 1, 0, {0}},
    {8, 2, 2, 1, POLICY_NONE, 2, 0, {0}},      {8, 8, 1, 3, POLICY_NONE, 0, 0, {0}},
};
// Every other balancer on two layouts (eplb plans by the past, and so differently for every layout), with tokens or pairs that
// cross nodes, copies cut over the ports or not.
#define ONE_PORT {.without = PLAN_NO_SLICING}
static const Setup others[] = {
    {4, 4, 2, 1, POLICY_EPLB, 2, 0, {0}},      {8, 4, 4, 1, POLICY_EPLB, 1, 1, ONE_PORT},   {4, 4, 2, 1, POLICY_FASTERMOE, 2, 0, ONE_PORT},
    {8, 8, 4, 1, POLICY_FASTERMOE, 3, 1, {0}}, {4, 4, 2, 2, POLICY_LLEP, 2, 0, {0}},        {6, 6, 3, 1, POLICY_LLEP, 1, 1, ONE_PORT},
    {4, 4, 1, 1, POLICY_ECHO, 3, 0, {0}},      {8, 8, 2, 1, POLICY_ECHO, 2, 1, {0}},        {4, 4, 2, 1, POLICY_LPLB, 1, 1, {0}},
    {8, 8, 2, 3, POLICY_LPLB, 2, 0, ONE_PORT}, {4, 4, 2, 1, POLICY_ULTRAEP, 2, 0, {0}},     {6, 6, 2, 1, POLICY_ULTRAEP, 3, 1, {0}},
    {8, 8, 4, 1, POLICY_MOONEP, 3, 0, {0}},    {4, 4, 4, 2, POLICY_MOONEP, 2, 1, ONE_PORT}, {4, 4, 2, 1, POLICY_NONE, 0, 1, {0}},
    {8, 8, 2, 1, POLICY_NONE, 0, 1, ONE_PORT},
};
// and topoep with every switch
static const Setup switches[] = {
    {4, 4, 2, 1, POLICY_TOPOEP, 2, 1, {0}},      {8, 8, 2, 1, POLICY_TOPOEP, 3, 0, ONE_PORT},
    {8, 8, 4, 1, POLICY_TOPOEP, 2, 1, ONE_PORT}, {4, 4, 2, 1, POLICY_TOPOEP, 2, 0, {.target = TARGET_BALANCE}},
    {8, 8, 2, 1, POLICY_TOPOEP, 2, 1, {.target = TARGET_BALANCE, .effort = EFFORT_LOW}},
    {4, 4, 2, 1, POLICY_TOPOEP, 2, 0, {.effort = EFFORT_LOW}},
    {8, 8, 2, 1, POLICY_TOPOEP, 3, 0, {.effort = EFFORT_HIGH, .without = PLAN_NO_PORTFOLIO}},
    {8, 8, 2, 1, POLICY_TOPOEP, 2, 0, {.without = PLAN_NO_STAGE1}},
    {8, 8, 4, 1, POLICY_TOPOEP, 2, 1, {.without = PLAN_NO_STAGE2}},
    {8, 8, 2, 3, POLICY_TOPOEP, 2, 0, {.without = PLAN_NO_LOCALITY | PLAN_NO_SLICING}},
    {8, 4, 4, 1, POLICY_TOPOEP, 1, 0, {.without = PLAN_NO_STAGE1 | PLAN_NO_STAGE2}},
};
// of which one of each kind where a step takes long
static const Setup few[] = {
    {.ranks = 3, .ep = 3, .nodes = 1, .micros = 2, .policy = POLICY_TOPOEP, .slots = 2},
    {.ranks = 4, .ep = 4, .nodes = 2, .micros = 1, .policy = POLICY_TOPOEP, .slots = 2},
    {.ranks = 4, .ep = 2, .nodes = 2, .micros = 1, .policy = POLICY_TOPOEP, .slots = 1},
    {.ranks = 4, .ep = 4, .nodes = 4, .micros = 2, .policy = POLICY_MOONEP, .slots = 2, .pairs = 1},
    {.ranks = 2, .ep = 1, .nodes = 1, .micros = 3, .policy = POLICY_NONE},
};
static const Setup one = {1, 1, 1, 1, POLICY_NONE, 0, 0, {0}};

static void check_list(const Setup *list, size_t n, AuxScope scope, int optimizer, ModelConfig model, int params) {
    Result want = run_setup(one, model, scope, optimizer);
    int64_t copies = 0;
    for (size_t i = 0; i < n; i++) {
        Setup s = list[i];
        if (scope == AUX_GLOBAL && s.micros > 1) continue; // knows the step's tokens only as far as they have come
        Result got = run_setup(s, model, scope, optimizer);
        double worst = compare(&want, &got, params);
        if (!(worst <= BOUND))
            fail_msg("%d ranks, ep %d, %d nodes, %d microbatches, %s, %d slots, dedup %d, without %x: differs by %g, bound %g", s.ranks,
                     s.ep, s.nodes, s.micros, policy_names[s.policy], s.slots, !s.pairs, s.how.without, worst, BOUND);
        if (s.nodes > 1 && s.ranks == s.ep && got.wire != got.planned)
            fail_msg("%d ranks, %d nodes: %lld bytes went between nodes, the plans said %lld", s.ranks, s.nodes, (long long)got.wire,
                     (long long)got.planned);
        if (s.pairs ? got.crossings != got.pairs : got.crossings > got.pairs || (got.pairs && got.crossings == got.pairs))
            fail_msg("%d ranks, %d nodes, dedup %d: %lld rows crossed for %lld pairs", s.ranks, s.nodes, !s.pairs,
                     (long long)got.crossings, (long long)got.pairs);
        copies += got.copies;
        free_result(&got);
    }
    assert_true(copies > STEPS * (int64_t)n); // else the copies' path was not tried
    free_result(&want);
}

static void check_all(AuxScope scope, int optimizer, ModelConfig model, int params) {
    check_list(setups, sizeof setups / sizeof *setups, scope, optimizer, model, params);
}

static void test_few(void **state) {
    (void)state;
    check_list(few, sizeof few / sizeof *few, AUX_SEQ, OPTIMIZER_SGD, small_model(), 1);
}
static void test_adamw(void **state) { (void)state; check_all(AUX_SEQ, OPTIMIZER_ADAMW, small_model(), sizeof(real) == 8); }
static void test_sgd(void **state) { (void)state; check_all(AUX_SEQ, OPTIMIZER_SGD, small_model(), 1); }
static void test_policies(void **state) {
    (void)state;
    check_list(others, sizeof others / sizeof *others, AUX_SEQ, OPTIMIZER_SGD, small_model(), 1);
    check_list(switches, sizeof switches / sizeof *switches, AUX_SEQ, OPTIMIZER_SGD, small_model(), 1);
}
static void test_global_scope(void **state) { (void)state; check_all(AUX_GLOBAL, OPTIMIZER_SGD, small_model(), 1); }

static void test_sigmoid_router(void **state) {
    (void)state;
    ModelConfig c = small_model();
    c.score = ROUTER_SIGMOID, c.bias = 1, c.routed_scale = 2.5, c.tied = 1;
    check_all(AUX_SEQ, OPTIMIZER_SGD, c, 1);
}

// Whatever the backward makes again: the same bits and the same counts. Between nodes only the rows that are dispatched again are more.
static void check_recompute(ModelConfig model, int optimizer, double capacity) {
    static const Setup layouts[] = {{1, 1, 1, 2, POLICY_TOPOEP, 2, 0, {0}}, {4, 4, 2, 2, POLICY_TOPOEP, 2, 0, {0}},
                                    {4, 4, 2, 1, POLICY_TOPOEP, 2, 1, ONE_PORT}, {4, 2, 1, 1, POLICY_LLEP, 1, 0, {0}}};
    int64_t copies = 0;
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        Setup s = layouts[i];
        Result want = run_more(s, model, AUX_SEQ, optimizer, (More){.capacity = capacity});
        for (int level = 1; level <= RECOMPUTE_BLOCK; level++) {
            Result got = run_more(s, model, AUX_SEQ, optimizer, (More){.recompute = (Recompute)level, .capacity = capacity});
            if (compare(&want, &got, 1) != 0)
                fail_msg("%d ranks, %d nodes, recompute %d: differs by %g, expected the same bits", s.ranks, s.nodes, level, compare(&want, &got, 1));
            int64_t counts[][2] = {{want.copies, got.copies}, {want.pairs, got.pairs}, {want.crossings, got.crossings},
                                   {want.dropped, got.dropped}, {want.seen, got.seen}};
            for (int k = 0; k < 5; k++) assert_int_equal(counts[k][0], counts[k][1]);
            if (s.nodes > 1) {
                assert_int_equal(got.wire, got.planned);
                assert_true(level == RECOMPUTE_BLOCK ? got.wire > want.wire : got.wire == want.wire);
            }
            free_result(&got);
        }
        assert_true((want.dropped > 0) == (capacity > 0));
        copies += want.copies;
        free_result(&want);
    }
    assert_true(copies > 100);
}

static void test_recompute(void **state) {
    (void)state;
    ModelConfig c = small_model();
    c.L = 4, c.dense[0] = 0, c.dense[2] = 1;
    check_recompute(c, OPTIMIZER_SGD, 0);
    c.score = ROUTER_SIGMOID, c.bias = 1, c.routed_scale = 2.5, c.doc_mask = 1, c.n_shared = 0, c.dense[2] = 0, c.dense[3] = 1;
    check_recompute(c, OPTIMIZER_ADAMW, 1.5);
}

// Sharing out the optimizer's state, as all other setups do, changes no bit, and every element's is kept once.
static void test_zero(void **state) {
    (void)state;
    static const Setup list[] = {
        {2, 2, 1, 1, POLICY_TOPOEP, 2, 0, {0}}, {2, 1, 2, 2, POLICY_NONE, 0, 0, {0}},   {3, 3, 3, 2, POLICY_TOPOEP, 1, 0, {0}},
        {3, 1, 1, 1, POLICY_NONE, 0, 0, {0}},   {4, 2, 2, 1, POLICY_TOPOEP, 2, 0, {0}}, {8, 2, 4, 1, POLICY_TOPOEP, 1, 0, {0}},
    };
    ModelConfig c = small_model();
    int64_t experts = (int64_t)EXPERT_SIZE(c.F, c.C) * c.E * (c.L - 1), params = config_size(&c).params;
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        Setup s = list[i];
        int sgd = i % 3 == 2, optimizer = sgd ? OPTIMIZER_SGD : OPTIMIZER_ADAMW;
        Result whole = run_more(s, c, AUX_SEQ, optimizer, (More){.whole = 1}), parts = run_setup(s, c, AUX_SEQ, optimizer);
        if (compare(&whole, &parts, 1) != 0) fail_msg("%d ranks, ep %d, %d nodes: other bits in parts", s.ranks, s.ep, s.nodes);
        int64_t each = sgd ? 0 : 2 * sizeof(wide), rest = (int64_t)(sizeof(wide) + 2 * sizeof(Update)) * s.ranks;
        assert_int_equal(parts.state, params * each + rest);
        assert_int_equal(whole.state, ((params - experts) * s.ranks + experts * (s.ranks / s.ep)) * each + rest);
        free_result(&whole), free_result(&parts);
    }
}

static void test_bound_can_fail(void **state) {
    (void)state;
    Result a = run_setup(one, small_model(), AUX_SEQ, OPTIMIZER_SGD), b = run_setup(one, small_model(), AUX_SEQ, OPTIMIZER_SGD);
    assert_true(compare(&a, &b, 1) == 0); // the same layout twice: the same bits
    for (int i = 0; i < a.n; i++) {
        double *tensors[] = {b.grad[i], b.param[i]};
        const double *same[] = {a.grad[i], a.param[i]};
        for (int k = 0; k < 2; k++) {
            double scale = 0;
            for (size_t j = 0; j < a.size[i]; j++) scale = fmax(scale, fabs(same[k][j]));
            if (scale == 0) continue; // the gradient of a bias that is not trained
            tensors[k][a.size[i] / 2] += 10 * BOUND * scale;
            assert_true(compare(&a, &b, 1) > BOUND);
            tensors[k][a.size[i] / 2] = same[k][a.size[i] / 2];
        }
    }
    b.loss[STEPS - 1] *= 1 + 10 * BOUND;
    assert_true(compare(&a, &b, 1) > BOUND);
    free_result(&a);
    free_result(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bound_can_fail), cmocka_unit_test(test_adamw), cmocka_unit_test(test_sgd),
                                       cmocka_unit_test(test_global_scope), cmocka_unit_test(test_sigmoid_router),
                                       cmocka_unit_test(test_policies), cmocka_unit_test(test_recompute), cmocka_unit_test(test_zero)};
    const struct CMUnitTest quick[] = {cmocka_unit_test(test_bound_can_fail), cmocka_unit_test(test_few)};
    return QUICK ? cmocka_run_group_tests_name("layout", quick, NULL, NULL) : cmocka_run_group_tests_name("layout", tests, NULL, NULL);
}
