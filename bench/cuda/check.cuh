// Calls that must succeed, and device memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <source_location>

namespace dosa::bench {

inline void check(cudaError_t error, const char* what = "call", std::source_location at = std::source_location::current()) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s:%u: %s: %s\n", at.file_name(), static_cast<unsigned>(at.line()), what, cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
T* allocate(std::size_t count) {
  void* p = nullptr;
  check(cudaMalloc(&p, count * sizeof(T)), "cudaMalloc");
  return static_cast<T*>(p);
}

}  // namespace dosa::bench
