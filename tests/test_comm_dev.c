// Windows and collectives of the device, on whatever backend is linked: between virtual ranks, all memory seen by uploads and
// downloads only. Every rank knows what the others hold.
#include "kernels/check.h"
#include "kernels/comm.h"
#include "tests/common/child.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#ifdef BACKEND_cpu
enum { GPU = 0 };
#else
enum { GPU = 1 };
#endif

typedef struct Bench { // one rank's
    Comm *c;
    const CommInfo *i;
    Dev *d;
} Bench;

// The ranks cannot go on after a failure of one: it ends them all.
#define EXPECT(cond, ...)                                                                \
    do {                                                                                 \
        if (!(cond)) {                                                                   \
            char what[512];                                                              \
            snprintf(what, sizeof what, __VA_ARGS__);                                    \
            die(1, __FILE__, __LINE__, "of %d ranks in %d nodes: %s", b->i->size, b->i->N, what); \
        }                                                                                \
    } while (0)

static uint64_t mix(uint64_t a, uint64_t b) { // Murmur3's finaliser over two words
    uint64_t h = a * 0x9E3779B97F4A7C15ull + b;
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCDull;
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53ull;
    return h ^ h >> 33;
}
static unsigned char byte_of(int rank, int call, size_t j) { return (unsigned char)mix((uint64_t)(rank * 1000 + call), j); }

static void *upload(Bench *b, const void *host, size_t bytes) {
    void *p = dev_alloc(b->d, bytes, "test");
    dev_upload(b->d, p, host, bytes);
    return p;
}

static void fill(unsigned char *x, size_t n, int rank, int call) {
    for (size_t j = 0; j < n; j++) x[j] = byte_of(rank, call, j);
}

static void case_gather(Bench *b) {
    static const size_t sizes[] = {0, 1, 7, 64, 512, 512, 512, 8193, 70001};
    for (int k = 0; k < 9; k++) {
        size_t n = sizes[k], all = n * (size_t)b->i->size;
        unsigned char *in = host_alloc(n), *out = host_alloc(all + 1);
        fill(in, n, b->i->rank, k);
        memset(out, 0xEE, all + 1);
        void *in_d = upload(b, in, n), *out_d = upload(b, out, all + 1);
        comm_dev_allgather(b->c, out_d, in_d, n);
        dev_download(b->d, out, out_d, all + 1);
        for (size_t j = 0; j < all; j++)
            EXPECT(out[j] == byte_of((int)(j / n), k, j % n), "all-gather of %zu: byte %zu is %d", n, j, out[j]);
        EXPECT(out[all] == 0xEE, "all-gather of %zu writes past its end", n);
        free(in), free(out);
    }
}

// Values whose sum depends on its order
static wide value(int rank, int call, size_t j) { return (wide)((double)(mix((uint64_t)(rank + 50 * call),
    j) % 2000001) / 7e5 * (rank % 3 ? 1 : -300)); }

static void case_sum(Bench *b, size_t largest) {
    size_t sizes[] = {0, 1, 5, 1000, largest, 33};
    for (int k = 0; k < 6; k++) {
        size_t n = sizes[k];
        wide *x = host_alloc(n * sizeof *x), *y = host_alloc(n * sizeof *y), *z = host_alloc(n * sizeof *z);
        for (size_t j = 0; j < n; j++) x[j] = value(b->i->rank, k, j);
        wide *x_d = upload(b, x, n * sizeof *x);
        comm_sum(b->c, x_d, n);
        dev_download(b->d, y, x_d, n * sizeof *y);
        for (size_t j = 0; j < n; j += n > 2000 ? 97 : 1) {
            wide want = value(0, k, j);
            for (int r = 1; r < b->i->size; r++) want += value(r, k, j);
            EXPECT(y[j] == want, "sum of %zu: element %zu is %.9g, in rank order %.9g", n, j, (double)y[j], (double)want);
        }
        dev_upload(b->d, x_d, x, n * sizeof *x);
        comm_sum_part(b->c, x_d, n);
        dev_download(b->d, z, x_d, n * sizeof *z);
        CommPart own = comm_part(b->c, b->i->rank, n);
        for (size_t j = 0; j < n; j++) { // the same bits in the own part, nothing elsewhere
            wide want = j >= own.at && j < own.at + own.n ? y[j] : x[j];
            EXPECT(z[j] == want, "sums of a part of %zu: element %zu is %.9g, expected %.9g", n, j, (double)z[j], (double)want);
        }
        free(x), free(y), free(z);
    }
}

static void case_parts(Bench *b) {
    static const size_t sizes[] = {0, 1, 65, 20011}, bytes[] = {4, 2, 12, 2};
    for (int k = 0; k < 4; k++) {
        size_t n = sizes[k] * bytes[k];
        unsigned char *x = host_alloc(n + 1);
        fill(x, n, b->i->rank, k);
        x[n] = 0xEE;
        void *x_d = upload(b, x, n + 1);
        comm_share_parts(b->c, x_d, sizes[k], bytes[k]);
        dev_download(b->d, x, x_d, n + 1);
        for (int r = 0; r < b->i->size; r++) {
            CommPart p = comm_part(b->c, r, sizes[k]);
            for (size_t j = p.at * bytes[k]; j < (p.at + p.n) * bytes[k]; j++)
                EXPECT(x[j] == byte_of(r, k, j), "parts of %zu: byte %zu, of rank %d", sizes[k], j, r);
        }
        EXPECT(x[n] == 0xEE, "sharing parts of %zu writes past their end", sizes[k]);
        free(x);
    }
}

static void case_small_sums(Bench *b) {
    for (int k = 0; k < 4; k++) {
        int n = k == 3 ? 10000 : 1 + 20 * k;
        double *x = host_alloc(SIZE(n, sizeof *x));
        int64_t *y = host_alloc(SIZE(n, sizeof *y));
        for (int j = 0; j < n; j++) x[j] = value(b->i->rank, k, (size_t)j) / 3.0, y[j] = (int64_t)mix((uint64_t)b->i->rank,
            (uint64_t)j) >> 8;
        double *x_d = upload(b, x, SIZE(n, sizeof *x));
        int64_t *y_d = upload(b, y, SIZE(n, sizeof *y));
        comm_dev_sum_double(b->c, x_d, n);
        comm_dev_sum_int64(b->c, y_d, n);
        dev_download(b->d, x, x_d, SIZE(n, sizeof *x));
        dev_download(b->d, y, y_d, SIZE(n, sizeof *y));
        for (int j = 0; j < n; j++) {
            double sum = 0;
            int64_t total = 0;
            for (int r = 0; r < b->i->size; r++) {
                double v = value(r, k, (size_t)j) / 3.0;
                sum = r ? sum + v : v;
                total += (int64_t)mix((uint64_t)r, (uint64_t)j) >> 8;
            }
            EXPECT(x[j] == sum && y[j] == total, "small sums of %d: element %d", n, j);
        }
        free(x), free(y);
    }
}

// All write own words, then into their peers' windows, then all is read
static void case_window(Bench *b) {
    enum { WORDS = 700 };
    const CommInfo *i = b->i;
    uint64_t **w = (uint64_t **)comm_window(b->c, WORDS * 8, "test"), host[WORDS];
    dev_download(b->d, host, w[i->rank], sizeof host);
    for (int j = 0; j < WORDS; j++) EXPECT(host[j] == 0, "a new window holds something at %d", j);
    for (int r = 0; r < i->size; r++) EXPECT((w[r] != NULL) == (r / i->G == i->node), "window of rank %d is %p", r, (void *)w[r]);
    comm_barrier(b->c); // a peer may write now
    for (int round = 0; round < 5; round++) {
        for (int j = 0; j < WORDS; j++) host[j] = mix((uint64_t)(i->rank * 1000 + round), (uint64_t)j);
        dev_upload(b->d, w[i->rank] + 100, host + 100, sizeof host - 800);
        for (int r = i->node * i->G; r < (i->node + 1) * i->G; r++) {
            host[0] = mix((uint64_t)(r * 77 + round), (uint64_t)i->rank);
            dev_upload(b->d, w[r] + i->rank, host, 8);
        }
        if (round % 2) comm_node_barrier(b->c);
        else comm_dev_barrier(b->c);
        for (int r = i->node * i->G; r < (i->node + 1) * i->G; r++) {
            dev_download(b->d, host, w[r], sizeof host);
            for (int j = 100; j < WORDS; j++)
                EXPECT(host[j] == mix((uint64_t)(r * 1000 + round), (uint64_t)j), "round %d: word %d of rank %d", round, j, r);
            for (int s = i->node * i->G; s < (i->node + 1) * i->G; s++)
                EXPECT(host[s] == mix((uint64_t)(r * 77 + round), (uint64_t)s), "round %d: rank %d's word at rank %d", round, s,
                       r);
        }
        comm_node_barrier(b->c);
    }
}

// ---- rows ------------------------------------------------------------------------------------------------------------------
enum { ROOM = 13, WIDTHS = 3 };
static const size_t widths[WIDTHS] = {64, 4, 12};
static int rows_from(int call, int a, int node) { return call == 2 ? 0 : call == 3 ? ROOM : (int)(mix((uint64_t)(call * 100 + a),
    (uint64_t)node) % (ROOM + 1)); }

static void case_rows(Bench *b) {
    const CommInfo *i = b->i;
    uint64_t sent = comm_bytes_sent(b->c);
    char *from[WIDTHS], *to[WIDTHS];
    for (int a = 0; a < WIDTHS; a++) {
        from[a] = ((char **)comm_window(b->c, SIZE(i->N, ROOM, (int64_t)widths[a]), "from"))[i->rank];
        to[a] = ((char **)comm_window(b->c, SIZE(i->N, ROOM, (int64_t)widths[a]), "to"))[i->rank];
    }
    for (int call = 0; call < 6; call++) {
        int *n_send = host_alloc(SIZE(i->N, sizeof(int))), *n_recv = host_alloc(SIZE(i->N, sizeof(int))),
            n_arrays = 1 + call % WIDTHS;
        for (int n = 0; n < i->N; n++) n_send[n] = n == i->node ? 99 : rows_from(call, i->rank, n),
            n_recv[n] = n == i->node ? 0 : rows_from(call, n * i->G + i->rank % i->G, i->node);
        int *n_send_d = upload(b, n_send, SIZE(i->N, sizeof(int))), *n_recv_d = upload(b, n_recv, SIZE(i->N, sizeof(int)));
        Rows arrays[WIDTHS];
        for (int a = 0; a < n_arrays; a++) {
            size_t bytes = SIZE(i->N, ROOM, (int64_t)widths[a]);
            unsigned char *host = host_alloc(bytes);
            fill(host, bytes, i->rank, 10 * call + a);
            dev_upload(b->d, from[a], host, bytes);
            memset(host, 0xEE, bytes);
            dev_upload(b->d, to[a], host, bytes);
            arrays[a] = (Rows){to[a], from[a], widths[a]};
            for (int n = 0; n < i->N; n++)
                if (n != i->node) sent += (uint64_t)n_send[n] * widths[a];
            free(host);
        }
        comm_rows(b->c, arrays, n_arrays, n_recv_d, n_send_d, call % 2, ROOM);
        dev_download(b->d, n_recv, n_recv_d, SIZE(i->N, sizeof(int)));
        for (int n = 0; n < i->N; n++) {
            int peer = n * i->G + i->rank % i->G, want = n == i->node ? 0 : rows_from(call, peer, i->node);
            EXPECT(n_recv[n] == want, "call %d: %d rows from node %d, expected %d", call, n_recv[n], n, want);
            for (int a = 0; a < n_arrays; a++) {
                size_t block = ROOM * widths[a];
                unsigned char *host = host_alloc(block);
                dev_download(b->d, host, to[a] + (size_t)n * block, block);
                for (size_t j = 0; j < (size_t)want * widths[a]; j++)
                    EXPECT(host[j] == byte_of(peer, 10 * call + a, (size_t)i->node * block + j), "call %d, array %d: byte %zu from node %d", call, a, j, n);
                for (size_t j = 0; j < block && n == i->node; j++) EXPECT(host[j] == 0xEE,
                    "call %d: the own node's block was written", call);
                free(host);
            }
        }
        EXPECT(comm_bytes_sent(b->c) == sent, "call %d: %llu bytes sent, counted %llu", call, (unsigned long long)sent,
               (unsigned long long)comm_bytes_sent(b->c));
        free(n_send), free(n_recv);
    }
}

// ---- blocks ----------------------------------------------------------------------------------------------------------------
enum { BLOCKS = 6, BLOCK_BYTES = 208, AT = 16, PART = 144 }; // AT, PART: the piece of a block that goes

// Segment k from node n to node m, of the ranks of one place: from which rank's window and block, into which. How many: 0 to 4
static int n_blocks(int call, int n, int m, int place) { return (int)(mix((uint64_t)(call * 64 + n),
    (uint64_t)(m * 64 + place)) % 5); }
static int pick(int call, int n, int m, int place, int k, int what, int below) {
    return (int)(mix((uint64_t)(call * 64 + n), (uint64_t)((m * 64 + place) * 64 + k * 4 + what)) % (uint64_t)below);
}

static void case_blocks(Bench *b) {
    const CommInfo *i = b->i;
    size_t bytes = BLOCKS * BLOCK_BYTES * 5, all = SIZE(i->N, (int64_t)bytes);
    int place = i->rank % i->G, first = i->node * i->G;
    uint64_t sent = comm_bytes_sent(b->c);
    comm_blocks_room(b->c, 4, PART);
    void **from = comm_window(b->c, bytes, "blocks from"), **to = comm_window(b->c, SIZE(i->G, (int64_t)all), "blocks to");
    void **from_d = upload(b, from, SIZE(i->size, sizeof *from)), **to_d = upload(b, to, SIZE(i->size, sizeof *to));
    unsigned char *host = host_alloc(SIZE(i->G, (int64_t)all));
    for (int call = 0; call < 4; call++) {
        fill(host, bytes, i->rank, 200 + call);
        dev_upload(b->d, from[i->rank], host, bytes);
        memset(host, 0xEE, SIZE(i->G, (int64_t)all));
        dev_upload(b->d, to[i->rank], host, SIZE(i->G, (int64_t)all));
        BlockSeg *send = host_alloc(SIZE(i->N, 5, sizeof *send)), *recv = host_alloc(SIZE(i->N, 5, sizeof *recv));
        int n_send = 0, n_recv = 0;
        for (int k = 0; k < 5; k++) // nodes in turn: what goes to one of them does not stand together
            for (int m = 0; m < i->N; m++) {
                if (m == i->node) continue;
                if (k < n_blocks(call, i->node, m, place))
                    send[n_send++] = (BlockSeg){m, first + pick(call, i->node, m, place, k, 0, i->G), pick(call, i->node, m,
                        place, k, 1, BLOCKS * 5)};
                if (k < n_blocks(call, m, i->node, place)) // every place its own blocks
                    recv[n_recv++] = (BlockSeg){m, first + pick(call, m, i->node, place, k, 2, i->G),
                                                ((place * i->N + m) * 5 + k) * BLOCKS};
            }
        int *n_send_d = upload(b, &n_send, sizeof n_send), *n_recv_d = upload(b, &n_recv, sizeof n_recv);
        BlockSeg *send_d = upload(b, send, SIZE(i->N, 5, sizeof *send)), *recv_d = upload(b, recv, SIZE(i->N, 5, sizeof *recv));
        comm_node_barrier(b->c);
        comm_blocks_start(b->c, to_d, recv_d, n_recv_d, (const void *const *)from_d, send_d, n_send_d, BLOCK_BYTES, AT, PART);
        comm_blocks_poll(b->c);
        comm_node_barrier(b->c); // other meetings, meanwhile
        comm_blocks_finish(b->c);
        comm_node_barrier(b->c);
        sent += (uint64_t)n_send * PART;
        dev_download(b->d, host, to[i->rank], SIZE(i->G, (int64_t)all));
        size_t found = 0, expected = 0;
        for (size_t j = 0; j < SIZE(i->G, (int64_t)all); j++) found += host[j] != 0xEE;
        for (int p = 0; p < i->G; p++)
            for (int m = 0; m < i->N; m++)
                for (int k = 0; m != i->node && k < n_blocks(call, m, i->node, p); k++) {
                    if (first + pick(call, m, i->node, p, k, 2, i->G) != i->rank) continue;
                    int owner = m * i->G + pick(call, m, i->node, p, k, 0, i->G), block = pick(call, m, i->node, p, k, 1,
                        BLOCKS * 5);
                    const unsigned char *got = host + (size_t)(((p * i->N + m) * 5 + k) * BLOCKS) * BLOCK_BYTES + AT;
                    for (size_t j = 0; j < PART; j++) {
                        unsigned char want = byte_of(owner, 200 + call, (size_t)block * BLOCK_BYTES + AT + j);
                        EXPECT(got[j] == want, "call %d: block %d of rank %d, byte %zu", call, block, owner, j);
                        expected += want != 0xEE;
                    }
                }
        EXPECT(found == expected, "call %d: %zu bytes of the target changed, expected %zu", call, found, expected);
        EXPECT(comm_bytes_sent(b->c) == sent, "call %d: %llu bytes sent, counted %llu", call, (unsigned long long)sent,
               (unsigned long long)comm_bytes_sent(b->c));
        free(send), free(recv);
    }
    free(host);
}

// ---- ranks -----------------------------------------------------------------------------------------------------------------
static void cases(Bench *b, size_t largest) {
    case_gather(b);
    case_sum(b, largest);
    case_parts(b);
    case_small_sums(b);
    case_window(b);
    case_rows(b);
    case_blocks(b);
}

typedef struct Layout {
    int ranks, nodes;
    const char *devices; // of the emulation: enough for all ranks, and what crosses nodes goes through NCCL
    const char *wire;    // what of NCCL is in use: "windows" and messages; "puts": windows and puts
} Layout;

static void rank_body(Comm *world, void *arg) {
    (void)arg;
    const CommInfo *i = comm_info(world);
    Dev *d = dev_init((DevOptions){.threads = 1, .poison = 1, .place = i->rank, .shared = 1});
    comm_bind(world, d);
    Bench b = {world, i, d};
    cases(&b, i->size == 2 ? (1 << 20) + 1001 : 5003); // more than one piece
    for (int n = 1; n <= i->size; n++) {
        if (i->size != 4 || i->size % n || (i->G % n && n % i->G)) continue;
        Comm *groups[] = {comm_block(world, n), comm_stride(world, n)};
        for (int g = 0; g < 2; g++) {
            Bench part = {groups[g], comm_info(groups[g]), d};
            cases(&part, 77);
        }
        comm_free(groups[0]), comm_free(groups[1]);
    }
    comm_barrier(world);
    dev_free(d);
}

static void run_in(const Layout *l, void (*body)(Comm *, void *)) {
    setenv("EMU_DEVICES", l->devices, 1);
    if (!strcmp(l->wire, "windows") || !strcmp(l->wire, "puts")) {
        char node[16];
        snprintf(node, sizeof node, "%d", l->ranks / l->nodes);
        setenv("MOE_WINDOWS", "nccl", 1);
        setenv("MOE_WIRE", strcmp(l->wire, "puts") ? "messages" : "puts", 1);
        setenv("EMU_LSA", node, 1); // no pointers from node to node
    }
    comm_run(NULL, NULL, l->ranks, l->nodes, body, (void *)l);
}
static void run_layout(void *arg) { run_in(arg, rank_body); }

static void collectives(void **state) {
    (void)state;
    static Layout layouts[] = {
        {1, 1, "1", "nothing"},  {2, 1, "1", "nothing"},  {2, 2, "1", "nothing"},  {3, 1, "1", "nothing"},
        {4, 1, "1", "nothing"},  {4, 2, "1", "nothing"},  {4, 4, "1", "nothing"},  {6, 3, "1", "nothing"},
        {2, 1, "2", "messages"}, {2, 2, "2", "messages"}, {4, 2, "4", "messages"}, {6, 3, "6", "messages"},
        {4, 1, "4", "windows"},  {4, 2, "4", "windows"},  {2, 2, "2", "puts"},     {4, 2, "4", "puts"},     {6, 3, "6", "puts"},
    };
    for (size_t k = 0; k < sizeof layouts / sizeof *layouts; k++) {
        Child c = child_call(run_layout, &layouts[k]);
        if (c.status) fail_msg("%d ranks in %d nodes on %s devices, by %s of NCCL: status %d\n%s", layouts[k].ranks, layouts[k].nodes,
                               layouts[k].devices, layouts[k].wire, c.status, c.out);
    }
}

// The counterpart sends another number of rows than is expected, or of blocks: the run ends, with a word about it.
static void disagree(Comm *world, void *arg) {
    const CommInfo *i = comm_info(world);
    int kind = *(int *)arg;
    Dev *d = dev_init((DevOptions){.threads = 1, .place = i->rank, .shared = 1});
    comm_bind(world, d);
    Bench b = {world, i, d};
    void **w = comm_window(world, 4096, "test"), **w_d = upload(&b, w, SIZE(i->size, sizeof *w));
    int counts[2] = {1, 1}, *n_send = upload(&b, counts, sizeof counts), wrong[2] = {2, 2}, *n_recv = upload(&b,
        kind == 0 ? wrong : counts, sizeof counts);
    if (kind == 0) {
        comm_rows(world, &(Rows){w[i->rank], (char *)w[i->rank] + 2048, 16}, 1, n_recv, n_send, 1, 4);
    } else {
        BlockSeg seg = {1 - i->node, i->rank, 0}, *list = upload(&b, &seg, sizeof seg);
        int none = 0, *zero = upload(&b, &none, sizeof none);
        comm_blocks_start(world, w_d, list, zero, (const void *const *)w_d, list, n_send, 16, 0, 16);
        comm_blocks_finish(world);
    }
    dev_download(d, counts, n_recv, sizeof counts);
    comm_barrier(world);
}
static void run_disagree(void *arg) { comm_run(NULL, NULL, 2, 2, disagree, arg); }
static void disagreements(void **state) {
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        setenv("MOE_PATIENCE", "3", 1);
        Child c = child_call(run_disagree, &kind);
        assert_true(c.status > 0);
        assert_non_null(strstr(c.out, kind == 0 ? "disagree" : "rank"));
    }
}

// A rank never comes. The others wait as long as they are told to, once, whatever else they have to do, and say so.
static void stay_away(Comm *world, void *arg) {
    const CommInfo *i = comm_info(world);
    const Layout *l = arg;
    Dev *d = dev_init((DevOptions){.threads = 1, .place = i->rank, .shared = 1});
    comm_bind(world, d);
    Bench b = {world, i, d};
    char *row = ((char **)comm_window(world, 4096, "test"))[i->rank];
    int zero[2] = {0, 0}, *n_send = upload(&b, zero, sizeof zero), *n_recv = upload(&b, zero, sizeof zero);
    while (i->rank == 2) pause();
    if (!strcmp(l->wire, "nothing")) {
        comm_node_barrier(world);
        comm_dev_allgather(world, row, n_send, 8);
        comm_sum(world, upload(&b, zero, sizeof zero), 1);
        comm_dev_barrier(world);
    }
    comm_rows(world, &(Rows){row, row + 2048, 16}, 1, n_recv, n_send, 0, 4);
    dev_download(d, zero, n_recv, sizeof zero);
    printf("rank %d went on without rank 2", i->rank);
    while (i->rank) pause();
}
static void run_stay_away(void *arg) { run_in(arg, stay_away); }
static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static void absences(void **state) {
    (void)state;
    static Layout layouts[] = {{4, 1, "1", "nothing"}, {4, 2, "1", "nothing"}, {4, 2, "4", "puts"}};
    setenv("MOE_PATIENCE", "2", 1);
    for (int k = 0; k < 3; k++) {
        double begin = seconds();
        Child c = child_call(run_stay_away, &layouts[k]);
        const char *who = GPU && k != 1 ? "rank 2 to meet rank" : "rank"; // on two nodes also rank 3 may be late, as it waits for rank 2
        if (c.status != STATUS_COMM || !strstr(c.out, "waited 2 s") || !strstr(c.out, who))
            fail_msg("%d nodes, %s of NCCL: status %d\n%s", layouts[k].nodes, layouts[k].wire, c.status, c.out);
        assert_true(seconds() - begin < 12); // a rank other than 0 speaks 5 s later
    }
    unsetenv("MOE_PATIENCE");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(collectives), cmocka_unit_test(disagreements), cmocka_unit_test(absences)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
