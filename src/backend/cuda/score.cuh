// score: all keys of a slice for all rows of a pass; stored, or filtered.
//
// A = keys, 64 a warpgroup; B = 128 rows of query heads, all heads of 128 / kHeads queries. A unit of work is (query tile, chunk
// of keys); units run chunk by chunk, so that all CTAs read the same few megabytes of keys at a time and find them in L2.
#pragma once

#include "backend/cuda/layout.hpp"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/rows.cuh"
#include "backend/cuda/score_tile.cuh"
#include "backend/cuda/wgmma.cuh"

namespace dosa::cuda {

/// ScoreArgs and what the launcher made of them.
struct ScoreWork {
  ScoreArgs args;
  int chunk_keys;  // a multiple of a stage's keys
  int chunks;
};

/// Warps that bring units, each a part: one alone, between the math warps' instructions, was too slow for short units.
inline constexpr int kBringers = 3;

/// A warp: a finished unit's records to the lists of their rows, in no particular order: selection orders them.
template <class Columns>
__device__ __forceinline__ void bring_records_away(FilterShared& shared, int buffer, const ScoreArgs& args, int part, int lane) {
  constexpr int kRoom = FilteredScores<Columns>::kRoom;
  for (int q = part; q < Columns::kQueries; q += kBringers) {
    const int count = min(shared.record_count[buffer][q], kRoom);
    if (count == 0) continue;
    const int row = shared.query[buffer][q].row;
    int base = lane == 0 ? atomicAdd(&args.found.count[row], count) : 0;
    base = __shfl_sync(0xFFFFFFFFU, base, 0);
    for (int i = lane; i < count; i += 32) append(args.found, row, base + i, shared.records[buffer][q * kRoom + i]);
    __syncwarp();
    if (lane == 0) shared.record_count[buffer][q] = 0;
  }
  __syncwarp();
}

/// A part of the warps: finds the units that their rows can see, and brings queries and weights, one unit ahead; records the other
/// way.
template <class Columns, class Target>
__device__ __forceinline__ void bring_units(typename Target::Shared& shared, const ScoreWork& work, int part, int lane) {
  const ScoreArgs& args = work.args;
  const Inputs& in = args.in;
  const int rows = static_cast<int>(count_of(args.pass, args.rows));
  const int tiles = (rows + Columns::kQueries - 1) / Columns::kQueries;
  const int units = tiles * work.chunks;
  int buffer = 0;
  unsigned parity = 1;

  for (int u = static_cast<int>(blockIdx.x); u < units; u += static_cast<int>(gridDim.x)) {
    // The visible keys of the tile's rows, within the chunk.
    const int chunk = u / tiles;
    const int row = (u - chunk * tiles) * Columns::kQueries;
    const int chunk_begin = static_cast<int>(args.key_begin) + chunk * work.chunk_keys;
    const int chunk_end = min(chunk_begin + work.chunk_keys, static_cast<int>(args.key_end));
    FilterQuery mine{__uint_as_float(0x7F800000U), -1, chunk_end, chunk_begin};
    if (lane < Columns::kQueries && row + lane < rows) {
      mine.row = static_cast<int>(row_of(args.pass, row + lane));
      const Visible visible = visible_in(args.keys, in.ks, in.ke, args.first_row + mine.row);
      if (max(static_cast<int>(visible.begin), chunk_begin) < min(static_cast<int>(visible.end), chunk_end)) {
        mine.begin = max(static_cast<int>(visible.begin), chunk_begin);
        mine.end = min(static_cast<int>(visible.end), chunk_end);
        if constexpr (Target::kRecords) mine.tau = args.tau[mine.row];
      }
    }
    const int begin = __reduce_min_sync(0xFFFFFFFFU, mine.begin);
    const int end = __reduce_max_sync(0xFFFFFFFFU, mine.end);
    if (begin >= end) continue;
    constexpr int kRingKeys = ScoreShared::Shape::kRingKeys;
    const int key = chunk_begin + (begin - chunk_begin) / kRingKeys * kRingKeys;
    const int rings = (end - key + kRingKeys - 1) / kRingKeys;

    // Query rows in the order of the tile's columns; rows that do not exist are zero.
    ptx::wait(&shared.unit_empty[buffer], parity);
    if constexpr (Target::kRecords) {
      bring_records_away<Columns>(shared, buffer, args, part, lane);
      if (lane < Columns::kQueries && lane % kBringers == part) shared.query[buffer][lane] = mine;
    }
    const std::uint32_t to = ptx::shared(shared.queries[buffer]);
#pragma unroll 1
    for (int first = part * 4; first < Columns::kColumns; first += kBringers * 4) {
      const int column = first + lane / 8;
      const int head = Columns::head(column);
      const int query = __shfl_sync(0xFFFFFFFFU, mine.row, Columns::query(column));
      const bool exists = head < in.heads && query >= 0;
      const std::int64_t from = exists ? (args.first_row + query) * in.heads + head : 0;
      ptx::copy_16(to + swizzled(column, lane % 8), in.q + from * kDim + lane % 8 * 16, exists);
    }
#pragma unroll 1
    for (int first = part * 32; first < Columns::kColumns; first += kBringers * 32) {
      const int column = first + lane;
      const int head = Columns::head(column);
      const int query = __shfl_sync(0xFFFFFFFFU, mine.row, Columns::query(column));
      const bool exists = head < in.heads && query >= 0;
      shared.weights[buffer][column] = exists ? in.w[(args.first_row + query) * in.w_stride + head] : padding_weight(head, in.heads);
    }
    if (part == 0 && lane == 0) shared.unit[buffer] = ScoreUnit{row, key, rings};
    ptx::commit_copies();
    ptx::wait_copies<0>();
    ptx::fence_async();
    ptx::arrive(&shared.unit_full[buffer]);
    parity ^= static_cast<unsigned>(buffer);
    buffer ^= 1;
  }

  // The end, and what the last two units found.
  ptx::wait(&shared.unit_empty[buffer], parity);
  if (part == 0 && lane == 0) shared.unit[buffer] = ScoreUnit{0, 0, 0};
  ptx::arrive(&shared.unit_full[buffer]);
  if constexpr (Target::kRecords) {
    bring_records_away<Columns>(shared, buffer, args, part, lane);
    ptx::wait(&shared.unit_empty[buffer ^ 1], parity ^ static_cast<unsigned>(buffer));
    bring_records_away<Columns>(shared, buffer ^ 1, args, part, lane);
  }
}

/// One warp: keys by the copy engine, their scales by plain copies, up to kStages ahead.
__device__ __forceinline__ void bring_keys(ScoreShared& shared, const CUtensorMap& map, const ScoreWork& work, int lane) {
  const int count = work.args.keys.count;
  int stage = 0;
  unsigned parity = 1;

  for (int n = 0;; ++n) {
    const int buffer = n & 1;
    ptx::wait(&shared.unit_full[buffer], n >> 1 & 1);
    const ScoreUnit unit = shared.unit[buffer];
    __syncwarp();
    if (lane == 0) ptx::arrive(&shared.unit_empty[buffer]);
    if (unit.rings == 0) break;
    for (int s = 0; s < unit.rings * ScoreShared::kStages; ++s) {
      ptx::wait(&shared.keys_empty[stage], parity);
      const int key = unit.key + s * ScoreShared::kStageKeys;
      ptx::Barrier* full = &shared.keys_full[stage];
      if (lane == 0) {
        ptx::arrive_and_expect(full, ScoreShared::kStageKeys * kDim);
        ptx::copy_box(shared.keys[stage], &map, 0, key, full);
      }
      const std::uint32_t to = ptx::shared(shared.scales[stage]);
#pragma unroll
      for (int i = 0; i < ScoreShared::kStageKeys; i += 32) {
        const bool exists = key + i + lane < count;
        ptx::copy_4(to + (i + lane) * 4, work.args.in.k_scale + (exists ? key + i + lane : 0), exists);
      }
      ptx::arrive_after_copies(full);
      stage = stage + 1 == ScoreShared::kStages ? 0 : stage + 1;
      parity ^= stage == 0 ? 1U : 0U;
    }
  }
}

/// A math warpgroup: dots on the tensor cores, head sums in registers, scores to where they go.
template <class Columns, class Target>
__device__ __forceinline__ void score_keys(typename Target::Shared& shared, const ScoreWork& work, int warpgroup) {
  constexpr int kBlocks = Columns::kColumns / 8;
  const ScoreArgs& args = work.args;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int in_quad = lane % kQuad;
  const int in_stage = warpgroup * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / kQuad;  // key of row g
  unsigned parity = 0;
  float dot[Columns::kColumns / 2];

  for (int n = 0;; ++n) {
    const int buffer = n & 1;
    ptx::wait(&shared.unit_full[buffer], n >> 1 & 1);
    const ScoreUnit unit = shared.unit[buffer];
    if (unit.rings == 0) break;

    // What stays in registers for the unit: weights, and where this lane's scores go.
    float weight[2 * kBlocks];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(&shared.weights[buffer][8 * j + 2 * in_quad]);
      weight[2 * j] = pair.x;
      weight[2 * j + 1] = pair.y;
    }
    Target target(shared, buffer, args, unit.key + in_stage, in_quad);
    const std::uint32_t queries = rows_at(shared.queries[buffer]);
    const std::uint32_t keys = rows_at(shared.keys[0]) + warpgroup * (64 * kDim >> 4);

#pragma unroll 1
    for (int ring = 0; ring < unit.rings; ++ring) {
#pragma unroll
      for (int stage = 0; stage < ScoreShared::kStages; ++stage) {
        ptx::wait(&shared.keys_full[stage], parity);
        multiply<Columns::kColumns>(dot, keys + stage * (ScoreShared::kStageKeys * kDim >> 4), queries);
        const float scale[2] = {shared.scales[stage][in_stage], shared.scales[stage][in_stage + 8]};
        wgmma_wait<0>(dot);
        __syncwarp();
        if (ptx::elect()) ptx::arrive(&shared.keys_empty[stage]);
        target.take(sum_heads<Columns>(dot, weight, scale), stage * ScoreShared::kStageKeys);
      }
      target.advance(ScoreShared::Shape::kRingKeys);
      parity ^= 1U;
    }
    __syncwarp();
    if (ptx::elect()) ptx::arrive(&shared.unit_empty[buffer]);
  }
}

template <class Columns, class Target>
__global__ void __launch_bounds__(ScoreShared::Shape::kThreads, 1)
    score_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ ScoreWork work) {
  extern __shared__ __align__(1024) std::uint8_t raw[];
  auto& shared = *reinterpret_cast<typename Target::Shared*>(raw);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 32, 0);
  const int warpgroup = warp / 4;

  if (threadIdx.x == 0) {
    constexpr int kMathWarps = ScoreShared::Shape::kWarpgroups * 4;
    for (int i = 0; i < ScoreShared::kStages; ++i) {
      ptx::init(&shared.keys_full[i], 1 + 32);
      ptx::init(&shared.keys_empty[i], kMathWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::init(&shared.unit_full[i], kBringers * 32);
      ptx::init(&shared.unit_empty[i], kMathWarps + 1);
    }
    ptx::fence_init();
  }
  if constexpr (Target::kRecords) {
    if (threadIdx.x < 2 * FilterShared::kQueries) shared.record_count[0][threadIdx.x] = 0;
  }
  __syncthreads();

  if (warpgroup == ScoreShared::Shape::kWarpgroups) {
    ptx::drop_registers<ScoreShared::Shape::kCopyRegisters>();
    if (warp % 4 < kBringers) {
      bring_units<Columns, Target>(shared, work, warp % 4, lane);
    } else {
      bring_keys(shared, map, work, lane);
    }
  } else {
    ptx::raise_registers<ScoreShared::Shape::kMathRegisters>();
    score_keys<Columns, Target>(shared, work, warpgroup);
  }
}

}  // namespace dosa::cuda
