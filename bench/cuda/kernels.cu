// Times the device stages one by one and prints a JSON line a case. Every line says whether what was timed was also right:
// scores and screen decisions are compared with the emulator at sampled places, refined records with the dense scores, all of
// them.
//
//   dosa-cuda-kernels [repeats]
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <string>

#include "base/dtype.hpp"
#include "cuda/inputs.cuh"
#include "cuda/timing.cuh"
#include "score/reference.hpp"

namespace dosa::bench {
namespace {

using namespace cuda;

std::string gpu;
int multiprocessors = 0;
int repeats = 5;

struct Times {
  double median;
  double least;
};

Times timed(const std::function<void()>& run) {
  const std::vector<float> ms = times_ms(repeats, [&](int) { run(); });
  return {median(ms), *std::ranges::min_element(ms)};
}

double causal_pairs(std::int64_t nq, std::int64_t nk) {
  return static_cast<double>(nq) * static_cast<double>(nk) - static_cast<double>(nq) * static_cast<double>(nq - 1) / 2;
}

void print(const char* stage, int size, std::int64_t nq, std::int64_t nk, Times t, double work, const char* unit, long long compared,
           long long different) {
  std::printf(
      "{\"stage\":\"%s\",\"gpu\":\"%s\",\"%s\":%d,\"nq\":%lld,\"nk\":%lld,\"ms\":%.3f,\"ms_least\":%.3f,\"repeats\":%d,\"%s\":%.3f,"
      "\"compared\":%lld,\"different\":%lld}\n",
      stage, gpu.c_str(), std::string(stage) == "screen" || std::string(stage) == "compact" ? "budget" : "heads", size,
      static_cast<long long>(nq), static_cast<long long>(nk), t.median, t.least, repeats, unit, work, compared, different);
  std::fflush(stdout);
}

std::vector<std::uint8_t> bytes(const std::uint8_t* from, std::int64_t count) { return download(from, static_cast<std::size_t>(count)); }

void bench_score(int heads, std::int64_t nq, std::int64_t nk) {
  const Inputs in = make_inputs(heads, nq, nk);
  auto* scores = allocate<float>(nq * nk);
  const ScoreArgs args{.in = in, .first_row = 0, .rows = nq, .keys = every_key(nk), .key_begin = 0, .key_end = nk, .scores = scores, .score_stride = nk};
  const Times t = timed([&] { check(launch_score(args, multiprocessors, nullptr), "score"); });

  constexpr int kSamples = 400;
  int different = 0;
  for (int i = 0; i < kSamples; ++i) {
    const std::int64_t row = i * 7919LL % nq;
    const std::int64_t key = i * 13762439LL % (nk - nq + row + 1);
    const auto q = bytes(in.q + row * heads * kDim, heads * kDim);
    const auto k = bytes(in.k + key * kDim, kDim);
    const auto w = download(in.w + row * in.w_stride, heads);
    const float expected = reference_score(ReferenceScorer::sm90, q, w, k, download(in.k_scale + key, 1)[0]);
    const float actual = download(scores + row * nk + key, 1)[0];
    different += std::bit_cast<std::uint32_t>(expected) != std::bit_cast<std::uint32_t>(actual) ? 1 : 0;
  }
  print("score", heads, nq, nk, t, causal_pairs(nq, nk) * heads * 2 * kDim / t.median * 1e-12, "pflops", kSamples, different);
  cudaFree(scores);
  free_inputs(in);
}

/// One id of every `every` keys that a row sees, in order.
__global__ void make_lists(std::int32_t* ids, std::int64_t* offset, std::int32_t* count, const std::int32_t* ke, int every, int room) {
  const std::int64_t row = blockIdx.x;
  const int n = min(ke[row] / every, room);
  if (threadIdx.x == 0) {
    offset[row] = row * room;
    count[row] = n;
  }
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
    ids[row * room + i] = i * every + static_cast<int>(mix(row * 1000003ULL + i) % every);
  }
}

/// Records whose score differs from the dense one, and listed keys that should be records. Lists are of groups of rows.
__global__ void compare_records(RefineArgs args, const float* scores, std::int64_t stride, unsigned long long* out) {
  const std::int64_t row = blockIdx.x, group = row / group_rows(args.in.heads);
  unsigned long long different = 0;
  unsigned long long expected = 0;
  for (int i = static_cast<int>(threadIdx.x); i < args.found.count[row]; i += static_cast<int>(blockDim.x)) {
    const Record record = args.found.records[row * args.found.stride + i];
    const float score = scores[row * stride + (static_cast<std::uint32_t>(record) >> 1)];
    const std::uint32_t bits = __float_as_uint(score + 0.0F);
    different += static_cast<std::uint32_t>(record >> 32) != ((bits & 0x80000000U) != 0 ? bits : 0x7FFFFFFFU - bits) ? 1 : 0;
  }
  for (int i = static_cast<int>(threadIdx.x); i < args.count[group]; i += static_cast<int>(blockDim.x)) {
    const int id = args.ids[args.offset[group] + i];
    expected += id < args.in.ke[row] && !(scores[row * stride + id] < args.tau[row]) ? 1 : 0;
  }
  atomicAdd(&out[0], different);
  atomicAdd(&out[1], expected);
  if (threadIdx.x == 0) atomicAdd(&out[2], static_cast<unsigned long long>(args.found.count[row]));
}

void bench_refine(int heads, std::int64_t nq, std::int64_t nk) {
  constexpr int kEvery = 33;  // 3 % are listed
  const Inputs in = make_inputs(heads, nq, nk);
  auto* scores = allocate<float>(nq * nk);
  check(launch_score({.in = in, .first_row = 0, .rows = nq, .keys = every_key(nk), .key_begin = 0, .key_end = nk, .scores = scores, .score_stride = nk},
                     multiprocessors, nullptr),
        "score");
  const int room = static_cast<int>(nk / kEvery) + 1;
  const std::int64_t groups = (nq + group_rows(heads) - 1) / group_rows(heads);
  auto* ids = allocate<std::int32_t>(groups * room);
  auto* offset = allocate<std::int64_t>(groups);
  auto* count = allocate<std::int32_t>(groups);
  auto* records = allocate<Record>(nq * room);
  auto* record_count = allocate<std::int32_t>(nq);
  auto* lost = allocate<std::uint8_t>(nq);
  auto* tau = allocate<float>(nq);
  auto* out = allocate<unsigned long long>(3);
  make_lists<<<static_cast<unsigned>(groups), 256>>>(ids, offset, count, in.ke, kEvery, room);
  std::vector<float> threshold(nq);  // about a tenth is not below
  for (std::int64_t row = 0; row < nq; ++row) {
    auto sample = download(scores + row * nk, 1000);
    std::nth_element(sample.begin(), sample.begin() + 900, sample.end());
    threshold[row] = sample[900];
  }
  cudaMemcpy(tau, threshold.data(), nq * sizeof(float), cudaMemcpyHostToDevice);
  const RefineArgs args{.in = in, .first_row = 0, .rows = nq, .ids = ids, .offset = offset, .count = count, .screened = nullptr,
                        .tau = tau, .found = {records, room, record_count, lost}};
  const Times t = timed([&] {
    cudaMemsetAsync(record_count, 0, nq * sizeof(std::int32_t));
    check(launch_refine(args, multiprocessors, nullptr), "refine");
  });

  cudaMemset(out, 0, 3 * sizeof(unsigned long long));
  compare_records<<<static_cast<unsigned>(nq), 256>>>(args, scores, nk, out);
  const auto counts = download(out, 3);
  double pairs = 0;
  for (const std::int32_t n : download(count, groups)) pairs += n * group_rows(heads);
  print("refine", heads, nq, nk, t, t.median * 1e9 / pairs, "ps_per_pair", static_cast<long long>(counts[1]),
        static_cast<long long>(counts[0] + (counts[1] > counts[2] ? counts[1] - counts[2] : counts[2] - counts[1])));
  for (void* p : {static_cast<void*>(scores), static_cast<void*>(ids), static_cast<void*>(offset), static_cast<void*>(count),
                  static_cast<void*>(records), static_cast<void*>(record_count), static_cast<void*>(lost), static_cast<void*>(tau),
                  static_cast<void*>(out)}) {
    cudaFree(p);
  }
  free_inputs(in);
}

__global__ void make_bounds(std::uint16_t* weight, float* c, float* sigma, float* tau, std::int32_t* list, std::int64_t rows, int per_row,
                            float at) {
  const std::int64_t row = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < per_row; i += static_cast<int>(blockDim.x)) {
    weight[row * per_row + i] = static_cast<std::uint16_t>(__float_as_uint(0.01F * (normal((7ULL << 40) + row * per_row + i) - 0.5F)) >> 16);
  }
  if (threadIdx.x != 0) return;
  c[row] = 0.001F;
  sigma[2 * row] = 0.01F;
  sigma[2 * row + 1] = 0.0001F;
  tau[row] = at;
  list[row] = static_cast<std::int32_t>(row);
}

__global__ void fill(float* to, std::int64_t count, float value) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (i < count) to[i] = value;
}

float dot(const std::uint8_t* a, const std::uint8_t* b) { return sm90_dot(a, b, kDim); }

float rounded_to_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000U);
}

/// Made-up bounds of which a few percent survive.
void bench_screen(std::int64_t nq, std::int64_t nk) {
  constexpr int kRows = 32;
  const Inputs in = make_inputs(kRows, nq, nk);  // heads stand for bound rows
  auto* weight = allocate<std::uint16_t>(nq * kRows);
  auto* c = allocate<float>(nq);
  auto* sigma = allocate<float>(2 * nq);
  auto* tau = allocate<float>(nq);
  auto* list = allocate<std::int32_t>(nq);
  auto* list_size = allocate<std::int32_t>(1);
  auto* rho = allocate<float>(nk);
  auto* inv_alpha = allocate<float>(nk);
  auto* mask = allocate<std::uint32_t>(nq * mask_words(nk));
  const std::int64_t capacity = std::int64_t{1} << 31;
  auto* ids = allocate<std::int32_t>(capacity);
  auto* offset = allocate<std::int64_t>(nq);
  auto* count = allocate<std::int32_t>(nq);
  auto* lost_rows = allocate<std::uint8_t>(nq);
  check(cudaMemset(lost_rows, 0, nq), "memset");
  const auto blocks = static_cast<unsigned>((nk + 255) / 256);
  fill<<<blocks, 256>>>(rho, nk, 1.0F);
  fill<<<blocks, 256>>>(inv_alpha, nk, 1.0F);
  const KeySlice all_keys = slice_of(nk, 0, 1);
  const auto rows = static_cast<std::int32_t>(nq);
  cudaMemcpy(list_size, &rows, sizeof rows, cudaMemcpyHostToDevice);
  for (const int budget : {8, 12, 16, 20, 24, 32}) {
    const float at = 2000.0F * std::sqrt(static_cast<float>(budget));
    make_bounds<<<static_cast<unsigned>(nq), 32>>>(weight, c, sigma, tau, list, nq, kRows, at);
    const ScreenArgs args{.k = in.k, .rho = rho, .inv_alpha = inv_alpha, .exempt = nullptr, .ks = in.ks, .ke = in.ke,
                          .first_row = 0, .keys = all_keys, .budget = budget, .list = list, .list_size = list_size,
                          .list_capacity = nq, .bound_rows = in.q, .bound_stride = kRows * kDim, .weight = weight, .weight_stride = kRows,
                          .c = c, .sigma = sigma, .tau = tau, .mask = mask, .mask_stride = mask_words(nk)};
    const Times t = timed([&] { check(launch_screen(args, multiprocessors, nullptr), "screen"); });

    constexpr int kSamples = 200;
    int different = 0;
    for (int i = 0; i < kSamples; ++i) {
      const std::int64_t row = i * 7919LL % nq;
      const std::int64_t key = i * 13762439LL % (nk - nq + row + 1);
      const auto q = bytes(in.q + row * kRows * kDim, budget * kDim);
      const auto k = bytes(in.k + key * kDim, kDim);
      const auto w = download(weight + row * kRows, kRows);
      double u = 0.001 - at - 0.01 * dot(&q[(budget - 2) * kDim], k.data()) - 0.0001 * dot(&q[(budget - 1) * kDim], k.data());
      for (int j = 0; j < budget - 2; ++j) {
        const float x = rounded_to_bf16(std::max(dot(&q[j * kDim], k.data()), 0.0F));
        u += static_cast<double>(std::bit_cast<float>(std::uint32_t{w[j]} << 16)) * x;
      }
      const MaskBit bit = mask_bit(key);
      const bool survives = (download(mask + row * mask_words(nk) + bit.word, 1)[0] >> bit.bit & 1U) != 0;
      different += survives != (u >= 0) && std::abs(u) > 0.01 ? 1 : 0;
    }
    print("screen", budget, nq, nk, t, causal_pairs(nq, nk) * budget * 2 * kDim / t.median * 1e-12, "pflops", kSamples, different);

    const CompactArgs lists{.ks = in.ks, .ke = in.ke, .first_row = 0, .rows = nq, .keys = all_keys, .mask = mask,
                            .mask_stride = mask_words(nk), .screened = nullptr, .group = 1, .capacity = capacity, .ids = ids, .offset = offset,
                            .count = count, .lost = lost_rows, .survivors = nullptr, .listed = nullptr};
    const Times tc = timed([&] { check(launch_compact(lists, nullptr), "compact"); });
    double survivors = 0;
    for (const std::int32_t n : download(count, nq)) survivors += n;
    long long lost = 0;
    for (const std::uint8_t o : download(lost_rows, nq)) lost += o;
    print("compact", budget, nq, nk, tc, tc.median * 1e9 / survivors, "ps_per_survivor", static_cast<long long>(survivors), lost);
  }
  for (void* p : {static_cast<void*>(weight), static_cast<void*>(c), static_cast<void*>(sigma), static_cast<void*>(tau),
                  static_cast<void*>(list), static_cast<void*>(list_size), static_cast<void*>(rho), static_cast<void*>(inv_alpha),
                  static_cast<void*>(mask), static_cast<void*>(ids), static_cast<void*>(offset), static_cast<void*>(count),
                  static_cast<void*>(lost_rows)}) {
    cudaFree(p);
  }
  free_inputs(in);
}

}  // namespace
}  // namespace dosa::bench

int main(int argc, char** argv) {
  using namespace dosa::bench;
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "device");
  gpu = properties.name;
  multiprocessors = properties.multiProcessorCount;
  if (argc > 1) repeats = std::max(std::atoi(argv[1]), 1);
  constexpr std::int64_t K = 1024;
  for (const int heads : {32, 64}) {
    bench_score(heads, 4 * K, 128 * K);
    bench_score(heads, 4 * K, 1024 * K);
    bench_score(heads, 16 * K, 128 * K);
    bench_score(heads, 16 * K, 512 * K);
    bench_score(heads, 16 * K, 1024 * K);
    bench_refine(heads, 4 * K, 512 * K);
  }
  bench_screen(4 * K, 128 * K);
  bench_screen(16 * K, 1024 * K);
  check(cudaDeviceSynchronize(), "end");
  return 0;
}
