// The backward pass: forward.c upside down, but for the head, whose gradient d_nf the forward has already made. dx is the gradient of the residual stream, from the last layer to the first.
#include "model/state.h"

// What the forward did not keep of layer l. The last layer's is still in the buffers that all layers share.
static void make_again(Model *m, int l, int B, int T, const int *first) {
    const ModelConfig *c = &m->c;
    const Block *b = &m->blocks[l];
    Recompute again = l + 1 < c->L ? m->run.recompute : RECOMPUTE_NONE;
    int BT = B * T;
    dev_stage(m->d, STAGE_ATTENTION);
    if (again >= RECOMPUTE_BLOCK) {
        forward_attention(m, l, B, T, NO_CACHE, first);
    } else if (again >= RECOMPUTE_NORMS) {
        dev_rmsnorm(m->d, b->n1, b->rstd1, b->x, b->w_ln1, BT, c->C, (wide)c->eps);
        dev_qk_rope(m->d, b->qk, b->qk_rstd, b->qkv, b->w_qnorm, b->w_knorm, B, T, 0, c->NH, c->NKV, c->HS, c->theta, (wide)c->eps);
        dev_rmsnorm(m->d, b->n2, b->rstd2, b->xmid, b->w_ln2, BT, c->C, (wide)c->eps);
    }
    dev_stage(m->d, STAGE_EXPERTS);
    if (again >= RECOMPUTE_UP && b->moe < 0) ffn_up(m->d, b->gu, b->n2, b->w_mlp, BT, c->C, c->F_dense);
}

static void backward_block(Model *m, int l) {
    const ModelConfig *c = &m->c;
    const Block *b = &m->blocks[l];
    Dev *d = m->d;
    int B = m->B, T = m->T, BT = B * T, C = c->C, NH = c->NH, NKV = c->NKV, HS = c->HS;
    int ld_qk = (NH + NKV) * HS, ld_qkv = (NH + 2 * NKV) * HS;
    const real *k = b->qk + NH * HS, *v = b->qkv + ld_qk;
    AttnShape shape = {.B = B, .Tq = T, .Tk = T, .NH = NH, .NKV = NKV, .HS = HS, .ldq = ld_qk, .ldk = ld_qk, .ldv = ld_qkv};
    const int *first = m->masked ? m->first + m->at : NULL;

    make_again(m, l, B, T, first);
    dev_stage(d, STAGE_EXPERTS);
    if (b->moe >= 0) moe_backward(m->moe, b->moe, m->dn, m->dx, b->n2, B, T, m->pass);
    else ffn_backward(d, m->dn, b->g_mlp, b->gu, m->h, m->dh, NULL, m->dx, b->n2, b->w_mlp, BT, C, c->F_dense);
    dev_stage(d, STAGE_EXPERTS);
    dev_rmsnorm_bwd(d, m->dx, b->g_ln2, m->dx, m->dn, b->xmid, b->w_ln2, b->rstd2, BT, C);

    dev_stage(d, STAGE_ATTENTION);
    dev_linear_dx(d, m->d_att, NULL, m->dx, b->w_o, BT, C, NH * HS);
    dev_linear_dw(d, b->g_o, m->dx, b->att, BT, C, NH * HS);
    dev_attention_bwd(d, m->d_qk, m->d_qk + NH * HS, m->d_qkv + ld_qk, m->d_att, b->att, b->lse, b->qk, k, v, first, shape);
    dev_qk_rope_bwd(d, m->d_qkv, b->g_qnorm, b->g_knorm, m->d_qk, b->qkv, b->w_qnorm, b->w_knorm, b->qk_rstd, B, T, NH, NKV,
                    HS, c->theta);
    dev_linear_dx(d, m->dn, NULL, m->d_qkv, b->w_qkv, BT, ld_qkv, C);
    dev_linear_dw(d, b->g_qkv, m->d_qkv, b->n1, BT, ld_qkv, C);
    dev_rmsnorm_bwd(d, m->dx, b->g_ln1, m->dx, m->dn, b->x, b->w_ln1, b->rstd1, BT, C);
}

void model_backward(Model *m) {
    CHECK_USAGE(m->trained, "model_backward needs a model_forward with train = 1 before it, and only once");
    Dev *d = m->d;
    int BT = m->B * m->T, C = m->c.C;
    dev_stage(d, STAGE_HEAD);
    dev_rmsnorm_bwd(d, m->dx, m->g_norm, NULL, m->d_nf, m->x_last, m->w_norm, m->rstdf, BT, C);
    for (int l = m->c.L - 1; l >= 0; l--) backward_block(m, l);
    dev_stage(d, STAGE_EMBED);
    dev_embed_bwd(d, m->g_embed, m->dx, m->tok + m->at, BT, C);
    dev_stage(d, STAGE_OTHER);
    m->trained = 0;
}
