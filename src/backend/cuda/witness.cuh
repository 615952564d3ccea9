// witness: hinted keys, scored for the current query; the K-th best of them is tau.
//
// A CTA scores 64 keys for one tile of queries of a request: A = gathered keys, B = query heads, as score_pages. The last CTA of
// a tile to finish finds tau for each of the tile's queries.
#pragma once

#include <algorithm>

#include "backend/cuda/launch_early.cuh"
#include "backend/cuda/layout.hpp"
#include "backend/cuda/order.cuh"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/record_buffer.cuh"
#include "backend/cuda/score_tile.cuh"
#include "backend/cuda/wgmma.cuh"

namespace dosa::cuda {

inline constexpr int kWitnessThreads = 128;
inline constexpr int kWitnessKeys = 64;

template <int kColumns>
struct WitnessShared {
  alignas(1024) std::uint8_t keys[kWitnessKeys * kDim];
  alignas(1024) std::uint8_t queries[kColumns * kDim];
  float weights[kColumns];
  float scales[kWitnessKeys];
  std::int32_t ids[kWitnessKeys];  // -1: no key
  RecordBuffer<kWitnessThreads>::Shared buffer;
  bool last;
};

/// Neighbouring rows that have the same hints.
inline std::int64_t queries_of_witnesses(const WitnessArgs& args) {
  return args.hints.query_stride != 0 ? 1 : queries_together(args.in.pages, {});
}

/// All threads: of a row whose witnesses' codes are known. A little lower does as well, so two passes over the codes are enough.
__device__ __forceinline__ void find_tau(const WitnessArgs& args, std::int64_t row, std::uint32_t* codes, RecordBuffer<kWitnessThreads>::Shared& shared) {
  constexpr int kCoarsest = 32 + 10;  // 2^-13 of a score
  std::uint32_t code = kNaNCode;
  if (args.hints.width >= args.topk) {
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < args.hints.width; i += kWitnessThreads) codes[i] = __ldcg(args.codes + row * args.code_stride + i);
    __syncthreads();
    const Record bound = RecordBuffer<kWitnessThreads>::bound_of(shared, args.hints.width, args.topk, kCoarsest,
                                                                 [codes](int i) { return Record{codes[i]} << 32; });
    code = code_of(bound - 1);
  }
  if (threadIdx.x == 0) {
    const Visible visible = visible_keys(args.in, args.first_row + row);
    const bool found = code <= kWorstNumberCode, fits = visible.end - visible.begin <= args.found.stride;
    args.tau[row] = found ? score_of_code(code) : __uint_as_float(fits ? 0xFF800000U : 0x7F800000U);
    args.found.count[row] = 0;
    args.found.lost[row] = 0;
  }
  __syncthreads();
}

template <class Columns>
__global__ void __launch_bounds__(kWitnessThreads)
    witness_kernel(const __grid_constant__ WitnessArgs args, int together, int tiles_each, int splits) {
  using Shared = WitnessShared<Columns::kColumns>;
  using Lane = LaneScores<Columns>;
  constexpr int kBlocks = Columns::kColumns / 8;
  extern __shared__ __align__(1024) std::uint8_t raw[];
  auto& shared = *reinterpret_cast<Shared*>(raw);
  ptx::wait_for_previous();
  ptx::let_next_begin();
  const Inputs& in = args.in;
  const Pages& pages = in.pages;
  const Hints& hints = args.hints;
  const int thread = static_cast<int>(threadIdx.x);
  const int tile = static_cast<int>(blockIdx.x) / splits, first = static_cast<int>(blockIdx.x) % splits * kWitnessKeys;
  const int row = tile / tiles_each * together + tile % tiles_each * Columns::kQueries;
  const int rows = min(Columns::kQueries, together - tile % tiles_each * Columns::kQueries);
  const std::int64_t query = args.first_row + row;
  const std::int64_t request = request_of(pages, query);
  for (int i = thread; i < RecordBuffer<kWitnessThreads>::kBins; i += kWitnessThreads) shared.buffer.bins[i] = 0;

  // What is hinted, as far as it is a key of the request's.
  if (thread < kWitnessKeys) {
    const int at = first + thread;
    const std::int64_t from = query * hints.query_stride + request * hints.request_stride + at * hints.stride;
    const std::int32_t id = request >= 0 && at < hints.width ? hints.ids[from] : -1;
    shared.ids[thread] = id < in.nk ? id : -1;
  }
  for (int column = thread; column < Columns::kColumns; column += kWitnessThreads) {
    const int head = Columns::head(column), i = Columns::query(column);
    shared.weights[column] = head < in.heads && i < rows ? in.w[(query + i) * in.w_stride + head] : padding_weight(head, in.heads);
  }
  for (int i = thread; i < Columns::kColumns * 8; i += kWitnessThreads) {
    const int head = Columns::head(i / 8), q = Columns::query(i / 8);
    const bool there = head < in.heads && q < rows;
    ptx::copy_16(ptx::shared(shared.queries) + swizzled(i / 8, i % 8),
                 in.q + (there ? (((query + q) * in.heads + head) * 8 + i % 8) * 16 : 0), there);
  }
  __syncthreads();
  const auto page_bytes = [&](int key) {  // offset of the page that holds a witness; -1: none does
    const std::int32_t id = shared.ids[key];
    const std::int64_t page = id < 0 ? -1 : page_of(pages, request, id >> pages.page_shift);
    return exists(pages, page) ? page * pages.stride : -1;
  };
  const auto in_page = [&](int key) { return shared.ids[key] & ((1 << pages.page_shift) - 1); };
#pragma unroll
  for (int key = thread / 8; key < kWitnessKeys; key += kWitnessThreads / 8) {
    const std::int64_t page = page_bytes(key);
    const std::uint8_t* from = pages.pool + (page < 0 ? 0 : page + in_page(key) * kDim + thread % 8 * 16);
    const std::uint32_t to = ptx::shared(shared.keys) + swizzled(key, thread % 8);
#pragma unroll
    for (int word = 0; word < 4; ++word) ptx::copy_4(to + 4 * word, from + (page < 0 ? 0 : 4 * word), page >= 0);
  }
  if (thread < kWitnessKeys) {
    const std::int64_t page = page_bytes(thread);
    const std::int64_t from = page < 0 ? 0 : page + (kDim << pages.page_shift) + in_page(thread) * 4;
    ptx::copy_4(ptx::shared(&shared.scales[thread]), pages.pool + from, page >= 0);
  }
  ptx::commit_copies();
  ptx::wait_copies<0>();
  ptx::fence_async();
  __syncthreads();

  float dot[Columns::kColumns / 2];
  multiply<Columns::kColumns>(dot, rows_at(shared.keys), rows_at(shared.queries));
  const int in_quad = thread % kQuad;
  const int in_tile = thread / 32 * 16 + thread % 32 / kQuad;  // key of accumulator row g
  const float scale[2] = {shared.scales[in_tile], shared.scales[in_tile + 8]};
  float weight[2 * kBlocks];
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const float2 pair = *reinterpret_cast<const float2*>(&shared.weights[8 * j + 2 * in_quad]);
    weight[2 * j] = pair.x;
    weight[2 * j + 1] = pair.y;
  }
  wgmma_wait<0>(dot);
  const Lane scores = sum_heads<Columns>(dot, weight, scale);
#pragma unroll
  for (int i = 0; i < Lane::kRows; ++i) {
    const int q = Lane::query(in_quad) + i * Columns::kGroup;
    if (q >= rows) continue;
    const Visible visible = visible_keys(in, query + q);
#pragma unroll
    for (int half = 0; half < Lane::kHalves; ++half) {
      const int key = in_tile + (Lane::kHalves == 1 ? 8 * Lane::half(in_quad) : 8 * half);
      const std::int32_t id = shared.ids[key];
      const bool sees = id >= 0 && id >= visible.begin && id < visible.end;
      if (first + key < hints.width) args.codes[(row + q) * args.code_stride + first + key] = sees ? order_code(scores.value[i][half]) : kNaNCode;
    }
  }
  __threadfence();
  __syncthreads();
  if (thread == 0) shared.last = atomicAdd(&args.done[row], 1) == splits - 1;
  __syncthreads();
  if (!shared.last) return;
  __threadfence();
  if (thread == 0) args.done[row] = 0;
  for (int i = 0; i < rows; ++i) find_tau(args, row + i, reinterpret_cast<std::uint32_t*>(raw + sizeof(Shared)), shared.buffer);
}

template <class Columns>
cudaError_t launch_witness_in(const WitnessArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const auto together = static_cast<int>(queries_of_witnesses(args));
  const int tiles_each = (together + Columns::kQueries - 1) / Columns::kQueries;
  const int splits = std::max(1, (args.hints.width + kWitnessKeys - 1) / kWitnessKeys);
  const auto kernel = witness_kernel<Columns>;
  const std::size_t shared_bytes = sizeof(WitnessShared<Columns::kColumns>) + static_cast<std::size_t>(args.hints.width) * sizeof(std::uint32_t);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  return launch_early(kernel, args.rows / together * tiles_each * splits, kWitnessThreads, shared_bytes, 1, stream, args, together, tiles_each, splits);
}

}  // namespace dosa::cuda
