// Windows and puts of NCCL's device API. A symmetric window is registered with all ranks of a group at once: its peers' parts in
// the same node are addresses (NCCL's LSA pointers), those in other nodes are reached by puts from a kernel (NCCL's GIN), which
// send what is there and no more. Both are tried out when a group begins; where they do not work, or NCCL is another than that of the
// headers, whose structures the kernels know, CUDA IPC and messages remain.
//
// No GPU has run this yet: the emulation does, on its own NCCL.
#include "kernels/cuda/comm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef USE_NCCL
#include <nccl.h>
#endif

#if defined USE_NCCL && NCCL_VERSION_CODE >= 22800
#include "kernels/cuda/nccl.h"

struct Registered { // of a Window
    ncclWindow_t window;
};
struct Symmetric {
    int first;        // number of this node's first rank among those that NCCL has pointers of
    bool puts;        // possible; of which the rest is
    ncclDevComm comm;
    uint64_t *seen;   // (LANES * SIGNALS, N) on the device: values of the signals that have been answered
};

// Signals from each node's rank. A put's signal carries the number of rows as well, below bit 32.
enum { READY, CAME, SIGNALS };
enum { LANES = 2 }; // 0: rows, on the Dev's stream; 1: blocks, on the side stream
constexpr uint64_t ONE_PUT = (uint64_t)1 << 32;
enum { TRIAL_WORDS = 16, TRIAL_S = 20 }; // of a put; the longest wait for it

// ---- windows ---------------------------------------------------------------------------------------------------------------
// The one place where the kernels' pointers come from.
static __global__ void lsa_table_kernel(void **table, ncclWindow_t w, int first, int n) {
    for (int r = threadIdx.x; r < n; r += blockDim.x) table[r] = ncclGetLsaPointer(w, 0, first + r);
}

// Whether all ranks of the group are content; if not, the first one's reason is everyone's.
static bool all_agree(CommDev *v, char *why, size_t room) {
    char own[200] = "", *all = (char *)host_alloc(SIZE(v->i->size, sizeof own));
    snprintf(own, sizeof own, "%s", why);
    comm_allgather(v->c, all, own, sizeof own);
    int bad = -1;
    for (int r = v->i->size - 1; r >= 0; r--)
        if (all[(size_t)r * sizeof own]) bad = r;
    why[0] = 0;
    if (bad >= 0) snprintf(why, room, "rank %d: %s", bad, all + (size_t)bad * sizeof own);
    free(all);
    return bad < 0;
}

// Memory and its registration, and where the node's parts are. Says why not.
static void window_register(CommDev *v, Window *w, size_t bytes, char *why, size_t room) {
    const CommInfo *i = v->i;
    w->symmetric = (Registered *)host_alloc(sizeof *w->symmetric);
    ncclResult_t code = nccl_calls().MemAlloc(&w->own, bytes); // the others are on their way to register, and would wait
    CHECK_DEVICE(code == ncclSuccess, "no memory for a window of %zu bytes on GPU %d: %s (hint: a smaller --micro-batch or --seq, or more "
                 "ranks)", bytes, v->device, nccl_calls().GetErrorString(code));
    code = nccl_calls().CommWindowRegister(v->nccl->all, w->own, bytes, &w->symmetric->window, NCCL_WIN_COLL_SYMMETRIC);
    if (code != ncclSuccess)
        snprintf(why, room, "symmetric windows: %s %s", nccl_calls().GetErrorString(code), nccl_calls().GetLastError(v->nccl->all));
    else if (!w->symmetric->window) snprintf(why, room, "NCCL makes no symmetric windows between these GPUs");
    if (*why) return;
    LAUNCH(lsa_table_kernel, 1, WARP, 0, v->d->stream, w->reach_dev, w->symmetric->window, v->symmetric->first, i->G);
    dev_download(v->d, w->reach + i->node * i->G, w->reach_dev, SIZE(i->G, sizeof *w->reach));
    w->reach[i->rank] = w->own; // the same memory
}

void symmetric_window(CommDev *v, Window *w, size_t bytes, const char *what) {
    char why[512] = "";
    window_register(v, w, bytes, why, sizeof why);
    CHECK_DEVICE(!*why, "window \"%s\" on GPU %d: %s (hint: a smaller --micro-batch or --seq, or more ranks; MOE_WINDOWS=ipc or "
                 "MOE_WIRE=messages does without)", what, v->device, why);
}

void symmetric_window_free(CommDev *v, Window *w) {
    if (w->symmetric->window) NCCL_CHECK(CommWindowDeregister(v->nccl->all, w->symmetric->window));
    if (w->own) NCCL_CHECK(MemFree(w->own));
    free(w->symmetric);
}

// Every rank writes its number, and reads those of its node through the pointers.
static void try_pointers(CommDev *v, const Window *w, char *why, size_t room) {
    const CommInfo *i = v->i;
    dev_upload(v->d, w->own, &i->rank, sizeof i->rank);
    dev_wait(v->d);
    comm_barrier(v->c);
    for (int r = i->node * i->G; r < (i->node + 1) * i->G && !*why; r++) {
        int found = -1;
        dev_download(v->d, &found, w->reach[r], sizeof found);
        if (found != r) snprintf(why, room, "a trial read of rank %d's window gave something else", r);
    }
}

// Before any window is registered, so that each is reached by puts from its beginning
static void puts_prepare(CommDev *v, char *why, size_t room) {
    Symmetric *s = v->symmetric;
    const int signals = LANES * SIGNALS * v->i->N;
    ncclDevCommRequirements_t need = {};
    need.ginForceEnable = true, need.ginContextCount = LANES, need.ginSignalCount = signals;
    ncclResult_t code = nccl_calls().DevCommCreate(v->nccl->all, &need, &s->comm);
    s->puts = code == ncclSuccess && s->comm.ginContextCount;
    if (!s->puts)
        snprintf(why, room, "puts between nodes (GIN): %s %s", code == ncclSuccess ? "none" : nccl_calls().GetErrorString(code),
                 nccl_calls().GetLastError(v->nccl->all));
    if (!all_agree(v, why, room)) {
        if (s->puts) NCCL_CHECK(DevCommDestroy(v->nccl->all, &s->comm));
        s->puts = false;
        return;
    }
    CUDA_CHECK(cudaMalloc((void **)&s->seen, signals * sizeof *s->seen));
    ledger_add(&v->d->memory, signals * sizeof *s->seen);
    CUDA_CHECK(cudaMemsetAsync(s->seen, 0, signals * sizeof *s->seen, v->d->stream));
}

void symmetric_open(CommDev *v, bool puts, char *why, size_t room) {
    const CommInfo *i = v->i;
    ncclTeam_t node = {};
    if (nccl_calls().version != NCCL_VERSION_CODE)
        snprintf(why, room, "NCCL is version %d here, its headers were version %d when this program was built (hint: build with the same)",
                 nccl_calls().version, NCCL_VERSION_CODE);
    else node = nccl_calls().TeamLsa(v->nccl->all);
    v->symmetric = (Symmetric *)host_alloc(sizeof *v->symmetric);
    v->symmetric->first = node.rank - i->rank % i->G;
    if (!*why && (v->symmetric->first < 0 || v->symmetric->first + i->G > node.nRanks))
        snprintf(why, room, "NCCL has pointers among %d ranks, a node is %d", node.nRanks, i->G);
    Window w = {};
    bool good = all_agree(v, why, room);
    if (good) {
        w.reach = (void **)host_alloc(SIZE(i->size, sizeof *w.reach));
        CUDA_CHECK(cudaMalloc((void **)&w.reach_dev, SIZE(i->size, sizeof *w.reach)));
        window_register(v, &w, 4096, why, room);
        good = all_agree(v, why, room); // nobody reads before all have their pointers
        if (good) {
            try_pointers(v, &w, why, room);
            good = all_agree(v, why, room);
        }
        symmetric_window_free(v, &w);
        CUDA_CHECK(cudaFree(w.reach_dev));
        free(w.reach);
    }
    if (!good) free(v->symmetric), v->symmetric = nullptr;
    else if (puts) puts_prepare(v, why, room);
}

void symmetric_close(CommDev *v) {
    if (!v->symmetric) return;
    if (v->symmetric->puts) {
        NCCL_CHECK(DevCommDestroy(v->nccl->all, &v->symmetric->comm));
        CUDA_CHECK(cudaFree(v->symmetric->seen));
    }
    free(v->symmetric);
}

bool symmetric_puts(const CommDev *v) { return v->symmetric && v->symmetric->puts; }

// ---- puts ------------------------------------------------------------------------------------------------------------------
struct PutCall {
    size_t to_at[MAX_ARRAYS], from_at[MAX_ARRAYS], row_bytes[MAX_ARRAYS], block[MAX_ARRAYS];
    ncclWindow_t to[MAX_ARRAYS], from[MAX_ARRAYS];
    int n_arrays, lane, rank, N, G, node, stride; // of the counts, in ints
};

// The one place that puts: rows of block n of an array's `from`, to block `node` of its `to` in node n.
static __device__ void put(const ncclGin &gin, ncclTeam_t column, int n, const PutCall &c, int a, int rows) {
    if (rows > 0)
        gin.put(column, n, c.to[a], c.to_at[a] + c.node * c.block[a], c.from[a], c.from_at[a] + n * c.block[a], rows * c.row_bytes[a]);
}

// How much a signal has risen since it was last answered; 0 when patience has ended
static __device__ uint64_t signal_wait(const ncclGin &gin, const Control *own, int me, int peer, unsigned id, uint64_t *seen) {
    const uint64_t begin = clock_ns();
    for (;;) {
        const uint64_t value = gin.readSignal(id), more = value - seen[id];
        if (more) {
            seen[id] = value;
            return more;
        }
        if (given_up(own)) return 0;
        if (clock_ns() - begin > own->patience.ns) return give_up(own, me, peer), 0;
        __nanosleep(200);
    }
}

// A thread for each node. Nobody sends before the receiver has said that its `to` is free, as it is when its own call begins; the
// signal that a put raises comes after all its bytes.
static __global__ void put_kernel(const Control *own, const __grid_constant__ ncclDevComm comm, PutCall c, const int *n_send,
                                  int *n_recv, uint64_t *seen) {
    const ncclGin gin(comm, c.lane);
    const ncclTeam_t column = {c.N, c.node, c.G};
    const unsigned ready = (unsigned)(c.lane * SIGNALS + READY) * c.N, came = (unsigned)(c.lane * SIGNALS + CAME) * c.N;
    const int n = (int)threadIdx.x, peer = n * c.G + c.rank % c.G;
    const bool other = n < c.N && n != c.node;
    if (other) gin.signal(column, n, ncclGin_SignalAdd{ready + c.node, 1});
    __syncthreads();
    if (other && signal_wait(gin, own, c.rank, peer, ready + n, seen)) {
        const int rows = n_send[(size_t)n * c.stride];
        for (int a = 0; a < c.n_arrays; a++) put(gin, column, n, c, a, rows);
        gin.signal(column, n, ncclGin_SignalAdd{came + c.node, ONE_PUT + (uint64_t)rows});
    }
    __syncthreads();
    if (other) n_recv[(size_t)n * c.stride] = (int)(uint32_t)signal_wait(gin, own, c.rank, peer, came + n, seen);
    __syncthreads();
    if (threadIdx.x == 0) gin.flush(ncclCoopThread()); // what was sent may be overwritten
}

static ncclWindow_t window_of(const CommDev *v, const void *p, size_t bytes, size_t *at) {
    const Window *w = v->windows;
    while (w && ((const char *)p < (char *)w->own || (const char *)p + bytes > (char *)w->own + w->bytes)) w = w->next;
    CHECK_COMM(w, "%zu bytes that go to another node, or come from one, lie in no window of the group", bytes);
    *at = (size_t)((const char *)p - (char *)w->own);
    return w->symmetric->window;
}

void symmetric_put(CommDev *v, cudaStream_t s, int lane, const Parcel *parcels, int n_parcels, int room, const int *n_send, int *n_recv,
                   int stride) {
    const CommInfo *i = v->i;
    PutCall c = {};
    c.n_arrays = n_parcels, c.lane = lane, c.rank = i->rank, c.N = i->N, c.G = i->G, c.node = i->node, c.stride = stride;
    CHECK_COMM(n_parcels <= MAX_ARRAYS && i->N <= 1024, "%d arrays for %d nodes, possible are %d and 1024", n_parcels, i->N, MAX_ARRAYS);
    for (int a = 0; a < n_parcels; a++) {
        const Parcel *p = &parcels[a];
        const size_t all = p->block * (i->N - 1) + p->row_bytes * room;
        c.row_bytes[a] = p->row_bytes, c.block[a] = p->block;
        c.to[a] = window_of(v, p->to, all, &c.to_at[a]);
        c.from[a] = window_of(v, p->from, all, &c.from_at[a]);
    }
    LAUNCH(put_kernel, 1, (unsigned)i->N, 0, s, v->own, v->symmetric->comm, c, n_send, n_recv, v->symmetric->seen);
}

// Word k of the row that rank r puts to node n
static uint64_t trial_word(int r, int n, int k) { return (uint64_t)r << 32 | (uint64_t)n << 16 | (uint64_t)k; }

// Into a window of its own; nothing else is under way. Puts are given up, with the reason, where one rank's do not come.
void symmetric_puts_try(CommDev *v, char *why, size_t room) {
    const CommInfo *i = v->i;
    const size_t row = TRIAL_WORDS * sizeof(uint64_t), block = SIZE(i->N, (int64_t)row), counts = SIZE(i->N, sizeof(int));
    Window *w = window_make(v, 2 * block + 2 * counts, "trial of puts");
    char *to = (char *)w->own, *from = to + block;
    int *n_send = (int *)(from + block), *n_recv = n_send + i->N, *ones = (int *)host_alloc(counts);
    uint64_t *word = (uint64_t *)host_alloc(block);
    const Patience usual = {(uint64_t)(1e9 * v->d->patience_s), v->d->given_up, v->d->late, {}};
    const uint64_t trial_ns = usual.ns < TRIAL_S * 1000000000ull ? usual.ns : TRIAL_S * 1000000000ull;
    for (int n = 0; n < i->N; n++) ones[n] = 1;
    for (int j = 0; j < i->N * TRIAL_WORDS; j++) word[j] = trial_word(i->rank, j / TRIAL_WORDS, j % TRIAL_WORDS);
    dev_upload(v->d, from, word, block);
    dev_upload(v->d, n_send, ones, counts);
    dev_upload(v->d, &v->own->patience.ns, &trial_ns, sizeof trial_ns);
    const Parcel p = {to, from, row, row};
    for (int lane = 0; lane < LANES; lane++) symmetric_put(v, v->d->stream, lane, &p, 1, 1, n_send, n_recv, 1);
    CUDA_CHECK(cudaStreamSynchronize(v->d->stream));
    if (v->d->late->set) snprintf(why, room, "a trial put did not arrive within %g s", 1e-9 * (double)trial_ns);
    *v->d->late = Late{}; // it was a trial
    dev_zero(v->d, v->d->given_up, sizeof *v->d->given_up);
    dev_upload(v->d, &v->own->patience.ns, &usual.ns, sizeof usual.ns);
    dev_download(v->d, word, to, block);
    for (int j = 0; j < i->N * TRIAL_WORDS && !*why; j++) {
        const int n = j / TRIAL_WORDS, from_rank = n * i->G + i->rank % i->G;
        if (n != i->node && word[j] != trial_word(from_rank, i->node, j % TRIAL_WORDS))
            snprintf(why, room, "a trial put from rank %d brought something else", from_rank);
    }
    free(ones), free(word);
    if (all_agree(v, why, room)) return;
    NCCL_CHECK(DevCommDestroy(v->nccl->all, &v->symmetric->comm));
    CUDA_CHECK(cudaFree(v->symmetric->seen));
    v->symmetric->puts = false;
}
#else
void symmetric_open(CommDev *, bool, char *why, size_t room) {
    snprintf(why, room, "this program was built without NCCL 2.28 or newer, for symmetric windows (hint: install it and build again)");
}
void symmetric_close(CommDev *) {}
bool symmetric_puts(const CommDev *) { return false; }
void symmetric_puts_try(CommDev *, char *, size_t) {}
void symmetric_window(CommDev *, Window *, size_t, const char *) {}
void symmetric_window_free(CommDev *, Window *) {}
void symmetric_put(CommDev *, cudaStream_t, int, const Parcel *, int, int, const int *, int *, int) {}
#endif
