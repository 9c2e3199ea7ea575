// Ranks: who they are, where they sit, and what they exchange.
// One source of the model runs on any of the transports, chosen at run time: Open MPI (several processes) or threads of
// one process (virtual ranks; one rank is the smallest case and needs no launcher).
//
// Every collective must be called by all ranks of its group in the same order. All sums run in rank order, so every rank
// gets the same bits. A fault ends the run on all ranks with STATUS_COMM; so does a wait for another rank of more than
// MOE_PATIENCE seconds (an environment variable; 1800 without it).
#ifndef MOE_COMM_H
#define MOE_COMM_H
#include "kernels/device.h"

typedef struct Comm Comm; // a group of ranks, as seen by one of them

typedef struct CommInfo {
    int rank, size;      // of this group
    int N, G, node;      // nodes, ranks per node (nodes are contiguous and equal: size = N*G), this rank's node
    int local_ranks;     // ranks of the whole run on this machine (to divide its cores)
    const char *name;    // transport, e.g. "Open MPI 4.1.4" or "1 process, 4 virtual ranks"
} CommInfo;

// ---- life ----------------------------------------------------------------------------------------------------------
// Calls `body` once per rank. n_virtual = 0: the launcher decides (mpirun -n R gives R processes; bare, one rank).
// n_virtual > 0: that many threads of this process, each a rank. nodes: 0 = as detected, otherwise a virtual topology:
// the world's ranks cut into that many equal contiguous nodes, between which only messages pass. Returns when all bodies have.
// Refuses (STATUS_USAGE) nodes that do not divide the ranks, and a launcher that started several processes which cannot
// see each other ("rank 0 of 1" in every one).
void comm_run(int *argc, char ***argv, int n_virtual, int nodes, void (*body)(Comm *world, void *arg), void *arg);
// Contiguous blocks of `size` ranks: block = rank / size. The EP groups. Dies (STATUS_USAGE) if a block would straddle
// nodes unevenly. comm_stride: the ranks with the same rank % stride. The replicas of one shard of experts.
Comm *comm_block(Comm *world, int size);
Comm *comm_stride(Comm *world, int stride);
void comm_free(Comm *c); // of a derived group
// The device on which this rank's collectives of the device run. Once, of the world, before any group is derived or window made.
void comm_bind(Comm *world, Dev *d);
const CommInfo *comm_info(const Comm *c);
// How a group shares out n elements: contiguous, in rank order, as evenly as whole blocks of PART_UNIT elements allow (no cache line and
// no vector is cut); the last ranks may have fewer, or none.
enum { PART_UNIT = 64 };
typedef struct CommPart {
    size_t at, n;
} CommPart;
CommPart comm_part(const Comm *c, int rank, size_t n);

// ---- windows -------------------------------------------------------------------------------------------------------
// The same amount of memory on every rank of the group, each rank's readable and writable by all ranks of its node.
// Returns a host table of `size` pointers: peer[r] is r's memory, NULL for a rank of another node; peer[own] never NULL.
// Zeroed, page-aligned. Nothing is made while the device counts (dev_count_begin). Collective. Lives until comm_window_free, or until
// the group is freed (world: end of comm_run).
void **comm_window(Comm *c, size_t bytes, const char *what);
// Gives one back. Collective. A GPU may wait for all its kernels meanwhile, and they for other ranks' that are not launched yet: so
// between comm_barriers of all the ranks that share it.
void comm_window_free(Comm *c, void **peer);

// ---- collectives on the device: in the order of its ops; the host does not wait ---------------------------------------------
void comm_node_barrier(Comm *c); // among this node's ranks of the group; orders their accesses to windows
void comm_dev_barrier(Comm *c);  // among all ranks
// out (size, bytes) overwritten; in (bytes)
void comm_dev_allgather(Comm *c, void *out, const void *in, size_t bytes);
void comm_sum(Comm *c, wide *x, size_t n);          // in place, elementwise over the ranks
// Its two halves. First every rank has the sums of its own part of x (comm_part), the rest is left as it was. Then all have all
// parts, of any array of n elements.
void comm_sum_part(Comm *c, wide *x, size_t n);
void comm_share_parts(Comm *c, void *x, size_t n, size_t elem_bytes);
void comm_dev_sum_double(Comm *c, double *x, int n);
void comm_dev_sum_int64(Comm *c, int64_t *x, int n);

// ---- collectives of the hosts, in ordinary memory: outside a step -------------------------------------------------------------
void comm_barrier(Comm *c);                         // also waits for what this rank's device was told to do before
void comm_allgather(Comm *c, void *out, const void *in, size_t bytes);
void comm_sum_double(Comm *c, double *x, int n);
void comm_sum_int64(Comm *c, int64_t *x, int n);
void comm_max_double(Comm *c, double *x, int n);
void comm_bcast(Comm *c, void *x, size_t bytes, int root);
void comm_move(Comm *c, void *x, size_t bytes, int from, int to); // rank to's x becomes rank from's; the others only take part

// ---- between nodes, inside a step ------------------------------------------------------------------------------------
// A rank exchanges only with its counterparts: the ranks that have its place (rank % G) in the other nodes. So every port
// carries its own share, and who talks to whom never depends on a plan. Counts and lists lie in device memory, buffers in
// windows; a GPU needs nothing of them on its host. How many messages a call sends stands in each of them: ranks that
// disagree end with a message. Every rank of the group makes the call, also with nothing to send.

// Rows of which only the sender knows how many. An array of rows is N blocks of `room` rows: the first n_send[n] rows of block n
// of `from` go to the counterpart in node n, and what it sends fills `to` from the start of block n. The own node's block
// is left alone; what `to` holds behind the rows that came is unknown. from and to do not overlap.
typedef struct Rows {
    void *to;
    const void *from;
    size_t row_bytes;
} Rows;
// All arrays have the same counts. n_send, n_recv (N). known 0: n_recv overwritten with the rows that came, 0 for the own node;
// 1: n_recv says how many must come, another number is a fault. Blocks until complete.
void comm_rows(Comm *c, const Rows *arrays, int n_arrays, int *n_recv, const int *n_send, int known, int room);

// Before the first comm_blocks_start: at most `most` blocks go between two ranks at a time, `bytes` of each. Collective.
void comm_blocks_room(Comm *c, int most, size_t bytes);
// Parts of blocks, from a window of the own node to one of the counterpart's node, while the ranks compute: bytes
// [at, at + bytes) of block send[i].block of from[send[i].rank] go to the counterpart in send[i].node; likewise the other way.
// Between two ranks the i-th sent meets the i-th received. to, from: device tables of the windows by rank, of which only the
// own node's are used. One such transfer at a time.
typedef struct BlockSeg {
    int node, rank, block;
} BlockSeg;
void comm_blocks_start(Comm *c, void *const *to, const BlockSeg *recv, const int *n_recv, const void *const *from,
                       const BlockSeg *send, const int *n_send, size_t block_bytes, size_t at, size_t bytes);
int comm_blocks_poll(Comm *c);    // moves it on; 1 while it needs to be called again, between pieces of computation, to move on
void comm_blocks_finish(Comm *c); // blocks until it is complete here; a barrier of the node makes it so for the node
uint64_t comm_bytes_sent(const Comm *c); // payload bytes that both kinds have sent in this group so far: what the wire saw
#endif
