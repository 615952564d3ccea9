// The same problems with their keys in pages: scattered over a pool, poison between and behind them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "support/cases.hpp"

namespace dosa::test {

struct PageLayout {
  std::int64_t page_size = 64;
  std::int64_t gap = 20;           ///< bytes between pages, as if other layers lay there
  std::int64_t extra_pages = 3;    ///< of nobody
  std::int64_t extra_columns = 0;  ///< of the table, more than the longest request needs
};

/// Requests, each a problem with contiguous keys, as one problem whose keys are in pages. Heads, dim and topk are those
/// of the first. Rows stay in order, request by request. Table entries that no key needs are ids of no page.
class PagedProblem {
 public:
  PagedProblem(std::span<const Problem> requests, std::uint64_t seed, const PageLayout& layout = {});
  PagedProblem(const PagedProblem&) = delete;

  [[nodiscard]] const Problem& problem() const { return problem_; }
  [[nodiscard]] Problem& problem() { return problem_; }
  /// Where key `key` of a request lies, by what was written and not by what the library reads.
  [[nodiscard]] std::int32_t slot_of(std::int64_t request, std::int64_t key) const;
  [[nodiscard]] std::vector<std::uint8_t>& pool() { return pool_; }
  [[nodiscard]] std::vector<std::int32_t>& table() { return table_; }

 private:
  void append_rows(const Problem& request, std::int32_t index);

  PageLayout layout_;
  std::vector<std::uint8_t> pool_, q_;
  std::vector<float> w_;
  std::vector<std::int32_t> table_, owners_, ks_, ke_, hints_;
  std::int64_t columns_ = 0;
  Problem problem_;
};

}  // namespace dosa::test
