// Errors: what was found, what was expected, what to do; then every rank stops with a stated status.
#ifndef MOE_CHECK_H
#define MOE_CHECK_H
#include <stddef.h>
#include <stdint.h>

enum {                // exit status of every program
    STATUS_OK = 0,
    STATUS_USAGE = 2, // arguments and their combinations
    STATUS_DATA = 3,  // files and their contents
    STATUS_NUMERIC = 4,
    STATUS_COMM = 5,
    STATUS_DEVICE = 6,
};

// Prints "rank R: file:line: message" (the rank only where there are several) and ends the whole run with `status`.
// A rank other than 0 first gives rank 0 some seconds to report the same fault, so that a fault all ranks see is told once.
void die(int status, const char *file, int line, const char *fmt, ...) __attribute__((noreturn, format(printf, 4, 5)));

// The transport names the calling thread's rank and says how to end the other processes. `stop` may be NULL (exit).
void die_setup(int rank, int n_ranks, void (*stop)(int status));

#define CHECK_AS(status, cond, ...) \
    do {                                                              \
        if (!(cond)) die(status, __FILE__, __LINE__, __VA_ARGS__);    \
    } while (0)
#define CHECK_USAGE(cond, ...) CHECK_AS(STATUS_USAGE, cond, __VA_ARGS__)
#define CHECK_DATA(cond, ...) CHECK_AS(STATUS_DATA, cond, __VA_ARGS__)
#define CHECK_NUMERIC(cond, ...) CHECK_AS(STATUS_NUMERIC, cond, __VA_ARGS__)
#define CHECK_COMM(cond, ...) CHECK_AS(STATUS_COMM, cond, __VA_ARGS__)
#define CHECK_DEVICE(cond, ...) CHECK_AS(STATUS_DEVICE, cond, __VA_ARGS__)

// What the launcher (mpirun, srun) says about this process, before or without a transport. Size: 0 = no launcher,
// -1 = a launcher that does not tell. Rank 0 without one.
int launcher_size(void);
int launcher_rank(void);

// Product of dims as a size; refuses (STATUS_USAGE) a negative factor or one past the address space.
// The only way to turn dims into an element or byte count: size_mul(3, (size_t[]){B, T, C}) written SIZE(B, T, C).
size_t size_mul(int n, const int64_t *dims);
#define SIZE(...) size_mul(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t), (int64_t[]){__VA_ARGS__})

void *host_alloc(size_t bytes); // zeroed host memory or die; free() it
#endif
