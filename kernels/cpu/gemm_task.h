// One block of a product: pack, then register tiles. Included by gemm.c once for each instruction set, after tile.h.

// packed b: panels of GEMM_NR columns, in a panel k after k; columns past j1 are 0.
// b is given as rows of k: panel[k][j] = b[k*ld + j]
ISA_FN static void ISA(pack_b)(real *dst, const real *b, size_t ld, int kc, int n) {
    int n_full = n / GEMM_NR, rest = n % GEMM_NR;
    for (int k = 0; k < kc; k += 4) { // 4 at a time: whole lines of each panel
        int k1 = k + 4 < kc ? k + 4 : kc;
        for (int p = 0; p < n_full; p++)
            for (int q = k; q < k1; q++) {
                const real *src = b + q * ld + p * GEMM_NR;
                vec lo = TILE_LOAD(src), hi = TILE_LOAD(src + VL);
                real *to = dst + p * GEMM_BPANEL + q * GEMM_NR;
                TILE_STORE(to, lo);
                TILE_STORE(to + VL, hi);
            }
        for (int q = k; q < k1 && rest; q++) {
            real *to = dst + n_full * GEMM_BPANEL + q * GEMM_NR;
            for (int j = 0; j < GEMM_NR; j++) to[j] = j < rest ? b[q * ld + n_full * GEMM_NR + j] : 0;
        }
    }
}

// The same of b given as rows of j: panel[k][j] = b[j*ld + k]; n columns, the panel `nr` >= n (a multiple of VL) wide
ISA_FN static void ISA(pack_b_turned)(real *dst, const real *b, size_t ld, int kc, int n, int nr) {
    for (int j = 0; j < nr; j += VL, b += VL * ld, dst += VL) {
        int k = 0;
        for (; k + VL <= kc && n - j >= VL; k += VL) ISA(turn)(dst + k * nr, nr, b + k, ld);
        for (; k < kc; k++)
            for (int q = 0; q < VL; q++) dst[k * nr + q] = j + q < n ? b[q * ld + k] : 0;
    }
}

// packed a, rows as they are: dst[i*GEMM_ROW + k] = a[i*ld + k]; 0 up to a whole number of tiles
ISA_FN static void ISA(pack_a)(real *dst, const real *a, size_t ld, int kc, int m) {
    int padded = (m + GEMM_MR - 1) / GEMM_MR * GEMM_MR;
    for (int i = 0; i < padded; i++) {
        if (i < m) memcpy(dst + i * GEMM_ROW, a + i * ld, kc * sizeof(real));
        else memset(dst + i * GEMM_ROW, 0, kc * sizeof(real));
    }
}

// packed a, transposed: panels of GEMM_MR rows, panel[k][i] = a[k*ld + i]; rows past m are 0
ISA_FN static void ISA(pack_a_turned)(real *dst, const real *a, size_t ld, int kc, int m) {
    int n_full = m / GEMM_MR, rest = m % GEMM_MR;
    int n_wide = (m - VL + GEMM_MR) / GEMM_MR; // panels whose rows can be copied by a whole vector
    if (n_wide < 0 || (int)VL < (int)GEMM_MR) n_wide = 0;
    for (int k = 0; k < kc; k += 8) {
        int k1 = k + 8 < kc ? k + 8 : kc;
        for (int p = 0; p < n_wide; p++) // what a vector writes too much, the next row or panel or the line between overwrites
            for (int q = k; q < k1; q++) TILE_STORE(dst + p * GEMM_APANEL + q * GEMM_MR, TILE_LOAD(a + q * ld + p * GEMM_MR));
        for (int p = n_wide; p < n_full; p++)
            for (int q = k; q < k1; q++)
                memcpy(dst + p * GEMM_APANEL + q * GEMM_MR, a + q * ld + p * GEMM_MR, GEMM_MR * sizeof(real));
        for (int q = k; q < k1 && rest; q++)
            for (int i = 0; i < GEMM_MR; i++)
                dst[n_full * GEMM_APANEL + q * GEMM_MR + i] = i < rest ? a[q * ld + n_full * GEMM_MR + i] : 0;
    }
}

ISA_FN static inline void ISA(put_edge)(real *c, const real *z, size_t ld, const real *t, int m, int n) {
    for (int i = 0; i < m && i < GEMM_MR; i++)
        for (int j = 0; j < n && j < GEMM_NR; j++) c[i * ld + j] = z ? z[i * ld + j] + t[i * GEMM_NR + j] : t[i * GEMM_NR + j];
}

// All tiles of packed a (m rows; ai, ak and from one panel to the next) times packed b (n columns) into c; row stride ld of c, z
ISA_FN static inline __attribute__((always_inline)) void ISA(tiles)(real *c, const real *z, size_t ld, const real *a, size_t ai,
                                                                    size_t ak, size_t panel, const real *b, int m, int n, int kc) {
    for (int j = 0; j < n; j += GEMM_NR, b += GEMM_BPANEL) {
        const real *ap = a;
        for (int i = 0; i < m; i += GEMM_MR, ap += panel) {
            real *ct = c + i * ld + j;
            const real *zt = z ? z + i * ld + j : NULL;
            if (m - i >= GEMM_MR && n - j >= GEMM_NR) {
                ISA(tile_6x2)(ct, ld, zt, ld, ap, ai, ak, b, GEMM_NR, kc);
            } else {
                _Alignas(64) real t[GEMM_MR * GEMM_NR];
                ISA(tile_6x2)(t, GEMM_NR, NULL, 0, ap, ai, ak, b, GEMM_NR, kc);
                ISA(put_edge)(ct, zt, ld, t, m - i, n - j);
            }
        }
    }
}

// GEMM_NT with at most GEMM_FEW rows: c^T = b a^T, so that b, which is large and used once, is read where it lies.
// s->b: c^T [j][nr], s->a: a^T [k][nr]
ISA_FN static void ISA(gemm_few)(const Product *p, int i0, int m, int j0, int j1, GemmScratch *s) {
    int n = j1 - j0, nr = round_up(m, VL);
    size_t lda = (size_t)p->k, ldc = (size_t)p->n;
    real *ct = s->b, *at = s->a;
    if (p->z)
        for (int j = 0; j < n; j++)
            for (int i = 0; i < nr; i++) ct[j * nr + i] = i < m ? p->z[(i0 + i) * ldc + j0 + j] : 0;
    for (int k0 = 0; k0 == 0 || k0 < p->k; k0 += GEMM_KC) {
        int kc = p->k - k0 < GEMM_KC ? p->k - k0 : GEMM_KC, j = 0;
        ISA(pack_b_turned)(at, p->a + i0 * lda + k0, lda, kc, m, nr);
        const real *b = p->b + j0 * lda + k0;
        const real *z = k0 || p->z ? ct : NULL;
#define PART(R, V)                                                                                                        \
    for (; j + R <= n; j += R)                                                                                            \
        ISA(tile_##R##x##V)(ct + j * nr, V * VL, z ? z + j * nr : z, V * VL, b + j * lda, lda, 1, at, V * VL, kc);
        if (nr == VL) {
            PART(12, 1)
            PART(4, 1)
            PART(1, 1)
        } else if (nr == 2 * VL) {
            PART(6, 2)
            PART(2, 2)
            PART(1, 2)
        } else {
            PART(4, 3)
            PART(1, 3)
        }
#undef PART
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) p->c[(i0 + i) * ldc + j0 + j] = ct[j * nr + i];
}

// Columns j..j+n of the sum's block k0 into packed b
ISA_FN static void ISA(pack_columns)(real *dst, const Product *p, int k0, int kc, int j, int n) {
    const size_t n_all = (size_t)p->n, k_all = (size_t)p->k;
    if (p->form == GEMM_NT) {
        const real *b = p->b + j * k_all + k0;
        for (int q = 0; q < n; q += GEMM_NR)
            ISA(pack_b_turned)(dst + q / GEMM_NR * GEMM_BPANEL, b + q * k_all, k_all, kc, n - q < GEMM_NR ? n - q : GEMM_NR,
                               GEMM_NR);
    } else {
        const real *b = p->b + k0 * n_all + j;
        ISA(pack_b)(dst, b, n_all, kc, n);
    }
}

ISA_FN static void ISA(gemm_task)(const Product *p, int i0, int i1, int j0, int j1, GemmScratch *s) {
    if (p->form == GEMM_NT && i1 - i0 <= GEMM_FEW) {
        ISA(gemm_few)(p, i0, i1 - i0, j0, j1, s);
        return;
    }
    const size_t m_all = (size_t)p->m, n_all = (size_t)p->n, k_all = (size_t)p->k;
    const int most = gemm_columns(p->form), slab = GEMM_PACKED / most; // of the sum, that much packed b has room for
    for (int ks = 0; ks == 0 || ks < p->k; ks += slab) {
        const int ke = p->k - ks < slab ? p->k : ks + slab;
        for (int i = i0; i < i1; i += GEMM_MC) {
            const int m = i1 - i < GEMM_MC ? i1 - i : GEMM_MC;
            real *packed = s->b;
            for (int k0 = ks; k0 == 0 || k0 < ke; k0 += GEMM_KC, packed += most / GEMM_NR * GEMM_BPANEL) {
                const int kc = ke - k0 < GEMM_KC ? ke - k0 : GEMM_KC;
                if (p->form == GEMM_TN) ISA(pack_a_turned)(s->a, p->a + k0 * m_all + i, m_all, kc, m);
                else ISA(pack_a)(s->a, p->a + i * k_all + k0, k_all, kc, m);
                for (int j = j0; j < j1; j += GEMM_NG) {
                    const int n = j1 - j < GEMM_NG ? j1 - j : GEMM_NG;
                    real *b = packed + (j - j0) / GEMM_NR * GEMM_BPANEL, *c = p->c + i * n_all + j;
                    const real *z = k0 ? c : p->z ? p->z + i * n_all + j : NULL;
                    if (i == i0) ISA(pack_columns)(b, p, k0, kc, j, n);
                    if (p->form == GEMM_TN) ISA(tiles)(c, z, n_all, s->a, 1, GEMM_MR, GEMM_APANEL, b, m, n, kc);
                    else ISA(tiles)(c, z, n_all, s->a, GEMM_ROW, 1, GEMM_MR * GEMM_ROW, b, m, n, kc);
                }
            }
        }
    }
}
