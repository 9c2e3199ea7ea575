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

// A message longer than 32 bits can count. Sparse: what is never written costs nothing.
enum { BIG_ROWS = 1025 };
static void big(Comm *c, void *arg) {
    atomic_int *failures = arg;
    size_t row_bytes = 1 << 20, bytes = BIG_ROWS * row_bytes;
    int rank = comm_info(c)->rank, one = 1, none = 0;
    char *x = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (rank == 0)
        for (size_t k = 0; k < BIG_ROWS; k++) memcpy(x + k * row_bytes + k, &k, sizeof k);
    RowSeg seg = {1 - rank, 0, BIG_ROWS};
    comm_rows(c, x, &seg, rank ? &one : &none, x, &seg, rank ? &none : &one, row_bytes);
    for (size_t k = 0, got; k < BIG_ROWS && rank; k++) {
        memcpy(&got, x + k * row_bytes + k, sizeof got);
        if (got != k) atomic_fetch_add(failures, 1);
    }
    if (comm_bytes_sent(c) != (rank ? 0 : bytes)) atomic_fetch_add(failures, 1);
    munmap(x, bytes);
}

static void test_big(void **state) {
    (void)state;
    atomic_int failures = 0;
    comm_run(NULL, NULL, 2, 0, big, &failures);
    assert_int_equal(failures, 0);
}

// ---- faults ------------------------------------------------------------------------------------------------------------
typedef struct Fault {
    int ranks, nodes, kind, arg;
} Fault;

static void faulty(Comm *c, void *p) {
    const Fault *f = p;
    const CommInfo *i = comm_info(c);
    int one = 1, none = 0;
    char x[256] = {0}, y[256];
    RowSeg seg = {f->kind == 6 ? f->arg : 1 - i->rank, 0, i->rank == 0 ? 2 : 1};
    switch (f->kind) {
    case 0: comm_barrier(c); break;
    case 1: comm_block(c, f->arg); break;
    case 2: comm_stride(c, f->arg); break;
    case 3: // one rank dies, the others wait for it
        CHECK_NUMERIC(i->rank != f->arg, "rank %d has a fault of its own", i->rank);
        comm_barrier(c);
        break;
    case 4: CHECK_DATA(0, "all see this"); break;
    case 5: comm_rows(c, y, &seg, i->rank ? &one : &none, x, &seg, i->rank ? &none : &one, 8); break; // 2 rows sent, 1 expected
    case 6: comm_rows(c, y, &seg, &one, x, &seg, &one, 8); break;                                    // peer that is not there
    case 7: // the same number of bytes, from different calls
        if (i->rank == 0) comm_rows(c, y, &seg, &none, x, &seg, &none, 8);
        seg.n = 1;
        comm_rows(c, y, &seg, i->rank ? &one : &none, x, &seg, i->rank ? &none : &one, 8);
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
    fault_says((Fault){2, 0, 6, 2}, STATUS_COMM, "expected a peer below 2");
    fault_says((Fault){2, 0, 6, -1}, STATUS_COMM, "expected a peer below 2");
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
    for (int nodes = 1; nodes <= 2; nodes++) {
        fault_says((Fault){2, nodes, 5, 1}, STATUS_COMM, "disagree");
        fault_says((Fault){2, nodes, 7, 1}, STATUS_COMM, "disagree");
    }
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
}
#endif

int main(int argc, char **argv) {
    no_launcher();
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    alarm(300); // a test that hangs is a failed one
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_world), cmocka_unit_test(test_groups), cmocka_unit_test(test_nested), cmocka_unit_test(test_big),
        cmocka_unit_test(test_faults), cmocka_unit_test(test_launcher_faults),
#ifdef USE_MPI
        cmocka_unit_test(test_process_faults),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
