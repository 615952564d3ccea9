// winners, seed, tau: which keys become witnesses, and what they prove.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/order.cuh"
#include "backend/cuda/prepare.hpp"
#include "backend/cuda/rows.cuh"
#include "backend/cuda/sort.cuh"
#include "certificate/hopper_bound.hpp"

namespace dosa::cuda {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kFullWarp = 0xFFFFFFFFU;
constexpr std::uint32_t kNoId = 0xFFFFFFFFU;

// All threads: how many of the flags of earlier threads are set; `total` gets the number of all. Each thread has
// `mine`.
__device__ int count_before(int mine, int& total) {
  __shared__ int warp_sum[kThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int up_to = mine;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kFullWarp, up_to, step);
    if (lane >= step) up_to += other;
  }
  __syncthreads();
  if (lane == 31) warp_sum[warp] = up_to;
  __syncthreads();
  int before = up_to - mine;
  total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += warp_sum[w];
    total += warp_sum[w];
  }
  return before;
}

// Position of the first of n ascending ids that is not below `id`.
__device__ int lower_bound(const std::int32_t* ids, int n, std::int64_t id) {
  int low = 0;
  while (n > 0) {
    const int half = n / 2;
    if (ids[low + half] < id) {
      low += half + 1;
      n -= half + 1;
    } else {
      n = half;
    }
  }
  return low;
}

// ---------------------------------------------------------------------------------------------------------------
// winners

template <int kItems>
__global__ __launch_bounds__(kThreads) void winners_kernel(WinnersArgs args) {
  __shared__ std::uint32_t exchange[kItems * kThreads];
  const std::int64_t list = blockIdx.x;
  const int length = min(args.length, kItems * kThreads);
  const int count = args.count == nullptr ? length : min(args.count[list], length);
  std::uint32_t item[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x);
    item[i] = kNoId;
    if (at >= count) continue;
    const std::int64_t from = list * args.stride + at;
    const std::int32_t id = args.kept != nullptr ? id_of(args.kept[from]) : args.ids[from];
    if (id >= 0 && id < args.nk) item[i] = static_cast<std::uint32_t>(id);
  }
  sort<kThreads>(item, exchange);

  // The first of equal ids stays. A thread's items follow those of the thread before.
  __syncthreads();
  exchange[threadIdx.x] = item[kItems - 1];
  __syncthreads();
  std::uint32_t previous = threadIdx.x == 0 ? kNoId : exchange[threadIdx.x - 1];
  unsigned stays = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (item[i] != kNoId && (item[i] != previous || (i == 0 && threadIdx.x == 0))) stays |= 1U << i;
    previous = item[i];
  }
  int total = 0;
  int at = count_before(__popc(stays), total);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if ((stays >> i & 1) != 0) args.sorted[list * args.sorted_stride + at++] = static_cast<std::int32_t>(item[i]);
  }
  if (threadIdx.x == 0) args.sorted_count[list] = total;
}

template <int kItems>
cudaError_t launch(const WinnersArgs& args, cudaStream_t stream) {
  if constexpr (kItems < kMaxWinners / kThreads) {
    if (args.length > kItems * kThreads) return launch<2 * kItems>(args, stream);
  }
  winners_kernel<kItems><<<static_cast<unsigned>(args.lists), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

// ------------------------------------------------------------------------------------------------------------------
// seed

// i-th of n keys spread evenly over the visible ones.
__device__ std::int64_t spread_key(const Visible& visible, std::int64_t n, std::int64_t i) {
  return visible.begin + i * (visible.end - visible.begin) / n;
}

// From the first key to the last one that a row of the group which wants witnesses sees.
__device__ Visible visible_together(const SeedArgs& args, std::int64_t first) {
  Visible all{args.in.nk, 0};
  for (std::int64_t r = first; r < min(first + args.group, args.rows); ++r) {
    const Visible visible = visible_keys(args.in, args.first_row + r);
    const bool wanted = (args.budget == nullptr || args.budget[r] != 0) && visible.end - visible.begin >= args.min_context;
    if (!wanted || visible.begin >= visible.end) continue;
    all.begin = min(all.begin, visible.begin);
    all.end = max(all.end, visible.end);
  }
  return all;
}

__global__ __launch_bounds__(kThreads) void seed_kernel(SeedArgs args) {
  extern __shared__ std::uint16_t new_before[];  // [topk] spread keys before this one that are no winners
  const std::int64_t g = blockIdx.x;
  const std::int64_t r = g * args.group;
  const Visible visible = visible_together(args, r);
  if (visible.begin >= visible.end) {
    if (threadIdx.x == 0) {
      args.offset[g] = g * args.ids_stride;
      args.count[g] = 0;
    }
    return;
  }
  const std::int64_t first_near = max(visible.begin, visible.end - args.topk);
  const int near = static_cast<int>(visible.end - first_near);
  std::int32_t* out = args.ids + g * args.ids_stride;

  // Winners below the nearest keys: a stretch of the ascending list.
  const std::int32_t* winners = nullptr;
  int chained = 0;
  if (args.winners != nullptr) {
    const std::int64_t list = r / args.rows_per_list;
    const std::int32_t* all = args.winners + list * args.winners_stride;
    const int count = args.winners_count[list];
    const int low = lower_bound(all, count, visible.begin);
    winners = all + low;
    chained = lower_bound(winners, count - low, first_near);
  }

  // Spread keys below the nearest ones that are no winners.
  const int wanted = args.topk + args.topk / 2;
  int spread = 0, fresh = 0;
  std::int64_t step_count = 0;
  if (chained + near < wanted) {
    step_count =
        min(min(std::int64_t{args.topk}, 2 * std::int64_t{wanted - chained - near}), visible.end - visible.begin);
    for (std::int64_t low = 0, n = step_count; n > 0;) {  // as many of them lie below first_near
      const std::int64_t half = n / 2;
      if (spread_key(visible, step_count, low + half) < first_near) {
        low += half + 1;
        n -= half + 1;
        spread = static_cast<int>(low);
      } else {
        n = half;
      }
    }
    for (int first = 0; first < spread; first += kThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      bool is_new = false;
      int rank = 0;
      std::int64_t key = 0;
      if (i < spread) {
        key = spread_key(visible, step_count, i);
        rank = lower_bound(winners, chained, key);
        is_new = rank == chained || winners[rank] != key;
      }
      int total = 0;
      const int before = fresh + count_before(is_new ? 1 : 0, total);
      if (i < spread) new_before[i] = static_cast<std::uint16_t>(before);
      if (is_new) out[rank + before] = static_cast<std::int32_t>(key);
      fresh += total;
    }
    __syncthreads();
  }

  for (int i = static_cast<int>(threadIdx.x); i < chained; i += kThreads) {
    int before = 0;  // new spread keys below this winner
    if (spread > 0) {
      int low = 0;
      for (int n = spread; n > 0;) {
        const int half = n / 2;
        if (spread_key(visible, step_count, low + half) < winners[i]) {
          low += half + 1;
          n -= half + 1;
        } else {
          n = half;
        }
      }
      before = low < spread ? new_before[low] : fresh;
    }
    out[i + before] = winners[i];
  }
  for (int i = static_cast<int>(threadIdx.x); i < near; i += kThreads) {
    out[chained + fresh + i] = static_cast<std::int32_t>(first_near) + i;
  }
  if (threadIdx.x == 0) {
    args.offset[g] = g * args.ids_stride;
    args.count[g] = chained + fresh + near;
  }
}

// -------------------------------------------------------------------------------------------------------------------
// tau

// A warp a row: the last of K kept records is the K-th.
__global__ __launch_bounds__(kThreads) void tau_kernel(TauArgs args) {
  const std::int64_t r = blockIdx.x * std::int64_t{kThreads / 32} + threadIdx.x / 32;
  if (r >= args.rows) return;
  const bool enough = args.kept_count[r] >= args.topk;
  Record last = 0;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) % 32; enough && i < args.topk; i += 32) last = max(last, args.kept[r * args.topk + i]);
  for (int step = 16; step > 0; step /= 2) last = max(last, __shfl_xor_sync(kFullWarp, last, step));
  if (threadIdx.x % 32 != 0) return;
  const float tau = enough ? tau_of(last) : __uint_as_float(0xFF800000U);
  const std::int64_t row = row_of(args.pass, r);
  if (args.raise && !(tau > args.tau[row])) return;
  args.tau[row] = tau;
  if (args.raise && args.lowered != nullptr) args.lowered[row] = hopper_tau(tau, 1);
}

}  // namespace

cudaError_t launch_winners(const WinnersArgs& args, cudaStream_t stream) {
  return args.lists == 0 ? cudaSuccess : launch<1>(args, stream);
}

cudaError_t launch_seed(const SeedArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const std::size_t bytes = static_cast<std::size_t>(args.topk) * sizeof(std::uint16_t);
  const std::int64_t groups = (args.rows + args.group - 1) / args.group;
  seed_kernel<<<static_cast<unsigned>(groups), kThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_tau(const TauArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  constexpr int kRows = kThreads / 32;
  tau_kernel<<<static_cast<unsigned>((args.rows + kRows - 1) / kRows), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace dosa::cuda
