// Tensor maps: how the copy engine reads keys.
#pragma once

#include <cstdint>
#include <cuda.h>
#include <cuda_runtime_api.h>

namespace dosa::cuda {

/// Keys as rows of 128 bytes, to be copied in boxes of `box_rows` rows with the 128-byte swizzle that tensor cores
/// read. Rows at nk and beyond arrive as zeros. `k` is 16-byte aligned. Errors: cudaErrorNotSupported if the driver has
/// no tensor maps. `period`: of every period-th row, nk of them.
cudaError_t make_key_map(CUtensorMap& map, const std::uint8_t* k, std::int64_t nk, int box_rows, int period = 1);

/// The keys of `pages` pages, `stride` bytes apart, to be copied page by page with the same swizzle: (0, 0, page). A page
/// that does not exist arrives as zeros. Pool and stride are multiples of 16, the stride below 2^40. Errors: as above.
cudaError_t make_page_map(CUtensorMap& map, const std::uint8_t* pool, std::int64_t pages, std::int64_t stride, int page_size);

}  // namespace dosa::cuda
