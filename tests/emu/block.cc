// Blocks of fibers: see emu.h.
//
// A lane that never waits runs on the stack of the lane before it: no switch. One that waits keeps its stack, and the next
// goes on, or starts on another stack. Which lane goes next is a look at two bit masks: warps with a ready lane, lanes ready.
#include "emu.h"
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <vector>

namespace emu {

Lane_view now;

[[noreturn]] void fail(const char *format, ...) {
    char text[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fflush(stdout);
    fprintf(stderr, "emu: %s\n", text);
    abort();
}

bool lacks(const char *what) {
    const char *list = getenv("EMU_LACKS"), *at = list ? strstr(list, what) : nullptr;
    return at && (at == list || at[-1] == ',') && strchr(",", at[strlen(what)]);
}

// ---- orders ----------------------------------------------------------------------------------------------------------
static Order thread_order;
static uint64_t random_state;

Order order_of(const char *text, const char *names[3], uint64_t *seed) {
    const char *colon = strchr(text, ':');
    size_t n = colon ? (size_t)(colon - text) : strlen(text);
    for (int i = 0; i < 3; i++)
        if (n == strlen(names[i]) && !strncmp(text, names[i], n)) {
            *seed = colon ? strtoull(colon + 1, nullptr, 10) : 1;
            return (Order)i;
        }
    fail("order \"%s\": expected %s, %s or %s[:seed]", text, names[0], names[1], names[2]);
}

// splitmix64 (Steele, Lea, Flood 2014)
unsigned random_below(unsigned n) {
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (unsigned)(((z ^ z >> 31) >> 32) * n >> 32);
}

} // namespace emu

void emu_order(const char *order) {
    static const char *names[] = {"forward", "reverse", "random"};
    emu::thread_order = emu::order_of(order, names, &emu::random_state);
}

namespace emu {

static struct From_environment {
    From_environment() {
        if (const char *text = getenv("EMU_ORDER")) emu_order(text);
    }
} from_environment;

// ---- fibers ----------------------------------------------------------------------------------------------------------
enum { STACK = 128 << 10, STAGGER = 37 * 64, CANARY = 0x5afe5afe };

struct Fiber {
    void *sp;    // where it was left
    char *stack; // lowest address
};

#ifdef __x86_64__
extern "C" void emu_switch(void **save, void *load);
asm(".text\n.globl emu_switch\n.hidden emu_switch\n.type emu_switch,@function\nemu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n.size emu_switch,.-emu_switch\n");
static void *stack_start(char *top, void (*entry)()) {
    void **sp = (void **)((uintptr_t)top & ~(uintptr_t)15);
    *--sp = nullptr;         // the entry's return address: it never returns
    *--sp = (void *)entry;   // now 8 past a multiple of 16 when entered, as after a call
    sp -= 6;
    memset(sp, 0, 6 * sizeof *sp);
    return sp;
}
#else
#include <ucontext.h>
static void emu_switch(void **save, void *load) {
    ucontext_t here;
    *save = &here;
    swapcontext(&here, (ucontext_t *)load);
}
static void *stack_start(char *top, void (*entry)()) {
    ucontext_t *c = (ucontext_t *)(((uintptr_t)top - sizeof(ucontext_t)) & ~(uintptr_t)63);
    getcontext(c);
    c->uc_stack.ss_sp = (char *)c - (STACK - 2 * STAGGER);
    c->uc_stack.ss_size = STACK - 2 * STAGGER - 64;
    c->uc_link = nullptr;
    makecontext(c, entry, 0);
    return c;
}
#endif

static void fiber_main();
static std::vector<Fiber *> idle; // left in fiber_main, ready for another lane
static void *host_sp;             // of the thread that runs the device

static Fiber *fiber_take() {
    static unsigned made;
    if (!idle.empty()) {
        Fiber *f = idle.back();
        idle.pop_back();
        return f;
    }
    Fiber *f = new Fiber;
    f->stack = (char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (f->stack == MAP_FAILED) fail("no memory for stack %u", made);
    *(unsigned *)f->stack = CANARY;
    // stacks that all began at the same place of a page would share a few cache sets
    f->sp = stack_start(f->stack + STACK - made++ % 56 * STAGGER % 4096 / 64 * 64, fiber_main);
    return f;
}

// ---- lanes, warps, blocks --------------------------------------------------------------------------------------------
struct Async {
    void *to;
    const void *from;
    int bytes;
};

struct Lane {
    Fiber *fiber; // null: not started
    Dim thread;
    unsigned mask;       // waits for these lanes of its warp, in:
    Apply apply;
    void *arg;
    const char *what;
    std::vector<Async> copies;     // on their way, oldest first
    std::vector<size_t> committed; // copies.size() at each commit not yet waited for
};

struct Warp {
    unsigned ready, live, meeting, at_barrier, yielding; // lanes
};

struct Variable { // of shared memory
    const void *key;
    size_t bytes;
    char *at;
    unsigned block; // its last use, by the block's serial number
};

enum { SHARED_STATIC = 48 << 10, SHARED_ALL = 163 << 10, ZONE = 64, ZONE_BYTE = 0xA5 };

struct Block {
    Kernel *kernel;
    Dim index;
    unsigned n, n_warps, live, waiting, serial;
    unsigned warps_ready;
    Lane *lanes;
    Warp warps[WARP];
    const char *file; // of the barrier that its threads wait at
    int line;
    int predicates, last_predicates;
    char *dynamic;
    std::vector<Variable> variables;
};

class Kernel {
  public:
    std::string name;
    Shape shape;
    Body body;
    std::vector<Block *> resident;
    size_t next, blocks;     // blocks started; in all
    size_t multiplier, shift; // random order of blocks
    unsigned serial;
};

static Block *block_now;
static Lane *lane_now;

static Warp &warp_of(Lane *l) { return block_now->warps[(l - block_now->lanes) / WARP]; }
static unsigned bit_of(Lane *l) { return 1u << (l - block_now->lanes) % WARP; }

static void ready(Warp &w, unsigned lanes) {
    w.ready |= lanes;
    if (w.ready) block_now->warps_ready |= 1u << (&w - block_now->warps);
}

static unsigned pick_bit(unsigned bits) {
    if (thread_order == FORWARD) return (unsigned)__builtin_ctz(bits);
    if (thread_order == REVERSE) return 31 - (unsigned)__builtin_clz(bits);
    for (unsigned skip = random_below((unsigned)__builtin_popcount(bits)); skip; skip--) bits &= bits - 1;
    return (unsigned)__builtin_ctz(bits);
}

// The lane that goes next, no longer counted as ready; null: all that are left wait
static Lane *pick() {
    if (!block_now->warps_ready) return nullptr;
    unsigned w = pick_bit(block_now->warps_ready), l = pick_bit(block_now->warps[w].ready);
    block_now->warps[w].ready &= ~(1u << l);
    if (!block_now->warps[w].ready) block_now->warps_ready &= ~(1u << w);
    return &block_now->lanes[w * WARP + l];
}

static void enter(Lane *l) {
    lane_now = l;
    now.thread = l->thread;
}

// Leaves the lane that runs now; it has been noted where it will be found.
static void leave() {
    Lane *from = lane_now, *to = pick();
    if (to == from) return;
    if (!to) {
        emu_switch(&from->fiber->sp, host_sp);
        return;
    }
    if (!to->fiber) to->fiber = fiber_take();
    enter(to);
    emu_switch(&from->fiber->sp, to->fiber->sp);
}

static void barrier_open() {
    Block *b = block_now;
    for (unsigned w = 0; w < b->n_warps; w++) {
        unsigned lanes = b->warps[w].at_barrier;
        b->warps[w].at_barrier = 0;
        ready(b->warps[w], lanes);
    }
    b->waiting = 0;
    b->last_predicates = b->predicates;
    b->predicates = 0;
}

static void meet_if_complete(Warp &w, Lane *one);

static void lane_left() {
    Lane *l = lane_now;
    Warp &w = warp_of(l);
    l->copies.clear();
    l->committed.clear();
    l->fiber = nullptr;
    w.live &= ~bit_of(l);
    block_now->live--;
    if (block_now->live && block_now->waiting == block_now->live) barrier_open();
    for (unsigned lanes = w.meeting; lanes; lanes &= lanes - 1) {
        unsigned i = (unsigned)__builtin_ctz(lanes);
        Lane *other = &block_now->lanes[(&w - block_now->warps) * WARP + i];
        if (w.meeting >> i & 1 && other->mask & bit_of(l)) meet_if_complete(w, other);
    }
}

static void fiber_main() {
    for (;;) {
        Fiber *f = lane_now->fiber;
        block_now->kernel->body();
        if (*(unsigned *)f->stack != CANARY) fail("kernel %s: a thread used more than %d bytes of stack", block_now->kernel->name.c_str(), STACK);
        lane_left();
        Lane *to = pick();
        if (to && !to->fiber) {
            to->fiber = f;
            enter(to);
            continue;
        }
        idle.push_back(f);
        if (to) enter(to);
        emu_switch(&f->sp, to ? to->fiber->sp : host_sp);
    }
}

// ---- what a block's threads wait for ---------------------------------------------------------------------------------
static std::string describe(const Block *b) {
    char text[256];
    std::string all;
    const Kernel *k = b->kernel;
    snprintf(text, sizeof text, "kernel %s, block (%u,%u,%u):", k->name.c_str(), b->index.x, b->index.y, b->index.z);
    all = text;
    if (b->waiting) {
        snprintf(text, sizeof text, " %u of %u threads wait at the barrier %s:%d;", b->waiting, b->live, b->file, b->line);
        all += text;
    }
    for (unsigned w = 0; w < b->n_warps; w++)
        for (unsigned i = 0; i < WARP; i++)
            if (b->warps[w].meeting >> i & 1) {
                const Lane &l = b->lanes[w * WARP + i];
                snprintf(text, sizeof text, " warp %u lane %u waits in %s, mask %08x;", w, i, l.what, l.mask);
                if (all.size() < 1500) all += text;
            }
    return all;
}

void block_barrier(const char *file, int line, int predicate, int *count) {
    Block *b = block_now;
    Lane *l = lane_now;
    if (b->waiting && (b->line != line || (b->file != file && strcmp(b->file, file))))
        fail("%s and thread (%u,%u,%u) comes to another, %s:%d: a divergent barrier", describe(b).c_str(), l->thread.x, l->thread.y,
             l->thread.z, file, line);
    b->file = file, b->line = line;
    b->predicates += predicate != 0;
    b->waiting++;
    warp_of(l).at_barrier |= bit_of(l);
    if (b->waiting == b->live) barrier_open();
    leave();
    if (count) *count = b->last_predicates;
}

static void meet_if_complete(Warp &w, Lane *one) {
    unsigned present = one->mask & w.live;
    if ((w.meeting & present) != present) return;
    Lane *first = &block_now->lanes[(&w - block_now->warps) * WARP];
    void *args[WARP] = {};
    for (unsigned i = 0; i < WARP; i++) {
        if (!(present >> i & 1)) continue;
        if (first[i].mask != one->mask) return; // it may come after what it waits for now
        if (first[i].apply != one->apply)
            fail("%s lanes %u and %u of a warp meet in different functions", describe(block_now).c_str(), i, (unsigned)(one - first));
        args[i] = first[i].arg;
    }
    one->apply(args, present);
    w.meeting &= ~present;
    ready(w, present);
}

void warp_meet(unsigned mask, const char *what, Apply apply, void *arg) {
    Lane *l = lane_now;
    Warp &w = warp_of(l);
    if (!(mask & bit_of(l)))
        fail("kernel %s: thread (%u,%u,%u) calls %s with a mask %08x that leaves itself out", block_now->kernel->name.c_str(),
             l->thread.x, l->thread.y, l->thread.z, what, mask);
    l->mask = mask, l->what = what, l->apply = apply, l->arg = arg;
    w.meeting |= bit_of(l);
    meet_if_complete(w, l);
    leave();
}

unsigned warp_present() { return warp_of(lane_now).live; }
unsigned lane_number() { return (unsigned)(lane_now - block_now->lanes) % WARP; }

void yield() {
    warp_of(lane_now).yielding |= bit_of(lane_now);
    leave();
}

long long clock() {
    static long long ticks;
    return ticks += 100;
}

// ---- shared memory ---------------------------------------------------------------------------------------------------
static char *zone_make(size_t bytes) {
    void *p;
#ifdef __SANITIZE_ADDRESS__
    size_t room = bytes; // the sanitizer's own zones
#else
    size_t room = bytes + ZONE;
#endif
    if (posix_memalign(&p, 1024, room ? room : 1)) fail("no memory for %zu bytes of shared memory", bytes);
    memset(p, ZONE_BYTE, room);
    return (char *)p;
}

static void zone_check(const Kernel *k, const char *at, size_t bytes) {
#ifndef __SANITIZE_ADDRESS__
    for (size_t i = bytes; i < bytes + ZONE; i++)
        if ((unsigned char)at[i] != ZONE_BYTE)
            fail("kernel %s wrote byte %zu of a shared variable of %zu bytes", k->name.c_str(), i, bytes);
#else
    (void)k, (void)at, (void)bytes;
#endif
}

void *shared_find(const void *key, size_t bytes) {
    Block *b = block_now;
    size_t all = b->kernel->shape.shared_bytes, fixed = 0;
    for (Variable &v : b->variables) {
        if (v.key != key) {
            fixed += v.bytes;
            continue;
        }
        if (v.block != b->serial) memset(v.at, 0xff, bytes), v.block = b->serial; // NaN, or -1
        return v.at;
    }
    if ((fixed += bytes) > SHARED_STATIC || fixed + all > SHARED_ALL)
        fail("kernel %s: %zu bytes of shared memory and %zu of the launch: a block has %d, and %d in all", b->kernel->name.c_str(), fixed,
             all, SHARED_STATIC, SHARED_ALL);
    b->variables.push_back({key, bytes, zone_make(bytes), b->serial});
    memset(b->variables.back().at, 0xff, bytes);
    return b->variables.back().at;
}

void *shared_dynamic_start() { return block_now->dynamic; }

// ---- copies to shared memory that land later -------------------------------------------------------------------------
// In forward order they land at once, which shows a buffer that another thread still reads; in reverse order when waited for,
// which shows a wait that is missing.
static void land(const Async &a) {
    char data[16] = {};
    memcpy(data, a.from, (size_t)a.bytes);
    memcpy(a.to, data, sizeof data);
}

void async_copy(void *to, const void *from, int bytes) {
    if (((uintptr_t)to | (uintptr_t)from) & 15) fail("kernel %s: cp.async of 16 bytes from %p to %p: not aligned", block_now->kernel->name.c_str(), from, to);
    if (bytes < 0 || bytes > 16) fail("kernel %s: cp.async reads %d of 16 bytes", block_now->kernel->name.c_str(), bytes);
    if (thread_order == FORWARD || (thread_order == RANDOM && random_below(2))) land({to, from, bytes});
    else lane_now->copies.push_back({to, from, bytes});
}

void async_commit() { lane_now->committed.push_back(lane_now->copies.size()); }

void async_wait(int pending) {
    Lane *l = lane_now;
    if (l->committed.size() <= (size_t)pending) return;
    size_t groups = l->committed.size() - (size_t)pending, n = l->committed[groups - 1];
    for (size_t i = 0; i < n; i++) land(l->copies[i]);
    l->copies.erase(l->copies.begin(), l->copies.begin() + (long)n);
    l->committed.erase(l->committed.begin(), l->committed.begin() + (long)groups);
    for (size_t &c : l->committed) c -= n;
}

// ---- grids -----------------------------------------------------------------------------------------------------------
static Block *block_make(Kernel *k) {
    const Dim &d = k->shape.block;
    Block *b = new Block();
    b->kernel = k;
    b->n = d.x * d.y * d.z;
    b->n_warps = (b->n + WARP - 1) / WARP;
    b->lanes = new Lane[b->n_warps * WARP]();
    for (unsigned i = 0; i < b->n; i++) b->lanes[i].thread = {i % d.x, i / d.x % d.y, i / d.x / d.y};
    b->dynamic = zone_make(k->shape.shared_bytes);
    return b;
}

static void block_begin(Block *b) {
    Kernel *k = b->kernel;
    size_t i = k->next++;
    if (thread_order == REVERSE) i = k->blocks - 1 - i;
    if (thread_order == RANDOM) i = (i * k->multiplier + k->shift) % k->blocks;
    const Dim &g = k->shape.grid;
    b->index = {(unsigned)(i % g.x), (unsigned)(i / g.x % g.y), (unsigned)(i / g.x / g.y)};
    b->serial = ++k->serial;
    b->live = b->n;
    b->waiting = 0;
    b->predicates = 0;
    b->warps_ready = (unsigned)((1ull << b->n_warps) - 1);
    for (unsigned w = 0; w < b->n_warps; w++) {
        unsigned lanes = b->n - w * WARP < WARP ? (1u << (b->n - w * WARP)) - 1 : ~0u;
        b->warps[w] = {lanes, lanes, 0, 0, 0};
    }
    memset(b->dynamic, 0xff, k->shape.shared_bytes);
}

static void block_end(Block *b) {
    zone_check(b->kernel, b->dynamic, b->kernel->shape.shared_bytes);
    for (Variable &v : b->variables) zone_check(b->kernel, v.at, v.bytes);
}

static void block_delete(Block *b) {
    free(b->dynamic);
    for (Variable &v : b->variables) free(v.at);
    delete[] b->lanes;
    delete b;
}

// Runs a block until all its lanes have left (true), or the rest only wait for others.
static bool block_run(Block *b, bool *moved) {
    const Shape &s = b->kernel->shape;
    block_now = b;
    now = {{0, 0, 0}, b->index, s.block, s.grid};
    unsigned before = b->live;
    bool spinning = false;
    for (unsigned w = 0; w < b->n_warps; w++) {
        Warp &v = b->warps[w];
        spinning |= v.yielding != 0;
        unsigned lanes = v.yielding;
        v.yielding = 0;
        ready(v, lanes);
    }
    if (Lane *l = pick()) {
        if (!l->fiber) l->fiber = fiber_take();
        enter(l);
        emu_switch(&host_sp, l->fiber->sp);
    }
    unsigned yielding = 0;
    for (unsigned w = 0; w < b->n_warps; w++) yielding += (unsigned)__builtin_popcount(b->warps[w].yielding);
    if (b->live && !yielding) fail("%s and no other thread will come: deadlock", describe(b).c_str());
    *moved |= !spinning || b->live != before;
    return b->live == 0;
}

Kernel *kernel_start(const char *name, const Shape &shape, Body body) {
    Kernel *k = new Kernel();
    k->name = name;
    k->shape = shape;
    k->body = std::move(body);
    k->blocks = (size_t)shape.grid.x * shape.grid.y * shape.grid.z;
    k->shift = random_below((unsigned)k->blocks);
    static const size_t primes[] = {1, 7919, 104729, 1299709, 15485863};
    k->multiplier = primes[random_below(5)];
    if (k->blocks % k->multiplier == 0) k->multiplier = 1; // it must have no factor in common with the number of blocks
    size_t slots = shape.resident ? k->blocks : 1;
    for (size_t i = 0; i < slots; i++) {
        k->resident.push_back(block_make(k));
        block_begin(k->resident.back());
    }
    return k;
}

Progress kernel_run(Kernel *k, bool *moved) {
    for (;;) {
        bool any = false;
        for (size_t i = 0; i < k->resident.size();) {
            Block *b = k->resident[i];
            if (!block_run(b, &any)) {
                i++;
                continue;
            }
            block_end(b);
            if (k->next < k->blocks) {
                block_begin(b);
                continue;
            }
            block_delete(b);
            k->resident.erase(k->resident.begin() + (long)i);
        }
        *moved |= any;
        if (k->resident.empty()) return DONE;
        if (!any) return BLOCKED;
    }
}

void kernel_end(Kernel *k) { delete k; }

} // namespace emu
