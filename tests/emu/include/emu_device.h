// The device language for g++: qualifiers, built-in variables and functions. Included by cuda_runtime.h.
#ifndef EMU_DEVICE_H
#define EMU_DEVICE_H
#include "emu.h"
#include <cmath>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static_assert(false, "shared memory is declared by SHARED(T, name, dims) or DYN_SHARED(T, name)");

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz) {}
};
#define threadIdx (emu::now.thread)
#define blockIdx (emu::now.block)
#define blockDim (emu::now.block_dim)
#define gridDim (emu::now.grid_dim)
enum { warpSize = 32 };

namespace emu {
inline Dim dim_of(dim3 d) { return {d.x, d.y, d.z}; }
// A launch: see LAUNCH in kernels/cuda/launch.h
template <class... P>
Launcher<P...> launcher(const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t s, bool resident) {
    return {name, kernel, {dim_of(grid), dim_of(block), shared_bytes, resident}, (void *)s};
}
} // namespace emu

// ---- vectors ---------------------------------------------------------------------------------------------------------
#define EMU_VECTORS(T, name, a2, a4)                                                                             \
    struct __align__(a2) name##2 { T x, y; };                                                                    \
    struct __align__(a4) name##4 { T x, y, z, w; };                                                              \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                            \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTORS(float, float, 8, 16)
EMU_VECTORS(double, double, 16, 16)
EMU_VECTORS(int, int, 8, 16)
EMU_VECTORS(unsigned, uint, 8, 16)
EMU_VECTORS(short, short, 4, 8)
EMU_VECTORS(unsigned short, ushort, 4, 8)
EMU_VECTORS(unsigned char, uchar, 2, 4)
EMU_VECTORS(long long, longlong, 16, 16)
EMU_VECTORS(unsigned long long, ulonglong, 16, 16)
#undef EMU_VECTORS

// ---- block and warp --------------------------------------------------------------------------------------------------
#define __syncthreads() emu::block_barrier(__FILE__, __LINE__, 0, nullptr)
#define __syncthreads_count(p) emu::barrier_count(__FILE__, __LINE__, p)
#define __syncthreads_or(p) (emu::barrier_count(__FILE__, __LINE__, p) > 0)
#define __syncthreads_and(p) (emu::barrier_count(__FILE__, __LINE__, !(p)) == 0)
namespace emu {
inline int barrier_count(const char *file, int line, int predicate) {
    int n;
    block_barrier(file, line, predicate, &n);
    return n;
}

template <class T> struct Shuffle {
    T value, out;
    int from; // -1: the lane's own
};
template <class T> void shuffle_apply(void *args[WARP], unsigned present) {
    for (int i = 0; i < WARP; i++) {
        if (!(present >> i & 1)) continue;
        Shuffle<T> *s = (Shuffle<T> *)args[i];
        int from = s->from < 0 ? i : s->from;
        if (!(present >> from & 1)) fail("lane %d of a warp shuffles from lane %d, which has left or is not in the mask", i, from);
        s->out = ((Shuffle<T> *)args[from])->value;
    }
}
template <class T> T shuffle(unsigned mask, T value, int from, const char *what) {
    Shuffle<T> s = {value, value, from};
    warp_meet(mask, what, shuffle_apply<T>, &s);
    return s.out;
}
} // namespace emu

template <class T> static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    int own = (int)emu::lane_number();
    return emu::shuffle(mask, value, (own & ~(width - 1)) + (lane & (width - 1)), "__shfl_sync");
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned d, int width = 32) {
    int own = (int)emu::lane_number(), from = own - (int)d;
    return emu::shuffle(mask, value, from < (own & ~(width - 1)) ? -1 : from, "__shfl_up_sync");
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned d, int width = 32) {
    int own = (int)emu::lane_number(), from = own + (int)d;
    return emu::shuffle(mask, value, from > (own | (width - 1)) ? -1 : from, "__shfl_down_sync");
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int x, int width = 32) {
    int own = (int)emu::lane_number(), from = own ^ x;
    return emu::shuffle(mask, value, from > (own | (width - 1)) ? -1 : from, "__shfl_xor_sync");
}

namespace emu {
struct Vote {
    bool predicate;
    unsigned out;
};
inline void vote_apply(void *args[WARP], unsigned present) {
    unsigned bits = 0;
    for (int i = 0; i < WARP; i++)
        if (present >> i & 1 && ((Vote *)args[i])->predicate) bits |= 1u << i;
    for (int i = 0; i < WARP; i++)
        if (present >> i & 1) ((Vote *)args[i])->out = bits;
}
inline unsigned vote(unsigned mask, bool predicate, const char *what) {
    Vote v = {predicate, 0};
    warp_meet(mask, what, vote_apply, &v);
    return v.out;
}
inline void nothing_apply(void **, unsigned) {}

template <class T> struct Match {
    T value;
    unsigned same, all;
};
template <class T> void match_apply(void *args[WARP], unsigned present) {
    for (int i = 0; i < WARP; i++) {
        if (!(present >> i & 1)) continue;
        Match<T> *m = (Match<T> *)args[i];
        m->same = 0, m->all = present;
        for (int j = 0; j < WARP; j++)
            if (present >> j & 1 && !memcmp(&((Match<T> *)args[j])->value, &m->value, sizeof(T))) m->same |= 1u << j;
    }
}
template <class T> struct Reduce {
    T value, out;
};
template <class T, T (*combine)(T, T)> void reduce_apply(void *args[WARP], unsigned present) {
    bool first = true;
    T all{};
    for (int i = 0; i < WARP; i++) {
        if (!(present >> i & 1)) continue;
        T v = ((Reduce<T> *)args[i])->value;
        all = first ? v : combine(all, v);
        first = false;
    }
    for (int i = 0; i < WARP; i++)
        if (present >> i & 1) ((Reduce<T> *)args[i])->out = all;
}
template <class T, T (*combine)(T, T)> T reduce(unsigned mask, T value, const char *what) {
    Reduce<T> r = {value, value};
    warp_meet(mask, what, reduce_apply<T, combine>, &r);
    return r.out;
}
template <class T> T op_add(T a, T b) { return a + b; }
template <class T> T op_min(T a, T b) { return a < b ? a : b; }
template <class T> T op_max(T a, T b) { return a > b ? a : b; }
inline unsigned op_and(unsigned a, unsigned b) { return a & b; }
inline unsigned op_or(unsigned a, unsigned b) { return a | b; }
inline unsigned op_xor(unsigned a, unsigned b) { return a ^ b; }
} // namespace emu

static inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::warp_meet(mask, "__syncwarp", emu::nothing_apply, nullptr); }
static inline unsigned __ballot_sync(unsigned mask, int p) { return emu::vote(mask, p != 0, "__ballot_sync"); }
static inline int __any_sync(unsigned mask, int p) { return emu::vote(mask, p != 0, "__any_sync") != 0; }
static inline int __all_sync(unsigned mask, int p) { return emu::vote(mask, p == 0, "__all_sync") == 0; }
static inline unsigned __activemask() { return emu::warp_present(); }
template <class T> static inline unsigned __match_any_sync(unsigned mask, T value) {
    emu::Match<T> m = {value, 0, 0};
    emu::warp_meet(mask, "__match_any_sync", emu::match_apply<T>, &m);
    return m.same;
}
template <class T> static inline unsigned __match_all_sync(unsigned mask, T value, int *same) {
    emu::Match<T> m = {value, 0, 0};
    emu::warp_meet(mask, "__match_all_sync", emu::match_apply<T>, &m);
    *same = m.same == m.all;
    return *same ? m.all : 0;
}
#define EMU_REDUCE(name, T, op) \
    static inline T name(unsigned mask, T v) { return emu::reduce<T, emu::op>(mask, v, #name); }
EMU_REDUCE(__reduce_add_sync, int, op_add<int>)
EMU_REDUCE(__reduce_add_sync, unsigned, op_add<unsigned>)
EMU_REDUCE(__reduce_min_sync, int, op_min<int>)
EMU_REDUCE(__reduce_min_sync, unsigned, op_min<unsigned>)
EMU_REDUCE(__reduce_max_sync, int, op_max<int>)
EMU_REDUCE(__reduce_max_sync, unsigned, op_max<unsigned>)
EMU_REDUCE(__reduce_and_sync, unsigned, op_and)
EMU_REDUCE(__reduce_or_sync, unsigned, op_or)
EMU_REDUCE(__reduce_xor_sync, unsigned, op_xor)
#undef EMU_REDUCE

// ---- atomics: one fiber runs at a time -------------------------------------------------------------------------------
#define EMU_ATOMIC(name, T, expression)             \
    static inline T name(T *p, T v) {               \
        T old = *p;                                 \
        *p = expression;                            \
        return old;                                 \
    }
#define EMU_ATOMIC_INTEGERS(T)                      \
    EMU_ATOMIC(atomicAdd, T, old + v)               \
    EMU_ATOMIC(atomicExch, T, v)                    \
    EMU_ATOMIC(atomicMin, T, v < old ? v : old)     \
    EMU_ATOMIC(atomicMax, T, v > old ? v : old)     \
    EMU_ATOMIC(atomicAnd, T, old & v)               \
    EMU_ATOMIC(atomicOr, T, old | v)                \
    EMU_ATOMIC(atomicXor, T, old ^ v)               \
    static inline T atomicCAS(T *p, T expected, T v) { \
        T old = *p;                                 \
        if (old == expected) *p = v;                \
        return old;                                 \
    }
EMU_ATOMIC_INTEGERS(int)
EMU_ATOMIC_INTEGERS(unsigned)
EMU_ATOMIC_INTEGERS(unsigned long long)
EMU_ATOMIC(atomicSub, int, old - v)
EMU_ATOMIC(atomicSub, unsigned, old - v)
EMU_ATOMIC(atomicMin, long long, v < old ? v : old)
EMU_ATOMIC(atomicMax, long long, v > old ? v : old)
EMU_ATOMIC(atomicAdd, float, old + v)
EMU_ATOMIC(atomicAdd, double, old + v)
EMU_ATOMIC(atomicExch, float, v)
#undef EMU_ATOMIC_INTEGERS
#undef EMU_ATOMIC
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __nanosleep(unsigned) { emu::yield(); }
static inline long long clock64() { return emu::clock(); }
[[noreturn]] static inline void __trap() { emu::fail("a kernel stopped at __trap()"); }

// ---- loads, bits, numbers --------------------------------------------------------------------------------------------
#define EMU_LOAD(name) \
    template <class T> static inline T name(const T *p) { return *p; }
EMU_LOAD(__ldg) EMU_LOAD(__ldcg) EMU_LOAD(__ldca) EMU_LOAD(__ldcs) EMU_LOAD(__ldlu) EMU_LOAD(__ldcv)
#undef EMU_LOAD
#define EMU_STORE(name) \
    template <class T> static inline void name(T *p, T v) { *p = v; }
EMU_STORE(__stwb) EMU_STORE(__stcg) EMU_STORE(__stcs) EMU_STORE(__stwt)
#undef EMU_STORE

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }

namespace emu {
template <class To, class From> To bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "sizes");
    memcpy(&to, &from, sizeof to);
    return to;
}
} // namespace emu
static inline int __float_as_int(float x) { return emu::bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return emu::bits<unsigned>(x); }
static inline float __int_as_float(int x) { return emu::bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return emu::bits<float>(x); }
static inline long long __double_as_longlong(double x) { return emu::bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return emu::bits<double>(x); }

// Macros: glibc declares functions of these names.
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __powf(x, y) powf(x, y)
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __frcp_rn(float x) { return 1 / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frsqrt_rn(float x) { return 1 / sqrtf(x); }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline double __dadd_rn(double x, double y) { return x + y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
static inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline double rsqrt(double x) { return 1 / sqrt(x); }
static inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }

using std::isfinite;
using std::isinf;
using std::isnan;
#define EMU_MIN_MAX(T) \
    static inline T min(T a, T b) { return b < a ? b : a; } \
    static inline T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
#endif
