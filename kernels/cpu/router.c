// From logits to experts and weights, its backward, and what is counted of it, on the CPU.
#include "kernels/cpu/dev.h"
#include "kernels/cpu/vec.h"
#include "kernels/cpu/vmath.h"
#include <string.h>

// Added to every sum of scores that divides: DeepSeek's guard for sigmoid scores. A sum of softmax scores only comes near
// it where a bias chose experts whose scores all underflow; elsewhere it changes no bit.
static const wide TINY = (wide)1e-20;

// ---- forward -------------------------------------------------------------------------------------------------------
DEV_CLONES static int row_finite(const wide *x, int E) {
    wide lane[VLANES] = {0}, s = 0; // stay 0: x - x is NaN for a NaN and for an infinity
    int e = 0;
    for (; e + VLANES <= E; e += VLANES)
        for (int j = 0; j < VLANES; j++) lane[j] += x[e + j] - x[e + j];
    for (; e < E; e++) s += x[e] - x[e];
    for (int j = 0; j < VLANES; j++) s += lane[j];
    return s == 0;
}

// score (E) overwritten; returns log sum_e exp logit
DEV_CLONES static wide row_scores(wide *restrict score, const wide *restrict x, int E, RouterScore kind) {
    wide max = vmax(x, E), sum;
    for (int e = 0; e < E; e++) score[e] = vexp(x[e] - max);
    sum = vsum(score, E);
    if (kind == ROUTER_SIGMOID)
        for (int e = 0; e < E; e++) score[e] = vsigmoid(x[e]);
    else
        for (int e = 0; e < E; e++) score[e] /= sum;
    return max + vlog(sum);
}

DEV_CLONES static void row_normalise(wide *x, int E) {
    wide a = 1 / (vsum(x, E) + TINY);
    for (int e = 0; e < E; e++) x[e] *= a;
}

// Where score + bias (NULL: none) is largest, the lowest such place. Lane j of the vectors looks at every VL-th element and
// keeps its first; written out because the compiler does not vectorise a search.
DEV_CLONES static int row_argmax(const wide *score, const wide *bias, int E) {
    vec best = (vec){0} - INFINITY;
    ivec at = {0}, here = {0};
    for (int j = 0; j < VL; j++) here[j] = j;
    int e = 0;
    for (; e + VL <= E; e += VL) {
        vec key = TILE_LOAD(score + e);
        if (bias) key += TILE_LOAD(bias + e);
        ivec more = key > best;
        best = (vec)((more & (ivec)key) | (~more & (ivec)best));
        at = (more & here) | (~more & at);
        here += VL;
    }
    wide top = best[0];
    int where = (int)at[0];
    for (int j = 1; j < VL; j++) {
        int take = (best[j] > top) | ((best[j] == top) & (at[j] < where));
        top = take ? best[j] : top;
        where = take ? (int)at[j] : where;
    }
    for (; e < E; e++) {
        wide key = bias ? score[e] + bias[e] : score[e];
        if (key > top) top = key, where = e;
    }
    return where;
}

// The K largest, largest first, ties to the lower index; picked (K) their scores. A score that is taken makes way for the
// next search and is put back at the end.
static void row_choose(int *idx, wide *picked, wide *score, const wide *bias, int E, int K) {
    for (int k = 0; k < K; k++) {
        int e = row_argmax(score, bias, E);
        idx[k] = e;
        picked[k] = score[e];
        score[e] = -INFINITY;
    }
    for (int k = 0; k < K; k++) score[idx[k]] = picked[k];
}

static void row_route(int *idx, wide *weight, wide *prob, wide *lse, const wide *logits, const wide *bias, int t, RouterShape s) {
    *lse = row_scores(prob, logits, s.E, s.score);
    if (s.even) {
        for (int k = 0; k < s.K; k++) {
            idx[k] = (int)(((int64_t)s.first + t + k * (s.E / s.K)) % s.E);
            weight[k] = prob[idx[k]];
        }
    } else {
        row_choose(idx, weight, prob, bias, s.E, s.K);
    }
    wide sum = 0, a = (wide)s.scale;
    for (int k = 0; k < s.K; k++) sum += weight[k];
    if (s.renorm) a /= sum + TINY;
    for (int k = 0; k < s.K; k++) weight[k] *= a;
    if (s.score == ROUTER_SOFTMAX) return; // sums to 1 as it is
    row_normalise(prob, s.E);
}

void dev_route(Dev *d, int *idx, wide *weight, wide *prob, wide *lse, int *bad, const wide *logits, const wide *bias,
               RouterShape s) {
    CHECK_USAGE(s.K >= 1 && s.K <= s.E, "%d experts per token chosen from %d, expected 1 to %d", s.K, s.E, s.E);
    dev_enter(d);
    int first_bad = 0, bias_ok = !bias || row_finite(bias, s.E);
    size_t work = SIZE(s.BT, s.E);
#pragma omp parallel for num_threads(d->threads) if (work > DEV_PARALLEL_MIN / 8) schedule(static)
    for (int t = 0; t < s.BT; t++) {
        size_t e0 = (size_t)t * s.E, k0 = (size_t)t * s.K;
        if (bias_ok && row_finite(logits + e0, s.E)) {
            row_route(idx + k0, weight + k0, prob + e0, lse + t, logits + e0, bias, t, s);
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
    enum { PIECE = 64 };
    wide dot = vdot(ds, prob, E), all = TINY, piece[PIECE];
    for (int e0 = 0; e0 < E; e0 += PIECE) {
        int n = E - e0 < PIECE ? E - e0 : PIECE;
        for (int e = 0; e < n; e++) piece[e] = vsigmoid(x[e0 + e]);
        all += vsum(piece, n);
    }
    all = 1 / all;
    for (int e = 0; e < E; e++) ds[e] = (ds[e] - dot) * all;
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
        wide dot = vdot(ds, prob, E);
        for (int e = 0; e < E; e++) ds[e] = prob[e] * (ds[e] - dot + dlse);
        return;
    }
    for (int e = 0; e < E; e++) {
        wide s = vsigmoid(x[e]);
        ds[e] = ds[e] * (s * (1 - s)) + dlse * vexp(x[e] - lse);
    }
}

void dev_route_bwd(Dev *d, wide *dlogits, const wide *dweight, const int *idx, const wide *prob, const wide *lse,
                   const wide *logits, const wide *f, int n_groups, wide aux_scale, wide z_scale, RouterShape s) {
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
        if (!row_finite(x, s.E)) continue; // dev_route has told
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
    CHECK_USAGE(pairs <= 1 << 24, "%zu pairs in one balance group, at most %d can be counted exactly (hint: --micro-batch)",
                pairs, 1 << 24);
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
