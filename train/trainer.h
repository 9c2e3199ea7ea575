// One rank's training run, and the parts its loop is made of. train/run.c is the place to read.
#ifndef MOE_TRAINER_H
#define MOE_TRAINER_H
#include "data/loader.h"
#include "data/tokenizer.h"
#include "train/checkpoint.h"
#include "train/options.h"
#include "train/optimizer.h"

typedef struct Log Log;     // train/log.h
typedef struct Trace Trace; // train/trace.h

// What one step measured. Times are means over the ranks, in milliseconds, but step_ms: the step from end to end on rank 0.
typedef struct StepStats {
    int64_t step, tokens;          // updates and tokens so far
    double loss, lr, grad_norm;    // loss: nats per token, without the routers' losses
    double step_ms, tok_s;
    double stage_ms[STAGES];
    double own_ms[STAGES];         // this rank's
    double wait_ms, wait_max_ms;   // waiting for other ranks: mean, and of the rank that waited most
    // Of one MoE layer and microbatch, in microseconds: the plan and its routes; the exchange of counts (of the rank that comes
    // last, so without the waiting); all of the layer, forward and backward. plan_share: the first two over the third.
    double plan_us, counts_us, moe_us, plan_share;
    int has_moe;
    MoeStats moe;
    int reruns;                    // times that the step was run again, as rows had no room
} StepStats;

typedef struct EvalStats {
    double loss;                   // nats per token
    double bits_per_byte;          // NAN where tokens are not bytes
    int64_t windows, tokens;
    double ms;
} EvalStats;

// Bytes of this rank's device (memory.c). Where untouched memory costs nothing (CPU): what is touched when pairs spread evenly, and
// what a process takes besides.
typedef struct MemoryUse {
    double kind[MEMORY_KINDS];
    double program, data;              // code, libraries and stacks; mapped files
    double peers;                      // pages of other ranks' windows
    double idle[MEMORY_KINDS];         // asked for besides, for the worst case; 0 where all of it is taken
    double there;                      // what was left before the model was made
} MemoryUse;

typedef struct Trainer {
    Options o;
    ModelConfig c;
    Share share;
    Schedule schedule;
    Comm *world, *ep, *replicas; // replicas: the ranks with the same experts
    const CommInfo *info;    // of world
    Dev *d;
    int threads;
    Cost cost;
    Loader *train, *val;     // val NULL: no evaluation
    uint64_t data_hash;      // of the training data's ends, to know it again
    Tokenizer *tokenizer;
    Model *m;
    Params *ps;
    Moe *moe;                // NULL when no layer is one
    Optimizer opt;
    Progress at;
    const double *sumsq;     // device: the last step's square of the gradient norm
    int steps_run, recorded; // by this process; whether the device holds a record of the step
    double recv_room;        // --recv-room, or what it stands for here
    int grown;               // moe_room's, as far as it has been told
    char *out;               // run folder
    int lock;                // rank 0: holds it (folder_make); -1 elsewhere
    char *resumed;           // checkpoint that the run continues, NULL for a new one
    Log *log;                // rank 0
    Trace *trace;
    int *tok, *target, *first; // one microbatch, host
    MemoryUse memory;
} Trainer;

// setup.c: checks in the order usage, device, files; then memory; then parameters, from seed or checkpoint.
void trainer_open(Trainer *t, Comm *world, const Options *o);
void trainer_close(Trainer *t);
json_t *trainer_state(const Trainer *t); // trainer.json; collective over the world
ModelRun trainer_model_run(const Trainer *t);
// memory.c, before the model is made: fills t->memory, counted by the code that will take it. Dies with STATUS_DEVICE on all ranks,
// with what is needed, what is there and what would take less, where one of them finds too little. Collective.
void memory_check(Trainer *t);
double memory_sum(const MemoryUse *u);      // of what a rank takes: all but idle
// step.c. Collective: model_grow after what has been run, `what` in a word. Tells it where room has grown since the last call.
int trainer_grow(Trainer *t, const char *what);
// One update. Dies with STATUS_NUMERIC, before it, when loss or norm is not finite.
void trainer_step(Trainer *t, StepStats *s);
// eval.c: mean loss over at most `windows` evenly spaced windows of the validation data (0 = all). Changes nothing.
EvalStats trainer_eval(Trainer *t, int64_t windows);
// run.c: the loop.
void trainer_run(Trainer *t);
#endif
