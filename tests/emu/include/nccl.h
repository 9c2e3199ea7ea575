// Stand-in for NCCL's header: the calls that kernels/cuda uses, among ranks that are threads of one process, each with its device.
#ifndef EMU_NCCL_H
#define EMU_NCCL_H
#include "cuda_runtime.h"

#define NCCL_VERSION_CODE 22809
enum { NCCL_UNIQUE_ID_BYTES = 128 };
typedef struct ncclUniqueId {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;
typedef struct EmuNccl *ncclComm_t;
struct ncclWindow_t { // in NCCL a pointer to the device's memory
    struct EmuWindow *at;
    explicit operator bool() const { return at; }
};
enum { NCCL_WIN_COLL_SYMMETRIC = 1 };
typedef struct ncclConfig_t ncclConfig_t;
typedef enum { ncclSuccess = 0, ncclUnhandledCudaError = 1, ncclInvalidArgument = 4, ncclInvalidUsage = 5 } ncclResult_t;
typedef enum { ncclInt8 = 0, ncclChar = 0 } ncclDataType_t;

extern "C" {
int emu_nccl_there(void); // 0: EMU_LACKS says that the library is missing
const char *ncclGetErrorString(ncclResult_t r);
const char *ncclGetLastError(ncclComm_t c);
ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRank(ncclComm_t *c, int ranks, ncclUniqueId id, int rank);
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *part, ncclConfig_t *config);
ncclResult_t ncclCommDestroy(ncclComm_t c);
ncclResult_t ncclMemAlloc(void **p, size_t bytes);
ncclResult_t ncclMemFree(void *p);
ncclResult_t ncclCommWindowRegister(ncclComm_t c, void *p, size_t bytes, ncclWindow_t *w, int flags);
ncclResult_t ncclCommWindowDeregister(ncclComm_t c, ncclWindow_t w);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t c, cudaStream_t s);
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t s);
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t s);
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t s);
}
#endif
