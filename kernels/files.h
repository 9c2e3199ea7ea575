// Small file helpers. Every failure dies with STATUS_DATA and the file's name.
#ifndef MOE_FILES_H
#define MOE_FILES_H
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
char *file_read(const char *path, size_t *n);         // whole file, NUL-terminated; free() it
int64_t file_size(const char *path);                  // -1 when it does not exist
int file_is_dir(const char *path);
void file_write(const char *path, const void *data, size_t n); // to a temporary name, synced, renamed: whole or not at all
void stdout_check(void); // at the end of a program whose result it is: all that was printed is written
void dir_make(const char *path);                      // with its parents
void dir_sync(const char *path);
char *path_join(const char *dir, const char *name);   // free() it
char *str_format(const char *fmt, ...) __attribute__((format(printf, 1, 2))); // free() it
uint64_t fnv1a(uint64_t h, const void *data, size_t n); // 64-bit FNV-1a; start with FNV1A_START
#define FNV1A_START 0xCBF29CE484222325ull
#endif
