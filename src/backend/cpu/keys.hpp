// Keys as the kernels read them, and what bounds know of each key.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "backend/cpu/kernels.hpp"
#include "dosa/tensor.hpp"

namespace dosa::cpu {

struct KeySource {
  TensorView k;        // e4m3 [nk, dim]
  TensorView k_scale;  // f32 [nk]
  std::int64_t count = 0;
  int dim = 0;

  [[nodiscard]] float scale(std::int64_t key) const noexcept { return *k_scale.at<float>(key); }

  /// Points rows[0, 48) at the keys `ids`, or at consecutive ones from `first`; missing rows are zero. `copies` [48][dim]
  /// takes the rows whose components are not adjacent.
  void load(std::span<const std::int32_t> ids, std::uint8_t* copies, const std::uint8_t** rows) const noexcept;
  void load(std::int64_t first, std::int64_t end, std::uint8_t* copies, const std::uint8_t** rows) const noexcept;
  /// Starts bringing rows into the cache: of `ids`, or of the panel from `first`.
  void prefetch(std::span<const std::int32_t> ids) const noexcept {
    for (const std::int32_t id : ids) prefetch_row(id);
  }
  void prefetch(std::int64_t first) const noexcept {
    const std::int64_t end = std::min(count, first + kPanelKeys);
    for (std::int64_t key = first; key < end; ++key) prefetch_row(key);
  }

 private:
  void prefetch_row(std::int64_t key) const noexcept {
    __builtin_prefetch(k.at<std::uint8_t>(key));
    __builtin_prefetch(k.at<std::uint8_t>(key, dim - 1));
  }
  const std::uint8_t* row(std::int64_t key, std::uint8_t* copy) const noexcept;
};

/// Per key, for bounds. Arrays cover whole panels; null where nothing is screened.
struct KeySummaries {
  float* alpha = nullptr;  // [nk] the key scale, 1 for exempt keys
  float* rho = nullptr;    // [nk] rho sqrt(dim) >= max(||k||, 2^-6), 0 for a zero key, +inf for exempt keys
  float* rho_e = nullptr;  // [nk] rho_e sqrt(dim) >= ||k - 4 k8||, 0 if every component is a multiple of 4
};

/// Fills the whole panels [begin, end). Returns the number of exempt keys: a NaN byte, or a scale that is negative or not
/// finite. Their bounds come out as +inf or NaN, which never rejects.
std::int64_t summarize_keys(const Kernels& kernels, const KeySource& keys, std::int64_t begin, std::int64_t end,
                            const KeySummaries& summaries);

}  // namespace dosa::cpu
