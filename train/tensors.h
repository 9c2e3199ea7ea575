// The parameter table as named tensors: what a checkpoint writes and reads, in the same order.
#ifndef MOE_TENSORS_H
#define MOE_TENSORS_H
#include "model/model.h"
#include "train/safetensors.h"

typedef struct Tensor {
    char *name;          // "model.layers.3.mlp.experts.5.up_proj.weight"
    const Param *param;
    const Piece *piece;
    int64_t at;          // element of the Param's share held here where it begins
    int expert;          // global id, -1: not an expert's
} Tensor;

typedef struct Tensors {
    Tensor *t;
    int n;
} Tensors;
// replicated, experts: whether to list those parts (states count as replicated).
Tensors tensors_list(const Params *ps, int replicated, int experts);
void tensors_free(Tensors *t);
StTensor tensor_header(const Tensor *t, const char *suffix, StDtype dtype); // its name is the caller's to free
char *tensor_name(const Piece *p, int layer, int expert); // free() it
#endif
