// What must hold of every group of ranks, on every transport. Called by all its ranks; a failure
// ends the run with exit status 1.
#ifndef TESTS_COMMON_COMM_CASES_H
#define TESTS_COMMON_COMM_CASES_H
#include "kernels/comm.h"
void comm_cases(Comm *c);       // every collective, on this group
void comm_group_cases(Comm *c); // and on the groups made of it
#endif
