// Properties of a selection that hold for every input.
#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <numeric>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "base/numeric.hpp"
#include "support/cases.hpp"
#include "support/check.hpp"

namespace dosa::test {
namespace {

template <typename T>
T pick(std::initializer_list<T> values) {
  return *rc::gen::elementOf(std::vector<T>(values));
}

int between(int low, int high) { return *rc::gen::inRange(low, high + 1); }

Options any_options() {
  static const std::vector<std::string> names = cpu_implementations();
  Options o;
  o.method = pick({Method::automatic, Method::dense, Method::fused, Method::dosa, Method::dosa, Method::dosa});
  o.implementation = names[static_cast<std::size_t>(between(0, static_cast<int>(names.size()) - 1))];
  o.threads = between(1, 4);
  o.order = pick({Order::score, Order::score, Order::ascending});
  o.index_space = pick({IndexSpace::absolute, IndexSpace::relative});
  o.seeds = pick({SeedPolicy::automatic, SeedPolicy::nearest_spread, SeedPolicy::chain, SeedPolicy::largest_bounds});
  o.certificate.form = pick({Form::automatic, Form::base, Form::absolute, Form::extended});
  o.certificate.row_budget = between(0, 12);
  o.certificate.aggregates = between(0, 4);
  o.certificate.precision = pick({ScreenPrecision::automatic, ScreenPrecision::f32, ScreenPrecision::i8});
  o.certificate.ablation = pick({Ablation::none, Ablation::none, Ablation::no_aggregate, Ablation::all_aggregated, Ablation::no_projection});
  o.min_context = pick<std::int64_t>({0, 1, 1000});
  return o;
}

Case any_case(int least_queries = 0) {
  const int nq = between(least_queries, 6);
  const int nk = between(0, 9) == 0 ? between(0, 3) : between(1, 900);
  const int heads = between(0, 3) == 0 ? between(1, 128) : between(1, 12);
  const int topk = between(0, 3) == 0 ? between(1, 4096) : between(1, 150);
  const Family family{.positive = between(0, 10) / 10.0,
                      .correlation = between(0, 10) / 10.0,
                      .alignment = between(0, 10) / 10.0,
                      .scale_spread = between(0, 20) / 10.0};
  const int seed = between(0, 1 << 30);
  Case c = random_case(static_cast<std::uint64_t>(seed), nq, nk, heads, pick({32, 64, 128}), topk, family);
  switch (between(0, 3)) {
    case 0: make_ragged(c, static_cast<std::uint64_t>(seed)); break;
    case 1: make_causal(c); break;
    default: break;
  }
  if (between(0, 4) == 0) {  // crowd the scores together
    for (float& scale : c.k_scale) scale = 1.0F;
    for (std::size_t i = 0; i < c.k.size(); ++i) c.k[i] = c.k[i % (static_cast<std::size_t>(c.dim) * 3)];
  }
  if (between(0, 3) == 0) {
    for (int n = between(1, 40); n > 0; --n) c.hints.push_back(between(-5, nk + 5));
  }
  return c;
}

RC_GTEST_PROP(Selection, EqualsTheOracle, ()) {
  const Case c = any_case();
  const Options options = any_options();
  RC_LOG() << describe(options) << '\n';
  const auto result = exact(c.problem(), expected_rows(c.problem()), options);
  RC_LOG() << result.message();
  RC_ASSERT(static_cast<bool>(result));
}

/// Row by row: the same scores, and the same ids where a score is not shared.
void assert_same_up_to_ties(const std::vector<OracleRow>& a, const std::vector<OracleRow>& b) {
  RC_ASSERT(a.size() == b.size());
  for (std::size_t row = 0; row < a.size(); ++row) {
    std::map<std::uint32_t, int> uses;
    const std::size_t width = a[row].ids.size();
    for (std::size_t slot = 0; slot < width; ++slot) {
      const std::uint32_t code = order_code(a[row].scores[slot]);
      RC_ASSERT(code == order_code(b[row].scores[slot]));
      ++uses[code];
    }
    if (width > 0) uses[order_code(a[row].scores.back())] = 2;  // the boundary may be shared with keys that lost
    for (std::size_t slot = 0; slot < width; ++slot) {
      if (uses[order_code(a[row].scores[slot])] == 1) RC_ASSERT(a[row].ids[slot] == b[row].ids[slot]);
    }
  }
}

Options ordered_options() {
  Options options = any_options();
  options.order = Order::score;
  options.index_space = IndexSpace::absolute;
  return options;
}

RC_GTEST_PROP(Selection, PermutingKeysPermutesTheAnswer, ()) {
  Case c = any_case();
  c.ks.clear();
  c.ke.clear();
  const Options options = ordered_options();
  std::vector<std::int32_t> from(static_cast<std::size_t>(c.nk));  // key i of the permuted problem
  std::iota(from.begin(), from.end(), 0);
  std::shuffle(from.begin(), from.end(), Random(7));
  Case permuted = c;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const auto source = static_cast<std::size_t>(from[i]);
    std::copy_n(c.k.begin() + from[i] * c.dim, c.dim, permuted.k.begin() + static_cast<std::ptrdiff_t>(i) * c.dim);
    permuted.k_scale[i] = c.k_scale[source];
  }
  std::vector<OracleRow> mapped = select(permuted.problem(), options);
  for (OracleRow& row : mapped) {
    for (std::int32_t& id : row.ids) id = id < 0 ? id : from[static_cast<std::size_t>(id)];
  }
  assert_same_up_to_ties(select(c.problem(), options), mapped);
}

RC_GTEST_PROP(Selection, SplittingQueriesChangesNothing, ()) {
  const Case c = any_case(2);
  const Options options = ordered_options();
  const std::vector<OracleRow> whole = select(c.problem(), options);
  const int cut = between(1, static_cast<int>(c.nq) - 1);
  std::vector<OracleRow> parts;
  for (const auto& [begin, end] : {std::pair{0, cut}, std::pair{cut, static_cast<int>(c.nq)}}) {
    Problem part = c.problem();
    for (TensorView* view : {&part.q, &part.w, &part.ks, &part.ke}) {
      if (!view->present()) continue;
      view->data = static_cast<const std::byte*>(view->data) +
                   begin * view->stride[0] * static_cast<std::int64_t>(size_of(view->dtype));
      view->shape[0] = end - begin;
    }
    for (OracleRow& row : select(part, options)) parts.push_back(std::move(row));
  }
  RC_ASSERT(parts.size() == whole.size());
  for (std::size_t row = 0; row < whole.size(); ++row) {
    RC_ASSERT(parts[row].ids == whole[row].ids);
    for (std::size_t slot = 0; slot < whole[row].scores.size(); ++slot) {
      RC_ASSERT(std::bit_cast<std::uint32_t>(parts[row].scores[slot]) ==
                std::bit_cast<std::uint32_t>(whole[row].scores[slot]));
    }
  }
}

RC_GTEST_PROP(Selection, WinnersOfShardsContainTheWinners, ()) {
  Case c = any_case(1);
  c.ks.clear();
  c.ke.clear();
  const Options options = ordered_options();
  const std::vector<OracleRow> whole = select(c.problem(), options);
  const int cut = between(0, static_cast<int>(c.nk));
  std::vector<std::vector<OracleRow>> shards;
  for (const auto& [begin, end] : {std::pair{0, cut}, std::pair{cut, static_cast<int>(c.nk)}}) {
    Case shard = c;
    shard.ks.assign(static_cast<std::size_t>(c.nq), begin);
    shard.ke.assign(static_cast<std::size_t>(c.nq), end);
    shards.push_back(select(shard.problem(), options));
  }
  for (std::size_t row = 0; row < whole.size(); ++row) {
    std::vector<std::pair<std::uint32_t, std::int32_t>> merged;
    for (const auto& shard : shards) {
      for (std::size_t slot = 0; slot < shard[row].ids.size(); ++slot) {
        if (shard[row].ids[slot] >= 0) merged.emplace_back(order_code(shard[row].scores[slot]), shard[row].ids[slot]);
      }
    }
    std::sort(merged.begin(), merged.end());
    for (std::size_t slot = 0; slot < whole[row].ids.size(); ++slot) {
      RC_ASSERT(whole[row].ids[slot] == (slot < merged.size() ? merged[slot].second : -1));
    }
  }
}

RC_GTEST_PROP(Selection, ASmallerKIsAPrefix, ()) {
  Case c = any_case();
  const Options options = ordered_options();
  const std::vector<OracleRow> many = select(c.problem(), options);
  c.topk = between(1, c.topk);
  const std::vector<OracleRow> few = select(c.problem(), options);
  for (std::size_t row = 0; row < few.size(); ++row) {
    RC_ASSERT(std::equal(few[row].ids.begin(), few[row].ids.end(), many[row].ids.begin()));
  }
}

RC_GTEST_PROP(Selection, PowersOfTwoInTheWeightsScaleTheScores, ()) {
  Case c = any_case();
  const Options options = ordered_options();
  const std::vector<OracleRow> before = select(c.problem(), options);
  for (float& w : c.w) w *= 4.0F;
  const std::vector<OracleRow> after = select(c.problem(), options);
  for (std::size_t row = 0; row < before.size(); ++row) {
    RC_ASSERT(after[row].ids == before[row].ids);
    for (std::size_t slot = 0; slot < before[row].ids.size(); ++slot) {
      RC_ASSERT(after[row].scores[slot] == 4.0F * before[row].scores[slot]);
    }
  }
}

RC_GTEST_PROP(Selection, AHeadOfWeightZeroChangesNothing, ()) {
  const Case c = any_case();
  if (c.heads == 128) return;
  const Options options = ordered_options();
  const std::vector<OracleRow> before = select(c.problem(), options);
  Case wider = c;
  wider.heads = c.heads + 1;
  wider.q.clear();
  wider.w.clear();
  const auto place = static_cast<std::size_t>(between(0, c.heads));
  for (std::size_t j = 0; j < static_cast<std::size_t>(c.nq); ++j) {
    for (std::size_t h = 0; h < static_cast<std::size_t>(wider.heads); ++h) {
      const auto dim = static_cast<std::size_t>(c.dim);
      const std::size_t source = j * static_cast<std::size_t>(c.heads) + h - (h > place ? 1 : 0);
      const auto first = c.q.begin() + static_cast<std::ptrdiff_t>(source * dim);
      if (h == place)
        wider.q.insert(wider.q.end(), dim, std::uint8_t{0x7E});
      else
        wider.q.insert(wider.q.end(), first, first + c.dim);
      wider.w.push_back(h == place ? 0.0F : c.w[source]);
    }
  }
  const std::vector<OracleRow> after = select(wider.problem(), options);
  for (std::size_t row = 0; row < before.size(); ++row) {
    RC_ASSERT(after[row].ids == before[row].ids);
    RC_ASSERT(after[row].scores == before[row].scores);
  }
}

RC_GTEST_PROP(Selection, HintsChangeNothing, ()) {
  Case c = any_case();
  Options options = ordered_options();
  options.method = Method::dosa;
  c.hints.clear();
  const std::vector<OracleRow> without = select(c.problem(), options);
  c.hint_rows = pick({std::int64_t{1}, std::max<std::int64_t>(c.nq, 1)});
  for (int n = between(1, 300); n > 0; --n) {
    for (std::int64_t row = 0; row < c.hint_rows; ++row) c.hints.push_back(between(-3, static_cast<int>(c.nk) + 3));
  }
  const std::vector<OracleRow> with = select(c.problem(), options);
  for (std::size_t row = 0; row < without.size(); ++row) RC_ASSERT(with[row].ids == without[row].ids);
}

/// tau is a proven lower bound from the start and ends at the K-th best score; nothing above it was turned away.
RC_GTEST_PROP(Selection, TauNeverExceedsTheKthScore, ()) {
  const Case c = any_case();
  Options options = any_options();
  options.method = Method::dosa;
  const Problem problem = c.problem();
  auto indexer = Indexer::create(options);
  RC_ASSERT(indexer.has_value());
  const auto plan = indexer->plan(shape_of(problem));
  RC_ASSERT(plan.has_value());
  std::vector<std::uint64_t> workspace(plan->workspace_bytes / 8 + 8);
  const auto address = (reinterpret_cast<std::uintptr_t>(workspace.data()) + 63) / 64 * 64;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(c.nq * c.topk));
  std::vector<RowReport> reports(static_cast<std::size_t>(c.nq));
  const std::int64_t shape[] = {c.nq, c.topk};
  const auto stats = indexer->run(*plan, problem, {dense_view<void>(ids.data(), DType::i32, shape), {}},
                                  {reinterpret_cast<void*>(address), plan->workspace_bytes}, reports);
  RC_ASSERT(stats.has_value());
  const auto expected = expected_rows(problem);
  std::int64_t survivors = 0;
  for (std::size_t row = 0; row < expected.size(); ++row) {
    const RowReport& report = reports[row];
    survivors += report.survivors;
    if (report.path == Path::empty || report.path == Path::short_row) continue;
    const float kth = expected[row].scores.back();
    RC_ASSERT(report.visible > c.topk);
    RC_ASSERT(!(report.seed_tau > kth));
    RC_ASSERT(order_code(report.tau) == order_code(std::isnan(kth) ? -std::numeric_limits<float>::infinity() : kth));
    if (report.path == Path::dosa) RC_ASSERT(report.refined <= report.visible && report.bound_rows >= report.retained);
  }
  RC_ASSERT(survivors == stats->survivors);
}

}  // namespace
}  // namespace dosa::test
