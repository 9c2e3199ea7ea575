#include "kernels/blocks.h"
#include "kernels/cpu/dev.h"
#include <string.h>

enum { PIECE = 1 << 14 }; // elements of a block that one thread takes at a time

void dev_copy_blocks(Dev *d, real *dst, const real *const *table, const BlockCopy *list, const int *n, size_t elems) {
    dev_enter(d);
    int64_t pieces = (elems + PIECE - 1) / PIECE;
#pragma omp parallel for num_threads(d->threads) if (*n > 0)
    for (int64_t i = 0; i < *n * pieces; i++) {
        const BlockCopy *b = &list[i / pieces];
        size_t at = i % pieces * PIECE, len = elems - at < PIECE ? elems - at : PIECE;
        memcpy(dst + b->dst * elems + at, table[b->peer] + b->src * elems + at, len * sizeof(real));
    }
    dev_leave(d);
}

// Threads share out the elements, not the list, so that a destination's sum keeps its order.
void dev_add_blocks(Dev *d, wide *dst, const wide *const *table, const BlockCopy *list, const int *n, size_t elems) {
    dev_enter(d);
    int64_t pieces = (elems + PIECE - 1) / PIECE;
#pragma omp parallel for num_threads(d->threads) if (*n > 0)
    for (int64_t p = 0; p < pieces; p++) {
        size_t at = p * PIECE, len = elems - at < PIECE ? elems - at : PIECE;
        for (int i = 0; i < *n; i++) {
            wide *x = dst + list[i].dst * elems + at;
            const wide *y = table[list[i].peer] + list[i].src * elems + at;
            for (size_t k = 0; k < len; k++) x[k] += y[k];
        }
    }
    dev_leave(d);
}

void dev_zero_blocks(Dev *d, wide *x, const int *used, int S, size_t elems) {
    dev_enter(d);
    for (int i = 0; i < S; i++)
        if (used[i] >= 0) memset(x + i * elems, 0, elems * sizeof(wide));
    dev_leave(d);
}

void dev_count_add(Dev *d, int64_t *total, const int *seen, int E) {
    dev_enter(d);
    for (int e = 0; e < E; e++) total[e] += seen[e];
    dev_leave(d);
}

void dev_count_share(Dev *d, wide *f, const int64_t *total, int E) {
    dev_enter(d);
    int64_t sum = 0;
    for (int e = 0; e < E; e++) sum += total[e];
    for (int e = 0; e < E; e++) f[e] = sum ? (wide)total[e] / (wide)sum : 0;
    dev_leave(d);
}
