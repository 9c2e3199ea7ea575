// Naive oracle of the router in double: scores, weights, and the scalar loss whose gradient dev_route_bwd is.
#ifndef MOE_TESTS_ROUTER_REF_H
#define MOE_TESTS_ROUTER_REF_H

typedef struct RefRouter {
    int E, K, sigmoid, renorm;
    double scale;
} RefRouter;
// One token: score, prob (E) overwritten; returns log sum exp
double ref_scores(double *score, double *prob, const double *logits, RefRouter r);
// key (E): score + bias, sorted from the largest to the smallest
void ref_sorted(double *key, const double *score, const double *bias, int E);
// idx (K): the largest K of key, largest first, ties to the lower index
void ref_choose(int *idx, const double *key, int E, int K);
// weight (K) of the experts idx (K), which the bias may have chosen
void ref_weights(double *weight, const double *score, const int *idx, RefRouter r);

typedef struct RefToken { // one token's part of the loss, its choice held constant
    double *logits;
    const double *dweight, *f; // (K); (E), NULL = no balance loss
    const int *idx;
    double aux_scale, z_scale;
    RefRouter r;
} RefToken;
// sum_k dweight_k weight_k + aux_scale E sum_e f_e prob_e + z_scale lse^2. ctx: RefToken
double ref_token_loss(const void *ctx);

// f, p as dev_balance, of one group; ord, count, seen as dev_route_count, by looking back over all pairs
void ref_balance(double *f, double *p, const int *idx, const double *prob, int tokens, int E, int K);
void ref_count(int *count, int *seen, int *ord, const int *idx, int pairs, int E, int capacity);
#endif
