// Counter-based random numbers: see rng.h.
#include "kernels/rng.h"
#include "kernels/files.h"
#include "kernels/philox.h"
#include <string.h>

uint64_t rng_u64(uint64_t seed, uint64_t stream, uint64_t index) {
    uint64_t v[2];
    philox(v, seed, stream, index);
    return v[0];
}

double rng_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    return (double)(rng_u64(seed, stream, index) >> 11) * 0x1p-53;
}

double rng_normal(uint64_t seed, uint64_t stream, uint64_t index) { return philox_normal(seed, stream, index); }

uint64_t rng_name(const char *name) { return fnv1a(FNV1A_START, name, strlen(name)); }

// A Feistel network (Luby & Rackoff 1988) over 2*half bits, the least even number of bits that holds n; an image past n
// is mapped again until it is inside (Black & Rogaway 2002), at most 4 times on average.
uint64_t rng_permute(uint64_t seed, uint64_t stream, uint64_t i, uint64_t n) {
    enum { ROUNDS = 8 };
    int half = 1;
    while (half < 32 && (uint64_t)1 << (2 * half) < n) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t key = seed ^ 0xA5B35705F00D5EEDull; // apart from the numbers others draw from the same (seed, stream)
    do {
        uint64_t left = i >> half & mask, right = i & mask;
        for (uint64_t round = 0; round < ROUNDS; round++) {
            uint64_t mixed = left ^ (rng_u64(key, stream, round << 32 | right) & mask);
            left = right;
            right = mixed;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}
