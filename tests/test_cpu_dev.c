// The CPU's device: its memory, its clock, its exponential function.
#include "kernels/check.h"
#include "kernels/cpu/vmath.h"
#include "tests/common/child.h"
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

// ---- exp -------------------------------------------------------------------------------------------------------------
// Every 1009th float of all 2^32
static void test_exp(void **state) {
    (void)state;
    double worst = 0;
    for (uint64_t u = 0; u < 1ull << 32; u += 1009) {
        union { uint32_t u; float f; } in = {(uint32_t)u};
        float got = vexpf(in.f), want = (float)exp(in.f);
        if (isnan(in.f)) assert_true(isnan(got));
        else if (want == 0 || isinf(want)) assert_true(got == want);
        else worst = fmax(worst, fabs(got - exp(in.f)) / (nextafterf(want, INFINITY) - want));
    }
    assert_true(worst <= 1.1);
    assert_true(worst > 0.11); // ten times better would mean that nothing was measured
    assert_true(vexpf(0) == 1 && vexp(0) == 1 && vsigmoid(0) == (wide)0.5 && vsigmoid(-1000) == 0 && vsigmoid(1000) == 1);
}

// ---- device ----------------------------------------------------------------------------------------------------------
static void touch(void *arg) {
    signal(SIGSEGV, SIG_DFL); // a sanitizer would report what is expected here
    *(volatile char *)arg = 1;
}

static void test_memory(void **state) {
    (void)state;
    Dev *d = dev_init((DevOptions){.threads = 2}), *p = dev_init((DevOptions){.poison = 1});
    Dev *s = dev_init((DevOptions){.strict = 1});
    assert_true(strstr(dev_name(d), "2 threads") && strstr(dev_name(d), sizeof(real) == 4 ? "fp32" : "fp64"));
    char *a = dev_alloc(d, 1000, "a"), *b = dev_alloc(d, 0, "b"), *c = dev_alloc(d, 1ull << 36, "64 GiB of untouched pages");
    assert_true(a && b && c && (uintptr_t)a % 64 == 0 && (uintptr_t)c % 64 == 0);
    size_t taken[MEMORY_KINDS];
    dev_taken(d, taken);
    assert_int_equal(taken[MEMORY_WORKSPACE], 1000 + (1ull << 36));
    for (int i = 0; i < 1000; i++) assert_int_equal(a[i], 0);
    c[1ull << 35] = 1;
    dev_release(d, c);
    dev_release(d, NULL);
    assert_int_equal(dev_taken(d, NULL), 1000);
    assert_int_equal(child_call(touch, c + (1ull << 35)).status, 128 + SIGSEGV); // gone
    a[999] = 1;
    float *f = dev_alloc(p, 401 * sizeof *f, "poisoned");
    double *g = dev_alloc(p, 401 * sizeof *g, "poisoned");
    int *n = dev_alloc(p, 401 * sizeof *n, "poisoned");
    assert_true((uintptr_t)f % 64 == 0 && isnan(f[0]) && isnan(f[400]) && isnan(g[0]) && isnan(g[400]) && n[400] > 1 << 30);
    assert_int_equal(child_call(touch, (char *)f + (401 * sizeof *f + 63) / 64 * 64).status, 128 + SIGSEGV); // the guard page
    assert_int_equal(child_call(touch, (char *)f + 400 * sizeof *f).status, 0);
    int *hidden = dev_alloc(s, sizeof(int), "hidden"), seen = 0, five = 5;
    assert_int_equal(child_call(touch, hidden).status, 128 + SIGSEGV); // strict: closed from the start
    dev_upload(s, hidden, &five, sizeof five);
    dev_download(s, &seen, hidden, sizeof seen);
    assert_int_equal(seen, 5);
    assert_int_equal(child_call(touch, hidden).status, 128 + SIGSEGV); // and again after an op
    dev_release(p, f);
    assert_int_equal(child_call(touch, f).status, 128 + SIGSEGV);
    dev_release(s, hidden);
    assert_int_equal(dev_taken(s, NULL), 0);
    dev_upload(s, dev_alloc(s, sizeof(int), "after it"), &five, sizeof five);
    dev_free(d);
    dev_free(p);
    dev_free(s);
    dev_free(NULL);
}

static void impossible_size(void *arg) {
    dev_alloc(arg, SIZE_MAX - 100, "too much");
}
static void negative_threads(void *arg) {
    (void)arg;
    dev_init((DevOptions){.threads = -1});
}

static void not_its_own(void *arg) {
    int x;
    dev_release(arg, &x);
}

static void test_refusals(void **state) {
    (void)state;
    Dev *d = dev_init((DevOptions){.threads = 1});
    assert_int_equal(child_call(not_its_own, d).status, STATUS_DEVICE);
    assert_int_equal(child_call(impossible_size, d).status, STATUS_DEVICE);
    assert_int_equal(child_call(negative_threads, NULL).status, STATUS_USAGE);
    dev_free(d);
}

static void test_clock(void **state) {
    (void)state;
    Dev *d = dev_init((DevOptions){.threads = 1});
    double ms[STAGES], sum = 0;
    assert_int_equal(dev_stage_now(d), STAGE_OTHER);
    dev_stage_read(d, ms);
    dev_stage(d, STAGE_ROUTER);
    assert_int_equal(dev_stage_now(d), STAGE_ROUTER);
    usleep(20000);
    dev_stage(d, STAGE_PLAN);
    usleep(5000);
    dev_stage_read(d, ms);
    assert_true(ms[STAGE_ROUTER] >= 20 && ms[STAGE_PLAN] >= 5 && ms[STAGE_ROUTER] < 2000);
    for (int i = 0; i < STAGES; i++) {
        if (i != STAGE_ROUTER && i != STAGE_PLAN && i != STAGE_OTHER) sum += ms[i];
        assert_true(stage_names[i] && stage_names[i][0]);
    }
    assert_true(sum == 0);
    dev_stage_read(d, ms);
    assert_true(ms[STAGE_ROUTER] == 0 && ms[STAGE_PLAN] < 5);
    dev_free(d);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_exp), cmocka_unit_test(test_memory), cmocka_unit_test(test_refusals),
                                       cmocka_unit_test(test_clock)};
    return cmocka_run_group_tests_name("the CPU's device", tests, NULL, NULL);
}
