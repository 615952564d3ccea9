#include "backend/cuda/score.hpp"
#include "backend/cuda/score_launch.cuh"

template cudaError_t dosa::cuda::launch_score_as<64>(const dosa::cuda::ScoreArgs&, int, cudaStream_t);
