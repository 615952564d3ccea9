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

  [[nodiscard]] float scale(std::int64_t key) const noexcept { return keys.scale(key); }

  /// Points rows[0, 48) at the keys `ids`, or at consecutive ones from `first`; missing rows are zero. `copies` [48][dim]
  /// takes the rows whose components are not adjacent.
  void load(std::span<const std::int32_t> ids, std::uint8_t* copies, const std::uint8_t** rows) const noexcept;
  void load(std::int64_t first, std::int64_t end, std::uint8_t* copies, const std::uint8_t** rows) const noexcept;
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
  const std::uint8_t* adjacent(const std::uint8_t* row, std::uint8_t* copy) const noexcept;
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
