// The answers to parts of the shipped traces, checked in: they pin ids and score bits across versions, compilers and
// CPUs. DOSA_WRITE_GOLDEN=1 writes the files anew.
#include <bit>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include <fmt/format.h>

#include "io/trace.hpp"
#include "support/check.hpp"

namespace dosa::test {
namespace {

struct Part {
  std::int64_t row;
  std::int32_t ks, ke, topk;
};

constexpr Part kParts[] = {{0, 0, 4096, 64}, {1, 1000, 5096, 64}, {5, 3000, 12000, 256}, {7, 4000, 4100, 128}};

/// One line: row, range, K, then id and score bits of every slot.
std::string line_of(const Part& part, const OracleRow& row) {
  std::string line = fmt::format("{} {} {} {}", part.row, part.ks, part.ke, part.topk);
  for (std::size_t slot = 0; slot < row.ids.size(); ++slot) {
    line += fmt::format(" {}:{:08x}", row.ids[slot], std::bit_cast<std::uint32_t>(row.scores[slot]));
  }
  return line;
}

class Golden : public ::testing::TestWithParam<std::tuple<std::string, ReferenceScorer>> {};

TEST_P(Golden, PartsOfTraces) {
  const auto& [name, scorer] = GetParam();
  const auto trace = Trace::open(std::string(DOSA_TRACES) + "/" + name + ".safetensors");
  ASSERT_TRUE(trace) << trace.error().message;
  const bool cpu = scorer == ReferenceScorer::cpu;
  const std::string path = fmt::format("{}/{}.{}.txt", DOSA_GOLDEN, name, cpu ? "cpu" : "sm90");

  std::vector<Problem> problems;
  std::vector<std::vector<OracleRow>> answers;
  std::vector<std::string> lines;
  for (const Part& part : kParts) {
    Problem problem = trace->problem();
    problem.topk = part.topk;
    const std::int64_t one[] = {1};
    problem.ks = dense_view<const void>(&part.ks, DType::i32, one);
    problem.ke = dense_view<const void>(&part.ke, DType::i32, one);
    problem.q.data = problem.q.at<std::uint8_t>(part.row);
    problem.w.data = problem.w.at<float>(part.row);
    problem.q.shape[0] = problem.w.shape[0] = 1;
    problems.push_back(problem);
    answers.push_back({oracle_row(problem, 0, scorer, Order::score, IndexSpace::absolute)});
    lines.push_back(line_of(part, answers.back()[0]));
  }
  if (std::getenv("DOSA_WRITE_GOLDEN") != nullptr) {
    std::ofstream file(path);
    for (const std::string& line : lines) file << line << '\n';
  }
  std::ifstream file(path);
  ASSERT_TRUE(file) << path;
  for (std::size_t n = 0; n < lines.size(); ++n) {
    std::string golden;
    std::getline(file, golden);
    EXPECT_EQ(lines[n], golden) << "the oracle's answer changed";
    if (!cpu) continue;
    for (const Options& options : every_method()) EXPECT_TRUE(exact(problems[n], answers[n], options));
  }
}

std::string name_of(const ::testing::TestParamInfo<Golden::ParamType>& golden) {
  const auto& [trace, scorer] = golden.param;
  return std::string(trace == "demo-h32" ? "h32" : "h64") + (scorer == ReferenceScorer::cpu ? "_cpu" : "_sm90");
}

INSTANTIATE_TEST_SUITE_P(Traces, Golden,
                         ::testing::Combine(::testing::Values("demo-h32", "demo-h64"),
                                            ::testing::Values(ReferenceScorer::cpu, ReferenceScorer::sm90)),
                         name_of);

}  // namespace
}  // namespace dosa::test
