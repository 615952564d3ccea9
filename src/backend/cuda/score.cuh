// score: all keys of a slice for all its rows, stored.
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

/// One warp: finds the units that their rows can see, and brings queries and weights, one unit ahead.
template <int kHeads>
__device__ __forceinline__ void bring_units(ScoreShared& shared, const ScoreWork& work, int lane) {
  using Columns = ScoreColumns<kHeads>;
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
    int begin = chunk_end;
    int end = chunk_begin;
    if (lane < Columns::kQueries && row + lane < rows) {
      const std::int64_t query = args.first_row + row_of(args.pass, row + lane);
      const int ks = in.ks != nullptr ? max(in.ks[query], 0) : 0;
      const int ke = in.ke != nullptr ? in.ke[query] : chunk_end;
      if (ks < ke) {
        begin = max(ks, chunk_begin);
        end = min(ke, chunk_end);
      }
    }
    begin = __reduce_min_sync(0xFFFFFFFFU, begin);
    end = __reduce_max_sync(0xFFFFFFFFU, end);
    if (begin >= end) continue;
    constexpr int kRingKeys = ScoreShared::Shape::kRingKeys;
    const int key = chunk_begin + (begin - chunk_begin) / kRingKeys * kRingKeys;
    const int rings = (end - key + kRingKeys - 1) / kRingKeys;

    // Query rows in the order of the tile's columns; rows that do not exist are zero.
    ptx::wait(&shared.unit_empty[buffer], parity);
    const std::uint32_t to = ptx::shared(shared.queries[buffer]);
#pragma unroll 1
    for (int i = lane; i < Columns::kColumns * 8; i += 32) {
      const int column = i / 8;
      const int head = Columns::head(column);
      const int query_row = row + Columns::query(column);
      const bool exists = head < in.heads && query_row < rows;
      const std::int64_t query = exists ? args.first_row + row_of(args.pass, query_row) : 0;
      ptx::copy_16(to + swizzled(column, i % 8), exists ? in.q + ((query * in.heads + head) * 8 + i % 8) * 16 : in.q, exists);
    }
#pragma unroll 1
    for (int column = lane; column < Columns::kColumns; column += 32) {
      const int head = Columns::head(column);
      const int query_row = row + Columns::query(column);
      const bool exists = head < in.heads && query_row < rows;
      const std::int64_t query = exists ? args.first_row + row_of(args.pass, query_row) : 0;
      shared.weights[buffer][column] = exists ? in.w[query * in.w_stride + head] : padding_weight(head, in.heads);
    }
    if (lane == 0) shared.unit[buffer] = ScoreUnit{row, key, rings};
    ptx::commit_copies();
    ptx::wait_copies<0>();
    ptx::fence_async();
    ptx::arrive(&shared.unit_full[buffer]);
    parity ^= static_cast<unsigned>(buffer);
    buffer ^= 1;
  }

  // The end.
  ptx::wait(&shared.unit_empty[buffer], parity);
  if (lane == 0) shared.unit[buffer] = ScoreUnit{0, 0, 0};
  ptx::arrive(&shared.unit_full[buffer]);
}

/// One warp: keys by the copy engine, their scales by plain copies, up to kStages ahead.
__device__ __forceinline__ void bring_keys(ScoreShared& shared, const CUtensorMap& map, const ScoreWork& work, int lane) {
  const int nk = static_cast<int>(work.args.in.nk);
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
        const bool exists = key + i + lane < nk;
        ptx::copy_4(to + (i + lane) * 4, work.args.in.k_scale + (exists ? key + i + lane : 0), exists);
      }
      ptx::arrive_after_copies(full);
      stage = stage + 1 == ScoreShared::kStages ? 0 : stage + 1;
      parity ^= stage == 0 ? 1U : 0U;
    }
  }
}

/// A math warpgroup: dots on the tensor cores, head sums in registers, scores to memory.
template <int kHeads>
__device__ __forceinline__ void score_keys(ScoreShared& shared, const ScoreWork& work, int warpgroup) {
  using Columns = ScoreColumns<kHeads>;
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
    ScoreTarget<Columns> target(args, unit.row, unit.key + in_stage, in_quad);
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
        target.store(sum_heads<Columns>(dot, weight, scale), stage * ScoreShared::kStageKeys);
      }
      target.advance(ScoreShared::Shape::kRingKeys);
      parity ^= 1U;
    }
    __syncwarp();
    if (ptx::elect()) ptx::arrive(&shared.unit_empty[buffer]);
  }
}

template <int kHeads>
__global__ void __launch_bounds__(ScoreShared::Shape::kThreads, 1)
    score_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ ScoreWork work) {
  extern __shared__ __align__(1024) std::uint8_t raw[];
  auto& shared = *reinterpret_cast<ScoreShared*>(raw);
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
      ptx::init(&shared.unit_full[i], 32);
      ptx::init(&shared.unit_empty[i], kMathWarps + 1);
    }
    ptx::fence_init();
  }
  __syncthreads();

  if (warpgroup == ScoreShared::Shape::kWarpgroups) {
    ptx::drop_registers<ScoreShared::Shape::kCopyRegisters>();
    if (warp % 4 == 0) {
      bring_units<kHeads>(shared, work, lane);
    } else if (warp % 4 == 1) {
      bring_keys(shared, map, work, lane);
    }
  } else {
    ptx::raise_registers<ScoreShared::Shape::kMathRegisters>();
    score_keys<kHeads>(shared, work, warpgroup);
  }
}

}  // namespace dosa::cuda
