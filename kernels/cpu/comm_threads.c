// Transport between threads of one process: virtual ranks. A receiver copies straight from the sender's memory.
#include "kernels/check.h"
#include "kernels/cpu/comm_impl.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef struct Box { // one rank's
    pthread_mutex_t lock;
    pthread_cond_t news;       // a message came, or one of its own was taken
    Msg **first, **last;       // queues by sender
    uint64_t *came, *expected; // messages so far, by sender: that came, that receives were posted for
} Box;

typedef struct Group {
    int size;
    atomic_int users;
    Box box[];
} Group;

static Group *group_new(int size) {
    Group *g = host_alloc(sizeof *g + SIZE(size, sizeof(Box)));
    g->size = size;
    atomic_init(&g->users, size);
    for (int r = 0; r < size; r++) {
        Box *b = &g->box[r];
        pthread_mutex_init(&b->lock, NULL);
        pthread_cond_init(&b->news, NULL);
        b->first = host_alloc(SIZE(size, sizeof *b->first));
        b->last = host_alloc(SIZE(size, sizeof *b->last));
        b->came = host_alloc(SIZE(size, sizeof *b->came));
        b->expected = host_alloc(SIZE(size, sizeof *b->expected));
    }
    return g;
}

static void threads_release(void *group, int rank) {
    (void)rank;
    Group *g = group;
    if (atomic_fetch_sub(&g->users, 1) != 1) return;
    for (int r = 0; r < g->size; r++) {
        pthread_mutex_destroy(&g->box[r].lock);
        pthread_cond_destroy(&g->box[r].news);
        free(g->box[r].first);
        free(g->box[r].last);
        free(g->box[r].came);
        free(g->box[r].expected);
    }
    free(g);
}

static void threads_post(Comm *c, Msg *m) {
    Group *g = c->group;
    int me = c->info.rank;
    if (!m->send) {
        m->serial = g->box[me].expected[m->peer]++; // touched by this thread alone
        return;
    }
    Box *b = &g->box[m->peer];
    pthread_mutex_lock(&b->lock);
    m->serial = b->came[me]++;
    Msg **last = &b->last[me];
    *(*last ? &(*last)->next : &b->first[me]) = m;
    *last = m;
    pthread_cond_broadcast(&b->news);
    pthread_mutex_unlock(&b->lock);
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// The message that m is for, out of its queue; NULL: it has not come. own's lock is held.
static Msg *take(Box *own, const Msg *m) {
    Msg *before = NULL, *x = own->first[m->peer];
    for (; x && x->serial != m->serial; x = x->next) before = x;
    if (!x) return NULL;
    *(before ? &before->next : &own->first[m->peer]) = x->next;
    if (!x->next) own->last[m->peer] = before;
    return x;
}

// Completes m, a receive, if its message has come.
static int receive(Comm *c, Msg *m) {
    Group *g = c->group;
    Box *own = &g->box[c->info.rank], *sender = &g->box[m->peer];
    pthread_mutex_lock(&own->lock);
    Msg *sent = take(own, m);
    pthread_mutex_unlock(&own->lock);
    if (!sent) return 0;
    msg_check(c, m, sent->tag, sent->bytes);
    if (m->bytes) memcpy(m->ptr, sent->ptr, m->bytes);
    atomic_store(&m->done, 1);
    pthread_mutex_lock(&sender->lock);
    atomic_store(&sent->done, 1);
    pthread_cond_broadcast(&sender->news);
    pthread_mutex_unlock(&sender->lock);
    return 1;
}

static int threads_poll(Comm *c, Msg *m, int n) {
    for (int i = 0; i < n; i++)
        if (!m[i].send && !atomic_load(&m[i].done)) receive(c, &m[i]);
    return 0; // a receiver copies when it waits, there is nothing to move on
}

// Sleeps until there may be news of m, at most a second.
static void await(Box *own, const Msg *m) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_sec++;
    pthread_mutex_lock(&own->lock);
    const Msg *x = m->send ? NULL : own->first[m->peer];
    while (x && x->serial != m->serial) x = x->next;
    if (!x && !atomic_load(&m->done)) pthread_cond_timedwait(&own->news, &own->lock, &t);
    pthread_mutex_unlock(&own->lock);
}

static void threads_wait(Comm *c, Msg *m, int n) {
    Box *own = &((Group *)c->group)->box[c->info.rank];
    for (int sends = 0; sends < 2; sends++)
        for (int i = 0; i < n; i++) {
            double begin = -1;
            while (m[i].send == sends && !atomic_load(&m[i].done) && (sends || !receive(c, &m[i]))) {
                if (begin < 0) begin = now_s();
                await(own, &m[i]);
                threads_poll(c, c->blocks.msg, c->blocks.n); // a fault there may be why nothing comes here
                if (now_s() - begin > c->patience_s) msg_late(c, &m[i]);
            }
        }
}

// The group's first rank makes it and tells the others where it is.
static void *threads_split(Comm *parent, int first, int step, int size) {
    Group *g = NULL;
    parent->sequence = (parent->sequence + 1) % TAG_CALLS;
    if (parent->info.rank == first) {
        g = group_new(size);
        Msg *out = host_alloc(SIZE(size, sizeof *out));
        for (int i = 1; i < size; i++) {
            out[i] = (Msg){.ptr = &g, .bytes = sizeof g, .peer = first + i * step, .send = 1, .tag = parent->sequence};
            threads_post(parent, &out[i]);
        }
        threads_wait(parent, out + 1, size - 1);
        free(out);
    } else {
        Msg in = {.ptr = &g, .bytes = sizeof g, .peer = first, .tag = parent->sequence};
        threads_post(parent, &in);
        threads_wait(parent, &in, 1);
    }
    return g;
}

static void *threads_window_make(Comm *c, Handle *h, size_t bytes, const char *what) {
    (void)c;
    void *p = window_anonymous(bytes, what);
    h->address = (uint64_t)(uintptr_t)p;
    return p;
}

static void *threads_window_map(Comm *c, const Handle *h, size_t bytes, const char *what) {
    (void)c, (void)bytes, (void)what;
    return (void *)(uintptr_t)h->address;
}

static void threads_window_shared(Comm *c, const Handle *h) { (void)c, (void)h; }

static void threads_window_unmap(void *p, size_t bytes, int own) {
    if (own) munmap(p, bytes);
}

static const Transport threads = {threads_split, threads_release, threads_post, threads_wait, threads_poll, threads_window_make,
                                  threads_window_map, threads_window_shared, threads_window_unmap};

typedef struct Rank {
    Comm comm;
    int nodes;
    void (*body)(Comm *world, void *arg);
    void *arg;
} Rank;

static void *rank_main(void *p) {
    Rank *r = p;
    die_setup(r->comm.info.rank, r->comm.info.size, NULL);
    comm_open(&r->comm, r->nodes);
    r->body(&r->comm, r->arg);
    comm_close(&r->comm);
    return NULL;
}

void comm_run_threads(int n, int nodes, void (*body)(Comm *world, void *arg), void *arg) {
    char name[64];
    snprintf(name, sizeof name, n == 1 ? "1 process" : "1 process, %d virtual ranks", n);
    Group *g = group_new(n);
    Rank *ranks = host_alloc(SIZE(n, sizeof *ranks));
    pthread_t *threads_of = host_alloc(SIZE(n, sizeof *threads_of));
    for (int r = 0; r < n; r++)
        ranks[r] = (Rank){{.info = {.rank = r, .size = n, .G = n, .local_ranks = n, .name = name}, .t = &threads, .group = g},
                          nodes, body, arg};
    if (n == 1) {
        rank_main(&ranks[0]); // the calling thread, which OpenMP knows
    } else {
        for (int r = 0; r < n; r++) {
            int failed = pthread_create(&threads_of[r], NULL, rank_main, &ranks[r]);
            CHECK_COMM(!failed, "cannot start thread %d of %d: %s (hint: fewer virtual ranks)", r, n, strerror(failed));
        }
        for (int r = 0; r < n; r++) pthread_join(threads_of[r], NULL);
    }
    for (int r = 0; r < n; r++) threads_release(g, r);
    free(threads_of);
    free(ranks);
}
