// How a warp moves elements: 16 bytes per thread and access, whole sectors of memory per request.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fsdpx::cuda {

constexpr int kWarp = 32;  // threads

// Elements that a thread works on at once when it reads `From` and writes `To`: 16 bytes of the
// smaller of the two.
template <typename From, typename To>
inline constexpr int kVector =
    static_cast<int>(16 / (sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To)));

// kNumel consecutive elements of a warp's kWarp * kNumel. Every thread of the warp must take part
// in load() and arranged(), with the address of the warp's first element, a multiple of 16 bytes.
//
// A thread that needs several words of 16 bytes would, one after the other, leave half of each
// 32-byte sector to the next request. So two neighbours share: one reads the even words of both,
// the other the odd ones, and then they swap what belongs to the other.
template <typename T, int kNumel>
struct Vector {
  static constexpr int kNumWords = static_cast<int>(sizeof(T)) * kNumel / 16;
  static_assert(kNumWords >= 1 && sizeof(T) * kNumel % 16 == 0);
  struct Words {
    uint4 at[kNumWords];

    __device__ __forceinline__ void store(T* warp_dst) const {
#pragma unroll
      for (int k = 0; k < kNumWords; ++k) reinterpret_cast<uint4*>(warp_dst)[index(k)] = at[k];
    }
  };
  union {
    Words words;
    T elements[kNumel];
  };

  __device__ __forceinline__ Vector() {}

  __device__ __forceinline__ void load(const T* warp_src) {
    Words read;
#pragma unroll
    for (int k = 0; k < kNumWords; ++k) {
      read.at[k] = reinterpret_cast<const uint4*>(warp_src)[index(k)];
    }
    if constexpr (kNumWords == 1) {
      words = read;
    } else {
      const bool odd = is_odd();
#pragma unroll
      for (int k = 0; k < kHalf; ++k) {
        const uint4 kept = select(odd, read.at[k + kHalf], read.at[k]);
        const uint4 got = swap(select(odd, read.at[k], read.at[k + kHalf]));
        words.at[2 * k] = select(odd, got, kept);
        words.at[2 * k + 1] = select(odd, kept, got);
      }
    }
  }

  // The words as this thread stores them.
  __device__ __forceinline__ Words arranged() const {
    if constexpr (kNumWords == 1) {
      return words;
    } else {
      Words out;
      const bool odd = is_odd();
#pragma unroll
      for (int k = 0; k < kHalf; ++k) {
        const uint4 kept = select(odd, words.at[2 * k + 1], words.at[2 * k]);
        const uint4 got = swap(select(odd, words.at[2 * k], words.at[2 * k + 1]));
        out.at[k] = select(odd, got, kept);
        out.at[k + kHalf] = select(odd, kept, got);
      }
      return out;
    }
  }

  __device__ __forceinline__ void store(T* warp_dst) const { arranged().store(warp_dst); }

 private:
  static constexpr int kHalf = kNumWords / 2;

  static __device__ __forceinline__ bool is_odd() { return (threadIdx.x & 1) != 0; }

  // The k-th word that this thread reads or writes, of the warp's.
  static __device__ __forceinline__ int index(int k) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    return kNumWords == 1 ? lane : lane / 2 * 2 * kNumWords + 2 * k + lane % 2;
  }

  static __device__ __forceinline__ uint4 select(bool first, uint4 a, uint4 b) {
    return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
  }

  static __device__ __forceinline__ uint4 swap(uint4 word) {
    constexpr unsigned kAll = 0xffffffffu;
    return make_uint4(__shfl_xor_sync(kAll, word.x, 1), __shfl_xor_sync(kAll, word.y, 1),
                      __shfl_xor_sync(kAll, word.z, 1), __shfl_xor_sync(kAll, word.w, 1));
  }
};

}  // namespace fsdpx::cuda
