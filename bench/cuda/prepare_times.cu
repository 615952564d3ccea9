// Times the stages before the screen on random activations: keys, winners, seed, tau, predict, certify. One line a
// case.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <vector>

#include "backend/cuda/prepare.hpp"
#include "cuda/timing.cuh"

namespace {

using namespace dosa::cuda;
using dosa::bench::check;
using dosa::bench::median_ms;
using dosa::bench::allocate;

__device__ float bell(std::uint64_t i) {
  std::uint64_t x = i * 0x9E3779B97F4A7C15ULL;
  x = (x ^ x >> 32) * 0xD6E8FEB86659FD93ULL;
  x ^= x >> 29;
  const float u = (static_cast<float>(x & 0xFFFFFF) + 1) * 0x1p-24F, v = static_cast<float>(x >> 40) * 0x1p-24F;
  return sqrtf(-2 * logf(u)) * cospif(2 * v);
}

__global__ void fill_bytes(std::uint8_t* out, std::int64_t count, float size, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    out[i] = __nv_cvt_float_to_fp8(size * (bell(i + seed) + 0.5F * bell(i % 128 + 7)), __NV_SATFINITE, __NV_E4M3);
  }
}

__global__ void fill_floats(float* out, std::int64_t count, float mean, float size, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    out[i] = mean + size * bell(i + seed);
  }
}

}  // namespace

int main() {
  int multiprocessors = 0;
  if (cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0) != cudaSuccess) {
    std::puts("no CUDA device");
    return 0;
  }
  constexpr std::int64_t nq = 16384, nk = 1 << 20;
  constexpr int topk = 2048;
  const int blocks = multiprocessors * 8;
  auto* k = allocate<std::uint8_t>(nk * kDim);
  auto* scale = allocate<float>(nk);
  auto* rho = allocate<float>(nk);
  auto* inv_alpha = allocate<float>(nk);
  auto* exempt = allocate<std::uint32_t>(mask_words(nk));
  fill_bytes<<<blocks, 256>>>(k, nk * kDim, 100.0F, 1);
  fill_floats<<<blocks, 256>>>(scale, nk, 1.0F, 0.01F, 2);
  const float keys_ms =
      median_ms([&](int) { check(launch_keys({k, scale, nk, rho, inv_alpha, exempt, nullptr}, nullptr)); });
  std::printf("keys %lld: %.4f ms, %.2f TB/s\n", static_cast<long long>(nk), keys_ms, nk * (128 + 12) * 1e-9 / keys_ms);

  // Witnesses: a list of 2 K winners for every 64 rows.
  constexpr std::int64_t per_list = 64, lists = nq / per_list, ids_stride = 4 * topk;
  std::vector<std::int32_t> host(lists * 2 * topk);
  for (std::size_t i = 0; i < host.size(); ++i) host[i] = static_cast<std::int32_t>(i * 2654435761U % nk);
  auto* winners = allocate<std::int32_t>(lists * 2 * topk);
  auto* sorted = allocate<std::int32_t>(lists * 2 * topk);
  auto* sorted_count = allocate<std::int32_t>(lists);
  check(cudaMemcpy(winners, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
  const float winners_ms = median_ms([&](int) {
    check(launch_winners({lists, nullptr, winners, 2 * topk, nullptr, 2 * topk, nk, sorted, 2 * topk, sorted_count},
                         nullptr));
  });
  std::vector<std::int32_t> ends(nq);
  for (std::int64_t r = 0; r < nq; ++r) ends[r] = static_cast<std::int32_t>(nk - nq + r + 1);
  auto* ke = allocate<std::int32_t>(nq);
  check(cudaMemcpy(ke, ends.data(), nq * 4, cudaMemcpyHostToDevice));
  auto* ids = allocate<std::int32_t>(nq * ids_stride);
  auto* offset = allocate<std::int64_t>(nq);
  auto* count = allocate<std::int32_t>(nq);
  Inputs in{};
  in.k = k;
  in.k_scale = scale;
  in.ke = ke;
  in.nq = nq;
  in.nk = nk;
  const float seed_ms = median_ms([&](int) {
    check(launch_seed({in, 0, nq, 4, topk, sorted, 2 * topk, sorted_count, per_list, ids, ids_stride, offset, count},
                      nullptr));
  });
  auto* kept = allocate<Record>(nq * topk);
  auto* tau = allocate<float>(nq);
  check(cudaMemset(kept, 0x11, nq * topk * sizeof(Record)));
  const std::vector<std::int32_t> full(nq, topk);
  check(cudaMemcpy(count, full.data(), nq * 4, cudaMemcpyHostToDevice));
  const float tau_ms = median_ms([&](int) { check(launch_tau({nq, topk, kept, count, tau}, nullptr)); });
  std::printf("winners %.4f ms, seed %.4f ms, tau %.4f ms\n", winners_ms, seed_ms, tau_ms);

  for (const int heads : {32, 64}) {
    auto* q = allocate<std::uint8_t>(nq * heads * kDim);
    auto* w = allocate<float>(nq * heads);
    fill_bytes<<<blocks, 256>>>(q, nq * heads * kDim, 100.0F, 3);
    fill_floats<<<blocks, 256>>>(w, nq * heads, -0.3F, 1.0F, 4);
    fill_floats<<<blocks, 256>>>(tau, nq, 100.0F, 1.0F, 5);
    in.q = q;
    in.w = w;
    in.w_stride = heads;
    in.heads = heads;
    const CertifyInputs inputs{in, 0, nq, rho, inv_alpha, tau, false, 1.0F};
    constexpr std::int64_t stride = 128;
    auto* survivors = allocate<std::int32_t>(nq / stride * kBudgetCount);
    auto* sampled = allocate<std::int32_t>(nq / stride);
    auto* budget = allocate<std::uint8_t>(nq);
    const float predict_ms = median_ms([&](int) {
      check(launch_predict({inputs, stride / 2, stride, survivors, sampled}, nullptr));
      check(launch_choose({nq, nq, stride, survivors, sampled, 0.024, 1.4, 0.05, 2.0, budget}, nullptr));
    });
    auto* bound_rows = allocate<std::uint8_t>(nq * 32 * kDim);
    auto* weight = allocate<std::uint16_t>(nq * 30);
    auto* c = allocate<float>(nq);
    auto* sigma = allocate<float>(2 * nq);
    auto* lowered = allocate<float>(nq);
    auto* screened = allocate<std::uint8_t>(nq);
    auto* list = allocate<std::int32_t>((kBudgetCount + 1) * nq);
    auto* size = allocate<std::int32_t>(kBudgetCount + 1);
    std::printf("H = %d: predict and choose %.4f ms; certify", heads, predict_ms);
    for (const int b : {8, 16, 24}) {
      check(cudaMemset(budget, b, nq));
      const float ms = median_ms([&](int) {
        check(
            launch_certify({inputs, budget, 0, bound_rows, 32 * kDim, weight, 30, c, sigma, lowered, screened}, nullptr));
      });
      std::printf(" %d rows %.4f ms", b, ms);
    }
    const float lists_ms = median_ms([&](int) { check(launch_lists({nq, screened, list, size}, nullptr)); });
    std::printf("; lists %.4f ms\n", lists_ms);
    check(cudaFree(q));
    check(cudaFree(bound_rows));
  }
  check(cudaDeviceSynchronize());
  return 0;
}
