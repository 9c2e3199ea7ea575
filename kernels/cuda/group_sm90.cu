// Grouped products for Hopper: a persistent grid of three warpgroups a block. One thread of the first fetches operands by TMA
// into a ring of stages; the others multiply by wgmma, 64 rows of a tile of 128 x 256 each, and store while the next tile's
// operands arrive. Tensor maps of the weights are made on the device, where their addresses are.
// Compiled but not yet run on hardware; group.cu has the same products, and scripts/gpu_check compares the two.
#include "kernels/cuda/group.h"

#if defined(__CUDACC__) && defined(REAL_BF16)
#include "kernels/cuda/sm90.h"

enum { TILE_M = 128, TILE_N = 256, STEP = 64, LINE = 128, RING = 4, BLOCK = 384, WARPGROUP = 128 };
enum { CHUNK_BYTES = STEP * LINE }; // 64 lines of 64 elements: the box of an operand whose sum runs across the lines
enum { A_BYTES = TILE_M * LINE, B_BYTES = TILE_N * LINE, STAGE_BYTES = A_BYTES + B_BYTES };

struct Ring {
    unsigned char *stage; // [RING][STAGE_BYTES], 1024-byte aligned
    uint64_t *full, *free; // [RING]: operands have arrived; all warps have used them
};
struct Place { // in the ring
    int stage;
    unsigned parity;
};
[[maybe_unused]] static __device__ __forceinline__ void place_next(Place *p) {
    if (++p->stage == RING) p->stage = 0, p->parity ^= 1;
}

// maps[j] = model with the address of w[j], a warp for each
static __global__ void __launch_bounds__(WARP) group_maps_kernel(CUtensorMap *maps, const __grid_constant__ CUtensorMap model,
                                                                 const real *const *w) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    DYN_SHARED(CUtensorMap, map);
    reinterpret_cast<int *>(map)[threadIdx.x] = reinterpret_cast<const int *>(&model)[threadIdx.x];
    __syncwarp();
    const real *address = w[blockIdx.x];
    if ((uintptr_t)address % 16) __trap();
    map_write(maps + blockIdx.x, map, address);
#endif
}
static_assert(sizeof(CUtensorMap) == WARP * sizeof(int), "a lane copies 4 bytes of a map");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <GroupForm FORM>
static __device__ void produce(const Ring &r, const GroupArgs &g, const int *first, const CUtensorMap *a, const CUtensorMap *b) {
    Place at = {0, 1};
    for (int t = (int)blockIdx.x; t < first[g.J]; t += (int)gridDim.x) {
        const Tile s = tile_find<FORM, TILE_M, TILE_N>(g, first, t);
        const CUtensorMap *w = FORM == GROUP_TN ? b : b + s.group;
        if (FORM != GROUP_TN) map_acquire(w);
        for (int k = 0; k < s.sum; k += STEP, place_next(&at)) {
            uint64_t *full = r.full + at.stage;
            unsigned char *to = r.stage + at.stage * STAGE_BYTES;
            bar_wait(r.free + at.stage, at.parity);
            bar_arrive_expect(full, STAGE_BYTES);
            if (FORM != GROUP_TN) tma_load(to, a, full, k, s.first_row + s.row0);
            else
                for (int c = 0; c < TILE_M / 64; c++)
                    tma_load(to + c * CHUNK_BYTES, a, full, s.row0 + c * 64, s.first_row + k);
            to += A_BYTES;
            if (FORM == GROUP_NT) tma_load(to, w, full, k, s.col0);
            else
                for (int c = 0; c < TILE_N / 64; c++)
                    tma_load(to + c * CHUNK_BYTES, w, full, s.col0 + c * 64, FORM == GROUP_TN ? s.first_row + k : k);
        }
    }
}

// Lines from `left` on belong to the next group: 0 in both operands, for a NaN times 0 is one. By both warpgroups together.
static __device__ void lines_clear(unsigned char *stage, int left) {
    const int i = (int)threadIdx.x - WARPGROUP, threads = 2 * WARPGROUP, chunks = STAGE_BYTES / CHUNK_BYTES, parts = LINE / 16;
    for (int e = i; e < chunks * (STEP - left) * parts; e += threads) {
        const int c = e / ((STEP - left) * parts), rest = e % ((STEP - left) * parts);
        *reinterpret_cast<int4 *>(stage + c * CHUNK_BYTES + left * LINE + rest * 16) = make_int4(0, 0, 0, 0);
    }
    shared_to_async();
    named_barrier(1, threads);
}

template <GroupForm FORM>
static __device__ __forceinline__ void multiply(float (&sum)[TILE_N / 8][4], const Ring &r, Place *at, int n, int group) {
    int last = -1;
    wgmma_hold(sum);
    for (int k = 0; k < n; k += STEP, place_next(at)) {
        unsigned char *stage = r.stage + at->stage * STAGE_BYTES;
        bar_wait(r.full + at->stage, at->parity);
        if (FORM == GROUP_TN && n - k < STEP) lines_clear(stage, n - k);
        // 64 rows of a: lines of the tile, or a chunk of its columns; 16 of the sum: 32 bytes of each line, or 16 lines
        const int a_step = FORM == GROUP_TN ? 16 * LINE : 32, b_step = FORM == GROUP_NT ? 32 : 16 * LINE;
        const uint64_t a = wgmma_operand(stage + group * CHUNK_BYTES, CHUNK_BYTES, 8 * LINE);
        const uint64_t b = wgmma_operand(stage + A_BYTES, CHUNK_BYTES, 8 * LINE);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < STEP / 16; i++)
            wgmma_256<FORM == GROUP_TN, FORM != GROUP_NT>(sum, a + (uint64_t)(i * a_step / 16), b + (uint64_t)(i * b_step / 16), k + i > 0);
        wgmma_commit();
        wgmma_wait<1>(); // the step before has read its stage
        if (last >= 0 && threadIdx.x % WARP == 0) bar_arrive(r.free + last);
        last = at->stage;
    }
    wgmma_wait<0>();
    wgmma_hold(sum);
    if (last >= 0 && threadIdx.x % WARP == 0) bar_arrive(r.free + last);
}

static __device__ __forceinline__ uint32_t pack_pair(float lo, float hi) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

// The four lanes of a row exchange pairs, so that each stores 16 bytes and together they cover 64. cols is a multiple of 8.
static __device__ void store_rows(real *y, int ld, const float (&sum)[TILE_N / 8][4], const Tile &s, int row) {
    const int t = (int)threadIdx.x % 4;
    y += (size_t)(s.first_row + s.row0) * ld + s.col0;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < TILE_N / 8; j += 4) {
            uint32_t own[4], out[4];
#pragma unroll
            for (int i = 0; i < 4; i++) own[i] = pack_pair(sum[j + i][h * 2], sum[j + i][h * 2 + 1]);
            // a 4 x 4 matrix across lanes, turned: out[i] = own[t] of lane i
#pragma unroll
            for (int d = 0; d < 4; d++) { // lane t sends what lane t ^ d wants
                const int to = t ^ d;
                const uint32_t send = to == 0 ? own[0] : to == 1 ? own[1] : to == 2 ? own[2] : own[3];
                const uint32_t got = __shfl_xor_sync(WARP_ALL, send, d);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (i == to) out[i] = got;
            }
            const int r = row + h * 8, c = (j + t) * 8;
            if (r < s.rows && c < s.cols)
                *reinterpret_cast<int4 *>(y + (size_t)r * ld + c) = make_int4((int)out[0], (int)out[1], (int)out[2], (int)out[3]);
        }
}

static __device__ void add_rows(wide *dw, int ld, const float (&sum)[TILE_N / 8][4], const Tile &s, int row) {
    dw += (size_t)s.row0 * ld + s.col0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = row + h * 8;
        if (r >= s.rows) continue;
#pragma unroll
        for (int j = 0; j < TILE_N / 8; j++) {
            const int c = j * 8 + (int)threadIdx.x % 4 * 2;
            if (c >= s.cols) continue;
            float2 *to = reinterpret_cast<float2 *>(dw + (size_t)r * ld + c), x = *to;
            x.x += sum[j][h * 2], x.y += sum[j][h * 2 + 1];
            *to = x;
        }
    }
}
#endif

template <GroupForm FORM>
static __global__ void __launch_bounds__(BLOCK, 1)
group_sm90_kernel(GroupArgs g, const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const CUtensorMap *w) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    DYN_SHARED(unsigned char, shared);
    SHARED(uint64_t, bars, [2 * RING]);
    const Ring r = {shared, bars, bars + RING};
    int *first = reinterpret_cast<int *>(shared + RING * STAGE_BYTES); // (J+1)
    if (threadIdx.x < WARP) group_tiles<FORM, TILE_M, TILE_N>(first, g);
    if (threadIdx.x == WARP) {
        for (int i = 0; i < RING; i++) bar_init(r.full + i, 1), bar_init(r.free + i, 2 * WARPGROUP / WARP);
        bar_init_seen();
    }
    __syncthreads();
    const int group = (int)threadIdx.x / WARPGROUP - 1; // of the consumers; -1: the producer
    if (group < 0) {
        registers_lower<40>();
        if (threadIdx.x == 0) produce<FORM>(r, g, first, &a, FORM == GROUP_TN ? &b : w);
        return;
    }
    registers_raise<232>();
    const int row = group * 64 + (int)threadIdx.x % WARPGROUP / WARP * 16 + (int)threadIdx.x % WARP / 4;
    Place at = {0, 0};
    for (int t = (int)blockIdx.x; t < first[g.J]; t += (int)gridDim.x) {
        const Tile s = tile_find<FORM, TILE_M, TILE_N>(g, first, t);
        float sum[TILE_N / 8][4];
        multiply<FORM>(sum, r, &at, s.sum, group);
        if (FORM == GROUP_TN) add_rows(g.dw[s.group], g.cols, sum, s, row);
        else store_rows(g.y, g.cols, sum, s, row);
    }
#endif
}

// A map of x (rows,cols), in boxes of 64 columns and `box_rows` rows, which land in swizzled lines of 128 bytes
static CUtensorMap map_of(const void *x, int rows, int cols, int box_rows) {
    typedef CUresult Encode(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                            const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    void *found = nullptr; // of the driver, which is not linked: the program starts without one
    cudaDriverEntryPointQueryResult result;
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    CHECK_DEVICE(found, "this driver has no cuTensorMapEncodeTiled (hint: MOE_GROUPED=portable)");
    CUtensorMap map;
    const cuuint64_t dims[] = {(cuuint64_t)cols, (cuuint64_t)rows}, stride[] = {(cuuint64_t)cols * sizeof(real)};
    const cuuint32_t box[] = {64, (cuuint32_t)box_rows}, every[] = {1, 1};
    const CUresult code = ((Encode *)found)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)x, dims, stride, box, every,
                                            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK_DEVICE(code == CUDA_SUCCESS, "no tensor map for %d x %d in boxes of %d rows: CUDA error %d", rows, cols, box_rows, (int)code);
    return map;
}

template <GroupForm FORM> static void launch(Dev *d, const GroupArgs &g) {
    const size_t smem = (size_t)RING * STAGE_BYTES + (g.J + 1) * sizeof(int), allowed = smem + (GROUPS_MAX - g.J) * sizeof(int);
    static_assert(RING * STAGE_BYTES + (GROUPS_MAX + 1) * sizeof(int) <= 227 * 1024, "a block of Hopper has 227 KiB");
    const int64_t most = group_tiles_most(FORM, g, TILE_M, TILE_N);
    const CUtensorMap a = FORM == GROUP_TN ? map_of(g.a, g.M, g.out_rows, STEP) : map_of(g.a, g.M, g.inner, TILE_M);
    // a model of the weights' maps, at an address that is replaced
    const CUtensorMap b = FORM == GROUP_TN   ? map_of(g.b, g.M, g.cols, STEP)
                          : FORM == GROUP_NT ? map_of(g.a, g.cols, g.inner, TILE_N)
                                             : map_of(g.a, g.inner, g.cols, STEP);
    CUtensorMap *w = nullptr;
    if (FORM != GROUP_TN) {
        w = (CUtensorMap *)dev_work(d, g.J * sizeof(CUtensorMap));
        LAUNCH(group_maps_kernel, (unsigned)g.J, WARP, sizeof(CUtensorMap), d->stream, w, b, g.w);
    }
    CUDA_CHECK(cudaFuncSetAttribute(group_sm90_kernel<FORM>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)allowed));
    LAUNCH(group_sm90_kernel<FORM>, (unsigned)(most < d->sms ? most : d->sms), BLOCK, smem, d->stream, g, a, b, w);
}

bool group_sm90(Dev *d, GroupForm form, const GroupArgs &g) {
    const int last = form == GROUP_TN ? g.out_rows : g.inner;
    if (!d->hopper || !last || last % 8 || g.cols % 8 || !aligned(g.a, g.b, g.y)) return false;
    if (form == GROUP_NT) launch<GROUP_NT>(d, g);
    else if (form == GROUP_NN) launch<GROUP_NN>(d, g);
    else launch<GROUP_TN>(d, g);
    return true;
}
#else
bool group_sm90(Dev *, GroupForm, const GroupArgs &) { return false; }
#endif
