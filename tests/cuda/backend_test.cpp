// The cuda backend from end to end: everything else that asks expect_exact asks it of the GPU too.
#include <gtest/gtest.h>

#include "io/trace.hpp"
#include "score/oracle.hpp"
#include "support/cases.hpp"
#include "support/check.hpp"
#include "support/gpu.hpp"

namespace dosa::test {
namespace {

#define SKIP_WITHOUT_GPU() \
  if (const std::string reason = unavailable_reason(Backend::cuda); !reason.empty()) GTEST_SKIP() << reason

// Rows [first, first + count) of a shipped trace.
Problem rows_of(const Trace& trace, std::int64_t first, std::int64_t count) {
  Problem problem = trace.problem();
  const auto cut = [&](TensorView& view) {
    view.data = static_cast<const std::byte*>(view.data) + first * view.stride[0] * static_cast<std::int64_t>(size_of(view.dtype));
    view.shape[0] = count;
  };
  cut(problem.q), cut(problem.w), cut(problem.ke);
  if (problem.ks.present()) cut(problem.ks);
  return problem;
}

TEST(CudaBackend, SelectsRealActivationsExactly) {
  SKIP_WITHOUT_GPU();
  for (const char* name : {"/demo-h32.safetensors", "/demo-h64.safetensors"}) {
    const auto trace = Trace::open(std::string(DOSA_TRACES) + name);
    ASSERT_TRUE(trace.has_value());
    for (const std::int32_t topk : {2048, 256, 1}) {
      Problem problem = rows_of(*trace, 40, 5);
      problem.topk = topk;
      EXPECT_TRUE(exact_on_gpu(problem)) << name << " topk " << topk;
    }
  }
}

TEST(CudaBackend, KeepsToItsMemoryBudgetBySlicing) {
  SKIP_WITHOUT_GPU();
  const ProblemShape shape{.nq = 16384, .nk = 1 << 20, .heads = 32, .dim = 128, .topk = 2048};
  for (const Method method : {Method::dense, Method::dosa}) {
    for (const std::int64_t mebibytes : {64, 200, 1000, 4096, 20000}) {
      Options options;
      options.backend = Backend::cuda;
      options.method = method;
      options.memory_budget = mebibytes << 20;
      const auto indexer = Indexer::create(options);
      ASSERT_TRUE(indexer.has_value());
      const auto plan = indexer->plan(shape);
      ASSERT_TRUE(plan.has_value()) << plan.error().message;
      EXPECT_LE(static_cast<std::int64_t>(plan->workspace_bytes), options.memory_budget);
      if (mebibytes < 4096) {
        EXPECT_LT(plan->full_keys * plan->full_queries, shape.nk * shape.nq);
      } else {
        EXPECT_EQ(plan->tile_queries, shape.nq);
      }
    }
  }
}

TEST(CudaBackend, RefusesWhatItCannotDo) {
  SKIP_WITHOUT_GPU();
  Options options;
  options.backend = Backend::cuda;
  const auto indexer = Indexer::create(options);
  ASSERT_TRUE(indexer.has_value());
  const auto plan = indexer->plan({.nq = 1, .nk = 100, .heads = 8, .dim = 64, .topk = 8});
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code, ErrorCode::unsupported_shape);
}

}  // namespace
}  // namespace dosa::test
