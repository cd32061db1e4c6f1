// libcuda.so.1: enough of the driver for torch to find a primary context; the rest says that it is
// not simulated.
#include <cstdio>
#define API extern "C" __attribute__((visibility("default")))
#define STUB(name)                                            \
  API int name() {                                            \
    fprintf(stderr, "cudasim: " #name " is not simulated\n"); \
    return 801;                                               \
  }

API int cuInit(unsigned) { return 0; }
API int cuDriverGetVersion(int* v) {
  *v = 13000;
  return 0;
}
API int cuDeviceGetCount(int* n) {
  *n = 1;
  return 0;
}
API int cuDeviceGet(int* d, int i) {
  *d = i;
  return 0;
}
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
API int cuCtxGetCurrent(void** c) {
  *c = reinterpret_cast<void*>(1);
  return 0;
}
API int cuCtxSetCurrent(void*) { return 0; }
API int cuGetErrorString(int, const char** s) {
  *s = "cudasim driver error";
  return 0;
}
API int cuGetErrorName(int, const char** s) {
  *s = "CUDASIM";
  return 0;
}

STUB(cuDeviceGetAttribute)
STUB(cuDevicePrimaryCtxRetain)
STUB(cuFuncGetAttribute)
STUB(cuFuncSetAttribute)
STUB(cuFuncSetCacheConfig)
STUB(cuLaunchCooperativeKernel)
STUB(cuLaunchKernel)
STUB(cuLinkAddData_v2)
STUB(cuLinkComplete)
STUB(cuLinkCreate_v2)
STUB(cuModuleGetFunction)
STUB(cuModuleLoad)
STUB(cuModuleLoadData)
STUB(cuModuleLoadDataEx)
STUB(cuModuleUnload)
STUB(cuOccupancyMaxActiveBlocksPerMultiprocessor)
STUB(cuPointerGetAttribute)
STUB(cuTensorMapEncodeTiled)
