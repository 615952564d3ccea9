// Times between CUDA events, and their median.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cuda/check.cuh"

namespace dosa::bench {

/// Milliseconds that what `body` enqueues on `stream` takes.
template <class Body>
float elapsed_ms(cudaStream_t stream, const Body& body) {
  static cudaEvent_t start = nullptr, stop = nullptr;
  if (start == nullptr) {
    check(cudaEventCreate(&start));
    check(cudaEventCreate(&stop));
  }
  check(cudaEventRecord(start, stream));
  body();
  check(cudaEventRecord(stop, stream));
  check(cudaEventSynchronize(stop), "run");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, start, stop));
  return ms;
}

/// Of body(0), body(1), ... on the default stream, after one run to warm up.
template <class Body>
std::vector<float> times_ms(int repeats, const Body& body) {
  std::vector<float> times;
  for (int i = 0; i <= repeats; ++i) {
    const float ms = elapsed_ms(nullptr, [&] { body(i); });
    if (i > 0) times.push_back(ms);
  }
  return times;
}

inline float median(std::vector<float> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

template <class Body>
float median_ms(const Body& body) {
  return median(times_ms(5, body));
}

}  // namespace dosa::bench
