// Where things lie in shared memory: one definition for host (sizes) and kernels (addresses).
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cuda/stages.hpp"

namespace dosa::cuda {

inline constexpr int kQuad = 4;  // lanes that share a row of an accumulator; the reference sums over them last

/// Byte of 16-byte chunk `chunk` of row `row` of a tile of 128-byte rows, as the 128-byte swizzle has it.
constexpr int swizzled(int row, int chunk) { return row * kDim + ((chunk ^ (row & 7)) << 4); }

/// Heads that kernels are compiled for. Others are padded, which changes no bit: heads up to the next multiple of 8 weigh
/// +0 (the reference pads so), those beyond -0: fma(-0, +0, s) = s for every s.
constexpr int padded_heads(int heads) { return heads <= 8 ? 8 : heads <= 16 ? 16 : heads <= 32 ? 32 : heads <= 64 ? 64 : 128; }
constexpr float padding_weight(int head, int heads) { return head < (heads + 7) / 8 * 8 ? 0.0F : -0.0F; }

/// The columns of a score tile: kColumns / kHeads queries of kHeads heads. Head 8 t + 2 c + e belongs to lane c of a quad, as the
/// reference's chains have it, and lies in accumulator block j = slot * kHeads / 8 + t. Which query a slot holds differs from
/// lane to lane (slot ^ c within groups of four), so that in the sums across the quad each lane sends what its neighbour
/// keeps, without a selection: lane c ends with query c.
template <int kHeads, int kColumns_ = 128>
struct ScoreColumns {
  static constexpr int kColumns = kColumns_;
  static constexpr int kQueries = kColumns / kHeads;
  static constexpr int kBlocks = kHeads / 8;  // accumulator blocks, terms of a chain
  static constexpr int kGroup = std::min(kQueries, kQuad);  // queries that a quad sums together
  static_assert(kHeads % 8 == 0 && kColumns % kHeads == 0);

  static constexpr int query(int column) {
    const int slot = column / kHeads;
    return slot ^ (column / 2 % kQuad & (kGroup - 1));
  }
  static constexpr int head(int column) { return column % kHeads; }
};

/// How a score kernel spreads over a CTA: math warpgroups of 64 keys each, and one warpgroup that brings data.
template <int kWarpgroups_, int kBuffers_, int kCluster_, bool kOrdered_>
struct ScoreShape {
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kBuffers = kBuffers_;  // accumulators of a warpgroup
  static constexpr int kCluster = kCluster_;  // CTAs that share keys
  static constexpr bool kOrdered = kOrdered_;  // warpgroups take turns at the tensor cores
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kStageKeys = 64 * kWarpgroups;
  static constexpr int kStages = 1024 / kStageKeys;
  // setmaxnreg never returns unless what the math warpgroups take is what the other gives.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kMathRegisters = kWarpgroups == 4 ? 112 : kWarpgroups == 3 ? 152 : 232;
  static constexpr int kCopyRegisters = kWarpgroups == 4 ? 32 : kWarpgroups == 3 ? 56 : 40;
  static_assert(kWarpgroups * (kMathRegisters - kLaunchRegisters) <= kLaunchRegisters - kCopyRegisters);
};

/// Work of a CTA between two changes of queries.
struct ScoreUnit {
  std::int32_t row;     // first of the tile's queries, in the slice
  std::int32_t key;     // first
  std::int32_t stages;  // 0: no more units
};

template <class Shape>
struct ScoreShared {
  static constexpr int kColumns = 128;
  alignas(1024) std::uint8_t keys[Shape::kStages][Shape::kStageKeys * kDim];
  alignas(1024) std::uint8_t queries[2][kColumns * kDim];
  float scales[Shape::kStages][Shape::kStageKeys];
  float weights[2][kColumns];
  ScoreUnit unit[2];
  std::uint64_t keys_full[Shape::kStages];
  std::uint64_t keys_empty[Shape::kStages];
  std::uint64_t unit_full[2];
  std::uint64_t unit_empty[2];
};

/// refine: one query and a ring of tiles of 64 gathered keys.
template <int kHeads>
struct RefineShared {
  static constexpr int kTileKeys = 64;
  static constexpr int kAhead = 3;               // tiles of keys on their way
  static constexpr int kStages = kAhead + 1;
  static constexpr int kIdStages = 2 * kAhead + 1;  // ids come as long before the keys as keys before their use
  static constexpr int kRecords = 512;
  alignas(1024) std::uint8_t keys[kStages][kTileKeys * kDim];
  alignas(1024) std::uint8_t query[kHeads * kDim];
  Record records[kRecords];
  float scales[kStages][kTileKeys];
  std::int32_t ids[kIdStages][kTileKeys];
  std::int32_t record_count;
  std::int32_t record_base;
};

inline constexpr int kSharedBytesOfSm = 227 * 1024;  // what CTAs of a multiprocessor have together, 1 KiB each included
template <class Shared>
inline constexpr int kCtasOfSm = kSharedBytesOfSm / (sizeof(Shared) + 1024);

}  // namespace dosa::cuda
