// The emulation itself: what a kernel may use gives what CUDA's manual says, in every order of threads; and what is wrong is found.
#include "tests/emu/test_emu.h"
#include <algorithm>
#include <math.h>

// ---- blocks ------------------------------------------------------------------------------------------------------------
static __global__ void who(int *count, dim3 *first) {
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    atomicAdd(&count[block * blockDim.x * blockDim.y * blockDim.z + thread], 1);
    if (thread == 0) first[block] = dim3(blockIdx.x, blockIdx.y, blockIdx.z);
}

static void blocks_and_threads(void **) {
    for (const char *order : orders) {
        emu_order(order);
        int n = 5 * 3 * 2, threads = 7 * 5 * 2;
        int *count = device(std::vector<int>((size_t)(n * threads)));
        dim3 *first = device<dim3>((size_t)n);
        LAUNCH(who, dim3(5, 3, 2), dim3(7, 5, 2), 0, stream, count, first);
        for (int c : host(count, (size_t)(n * threads))) assert_int_equal(c, 1);
        std::vector<dim3> f = host(first, (size_t)n);
        for (int i = 0; i < n; i++) assert_int_equal(f[(size_t)i].x + 5 * (f[(size_t)i].y + 3 * f[(size_t)i].z), i);
    }
    LAUNCH(who, 0, 32, 0, stream, (int *)nullptr, (dim3 *)nullptr); // an op on nothing
    assert_int_equal(emu::launcher("who", who, 1, 1025, 0, stream, false)(nullptr, nullptr), cudaErrorInvalidConfiguration);
    assert_int_equal(emu::launcher("who", who, 0, 32, 0, stream, false)(nullptr, nullptr), cudaErrorInvalidConfiguration);
}

// Neighbours' values through shared memory, twice, with or without the barriers
template <bool Barrier> static __global__ void rotate(int *out, int n) {
    SHARED(int, a, [128]);
    DYN_SHARED(int, b);
    int i = threadIdx.x;
    a[i] = i;
    if (Barrier) __syncthreads();
    b[i] = a[(i + 1) % n];
    if (Barrier) __syncthreads();
    out[i] = b[(i + n - 2) % n];
}
template <bool Barrier> static int rotate_wrong(const char *order) {
    emu_order(order);
    int n = 100, wrong = 0;
    int *out = device<int>((size_t)n);
    LAUNCH(rotate<Barrier>, 1, n, n * sizeof(int), stream, out, n);
    std::vector<int> v = host(out, (size_t)n);
    for (int i = 0; i < n; i++) wrong += v[(size_t)i] != (i + n - 1) % n;
    return wrong;
}
static void barriers(void **) {
    for (const char *order : orders) assert_int_equal(rotate_wrong<true>(order), 0);
    assert_true(rotate_wrong<false>("forward") > 0);
    assert_true(rotate_wrong<false>("reverse") > 0);
}

static __global__ void barrier_votes(int *out) {
    if (threadIdx.x >= 60) return; // those that left do not count
    int n = __syncthreads_count(threadIdx.x % 3 == 0), any = __syncthreads_or(threadIdx.x == 40), all = __syncthreads_and(threadIdx.x < 60);
    int none = __syncthreads_or(0), not_all = __syncthreads_and(threadIdx.x != 7);
    if (threadIdx.x == 59) out[0] = n, out[1] = any, out[2] = all, out[3] = none, out[4] = not_all;
}
static void votes_of_blocks(void **) {
    for (const char *order : orders) {
        emu_order(order);
        int *out = device<int>(5);
        LAUNCH(barrier_votes, 1, 70, 0, stream, out);
        std::vector<int> v = host(out, 5);
        assert_true(v[0] == 20 && v[1] && v[2] && !v[3] && !v[4]);
    }
}

static __global__ void unset(float *out, int *integer) {
    SHARED(float, a, [32]);
    SHARED(int, i, );
    DYN_SHARED(float, b);
    out[blockIdx.x * 64 + threadIdx.x] = a[threadIdx.x];
    out[blockIdx.x * 64 + 32 + threadIdx.x] = b[threadIdx.x];
    if (threadIdx.x == 0) integer[blockIdx.x] = i;
    __syncwarp();
    a[threadIdx.x] = b[threadIdx.x] = 1; // the next block must not see it
    i = 1;
}
static void memory_is_unset(void **) {
    float *out = device<float>(3 * 64);
    int *integer = device<int>(3);
    for (float f : host(out, 3 * 64)) assert_true(isnan(f));
    LAUNCH(unset, 3, 32, 32 * sizeof(float), stream, out, integer);
    for (float f : host(out, 3 * 64)) assert_true(isnan(f));
    for (int i : host(integer, 3)) assert_int_equal(i, -1);
}

// ---- warps -------------------------------------------------------------------------------------------------------------
enum { SHUFFLES = 8 };
static __global__ void shuffles(double *out, int width) {
    int i = threadIdx.x;
    double v[SHUFFLES] = {
        (double)__shfl_sync(WARP_ALL, i, 5, width), (double)__shfl_sync(WARP_ALL, (float)i, i + 3, width),
        __shfl_up_sync(WARP_ALL, (double)i, 3, width), (double)__shfl_down_sync(WARP_ALL, (long long)i, 2, width),
        (double)__shfl_xor_sync(WARP_ALL, (unsigned)i, 1, width), (double)__shfl_xor_sync(WARP_ALL, i, 16, width),
        (double)warp_sum(i), (double)warp_max(i % 7) - warp_min(i % 7 - 50)};
    for (int k = 0; k < SHUFFLES; k++) out[i * SHUFFLES + k] = v[k];
}
static void shuffles_of_warps(void **) {
    for (const char *order : orders)
        for (int width : {32, 8}) {
            emu_order(order);
            double *out = device<double>(64 * SHUFFLES);
            LAUNCH(shuffles, 1, 64, 0, stream, out, width);
            std::vector<double> v = host(out, 64 * SHUFFLES);
            for (int i = 0; i < 64; i++) {
                int base = i / width * width, w = i / 32 * 32, most = 0, least = 99;
                for (int l = w; l < w + 32; l++) most = std::max(most, l % 7), least = std::min(least, l % 7 - 50);
                double want[SHUFFLES] = {(double)base + 5, (double)base + (i + 3) % width, i - 3 >= base ? i - 3.0 : i,
                                         i + 2 < base + width ? i + 2.0 : i, (double)(i ^ 1),
                                         (i ^ 16) < base + width ? (double)(i ^ 16) : i, w * 32 + 496.0, (double)most - least};
                for (int k = 0; k < SHUFFLES; k++) assert_true(v[(size_t)(i * SHUFFLES + k)] == want[k]);
            }
        }
}

enum { VOTES = 12 };
static __global__ void votes(unsigned *out) {
    unsigned i = threadIdx.x;
    if (i >= 20) return;
    int same, key = (int)i % 3;
    unsigned v[VOTES] = {__ballot_sync(WARP_ALL, i % 2), (unsigned)__any_sync(WARP_ALL, i == 19), (unsigned)__all_sync(WARP_ALL, i < 20),
                         (unsigned)__any_sync(WARP_ALL, i >= 20), __match_any_sync(0xfffffu, key),
                         __match_all_sync(0xfffffu, 1.5f, &same), __match_all_sync(0xfffffu, key, &same),
                         (unsigned)__reduce_add_sync(0xfffffu, -(int)i), __reduce_max_sync(0xfffffu, i), __reduce_or_sync(0xfffffu, 1u << i % 4),
                         __reduce_and_sync(0xfffffu, i | 8u), __reduce_xor_sync(0xfffffu, i)};
    if (i < 10) __syncwarp(0x3ff); // halves that part and meet on their own
    else v[0] += __ballot_sync(0xffc00, 1) - 0xffc00;
    for (int k = 0; k < VOTES; k++) out[i * VOTES + k] = v[k];
}
static void votes_of_warps(void **) {
    for (const char *order : orders) {
        emu_order(order);
        unsigned *out = device<unsigned>(20 * VOTES);
        LAUNCH(votes, 1, 40, 0, stream, out); // a second warp with 8 lanes, all of which leave
        std::vector<unsigned> v = host(out, 20 * VOTES);
        for (unsigned i = 0; i < 20; i++) {
            unsigned match = 0, x = 0;
            for (unsigned j = 0; j < 20; j++) match |= (unsigned)(j % 3 == i % 3) << j, x ^= j;
            unsigned want[VOTES] = {0xaaaaa, 1, 1, 0, match, 0xfffff, 0, (unsigned)-190, 19, 15, 8, x};
            for (int k = 0; k < VOTES; k++) assert_int_equal(v[i * VOTES + (unsigned)k], want[k]);
        }
    }
}

static __global__ void atomics(int *i, unsigned *u, unsigned long long *l, float *f) {
    int t = (int)threadIdx.x;
    atomicAdd(i, t), atomicMin(i + 1, -t), atomicMax(i + 2, t), atomicOr(i + 3, 1 << t % 31), atomicSub(i + 4, t);
    atomicAnd(u, ~(1u << t % 8)), atomicXor(u + 1, (unsigned)t), atomicExch(u + 2, 7u), atomicAdd(u + 3, 1u);
    atomicAdd(l, 1ull << 33), atomicMax(l + 1, (unsigned long long)t << 40);
    atomicAdd(f, 0.5f);
    for (int old = i[5], seen;; old = seen) // a sum by compare and swap
        if ((seen = atomicCAS(i + 5, old, old + t)) == old) break;
}
static void atomics_of_all_kinds(void **) {
    for (const char *order : orders) {
        emu_order(order);
        int *i = device(std::vector<int>{0, 5, 0, 0, 0, 0});
        unsigned *u = device(std::vector<unsigned>{~0u, 0, 0, 0});
        unsigned long long *l = device(std::vector<unsigned long long>{0, 0});
        float *f = device(std::vector<float>{0});
        LAUNCH(atomics, 2, 64, 0, stream, i, u, l, f);
        std::vector<int> vi = host(i, 6);
        std::vector<unsigned> vu = host(u, 4);
        std::vector<unsigned long long> vl = host(l, 2);
        assert_true(vi[0] == 4032 && vi[1] == -63 && vi[2] == 63 && vi[3] == 0x7fffffff && vi[4] == -4032 && vi[5] == 4032);
        assert_true(vu[0] == ~255u && vu[1] == 0 && vu[2] == 7 && vu[3] == 128);
        assert_true(vl[0] == 128ull << 33 && vl[1] == 63ull << 40);
        assert_true(host(f, 1)[0] == 64);
    }
}

// ---- instructions --------------------------------------------------------------------------------------------------------
// c = a b for one tile: a (16,16) by ldmatrix, b (16,8) by ldmatrix transposed
static __global__ void tile(float *c, const __nv_bfloat16 *a, const __nv_bfloat16 *b) {
    SHARED(__nv_bfloat16, sa, [16][16]);
    SHARED(__nv_bfloat16, sb, [16][16]); // two tiles of 8 columns
    int l = threadIdx.x;
    cp_async_16(&sa[l / 2][l % 2 * 8], a + l * 8);
    cp_async_commit();
    cp_async_16(&sb[l / 2][l % 2 * 8], b + l * 8);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    uint32_t fa[4], fb[4];
    float fc[2][4] = {};
    ldmatrix_x4(fa, &sa[l % 16][l / 16 * 8]);
    ldmatrix_x4_trans(fb, &sb[l % 16][l / 16 * 8]);
    for (int n = 0; n < 2; n++) {
        uint32_t half[2] = {fb[2 * n], fb[2 * n + 1]};
        mma_bf16(fc[n], fa, half);
        for (int i = 0; i < 4; i++) c[(l / 4 + i / 2 * 8) * 16 + n * 8 + l % 4 * 2 + i % 2] = fc[n][i];
    }
}
static void tensor_core(void **) {
    std::vector<__nv_bfloat16> a(256), b(256);
    for (uint32_t i = 0; i < 256; i++) a[i] = (float)(hash(i) % 31) - 15, b[i] = (float)(hash(i + 999) % 31) - 15; // exact in fp32
    for (const char *order : orders) {
        emu_order(order);
        float *c = device<float>(256);
        LAUNCH(tile, 1, 32, 0, stream, c, device(a), device(b));
        std::vector<float> v = host(c, 256);
        for (int i = 0; i < 256; i++) {
            double want = 0;
            for (int k = 0; k < 16; k++) want += (double)a[(size_t)(i / 16 * 16 + k)] * b[(size_t)(k * 16 + i % 16)];
            assert_true(v[(size_t)i] == want);
        }
    }
}

// mode 0: right; 1: no wait; 2: the buffer is filled again while it is read
static __global__ void asynchronous(float *out, const float *in, int mode) {
    SHARED(float, s, [2][4]);
    int l = threadIdx.x;
    if (l == 0) {
        cp_async_16(s[0], in);
        cp_async_commit();
        cp_async_16(s[1], in + 4, 8);
        cp_async_commit();
        if (mode != 1) cp_async_wait<1>();
    }
    __syncwarp();
    if (mode == 2 && l == 0) cp_async_16(s[0], in + 4);
    float first = l < 4 ? s[0][l] : 0;
    __syncwarp();
    if (l == 0) cp_async_wait<0>();
    __syncwarp();
    if (l < 4) out[l] = first, out[4 + l] = s[1][l];
}
static int asynchronous_wrong(const char *order, int mode) {
    emu_order(order);
    float *out = device<float>(8), *in = device(std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8});
    LAUNCH(asynchronous, 1, 32, 0, stream, out, in, mode);
    std::vector<float> v = host(out, 8), want = {1, 2, 3, 4, 5, 6, 0, 0};
    return v != want;
}
static void asynchronous_copies(void **) {
    for (const char *order : orders) assert_false(asynchronous_wrong(order, 0));
    assert_true(asynchronous_wrong("reverse", 1));
    assert_true(asynchronous_wrong("forward", 2));
}

// The nearest of all bfloat16s, ties to the even one, by looking at the neighbours
static void bf16_rounds(void **) {
    for (uint32_t i = 0; i < 65536; i++) {
        __nv_bfloat16 b = __ushort_as_bfloat16((unsigned short)i);
        float f = b;
        if (isnan(f)) assert_int_equal(__nv_bfloat16(f).x, 0x7fff);
        else assert_int_equal(__nv_bfloat16(f).x, i);
        if (i % 0x8000 >= 0x7f7f) continue;
        float up = __ushort_as_bfloat16((unsigned short)(i + 1));
        double middle = ((double)f + up) / 2;
        unsigned even = i & 1 ? i + 1 : i;
        assert_int_equal(__nv_bfloat16((float)middle).x, even);
        assert_int_equal(__nv_bfloat16(middle).x, even);
        assert_int_equal(__nv_bfloat16(nextafterf((float)middle, f)).x, i);
        assert_int_equal(__nv_bfloat16(nextafterf((float)middle, up)).x, i + 1);
        assert_int_equal(__nv_bfloat16(nextafter(middle, (double)f)).x, i); // by way of float it would be a tie
        assert_int_equal(__nv_bfloat16(nextafter(middle, (double)up)).x, i + 1);
    }
    assert_int_equal(__nv_bfloat16(INFINITY).x, 0x7f80);
    assert_int_equal(__nv_bfloat16(3.4e38f).x, 0x7f80);
    assert_int_equal(__nv_bfloat16(1e300).x, 0x7f80);
}

// ---- faults --------------------------------------------------------------------------------------------------------------
static __global__ void fault(int kind, float *p, int n) {
    SHARED(float, s, [4]);
    DYN_SHARED(float, d);
    int i = threadIdx.x;
    switch (kind) {
    case 1:
        if (i < 32) __syncthreads();
        else
            __syncthreads();
        break;
    case 2:
        if (i % 32 == 9) return;
        p[0] = __shfl_sync(WARP_ALL, 1.0f, 9);
        break;
    case 3: __syncwarp(i == 3 ? 1u : WARP_ALL); break;
    case 4: p[n] = 1; break;      // behind the end
    case 5: s[n / 16 + (i == 0)] = 1; break;
    case 6: d[n] = 1; break;
    case 7:
        if (i == 0) __syncwarp();
        else __ballot_sync(WARP_ALL, 1);
        break;
    }
}
static void die_of(int kind, int n) {
    float *p = device<float>((size_t)n);
    LAUNCH(fault, 1, 64, n * sizeof(float), stream, kind, p, n);
    CUDA_CHECK(cudaDeviceSynchronize());
}
static void kernel_faults(void **) {
    must_die([](void *) { die_of(1, 64); }, ABORTED, "a divergent barrier");
    must_die([](void *) { die_of(2, 64); }, ABORTED, "shuffles from lane 9, which has left");
    must_die([](void *) { die_of(3, 64); }, ABORTED, "leaves itself out");
    must_die([](void *) { die_of(7, 64); }, ABORTED, "meet in different functions");
#ifdef __SANITIZE_ADDRESS__
    for (auto body : {+[](void *) { die_of(4, 64); }, +[](void *) { die_of(4, 65); }, +[](void *) { die_of(5, 64); }, +[](void *) { die_of(6, 64); }})
        must_die(body, REPORTED, "test_emu_kernels.cu:"); // the kernel's line
#else
    must_die([](void *) { die_of(4, 64); }, CRASHED, ""); // 256 bytes, then the guard page
    must_die([](void *) { die_of(4, 65); }, ABORTED, "byte 260 of a device allocation of 260 bytes was written");
    must_die([](void *) { die_of(5, 64); }, ABORTED, "wrote byte 16 of a shared variable of 16 bytes");
    must_die([](void *) { die_of(6, 64); }, ABORTED, "wrote byte 256 of a shared variable of 256 bytes");
#endif
}

static __global__ void lost(int kind) {
    if (kind == 0 && threadIdx.x < 40) __syncthreads(); // the others wait for their warp
    else if (kind == 0) __ballot_sync(WARP_ALL, 1);
    if (kind == 1 && threadIdx.x == 0) __syncwarp(3);
    else if (kind == 1) __syncthreads();
}
static void die_lost(int kind) {
    LAUNCH(lost, 1, 64, 0, stream, kind);
    CUDA_CHECK(cudaDeviceSynchronize());
}
static void deadlocks(void **) {
    must_die([](void *) { die_lost(0); }, ABORTED, "40 of 64 threads wait at the barrier");
    must_die([](void *) { die_lost(1); }, ABORTED, "waits in __syncwarp, mask 00000003");
}

int main(void) {
    stream = stream_new();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_and_threads), cmocka_unit_test(barriers), cmocka_unit_test(votes_of_blocks), cmocka_unit_test(memory_is_unset),
        cmocka_unit_test(shuffles_of_warps), cmocka_unit_test(votes_of_warps), cmocka_unit_test(atomics_of_all_kinds), cmocka_unit_test(tensor_core),
        cmocka_unit_test(asynchronous_copies), cmocka_unit_test(bf16_rounds), cmocka_unit_test(kernel_faults), cmocka_unit_test(deadlocks),
    };
    return cmocka_run_group_tests(tests, nullptr, nullptr);
}
