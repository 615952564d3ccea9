#include "known_failures/support.hpp"

namespace dosa::test {

std::vector<Options> many_ways() {
  std::vector<Options> ways = every_method();
  const auto add = [&](SeedPolicy seeds, Form form, std::int32_t row_budget, ScreenPrecision precision) {
    Options options;
    options.method = Method::dosa;
    options.threads = 3;
    options.seeds = seeds;
    options.certificate = {form, row_budget, 0, precision};
    ways.push_back(options);
  };
  add(SeedPolicy::nearest_spread, Form::base, 1, ScreenPrecision::f32);
  add(SeedPolicy::chain, Form::extended, 1, ScreenPrecision::i8);
  add(SeedPolicy::largest_bounds, Form::extended, 1, ScreenPrecision::f32);
  add(SeedPolicy::largest_bounds, Form::base, 2, ScreenPrecision::i8);
  return ways;
}

std::vector<Options> fast_ways() {
  std::vector<Options> ways;
  for (const Options& options : every_method()) {
    if (options.implementation.empty()) ways.push_back(options);
  }
  return ways;
}

void expect_repeatable(const Problem& problem, const Options& options, int times) {
  const std::vector<OracleRow> first = select(problem, options);
  for (int n = 1; n < times; ++n) {
    const std::vector<OracleRow> again = select(problem, options);
    ASSERT_EQ(again.size(), first.size());
    for (std::size_t row = 0; row < first.size(); ++row) {
      ASSERT_EQ(again[row].ids, first[row].ids) << "run " << n << " row " << row;
      for (std::size_t slot = 0; slot < first[row].scores.size(); ++slot) {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(again[row].scores[slot]),
                  std::bit_cast<std::uint32_t>(first[row].scores[slot]));
      }
    }
  }
}

}  // namespace dosa::test
