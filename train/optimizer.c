#include "train/optimizer.h"

Optimizer optimizer_alloc(Dev *d, const Params *ps, const Options *o) {
    static const char *const names[STATES][2] = {{"master weights", "master weights of experts"},
                                                 {"first moments", "first moments of experts"},
                                                 {"second moments", "second moments of experts"}};
    dev_kind(d, MEMORY_OPTIMIZER);
    Optimizer opt = {.kind = o->optimizer, .beta1 = o->beta1, .beta2 = o->beta2, .eps = o->eps, .decay = o->weight_decay, .clip = o->clip};
    opt.factor = dev_alloc(d, sizeof(wide), "clip factor");
    opt.update = dev_alloc(d, 2 * sizeof(Update), "settings of the update");
    for (int s = 0; s < STATES; s++)
        for (int i = 0; i < 2; i++) {
            if (s == STATE_MASTER ? sizeof(real) == sizeof(wide) : opt.kind == OPTIMIZER_SGD) continue;
            opt.state[s][i] = dev_alloc(d, ps->arena[i].own.n * sizeof(wide), names[s][i]);
        }
    return opt;
}

// All are read before they are first written, and dev_alloc may have poisoned them.
void optimizer_start(Optimizer *opt, Dev *d, const Params *ps) {
    for (int s = 0; s < STATES; s++)
        for (int i = 0; i < 2; i++) {
            const Arena *a = &ps->arena[i];
            if (!opt->state[s][i]) continue;
            if (s == STATE_MASTER) dev_widen(d, opt->state[s][i], a->w + a->own.at, a->own.n);
            else dev_zero(d, opt->state[s][i], a->own.n * sizeof(wide));
        }
}

OptimizerPart optimizer_part(const Optimizer *opt, const Params *ps, const Param *p) {
    OptimizerPart part = {0};
    if (p->owner == OWNER_STATE) return part;
    CommPart own = ps->arena[p->owner].own;
    size_t from = own.at > p->offset ? own.at : p->offset, own_end = own.at + own.n, end = p->offset + p->n;
    end = own_end < end ? own_end : end;
    if (from >= end) return part;
    part.first = from - p->offset, part.n = end - from;
    for (int s = 0; s < STATES; s++)
        if (opt->state[s][p->owner]) part.state[s] = opt->state[s][p->owner] + (from - own.at);
    return part;
}

int optimizer_holder(const Params *ps, const Param *p, size_t at, size_t *until) {
    const Arena *a = &ps->arena[p->owner];
    *until = p->n;
    if (a->own.n == a->n) return 0;
    int holder = (int)((p->offset + at) / comm_part(a->ranks, 0, a->n).n);
    CommPart part = comm_part(a->ranks, holder, a->n);
    if (part.at + part.n - p->offset < p->n) *until = part.at + part.n - p->offset;
    return holder;
}

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
        OptimizerPart own = optimizer_part(opt, ps, p);
        if (own.n == 0) continue;
        const Update *u = opt->update + (p->decay != 0);
        real *w = param_w(ps, p) + own.first;
        wide *master = own.state[STATE_MASTER], *g = param_g(ps, p) + own.first;
        if (opt->kind == OPTIMIZER_SGD) dev_sgd(d, w, master, g, opt->factor, own.n, u);
        else dev_adamw(d, w, master, own.state[STATE_M], own.state[STATE_V], g, opt->factor, own.n, u);
    }
}
