// build/train: trains a model. Everything is in options.c (settings), setup.c, run.c (the loop) and step.c (one step).
#include "kernels/start.h"
#include "train/trainer.h"
#include <locale.h>
#include <signal.h>
#include <stdlib.h>

static void body(Comm *world, void *options) {
    Trainer *t = calloc(1, sizeof *t);
    trainer_open(t, world, options);
    trainer_run(t);
    trainer_close(t);
    free(t);
}

int main(int argc, char **argv) {
    static Options options; // large for a stack
    start_threads(argv);
    setlocale(LC_CTYPE, "");
    options_parse(&options, argc, argv);
    // Blocked here, before any thread exists that could take them; run.c looks for them after each step.
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN); // a pager that was closed does not end a training: OUT/log.jsonl has it all
    comm_run(&argc, &argv, (int)options.virtual_ranks, (int)options.nodes, body, &options);
    flags_free(options.flags);
    return 0;
}
