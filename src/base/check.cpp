#include "base/check.hpp"

#include <algorithm>
#include <bit>
#include <span>
#include <string>

namespace dosa {

std::optional<Error> check_tensor(const char* name, const TensorView& view, DType dtype, Device device,
                                  std::initializer_list<std::int64_t> shape) {
  const auto wrong = [&](std::string what) {
    return Error{ErrorCode::invalid_argument, fmt::format("{} {}", name, what)};
  };
  if (view.dtype != dtype) return wrong(fmt::format("is {}; it must be {}", name_of(view.dtype), name_of(dtype)));
  if (view.device != device) {
    return wrong(device == Device::cpu ? "is on a GPU; the cpu backend reads host memory"
                                       : "is in host memory; the cuda backend reads device memory");
  }
  const std::span<const std::int64_t> seen{view.shape.data(),
                                           static_cast<std::size_t>(std::clamp(view.rank, 0, view.max_rank))};
  if (!std::equal(seen.begin(), seen.end(), shape.begin(), shape.end())) {
    return wrong(fmt::format("has shape [{}]; it must be [{}]", fmt::join(seen, ", "), fmt::join(shape, ", ")));
  }
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  if (view.data == nullptr && !empty) return wrong("has no data");
  const auto align = reinterpret_cast<std::uintptr_t>(view.data) % size_of(dtype);
  if (align != 0) return wrong(fmt::format("is not aligned to its {} bytes", size_of(dtype)));
  return std::nullopt;
}

std::optional<Error> check_page_size(std::int64_t page_size) {
  constexpr std::int64_t smallest = 16, largest = 256;
  const bool allowed =
      page_size >= smallest && page_size <= largest && std::has_single_bit(static_cast<std::uint64_t>(page_size));
  if (allowed) return std::nullopt;
  return Error{ErrorCode::unsupported_shape,
               fmt::format("page_size is {}; pages have {} to {} keys, a power of two", page_size, smallest, largest)};
}

std::optional<Error> check_page_pool(const char* name, const TensorView& pool, Device device, std::int64_t page_size,
                                     std::int64_t dim) {
  const auto wrong = [&](std::string what) {
    return Error{ErrorCode::invalid_argument, fmt::format("{} {}", name, what)};
  };
  constexpr std::int64_t scale = sizeof(float);
  const std::int64_t width = dim + scale;
  if (auto error = check_tensor(name, pool, DType::f8_e4m3, device,
                                {std::max<std::int64_t>(pool.shape[0], 0), page_size, 1, width})) {
    return error;
  }
  if (pool.stride[3] != 1 || pool.stride[1] != width) {
    return wrong(
        fmt::format("has strides {} and {} in a page; they must be {} and 1", pool.stride[1], pool.stride[3], width));
  }
  if (pool.stride[0] % scale != 0)
    return wrong(fmt::format("has pages {} bytes apart; it must be a multiple of {}", pool.stride[0], scale));
  if (reinterpret_cast<std::uintptr_t>(pool.data) % scale != 0)
    return wrong(fmt::format("is not aligned to {} bytes, as its scales need", scale));
  return std::nullopt;
}

}  // namespace dosa
