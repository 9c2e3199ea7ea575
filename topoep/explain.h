// A plan in words, for teaching: what was looked at, and what each copy of the plan does.
#ifndef MOE_EXPLAIN_H
#define MOE_EXPLAIN_H
#include "topoep/plan.h"
#include <stdio.h>

// Prints how topoep came to a plan of D (R,E) with these quotas (E,R): the J of all plans it can choose from, where the plan without
// copies is stuck, then the copies one after the other, those on other nodes first, each time the one after which J is least.
void explain_plan(FILE *out, const int *D, const int *quota, int R, int E, const Cost *cost, PlanOptions options);
#endif
