// The flags of a plan that train, plan and replay share: one table.
#ifndef MOE_PLANFLAGS_H
#define MOE_PLANFLAGS_H
#include "kernels/flags.h"
#include "topoep/plan.h"

// What the flags' values point to: it must stay where it is.
typedef struct PlanFlags {
    int target, effort;                               // PlanTarget, PlanEffort
    int stage1, stage2, locality, portfolio, slicing; // 0 leaves that part out (--no-stage1, ...)
} PlanFlags;
static const PlanFlags plan_flags_default = {.stage1 = 1, .stage2 = 1, .locality = 1, .portfolio = 1, .slicing = 1};

// Rows of a table of Flags, whose values lie in p, a PlanFlags
#define PLAN_FLAGS(p)                                                                                                             \
    {.name = "target", .kind = FLAG_CHOICE, .value = &(p).target, .choices = "time|balance",                                      \
     .help = "of topoep: least modelled time, or first of all the least load of the fullest rank"},                               \
    {.name = "plan-effort", .kind = FLAG_CHOICE, .value = &(p).effort, .choices = "default|low|high",                             \
     .help = "of topoep: how long it looks for a better plan"},                                                                   \
    {.name = "stage1", .kind = FLAG_BOOL, .value = &(p).stage1, .help = "topoep: copies on other nodes than the home's"},         \
    {.name = "stage2", .kind = FLAG_BOOL, .value = &(p).stage2, .help = "topoep: refinement inside the nodes"},                   \
    {.name = "locality", .kind = FLAG_BOOL, .value = &(p).locality, .help = "topoep: traffic has a price while a plan is made"},  \
    {.name = "portfolio", .kind = FLAG_BOOL, .value = &(p).portfolio, .help = "topoep: other policies' plans are looked at too"}, \
    {.name = "slicing", .kind = FLAG_BOOL, .value = &(p).slicing, .help = "a copy that crosses nodes is cut over all their ports"}

// What plan_solve is asked. The slicing belongs into the cost as well: CostModel.one_port = !p->slicing.
PlanOptions plan_flags_options(const PlanFlags *p, Policy policy, int block);
#endif
