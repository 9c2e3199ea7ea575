// Errors and sizes: see check.h.
#include "kernels/check.h"
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct Label {
    int known, rank, n_ranks;
    void (*stop)(int status);
} Label;
// A fault can arise anywhere, in code that is handed no context; so who speaks is known per thread, and for OpenMP's
// threads, which are told nothing, by the label of the process's first thread.
static _Thread_local Label thread_label;
static Label process_label;
static atomic_flag speaking = ATOMIC_FLAG_INIT; // one message per process, whatever its threads find at the same time

enum { DIE_WAIT_S = 5 }; // what a launcher may take to end the ranks after rank 0 has reported and gone

static int env_int(const char *name, int missing) {
    const char *text = getenv(name);
    char *end;
    if (!text || !*text) return missing;
    long v = strtol(text, &end, 10);
    return *end || v < 0 || v > INT32_MAX ? missing : (int)v;
}

// SLURM_NTASKS also stands in the environment of a batch script, where nothing was launched yet; the step's count does not.
static const char *const size_names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
static const char *const rank_names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"};

int launcher_size(void) {
    for (int i = 0; i < 3; i++)
        if (env_int(size_names[i], 0) > 0) return env_int(size_names[i], 0);
    return getenv("PMIX_RANK") ? -1 : 0;
}

int launcher_rank(void) {
    for (int i = 0; i < 3; i++)
        if (env_int(size_names[i], 0) > 0) return env_int(rank_names[i], 0);
    return env_int("PMIX_RANK", 0);
}

void die_setup(int rank, int n_ranks, void (*stop)(int status)) {
    thread_label = (Label){1, rank, n_ranks, stop};
    if (getpid() == gettid()) process_label = thread_label;
}

_Noreturn void die(int status, const char *file, int line, const char *fmt, ...) {
    char text[8192]; // one write per message: those of several ranks do not mix
    Label who = thread_label.known ? thread_label : process_label;
    if (!who.known) who = (Label){1, launcher_rank(), launcher_size(), NULL};
    int several = who.n_ranks > 1 || who.n_ranks < 0;
    size_t room = sizeof text - 1, used = 0;
    if (several) used = (size_t)snprintf(text, room, "rank %d: ", who.rank);
    used += (size_t)snprintf(text + used, room - used, "%s:%d: ", file, line);
    if (used >= room) used = room - 1;
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(text + used, room - used, fmt, args);
    va_end(args);
    used = n < 0 ? used : used + (size_t)n < room ? used + (size_t)n : room - 1;
    text[used++] = '\n';

    if (several && who.rank != 0) { // the launcher ends this rank with SIGTERM, which a trainer may have blocked
        sigset_t term;
        sigemptyset(&term);
        sigaddset(&term, SIGTERM);
        pthread_sigmask(SIG_UNBLOCK, &term, NULL);
        nanosleep(&(struct timespec){DIE_WAIT_S, 0}, NULL);
    }
    while (atomic_flag_test_and_set(&speaking)) pause();
    fflush(stdout);
    ssize_t written = write(STDERR_FILENO, text, used);
    (void)written;
    if (who.stop) who.stop(status);
    // exit() would run the libraries' clean-up under threads that still use them
    _exit(status);
}

size_t size_mul(int n, const int64_t *dims) {
    size_t product = 1;
    int zero = 0, bad = 0;
    for (int i = 0; i < n; i++) zero |= dims[i] == 0, bad |= dims[i] < 0;
    for (int i = 0; i < n && !zero && !bad; i++)
        bad = __builtin_mul_overflow(product, (size_t)dims[i], &product) || product > PTRDIFF_MAX;
    if (bad) {
        char list[256] = "";
        for (int i = 0, at = 0; i < n && at < (int)sizeof list - 24; i++)
            at += snprintf(list + at, sizeof list - (size_t)at, "%s%lld", i ? " x " : "", (long long)dims[i]);
        die(STATUS_USAGE, __FILE__, __LINE__, "impossible size %s: expected dimensions >= 0 whose product fits the address space "
            "(hint: which of them is a mistyped setting?)", list);
    }
    return zero ? 0 : product;
}

void *host_alloc(size_t bytes) {
    void *p = calloc(bytes ? bytes : 1, 1);
    CHECK_DEVICE(p, "no memory for %zu bytes (hint: fewer ranks on this machine, or a smaller model or batch)", bytes);
    return p;
}
