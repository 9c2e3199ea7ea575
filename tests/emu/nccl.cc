// NCCL among threads of one process. A call does its work when the operations of all its ranks have come to the heads of their
// streams; ranks that call different things there, or in different order, are found.
#include "nccl_device.h"
extern "C" {
#include "kernels/check.h"
}
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unistd.h>
#include <vector>

using namespace emu;

namespace {

enum Kind { GATHER, BROADCAST, SEND, RECEIVE };
struct Action {
    Kind kind;
    const char *from;
    char *to;
    size_t bytes;
    int peer; // or root
};

struct Round { // one collective
    std::vector<Action> posted;
    std::vector<bool> here;
    int n = 0;
    bool done = false;
};
struct Sent {
    const char *from;
    size_t bytes;
    std::shared_ptr<bool> taken;
};

struct Put { // of bytes, or of a signal
    int sender;
    char *to;
    const char *from;
    size_t bytes;
    uint64_t *signal, add;
    int looks; // by the receiver, until it lands
};
struct Group { // the device's lock holds while work runs; `lock` while hosts meet
    int size;
    std::vector<int> device;
    std::map<long, Round> rounds;
    std::map<std::pair<int, int>, std::deque<Sent>> sent; // from, to
    std::map<std::pair<int, int>, std::vector<Put>> puts; // on their way to a rank, by context, in their order
    std::vector<uint64_t *> signals;                      // of all ranks
};
typedef std::shared_ptr<Group> GroupPtr;

std::mutex lock;
std::condition_variable news;
std::map<std::string, std::vector<EmuNccl *>> meetings; // hosts that form a group, by its name

} // namespace

struct EmuNccl {
    GroupPtr group;
    int rank;
    long run;    // collectives run so far, in the order of execution
    long splits, exchanges;
    std::string name;
    std::vector<uint64_t> signals;
};

namespace {

// All ranks of a group come with the same name; the last makes the group.
EmuNccl *meet(const std::string &name, int rank, int size) {
    std::unique_lock<std::mutex> hold(lock);
    EmuNccl *c = new EmuNccl{nullptr, rank, 0, 0, 0, name, {}};
    int device;
    cudaGetDevice(&device);
    std::vector<EmuNccl *> &all = meetings[name];
    all.push_back(c);
    if ((int)all.size() == size) {
        GroupPtr g = std::make_shared<Group>();
        g->size = size;
        for (EmuNccl *member : all) member->group = g;
        news.notify_all();
    }
    news.wait(hold, [&] { return c->group != nullptr; });
    for (int other : c->group->device)
        if (other == device) fail("NCCL: two ranks on device %d", device);
    c->group->device.push_back(device);
    return c;
}

void perform(Round &r, int size) {
    const Action &first = r.posted[0];
    for (int i = 0; i < size; i++) {
        const Action &a = r.posted[(size_t)i];
        if (a.kind != first.kind || a.bytes != first.bytes || (a.kind == BROADCAST && a.peer != first.peer))
            fail("NCCL: ranks 0 and %d call different collectives, or of %zu and %zu bytes", i, first.bytes, a.bytes);
        for (int j = 0; j < size && a.kind == GATHER; j++) memmove(a.to + (size_t)j * a.bytes, r.posted[(size_t)j].from, a.bytes);
        if (a.kind == BROADCAST && a.to != r.posted[(size_t)a.peer].from) memcpy(a.to, r.posted[(size_t)a.peer].from, a.bytes);
    }
}

// One action's state while it runs
struct Running {
    Action a;
    bool posted = false, done = false;
    long round = 0;
    std::shared_ptr<bool> taken;
};

void advance(EmuNccl *c, Running &r) {
    Group &g = *c->group;
    const Action &a = r.a;
    if (a.kind == SEND) {
        if (!r.posted) {
            r.taken = std::make_shared<bool>(false);
            g.sent[{c->rank, a.peer}].push_back({a.from, a.bytes, r.taken});
        }
        r.posted = true;
        r.done = *r.taken;
    } else if (a.kind == RECEIVE) {
        std::deque<Sent> &queue = g.sent[{a.peer, c->rank}];
        if (queue.empty()) return;
        if (queue.front().bytes != a.bytes) fail("NCCL: rank %d sent %zu bytes, rank %d receives %zu", a.peer, queue.front().bytes, c->rank, a.bytes);
        memcpy(a.to, queue.front().from, a.bytes);
        *queue.front().taken = true;
        queue.pop_front();
        r.done = true;
    } else {
        if (!r.posted) r.round = c->run++;
        Round &round = g.rounds[r.round];
        if (!r.posted) {
            round.posted.resize((size_t)g.size);
            round.posted[(size_t)c->rank] = a;
            if (++round.n == g.size) perform(round, g.size), round.done = true;
        }
        r.posted = true;
        r.done = round.done;
    }
}

thread_local int depth;
thread_local std::map<std::pair<EmuNccl *, cudaStream_t>, std::vector<Running>> pending;

void flush() {
    for (auto &p : pending) {
        EmuNccl *c = p.first.first;
        std::vector<Running> list = p.second;
        enqueue("NCCL", p.first.second, [c, list]() mutable {
            Progress all = DONE;
            for (Running &r : list) {
                if (!r.done) advance(c, r);
                if (!r.done) all = BLOCKED;
            }
            return all;
        });
    }
    pending.clear();
}

ncclResult_t add(EmuNccl *c, cudaStream_t s, Action a, size_t to_bytes) {
    if (a.kind != SEND && where(a.to, to_bytes, "NCCL's target") == HOST) fail("NCCL writes to the host's memory");
    if (a.kind != RECEIVE && where(a.from, a.bytes, "NCCL's source") == HOST) fail("NCCL reads the host's memory");
    if (a.peer < 0 || a.peer >= c->group->size || ((a.kind == SEND || a.kind == RECEIVE) && a.peer == c->rank)) return ncclInvalidArgument;
    pending[{c, s}].push_back({a, false, false, 0, nullptr});
    if (!depth) flush();
    return ncclSuccess;
}

} // namespace

extern "C" {
const char *ncclGetErrorString(ncclResult_t r) { return r == ncclSuccess ? "no error" : "invalid argument"; }
const char *ncclGetLastError(ncclComm_t) { return launcher_size() > 1 ? "(the emulation's NCCL is for threads of one process)" : ""; }
int emu_nccl_there(void) { return !lacks("nccl"); }
ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE - lacks("version"), ncclSuccess; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static int made;
    if (launcher_size() > 1) return ncclInvalidUsage;
    std::lock_guard<std::mutex> hold(lock);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%d.%d", (int)getpid(), made++);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *c, int ranks, ncclUniqueId id, int rank) {
    if (rank < 0 || rank >= ranks) return ncclInvalidArgument;
    return *c = meet(id.internal, rank, ranks), ncclSuccess;
}

// Ranks by key, among those of one color; who they are is told through a meeting of all.
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *part, ncclConfig_t *) {
    static std::map<std::string, std::vector<std::pair<int, int>>> told; // color, key of the ranks that have come
    std::string name = c->name + "/" + std::to_string(c->splits++);
    std::unique_lock<std::mutex> hold(lock);
    std::vector<std::pair<int, int>> &all = told[name];
    all.push_back({color, key});
    news.notify_all();
    news.wait(hold, [&] { return (int)all.size() == c->group->size; });
    int rank = 0, size = 0;
    for (auto &other : all) {
        if (other.first != color) continue;
        size++;
        rank += other.second < key;
    }
    hold.unlock();
    return *part = meet(name + ":" + std::to_string(color), rank, size), ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t c) {
    cudaError_t e = (cudaError_t)device_wait();
    delete c;
    return e == cudaSuccess ? ncclSuccess : ncclInvalidUsage;
}

ncclResult_t ncclGroupStart(void) { return depth++, ncclSuccess; }
ncclResult_t ncclGroupEnd(void) {
    if (!depth) return ncclInvalidUsage;
    if (!--depth) flush();
    return ncclSuccess;
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t, ncclComm_t c, cudaStream_t s) {
    return add(c, s, {GATHER, (const char *)from, (char *)to, count, 0}, count * (size_t)c->group->size);
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t, int root, ncclComm_t c, cudaStream_t s) {
    return add(c, s, {BROADCAST, (const char *)from, (char *)to, count, root}, count);
}
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t, int peer, ncclComm_t c, cudaStream_t s) {
    return add(c, s, {SEND, (const char *)from, nullptr, count, peer}, 0);
}
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t, int peer, ncclComm_t c, cudaStream_t s) {
    return add(c, s, {RECEIVE, nullptr, (char *)to, count, peer}, count);
}
}

// ---- windows and puts ------------------------------------------------------------------------------------------------------
struct EmuWindow {
    EmuNccl *owner;
    std::vector<std::pair<char *, size_t>> parts; // of all ranks
};

namespace {

// Every rank of a group gives something, and gets what all have given, in the order of the ranks.
template <class T> std::vector<T> exchange(EmuNccl *c, const char *what, T own) {
    static std::map<std::string, std::map<int, T>> told;
    std::string name = c->name + what + std::to_string(c->exchanges++);
    std::unique_lock<std::mutex> hold(lock);
    std::map<int, T> &all = told[name];
    all[c->rank] = own;
    news.notify_all();
    news.wait(hold, [&] { return (int)all.size() == c->group->size; });
    std::vector<T> list;
    for (auto &one : all) list.push_back(one.second);
    return list;
}

int lsa_size(const EmuNccl *c) {
    const char *text = getenv("EMU_LSA");
    return text ? atoi(text) : c->group->size;
}
int peer_of(const ncclDevComm &comm, ncclTeam team, int peer) { return comm.rank + (peer - team.rank) * team.stride; }

char *part_of(const EmuWindow *w, int rank, size_t at, size_t bytes, const char *what) {
    if (!w) fail("NCCL: %s no window", what);
    const auto &part = w->parts[(size_t)rank];
    if (at + bytes > part.second) fail("NCCL: %s bytes %zu to %zu of a window of %zu", what, at, at + bytes, part.second);
    return part.first + at;
}

std::vector<Put> &on_the_way(Group &g, int receiver, int context) { return g.puts[{receiver, context}]; }

// In their order: those of one sender, or (-1) those that the receiver has looked for often enough
void land(std::vector<Put> &puts, int sender) {
    std::vector<Put> left;
    for (Put &p : puts) {
        if (sender >= 0 ? p.sender != sender : p.looks-- > 0 || !left.empty()) {
            left.push_back(p);
            continue;
        }
        if (p.bytes && !lacks("arrivals")) memcpy(p.to, p.from, p.bytes);
        if (p.signal && !lacks("arrivals")) *p.signal += p.add;
    }
    puts = left;
}

} // namespace

extern "C" {
ncclResult_t ncclMemAlloc(void **p, size_t bytes) { return cudaMalloc(p, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }
ncclResult_t ncclMemFree(void *p) { return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclInvalidArgument; }

ncclResult_t ncclCommWindowRegister(ncclComm_t c, void *p, size_t bytes, ncclWindow_t *w, int flags) {
    if (flags != NCCL_WIN_COLL_SYMMETRIC || where(p, bytes, "a window") != DEVICE) return ncclInvalidArgument;
    auto parts = exchange(c, "window", std::make_pair((char *)p, bytes));
    for (auto &part : parts)
        if (part.second != bytes) fail("NCCL: windows of %zu and %zu bytes are registered together", bytes, part.second);
    w->at = lacks("windows") ? nullptr : new EmuWindow{c, parts};
    return ncclSuccess;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t c, ncclWindow_t w) {
    if (!w || w.at->owner != c) return ncclInvalidArgument;
    return delete w.at, ncclSuccess;
}

ncclResult_t ncclDevCommCreate(ncclComm_t c, const ncclDevCommRequirements *need, ncclDevComm *comm) {
    *comm = {c, c->rank, c->group->size, 0};
    if (lacks("puts")) return ncclInvalidUsage;
    if (!c->signals.empty()) return ncclInvalidArgument;
    comm->ginContextCount = (uint8_t)need->ginContextCount;
    c->signals.resize((size_t)need->ginSignalCount);
    auto all = exchange(c, "signals", c->signals.data());
    std::lock_guard<std::mutex> hold(lock);
    c->group->signals = all;
    return ncclSuccess;
}
ncclResult_t ncclDevCommDestroy(ncclComm_t c, const ncclDevComm *comm) { return comm->emu == c ? ncclSuccess : ncclInvalidArgument; }

ncclTeam ncclTeamLsa(ncclComm_t c) { return {lsa_size(c), c->rank % lsa_size(c), 1}; }
}

void *ncclGetLsaPointer(ncclWindow_t w, size_t offset, int peer) {
    const EmuNccl *c = w.at->owner;
    if (peer < 0 || peer >= lsa_size(c)) fail("NCCL: no pointer to rank %d of %d", peer, lsa_size(c));
    return part_of(w.at, c->rank / lsa_size(c) * lsa_size(c) + peer, offset, 0, "a pointer to");
}

static void send(const ncclDevComm &comm, int receiver, int context, Put put) {
    std::vector<Put> &all = on_the_way(*comm.emu->group, receiver, context);
    const char *order = getenv("EMU_ORDER");
    bool at_once = order && !strcmp(order, "reverse");
    put.looks = at_once ? 0 : 2 + (int)random_below(6);
    all.push_back(put);
    if (at_once) land(all, -1);
}
void ncclGin::put(ncclTeam team, int peer, ncclWindow_t to, size_t to_at, ncclWindow_t from, size_t from_at, size_t bytes) const {
    int receiver = peer_of(comm, team, peer);
    send(comm, receiver, context, {comm.rank, part_of(to.at, receiver, to_at, bytes, "a put to"),
                                   part_of(from.at, comm.rank, from_at, bytes, "a put from"), bytes, nullptr, 0, 0});
}
void ncclGin::signal(ncclTeam team, int peer, ncclGin_SignalAdd action) const {
    int receiver = peer_of(comm, team, peer);
    uint64_t *to = comm.emu->group->signals[(size_t)receiver] + action.signal;
    send(comm, receiver, context, {comm.rank, nullptr, nullptr, 0, to, action.value, 0});
}
uint64_t ncclGin::readSignal(ncclGinSignal_t signal) const {
    land(on_the_way(*comm.emu->group, comm.rank, context), -1);
    return comm.emu->signals.at(signal);
}
void ncclGin::flush(ncclCoopThread) const {
    for (int r = 0; r < comm.nRanks; r++) land(on_the_way(*comm.emu->group, r, context), comm.rank);
}
