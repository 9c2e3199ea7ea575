// Counter-based random numbers: a value is a pure function of (seed, stream, index), so that initialisation, shuffling and
// resume do not depend on how many ranks run or in which order they ask.
#ifndef MOE_RNG_H
#define MOE_RNG_H
#include <stdint.h>
uint64_t rng_u64(uint64_t seed, uint64_t stream, uint64_t index);
double rng_uniform(uint64_t seed, uint64_t stream, uint64_t index); // [0, 1)
double rng_normal(uint64_t seed, uint64_t stream, uint64_t index);  // mean 0, variance 1
uint64_t rng_name(const char *name);                                // a stream for a name (FNV-1a)
// i-th element of a pseudo-random permutation of 0..n-1 fixed by (seed, stream); O(1) memory (Feistel with cycle walking)
uint64_t rng_permute(uint64_t seed, uint64_t stream, uint64_t i, uint64_t n);
#endif
