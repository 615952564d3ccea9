#include "support/check.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <optional>

#include <fmt/format.h>

#include "base/keys.hpp"
#include "support/gpu.hpp"
#include "support/paged.hpp"

namespace dosa::test {
namespace {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

constexpr std::size_t kGuard = 64;  // elements or bytes

/// [rows, width] of 4-byte elements, every row followed by a gap, the whole between guards.
class GuardedRows {
 public:
  GuardedRows(std::int64_t rows, std::int64_t width, std::int64_t gap, std::uint32_t poison)
      : rows_(rows),
        width_(width),
        pitch_(width + gap),
        poison_(poison),
        words_(static_cast<std::size_t>(rows * (width + gap)) + 2 * kGuard, poison) {}

  [[nodiscard]] MutableTensorView view(DType dtype) {
    return {words_.data() + kGuard, dtype, Device::cpu, 2, {rows_, width_}, {pitch_, 1}};
  }
  [[nodiscard]] std::uint32_t at(std::int64_t row, std::int64_t slot) const {
    return words_[kGuard + static_cast<std::size_t>(row * pitch_ + slot)];
  }
  [[nodiscard]] bool guards_intact() const {
    for (std::size_t n = 0; n < words_.size(); ++n) {
      const auto inside = static_cast<std::int64_t>(n) - static_cast<std::int64_t>(kGuard);
      const bool is_element = inside >= 0 && inside < rows_ * pitch_ && inside % pitch_ < width_;
      if (!is_element && words_[n] != poison_) return false;
    }
    return true;
  }

 private:
  std::int64_t rows_, width_, pitch_;
  std::uint32_t poison_;
  std::vector<std::uint32_t> words_;
};

/// 64-byte aligned bytes between guards.
class GuardedWorkspace {
 public:
  GuardedWorkspace(std::size_t bytes, std::uint8_t poison)
      : bytes_(bytes), poison_(poison), storage_(bytes + 2 * kGuard + 64, poison) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    begin_ = (address + kGuard + 63) / 64 * 64 - address;
  }
  [[nodiscard]] Workspace get() { return {storage_.data() + begin_, bytes_}; }
  /// Offset of the first byte written outside, or nothing.
  [[nodiscard]] std::optional<std::int64_t> stray_write() const {
    for (std::size_t n = 0; n < storage_.size(); ++n) {
      if (n == begin_) n += bytes_;
      if (storage_[n] != poison_) return static_cast<std::int64_t>(n) - static_cast<std::int64_t>(begin_);
    }
    return std::nullopt;
  }

 private:
  std::size_t bytes_;
  std::uint8_t poison_;
  std::vector<std::uint8_t> storage_;
  std::size_t begin_ = 0;
};

struct Range {
  std::int64_t begin, end;
  bool clamped;
  [[nodiscard]] std::int64_t visible() const { return std::max<std::int64_t>(end - begin, 0); }
};

Range range_of(const Problem& problem, std::int64_t row) {
  const std::int64_t nk = key_count(problem);
  const std::int64_t ks = problem.ks.present() ? *problem.ks.at<std::int32_t>(row) : 0;
  std::int64_t ke = nk;
  if (problem.ke.rank == 1) ke = *problem.ke.at<std::int32_t>(row);
  if (problem.ke.rank == 2) ke = *problem.ke.at<std::int32_t>(row / problem.ke.shape[1], row % problem.ke.shape[1]);
  return {std::max<std::int64_t>(ks, 0), std::min(ke, nk), ks < 0 || ks > nk || ke < 0 || ke > nk};
}

/// The same winners of query `query` in the order and index space of `options`.
OracleRow arranged(const OracleRow& row, const Options& options, const Problem& problem, std::int64_t query) {
  OracleRow result = row;
  const auto valid = std::find(row.ids.begin(), row.ids.end(), -1) - row.ids.begin();
  if (options.order == Order::ascending) {
    std::vector<std::size_t> slots(static_cast<std::size_t>(valid));
    std::iota(slots.begin(), slots.end(), std::size_t{0});
    std::sort(slots.begin(), slots.end(), [&](std::size_t a, std::size_t b) { return row.ids[a] < row.ids[b]; });
    for (std::size_t n = 0; n < slots.size(); ++n) {
      result.ids[n] = row.ids[slots[n]];
      result.scores[n] = row.scores[slots[n]];
    }
  }
  const KeyRows keys(problem, request_of(problem, query));
  const std::int64_t begin = range_of(problem, query).begin;
  std::for_each(result.ids.begin(), result.ids.begin() + valid,
                [&](std::int32_t& id) { id = keys.id_of(id, options.index_space, begin); });
  return result;
}

AssertionResult counts_add_up(const Problem& problem, const Stats& stats) {
  const std::int64_t nq = problem.q.shape[0];
  std::int64_t visible = 0;
  std::int64_t clamped = 0;
  std::int64_t empty = 0;
  for (std::int64_t row = 0; row < nq; ++row) {
    const Range range = range_of(problem, row);
    visible += range.visible();
    clamped += range.clamped ? 1 : 0;
    empty += range.visible() == 0 ? 1 : 0;
  }
  const PathCounts& path = stats.path;
  const std::int64_t paths =
      path.empty + path.short_rows + path.dosa + path.full + path.full_context + path.full_loose + path.full_exempt;
  if (stats.rows != nq || paths != nq || path.empty != empty || stats.visible != visible ||
      stats.clamped_rows != clamped || stats.survivors > stats.screened) {
    return AssertionFailure() << fmt::format(
               "stats: rows {} and paths {} of {}, empty {} of {}, visible {} of {}, clamped {} of {}, survivors {} of "
               "{} screened",
               stats.rows, paths, nq, path.empty, empty, stats.visible, visible, stats.clamped_rows, clamped,
               stats.survivors, stats.screened);
  }
  return AssertionSuccess();
}

}  // namespace

std::string describe(const Options& o) {
  const auto number = [](auto e) { return static_cast<int>(e); };
  return fmt::format(
      "method {} implementation '{}' threads {} order {} space {} seeds {} form {} row_budget {} aggregates {} "
      "precision {} ablation {} memory_budget {} min_context {}",
      number(o.method), o.implementation, o.threads, number(o.order), number(o.index_space), number(o.seeds),
      number(o.certificate.form), o.certificate.row_budget, o.certificate.aggregates, number(o.certificate.precision),
      number(o.certificate.ablation), o.memory_budget, o.min_context);
}

std::vector<OracleRow> expected_rows(const Problem& problem) {
  std::vector<OracleRow> rows;
  for (std::int64_t row = 0; row < problem.q.shape[0]; ++row) {
    rows.push_back(oracle_row(problem, row, ReferenceScorer::cpu, Order::score, IndexSpace::absolute));
  }
  return rows;
}

AssertionResult exact(const Problem& problem, const std::vector<OracleRow>& expected, const Options& options,
                      Stats* stats_out) {
  const auto failure = [&] { return AssertionFailure() << describe(options) << ": "; };
  auto indexer = Indexer::create(options);
  if (!indexer) return failure() << "create: " << indexer.error().message;
  const auto plan = indexer->plan(shape_of(problem));
  if (!plan) return failure() << "plan: " << plan.error().message;
  if (static_cast<std::int64_t>(plan->workspace_bytes) > options.memory_budget) {
    return failure() << "workspace " << plan->workspace_bytes << " exceeds the memory budget";
  }

  const std::int64_t nq = problem.q.shape[0];
  constexpr std::array<std::uint32_t, 2> poisons = {0xA5A5A5A5U, 0xFFFFFFFFU};
  for (std::size_t round = 0; round < poisons.size(); ++round) {
    const std::int64_t gap = round == 0 ? 16 : 0;
    GuardedRows ids(nq, problem.topk, gap, poisons[round]);
    GuardedRows scores(nq, problem.topk, 2 * gap, poisons[round]);
    const bool last = round == 1;
    GuardedWorkspace workspace(last ? 0 : plan->workspace_bytes, static_cast<std::uint8_t>(poisons[round]));
    const Selection out{ids.view(DType::i32), last ? MutableTensorView{} : scores.view(DType::f32)};
    const auto stats = last ? indexer->run(*plan, problem, out) : indexer->run(*plan, problem, out, workspace.get());
    if (!stats) return failure() << "run: " << stats.error().message;
    if (!ids.guards_intact() || !scores.guards_intact()) return failure() << "wrote outside an output row";
    if (const auto offset = workspace.stray_write()) {
      return failure() << "wrote at " << *offset << " of " << plan->workspace_bytes << " workspace bytes";
    }
    if (auto counts = counts_add_up(problem, *stats); !counts) return failure() << counts.message();
    if (stats_out != nullptr) *stats_out = *stats;

    for (std::int64_t row = 0; row < nq; ++row) {
      const OracleRow want = arranged(expected[static_cast<std::size_t>(row)], options, problem, row);
      for (std::int32_t slot = 0; slot < problem.topk; ++slot) {
        const auto n = static_cast<std::size_t>(slot);
        const auto id = static_cast<std::int32_t>(ids.at(row, slot));
        const std::uint32_t bits = last ? std::bit_cast<std::uint32_t>(want.scores[n]) : scores.at(row, slot);
        if (id != want.ids[n] || bits != std::bit_cast<std::uint32_t>(want.scores[n])) {
          return failure() << fmt::format("round {} row {} slot {}: id {} score {:08x} ({}), expected {} {:08x} ({})",
                                          round, row, slot, id, bits, std::bit_cast<float>(bits), want.ids[n],
                                          std::bit_cast<std::uint32_t>(want.scores[n]), want.scores[n]);
        }
      }
    }
  }
  return AssertionSuccess();
}

std::vector<Options> every_method() {
  std::vector<Options> all;
  const auto add = [&](Method method, std::string_view implementation, std::int32_t threads) {
    Options options;
    options.method = method;
    options.implementation = implementation;
    options.threads = threads;
    all.push_back(options);
  };
  for (const Method method : {Method::dense, Method::fused, Method::dosa, Method::automatic}) add(method, "", 2);
  for (const Method method : {Method::fused, Method::dosa}) add(method, "scalar", 1);
  return all;
}

void expect_exact(const Problem& problem, const std::vector<Options>& options) {
  const auto expected = expected_rows(problem);
  for (const Options& o : options) EXPECT_TRUE(exact(problem, expected, o));
  // The same keys in pages, one page size after the other.
  constexpr std::int64_t most_key_bytes = 4 << 20;
  if (!is_paged(problem) && problem.k.shape[0] * problem.k.shape[1] <= most_key_bytes) {
    for (std::size_t n = 0; n < options.size(); ++n) {
      const PagedProblem paged({&problem, 1}, n, {.page_size = std::int64_t{16} << (n + 2) % 5});
      EXPECT_TRUE(exact(paged.problem(), expected, options[n])) << "in pages";
      if (n < 2) expect_exact_on_gpu(paged.problem());
    }
  }
  expect_exact_on_gpu(problem);
}

std::vector<OracleRow> select(const Problem& problem, const Options& options) {
  const std::int64_t nq = problem.q.shape[0];
  const auto topk = static_cast<std::size_t>(problem.topk);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(nq) * topk);
  std::vector<float> scores(ids.size());
  const std::int64_t shape[] = {nq, problem.topk};
  const Selection out{dense_view<void>(ids.data(), DType::i32, shape),
                      dense_view<void>(scores.data(), DType::f32, shape)};
  auto indexer = Indexer::create(options);
  const auto plan = indexer.and_then([&](const Indexer& i) { return i.plan(shape_of(problem)); });
  const auto stats = plan.and_then([&](const Plan& p) { return indexer->run(p, problem, out); });
  if (!stats) {
    ADD_FAILURE() << describe(options) << ": " << stats.error().message;
    return {};
  }
  std::vector<OracleRow> rows(static_cast<std::size_t>(nq));
  for (std::size_t row = 0; row < rows.size(); ++row) {
    const auto begin = static_cast<std::ptrdiff_t>(row * topk);
    const auto end = begin + problem.topk;
    rows[row] = {{ids.begin() + begin, ids.begin() + end}, {scores.begin() + begin, scores.begin() + end}};
  }
  return rows;
}

}  // namespace dosa::test
