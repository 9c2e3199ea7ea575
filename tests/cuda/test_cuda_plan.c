// Plans made on the device are, bit for bit, those of one thread of the host, for every number of threads of the block.
#include "kernels/check.h"
#include "kernels/cuda/plan.h"
#include "kernels/rng.h"
#include "topoep/policies.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static uint64_t counter;
static int draw(int n) { return n > 0 ? (int)(rng_u64(5, 9, counter++) % (uint64_t)n) : 0; } // 0..n-1

typedef struct Made { // a plan in the host's memory
    int *quota, *slot;
    int64_t *history;
    PlanInfo info;
} Made;

static Made made_alloc(int R, int E, int S) {
    return (Made){.quota = host_alloc(SIZE(E, R, sizeof(int))), .slot = host_alloc(SIZE(R, S + 1, sizeof(int))),
                  .history = host_alloc(SIZE(E, sizeof(int64_t)))};
}
static void made_free(Made *m) { free(m->quota), free(m->slot), free(m->history); }

static void solve_host(Made *m, const int *D, int R, int E, const Cost *cost, PlanOptions o) {
    void *work = host_alloc(solve_work_bytes(R, E, cost->N, cost->S)), *scratch = host_alloc(policy_work_bytes(R, E));
    Solve v;
    solve_bind(&v, work, D, R, E, cost, o);
    policy_solve(&v, o, m->history, scratch);
    solve_result(&v, m->quota, m->slot, &m->info);
    free(work), free(scratch);
}

static struct { // with room for the largest case
    Dev *d;
    int *D;
    Plan plan;
    void *work;
} on;

static int open_device(void **state) {
    (void)state;
    int R = 8, E = 36, S = 4;
    Dev *d = dev_init((DevOptions){.poison = 1});
    on.d = d;
    on.D = dev_alloc(d, SIZE(16, R, E, sizeof(int)), "demand");
    on.plan = (Plan){.quota = dev_alloc(d, SIZE(16, E, R, sizeof(int)), "quotas"), .slot = dev_alloc(d, SIZE(16, R, S, sizeof(int)), "slots"),
                     .info = dev_alloc(d, sizeof(PlanInfo), "info"), .history = dev_alloc(d, SIZE(E, sizeof(int64_t)), "history")};
    on.work = dev_alloc(d, 16 * plan_work_bytes(R, E, 4, S), "work");
    return 0;
}
static int close_device(void **state) {
    (void)state;
    dev_free(on.d);
    return 0;
}

static void solve_device(Made *m, const int *D, int R, int E, const Cost *cost, PlanOptions o, int threads) {
    size_t quota = SIZE(E, R, sizeof(int)), slots = SIZE(R, cost->S, sizeof(int)), history = SIZE(E, sizeof(int64_t));
    dev_upload(on.d, on.D, D, SIZE(R, E, sizeof(int)));
    dev_upload(on.d, on.plan.history, m->history, history);
    plan_solve_on(on.d, &on.plan, on.D, R, E, cost, o, on.work, threads);
    dev_download(on.d, m->quota, on.plan.quota, quota);
    dev_download(on.d, m->slot, on.plan.slot, slots);
    dev_download(on.d, &m->info, on.plan.info, sizeof m->info);
    dev_download(on.d, m->history, on.plan.history, history);
}

// Loads of a few kinds: even, one hot expert, hot ranks, every source its own taste
static void draw_loads(int *D, int R, int E) {
    int kind = draw(4), hot = draw(E), scale = 1 + draw(60);
    for (int i = 0; i < R * E; i++) {
        int e = i % E, s = i / E, x = draw(scale);
        D[i] = kind == 0 ? x : kind == 1 ? (e == hot ? 8 * scale : x / 4) : kind == 2 ? (e / (E / R) == hot % R ? 6 * x : x / 2)
                                                                                     : ((e + 7 * s) % E < 3 ? 9 * x : x / 3);
    }
}

// Returns whether the plan has copies
static int compare(int N, int G, int per_rank, int S, PlanOptions o, int threads) {
    int R = N * G, E = R * per_rank, *D = host_alloc(SIZE(R, E, sizeof(int)));
    Cost cost = {.name = "drawn", .N = N, .G = G, .S = S, .pair_compute_ps = 1 + draw(1000), .pair_intra_ps = draw(1000),
                 .pair_inter_ps = draw(2000), .copy_intra_ps = draw(5000), .copy_inter_ps = draw(9000), .overlap_permille = draw(1001),
                 .plan_fixed_ps = draw(2) * 1000};
    draw_loads(D, R, E);
    Made host = made_alloc(R, E, S), device = made_alloc(R, E, S);
    for (int e = 0; e < E; e++) host.history[e] = device.history[e] = (int64_t)draw(3) * draw(100) << POLICY_AVERAGE_BITS;
    solve_host(&host, D, R, E, &cost, o);
    solve_device(&device, D, R, E, &cost, o, threads);
    assert_memory_equal(&host.info, &device.info, sizeof host.info); // its hash included
    assert_memory_equal(host.quota, device.quota, SIZE(E, R, sizeof(int)));
    assert_memory_equal(host.slot, device.slot, SIZE(R, S, sizeof(int)));
    assert_memory_equal(host.history, device.history, SIZE(E, sizeof(int64_t)));
    int copies = host.info.copies > 0;
    made_free(&host), made_free(&device);
    free(D);
    return copies;
}

static void test_small(void **state) {
    (void)state;
    static const int nodes[] = {1, 1, 2, 2, 3}, ranks[] = {1, 2, 2, 3, 4};
    int copies = 0;
    for (int k = 0; k < 150; k++)
        copies += compare(nodes[draw(5)], ranks[draw(5)], 1 + draw(3), draw(4),
                          (PlanOptions){.policy = POLICY_TOPOEP, .block = 1, .effort = k % 8 ? EFFORT_LOW : EFFORT_DEFAULT,
                                        .target = k % 5 ? TARGET_TIME : TARGET_BALANCE, .without = k % 7 ? 0 : (unsigned)k % 16}, 32);
    assert_true(copies > 30);
}

static void test_large(void **state) {
    (void)state;
    for (int k = 0; k < 4; k++)
        compare(2, 4, 4, 2, (PlanOptions){.policy = POLICY_TOPOEP, .block = 1 + k % 3, .effort = k % 4 ? EFFORT_LOW : EFFORT_DEFAULT}, k ? 64 : 256);
}

static void test_geometry(void **state) {
    (void)state;
    uint64_t at = counter;
    for (int threads = 32; threads <= 512; threads *= 2) {
        counter = at;
        for (int k = 0; k < 2; k++) compare(2, 2, 2, 2, (PlanOptions){.policy = POLICY_TOPOEP, .block = 1, .effort = EFFORT_LOW}, threads);
    }
}

static void test_policies(void **state) {
    (void)state;
    for (int p = 0; p < POLICIES; p++)
        for (int k = 0; k < 10; k++) compare(1 + k % 3, 1 + k % 4, 2, k % 4, (PlanOptions){.policy = (Policy)p, .block = 1 + k % 2, .effort = EFFORT_LOW}, 32 << k % 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_small), cmocka_unit_test(test_large), cmocka_unit_test(test_geometry),
                                       cmocka_unit_test(test_policies)};
    return cmocka_run_group_tests_name("plans on the device", tests, open_device, close_device);
}
