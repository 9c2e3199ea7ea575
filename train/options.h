// The trainer's settings. One table (options.c) gives parsing, ranges, --help, the start table and the stored configuration.
#ifndef MOE_OPTIONS_H
#define MOE_OPTIONS_H
#include "kernels/comm.h"
#include "kernels/flags.h"
#include "model/model.h"
#include "topoep/planflags.h"
#include "train/schedule.h"

enum { OPTION_FLAGS = 104 };
enum { BALANCE_UNIFORM = POLICIES }; // an even choice of experts, nothing to plan: the ceiling of speed, no training method
typedef enum { OPTIMIZER_ADAMW, OPTIMIZER_SGD } OptimizerKind;

typedef struct Options {
    // data and run folder
    const char *data, *val, *out, *resume;
    int overwrite;
    // optimisation
    int64_t steps, batch, micro_batch, seq, seed, recompute;
    double lr, min_lr;              // min_lr -1 = lr / 10
    int64_t warmup, decay_steps;    // -1 = a share of steps
    int schedule, optimizer;        // ScheduleKind, OptimizerKind
    double weight_decay, beta1, beta2, eps, clip;
    // ranks and balancing
    int64_t ep, zero, nodes, virtual_ranks, threads, slots;
    int cuda_graph;
    int balance, check_plans;       // balance: a Policy, or BALANCE_UNIFORM
    int dedup;
    double recv_room;               // -1 = chosen by the device
    PlanFlags how;                  // of topoep
    const char *cluster;
    double aux_loss, z_loss, bias_rate, capacity;
    int aux_scope;                  // AuxScope
    // observing
    int64_t log_every, eval_every, eval_windows, final_windows, save_every, sample_every, sample_tokens, trace_every;
    const char *sample_prompt;
    // model
    int model;                      // index into config_presets()
    int64_t layers, width, heads, kv_heads, head_size, vocab, experts, topk, expert_width, dense_width, shared_experts;
    const char *dense_layers;       // "0,2" or "" for none
    int router, renorm, router_bias, tied, doc_mask;
    double routed_scale, rope_theta, norm_eps, router_skew, init_std;

    Flag flags[OPTION_FLAGS];       // the table; its values point into this struct
    char dense_text[8 * MAX_L];     // what dense_layers points at when a preset fills it
    char balance_choices[128];
} Options;

// Defaults, and the demo preset's model.
void options_init(Options *o);
// options_init, then the command line. STATUS_USAGE on a bad one. The model's flags hold the preset's values where not given.
void options_parse(Options *o, int argc, char **argv);
// A rank's own copy: the table of dst points into dst. Each ends with flags_free.
void options_copy(Options *dst, const Options *src);
// Settings of a stored run are the defaults of its continuation; the command line wins. STATUS_USAGE, naming flag and both
// values, where it contradicts what the stored parameters or their order of data depend on. where: the file, for messages.
void options_restore(Options *o, const json_t *stored, const char *where);
json_t *options_json(const Options *o); // what run.json and trainer.json hold: a file that --config reads back
const char *options_model_name(const Options *o, char *buffer, size_t n); // the preset's name
const char *options_balance(const Options *o); // the balancer's name
PlanOptions options_plan(const Options *o);
ModelConfig options_model(const Options *o); // checked (config_check)
Schedule options_schedule(const Options *o);

// How the step is shared.
typedef struct Share {
    int R, groups;       // ranks of an EP group; how many groups
    int sequences;       // of a rank per step
    int micro, micros;   // sequences of a microbatch; how many microbatches
} Share;
// STATUS_USAGE, with the numbers, unless ep divides the ranks and E, the ranks the batch, and microbatches a rank's share.
Share options_share(const Options *o, const ModelConfig *c, int n_ranks);
#endif
