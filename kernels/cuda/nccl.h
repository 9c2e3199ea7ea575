// NCCL's calls, found when the first is needed: a program on one GPU starts where NCCL is not installed, and where it is needed
// and missing that is told in words.
#ifndef MOE_CUDA_NCCL_H
#define MOE_CUDA_NCCL_H
#include "kernels/cuda/comm.h"
#include <nccl.h>

#define NCCL_CALLS(X)                                                                                                        \
    X(GetVersion) X(GetErrorString) X(GetLastError) X(GetUniqueId) X(CommInitRank) X(CommSplit) X(CommDestroy) X(GroupStart) \
    X(GroupEnd) X(AllGather) X(Broadcast) X(Send) X(Recv)
// Of symmetric.cu, which calls them only where the library has the headers' version
#if NCCL_VERSION_CODE >= 22800
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" // in NCCL's own header
#include <nccl_device.h>
#pragma GCC diagnostic pop
#define NCCL_DEVICE_CALLS(X) X(MemAlloc) X(MemFree) X(CommWindowRegister) X(CommWindowDeregister) X(DevCommCreate) X(DevCommDestroy)
#else
#define NCCL_DEVICE_CALLS(X)
#endif

struct Nccl {
    char why[256]; // it cannot be used; "": it can
    int version;   // as NCCL_VERSION_CODE, of the headers
#define X(name) decltype(&nccl##name) name;
    NCCL_CALLS(X)
    NCCL_DEVICE_CALLS(X)
#undef X
#if NCCL_VERSION_CODE >= 22800
    ncclTeam_t (*TeamLsa)(ncclComm_t); // the headers have another of this name
#endif
};
const Nccl &nccl_calls();

// A group's communicators: of all ranks; where there are several nodes, of this place's rank in each of them, by node; and the same
// for the side stream.
struct Wire {
    ncclComm_t all, column, blocks;
    char *scratch;                  // of one call at a time
    size_t scratch_bytes;
    int *heads, *heads_in;          // (N) rows to and from each node
    int most;                       // blocks between two ranks,
    size_t bytes, message;          // of so many bytes; a message: HEAD, then `most` blocks
    char *out, *in;                 // (N) messages
};

#define NCCL_CHECK(call)                                                                                                            \
    do {                                                                                                                            \
        ncclResult_t nccl_code_ = nccl_calls().call;                                                                                \
        CHECK_COMM(nccl_code_ == ncclSuccess, "nccl%s: NCCL reports: %s %s (hint: NCCL_DEBUG=WARN in the environment says more)",     \
                   #call, nccl_calls().GetErrorString(nccl_code_), nccl_calls().GetLastError(nullptr));                             \
    } while (0)
#endif
