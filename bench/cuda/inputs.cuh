// Inputs of a benchmark, made on the device: normal rows quantised to E4M3 by their largest component, weights of which a
// third is positive, causal ranges with the queries at the end of the keys.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "backend/cuda/stages.hpp"
#include "cuda/check.cuh"

namespace dosa::bench {

__device__ inline std::uint32_t mix(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return static_cast<std::uint32_t>(x >> 32);
}

__device__ inline float normal(std::uint64_t seed) {
  const float u = (static_cast<float>(mix(2 * seed)) + 1.0F) * 0x1p-32F;
  const float v = static_cast<float>(mix(2 * seed + 1)) * 0x1p-32F;
  return sqrtf(-2.0F * logf(fminf(u, 1.0F))) * cospif(2.0F * v);
}

/// One warp a row of 128.
static __global__ void make_rows(std::uint8_t* rows, float* scale, std::int64_t count, std::uint64_t seed) {
  const std::int64_t row = (blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x) / 32;
  const unsigned lane = threadIdx.x % 32;
  if (row >= count) return;
  float x[4];
  float largest = 1e-4F;
  for (unsigned i = 0; i < 4; ++i) {
    x[i] = normal(seed + static_cast<std::uint64_t>(row) * 128 + lane * 4 + i);
    largest = fmaxf(largest, fabsf(x[i]));
  }
  for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, d));
  const float s = largest / 448.0F;
  std::uint32_t packed = 0;
  for (unsigned i = 0; i < 4; ++i) {
    packed |= static_cast<std::uint32_t>(__nv_cvt_float_to_fp8(x[i] / s, __NV_SATFINITE, __NV_E4M3)) << (8 * i);
  }
  reinterpret_cast<std::uint32_t*>(rows)[row * 32 + lane] = packed;
  if (scale != nullptr && lane == 0) scale[row] = s;
}

static __global__ void make_weights(float* w, std::int64_t count, std::uint64_t seed) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (i < count) w[i] = 0.01F * (normal(seed + static_cast<std::uint64_t>(i)) - 0.5F);
}

static __global__ void make_ranges(std::int32_t* ks, std::int32_t* ke, std::int64_t nq, std::int64_t nk) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (i >= nq) return;
  ks[i] = 0;
  ke[i] = static_cast<std::int32_t>(nk - nq + i + 1);
}

inline cuda::Inputs make_inputs(int heads, std::int64_t nq, std::int64_t nk) {
  auto* q = allocate<std::uint8_t>(nq * heads * 128);
  auto* k = allocate<std::uint8_t>(nk * 128);
  auto* k_scale = allocate<float>(nk);
  auto* w = allocate<float>(nq * heads);
  auto* ks = allocate<std::int32_t>(nq);
  auto* ke = allocate<std::int32_t>(nq);
  const auto blocks = [](std::int64_t threads) { return static_cast<unsigned>((threads + 255) / 256); };
  make_rows<<<blocks(nq * heads * 32), 256>>>(q, nullptr, nq * heads, 1ULL << 40);
  make_rows<<<blocks(nk * 32), 256>>>(k, k_scale, nk, 2ULL << 40);
  make_weights<<<blocks(nq * heads), 256>>>(w, nq * heads, 3ULL << 40);
  make_ranges<<<blocks(nq), 256>>>(ks, ke, nq, nk);
  check(cudaDeviceSynchronize(), "inputs");
  return {.q = q, .k = k, .k_scale = k_scale, .w = w, .ks = ks, .ke = ke, .w_stride = heads, .nq = nq, .nk = nk, .heads = heads};
}

inline void free_inputs(const cuda::Inputs& in) {
  for (const void* p : {static_cast<const void*>(in.q), static_cast<const void*>(in.k), static_cast<const void*>(in.k_scale),
                        static_cast<const void*>(in.w), static_cast<const void*>(in.ks), static_cast<const void*>(in.ke)}) {
    cudaFree(const_cast<void*>(p));
  }
}

template <class T>
std::vector<T> download(const T* from, std::size_t count) {
  std::vector<T> to(count);
  check(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost), "download");
  return to;
}

}  // namespace dosa::bench
