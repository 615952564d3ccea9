// Complaints about arguments: the value seen, and what is allowed.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

#include <fmt/format.h>

#include "dosa/result.hpp"
#include "dosa/tensor.hpp"

namespace dosa {

template <typename T>
std::optional<Error> check_range(const char* name, T value, T low, T high) {
  if (value >= low && value <= high) return std::nullopt;
  return Error{ErrorCode::invalid_argument, fmt::format("{} is {}; allowed are {} to {}", name, value, low, high)};
}

std::optional<Error> check_tensor(const char* name, const TensorView& view, DType dtype, Device device,
                                  std::initializer_list<std::int64_t> shape);

inline TensorView const_view(const MutableTensorView& view) noexcept {
  return {view.data, view.dtype, view.device, view.rank, view.shape, view.stride};
}

/// Whether elements lie one after the other, row-major.
inline bool is_dense(const TensorView& view) noexcept {
  std::int64_t stride = 1;
  for (auto axis = static_cast<std::size_t>(view.rank); axis-- > 0;) {
    if (view.shape[axis] > 1 && view.stride[axis] != stride) return false;
    stride *= view.shape[axis];
  }
  return true;
}

/// Keys of a page: 16 to 256, a power of two.
std::optional<Error> check_page_size(std::int64_t page_size);

/// A pool of pages [pages, page_size, 1, dim + 4] of which only the page stride is free.
std::optional<Error> check_page_pool(const char* name, const TensorView& pool, Device device, std::int64_t page_size,
                                     std::int64_t dim);

}  // namespace dosa
