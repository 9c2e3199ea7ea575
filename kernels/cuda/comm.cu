// Collectives and windows of the device, among ranks that reach each other's memory: threads of one process (virtual ranks, on
// one GPU or several; pointers are plain) and processes of one node (NCCL's symmetric windows, or CUDA IPC). What crosses nodes whose
// ranks have a GPU each: nccl.cu and symmetric.cu.
//
// Ranks meet on the device: a kernel of one block writes a number into every peer's control window and waits for theirs. So
// nothing here waits on the host, and all of it can be recorded in a graph and replayed: the numbers count in device memory.
// A waiting kernel keeps one block's place and one queue of the GPU while its peers' kernels must run: so there are as many queues
// as there can be, and at most MAX_SHARED ranks, of two streams each, share a GPU.
#include "kernels/cuda/comm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Read by the driver when it starts; while a thread could read the environment it may not be written.
__attribute__((constructor)) static void queues(void) { setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); }

// ---- meetings ----------------------------------------------------------------------------------------------------------
struct Who { // ranks first + j step, j < n
    int me, first, step, n;
};

// Until the peer has come to this meeting. Not longer than patience lasts, and once it has ended not at all: what is still to run
// then is run with what is there, until the host looks (dev_wait).
static __device__ void wait_for(const Control *own, int me, int peer, const unsigned *flag, unsigned epoch) {
    const uint64_t begin = clock_ns();
    while ((int)(flag_acquire(flag) - epoch) < 0) {
        if (given_up(own)) return;
        if (clock_ns() - begin > own->patience.ns) return give_up(own, me, peer);
        __nanosleep(200);
    }
}

// The whole block: what it, and the kernels before it, wrote anywhere is seen by what comes after the peers' meeting.
static __device__ void meet(Control *const *all, Who w, Meeting kind) {
    SHARED(unsigned, epoch, );
    Control *own = all[w.me];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) epoch = own->epoch[kind] + 1;
    __syncthreads();
    for (int j = threadIdx.x; j < w.n; j += blockDim.x) flag_release(&all[w.first + j * w.step]->flag[kind][w.me], epoch);
    for (int j = threadIdx.x; j < w.n; j += blockDim.x) {
        const int peer = w.first + j * w.step;
        wait_for(own, w.me, peer, &own->flag[kind][peer], epoch);
    }
    __syncthreads();
    if (threadIdx.x == 0) own->epoch[kind] = epoch;
}

static __global__ void meet_kernel(Control *const *all, Who w, Meeting kind) { meet(all, w, kind); }

static Who node_of(const CommInfo *i) { return {i->rank, i->node * i->G, 1, i->G}; }
static Who all_of(const CommInfo *i) { return {i->rank, 0, 1, i->size}; }
static Who column_of(const CommInfo *i) { return {i->rank, i->rank % i->G, i->G, i->N}; }

static void meet_on(CommDev *v, cudaStream_t s, Who w, Meeting kind) {
    if (w.n > 1) LAUNCH(meet_kernel, 1, 64, 0, s, v->control, w, kind);
}

static CommDev *of(Comm *c) {
    CommDev *v = comm_dev(c);
    CHECK_COMM(v, "a collective of the device before the group has one (comm_bind)");
    return v;
}

void comm_node_barrier(Comm *c) {
    CommDev *v = of(c);
    meet_on(v, v->d->stream, node_of(v->i), NODE);
}

void comm_dev_barrier(Comm *c) {
    CommDev *v = of(c);
    if (v->wire) return wire_allgather(v, wire_scratch(v, nullptr), v->own, 1); // no rank has all before all have come
    meet_on(v, v->d->stream, all_of(v->i), ALL);
}

// ---- small collectives: one launch -------------------------------------------------------------------------------------
// One meeting per call is enough: a slot is used again two meetings of all later, when everyone has read it.
static __device__ size_t slot_of(Control *const *all, Who w) { return all[w.me]->epoch[ALL] & 1; }

static __global__ void gather_kernel(Control *const *all, Who w, char *out, size_t out_step, const char *in, size_t bytes) {
    size_t slot = slot_of(all, w);
    copy_bytes(all[w.me]->slot[slot], in, bytes, threadIdx.x, blockDim.x);
    meet(all, w, ALL);
    const bool alone = given_up(all[w.me]); // as if the others had nothing: numbers that this rank's plans can be made of
    for (int r = 0; r < w.n; r++) {
        if (!alone || r == w.me) copy_bytes(out + r * out_step, all[r]->slot[slot], bytes, threadIdx.x, blockDim.x);
        else for (size_t j = threadIdx.x; j < bytes; j += blockDim.x) out[r * out_step + j] = 0;
    }
}

template <class T> static __global__ void sum_small_kernel(Control *const *all, Who w, T *x, int n) {
    size_t slot = slot_of(all, w);
    for (int j = threadIdx.x; j < n; j += blockDim.x) ((T *)all[w.me]->slot[slot])[j] = x[j];
    meet(all, w, ALL);
    for (int j = threadIdx.x; j < n; j += blockDim.x) {
        T sum = ((const T *)all[0]->slot[slot])[j];
        for (int r = 1; r < w.n; r++) sum += ((const T *)all[r]->slot[slot])[j];
        x[j] = sum;
    }
}

void comm_dev_allgather(Comm *c, void *out, const void *in, size_t bytes) {
    CommDev *v = of(c);
    if (v->i->size == 1 && bytes) CUDA_CHECK(cudaMemcpyAsync(out, in, bytes, cudaMemcpyDeviceToDevice, v->d->stream));
    if (v->i->size == 1) return;
    if (v->wire) return wire_allgather(v, out, in, bytes);
    for (size_t at = 0; at < bytes; at += GATHER)
        LAUNCH(gather_kernel, 1, THREADS, 0, v->d->stream, v->control, all_of(v->i), (char *)out + at, bytes,
               (const char *)in + at,
               bytes - at < GATHER ? bytes - at : GATHER);
}

template <class T> static __global__ void sum_gathered_kernel(T *x, const T *all, int ranks, int n) {
    for (int j = threadIdx.x; j < n; j += blockDim.x) {
        T sum = all[j];
        for (int r = 1; r < ranks; r++) sum += all[(size_t)r * n + j];
        x[j] = sum;
    }
}

template <class T> static void sum_small(Comm *c, T *x, int n) {
    CommDev *v = of(c);
    size_t room = GATHER;
    T *gathered = v->wire ? (T *)wire_scratch(v, &room) : nullptr;
    const int most = (int)(room / sizeof(T) / (v->wire ? v->i->size : 1));
    for (int at = 0; at < n && v->i->size > 1; at += most) {
        int m = n - at < most ? n - at : most;
        if (v->wire) {
            wire_allgather(v, gathered, x + at, m * sizeof(T));
            LAUNCH(sum_gathered_kernel<T>, 1, THREADS, 0, v->d->stream, x + at, gathered, v->i->size, m);
        } else {
            LAUNCH(sum_small_kernel<T>, 1, THREADS, 0, v->d->stream, v->control, all_of(v->i), x + at, m);
        }
    }
}
void comm_dev_sum_double(Comm *c, double *x, int n) { sum_small(c, x, n); }
void comm_dev_sum_int64(Comm *c, int64_t *x, int n) { sum_small(c, x, n); }

// ---- sums, in rank order -----------------------------------------------------------------------------------------------
// A sum goes piece by piece, a piece being the next `step` elements of every rank's part. All stage it, each rank adds up its own
// step. With a wire that is done in each node, for the steps of all ranks of one's place, which lie side by side in the stage; the
// sums go from node to node, so that the order stays that of the ranks, and back to whose part it is.
struct Cut {
    size_t n, part, step;
    int G, N;
};

// Elements of x in rank r's step of the piece that begins `at` elements into the parts
static __host__ __device__ void step_of(size_t *lo, size_t *len, Cut c, int r, size_t at) {
    size_t end = c.part * (size_t)(r + 1) < c.n ? c.part * (size_t)(r + 1) : c.n;
    *lo = c.part * (size_t)r + at < end ? c.part * (size_t)r + at : end;
    *len = end - *lo < c.step ? end - *lo : c.step;
}

static __global__ void sum_stage_kernel(wide *stage, const wide *x, Cut c, size_t at) {
    int r = blockIdx.y;
    size_t lo, len, to = (size_t)(r % c.G * c.N + r / c.G) * c.step;
    step_of(&lo, &len, c, r, at);
    for (size_t j = blockIdx.x * (size_t)blockDim.x + threadIdx.x; j < len; j += gridDim.x * (size_t)blockDim.x)
        stage[to + j] = x[lo + j];
}

// before may be sum
static __global__ void sum_part_kernel(wide *sum, const wide *before, const wide *const *stage, int ranks, size_t from, size_t n) {
    for (size_t j = blockIdx.x * (size_t)blockDim.x + threadIdx.x; j < n; j += gridDim.x * (size_t)blockDim.x) {
        wide s = before ? before[j] + stage[0][from + j] : stage[0][from + j];
        for (int r = 1; r < ranks; r++) s += stage[r][from + j];
        sum[j] = s;
    }
}

// `sums`: of all nodes, for the steps of this place's ranks; what lies in them past a part's end nobody takes.
static void sum_over_nodes(CommDev *v, wide *own, size_t len, Cut c) {
    const CommInfo *i = v->i;
    cudaStream_t s = v->d->stream;
    wide *sums = (wide *)wire_scratch(v, nullptr);
    size_t n = c.step * (size_t)c.N, from = n * (size_t)(i->rank % i->G), mine = c.step * (size_t)i->node;
    if (i->node > 0) wire_before(v, sums, n);
    LAUNCH(sum_part_kernel, grid_for(v->d, n, 4 * THREADS), THREADS, 0, s, sums, i->node > 0 ? sums : nullptr,
           v->stage + i->node * i->G, i->G, from, n);
    if (i->node < i->N - 1) wire_after(v, sums, n);
    wire_results(v, sums, c.step);
    if (len) CUDA_CHECK(cudaMemcpyAsync(own, sums + mine, len * sizeof(wide), cudaMemcpyDeviceToDevice, s));
}

void comm_sum_part(Comm *c, wide *x, size_t n) {
    CommDev *v = of(c);
    const CommInfo *i = v->i;
    Who who = v->wire ? node_of(i) : all_of(i);
    Meeting kind = v->wire ? NODE : ALL;
    cudaStream_t s = v->d->stream;
    Cut cut = {n, comm_part(c, 0, n).n, PIECE / (size_t)i->size / PART_UNIT * PART_UNIT, who.n, i->size / who.n};
    if (cut.part < cut.step) cut.step = cut.part;
    for (size_t at = 0; at < cut.part && i->size > 1; at += cut.step) {
        size_t lo, len;
        step_of(&lo, &len, cut, i->rank, at);
        unsigned blocks = grid_for(v->d, cut.step, 4 * THREADS);
        LAUNCH(sum_stage_kernel, dim3(blocks, (unsigned)i->size), THREADS, 0, s, v->own_stage, x, cut, at);
        meet_on(v, s, who, kind);
        if (v->wire) sum_over_nodes(v, x + lo, len, cut);
        else LAUNCH(sum_part_kernel, len ? blocks : 0, THREADS, 0, s, x + lo, (const wide *)nullptr, v->stage, who.n,
                    i->rank * cut.step, len);
        meet_on(v, s, who, kind);
    }
}

static __global__ void share_kernel(char *x, const char *const *stage, Cut c, int me, size_t at, size_t elem_bytes) {
    int r = blockIdx.y;
    size_t lo, len;
    step_of(&lo, &len, c, r, at);
    if (r != me)
        copy_bytes(x + lo * elem_bytes, stage[r], len * elem_bytes, blockIdx.x * (size_t)blockDim.x + threadIdx.x,
                   gridDim.x * (size_t)blockDim.x);
}

void comm_share_parts(Comm *c, void *x, size_t n, size_t elem_bytes) {
    CommDev *v = of(c);
    const CommInfo *i = v->i;
    cudaStream_t s = v->d->stream;
    if (v->wire) return wire_share(v, (char *)x, n, elem_bytes);
    Cut cut = {n, comm_part(c, 0, n).n, PIECE * sizeof(wide) / elem_bytes / PART_UNIT * PART_UNIT, i->size, 1};
    for (size_t at = 0; at < cut.part && i->size > 1; at += cut.step) {
        size_t lo, len;
        step_of(&lo, &len, cut, i->rank, at);
        const char *own = (char *)x + lo * elem_bytes;
        if (len) CUDA_CHECK(cudaMemcpyAsync(v->own_stage, own, len * elem_bytes, cudaMemcpyDeviceToDevice, s));
        meet_on(v, s, all_of(i), ALL);
        size_t most = cut.part < cut.step ? cut.part : cut.step;
        dim3 grid(grid_for(v->d, most * elem_bytes, 64 * THREADS), (unsigned)i->size);
        LAUNCH(share_kernel, grid, THREADS, 0, s, (char *)x, (const char *const *)v->stage, cut, i->rank, at, elem_bytes);
        meet_on(v, s, all_of(i), ALL);
    }
}

// ---- between nodes: rows -------------------------------------------------------------------------------------------------
struct RowsCall {
    Rows a[MAX_ARRAYS];
    int n, N, G, node, room;
};

static __global__ void rows_post_kernel(Control *const *all, Who w, RowsCall call, const int *n_send) {
    Control *own = all[w.me];
    for (int n = threadIdx.x; n < call.N; n += blockDim.x) own->count[n] = n == call.node ? 0 : n_send[n];
    if (threadIdx.x < (unsigned)call.n) own->from[threadIdx.x] = (const char *)call.a[threadIdx.x].from;
    if (threadIdx.x == 0)
        for (int n = 0; n < call.N; n++) {
            if (n == call.node) continue;
            if (n_send[n] < 0 || n_send[n] > call.room) {
                printf("rank %d: %d rows to node %d, expected 0 to %d\n", w.me, n_send[n], n, call.room);
                __trap();
            }
            for (int a = 0; a < call.n; a++) own->bytes_sent += n_send[n] * (unsigned long long)call.a[a].row_bytes;
        }
    meet(all, w, COLUMN);
}

// Block (b, n, a): its share of array a's rows from node n
static __global__ void rows_pull_kernel(Control *const *all, Who w, RowsCall call, int *n_recv, int known) {
    int n = blockIdx.y, a = blockIdx.z;
    if (n == call.node) {
        if (!known && blockIdx.x == 0 && a == 0 && threadIdx.x == 0) n_recv[n] = 0;
        return;
    }
    const Control *peer = all[n * call.G + w.me % call.G];
    const bool alone = given_up(all[w.me]);
    if (alone && known) return;
    int rows = alone ? 0 : peer->count[call.node];
    if (blockIdx.x == 0 && a == 0 && threadIdx.x == 0) {
        if (known && n_recv[n] != rows) {
            printf("rank %d expects %d rows of rank %d, which sent %d: the ranks disagree on what they exchange\n", w.me,
                   n_recv[n],
                   n * call.G + w.me % call.G, rows);
            __trap();
        }
        n_recv[n] = rows;
    }
    size_t block = call.a[a].row_bytes * (size_t)call.room;
    copy_bytes((char *)call.a[a].to + n * block, peer->from[a] + call.node * block, rows * call.a[a].row_bytes,
               blockIdx.x * (size_t)blockDim.x + threadIdx.x, gridDim.x * (size_t)blockDim.x);
}

void comm_rows(Comm *c, const Rows *arrays, int n_arrays, int *n_recv, const int *n_send, int known, int room) {
    CommDev *v = of(c);
    const CommInfo *i = v->i;
    if (v->wire) return wire_rows(v, arrays, n_arrays, n_recv, n_send, known, room);
    CHECK_COMM(n_arrays <= MAX_ARRAYS, "%d arrays of rows at once, %d are possible", n_arrays, MAX_ARRAYS);
    RowsCall call = {{}, n_arrays, i->N, i->G, i->node, room};
    size_t most = 0;
    for (int a = 0; a < n_arrays; a++) call.a[a] = arrays[a], most = arrays[a].row_bytes > most ? arrays[a].row_bytes : most;
    dim3 grid(grid_for(v->d, most * (size_t)room, 64 * THREADS), (unsigned)i->N, (unsigned)n_arrays);
    LAUNCH(rows_post_kernel, 1, THREADS, 0, v->d->stream, v->control, column_of(i), call, n_send);
    LAUNCH(rows_pull_kernel, grid, THREADS, 0, v->d->stream, v->control, column_of(i), call, n_recv, known);
    meet_on(v, v->d->stream, column_of(i), COLUMN); // the senders may write their rows again
}

// ---- between nodes: blocks -----------------------------------------------------------------------------------------------
struct BlocksCall {
    int N, G, node;
    size_t block_bytes, at, bytes;
};

// Tells the counterparts where the blocks lie, and finds where those lie that come: the k-th from a node is the k-th it sends here.
static __global__ void blocks_post_kernel(Control *const *all, Who w, BlocksCall call, const void *const *from,
                                          const BlockSeg *send,
                                          const int *n_send, const BlockSeg *recv, const int *n_recv) {
    Control *own = all[w.me];
    if (threadIdx.x == 0 && (*n_send < 0 || *n_send > MAX_SEGS || *n_recv < 0 || *n_recv > MAX_SEGS)) {
        printf("rank %d: %d blocks to send, %d to receive: expected 0 to %d\n", w.me, *n_send, *n_recv, MAX_SEGS);
        __trap();
    }
    for (int k = threadIdx.x; k < *n_send; k += blockDim.x) {
        own->seg_node[k] = send[k].node;
        own->seg_at[k] = (const char *)from[send[k].rank] + send[k].block * call.block_bytes + call.at;
    }
    if (threadIdx.x == 0) {
        own->n_segs = *n_send;
        own->bytes_sent += *n_send * (unsigned long long)call.bytes;
    }
    meet(all, w, BLOCKS);
    for (int n = threadIdx.x; n < call.N && !given_up(own); n += blockDim.x) {
        if (n == call.node) continue;
        const Control *peer = all[n * call.G + w.me % call.G];
        int k = 0;
        for (int j = 0; j < *n_recv; j++) {
            if (recv[j].node != n) continue;
            while (k < peer->n_segs && peer->seg_node[k] != call.node) k++;
            own->source[j] = k < peer->n_segs ? peer->seg_at[k] : nullptr;
            k++;
        }
        while (k < peer->n_segs && peer->seg_node[k] != call.node) k++;
        if (k != peer->n_segs) {
            printf("rank %d and its counterpart in node %d disagree on how many blocks go between them\n", w.me, n);
            __trap();
        }
    }
}

static __global__ void blocks_pull_kernel(Control *const *all, Who w, BlocksCall call, void *const *to, const BlockSeg *recv,
                                          const int *n_recv) {
    for (int k = blockIdx.y; k < *n_recv && !given_up(all[w.me]); k += gridDim.y)
        copy_bytes((char *)to[recv[k].rank] + recv[k].block * call.block_bytes + call.at, all[w.me]->source[k], call.bytes,
                   blockIdx.x * (size_t)blockDim.x + threadIdx.x, gridDim.x * (size_t)blockDim.x);
}

void comm_blocks_start(Comm *c, void *const *to, const BlockSeg *recv, const int *n_recv, const void *const *from,
                       const BlockSeg *send,
                       const int *n_send, size_t block_bytes, size_t at, size_t bytes) {
    CommDev *v = of(c);
    CHECK_COMM(!v->blocks_under_way, "a transfer of blocks begins before the last one was finished");
    v->blocks_under_way = true;
    BlocksCall call = {v->i->N, v->i->G, v->i->node, block_bytes, at, bytes};
    CUDA_CHECK(cudaEventRecord(v->forked, v->d->stream));
    CUDA_CHECK(cudaStreamWaitEvent(v->side, v->forked, 0));
    if (v->wire) {
        wire_blocks(v, to, recv, n_recv, from, send, n_send, block_bytes, at, bytes);
    } else {
        LAUNCH(blocks_post_kernel, 1, THREADS, 0, v->side, v->control, column_of(v->i), call, from, send, n_send, recv, n_recv);
        LAUNCH(blocks_pull_kernel, dim3(8, 8), THREADS, 0, v->side, v->control, column_of(v->i), call, to, recv, n_recv);
        meet_on(v, v->side, column_of(v->i), BLOCKS); // sent as well
    }
    CUDA_CHECK(cudaEventRecord(v->joined, v->side));
}

void comm_blocks_room(Comm *c, int most, size_t bytes) {
    CommDev *v = of(c);
    if (v->wire) wire_blocks_room(v, most, bytes);
}

int comm_blocks_poll(Comm *c) { return (void)c, 0; } // the device needs no help

void comm_blocks_finish(Comm *c) {
    CommDev *v = of(c);
    if (v->blocks_under_way) CUDA_CHECK(cudaStreamWaitEvent(v->d->stream, v->joined, 0));
    v->blocks_under_way = false;
}

uint64_t comm_bytes_sent(const Comm *c) {
    CommDev *v = comm_dev(c);
    uint64_t n = 0;
    dev_download(v->d, &n, &v->own->bytes_sent, sizeof n);
    return n;
}

// ---- windows -------------------------------------------------------------------------------------------------------------
struct Handle {
    void *address;
    cudaIpcMemHandle_t ipc;
};

static bool same_process(const CommDev *v, int r) {
    const Place *own = &v->place[v->i->rank], *p = &v->place[r];
    return p->machine == own->machine && p->pid == own->pid;
}

static void *reach(CommDev *v, int r, const Handle *h, const char *what) {
    void *p = nullptr;
    if (v->place[r].machine != v->machine || (v->wire && r / v->i->G != v->i->node)) return nullptr;
    if (same_process(v, r)) return h->address;
    cudaError_t e = cudaIpcOpenMemHandle(&p, h->ipc, cudaIpcMemLazyEnablePeerAccess);
    CHECK_DEVICE(e == cudaSuccess, "rank %d cannot reach the window \"%s\" of rank %d on the same machine (GPU %d, GPU %d): %s (hint: "
                 "do both processes see both GPUs, and does nvidia-smi topo -p2p r say OK? --nodes %d makes them exchange messages)",
                 v->i->rank, what, r, v->device, v->place[r].device, cudaGetErrorString(e), v->i->size);
    return p;
}

// The machine's processes reach each other's memory by handles, threads by the address.
static void share(CommDev *v, Window *w, const char *what) {
    const CommInfo *i = v->i;
    Handle own = {w->own, {}}, *all = (Handle *)host_alloc(SIZE(i->size, sizeof *all));
    if (!v->one_process) CUDA_CHECK(cudaIpcGetMemHandle(&own.ipc, w->own));
    comm_allgather(v->c, all, &own, sizeof own);
    for (int r = 0; r < i->size; r++) w->reach[r] = r == i->rank ? w->own : reach(v, r, &all[r], what);
    free(all);
}

size_t window_takes(const CommDev *v, size_t bytes) { return (bytes ? bytes : 1) + SIZE(v->i->size, sizeof(void *)); }

Window *window_make(CommDev *v, size_t bytes, const char *what) {
    const CommInfo *i = v->i;
    Window *w = (Window *)host_alloc(sizeof *w);
    w->peer = (void **)host_alloc(SIZE(i->size, sizeof(void *)));
    w->reach = (void **)host_alloc(SIZE(i->size, sizeof(void *)));
    CUDA_CHECK(cudaMalloc(&w->reach_dev, SIZE(i->size, sizeof(void *))));
    ledger_add(&v->d->memory, window_takes(v, bytes));
    w->kind = v->d->memory.kind;
    w->bytes = bytes = bytes ? bytes : 1;
    if (v->symmetric) {
        symmetric_window(v, w, bytes, what);
    } else {
        cudaError_t e = cudaMalloc(&w->own, bytes);
        CHECK_DEVICE(e == cudaSuccess, "no memory for the window \"%s\": %zu bytes asked for on GPU %d: %s (hint: a smaller "
                     "--micro-batch or --seq, or more ranks)", what, bytes, v->device, cudaGetErrorString(e));
        share(v, w, what);
    }
    CUDA_CHECK(cudaMemsetAsync(w->own, 0, bytes, v->d->stream));
    for (int r = i->node * i->G; r < (i->node + 1) * i->G; r++) w->peer[r] = w->reach[r];
    CUDA_CHECK(cudaMemcpyAsync(w->reach_dev, w->reach, SIZE(i->size, sizeof(void *)), cudaMemcpyHostToDevice, v->d->stream));
    w->next = v->windows;
    v->windows = w;
    comm_barrier(v->c); // zeroed, before a peer writes into it
    return w;
}

void **comm_window(Comm *c, size_t bytes, const char *what) {
    CommDev *v = of(c);
    if (!v->d->memory.counting) return window_make(v, bytes, what)->peer;
    ledger_add(&v->d->memory, window_takes(v, bytes));
    return v->nowhere;
}

static void window_unreach(CommDev *v, Window *w) {
    for (int r = 0; r < v->i->size; r++)
        if (w->reach[r] && !w->symmetric && !same_process(v, r)) CUDA_CHECK(cudaIpcCloseMemHandle(w->reach[r]));
}

static void window_close(CommDev *v, Window *w) {
    if (w->symmetric) symmetric_window_free(v, w);
    else CUDA_CHECK(cudaFree(w->own));
    CUDA_CHECK(cudaFree(w->reach_dev));
    free(w->peer), free(w->reach), free(w);
}

void comm_window_free(Comm *c, void **peer) {
    CommDev *v = of(c);
    Window **at = &v->windows;
    while (*at && (*at)->peer != peer) at = &(*at)->next;
    Window *w = *at;
    CHECK_USAGE(w, "a window is given back that is not this group's");
    *at = w->next;
    comm_barrier(c); // no peer works in it any more
    window_unreach(v, w);
    comm_barrier(c);
    ledger_back(&v->d->memory, w->kind, window_takes(v, w->bytes));
    window_close(v, w);
}

// ---- life ----------------------------------------------------------------------------------------------------------------
static void peer_access(CommDev *v) {
    const CommInfo *i = v->i;
    for (int r = 0; r < i->size; r++) {
        int can = 0, other = v->place[r].device;
        if (!same_process(v, r) || other == v->device) continue;
        CUDA_CHECK(cudaDeviceCanAccessPeer(&can, v->device, other));
        CHECK_DEVICE(can, "GPU %d cannot reach the memory of GPU %d (hint: virtual ranks need GPUs that are connected; see nvidia-smi topo -m)",
                     v->device, other);
        cudaError_t e = cudaDeviceEnablePeerAccess(other, 0);
        if (e == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
        else CUDA_CHECK(e);
    }
}

// A word of the environment: one of two, or NULL
static const char *asked_for(const char *name, const char *one, const char *other) {
    const char *word = getenv(name);
    CHECK_USAGE(!word || !strcmp(word, one) || !strcmp(word, other), "%s is \"%s\" in the environment, expected %s or %s (hint: "
                "without it the program chooses)", name, word, one, other);
    return word;
}

// NCCL is for ranks with a GPU each. It carries what crosses nodes, and makes the windows of processes.
static void nccl_choose(CommDev *v, bool alone, char *why, size_t room) {
    const CommInfo *i = v->i;
    const char *windows = asked_for("MOE_WINDOWS", "ipc", "nccl"), *wire = asked_for("MOE_WIRE", "messages", "puts");
    const bool forced = windows && !strcmp(windows, "nccl");
    const bool puts = i->N > 1 && (wire ? !strcmp(wire, "puts") : !v->one_process || forced);
    const bool want = forced || (!windows && (!v->one_process || (puts && wire)));
    if (i->size == 1) return;
    if (puts && wire && !want) snprintf(why, room, "they need NCCL's windows, and MOE_WINDOWS is ipc");
    if (!alone && want) snprintf(why, room, "NCCL wants a GPU for each rank");
    if (alone && (i->N > 1 || want)) v->nccl = wire_open(v, why, room);
    if (i->N > 1) v->wire = v->nccl;
    CHECK_COMM(i->N == 1 || v->wire || v->one_process, "%d nodes of several processes, which exchange by NCCL: %s (hint: NCCL_DEBUG=WARN in "
               "the environment says more; without NCCL one node, or one process with --virtual-ranks)", i->N, why);
    if (v->nccl && want) symmetric_open(v, puts, why, room);
    CHECK_COMM(!forced || v->symmetric, "MOE_WINDOWS=nccl, but they cannot be used: %s", why);
}

// How ranks reach each other, for the start of the log. The largest group's way stands there: the world's, the first to be opened
static void ways_say(CommDev *v, const char *why) {
    const char *wire = asked_for("MOE_WIRE", "messages", "puts");
    CHECK_COMM(!wire || strcmp(wire, "puts") || v->i->N == 1 || symmetric_puts(v), "MOE_WIRE=puts, but they cannot be used: %s", why);
    if (strstr(v->d->name, ", ranks by ")) return;
    size_t at = strlen(v->d->name);
    snprintf(v->d->name + at, sizeof v->d->name - at, ", ranks by %s%s%s%s%s",
             v->symmetric ? "NCCL's windows" : v->one_process ? "plain pointers" : "CUDA IPC",
             v->i->N == 1 ? "" : symmetric_puts(v) ? ", nodes by NCCL's puts" : v->wire ? ", nodes by NCCL's messages" : ", nodes by copies",
             *why ? " (" : "", why, *why ? ")" : "");
}

static void patience_tell(CommDev *v) {
    Patience *p = (Patience *)host_alloc(sizeof *p);
    *p = Patience{(uint64_t)(1e9 * v->d->patience_s), v->d->given_up, v->d->late, {}};
    for (int r = 0; r < v->i->size; r++) p->world[r] = v->place[r].world;
    dev_upload(v->d, &v->own->patience, p, sizeof *p);
    free(p);
}

// Where all ranks sit. Whether each has a GPU of its own: NCCL takes no others.
static bool places(CommDev *v) {
    const CommInfo *i = v->i;
    v->place = (Place *)host_alloc(SIZE(i->size, sizeof(Place)));
    Place own = {v->machine, (int)getpid(), v->device, v->world};
    comm_allgather(v->c, v->place, &own, sizeof own);
    v->one_process = true;
    bool alone = true;
    int sharing = 0;
    for (int r = 0; r < i->size; r++) {
        v->one_process &= same_process(v, r);
        bool same_gpu = v->place[r].machine == v->machine && v->place[r].device == own.device;
        CHECK_USAGE(!same_gpu || same_process(v, r), "ranks %d and %d, two processes, share GPU %d (hint: as many processes per machine as "
                    "GPUs, or one process with --virtual-ranks)", i->rank, r, own.device);
        sharing += same_gpu;
        for (int q = 0; q < r; q++) alone &= v->place[q].machine != v->place[r].machine || v->place[q].device != v->place[r].device;
    }
    CHECK_USAGE(sharing <= MAX_SHARED, "%d ranks share GPU %d, %d can (hint: fewer --virtual-ranks)", sharing, own.device, MAX_SHARED);
    return alone;
}

static CommDev *open_on(Comm *c, Dev *d, int machine, int world) {
    CommDev *v = (CommDev *)host_alloc(sizeof *v);
    const CommInfo *i = comm_info(c);
    char why[512] = "";
    *v = CommDev{};
    v->c = c, v->i = i, v->d = d, v->device = d->device, v->machine = machine, v->world = world;
    v->nowhere = ledger_nowhere(i->size);
    d->patience_s = comm_patience_s(c);
    CHECK_USAGE(i->size <= MAX_RANKS, "%d ranks in a group, %d are possible", i->size, MAX_RANKS);
    const bool alone = places(v);
    peer_access(v);
    CUDA_CHECK(cudaStreamCreateWithFlags(&v->side, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&v->forked, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&v->joined, cudaEventDisableTiming));
    nccl_choose(v, alone, why, sizeof why);
    Window *w = window_make(v, sizeof(Control), "control");
    v->control = (Control *const *)w->reach_dev, v->own = (Control *)w->own;
    patience_tell(v);
    if (i->size == 1) return v;
    if (symmetric_puts(v)) symmetric_puts_try(v, why, sizeof why);
    ways_say(v, why);
    w = window_make(v, PIECE * sizeof(wide), "sums: staging");
    v->stage = (wide *const *)w->reach_dev, v->own_stage = (wide *)w->own;
    return v;
}

void comm_bind(Comm *world, Dev *d) {
    const CommInfo *i = comm_info(world);
    comm_dev_set(world, open_on(world, d, i->rank / i->local_ranks, i->rank));
}

CommDev *comm_dev_open(Comm *c, const CommDev *parent) { return parent ? open_on(c, parent->d, parent->machine, parent->world) : nullptr; }

void comm_dev_wait(CommDev *v) {
    if (v) dev_wait(v->d);
}

// The Dev may be gone: all it was told is done.
void comm_dev_close(CommDev *v) {
    if (!v) return;
    CUDA_CHECK(cudaSetDevice(v->device));
    comm_dev_set(v->c, nullptr);
    comm_barrier(v->c); // no peer works in these windows any more
    for (Window *w = v->windows; w; w = w->next) window_unreach(v, w);
    comm_barrier(v->c);
    for (Window *w = v->windows, *next; w; w = next) {
        next = w->next;
        window_close(v, w);
    }
    symmetric_close(v);
    if (v->nccl) wire_close(v->nccl);
    CUDA_CHECK(cudaEventDestroy(v->forked));
    CUDA_CHECK(cudaEventDestroy(v->joined));
    CUDA_CHECK(cudaStreamDestroy(v->side));
    free(v->place);
    free(v->nowhere);
    free(v);
}
