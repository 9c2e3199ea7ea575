// Linked into every test of the CUDA build: where no GPU can be used it is skipped (status 77) before it begins.
#include <cuda_runtime.h>
#include <stdio.h>
#include <unistd.h>

__attribute__((constructor)) static void skip_without_gpu(void) {
    int count = 0;
    const cudaError_t code = cudaGetDeviceCount(&count);
    if (code == cudaSuccess && count > 0) return;
    printf("skipped: no GPU can be used here: %s\n", code == cudaSuccess ? "none is visible" : cudaGetErrorString(code));
    fflush(stdout);
    _exit(77);
}
