// The model: loss and every parameter's gradient against the double-precision oracle and its finite differences, equalities
// between models, initial values, generation, norms, presets and refusals.
#include "kernels/check.h"
#include "kernels/rng.h"
#include "model/model.h"
#include "tests/ref/model_ref.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
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

// ---- a run of the model on virtual ranks, seen through Hugging Face names ------------------------------------------------

typedef struct Job {
    ModelConfig c;
    ModelRun run;
    int world, R, nodes;       // ranks, of which R form an EP group
    int B, T;                  // sequences of a rank's microbatch; run.micros of them
    const int *tok, *target, *first; // (micros, world, B, T)
    const RefTable *load;      // parameters to use instead of the initial ones
    int observe;               // also evaluate and generate before the backward
    int forward, backward;
    // results, written by the ranks
    RefTable *w, *g;           // parameters, gradients
    int tensors;               // distinct tensors met
    double nll, aux, z, norm[16];
    int decode_n, decode_chunk; // tokens to decode; at once
    wide *logits;              // (decode_n,V); with chunks only each chunk's last
    int64_t *seen;
} Job;

static Cost costs(int N, int G, int S) {
    return (Cost){.name = "test", .N = N, .G = G, .S = S, .pair_compute_ps = 1000, .pair_inter_ps = 10, .pair_intra_ps = 1,
                  .copy_inter_ps = 20, .copy_intra_ps = 2};
}

// HF tensors <-> a rank's parameters. what: 'l' loads parameters, 'w' and 'g' read parameters and gradients.
static void exchange(Job *job, Dev *d, Model *m, const RefTable *table, char what) {
    Params *ps = model_params(m);
    for (int i = 0; i < ps->n; i++) {
        const Param *p = &ps->p[i];
        int units = p->owner == OWNER_EXPERT ? p->n_experts : 1;
        for (int k = 0; k < units * p->n_pieces; k++) {
            int e = k / p->n_pieces;
            const Piece *piece = &p->pieces[k % p->n_pieces];
            char name[96];
            snprintf(name, sizeof name, piece->format, p->layer, p->first_expert + e);
            RefTensor *t = ref_find(table, name);
            size_t n = (size_t)(piece->rows * (piece->cols ? piece->cols : 1)), at = (size_t)e * p->n_unit + (size_t)piece->first;
            if (!t || t->n != n) {
                job->tensors = -1000000;
                fprintf(stderr, "%s: no such tensor of %zu elements in the oracle\n", name, n);
                return;
            }
            if (what == 'w') job->tensors++;
            if (p->owner == OWNER_STATE) {
                wide *x = param_state(ps, p) + at, *host = host_alloc(n * sizeof *host);
                for (size_t j = 0; j < n; j++) host[j] = (wide)t->w[j];
                if (what == 'l') dev_upload(d, x, host, n * sizeof *x);
                dev_download(d, host, x, n * sizeof *x);
                for (size_t j = 0; j < n && what == 'w'; j++) t->w[j] = host[j];
                free(host);
                continue;
            }
            real *host = host_alloc(n * sizeof *host);
            for (size_t j = 0; j < n; j++) host[j] = (real)t->w[j];
            if (what == 'l') dev_upload(d, param_w(ps, p) + at, host, n * sizeof *host);
            if (what == 'w') dev_download(d, host, param_w(ps, p) + at, n * sizeof *host);
            if (what == 'g') dev_download(d, host, param_g(ps, p) + at, n * sizeof *host);
            for (size_t j = 0; j < n && what != 'l'; j++) t->w[j] = host[j];
            free(host);
        }
    }
}

static void decode(Job *job, Model *m) {
    for (int pos = 0; pos < job->decode_n; pos += job->decode_chunk) {
        int n = job->decode_n - pos < job->decode_chunk ? job->decode_n - pos : job->decode_chunk;
        model_decode(m, job->logits + (size_t)(pos + n - 1) * (size_t)job->c.V, job->tok + pos, n, pos);
    }
}

static void rank_body(Comm *world, void *arg) {
    Job *job = arg;
    int me = comm_info(world)->rank, BT = job->B * job->T;
    // One rank without experts exchanges nothing, so nothing but an op may touch device memory.
    Dev *d = dev_init((DevOptions){.threads = 1, .poison = 1, .strict = job->c.E == 0 && job->world == 1});
    Comm *ep = comm_block(world, job->R);
    Model *m = model_init(d, world, ep, &job->c, &job->run);
    if (job->load) exchange(job, d, m, job->load, 'l');
    comm_barrier(world);
    for (int r = 0; r < job->world; r++) { // experts from every rank, one rank at a time
        if (r == me && job->w && (r == 0 || r < job->R)) exchange(job, d, m, job->w, 'w');
        comm_barrier(world);
    }
    if (job->backward) model_zero_grad(m);
    for (int micro = 0; micro < job->run.micros && job->forward; micro++) {
        size_t at = (size_t)(micro * job->world + me) * (size_t)BT;
        const int *tok = job->tok + at, *target = job->target + at, *first = job->first ? job->first + at : NULL;
        int64_t tokens = (int64_t)BT * job->world * job->run.micros;
        if (job->observe) {
            model_forward(m, tok, target, first, job->B, job->T, 0, tokens, 0);
            wide *row = host_alloc(SIZE(job->c.V, sizeof(wide)));
            model_decode(m, row, job->tok, job->T / 2, 0);
            model_nll(m);
            free(row);
        }
        model_forward(m, tok, target, first, job->B, job->T, micro, tokens, job->backward);
        if (job->backward) model_backward(m);
        if (job->observe) model_decode(m, job->logits, job->tok, 1, 0);
    }
    double nll = model_nll(m);
    comm_sum_double(world, &nll, 1);
    if (job->backward) {
        model_reduce_grads(m);
        model_grad_norm(m, &job->norm[me]);
    }
    MoeStats s = {0};
    if (model_moe(m) && job->backward) moe_stats(model_moe(m), &s);
    if (me == 0) {
        job->nll = nll, job->aux = s.aux, job->z = s.z;
        int moe_layers = 0;
        for (int l = 0; l < job->c.L; l++) moe_layers += !job->c.dense[l];
        if (job->seen && s.seen) memcpy(job->seen, s.seen, (size_t)moe_layers * (size_t)job->c.E * sizeof(int64_t));
    }
    for (int r = 0; r < job->world; r++) {
        if (r == me && job->g && r < job->R) exchange(job, d, m, job->g, 'g');
        comm_barrier(world);
    }
    if (job->decode_n) decode(job, m);
    model_free(m);
    comm_free(ep);
    dev_free(d);
}

static void run_job(Job *job) {
    int N = job->nodes ? job->nodes : 1, ep_nodes = N > 1 ? job->R * N / job->world : 1;
    if (ep_nodes < 1) ep_nodes = 1;
    job->run.cost = costs(ep_nodes, job->R / ep_nodes, job->run.S);
    job->tensors = 0;
    comm_run(NULL, NULL, job->world, job->nodes, rank_body, job);
}

// ---- cases ------------------------------------------------------------------------------------------------------------

static ModelConfig small_config(void) {
    return (ModelConfig){.V = 11, .C = 8, .L = 2, .NH = 2, .NKV = 1, .HS = 4, .T = 8, .E = 4, .K = 2, .F = 3, .F_dense = 5, .renorm = 1,
                         .routed_scale = 1, .theta = 100, .eps = 1e-6, .init_std = 0.4};
}

static RefConfig ref_config(const ModelConfig *c, const ModelRun *r) {
    RefConfig k = {.V = c->V, .C = c->C, .L = c->L, .NH = c->NH, .NKV = c->NKV, .HS = c->HS, .E = c->E, .K = c->K, .F = c->F,
                   .F_dense = c->F_dense, .n_shared = c->n_shared, .sigmoid = c->score == ROUTER_SIGMOID, .renorm = c->renorm,
                   .bias = c->bias, .tied = c->tied, .doc_mask = c->doc_mask, .routed_scale = c->routed_scale, .theta = c->theta,
                   .eps = c->eps, .aux_coef = r->aux_coef, .z_coef = r->z_coef,
                   .scope = r->scope == AUX_SEQ ? REF_SEQ : r->scope == AUX_MICRO ? REF_MICRO : REF_GLOBAL};
    memcpy(k.dense, c->dense, sizeof k.dense);
    return k;
}

typedef struct Data {
    int tok[512], target[512], first[512];
} Data;

static Data make_data(int sequences, int T, int V) {
    Data d;
    for (int i = 0; i < sequences * T; i++) {
        d.tok[i] = (int)(rng_u64(11, 1, (uint64_t)i) % (uint64_t)V);
        d.target[i] = (int)(rng_u64(11, 2, (uint64_t)i) % (uint64_t)V);
        d.first[i] = i % T < 2 ? 0 : i % T < 4 ? 2 : 4; // three documents
        if (i % 13 == 5) d.target[i] = -1;
    }
    return d;
}

// Norm weights and biases away from their initial values, so that nothing hides behind ones and zeros.
static void disturb(RefTable *w) {
    for (int i = 0; i < w->n; i++) {
        RefTensor *t = &w->t[i];
        int bias = strstr(t->name, "e_score_correction_bias") != NULL;
        if (!bias && !strstr(t->name, "norm")) continue;
        for (size_t j = 0; j < t->n; j++) t->w[j] = (real)((bias ? 0 : 1) + 0.2 * rng_normal(5, rng_name(t->name), j));
    }
}

static Job make_job(const ModelConfig *c, const ModelRun *run, int world, int R, int B, int T, const Data *data) {
    Job job = {.c = *c, .run = *run, .world = world, .R = R, .B = B, .T = T, .tok = data->tok, .target = data->target,
               .first = c->doc_mask ? data->first : NULL};
    job.run.max_B = B;
    job.run.T = c->T;
    if (!job.run.micros) job.run.micros = 1;
    job.run.seed = 3;
    job.run.plan = (PlanOptions){.policy = POLICY_TOPOEP, .block = 1};
    return job;
}

// Parameters of a job's model as initialised, norms and biases disturbed. The oracle's table must be met exactly.
static RefTable initial(Job job, const RefConfig *rc) {
    RefTable w = ref_table(rc);
    job.w = &w;
    job.run.training = 0;
    run_job(&job);
    int expected = w.n;
    for (int i = 0; i < w.n; i++) expected += strstr(w.t[i].name, "experts.") ? 0 : job.R - 1; // met on each rank
    for (int i = 0; i < w.n; i++) expected -= strstr(w.t[i].name, "shared_experts.") ? 1 - job.R : 0;
    assert_int_equal(job.tensors, expected);
    disturb(&w);
    return w;
}

static RefLoss oracle(const Job *job, const RefConfig *rc, const RefTable *w) {
    RefBatch batch[64];
    int n = job->world * job->run.micros;
    for (int i = 0; i < n; i++) {
        int at = i * job->B * job->T;
        batch[i] = (RefBatch){job->B, job->T, job->tok + at, job->target + at, job->first ? job->first + at : NULL};
    }
    return ref_loss(rc, w, batch, n);
}

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

// Choices of a skewed router on text-like tokens (frequencies of English letters): the share of the expert at every place of the
// law, mean over layers and seeds. One layer's shares scatter about it: a choice depends mostly on the token, and few letters make
// up most of a text.
static void skewed_shares(double *share, double *scatter, double skew) {
    enum { B = 4, T = 64, SEEDS = 12 };
    ModelConfig c;
    config_preset(&c, "demo");
    c.router_skew = skew;
    int tok[B * T];
    const char *letters = "                  eeeeeeeeeetttttttaaaaaaoooooonnnnnniiiiisssssrrrrrhhhhhllldddduuccmmwwffggyyppbbvk,.";
    for (int i = 0; i < B * T; i++) tok[i] = letters[rng_u64(8, 8, (uint64_t)i) % strlen(letters)];
    int64_t seen[32];
    Job job = {.c = c, .world = 1, .R = 1, .B = B, .T = T, .tok = tok, .target = tok, .seen = seen};
    job.run = (ModelRun){.max_B = B, .T = T, .micros = 1, .training = 1, .plan = {.policy = POLICY_TOPOEP, .block = 1}};
    job.forward = job.backward = 1;
    memset(share, 0, (size_t)c.E * sizeof(double));
    *scatter = 0;
    for (int seed = 0; seed < SEEDS; seed++) {
        job.run.seed = (uint64_t)seed;
        run_job(&job);
        for (int l = 0; l < c.L; l++)
            for (int e = 0; e < c.E; e++) {
                char name[32];
                snprintf(name, sizeof name, "layers.%d.router", l);
                uint64_t place = rng_permute(job.run.seed, rng_name(name), (uint64_t)e, (uint64_t)c.E);
                double p = (double)seen[l * c.E + e] / (B * T * c.K);
                share[place] += p / (SEEDS * c.L);
                *scatter += fabs(p - 1.0 / (double)(place + 1) / 2.717857) / 2 / (SEEDS * c.L);
            }
    }
}

static void test_skew(void **state) {
    (void)state;
    for (int skew = 1; skew >= 0; skew--) {
        double share[8], scatter, off = 0;
        skewed_shares(share, &scatter, skew);
        for (int e = 0; e < 8; e++) off += fabs(share[e] - 1.0 / (e + 1) / 2.717857) / 2;
        print_message("skew %d: %.3f %.3f %.3f %.3f %.3f %.3f %.3f %.3f, mean %.3f from the law of exponent 1, one layer %.3f\n",
                      skew, share[0], share[1], share[2], share[3], share[4], share[5], share[6], share[7], off, scatter);
        if (skew) assert_true(off < 0.06 && scatter < 0.3);
        else assert_true(off > 0.06); // the plain router does not pass for a skewed one
    }
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
    Dev *d = dev_init((DevOptions){.threads = 1});
    Comm *ep = comm_block(world, job->R);
    Model *m = model_init(d, world, ep, &job->c, &job->run);
    Params *ps = model_params(m);
    double each = 1.0 / comm_info(world)->size, each_expert = (double)job->R / comm_info(world)->size;
    model_zero_grad(m);
    dev_fill(d, (real *)ps->repl_g, ps->n_repl, each);
    dev_fill(d, (real *)ps->expert_g, ps->n_expert, each_expert);
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

// ---- configurations --------------------------------------------------------------------------------------------------------

static void test_presets(void **state) {
    (void)state;
    const struct { const char *name; double params, within; } sizes[] = {
        {"1m", 1e6, 0.1}, {"5m", 5e6, 0.1}, {"25m", 25e6, 0.1}, {"100m", 100e6, 0.1}, {"300m", 300e6, 0.1}, {"gpt2-124m", 124e6, 0.02},
        {"demo", 2.6e6, 0.05}, {"dots-tiny", 1.6e6, 0.05}, {"tiny", 20e6, 0.05}, {"fine", 39e6, 0.05}, {"small", 259e6, 0.05},
    };
    char *names = strdup(config_presets()), *save = NULL;
    size_t n = 0;
    for (char *name = strtok_r(names, "|", &save); name; name = strtok_r(NULL, "|", &save), n++) {
        ModelConfig c;
        config_preset(&c, name);
        config_check(&c, NULL);
        ModelSize s = config_size(&c);
        print_message("%-10s %11lld parameters %11lld active %12lld FLOPs per token\n", name, (long long)s.params, (long long)s.active,
                      (long long)s.flops_per_token);
        size_t i = 0;
        while (i < sizeof sizes / sizeof *sizes && strcmp(sizes[i].name, name) != 0) i++;
        assert_true(i < sizeof sizes / sizeof *sizes);
        assert_true(fabs((double)s.params - sizes[i].params) <= sizes[i].within * sizes[i].params);
        assert_true(s.active <= s.params && s.active > 0);
    }
    assert_int_equal(n, sizeof sizes / sizeof *sizes);
    free(names);
    // by hand: 11*8 twice; per layer 8+8+4+4, 16*8, 8*8, router 32, experts 4*72; final norm 8. Active: 2 of 4 experts.
    ModelConfig c = small_config();
    ModelSize s = config_size(&c);
    int layer = 24 + 128 + 64 + 32;
    assert_int_equal(s.params, 2 * 88 + 2 * (layer + 288) + 8);
    assert_int_equal(s.active, 2 * 88 + 2 * (layer + 144) + 8);
    assert_int_equal(s.flops_per_token, 6 * (88 + 2 * (128 + 64 + 32 + 144)) + 6 * 2 * 8 * 8);
}

// The process that checks c must end with STATUS_USAGE and say `text`.
static void refuses(const ModelConfig *c, const char *preset, const char *text) {
    int pipes[2];
    assert_int_equal(pipe(pipes), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(pipes[1], 2);
        close(pipes[0]);
        ModelConfig copy;
        if (preset) config_preset(&copy, preset);
        else config_check(c, NULL);
        _exit(0);
    }
    close(pipes[1]);
    char out[1024] = {0};
    size_t n = 0;
    for (ssize_t got; n < sizeof out - 1 && (got = read(pipes[0], out + n, sizeof out - 1 - n)) > 0;) n += (size_t)got;
    close(pipes[0]);
    int status;
    waitpid(pid, &status, 0);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), STATUS_USAGE);
    if (!strstr(out, text)) fail_msg("the message is \"%s\", it does not say \"%s\"", out, text);
}

static void test_refusals(void **state) {
    (void)state;
    const ModelConfig good = small_config();
    ModelConfig c;
    refuses(NULL, "giant", "demo|1m");
#define REFUSE(change, text) (c = good, change, refuses(&c, NULL, text))
    REFUSE(c.V = 1, "vocabulary (V) is 1");
    REFUSE(c.C = 0, "width (C) is 0");
    REFUSE(c.L = 257, "layers (L) is 257, it must be 1..256");
    REFUSE(c.NKV = 0, "key/value heads (NKV) is 0");
    REFUSE((c.NH = 3, c.NKV = 2), "multiple of its key/value heads (NKV), 2");
    REFUSE(c.HS = 5, "head size (HS) is 5, it must be even");
    REFUSE(c.T = 0, "sequence length (T) is 0");
    REFUSE(c.E = -1, "experts (E) is -1");
    REFUSE(c.E = 0, "no experts");
    REFUSE(c.K = 5, "K = 5 experts per token, it must be 1..4");
    REFUSE(c.K = 0, "K = 0 experts");
    REFUSE(c.K = 1, "renormalised");
    REFUSE(c.F = 0, "expert width (F) is 0");
    REFUSE((c.dense[0] = 1, c.F_dense = 0), "1 dense layers of width (F_dense) 0");
    REFUSE(c.n_shared = -1, "shared experts is -1");
    REFUSE(c.routed_scale = 0, "routed scale is 0");
    REFUSE(c.routed_scale = NAN, "routed scale is nan");
    REFUSE(c.theta = 0, "RoPE base (theta) is 0");
    REFUSE(c.eps = -1, "norm epsilon is -1");
    REFUSE(c.init_std = 0, "initial deviation is 0");
    REFUSE(c.router_skew = -1, "router skew is -1");
    REFUSE(c.score = 7, "router score is 7");
#undef REFUSE
    config_check(&good, NULL);
}

static void report(void **state) {
    (void)state;
    print_message("largest errors: loss %.3f of its bound, gradients %.3f of theirs\n", measured_loss, measured_grad);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_presets),    cmocka_unit_test(test_refusals), cmocka_unit_test(test_init_ranks),
        cmocka_unit_test(test_gradients),  cmocka_unit_test(test_ranks),    cmocka_unit_test(report),
        cmocka_unit_test(test_dense_equality), cmocka_unit_test(test_observe), cmocka_unit_test(test_decode),
        cmocka_unit_test(test_norm),       cmocka_unit_test(test_skew),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
