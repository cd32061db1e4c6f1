#include "nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "../check.h"

namespace fsdpx::cuda::nccl {
namespace {

// RTLD_DEFAULT first: a library that was preloaded is the one to use.
void* open_library() {
  const char* named = std::getenv("FSDPX_NCCL_LIBRARY");
  if (named == nullptr && dlsym(RTLD_DEFAULT, "ncclCommSplit") != nullptr) return RTLD_DEFAULT;
  const char* file = named != nullptr ? named : "libnccl.so.2";
  void* handle = dlopen(file, RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) handle = dlopen(file, RTLD_NOW);
  if (handle != nullptr) return handle;
  const char* reason = dlerror();
  fsdpx::check<std::runtime_error>(
      false, "NCCL can't be loaded: ", reason == nullptr ? file : reason,
      ". Install it (`pip install nvidia-nccl-cu13`) or use comm='c10d'.");
  return nullptr;
}

std::string text_of(int version) {
  return fsdpx::detail::concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

template <typename Function>
void find(void* handle, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(handle, name));
  fsdpx::check<std::runtime_error>(*function != nullptr, "NCCL has no function ", name,
                                   ": it is older than ", kMinVersion / 10000, ".",
                                   kMinVersion / 100 % 100);
}

// All of these, or the last one is null.
void find_memory(void* handle, Library& lib) try {
  find(handle, "ncclMemAlloc", &lib.ncclMemAlloc);
  find(handle, "ncclMemFree", &lib.ncclMemFree);
  find(handle, "ncclCommRegister", &lib.ncclCommRegister);
  find(handle, "ncclCommDeregister", &lib.ncclCommDeregister);
} catch (const std::runtime_error&) {
  lib.ncclCommDeregister = nullptr;
}

// The same.
void find_windows(void* handle, Library& lib) try {
  find(handle, "ncclCommWindowRegister", &lib.ncclCommWindowRegister);
  find(handle, "ncclCommWindowDeregister", &lib.ncclCommWindowDeregister);
  find(handle, "ncclGetPeerDevicePointer", &lib.ncclGetPeerDevicePointer);
} catch (const std::runtime_error&) {
  lib.ncclGetPeerDevicePointer = nullptr;
}

Library load() {
  void* const handle = open_library();
  Library lib{};
  find(handle, "ncclGetVersion", &lib.ncclGetVersion);
  lib.ncclGetVersion(&lib.version);
  fsdpx::check<std::runtime_error>(lib.version >= kMinVersion, "NCCL ", lib.version / 10000, ".",
                                   lib.version / 100 % 100, " is too old: ", kMinVersion / 10000,
                                   ".", kMinVersion / 100 % 100,
                                   " or newer is needed. Upgrade it or use comm='c10d'.");
  find(handle, "ncclGetErrorString", &lib.ncclGetErrorString);
  find(handle, "ncclGetLastError", &lib.ncclGetLastError);
  find(handle, "ncclGetUniqueId", &lib.ncclGetUniqueId);
  find(handle, "ncclCommInitRankConfig", &lib.ncclCommInitRankConfig);
  find(handle, "ncclCommSplit", &lib.ncclCommSplit);
  find(handle, "ncclCommAbort", &lib.ncclCommAbort);
  find(handle, "ncclCommGetAsyncError", &lib.ncclCommGetAsyncError);
  find(handle, "ncclGroupStart", &lib.ncclGroupStart);
  find(handle, "ncclGroupEnd", &lib.ncclGroupEnd);
  find(handle, "ncclAllGather", &lib.ncclAllGather);
  find(handle, "ncclReduceScatter", &lib.ncclReduceScatter);
  find(handle, "ncclAllReduce", &lib.ncclAllReduce);
  if (lib.version >= kMinVersionOfMemory) find_memory(handle, lib);
  if (lib.version >= kMinVersionOfWindows) find_windows(handle, lib);
  return lib;
}

}  // namespace

std::string Library::version_text() const { return text_of(version); }

void Library::check(Result result, const char* what, Comm comm) const {
  fsdpx::check<std::runtime_error>(result == kSuccess || result == kInProgress, what, ": ",
                                   ncclGetErrorString(result), " (", ncclGetLastError(comm), ")");
}

const Library& library() {
  static const Library loaded = load();  // not kept when it throws: tried again the next time
  return loaded;
}

}  // namespace fsdpx::cuda::nccl
