#include "base/keys.hpp"

#include <bit>

namespace dosa {

KeyRows::KeyRows(const Problem& problem, std::int64_t request) noexcept {
  if (is_paged(problem)) {
    TensorView blocks = problem.block_table;
    blocks.data = blocks.at<std::int32_t>(request);
    blocks.stride[0] = blocks.stride[1];
    *this = KeyRows(problem.kv_cache, blocks, problem.q.shape[2]);
    return;
  }
  *this = KeyRows(problem.k);
  scales_ = problem.k_scale.at<float>();
  scale_stride_ = problem.k_scale.stride[0];
}

KeyRows::KeyRows(const TensorView& kv_cache, const TensorView& blocks, std::int64_t dim) noexcept
    : bytes_(kv_cache.at<std::uint8_t>()),
      row_stride_(dim),
      offset_mask_(kv_cache.shape[1] - 1),
      page_shift_(std::countr_zero(static_cast<std::uint64_t>(kv_cache.shape[1]))),
      table_(blocks.at<std::int32_t>()),
      table_stride_(blocks.stride[0]),
      page_stride_(kv_cache.stride[0]),
      pages_(kv_cache.shape[0]),
      scales_at_(kv_cache.shape[1] * dim) {}

}  // namespace dosa
