// score: all keys of a slice for all its rows, stored.
//
// A = keys, 64 a warpgroup; B = 128 rows of query heads, all heads of 128 / kHeads queries. A unit of work is (query tile, chunk
// of keys); units run chunk by chunk, so that all CTAs read the same few megabytes of keys at a time and find them in L2.
#pragma once

#include "backend/cuda/layout.hpp"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/score_tile.cuh"
#include "backend/cuda/wgmma.cuh"

namespace dosa::cuda {

/// ScoreArgs and what the launcher made of them.
struct ScoreWork {
  ScoreArgs args;
  int chunk_keys;  // a multiple of a stage's keys
  int tiles;       // groups of queries that a cluster takes together
  int units;       // tiles * chunks
};

/// One warp: finds the units that this cluster's rows can see, and brings queries and weights, one unit ahead.
template <int kHeads, class Shape>
__device__ __forceinline__ void bring_units(ScoreShared<Shape>& shared, const ScoreWork& work, int lane) {
  using Columns = ScoreColumns<kHeads>;
  constexpr int kClusterQueries = Columns::kQueries * Shape::kCluster;
  const ScoreArgs& args = work.args;
  const Inputs& in = args.in;
  const int clusters = static_cast<int>(gridDim.x) / Shape::kCluster;
  const int rank = Shape::kCluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
  int buffer = 0;
  unsigned parity = 1;

  for (int u = static_cast<int>(blockIdx.x) / Shape::kCluster; u < work.units; u += clusters) {
    // The visible keys of the tile's rows, within the chunk.
    const int chunk = u / work.tiles;
    const int first_row = (u - chunk * work.tiles) * kClusterQueries;
    const int chunk_begin = static_cast<int>(args.key_begin) + chunk * work.chunk_keys;
    const int chunk_end = min(chunk_begin + work.chunk_keys, static_cast<int>(args.key_end));
    int begin = chunk_end;
    int end = chunk_begin;
    if (lane < kClusterQueries && first_row + lane < args.rows) {
      const std::int64_t query = args.first_row + first_row + lane;
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
    const int key = chunk_begin + (begin - chunk_begin) / Shape::kStageKeys * Shape::kStageKeys;
    const int stages = (end - key + Shape::kStageKeys - 1) / Shape::kStageKeys;
    const int row = first_row + rank * Columns::kQueries;

    // Query rows in the order of the tile's columns; rows that do not exist are zero.
    ptx::wait(&shared.unit_empty[buffer], parity);
    const std::uint32_t to = ptx::shared(shared.queries[buffer]);
#pragma unroll 1
    for (int i = lane; i < Columns::kColumns * 8; i += 32) {
      const int column = i / 8;
      const int head = Columns::head(column);
      const int query_row = row + Columns::query(column);
      const bool exists = head < in.heads && query_row < args.rows;
      const std::int64_t query = args.first_row + query_row;
      ptx::copy_16(to + swizzled(column, i % 8), exists ? in.q + ((query * in.heads + head) * 8 + i % 8) * 16 : in.q, exists);
    }
#pragma unroll 1
    for (int column = lane; column < Columns::kColumns; column += 32) {
      const int head = Columns::head(column);
      const int query_row = row + Columns::query(column);
      const bool exists = head < in.heads && query_row < args.rows;
      const std::int64_t query = args.first_row + query_row;
      shared.weights[buffer][column] = exists ? in.w[query * in.w_stride + head] : padding_weight(head, in.heads);
    }
    if (lane == 0) shared.unit[buffer] = {row, key, stages};
    ptx::commit_copies();
    ptx::wait_copies<0>();
    ptx::fence_async();
    ptx::arrive(&shared.unit_full[buffer]);
    parity ^= static_cast<unsigned>(buffer);
    buffer ^= 1;
  }

  // The end.
  ptx::wait(&shared.unit_empty[buffer], parity);
  if (lane == 0) shared.unit[buffer] = {0, 0, 0};
  ptx::arrive(&shared.unit_full[buffer]);
}

/// One warp: keys by the copy engine, their scales by plain copies, up to kStages ahead. CTAs of a cluster bring a share of
/// the keys each, to all.
template <class Shape>
__device__ __forceinline__ void bring_keys(ScoreShared<Shape>& shared, const CUtensorMap& map, const ScoreWork& work, int lane) {
  constexpr int kShare = Shape::kStageKeys / Shape::kCluster;
  constexpr std::uint16_t kAll = (1 << Shape::kCluster) - 1;
  const int rank = Shape::kCluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
  const int nk = static_cast<int>(work.args.in.nk);
  int stage = 0;
  unsigned parity = 1;

  for (int n = 0;; ++n) {
    const int buffer = n & 1;
    ptx::wait(&shared.unit_full[buffer], n >> 1 & 1);
    const ScoreUnit unit = shared.unit[buffer];
    __syncwarp();
    if (lane == 0) ptx::arrive(&shared.unit_empty[buffer]);
    if (unit.stages == 0) break;
    for (int s = 0; s < unit.stages; ++s) {
      ptx::wait<(Shape::kCluster > 1)>(&shared.keys_empty[stage], parity);
      const int key = unit.key + s * Shape::kStageKeys;
      ptx::Barrier* full = &shared.keys_full[stage];
      if (lane == 0) {
        ptx::arrive_and_expect(full, Shape::kStageKeys * kDim);
        if constexpr (Shape::kCluster > 1) {
          ptx::copy_box_to_all(shared.keys[stage] + rank * kShare * kDim, &map, 0, key + rank * kShare, full, kAll);
        } else {
          ptx::copy_box(shared.keys[stage], &map, 0, key, full);
        }
      }
      const std::uint32_t to = ptx::shared(shared.scales[stage]);
#pragma unroll
      for (int i = 0; i < Shape::kStageKeys; i += 32) {
        const bool exists = key + i + lane < nk;
        ptx::copy_4(to + (i + lane) * 4, work.args.in.k_scale + (exists ? key + i + lane : 0), exists);
      }
      ptx::arrive_after_copies(full);
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
      parity ^= stage == 0 ? 1U : 0U;
    }
  }
}

/// A math warpgroup: dots on the tensor cores, head sums in registers, scores to memory.
template <int kHeads, class Shape>
__device__ __forceinline__ void score_keys(ScoreShared<Shape>& shared, const ScoreWork& work, int warpgroup) {
  using Columns = ScoreColumns<kHeads>;
  constexpr int kBlocks = Columns::kColumns / 8;
  const ScoreArgs& args = work.args;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int in_quad = lane % kQuad;
  const int in_stage = warpgroup * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / kQuad;  // key of row g
  int stage = 0;  // of the oldest product that is not finished
  int next = 0;   // of the product to start
  unsigned parity = 0;
  float first[Columns::kColumns / 2];
  float second[Columns::kColumns / 2];  // of shapes with two buffers
  if (Shape::kOrdered && warpgroup == Shape::kWarpgroups - 1) ptx::named_arrive(1, 256);

  for (int n = 0;; ++n) {
    const int buffer = n & 1;
    ptx::wait(&shared.unit_full[buffer], n >> 1 & 1);
    const ScoreUnit unit = shared.unit[buffer];
    if (unit.stages == 0) break;

    // What stays in registers for the unit: weights, and where this lane's scores go.
    float weight[2 * kBlocks];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(&shared.weights[buffer][8 * j + 2 * in_quad]);
      weight[2 * j] = pair.x;
      weight[2 * j + 1] = pair.y;
    }
    ScoreTarget<Columns> target(args, unit.row, unit.key + in_stage, in_quad);
    const std::uint64_t queries = row_descriptor(shared.queries[buffer]);

    // The product of the next stage's keys.
    const auto start = [&](float (&d)[Columns::kColumns / 2]) {
      ptx::wait<(Shape::kCluster > 1)>(&shared.keys_full[next], parity);
      const std::uint64_t keys = row_descriptor(shared.keys[next] + warpgroup * 64 * kDim);
      if constexpr (Shape::kOrdered) {
        // The next warpgroup's turn comes when half of this product is done: tensor cores never run dry, and two
        // warpgroups never finish together.
        ptx::named_wait(1 + warpgroup, 256);
        wgmma_fence();
        wgmma_steps<Columns::kColumns, 0, 2>(d, keys, queries);
        wgmma_commit();
        wgmma_steps<Columns::kColumns, 2, 4>(d, keys, queries);
        wgmma_commit();
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        ptx::named_arrive(1 + (warpgroup + 1) % Shape::kWarpgroups, 256);
      } else {
        wgmma_fence();
        wgmma_steps<Columns::kColumns>(d, keys, queries);
        wgmma_commit();
      }
      next = next + 1 == Shape::kStages ? 0 : next + 1;
      parity ^= next == 0 ? 1U : 0U;
    };
    // Scores of the oldest stage under way.
    const auto finish = [&](float (&d)[Columns::kColumns / 2], auto pending) {
      const float scale[2] = {shared.scales[stage][in_stage], shared.scales[stage][in_stage + 8]};
      wgmma_wait<decltype(pending)::value>(d);
      __syncwarp();
      if (lane == 0) ptx::arrive(&shared.keys_empty[stage]);
      if (Shape::kCluster > 1 && lane == 1) ptx::arrive_at(&shared.keys_empty[stage], ptx::cluster_rank() ^ 1U);
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
      target.store(sum_heads<Columns>(d, weight, scale));
      target.advance(Shape::kStageKeys);
    };

    if constexpr (Shape::kBuffers == 1) {
      for (int s = 0; s < unit.stages; ++s) {
        start(first);
        finish(first, std::integral_constant<int, 0>());
      }
    } else {
      start(first);
      int left = unit.stages;
      for (; left > 2; left -= 2) {
        start(second);
        finish(first, std::integral_constant<int, 1>());
        start(first);
        finish(second, std::integral_constant<int, 1>());
      }
      if (left == 2) {
        start(second);
        finish(first, std::integral_constant<int, 1>());
        finish(second, std::integral_constant<int, 0>());
      } else {
        finish(first, std::integral_constant<int, 0>());
      }
    }
    __syncwarp();
    if (lane == 0) ptx::arrive(&shared.unit_empty[buffer]);
  }
  if (Shape::kOrdered && warpgroup == 0) ptx::named_wait(1, 256);
}

template <int kHeads, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    score_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ ScoreWork work) {
  extern __shared__ __align__(1024) std::uint8_t raw[];
  auto& shared = *reinterpret_cast<ScoreShared<Shape>*>(raw);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 32, 0);
  const int warpgroup = warp / 4;

  if (threadIdx.x == 0) {
    constexpr int kMathWarps = Shape::kWarpgroups * 4;
    for (int i = 0; i < Shape::kStages; ++i) {
      ptx::init(&shared.keys_full[i], 1 + 32);
      ptx::init(&shared.keys_empty[i], kMathWarps * Shape::kCluster);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::init(&shared.unit_full[i], 32);
      ptx::init(&shared.unit_empty[i], kMathWarps + 1);
    }
    ptx::fence_init();
  }
  if constexpr (Shape::kCluster > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }

  if (warpgroup == Shape::kWarpgroups) {
    ptx::drop_registers<Shape::kCopyRegisters>();
    if (warp % 4 == 0) {
      bring_units<kHeads>(shared, work, lane);
    } else if (warp % 4 == 1) {
      bring_keys(shared, map, work, lane);
    }
  } else {
    ptx::raise_registers<Shape::kMathRegisters>();
    score_keys<kHeads>(shared, work, warpgroup);
  }
  if constexpr (Shape::kCluster > 1) ptx::cluster_sync();  // nobody may still be sending to, or arriving at, a CTA that left
}

}  // namespace dosa::cuda
