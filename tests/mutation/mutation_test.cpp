// Do the tests notice a bug? This binary holds the library with deliberate ones (base/mutation.hpp), one of which is
// switched on at a time. Without any, every input is answered exactly; each of them must give some wrong answer.
#include "base/mutation.hpp"

#include <algorithm>

#include <gtest/gtest.h>

#include "support/cases.hpp"
#include "support/check.hpp"

namespace dosa::test {
namespace {

struct Input {
  const char* name;
  Case problem;
  Options options;
};

Options screening(SeedPolicy seeds, Form form, std::int32_t row_budget, ScreenPrecision precision) {
  Options options;
  options.method = Method::dosa;
  options.threads = 1;
  options.seeds = seeds;
  options.certificate = {form, row_budget, 1, precision};
  return options;
}

/// Every key the same, so that every score equals tau; each head twice, so that the omitted half leans on the
/// retained half and leaves no residual: the bound has nothing to spare but its allowances.
Case tight_bounds() {
  Case c = random_case(1, 48, 1500, 16, 128, 100, {.positive = 1});
  for (std::int64_t i = 1; i < c.nk; ++i) {
    std::copy_n(c.k.begin(), c.dim, c.k.begin() + i * c.dim);
    c.k_scale[static_cast<std::size_t>(i)] = c.k_scale[0] = 1.0F;
  }
  for (std::int64_t j = 0; j < c.nq; ++j) {
    const auto heads = c.q.begin() + j * c.heads * c.dim;
    std::copy_n(heads, 8 * c.dim, heads + 8 * c.dim);
    for (std::int64_t h = 0; h < 16; ++h) {  // the first half is worth keeping
      float& w = c.w[static_cast<std::size_t>(j * 16 + h)];
      w = (h < 8 ? 10.0F : 4.0F) / (1.0F + w);
    }
  }
  return c;
}

/// Fewer than K keys above zero, thousands of zeros: tau, and the bound of every other key, is 0.
Case ties_at_tau() {
  std::vector<float> scores;
  for (int i = 0; i < 3000; ++i) scores.push_back(i % 100 == 99 ? 1.0F + static_cast<float>(i) : 0.0F);
  return explicit_scores(scores, 500, 2);
}

/// The best key suggested more than K times.
Case repeated_hint() {
  std::vector<float> scores;
  for (int i = 0; i < 3000; ++i) scores.push_back(static_cast<float>(i % 1000));
  Case c = explicit_scores(scores, 100, 2);
  c.hints.assign(150, 999);
  return c;
}

std::vector<Input> inputs() {
  constexpr auto f32 = ScreenPrecision::f32;
  std::vector<Input> all;
  for (const Form form : {Form::base, Form::extended}) {
    all.push_back({"tight bounds", tight_bounds(), screening(SeedPolicy::nearest_spread, form, 9, f32)});
    all.push_back({"ties at tau", ties_at_tau(), screening(SeedPolicy::nearest_spread, form, 2, f32)});
    all.push_back({"repeated hint", repeated_hint(), screening(SeedPolicy::chain, form, 2, f32)});
  }
  return all;
}

/// Inputs whose answers are wrong with `mutation`.
std::vector<std::string> caught_by(Mutation mutation) {
  std::vector<std::string> names;
  for (const Input& input : inputs()) {
    const Problem problem = input.problem.problem();
    const auto expected = expected_rows(problem);
    current_mutation = mutation;
    if (!exact(problem, expected, input.options)) names.emplace_back(input.name);
    current_mutation = Mutation::none;
  }
  return names;
}

using Names = std::vector<std::string>;

TEST(Mutations, NoneIsGreen) { EXPECT_EQ(caught_by(Mutation::none), Names{}); }

TEST(Mutations, BoundsWithoutAllowances) {
  EXPECT_EQ(caught_by(Mutation::no_allowances), (Names{"tight bounds", "tight bounds"}));
}

TEST(Mutations, TiesRejected) { EXPECT_EQ(caught_by(Mutation::reject_ties), (Names{"ties at tau", "ties at tau"})); }

TEST(Mutations, TauOneUlpTooHigh) {
  EXPECT_EQ(caught_by(Mutation::tau_too_high), (Names{"tight bounds", "ties at tau", "tight bounds", "ties at tau"}));
}

TEST(Mutations, WitnessesCountedTwice) {
  EXPECT_EQ(caught_by(Mutation::duplicate_witnesses), (Names{"repeated hint", "repeated hint"}));
}

}  // namespace
}  // namespace dosa::test
