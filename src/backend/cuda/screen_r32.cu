#include "backend/cuda/screen.hpp"
#include "backend/cuda/screen_launch.cuh"

template cudaError_t dosa::cuda::launch_screen_as<32>(const dosa::cuda::ScreenArgs&, int, cudaStream_t);
