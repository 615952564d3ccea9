// write: a row's kept records, sorted, to ids and scores; winners to the recent ones of their request. The end of selection.
#pragma once

#include <cstdint>

#include "backend/cuda/count.cuh"
#include "backend/cuda/order.cuh"
#include "backend/cuda/sort.cuh"
#include "backend/cuda/stages.hpp"

namespace dosa::cuda {

// Keys whose ascending order is the wanted one: records themselves, or records with their halves swapped (by id).
__device__ __forceinline__ Record swap_halves(Record record) { return record << 32 | record >> 32; }

// What the keys of one query are called.
class KeyNames {
 public:
  __device__ KeyNames(const OutputArgs& args, std::int64_t query)
      : pages_(args.in.pages), request_(request_of(pages_, query)), slots_(args.space == IndexSpace::slot) {
    if (args.gathered) origin_ = request_ * args.in.nk;
    first_ = origin_;
    if (args.space == IndexSpace::relative) first_ += visible_keys(args.in, query).begin;
  }
  __device__ std::int32_t operator()(std::int64_t id) const {
    const std::int64_t key = id - first_;
    if (!slots_) return static_cast<std::int32_t>(key);
    const std::int64_t block = key >> pages_.page_shift;
    return page_of(pages_, request_, block) * (1 << pages_.page_shift) + static_cast<std::int32_t>(key - (block << pages_.page_shift));
  }
  /// The position in the request.
  __device__ std::int32_t position(std::int64_t id) const { return static_cast<std::int32_t>(id - origin_); }

 private:
  const Pages& pages_;
  std::int64_t request_;
  std::int64_t origin_ = 0;  // number of the request's first key,
  std::int64_t first_;       // and of the one that is called 0
  bool slots_;
};

// A set of ids in shared memory: as many places as twice the most ids, open addressing.
template <int kThreads, int kPlaces>
class IdSet {
  static constexpr int kBits = 31 - __builtin_clz(kPlaces);
  static_assert(kPlaces == 1 << kBits);
  static constexpr std::int32_t kNone = -1;

 public:
  /// All threads; ends with a barrier.
  __device__ explicit IdSet(std::int32_t* places) : places_(places) {
    for (int i = static_cast<int>(threadIdx.x); i < kPlaces; i += kThreads) places_[i] = kNone;
    __syncthreads();
  }
  __device__ void insert(std::int32_t id) {
    int at = first(id);
    while (atomicCAS(&places_[at], kNone, id) != kNone) at = (at + 1) % kPlaces;
  }
  [[nodiscard]] __device__ bool contains(std::int32_t id) const {
    for (int at = first(id); places_[at] != kNone; at = (at + 1) % kPlaces) {
      if (places_[at] == id) return true;
    }
    return false;
  }

 private:
  static __device__ int first(std::int32_t id) { return static_cast<int>(static_cast<std::uint32_t>(id) * 0x9E3779B1U >> (32 - kBits)); }
  std::int32_t* places_;
};

// All threads: does a later query of the same request see a key?
template <int kThreads>
__device__ bool is_last_query(const Inputs& in, std::int64_t query) {
  const Pages& pages = in.pages;
  const std::int64_t request = request_of(pages, query);
  const bool together = pages.page_shift != 0 && pages.owner == nullptr;
  const std::int64_t end = together ? (request + 1) * pages.queries : in.nq;
  bool later = false;
  for (std::int64_t other = query + 1 + threadIdx.x; other < end && !later; other += kThreads) {
    const Visible visible = visible_keys(in, other);
    later = visible.begin < visible.end && request_of(pages, other) == request;
  }
  return __syncthreads_or(later) == 0;
}

// The end of a row in a CTA, kItems records a thread.
template <int kThreads, int kItems>
class RowWriter {
  using Sort = BinSort<kThreads, kItems>;
  static constexpr int kRecords = kThreads * kItems;

 public:
  using Shared = typename Sort::Shared;
  static constexpr int kMost = kRecords;

  /// All threads: `count` distinct records, at most kMost, and no more than K where ids ascend; the K first of them become the row's
  /// output. False, and nothing is written, where the K-th (-inf if there are fewer) lies below tau. The records may lie where
  /// `shared` is. Not inlined: its registers are not those of what calls it.
  static __device__ __noinline__ bool write(const OutputArgs& args, Shared& shared, const Record* records, int count, std::int64_t row, const float* tau) {
    sort(args, shared, records, count);
    if (tau != nullptr && !reaches(args, shared, count, *tau)) return false;
    const std::int64_t query = args.first_row + row;
    count = min(count, args.topk);
    const KeyNames names(args, query);
    for (int at = static_cast<int>(threadIdx.x); at < args.topk; at += kThreads) {
      const bool valid = at < count;
      const Record record = valid ? record_at(args, shared, at) : 0;
      args.ids[query * args.ids_stride + at] = valid ? names(id_of(record)) : -1;
      if (args.scores != nullptr) {
        args.scores[query * args.scores_stride + at] = valid ? score_of(record) : __uint_as_float(0xFF800000U);
      }
    }
    if (args.counters != nullptr && threadIdx.x == 0) count_row(args, row);
    if (args.recent != nullptr && args.recent_width > 0 && count > 0 && is_last_query<kThreads>(args.in, query)) {
      put_in_front(args, shared, names, count, request_of(args.in.pages, query));
    }
    return true;
  }

 private:
  static __device__ void sort(const OutputArgs& args, Shared& shared, const Record* records, int count) {
    Record item[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x);
      item[i] = at < count ? records[at] : 0;
      if (args.ascending) item[i] = swap_halves(item[i]);
    }
    Sort::run(shared, item, count);
  }

  static __device__ bool reaches(const OutputArgs& args, const Shared& shared, int count, float tau) {
    const bool enough = count >= args.topk;
    bool below = !enough && !(__uint_as_float(0xFF800000U) >= tau);
    for (int i = static_cast<int>(threadIdx.x); enough && i < args.topk; i += kThreads) {
      below = below || !(tau_of(record_at(args, shared, i)) >= tau);
    }
    return __syncthreads_or(below) == 0;
  }

  static __device__ Record record_at(const OutputArgs& args, const Shared& shared, int i) {
    return args.ascending ? swap_halves(shared.sorted[i]) : shared.sorted[i];
  }

  // All threads: the sorted ids in front of the recent ones that are none of them, as decode/recent.cpp has it. Of the latter, a
  // warp holds neighbours; what is read is read before anything is written.
  static __device__ void put_in_front(const OutputArgs& args, Shared& shared, const KeyNames& names, int count, std::int64_t request) {
    constexpr int kOld = kMaxRecent / kThreads;
    constexpr int kWarps = kThreads / 32;
    __shared__ int stay[kWarps];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    std::int32_t* recent = args.recent + request * args.recent_stride;
    const std::int64_t width = args.recent_width;
    const auto id_at = [&](int i) { return names.position(id_of(record_at(args, shared, i))); };
    count = static_cast<int>(min(std::int64_t{min(count, kMaxRecent)}, width));
    IdSet<kThreads, 2 * kRecords> winners(reinterpret_cast<std::int32_t*>(shared.binned));
    for (int i = thread; i < count; i += kThreads) winners.insert(id_at(i));
    __syncthreads();

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
      if (old[i] >= 0 && winners.contains(old[i])) old[i] = -1;
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
    for (int i = thread; i < count; i += kThreads) recent[i] = id_at(i);
    for (std::int64_t i = total + thread; i < width; i += kThreads) recent[i] = -1;
  }
};

}  // namespace dosa::cuda
