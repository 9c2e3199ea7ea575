#include "train/tensors.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include <stdlib.h>

char *tensor_name(const Piece *p, int layer, int expert) { return str_format(p->format, layer, expert); }

static int units(const Param *p) { return p->owner == OWNER_EXPERT ? p->n_experts : 1; }

Tensors tensors_list(const Params *ps, int replicated, int experts) {
    Tensors list = {0};
    for (int pass = 0; pass < 2; pass++) { // count, then fill
        if (pass == 1) list.t = host_alloc(SIZE(list.n, sizeof(Tensor)));
        list.n = 0;
        for (int i = 0; i < ps->n; i++) {
            const Param *p = &ps->p[i];
            int wanted = p->owner == OWNER_EXPERT ? experts : replicated;
            for (int u = 0; u < units(p) && wanted; u++)
                for (int k = 0; k < p->n_pieces; k++, list.n++) {
                    if (pass == 0) continue;
                    int expert = p->owner == OWNER_EXPERT ? p->first_expert + u : -1;
                    list.t[list.n] = (Tensor){.name = tensor_name(&p->pieces[k], p->layer, expert), .param = p, .piece = &p->pieces[k],
                                              .at = u * (int64_t)p->n_unit + p->pieces[k].first, .expert = expert};
                }
        }
    }
    return list;
}

void tensors_free(Tensors *list) {
    for (int i = 0; i < list->n; i++) free(list->t[i].name);
    free(list->t);
    *list = (Tensors){0};
}

StTensor tensor_header(const Tensor *t, const char *suffix, StDtype dtype) {
    StTensor h = {.name = str_format("%s%s", t->name, suffix), .dtype = dtype, .n_dims = t->piece->cols ? 2 : 1,
                  .shape = {t->piece->rows, t->piece->cols}};
    return h;
}
