// The emulation as the host sees it: streams, events, graphs, memory, cuBLAS, and what is wrong is found.
#include "tests/emu/test_emu.h"
#include "kernels/cuda/group.h"
#include <cublas_v2.h>
#include <math.h>

static __global__ void add(float *y, const float *x, float c) { y[threadIdx.x] = x[threadIdx.x] + c; }

static void host_faults(void **) {
    must_die([](void *) {
        static float x;
        LAUNCH(add, 1, 1, 0, stream, device<float>(1), &x, 0.0f);
    }, ABORTED, "argument 2: ");
    must_die([](void *) {
        float x[8], *p = device<float>(4);
        CUDA_CHECK(cudaMemcpyAsync(x, p, sizeof x, cudaMemcpyDeviceToHost, stream));
    }, ABORTED, "32 bytes at byte 0 of a block of 16 bytes");
    must_die([](void *) {
        static float x[8];
        CUDA_CHECK(cudaMemcpyAsync(x, x + 4, 8, cudaMemcpyHostToDevice, stream));
    }, ABORTED, "a copy of kind 1 from the host to the host");
    must_die([](void *) {
        float *p = device<float>(4);
        CUDA_CHECK(cudaFree(p));
        CUDA_CHECK(cudaMemsetAsync(p, 0, 4, stream));
    }, ABORTED, "freed");
    must_die([](void *) {
        emu_strict(true);
        *device<float>(4) = 1;
    }, CRASHED, "");
    must_die([](void *) {
        CUDA_CHECK(cudaLaunchHostFunc(stream, [](void *) { cudaStreamSynchronize(stream); }, nullptr));
        CUDA_CHECK(cudaStreamSynchronize(stream));
    }, ABORTED, "the device calls itself");
}

// ---- streams ---------------------------------------------------------------------------------------------------------------
static cudaEvent_t event_new(void) {
    cudaEvent_t e;
    CUDA_CHECK(cudaEventCreate(&e));
    return e;
}

// One stream writes what another reads, with or without the event between them
static bool event_between(const char *order, bool wait) {
    emu_streams(order);
    cudaStream_t a = stream_new(), b = stream_new();
    cudaEvent_t e = event_new();
    float *x = device<float>(4), *y = device<float>(4), *pinned;
    CUDA_CHECK(cudaMallocHost(&pinned, 16));
    CUDA_CHECK(cudaMemsetAsync(x, 0, 16, a));
    LAUNCH(add, 1, 4, 0, a, x, x, 1.0f);
    CUDA_CHECK(cudaEventRecord(e, a));
    LAUNCH(add, 1, 4, 0, a, y, y, 1.0f); // after the event: must not be waited for
    if (wait) CUDA_CHECK(cudaStreamWaitEvent(b, e, 0));
    LAUNCH(add, 1, 4, 0, b, x, x, 2.0f);
    CUDA_CHECK(cudaMemcpyAsync(pinned, x, 16, cudaMemcpyDeviceToHost, b));
    CUDA_CHECK(cudaStreamSynchronize(b));
    bool right = pinned[3] == 3;
    if (!strcmp(order, "late")) assert_int_equal(cudaStreamQuery(a), cudaErrorNotReady);
    CUDA_CHECK(cudaStreamSynchronize(a));
    assert_int_equal(cudaEventQuery(e), cudaSuccess);
    CUDA_CHECK(cudaStreamDestroy(a));
    CUDA_CHECK(cudaStreamDestroy(b));
    CUDA_CHECK(cudaEventDestroy(e));
    CUDA_CHECK(cudaFreeHost(pinned));
    return right;
}
static void events(void **) {
    for (const char *order : {"late", "early", "random:1", "random:2", "random:3"}) assert_true(event_between(order, true));
    assert_false(event_between("late", false));
    emu_streams("late");
}

static void host_memory(void **) {
    float *x = device<float>(4), pageable[4] = {1, 1, 1, 1}, *pinned;
    CUDA_CHECK(cudaMallocHost(&pinned, 16));
    assert_true(isnan(pinned[0]));
    for (int i = 0; i < 4; i++) pinned[i] = 1;
    CUDA_CHECK(cudaMemcpyAsync(x, pageable, 16, cudaMemcpyHostToDevice, stream));
    pageable[0] = 2; // kept aside when the call returned
    assert_true(host(x, 4)[0] == 1);
    CUDA_CHECK(cudaMemcpyAsync(x, pinned, 16, cudaMemcpyHostToDevice, stream));
    pinned[0] = 3; // the copy still reads it
    assert_true(host(x, 4)[0] == 3);
    EmuCounters before = emu_counters();
    CUDA_CHECK(cudaMemcpyAsync(pinned, x, 16, cudaMemcpyDeviceToHost, stream));
    EmuCounters after = emu_counters();
    assert_true(after.device_to_host == before.device_to_host + 1 && after.synchronisations == before.synchronisations);
    CUDA_CHECK(cudaMemcpyAsync(pageable, x, 16, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaMemcpyAsync(x, x + 2, 8, cudaMemcpyDeviceToDevice, stream));
    LAUNCH(add, 1, 4, 0, stream, x, x, 0.0f);
    cudaStreamQuery(stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    after = emu_counters();
    assert_true(after.device_to_host == before.device_to_host + 2 && after.synchronisations == before.synchronisations + 2);
    assert_true(after.launches == before.launches + 1 && after.device_to_device == before.device_to_device + 1 && after.queries == before.queries + 1);
    CUDA_CHECK(cudaFreeHost(pinned));
}

// The default stream and blocking ones wait for each other; one made with cudaStreamNonBlocking does not.
static void default_stream(void **) {
    cudaStream_t blocking;
    CUDA_CHECK(cudaStreamCreate(&blocking));
    float x[4], *p = device(std::vector<float>{0, 0, 0, 0}), *q = device(std::vector<float>{0, 0, 0, 0});
    CUDA_CHECK(cudaStreamSynchronize(stream));
    LAUNCH(add, 1, 4, 0, blocking, p, p, 1.0f);
    LAUNCH(add, 1, 4, 0, stream, q, q, 1.0f);
    CUDA_CHECK(cudaMemcpy(x, p, 16, cudaMemcpyDeviceToHost));
    assert_true(x[0] == 1);
    CUDA_CHECK(cudaMemcpy(x, q, 16, cudaMemcpyDeviceToHost));
    assert_true(x[0] == 0);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaStreamDestroy(blocking));
}

// Blocks, kernels and streams that wait for each other
static __global__ void meet(unsigned *count, unsigned *seen, unsigned n) {
    if (threadIdx.x == 0) {
        atomicAdd(count, 1u);
        while (flag_acquire(count) < n) __nanosleep(100);
    }
    __syncthreads();
    if (threadIdx.x == 1) seen[blockIdx.x] = *count;
}
static __global__ void signal_flag(unsigned *flag, unsigned value) { flag_release(flag, value); }
static __global__ void wait_flag(const unsigned *flag, unsigned value) {
    while (flag_acquire(flag) != value) __nanosleep(100);
}
static void waiting_kernels(void **) {
    for (const char *order : orders) {
        emu_order(order);
        unsigned *count = device(std::vector<unsigned>{0}), *seen = device<unsigned>(5);
        CUDA_CHECK((cudaError_t)emu::launcher("meet", meet, 5, 64, 0, stream, true)(count, seen, 5));
        for (unsigned s : host(seen, 5)) assert_int_equal(s, 5);
    }
    cudaStream_t a = stream_new(), b = stream_new();
    unsigned *flag = device(std::vector<unsigned>{0, 0});
    CUDA_CHECK(cudaStreamSynchronize(stream));
    LAUNCH(wait_flag, 1, 32, 0, a, flag, 1u);
    LAUNCH(signal_flag, 1, 1, 0, a, flag + 1, 1u);
    LAUNCH(signal_flag, 1, 1, 0, b, flag, 1u);
    LAUNCH(wait_flag, 1, 32, 0, b, flag + 1, 1u);
    CUDA_CHECK(cudaStreamSynchronize(a));
    CUDA_CHECK(cudaStreamSynchronize(b));
    must_die([](void *) {
        setenv("EMU_WAIT", "0.2", 1);
        unsigned *none = device(std::vector<unsigned>{0});
        LAUNCH(meet, 2, 32, 0, stream, none, none, 2u); // the second block has no place
        CUDA_CHECK(cudaStreamSynchronize(stream));
    }, ABORTED, "nothing moved");
}

// ---- graphs ------------------------------------------------------------------------------------------------------------------
static void graphs(void **) {
    for (const char *order : {"late", "early", "random:5"}) {
        emu_streams(order);
        cudaStream_t a = stream_new(), b = stream_new();
        cudaEvent_t fork = event_new(), join = event_new();
        float *x = device(std::vector<float>{0, 0, 0, 0}), *y = device<float>(4), *z = device<float>(4), *pinned;
        CUDA_CHECK(cudaMallocHost(&pinned, 16));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        cudaGraph_t g;
        cudaGraphExec_t run;
        CUDA_CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
        CUDA_CHECK(cudaMemcpyAsync(x, pinned, 16, cudaMemcpyHostToDevice, a));
        CUDA_CHECK(cudaEventRecord(fork, a));
        CUDA_CHECK(cudaStreamWaitEvent(b, fork, 0));
        LAUNCH(add, 1, 4, 0, b, y, x, 10.0f);
        CUDA_CHECK(cudaEventRecord(join, b));
        LAUNCH(add, 1, 4, 0, a, z, x, 1.0f);
        CUDA_CHECK(cudaStreamWaitEvent(a, join, 0));
        LAUNCH(add, 1, 4, 0, a, z, y, 100.0f);
        CUDA_CHECK(cudaStreamEndCapture(a, &g));
        CUDA_CHECK(cudaGraphInstantiate(&run, g, 0));
        CUDA_CHECK(cudaGraphDestroy(g));
        assert_true(isnan(host(z, 1)[0])); // recorded, not run
        for (int i = 0; i < 3; i++) {
            for (int j = 0; j < 4; j++) pinned[j] = (float)i;
            CUDA_CHECK(cudaGraphLaunch(run, a));
            CUDA_CHECK(cudaStreamSynchronize(a));
            assert_true(host(z, 4)[3] == 110 + i);
        }
        CUDA_CHECK(cudaGraphExecDestroy(run));
        CUDA_CHECK(cudaFreeHost(pinned));
    }
    emu_streams("late");
}

static void capture_faults(void **) {
    cudaStream_t a = stream_new(), b = stream_new();
    cudaEvent_t fork = event_new(), outside = event_new();
    cudaGraph_t g;
    float x[4], *p = device<float>(4);
    CUDA_CHECK(cudaEventRecord(outside, b));
    auto begin = [&] { CUDA_CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal)); };
    auto ends_in = [&](cudaError_t e) { assert_int_equal(cudaStreamEndCapture(a, &g), e), assert_int_equal(cudaGetLastError(), e); };
    begin();
    assert_int_equal(cudaStreamSynchronize(a), cudaErrorStreamCaptureUnsupported);
    ends_in(cudaErrorStreamCaptureInvalidated);
    begin();
    assert_int_equal(cudaMemcpy(x, p, 16, cudaMemcpyDeviceToHost), cudaErrorStreamCaptureUnsupported);
    ends_in(cudaErrorStreamCaptureInvalidated);
    begin();
    float *q;
    assert_int_equal(cudaMalloc(&q, 16), cudaErrorStreamCaptureUnsupported);
    ends_in(cudaErrorStreamCaptureInvalidated);
    begin();
    assert_int_equal(cudaEventQuery(outside), cudaErrorStreamCaptureUnsupported);
    ends_in(cudaErrorStreamCaptureInvalidated);
    begin();
    assert_int_equal(cudaStreamWaitEvent(a, outside, 0), cudaErrorStreamCaptureIsolation);
    ends_in(cudaErrorStreamCaptureInvalidated);
    begin();
    CUDA_CHECK(cudaEventRecord(fork, a));
    CUDA_CHECK(cudaStreamWaitEvent(b, fork, 0));
    LAUNCH(add, 1, 4, 0, b, p, p, 1.0f);
    ends_in(cudaErrorStreamCaptureUnjoined);
    begin();
    ends_in(cudaSuccess);
}

// ---- cuBLAS ----------------------------------------------------------------------------------------------------------------
template <class T> static void gemm_case(cudaDataType_t type, cudaDataType_t c_type, int ta, int tb) {
    const int m = 19, n = 7, k = 13, batch = 2, lda = 21, ldb = 14, ldc = 20;
    std::vector<T> A((size_t)(batch * 21 * 21)), B((size_t)(batch * 14 * 14));
    std::vector<float> C((size_t)(batch * ldc * n));
    for (size_t i = 0; i < A.size(); i++) A[i] = (float)(hash((uint32_t)i) % 15) - 7;
    for (size_t i = 0; i < B.size(); i++) B[i] = (float)(hash((uint32_t)i + 77) % 15) - 7;
    for (size_t i = 0; i < C.size(); i++) C[i] = (float)(i % 9);
    std::vector<__nv_bfloat16> half(C.begin(), C.end());
    T *a = device(A), *b = device(B);
    void *c = c_type == CUDA_R_32F ? (void *)device(C) : (void *)device(half);
    float alpha = 2, beta = 0.5f;
    cublasHandle_t h;
    cublasCreate(&h), cublasSetStream(h, stream);
    cublasStatus_t s = cublasGemmStridedBatchedEx(h, (cublasOperation_t)ta, (cublasOperation_t)tb, m, n, k, &alpha, a, type, lda, 21 * 21, b, type,
                                                  ldb, 14 * 14, &beta, c, c_type, ldc, ldc * n, batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    assert_int_equal(s, CUBLAS_STATUS_SUCCESS);
    std::vector<float> got;
    if (c_type == CUDA_R_32F) got = host((float *)c, C.size());
    else
        for (__nv_bfloat16 v : host((__nv_bfloat16 *)c, C.size())) got.push_back(v);
    for (int i = 0; i < batch * ldc * n; i++) {
        int r = i % ldc, j = i / ldc % n, z = i / ldc / n;
        double sum = 0;
        for (int l = 0; l < k && r < m; l++)
            sum += (double)A[(size_t)(z * 441 + (ta ? l + r * lda : r + l * lda))] * B[(size_t)(z * 196 + (tb ? j + l * ldb : l + j * ldb))];
        double want = r < m ? 2 * sum + 0.5 * C[(size_t)i] : C[(size_t)i]; // exact in fp32
        assert_true(got[(size_t)i] == (c_type == CUDA_R_32F ? (float)want : (float)__nv_bfloat16((float)want)));
    }
    cublasDestroy(h);
}
static void cublas(void **) {
    for (int t = 0; t < 4; t++) {
        gemm_case<float>(CUDA_R_32F, CUDA_R_32F, t & 1, t >> 1);
        gemm_case<__nv_bfloat16>(CUDA_R_16BF, CUDA_R_32F, t & 1, t >> 1);
        gemm_case<__nv_bfloat16>(CUDA_R_16BF, CUDA_R_16BF, t & 1, t >> 1);
    }
}

// ---- the choice of grouped products: a way that errs in one element of one form is found, as is one that does nothing ---------
static __global__ void spoil(const GroupArgs g, GroupForm form) {
    if (form == GROUP_TN) g.dw[2][77] += 1;
    else g.y[77] = (real)0.5f; // the sums are integers
}
template <int FORM> static bool spoilt(Dev *d, GroupForm form, const GroupArgs &g) {
    group_portable(d, form, g);
    if ((int)form == FORM) LAUNCH(spoil, 1, 1, 0, d->stream, g, form);
    return true;
}
static bool idle(Dev *, GroupForm, const GroupArgs &) { return true; }
static bool absent(Dev *d, GroupForm form, const GroupArgs &g) { return group_portable(d, form, g) && false; }
static void choice(void **) {
    Dev *d = dev_init(DevOptions{});
    assert_true(strstr(d->name, "grouped products portable") && !d->hopper);
    size_t before = dev_taken(d, NULL);
    assert_true(group_agrees(d, group_portable));
    assert_false(group_agrees(d, spoilt<GROUP_NT>) || group_agrees(d, spoilt<GROUP_NN>) || group_agrees(d, spoilt<GROUP_TN>));
    assert_false(group_agrees(d, idle) || group_agrees(d, absent));
    assert_true(dev_taken(d, NULL) == before);
    dev_free(d);
}

int main(void) {
    stream = stream_new();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(host_faults), cmocka_unit_test(events), cmocka_unit_test(host_memory), cmocka_unit_test(default_stream),
        cmocka_unit_test(waiting_kernels), cmocka_unit_test(graphs), cmocka_unit_test(capture_faults), cmocka_unit_test(cublas),
        cmocka_unit_test(choice),
    };
    return cmocka_run_group_tests(tests, nullptr, nullptr);
}
