// Oracle for plans: legality, flow, objective and hash, pair by pair from the definitions.
#ifndef TESTS_REF_PLAN_REF_H
#define TESTS_REF_PLAN_REF_H
#include "topoep/plan.h"

// y (R,R) overwritten: pairs of one expert from each source to each rank | D, q (R): its demand and quotas. Queues of sources
// and of ranks meet in three rounds: the same rank, the same node, any.
void plan_ref_flow(int *y, const int *D, const int *q, int R, int G);
// NULL, or the first rule the plan breaks. D (R,E), quota (E,R), slot (R,S)
const char *plan_ref_illegal(const int *D, const int *quota, const int *slot, int R, int E, int S);
// J and its parts, traffic and hash, from the flows; what it fills: all of PlanInfo
PlanInfo plan_ref_info(const int *D, const int *quota, const int *slot, int R, int E, const Cost *c);
#endif
