// Generation: the forward pass of new tokens only, against the keys and values that the tokens before left behind.
#include "model/state.h"

void model_decode(Model *m, wide *logits, const int *tok, int n, int pos) {
    const ModelConfig *c = &m->c;
    Dev *d = m->d;
    CHECK_USAGE(n >= 1 && pos >= 0 && n <= m->run.T - pos,
                "%d tokens at position %d, the context is %d tokens (hint: a longer context, or a shorter prompt)", n, pos, m->run.T);
    CHECK_USAGE(pos == 0 || pos == m->cached, "a token at position %d after %d cached ones, sequences are continued at their end",
                pos, m->cached);
    CHECK_USAGE(m->blocks[0].old_qk, "a model that trains with recomputation was made without room for generation (ModelRun.generate)");
    for (int i = 0; i < n; i++)
        CHECK_USAGE(tok[i] >= 0 && tok[i] < c->V, "token %d at position %d, the model's vocabulary is %d", tok[i], pos + i, c->V);

    dev_stage(d, STAGE_EMBED);
    dev_upload(d, m->tok, tok, SIZE(n, sizeof(int)));
    do {
        dev_embed(d, m->blocks[0].x, m->w_embed, m->tok, n, c->C);
        for (int l = 0; l < c->L; l++)
            forward_block(m, l, l + 1 < c->L ? m->blocks[l + 1].x : m->x_last, 1, n, pos, NULL, (MoePass){.count = 0});
    } while (model_grow(m));
    dev_stage(d, STAGE_HEAD);
    dev_rmsnorm(d, m->nf, m->rstdf, m->x_last + SIZE(n - 1, c->C), m->w_norm, 1, c->C, (wide)c->eps);
    dev_linear(d, m->logits, NULL, m->nf, m->w_head, 1, c->V, c->C);
    dev_download(d, m->row, m->logits, SIZE(c->V, sizeof(real)));
    for (int i = 0; i < c->V; i++) logits[i] = (wide)real_value(m->row[i]);
    dev_stage(d, STAGE_OTHER);
    m->trained = 0; // the activations of the last forward are gone
    m->cached = pos + n;
}
