// Errors, sizes, files, flags, random numbers.
#include "kernels/check.h"
#include "kernels/files.h"
#include "kernels/flags.h"
#include "kernels/rng.h"
#include "tests/common/child.h"
#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

static char *folder; // of this run, removed at its end

// As expected? Otherwise prints what was found.
static int child_says(const Child *c, int status, const char *part) {
    if (c->status == status && strstr(c->out, part)) return 1;
    printf("expected status %d and \"%s\", found status %d and:\n%s\n", status, part, c->status, c->out);
    return 0;
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void no_launcher(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK", "PMIX_RANK",
                                        "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
}

// ---- errors ------------------------------------------------------------------------------------------------------------
static void die_alone(void *arg) {
    (void)arg;
    die_setup(0, 1, NULL);
    printf("before");
    CHECK_DATA(2 + 2 == 5, "found %d, expected %s", 4, "five");
}
static void die_ranked(void *arg) {
    die_setup(*(int *)arg, 4, NULL);
    CHECK_NUMERIC(0, "loss is not finite");
}
static void stop_with_77(int status) { _exit(status == STATUS_COMM ? 77 : 1); }
static void die_stopped(void *arg) {
    (void)arg;
    die_setup(0, 2, stop_with_77);
    CHECK_COMM(0, "gone");
}
static void die_in_openmp(void *arg) {
    (void)arg;
    die_setup(0, 2, NULL);
#pragma omp parallel num_threads(8)
    CHECK_USAGE(0, "all threads find this");
}
static void die_before_setup(void *arg) {
    (void)arg;
    setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
    setenv("OMPI_COMM_WORLD_RANK", "3", 1);
    CHECK_USAGE(0, "bad flag");
}
static void die_long(void *arg) {
    (void)arg;
    char *text = host_alloc(100000);
    memset(text, 'x', 99999);
    CHECK_USAGE(0, "%s", text);
}

static void test_die(void **state) {
    (void)state;
    Child c = child_call(die_alone, NULL);
    assert_true(child_says(&c, STATUS_DATA, "tests/test_base.c:"));
    assert_true(child_says(&c, STATUS_DATA, ": found 4, expected five\n"));
    assert_int_equal(strncmp(c.out, "before", 6), 0); // stdout came out, and first
    assert_null(strstr(c.out, "rank"));
    int rank = 0;
    c = child_call(die_ranked, &rank);
    assert_true(child_says(&c, STATUS_NUMERIC, "rank 0: tests/test_base.c:"));
    rank = 3;
    double start = seconds();
    c = child_call(die_ranked, &rank);
    assert_true(child_says(&c, STATUS_NUMERIC, "rank 3: tests/test_base.c:"));
    assert_true(seconds() - start > 0.9); // rank 0 had its second
    c = child_call(die_stopped, NULL);
    assert_true(child_says(&c, 77, "gone"));
    start = seconds();
    c = child_call(die_before_setup, NULL);
    assert_true(child_says(&c, STATUS_USAGE, "rank 3: "));
    assert_true(seconds() - start > 0.9);
    c = child_call(die_long, NULL);
    assert_true(child_says(&c, STATUS_USAGE, "xxxx\n"));
    for (int i = 0; i < 20; i++) {
        c = child_call(die_in_openmp, NULL);
        assert_true(child_says(&c, STATUS_USAGE, "rank 0: "));
        assert_null(strstr(strstr(c.out, "find this") + 1, "find this"));
    }
}

static void test_launcher(void **state) {
    (void)state;
    assert_int_equal(launcher_size(), 0);
    assert_int_equal(launcher_rank(), 0);
    setenv("SLURM_NTASKS", "16", 1); // a batch script, before any srun
    setenv("SLURM_PROCID", "0", 1);
    assert_int_equal(launcher_size(), 0);
    setenv("SLURM_STEP_NUM_TASKS", "2", 1); // mpirun's own daemons are such a step
    setenv("OMPI_COMM_WORLD_SIZE", "8", 1);
    setenv("OMPI_COMM_WORLD_RANK", "5", 1);
    assert_int_equal(launcher_size(), 8);
    assert_int_equal(launcher_rank(), 5);
    no_launcher();
    unsetenv("SLURM_NTASKS");
    setenv("PMIX_RANK", "2", 1);
    assert_int_equal(launcher_size(), -1);
    assert_int_equal(launcher_rank(), 2);
    no_launcher();
}

typedef struct Dims {
    int n;
    int64_t d[5];
} Dims;
static void mul(void *arg) { printf("%zu", size_mul(((Dims *)arg)->n, ((Dims *)arg)->d)); }

static void test_sizes(void **state) {
    (void)state;
    assert_int_equal(SIZE(3, 4, 5), 60);
    assert_int_equal(SIZE(7), 7);
    assert_true(SIZE(96, 512, 8192, 49152) == 19791209299968u); // far past 32 bits
    assert_int_equal(SIZE(INT64_MAX, INT64_MAX, 0), 0);
    assert_true(SIZE(INT64_MAX) == (size_t)INT64_MAX);
    Dims bad[] = {{2, {3, -1}}, {2, {-1, 0}}, {2, {(int64_t)1 << 62, 2}}, {3, {(int64_t)1 << 40, (int64_t)1 << 40, 1}},
                  {2, {INT64_MAX, 3}}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Child c = child_call(mul, &bad[i]);
        assert_true(child_says(&c, STATUS_USAGE, "impossible size"));
    }
    char *p = host_alloc(100000);
    for (int i = 0; i < 100000; i++) assert_int_equal(p[i], 0);
    free(p);
    free(host_alloc(0));
}

// ---- files -------------------------------------------------------------------------------------------------------------
static void read_it(void *arg) { free(file_read(arg, NULL)); }
static void make_it(void *arg) { dir_make(arg); }
static void write_limited(void *arg) {
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){100000, 100000});
    char *data = host_alloc(1 << 20);
    file_write(arg, data, 1 << 20);
}
static void write_nowhere(void *arg) { file_write(arg, "x", 1); }

static int files_in(const char *path) {
    int n = 0;
    DIR *d = opendir(path);
    while (readdir(d)) n++;
    closedir(d);
    return n - 2;
}

static void test_files(void **state) {
    (void)state;
    char *path = path_join(folder, "data");
    size_t n;
    for (size_t size = 0; size < 4000000; size = size * 3 + 1) {
        char *data = host_alloc(size);
        for (size_t i = 0; i < size; i++) data[i] = (char)rng_u64(1, size, i);
        file_write(path, data, size);
        char *back = file_read(path, &n);
        assert_int_equal(n, size);
        assert_int_equal(file_size(path), size);
        assert_memory_equal(back, data, size);
        assert_int_equal(back[n], 0);
        free(data), free(back);
    }
    char *proc = file_read("/proc/self/status", &n); // a file whose size reads 0
    assert_true(n > 100 && strlen(proc) == n);
    free(proc);
    char *missing = path_join(folder, "missing"), *deep = path_join(folder, "a/b//c/"), *through = path_join(folder, "data/x");
    assert_int_equal(file_size(missing), -1);
    assert_false(file_is_dir(missing));
    Child c = child_call(read_it, missing);
    assert_true(child_says(&c, STATUS_DATA, missing));
    c = child_call(read_it, folder);
    assert_true(child_says(&c, STATUS_DATA, "is a folder"));
    dir_make(deep);
    dir_make(deep);
    assert_true(file_is_dir(deep));
    c = child_call(make_it, path);
    assert_true(child_says(&c, STATUS_DATA, "not a folder"));
    c = child_call(make_it, through);
    assert_true(child_says(&c, STATUS_DATA, through));
    c = child_call(write_nowhere, through);
    assert_true(child_says(&c, STATUS_DATA, through));
    char *joined = path_join("a/", "b"), *bare = path_join("", "b");
    assert_string_equal(joined, "a/b");
    assert_string_equal(bare, "b");
    free(joined), free(bare), free(missing), free(deep), free(through), free(path);
    // the values of the algorithm's reference page (Fowler, Noll, Vo)
    assert_true(fnv1a(FNV1A_START, "", 0) == 0xCBF29CE484222325ull);
    assert_true(fnv1a(FNV1A_START, "a", 1) == 0xAF63DC4C8601EC8Cull);
    assert_true(fnv1a(FNV1A_START, "foobar", 6) == 0x85944171F73967E8ull);
}

// A file is the old one or the new one, whole, whether the disk fills up or the writer is killed.
static void test_files_whole(void **state) {
    (void)state;
    char *sub = path_join(folder, "whole"), *path = path_join(sub, "f");
    enum { N = 1 << 20 };
    char *data = host_alloc(N);
    dir_make(sub);
    file_write(path, "old", 3);
    Child c = child_call(write_limited, path);
    assert_true(child_says(&c, STATUS_DATA, "File too large"));
    assert_int_equal(file_size(path), 3);
    assert_int_equal(files_in(sub), 1); // nothing left behind
    memset(data, 'a', N);
    file_write(path, data, N);
    pid_t pid = fork();
    if (pid == 0) alarm(60); // also ends where an assertion ends the parent
    if (pid == 0)
        for (int i = 0;; i++) memset(data, 'a' + i % 26, N), file_write(path, data, N);
    for (int i = 0; i < 300; i++) {
        size_t n;
        char *back = file_read(path, &n);
        assert_int_equal(n, N);
        for (size_t j = 0; j < n; j++)
            if (back[j] != back[0]) fail_msg("byte %zu is of another version", j);
        free(back);
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    assert_int_equal(file_size(path), N);
    free(data), free(sub), free(path);
}

// ---- flags -------------------------------------------------------------------------------------------------------------
typedef struct Options {
    int64_t steps, seed;
    double lr, wd;
    const char *data, *out;
    int norm, balance;
    Flag flags[12];
} Options;

static void options_init(Options *o) {
    *o = (Options){.steps = 1000, .seed = 7, .lr = 3e-3, .out = "runs/x", .norm = 1, .balance = 1};
    Flag flags[] = {{.name = "", .help = "Training"},
                    {"steps", FLAG_INT, &o->steps, 1, 1e18, NULL, "optimizer steps", 0},
                    {"seed", FLAG_INT, &o->seed, 0, 0, NULL, "of all random numbers", 0},
                    {"lr", FLAG_DOUBLE, &o->lr, 0, 10, NULL, "peak learning rate", 0},
                    {"weight-decay", FLAG_DOUBLE, &o->wd, 0, 0, NULL, "per step", 0},
                    {.name = "", .help = "Files"},
                    {"data", FLAG_STRING, &o->data, 0, 0, NULL, "folder of shards", 0},
                    {"out", FLAG_STRING, &o->out, 0, 0, NULL, "run folder", 0},
                    {"norm", FLAG_BOOL, &o->norm, 0, 0, NULL, "normalise heads", 0},
                    {"balance", FLAG_CHOICE, &o->balance, 0, 0, "none|topoep|other", "balancer", 0}};
    memcpy(o->flags, flags, sizeof flags);
}

typedef struct Line {
    int n;
    char *word[10];
} Line;

static void parse_in_child(void *arg) {
    Line *l = arg;
    char *argv[12] = {"prog"};
    Options o;
    options_init(&o);
    memcpy(argv + 1, l->word, sizeof l->word);
    flags_parse(o.flags, "prog", "Does things.", l->n + 1, argv);
    flags_print(o.flags, stdout);
}

static void test_flags(void **state) {
    (void)state;
    Options o;
    options_init(&o);
    char *argv[] = {"prog", "first", "--lr=1e-4", "--steps", "12", "-", "--seed", "-3", "--no-norm", "--balance", "other",
                    "--data", "", "--",
                    "--last"};
    assert_int_equal(flags_parse(o.flags, "prog", "", sizeof argv / sizeof *argv, argv), 3);
    assert_string_equal(argv[1], "first");
    assert_string_equal(argv[2], "-");
    assert_string_equal(argv[3], "--last");
    assert_true(o.lr == 1e-4 && o.steps == 12 && o.seed == -3 && o.norm == 0 && o.balance == 2 && !*o.data && o.wd == 0);
    assert_string_equal(o.out, "runs/x");
    assert_int_equal(flags_find(o.flags, "lr")->set, 1);
    assert_int_equal(flags_find(o.flags, "out")->set, 0);
    assert_null(flags_find(o.flags, "l"));
    assert_null(flags_find(o.flags, ""));
    options_init(&o);
    char *bools[] = {"prog", "--norm=0"}, *again[] = {"prog", "--norm"};
    flags_parse(o.flags, "prog", "", 2, bools);
    assert_int_equal(o.norm, 0);
    flags_parse(o.flags, "prog", "", 2, again);
    assert_int_equal(o.norm, 1);
}

static void test_flags_refused(void **state) {
    (void)state;
    struct {
        Line line;
        const char *part;
    } bad[] = {
        {{1, {"--stepz=3"}}, "did you mean --steps?"},   {{1, {"--weight"}}, "did you mean --weight-decay?"},
        {{1, {"--qqqqqqqqqqq"}}, "--help lists them"},   {{2, {"--steps", "12x"}}, "\"12x\", expected a whole number"},
        {{1, {"--steps=1e3"}}, "whole number"},          {{1, {"--steps="}}, "whole number"},
        {{1, {"--steps= 5"}}, "whole number"},           {{1, {"--steps=0"}}, "--steps is 0, expected >= 1"},
        {{1, {"--seed=9223372036854775808"}}, "64 bits"}, {{1, {"--lr=nan"}}, "finite"},
        {{1, {"--lr=inf"}}, "finite"},                   {{1, {"--lr=0x1p3"}}, "finite"},
        {{1, {"--lr=1e999"}}, "double cannot hold"},     {{1, {"--lr=1e"}}, "finite"},
        {{1, {"--lr="}}, "finite"},                      {{1, {"--lr=11"}}, "expected 0 to 10"},
        {{1, {"--lr=-1e-9"}}, "expected 0 to 10"},       {{1, {"--lr"}}, "needs a value"},
        {{2, {"--lr", "--norm"}}, "needs a value"},      {{2, {"--lr=1", "--lr=1"}}, "given twice"},
        {{2, {"--norm", "--no-norm"}}, "given twice"},   {{1, {"--no-norm=1"}}, "takes no value"},
        {{1, {"--norm=2"}}, "--no-norm"},                {{1, {"--no-lr"}}, "unknown flag \"no-lr\""},
        {{1, {"--balance=to"}}, "none|topoep|other"},    {{1, {"--balance="}}, "none|topoep|other"},
        {{1, {"-x"}}, "two dashes"},                     {{1, {"--=3"}}, "unknown flag"},
        {{1, {"--config"}}, "needs a value"},            {{2, {"--config=a", "--config=b"}}, "given twice"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Child c = child_call(parse_in_child, &bad[i].line);
        assert_true(child_says(&c, STATUS_USAGE, bad[i].part));
    }
    char *path = path_join(folder, "c.json");
    struct {
        const char *text, *part;
    } stored[] = {{"{\"steps\": 2.5}", "\"steps\" is 2.5, expected a whole number"}, {"{\"stepz\": 2}", "did you mean --steps?"},
                  {"{\"steps\": 0}", "expected >= 1"}, {"{\"lr\": \"x\"}", "expected a number"}, {"{\"norm\": 1}", "true or false"},
                  {"{\"data\": 3}", "expected a string"}, {"{\"balance\": \"no\"}", "none|topoep|other"}, {"[1]", "JSON object"},
                  {"{\"steps\": 2", "JSON object"}, {"", "JSON object"}, {"{\"lr\": 1, \"lr\": 2}", "duplicate"},
                  {"{\"\": 1}", "unknown flag"}};
    for (size_t i = 0; i < sizeof stored / sizeof *stored; i++) {
        file_write(path, stored[i].text, strlen(stored[i].text));
        Child c = child_call(parse_in_child, &(Line){2, {"--config", path}});
        assert_true(child_says(&c, STATUS_DATA, stored[i].part));
        assert_true(child_says(&c, STATUS_DATA, path));
    }
    unlink(path);
    Child c = child_call(parse_in_child, &(Line){2, {"--config", path}});
    assert_true(child_says(&c, STATUS_DATA, path));
    free(path);
}

static void help_on_rank_1(void *arg) {
    setenv("PMI_SIZE", "2", 1);
    setenv("PMI_RANK", "1", 1);
    parse_in_child(arg);
}

static void test_flags_shown(void **state) {
    (void)state;
    static const char *const parts[] = {"Does things.", "usage: prog [flags]", "Training\n", "--steps N", "(default 1000; >= 1)",
                                        "--lr X",
                                        "(default 0.003; 0 to 10)", "--data TEXT", "(default none)", "--norm, --no-norm",
                                        "(default yes)",
                                        "--balance none|topoep|other", "(default topoep)", "--config FILE"};
    Child c = child_call(parse_in_child, &(Line){2, {"--lr=5", "--help"}});
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) assert_true(child_says(&c, 0, parts[i]));
    c = child_call(help_on_rank_1, &(Line){1, {"--help"}});
    assert_int_equal(c.status, 0);
    assert_string_equal(c.out, ""); // once per run
    c = child_call(parse_in_child, &(Line){1, {"--lr=0.125"}});
    assert_true(child_says(&c, 0, "* lr                 0.125"));
    assert_true(child_says(&c, 0, "  steps              1000"));
    assert_true(child_says(&c, 0, "topoep"));
}

static void test_flags_round_trip(void **state) {
    (void)state;
    Options o, p;
    options_init(&o);
    o.steps = 1234567890123456, o.seed = INT64_MIN, o.lr = 0.1 + 0.2, o.wd = -1.2345678901234567e-300;
    o.data = "a \"b\"\n\xc3\xa4", o.out = NULL;
    o.norm = 0, o.balance = 2;
    json_t *stored = flags_json(o.flags);
    char *text = json_dumps(stored, JSON_INDENT(1)), *path = path_join(folder, "r.json");
    file_write(path, text, strlen(text));
    options_init(&p);
    char *argv[] = {"prog", "--config", path};
    assert_int_equal(flags_parse(p.flags, "prog", "", 3, argv), 0);
    assert_true(p.steps == o.steps && p.seed == o.seed && p.lr == o.lr && p.wd == o.wd && p.norm == 0 && p.balance == 2 && !p.out);
    assert_string_equal(p.data, o.data);
    assert_int_equal(flags_find(p.flags, "lr")->set, 2);
    json_t *second = flags_json(p.flags);
    assert_true(json_equal(stored, second));
    flags_free(p.flags);
    options_init(&p);
    char *wins[] = {"prog", "--steps=5", "--norm", "--config", path, "--balance", "none", "--data=d"};
    flags_parse(p.flags, "prog", "", 8, wins);
    assert_true(p.steps == 5 && p.norm == 1 && p.balance == 0 && p.lr == o.lr);
    assert_string_equal(p.data, "d");
    flags_free(p.flags);
    json_decref(stored), json_decref(second);
    free(text), free(path);
    o.lr = INFINITY; // has no JSON form: must not be lost in silence
    pid_t pid = fork();
    if (pid == 0) fclose(stderr), close(2), json_decref(flags_json(o.flags)), _exit(0);
    int status;
    waitpid(pid, &status, 0);
    assert_int_equal(WEXITSTATUS(status), STATUS_USAGE);
}

// ---- random numbers --------------------------------------------------------------------------------------------------
static void test_rng_known(void **state) {
    (void)state;
    // the vectors published with Random123 (Salmon et al.) for philox4x32-10: first two words
    assert_true(rng_u64(0, 0, 0) == 0xE169C58D6627E8D5ull);
    assert_true(rng_u64(UINT64_MAX, UINT64_MAX, UINT64_MAX) == 0x41C83B0E408F276Dull);
    assert_true(rng_u64(0x299F31D0A4093822ull, 0x0370734413198A2Eull, 0x85A308D3243F6A88ull) == 0x94FDCCEBD16CFE09ull);
    assert_true(rng_name("foobar") == 0x85944171F73967E8ull);
    assert_true(rng_uniform(0, 0, 0) == (double)(0xE169C58D6627E8D5ull >> 11) / 9007199254740992.0);
    // by hand from words 0..3 of the first vector (6627e8d5 e169c58d bc57ac4c 9b00dbd8)
    double u = (double)((0xE169C58D6627E8D5ull >> 11) + 1) / 9007199254740992.0;
    double a = (double)(0x9B00DBD8BC57AC4Cull >> 11) / 9007199254740992.0;
    assert_true(fabs(rng_normal(0, 0, 0) - sqrt(-2 * log(u)) * cos(2 * acos(-1.0) * a)) < 1e-14);
}

enum { DRAWS = 1 << 20 };
// Largest deviation of mean, variance, skewness and kurtosis from the normal law's, in their standard errors;
// `shift` and `stretch` inject a fault
static double moments(uint64_t stream, double shift, double stretch) {
    double m[5] = {0}, worst = 0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        double x = rng_normal(42, stream, i) * stretch + shift;
        m[1] += x, m[2] += x * x, m[3] += x * x * x, m[4] += x * x * x * x;
    }
    double expected[5] = {0, 0, 1, 0, 3}, variance[5] = {0, 1, 2, 15, 96}; // of x^k
    for (int k = 1; k <= 4; k++) worst = fmax(worst, fabs(m[k] / DRAWS - expected[k]) / sqrt(variance[k] / DRAWS));
    return worst;
}

static void test_rng_moments(void **state) {
    (void)state;
    for (uint64_t stream = 0; stream < 3; stream++) assert_true(moments(stream, 0, 1) < 5);
    assert_false(moments(0, 50 / sqrt(DRAWS), 1) < 5);
    assert_false(moments(0, 0, 1 + 50 / sqrt(DRAWS)) < 5);
    // uniform: 256 equal bins, chi-square of 255 degrees of freedom within 6 of its standard deviations
    for (int fault = 0; fault < 2; fault++) {
        int bin[256] = {0};
        double chi = 0;
        for (uint64_t i = 0; i < DRAWS; i++) {
            double x = rng_uniform(7, 1, i);
            assert_true(x >= 0 && x < 1);
            if (fault && x < 0.5 / 256) x += 1.0 / 256;
            bin[(int)(x * 256)]++;
        }
        for (int b = 0; b < 256; b++) chi += (bin[b] - DRAWS / 256.0) * (bin[b] - DRAWS / 256.0) / (DRAWS / 256.0);
        assert_int_equal(fabs(chi - 255) < 6 * sqrt(2 * 255.0), !fault);
    }
}

// Correlation of neighbours in one of the three words, in standard errors; `leak` of one value into the other is the fault
static double correlation(int word, double leak) {
    double sum = 0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        double x = rng_uniform(3, 5, i) - 0.5, y = rng_uniform(3 + (word == 0), 5 + (word == 1), i + (word == 2)) - 0.5;
        sum += x * (y + leak * x) * 12;
    }
    return fabs(sum) / sqrt(DRAWS);
}

static void test_rng_neighbours(void **state) {
    (void)state;
    for (int word = 0; word < 3; word++) {
        assert_true(correlation(word, 0) < 5);
        assert_false(correlation(word, 50 / sqrt(DRAWS)) < 5);
    }
    // one changed bit of any word changes half of the result's bits
    for (int bit = 0; bit < 192; bit++) {
        int changed = 0;
        for (uint64_t i = 0; i < 256; i++) {
            uint64_t w[3] = {i * 0x9E37, i ^ 0x1234, i}, v = rng_u64(w[0], w[1], w[2]);
            w[bit / 64] ^= (uint64_t)1 << (bit % 64);
            changed += __builtin_popcountll(v ^ rng_u64(w[0], w[1], w[2]));
        }
        assert_true(abs(changed - 8192) < 6 * 64); // 16384 coins: standard deviation 64
    }
}

static void test_rng_permute(void **state) {
    (void)state;
    uint64_t large[] = {255, 256, 257, 1000, 4095, 4096, 4097, 65537, 1000003};
    for (int k = 1; k <= 209; k++) {
        uint64_t n = k <= 200 ? (uint64_t)k : large[k - 201], same = 0, fixed = 0;
        char *seen = host_alloc(n);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t p = rng_permute(9, 1, i, n);
            assert_true(p < n && !seen[p]);
            seen[p] = 1;
            same += p == rng_permute(9, 2, i, n);
            fixed += p == i;
        }
        if (n >= 50) assert_true(same < 12 && fixed < 12); // 1 each is usual
        free(seen);
    }
    uint64_t huge[] = {((uint64_t)1 << 32) + 1, ((uint64_t)1 << 40) - 1, UINT64_MAX};
    for (int k = 0; k < 3; k++) {
        double mean = 0;
        for (uint64_t i = 0; i < 4096; i++) {
            uint64_t p = rng_permute(9, 1, i, huge[k]);
            assert_true(p < huge[k]);
            mean += (double)p / (double)huge[k] / 4096;
        }
        assert_true(fabs(mean - 0.5) < 6 / sqrt(12 * 4096));
    }
    // every order of three comes about equally often: chi-square of 5 degrees of freedom
    int count[27] = {0}, kinds = 0;
    double chi = 0;
    for (uint64_t epoch = 0; epoch < 6000; epoch++)
        count[rng_permute(1, epoch, 0, 3) * 9 + rng_permute(1, epoch, 1, 3) * 3 + rng_permute(1, epoch, 2, 3)]++;
    for (int i = 0; i < 27; i++) kinds += count[i] > 0, chi += count[i] ? (count[i] - 1000) * (count[i] - 1000) / 1000.0 : 0;
    assert_int_equal(kinds, 6);
    assert_true(chi < 30);
}

int main(void) {
    no_launcher();
    alarm(120); // a test that hangs is a failed one
    folder = temp_dir();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_die), cmocka_unit_test(test_launcher), cmocka_unit_test(test_sizes), cmocka_unit_test(test_files),
        cmocka_unit_test(test_files_whole), cmocka_unit_test(test_flags), cmocka_unit_test(test_flags_refused),
        cmocka_unit_test(test_flags_shown), cmocka_unit_test(test_flags_round_trip), cmocka_unit_test(test_rng_known),
        cmocka_unit_test(test_rng_moments), cmocka_unit_test(test_rng_neighbours), cmocka_unit_test(test_rng_permute),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    temp_remove(folder);
    return failed;
}
