// A thousand steps of decoding against the oracle: requests grow across pages and past K, drafts are rejected, state is
// dropped, swapped, copied and spoilt, requests end and begin.
#include <algorithm>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "decode/recent.hpp"
#include "dosa/decode.hpp"
#include "dosa/indexer.hpp"
#include "dosa/pages.hpp"
#include "score/oracle.hpp"
#include "score/quantize.hpp"
#include "support/cases.hpp"

namespace dosa::test {
namespace {

constexpr std::int64_t kRequests = 3, kColumns = 45, kPageSize = 16, kPages = kRequests * kColumns + 5;
constexpr std::int32_t kHeads = 6, kDim = 32, kTopk = 24, kRecent = 40;
constexpr std::int64_t kRoom = kColumns * kPageSize;

/// What an engine keeps, and beside it the same keys without pages.
class Engine {
 public:
  explicit Engine(std::uint64_t seed) : random_(seed) {
    pool_.assign(static_cast<std::size_t>(kPages * stride()), 0x7F);
    for (std::int32_t page = 0; page < kPages; ++page) free_.push_back(page);
    std::shuffle(free_.begin(), free_.end(), random_);
    table_.assign(kRequests * kColumns, -1);
    recent_.assign(kRequests * kRecent, -1);
    for (std::int64_t r = 0; r < kRequests; ++r) {
      k_.emplace_back(kRoom * kDim);
      k_scale_.emplace_back(kRoom);
    }
    length_.assign(kRequests, 0);
    for (float& x : direction_) x = normal_(random_);
  }

  /// Writes keys for the next `count` positions of a request, by the library's insert and by hand.
  void append(std::int64_t request, std::int64_t count) {
    std::vector<float> keys;
    std::vector<std::int32_t> slots;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t at = length_[static_cast<std::size_t>(request)] + i;
      std::int32_t& page = table_[static_cast<std::size_t>(request * kColumns + at / kPageSize)];
      if (page < 0) {
        page = free_.back();
        free_.pop_back();
      }
      slots.push_back(page * static_cast<std::int32_t>(kPageSize) + static_cast<std::int32_t>(at % kPageSize));
      const float along = normal_(random_);
      for (const float x : direction_) keys.push_back(along * x + normal_(random_));
      auto& k = k_[static_cast<std::size_t>(request)];
      k_scale_[static_cast<std::size_t>(request)][static_cast<std::size_t>(at)] = quantize_row(
          std::span(keys).last(kDim), std::span(k).subspan(static_cast<std::size_t>(at * kDim), kDim), ScaleRule::amax);
    }
    MutableTensorView cache = dense_view<void>(pool_.data(), DType::f8_e4m3, {kPages, kPageSize, 1, kDim + 4});
    cache.stride[0] = stride();
    ASSERT_TRUE(insert_keys(cache, dense_view<const void>(keys.data(), DType::f32, {count, kDim}),
                            dense_view<const void>(slots.data(), DType::i32, {count})));
  }

  void grow(std::int64_t request, std::int64_t accepted) { length_[static_cast<std::size_t>(request)] += accepted; }
  [[nodiscard]] std::int64_t length(std::int64_t request) const { return length_[static_cast<std::size_t>(request)]; }

  /// The request ends, another takes its place.
  void restart(std::int64_t request) {
    for (std::int64_t m = 0; m < kColumns; ++m) {
      std::int32_t& page = table_[static_cast<std::size_t>(request * kColumns + m)];
      if (page >= 0) free_.push_back(page);
      page = -1;
    }
    std::shuffle(free_.begin(), free_.end(), random_);
    length_[static_cast<std::size_t>(request)] = 0;
  }

  /// Requests change places in the batch, with or without their state.
  void swap(std::int64_t a, std::int64_t b, bool with_state) {
    const auto rows = [](auto& array, std::int64_t width, std::int64_t x, std::int64_t y) {
      std::swap_ranges(array.begin() + x * width, array.begin() + (x + 1) * width, array.begin() + y * width);
    };
    if (a == b) return;
    rows(table_, kColumns, a, b);
    if (with_state) rows(recent_, kRecent, a, b);
    std::swap(k_[static_cast<std::size_t>(a)], k_[static_cast<std::size_t>(b)]);
    std::swap(k_scale_[static_cast<std::size_t>(a)], k_scale_[static_cast<std::size_t>(b)]);
    std::swap(length_[static_cast<std::size_t>(a)], length_[static_cast<std::size_t>(b)]);
  }

  [[nodiscard]] std::span<std::int32_t> recent(std::int64_t request) {
    return std::span(recent_).subspan(static_cast<std::size_t>(request * kRecent), kRecent);
  }
  [[nodiscard]] MutableTensorView recent_view() {
    return dense_view<void>(recent_.data(), DType::i32, {kRequests, kRecent});
  }

  /// Queries that drift, so that neighbours choose much the same; lengths of draft tokens.
  DecodeStep step(std::int64_t next_n) {
    if (heads_.empty()) heads_.resize(kRequests * kHeads * kDim);
    for (std::size_t n = 0; n < heads_.size(); ++n) {
      heads_[n] = 0.9F * heads_[n] + 0.3F * normal_(random_) + 0.1F * direction_[n % kDim];
    }
    q_.clear();
    w_.clear();
    lens_.clear();
    for (std::int64_t r = 0; r < kRequests; ++r) {
      for (std::int64_t j = 0; j < next_n; ++j) {
        for (std::int32_t h = 0; h < kHeads; ++h) {
          w_.push_back((h < 2 ? 1.0F : -1.0F) * std::exp(0.3F * normal_(random_)));
          for (std::int32_t d = 0; d < kDim; ++d) {
            q_.push_back(encode_e4m3(4 * heads_[static_cast<std::size_t>((r * kHeads + h) * kDim + d)] +
                                     0.2F * normal_(random_)));
          }
        }
        // As engines compute it: negative where a slot is drained.
        lens_.push_back(static_cast<std::int32_t>(length(r) == 0 ? j - next_n : length(r) + j + 1));
      }
    }
    TensorView cache = dense_view<const void>(pool_.data(), DType::f8_e4m3, {kPages, kPageSize, 1, kDim + 4});
    cache.stride[0] = stride();
    return {dense_view<const void>(q_.data(), DType::f8_e4m3, {kRequests, next_n, kHeads, kDim}),
            dense_view<const void>(w_.data(), DType::f32, {kRequests * next_n, kHeads}),
            cache,
            dense_view<const void>(table_.data(), DType::i32, {kRequests, kColumns}),
            dense_view<const void>(lens_.data(), DType::i32, {kRequests, next_n}),
            kTopk};
  }

  /// What a row must be, from the keys without pages.
  [[nodiscard]] OracleRow expected(std::int64_t request, std::int64_t token, std::int64_t next_n) const {
    const auto row = static_cast<std::size_t>(request * next_n + token);
    Problem p;
    p.q = dense_view<const void>(q_.data() + row * kHeads * kDim, DType::f8_e4m3, {1, kHeads, kDim});
    p.w = dense_view<const void>(w_.data() + row * kHeads, DType::f32, {1, kHeads});
    p.k = dense_view<const void>(k_[static_cast<std::size_t>(request)].data(), DType::f8_e4m3, {kRoom, kDim});
    p.k_scale = dense_view<const void>(k_scale_[static_cast<std::size_t>(request)].data(), DType::f32, {kRoom});
    p.ke = dense_view<const void>(&lens_[row], DType::i32, {1});
    p.topk = kTopk;
    return oracle_row(p, 0, ReferenceScorer::cpu, Order::score, IndexSpace::absolute);
  }
  /// Where position `id` of a request lies.
  [[nodiscard]] std::int32_t slot_of(std::int64_t request, std::int32_t id) const {
    if (id < 0) return id;
    return table_[static_cast<std::size_t>(request * kColumns + id / kPageSize)] *
               static_cast<std::int32_t>(kPageSize) +
           id % static_cast<std::int32_t>(kPageSize);
  }

 private:
  [[nodiscard]] static std::int64_t stride() { return kPageSize * (kDim + 4) + 28; }

  Random random_;
  std::normal_distribution<float> normal_;
  std::array<float, kDim> direction_{};
  std::vector<float> heads_;
  std::vector<std::uint8_t> pool_, q_;
  std::vector<std::int32_t> free_, table_, recent_, lens_;
  std::vector<float> w_;
  std::vector<std::vector<std::uint8_t>> k_;
  std::vector<std::vector<float>> k_scale_;
  std::vector<std::int64_t> length_;
};

void disturb(Engine& engine, Random& random) {
  const auto pick = [&] { return static_cast<std::int64_t>(random() % kRequests); };
  const std::int64_t a = pick(), b = pick();
  switch (random() % 40) {
    case 0: std::ranges::fill(engine.recent(a), -1); break;
    case 1: engine.swap(a, b, true); break;
    case 2: engine.swap(a, b, false); break;
    case 3: std::ranges::copy(engine.recent(a), engine.recent(b).begin()); break;
    case 4:
      for (std::int32_t& id : engine.recent(a)) id = static_cast<std::int32_t>(random());
      break;
    case 5: std::ranges::fill(engine.recent(a), static_cast<std::int32_t>(random() % 200)); break;
    case 6:
      if (random() % 4 == 0) engine.restart(a);
      break;
    default: break;
  }
}

/// Decodes with `options` and compares every row of every step.
Stats expect_exact_stream(const Options& options, std::uint64_t seed, int steps) {
  Random random(seed);
  Engine engine(seed);
  auto indexer = Indexer::create(options);
  Stats total;
  std::int64_t most = 0;
  for (int n = 0; n < steps; ++n) {
    const auto next_n = static_cast<std::int64_t>(1 + random() % 4);
    for (std::int64_t r = 0; r < kRequests; ++r) {
      if (engine.length(r) + 2 * next_n + 8 > kRoom) engine.restart(r);
      engine.append(r, next_n);  // every draft token's key is written, before it is known which are accepted
    }
    const DecodeStep step = engine.step(next_n);
    const auto problem = decode_problem(step);
    EXPECT_TRUE(problem);
    const auto plan = indexer->plan(shape_of(*problem));
    EXPECT_TRUE(plan);
    const std::int64_t rows = kRequests * next_n;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * kTopk), 0x7FFFFFFF);
    std::vector<float> scores(ids.size());
    const auto stats = indexer->run(*plan, *problem,
                                    {dense_view<void>(ids.data(), DType::i32, {rows, kTopk}),
                                     dense_view<void>(scores.data(), DType::f32, {rows, kTopk}), engine.recent_view()});
    EXPECT_TRUE(stats) << stats.error().message;
    total += *stats;
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t request = row / next_n;
      const OracleRow expected = engine.expected(request, row % next_n, next_n);
      for (std::int64_t at = 0; at < kTopk; ++at) {
        const std::int32_t want = expected.ids[static_cast<std::size_t>(at)];
        const auto slot = static_cast<std::size_t>(row * kTopk + at);
        const bool equal =
            ids[slot] == (options.index_space == IndexSpace::slot ? engine.slot_of(request, want) : want) &&
            std::bit_cast<std::uint32_t>(scores[slot]) ==
                std::bit_cast<std::uint32_t>(expected.scores[static_cast<std::size_t>(at)]);
        if (equal) continue;
        ADD_FAILURE() << "step " << n << " row " << row << " slot " << at << ": id " << ids[slot] << ", expected "
                      << want;
        return total;
      }
    }
    for (std::int64_t r = 0; r < kRequests; ++r) {
      engine.grow(r, 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(next_n)));
      most = std::max(most, engine.length(r));
    }
    disturb(engine, random);
  }
  EXPECT_GT(most, steps < 1000 ? kTopk : kRoom * 9 / 10);
  return total;
}

Options with(Method method, IndexSpace space) {
  Options options;
  options.method = method;
  options.index_space = space;
  options.min_context = 1;
  options.threads = 2;
  return options;
}

TEST(DecodeStream, AThousandStepsOfDosa) {
  const Stats stats = expect_exact_stream(with(Method::dosa, IndexSpace::slot), 1, 1000);
  EXPECT_GT(stats.seeds, 0);
  EXPECT_GT(stats.screened, stats.survivors);
  EXPECT_GT(stats.path.empty, 0);
  EXPECT_GT(stats.path.short_rows, 0);
  EXPECT_GT(stats.path.dosa, 1000);
}

TEST(DecodeStream, EveryMethodAndSeedPolicy) {
  for (const Method method : {Method::automatic, Method::dense, Method::fused, Method::dosa}) {
    expect_exact_stream(with(method, IndexSpace::absolute), 2, 150);
  }
  for (const SeedPolicy seeds : {SeedPolicy::chain, SeedPolicy::nearest_spread, SeedPolicy::largest_bounds}) {
    Options options = with(Method::dosa, IndexSpace::slot);
    options.seeds = seeds;
    options.certificate.row_budget = 2;
    expect_exact_stream(options, 3, 150);
  }
}

TEST(DecodeStream, TheFirstStepNeedsNoStateAndTheSecondUsesIt) {
  Engine engine(5);
  for (std::int64_t r = 0; r < kRequests; ++r) {
    engine.append(r, 300);
    engine.grow(r, 299);
  }
  auto indexer = Indexer::create(with(Method::dosa, IndexSpace::slot));
  std::vector<std::int32_t> ids(kRequests * kTopk);
  for (int n = 0; n < 3; ++n) {
    const DecodeStep step = engine.step(1);
    const auto problem = decode_problem(step);
    const auto plan = indexer->plan(shape_of(*problem));
    const auto stats = indexer->run(
        *plan, *problem, {dense_view<void>(ids.data(), DType::i32, {kRequests, kTopk}), {}, engine.recent_view()});
    ASSERT_TRUE(stats);
    EXPECT_EQ(stats->seeds > 0, n > 0);
    for (std::int64_t r = 0; r < kRequests; ++r) {
      // The newest winners come first, as positions whatever the ids are.
      std::vector<std::int32_t> newest = engine.expected(r, 0, 1).ids;
      std::ranges::sort(newest);
      EXPECT_TRUE(std::equal(newest.begin(), newest.end(), engine.recent(r).begin()));
      if (n == 2) std::ranges::fill(engine.recent(r), -1);
    }
  }
}

TEST(Recent, NewestFirstDistinctAndTheOldestFallOut) {
  std::vector<std::int32_t> recent(7, -1);
  const auto add = [&](std::vector<std::int32_t> winners) { remember(winners, recent); };
  add({5, 3});
  EXPECT_EQ(recent, (std::vector<std::int32_t>{3, 5, -1, -1, -1, -1, -1}));
  add({9, 5, 4});
  EXPECT_EQ(recent, (std::vector<std::int32_t>{4, 5, 9, 3, -1, -1, -1}));
  add({1, 2, 3, 6});
  EXPECT_EQ(recent, (std::vector<std::int32_t>{1, 2, 3, 6, 4, 5, 9}));
  add({7});
  EXPECT_EQ(recent, (std::vector<std::int32_t>{7, 1, 2, 3, 6, 4, 5}));
  add({});
  EXPECT_EQ(recent, (std::vector<std::int32_t>{7, 1, 2, 3, 6, 4, 5}));
  recent = {7, -3, std::numeric_limits<std::int32_t>::min(), 8, -1, 7, 7};  // any contents
  add({8, 2});
  EXPECT_EQ(recent, (std::vector<std::int32_t>{2, 8, 7, 7, 7, -1, -1}));
  add({10, 11, 12, 13, 14, 15, 16, 1, 0});  // more than there is room for: the first of them
  EXPECT_EQ(recent, (std::vector<std::int32_t>{10, 11, 12, 13, 14, 15, 16}));
  std::vector<std::int32_t> none;
  remember(recent, none);
}

}  // namespace
}  // namespace dosa::test
