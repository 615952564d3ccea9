// compact: the mask of survivors to lists of key ids. Count, sum up, write; every group of rows by one CTA, so that lists are the same in
// every run.
#include <algorithm>

#include "backend/cuda/order.cuh"

namespace dosa::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kScanThreads = 1024;
constexpr int kStaged = 8192;  // ids
constexpr int kMostRows = 16;  // of a group
constexpr unsigned kFull = 0xFFFFFFFFU;

/// The words of a row that may have bits: runs in which it sees something.
struct Words {
  const uint4* data;
  int begin;  // in fours of words
  int end;
};

__device__ Words words_of(const CompactArgs& args, std::int64_t row) {
  constexpr int kFours = kMaskRunWords / 4;
  if (row >= args.rows) return {nullptr, 0, 0};
  const std::int64_t query = args.first_row + row;
  const Visible visible = visible_in(args.keys, args.ks, args.ke, query);
  const int begin = static_cast<int>(visible.begin);
  const int end = static_cast<int>(visible.end);
  const bool none = begin >= end || (args.screened != nullptr && args.screened[row] == 0);
  const auto* data = reinterpret_cast<const uint4*>(args.mask + row * args.mask_stride);
  if (none) return {data, 0, 0};
  return {data, begin / kMaskRun * kFours, (end + kMaskRun - 1) / kMaskRun * kFours};
}

/// The words of a group's rows, in shared memory.
struct GroupWords {
  Words row[kMostRows];
  int rows;
  int begin;  // of all rows
  int end;

  /// All threads; ends with a barrier.
  __device__ void find(const CompactArgs& args) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < args.group) row[thread] = words_of(args, std::int64_t{blockIdx.x} * args.group + thread);
    __syncthreads();
    if (thread == 0) {
      rows = args.group;
      begin = end = 0;
      for (int r = 0; r < rows; ++r) {
        if (row[r].begin >= row[r].end) continue;
        begin = end == 0 ? row[r].begin : min(begin, row[r].begin);
        end = max(end, row[r].end);
      }
    }
    __syncthreads();
  }

  /// Four words of all rows together; `bits` grows by those of each.
  __device__ uint4 load(int i, int& bits) const;
};

__device__ int bits_of(uint4 words) { return __popc(words.x) + __popc(words.y) + __popc(words.z) + __popc(words.w); }

__device__ uint4 GroupWords::load(int i, int& bits) const {
  uint4 all{0, 0, 0, 0};
  for (int r = 0; r < rows; ++r) {
    if (i < row[r].begin || i >= row[r].end) continue;
    const uint4 four = row[r].data[i];
    bits += bits_of(four);
    all = {all.x | four.x, all.y | four.y, all.z | four.z, all.w | four.w};
  }
  return all;
}

/// Sum of `value` over the threads before this one, and over all in `total`.
template <class T, int kBlock>
__device__ T sum_before(T value, T& total) {
  __shared__ T warps[32];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  T sum = value;
  for (int d = 1; d < 32; d *= 2) {
    const T below = __shfl_up_sync(kFull, sum, d);
    if (lane >= d) sum += below;
  }
  __syncthreads();  // the last use of `warps`
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    T of_warp = lane < kBlock / 32 ? warps[lane] : T{0};
    for (int d = 1; d < 32; d *= 2) {
      const T below = __shfl_up_sync(kFull, of_warp, d);
      if (lane >= d) of_warp += below;
    }
    warps[lane] = of_warp;
  }
  __syncthreads();
  total = warps[kBlock / 32 - 1];
  return sum - value + (warp > 0 ? warps[warp - 1] : T{0});
}

__device__ void raise(std::uint64_t* counter, std::int64_t by) {
  if (counter != nullptr && by != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(by));
  }
}

__global__ void __launch_bounds__(kThreads) count_kernel(const CompactArgs args) {
  __shared__ GroupWords words;
  words.find(args);
  int count = 0;
  int bits = 0;
#pragma unroll 2
  for (int i = words.begin + static_cast<int>(threadIdx.x); i < words.end; i += kThreads) count += bits_of(words.load(i, bits));
  int total = 0;
  int total_bits = 0;
  sum_before<int, kThreads>(count, total);
  sum_before<int, kThreads>(bits, total_bits);
  if (threadIdx.x != 0) return;
  args.count[blockIdx.x] = total;
  int rows = 0;
  for (int r = 0; r < words.rows; ++r) rows += words.row[r].begin < words.row[r].end ? 1 : 0;
  raise(args.survivors, total_bits);
  raise(args.listed, std::int64_t{total} * rows);
}

__global__ void __launch_bounds__(kScanThreads) offset_kernel(const CompactArgs args) {
  const std::int64_t groups = (args.rows + args.group - 1) / args.group;
  std::int64_t base = 0;
  for (std::int64_t first = 0; first < groups; first += kScanThreads) {
    const std::int64_t g = first + threadIdx.x;
    const std::int64_t count = g < groups ? args.count[g] : 0;
    std::int64_t total = 0;
    const std::int64_t offset = base + sum_before<std::int64_t, kScanThreads>(count, total);
    if (g < groups) {
      const bool fits = offset + count <= args.capacity;
      args.offset[g] = fits ? offset : 0;
      if (!fits) {
        args.count[g] = 0;
        for (std::int64_t r = g * args.group; r < min((g + 1) * args.group, args.rows); ++r) args.lost[r] = 1;
      }
    }
    base += total;
  }
}

__global__ void __launch_bounds__(kThreads) list_kernel(const CompactArgs args) {
  const std::int64_t group = blockIdx.x;
  if (args.count[group] == 0) return;
  // Ids of a tile go to memory by way of shared memory, side by side, unless there are too many of them.
  __shared__ std::int32_t staged[kStaged];
  __shared__ GroupWords words;
  words.find(args);
  int unused = 0;
  const int thread = static_cast<int>(threadIdx.x);
  const auto load = [&](int i) { return words.load(i, unused); };
  std::int32_t* list = args.ids + args.offset[group];
  uint4 next = load(words.begin + thread);
  for (int base = words.begin; base < words.end; base += kThreads) {
    const uint4 four = next;
    next = load(base + kThreads + thread);
    int total = 0;
    const int at = sum_before<int, kThreads>(bits_of(four), total);
    std::int32_t* to = total <= kStaged ? staged + at : list + at;
    const std::uint32_t word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int64_t first = mask_key(4 * static_cast<std::int64_t>(base + thread) + j, 31);
      for (std::uint32_t left = word[j]; left != 0;) {
        const int step = __clz(static_cast<int>(left));  // the highest bit is the first step of the run
        left &= ~(0x80000000U >> step);
        *to++ = static_cast<std::int32_t>(key_at(args.keys, first + mask_key(0, 31 - step)));
      }
    }
    if (total <= kStaged) {
      __syncthreads();
      for (int i = thread; i < total; i += kThreads) list[i] = staged[i];
    }
    list += total;
  }
}

}  // namespace

cudaError_t launch_compact(const CompactArgs& args, cudaStream_t stream) {
  if (args.rows <= 0) return cudaSuccess;
  const auto groups = static_cast<unsigned>((args.rows + args.group - 1) / args.group);
  count_kernel<<<groups, kThreads, 0, stream>>>(args);
  offset_kernel<<<1, kScanThreads, 0, stream>>>(args);
  list_kernel<<<groups, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace dosa::cuda
