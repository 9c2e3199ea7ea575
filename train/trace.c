#include "train/trace.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct Trace {
    FILE *file;      // rank 0
    char *path;
    Comm *leaders;   // the ranks with the same place in every EP group; rank 0's: the groups' first ranks
    int *D, *all;    // (R,E), (groups,R,E)
};

static void put(Trace *t, const void *data, size_t bytes) {
    CHECK_DATA(fwrite(data, 1, bytes, t->file) == bytes, "cannot write %s: %s (hint: is the disk full?)", t->path, strerror(errno));
}
static void put_int(Trace *t, int64_t v) {
    int32_t x = (int32_t)v;
    put(t, &x, sizeof x);
}
static void put_long(Trace *t, int64_t v) { put(t, &v, sizeof v); }
static void put_text(Trace *t, const char *text, size_t bytes) {
    char field[64] = "";
    snprintf(field, bytes, "%s", text);
    put(t, field, bytes);
}

static void write_header(Trace *t, const Trainer *r) {
    const CommInfo *ep = comm_info(r->ep);
    int layers = 0;
    for (int l = 0; l < r->c.L; l++) layers += !r->c.dense[l];
    const int values[] = {ep->size, ep->N, ep->G, r->share.groups, r->c.E, r->c.K, r->cost.S, r->c.C, r->c.F, layers, r->share.micros,
                          r->share.micro * r->c.T, (int)sizeof(real), STAGES};
    int n = sizeof values / sizeof *values;
    put(t, "MOEROUTE", 8);
    put_int(t, TRACE_ORDER);
    put_int(t, TRACE_VERSION);
    put_int(t, 8 + 12 + 4 * n + 32 + 64 + 16 * STAGES);
    for (int i = 0; i < n; i++) put_int(t, values[i]);
    put_text(t, policy_names[r->o.balance], 32);
    put_text(t, r->cost.name, 64);
    for (int i = 0; i < STAGES; i++) put_text(t, stage_names[i], 16);
}

Trace *trace_open(const Trainer *r) {
    Trace *t = host_alloc(sizeof *t);
    size_t n = SIZE(r->share.R, r->c.E);
    t->leaders = comm_stride(r->world, r->share.R);
    t->D = host_alloc(n * sizeof(int));
    t->all = host_alloc(SIZE(r->share.groups, (int64_t)n, sizeof(int)));
    if (r->info->rank != 0) return t;
    char *name = r->at.step ? str_format("route_%08lld.bin", (long long)r->at.step) : str_format("route.bin");
    t->path = path_join(r->out, name);
    free(name);
    t->file = fopen(t->path, "wb");
    CHECK_DATA(t->file, "cannot create %s: %s", t->path, strerror(errno));
    write_header(t, r);
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

static void write_times(Trace *t, const Trainer *r, int64_t step, const float *ms) {
    int ranks = r->info->size;
    put_int(t, TRACE_TIMES);
    put_int(t, 16 + 4 * (int64_t)ranks * STAGES);
    put_long(t, step);
    put_int(t, ranks);
    put_int(t, STAGES);
    put(t, ms, SIZE(ranks, STAGES, sizeof(float)));
}

static void write_demand(Trace *t, const Trainer *r, int64_t step, int micro, int group, int layer, const PlanInfo *p, const int *D) {
    size_t n = SIZE(r->share.R, r->c.E);
    put_int(t, TRACE_DEMAND);
    put_int(t, 8 + 16 + 32 + 4 * (int64_t)n);
    put_long(t, step);
    put_int(t, micro);
    put_int(t, group);
    put_int(t, layer);
    put_int(t, p->copies);
    put_long(t, p->max_load_before);
    put_long(t, p->max_load);
    put_long(t, p->cost_ps);
    put_long(t, p->identity_ps);
    put(t, D, n * sizeof(int));
}

void trace_step(Trace *t, const Trainer *r, const StepStats *s) {
    size_t n = SIZE(r->share.R, r->c.E);
    int layers = 0;
    for (int l = 0; l < r->c.L; l++) layers += !r->c.dense[l];
    PlanInfo *info = host_alloc(SIZE(r->share.groups, sizeof *info)), own;
    for (int micro = 0; micro < r->share.micros; micro++)
        for (int layer = 0; layer < layers; layer++) {
            moe_demand(r->moe, micro, layer, t->D, &own);
            comm_allgather(t->leaders, t->all, t->D, n * sizeof(int));
            comm_allgather(t->leaders, info, &own, sizeof own);
            for (int g = 0; g < r->share.groups && t->file; g++)
                write_demand(t, r, s->step, micro, g, layer, &info[g], t->all + SIZE(g, (int64_t)n));
        }
    free(info);
    int ranks = r->info->size;
    float mine[STAGES], *all = host_alloc(SIZE(ranks, STAGES, sizeof(float)));
    for (int i = 0; i < STAGES; i++) mine[i] = (float)s->own_ms[i];
    comm_allgather(r->world, all, mine, sizeof mine);
    if (t->file) {
        write_times(t, r, s->step, all);
        CHECK_DATA(fflush(t->file) == 0, "cannot write %s: %s (hint: is the disk full?)", t->path, strerror(errno));
    }
    free(all);
}
