#include "backend/cuda/score.hpp"

namespace dosa::cuda {

cudaError_t launch_score(const ScoreArgs& args, int multiprocessors, cudaStream_t stream) {
  return with_heads(args.in.heads, [&]<int kHeads>() {
    return args.in.pages.page_shift == 0 ? launch_score_as<kHeads>(args, multiprocessors, stream)
                                         : launch_score_pages_as<kHeads>(args, multiprocessors, stream);
  });
}

cudaError_t launch_witness(const WitnessArgs& args, cudaStream_t stream) {
  return with_heads(args.in.heads, [&]<int kHeads>() { return launch_witness_as<kHeads>(args, stream); });
}

}  // namespace dosa::cuda
