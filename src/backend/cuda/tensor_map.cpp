#include "backend/cuda/tensor_map.hpp"

#include <cudaTypedefs.h>

#include "backend/cuda/stages.hpp"

namespace dosa::cuda {
namespace {

// The driver's own function, asked for at run time: the library must start where there is no driver.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    constexpr unsigned kVersion = 12000;  // the first with tensor maps
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kVersion, cudaEnableDefault, &result);
    const bool ok = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return ok ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function) : nullptr;
  }();
  return found;
}

// Bytes, swizzled; `stride` is in bytes, of dimensions 1 and up.
template <int kRank>
cudaError_t encode(CUtensorMap& map, const std::uint8_t* data, const cuuint64_t (&size)[kRank],
                   const cuuint64_t (&stride)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  const auto encode_tiled = encoder();
  if (encode_tiled == nullptr) return cudaErrorNotSupported;
  constexpr cuuint32_t step[] = {1, 1, 1};
  const CUresult result = encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, kRank, const_cast<std::uint8_t*>(data), size, stride,
                                       box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t make_key_map(CUtensorMap& map, const std::uint8_t* k, std::int64_t nk, int box_rows, int period) {
  return encode<2>(map, k, {kDim, static_cast<cuuint64_t>(nk)}, {static_cast<cuuint64_t>(period) * kDim},
                   {kDim, static_cast<cuuint32_t>(box_rows)});
}

cudaError_t make_page_map(CUtensorMap& map, const std::uint8_t* pool, std::int64_t pages, std::int64_t stride, int page_size) {
  return encode<3>(map, pool, {kDim, static_cast<cuuint64_t>(page_size), static_cast<cuuint64_t>(pages)},
                   {kDim, static_cast<cuuint64_t>(stride)}, {kDim, static_cast<cuuint32_t>(page_size), 1});
}

}  // namespace dosa::cuda
