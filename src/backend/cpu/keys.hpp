// Keys as the kernels read them, and what bounds know of each key.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "backend/cpu/kernels.hpp"
#include "base/keys.hpp"

namespace dosa::cpu {

/// The keys of one request, contiguous or paged.
struct KeySource {
  KeyRows keys;
  std::int64_t count = 0;
  int dim = 0;

  /// Points rows[0, 48) at the keys `ids`, or at consecutive ones from `first`; missing rows are zero. `copies` [48][dim]
  /// takes the rows whose components are not adjacent.
  void load(std::span<const std::int32_t> ids, std::uint8_t* copies, const std::uint8_t** rows) const noexcept;
  void load(std::int64_t first, std::int64_t end, std::uint8_t* copies, const std::uint8_t** rows) const noexcept;
  /// Scales [48] of the keys `ids`, or of consecutive ones from `first`; of missing keys zero.
  void load_scales(std::span<const std::int32_t> ids, float* scales) const noexcept {
    for (std::size_t i = 0; i < kPanelKeys; ++i) scales[i] = i < ids.size() ? keys.scale(ids[i]) : 0.0F;
  }
  void load_scales(std::int64_t first, float* scales) const noexcept;
  /// Starts bringing rows into the cache: of `ids`, or of the panel from `first`.
  void prefetch(std::span<const std::int32_t> ids) const noexcept {
    for (const std::int32_t id : ids) prefetch_row(keys.row(id));
  }
  void prefetch(std::int64_t first) const noexcept {
    visit_rows(first, std::min(count, first + kPanelKeys), [&](std::int64_t, const std::uint8_t* row) { prefetch_row(row); });
  }

 private:
  /// visit(key, its first component), for the keys from `first` on.
  template <class Visit>
  void visit_rows(std::int64_t first, std::int64_t end, const Visit& visit) const noexcept {
    while (first < end) {
      const KeyRows::Run run = keys.run(first);
      const std::int64_t stop = std::min(end, first + run.keys);
      for (const std::uint8_t* row = run.bytes; first < stop; ++first, row += run.stride) visit(first, row);
    }
  }
  void prefetch_row(const std::uint8_t* row) const noexcept {
    __builtin_prefetch(row);
    __builtin_prefetch(row + (dim - 1) * keys.component_stride());
  }
  /// `row` itself where its components are adjacent, else a copy.
  const std::uint8_t* adjacent(const std::uint8_t* row, std::uint8_t* copy) const noexcept {
    return keys.component_stride() == 1 ? row : copy_row(row, copy);
  }
  const std::uint8_t* copy_row(const std::uint8_t* row, std::uint8_t* copy) const noexcept;
};

/// Per key, for bounds. Arrays cover whole panels.
struct KeySummaries {
  float* alpha = nullptr;  // [keys] the key scale, 1 for exempt keys
  float* rho = nullptr;    // [keys] rho sqrt(dim) >= max(||k||, 2^-6), 0 for a zero key, +inf for exempt keys
  float* rho_e = nullptr;  // [keys] rho_e sqrt(dim) >= ||k - 4 k8||, 0 if every component is a multiple of 4

  void copy(std::size_t to, const KeySummaries& other, std::int64_t from) const noexcept {
    alpha[to] = other.alpha[from], rho[to] = other.rho[from], rho_e[to] = other.rho_e[from];
  }
  [[nodiscard]] bool present() const noexcept { return alpha != nullptr; }
  [[nodiscard]] KeySummaries from(std::int64_t key) const noexcept { return {alpha + key, rho + key, rho_e + key}; }
};

/// Finishes one panel that holds the norms of its keys: `scales` [48] become alpha, and exempt keys get what never rejects, a bound
/// of +inf or NaN. Returns a bit for each of those: a NaN byte (a norm of NaN), or a scale that is negative or not finite.
std::uint64_t exempt_odd_keys(const float* scales, const KeySummaries& summaries);

/// Fills one panel, of keys `rows` [48] with `scales` [48]; returns the same.
std::uint64_t summarize_panel(const Kernels& kernels, int dim, const std::uint8_t* const* rows, const float* scales,
                              const KeySummaries& summaries);

/// Fills the whole panels [begin, end). Returns the number of exempt keys.
std::int64_t summarize_keys(const Kernels& kernels, const KeySource& keys, std::int64_t begin, std::int64_t end,
                            const KeySummaries& summaries);

}  // namespace dosa::cpu
