// The Indexer's contract apart from its answers: errors, threads, the floating-point environment, reports.
#include "dosa/indexer.hpp"

#include <cfenv>
#include <thread>

#include <gtest/gtest.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "support/cases.hpp"
#include "support/check.hpp"
#include "support/paged.hpp"

namespace dosa::test {
namespace {

/// Output arrays and an aligned workspace for one problem.
struct Buffers {
  explicit Buffers(const Problem& problem, std::size_t workspace_bytes = 0)
      : nq(problem.q.shape[0]),
        k(problem.topk),
        ids(static_cast<std::size_t>(nq * k), 77),
        scores(ids.size(), 77.0F),
        memory(workspace_bytes + 64) {}
  [[nodiscard]] Selection selection() {
    return {dense_view<void>(ids.data(), DType::i32, {nq, k}), dense_view<void>(scores.data(), DType::f32, {nq, k})};
  }
  [[nodiscard]] Workspace workspace() {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    const std::size_t shift = (64 - address % 64) % 64;
    return {memory.data() + shift, memory.size() - 64};
  }
  [[nodiscard]] bool untouched() const {
    return std::all_of(ids.begin(), ids.end(), [](std::int32_t id) { return id == 77; });
  }

  std::int64_t nq, k;
  std::vector<std::int32_t> ids;
  std::vector<float> scores;
  std::vector<std::byte> memory;
};

Options with(Method method, std::int32_t threads = 2) {
  Options options;
  options.method = method;
  options.threads = threads;
  return options;
}

constexpr Method kMethods[] = {Method::automatic, Method::dense, Method::fused, Method::dosa};

template <typename T>
void expect_error(const Result<T>& result, ErrorCode code, const std::string& seen, const std::string& allowed) {
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code, code) << result.error().message;
  EXPECT_NE(result.error().message.find(seen), std::string::npos) << result.error().message;
  EXPECT_NE(result.error().message.find(allowed), std::string::npos) << result.error().message;
  EXPECT_EQ(result.error().message.find('\n'), std::string::npos);
}

TEST(Indexer, RefusesWrongOptions) {
  Options options;
  options.threads = -1;
  expect_error(Indexer::create(options), ErrorCode::invalid_argument, "-1", "0");
  options = {};
  options.certificate.row_budget = 65;
  expect_error(Indexer::create(options), ErrorCode::invalid_argument, "65", "64");
  options = {};
  options.certificate.aggregates = 5;
  expect_error(Indexer::create(options), ErrorCode::invalid_argument, "5", "4");
  options = {};
  options.memory_budget = 0;
  expect_error(Indexer::create(options), ErrorCode::invalid_argument, "0", "memory_budget");
  options = {};
  options.min_context = -2;
  expect_error(Indexer::create(options), ErrorCode::invalid_argument, "-2", "min_context");
  options = {};
  options.implementation = "avx9";
  expect_error(Indexer::create(options), ErrorCode::unsupported_device, "avx9", "scalar");
}

TEST(Indexer, RefusesWrongShapes) {
  const auto indexer = Indexer::create();
  ASSERT_TRUE(indexer);
  using enum ErrorCode;
  expect_error(indexer->plan({1, 10, 129, 128, 4}), unsupported_shape, "129", "128");
  expect_error(indexer->plan({1, 10, 0, 128, 4}), unsupported_shape, "0", "1");
  expect_error(indexer->plan({1, 10, 4, 96, 4}), unsupported_shape, "96", "64");
  expect_error(indexer->plan({1, 10, 4, 128, 0}), invalid_argument, "0", "4096");
  expect_error(indexer->plan({1, 10, 4, 128, 4097}), invalid_argument, "4097", "4096");
  expect_error(indexer->plan({-1, 10, 4, 128, 4}), invalid_argument, "-1", "0");
  expect_error(indexer->plan({1, std::int64_t{1} << 31, 4, 128, 4}), invalid_argument, "2147483648", "2147483647");
}

TEST(Indexer, RefusesProblemsThatAreNotThePlans) {
  const Case c = random_case(1, 3, 40, 4, 32, 5);
  const Problem good = c.problem();
  for (const Method method : kMethods) {
    const auto indexer = Indexer::create(with(method));
    ASSERT_TRUE(indexer);
    const auto plan = indexer->plan(shape_of(good));
    ASSERT_TRUE(plan);
    Buffers buffers(good, plan->workspace_bytes);
    const auto refuse = [&](auto&& spoil, ErrorCode code, const std::string& what) {
      Problem problem = good;
      Selection out = buffers.selection();
      Workspace workspace = buffers.workspace();
      spoil(problem, out, workspace);
      expect_error(indexer->run(*plan, problem, out, workspace), code, what, what);
      EXPECT_TRUE(buffers.untouched());
    };
    using enum ErrorCode;
    refuse([](Problem& p, auto&, auto&) { p.q.dtype = DType::f32; }, invalid_argument, "q is f32");
    refuse([](Problem& p, auto&, auto&) { p.k.shape[0] = 41; }, invalid_argument, "k has shape [41, 32]");
    refuse([](Problem& p, auto&, auto&) { p.k_scale = {}; }, invalid_argument, "k_scale");
    refuse([](Problem& p, auto&, auto&) { p.k_scale.data = nullptr; }, invalid_argument, "k_scale");
    refuse([](Problem& p, auto&, auto&) { p.w.rank = 1; }, invalid_argument, "w has shape");
    refuse([&](Problem& p, auto&, auto&) { p.ks = p.w; }, invalid_argument, "ks is f32");
    refuse([](Problem& p, auto&, auto&) { p.topk = 6; }, invalid_argument, "topk is 6");
    refuse([](Problem& p, auto&, auto&) { p.q.device = Device::cuda; }, invalid_argument, "q");
    refuse([](Problem& p, auto&, auto&) { p.w.data = static_cast<const std::byte*>(p.w.data) + 2; }, invalid_argument,
           "aligned");
    refuse([](auto&, Selection& out, auto&) { out.ids = {}; }, invalid_argument, "ids");
    refuse([](auto&, Selection& out, auto&) { out.scores.shape[1] = 4; }, invalid_argument, "scores has shape [3, 4]");
    refuse([](auto&, auto&, Workspace& w) { w.bytes -= 1; }, workspace_too_small,
           std::to_string(plan->workspace_bytes));
    EXPECT_TRUE(indexer->run(*plan, good, buffers.selection(), buffers.workspace()));
    EXPECT_FALSE(buffers.untouched());
  }
}

TEST(Indexer, RefusesPagesThatAreNotThePlans) {
  const Case c = random_case(1, 4, 100, 4, 32, 5);
  const std::vector<Problem> requests(2, c.problem());
  PagedProblem paged(requests, 1);
  const Problem good = paged.problem();
  for (const Method method : kMethods) {
    Options options = with(method);
    options.index_space = IndexSpace::slot;
    const auto indexer = Indexer::create(options);
    ASSERT_TRUE(indexer);
    const auto plan = indexer->plan(shape_of(good));
    ASSERT_TRUE(plan);
    Buffers buffers(good, plan->workspace_bytes);
    const auto refuse = [&](auto&& spoil, const std::string& what) {
      Problem problem = good;
      Selection out = buffers.selection();
      spoil(problem, out);
      expect_error(indexer->run(*plan, problem, out, buffers.workspace()), ErrorCode::invalid_argument, what, what);
      EXPECT_TRUE(buffers.untouched());
    };
    std::vector<std::int32_t> owners(8, 0), table(4, 0), recent(20, -1);
    owners[5] = 2;
    table[3] = 7;
    refuse([](Problem& p, auto&) { p.kv_cache = {}; }, "kv_cache is f32; it must be f8_e4m3");
    refuse([](Problem& p, auto&) { p.kv_cache.shape[1] = 32; }, "kv_cache has shape [7, 32, 1, 36]; it must be [7, 64, 1, 36]");
    refuse([](Problem& p, auto&) { p.kv_cache.stride[0] += 2; }, "kv_cache has pages 2326 bytes apart; it must be a multiple of 4");
    refuse([](Problem& p, auto&) { p.kv_cache.shape[0] = 1 << 26; }, "kv_cache has 67108864 pages; slot ids of 64 keys a page reach 33554431 pages");
    refuse([](Problem& p, auto&) { p.block_table.shape[1] = 3; }, "block_table has shape [2, 3]; it must be [2, 2]");
    refuse([&](Problem& p, auto&) { p.k = c.problem().k; }, "k is given beside kv_cache");
    refuse([](Problem& p, auto&) { p.requests.shape[0] = 7; }, "requests has shape [7]; it must be [8]");
    refuse([&](Problem& p, auto&) { p.requests.data = owners.data(); }, "requests[5] is 2; block_table has rows 0 to 1");
    refuse([&](Problem& p, auto&) { p.block_table.data = table.data(); }, "block_table[1, 1] is 7, which row 4 sees; pages are 0 to 6");
    refuse([](Problem& p, auto&) { p.ke.rank = 2, p.ke.shape = {2, 3}; }, "ke has shape [2, 3]; it must be [8]");
    refuse([&](auto&, Selection& s) { s.recent = dense_view<void>(recent.data(), DType::i32, {4, 5}); }, "recent has shape [4, 5]; it must be [2, 5]");
    refuse(
        [&](auto&, Selection& s) {
          s.recent = dense_view<void>(recent.data(), DType::i32, {2, 5});
          s.recent.stride[1] = 2;
        },
        "recent has stride 2 along a row; it must be 1");
    EXPECT_TRUE(indexer->run(*plan, good, buffers.selection(), buffers.workspace()));
  }

  const auto indexer = Indexer::create();
  expect_error(indexer->plan({1, 96, 4, 128, 4, 1, 48}), ErrorCode::unsupported_shape, "page_size is 48", "power of two");
  Problem uneven = good;
  uneven.requests = {};
  for (TensorView* view : {&uneven.q, &uneven.w, &uneven.ks, &uneven.ke}) view->shape[0] = 7;
  const auto plan = indexer->plan(shape_of(uneven));
  Buffers buffers(uneven, plan->workspace_bytes);
  expect_error(indexer->run(*plan, uneven, buffers.selection(), buffers.workspace()), ErrorCode::invalid_argument, "q has 7 rows",
               "the 2 rows of block_table");
  Options slots;
  slots.index_space = IndexSpace::slot;
  const auto slot_indexer = Indexer::create(slots);
  const auto slot_plan = slot_indexer->plan(shape_of(c.problem()));
  Buffers contiguous(c.problem(), slot_plan->workspace_bytes);
  expect_error(slot_indexer->run(*slot_plan, c.problem(), contiguous.selection(), contiguous.workspace()), ErrorCode::invalid_argument,
               "index_space is slot", "contiguous");
}

TEST(Indexer, VerifiesRowsOnRequest) {
  const Case c = random_case(2, 9, 3000, 8, 64, 100);
  for (const Method method : kMethods) {
    Options options = with(method);
    options.verify_rows = 4;
    EXPECT_TRUE(exact(c.problem(), expected_rows(c.problem()), options));
  }
}

TEST(Indexer, PlansOutliveTheirIndexerAndItsNames) {
  Options options;
  std::string name = "scalar";
  options.implementation = name;
  const auto plan = Indexer::create(options)->plan({3, 500, 4, 32, 10});
  name = "nothing";
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->options.implementation, "scalar");
  EXPECT_EQ(plan->implementation, "scalar");
}

TEST(Indexer, CallersFloatEnvironmentNeitherMattersNorChanges) {
  Case c = random_case(4, 4, 3000, 8, 64, 100);
  for (float& scale : c.k_scale) scale *= 0x1p-130F;  // scores are subnormal
  const Problem problem = c.problem();
  const auto expected = expected_rows(problem);
  for (const Method method : kMethods) {
    for (const std::int32_t threads : {1, 3}) {
      auto indexer = Indexer::create(with(method, threads));
      const auto plan = indexer->plan(shape_of(problem));
      Buffers buffers(problem, plan->workspace_bytes);
      std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
      const unsigned control = _mm_getcsr();
      _mm_setcsr(control | 0x8040U);  // flush to zero, denormals are zero
#endif
      const auto stats = indexer->run(*plan, problem, buffers.selection(), buffers.workspace());
      const int rounding = std::fegetround();
#if defined(__x86_64__)
      const unsigned after = _mm_getcsr();
      _mm_setcsr(control);
      EXPECT_EQ(after & 0x8040U, 0x8040U);
#endif
      std::fesetround(FE_TONEAREST);
      EXPECT_EQ(rounding, FE_UPWARD);
      ASSERT_TRUE(stats);
      for (std::size_t row = 0; row < expected.size(); ++row) {
        EXPECT_TRUE(std::equal(expected[row].ids.begin(), expected[row].ids.end(),
                               buffers.ids.begin() + static_cast<std::ptrdiff_t>(row * 100)));
        EXPECT_TRUE(std::equal(expected[row].scores.begin(), expected[row].scores.end(),
                               buffers.scores.begin() + static_cast<std::ptrdiff_t>(row * 100)));
      }
    }
  }
}

TEST(Indexer, TwoMayRunAtOnceAndShareAPlan) {
  Case c = random_case(5, 20, 4000, 8, 64, 100);
  make_causal(c);
  const Problem problem = c.problem();
  const auto expected = expected_rows(problem);
  for (const Method method : kMethods) {
    const auto plan = Indexer::create(with(method))->plan(shape_of(problem));
    ASSERT_TRUE(plan);
    std::vector<Buffers> buffers(4, Buffers(problem, plan->workspace_bytes));
    std::vector<std::thread> threads;
    for (Buffers& mine : buffers) {
      threads.emplace_back([&] {
        const auto indexer = Indexer::create(with(method));
        for (int n = 0; n < 5; ++n) EXPECT_TRUE(indexer->run(*plan, problem, mine.selection(), mine.workspace()));
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Buffers& one : buffers) {
      for (std::size_t row = 0; row < expected.size(); ++row) {
        EXPECT_TRUE(std::equal(expected[row].ids.begin(), expected[row].ids.end(),
                               one.ids.begin() + static_cast<std::ptrdiff_t>(row * 100)));
      }
    }
  }
}

TEST(Indexer, ReportsThePathOfEveryRow) {
  Case c = random_case(6, 6, 5000, 8, 64, 100);
  c.ke = {0, 50, 100, 101, 5000, 5000};
  c.w[5 * 8] = std::numeric_limits<float>::infinity();
  const Problem problem = c.problem();
  const auto paths = [&](Options options) {
    options.certificate.row_budget = 4;
    const auto indexer = Indexer::create(options);
    const auto plan = indexer->plan(shape_of(problem));
    Buffers buffers(problem, plan->workspace_bytes);
    std::vector<RowReport> reports(6);
    EXPECT_TRUE(indexer->run(*plan, problem, buffers.selection(), buffers.workspace(), reports));
    std::vector<Path> seen;
    for (const RowReport& report : reports) seen.push_back(report.path);
    return seen;
  };
  using enum Path;
  EXPECT_EQ(paths(with(Method::dense)), (std::vector<Path>{empty, short_row, short_row, full, full, full}));
  EXPECT_EQ(paths(with(Method::fused)), (std::vector<Path>{empty, short_row, short_row, full, full, full}));
  EXPECT_EQ(paths(with(Method::dosa)), (std::vector<Path>{empty, short_row, short_row, dosa, dosa, full_exempt}));
  Options options = with(Method::automatic);
  options.min_context = 4000;
  const auto seen = paths(options);
  EXPECT_EQ(seen[3], full_context);
  EXPECT_TRUE(seen[4] == dosa || seen[4] == full_loose);
}

TEST(Indexer, ShortRowsInIdOrderScoreNothing) {
  const Case c = random_case(7, 3, 80, 8, 64, 100);
  Options options = with(Method::automatic);
  options.order = Order::ascending;
  const auto indexer = Indexer::create(options);
  const auto plan = indexer->plan(shape_of(c.problem()));
  Buffers buffers(c.problem(), plan->workspace_bytes);
  Selection out = buffers.selection();
  out.scores = {};
  const auto stats = indexer->run(*plan, c.problem(), out, buffers.workspace());
  ASSERT_TRUE(stats);
  EXPECT_EQ(stats->path.short_rows, 3);
  EXPECT_EQ(stats->refined + stats->full + stats->seeds, 0);
  for (std::int32_t slot = 0; slot < 100; ++slot)
    EXPECT_EQ(buffers.ids[static_cast<std::size_t>(slot)], slot < 80 ? slot : -1);
}

TEST(Indexer, DescribesItsPlan) {
  const auto plan = Indexer::create()->plan({64, 65536, 32, 128, 2048});
  ASSERT_TRUE(plan);
  EXPECT_FALSE(plan->describe().empty());
  EXPECT_EQ(plan->describe().find('\n'), std::string::npos);
  EXPECT_EQ(plan->implementation, cpu_implementations().front());
}

}  // namespace
}  // namespace dosa::test
