// launch_refine against the emulator: exactly the records of listed keys that are not below tau.
#include <bit>

#include "cuda/problem.hpp"
#include "select/records.hpp"

namespace dosa::test {
namespace {

class CudaRefine : public CudaTest {};

void expect_records(const DeviceProblem& problem, std::int64_t first_row, std::int64_t rows, int most, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> ids;
  std::vector<std::int64_t> offset;
  std::vector<std::int32_t> count;
  std::vector<float> tau;
  std::vector<std::vector<Record>> expected;
  for (std::int64_t r = 0; r < rows; ++r) {
    const QueryScorer scorer = problem.scorer(first_row + r);
    ids.resize(ids.size() + random() % 5, -1);  // lists need not touch
    offset.push_back(static_cast<std::int64_t>(ids.size()));
    count.push_back(r % 6 == 5 ? 0 : static_cast<std::int32_t>(random() % static_cast<unsigned>(most)));
    std::vector<float> scores;
    for (std::int32_t i = 0; i < count.back(); ++i) {
      ids.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(problem.nk)));
      scores.push_back(problem.score(scorer, ids.back()));
    }
    // -inf, one of the scores, or above all of them.
    const unsigned kind = static_cast<unsigned>(random() % 4);
    float at = -std::numeric_limits<float>::infinity();
    if (kind > 0 && !scores.empty()) at = scores[random() % scores.size()];
    if (kind == 3) at = 3e38F;
    if (std::isnan(at)) at = 0;
    tau.push_back(at);
    std::vector<Record>& row = expected.emplace_back();
    for (std::size_t i = 0; i < scores.size(); ++i) {
      if (!(scores[i] < at)) row.push_back(make_record(scores[i], ids[offset.back() + i]));
    }
    std::sort(row.begin(), row.end());
  }

  const DeviceInputs inputs(problem);
  const DeviceArray<std::int32_t> device_ids(ids);
  const DeviceArray<std::int32_t> device_count(count);
  const DeviceArray<std::int64_t> device_offset(offset);
  const DeviceArray<float> device_tau(tau);
  DeviceArray<Record> records(ids.size());
  DeviceArray<std::int32_t> record_count(rows);
  for (int launch = 0; launch < 5; ++launch) {
    records.fill(0xAB);
    record_count.fill(0xAB);
    const cuda::RefineArgs args{.in = inputs.inputs,
                                .first_row = first_row,
                                .rows = rows,
                                .ids = device_ids.get(),
                                .offset = device_offset.get(),
                                .count = device_count.get(),
                                .tau = device_tau.get(),
                                .records = records.get(),
                                .record_offset = device_offset.get(),
                                .record_count = record_count.get()};
    ASSERT_EQ(cuda::launch_refine(args, multiprocessors(), nullptr), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<Record> got = records.download();
    const std::vector<std::int32_t> got_count = record_count.download();
    for (std::int64_t r = 0; r < rows; ++r) {
      ASSERT_EQ(got_count[r], static_cast<std::int32_t>(expected[r].size()))
          << "row " << r << " heads " << problem.heads;
      const auto begin = got.begin() + offset[r];
      std::sort(begin, begin + got_count[r]);
      ASSERT_TRUE(std::equal(expected[r].begin(), expected[r].end(), begin))
          << "row " << r << " heads " << problem.heads;
      for (auto it = begin + got_count[r]; it != begin + count[r]; ++it) ASSERT_EQ(*it, 0xABABABABABABABABU);
    }
  }
}

TEST_F(CudaRefine, RecordsWhatTheEmulatorSays) {
  for (const int heads : {1, 8, 13, 16, 32, 40, 64, 128}) {
    const auto seed = static_cast<unsigned>(heads);
    expect_records(DeviceProblem::plain(heads, 12, 900, seed), 0, 12, 400, seed);
    expect_records(DeviceProblem::hostile(heads, 12, 333, seed), 2, 9, 300, seed);
  }
}

TEST_F(CudaRefine, LongListsAndManyRows) {
  expect_records(DeviceProblem::plain(32, 3, 5000, 3), 0, 3, 20000, 3);
  expect_records(DeviceProblem::plain(8, 3000, 100, 4), 0, 3000, 5, 4);
}

}  // namespace
}  // namespace dosa::test
