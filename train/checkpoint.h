// Checkpoints: a Hugging Face folder (config.json, safetensors with per-expert names and global expert ids, tokenizer) plus
// optimizer state under the same names and trainer.json. RUN/step_00001000/:
//   model.safetensors       or, with R ranks of an EP group, model-0000i-of-0000R.safetensors and model.safetensors.index.json:
//                           rank i-1 writes its experts, rank 0 also what is replicated, whole, whichever ranks keep what of the
//                           optimizer's state; all ranks see one file system.
//                           In full width: where the weights in use are bf16, these are their masters
//   optimizer.safetensors   likewise: every name with .exp_avg and .exp_avg_sq (AdamW)
//   trainer.json            step, data position, settings: see Progress and train/setup.c
// Written under a temporary name, synced, renamed: after a kill at any moment the old or the new one is there, whole.
#ifndef MOE_CHECKPOINT_H
#define MOE_CHECKPOINT_H
#include "data/tokenizer.h"
#include "model/model.h"
#include "train/optimizer.h"
#include <jansson.h>

// Where the training stands: with parameters, moments and biases all of its state, as random numbers are counter-based.
typedef struct Progress {
    int64_t step;     // updates done
    int64_t samples;  // sequences seen: the next one's index
    int64_t tokens;
} Progress;

// Writes RUN/step_N, N = step. trainer: what trainer.json holds (rank 0). opt NULL: parameters only. Collective over world.
// An older checkpoint of that name is replaced in one step. Returns the folder's path; free() it.
typedef struct Snapshot {
    Dev *d;
    Comm *world, *ep;
    const Params *ps;
    const ModelConfig *c;
    const Optimizer *opt;
    const Tokenizer *tokenizer;
    double aux_coef;
} Snapshot;
char *checkpoint_write(const Snapshot *s, const char *run, int64_t step, const json_t *trainer);

// A run folder's newest complete checkpoint, or the path itself if it is a folder with config.json; free() it.
char *checkpoint_find(const char *path);
// Parameters (and biases) of this rank's share, whatever the number of ranks that wrote them; experts one by one or fused
// (gate_up_proj (E,2F,C), down_proj (E,C,F)); F64, F32, F16, BF16. STATUS_DATA, naming the tensors, where one is missing,
// left over or of another shape. optimizer: moments too.
void checkpoint_read(const char *dir, Dev *d, const Params *ps, const ModelConfig *c, const Optimizer *opt);
json_t *checkpoint_trainer(const char *dir); // trainer.json; STATUS_DATA where there is none
// Removes a folder and what is in it; nothing when it is not there.
void checkpoint_remove(const char *dir);
#endif
