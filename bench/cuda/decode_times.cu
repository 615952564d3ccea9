// Times steps of decoding on the device, keys in pages of 64, method by method in one process: plain launches of one step, and a
// graph of all steps replayed, as the graph of a model holds the selections of all layers. Times are of one step. Ids and score
// bits of all methods must be equal. One line a case.
//
//   decode_times [most GiB of keys [heads ...]]
//
// Queries drift from step to step (correlation 0.98), so that recent winners mean something. Where all keys might fit the L2
// cache, copies of the requests, each with keys and recent winners of its own, are decoded in turn.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/inputs.cuh"
#include "cuda/timing.cuh"
#include "dosa/decode.hpp"
#include "dosa/indexer.hpp"

namespace {

using namespace dosa;
using bench::allocate;
using bench::check;
using bench::elapsed_ms;
using bench::median;

constexpr int kPage = 64, kDim = 128, kTopk = 2048, kRecent = kTopk + kTopk / 8, kSteps = 8;
constexpr std::int64_t kPageBytes = kPage * (kDim + 4);

// One warp a key.
__global__ void make_pages(std::uint8_t* pool, std::int64_t keys, std::uint64_t seed) {
  const std::int64_t key = (blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x) / 32;
  const unsigned lane = threadIdx.x % 32;
  if (key >= keys) return;
  float x[4], largest = 1e-4F;
  for (unsigned i = 0; i < 4; ++i) {
    x[i] = bench::normal(seed + static_cast<std::uint64_t>(key) * 128 + lane * 4 + i);
    largest = fmaxf(largest, fabsf(x[i]));
  }
  for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, d));
  const float scale = largest / 448.0F;
  std::uint32_t packed = 0;
  for (unsigned i = 0; i < 4; ++i) {
    packed |= static_cast<std::uint32_t>(__nv_cvt_float_to_fp8(x[i] / scale, __NV_SATFINITE, __NV_E4M3)) << (8 * i);
  }
  std::uint8_t* page = pool + key / kPage * kPageBytes;
  reinterpret_cast<std::uint32_t*>(page + key % kPage * kDim)[lane] = packed;
  if (lane == 0) reinterpret_cast<float*>(page + kPage * kDim)[key % kPage] = scale;
}

// Queries of step `step`: the first one's, and noise that grows.
__global__ void make_queries(std::uint8_t* q, std::int64_t rows, int step, std::uint64_t seed) {
  const std::int64_t row = (blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x) / 32;
  const unsigned lane = threadIdx.x % 32;
  if (row >= rows) return;
  std::uint32_t packed = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const std::uint64_t at = static_cast<std::uint64_t>(row) * 128 + lane * 4 + i;
    const float x = 0.99F * bench::normal(seed + at) + 0.141F * bench::normal(seed + (static_cast<std::uint64_t>(step + 1) << 36) + at);
    packed |= static_cast<std::uint32_t>(__nv_cvt_float_to_fp8(100.0F * x, __NV_SATFINITE, __NV_E4M3)) << (8 * i);
  }
  reinterpret_cast<std::uint32_t*>(q)[row * 32 + lane] = packed;
}

template <std::size_t kRank>
TensorView view(const void* data, DType dtype, const std::int64_t (&shape)[kRank]) {
  return dense_view(data, dtype, shape, Device::cuda);
}

unsigned warps(std::int64_t rows) { return static_cast<unsigned>((rows * 32 + 255) / 256); }

struct Contender {
  Indexer indexer;
  Plan plan;
  std::uint8_t* workspace;
  std::int32_t* ids;
  float* scores;
  std::int32_t* recent;  // [copies][requests][kRecent]
  cudaGraphExec_t graph = nullptr;
  std::vector<float> plain, replayed;

  Contender(Method m, const Problem& problem, std::int64_t copies) : indexer(std::move(*Indexer::create(options(m)))), plan(*indexer.plan(shape_of(problem))) {
    const std::int64_t nq = plan.shape.nq;
    workspace = allocate<std::uint8_t>(plan.workspace_bytes);
    ids = allocate<std::int32_t>(nq * kTopk);
    scores = allocate<float>(nq * kTopk);
    recent = allocate<std::int32_t>(copies * plan.shape.requests * kRecent);
    check(cudaMemset(recent, 0xFF, static_cast<std::size_t>(copies * plan.shape.requests * kRecent) * 4));
  }
  ~Contender() {
    for (void* p : {static_cast<void*>(workspace), static_cast<void*>(ids), static_cast<void*>(scores), static_cast<void*>(recent)}) cudaFree(p);
    cudaGraphExecDestroy(graph);
  }
  static Options options(Method m) {
    Options o;
    o.backend = Backend::cuda;
    o.method = m;
    return o;
  }
  void enqueue(const Problem& problem, std::int64_t copy, cudaStream_t stream) const {
    const std::int64_t nq = plan.shape.nq;
    const Selection out{dense_view<void>(ids, DType::i32, {nq, kTopk}, Device::cuda), dense_view<void>(scores, DType::f32, {nq, kTopk}, Device::cuda),
                        dense_view<void>(recent + copy * plan.shape.requests * kRecent, DType::i32, {plan.shape.requests, kRecent}, Device::cuda)};
    const auto ran = indexer.run(plan, problem, out, {workspace, plan.workspace_bytes, stream});
    if (!ran) {
      std::fprintf(stderr, "%s\n", ran.error().message.c_str());
      std::exit(1);
    }
  }
};

void run_case(std::int64_t batch, std::int64_t keys, int heads) {
  const std::int64_t copies = batch * keys < (1 << 20) ? 4 : batch * keys < (1 << 21) ? 2 : 1;
  const std::int64_t pages = batch * keys / kPage, all_pages = pages * copies;
  auto* pool = allocate<std::uint8_t>(all_pages * kPageBytes);
  make_pages<<<warps(all_pages * kPage), 256>>>(pool, all_pages * kPage, 2ULL << 40);
  std::vector<std::int32_t> table(static_cast<std::size_t>(all_pages)), lengths(static_cast<std::size_t>(batch));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(1));
  for (std::int64_t b = 0; b < batch; ++b) lengths[static_cast<std::size_t>(b)] = static_cast<std::int32_t>(keys - b % 50);
  auto* device_table = allocate<std::int32_t>(table.size());
  auto* device_lengths = allocate<std::int32_t>(lengths.size());
  check(cudaMemcpy(device_table, table.data(), table.size() * 4, cudaMemcpyHostToDevice));
  check(cudaMemcpy(device_lengths, lengths.data(), lengths.size() * 4, cudaMemcpyHostToDevice));
  auto* w = allocate<float>(batch * heads);
  bench::make_weights<<<static_cast<unsigned>((batch * heads + 255) / 256), 256>>>(w, batch * heads, 3ULL << 40);
  std::vector<Problem> steps;
  std::vector<std::uint8_t*> queries;
  for (int step = 0; step < kSteps; ++step) {
    auto* q = allocate<std::uint8_t>(batch * heads * kDim);
    queries.push_back(q);
    make_queries<<<warps(batch * heads), 256>>>(q, batch * heads, step, 1ULL << 40);
    steps.push_back(*decode_problem({view(q, DType::f8_e4m3, {batch, 1, heads, kDim}), view(w, DType::f32, {batch, heads}),
                                     view(pool, DType::f8_e4m3, {all_pages, kPage, 1, kDim + 4}),
                                     view(device_table + step % copies * pages, DType::i32, {batch, keys / kPage}),
                                     view(device_lengths, DType::i32, {batch, 1}), kTopk}));
  }
  check(cudaDeviceSynchronize());

  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  {
    std::vector<std::unique_ptr<Contender>> contenders;
    for (const Method method : {Method::dense, Method::dosa}) contenders.push_back(std::make_unique<Contender>(method, steps.front(), copies));
    bool equal = true;
    for (auto& c : contenders) {
      cudaGraph_t graph = nullptr;
      check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
      for (int step = 0; step < kSteps; ++step) c->enqueue(steps[static_cast<std::size_t>(step)], step % copies, stream);
      check(cudaStreamEndCapture(stream, &graph));
      check(cudaGraphInstantiate(&c->graph, graph, 0));
      check(cudaGraphDestroy(graph));
    }
    for (int round = 0; round < 8; ++round) {  // the first one warms up
      for (auto& c : contenders) {
        const float replayed = elapsed_ms(stream, [&] { check(cudaGraphLaunch(c->graph, stream)); }) / kSteps;
        const auto step = static_cast<std::size_t>(kSteps - 1);
        const float plain = elapsed_ms(stream, [&] { c->enqueue(steps[step], static_cast<std::int64_t>(step) % copies, stream); });
        if (round > 0) c->plain.push_back(plain), c->replayed.push_back(replayed);
      }
      const auto cells = static_cast<std::size_t>(batch * kTopk);
      const Contender &a = *contenders[0], &b = *contenders[1];
      equal = equal && bench::download(a.ids, cells) == bench::download(b.ids, cells) &&
              bench::download(reinterpret_cast<std::uint32_t*>(a.scores), cells) == bench::download(reinterpret_cast<std::uint32_t*>(b.scores), cells);
    }
    const auto stats = *contenders[1]->indexer.counters(contenders[1]->plan, {contenders[1]->workspace, contenders[1]->plan.workspace_bytes, stream});
    cudaDeviceProp gpu{};
    check(cudaGetDeviceProperties(&gpu, 0));
    const double floor = static_cast<double>(batch * keys) * 132 / 4577e9 * 1e3;
    std::printf("{\"stage\":\"decode\",\"gpu\":\"%s\",\"heads\":%d,\"batch\":%lld,\"nk\":%lld,\"dense_ms\":%.4f,\"dense_graph_ms\":%.4f,\"dosa_ms\":%.4f,"
                "\"dosa_graph_ms\":%.4f,\"read_once_ms\":%.4f,\"rows\":%lld,\"dosa_rows\":%lld,\"equal\":%s}\n",
                gpu.name, heads, static_cast<long long>(batch), static_cast<long long>(keys), median(contenders[0]->plain), median(contenders[0]->replayed),
                median(contenders[1]->plain), median(contenders[1]->replayed), floor, static_cast<long long>(stats.rows),
                static_cast<long long>(stats.path.dosa), equal ? "true" : "false");
    std::fflush(stdout);
  }
  check(cudaStreamDestroy(stream));
  for (std::uint8_t* q : queries) cudaFree(q);
  for (void* p : {static_cast<void*>(pool), static_cast<void*>(device_table), static_cast<void*>(device_lengths), static_cast<void*>(w)}) cudaFree(p);
}

}  // namespace

int main(int argc, char** argv) {
  if (const std::string reason = unavailable_reason(Backend::cuda); !reason.empty()) {
    std::puts(reason.c_str());
    return 0;
  }
  const double most = (argc > 1 ? std::atof(argv[1]) : 20.0) * 1073741824.0;
  std::vector<int> heads;
  for (int i = 2; i < argc; ++i) heads.push_back(std::atoi(argv[i]));
  if (heads.empty()) heads = {32, 64};
  for (const int h : heads) {
    for (const std::int64_t batch : {1, 8, 64}) {
      for (const std::int64_t keys : {1 << 18, 1 << 19, 1 << 20}) {
        if (static_cast<double>(batch * keys) * 132 <= most) run_case(batch, keys, h);
      }
    }
  }
  return 0;
}
