// Initial routers whose choices follow a Zipf law: for studies of imbalance.
//
// A linear router of inputs that are symmetric about zero can give no expert more than half of the tokens: whatever it ranks
// first for x it ranks last for -x. So imbalance needs a part of the input that is the same for all tokens. It is channel 0
// of the embedding, set to LIFT standard deviations; norms and residual connections carry it to every layer. The router's
// column 0 then is an offset per expert; its other columns stay random and make the choice depend on the token.
//
// The law holds in the mean over draws of the router (demo's shape, Z = 1, Austen's text: total variation 0.04). A layer's own
// choices scatter about it (0.25), for the choice depends mostly on the token, and few bytes make up most of a text. No expert can
// have more than one choice of a token, so shares stop short of 1/K.
// The expert at place k of the law is the e with rng_permute(seed, rng_name("layers.L.router"), e, E) = k.
#include "kernels/rng.h"
#include "model/state.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double LIFT = 2;      // enough to stand out of channel 0's noise, too little to disturb attention
static const double AVERAGE = 0.2; // square of a mean of text's values over a context, relative to one value's
enum { SAMPLES = 8192, ROUNDS = 80 };

// share[e] of all choices that fall on e when every sample's scores are offset[e] + z[sample][e] and the K largest are chosen
static void choice_shares(double *share, const double *offset, const double *z, int E, int K) {
    double *best = host_alloc(SIZE(K, sizeof(double)));
    int *who = host_alloc(SIZE(K, sizeof(int)));
    memset(share, 0, SIZE(E, sizeof(double)));
    for (int s = 0; s < SAMPLES; s++) {
        int held = 0;
        const double *row = z + (size_t)s * (size_t)E;
        for (int e = 0; e < E; e++) {
            double v = offset[e] + row[e];
            if (held == K && v <= best[K - 1]) continue;
            int k = held < K ? held++ : K - 1;
            for (; k > 0 && best[k - 1] < v; k--) {
                best[k] = best[k - 1];
                who[k] = who[k - 1];
            }
            best[k] = v;
            who[k] = e;
        }
        for (int k = 0; k < K; k++) share[who[k]] += 1.0 / ((double)SAMPLES * K);
    }
    free(best);
    free(who);
}

// want[e] ~ (e+1)^-Z, at most `top` each (an expert gets at most one choice of a token), in all 1
static void zipf_shares(double *want, int E, int K, double Z) {
    double top = 0.98 / K, level = 0;
    for (int capped = 0; capped < E; capped++) {
        double rest = 0;
        for (int e = capped; e < E; e++) rest += pow(e + 1, -Z);
        level = (1 - capped * top) / rest;
        for (int e = 0; e < E; e++) want[e] = e < capped ? top : level * pow(e + 1, -Z);
        if (want[capped] <= top) return;
    }
}

// Offsets in units of the scores' deviation, by damped fixed-point steps on fixed random samples
static void zipf_offsets(double *offset, int E, int K, double Z, uint64_t seed) {
    double *z = host_alloc(SIZE(SAMPLES, E, sizeof(double)));
    double *share = host_alloc(SIZE(E, sizeof(double))), *want = host_alloc(SIZE(E, sizeof(double)));
    uint64_t stream = rng_name("router skew");
    for (size_t i = 0, n = SIZE(SAMPLES, E); i < n; i++) z[i] = rng_normal(seed, stream, i);
    zipf_shares(want, E, K, Z);
    memset(offset, 0, SIZE(E, sizeof(double)));
    for (int round = 0; round < ROUNDS; round++) {
        choice_shares(share, offset, z, E, K);
        double mean = 0;
        for (int e = 0; e < E; e++) {
            offset[e] += 0.4 * log(want[e] / fmax(share[e], 0.5 / ((double)SAMPLES * K)));
            mean += offset[e] / E;
        }
        for (int e = 0; e < E; e++) offset[e] -= mean;
    }
    free(z);
    free(share);
    free(want);
}

static void set_column0(Dev *d, real *w, int rows, int C, const double *value) {
    real *host = host_alloc(SIZE(rows, C, sizeof(real)));
    dev_download(d, host, w, SIZE(rows, C, sizeof(real)));
    for (int r = 0; r < rows; r++) host[SIZE(r, C)] = real_of(value[r]);
    dev_upload(d, w, host, SIZE(rows, C, sizeof(real)));
    free(host);
}

// Channel 0 of the input of layer l's router: attention's outputs have made the stream it stands in larger.
static double lift_at(const ModelConfig *c, int l) {
    double embed = 1 + (LIFT * LIFT - 1) / c->C, std_out = c->init_std / sqrt(2.0 * c->L);
    double attention = c->C * std_out * std_out * c->NH * c->HS * AVERAGE; // relative to init_std^2
    return LIFT / sqrt(embed + (l + 1) * attention);
}

void skew_init(Params *ps, Dev *d, const ModelConfig *c, uint64_t seed) {
    int n = c->V > c->E ? c->V : c->E;
    double *value = host_alloc(SIZE(n, sizeof(double))), *offset = host_alloc(SIZE(n, sizeof(double)));
    for (int v = 0; v < c->V; v++) value[v] = LIFT * c->init_std;
    set_column0(d, param_w(ps, param_find(ps, "embed", -1)), c->V, c->C, value);
    if (c->E > 1) zipf_offsets(offset, c->E, c->K, c->router_skew, seed);
    for (int i = 0; i < ps->n; i++) {
        const Param *p = &ps->p[i];
        if (p->init != INIT_ROUTER) continue;
        double lift = lift_at(c, p->layer), noise = c->init_std * sqrt(c->C - lift * lift); // of a logit through other channels
        for (int e = 0; e < c->E; e++) {
            uint64_t place = rng_permute(seed, rng_name(p->name), (uint64_t)e, (uint64_t)c->E);
            value[e] = offset[place] * noise / lift;
        }
        set_column0(d, param_w(ps, p), c->E, c->C, value);
    }
    free(value);
    free(offset);
}
