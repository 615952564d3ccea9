// What a build without CUDA kernels says.
#include "backend/backend.hpp"
#include "base/error.hpp"

namespace dosa {

std::string cuda_unavailable_reason() { return "this build has no cuda backend: " DOSA_CUDA_REASON; }

Result<std::unique_ptr<BackendImpl>> make_cuda_backend(const Options&) {
  return fail(ErrorCode::unsupported_device, cuda_unavailable_reason());
}

Result<std::unique_ptr<DeviceCopy>> copy_to_device(const Problem&, bool, std::int64_t) {
  return fail(ErrorCode::unsupported_device, cuda_unavailable_reason());
}

}  // namespace dosa
