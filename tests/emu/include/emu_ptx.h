// The instructions of kernels/cuda/launch.h, emulated: same names, same meaning.
#ifndef EMU_PTX_H
#define EMU_PTX_H
#include <ctime>

namespace emu {
inline float bf16_at(uint32_t pair, int half) { return bits<float>(half ? pair & 0xffff0000u : pair << 16); }

struct Mma {
    float *c;
    const uint32_t *a, *b;
};
// Lane 4g+t holds, of a: rows g and g+8, columns 2t, 2t+1 and those + 8; of b: rows 2t, 2t+1 and those + 8, column g; of c: rows
// g and g+8, columns 2t, 2t+1. k ascending, in fp32.
inline void mma_apply(void *args[WARP], unsigned present) {
    if (present != ~0u) fail("mma without all 32 lanes");
    float a[16][16], b[8][16];
    for (int i = 0; i < WARP; i++) {
        const Mma *m = (const Mma *)args[i];
        int g = i / 4, t = i % 4;
        for (int h = 0; h < 2; h++) {
            a[g][2 * t + h] = bf16_at(m->a[0], h);
            a[g + 8][2 * t + h] = bf16_at(m->a[1], h);
            a[g][2 * t + 8 + h] = bf16_at(m->a[2], h);
            a[g + 8][2 * t + 8 + h] = bf16_at(m->a[3], h);
            b[g][2 * t + h] = bf16_at(m->b[0], h);
            b[g][2 * t + 8 + h] = bf16_at(m->b[1], h);
        }
    }
    for (int i = 0; i < WARP; i++) {
        float *c = ((Mma *)args[i])->c;
        int g = i / 4, t = i % 4;
        for (int j = 0; j < 4; j++)
            for (int k = 0; k < 16; k++) c[j] += a[g + j / 2 * 8][k] * b[2 * t + j % 2][k];
    }
}

struct Mma_fp32 {
    float *c;
    const float *a, *b;
};
inline void mma_fp32_apply(void *args[WARP], unsigned present) { // the same places, a pair for each register
    if (present != ~0u) fail("mma without all 32 lanes");
    float a[16][16], b[16][8];
    for (int i = 0; i < WARP; i++) {
        const Mma_fp32 *m = (const Mma_fp32 *)args[i];
        int g = i / 4, t = i % 4;
        for (int j = 0; j < 8; j++) a[g + j / 2 % 2 * 8][2 * t + j % 2 + j / 4 * 8] = m->a[j];
        for (int j = 0; j < 4; j++) b[2 * t + j % 2 + j / 2 * 8][g] = m->b[j];
    }
    for (int i = 0; i < WARP; i++) {
        float *c = ((Mma_fp32 *)args[i])->c;
        int g = i / 4, t = i % 4;
        for (int j = 0; j < 4; j++)
            for (int k = 0; k < 16; k++) c[j] += a[g + j / 2 * 8][k] * b[k][2 * t + j % 2];
    }
}

struct Load_matrix {
    uint32_t *r;
    const void *row;
    bool trans;
};
inline void load_matrix_apply(void *args[WARP], unsigned present) {
    if (present != ~0u) fail("ldmatrix without all 32 lanes");
    for (int i = 0; i < WARP; i++)
        if ((uintptr_t)((Load_matrix *)args[i])->row & 15) fail("ldmatrix: lane %d's row is not 16-byte aligned", i);
    for (int i = 0; i < WARP; i++) {
        const Load_matrix *m = (const Load_matrix *)args[i];
        for (int k = 0; k < 4; k++) { // matrix
            uint16_t two[2];
            for (int h = 0; h < 2; h++) {
                int row = m->trans ? i % 4 * 2 + h : i / 4, column = m->trans ? i / 4 : i % 4 * 2 + h;
                two[h] = ((const uint16_t *)((const Load_matrix *)args[8 * k + row])->row)[column];
            }
            m->r[k] = two[0] | (uint32_t)two[1] << 16;
        }
    }
}
inline void load_matrix(uint32_t (&r)[4], const void *row, bool trans) {
    uint32_t out[4];
    Load_matrix m = {out, row, trans};
    warp_meet(~0u, "ldmatrix", load_matrix_apply, &m);
    memcpy(r, out, sizeof out);
}
} // namespace emu

static inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    emu::Mma m = {c, a, b};
    emu::warp_meet(~0u, "mma", emu::mma_apply, &m);
}
static inline void mma_fp32(float (&c)[4], const float (&a)[8], const float (&b)[4]) {
    emu::Mma_fp32 m = {c, a, b};
    emu::warp_meet(~0u, "mma", emu::mma_fp32_apply, &m);
}
static inline void ldmatrix_x4(uint32_t (&r)[4], const void *row) { emu::load_matrix(r, row, false); }
static inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) { emu::load_matrix(r, row, true); }
static inline void cp_async_16(void *shared, const void *global, int bytes = 16) { emu::async_copy(shared, global, bytes); }
static inline void cp_async_commit() { emu::async_commit(); }
template <int Pending> static inline void cp_async_wait() { emu::async_wait(Pending); }
static inline void flag_release(unsigned *flag, unsigned value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
static inline unsigned flag_acquire(const unsigned *flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
static inline uint64_t clock_ns() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
#endif
