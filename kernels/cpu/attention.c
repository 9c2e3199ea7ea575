// Attention in flash form (Dao et al., 2205.14135), causal, grouped queries, document starts; QK-norm and RoPE.
// The online softmax runs over blocks of keys that start at multiples of FWD_KEYS, so a query's bits do not depend on
// which other queries share its panel, on the threads or on how many queries there are.
#include "kernels/cpu/dev.h"
#include "kernels/cpu/vec.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef REAL_DOUBLE
#define REAL_MAX DBL_MAX
static inline real real_log2(real x) { return log2(x); }
static inline real real_sqrt(real x) { return sqrt(x); }
#else
#define REAL_MAX FLT_MAX
static inline real real_log2(real x) { return log2f(x); }
static inline real real_sqrt(real x) { return sqrtf(x); }
#endif
#define LOG2_E ((real)1.4426950408889634074)

enum {
    HEAD_MAX = 256,      // largest head size: scratch lies on the stack
    LANES = 3 * VL,      // queries of a panel
    PANELS = 16,         // of a block, at most
    BLOCK_REALS = 4 * LANES * HEAD_MAX, // of a block: fewer panels when heads are large
    FWD_KEYS = 64,       // keys of a block; both multiples of 4, the rows of a tile
    BWD_KEYS = 48,
    BWD_PANELS = 8,
    BWD_LANES = BWD_PANELS * LANES,
    ROWS_REALS = BLOCK_REALS + BWD_LANES * (2 * VL - 2), // rows filled up to whole tiles
};

typedef struct Attn {
    AttnShape s;
    int group;  // query heads of a key/value head
    int panels; // of a block
    size_t k_seq, v_seq;
    real scale;
    const real *q, *k, *v, *dout;
    real *o, *dq, *dk, *dv; // o and lse are read in the backward pass
    wide *lse;
    const int *first;
} Attn;

// LANES queries that read one key/value head: lane number = query * group + query head within the group, so that
// neighbours see nearly the same keys, and generation's single query fills a panel with its heads.
typedef struct Panel {
    _Alignas(32) ireal first[LANES], pos[LANES]; // a lane sees the keys first..pos
    size_t q_at[LANES], o_at[LANES], lse_at[LANES];
    int n;        // lanes in use; the others repeat the last one and are not stored
    int lo, hi;   // some lane sees lo, some sees hi, none sees more
    int all_from, all_to; // every lane sees these
} Panel;

// From one key of a block to the next: an odd number of cache lines, so that a column of keys is spread over all sets
#define HEAD_ROW(hs) ((((hs) * (int)sizeof(real) + 63) / 128 * 2 + 1) * (64 / (int)sizeof(real)))

typedef struct Block { // one thread's work: up to PANELS panels against a block of keys
    Panel panel[PANELS];
    int panels, lo, hi; // some lane sees lo, some sees hi, none sees more
    // transposed, [panel][d][lane]: q log2(e)/sqrt(HS), dout; sums for o or dq
    _Alignas(64) real qt[BLOCK_REALS], gt[BLOCK_REALS], acc[BLOCK_REALS];
    _Alignas(64) real q[ROWS_REALS], g[ROWS_REALS]; // [lane][d], d up to whole tiles: q/sqrt(HS), dout
    _Alignas(64) real k[FWD_KEYS * HEAD_ROW(HEAD_MAX)], v[FWD_KEYS * HEAD_ROW(HEAD_MAX)];
    // [key][lane], with room for the last tile's rows past the last key
    _Alignas(64) real p[(BWD_KEYS + 5) * BWD_LANES], ds[(BWD_KEYS + 5) * BWD_LANES];
    _Alignas(64) real max[PANELS * LANES], sum[PANELS * LANES]; // running, of the softmax; backward: lse (base 2) and dout . o
} Block;
_Static_assert(FWD_KEYS * LANES <= (BWD_KEYS + 5) * BWD_LANES && BWD_KEYS <= FWD_KEYS, "blocks fit their arrays");

static inline int round_to(int x, int to) { return (x + to - 1) / to * to; }

static void panel_make(Panel *p, const Attn *a, int b, int head, int lane0) {
    const AttnShape *s = &a->s;
    const int left = s->Tq * a->group - lane0;
    p->n = left < LANES ? left : LANES;
    p->lo = p->all_to = s->Tk;
    p->hi = p->all_from = 0;
    for (int l = 0; l < LANES; l++) {
        int lane = lane0 + (l < p->n ? l : p->n - 1), i = lane / a->group, h = head * a->group + lane % a->group;
        size_t token = b * (size_t)s->Tq + i;
        int pos = s->Tk - s->Tq + i, first = a->first ? a->first[token] : 0;
        CHECK_DEVICE(first >= 0 && first <= pos, "query %d of sequence %d sees keys from %d on but stands at %d", i, b, first, pos);
        p->q_at[l] = token * s->ldq + (size_t)h * s->HS;
        p->o_at[l] = (token * s->NH + h) * s->HS;
        p->lse_at[l] = ((size_t)b * s->NH + h) * s->Tq + i;
        p->first[l] = first;
        p->pos[l] = pos;
        if (first < p->lo) p->lo = first;
        if (first > p->all_from) p->all_from = first;
        if (pos > p->hi) p->hi = pos;
        if (pos < p->all_to) p->all_to = pos;
    }
}

static void block_make(Block *w, const Attn *a, int b, int head, int lane0) {
    const int left = (a->s.Tq * a->group - lane0 + LANES - 1) / LANES;
    w->panels = left < a->panels ? left : a->panels;
    w->lo = a->s.Tk;
    w->hi = 0;
    for (int i = 0; i < w->panels; i++) {
        panel_make(&w->panel[i], a, b, head, lane0 + i * LANES);
        if (w->panel[i].lo < w->lo) w->lo = w->panel[i].lo;
        if (w->panel[i].hi > w->hi) w->hi = w->panel[i].hi;
    }
}

// Blocks of keys are widened to whole tiles where the keys exist; what a lane does not see is hidden.
static inline int key_first(int block, int lo) { return block > lo ? block : lo / 4 * 4; }
static inline int key_count(int s0, int block_end, int hi, int Tk) {
    int end = hi + 1 < block_end ? round_to(hi + 1, 4) : block_end;
    return (end < Tk ? end : Tk) - s0;
}
static inline int panel_hides(const Panel *p, int s0, int n) { return s0 < p->all_from || s0 + n - 1 > p->all_to; }

// Hint to fetch the part-th of `parts` shares of the next block of keys, rows s0.. (at most n, below end): the rows lie too
// far apart for the hardware to guess them.
static inline void rows_fetch(const real *x, size_t ld, int s0, int end, int n, int part, int parts, int hs) {
    if (n > end - s0) n = end - s0;
    for (int s = s0 + n * part / parts; s < s0 + n * (part + 1) / parts; s++)
        for (int d = 0; d < hs; d += 64 / (int)sizeof(real)) __builtin_prefetch(x + s * ld + d, 0, 2);
}

#if defined(__x86_64__) && !defined(CPU_PLAIN)
#define ISA(name) name##_avx2
#define ISA_FN __attribute__((target("avx2,fma")))
#ifdef REAL_DOUBLE
#define ISA_MAX(a, b) ((vec)__builtin_ia32_maxpd256(a, b)) // b where a is NaN
#else
#define ISA_MAX(a, b) ((vec)__builtin_ia32_maxps256(a, b))
#endif
#include "kernels/cpu/tile.h"
#include "kernels/cpu/attention_task.h"
#undef ISA
#undef ISA_FN
#undef ISA_MAX
#endif
#define ISA(name) name##_plain
#define ISA_FN
#define ISA_MAX(a, b) ((vec)(((ivec)(a) & (ivec)((a) > (b))) | ((ivec)(b) & ~(ivec)((a) > (b))))) // b where one is NaN
#include "kernels/cpu/tile.h"
#include "kernels/cpu/attention_task.h"
#undef ISA
#undef ISA_FN
#undef ISA_MAX

typedef struct Tasks {
    void (*forward)(const Attn *a, int b, int head, int lane0, Block *w);
    void (*backward)(const Attn *a, int b, int head, Block *w);
    real (*rope)(real *out, const real *x, const real *w, const real *cs, const real *sn, int hs, real eps);
    void (*rope_bwd)(real *dx, real *dw, const real *dout, const real *x, const real *w, real r, const real *cs, const real *sn,
                     int hs);
} Tasks;

static Tasks best_tasks(void) {
#if defined(__x86_64__) && !defined(CPU_PLAIN)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return (Tasks){attention_task_avx2, attention_bwd_task_avx2, rope_head_avx2, rope_head_bwd_avx2};
#endif
    return (Tasks){attention_task_plain, attention_bwd_task_plain, rope_head_plain, rope_head_bwd_plain};
}

static void check_head(int NH, int NKV, int HS) {
    CHECK_USAGE(HS > 0 && HS % 2 == 0 && HS <= HEAD_MAX, "head size %d: must be even and at most %d", HS, HEAD_MAX);
    CHECK_USAGE(NKV > 0 && NH % NKV == 0, "%d query heads do not divide among %d key/value heads", NH, NKV);
}

static Attn attn_of(AttnShape s) {
    check_head(s.NH, s.NKV, s.HS);
    CHECK_USAGE(s.Tq <= s.Tk, "attention of %d queries over only %d keys", s.Tq, s.Tk);
    Attn a = {.s = s, .group = s.NH / s.NKV, .scale = (real)(1 / sqrt((double)s.HS))};
    a.k_seq = s.kv_seq ? s.kv_seq : SIZE(s.Tk, s.ldk);
    a.v_seq = s.kv_seq ? s.kv_seq : SIZE(s.Tk, s.ldv);
    return a;
}

// Cuts a head's queries into blocks of nearly the same size; how many there are
static int blocks_of(Attn *a, int most) {
    const int panels = (a->s.Tq * a->group + LANES - 1) / LANES;
    if (most > BLOCK_REALS / LANES / a->s.HS) most = BLOCK_REALS / LANES / a->s.HS;
    const int blocks = (panels + most - 1) / most;
    a->panels = blocks ? (panels + blocks - 1) / blocks : 1;
    return (panels + a->panels - 1) / a->panels;
}

void dev_attention(Dev *d, real *o, wide *lse, const real *q, const real *k, const real *v, const int *first, AttnShape s) {
    dev_enter(d);
    Attn a = attn_of(s);
    a.o = o, a.lse = lse, a.q = q, a.k = k, a.v = v, a.first = first;
    const Tasks f = best_tasks();
    const int blocks = blocks_of(&a, PANELS);
    const int64_t tasks = (int64_t)s.B * s.NKV * blocks;
#pragma omp parallel num_threads(d->threads) if (tasks > 1)
    {
        Block w;
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < tasks; t++) {
            int64_t head = t / blocks, block = blocks - 1 - t % blocks; // the longest first
            f.forward(&a, (int)(head / s.NKV), (int)(head % s.NKV), (int)block * a.panels * LANES, &w);
        }
    }
    dev_leave(d);
}

void dev_attention_bwd(Dev *d, real *dq, real *dk, real *dv, const real *dout, const real *o, const wide *lse, const real *q,
                       const real *k, const real *v, const int *first, AttnShape s) {
    dev_enter(d);
    CHECK_USAGE(s.Tq == s.Tk, "attention's backward pass needs as many queries as keys, not %d and %d", s.Tq, s.Tk);
    Attn a = attn_of(s);
    a.dq = dq, a.dk = dk, a.dv = dv, a.dout = dout, a.o = (real *)o, a.lse = (wide *)lse;
    a.q = q, a.k = k, a.v = v, a.first = first;
    const Tasks f = best_tasks();
    blocks_of(&a, BWD_PANELS);
    const int64_t tasks = (int64_t)s.B * s.NKV;
#pragma omp parallel num_threads(d->threads) if (tasks > 1)
    {
        Block w;
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < tasks; t++) f.backward(&a, (int)(t / s.NKV), (int)(t % s.NKV), &w);
    }
    dev_leave(d);
}

// cos and sin of position pos0 + t, each (T, HS/2), one after the other; free() it
static real *rope_table(const Dev *d, int T, int pos0, int HS, double theta) {
    const int half = HS / 2;
    const size_t n = SIZE(T, half);
    real *table = host_alloc(2 * n * sizeof(real));
    double rate[HEAD_MAX / 2];
    for (int j = 0; j < half; j++) rate[j] = pow(theta, -2.0 * j / HS);
#pragma omp parallel for num_threads(d->threads) if (n > 1000)
    for (int t = 0; t < T; t++)
        for (int j = 0; j < half; j++) {
            double angle = ((double)pos0 + t) * rate[j];
            table[(size_t)t * half + j] = (real)cos(angle);
            table[n + (size_t)t * half + j] = (real)sin(angle);
        }
    return table;
}

void dev_qk_rope(Dev *d, real *qk, wide *rstd, const real *qkv, const real *wq, const real *wk, int B, int T, int pos0, int NH,
                 int NKV, int HS, double theta, wide eps) {
    dev_enter(d);
    check_head(NH, NKV, HS);
    const Tasks f = best_tasks();
    const int heads = NH + NKV, half = HS / 2, BT = (int)SIZE(B, T);
    real *cs = rope_table(d, T, pos0, HS, theta), *sn = cs + SIZE(T, half);
#pragma omp parallel for num_threads(d->threads) if (BT > 16)
    for (int bt = 0; bt < BT; bt++) {
        const size_t at = (size_t)(bt % T) * half;
        for (int h = 0; h < heads; h++)
            rstd[(size_t)bt * heads + h] = f.rope(qk + ((size_t)bt * heads + h) * HS, qkv + ((size_t)bt * (heads + NKV) + h) * HS,
                                                  h < NH ? wq : wk, cs + at, sn + at, HS, eps);
    }
    free(cs);
    dev_leave(d);
}

enum { ROPE_CHUNKS = 64 }; // of tokens, each with its own sum for dw, however many threads there are

void dev_qk_rope_bwd(Dev *d, real *dqkv, wide *dwq, wide *dwk, const real *dqk, const real *qkv, const real *wq, const real *wk,
                     const wide *rstd, int B, int T, int NH, int NKV, int HS, double theta) {
    dev_enter(d);
    check_head(NH, NKV, HS);
    const Tasks f = best_tasks();
    const int heads = NH + NKV, half = HS / 2, BT = (int)SIZE(B, T);
    real *cs = rope_table(d, T, 0, HS, theta), *sn = cs + SIZE(T, half);
    wide *sums = host_alloc(SIZE(ROPE_CHUNKS, 2, HS) * sizeof(wide)); // [chunk][q or k][d]
#pragma omp parallel for num_threads(d->threads) if (BT > 16)
    for (int c = 0; c < ROPE_CHUNKS; c++) {
        for (int bt = (int)((int64_t)BT * c / ROPE_CHUNKS); bt < (int64_t)BT * (c + 1) / ROPE_CHUNKS; bt++) {
            const size_t at = (size_t)(bt % T) * half;
            for (int h = 0; h < heads; h++) {
                size_t x = ((size_t)bt * (heads + NKV) + h) * HS, y = ((size_t)bt * heads + h) * HS;
                f.rope_bwd(dqkv + x, sums + ((size_t)c * 2 + (h >= NH)) * HS, dqk + y, qkv + x, h < NH ? wq : wk,
                           rstd[(size_t)bt * heads + h], cs + at, sn + at, HS);
            }
        }
    }
    for (int c = 0; c < ROPE_CHUNKS; c++)
        for (int j = 0; j < HS; j++) {
            if (wq) dwq[j] += sums[(size_t)c * 2 * HS + j];
            if (wk) dwk[j] += sums[((size_t)c * 2 + 1) * HS + j];
        }
    free(sums);
    free(cs);
    dev_leave(d);
}
