// For tests: a function or a command in a child process, watched by a clock; folders of their own for files.
#ifndef TESTS_COMMON_CHILD_H
#define TESTS_COMMON_CHILD_H
#include <stddef.h>
typedef struct Child {
    int status;      // exit status; 128 + signal where a signal ended it; -1 where it was stopped after a minute
    char out[16384]; // stdout and stderr together, NUL-terminated, cut where longer
} Child;
Child child_call(void (*body)(void *arg), void *arg);
Child child_shell(const char *command, const void *input, size_t n); // with /bin/sh; n bytes on its standard input
char *temp_dir(void);                // a fresh folder
void temp_remove(char *dir);         // with all that is in it; frees the name
char *program_path(const char *name); // beside the running test; free() it
#endif
