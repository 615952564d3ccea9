// What a Problem says of its rows: which keys each of them sees, and where those keys lie.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "dosa/options.hpp"
#include "dosa/problem.hpp"

namespace dosa {

struct VisibleRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  [[nodiscard]] std::int64_t size() const noexcept { return end > begin ? end - begin : 0; }
  [[nodiscard]] bool contains(std::int64_t key) const noexcept { return key >= begin && key < end; }
};

inline bool is_paged(const Problem& problem) noexcept { return problem.kv_cache.present(); }

/// Keys of one request: those there are, or, in pages, those its row of the block table has room for.
inline std::int64_t key_count(const Problem& problem) noexcept {
  return is_paged(problem) ? problem.block_table.shape[1] * problem.kv_cache.shape[1] : problem.k.shape[0];
}

/// Requests have keys of their own.
inline std::int64_t request_count(const Problem& problem) noexcept {
  return is_paged(problem) ? problem.block_table.shape[0] : 1;
}

/// The request whose keys `row` sees.
inline std::int64_t request_of(const Problem& problem, std::int64_t row) noexcept {
  if (problem.requests.present()) return *problem.requests.at<std::int32_t>(row);
  return row * request_count(problem) / problem.q.shape[0];
}

/// The row of problem.hints that is about `row`.
inline std::int64_t hint_row(const Problem& problem, std::int64_t row) noexcept {
  const std::int64_t rows = problem.hints.shape[0];
  return rows == 1 ? 0 : rows == problem.q.shape[0] ? row : request_of(problem, row);
}

/// The keys of `row`, clamped to those there are.
inline VisibleRange visible_range(const Problem& problem, std::int64_t row, bool* clamped = nullptr) noexcept {
  const std::int64_t nk = key_count(problem);
  const auto end = [&]() -> std::int64_t {
    const TensorView& ke = problem.ke;
    if (!ke.present()) return nk;
    return ke.rank == 1 ? *ke.at<std::int32_t>(row) : *ke.at<std::int32_t>(row / ke.shape[1], row % ke.shape[1]);
  };
  const std::int64_t ks = problem.ks.present() ? *problem.ks.at<std::int32_t>(row) : 0;
  const std::int64_t ke = end();
  if (clamped != nullptr) *clamped = ks < 0 || ks > nk || ke < 0 || ke > nk;
  const std::int64_t begin = std::clamp<std::int64_t>(ks, 0, nk);
  return {begin, std::max(begin, std::clamp<std::int64_t>(ke, 0, nk))};
}

/// The keys of one request: where each one's bytes and scale are. Contiguous keys are one page without an end. A key on
/// a page that the cache does not have reads as zero: entries of the table behind the visible keys may hold anything.
class KeyRows {
 public:
  static constexpr std::uint8_t kZeroRow[128] = {};  // of the largest dim
  static constexpr float kZeroScale = 0;

  KeyRows() = default;
  KeyRows(const Problem& problem, std::int64_t request) noexcept;
  /// Keys in pages; `blocks` i32 [max_blocks] is the request's row of the block table.
  KeyRows(const TensorView& kv_cache, const TensorView& blocks, std::int64_t dim) noexcept;
  /// Rows of any matrix e4m3 [rows, dim]; they have no scales.
  explicit KeyRows(const TensorView& rows) noexcept
      : bytes_(rows.at<std::uint8_t>()), row_stride_(rows.stride[0]), component_stride_(rows.stride[1]) {}

  /// Neighbouring keys, from some key to the end of its page: their bytes and scales, each so far apart.
  struct Run {
    const std::uint8_t* bytes;
    std::int64_t stride;
    const float* scales;
    std::int64_t scale_stride;
    std::int64_t keys;
  };
  [[nodiscard]] Run run(std::int64_t key) const noexcept {
    const std::int64_t offset = key & offset_mask_;
    const std::uint8_t* page = page_of(key);
    const std::int64_t keys = offset_mask_ + 1 - offset;
    if (page == nullptr) return {kZeroRow, 0, &kZeroScale, 0, keys};
    const std::uint8_t* bytes = page + offset * row_stride_;
    if (table_ == nullptr) return {bytes, row_stride_, scales_ + key * scale_stride_, scale_stride_, keys};
    return {bytes, row_stride_, reinterpret_cast<const float*>(page + scales_at_) + offset, 1, keys};
  }
  /// Components are component_stride() bytes apart.
  [[nodiscard]] const std::uint8_t* row(std::int64_t key) const noexcept { return run(key).bytes; }
  [[nodiscard]] std::int64_t component_stride() const noexcept { return component_stride_; }
  void copy(std::int64_t key, std::span<std::uint8_t> components) const noexcept {
    const std::uint8_t* bytes = row(key);
    for (std::size_t d = 0; d < components.size(); ++d) {
      components[d] = bytes[static_cast<std::int64_t>(d) * component_stride_];
    }
  }

  [[nodiscard]] float scale(std::int64_t key) const noexcept {
    if (table_ == nullptr) return scales_[key * scale_stride_];
    const std::uint8_t* page = page_of(key);
    return page == nullptr ? 0.0F : reinterpret_cast<const float*>(page + scales_at_)[key & offset_mask_];
  }

  /// What `key` is called in an index space; `first_visible` is where relative ids begin.
  [[nodiscard]] std::int32_t id_of(std::int64_t key, IndexSpace space, std::int64_t first_visible) const noexcept {
    if (space == IndexSpace::slot)
      key = table_[(key >> page_shift_) * table_stride_] * (offset_mask_ + 1) + (key & offset_mask_);
    if (space == IndexSpace::relative) key -= first_visible;
    return static_cast<std::int32_t>(key);
  }

 private:
  [[nodiscard]] const std::uint8_t* page_of(std::int64_t key) const noexcept {
    if (table_ == nullptr) return bytes_;
    const std::int64_t page = table_[(key >> page_shift_) * table_stride_];
    return page >= 0 && page < pages_ ? bytes_ + page * page_stride_ : nullptr;
  }

  const std::uint8_t* bytes_ = nullptr;
  std::int64_t row_stride_ = 0;
  std::int64_t component_stride_ = 1;
  std::int64_t offset_mask_ = (std::int64_t{1} << 62) - 1;
  int page_shift_ = 62;
  // Contiguous keys only.
  const float* scales_ = nullptr;
  std::int64_t scale_stride_ = 0;
  // Paged keys only.
  const std::int32_t* table_ = nullptr;
  std::int64_t table_stride_ = 0;
  std::int64_t page_stride_ = 0;
  std::int64_t pages_ = 0;
  std::int64_t scales_at_ = 0;  // in a page
};

}  // namespace dosa
