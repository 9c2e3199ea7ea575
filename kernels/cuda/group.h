// Grouped products: what the portable kernels (group.cu) and the Hopper ones (group_sm90.cu) share.
#ifndef MOE_CUDA_GROUP_H
#define MOE_CUDA_GROUP_H
#include "kernels/cuda/dev.h"

// Which operands lie turned: y = x w^T, dx = dy w, dw = dy^T x
enum GroupForm { GROUP_NT, GROUP_NN, GROUP_TN };

// Offsets of the groups lie in shared memory. A kernel's allowance is asked for this many, whatever J is: ranks that are threads of
// one process share the setting, so each must ask for the same.
enum { GROUPS_MAX = 4096 };

// One call, rows by expert. Tiles of the result are numbered group by group; which are there only off says.
struct GroupArgs {
    real *y;               // (M,cols): NT, NN
    wide *const *dw;       // table of (out_rows,cols): TN, accumulates
    const real *a;         // (M,inner): NT, NN; (M,out_rows): TN
    const real *b;         // (M,cols): TN
    const real *const *w;  // table of (cols,inner): NT; (inner,cols): NN
    const int *off;        // (J+1)
    int J, M, cols, inner; // inner: of the sum, NT and NN; TN sums a group's rows
    int out_rows;          // TN
};

// The smallest j with first[j+1] > tile, first (J+1) ascending from 0
static __device__ __forceinline__ int group_of(const int *first, int J, int tile) {
    int lo = 0, hi = J - 1;
    while (lo < hi) {
        const int mid = (lo + hi) / 2;
        if (first[mid + 1] > tile) hi = mid;
        else lo = mid + 1;
    }
    return lo;
}

// first[j] = tiles of the groups before j, by one warp; the block waits for it. Stops the device where off makes no sense.
template <GroupForm FORM, int ROWS, int COLS> static __device__ void group_tiles(int *first, const GroupArgs &g) {
    const int lane = (int)threadIdx.x % WARP, across = (g.cols + COLS - 1) / COLS;
    int before = 0;
    if (lane == 0) first[0] = 0;
    for (int j0 = 0; j0 < g.J; j0 += WARP) {
        const int j = j0 + lane;
        int n = 0;
        if (j < g.J) {
            const int from = g.off[j], to = g.off[j + 1];
            if (from < 0 || to < from || to > g.M) __trap();
            if (FORM != GROUP_TN) n = (to - from + ROWS - 1) / ROWS * across;
            else if (to > from) n = (g.out_rows + ROWS - 1) / ROWS * across;
        }
        for (int d = 1; d < WARP; d *= 2) {
            const int up_to = __shfl_up_sync(WARP_ALL, n, d);
            if (lane >= d) n += up_to;
        }
        if (j < g.J) first[j + 1] = before + n;
        before += __shfl_sync(WARP_ALL, n, WARP - 1);
    }
}

struct Tile { // of the result
    int group, first_row; // the group, and its first row
    int row0, col0;       // where the tile begins: row of the group (NT, NN) or of dw (TN), column
    int rows, cols;       // how many there are from there on, often more than the tile holds
    int sum;              // length of the sum
};

template <GroupForm FORM, int ROWS, int COLS> static __device__ Tile tile_find(const GroupArgs &g, const int *first, int t) {
    Tile s;
    s.group = group_of(first, g.J, t);
    s.first_row = g.off[s.group];
    const int i = t - first[s.group], n_rows = g.off[s.group + 1] - s.first_row;
    const int out_rows = FORM == GROUP_TN ? g.out_rows : n_rows, down_tiles = (out_rows + ROWS - 1) / ROWS;
    s.row0 = i % down_tiles * ROWS; // down first: neighbours share the weights' tile
    s.col0 = i / down_tiles * COLS;
    s.rows = out_rows - s.row0;
    s.cols = g.cols - s.col0;
    s.sum = FORM == GROUP_TN ? n_rows : g.inner;
    return s;
}

// As many tiles as there can be
static inline int64_t group_tiles_most(GroupForm form, const GroupArgs &g, int rows, int cols) {
    const int64_t across = (g.cols + cols - 1) / cols;
    return form == GROUP_TN ? (int64_t)g.J * ((g.out_rows + rows - 1) / rows) * across : ((int64_t)g.M / rows + g.J) * across;
}

// A way to compute them: launched, and true; false where it has none for this call.
typedef bool GroupWay(Dev *d, GroupForm form, const GroupArgs &g);
GroupWay group_portable;
GroupWay group_sm90; // by TMA and wgmma: where Dev.hopper is set and rows are multiples of 16 bytes. No GPU has run it yet.

// Once, when the device is made: MOE_GROUPED=portable or sm90 in the environment decides which way; without it, on compute capability
// 9.0, sm90 if it agrees with the portable one. Sets Dev.hopper, and adds to Dev.name what was chosen.
void group_choose(Dev *d);
// Whether a way gives, bit for bit, what the portable one gives: one small product of each form, of integers whose sums fp32 holds
// exactly, so that their order does not matter. Dies where the device reports a fault, or is not done after some seconds.
bool group_agrees(Dev *d, GroupWay *way);
#endif
