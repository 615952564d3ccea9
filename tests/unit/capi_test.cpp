// The C interface: the C++ answer through it, and its own refusals.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
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

TEST(CDecode, InsertsStepsAndSelects) {
  constexpr std::int64_t pages = 5, page_size = 16, dim = 32, n = 40, heads = 2;
  std::vector<std::uint8_t> pool(pages * page_size * (dim + 4), 0x7F), q(2 * heads * dim);
  std::vector<float> keys(n * dim), w = {1, -1, 1, -1};
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i % dim == 0 ? static_cast<float>(1 + i / dim * 7 % 40) : 0;
  q[0] = q[heads * dim] = 0x38;
  std::vector<std::int32_t> blocks = {4, 0, 2}, slots, lens = {39, 40}, recent(8, -1);
  for (std::int32_t i = 0; i < n; ++i) slots.push_back(blocks[static_cast<std::size_t>(i / 16)] * 16 + i % 16);
  const dosa_tensor cache = tensor_of(dense_view<void>(pool.data(), DType::f8_e4m3, {pages, page_size, 1, dim + 4}));
  const dosa_tensor key_rows = tensor_of(dense_view<void>(keys.data(), DType::f32, {n, dim}));
  const dosa_tensor places = tensor_of(dense_view<void>(slots.data(), DType::i32, {n}));
  EXPECT_EQ(dosa_insert_keys(&cache, &key_rows, &places, 2, 1e-4F), DOSA_INVALID_ARGUMENT);
  EXPECT_STREQ(dosa_last_error(), "scale_rule is 2; allowed are 0..1");
  EXPECT_EQ(dosa_insert_keys(nullptr, &key_rows, &places, DOSA_SCALE_AMAX, 1e-4F), DOSA_INVALID_ARGUMENT);
  ASSERT_EQ(dosa_insert_keys(&cache, &key_rows, &places, DOSA_SCALE_AMAX, 1e-4F), DOSA_OK) << dosa_last_error();

  std::vector<std::uint8_t> k(n * dim);
  std::vector<float> k_scale(n);
  const dosa_tensor k_out = tensor_of(dense_view<void>(k.data(), DType::f8_e4m3, {n, dim}));
  const dosa_tensor scale_out = tensor_of(dense_view<void>(k_scale.data(), DType::f32, {n}));
  const dosa_tensor block_row = tensor_of(dense_view<void>(blocks.data(), DType::i32, {3}));
  ASSERT_EQ(dosa_gather_keys(&cache, &block_row, 0, &k_out, &scale_out), DOSA_OK) << dosa_last_error();
  EXPECT_EQ(dosa_gather_keys(&cache, &block_row, 9, &k_out, &scale_out), DOSA_INVALID_ARGUMENT);

  dosa_decode_step step{};
  step.size = sizeof step;
  step.q = tensor_of(dense_view<void>(q.data(), DType::f8_e4m3, {1, 2, heads, dim}));
  step.w = tensor_of(dense_view<void>(w.data(), DType::f32, {2, heads}));
  step.kv_cache = cache;
  step.block_table = tensor_of(dense_view<void>(blocks.data(), DType::i32, {1, 3}));
  step.context_lens = tensor_of(dense_view<void>(lens.data(), DType::i32, {1, 2}));
  step.topk = 5;
  dosa_problem problem{};
  problem.size = sizeof problem;
  ASSERT_EQ(dosa_decode_problem(&step, &problem), DOSA_OK) << dosa_last_error();

  dosa_options options = dosa_default_options();
  options.index_space = DOSA_IDS_SLOT;
  dosa_indexer* indexer = nullptr;
  dosa_plan* plan = nullptr;
  ASSERT_EQ(dosa_indexer_create(&options, &indexer), DOSA_OK);
  const dosa_shape shape{sizeof shape, 2, 48, heads, dim, 5, page_size, 1};
  ASSERT_EQ(dosa_plan_create(indexer, &shape, &plan), DOSA_OK) << dosa_last_error();
  void* workspace = std::aligned_alloc(64, (dosa_plan_workspace_bytes(plan) + 63) / 64 * 64);
  std::vector<std::int32_t> ids(10);
  dosa_selection selection{};
  selection.size = sizeof selection;
  selection.ids = tensor_of(dense_view<void>(ids.data(), DType::i32, {2, 5}));
  selection.recent = tensor_of(dense_view<void>(recent.data(), DType::i32, {1, 8}));
  EXPECT_EQ(dosa_run(indexer, plan, &problem, &selection, workspace, dosa_plan_workspace_bytes(plan), nullptr, nullptr), DOSA_OK)
      << dosa_last_error();
  // Key i scores (7 i mod 40) + 1, all different.
  for (std::int32_t row = 0; row < 2; ++row) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(lens[static_cast<std::size_t>(row)]));
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [](std::int32_t a, std::int32_t b) { return a * 7 % 40 > b * 7 % 40; });
    for (std::size_t at = 0; at < 5; ++at) {
      EXPECT_EQ(ids[static_cast<std::size_t>(row) * 5 + at], slots[static_cast<std::size_t>(order[at])]);
    }
    if (row == 1) {
      EXPECT_TRUE(std::equal(order.begin(), order.begin() + 5, recent.begin()));
    }
  }
  std::vector<std::uint8_t> copy(pool.size());
  const dosa_tensor other = tensor_of(dense_view<void>(copy.data(), DType::f8_e4m3, {pages, page_size, 1, dim + 4}));
  EXPECT_EQ(dosa_move_keys(&cache, &places, &other, &places), DOSA_OK);
  EXPECT_TRUE(std::equal(pool.begin() + 4 * 16 * 36, pool.end(), copy.begin() + 4 * 16 * 36));
  EXPECT_EQ(dosa_dsa_topk_indexer_fp8_h64_d128_topk2048_ps64(&step.q, &cache, &step.w, &step.context_lens, &block_row, &selection.ids),
            DOSA_INVALID_ARGUMENT);
  EXPECT_STREQ(dosa_last_error(), "q_index_fp8 has shape [1, 2, 2, 32]; it must be [1, 64, 128]");
  std::free(workspace);
  dosa_plan_destroy(plan);
  dosa_indexer_destroy(indexer);
}

}  // namespace
}  // namespace dosa
