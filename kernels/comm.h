// Ranks: who they are, where they sit, and what they exchange.
// One source of the model runs on any of the transports, chosen at run time: Open MPI (several processes) or threads of
// one process (virtual ranks; one rank is the smallest case and needs no launcher).
//
// Every collective must be called by all ranks of its group in the same order. All sums run in rank order, so every rank
// gets the same bits. A fault ends the run on all ranks with STATUS_COMM.
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
const CommInfo *comm_info(const Comm *c);

// ---- windows -------------------------------------------------------------------------------------------------------
// The same amount of memory on every rank of the group, each rank's readable and writable by all ranks of its node.
// Returns a host table of `size` pointers: peer[r] is r's memory, NULL for a rank of another node; peer[own] never NULL.
// Zeroed, page-aligned; untouched pages cost nothing. Collective. Lives until the group is freed (world: end of comm_run).
void **comm_window(Comm *c, size_t bytes, const char *what);

// ---- collectives on the device: in the order of its ops; the host does not wait ---------------------------------------------
void comm_node_barrier(Comm *c); // among this node's ranks of the group; orders their accesses to windows
void comm_dev_barrier(Comm *c);  // among all ranks
// out (size, bytes) overwritten; in (bytes)
void comm_dev_allgather(Comm *c, void *out, const void *in, size_t bytes);
void comm_sum(Comm *c, wide *x, size_t n);          // in place, elementwise over the ranks
void comm_dev_sum_double(Comm *c, double *x, int n);
void comm_dev_sum_int64(Comm *c, int64_t *x, int n);

// ---- collectives of the hosts, in ordinary memory: outside a step -------------------------------------------------------------
void comm_barrier(Comm *c);                         // also waits for what this rank's device was told to do before
void comm_allgather(Comm *c, void *out, const void *in, size_t bytes);
void comm_sum_double(Comm *c, double *x, int n);
void comm_sum_int64(Comm *c, int64_t *x, int n);
void comm_max_double(Comm *c, double *x, int n);
void comm_bcast(Comm *c, void *x, size_t bytes, int root);

// ---- messages between nodes ------------------------------------------------------------------------------------------
// A run of rows of one buffer that goes to, or comes from, one peer. Lists lie in device memory, as does their length.
typedef struct RowSeg {
    int peer, row, n;
} RowSeg;
// Sends rows send[i] of `from` and fills rows recv[i] of `to`, each row of row_bytes. Between two ranks, the i-th segment
// sent meets the i-th received; equal n. n_send, n_recv: device ints. Blocks until both are complete. Every rank of the
// group calls it, also with nothing to send. from and to do not overlap.
void comm_rows(Comm *c, void *to, const RowSeg *recv, const int *n_recv, const void *from, const RowSeg *send, const int *n_send,
               size_t row_bytes);
uint64_t comm_bytes_sent(const Comm *c); // payload bytes that comm_rows of this group has sent so far: what the wire saw
#endif
