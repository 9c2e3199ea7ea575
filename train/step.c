// One training step, in reading order.
#include "kernels/check.h"
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

void trainer_step(Trainer *t, StepStats *s) {
    int T = t->c.T;
    int64_t step_tokens = t->o.batch * T;
    double begin = now_ms(), discard[STAGES];
    *s = (StepStats){.step = t->at.step + 1, .tokens = t->at.tokens + step_tokens, .has_moe = t->moe != NULL};
    dev_stage_read(t->d, discard);

    model_zero_grad(t->m);
    for (int micro = 0; micro < t->share.micros; micro++) {
        load_micro(t, micro);
        model_forward(t->m, t->tok, t->target, t->c.doc_mask ? t->first : NULL, t->share.micro, T, micro, step_tokens, 1);
        model_backward(t->m);
    }
    model_reduce_grads(t->m);
    const double *sumsq = model_grad_norm(t->m, &s->grad_norm);
    s->loss = model_nll(t->m);
    comm_sum_double(t->world, &s->loss, 1);
    s->loss /= (double)step_tokens;
    int finite = isfinite(s->loss) && isfinite(s->grad_norm); // the same on all ranks, as both are sums over them
    if (!finite && t->info->rank == 0)
        fprintf(stderr, "step %lld: loss %g, gradient norm %g; nothing was updated\n", (long long)s->step, s->loss, s->grad_norm);
    if (t->moe) moe_stats(t->moe, &s->moe); // stops where a router met a NaN, with its place
    CHECK_NUMERIC(finite, "the loss or the gradient norm is not a finite number (hint: resume from the last checkpoint with a lower --lr)");
    if (t->moe && t->o.check_plans) moe_check_hashes(t->moe);

    s->lr = schedule_lr(&t->schedule, s->step);
    dev_stage(t->d, STAGE_OPTIMIZER);
    optimizer_set(&t->opt, t->d, s->lr, s->step);
    optimizer_step(&t->opt, t->d, t->ps, sumsq);
    if (t->moe && t->c.bias && t->o.bias_rate > 0) moe_update_bias(t->moe, t->o.bias_rate);
    dev_stage(t->d, STAGE_WAIT);
    comm_barrier(t->world); // peers read this rank's experts: not before they are updated
    dev_stage(t->d, STAGE_OTHER);

    t->at = (Progress){.step = s->step, .samples = t->at.samples + t->o.batch, .tokens = s->tokens};
    s->step_ms = now_ms() - begin;
    s->tok_s = (double)step_tokens / s->step_ms * 1e3;
    collect_times(t, s);
}
