#include "topoep/times.h"
#include "kernels/check.h"
#include "topoep/cost.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

int64_t times_crossing_bytes(const CostModel *m, int pairs) {
    return (int64_t)SIZE(4, m->C, m->token_bytes) + pairs * (2 * m->grad_bytes + 2 * (int64_t)sizeof(int32_t));
}

TimeModel times_model(const Cost *cost, const CostModel *m, double hop_us, double plan_us) {
    double rows = 4.0 * m->C * m->token_bytes; // bytes of a pair that pair_inter_ps and pair_intra_ps are the time of
    TimeModel t = {.cost = *cost, .R = cost->N * cost->G, .E = m->E, .hop_us = hop_us, .plan_us = plan_us};
    t.counts_inter_ps = (double)cost->pair_inter_ps / (rows * cost->delta), t.counts_intra_ps = (double)cost->pair_intra_ps / rows;
    t.pair_bytes = (int64_t)rows + 2 * m->grad_bytes;
    t.crossing_bytes = times_crossing_bytes(m, cost->delta == 1 ? 1 : m->K);
    t.copy_bytes = (int64_t)SIZE(3, m->C, m->F) * (2 * m->weight_bytes + m->grad_bytes);
    return t;
}

int64_t times_total(const LayerTime *t) { return t->counts + t->plan + t->compute + t->tokens + t->weights + t->fixed; }

RankSums times_sums_alloc(int R, int N) {
    int64_t *at = host_alloc(SIZE(3 * (R + N), sizeof(int64_t)));
    return (RankSums){at, at + R, at + 2 * R, at + 3 * R, at + 3 * R + N, at + 3 * R + 2 * N};
}
void times_sums_free(RankSums *s) { free(s->load); }

void times_sums(RankSums *s, const int *D, const int *quota, const TimeModel *m) {
    int R = m->R, N = m->cost.N, G = m->cost.G;
    memset(s->load, 0, SIZE(3 * (R + N), sizeof(int64_t)));
    for (int e = 0; e < m->E; e++)
        for (int n = 0; n < N; n++) {
            int64_t has = 0, computes = 0;
            for (int r = n * G; r < (n + 1) * G; r++) {
                int64_t d = D[(int64_t)r * m->E + e], q = quota[(int64_t)e * R + r];
                s->load[r] += q, s->rows[r] += d, s->self[r] += d < q ? d : q;
                has += d, computes += q;
            }
            s->nload[n] += computes, s->nrows[n] += has, s->nlocal[n] += has < computes ? has : computes;
        }
}

int64_t times_rank_compute(const RankSums *s, const TimeModel *m, int r) { return m->cost.pair_compute_ps * s->load[r]; }
int64_t times_rank_tokens(const RankSums *s, const TimeModel *m, int r) {
    int n = r / m->cost.G;
    return cost_max(m->cost.pair_intra_ps * (cost_max(s->load[r], s->rows[r]) - s->self[r]),
                    m->cost.pair_inter_ps * (cost_max(s->nload[n], s->nrows[n]) - s->nlocal[n]));
}

static int64_t counts_ps(const TimeModel *m, int gathers) {
    const Cost *c = &m->cost;
    int hops = m->R > 1;
    for (int n = 1; n < c->N; n *= 2) hops++;
    double share = gathers ? 1 : 1.0 / m->R, bytes = 4.0 * m->E * share;
    double inter = m->counts_inter_ps * bytes * (m->R - c->G), intra = c->G > 1 ? m->counts_intra_ps * bytes * m->R : 0;
    return llround(m->hop_us * 1e6 * hops + inter + intra);
}

LayerTime times_layer(const PlanInfo *p, const RankSums *s, const TimeModel *m, int plans, int gathers) {
    LayerTime t = {.counts = counts_ps(m, gathers), .plan = plans ? llround(m->plan_us * 1e6) : 0, .compute = p->compute_ps,
                   .tokens = p->tokens_ps, .weights = p->weights_ps, .fixed = p->fixed_ps};
    int64_t compute = 0, tokens = 0;
    for (int r = 0; r < m->R; r++) compute += times_rank_compute(s, m, r), tokens += times_rank_tokens(s, m, r);
    t.straggler = t.compute - compute / m->R + t.tokens - tokens / m->R;
    return t;
}

Traffic times_traffic(const PlanInfo *p, const TimeModel *m) {
    double out = (double)p->pairs_inter, G = m->cost.G;
    return (Traffic){llround(out * m->cost.delta), llround(out * (G - 1) / G)};
}

Bytes times_bytes(const PlanInfo *p, Traffic t, const TimeModel *m) {
    return (Bytes){.self = p->pairs_self * m->pair_bytes, .node = (p->pairs_node + t.passed_on) * m->pair_bytes,
                   .inter = t.crossings * m->crossing_bytes, .weights_node = p->node_copies * m->copy_bytes,
                   .weights_inter = p->inter_copies * m->copy_bytes};
}
