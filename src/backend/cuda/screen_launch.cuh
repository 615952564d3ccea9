// Launches screen_kernel; included by the files that instantiate it.
#pragma once

#include <algorithm>

#include "backend/cuda/screen.cuh"
#include "backend/cuda/tensor_map.hpp"

namespace dosa::cuda {

template <int kBudget>
cudaError_t launch_screen_as(const ScreenArgs& args, int multiprocessors, cudaStream_t stream) {
  using Tile = ScreenTile<kBudget>;
  using Shape = typename Tile::Shape;
  const std::int64_t keys = args.keys.count;
  if (keys <= 0 || args.list_capacity <= 0) return cudaSuccess;

  // Chunks as for scores: at most 4 MiB of keys, and enough units that the last round costs little. How many rows there are
  // is known on the device only; the capacity stands for it.
  constexpr int kSuperKeys = Shape::kStageKeys * kStepsOfRun;
  constexpr std::int64_t kUnitsPerCta = 32;
  const std::int64_t tiles = (args.list_capacity + Tile::kQueries - 1) / Tile::kQueries;
  const std::int64_t supers = (keys + kSuperKeys - 1) / kSuperKeys;
  const std::int64_t wanted = supers * tiles / (kUnitsPerCta * multiprocessors);
  const auto chunk = static_cast<int>(std::clamp<std::int64_t>(wanted, 1, 32768 / kSuperKeys)) * kSuperKeys;
  const auto chunks = static_cast<int>((keys + chunk - 1) / chunk);

  CUtensorMap map;
  cudaError_t error = make_key_map(map, args.k + args.keys.phase * kDim, keys, 64, args.keys.period);
  if (error != cudaSuccess) return error;
  const auto kernel = screen_kernel<kBudget>;
  constexpr int kSharedBytes = sizeof(ScreenShared<kBudget>);
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(tiles * chunks, multiprocessors));
  kernel<<<grid, Shape::kThreads, kSharedBytes, stream>>>(map, ScreenWork{args, chunk, chunks});
  return cudaGetLastError();
}

}  // namespace dosa::cuda
