// Where a replay's demand comes from: a trace file, or a generator (topoep/traces.h). One sample is one MoE layer of one microbatch.
#ifndef MOE_SOURCE_H
#define MOE_SOURCE_H
#include "topoep/trace_file.h"
#include "topoep/traces.h"

typedef struct Source {
    TraceReader *trace;      // NULL: generated
    TraceHeader h;           // of the trace; of generated demand its shape (R, N, G, E, K, layers, micros, groups, micro_tokens)
    int R, E;                // as replayed; a trace's E
    int64_t tokens;          // as replayed: of a rank's microbatch
    Demand demand;
    int64_t steps, step;     // generated: how many; the one under way
    int layer;
    int *D;                  // (R,E) the sample's
    TraceRecord record;      // a trace's
} Source;

typedef struct Sample {
    TraceKind kind;          // TRACE_DEMAND or TRACE_TIMES, of a trace; TRACE_END
    int64_t step;
    int micro, group, layer;
    const int *D;            // (R,E)
    const TraceRecord *recorded; // what the run's own plan came to, where the demand is replayed as it was recorded; else NULL
    const float *ms;         // times: (ranks, stages)
    int ranks;
} Sample;

int source_is_trace(const char *name); // a file of that name exists
// name: a trace file. R: ranks to replay it on, a multiple of its own or a divisor; sources are then cut or joined. tokens: of a
// rank's microbatch, to which counts are scaled; 0 = as recorded.
void source_trace(Source *s, const char *name, int R, int64_t tokens);
void source_generate(Source *s, const Demand *d, int layers, int64_t steps);
int source_next(Source *s, Sample *sample); // 0 after the last
void source_close(Source *s);
#endif
