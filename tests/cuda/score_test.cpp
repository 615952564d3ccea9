// launch_score against the emulator, bit for bit.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "backend/cuda/prepare.hpp"
#include "cuda/problem.hpp"
#include "select/records.hpp"

namespace dosa::test {
namespace {

using cuda::ScoreArgs;

constexpr float kUntouched = -12345.0F;

struct Slice {
  std::int64_t first_row = 0;
  std::int64_t rows;
  std::int64_t key_begin = 0;
  std::int64_t key_end;
  int period = 1;

  [[nodiscard]] cuda::KeySlice keys(std::int64_t nk) const { return cuda::slice_of(nk, period / 2, period); }
};

// The keys of a slice on the device, as launch_score takes them.
class SliceInputs {
 public:
  SliceInputs(const DeviceProblem& problem, const Slice& slice)
      : device_(problem), inputs(device_.inputs), k_(static_cast<std::size_t>(slice.keys(problem.nk).count) * cuda::kDim),
        k_scale_(static_cast<std::size_t>(slice.keys(problem.nk).count)) {
    if (slice.period == 1) return;
    EXPECT_EQ(cuda::launch_gather({inputs.k, inputs.k_scale, slice.keys(problem.nk), k_.get(), k_scale_.get()}, nullptr), cudaSuccess);
    inputs.k = k_.get();
    inputs.k_scale = k_scale_.get();
  }

 private:
  DeviceInputs device_;

 public:
  cuda::Inputs inputs;

 private:
  DeviceArray<std::uint8_t> k_;
  DeviceArray<float> k_scale_;
};

void expect_emulated(const DeviceProblem& problem, const Slice& slice, const std::string& what) {
  const SliceInputs device(problem, slice);
  const std::int64_t keys = slice.key_end - slice.key_begin;
  const std::int64_t stride = keys + 5;
  const std::vector<float> untouched(static_cast<std::size_t>(slice.rows * stride + 7), kUntouched);
  DeviceArray<float> scores(untouched);
  const ScoreArgs args{.in = device.inputs,
                       .first_row = slice.first_row,
                       .rows = slice.rows,
                       .keys = slice.keys(problem.nk),
                       .key_begin = slice.key_begin,
                       .key_end = slice.key_end,
                       .scores = scores.get(),
                       .score_stride = stride};
  ASSERT_EQ(cuda::launch_score(args, multiprocessors(), nullptr), cudaSuccess) << what;
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << what;
  const std::vector<float> got = scores.download();

  std::int64_t wrong = 0;
  for (std::int64_t r = 0; r < slice.rows; ++r) {
    const std::int64_t query = slice.first_row + r;
    const QueryScorer scorer = problem.scorer(query);
    for (std::int64_t i = slice.key_begin; i < slice.key_end; ++i) {
      const std::int64_t key = cuda::key_at(slice.keys(problem.nk), i);
      if (key < problem.begin(query) || key >= problem.end(query)) continue;
      const float expected = problem.score(scorer, key);
      const float actual = got[r * stride + i - slice.key_begin];
      if (!same_score(expected, actual) && ++wrong <= 3) {
        ADD_FAILURE() << what << ": row " << query << " key " << key << ": " << actual << ", emulator " << expected;
      }
    }
    for (std::int64_t i = keys; i < stride; ++i)
      ASSERT_EQ(got[r * stride + i], kUntouched) << what << ": beyond row " << r;
  }
  for (std::size_t i = static_cast<std::size_t>(slice.rows * stride); i < got.size(); ++i)
    ASSERT_EQ(got[i], kUntouched) << what;
  EXPECT_EQ(wrong, 0) << what;
}

// The same scores filtered: records of the visible keys that are not below tau, and no others, whatever the room for them.
void expect_filtered(const DeviceProblem& problem, const Slice& slice, unsigned seed) {
  const std::string what = "heads " + std::to_string(problem.heads) + " rows " + std::to_string(slice.rows);
  std::mt19937 random(seed);
  std::vector<float> tau(static_cast<std::size_t>(slice.rows));
  std::vector<std::vector<Record>> expected(tau.size());
  std::size_t longest = 1;
  for (std::size_t r = 0; r < tau.size(); ++r) {
    const std::int64_t query = slice.first_row + static_cast<std::int64_t>(r);
    const QueryScorer scorer = problem.scorer(query);
    std::vector<std::pair<float, std::int32_t>> scores;
    for (std::int64_t i = slice.key_begin; i < slice.key_end; ++i) {
      const std::int64_t key = cuda::key_at(slice.keys(problem.nk), i);
      if (key >= problem.begin(query) && key < problem.end(query)) scores.emplace_back(problem.score(scorer, key), static_cast<std::int32_t>(i));
    }
    tau[r] = random() % 4 == 0 || scores.empty() ? -std::numeric_limits<float>::infinity() : scores[random() % scores.size()].first;
    if (std::isnan(tau[r])) tau[r] = 0;
    for (const auto& [score, id] : scores) {
      if (!(score < tau[r])) expected[r].push_back(make_record(score, id));
    }
    std::sort(expected[r].begin(), expected[r].end());
    longest = std::max(longest, expected[r].size());
  }

  const SliceInputs device(problem, slice);
  const DeviceArray<float> device_tau(tau);
  DeviceArray<std::int32_t> count(tau.size());
  DeviceArray<std::uint8_t> lost(tau.size());
  for (const std::size_t stride : {longest + 3, longest, (longest + 1) / 2}) {
    DeviceArray<Record> records(stride * tau.size());
    records.fill(0xAB);
    count.fill(0);
    lost.fill(0);
    const ScoreArgs args{.in = device.inputs,
                         .first_row = slice.first_row,
                         .rows = slice.rows,
                         .keys = slice.keys(problem.nk),
                         .key_begin = slice.key_begin,
                         .key_end = slice.key_end,
                         .scores = nullptr,
                         .score_stride = 0,
                         .tau = device_tau.get(),
                         .found = {records.get(), static_cast<std::int64_t>(stride), count.get(), lost.get()}};
    ASSERT_EQ(cuda::launch_score(args, multiprocessors(), nullptr), cudaSuccess) << what;
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << what;
    std::vector<Record> got = records.download();
    const std::vector<std::int32_t> got_count = count.download();
    const std::vector<std::uint8_t> got_lost = lost.download();
    for (std::size_t r = 0; r < expected.size(); ++r) {
      ASSERT_EQ(got_count[r], static_cast<std::int32_t>(expected[r].size())) << what << " row " << r;
      const bool fits = expected[r].size() <= stride;
      ASSERT_EQ(got_lost[r], fits ? 0 : 1) << what << " row " << r;
      const auto begin = got.begin() + static_cast<std::ptrdiff_t>(r * stride), end = begin + static_cast<std::ptrdiff_t>(stride);
      const auto written = begin + static_cast<std::ptrdiff_t>(std::min(expected[r].size(), stride));
      std::sort(begin, written);
      ASSERT_TRUE(std::includes(expected[r].begin(), expected[r].end(), begin, written)) << what << " row " << r;
      for (auto it = written; it != end; ++it) ASSERT_EQ(*it, 0xABABABABABABABABU) << what << " row " << r;
    }
  }
}

class CudaScore : public CudaTest {};

TEST_F(CudaScore, FiltersWhatTheEmulatorSays) {
  for (const int heads : {1, 8, 13, 16, 32, 40, 64, 100, 128}) {
    const auto seed = static_cast<unsigned>(heads);
    expect_filtered(DeviceProblem::plain(heads, 21, 3000, seed), {.rows = 21, .key_end = 3000}, seed);
    expect_filtered(DeviceProblem::hostile(heads, 17, 517, seed), {.first_row = 2, .rows = 13, .key_end = 517}, seed);
    expect_filtered(DeviceProblem::plain(heads, 21, 3000, seed), {.first_row = 1, .rows = 20, .key_begin = 448, .key_end = 2741}, seed);
  }
}

TEST_F(CudaScore, EveryFewKeys) {
  for (const int heads : {8, 32, 64}) {
    for (const int period : {2, 7, 64}) {
      const std::int64_t count = cuda::slice_of(2999, period / 2, period).count;
      const DeviceProblem p = DeviceProblem::hostile(heads, 9, 2999, static_cast<unsigned>(period));
      expect_emulated(p, {.rows = 9, .key_end = count, .period = period}, "every " + std::to_string(period));
      expect_filtered(p, {.rows = 9, .key_end = count, .period = period}, static_cast<unsigned>(heads));
    }
  }
}

TEST_F(CudaScore, EqualsEmulatorForEveryHeadCount) {
  for (const int heads : {1, 7, 8, 9, 16, 24, 31, 32, 33, 48, 64, 65, 100, 128}) {
    const DeviceProblem plain = DeviceProblem::plain(heads, 9, 1333, static_cast<unsigned>(heads));
    expect_emulated(plain, {.rows = 9, .key_end = 1333}, "plain, heads " + std::to_string(heads));
    const DeviceProblem hostile = DeviceProblem::hostile(heads, 17, 517, static_cast<unsigned>(heads));
    expect_emulated(hostile, {.rows = 17, .key_end = 517}, "hostile, heads " + std::to_string(heads));
  }
}

TEST_F(CudaScore, EqualsEmulatorForEveryKeyCountAndSlice) {
  for (const int heads : {32, 64}) {
    for (const std::int64_t nk : {1, 15, 63, 64, 65, 255, 256, 257, 1000}) {
      const DeviceProblem p = DeviceProblem::hostile(heads, 5, nk, static_cast<unsigned>(nk));
      expect_emulated(p, {.rows = 5, .key_end = nk}, "keys " + std::to_string(nk));
    }
    const DeviceProblem p = DeviceProblem::plain(heads, 40, 3000, 5);
    expect_emulated(p, {.first_row = 3, .rows = 21, .key_begin = 64 * 7, .key_end = 2999}, "slice");
    expect_emulated(p, {.first_row = 39, .rows = 1, .key_begin = 2944, .key_end = 3000}, "last slice");
  }
}

TEST_F(CudaScore, NoRangesMeansAllKeys) {
  DeviceProblem p = DeviceProblem::plain(32, 6, 700, 1);
  for (std::int64_t i = 0; i < p.nq; ++i) p.ke[i] = 700;
  const DeviceInputs device(p);
  DeviceArray<float> scores(6 * 700);
  ScoreArgs args{.in = device.inputs,
                 .first_row = 0,
                 .rows = 6,
                 .keys = cuda::every_key(700),
                 .key_begin = 0,
                 .key_end = 700,
                 .scores = scores.get(),
                 .score_stride = 700};
  ASSERT_EQ(cuda::launch_score(args, multiprocessors(), nullptr), cudaSuccess);
  const std::vector<float> expected = scores.download();
  scores.fill(0xFF);
  args.in.ks = nullptr;
  args.in.ke = nullptr;
  ASSERT_EQ(cuda::launch_score(args, multiprocessors(), nullptr), cudaSuccess);
  EXPECT_EQ(scores.download(), expected);
}

TEST_F(CudaScore, TwentyLaunchesAndAnyNumberOfMultiprocessorsGiveTheSameBits) {
  for (const int heads : {32, 64, 20}) {
    const DeviceProblem p = DeviceProblem::plain(heads, 300, 20000, 9);
    const DeviceInputs device(p);
    const std::size_t size = 300 * 20000;
    DeviceArray<float> scores(size);
    std::vector<float> first;
    for (int launch = 0; launch < 20; ++launch) {
      scores.fill(0xFF);
      const ScoreArgs args{.in = device.inputs,
                           .first_row = 0,
                           .rows = 300,
                           .keys = cuda::every_key(20000),
                           .key_begin = 0,
                           .key_end = 20000,
                           .scores = scores.get(),
                           .score_stride = 20000};
      ASSERT_EQ(cuda::launch_score(args, launch < 15 ? multiprocessors() : launch * 3 - 44, nullptr), cudaSuccess);
      const std::vector<float> got = scores.download();
      if (launch == 0) {
        first = got;
        continue;
      }
      for (std::int64_t q = 0; q < p.nq; ++q) {
        ASSERT_EQ(std::memcmp(&got[q * 20000], &first[q * 20000], static_cast<std::size_t>(p.end(q)) * sizeof(float)),
                  0)
            << "launch " << launch;
      }
    }
    const QueryScorer scorer = p.scorer(299);
    for (std::int64_t key = 0; key < 20000; key += 7)
      ASSERT_TRUE(same_score(first[299 * 20000 + key], p.score(scorer, key))) << key;
  }
}

}  // namespace
}  // namespace dosa::test
