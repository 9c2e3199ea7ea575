#include "tests/ref/attention_ref.h"
#include "kernels/check.h"
#include <math.h>
#include <stddef.h>
#include <stdlib.h>

typedef struct Row { // one query and head
    int first, pos, h, kv;
    size_t token;    // of the query
    double *p, p_err;// probabilities of the keys; their relative error in roundings
} Row;

static size_t at_kv(const RefAttn *a, int b, int s, int kv) { return (((size_t)b * a->Tk + s) * a->NKV + kv) * a->HS; }

static void forward_row(const RefAttn *a, int b, int h, int i, Row *r) {
    const int hs = a->HS;
    const double scale = 1 / sqrt((double)hs);
    r->token = (size_t)b * a->Tq + i;
    r->h = h;
    r->kv = h / (a->NH / a->NKV);
    r->pos = a->Tk - a->Tq + i;
    r->first = a->first ? a->first[r->token] : 0;
    const double *q = a->q + (r->token * a->NH + h) * hs;
    double top = -INFINITY, total = 0, size = 0;
    for (int s = r->first; s <= r->pos; s++) {
        const double *k = a->k + at_kv(a, b, s, r->kv);
        double sum = 0, all = 0;
        for (int d = 0; d < hs; d++) sum += q[d] * k[d], all += fabs(q[d] * k[d]);
        r->p[s] = sum * scale;
        top = fmax(top, r->p[s]);
        size = fmax(size, all * scale);
    }
    for (int s = r->first; s <= r->pos; s++) total += exp(r->p[s] - top);
    const double lse = top + log(total);
    for (int s = r->first; s <= r->pos; s++) r->p[s] = exp(r->p[s] - lse);
    const int keys = r->pos - r->first + 1, chain = (keys < 128 ? keys : 128) + 2 * (keys / 128) + 8;
    const double score = (hs + 6) * size; // a score's error: hs products, the scaling of q
    const size_t l = ((size_t)b * a->NH + h) * a->Tq + i;
    a->lse[l] = lse;
    a->lse_size[l] = score + chain + 3 * fabs(lse);
    r->p_err = 2 * score + chain + 4 * fabs(lse);
    for (int d = 0; d < hs; d++) {
        double sum = 0, all = 0;
        for (int s = r->first; s <= r->pos; s++) {
            double x = r->p[s] * a->v[at_kv(a, b, s, r->kv) + d];
            sum += x;
            all += fabs(x);
        }
        a->o[(r->token * a->NH + h) * hs + d] = sum;
        a->o_size[(r->token * a->NH + h) * hs + d] = (r->p_err + chain + a->store) * all + a->store * fabs(sum);
    }
}

void ref_attention(const RefAttn *a) {
    double *p = host_alloc(a->Tk * sizeof(double));
    for (int b = 0; b < a->B; b++)
        for (int h = 0; h < a->NH; h++)
            for (int i = 0; i < a->Tq; i++) forward_row(a, b, h, i, &(Row){.p = p});
    free(p);
}

static void backward_row(const RefAttn *a, int b, const Row *r) {
    const int hs = a->HS;
    const double scale = 1 / sqrt((double)hs), chain = 100 + a->Tk / 40.0; // of the sums over keys and over queries
    const size_t at = (r->token * a->NH + r->h) * hs;
    const double *g = a->dout + at, *q = a->q + at;
    double mean = 0, mean_err = 0; // sum_s p dp, and the error of computing it as dout . o
    for (int d = 0; d < hs; d++) mean_err += fabs(g[d]) * (a->o_size[at + d] + (hs + 2) * fabs(a->o[at + d]));
    for (int s = r->first; s <= r->pos; s++)
        for (int d = 0; d < hs; d++) mean += r->p[s] * g[d] * a->v[at_kv(a, b, s, r->kv) + d];
    for (int s = r->first; s <= r->pos; s++) {
        const size_t kv = at_kv(a, b, s, r->kv);
        double dp = 0, dp_err = 0;
        for (int d = 0; d < hs; d++) dp += g[d] * a->v[kv + d], dp_err += (hs + 2) * fabs(g[d] * a->v[kv + d]);
        const double p = r->p[s], ds = p * (dp - mean);
        const double ds_err = fabs(ds) * (r->p_err + chain + 3 + a->store) + p * (dp_err + mean_err);
        for (int d = 0; d < hs; d++) {
            a->dv[kv + d] += p * g[d];
            a->dv_size[kv + d] += p * fabs(g[d]) * (r->p_err + chain + a->store);
            a->dq[at + d] += ds * scale * a->k[kv + d];
            a->dq_size[at + d] += ds_err * scale * fabs(a->k[kv + d]);
            a->dk[kv + d] += ds * scale * q[d];
            a->dk_size[kv + d] += ds_err * scale * fabs(q[d]);
        }
    }
}

void ref_attention_bwd(const RefAttn *a) {
    const size_t nq = SIZE(a->B, a->Tq, a->NH, a->HS), nk = SIZE(a->B, a->Tk, a->NKV, a->HS);
    for (size_t i = 0; i < nq; i++) a->dq[i] = a->dq_size[i] = 0;
    for (size_t i = 0; i < nk; i++) a->dk[i] = a->dv[i] = a->dk_size[i] = a->dv_size[i] = 0;
    double *p = host_alloc(a->Tk * sizeof(double));
    for (int b = 0; b < a->B; b++)
        for (int h = 0; h < a->NH; h++)
            for (int i = 0; i < a->Tq; i++) {
                Row r = {.p = p};
                forward_row(a, b, h, i, &r);
                backward_row(a, b, &r);
            }
    for (size_t i = 0; i < nq; i++) a->dq_size[i] += a->store * fabs(a->dq[i]);
    for (size_t i = 0; i < nk; i++) a->dk_size[i] += a->store * fabs(a->dk[i]), a->dv_size[i] += a->store * fabs(a->dv[i]);
    free(p);
}

void ref_rope(const RefRope *r) {
    const int hs = r->HS, half = hs / 2, heads = r->NH + r->NKV;
    for (size_t t = 0; t < (size_t)r->B * r->T; t++)
        for (int h = 0; h < heads; h++) {
            const double *x = r->qkv + (t * (heads + r->NKV) + h) * hs, *w = h < r->NH ? r->wq : r->wk;
            double *y = r->qk + (t * heads + h) * hs, sum = 0;
            for (int j = 0; j < hs; j++) sum += x[j] * x[j];
            const double rstd = w ? 1 / sqrt(sum / hs + r->eps) : 1;
            r->rstd[t * heads + h] = rstd;
            for (int j = 0; j < half; j++) {
                const double angle = (r->pos0 + (double)(t % r->T)) * pow(r->theta, -2.0 * j / hs);
                const double lo = x[j] * rstd * (w ? w[j] : 1), hi = x[j + half] * rstd * (w ? w[j + half] : 1);
                y[j] = lo * cos(angle) - hi * sin(angle);
                y[j + half] = hi * cos(angle) + lo * sin(angle);
            }
        }
}

void ref_rope_bwd(const RefRope *r, const double *dqk, double *dx, double *dx_size, double *dwq, double *dwk, double *dw_size) {
    const int hs = r->HS, half = hs / 2, heads = r->NH + r->NKV;
    double *g = host_alloc(hs * sizeof(double)), *g_size = host_alloc(hs * sizeof(double));
    for (int j = 0; j < hs; j++) dwq[j] = dwk[j] = dw_size[j] = dw_size[hs + j] = 0;
    ref_rope(r);
    for (size_t t = 0; t < (size_t)r->B * r->T; t++)
        for (int h = 0; h < heads; h++) {
            const double *x = r->qkv + (t * (heads + r->NKV) + h) * hs, *w = h < r->NH ? r->wq : r->wk;
            const double *dy = dqk + (t * heads + h) * hs, rstd = r->rstd[t * heads + h];
            double *dw = h < r->NH ? dwq : dwk, *size = dw_size + (h < r->NH ? 0 : hs), mean = 0, mean_size = 0;
            for (int j = 0; j < hs; j++) { // the transposed rotation
                const int lo = j % half, up = j >= half;
                const double angle = (r->pos0 + (double)(t % r->T)) * pow(r->theta, -2.0 * lo / hs);
                const double c = cos(angle), s = up ? -sin(angle) : sin(angle), other = dy[up ? lo : lo + half];
                g[j] = dy[j] * c + other * s;
                g_size[j] = fabs(dy[j] * c) + fabs(other * s);
                dw[j] += g[j] * x[j] * rstd;
                size[j] += g_size[j] * fabs(x[j]) * rstd;
                mean += g[j] * (w ? w[j] : 0) * x[j] * rstd / hs;
                mean_size += g_size[j] * fabs((w ? w[j] : 0) * x[j]) * rstd / hs;
            }
            for (int j = 0; j < hs; j++) {
                const size_t at = (t * heads + h) * hs + j;
                dx[at] = w ? rstd * (g[j] * w[j] - x[j] * rstd * mean) : g[j];
                dx_size[at] = (hs + 12) * (w ? rstd * (g_size[j] * fabs(w[j]) + fabs(x[j]) * rstd * mean_size) : g_size[j]) +
                              r->store * fabs(dx[at]);
            }
        }
    const double chain = (double)r->B * r->T * r->NH / 64 + 64 + hs;
    for (int j = 0; j < 2 * hs; j++) dw_size[j] *= chain;
    free(g);
    free(g_size);
}
