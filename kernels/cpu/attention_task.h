// Attention and RoPE for one task. Included by attention.c once for each instruction set, after tile.h.
//
// A vector holds queries ("lanes"), never keys: scores are computed as S^T [key][lane], so that softmax needs no sums across
// a vector, K and V are read where they lie, and S^T is at once the packed operand of the next product.
// Scores are in base 2: q carries log2(e)/sqrt(HS).

#define VEC(p) (*(vec *)(p))

// *v = 2^*v, for *v <= 127 (double: 1023) within 1.3 units of the last place, 0 below the normal range (so for -inf); NaN stays NaN.
// x = n + f, |f| <= 1/2; 2^f = 1 + f q(f), q a minimax fit of our own (relative error 2.6e-9; double: 1.8e-17).
ISA_FN static inline __attribute__((always_inline)) void ISA(exp2v)(vec *v)
{
    const vec x = *v;
#ifdef REAL_DOUBLE
    const real magic = 6755399441055744.0 + 1023, lowest = -1022; // 1.5 * 2^52 + bias: the sum's low bits are 2^n's exponent
    const int shift = 52;
    vec t = x + magic, f = x - (t - magic);
    vec q = 4.0780717860928704165e-10 * f + 7.0725703945407994337e-9;
    q = q * f + 1.0180647660573069343e-7;
    q = q * f + 1.3215442675452855182e-6;
    q = q * f + 1.525272738518977478e-5;
    q = q * f + 1.5403530441571850099e-4;
    q = q * f + 1.333355815343996974e-3;
    q = q * f + 9.6181291076070026171e-3;
    q = q * f + 5.5504108664790394528e-2;
    q = q * f + 0.24022650695910098006;
    q = q * f + 0.69314718055994569675;
#else
    const real magic = 12582912.0f + 127, lowest = -126; // 1.5 * 2^23 + bias: the sum's low bits are 2^n's exponent
    const int shift = 23;
    vec t = x + magic, f = x - (t - magic);
    vec q = 1.5594677015e-4f * f + 1.34066438475e-3f;
    q = q * f + 9.61769297615e-3f;
    q = q * f + 5.55031055121e-2f;
    q = q * f + 0.240226527829f;
    q = q * f + 0.693147214968f;
#endif
    vec p = (q * f + (real)1) * (vec)((ivec)t << shift); // a product, so that every kind of NaN stays one
    *v = (vec)((ivec)p & ~(ivec)(x < lowest));
}

// dst[d][lane] = scale * row(lane)[d], d = 0..n-1
ISA_FN static void ISA(lanes_read)(real *dst, const real *const *row, int n, real scale)
{
    _Alignas(32) real t[VL * VL];
    int d = 0;
    for (; d + VL <= n; d += VL)
        for (int l = 0; l < LANES; l += VL) {
            for (int i = 0; i < VL; i++) VEC(t + i * VL) = TILE_LOAD(row[l + i] + d) * scale;
            ISA(turn)(dst + d * LANES + l, LANES, t, VL);
        }
    for (; d < n; d++)
        for (int l = 0; l < LANES; l++) dst[d * LANES + l] = row[l][d] * scale;
}

// row(lane)[d] = src[d][lane], for the first n_lanes
ISA_FN static void ISA(lanes_write)(real *const *row, const real *src, int n, int n_lanes)
{
    _Alignas(32) real t[VL * VL];
    int d = 0;
    for (; d + VL <= n; d += VL)
        for (int l = 0; l < n_lanes; l += VL) {
            ISA(turn)(t, VL, src + d * LANES + l, LANES);
            for (int i = 0; i < VL && l + i < n_lanes; i++) TILE_STORE(row[l + i] + d, VEC(t + i * VL));
        }
    for (; d < n; d++)
        for (int l = 0; l < n_lanes; l++) row[l][d] = src[d * LANES + l];
}

// c[s][lane] = sum_d a[s*lda + d] b[d][lane] for n rows s: scores of n keys, or dout . v
ISA_FN static void ISA(keys_dot)(real *c, size_t ldc, const real *a, size_t lda, const real *b, int n, int hs)
{
    int s = 0;
    for (; s + 4 <= n; s += 4) ISA(tile_4x3)(c + s * ldc, ldc, NULL, 0, a + s * lda, lda, 1, b, LANES, hs);
    for (; s < n; s++) ISA(tile_1x3)(c + s * ldc, ldc, NULL, 0, a + s * lda, lda, 1, b, LANES, hs);
}

// c[d][lane] += sum_s a[s*lda + d] b[s*ldb + lane] for n rows s: what n keys or values contribute
ISA_FN static void ISA(keys_mix)(real *c, const real *a, size_t lda, const real *b, size_t ldb, int n, int hs)
{
    int d = 0;
    for (; d + 4 <= hs; d += 4) ISA(tile_4x3)(c + d * LANES, LANES, c + d * LANES, LANES, a + d, 1, lda, b, ldb, n);
    for (; d < hs; d++) ISA(tile_1x3)(c + d * LANES, LANES, c + d * LANES, LANES, a + d, 1, lda, b, ldb, n);
}

// Scores of key s that a lane does not see become -inf
ISA_FN static void ISA(hide)(real *st, size_t ld, const Panel *p, int s0, int n)
{
    const vec none = (real)-INFINITY - (vec){0};
    for (int s = 0; s < n; s++)
        for (int l = 0; l < LANES; l += VL) {
            const ivec seen = (*(const ivec *)(p->first + l) <= s0 + s) & (*(const ivec *)(p->pos + l) >= s0 + s);
            ivec *x = (ivec *)(st + s * ld + l);
            *x = (*x & seen) | ((ivec)none & ~seen);
        }
}

// One block of keys into the running maximum m, sum l and output ot [d][lane] of a panel.
// A block of which a lane sees nothing leaves that lane as it is, bit for bit.
ISA_FN static void ISA(softmax_block)(real *st, real *m, real *l, real *ot, int n, int hs)
{
    for (int i = 0; i < LANES; i += VL) {
        vec old = VEC(m + i), top = old, sum = {0};
        for (int s = 0; s < n; s++) top = ISA_MAX(VEC(st + s * LANES + i), top);
        for (int s = 0; s < n; s++) {
            vec p = VEC(st + s * LANES + i) - top;
            ISA(exp2v)(&p);
            VEC(st + s * LANES + i) = p;
            sum += p;
        }
        vec shrink = old - top;
        ISA(exp2v)(&shrink);
        VEC(m + i) = top;
        VEC(l + i) = VEC(l + i) * shrink + sum;
        for (int d = 0; d < hs; d++) VEC(ot + d * LANES + i) *= shrink;
    }
}

ISA_FN static void ISA(attention_task)(const Attn *a, int b, int head, int lane0)
{
    _Alignas(64) real qt[HEAD_MAX * LANES], ot[HEAD_MAX * LANES], st[FWD_KEYS * LANES], m[LANES], l[LANES];
    const AttnShape *s = &a->s;
    Panel p;
    panel_make(&p, a, b, head, lane0);
    const real *row[LANES], *k = a->k + b * a->k_seq + head * s->HS, *v = a->v + b * a->v_seq + head * s->HS;
    real *out[LANES];
    for (int i = 0; i < LANES; i++) row[i] = a->q + p.q_at[i], out[i] = a->o + p.o_at[i];
    ISA(lanes_read)(qt, row, s->HS, a->scale * LOG2_E);
    memset(ot, 0, SIZE(s->HS, LANES) * sizeof(real));
    memset(l, 0, sizeof l);
    for (int i = 0; i < LANES; i++) m[i] = -REAL_MAX;
    for (int k0 = p.lo - p.lo % FWD_KEYS; k0 <= p.hi; k0 += FWD_KEYS) {
        int s0 = key_first(k0, p.lo), n = key_count(s0, k0 + FWD_KEYS, p.hi, s->Tk);
        ISA(keys_dot)(st, LANES, k + s0 * (size_t)s->ldk, s->ldk, qt, n, s->HS);
        if (panel_hides(&p, s0, n)) ISA(hide)(st, LANES, &p, s0, n);
        ISA(softmax_block)(st, m, l, ot, n, s->HS);
        ISA(keys_mix)(ot, v + s0 * (size_t)s->ldv, s->ldv, st, LANES, n, s->HS);
    }
    for (int d = 0; d < s->HS; d++)
        for (int i = 0; i < LANES; i += VL) VEC(ot + d * LANES + i) /= VEC(l + i);
    ISA(lanes_write)(out, ot, s->HS, p.n);
    for (int i = 0; i < p.n; i++) a->lse[p.lse_at[i]] = (m[i] + real_log2(l[i])) / LOG2_E;
}

// What a panel's queries need in the backward pass, into place `at` of the block
ISA_FN static void ISA(bwd_read)(BwdBlock *w, const Attn *a, int b, int head, int lane0, int at)
{
    const int hs = a->s.HS, wide_hs = round_to(hs, 2 * VL);
    Panel *p = &w->panel[at];
    real *qt = w->qt + at * LANES * hs, *gt = w->gt + at * LANES * hs, *dqt = w->dqt + at * LANES * hs;
    const real *row[LANES];
    panel_make(p, a, b, head, lane0);
    for (int i = 0; i < LANES; i++) row[i] = a->o + p->o_at[i];
    ISA(lanes_read)(dqt, row, hs, 1);
    for (int i = 0; i < LANES; i++) row[i] = a->dout + p->o_at[i];
    ISA(lanes_read)(gt, row, hs, 1);
    for (int i = 0; i < LANES; i += VL) {
        vec sum = {0};
        for (int d = 0; d < hs; d++) sum += VEC(gt + d * LANES + i) * VEC(dqt + d * LANES + i);
        VEC(w->dot + at * LANES + i) = sum;
    }
    for (int i = 0; i < LANES; i++) {
        real *g = w->g + (at * LANES + i) * wide_hs, *q = w->q + (at * LANES + i) * wide_hs;
        for (int d = 0; d < wide_hs; d++) { // a lane beyond the last query must add nothing to dk and dv
            int here = i < p->n && d < hs;
            g[d] = here ? row[i][d] : 0;
            q[d] = here ? a->q[p->q_at[i] + d] * a->scale : 0;
        }
        w->lse[at * LANES + i] = a->lse[p->lse_at[i]] * LOG2_E;
    }
    for (int i = 0; i < LANES; i++) row[i] = a->q + p->q_at[i];
    ISA(lanes_read)(qt, row, hs, a->scale * LOG2_E);
    memset(dqt, 0, SIZE(hs, LANES) * sizeof(real));
}

// P^T and dS^T of n keys and one panel, from the scores in w->p and dout . v in w->ds
ISA_FN static void ISA(bwd_scores)(BwdBlock *w, int at, int n)
{
    for (int i = at * LANES; i < (at + 1) * LANES; i += VL) {
        vec lse = VEC(w->lse + i), dot = VEC(w->dot + i);
        for (int s = 0; s < n; s++) {
            vec p = VEC(w->p + s * BWD_LANES + i) - lse;
            ISA(exp2v)(&p);
            VEC(w->p + s * BWD_LANES + i) = p;
            VEC(w->ds + s * BWD_LANES + i) = p * (VEC(w->ds + s * BWD_LANES + i) - dot);
        }
    }
}

// dkv[s][d] += sum over the lanes of panels p0..p1-1 of a[s][lane] rows[lane][d], for n keys s; lanes ascending
ISA_FN static void ISA(bwd_keys)(real *dkv, size_t ld, const real *a, const real *rows, const BwdBlock *w, int s0, int n, int p0,
                                 int p1, int hs)
{
    const int wide_hs = round_to(hs, 2 * VL);
    for (int s = 0; s < n; s += 6) {
        while (p0 < p1 && w->panel[p0].hi < s0 + s) p0++; // these lanes stand before all keys from here on
        int l0 = p0 * LANES, lanes = (p1 - p0) * LANES;
        for (int d = 0; d < hs; d += 2 * VL) {
            real *c = dkv + s * ld + d;
            const real *at = a + s * BWD_LANES + l0, *b = rows + l0 * wide_hs + d;
            if (n - s >= 6 && hs - d >= 2 * VL) {
                ISA(tile_6x2)(c, ld, c, ld, at, BWD_LANES, 1, b, wide_hs, lanes);
            } else {
                _Alignas(64) real t[6 * 2 * VL];
                ISA(tile_6x2)(t, 2 * VL, NULL, 0, at, BWD_LANES, 1, b, wide_hs, lanes);
                for (int i = 0; i < 6 && s + i < n; i++)
                    for (int j = 0; j < 2 * VL && d + j < hs; j++) c[i * ld + j] += t[i * 2 * VL + j];
            }
        }
    }
}

// All gradients of one key/value head and its query heads in one sequence
ISA_FN static void ISA(attention_bwd_task)(const Attn *a, int b, int head, BwdBlock *w)
{
    const AttnShape *s = &a->s;
    const int hs = s->HS, n_lanes = s->Tq * a->group;
    const size_t ldk = s->ldk, ldv = s->ldv;
    const real *k = a->k + b * a->k_seq + head * hs, *v = a->v + b * a->v_seq + head * hs;
    real *dk = a->dk + b * a->k_seq + head * hs, *dv = a->dv + b * a->v_seq + head * hs;
    for (int t = 0; t < s->Tk; t++) {
        memset(dk + t * ldk, 0, hs * sizeof(real));
        memset(dv + t * ldv, 0, hs * sizeof(real));
    }
    for (int lane0 = 0; lane0 < n_lanes; lane0 += BWD_LANES) {
        int panels = 0, lo = s->Tk, hi = 0;
        for (; panels < BWD_PANELS && lane0 + panels * LANES < n_lanes; panels++) {
            ISA(bwd_read)(w, a, b, head, lane0 + panels * LANES, panels);
            if (w->panel[panels].lo < lo) lo = w->panel[panels].lo;
            if (w->panel[panels].hi > hi) hi = w->panel[panels].hi;
        }
        for (int k0 = lo - lo % BWD_KEYS; k0 <= hi; k0 += BWD_KEYS) {
            int s0 = key_first(k0, lo), n = key_count(s0, k0 + BWD_KEYS, hi, s->Tk), p0 = 0, p1 = panels;
            while (p0 < p1 && w->panel[p0].hi < s0) p0++;
            while (p0 < p1 && w->panel[p1 - 1].lo >= s0 + n) p1--;
            for (int p = p0; p < p1; p++) {
                ISA(keys_dot)(w->p + p * LANES, BWD_LANES, k + s0 * ldk, ldk, w->qt + p * LANES * hs, n, hs);
                ISA(keys_dot)(w->ds + p * LANES, BWD_LANES, v + s0 * ldv, ldv, w->gt + p * LANES * hs, n, hs);
                if (panel_hides(&w->panel[p], s0, n)) ISA(hide)(w->p + p * LANES, BWD_LANES, &w->panel[p], s0, n);
                ISA(bwd_scores)(w, p, n);
                ISA(keys_mix)(w->dqt + p * LANES * hs, k + s0 * ldk, ldk, w->ds + p * LANES, BWD_LANES, n, hs);
            }
            ISA(bwd_keys)(dv + s0 * ldv, ldv, w->p, w->g, w, s0, n, p0, p1, hs);
            ISA(bwd_keys)(dk + s0 * ldk, ldk, w->ds, w->q, w, s0, n, p0, p1, hs);
        }
        for (int p = 0; p < panels; p++) {
            real *dq[LANES], *dqt = w->dqt + p * LANES * hs;
            for (int i = 0; i < LANES; i++) dq[i] = a->dq + w->panel[p].q_at[i];
            for (int i = 0; i < hs * LANES; i += VL) VEC(dqt + i) *= a->scale;
            ISA(lanes_write)(dq, dqt, hs, w->panel[p].n);
        }
    }
}

// ---- QK-norm and RoPE of one head -----------------------------------------------------------------------------------

// sum_d x[d] y[d]: VL partial sums, then those in order
ISA_FN static real ISA(dot)(const real *x, const real *y, int n)
{
    vec sum = {0};
    int d = 0;
    for (; d + VL <= n; d += VL) sum += TILE_LOAD(x + d) * TILE_LOAD(y + d);
    real total = 0;
    for (int i = 0; i < VL; i++) total += sum[i];
    for (; d < n; d++) total += x[d] * y[d];
    return total;
}

// out = rotate(x * r * w); w NULL = no norm. Returns r
ISA_FN static real ISA(rope_head)(real *restrict out, const real *restrict x, const real *restrict w, const real *restrict cs,
                                  const real *restrict sn, int hs, real eps)
{
    const int half = hs / 2;
    if (!w) {
        for (int j = 0; j < half; j++) {
            out[j] = x[j] * cs[j] - x[j + half] * sn[j];
            out[j + half] = x[j + half] * cs[j] + x[j] * sn[j];
        }
        return 1;
    }
    const real r = 1 / real_sqrt(ISA(dot)(x, x, hs) / hs + eps);
    for (int j = 0; j < half; j++) {
        real lo = x[j] * r * w[j], hi = x[j + half] * r * w[j + half];
        out[j] = lo * cs[j] - hi * sn[j];
        out[j + half] = hi * cs[j] + lo * sn[j];
    }
    return r;
}

// dx from dout; dw += what this head adds
ISA_FN static void ISA(rope_head_bwd)(real *restrict dx, real *restrict dw, const real *restrict dout, const real *restrict x,
                                      const real *restrict w, real r, const real *restrict cs, const real *restrict sn, int hs)
{
    const int half = hs / 2;
    _Alignas(64) real xn[HEAD_MAX], g[HEAD_MAX];
    real *dn = w ? g : dx;
    for (int j = 0; j < half; j++) {
        real lo = dout[j], hi = dout[j + half];
        dn[j] = lo * cs[j] + hi * sn[j];
        dn[j + half] = hi * cs[j] - lo * sn[j];
    }
    if (!w) return;
    for (int j = 0; j < hs; j++) {
        xn[j] = x[j] * r;
        dw[j] += g[j] * xn[j];
        g[j] *= w[j];
    }
    const real mean = ISA(dot)(g, xn, hs) / hs;
    for (int j = 0; j < hs; j++) dx[j] = (g[j] - xn[j] * mean) * r;
}
#undef VEC
