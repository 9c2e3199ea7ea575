#include "topoep/source.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include <stdlib.h>
#include <string.h>

int source_is_trace(const char *name) { return file_size(name) >= 0; }

void source_trace(Source *s, const char *name, int R, int64_t tokens) {
    *s = (Source){0};
    s->trace = trace_read_open(name, &s->h);
    int from = s->h.R;
    s->R = R ? R : from, s->E = s->h.E;
    CHECK_USAGE(s->R % from == 0 || from % s->R == 0, "%s has %d ranks, which cannot be cut or joined to %d (hint: a multiple "
                "or a divisor)", name, from, s->R);
    CHECK_DATA(s->h.micro_tokens > 0, "%s has microbatches of no token", name);
    s->tokens = tokens ? tokens : s->h.micro_tokens;
    s->D = host_alloc(SIZE(s->R, s->E, sizeof(int)));
}

void source_generate(Source *s, const Demand *d, int layers, int64_t steps) {
    int R = d->N * d->G;
    *s = (Source){.R = R, .E = d->E, .tokens = d->tokens, .demand = *d, .steps = steps,
                  .h = {.R = R, .N = d->N, .G = d->G, .E = d->E, .K = d->K, .layers = layers, .micros = 1, .groups = 1,
                        .micro_tokens = d->tokens}};
    s->D = host_alloc(SIZE(R, d->E, sizeof(int)));
}

// D (R,E) from the trace's (h.R,E): sources cut into equal parts, or joined
static void reshape(int *D, const int *from, const Source *s) {
    int R = s->R, E = s->E, R0 = s->h.R, parts = R / R0, joined = R0 / R;
    for (int r = 0; r < R; r++)
        for (int e = 0; e < E; e++) {
            int64_t n = 0;
            if (parts > 1) { // what does not divide goes to another part for each expert
                int64_t x = from[(int64_t)(r / parts) * E + e], i = r % parts, turn = e % parts;
                n = (x * (i + 1) + turn) / parts - (x * i + turn) / parts;
            } else {
                for (int i = 0; i < joined; i++) n += from[(int64_t)(r * joined + i) * E + e];
            }
            D[(int64_t)r * E + e] = (int)n;
        }
}

// Each source's pairs times tokens R / (the recorded tokens of all ranks), rounded so that their sum is
static void scale(int *D, const Source *s) {
    int64_t num = s->tokens * s->R, den = (int64_t)s->h.micro_tokens * s->h.R;
    if (num == den) return;
    for (int r = 0; r < s->R; r++) {
        int64_t sum = 0, before = 0;
        for (int e = 0; e < s->E; e++) {
            int *x = D + (int64_t)r * s->E + e;
            sum += *x;
            int64_t now = sum * num / den;
            *x = (int)(now - before), before = now;
        }
    }
}

static int next_record(Source *s, Sample *a) {
    TraceRecord r;
    a->kind = trace_read(s->trace, &r);
    a->step = r.step, a->micro = r.micro, a->group = r.group, a->layer = r.layer, a->ms = r.ms, a->ranks = r.ranks;
    if (a->kind != TRACE_DEMAND) return a->kind != TRACE_END;
    reshape(s->D, r.D, s);
    scale(s->D, s);
    a->D = s->D;
    s->record = r;
    if (s->R == s->h.R && s->tokens == s->h.micro_tokens) a->recorded = &s->record;
    return 1;
}

int source_next(Source *s, Sample *a) {
    *a = (Sample){.kind = TRACE_END};
    if (s->trace) return next_record(s, a);
    if (s->step >= s->steps) return 0;
    *a = (Sample){.kind = TRACE_DEMAND, .step = s->step + 1, .layer = s->layer, .D = s->D};
    demand_make(s->D, &s->demand, s->step, s->layer);
    if (++s->layer == s->h.layers) s->layer = 0, s->step++;
    return 1;
}

void source_close(Source *s) {
    if (s->trace) trace_read_close(s->trace);
    free(s->D);
}
