// Streams, events and graphs. Calls only queue; the thread of the host that waits runs what it waits for (and, where that is
// stuck, what else there is) under one lock: see "late" and "early" in emu.h.
#include "cuda_runtime.h"
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

using namespace emu;

namespace {

typedef std::function<Progress()> Step;
typedef std::shared_ptr<struct Point> PointPtr;

struct Point { // what an event is: how often it was recorded, and how much of that has happened
    uint64_t recorded = 0, done = 0;
    EmuStream *by = nullptr;     // the last to record it
    EmuGraph *captured = nullptr; // recorded in this capture
    double ms = 0;
};

enum Kind { WORK, RECORD, WAIT };
struct Op {
    Kind kind;
    std::string name;
    std::function<Step()> make; // WORK: a fresh run of it
    PointPtr point;             // RECORD, WAIT
    uint64_t version;
};

struct Lane_op {
    int lane;
    Op op;
};

std::mutex device_lock;
std::condition_variable news;
std::vector<EmuStream *> streams;
EmuStream *null_stream;
enum Stream_order { LATE, EARLY, STREAMS_RANDOM };
Stream_order stream_order;
EmuCounters counters;
bool moved;   // some work was done
int global_captures;
thread_local int own_captures, device_now;
thread_local cudaError_t last_error;
thread_local bool works; // this thread runs the device's work
std::map<const void *, int> shared_allowed;
enum { SHARED_DEFAULT = 48 << 10, SHARED_LIMIT = 163 << 10 };

struct Hold : std::unique_lock<std::mutex> {
    static std::mutex &free_lock() {
        if (works) fail("the device calls itself: a host function of a stream must not use CUDA");
        return device_lock;
    }
    Hold() : std::unique_lock<std::mutex>(free_lock()) {}
};

double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

cudaError_t report(cudaError_t e) {
    if (e != cudaSuccess) last_error = e;
    return e;
}

} // namespace

struct EmuStream {
    bool blocking; // waits for the default stream and it for this one
    int device;
    std::deque<Op> queue;
    Step step;     // of the first
    PointPtr tail; // how many ops were queued, how many are done
    EmuGraph *capture = nullptr;
    int lane = 0;
};
struct EmuEvent {
    PointPtr point;
    unsigned flags;
};
struct EmuGraph {
    std::vector<Lane_op> ops;
    std::vector<EmuStream *> members; // streams in the capture; the first began it
    cudaStreamCaptureMode mode;
    bool invalid = false;
    int lanes = 1;
};
struct EmuGraphExec {
    std::vector<Lane_op> ops;
    int lanes;
};

namespace {

EmuStream *stream_new(bool blocking) { return new EmuStream{blocking, device_now, {}, nullptr, std::make_shared<Point>()}; }

EmuStream *stream_of(cudaStream_t s) {
    if (s) return s;
    if (!null_stream) streams.push_back(null_stream = stream_new(true));
    return null_stream;
}

// ---- running ---------------------------------------------------------------------------------------------------------
void finish(EmuStream *s) {
    s->queue.pop_front();
    s->step = nullptr;
    s->tail->done++;
    moved = true;
}

bool ready(const Op &op) { return op.kind != WAIT || op.point->done >= op.version; }

// Tries the first op of a stream; true when anything came of it.
bool advance(EmuStream *s) {
    if (s->queue.empty() || !ready(s->queue.front())) return false;
    Op &op = s->queue.front();
    moved = false;
    if (op.kind == RECORD) {
        op.point->done = op.version;
        op.point->ms = now_ms();
    }
    if (op.kind == WORK) {
        if (!s->step) s->step = op.make();
        works = true;
        Progress p = s->step();
        works = false;
        if (p == BLOCKED) return moved;
    }
    finish(s);
    return true;
}

// Only what the first op of `s` needs: of the stream that it waits for, if it does
bool advance_needed(EmuStream *s, int depth) {
    if (s->queue.empty() || depth > 1000) return false;
    if (ready(s->queue.front())) return advance(s);
    EmuStream *by = s->queue.front().point->by;
    return by && by != s && advance_needed(by, depth + 1);
}

// In late order first what `wanted` needs; whatever else there is only when that is stuck.
bool advance_any(EmuStream *wanted) {
    size_t n = streams.size(), first = stream_order == STREAMS_RANDOM && n ? random_below((unsigned)n) : 0;
    if (wanted && stream_order == LATE && advance_needed(wanted, 0)) return true;
    for (size_t i = 0; i < n; i++)
        if (advance(streams[(first + i) % n])) return true;
    return false;
}

[[noreturn]] void stuck(double seconds) {
    std::string text;
    for (EmuStream *s : streams)
        if (!s->queue.empty())
            text += " a stream at " + s->queue.front().name + (s->queue.front().kind == WAIT ? " (an event that has not happened)," : ",");
    fail("nothing moved for %.0f s:%s (hint: blocks that wait for each other need a resident launch)", seconds, text.c_str());
}

template <class Done> void wait_until(Hold &hold, EmuStream *wanted, Done done) {
    const char *text = getenv("EMU_WAIT");
    double since = now_ms(), patience = text ? atof(text) : 60;
    memory_open();
    while (!done()) {
        if (advance_any(wanted)) {
            since = 0;
            continue;
        }
        if (since == 0) since = now_ms();
        if (now_ms() - since > patience * 1e3) stuck(patience);
        memory_shut();
        news.wait_for(hold, std::chrono::milliseconds(1));
        memory_open();
    }
    memory_shut();
    news.notify_all();
}

void wait_stream(Hold &hold, EmuStream *s) {
    uint64_t all = s->tail->recorded;
    counters.synchronisations++;
    wait_until(hold, s, [&] { return s->tail->done >= all; });
}

void queue_op(EmuStream *s, Op op) {
    s->queue.push_back(std::move(op));
    s->tail->recorded++;
    s->tail->by = s;
}

// The default stream and the blocking ones wait for each other.
cudaError_t push(EmuStream *s, Op op) {
    if (s->capture) {
        if (s->capture->invalid) return cudaErrorStreamCaptureInvalidated;
        s->capture->ops.push_back({s->lane, std::move(op)});
        return cudaSuccess;
    }
    if (s == null_stream)
        for (EmuStream *t : streams) {
            if (t == s || !t->blocking) continue;
            if (t->capture) {
                t->capture->invalid = true;
                return cudaErrorStreamCaptureImplicit;
            }
            if (t->tail->done < t->tail->recorded) queue_op(s, {WAIT, "the default stream's wait", nullptr, t->tail,
                                                                t->tail->recorded});
        }
    else if (s->blocking && null_stream && null_stream->tail->done < null_stream->tail->recorded)
        queue_op(s, {WAIT, "the wait for the default stream", nullptr, null_stream->tail, null_stream->tail->recorded});
    queue_op(s, std::move(op));
    if (stream_order == EARLY || (stream_order == STREAMS_RANDOM && random_below(4) == 0)) {
        memory_open();
        while (advance_any(nullptr) && (stream_order == EARLY || random_below(4))) {}
        memory_shut();
    }
    news.notify_all();
    return cudaSuccess;
}

// A call that CUDA forbids while this thread captures, or any thread does so in global mode
cudaError_t unsafe() {
    if (!own_captures && !global_captures) return cudaSuccess;
    for (EmuStream *s : streams)
        if (s->capture && (own_captures || s->capture->mode == cudaStreamCaptureModeGlobal)) s->capture->invalid = true;
    return cudaErrorStreamCaptureUnsupported;
}

} // namespace

// ---- for the other files of tests/emu --------------------------------------------------------------------------------
namespace emu {

void enqueue(const char *name, void *stream, std::function<Progress()> step) {
    Hold hold;
    // a copy of `step` per run: what it keeps of its progress starts afresh
    cudaError_t e = push(stream_of((cudaStream_t)stream), {WORK, name, [step] { return step; }, nullptr, 0});
    if (e != cudaSuccess) fail("%s: %s", name, cudaGetErrorString(e));
}

int enqueue_kernel(const char *name, const void *kernel, const Shape &shape, void *stream, Body body) {
    Hold hold;
    const Dim &g = shape.grid, &b = shape.block;
    size_t threads = (size_t)b.x * b.y * b.z;
    auto allowed = shared_allowed.find(kernel);
    if (!g.x || !g.y || !g.z || g.x > 0x7fffffff || g.y > 65535 || g.z > 65535 || !threads || threads > 1024 || b.z > 64)
        return report(cudaErrorInvalidConfiguration);
    if (shape.shared_bytes > (size_t)(allowed == shared_allowed.end() ? SHARED_DEFAULT : allowed->second)) return report(cudaErrorInvalidValue);
    counters.launches++;
    std::string text = name;
    return report(push(stream_of((cudaStream_t)stream), {WORK, text, [=] {
        Kernel *k = nullptr;
        return [=]() mutable {
            if (!k) k = kernel_start(text.c_str(), shape, body);
            Progress p = kernel_run(k, &moved);
            if (p == DONE) kernel_end(k);
            return p;
        };
    }, nullptr, 0}));
}

int device_wait() {
    Hold hold;
    if (cudaError_t e = unsafe()) return report(e);
    counters.synchronisations++;
    wait_until(hold, nullptr, [] { // other devices may be waiting for what this thread does next
        for (EmuStream *s : streams)
            if (!s->queue.empty() && (s->device == device_now || s == null_stream)) return false;
        return true;
    });
    return cudaSuccess;
}

} // namespace emu

EmuCounters emu_counters() {
    Hold hold;
    return counters;
}

extern "C" long emu_waits(void) { // times that the host has waited for the device, or asked it
    EmuCounters c = emu_counters();
    return c.device_to_host + c.synchronisations + c.queries;
}
extern "C" void lab_order(int run) { emu_order(run == 0 ? "forward" : run == 1 ? "reverse" : "random"); }
void emu_streams(const char *order) {
    static const char *names[] = {"late", "early", "random"};
    uint64_t seed;
    stream_order = (Stream_order)order_of(order, names, &seed);
}

static struct From_environment {
    From_environment() {
        if (const char *text = getenv("EMU_STREAMS")) emu_streams(text);
    }
} from_environment;

extern "C" {

// ---- device ----------------------------------------------------------------------------------------------------------
const char *cudaGetErrorString(cudaError_t e) {
    switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorPeerAccessUnsupported: return "peer access is not supported between these two devices";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit: return "operation would make the legacy stream depend on a capturing blocking stream";
    default: return "another error";
    }
}
const char *cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}

static int devices() {
    const char *text = getenv("EMU_DEVICES"); // -1: as without a driver
    return text ? atoi(text) : 1;
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = devices() < 0 ? 0 : lacks("driver") ? 11080 : CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *n) {
    *n = devices() > 0 ? devices() : 0;
    return report(devices() < 0 || lacks("driver") ? cudaErrorInsufficientDriver : devices() == 0 ? cudaErrorNoDevice : cudaSuccess);
}
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return report(cudaErrorInvalidDevice);
    return device_now = device, cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) { return *device = device_now, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    if (device < 0 || device >= devices()) return report(cudaErrorInvalidDevice);
    *p = cudaDeviceProp{};
    size_t available;
    strcpy(p->name, "emulated device");
    p->sharedMemPerBlockOptin = SHARED_LIMIT;
    p->major = 8, p->minor = 0, p->multiProcessorCount = 4, p->maxThreadsPerBlock = 1024, p->warpSize = 32,
        p->l2CacheSize = 1 << 22;
    p->uuid[0] = (char)device;
    return cudaMemGetInfo(&available, &p->totalGlobalMem);
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp p;
    cudaError_t e = cudaGetDeviceProperties(&p, device);
    if (e != cudaSuccess) return e;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    default: return report(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = device != peer && !lacks("peer"), cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
    return report(peer < 0 || peer >= devices() || peer == device_now ? cudaErrorInvalidDevice : cudaSuccess);
}
cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    snprintf(id, (size_t)length, "0000:%02x:00.0", device);
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
    cudaError_t e = (cudaError_t)device_wait();
    if (e == cudaSuccess) memory_check();
    return e;
}

cudaError_t cudaMalloc(void **p, size_t bytes) {
    Hold hold;
    if (cudaError_t e = unsafe()) return report(e);
    counters.allocations++;
    *p = bytes ? memory_take(bytes, device_now) : nullptr;
    return report(bytes && !*p ? cudaErrorMemoryAllocation : cudaSuccess);
}

// ---- copies ----------------------------------------------------------------------------------------------------------
static cudaError_t copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, EmuStream *s, bool wait) {
    Hold hold;
    if (!bytes) return cudaSuccess;
    Where w = where(to, bytes, "the target of a copy"), r = where(from, bytes, "the source of a copy");
    bool to_device = w == DEVICE, from_device = r == DEVICE;
    bool fits = kind == cudaMemcpyDefault || (to_device == (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) &&
                                              from_device == (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice));
    if (!fits) fail("a copy of kind %d from the %s to the %s", (int)kind, from_device ? "device" : "host",
                    to_device ? "device" : "host");
    if (wait)
        if (cudaError_t e = unsafe()) return report(e);
    ++(to_device ? from_device ? counters.device_to_device : counters.host_to_device : counters.device_to_host);
    std::shared_ptr<std::vector<char>> kept; // pageable memory is read before the call returns
    if (r == HOST && !s->capture) kept = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
    cudaError_t e = push(s, {WORK, "a copy", [=] {
        return [=] {
            memcpy(to, kept ? (const void *)kept->data() : from, bytes);
            return DONE;
        };
    }, nullptr, 0});
    if (e != cudaSuccess) return report(e);
    if (wait || (w == HOST && !s->capture)) wait_stream(hold, s); // a copy to pageable memory is complete when the call returns
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t s) {
    return copy(to, from, bytes, kind, stream_of(s), false);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return copy(to, from, bytes, kind, stream_of(nullptr), kind != cudaMemcpyDeviceToDevice);
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s) {
    Hold hold;
    if (!bytes) return cudaSuccess;
    if (where(p, bytes, "cudaMemset") == HOST) fail("cudaMemset of the host's memory");
    return report(push(stream_of(s), {WORK, "a memset", [=] {
        return [=] {
            memset(p, value, bytes);
            return DONE;
        };
    }, nullptr, 0}));
}
cudaError_t cudaMemset(void *p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, nullptr); }

// ---- streams and events ----------------------------------------------------------------------------------------------
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
    Hold hold;
    streams.push_back(*s = stream_new(flags != cudaStreamNonBlocking));
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithFlags(s, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int) { return cudaStreamCreateWithFlags(s, flags); }

// CUDA lets the work go on behind the destroyed stream; here it is done first.
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    Hold hold;
    if (!s) return report(cudaErrorInvalidResourceHandle);
    wait_until(hold, s, [&] { return s->queue.empty(); });
    for (size_t i = 0; i < streams.size(); i++)
        if (streams[i] == s) streams.erase(streams.begin() + (long)i);
    s->tail->by = nullptr;
    delete s;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t given) {
    Hold hold;
    EmuStream *s = stream_of(given);
    if (cudaError_t e = unsafe()) return report(e);
    if (s->capture) {
        s->capture->invalid = true;
        return report(cudaErrorStreamCaptureUnsupported);
    }
    wait_stream(hold, s);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t given) {
    Hold hold;
    EmuStream *s = stream_of(given);
    if (cudaError_t e = unsafe()) return report(e);
    counters.queries++;
    bool done = s->queue.empty();
    memory_open();
    advance_needed(s, 0); // who asks again and again does wait
    memory_shut();
    return done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *arg) {
    Hold hold;
    return report(push(stream_of(s), {WORK, "a host function", [=] {
        return [=] {
            f(arg);
            return DONE;
        };
    }, nullptr, 0}));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return *e = new EmuEvent{std::make_shared<Point>(),
    flags}, cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return delete e, cudaSuccess; }

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t given) {
    Hold hold;
    EmuStream *s = stream_of(given);
    Point &p = *e->point;
    p.recorded++;
    p.by = s;
    p.captured = s->capture;
    return report(push(s, {RECORD, "an event", nullptr, e->point, p.recorded}));
}

// External, in a capture: a node of the graph, which records the event each time that it runs.
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t given, unsigned flags) {
    EmuStream *s = stream_of(given);
    if (flags != cudaEventRecordExternal || !s->capture) return cudaEventRecord(e, given);
    Hold hold;
    PointPtr p = e->point;
    return report(push(s, {WORK, "an event", [p] {
        return [p] {
            p->done = ++p->recorded;
            p->ms = now_ms();
            return DONE;
        };
    }, nullptr, 0}));
}

// Where the event belongs to a capture, the stream joins it.
cudaError_t cudaStreamWaitEvent(cudaStream_t given, cudaEvent_t e, unsigned) {
    Hold hold;
    EmuStream *s = stream_of(given);
    Point &p = *e->point;
    if (s->capture && p.captured != s->capture) {
        s->capture->invalid = true;
        return report(cudaErrorStreamCaptureIsolation);
    }
    if (p.captured && !s->capture) {
        EmuGraph *g = p.by && p.by->capture == p.captured ? p.captured : nullptr;
        if (!g) return report(cudaErrorStreamCaptureIsolation); // of a capture that has ended
        s->capture = g;
        s->lane = g->lanes++;
        g->members.push_back(s);
    }
    if (!p.recorded) return cudaSuccess;
    return report(push(s, {WAIT, "a wait for an event", nullptr, e->point, p.recorded}));
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    Hold hold;
    if (cudaError_t bad = unsafe()) return report(bad);
    if (e->point->captured) return report(cudaErrorStreamCaptureUnsupported);
    uint64_t version = e->point->recorded;
    counters.synchronisations++;
    wait_until(hold, e->point->by, [&] { return e->point->done >= version; });
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
    Hold hold;
    if (cudaError_t bad = unsafe()) return report(bad);
    counters.queries++;
    return e->point->done >= e->point->recorded ? cudaSuccess : report(cudaErrorNotReady);
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    Hold hold;
    for (cudaEvent_t e : {from, to}) {
        if (e->flags & cudaEventDisableTiming || !e->point->recorded) return report(cudaErrorInvalidResourceHandle);
        if (e->point->done < e->point->recorded) return report(cudaErrorNotReady);
    }
    *ms = (float)(to->point->ms - from->point->ms);
    return cudaSuccess;
}

// ---- graphs ----------------------------------------------------------------------------------------------------------
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
    Hold hold;
    if (!s || s->capture) return report(cudaErrorStreamCaptureUnsupported);
    s->capture = new EmuGraph;
    s->capture->mode = mode;
    s->capture->members.push_back(s);
    s->lane = 0;
    global_captures += mode == cudaStreamCaptureModeGlobal;
    own_captures += mode != cudaStreamCaptureModeRelaxed;
    return cudaSuccess;
}

// Each further lane must end in an event that another lane waits for.
static bool joined(const EmuGraph *g) {
    for (int lane = 1; lane < g->lanes; lane++) {
        const Op *last = nullptr;
        bool awaited = false;
        for (const Lane_op &o : g->ops)
            if (o.lane == lane) last = &o.op;
        for (const Lane_op &o : g->ops)
            awaited |= last && last->kind == RECORD && o.lane != lane && o.op.kind == WAIT && o.op.point == last->point && o.op.version == last->version;
        if (!awaited) return false;
    }
    return true;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out) {
    Hold hold;
    EmuGraph *g = s->capture;
    *out = nullptr;
    if (!g || s->lane != 0) return report(cudaErrorInvalidValue);
    for (EmuStream *member : g->members) member->capture = nullptr;
    g->members.clear();
    global_captures -= g->mode == cudaStreamCaptureModeGlobal;
    own_captures -= g->mode != cudaStreamCaptureModeRelaxed;
    cudaError_t e = g->invalid ? cudaErrorStreamCaptureInvalidated : joined(g) ? cudaSuccess : cudaErrorStreamCaptureUnjoined;
    if (e == cudaSuccess) *out = g;
    return report(e); // a graph that failed stays: events may still point to it
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *status) {
    Hold hold;
    *status = !s || !s->capture ? cudaStreamCaptureStatusNone : s->capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long) {
    *x = new EmuGraphExec{g->ops, g->lanes};
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x) { return cudaDeviceSynchronize(), delete x, cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }

// One run of a graph: lanes with queues of their own, and events of their own
static Step graph_run(const EmuGraphExec *x) {
    std::map<std::pair<Point *, uint64_t>, PointPtr> points;
    auto lanes = std::make_shared<std::vector<EmuStream>>();
    for (int i = 0; i < x->lanes; i++) lanes->push_back({false, 0, {}, nullptr, std::make_shared<Point>()});
    for (const Lane_op &o : x->ops) {
        Op op = o.op;
        if (op.point) {
            PointPtr &own = points[{op.point.get(), op.version}];
            if (!own) own = std::make_shared<Point>();
            op.point = own;
            op.version = 1;
        }
        (*lanes)[(size_t)o.lane].queue.push_back(std::move(op));
    }
    return [lanes] {
        size_t n = lanes->size(), first = stream_order == STREAMS_RANDOM ? random_below((unsigned)n) : 0, left = 0;
        bool any = false;
        for (size_t i = 0; i < n && !any; i++) { // late: the lane that began the capture last
            size_t at = stream_order == LATE ? n - 1 - i : (first + i) % n;
            any = advance(&(*lanes)[at]);
        }
        for (EmuStream &lane : *lanes) left += lane.queue.size();
        moved = any;
        return left ? BLOCKED : DONE;
    };
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s) {
    Hold hold;
    counters.graph_launches++;
    return report(push(stream_of(s), {WORK, "a graph", [x] { return graph_run(x); }, nullptr, 0}));
}
}

cudaError_t emu_func_get_attributes(cudaFuncAttributes *a) {
    *a = {1024, 32};
    return report(lacks("image") ? cudaErrorNoKernelImageForDevice : cudaSuccess);
}

cudaError_t emu_func_set_attribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    Hold hold;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || value > SHARED_LIMIT) return report(cudaErrorInvalidValue);
    shared_allowed[kernel] = value;
    return cudaSuccess;
}
