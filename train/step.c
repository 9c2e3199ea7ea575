// One training step, in reading order.
#include "kernels/check.h"
#include "train/log.h"
#include "train/trainer.h"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

// Rank r takes sequences r*S .. r*S+S-1 of the step's, in order: what a sample's index is does not depend on the ranks.
static void load_micro(Trainer *t, int micro) {
    int T = t->c.T, B = t->share.micro;
    int64_t i = t->at.samples + (int64_t)t->info->rank * t->share.sequences + (int64_t)micro * B;
    for (int b = 0; b < B; b++) {
        size_t at = SIZE(b, T);
        loader_sample(t->train, i + b, t->tok + at, t->target + at, t->c.doc_mask ? t->first + at : NULL);
    }
    model_load(t->m, t->tok, t->target, t->c.doc_mask ? t->first : NULL, B, T, micro);
}

static void collect_times(Trainer *t, StepStats *s) {
    double sum[STAGES], most[2];
    dev_stage_read(t->d, sum);
    most[0] = sum[STAGE_WAIT] + sum[STAGE_COUNTS], most[1] = -sum[STAGE_COUNTS];
    memcpy(s->own_ms, sum, sizeof sum);
    comm_sum_double(t->world, sum, STAGES);
    comm_max_double(t->world, most, 2);
    for (int i = 0; i < STAGES; i++) s->stage_ms[i] = sum[i] / t->info->size;
    double counts = -most[1]; // of the rank that comes last: the others wait for it there
    s->wait_ms = s->stage_ms[STAGE_WAIT] + s->stage_ms[STAGE_COUNTS] - counts;
    s->wait_max_ms = most[0] - counts;
    if (!s->has_moe) return;
    double layers = 0;
    static const Stage parts[] = {STAGE_ROUTER, STAGE_COUNTS, STAGE_PLAN, STAGE_COPIES, STAGE_DISPATCH, STAGE_EXPERTS, STAGE_COMBINE,
                                  STAGE_WAIT};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) layers += s->stage_ms[parts[i]];
    // every rank of a group makes all of its group's plans
    double plans = (double)s->moe.plans / t->share.groups;
    if (plans == 0) return;
    s->plan_us = s->stage_ms[STAGE_PLAN] * 1e3 / plans, s->counts_us = counts * 1e3 / plans, s->moe_us = layers * 1e3 / plans;
    s->plan_share = (s->plan_us + s->counts_us) / s->moe_us;
}

// From the first op to the last: nothing is read back, so that a device can record it.
static void step_ops(Trainer *t) {
    model_zero_grad(t->m);
    for (int micro = 0; micro < t->share.micros; micro++) {
        model_pass(t->m, t->share.micro, t->c.T, micro, t->o.batch * t->c.T, 1);
        model_backward(t->m);
    }
    model_reduce_grads(t->m);
    const double *sumsq = model_grad_norm(t->m, NULL);
    dev_stage(t->d, STAGE_OPTIMIZER);
    optimizer_step(&t->opt, t->d, t->ps, sumsq);
    if (t->moe && t->c.bias && t->o.bias_rate > 0) moe_update_bias(t->moe, t->o.bias_rate, t->opt.factor);
    model_share_params(t->m);
    dev_stage(t->d, STAGE_WAIT);
    comm_dev_barrier(t->world); // peers read this rank's experts: not before they are updated
    dev_stage(t->d, STAGE_OTHER);
    t->sumsq = sumsq;
}

// The first step runs as it is called, and makes what is made at a first use; the second is recorded.
static void step_run(Trainer *t) {
    if (!t->recorded && t->steps_run > 0 && t->o.cuda_graph && dev_record_begin(t->d)) {
        step_ops(t);
        dev_record_end(t->d);
        t->recorded = 1;
    }
    if (t->recorded) dev_replay(t->d);
    else step_ops(t);
    t->steps_run++;
}

int trainer_grow(Trainer *t, const char *what) {
    int again = model_grow(t->m);
    if (!t->moe || moe_room(t->moe).grown == t->grown) return 0;
    t->grown = moe_room(t->moe).grown;
    t->recorded = 0; // it has the old addresses
    if (t->log) log_room(moe_room(t->moe), what);
    return again;
}

// What the step left behind, and whether it updated anything: not where loss or gradients are not finite, or a router's scores.
static void step_read(Trainer *t, StepStats *s) {
    dev_download(t->d, &s->grad_norm, t->sumsq, sizeof s->grad_norm);
    s->grad_norm = sqrt(s->grad_norm);
    s->loss = model_nll(t->m);
    comm_sum_double(t->world, &s->loss, 1);
    s->loss /= (double)(t->o.batch * t->c.T);
    int finite = isfinite(s->loss) && isfinite(s->grad_norm); // the same on all ranks, as both are sums over them
    if (!finite && t->info->rank == 0)
        fprintf(stderr, "step %lld: loss %g, gradient norm %g; nothing was updated\n", (long long)s->step, s->loss, s->grad_norm);
    if (t->moe) moe_stats(t->moe, &s->moe); // stops where a router met a NaN, with its place
    CHECK_NUMERIC(finite, "the loss or the gradient norm is not a finite number (hint: resume from the last checkpoint with a lower --lr)");
    if (t->moe && t->o.check_plans) moe_check_hashes(t->moe);
}

void trainer_step(Trainer *t, StepStats *s) {
    int64_t step_tokens = t->o.batch * t->c.T;
    double begin = now_ms(), discard[STAGES];
    *s = (StepStats){.step = t->at.step + 1, .tokens = t->at.tokens + step_tokens, .has_moe = t->moe != NULL};
    s->lr = schedule_lr(&t->schedule, s->step);
    dev_stage_read(t->d, discard);

    for (int micro = 0; micro < t->share.micros; micro++) load_micro(t, micro);
    optimizer_set(&t->opt, t->d, s->lr, s->step);
    step_run(t);
    for (; trainer_grow(t, "step"); s->reruns++) step_run(t);
    step_read(t, s);

    t->at = (Progress){.step = s->step, .samples = t->at.samples + t->o.batch, .tokens = s->tokens};
    s->step_ms = now_ms() - begin;
    s->tok_s = (double)step_tokens / s->step_ms * 1e3;
    collect_times(t, s);
}
