// Token shards and the order in which training sees them.
//
// A data set is a list of shards (llm.c's .bin format, data/shard.h). Each shard is cut into windows of T tokens (plus the
// next token, the last target); a shard of n tokens has (n-1)/T windows, and what is left at its end is not seen.
// Epoch e visits every window of all shards once, in a pseudo-random order fixed by (seed, e). Sample i of the run is window
// i % n_windows of epoch i / n_windows; step s reads samples s*B .. s*B+B-1. So the order is a pure function of (seed, step),
// the same for any number of ranks, and resuming needs no more than these two numbers.
#ifndef MOE_LOADER_H
#define MOE_LOADER_H
#include <stdint.h>

typedef struct Loader Loader;

// spec: a shard, or a folder, of which the shards named PREFIX*.bin or *_PREFIX*.bin ("train", "val") are taken in order of
// their names.
// V: the model's vocabulary; T: window length. Dies with STATUS_DATA naming file, field, what was found and what was expected.
// A folder without such shards: the message says which command makes them.
Loader *loader_open(const char *spec, const char *prefix, int V, int T, uint64_t seed);
void loader_close(Loader *l);
int64_t loader_windows(const Loader *l);
int64_t loader_tokens(const Loader *l); // all tokens of all shards
// Tokens and next tokens (targets) of sample i: tok, target (T) overwritten. If `first` is not NULL it gets, for every
// position, the position at which its document begins within the window (for attention that stops at documents).
// A token >= V dies with STATUS_DATA.
void loader_sample(const Loader *l, int64_t i, int *tok, int *target, int *first);
// The same for window w in file order, for evaluation.
void loader_window(const Loader *l, int64_t w, int *tok, int *target, int *first);
#endif
