// A group of ranks on their devices, for comm.cu and nccl.cu.
#ifndef MOE_CUDA_COMM_H
#define MOE_CUDA_COMM_H
#include "kernels/cuda/dev.h"
extern "C" {
#include "kernels/comm_dev.h"
#include "topoep/plan.h"
}

constexpr int MAX_RANKS = PLAN_MAX_R, MAX_ARRAYS = 4, MAX_SEGS = PLAN_MAX_E, MAX_SHARED = 16;
constexpr size_t GATHER = 64 << 10; // bytes
constexpr size_t PIECE = 1 << 20;   // elements of a sum at a time
enum Meeting { NODE, ALL, COLUMN, BLOCKS, MEETINGS };

// How long a rank waits for the others, and where it tells what it waited for
struct Patience {
    uint64_t ns;
    unsigned *given_up; // of the Dev
    Late *late;
    int world[MAX_RANKS]; // number of each of the group's ranks there
};

// Of each rank of a group, in memory that its peers reach
struct Control {
    Patience patience;                   // own; made before the first meeting
    unsigned epoch[MEETINGS];            // own: meetings so far
    unsigned long long bytes_sent;       // own
    unsigned flag[MEETINGS][MAX_RANKS];  // [r]: the meeting that rank r has come to
    int count[MAX_RANKS];                // rows: to each node
    const char *from[MAX_ARRAYS];        // rows: the arrays
    int n_segs;                          // blocks sent: how many,
    int seg_node[MAX_SEGS];              // where to,
    const char *seg_at[MAX_SEGS];        // where they lie
    const char *source[MAX_SEGS];        // own: of each block received
    alignas(16) char slot[2][GATHER];
};

struct Window { // one comm_window
    void *own, **peer; // host table, as comm_window returns it
    void **reach;      // host table of all that this rank reaches: its node, without a wire all ranks
    void **reach_dev;  // the same for kernels
    size_t bytes;
    MemoryKind kind;
    struct Registered *symmetric; // with NCCL; or NULL
    Window *next;
};

struct Place { // where a rank sits
    int machine, pid, device, world; // world: its number there
};

struct CommDev {
    Comm *c;
    const CommInfo *i;
    Dev *d;
    int device, machine, world; // of this rank; kept apart: the world's end comes after the Dev's
    cudaStream_t side;          // transfers of blocks, while the Dev's stream computes
    cudaEvent_t forked, joined;
    Place *place;               // of all ranks
    bool one_process;           // all ranks
    struct Wire *nccl;          // NULL: not in use
    struct Wire *wire;          // the same, where it carries what crosses nodes; NULL: one node, or copies within one process
    struct Symmetric *symmetric; // windows are NCCL's; NULL: plain pointers or CUDA IPC
    Window *windows;
    Control *const *control;    // device table
    Control *own;
    wide *const *stage;         // device table: PIECE elements
    wide *own_stage;
    bool blocks_under_way;
    void **nowhere;             // the table of windows that are only counted
};

// ---- nccl.cu: between the nodes of a group with a wire, in the order of a stream ------------------------------------------
// Of a group of one node only its communicator. Collective. NULL, and why (room bytes), where NCCL cannot be used
struct Wire *wire_open(CommDev *v, char *why, size_t room);
void wire_close(struct Wire *w);
void wire_allgather(CommDev *v, void *out, const void *in, size_t bytes);
void *wire_scratch(CommDev *v, size_t *bytes); // for what a call gathers
// Of the sums of this place's ranks, a step for each node: those of the nodes before; on to the node after; from the last one each
// node's own step
void wire_before(CommDev *v, wide *sums, size_t n);
void wire_after(CommDev *v, const wide *sums, size_t n);
void wire_results(CommDev *v, wide *sums, size_t step);
void wire_share(CommDev *v, char *x, size_t n, size_t elem_bytes); // comm_share_parts
void wire_rows(CommDev *v, const Rows *arrays, int n_arrays, int *n_recv, const int *n_send, int known, int room);
void wire_blocks_room(CommDev *v, int most, size_t bytes);
void wire_blocks(CommDev *v, void *const *to, const BlockSeg *recv, const int *n_recv, const void *const *from, const BlockSeg *send,
                 const int *n_send, size_t block_bytes, size_t at, size_t bytes); // on v->side

// ---- symmetric.cu: windows that NCCL registers, and puts into those of other nodes. All collective -------------------------
// With v->nccl, before the group's first window: sets v->symmetric, or leaves it NULL and says why not; `puts`: and prepares them, or
// says why not.
void symmetric_open(CommDev *v, bool puts, char *why, size_t room);
void symmetric_puts_try(CommDev *v, char *why, size_t room); // once Control is there: gives puts up, and says why, where they do not come
bool symmetric_puts(const CommDev *v);
void symmetric_close(CommDev *v);                            // after its windows
void symmetric_window(CommDev *v, Window *w, size_t bytes, const char *what); // own memory, and the node's in w->reach
void symmetric_window_free(CommDev *v, Window *w);
// Between counterparts: the first n_send[n * stride] rows of block n of `from` to the start of block `node` of their `to`; n_recv[n *
// stride]: how many came. `to` and `from` lie in windows of the group, at the same place on all ranks.
struct Parcel {
    void *to;
    const void *from;
    size_t row_bytes, block; // block: bytes from a node's block to the next
};
void symmetric_put(CommDev *v, cudaStream_t s, int lane, const Parcel *parcels, int n_parcels, int room, const int *n_send, int *n_recv,
                   int stride); // lane 0: on the Dev's stream, 1: on the side stream

// ---- comm.cu ------------------------------------------------------------------------------------------------------------------
Window *window_make(CommDev *v, size_t bytes, const char *what);
size_t window_takes(const CommDev *v, size_t bytes); // of the device's memory, with its table

// Of a wait: see wait_for in comm.cu
static __device__ bool given_up(const Control *own) { return flag_acquire(own->patience.given_up) != 0; }
static __device__ void give_up(const Control *own, int me, int peer) {
    const Patience &p = own->patience;
    if (atomicExch(p.given_up, 1u)) return;
    p.late->rank = p.world[me], p.late->peer = p.world[peer];
    __threadfence_system();
    *(volatile unsigned *)&p.late->set = 1;
}

// n bytes by `threads` threads, of which this is number `t`
static __device__ void copy_bytes(char *to, const char *from, size_t n, size_t t, size_t threads) {
    size_t vectors = (((uintptr_t)to | (uintptr_t)from) & 15) == 0 ? n / 16 : 0;
    for (size_t i = t; i < vectors; i += threads) ((int4 *)to)[i] = ((const int4 *)from)[i];
    for (size_t i = 16 * vectors + t; i < n; i += threads) to[i] = from[i];
}
#endif
