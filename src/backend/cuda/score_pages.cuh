// score of keys in pages, for a few queries of each request: decoding.
//
// Reading every key once is what takes the time. So every CTA gets the same number of stages of keys, whatever the lengths
// are: the keys that each tile of queries sees, stage by stage, tile after tile, are cut into as many equal shares. A tile is
// queries of one request, in no more columns than they fill: B = 32, 64 or 128 rows of query heads, A = keys, 64 a warpgroup.
#pragma once

#include "backend/cuda/layout.hpp"
#include "backend/cuda/order.cuh"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/rows.cuh"
#include "backend/cuda/score_tile.cuh"
#include "backend/cuda/wgmma.cuh"

namespace dosa::cuda {

/// Work of a CTA between two changes of queries.
struct PageUnit {
  std::int32_t row;      // first of the tile's queries, in the pass
  std::int32_t rows;
  std::int32_t request;
  std::int32_t begin;    // keys that any of the queries sees
  std::int32_t end;
  std::int32_t key;      // first of the unit
  std::int32_t stages;   // 0: no more units
};

template <int kColumns>
struct ScorePagesShared {
  static constexpr int kWarpgroups = 4;                   // of math, 64 keys each,
  static constexpr int kThreads = kWarpgroups * 128 + 64;  // and two warps that bring data
  static constexpr int kStages = 4;
  static constexpr int kStageKeys = 64 * kWarpgroups;
  alignas(1024) std::uint8_t keys[kStages][kStageKeys * kDim];
  alignas(1024) std::uint8_t queries[2][kColumns * kDim];
  float scales[kStages][kStageKeys];
  float weights[2][kColumns];
  PageUnit unit[2];
  std::uint64_t keys_full[kStages];
  std::uint64_t keys_empty[kStages];
  std::uint64_t unit_full[2];
  std::uint64_t unit_empty[2];
};

/// A whole warp: this CTA's share of all stages of keys, as units. Lanes hold the next 32 tiles.
template <class Columns>
class PageShare {
  static constexpr int kStageKeys = ScorePagesShared<Columns::kColumns>::kStageKeys;

 public:
  __device__ explicit PageShare(const ScoreArgs& args) : args_(args) {
    together_ = static_cast<int>(queries_together(args.in.pages, args.pass));
    tiles_each_ = (together_ + Columns::kQueries - 1) / Columns::kQueries;
    tiles_ = static_cast<int>(count_of(args.pass, args.rows) / together_) * tiles_each_;
    int all = 0;
    for (int tile = 0; tile < tiles_; tile += 32) {
      look_at(tile, all);
      all = last_of_warp(up_to_);
    }
    at_ = static_cast<int>(std::int64_t{all} * blockIdx.x / gridDim.x);
    end_ = static_cast<int>(std::int64_t{all} * (blockIdx.x + 1) / gridDim.x);
    if (tiles_ > 32) look_at(0, 0);
  }

  /// False after the last.
  __device__ bool next(PageUnit& unit) {
    if (at_ >= end_) return false;
    for (int seen = last_of_warp(up_to_); seen <= at_; seen = last_of_warp(up_to_)) look_at(first_ + 32, seen);
    const int owner = __ffs(static_cast<int>(__ballot_sync(kAll, up_to_ > at_))) - 1;
    const auto of_owner = [&](auto value) { return __shfl_sync(kAll, value, owner); };
    const int up_to = of_owner(up_to_);
    const int from = up_to - of_owner(stages_);
    unit.row = of_owner(row_);
    unit.rows = of_owner(rows_);
    unit.request = of_owner(request_);
    unit.begin = of_owner(begin_);
    unit.end = of_owner(key_end_);
    unit.key = unit.begin / kStageKeys * kStageKeys + (at_ - from) * kStageKeys;
    unit.stages = min(up_to, end_) - at_;
    at_ += unit.stages;
    return true;
  }

 private:
  static constexpr unsigned kAll = 0xFFFFFFFFU;
  static __device__ int last_of_warp(int value) { return __shfl_sync(kAll, value, 31); }

  // Tiles [first, first + 32), before which lie `before` stages.
  __device__ void look_at(int first, int before) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int tile = first + lane;
    first_ = first;
    row_ = tile / tiles_each_ * together_ + tile % tiles_each_ * Columns::kQueries;
    rows_ = min(Columns::kQueries, together_ - tile % tiles_each_ * Columns::kQueries);
    begin_ = static_cast<int>(args_.key_end);
    key_end_ = 0;
    request_ = 0;
    for (int i = 0; tile < tiles_ && i < rows_; ++i) {
      const std::int64_t query = args_.first_row + row_of(args_.pass, row_ + i);
      const Visible visible = visible_keys(args_.in, query);
      const int begin = static_cast<int>(max(visible.begin, args_.key_begin));
      const int end = static_cast<int>(min(visible.end, args_.key_end));
      if (begin >= end) continue;
      begin_ = min(begin_, begin);
      key_end_ = max(key_end_, end);
      request_ = static_cast<int>(request_of(args_.in.pages, query));
    }
    stages_ = begin_ < key_end_ ? (key_end_ + kStageKeys - 1) / kStageKeys - begin_ / kStageKeys : 0;
    up_to_ = stages_;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAll, up_to_, step);
      if (lane >= step) up_to_ += other;
    }
    up_to_ += before;
  }

  const ScoreArgs& args_;
  int together_;    // rows of a request
  int tiles_each_;  // tiles of these
  int tiles_;
  int at_;  // stage that comes next, of all
  int end_;
  int first_;
  // Of this lane's tile:
  int up_to_ = 0;  // stages of all tiles up to it
  int stages_, row_, rows_, request_, begin_, key_end_;
};

/// One warp: queries and weights of the units, one unit ahead.
template <class Columns>
__device__ __forceinline__ void bring_queries(ScorePagesShared<Columns::kColumns>& shared, const ScoreArgs& args, int lane) {
  const Inputs& in = args.in;
  PageShare<Columns> share(args);
  int buffer = 0;
  unsigned parity = 1;
  for (PageUnit unit; share.next(unit);) {
    ptx::wait(&shared.unit_empty[buffer], parity);
    const std::uint32_t to = ptx::shared(shared.queries[buffer]);
    const auto query_of = [&](int column) {  // -1: the column is empty
      const int row = Columns::query(column);
      return Columns::head(column) < in.heads && row < unit.rows ? args.first_row + row_of(args.pass, unit.row + row) : -1;
    };
#pragma unroll 4
    for (int i = lane; i < Columns::kColumns * 8; i += 32) {
      const std::int64_t query = query_of(i / 8);
      const std::int64_t from = query < 0 ? 0 : ((query * in.heads + Columns::head(i / 8)) * 8 + i % 8) * 16;
      ptx::copy_16(to + swizzled(i / 8, i % 8), in.q + from, query >= 0);
    }
#pragma unroll 1
    for (int column = lane; column < Columns::kColumns; column += 32) {
      const std::int64_t query = query_of(column);
      const int head = Columns::head(column);
      shared.weights[buffer][column] = query >= 0 ? in.w[query * in.w_stride + head] : padding_weight(head, in.heads);
    }
    if (lane == 0) shared.unit[buffer] = unit;
    ptx::commit_copies();
    ptx::wait_copies<0>();
    ptx::fence_async();
    ptx::arrive(&shared.unit_full[buffer]);
    parity ^= static_cast<unsigned>(buffer);
    buffer ^= 1;
  }
  ptx::wait(&shared.unit_empty[buffer], parity);
  if (lane == 0) shared.unit[buffer].stages = 0;
  ptx::arrive(&shared.unit_full[buffer]);
}

/// The ids of a request's blocks from `first` on, one after the other, loaded by a warp well before they are needed. Blocks in
/// which nothing is visible are not looked up: page -1.
class PageIds {
 public:
  __device__ PageIds(const Pages& pages, const PageUnit& unit, int lane)
      : pages_(pages),
        request_(unit.request),
        block_((unit.key >> pages.page_shift) + lane),
        begin_(unit.begin >> pages.page_shift),
        end_(((unit.end - 1) >> pages.page_shift) + 1) {
    now_ = load();
    next_ = load();
  }
  /// Of the block `i` further; i below 32 and below the blocks of a stage.
  [[nodiscard]] __device__ std::int32_t operator[](int i) const { return __shfl_sync(0xFFFFFFFFU, now_, (used_ + i) & 31); }
  __device__ void advance(int blocks) {
    used_ += blocks;
    if (used_ < 32) return;
    used_ = 0;
    now_ = next_;
    next_ = load();
  }

 private:
  __device__ std::int32_t load() {
    const std::int32_t id = block_ >= begin_ && block_ < end_ ? page_of(pages_, request_, block_) : -1;
    block_ += 32;
    return id;
  }

  const Pages& pages_;
  std::int64_t request_;
  int block_, begin_, end_;
  int used_ = 0;
  std::int32_t now_, next_;
};

/// One warp: keys and scales, up to kStages ahead. By the copy engine, page by page, where it can read the pool (`boxes`);
/// else word by word.
template <class Columns>
__device__ __forceinline__ void bring_pages(ScorePagesShared<Columns::kColumns>& shared, const CUtensorMap& map,
                                            const ScoreArgs& args, bool boxes, int lane) {
  using Shared = ScorePagesShared<Columns::kColumns>;
  const Pages& pages = args.in.pages;
  const int page_size = 1 << pages.page_shift;
  const int blocks = Shared::kStageKeys >> pages.page_shift;  // of a stage, 1 to 16
  PageShare<Columns> share(args);
  int stage = 0;
  unsigned parity = 1;
  for (PageUnit unit; share.next(unit);) {
    PageIds ids(pages, unit, lane);
    for (int s = 0; s < unit.stages; ++s) {
      ptx::wait(&shared.keys_empty[stage], parity);
      ptx::Barrier* full = &shared.keys_full[stage];
      std::uint8_t* keys = shared.keys[stage];
      const std::uint32_t scales = ptx::shared(shared.scales[stage]);
      if (boxes) {
        const std::int32_t page = ids[lane];
        if (lane == 0) ptx::arrive_and_expect(full, Shared::kStageKeys * kDim);
        __syncwarp();
        if (lane < blocks) ptx::copy_box(keys + lane * page_size * kDim, &map, 0, 0, page, full);
#pragma unroll
        for (int key = 4 * lane; key < Shared::kStageKeys; key += 128) {
          const std::int64_t at = ids[key >> pages.page_shift];
          const bool there = exists(pages, at);
          const std::int64_t from = there ? at * pages.stride + page_size * kDim + (key & (page_size - 1)) * 4 : 0;
          ptx::copy_16(scales + key * 4, pages.pool + from, there);
        }
        ptx::arrive_after_copies(full);
      } else {
        for (int key = 0; key < Shared::kStageKeys; ++key) {
          const std::int64_t at = ids[key >> pages.page_shift];
          const bool there = exists(pages, at);
          const std::int64_t row = there ? at * pages.stride + (key & (page_size - 1)) * kDim : 0;
          ptx::copy_4(ptx::shared(keys) + swizzled(key, lane / 4) + lane % 4 * 4, pages.pool + row + (there ? lane * 4 : 0), there);
        }
        for (int key = lane; key < Shared::kStageKeys; key += 32) {
          const std::int64_t at = ids[key >> pages.page_shift];
          const bool there = exists(pages, at);
          const std::int64_t from = there ? at * pages.stride + page_size * kDim + (key & (page_size - 1)) * 4 : 0;
          ptx::copy_4(scales + key * 4, pages.pool + from, there);
        }
        ptx::commit_copies();
        ptx::wait_copies<0>();
        ptx::fence_async();
        ptx::arrive(full);
        if (lane == 0) ptx::arrive(full);
      }
      ids.advance(blocks);
      stage = stage + 1 == Shared::kStages ? 0 : stage + 1;
      parity ^= stage == 0 ? 1U : 0U;
    }
  }
}

/// A lane's scores that are visible and not below tau, as records.
template <class Columns>
class PageRecords {
  using Lane = LaneScores<Columns>;

 public:
  __device__ PageRecords(const ScoreArgs& args, int row, int row_end, int key, int in_quad)
      : args_(args), row_(row + Lane::query(in_quad)), key_(key + (Lane::kHalves == 1 ? 8 * Lane::half(in_quad) : 0)) {
    const bool records = Columns::kGroup > 1 || in_quad < 2;  // else another lane of the quad has the same score
#pragma unroll
    for (int i = 0; i < Lane::kRows; ++i) {
      const int at = row_ + i * Columns::kGroup;
      const bool exists = records && at < row_end;
      const std::int64_t slice_row = exists ? row_of(args.pass, at) : 0;
      const Visible visible = exists ? visible_keys(args.in, args.first_row + slice_row) : Visible{0, 0};
      tau_[i] = exists ? args.tau[slice_row] : 0;
      begin_[i] = static_cast<int>(max(visible.begin, args.key_begin));
      end_[i] = static_cast<int>(min(visible.end, args.key_end));
    }
  }

  __device__ __forceinline__ void take(const Lane& scores, int offset) {
#pragma unroll
    for (int i = 0; i < Lane::kRows; ++i) {
#pragma unroll
      for (int half = 0; half < Lane::kHalves; ++half) {
        const int key = key_ + offset + 8 * half;
        const float score = scores.value[i][half];
        if (key < begin_[i] || key >= end_[i] || score < tau_[i]) continue;  // a NaN is not below anything
        const std::int64_t row = row_of(args_.pass, row_ + i * Columns::kGroup);
        const int at = atomicAdd(&args_.found.count[row], 1);
        append(args_.found, row, at, make_record(score, static_cast<std::uint32_t>(key)));
        if (at >= args_.found.stride) end_[i] = 0;  // the row is lost: what else reaches a poor tau would cost an atomic each
      }
    }
  }

  __device__ __forceinline__ void advance(int keys) { key_ += keys; }

 private:
  const ScoreArgs& args_;
  int row_;
  int key_;
  float tau_[Lane::kRows];
  int begin_[Lane::kRows];
  int end_[Lane::kRows];
};

/// A math warpgroup: dots on the tensor cores, head sums in registers, scores to where they belong.
template <class Columns, class Target>
__device__ __forceinline__ void score_pages(ScorePagesShared<Columns::kColumns>& shared, const ScoreArgs& args, int warpgroup) {
  using Shared = ScorePagesShared<Columns::kColumns>;
  constexpr int kBlocks = Columns::kColumns / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int in_quad = lane % kQuad;
  const int in_stage = warpgroup * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / kQuad;  // key of row g
  const std::uint32_t keys = rows_at(shared.keys[0]) + warpgroup * (64 * kDim >> 4);
  int stage = 0;
  unsigned parity = 0;
  float dot[Columns::kColumns / 2];

  for (int n = 0;; ++n) {
    const int buffer = n & 1;
    ptx::wait(&shared.unit_full[buffer], n >> 1 & 1);
    const PageUnit unit = shared.unit[buffer];
    if (unit.stages == 0) break;

    Target target(args, unit.row, unit.row + unit.rows, unit.key + in_stage, in_quad);
    const std::uint32_t queries = rows_at(shared.queries[buffer]);

#pragma unroll 1
    for (int s = 0; s < unit.stages; ++s) {
      ptx::wait(&shared.keys_full[stage], parity);
      multiply<Columns::kColumns>(dot, keys + stage * (Shared::kStageKeys * kDim >> 4), queries);
      const float scale[2] = {shared.scales[stage][in_stage], shared.scales[stage][in_stage + 8]};
      wgmma_wait<0>(dot);
      float weight[2 * kBlocks];  // read again for every stage: there are no registers to keep 128 columns' in
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const float2 pair = *reinterpret_cast<const float2*>(&shared.weights[buffer][8 * j + 2 * in_quad]);
        weight[2 * j] = pair.x;
        weight[2 * j + 1] = pair.y;
      }
      __syncwarp();
      if (ptx::elect()) ptx::arrive(&shared.keys_empty[stage]);
      target.take(sum_heads<Columns>(dot, weight, scale), 0);
      target.advance(Shared::kStageKeys);
      stage = stage + 1 == Shared::kStages ? 0 : stage + 1;
      parity ^= stage == 0 ? 1U : 0U;
    }
    __syncwarp();
    if (ptx::elect()) ptx::arrive(&shared.unit_empty[buffer]);
  }
}

template <class Columns, class Target>
__global__ void __launch_bounds__(ScorePagesShared<Columns::kColumns>::kThreads, 1)
    score_pages_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ ScoreArgs args, bool boxes) {
  using Shared = ScorePagesShared<Columns::kColumns>;
  extern __shared__ __align__(1024) std::uint8_t raw[];
  auto& shared = *reinterpret_cast<Shared*>(raw);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 32, 0);
  constexpr int kMathWarps = Shared::kWarpgroups * 4;

  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared::kStages; ++i) {
      ptx::init(&shared.keys_full[i], 1 + 32);
      ptx::init(&shared.keys_empty[i], kMathWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::init(&shared.unit_full[i], 32);
      ptx::init(&shared.unit_empty[i], kMathWarps);
    }
    ptx::fence_init();
  }
  __syncthreads();

  // What the caller gave was there before the previous kernel let this one begin. What the previous kernel makes, tau or a list of
  // rows, is waited for where it is read.
  if (warp < kMathWarps || args.pass.list != nullptr) ptx::wait_for_previous();
  if (warp < kMathWarps) {
    ptx::let_next_begin();
    score_pages<Columns, Target>(shared, args, warp / 4);
  } else if (warp == kMathWarps) {
    bring_queries<Columns>(shared, args, lane);
  } else {
    if (boxes && lane == 0) ptx::prefetch(&map);
    bring_pages<Columns>(shared, map, args, boxes, lane);
  }
}

}  // namespace dosa::cuda
