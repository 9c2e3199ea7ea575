// Device memory: one arena, in which every allocation ends at a page that cannot be touched and starts as NaN (-1 as an integer).
// An address is never given out twice. What lies between an allocation and its pages is filled and looked at again.
#include "cuda_runtime.h"
#include <fcntl.h>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)0)
#endif

namespace emu {

static const size_t ARENA = (size_t)1 << 38, PAGE = 4096, ALIGN = 256;
enum { ZONE_BYTE = 0xA5 };

struct Allocation {
    char *base;         // whole pages
    size_t room, bytes; // of the pages; asked for
    int device;
    bool foreign;       // another process's
};

static std::mutex lock;
static char *arena;
static int arena_file = -1;
static size_t used;
static std::map<uintptr_t, Allocation> allocations, host_blocks; // by the address given out
static bool strict, open_now;
static size_t held[64]; // bytes by device

static size_t env_size(const char *name, size_t missing) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 10) : missing;
}

static void arena_start() {
    strict |= env_size("EMU_STRICT", 0) != 0;
    arena_file = memfd_create("emu", MFD_CLOEXEC); // a file, so that another process can map it (cudaIpc)
    if (arena_file < 0 || ftruncate(arena_file, (off_t)ARENA)) fail("no file for the device memory");
    void *p = mmap(nullptr, ARENA, PROT_NONE, MAP_SHARED | MAP_NORESERVE, arena_file, 0);
    if (p == MAP_FAILED) fail("no address space for the device memory");
    arena = (char *)p;
}

static void protect(const Allocation &a, bool accessible) {
    if (mprotect(a.base, a.room, accessible ? PROT_READ | PROT_WRITE : PROT_NONE)) fail("cannot protect device memory");
}

void memory_open() {
    std::lock_guard<std::mutex> hold(lock);
    if (strict && !open_now)
        for (auto &a : allocations) protect(a.second, true);
    open_now = true;
}

void memory_shut() {
    std::lock_guard<std::mutex> hold(lock);
    if (strict && open_now)
        for (auto &a : allocations) protect(a.second, false);
    open_now = false;
}

void *memory_take(size_t bytes, int device) {
    std::lock_guard<std::mutex> hold(lock);
    if (!arena) arena_start();
    size_t size = (bytes + ALIGN - 1) / ALIGN * ALIGN, room = (size + PAGE - 1) / PAGE * PAGE;
    if (held[device] + bytes > env_size("EMU_MEMORY", (size_t)8 << 30) || used + room + PAGE > ARENA) return nullptr;
    Allocation a = {arena + used, room, bytes, device, false};
    used += room + PAGE;
    held[device] += bytes;
    protect(a, true);
    char *p = a.base + room - size;
    memset(a.base, ZONE_BYTE, room);
    memset(p, 0xff, bytes);
    ASAN_POISON_MEMORY_REGION(a.base, room + PAGE);
    ASAN_UNPOISON_MEMORY_REGION(p, bytes);
    allocations[(uintptr_t)p] = a;
    if (strict && !open_now) protect(a, false);
    return p;
}

static void zones_check(char *p, const Allocation &a) {
#ifdef __SANITIZE_ADDRESS__
    (void)p, (void)a; // the sanitizer has seen it already
#else
    if (a.foreign) return;
    if (strict && !open_now) protect(a, true);
    char *end = p + a.bytes;
    for (char *z = a.base; z < a.base + a.room; z = z == p ? end : z + 1) {
        if (z == a.base && z < p && !memcmp(z, z + 1, (size_t)(p - z) - 1)) z = p - 1; // all alike: one look at the last is enough
        if (z != p && (unsigned char)*z != ZONE_BYTE) fail("byte %ld of a device allocation of %zu bytes was written", (long)(z - p), a.bytes);
    }
    if (strict && !open_now) protect(a, false);
#endif
}

void memory_check() {
    std::lock_guard<std::mutex> hold(lock);
    for (auto &a : allocations) zones_check((char *)a.first, a.second);
}

static bool memory_give(void *p) {
    std::lock_guard<std::mutex> hold(lock);
    auto at = allocations.find((uintptr_t)p);
    if (at == allocations.end() || at->second.foreign) return false;
    Allocation &a = at->second;
    zones_check((char *)p, a);
    held[a.device] -= a.bytes;
    if (mprotect(a.base, a.room, PROT_NONE)) fail("cannot protect freed device memory");
    fallocate(arena_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, a.base - arena, (off_t)a.room);
    allocations.erase(at);
    return true;
}

// The block that holds p, or that p is the end of
static const Allocation *find(const std::map<uintptr_t, Allocation> &in, const void *p, uintptr_t *start) {
    auto at = in.upper_bound((uintptr_t)p);
    if (at == in.begin()) return nullptr;
    --at;
    *start = at->first;
    return (uintptr_t)p <= at->first + at->second.bytes ? &at->second : nullptr;
}

Where where(const void *p, size_t bytes, const char *what) {
    std::lock_guard<std::mutex> hold(lock);
    uintptr_t start;
    for (int pinned = 0; pinned < 2; pinned++) {
        const Allocation *a = find(pinned ? host_blocks : allocations, p, &start);
        if (!a) continue;
        if ((uintptr_t)p + bytes > start + a->bytes)
            fail("%s: %zu bytes at byte %zu of a block of %zu bytes", what, bytes, (size_t)((uintptr_t)p - start), a->bytes);
        return pinned ? PINNED : DEVICE;
    }
    if (arena && (char *)p >= arena && (char *)p < arena + ARENA) fail("%s: %p lies in no device allocation (freed?)", what, p);
    return HOST;
}

void check_argument(const char *kernel, int number, const void *p) {
    if (!p) return;
    char what[256];
    snprintf(what, sizeof what, "kernel %s, argument %d", kernel, number);
    if (where(p, 0, what) == HOST) fail("%s: %p is a pointer to the host's memory", what, p);
}

// ---- between processes -----------------------------------------------------------------------------------------------
struct Ipc {
    pid_t pid;
    int file;
    size_t offset, bytes;
};
static_assert(sizeof(Ipc) <= sizeof(cudaIpcMemHandle_t), "a handle holds it");

} // namespace emu

using namespace emu;

void emu_strict(bool on) {
    memory_open();
    {
        std::lock_guard<std::mutex> hold(lock);
        strict = on;
    }
    memory_shut();
}

extern "C" {

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) {
    std::lock_guard<std::mutex> hold(lock);
    auto at = allocations.find((uintptr_t)p);
    if (at == allocations.end()) return cudaErrorInvalidValue;
    Ipc ipc = {getpid(), arena_file, (size_t)((char *)p - arena), at->second.bytes};
    memset(h, 0, sizeof *h);
    memcpy(h, &ipc, sizeof ipc);
    return cudaSuccess;
}

// As CUDA does, refuses a handle of the own process.
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned flags) {
    std::lock_guard<std::mutex> hold(lock);
    Ipc ipc;
    char path[64];
    memcpy(&ipc, &h, sizeof ipc);
    if (lacks("peer")) return cudaErrorPeerAccessUnsupported;
    if (flags != cudaIpcMemLazyEnablePeerAccess || ipc.pid == getpid()) return cudaErrorInvalidValue;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)ipc.pid, ipc.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    size_t first = ipc.offset / PAGE * PAGE, room = (ipc.offset + ipc.bytes - first + PAGE - 1) / PAGE * PAGE;
    void *base = file < 0 ? MAP_FAILED : mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)first);
    if (file >= 0) close(file);
    if (base == MAP_FAILED) return cudaErrorInvalidValue;
    *p = (char *)base + (ipc.offset - first);
    allocations[(uintptr_t)*p] = {(char *)base, room, ipc.bytes, 0, true};
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *p) {
    std::lock_guard<std::mutex> hold(lock);
    auto at = allocations.find((uintptr_t)p);
    if (at == allocations.end() || !at->second.foreign) return cudaErrorInvalidValue;
    munmap(at->second.base, at->second.room);
    allocations.erase(at);
    return cudaSuccess;
}

// ---- calls -----------------------------------------------------------------------------------------------------------
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    int device;
    cudaGetDevice(&device);
    std::lock_guard<std::mutex> hold(lock);
    *total = env_size("EMU_MEMORY", (size_t)8 << 30);
    *available = *total - held[device];
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) {
    if (posix_memalign(p, PAGE, bytes ? bytes : 1)) return cudaErrorMemoryAllocation;
    memset(*p, 0xff, bytes);
    std::lock_guard<std::mutex> hold(lock);
    host_blocks[(uintptr_t)*p] = {(char *)*p, bytes, bytes, 0, false};
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **p, size_t bytes) { return cudaHostAlloc(p, bytes, cudaHostAllocDefault); }

cudaError_t cudaFreeHost(void *p) {
    if (!p) return cudaSuccess;
    device_wait();
    std::lock_guard<std::mutex> hold(lock);
    if (!host_blocks.erase((uintptr_t)p)) return cudaErrorInvalidValue;
    free(p);
    return cudaSuccess;
}

cudaError_t cudaFree(void *p) {
    if (!p) return cudaSuccess;
    cudaError_t e = (cudaError_t)device_wait();
    if (e != cudaSuccess) return e;
    return memory_give(p) ? cudaSuccess : cudaErrorInvalidValue;
}
}
