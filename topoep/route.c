#include "topoep/route.h"
#include "kernels/check.h"

static void *ints(Dev *d, size_t n, size_t elem) { return dev_alloc(d, SIZE((int64_t)n, (int64_t)elem), "routes"); }

Route route_alloc(Dev *d, int max_BT, int K, int R, int E, int N, int S) {
    int H = E / R, J = H + S;
    size_t seg = sizeof(RowSeg), block = sizeof(BlockCopy);
    int *counts = ints(d, 8, sizeof(int));
    return (Route){
        .off = ints(d, J + 1, sizeof(int)),
        .peer = ints(d, SIZE(max_BT, K), sizeof(int)), .row = ints(d, SIZE(max_BT, K), sizeof(int)),
        .send = ints(d, E + SIZE(R, S), seg), .recv = ints(d, SIZE(J, R), seg),
        .w_send = ints(d, SIZE(H, N), seg), .w_recv = ints(d, S, seg),
        .pull = ints(d, S, block), .node_add = ints(d, SIZE(S, R / N), block),
        .g_send = ints(d, S, seg), .g_recv = ints(d, SIZE(H, N), seg),
        .home_add = ints(d, SIZE(H, R), block),
        .n_send = counts, .n_recv = counts + 1, .n_w_send = counts + 2, .n_w_recv = counts + 3, .n_pull = counts + 4,
        .n_node_add = counts + 5, .n_g_send = counts + 6, .n_home_add = counts + 7,
        .n_g_recv = ints(d, 1, sizeof(int)),
    };
}
