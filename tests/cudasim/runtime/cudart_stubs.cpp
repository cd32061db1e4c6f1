// Functions that torch's libraries import and nothing here simulates: they say so and fail.
#include <cstdio>

#define NOT_SIMULATED(name)                                   \
  extern "C" int name() {                                     \
    fprintf(stderr, "cudasim: " #name " is not simulated\n"); \
    return 801 /* cudaErrorNotSupported */;                   \
  }

NOT_SIMULATED(cudaDeviceGetDefaultMemPool)
NOT_SIMULATED(cudaDeviceGetGraphMemAttribute)
NOT_SIMULATED(cudaDeviceSetGraphMemAttribute)
NOT_SIMULATED(cudaFreeAsync)
NOT_SIMULATED(cudaGetSymbolAddress)
NOT_SIMULATED(cudaGraphAddNode)
NOT_SIMULATED(cudaGraphConditionalHandleCreate)
NOT_SIMULATED(cudaGraphDestroy)
NOT_SIMULATED(cudaGraphExecDestroy)
NOT_SIMULATED(cudaGraphGetNodes)
NOT_SIMULATED(cudaGraphInstantiateWithFlags)
NOT_SIMULATED(cudaGraphLaunch)
NOT_SIMULATED(cudaGraphNodeGetDependencies)
NOT_SIMULATED(cudaGraphRetainUserObject)
NOT_SIMULATED(cudaKernelSetAttributeForDevice)
NOT_SIMULATED(cudaLaunchCooperativeKernel)
NOT_SIMULATED(cudaLibraryGetKernel)
NOT_SIMULATED(cudaLibraryLoadData)
NOT_SIMULATED(cudaLibraryUnload)
NOT_SIMULATED(cudaMallocAsync)
NOT_SIMULATED(cudaMemPoolGetAttribute)
NOT_SIMULATED(cudaMemPoolSetAccess)
NOT_SIMULATED(cudaMemPoolSetAttribute)
NOT_SIMULATED(cudaMemPoolTrimTo)
NOT_SIMULATED(cudaMemcpyToSymbol)
NOT_SIMULATED(cudaStreamAddCallback)
NOT_SIMULATED(cudaStreamBeginCapture)
NOT_SIMULATED(cudaStreamBeginCaptureToGraph)
NOT_SIMULATED(cudaStreamEndCapture)
NOT_SIMULATED(cudaStreamUpdateCaptureDependencies)
NOT_SIMULATED(cudaUserObjectCreate)
NOT_SIMULATED(cudaUserObjectRelease)
