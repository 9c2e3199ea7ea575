// Transport over MPI: one process per rank. The only file that knows MPI; windows are memory files that the node's ranks
// open through /proc, so that the size of /dev/shm, small in containers, does not matter.
#ifdef USE_MPI
#include "kernels/check.h"
#include "kernels/cpu/comm_impl.h"
#include "kernels/files.h"
#include <errno.h>
#include <fcntl.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(MPI_Request) <= sizeof(uint64_t), "a Msg keeps its request in 64 bits");

static void check(int code, const char *what) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING];
    int n = 0;
    MPI_Error_string(code, text, &n);
    die(STATUS_COMM, __FILE__, __LINE__, "%s: MPI reports: %s", what, text);
}

static MPI_Comm *group_new(void) { return host_alloc(sizeof(MPI_Comm)); }

// An error inside MPI comes back as a code, to be told in our words and with our status.
static MPI_Comm *group_ready(MPI_Comm *g) {
    check(MPI_Comm_set_errhandler(*g, MPI_ERRORS_RETURN), "error handler");
    return g;
}

static void *mpi_split(Comm *parent, int first, int step, int size) {
    (void)step, (void)size;
    MPI_Comm *g = group_new();
    check(MPI_Comm_split(*(MPI_Comm *)parent->group, first, parent->info.rank, g), "splitting a group");
    return group_ready(g);
}

static void mpi_release(void *group, int rank) {
    (void)rank;
    check(MPI_Comm_free(group), "freeing a group");
    free(group);
}

// Any tag is taken, and compared afterwards: ranks that disagree then end with a message, not with a wait for ever.
static void mpi_post(Comm *c, Msg *m) {
    MPI_Comm comm = *(MPI_Comm *)c->group;
    MPI_Request request;
    if (m->send) check(MPI_Isend(m->ptr, (int)m->bytes, MPI_BYTE, m->peer, m->tag, comm, &request), "sending");
    else check(MPI_Irecv(m->ptr, (int)m->bytes, MPI_BYTE, m->peer, MPI_ANY_TAG, comm, &request), "receiving");
    memcpy(&m->request, &request, sizeof request);
}

// Looks at one message; 1 when it is complete.
static int mpi_test(Comm *c, Msg *m) {
    if (atomic_load_explicit(&m->done, memory_order_relaxed)) return 1;
    MPI_Request request;
    MPI_Status status;
    int flag = 0, class = MPI_SUCCESS, got = 0;
    memcpy(&request, &m->request, sizeof request);
    int code = MPI_Test(&request, &flag, &status);
    if (code != MPI_SUCCESS) MPI_Error_class(code, &class);
    CHECK_COMM(class != MPI_ERR_TRUNCATE, "rank %d sent more than the %zu bytes that rank %d expects in its call %d: "
               "the ranks disagree on what they exchange", m->peer, m->bytes, c->info.rank, m->tag % TAG_CALLS);
    check(code, "waiting for a message");
    memcpy(&m->request, &request, sizeof request);
    if (!flag) return 0;
    atomic_store_explicit(&m->done, 1, memory_order_relaxed);
    if (m->send) return 1;
    check(MPI_Get_count(&status, MPI_BYTE, &got), "a message's length");
    msg_check(c, m, status.MPI_TAG, (size_t)got);
    return 1;
}

static int mpi_poll(Comm *c, Msg *m, int n) {
    int left = 0;
    for (int i = 0; i < n; i++) left |= !mpi_test(c, &m[i]);
    return left;
}

// Where ranks share cores, one that looks without end keeps those that compute from theirs, yielding or not (half of a core with
// Linux 6.18): after a moment it sleeps between looks, for a quarter of the time it has waited at most, so that no wait is much longer.
static void give_way(double waited_s) {
    if (waited_s < 50e-6) return;
    double nap_s = waited_s < 800e-6 ? waited_s / 4 : 200e-6;
    nanosleep(&(struct timespec){.tv_nsec = (long)(nap_s * 1e9)}, NULL);
}

// In order; each test moves all messages on.
static void mpi_wait(Comm *c, Msg *m, int n) {
    enum { LOOKS = 1 << 12 }; // between looks at the clock, on a core of one's own
    for (int i = 0; i < n; i++) {
        double begin = MPI_Wtime();
        for (int looks = 1; !mpi_test(c, &m[i]); looks++) {
            if (c->spins == 0) give_way(MPI_Wtime() - begin);
            else if (looks % LOOKS) continue;
            mpi_poll(c, c->blocks.msg, c->blocks.n); // a fault there may be why nothing comes here
            if (MPI_Wtime() - begin > c->patience_s) msg_late(c, &m[i]);
        }
    }
}

static void *map(int fd, size_t bytes, const char *what) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    CHECK_DEVICE(p != MAP_FAILED, "cannot map the window \"%s\" of %zu bytes: %s (hint: is there a limit, ulimit -v?)", what, bytes,
                 strerror(errno));
    window_huge(p, bytes);
    return p;
}

static void *mpi_window_make(Comm *c, Handle *h, size_t bytes, const char *what) {
    if (c->info.G == 1) return window_anonymous(bytes, what);
    struct stat st;
    int fd = memfd_create(what, MFD_CLOEXEC);
    CHECK_DEVICE(fd >= 0, "cannot create the window \"%s\": %s (hint: too many open files?)", what, strerror(errno));
    CHECK_DEVICE(ftruncate(fd, (off_t)bytes) == 0 && fstat(fd, &st) == 0, "cannot size the window \"%s\" to %zu bytes: %s", what,
                 bytes, strerror(errno));
    *h = (Handle){.pid = (uint64_t)getpid(), .fd = (uint64_t)fd, .inode = (uint64_t)st.st_ino};
    return map(fd, bytes, what);
}

static void *mpi_window_map(Comm *c, const Handle *h, size_t bytes, const char *what) {
    (void)c;
    char path[64];
    struct stat st;
    snprintf(path, sizeof path, "/proc/%llu/fd/%llu", (unsigned long long)h->pid, (unsigned long long)h->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    // or another namespace's process
    int ours = fd >= 0 && fstat(fd, &st) == 0 && st.st_ino == h->inode && (size_t)st.st_size == bytes;
    CHECK_COMM(ours, "cannot open the window \"%s\" of process %llu on the same machine through %s: %s (hint: ranks in "
               "containers of their own share no memory; --nodes %d makes them exchange messages)", what,
               (unsigned long long)h->pid, path,
               fd < 0 ? strerror(errno) : "it is not the window", c->info.size);
    void *p = map(fd, bytes, what);
    close(fd);
    return p;
}

static void mpi_window_shared(Comm *c, const Handle *h) {
    if (c->info.G > 1) close((int)h->fd);
}

static void mpi_window_unmap(void *p, size_t bytes, int own) {
    (void)own;
    munmap(p, bytes);
}

static const Transport mpi = {mpi_split, mpi_release, mpi_post, mpi_wait, mpi_poll, mpi_window_make, mpi_window_map, mpi_window_shared,
                              mpi_window_unmap};

static void stop(int status) { MPI_Abort(MPI_COMM_WORLD, status); }

// Ranks that run on this computer, those in other containers or network namespaces included: they share no memory, but the cores.
static int sharing_cores(MPI_Comm world, int size, int at_least) {
    uint64_t boot = 0, *all = host_alloc(SIZE(size, sizeof *all)); // of the kernel's start; 0 = it does not tell
    char id[64] = "";
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (f && fgets(id, sizeof id, f)) boot = fnv1a(FNV1A_START, id, strlen(id));
    if (f) fclose(f);
    check(MPI_Allgather(&boot, sizeof boot, MPI_BYTE, all, sizeof boot, MPI_BYTE, world), "comparing machines");
    int n = 0;
    for (int r = 0; r < size; r++) n += boot != 0 && all[r] == boot;
    free(all);
    return n > at_least ? n : at_least;
}

// Ranks per machine, which must be contiguous and equal
static int detect(MPI_Comm world, int rank, int size) {
    MPI_Comm machine;
    int place, n, own[2];
    check(MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &machine), "finding the ranks of this machine");
    MPI_Comm_rank(machine, &place);
    MPI_Comm_size(machine, &n);
    own[0] = place == 0 ? rank : 0;
    own[1] = n;
    check(MPI_Bcast(&own[0], 1, MPI_INT, 0, machine), "finding the ranks of this machine");
    check(MPI_Comm_free(&machine), "finding the ranks of this machine");
    int *all = host_alloc(SIZE(size, sizeof own));
    check(MPI_Allgather(own, 2, MPI_INT, all, 2, MPI_INT, world), "comparing machines");
    for (int r = 0; r < size; r++) {
        int lead = all[2 * r], count = all[2 * r + 1];
        CHECK_USAGE(count == all[1], "rank 0's machine holds %d ranks, rank %d's holds %d: expected as many on each "
                    "(hint: mpirun --map-by ppr:RANKS_PER_MACHINE:node, with equal slots in the host file)", all[1], r, count);
        CHECK_USAGE(lead == r / count * count, "rank %d sits on the machine of rank %d, expected that of rank %d: ranks must "
                    "fill one machine after the other (hint: mpirun --map-by slot --rank-by slot)", r, lead, r / count * count);
    }
    n = all[1];
    free(all);
    return n;
}

void comm_run_mpi(int *argc, char ***argv, int launched, int nodes, void (*body)(Comm *world, void *arg), void *arg) {
    int rank, size, level, length;
    char name[MPI_MAX_LIBRARY_VERSION_STRING];
    // OpenMP's threads may run, but only the process's first thread talks to MPI
    check(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &level), "starting MPI");
    MPI_Comm *group = group_new();
    check(MPI_Comm_dup(MPI_COMM_WORLD, group), "starting MPI");
    group_ready(group);
    MPI_Comm_rank(*group, &rank);
    MPI_Comm_size(*group, &size);
    MPI_Get_library_version(name, &length);
    name[strcspn(name, ",\n")] = 0;
    CHECK_USAGE(launched < 0 || size == launched, "the launcher started %d processes, but %s connects %d of them (hint: use the "
                "mpirun that belongs to this MPI, or srun --mpi=pmix)", launched, name, size);
    die_setup(rank, size, stop);
    CHECK_COMM(level >= MPI_THREAD_FUNNELED, "%s offers thread level %d, expected MPI_THREAD_FUNNELED", name, level);
    int G = detect(*group, rank, size);
    Comm world = {.info = {.rank = rank, .size = size, .G = G, .local_ranks = sharing_cores(*group, size, G), .name = name}, .t = &mpi, .group = group};
    comm_open(&world, nodes);
    body(&world, arg);
    comm_close(&world);
    mpi_release(group, rank);
    die_setup(rank, size, NULL); // from here on MPI stops nothing
    MPI_Finalize();
}
#else
typedef int no_mpi; // a file of C must hold something
#endif
