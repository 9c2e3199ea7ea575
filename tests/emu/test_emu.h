// What the tests of the emulation share: device memory from and to vectors, and faults that must be found.
#ifndef TEST_EMU_H
#define TEST_EMU_H
#include "kernels/cuda/launch.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>
extern "C" {
#include "tests/common/child.h"
#include <cmocka.h>
}

static const char *const orders[] = {"forward", "reverse", "random:1", "random:2"};
static cudaStream_t stream;

template <class T> static T *device(size_t n) {
    T *p;
    CUDA_CHECK(cudaMalloc(&p, n * sizeof(T)));
    return p;
}
template <class T> static T *device(const std::vector<T> &v) {
    T *p = device<T>(v.size());
    CUDA_CHECK(cudaMemcpyAsync(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
    return p;
}
template <class T> static std::vector<T> host(const T *p, size_t n) {
    std::vector<T> v(n);
    CUDA_CHECK(cudaMemcpyAsync(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost, stream));
    return v;
}
static inline uint32_t hash(uint32_t x) { return (x ^ x >> 15) * 0x2c1b3c6du ^ x << 7; }

enum { ABORTED = 128 + SIGABRT, CRASHED = 128 + SIGSEGV, REPORTED = 1 }; // the last: by the address sanitizer

// In a process of its own: it must end with `status` and say `part`.
static void must_die(void (*body)(void *), int status, const char *part) {
    void (*before)(int) = signal(SIGSEGV, SIG_DFL); // cmocka's would go on with the next test
    Child c = child_call(body, nullptr);
    signal(SIGSEGV, before);
    if (c.status != status || !strstr(c.out, part)) {
        printf("expected status %d and \"%s\", found status %d and:\n%s\n", status, part, c.status, c.out);
        fail();
    }
}

static inline cudaStream_t stream_new(void) {
    cudaStream_t s;
    CUDA_CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}
#endif
