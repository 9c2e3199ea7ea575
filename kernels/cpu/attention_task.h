// Attention and RoPE for one task. Included by attention.c once for each instruction set, after tile.h.
//
// A vector holds queries ("lanes"), never keys: scores are computed as S^T [key][lane], so that softmax needs no sums across
// a vector, K and V are read where they lie, and S^T is at once the packed operand of the next product.
// Scores are in base 2: q carries log2(e)/sqrt(HS).

#define VEC(p) (*(vec *)(p))

// v = 2^v for v <= 127 (double: 1023) within 1.3 units of the last place, 0 below the normal range (so for -inf); NaN stays
// NaN. v = n + f, |f| <= 1/2; 2^f = 1 + f q(f), q a minimax fit of our own (relative error 2.6e-9; double: 1.8e-17).
// Three vectors abreast: one alone would wait for its own chain of multiplications.
#define EACH for (int i = 0; i < 3; i++)
ISA_FN static inline __attribute__((always_inline)) void ISA(exp2v)(vec v[3]) {
#ifdef REAL_DOUBLE
    const real lowest = -1023, magic = 6755399441055744.0 + 1023; // 1.5 * 2^52 + bias: the low bits are 2^n's exponent
    const int shift = 52;
    static const real c[] = {4.0780717860928704165e-10, 7.0725703945407994337e-9, 1.0180647660573069343e-7, 1.3215442675452855182e-6,
                             1.525272738518977478e-5, 1.5403530441571850099e-4, 1.333355815343996974e-3, 9.6181291076070026171e-3,
                             5.5504108664790394528e-2, 0.24022650695910098006, 0.69314718055994569675, 1};
#else
    const real lowest = -127, magic = 12582912.0f + 127; // 1.5 * 2^23 + bias: the sum's low bits are 2^n's exponent
    const int shift = 23;
    static const real c[] = {1.5594677015e-4f, 1.34066438475e-3f, 9.61769297615e-3f, 5.55031055121e-2f, 0.240226527829f,
                             0.693147214968f, 1};
#endif
    vec t[3], f[3], q[3];
    EACH v[i] = ISA_MAX((lowest - (vec){0}), v[i]); // 2^lowest comes out as 0; a NaN passes
    EACH t[i] = v[i] + magic;
    EACH f[i] = v[i] - (t[i] - magic);
    EACH q[i] = c[0] * f[i] + c[1];
    for (int j = 2; j < (int)(sizeof c / sizeof *c); j++) EACH q[i] = q[i] * f[i] + c[j];
    EACH v[i] = q[i] * (vec)((ivec)t[i] << shift); // a product, so that every kind of NaN stays one
}

// dst[d][lane] = scale * row(lane)[d], d = 0..n-1
ISA_FN static void ISA(lanes_read)(real *dst, const real *const *row, int n, real scale) {
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
ISA_FN static void ISA(lanes_write)(real *const *row, const real *src, int n, int n_lanes) {
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

// c[s][lane] = sum_d a[s][d] b[d][lane] for n rows s: scores of n keys, or dout . v
ISA_FN static void ISA(keys_dot)(real *c, size_t ldc, const real *a, const real *b, int n, int hs) {
    const size_t lda = HEAD_ROW(hs);
    int s = 0;
    for (; s + 4 <= n; s += 4) ISA(tile_4x3)(c + s * ldc, ldc, NULL, 0, a + s * lda, lda, 1, b, LANES, hs);
    for (; s < n; s++) ISA(tile_1x3)(c + s * ldc, ldc, NULL, 0, a + s * lda, lda, 1, b, LANES, hs);
}

// c[d][lane] += sum_s a[s][d] b[s*ldb + lane] for n rows s: what n keys or values contribute
ISA_FN static void ISA(keys_mix)(real *c, const real *a, const real *b, size_t ldb, int n, int hs) {
    const size_t lda = HEAD_ROW(hs);
    int d = 0;
    for (; d + 4 <= hs; d += 4) ISA(tile_4x3)(c + d * LANES, LANES, c + d * LANES, LANES, a + d, 1, lda, b, ldb, n);
    for (; d < hs; d++) ISA(tile_1x3)(c + d * LANES, LANES, c + d * LANES, LANES, a + d, 1, lda, b, ldb, n);
}

// Scores of key s that a lane does not see become -inf
ISA_FN static void ISA(hide)(real *st, size_t ld, const Panel *p, int s0, int n) {
    const vec none = (real)-INFINITY - (vec){0};
    for (int s = 0; s < n; s++)
        for (int l = 0; l < LANES; l += VL) {
            const ivec seen = (*(const ivec *)(p->first + l) <= s0 + s) & (*(const ivec *)(p->pos + l) >= s0 + s);
            ivec *x = (ivec *)(st + s * ld + l);
            *x = (*x & seen) | ((ivec)none & ~seen);
        }
}

// dst[i][d] = src[i*ld + d] for n rows: rows far apart share few cache sets, and K and V are read many times
ISA_FN static void ISA(rows_copy)(real *dst, const real *src, size_t ld, int n, int hs) {
    for (int i = 0; i < n; i++) {
        int d = 0;
        for (; d + VL <= hs; d += VL) TILE_STORE(dst + i * HEAD_ROW(hs) + d, TILE_LOAD(src + i * ld + d));
        for (; d < hs; d++) dst[i * HEAD_ROW(hs) + d] = src[i * ld + d];
    }
}

// One block of keys into the running maximum m, sum l and output ot [d][lane] of a panel.
// A block of which a lane sees nothing leaves that lane as it is, bit for bit.
ISA_FN static void ISA(softmax_block)(real *st, real *m, real *l, real *ot, int n, int hs) {
    vec top[3] = {VEC(m), VEC(m + VL), VEC(m + 2 * VL)}, sum[3] = {{0}, {0}, {0}}, p[3];
    for (int s = 0; s < n; s++)
        EACH top[i] = ISA_MAX(VEC(st + s * LANES + i * VL), top[i]);
    for (int s = 0; s < n; s++) {
        EACH p[i] = VEC(st + s * LANES + i * VL) - top[i];
        ISA(exp2v)(p);
        EACH VEC(st + s * LANES + i * VL) = p[i];
        EACH sum[i] += p[i];
    }
    EACH p[i] = VEC(m + i * VL) - top[i];
    ISA(exp2v)(p);
    EACH VEC(m + i * VL) = top[i];
    EACH VEC(l + i * VL) = VEC(l + i * VL) * p[i] + sum[i];
    for (int d = 0; d < hs; d++) EACH VEC(ot + d * LANES + i * VL) *= p[i];
}

// A block of queries of one key/value head
ISA_FN static void ISA(attention_task)(const Attn *a, int b, int head, int lane0, Block *w) {
    const AttnShape *s = &a->s;
    const int hs = s->HS;
    const real *row[LANES], *k = a->k + b * a->k_seq + head * hs, *v = a->v + b * a->v_seq + head * hs;
    block_make(w, a, b, head, lane0);
    for (int p = 0; p < w->panels; p++) {
        for (int i = 0; i < LANES; i++) row[i] = a->q + w->panel[p].q_at[i];
        ISA(lanes_read)(w->qt + p * LANES * hs, row, hs, a->scale * LOG2_E);
        for (int i = p * LANES; i < (p + 1) * LANES; i++) w->max[i] = -REAL_MAX, w->sum[i] = 0;
    }
    memset(w->acc, 0, SIZE(w->panels, LANES, hs) * sizeof(real));
    for (int k0 = w->lo - w->lo % FWD_KEYS; k0 <= w->hi; k0 += FWD_KEYS) {
        const int s0 = key_first(k0, w->lo), n_all = key_count(s0, k0 + FWD_KEYS, w->hi, s->Tk);
        ISA(rows_copy)(w->k, k + s0 * (size_t)s->ldk, s->ldk, n_all, hs);
        ISA(rows_copy)(w->v, v + s0 * (size_t)s->ldv, s->ldv, n_all, hs);
        for (int i = 0; i < w->panels; i++) {
            const Panel *p = &w->panel[i];
            const int n = key_count(s0, k0 + FWD_KEYS, p->hi, s->Tk);
            rows_fetch(k, s->ldk, s0 + n_all, w->hi + 1, FWD_KEYS, i, w->panels, hs);
            rows_fetch(v, s->ldv, s0 + n_all, w->hi + 1, FWD_KEYS, i, w->panels, hs);
            if (n <= 0 || p->lo >= s0 + n_all) continue;
            real *acc = w->acc + i * LANES * hs;
            ISA(keys_dot)(w->p, LANES, w->k, w->qt + i * LANES * hs, n, hs);
            if (panel_hides(p, s0, n)) ISA(hide)(w->p, LANES, p, s0, n);
            ISA(softmax_block)(w->p, w->max + i * LANES, w->sum + i * LANES, acc, n, hs);
            ISA(keys_mix)(acc, w->v, w->p, LANES, n, hs);
        }
    }
    for (int i = 0; i < w->panels; i++) {
        const Panel *p = &w->panel[i];
        real *acc = w->acc + i * LANES * hs, *max = w->max + i * LANES, *sum = w->sum + i * LANES, *out[LANES];
        for (int d = 0; d < hs; d++)
            for (int l = 0; l < LANES; l += VL) VEC(acc + d * LANES + l) /= VEC(sum + l);
        for (int l = 0; l < LANES; l++) out[l] = a->o + p->o_at[l];
        ISA(lanes_write)(out, acc, hs, p->n);
        for (int l = 0; l < p->n; l++) a->lse[p->lse_at[l]] = (max[l] + real_log2(sum[l])) / LOG2_E;
    }
}

// What panel `at` of a block needs in the backward pass
ISA_FN static void ISA(bwd_read)(Block *w, const Attn *a, int at) {
    const int hs = a->s.HS, wide_hs = round_to(hs, 2 * VL);
    const Panel *p = &w->panel[at];
    real *qt = w->qt + at * LANES * hs, *gt = w->gt + at * LANES * hs, *acc = w->acc + at * LANES * hs;
    const real *row[LANES];
    for (int i = 0; i < LANES; i++) row[i] = a->o + p->o_at[i];
    ISA(lanes_read)(acc, row, hs, 1);
    for (int i = 0; i < LANES; i++) row[i] = a->dout + p->o_at[i];
    ISA(lanes_read)(gt, row, hs, 1);
    for (int i = 0; i < LANES; i += VL) {
        vec sum = {0};
        for (int d = 0; d < hs; d++) sum += VEC(gt + d * LANES + i) * VEC(acc + d * LANES + i);
        VEC(w->sum + at * LANES + i) = sum;
    }
    for (int i = 0; i < LANES; i++) {
        real *g = w->g + (at * LANES + i) * wide_hs, *q = w->q + (at * LANES + i) * wide_hs;
        const real *x = a->q + p->q_at[i];
        int here = i < p->n ? hs : 0, d = 0; // a lane beyond the last query must add nothing to dk and dv
        for (; d < here; d++) g[d] = row[i][d], q[d] = x[d] * a->scale;
        for (; d < wide_hs; d++) g[d] = q[d] = 0;
        w->max[at * LANES + i] = a->lse[p->lse_at[i]] * LOG2_E;
        row[i] = x;
    }
    ISA(lanes_read)(qt, row, hs, a->scale * LOG2_E);
}

// P^T and dS^T of n keys and one panel, from the scores in w->p and dout . v in w->ds
ISA_FN static void ISA(bwd_scores)(Block *w, int at, int n) {
    real *p = w->p + at * LANES, *ds = w->ds + at * LANES, *lse = w->max + at * LANES, *dot = w->sum + at * LANES;
    for (int s = 0; s < n; s++, p += BWD_LANES, ds += BWD_LANES) {
        vec x[3];
        EACH x[i] = VEC(p + i * VL) - VEC(lse + i * VL);
        ISA(exp2v)(x);
        EACH VEC(p + i * VL) = x[i];
        EACH VEC(ds + i * VL) = x[i] * (VEC(ds + i * VL) - VEC(dot + i * VL));
    }
}

// dkv[s][d] += sum over the lanes of panels p0..p1-1 of a[s][lane] rows[lane][d], for n keys s; lanes ascending
ISA_FN static void ISA(bwd_keys)(real *dkv, size_t ld, const real *a, const real *rows, const Block *w, int s0, int n, int p0,
                                 int p1, int hs) {
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
ISA_FN static void ISA(attention_bwd_task)(const Attn *a, int b, int head, Block *w) {
    const AttnShape *s = &a->s;
    const int hs = s->HS, n_lanes = s->Tq * a->group;
    const size_t ldk = s->ldk, ldv = s->ldv;
    const real *k = a->k + b * a->k_seq + head * hs, *v = a->v + b * a->v_seq + head * hs;
    real *dk = a->dk + b * a->k_seq + head * hs, *dv = a->dv + b * a->v_seq + head * hs;
    int done = 0; // rows of dk and dv that hold sums; a key's first reader is its own query or an earlier block
    for (int lane0 = 0; lane0 < n_lanes; lane0 += a->panels * LANES) {
        block_make(w, a, b, head, lane0);
        for (int i = 0; i < w->panels; i++) ISA(bwd_read)(w, a, i);
        memset(w->acc, 0, SIZE(w->panels, LANES, hs) * sizeof(real));
        for (int k0 = w->lo - w->lo % BWD_KEYS; k0 <= w->hi; k0 += BWD_KEYS) {
            int s0 = key_first(k0, w->lo), n = key_count(s0, k0 + BWD_KEYS, w->hi, s->Tk), p0 = 0, p1 = w->panels;
            for (; done < s0 + n; done++) {
                memset(dk + done * ldk, 0, hs * sizeof(real));
                memset(dv + done * ldv, 0, hs * sizeof(real));
            }
            while (p0 < p1 && w->panel[p0].hi < s0) p0++;
            while (p0 < p1 && w->panel[p1 - 1].lo >= s0 + n) p1--;
            ISA(rows_copy)(w->k, k + s0 * ldk, ldk, n, hs);
            ISA(rows_copy)(w->v, v + s0 * ldv, ldv, n, hs);
            for (int i = p0; i < p1; i++) {
                rows_fetch(k, ldk, s0 + n, w->hi + 1, BWD_KEYS, i - p0, p1 - p0, hs);
                rows_fetch(v, ldv, s0 + n, w->hi + 1, BWD_KEYS, i - p0, p1 - p0, hs);
                ISA(keys_dot)(w->p + i * LANES, BWD_LANES, w->k, w->qt + i * LANES * hs, n, hs);
                ISA(keys_dot)(w->ds + i * LANES, BWD_LANES, w->v, w->gt + i * LANES * hs, n, hs);
                if (panel_hides(&w->panel[i], s0, n)) ISA(hide)(w->p + i * LANES, BWD_LANES, &w->panel[i], s0, n);
                ISA(bwd_scores)(w, i, n);
                ISA(keys_mix)(w->acc + i * LANES * hs, w->k, w->ds + i * LANES, BWD_LANES, n, hs);
            }
            ISA(bwd_keys)(dv + s0 * ldv, ldv, w->p, w->g, w, s0, n, p0, p1, hs);
            ISA(bwd_keys)(dk + s0 * ldk, ldk, w->ds, w->q, w, s0, n, p0, p1, hs);
        }
        for (int i = 0; i < w->panels; i++) {
            real *dq[LANES], *acc = w->acc + i * LANES * hs;
            for (int l = 0; l < LANES; l++) dq[l] = a->dq + w->panel[i].q_at[l];
            for (int d = 0; d < hs * LANES; d += VL) VEC(acc + d) *= a->scale;
            ISA(lanes_write)(dq, acc, hs, w->panel[i].n);
        }
    }
}

// ---- QK-norm and RoPE of one head -----------------------------------------------------------------------------------

// sum_d x[d] y[d]: VL partial sums, then those in order
ISA_FN static real ISA(dot)(const real *x, const real *y, int n) {
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
                                  const real *restrict sn, int hs, real eps) {
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
                                      const real *restrict w, real r, const real *restrict cs, const real *restrict sn, int hs) {
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
#undef EACH
