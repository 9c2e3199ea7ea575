// The model: loss and every parameter's gradient against the double-precision oracle and its finite differences, equalities
// between models, initial values on any number of ranks, generation, norms.
#include "kernels/check.h"
#include "tests/common/model_job.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

// Every rounding is of a relative size EPS. A value passes some ten of them per layer, and sums of up to some hundred terms whose
// errors add up like a random walk; conditioning is mild (weights of order 0.4). 16 EPS for a loss (a mean over tokens), 256 EPS of
// a tensor's largest gradient and 64 EPS of the largest logit leave room of 4 to 8 over what is seen, and are far below what a
// wrong term would do.
static const double EPS = sizeof(real) == 4 ? 0x1p-24 : 0x1p-53;
#define LOSS_BOUND (16 * EPS)
#define GRAD_BOUND (256 * EPS)
#define LOGIT_BOUND (64 * EPS)
#define FD_BOUND 1e-8 // of the oracle's differences themselves: fourth order, in double

// d loss / d x by a five-point difference, with the widest step that changes no token's choice of experts
static double difference(const Job *job, const RefConfig *rc, RefTable *w, double *x, uint64_t choices) {
    double was = *x, result = NAN;
    for (double h = 2e-4; isnan(result) && h > 1e-7; h /= 8) {
        double f[4];
        const double step[4] = {-2, -1, 1, 2};
        int same = 1;
        for (int i = 0; i < 4 && same; i++) {
            *x = was + step[i] * h;
            RefLoss l = oracle(job, rc, w);
            f[i] = l.total;
            same = l.choices == choices;
        }
        *x = was;
        if (same) result = (f[0] - 8 * f[1] + 8 * f[2] - f[3]) / (12 * h);
    }
    return result;
}

// Largest error of a tensor's gradient against differences, relative to the tensor's largest gradient (or 0.005: differences of a
// loss of order 1 are absolute, to some 1e-11). stride: every n-th element.
static double grad_error(const Job *job, const RefConfig *rc, RefTable *w, const RefTensor *g, uint64_t choices, size_t stride,
                         double inject) {
    RefTensor *t = ref_find(w, g->name);
    double top = 5e-3, worst = 0;
    for (size_t j = 0; j < t->n; j++) top = fmax(top, fabs(g->w[j]));
    for (size_t j = 0; j < t->n; j += stride) {
        double error = fabs(g->w[j] + (j == 0 ? inject * top : 0) - difference(job, rc, w, &t->w[j], choices)) / top;
        worst = error > worst || isnan(error) ? error : worst; // a NaN stays
        if (isnan(worst)) return INFINITY;
    }
    return worst;
}

static double measured_loss, measured_grad; // largest seen, in units of the bounds; printed at the end

static void check_case(const char *what, const ModelConfig *c, const ModelRun *run, int world, int R, int nodes, int B, int T,
                       size_t stride) {
    Data data = make_data(B * world * (run->micros ? run->micros : 1), T, c->V);
    Job job = make_job(c, run, world, R, B, T, &data);
    job.nodes = nodes;
    RefConfig rc = ref_config(c, run);
    RefTable w = initial(job, &rc), g = ref_table(&rc);
    job.load = &w, job.g = &g, job.forward = job.backward = job.run.training = 1;
    run_job(&job);
    RefLoss r = oracle(&job, &rc, &w);
    double part[3][2] = {{job.nll, r.nll}, {job.aux, r.aux}, {job.z, r.z}};
    for (int i = 0; i < 3; i++) {
        double error = fabs(part[i][0] - part[i][1]) / (1 + fabs(part[i][1]));
        if (!(error <= LOSS_BOUND)) fail_msg("%s: loss part %d is %.17g, the oracle says %.17g", what, i, part[i][0], part[i][1]);
        measured_loss = fmax(measured_loss, error / LOSS_BOUND);
    }
    double sumsq = 0, bound = GRAD_BOUND + FD_BOUND;
    for (int i = 0; i < g.n; i++) {
        if (strstr(g.t[i].name, "e_score_correction_bias")) continue;
        double error = grad_error(&job, &rc, &w, &g.t[i], r.choices, stride, 0);
        if (!(error <= bound)) fail_msg("%s: gradient of %s is off by %g of its largest element, the bound is %g", what, g.t[i].name,
                                        error, bound);
        measured_grad = fmax(measured_grad, error / bound);
        for (size_t j = 0; j < g.t[i].n; j++) sumsq += g.t[i].w[j] * g.t[i].w[j];
    }
    assert_true(grad_error(&job, &rc, &w, &g.t[0], r.choices, g.t[0].n, 10 * bound) > bound);
    for (int i = 0; i < world; i++) assert_true(job.norm[i] == job.norm[0]);
    assert_true(fabs(job.norm[0] - sqrt(sumsq)) <= GRAD_BOUND * sqrt(sumsq));
    ref_table_free(&w);
    ref_table_free(&g);
}

static void test_gradients(void **state) {
    (void)state;
    const ModelConfig plain = small_config();
    const ModelRun quiet = {0}, losses = {.aux_coef = 0.3, .z_coef = 0.1};
    ModelConfig c = plain;
    check_case("softmax", &c, &quiet, 1, 1, 0, 2, 5, 1);
    check_case("softmax, balance by sequence, z", &c, &losses, 1, 1, 0, 2, 5, 1);
    ModelRun micro = losses;
    micro.scope = AUX_MICRO, micro.micros = 2;
    check_case("balance by microbatch, two of them", &c, &micro, 1, 1, 0, 2, 4, 3);
    ModelRun global = losses;
    global.scope = AUX_GLOBAL;
    check_case("balance over all", &c, &global, 1, 1, 0, 2, 5, 1);
    c.renorm = 0, c.K = 1, c.routed_scale = 1.7;
    check_case("K = 1, no renormalisation, scaled", &c, &losses, 1, 1, 0, 2, 5, 1);
    c.K = 3;
    check_case("K = 3, no renormalisation", &c, &losses, 1, 1, 0, 2, 5, 3);
    c = plain, c.K = c.E;
    check_case("K = E", &c, &losses, 1, 1, 0, 2, 5, 3);
    c = plain, c.E = c.K = 1;
    check_case("E = 1", &c, &losses, 1, 1, 0, 2, 5, 3);
    c = plain, c.score = ROUTER_SIGMOID, c.bias = 1, c.n_shared = 2, c.routed_scale = 2.5, c.dense[0] = 1;
    check_case("Dots1: sigmoid, bias, shared, first layer dense", &c, &losses, 1, 1, 0, 2, 5, 1);
    c.renorm = 0, c.tied = 1;
    check_case("sigmoid without renormalisation, tied", &c, &losses, 1, 1, 0, 2, 5, 2);
    c = plain, c.bias = 1, c.dense[1] = 1, c.doc_mask = 1, c.tied = 1;
    check_case("softmax with bias, second layer dense, document mask, tied", &c, &losses, 1, 1, 0, 2, 6, 2);
    c = plain, c.E = c.K = c.F = 0, c.dense[0] = c.dense[1] = 1, c.NH = c.NKV = 3, c.HS = 2;
    check_case("dense", &c, &quiet, 1, 1, 0, 2, 5, 1);
    c = plain, c.L = 3, c.NH = 4, c.NKV = 2, c.HS = 6, c.C = 7, c.E = 6, c.K = 3, c.dense[1] = 1, c.n_shared = 1;
    check_case("odd width, three layers", &c, &losses, 1, 1, 0, 1, 7, 7);
    c = plain, c.doc_mask = 1;
    check_case("one token", &c, &losses, 1, 1, 0, 1, 1, 3);
}

static void test_ranks(void **state) {
    (void)state;
    ModelConfig c = small_config();
    ModelRun run = {.aux_coef = 0.3, .z_coef = 0.1, .S = 1, .micros = 2};
    check_case("2 ranks, 1 slot", &c, &run, 2, 2, 0, 1, 5, 11);
    check_case("4 ranks in 2 nodes", &c, &run, 4, 4, 2, 1, 5, 11);
    check_case("2 groups of 2 ranks", &c, &run, 4, 2, 0, 1, 5, 11);
    run.scope = AUX_GLOBAL, run.micros = 1;
    check_case("2 groups of 1 rank, balance over all", &c, &run, 2, 1, 0, 2, 5, 7);
    run.scope = AUX_MICRO;
    c.score = ROUTER_SIGMOID, c.bias = 1, c.n_shared = 1;
    check_case("4 ranks, sigmoid, balance by microbatch", &c, &run, 4, 4, 0, 1, 5, 11);
}

// ---- equalities ----------------------------------------------------------------------------------------------------------

static double table_distance(const RefTensor *a, const double *b) {
    double worst = 0, top = 1e-6;
    for (size_t j = 0; j < a->n; j++) worst = fmax(worst, fabs(a->w[j] - b[j])), top = fmax(top, fabs(b[j]));
    return worst / top;
}

// A model with E experts that are all the dense layer's network computes what the dense one does, and the experts' gradients
// add up to the dense one's.
static void check_dense_equality(int E, int K) {
    const char *const names[3] = {"gate_proj", "up_proj", "down_proj"};
    ModelConfig moe = small_config(), dense;
    moe.E = E, moe.K = K, moe.F_dense = moe.F;
    dense = moe;
    dense.dense[0] = dense.dense[1] = 1;
    ModelRun run = {0};
    Data data = make_data(2, 5, moe.V);
    RefConfig rc = ref_config(&moe, &run), rd = ref_config(&dense, &run);
    Job jm = make_job(&moe, &run, 1, 1, 2, 5, &data), jd = make_job(&dense, &run, 1, 1, 2, 5, &data);
    RefTable wm = initial(jm, &rc), wd = initial(jd, &rd), gm = ref_table(&rc), gd = ref_table(&rd);
    for (int i = 0; i < wd.n; i++) {
        RefTensor *same = ref_find(&wm, wd.t[i].name);
        if (same) memcpy(same->w, wd.t[i].w, same->n * sizeof(double));
    }
    for (int l = 0; l < 2; l++)
        for (int e = 0; e < E; e++)
            for (int k = 0; k < 3; k++) {
                char a[96], b[96];
                snprintf(a, sizeof a, "model.layers.%d.mlp.experts.%d.%s.weight", l, e, names[k]);
                snprintf(b, sizeof b, "model.layers.%d.mlp.%s.weight", l, names[k]);
                memcpy(ref_find(&wm, a)->w, ref_find(&wd, b)->w, ref_find(&wm, a)->n * sizeof(double));
            }
    jm.load = &wm, jm.g = &gm, jm.forward = jm.backward = jm.run.training = 1;
    jd.load = &wd, jd.g = &gd, jd.forward = jd.backward = jd.run.training = 1;
    run_job(&jm);
    run_job(&jd);
    assert_true(fabs(jm.nll - jd.nll) <= LOSS_BOUND * jd.nll);
    for (int i = 0; i < gd.n; i++) {
        RefTensor *d = &gd.t[i], *m = ref_find(&gm, d->name);
        double *sum = calloc(d->n, sizeof(double));
        int l = 0;
        char which[32];
        if (m) memcpy(sum, m->w, d->n * sizeof(double));
        else if (sscanf(d->name, "model.layers.%d.mlp.%31[a-z_]", &l, which) == 2)
            for (int e = 0; e < E; e++) {
                char a[96];
                snprintf(a, sizeof a, "model.layers.%d.mlp.experts.%d.%s.weight", l, e, which);
                for (size_t j = 0; j < d->n; j++) sum[j] += ref_find(&gm, a)->w[j];
            }
        double error = table_distance(d, sum);
        if (!(error <= GRAD_BOUND)) fail_msg("E = %d: gradient of %s differs from the dense model's by %g", E, d->name, error);
        sum[0] += 10 * GRAD_BOUND * (fabs(sum[0]) + 1);
        assert_true(table_distance(d, sum) > GRAD_BOUND);
        free(sum);
    }
    ref_table_free(&wm), ref_table_free(&wd), ref_table_free(&gm), ref_table_free(&gd);
}

static void test_dense_equality(void **state) {
    (void)state;
    check_dense_equality(1, 1);
    check_dense_equality(4, 2);
    check_dense_equality(4, 4);
}

// Observing between steps and inside them changes no bit of a gradient.
static void test_observe(void **state) {
    (void)state;
    ModelConfig c = small_config();
    c.score = ROUTER_SIGMOID, c.bias = 1;
    ModelRun run = {.aux_coef = 0.3, .z_coef = 0.1};
    Data data = make_data(2, 6, c.V);
    RefConfig rc = ref_config(&c, &run);
    Job a = make_job(&c, &run, 1, 1, 2, 6, &data), b = a;
    RefTable ga = ref_table(&rc), gb = ref_table(&rc);
    wide logits[16];
    a.forward = a.backward = a.run.training = 1, b = a;
    a.g = &ga, b.g = &gb, b.logits = logits;
    run_job(&a);
    b.observe = 1;
    run_job(&b);
    for (int i = 0; i < ga.n; i++) assert_memory_equal(ga.t[i].w, gb.t[i].w, ga.t[i].n * sizeof(double));
    ref_table_free(&ga), ref_table_free(&gb);
}

// ---- initial values --------------------------------------------------------------------------------------------------------

static void test_init_ranks(void **state) {
    (void)state;
    ModelConfig c = small_config();
    c.n_shared = 1, c.dense[0] = 1;
    ModelRun run = {0};
    Data data = make_data(1, 5, c.V);
    RefConfig rc = ref_config(&c, &run);
    RefTable one = ref_table(&rc);
    Job job = make_job(&c, &run, 1, 1, 1, 5, &data);
    job.w = &one;
    run_job(&job);
    for (int R = 2; R <= 4; R *= 2) {
        RefTable many = ref_table(&rc);
        job = make_job(&c, &run, R, R, 1, 5, &data);
        job.w = &many;
        run_job(&job);
        for (int i = 0; i < one.n; i++) assert_memory_equal(one.t[i].w, many.t[i].w, one.t[i].n * sizeof(double));
        ref_table_free(&many);
    }
    for (int i = 0; i < one.n; i++)
        for (int k = 0; k < i; k++) { // no two drawn tensors begin alike
            if (strstr(one.t[i].name, "norm") || strstr(one.t[k].name, "norm")) continue;
            assert_true(one.t[i].w[0] != one.t[k].w[0] || one.t[i].w[1] != one.t[k].w[1]);
        }
    // deviations: output projections are scaled down by sqrt(2L)
    for (int i = 0; i < one.n; i++) {
        const RefTensor *t = &one.t[i];
        if (strstr(t->name, "norm")) {
            for (size_t j = 0; j < t->n; j++) assert_true(t->w[j] == 1);
            continue;
        }
        double sum = 0, std = strstr(t->name, "down_proj") || strstr(t->name, "o_proj") ? 0.4 / sqrt(4) : 0.4;
        for (size_t j = 0; j < t->n; j++) sum += t->w[j] * t->w[j];
        double found = sqrt(sum / (double)t->n), spread = 5 * std / sqrt(2.0 * (double)t->n); // five sigmas
        if (fabs(found - std) > spread) fail_msg("%s: deviation %g, expected %g", t->name, found, std);
    }
    ref_table_free(&one);
}

// ---- generation ------------------------------------------------------------------------------------------------------------

static void check_decode(const ModelConfig *c, int world) {
    enum { N = 8 };
    ModelRun run = {0};
    Data data = make_data(2, N, c->V);
    RefConfig rc = ref_config(c, &run);
    Job job = make_job(c, &run, world, world, 1, N, &data);
    RefTable w = initial(job, &rc);
    double *full = calloc((size_t)N * (size_t)c->V, sizeof(double));
    ref_logits(&rc, &w, full, data.tok, N);
    wide *single = host_alloc(SIZE(world, N, c->V, sizeof(wide))), *chunked = host_alloc(SIZE(N, c->V, sizeof(wide)));
    job.load = &w, job.decode_n = N, job.decode_chunk = 1, job.logits = single;
    run_job(&job);
    double top = 0, worst = 0;
    for (int i = 0; i < N * c->V; i++) top = fmax(top, fabs(full[i])), worst = fmax(worst, fabs(full[i] - single[i]));
    assert_true(worst <= LOGIT_BOUND * top);
    for (int i = 0; i < N * c->V; i++) worst = fmax(worst, fabs(full[i] * (1 + 10 * LOGIT_BOUND) - single[i]));
    assert_true(worst > LOGIT_BOUND * top);
    for (int chunk = 2; chunk <= N; chunk += 3) {
        job.decode_chunk = chunk, job.logits = chunked;
        memset(chunked, 0, SIZE(N, c->V, sizeof(wide)));
        run_job(&job);
        for (int pos = 0; pos < N; pos += chunk) {
            size_t row = (size_t)((pos + chunk < N ? pos + chunk : N) - 1) * (size_t)c->V;
            for (int v = 0; v < c->V; v++) assert_true(fabs(chunked[row + (size_t)v] - single[row + (size_t)v]) <= LOGIT_BOUND * top);
        }
    }
    ref_table_free(&w);
    free(full), free(single), free(chunked);
}

// A model that trains generates the same, whatever its backward makes again: its layers' keys and values have a place of their own.
static void test_decode_recompute(void **state) {
    (void)state;
    enum { N = 6 };
    ModelConfig c = small_config();
    c.L = 3, c.dense[1] = 1;
    Data data = make_data(2, N, c.V);
    wide *logits[RECOMPUTE_BLOCK + 1];
    size_t kept = SIZE_MAX;
    for (int level = 0; level <= RECOMPUTE_BLOCK; level++) {
        ModelRun run = {.recompute = (Recompute)level, .generate = 1};
        Job job = make_job(&c, &run, 1, 1, 2, N, &data);
        logits[level] = host_alloc(SIZE(N, c.V, sizeof(wide)));
        job.forward = job.backward = job.run.training = 1;
        job.decode_n = N, job.decode_chunk = 1, job.logits = logits[level];
        run_job(&job);
        assert_memory_equal(logits[level], logits[0], SIZE(N, c.V, sizeof(wide)));
        assert_true(job.kept < kept); // each level keeps less
        kept = job.kept;
    }
    for (int i = 0; i < c.V; i++) assert_true(isfinite(logits[0][(N - 1) * c.V + i]) && logits[0][i] != 0);
    for (int level = 0; level <= RECOMPUTE_BLOCK; level++) free(logits[level]);
}

static void test_decode(void **state) {
    (void)state;
    ModelConfig c = small_config();
    check_decode(&c, 1);
    c.score = ROUTER_SIGMOID, c.bias = 1, c.n_shared = 1, c.dense[1] = 1, c.tied = 1;
    check_decode(&c, 1);
    check_decode(&c, 2);
    c.E = c.K = c.F = c.n_shared = c.bias = 0, c.dense[0] = 1;
    check_decode(&c, 1);
}

// ---- norm of gradients -----------------------------------------------------------------------------------------------------

static void ones_body(Comm *world, void *arg) {
    Job *job = arg;
    Dev *d = dev_init((DevOptions){.threads = 1, .shared = 1});
    comm_bind(world, d);
    Comm *ep = comm_block(world, job->R);
    Model *m = model_init(d, world, ep, &job->c, &job->run);
    Params *ps = model_params(m);
    double each = 1.0 / comm_info(world)->size, each_expert = (double)job->R / comm_info(world)->size;
    model_zero_grad(m);
    dev_fill(d, (real *)ps->arena[OWNER_REPL].g, ps->arena[OWNER_REPL].n, each);
    dev_fill(d, (real *)ps->arena[OWNER_EXPERT].g, ps->arena[OWNER_EXPERT].n, each_expert);
    model_reduce_grads(m); // sums to ones everywhere
    double *sumsq = model_grad_norm(m, &job->norm[comm_info(world)->rank]), host;
    dev_download(d, &host, sumsq, sizeof host);
    if (fabs(host - job->norm[0] * job->norm[0]) > 1e-9 * host && comm_info(world)->rank == 0) job->norm[0] = NAN;
    model_free(m);
    comm_free(ep);
    dev_free(d);
}

static void test_norm(void **state) {
    (void)state;
    ModelConfig c = small_config();
    ModelRun run = {.training = 1};
    Data data = make_data(1, 5, c.V);
    double expected = sqrt((double)config_size(&c).params);
    const int layouts[][2] = {{1, 1}, {2, 2}, {4, 4}, {2, 1}, {4, 2}};
    for (int i = 0; i < 5; i++) {
        Job job = make_job(&c, &run, layouts[i][0], layouts[i][1], 1, 5, &data);
        job.run.cost = costs(1, job.R, 0);
        comm_run(NULL, NULL, job.world, 0, ones_body, &job);
        for (int r = 0; r < job.world; r++) assert_true(fabs(job.norm[r] - expected) <= 1e-12 * expected);
    }
}

static void report(void **state) {
    (void)state;
    print_message("largest errors: loss %.3f of its bound, gradients %.3f of theirs\n", measured_loss, measured_grad);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_init_ranks),     cmocka_unit_test(test_gradients), cmocka_unit_test(test_ranks),  cmocka_unit_test(report),
        cmocka_unit_test(test_dense_equality), cmocka_unit_test(test_observe),   cmocka_unit_test(test_decode), cmocka_unit_test(test_decode_recompute), cmocka_unit_test(test_norm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
