// The epilogue of a score: from the dots of 64 keys and 128 query-head columns to the reference scores, in the reference's
// order of operations (score/reference.cpp), and where a lane's scores go.
#pragma once

#include <limits>

#include "backend/cuda/layout.hpp"
#include "backend/cuda/order.cuh"

namespace dosa::cuda {

/// Scores that a lane holds after the sums across its quad. Key halves: rows g and g + 8 of the accumulator.
template <class Columns_>
struct LaneScores {
  using Columns = Columns_;
  static constexpr int kRows = Columns::kQueries / Columns::kGroup;  // queries kGroup apart
  static constexpr int kHalves = Columns::kGroup == kQuad ? 2 : 1;
  float value[kRows][kHalves];

  /// The first query of a lane, and the half of its only key where it holds one.
  static __device__ int query(int in_quad) { return in_quad & (Columns::kGroup - 1); }
  static __device__ int half(int in_quad) { return Columns::kGroup == 2 ? in_quad >> 1 : in_quad & 1; }
};

__device__ __forceinline__ float add_from_neighbour(float mine, float sent, int distance) {
  return __fadd_rn(mine, __shfl_xor_sync(0xFFFFFFFFU, sent, distance));
}

/// Per lane: the chains of its even and odd heads, their sum times the key's scale. Across the quad: (p0 + p1) + (p2 + p3).
template <class Columns>
__device__ __forceinline__ LaneScores<Columns> sum_heads(const float (&dot)[Columns::kColumns / 2],
                                                         const float (&weight)[Columns::kColumns / 4],
                                                         const float (&scale)[2]) {
  float part[Columns::kQueries][2];
#pragma unroll
  for (int slot = 0; slot < Columns::kQueries; ++slot) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float chain[2];
#pragma unroll
      for (int t = 0; t < Columns::kBlocks; ++t) {
        const int j = slot * Columns::kBlocks + t;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x = fmaxf(dot[4 * j + 2 * half + e], 0.0F);  // a NaN gives 0
          chain[e] = t == 0 ? __fmul_rn(weight[2 * j + e], x) : __fmaf_rn(weight[2 * j + e], x, chain[e]);
        }
      }
      part[slot][half] = __fmul_rn(__fadd_rn(chain[0], chain[1]), scale[half]);
    }
  }

  LaneScores<Columns> scores;
  const int in_quad = static_cast<int>(threadIdx.x) % kQuad;
#pragma unroll
  for (int row = 0; row < LaneScores<Columns>::kRows; ++row) {
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto at = [&](int slot) { return part[row * Columns::kGroup + slot][half]; };
      if constexpr (Columns::kGroup == 4) {
        sum[half] = add_from_neighbour(add_from_neighbour(at(0), at(1), 1), add_from_neighbour(at(2), at(3), 1), 2);
      } else {
        const float pair = add_from_neighbour(at(0), at(Columns::kGroup - 1), 1);
        sum[half] = add_from_neighbour(pair, pair, 2);
      }
    }
    if constexpr (LaneScores<Columns>::kHalves == 2) {
      scores.value[row][0] = sum[0];
      scores.value[row][1] = sum[1];
    } else {
      scores.value[row][0] = LaneScores<Columns>::half(in_quad) == 0 ? sum[0] : sum[1];
    }
  }
  return scores;
}

/// Where a lane's scores go, stage after stage: to memory.
template <class Columns>
class StoredScores {
  using Lane = LaneScores<Columns>;

 public:
  using Shared = ScoreShared;
  static constexpr bool kRecords = false;

  /// `key` is that of accumulator row g.
  __device__ StoredScores(Shared& shared, int buffer, const ScoreArgs& args, int key, int in_quad)
      : StoredScores(args, shared.unit[buffer].row, static_cast<int>(args.rows), key, in_quad) {}

  /// Of rows [row, row_end).
  __device__ StoredScores(const ScoreArgs& args, int row, int row_end, int key, int in_quad) : stride_(args.score_stride) {
    const int first = row + Lane::query(in_quad);
    if constexpr (Lane::kHalves == 1) key += 8 * Lane::half(in_quad);
    rows_left_ = row_end - first;
    keys_left_ = rows_left_ > 0 ? static_cast<int>(args.key_end) - key : 0;
    to_ = args.scores + first * stride_ + (key - args.key_begin);
  }

  /// Of the keys `offset` further.
  __device__ __forceinline__ void take(const Lane& scores, int offset) const {
#pragma unroll
    for (int row = 0; row < Lane::kRows; ++row) {
#pragma unroll
      for (int half = 0; half < Lane::kHalves; ++half) {
        const bool exists = row * Columns::kGroup < rows_left_ && offset + 8 * half < keys_left_;
        if (exists) to_[row * Columns::kGroup * stride_ + offset + 8 * half] = scores.value[row][half];
      }
    }
  }

  __device__ __forceinline__ void advance(int keys) {
    to_ += keys;
    keys_left_ -= keys;
  }

 private:
  float* to_;
  std::int64_t stride_;
  int rows_left_;
  int keys_left_;
};

/// Or, where they are visible and not below tau, to records in shared memory.
template <class Columns>
class FilteredScores {
  using Lane = LaneScores<Columns>;

 public:
  using Shared = FilterShared;
  static constexpr bool kRecords = true;
  static constexpr int kRoom = Shared::kRecords / Columns::kQueries;  // of a query

  __device__ FilteredScores(Shared& shared, int buffer, const ScoreArgs& args, int key, int in_quad)
      : shared_(shared), args_(args), buffer_(buffer), query_(Lane::query(in_quad)), key_(key) {
    if constexpr (Lane::kHalves == 1) key_ += 8 * Lane::half(in_quad);
    if constexpr (kHoldsTau) {
#pragma unroll
      for (int row = 0; row < Lane::kRows; ++row) tau_[row] = shared.query[buffer][query_ + row * Columns::kGroup].tau;
    }
    if (Columns::kGroup == 1 && in_quad >= 2) query_ = Columns::kQueries;  // another lane of the quad has the same score
  }

  __device__ __forceinline__ void take(const Lane& scores, int offset) const {
    bool any = false;  // a NaN is not below anything
#pragma unroll
    for (int row = 0; row < Lane::kRows; ++row) {
#pragma unroll
      for (int half = 0; half < Lane::kHalves; ++half) any = any || !(scores.value[row][half] < tau(row));
    }
    if (any) record(scores, offset);
  }

  __device__ __forceinline__ void advance(int keys) { key_ += keys; }

 private:
  __device__ __forceinline__ void record(const Lane& scores, int offset) const {
    if (query_ >= Columns::kQueries) return;
#pragma unroll
    for (int row = 0; row < Lane::kRows; ++row) {
      const int query = query_ + row * Columns::kGroup;
      const FilterQuery known = shared_.query[buffer_][query];
      bool keep[Lane::kHalves];
      int kept = 0;
#pragma unroll
      for (int half = 0; half < Lane::kHalves; ++half) {
        const int key = key_ + offset + 8 * half;
        keep[half] = key >= known.begin && key < known.end && !(scores.value[row][half] < known.tau);
        kept += keep[half] ? 1 : 0;
      }
      if (kept == 0) continue;
      int at = atomicAdd(&shared_.record_count[buffer_][query], kept);
#pragma unroll
      for (int half = 0; half < Lane::kHalves; ++half) {
        if (!keep[half]) continue;
        const Record found = make_record(scores.value[row][half], static_cast<std::uint32_t>(key_ + offset + 8 * half));
        if (at < kRoom) {
          shared_.records[buffer_][query * kRoom + at++] = found;
        } else {
          append(args_.found, known.row, atomicAdd(&args_.found.count[known.row], 1), found);
        }
      }
    }
  }

  static constexpr bool kHoldsTau = Lane::kRows <= 2;  // in registers, if there are enough

  [[nodiscard]] __device__ __forceinline__ float tau(int row) const {
    return kHoldsTau ? tau_[row] : shared_.query[buffer_][query_ + row * Columns::kGroup].tau;
  }

  Shared& shared_;
  const ScoreArgs& args_;
  int buffer_;
  int query_;
  int key_;
  float tau_[kHoldsTau ? Lane::kRows : 1];
};

}  // namespace dosa::cuda
