#include "train/schedule.h"
#include <math.h>

double schedule_lr(const Schedule *s, int64_t step) {
    if (step <= s->warmup) return s->lr * (double)step / (double)s->warmup;
    if (step >= s->steps) return s->min_lr;
    if (s->kind == SCHEDULE_COSINE) {
        double part = (double)(step - s->warmup) / (double)(s->steps - s->warmup);
        return s->min_lr + 0.5 * (s->lr - s->min_lr) * (1 + cos(acos(-1.0) * part));
    }
    int64_t left = s->steps - step;
    if (left >= s->decay) return s->lr;
    return s->min_lr + (s->lr - s->min_lr) * (double)left / (double)s->decay;
}
