#include "train/optimizer.h"

Optimizer optimizer_alloc(Dev *d, const Params *ps, const Options *o) {
    dev_kind(d, MEMORY_OPTIMIZER);
    Optimizer opt = {.kind = o->optimizer, .beta1 = o->beta1, .beta2 = o->beta2, .eps = o->eps, .decay = o->weight_decay, .clip = o->clip};
    opt.factor = dev_alloc(d, sizeof(wide), "clip factor");
    opt.update = dev_alloc(d, 2 * sizeof(Update), "settings of the update");
    size_t repl = ps->n_repl * sizeof(wide), expert = ps->n_expert * sizeof(wide);
    if (sizeof(real) < sizeof(wide)) {
        opt.repl_master = dev_alloc(d, repl, "master weights");
        opt.expert_master = dev_alloc(d, expert, "master weights of experts");
    }
    if (opt.kind == OPTIMIZER_SGD) return opt;
    opt.repl_m = dev_alloc(d, repl, "first moments");
    opt.repl_v = dev_alloc(d, repl, "second moments");
    opt.expert_m = dev_alloc(d, expert, "first moments of experts");
    opt.expert_v = dev_alloc(d, expert, "second moments of experts");
    return opt;
}

// All are read before they are first written, and dev_alloc may have poisoned them.
void optimizer_start(Optimizer *opt, Dev *d, const Params *ps) {
    size_t repl = ps->n_repl * sizeof(wide), expert = ps->n_expert * sizeof(wide);
    if (opt->repl_master) {
        dev_widen(d, opt->repl_master, ps->repl_w, ps->n_repl);
        dev_widen(d, opt->expert_master, ps->expert_w, ps->n_expert);
    }
    if (opt->kind == OPTIMIZER_SGD) return;
    dev_zero(d, opt->repl_m, repl);
    dev_zero(d, opt->repl_v, repl);
    dev_zero(d, opt->expert_m, expert);
    dev_zero(d, opt->expert_v, expert);
}

static wide *moment(wide *repl, wide *expert, const Param *p) {
    wide *arena = p->owner == OWNER_REPL ? repl : p->owner == OWNER_EXPERT ? expert : NULL;
    return arena ? arena + p->offset : NULL;
}

wide *optimizer_m(const Optimizer *opt, const Param *p) { return moment(opt->repl_m, opt->expert_m, p); }
wide *optimizer_v(const Optimizer *opt, const Param *p) { return moment(opt->repl_v, opt->expert_v, p); }
wide *optimizer_master(const Optimizer *opt, const Param *p) { return moment(opt->repl_master, opt->expert_master, p); }

void optimizer_set(Optimizer *opt, Dev *d, double lr, int64_t step) {
    Update u[2];
    for (int i = 0; i < 2; i++)
        u[i] = (Update){.lr = lr, .beta1 = opt->beta1, .beta2 = opt->beta2, .eps = opt->eps, .decay = i ? opt->decay : 0, .step = step};
    dev_upload(d, opt->update, u, sizeof u);
}

void optimizer_step(Optimizer *opt, Dev *d, const Params *ps, const double *sumsq) {
    dev_clip_factor(d, opt->factor, sumsq, opt->clip);
    for (int i = 0; i < ps->n; i++) {
        const Param *p = &ps->p[i];
        if (p->owner == OWNER_STATE || p->n == 0) continue;
        const Update *u = opt->update + (p->decay != 0);
        real *w = param_w(ps, p);
        wide *master = optimizer_master(opt, p), *g = param_g(ps, p);
        if (opt->kind == OPTIMIZER_SGD) dev_sgd(d, w, master, g, opt->factor, p->n, u);
        else dev_adamw(d, w, master, optimizer_m(opt, p), optimizer_v(opt, p), g, opt->factor, p->n, u);
    }
}
