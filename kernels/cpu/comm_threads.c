// Transport between threads of one process: virtual ranks. A receiver copies straight from the sender's memory.
#include "kernels/check.h"
#include "kernels/cpu/comm_impl.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct Box { // one rank's
    pthread_mutex_t lock;
    pthread_cond_t news; // a message came, or one of its own was taken
    Msg **first, **last; // queues by sender
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
    }
    free(g);
}

static void threads_post(Comm *c, Msg *m) {
    if (!m->send) return;
    Box *b = &((Group *)c->group)->box[m->peer];
    pthread_mutex_lock(&b->lock);
    Msg **last = &b->last[c->info.rank];
    *(*last ? &(*last)->next : &b->first[c->info.rank]) = m;
    *last = m;
    pthread_cond_broadcast(&b->news);
    pthread_mutex_unlock(&b->lock);
}

static void receive(Comm *c, Msg *m) {
    Group *g = c->group;
    Box *own = &g->box[c->info.rank], *sender = &g->box[m->peer];
    pthread_mutex_lock(&own->lock);
    while (!own->first[m->peer]) pthread_cond_wait(&own->news, &own->lock);
    Msg *sent = own->first[m->peer];
    own->first[m->peer] = sent->next;
    if (!sent->next) own->last[m->peer] = NULL;
    pthread_mutex_unlock(&own->lock);
    CHECK_COMM(sent->tag == m->tag && sent->bytes == m->bytes, "rank %d sent %zu bytes in its call %d where rank %d expects %zu "
               "in its call %d: the ranks disagree on what they exchange", m->peer, sent->bytes, sent->tag,
               c->info.rank, m->bytes, m->tag);
    if (m->bytes) memcpy(m->ptr, sent->ptr, m->bytes);
    pthread_mutex_lock(&sender->lock);
    atomic_store(&sent->done, 1);
    pthread_cond_broadcast(&sender->news);
    pthread_mutex_unlock(&sender->lock);
}

static void threads_wait(Comm *c, Msg *m, int n) {
    Box *own = &((Group *)c->group)->box[c->info.rank];
    for (int i = 0; i < n; i++)
        if (!m[i].send) receive(c, &m[i]);
    pthread_mutex_lock(&own->lock);
    for (int i = 0; i < n; i++)
        while (m[i].send && !atomic_load(&m[i].done)) pthread_cond_wait(&own->news, &own->lock);
    pthread_mutex_unlock(&own->lock);
}

// The group's first rank makes it and tells the others where it is.
static void *threads_split(Comm *parent, int first, int step, int size) {
    Group *g = NULL;
    parent->sequence = (parent->sequence + 1) & 0x7fff;
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

static const Transport threads = {threads_split, threads_release, threads_post, threads_wait, threads_window_make,
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
