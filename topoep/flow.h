// Stage 3 of a plan, rerouting: which of a source's pairs of an expert go to which rank. A closed form, for host and device.
//
// For one expert, source s has D[s] pairs and rank r computes q[r], sum D = sum q. Pairs stay where they are as far as they
// can: first on their own rank (min(D[s], q[s]) of them), then on their own node, and only the rest crosses nodes. At each
// level what is left is laid on two number lines, the sources' pairs one after the other on one and the ranks' room on the
// other (ranks ascending); where an interval of a source overlaps one of a rank, that many pairs go there. No other flow for
// the same q moves fewer pairs between ranks or between nodes.
//
// Rows and columns are exact: sum_r y[s][r] = D[s], sum_s y[s][r] = q[r]. Every y follows from D and q alone, so each rank
// works out only its own rows (what it sends) and its own columns (what arrives), and they agree.
//
// Order. A source's pairs of an expert, in token order, go to the ranks ascending: the first y[s][0] to rank 0, the next
// y[s][1] to rank 1, ... At the receiver, an expert's pairs come in source order, each source's in token order.
//
// Bounds: all counts of one expert together fit an int. Time O(R), no scratch.
#ifndef MOE_FLOW_H
#define MOE_FLOW_H
#include "kernels/hostdev.h"

HOSTDEV int flow_min(int a, int b) { return a < b ? a : b; }
HOSTDEV int flow_max(int a, int b) { return a > b ? a : b; }
// length of the overlap of [a, a + na) and [b, b + nb)
HOSTDEV int flow_overlap(int a, int na, int b, int nb) { return flow_max(0, flow_min(a + na, b + nb) - flow_max(a, b)); }

// One line of the flow between two sides a and b with equal sums: y[j] = pairs between a's i and b's j. The flow does not
// change when the sides change places, so the same code gives rows (a = demand) and columns (a = quota).
// y (R) overwritten | a, b: R counts, da, db elements apart
HOSTDEV void flow_line(int *y, const int *a, int da, const int *b, int db, int i, int R, int G) {
    int node = i / G, own = flow_min(a[i * da], b[i * db]), rest = a[i * da] - own;
    int before = 0, before_node = 0, common = 0; // a's rest ahead of i: of its node; that leaves nodes ahead; what its node can serve
    for (int first = 0; first <= node * G; first += G) {
        int sum_a = 0, sum_b = 0;
        for (int r = first; r < first + G; r++) {
            int self = flow_min(a[r * da], b[r * db]);
            if (r == i) before = sum_a;
            sum_a += a[r * da] - self;
            sum_b += b[r * db] - self;
        }
        if (first / G < node) before_node += flow_max(0, sum_a - sum_b);
        else common = flow_min(sum_a, sum_b);
    }
    int leaves = flow_max(0, before + rest - flow_max(before, common)); // of i's pairs, those past the first `common` of its node
    int place = before_node + flow_max(0, before - common);
    int room_before = 0; // b's room for other nodes' pairs, in the nodes ahead
    for (int first = 0; first < R; first += G) {
        int sum_a = 0, sum_b = 0;
        for (int r = first; r < first + G; r++) {
            int self = flow_min(a[r * da], b[r * db]);
            sum_a += a[r * da] - self;
            sum_b += b[r * db] - self;
        }
        int served = flow_min(sum_a, sum_b), at = 0;
        for (int r = first; r < first + G; r++) {
            int room = b[r * db] - flow_min(a[r * da], b[r * db]), end = at + room;
            if (first == node * G) {
                y[r] = r == i ? own : flow_overlap(before, flow_min(rest, flow_max(0, common - before)), at, room);
            } else {
                int from = flow_max(at, served);
                y[r] = flow_overlap(place, leaves, room_before + from - served, flow_max(0, end - from));
            }
            at = end;
        }
        room_before += flow_max(0, sum_b - sum_a);
    }
}

// What source s sends of expert e. y (R) overwritten: pairs from s to each rank | D (R,E) | quota (E,R)
HOSTDEV void flow_row(int *y, const int *D, const int *quota, int s, int e, int R, int E, int G) {
    flow_line(y, D + e, E, quota + (long long)e * R, 1, s, R, G);
}

// What rank r receives of expert e. y (R) overwritten: pairs from each source to r | D (R,E) | quota (E,R)
HOSTDEV void flow_column(int *y, const int *D, const int *quota, int r, int e, int R, int E, int G) {
    flow_line(y, quota + (long long)e * R, 1, D + e, E, r, R, G);
}
#endif
