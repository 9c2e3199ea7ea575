// The forward pass, in reading order. backward.c is this list upside down.
#include "model/state.h"

void forward_attention(Model *m, int l, int B, int T, int pos, const int *first) {
    const ModelConfig *c = &m->c;
    const Block *b = &m->blocks[l];
    Dev *d = m->d;
    int BT = B * T, C = c->C, NH = c->NH, NKV = c->NKV, HS = c->HS, ld_qk = (NH + NKV) * HS, ld_qkv = (NH + 2 * NKV) * HS;
    real *all_qkv = pos == NO_CACHE ? b->qkv : b->old_qkv, *all_qk = pos == NO_CACHE ? b->qk : b->old_qk;
    if (pos == NO_CACHE) pos = 0;
    real *qkv = all_qkv + SIZE(pos, ld_qkv), *qk = all_qk + SIZE(pos, ld_qk); // of the new tokens
    const real *k = all_qk + NH * HS, *v = all_qkv + ld_qk;                    // of all of them
    AttnShape shape = {.B = B, .Tq = T, .Tk = pos + T, .NH = NH, .NKV = NKV, .HS = HS, .ldq = ld_qk, .ldk = ld_qk, .ldv = ld_qkv};

    dev_stage(d, STAGE_ATTENTION);
    dev_rmsnorm(d, b->n1, b->rstd1, b->x, b->w_ln1, BT, C, (wide)c->eps);
    dev_linear(d, qkv, NULL, b->n1, b->w_qkv, BT, ld_qkv, C);
    dev_qk_rope(d, qk, b->qk_rstd, qkv, b->w_qnorm, b->w_knorm, B, T, pos, NH, NKV, HS, c->theta, (wide)c->eps);
    dev_attention(d, b->att, b->lse, qk, k, v, first, shape);
    dev_linear(d, b->xmid, b->x, b->att, b->w_o, BT, C, NH * HS);

    dev_stage(d, STAGE_EXPERTS);
    dev_rmsnorm(d, b->n2, b->rstd2, b->xmid, b->w_ln2, BT, C, (wide)c->eps);
}

void forward_block(Model *m, int l, real *to, int B, int T, int pos, const int *first, MoePass pass) {
    const Block *b = &m->blocks[l];
    forward_attention(m, l, B, T, pos, first);
    if (b->moe >= 0) moe_forward(m->moe, b->moe, to, b->xmid, b->n2, B, T, pass);
    else ffn_forward(m->d, to, b->gu, m->h, b->xmid, b->n2, b->w_mlp, B * T, m->c.C, m->c.F_dense);
}

// Logits exist for a block of rows at a time, so their gradient is used here, where they are.
static void forward_head(Model *m, int BT, int train, wide scale) {
    int C = m->c.C, V = m->c.V;
    Dev *d = m->d;
    dev_stage(d, STAGE_HEAD);
    dev_rmsnorm(d, m->nf, m->rstdf, m->x_last, m->w_norm, BT, C, (wide)m->c.eps);
    for (int t = 0; t < BT; t += m->head_rows) {
        int rows = BT - t < m->head_rows ? BT - t : m->head_rows;
        real *nf = m->nf + SIZE(t, C);
        dev_linear(d, m->logits, NULL, nf, m->w_head, rows, V, C);
        dev_cross_entropy(d, m->nll + t, m->logits, m->target + m->at + t, rows, V, scale, train);
        if (!train) continue;
        dev_linear_dx(d, m->d_nf + SIZE(t, C), NULL, m->logits, m->w_head, rows, V, C);
        dev_linear_dw(d, m->g_head, m->logits, nf, rows, V, C);
    }
    dev_sum(d, m->nll_sum, m->nll, (size_t)BT);
    dev_stage(d, STAGE_OTHER);
}

void model_load(Model *m, const int *tok, const int *target, const int *first, int B, int T, int micro) {
    CHECK_USAGE(B >= 0 && B <= m->run.max_B && T >= 1 && T <= m->run.T && micro >= 0 && micro < m->run.micros,
                "microbatch %d of %d sequences of %d tokens, the model has room for %d of %d of %d", micro, B, T, m->run.micros, m->run.max_B,
                m->run.T);
    size_t at = SIZE(micro, m->run.max_B, m->run.T), bytes = SIZE(B, T, sizeof(int));
    m->masked = m->c.doc_mask && first;
    dev_upload(m->d, m->tok + at, tok, bytes);
    dev_upload(m->d, m->target + at, target, bytes);
    if (m->masked) dev_upload(m->d, m->first + at, first, bytes);
}

void model_pass(Model *m, int B, int T, int micro, int64_t step_tokens, int train) {
    CHECK_USAGE(!train || m->run.training, "the model was made without gradients, it cannot train");
    const ModelConfig *c = &m->c;
    Dev *d = m->d;
    int BT = B * T;
    // of a token in an MoE layer's losses
    double weight = m->n_moe && step_tokens ? 1.0 / ((double)m->n_moe * (double)step_tokens) : 0;
    m->B = B, m->T = T, m->at = SIZE(micro, m->run.max_B, m->run.T), m->trained = train, m->cached = 0;
    m->pass = (MoePass){.aux_scale = m->run.aux_coef * weight, .z_scale = m->run.z_coef * weight, .micro = micro, .count = train};

    dev_stage(d, STAGE_EMBED);
    dev_embed(d, m->blocks[0].x, m->w_embed, m->tok + m->at, BT, c->C);
    const int *first = m->masked ? m->first + m->at : NULL;
    for (int l = 0; l < c->L; l++) forward_block(m, l, l + 1 < c->L ? m->blocks[l + 1].x : m->x_last, B, T, NO_CACHE, first, m->pass);
    forward_head(m, BT, train, step_tokens ? (wide)(1.0 / (double)step_tokens) : 0);
}

void model_forward(Model *m, const int *tok, const int *target, const int *first, int B, int T, int micro, int64_t step_tokens,
                   int train) {
    model_load(m, tok, target, first, B, T, micro);
    model_pass(m, B, T, micro, step_tokens, train);
}
