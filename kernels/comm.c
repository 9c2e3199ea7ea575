// Groups of ranks, windows, and collectives in rank order, on the few primitives of a transport (cpu/comm_impl.h).
//
// What stays within a node goes through shared memory: a control window of every rank of a group.
#include "kernels/cpu/comm_impl.h"
#include "kernels/check.h"
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PATIENCE_S = 1800 }; // a checkpoint of one rank may take that long

// ---- messages --------------------------------------------------------------------------------------------------------
void msgs_begin(Comm *c) { c->call.n = 0, c->sequence = (c->sequence + 1) % TAG_CALLS; }

// Room first: a posted message must not move.
void msgs_room(MsgList *l, int n) {
    if (n <= l->room) return;
    free(l->msg);
    l->room = n + n / 2 + 16;
    l->msg = host_alloc(SIZE(l->room, sizeof *l->msg));
}

int msgs_count(size_t bytes) { return (int)(bytes / MSG_MAX) + 1; }

void msg_post(Comm *c, MsgList *l, Msg m) {
    l->msg[l->n] = m;
    c->t->post(c, &l->msg[l->n++]);
}

void msgs_post(Comm *c, int send, int peer, const void *ptr, size_t bytes) {
    for (size_t at = 0; at < bytes || at == 0; at += MSG_MAX) {
        size_t n = bytes - at < MSG_MAX ? bytes - at : MSG_MAX;
        msg_post(c, &c->call, (Msg){.ptr = n ? (char *)ptr + at : NULL, .bytes = n, .peer = peer, .send = send, .tag = c->sequence});
    }
}

void msgs_wait(Comm *c) {
    c->t->wait(c, c->call.msg, c->call.n);
    c->call.n = 0;
}

void msg_check(const Comm *c, Msg *m, int tag, size_t bytes) {
    int fits = m->bounded ? bytes <= m->bytes : bytes == m->bytes;
    CHECK_COMM(tag == m->tag && fits, "rank %d sent %zu bytes, of %d messages in its call %d, where rank %d expects %s%zu bytes, of "
               "%d in its call %d (numbers cut to %d and %d): the ranks disagree on what they exchange", m->peer, bytes,
               tag / TAG_CALLS, tag % TAG_CALLS, c->info.rank, m->bounded ? "at most " : "", m->bytes, m->tag / TAG_CALLS, m->tag % TAG_CALLS,
               TAG_COUNTS, TAG_CALLS);
    m->bytes = bytes;
}

void msg_late(const Comm *c, const Msg *m) {
    die(STATUS_COMM, __FILE__, __LINE__, "rank %d has waited %g s for rank %d to %s %zu bytes in call %d (hint: is that rank stopped, "
        "or the machine swapping? MOE_PATIENCE=SECONDS waits longer)", c->info.rank, c->patience_s, m->peer, m->send ? "take" : "send",
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

static void window_close(Comm *c, Window *w) {
    for (int r = 0; r < c->info.size; r++)
        if (w->peer[r]) c->t->window_unmap(w->peer[r], w->bytes, r == c->info.rank);
    free(w->peer);
    free(w);
}

void host_window_free(Comm *c, void **peer) {
    Window **at = &c->windows;
    while (*at && (*at)->peer != peer) at = &(*at)->next;
    Window *w = *at;
    CHECK_USAGE(w, "a window is given back that is not this group's");
    *at = w->next;
    node_meet(c); // no peer works in it any more
    window_close(c, w);
}

// ---- groups ----------------------------------------------------------------------------------------------------------
static void start(Comm *c) {
    // the machine's cores, not those this process is bound to: the launcher may have given each rank its own
    c->spins = c->info.local_ranks <= sysconf(_SC_NPROCESSORS_ONLN) ? 2000 : 0;
    CHECK_USAGE(c->info.size <= PIECE / 64, "%d ranks, at most %d can sum up", c->info.size, PIECE / 64);
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
    comm_dev_close(c->dev);
    node_meet(c); // a window's owner must not take it from under a peer
    for (Window *w = c->windows, *next; w; w = next) {
        next = w->next;
        window_close(c, w);
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
    c->dev = comm_dev_open(c, parent->dev);
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
    comm_dev_wait(c->dev);
    comm_close(c);
    c->t->release(c->group, c->info.rank);
    free(c);
}

const CommInfo *comm_info(const Comm *c) { return &c->info; }
double comm_patience_s(const Comm *c) { return c->patience_s; }

CommPart comm_part(const Comm *c, int rank, size_t n) {
    size_t blocks = n / PART_UNIT + (n % PART_UNIT != 0), R = (size_t)c->info.size, per = (blocks + R - 1) / R * PART_UNIT;
    size_t at = per * (size_t)rank < n ? per * (size_t)rank : n;
    return (CommPart){at, n - at < per ? n - at : per};
}

void comm_sum(Comm *c, wide *x, size_t n) {
    comm_sum_part(c, x, n);
    comm_share_parts(c, x, n, sizeof *x);
}

CommDev *comm_dev(const Comm *c) { return c->dev; }
void comm_dev_set(Comm *c, CommDev *v) { c->dev = v; }

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
    comm_dev_wait(c->dev);
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

// ---- small reductions, in rank order ----------------------------------------------------------------------------------
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

void comm_move(Comm *c, void *x, size_t bytes, int from, int to) {
    const CommInfo *i = &c->info;
    CHECK_USAGE(from >= 0 && from < i->size && to >= 0 && to < i->size, "from rank %d to rank %d of %d", from, to, i->size);
    msgs_begin(c);
    if (from == to || (i->rank != from && i->rank != to)) return;
    msgs_room(&c->call, msgs_count(bytes));
    msgs_post(c, i->rank == from, i->rank == from ? to : from, x, bytes);
    msgs_wait(c);
}
