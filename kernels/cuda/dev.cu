// A rank's CUDA device: life, memory, clock. All of a rank's ops run on one stream, in the order of the calls.
#include "kernels/cuda/group.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- life ----------------------------------------------------------------------------------------------------------
static void choose(Dev *d, DevOptions o) {
    int count = 0, driver = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    CUDA_CHECK(cudaDriverGetVersion(&driver));
    CHECK_DEVICE(driver, "no NVIDIA driver here (hint: install one for CUDA %d, or use the CPU build: make, then build/train)",
                 CUDART_VERSION / 1000);
    const cudaError_t code = cudaGetDeviceCount(&count);
    CHECK_DEVICE(code != cudaErrorInsufficientDriver, "the NVIDIA driver here knows CUDA %d.%d, this program was built with CUDA %d.%d (hint: "
                 "a newer driver, or build with a toolkit of the driver's version: make BACKEND=cuda CUDA=FOLDER)", driver / 1000,
                 driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    CHECK_DEVICE(code != cudaErrorNoDevice && (code != cudaSuccess || count), "the NVIDIA driver shows no GPU, CUDA_VISIBLE_DEVICES is %s%s%s "
                 "(hint: what does nvidia-smi list?)", visible ? "\"" : "", visible ? visible : "not set", visible ? "\"" : "");
    CUDA_CHECK(code);
    CHECK_DEVICE(o.shared || o.place < count, "rank %d of this machine finds %d GPU%s: every process needs one of its own, and must see "
                 "all of them (hint: fewer processes, srun --gpu-bind=none, or one process with --virtual-ranks for several ranks on one GPU)",
                 o.place, count, count == 1 ? "" : "s");
    d->device = o.place % count;
    d->sharing = (o.ranks > 0 ? o.ranks + count - 1 - d->device : count) / count;
    CUDA_CHECK(cudaSetDevice(d->device));
}

static __global__ void nothing_kernel() {}

static void can_run(const char *name, int arch) {
    CHECK_DEVICE(arch >= 80, "%s has compute capability %d.%d, 8.0 (A100) or newer is needed for bf16", name, arch / 10, arch % 10);
    cudaFuncAttributes kernel;
    const cudaError_t code = cudaFuncGetAttributes(&kernel, nothing_kernel);
    CHECK_DEVICE(code == cudaSuccess, "%s (sm_%d) cannot run the kernels of this program: %s (hint: build it for this GPU: make BACKEND=cuda "
                 "CUDA_ARCHS=\"-gencode arch=compute_%d,code=sm_%d\")", name, arch, cudaGetErrorString(code), arch, arch);
}

Dev *dev_init(DevOptions options) {
    Dev *d = (Dev *)host_alloc(sizeof *d);
    choose(d, options);
    d->poison = options.poison;
    d->memory.kind = MEMORY_WORKSPACE;
    pthread_mutex_init(&d->lock, NULL);
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDeviceProperties(&p, d->device));
    d->sms = p.multiProcessorCount, d->arch = 10 * p.major + p.minor;
    can_run(p.name, d->arch);
    snprintf(d->name, sizeof d->name, "%s, GPU %d, sm_%d, %d multiprocessors, %s", p.name, d->device, d->arch, d->sms,
             sizeof(real) == 2 ? "bf16" : "fp32");
    CUDA_CHECK(cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking));
    CHECK_DEVICE(cublasCreate(&d->blas) == CUBLAS_STATUS_SUCCESS, "cuBLAS cannot start on GPU %d (hint: is its memory full?)", d->device);
    CHECK_DEVICE(cublasSetStream(d->blas, d->stream) == CUBLAS_STATUS_SUCCESS, "cuBLAS refuses its stream");
    d->work = (char *)dev_alloc(d, WORK_BYTES, "scratch");
    d->given_up = (unsigned *)dev_alloc(d, sizeof *d->given_up, "flag");
    dev_zero(d, d->given_up, sizeof *d->given_up);
    CUDA_CHECK(cudaHostAlloc((void **)&d->late, sizeof *d->late, cudaHostAllocMapped | cudaHostAllocPortable));
    *d->late = Late{};
    group_choose(d);
    d->clock.mark = (Mark *)host_alloc(MARKS * sizeof(Mark));
    d->record_clock.mark = (Mark *)host_alloc(MARKS * sizeof(Mark));
    dev_stage(d, STAGE_OTHER);
    return d;
}

void dev_free(Dev *d) {
    if (!d) return;
    CUDA_CHECK(cudaSetDevice(d->device)); // the calling thread may never have seen it
    CUDA_CHECK(cudaStreamSynchronize(d->stream));
    if (d->record) CUDA_CHECK(cudaGraphExecDestroy(d->record));
    for (int i = 0; i < d->clock.made; i++) CUDA_CHECK(cudaEventDestroy(d->clock.mark[i].at));
    for (int i = 0; i < d->record_clock.made; i++) CUDA_CHECK(cudaEventDestroy(d->record_clock.mark[i].at));
    for (DevBlock *b = d->blocks, *next; b; b = next) {
        next = b->next;
        CUDA_CHECK(cudaFree(b->base));
        free(b);
    }
    CUDA_CHECK(cudaFreeHost(d->late));
    cublasDestroy(d->blas);
    CUDA_CHECK(cudaStreamDestroy(d->stream));
    pthread_mutex_destroy(&d->lock);
    free(d->clock.mark);
    free(d->record_clock.mark);
    free(d);
}

const char *dev_name(const Dev *d) { return d->name; }

// What a rank computes once it has given up waiting for another is worth nothing: nobody gets to see it.
void dev_wait(Dev *d) {
    const cudaError_t code = cudaStreamSynchronize(d->stream); // where a fault in any op before shows
    const volatile Late *l = d->late;
    CHECK_COMM(!l->set, "GPU %d has waited %g s for rank %d to meet rank %d (hint: is that rank stopped, or its GPU busy with something else? "
               "MOE_PATIENCE=SECONDS waits longer)", d->device, d->patience_s, l->peer, l->rank);
    CUDA_CHECK(code);
}

// ---- memory --------------------------------------------------------------------------------------------------------
void *dev_alloc(Dev *d, size_t bytes, const char *what) {
    void *p = NULL;
    size_t room = (bytes + 255) / 256 * 256 + 256;
    if (d->memory.counting) {
        ledger_add(&d->memory, room);
        return NOWHERE;
    }
    cudaError_t code = room > bytes ? cudaMalloc(&p, room) : cudaErrorMemoryAllocation;
    size_t left = 0, all = 0;
    if (code != cudaSuccess) cudaMemGetInfo(&left, &all);
    CHECK_DEVICE(code == cudaSuccess, "no memory for %s: %zu bytes asked for, %zu of %zu left on GPU %d: %s (hint: a smaller "
                 "--micro-batch or --seq, or more ranks)", what, bytes, left, all, d->device, cudaGetErrorString(code));
    CUDA_CHECK(cudaMemsetAsync(p, d->poison ? 0xFF : 0, room, d->stream)); // as float and bf16 a NaN, as an index out of range
    DevBlock *b = (DevBlock *)host_alloc(sizeof *b);
    pthread_mutex_lock(&d->lock);
    *b = DevBlock{p, room, d->memory.kind, d->blocks};
    d->blocks = b;
    ledger_add(&d->memory, room);
    pthread_mutex_unlock(&d->lock);
    return p;
}

void dev_release(Dev *d, void *p) {
    if (!p) return;
    CUDA_CHECK(cudaStreamSynchronize(d->stream));
    if (d->record) {
        CUDA_CHECK(cudaGraphExecDestroy(d->record));
        d->record = nullptr, d->record_clock.n = 0, d->replayed = false;
    }
    pthread_mutex_lock(&d->lock);
    DevBlock **at = &d->blocks;
    while (*at && (*at)->base != p) at = &(*at)->next;
    DevBlock *b = *at;
    CHECK_DEVICE(b, "memory is released that is not the device's");
    *at = b->next;
    ledger_back(&d->memory, b->kind, b->bytes);
    pthread_mutex_unlock(&d->lock);
    CUDA_CHECK(cudaFree(p));
    free(b);
}

Ledger *dev_ledger(Dev *d) { return &d->memory; }
int dev_lazy(const Dev *d) { return (void)d, 0; }

double dev_available(const Dev *d) {
    size_t left = 0, all = 0;
    CUDA_CHECK(cudaSetDevice(d->device));
    CUDA_CHECK(cudaMemGetInfo(&left, &all));
    return (double)left / d->sharing;
}

// From ordinary host memory the driver takes its copy before the call returns, so that the caller may change it at once.
void dev_upload(Dev *d, void *dst, const void *host, size_t bytes) {
    if (bytes && !d->memory.counting) CUDA_CHECK(cudaMemcpyAsync(dst, host, bytes, cudaMemcpyHostToDevice, d->stream));
}

void dev_download(Dev *d, void *host, const void *src, size_t bytes) {
    if (bytes) CUDA_CHECK(cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, d->stream));
    dev_wait(d);
}

void dev_copy(Dev *d, void *dst, const void *src, size_t bytes) {
    if (bytes && !d->memory.counting) CUDA_CHECK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, d->stream));
}

void dev_zero(Dev *d, void *dst, size_t bytes) {
    if (bytes && !d->memory.counting) CUDA_CHECK(cudaMemsetAsync(dst, 0, bytes, d->stream));
}

// ---- clock ---------------------------------------------------------------------------------------------------------
const char *const stage_names[STAGES] = {"other",   "embed",   "attention", "router", "counts", "plan",      "copies",
                                         "dispatch", "experts", "combine",  "head",   "reduce", "optimizer", "wait"};

// An event on the stream at each change of stage; read once, after the step.
static void mark(Dev *d, int stage) {
    Clock *c = d->recording ? &d->record_clock : &d->clock;
    if (c->n == MARKS) return; // the time from here on goes to the last one's stage
    Mark *m = &c->mark[c->n++];
    if (c->n > c->made) {
        CUDA_CHECK(cudaEventCreate(&m->at));
        c->made = c->n;
    }
    m->stage = stage;
    CUDA_CHECK(cudaEventRecordWithFlags(m->at, d->stream, d->recording ? cudaEventRecordExternal : cudaEventRecordDefault));
}

void dev_stage(Dev *d, Stage s) {
    if (d->stage == s && (d->recording ? d->record_clock.n : d->clock.n)) return;
    d->stage = s;
    mark(d, s);
}

Stage dev_stage_now(const Dev *d) { return d->stage; }

static void clock_add(const Clock *c, double ms[STAGES]) {
    for (int i = 0; i + 1 < c->n; i++) {
        float t = 0;
        if (c->mark[i].stage < 0) continue;
        CUDA_CHECK(cudaEventElapsedTime(&t, c->mark[i].at, c->mark[i + 1].at));
        ms[c->mark[i].stage] += t;
    }
}

void dev_stage_read(Dev *d, double ms[STAGES]) {
    memset(ms, 0, STAGES * sizeof *ms);
    mark(d, -1);
    dev_wait(d);
    clock_add(&d->clock, ms);
    if (d->replayed) clock_add(&d->record_clock, ms);
    d->replayed = false;
    d->clock.n = 0;
    mark(d, d->stage);
}

// ---- a step that repeats ---------------------------------------------------------------------------------------------
int dev_record_begin(Dev *d) {
    CHECK_DEVICE(!d->recording && !d->record, "a device holds one record, and this one has it already");
    CUDA_CHECK(cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal)); // other ranks may live in this process
    d->recording = true;
    mark(d, d->stage);
    return 1;
}

void dev_record_end(Dev *d) {
    cudaGraph_t graph;
    mark(d, -1);
    d->recording = false;
    CUDA_CHECK(cudaStreamEndCapture(d->stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&d->record, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
}

void dev_replay(Dev *d) {
    mark(d, -1); // the record's marks have this time
    CUDA_CHECK(cudaGraphLaunch(d->record, d->stream));
    d->replayed = true;
    mark(d, d->stage);
}
