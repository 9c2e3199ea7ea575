#include "train/sample.h"
#include "kernels/check.h"
#include "kernels/rng.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct Choice {
    double p;
    int token;
} Choice;

static int by_probability(const void *a, const void *b) {
    const Choice *x = a, *y = b;
    if (x->p != y->p) return x->p > y->p ? -1 : 1;
    return x->token - y->token;
}

static int likeliest(const wide *logits, int V) {
    int best = 0;
    for (int v = 1; v < V; v++)
        if (logits[v] > logits[best]) best = v;
    return best;
}

int sample_token(const wide *logits, int V, const Sampler *s, uint64_t index) {
    int best = likeliest(logits, V);
    CHECK_NUMERIC(isfinite(logits[best]), "the model's best logit is %g (hint: damaged parameters?)", (double)logits[best]);
    if (s->temperature <= 0) return best;
    Choice *c = host_alloc(SIZE(V, sizeof *c));
    for (int v = 0; v < V; v++) c[v] = (Choice){exp(((double)logits[v] - (double)logits[best]) / s->temperature), v};
    qsort(c, (size_t)V, sizeof *c, by_probability);
    int n = s->top_k > 0 && s->top_k < V ? s->top_k : V;
    double total = 0, kept = 0;
    for (int i = 0; i < n; i++) total += c[i].p;
    for (int i = 0; i < n; i++) {
        kept += c[i].p;
        if (kept >= s->top_p * total) n = i + 1; // at least one
    }
    double at = rng_uniform(s->seed, rng_name("sample"), index) * kept;
    int token = c[n - 1].token; // if rounding leaves `at` past the last
    for (int i = 0; i < n; i++) {
        at -= c[i].p;
        if (at < 0) {
            token = c[i].token;
            break;
        }
    }
    free(c);
    return token;
}

void sample_run(Model *m, Comm *world, int T, const Sampler *s, const int *prompt, int n_prompt, int n, SampleEmit *emit, void *arg) {
    CHECK_USAGE(n_prompt >= 1 && T >= 2, "a prompt of %d tokens in a context of %d, expected at least 1 in 2", n_prompt, T);
    int V = model_config(m)->V, rank = comm_info(world)->rank, pos = 0, skip = n_prompt > T - 1 ? n_prompt - (T - 1) : 0;
    int *window = host_alloc(SIZE(T, sizeof(int))), held = n_prompt - skip; // tokens whose continuation is wanted
    wide *logits = host_alloc(SIZE(V, sizeof(wide)));
    memcpy(window, prompt + skip, SIZE(held, sizeof(int)));
    for (int i = 0; i < n; i++) {
        if (held == T) { // the cache cannot slide: what is kept is computed again, at new positions
            int keep = T / 2;
            memmove(window, window + T - keep, SIZE(keep, sizeof(int)));
            held = keep;
            pos = 0;
        }
        model_decode(m, logits, window + pos, held - pos, pos);
        pos = held;
        int token = sample_token(logits, V, s, (uint64_t)i);
        comm_bcast(world, &token, sizeof token, 0);
        if (rank == 0) emit(arg, token);
        window[held++] = token;
    }
    free(window);
    free(logits);
}
