#include "topoep/timeline.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include "topoep/replay_run.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct Drawn { // one sample
    int layer, micro;
    LayerTime t;
    int64_t *compute, *tokens; // (R) a rank's own
} Drawn;

struct Timeline {
    const char *path;
    TimeModel m;
    int row, n, room;
    int64_t step;
    double forward_weights; // share of the copies' time
    Drawn *drawn;
    FILE *file;
    int64_t at; // picoseconds
};

Timeline *timeline_open(const char *path, const TimeModel *m, const CostModel *model, int row) {
    Timeline *l = host_alloc(sizeof *l);
    *l = (Timeline){.path = path, .m = *m, .row = row, .step = -1};
    l->forward_weights = (double)model->weight_bytes / (2 * model->weight_bytes + model->grad_bytes);
    l->file = fopen(path, "w");
    CHECK_DATA(l->file, "cannot create %s", path);
    return l;
}

void timeline_see(void *timeline, int row, const Sample *s, const LayerTime *t, const RankSums *sums) {
    Timeline *l = timeline;
    if (l->step < 0) l->step = s->step;
    if (row != l->row || s->step != l->step || s->group != 0) return;
    if (l->n == l->room) {
        int room = l->room ? 2 * l->room : 64;
        Drawn *more = host_alloc(SIZE(room, sizeof *more));
        if (l->n) memcpy(more, l->drawn, SIZE(l->n, sizeof *more));
        free(l->drawn);
        l->drawn = more, l->room = room;
    }
    Drawn *d = &l->drawn[l->n++];
    *d = (Drawn){.layer = s->layer, .micro = s->micro, .t = *t};
    d->compute = host_alloc(SIZE(2, l->m.R, sizeof(int64_t)));
    d->tokens = d->compute + l->m.R;
    for (int r = 0; r < l->m.R; r++) {
        d->compute[r] = times_rank_compute(sums, &l->m, r);
        d->tokens[r] = times_rank_tokens(sums, &l->m, r);
    }
}

static void event(Timeline *l, const char *name, int layer, int rank, int64_t start, int64_t ps) {
    if (ps == 0) return;
    fprintf(l->file, ",\n{\"name\":\"%s\",\"cat\":\"layer %d\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.6f,\"dur\":%.6f}", name,
            layer, rank / l->m.cost.G, rank, 1e-6 * (double)start, 1e-6 * (double)ps);
}

// A phase of `ps` for all ranks, of which own[r] * ps / most are rank r's (own NULL: all of it), the rest waiting
static void phase(Timeline *l, const char *name, int layer, int64_t ps, const int64_t *own, int64_t most) {
    for (int r = 0; r < l->m.R; r++) {
        int64_t mine = own && most ? llround((double)own[r] / (double)most * (double)ps) : ps;
        event(l, name, layer, r, l->at, mine);
        event(l, "wait", layer, r, l->at + mine, ps - mine);
    }
    l->at += ps;
}

static void forward(Timeline *l, const Drawn *d, int64_t other) {
    const LayerTime *t = &d->t;
    phase(l, "other", d->layer, other / 3, NULL, 0);
    phase(l, "counts and plan", d->layer, t->counts + t->plan + t->fixed, NULL, 0);
    phase(l, "copies", d->layer, llround(l->forward_weights * (double)t->weights), NULL, 0);
    phase(l, "dispatch", d->layer, t->tokens / 4, d->tokens, t->tokens);
    phase(l, "experts", d->layer, t->compute / 3, d->compute, t->compute);
    phase(l, "combine", d->layer, t->tokens / 4, d->tokens, t->tokens);
}

static void backward(Timeline *l, const Drawn *d, int64_t other) {
    const LayerTime *t = &d->t;
    int64_t weights = t->weights - llround(l->forward_weights * (double)t->weights);
    int64_t again = llround(l->forward_weights * (double)t->weights), dispatch = t->tokens / 4;
    again = again < weights ? again : weights;
    phase(l, "copies", d->layer, again, NULL, 0);
    phase(l, "dispatch", d->layer, dispatch, d->tokens, t->tokens);
    phase(l, "experts", d->layer, t->compute - t->compute / 3, d->compute, t->compute);
    phase(l, "combine", d->layer, t->tokens - 3 * dispatch, d->tokens, t->tokens);
    phase(l, "copies' gradients", d->layer, weights - again, NULL, 0);
    phase(l, "other", d->layer, other - other / 3, NULL, 0);
}

void timeline_close(Timeline *l, double other_ms) {
    int64_t other = l->n ? llround(1e9 * other_ms / l->n) : 0; // of a sample
    const char *node = "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"node %d\"}}";
    const char *rank = ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"rank %d\"}}";
    fprintf(l->file, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    for (int n = 0; n < l->m.cost.N; n++) fprintf(l->file, n ? ",\n" : ""), fprintf(l->file, node, n, n);
    for (int r = 0; r < l->m.R; r++) fprintf(l->file, rank, r / l->m.cost.G, r, r);
    for (int first = 0, last; first < l->n; first = last) { // a microbatch forward, then back
        for (last = first; last < l->n && l->drawn[last].micro == l->drawn[first].micro; last++) forward(l, &l->drawn[last], other);
        for (int i = last; i-- > first;) backward(l, &l->drawn[i], other);
    }
    fprintf(l->file, "\n]}\n");
    CHECK_DATA(!ferror(l->file) && fclose(l->file) == 0, "cannot write %s (hint: is the disk full?)", l->path);
    for (int i = 0; i < l->n; i++) free(l->drawn[i].compute);
    free(l->drawn);
    free(l);
}
