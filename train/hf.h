// config.json as Hugging Face's transformers read it, from and to a ModelConfig.
#ifndef MOE_HF_H
#define MOE_HF_H
#include "model/model.h"
#include <jansson.h>

// The class that computes exactly this model: Qwen3MoeForCausalLM (softmax router, no shared experts), Dots1ForCausalLM
// (sigmoid router with selection bias, first layers dense), Qwen3ForCausalLM (no experts). What none of them can express is
// written as MoeCForCausalLM: readable here, with the same keys and tensor names, but by no other tool.
// aux_coef: coefficient of the balance loss; transformers' loss is K times ours, so coefficient / K is stored.
json_t *hf_config(const ModelConfig *c, double aux_coef, int separator);
// Reads DIR/config.json, of the classes above and of MoE models that differ in names only. A missing or unknown key value that
// would change the arithmetic dies with STATUS_DATA, naming it. Not in the file, so plain: doc_mask, init_std, router_skew.
ModelConfig hf_read(const char *dir);
// The first of the values in config.json by which two models compute differently; NULL when there is none.
const char *hf_differ(const ModelConfig *a, const ModelConfig *b);
#endif
