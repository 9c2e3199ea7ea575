// Ranks as threads of one process: every collective, groups, windows, faults; and, where mpirun is there, faults of
// processes (what processes do right is in test_comm_mpi.c).
#include "kernels/check.h"
#include "kernels/files.h"
#include "tests/common/child.h"
#include "tests/common/comm_cases.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

static int child_says(const Child *c, int status, const char *part) { // as expected? otherwise prints what was found
    if (c->status == status && strstr(c->out, part)) return 1;
    printf("expected status %d and \"%s\", found status %d and:\n%s\n", status, part, c->status, c->out);
    return 0;
}

static void no_launcher(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK", "PMIX_RANK",
                                        "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---- what must hold ----------------------------------------------------------------------------------------------------
// Each in a process of its own: a failure ends that.
typedef struct Shape {
    int ranks, nodes, groups;
} Shape;

static void body(Comm *c, void *arg) {
    const Shape *s = arg;
    comm_cases(c);
    if (s->groups) comm_group_cases(c);
    int64_t one = 1; // each rank's body has run
    comm_sum_int64(c, &one, 1);
    if (one != (s->ranks ? s->ranks : 1)) die(1, __FILE__, __LINE__, "%lld bodies ran", (long long)one);
}

static void run_shape(void *arg) {
    Shape *s = arg;
    comm_run(NULL, NULL, s->ranks, s->nodes, body, s);
    printf("all cases ran");
}

static void holds(Shape s) {
    Child c = child_call(run_shape, &s);
    if (!child_says(&c, 0, "all cases ran")) fail_msg("%d ranks, %d nodes", s.ranks, s.nodes);
}

static void test_world(void **state) {
    (void)state;
    static const int ranks[] = {0, 1, 2, 3, 4, 8};
    for (int k = 0; k < 6; k++)
        for (int nodes = 0; nodes <= ranks[k]; nodes++)
            if (!nodes || ranks[k] % nodes == 0) holds((Shape){ranks[k], nodes, 0});
}

static void test_groups(void **state) {
    (void)state;
    static const int shapes[][2] = {{1, 1}, {2, 1}, {3, 3}, {4, 2}, {4, 1}, {6, 2}, {8, 2}};
    for (int k = 0; k < 7; k++) holds((Shape){shapes[k][0], shapes[k][1], 1});
}

// A block of a stride: experts' replicas within groups
static void nested(Comm *c, void *arg) {
    atomic_int *failures = arg;
    Comm *stride = comm_stride(c, 2), *block = comm_block(stride, 2);
    int own = comm_info(c)->rank, all[2];
    comm_allgather(block, all, &own, sizeof own);
    int first = own / 4 * 4 + own % 2;
    if (all[0] != first || all[1] != first + 2) atomic_fetch_add(failures, 1);
    comm_free(block);
    comm_free(stride);
}

static void test_nested(void **state) {
    (void)state;
    atomic_int failures = 0;
    comm_run(NULL, NULL, 8, 2, nested, &failures);
    assert_int_equal(failures, 0);
}

// Messages longer than 32 bits can count: rows, and a block. Sparse: what is never written costs nothing.
enum { BIG_ROWS = 1025 };
static void big(Comm *c, void *arg) {
    atomic_int *failures = arg;
    size_t row_bytes = 1 << 20, bytes = BIG_ROWS * row_bytes;
    int rank = comm_info(c)->rank, one = 1, none = 0, n_send[2] = {0, rank ? 0 : BIG_ROWS}, n_recv[2];
    char **from = (char **)comm_window(c, 2 * bytes, "from"), **to = (char **)comm_window(c, 2 * bytes, "to"), *block = to[rank];
    for (size_t k = 0; k < BIG_ROWS && rank == 0; k++) memcpy(from[0] + bytes + k * row_bytes + k, &k, sizeof k);
    comm_rows(c, &(Rows){to[rank], from[rank], row_bytes}, 1, n_recv, n_send, 0, BIG_ROWS);
    if (n_recv[0] != (rank ? BIG_ROWS : 0) || n_recv[1] != 0) atomic_fetch_add(failures, 1);
    for (int twice = 0; twice < 2; twice++) {
        for (size_t k = 0, got; k < BIG_ROWS && rank; k++) {
            memcpy(&got, block + k * row_bytes + k, sizeof got);
            if (got != k) atomic_fetch_add(failures, 1);
        }
        if (comm_bytes_sent(c) != (rank ? 0 : bytes << twice)) atomic_fetch_add(failures, 1);
        if (twice) break;
        BlockSeg seg = {1 - rank, rank, 1}; // the second block of the window
        comm_blocks_start(c, (void **)to, &seg, rank ? &one : &none, (const void *const *)from, &seg, rank ? &none : &one, bytes, 0,
                          bytes);
        comm_blocks_finish(c);
        block += bytes;
    }
}

static void test_big(void **state) {
    (void)state;
    atomic_int failures = 0;
    comm_run(NULL, NULL, 2, 2, big, &failures);
    assert_int_equal(failures, 0);
}

// ---- faults ------------------------------------------------------------------------------------------------------------
typedef struct Fault {
    int ranks, nodes, kind, arg;
} Fault;

static void faulty(Comm *c, void *p) {
    const Fault *f = p;
    const CommInfo *i = comm_info(c);
    int one = 1, none = 0, sends = i->rank == 0 ? 2 : 0, n_send[2] = {sends, sends}, n_recv[2] = {1, 1};
    char x[256] = {0}, y[256];
    void *window[2] = {x, x}, *other[2] = {y, y};
    Rows rows = {y, x, 8};
    BlockSeg seg = {f->kind == 6 ? f->arg : 1 - i->rank, i->rank, 0};
    switch (f->kind) {
    case 0: comm_barrier(c); break;
    case 1: comm_block(c, f->arg); break;
    case 2: comm_stride(c, f->arg); break;
    case 3: // one rank dies, the others wait for it
        CHECK_NUMERIC(i->rank != f->arg, "rank %d has a fault of its own", i->rank);
        comm_barrier(c);
        break;
    case 4: CHECK_DATA(0, "all see this"); break;
    case 5: comm_rows(c, &rows, 1, n_recv, n_send, 1, 4); break; // 2 rows sent, 1 expected
    case 6: // a node that is not there
        comm_blocks_start(c, other, &seg, &one, (const void *const *)window, &seg, &one, 8, 0, 8);
        break;
    case 7: // the same number of bytes, from different calls
        if (i->rank == 0) comm_blocks_start(c, other, &seg, &none, (const void *const *)window, &seg, &none, 8, 0, 8);
        comm_rows(c, &rows, 1, n_recv, n_send, 0, 4);
        break;
    case 9: // a block more is expected than was sent: told by the one that came
        comm_blocks_start(c, other, (BlockSeg[]){seg, seg}, i->rank ? &f->arg : &none, (const void *const *)window, &seg,
                          i->rank ? &none : &one, 8, 0, 8);
        comm_blocks_finish(c);
        break;
    case 10: // none was sent and one is expected: told by the next call's message
        comm_blocks_start(c, other, &seg, i->rank ? &one : &none, (const void *const *)window, &seg, &none, 8, 0, 8);
        comm_rows(c, &rows, 1, n_recv, n_send, 0, 4);
        comm_blocks_finish(c);
        break;
    case 11: comm_rows(c, &rows, 1, n_recv, n_send, 0, 1); break; // more than there is room for
    case 12: // a rank that never comes
        if (i->rank == 0) comm_rows(c, &rows, 1, n_recv, n_send, 0, 4);
        else sleep(30);
        break;
    case 13:
        if (i->rank == 0) comm_node_barrier(c);
        else sleep(30);
        break;
    default: comm_window(c, SIZE_MAX, "absurd");
    }
}

static void run_fault(void *p) {
    Fault *f = p;
    comm_run(NULL, NULL, f->ranks, f->nodes, faulty, f);
}

static void fault_says(Fault f, int status, const char *part) {
    Child c = child_call(run_fault, &f);
    assert_true(child_says(&c, status, part));
}

static void test_faults(void **state) {
    (void)state;
    fault_says((Fault){4, 3, 0, 0}, STATUS_USAGE, "--nodes must divide");
    fault_says((Fault){2, 4, 0, 0}, STATUS_USAGE, "--nodes must divide");
    fault_says((Fault){-1, 0, 0, 0}, STATUS_USAGE, "expected numbers >= 0");
    fault_says((Fault){4, 0, 1, 3}, STATUS_USAGE, "groups of 3");
    fault_says((Fault){4, 0, 1, 0}, STATUS_USAGE, "groups of 0");
    fault_says((Fault){6, 2, 1, 2}, STATUS_USAGE, "unevenly"); // 2 nodes of 3
    fault_says((Fault){6, 2, 2, 2}, STATUS_USAGE, "unevenly");
    fault_says((Fault){4, 0, 2, 3}, STATUS_USAGE, "stride 3");
    fault_says((Fault){2, 2, 6, 2}, STATUS_COMM, "expected another node than");
    fault_says((Fault){2, 2, 6, -1}, STATUS_COMM, "expected another node than");
    fault_says((Fault){2, 2, 11, 0}, STATUS_COMM, "2 rows to node 1, expected 0 to 1");
    fault_says((Fault){2, 0, 8, 0}, STATUS_USAGE, "absurd");
    double start = seconds();
    fault_says((Fault){4, 2, 3, 2}, STATUS_NUMERIC, "rank 2: tests/test_comm.c:");
    assert_true(seconds() - start < 10);
    Child c = child_call(run_fault, &(Fault){4, 2, 4, 0});
    assert_true(child_says(&c, STATUS_DATA, "rank 0: "));
    assert_null(strstr(c.out, "rank 1: ")); // told once
    c = child_call(run_fault, &(Fault){1, 0, 4, 0});
    assert_true(child_says(&c, STATUS_DATA, "all see this"));
    assert_null(strstr(c.out, "rank")); // there is only one
    static const int disagree[] = {5, 7, 9, 10};
    for (int k = 0; k < 4; k++) fault_says((Fault){2, 2, disagree[k], 2}, STATUS_COMM, "disagree");
}

// No wait is for ever.
static void test_patience(void **state) {
    (void)state;
    setenv("MOE_PATIENCE", "2", 1);
    fault_says((Fault){2, 2, 12, 0}, STATUS_COMM, "rank 0 has waited 2 s for rank 1");
    fault_says((Fault){2, 1, 13, 0}, STATUS_COMM, "at a barrier that 1 of the node's 2 ranks");
    setenv("MOE_PATIENCE", "soon", 1);
    fault_says((Fault){2, 1, 0, 0}, STATUS_USAGE, "expected seconds");
    unsetenv("MOE_PATIENCE");
}

static void launched_alone(void *arg) {
    setenv("OMPI_COMM_WORLD_SIZE", "4", 1); // and no daemon to talk to: an MPI that does not belong to the launcher
    setenv("OMPI_COMM_WORLD_RANK", "0", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    run_fault(arg);
}

static void test_launcher_faults(void **state) {
    (void)state;
    Child c = child_call(launched_alone, &(Fault){0, 0, 0, 0});
#ifdef USE_MPI
    assert_true(child_says(&c, STATUS_USAGE, "started 4 processes, but"));
#else
    assert_true(child_says(&c, STATUS_USAGE, "built without MPI"));
#endif
    c = child_call(launched_alone, &(Fault){2, 0, 0, 0});
    assert_true(child_says(&c, STATUS_USAGE, "one or the other"));
}

#ifdef USE_MPI
// ---- processes -----------------------------------------------------------------------------------------------------------
static void mpirun_says(const char *arguments, int ranks, int status, const char *part, int limit_s) {
    char *program = program_path("test_comm_mpi");
    char *command = str_format("OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe -n %d '%s' %s",
                               ranks, program,
                               arguments);
    double start = seconds();
    Child c = child_shell(command, NULL, 0);
    assert_true(child_says(&c, status, part));
    assert_true(seconds() - start < limit_s);
    free(command);
    free(program);
}

static void test_process_faults(void **state) {
    (void)state;
    char *program = program_path("test_comm_mpi");
    int there = file_size(program) > 0 && system("mpirun --version > /dev/null 2>&1") == 0;
    free(program);
    if (!there) skip();
    mpirun_says("die 2", 3, STATUS_NUMERIC, "rank 2: ", 20);
    mpirun_says("die-openmp 1", 2, STATUS_NUMERIC, "rank 1: ", 20);
    mpirun_says("kill 1", 3, 128 + SIGKILL, "", 20); // mpirun's status: a signal ended a rank
    mpirun_says("mismatch 1", 2, STATUS_COMM, "disagree", 20);
    mpirun_says("leave 1", 2, 1, "", 20); // a rank that simply goes, with status 0
    mpirun_says("nodes 3", 2, STATUS_USAGE, "--nodes must divide", 20);
    setenv("MOE_PATIENCE", "2", 1);
    mpirun_says("late 1", 2, STATUS_COMM, "rank 0 has waited 2 s for rank 1", 20);
    unsetenv("MOE_PATIENCE");
}
#endif

int main(int argc, char **argv) {
    no_launcher();
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    alarm(300); // a test that hangs is a failed one
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_world), cmocka_unit_test(test_groups), cmocka_unit_test(test_nested), cmocka_unit_test(test_big),
        cmocka_unit_test(test_faults), cmocka_unit_test(test_patience), cmocka_unit_test(test_launcher_faults),
#ifdef USE_MPI
        cmocka_unit_test(test_process_faults),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
