// The update of the parameters: one walk over the parameter table.
#ifndef MOE_OPTIMIZER_H
#define MOE_OPTIMIZER_H
#include "model/model.h"
#include "train/options.h"

// What is kept of every element that this rank updates: its moments with AdamW, and its master weight where `real` is narrower than
// `wide`; elsewhere the weights are their own masters.
typedef enum { STATE_MASTER, STATE_M, STATE_V, STATES } OptimizerState;

typedef struct Optimizer {
    OptimizerKind kind;
    wide *state[STATES][2]; // of both arenas' own elements; NULL where it is not kept
    Update *update; // two, on the device: without decay, with decay
    wide *factor; // one, on the device: what clipping multiplies every gradient with
    double beta1, beta2, eps, decay, clip;
} Optimizer;

Optimizer optimizer_alloc(Dev *d, const Params *ps, const Options *o); // its memory
void optimizer_start(Optimizer *opt, Dev *d, const Params *ps); // masters from the weights, moments 0
// What the next optimizer_step reads: the learning rate, and the update's number (1 for the first).
void optimizer_set(Optimizer *opt, Dev *d, double lr, int64_t step);
// One update of this rank's own elements with gradients scaled by min(1, clip / sqrt(*sumsq)); sumsq: device, over all ranks. Nothing
// changes where it is not finite.
// Decay where the table says so. An expert without tokens has gradient 0, not none: it decays and its moments fade.
void optimizer_step(Optimizer *opt, Dev *d, const Params *ps, const double *sumsq);

// Elements [first, first + n) of a Param, those that this rank updates, and what it keeps of them: state[i] of element first + i.
typedef struct OptimizerPart {
    size_t first, n;
    wide *state[STATES]; // NULL where it is not kept
} OptimizerPart;
OptimizerPart optimizer_part(const Optimizer *opt, const Params *ps, const Param *p);
// Which of the ranks that hold p updates element `at` of it, or the first of those that do; *until: where the next one's begin.
int optimizer_holder(const Params *ps, const Param *p, size_t at, size_t *until);
#endif
