// refine: reference scores of listed keys.
//
// A CTA is one warpgroup that gathers and multiplies: A = 64 gathered keys, B = the heads of one query. Several CTAs share a
// multiprocessor and hide each other's waits. A unit of work is every `splits`-th tile of one row's list.
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

/// Records found so far go to the row's list, in no particular order: selection orders them. All threads call it.
template <class Shared>
__device__ __forceinline__ void flush_records(Shared& shared, const RefineArgs& args, int row) {
  const int thread = static_cast<int>(threadIdx.x);
  const int count = shared.record_count;
  if (thread == 0) shared.record_base = atomicAdd(&args.record_count[row], count);
  __syncthreads();
  Record* to = args.records + args.record_offset[row] + shared.record_base;
  for (int i = thread; i < count; i += 128) to[i] = shared.records[i];
  __syncthreads();
  if (thread == 0) shared.record_count = 0;
}

template <int kHeads>
__global__ void __launch_bounds__(128, kCtasOfSm<RefineShared<kHeads>>) refine_kernel(const __grid_constant__ RefineWork work) {
  using Shared = RefineShared<kHeads>;
  using Columns = ScoreColumns<kHeads, kHeads>;
  extern __shared__ __align__(1024) std::uint8_t raw[];
  auto& shared = *reinterpret_cast<Shared*>(raw);
  const RefineArgs& args = work.args;
  const Inputs& in = args.in;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int in_quad = lane % kQuad;
  const int chunk = thread % 8;  // 16 bytes of a row
  // The key that this lane scores, and whether no other lane of its quad records it.
  const int scored = thread / 32 * 16 + lane / kQuad + 8 * LaneScores<Columns>::half(in_quad);
  const bool records = in_quad < 2;
  const std::int64_t units = args.rows * work.splits;
  if (thread == 0) shared.record_count = 0;

  for (std::int64_t u = blockIdx.x; u < units; u += gridDim.x) {
    const int split = static_cast<int>(u / args.rows);
    const int row = static_cast<int>(u - split * args.rows);
    const int count = args.count[row];
    const int tiles = (count + Shared::kTileKeys - 1) / Shared::kTileKeys;
    const int mine = (tiles - split + work.splits - 1) / work.splits;  // tiles split, split + splits, ...
    if (mine <= 0) continue;
    const std::int64_t query = args.first_row + row;
    const std::int32_t* list = args.ids + args.offset[row];
    const float tau = args.tau[row];

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
    __syncthreads();  // the last unit's query, ids and records are done with
    for (int i = thread; i < kHeads * 8; i += 128) {
      const int head = i / 8;
      const bool exists = head < in.heads;
      ptx::copy_16(ptx::shared(shared.query) + swizzled(head, i % 8),
                   exists ? in.q + ((query * in.heads + head) * 8 + i % 8) * 16 : in.q, exists);
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
    float weight[kHeads / 4];
#pragma unroll
    for (int j = 0; j < kHeads / 4; ++j) {
      const int head = j / 2 * 8 + 2 * in_quad + j % 2;
      weight[j] = head < in.heads ? in.w[query * in.w_stride + head] : padding_weight(head, in.heads);
    }
    const std::uint32_t heads = rows_at(shared.query);
    int filled = 0;  // records in shared memory, as far as this warp knows

    for (int tile = 0; tile < mine; ++tile) {
      ptx::wait_copies<Shared::kAhead - 1>();
      ptx::fence_async();
      if (__syncthreads_or(filled > Shared::kRecords - Shared::kTileKeys) != 0) {
        flush_records(shared, args, row);
        __syncthreads();
        filled = 0;
      }

      // Dots on the tensor cores; meanwhile the stage that was read last is filled again.
      const int stage = tile % Shared::kStages;
      float dot[kHeads / 2];
      multiply<kHeads>(dot, rows_at(shared.keys[stage]), heads);
      bring_keys(tile + Shared::kAhead);
      bring_ids(tile + 2 * Shared::kAhead);
      ptx::commit_copies();
      const int id = shared.ids[tile % Shared::kIdStages][scored];
      const int first = scored - 8 * LaneScores<Columns>::half(in_quad);
      const float scale[2] = {shared.scales[stage][first], shared.scales[stage][first + 8]};
      wgmma_wait<0>(dot);
      const float score = sum_heads<Columns>(dot, weight, scale).value[0][0];

      // Not below tau: a record. A NaN is not below anything.
      const bool exists = (split + tile * work.splits) * Shared::kTileKeys + scored < count;
      const bool keep = records && exists && !(score < tau);
      const unsigned kept = __ballot_sync(0xFFFFFFFFU, keep);
      if (kept != 0) {
        int base = 0;
        if (lane == 0) base = atomicAdd(&shared.record_count, __popc(kept));
        base = __shfl_sync(0xFFFFFFFFU, base, 0);
        if (keep) shared.records[base + __popc(kept & ((1U << lane) - 1))] = make_record(score, static_cast<std::uint32_t>(id));
        filled = base + __popc(kept);
      }
    }
    ptx::wait_copies<0>();
    __syncthreads();
    flush_records(shared, args, row);
  }
}

}  // namespace dosa::cuda
