// The C interface: the C++ answer through it, and its own refusals.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include "dosa/dosa.h"
#include "dosa/indexer.hpp"
#include "io/synth.hpp"

namespace dosa {
namespace {

template <typename Void>
dosa_tensor tensor_of(const BasicTensorView<Void>& view) {
  dosa_tensor tensor{
      view.data, static_cast<std::int32_t>(view.dtype), static_cast<std::int32_t>(view.device), view.rank, 0, {}, {}};
  std::copy(view.shape.begin(), view.shape.end(), tensor.shape);
  std::copy(view.stride.begin(), view.stride.end(), tensor.stride);
  return tensor;
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
  void operator()(dosa_indexer* indexer) const { dosa_indexer_destroy(indexer); }
  void operator()(dosa_plan* plan) const { dosa_plan_destroy(plan); }
};

/// A small problem, its output arrays, and everything a run needs.
struct CRun : testing::Test {
  static constexpr std::int64_t nq = 3, nk = 6000, topk = 100;

  Activations activations = random_activations(nq, nk, 8, 64, {}, 7);
  std::vector<std::int32_t> ids = std::vector<std::int32_t>(nq * topk);
  std::vector<float> scores = std::vector<float>(nq * topk);
  dosa_problem problem{};
  dosa_selection selection{};
  dosa_shape shape{sizeof(dosa_shape), nq, nk, 8, 64, topk, 0, 1};
  std::unique_ptr<dosa_indexer, Free> indexer;
  std::unique_ptr<dosa_plan, Free> plan;
  std::unique_ptr<void, Free> workspace;
  std::size_t bytes = 0;

  void SetUp() override {
    const Problem p = activations.problem();
    problem.size = sizeof problem;
    problem.q = tensor_of(p.q);
    problem.k = tensor_of(p.k);
    problem.k_scale = tensor_of(p.k_scale);
    problem.w = tensor_of(p.w);
    problem.ks = tensor_of(p.ks);
    problem.ke = tensor_of(p.ke);
    problem.topk = topk;
    selection.size = sizeof selection;
    selection.ids = tensor_of(dense_view<void>(ids.data(), DType::i32, {nq, topk}));
    selection.scores = tensor_of(dense_view<void>(scores.data(), DType::f32, {nq, topk}));
    dosa_indexer* made = nullptr;
    ASSERT_EQ(dosa_indexer_create(nullptr, &made), DOSA_OK) << dosa_last_error();
    indexer.reset(made);
    dosa_plan* planned = nullptr;
    ASSERT_EQ(dosa_plan_create(indexer.get(), &shape, &planned), DOSA_OK) << dosa_last_error();
    plan.reset(planned);
    bytes = dosa_plan_workspace_bytes(planned);
    workspace.reset(std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64));
  }

  dosa_status run(dosa_stats* stats = nullptr) {
    return dosa_run(indexer.get(), plan.get(), &problem, &selection, workspace.get(), bytes, nullptr, stats);
  }

  void expect_refusal(dosa_status status, const std::string& part) {
    EXPECT_EQ(run(), status);
    EXPECT_NE(std::string(dosa_last_error()).find(part), std::string::npos) << dosa_last_error();
  }
};

TEST_F(CRun, AnswersAsTheCppInterfaceDoes) {
  dosa_stats stats{};
  stats.size = sizeof stats;
  ASSERT_EQ(run(&stats), DOSA_OK) << dosa_last_error();

  Problem p = activations.problem();
  p.topk = topk;
  std::vector<std::int32_t> expected_ids(nq * topk);
  std::vector<float> expected_scores(nq * topk);
  auto reference = Indexer::create();
  ASSERT_TRUE(reference);
  const auto expected = reference->run(*reference->plan(shape_of(p)), p,
                                       {dense_view<void>(expected_ids.data(), DType::i32, {nq, topk}),
                                        dense_view<void>(expected_scores.data(), DType::f32, {nq, topk})});
  ASSERT_TRUE(expected) << expected.error().message;
  EXPECT_EQ(ids, expected_ids);
  EXPECT_EQ(std::memcmp(scores.data(), expected_scores.data(), scores.size() * sizeof(float)), 0);
  EXPECT_EQ(stats.size, sizeof stats);
  EXPECT_EQ(stats.rows, nq);
  EXPECT_EQ(stats.visible, expected->visible);
  EXPECT_EQ(stats.refined, expected->refined);
  EXPECT_EQ(stats.planned_rows, expected->planned_rows);
}

TEST_F(CRun, RefusesWhatCWouldLetThrough) {
  problem.size = 8;
  expect_refusal(DOSA_INVALID_ARGUMENT, "problem.size is 8");
  problem.size = sizeof problem;
  problem.q.rank = 6;
  expect_refusal(DOSA_INVALID_ARGUMENT, "rank of q is 6");
  problem.q.rank = 3;
  problem.q.dtype = 17;
  expect_refusal(DOSA_INVALID_ARGUMENT, "dtype of q is 17");
  problem.q.dtype = DOSA_F32;
  expect_refusal(DOSA_INVALID_ARGUMENT, "q");
  problem.q.dtype = DOSA_F8_E4M3;
  bytes -= 1;
  expect_refusal(DOSA_WORKSPACE_TOO_SMALL, std::to_string(bytes));
  EXPECT_EQ(dosa_run(indexer.get(), nullptr, &problem, &selection, nullptr, 0, nullptr, nullptr),
            DOSA_INVALID_ARGUMENT);
  EXPECT_STREQ(dosa_last_error(), "plan is NULL");
}

TEST(CInterface, DefaultsAreTheCppOnes) {
  const dosa_options c = dosa_default_options();
  const Options options;
  EXPECT_EQ(c.size, sizeof c);
  EXPECT_EQ(c.method, static_cast<int>(options.method));
  EXPECT_EQ(c.backend, static_cast<int>(options.backend));
  EXPECT_EQ(c.form, static_cast<int>(options.certificate.form));
  EXPECT_EQ(c.row_budget, options.certificate.row_budget);
  EXPECT_EQ(c.aggregates, options.certificate.aggregates);
  EXPECT_EQ(c.precision, static_cast<int>(options.certificate.precision));
  EXPECT_EQ(c.seeds, static_cast<int>(options.seeds));
  EXPECT_EQ(c.order, static_cast<int>(options.order));
  EXPECT_EQ(c.index_space, static_cast<int>(options.index_space));
  EXPECT_EQ(c.threads, options.threads);
  EXPECT_EQ(c.implementation, nullptr);
  EXPECT_EQ(c.memory_budget, options.memory_budget);
  EXPECT_EQ(c.min_context, options.min_context);
  EXPECT_EQ(c.verify_rows, options.verify_rows);
}

TEST(CInterface, SaysWhatItCanDo) {
  EXPECT_EQ(dosa_abi_version(), DOSA_ABI_VERSION);
  EXPECT_STREQ(dosa_version(), version());
  EXPECT_STREQ(dosa_unavailable_reason(DOSA_CPU), "");
  EXPECT_NE(std::string(dosa_unavailable_reason(7)), "");
  const auto names = cpu_implementations();
  for (std::size_t i = 0; i < names.size(); ++i)
    EXPECT_EQ(dosa_cpu_implementation(static_cast<std::int32_t>(i)), names[i]);
  EXPECT_EQ(dosa_cpu_implementation(static_cast<std::int32_t>(names.size())), nullptr);
  EXPECT_EQ(dosa_cpu_implementation(-1), nullptr);
}

TEST(CInterface, RefusesWrongOptions) {
  dosa_indexer* indexer = nullptr;
  dosa_options options = dosa_default_options();
  options.method = 4;
  EXPECT_EQ(dosa_indexer_create(&options, &indexer), DOSA_INVALID_ARGUMENT);
  EXPECT_STREQ(dosa_last_error(), "method is 4; allowed are 0..3");
  options = dosa_default_options();
  options.implementation = "abacus";
  EXPECT_EQ(dosa_indexer_create(&options, &indexer), DOSA_UNSUPPORTED_DEVICE);
  EXPECT_EQ(dosa_indexer_create(nullptr, nullptr), DOSA_INVALID_ARGUMENT);
  EXPECT_EQ(indexer, nullptr);
  dosa_indexer_destroy(nullptr);
  dosa_plan_destroy(nullptr);
}

TEST(CInterface, RefusesWrongShapes) {
  dosa_indexer* made = nullptr;
  ASSERT_EQ(dosa_indexer_create(nullptr, &made), DOSA_OK);
  const std::unique_ptr<dosa_indexer, Free> indexer(made);
  dosa_plan* plan = nullptr;
  dosa_shape shape{sizeof shape, 1, 100, 200, 128, 10, 0, 1};
  EXPECT_EQ(dosa_plan_create(made, &shape, &plan), DOSA_UNSUPPORTED_SHAPE);
  EXPECT_NE(std::string(dosa_last_error()).find("200"), std::string::npos) << dosa_last_error();
  shape.size = 0;
  EXPECT_EQ(dosa_plan_create(made, &shape, &plan), DOSA_INVALID_ARGUMENT);
  EXPECT_EQ(plan, nullptr);
}

}  // namespace
}  // namespace dosa
