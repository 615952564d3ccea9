#include "backend/cuda/score_pages_launch.cuh"

template cudaError_t dosa::cuda::launch_score_pages_as<32>(const dosa::cuda::ScoreArgs&, int, cudaStream_t);
template cudaError_t dosa::cuda::launch_witness_as<32>(const dosa::cuda::WitnessArgs&, cudaStream_t);
