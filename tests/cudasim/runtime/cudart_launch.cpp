// libcudart: kernels, which the host code that nvcc generates registers and launches.
#include <algorithm>
#include <cstdio>
#include <unordered_map>

#include "ptx.h"
#include "sim.h"

using namespace sim;

namespace {

struct Kernel {
  std::string name;
  ptx::Module* module;  // nullptr: there is no PTX for it
};
struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
// By address of the host stub.
std::unordered_map<const void*, Kernel*>& kernels = *new std::unordered_map<const void*, Kernel*>;
thread_local std::vector<Configuration> configurations;

template <typename T>
T read(const char* p) {
  T value;
  memcpy(&value, p, sizeof value);
  return value;
}

int target_of(const std::string& text) {
  const size_t at = text.find(".target sm_");
  return at == std::string::npos ? 0 : atoi(text.c_str() + at + 11);
}

// The newest PTX of a fat binary that the simulated device may run. The layout is what nvcc 13
// writes; a compressed entry does not contain ".version".
std::string ptx_of(const void* wrapper) {
  constexpr uint32_t kWrapperMagic = 0x466243b1, kFatbinMagic = 0xBA55ED50;
  const char* const w = static_cast<const char*>(wrapper);
  if (read<uint32_t>(w) != kWrapperMagic) return "";
  const char* const head = read<const char*>(w + 8);
  if (read<uint32_t>(head) != kFatbinMagic) return "";
  const uint16_t head_bytes = read<uint16_t>(head + 6);
  const char* const end = head + head_bytes + read<uint64_t>(head + 8);
  std::string best;
  for (const char* entry = head + head_bytes; entry < end;) {
    const char* const body = entry + read<uint32_t>(entry + 4);
    const uint64_t size = read<uint64_t>(entry + 8);
    if (read<uint16_t>(entry) == 1 && memmem(body, size, ".version", 8)) {
      const std::string text(body, strnlen(body, size));
      const int target = target_of(text);
      if (target <= settings.arch && target > target_of(best)) best = text;
    }
    entry = body + size;
  }
  return best;
}

bool launchable(dim3 g, dim3 b, unsigned max_threads) {
  const size_t threads = size_t(b.x) * b.y * b.z;
  const bool grid = g.x && g.y && g.z && g.x <= 2147483647u && g.y <= 65535 && g.z <= 65535;
  return grid && threads && threads <= max_threads && b.z <= 64;
}

void explain(const std::string& name, const std::string& why) {
  fprintf(stderr, "cudasim: cannot run kernel %.160s: %s\n", name.c_str(), why.c_str());
}

// Runs a kernel as far as it goes. True when it has ended, by a fault too.
bool advance(ptx::Launch& launch) {
  try {
    return launch.run();
  } catch (const std::exception& error) {
    raise(cudaErrorIllegalAddress, "kernel " + launch.kernel.name + ": " + error.what());
    return true;
  }
}

void push_kernel(const ptx::Kernel& code, dim3 g, dim3 b, std::string arguments, Stream* stream) {
  const auto running = std::make_shared<ptx::Launch>(code, ptx::Dim{g.x, g.y, g.z},
                                                     ptx::Dim{b.x, b.y, b.z}, std::move(arguments));
  count(kLaunches);
  count(kBlocks, uint64_t{g.x} * g.y * g.z);
  Op op;
  op.name = code.name;
  op.rate = rate(settings.mem_gbps);
  op.fixed_us = settings.launch_us;
  op.ready = [running, done = false](Op& self) mutable {
    done = done || advance(*running);
    if (!done) {
      self.waiting_for = [running] { return "kernel " + running->kernel.name + ", which spins"; };
    }
    return done;
  };
  op.run = [running] { return double(running->moved); };
  push(stream, std::move(op));
}

cudaError_t launch(const Kernel* k, dim3 g, dim3 b, void** arguments, size_t shared_bytes,
                   cudaStream_t stream) {
  Lock lock;
  enter_context();
  if (!k) return result(cudaErrorInvalidDeviceFunction);
  if (stream_of(stream)->device != device) return result(cudaErrorInvalidResourceHandle);
  if (!k->module || !k->module->count(k->name)) {
    explain(k->name,
            "there is no PTX; compile it with --no-compress and code=compute_XX, and run "
            "torch's own operators under CpuOperators");
    return result(cudaErrorNoKernelImageForDevice);
  }
  ptx::Kernel& code = k->module->at(k->name);
  try {
    code.parse();
    if (shared_bytes) throw ptx::Unsupported("dynamic shared memory");
  } catch (const std::exception& error) {
    explain(k->name, error.what());
    return result(cudaErrorNotSupported);
  }
  if (!launchable(g, b, code.max_threads)) return result(cudaErrorInvalidConfiguration);
  std::string packed;
  for (size_t n = 0; n < code.parameters.size(); ++n) {
    packed.resize(code.parameters[n].offset);
    packed.append(static_cast<const char*>(arguments[n]), code.parameters[n].size);
  }
  push_kernel(code, g, b, std::move(packed), stream_of(stream));
  return result();
}

}  // namespace

API void** __cudaRegisterFatBinary(void* wrapper) {
  Lock lock;
  const std::string text = ptx_of(wrapper);
  ptx::Module* module = nullptr;
  try {
    if (!text.empty()) module = new ptx::Module(ptx::parse_module(text));
  } catch (const std::exception& error) {
    explain("of a module", error.what());
  }
  return reinterpret_cast<void**>(new ptx::Module*(module));
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void** module, const char* host, char*, const char* name, int,
                                uint3*, uint3*, dim3*, dim3*, int*) {
  Lock lock;
  kernels[host] = new Kernel{name, *reinterpret_cast<ptx::Module**>(module)};
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t shared_bytes, CUstream_st* s) {
  configurations.push_back({g, b, shared_bytes, s});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* shared_bytes, void* s) {
  if (configurations.empty()) return result(cudaErrorUnknown);
  const Configuration top = configurations.back();
  configurations.pop_back();
  *g = top.grid;
  *b = top.block;
  *shared_bytes = top.shared_bytes;
  *static_cast<cudaStream_t*>(s) = top.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) {
  Lock lock;
  const auto found = kernels.find(f);
  *k = reinterpret_cast<cudaKernel_t>(found == kernels.end() ? nullptr : found->second);
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void** args, size_t shared_bytes,
                                   cudaStream_t s) {
  return launch(reinterpret_cast<Kernel*>(k), g, b, args, shared_bytes, s);
}
API cudaError_t cudaLaunchKernel(const void* f, dim3 g, dim3 b, void** args, size_t shared_bytes,
                                 cudaStream_t s) {
  cudaKernel_t k;
  __cudaGetKernel(&k, f);
  return __cudaLaunchKernel(k, g, b, args, shared_bytes, s);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** args) {
  // Programmatic dependent launch only relaxes the order; other attributes are not simulated.
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    if (c->attrs[i].id != cudaLaunchAttributeProgrammaticStreamSerialization) {
      return result(cudaErrorNotSupported);
    }
  }
  return cudaLaunchKernel(f, c->gridDim, c->blockDim, args, c->dynamicSmemBytes, c->stream);
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* user) {
  Lock lock;
  Op op;
  op.name = "host function";
  op.run = [=] {
    f(user);
    return 0.0;
  };
  push(stream_of(s), std::move(op));
  return result();
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = int(settings.arch);
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*,
                                                                       int threads, size_t,
                                                                       unsigned) {
  *n = threads > 0 ? 2048 / threads : 0;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* f, int threads,
                                                              size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, threads, shared_bytes, 0);
}

// For the tests of the interpreter: a module from text, and a launch with packed arguments.
// Problems become the fault.
API void* cudasim_module(const char* text) {
  Lock lock;
  try {
    return new ptx::Module(ptx::parse_module(text));
  } catch (const std::exception& error) {
    raise(cudaErrorInvalidPtx, error.what());
    return nullptr;
  }
}
API void cudasim_launch(void* module, const char* name, unsigned blocks, unsigned threads,
                        const char* arguments, size_t size) {
  Lock lock;
  try {
    ptx::Kernel& code = static_cast<ptx::Module*>(module)->at(name);
    code.parse();
    const size_t takes =
        code.parameters.empty() ? 0 : code.parameters.back().offset + code.parameters.back().size;
    if (size != takes) {
      throw ptx::Wrong(code.name + " takes " + std::to_string(takes) + " bytes, not " +
                       std::to_string(size));
    }
    if (!launchable({blocks}, {threads}, code.max_threads)) {
      throw ptx::Wrong(code.name + " takes at most " + std::to_string(code.max_threads) +
                       " threads per block");
    }
    push_kernel(code, {blocks}, {threads}, std::string(arguments, size), stream_of(nullptr));
    drain(stream_of(nullptr));
  } catch (const std::exception& error) {
    raise(cudaErrorInvalidValue, error.what());
  }
}
