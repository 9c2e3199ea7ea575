// Configurations: presets, refusals, and what a skewed router chooses.
#include "kernels/check.h"
#include "kernels/rng.h"
#include "tests/common/model_job.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

static void test_presets(void **state) {
    (void)state;
    const struct { const char *name; double params, within; } sizes[] = {
        {"1m", 1e6, 0.1}, {"5m", 5e6, 0.1}, {"25m", 25e6, 0.1}, {"100m", 100e6, 0.1}, {"300m", 300e6, 0.1}, {"gpt2-124m", 124e6, 0.02},
        {"demo", 2.6e6, 0.05}, {"dots-tiny", 1.6e6, 0.05}, {"tiny", 20e6, 0.05}, {"fine", 39e6, 0.05}, {"small", 259e6, 0.05},
    };
    char *names = strdup(config_presets()), *save = NULL;
    size_t n = 0;
    for (char *name = strtok_r(names, "|", &save); name; name = strtok_r(NULL, "|", &save), n++) {
        ModelConfig c;
        config_preset(&c, name);
        config_check(&c, NULL);
        ModelSize s = config_size(&c);
        print_message("%-10s %11lld parameters %11lld active %12lld FLOPs per token\n", name, (long long)s.params, (long long)s.active,
                      (long long)s.flops_per_token);
        size_t i = 0;
        while (i < sizeof sizes / sizeof *sizes && strcmp(sizes[i].name, name) != 0) i++;
        assert_true(i < sizeof sizes / sizeof *sizes);
        assert_true(fabs((double)s.params - sizes[i].params) <= sizes[i].within * sizes[i].params);
        assert_true(s.active <= s.params && s.active > 0);
    }
    assert_int_equal(n, sizeof sizes / sizeof *sizes);
    free(names);
    // by hand: 11*8 twice; per layer 8+8+4+4, 16*8, 8*8, router 32, experts 4*72; final norm 8. Active: 2 of 4 experts.
    ModelConfig c = small_config();
    ModelSize s = config_size(&c);
    int layer = 24 + 128 + 64 + 32;
    assert_int_equal(s.params, 2 * 88 + 2 * (layer + 288) + 8);
    assert_int_equal(s.active, 2 * 88 + 2 * (layer + 144) + 8);
    assert_int_equal(s.flops_per_token, 6 * (88 + 2 * (128 + 64 + 32 + 144)) + 6 * 2 * 8 * 8);
}

// The process that checks c must end with STATUS_USAGE and say `text`.
static void refuses(const ModelConfig *c, const char *preset, const char *text) {
    int pipes[2];
    assert_int_equal(pipe(pipes), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(pipes[1], 2);
        close(pipes[0]);
        ModelConfig copy;
        if (preset) config_preset(&copy, preset);
        else config_check(c, NULL);
        _exit(0);
    }
    close(pipes[1]);
    char out[1024] = {0};
    size_t n = 0;
    for (ssize_t got; n < sizeof out - 1 && (got = read(pipes[0], out + n, sizeof out - 1 - n)) > 0;) n += (size_t)got;
    close(pipes[0]);
    int status;
    waitpid(pid, &status, 0);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), STATUS_USAGE);
    if (!strstr(out, text)) fail_msg("the message is \"%s\", it does not say \"%s\"", out, text);
}

static void test_refusals(void **state) {
    (void)state;
    const ModelConfig good = small_config();
    ModelConfig c;
    refuses(NULL, "giant", "demo|1m");
#define REFUSE(change, text) (c = good, change, refuses(&c, NULL, text))
    REFUSE(c.V = 1, "vocabulary (V) is 1");
    REFUSE(c.C = 0, "width (C) is 0");
    REFUSE(c.L = 257, "layers (L) is 257, it must be 1..256");
    REFUSE(c.NKV = 0, "key/value heads (NKV) is 0");
    REFUSE((c.NH = 3, c.NKV = 2), "multiple of its key/value heads (NKV), 2");
    REFUSE(c.HS = 5, "head size (HS) is 5, it must be even");
    REFUSE(c.T = 0, "sequence length (T) is 0");
    REFUSE(c.E = -1, "experts (E) is -1");
    REFUSE(c.E = 0, "no experts");
    REFUSE(c.K = 5, "K = 5 experts per token, it must be 1..4");
    REFUSE(c.K = 0, "K = 0 experts");
    REFUSE(c.K = 1, "renormalised");
    REFUSE(c.F = 0, "expert width (F) is 0");
    REFUSE((c.dense[0] = 1, c.F_dense = 0), "1 dense layers of width (F_dense) 0");
    REFUSE(c.n_shared = -1, "shared experts is -1");
    REFUSE(c.routed_scale = 0, "routed scale is 0");
    REFUSE(c.routed_scale = NAN, "routed scale is nan");
    REFUSE(c.theta = 0, "RoPE base (theta) is 0");
    REFUSE(c.eps = -1, "norm epsilon is -1");
    REFUSE(c.init_std = 0, "initial deviation is 0");
    REFUSE(c.router_skew = -1, "router skew is -1");
    REFUSE(c.score = 7, "router score is 7");
#undef REFUSE
    config_check(&good, NULL);
}

// ---- the skewed router ------------------------------------------------------------------------------------------------------

// Choices of a skewed router on text-like tokens (frequencies of English letters): the share of the expert at every place of the
// law, mean over layers and seeds. One layer's shares scatter about it: a choice depends mostly on the token, and few letters make
// up most of a text.
static void skewed_shares(double *share, double *scatter, double skew) {
    enum { B = 4, T = 64, SEEDS = 12 };
    ModelConfig c;
    config_preset(&c, "demo");
    c.router_skew = skew;
    int tok[B * T];
    const char *letters = "                  eeeeeeeeeetttttttaaaaaaoooooonnnnnniiiiisssssrrrrrhhhhhllldddduuccmmwwffggyyppbbvk,.";
    for (int i = 0; i < B * T; i++) tok[i] = letters[rng_u64(8, 8, (uint64_t)i) % strlen(letters)];
    int64_t seen[32];
    Job job = {.c = c, .world = 1, .R = 1, .B = B, .T = T, .tok = tok, .target = tok, .seen = seen};
    job.run = (ModelRun){.max_B = B, .T = T, .micros = 1, .training = 1, .plan = {.policy = POLICY_TOPOEP, .block = 1}};
    job.forward = job.backward = 1;
    memset(share, 0, (size_t)c.E * sizeof(double));
    *scatter = 0;
    for (int seed = 0; seed < SEEDS; seed++) {
        job.run.seed = (uint64_t)seed;
        run_job(&job);
        for (int l = 0; l < c.L; l++)
            for (int e = 0; e < c.E; e++) {
                char name[32];
                snprintf(name, sizeof name, "layers.%d.router", l);
                uint64_t place = rng_permute(job.run.seed, rng_name(name), (uint64_t)e, (uint64_t)c.E);
                double p = (double)seen[l * c.E + e] / (B * T * c.K);
                share[place] += p / (SEEDS * c.L);
                *scatter += fabs(p - 1.0 / (double)(place + 1) / 2.717857) / 2 / (SEEDS * c.L);
            }
    }
}

static void test_skew(void **state) {
    (void)state;
    for (int skew = 1; skew >= 0; skew--) {
        double share[8], scatter, off = 0;
        skewed_shares(share, &scatter, skew);
        for (int e = 0; e < 8; e++) off += fabs(share[e] - 1.0 / (e + 1) / 2.717857) / 2;
        print_message("skew %d: %.3f %.3f %.3f %.3f %.3f %.3f %.3f %.3f, mean %.3f from the law of exponent 1, one layer %.3f\n",
                      skew, share[0], share[1], share[2], share[3], share[4], share[5], share[6], share[7], off, scatter);
        if (skew) assert_true(off < 0.06 && scatter < 0.3);
        else assert_true(off > 0.06); // the plain router does not pass for a skewed one
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_presets), cmocka_unit_test(test_refusals), cmocka_unit_test(test_skew)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
