// Ranks as processes: mpirun -n R build/test_comm_mpi [nodes N]. Without a launcher there is nothing to test: 77, skipped.
// die R, die-openmp R, kill R, leave R, late R, mismatch R: faults of rank R, for test_comm.c to look at.
#include "kernels/check.h"
#include "tests/common/comm_cases.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct Task {
    const char *what;
    int arg;
} Task;

static void body(Comm *c, void *arg) {
    Task *t = arg;
    const CommInfo *i = comm_info(c);
    int mine = i->rank == t->arg;
    if (!strcmp(t->what, "die")) CHECK_NUMERIC(!mine, "a fault of one rank");
    if (!strcmp(t->what, "kill") && mine) raise(SIGKILL);
    if (!strcmp(t->what, "leave") && mine) _exit(0);
    if (!strcmp(t->what, "late") && mine) sleep(30);
    if (!strcmp(t->what, "die-openmp") && mine)
#pragma omp parallel num_threads(4)
        CHECK_NUMERIC(0, "a fault of all threads");
    if (!strcmp(t->what, "all") || !strcmp(t->what, "nodes")) {
        if (i->rank == 0) printf("%s: %d ranks, %d nodes of %d\n", i->name, i->size, i->N, i->G);
        comm_cases(c);
        comm_group_cases(c);
    } else {
        char x[64] = {0}, y[64];
        int n[8] = {1, 1, 1, 1, 1, 1, 1, 1}, got[8];
        Rows rows[2] = {{y, x, 8}, {y, x, 8}};
        comm_rows(c, rows, !strcmp(t->what, "mismatch") && mine ? 2 : 1, got, n, 0, 1); // another number of messages
        comm_barrier(c);
    }
}

int main(int argc, char **argv) {
    Task t = {argc > 1 ? argv[1] : "all", argc > 2 ? atoi(argv[2]) : 0};
    alarm(240); // a test that hangs is a failed one
    if (launcher_size() == 0 || launcher_size() == 1) {
        printf("skipped: start it as mpirun -n R %s\n", argv[0]);
        return 77;
    }
    comm_run(&argc, &argv, 0, !strcmp(t.what, "nodes") ? t.arg : !strcmp(t.what, "all") ? 0 : launcher_size(), body, &t);
    return 0;
}
