// Launches score_kernel; included by the files that instantiate it.
#pragma once

#include <algorithm>

#include "backend/cuda/score.cuh"
#include "backend/cuda/tensor_map.hpp"

namespace dosa::cuda {

/// Keys of a unit of work: enough units for the last round of CTAs to cost little, few enough for queries to be brought rarely,
/// and at most 4 MiB of keys, which stay in L2 until every CTA has read them.
template <class Shape>
int chunk_keys(std::int64_t keys, std::int64_t tiles, int ctas) {
  constexpr int kUnitsPerCta = 64;
  constexpr int kLeastStages = 1024 / Shape::kStageKeys;
  constexpr int kMostStages = 32768 / Shape::kStageKeys;
  const std::int64_t stages = (keys + Shape::kStageKeys - 1) / Shape::kStageKeys;
  const std::int64_t wanted = stages * tiles / (std::int64_t{kUnitsPerCta} * ctas);
  return static_cast<int>(std::clamp<std::int64_t>(wanted, kLeastStages, kMostStages)) * Shape::kStageKeys;
}

template <int kHeads, class Shape>
cudaError_t launch_score_as(const ScoreArgs& args, int multiprocessors, cudaStream_t stream) {
  constexpr int kTileRows = ScoreColumns<kHeads>::kQueries * Shape::kCluster;
  const std::int64_t keys = args.key_end - args.key_begin;
  const std::int64_t tiles = (args.rows + kTileRows - 1) / kTileRows;
  if (keys <= 0 || tiles <= 0) return cudaSuccess;
  const int clusters = std::max(multiprocessors / Shape::kCluster, 1);
  const int chunk = chunk_keys<Shape>(keys, tiles, clusters);
  const std::int64_t units = tiles * ((keys + chunk - 1) / chunk);
  if (units > INT32_MAX) return cudaErrorInvalidValue;

  CUtensorMap map;
  cudaError_t error = make_key_map(map, args.in.k, args.in.nk, Shape::kStageKeys / Shape::kCluster);
  if (error != cudaSuccess) return error;
  const auto kernel = score_kernel<kHeads, Shape>;
  constexpr int kSharedBytes = sizeof(ScoreShared<Shape>);
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Shape::kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(std::min<std::int64_t>(units, clusters)) * Shape::kCluster;
  config.blockDim = Shape::kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = Shape::kCluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, map,
                            ScoreWork{args, chunk, static_cast<int>(tiles), static_cast<int>(units)});
}

}  // namespace dosa::cuda
