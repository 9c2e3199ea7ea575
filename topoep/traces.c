#include "topoep/traces.h"
#include "kernels/check.h"
#include "kernels/rng.h"
#include <stdlib.h>
#include <string.h>

enum { BALANCED, ZIPF, HOT_EXPERTS, HOT_RANK, SPREAD, RAGGED, IDLE, TASTES, ROTATING, BURST, DRIFT, DEEPSEEK, GLM, QWEN };
const DemandKind demand_kinds[] = {
    [BALANCED] = {"balanced", 0, 0, "all experts alike"},
    [ZIPF] = {"zipf", 2000, 0, "scattered experts, heat falling by a power of the place; every microbatch differs by up to a "
              "quarter"},
    [HOT_EXPERTS] = {"hot-experts", 2000, 0, "a sixteenth of the experts, scattered, equally hot"},
    [HOT_RANK] = {"hot-rank", 3000, 0, "all experts of one rank, equally hot"},
    [SPREAD] = {"spread", 3000, 0, "the experts' heat of hot-rank, but on different ranks (the level is hot-rank's)"},
    [RAGGED] = {"ragged", 2000, 0, "zipf, with 0 to 2 times the tokens from each source"},
    [IDLE] = {"idle", 0, 0, "half of the experts, scattered, without a pair"},
    [TASTES] = {"tastes", 0, 0, "every node prefers other experts (shares by the place's inverse)"},
    [ROTATING] = {"rotating", 2000, 0, "hot-experts, other ones in every microbatch"},
    [BURST] = {"burst", 3000, 0, "balanced, and in one microbatch of eight hot-experts"},
    [DRIFT] = {"drift", 2000, 0, "zipf, whose places change over 64 microbatches"},
    // Rank max/mean published for training with 64 ranks: UltraEP, arXiv 2606.04101. The shape (zipf) is a choice.
    [DEEPSEEK] = {"deepseek-v3", 1300, 64, "zipf with the imbalance published for DeepSeek-V3 on 64 ranks"},
    [GLM] = {"glm-4.5-air", 2230, 64, "the same of GLM-4.5-Air"},
    [QWEN] = {"qwen3-235b", 2860, 64, "the same of Qwen3-235B"},
    {0},
};
enum { ONE = 1 << 30, BLEND = 1 << 20, DRIFT_STEPS = 64, BURST_STEPS = 8 };

int demand_find(const char *name) {
    for (int i = 0; demand_kinds[i].name; i++)
        if (strcmp(demand_kinds[i].name, name) == 0) return i;
    return -1;
}

// ---- shares, in units of 2^-30 ------------------------------------------------------------------------------------------------
static int64_t sum_of(const int64_t *w, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) sum += w[i];
    return sum;
}

static void normalise(int64_t *w, int n) { // all 0: even. Weights below 2^33
    int64_t sum = sum_of(w, n);
    for (int i = 0; i < n; i++) w[i] = sum ? w[i] * ONE / sum : ONE / n;
}

// An expert has at most one choice of a token: what is above 1/K goes to the others, in proportion
static void cap_shares(int64_t *w, int n, int K) {
    int64_t top = ONE / K;
    for (int round = 0; round < n; round++) {
        int64_t rest = 0, room = ONE;
        int over = 0;
        for (int i = 0; i < n; i++) {
            over += w[i] > top;
            if (w[i] >= top) room -= top;
            else rest += w[i];
        }
        if (!over) return;
        for (int i = 0; i < n; i++) w[i] = w[i] >= top ? top : rest > 0 ? w[i] * room / rest : w[i];
    }
}

static int64_t root(int64_t x) { // floor of the square root
    int64_t r = 0;
    for (int64_t bit = (int64_t)1 << 31; bit; bit >>= 1)
        if ((r + bit) * (r + bit) <= x) r += bit;
    return r;
}

// Weight of the expert at place k in the i-th of five ever steeper laws: 1, k^-1/2, k^-1, k^-2, all on the first
enum { LAWS = 5 };
static int64_t law(int i, int k) {
    int64_t place = k + 1;
    switch (i) {
    case 0: return ONE;
    case 1: return ((int64_t)1 << 50) / root(place << 40);
    case 2: return ONE / place;
    case 3: return ONE / place / place;
    default: return k == 0;
    }
}

static int64_t fullest(const int64_t *w, int E, int ranks) { // permille of the mean
    int64_t most = 0;
    for (int r = 0; r < ranks; r++) {
        int64_t sum = sum_of(w + r * (E / ranks), E / ranks);
        most = sum > most ? sum : most;
    }
    return most * ranks * 1000 / ONE;
}

static void blend(int64_t *w, const int64_t *a, const int64_t *b, int64_t part, int E, int K) {
    for (int e = 0; e < E; e++) w[e] = a[e] + (b[e] - a[e]) * part / BLEND;
    cap_shares(w, E, K);
}

// w (E) overwritten: between even and skewed (laws, E), as far along as gives the level
static void calibrate(int64_t *w, const int64_t *skewed, int laws, int level, int ranks, int E, int K) {
    int i = 0;
    for (; i < laws - 2; i++) { // the first pair of laws between which it lies
        blend(w, skewed + i * E, skewed + (i + 1) * E, BLEND, E, K);
        if (fullest(w, E, ranks) >= level) break;
    }
    int64_t lo = 0, hi = BLEND;
    const int64_t *a = skewed + i * E, *b = a + E;
    while (hi - lo > 1) {
        int64_t mid = (lo + hi) / 2;
        blend(w, a, b, mid, E, K);
        if (fullest(w, E, ranks) >= level) hi = mid;
        else lo = mid;
    }
    blend(w, a, b, hi, E, K);
}

// ---- kinds --------------------------------------------------------------------------------------------------------------------
typedef struct Draw { // one matrix
    const Demand *d;
    int base, R, H;
    int64_t step;
    int layer;
    uint64_t stream;
} Draw;

static uint64_t draw_at(const Draw *a, int64_t step, int s, int e) {
    return rng_u64(a->d->seed, a->stream, (((uint64_t)step << 10 | (uint64_t)a->layer) << 10 | (uint64_t)s) << 10 | (uint64_t)e);
}
static int place_at(const Draw *a, int64_t epoch, int e) { // a permutation of the experts, another one for each layer and epoch
    return (int)rng_permute(a->d->seed, a->stream + (uint64_t)epoch * 1024 + (uint64_t)a->layer + 1, (uint64_t)e, (uint64_t)a->d->E);
}

// Weights of the five laws, differing by up to a quarter between microbatches. w (LAWS,E) overwritten
static void zipf_laws(int64_t *w, const Draw *a, int64_t epoch) {
    int E = a->d->E;
    for (int e = 0; e < E; e++) {
        int64_t heat = 768 + (int64_t)(draw_at(a, a->step, 1023, e) & 511);
        int k = place_at(a, epoch, e);
        for (int i = 0; i < LAWS; i++) w[i * E + e] = law(i, k) * (i ? heat : 1024) >> 10;
    }
    for (int i = 0; i < LAWS; i++) normalise(w + i * E, E);
}

static void drift_laws(int64_t *w, const Draw *a) {
    int n = LAWS * a->d->E;
    int64_t at = a->step % DRIFT_STEPS, *next = host_alloc(SIZE(n, sizeof *next));
    zipf_laws(w, a, a->step / DRIFT_STEPS);
    zipf_laws(next, a, a->step / DRIFT_STEPS + 1);
    for (int i = 0; i < n; i++) w[i] += (next[i] - w[i]) * at / DRIFT_STEPS;
    free(next);
}

// An even split, and all on a few experts. w (2,E) overwritten
static void set_laws(int64_t *w, const Draw *a) {
    int E = a->d->E, hot = E / 16 > 0 ? E / 16 : 1, rank = (int)(draw_at(a, 0, 0, 0) % (uint64_t)a->R);
    int64_t turn = a->base == ROTATING ? a->step * hot % E : 0;
    for (int e = 0; e < E; e++) {
        w[e] = ONE;
        if (a->base == HOT_RANK || a->base == SPREAD) w[E + e] = e / a->H == rank;
        else w[E + e] = (place_at(a, 0, e) + turn) % E < hot;
    }
    normalise(w, E), normalise(w + E, E);
    if (a->base == BURST && a->step % BURST_STEPS != (int64_t)(draw_at(a, 0, 0, 1) % BURST_STEPS)) memcpy(w + E, w,
                                                                                                          SIZE(E, sizeof *w));
}

static void spread_ranks(int64_t *w, const Draw *a) { // i-th hot expert of the rank to the i-th rank from there
    int rank = (int)(draw_at(a, 0, 0, 0) % (uint64_t)a->R);
    for (int i = 1; i < a->H; i++) {
        int64_t *x = w + rank * a->H + i, *y = w + (rank + i) % a->R * a->H + i, t = *x;
        *x = *y, *y = t;
    }
}

// Shares of node n's sources. w (E) overwritten | laws (LAWS,E) scratch
static void shares(int64_t *w, int64_t *laws, const Draw *a, int n) {
    const Demand *d = a->d;
    const DemandKind *kind = &demand_kinds[d->kind];
    int E = d->E, level = d->level ? d->level : kind->level, ranks = kind->ranks && E % kind->ranks == 0 ? kind->ranks : a->R;
    switch (a->base) {
    case BALANCED:
    case IDLE:
        for (int e = 0; e < E; e++) w[e] = a->base == BALANCED || 2 * place_at(a, 0, e) < E;
        normalise(w, E);
        cap_shares(w, E, d->K);
        return;
    case TASTES:
        for (int e = 0; e < E; e++) w[e] = law(2, (place_at(a, 0, e) + n * E / d->N) % E);
        normalise(w, E);
        cap_shares(w, E, d->K);
        return;
    case ZIPF:
    case RAGGED: zipf_laws(laws, a, 0); break;
    case DRIFT: drift_laws(laws, a); break;
    default: set_laws(laws, a);
    }
    calibrate(w, laws, a->base == ZIPF || a->base == RAGGED || a->base == DRIFT ? LAWS : 2, level, ranks, E, d->K);
    if (a->base == SPREAD) spread_ranks(w, a);
}

// row (E) overwritten: tokens*K pairs by the shares w, which this source departs from a little
static void source_row(int *row, const int64_t *w, const Draw *a, int s, int tokens) {
    const Demand *d = a->d;
    int E = d->E, begin = (int)(draw_at(a, a->step, s, 0) % (uint64_t)E);
    int64_t pairs = (int64_t)tokens * d->K, left = pairs, sum = 0;
    for (int e = 0; e < E; e++) sum += w[e] * (int64_t)(30 + draw_at(a, a->step, s, e) % 5);
    for (int e = 0; e < E; e++) {
        int64_t n = pairs * (w[e] * (int64_t)(30 + draw_at(a, a->step, s, e) % 5) >> 8) / (sum >> 8);
        n = n > tokens ? tokens : n;
        row[e] = (int)n, left -= n;
    }
    for (int pass = 0; pass < 3; pass++) // what rounding and the cap left: one each to experts with a share; then wherever it fits
        for (int i = 0; i < E && left > 0; i++) {
            int e = (begin + i) % E;
            int64_t room = tokens - row[e], n = pass == 0 ? room > 0 : room;
            if (pass < 2 && w[e] == 0) continue;
            n = n > left ? left : n;
            row[e] += (int)n, left -= n;
        }
}

static int source_tokens(const Draw *a, int s) {
    static const int halves[] = {0, 1, 2, 2, 3, 4}; // of the mean
    int64_t of = a->base == RAGGED ? halves[draw_at(a, a->step, s, 1023) % 6] : 2;
    return (int)(a->d->tokens * of / 2);
}

void demand_make(int *D, const Demand *d, int64_t step, int layer) {
    int base = d->kind >= DEEPSEEK ? ZIPF : d->kind, R = d->N * d->G, E = d->E;
    Draw a = {.d = d, .base = base, .R = R, .H = E / R, .step = step, .layer = layer};
    a.stream = rng_name(demand_kinds[base == SPREAD ? HOT_RANK : d->kind].name);
    int64_t *w = host_alloc(SIZE(E, sizeof *w)), *laws = host_alloc(SIZE(LAWS, E, sizeof *laws));
    for (int s = 0; s < R; s++) {
        if (s == 0 || (base == TASTES && s % d->G == 0)) shares(w, laws, &a, s / d->G);
        source_row(D + (int64_t)s * E, w, &a, s, source_tokens(&a, s));
    }
    free(w), free(laws);
}

void demand_even(int *even, const int *D, int R, int E) {
    int64_t at = 0; // the experts that get a pair more follow on from source to source
    for (int s = 0; s < R; s++) {
        int64_t pairs = 0;
        for (int e = 0; e < E; e++) pairs += D[(int64_t)s * E + e];
        for (int e = 0; e < E; e++) even[(int64_t)s * E + e] = (int)(pairs / E);
        for (int64_t i = 0; i < pairs % E; i++) even[(int64_t)s * E + at++ % E]++;
    }
}
