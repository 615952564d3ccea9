// Launches score_kernel; included by the files that instantiate it.
#pragma once

#include <algorithm>

#include "backend/cuda/score.cuh"
#include "backend/cuda/tensor_map.hpp"

namespace dosa::cuda {

inline constexpr std::int64_t kMostChunkKeys = 32768;  // 4 MiB stay in L2 until every CTA has read them

/// Keys of a unit of work, about `most` of them at most: enough units for the last round of CTAs to cost little, few enough for
/// queries to be brought rarely.
inline int chunk_keys(std::int64_t keys, std::int64_t tiles, int ctas, std::int64_t most) {
  constexpr int kUnitsPerCta = 48;
  constexpr int kRingKeys = ScoreShared::Shape::kRingKeys;
  const std::int64_t rings = (keys + kRingKeys - 1) / kRingKeys;
  const std::int64_t wanted = rings * tiles / (std::int64_t{kUnitsPerCta} * ctas);
  const std::int64_t chunks = (rings - 1) / std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(most / kRingKeys, 1)) + 1;
  return static_cast<int>((rings + chunks - 1) / chunks) * kRingKeys;
}

template <class Columns, class Target>
cudaError_t launch_score_to(const ScoreArgs& args, int multiprocessors, cudaStream_t stream) {
  const std::int64_t keys = args.key_end - args.key_begin;
  const std::int64_t tiles = (args.rows + Columns::kQueries - 1) / Columns::kQueries;
  if (keys <= 0 || tiles <= 0) return cudaSuccess;
  std::int64_t most = kMostChunkKeys;
  // The records of a chunk should find room, if they are as evenly spread as keys are.
  if constexpr (Target::kRecords) most = std::min(most, Target::kRoom * keys / std::max<std::int64_t>(args.found.stride, 1));
  const int chunk = chunk_keys(keys, tiles, multiprocessors, most);
  const std::int64_t chunks = (keys + chunk - 1) / chunk;
  const std::int64_t units = tiles * chunks;
  if (units > INT32_MAX) return cudaErrorInvalidValue;

  CUtensorMap map;
  cudaError_t error = make_key_map(map, args.in.k, args.keys.count, ScoreShared::kStageKeys);
  if (error != cudaSuccess) return error;
  const auto kernel = score_kernel<Columns, Target>;
  constexpr int kSharedBytes = sizeof(typename Target::Shared);
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;

  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(units, multiprocessors));
  kernel<<<grid, ScoreShared::Shape::kThreads, kSharedBytes, stream>>>(
      map, ScoreWork{args, chunk, static_cast<int>(chunks)});
  return cudaGetLastError();
}

template <int kHeads>
cudaError_t launch_score_as(const ScoreArgs& args, int multiprocessors, cudaStream_t stream) {
  using Columns = ScoreColumns<kHeads>;
  return args.scores != nullptr ? launch_score_to<Columns, StoredScores<Columns>>(args, multiprocessors, stream)
                                : launch_score_to<Columns, FilteredScores<Columns>>(args, multiprocessors, stream);
}

}  // namespace dosa::cuda
