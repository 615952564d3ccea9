// The refinement kernel, one instantiation a file: refine_h*.cu.
#pragma once

#include "backend/cuda/layout.hpp"

namespace dosa::cuda {

template <int kHeads>
cudaError_t launch_refine_as(const RefineArgs& args, int multiprocessors, cudaStream_t stream);

}  // namespace dosa::cuda
