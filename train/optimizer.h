// The update of the parameters: one walk over the parameter table.
#ifndef MOE_OPTIMIZER_H
#define MOE_OPTIMIZER_H
#include "model/model.h"
#include "train/options.h"

// Moments lie as the parameters do: the arenas' twins, at the same offsets. NULL with SGD. So do the master weights, where
// `real` is narrower than `wide`; NULL elsewhere, where the weights are their own masters.
typedef struct Optimizer {
    OptimizerKind kind;
    wide *repl_m, *repl_v, *expert_m, *expert_v;
    wide *repl_master, *expert_master;
    Update *update; // two, on the device: without decay, with decay
    wide *factor; // one, on the device: what clipping multiplies every gradient with
    double beta1, beta2, eps, decay, clip;
} Optimizer;

Optimizer optimizer_alloc(Dev *d, const Params *ps, const Options *o); // its memory
void optimizer_start(Optimizer *opt, Dev *d, const Params *ps); // masters from the weights, moments 0
// What the next optimizer_step reads: the learning rate, and the update's number (1 for the first).
void optimizer_set(Optimizer *opt, Dev *d, double lr, int64_t step);
// One update with gradients scaled by min(1, clip / sqrt(*sumsq)); sumsq: device, over all ranks. Nothing changes where it is not finite.
// Decay where the table says so. An expert without tokens has gradient 0, not none: it decays and its moments fade.
void optimizer_step(Optimizer *opt, Dev *d, const Params *ps, const double *sumsq);
wide *optimizer_m(const Optimizer *opt, const Param *p); // the Param's first moments, NULL where it has none
wide *optimizer_v(const Optimizer *opt, const Param *p);
wide *optimizer_master(const Optimizer *opt, const Param *p);
#endif
