#include "tests/common/model_job.h"
#include "kernels/check.h"
#include "kernels/rng.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

Cost costs(int N, int G, int S) {
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
            wide *full = p->owner == OWNER_STATE ? param_state(ps, p) + at : what == 'g' ? param_g(ps, p) + at : NULL;
            if (full) {
                wide *host = host_alloc(n * sizeof *host);
                for (size_t j = 0; j < n; j++) host[j] = (wide)t->w[j];
                if (what == 'l') dev_upload(d, full, host, n * sizeof *host);
                dev_download(d, host, full, n * sizeof *host);
                for (size_t j = 0; j < n && what == (p->owner == OWNER_STATE ? 'w' : 'g'); j++) t->w[j] = host[j];
                free(host);
                continue;
            }
            real *host = host_alloc(n * sizeof *host);
            for (size_t j = 0; j < n; j++) host[j] = real_of(t->w[j]);
            if (what == 'l') dev_upload(d, param_w(ps, p) + at, host, n * sizeof *host);
            if (what == 'w') dev_download(d, host, param_w(ps, p) + at, n * sizeof *host);
            for (size_t j = 0; j < n && what == 'w'; j++) t->w[j] = real_value(host[j]);
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
    Dev *d = dev_init((DevOptions){.threads = 1, .poison = 1, .shared = 1, .strict = job->c.E == 0 && job->world == 1});
    comm_bind(world, d);
    Comm *ep = comm_block(world, job->R);
    Model *m = model_init(d, world, ep, &job->c, &job->run);
    size_t bytes[MEMORY_KINDS];
    dev_taken(d, bytes);
    if (me == 0) job->kept = bytes[MEMORY_ACTIVATIONS] + bytes[MEMORY_WINDOWS];
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

void run_job(Job *job) {
    int N = job->nodes ? job->nodes : 1, ep_nodes = N > 1 ? job->R * N / job->world : 1;
    if (ep_nodes < 1) ep_nodes = 1;
    job->run.cost = costs(ep_nodes, job->R / ep_nodes, job->run.S);
    job->tensors = 0;
    comm_run(NULL, NULL, job->world, job->nodes, rank_body, job);
}

ModelConfig small_config(void) {
    return (ModelConfig){.V = 11, .C = 8, .L = 2, .NH = 2, .NKV = 1, .HS = 4, .T = 8, .E = 4, .K = 2, .F = 3, .F_dense = 5, .renorm = 1,
                         .routed_scale = 1, .theta = 100, .eps = 1e-6, .init_std = 0.4};
}

RefConfig ref_config(const ModelConfig *c, const ModelRun *r) {
    RefConfig k = {.V = c->V, .C = c->C, .L = c->L, .NH = c->NH, .NKV = c->NKV, .HS = c->HS, .E = c->E, .K = c->K, .F = c->F,
                   .F_dense = c->F_dense, .n_shared = c->n_shared, .sigmoid = c->score == ROUTER_SIGMOID, .renorm = c->renorm,
                   .bias = c->bias, .tied = c->tied, .doc_mask = c->doc_mask, .routed_scale = c->routed_scale, .theta = c->theta,
                   .eps = c->eps, .aux_coef = r->aux_coef, .z_coef = r->z_coef,
                   .scope = r->scope == AUX_SEQ ? REF_SEQ : r->scope == AUX_MICRO ? REF_MICRO : REF_GLOBAL};
    memcpy(k.dense, c->dense, sizeof k.dense);
    return k;
}

Data make_data(int sequences, int T, int V) {
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
        for (size_t j = 0; j < t->n; j++) t->w[j] = real_value(real_of((bias ? 0 : 1) + 0.2 * rng_normal(5, rng_name(t->name), j)));
    }
}

Job make_job(const ModelConfig *c, const ModelRun *run, int world, int R, int B, int T, const Data *data) {
    Job job = {.c = *c, .run = *run, .world = world, .R = R, .B = B, .T = T, .tok = data->tok, .target = data->target,
               .first = c->doc_mask ? data->first : NULL};
    job.run.max_B = B;
    job.run.T = c->T;
    if (!job.run.micros) job.run.micros = 1;
    job.run.seed = 3;
    job.run.plan = (PlanOptions){.policy = POLICY_TOPOEP, .block = 1};
    return job;
}

RefTable initial(Job job, const RefConfig *rc) {
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

RefLoss oracle(const Job *job, const RefConfig *rc, const RefTable *w) {
    RefBatch batch[64];
    int n = job->world * job->run.micros;
    for (int i = 0; i < n; i++) {
        int at = i * job->B * job->T;
        batch[i] = (RefBatch){job->B, job->T, job->tok + at, job->target + at, job->first ? job->first + at : NULL};
    }
    return ref_loss(rc, w, batch, n);
}
