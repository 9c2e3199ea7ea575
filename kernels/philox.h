// The generator behind rng.h, for host and device.
#ifndef MOE_PHILOX_H
#define MOE_PHILOX_H
#include "kernels/hostdev.h"
#include <math.h>
#include <stdint.h>

// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
// Counter = (index, stream), key = seed: 128 + 64 bits, so that all three words enter whole.
HOSTDEV void philox(uint64_t out[2], uint64_t seed, uint64_t stream, uint64_t index) {
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

// Box & Muller (1958); the first factor's uniform lies in (0, 1], so that the logarithm is finite
HOSTDEV double philox_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    uint64_t v[2];
    philox(v, seed, stream, index);
    double u = (double)((v[0] >> 11) + 1) * 0x1p-53, angle = (double)(v[1] >> 11) * 0x1p-53;
    return sqrt(-2 * log(u)) * cos(6.283185307179586477 * angle);
}
#endif
