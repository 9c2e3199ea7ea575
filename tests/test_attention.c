// Attention, QK-norm and RoPE against naive oracles, the oracles' gradients against finite differences, and what must not
// change a bit: threads, the batch, the number of queries at a time.
// On the CPU everything runs twice: on the kernels this machine gets and on the plain ones that any machine can run.
#include "kernels/check.h"
#include "tests/common/child.h"
#include "tests/common/lab.h"
#include "tests/ref/attention_ref.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#ifdef BACKEND_cpu // the plain kernels, compiled into this program under other names
#include "kernels/cpu/dev.h"
#define CPU_PLAIN
#define dev_attention plain_attention
#define dev_attention_bwd plain_attention_bwd
#define dev_qk_rope plain_qk_rope
#define dev_qk_rope_bwd plain_qk_rope_bwd
#include "kernels/cpu/attention.c"
#undef dev_attention
#undef dev_attention_bwd
#undef dev_qk_rope
#undef dev_qk_rope_bwd
#endif

typedef struct Ops {
    void (*attention)(Dev *, real *, wide *, const real *, const real *, const real *, const int *, AttnShape);
    void (*attention_bwd)(Dev *, real *, real *, real *, const real *, const real *, const wide *, const real *, const real *,
                          const real *, const int *, AttnShape);
    void (*rope)(Dev *, real *, wide *, const real *, const real *, const real *, int, int, int, int, int, int, double, wide);
    void (*rope_bwd)(Dev *, real *, wide *, wide *, const real *, const real *, const real *, const real *, const wide *, int, int,
                     int, int, int, double);
} Ops;
static const Ops all_ops[] = {
    {dev_attention, dev_attention_bwd, dev_qk_rope, dev_qk_rope_bwd},
#ifdef BACKEND_cpu
    {plain_attention, plain_attention_bwd, plain_qk_rope, plain_qk_rope_bwd},
#endif
};
enum { KINDS = sizeof all_ops / sizeof *all_ops };

#ifdef REAL_DOUBLE
#define REAL_MIN DBL_MIN
#else
#define REAL_MIN (double)FLT_MIN
#endif
#define RUN(body, table) lab_threads(body, table, sizeof(table) / sizeof((table)[0]))
static const struct {
    int NH, NKV;
} head_counts[] = {{1, 1}, {2, 1}, {4, 2}, {3, 3}, {6, 2}};

static double *bound_of(double *size, size_t n) {
    // a probability below the normal range may count as 0, in each of up to 200 terms of magnitude up to 1000
    for (size_t i = 0; i < n; i++) size[i] = size[i] * REAL_EPS + 2e5 * REAL_MIN;
    return size;
}

// ---- attention ---------------------------------------------------------------------------------------------------------
// A batch as training holds it: q and k in one array (BT, NH+NKV, HS), v behind q and k in another (BT, NH+2NKV, HS)
typedef struct Case {
    RefAttn ref;
    AttnShape s;
    double *qk, *qkv, *q, *k, *v, *dout;
    size_t n_qk, n_qkv, nq, nk, n_lse;
    int *first;
} Case;

static double *columns_of(Lab *l, const double *x, size_t rows, int width, int from, int n) {
    double *y = lab_zeros(l, rows * n);
    for (size_t t = 0; t < rows; t++) memcpy(y + t * n, x + t * width + from, n * sizeof(double));
    return y;
}

static Case case_make(Lab *l, const int *dim, double range, int documents) {
    const int B = dim[0], T = dim[1], NH = head_counts[dim[2]].NH, NKV = head_counts[dim[2]].NKV, HS = dim[3];
    const size_t BT = SIZE(B, T);
    Case c = {.s = {.B = B, .Tq = T, .Tk = T, .NH = NH, .NKV = NKV, .HS = HS}};
    c.s.ldq = c.s.ldk = (NH + NKV) * HS;
    c.s.ldv = (NH + 2 * NKV) * HS;
    c.n_qk = BT * c.s.ldk, c.n_qkv = BT * c.s.ldv, c.nq = BT * NH * HS, c.nk = BT * NKV * HS, c.n_lse = BT * NH;
    c.qk = lab_random(l, c.n_qk, -range, range);
    c.qkv = lab_random(l, c.n_qkv, -1, 1);
    c.dout = lab_random(l, c.nq, -1, 1);
    c.q = columns_of(l, c.qk, BT, c.s.ldk, 0, NH * HS);
    c.k = columns_of(l, c.qk, BT, c.s.ldk, NH * HS, NKV * HS);
    c.v = columns_of(l, c.qkv, BT, c.s.ldv, (NH + NKV) * HS, NKV * HS);
    if (documents) {
        const int *draw = lab_ints(l, BT, 9);
        c.first = lab_filled(l, BT, 0);
        for (size_t t = 0; t < BT; t++)
            if (t % T) c.first[t] = draw[t] ? c.first[t - 1] : (int)(t % T);
    }
    c.ref = (RefAttn){.B = B, .Tq = T, .Tk = T, .NH = NH, .NKV = NKV, .HS = HS, .store = REAL_STORE,
                      .q = c.q, .k = c.k, .v = c.v, .first = c.first,
                      .dout = c.dout, .o = lab_zeros(l, c.nq), .o_size = lab_zeros(l, c.nq), .lse = lab_zeros(l, c.n_lse),
                      .lse_size = lab_zeros(l, c.n_lse), .dq = lab_zeros(l, c.nq), .dk = lab_zeros(l, c.nk),
                      .dv = lab_zeros(l, c.nk),
                      .dq_size = lab_zeros(l, c.nq), .dk_size = lab_zeros(l, c.nk), .dv_size = lab_zeros(l, c.nk)};
    return c;
}

typedef struct Arrays { // on the device
    real *o, *qk, *qkv, *dqk, *dqkv, *dout;
    wide *lse;
    int *first;
} Arrays;

static Arrays arrays_of(Lab *l, const Case *c) {
    return (Arrays){.o = lab_real(l, NULL, c->nq), .qk = lab_real(l, c->qk, c->n_qk), .qkv = lab_real(l, c->qkv, c->n_qkv),
                    .dqk = lab_real(l, NULL, c->n_qk), .dqkv = lab_real(l, NULL, c->n_qkv), .dout = lab_real(l, c->dout, c->nq),
                    .lse = lab_wide(l, NULL, c->n_lse), .first = c->first ? lab_int(l, c->first, SIZE(c->s.B, c->s.Tq)) : NULL};
}

static void run_both(Lab *l, const Ops *f, const Arrays *a, AttnShape s) {
    const size_t k = SIZE(s.NH, s.HS), v = SIZE(s.NH + s.NKV, s.HS);
    f->attention(l->d, a->o, a->lse, a->qk, a->qk + k, a->qkv + v, a->first, s);
    f->attention_bwd(l->d, a->dqk, a->dqk + k, a->dqkv + v, a->dout, a->o, a->lse, a->qk, a->qk + k, a->qkv + v, a->first, s);
}

static void attention_with(Lab *l, const Ops *f, const int *dim, double range, int documents) {
    Case c = case_make(l, dim, range, documents);
    const int NH = c.s.NH, NKV = c.s.NKV, HS = c.s.HS;
    const size_t BT = SIZE(c.s.B, c.s.Tq);
    Arrays a = arrays_of(l, &c);
    run_both(l, f, &a, c.s);
    ref_attention(&c.ref);
    ref_attention_bwd(&c.ref);
    lab_close_to("o", lab_get(l, a.o, c.nq), c.ref.o, bound_of(c.ref.o_size, c.nq), c.nq);
    lab_close_to("lse", lab_get_wide(l, a.lse, c.n_lse), c.ref.lse, bound_of(c.ref.lse_size, c.n_lse), c.n_lse);
    const double *dqk = lab_get(l, a.dqk, c.n_qk), *dqkv = lab_get(l, a.dqkv, c.n_qkv);
    ref_attention(&c.ref); // the sizes that the backward oracle builds on
    ref_attention_bwd(&c.ref);
    lab_close_to("dq", columns_of(l, dqk, BT, c.s.ldk, 0, NH * HS), c.ref.dq, bound_of(c.ref.dq_size, c.nq), c.nq);
    lab_close_to("dk", columns_of(l, dqk, BT, c.s.ldk, NH * HS, NKV * HS), c.ref.dk, bound_of(c.ref.dk_size, c.nk), c.nk);
    lab_close_to("dv", columns_of(l, dqkv, BT, c.s.ldv, (NH + NKV) * HS, NKV * HS), c.ref.dv, bound_of(c.ref.dv_size, c.nk), c.nk);
    lab_poisoned("dq, dk where dv lies", columns_of(l, dqkv, BT, c.s.ldv, 0, (NH + NKV) * HS), BT * (NH + NKV) * HS);
}

static void attention(Lab *l, const int *dim) {
    for (int i = 0; i < KINDS; i++)
        for (int documents = 0; documents < 2; documents++) attention_with(l, &all_ops[i], dim, documents ? 1 : 3, documents);
}

static void test_attention(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{0, 4, 0, 8}, {2, 0, 0, 8}, {1, 1, 0, 2}, {3, 1, 2, 6}, {2, 5, 1, 2}, {1, 7, 4, 6},
                                         {2, 23, 3, 16}, {1, 24, 0, 10}, {1, 25, 2, 32}, {1, 49, 1, 12}, {1, 97, 4, 34},
                                         {1, 130, 2, 64}, {1, 67, 3, 80}, {1, 50, 1, 128}, {1, 9, 0, 256}, {2, 131, 0, 18}};
    RUN(attention, dims);
}

static void sharp(Lab *l, const int *dim) {
    for (int i = 0; i < KINDS; i++) attention_with(l, &all_ops[i], dim, 40, 1);
}

static void test_sharp_softmax(void **state) { // scores of several hundred: nearly all probabilities are 0
    (void)state;
    static const int dims[][LAB_DIMS] = {{1, 140, 1, 16}, {1, 33, 0, 64}};
    RUN(sharp, dims);
}

static double attention_loss(const void *ctx) {
    const Case *c = ctx;
    ref_attention(&c->ref);
    long double sum = 0;
    for (size_t i = 0; i < c->nq; i++) sum += (long double)c->ref.o[i] * c->dout[i];
    return (double)sum;
}

static void slopes(const char *what, const Case *c, double *x, const double *grad, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const double slope = lab_slope(attention_loss, c, x + i, 1e-3);
        if (!(fabs(slope - grad[i]) <= 1e-9))
            fail_msg("%s[%zu]: gradient %.12g, finite difference %.12g", what, i, grad[i], slope);
        if (fabs(slope - grad[i] - 1e-8) <= 1e-9) fail_msg("%s[%zu]: ten times the bound passes", what, i);
    }
}

static void test_oracle_by_finite_differences(void **state) {
    (void)state;
    Lab *l = lab_open(1);
    static const int dims[][LAB_DIMS] = {{1, 6, 2, 6}, {2, 9, 1, 4}};
    for (int i = 0; i < 4; i++) {
        Case c = case_make(l, dims[i % 2], 2, i / 2);
        ref_attention_bwd(&c.ref);
        slopes("dq", &c, c.q, c.ref.dq, c.nq);
        slopes("dk", &c, c.k, c.ref.dk, c.nk);
        slopes("dv", &c, c.v, c.ref.dv, c.nk);
    }
    lab_close(l);
}

// Sequence b of a batch equals that sequence alone, forward and backward, to the bit
static void alone(Lab *l, const int *dim) {
    for (int f = 0; f < KINDS; f++) {
        Case c = case_make(l, dim, 2, 1);
        Arrays a = arrays_of(l, &c), one = arrays_of(l, &c);
        run_both(l, &all_ops[f], &a, c.s);
        const double *o = lab_get(l, a.o, c.nq), *dqk = lab_get(l, a.dqk, c.n_qk);
        AttnShape s = c.s;
        s.B = 1;
        for (int b = 0; b < c.s.B; b++) {
            const size_t nq = c.nq / c.s.B, n_qk = c.n_qk / c.s.B, n_qkv = c.n_qkv / c.s.B;
            Arrays part = {.o = one.o, .lse = one.lse, .dqk = one.dqk, .dqkv = one.dqkv, .qk = a.qk + b * n_qk,
                           .qkv = a.qkv + b * n_qkv, .dout = a.dout + b * nq, .first = a.first + b * s.Tq};
            run_both(l, &all_ops[f], &part, s);
            lab_equal("o of a sequence alone", lab_get(l, part.o, nq), o + b * nq, nq);
            lab_equal("dqk of a sequence alone", lab_get(l, part.dqk, n_qk), dqk + b * n_qk, n_qk);
        }
    }
}

// The last queries alone, against a cache with room for more keys, equal the same rows of the whole, to the bit
static void cached(Lab *l, const int *dim) {
    for (int f = 0; f < KINDS; f++)
        for (int documents = 0; documents < 2; documents++) {
            Case c = case_make(l, dim, 2, documents);
            Arrays a = arrays_of(l, &c);
            run_both(l, &all_ops[f], &a, c.s);
            const double *o = lab_get(l, a.o, c.nq);
            const int B = c.s.B, T = c.s.Tq, room = T + 3, kv = c.s.NKV * c.s.HS, wq = c.s.NH * c.s.HS;
            double *k = lab_zeros(l, SIZE(B, room, kv)), *v = lab_zeros(l, SIZE(B, room, kv));
            for (size_t i = 0; i < SIZE(B, room, kv); i++) k[i] = v[i] = NAN; // keys that are not there yet
            for (int b = 0; b < B; b++) {
                memcpy(k + SIZE(b, room, kv), c.k + SIZE(b, T, kv), SIZE(T, kv) * sizeof(double));
                memcpy(v + SIZE(b, room, kv), c.v + SIZE(b, T, kv), SIZE(T, kv) * sizeof(double));
            }
            real *dev_k = lab_real(l, k, SIZE(B, room, kv)), *dev_v = lab_real(l, v, SIZE(B, room, kv));
            for (int Tq = 1; Tq <= T; Tq += 1 + Tq / 2) {
                double *q = lab_zeros(l, SIZE(B, Tq, wq)), *want = lab_zeros(l, SIZE(B, Tq, wq));
                int *first = lab_filled(l, SIZE(B, Tq), 0);
                for (int b = 0; b < B; b++) {
                    memcpy(q + SIZE(b, Tq, wq), c.q + SIZE(b * T + T - Tq, wq), SIZE(Tq, wq) * sizeof(double));
                    memcpy(want + SIZE(b, Tq, wq), o + SIZE(b * T + T - Tq, wq), SIZE(Tq, wq) * sizeof(double));
                    if (documents) memcpy(first + b * Tq, c.first + b * T + T - Tq, Tq * sizeof(int));
                }
                real *got = lab_real(l, NULL, SIZE(B, Tq, wq));
                AttnShape s = c.s;
                s.Tq = Tq, s.ldq = wq, s.ldk = s.ldv = kv, s.kv_seq = SIZE(room, kv);
                all_ops[f].attention(l->d, got, lab_wide(l, NULL, SIZE(B, c.s.NH, Tq)), lab_real(l, q, SIZE(B, Tq, wq)), dev_k, dev_v,
                                     documents ? lab_int(l, first, SIZE(B, Tq)) : NULL, s);
                lab_equal("o with a cache", lab_get(l, got, SIZE(B, Tq, wq)), want, SIZE(B, Tq, wq));
            }
        }
}

static void test_company_and_cache(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{3, 31, 2, 16}, {2, 140, 1, 10}, {2, 1, 4, 6}, {2, 53, 0, 32}};
    RUN(alone, dims);
    RUN(cached, dims);
}

static void test_nan_is_not_hidden(void **state) {
    (void)state;
    static const int dim[LAB_DIMS] = {1, 60, 1, 8};
    Lab *l = lab_open(2);
    for (int where = 0; where < 3; where++) { // in a query, a key, a value of token 30
        Case c = case_make(l, dim, 2, 0);
        double *x = where == 0 ? c.qk + 30 * c.s.ldk : where == 1 ? c.qk + 30 * c.s.ldk + 16 : c.qkv + 30 * c.s.ldv + 24;
        x[3] = NAN;
        Arrays a = arrays_of(l, &c);
        run_both(l, &all_ops[0], &a, c.s);
        const double *o = lab_get(l, a.o, c.nq);
        for (int t = 30; t < 60; t++)
            if (where || t == 30) assert_true(isnan(o[(t * 2) * 8 + 3]));
        for (int t = 0; t < 60 && where == 0; t++) assert_true(isnan(o[(t * 2 + 1) * 8 + 3]) == 0);
    }
    lab_close(l);
}

#ifdef BACKEND_cpu
// ---- 2^x ---------------------------------------------------------------------------------------------------------------
#if defined(__x86_64__)
#define ISA(name) name##_fma
#define ISA_FN __attribute__((target("avx2,fma")))
#define ISA_MAX(a, b) ((vec)(((ivec)(a) & (ivec)((a) > (b))) | ((ivec)(b) & ~(ivec)((a) > (b)))))
#pragma GCC diagnostic ignored "-Wunused-function"
#include "kernels/cpu/tile.h"
#include "kernels/cpu/attention_task.h"
__attribute__((target("avx2,fma"))) static void exp2_fma(real *x) {
    vec v[3] = {TILE_LOAD(x), TILE_LOAD(x), TILE_LOAD(x)};
    exp2v_fma(v);
    TILE_STORE(x, v[2]);
}
#endif
static void exp2_plain(real *x) {
    vec v[3] = {TILE_LOAD(x), TILE_LOAD(x), TILE_LOAD(x)};
    exp2v_plain(v);
    TILE_STORE(x, v[2]);
}

static void check_exp2(void (*f)(real *)) {
    const double lowest = sizeof(real) == 4 ? -126 : -1022, highest = sizeof(real) == 4 ? 127 : 1023;
    real x[VL], y[VL];
    double worst = 0;
    for (int i = 0; i < 400000; i++) {
        for (int j = 0; j < VL; j++)
            x[j] = y[j] = (real)(i % 2 ? lowest + (highest - lowest) * ((i + j / 8.0) / 400000) : -20 * ((i + j / 8.0) / 400000));
        f(y);
        for (int j = 0; j < VL; j++) {
            const double want = exp2((double)x[j]), err = fabs(y[j] - want) / (REAL_EPS * exp2(floor((double)x[j])));
            worst = fmax(worst, err); // in units of the last place
        }
    }
    if (!(worst <= 1.3 && worst >= 0.4)) fail_msg("2^x is off by up to %.3f units of the last place, 1.3 allowed", worst);
    const real special[][2] = {{0, 1}, {-INFINITY, 0}, {-REAL_MAX, 0}, {(real)(2 * lowest), 0}, {1, 2}, {-1, (real)0.5}};
    for (size_t i = 0; i < sizeof special / sizeof *special; i++) {
        for (int j = 0; j < VL; j++) y[j] = special[i][0];
        f(y);
        assert_true(y[0] == special[i][1] && !signbit(y[0]));
    }
    memset(y, 0xFF, sizeof y); // the NaN that poisoned memory holds
    f(y);
    assert_true(isnan(y[0]));
}

static void test_exp2(void **state) {
    (void)state;
    check_exp2(exp2_plain);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) check_exp2(exp2_fma);
#endif
}

#endif
// ---- QK-norm and RoPE --------------------------------------------------------------------------------------------------
typedef struct Rope {
    RefRope ref;
    double *qkv, *wq, *wk, *dqk;
    size_t n_qkv, n_qk, n_rstd;
} Rope;

static Rope rope_make(Lab *l, const int *dim, int norm, int pos0) {
    const int B = dim[0], T = dim[1], NH = head_counts[dim[2]].NH, NKV = head_counts[dim[2]].NKV, HS = dim[3];
    Rope r = {.n_qkv = SIZE(B, T, NH + 2 * NKV, HS), .n_qk = SIZE(B, T, NH + NKV, HS), .n_rstd = SIZE(B, T, NH + NKV)};
    r.qkv = lab_random(l, r.n_qkv, -2, 2);
    r.dqk = lab_random(l, r.n_qk, -1, 1);
    if (norm) r.wq = lab_random(l, HS, -1, 2), r.wk = lab_random(l, HS, -1, 2);
    r.ref = (RefRope){.B = B, .T = T, .pos0 = pos0, .NH = NH, .NKV = NKV, .HS = HS, .theta = 10000, .eps = (wide)1e-6,
                      .store = REAL_STORE, .qkv = r.qkv,
                      .wq = r.wq, .wk = r.wk, .qk = lab_zeros(l, r.n_qk), .rstd = lab_zeros(l, r.n_rstd)};
    return r;
}

static double rope_loss(const void *ctx) {
    const Rope *r = ctx;
    ref_rope(&r->ref);
    long double sum = 0;
    for (size_t i = 0; i < r->n_qk; i++) sum += (long double)r->ref.qk[i] * r->dqk[i];
    return (double)sum;
}

static void rope_with(Lab *l, const Ops *f, const int *dim, int norm, int pos0) {
    Rope r = rope_make(l, dim, norm, pos0);
    const int B = r.ref.B, T = r.ref.T, NH = r.ref.NH, NKV = r.ref.NKV, HS = r.ref.HS, heads = NH + NKV;
    real *qkv = lab_real(l, r.qkv, r.n_qkv), *qk = lab_real(l, NULL, r.n_qk);
    real *wq = norm ? lab_real(l, r.wq, HS) : NULL, *wk = norm ? lab_real(l, r.wk, HS) : NULL;
    wide *rstd = lab_wide(l, NULL, r.n_rstd);
    f->rope(l->d, qk, rstd, qkv, wq, wk, B, T, pos0, NH, NKV, HS, r.ref.theta, (wide)r.ref.eps);
    ref_rope(&r.ref);
    double *bound = lab_zeros(l, r.n_qk), *bound_r = lab_zeros(l, r.n_rstd);
    for (size_t i = 0; i < r.n_rstd; i++) bound_r[i] = REAL_EPS * (HS + 4) * r.ref.rstd[i];
    for (size_t i = 0; i < r.n_qk; i++) { // a rotation keeps the pair's length
        const size_t pair = i % HS < (size_t)HS / 2 ? i + HS / 2 : i - HS / 2;
        bound[i] = REAL_EPS * ((HS + 8) * 1.5 * hypot(r.ref.qk[i], r.ref.qk[pair]) + REAL_STORE * fabs(r.ref.qk[i]));
    }
    lab_close_to("qk", lab_get(l, qk, r.n_qk), r.ref.qk, bound, r.n_qk);
    lab_close_to("rstd", lab_get_wide(l, rstd, r.n_rstd), r.ref.rstd, bound_r, r.n_rstd);
    if (pos0) return; // the backward pass starts at 0

    real *dqkv = lab_real(l, NULL, r.n_qkv);
    double *dwq = lab_random(l, HS, -1, 1), *dwk = lab_random(l, HS, -1, 1);
    wide *dev_dwq = norm ? lab_wide(l, dwq, HS) : NULL, *dev_dwk = norm ? lab_wide(l, dwk, HS) : NULL;
    f->rope_bwd(l->d, dqkv, dev_dwq, dev_dwk, lab_real(l, r.dqk, r.n_qk), qkv, wq, wk, rstd, B, T, NH, NKV, HS, r.ref.theta);
    double *dx = lab_zeros(l, r.n_qk), *size = lab_zeros(l, r.n_qk), *gq = lab_zeros(l, HS), *gk = lab_zeros(l, HS);
    double *dw_size = lab_zeros(l, 2 * HS);
    ref_rope_bwd(&r.ref, r.dqk, dx, size, gq, gk, dw_size);
    const double *got = lab_get(l, dqkv, r.n_qkv);
    const size_t BT = SIZE(B, T);
    const int width = (heads + NKV) * HS;
    lab_close_to("dqkv", columns_of(l, got, BT, width, 0, heads * HS), dx, bound_of(size, r.n_qk), r.n_qk);
    lab_poisoned("the value part", columns_of(l, got, BT, width, heads * HS, NKV * HS), BT * NKV * HS);
    for (int j = 0; j < HS && norm; j++) {
        dw_size[j] += 2 * fabs(dwq[j]);
        dw_size[HS + j] += 2 * fabs(dwk[j]);
        dwq[j] += gq[j];
        dwk[j] += gk[j];
    }
    if (norm) lab_close_to("dwq", lab_get_wide(l, dev_dwq, HS), dwq, bound_of(dw_size, HS), HS);
    if (norm) lab_close_to("dwk", lab_get_wide(l, dev_dwk, HS), dwk, bound_of(dw_size + HS, HS), HS);
}

static void rope(Lab *l, const int *dim) {
    for (int i = 0; i < KINDS; i++) {
        rope_with(l, &all_ops[i], dim, 1, 0);
        rope_with(l, &all_ops[i], dim, 0, 0);
        rope_with(l, &all_ops[i], dim, 1, 100003);
    }
}

static void test_rope(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{0, 3, 0, 8}, {2, 0, 0, 8}, {1, 1, 0, 2}, {2, 5, 2, 6}, {1, 9, 4, 16}, {3, 40, 2, 32},
                                         {1, 101, 1, 64}, {1, 17, 3, 80}, {2, 30, 2, 128}, {1, 3, 0, 256},
                                         {2, 700, 0, 4}}; // the last: several tokens to a block of the backward
    RUN(rope, dims);
}

static void test_rope_by_finite_differences(void **state) {
    (void)state;
    Lab *l = lab_open(1);
    static const int dim[LAB_DIMS] = {2, 3, 2, 6};
    for (int norm = 0; norm < 2; norm++) {
        Rope r = rope_make(l, dim, norm, 0);
        double *dx = lab_zeros(l, r.n_qk), *size = lab_zeros(l, r.n_qk), gq[6], gk[6], dw_size[12];
        ref_rope_bwd(&r.ref, r.dqk, dx, size, gq, gk, dw_size);
        const int heads = 6, all = 8, HS = 6;
        for (size_t i = 0; i < r.n_qk; i++) {
            const size_t t = i / (heads * HS), at = t * all * HS + i % (heads * HS);
            const double slope = lab_slope(rope_loss, &r, r.qkv + at, 1e-3);
            if (!(fabs(slope - dx[i]) <= 1e-8)) fail_msg("dx[%zu]: gradient %.12g, finite difference %.12g", i, dx[i], slope);
        }
        for (int j = 0; j < HS && norm; j++) {
            assert_true(fabs(lab_slope(rope_loss, &r, r.wq + j, 1e-3) - gq[j]) <= 1e-9);
            assert_true(fabs(lab_slope(rope_loss, &r, r.wk + j, 1e-3) - gk[j]) <= 1e-9);
        }
    }
    lab_close(l);
}

// ---- refusals ----------------------------------------------------------------------------------------------------------
static void attend(void *arg) {
    const AttnShape *s = arg;
    Lab *l = lab_open(1);
    real *x = lab_real(l, NULL, 4096);
    wide *lse = lab_wide(l, NULL, 64);
    dev_attention(l->d, x, lse, x, x, x, s->B == 2 ? lab_int(l, lab_filled(l, 8, 3), 8) : NULL, *s);
    if (s->B == 3) dev_attention_bwd(l->d, x, x, x, x, x, lse, x, x, x, NULL, *s);
    lab_get(l, x, 1);
}

static void test_refusals(void **state) {
    (void)state;
    AttnShape s = {.B = 1, .Tq = 2, .Tk = 2, .NH = 2, .NKV = 1, .HS = 4, .ldq = 8, .ldk = 4, .ldv = 4};
    assert_int_equal(child_call(attend, &s).status, 0);
    AttnShape odd = s, large = s, heads = s, queries = s, past = s, bwd = s;
    odd.HS = 3, large.HS = 258, heads.NKV = 3, queries.Tk = 1, past.B = 2, bwd.B = 3, bwd.Tk = 3;
    AttnShape *usage[] = {&odd, &large, &heads, &queries, &bwd};
    for (int i = 0; i < 5; i++) assert_int_equal(child_call(attend, usage[i]).status, STATUS_USAGE);
    assert_int_equal(child_call(attend, &past).status, LAB_FAULT); // a document that starts behind its token
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals), // first: a child of a process that has used a GPU cannot use it
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_sharp_softmax),
        cmocka_unit_test(test_oracle_by_finite_differences),
        cmocka_unit_test(test_company_and_cache),
        cmocka_unit_test(test_nan_is_not_hidden),
#ifdef BACKEND_cpu
        cmocka_unit_test(test_exp2),
#endif
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_rope_by_finite_differences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
