// Text from a model: choosing a token, and continuing a prompt within the context.
#ifndef MOE_SAMPLE_H
#define MOE_SAMPLE_H
#include "model/model.h"

typedef struct Sampler {
    double temperature; // 0 = always the likeliest
    int top_k;          // among the k likeliest only, 0 = all
    double top_p;       // among the likeliest whose probabilities reach p, 1 = all
    uint64_t seed;
} Sampler;

// The token that random number `index` of the sampler's seed draws from logits (V). Ties to the lower token.
int sample_token(const wide *logits, int V, const Sampler *s, uint64_t index);

// Continues prompt (n_prompt >= 1 tokens) by n tokens and hands each to emit on rank 0 of world. A context of T tokens that
// is full is shortened to its last half. Collective over world: all ranks pass the same; rank 0 chooses for all.
typedef void SampleEmit(void *arg, int token);
void sample_run(Model *m, Comm *world, int T, const Sampler *s, const int *prompt, int n_prompt, int n, SampleEmit *emit, void *arg);
#endif
