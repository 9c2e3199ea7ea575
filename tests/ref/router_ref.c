#include "tests/ref/router_ref.h"
#include <math.h>
#include <stdlib.h>

double ref_scores(double *score, double *prob, const double *logits, RefRouter r) {
    long double sum_exp = 0, sum = 1e-20L;
    for (int e = 0; e < r.E; e++) sum_exp += expl(logits[e]);
    for (int e = 0; e < r.E; e++) {
        score[e] = r.sigmoid ? 1 / (1 + exp(-logits[e])) : (double)(expl(logits[e]) / sum_exp);
        sum += score[e];
    }
    for (int e = 0; e < r.E; e++) prob[e] = (double)(score[e] / sum);
    return (double)logl(sum_exp);
}

static int descending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

void ref_sorted(double *key, const double *score, const double *bias, int E) {
    for (int e = 0; e < E; e++) key[e] = score[e] + (bias ? bias[e] : 0);
    qsort(key, E, sizeof *key, descending);
}

void ref_choose(int *idx, const double *key, int E, int K) {
    for (int e = 0; e < E; e++) {
        int ahead = 0;
        for (int j = 0; j < E; j++) ahead += key[j] > key[e] || (key[j] == key[e] && j < e);
        if (ahead < K) idx[ahead] = e;
    }
}

void ref_weights(double *weight, const double *score, const int *idx, RefRouter r) {
    double sum = 1e-20;
    for (int k = 0; k < r.K; k++) sum += score[idx[k]];
    for (int k = 0; k < r.K; k++) weight[k] = r.scale * score[idx[k]] / (r.renorm ? sum : 1);
}

double ref_token_loss(const void *ctx) {
    const RefToken *t = ctx;
    int E = t->r.E, K = t->r.K;
    double *room = malloc((2 * E + K) * sizeof *room), *score = room, *prob = room + E, *weight = room + 2 * E, loss = 0;
    double lse = ref_scores(score, prob, t->logits, t->r);
    ref_weights(weight, score, t->idx, t->r);
    for (int k = 0; k < K; k++) loss += t->dweight[k] * weight[k];
    for (int e = 0; t->f && e < E; e++) loss += t->aux_scale * E * t->f[e] * prob[e];
    free(room);
    return loss + t->z_scale * lse * lse;
}

void ref_balance(double *f, double *p, const int *idx, const double *prob, int tokens, int E, int K) {
    for (int e = 0; e < E; e++) {
        long pairs = 0;
        long double sum = 0;
        for (int i = 0; i < tokens * K; i++) pairs += idx[i] == e;
        for (int t = 0; t < tokens; t++) sum += prob[t * E + e];
        f[e] = tokens ? (double)pairs / (tokens * (double)K) : 0;
        p[e] = tokens ? (double)(sum / tokens) : 0;
    }
}

void ref_count(int *count, int *seen, int *ord, const int *idx, int pairs, int E, int capacity) {
    for (int e = 0; e < E; e++) count[e] = seen[e] = 0;
    for (int p = 0; p < pairs; p++) {
        int kept_before = 0;
        for (int q = 0; q < p; q++) kept_before += idx[q] == idx[p] && ord[q] >= 0;
        ord[p] = capacity > 0 && kept_before >= capacity ? -1 : kept_before;
        seen[idx[p]]++;
        count[idx[p]] += ord[p] >= 0;
    }
}
