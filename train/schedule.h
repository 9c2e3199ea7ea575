// Learning rate as a pure function of the step.
#ifndef MOE_SCHEDULE_H
#define MOE_SCHEDULE_H
#include <stdint.h>

typedef enum { SCHEDULE_COSINE, SCHEDULE_WSD } ScheduleKind;

typedef struct Schedule {
    ScheduleKind kind;
    double lr, min_lr;
    int64_t warmup, decay, steps; // decay: WSD's last part
} Schedule;

// Learning rate of update `step` (1 for the first).
//   step <= warmup    lr step / warmup
//   cosine            min + (lr - min) (1 + cos(pi (step - warmup) / (steps - warmup))) / 2
//   wsd               lr, and over the last `decay` steps linearly to min (warm-up, stable, decay: 2404.06395)
//   past steps        min
double schedule_lr(const Schedule *s, int64_t step);
#endif
