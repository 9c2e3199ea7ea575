#include "tests/common/comm_cases.h"
#include "kernels/check.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// The ranks cannot go on after a failure of one: it ends them all.
#define EXPECT(cond, ...)                                                                                            \
    do {                                                                                                             \
        if (!(cond)) {                                                                                               \
            char what[512];                                                                                          \
            snprintf(what, sizeof what, __VA_ARGS__);                                                                \
            die(1, __FILE__, __LINE__, "of %d (N %d, G %d): %s", comm_info(c)->size, comm_info(c)->N, comm_info(c)->G, what); \
        }                                                                                                            \
    } while (0)

// Murmur3's finaliser over two words: every rank knows what the others hold
static uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t h = a * 0x9E3779B97F4A7C15ull + b;
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCDull;
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53ull;
    return h ^ h >> 33;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void dawdle(uint64_t h) { // so that ranks arrive in many orders
    if (h % 4 == 0) usleep((useconds_t)(h / 4 % 200));
}

static void case_info(Comm *c) {
    const CommInfo *i = comm_info(c);
    EXPECT(i->size == i->N * i->G && i->rank >= 0 && i->rank < i->size && i->node == i->rank / i->G, "node %d", i->node);
    EXPECT(i->local_ranks >= i->G && i->name[0], "local ranks %d", i->local_ranks);
}

static void case_allgather(Comm *c) {
    const CommInfo *i = comm_info(c);
    static const size_t sizes[] = {0, 1, 7, 64, 1000, 8191, 8192, 8193, 65536, 70001, 200003};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        size_t n = sizes[k], all = n * (size_t)i->size;
        unsigned char *in = host_alloc(n), *out = host_alloc(all + 1);
        for (size_t j = 0; j < n; j++) in[j] = (unsigned char)mix((uint64_t)i->rank * 100 + k, j);
        memset(out, 0xEE, all + 1);
        dawdle(mix((uint64_t)i->rank, k));
        comm_allgather(c, out, in, n);
        for (size_t j = 0; j < all; j++)
            EXPECT(out[j] == (unsigned char)mix(j / n * 100 + k, j % n), "all-gather of %zu: byte %zu is %d", n, j, out[j]);
        EXPECT(out[all] == 0xEE, "all-gather of %zu writes past its end", n);
        free(in), free(out);
    }
    for (int k = 0; k < 300; k++) { // slots in turn: a slow reader must still find its blocks
        int *out = host_alloc(SIZE(i->size, sizeof *out)), in = k * 1000 + i->rank;
        comm_allgather(c, out, &in, sizeof in);
        dawdle(mix((uint64_t)i->rank, (uint64_t)k));
        for (int r = 0; r < i->size; r++) EXPECT(out[r] == k * 1000 + r, "all-gather %d: rank %d gave %d", k, r, out[r]);
        free(out);
    }
}

// Element j of rank r in a sum: of mixed size and sign, so that another order of the ranks gives other bits
static wide value(int r, size_t j) {
    uint64_t h = mix((uint64_t)r + 17, j);
    return (wide)ldexp((double)(int64_t)h, (int)(h % 20) - 70);
}

static void case_sum(Comm *c) {
    const CommInfo *i = comm_info(c);
    static const size_t sizes[] = {0, 1, 15, 16, 17, 63, 64, 65, 1000, 65535, 65536, 65537, 200005};
    int order_matters = 0;
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        size_t n = sizes[k];
        wide *x = host_alloc((n + 1) * sizeof *x), *y = host_alloc((n + 1) * sizeof *y);
        for (size_t j = 0; j < n; j++) x[j] = y[j] = value(i->rank, j + k);
        x[n] = y[n] = 123;
        dawdle(mix((uint64_t)i->rank, k));
        comm_sum(c, x, n);
        comm_sum_part(c, y, n);
        CommPart own = comm_part(c, i->rank, n);
        EXPECT(own.n == 0 || memcmp(y + own.at, x + own.at, own.n * sizeof *x) == 0, "sums of a part of %zu: other bits", n);
        for (size_t j = 0; j <= n; j += n > 1000 && j + 100 < n ? 13 : 1) { // the rest is as it was
            wide want = j < n ? value(i->rank, j + k) : 123;
            EXPECT((j >= own.at && j < own.at + own.n) || y[j] == want, "sums of a part of %zu: element %zu is %.17g, expected %.17g", n,
                   j, (double)y[j], (double)want);
        }
        for (size_t j = 0; j < n; j += n > 1000 && j + 100 < n ? 7 : 1) { // fewer than a cache line's, whose owner may differ
            wide up = value(0, j + k), down = value(i->size - 1, j + k);
            for (int r = 1; r < i->size; r++) up += value(r, j + k), down += value(i->size - 1 - r, j + k);
            EXPECT(memcmp(&up, &x[j], sizeof up) == 0, "sum of %zu: element %zu is %.17g, in rank order %.17g", n, j,
                   (double)x[j], (double)up);
            order_matters |= up != down;
        }
        EXPECT(x[n] == 123, "sum of %zu writes past its end", n);
        free(x), free(y);
    }
    EXPECT(order_matters == (i->size > 2), "the sums do not tell the order of the ranks"); // or the test could not fail
}

// Parts cover everything once, in order, and an array of elements of any size is shared out by them.
static void case_parts(Comm *c) {
    const CommInfo *i = comm_info(c);
    static const size_t sizes[] = {0, 1, 63, 64, 65, 1000, 65537, 300007}, bytes[] = {4, 2, 8, 12};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        size_t n = sizes[k], elem = bytes[k % 4], end = 0;
        unsigned char *x = host_alloc(n * elem + 1);
        for (int r = 0; r < i->size; r++) {
            CommPart p = comm_part(c, r, n);
            EXPECT(p.at == end && (p.at % PART_UNIT == 0 || p.n == 0), "part of rank %d of %zu begins at %zu", r, n, p.at);
            EXPECT(p.n <= n / (size_t)i->size + PART_UNIT, "rank %d has %zu of %zu elements", r, p.n, n);
            for (size_t j = p.at * elem; j < (p.at + p.n) * elem; j++) x[j] = (unsigned char)(mix((uint64_t)r, j) + (r != i->rank));
            end = p.at + p.n;
        }
        EXPECT(end == n, "parts of %zu end at %zu", n, end);
        x[n * elem] = 0xEE;
        dawdle(mix((uint64_t)i->rank, k));
        comm_share_parts(c, x, n, elem);
        for (int r = 0; r < i->size; r++) {
            CommPart p = comm_part(c, r, n);
            for (size_t j = p.at * elem; j < (p.at + p.n) * elem; j++)
                EXPECT(x[j] == (unsigned char)mix((uint64_t)r, j), "parts of %zu: byte %zu, of rank %d", n, j, r);
        }
        EXPECT(x[n * elem] == 0xEE, "sharing parts of %zu writes past their end", n);
        free(x);
    }
}

static void case_move(Comm *c) {
    const CommInfo *i = comm_info(c);
    for (int k = 0; k < 3 * i->size; k++) { // one after the other, without a barrier between
        int from = (int)(mix(5, (uint64_t)k) % (uint64_t)i->size), to = (int)(mix(6, (uint64_t)k) % (uint64_t)i->size);
        uint64_t x[1000];
        for (size_t j = 0; j < 1000; j++) x[j] = mix((uint64_t)(i->rank * 64 + k), j);
        size_t words = k % 3 ? 1000 : (size_t)k % 2;
        comm_move(c, x, words * sizeof *x, from, to);
        for (size_t j = 0; j < 1000; j++)
            EXPECT(x[j] == mix((uint64_t)((i->rank == to && j < words ? from : i->rank) * 64 + k), j), "move %d: word %zu", k, j);
    }
}

static void case_small(Comm *c) {
    const CommInfo *i = comm_info(c);
    for (int n = 0; n < 40; n = n * 2 + 1) {
        double *s = host_alloc(40 * sizeof *s), *m = host_alloc(40 * sizeof *m);
        int64_t *k = host_alloc(40 * sizeof *k);
        for (int j = 0; j < n; j++) {
            s[j] = (double)value(i->rank, (size_t)j) * 1e10;
            m[j] = (double)value(i->rank, (size_t)j);
            k[j] = (int64_t)(mix((uint64_t)i->rank, (uint64_t)j) >> 5) - ((int64_t)1 << 58);
        }
        comm_sum_double(c, s, n);
        comm_max_double(c, m, n);
        comm_sum_int64(c, k, n);
        for (int j = 0; j < n; j++) {
            double sum = 0, max = -INFINITY;
            int64_t count = 0;
            for (int r = 0; r < i->size; r++) {
                double v = (double)value(r, (size_t)j);
                sum = r ? sum + v * 1e10 : v * 1e10;
                max = v > max ? v : max;
                count += (int64_t)(mix((uint64_t)r, (uint64_t)j) >> 5) - ((int64_t)1 << 58);
            }
            EXPECT(s[j] == sum && m[j] == max && k[j] == count, "%d numbers: sum %.17g for %.17g, max %g for %g, count %lld for "
                   "%lld", n, s[j], sum, m[j], max, (long long)k[j], (long long)count);
        }
        free(s), free(m), free(k);
    }
    double x[2] = {i->rank == i->size - 1 ? NAN : 1, -5 - i->rank};
    comm_max_double(c, x, 2);
    EXPECT(isnan(x[0]) && x[1] == -5, "maximum with a NaN %g, of negative numbers %g", x[0], x[1]);
}

static void case_bcast(Comm *c) {
    const CommInfo *i = comm_info(c);
    static const size_t sizes[] = {0, 1, 1000, 1 << 20};
    for (int root = 0; root < i->size; root++)
        for (size_t k = 0; k < 4; k++) {
            unsigned char *x = host_alloc(sizes[k] + 1);
            for (size_t j = 0; j < sizes[k]; j++) x[j] = (unsigned char)mix((uint64_t)i->rank, j);
            x[sizes[k]] = 0xEE;
            comm_bcast(c, x, sizes[k], root);
            for (size_t j = 0; j < sizes[k]; j++)
                EXPECT(x[j] == (unsigned char)mix((uint64_t)root, j), "broadcast from %d: byte %zu", root, j);
            EXPECT(x[sizes[k]] == 0xEE, "broadcast writes past its end");
            free(x);
        }
}

// Of the process: touched, or (mapped) its whole address space
static long pages(int mapped) {
    long size = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%ld %ld", &size, &resident) != 2) size = resident = -1;
    if (f) fclose(f);
    return mapped ? size : resident;
}

// Windows come and go, the older one first or last; what is left works, and nothing of them stays.
static void case_window_free(Comm *c) {
    const CommInfo *i = comm_info(c);
    const size_t MIB = 1 << 20;
    uint64_t **kept = (uint64_t **)comm_window(c, MIB, "kept");
    comm_barrier(c);
    long before = pages(1);
    for (int round = 0; round < 40; round++) {
        uint64_t **a = (uint64_t **)comm_window(c, MIB, "a"), **b = (uint64_t **)comm_window(c, 2 * MIB, "b");
        for (int r = i->node * i->G; r < (i->node + 1) * i->G; r++) {
            EXPECT(a[r][i->rank] == 0 && b[r][i->rank] == 0, "round %d: a new window holds something", round);
            kept[r][i->rank] = a[r][i->rank] = b[r][i->rank] = mix((uint64_t)(round + 1), (uint64_t)r);
        }
        comm_node_barrier(c);
        comm_window_free(c, (void **)(round & 1 ? a : b));
        uint64_t **left = round & 1 ? b : a;
        for (int r = i->node * i->G; r < (i->node + 1) * i->G; r++)
            EXPECT(left[i->rank][r] == mix((uint64_t)(round + 1), (uint64_t)i->rank) && left[i->rank][r] == kept[i->rank][r],
                   "round %d: rank %d's word is not here", round, r);
        comm_window_free(c, (void **)left);
    }
    comm_barrier(c);
    // 3 MiB of each rank stay 40 times, or less than 8 MiB. Other groups of the process may be making windows now: the whole one looks.
    long left = pages(1) - before;
    EXPECT(i->size != i->local_ranks || left < 8 << 8, "windows given back leave %ld pages", left);
    comm_window_free(c, (void **)kept);
}

static void case_window(Comm *c) {
    const CommInfo *i = comm_info(c);
    size_t words = 3000;
    uint64_t **w = (uint64_t **)comm_window(c, words * 8, "test");
    for (int r = 0; r < i->size; r++) {
        EXPECT((w[r] != NULL) == (r / i->G == i->node), "window of rank %d is %p", r, (void *)w[r]);
        if (!w[r]) continue;
        EXPECT((uintptr_t)w[r] % 4096 == 0, "window of rank %d at %p", r, (void *)w[r]);
    }
    for (size_t j = 0; j < words; j++)
        EXPECT(w[i->rank][j] == 0, "a new window holds %llu at %zu", (unsigned long long)w[i->rank][j], j);
    comm_node_barrier(c);
    for (int round = 0; round < 50; round++) { // all write own words, then into their peers', then all is read
        for (size_t j = 100; j < words; j++) w[i->rank][j] = mix((uint64_t)(i->rank * 1000 + round), j);
        for (int r = i->node * i->G; r < (i->node + 1) * i->G; r++)
            w[r][i->rank] = mix((uint64_t)(r * 77 + round), (uint64_t)i->rank);
        dawdle(mix((uint64_t)i->rank, (uint64_t)round));
        comm_node_barrier(c);
        for (int r = i->node * i->G; r < (i->node + 1) * i->G; r++) {
            for (size_t j = 100; j < words; j += 1 + (size_t)round)
                EXPECT(w[r][j] == mix((uint64_t)(r * 1000 + round), j), "round %d: word %zu of rank %d", round, j, r);
            EXPECT(w[i->rank][r] == mix((uint64_t)(i->rank * 77 + round), (uint64_t)r), "round %d: rank %d's word is not here",
                   round, r);
        }
        comm_node_barrier(c);
    }
    size_t huge = (size_t)16 << 30; // untouched pages cost nothing
    long before = pages(0);
    char **h = (char **)comm_window(c, huge, "huge");
    h[i->rank][huge - 1] = (char)(i->rank + 1);
    comm_node_barrier(c);
    for (int r = i->node * i->G; r < (i->node + 1) * i->G; r++) EXPECT(h[r][huge - 1] == r + 1, "end of rank %d's huge window", r);
    EXPECT(pages(0) - before < 32 << 8, "a window of 16 GiB costs %ld pages", pages(0) - before); // 32 MiB
    void **empty = comm_window(c, 0, "empty");
    EXPECT(empty[i->rank], "an empty window has no address");
}

static void case_barrier(Comm *c) {
    const CommInfo *i = comm_info(c);
    double *all = host_alloc(SIZE(2, i->size, sizeof *all));
    for (int k = 0; k < 60; k++) {
        dawdle(mix((uint64_t)i->rank, (uint64_t)k) & ~3ull);
        double t[2] = {now()};
        comm_barrier(c);
        t[1] = now();
        comm_allgather(c, all, t, sizeof t);
        for (int r = 0; r < i->size; r++) EXPECT(all[2 * r] <= t[1], "left barrier %d before rank %d came", k, r);
    }
    free(all);
}

// ---- rows ------------------------------------------------------------------------------------------------------------
enum { ROOM = 40, ARRAYS = 3, TAIL = 0xEE };

// Rows from rank a to its counterpart in node n, in call k: often none, sometimes all there is room for
static int n_rows(int k, int a, int n) {
    uint64_t h = mix((uint64_t)(k * 64 + a), (uint64_t)n + 9);
    return h % 5 == 0 ? 0 : h % 7 == 0 ? ROOM : (int)(h / 35 % ROOM);
}
// Every byte tells where it comes from
static void payload(unsigned char *x, size_t n, int a, int row) {
    uint64_t h = mix((uint64_t)a * 100000 + (uint64_t)row, 3);
    for (size_t j = 0; j < n; j++) x[j] = (unsigned char)((h >> j % 8 * 8) + j / 8);
}

static void check_rows(Comm *c, const unsigned char *to, size_t row_bytes, const int *n_recv, int k) {
    const CommInfo *i = comm_info(c);
    unsigned char *expected = host_alloc(row_bytes);
    for (int n = 0; n < i->N; n++)
        for (int r = 0; r < ROOM; r++) {
            int from = n * i->G + i->rank % i->G;
            if (n == i->node || r >= n_recv[n]) memset(expected, TAIL, row_bytes);
            else payload(expected, row_bytes, from, i->node * ROOM + r);
            const unsigned char *got = to + (size_t)(n * ROOM + r) * row_bytes;
            EXPECT(memcmp(got, expected, row_bytes) == 0, "rows, call %d: row %d of block %d", k, r, n);
        }
    free(expected);
}

static void rows_call(Comm *c, int k, size_t row_bytes, uint64_t *sent) {
    const CommInfo *i = comm_info(c);
    size_t row[ARRAYS] = {row_bytes, 4, 1 + (size_t)k};
    Rows arrays[ARRAYS];
    int n_arrays = 1 + k % ARRAYS, *n_send = host_alloc(SIZE(i->N, sizeof(int))), *n_recv = host_alloc(SIZE(i->N, sizeof(int)));
    for (int a = 0; a < n_arrays; a++) {
        unsigned char *from = host_alloc(SIZE(i->N, ROOM, (int64_t)row[a])), *to = host_alloc(SIZE(i->N, ROOM, (int64_t)row[a]));
        for (int r = 0; r < i->N * ROOM; r++) payload(from + (size_t)r * row[a], row[a], i->rank, r);
        memset(to, TAIL, SIZE(i->N, ROOM, (int64_t)row[a]));
        arrays[a] = (Rows){to, from, row[a]};
    }
    for (int n = 0; n < i->N; n++) {
        n_send[n] = n_rows(k, i->rank, n), n_recv[n] = -1;
        for (int a = 0; a < n_arrays && n != i->node; a++) *sent += (uint64_t)n_send[n] * row[a];
    }
    dawdle(mix((uint64_t)i->rank, (uint64_t)k));
    comm_rows(c, arrays, n_arrays, n_recv, n_send, 0, ROOM);
    for (int known = 0; known < 2; known++) { // again, when the numbers are known
        for (int n = 0; n < i->N; n++)
            EXPECT(n_recv[n] == (n == i->node ? 0 : n_rows(k, n * i->G + i->rank % i->G, i->node)), "rows, call %d: %d from node %d",
                   k, n_recv[n], n);
        for (int a = 0; a < n_arrays; a++) check_rows(c, arrays[a].to, row[a], n_recv, k);
        if (known) break;
        for (int a = 0; a < n_arrays; a++) memset(arrays[a].to, TAIL, SIZE(i->N, ROOM, (int64_t)row[a]));
        comm_rows(c, arrays, n_arrays, n_recv, n_send, 1, ROOM);
        for (int n = 0; n < i->N; n++)
            for (int a = 0; a < n_arrays && n != i->node; a++) *sent += (uint64_t)n_send[n] * row[a];
    }
    EXPECT(comm_bytes_sent(c) == *sent, "%llu bytes sent, counted %llu", (unsigned long long)*sent,
           (unsigned long long)comm_bytes_sent(c));
    for (int a = 0; a < n_arrays; a++) free(arrays[a].to), free((void *)arrays[a].from);
    free(n_send), free(n_recv);
}

static void case_rows(Comm *c) {
    static const size_t sizes[] = {4, 12, 64, 516, 1, 4, 12, 260, 512, 4};
    uint64_t sent = comm_bytes_sent(c);
    for (int k = 0; k < 10; k++) rows_call(c, k, sizes[k], &sent);
}

// ---- blocks ----------------------------------------------------------------------------------------------------------
enum { BLOCKS = 6, BLOCK_BYTES = 96 };

// The j-th transfer of call k from node a to node b: block `from` of place g of a becomes block `to` of place h of b, none twice
typedef struct Transfer {
    int g, from, h, to;
} Transfer;
static Transfer transfer(const CommInfo *i, int k, int a, int b, int j) {
    uint64_t h = mix((uint64_t)(k * 4096 + a * 64 + b), (uint64_t)j + 77);
    int slot = a * 2 + j; // every (node, j) has a slot of its own
    return (Transfer){(int)(h % (uint64_t)i->G), (int)(h / 64 % BLOCKS), slot % i->G, slot / i->G};
}
static int n_transfers(int k, int a, int b) { return a == b ? 0 : (int)(mix((uint64_t)(k * 4096 + a * 64 + b), 5) % 3); }

// Each rank carries its part of every transfer, the last one what is left, while rows are exchanged and barriers passed.
static void case_blocks(Comm *c) {
    const CommInfo *i = comm_info(c);
    int blocks = 2 * i->N + BLOCKS, room = 2 * i->N;
    size_t bytes = SIZE(blocks, BLOCK_BYTES), per = BLOCK_BYTES / (size_t)i->G, place = (size_t)(i->rank % i->G);
    size_t at = place * per, part = (int)place == i->G - 1 ? BLOCK_BYTES - at : per;
    void **from = comm_window(c, bytes, "from"), **to = comm_window(c, bytes, "to");
    BlockSeg *send = host_alloc(SIZE(room, sizeof *send)), *recv = host_alloc(SIZE(room, sizeof *recv));
    for (int r = 0; r < blocks; r++) payload((unsigned char *)from[i->rank] + SIZE(r, BLOCK_BYTES), BLOCK_BYTES, i->rank, r);
    for (int k = 0; k < 6; k++) {
        int out = 0, in = 0;
        uint64_t sent = comm_bytes_sent(c);
        memset(to[i->rank], TAIL, bytes);
        comm_node_barrier(c); // the carriers write into each other's windows
        for (int n = 0; n < i->N; n++) {
            for (int j = 0; j < n_transfers(k, i->node, n); j++) {
                Transfer x = transfer(i, k, i->node, n, j);
                send[out++] = (BlockSeg){n, i->node * i->G + x.g, x.from};
            }
            for (int j = 0; j < n_transfers(k, n, i->node); j++) {
                Transfer x = transfer(i, k, n, i->node, j);
                recv[in++] = (BlockSeg){n, i->node * i->G + x.h, x.to};
            }
        }
        dawdle(mix((uint64_t)i->rank, (uint64_t)k));
        comm_blocks_start(c, to, recv, &in, (const void *const *)from, send, &out, BLOCK_BYTES, at, part);
        comm_node_barrier(c);
        uint64_t rows = 0, before = comm_bytes_sent(c);
        rows_call(c, k, 20, &before);
        rows = comm_bytes_sent(c) - sent - (uint64_t)out * part;
        comm_blocks_poll(c);
        comm_blocks_finish(c);
        EXPECT(comm_bytes_sent(c) == sent + rows + (uint64_t)out * part, "blocks, call %d: wrong number of bytes", k);
        comm_node_barrier(c);
        unsigned char expected[BLOCK_BYTES];
        for (int n = 0; n < i->N; n++)
            for (int j = 0; j < 2; j++) {
                Transfer x = transfer(i, k, n, i->node, j);
                if (x.h != i->rank % i->G) continue;
                if (j < n_transfers(k, n, i->node)) payload(expected, BLOCK_BYTES, n * i->G + x.g, x.from);
                else memset(expected, TAIL, BLOCK_BYTES);
                const char *got = (char *)to[i->rank] + SIZE(x.to, BLOCK_BYTES);
                EXPECT(memcmp(got, expected, BLOCK_BYTES) == 0, "blocks, call %d: transfer %d from node %d", k, j, n);
            }
        comm_node_barrier(c);
    }
    free(send), free(recv);
}

void comm_cases(Comm *c) {
    case_info(c);
    case_allgather(c);
    case_sum(c);
    case_small(c);
    case_bcast(c);
    case_parts(c);
    case_move(c);
    case_window(c);
    case_window_free(c);
    case_barrier(c);
    case_rows(c);
    case_blocks(c);
}

static void check_group(Comm *c, int first, int step, int world_G) {
    const CommInfo *i = comm_info(c);
    int own = first + i->rank * step, *all = host_alloc(SIZE(i->size, sizeof own));
    comm_allgather(c, all, &own, sizeof own);
    for (int r = 0; r < i->size; r++) {
        EXPECT(all[r] == first + r * step, "member %d is rank %d", r, all[r]);
        EXPECT((all[r] / world_G == own / world_G) == (r / i->G == i->node), "member %d, rank %d, counts to the wrong node", r,
               all[r]);
    }
    free(all);
    comm_cases(c);
}

void comm_group_cases(Comm *c) {
    const CommInfo *i = comm_info(c);
    for (int n = 1; n <= i->size; n++) {
        if (i->size % n || (i->G % n && n % i->G)) continue;
        Comm *block = comm_block(c, n), *stride = comm_stride(c, n);
        EXPECT(comm_info(block)->size == n && comm_info(stride)->size == i->size / n, "groups of %d and %d ranks", n, i->size / n);
        EXPECT(comm_info(block)->rank == i->rank % n && comm_info(stride)->rank == i->rank / n, "groups' ranks");
        check_group(block, i->rank / n * n, 1, i->G);
        check_group(stride, i->rank % n, n, i->G);
        comm_barrier(c);
        comm_free(stride);
        comm_free(block);
    }
}
