// Plans made on the device are, bit for bit, those of one thread of the host: a thousand small matrices, thirty large ones, every
// policy, and blocks of several numbers of threads.
#include "kernels/check.h"
#include "kernels/cuda/plan.h"
#include "tests/common/cases.h"
#include "topoep/policies.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { MAX_R = 256, MAX_E = 512, MAX_S = 4 };
#define TOPOEP(...) (PlanOptions){.block = 1, .policy = POLICY_TOPOEP, __VA_ARGS__}

static void solve_host(Case *c, PlanOptions o) {
    void *work = host_alloc(solve_work_bytes(c->R, c->E, c->cost.N, c->cost.S)), *scratch = host_alloc(policy_work_bytes(c->R, c->E));
    Solve v;
    solve_bind(&v, work, c->D, c->R, c->E, &c->cost, o);
    policy_solve(&v, o, c->history, scratch);
    solve_result(&v, c->quota, c->slot, &c->info);
    free(work), free(scratch);
}

static struct { // with room for the largest case
    Dev *d;
    int *D;
    Plan plan;
    void *work, *unset; // unset: on the host, what untouched memory holds
} on;

static int open_device(void **state) {
    (void)state;
    Dev *d = on.d = dev_init((DevOptions){.poison = 1});
    size_t cells = SIZE(MAX_R, MAX_E, sizeof(int)), bytes = plan_work_bytes(MAX_R, MAX_E, MAX_R, MAX_S);
    on.D = dev_alloc(d, cells, "demand");
    on.plan = (Plan){.quota = dev_alloc(d, cells, "quotas"), .slot = dev_alloc(d, SIZE(MAX_R, MAX_S, sizeof(int)), "slots"),
                     .info = dev_alloc(d, sizeof(PlanInfo), "info"), .history = dev_alloc(d, SIZE(MAX_E, sizeof(int64_t)), "history")};
    on.work = dev_alloc(d, bytes, "work");
    on.unset = host_alloc(bytes);
    memset(on.unset, 0xff, bytes);
    return 0;
}
static int close_device(void **state) {
    (void)state;
    free(on.unset);
    dev_free(on.d);
    return 0;
}

static void solve_device(Case *c, PlanOptions o, int threads) {
    size_t cells = SIZE(c->R, c->E, sizeof(int)), slots = SIZE(c->R, c->cost.S, sizeof(int)), history = SIZE(c->E, sizeof(int64_t));
    dev_upload(on.d, on.D, c->D, cells);
    dev_upload(on.d, on.plan.history, c->history, history);
    dev_upload(on.d, on.plan.quota, on.unset, cells);
    dev_upload(on.d, on.work, on.unset, plan_work_bytes(c->R, c->E, c->cost.N, c->cost.S));
    plan_solve_on(on.d, &on.plan, on.D, c->R, c->E, &c->cost, o, on.work, threads);
    dev_download(on.d, c->quota, on.plan.quota, cells);
    dev_download(on.d, c->slot, on.plan.slot, slots);
    dev_download(on.d, &c->info, on.plan.info, sizeof c->info);
    dev_download(on.d, c->history, on.plan.history, history);
}

// Frees c. Returns whether the plan has copies
static int compare(Case *c, Draw *d, PlanOptions o, int threads) {
    size_t cells = SIZE(c->R, c->E, sizeof(int)), slots = SIZE(c->R, c->cost.S, sizeof(int)), history = SIZE(c->E, sizeof(int64_t));
    Case host = *c;
    c->quota = host_alloc(cells), c->slot = host_alloc(slots);
    host.history = host_alloc(history), c->history = host_alloc(history);
    for (int e = 0; e < c->E; e++) host.history[e] = c->history[e] = (int64_t)draw(d, 3) * draw(d, 100) << POLICY_AVERAGE_BITS;
    solve_host(&host, o);
    solve_device(c, o, threads);
    assert_memory_equal(&host.info, &c->info, sizeof host.info); // its hash included
    assert_memory_equal(host.quota, c->quota, cells);
    assert_memory_equal(host.slot, c->slot, slots);
    assert_memory_equal(host.history, c->history, history);
    free(c->quota), free(c->slot), free(c->history), free(host.history);
    case_free(&host);
    return host.info.copies > 0;
}

static void test_small(void **state) {
    (void)state;
    Draw d = {5, 0};
    int copies = 0;
    for (int k = 0; k < 1000; k++) {
        Case c = case_draw(&d, 0);
        PlanOptions o = TOPOEP(.effort = k % 16 ? EFFORT_LOW : EFFORT_DEFAULT, .target = k % 5 ? TARGET_TIME : TARGET_BALANCE,
                               .without = k % 7 ? 0 : (unsigned)k % 16);
        o.block = k % 11 ? 1 : 1 + draw(&d, 9);
        copies += compare(&c, &d, o, k % 10 ? 32 : 64);
    }
    assert_true(copies > 300);
}

static int pairs_of(const Case *c) {
    int n = 0;
    for (int i = 0; i < c->R * c->E; i++) n += c->D[i];
    return n;
}

static void test_large(void **state) {
    (void)state;
    static const struct { int n, N, G, H, S, threads; PlanEffort effort; } lists[] = {
        {12, 4, 8, 4, 2, 32, EFFORT_LOW},  {2, 4, 8, 4, 1, 256, EFFORT_LOW}, {3, 4, 8, 4, 2, 32, EFFORT_DEFAULT}, {6, 8, 8, 4, 2, 32, EFFORT_LOW},
        {1, 8, 8, 4, 1, 32, EFFORT_DEFAULT}, {2, 16, 8, 2, 2, 64, EFFORT_LOW}, {3, 32, 8, 2, 2, 32, EFFORT_LOW}, {1, 8, 32, 2, 1, 32, EFFORT_LOW}};
    Draw d = {6, 0};
    int n = 0, copies = 0;
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (int k = 0; k < lists[i].n; k++, n++) {
            Case c = case_make(lists[i].N, lists[i].G, lists[i].H, lists[i].S);
            case_draw_cost(&d, &c);
            do case_draw_loads(&d, &c);
            while (pairs_of(&c) < 4 * c.E); // not the matrices without anything to plan
            copies += compare(&c, &d, TOPOEP(.effort = lists[i].effort), lists[i].threads);
        }
    print_message("%d matrices: %d plans with copies\n", n, copies);
    assert_true(n == 30 && copies > 15);
}

static void test_geometry(void **state) {
    (void)state;
    for (int threads = 32; threads <= 512; threads *= 2) {
        Draw d = {7, 0};
        for (int k = 0; k < 2; k++) {
            Case c = case_make(2, 2, 2, 2);
            case_draw_cost(&d, &c), case_draw_loads(&d, &c);
            compare(&c, &d, TOPOEP(.effort = EFFORT_LOW), threads);
        }
    }
}

static void test_policies(void **state) {
    (void)state;
    Draw d = {8, 0};
    for (int p = 0; p < POLICIES; p++)
        for (int k = 0; k < 10; k++) {
            Case c = case_make(1 + k % 3, 1 + k % 4, 2, k % 4);
            case_draw_cost(&d, &c), case_draw_loads(&d, &c);
            compare(&c, &d, (PlanOptions){.policy = (Policy)p, .block = 1 + k % 2, .effort = EFFORT_LOW}, 32 << k % 3);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_small), cmocka_unit_test(test_large), cmocka_unit_test(test_geometry),
                                       cmocka_unit_test(test_policies)};
    return cmocka_run_group_tests_name("plans on the device", tests, open_device, close_device);
}
