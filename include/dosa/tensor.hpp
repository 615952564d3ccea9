// Non-owning, strided, device-tagged views of the caller's arrays.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace dosa {

enum class DType : std::uint8_t {
  f8_e4m3,  // OCP FP8 E4M3 ("fn": no infinities, 0x7F and 0xFF are NaN); uint8 arrays are viewed as this
  bf16,
  f32,
  i32,
};

enum class Device : std::uint8_t { cpu, cuda };

constexpr std::size_t size_of(DType t) noexcept {
  return t == DType::f8_e4m3 ? 1 : t == DType::bf16 ? 2 : 4;
}

constexpr const char* name_of(DType t) noexcept {
  switch (t) {
    case DType::f8_e4m3: return "f8_e4m3";
    case DType::bf16: return "bf16";
    case DType::f32: return "f32";
    case DType::i32: return "i32";
  }
  return "?";
}

/// A strided view. `data` points at element [0, 0, ...]; strides count elements, are 64-bit and may be anything
/// (0 to broadcast, huge to place few rows in a large pool). A default-constructed view is absent.
/// The view owns nothing: the array must outlive every call that uses it.
template <typename Void>
struct BasicTensorView {
  static constexpr int max_rank = 5;

  Void* data = nullptr;
  DType dtype = DType::f32;
  Device device = Device::cpu;
  int rank = 0;
  std::array<std::int64_t, max_rank> shape{};
  std::array<std::int64_t, max_rank> stride{};

  [[nodiscard]] bool present() const noexcept { return rank > 0; }

  /// Address of element [i, j, ...]; trailing indices may be left out.
  template <typename T, typename... Index>
  [[nodiscard]] auto* at(Index... index) const noexcept {
    using Element = std::conditional_t<std::is_const_v<Void>, const T, T>;
    std::int64_t offset = 0;
    int axis = 0;
    ((offset += static_cast<std::int64_t>(index) * stride[static_cast<std::size_t>(axis++)]), ...);
    return static_cast<Element*>(data) + offset;
  }
};

using TensorView = BasicTensorView<const void>;
using MutableTensorView = BasicTensorView<void>;

/// A dense row-major view of `shape` at `data`.
template <typename Void, std::size_t Rank>
BasicTensorView<Void> dense_view(Void* data, DType dtype, const std::int64_t (&shape)[Rank],
                                 Device device = Device::cpu) noexcept {
  static_assert(Rank >= 1 && Rank <= BasicTensorView<Void>::max_rank);
  BasicTensorView<Void> view{data, dtype, device, static_cast<int>(Rank), {}, {}};
  std::int64_t stride = 1;
  for (std::size_t axis = Rank; axis-- > 0;) {
    view.shape[axis] = shape[axis];
    view.stride[axis] = stride;
    stride *= shape[axis];
  }
  return view;
}

}  // namespace dosa
