// Two studies by replay, printed as Markdown: the published headline on paper, and how plans, gain and cost grow with the ranks.
#ifndef MOE_STUDIES_H
#define MOE_STUDIES_H
#include "topoep/plan.h"

typedef struct Study {
    const char *cluster;     // a cluster file
    PlanOptions how;
    double hop_us, plan_us;
    uint64_t seed;
    int layers, steps;       // sampled: MoE layers, microbatches
    int nodes;               // scale: at most so many
} Study;
void study_headline(const Study *s);
void study_scale(const Study *s);
#endif
