// Windows and collectives of the device, where its memory is the host's: sums in rank order, and what crosses nodes by messages.
#include "kernels/check.h"
#include "kernels/cpu/comm_impl.h"
#include "kernels/ledger.h"
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 1024 }; // elements that stay in the first-level cache

typedef struct Taken { // a window
    void **peer;
    size_t bytes;
    MemoryKind kind;
    struct Taken *next;
} Taken;

struct CommDev {
    Dev *d;         // may be gone when the group ends
    void **nowhere; // the table of windows that are only counted
    Taken *windows;
};

static CommDev *open_on(const Comm *c, Dev *d) {
    CommDev *v = host_alloc(sizeof *v);
    *v = (CommDev){.d = d, .nowhere = ledger_nowhere(c->info.size)};
    return v;
}
void comm_bind(Comm *world, Dev *d) { comm_dev_set(world, open_on(world, d)); }
CommDev *comm_dev_open(Comm *c, const CommDev *parent) { return parent ? open_on(c, parent->d) : NULL; }
void comm_dev_close(CommDev *v) {
    if (!v) return;
    for (Taken *w = v->windows, *next; w; w = next) {
        next = w->next;
        free(w);
    }
    free(v->nowhere);
    free(v);
}
void comm_dev_wait(CommDev *v) { (void)v; }

void **comm_window(Comm *c, size_t bytes, const char *what) {
    CommDev *v = comm_dev(c);
    if (!v) return host_window(c, bytes, what);
    Ledger *books = dev_ledger(v->d);
    ledger_add(books, bytes);
    if (books->counting) return v->nowhere;
    Taken *w = host_alloc(sizeof *w);
    *w = (Taken){host_window(c, bytes, what), bytes, books->kind, v->windows};
    v->windows = w;
    return w->peer;
}

void comm_window_free(Comm *c, void **peer) {
    CommDev *v = comm_dev(c);
    for (Taken **at = v ? &v->windows : NULL, *w; at && (w = *at); at = &w->next) {
        if (w->peer != peer) continue;
        *at = w->next;
        ledger_back(dev_ledger(v->d), w->kind, w->bytes);
        free(w);
        break;
    }
    host_window_free(c, peer);
}
void comm_node_barrier(Comm *c) { host_node_barrier(c); }
void comm_dev_barrier(Comm *c) { comm_barrier(c); }
void comm_dev_allgather(Comm *c, void *out, const void *in, size_t bytes) { comm_allgather(c, out, in, bytes); }
void comm_dev_sum_double(Comm *c, double *x, int n) { comm_sum_double(c, x, n); }
void comm_dev_sum_int64(Comm *c, int64_t *x, int n) { comm_sum_int64(c, x, n); }

// ---- sums, in rank order -----------------------------------------------------------------------------------------------
// A sum goes piece by piece, a piece being the next `step` elements of every rank's part. Place g of a node adds up the parts of
// the ranks with place g, which lie side by side in it by node: its slice, N steps long. Where a part has ended, a step holds what it
// held before, which is added up as well and taken by nobody.
typedef struct Cut {
    size_t n, step, pieces;
} Cut;

static Cut cut_of(const Comm *c, size_t n) {
    size_t line = 64 / sizeof(wide), most = PIECE / sizeof(wide) / (size_t)c->info.size / line * line, part = comm_part(c, 0, n).n;
    size_t pieces = (part + most - 1) / most;
    return (Cut){n, ((part + pieces - 1) / pieces + line - 1) / line * line, pieces};
}

// Elements of x that rank r's part has in piece p
static CommPart step_of(const Comm *c, int r, Cut cut, size_t p) {
    CommPart part = comm_part(c, r, cut.n);
    size_t skip = p * cut.step < part.n ? p * cut.step : part.n, left = part.n - skip;
    return (CommPart){part.at + skip, left < cut.step ? left : cut.step};
}

static wide *area(const Comm *c, int rank, size_t offset) { return (wide *)((char *)c->control[rank] + offset); }

static void sum_stage(Comm *c, const wide *x, Cut cut, size_t p) {
    const CommInfo *i = &c->info;
    wide *stage = area(c, i->rank, STAGE + (p & 1) * PIECE);
    for (int r = 0; r < i->size; r++) {
        CommPart s = step_of(c, r, cut, p);
        memcpy(stage + (size_t)(r % i->G * i->N + r / i->G) * cut.step, x + s.at, s.n * sizeof(wide));
    }
}

// Own slice of a piece: the nodes' sums so far (from the node before) + this node's ranks in order, to the node after.
// On the last node that is the result.
static void sum_forward(Comm *c, Cut cut, size_t p) {
    const CommInfo *i = &c->info;
    int first = i->node * i->G, last = i->node == i->N - 1;
    size_t n = (size_t)i->N * cut.step, lo = (size_t)(i->rank % i->G) * n, stage = STAGE + (p & 1) * PIECE;
    wide *out = area(c, i->rank, last ? RESULT : PARTIAL);
    const wide *before = area(c, first, stage) + lo;
    if (i->node > 0) {
        before = area(c, i->rank, PREFIX);
        msgs_post(c, 0, i->rank - i->G, before, n * sizeof(wide));
        msgs_wait(c);
    }
    for (size_t at = 0; at < n; at += BLOCK) {
        const wide *sum = before + at;
        size_t m = n - at < BLOCK ? n - at : BLOCK;
        for (int g = i->node == 0; g < i->G; g++) {
            const wide *x = area(c, first + g, stage) + lo + at;
            for (size_t j = 0; j < m; j++) out[at + j] = sum[j] + x[j];
            sum = out + at;
        }
    }
    if (i->G == 1 && i->node == 0) memcpy(out, before, n * sizeof(wide)); // nothing to add yet
    if (!last) msgs_post(c, 1, i->rank + i->G, out, n * sizeof(wide));
}

// The result's way back from the last node to the first: each takes its own step and passes on those of the nodes before it.
static void sum_back(Comm *c, wide *x, Cut cut, size_t p) {
    const CommInfo *i = &c->info;
    size_t bytes = cut.step * sizeof(wide), node = (size_t)i->node;
    wide *result = area(c, i->rank, RESULT);
    if (i->node < i->N - 1) {
        Msg m = {.ptr = result, .bytes = (node + 1) * bytes, .peer = i->rank + i->G, .tag = c->sequence};
        c->t->post(c, &m);
        c->t->wait(c, &m, 1);
    }
    if (i->node > 0) msgs_post(c, 1, i->rank - i->G, result, node * bytes);
    CommPart own = step_of(c, i->rank, cut, p);
    memcpy(x + own.at, result + node * cut.step, own.n * sizeof(wide));
}

// A pipeline over pieces: in one round a rank stages piece k, adds its slice of piece k-1, and takes the result of an
// earlier one, `lag` rounds later on each node before the last, since a result comes back one node per round. The nodes
// form a chain, so that the order of the sum is that of the ranks.
// Every message is complete before a round's barrier: asleep there, a rank would not move it on.
void comm_sum_part(Comm *c, wide *x, size_t n) {
    const CommInfo *i = &c->info;
    if (i->size == 1 || n == 0) return;
    const Cut cut = cut_of(c, n);
    const size_t lag = (size_t)(i->N - 1 - i->node);
    msgs_begin(c);
    msgs_room(&c->call, 4);
    for (size_t k = 0; k < cut.pieces + lag + 1; k++) {
        if (k < cut.pieces) sum_stage(c, x, cut, k);
        if (k >= 1 && k - 1 < cut.pieces) sum_forward(c, cut, k - 1);
        if (k >= 1 + lag) sum_back(c, x, cut, k - 1 - lag);
        msgs_wait(c);
        host_node_barrier(c);
    }
}

// Column first, as in an all-gather: what comes from the other nodes' ranks of this place lies beside the own in its window.
void comm_share_parts(Comm *c, void *x, size_t n, size_t elem_bytes) {
    const CommInfo *i = &c->info;
    if (i->size == 1 || n == 0) return;
    const size_t slot = PIECE / (size_t)i->N / 64 * 64, step = slot / elem_bytes; // 64 bytes hold any element
    const Cut cut = {n, step, (comm_part(c, 0, n).n + step - 1) / step};
    for (size_t p = 0; p < cut.pieces; p++) {
        size_t stage = STAGE + (p & 1) * PIECE;
        char *column = (char *)area(c, i->rank, stage);
        CommPart own = step_of(c, i->rank, cut, p);
        memcpy(column + (size_t)i->node * slot, (char *)x + own.at * elem_bytes, own.n * elem_bytes);
        msgs_begin(c);
        msgs_room(&c->call, 2 * i->N);
        for (int send = 0; send < 2; send++)
            for (int m = 0; m < i->N; m++) {
                int peer = m * i->G + i->rank % i->G, of = send ? i->rank : peer;
                size_t bytes = step_of(c, of, cut, p).n * elem_bytes;
                if (m != i->node) msgs_post(c, send, peer, column + (size_t)(of / i->G) * slot, bytes);
            }
        msgs_wait(c);
        host_node_barrier(c);
        for (int r = 0; r < i->size; r++) {
            CommPart s = step_of(c, r, cut, p);
            const char *from = (char *)area(c, i->node * i->G + r % i->G, stage) + (size_t)(r / i->G) * slot;
            if (r != i->rank) memcpy((char *)x + s.at * elem_bytes, from, s.n * elem_bytes);
        }
    }
    host_node_barrier(c); // all have read: the next call may write
}

// ---- rows ------------------------------------------------------------------------------------------------------------
// A block is sent in as many messages as its room would take, whatever it holds, so that their number is known.
static int rows_messages(const Rows *a, int room) { return msgs_count(SIZE(room, (int64_t)a->row_bytes)); }

static void rows_post(Comm *c, int send, const Rows *a, int n, const int *n_send, int room, int tag) {
    const CommInfo *i = &c->info;
    size_t block = SIZE(room, (int64_t)a->row_bytes), bytes = send ? SIZE(n_send[n], (int64_t)a->row_bytes) : block;
    size_t skip = block * (size_t)n;
    char *base = send ? (char *)a->from + skip : (char *)a->to + skip;
    for (int k = 0; k < rows_messages(a, room); k++) {
        size_t at = (size_t)k * MSG_MAX, left = at < bytes ? bytes - at : 0;
        Msg m = {.ptr = base + at, .bytes = left < MSG_MAX ? left : MSG_MAX, .peer = n * i->G + i->rank % i->G, .send = send,
                 .tag = tag, .bounded = !send};
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
    CHECK_COMM(!known || rows == *n_recv, "rank %d sent %d rows where rank %d expects %d: the ranks disagree on what they exchange",
               m->peer, rows, c->info.rank, *n_recv);
    *n_recv = rows;
}

void comm_rows(Comm *c, const Rows *arrays, int n_arrays, int *n_recv, const int *n_send, int known, int room) {
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
static void blocks_post(Comm *c, int send, void *const *window, const BlockSeg *s, int n, size_t block_bytes, size_t at,
                        size_t bytes) {
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

void comm_blocks_room(Comm *c, int most, size_t bytes) { (void)c, (void)most, (void)bytes; }

void comm_blocks_start(Comm *c, void *const *to, const BlockSeg *recv, const int *n_recv, const void *const *from,
                       const BlockSeg *send, const int *n_send, size_t block_bytes, size_t at, size_t bytes) {
    CHECK_COMM(c->blocks.n == 0, "a transfer of blocks begins before the last one was finished");
    msgs_begin(c);
    msgs_room(&c->blocks, (*n_recv + *n_send) * msgs_count(bytes));
    blocks_post(c, 0, to, recv, *n_recv, block_bytes, at, bytes);
    blocks_post(c, 1, (void *const *)from, send, *n_send, block_bytes, at, bytes);
}

int comm_blocks_poll(Comm *c) { return c->t->poll(c, c->blocks.msg, c->blocks.n); }

void comm_blocks_finish(Comm *c) {
    c->t->wait(c, c->blocks.msg, c->blocks.n);
    c->blocks.n = 0;
}

uint64_t comm_bytes_sent(const Comm *c) { return c->bytes_sent; }
