// Blocks (experts' weights or gradients) moved by lists that lie in device memory.
#ifndef MOE_BLOCKS_H
#define MOE_BLOCKS_H
#include "kernels/device.h"

typedef struct BlockCopy {
    int dst, peer, src; // block dst of the own buffer, from block src of table[peer]
} BlockCopy;
// For i < *n ascending: block list[i].dst of dst = block list[i].src of table[list[i].peer]. Blocks of `elems` elements.
void dev_copy_blocks(Dev *d, real *dst, const real *const *table, const BlockCopy *list, const int *n, size_t elems);
// The same with +=; entries of one dst are added in list order.
void dev_add_blocks(Dev *d, wide *dst, const wide *const *table, const BlockCopy *list, const int *n, size_t elems);
// Zeroes the blocks i < S of x for which used[i] >= 0.
void dev_zero_blocks(Dev *d, wide *x, const int *used, int S, size_t elems);
// total[e] += seen[e]
void dev_count_add(Dev *d, int64_t *total, const int *seen, int E);
// f[e] = total[e] / sum total (0 where the sum is 0): the share of pairs of the step so far. f (E) overwritten
void dev_count_share(Dev *d, wide *f, const int64_t *total, int E);
#endif
