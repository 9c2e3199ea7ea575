// SwiGLU feed-forward networks: one (dense layers, shared experts), or one per group of rows (routed experts).
#include "kernels/check.h"
#include "moe/internal.h"

void ffn_up(Dev *d, real *gu, const real *x, const real *w, int M, int C, int F) { dev_linear(d, gu, NULL, x, w, M, 2 * F, C); }

void ffn_forward(Dev *d, real *y, real *gu, real *h, const real *add, const real *x, const real *w, int M, int C, int F) {
    ffn_up(d, gu, x, w, M, C, F);
    dev_swiglu(d, h, gu, NULL, NULL, M, F);
    dev_linear(d, y, add, h, w + SIZE(2, F, C), M, C, F);
}

void ffn_backward(Dev *d, real *dx, wide *dw, real *gu, real *h, real *dh, const real *add, const real *dy, const real *x,
                  const real *w, int M, int C, int F) {
    const real *gate_up = w, *down = w + SIZE(2, F, C);
    dev_linear_dx(d, dh, NULL, dy, down, M, C, F);
    dev_swiglu_bwd(d, gu, h, NULL, dh, gu, NULL, NULL, M, F);
    dev_linear_dw(d, dw + SIZE(2, F, C), dy, h, M, C, F);
    dev_linear_dx(d, dx, add, gu, gate_up, M, 2 * F, C);
    dev_linear_dw(d, dw, gu, x, M, 2 * F, C);
}

// Where the next piece of groups ends: at `to`, or sooner where a transfer of copies must be moved on in between.
static int piece_end(Moe *m, int from, int to) {
    int step = (m->H + 3) / 4;
    return m->N > 1 && comm_blocks_poll(m->ep) && to - from > step ? from + step : to;
}

// The routing weight multiplies h, before the down projection: the combine is then a plain sum, and the weight's gradient
// is known where the expert is.
void experts_up(Moe *m, Layer *l, int from, int to) {
    dev_stage(m->d, STAGE_EXPERTS);
    for (int j = from, end; j < to; j = end) {
        end = piece_end(m, j, to);
        dev_group_linear(m->d, l->gu, l->rows, l->gate_up + j, l->route.off + j, end - j, m->M, 2 * m->c.F, m->c.C);
    }
}

void experts_down(Moe *m, Layer *l) {
    const int *off = l->route.off;
    dev_swiglu(m->d, m->h, l->gu, l->row_weight, off + m->J, m->M, m->c.F);
    dev_group_linear(m->d, m->rows_out, m->h, l->down, off, m->J, m->M, m->c.C, m->c.F);
}

void experts_down_bwd(Moe *m, Layer *l, int from, int to) {
    dev_stage(m->d, STAGE_EXPERTS);
    for (int j = from, end; j < to; j = end) {
        end = piece_end(m, j, to);
        dev_group_linear_dx(m->d, m->dh, m->dy_rows, l->down + j, l->route.off + j, end - j, m->M, m->c.C, m->c.F);
    }
}

void experts_up_bwd(Moe *m, Layer *l) {
    Dev *d = m->d;
    const int *off = l->route.off;
    int C = m->c.C, F = m->c.F;
    dev_swiglu_bwd(d, l->gu, m->h, m->weight_out, m->dh, l->gu, l->row_weight, off + m->J, m->M, F);
    dev_group_linear_dw(d, l->d_down, m->dy_rows, m->h, off, m->J, m->M, C, F);
    dev_group_linear_dx(d, m->rows_out, l->gu, l->gate_up, off, m->J, m->M, 2 * F, C);
    dev_group_linear_dw(d, l->d_gate_up, l->gu, l->rows, off, m->J, m->M, 2 * F, C);
}
