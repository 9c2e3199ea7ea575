// From logits to experts and weights, its backward, and what is counted of it, on the CPU.
#include "kernels/cpu/dev.h"
#include "kernels/cpu/vmath.h"
#include <string.h>

// Added to every sum of scores that divides: DeepSeek's guard for sigmoid scores. A sum of softmax scores only comes near
// it where a bias chose experts whose scores all underflow; elsewhere it changes no bit.
static const wide TINY = (wide)1e-20;

// ---- forward -------------------------------------------------------------------------------------------------------
static int row_finite(const wide *x, const wide *bias, int E) {
    int ok = 1;
    for (int e = 0; e < E; e++) ok &= isfinite(x[e]) && (!bias || isfinite(bias[e]));
    return ok;
}

// score (E) overwritten; returns log sum_e exp logit
DEV_CLONES static wide row_scores(wide *restrict score, const wide *restrict x, int E, RouterScore kind) {
    wide max = x[0], sum = 0;
    for (int e = 1; e < E; e++) max = x[e] > max ? x[e] : max;
    for (int e = 0; e < E; e++) score[e] = vexp(x[e] - max);
    for (int e = 0; e < E; e++) sum += score[e];
    if (kind == ROUTER_SIGMOID)
        for (int e = 0; e < E; e++) score[e] = vsigmoid(x[e]);
    else
        for (int e = 0; e < E; e++) score[e] /= sum;
    return max + vlog(sum);
}

// Indices of the K largest of score + bias, largest first. A later one must be strictly larger to go ahead, so ties go to
// the lower index. key (K) holds their biased scores afterwards.
static void row_choose(int *idx, wide *key, const wide *score, const wide *bias, int E, int K) {
    for (int e = 0; e < E; e++) {
        wide s = bias ? score[e] + bias[e] : score[e];
        int k = e < K ? e : K;
        if (k == K && !(s > key[K - 1])) continue;
        if (k == K) k--; // the last one falls out
        for (; k > 0 && s > key[k - 1]; k--) {
            key[k] = key[k - 1];
            idx[k] = idx[k - 1];
        }
        key[k] = s;
        idx[k] = e;
    }
}

static void row_route(int *idx, wide *weight, wide *prob, wide *lse, const wide *logits, const wide *bias, RouterShape s) {
    *lse = row_scores(prob, logits, s.E, s.score);
    row_choose(idx, weight, prob, bias, s.E, s.K); // weight serves as room for the keys
    wide sum = 0, a = (wide)s.scale;
    for (int k = 0; k < s.K; k++) sum += weight[k] = prob[idx[k]];
    if (s.renorm) a /= sum + TINY;
    for (int k = 0; k < s.K; k++) weight[k] *= a;
    if (s.score == ROUTER_SOFTMAX) return; // sums to 1 as it is
    wide all = 0;
    for (int e = 0; e < s.E; e++) all += prob[e];
    for (int e = 0; e < s.E; e++) prob[e] /= all + TINY;
}

void dev_route(Dev *d, int *idx, wide *weight, wide *prob, wide *lse, int *bad, const wide *logits, const wide *bias,
               RouterShape s) {
    CHECK_USAGE(s.K >= 1 && s.K <= s.E, "%d experts per token chosen from %d, expected 1 to %d", s.K, s.E, s.E);
    dev_enter(d);
    int first_bad = 0;
    size_t work = SIZE(s.BT, s.E);
#pragma omp parallel for num_threads(d->threads) if (work > DEV_PARALLEL_MIN / 8) schedule(static)
    for (int t = 0; t < s.BT; t++) {
        size_t e0 = (size_t)t * s.E, k0 = (size_t)t * s.K;
        if (row_finite(logits + e0, bias, s.E)) {
            row_route(idx + k0, weight + k0, prob + e0, lse + t, logits + e0, bias, s);
            continue;
        }
        for (int k = 0; k < s.K; k++) {
            idx[k0 + k] = k;
            weight[k0 + k] = 0;
        }
        memset(prob + e0, 0, (size_t)s.E * sizeof(wide));
        lse[t] = 0;
#pragma omp critical(dev_route_bad)
        if (!first_bad || t + 1 < first_bad) first_bad = t + 1;
    }
    if (first_bad && *bad == 0) *bad = first_bad;
    dev_leave(d);
}

// ---- backward ------------------------------------------------------------------------------------------------------
// The three below share ds (E): gradients by the scores, until the last turns them into gradients by the logits.
// q[e] = aux E f[e] is the gradient by prob = score / sum score. For softmax the sum is 1 and its gradient's part is the
// same for all e, which the softmax's own backward takes out again.
DEV_CLONES static void row_balance_bwd(wide *restrict ds, const wide *restrict f, const wide *restrict prob,
                                       const wide *restrict x, int E, wide aux, RouterScore kind) {
    for (int e = 0; e < E; e++) ds[e] = aux * E * f[e];
    if (kind == ROUTER_SOFTMAX) return;
    wide dot = 0, all = 0;
    for (int e = 0; e < E; e++) {
        dot += ds[e] * prob[e];
        all += vsigmoid(x[e]);
    }
    for (int e = 0; e < E; e++) ds[e] = (ds[e] - dot) / (all + TINY);
}

static wide score_of(const wide *prob, const wide *x, int e, RouterScore kind) {
    return kind == ROUTER_SOFTMAX ? prob[e] : vsigmoid(x[e]);
}

// w_k = scale s_k / sum_j s_j: dw_k/ds_i = scale (delta_ki - s_k / sum) / sum
static void row_weights_bwd(wide *ds, const wide *dweight, const int *idx, const wide *prob, const wide *x, RouterShape s) {
    wide sum = 0, dot = 0, a = (wide)s.scale;
    for (int k = 0; s.renorm && k < s.K; k++) {
        wide score = score_of(prob, x, idx[k], s.score);
        sum += score;
        dot += dweight[k] * score;
    }
    if (s.renorm) {
        dot /= sum + TINY;
        a /= sum + TINY;
    }
    for (int k = 0; k < s.K; k++) ds[idx[k]] += (dweight[k] - dot) * a;
}

// dlse: gradient by lse, whose own gradient by the logits is their softmax
DEV_CLONES static void row_scores_bwd(wide *restrict ds, const wide *restrict prob, const wide *restrict x, int E, wide lse,
                                      wide dlse, RouterScore kind) {
    if (kind == ROUTER_SOFTMAX) {
        wide dot = 0;
        for (int e = 0; e < E; e++) dot += ds[e] * prob[e];
        for (int e = 0; e < E; e++) ds[e] = prob[e] * (ds[e] - dot + dlse);
        return;
    }
    for (int e = 0; e < E; e++) {
        wide s = vsigmoid(x[e]);
        ds[e] = ds[e] * (s * (1 - s)) + dlse * vexp(x[e] - lse);
    }
}

void dev_route_bwd(Dev *d, wide *dlogits, const wide *dweight, const int *idx, const wide *prob, const wide *lse, const wide *logits,
                   const wide *f, int n_groups, wide aux_scale, wide z_scale, RouterShape s) {
    CHECK_USAGE(n_groups >= 1 && s.BT % n_groups == 0, "%d tokens in %d balance groups, expected groups of equal size", s.BT,
                n_groups);
    dev_enter(d);
    int group = s.BT / n_groups;
    size_t work = SIZE(s.BT, s.E);
#pragma omp parallel for num_threads(d->threads) if (work > DEV_PARALLEL_MIN / 8) schedule(static)
    for (int t = 0; t < s.BT; t++) {
        size_t e0 = (size_t)t * s.E, k0 = (size_t)t * s.K;
        wide *ds = dlogits + e0;
        const wide *x = logits + e0, *p = prob + e0;
        memset(ds, 0, (size_t)s.E * sizeof(wide));
        if (!row_finite(x, NULL, s.E)) continue; // dev_route has told
        if (f && aux_scale != 0) row_balance_bwd(ds, f + (size_t)(t / group) * s.E, p, x, s.E, aux_scale, s.score);
        row_weights_bwd(ds, dweight + k0, idx + k0, p, x, s);
        row_scores_bwd(ds, p, x, s.E, lse[t], 2 * z_scale * lse[t], s.score);
    }
    dev_leave(d);
}

// ---- counts --------------------------------------------------------------------------------------------------------
enum { SLAB = 16 }; // columns of prob that one task sums: a cache line

// p of the columns from e0 on; prob is the group's
DEV_CLONES static void slab_mean(wide *restrict p, const wide *restrict prob, int tokens, int E, int e0) {
    double sum[SLAB] = {0};
    int n = E - e0 < SLAB ? E - e0 : SLAB;
    for (int t = 0; t < tokens; t++) {
        const wide *row = prob + (size_t)t * E + e0;
        if (n == SLAB)
            for (int j = 0; j < SLAB; j++) sum[j] += row[j];
        else
            for (int j = 0; j < n; j++) sum[j] += row[j];
    }
    for (int j = 0; j < n; j++) p[e0 + j] = (wide)(tokens ? sum[j] / tokens : 0);
}

static void pair_share(wide *f, const int *idx, size_t pairs, int E) {
    for (int e = 0; e < E; e++) f[e] = 0;
    for (size_t p = 0; p < pairs; p++) f[idx[p]]++; // exact up to the 2^24 that the caller checked
    for (int e = 0; pairs && e < E; e++) f[e] /= (wide)pairs;
}

void dev_balance(Dev *d, wide *f, wide *p, const int *idx, const wide *prob, int BT, int E, int K, int n_groups) {
    CHECK_USAGE(n_groups >= 1 && BT % n_groups == 0, "%d tokens in %d balance groups, expected groups of equal size", BT,
                n_groups);
    size_t tokens = BT / n_groups, pairs = SIZE(tokens, K), slabs = (E + SLAB - 1) / SLAB, work = SIZE(BT, E);
    CHECK_USAGE(pairs <= 1 << 24, "%zu pairs in one balance group, at most %d can be counted exactly (hint: --micro-batch)", pairs,
                1 << 24);
    dev_enter(d);
#pragma omp parallel for num_threads(d->threads) if (work > DEV_PARALLEL_MIN) schedule(dynamic)
    for (size_t task = 0; task < n_groups * (slabs + 1); task++) {
        size_t g = task / (slabs + 1), slab = task % (slabs + 1);
        if (slab == slabs) pair_share(f + g * E, idx + g * pairs, pairs, E);
        else slab_mean(p + g * E, prob + g * tokens * E, (int)tokens, E, (int)slab * SLAB);
    }
    dev_leave(d);
}

void dev_route_count(Dev *d, int *count, int *seen, int *ord, const int *idx, int BT, int E, int K, int capacity) {
    dev_enter(d);
    size_t pairs = SIZE(BT, K);
    for (int e = 0; e < E; e++) seen[e] = 0;
    for (size_t p = 0; p < pairs; p++) {
        int before = seen[idx[p]]++;
        ord[p] = capacity <= 0 || before < capacity ? before : -1;
    }
    for (int e = 0; e < E; e++) count[e] = capacity <= 0 || seen[e] < capacity ? seen[e] : capacity;
    dev_leave(d);
}
