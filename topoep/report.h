// What a replay prints: a table with a row for each policy and the lines that say how far to trust it; or the same as JSON.
#ifndef MOE_REPORT_H
#define MOE_REPORT_H
#include "topoep/replay_run.h"

typedef struct ReportRow {   // milliseconds; per layer and per step of one EP group
    double layer_ms, p50_ms, p99_ms;
    double compute_ms, tokens_ms, weights_ms, planning_ms, straggler_ms; // per layer; planning: counts, plan, fixed
    double moe_ms, step_ms;  // per step: the MoE layers; with all else
    double speedup, ceiling; // step time of none over this one's; this one's speed over that of uniform. NAN without those rows
    double before, after;    // rank max/mean
    double mb_self, mb_node, mb_inter, mb_weights_node, mb_weights_inter; // 1e6 bytes per step
    double copies, cpu_ms;   // per layer: copies; planning as measured on this CPU
} ReportRow;
// other_ms: of a step, everything but the MoE layers
ReportRow report_row(const Replay *a, int row, double other_ms);
// The rest of a step, as a share of a step with even routing
double report_other_ms(const Replay *a, double share);

typedef struct ReportFacts { // what the lines say
    const char *demand, *other;   // names the demand; where other_ms comes from
    double other_ms;
    const Source *source;
} ReportFacts;
void report_table(const Replay *a, const ReportFacts *f);
void report_json(const Replay *a, const ReportFacts *f);
#endif
