#include "support/gpu.hpp"

#include <algorithm>
#include <bit>
#include <vector>

#include <fmt/format.h>

#include "backend/backend.hpp"
#include "score/oracle.hpp"
#include "support/check.hpp"

namespace dosa::test {
namespace {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

// Components added to reach the 128 that the kernels take are zero, and change no dot.
struct Widened {
  explicit Widened(const Problem& narrow) : problem(narrow) {
    const std::int64_t nq = narrow.q.shape[0], heads = narrow.q.shape[1], nk = narrow.k.shape[0], dim = narrow.q.shape[2];
    q.resize(static_cast<std::size_t>(nq * heads * kDim));
    k.resize(static_cast<std::size_t>(nk * kDim));
    for (std::int64_t row = 0; row < nq * heads; ++row) {
      for (std::int64_t i = 0; i < dim; ++i) {
        q[static_cast<std::size_t>(row * kDim + i)] = *narrow.q.at<std::uint8_t>(row / heads, row % heads, i);
      }
    }
    for (std::int64_t row = 0; row < nk; ++row) {
      for (std::int64_t i = 0; i < dim; ++i) k[static_cast<std::size_t>(row * kDim + i)] = *narrow.k.at<std::uint8_t>(row, i);
    }
    problem.q = dense_view<const void>(q.data(), DType::f8_e4m3, {nq, heads, kDim});
    problem.k = dense_view<const void>(k.data(), DType::f8_e4m3, {nk, kDim});
  }
  static constexpr std::int64_t kDim = 128;
  std::vector<std::uint8_t> q, k;
  Problem problem;
};

// The emulator takes microseconds a dot: as many rows, evenly spread, as it can do in a few seconds.
std::int64_t rows_to_check(const Problem& problem) {
  const std::int64_t dots = std::max<std::int64_t>(1, problem.k.shape[0] * problem.q.shape[1]);
  return std::clamp<std::int64_t>(4'000'000 / dots, 1, std::max<std::int64_t>(1, problem.q.shape[0]));
}

AssertionResult run_equals(const Problem& problem, DeviceCopy& device, const Options& options, std::int64_t slack) {
  const auto failure = [&] { return AssertionFailure() << "cuda, " << describe(options) << ": "; };
  auto indexer = Indexer::create(options);
  if (!indexer) return failure() << indexer.error().message;
  const auto plan = indexer->plan(shape_of(problem));
  if (!plan) return failure() << plan.error().message;
  // Some bytes of room, so that the second run's workspace lies elsewhere than the first one's arrays did.
  const auto workspace = device.workspace(plan->workspace_bytes + static_cast<std::size_t>(slack));
  if (!workspace) return failure() << workspace.error().message;
  const auto stats = indexer->run(*plan, device.problem(), device.selection(), *workspace);
  if (!stats) return failure() << stats.error().message;
  const auto counted = indexer->counters(*plan, *workspace);
  if (!counted) return failure() << counted.error().message;

  const std::int64_t nq = problem.q.shape[0];
  const std::int64_t k = problem.topk;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(nq * k), 0x55555555);
  std::vector<float> scores(ids.size());
  const Selection host{dense_view<void>(ids.data(), DType::i32, {nq, k}), dense_view<void>(scores.data(), DType::f32, {nq, k})};
  if (const auto fetched = device.fetch(host); !fetched) return failure() << fetched.error().message;
  const PathCounts& path = counted->path;
  if (path.empty + path.short_rows + path.dosa + path.full + path.full_context + path.full_loose + path.full_exempt != nq) {
    return failure() << "the counted paths do not add up to " << nq << " rows";
  }
  const std::int64_t checked = std::min(nq, rows_to_check(problem));
  for (std::int64_t i = 0; i < checked; ++i) {
    const std::int64_t row = i * nq / checked;
    const OracleRow want = oracle_row(problem, row, ReferenceScorer::sm90, options.order, options.index_space);
    for (std::int64_t slot = 0; slot < k; ++slot) {
      const auto n = static_cast<std::size_t>(slot);
      const auto at = static_cast<std::size_t>(row * k + slot);
      if (ids[at] != want.ids[n] || std::bit_cast<std::uint32_t>(scores[at]) != std::bit_cast<std::uint32_t>(want.scores[n])) {
        return failure() << fmt::format("row {} slot {}: id {} score {}, expected {} {}", row, slot, ids[at], scores[at],
                                        want.ids[n], want.scores[n]);
      }
    }
  }
  return AssertionSuccess();
}

}  // namespace

bool have_gpu() {
  static const bool available = unavailable_reason(Backend::cuda).empty();
  return available;
}

AssertionResult exact_on_gpu(const Problem& narrow) {
  const Widened wide(narrow);
  const Problem& problem = wide.problem;
  auto device = copy_to_device(problem, true);
  if (!device) return AssertionFailure() << device.error().message;
  std::int64_t slack = 0;
  for (const Method method : {Method::dense, Method::dosa, Method::automatic}) {
    for (const Order order : {Order::score, Order::ascending}) {
      for (const IndexSpace space : {IndexSpace::absolute, IndexSpace::relative}) {
        Options options;
        options.backend = Backend::cuda;
        options.method = method;
        options.order = order;
        options.index_space = space;
        if (auto equal = run_equals(problem, **device, options, slack += 4096); !equal) return equal;
      }
    }
  }
  return AssertionSuccess();
}

}  // namespace dosa::test
