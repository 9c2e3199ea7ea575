// Trace files: what the routers of a run chose, for replays. build/train writes one to OUT/route.bin (--trace-every; a run continued
// at step N writes route_N.bin instead), build/replay reads it.
//
// Version 2. All numbers in the writer's byte order, without padding between fields.
//   header   char magic[8] "MOEROUTE"; uint32 order = 0x01020304; uint32 version; uint32 header_bytes;
//            int32 R, N, G           ranks of an EP group, its nodes, ranks per node
//            int32 groups            EP groups
//            int32 E, K, S           experts, experts per token, slots for copies
//            int32 C, F, shared      hidden width, expert width, width of the shared expert (0 = none)
//            int32 layers, micros    MoE layers, microbatches per step
//            int32 micro_tokens      tokens of a rank's microbatch
//            int32 elem_bytes, grad_bytes   of an activation or a weight; of a weight's gradient or a routing weight
//            int32 crossing_pairs    pairs that one row between nodes may stand for: K with de-duplication, else 1
//            int32 n_stages          of a times record
//            char policy[32], cost[64]   balancer; name of the cluster costs; NUL-padded
//            char stages[n_stages][16]
//   record   uint32 kind; uint32 bytes (of what follows)
//     kind 1, demand: int64 step; int32 micro, group, layer, copies; int64 max_load_before, max_load, cost_ps, identity_ps,
//                     pairs_self, pairs_node, pairs_inter, transfers, crossings, passed_on; uint64 hash; int32 D[R*E]
//                     D: pairs that source rank s of the group has for expert e. The numbers before it are what the run's own plan
//                     came to: see PlanInfo; transfers of experts inside and between nodes, rows that crossed between nodes, pairs
//                     among them that were passed on to another rank there
//     kind 2, times:  int64 step; int32 ranks; int32 n_stages; float ms[ranks*n_stages]   of the whole step, by rank of the run
// A demand record for every (micro, group, layer) with layer fastest, then one times record. The file ends after a whole record, or,
// if the run was killed, within one: a reader stops there.
#ifndef MOE_TRACE_FILE_H
#define MOE_TRACE_FILE_H
#include "topoep/plan.h"
#include <stdio.h>

enum { TRACE_VERSION = 2, TRACE_ORDER = 0x01020304, TRACE_STAGES = 64 }; // at most so many stages
typedef enum { TRACE_END, TRACE_DEMAND, TRACE_TIMES } TraceKind;

typedef struct TraceHeader {
    int R, N, G, groups, E, K, S, C, F, shared, layers, micros, micro_tokens, elem_bytes, grad_bytes, crossing_pairs, stages;
    char policy[32], cost[64], stage[TRACE_STAGES][16];
} TraceHeader;

typedef struct TraceRecord {
    TraceKind kind;
    int64_t step;
    int micro, group, layer;  // demand
    PlanInfo plan;            // demand: what the record holds of it, and total; inter_copies holds all transfers
    int64_t crossings, passed_on; // demand
    int *D;                   // demand: (R,E)
    int ranks;                // times
    float *ms;                // times: (ranks,stages)
} TraceRecord;

// Each dies with STATUS_DATA, naming path, when the disk is full.
void trace_write_header(FILE *f, const char *path, const TraceHeader *h);
void trace_write(FILE *f, const char *path, const TraceHeader *h, const TraceRecord *r);

typedef struct TraceReader TraceReader;
// Dies with STATUS_DATA, naming the file and what was expected, if it is not a whole header of this version.
TraceReader *trace_read_open(const char *path, TraceHeader *h);
// The next record, whose D and ms are the reader's memory until the next call; TRACE_END after the last whole one. Dies with
// STATUS_DATA, naming file and place, where a record contradicts the header.
TraceKind trace_read(TraceReader *t, TraceRecord *r);
void trace_read_close(TraceReader *t);
#endif
