// The score kernel, one instantiation a file: score_h*.cu.
#pragma once

#include "backend/cuda/layout.hpp"

namespace dosa::cuda {

template <int kHeads>
cudaError_t launch_score_as(const ScoreArgs& args, int multiprocessors, cudaStream_t stream);

}  // namespace dosa::cuda
