// The other policies of the ablation, each from its published description, under the rules of a legal plan: temporary copies in
// S slots a rank, experts stay at home. Common subset of C and CUDA like topoep/solve.h, whose Solve they work on. One thread
// decides (SOLVE_ONE): these are there for the plans they make. Integers only; ties to the lower expert, then rank.
//
// name       sees           decides
// eplb       past average   replicas to the largest load per replica, greedy packing, split evenly    DeepSeek's EPLB, hierarchical
// fastermoe  counts, J      the next hottest expert to all ranks while the modelled time falls         FasterMoE's shadowing
// llep       counts         spill beyond the mean to the least loaded ranks, in large enough chunks arXiv 2601.17111
// echo       counts         spill and spare on two number lines; the S largest per rank are kept       Megatron's elastic cloning
// lplb       counts         fixed partners on a torus, the split that minimises the fullest rank       DeepSeek's LPLB
// ultraep    counts         quotas filled inside each node, lowest threshold that can be met           arXiv 2606.04101
// moonep     counts         every rank filled to the mean by one donor, blind to nodes                 Moonshot's MoonEP
//
// None compares its plan with the one without copies, unless its description says so: J may be above the identity plan's.
#ifndef MOE_POLICIES_H
#define MOE_POLICIES_H
#include "topoep/solve.h"

enum {
    POLICY_AVERAGE_BITS = 16, // fraction bits of a history
    POLICY_AVERAGE = 4,       // a microbatch counts 2^-4 in it
    POLICY_GRID = 64,         // thresholds tried at a time
    POLICY_CHUNK = 1024,      // llep: pairs in the least chunk worth a product of its own, and the share of the mean that this
    POLICY_CHUNK_SHARE = 128, // was in the published runs (131,072 pairs a rank): smaller microbatches, smaller chunks
};

HOSTDEV int64_t policy_total(const Solve *v, int e) { // pairs of e
    int64_t sum = 0;
    for (int n = 0; n < v->N; n++) sum += v->nd[e * v->N + n];
    return sum;
}

// order (n) overwritten: 0..n-1 by key, largest first; ties to the lower index
HOSTDEV void policy_order(int *order, const int64_t *key, int n) {
    for (int i = 0; i < n; i++) {
        int at = i;
        for (; at > 0 && key[order[at - 1]] < key[i]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
}

HOSTDEV void policy_hottest(Solve *v) { // experts by their pairs, in onto
    for (int e = 0; e < v->E; e++) v->key[e] = policy_total(v, e);
    policy_order(v->onto, v->key, v->E);
}

HOSTDEV int policy_takes(const Solve *v, int e, int r) { // r computes e, or has a slot left for it
    return v->q[e * v->R + r] > 0 || r == solve_home(v, e) || v->held[r] < v->S;
}

SOLVE_BIG void policy_return(Solve *v, int first, int last) { // all pairs of experts first..last-1 back home
    for (int e = first; e < last; e++)
        while (v->head[e] >= 0) {
            int r = v->owner[v->head[e]];
            solve_move(v, e, r, solve_home(v, e), v->q[e * v->R + r]);
        }
}

// ---- eplb -----------------------------------------------------------------------------------------------------------------
// count (n) overwritten: replicas of each of n items, one each and `extra` more, one after the other to the item with the most
// weight per replica, at most `most` of one item | weight (n) below 2^48
HOSTDEV void policy_replicate(int *count, const int64_t *weight, int n, int extra, int most) {
    for (int i = 0; i < n; i++) count[i] = 1;
    for (; extra > 0; extra--) {
        int top = -1;
        for (int i = 0; i < n; i++)
            if (count[i] < most && weight[i] > 0 && (top < 0 || weight[i] * count[top] > weight[top] * count[i])) top = i;
        if (top < 0) return;
        count[top]++;
    }
}

// Replicas into packs, heaviest first, each into the lightest pack that has room and not yet that item.
// in (n,packs) overwritten: 1 where a replica lies | load, room (packs) updated | key, order (n) scratch. With a home (item i
// in pack i / per_home, without using its room) one replica of each item lies there already; per_home 0: none does.
HOSTDEV void policy_pack(int *in, int64_t *load, int *room, int64_t *key, int *order, const int64_t *weight, const int *count,
                         int per_home, int n, int packs) {
    for (int i = 0; i < n * packs; i++) in[i] = 0;
    for (int i = 0; i < n; i++) {
        key[i] = weight[i] * 1024 / count[i];
        if (per_home > 0) in[i * packs + i / per_home] = 1, load[i / per_home] += key[i];
    }
    policy_order(order, key, n);
    for (int k = 0; k < n; k++) {
        int i = order[k];
        for (int left = count[i] - (per_home > 0); left > 0; left--) {
            int least = -1;
            for (int p = 0; p < packs; p++)
                if (room[p] > 0 && !in[i * packs + p] && (least < 0 || load[p] < load[least])) least = p;
            if (least < 0) break;
            in[i * packs + least] = 1, room[least]--, load[least] += key[i];
        }
    }
}

// Experts are fixed to their home's node, as groups are in the hierarchical form; its ranks' slots hold the extra replicas.
// Decided from the history, split by the present counts: what is left over by an even split stays at home.
SOLVE_BIG void policy_eplb(Solve *v, int64_t *history, int64_t *scratch) {
    int64_t past = 0, *weight = v->key, *load = scratch, *key = scratch + v->E;
    int *inside = (int *)(scratch + 2 * v->E); // (E,G)
    for (int e = 0; e < v->E && history; e++) past += history[e];
    for (int e = 0; e < v->E; e++) weight[e] = past > 0 ? history[e] : policy_total(v, e) << POLICY_AVERAGE_BITS;
    for (int n = 0, of = v->G * v->H; n < v->N; n++) {
        int first = n * of, *in = inside + first * v->G, *count = v->from + first;
        for (int r = 0; r < v->G; r++) v->room[r] = v->S, load[r] = 0;
        policy_replicate(count, weight + first, of, v->G * v->S, v->G);
        policy_pack(in, load, v->room, key, v->onto, weight + first, count, v->H, of, v->G);
        for (int i = 0; i < of; i++) {
            int e = first + i, holders = 0, share;
            for (int r = 0; r < v->G; r++) holders += in[i * v->G + r];
            share = (int)(policy_total(v, e) / holders);
            for (int r = 0; r < v->G && share > 0; r++)
                if (in[i * v->G + r] && n * v->G + r != solve_home(v, e)) solve_move(v, e, solve_home(v, e), n * v->G + r, share);
        }
    }
    for (int e = 0; e < v->E && history; e++) {
        int64_t now = policy_total(v, e) << POLICY_AVERAGE_BITS;
        history[e] = past > 0 ? history[e] + (now - history[e]) / (1 << POLICY_AVERAGE) : now;
    }
}

// ---- fastermoe (all threads, as J is a reduction) ---------------------------------------------------------------------------
HOSTDEV int policy_can_shadow(const Solve *v, int e) {
    for (int r = 0; r < v->R; r++)
        if (v->dt[e * v->R + r] > 0 && !policy_takes(v, e, r)) return 0;
    return 1;
}

SOLVE_BIG void policy_fastermoe(Solve *v) {
    SOLVE_ONE policy_hottest(v);
    SOLVE_BARRIER();
    int64_t cost = cost_total(v->cost, solve_peaks(v));
    for (int k = 0; k < v->E; k++) {
        int e = v->onto[k], home = solve_home(v, e), can = policy_can_shadow(v, e);
        SOLVE_BARRIER();
        if (!can) return;
        SOLVE_ONE {
            for (int r = 0; r < v->R; r++) // a shadow computes what starts on its own rank
                if (r != home && v->dt[e * v->R + r] > 0) solve_move(v, e, home, r, v->dt[e * v->R + r]);
        }
        SOLVE_BARRIER();
        int64_t now = cost_total(v->cost, solve_peaks(v));
        SOLVE_BARRIER();
        if (now >= cost) {
            SOLVE_ONE policy_return(v, e, e + 1);
            SOLVE_BARRIER();
            return;
        }
        cost = now;
    }
}

// ---- llep -----------------------------------------------------------------------------------------------------------------
// Capacity: the mean (alpha = 1). Below a fullest rank of 1.3 x the mean (lambda) nothing is moved. Experts that were not
// visited yet count with all their pairs at home.
SOLVE_BIG void policy_llep(Solve *v) {
    int64_t fullest = 0, cap = v->mean, chunk = flow_max(1, (int)(v->mean / POLICY_CHUNK_SHARE));
    if (chunk > POLICY_CHUNK) chunk = POLICY_CHUNK;
    for (int r = 0; r < v->R; r++) fullest = cost_max(fullest, v->load[r]);
    if (fullest * v->R * 10 < v->total * 13) return;
    policy_hottest(v);
    for (int k = 0; k < v->E; k++) {
        int e = v->onto[k], home = solve_home(v, e);
        int64_t all = v->q[e * v->R + home], keep = cap - (v->load[home] - all), left = all - cost_max(0, keep < all ? keep : all);
        while (left > 0) {
            int to = -1, any = home;
            for (int r = 0; r < v->R; r++) {
                if (r == home || !policy_takes(v, e, r)) continue;
                int64_t fits = cap - v->load[r];
                if (fits > left) fits = left;
                if (fits > 0 && (fits >= chunk || fits == left) && (to < 0 || v->load[r] < v->load[to])) to = r;
                if (v->load[r] < v->load[any] - (any == home ? left : 0)) any = r;
            }
            if (to < 0 && any == home) break;
            int64_t n = to < 0 ? left : cap - v->load[to]; // where no chunk is large enough, all to the least loaded
            if (n > left) n = left;
            solve_move(v, e, home, to < 0 ? any : to, (int)n);
            left -= n;
        }
    }
}

// ---- echo -----------------------------------------------------------------------------------------------------------------
// What ranks have above the mean, taken from their hottest experts, largest first on one line; what others lack on the other.
SOLVE_BIG void policy_echo(Solve *v, int *given) { // given (E,R) scratch
    int R = v->R, *spill = v->from, *spare = v->p_keep, *coldest = v->p_take;
    for (int r = 0; r < R; r++) v->key[r] = spare[r] = flow_max(0, (int)v->mean - v->load[r]); // R <= E
    policy_order(coldest, v->key, R);
    policy_hottest(v);
    for (int r = 0; r < R; r++) v->room[r] = flow_max(0, v->load[r] - (int)v->mean);
    for (int k = 0; k < v->E; k++) {
        int e = v->onto[k], *over = v->room + solve_home(v, e);
        spill[e] = flow_min(*over, (int)v->key[e]);
        *over -= spill[e];
    }
    for (int e = 0; e < v->E; e++) v->key[e] = spill[e];
    policy_order(v->onto, v->key, v->E);
    for (int k = 0, at = 0; k < v->E; k++) {
        int e = v->onto[k];
        for (int j = 0, from = 0; j < R; j++) {
            int r = coldest[j];
            given[e * R + r] = flow_overlap(at, spill[e], from, spare[r]);
            from += spare[r];
        }
        at += spill[e];
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < v->S; i++) {
            int top = 0;
            for (int e = 1; e < v->E; e++)
                if (given[e * R + r] > given[top * R + r]) top = e;
            if (given[top * R + r] == 0) break;
            solve_move(v, top, solve_home(v, top), r, given[top * R + r]);
            given[top * R + r] = 0;
        }
}

// ---- lplb -----------------------------------------------------------------------------------------------------------------
// Partner j of rank r on the torus of nodes x ranks: one on in the node, the same rank one node on, two on in the node, ...
// sign -1: the rank whose partner j is r. -1: there is none.
HOSTDEV int policy_partner(int r, int j, int sign, int N, int G) {
    int both = flow_min(N, G) - 1, step, in_node;
    if (j < 2 * both) step = j / 2 + 1, in_node = j % 2 == 0;
    else step = j - both + 1, in_node = G > N;
    if (step >= (in_node ? G : N)) return -1;
    return in_node ? r / G * G + (r % G + sign * step + G) % G : (r / G + sign * step + N) % N * G + r % G;
}
// The expert that rank r shares with its partner j: its hottest with the first one, and so on (onto: each rank's by heat)
HOSTDEV int policy_shared(const Solve *v, int r, int j) { return v->onto[r * v->H + j % v->H]; }

HOSTDEV void policy_visit(Solve *v, int e, int from, int to, int *n) { // breadth-first: pairs of e could go from `from` to `to`
    if (to < 0 || to == from || v->p_keep[to] >= 0 || v->q[e * v->R + from] == 0) return;
    v->p_keep[to] = from, v->p_take[to] = e;
    v->room[(*n)++] = to;
}

// Moves pairs from rank s along one shortest way to a rank below M. Returns 0 if there is none
HOSTDEV int policy_augment(Solve *v, int s, int64_t M) {
    int n = 1, end = -1;
    for (int r = 0; r < v->R; r++) v->p_keep[r] = -1; // reached from
    v->room[0] = s, v->p_keep[s] = s;
    for (int i = 0; i < n && end < 0; i++) {
        int r = v->room[i];
        if (v->load[r] < M) {
            end = r;
            break;
        }
        for (int j = 0; j < v->S; j++) {
            int e = policy_shared(v, r, j), p = policy_partner(r, j, -1, v->N, v->G);
            policy_visit(v, e, r, policy_partner(r, j, 1, v->N, v->G), &n);
            if (p < 0) continue;
            e = policy_shared(v, p, j); // a copy here: back home, or on to another holder
            policy_visit(v, e, r, p, &n);
            for (int k = j % v->H; k < v->S; k += v->H) policy_visit(v, e, r, policy_partner(p, k, 1, v->N, v->G), &n);
        }
    }
    if (end < 0) return 0;
    int64_t amount = cost_max(0, v->load[s] - M), room = M - v->load[end];
    if (room < amount) amount = room;
    for (int r = end; r != s; r = v->p_keep[r]) {
        int q = v->q[v->p_take[r] * v->R + v->p_keep[r]];
        if (q < amount) amount = q;
    }
    for (int r = end; r != s; r = v->p_keep[r]) solve_move(v, v->p_take[r], v->p_keep[r], r, (int)amount);
    return 1;
}

SOLVE_BIG int policy_level_to(Solve *v, int64_t M) { // no rank above M, if that can be had: a maximum flow
    for (int s = 0; s < v->R; s++)
        while (v->load[s] > M)
            if (!policy_augment(v, s, M)) return 0;
    return 1;
}

SOLVE_BIG void policy_lplb(Solve *v) {
    int64_t lo = v->mean - 1, hi = 0;
    if (v->S == 0) return;
    policy_hottest(v);
    for (int r = 0; r < v->R; r++) {
        policy_order(v->onto + r * v->H, v->key + r * v->H, v->H);
        for (int i = 0; i < v->H; i++) v->onto[r * v->H + i] += r * v->H;
        hi = cost_max(hi, v->load[r]);
    }
    while (hi - lo > 1) { // the optimum of the linear program, rounded up, as all its vertices are integral
        int64_t mid = lo + (hi - lo) / 2;
        policy_return(v, 0, v->E);
        if (policy_level_to(v, mid)) hi = mid;
        else lo = mid;
    }
    policy_return(v, 0, v->E);
    policy_level_to(v, hi);
}

// ---- ultraep --------------------------------------------------------------------------------------------------------------
// Fills node n so that no rank is above M: experts by heat, each onto the rank with most slack. Returns 0 if it does not come off
SOLVE_BIG int policy_fill(Solve *v, int n, int64_t M) {
    int first = n * v->G, last = first + v->G;
    policy_return(v, first * v->H, last * v->H);
    for (int k = 0; k < v->E; k++) {
        int e = v->onto[k], home = solve_home(v, e);
        if (home < first || home >= last) continue;
        while (v->load[home] > M && v->q[e * v->R + home] > 0) {
            int to = -1;
            for (int r = first; r < last; r++)
                if (r != home && v->load[r] < M && policy_takes(v, e, r) && (to < 0 || v->load[r] < v->load[to])) to = r;
            if (to < 0) break;
            int d = flow_min((int)(v->load[home] - M), (int)(M - v->load[to]));
            solve_move(v, e, home, to, flow_min(d, v->q[e * v->R + home]));
        }
    }
    for (int r = first; r < last; r++)
        if (v->load[r] > M) return 0;
    return 1;
}

// Whether a threshold can be met does not rise and fall with it in such a fill, so thresholds are tried on a grid, lowest
// first, and on a finer one below the first that is met.
SOLVE_BIG void policy_ultraep(Solve *v) {
    policy_hottest(v);
    for (int n = 0; n < v->N; n++) {
        int64_t lo = (v->nload[n] + v->G - 1) / v->G, hi = 0, M;
        for (int r = n * v->G; r < (n + 1) * v->G; r++) hi = cost_max(hi, v->load[r]);
        for (int round = 0; round < 2; round++) {
            int64_t range = hi - lo;
            int k = 0;
            for (M = lo; k < POLICY_GRID && !policy_fill(v, n, M); M = lo + range * ++k / POLICY_GRID) continue;
            hi = M;
            if (k > 0) lo += range * (k - 1) / POLICY_GRID;
        }
        policy_fill(v, n, hi);
    }
}

// ---- moonep ---------------------------------------------------------------------------------------------------------------
// While a rank is above the mean, the least loaded one that was not filled yet is filled to the mean by the fullest one alone,
// its largest experts first: so a rank needs copies of one donor's experts only, E/R at most, and with as many slots every
// rank ends at the mean. A donor may fall below the mean and be filled later; one that was filled never gives.
SOLVE_BIG void policy_moonep(Solve *v) {
    for (int r = 0; r < v->R; r++) v->room[r] = 0; // filled
    for (int turn = 0; turn < v->R; turn++) {
        int from = 0, to = -1;
        int64_t over = 0;
        for (int r = 0; r < v->R; r++) {
            if (v->load[r] > v->load[from]) from = r;
            over += cost_max(0, v->load[r] - v->mean);
            if (!v->room[r] && v->load[r] < v->mean && (to < 0 || v->load[r] < v->load[to])) to = r;
        }
        if (over == 0 || to < 0) return;
        int64_t left = v->mean - v->load[to];
        if (v->load[from] - v->mean == over && over < left) left = over; // nobody else is above
        v->room[to] = 1;
        while (left > 0 && v->held[to] < v->S) {
            int e = from * v->H;
            for (int i = e + 1; i < (from + 1) * v->H; i++)
                if (v->q[i * v->R + from] > v->q[e * v->R + from]) e = i;
            int n = flow_min((int)left, v->q[e * v->R + from]);
            if (n == 0) break;
            solve_move(v, e, from, to, n);
            left -= n;
        }
    }
}

// ---- all of them ----------------------------------------------------------------------------------------------------------
// scratch of policy_solve and policy_topoep: 2 E int64, then (E,R) int
SOLVE_SIZE size_t policy_work_bytes(int R, int E) { // a multiple of 8
    return 2 * (size_t)E * sizeof(int64_t) + ((size_t)E * (size_t)R + 1) / 2 * 2 * sizeof(int);
}

// v becomes the policy's plan
SOLVE_BIG void policy_make(Solve *v, Policy policy, int64_t *history, int64_t *scratch) {
    solve_identity(v);
    if (policy == POLICY_FASTERMOE) policy_fastermoe(v);
    SOLVE_BARRIER();
    SOLVE_ONE {
        if (policy == POLICY_EPLB) policy_eplb(v, history, scratch);
        if (policy == POLICY_LLEP) policy_llep(v);
        if (policy == POLICY_ECHO) policy_echo(v, (int *)(scratch + 2 * v->E));
        if (policy == POLICY_LPLB) policy_lplb(v);
        if (policy == POLICY_ULTRAEP) policy_ultraep(v);
        if (policy == POLICY_MOONEP) policy_moonep(v);
        for (int e = 0; e < v->E && v->block > 1; e++)
            for (int r = 0; r < v->R; r++) {
                int odd = v->q[e * v->R + r] % v->block;
                if (r != solve_home(v, e) && odd > 0) solve_move(v, e, r, solve_home(v, e), odd);
            }
    }
    SOLVE_BARRIER();
}

// Each rank computes its own pairs of the `most` foreign experts it has most pairs of
SOLVE_BIG void policy_own(Solve *v, int most) {
    for (int r = 0; r < v->R; r++)
        while (v->held[r] < most) {
            int top = -1;
            for (int e = 0; e < v->E; e++) {
                int at = e * v->R + r;
                if (r == solve_home(v, e) || v->q[at] > 0 || v->dt[at] < v->block) continue;
                if (top < 0 || v->dt[at] > v->dt[top * v->R + r]) top = e;
            }
            if (top < 0) break;
            solve_move(v, top, solve_home(v, top), r, v->dt[top * v->R + r] / v->block * v->block);
        }
}

// Plans of the policies with exact counts, and of ranks that start with their own pairs: copies that pay only together, as
// their pairs change places, are not found one by one. even: each is levelled as far as its copies allow first.
SOLVE_BIG void policy_portfolio(Solve *v, int64_t *scratch, int even) {
    for (int p = POLICY_EPLB; p < POLICIES; p++) { // eplb as if this were its past
        SOLVE_BARRIER();
        policy_make(v, (Policy)p, NULL, scratch);
        solve_keep(v);
        if (!even) continue;
        solve_even(v);
        solve_keep(v);
    }
    for (int most = v->S; most > 0 && !even && !(v->without & PLAN_NO_LOCALITY); most /= 2) {
        SOLVE_BARRIER();
        solve_identity(v);
        SOLVE_ONE policy_own(v, most);
        SOLVE_BARRIER();
        solve_keep(v);
        for (int sharp = 24; sharp <= 96; sharp *= 2) {
            solve_refresh(v, sharp);
            solve_level(v, 3, -1);
        }
        solve_keep(v);
    }
}

// Least largest load first. Plans for balance alone, levelled exactly; then pairs and copies change places for J's sake, as far
// as no rank gets above the least largest load that was found.
SOLVE_BIG void policy_balance(Solve *v, PlanEffort effort, int64_t *scratch) {
    solve_none(v);
    if (v->S == 0 || v->R == 1 || v->best_load <= v->mean) return;
    int quiet = v->quiet, passes = effort == EFFORT_LOW || v->without & PLAN_NO_PORTFOLIO ? 1 : 3;
    SOLVE_BARRIER();
    for (int k = 0; k < passes; k++) {
        Effort f = solve_pass(v, effort, k);
        SOLVE_ONE v->quiet = quiet ? quiet : 6, v->max_intra = v->max_inter = v->R * v->S;
        solve_identity(v);
        for (int sharp = f.sharp, added = 1; added > 0 && sharp < 400; sharp *= 2) {
            solve_refresh(v, sharp);
            added = solve_grow(v, f);
        }
        solve_polish(v, f, 40);
        solve_even(v);
        solve_keep(v);
    }
    if (!(v->without & PLAN_NO_PORTFOLIO)) policy_portfolio(v, scratch, 1);
    int cap = (int)v->best_load;
    solve_become(v, v->best_q);
    SOLVE_ONE v->quiet = quiet, v->cap = cap;
    SOLVE_BARRIER();
    for (int sharp = 24; sharp <= 96; sharp *= 2) {
        solve_refresh(v, sharp);
        solve_level(v, 3, -1);
    }
    solve_keep(v);
}

// TopoEP's plan
HOSTDEV void policy_topoep(Solve *v, PlanEffort effort, int64_t *scratch) {
    if (v->target == TARGET_BALANCE) {
        policy_balance(v, effort, scratch);
    } else {
        if (!solve_climbs(v, effort)) return;
        if (effort != EFFORT_LOW && !(v->without & PLAN_NO_PORTFOLIO)) policy_portfolio(v, scratch, 0);
    }
    uint64_t seed = 1;
    int size = v->R * v->E, usual = flow_max(8, flow_min(60, 32768 / size)), low = flow_max(0, flow_min(64, 4096 / size - 1)); // what time allows
    solve_rounds(v, &seed, effort == EFFORT_LOW ? low : effort == EFFORT_HIGH ? flow_max(200, flow_min(2000, 8192000 / size)) : usual);
}

// The plan of any policy, from a Solve that solve_bind has set up. history (E): of eplb, all zero before the first microbatch,
// updated; may be NULL, then eplb sees the counts themselves. scratch: policy_work_bytes
HOSTDEV void policy_solve(Solve *v, PlanOptions o, int64_t *history, int64_t *scratch) {
    if (o.policy == POLICY_TOPOEP) {
        policy_topoep(v, o.effort, scratch);
    } else if (o.policy == POLICY_NONE) {
        solve_none(v);
    } else {
        policy_make(v, o.policy, history, scratch);
        SOLVE_ONE v->best_ps = v->best_load = INT64_MAX;
        SOLVE_BARRIER();
        solve_keep(v);
    }
}
#endif
