// Launches score_pages_kernel and witness_kernel; included by the files that instantiate it.
#pragma once

#include <algorithm>

#include "backend/cuda/launch_early.cuh"
#include "backend/cuda/score.hpp"
#include "backend/cuda/score_pages.cuh"
#include "backend/cuda/tensor_map.hpp"
#include "backend/cuda/witness.cuh"

namespace dosa::cuda {

template <class Columns, class Target>
cudaError_t launch_score_pages_to(const ScoreArgs& args, int multiprocessors, cudaStream_t stream) {
  using Shared = ScorePagesShared<Columns::kColumns>;
  const Pages& pages = args.in.pages;
  // At most: shares are made on the device, of the lengths that it finds.
  const std::int64_t stages = args.rows * ((args.key_end - args.key_begin) / Shared::kStageKeys + 2);
  if (args.rows <= 0 || args.key_end <= args.key_begin) return cudaSuccess;
  if (stages > INT32_MAX) return cudaErrorInvalidValue;

  CUtensorMap map{};
  constexpr std::int64_t kWidestStride = std::int64_t{1} << 40;
  const bool boxes = pages.count > 0 && reinterpret_cast<std::uintptr_t>(pages.pool) % 16 == 0 && pages.stride % 16 == 0 &&
                     pages.stride > 0 && pages.stride < kWidestStride;
  if (boxes) {
    const cudaError_t error = make_page_map(map, pages.pool, pages.count, pages.stride, 1 << pages.page_shift);
    if (error != cudaSuccess) return error;
  }
  const auto kernel = score_pages_kernel<Columns, Target>;
  constexpr int kSharedBytes = sizeof(Shared);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  return launch_early(kernel, std::min<std::int64_t>(stages, multiprocessors), Shared::kThreads, kSharedBytes, 1, stream, map, args, boxes);
}

/// Calls launch.template operator()<Columns>() with the narrowest tile that `queries` queries fill, or the widest there is.
template <int kHeads, class Launch>
cudaError_t with_page_columns(std::int64_t queries, const Launch& launch) {
  const std::int64_t columns = queries * kHeads;
  if constexpr (kHeads <= 32) {
    if (columns <= 32) return launch.template operator()<ScoreColumns<kHeads, 32>>();
  }
  if constexpr (kHeads <= 64) {
    if (columns <= 64) return launch.template operator()<ScoreColumns<kHeads, 64>>();
  }
  if constexpr (kHeads == 8) {
    return cudaErrorInvalidValue;  // more than 8 queries of a request
  } else {
    return launch.template operator()<ScoreColumns<kHeads, 128>>();
  }
}

template <int kHeads>
cudaError_t launch_score_pages_as(const ScoreArgs& args, int multiprocessors, cudaStream_t stream) {
  return with_page_columns<kHeads>(queries_together(args.in.pages, args.pass), [&]<class Columns>() {
    return args.scores != nullptr ? launch_score_pages_to<Columns, StoredScores<Columns>>(args, multiprocessors, stream)
                                  : launch_score_pages_to<Columns, PageRecords<Columns>>(args, multiprocessors, stream);
  });
}

template <int kHeads>
cudaError_t launch_witness_as(const WitnessArgs& args, cudaStream_t stream) {
  return with_page_columns<kHeads>(queries_of_witnesses(args), [&]<class Columns>() { return launch_witness_in<Columns>(args, stream); });
}

}  // namespace dosa::cuda
