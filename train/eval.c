// Validation loss.
#include "kernels/check.h"
#include "train/trainer.h"
#include <math.h>
#include <time.h>

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

// Window i of the n that are taken from all: evenly spaced, the same ones every time and for any number of ranks.
static int64_t window_of(int64_t i, int64_t n, int64_t all) { return (int64_t)((__int128)i * all / n); }

// Sums over this rank's windows: of nll on the device, of targets that are bytes
static int64_t pass_over(Trainer *t, int64_t n) {
    int T = t->c.T, ranks = t->info->size, room = t->share.micro;
    int64_t all = loader_windows(t->val), bytes = 0, rounds = (n + (int64_t)ranks * room - 1) / ((int64_t)ranks * room);
    for (int64_t round = 0; round < rounds; round++) {
        // ranks without a window left take part with none: every round is the same collectives on all
        int64_t at = (round * ranks + t->info->rank) * room;
        int B = at >= n ? 0 : n - at < room ? (int)(n - at) : room;
        for (int b = 0; b < B; b++) {
            size_t place = SIZE(b, T);
            loader_window(t->val, window_of(at + b, n, all), t->tok + place, t->target + place, t->c.doc_mask ? t->first + place : NULL);
            for (int i = 0; i < T; i++) bytes += t->target[place + (size_t)i] < 256;
        }
        model_forward(t->m, t->tok, t->target, t->c.doc_mask ? t->first : NULL, B, T, 0, 0, 0);
    }
    return bytes;
}

EvalStats trainer_eval(Trainer *t, int64_t windows) {
    int64_t all = loader_windows(t->val), n = windows > 0 && windows < all ? windows : all, bytes, tokens = n * t->c.T;
    double begin = now_ms();
    do bytes = pass_over(t, n);
    while (trainer_grow(t, "evaluation"));
    double nll = model_nll(t->m);
    comm_sum_double(t->world, &nll, 1);
    comm_sum_int64(t->world, &bytes, 1);
    CHECK_NUMERIC(isfinite(nll), "the validation loss is not a finite number (hint: resume from the last checkpoint with a lower --lr)");
    int is_bytes = t->c.V == tokenizer_vocab(t->tokenizer) || t->c.V == 256;
    return (EvalStats){.loss = nll / (double)tokens, .windows = n, .tokens = tokens, .ms = now_ms() - begin,
                       .bits_per_byte = is_bytes && bytes ? nll / log(2.0) / (double)bytes : NAN};
}
