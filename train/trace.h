// OUT/route.bin: what the routers chose, for replays. A run continued at step N writes route_N.bin instead.
//
// Version 1. All numbers in the writer's byte order, without padding between fields.
//   header   char magic[8] "MOEROUTE"; uint32 order = 0x01020304; uint32 version; uint32 header_bytes;
//            int32 R, N, G      ranks of an EP group, its nodes, ranks per node
//            int32 groups       EP groups
//            int32 E, K, S      experts, experts per token, slots for copies
//            int32 C, F         hidden width, expert width
//            int32 layers, micros   MoE layers, microbatches per step
//            int32 micro_tokens     tokens of a rank's microbatch
//            int32 elem_bytes       of an activation and a weight
//            int32 n_stages         of a times record
//            char policy[32], cost[64]   balancer; name of the cluster costs; NUL-padded
//            char stages[n_stages][16]
//   record   uint32 kind; uint32 bytes (of what follows)
//     kind 1, demand: int64 step; int32 micro, group, layer; int32 copies; int64 max_load_before, max_load, cost_ps, identity_ps;
//                     int32 D[R*E]   pairs that source rank s of the group has for expert e
//     kind 2, times:  int64 step; int32 ranks; int32 n_stages; float ms[ranks*n_stages]   of the whole step, by rank of the run
// A demand record for every (micro, group, layer), then one times record. The file ends after a whole record, or, if the run
// was killed, within one: a reader stops there.
#ifndef MOE_TRACE_H
#define MOE_TRACE_H
#include "train/trainer.h"

enum { TRACE_VERSION = 1, TRACE_ORDER = 0x01020304, TRACE_DEMAND = 1, TRACE_TIMES = 2 };

Trace *trace_open(const Trainer *t);   // collective; the file is rank 0's
void trace_close(Trace *trace);
void trace_step(Trace *trace, const Trainer *t, const StepStats *s); // collective; right after trainer_step
#endif
