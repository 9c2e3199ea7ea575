// What crosses nodes, by NCCL: groups of which every rank has a GPU of its own.
//
// NCCL's calls want counts on the host, the plan's are on the device, and the host is not to wait. So a message has the size of the
// room for it: rows go as whole blocks of `room`, blocks of experts as many as can go between two ranks; how many of them are
// real goes along. That sends more than is needed (which comm_bytes_sent does not count). Puts from a kernel (symmetric.cu) send
// only what is real, where NCCL has them.
#include "kernels/cuda/comm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef USE_NCCL
#include "kernels/cuda/nccl.h"
#include <dlfcn.h>

// ---- the library -----------------------------------------------------------------------------------------------------------
static Nccl load() {
    Nccl n = {};
#ifdef __CUDACC__
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    const char *error = library ? "" : dlerror();
#define FIND(name) (decltype(n.name))dlsym(library, "nccl" #name)
#else
    const bool library = emu_nccl_there();
    const char *error = "the emulation pretends so";
#define FIND(name) nccl##name
#endif
    if (!library) {
        snprintf(n.why, sizeof n.why, "NCCL is not here: %s (hint: install libnccl2, or put its folder into LD_LIBRARY_PATH)", error);
        return n;
    }
    const char *missing = nullptr;
#define X(name) \
    n.name = FIND(name); \
    if (!n.name && !missing) missing = #name;
    NCCL_CALLS(X)
    const char *first = missing;
    NCCL_DEVICE_CALLS(X)
#undef X
#if NCCL_VERSION_CODE >= 22800
    n.TeamLsa = FIND(TeamLsa);
#endif
    missing = first; // without the others it can be used as well
    if (n.GetVersion) n.GetVersion(&n.version);
    if (missing)
        snprintf(n.why, sizeof n.why, "libnccl.so.2 (version %d) has no nccl%s, this program was built for version %d (hint: a newer NCCL)",
                 n.version, missing, NCCL_VERSION_CODE);
    return n;
}
const Nccl &nccl_calls() {
    static const Nccl found = load();
    return found;
}

// The first rank that cannot use NCCL, or another version than rank 0 does, says why: the same on all ranks.
static bool all_have_nccl(CommDev *v, char *why, size_t room) {
    struct Found {
        int version;
        char why[sizeof Nccl{}.why];
    } own = {nccl_calls().version, {}}, *all = (Found *)host_alloc(SIZE(v->i->size, sizeof *all));
    memcpy(own.why, nccl_calls().why, sizeof own.why);
    comm_allgather(v->c, all, &own, sizeof own);
    int bad = -1;
    for (int r = v->i->size - 1; r >= 0; r--)
        if (all[r].why[0] || all[r].version != all[0].version) bad = r;
    if (bad >= 0 && all[bad].why[0]) snprintf(why, room, "rank %d: %s", bad, all[bad].why);
    else if (bad >= 0)
        snprintf(why, room, "rank 0 has NCCL %d, rank %d has %d (hint: the same version everywhere)", all[0].version, bad,
                 all[bad].version);
    free(all);
    return bad < 0;
}

// All ranks of the group; NULL, with the reason, where NCCL is missing or cannot begin. A rank that fails later ends the run: the
// others are inside NCCL then, and can be told nothing.
static ncclComm_t group_open(CommDev *v, char *why, size_t room) {
    if (!all_have_nccl(v, why, room)) return nullptr;
    struct {
        ncclUniqueId id;
        char why[200];
    } begin = {};
    if (v->i->rank == 0) {
        ncclResult_t code = nccl_calls().GetUniqueId(&begin.id);
        if (code != ncclSuccess)
            snprintf(begin.why, sizeof begin.why, "NCCL cannot begin: %s %s", nccl_calls().GetErrorString(code),
                     nccl_calls().GetLastError(nullptr));
    }
    comm_bcast(v->c, &begin, sizeof begin, 0);
    snprintf(why, room, "%s", begin.why);
    if (begin.why[0]) return nullptr;
    ncclComm_t all;
    NCCL_CHECK(CommInitRank(&all, v->i->size, begin.id, v->i->rank));
    return all;
}

constexpr size_t HEAD = 256; // bytes in front of a message of blocks: an int, how many are there

static void *take(Dev *d, size_t bytes, const char *what) {
    void *p = nullptr;
    ledger_add(&d->memory, bytes);
    cudaError_t e = cudaMalloc(&p, bytes);
    CHECK_DEVICE(e == cudaSuccess, "no memory for %s: %zu bytes: %s (hint: a smaller --micro-batch, or --slots)", what, bytes,
                 cudaGetErrorString(e));
    return p;
}

Wire *wire_open(CommDev *v, char *why, size_t room) {
    const CommInfo *i = v->i;
    ncclComm_t all = group_open(v, why, room);
    if (!all) return nullptr;
    Wire *w = (Wire *)host_alloc(sizeof *w);
    w->all = all;
    if (i->N == 1) return w;
    NCCL_CHECK(CommSplit(w->all, i->rank % i->G, i->rank, &w->column, nullptr));
    NCCL_CHECK(CommSplit(w->all, i->rank % i->G, i->rank, &w->blocks, nullptr));
    size_t part = (PIECE / (size_t)i->G + 1) * sizeof(wide), small = SIZE(i->size, 1024);
    w->scratch_bytes = part > small ? part : small;
    w->scratch = (char *)take(v->d, w->scratch_bytes, "what is gathered over nodes");
    w->heads = (int *)take(v->d, SIZE(2, i->N, sizeof(int)), "counts of rows");
    w->heads_in = w->heads + i->N;
    return w;
}

void wire_close(Wire *w) {
    if (w->blocks) NCCL_CHECK(CommDestroy(w->blocks));
    if (w->column) NCCL_CHECK(CommDestroy(w->column));
    NCCL_CHECK(CommDestroy(w->all));
    CUDA_CHECK(cudaFree(w->scratch));
    CUDA_CHECK(cudaFree(w->heads));
    free(w);
}

void wire_allgather(CommDev *v, void *out, const void *in, size_t bytes) {
    if (bytes) NCCL_CHECK(AllGather(in, out, bytes, ncclChar, v->wire->all, v->d->stream));
}

void *wire_scratch(CommDev *v, size_t *bytes) {
    if (bytes) *bytes = v->wire->scratch_bytes;
    return v->wire->scratch;
}

// ---- sums ----------------------------------------------------------------------------------------------------------------
void wire_before(CommDev *v, wide *sums, size_t n) {
    NCCL_CHECK(Recv(sums, n * sizeof(wide), ncclChar, v->i->node - 1, v->wire->column, v->d->stream));
}
void wire_after(CommDev *v, const wide *sums, size_t n) {
    NCCL_CHECK(Send(sums, n * sizeof(wide), ncclChar, v->i->node + 1, v->wire->column, v->d->stream));
}
void wire_results(CommDev *v, wide *sums, size_t step) {
    const int last = v->i->N - 1, node = v->i->node;
    NCCL_CHECK(GroupStart());
    for (int n = 0; n < last; n++) {
        wide *at = sums + step * (size_t)n;
        if (node == last) NCCL_CHECK(Send(at, step * sizeof(wide), ncclChar, n, v->wire->column, v->d->stream));
        else if (node == n) NCCL_CHECK(Recv(at, step * sizeof(wide), ncclChar, last, v->wire->column, v->d->stream));
    }
    NCCL_CHECK(GroupEnd());
}
void wire_share(CommDev *v, char *x, size_t n, size_t elem_bytes) {
    NCCL_CHECK(GroupStart());
    for (int r = 0; r < v->i->size; r++) {
        CommPart p = comm_part(v->c, r, n);
        char *at = x + p.at * elem_bytes;
        if (p.n) NCCL_CHECK(Broadcast(at, at, p.n * elem_bytes, ncclChar, r, v->wire->all, v->d->stream));
    }
    NCCL_CHECK(GroupEnd());
}

// ---- rows ----------------------------------------------------------------------------------------------------------------
static __global__ void rows_heads_kernel(int *heads, unsigned long long *sent, const int *n_send, int N, int node, int room,
                                         size_t bytes) {
    for (int n = 0; n < N; n++) {
        heads[n] = n == node ? 0 : n_send[n];
        if (heads[n] < 0 || heads[n] > room) {
            printf("%d rows to node %d, expected 0 to %d\n", heads[n], n, room);
            __trap();
        }
        *sent += heads[n] * (unsigned long long)bytes;
    }
}
static __global__ void rows_came_kernel(const Control *own, int *n_recv, const int *heads, int N, int node, int known) {
    const bool alone = given_up(own);
    for (int n = 0; n < N; n++) {
        int rows = n == node ? 0 : heads[n];
        if (known && n != node && n_recv[n] != rows && !alone) {
            printf("%d rows expected from node %d, which sent %d: the ranks disagree on what they exchange\n", n_recv[n], n,
                   rows);
            __trap();
        }
        if (!known || (n != node && !alone)) n_recv[n] = rows;
    }
}

// Whole blocks, and how many rows of them are real
static void rows_exchange(CommDev *v, const Rows *arrays, int n_arrays, int room) {
    Wire *w = v->wire;
    const CommInfo *i = v->i;
    cudaStream_t s = v->d->stream;
    NCCL_CHECK(GroupStart());
    for (int n = 0; n < i->N; n++) {
        if (n == i->node) continue;
        NCCL_CHECK(Send(w->heads + n, sizeof(int), ncclChar, n, w->column, s));
        NCCL_CHECK(Recv(w->heads_in + n, sizeof(int), ncclChar, n, w->column, s));
        for (int a = 0; a < n_arrays; a++) {
            size_t block = arrays[a].row_bytes * (size_t)room;
            NCCL_CHECK(Send((const char *)arrays[a].from + n * block, block, ncclChar, n, w->column, s));
            NCCL_CHECK(Recv((char *)arrays[a].to + n * block, block, ncclChar, n, w->column, s));
        }
    }
    NCCL_CHECK(GroupEnd());
}

void wire_rows(CommDev *v, const Rows *arrays, int n_arrays, int *n_recv, const int *n_send, int known, int room) {
    Wire *w = v->wire;
    const CommInfo *i = v->i;
    cudaStream_t s = v->d->stream;
    CHECK_COMM(n_arrays <= MAX_ARRAYS, "%d arrays of rows at once, %d are possible", n_arrays, MAX_ARRAYS);
    size_t row_bytes = 0;
    for (int a = 0; a < n_arrays; a++) row_bytes += arrays[a].row_bytes;
    LAUNCH(rows_heads_kernel, 1, 1, 0, s, w->heads, &v->own->bytes_sent, n_send, i->N, i->node, room, row_bytes);
    if (symmetric_puts(v)) {
        Parcel p[MAX_ARRAYS];
        for (int a = 0; a < n_arrays; a++) p[a] = {arrays[a].to, arrays[a].from, arrays[a].row_bytes, arrays[a].row_bytes * (size_t)room};
        symmetric_put(v, s, 0, p, n_arrays, room, w->heads, w->heads_in, 1);
    } else {
        rows_exchange(v, arrays, n_arrays, room);
    }
    LAUNCH(rows_came_kernel, 1, 1, 0, s, v->own, n_recv, w->heads_in, i->N, i->node, known);
}

// ---- blocks --------------------------------------------------------------------------------------------------------------
void wire_blocks_room(CommDev *v, int most, size_t bytes) {
    Wire *w = v->wire;
    CHECK_COMM(!w->out, "room for blocks is asked for twice");
    w->most = most;
    w->bytes = bytes;
    w->message = HEAD + (SIZE(most, (int64_t)bytes) + HEAD - 1) / HEAD * HEAD;
    size_t all = SIZE(v->i->N, (int64_t)w->message);
    if (v->d->memory.counting) return ledger_add(&v->d->memory, 2 * window_takes(v, all));
    w->out = (char *)window_make(v, all, "copies of experts on their way out")->own;
    w->in = (char *)window_make(v, all, "copies of experts on their way in")->own;
}

struct Packing {
    char *messages;
    size_t message, block_bytes, at, bytes;
    int most, N, node;
};

// Block (b, n): its share of node n's message; list[k], the k-th of that node, is block k of it. pack: into the message, else out of it.
static __global__ void blocks_move_kernel(Packing p, void *const *table, const BlockSeg *list, const int *count,
                                          Control *own, int pack) {
    int n = blockIdx.y, k = 0;
    if (n == p.node || (!pack && given_up(own))) return;
    char *message = p.messages + n * p.message;
    for (int j = 0; j < *count; j++) {
        if (list[j].node != n) continue;
        if (k < p.most) {
            char *there = (char *)table[list[j].rank] + list[j].block * p.block_bytes + p.at,
                *here = message + HEAD + k * p.bytes;
            copy_bytes(pack ? here : there, pack ? there : here, p.bytes, blockIdx.x * (size_t)blockDim.x + threadIdx.x,
                       gridDim.x * (size_t)blockDim.x);
        }
        k++;
    }
    if (blockIdx.x || threadIdx.x) return;
    int expected = pack ? k : *(int *)message;
    if (k > p.most || k != expected) {
        printf("%d blocks %s node %d, of %d at most; the other side counts %d\n", k, pack ? "to" : "from", n, p.most, expected);
        __trap();
    }
    if (!pack) return;
    *(int *)message = k;
    atomicAdd(&own->bytes_sent, k * (unsigned long long)p.bytes);
}

void wire_blocks(CommDev *v, void *const *to, const BlockSeg *recv, const int *n_recv, const void *const *from,
                 const BlockSeg *send,
                 const int *n_send, size_t block_bytes, size_t at, size_t bytes) {
    Wire *w = v->wire;
    const CommInfo *i = v->i;
    CHECK_COMM(w->out && bytes <= w->bytes, "blocks of %zu bytes, room was asked for %zu (comm_blocks_room)", bytes, w->bytes);
    dim3 grid(16, (unsigned)i->N);
    size_t message = HEAD + SIZE(w->most, (int64_t)bytes);
    Packing p = {w->out, w->message, block_bytes, at, bytes, w->most, i->N, i->node};
    LAUNCH(blocks_move_kernel, grid, THREADS, 0, v->side, p, (void *const *)from, send, n_send, v->own, 1);
    if (symmetric_puts(v)) {
        const Parcel parts = {w->in + HEAD, w->out + HEAD, bytes, w->message};
        symmetric_put(v, v->side, 1, &parts, 1, w->most, (int *)w->out, (int *)w->in, (int)(w->message / sizeof(int)));
    } else {
        NCCL_CHECK(GroupStart());
        for (int n = 0; n < i->N; n++) {
            if (n == i->node) continue;
            NCCL_CHECK(Send(w->out + n * w->message, message, ncclChar, n, w->blocks, v->side));
            NCCL_CHECK(Recv(w->in + n * w->message, message, ncclChar, n, w->blocks, v->side));
        }
        NCCL_CHECK(GroupEnd());
    }
    p.messages = w->in;
    LAUNCH(blocks_move_kernel, grid, THREADS, 0, v->side, p, to, recv, n_recv, v->own, 0);
}
#else
Wire *wire_open(CommDev *, char *why, size_t room) {
    snprintf(why, room, "this program was built without NCCL (hint: install libnccl-dev and build again)");
    return nullptr;
}
void wire_close(Wire *) {}
void wire_allgather(CommDev *, void *, const void *, size_t) {}
void *wire_scratch(CommDev *, size_t *) { return nullptr; }
void wire_before(CommDev *, wide *, size_t) {}
void wire_after(CommDev *, const wide *, size_t) {}
void wire_results(CommDev *, wide *, size_t) {}
void wire_share(CommDev *, char *, size_t, size_t) {}
void wire_rows(CommDev *, const Rows *, int, int *, const int *, int, int) {}
void wire_blocks_room(CommDev *, int, size_t) {}
void wire_blocks(CommDev *, void *const *, const BlockSeg *, const int *, const void *const *, const BlockSeg *, const int *,
                 size_t, size_t,
                 size_t) {}
#endif
