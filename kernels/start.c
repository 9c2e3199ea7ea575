#include "kernels/start.h"
#include <stdlib.h>
#include <unistd.h>

void start_threads(char **argv) {
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n < 0 || getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY") || setenv("GOMP_SPINCOUNT", "2000", 1) != 0) return;
    path[n] = 0;
    execv(path, argv); // where it fails the run goes on as it is
}
