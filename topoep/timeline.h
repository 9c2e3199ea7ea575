// One step of a replay as a Chrome trace (JSON, for Perfetto or chrome://tracing): a process for each node, a thread for each rank.
// Per layer, forward: counts and plan, copies, dispatch, experts, combine; then all layers backward in reverse order. A rank's own
// time in dispatch, experts and combine is drawn as such and the rest, until the slowest is through, as wait; so the events of every
// rank, which never overlap, add up to the modelled step. Forward takes a quarter of the token time in dispatch and another in combine, a
// third of the computation, and of the copies' time the weights' first transfer.
#ifndef MOE_TIMELINE_H
#define MOE_TIMELINE_H
#include "topoep/times.h"

typedef struct Timeline Timeline;
typedef struct Sample Sample;
Timeline *timeline_open(const char *path, const TimeModel *m, const CostModel *model, int row); // the row of the replay to draw
// A replay's ReplaySeen. Takes the first step's first group, others are left out.
void timeline_see(void *timeline, int row, const Sample *s, const LayerTime *t, const RankSums *sums);
void timeline_close(Timeline *t, double other_ms); // writes the file
#endif
