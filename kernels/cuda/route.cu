// The route of one rank (topoep/route.h) on the GPU. Runs, their order and their meaning: kernels/cpu/route.c. There one loop
// over the experts appends to lists; here each expert's entries are counted, the counts summed up over the experts before, and
// the entries written where the loop would have.
#define HOSTDEV static __device__ __forceinline__
#include "kernels/cuda/dev.h"
extern "C" {
#include "topoep/route.h"
#include "topoep/flow.h"
}

struct Run { // consecutive pairs of one expert that go to one rank
    int end, peer, shift; // ord < end; row = ord + shift
};
struct Count { // of an expert, then of the experts before it
    int run, send, recv, stage;
};
struct Shape {
    int me, R, E, N, S, G, H, J, node;
};
struct Work {
    Count *before; // (E+1)
    Run *run;      // (E + R*S)
    int *base;     // (R,J) first row of group j on rank r
    int *y;        // (E,R)
};

size_t route_work_bytes(int R, int E, int S) {
    return (SIZE(R, E / R + S) + SIZE(E, R)) * sizeof(int) + SIZE(E + 1, sizeof(Count)) + (E + SIZE(R, S)) * sizeof(Run);
}

// Group of expert e on rank r, -1 if r does not hold it.
static __device__ int group_of(const int *slot, int e, int r, int H, int S) {
    if (e / H == r) return e - r * H;
    for (int i = 0; i < S; i++)
        if (slot[r * S + i] == e) return H + i;
    return -1;
}

// Lowest rank of node n that holds a copy of e, -1 if none.
static __device__ int entry_rank(const int *slot, int e, int n, int G, int H, int S) {
    for (int r = n * G; r < (n + 1) * G; r++)
        if (group_of(slot, e, r, H, S) >= H) return r;
    return -1;
}

// What expert e adds to the lists. With Write it goes where `at` says.
template <bool Write> static __device__ Count expert_runs(Route t, Plan plan, const int *D, Shape s, Work w, int e, Count at) {
    Count n = {0, 0, 0, D[(size_t)s.me * s.E + e]};
    int ord = 0, *y = w.y + (size_t)e * s.R; // ord: pairs of e that the ranks before r get from me
    for (int r = 0; r < s.R; r++) {
        if (plan.quota[(size_t)e * s.R + r] == 0) continue;
        int row = Write ? w.base[r * s.J + group_of(plan.slot, e, r, s.H, s.S)] : 0, first = row;
        flow_column(y, D, plan.quota, r, e, s.R, s.E, s.G);
        for (int i = 0; i < s.me; i++) row += y[i];
        int mine = y[s.me], far = r / s.G != s.node;
        if (mine > 0) {
            if (Write) w.run[at.run + n.run] = far ? Run{ord + mine, s.R, at.stage} : Run{ord + mine, r, row - ord};
            if (Write && far) t.send[at.send + n.send] = RowSeg{r, at.stage + ord, mine};
            n.run++, n.send += far;
        }
        ord += mine;
        if (r != s.me) continue;
        row = first;
        for (int i = 0; i < s.R; row += y[i++]) {
            if (y[i] == 0 || i / s.G == s.node) continue;
            if (Write) t.recv[at.recv + n.recv] = RowSeg{i, row, y[i]};
            n.recv++;
        }
    }
    return n;
}

static __global__ void route_count_kernel(Route t, Plan plan, const int *D, Shape s, Work w) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < s.E) w.before[i] = expert_runs<false>(t, plan, D, s, w, i, Count{0, 0, 0, 0});
    if (i >= s.R) return;
    int at = 0, r = i; // rows of rank r, group by group
    for (int j = 0; j < s.J; j++) {
        int e = j < s.H ? r * s.H + j : plan.slot[r * s.S + j - s.H];
        w.base[r * s.J + j] = at;
        if (r == s.me) t.off[j] = at;
        if (e >= 0) at += plan.quota[(size_t)e * s.R + r];
    }
    if (r == s.me) t.off[s.J] = at;
}

// One warp: sums over the lanes before, and of all
static __device__ __forceinline__ int scan(int x, int *all) {
    int lane = (int)threadIdx.x % WARP, sum = x;
    for (int d = 1; d < WARP; d *= 2) {
        int y = __shfl_up_sync(WARP_ALL, sum, (unsigned)d);
        if (lane >= d) sum += y;
    }
    *all = __shfl_sync(WARP_ALL, sum, WARP - 1);
    return sum - x;
}

static __global__ void route_scan_kernel(Route t, Shape s, Work w) {
    Count sum = {0, 0, 0, 0};
    for (int e0 = 0; e0 < s.E; e0 += WARP) {
        int e = e0 + (int)threadIdx.x, all;
        Count n = e < s.E ? w.before[e] : Count{0, 0, 0, 0}, b;
        b.run = sum.run + scan(n.run, &all), sum.run += all;
        b.send = sum.send + scan(n.send, &all), sum.send += all;
        b.recv = sum.recv + scan(n.recv, &all), sum.recv += all;
        b.stage = sum.stage + scan(n.stage, &all), sum.stage += all;
        if (e < s.E) w.before[e] = b;
    }
    if (threadIdx.x == 0) *t.n_send = sum.send, *t.n_recv = sum.recv;
}

static __global__ void route_write_kernel(Route t, Plan plan, const int *D, Shape s, Work w) {
    int e = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (e < s.E) expert_runs<true>(t, plan, D, s, w, e, w.before[e]);
}

static __global__ void route_pairs_kernel(Route t, const int *idx, const int *ord, int pairs, Work w) {
    for (int p = (int)(blockIdx.x * blockDim.x + threadIdx.x); p < pairs; p += (int)(gridDim.x * blockDim.x)) {
        int peer = 0, row = -1, o = ord[p];
        if (o >= 0) {
            const Run *run = w.run + w.before[idx[p]].run;
            while (o >= run->end) run++;
            peer = run->peer, row = o + run->shift;
        }
        t.peer[p] = peer, t.row[p] = row;
    }
}

// ---- copies ----------------------------------------------------------------------------------------------------------
// What slot i of mine adds to the lists: n counts it, and with Write it goes where `at` says.
struct Held {
    int pull, recv, send, add;
};
template <bool Write> static __device__ Held slot_copies(Route t, const int *slot, Shape s, int i, Held at) {
    Held n = {0, 0, 0, 0};
    int e = slot[s.me * s.S + i];
    if (e < 0) return n;
    int home = e / s.H, entry = entry_rank(slot, e, s.node, s.G, s.H, s.S);
    if (home / s.G == s.node || entry != s.me) {
        int near = home / s.G == s.node;
        if (Write) t.pull[at.pull] = near ? BlockCopy{i, home, e - home * s.H} : BlockCopy{i, s.R + entry, group_of(slot, e, entry, s.H, s.S) - s.H};
        n.pull = 1;
        return n;
    }
    if (Write) t.w_recv[at.recv] = RowSeg{home, i, 1}, t.g_send[at.send] = RowSeg{home, i, 1};
    n.recv = n.send = 1;
    for (int r = s.me + 1; r < (s.node + 1) * s.G; r++) {
        int j = group_of(slot, e, r, s.H, s.S);
        if (j < 0) continue;
        if (Write) t.node_add[at.add + n.add] = BlockCopy{i, r, j - s.H};
        n.add++;
    }
    return n;
}

// What others hold of home expert h
struct Lent {
    int send, add;
};
template <bool Write> static __device__ Lent home_copies(Route t, const int *slot, Shape s, int h, Lent at) {
    Lent n = {0, 0};
    int e = s.me * s.H + h;
    for (int r = s.node * s.G; r < (s.node + 1) * s.G; r++) {
        int j = group_of(slot, e, r, s.H, s.S);
        if (r == s.me || j < 0) continue;
        if (Write) t.home_add[at.add + n.add] = BlockCopy{h, r, j - s.H};
        n.add++;
    }
    for (int k = 0; k < s.N; k++) {
        int entry = k == s.node ? -1 : entry_rank(slot, e, k, s.G, s.H, s.S);
        if (entry < 0) continue;
        if (Write) {
            t.w_send[at.send + n.send] = RowSeg{entry, h, 1};
            t.g_recv[at.send + n.send] = RowSeg{entry, at.send + n.send, 1};
            t.home_add[at.add + n.add] = BlockCopy{h, s.R, at.send + n.send};
        }
        n.send++, n.add++;
    }
    return n;
}

// Two warps: slots (S <= 32), home experts
static __global__ void route_copies_kernel(Route t, const int *slot, Shape s) {
    int lane = (int)threadIdx.x % WARP;
    if (threadIdx.x < WARP) {
        Held n = lane < s.S ? slot_copies<false>(t, slot, s, lane, Held{0, 0, 0, 0}) : Held{0, 0, 0, 0}, at, all;
        at.pull = scan(n.pull, &all.pull), at.recv = scan(n.recv, &all.recv);
        at.send = scan(n.send, &all.send), at.add = scan(n.add, &all.add);
        if (lane < s.S) slot_copies<true>(t, slot, s, lane, at);
        if (lane == 0) *t.n_pull = all.pull, *t.n_w_recv = all.recv, *t.n_g_send = all.send, *t.n_node_add = all.add;
        return;
    }
    Lent sum = {0, 0};
    for (int h0 = 0; h0 < s.H; h0 += WARP) {
        int h = h0 + lane;
        Lent n = h < s.H ? home_copies<false>(t, slot, s, h, Lent{0, 0}) : Lent{0, 0}, at, all;
        at.send = sum.send + scan(n.send, &all.send), at.add = sum.add + scan(n.add, &all.add);
        if (h < s.H) home_copies<true>(t, slot, s, h, at);
        sum.send += all.send, sum.add += all.add;
    }
    if (lane == 0) *t.n_w_send = *t.n_g_recv = sum.send, *t.n_home_add = sum.add;
}

void route_make(Dev *d, Route *t, const Plan *plan, const int *D, const int *idx, const int *ord, int me, int BT, int K, int R, int E,
                int N, int S, void *work) {
    Shape s = {me, R, E, N, S, R / N, E / R, E / R + S, me / (R / N)};
    Work w;
    w.before = (Count *)work;
    w.run = (Run *)(w.before + E + 1);
    w.base = (int *)(w.run + E + R * S);
    w.y = w.base + SIZE(R, s.J);
    LAUNCH(route_count_kernel, (unsigned)ceil_div(E, WARP), WARP, 0, d->stream, *t, *plan, D, s, w); // E >= R
    LAUNCH(route_scan_kernel, 1, WARP, 0, d->stream, *t, s, w);
    LAUNCH(route_write_kernel, (unsigned)ceil_div(E, WARP), WARP, 0, d->stream, *t, *plan, D, s, w);
    LAUNCH(route_pairs_kernel, grid_for(d, SIZE(BT, K), THREADS), THREADS, 0, d->stream, *t, idx, ord, BT * K, w);
    LAUNCH(route_copies_kernel, 1, 2 * WARP, 0, d->stream, *t, plan->slot, s);
}
