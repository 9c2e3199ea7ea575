// A run of the model on virtual ranks, seen through Hugging Face names, beside the oracle's.
#ifndef MOE_TESTS_MODEL_JOB_H
#define MOE_TESTS_MODEL_JOB_H
#include "model/model.h"
#include "tests/ref/model_ref.h"

typedef struct Job {
    ModelConfig c;
    ModelRun run;
    int world, R, nodes;       // ranks, of which R form an EP group
    int B, T;                  // sequences of a rank's microbatch; run.micros of them
    const int *tok, *target, *first; // (micros, world, B, T)
    const RefTable *load;      // parameters to use instead of the initial ones
    int observe;               // also evaluate and generate before the backward
    int forward, backward;
    // results, written by the ranks
    RefTable *w, *g;           // parameters, gradients
    int tensors;               // distinct tensors met
    double nll, aux, z, norm[16];
    int decode_n, decode_chunk; // tokens to decode; at once
    wide *logits;              // (decode_n,V); with chunks only each chunk's last
    int64_t *seen;
    size_t kept;               // bytes of activations and received rows of a rank
} Job;
// Forward, backward and decoding as the job asks, by job->world virtual ranks
void run_job(Job *job);
Cost costs(int N, int G, int S); // of a cluster on which copies are cheap

ModelConfig small_config(void); // two MoE layers of width 8
RefConfig ref_config(const ModelConfig *c, const ModelRun *r);
typedef struct Data {
    int tok[512], target[512], first[512];
} Data;
Data make_data(int sequences, int T, int V); // up to 512 tokens below V; some targets -1, three documents a sequence
// run: max_B, T, seed and plan are filled in; world ranks in groups of R, each with B sequences of T tokens
Job make_job(const ModelConfig *c, const ModelRun *run, int world, int R, int B, int T, const Data *data);
// Parameters of a job's model as initialised, norms and biases disturbed. The oracle's table must be met exactly.
RefTable initial(Job job, const RefConfig *rc);
RefLoss oracle(const Job *job, const RefConfig *rc, const RefTable *w); // of all microbatches of all ranks
#endif
