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
    struct Wire *wire;          // NCCL between the nodes; NULL: one node, or messages between them are copies in one process
    Window *windows;
    Control *const *control;    // device table
    Control *own;
    wide *const *stage, *const *sum; // device tables: PIECE elements; this rank's part of a piece's sum
    wide *own_stage, *own_sum;
    bool blocks_under_way;
};

// ---- nccl.cu: between the nodes of a group with a wire, in the order of a stream ------------------------------------------
struct Wire *wire_open(CommDev *v, char *why, size_t room); // collective; NULL, and why (room bytes), where NCCL cannot be used
void wire_close(struct Wire *w);
void wire_allgather(CommDev *v, void *out, const void *in, size_t bytes);
void *wire_scratch(CommDev *v, size_t *bytes); // for what a call gathers
// Of this place's part of a piece of a sum: the nodes' sum before this one's; on to the node after; from the last to all
void wire_before(CommDev *v, wide *sum, size_t n);
void wire_after(CommDev *v, const wide *sum, size_t n);
void wire_result(CommDev *v, wide *sum, size_t n);
void wire_rows(CommDev *v, const Rows *arrays, int n_arrays, int *n_recv, const int *n_send, int known, int room);
void wire_blocks_room(CommDev *v, int most, size_t bytes);
void wire_blocks(CommDev *v, void *const *to, const BlockSeg *recv, const int *n_recv, const void *const *from, const BlockSeg *send,
                 const int *n_send, size_t block_bytes, size_t at, size_t bytes); // on v->side
// n bytes by `threads` threads, of which this is number `t`
static __device__ void copy_bytes(char *to, const char *from, size_t n, size_t t, size_t threads) {
    size_t vectors = (((uintptr_t)to | (uintptr_t)from) & 15) == 0 ? n / 16 : 0;
    for (size_t i = t; i < vectors; i += threads) ((int4 *)to)[i] = ((const int4 *)from)[i];
    for (size_t i = 16 * vectors + t; i < n; i += threads) to[i] = from[i];
}
#endif
