#include "tests/common/child.h"
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LIMIT_S = 60 };

_Noreturn static void broken(const char *what) {
    perror(what);
    abort();
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static Child collect(pid_t pid, int fd) {
    size_t used = 0;
    double end = seconds() + LIMIT_S;
    Child c;
    c.status = 0;
    for (;;) {
        int left_ms = (int)((end - seconds()) * 1000);
        if (left_ms <= 0 || poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, left_ms) == 0) {
            kill(pid, SIGKILL);
            c.status = -1;
            break;
        }
        char rest[4096]; // what is too long is read and dropped, so that the child does not block
        size_t room = sizeof c.out - 1 - used;
        ssize_t n = room ? read(fd, c.out + used, room) : read(fd, rest, sizeof rest);
        if (n <= 0) break;
        if (room) used += (size_t)n;
    }
    c.out[used] = 0;
    close(fd);
    int status;
    if (waitpid(pid, &status, 0) != pid) broken("waitpid");
    if (c.status == 0) c.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    return c;
}

Child child_call(void (*body)(void *arg), void *arg) {
    int ends[2];
    fflush(NULL);
    if (pipe(ends) != 0) broken("pipe");
    pid_t pid = fork();
    if (pid < 0) broken("fork");
    if (pid == 0) {
        dup2(ends[1], 1);
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        body(arg);
        fflush(NULL);
        _exit(0);
    }
    close(ends[1]);
    return collect(pid, ends[0]);
}

struct Shell {
    const char *command;
    FILE *input;
};

static void shell_exec(void *arg) {
    struct Shell *s = arg;
    dup2(fileno(s->input), 0);
    execl("/bin/sh", "sh", "-c", s->command, (char *)NULL);
    _exit(127);
}

Child child_shell(const char *command, const void *input, size_t n) {
    struct Shell s = {command, tmpfile()};
    if (!s.input || (n && fwrite(input, 1, n, s.input) != n) || fflush(s.input) != 0) broken("input");
    lseek(fileno(s.input), 0, SEEK_SET);
    Child c = child_call(shell_exec, &s);
    fclose(s.input);
    return c;
}

char *temp_dir(void) {
    const char *base = getenv("TMPDIR");
    char *dir;
    if (asprintf(&dir, "%s/moe-test-XXXXXX", base && *base ? base : "/tmp") < 0 || !mkdtemp(dir)) broken("mkdtemp");
    return dir;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

void temp_remove(char *dir) {
    if (nftw(dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS) != 0) broken(dir);
    free(dir);
}

char *program_path(const char *name) {
    char self[4096], *path;
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n <= 0) broken("/proc/self/exe");
    self[n] = 0;
    *strrchr(self, '/') = 0;
    if (asprintf(&path, "%s/%s", self, name) < 0) broken("memory");
    return path;
}
