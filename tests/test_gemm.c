// Products, plain and grouped, against a naive oracle; a row's bits do not depend on its company; refusals.
// On the CPU everything runs twice: on the kernels this machine gets and on the plain ones that any machine can run.
#include "tests/common/child.h"
#include "tests/common/lab.h"
#include "tests/ref/gemm_ref.h"
#include "kernels/check.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#ifdef BACKEND_cpu // the plain kernels, compiled into this program under other names
#include "kernels/cpu/dev.h"
#include "kernels/cpu/gemm.h"
#define CPU_PLAIN
#define dev_linear plain_linear
#define dev_linear_dx plain_linear_dx
#define dev_linear_dw plain_linear_dw
#define dev_group_linear plain_group_linear
#define dev_group_linear_dx plain_group_linear_dx
#define dev_group_linear_dw plain_group_linear_dw
#define dev_router_logits plain_router_logits
#define dev_router_logits_bwd plain_router_logits_bwd
#include "kernels/cpu/gemm.c"
#undef dev_linear
#undef dev_linear_dx
#undef dev_linear_dw
#undef dev_group_linear
#undef dev_group_linear_dx
#undef dev_group_linear_dw
#undef dev_router_logits
#undef dev_router_logits_bwd
enum { CHAIN = GEMM_KC, DENSE_ROWS = 1 }; // products summed in a chain; whether dense products keep the rule of rows, too
#else
enum { CHAIN = 1 << 30, DENSE_ROWS = 0 };
#endif

typedef struct Ops {
    void (*linear)(Dev *, real *, const real *, const real *, const real *, int, int, int);
    void (*linear_dx)(Dev *, real *, const real *, const real *, const real *, int, int, int);
    void (*linear_dw)(Dev *, wide *, const real *, const real *, int, int, int);
    void (*group)(Dev *, real *, const real *, const real *const *, const int *, int, int, int, int);
    void (*group_dx)(Dev *, real *, const real *, const real *const *, const int *, int, int, int, int);
    void (*group_dw)(Dev *, wide *const *, const real *, const real *, const int *, int, int, int, int);
    void (*logits)(Dev *, wide *, const real *, const real *, int, int, int);
    void (*logits_bwd)(Dev *, real *, wide *, const wide *, const real *, const real *, int, int, int);
} Ops;
static const Ops all_ops[] = {
    {dev_linear, dev_linear_dx, dev_linear_dw, dev_group_linear, dev_group_linear_dx, dev_group_linear_dw, dev_router_logits,
     dev_router_logits_bwd},
#ifdef BACKEND_cpu
    {plain_linear, plain_linear_dx, plain_linear_dw, plain_group_linear, plain_group_linear_dx, plain_group_linear_dw,
     plain_router_logits, plain_router_logits_bwd},
#endif
};
enum { KINDS = sizeof all_ops / sizeof *all_ops };

#define RUN(body, table) lab_threads(body, table, sizeof(table) / sizeof((table)[0]))

// Roundings on the way to one element: CHAIN products in a chain, the blocks in another, `add`
static double *bound_of(double *size, size_t n, int k) {
    double chain = (k < CHAIN ? k : CHAIN) + k / CHAIN + 2;
    for (size_t i = 0; i < n; i++) size[i] *= chain * REAL_EPS;
    return size;
}

// The same of results kept in `real`
static double *bound_real(double *size, const double *want, size_t n, int k) {
    bound_of(size, n, k);
    for (size_t i = 0; i < n; i++) size[i] += REAL_STORE * REAL_EPS * fabs(want[i]);
    return size;
}

// ---- plain products ---------------------------------------------------------------------------------------------------
static void linear_with(Lab *l, const Ops *f, const int *dim) {
    const int M = dim[0], N = dim[1], K = dim[2];
    const size_t ny = SIZE(M, N), nx = SIZE(M, K), nw = SIZE(N, K);
    double *x = lab_random(l, nx, -1, 1), *w = lab_random(l, nw, -1, 1), *dy = lab_random(l, ny, -1, 1);
    double *add = lab_random(l, ny, -1, 1), *addx = lab_random(l, nx, -1, 1), *dw = lab_random(l, nw, -1, 1);
    real *dx_ = lab_real(l, x, nx), *dw_ = lab_real(l, w, nw), *ddy = lab_real(l, dy, ny);
    double *want = lab_zeros(l, ny), *size = lab_zeros(l, ny), *wantx = lab_zeros(l, nx), *sizex = lab_zeros(l, nx);
    for (int with = 0; with < 3; with++) { // no add, an add apart, an add in place
        real *y = lab_real(l, with == 2 ? add : NULL, ny), *gx = lab_real(l, with == 2 ? addx : NULL, nx);
        f->linear(l->d, y, with == 0 ? NULL : with == 1 ? lab_real(l, add, ny) : y, dx_, dw_, M, N, K);
        ref_product(want, size, with ? add : NULL, x, 0, w, 1, M, N, K);
        lab_close_to("linear", lab_get(l, y, ny), want, bound_real(size, want, ny, K), ny);
        f->linear_dx(l->d, gx, with == 0 ? NULL : with == 1 ? lab_real(l, addx, nx) : gx, ddy, dw_, M, N, K);
        ref_product(wantx, sizex, with ? addx : NULL, dy, 0, w, 0, M, K, N);
        lab_close_to("linear dx", lab_get(l, gx, nx), wantx, bound_real(sizex, wantx, nx, N), nx);
    }
    double *wantw = lab_zeros(l, nw), *sizew = lab_zeros(l, nw);
    wide *gw = lab_wide(l, dw, nw);
    f->linear_dw(l->d, gw, ddy, dx_, M, N, K);
    ref_product(wantw, sizew, dw, dy, 1, x, 0, N, K, M);
    lab_close_to("linear dw", lab_get_wide(l, gw, nw), wantw, bound_of(sizew, nw, M), nw);
}

static void linear(Lab *l, const int *dim) {
    for (int i = 0; i < KINDS; i++) linear_with(l, &all_ops[i], dim);
}

static void test_linear(void **state) {
    (void)state;
    // rows 1..2*VL go another way than more rows; one more or less than each block size; several blocks of the sum
    static const int dims[][LAB_DIMS] = {
        {0, 5, 7}, {3, 0, 4}, {2, 3, 0}, {0, 0, 0}, {1, 1, 1}, {1, 17, 300}, {2, 5, 3}, {7, 33, 19}, {8, 16, 8}, {9, 31, 65},
        {16, 47, 257}, {17, 48, 256}, {18, 96, 96}, {5, 12, 513}, {97, 15, 33}, {101, 130, 67}, {191, 65, 255}, {300, 37, 300},
        {13, 600, 40}, {40, 1030, 9}, {25, 1024, 12}, {600, 21, 20}, {260, 80, 600}, {60, 17, 2100}, {1100, 50, 19}, {50, 2052, 20},
    };
    RUN(linear, dims);
}

static void router(Lab *l, const int *dim) {
    const int BT = dim[0], E = dim[1], C = dim[2];
    const size_t nl = SIZE(BT, E), nx = SIZE(BT, C), nw = SIZE(E, C);
    double *x = lab_random(l, nx, -1, 1), *w = lab_random(l, nw, -1, 1), *dl = lab_random(l, nl, -1, 1);
    double *dx = lab_random(l, nx, -1, 1), *dw = lab_random(l, nw, -1, 1);
    real *dev_x = lab_real(l, x, nx), *dev_w = lab_real(l, w, nw), *dev_dx = lab_real(l, dx, nx);
    wide *logits = lab_wide(l, NULL, nl), *dev_dw = lab_wide(l, dw, nw);
    double *want = lab_zeros(l, nl), *size = lab_zeros(l, nl), *wantx = lab_zeros(l, nx), *sizex = lab_zeros(l, nx);
    double *wantw = lab_zeros(l, nw), *sizew = lab_zeros(l, nw);
    dev_router_logits(l->d, logits, dev_x, dev_w, BT, E, C);
    ref_product(want, size, NULL, x, 0, w, 1, BT, E, C);
    lab_close_to("logits", lab_get_wide(l, logits, nl), want, bound_of(size, nl, C), nl);
    dev_router_logits_bwd(l->d, dev_dx, dev_dw, lab_wide(l, dl, nl), dev_x, dev_w, BT, E, C);
    ref_product(wantx, sizex, dx, dl, 0, w, 0, BT, C, E);
    ref_product(wantw, sizew, dw, dl, 1, x, 0, E, C, BT);
    lab_close_to("router dx", lab_get(l, dev_dx, nx), wantx, bound_real(sizex, wantx, nx, E), nx);
    lab_close_to("router dw", lab_get_wide(l, dev_dw, nw), wantw, bound_of(sizew, nw, BT), nw);
}

static void test_router(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{0, 4, 8}, {1, 1, 16}, {9, 4, 16}, {70, 7, 33}, {130, 64, 64}};
    RUN(router, dims);
}

// ---- grouped products -------------------------------------------------------------------------------------------------
enum { J_MAX = 9 };
// Rows of group j in case `kind`: empty first, last, in between, all, and one with most of the rows
static const int group_rows[][J_MAX] = {
    {0, 3, 0, 0, 20, 1, 0, 7, 0}, {0}, {5, 6, 7, 8, 9, 16, 17, 18, 19}, {0, 0, 0, 230, 0, 2, 0, 0, 0}, {1, 1, 1, 1, 1, 1, 1, 1, 1},
};

typedef struct Groups {
    int J, rows, M, off[J_MAX + 1];
    int *dev_off;
} Groups;

static Groups groups_of(Lab *l, int kind) {
    Groups g = {.J = J_MAX};
    for (int j = 0; j < g.J; j++) g.off[j + 1] = g.off[j] + group_rows[kind][j];
    g.rows = g.off[g.J];
    g.M = g.rows + 3; // room for more rows than there are
    g.dev_off = lab_int(l, g.off, g.J + 1);
    return g;
}

static void **table_of(Lab *l, void *base, int J, size_t bytes) { // J arrays that lie one after the other
    void *table[J_MAX];
    for (int j = 0; j < J; j++) table[j] = (char *)base + j * bytes;
    return lab_bytes(l, table, J * sizeof(void *));
}

static void group_with(Lab *l, const Ops *f, const int *dim) {
    const int N = dim[0], K = dim[1];
    const Groups g = groups_of(l, dim[2]);
    const size_t ny = SIZE(g.M, N), nx = SIZE(g.M, K), nw = SIZE(N, K), used_y = SIZE(g.rows, N), used_x = SIZE(g.rows, K);
    double *x = lab_random(l, nx, -1, 1), *w = lab_random(l, g.J * nw, -1, 1), *dy = lab_random(l, ny, -1, 1);
    for (size_t i = used_x; i < nx; i++) x[i] = NAN; // rows past the last group must not be read
    for (size_t i = used_y; i < ny; i++) dy[i] = NAN;
    double *dw = lab_random(l, g.J * nw, -1, 1);
    real *dev_x = lab_real(l, x, nx), *dev_dy = lab_real(l, dy, ny), *y = lab_real(l, NULL, ny), *gx = lab_real(l, NULL, nx);
    wide *dev_dw = lab_wide(l, dw, g.J * nw);
    const real *const *wt = (const real *const *)table_of(l, lab_real(l, w, g.J * nw), g.J, nw * sizeof(real));
    wide *const *dwt = (wide *const *)table_of(l, dev_dw, g.J, nw * sizeof(wide));
    f->group(l->d, y, dev_x, wt, g.dev_off, g.J, g.M, N, K);
    f->group_dx(l->d, gx, dev_dy, wt, g.dev_off, g.J, g.M, N, K);
    f->group_dw(l->d, dwt, dev_dy, dev_x, g.dev_off, g.J, g.M, N, K);
    double *got = lab_get(l, y, ny), *gotx = lab_get(l, gx, nx), *gotw = lab_get_wide(l, dev_dw, g.J * nw);
    lab_poisoned("rows past the last group", got + used_y, ny - used_y);
    lab_poisoned("dx rows past the last group", gotx + used_x, nx - used_x);
    double *want = lab_zeros(l, ny), *size = lab_zeros(l, ny), *wantx = lab_zeros(l, nx), *sizex = lab_zeros(l, nx);
    double *wantw = lab_zeros(l, nw), *sizew = lab_zeros(l, nw);
    for (int j = 0; j < g.J; j++) {
        const int m = g.off[j + 1] - g.off[j];
        const size_t ry = SIZE(g.off[j], N), rx = SIZE(g.off[j], K);
        ref_product(want + ry, size + ry, NULL, x + rx, 0, w + j * nw, 1, m, N, K);
        ref_product(wantx + rx, sizex + rx, NULL, dy + ry, 0, w + j * nw, 0, m, K, N);
        ref_product(wantw, sizew, dw + j * nw, dy + ry, 1, x + rx, 0, N, K, m);
        if (m == 0) lab_equal("dw of an empty group", gotw + j * nw, dw + j * nw, nw);
        else lab_close_to("group dw", gotw + j * nw, wantw, bound_of(sizew, nw, m), nw);
    }
    lab_close_to("group linear", got, want, bound_real(size, want, used_y, K), used_y);
    lab_close_to("group dx", gotx, wantx, bound_real(sizex, wantx, used_x, N), used_x);
}

static void group(Lab *l, const int *dim) {
    for (int i = 0; i < KINDS; i++) group_with(l, &all_ops[i], dim);
}

static void test_group(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{16, 8, 0}, {5, 7, 0}, {40, 33, 1}, {40, 33, 2}, {33, 270, 2}, {130, 20, 3}, {30, 300, 4},
                                         {3, 0, 0}, {272, 136, 3}, {264, 72, 2}};
    RUN(group, dims);
}

static void test_no_groups(void **state) {
    (void)state;
    Lab *l = lab_open(2);
    int off = 0, *dev_off = lab_int(l, &off, 1);
    dev_group_linear(l->d, lab_real(l, NULL, 4), lab_real(l, NULL, 4), NULL, dev_off, 0, 1, 4, 4);
    lab_close(l);
}

// ---- a row's bits ------------------------------------------------------------------------------------------------------
static void rows_with(Lab *l, const Ops *f, const int *dim) {
    const int M = dim[0], N = dim[1], K = dim[2];
    const size_t ny = SIZE(M, N), nx = SIZE(M, K);
    double *x = lab_random(l, nx, -1, 1), *dy = lab_random(l, ny, -1, 1);
    real *dev_x = lab_real(l, x, nx), *dev_dy = lab_real(l, dy, ny), *w = lab_real(l, lab_random(l, SIZE(N, K), -1, 1), SIZE(N, K));
    real *y = lab_real(l, NULL, ny), *gx = lab_real(l, NULL, nx), *y2 = lab_real(l, NULL, ny), *gx2 = lab_real(l, NULL, nx);
    if (DENSE_ROWS) {
        f->linear(l->d, y, NULL, dev_x, w, M, N, K);
        f->linear_dx(l->d, gx, NULL, dev_dy, w, M, N, K);
    } else {
        const int off[2] = {0, M}, *one = lab_int(l, off, 2);
        const real *const *wt = (const real *const *)table_of(l, w, 1, 0);
        f->group(l->d, y, dev_x, wt, one, 1, M, N, K);
        f->group_dx(l->d, gx, dev_dy, wt, one, 1, M, N, K);
    }
    const double *want = lab_get(l, y, ny), *wantx = lab_get(l, gx, nx);
    static const int sizes[] = {1, 2, 5, 8, 9, 16, 17, 24, 25, 61};
    for (size_t i = 0; DENSE_ROWS && i < sizeof sizes / sizeof *sizes; i++)
        for (int n = sizes[i], first = (int)i; first + n <= M; first += n + 2) {
            const size_t at = SIZE(first, N), atx = SIZE(first, K);
            f->linear(l->d, y2, NULL, dev_x + atx, w, n, N, K);
            f->linear_dx(l->d, gx2, NULL, dev_dy + at, w, n, N, K);
            lab_equal("rows in other company", lab_get(l, y2, SIZE(n, N)), want + at, SIZE(n, N));
            lab_equal("dx of rows in other company", lab_get(l, gx2, SIZE(n, K)), wantx + atx, SIZE(n, K));
        }
    for (int kind = 0; kind < (int)(sizeof group_rows / sizeof *group_rows); kind++) { // and in any group
        const Groups g = groups_of(l, kind);
        if (g.rows > M) continue;
        const real *const *wt = (const real *const *)table_of(l, w, g.J, 0);
        f->group(l->d, y2, dev_x, wt, g.dev_off, g.J, M, N, K);
        f->group_dx(l->d, gx2, dev_dy, wt, g.dev_off, g.J, M, N, K);
        lab_equal("rows in groups", lab_get(l, y2, SIZE(g.rows, N)), want, SIZE(g.rows, N));
        lab_equal("dx of rows in groups", lab_get(l, gx2, SIZE(g.rows, K)), wantx, SIZE(g.rows, K));
    }
}

static void rows(Lab *l, const int *dim) {
    for (int i = 0; i < KINDS; i++) rows_with(l, &all_ops[i], dim);
}

static void test_a_row_does_not_depend_on_its_company(void **state) {
    (void)state;
    static const int dims[][LAB_DIMS] = {{120, 37, 300}, {100, 48, 64}, {240, 130, 270}};
    RUN(rows, dims);
}

// A NaN stays in its row, and in its group
static void test_nan_stays_where_it_is(void **state) {
    (void)state;
    enum { M = 50, N = 20, K = 30 };
    Lab *l = lab_open(2);
    for (int at = 0; at < M; at += 7) {
        double *x = lab_random(l, M * K, -1, 1);
        x[at * K + 3] = NAN;
        real *y = lab_real(l, NULL, M * N);
        dev_linear(l->d, y, NULL, lab_real(l, x, M * K), lab_real(l, lab_random(l, N * K, -1, 1), N * K), M, N, K);
        double *got = lab_get(l, y, M * N);
        for (int i = 0; i < M * N; i++) assert_true(isnan(got[i]) == (i / N == at));
    }
    lab_close(l);
}

static void off_past_the_room(void *arg) {
    Lab *l = lab_open(1);
    const int *off = arg;
    real *x = lab_real(l, NULL, 64), *y = lab_real(l, NULL, 64);
    const real *w = x, *const *table = lab_bytes(l, &w, sizeof w);
    dev_group_linear(l->d, y, x, table, lab_int(l, off, 2), 1, 4, 4, 4);
    lab_get(l, y, 1);
}

static void test_refusals(void **state) {
    (void)state;
    int past[2] = {0, 5}, backwards[2] = {3, 1}, negative[2] = {-1, 2}, good[2] = {1, 4};
    assert_int_equal(child_call(off_past_the_room, past).status, LAB_FAULT);
    assert_int_equal(child_call(off_past_the_room, backwards).status, LAB_FAULT);
    assert_int_equal(child_call(off_past_the_room, negative).status, LAB_FAULT);
    assert_int_equal(child_call(off_past_the_room, good).status, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals), // first: a child of a process that has used a GPU cannot use it
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_router),
        cmocka_unit_test(test_group),
        cmocka_unit_test(test_no_groups),
        cmocka_unit_test(test_a_row_does_not_depend_on_its_company),
        cmocka_unit_test(test_nan_stays_where_it_is),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
