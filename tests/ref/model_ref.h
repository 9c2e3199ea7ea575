// The whole model's forward pass, naively and in double precision: the oracle for model/. Shares no code with what it checks:
// tensors go by their Hugging Face names, tokens one by one.
#ifndef MODEL_REF_H
#define MODEL_REF_H
#include <stddef.h>
#include <stdint.h>

enum { REF_SEQ, REF_MICRO, REF_GLOBAL }; // over which tokens the balance loss takes f and P

typedef struct RefConfig {
    int V, C, L, NH, NKV, HS, E, K, F, F_dense, n_shared;
    unsigned char dense[64];
    int sigmoid, renorm, bias, tied, doc_mask, scope;
    double routed_scale, theta, eps, aux_coef, z_coef;
} RefConfig;

typedef struct RefTensor {
    char name[96];
    size_t n;
    double *w;
} RefTensor;
typedef struct RefTable {
    int n;
    RefTensor *t;
} RefTable;
RefTable ref_table(const RefConfig *c);                  // every tensor such a model has, zeroed
void ref_table_free(RefTable *t);
RefTensor *ref_find(const RefTable *t, const char *name); // NULL when there is none

typedef struct RefBatch { // one rank's microbatch: B sequences of T tokens
    int B, T;
    const int *tok, *target, *first;
} RefBatch;
typedef struct RefLoss {
    double total, nll, aux, z; // nll: sum over tokens; aux, z: mean over layers and tokens, without coefficients
    uint64_t choices;          // a hash of which experts every token chose
} RefLoss;
// Loss of a step of n microbatches: nll / tokens + aux_coef aux + z_coef z.
RefLoss ref_loss(const RefConfig *c, const RefTable *w, const RefBatch *batch, int n);
// logits (T,V) of one sequence
void ref_logits(const RefConfig *c, const RefTable *w, double *logits, const int *tok, int T);
#endif
