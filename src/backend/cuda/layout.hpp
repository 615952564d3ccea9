// Where things lie in shared memory: one definition for host (sizes) and kernels (addresses).
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cuda/stages.hpp"

namespace dosa::cuda {

inline constexpr int kQuad = 4;  // lanes that share a row of an accumulator; the reference sums over them last

/// Byte of 16-byte chunk `chunk` of row `row` of a tile of 128-byte rows, as the 128-byte swizzle has it.
constexpr int swizzled(int row, int chunk) { return row * kDim + ((chunk ^ (row & 7)) << 4); }

/// Heads that kernels are compiled for. Others are padded, which changes no bit: heads up to the next multiple of 8
/// weigh +0 (the reference pads so), those beyond -0: fma(-0, +0, s) = s for every s.
constexpr int padded_heads(int heads) {
  return heads <= 8 ? 8 : heads <= 16 ? 16 : heads <= 32 ? 32 : heads <= 64 ? 64 : 128;
}
constexpr float padding_weight(int head, int heads) { return head < (heads + 7) / 8 * 8 ? 0.0F : -0.0F; }

/// Calls launch.template operator()<kHeads>() with the heads that kernels are compiled for.
template <class Launch>
auto with_heads(int heads, const Launch& launch) {
  switch (padded_heads(heads)) {
    case 8: return launch.template operator()<8>();
    case 16: return launch.template operator()<16>();
    case 32: return launch.template operator()<32>();
    case 64: return launch.template operator()<64>();
    default: return launch.template operator()<128>();
  }
}

/// The columns of a score tile: kColumns / kHeads queries of kHeads heads. Head 8 t + 2 c + e belongs to lane c of a
/// quad, as the reference's chains have it, and lies in accumulator block j = slot * kHeads / 8 + t. Which query a slot
/// holds differs from lane to lane (slot ^ c within groups of four), so that in the sums across the quad each lane
/// sends what its neighbour keeps, without a selection: lane c ends with query c.
template <int kHeads, int kColumns_ = 128>
struct ScoreColumns {
  static constexpr int kColumns = kColumns_;
  static constexpr int kQueries = kColumns / kHeads;
  static constexpr int kBlocks = kHeads / 8;                // accumulator blocks, terms of a chain
  static constexpr int kGroup = std::min(kQueries, kQuad);  // queries that a quad sums together
  static_assert(kHeads % 8 == 0 && kColumns % kHeads == 0);

  static constexpr int query(int column) {
    const int slot = column / kHeads;
    return slot ^ (column / 2 % kQuad & (kGroup - 1));
  }
  static constexpr int head(int column) { return column % kHeads; }
};

/// How a kernel spreads over a CTA: math warpgroups of 64 keys each, and one warpgroup that brings data, a ring of
/// stages ahead. Units of work are whole rings, so that a stage's place in the code and in shared memory is fixed: what
/// runs beside the products costs tensor time, and addresses that need no arithmetic saved 3 to 5 % of scoring.
template <int kWarpgroups_>
struct CtaShape {
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kStages = 4;
  static constexpr int kStageKeys = 64 * kWarpgroups;
  static constexpr int kRingKeys = kStages * kStageKeys;
  // setmaxnreg never returns unless what the math warpgroups take is what the other gives.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kMathRegisters = kWarpgroups == 4 ? 112 : 160;
  static constexpr int kCopyRegisters = 32;
  static_assert(kWarpgroups == 3 || kWarpgroups == 4);
  static_assert(kWarpgroups * (kMathRegisters - kLaunchRegisters) <= kLaunchRegisters - kCopyRegisters);
};

/// Work of a CTA between two changes of queries.
struct ScoreUnit {
  std::int32_t row;    // first of the tile's queries, in the slice
  std::int32_t key;    // first
  std::int32_t rings;  // 0: no more units
};

struct ScoreShared {
  using Shape = CtaShape<4>;
  static constexpr int kColumns = 128;
  static constexpr int kStages = Shape::kStages;
  static constexpr int kStageKeys = Shape::kStageKeys;
  alignas(1024) std::uint8_t keys[kStages][kStageKeys * kDim];
  alignas(1024) std::uint8_t queries[2][kColumns * kDim];
  float scales[kStages][kStageKeys];
  float weights[2][kColumns];
  ScoreUnit unit[2];
  std::uint64_t keys_full[kStages];
  std::uint64_t keys_empty[kStages];
  std::uint64_t unit_full[2];
  std::uint64_t unit_empty[2];
};

/// What a unit's records are made of.
struct FilterQuery {
  float tau;           // +inf: no records
  std::int32_t row;    // of the slice
  std::int32_t begin;  // visible keys of the unit
  std::int32_t end;
};

/// Beside these, what the scores' filter keeps of a unit until its records are brought away.
struct FilterShared : ScoreShared {
  static constexpr int kRecords = 3584;  // of all queries together
  static constexpr int kQueries = kColumns / 8;  // at most
  alignas(16) FilterQuery query[2][kQueries];
  std::int32_t record_count[2][kQueries];  // may exceed the room: what does not fit goes to memory at once
  Record records[2][kRecords];
};

/// The screen's tile of one row budget. Columns: the retained heads of all its queries, query by query, then 16
/// auxiliary columns for each group of 8 queries: (high, low) of its queries 0, 2, 4, 6, then of 1, 3, 5, 7, so that in
/// accumulators lane c of a quad has the pairs of its own queries 2 c and 2 c + 1.
template <int kBudget>
struct ScreenTile {
  static constexpr int kRetained = kBudget - 2;
  static constexpr int kQueries = kBudget <= 12 ? 16 : 8;
  static constexpr int kGroups = kQueries / 8;
  static constexpr int kColumns = kQueries * kBudget;
  static constexpr int kPasses = kColumns > 192 ? 2 : 1;  // products a tile; the last columns come first
  static constexpr int kPassColumns = kColumns / kPasses;
  static constexpr int kAuxiliary = kQueries * kRetained;  // the first auxiliary column
  static constexpr int kGroupSteps = 8 * kRetained / 16;   // head sums: 16 columns a step
  static_assert(kRetained % 2 == 0 && kPassColumns % 16 == 0 && kPassColumns <= 192);
  using Shape = CtaShape<kBudget == 16 ? 4 : 3>;

  static constexpr int query(int column) {
    if (column < kAuxiliary) return column / kRetained;
    const int in_group = (column - kAuxiliary) % 16;
    return (column - kAuxiliary) / 16 * 8 + in_group % 8 / 2 * 2 + in_group / 8;
  }
  static constexpr int row(int column) {
    return column < kAuxiliary ? column % kRetained : kRetained + (column - kAuxiliary) % 2;
  }
};

/// What the screen knows of a query besides its rows.
struct alignas(16) ScreenQuery {
  float c;
  float tau;
  float sigma_high;
  float sigma_low;
  std::int32_t row;    // of the slice; -1: none
  std::int32_t begin;  // visible keys of the slice
  std::int32_t end;
};

/// Work of a CTA between two changes of queries: keys from `key`, in supers of 16 stages, in which each math warpgroup
/// takes a run of 1024 keys.
struct ScreenUnit {
  std::int32_t key;
  std::int32_t supers;  // 0: no more units
};

/// What the screen knows of a key.
struct ScreenKey {
  float rho;
  float inv_alpha;
};

template <int kBudget>
struct ScreenShared {
  using Tile = ScreenTile<kBudget>;
  static constexpr int kStages = Tile::Shape::kStages;
  static constexpr int kStageKeys = Tile::Shape::kStageKeys;
  alignas(1024) std::uint8_t keys[kStages][kStageKeys * kDim];
  alignas(1024) std::uint8_t rows[2][Tile::kColumns * kDim];
  ScreenKey key[kStages][kStageKeys];
  std::uint16_t weights[2][Tile::kQueries][Tile::kRetained];  // bf16
  ScreenQuery query[2][Tile::kQueries];
  ScreenUnit unit[2];
  std::uint64_t keys_full[kStages];
  std::uint64_t keys_empty[kStages];
  std::uint64_t unit_full[2];
  std::uint64_t unit_empty[2];
};

/// refine: the queries of a group and a ring of tiles of gathered keys, two products of 64 each.
template <int kHeads>
struct RefineShared {
  using Columns = ScoreColumns<kHeads>;
  static constexpr int kTileKeys = 128;
  static constexpr int kAhead = 2;  // tiles of keys on their way
  static constexpr int kStages = kAhead + 1;
  static constexpr int kIdStages = 2 * kAhead + 1;  // ids come as long before the keys as keys before their use
  static constexpr int kRecords = 192;              // of a query
  alignas(1024) std::uint8_t keys[kStages][kTileKeys * kDim];
  alignas(1024) std::uint8_t queries[Columns::kColumns * kDim];
  Record records[Columns::kQueries][kRecords];
  float weights[Columns::kColumns];
  float scales[kStages][kTileKeys];
  std::int32_t ids[kIdStages][kTileKeys];
  std::int32_t record_count[Columns::kQueries];
  std::int32_t record_base[Columns::kQueries];
};

inline constexpr int kSharedBytesOfSm = 228 * 1024;  // what CTAs of a multiprocessor have together, 1 KiB each included
template <class Shared>
inline constexpr int kCtasOfSm = kSharedBytesOfSm / (sizeof(Shared) + 1024);

}  // namespace dosa::cuda
