// Sorting in a CTA: a bitonic network over kItems keys of each thread (steps inside a thread's registers, inside a warp by
// shuffles, across warps through shared memory), and a faster way for keys that spread evenly.
#pragma once

#include <cstdint>

namespace dosa::cuda {

/// All threads: sorts ascending. Key thread * kItems + i of the sequence is item i of a thread; `exchange`, in shared
/// memory, has room for all of them.
template <int kThreads, int kItems, class Key>
__device__ void sort(Key (&item)[kItems], Key* exchange) {
  const int first = static_cast<int>(threadIdx.x) * kItems;
  const auto keep = [&](Key& mine, Key other, int element, int stride, int size) {
    const bool lower = (element & stride) == 0;
    const bool ascending = (element & size) == 0;
    mine = (other < mine) == (lower == ascending) ? other : mine;
  };
  for (int size = 2; size <= kItems * kThreads; size *= 2) {
    int stride = size / 2;
    for (; stride >= kItems * 32; stride /= 2) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kItems; ++i) exchange[i * kThreads + threadIdx.x] = item[i];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        keep(item[i], exchange[i * kThreads + (threadIdx.x ^ stride / kItems)], first + i, stride, size);
      }
    }
    for (; stride >= kItems; stride /= 2) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        keep(item[i], __shfl_xor_sync(0xFFFFFFFFU, item[i], stride / kItems), first + i, stride, size);
      }
    }
#pragma unroll
    for (int inside = kItems / 2; inside > 0; inside /= 2) {
      if (inside > stride) continue;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if ((i & inside) != 0) continue;
        const bool ascending = ((first + i) & size) == 0;
        const Key low = item[i], high = item[i + inside];
        const bool swapped = (high < low) == ascending;
        item[i] = swapped ? high : low;
        item[i + inside] = swapped ? low : high;
      }
    }
  }
}

/// Keys that spread evenly over their range, as the tail of a bell does well enough, are few in each of so many bins, and a
/// key's rank in its bin is soon counted.
template <int kThreads, int kItems>
class BinSort {
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBinBits = 11;
  static constexpr int kBins = 1 << kBinBits;
  static constexpr int kEach = kBins / kThreads;
  static constexpr unsigned kFull = 0xFFFFFFFFU;
  static constexpr std::uint32_t kMostInBin = 192;  // beyond, the network is faster
  static_assert(kBins % kThreads == 0 && kWarps <= 32);

 public:
  using Key = std::uint64_t;
  struct Shared {
    Key sorted[kItems * kThreads];
    Key binned[kItems * kThreads];
    std::uint32_t start[kBins + 1];
    Key warp_low[kWarps], warp_high[kWarps];
    std::uint32_t warp_sum[kWarps], warp_most[kWarps];
  };

  /// All threads: the first `count` of shared.sorted become the keys, ascending. Key i * kThreads + thread of them is item i of a
  /// thread; keys are distinct. Begins and ends with a barrier.
  static __device__ void run(Shared& shared, Key (&item)[kItems], int count) {
    const int thread = static_cast<int>(threadIdx.x);
    const Spread spread = spread_of(shared, item, count);
    std::uint32_t place[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * kThreads + thread < count) place[i] = atomicAdd(&shared.start[spread.bin(item[i])], 1U);
    }
    __syncthreads();
    if (sum_bins(shared) > kMostInBin) {
      network(shared, item, count);
      return;
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * kThreads + thread < count) shared.binned[shared.start[spread.bin(item[i])] + place[i]] = item[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * kThreads + thread >= count) continue;
      const int bin = spread.bin(item[i]);
      const std::uint32_t begin = shared.start[bin], end = shared.start[bin + 1];
      std::uint32_t rank = begin;
      for (std::uint32_t at = begin; at < end; ++at) rank += shared.binned[at] < item[i] ? 1 : 0;
      shared.sorted[rank] = item[i];
    }
    __syncthreads();
  }

 private:
  // Which bin a key belongs to.
  struct Spread {
    Key low, high;
    int shift;
    __device__ int bin(Key key) const { return static_cast<int>((key - low) >> shift); }
  };

  // The range of the keys; empties the bins.
  static __device__ Spread spread_of(Shared& shared, const Key (&item)[kItems], int count) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    Key low = ~Key{0}, high = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * kThreads + thread >= count) continue;
      low = min(low, item[i]);
      high = max(high, item[i]);
    }
    for (int step = 16; step > 0; step /= 2) {
      low = min(low, __shfl_xor_sync(kFull, low, step));
      high = max(high, __shfl_xor_sync(kFull, high, step));
    }
    __syncthreads();
    for (int bin = thread; bin <= kBins; bin += kThreads) shared.start[bin] = 0;
    if (lane == 0) {
      shared.warp_low[warp] = low;
      shared.warp_high[warp] = high;
    }
    __syncthreads();
    low = lane < kWarps ? shared.warp_low[lane] : ~Key{0};
    high = lane < kWarps ? shared.warp_high[lane] : 0;
    for (int step = kWarps / 2; step > 0; step /= 2) {
      low = min(low, __shfl_xor_sync(kFull, low, step));
      high = max(high, __shfl_xor_sync(kFull, high, step));
    }
    low = __shfl_sync(kFull, low, 0);
    high = __shfl_sync(kFull, high, 0);
    const int bits = 64 - __clzll(static_cast<long long>(high - low));  // of an empty row: of nonsense, which no key meets
    return {low, high, max(bits - kBinBits, 0)};
  }

  // From counts to where each bin begins; returns the largest count.
  static __device__ std::uint32_t sum_bins(Shared& shared) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    std::uint32_t count[kEach], sum = 0, most = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      count[i] = shared.start[thread * kEach + i];
      sum += count[i];
      most = max(most, count[i]);
    }
    std::uint32_t up_to = sum;
    for (int step = 1; step < 32; step *= 2) {
      const std::uint32_t other = __shfl_up_sync(kFull, up_to, step);
      if (lane >= step) up_to += other;
    }
    most = __reduce_max_sync(kFull, most);
    if (lane == 31) shared.warp_sum[warp] = up_to;
    if (lane == 0) shared.warp_most[warp] = most;
    __syncthreads();
    std::uint32_t at = up_to - sum + __reduce_add_sync(kFull, lane < warp ? shared.warp_sum[lane] : 0U);
    most = __reduce_max_sync(kFull, lane < kWarps ? shared.warp_most[lane] : 0U);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      shared.start[thread * kEach + i] = at;
      at += count[i];
    }
    if (thread == kThreads - 1) shared.start[kBins] = at;
    __syncthreads();
    return most;
  }

  // Rare, so kept out of the registers of what calls it.
  static __device__ __noinline__ void network(Shared& shared, Key (&item)[kItems], int count) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * kThreads + static_cast<int>(threadIdx.x) >= count) item[i] = ~Key{0};
    }
    sort<kThreads>(item, shared.sorted);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) shared.sorted[threadIdx.x * kItems + i] = item[i];
    __syncthreads();
  }
};

}  // namespace dosa::cuda
