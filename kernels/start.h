// What a process must have from its very start.
#ifndef MOE_START_H
#define MOE_START_H
// First thing in main: OpenMP's threads shall wait for each other some 50 us at full speed, then sleep. libgomp's own choice is
// several milliseconds, which is no faster on free cores, and where cores are shared keeps the thread that is waited for off
// its core (kernels/README.md has the figures). It reads the variable before main, so this starts the program anew, once. Who
// has set GOMP_SPINCOUNT or OMP_WAIT_POLICY keeps that.
void start_threads(char **argv);
#endif
