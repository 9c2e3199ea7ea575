// OUT/route.bin of a run, in the format of topoep/trace_file.h. A run continued at step N writes route_N.bin instead.
#ifndef MOE_TRACE_H
#define MOE_TRACE_H
#include "topoep/trace_file.h"
#include "train/trainer.h"

Trace *trace_open(const Trainer *t);   // collective; the file is rank 0's
void trace_close(Trace *trace);
void trace_step(Trace *trace, const Trainer *t, const StepStats *s); // collective; right after trainer_step
#endif
