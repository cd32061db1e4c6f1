// Functions that torch's libraries import and nothing here simulates: they say so and fail.
#include <cstdio>

#define NOT_SIMULATED(name)                                   \
  extern "C" int name() {                                     \
    fprintf(stderr, "cudasim: " #name " is not simulated\n"); \
    return 5 /* ncclInvalidUsage */;                          \
  }

NOT_SIMULATED(ncclCommGetUniqueId)
NOT_SIMULATED(ncclCommGrow)
NOT_SIMULATED(ncclCommMemStats)
NOT_SIMULATED(ncclCommResume)
NOT_SIMULATED(ncclCommRevoke)
NOT_SIMULATED(ncclCommShrink)
NOT_SIMULATED(ncclCommSuspend)
NOT_SIMULATED(ncclDevCommCreate)
NOT_SIMULATED(ncclDevCommDestroy)
NOT_SIMULATED(ncclGather)
NOT_SIMULATED(ncclGroupSimulateEnd)
NOT_SIMULATED(ncclPutSignal)
NOT_SIMULATED(ncclRecv)
NOT_SIMULATED(ncclReduce)
NOT_SIMULATED(ncclSend)
NOT_SIMULATED(ncclSignal)
NOT_SIMULATED(ncclWaitSignal)
