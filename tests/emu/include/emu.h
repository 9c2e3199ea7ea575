// CUDA on the CPU, for tests. What the stand-ins for CUDA's headers and the files of tests/emu share, and what a test may ask for.
//
// Each thread of a block is a fiber; the fibers of a process run one at a time, on whatever thread of the host waits for the
// device. Work is queued by stream and runs when the host waits for it, in an order as unhelpful as streams and events allow.
// The environment chooses orders; a run repeats exactly under the same choice:
//   EMU_ORDER    forward (default), reverse, random[:seed]    threads of a block, blocks of a grid, when cp.async lands
//   EMU_STREAMS  late (default: only what the host waits for), early (all that may run, at once), random[:seed]
//   EMU_DEVICES  how many devices there are (1)         EMU_MEMORY  bytes of each (8 GiB)
//   EMU_LACKS    of this, what it names does not work: driver, image, peer, nccl,
//                version (of NCCL: an older one), windows, puts, arrivals (of puts); a comma between
//   EMU_STRICT   1: the host cannot touch device memory EMU_WAIT    seconds without progress that are a deadlock (60)
// A fault (divergent barrier, deadlock, overrun, wrong pointer) prints what was found and aborts.
#ifndef EMU_H
#define EMU_H
#include <cstddef>
#include <cstdint>
#include <functional>
#include <tuple>
#include <type_traits>

// What the process has asked of the device so far. In a step that never waits, device_to_host, synchronisations and queries
// stand still.
struct EmuCounters {
    long launches, graph_launches, allocations;
    long host_to_device, device_to_host, device_to_device; // copies
    long synchronisations; // by a call for it, or by a copy that needs it
    long queries;
};
EmuCounters emu_counters();
void emu_order(const char *order);   // as EMU_ORDER, from here on
void emu_streams(const char *order); // as EMU_STREAMS
void emu_strict(bool on);            // as EMU_STRICT

namespace emu {

bool lacks(const char *what); // EMU_LACKS
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

// ---- one thread of a block (block.cc) --------------------------------------------------------------------------------
struct Dim {
    unsigned x, y, z;
};
struct Lane;
struct Lane_view { // what the kernel's source sees of the thread and block that run now
    Dim thread, block, block_dim, grid_dim;
};
extern Lane_view now;

enum { WARP = 32 };
void block_barrier(const char *file, int line, int predicate, int *count); // count: of the threads whose predicate holds
// The lanes of `mask` that have not left the kernel meet; the last to come calls apply(args, present) for all of them.
typedef void (*Apply)(void *args[WARP], unsigned present);
void warp_meet(unsigned mask, const char *what, Apply apply, void *arg);
unsigned warp_present();  // lanes that have not left
unsigned lane_number();
void yield();             // lets others go first: in every round of a loop that waits
long long clock();
void *shared_find(const void *key, size_t bytes);
void *shared_dynamic_start();
template <class T> T *shared_static(const void *key) { return (T *)shared_find(key, sizeof(T)); }
template <class T> T *shared_dynamic() { return (T *)shared_dynamic_start(); }
void async_copy(void *to, const void *from, int bytes); // 16 bytes to shared memory, the last 16 - bytes of them 0
void async_commit();
void async_wait(int pending);

// ---- launches (stream.cc) --------------------------------------------------------------------------------------------
struct Shape {
    Dim grid, block;
    size_t shared_bytes;
    bool resident; // all blocks at once: they may wait for each other
};
typedef std::function<void()> Body;
int enqueue_kernel(const char *name, const void *kernel, const Shape &shape, void *stream, Body body); // a cudaError_t
void check_argument(const char *kernel, int number, const void *pointer); // that a kernel may use it
template <class T> void check_argument(const char *kernel, int number, const T &value) {
    if constexpr (std::is_pointer_v<T>) check_argument(kernel, number, (const void *)value);
}

template <class... P> struct Launcher {
    const char *name;
    void (*kernel)(P...);
    Shape shape;
    void *stream;
    int operator()(P... args) const {
        int number = 0;
        (check_argument(name, ++number, args), ...);
        (void)number;
        auto k = kernel;
        std::tuple<std::remove_cv_t<P>...> held(args...);
        return enqueue_kernel(name, (const void *)k, shape, stream, [k, held] { std::apply(k, held); });
    }
};

// ---- between the files of tests/emu ----------------------------------------------------------------------------------
enum Progress { DONE, BLOCKED }; // BLOCKED: call again when others have had their turn
class Kernel;                    // a grid that runs
Kernel *kernel_start(const char *name, const Shape &shape, Body body);
Progress kernel_run(Kernel *k, bool *moved); // moved: some thread did more than wait
void kernel_end(Kernel *k);
enum Order { FORWARD, REVERSE, RANDOM };
Order order_of(const char *text, const char *names[3], uint64_t *seed);
unsigned random_below(unsigned n); // in random order: the next choice

// A piece of device work that is no kernel (cuBLAS, NCCL): `step` is called when its turn comes, until it says DONE.
void enqueue(const char *name, void *stream, std::function<Progress()> step);
int device_wait(); // until all streams are empty; a cudaError_t
// Memory (memory.cc)
enum Where { HOST, PINNED, DEVICE };
Where where(const void *p, size_t bytes, const char *what); // aborts where a piece lies across an allocation's end
void memory_open();  // strict mode: while the device works
void memory_shut();
void memory_check(); // the zones around allocations
void *memory_take(size_t bytes, int device);
} // namespace emu
#endif
