// select and write on the device against the host's order: every score vector of the known failures of kinds A, B, C
// and F, random ones, whole and in slices, one row and many, as scores and as records.
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "backend/cuda/stages.hpp"
#include "cuda/guarded.hpp"
#include "select/records.hpp"

namespace dosa::test {
namespace {

using Random = std::mt19937_64;
using Scores = std::vector<float>;
using Rows = std::vector<Scores>;
using Records = std::vector<Record>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Rows of one width with their visible ranges.
struct Problem {
  Rows rows;
  std::vector<std::int32_t> ks, ke;  // empty: everything
  int topk = 1;

  [[nodiscard]] std::int64_t nq() const { return static_cast<std::int64_t>(rows.size()); }
  [[nodiscard]] std::int64_t nk() const { return rows.empty() ? 0 : static_cast<std::int64_t>(rows[0].size()); }
  [[nodiscard]] std::int64_t begin(std::size_t r) const { return ks.empty() ? 0 : std::max(ks[r], 0); }
  [[nodiscard]] std::int64_t end(std::size_t r) const {
    return std::max(begin(r), ke.empty() ? nk() : std::min<std::int64_t>(ke[r], nk()));
  }
};

// How a problem is handed to the launchers.
struct Way {
  int multiprocessors = 132;
  std::int64_t slice = 0;       // keys a slice, a multiple of 64; 0: one slice
  std::int64_t slice_rows = 0;  // rows a launch; 0: all
  std::size_t offset = 0;       // floats from a 16-byte boundary
  std::int64_t padding = 0;     // floats between rows
};

Records expected_row(const Problem& p, std::size_t r) {
  Records all;
  for (std::int64_t i = p.begin(r); i < p.end(r); ++i) {
    all.push_back(make_record(p.rows[r][static_cast<std::size_t>(i)], static_cast<std::int32_t>(i)));
  }
  const auto k = static_cast<std::ptrdiff_t>(std::min<std::size_t>(all.size(), static_cast<std::size_t>(p.topk)));
  std::partial_sort(all.begin(), all.begin() + k, all.end());
  all.resize(static_cast<std::size_t>(k));
  return all;
}

std::vector<Records> expected(const Problem& p) {
  std::vector<Records> out;
  for (std::size_t r = 0; r < p.rows.size(); ++r) out.push_back(expected_row(p, r));
  return out;
}

// What is kept of every row, on the device.
struct Kept {
  Kept(std::int64_t rows, int topk)
      : records(static_cast<std::size_t>(rows * topk)), count(static_cast<std::size_t>(rows)) {}
  GuardedArray<Record> records;
  GuardedArray<std::int32_t> count;
};

void expect_kept(const Kept& kept, int topk, const std::vector<Records>& want, const std::string& what) {
  EXPECT_TRUE(kept.records.guards_intact() && kept.count.guards_intact()) << what;
  const Records records = kept.records.download();
  const std::vector<std::int32_t> count = kept.count.download();
  for (std::size_t r = 0; r < want.size(); ++r) {
    ASSERT_EQ(count[r], static_cast<std::int32_t>(want[r].size())) << what << ", row " << r;
    const auto first = records.begin() + static_cast<std::ptrdiff_t>(r) * topk;
    Records got(first, first + count[r]);
    std::sort(got.begin(), got.end());
    ASSERT_EQ(got, want[r]) << what << ", row " << r;
  }
}

// The device's view of the ranges of a problem.
struct Ranges {
  explicit Ranges(const Problem& p) : ks(p.ks), ke(p.ke) {
    in.ks = p.ks.empty() ? nullptr : ks.data();
    in.ke = p.ke.empty() ? nullptr : ke.data();
    in.nq = p.nq();
    in.nk = p.nk();
  }
  GuardedArray<std::int32_t> ks, ke;
  cuda::Inputs in{};
};

// All rows in one launch, from scores to ids.
cuda::SelectScoresArgs written(const Problem& p, const Ranges& ranges, const GuardedArray<float>& scores, const GuardedArray<std::int32_t>& ids) {
  return {.in = ranges.in,
          .first_row = 0,
          .rows = p.nq(),
          .keys = cuda::every_key(p.nk()),
          .key_begin = 0,
          .key_end = p.nk(),
          .scores = scores.data(),
          .score_stride = p.nk(),
          .topk = p.topk,
          .first_slice = true,
          .kept = nullptr,
          .kept_count = nullptr,
          .output = {.in = ranges.in, .topk = p.topk, .ids = ids.data(), .ids_stride = p.topk}};
}

// Ids and scores of every row, in all four arrangements, from kept records.
void expect_written(const Problem& p, const Ranges& ranges, const Kept& kept, const std::vector<Records>& want) {
  const std::int64_t stride = p.topk + 3;
  for (const bool ascending : {false, true}) {
    for (const bool relative : {false, true}) {
      const std::size_t cells = static_cast<std::size_t>(p.nq() * stride);
      GuardedArray<std::int32_t> ids(cells, 0x7F);
      GuardedArray<float> scores(cells, 0x7F);
      const bool with_scores = !relative || ascending;
      const cuda::SelectRecordsArgs args{.rows = p.nq(),
                                         .records = kept.records.data(),
                                         .record_stride = p.topk,
                                         .record_count = kept.count.data(),
                                         .topk = p.topk,
                                         .kept = nullptr,
                                         .kept_count = nullptr,
                                         .output = {.in = ranges.in,
                                                    .topk = p.topk,
                                                    .ascending = ascending,
                                                    .space = relative ? IndexSpace::relative : IndexSpace::absolute,
                                                    .ids = ids.data(),
                                                    .ids_stride = stride,
                                                    .scores = with_scores ? scores.data() : nullptr,
                                                    .scores_stride = stride}};
      ASSERT_CUDA(cuda::launch_select_records(args, relative ? 132 : 0, nullptr));
      const std::vector<std::int32_t> got_ids = ids.download();
      const std::vector<float> got_scores = scores.download();
      EXPECT_TRUE(ids.guards_intact() && scores.guards_intact());
      for (std::size_t r = 0; r < want.size(); ++r) {
        Records row = want[r];
        if (ascending) std::sort(row.begin(), row.end(), [](Record a, Record b) { return id_of(a) < id_of(b); });
        const auto offset = relative ? static_cast<std::int32_t>(p.begin(r)) : 0;
        for (std::int64_t i = 0; i < stride; ++i) {
          const auto cell = static_cast<std::size_t>(static_cast<std::int64_t>(r) * stride + i);
          const bool gap = i >= p.topk;
          const bool valid = i < static_cast<std::int64_t>(row.size());
          const auto at = static_cast<std::size_t>(i);
          ASSERT_EQ(got_ids[cell], gap     ? 0x7F7F7F7F
                                   : valid ? id_of(row[at]) - offset
                                           : -1)
              << "row " << r << " rank " << i;
          const float score = gap || !with_scores ? std::bit_cast<float>(0x7F7F7F7F)
                              : valid             ? score_of(row[at])
                                                  : -kInf;
          ASSERT_EQ(std::bit_cast<std::uint32_t>(got_scores[cell]), std::bit_cast<std::uint32_t>(score))
              << "row " << r << " rank " << i;
        }
      }
    }
  }
}

void expect_scores_selected(const Problem& p, const std::vector<Records>& want, const Way& way, bool write = false) {
  const std::string what = "K=" + std::to_string(p.topk) + " nq=" + std::to_string(p.nq()) +
                           " nk=" + std::to_string(p.nk()) + " multiprocessors=" + std::to_string(way.multiprocessors) +
                           " slice=" + std::to_string(way.slice) + " offset=" + std::to_string(way.offset);
  const Ranges ranges(p);
  Kept kept(p.nq(), p.topk);
  const std::int64_t slice = way.slice > 0 ? way.slice : std::max<std::int64_t>(p.nk(), 1);
  const std::int64_t stride = std::min(slice, p.nk()) + way.padding;
  const std::int64_t rows_a_launch = way.slice_rows > 0 ? way.slice_rows : p.nq();
  for (std::int64_t first_row = 0; first_row < p.nq(); first_row += rows_a_launch) {
    const std::int64_t rows = std::min(rows_a_launch, p.nq() - first_row);
    for (std::int64_t key = 0; key == 0 || key < p.nk(); key += slice) {
      const std::int64_t key_end = std::min(key + slice, p.nk());
      // What no row may look at would win if it did.
      Scores cells(static_cast<std::size_t>(rows * stride), kInf);
      for (std::int64_t r = 0; r < rows; ++r) {
        const auto row = static_cast<std::size_t>(first_row + r);
        for (std::int64_t i = std::max(key, p.begin(row)); i < std::min(key_end, p.end(row)); ++i) {
          cells[static_cast<std::size_t>(r * stride + i - key)] = p.rows[row][static_cast<std::size_t>(i)];
        }
      }
      const GuardedArray<float> scores(cells, way.offset);
      const cuda::SelectScoresArgs args{ranges.in,
                                        first_row,
                                        rows,
                                        cuda::every_key(p.nk()),
                                        key,
                                        key_end,
                                        scores.data(),
                                        stride,
                                        p.topk,
                                        key == 0,
                                        kept.records.data() + first_row * p.topk,
                                        kept.count.data() + first_row};
      ASSERT_CUDA(cuda::launch_select_scores(args, way.multiprocessors, nullptr)) << what;
      ASSERT_CUDA(cudaDeviceSynchronize()) << what;
    }
  }
  expect_kept(kept, p.topk, want, what);
  if (write) expect_written(p, ranges, kept, want);
}

// The rows as records, in random order, with gaps between rows.
void expect_records_selected(const Problem& p, const std::vector<Records>& want, int multiprocessors) {
  std::size_t stride = 1;
  for (std::size_t r = 0; r < p.rows.size(); ++r) stride = std::max(stride, static_cast<std::size_t>(p.end(r) - p.begin(r)) + 2);
  Records all(p.rows.size() * stride, 0);  // a record of zeros would win
  std::vector<std::int32_t> count;
  Random random(17);
  for (std::size_t r = 0; r < p.rows.size(); ++r) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(r * stride);
    auto to = begin;
    for (std::int64_t i = p.begin(r); i < p.end(r); ++i) {
      *to++ = make_record(p.rows[r][static_cast<std::size_t>(i)], static_cast<std::int32_t>(i));
    }
    count.push_back(static_cast<std::int32_t>(to - begin));
    if (r % 2 == 0) std::shuffle(begin, to, random);
  }
  const GuardedArray<Record> records(all);
  const GuardedArray<std::int32_t> counts(count);
  const Kept kept(p.nq(), p.topk);
  const auto width = static_cast<std::int64_t>(stride);
  const cuda::SelectRecordsArgs args{p.nq(), records.data(),      width,            counts.data(),
                                     p.topk, kept.records.data(), kept.count.data()};
  ASSERT_CUDA(cuda::launch_select_records(args, multiprocessors, nullptr));
  const std::string what =
      "records, K=" + std::to_string(p.topk) + " multiprocessors=" + std::to_string(multiprocessors);
  expect_kept(kept, p.topk, want, what);

  // The same in two slices.
  Records slice[2] = {Records(all.size(), 0), Records(all.size(), 0)};
  std::vector<std::int32_t> slice_count[2] = {std::vector<std::int32_t>(count.size()), std::vector<std::int32_t>(count.size())};
  for (std::size_t r = 0; r < count.size(); ++r) {
    for (std::int32_t i = 0; i < count[r]; ++i) {
      const int which = 3 * i < count[r] ? 0 : 1;
      slice[which][r * stride + static_cast<std::size_t>(slice_count[which][r]++)] = all[r * stride + static_cast<std::size_t>(i)];
    }
  }
  const Kept twice(p.nq(), p.topk);
  for (const int which : {0, 1}) {
    const GuardedArray<Record> part(slice[which]);
    const GuardedArray<std::int32_t> part_counts(slice_count[which]);
    ASSERT_CUDA(cuda::launch_select_records({p.nq(), part.data(), width, part_counts.data(), p.topk, twice.records.data(),
                                             twice.count.data(), which == 0},
                                            multiprocessors, nullptr));
  }
  expect_kept(twice, p.topk, want, what + " in two slices");
}

// All paths: one CTA of 512 threads a row, clusters, slices, unaligned rows, records.
void expect_selected(const Problem& p) {
  const std::vector<Records> want = expected(p);
  expect_scores_selected(p, want, {.multiprocessors = 132}, true);
  expect_scores_selected(p, want, {.multiprocessors = 0, .offset = 3, .padding = 1});
  const std::int64_t third = p.nk() / 3 / 64 * 64 + 64;
  expect_scores_selected(p, want,
                         {.multiprocessors = 132, .slice = third, .slice_rows = (p.nq() + 1) / 2, .padding = 5});
  expect_scores_selected(p, want, {.multiprocessors = 0, .slice = 4096, .offset = 1});
  expect_records_selected(p, want, 132);
  expect_records_selected(p, want, 0);
}

Scores scores_of(int count, const std::function<float(int)>& score) {
  Scores out;
  for (int i = 0; i < count; ++i) out.push_back(score(i));
  return out;
}

void expect_selected(const Scores& scores, int topk, std::size_t rows = 1) {
  expect_selected(Problem{Rows(rows, scores), {}, {}, topk});
}

float uniform(Random& random, float low, float high) {
  return std::uniform_real_distribution<float>(low, high)(random);
}

float ulps_above(float x, int n) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) + static_cast<std::uint32_t>(n));
}

class CudaSelect : public CudaTest {};

// ------------------------------------------------------------------------------- A: crowded buckets, ties, bad
// thresholds

TEST_F(CudaSelect, A1_MoreScoresNearTheBoundaryThanAnyBufferHolds) {
  Random random(1);
  const auto narrow = [&](int) { return uniform(random, 1.0F, 1.001F); };
  expect_selected(scores_of(8192, [&](int i) { return i % 16 == 3 ? 2.0F : i < 5500 ? narrow(i) : -1.0F; }), 2048, 2);
  expect_selected(scores_of(256 * 1024, narrow), 2048, 2);
}

TEST_F(CudaSelect, A2_BestScoresArriveLastInsideOneHalfPrecisionUlp) {
  expect_selected(scores_of(6000, [](int i) { return i < 1000 ? 2.0F : i < 5139 ? ulps_above(1.0F, i) : 0.0F; }), 2048);
}

TEST_F(CudaSelect, A3_A4_A5_Ties) {
  for (const float tie : {1.0F, 0.0F, -3.0F}) {
    expect_selected(scores_of(4096, [&](int i) { return i % 8 == 5 && i < 4000 ? 9.0F : tie; }), 2048);
  }
  expect_selected(scores_of(8320, [](int i) { return i % 83 == 0 && i < 8300 ? 1.0F + static_cast<float>(i) : 0.0F; }),
                  2048);
  for (const float boundary : {kInf, -kInf}) {
    expect_selected(scores_of(8320, [&](int i) { return i % 83 == 0 ? (boundary > 0 ? kInf : 1.0F) : boundary; }),
                    2048);
    expect_selected(scores_of(8320, [&](int i) { return i % 3 == 0 ? boundary : 1.0F; }), 2048);
  }
  Random random(5);
  for (const int nk : {16384, 16385}) {
    const Scores scores = scores_of(nk, [&](int) { return uniform(random, 1.0F, 1.245F); });
    for (const int topk : {512, 1024, 2048}) expect_selected(scores, topk, nk % 2 == 0 ? 2 : 33);
  }
}

TEST_F(CudaSelect, A6_HeavyTails) {
  Random random(6);
  const Scores scores = scores_of(128 * 1024, [&](int) {
    const float small = uniform(random, -1e-3F, 1e-3F);
    return random() % 10 == 0 ? std::exp(uniform(random, -6.0F, 6.0F)) * (random() % 2 == 0 ? 1.0F : -1.0F) : small;
  });
  for (const int topk : {1, 17, 512, 2028, 2048, 4096}) expect_selected(scores, topk);
}

TEST_F(CudaSelect, A7_A8_A11_NearlyEqual) {
  Random random(7);
  for (const float sign : {1.0F, -1.0F}) {
    expect_selected(scores_of(32768, [&](int) { return sign * ulps_above(1.0F, static_cast<int>(random() % 2)); }),
                    2048);
  }
  std::vector<int> rank(4096);
  std::iota(rank.begin(), rank.end(), 1);
  std::shuffle(rank.begin(), rank.end(), random);
  expect_selected(scores_of(4096,
                            [&](int i) {
                              const int r = rank[static_cast<std::size_t>(i)];
                              return r < 2047 ? 2.0F : r > 2050 ? 0.5F : ulps_above(1.0F, 2050 - r);
                            }),
                  2048);
  for (const int nk : {4096, 2049, 300000}) {
    for (const float value : {0.0F, -0.0F, 3.5F, -2.0F, kInf, -kInf, kNaN, 1e-45F}) {
      expect_selected(Scores(static_cast<std::size_t>(nk), value), 2048);
    }
  }
}

TEST_F(CudaSelect, A10_LongAndShortRowsMixed) {
  constexpr int k = 300;
  Random random(10);
  Problem p{{}, {}, {k - 1, 4 * k, 1, k, 4 * k + 1, 0, 4 * k}, k};
  for (int r = 0; r < 7; ++r)
    p.rows.push_back(scores_of(4 * k + 1, [&](int) { return std::floor(uniform(random, 0.0F, 50.0F)); }));
  expect_selected(p);
}

TEST_F(CudaSelect, A12_ThresholdOfKeysThatSomeRowsCannotSee) {
  const Scores scores = scores_of(8192, [](int i) { return i < 4096 ? 10.0F : 1.0F; });
  for (const int topk : {2048, 4096}) {
    expect_selected({Rows(6, scores), {0, 0, 4096, 4096, 0, 4096}, {4096, 8192, 8192, 7000, 4096, 8192}, topk});
  }
}

// Guesses that mislead: winners in one block, at one period, only at the ends, in falling and rising order.
TEST_F(CudaSelect, A14_WinnersWhereNoSampleLooks) {
  constexpr int nk = 300000;
  Random random(14);
  for (const int topk : {5, 2048}) {
    expect_selected(scores_of(nk, [](int i) { return ulps_above(1.0F, i); }), topk);
    expect_selected(scores_of(nk, [](int i) { return -ulps_above(1.0F, i); }), topk);
    expect_selected(
        scores_of(nk, [&](int i) { return (i > 100000 && i < 103000 ? 5.0F : 0.0F) + uniform(random, 0, 1); }), topk);
    expect_selected(scores_of(nk, [&](int i) { return i < 1500 || i >= nk - 1500 ? 2.0F : uniform(random, -1, 1); }),
                    topk);
    for (const int period : {64, 128, 256, 512, 36, 73}) {
      expect_selected(
          scores_of(nk, [&](int i) { return i % period == 5 ? uniform(random, 2, 3) : uniform(random, 0, 1); }), topk);
    }
    // The sample sees nothing but what is good, and the rest holds nothing.
    expect_selected(scores_of(nk, [&](int i) { return i % 16 < 4 ? -kInf : i % 97 == 0 ? 1.0F : kNaN; }), topk);
  }
}

// ------------------------------------------------------------------------------------------- B: NaN, inf, zeros,
// extremes

TEST_F(CudaSelect, B_NaNInfinityZeroAndExtremes) {
  Random random(20);
  for (const int percent : {50, 83, 100}) {
    Problem p{{}, {}, {}, 512};
    for (int r = 0; r < 40; ++r) {
      p.rows.push_back(scores_of(
          1243, [&](int) { return static_cast<int>(random() % 100) < percent ? kNaN : uniform(random, -1, 1); }));
    }
    expect_selected(p);
  }
  expect_selected(scores_of(1300, [](int i) { return i < 1000 ? kNaN : static_cast<float>(i); }), 512);
  expect_selected(scores_of(200000, [](int i) { return i % 150 != 0 ? kNaN : static_cast<float>(i % 7); }), 2048);
  expect_selected(
      scores_of(32768, [&](int i) { return i == 5 || i == 20000 || i == 32767 ? kInf : uniform(random, -9, 9); }), 1024,
      4);
  expect_selected(scores_of(3000, [](int i) { return i % 30 == 0 ? 1.0F : i % 2 == 0 ? -0.0F : 0.0F; }), 2048);
  expect_selected(scores_of(100000, [](int i) { return i % 3000 == 0 ? 1.0F : i % 2 == 0 ? -0.0F : 0.0F; }), 2048);
  expect_selected(scores_of(5128, [&](int i) { return i % 40 == 0 ? kInf : uniform(random, -1, 1); }), 2048);
  const float corner[] = {kNaN,
                          kInf,
                          -kInf,
                          0.0F,
                          -0.0F,
                          1e-45F,
                          -1e-45F,
                          3.4e38F,
                          -3.4e38F,
                          1.2e-38F,
                          -1.2e-38F,
                          -kNaN,
                          std::bit_cast<float>(0x7F800001U),
                          1.0F};
  for (const int topk : {1, 100, 2048, 4096}) {
    expect_selected(scores_of(30000, [&](int) { return corner[random() % std::size(corner)]; }), topk, 2);
    expect_selected(scores_of(30000, [&](int) { return std::bit_cast<float>(static_cast<std::uint32_t>(random())); }),
                    topk, 2);
  }
}

// ----------------------------------------------------------------------------------------------- C: short and odd
// ranges

TEST_F(CudaSelect, C_ShortEmptyAndNegativeRanges) {
  constexpr std::int32_t least = std::numeric_limits<std::int32_t>::min(),
                         most = std::numeric_limits<std::int32_t>::max();
  Random random(30);
  const Scores scores = scores_of(5000, [&](int) { return uniform(random, -1, 1); });
  for (const int topk : {1, 8, 705, 2048}) {
    expect_selected({Rows(12, scores),
                     {0, 0, -5, least, 10, 4999, 5000, most, 100, 7, 3, 1},
                     {0, -1, 5, most, 5, 5000, 5000, most, 105, 4997, 4, least},
                     topk});
  }
  expect_selected({Rows(3, Scores(100, 1.0F)), {}, {}, 2048});
  expect_selected({Rows(3, Scores{}), {}, {}, 2048});
  for (const int nk : {704, 705, 706, 2047, 2048, 2049, 2051, 2052})
    expect_selected(Scores(scores.begin(), scores.begin() + nk), nk < 1000 ? 705 : 2051);
  // Every alignment of both ends.
  Problem p{{}, {}, {}, 3};
  for (int i = 0; i < 64; ++i) {
    p.rows.push_back(scores);
    p.ks.push_back(i % 8);
    p.ke.push_back(i % 8 + i / 8 + (i % 3) * 1000);
  }
  expect_selected(p);
}

// ------------------------------------------------------------------------------------------------- F: the same every
// time

TEST_F(CudaSelect, F_TwentyLaunchesAreIdentical) {
  Random random(40);
  for (const int multiprocessors : {132, 0}) {
    Problem p{{}, {}, {}, 2048};
    p.rows.push_back(scores_of(100000, [&](int) { return std::floor(uniform(random, 0, 40)); }));
    p.rows.push_back(scores_of(100000, [&](int i) { return i % 66 == 0 ? 1.0F + static_cast<float>(i) : 0.0F; }));
    const std::vector<Records> want = expected(p);
    Scores cells = p.rows[0];
    cells.insert(cells.end(), p.rows[1].begin(), p.rows[1].end());
    const Ranges ranges(p);
    const GuardedArray<float> scores(cells);
    std::vector<std::int32_t> first;
    for (int launch = 0; launch < 20; ++launch) {
      GuardedArray<std::int32_t> ids(2 * 2048, static_cast<std::uint8_t>(launch));
      ASSERT_CUDA(cuda::launch_select_scores(written(p, ranges, scores, ids), multiprocessors, nullptr));
      if (launch == 0) first = ids.download();
      ASSERT_EQ(ids.download(), first);
    }
    for (std::size_t i = 0; i < 2048; ++i) ASSERT_EQ(first[i], id_of(want[0][i]));
  }
}

// ------------------------------------------------------------------------------------------------------------ random
// ones

TEST_F(CudaSelect, RandomProblems) {
  Random random(50);
  for (int trial = 0; trial < 60; ++trial) {
    const int topks[] = {1, 3, 64, 512, 705, 2047, 2048, 2051, 4096};
    Problem p{{}, {}, {}, topks[random() % std::size(topks)]};
    const int nk = 1 + static_cast<int>(random() % (trial % 3 == 0 ? 90000 : 20000));
    const int nq = 1 + static_cast<int>(random() % 5);
    const int levels = random() % 2 == 0 ? 0 : 1 << random() % 16;
    for (int r = 0; r < nq; ++r) {
      std::normal_distribution<float> normal(uniform(random, -2, 2), std::exp(uniform(random, -5, 5)));
      p.rows.push_back(scores_of(nk, [&](int) {
        const float x = normal(random);
        return levels == 0           ? x
               : random() % 500 == 0 ? kNaN
                                     : std::round(x * static_cast<float>(levels)) / static_cast<float>(levels);
      }));
      p.ks.push_back(static_cast<std::int32_t>(random() % 3 == 0 ? random() % nk : 0));
      p.ke.push_back(static_cast<std::int32_t>(random() % 3 == 0 ? random() % nk : nk));
    }
    const std::vector<Records> want = expected(p);
    const int counts[] = {0, 1, 48, 78, 132, 148};
    Way way{.multiprocessors = counts[random() % 6],
            .offset = random() % 4,
            .padding = static_cast<std::int64_t>(random() % 9)};
    if (random() % 2 == 0) way.slice = 64 * (1 + static_cast<std::int64_t>(random() % (nk / 64 + 1)));
    if (way.slice > 0 && nk / way.slice > 40) way.slice = nk / 40 / 64 * 64 + 64;
    expect_scores_selected(p, want, way, trial % 4 == 0);
    expect_records_selected(p, want, way.multiprocessors);
  }
}

TEST_F(CudaSelect, AMillionKeys) {
  Random random(60);
  std::normal_distribution<float> normal;
  constexpr int nk = (1 << 20) + 1;
  const Scores bell = scores_of(nk, [&](int) { return normal(random); });
  Problem p{{bell, bell, bell, bell}, {}, {}, 2048};
  for (float& x : p.rows[1]) x = std::max(x - 2.6F, 0.0F);  // 0.5 % positive, then zeros
  for (float& x : p.rows[2]) x += 1000.0F;                  // few distinct values
  std::partial_sort(p.rows[3].begin(), p.rows[3].begin() + 9000, p.rows[3].end(), std::greater<>());
  const std::vector<Records> want = expected(p);
  for (const int multiprocessors : {0, 4, 8, 132}) {
    expect_scores_selected(p, want, {.multiprocessors = multiprocessors});
    expect_records_selected(p, want, multiprocessors);
  }
  expect_scores_selected(p, want, {.multiprocessors = 132, .slice = 1 << 17});
  p.topk = 4096;
  expect_scores_selected(p, expected(p), {.multiprocessors = 0});
  expect_scores_selected(p, expected(p), {.multiprocessors = 132}, true);
}

// -------------------------------------------------------------------------------------------------- graphs, large
// offsets

TEST_F(CudaSelect, GraphReplayReadsTheLengthsOfTheDay) {
  Random random(70);
  Problem p{{}, {}, {40000, 3}, 512};
  for (int r = 0; r < 2; ++r) p.rows.push_back(scores_of(40000, [&](int) { return uniform(random, -1, 1); }));
  Scores cells = p.rows[0];
  cells.insert(cells.end(), p.rows[1].begin(), p.rows[1].end());
  Ranges ranges(p);
  const GuardedArray<float> scores(cells);
  GuardedArray<std::int32_t> ids(2 * 512);
  cudaStream_t stream;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  ASSERT_CUDA(cuda::launch_select_scores(written(p, ranges, scores, ids), 132, stream));
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  const std::vector<std::vector<std::int32_t>> lengths = {{40000, 3}, {0, 0}, {-1, 40000}, {513, 39999}};
  for (const std::vector<std::int32_t>& ke : lengths) {
    p.ke = ke;
    ranges.ke.upload(ke);
    ASSERT_CUDA(cudaGraphLaunch(exec, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    const std::vector<Records> want = expected(p);
    const std::vector<std::int32_t> got = ids.download();
    for (std::size_t i = 0; i < got.size(); ++i) {
      const Records& row = want[i / 512];
      ASSERT_EQ(got[i], i % 512 < row.size() ? id_of(row[i % 512]) : -1);
    }
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(CudaSelect, RowsBeyondFourGigabytes) {
  constexpr std::int64_t nk = (std::int64_t{1} << 31) - 64;
  constexpr int topk = 1000;
  std::size_t free = 0, total = 0;
  ASSERT_CUDA(cudaMemGetInfo(&free, &total));
  if (free < std::size_t{18} << 30) GTEST_SKIP() << "needs 17 GiB of device memory";
  void* memory = nullptr;
  ASSERT_CUDA(cudaMalloc(&memory, 2 * nk * sizeof(float)));
  auto* scores = static_cast<float*>(memory);
  ASSERT_CUDA(cudaMemset(scores, 0, 2 * nk * sizeof(float)));
  const std::int64_t winners[] = {5, nk / 2 + 1, nk - 1};
  for (int r = 0; r < 2; ++r) {
    for (std::size_t i = 0; i < 3; ++i) {
      const float score = 1.0F + static_cast<float>(i);
      ASSERT_CUDA(cudaMemcpy(scores + r * nk + winners[i], &score, sizeof score, cudaMemcpyHostToDevice));
    }
  }
  cuda::Inputs in{};
  in.nq = 2;
  in.nk = nk;
  for (const int multiprocessors : {0, 132}) {
    const Kept kept(2, topk);
    ASSERT_CUDA(cuda::launch_select_scores(
        {in, 0, 2, cuda::every_key(nk), 0, nk, scores, nk, topk, true, kept.records.data(), kept.count.data()}, multiprocessors, nullptr));
    Records want;
    for (std::size_t i = 3; i-- > 0;)
      want.push_back(make_record(1.0F + static_cast<float>(i), static_cast<std::int32_t>(winners[i])));
    for (std::int32_t id = 0; want.size() < topk; ++id) {
      if (id != 5) want.push_back(make_record(0.0F, id));
    }
    expect_kept(kept, topk, {want, want}, "2^31 keys");
  }
  cudaFree(scores);
}

}  // namespace
}  // namespace dosa::test
