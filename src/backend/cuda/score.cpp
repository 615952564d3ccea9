#include "backend/cuda/score.hpp"

namespace dosa::cuda {

cudaError_t launch_score(const ScoreArgs& args, int multiprocessors, cudaStream_t stream) {
  switch (padded_heads(args.in.heads)) {
    case 8: return launch_score_as<8>(args, multiprocessors, stream);
    case 16: return launch_score_as<16>(args, multiprocessors, stream);
    case 32: return launch_score_as<32>(args, multiprocessors, stream);
    case 64: return launch_score_as<64>(args, multiprocessors, stream);
    default: return launch_score_as<128>(args, multiprocessors, stream);
  }
}

}  // namespace dosa::cuda
