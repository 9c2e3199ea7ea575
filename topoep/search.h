// An offline search for the plan of least J, to hold the solver against: far slower, on the host only.
#ifndef MOE_SEARCH_H
#define MOE_SEARCH_H
#include "topoep/plan.h"

// Fills quota (E,R), slot (R,S) and info with the best plan found. Starts are the plans of topoep at high effort and of every other
// policy with exact counts; from the best of them copies are taken away at random and others put in their place, with pairs
// exchanged, and worse plans accepted as in simulated annealing. Ends after `rounds` rounds (0: no such end) or `seconds` of CPU
// time (0: no such end); with `rounds` alone the result is a function of the arguments. Returns the rounds made.
int64_t search_plan(int *quota, int *slot, PlanInfo *info, const int *D, int R, int E, const Cost *cost, uint64_t seed, int64_t rounds,
                    double seconds);
#endif
