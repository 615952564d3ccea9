// Seeds, records and the guessed threshold, each by itself.
#include <algorithm>
#include <numeric>
#include <set>

#include <gtest/gtest.h>

#include "seed/seed.hpp"
#include "select/records.hpp"
#include "select/threshold.hpp"
#include "support/cases.hpp"

namespace dosa {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Ids nearest_spread(VisibleRange visible, std::int32_t topk) {
  Ids out(static_cast<std::size_t>(max_witnesses(topk, 0)));
  out.resize(static_cast<std::size_t>(nearest_spread_witnesses(visible, topk, out)));
  return out;
}

Ids chain(VisibleRange visible, std::int32_t topk, const Ids& winners) {
  Ids out(static_cast<std::size_t>(max_witnesses(topk, static_cast<std::int64_t>(winners.size()))));
  const hwy::Sorter sorter;
  out.resize(static_cast<std::size_t>(chain_witnesses(visible, topk, winners, out, sorter)));
  return out;
}

/// What every policy owes: distinct visible keys in ascending order, at least K of them where that many can be seen.
void expect_witnesses(const Ids& ids, VisibleRange visible, std::int32_t topk) {
  EXPECT_TRUE(std::adjacent_find(ids.begin(), ids.end(), std::greater_equal<>()) == ids.end());
  for (const std::int32_t id : ids) EXPECT_TRUE(visible.contains(id)) << id;
  EXPECT_GE(static_cast<std::int64_t>(ids.size()), std::min<std::int64_t>(visible.size(), topk));
}

TEST(Seed, WitnessesAreDistinctAndVisible) {
  test::Random random(1);
  for (int trial = 0; trial < 3000; ++trial) {
    const auto begin = static_cast<std::int64_t>(random() % 50);
    const VisibleRange visible{begin, begin + static_cast<std::int64_t>(random() % 200)};
    const auto topk = static_cast<std::int32_t>(1 + random() % 60);
    expect_witnesses(nearest_spread(visible, topk), visible, topk);
    Ids winners;
    for (auto n = random() % 150; n > 0; --n) winners.push_back(static_cast<std::int32_t>(random() % 300) - 20);
    const Ids ids = chain(visible, topk, winners);
    expect_witnesses(ids, visible, topk);
    for (const std::int32_t winner : winners) {
      EXPECT_EQ(std::binary_search(ids.begin(), ids.end(), winner), visible.contains(winner));
    }
  }
}

TEST(Seed, NearestAndSpread) {
  EXPECT_EQ(nearest_spread({0, 12}, 3), (Ids{0, 3, 6, 9, 10, 11}));
  EXPECT_EQ(nearest_spread({5, 9}, 4), (Ids{5, 6, 7, 8}));
  EXPECT_EQ(nearest_spread({7, 7}, 4), Ids{});
}

/// The K first of all pushed records, by sorting.
std::vector<Record> first_k(std::vector<Record> all, std::size_t k) {
  std::sort(all.begin(), all.end());
  all.resize(std::min(all.size(), k));
  return all;
}

TEST(Records, RoundTrip) {
  for (const float score : {kInf, 1.5F, 0.0F, -0.0F, -2.0F, -kInf}) {
    for (const std::int32_t id : {0, 1, 0x7FFFFFFF}) {
      const Record record = make_record(score, id);
      EXPECT_EQ(id_of(record), id);
      EXPECT_EQ(std::bit_cast<std::uint32_t>(score_of(record)), std::bit_cast<std::uint32_t>(score));
    }
  }
  EXPECT_EQ(std::bit_cast<std::uint32_t>(score_of(make_record(-kNaN, 3))), 0x7FC00000U);
  EXPECT_LT(make_record(-0.0F, 3), make_record(0.0F, 4));  // zeros of both signs tie, ids decide
  EXPECT_LT(make_record(0.0F, 3), make_record(-0.0F, 4));
}

TEST(Records, CompactionIsExactWhateverTheOrder) {
  test::Random random(2);
  for (int trial = 0; trial < 2000; ++trial) {
    const auto k = static_cast<std::int32_t>(1 + random() % 20);
    std::vector<Record> storage(static_cast<std::size_t>(k) + 1 + random() % 10);
    RecordBuffer buffer(storage, k);
    std::vector<Record> all;
    const auto levels = 1 + random() % 30;
    Ids ids(random() % 200);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    for (const std::int32_t id : ids) {
      const auto level = random() % (levels + 2);
      const float score = level == levels ? kNaN : level == levels + 1 ? -0.0F : static_cast<float>(level) - 3.0F;
      buffer.push(score, id);
      all.push_back(make_record(score, id));
      ASSERT_FALSE(all.size() >= static_cast<std::size_t>(k) &&
                   buffer.tau() > tau_of(first_k(all, static_cast<std::size_t>(k)).back()));
    }
    buffer.compact();
    const auto records = buffer.records();
    std::vector<Record> kept(records.begin(), records.end());
    EXPECT_EQ(first_k(kept, kept.size()), first_k(all, static_cast<std::size_t>(k)));
    EXPECT_LE(kept.size(), static_cast<std::size_t>(k));
  }
}

TEST(Records, TauIsTheKthScore) {
  std::vector<Record> storage(4);
  RecordBuffer buffer(storage, 2);
  EXPECT_EQ(buffer.tau(), -kInf);
  buffer.push(1.0F, 7);
  buffer.compact();
  EXPECT_EQ(buffer.tau(), -kInf);  // one witness proves nothing
  buffer.push(kNaN, 3);
  buffer.compact();
  EXPECT_EQ(buffer.tau(), -kInf);  // nor does a NaN
  buffer.push(0.5F, 9);
  buffer.compact();
  EXPECT_EQ(buffer.tau(), 0.5F);
  buffer.push(0.5F, 2);  // a tie enters, and wins by its id
  buffer.push(std::nextafterf(0.5F, 0.0F), 1);
  EXPECT_EQ(buffer.size(), 3);
  buffer.compact();
  EXPECT_EQ(id_of(*std::max_element(storage.begin(), storage.begin() + 2)), 2);
  buffer.clear();
  EXPECT_EQ(buffer.tau(), 0.5F);
}

TEST(Threshold, IsReachedByAboutAsManyAsWanted) {
  test::Random random(3);
  std::array<std::uint32_t, kThresholdSample> scratch;
  const hwy::Sorter sorter;
  std::vector<float> values(20000);
  for (float& value : values) value = std::uniform_real_distribution<float>(-1.0F, 1.0F)(random);
  for (const std::int64_t want : {200, 2000, 10000}) {
    const float low = guess_threshold(values.data(), 20000, want, scratch, sorter);
    const auto count = std::count_if(values.begin(), values.end(), [&](float value) { return !(value < low); });
    EXPECT_GT(count, want / 2);
    EXPECT_LT(count, want * 2);
  }
  EXPECT_EQ(guess_threshold(values.data(), 100, 100, scratch, sorter), -kInf);  // everything
  std::fill(values.begin(), values.end(), kNaN);
  EXPECT_EQ(guess_threshold(values.data(), 20000, 10, scratch, sorter), kInf);  // bounds that prove nothing are the largest
}

}  // namespace
}  // namespace dosa
