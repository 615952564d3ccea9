// A bitonic network over kItems keys of each thread of a CTA: steps inside a thread's registers, inside a warp by
// shuffles, across warps through shared memory.
#pragma once

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

}  // namespace dosa::cuda
