#include "train/folder.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include "train/checkpoint.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

// What this program writes into a run folder.
static int is_ours(const char *name) {
    if (strcmp(name, "run.json") == 0 || strcmp(name, "log.jsonl") == 0 || strcmp(name, "route.bin") == 0) return 1;
    int trace = strncmp(name, "route_", 6) == 0;
    if (!trace && strncmp(name, "step_", 5) != 0) return 0;
    const char *at = name + (trace ? 6 : 5), *end = at + strspn(at, "0123456789");
    return end - at >= 8 && (trace ? strcmp(end, ".bin") == 0 : !*end || strcmp(end, ".tmp") == 0);
}

static int entries(const char *dir, int remove_ours) {
    DIR *d = opendir(dir);
    if (!d && errno == ENOENT) return 0;
    CHECK_DATA(d, "cannot read folder %s: %s", dir, strerror(errno));
    int n = 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        n++;
        if (!remove_ours || !is_ours(e->d_name)) continue;
        char *path = path_join(dir, e->d_name);
        if (file_is_dir(path)) checkpoint_remove(path);
        else CHECK_DATA(unlink(path) == 0, "cannot remove %s: %s", path, strerror(errno));
        free(path);
    }
    closedir(d);
    return n;
}

static void check_empty(const Options *o, const char *path) {
    CHECK_USAGE(o->overwrite || entries(path, 0) == 0, "--out %s is not empty (hint: --resume %s continues the run in it, --overwrite replaces "
                "it)", path, path);
}

static char *choose_new(const Options *o) {
    if (o->out) {
        check_empty(o, o->out);
        return str_format("%s", o->out);
    }
    char model[64];
    options_model_name(o, model, sizeof model);
    for (int i = 1;; i++) {
        char *path = str_format("runs/%s-%03d", model, i);
        if (file_size(path) < 0) return path;
        free(path);
    }
}

static char *parent_of(const char *path) {
    char full[PATH_MAX];
    CHECK_DATA(realpath(path, full), "cannot resolve %s: %s", path, strerror(errno));
    char *copy = str_format("%s", path), *end = copy + strlen(copy);
    while (end > copy + 1 && end[-1] == '/') *--end = 0;
    char *slash = strrchr(copy, '/');
    const char *last = slash ? slash + 1 : copy;
    if (strcmp(last, ".") == 0 || strcmp(last, "..") == 0) { // as given it has no parent by name
        free(copy);
        copy = str_format("%s", full);
        slash = strrchr(copy, '/');
    }
    if (!slash) {
        free(copy);
        return str_format(".");
    }
    slash[slash == copy] = 0;
    return copy;
}

static int same_folder(const char *a, const char *b) {
    char x[PATH_MAX], y[PATH_MAX];
    return realpath(a, x) && realpath(b, y) && strcmp(x, y) == 0;
}

static void check_newest(const char *run, const char *checkpoint) {
    char *newest = checkpoint_find(run);
    CHECK_USAGE(same_folder(newest, checkpoint), "%s is not the newest checkpoint of its run, %s is; going on from it there would leave two "
                "histories in one folder (hint: another --out)", checkpoint, newest);
    free(newest);
}

char *folder_choose(const Options *o, const char *checkpoint, int *append) {
    *append = 0;
    if (!checkpoint) return choose_new(o);
    char *run = parent_of(checkpoint);
    if (o->out && !same_folder(o->out, run)) {
        free(run);
        return choose_new(o);
    }
    *append = 1;
    CHECK_USAGE(!o->overwrite, "--overwrite would remove the checkpoint to continue (hint: another --out)");
    check_newest(run, checkpoint);
    return run;
}

// Makes the folder if need be. -1: another run holds it.
static int lock(const char *path) {
    dir_make(path);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK_DATA(fd >= 0, "cannot open folder %s: %s", path, strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return fd; // file systems without locks: taken as free
    close(fd);
    return -1;
}

int folder_make(const Options *o, const char *checkpoint, char **path, int append) {
    int fd = lock(*path);
    while (!o->out && !append && (fd < 0 || entries(*path, 0) > 0)) { // a name of our choice: the next one does as well
        if (fd >= 0) close(fd);
        free(*path);
        *path = choose_new(o);
        fd = lock(*path);
    }
    CHECK_USAGE(fd >= 0, "another run is writing into %s (hint: another --out)", *path);
    if (append) check_newest(*path, checkpoint);
    else check_empty(o, *path);
    if (o->overwrite && !append) entries(*path, 1);
    return fd;
}
