// What a Model is made of. Private to model/.
#ifndef MOE_STATE_H
#define MOE_STATE_H
#include "kernels/check.h"
#include "model/model.h"

// One layer: its parameters (w_), their gradients (g_), and what its backward needs from the forward.
// Buffers have room for n = max_B * T tokens. All layers share what their backward makes again (Recompute); without training
// everything but qkv and qk.
typedef struct Block {
    int moe; // index among the MoE layers, -1: dense
    const real *w_ln1, *w_qkv, *w_qnorm, *w_knorm, *w_o, *w_ln2, *w_mlp;
    wide *g_ln1, *g_qkv, *g_qnorm, *g_knorm, *g_o, *g_ln2, *g_mlp;
    real *x;       // (n,C) input: the residual stream
    real *n1;      // (n,C) after the first norm
    real *qkv;     // (n, (NH+2NKV)HS)
    real *qk;      // (n, (NH+NKV)HS) queries and keys, normalised and rotated
    real *old_qkv, *old_qk; // as these two, for the positions that generation has seen: the same memory where that is this layer's own
    real *att;     // (n, NH*HS)
    real *xmid;    // (n,C) residual stream after attention
    real *n2;      // (n,C) after the second norm
    real *gu;      // (n, 2 F_dense), dense layers only
    wide *rstd1, *rstd2, *qk_rstd; // (n), (n), (n, NH+NKV)
    wide *lse;     // (max_B,NH,T)
} Block;

struct Model {
    Dev *d;
    Comm *world, *ep;
    ModelConfig c;
    ModelRun run;
    Params ps;
    Moe *moe;
    MoeParams *moe_params;
    real **expert_tables;        // (MoE layers, R) host: where every rank's experts of a layer lie
    int n_moe;
    Block *blocks;               // (L)
    const real *w_embed, *w_norm, *w_head;
    wide *g_embed, *g_norm, *g_head;
    real *x_last, *nf, *d_nf;    // (n,C) after the last layer, its norm, the norm's gradient
    wide *rstdf;                 // (n)
    int head_rows;               // rows of logits in memory at once
    real *logits;                // (head_rows,V)
    wide *nll;                   // (n)
    double *nll_sum;             // (1)
    double *sumsq;               // (3) of this rank's parts of both arenas' gradients, then of all; a veto (dev_veto)
    int *tok, *target, *first;   // (micros,n)
    real *h, *dh;                // (n,F_dense)
    real *dx, *dn, *d_att, *d_qk, *d_qkv; // gradients of x, n1 or n2, att, qk, qkv
    real *row;                   // host (V): a row of logits on its way out
    // the last forward
    int B, T, masked, trained;
    size_t at;                   // its tokens' place in tok, target, first
    MoePass pass;
    int cached;                  // positions whose keys and values are in qk and qkv, of one sequence
};

// params.c: the table for this rank's share of experts; then memory; then values.
void params_build(Params *ps, const ModelConfig *c, int rank, int R);
void params_alloc(Params *ps, Dev *d, Comm *ep, int training);
void params_init(Params *ps, Dev *d, const ModelConfig *c, uint64_t seed);
void params_free(Params *ps);

// skew.c: changes plain initial values so that the routers' choices follow a Zipf law of exponent c->router_skew.
void skew_init(Params *ps, Dev *d, const ModelConfig *c, uint64_t seed);

// forward.c: layer l for T tokens of each of B sequences: `to` (B*T,C) overwritten, the next layer's input. pos NO_CACHE: whole
// sequences; pos >= 0: B = 1, the tokens at positions pos.., and old_qk and old_qkv hold the positions before.
enum { NO_CACHE = -1 };
void forward_block(Model *m, int l, real *to, int B, int T, int pos, const int *first, MoePass pass);
// Its first half: everything from n1 to n2
void forward_attention(Model *m, int l, int B, int T, int pos, const int *first);
#endif
