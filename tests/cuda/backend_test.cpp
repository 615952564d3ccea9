// The cuda backend from end to end: everything else that asks expect_exact asks it of the GPU too.
#include <bit>
#include <memory>
#include <vector>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "backend/backend.hpp"
#include "backend/cuda/workspace.hpp"
#include "cuda/device.hpp"
#include "io/trace.hpp"
#include "score/oracle.hpp"
#include "support/cases.hpp"
#include "support/check.hpp"
#include "support/gpu.hpp"

namespace dosa::test {
namespace {

class CudaBackend : public CudaTest {};

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

TEST_F(CudaBackend, SelectsRealActivationsExactly) {
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

// A problem on the device, one way to compute it, and what came out.
struct OnDevice {
  OnDevice(const Problem& problem, const Options& options)
      : copy(std::move(*copy_to_device(problem, true))),
        indexer(std::move(*Indexer::create(options))),
        plan(std::move(*indexer.plan(shape_of(problem)))),
        workspace(std::move(*copy->workspace(plan.workspace_bytes))) {
    EXPECT_EQ(cudaMemset(workspace.data, 0xA5, workspace.bytes), cudaSuccess);
  }

  void enqueue(cudaStream_t stream = nullptr) {
    workspace.stream = stream;
    const auto ran = indexer.run(plan, copy->problem(), copy->selection(), workspace);
    EXPECT_TRUE(ran.has_value()) << (ran ? "" : ran.error().message);
  }
  Stats counters() { return *indexer.counters(plan, workspace); }

  // Ids and score bits of all rows.
  std::vector<std::uint32_t> result() {
    const std::int64_t nq = plan.shape.nq, k = plan.shape.topk;
    std::vector<std::uint32_t> bits(static_cast<std::size_t>(2 * nq * k));
    const Selection host{dense_view<void>(bits.data(), DType::i32, {nq, k}),
                         dense_view<void>(bits.data() + nq * k, DType::f32, {nq, k})};
    EXPECT_TRUE(copy->fetch(host).has_value());
    return bits;
  }

  std::unique_ptr<DeviceCopy> copy;
  Indexer indexer;
  Plan plan;
  Workspace workspace;
};

Options cuda_options(Method method) {
  Options options;
  options.backend = Backend::cuda;
  options.method = method;
  return options;
}

std::vector<std::uint32_t> dense_result(const Problem& problem) {
  OnDevice dense(problem, cuda_options(Method::dense));
  dense.enqueue();
  return dense.result();
}

TEST_F(CudaBackend, EveryWayToScreenSelectsTheSame) {
  for (const char* name : {"/demo-h32.safetensors", "/demo-h64.safetensors"}) {
    const auto trace = Trace::open(std::string(DOSA_TRACES) + name);
    ASSERT_TRUE(trace.has_value());
    for (const std::int32_t topk : {2048, 300}) {
      Problem problem = trace->problem();
      problem.topk = topk;
      const std::vector<std::uint32_t> want = dense_result(problem);
      const auto expect_same = [&](const Options& options) {
        OnDevice dosa(problem, options);
        dosa.enqueue();
        EXPECT_EQ(dosa.result(), want) << name << " topk " << topk << " " << describe(options);
        const Stats stats = dosa.counters();
        EXPECT_GT(stats.screened * 2, stats.visible) << name << " topk " << topk << " " << describe(options);
        EXPECT_LE(stats.survivors, stats.screened);
      };
      for (const Form form : {Form::base, Form::extended}) {
        for (const SeedPolicy seeds : {SeedPolicy::sample, SeedPolicy::chain, SeedPolicy::nearest_spread}) {
          Options options = cuda_options(Method::dosa);
          options.certificate.form = form;
          options.seeds = seeds;
          expect_same(options);
        }
      }
      for (const Ablation ablation : {Ablation::no_aggregate, Ablation::all_aggregated, Ablation::no_projection}) {
        Options options = cuda_options(Method::dosa);
        options.certificate.ablation = ablation;
        expect_same(options);
      }
      for (const int rows : {8, 12, 16, 20, 24, 32}) {
        Options options = cuda_options(Method::dosa);
        options.certificate.row_budget = rows;
        expect_same(options);
      }
    }
  }
}

TEST_F(CudaBackend, LittleMemoryCostsTimeOnly) {
  const auto trace = Trace::open(std::string(DOSA_TRACES) + "/demo-h32.safetensors");
  ASSERT_TRUE(trace.has_value());
  const Problem problem = trace->problem();
  const std::vector<std::uint32_t> want = dense_result(problem);
  for (const Method method : {Method::fused, Method::dosa}) {
    for (const std::int64_t mebibytes : {20, 24, 32, 48, 96}) {
      Options options = cuda_options(method);
      options.memory_budget = mebibytes << 20;
      if (method == Method::dosa) options.certificate.row_budget = 8;
      OnDevice run(problem, options);
      run.enqueue();
      EXPECT_EQ(run.result(), want) << mebibytes;
    }
  }
}

TEST_F(CudaBackend, FusedSelectsTheSame) {
  for (const char* name : {"/demo-h32.safetensors", "/demo-h64.safetensors"}) {
    const auto trace = Trace::open(std::string(DOSA_TRACES) + name);
    ASSERT_TRUE(trace.has_value());
    for (const std::int32_t topk : {4096, 2048, 300, 1}) {
      Problem problem = trace->problem();
      problem.topk = topk;
      OnDevice fused(problem, cuda_options(Method::fused));
      fused.enqueue();
      EXPECT_EQ(fused.result(), dense_result(problem)) << name << " topk " << topk;
      EXPECT_EQ(fused.counters().full, fused.counters().visible) << name << " topk " << topk;  // no row twice
    }
  }
}

// Winners lie at the sampled keys, or nowhere near them: tau is too high in every row, or lets through more than there is room for.
TEST_F(CudaBackend, ASampleThatMisleadsIsNoticed) {
  std::vector<float> scores(1 << 17);
  const cuda::KeySlice sample = cuda::sample_of(1 << 17);
  for (const bool at_sample : {true, false}) {
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const bool sampled = static_cast<int>(i) % sample.period == sample.phase;
      scores[i] = sampled == at_sample ? 1000.0F + static_cast<float>(i * 7919 % 4096) : static_cast<float>(i * 31 % 997) / 1000;
    }
    const Case c = explicit_scores(scores, 256, 64, 32, 128);
    for (const Method method : {Method::fused, Method::dosa}) {
      OnDevice run(c.problem(), cuda_options(method));
      run.enqueue();
      EXPECT_EQ(run.result(), dense_result(c.problem())) << at_sample;
      if (method == Method::fused) {
        EXPECT_EQ(run.counters().full, 2 * run.counters().visible) << at_sample;
      }
    }
  }
}

// All winners lie in the first slice, which is taken for a sample: the guess of tau is too high in every row.
TEST_F(CudaBackend, ATauGuessedTooHighIsNoticed) {
  std::vector<float> scores(1 << 18);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    scores[i] = i % 512 == 0 ? 1000.0F + static_cast<float>(i * 7919 % 4096) : static_cast<float>(i * 31 % 997) / 1000;
  }
  const Case c = explicit_scores(scores, 256, 64, 32, 128);
  Options options = cuda_options(Method::dosa);
  options.memory_budget = std::int64_t{12} << 20;
  OnDevice dosa(c.problem(), options);
  ASSERT_GT(dosa.plan.key_slices, 1);
  dosa.enqueue();
  EXPECT_EQ(dosa.result(), dense_result(c.problem()));
  EXPECT_EQ(dosa.counters().path.full_loose, 64);
}

// Equal scores, more of them in the first slice than a guess of tau looks at: which of them win is decided by keys of other
// slices, whose ids lie between and behind.
TEST_F(CudaBackend, TiesAtAGuessedTauAreAllKept) {
  Options options = cuda_options(Method::dosa);
  options.memory_budget = std::int64_t{12} << 20;
  const ProblemShape shape{.nq = 64, .nk = 1 << 18, .heads = 32, .dim = 128, .topk = 256};
  const int slices = Indexer::create(options)->plan(shape)->key_slices;
  ASSERT_GT(slices, 1);
  for (const int early : {150, 200, 230, 255}) {
    std::vector<float> scores(1 << 18);
    for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(i * 31 % 997) / 1000;
    for (int j = 0; j < early; ++j) scores[static_cast<std::size_t>(j * slices)] = 1000;
    for (int j = 0; j < 300; ++j) scores[static_cast<std::size_t>((1 << 17) / slices + j) * static_cast<std::size_t>(slices) + 1] = 1000;
    const Case c = explicit_scores(scores, 256, 64, 32, 128);
    OnDevice dosa(c.problem(), options);
    dosa.enqueue();
    EXPECT_EQ(dosa.result(), dense_result(c.problem())) << early;
  }
}

TEST_F(CudaBackend, TwentyLaunchesAreBitIdentical) {
  const auto trace = Trace::open(std::string(DOSA_TRACES) + "/demo-h32.safetensors");
  ASSERT_TRUE(trace.has_value());
  const std::vector<std::uint32_t> want = dense_result(trace->problem());
  OnDevice dosa(trace->problem(), cuda_options(Method::dosa));
  for (int launch = 0; launch < 20; ++launch) {
    dosa.enqueue();
    ASSERT_EQ(dosa.result(), want) << launch;
  }
}

// Lengths are read on the device: a captured graph follows them.
TEST_F(CudaBackend, AGraphIsReplayedWithOtherLengths) {
  const auto trace = Trace::open(std::string(DOSA_TRACES) + "/demo-h32.safetensors");
  ASSERT_TRUE(trace.has_value());
  Problem problem = trace->problem();
  const std::int64_t nq = problem.q.shape[0], nk = problem.k.shape[0];
  for (const Method method : {Method::dense, Method::fused, Method::dosa}) {
    OnDevice run(problem, cuda_options(method));
    CapturedStream captured;
    captured.capture([&] { run.enqueue(captured.stream()); });
    Random random(1);
    for (int replay = 0; replay < 6; ++replay) {
      std::vector<std::int32_t> ke(static_cast<std::size_t>(nq));
      for (auto& end : ke) {
        end = static_cast<std::int32_t>(replay % 2 == 0 ? nk - static_cast<std::int64_t>(random() % 2000)
                                                        : static_cast<std::int64_t>(random() % (nk + 100)) - 50);
      }
      const void* on_device = run.copy->problem().ke.data;
      ASSERT_EQ(cudaMemcpy(const_cast<void*>(on_device), ke.data(), ke.size() * 4, cudaMemcpyHostToDevice), cudaSuccess);
      captured.replay();
      Problem changed = problem;
      changed.ke = dense_view<const void>(ke.data(), DType::i32, {nq});
      ASSERT_EQ(run.result(), dense_result(changed)) << "replay " << replay;
    }
  }
}

// Several slices of queries and of keys, rows that see nothing of each other's keys, rows that see nothing at all.
TEST_F(CudaBackend, RaggedRowsInManySlices) {
  for (const int heads : {32, 64}) {
    Case c = random_case(7, 900, 1 << 17, heads, 128, 256);  // more rows than fit beside the fewest scores that are stored at a time
    make_ragged(c, 3);
    for (std::size_t i = 0; i < c.ke.size(); i += 3) {  // disjoint thirds
      c.ks[i] = static_cast<std::int32_t>(i / 3 % 3) * 40000;
      c.ke[i] = c.ks[i] + 40000;
    }
    const std::vector<std::uint32_t> want = dense_result(c.problem());
    for (const Method method : {Method::fused, Method::dosa}) {
      Options options = cuda_options(method);
      bool sliced_rows = false, sliced_keys = false;
      for (options.memory_budget = std::int64_t{64} << 20;; options.memory_budget = options.memory_budget / 4 * 3) {
        if (!Indexer::create(options)->plan(shape_of(c.problem()))) break;  // too little for anything
        OnDevice run(c.problem(), options);
        sliced_rows = sliced_rows || run.plan.tile_queries < c.nq;
        sliced_keys = sliced_keys || run.plan.key_slices > 1;
        run.enqueue();
        EXPECT_EQ(run.result(), want) << heads << " " << describe(options);
        const Stats stats = run.counters();
        EXPECT_EQ(stats.path.empty + stats.path.short_rows + stats.path.dosa + stats.path.full + stats.path.full_context +
                      stats.path.full_loose + stats.path.full_exempt,
                  c.nq);
      }
      EXPECT_TRUE(sliced_rows) << describe(options);
      EXPECT_EQ(sliced_keys, method == Method::dosa) << describe(options);
    }
  }
}

// tau is guessed between slices inside the graph.
TEST_F(CudaBackend, AGraphOfManySlicesFollowsItsLengths) {
  Case c = random_case(8, 64, 1 << 18, 32, 128, 256);
  make_causal(c);
  Options options = cuda_options(Method::dosa);
  options.memory_budget = std::int64_t{12} << 20;
  OnDevice run(c.problem(), options);
  ASSERT_GT(run.plan.key_slices, 1);
  CapturedStream captured;
  captured.capture([&] { run.enqueue(captured.stream()); });
  for (int replay = 0; replay < 4; ++replay) {
    ASSERT_EQ(cudaMemcpy(const_cast<void*>(run.copy->problem().ke.data), c.ke.data(), c.ke.size() * 4, cudaMemcpyHostToDevice),
              cudaSuccess);
    captured.replay();
    ASSERT_EQ(run.result(), dense_result(c.problem())) << "replay " << replay;
    for (auto& end : c.ke) end -= end / (replay + 2);
  }
}

TEST_F(CudaBackend, TwoStreamsDoNotMeet) {
  const auto small = Trace::open(std::string(DOSA_TRACES) + "/demo-h32.safetensors");
  const auto wide = Trace::open(std::string(DOSA_TRACES) + "/demo-h64.safetensors");
  ASSERT_TRUE(small.has_value() && wide.has_value());
  const std::vector<std::uint32_t> want[2] = {dense_result(small->problem()), dense_result(wide->problem())};
  OnDevice runs[2] = {{small->problem(), cuda_options(Method::dosa)}, {wide->problem(), cuda_options(Method::dosa)}};
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 2; ++i) runs[i].enqueue(streams[i]);
    for (int i = 0; i < 2; ++i) {
      ASSERT_EQ(cudaStreamSynchronize(streams[i]), cudaSuccess);
      ASSERT_EQ(runs[i].result(), want[i]) << round;
    }
  }
  for (const cudaStream_t stream : streams) cudaStreamDestroy(stream);
}

TEST_F(CudaBackend, KeepsToItsMemoryBudgetBySlicing) {
  const ProblemShape shape{.nq = 16384, .nk = 1 << 20, .heads = 32, .dim = 128, .topk = 2048};
  for (const Method method : {Method::dense, Method::fused, Method::dosa}) {
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

TEST_F(CudaBackend, RefusesWhatItCannotDo) {
  Options options;
  options.backend = Backend::cuda;
  const auto indexer = Indexer::create(options);
  ASSERT_TRUE(indexer.has_value());
  const auto plan = indexer->plan({.nq = 1, .nk = 100, .heads = 8, .dim = 64, .topk = 8});
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code, ErrorCode::unsupported_shape);
  const auto paged = indexer->plan({.nq = 1 << 20, .nk = 1 << 20, .heads = 8, .dim = 128, .topk = 8, .requests = 1025, .page_size = 64});
  ASSERT_FALSE(paged.has_value());
  EXPECT_EQ(paged.error().message, "1025 requests of 1048576 keys; the cuda backend gathers at most 1073741824 keys for 1048576 queries");
}

}  // namespace
}  // namespace dosa::test
