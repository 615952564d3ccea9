// Launches refine_kernel; included by the files that instantiate it.
#pragma once

#include <algorithm>

#include "backend/cuda/refine.cuh"

namespace dosa::cuda {

template <int kHeads>
cudaError_t launch_refine_as(const RefineArgs& args, int multiprocessors, cudaStream_t stream) {
  static_assert(group_rows(kHeads) == RefineShared<kHeads>::Columns::kQueries);
  if (args.rows <= 0) return cudaSuccess;
  const auto kernel = refine_kernel<kHeads>;
  constexpr int kSharedBytes = sizeof(RefineShared<kHeads>);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;

  // Lists are split until every CTA has some units, so that the last ones to finish are not far behind.
  constexpr std::int64_t kUnitsPerCta = 16;
  const std::int64_t ctas = std::int64_t{multiprocessors} * kCtasOfSm<RefineShared<kHeads>>;
  const std::int64_t groups = (args.rows + group_rows(kHeads) - 1) / group_rows(kHeads);
  const std::int64_t splits = std::clamp<std::int64_t>(kUnitsPerCta * ctas / groups, 1, 256);
  const std::int64_t grid = std::min(ctas, groups * splits);
  kernel<<<static_cast<unsigned>(grid), 128, kSharedBytes, stream>>>(RefineWork{args, static_cast<int>(splits)});
  return cudaGetLastError();
}

}  // namespace dosa::cuda
