// write: kept records, sorted, to ids and scores; winners to the recent ones of their request.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/launch_early.cuh"
#include "backend/cuda/order.cuh"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/sort.cuh"
#include "backend/cuda/stages.hpp"

namespace dosa::cuda {
namespace {

constexpr int kThreads = 512;
constexpr unsigned kFullWarp = 0xFFFFFFFFU;

// Keys whose ascending order is the wanted one: records themselves, or records with their halves swapped (by id).
__device__ __forceinline__ Record swap_halves(Record record) { return record << 32 | record >> 32; }

// What the keys of one query are called.
class KeyNames {
 public:
  __device__ KeyNames(const WriteArgs& args, std::int64_t query)
      : pages_(args.in.pages), request_(request_of(pages_, query)), slots_(args.space == IndexSpace::slot) {
    if (args.gathered) origin_ = request_ * args.in.nk;
    if (args.space == IndexSpace::relative) origin_ += visible_keys(args.in, query).begin;
  }
  __device__ std::int32_t operator()(std::int64_t id) const {
    const std::int64_t key = id - origin_;
    if (!slots_) return static_cast<std::int32_t>(key);
    const std::int64_t block = key >> pages_.page_shift;
    return page_of(pages_, request_, block) * (1 << pages_.page_shift) + static_cast<std::int32_t>(key - (block << pages_.page_shift));
  }

 private:
  const Pages& pages_;
  std::int64_t request_;
  std::int64_t origin_ = 0;
  bool slots_;
};

// All threads, with room for kItems * kThreads records.
template <int kItems>
__device__ void write_row(const WriteArgs& args, typename BinSort<kThreads, kItems>::Shared& shared, std::int64_t r) {
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t query = args.first_row + r;
  const Visible visible = visible_keys(args.in, query);
  const int count = visible.begin < visible.end ? args.kept_count[r] : 0;
  Record item[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = i * kThreads + thread;
    item[i] = at < count ? args.kept[r * args.topk + at] : 0;
    if (args.ascending) item[i] = swap_halves(item[i]);
  }
  BinSort<kThreads, kItems>::run(shared, item, count);
  const KeyNames names(args, query);
  for (int at = thread; at < args.topk; at += kThreads) {
    const bool valid = at < count;
    const Record record = !valid ? 0 : args.ascending ? swap_halves(shared.sorted[at]) : shared.sorted[at];
    args.ids[query * args.ids_stride + at] = valid ? names(id_of(record)) : -1;
    if (args.scores != nullptr) {
      args.scores[query * args.scores_stride + at] = valid ? score_of(record) : __uint_as_float(0xFF800000U);
    }
  }
}

// All threads: the request's last query that sees a key; -1: none does.
__device__ std::int64_t last_query(const Inputs& in, std::int64_t request) {
  __shared__ int last;
  const Pages& pages = in.pages;
  const bool together = pages.page_shift != 0 && pages.owner == nullptr;
  const std::int64_t begin = together ? request * pages.queries : 0;
  const std::int64_t end = together ? begin + pages.queries : in.nq;
  if (threadIdx.x == 0) last = -1;
  __syncthreads();
  for (std::int64_t query = begin + threadIdx.x; query < end; query += kThreads) {
    const Visible visible = visible_keys(in, query);
    if (visible.begin < visible.end && request_of(pages, query) == request) atomicMax(&last, static_cast<int>(query));
  }
  __syncthreads();
  return last;
}

// All threads: the first `count` of the sorted ids in front of the recent ones that are none of them, as decode/recent.cpp has
// it. Of the latter, a warp holds neighbours; what is read is read before anything is written.
template <class Sort>
__device__ void put_in_front(const typename Sort::Shared& shared, const typename Sort::Spread& spread, int count,
                             std::int32_t* recent, std::int64_t width) {
  constexpr int kOld = kMaxRecent / kThreads;
  constexpr int kWarps = kThreads / 32;
  __shared__ int stay[kWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int rounds = static_cast<int>((min(width, std::int64_t{kMaxRecent}) + kThreads - 1) / kThreads);
  const int first = warp * rounds * 32 + lane;
  std::int32_t old[kOld];
  int place[kOld];
#pragma unroll
  for (int i = 0; i < kOld; ++i) old[i] = i < rounds && first + i * 32 < width ? recent[first + i * 32] : -1;
  int mine = 0;
#pragma unroll
  for (int i = 0; i < kOld; ++i) {
    if (i >= rounds) break;
    if (old[i] >= 0 && Sort::contains(shared, spread, static_cast<std::uint64_t>(old[i]))) old[i] = -1;
    const unsigned stays = __ballot_sync(kFullWarp, old[i] >= 0);
    place[i] = mine + __popc(stays & ((1U << lane) - 1));
    mine += __popc(stays);
  }
  if (lane == 0) stay[warp] = mine;
  __syncthreads();
  const int of_warp = lane < kWarps ? stay[lane] : 0;
  const int before = count + __reduce_add_sync(kFullWarp, lane < warp ? of_warp : 0);
  const int total = count + __reduce_add_sync(kFullWarp, of_warp);
#pragma unroll
  for (int i = 0; i < kOld; ++i) {
    if (i >= rounds) break;
    if (old[i] >= 0 && before + place[i] < width) recent[before + place[i]] = old[i];
  }
  for (int i = thread; i < count; i += kThreads) recent[i] = static_cast<std::int32_t>(shared.sorted[i]);
  for (std::int64_t i = total + thread; i < width; i += kThreads) recent[i] = -1;
}

// All threads: the winners of a request's last query, if it is one of these rows, to its recent ids.
template <int kItems>
__device__ void remember(const WriteArgs& args, typename BinSort<kThreads, kItems>::Shared& shared, std::int64_t request) {
  using Sort = BinSort<kThreads, kItems>;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t row = last_query(args.in, request) - args.first_row;
  if (row < 0 || row >= args.rows) return;
  const int found = args.kept_count[row];
  const auto count = static_cast<int>(min(std::int64_t{min(found, kMaxRecent)}, args.recent_width));
  const std::int64_t origin = args.gathered ? request * args.in.nk : 0;
  Record item[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = i * kThreads + thread;
    item[i] = at < found ? args.kept[row * args.topk + at] : 0;
    if (args.ascending) item[i] = swap_halves(item[i]);
  }
  if (count < found) {  // those that come first in the output
    Sort::run(shared, item, found);
#pragma unroll
    for (int i = 0; i < kItems; ++i) item[i] = shared.sorted[i * kThreads + thread];
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    item[i] = static_cast<std::uint64_t>(id_of(args.ascending ? swap_halves(item[i]) : item[i]) - origin);
  }
  const typename Sort::Spread spread = Sort::run(shared, item, count);
  put_in_front<Sort>(shared, spread, count, args.recent + request * args.recent_stride, args.recent_width);
}

// A CTA a row, then one a request.
template <int kItems>
__global__ __launch_bounds__(kThreads, 2) void write_kernel(const __grid_constant__ WriteArgs args) {
  extern __shared__ __align__(8) std::uint8_t raw[];
  auto& shared = *reinterpret_cast<typename BinSort<kThreads, kItems>::Shared*>(raw);
  ptx::wait_for_previous();
  ptx::let_next_begin();
  if (blockIdx.x < args.rows) {
    write_row<kItems>(args, shared, blockIdx.x);
  } else {
    remember<kItems>(args, shared, blockIdx.x - args.rows);
  }
}

template <int kItems>
cudaError_t launch(const WriteArgs& args, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(typename BinSort<kThreads, kItems>::Shared);
  const auto kernel = write_kernel<kItems>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const bool remembers = args.recent != nullptr && args.recent_width > 0;
  const std::int64_t requests = args.in.pages.page_shift != 0 ? args.in.pages.requests : 1;
  return launch_early(kernel, args.rows + (remembers ? requests : 0), kThreads, kSharedBytes, 1, stream, args);
}

}  // namespace

cudaError_t launch_write(const WriteArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  if (args.topk <= 1 * kThreads) return launch<1>(args, stream);
  if (args.topk <= 2 * kThreads) return launch<2>(args, stream);
  if (args.topk <= 4 * kThreads) return launch<4>(args, stream);
  return launch<8>(args, stream);
}

}  // namespace dosa::cuda
