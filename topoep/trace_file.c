#include "topoep/trace_file.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char magic[] = "MOEROUTE";
enum { MAX_RANKS = 65536, MAX_LAYERS = 1024 };
enum { MAGIC = 8, INTS = 17, FIXED = MAGIC + 3 * 4 + 4 * INTS + 32 + 64, DEMAND = 8 + 4 * 4 + 10 * 8 + 8, TIMES = 8 + 2 * 4 };

// ---- writing ------------------------------------------------------------------------------------------------------------
typedef struct Out {
    FILE *file;
    const char *path;
} Out;
static void put(Out o, const void *data, size_t bytes) {
    CHECK_DATA(fwrite(data, 1, bytes, o.file) == bytes, "cannot write %s: %s (hint: is the disk full?)", o.path, strerror(errno));
}
static void put_int(Out o, int64_t v) { put(o, &(int32_t){(int32_t)v}, 4); }
static void put_long(Out o, int64_t v) { put(o, &v, 8); }

// The header's numbers, in the file's order
static void header_ints(int *v[INTS], TraceHeader *h) {
    int *const order[INTS] = {&h->R, &h->N, &h->G, &h->groups, &h->E, &h->K, &h->S, &h->C, &h->F, &h->shared, &h->layers, &h->micros,
                              &h->micro_tokens, &h->elem_bytes, &h->grad_bytes, &h->crossing_pairs, &h->stages};
    memcpy(v, order, sizeof order);
}

void trace_write_header(FILE *f, const char *path, const TraceHeader *h) {
    Out o = {f, path};
    TraceHeader copy = *h;
    int *v[INTS];
    header_ints(v, &copy);
    put(o, magic, MAGIC);
    put_int(o, TRACE_ORDER);
    put_int(o, TRACE_VERSION);
    put_int(o, FIXED + 16 * h->stages);
    for (int i = 0; i < INTS; i++) put_int(o, *v[i]);
    put(o, h->policy, sizeof h->policy);
    put(o, h->cost, sizeof h->cost);
    put(o, h->stage, SIZE(16, h->stages));
}

void trace_write(FILE *f, const char *path, const TraceHeader *h, const TraceRecord *r) {
    Out o = {f, path};
    const PlanInfo *p = &r->plan;
    put_int(o, r->kind);
    if (r->kind == TRACE_TIMES) {
        size_t n = SIZE(r->ranks, h->stages, sizeof(float));
        put_int(o, TIMES + (int64_t)n);
        put_long(o, r->step);
        put_int(o, r->ranks);
        put_int(o, h->stages);
        put(o, r->ms, n);
        return;
    }
    size_t n = SIZE(h->R, h->E, sizeof(int32_t));
    const int64_t small[] = {r->micro, r->group, r->layer, p->copies};
    const int64_t large[] = {p->max_load_before, p->max_load, p->cost_ps, p->identity_ps, p->pairs_self, p->pairs_node,
                             p->pairs_inter, p->inter_copies + p->node_copies, r->crossings, r->passed_on, (int64_t)p->hash};
    put_int(o, DEMAND + (int64_t)n);
    put_long(o, r->step);
    for (int i = 0; i < 4; i++) put_int(o, small[i]);
    for (int i = 0; i < 11; i++) put_long(o, large[i]);
    put(o, r->D, n);
}

// ---- reading ------------------------------------------------------------------------------------------------------------
struct TraceReader {
    const char *path;
    char *bytes;
    size_t size, at;
    TraceHeader h;
    int *D;
    float *ms;
};

static int32_t get_int(TraceReader *t) {
    int32_t v;
    memcpy(&v, t->bytes + t->at, 4);
    t->at += 4;
    return v;
}
static int64_t get_long(TraceReader *t) {
    int64_t v;
    memcpy(&v, t->bytes + t->at, 8);
    t->at += 8;
    return v;
}

static void header_check(const TraceHeader *h, const char *path) {
    CHECK_DATA(h->R > 0 && h->N > 0 && h->G > 0 && (int64_t)h->N * h->G == h->R && h->R <= PLAN_MAX_R,
               "%s: a header of %d ranks = %d nodes of %d, expected 1 to %d ranks", path, h->R, h->N, h->G, PLAN_MAX_R);
    CHECK_DATA(h->E > 0 && h->E <= PLAN_MAX_E && h->E % h->R == 0 && h->K > 0 && h->K <= h->E && h->S >= 0 && h->S <= PLAN_MAX_S,
               "%s: a header of %d experts, %d per token, %d slots, for %d ranks", path, h->E, h->K, h->S, h->R);
    CHECK_DATA(h->groups > 0 && h->C > 0 && h->F > 0 && h->shared >= 0 && h->layers > 0 && h->micros > 0 && h->micro_tokens >= 0,
               "%s: a header of %d groups, widths %d, %d and %d, %d layers, %d microbatches of %d tokens", path, h->groups, h->C,
               h->F, h->shared, h->layers, h->micros, h->micro_tokens);
    CHECK_DATA((int64_t)h->R * h->groups <= MAX_RANKS && h->layers <= MAX_LAYERS, // memory is asked for by these
               "%s: a header of %d groups of %d ranks, %d layers, expected at most %d ranks, %d layers", path, h->groups, h->R,
               h->layers, MAX_RANKS, MAX_LAYERS);
    CHECK_DATA(h->elem_bytes > 0 && h->elem_bytes <= 8 && h->grad_bytes > 0 && h->grad_bytes <= 8,
               "%s: a header of %d and %d bytes per element, expected 1 to 8", path, h->elem_bytes, h->grad_bytes);
    CHECK_DATA(h->crossing_pairs > 0 && h->crossing_pairs <= h->K, "%s: a header of %d pairs to a crossing, expected 1 to %d", path,
               h->crossing_pairs, h->K);
}

TraceReader *trace_read_open(const char *path, TraceHeader *h) {
    TraceReader *t = host_alloc(sizeof *t);
    t->path = path;
    t->bytes = file_read(path, &t->size);
    CHECK_DATA(t->size >= FIXED && memcmp(t->bytes, magic, MAGIC) == 0,
               "%s is no trace: %zu bytes that do not begin with %s (hint: build/train --trace-every writes traces)", path,
               t->size, magic);
    t->at = MAGIC;
    int order = get_int(t), version = get_int(t), bytes = get_int(t);
    CHECK_DATA(order == TRACE_ORDER, "%s was written on a machine of another byte order: %08x, expected %08x", path,
               (unsigned)order, TRACE_ORDER);
    CHECK_DATA(version == TRACE_VERSION, "%s is a trace of version %d, expected %d (hint: record it again with this build/train)",
               path, version, TRACE_VERSION);
    int *v[INTS];
    header_ints(v, &t->h);
    for (int i = 0; i < INTS; i++) *v[i] = get_int(t);
    CHECK_DATA(t->h.stages >= 0 && t->h.stages <= TRACE_STAGES && bytes == FIXED + 16 * t->h.stages && (size_t)bytes <= t->size,
               "%s: a header of %d bytes with %d stages, in a file of %zu bytes", path, bytes, t->h.stages, t->size);
    header_check(&t->h, path);
    memcpy(t->h.policy, t->bytes + t->at, sizeof t->h.policy);
    memcpy(t->h.cost, t->bytes + t->at + sizeof t->h.policy, sizeof t->h.cost);
    memcpy(t->h.stage, t->bytes + FIXED, SIZE(16, t->h.stages));
    t->h.policy[sizeof t->h.policy - 1] = t->h.cost[sizeof t->h.cost - 1] = '\0';
    for (int i = 0; i < t->h.stages; i++) t->h.stage[i][15] = '\0';
    t->at = (size_t)bytes;
    t->D = host_alloc(SIZE(t->h.R, t->h.E, sizeof(int)));
    *h = t->h;
    return t;
}

static void read_demand(TraceReader *t, TraceRecord *r) {
    const TraceHeader *h = &t->h;
    PlanInfo *p = &r->plan;
    r->micro = get_int(t), r->group = get_int(t), r->layer = get_int(t), p->copies = get_int(t);
    int64_t *const large[] = {&p->max_load_before, &p->max_load, &p->cost_ps, &p->identity_ps, &p->pairs_self, &p->pairs_node,
                              &p->pairs_inter, &p->inter_copies, &r->crossings, &r->passed_on};
    for (int i = 0; i < 10; i++) *large[i] = get_long(t);
    p->hash = (uint64_t)get_long(t);
    CHECK_DATA(r->micro >= 0 && r->micro < h->micros && r->group >= 0 && r->group < h->groups && r->layer >= 0 &&
               r->layer < h->layers, "%s: at %zu a record of microbatch %d, group %d, layer %d, expected below %d, %d, %d",
               t->path, t->at, r->micro, r->group, r->layer, h->micros, h->groups, h->layers);
    size_t n = SIZE(h->R, h->E);
    memcpy(t->D, t->bytes + t->at, n * sizeof(int));
    t->at += n * sizeof(int);
    for (size_t i = 0; i < n; i++) {
        CHECK_DATA(t->D[i] >= 0, "%s: step %lld, layer %d: %d pairs of source %zu for expert %zu, expected 0 or more", t->path,
                   (long long)r->step, r->layer, t->D[i], i / (size_t)h->E, i % (size_t)h->E);
        p->total += t->D[i];
    }
    CHECK_DATA(p->total <= INT32_MAX, "%s: step %lld, layer %d: %lld pairs in all, expected at most %d", t->path,
               (long long)r->step, r->layer, (long long)p->total, INT32_MAX);
    r->D = t->D;
}

TraceKind trace_read(TraceReader *t, TraceRecord *r) {
    *r = (TraceRecord){.kind = TRACE_END};
    if (t->size - t->at < 8) return TRACE_END;
    size_t begin = t->at;
    int kind = get_int(t);
    int64_t bytes = (uint32_t)get_int(t), left = (int64_t)(t->size - t->at), demand = DEMAND + (int64_t)SIZE(t->h.R, t->h.E, 4);
    CHECK_DATA(kind == TRACE_DEMAND || kind == TRACE_TIMES, "%s: at %zu a record of kind %d, expected %d or %d", t->path, begin,
               kind, TRACE_DEMAND, TRACE_TIMES);
    CHECK_DATA(kind == TRACE_TIMES ? bytes >= TIMES : bytes == demand, "%s: at %zu a record of %lld bytes, expected %lld", t->path,
               begin, (long long)bytes, kind == TRACE_TIMES ? (long long)TIMES : (long long)demand);
    if (left < bytes) { // the run was killed here
        t->at = t->size;
        return TRACE_END;
    }
    r->step = get_long(t);
    if (kind == TRACE_DEMAND) {
        read_demand(t, r);
    } else {
        int ranks = r->ranks = get_int(t), stages = get_int(t);
        CHECK_DATA(stages == t->h.stages && ranks == t->h.R * t->h.groups && bytes == TIMES + (int64_t)SIZE(ranks, stages, 4),
                   "%s: at %zu times of %d ranks and %d stages in %lld bytes, expected %d and %d", t->path, begin, ranks, stages,
                   (long long)bytes, t->h.R * t->h.groups, t->h.stages);
        if (!t->ms) t->ms = host_alloc(SIZE(ranks, stages, sizeof(float)));
        memcpy(t->ms, t->bytes + t->at, SIZE(ranks, stages, sizeof(float)));
        t->at += SIZE(ranks, stages, sizeof(float));
        r->ms = t->ms;
    }
    return r->kind = (TraceKind)kind;
}

void trace_read_close(TraceReader *t) {
    free(t->bytes), free(t->D), free(t->ms);
    free(t);
}
