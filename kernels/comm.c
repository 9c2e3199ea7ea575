// Groups of ranks, windows, and collectives in rank order, on the few primitives of a transport (cpu/comm_impl.h).
//
// What stays within a node goes through shared memory: every rank of a group owns a control window
//   page 0      the node's barrier (its first rank's is used)
//   GATHER x 2  blocks of an all-gather; two, used in turn, so that one barrier per call is enough
//   PIECE x 6   of a sum: stage x 2 (own values), result x 2 (own slice, final), prefix (of the nodes before), partial
// of which untouched pages cost nothing.
#include "kernels/cpu/comm_impl.h"
#include "kernels/check.h"
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, GATHER = 64 << 10, PIECE = 256 << 10, BLOCK = 1024 }; // bytes; BLOCK elements stay in the first-level cache
enum { STAGE = PAGE + 2 * GATHER, RESULT = STAGE + 2 * PIECE, PREFIX = RESULT + 2 * PIECE, PARTIAL = PREFIX + PIECE,
       CONTROL = PARTIAL + PIECE };
enum { PATIENCE_S = 1800 }; // a checkpoint of one rank may take that long

// ---- messages --------------------------------------------------------------------------------------------------------
static void msgs_begin(Comm *c) { c->call.n = 0, c->sequence = (c->sequence + 1) % TAG_CALLS; }

// Room first: a posted message must not move.
static void msgs_room(MsgList *l, int n) {
    if (n <= l->room) return;
    free(l->msg);
    l->room = n + n / 2 + 16;
    l->msg = host_alloc(SIZE(l->room, sizeof *l->msg));
}

static int msgs_count(size_t bytes) { return (int)(bytes / MSG_MAX) + 1; }

static void msg_post(Comm *c, MsgList *l, Msg m) {
    l->msg[l->n] = m;
    c->t->post(c, &l->msg[l->n++]);
}

static void msgs_post(Comm *c, int send, int peer, const void *ptr, size_t bytes) {
    for (size_t at = 0; at < bytes || at == 0; at += MSG_MAX) {
        size_t n = bytes - at < MSG_MAX ? bytes - at : MSG_MAX;
        msg_post(c, &c->call, (Msg){.ptr = n ? (char *)ptr + at : NULL, .bytes = n, .peer = peer, .send = send, .tag = c->sequence});
    }
}

static void msgs_wait(Comm *c) {
    c->t->wait(c, c->call.msg, c->call.n);
    c->call.n = 0;
}

void msg_check(const Comm *c, Msg *m, int tag, size_t bytes) {
    int fits = m->bounded ? bytes <= m->bytes : bytes == m->bytes;
    CHECK_COMM(tag == m->tag && fits, "rank %d sent %zu bytes, of %d messages in its call %d, where rank %d expects %s%zu bytes, of "
               "%d in its call %d (numbers cut to %d and %d): the ranks disagree on what they exchange", m->peer, bytes, tag / TAG_CALLS,
               tag % TAG_CALLS, c->info.rank, m->bounded ? "at most " : "", m->bytes, m->tag / TAG_CALLS, m->tag % TAG_CALLS,
               TAG_COUNTS, TAG_CALLS);
    m->bytes = bytes;
}

void msg_late(const Comm *c, const Msg *m) {
    die(STATUS_COMM, __FILE__, __LINE__, "rank %d has waited %g s for rank %d to %s %zu bytes in call %d (hint: is that rank stopped, or "
        "the machine swapping? MOE_PATIENCE=SECONDS waits longer)", c->info.rank, c->patience_s, m->peer, m->send ? "take" : "send",
        m->bytes, m->tag % TAG_CALLS);
}

// out (G, bytes): the blocks of this node's ranks. Needs no window.
static void node_exchange(Comm *c, void *out, const void *in, size_t bytes) {
    const CommInfo *i = &c->info;
    int first = i->node * i->G;
    msgs_begin(c);
    msgs_room(&c->call, 2 * i->G);
    for (int g = 0; g < i->G; g++)
        if (first + g != i->rank) msgs_post(c, 0, first + g, (char *)out + (size_t)g * bytes, bytes);
    for (int g = 0; g < i->G; g++)
        if (first + g != i->rank) msgs_post(c, 1, first + g, in, bytes);
    memcpy((char *)out + (size_t)(i->rank - first) * bytes, in, bytes);
    msgs_wait(c);
}

// The node's ranks meet without a window: while windows come and go
static void node_meet(Comm *c) {
    char in = 0, *out = host_alloc((size_t)c->info.G);
    node_exchange(c, out, &in, 1);
    free(out);
}

// ---- windows ---------------------------------------------------------------------------------------------------------
void window_huge(void *p, size_t bytes) {
    if (bytes >= 16u << 20) madvise(p, bytes, MADV_HUGEPAGE); // a kernel without them says no, which is fine
}

void *window_anonymous(size_t bytes, const char *what) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK_DEVICE(p != MAP_FAILED, "no address space for the window \"%s\" of %zu bytes (hint: is there a limit, ulimit -v?)",
                 what, bytes);
    window_huge(p, bytes);
    return p;
}

void **host_window(Comm *c, size_t bytes, const char *what) {
    const CommInfo *i = &c->info;
    int first = i->node * i->G;
    CHECK_USAGE(bytes <= PTRDIFF_MAX - PAGE, "window \"%s\" of %zu bytes: more than an address space", what, bytes);
    Window *w = host_alloc(sizeof *w);
    w->bytes = bytes ? (bytes + PAGE - 1) / PAGE * PAGE : PAGE;
    w->peer = host_alloc(SIZE(i->size, sizeof *w->peer));
    Handle own = {0}, *all = host_alloc(SIZE(i->G, sizeof *all));
    w->peer[i->rank] = c->t->window_make(c, &own, w->bytes, what);
    node_exchange(c, all, &own, sizeof own);
    for (int g = 0; g < i->G; g++)
        if (first + g != i->rank) w->peer[first + g] = c->t->window_map(c, &all[g], w->bytes, what);
    node_meet(c);
    c->t->window_shared(c, &own);
    free(all);
    w->next = c->windows;
    c->windows = w;
    return w->peer;
}

// ---- groups ----------------------------------------------------------------------------------------------------------
static void start(Comm *c) {
    // the machine's cores, not those this process is bound to: the launcher may have given each rank its own
    c->spins = c->info.local_ranks <= sysconf(_SC_NPROCESSORS_ONLN) ? 2000 : 0;
    c->per_node = host_alloc(SIZE(c->info.N, sizeof *c->per_node));
    const char *patience = getenv("MOE_PATIENCE");
    c->patience_s = patience ? atof(patience) : PATIENCE_S;
    CHECK_USAGE(c->patience_s > 0, "MOE_PATIENCE is \"%s\", expected seconds", patience);
    c->control = host_window(c, CONTROL, "control");
}

void comm_open(Comm *c, int nodes) {
    CommInfo *i = &c->info;
    if (nodes > 0) {
        CHECK_USAGE(i->size % nodes == 0, "%d ranks cannot form %d equal nodes (hint: --nodes must divide the number of ranks)",
                    i->size, nodes);
        int G = i->size / nodes;
        CHECK_USAGE(i->G % G == 0, "--nodes %d makes nodes of %d ranks, but machines hold %d ranks each: a node would cross "
                    "machines (hint: --nodes %d or a multiple, or leave it out)", nodes, G, i->G, i->size / i->G);
        i->G = G;
    }
    i->N = i->size / i->G;
    i->node = i->rank / i->G;
    start(c);
}

void comm_close(Comm *c) {
    node_meet(c); // a window's owner must not take it from under a peer
    for (Window *w = c->windows, *next; w; w = next) {
        for (int r = 0; r < c->info.size; r++)
            if (w->peer[r]) c->t->window_unmap(w->peer[r], w->bytes, r == c->info.rank);
        next = w->next;
        free(w->peer);
        free(w);
    }
    free(c->call.msg);
    free(c->blocks.msg);
    free(c->per_node);
}

// Ranks first + i*step of the parent, i < size, `G` of them on each node
static Comm *derive(Comm *parent, int first, int step, int size, int G) {
    Comm *c = host_alloc(sizeof *c);
    *c = (Comm){.info = parent->info, .t = parent->t};
    c->info.rank = (parent->info.rank - first) / step;
    c->info.size = size;
    c->info.G = G;
    c->info.N = size / G;
    c->info.node = c->info.rank / G;
    c->group = c->t->split(parent, first, step, size);
    start(c);
    return c;
}

Comm *comm_block(Comm *world, int size) {
    const CommInfo *i = &world->info;
    CHECK_USAGE(size > 0 && i->size % size == 0, "%d ranks cannot form groups of %d (hint: the group's size must divide the "
                "number of ranks)",
                i->size, size);
    CHECK_USAGE(size <= i->G ? i->G % size == 0 : size % i->G == 0, "groups of %d ranks would cut nodes of %d ranks unevenly "
                "(hint: one of the two must divide the other)", size, i->G);
    return derive(world, i->rank / size * size, 1, size, size <= i->G ? size : i->G);
}

Comm *comm_stride(Comm *world, int stride) {
    const CommInfo *i = &world->info;
    CHECK_USAGE(stride > 0 && i->size % stride == 0, "%d ranks cannot be dealt out with stride %d (hint: it must divide the "
                "number of ranks)",
                i->size, stride);
    CHECK_USAGE(stride <= i->G ? i->G % stride == 0 : stride % i->G == 0, "stride %d would cut nodes of %d ranks unevenly "
                "(hint: one of the two must divide the other)", stride, i->G);
    return derive(world, i->rank % stride, stride, i->size / stride, stride <= i->G ? i->G / stride : 1);
}

void comm_free(Comm *c) {
    comm_close(c);
    c->t->release(c->group, c->info.rank);
    free(c);
}

const CommInfo *comm_info(const Comm *c) { return &c->info; }

void comm_run(int *argc, char ***argv, int n_virtual, int nodes, void (*body)(Comm *world, void *arg), void *arg) {
    int launched = launcher_size();
    CHECK_USAGE(n_virtual >= 0 && nodes >= 0, "%d virtual ranks, %d nodes: expected numbers >= 0", n_virtual, nodes);
    CHECK_USAGE(n_virtual == 0 || launched <= 1, "the launcher started %d processes and %d virtual ranks are asked for in each "
                "(hint: one or the other)", launched, n_virtual);
    if (n_virtual > 0 || launched == 0 || launched == 1) {
        comm_run_threads(n_virtual > 0 ? n_virtual : 1, nodes, body, arg);
        return;
    }
#ifdef USE_MPI
    comm_run_mpi(argc, argv, launched, nodes, body, arg);
#else
    (void)argc, (void)argv;
    CHECK_USAGE(0, "started as several processes, but this program was built without MPI (hint: build with make MPI=1, or start "
                "it without a launcher)");
#endif
}

// ---- barriers --------------------------------------------------------------------------------------------------------
static void futex(atomic_uint *word, int op, unsigned value, const struct timespec *limit) {
    syscall(SYS_futex, word, op, value, limit, NULL, 0);
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void barrier_sleep(Comm *c, NodeBarrier *b, unsigned now) {
    double begin = now_s();
    atomic_fetch_add(&b->sleepers, 1);
    while (atomic_load(&b->generation) == now) {
        futex(&b->generation, FUTEX_WAIT, now, &(struct timespec){.tv_sec = 1});
        c->t->poll(c, c->blocks.msg, c->blocks.n); // a fault there may be why the others do not come
        CHECK_COMM(now_s() - begin < c->patience_s, "rank %d has waited %g s at a barrier that %u of the node's %d ranks have reached "
                   "(hint: is a rank stopped, or the machine swapping? MOE_PATIENCE=SECONDS waits longer)", c->info.rank,
                   c->patience_s, atomic_load(&b->arrived), c->info.G);
    }
    atomic_fetch_sub(&b->sleepers, 1);
}

// On two cores, a rank that spins keeps the one it waits for from running: look a moment where every rank has a core,
// then sleep.
void host_node_barrier(Comm *c) {
    int G = c->info.G;
    if (G == 1) return;
    NodeBarrier *b = c->control[c->info.node * G];
    unsigned now = atomic_load(&b->generation);
    if (atomic_fetch_add(&b->arrived, 1) + 1 == (unsigned)G) {
        atomic_store(&b->arrived, 0);
        atomic_store(&b->generation, now + 1);
        if (atomic_load(&b->sleepers)) futex(&b->generation, FUTEX_WAKE, INT32_MAX, NULL);
        return;
    }
    for (int i = 0; i < c->spins; i++) {
        if (atomic_load_explicit(&b->generation, memory_order_acquire) != now) return;
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
    barrier_sleep(c, b, now);
}

// Nodes meet through their first ranks: dissemination barrier (Hensgen, Finkel, Manber 1988), ceil(log2 N) rounds
void comm_barrier(Comm *c) {
    const CommInfo *i = &c->info;
    host_node_barrier(c);
    if (i->N == 1) return;
    msgs_begin(c);
    msgs_room(&c->call, 2);
    for (int d = 1; d < i->N && i->rank % i->G == 0; d *= 2) {
        msgs_post(c, 0, (i->node - d + i->N) % i->N * i->G, NULL, 0);
        msgs_post(c, 1, (i->node + d) % i->N * i->G, NULL, 0);
        msgs_wait(c);
    }
    host_node_barrier(c);
}

// ---- all-gather ------------------------------------------------------------------------------------------------------
// Column first: a rank exchanges its block with the ranks that hold its place in other nodes, then the node's ranks read
// each other's columns.
static void gather_piece(Comm *c, char *out, size_t out_step, const char *in, size_t n) {
    const CommInfo *i = &c->info;
    int place = i->rank % i->G;
    size_t slot = PAGE + (size_t)(c->gathers++ & 1) * GATHER;
    char *column = (char *)c->control[i->rank] + slot;
    if (i->N > 1) {
        msgs_begin(c);
        msgs_room(&c->call, 2 * i->N);
        for (int k = 0; k < i->N; k++)
            if (k != i->node) msgs_post(c, 0, k * i->G + place, column + (size_t)k * n, n);
        for (int k = 0; k < i->N; k++)
            if (k != i->node) msgs_post(c, 1, k * i->G + place, in, n);
        msgs_wait(c);
    }
    memcpy(column + (size_t)i->node * n, in, n);
    host_node_barrier(c);
    for (int g = 0; g < i->G; g++) {
        const char *from = (char *)c->control[i->node * i->G + g] + slot;
        for (int k = 0; k < i->N; k++) memcpy(out + (size_t)(k * i->G + g) * out_step, from + (size_t)k * n, n);
    }
}

void comm_allgather(Comm *c, void *out, const void *in, size_t bytes) {
    if (c->info.size == 1 && bytes) memcpy(out, in, bytes);
    if (c->info.size == 1) return;
    size_t piece = (size_t)(GATHER / c->info.N) / 64 * 64;
    for (size_t at = 0; at < bytes; at += piece)
        gather_piece(c, (char *)out + at, bytes, (const char *)in + at, bytes - at < piece ? bytes - at : piece);
}

// ---- sums, in rank order -----------------------------------------------------------------------------------------------
// Elements [lo, hi) of a piece of n that place g of a node adds up; whole cache lines
static void slice_of(size_t *lo, size_t *hi, size_t n, int g, int G) {
    size_t unit = 64 / sizeof(wide), per = (n + (size_t)G * unit - 1) / ((size_t)G * unit) * unit;
    *lo = (size_t)g * per < n ? (size_t)g * per : n;
    *hi = *lo + per < n ? *lo + per : n;
}

static wide *area(const Comm *c, int rank, size_t offset) { return (wide *)((char *)c->control[rank] + offset); }

// Own slice of a piece: the nodes' sums so far (from the node before) + this node's ranks in order, to the node after.
// On the last node that is the result.
static void sum_forward(Comm *c, size_t p, size_t n) {
    const CommInfo *i = &c->info;
    int first = i->node * i->G, place = i->rank % i->G, last = i->node == i->N - 1;
    size_t lo, hi, parity = p & 1;
    slice_of(&lo, &hi, n, place, i->G);
    n = hi - lo;
    wide *out = area(c, i->rank, last ? RESULT + parity * PIECE : PARTIAL);
    const wide *before = area(c, first, STAGE + parity * PIECE) + lo;
    if (i->node > 0) {
        before = area(c, i->rank, PREFIX);
        msgs_post(c, 0, i->rank - i->G, before, n * sizeof(wide));
        msgs_wait(c);
    }
    for (size_t at = 0; at < n; at += BLOCK) {
        const wide *sum = before + at;
        size_t m = n - at < BLOCK ? n - at : BLOCK;
        for (int g = i->node == 0; g < i->G; g++) {
            const wide *x = area(c, first + g, STAGE + parity * PIECE) + lo + at;
            for (size_t j = 0; j < m; j++) out[at + j] = sum[j] + x[j];
            sum = out + at;
        }
    }
    if (i->G == 1 && i->node == 0) memcpy(out, before, n * sizeof(wide)); // nothing to add yet
    if (!last) msgs_post(c, 1, i->rank + i->G, out, n * sizeof(wide));
}

// The result's way back from the last node to the first
static void sum_back(Comm *c, size_t p, size_t n) {
    const CommInfo *i = &c->info;
    size_t lo, hi;
    slice_of(&lo, &hi, n, i->rank % i->G, i->G);
    wide *result = area(c, i->rank, RESULT + (p & 1) * PIECE);
    if (i->node < i->N - 1) {
        Msg m = {.ptr = result, .bytes = (hi - lo) * sizeof(wide), .peer = i->rank + i->G, .tag = c->sequence};
        c->t->post(c, &m);
        c->t->wait(c, &m, 1);
    }
    if (i->node > 0) msgs_post(c, 1, i->rank - i->G, result, (hi - lo) * sizeof(wide));
}

static void sum_take(Comm *c, wide *x, size_t p, size_t n) {
    const CommInfo *i = &c->info;
    for (int g = 0; g < i->G; g++) {
        size_t lo, hi;
        slice_of(&lo, &hi, n, g, i->G);
        memcpy(x + lo, area(c, i->node * i->G + g, RESULT + (p & 1) * PIECE), (hi - lo) * sizeof(wide));
    }
}

// A pipeline over pieces: in one round a rank stages piece k, adds its slice of piece k-1, and takes the result of an
// earlier one, `lag` rounds later on each node before the last, since a result comes back one node per round. The nodes
// form a chain, so that the order of the sum is that of the ranks and each link carries every piece once each way.
// Every message is complete before a round's barrier: asleep there, a rank would not move it on.
void host_sum(Comm *c, wide *x, size_t n) {
    const CommInfo *i = &c->info;
    if (i->size == 1 || n == 0) return;
    const size_t piece = PIECE / sizeof(wide), n_pieces = (n + piece - 1) / piece, lag = (size_t)(i->N - 1 - i->node);
    msgs_begin(c);
    msgs_room(&c->call, 4);
    for (size_t k = 0; k < n_pieces + lag + 2; k++) {
#define LENGTH(p) ((p) + 1 < n_pieces ? piece : n - (p) * piece)
        if (k < n_pieces) memcpy(area(c, i->rank, STAGE + (k & 1) * PIECE), x + k * piece, LENGTH(k) * sizeof(wide));
        if (k >= 1 && k - 1 < n_pieces) sum_forward(c, k - 1, LENGTH(k - 1));
        if (k >= 1 + lag && k - 1 - lag < n_pieces) sum_back(c, k - 1 - lag, LENGTH(k - 1 - lag));
        msgs_wait(c);
        if (k >= 2 + lag) sum_take(c, x + (k - 2 - lag) * piece, k - 2 - lag, LENGTH(k - 2 - lag));
#undef LENGTH
        host_node_barrier(c);
    }
}

#define SMALL_REDUCTION(name, type, combine)                               \
    void name(Comm *c, type *x, int n) {                                   \
        int size = c->info.size;                                           \
        if (size == 1 || n == 0) return;                                   \
        type *all = host_alloc(SIZE(size, n, sizeof *all));                \
        comm_allgather(c, all, x, SIZE(n, sizeof *x));                     \
        for (int j = 0; j < n; j++) {                                      \
            type v = all[j];                                               \
            for (int r = 1; r < size; r++) {                               \
                type y = all[(size_t)r * (size_t)n + (size_t)j];           \
                v = combine;                                               \
            }                                                              \
            x[j] = v;                                                      \
        }                                                                  \
        free(all);                                                         \
    }
SMALL_REDUCTION(comm_sum_double, double, v + y)
SMALL_REDUCTION(comm_sum_int64, int64_t, v + y)
SMALL_REDUCTION(comm_max_double, double, y > v || y != y ? y : v) // a NaN wins: it must not vanish

// Binomial tree from the root
void comm_bcast(Comm *c, void *x, size_t bytes, int root) {
    const CommInfo *i = &c->info;
    CHECK_USAGE(root >= 0 && root < i->size, "broadcast from rank %d of %d", root, i->size);
    int me = (i->rank - root + i->size) % i->size, d = 1;
    msgs_begin(c);
    msgs_room(&c->call, 32 * msgs_count(bytes));
    while (d < i->size && !(me & d)) d *= 2;
    if (me) {
        msgs_post(c, 0, (i->rank - d + i->size) % i->size, x, bytes);
        msgs_wait(c);
    }
    for (d /= 2; d > 0; d /= 2)
        if (me + d < i->size) msgs_post(c, 1, (i->rank + d) % i->size, x, bytes);
    msgs_wait(c);
}

// ---- rows ------------------------------------------------------------------------------------------------------------
// A block is sent in as many messages as its room would take, whatever it holds, so that their number is known.
static int rows_messages(const Rows *a, int room) { return msgs_count(SIZE(room, (int64_t)a->row_bytes)); }

static void rows_post(Comm *c, int send, const Rows *a, int n, const int *n_send, int room, int tag) {
    const CommInfo *i = &c->info;
    size_t block = SIZE(room, (int64_t)a->row_bytes), bytes = send ? SIZE(n_send[n], (int64_t)a->row_bytes) : block, skip = block * (size_t)n;
    char *base = send ? (char *)a->from + skip : (char *)a->to + skip;
    for (int k = 0; k < rows_messages(a, room); k++) {
        size_t at = (size_t)k * MSG_MAX, left = at < bytes ? bytes - at : 0;
        Msg m = {.ptr = base + at, .bytes = left < MSG_MAX ? left : MSG_MAX, .peer = n * i->G + i->rank % i->G, .send = send, .tag = tag,
                 .bounded = !send};
        msg_post(c, &c->call, m);
        if (send) c->bytes_sent += m.bytes;
    }
}

// Messages m[0..k) brought one block of an array.
static void rows_count(const Comm *c, const Rows *a, const Msg *m, int k, int *n_recv, int known) {
    size_t bytes = 0;
    for (int j = 0; j < k; j++) bytes += m[j].bytes;
    CHECK_COMM(bytes % a->row_bytes == 0, "rank %d sent %zu bytes, no whole number of rows of %zu", m->peer, bytes, a->row_bytes);
    int rows = (int)(bytes / a->row_bytes);
    CHECK_COMM(!known || rows == *n_recv, "rank %d sent %d rows where rank %d expects %d: the ranks disagree on what they exchange", m->peer,
               rows, c->info.rank, *n_recv);
    *n_recv = rows;
}

void host_rows(Comm *c, const Rows *arrays, int n_arrays, int *n_recv, const int *n_send, int known, int room) {
    const CommInfo *i = &c->info;
    int count = 0;
    for (int a = 0; a < n_arrays; a++) count += rows_messages(&arrays[a], room);
    for (int n = 0; n < i->N; n++)
        CHECK_COMM(n == i->node || (n_send[n] >= 0 && n_send[n] <= room), "%d rows to node %d, expected 0 to %d", n_send[n], n, room);
    msgs_begin(c);
    msgs_room(&c->call, 2 * i->N * count);
    int tag = c->sequence + count % TAG_COUNTS * TAG_CALLS;
    for (int send = 0; send < 2; send++)
        for (int n = 0; n < i->N; n++)
            for (int a = 0; a < n_arrays && n != i->node; a++) rows_post(c, send, &arrays[a], n, n_send, room, tag);
    c->t->wait(c, c->call.msg, c->call.n);
    const Msg *m = c->call.msg;
    for (int n = 0; n < i->N; n++)
        for (int a = 0; a < n_arrays && n != i->node; a++) {
            int k = rows_messages(&arrays[a], room);
            rows_count(c, &arrays[a], m, k, &n_recv[n], known || a > 0);
            m += k;
        }
    if (!known) n_recv[i->node] = 0;
    c->call.n = 0;
}

// ---- blocks ----------------------------------------------------------------------------------------------------------
// Posts a list; `window` of a rank, `block_bytes` long blocks. per_node holds how many messages each node has in it.
static void blocks_post(Comm *c, int send, void *const *window, const BlockSeg *s, int n, size_t block_bytes, size_t at, size_t bytes) {
    const CommInfo *i = &c->info;
    memset(c->per_node, 0, SIZE(i->N, sizeof *c->per_node));
    for (int k = 0; k < n; k++) {
        CHECK_COMM(s[k].node >= 0 && s[k].node < i->N && s[k].node != i->node && s[k].rank / i->G == i->node && s[k].block >= 0,
                   "block %d of %d: node %d, rank %d, block %d: expected another node than %d, a rank of this one, a block >= 0", k, n,
                   s[k].node, s[k].rank, s[k].block, i->node);
        c->per_node[s[k].node] += msgs_count(bytes);
    }
    for (int k = 0; k < n; k++) {
        char *base = (char *)window[s[k].rank] + (size_t)s[k].block * block_bytes + at;
        int tag = c->sequence + c->per_node[s[k].node] % TAG_COUNTS * TAG_CALLS, peer = s[k].node * i->G + i->rank % i->G;
        for (int j = 0; j < msgs_count(bytes); j++) {
            size_t from = (size_t)j * MSG_MAX, left = bytes - from < MSG_MAX ? bytes - from : MSG_MAX;
            msg_post(c, &c->blocks, (Msg){.ptr = base + from, .bytes = left, .peer = peer, .send = send, .tag = tag});
        }
        if (send) c->bytes_sent += bytes;
    }
}

void host_blocks_start(Comm *c, void *const *to, const BlockSeg *recv, const int *n_recv, const void *const *from,
                       const BlockSeg *send, const int *n_send, size_t block_bytes, size_t at, size_t bytes) {
    CHECK_COMM(c->blocks.n == 0, "a transfer of blocks begins before the last one was finished");
    msgs_begin(c);
    msgs_room(&c->blocks, (*n_recv + *n_send) * msgs_count(bytes));
    blocks_post(c, 0, to, recv, *n_recv, block_bytes, at, bytes);
    blocks_post(c, 1, (void *const *)from, send, *n_send, block_bytes, at, bytes);
}

void host_blocks_poll(Comm *c) { c->t->poll(c, c->blocks.msg, c->blocks.n); }

void host_blocks_finish(Comm *c) {
    c->t->wait(c, c->blocks.msg, c->blocks.n);
    c->blocks.n = 0;
}

uint64_t comm_bytes_sent(const Comm *c) { return c->bytes_sent; }
