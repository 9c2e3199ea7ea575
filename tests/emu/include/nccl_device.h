// Stand-in for NCCL's header of this name: symmetric windows, and puts with signals (GIN), among threads of one process.
//   EMU_LSA  ranks of a group whose windows are pointers to each other, contiguous (all)
// A put lands late: when the receiver has looked at its signals a few times, or the sender flushes. With EMU_ORDER=reverse at once.
#ifndef EMU_NCCL_DEVICE_H
#define EMU_NCCL_DEVICE_H
#include "nccl.h"

struct ncclTeam {
    int nRanks, rank, stride;
};
typedef ncclTeam ncclTeam_t;
typedef uint32_t ncclGinSignal_t;

struct ncclDevCommRequirements {
    bool ginForceEnable;
    int ginContextCount, ginSignalCount;
};
typedef ncclDevCommRequirements ncclDevCommRequirements_t;
struct ncclDevComm {
    EmuNccl *emu;
    int rank, nRanks;
    uint8_t ginContextCount;
};
typedef ncclDevComm ncclDevComm_t;

extern "C" {
ncclResult_t ncclDevCommCreate(ncclComm_t c, const ncclDevCommRequirements *need, ncclDevComm *comm);
ncclResult_t ncclDevCommDestroy(ncclComm_t c, const ncclDevComm *comm);
ncclTeam ncclTeamLsa(ncclComm_t c);
}

void *ncclGetLsaPointer(ncclWindow_t w, size_t offset, int peer);

struct ncclGin_None {};
struct ncclGin_SignalAdd {
    ncclGinSignal_t signal;
    uint64_t value;
};
struct ncclCoopThread {};

struct ncclGin {
    const ncclDevComm &comm;
    int context;
    ncclGin(const ncclDevComm &of, int index) : comm(of), context(index % of.ginContextCount) {}
    void put(ncclTeam team, int peer, ncclWindow_t to, size_t to_at, ncclWindow_t from, size_t from_at, size_t bytes) const;
    void signal(ncclTeam team, int peer, ncclGin_SignalAdd action) const;
    uint64_t readSignal(ncclGinSignal_t signal) const;
    void flush(ncclCoopThread) const;
};
#endif
