// What crosses nodes, by NCCL: groups of which every rank has a GPU of its own.
//
// NCCL wants counts on the host, the plan's are on the device, and the host is not to wait. So a message has the size of the
// room for it: rows go as whole blocks of `room`, blocks of experts as many as can go between two ranks; how many of them are
// real goes along. That sends more than is needed (which comm_bytes_sent does not count); puts from a kernel would not.
#include "kernels/cuda/comm.h"
#include <stdio.h>
#include <stdlib.h>
#ifdef USE_NCCL
#include <nccl.h>

#define NCCL_CHECK(call)                                                                                   \
    do {                                                                                                   \
        ncclResult_t nccl_code_ = (call);                                                                  \
        CHECK_COMM(nccl_code_ == ncclSuccess, "%s: NCCL reports: %s %s", #call, ncclGetErrorString(nccl_code_), \
                   ncclGetLastError(nullptr));                                                             \
    } while (0)

struct Wire {
    ncclComm_t all, column, blocks; // the group; this place's ranks in every node, by node; the same, for the side stream
    char *scratch;                  // of one call at a time
    size_t scratch_bytes;
    int *heads, *heads_in;          // (N) rows to and from each node
    int most;                       // blocks between two ranks,
    size_t bytes, message;          // of so many bytes; a message: HEAD, then `most` blocks
    char *out, *in;                 // (N) messages
};
constexpr size_t HEAD = 256; // bytes in front of a message of blocks: an int, how many are there

static void *take(size_t bytes, const char *what) {
    void *p = nullptr;
    cudaError_t e = cudaMalloc(&p, bytes);
    CHECK_DEVICE(e == cudaSuccess, "no memory for %s: %zu bytes: %s (hint: a smaller --micro-batch, or --slots)", what, bytes,
                 cudaGetErrorString(e));
    return p;
}

Wire *wire_open(CommDev *v) {
    Wire *w = (Wire *)host_alloc(sizeof *w);
    const CommInfo *i = v->i;
    ncclUniqueId id = {};
    if (i->rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    comm_bcast(v->c, &id, sizeof id, 0);
    NCCL_CHECK(ncclCommInitRank(&w->all, i->size, id, i->rank));
    NCCL_CHECK(ncclCommSplit(w->all, i->rank % i->G, i->rank, &w->column, nullptr));
    NCCL_CHECK(ncclCommSplit(w->all, i->rank % i->G, i->rank, &w->blocks, nullptr));
    size_t part = (PIECE / (size_t)i->G + 1) * sizeof(wide), small = SIZE(i->size, 1024);
    w->scratch_bytes = part > small ? part : small;
    w->scratch = (char *)take(w->scratch_bytes, "what is gathered over nodes");
    w->heads = (int *)take(SIZE(2, i->N, sizeof(int)), "counts of rows");
    w->heads_in = w->heads + i->N;
    return w;
}

void wire_close(Wire *w) {
    NCCL_CHECK(ncclCommDestroy(w->blocks));
    NCCL_CHECK(ncclCommDestroy(w->column));
    NCCL_CHECK(ncclCommDestroy(w->all));
    CUDA_CHECK(cudaFree(w->scratch));
    CUDA_CHECK(cudaFree(w->heads));
    CUDA_CHECK(cudaFree(w->out));
    CUDA_CHECK(cudaFree(w->in));
    free(w);
}

void wire_allgather(CommDev *v, void *out, const void *in, size_t bytes) {
    if (bytes) NCCL_CHECK(ncclAllGather(in, out, bytes, ncclChar, v->wire->all, v->d->stream));
}

void *wire_scratch(CommDev *v, size_t *bytes) {
    if (bytes) *bytes = v->wire->scratch_bytes;
    return v->wire->scratch;
}

// ---- sums ----------------------------------------------------------------------------------------------------------------
void wire_before(CommDev *v, wide *sum, size_t n) {
    if (n) NCCL_CHECK(ncclRecv(sum, n * sizeof(wide), ncclChar, v->i->node - 1, v->wire->column, v->d->stream));
}
void wire_after(CommDev *v, const wide *sum, size_t n) {
    if (n) NCCL_CHECK(ncclSend(sum, n * sizeof(wide), ncclChar, v->i->node + 1, v->wire->column, v->d->stream));
}
void wire_result(CommDev *v, wide *sum, size_t n) {
    if (n) NCCL_CHECK(ncclBroadcast(sum, sum, n * sizeof(wide), ncclChar, v->i->N - 1, v->wire->column, v->d->stream));
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
static __global__ void rows_came_kernel(int *n_recv, const int *heads, int N, int node, int known) {
    for (int n = 0; n < N; n++) {
        int rows = n == node ? 0 : heads[n];
        if (known && n != node && n_recv[n] != rows) {
            printf("%d rows expected from node %d, which sent %d: the ranks disagree on what they exchange\n", n_recv[n], n,
                   rows);
            __trap();
        }
        if (!known || n != node) n_recv[n] = rows;
    }
}

void wire_rows(CommDev *v, const Rows *arrays, int n_arrays, int *n_recv, const int *n_send, int known, int room) {
    Wire *w = v->wire;
    const CommInfo *i = v->i;
    cudaStream_t s = v->d->stream;
    size_t row_bytes = 0;
    for (int a = 0; a < n_arrays; a++) row_bytes += arrays[a].row_bytes;
    LAUNCH(rows_heads_kernel, 1, 1, 0, s, w->heads, &v->own->bytes_sent, n_send, i->N, i->node, room, row_bytes);
    NCCL_CHECK(ncclGroupStart());
    for (int n = 0; n < i->N; n++) {
        if (n == i->node) continue;
        NCCL_CHECK(ncclSend(w->heads + n, sizeof(int), ncclChar, n, w->column, s));
        NCCL_CHECK(ncclRecv(w->heads_in + n, sizeof(int), ncclChar, n, w->column, s));
        for (int a = 0; a < n_arrays; a++) {
            size_t block = arrays[a].row_bytes * (size_t)room;
            NCCL_CHECK(ncclSend((const char *)arrays[a].from + n * block, block, ncclChar, n, w->column, s));
            NCCL_CHECK(ncclRecv((char *)arrays[a].to + n * block, block, ncclChar, n, w->column, s));
        }
    }
    NCCL_CHECK(ncclGroupEnd());
    LAUNCH(rows_came_kernel, 1, 1, 0, s, n_recv, w->heads_in, i->N, i->node, known);
}

// ---- blocks --------------------------------------------------------------------------------------------------------------
void wire_blocks_room(CommDev *v, int most, size_t bytes) {
    Wire *w = v->wire;
    CHECK_COMM(!w->out, "room for blocks is asked for twice");
    w->most = most;
    w->bytes = bytes;
    w->message = HEAD + (SIZE(most, (int64_t)bytes) + HEAD - 1) / HEAD * HEAD;
    w->out = (char *)take(SIZE(v->i->N, (int64_t)w->message), "copies of experts on their way out");
    w->in = (char *)take(SIZE(v->i->N, (int64_t)w->message), "copies of experts on their way in");
}

struct Packing {
    char *messages;
    size_t message, block_bytes, at, bytes;
    int most, N, node;
};

// Block (b, n): its share of node n's message; list[k], the k-th of that node, is block k of it. pack: into the message, else out of it.
static __global__ void blocks_move_kernel(Packing p, void *const *table, const BlockSeg *list, const int *count,
                                          unsigned long long *sent, int pack) {
    int n = blockIdx.y, k = 0;
    if (n == p.node) return;
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
    atomicAdd(sent, k * (unsigned long long)p.bytes);
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
    LAUNCH(blocks_move_kernel, grid, THREADS, 0, v->side, p, (void *const *)from, send, n_send, &v->own->bytes_sent, 1);
    NCCL_CHECK(ncclGroupStart());
    for (int n = 0; n < i->N; n++) {
        if (n == i->node) continue;
        NCCL_CHECK(ncclSend(w->out + n * w->message, message, ncclChar, n, w->blocks, v->side));
        NCCL_CHECK(ncclRecv(w->in + n * w->message, message, ncclChar, n, w->blocks, v->side));
    }
    NCCL_CHECK(ncclGroupEnd());
    p.messages = w->in;
    LAUNCH(blocks_move_kernel, grid, THREADS, 0, v->side, p, to, recv, n_recv, &v->own->bytes_sent, 0);
}
#else
Wire *wire_open(CommDev *v) {
    CHECK_USAGE(0, "%d nodes, and this program was built without NCCL (hint: install it with the CUDA toolkit, libnccl-dev, and build again; "
                "or one node)", v->i->N);
}
void wire_close(Wire *) {}
void wire_allgather(CommDev *, void *, const void *, size_t) {}
void *wire_scratch(CommDev *, size_t *) { return nullptr; }
void wire_before(CommDev *, wide *, size_t) {}
void wire_after(CommDev *, const wide *, size_t) {}
void wire_result(CommDev *, wide *, size_t) {}
void wire_rows(CommDev *, const Rows *, int, int *, const int *, int, int) {}
void wire_blocks_room(CommDev *, int, size_t) {}
void wire_blocks(CommDev *, void *const *, const BlockSeg *, const int *, const void *const *, const BlockSeg *, const int *,
                 size_t, size_t,
                 size_t) {}
#endif
