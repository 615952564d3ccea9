#include "support/gpu.hpp"

#include <algorithm>
#include <bit>
#include <vector>

#include <fmt/format.h>

#include "backend/backend.hpp"
#include "base/keys.hpp"
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
    const std::int64_t nq = narrow.q.shape[0], heads = narrow.q.shape[1], dim = narrow.q.shape[2];
    q.resize(static_cast<std::size_t>(nq * heads * kDim));
    for (std::int64_t row = 0; row < nq * heads; ++row) {
      for (std::int64_t i = 0; i < dim; ++i) {
        q[static_cast<std::size_t>(row * kDim + i)] = *narrow.q.at<std::uint8_t>(row / heads, row % heads, i);
      }
    }
    problem.q = dense_view<const void>(q.data(), DType::f8_e4m3, {nq, heads, kDim});
    if (is_paged(narrow)) {
      widen_pages(dim);
    } else {
      widen_rows(dim);
    }
  }

  void widen_rows(std::int64_t dim) {
    const TensorView narrow = problem.k;
    const std::int64_t nk = narrow.shape[0];
    k.resize(static_cast<std::size_t>(nk * kDim));
    for (std::int64_t row = 0; row < nk; ++row) {
      for (std::int64_t i = 0; i < dim; ++i) k[static_cast<std::size_t>(row * kDim + i)] = *narrow.at<std::uint8_t>(row, i);
    }
    problem.k = dense_view<const void>(k.data(), DType::f8_e4m3, {nk, kDim});
  }

  // Pages as far apart as they were, beyond their own bytes.
  void widen_pages(std::int64_t dim) {
    const TensorView narrow = problem.kv_cache;
    const std::int64_t pages = narrow.shape[0], keys = narrow.shape[1];
    const std::int64_t stride = keys * (kDim + 4) + narrow.stride[0] - keys * (dim + 4);
    k.assign(static_cast<std::size_t>(pages * stride), 0x7F);
    for (std::int64_t page = 0; page < pages; ++page) {
      const std::uint8_t* from = narrow.at<std::uint8_t>() + page * narrow.stride[0];
      std::uint8_t* to = k.data() + page * stride;
      std::fill_n(to, keys * kDim, std::uint8_t{0});
      for (std::int64_t key = 0; key < keys; ++key) std::copy_n(from + key * dim, dim, to + key * kDim);
      std::copy_n(from + keys * dim, keys * 4, to + keys * kDim);
    }
    problem.kv_cache = dense_view<const void>(k.data(), DType::f8_e4m3, {pages, keys, 1, kDim + 4});
    problem.kv_cache.stride[0] = stride;
  }

  static constexpr std::int64_t kDim = 128;
  std::vector<std::uint8_t> q, k;
  Problem problem;
};

// The emulator takes microseconds a dot: as many rows, evenly spread, as it can do in a few seconds.
std::int64_t rows_to_check(const Problem& problem) {
  const std::int64_t dots = std::max<std::int64_t>(1, key_count(problem) * problem.q.shape[1]);
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

void expect_exact_on_gpu(const Problem& problem) {
  if (!have_gpu()) return;
  EXPECT_TRUE(exact_on_gpu(problem));
}

AssertionResult exact_on_gpu(const Problem& narrow) {
  const Widened wide(narrow);
  const Problem& problem = wide.problem;
  // Each run leaves recent winners to the next.
  auto device = copy_to_device(problem, true, is_paged(problem) ? problem.topk + 5 : 0);
  if (!device) return AssertionFailure() << device.error().message;
  std::int64_t slack = 0;
  for (const Method method : {Method::dense, Method::dosa, Method::automatic}) {
    for (const Order order : {Order::score, Order::ascending}) {
      for (const IndexSpace space : {IndexSpace::absolute, IndexSpace::relative, IndexSpace::slot}) {
        if (space == IndexSpace::slot && !is_paged(problem)) continue;
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
