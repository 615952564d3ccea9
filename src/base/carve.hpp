// Carving one block of caller-owned memory into arrays: the same code sizes the block and lays it out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dosa {

/// With a null base only the size is counted.
class Carver {
 public:
  static constexpr std::size_t alignment = 64;

  explicit Carver(void* base) noexcept : base_(static_cast<std::byte*>(base)) {}

  template <typename T>
  T* take(std::int64_t count) noexcept {
    T* at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + alignment - 1) / alignment * alignment;
    return at;
  }
  [[nodiscard]] std::size_t used() const noexcept { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace dosa
