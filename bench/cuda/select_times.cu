// Times selection and writing on the device: rows x keys, by distribution. One line a case.
//
//   select_times [largest GiB of scores]
//
// Each time is the median of interleaved repeats by CUDA events. Scores do not fit the L2 cache unless the line says so
// by its size; small cases rotate among copies.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <vector>

#include "backend/cuda/stages.hpp"
#include "cuda/timing.cuh"

namespace {

using namespace dosa::cuda;
using dosa::bench::check;
using dosa::bench::median_ms;

enum class Values { bell, relu, rising, equal };
constexpr const char* kNames[] = {"bell", "relu", "rising", "equal"};

__device__ std::uint32_t hash(std::uint64_t x) {
  x *= 0x9E3779B97F4A7C15ULL;
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ULL;
  return static_cast<std::uint32_t>(x ^ x >> 32);
}

__global__ void fill(float* scores, std::int64_t rows, std::int64_t keys, Values values) {
  const std::int64_t cells = rows * keys;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < cells;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const float u = (static_cast<float>(hash(2 * i)) + 1) * 0x1p-32F,
                v = static_cast<float>(hash(2 * i + 1)) * 0x1p-32F;
    const float bell = sqrtf(-2 * logf(fminf(u, 1.0F))) * cospif(2 * v);
    const std::int64_t key = i % keys;
    switch (values) {
      case Values::bell: scores[i] = bell; break;
      case Values::relu: scores[i] = fmaxf(bell - 3.2F, 0.0F); break;  // 0.07 % positive
      case Values::rising: scores[i] = __uint_as_float(0x3F800000U + static_cast<std::uint32_t>(key)); break;
      case Values::equal: scores[i] = 1.0F; break;
    }
  }
}

__global__ void to_records(const float* scores, Record* records, std::int64_t count, std::int64_t keys) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::uint32_t bits = __float_as_uint(scores[i] + 0.0F);
    const std::uint32_t code = (bits & 0x80000000U) != 0 ? bits : 0x7FFFFFFFU - bits;
    records[i] = Record{code} << 32 | static_cast<std::uint32_t>(i % keys) << 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const double most = (argc > 1 ? std::atof(argv[1]) : 66.0) * 1073741824.0;
  int multiprocessors = 0;
  if (cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0) != cudaSuccess) {
    std::puts("no CUDA device");
    return 0;
  }
  struct Shape {
    std::int64_t rows, keys, slice;
    int topk;
  };
  const std::int64_t k = 1024;
  const Shape shapes[] = {
      {1, k * k, 0, 2048},        {8, k * k, 0, 2048},       {16, k * k, 0, 2048},     {64, k * k, 0, 2048},
      {1, 128 * k, 0, 2048},      {64, 128 * k, 0, 2048},    {200, k * k, 0, 2048},    {1024, k * k, 0, 2048},
      {16 * k, 128 * k, 0, 2048}, {16 * k, 16 * k, 0, 2048}, {16 * k, 4 * k, 0, 2048}, {4 * k, k * k, 64 * k, 2048},
      {4 * k, k * k, 0, 1},       {4 * k, k * k, 0, 512},    {4 * k, k * k, 0, 4096},  {16 * k, k * k, 0, 2048},
  };
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total));
  const double available = std::min(most, static_cast<double>(free) * 0.9);
  std::int64_t cells = 0;
  for (const Shape& s : shapes) {
    if (static_cast<double>(s.rows * s.keys) * 4 <= available) cells = std::max(cells, s.rows * s.keys);
  }
  float* scores = nullptr;
  Record* kept = nullptr;
  std::int32_t *count = nullptr, *ids = nullptr;
  check(cudaMalloc(&scores, cells * sizeof(float)));
  check(cudaMalloc(&kept, 16 * k * 4096 * sizeof(Record)));
  check(cudaMalloc(&count, 16 * k * sizeof(std::int32_t)));
  check(cudaMalloc(&ids, 16 * k * 4096 * sizeof(std::int32_t)));

  std::printf("%-7s %6s %8s %8s %5s %10s %8s %9s\n", "values", "rows", "keys", "slice", "K", "select ms", "TB/s",
              "write ms");
  for (const Values values : {Values::bell, Values::relu, Values::rising, Values::equal}) {
    for (const Shape& s : shapes) {
      if (s.rows * s.keys > cells || (values != Values::bell && s.rows * s.keys > (std::int64_t{4} << 30))) continue;
      if (values != Values::bell && s.topk != 2048) continue;
      const std::int64_t copies = std::clamp<std::int64_t>((std::int64_t{256} << 20) / (s.rows * s.keys), 1, 16);
      fill<<<multiprocessors * 8, 512>>>(scores, s.rows * copies, s.keys, values);
      check(cudaGetLastError());
      Inputs in{};
      in.nq = s.rows;
      in.nk = s.keys;
      const std::int64_t slice = s.slice > 0 ? s.slice : s.keys;
      const float select = median_ms([&](int i) {
        const float* at = scores + i % copies * s.rows * s.keys;
        for (std::int64_t key = 0; key < s.keys; key += slice) {
          check(launch_select_scores(
              {in, 0, s.rows, every_key(s.keys), key, std::min(key + slice, s.keys), at + key, s.keys, s.topk, key == 0, kept, count},
              multiprocessors, nullptr));
        }
      });
      const float write = median_ms([&](int) {
        check(launch_select_records({.rows = s.rows, .records = kept, .record_stride = s.topk, .record_count = count, .topk = s.topk, .kept = nullptr,
                                     .kept_count = nullptr, .output = {.in = in, .topk = s.topk, .ids = ids, .ids_stride = s.topk}},
                                    multiprocessors, nullptr));
      });
      std::printf("%-7s %6lld %8lld %8lld %5d %10.4f %8.3f %9.4f\n", kNames[static_cast<int>(values)],
                  static_cast<long long>(s.rows), static_cast<long long>(s.keys), static_cast<long long>(slice), s.topk,
                  select, static_cast<double>(s.rows * s.keys) * 4e-9 / select, write);
      std::fflush(stdout);
    }
  }

  // Records: a screened prefill, 16 K rows with so many survivors each.
  Record* records = nullptr;
  for (const std::int64_t each : {4 * k, 16 * k, 32 * k}) {
    const std::int64_t rows = 16 * k;
    check(cudaMalloc(&records, rows * each * sizeof(Record)));
    fill<<<multiprocessors * 8, 512>>>(scores, rows, each, Values::bell);
    to_records<<<multiprocessors * 8, 512>>>(scores, records, rows * each, each);
    const std::vector<std::int32_t> counts(rows, static_cast<std::int32_t>(each));
    check(cudaMemcpy(ids, counts.data(), rows * sizeof(std::int32_t), cudaMemcpyHostToDevice));
    const float select = median_ms([&](int) {
      check(launch_select_records({rows, records, each, ids, 2048, kept, count}, multiprocessors, nullptr));
    });
    std::printf("records %6lld %8lld %8s %5d %10.4f %8.3f\n", static_cast<long long>(rows),
                static_cast<long long>(each), "-", 2048, select, static_cast<double>(rows * each) * 8e-9 / select);
    check(cudaFree(records));
  }
  check(cudaDeviceSynchronize());
  return 0;
}
