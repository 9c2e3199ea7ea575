// What comm.c and a backend's collectives of the device know of each other. Of a group, beside comm.h.
#ifndef MOE_COMM_DEV_H
#define MOE_COMM_DEV_H
#include "kernels/comm.h"

typedef struct CommDev CommDev; // a group's state on this rank's device; NULL where there is none (CPU; before comm_bind)
CommDev *comm_dev(const Comm *c);
void comm_dev_set(Comm *c, CommDev *v);
CommDev *comm_dev_open(Comm *c, const CommDev *parent); // of a derived group; collective
void comm_dev_close(CommDev *v);                        // with its windows; collective
double comm_patience_s(const Comm *c);                  // longest wait for another rank
void comm_dev_wait(CommDev *v);                         // until the device has done what it was told
#endif
