// How much memory there is to have: what Linux can give without swapping, within the limits of the process's control groups.
#include "kernels/cpu/dev.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

// The number in a file of its own; INFINITY where there is none (no such file, "max")
static double file_number(const char *path) {
    FILE *f = fopen(path, "r");
    double v = INFINITY;
    if (f && fscanf(f, "%lf", &v) != 1) v = INFINITY;
    if (f) fclose(f);
    return v;
}

static double free_bytes(void) {
    FILE *f = fopen("/proc/meminfo", "r");
    char line[256];
    double kib = INFINITY;
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %lf kB", &kib) == 1) break;
    if (f) fclose(f);
    return kib * 1024;
}

// The tightest limit on the way from this process's group (version 2) up to the root
static double group_limit(void) {
    FILE *f = fopen("/proc/self/cgroup", "r");
    char line[2048], group[2048] = "", path[4096];
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "0::%2047s", group) == 1) break;
    if (f) fclose(f);
    double least = file_number("/sys/fs/cgroup/memory/memory.limit_in_bytes"); // version 1
    for (char *end; ; *end = 0) {
        snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.max", group);
        least = fmin(least, file_number(path));
        if (!(end = strrchr(group, '/'))) return least;
    }
}

double dev_available(const Dev *d) { return fmin(free_bytes(), group_limit()) / d->ranks;
}
