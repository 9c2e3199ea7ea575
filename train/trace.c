#include "train/trace.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct Trace {
    FILE *file;      // rank 0
    char *path;
    TraceHeader h;
    Comm *leaders;   // the ranks with the same place in every EP group; rank 0's: the groups' first ranks
    int *D, *all;    // (R,E), (groups,R,E)
};

static TraceHeader make_header(const Trainer *r) {
    const CommInfo *ep = comm_info(r->ep);
    TraceHeader h = {.R = ep->size, .N = ep->N, .G = ep->G, .groups = r->share.groups, .E = r->c.E, .K = r->c.K, .S = r->cost.S, .C = r->c.C,
                     .F = r->c.F, .shared = r->c.n_shared * r->c.F, .micros = r->share.micros, .micro_tokens = r->share.micro * r->c.T,
                     .elem_bytes = sizeof(real), .grad_bytes = sizeof(wide), .crossing_pairs = moe_crossing_pairs(r->moe), .stages = STAGES};
    for (int l = 0; l < r->c.L; l++) h.layers += !r->c.dense[l];
    snprintf(h.policy, sizeof h.policy, "%s", options_balance(&r->o));
    snprintf(h.cost, sizeof h.cost, "%s", r->cost.name);
    for (int i = 0; i < STAGES; i++) snprintf(h.stage[i], sizeof h.stage[i], "%s", stage_names[i]);
    return h;
}

Trace *trace_open(const Trainer *r) {
    Trace *t = host_alloc(sizeof *t);
    size_t n = SIZE(r->share.R, r->c.E);
    t->h = make_header(r);
    t->leaders = comm_stride(r->world, r->share.R);
    t->D = host_alloc(n * sizeof(int));
    t->all = host_alloc(SIZE(r->share.groups, (int64_t)n, sizeof(int)));
    if (r->info->rank != 0) return t;
    char *name = r->at.step ? str_format("route_%08lld.bin", (long long)r->at.step) : str_format("route.bin");
    t->path = path_join(r->out, name);
    free(name);
    t->file = fopen(t->path, "wb");
    CHECK_DATA(t->file, "cannot create %s: %s", t->path, strerror(errno));
    trace_write_header(t->file, t->path, &t->h);
    fflush(t->file);
    return t;
}

void trace_close(Trace *t) {
    if (t->file) CHECK_DATA(fclose(t->file) == 0, "cannot write %s: %s (hint: is the disk full?)", t->path, strerror(errno));
    comm_free(t->leaders);
    free(t->D);
    free(t->all);
    free(t->path);
    free(t);
}

void trace_step(Trace *t, const Trainer *r, const StepStats *s) {
    size_t n = SIZE(r->share.R, r->c.E);
    PlanInfo *info = host_alloc(SIZE(r->share.groups, sizeof *info)), own;
    int64_t *traffic = host_alloc(SIZE(r->share.groups, 2, sizeof *traffic)), part[2];
    for (int micro = 0; micro < r->share.micros; micro++)
        for (int layer = 0; layer < t->h.layers; layer++) {
            moe_demand(r->moe, micro, layer, t->D, &own, part);
            comm_sum_int64(r->ep, part, 2);
            comm_allgather(t->leaders, t->all, t->D, n * sizeof(int));
            comm_allgather(t->leaders, info, &own, sizeof own);
            comm_allgather(t->leaders, traffic, part, sizeof part);
            for (int g = 0; g < r->share.groups && t->file; g++)
                trace_write(t->file, t->path, &t->h, &(TraceRecord){.kind = TRACE_DEMAND, .step = s->step, .micro = micro, .group = g, .layer = layer,
                                                                   .plan = info[g], .crossings = traffic[2 * g], .passed_on = traffic[2 * g + 1], .D = t->all + SIZE(g, (int64_t)n)});
        }
    free(info), free(traffic);
    int ranks = r->info->size;
    float mine[STAGES], *all = host_alloc(SIZE(ranks, STAGES, sizeof(float)));
    for (int i = 0; i < STAGES; i++) mine[i] = (float)s->own_ms[i];
    comm_allgather(r->world, all, mine, sizeof mine);
    if (t->file) {
        trace_write(t->file, t->path, &t->h, &(TraceRecord){.kind = TRACE_TIMES, .step = s->step, .ranks = ranks, .ms = all});
        CHECK_DATA(fflush(t->file) == 0, "cannot write %s: %s (hint: is the disk full?)", t->path, strerror(errno));
    }
    free(all);
}
