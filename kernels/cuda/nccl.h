// NCCL's calls, found when the first is needed: a program on one GPU starts where NCCL is not installed, and where it is needed
// and missing that is told in words.
#ifndef MOE_CUDA_NCCL_H
#define MOE_CUDA_NCCL_H
#include "kernels/cuda/comm.h"
#include <nccl.h>

#define NCCL_CALLS(X)                                                                                                        \
    X(GetVersion) X(GetErrorString) X(GetLastError) X(GetUniqueId) X(CommInitRank) X(CommSplit) X(CommDestroy) X(GroupStart) \
    X(GroupEnd) X(AllGather) X(Broadcast) X(Send) X(Recv)

struct Nccl {
    char why[256]; // it cannot be used; "": it can
    int version;   // as NCCL_VERSION_CODE, of the headers
#define X(name) decltype(&nccl##name) name;
    NCCL_CALLS(X)
#undef X
};
const Nccl &nccl();

#define NCCL_CHECK(call)                                                                                                        \
    do {                                                                                                                        \
        ncclResult_t nccl_code_ = nccl().call;                                                                                  \
        CHECK_COMM(nccl_code_ == ncclSuccess, "nccl%s: NCCL reports: %s %s (hint: NCCL_DEBUG=WARN in the environment says more)", \
                   #call, nccl().GetErrorString(nccl_code_), nccl().GetLastError(nullptr));                                     \
    } while (0)
#endif
