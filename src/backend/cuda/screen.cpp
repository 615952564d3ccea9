#include "backend/cuda/screen.hpp"

namespace dosa::cuda {

cudaError_t launch_screen(const ScreenArgs& args, int multiprocessors, cudaStream_t stream) {
  switch (args.budget) {
    case 8: return launch_screen_as<8>(args, multiprocessors, stream);
    case 12: return launch_screen_as<12>(args, multiprocessors, stream);
    case 16: return launch_screen_as<16>(args, multiprocessors, stream);
    case 20: return launch_screen_as<20>(args, multiprocessors, stream);
    case 24: return launch_screen_as<24>(args, multiprocessors, stream);
    case 32: return launch_screen_as<32>(args, multiprocessors, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace dosa::cuda
