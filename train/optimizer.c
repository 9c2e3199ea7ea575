#include "train/optimizer.h"

Optimizer optimizer_init(Dev *d, const Params *ps, const Options *o) {
    Optimizer opt = {.kind = o->optimizer, .beta1 = o->beta1, .beta2 = o->beta2, .eps = o->eps, .decay = o->weight_decay, .clip = o->clip};
    opt.factor = dev_alloc(d, sizeof(wide), "clip factor");
    if (opt.kind == OPTIMIZER_SGD) return opt;
    size_t repl = ps->n_repl * sizeof(wide), expert = ps->n_expert * sizeof(wide);
    opt.repl_m = dev_alloc(d, repl, "first moments");
    opt.repl_v = dev_alloc(d, repl, "second moments");
    opt.expert_m = dev_alloc(d, expert, "first moments of experts");
    opt.expert_v = dev_alloc(d, expert, "second moments of experts");
    // they are read before they are first written, and dev_alloc may have poisoned them
    dev_zero(d, opt.repl_m, repl);
    dev_zero(d, opt.repl_v, repl);
    dev_zero(d, opt.expert_m, expert);
    dev_zero(d, opt.expert_v, expert);
    return opt;
}

static wide *moment(wide *repl, wide *expert, const Param *p) {
    wide *arena = p->owner == OWNER_REPL ? repl : p->owner == OWNER_EXPERT ? expert : NULL;
    return arena ? arena + p->offset : NULL;
}

wide *optimizer_m(const Optimizer *opt, const Param *p) { return moment(opt->repl_m, opt->expert_m, p); }
wide *optimizer_v(const Optimizer *opt, const Param *p) { return moment(opt->repl_v, opt->expert_v, p); }

void optimizer_step(Optimizer *opt, Dev *d, const Params *ps, const double *sumsq, double lr, int64_t step) {
    dev_clip_factor(d, opt->factor, sumsq, opt->clip);
    for (int i = 0; i < ps->n; i++) {
        const Param *p = &ps->p[i];
        if (p->owner == OWNER_STATE || p->n == 0) continue;
        double decay = p->decay ? opt->decay : 0;
        AdamW adam = {.lr = lr, .beta1 = opt->beta1, .beta2 = opt->beta2, .eps = opt->eps, .decay = decay, .step = step};
        if (opt->kind == OPTIMIZER_SGD) dev_sgd(d, param_w(ps, p), param_g(ps, p), opt->factor, p->n, lr, decay);
        else dev_adamw(d, param_w(ps, p), optimizer_m(opt, p), optimizer_v(opt, p), param_g(ps, p), opt->factor, p->n, adam);
    }
}
