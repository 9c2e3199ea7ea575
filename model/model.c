// The model's life: parameters, buffers, and what happens to gradients between backward and update.
#include "model/state.h"
#include <math.h>
#include <stdlib.h>

// Logits in memory at once: few enough to stay small beside the weights, rows enough that the head's product is efficient: each
// piece of rows reads the head's weights twice and its gradient once, so pieces are few and nearly equal.
static int rows_of_logits(const ModelConfig *c, size_t n) {
    size_t most = ((size_t)1 << 24) / (size_t)c->V;
    most = most < 512 ? 512 : most > 1024 ? 1024 : most;
    size_t pieces = (n + most - 1) / most;
    return (int)((n + pieces - 1) / pieces);
}

static void bind_block(Model *m, int l) {
    Block *b = &m->blocks[l];
    Params *ps = &m->ps;
    const struct { const char *name; const real **w; wide **g; } table[] = {
        {"ln1", &b->w_ln1, &b->g_ln1}, {"qkv", &b->w_qkv, &b->g_qkv}, {"q_norm", &b->w_qnorm, &b->g_qnorm},
        {"k_norm", &b->w_knorm, &b->g_knorm}, {"wo", &b->w_o, &b->g_o}, {"ln2", &b->w_ln2, &b->g_ln2},
        {"mlp", &b->w_mlp, &b->g_mlp},
    };
    int n = sizeof(table) / sizeof(table[0]);
    for (int i = 0; i < (m->c.dense[l] ? n : n - 1); i++) {
        const Param *p = param_find(ps, table[i].name, l);
        *table[i].w = param_w(ps, p);
        *table[i].g = param_g(ps, p);
    }
}

// The layer whose buffer layer l has for what level `again` makes again; NULL: it has one of its own
static const Block *shared_from(const Model *m, int l, Recompute again) {
    return l > 0 && m->run.recompute >= again ? &m->blocks[0] : NULL;
}

static void alloc_block(Model *m, int l) {
    const ModelConfig *c = &m->c;
    int training = m->run.training, generate = training && m->run.generate;
    Block *b = &m->blocks[l];
    const Block *norms = shared_from(m, l, RECOMPUTE_NORMS), *all = shared_from(m, l, RECOMPUTE_BLOCK);
    const Block *x = training || l == 0 ? NULL : &m->blocks[0]; // without a backward
    int64_t n = (int64_t)m->run.max_B * m->run.T;
    size_t rows = SIZE(n, c->C, sizeof(real));
    int64_t ld_qkv = (int64_t)SIZE(c->NH + 2 * c->NKV, c->HS), ld_qk = (int64_t)SIZE(c->NH + c->NKV, c->HS);
    if (!training) norms = all = x;
    Dev *d = m->d;
    dev_kind(d, MEMORY_ACTIVATIONS);
    b->x = x ? x->x : dev_alloc(d, rows, "residual stream");
    b->n1 = norms ? norms->n1 : dev_alloc(d, rows, "norm 1");
    b->qkv = all && training ? all->qkv : dev_alloc(d, SIZE(n, ld_qkv, sizeof(real)), "qkv");
    b->qk = norms && training ? norms->qk : dev_alloc(d, SIZE(n, ld_qk, sizeof(real)), "queries and keys");
    int own_qkv = !training || m->run.recompute < RECOMPUTE_BLOCK, own_qk = !training || m->run.recompute < RECOMPUTE_NORMS;
    b->old_qkv = own_qkv ? b->qkv : generate ? dev_alloc(d, SIZE(m->run.T, ld_qkv, sizeof(real)), "values seen") : NULL;
    b->old_qk = own_qk ? b->qk : generate ? dev_alloc(d, SIZE(m->run.T, ld_qk, sizeof(real)), "keys seen") : NULL;
    b->xmid = all ? all->xmid : dev_alloc(d, rows, "residual stream after attention");
    b->n2 = norms ? norms->n2 : dev_alloc(d, rows, "norm 2");
    b->att = all ? all->att : dev_alloc(d, SIZE(n, c->NH, c->HS, sizeof(real)), "attention");
    b->rstd1 = norms ? norms->rstd1 : dev_alloc(d, SIZE(n, sizeof(wide)), "norm 1 statistics");
    b->rstd2 = norms ? norms->rstd2 : dev_alloc(d, SIZE(n, sizeof(wide)), "norm 2 statistics");
    b->qk_rstd = norms ? norms->qk_rstd : dev_alloc(d, SIZE(n, c->NH + c->NKV, sizeof(wide)), "QK-norm statistics");
    b->lse = all ? all->lse : dev_alloc(d, SIZE(n, c->NH, sizeof(wide)), "softmax statistics");
    if (!c->dense[l]) return;
    for (int i = 0; i < l && (!training || m->run.recompute >= RECOMPUTE_UP); i++)
        if (m->blocks[i].gu) b->gu = m->blocks[i].gu;
    if (!b->gu) b->gu = dev_alloc(d, SIZE(n, 2, c->F_dense, sizeof(real)), "gate and up");
}

static void alloc_shared(Model *m) {
    const ModelConfig *c = &m->c;
    Dev *d = m->d;
    int64_t n = (int64_t)m->run.max_B * m->run.T;
    int any_dense = 0;
    for (int l = 0; l < c->L; l++) any_dense |= c->dense[l];
    m->head_rows = rows_of_logits(c, (size_t)n);
    dev_kind(d, MEMORY_WORKSPACE);
    m->x_last = m->run.training ? dev_alloc(d, SIZE(n, c->C, sizeof(real)), "residual stream") : m->blocks[0].x;
    m->nf = dev_alloc(d, SIZE(n, c->C, sizeof(real)), "final norm");
    m->rstdf = dev_alloc(d, SIZE(n, sizeof(wide)), "final norm statistics");
    m->logits = dev_alloc(d, SIZE(m->head_rows, c->V, sizeof(real)), "logits");
    m->nll = dev_alloc(d, SIZE(n, sizeof(wide)), "losses of tokens");
    m->nll_sum = dev_alloc(d, sizeof(double), "loss");
    m->sumsq = dev_alloc(d, 3 * sizeof(double), "gradient norm");
    m->tok = dev_alloc(d, SIZE(m->run.micros, n, sizeof(int)), "tokens");
    m->target = dev_alloc(d, SIZE(m->run.micros, n, sizeof(int)), "targets");
    m->first = dev_alloc(d, SIZE(m->run.micros, n, sizeof(int)), "document starts");
    m->row = host_alloc(SIZE(c->V, sizeof(real)));
    if (any_dense) m->h = dev_alloc(d, SIZE(n, c->F_dense, sizeof(real)), "hidden of dense layers");
    dev_zero(d, m->nll_sum, sizeof(double));
    if (!m->run.training) return;
    m->d_nf = dev_alloc(d, SIZE(n, c->C, sizeof(real)), "gradient of the final norm");
    m->dx = dev_alloc(d, SIZE(n, c->C, sizeof(real)), "gradient of the residual stream");
    m->dn = dev_alloc(d, SIZE(n, c->C, sizeof(real)), "gradient of a norm");
    m->d_att = dev_alloc(d, SIZE(n, c->NH, c->HS, sizeof(real)), "gradient of attention");
    m->d_qk = dev_alloc(d, SIZE(n, c->NH + c->NKV, c->HS, sizeof(real)), "gradient of queries and keys");
    m->d_qkv = dev_alloc(d, SIZE(n, c->NH + 2 * c->NKV, c->HS, sizeof(real)), "gradient of qkv");
    if (any_dense) m->dh = dev_alloc(d, SIZE(n, c->F_dense, sizeof(real)), "gradient of dense layers' hidden");
}

// Where the parameters of MoE layer i, which is layer l of the model, lie.
static MoeParams moe_binding(Model *m, int i, int l) {
    Params *ps = &m->ps;
    int R = comm_info(m->ep)->size;
    const Param *router = param_find(ps, "router", l), *experts = param_find(ps, "experts", l);
    const Param *bias = m->c.bias ? param_find(ps, "bias", l) : NULL;
    const Param *shared = m->c.n_shared ? param_find(ps, "shared", l) : NULL;
    real **table = m->expert_tables + SIZE(i, R);
    for (int r = 0; r < R; r++) table[r] = ps->expert_peer[r] ? (real *)ps->expert_peer[r] + experts->offset : NULL;
    return (MoeParams){
        .router = param_w(ps, router), .d_router = param_g(ps, router),
        .bias = bias ? param_state(ps, bias) : NULL,
        .experts = table, .d_experts = param_g(ps, experts),
        .shared = shared ? param_w(ps, shared) : NULL, .d_shared = shared ? param_g(ps, shared) : NULL,
    };
}

static void init_moe(Model *m) {
    const ModelConfig *c = &m->c;
    const ModelRun *r = &m->run;
    m->expert_tables = host_alloc(SIZE(m->n_moe, comm_info(m->ep)->size, sizeof(real *)));
    m->moe_params = host_alloc(SIZE(m->n_moe, sizeof(MoeParams)));
    for (int l = 0; l < c->L; l++)
        if (m->blocks[l].moe >= 0) m->moe_params[m->blocks[l].moe] = moe_binding(m, m->blocks[l].moe, l);
    MoeConfig moe = {
        .C = c->C, .E = c->E, .K = c->K, .F = c->F, .shared = c->n_shared * c->F, .score = c->score, .renorm = c->renorm,
        .routed_scale = c->routed_scale, .capacity = r->capacity, .layers = m->n_moe, .max_BT = r->max_B * r->T,
        .micros = r->micros, .training = r->training, .recompute = r->recompute, .scope = r->scope, .S = r->S, .recv_room = r->recv_room,
        .dedup = r->dedup, .even = r->even, .cost = r->cost, .plan = r->plan,
    };
    m->moe = moe_init(m->d, m->ep, m->world, moe, m->moe_params);
}

static void check_run(const ModelConfig *c, const ModelRun *r) {
    CHECK_USAGE(r->max_B >= 1 && r->micros >= 1,
                "a rank's microbatch has at most %d sequences and a step %d microbatches, both must be at least 1", r->max_B, r->micros);
    CHECK_USAGE(r->T >= 1 && r->T <= c->T, "the context is %d tokens, it must be 1..%d, the model's longest (hint: --seq)", r->T, c->T);
    CHECK_USAGE((int64_t)r->max_B * r->T <= 1 << 24,
                "a microbatch of %d sequences of %d tokens is past %d tokens (hint: a smaller --micro-batch)", r->max_B, r->T, 1 << 24);
    CHECK_USAGE(r->aux_coef >= 0 && r->z_coef >= 0,
                "the balance loss's coefficient is %g and the z-loss's %g, neither may be negative", r->aux_coef, r->z_coef);
}

Model *model_alloc(Dev *d, Comm *world, Comm *ep, const ModelConfig *c, const ModelRun *run) {
    config_check(c, NULL);
    check_run(c, run);
    Model *m = host_alloc(sizeof *m);
    *m = (Model){.d = d, .world = world, .ep = ep, .c = *c, .run = *run};
    int R = comm_info(ep)->size;
    params_build(&m->ps, c, comm_info(ep)->rank, R);
    for (int i = 0; i < 2; i++) {
        Arena *a = &m->ps.arena[i];
        a->ranks = i == OWNER_REPL ? world : run->replicas ? run->replicas : comm_stride(world, R);
        a->own = run->zero ? comm_part(a->ranks, comm_info(a->ranks)->rank, a->n) : (CommPart){0, a->n};
    }
    params_alloc(&m->ps, d, ep, run->training);
    m->blocks = host_alloc(SIZE(c->L, sizeof(Block)));
    for (int l = 0; l < c->L; l++) {
        m->blocks[l].moe = c->dense[l] ? -1 : m->n_moe++;
        bind_block(m, l);
        alloc_block(m, l);
    }
    const Param *embed = param_find(&m->ps, "embed", -1), *norm = param_find(&m->ps, "norm", -1);
    const Param *head = c->tied ? embed : param_find(&m->ps, "head", -1);
    m->w_embed = param_w(&m->ps, embed), m->g_embed = param_g(&m->ps, embed);
    m->w_norm = param_w(&m->ps, norm), m->g_norm = param_g(&m->ps, norm);
    m->w_head = param_w(&m->ps, head), m->g_head = param_g(&m->ps, head);
    alloc_shared(m);
    if (m->n_moe) init_moe(m);
    dev_kind(d, MEMORY_WORKSPACE);
    return m;
}

void model_draw(Model *m) {
    params_init(&m->ps, m->d, &m->c, m->run.seed);
    comm_barrier(m->world); // every rank's experts are there before a peer reads them
}

Model *model_init(Dev *d, Comm *world, Comm *ep, const ModelConfig *c, const ModelRun *run) {
    Model *m = model_alloc(d, world, ep, c, run);
    model_draw(m);
    return m;
}

void model_free(Model *m) {
    if (m->moe) moe_free(m->moe);
    if (!m->run.replicas) comm_free(m->ps.arena[OWNER_EXPERT].ranks);
    params_free(&m->ps);
    free(m->moe_params);
    free(m->expert_tables);
    free(m->blocks);
    free(m->row);
    free(m);
}

Params *model_params(Model *m) { return &m->ps; }
Moe *model_moe(Model *m) { return m->moe; }
const ModelConfig *model_config(const Model *m) { return &m->c; }

void model_zero_grad(Model *m) {
    for (int i = 0; i < 2; i++) dev_zero(m->d, m->ps.arena[i].g, m->ps.arena[i].n * sizeof(wide));
}

double model_nll(Model *m) {
    double sum;
    dev_download(m->d, &sum, m->nll_sum, sizeof sum);
    dev_zero(m->d, m->nll_sum, sizeof sum);
    return sum;
}

int model_grow(Model *m) {
    if (!m->moe || !moe_grow(m->moe)) return 0;
    dev_zero(m->d, m->nll_sum, sizeof *m->nll_sum);
    return 1;
}

void model_reduce_grads(Model *m) {
    dev_stage(m->d, STAGE_REDUCE);
    for (int i = 0; i < 2; i++) {
        const Arena *a = &m->ps.arena[i];
        if (m->run.zero) comm_sum_part(a->ranks, a->g, a->n);
        else comm_sum(a->ranks, a->g, a->n);
    }
    dev_stage(m->d, STAGE_OTHER);
}

void model_share_params(Model *m) {
    dev_stage(m->d, STAGE_REDUCE);
    for (int i = 0; i < 2 && m->run.zero; i++) {
        const Arena *a = &m->ps.arena[i];
        comm_share_parts(a->ranks, a->w, a->n, sizeof(real));
    }
    dev_stage(m->d, STAGE_OTHER);
}

double *model_grad_norm(Model *m, double *norm) {
    dev_stage(m->d, STAGE_REDUCE);
    int layers = 0;
    const int *faults = m->moe ? moe_faults(m->moe, &layers) : NULL;
    dev_zero(m->d, m->sumsq, 2 * sizeof(double));
    for (int i = 0; i < 2; i++) { // every element is in one rank's part, whoever updates it: the same bits with and without zero
        const Arena *a = &m->ps.arena[i];
        CommPart part = comm_part(a->ranks, comm_info(a->ranks)->rank, a->n);
        dev_sumsq(m->d, &m->sumsq[i], a->g + part.at, part.n);
    }
    dev_veto(m->d, &m->sumsq[2], m->nll_sum, faults, layers);
    comm_dev_sum_double(m->world, m->sumsq, 3);
    dev_total(m->d, m->sumsq, 3);
    if (norm) {
        dev_download(m->d, norm, m->sumsq, sizeof *norm);
        *norm = sqrt(*norm);
    }
    dev_stage(m->d, STAGE_OTHER);
    return m->sumsq;
}
