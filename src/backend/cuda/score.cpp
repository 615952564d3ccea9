#include "backend/cuda/score.hpp"

namespace dosa::cuda {
namespace {

/// Calls launch.template operator()<kHeads>() with the heads that kernels are compiled for.
template <class Launch>
cudaError_t with_heads(int heads, const Launch& launch) {
  switch (padded_heads(heads)) {
    case 8: return launch.template operator()<8>();
    case 16: return launch.template operator()<16>();
    case 32: return launch.template operator()<32>();
    case 64: return launch.template operator()<64>();
    default: return launch.template operator()<128>();
  }
}

}  // namespace

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
