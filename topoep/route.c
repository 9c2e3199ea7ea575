#include "topoep/route.h"
#include "kernels/check.h"

static void *list(Dev *d, size_t elem, size_t n) { return dev_alloc(d, SIZE((int64_t)elem, (int64_t)n), "routes"); }

Route route_alloc(Dev *d, RouteShape s) {
    size_t H = (size_t)(s.E / s.R), G = (size_t)(s.R / s.N), S = (size_t)s.S, N = (size_t)s.N, pairs = SIZE(s.max_BT, s.K);
    size_t far = SIZE((int64_t)(H * G), s.N - 1);
    int *counts = list(d, sizeof(int), 5 + 2 * N);
    return (Route){
        .off = list(d, sizeof(int), H + S + 1),
        .peer = list(d, sizeof(int), pairs), .row = list(d, sizeof(int), pairs), .wrow = list(d, sizeof(int), pairs),
        .cross = list(d, sizeof(int), SIZE(s.max_BT, route_crossings(s))),
        .w_send = list(d, sizeof(BlockSeg), far), .w_recv = list(d, sizeof(BlockSeg), S * G), .g_recv = list(d, sizeof(BlockSeg), far),
        .pull = list(d, sizeof(BlockCopy), S), .node_add = list(d, sizeof(BlockCopy), S * G),
        .home_add = list(d, sizeof(BlockCopy), SIZE((int64_t)H, s.R)),
        .n_w_send = counts, .n_w_recv = counts + 1, .n_pull = counts + 2, .n_node_add = counts + 3, .n_home_add = counts + 4,
        .n_out = counts + 5, .n_in = counts + 5 + N,
    };
}

void route_slice(size_t *at, size_t *n, size_t unit, int me, RouteShape s) {
    enum { LINE = 16 }; // elements
    size_t G = (size_t)(s.slicing ? s.R / s.N : 1), place = (size_t)me % G, per = (unit + G * LINE - 1) / (G * LINE) * LINE;
    *at = place * per < unit ? place * per : unit;
    *n = unit - *at < per ? unit - *at : per;
}
