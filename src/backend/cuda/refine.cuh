// refine: reference scores of listed keys.
//
// A CTA is one warpgroup that gathers and multiplies: A = 64 gathered keys, B = 128 rows of query heads, all heads of the
// queries of a group. A tile is two products, so that the second runs while the first one's scores are formed. Several CTAs
// share a multiprocessor and hide each other's waits. A unit of work is every `splits`-th tile of one group's list.
#pragma once

#include "backend/cuda/layout.hpp"
#include "backend/cuda/order.cuh"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/score_tile.cuh"
#include "backend/cuda/wgmma.cuh"

namespace dosa::cuda {

struct RefineWork {
  RefineArgs args;
  int splits;
};

/// Records found so far go to their rows' lists, in no particular order: selection orders them. All threads call it, between
/// barriers; it ends with one.
template <class Shared>
__device__ __forceinline__ void flush_records(Shared& shared, const RefineArgs& args, std::int64_t first_row) {
  constexpr int kQueries = Shared::Columns::kQueries;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kQueries && shared.record_count[thread] > 0) {
    shared.record_base[thread] = atomicAdd(&args.found.count[first_row + thread], shared.record_count[thread]);
  }
  __syncthreads();
  for (int q = 0; q < kQueries; ++q) {
    const std::int64_t row = first_row + q;
    for (int i = thread; i < shared.record_count[q]; i += 128) {
      append(args.found, row, shared.record_base[q] + i, shared.records[q][i]);
    }
  }
  __syncthreads();
  if (thread < kQueries) shared.record_count[thread] = 0;
  __syncthreads();
}

/// What a lane has to know of the queries whose scores it ends with.
template <class Lane>
struct LaneQueries {
  float tau[Lane::kRows];
  int begin[Lane::kRows];  // visible keys; none if no records are wanted
  int end[Lane::kRows];

  __device__ LaneQueries(const RefineArgs& args, std::int64_t first_row, int in_quad) {
#pragma unroll
    for (int i = 0; i < Lane::kRows; ++i) {
      const std::int64_t row = first_row + Lane::query(in_quad) + i * Lane::Columns::kGroup;
      const bool wanted = row < args.rows && (args.screened == nullptr || args.screened[row] != 0);
      const Visible visible = wanted ? visible_keys(args.in, args.first_row + row) : Visible{0, 0};
      tau[i] = wanted ? args.tau[row] : 0;
      begin[i] = static_cast<int>(visible.begin);
      end[i] = static_cast<int>(visible.end);
    }
  }
};

template <int kHeads>
__global__ void __launch_bounds__(128, kCtasOfSm<RefineShared<kHeads>>) refine_kernel(const __grid_constant__ RefineWork work) {
  using Shared = RefineShared<kHeads>;
  using Columns = typename Shared::Columns;
  using Lane = LaneScores<Columns>;
  constexpr int kBlocks = Columns::kColumns / 8;
  extern __shared__ __align__(1024) std::uint8_t raw[];
  auto& shared = *reinterpret_cast<Shared*>(raw);
  const RefineArgs& args = work.args;
  const Inputs& in = args.in;
  const int thread = static_cast<int>(threadIdx.x);
  const int in_quad = thread % kQuad;
  const int chunk = thread % 8;  // 16 bytes of a row
  const int in_tile = thread / 32 * 16 + thread % 32 / kQuad;  // key of accumulator row g
  // The first key that this lane scores, and whether no other lane of its quad records the same.
  const int scored = in_tile + (Lane::kHalves == 1 ? 8 * Lane::half(in_quad) : 0);
  const bool records = Columns::kGroup > 1 || in_quad < 2;
  const std::int64_t groups = (args.rows + Columns::kQueries - 1) / Columns::kQueries;
  if (thread < Columns::kQueries) shared.record_count[thread] = 0;

  for (std::int64_t u = blockIdx.x; u < groups * work.splits; u += gridDim.x) {
    const int split = static_cast<int>(u / groups);
    const std::int64_t group = u - split * groups;
    const int count = args.count[group];
    const int tiles = (count + Shared::kTileKeys - 1) / Shared::kTileKeys;
    const int mine = (tiles - split + work.splits - 1) / work.splits;  // tiles split, split + splits, ...
    if (mine <= 0) continue;
    const std::int64_t first_row = group * Columns::kQueries;
    const std::int32_t* list = args.ids + args.offset[group];

    // Ids, and keys whose ids are there, on their way: one group of copies a tile.
    const auto bring_ids = [&](int tile) {
      if (thread < Shared::kTileKeys) {
        const int at = (split + tile * work.splits) * Shared::kTileKeys + thread;
        const bool exists = tile < mine && at < count;
        ptx::copy_4(ptx::shared(&shared.ids[tile % Shared::kIdStages][thread]), list + (exists ? at : 0), exists);
      }
    };
    const auto bring_keys = [&](int tile) {
      if (tile >= mine) return;
      const int stage = tile % Shared::kStages;
      const std::int32_t* ids = shared.ids[tile % Shared::kIdStages];
      const int left = count - (split + tile * work.splits) * Shared::kTileKeys;
      const std::uint32_t to = ptx::shared(shared.keys[stage]);
#pragma unroll
      for (int key = thread / 8; key < Shared::kTileKeys; key += 16) {
        ptx::copy_16(to + swizzled(key, chunk), in.k + static_cast<std::int64_t>(ids[key]) * kDim + chunk * 16, key < left);
      }
      if (thread < Shared::kTileKeys) {
        ptx::copy_4(ptx::shared(&shared.scales[stage][thread]), in.k_scale + ids[thread], thread < left);
      }
    };
    __syncthreads();  // the last unit's queries, ids and records are done with
#pragma unroll 1
    for (int i = thread; i < Columns::kColumns * 8; i += 128) {
      const int column = i / 8;
      const int head = Columns::head(column);
      const std::int64_t row = first_row + Columns::query(column);
      const bool exists = head < in.heads && row < args.rows;
      ptx::copy_16(ptx::shared(shared.queries) + swizzled(column, i % 8),
                   exists ? in.q + (((args.first_row + row) * in.heads + head) * 8 + i % 8) * 16 : in.q, exists);
    }
    for (int column = thread; column < Columns::kColumns; column += 128) {
      const int head = Columns::head(column);
      const std::int64_t row = first_row + Columns::query(column);
      const bool exists = head < in.heads && row < args.rows;
      shared.weights[column] = exists ? in.w[(args.first_row + row) * in.w_stride + head] : padding_weight(head, in.heads);
    }
    for (int tile = 0; tile < Shared::kAhead; ++tile) bring_ids(tile);
    ptx::commit_copies();
    ptx::wait_copies<0>();
    __syncthreads();
    for (int tile = 0; tile < Shared::kAhead; ++tile) {
      bring_keys(tile);
      bring_ids(tile + Shared::kAhead);
      ptx::commit_copies();
    }
    const LaneQueries<Lane> queries(args, first_row, in_quad);
    const std::uint32_t heads = rows_at(shared.queries);
    bool filling = false;  // a query's records might not all find room in the next tile

    for (int tile = 0; tile < mine; ++tile) {
      ptx::wait_copies<Shared::kAhead - 1>();
      ptx::fence_async();
      if (__syncthreads_or(filling ? 1 : 0) != 0) {
        flush_records(shared, args, first_row);
        filling = false;
      }

      // Dots on the tensor cores; meanwhile the stage that was read last is filled again.
      const int stage = tile % Shared::kStages;
      const int left = count - (split + tile * work.splits) * Shared::kTileKeys;
      const std::int32_t* ids = shared.ids[tile % Shared::kIdStages];
      const std::uint32_t keys = rows_at(shared.keys[stage]);
      float dot[2][Columns::kColumns / 2];
      multiply<Columns::kColumns>(dot[0], keys, heads);
      multiply<Columns::kColumns>(dot[1], keys + (64 * kDim >> 4), heads);
      bring_keys(tile + Shared::kAhead);
      bring_ids(tile + 2 * Shared::kAhead);
      ptx::commit_copies();

      // Visible and not below tau: a record. A NaN is not below anything.
      const auto record = [&](const float (&of)[Columns::kColumns / 2], int first) {
        float weight[2 * kBlocks];  // read again for every product: there are no registers to keep them in
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          const float2 pair = *reinterpret_cast<const float2*>(&shared.weights[8 * j + 2 * in_quad]);
          weight[2 * j] = pair.x;
          weight[2 * j + 1] = pair.y;
        }
        const float scale[2] = {shared.scales[stage][first + in_tile], shared.scales[stage][first + in_tile + 8]};
        const Lane scores = sum_heads<Columns>(of, weight, scale);
        int id[Lane::kHalves];
#pragma unroll
        for (int half = 0; half < Lane::kHalves; ++half) id[half] = ids[first + scored + 8 * half];
#pragma unroll
        for (int i = 0; i < Lane::kRows; ++i) {
          bool keep[Lane::kHalves];
          int kept = 0;
#pragma unroll
          for (int half = 0; half < Lane::kHalves; ++half) {
            keep[half] = records && first + scored + 8 * half < left && id[half] >= queries.begin[i] && id[half] < queries.end[i] &&
                         !(scores.value[i][half] < queries.tau[i]);
            kept += keep[half] ? 1 : 0;
          }
          if (kept == 0) continue;
          const int query = Lane::query(in_quad) + i * Columns::kGroup;
          int at = atomicAdd(&shared.record_count[query], kept);
          filling = filling || at + kept > Shared::kRecords - Shared::kTileKeys;
#pragma unroll
          for (int half = 0; half < Lane::kHalves; ++half) {
            if (keep[half]) shared.records[query][at++] = make_record(scores.value[i][half], static_cast<std::uint32_t>(id[half]));
          }
        }
      };
      wgmma_wait<1>(dot[0]);
      record(dot[0], 0);
      wgmma_wait<0>(dot[1]);
      record(dot[1], 64);
    }
    ptx::wait_copies<0>();
    __syncthreads();
    flush_records(shared, args, first_row);
  }
}

}  // namespace dosa::cuda
