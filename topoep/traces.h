// Generated demand: matrices with a stated imbalance, for replays and tests. Pure functions of (kind, shape, seed, step, layer), in
// integers: the same on every machine.
//
// Every source has tokens*K pairs (ragged: 0 to 2 times that), at most one of a token for an expert. The experts' shares are a blend
// of an even split and a skewed one, with as much of the skewed one as brings the fullest rank, every expert at home, to `level`
// times the mean; where even all of it does not, the fullest rank stays below. Sources differ from these shares by up to 1/16.
#ifndef MOE_TRACES_H
#define MOE_TRACES_H
#include <stdint.h>

typedef struct DemandKind {
    const char *name;
    int level;         // permille: rank max/mean; 0 = as it comes
    int ranks;         // the ranks at which it has that level (where they divide E); 0 = those at hand
    const char *help;
} DemandKind;
extern const DemandKind demand_kinds[]; // ended by a NULL name
int demand_find(const char *name);      // -1: there is none

typedef struct Demand {
    int kind;
    int N, G, E, K, tokens; // nodes, ranks per node, experts (a multiple of N*G), experts per token (at most E), tokens of a source
    int level;              // permille; 0 = the kind's
    uint64_t seed;
} Demand;
// D (N*G,E) overwritten. tokens*K*N*G*2 must fit an int. step >= 0 counts microbatches; layer < 1024.
void demand_make(int *D, const Demand *d, int64_t step, int layer);
// What even routing would have made of D: the sources' pairs, all experts alike. even (R,E) overwritten
void demand_even(int *even, const int *D, int R, int E);
#endif
