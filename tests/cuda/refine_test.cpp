// launch_refine against the emulator: exactly the records of listed keys that are not below tau.
#include <bit>

#include "cuda/problem.hpp"
#include "select/records.hpp"

namespace dosa::test {
namespace {

class CudaRefine : public CudaTest {};

// Some rows are not wanted, some cannot see all keys, and the records of some have too little room.
void expect_records(const DeviceProblem& problem, std::int64_t first_row, std::int64_t rows, int most, unsigned seed) {
  std::mt19937 random(seed);
  const std::int64_t group = cuda::group_rows(problem.heads), groups = (rows + group - 1) / group;
  std::vector<std::int32_t> ids;
  std::vector<std::int64_t> offset;
  std::vector<std::int32_t> count;
  std::vector<float> tau;
  std::vector<std::uint8_t> screened;
  std::vector<std::vector<Record>> expected;
  for (std::int64_t g = 0; g < groups; ++g) {
    ids.resize(ids.size() + random() % 5, -1);  // lists need not touch
    offset.push_back(static_cast<std::int64_t>(ids.size()));
    count.push_back(g % 6 == 5 ? 0 : static_cast<std::int32_t>(random() % static_cast<unsigned>(most)));
    for (std::int32_t i = 0; i < count.back(); ++i) {
      ids.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(problem.nk)));
    }
  }
  std::size_t longest = 1;
  for (std::int64_t r = 0; r < rows; ++r) {
    const QueryScorer scorer = problem.scorer(first_row + r);
    const auto g = static_cast<std::size_t>(r / group);
    const std::int64_t begin = std::max(problem.ks[first_row + r], 0), end = std::min<std::int64_t>(problem.ke[first_row + r], problem.nk);
    std::vector<std::pair<float, std::int32_t>> scores;
    for (std::int32_t i = 0; i < count[g]; ++i) {
      const std::int32_t id = ids[offset[g] + i];
      if (id >= begin && id < end) scores.emplace_back(problem.score(scorer, id), id);
    }
    // -inf, one of the scores, or above all of them.
    const unsigned kind = static_cast<unsigned>(random() % 4);
    float at = -std::numeric_limits<float>::infinity();
    if (kind > 0 && !scores.empty()) at = scores[random() % scores.size()].first;
    if (kind == 3) at = 3e38F;
    if (std::isnan(at)) at = 0;
    tau.push_back(at);
    screened.push_back(random() % 5 == 0 ? 0 : 8);
    std::vector<Record>& row = expected.emplace_back();
    for (const auto& [score, id] : scores) {
      if (screened.back() != 0 && !(score < at)) row.push_back(make_record(score, id));
    }
    std::sort(row.begin(), row.end());
    longest = std::max(longest, row.size());
  }

  const DeviceInputs inputs(problem);
  const DeviceArray<std::int32_t> device_ids(ids);
  const DeviceArray<std::int32_t> device_count(count);
  const DeviceArray<std::int64_t> device_offset(offset);
  const DeviceArray<float> device_tau(tau);
  const DeviceArray<std::uint8_t> device_screened(screened);
  DeviceArray<std::int32_t> record_count(rows);
  DeviceArray<std::uint8_t> lost(rows);
  for (const std::size_t stride : {longest + 3, longest, (longest + 1) / 2}) {
    DeviceArray<Record> records(stride * static_cast<std::size_t>(rows));
    records.fill(0xAB);
    record_count.fill(0);
    lost.fill(0);
    const cuda::RefineArgs args{.in = inputs.inputs,
                                .first_row = first_row,
                                .rows = rows,
                                .ids = device_ids.get(),
                                .offset = device_offset.get(),
                                .count = device_count.get(),
                                .screened = device_screened.get(),
                                .tau = device_tau.get(),
                                .found = {records.get(), static_cast<std::int64_t>(stride), record_count.get(), lost.get()}};
    ASSERT_EQ(cuda::launch_refine(args, multiprocessors(), nullptr), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<Record> got = records.download();
    const std::vector<std::int32_t> got_count = record_count.download();
    const std::vector<std::uint8_t> got_lost = lost.download();
    for (std::size_t r = 0; r < expected.size(); ++r) {
      const std::string what = "row " + std::to_string(r) + " heads " + std::to_string(problem.heads);
      ASSERT_EQ(got_count[r], static_cast<std::int32_t>(expected[r].size())) << what;
      const bool fits = expected[r].size() <= stride;
      ASSERT_EQ(got_lost[r], fits ? 0 : 1) << what;
      const auto begin = got.begin() + static_cast<std::ptrdiff_t>(r * stride), end = begin + static_cast<std::ptrdiff_t>(stride);
      const auto written = begin + static_cast<std::ptrdiff_t>(std::min(expected[r].size(), stride));
      std::sort(begin, written);
      if (fits) {
        ASSERT_TRUE(std::equal(expected[r].begin(), expected[r].end(), begin)) << what;
      } else {
        ASSERT_TRUE(std::includes(expected[r].begin(), expected[r].end(), begin, written)) << what;
      }
      for (auto it = written; it != end; ++it) ASSERT_EQ(*it, 0xABABABABABABABABU) << what;
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
