#include "backend/cuda/refine.hpp"

namespace dosa::cuda {

cudaError_t launch_refine(const RefineArgs& args, int multiprocessors, cudaStream_t stream) {
  return with_heads(args.in.heads, [&]<int kHeads>() { return launch_refine_as<kHeads>(args, multiprocessors, stream); });
}

}  // namespace dosa::cuda
