// The screen kernel, one instantiation a file: screen_r*.cu.
#pragma once

#include "backend/cuda/layout.hpp"

namespace dosa::cuda {

template <int kBudget>
cudaError_t launch_screen_as(const ScreenArgs& args, int multiprocessors, cudaStream_t stream);

}  // namespace dosa::cuda
