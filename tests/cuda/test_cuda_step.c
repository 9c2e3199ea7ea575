// The trainer's step on the device, four ranks on one GPU: from its first op to its last the host neither waits for the device nor
// asks it (counted by the emulation); recorded and replayed it gives the bits that it gives as it is called; so it does where receive
// buffers have too little room for a recorded step, which is then run again with more, and recorded again.
#include "train/step.c"
#include "data/shard.h"
#include "tests/common/child.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

enum { RANKS = 4, STEPS = 3 };
long emu_waits(void) __attribute__((weak)); // none on a GPU

typedef struct Job {
    Options o;
    StepStats stats[STEPS];
    int recorded, grown[STEPS]; // after each step
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
    for (int i = 0; i < STEPS; i++) {
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
    if (rank == 0) job->recorded = t->recorded;
    check_memory(job, t);
    trainer_close(t);
    free(t);
}

static Job *run(const char *data, const char *out, const char *graph, double recv_room, const char *recompute) {
    char room[64];
    snprintf(room, sizeof room, "--recv-room=%.17g", recv_room);
    char *argv[] = {"train", "--data", (char *)data, "--out", (char *)out, (char *)graph, room, "--recompute", (char *)recompute,
                    "--virtual-ranks", "4", "--layers", "2", "--width", "16",
                    "--heads", "2", "--kv-heads", "1", "--head-size", "8", "--experts", "8", "--topk", "2", "--expert-width", "8", "--seq", "8",
                    "--batch", "8", "--micro-batch", "1", "--eval-every", "0", "--sample-every", "0", "--router", "sigmoid", "--router-bias",
                    "--aux-scope", "global", "--shared-experts", "1", "--threads", "1", "--steps", "3", NULL};
    int argc = sizeof argv / sizeof *argv - 1;
    char **args = argv;
    Job *job = host_alloc(sizeof *job);
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
    char *dir = make_data(), a[512], b[512], c[512], text[16];
    snprintf(text, sizeof text, "%d", MEMORY);
    setenv("EMU_MEMORY", text, 1);
    snprintf(a, sizeof a, "%s/plain", dir), snprintf(b, sizeof b, "%s/recorded", dir);
    snprintf(c, sizeof c, "%s/room", dir);
    Job *plain = run(dir, a, "--no-cuda-graph", 0, "0"), *recorded = run(dir, b, "--cuda-graph", 0, "3");
    assert_true(!plain->recorded && recorded->recorded);
    // room for the steps before the last, of which the second was recorded
    double most[2] = {fmax(plain->stats[0].moe.rank_after_max, plain->stats[1].moe.rank_after_max), plain->stats[2].moe.rank_after_max};
    Job *room = run(dir, c, "--cuda-graph", most[0], "0");
    assert_true(most[1] > most[0] && room->recorded && room->grown[1] == 0 && room->grown[2] == 1 && recorded->grown[2] == 0);
    for (int i = 0; i < STEPS; i++) {
        assert_true(plain->stats[i].loss == room->stats[i].loss && plain->stats[i].grad_norm == room->stats[i].grad_norm);
        assert_true(isfinite(plain->stats[i].loss) && plain->stats[i].grad_norm > 0);
        assert_true(plain->stats[i].loss == recorded->stats[i].loss && plain->stats[i].grad_norm == recorded->stats[i].grad_norm);
        if (i) assert_true(plain->stats[i].loss != plain->stats[0].loss); // the steps are not one step
    }
    assert_int_equal(plain->waits_in_ops + recorded->waits_in_ops + room->waits_in_ops, 0);
    if (emu_waits) assert_true(plain->taken == plain->gone && recorded->taken == recorded->gone && room->taken == room->gone);
    assert_true(plain->waits_in_read > 0 && recorded->waits_in_read > 0); // it would be seen
    free(plain), free(recorded), free(room);
    temp_remove(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_refusal), cmocka_unit_test(test_step)};
    return cmocka_run_group_tests_name("the step on the device", tests, NULL, NULL);
}
