// The route of one rank (topoep/route.h) on the GPU. What the lists mean, and their order: kernels/cpu/route.c. There a loop over
// the experts appends to a list; here each expert's entries are counted, the counts summed up over the experts before, and the
// entries written where the loop would have put them.
#define HOSTDEV static __device__ __forceinline__
#include "kernels/cuda/count.h"
extern "C" {
#include "topoep/flow.h"
#include "topoep/route.h"
}

struct Run { // consecutive pairs of one expert that go to one rank
    int end, rank, shift; // ord < end; row = ord + shift
};
struct Work {
    int *run_of;     // (E+1) first run of an expert
    int *base;       // (R,J) first row of group j on rank r
    int *y;          // (E,R)
    int *entry;      // (E,N) rank*S + slot of the lowest holder of a copy on a node, -1 = none
    Run *run;        // (E + R*S)
    int *rank, *row; // (BT,K) where a pair is computed; -1 = dropped
    int *node;       // (BT,X) of the token's crossing x, -1 = none
    int *far;        // (N) crossings to each node, those without room included
};
struct Place { // of the rank that asks
    int me, node, G, H, J, X, Q, room;
};

static size_t work_ints(RouteShape s) {
    return (size_t)s.E + 1 + SIZE(s.R, s.E / s.R + s.S) + SIZE(s.E, s.R) + SIZE(s.E, s.N) + 3 * ((size_t)s.E + SIZE(s.R, s.S)) +
           2 * SIZE(s.max_BT, s.K) + SIZE(s.max_BT, route_crossings(s)) + (size_t)s.N;
}
size_t route_work_bytes(RouteShape s) { return work_ints(s) * sizeof(int); }

static Work work_bind(void *work, RouteShape s, Place a) {
    Work w;
    w.run_of = (int *)work;
    w.base = w.run_of + s.E + 1;
    w.y = w.base + SIZE(s.R, a.J);
    w.entry = w.y + SIZE(s.E, s.R);
    w.run = (Run *)(w.entry + SIZE(s.E, s.N));
    w.rank = (int *)(w.run + s.E + SIZE(s.R, s.S));
    w.row = w.rank + SIZE(s.max_BT, s.K);
    w.node = w.row + SIZE(s.max_BT, s.K);
    w.far = w.node + SIZE(s.max_BT, a.X);
    return w;
}

// Group of expert e on rank r, -1 if r does not hold it.
static __device__ int group_of(const int *slot, int e, int r, int H, int S) {
    if (e / H == r) return e - r * H;
    for (int i = 0; i < S; i++)
        if (slot[r * S + i] == e) return H + i;
    return -1;
}

// One warp: the sum over the lanes before, and of all
static __device__ __forceinline__ int scan(int x, int *all) {
    int lane = (int)threadIdx.x % WARP, sum = x;
    for (int d = 1; d < WARP; d *= 2) {
        int y = __shfl_up_sync(WARP_ALL, sum, (unsigned)d);
        if (lane >= d) sum += y;
    }
    *all = __shfl_sync(WARP_ALL, sum, WARP - 1);
    return sum - x;
}

static __device__ __forceinline__ int within(int x, int room) { return room && x > room ? room : x; }

static __device__ void raise_need(Route t, int kind, int n, int room) { // of integers: the order does not show
    atomicMax(&t.need[kind], n);
    if (room && n > room) atomicMax(&t.need[0], 1);
}

// ---- pairs -----------------------------------------------------------------------------------------------------------
// The runs of expert e, counted; with Write they go to w.run from `at` on.
template <bool Write> static __device__ int expert_runs(Plan plan, const int *D, RouteShape s, Place a, Work w, int e, int at) {
    if (D[(size_t)a.me * s.E + e] == 0) return 0;
    int ord = 0, n = 0, *y = w.y + (size_t)e * s.R; // ord: pairs of e that the ranks before r get from me
    for (int r = 0; r < s.R; r++) {
        if (plan.quota[(size_t)e * s.R + r] == 0) continue;
        flow_column(y, D, plan.quota, r, e, s.R, s.E, a.G);
        if (y[a.me] == 0) continue;
        if (Write) {
            int row = w.base[r * a.J + group_of(plan.slot, e, r, a.H, s.S)];
            for (int i = 0; i < a.me; i++) row += y[i];
            w.run[at + n] = Run{ord + y[a.me], r, row - ord};
        }
        ord += y[a.me], n++;
    }
    return n;
}

static __global__ void route_count_kernel(Route t, Plan plan, const int *D, RouteShape s, Place a, Work w) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < s.E) {
        w.run_of[i] = expert_runs<false>(plan, D, s, a, w, i, 0);
        for (int n = 0; n < s.N; n++) w.entry[i * s.N + n] = -1;
        for (int k = s.R * s.S - 1; k >= 0; k--)
            if (plan.slot[k] == i) w.entry[i * s.N + k / s.S / a.G] = k;
    }
    if (i >= s.R) return;
    int at = 0, r = i; // rows of rank r, group by group
    for (int j = 0; j < a.J; j++) {
        int e = j < a.H ? r * a.H + j : plan.slot[r * s.S + j - a.H];
        w.base[r * a.J + j] = at;
        if (r == a.me) t.off[j] = within(at, s.rows);
        if (e >= 0) at += plan.quota[(size_t)e * s.R + r];
    }
    if (r == a.me) t.off[a.J] = within(at, s.rows);
    raise_need(t, 1, at, s.rows);
}

static __global__ void route_scan_kernel(Route t, int E, Work w) { // one warp
    int sum = 0;
    for (int e0 = 0; e0 < E; e0 += WARP) {
        int e = e0 + (int)threadIdx.x, all, before = scan(e < E ? w.run_of[e] : 0, &all);
        if (e < E) w.run_of[e] = sum + before;
        sum += all;
    }
    if (threadIdx.x == 0) w.run_of[E] = sum, t.traffic[0] = t.traffic[1] = 0, t.n_out[0] = 0; // with more nodes counted later
}

static __global__ void route_runs_kernel(Plan plan, const int *D, RouteShape s, Place a, Work w) {
    int e = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (e < s.E) expert_runs<true>(plan, D, s, a, w, e, w.run_of[e]);
}

// Where each pair of a token is computed, and to which nodes the token crosses
static __global__ void route_pairs_kernel(Route t, const int *idx, const int *ord, int BT, RouteShape s, Place a, Work w) {
    for (int k0 = (int)(blockIdx.x * blockDim.x + threadIdx.x); k0 < BT; k0 += (int)(gridDim.x * blockDim.x)) {
        int *node = w.node + (size_t)k0 * a.X;
        for (int x = 0; x < a.X; x++) node[x] = t.cross[(size_t)k0 * a.X + x] = -1;
        for (int k = 0; k < s.K; k++) {
            size_t p = (size_t)k0 * s.K + k;
            int rank = -1, row = -1, o = ord[p];
            if (o >= 0) {
                const Run *run = w.run + w.run_of[idx[p]];
                while (o >= run->end) run++;
                rank = run->rank, row = o + run->shift;
                if (s.rows && row >= s.rows) row = -1;
            }
            int far = rank >= 0 && rank / a.G != a.node, here = rank >= 0 && !far;
            w.rank[p] = rank, w.row[p] = row;
            t.peer[p] = here ? rank : far ? s.R : 0;
            t.row[p] = t.wrow[p] = here ? row : -1;
            if (far) node[s.dedup ? rank / a.G : k] = rank / a.G;
        }
    }
}

// cross holds each crossing's number within its node (-1: none, or no room), and becomes its place in the staging buffer; its meta, and
// the places of its pairs' weights
static __global__ void route_cross_kernel(Route t, int BT, RouteShape s, Place a, Work w) {
    if (blockIdx.x == 0)
        for (int n = (int)threadIdx.x; n < s.N; n += (int)blockDim.x) raise_need(t, 2, w.far[n], a.room);
    for (int token = (int)(blockIdx.x * blockDim.x + threadIdx.x); token < BT; token += (int)(gridDim.x * blockDim.x)) {
        unsigned long long sent = 0, passed_on = 0;
        for (int x = 0; x < a.X; x++) {
            int *c = &t.cross[(size_t)token * a.X + x], node = w.node[(size_t)token * a.X + x];
            if (*c < 0) continue;
            *c += node * a.room;
            int *meta = t.meta + (size_t)*c * 2 * a.Q;
            sent++;
            for (int q = 0; q < a.Q; q++) {
                size_t p = (size_t)token * s.K + (s.dedup ? q : x);
                int far = w.rank[p] >= 0 && w.rank[p] / a.G == node;
                meta[q] = far ? w.rank[p] : 0, meta[a.Q + q] = far ? w.row[p] : -1;
                if (far) t.wrow[p] = *c * a.Q + q, passed_on += w.rank[p] % a.G != a.me % a.G;
            }
        }
        if (sent) atomicAdd((unsigned long long *)&t.traffic[0], sent); // of integers: the order does not show
        if (passed_on) atomicAdd((unsigned long long *)&t.traffic[1], passed_on);
    }
}

// ---- copies ----------------------------------------------------------------------------------------------------------
// Each adds to up to two lists: counted; with Write the entries go where `at` says.
struct Two {
    int a, b;
};

template <bool Write> static __device__ Two slot_copies(Route t, const int *slot, RouteShape s, Place a, Work w, int i, Two at) { // pull, node_add
    Two n = {0, 0};
    int e = slot[a.me * s.S + i];
    if (e < 0) return n;
    int home = e / a.H, first = w.entry[e * s.N + a.node];
    if (home / a.G == a.node || first / s.S != a.me) {
        if (Write) t.pull[at.a] = home / a.G == a.node ? BlockCopy{i, home, e - home * a.H} : BlockCopy{i, s.R + first / s.S, first % s.S};
        n.a = 1;
        return n;
    }
    for (int r = a.me + 1; r < (a.node + 1) * a.G; r++) {
        int j = group_of(slot, e, r, a.H, s.S);
        if (j < 0) continue;
        if (Write) t.node_add[at.b + n.b] = BlockCopy{i, r, j - a.H};
        n.b++;
    }
    return n;
}

template <bool Write> static __device__ Two home_copies(Route t, const int *slot, RouteShape s, Place a, Work w, int h, Two at) { // home_add
    Two n = {0, 0};
    int e = a.me * a.H + h;
    for (int r = a.node * a.G; r < (a.node + 1) * a.G; r++) {
        int j = group_of(slot, e, r, a.H, s.S);
        if (r == a.me || j < 0) continue;
        if (Write) t.home_add[at.a + n.a] = BlockCopy{h, r, j - a.H};
        n.a++;
    }
    for (int k = 0; k < s.N; k++) {
        if (k == a.node || w.entry[e * s.N + k] < 0) continue;
        if (Write) t.home_add[at.a + n.a] = BlockCopy{h, s.R, h * (s.N - 1) + k - (k > a.node)};
        n.a++;
    }
    return n;
}

// What crosses nodes: w_send (and g_recv), w_recv. All of this node's copies where they are sliced, else those whose home has
// this rank's place
template <bool Write> static __device__ Two crossing_copies(Route t, const int *, RouteShape s, Place a, Work w, int e, Two at) {
    Two n = {0, 0};
    int home = e / a.H, from = home / a.G;
    if (!s.slicing && home % a.G != a.me % a.G) return n;
    if (from != a.node) {
        int i = w.entry[e * s.N + a.node];
        if (i < 0) return n;
        if (Write) t.w_recv[at.b] = BlockSeg{from, i / s.S, i % s.S};
        n.b = 1;
        return n;
    }
    for (int k = 0; k < s.N; k++) {
        if (k == a.node || w.entry[e * s.N + k] < 0) continue;
        if (Write) {
            t.w_send[at.a + n.a] = BlockSeg{k, home, e % a.H};
            t.g_recv[at.a + n.a] = BlockSeg{k, home, e % a.H * (s.N - 1) + k - (k > a.node)};
        }
        n.a++;
    }
    return n;
}

// A warp walks the items 0..n-1 of one kind.
#define WALK(what, n, count_a, count_b)                                                                       \
    do {                                                                                                      \
        Two sum = {0, 0}, all;                                                                                \
        for (int i0 = 0; i0 < (n); i0 += WARP) {                                                              \
            int i = i0 + (int)threadIdx.x % WARP;                                                             \
            Two own = i < (n) ? what<false>(t, slot, s, a, w, i, Two{0, 0}) : Two{0, 0};                      \
            Two at = {sum.a + scan(own.a, &all.a), sum.b + scan(own.b, &all.b)};                              \
            if (i < (n)) what<true>(t, slot, s, a, w, i, at);                                                 \
            sum.a += all.a, sum.b += all.b;                                                                   \
        }                                                                                                     \
        if (threadIdx.x % WARP == 0) {                                                                        \
            *(count_a) = sum.a;                                                                               \
            int *second = count_b;                                                                            \
            if (second) *second = sum.b;                                                                      \
        }                                                                                                     \
    } while (0)

static __global__ void route_copies_kernel(Route t, const int *slot, RouteShape s, Place a, Work w) {
    switch (threadIdx.x / WARP) {
    case 0: WALK(slot_copies, s.S, t.n_pull, t.n_node_add); break;
    case 1: WALK(home_copies, a.H, t.n_home_add, nullptr); break;
    default: WALK(crossing_copies, s.E, t.n_w_send, t.n_w_recv);
    }
}

void route_make(Dev *d, Route *t, const Plan *plan, const int *D, const int *idx, const int *ord, int me, int BT, RouteShape s,
                void *work) {
    int G = s.R / s.N, H = s.E / s.R;
    Place a = {me, me / G, G, H, H + s.S, route_crossings(s), route_pairs(s), route_room(s)};
    Work w = work_bind(work, s, a);
    unsigned experts = (unsigned)ceil_div(s.E, WARP); // E >= R
    LAUNCH(route_count_kernel, experts, WARP, 0, d->stream, *t, *plan, D, s, a, w);
    LAUNCH(route_scan_kernel, 1, WARP, 0, d->stream, *t, s.E, w);
    LAUNCH(route_runs_kernel, experts, WARP, 0, d->stream, *plan, D, s, a, w);
    LAUNCH(route_pairs_kernel, grid_for(d, BT, 128), 128, 0, d->stream, *t, idx, ord, BT, s, a, w);
    if (s.N > 1) {
        count_labels(d, t->cross, t->n_out, w.far, w.node, (int)SIZE(BT, a.X), s.N, a.room);
        LAUNCH(route_cross_kernel, grid_for(d, BT, 128), 128, 0, d->stream, *t, BT, s, a, w);
    }
    LAUNCH(route_copies_kernel, 1, 3 * WARP, 0, d->stream, *t, plan->slot, s, a, w);
}
