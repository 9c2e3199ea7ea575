// A replay: every sample of a source under every policy, and the sums of what the time model makes of their plans.
#ifndef MOE_REPLAY_RUN_H
#define MOE_REPLAY_RUN_H
#include "topoep/planner.h"
#include "topoep/source.h"
#include "topoep/times.h"

enum { REPLAY_UNIFORM = POLICIES, REPLAY_ROWS }; // a row for each policy, and one for even routing without a plan: the ceiling
const char *replay_name(int row);
// Of a row: does it plan from the counts just made; does it need all of them on every rank
int replay_plans(int row);
int replay_gathers(int row);

typedef struct ReplayRow {
    int used;
    int64_t n, with_copies;      // samples; plans with copies
    LayerTime sum;
    int64_t *layer_ps, room;     // (n) totals of the samples
    double before, after, before_max, after_max; // rank max/mean: sums and maxima
    int64_t measured;            // samples with pairs, which before and after are sums over
    Bytes bytes;
    int64_t copies;
    double cpu_us, cpu_us_max;
    // samples whose run used this policy; of them with the same plan; with the same pairs by class
    int64_t recorded, same_hash, same_pairs;
} ReplayRow;

typedef struct Replay {
    TimeModel m;
    PlanOptions how;             // but for the policy
    ReplayRow row[REPLAY_ROWS];
    int64_t steps;               // seen
    double hot_ratio;            // the hottest expert of any sample, over its layer's mean; which one, and where
    int hot_layer, hot_expert;
    int64_t hot_step;
    int groups, moe_stages;
    double measured_ms, measured_other_ms; // a trace's times of the MoE layers and of the rest, mean over ranks: sums over steps
    int64_t times;               // steps with times
    double measured_stage_ms[TRACE_STAGES];
} Replay;

typedef void (*ReplaySeen)(void *to, int row, const Sample *s, const LayerTime *t, const RankSums *sums); // NULL: nobody looks
// rows: which (REPLAY_ROWS flags). Runs to the end of the source, whose first `warm` steps are eplb's past and nothing else;
// replay_free frees what it holds.
void replay_run(Replay *a, Source *s, const TimeModel *m, PlanOptions how, const int *rows, int64_t warm, ReplaySeen seen, void *to);
void replay_free(Replay *a);
double replay_quantile_ms(const ReplayRow *r, double q); // of the layers' times, the next at or above; NAN without samples
double replay_step_ms(const Replay *a, int row);         // MoE layers' time of a step: a group's, mean over steps and groups
#endif
