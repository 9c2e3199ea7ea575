// The trainer's step on the device, four ranks on one GPU: from its first op to its last the host neither waits for the device nor
// asks it (counted by the emulation); recorded and replayed it gives the bits that it gives as it is called; so it does where receive
// buffers have too little room for a recorded step, which is then run again with more, and recorded again; and whether the ranks
// share out the optimizer's state changes no bit of steps and checkpoints.
#include "train/step.c"
#include "data/shard.h"
#include "kernels/files.h"
#include "tests/common/child.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { RANKS = 4, STEPS = 3 };
long emu_waits(void) __attribute__((weak)); // none on a GPU

typedef struct Job {
    Options o;
    StepStats stats[STEPS];
    ModelConfig c;
    int save, steps;     // save: a checkpoint in the run's folder at the end
    int recorded, grown[STEPS]; // after each step
    int64_t state;       // bytes that all ranks' optimizers keep
    long waits_in_ops, waits_in_read; // of all ranks, all steps
    double taken, gone; // bytes of the device's memory: by the ranks' own count; as the device says
} Job;

static pthread_barrier_t all; // a meeting that is no business of the device

enum { MEMORY = 1 << 30 }; // of the emulated GPU

// By kind, what the table said before the model was made, while no room has grown; in all, what the device has given.
static void check_memory(Job *job, Trainer *t) {
    size_t taken[MEMORY_KINDS];
    double sum = 0;
    dev_taken(t->d, taken);
    for (int k = 0; k < MEMORY_KINDS; k++) {
        CHECK_DEVICE(moe_room(t->moe).grown || ((double)taken[k] == t->memory.kind[k] && t->memory.idle[k] == 0), "%s: %zu bytes taken, %.0f said", memory_names[k], taken[k],
                     t->memory.kind[k]);
        sum += (double)taken[k];
    }
    comm_sum_double(t->world, &sum, 1);
    if (t->info->rank == 0) job->taken = sum, job->gone = MEMORY - RANKS * dev_available(t->d);
    pthread_barrier_wait(&all);
}

static void body(Comm *world, void *arg) {
    Job *job = arg;
    Trainer *t = host_alloc(sizeof *t);
    trainer_open(t, world, &job->o);
    int rank = t->info->rank;
    for (int i = 0; i < job->steps; i++) {
        StepStats s = {.step = i + 1};
        for (int micro = 0; micro < t->share.micros; micro++) {
            load_micro(t, micro);
            for (int k = 0; k < t->share.micro * t->c.T; k++) t->tok[k] = i + 1 < STEPS ? t->tok[k] : 7; // at last all go to the same experts
            model_load(t->m, t->tok, t->target, NULL, t->share.micro, t->c.T, micro);
        }
        optimizer_set(&t->opt, t->d, 0.01, s.step);
        pthread_barrier_wait(&all);
        long before = rank == 0 && emu_waits ? emu_waits() : 0;
        pthread_barrier_wait(&all);
        step_run(t);
        pthread_barrier_wait(&all);
        long after = rank == 0 && emu_waits ? emu_waits() : 0;
        pthread_barrier_wait(&all);
        while (trainer_grow(t, "step")) step_run(t);
        step_read(t, &s);
        pthread_barrier_wait(&all);
        t->at.samples += t->o.batch;
        if (rank != 0) continue;
        job->stats[i] = s;
        job->grown[i] = moe_room(t->moe).grown;
        job->waits_in_ops += after - before;
        job->waits_in_read += emu_waits ? emu_waits() - after : 1;
    }
    int64_t state = 0;
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < STATES; k++) state += t->opt.state[k][i] ? (int64_t)(t->ps->arena[i].own.n * sizeof(wide)) : 0;
    comm_sum_int64(world, &state, 1);
    if (rank == 0) job->recorded = t->recorded, job->state = state, job->c = t->c;
    if (job->save) {
        Snapshot snapshot = {.d = t->d, .world = world, .ep = t->ep, .ps = t->ps, .c = &t->c, .opt = &t->opt,
                             .tokenizer = t->tokenizer};
        json_t *j = trainer_state(t);
        free(checkpoint_write(&snapshot, t->out, 2, j));
        json_decref(j);
    }
    check_memory(job, t);
    trainer_close(t);
    free(t);
}

// flags end with NULL. resume NULL: STEPS steps from the start; else none.
static Job *run(const char *data, const char *out, int save, const char *resume, const char *const *flags) {
    char *argv[64] = {"train", "--data", (char *)data, "--out", (char *)out, "--virtual-ranks", "4", "--layers", "2", "--width", "16",
                      "--heads", "2", "--kv-heads", "1", "--head-size", "8", "--experts", "8", "--topk", "2", "--expert-width", "8",
                      "--seq", "8", "--batch", "8", "--micro-batch", "1", "--eval-every", "0", "--sample-every", "0", "--router",
                      "sigmoid", "--router-bias", "--aux-scope", "global", "--shared-experts", "1", "--threads", "1", "--steps", "3"};
    int argc = 0;
    while (argv[argc]) argc++;
    for (; *flags; flags++) argv[argc++] = (char *)*flags;
    if (resume) argv[argc++] = "--resume", argv[argc++] = (char *)resume;
    char **args = argv;
    Job *job = host_alloc(sizeof *job);
    job->save = save, job->steps = resume ? 0 : STEPS;
    options_parse(&job->o, argc, args);
    pthread_barrier_init(&all, NULL, RANKS);
    comm_run(&argc, &args, RANKS, 0, body, job);
    pthread_barrier_destroy(&all);
    flags_free(job->o.flags);
    return job;
}

static void too_small(void *dir) {
    static char *argv[] = {"train", "--data", NULL, "--virtual-ranks", "4", "--width", "512", "--expert-width", "512", "--eval-every", "0", NULL};
    Job *job = host_alloc(sizeof *job);
    int argc = sizeof argv / sizeof *argv - 1;
    char **args = argv, text[16];
    argv[2] = dir;
    snprintf(text, sizeof text, "%d", 64 << 20);
    setenv("EMU_MEMORY", text, 1);
    options_parse(&job->o, argc, args);
    comm_run(&argc, &args, RANKS, 0, body, job);
}

static void same_steps(const Job *a, const Job *b) {
    for (int i = 0; i < STEPS; i++) {
        assert_true(isfinite(a->stats[i].loss) && a->stats[i].grad_norm > 0);
        assert_true(a->stats[i].loss == b->stats[i].loss && a->stats[i].grad_norm == b->stats[i].grad_norm);
        if (i) assert_true(a->stats[i].loss != a->stats[0].loss); // the steps are not one step
    }
}

static char *make_data(void) {
    char *dir = temp_dir();
    int tok[4096];
    for (int i = 0; i < 4096; i++) tok[i] = i * i % 251;
    ShardWriter *w = shard_writer_open(dir, "train", 0, 257, 256);
    shard_put(w, tok, 4096);
    shard_writer_close(w);
    return dir;
}

// Before anything of the model is taken: with what is needed by kind, and with what would take less.
static void test_refusal(void **state) {
    (void)state;
    if (!emu_waits) return;
    char *dir = make_data();
    Child c = child_call(too_small, dir);
    if (c.status != STATUS_DEVICE || !strstr(c.out, "GB are free for it: weights") || !strstr(c.out, "--recompute 3 takes"))
        fail_msg("status %d: %s", c.status, c.out);
    assert_null(strstr(strstr(c.out, "GB are free") + 1, "GB are free")); // said once
    temp_remove(dir);
}

static void test_step(void **state) {
    (void)state;
    char *dir = make_data(), *a = path_join(dir, "plain"), *b = path_join(dir, "recorded"), *c = path_join(dir, "room"), least[64];
    char text[16];
    snprintf(text, sizeof text, "%d", MEMORY);
    setenv("EMU_MEMORY", text, 1);
    Job *plain = run(dir, a, 0, NULL, (const char *[]){"--no-cuda-graph", "--recv-room", "0", NULL});
    Job *recorded = run(dir, b, 0, NULL, (const char *[]){"--recv-room", "0", "--recompute", "3", NULL});
    assert_true(!plain->recorded && recorded->recorded);
    // room for the steps before the last, of which the second was recorded
    double most[2] = {fmax(plain->stats[0].moe.rank_after_max, plain->stats[1].moe.rank_after_max), plain->stats[2].moe.rank_after_max};
    snprintf(least, sizeof least, "%.17g", most[0]);
    Job *room = run(dir, c, 0, NULL, (const char *[]){"--recv-room", least, NULL});
    assert_true(most[1] > most[0] && room->recorded && room->grown[1] == 0 && room->grown[2] == 1 && recorded->grown[2] == 0);
    same_steps(plain, recorded);
    same_steps(plain, room);
    assert_int_equal(plain->waits_in_ops + recorded->waits_in_ops + room->waits_in_ops, 0);
    if (emu_waits) assert_true(plain->taken == plain->gone && recorded->taken == recorded->gone && room->taken == room->gone);
    assert_true(plain->waits_in_read > 0 && recorded->waits_in_read > 0); // it would be seen
    free(plain), free(recorded), free(room), free(a), free(b), free(c);
    temp_remove(dir);
}

static void same_checkpoint(const char *a, const char *b) {
    static const char *const names[] = {"model-00001", "model-00002", "optimizer-00001", "optimizer-00002"};
    for (int i = 0; i < 4; i++) {
        char *p = str_format("%s/step_00000002/%s-of-00002.safetensors", a, names[i]);
        char *q = str_format("%s/step_00000002/%s-of-00002.safetensors", b, names[i]);
        size_t n, m;
        char *x = file_read(p, &n), *y = file_read(q, &m);
        assert_true(n == m && n > 1000 && memcmp(x, y, n) == 0);
        free(p), free(q), free(x), free(y);
    }
}

// A run that is resumed and saved without a step in between writes again what it has read.
static void test_zero(void **state) {
    (void)state;
    const char *const zero[] = {"--ep", "2", "--zero", "1", NULL}, *const whole[] = {"--ep", "2", "--zero", "0", NULL};
    char *dir = make_data(), *out[4];
    for (int i = 0; i < 4; i++) out[i] = str_format("%s/%d", dir, i);
    Job *job[4] = {run(dir, out[0], 1, NULL, zero), run(dir, out[1], 1, NULL, whole)};
    assert_true(job[0]->recorded && job[1]->recorded);
    same_steps(job[0], job[1]);
    assert_int_equal(job[0]->waits_in_ops + job[1]->waits_in_ops, 0);
    const ModelConfig *c = &job[0]->c;
    int64_t bytes = (2 + (sizeof(real) < sizeof(wide))) * sizeof(wide), params = config_size(c).params, experts = 0;
    for (int l = 0; l < c->L; l++) experts += c->dense[l] ? 0 : (int64_t)EXPERT_SIZE(c->F, c->C) * c->E;
    assert_int_equal(job[0]->state, bytes * params); // every element's once
    assert_int_equal(job[1]->state, bytes * (4 * (params - experts) + 2 * experts));
    same_checkpoint(out[0], out[1]);
    job[2] = run(dir, out[2], 1, out[1], zero), job[3] = run(dir, out[3], 1, out[0], whole);
    same_checkpoint(out[0], out[2]);
    same_checkpoint(out[0], out[3]);
    for (int i = 0; i < 4; i++) free(job[i]), free(out[i]);
    temp_remove(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_refusal), cmocka_unit_test(test_step), cmocka_unit_test(test_zero)};
    return cmocka_run_group_tests_name("the step on the device", tests, NULL, NULL);
}
