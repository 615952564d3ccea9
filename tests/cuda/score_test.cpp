// launch_score against the emulator, bit for bit.
#include <bit>

#include "cuda/problem.hpp"

namespace dosa::test {
namespace {

using cuda::ScoreArgs;

constexpr float kUntouched = -12345.0F;

struct Slice {
  std::int64_t first_row = 0;
  std::int64_t rows;
  std::int64_t key_begin = 0;
  std::int64_t key_end;
};

void expect_emulated(const DeviceProblem& problem, const Slice& slice, const std::string& what) {
  const DeviceInputs device(problem);
  const std::int64_t keys = slice.key_end - slice.key_begin;
  const std::int64_t stride = keys + 5;
  const std::vector<float> untouched(static_cast<std::size_t>(slice.rows * stride + 7), kUntouched);
  DeviceArray<float> scores(untouched);
  const ScoreArgs args{.in = device.inputs,
                       .first_row = slice.first_row,
                       .rows = slice.rows,
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
    for (std::int64_t key = std::max(slice.key_begin, problem.begin(query));
         key < std::min(slice.key_end, problem.end(query)); ++key) {
      const float expected = problem.score(scorer, key);
      const float actual = got[r * stride + key - slice.key_begin];
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

class CudaScore : public CudaTest {};

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
