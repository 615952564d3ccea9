// The score kernel, one instantiation a file: score_h*.cu.
#pragma once

#include "backend/cuda/layout.hpp"

namespace dosa::cuda {

template <int kHeads>
cudaError_t launch_score_as(const ScoreArgs& args, int multiprocessors, cudaStream_t stream);

/// The same of keys in pages, for a few queries of each request: score_pages_h*.cu.
template <int kHeads>
cudaError_t launch_score_pages_as(const ScoreArgs& args, int multiprocessors, cudaStream_t stream);
template <int kHeads>
cudaError_t launch_witness_as(const WitnessArgs& args, cudaStream_t stream);

}  // namespace dosa::cuda
