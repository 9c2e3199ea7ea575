// The model: a decoder-only transformer whose feed-forward layers are dense or mixtures of experts.
//
// One letter means one thing in the whole tree (the balancer's pages, topoep/, have J, D, q, x of their own; a loader's B is
// the whole step's):
//   B sequences   T positions   BT = B*T tokens of this rank's microbatch   C hidden width
//   NH query heads   NKV key/value heads   HS head size   V vocabulary   L layers
//   E experts   K experts per token   F expert width   R ranks of the expert-parallel (EP) group
//   N nodes   G ranks per node   S replica slots per rank   M rows of this rank's receive buffer
//
// Arithmetic: exactly Qwen3-MoE (softmax router, per-head QK-norm, half-split RoPE, pre-RMSNorm, SwiGLU), and with
// score = sigmoid, bias, shared and routed_scale that of Dots1 (DeepSeek-V3's router on the same attention).
#ifndef MOE_MODEL_H
#define MOE_MODEL_H
#include "moe/moe.h"

enum { MAX_L = 256 };

// ---- configuration (model/config.c) ----------------------------------------------------------------------------------
typedef struct ModelConfig {
    int V, C, L, NH, NKV, HS, T;    // T: longest sequence
    int E, K, F;                    // E = 0: no MoE layer
    int F_dense;                    // width of dense layers
    uint8_t dense[MAX_L];           // 1 where layer l is dense
    int n_shared;                   // shared experts of width F, computed as one of width n_shared*F
    RouterScore score;
    int renorm, bias;               // weights of the chosen sum to 1; selection bias present
    double routed_scale;
    int tied, doc_mask;             // head shares the embedding; attention stops at document boundaries
    double theta, eps;              // RoPE base, RMSNorm epsilon
    double init_std, router_skew;   // initial deviation; Zipf exponent of the initial router's choices, 0 = plain
} ModelConfig;
// Fills c with a preset ("demo", "1m", ...); STATUS_USAGE with the list if there is none of that name.
void config_preset(ModelConfig *c, const char *name);
const char *config_presets(void);           // "demo|1m|..."
// Dies with STATUS_USAGE, or STATUS_DATA where it came from the file `where` (NULL = none), naming the dimension, what it is and
// what it must be.
void config_check(const ModelConfig *c, const char *where);
// Parameters in all, parameters that one token meets, and FLOPs per token forward + backward:
// 6 x active matmul weights + 6 L T C (NH*HS for C) for causal attention.
typedef struct ModelSize {
    int64_t params, active, flops_per_token;
} ModelSize;
ModelSize config_size(const ModelConfig *c);

// ---- parameters (model/params.c) -------------------------------------------------------------------------------------
typedef enum { OWNER_REPL, OWNER_EXPERT, OWNER_STATE } Owner; // same on all ranks | its rank's experts | fp32 state, not trained
typedef enum { INIT_NORMAL, INIT_ONE, INIT_ZERO, INIT_ROUTER } Init;

// A tensor as other programs name it: rows [row, row+rows) of a Param, or of each expert of one.
typedef struct Piece {
    const char *format;  // "model.layers.%d.self_attn.q_proj.weight"; with a second %d for the expert's global id
    int64_t first, rows, cols; // element offset within the Param (within one expert), shape; cols 0 = one dimension (rows)
    double std;          // deviation of its initial values, where they are drawn
} Piece;

typedef struct Param {
    char name[48];       // "layers.3.qkv"
    Owner owner;
    int layer;           // -1: none
    int decay;           // 1: weight decay applies (matrices), 0: norms, biases
    Init init;
    size_t n;            // elements held by this rank
    size_t n_unit;       // elements of one expert (= n for others)
    int first_expert, n_experts; // global id of the first one held; how many
    size_t offset;       // of its first element in its arena
    Piece pieces[4];
    int n_pieces;
} Param;

typedef struct Arena { // of all parameters that the same ranks hold
    real *w;
    wide *g;             // gradients; NULL without training
    size_t n;            // elements held here
    Comm *ranks;         // who holds the same: the world, or one rank of each EP group
    CommPart own;        // what this rank updates: all of it, or its part (ModelRun.zero)
} Arena;

typedef struct Params {
    int n;
    Param *p;
    Arena arena[2];      // by OWNER_REPL, OWNER_EXPERT
    size_t n_state;
    wide *state;         // selection biases
    void **expert_peer;  // window table over ep: every rank's experts' weights
} Params;
real *param_w(const Params *ps, const Param *p);  // NULL for OWNER_STATE
wide *param_g(const Params *ps, const Param *p);
wide *param_state(const Params *ps, const Param *p);
const Param *param_find(const Params *ps, const char *name, int layer); // e.g. "qkv", 3; dies when there is none

// ---- the model (model/model.c, forward.c, backward.c) ------------------------------------------------------------------
typedef struct ModelRun {   // how it runs, as opposed to what it is
    int max_B;              // sequences of a rank's microbatch at most
    int T;                  // window length in training, longest context in generation
    int micros;             // microbatches per step
    int training;           // 0: no gradients, no backward
    Recompute recompute;
    Comm *replicas;         // the caller's comm_stride(world, ranks of ep), the ranks with the same experts; NULL: the model makes its own
    int generate;           // in training: room for model_decode, where recomputation leaves none
    int zero;               // 1: of parameters that several ranks hold, each updates a part (ZeRO-1, 1910.02054)
    uint64_t seed;
    double aux_coef, z_coef, capacity;
    AuxScope scope;
    int S, dedup, even;
    double recv_room;       // MoeConfig
    Cost cost;
    PlanOptions plan;
} ModelRun;
typedef struct Model Model;
// Collective over world. ep: the EP group (comm_block). model_alloc takes the memory; while the device counts (dev_count_begin) it
// says how much that is, and what it returns is good for model_params, model_moe's sizes and model_free only. model_draw
// gives parameters their initial values from seed, the same for any number of ranks; model_init is both.
Model *model_alloc(Dev *d, Comm *world, Comm *ep, const ModelConfig *c, const ModelRun *run);
void model_draw(Model *m);
Model *model_init(Dev *d, Comm *world, Comm *ep, const ModelConfig *c, const ModelRun *run);
void model_free(Model *m);
Params *model_params(Model *m);
Moe *model_moe(Model *m);               // NULL when no layer is one
const ModelConfig *model_config(const Model *m);

// One microbatch of B sequences of T tokens (host arrays tok, target (B,T); first (B,T) or NULL). The loss of the step is
//   sum nll / step_tokens + aux_coef mean_layers(balance) + z_coef mean_layers(mean lse^2)
// step_tokens: tokens of the whole step over all ranks. Adds this microbatch's nll sum to the step's.
// train = 1: also computes the head's gradient (fused), so that model_backward can follow; 0: evaluation, counts nothing.
void model_forward(Model *m, const int *tok, const int *target, const int *first, int B, int T, int micro, int64_t step_tokens,
                   int train);
// Its two parts: what the step's microbatches are, and ops alone, which a step can record.
void model_load(Model *m, const int *tok, const int *target, const int *first, int B, int T, int micro);
void model_pass(Model *m, int B, int T, int micro, int64_t step_tokens, int train);
void model_backward(Model *m);          // of the last model_forward; gradients accumulate
void model_zero_grad(Model *m);
// Collective over world, after a step's passes and their norm, or after an evaluation's: 1 where a rank had not enough room for the rows
// that came to it (moe_grow). Then there is more now, no loss has been added, and all of it is to be run again.
int model_grow(Model *m);
double model_nll(Model *m);             // this rank's sum of nll since the last call, and starts again from 0; a host read
// Sums gradients over the ranks that hold the same parameters (in rank order): all, or with zero those of what this rank updates.
void model_reduce_grads(Model *m);
void model_share_params(Model *m);      // with zero, after the update: all ranks get the parameters that others have updated
// Global gradient norm: replicated once, every expert once; the same bits on all ranks. Puts its square at the returned device
// double, and the value in *norm if norm is not NULL (a host read). NaN on all ranks where a rank's nll or a router's score is none.
double *model_grad_norm(Model *m, double *norm);

// Inference with a key/value cache for one sequence: logits (V, host) after token `tok` at position `pos` (0 clears the cache).
// n >= 1 tokens at once (a prompt). Collective over world: every rank passes the same tokens. It works in the activations' memory (a model
// that trains with recomputation: where run.generate has kept some), so it neither comes between a forward and its backward nor finds
// its cache again after a forward.
void model_decode(Model *m, wide *logits, const int *tok, int n, int pos);
#endif
