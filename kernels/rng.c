// Counter-based random numbers: see rng.h.
#include "kernels/rng.h"
#include "kernels/files.h"
#include <math.h>
#include <string.h>

// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
// Counter = (index, stream), key = seed: 128 + 64 bits, so that all three words enter whole.
static void philox(uint64_t out[2], uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0 | (uint64_t)c1 << 32;
    out[1] = c2 | (uint64_t)c3 << 32;
}

uint64_t rng_u64(uint64_t seed, uint64_t stream, uint64_t index) {
    uint64_t v[2];
    philox(v, seed, stream, index);
    return v[0];
}

double rng_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    return (double)(rng_u64(seed, stream, index) >> 11) * 0x1p-53;
}

// Box & Muller (1958); the first factor's uniform lies in (0, 1], so that the logarithm is finite
double rng_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    uint64_t v[2];
    philox(v, seed, stream, index);
    double u = (double)((v[0] >> 11) + 1) * 0x1p-53, angle = (double)(v[1] >> 11) * 0x1p-53;
    return sqrt(-2 * log(u)) * cos(6.283185307179586477 * angle);
}

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
