#include "backend/cuda/refine.hpp"
#include "backend/cuda/refine_launch.cuh"

template cudaError_t dosa::cuda::launch_refine_as<64>(const dosa::cuda::RefineArgs&, int, cudaStream_t);
