// Windows and collectives of the device, where its memory is the host's.
#include "kernels/cpu/comm_impl.h"

void comm_bind(Comm *world, Dev *d) { (void)world, (void)d; }
void **comm_window(Comm *c, size_t bytes, const char *what) { return host_window(c, bytes, what); }
void comm_node_barrier(Comm *c) { host_node_barrier(c); }
void comm_dev_barrier(Comm *c) { comm_barrier(c); }
void comm_dev_allgather(Comm *c, void *out, const void *in, size_t bytes) { comm_allgather(c, out, in, bytes); }
void comm_sum(Comm *c, wide *x, size_t n) { host_sum(c, x, n); }
void comm_dev_sum_double(Comm *c, double *x, int n) { comm_sum_double(c, x, n); }
void comm_dev_sum_int64(Comm *c, int64_t *x, int n) { comm_sum_int64(c, x, n); }
void comm_rows(Comm *c, const Rows *arrays, int n_arrays, int *n_recv, const int *n_send, int known, int room) {
    host_rows(c, arrays, n_arrays, n_recv, n_send, known, room);
}
void comm_blocks_start(Comm *c, void *const *to, const BlockSeg *recv, const int *n_recv, const void *const *from,
                       const BlockSeg *send, const int *n_send, size_t block_bytes, size_t at, size_t bytes) {
    host_blocks_start(c, to, recv, n_recv, from, send, n_send, block_bytes, at, bytes);
}
void comm_blocks_poll(Comm *c) { host_blocks_poll(c); }
void comm_blocks_finish(Comm *c) { host_blocks_finish(c); }
