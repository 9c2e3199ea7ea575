// What a transport between ranks supplies; kernels/comm.c builds the rest of comm.h on it.
#ifndef MOE_COMM_IMPL_H
#define MOE_COMM_IMPL_H
#include "kernels/comm_dev.h"
#include <stdatomic.h>

enum { MSG_MAX = 1 << 30 }; // bytes of one message: MPI counts are 32-bit

// One message of a group. The i-th one posted from a to b meets the i-th that b posted from a; a transport dies
// (STATUS_COMM) where their tags or lengths differ, for then the ranks do not run the same sequence of calls.
// A tag holds the call's number and how many messages the sender has for this receiver in that call (both cut to fit the
// 15 bits that MPI promises): a rank that expects another number learns it from the first one.
typedef struct Msg {
    void *ptr;
    size_t bytes; // <= MSG_MAX
    int peer, send, tag;
    int bounded;       // of a receive: bytes is the most that may come, and then what came
    atomic_int done;   // complete
    struct Msg *next;  // threads: in the receiver's queue
    uint64_t serial;   // threads: the how-manieth between the two
    uint64_t request;  // MPI_Request
} Msg;
enum { TAG_CALLS = 1 << 11, TAG_COUNTS = 1 << 4 };

typedef struct MsgList { // messages in flight do not move
    Msg *msg;
    int n, room;
} MsgList;

typedef struct Handle { // what a rank tells the others of its node so that they can map its window
    uint64_t pid, fd, inode, address;
} Handle;

typedef struct Transport {
    void *(*split)(Comm *parent, int first, int step, int size); // state of the group first + i*step, i < size; collective
    void (*release)(void *group, int rank);                      // collective
    void (*post)(Comm *c, Msg *m);                               // m stays where it is until wait returns
    void (*wait)(Comm *c, Msg *m, int n);                        // until all n are complete, at most c->patience_s
    int (*poll)(Comm *c, Msg *m, int n);                         // completes what can be at once; 1: only polls move the rest on
    void *(*window_make)(Comm *c, Handle *h, size_t bytes, const char *what); // own memory, zeroed
    void *(*window_map)(Comm *c, const Handle *h, size_t bytes, const char *what); // a node peer's
    void (*window_shared)(Comm *c, const Handle *h);             // all peers have mapped it
    void (*window_unmap)(void *p, size_t bytes, int own);
} Transport;

typedef struct Window {
    void **peer;
    size_t bytes;
    struct Window *next;
} Window;

// Of one node, in the first page of its first rank's control window; waits on it work across processes.
typedef struct NodeBarrier {
    _Alignas(64) atomic_uint arrived;
    _Alignas(64) atomic_uint generation;
    atomic_uint sleepers;
} NodeBarrier;

// A rank's control window
//   page 0      the node's barrier (its first rank's is used)
//   GATHER x 2  blocks of an all-gather; two, used in turn, so that one barrier per call is enough
//   PIECE x 5   of a sum: stage x 2 (own values; also what is shared out), result (own slice), prefix (of the nodes before), partial
// of which untouched pages cost nothing.
enum { PAGE = 4096, GATHER = 64 << 10, PIECE = 256 << 10 }; // bytes
enum { STAGE = PAGE + 2 * GATHER, RESULT = STAGE + 2 * PIECE, PREFIX = RESULT + PIECE, PARTIAL = PREFIX + PIECE,
       CONTROL = PARTIAL + PIECE };

struct Comm {
    CommInfo info;
    CommDev *dev;       // the backend's
    const Transport *t;
    void *group;        // the transport's
    Window *windows;    // newest first; the last is the control window
    void **control;     // control window: barrier, pieces of collectives; see above
    MsgList call;       // of the call that runs
    MsgList blocks;     // of comm_blocks_start, until it is finished
    int *per_node;      // (N) scratch
    int sequence;       // calls with messages so far: the tag's lower part
    double patience_s;  // longest wait for another rank
    int gathers;        // parity chooses the slot
    int spins;          // looks at a barrier before sleeping; 0 where ranks share cores
    uint64_t bytes_sent;
};

// For transports. Dies unless a message with this tag and length is what m, a receive, expects; a bounded m takes the length.
void msg_check(const Comm *c, Msg *m, int tag, size_t bytes);
void msg_late(const Comm *c, const Msg *m) __attribute__((noreturn)); // patience is at its end
// A world with t, group and info (rank, size, local_ranks, name, G as detected) becomes usable; and its end.
void comm_open(Comm *c, int nodes);
void comm_close(Comm *c);

// For the CPU's device as well
void **host_window(Comm *c, size_t bytes, const char *what); // comm_window
void host_window_free(Comm *c, void **peer);                 // comm_window_free
void host_node_barrier(Comm *c);                             // comm_node_barrier
// A call's messages: begin, room for them all (a posted one must not move), post, wait.
void msgs_begin(Comm *c);
void msgs_room(MsgList *l, int n);
int msgs_count(size_t bytes); // messages that msgs_post makes of so many bytes
void msg_post(Comm *c, MsgList *l, Msg m);
void msgs_post(Comm *c, int send, int peer, const void *ptr, size_t bytes);
void msgs_wait(Comm *c);

void *window_anonymous(size_t bytes, const char *what);
void window_huge(void *p, size_t bytes); // asks for huge pages where the window is large: its rows are walked in strides

void comm_run_threads(int n, int nodes, void (*body)(Comm *world, void *arg), void *arg);
void comm_run_mpi(int *argc, char ***argv, int launched, int nodes, void (*body)(Comm *world, void *arg), void *arg);
#endif
