// Small file helpers: see files.h.
#include "kernels/files.h"
#include "kernels/check.h"
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

char *file_read(const char *path, size_t *n) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK_DATA(fd >= 0, "cannot open %s: %s (hint: is the path right?)", path, strerror(errno));
    struct stat st;
    CHECK_DATA(fstat(fd, &st) == 0, "cannot inspect %s: %s", path, strerror(errno));
    CHECK_DATA(!S_ISDIR(st.st_mode), "%s is a folder, expected a file", path);
    size_t room = (size_t)st.st_size + 1, used = 0; // st_size is a first guess: pipes and /proc say 0
    char *text = host_alloc(room + 1);
    for (;;) {
        if (used == room) {
            room = room * 2 + 4096;
            text = realloc(text, room + 1);
            CHECK_DATA(text, "no memory to read %s (%zu bytes so far)", path, used);
        }
        ssize_t got = read(fd, text + used, room - used);
        if (got < 0 && errno == EINTR) continue;
        CHECK_DATA(got >= 0, "cannot read %s: %s", path, strerror(errno));
        if (got == 0) break;
        used += (size_t)got;
    }
    close(fd);
    text[used] = 0;
    if (n) *n = used;
    return text;
}

int64_t file_size(const char *path) {
    struct stat st;
    if (stat(path, &st) == 0) return st.st_size;
    CHECK_DATA(errno == ENOENT || errno == ENOTDIR, "cannot inspect %s: %s", path, strerror(errno));
    return -1;
}

int file_is_dir(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

void dir_sync(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK_DATA(fd >= 0, "cannot open folder %s: %s", path, strerror(errno));
    // some file systems cannot sync a folder and say EINVAL; nothing better is to be had there
    CHECK_DATA(fsync(fd) == 0 || errno == EINVAL, "cannot sync folder %s: %s", path, strerror(errno));
    close(fd);
}

void file_write(const char *path, const void *data, size_t n) {
    char *temporary = str_format("%s.tmp.%ld", path, (long)getpid());
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    CHECK_DATA(fd >= 0, "cannot create %s: %s (hint: does the folder exist, may you write there?)", temporary, strerror(errno));
    size_t done = 0;
    int failed = 0;
    while (done < n && !failed) {
        ssize_t put = write(fd, (const char *)data + done, n - done);
        if (put >= 0) done += (size_t)put;
        else if (errno != EINTR) failed = errno;
    }
    if (!failed && fsync(fd) != 0) failed = errno;
    if (close(fd) != 0 && !failed) failed = errno;
    if (!failed && rename(temporary, path) != 0) failed = errno;
    if (failed) unlink(temporary);
    CHECK_DATA(!failed, "cannot write %s: %s after %zu of %zu bytes (hint: is the disk full?)", path, strerror(failed), done, n);
    char *slash = strrchr(temporary, '/');
    if (slash) slash[slash == temporary] = 0; // keeps the slash of "/"
    dir_sync(slash ? temporary : ".");
    free(temporary);
}

void stdout_check(void) {
    int good = fflush(stdout) == 0 && !ferror(stdout);
    CHECK_DATA(good, "cannot write standard output: %s (hint: is the disk full?)", strerror(errno));
}

void dir_make(const char *path) {
    char *part = str_format("%s", path);
    for (char *at = part; *at; at++) {
        if (at[1] && at[1] != '/') continue; // up to the end of each component
        char rest = at[1];
        at[1] = 0;
        int failed = mkdir(part, 0777) == 0 || errno == EEXIST ? 0 : errno;
        CHECK_DATA(!failed, "cannot make folder %s: %s", part, strerror(failed));
        at[1] = rest;
    }
    free(part);
    CHECK_DATA(file_is_dir(path), "%s exists and is not a folder (hint: remove it or choose another path)", path);
}

char *path_join(const char *dir, const char *name) {
    size_t n = strlen(dir);
    return n == 0 ? str_format("%s", name) : str_format(dir[n - 1] == '/' ? "%s%s" : "%s/%s", dir, name);
}

char *str_format(const char *fmt, ...) {
    char *text;
    va_list args;
    va_start(args, fmt);
    int n = vasprintf(&text, fmt, args);
    va_end(args);
    CHECK_DEVICE(n >= 0, "no memory for a string");
    return text;
}

uint64_t fnv1a(uint64_t h, const void *data, size_t n) {
    const unsigned char *p = data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001B3ull;
    return h;
}
