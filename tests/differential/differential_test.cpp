// Every method on every implementation gives the oracle's ids and score bits; the other options are drawn, with a fixed
// seed, so that all of their values meet all methods.
#include <map>

#include "io/trace.hpp"
#include "support/cases.hpp"
#include "support/check.hpp"

namespace dosa::test {
namespace {

template <typename T>
T draw(Random& random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}

/// A budget near the smallest that the shape can be planned with, so that keys come in slices.
std::int64_t tight_budget(const ProblemShape& shape, Options options) {
  for (options.memory_budget = 1 << 14;; options.memory_budget += options.memory_budget / 4) {
    const auto indexer = Indexer::create(options);
    if (indexer->plan(shape)) return options.memory_budget;
  }
}

Options any_options(Random& random, Method method, const std::string& implementation) {
  Options o;
  o.method = method;
  o.implementation = implementation;
  o.threads = draw(random, {1, 2, 3, 7});
  o.order = draw(random, {Order::score, Order::ascending});
  o.index_space = draw(random, {IndexSpace::absolute, IndexSpace::relative});
  o.seeds =
      draw(random, {SeedPolicy::automatic, SeedPolicy::nearest_spread, SeedPolicy::chain, SeedPolicy::largest_bounds});
  o.certificate.form = draw(random, {Form::automatic, Form::base, Form::absolute, Form::extended});
  o.certificate.row_budget = draw(random, {0, 0, 1, 2, 5, 8, 20, 64});
  o.certificate.aggregates = draw(random, {0, 1, 2, 4});
  o.certificate.precision = draw(random, {ScreenPrecision::automatic, ScreenPrecision::f32, ScreenPrecision::i8});
  o.min_context = draw<std::int64_t>(random, {0, 1, 5000});
  return o;
}

struct Named {
  std::string name;
  Case problem;
};

std::vector<Named> problems() {
  std::vector<Named> all;
  const auto add = [&](std::string name, Case c) -> Case& {
    all.push_back({std::move(name), std::move(c)});
    return all.back().problem;
  };
  std::uint64_t seed = 100;
  for (const int heads : {1, 2, 3, 7, 8, 16, 31, 32, 64, 128}) {
    for (const double positive : {0.0, 0.2, 0.6, 1.0}) {
      const int dim = std::array{32, 64, 128, 128}[++seed % 4];
      const int topk = std::array{1, 7, 100, 233, 300}[seed % 5];
      const int nq = 1 + static_cast<int>(seed % (heads > 16 ? 3 : 7));
      const int nk = (heads > 16 ? 600 : 1100) + static_cast<int>(seed % 13);
      const Family family{.positive = positive, .correlation = 0.1 * static_cast<double>(seed % 10)};
      Case& c = add("random " + std::to_string(heads) + " heads", random_case(seed, nq, nk, heads, dim, topk, family));
      if (seed % 3 == 0) make_causal(c);
      if (seed % 3 == 1) make_ragged(c, seed);
    }
  }
  // Many rows and many keys, where groups, slices and parts have to be cut.
  make_causal(add("prefill", random_case(1, 80, 2500, 8, 64, 60)));
  add("decode", random_case(2, 1, 30000, 16, 128, 700, {.positive = 0.3}));
  add("two rows", random_case(3, 2, 9000, 4, 32, 2048));
  // Rows of one problem that take different paths.
  Case& odd = add("odd rows", random_case(4, 9, 2000, 8, 64, 90));
  odd.w[0] = std::numeric_limits<float>::infinity();
  odd.w[8] = std::numeric_limits<float>::quiet_NaN();
  odd.q[2 * 8 * 64] = 0x7F;
  odd.w[3 * 8] = 1e30F;
  odd.ks.assign(9, 0);
  odd.ke = {2000, 2000, 2000, 2000, 0, 50, 90, 91, 2000};
  // Weights that are all zero, or zero in part.
  Case& zero = add("zero weights", random_case(5, 4, 1500, 8, 64, 50));
  for (std::size_t h = 0; h < 8; ++h) zero.w[h] = 0.0F;
  for (std::size_t h = 8; h < 32; h += 3) zero.w[h] = h % 2 == 0 ? 0.0F : -0.0F;
  // Keys with odd scales and NaN bytes strewn in.
  Case& exempt = add("exempt keys", random_case(6, 6, 3000, 8, 64, 200));
  for (std::size_t i = 0; i < exempt.k_scale.size(); i += 37) {
    exempt.k_scale[i] = std::array{0.0F,
                                   -1.0F,
                                   -0.0F,
                                   1e-40F,
                                   1e30F,
                                   std::numeric_limits<float>::infinity(),
                                   std::numeric_limits<float>::quiet_NaN()}[i / 37 % 7];
    exempt.k[(i + 5) % 3000 * 64 + i % 64] = i % 2 == 0 ? 0x7F : 0xFF;
  }
  // Hints per row.
  Case& hinted = add("hints", random_case(7, 5, 4000, 8, 64, 300));
  hinted.hint_rows = 5;
  for (int n = 0; n < 5 * 350; ++n) hinted.hints.push_back(n * 7919 % 4100 - 40);
  return all;
}

class Differential : public ::testing::TestWithParam<Method> {};

TEST_P(Differential, EveryImplementation) {
  Random random(static_cast<std::uint64_t>(GetParam()) + 1);
  std::int64_t screened = 0;
  std::int64_t survivors = 0;
  for (const Named& problem : problems()) {
    const StridedCase strided(problem.problem, random());
    const auto expected = expected_rows(strided.problem());
    for (const std::string& implementation : cpu_implementations()) {
      Options options = any_options(random, GetParam(), implementation);
      if (random() % 3 == 0) options.memory_budget = tight_budget(shape_of(strided.problem()), options);
      Stats stats;
      ASSERT_TRUE(exact(strided.problem(), expected, options, &stats)) << problem.name;
      screened += stats.screened;
      survivors += stats.survivors;
    }
  }
  if (GetParam() == Method::dosa) {
    EXPECT_LT(survivors, 3 * screened / 4);
  }
}

std::string name_of(const ::testing::TestParamInfo<Method>& method) {
  constexpr std::array names = {"automatic", "dense", "fused", "dosa"};
  return names[static_cast<std::size_t>(method.param)];
}

INSTANTIATE_TEST_SUITE_P(Methods, Differential,
                         ::testing::Values(Method::automatic, Method::dense, Method::fused, Method::dosa), name_of);

/// Guards the suites themselves: on real activations `dosa` screens, rejects and refines in every form, precision and
/// seed policy.
TEST(Screening, ReallyHappens) {
  const auto trace = Trace::open(DOSA_TRACES "/demo-h32.safetensors");
  ASSERT_TRUE(trace) << trace.error().message;
  Problem problem = trace->problem();
  const std::vector<std::int32_t> ke(3, 4000);
  problem.q.shape[0] = problem.w.shape[0] = 3;
  problem.ks = {};
  problem.ke = dense_view<const void>(ke.data(), DType::i32, {3});
  problem.topk = 64;
  const auto expected = expected_rows(problem);
  Options options;
  options.method = Method::dosa;
  options.threads = 2;
  const auto check = [&](Form form, ScreenPrecision precision, SeedPolicy seeds) {
    options.seeds = seeds;
    options.certificate = {form, 20, 1, precision};
    Stats stats;
    ASSERT_TRUE(exact(problem, expected, options, &stats));
    EXPECT_EQ(stats.path.dosa, 3) << describe(options);
    EXPECT_LT(stats.survivors, 3 * stats.screened / 4) << describe(options);
  };
  for (const std::string& implementation : cpu_implementations()) {
    options.implementation = implementation;
    for (const ScreenPrecision precision : {ScreenPrecision::f32, ScreenPrecision::i8}) {
      for (const Form form : {Form::base, Form::absolute, Form::extended})
        check(form, precision, SeedPolicy::automatic);
      check(Form::automatic, precision, SeedPolicy::nearest_spread);
      check(Form::automatic, precision, SeedPolicy::chain);
      check(Form::automatic, precision, SeedPolicy::largest_bounds);
    }
  }
}

}  // namespace
}  // namespace dosa::test
