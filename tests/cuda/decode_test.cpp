// Keys in pages on the device, scored where they lie and gathered: ids and score bits must be those of the same keys without
// pages, which the other tests of this folder compare with the emulator.
#include <algorithm>
#include <memory>
#include <vector>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "backend/backend.hpp"
#include "cuda/device.hpp"
#include "decode/recent.hpp"
#include "io/trace.hpp"
#include "support/cases.hpp"
#include "support/engine.hpp"
#include "support/gpu.hpp"
#include "support/paged.hpp"

namespace dosa::test {
namespace {

constexpr std::int64_t kPage = 64;
constexpr std::int32_t kWide = 128;  // components of a key

Options cuda_options(Method method, IndexSpace space = IndexSpace::absolute) {
  Options options;
  options.backend = Backend::cuda;
  options.method = method;
  options.index_space = space;
  return options;
}

struct Rows {
  std::vector<std::int32_t> ids;
  std::vector<std::uint32_t> bits;  // of scores

  void append(const Rows& other) {
    ids.insert(ids.end(), other.ids.begin(), other.ids.end());
    bits.insert(bits.end(), other.bits.begin(), other.bits.end());
  }
  friend bool operator==(const Rows&, const Rows&) = default;
};

// A problem on the device, and one way to compute it.
struct OnDevice {
  OnDevice(const Problem& problem, const Options& options, std::int64_t recent_width = 0)
      : copy(std::move(*copy_to_device(problem, true, recent_width))),
        indexer(std::move(*Indexer::create(options))),
        plan(std::move(*indexer.plan(shape_of(problem)))),
        workspace(std::move(*copy->workspace(plan.workspace_bytes))) {
    EXPECT_EQ(cudaMemset(workspace.data, 0xA5, workspace.bytes), cudaSuccess);
  }
  void enqueue() {
    const auto ran = indexer.run(plan, problem(), copy->selection(), workspace);
    EXPECT_TRUE(ran.has_value()) << (ran ? "" : ran.error().message);
  }
  Rows rows() {
    const std::int64_t nq = plan.shape.nq, k = plan.shape.topk;
    Rows rows{std::vector<std::int32_t>(static_cast<std::size_t>(nq * k)), std::vector<std::uint32_t>(static_cast<std::size_t>(nq * k))};
    EXPECT_TRUE(copy->fetch({dense_view<void>(rows.ids.data(), DType::i32, {nq, k}), dense_view<void>(rows.bits.data(), DType::f32, {nq, k})}));
    return rows;
  }
  [[nodiscard]] const Problem& problem() const { return on_device.q.present() ? on_device : copy->problem(); }

  std::unique_ptr<DeviceCopy> copy;
  Indexer indexer;
  Plan plan;
  Workspace workspace;
  Problem on_device;  // if a test made its own
};

Rows run(const Problem& problem, const Options& options) {
  OnDevice device(problem, options);
  device.enqueue();
  return device.rows();
}

// Requests of `next_n` queries each, whose draft tokens see one key more each; one of the requests sees few keys.
std::vector<Case> requests_of(int count, std::int64_t next_n, std::int64_t keys, std::int32_t heads, std::int32_t topk) {
  std::vector<Case> cases;
  for (int r = 0; r < count; ++r) {
    Case c = random_case(static_cast<std::uint64_t>(100 + r), next_n, keys + 37 * r, heads, kWide, topk);
    c.ke.resize(static_cast<std::size_t>(next_n));
    for (std::int64_t i = 0; i < next_n; ++i) c.ke[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(r == 1 ? 3 - i : keys - next_n + 1 + i);
    cases.push_back(std::move(c));
  }
  return cases;
}

void expect_same_in_pages(const std::vector<Case>& cases, const PageLayout& layout, const std::string& what) {
  std::vector<Problem> contiguous;
  Rows want;
  for (const Case& c : cases) {
    contiguous.push_back(c.problem());
    want.append(run(contiguous.back(), cuda_options(Method::dense)));
  }
  PagedProblem paged(contiguous, 7, layout);
  const TensorView owners = paged.problem().requests;
  for (const bool together : {true, false}) {  // queries of a request in one tile, or each for itself
    paged.problem().requests = together ? TensorView{} : owners;
    for (const Method method : {Method::dense, Method::dosa}) {
      EXPECT_TRUE(run(paged.problem(), cuda_options(method)) == want) << what << (together ? " together" : " alone");
    }
  }
}

class CudaDecode : public CudaTest {};

TEST_F(CudaDecode, EqualsContiguousKeysForEveryHeadCountAndNumberOfDraftTokens) {
  for (const std::int32_t heads : {1, 8, 12, 16, 32, 48, 64, 128}) {
    for (std::int64_t next_n = 1; next_n <= 8; ++next_n) {
      expect_same_in_pages(requests_of(3, next_n, 2100, heads, 70), {.gap = 32},
                           "heads " + std::to_string(heads) + " next_n " + std::to_string(next_n));
    }
  }
}

// Strides that the copy engine takes, and others.
TEST_F(CudaDecode, EqualsContiguousKeysForEveryPageSizeAndStride) {
  for (const std::int64_t page_size : {16, 32, 64, 128, 256}) {
    for (const std::int64_t gap : {0, 4, 20, 48, 4096}) {
      for (const std::int64_t keys : {1, 255, 257, 5000}) {
        expect_same_in_pages(requests_of(2, 2, keys, 32, 300), {.page_size = page_size, .gap = gap, .extra_columns = 40},
                             "page_size " + std::to_string(page_size) + " gap " + std::to_string(gap) + " keys " + std::to_string(keys));
      }
    }
  }
}

TEST_F(CudaDecode, ManyRequestsOfAnyLengths) {
  std::vector<Case> cases;
  std::vector<Problem> contiguous;
  Random random(3);
  Rows want;
  for (std::uint64_t r = 0; r < 150; ++r) {
    cases.push_back(random_case(r, 2, 1 + static_cast<std::int64_t>(random() % (r % 10 == 0 ? 9000 : 700)), 16, kWide, 50));
    cases.back().ks = {static_cast<std::int32_t>(random() % 300) - 20, 0};
  }
  for (const Case& c : cases) {
    contiguous.push_back(c.problem());
    want.append(run(contiguous.back(), cuda_options(Method::dense)));
  }
  PagedProblem paged(contiguous, 5, {.gap = 64});
  paged.problem().requests = {};
  for (const Method method : {Method::dense, Method::dosa}) EXPECT_TRUE(run(paged.problem(), cuda_options(method)) == want);
}

// Gathered: more queries of a request than are scored in pages.
TEST_F(CudaDecode, PrefillOverPagesEqualsContiguousKeys) {
  const auto trace = Trace::open(std::string(DOSA_TRACES) + "/demo-h32.safetensors");
  ASSERT_TRUE(trace.has_value());
  const Problem problem = trace->problem();
  const Rows want = run(problem, cuda_options(Method::dense));
  for (const std::int64_t gap : {0, 20}) {
    const PagedProblem paged({&problem, 1}, 5, {.gap = gap});
    for (const Method method : {Method::dense, Method::dosa}) {
      OnDevice device(paged.problem(), cuda_options(method));
      device.enqueue();
      EXPECT_TRUE(device.rows() == want) << gap;
      EXPECT_EQ(device.indexer.counters(device.plan, device.workspace)->path.dosa > 0, method == Method::dosa);
    }
  }
}

// Entries of the table that visible keys need are no pages: those keys read as zero, and nothing outside the pool is read.
TEST_F(CudaDecode, PagesThatDoNotExistReadAsZero) {
  const Case c = random_case(4, 3, 700, 8, kWide, 300);
  const Problem contiguous = c.problem();
  for (const std::int64_t gap : {0, 20}) {
    PagedProblem paged({&contiguous, 1}, 3, {.gap = gap});
    paged.table()[2] = -1;
    paged.table()[5] = std::numeric_limits<std::int32_t>::max();
    paged.table()[7] = static_cast<std::int32_t>(paged.problem().kv_cache.shape[0]);
    expect_exact_on_gpu(paged.problem());
  }
}

// Pages beyond 8 GiB; where an offset cut to 31, 32 or 33 bits would land, there is poison.
TEST_F(CudaDecode, HighPages) {
  constexpr std::int64_t stride = 1 << 20, pages = 8210;
  std::size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  if (free < static_cast<std::size_t>(2 * pages * stride)) GTEST_SKIP() << "the GPU has no room for a pool of 8.6 GB";
  DeviceArray<std::uint8_t> pool(static_cast<std::size_t>(pages * stride));
  const std::vector<std::int32_t> ids = {8209, 4103};
  constexpr std::size_t bytes = kPage * (kWide + 4);
  for (const std::int64_t id : ids) {
    for (const int wrap : {31, 32, 33}) ASSERT_EQ(cudaMemset(pool.get() + id * stride % (std::int64_t{1} << wrap), 0x7F, bytes), cudaSuccess);
  }
  const DeviceArray<std::int32_t> table(ids);
  for (const std::int64_t queries : {2, 20}) {  // the more are gathered for
    const Case c = random_case(11, queries, 2 * kPage, 4, kWide, 100);
    for (std::size_t n = 0; n < 2; ++n) {
      std::uint8_t* page = pool.get() + ids[n] * stride;
      ASSERT_EQ(cudaMemcpy(page, c.k.data() + n * kPage * kWide, kPage * kWide, cudaMemcpyHostToDevice), cudaSuccess);
      ASSERT_EQ(cudaMemcpy(page + kPage * kWide, c.k_scale.data() + n * kPage, kPage * 4, cudaMemcpyHostToDevice), cudaSuccess);
    }
    const Problem contiguous = c.problem();
    const Rows want = run(contiguous, cuda_options(Method::dense));
    const PagedProblem small({&contiguous, 1}, 1);
    OnDevice device(small.problem(), cuda_options(Method::dense));
    device.on_device = device.copy->problem();
    device.on_device.kv_cache = dense_view<const void>(pool.get(), DType::f8_e4m3, {pages, kPage, 1, kWide + 4}, Device::cuda);
    device.on_device.kv_cache.stride[0] = stride;
    device.on_device.block_table = dense_view<const void>(table.get(), DType::i32, {1, 2}, Device::cuda);
    device.enqueue();
    EXPECT_TRUE(device.rows() == want);
  }
}

TEST_F(CudaDecode, TablesWithStridesOfTheirOwn) {
  const std::vector<Case> cases = requests_of(3, 2, 900, 16, 60);
  std::vector<Problem> contiguous;
  Rows want;
  for (const Case& c : cases) {
    contiguous.push_back(c.problem());
    want.append(run(contiguous.back(), cuda_options(Method::dense)));
  }
  PagedProblem paged(contiguous, 3, {.extra_columns = 6});
  paged.problem().requests = {};
  const TensorView narrow = paged.problem().block_table;
  const std::int64_t columns = narrow.shape[1], pitch = 2 * columns + 5;
  std::vector<std::int32_t> wide(static_cast<std::size_t>(3 * pitch), 12345678);
  for (std::int64_t r = 0; r < 3; ++r) {
    for (std::int64_t m = 0; m < columns; ++m) wide[static_cast<std::size_t>((2 - r) * pitch + 3 + 2 * m)] = *narrow.at<std::int32_t>(r, m);
  }
  const DeviceArray<std::int32_t> table(wide);
  for (const Method method : {Method::dense, Method::dosa}) {
    OnDevice device(paged.problem(), cuda_options(method));
    device.on_device = device.copy->problem();
    device.on_device.block_table.data = table.get() + 2 * pitch + 3;
    device.on_device.block_table.stride = {-pitch, 2};
    device.enqueue();
    EXPECT_TRUE(device.rows() == want);
  }
}

// A plan for the nominal maximum, captured once; lengths and tables change between replays.
TEST_F(CudaDecode, AGraphIsReplayedWithOtherLengths) {
  const std::vector<Case> cases = requests_of(4, 2, 20000, 32, 500);
  std::vector<Problem> contiguous;
  for (const Case& c : cases) contiguous.push_back(c.problem());
  PagedProblem paged(contiguous, 3, {.extra_columns = 100});
  paged.problem().requests = {};
  for (const Method method : {Method::dense, Method::dosa}) {
    OnDevice device(paged.problem(), cuda_options(method), 520);
    CapturedStream captured;
    device.workspace.stream = captured.stream();
    captured.capture([&] { device.enqueue(); });
    Random random(1);
    for (int replay = 0; replay < 8; ++replay) {
      std::vector<std::int32_t> ke(8);
      for (auto& end : ke) {
        const auto some = static_cast<std::int32_t>(random() % 50);
        end = replay % 3 == 2 ? 14 * some - (replay == 5 ? 690 : 0) : 19000 + 50 * replay + some;
      }
      ASSERT_EQ(cudaMemcpy(const_cast<void*>(device.problem().ke.data), ke.data(), ke.size() * 4, cudaMemcpyHostToDevice), cudaSuccess);
      captured.replay();
      Rows want;
      for (std::size_t r = 0; r < 4; ++r) {
        Problem changed = contiguous[r];
        changed.ke = dense_view<const void>(ke.data() + 2 * r, DType::i32, {2});
        want.append(run(changed, cuda_options(Method::dense)));
      }
      ASSERT_TRUE(device.rows() == want) << "replay " << replay;
      if (replay == 1) {  // a little longer than the first step, whose last draft tokens' winners it knows
        EXPECT_GE(device.indexer.counters(device.plan, device.workspace)->path.dosa, method == Method::dosa ? 4 : 0);
      }
    }
  }
}

// Hints may be anything: good ones, none, too few, the worst keys (too many scores reach their tau), one key again and again (too
// few do), ids of no key. Rows that they mislead are scored in full.
TEST_F(CudaDecode, HintsOfAnyKind) {
  constexpr std::int64_t keys = 30000, requests = 3, next_n = 2, nq = requests * next_n;
  constexpr std::int32_t topk = 600;
  const std::vector<Case> cases = requests_of(requests, next_n, keys, 32, topk);
  std::vector<Problem> contiguous;
  Rows want;
  for (const Case& c : cases) {
    contiguous.push_back(c.problem());
    want.append(run(contiguous.back(), cuda_options(Method::dense)));
  }
  PagedProblem paged(contiguous, 3, {.gap = 32});
  const TensorView owners = paged.problem().requests;
  Random random(9);
  const auto expect = [&](const std::vector<std::int32_t>& hints, std::int64_t rows, std::int64_t found, const char* what) {
    for (const bool together : {true, false}) {
      Problem problem = paged.problem();
      problem.requests = together ? TensorView{} : owners;
      problem.hints = dense_view<const void>(hints.data(), DType::i32, {rows, static_cast<std::int64_t>(hints.size()) / rows});
      for (const Method method : {Method::dosa, Method::fused}) {
        OnDevice device(problem, cuda_options(method));
        device.enqueue();
        EXPECT_TRUE(device.rows() == want) << what;
        const PathCounts path = device.indexer.counters(device.plan, device.workspace)->path;
        EXPECT_EQ(path.short_rows, 2) << what;
        if (found >= 0) {
          EXPECT_EQ(path.dosa, found) << what;
        }
        EXPECT_EQ(path.dosa + path.full_loose, nq - 2) << what;
      }
    }
  };
  std::vector<std::int32_t> winners = want.ids;
  expect(winners, nq, 4, "winners of every row");
  winners[3] = winners[8] = -5;
  winners[2 * topk * next_n + 1] = std::numeric_limits<std::int32_t>::min();
  expect(winners, nq, 2, "a winner too few of two rows");
  std::vector<std::int32_t> some(requests * 2 * topk);
  for (auto& id : some) id = static_cast<std::int32_t>(random());
  expect(some, requests, 0, "nonsense");
  for (std::size_t i = 0; i < some.size(); ++i) some[i] = want.ids[i / (2 * topk) * next_n * topk];
  expect(some, requests, -1, "the best key again and again");
  for (std::size_t i = 0; i < some.size(); ++i) some[i] = static_cast<std::int32_t>(i % (2 * topk) * 24);
  expect(some, requests, -1, "spread keys");
  for (std::size_t i = 0; i < some.size(); ++i) some[i] = i % (2 * topk) < topk ? want.ids[i / (2 * topk) * next_n * topk + i % (2 * topk)] : -1;
  expect(some, requests, -1, "winners of the first row");
  expect(std::vector<std::int32_t>(40, 7), 1, 0, "few");
  expect(std::vector<std::int32_t>(5000, 7), 1, -1, "more than are looked at");
}

// Recent winners that are left behind must be those that the cpu backend leaves, whatever was there before.
void expect_exact_stream(Method method, IndexSpace space, std::int64_t gap, std::uint64_t seed, int steps) {
  Random random(seed);
  Engine engine(seed, kWide, gap);
  std::int64_t screened = 0;
  for (int n = 0; n < steps; ++n) {
    const auto next_n = static_cast<std::int64_t>(1 + random() % 4);
    for (std::int64_t r = 0; r < kRequests; ++r) {
      if (engine.length(r) + 2 * next_n + 8 > kRoom) engine.restart(r);
      engine.append(r, next_n);
    }
    const DecodeStep step = engine.step(next_n);
    OnDevice device(*decode_problem(step), cuda_options(method, space), kRecent);
    const void* recent = device.copy->selection().recent.data;
    constexpr std::size_t bytes = kRequests * kRecent * sizeof(std::int32_t);
    ASSERT_EQ(cudaMemcpy(const_cast<void*>(recent), engine.recent(0).data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
    device.enqueue();
    Rows want;
    for (std::int64_t r = 0; r < kRequests; ++r) {
      Rows rows = run(engine.contiguous(r, next_n), cuda_options(Method::dense));
      std::vector<std::int32_t> winners, scratch(kTopk);
      for (std::int64_t row = 0; row < next_n; ++row) {
        if (rows.ids[static_cast<std::size_t>(row * kTopk)] < 0) continue;
        const auto first = rows.ids.begin() + row * kTopk;
        winners.assign(first, std::find(first, first + kTopk, -1));
      }
      if (!winners.empty()) remember(winners, engine.recent(r), scratch, hwy::Sorter());
      if (space == IndexSpace::slot) {
        for (std::int32_t& id : rows.ids) id = engine.slot_of(r, id);
      }
      want.append(rows);
    }
    ASSERT_TRUE(device.rows() == want) << "step " << n;
    std::vector<std::int32_t> left(kRequests * kRecent);
    ASSERT_EQ(cudaMemcpy(left.data(), recent, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    ASSERT_TRUE(std::equal(left.begin(), left.end(), engine.recent(0).data())) << "recent after step " << n;
    screened += device.indexer.counters(device.plan, device.workspace)->path.dosa;
    for (std::int64_t r = 0; r < kRequests; ++r) engine.grow(r, 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(next_n)));
    disturb(engine, random);
  }
  EXPECT_EQ(screened > 0, method == Method::dosa);
}

TEST_F(CudaDecode, AStreamOfManySteps) {
  expect_exact_stream(Method::dense, IndexSpace::absolute, 28, 1, 150);
  expect_exact_stream(Method::dosa, IndexSpace::slot, 32, 2, 1000);
  expect_exact_stream(Method::dosa, IndexSpace::absolute, 28, 3, 150);
}

}  // namespace
}  // namespace dosa::test
