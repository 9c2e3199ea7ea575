#include "topoep/planflags.h"

PlanOptions plan_flags_options(const PlanFlags *p, Policy policy, int block) {
    unsigned without = (p->stage1 ? 0 : PLAN_NO_STAGE1) | (p->stage2 ? 0 : PLAN_NO_STAGE2) | (p->locality ? 0 : PLAN_NO_LOCALITY)
                     | (p->portfolio ? 0 : PLAN_NO_PORTFOLIO) | (p->slicing ? 0 : PLAN_NO_SLICING);
    return (PlanOptions){.policy = policy, .target = (PlanTarget)p->target, .effort = (PlanEffort)p->effort, .without = without, .block = block};
}
